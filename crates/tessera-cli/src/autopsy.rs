//! `tessera autopsy`: who broke a run, from what its ranks wrote down.

use std::path::PathBuf;

use tessera::autopsy::{draw, examine};

use crate::say::{DIAGNOSED, Outcome, Refusal, Shape, out};

const EXAMPLES: &str = "\
Examples:
  tessera autopsy out/demo-1                 a run that failed, that was killed, or that hangs right now
  tessera autopsy out/demo-1 --svg why       draws the collective that did not meet, as why/departed-1.svg
  tessera autopsy out/demo-1 --format json   for a program: culprits, class, chain of waits, every rank
  tessera autopsy gathered/                  flight records of several hosts: rank-0.jsonl, rank-1.jsonl…

Reading disturbs nothing: run it as often as you like while the run goes on. It reads record.jsonl, flight/ and plan/,
and does with what is there: records that are missing, cut, or of another run are noted.

Exit status: 0 nothing wrong, 1 something is wrong and the report says what, 2 the folder is not a run's.";

/// Who broke this run? Names the rank, the collective, and who waits for whom
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of a run, or of flight records
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,

    /// Folder for drawings; drawings of the same name are replaced
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    let found = examine(&args.dir).map_err(|d| Refusal::usage(vec![d]))?;
    let name = args.dir.display().to_string();
    match args.format {
        Shape::Text => out(&found.text(&name))?,
        Shape::Json => {
            let mut json = found.to_json();
            json["run"] = serde_json::Value::from(name);
            out(&format!("{json}\n"))?;
        }
    }
    if let Some(folder) = &args.svg {
        for file in draw(&found, folder)? {
            eprintln!("wrote {}", file.display());
        }
    }
    Ok(if found.is_wrong() { DIAGNOSED } else { 0 })
}
