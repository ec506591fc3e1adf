//! Benchmarks: the model alone on one rank; experts under imbalanced routing; the verifier; the latency of lockstep agreement; runs
//! with killed processes, cut links and busy cores; faults between four hosts; campaigns of drawn faults; long streams; clients of a
//! served stream; the search over mappings of one rack and of many.
//!
//! Each benchmark prints its result, with `--json` also as JSON on the last line. With `--save` it
//! writes the result and facts about the host to `bench/runs/`.

#![forbid(unsafe_code)]

mod dit;
mod endings;
mod experts;
mod failover;
mod false_positives;
mod faults;
mod harness;
mod hosts;
mod ledger;
mod lockstep;
mod namespaces;
mod partition;
mod process_list;
mod save;
mod search;
mod serve;
mod soak;
mod stats;
mod stream_process;
mod verifier;

use std::process::ExitCode;

use anyhow::Context;
use clap::{Parser, Subcommand};
use tessera_base::{DiagnosticFormat, Diagnostics, render_all};

/// Benchmarks of Tessera on this machine. Build with --release and run on an idle machine.
#[derive(Debug, Parser)]
#[command(name = "tessera-bench", disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    benchmark: Benchmark,

    /// Print the result as JSON on the last line
    #[arg(long, global = true)]
    json: bool,

    /// Save the result with facts about the host in a new folder of bench/runs
    #[arg(long, global = true)]
    save: bool,
}

#[derive(Debug, Subcommand)]
enum Benchmark {
    FalsePositives(false_positives::Args),
    Dit(dit::Args),
    Experts(experts::Args),
    Verifier(verifier::Args),
    Failover(failover::Args),
    Faults(faults::Args),
    Lockstep(lockstep::Args),
    Ledger(ledger::Args),
    Soak(soak::Args),
    Partition(partition::Args),
    Hosts(hosts::Args),
    Search(search::Args),
    Serve(serve::Args),
    /// One rank with programs that do nothing. Internal: the benchmarks start this command.
    #[command(hide = true)]
    HarnessRank,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let outcome = match &cli.benchmark {
        Benchmark::FalsePositives(args) => false_positives::run(args),
        Benchmark::Dit(args) => dit::run(args),
        Benchmark::Experts(args) => experts::run(args),
        Benchmark::Verifier(args) => verifier::run(args),
        Benchmark::Failover(args) => failover::run(args),
        Benchmark::Faults(args) => faults::run(args),
        Benchmark::Lockstep(args) => lockstep::run(args),
        Benchmark::Ledger(args) => ledger::run(args),
        Benchmark::Soak(args) => soak::run(args),
        Benchmark::Partition(args) => partition::run(args),
        Benchmark::Hosts(args) => hosts::run(args),
        Benchmark::Search(args) => search::run(args),
        Benchmark::Serve(args) => serve::run(args),
        Benchmark::HarnessRank => return ExitCode::from(u8::try_from(harness::rank_main()).unwrap_or(1)),
    };
    let finish = |result: BenchResult| {
        print_result(&cli, &result)?;
        soak::check_growth(&result.numbers)
    };
    match outcome.and_then(finish) {
        Ok(()) => ExitCode::SUCCESS,
        Err(e) => {
            eprintln!("{e:#}");
            ExitCode::FAILURE
        }
    }
}

/// The result of a benchmark: the text for people, and the numbers with the name of the benchmark
/// under `bench`.
struct BenchResult {
    text: String,
    numbers: serde_json::Value,
}

fn print_result(cli: &Cli, result: &BenchResult) -> anyhow::Result<()> {
    if cfg!(debug_assertions) {
        eprintln!("note: this is a debug build; use --release");
    }
    if cli.save {
        let name = result.numbers["bench"].as_str().context("the numbers have no name")?;
        eprintln!("saved in {}", save::save_result(name, &result.numbers)?.display());
    }
    println!("{}", result.text);
    if cli.json {
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
