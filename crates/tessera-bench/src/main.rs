//! What is measured: the network alone on one rank, a whole stream up to frames on disk, the judge, and what a run costs
//! and survives: killed and cut-off processes, busy cores, long streams, and the time of an agreement; the search over
//! mappings of a rack and of many.
//!
//! Each benchmark prints its result, as JSON on one last line when asked, and keeps it with facts of the host in
//! `bench/runs/` only when told to.

mod calm;
mod child;
mod dit;
mod judge;
mod kills;
mod lockstep;
mod long;
mod partition;
mod procs;
mod rig;
mod save;
mod search;
mod stats;
mod stream;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tessera_base::{Diagnostics, Format, render_all};

/// Times what Tessera does on this machine. Build with --release, run on an idle machine.
#[derive(Debug, Parser)]
#[command(name = "tessera-bench", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, Subcommand)]
enum What {
    Calm(calm::Args),
    Dit(dit::Args),
    Judge(judge::Args),
    Kills(kills::Args),
    Lockstep(lockstep::Args),
    Long(long::Args),
    Partition(partition::Args),
    Search(search::Args),
    Stream(stream::Args),
    /// One rank of a stream. Started by the benchmark, never by hand.
    #[command(hide = true)]
    Rank,
    /// One rank with programs that do nothing. Started by the benchmark, never by hand.
    #[command(hide = true)]
    RigRank,
}

/// How every benchmark gives its result.
#[derive(Debug, Clone, clap::Args)]
struct Output {
    /// Print the result as JSON on the last line
    #[arg(long)]
    json: bool,

    /// Keep the result with facts of the host in a new folder of bench/runs
    #[arg(long)]
    save: bool,
}

fn main() -> ExitCode {
    let (name, output, outcome) = match Cli::parse().what {
        What::Calm(args) => ("calm", args.output.clone(), calm::run(&args)),
        What::Dit(args) => ("dit", args.output.clone(), dit::run(&args)),
        What::Judge(args) => ("judge", args.output.clone(), judge::run(&args)),
        What::Kills(args) => ("kills", args.output.clone(), kills::run(&args)),
        What::Lockstep(args) => ("lockstep", args.output.clone(), lockstep::run(&args)),
        What::Long(args) => ("long", args.output.clone(), long::run(&args)),
        What::Partition(args) => ("partition", args.output.clone(), partition::run(&args)),
        What::Search(args) => ("search", args.output.clone(), search::run(&args)),
        What::Stream(args) => ("stream", args.output.clone(), stream::run(&args)),
        What::Rank => return ExitCode::from(u8::try_from(tessera::rank_main(|| {})).unwrap_or(1)),
        What::RigRank => return ExitCode::from(u8::try_from(rig::rank_main()).unwrap_or(1)),
    };
    let told = outcome.and_then(|result| tell(name, &output, &result));
    match told {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

/// A result: what a person reads, and the numbers.
struct Measured {
    text: String,
    numbers: serde_json::Value,
}

fn tell(name: &str, output: &Output, result: &Measured) -> anyhow::Result<()> {
    if cfg!(debug_assertions) {
        eprintln!("note: this build is not optimised; add --release");
    }
    if output.save {
        eprintln!("kept in {}", save::save(name, &result.numbers)?.display());
    }
    println!("{}", result.text);
    if output.json {
        println!("{}", result.numbers);
    }
    Ok(())
}

/// Diagnostics as an error of this binary.
fn refused(ds: Diagnostics) -> anyhow::Error {
    anyhow::anyhow!(render_all(&ds, Format::Text, &|_| None))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Cli::command().debug_assert();
    }
}
