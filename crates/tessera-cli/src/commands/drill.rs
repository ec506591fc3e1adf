//! `tessera drill`: injects faults on this machine and checks that each is detected as expected.

use std::path::{Path, PathBuf};

use tessera::cuda;
use tessera::gpus::GpuDiscovery;
use tessera::program_command::ProgramCommand;
use tessera::stream_options::RunDevice;
use tessera_base::Diagnostic;
use tessera_tools::drill::{
    self, DRILLS, Drill, DrillOutcome, DrillRunner, DrillSetup, MeasuredGate, Observation,
};

use crate::codes::{T0030, T0038};
use crate::flags::named_values;
use crate::output::{
    CliError, CliResult as Said, EXIT_DIAGNOSTICS, OutputFormat, format_table, write_stdout,
};

const EXAMPLES: &str = "\
Examples:
  tessera drill                                   run all drills, in about a minute
  tessera drill --list                            list the drills and the expected failures
  tessera drill stopped-rank orphaned-worker      run these two
  tessera drill depth-sweep                       simulate queue depths 1 to 4, and print a table
  tessera drill --keep out/drills wrong-group     keep the runs, for `tessera autopsy`
  tessera drill --device cuda member-dies         kill a rank on a GPU; needs two GPUs
  tessera drill --self-test                       disable the check that each drill tests; each drill must then fail;
                                                  takes some minutes

A drill streams a small model over real processes on this machine and injects one fault. It passes if the run ends in time with
the expected code, rank and place, and leaves no process behind. The place is where the check runs: leader preflight,
mesh-leader preflight, worker check or init parity. Three drills inject no fault, but measure how pipeline stages overlap:
depth-sweep, overlap-signature and recompute-coupling pass if their measurements meet the gates. Without --keep, a drill writes
only to a temporary folder.

  ok   the fault was detected as expected, or all gates passed
  RED  a drill did not pass; the next lines show the expected and the observed failure, the gates, or the leftover processes

Exit status: 0 all ok, 1 a drill is red or could not run, 2 usage error.";

/// Inject faults, and check that each ends its run in time, with the expected code and rank, and
/// leaves no process behind
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Drills to run [default: all]
    pub ids: Vec<String>,

    /// List the drills and the failure that each must report
    #[arg(long, conflicts_with_all = ["ids", "self_test", "keep", "model"])]
    pub list: bool,

    /// Disable the check (tripwire) that each drill tests; the drill must then fail
    #[arg(long)]
    pub self_test: bool,

    /// Stream this model instead of a small random one
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// Device of the ranks
    #[arg(long, value_parser = named_values(DEVICES), default_value = "cpu")]
    pub device: RunDevice,

    /// Keep the runs in this new folder
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,

    /// Print tables as Markdown: the list of drills, or the table of depth-sweep
    #[arg(long)]
    pub markdown: bool,

    /// Format of the outcomes and of diagnostics; json prints one line per drill
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,

    /// Launch the ranks of a drill, to be killed. The drill itself uses this option.
    #[arg(long, hide = true, value_name = "FILE")]
    pub launch: Option<PathBuf>,
}

/// The maximum number of ranks of a drill's mesh.
const MAX_RANKS: usize = 2;

/// Values of `--device`, each with its help text.
const DEVICES: &[(&str, RunDevice, &str)] = &[
    ("cpu", RunDevice::Cpu, "CPU cores of this machine"),
    ("cuda", RunDevice::Cuda, "Two NVIDIA GPUs of this machine"),
];

/// Injects the faults and checks that each is detected as expected.
pub fn run(args: &Args, program: Result<ProgramCommand, Diagnostic>) -> Said {
    let program = program?;
    let rank = program.to_argv(&["rank"]);
    if let Some(launch_file) = &args.launch {
        drill::run_launcher(launch_file, rank)?;
        return Ok(0);
    }
    if args.list {
        write_stdout(&render_list(args))?;
        return Ok(0);
    }
    let drills = select_drills(&args.ids, args.self_test)?;
    if args.device == RunDevice::Cuda {
        cuda::check_gpus(&GpuDiscovery::discover(), MAX_RANKS)?;
    }
    let folder = DrillDir::create_dir(args.keep.as_deref())?;
    let launcher = program.to_argv(&["drill", "--launch"]);
    let stream = program.to_argv(&["stream"]);
    let (model, device) = (args.model.clone(), args.device);
    let bench = DrillSetup {
        rank_command: rank,
        stream_command: stream,
        launcher_command: launcher,
        model,
        device,
        dir: folder.dir.clone(),
    };
    let mut range = DrillRunner::new(bench)?;
    if args.self_test { self_test(args, &mut range, &drills) } else { run_drills(args, &mut range, &drills) }
}

fn run_drills(args: &Args, range: &mut DrillRunner, drills: &[&'static Drill]) -> Said {
    let started = std::time::Instant::now();
    let mut red = 0;
    for drill in drills {
        let outcome = range.run(drill)?;
        red += usize::from(!outcome.is_green());
        write_stdout(&match (args.format, &outcome.table) {
            (OutputFormat::Text, Some(table)) if args.markdown => table.clone(),
            (OutputFormat::Text, Some(table)) => format!("{}\n{table}\n", outcome_line(&outcome)),
            (OutputFormat::Text, None) => outcome_line(&outcome),
            (OutputFormat::Json, _) => outcome_json(&outcome, None),
        })?;
    }
    if args.format == OutputFormat::Text && !args.markdown {
        let (n, seconds) = (drills.len(), started.elapsed().as_secs_f64());
        let verdict = if red == 0 { "all ok".to_string() } else { format!("{red} red") };
        write_stdout(&format!("{n} drills in {seconds:.0} s: {verdict}\n"))?;
    }
    Ok(if red == 0 { 0 } else { EXIT_DIAGNOSTICS })
}

fn self_test(args: &Args, range: &mut DrillRunner, drills: &[&'static Drill]) -> Said {
    let mut stayed_green = 0;
    for drill in drills {
        let outcome = range.run_disarmed(drill)?;
        let turned_red = !outcome.matches_signature();
        stayed_green += usize::from(!turned_red);
        write_stdout(&match args.format {
            OutputFormat::Text => {
                let (verdict, code) =
                    (if turned_red { "ok " } else { "RED" }, drill.expected.map_or("", |s| s.code));
                let turned = if turned_red { "turned red" } else { "stayed green" };
                format!(
                    "{verdict} {:<25} without {code}: {turned}, {}\n",
                    drill.id,
                    describe_observed(&outcome.observed, false)
                )
            }
            OutputFormat::Json => outcome_json(&outcome, Some(turned_red)),
        })?;
    }
    if args.format == OutputFormat::Text {
        let verdict = if stayed_green == 0 {
            "every drill fails without its check".to_string()
        } else {
            format!("{stayed_green} stayed green")
        };
        write_stdout(&format!("{} drills without their checks: {verdict}\n", drills.len()))?;
    }
    Ok(if stayed_green == 0 { 0 } else { EXIT_DIAGNOSTICS })
}

/// Formats an outcome: one line with the verdict, the expected failure and the times, followed by
/// the gates, a different failure, or leftover processes.
fn outcome_line(o: &DrillOutcome) -> String {
    let (verdict, id) = (if o.is_green() { "ok " } else { "RED" }, o.drill.id);
    let (took, limit) = (o.elapsed.as_secs_f64(), o.limit.as_secs_f64());
    let expected = o.drill.expected.map_or("gates".to_string(), |s| s.to_string());
    let mut text = format!("{verdict} {id:<25} {expected:<34} {took:.3} s (limit {limit:.0} s)\n");
    if let Observation::Gates(gates) = &o.observed {
        for MeasuredGate { requirement: what, observed: seen, passes } in gates {
            text += &format!("      {} {what}: {seen}\n", if *passes { "ok " } else { "RED" });
        }
    } else if !o.matches_signature() {
        text +=
            &format!("      expected {expected}\n      observed {}\n", describe_observed(&o.observed, true));
    }
    if !o.leftover_pids.is_empty() {
        text += &format!("      leftover processes {:?}\n", o.leftover_pids);
    }
    text
}

fn describe_observed(observed: &Observation, with_text: bool) -> String {
    match observed {
        Observation::Failure(f) => {
            let rank = f.rank.map_or("no rank".to_string(), |r| format!("rank {r}"));
            let text = if with_text { format!(": {}", f.text) } else { String::new() };
            format!("{} {rank} {}{text}", f.code, f.site.as_str())
        }
        Observation::Completed => "a run that succeeded".to_string(),
        Observation::Killed => "a run that did not end and was killed".to_string(),
        Observation::Gates(gates) => format!("{} gates", gates.len()),
    }
}

fn outcome_json(o: &DrillOutcome, turned_red: Option<bool>) -> String {
    let expect = o
        .drill
        .expected
        .map(|s| serde_json::json!({ "code": s.code, "rank": s.rank, "place": s.site.as_str() }));
    let observed = match &o.observed {
        Observation::Failure(f) => serde_json::json!({
            "code": f.code, "rank": f.rank, "place": f.site.as_str(), "text": f.text,
        }),
        Observation::Gates(gates) => gates
            .iter()
            .map(|g| serde_json::json!({ "gate": g.requirement, "observed": g.observed, "ok": g.passes }))
            .collect(),
        other => serde_json::Value::from(describe_observed(other, false)),
    };
    let ok = turned_red.unwrap_or_else(|| o.is_green());
    let line = serde_json::json!({
        "drill": o.drill.id,
        "ok": ok,
        "without_its_check": turned_red.is_some(),
        "expected": expect,
        "observed": observed,
        "took_ms": o.elapsed.as_millis() as u64,
        "limit_ms": o.limit.as_millis() as u64,
        "leftover_pids": o.leftover_pids,
    });
    format!("{line}\n")
}

fn render_list(args: &Args) -> String {
    if args.markdown {
        return drill::reference_page();
    }
    if args.format == OutputFormat::Json {
        let row = |d: &Drill| {
            let expect = d
                .expected
                .map(|s| serde_json::json!({ "code": s.code, "rank": s.rank, "place": s.site.as_str() }));
            let page = format!("docs/manual/{}.md", d.page);
            let line = serde_json::json!({
                "drill": d.id, "what": d.description, "expected": expect, "limit_ms": d.limit_ms, "page": page,
            });
            format!("{line}\n")
        };
        return DRILLS.iter().map(row).collect();
    }
    let head = ["drill", "expected", "fault"].map(String::from);
    let rows = DRILLS.iter().map(|d| {
        let expect = d.expected.map_or("gates".to_string(), |s| s.to_string());
        [d.id.to_string(), expect, d.description.to_string()]
    });
    format_table(std::iter::once(head).chain(rows), [false, false, false])
}

/// Returns the drills with these ids, or all drills. A self-test leaves out the measurements, which
/// have no check to disable, and rejects their ids.
fn select_drills(ids: &[String], self_test: bool) -> Result<Vec<&'static Drill>, CliError> {
    let is_applicable = |d: &&Drill| !self_test || d.expected.is_some();
    if ids.is_empty() {
        return Ok(DRILLS.iter().filter(is_applicable).collect());
    }
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    for id in ids {
        match Drill::find(id) {
            Some(drill) if is_applicable(&drill) => found.push(drill),
            Some(_) => errors.push(
                Diagnostic::error(&T0038, format!("`{id}` is a measurement: it has no check to disable"))
                    .with_hint("leave it out, or run it without --self-test"),
            ),
            None => errors.push(
                Diagnostic::error(&T0038, format!("unknown drill `{id}`"))
                    .with_hint(format!("{}see `tessera drill --list`", suggest_drill(id))),
            ),
        }
    }
    if errors.is_empty() { Ok(found) } else { Err(CliError::from_usage_errors(errors)) }
}

/// Suggests a drill whose id shares the first characters.
fn suggest_drill(id: &str) -> String {
    let shared = |d: &&Drill| d.id.bytes().zip(id.bytes()).take_while(|(a, b)| a == b).count();
    let best = DRILLS.iter().max_by_key(shared).filter(|d| shared(d) >= 3);
    best.map_or(String::new(), |d| format!("`{}`? ", d.id))
}

/// A folder for the runs, removed on drop unless it is to be kept.
struct DrillDir {
    dir: PathBuf,
    keep: bool,
}

impl DrillDir {
    fn create_dir(keep: Option<&Path>) -> Result<DrillDir, CliError> {
        let temporary = || std::env::temp_dir().join(format!("tessera-drill-{}", std::process::id()));
        let dir = keep.map_or_else(temporary, Path::to_path_buf);
        let create_error = |e: std::io::Error| {
            let text = format!("cannot create {}: {e}", dir.display());
            CliError::from(Diagnostic::error(&T0030, text).with_hint("name a new folder with --keep"))
        };
        if let Some(parent) = dir.parent() {
            std::fs::create_dir_all(parent).map_err(create_error)?;
        }
        std::fs::create_dir(&dir).map_err(create_error)?;
        Ok(DrillDir { dir, keep: keep.is_some() })
    }
}

impl Drop for DrillDir {
    fn drop(&mut self) {
        if !self.keep {
            // A file that cannot be removed stays in the system's temporary folder.
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
