//! `tessera bench`: how fast this machine's GPUs run the network of a video model.

use std::io::BufRead;
use std::path::PathBuf;

use clap::Subcommand;
use tessera::bench::{Asked, FORWARDS, FRAMES, Ranks, T0061, planned, rank_main, spread};
use tessera_base::{Diagnostic, Format, render_all};

use crate::options::{DtypeName, StrategyName, ViaName};
use crate::say::{Outcome, Refusal, Shape, out};
use crate::values;

const EXAMPLES: &str = "\
Examples:
  tessera bench dit --dtype bf16                                one GPU, 14B, 480x832
  tessera bench dit --dtype bf16 --mesh tp=4 --size 320x576     four GPUs, tokens over ranks
  tessera bench dit --dtype bf16 --ops                          where the time of a forward goes

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

    /// By what collectives are moved
    #[arg(long, default_value = "best")]
    pub via: ViaName,

    /// Height and width of the picture in pixels [default: the model's]
    #[arg(long, value_name = "HxW")]
    pub size: Option<String>,

    /// Blocks, for a quick look [default: all]
    #[arg(long, value_name = "N")]
    pub layers: Option<u64>,

    /// Steps to time
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub steps: usize,

    /// Seconds of forwards before the first that counts
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

    /// Also time each kind of op by itself
    #[arg(long)]
    pub ops: bool,

    /// Answer `run STEPS` and `quit` on standard input, one line of JSON each, for a comparison side by side
    #[arg(long)]
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
    let size = dit.size.as_deref().map(pixels).transpose()?;
    let strategy: tessera::Strategy = dit.strategy.into();
    let dtype: tessera::DtypePolicy = dit.dtype.into();
    let mesh = values::mesh(&dit.mesh).map_err(|d| Refusal::usage(vec![d]))?;
    let via = dit.via.into();
    let mapping = tessera::Mapping { mesh, strategy, dtype, via, ..tessera::Mapping::default() };
    let asked = Asked {
        model: dit.model.clone(),
        mapping: mapping.text(),
        size,
        layers: dit.layers,
        case: dit.case,
        warm_s: dit.warm,
    };
    // What is wrong with the question is told before any process starts.
    let (_, plan) = planned(&asked)?;
    let mut ranks = Ranks::start(&asked)?;
    let facts = serde_json::json!({
        "plan": plan.sealed.digest_hex(),
        "mesh": dit.mesh, "strategy": strategy.name(), "dtype": dtype.name(),
        "ranks": ranks.ready,
    });
    if dit.serve {
        return serve(&mut ranks, &facts);
    }
    let steps = ranks.steps(dit.steps)?;
    let (median, low, high) = spread(&steps);
    let fps = FRAMES as f64 * 1e3 / median;
    let digest = match dit.digest {
        true => Some(tessera::bench::digest(&ranks.ask("latent")?)),
        false => None,
    };
    let ops = if dit.ops { ranks.ask("ops")? } else { Vec::new() };
    let value = |line: &String| serde_json::from_str(line).unwrap_or(serde_json::Value::Null);
    out(&match dit.format {
        Shape::Json => {
            let told = serde_json::json!({
                "bench": "dit", "facts": facts, "median_ms": median, "p10_ms": low, "p90_ms": high, "fps": fps, "latent": digest,
                "steps_ms": steps, "ops": ops.iter().map(value).collect::<Vec<serde_json::Value>>(),
            });
            format!("{told}\n")
        }
        Shape::Text => {
            let mut text = format!(
                "{} on {}, {}, {}: a step of {FORWARDS} forwards takes {median:.2} ms (p10 {low:.2}, p90 {high:.2}, \
{} steps): {fps:.2} frames per second\n",
                dit.model.display(),
                dit.mesh,
                strategy.name(),
                dtype.name(),
                steps.len()
            );
            for (rank, r) in ranks.ready.iter().enumerate() {
                let planned: u64 = r.planned.iter().sum();
                text += &format!(
                    "  rank {rank}: planned {:.2} GiB with context and libraries, measured {:.2} GiB, warm after {:.1} s\n",
                    gib(planned),
                    gib(r.measured),
                    r.load_s
                );
            }
            text += &digest.as_ref().map(|d| format!("  latent {d}\n")).unwrap_or_default();
            text + &ops.first().map(|o| table_of_ops(o)).unwrap_or_default()
        }
    })?;
    Ok(0)
}

fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

fn table_of_ops(line: &str) -> String {
    let ops: std::collections::BTreeMap<String, (u32, f64)> = serde_json::from_str(line).unwrap_or_default();
    let mut rows: Vec<_> = ops.into_iter().collect();
    rows.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
    let all: f64 = rows.iter().map(|r| r.1.1).sum();
    let mut text = format!("  ops of rank 0, each launched and timed alone: {:.2} ms in all\n", all / 1e3);
    for (name, (count, us)) in rows {
        text += &format!(
            "  {:9.3} ms  {:5.1} %  {count:4} × {:9.2} µs  {name}\n",
            us / 1e3,
            100.0 * us / all,
            us / f64::from(count)
        );
    }
    text
}

/// The protocol of tools/bench.
fn serve(ranks: &mut Ranks, facts: &serde_json::Value) -> Outcome {
    out(&format!("{}\n", serde_json::json!({"ready": true, "facts": facts})))?;
    for line in std::io::stdin().lock().lines().map_while(Result::ok) {
        match line.split_once(' ').map_or((line.as_str(), ""), |(a, b)| (a, b)) {
            ("quit", _) => break,
            ("run", n) => {
                let count = n.trim().parse().unwrap_or(1);
                let steps = ranks.steps(count)?;
                out(&format!("{}\n", serde_json::json!({"steps_ms": steps})))?;
            }
            (other, _) => {
                out(&format!("{}\n", serde_json::json!({"error": format!("no word {other:?}")})))?;
            }
        }
    }
    Ok(0)
}

fn pixels(text: &str) -> Result<(u64, u64), Refusal> {
    let parts = text.split_once('x').and_then(|(h, w)| Some((h.parse().ok()?, w.parse().ok()?)));
    parts.ok_or_else(|| {
        Refusal::usage(vec![Diagnostic::error(
            &T0061,
            format!("--size {text} is not HEIGHTxWIDTH, such as 480x832"),
        )])
    })
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
