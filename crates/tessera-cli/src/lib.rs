//! The command line of `tessera`: parses the arguments, calls `tessera`, `tessera-estimate` and
//! `tessera-tools`, and renders the result as text or JSON with an exit status.
//!
//! One file per subcommand, in `commands`. This crate contains no planning, verification or runtime
//! logic. It is a library, so that the binary of this crate and the Python package run the same program.
//!
//! Exit status: 0 success, 1 diagnostics, 2 usage error, 130 interrupted, 10 to 29 one per class of
//! run failure.

#![forbid(unsafe_code)]
#![warn(clippy::print_stderr, clippy::print_stdout)]

pub mod codes;
mod commands;
#[cfg(test)]
mod deploy_files;
mod flags;
mod output;
mod parse;
mod progress;

pub use parse::current_binary;

use std::ffi::OsString;

use clap::{Parser, Subcommand};
use tessera::program_command::ProgramCommand;
use tessera_base::{Diagnostic, DiagnosticFormat};

use commands::{
    autopsy, bench, bringup, check, doctor, drill, explain, generate, join, launch, lint, measure, models,
    parity, plan, record, serve, stream, wire,
};
use output::{CliError, CliResult, EXIT_USAGE};
use parse::invalid_argument;

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo                              stream the demo model on one rank
  tessera stream models/demo --mesh tp=2 --chunks 24      the same on two ranks
  tessera generate models/tales --prompt 'The red circle' continue a text with a language model
  tessera plan models/demo --mesh tp=2 --out my-plan      plan and verify without running
  tessera check my-plan                                   verify a saved plan again
  tessera autopsy out/demo-1                              find out which rank failed or blocks a run
  tessera explain T0602                                   print the documentation of a diagnostic code

Exit status: 0 success, 1 diagnostics, 2 usage error, 130 interrupted, 10-29 a run failed (one status per failure class).";

/// Map a model onto a rack of GPUs, verify before launch that its ranks cannot deadlock or diverge,
/// run them in lockstep, and report what happened
#[derive(Debug, Parser)]
#[command(name = "tessera", version, after_help = EXAMPLES, disable_help_subcommand = true)]
struct Cli {
    #[command(subcommand)]
    command: CliCommand,
}

#[derive(Debug, Subcommand)]
enum CliCommand {
    Plan(Box<plan::Args>),
    Check(check::Args),
    Lint(lint::Args),
    Doctor(Box<doctor::Args>),
    Drill(drill::Args),
    Measure(measure::Args),
    Models(models::Args),
    Autopsy(autopsy::Args),
    Bringup(bringup::Args),
    Record(record::Args),
    Wire(wire::Args),
    Bench(Box<bench::Args>),
    Explain(explain::Args),
    Stream(Box<stream::Args>),
    Serve(Box<serve::Args>),
    Launch(launch::Args),
    Generate(Box<generate::Args>),
    Parity(Box<parity::Args>),
    Join(join::Args),
    /// Run one rank of a stream. `tessera stream` starts this; do not run it directly.
    #[command(hide = true)]
    Rank,
    /// Run one rank of a benchmark. `tessera bench` starts this; do not run it directly.
    #[command(hide = true)]
    BenchRank {
        rank: u32,
        orders: String,
    },
}

/// Runs a command line, whose first argument is the name of the program, and returns its exit status. `program` runs
/// this function with the arguments that follow it: rank processes are started with it.
pub fn run(arguments: Vec<OsString>, program: Result<ProgramCommand, Diagnostic>) -> u8 {
    handle_file_size_signal();
    if let Some(argument) = arguments.iter().find(|argument| argument.to_str().is_none()) {
        let argument = argument.to_string_lossy();
        return CliError::usage(invalid_argument(
            "the argument",
            &argument,
            "it is not UTF-8, and plans and records hold paths as text",
            "models/demo",
        ))
        .print(DiagnosticFormat::Text);
    }
    let command = match Cli::try_parse_from(arguments) {
        Ok(cli) => cli.command,
        Err(shown) => {
            // Help goes to standard output. Where nobody reads it, nothing is left to report.
            let _ = shown.print();
            return u8::try_from(shown.exit_code()).unwrap_or(EXIT_USAGE);
        }
    };
    let (format, outcome): (_, CliResult) = match command {
        CliCommand::Plan(args) => (args.format.into(), plan::run(&args)),
        CliCommand::Check(args) => (args.format, check::run(&args)),
        CliCommand::Lint(args) => (args.format, lint::run(&args)),
        CliCommand::Doctor(args) => (args.format.into(), doctor::run(&args)),
        CliCommand::Measure(args) => (args.format.into(), measure::run(&args)),
        CliCommand::Models(args) => (args.format().into(), models::run(&args)),
        CliCommand::Drill(args) => (args.format.into(), drill::run(&args, program)),
        CliCommand::Autopsy(args) => (args.format.into(), autopsy::run(&args)),
        CliCommand::Record(args) => (args.format().into(), record::run(&args)),
        CliCommand::Wire(args) => (args.format().into(), wire::run(&args)),
        CliCommand::Bringup(args) => (args.format.into(), bringup::run(&args, program)),
        CliCommand::Explain(args) => (args.format.into(), explain::run(&args)),
        CliCommand::Generate(args) => (args.format.into(), generate::run(&args, program)),
        CliCommand::Launch(args) => (args.format.into(), launch::run(&args)),
        CliCommand::Parity(args) => (args.format.into(), parity::run(&args)),
        CliCommand::Join(args) => (DiagnosticFormat::Text, join::run(&args)),
        CliCommand::Stream(args) => (args.format.into(), stream::run(&args, program)),
        CliCommand::Serve(args) => (args.format.into(), serve::run(&args, program)),
        CliCommand::Bench(args) => (args.format().into(), bench::run(&args, program)),
        CliCommand::BenchRank { rank, orders } => return bench::run_rank(rank, &orders),
        CliCommand::Rank => {
            return u8::try_from(tessera::rank_main(leave_first_stop_to_launcher)).unwrap_or(1);
        }
    };
    match outcome {
        Ok(status) => status,
        Err(refusal) => refusal.print(format),
    }
}

/// Returns the documentation of a diagnostic code; `None` for an unknown one.
#[must_use]
pub fn explain_code(id: &str) -> Option<&'static str> {
    output::full_registry().get(id).map(|code| code.page)
}

/// Registers a handler for `SIGXFSZ`. Without one, exceeding the file size limit kills the process;
/// with one, the write returns an error that can be reported like a full disk.
fn handle_file_size_signal() {
    let flag = std::sync::Arc::default();
    // If the registration fails, the signal keeps its default action.
    let _ = signal_hook::flag::register(signal_hook::consts::SIGXFSZ, flag);
}

/// Leaves the first stop request to the launcher. A request that reaches every process of a run is
/// answered by the launcher, which makes the leader drain. A second request ends a rank as if
/// nothing handled it.
fn leave_first_stop_to_launcher() {
    use signal_hook::consts::{SIGINT, SIGTERM};
    let stop_requested = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
    for signal in [SIGINT, SIGTERM] {
        // The order matters: the conditional default reads the flag before the second handler sets
        // it.
        let _ =
            signal_hook::flag::register_conditional_default(signal, std::sync::Arc::clone(&stop_requested))
                .and_then(|_| signal_hook::flag::register(signal, std::sync::Arc::clone(&stop_requested)));
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
