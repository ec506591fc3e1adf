//! `tessera drill`: breaks things on purpose on this machine and looks whether they end as they must.

use std::path::{Path, PathBuf};

use tessera::cuda;
use tessera::drill::{self, Bench, DRILLS, Drill, Gate, Outcome, Range, Seen};
use tessera::gpus::Gpus;
use tessera::stream::Device;
use tessera_base::{Code, Diagnostic};

use crate::say::{DIAGNOSED, Outcome as Said, Refusal, Shape, out, table};
use crate::stream::own_path;

/// No drill of this name.
pub static T0038: Code = Code {
    id: "T0038",
    title: "unknown drill",
    page: "`tessera drill --list` prints the drills of this build with the code, the rank and the place that each must \
show. A drill is named by its id, several ids by several words; without any, all are run.",
};

const EXAMPLES: &str = "\
Examples:
  tessera drill                                   everything, in about a minute
  tessera drill --list                            what there is, and what must be seen
  tessera drill stopped-rank orphaned-worker      these two
  tessera drill depth-sweep                       how deep queues must be, as a table
  tessera drill --keep out/drills wrong-group     keep the runs, for `tessera autopsy`
  tessera drill --device cuda member-dies         a rank on a GPU is killed; needs two GPUs
  tessera drill --self-test                       does each drill need its check? some minutes

Each drill streams a small model over real processes of this machine, breaks one thing, and compares the failure that ends
the run with what it must be: code, rank, place, time, and no process left. Nothing outside of a temporary folder is touched.

  ok   the fault was caught as it must be
  RED  it was not: below it what was expected and what was seen

Exit status: 0 all ok, 1 a drill is red or could not run, 2 usage.";

/// Break things on purpose and see that each ends fast, named and with nobody left
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Drills to run; without any, all
    pub ids: Vec<String>,

    /// List the drills and what must be seen of each
    #[arg(long, conflicts_with_all = ["ids", "self_test", "keep", "model"])]
    pub list: bool,

    /// Run each drill with the check that it is for switched off: it must turn red
    #[arg(long)]
    pub self_test: bool,

    /// Use this model instead of a small random one
    #[arg(long, value_name = "DIR")]
    pub model: Option<PathBuf>,

    /// What the ranks compute on
    #[arg(long, value_enum, default_value_t)]
    pub device: DrillDevice,

    /// Keep the runs in this new folder
    #[arg(long, value_name = "DIR")]
    pub keep: Option<PathBuf>,

    /// Print tables as Markdown: the list, or that of depth-sweep
    #[arg(long)]
    pub markdown: bool,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,

    /// Launch the ranks of a drill, to be killed. Used by the drill itself
    #[arg(long, hide = true, value_name = "FILE")]
    pub launch: Option<PathBuf>,
}

/// Ranks of the largest mesh that a drill streams over.
const MOST_RANKS: usize = 2;

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum DrillDevice {
    /// Processors of this machine
    #[default]
    Cpu,
    /// Two GPUs of this machine
    Cuda,
}

impl From<DrillDevice> for Device {
    fn from(device: DrillDevice) -> Device {
        match device {
            DrillDevice::Cpu => Device::Cpu,
            DrillDevice::Cuda => Device::Cuda,
        }
    }
}

/// Runs the verb.
pub fn run(args: &Args) -> Said {
    let rank = vec![own_path()?, "rank".to_string()];
    if let Some(case) = &args.launch {
        drill::launch(case, rank)?;
        return Ok(0);
    }
    if args.list {
        out(&list(args))?;
        return Ok(0);
    }
    let drills = wanted(&args.ids)?;
    if args.device == DrillDevice::Cuda {
        cuda::check(&Gpus::look(), MOST_RANKS)?;
    }
    let folder = Folder::make(args.keep.as_deref())?;
    let launcher = vec![own_path()?, "drill".to_string(), "--launch".to_string()];
    let stream = vec![own_path()?, "stream".to_string()];
    let (model, device) = (args.model.clone(), args.device.into());
    let bench = Bench { rank, stream, launcher, model, device, dir: folder.dir.clone() };
    let mut range = Range::new(bench)?;
    if args.self_test { self_test(args, &mut range, &drills) } else { all(args, &mut range, &drills) }
}

fn all(args: &Args, range: &mut Range, drills: &[&'static Drill]) -> Said {
    let begun = std::time::Instant::now();
    let mut red = 0;
    for drill in drills {
        let outcome = range.run(drill)?;
        red += usize::from(!outcome.passes());
        out(&match (args.format, &outcome.table) {
            (Shape::Text, Some(table)) if args.markdown => table.clone(),
            (Shape::Text, Some(table)) => format!("{}\n{table}\n", line(&outcome)),
            (Shape::Text, None) => line(&outcome),
            (Shape::Json, _) => json(&outcome, None),
        })?;
    }
    if args.format == Shape::Text && !args.markdown {
        let (n, seconds) = (drills.len(), begun.elapsed().as_secs_f64());
        let verdict = if red == 0 { "all ok".to_string() } else { format!("{red} red") };
        out(&format!("{n} drills in {seconds:.0} s: {verdict}\n"))?;
    }
    Ok(if red == 0 { 0 } else { DIAGNOSED })
}

fn self_test(args: &Args, range: &mut Range, drills: &[&'static Drill]) -> Said {
    let (mut tried, mut green) = (0, 0);
    for drill in drills {
        let Some(outcome) = range.disarmed(drill)? else { continue };
        let needed = !outcome.signed();
        tried += 1;
        green += usize::from(!needed);
        out(&match args.format {
            Shape::Text => {
                let (verdict, code) =
                    (if needed { "ok " } else { "RED" }, drill.expect.map_or("", |s| s.code));
                let turned = if needed { "turned red" } else { "stayed green" };
                format!(
                    "{verdict} {:<25} without {code}: {turned}, {}\n",
                    drill.id,
                    seen(&outcome.seen, false)
                )
            }
            Shape::Json => json(&outcome, Some(needed)),
        })?;
    }
    if args.format == Shape::Text {
        let verdict = if green == 0 {
            "each drill needs its check".to_string()
        } else {
            format!("{green} stayed green")
        };
        out(&format!("{tried} drills without their checks: {verdict}\n"))?;
    }
    Ok(if green == 0 { 0 } else { DIAGNOSED })
}

/// One drill for a person.
fn line(o: &Outcome) -> String {
    let (verdict, id) = (if o.passes() { "ok " } else { "RED" }, o.drill.id);
    let (took, limit) = (o.took.as_secs_f64(), o.limit.as_secs_f64());
    let expected = o.drill.expect.map_or("gates".to_string(), |s| s.to_string());
    let mut text = format!("{verdict} {id:<25} {expected:<34} {took:.3} s (limit {limit:.0} s)\n");
    if let Seen::Gates(gates) = &o.seen {
        for Gate { what, seen, passes } in gates {
            text += &format!("      {} {what}: {seen}\n", if *passes { "ok " } else { "RED" });
        }
    } else if !o.signed() {
        text += &format!("      expected {expected}\n      seen     {}\n", seen(&o.seen, true));
    }
    if !o.left.is_empty() {
        text += &format!("      left     processes {:?}\n", o.left);
    }
    text
}

fn seen(seen: &Seen, in_full: bool) -> String {
    match seen {
        Seen::Failure(f) => {
            let rank = f.rank.map_or("no rank".to_string(), |r| format!("rank {r}"));
            let text = if in_full { format!(": {}", f.text) } else { String::new() };
            format!("{} {rank} {}{text}", f.code, f.place.words())
        }
        Seen::Nothing => "a run that ended well".to_string(),
        Seen::Killed => "a run that went on until it was killed".to_string(),
        Seen::Gates(gates) => format!("{} gates", gates.len()),
    }
}

fn json(o: &Outcome, turned_red: Option<bool>) -> String {
    let expect = o
        .drill
        .expect
        .map(|s| serde_json::json!({ "code": s.code, "rank": s.rank, "place": s.place.words() }));
    let saw = match &o.seen {
        Seen::Failure(f) => serde_json::json!({
            "code": f.code, "rank": f.rank, "place": f.place.words(), "text": f.text,
        }),
        Seen::Gates(gates) => gates
            .iter()
            .map(|g| serde_json::json!({ "gate": g.what, "seen": g.seen, "ok": g.passes }))
            .collect(),
        other => serde_json::Value::from(seen(other, false)),
    };
    let ok = turned_red.unwrap_or_else(|| o.passes());
    let line = serde_json::json!({
        "drill": o.drill.id,
        "ok": ok,
        "without_its_check": turned_red.is_some(),
        "expected": expect,
        "seen": saw,
        "took_ms": o.took.as_millis() as u64,
        "limit_ms": o.limit.as_millis() as u64,
        "left": o.left,
    });
    format!("{line}\n")
}

fn list(args: &Args) -> String {
    if args.markdown {
        return drill::reference();
    }
    if args.format == Shape::Json {
        let row = |d: &Drill| {
            let expect = d
                .expect
                .map(|s| serde_json::json!({ "code": s.code, "rank": s.rank, "place": s.place.words() }));
            let page = format!("docs/manual/{}.md", d.page);
            let line = serde_json::json!({
                "drill": d.id, "what": d.what, "expected": expect, "limit_ms": d.limit_ms, "page": page,
            });
            format!("{line}\n")
        };
        return DRILLS.iter().map(row).collect();
    }
    let head = ["drill", "must be seen", "what is broken"].map(String::from).to_vec();
    let rows = DRILLS.iter().map(|d| {
        let expect = d.expect.map_or("gates".to_string(), |s| s.to_string());
        vec![d.id.to_string(), expect, d.what.to_string()]
    });
    let rows: Vec<_> = std::iter::once(head).chain(rows).collect();
    table(&rows, &[false, false, false])
}

fn wanted(ids: &[String]) -> Result<Vec<&'static Drill>, Refusal> {
    if ids.is_empty() {
        return Ok(DRILLS.iter().collect());
    }
    let (mut found, mut wrong) = (Vec::new(), Vec::new());
    for id in ids {
        match Drill::find(id) {
            Some(drill) => found.push(drill),
            None => wrong.push(
                Diagnostic::error(&T0038, format!("there is no drill `{id}`"))
                    .hint(format!("{}see `tessera drill --list`", near(id))),
            ),
        }
    }
    if wrong.is_empty() { Ok(found) } else { Err(Refusal::usage(wrong)) }
}

/// A drill that shares the beginning of a name.
fn near(id: &str) -> String {
    let shared = |d: &&Drill| d.id.bytes().zip(id.bytes()).take_while(|(a, b)| a == b).count();
    let best = DRILLS.iter().max_by_key(shared).filter(|d| shared(d) >= 3);
    best.map_or(String::new(), |d| format!("`{}`? ", d.id))
}

/// A folder for the runs, which goes when the drill is over unless it is to be kept.
struct Folder {
    dir: PathBuf,
    keep: bool,
}

impl Folder {
    fn make(keep: Option<&Path>) -> Result<Folder, Refusal> {
        let temporary = || std::env::temp_dir().join(format!("tessera-drill-{}", std::process::id()));
        let dir = keep.map_or_else(temporary, Path::to_path_buf);
        let refused = |e: std::io::Error| {
            let text = format!("{} cannot be made: {e}", dir.display());
            Refusal::from(
                Diagnostic::error(&crate::values::T0030, text).hint("name a new folder with --keep"),
            )
        };
        if let Some(parent) = dir.parent() {
            std::fs::create_dir_all(parent).map_err(refused)?;
        }
        std::fs::create_dir(&dir).map_err(refused)?;
        Ok(Folder { dir, keep: keep.is_some() })
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.keep {
            // What cannot be removed lies in the system's folder for such things.
            let _ = std::fs::remove_dir_all(&self.dir);
        }
    }
}
