//! `tessera bench`: how fast this machine's GPUs run the network of a video model.

use std::io::BufRead;
use std::path::PathBuf;

use clap::Subcommand;
use tessera::bench::{
    Asked, FORWARDS, FRAMES, Line, Machine, OfRank, Point, Ranks, Traced, machine_for, planned, rank_main,
    spread, write_timeline,
};
use tessera::gpus::Gpus;

use tessera_base::{Format, render_all};

use crate::options::{DtypeName, StrategyName, ViaName};
use crate::say::{Outcome, Refusal, Shape, out, table};
use crate::values;

const EXAMPLES: &str = "\
Examples:
  tessera bench dit --dtype bf16                                          one GPU, 14B, 480x832
  tessera bench dit --dtype bf16 --mesh tp=4 --size 480x832,320x576       four GPUs, tokens over ranks, both sizes in one load
  tessera bench dit --dtype bf16 --mesh tp=4 --trace --trace-to t.json    where the time of a forward goes, beside the estimate

Weights are made up, so no download is needed. A step is five forwards, the cost of twelve frames. For a comparison with
PyTorch on the same GPUs in the same run see tools/bench/README.md.";

/// Time the network of a video model on GPUs
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    pub what: What,
}

impl Args {
    /// How to print.
    pub fn format(&self) -> Shape {
        let What::Dit(dit) = &self.what;
        dit.format
    }
}

/// What is timed.
#[derive(Debug, Subcommand)]
pub enum What {
    Dit(DitArgs),
}

/// Denoising forwards over three frames of context: the generator alone
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct DitArgs {
    /// Folder with the model's config; weights are not read
    #[arg(default_value = "models/wan2.1-14b")]
    pub model: PathBuf,

    /// Axes and their sizes, a GPU a rank
    #[arg(long, value_name = "MESH", default_value = "tp=1")]
    pub mesh: String,

    /// How tp cuts a block: tokens (ulysses, exact) or weights (megatron)
    #[arg(long, default_value = "ulysses")]
    pub strategy: StrategyName,

    /// What products and what works on their results compute in
    #[arg(long, default_value = "bf16")]
    pub dtype: DtypeName,

    /// Pieces that rows are cut into under megatron: sums of one travel while another computes
    #[arg(long, value_name = "N", default_value_t = 1)]
    pub pieces: u32,

    /// By what collectives are moved
    #[arg(long, default_value = "best")]
    pub via: ViaName,

    /// Height and width of the picture in pixels; several, repeated or by commas, share one load and are timed in turn
    /// [default: the model's]
    #[arg(long, value_name = "HxW", value_delimiter = ',', value_parser = pixels)]
    pub size: Vec<(u64, u64)>,

    /// Blocks, for a quick look [default: all]
    #[arg(long, value_name = "N")]
    pub layers: Option<u64>,

    /// Steps to time
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub steps: usize,

    /// Seconds of forwards of each size before the first that counts
    #[arg(long, value_name = "S", default_value_t = 5.0)]
    pub warm: f64,

    /// Where it runs
    #[arg(long, default_value = "cuda")]
    pub device: BenchDevice,

    /// The folder is a case of tools/bench (dit_gpu.py --dump): run it once and write what comes out into its folder ours
    #[arg(long)]
    pub case: bool,

    /// Print a digest of the latent that all ranks together predict: the same for the same bits
    #[arg(long)]
    pub digest: bool,

    /// Then trace forwards: what each class and each kind of step takes, median of N, beside the plan's estimate
    /// [default N: 5]
    #[arg(long, value_name = "N", num_args = 0..=1, default_missing_value = "5", value_parser = clap::value_parser!(u32).range(1..=100))]
    pub trace: Option<u32>,

    /// Write all steps of all ranks here, for ui.perfetto.dev; traces 5 forwards unless --trace says how many
    #[arg(long, value_name = "FILE")]
    pub trace_to: Option<PathBuf>,

    /// Machine of the estimate, a name of the catalog or a file [default: the entry with the GPUs that are here]
    #[arg(long, value_name = "NAME|FILE")]
    pub cluster: Option<String>,

    /// Whose curves the estimate takes, a name or a file [default: tessera]
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,

    /// Answer `run SIZE STEPS` and `quit` on standard input, one line of JSON each, for a comparison side by side
    #[arg(long, conflicts_with_all = ["trace", "trace_to"])]
    pub serve: bool,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchDevice {
    /// GPUs
    Cuda,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    let What::Dit(dit) = &args.what;
    let strategy: tessera::Strategy = dit.strategy.into();
    let dtype: tessera::DtypePolicy = dit.dtype.into();
    let mesh = values::mesh(&dit.mesh).map_err(|d| Refusal::usage(vec![d]))?;
    let (via, pieces) = (dit.via.into(), dit.pieces);
    let mapping = tessera::Mapping { mesh, strategy, dtype, via, pieces, ..tessera::Mapping::default() };
    let asked = Asked {
        model: dit.model.clone(),
        mapping: mapping.text(),
        sizes: dit.size.clone(),
        layers: dit.layers,
        case: dit.case,
    };
    // What is wrong with the question is told before any process starts.
    let points = planned(&asked)?;
    let traces = dit.trace.or(dit.trace_to.as_ref().map(|_| TRACES));
    let world = mapping.world().map_err(|d| vec![*d])?.iter().count() as u32;
    let machine = || machine_for(&Gpus::look(), dit.cluster.as_deref(), dit.profile.as_deref(), world);
    let traces = traces.map(|count| machine().map(|m| (count, m))).transpose()?;
    let mut ranks = Ranks::start(&asked)?;
    let facts = serde_json::json!({
        "mesh": dit.mesh, "strategy": strategy.name(), "dtype": dtype.name(), "pieces": pieces,
        "via": mapping.via.name(), "ranks": ranks.ready,
    });
    if dit.serve {
        ranks.warm(0, dit.warm)?;
        return serve(&mut ranks, &points, &facts);
    }
    let mut timed = Vec::new();
    for (at, point) in points.iter().enumerate() {
        timed.push(time(dit, &mut ranks, (at, point), traces.as_ref())?);
    }
    out(&match dit.format {
        Shape::Json => {
            let points: Vec<serde_json::Value> = timed.iter().map(Timed::json).collect();
            format!("{}\n", serde_json::json!({"bench": "dit", "facts": facts, "points": points}))
        }
        Shape::Text => {
            let what =
                format!("{} on {}, {}, {}", dit.model.display(), dit.mesh, mapping.cut(), dtype.name());
            let mut text = format!("{what}\n");
            for (rank, r) in ranks.ready.iter().enumerate() {
                text += &format!(
                    "  rank {rank}: memory planned {:.2} GiB with context and libraries, measured {:.2} GiB, error {}; ready after {:.1} s\n",
                    gib(r.planned_bytes()),
                    gib(r.measured),
                    percent(r.memory_error()),
                    r.load_s
                );
            }
            text + &timed.iter().map(Timed::text).collect::<String>()
        }
    })?;
    if let Some(file) = &dit.trace_to {
        let all: Vec<Traced> = timed.into_iter().filter_map(|t| t.traced).collect();
        write_timeline(file, &all)?;
    }
    Ok(0)
}

/// Traced forwards, where nobody says how many.
const TRACES: u32 = 5;

/// What came of one size.
struct Timed {
    size: String,
    plan: String,
    steps_ms: Vec<f64>,
    latent: Option<String>,
    traced: Option<Traced>,
}

/// Times a size, and traces it.
fn time(
    dit: &DitArgs,
    ranks: &mut Ranks,
    (at, point): (usize, &Point),
    traces: Option<&(u32, Result<Machine, String>)>,
) -> Result<Timed, Refusal> {
    ranks.warm(at, dit.warm)?;
    let steps_ms = ranks.steps(at, dit.steps)?;
    let latent = match dit.digest {
        true => Some(tessera::bench::digest(&ranks.latents(at)?)),
        false => None,
    };
    let traced = match traces {
        None => None,
        Some((count, machine)) => {
            let ran = ranks.trace(at, *count as usize)?;
            let forward_ns = spread(&steps_ms).0 * 1e6 / FORWARDS as f64;
            Some(Traced::of(point, &ran, forward_ns, machine.as_ref().map_err(Clone::clone))?)
        }
    };
    Ok(Timed { size: point.size.clone(), plan: point.plan.sealed.digest_hex(), steps_ms, latent, traced })
}

impl Timed {
    fn json(&self) -> serde_json::Value {
        let (median, low, high) = spread(&self.steps_ms);
        serde_json::json!({
            "size": self.size, "plan": self.plan, "median_ms": median, "p10_ms": low, "p90_ms": high, "fps": fps(median),
            "latent": self.latent, "steps_ms": self.steps_ms, "trace": self.traced.as_ref().map(Traced::json),
        })
    }

    fn text(&self) -> String {
        let (median, low, high) = spread(&self.steps_ms);
        let mut text = format!(
            "{}: a step of {FORWARDS} forwards takes {median:.2} ms (p10 {low:.2}, p90 {high:.2}, {} steps): {:.2} frames per \
second\n",
            self.size,
            self.steps_ms.len(),
            fps(median)
        );
        text += &self.latent.as_ref().map(|d| format!("  latent {d}\n")).unwrap_or_default();
        text + &self.traced.as_ref().map(traced).unwrap_or_default()
    }
}

fn fps(step_ms: f64) -> f64 {
    FRAMES as f64 * 1e3 / step_ms
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn ms(ns: f64) -> String {
    format!("{:.3}", ns / 1e6)
}

/// A share with its sign.
fn percent(share: Option<f64>) -> String {
    share.map_or("-".to_string(), |s| format!("{:+.1} %", 100.0 * s))
}

/// A traced forward for people.
fn traced(t: &Traced) -> String {
    let against = match &t.on {
        Ok(on) => format!(
            "a forward on its GPUs against the estimate for {on}; error: of the estimate, against measured"
        ),
        Err(why) => format!("a forward on its GPUs; no estimate: {why}"),
    };
    let mut text = format!("{}: {against}\n", t.size);
    if let Some(r) = t.busiest() {
        let sum = Line::sum("in all, one after another", &r.classes);
        text += &format!("rank {}, which computes longest, by class:\n", r.rank);
        text += &lines("class", r.classes.iter().chain([&sum, &t.forward]));
        text += &format!("rank {}, by ops that one launch does and shapes that the first reads:\n", r.rank);
        text += &lines("step", &r.kinds);
    }
    if t.forward.measured_ns > 0.0 {
        text += &format!(
            "  marks around every step made the traced forward {} ms, {} of one without\n",
            ms(t.traced_ns),
            percent(Some(t.traced_ns / t.forward.measured_ns - 1.0))
        );
    }
    if t.ranks.iter().all(|r| r.overlap.total_ns == 0.0) {
        return text;
    }
    text += "collectives, the wait for later ranks included; exposed: while the rank computes nothing; overlap ratio: hidden of all:\n";
    text + &collectives(t)
}

fn lines<'a>(what: &str, all: impl IntoIterator<Item = &'a Line>) -> String {
    let mut rows = vec![[what, "count", "estimated ms", "measured ms", "error"].map(str::to_string).to_vec()];
    rows.extend(all.into_iter().map(|l| {
        let estimated = l.estimated_ns.map_or("-".to_string(), ms);
        vec![l.name.clone(), l.count.to_string(), estimated, ms(l.measured_ns), percent(l.error())]
    }));
    table(&rows, &[false, true, true, true, true])
}

fn collectives(t: &Traced) -> String {
    let mut rows = vec![["", "collectives ms", "exposed ms", "overlap ratio"].map(str::to_string).to_vec()];
    let row = |name: String, all_ns: f64, exposed_ns: f64, ratio: f64| {
        vec![name, ms(all_ns), ms(exposed_ns), format!("{ratio:.2}")]
    };
    let of = |r: &OfRank| {
        row(format!("rank {}", r.rank), r.overlap.total_ns, r.overlap.exposed_ns(), r.overlap.ratio())
    };
    rows.extend(t.ranks.iter().map(of));
    if let Some(o) = t.estimated_overlap {
        let ranks = t.ranks.len() as f64;
        rows.push(row("estimated, a rank".into(), o.total_ns / ranks, o.exposed_ns() / ranks, o.ratio()));
    }
    table(&rows, &[false, true, true, true])
}

/// The protocol of tools/bench.
fn serve(ranks: &mut Ranks, points: &[Point], facts: &serde_json::Value) -> Outcome {
    let plans: serde_json::Map<String, serde_json::Value> = points
        .iter()
        .map(|p| (p.size.clone(), serde_json::json!({"plan": p.plan.sealed.digest_hex()})))
        .collect();
    out(&format!("{}\n", serde_json::json!({"ready": true, "facts": facts, "points": plans})))?;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let asked = |size: &str, count: &str| {
            Some((points.iter().position(|p| p.size == size)?, count.parse::<usize>().ok()?))
        };
        match words[..] {
            ["quit"] => break,
            ["run", size, count] if asked(size, count).is_some() => {
                let Some((at, count)) = asked(size, count) else { continue };
                let steps = ranks.steps(at, count)?;
                out(&format!("{}\n", serde_json::json!({"steps_ms": steps})))?;
            }
            _ => {
                let said = format!("not `run SIZE STEPS` or `quit`: {line:?}");
                out(&format!("{}\n", serde_json::json!({"error": said})))?;
            }
        }
    }
    Ok(0)
}

fn pixels(text: &str) -> Result<(u64, u64), String> {
    let parts = text.split_once('x').and_then(|(h, w)| Some((h.parse().ok()?, w.parse().ok()?)));
    parts.ok_or_else(|| "not HEIGHTxWIDTH, such as 480x832".to_string())
}

/// One rank's process; its exit status.
pub fn rank(rank: u32, orders: &str) -> u8 {
    match rank_main(rank, orders) {
        Ok(()) => 0,
        Err(ds) => {
            eprint!("{}", render_all(&ds, Format::Text, &|_| None));
            1
        }
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use tessera::bench::Overlap;

    use super::*;

    #[derive(Debug, Parser)]
    struct Bench {
        #[command(flatten)]
        args: Args,
    }

    fn parsed(words: &[&str]) -> Result<DitArgs, clap::Error> {
        let Bench { args: Args { what: What::Dit(dit) } } =
            Bench::try_parse_from([&["bench", "dit"], words].concat())?;
        Ok(dit)
    }

    #[test]
    fn sizes_are_repeated_or_stand_between_commas() {
        let sizes = |words: &[&str]| parsed(words).map(|d| d.size);
        assert_eq!(sizes(&[]).unwrap(), []);
        assert_eq!(sizes(&["--size", "480x832"]).unwrap(), [(480, 832)]);
        let want = [(480, 832), (320, 576), (128, 256)];
        assert_eq!(sizes(&["--size", "480x832", "--size", "320x576,128x256"]).unwrap(), want);
        for wrong in ["480", "480x", "480x832x3", "480x832,"] {
            assert!(sizes(&["--size", wrong]).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_trace_takes_a_number_or_five() {
        let of = |words: &[&str]| parsed(words).map(|d| d.trace);
        assert_eq!((of(&[]).unwrap(), of(&["--trace"]).unwrap()), (None, Some(5)));
        assert_eq!(of(&["--trace", "9", "models/demo"]).unwrap(), Some(9));
        assert!(of(&["--trace", "0"]).is_err() && of(&["--trace", "--serve"]).is_err());
    }

    fn line(name: &str, count: usize, estimated_ms: f64, measured_ms: f64) -> Line {
        Line {
            name: name.into(),
            count,
            estimated_ns: Some(estimated_ms * 1e6),
            measured_ns: measured_ms * 1e6,
        }
    }

    fn hand_made(classes: Vec<Line>, forward: Line, overlap: Overlap) -> Traced {
        let kinds = vec![line("matmul+gate_residual [4680, 13824] [5120, 13824]", 40, 40.0, 50.0)];
        Traced {
            size: "480x832".into(),
            on: Ok("hgx-h200 under profile tessera".into()),
            forward,
            traced_ns: 105e6,
            estimated_overlap: Some(Overlap { total_ns: 16e6, hidden_ns: 4e6 }),
            ranks: vec![
                OfRank { rank: 0, classes: Vec::new(), kinds: Vec::new(), overlap, compute_ns: 80e6 },
                OfRank { rank: 1, classes, kinds, overlap, compute_ns: 90e6 },
            ],
            bars: Vec::new(),
        }
    }

    #[test]
    fn a_trace_says_what_was_estimated_what_was_measured_and_what_was_exposed() {
        let classes = vec![line("matmul", 400, 63.0, 60.0), line("all_to_all", 160, 8.0, 10.0)];
        let overlap = Overlap { total_ns: 10e6, hidden_ns: 7.4e6 };
        let text = traced(&hand_made(classes, line("whole forward", 1, 95.0, 100.0), overlap));
        let want = "\
480x832: a forward on its GPUs against the estimate for hgx-h200 under profile tessera; error: of the estimate, against measured
rank 1, which computes longest, by class:
  class                     count  estimated ms  measured ms    error
  matmul                      400        63.000       60.000   +5.0 %
  all_to_all                  160         8.000       10.000  -20.0 %
  in all, one after another   560        71.000       70.000   +1.4 %
  whole forward                 1        95.000      100.000   -5.0 %
rank 1, by ops that one launch does and shapes that the first reads:
  step                                             count  estimated ms  measured ms    error
  matmul+gate_residual [4680, 13824] [5120, 13824]    40        40.000       50.000  -20.0 %
  marks around every step made the traced forward 105.000 ms, +5.0 % of one without
collectives, the wait for later ranks included; exposed: while the rank computes nothing; overlap ratio: hidden of all:
                     collectives ms  exposed ms  overlap ratio
  rank 0                     10.000       2.600           0.74
  rank 1                     10.000       2.600           0.74
  estimated, a rank           8.000       6.000           0.25
";
        let plain: Vec<String> =
            text.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        let wanted: Vec<String> =
            want.lines().map(|l| l.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(plain, wanted, "{text}");
    }

    #[test]
    fn one_gpu_without_an_estimate_says_why_and_tells_of_no_collectives() {
        let none = |l: Line| Line { estimated_ns: None, ..l };
        let classes = vec![none(line("matmul", 400, 0.0, 60.0))];
        let made = hand_made(classes, none(line("whole forward", 1, 0.0, 100.0)), Overlap::default());
        let text = traced(&Traced { on: Err("no cluster has it".into()), ..made });
        assert!(
            text.starts_with("480x832: a forward on its GPUs; no estimate: no cluster has it\n"),
            "{text}"
        );
        assert!(!text.contains("overlap ratio"), "{text}");
        let row = text.lines().find(|l| l.trim_start().starts_with("matmul ")).unwrap();
        assert_eq!(row.split_whitespace().collect::<Vec<_>>(), ["matmul", "400", "-", "60.000", "-"]);
    }
}
