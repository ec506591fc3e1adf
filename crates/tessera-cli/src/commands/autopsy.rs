//! `tessera autopsy`: finds the rank that failed or blocks a run, from the flight records of its
//! ranks, or from the Flight Recorder dumps of a PyTorch run.

use std::path::PathBuf;

use tessera::terminal::print_stderr_line;
use tessera_tools::autopsy::{draw_findings, examine_run};
use tessera_tools::flight_dumps::{draw_flight_report, examine_flight_dumps, find_dumps};

use crate::output::{CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera autopsy out/demo-1                 a run that failed, was killed, or hangs right now
  tessera autopsy out/demo-1 --svg why       draw the mismatched or blocked collective, as why/diverged-1.svg
  tessera autopsy out/demo-1 --format json   for scripts: culprits, class, chain of waits, every rank
  tessera autopsy gathered/                  flight records of several hosts: rank-0.jsonl, rank-1.jsonl…
  tessera autopsy /tmp/nccl_trace            PyTorch's Flight Recorder dumps of NCCL: rank_0, rank_1…

An autopsy only reads files, so it can run at any time during the run. It reads record.jsonl, flight/ and plan/, and reports
records that are missing, truncated, or from another run.

Exit status: 0 no failure found, 1 the report names a failure, 2 the folder holds neither a record nor flight records.";

/// Find out which rank failed or blocks a run, at which collective, and which ranks wait for it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Run folder, a folder of flight records, or of PyTorch's Flight Recorder dumps
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// Format of the findings and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,

    /// Draw the findings as SVG files in this folder; existing drawings of the same name are
    /// replaced
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
}

/// Reads the flight records of a run and names the rank that failed or blocks the others.
pub fn run(args: &Args) -> CliResult {
    let name = args.dir.display().to_string();
    if let Some(dumps) = find_dumps(&args.dir).map_err(CliError::usage)? {
        let found = examine_flight_dumps(&dumps).map_err(CliError::usage)?;
        match args.format {
            OutputFormat::Text => write_stdout(&found.to_text(&name))?,
            OutputFormat::Json => write_stdout(&format!("{}\n", found.to_json()))?,
        }
        if let Some(folder) = &args.svg
            && let Some(file) = draw_flight_report(&found, folder)?
        {
            print_stderr_line(&format!("wrote {}", file.display()));
        }
        return Ok(if found.accuses() { EXIT_DIAGNOSTICS } else { 0 });
    }
    let found = examine_run(&args.dir).map_err(CliError::usage)?;
    match args.format {
        OutputFormat::Text => write_stdout(&found.to_text(&name))?,
        OutputFormat::Json => {
            let mut json = found.to_json();
            json["run"] = serde_json::Value::from(name);
            write_stdout(&format!("{json}\n"))?;
        }
    }
    if let Some(folder) = &args.svg {
        for file in draw_findings(&found, folder)? {
            print_stderr_line(&format!("wrote {}", file.display()));
        }
    }
    Ok(if found.has_problem() { EXIT_DIAGNOSTICS } else { 0 })
}
