//! Benchmarks: the model alone on one rank; a whole stream up to frames on disk; the verifier; the
//! latency of lockstep agreement; runs with killed processes, cut links and busy cores; long
//! streams; the search over mappings of one rack and of many.
//!
//! Each benchmark prints its result, with `--json` also as JSON on the last line. With `--save` it
//! writes the result and facts about the host to `bench/runs/`.

#![forbid(unsafe_code)]

mod dit;
mod failover;
mod false_positives;
mod harness;
mod lockstep;
mod partition;
mod process_list;
mod save;
mod search;
mod soak;
mod stats;
mod stream;
mod stream_process;
mod verifier;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tessera_base::{DiagnosticFormat, Diagnostics, render_all};

/// Benchmarks of Tessera on this machine. Build with --release and run on an idle machine.
#[derive(Debug, Parser)]
#[command(name = "tessera-bench", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    benchmark: Benchmark,
}

#[derive(Debug, Subcommand)]
enum Benchmark {
    FalsePositives(false_positives::Args),
    Dit(dit::Args),
    Verifier(verifier::Args),
    Failover(failover::Args),
    Lockstep(lockstep::Args),
    Soak(soak::Args),
    Partition(partition::Args),
    Search(search::Args),
    Stream(stream::Args),
    /// One rank of a stream. Internal: the benchmarks start this command.
    #[command(hide = true)]
    Rank,
    /// One rank with programs that do nothing. Internal: the benchmarks start this command.
    #[command(hide = true)]
    HarnessRank,
}

/// Output options of every benchmark.
#[derive(Debug, Clone, clap::Args)]
struct OutputArgs {
    /// Print the result as JSON on the last line
    #[arg(long)]
    json: bool,

    /// Save the result with facts about the host in a new folder of bench/runs
    #[arg(long)]
    save: bool,
}

fn main() -> ExitCode {
    let (name, output, outcome) = match Cli::parse().benchmark {
        Benchmark::FalsePositives(args) => {
            ("false-positives", args.output.clone(), false_positives::run(&args))
        }
        Benchmark::Dit(args) => ("dit", args.output.clone(), dit::run(&args)),
        Benchmark::Verifier(args) => ("verifier", args.output.clone(), verifier::run(&args)),
        Benchmark::Failover(args) => ("failover", args.output.clone(), failover::run(&args)),
        Benchmark::Lockstep(args) => ("lockstep", args.output.clone(), lockstep::run(&args)),
        Benchmark::Soak(args) => ("soak", args.output.clone(), soak::run(&args)),
        Benchmark::Partition(args) => ("partition", args.output.clone(), partition::run(&args)),
        Benchmark::Search(args) => ("search", args.output.clone(), search::run(&args)),
        Benchmark::Stream(args) => ("stream", args.output.clone(), stream::run(&args)),
        Benchmark::Rank => return ExitCode::from(u8::try_from(tessera::rank_main(|| {})).unwrap_or(1)),
        Benchmark::HarnessRank => return ExitCode::from(u8::try_from(harness::rank_main()).unwrap_or(1)),
    };
    let printed = outcome.and_then(|result| print_result(name, &output, &result));
    match printed {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The result of a benchmark: the text for people and the numbers.
struct BenchResult {
    text: String,
    numbers: serde_json::Value,
}

fn print_result(name: &str, output: &OutputArgs, result: &BenchResult) -> anyhow::Result<()> {
    if cfg!(debug_assertions) {
        eprintln!("note: this is a debug build; use --release");
    }
    if output.save {
        eprintln!("saved in {}", save::save_result(name, &result.numbers)?.display());
    }
    println!("{}", result.text);
    if output.json {
        println!("{}", result.numbers);
    }
    Ok(())
}

/// Returns an error with the text of the diagnostics, without lines of their sources.
fn diagnostics_error(ds: Diagnostics) -> anyhow::Error {
    anyhow::anyhow!(render_all(&ds, DiagnosticFormat::Text, &|_| None))
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Cli::command().debug_assert();
    }
}
