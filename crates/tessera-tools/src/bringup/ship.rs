//! The ship checklist: what must pass before anyone depends on a plan on this machine. Each item is a
//! command or a check of recorded runs, and the first that does not pass stops the rest.

use std::path::{Path, PathBuf};
use std::process::Stdio;

use tessera::program_command::ProgramCommand;
use tessera_base::Diagnostics;
use tessera_report::record::RunDevice;

use super::{ChecklistItem, ItemAnswer, ItemStatus, check_frozen_kernels, check_golden_hash, open_runs};

/// Chunks of a run that shows a steady state.
const STEADY_CHUNKS: u32 = 10_000;

/// An item that is not evaluated yet.
type Question<'a> = (&'static str, Box<dyn Fn() -> ItemAnswer + 'a>);

/// Evaluates the ship checklist on runs as in production, one long run, and the drills of `program`, the
/// binary `tessera`. `announce` receives the title of each item before it is evaluated: the last ones take minutes.
///
/// # Errors
/// T0045 for every folder that is not a run directory or is named twice.
pub fn check_ship(
    program: &ProgramCommand,
    folders: &[PathBuf],
    long: &Path,
    announce: &mut dyn FnMut(&str),
) -> Result<Vec<ChecklistItem>, Diagnostics> {
    let runs = open_runs(folders)?;
    let long_run = open_runs(&[long.to_path_buf()])?;
    let plan = folders.last().map(|f| f.join("plan").display().to_string()).unwrap_or_default();
    let long_name = long.display().to_string();
    let questions: Vec<Question<'_>> = vec![
        (
            "runs are real: no simulated machine",
            Box::new(|| {
                let simulated =
                    runs.iter().chain(&long_run).find(|r| r.record.start.device == RunDevice::Sim);
                match simulated {
                    Some(run) => (ItemStatus::Fail, format!("{} ran on a simulated machine", run.name)),
                    None => (ItemStatus::Pass, format!("{} runs", runs.len() + long_run.len())),
                }
            }),
        ),
        ("the plan cannot hang", Box::new(|| run_command(program, &["check", &plan]))),
        ("parity held, and the warm-up covered every program", Box::new(|| check_frozen_kernels(&runs))),
        ("fresh processes give one hash", Box::new(|| check_golden_hash(&runs))),
        (
            "a long run was recorded",
            Box::new(|| {
                let chunks = long_run.iter().map(|r| r.record.chunk_count()).max().unwrap_or(0);
                let detail = format!("{long_name} has {chunks} chunks, {STEADY_CHUNKS} are needed");
                (if chunks >= STEADY_CHUNKS { ItemStatus::Pass } else { ItemStatus::Fail }, detail)
            }),
        ),
        (
            "steady state: no new program, no growth",
            Box::new(|| run_command(program, &["record", "gates", &long_name])),
        ),
        (
            "each fault ends as expected, and no process stays behind",
            Box::new(|| run_command(program, &["drill"])),
        ),
        ("each drill depends on its tripwire", Box::new(|| run_command(program, &["drill", "--self-test"]))),
    ];
    Ok(answer_in_order(questions, announce))
}

/// Evaluates items up to the first that does not pass.
fn answer_in_order(questions: Vec<Question<'_>>, announce: &mut dyn FnMut(&str)) -> Vec<ChecklistItem> {
    let mut stopped_by: Option<usize> = None;
    let answer = |(i, (title, ask)): (usize, Question<'_>)| {
        if let Some(first) = stopped_by {
            let detail = format!("not evaluated, because item {} does not pass", first + 1);
            return ChecklistItem { title, status: ItemStatus::Blocked, detail };
        }
        announce(title);
        let (status, detail) = ask();
        if status != ItemStatus::Pass {
            stopped_by = Some(i);
        }
        ChecklistItem { title, status, detail }
    };
    questions.into_iter().enumerate().map(answer).collect()
}

/// Passes if the command ends with status 0; the detail is the command and the line that it printed about a failure, or the last one.
fn run_command(program: &ProgramCommand, args: &[&str]) -> ItemAnswer {
    let command = format!("tessera {}", args.join(" "));
    match program.to_command().args(args).stdin(Stdio::null()).output() {
        Ok(output) => {
            let printed = [output.stderr, output.stdout].map(|b| String::from_utf8_lossy(&b).into_owned());
            let lines: Vec<&str> = printed.iter().flat_map(|text| text.lines()).map(str::trim).collect();
            let status = if output.status.success() { ItemStatus::Pass } else { ItemStatus::Fail };
            // The lines of gates and drills that did not pass begin so.
            let failed = lines
                .iter()
                .find(|l| l.starts_with("fail") || l.starts_with("RED") || l.starts_with("error"));
            let failed = failed.filter(|_| status == ItemStatus::Fail);
            let last = lines.iter().rfind(|l| !l.is_empty());
            let detail = failed.or(last).unwrap_or(&"no output");
            (status, format!("`{command}`: {detail}"))
        }
        Err(e) => (ItemStatus::Fail, format!("`{command}` cannot be started: {e}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn statuses(exes: [&'static str; 3]) -> (Vec<ItemStatus>, usize) {
        let mut announced = 0;
        let questions: Vec<Question<'_>> = exes
            .map(|exe| -> Question<'_> {
                ("item", Box::new(move || run_command(&ProgramCommand::from_executable(exe), &[])))
            })
            .into();
        let items = answer_in_order(questions, &mut |_| announced += 1);
        (items.iter().map(|i| i.status).collect(), announced)
    }

    #[test]
    fn the_detail_is_the_line_about_the_failure() {
        let print = |lines: &str| {
            run_command(&ProgramCommand::from_executable("sh"), &["-c", &format!("printf '{lines}'; exit 1")])
        };
        assert!(print("pass a\\nfail b\\npass c\\n").1.ends_with(": fail b"));
        assert!(print("x\\nlast\\n\\n").1.ends_with(": last"));
    }

    #[test]
    fn every_item_must_pass_and_the_first_that_does_not_stops_the_rest() {
        use ItemStatus::{Blocked, Fail, Pass};
        assert_eq!(statuses(["true", "true", "true"]), (vec![Pass, Pass, Pass], 3));
        assert_eq!(statuses(["true", "false", "true"]), (vec![Pass, Fail, Blocked], 2));
        assert_eq!(statuses(["/no/such/program", "true", "true"]), (vec![Fail, Blocked, Blocked], 1));
    }
}
