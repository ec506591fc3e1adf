//! `tessera bringup`: the checklist from the first run to scale, answered from runs.

use std::path::PathBuf;

use tessera::bringup::{Goals, Standing, bringup};
use tessera::search::thresholds;

use crate::say::{DIAGNOSED, Outcome, Shape, out, table};

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo --mesh tp=2 --out a        three times, as a, b and c; then
  tessera bringup a b c                                 every item, from what the three runs left behind
  tessera bringup a b c --format json | jq '.[0]'

The items stand in the order in which a machine is brought up. None is green while one before it is not: such a one is
shown as `held`, with its numbers.

Exit status: 0 every item passes or does not apply, 1 one is open, held or failed.";

/// Is this machine ready for more? The checklist from first run to scale
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders of runs of one request, oldest first
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,

    /// File of limits for the gates, as of `tessera plan`
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    let items = bringup(&args.runs, &Goals::from(&thresholds(args.gates.as_deref())?))?;
    match args.format {
        Shape::Text => {
            let rows: Vec<Vec<String>> = items
                .iter()
                .enumerate()
                .map(|(i, item)| {
                    vec![
                        (i + 1).to_string(),
                        item.standing.name().to_string(),
                        item.title.to_string(),
                        item.says.clone(),
                    ]
                })
                .collect();
            out(&table(&rows, &[true, false, false, false]))?;
        }
        Shape::Json => {
            let list: Vec<serde_json::Value> = items
                .iter()
                .map(|i| serde_json::json!({"item": i.title, "standing": i.standing.name(), "says": i.says}))
                .collect();
            out(&format!("{}\n", serde_json::Value::from(list)))?;
        }
    }
    let fine = items.iter().all(|i| matches!(i.standing, Standing::Pass | Standing::Void));
    Ok(if fine { 0 } else { DIAGNOSED })
}
