//! `tessera bringup`: evaluates the bring-up checklist, from the first run to full scale, on
//! recorded runs.

use std::path::PathBuf;

use tessera::program_command::ProgramCommand;
use tessera::terminal::print_stderr_line;
use tessera_base::{Diagnostic, GateStatus};
use tessera_estimate::load_thresholds;
use tessera_tools::bringup::{BringupGoals, ItemStatus, check_bringup, check_ship};
use tessera_tools::gate_record::{GateRecord, RecordedGate};

use crate::output::{CliResult, EXIT_DIAGNOSTICS, OutputFormat, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo --mesh tp=2 --out a        record a run; repeat with --out b and --out c
  tessera bringup a b c                                 evaluate the checklist on the three runs
  tessera bringup a b c --format json | jq '.[0]'       print the first item as JSON
  tessera bringup a b c --ship long                     evaluate the ship checklist; long is a run of 10,000 chunks

The checklist has six items, in the order of a bring-up. Each item is one check of the runs:

  rank map            all runs have the same mesh, with each rank on the same device
  frozen kernels      all runs completed; a program that is first run after the warm-up ends a run (T0752)
  expert all-to-all   the all-to-all of the experts is fused, and its FP8 wire format is validated; always open for a plan
                      that routes experts, because runs do not record the error of this format
  KV cache residency  enough of the cache reads hit device memory
  overlap             compute hides enough of the collectives, and pipeline bubbles are small
  golden hash         three runs or more have the same hash of all latents

An item passes only if no earlier item is open or failed. The output has one line per item, with its status, its requirement
and the numbers found:

  pass     the runs meet the requirement
  n/a      the item does not apply to this plan
  blocked  the runs meet the requirement, but an earlier item is open or failed
  open     the runs recorded nothing that answers the item
  fail     the runs do not meet the requirement

The ship checklist has eight items of its own: the plan, parity, one hash, the gates of a long run, the drills and their self-test.
It stops at the first item that does not pass, and the last line is green or red. The last two items take some minutes.

Exit status: 0 every item passes or does not apply, 1 an item is open, blocked or failed, or a folder holds no run.";

/// Evaluate the bring-up checklist on recorded runs: six checks, in the order in which a new
/// machine is brought from a first run to production
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Run folders, oldest first: runs with the same plan, prompts, seed and number of chunks
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,

    /// TOML file with other limits for the overlap ratio, the bubble and the cache hit rate, in the
    /// format of crates/tessera-plan/gates.toml
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,

    /// Also write the items with the runs' plan, build and machine to this file, for `tessera stream
    /// --performance`
    #[arg(long, value_name = "FILE")]
    pub gate_record: Option<PathBuf>,

    /// Evaluate the ship checklist instead, with this run of 10,000 chunks or more, and the drills of this
    /// machine
    #[arg(long, value_name = "RUN", conflicts_with_all = ["gates", "gate_record"])]
    pub ship: Option<PathBuf>,

    /// Format of the checklist and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Evaluates the bring-up checklist on recorded runs.
pub fn run(args: &Args, program: Result<ProgramCommand, Diagnostic>) -> CliResult {
    let items = match &args.ship {
        Some(long) => check_ship(&program?, &args.runs, long, &mut |title| {
            print_stderr_line(&format!("{title}…"));
        })?,
        None => check_bringup(&args.runs, &BringupGoals::from(&load_thresholds(args.gates.as_deref())?))?,
    };
    let fine = items.iter().all(|i| matches!(i.status, ItemStatus::Pass | ItemStatus::NotApplicable));
    if let Some(path) = &args.gate_record {
        let recorded = items.iter().map(|i| RecordedGate {
            gate: i.title.to_string(),
            value: i.detail.clone(),
            verdict: GateStatus::from(i.status).name().to_string(),
        });
        GateRecord::from_runs("bringup", &args.runs, recorded.collect())?.write(path)?;
    }
    match args.format {
        OutputFormat::Text => {
            let rows = items.iter().zip(1..).map(|(item, number)| {
                let (status, title) = (item.status.name().to_string(), item.title.to_string());
                [number.to_string(), status, title, item.detail.clone()]
            });
            let verdict = match (&args.ship, fine) {
                (None, _) => "",
                (_, true) => "green\n",
                (_, false) => "red\n",
            };
            write_stdout(&(format_table(rows, [true, false, false, false]) + verdict))?;
        }
        OutputFormat::Json => {
            let list: Vec<serde_json::Value> = items
                .iter()
                .map(|i| serde_json::json!({"item": i.title, "status": i.status.name(), "detail": i.detail}))
                .collect();
            write_stdout(&format!("{}\n", serde_json::Value::from(list)))?;
        }
    }
    Ok(if fine { 0 } else { EXIT_DIAGNOSTICS })
}
