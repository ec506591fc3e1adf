//! `tessera bringup`: evaluates the bring-up checklist, from the first run to full scale, on
//! recorded runs.

use std::path::PathBuf;

use tessera::bringup::{BringupGoals, ItemStatus, check_bringup};
use tessera::search::load_thresholds;

use crate::output::{CliResult, EXIT_DIAGNOSTICS, OutputFormat, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo --mesh tp=2 --out a        repeat for b and c; then
  tessera bringup a b c                                 evaluate every item on the three runs
  tessera bringup a b c --format json | jq '.[0]'

The items are in the order of a bring-up. An item passes only after all earlier items pass; until then an item that would
pass is shown as `blocked`, with its numbers.

Exit status: 0 every item passes or does not apply, 1 an item is open, blocked or failed.";

/// Check from recorded runs how far the bring-up of a machine is, from the first run to full scale
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Run folders of the same request, oldest first
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,

    /// TOML file with limits of the gates, as for `tessera plan`
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,

    /// Output format
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Evaluates the bring-up checklist on recorded runs.
pub fn run(args: &Args) -> CliResult {
    let items = check_bringup(&args.runs, &BringupGoals::from(&load_thresholds(args.gates.as_deref())?))?;
    match args.format {
        OutputFormat::Text => {
            let rows: Vec<Vec<String>> = items
                .iter()
                .enumerate()
                .map(|(i, item)| {
                    vec![
                        (i + 1).to_string(),
                        item.status.name().to_string(),
                        item.title.to_string(),
                        item.detail.clone(),
                    ]
                })
                .collect();
            write_stdout(&format_table(&rows, &[true, false, false, false]))?;
        }
        OutputFormat::Json => {
            let list: Vec<serde_json::Value> = items
                .iter()
                .map(|i| serde_json::json!({"item": i.title, "status": i.status.name(), "detail": i.detail}))
                .collect();
            write_stdout(&format!("{}\n", serde_json::Value::from(list)))?;
        }
    }
    let fine = items.iter().all(|i| matches!(i.status, ItemStatus::Pass | ItemStatus::NotApplicable));
    Ok(if fine { 0 } else { EXIT_DIAGNOSTICS })
}
