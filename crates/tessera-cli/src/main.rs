//! The binary `tessera`: verbs of a command line, turned into calls of the door and back into text and an exit status.
//!
//! One file per verb. This crate refuses to know how anything is planned, judged or run.
//!
//! Exit status: 0 fine, 1 diagnostics, 2 usage, 130 interrupted, 10 to 29 one per class of failure of a run.

mod autopsy;
mod bench;
mod bringup;
mod check;
mod doctor;
mod drill;
mod estimate;
mod explain;
mod join;
mod measure;
mod options;
mod plan;
mod progress;
mod say;
mod stream;
mod values;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

use say::Outcome;

/// Codes this binary raises.
pub const CODES: &[&tessera_base::Code] =
    &[&values::T0030, &options::T0031, &explain::T0032, &say::T0033, &drill::T0038];

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo                              a video from the demo model, one rank
  tessera stream models/demo --mesh tp=2 --chunks 24      the same over two ranks
  tessera plan models/demo --mesh tp=2 --out my-plan      plan only, and keep it
  tessera check my-plan                                   judge a plan again
  tessera autopsy out/demo-1                              who broke a run, or hangs it now
  tessera explain T0602                                   what a code means

Exit status: 0 fine, 1 diagnostics, 2 usage, 130 interrupted, 10-29 a run failed (one number per kind of failure).";

/// Maps a model onto ranks, proves that they cannot hang or drift, runs them in lockstep, and shows what happened.
#[derive(Debug, Parser)]
#[command(name = "tessera", version, after_help = EXAMPLES, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    Plan(Box<plan::Args>),
    Check(check::Args),
    Doctor(Box<doctor::Args>),
    Drill(drill::Args),
    Measure(measure::Args),
    Autopsy(autopsy::Args),
    Bringup(bringup::Args),
    Bench(Box<bench::Args>),
    Explain(explain::Args),
    Stream(Box<stream::Args>),
    /// One rank of a stream. Started by `tessera stream`, never by hand.
    #[command(hide = true)]
    Rank,
    /// One rank of a benchmark. Started by `tessera bench`, never by hand.
    #[command(hide = true)]
    BenchRank {
        rank: u32,
        orders: String,
    },
}

fn main() -> ExitCode {
    outlive_file_size_limit();
    let (format, outcome): (_, Outcome) = match Cli::parse().verb {
        Verb::Plan(args) => (args.format.into(), plan::run(&args)),
        Verb::Check(args) => (args.format.into(), check::run(&args)),
        Verb::Doctor(args) => (args.format.into(), doctor::run(&args)),
        Verb::Measure(args) => (args.format.into(), measure::run(&args)),
        Verb::Drill(args) => (args.format.into(), drill::run(&args)),
        Verb::Autopsy(args) => (args.format.into(), autopsy::run(&args)),
        Verb::Bringup(args) => (args.format.into(), bringup::run(&args)),
        Verb::Explain(args) => (args.format.into(), explain::run(&args)),
        Verb::Stream(args) => (args.format.into(), stream::run(&args)),
        Verb::Bench(args) => (args.format().into(), bench::run(&args)),
        Verb::BenchRank { rank, orders } => return ExitCode::from(bench::rank(rank, &orders)),
        Verb::Rank => {
            return ExitCode::from(u8::try_from(tessera::rank_main(leave_to_launcher)).unwrap_or(1));
        }
    };
    match outcome {
        Ok(status) => ExitCode::from(status),
        Err(refusal) => refusal.tell(format),
    }
}

/// A limit on the size of files ends a process by a signal unless something handles it; handled, the write fails
/// with an error that can be told, like that of a full disk.
fn outlive_file_size_limit() {
    let seen = std::sync::Arc::default();
    // Where it cannot be handled the signal does what it always did.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, seen);
}

/// A request to stop that reaches every process of a run is the launcher's to answer: it has the leader drain. A second one
/// ends a rank as if nothing handled it.
fn leave_to_launcher() {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let asked = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
    for signal in [SIGINT, SIGTERM] {
        // In this order: what looks at the flag runs before what sets it.
        let _ = signal_hook::flag::register_conditional_default(signal, std::sync::Arc::clone(&asked))
            .and_then(|_| signal_hook::flag::register(signal, std::sync::Arc::clone(&asked)));
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        super::Cli::command().debug_assert();
    }
}
