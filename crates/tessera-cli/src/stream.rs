//! `tessera stream`: runs a plan as processes on this host.

use std::path::{Path, PathBuf};

use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::iterator::Signals;
use tessera::Interrupt;
use tessera::Plan;
use tessera::modelled::Modelled;
use tessera::sim::{self, ClusterPrices, Machine, T0040};
use tessera::stream::{StreamOptions, StreamReport};
use tessera_base::Diagnostic;

use crate::options::{self, DeviceName, On, Planning};
use crate::progress::Progress;
use crate::say::{Outcome, Refusal, Shape, out};
use crate::values::{self, T0030};

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo
  tessera stream models/demo --mesh tp=2 --chunks 24 --prompt 'a blue square moves left'
  tessera stream models/demo --mesh tp=2 --topology pp1 --cache recompute
  tessera stream models/demo --chunks 12 --at 4:'a green circle moves up' --cut-at 8
  tessera stream --plan my-plan --out my-run
  tessera stream models/wan2.1-14b --mesh tp=8,pp=9 --device sim --cluster gb200-nvl72
  tessera stream models/demo --mesh tp=2 --device cuda      a GPU for each rank

Chunks count from 0. Ctrl-C stops after the chunk under way and leaves a whole folder; a second one kills.
Exit status 10 and above says how a run failed; the message names a code for `tessera explain`.";

/// Exit status of a process that was told to stop.
pub const INTERRUPTED: u8 = 130;
/// What a first request to stop does to ranks that stream.
pub const STOPPING: &str = "stopping after the chunk under way; again to kill";

/// Stream a video from a model over ranks of this machine
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, allow_negative_numbers = true)]
pub struct Args {
    /// Folder of the model, for example models/demo
    pub model: Option<PathBuf>,

    /// Run the plan in this folder instead of making one
    #[arg(long, value_name = "DIR")]
    pub plan: Option<PathBuf>,

    #[command(flatten)]
    pub planning: Planning,

    #[command(flatten)]
    pub on: On,

    /// Chunks to make
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub chunks: u32,

    /// What to show first
    #[arg(long, value_name = "TEXT", default_value = "a red circle moves right")]
    pub prompt: String,

    /// Seed of the noise
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Another prompt from a chunk on; may be repeated
    #[arg(long, value_name = "CHUNK:TEXT")]
    pub at: Vec<String>,

    /// Another seed from a chunk on; may be repeated
    #[arg(long, value_name = "CHUNK:SEED")]
    pub seed_at: Vec<String>,

    /// Forget all frames before this chunk; may be repeated
    #[arg(long, value_name = "CHUNK")]
    pub cut_at: Vec<u32>,

    /// Forget all frames before this chunk, and drop what is under way; may be repeated
    #[arg(long, value_name = "CHUNK")]
    pub flush_at: Vec<u32>,

    /// Have every rank load other weights of the same shapes before this chunk, which begins a scene; may be repeated
    #[arg(long, value_name = "CHUNK:DIR")]
    pub weights_at: Vec<String>,

    /// New folder for what comes out [default: out/MODEL-1, or the next free number]
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Write every frame as a PNG too
    #[arg(long)]
    pub png: bool,

    /// Allow more ranks than cores
    #[arg(long)]
    pub oversubscribe: bool,

    /// Have decode and encode last at least so many milliseconds a chunk: of its first latent, of the others together,
    /// of the anchor
    #[arg(long, value_name = "FIRST[,REST[,ENCODE]]", help_heading = MEASURING)]
    pub model_decode: Option<String>,

    /// Have the generator's passes of a chunk last at least so many milliseconds together
    #[arg(long, value_name = "MS", help_heading = MEASURING)]
    pub model_generate: Option<String>,

    #[command(flatten)]
    pub joining: crate::join::Joining,

    /// No progress
    #[arg(long, short)]
    pub quiet: bool,

    /// How to print the result
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

const MEASURING: &str = "Modelled times, to measure overlap";

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    let changes = changes(args)?;
    args.on.check()?;
    let (model, plan) = match &args.plan {
        None => args.planning.plan(args.model.as_deref(), None)?,
        Some(folder) => {
            if let Some(option) = args.planning.given() {
                return Err(contradiction(option));
            }
            match args.on.device {
                DeviceName::Cpu | DeviceName::Cuda => options::sealed(folder, args.model.as_ref())?,
                DeviceName::Sim => options::sealed_alone(folder)?,
            }
        }
    };
    let modelled = modelled(args, plan.video.stream.chunk_frames.saturating_sub(1))?;
    let options = StreamOptions {
        chunks: args.chunks,
        prompt: args.prompt.clone(),
        seed: args.seed,
        prompts_at: changes.prompts,
        seeds_at: changes.seeds,
        cuts_at: args.cut_at.clone(),
        flushes_at: args.flush_at.clone(),
        weights_at: changes.weights,
        out: args.out.clone().unwrap_or_else(|| free_folder(Path::new("out"), &plan.model)),
        png: args.png,
        oversubscribe: args.oversubscribe,
        modelled,
        device: args.on.device.of_ranks(),
        drill: None,
        command: std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect(),
    };
    if args.on.device == DeviceName::Sim {
        return modelled_run(args, &plan, &options);
    }
    if let Some(place) = args.joining.place()? {
        return crate::join::run(plan, &model, &options, &place, args.quiet, args.format);
    }
    let rank = vec![own_path()?, "rank".to_string()];
    let progress = Progress::new(args.quiet, args.chunks);
    let interrupt = Interrupt::default();
    let listener = listen(&interrupt, &progress, || STOPPING);
    let report = tessera::stream::run(&plan, &model, &options, rank, &interrupt, &mut |e| progress.on(&e));
    if let Some(listener) = listener {
        listener.close();
    }
    progress.end();
    tell(&report?, args.format, false)
}

/// Runs a plan on a modelled machine, in this process.
fn modelled_run(args: &Args, plan: &Plan, options: &StreamOptions) -> Outcome {
    if args.joining.place()?.is_some() {
        return Err(Refusal::usage(vec![
            Diagnostic::error(&T0040, "RANK and WORLD_SIZE ask this process to join others")
                .at("--device sim", "all ranks are modelled in one process")
                .hint("unset RANK and WORLD_SIZE, and start it once"),
        ]));
    }
    let ranks = plan.sealed.mesh().ranks();
    let machine =
        sim::machine(args.on.cluster.as_deref(), args.on.profile.as_deref(), args.plan.as_deref(), ranks)?;
    let prices = ClusterPrices::of(plan, &machine)?;
    let machine = Machine { prices: &prices, name: prices.name() };
    let progress = Progress::new(args.quiet, args.chunks);
    let interrupt = Interrupt::default();
    let listener = listen(&interrupt, &progress, || STOPPING);
    let report = sim::run(plan, options, machine, &interrupt, &mut |e| progress.on(&e));
    if let Some(listener) = listener {
        listener.close();
    }
    progress.end();
    tell(&report?, args.format, false)
}

struct Changes {
    prompts: Vec<(u32, String)>,
    seeds: Vec<(u32, u64)>,
    weights: Vec<(u32, PathBuf)>,
}

/// Reads `--at`, `--seed-at` and `--weights-at`, and tells every slip at once.
fn changes(args: &Args) -> Result<Changes, Refusal> {
    let mut wrong = Vec::new();
    let mut out = Changes { prompts: Vec::new(), seeds: Vec::new(), weights: Vec::new() };
    for text in &args.at {
        values::prompt_at(text).map_or_else(|d| wrong.push(d), |p| out.prompts.push(p));
    }
    for text in &args.seed_at {
        values::seed_at(text).map_or_else(|d| wrong.push(d), |s| out.seeds.push(s));
    }
    for text in &args.weights_at {
        values::weights_at(text).map_or_else(|d| wrong.push(d), |w| out.weights.push(w));
    }
    wrong.extend(twice("--at", out.prompts.iter().map(|(c, _)| *c)));
    wrong.extend(twice("--seed-at", out.seeds.iter().map(|(c, _)| *c)));
    wrong.extend(twice("--cut-at", args.cut_at.iter().copied()));
    wrong.extend(twice("--flush-at", args.flush_at.iter().copied()));
    wrong.extend(twice("--weights-at", out.weights.iter().map(|(c, _)| *c)));
    if wrong.is_empty() { Ok(out) } else { Err(Refusal::usage(wrong)) }
}

fn modelled(args: &Args, others: u64) -> Result<Modelled, Refusal> {
    let studio = args.model_decode.as_deref().map(|text| values::model_decode(text, others)).transpose();
    let generate = args.model_generate.as_deref();
    let generate = generate.map(|text| values::milliseconds("--model-generate", text)).transpose();
    match (studio, generate) {
        (Ok(studio), Ok(generate_ns)) => Ok(Modelled { studio, generate_ns }),
        (a, b) => Err(Refusal::usage([a.err(), b.err()].into_iter().flatten().collect::<Vec<_>>())),
    }
}

fn twice(option: &str, chunks: impl Iterator<Item = u32>) -> Option<Diagnostic> {
    let mut seen = std::collections::BTreeSet::new();
    let again = chunks.into_iter().find(|c| !seen.insert(*c))?;
    Some(
        Diagnostic::error(&T0030, format!("{option} names chunk {again} twice"))
            .hint("leave one of them out"),
    )
}

fn contradiction(option: &str) -> Refusal {
    Refusal::usage(vec![
        Diagnostic::error(
            &T0030,
            format!("{option} cannot be given with --plan: a sealed plan is not changed"),
        )
        .hint(format!("leave {option} out, or plan again without --plan")),
    ])
}

/// The first of `out/demo-1`, `out/demo-2`… that does not exist.
fn free_folder(parent: &Path, model: &str) -> PathBuf {
    let folder = |n: u32| parent.join(format!("{model}-{n}"));
    (1..u32::MAX).map(folder).find(|p| p.symlink_metadata().is_err()).unwrap_or_else(|| folder(u32::MAX))
}

/// The path of this very binary, which ranks run too.
pub fn own_path() -> Result<String, Diagnostic> {
    let why =
        |why: String| Diagnostic::error(&T0030, format!("the path of this binary cannot be told: {why}"));
    let path = std::env::current_exe().map_err(|e| why(e.to_string()))?;
    path.to_str().map(str::to_string).ok_or_else(|| why("it is not UTF-8".to_string()))
}

/// Turns Ctrl-C and a request to terminate into requests to stop. Without it they end the launcher at once, and
/// the ranks with it. `first` says what the first request does.
pub fn listen(
    interrupt: &Interrupt,
    progress: &Progress,
    first: impl Fn() -> &'static str + Send + 'static,
) -> Option<signal_hook::iterator::Handle> {
    let mut signals = Signals::new([SIGINT, SIGTERM]).ok()?;
    let handle = signals.handle();
    let (interrupt, progress) = (interrupt.clone(), progress.clone());
    let listen = move || {
        for (count, _) in signals.forever().enumerate() {
            interrupt.interrupt();
            match count {
                0 => progress.say(first()),
                1 => progress.say("killing the ranks"),
                // Ranks die with their launcher.
                _ => std::process::exit(INTERRUPTED.into()),
            }
        }
    };
    std::thread::Builder::new().name("signals".to_string()).spawn(listen).ok()?;
    Some(handle)
}

/// Prints how a run ended; `told`: not the failure, which was told when it came.
pub fn tell(report: &StreamReport, format: Shape, told: bool) -> Outcome {
    let text = match format {
        Shape::Json => json(report),
        Shape::Text => text(report),
    };
    out(&text)?;
    if let Some(f) = report.failure.as_ref().filter(|_| format == Shape::Text && !told) {
        tell_failure(f);
    }
    Ok(report.exit_code)
}

/// Prints how a run failed.
pub fn tell_failure(f: &tessera::Failure) {
    let rank = f.rank.map_or(String::new(), |r| format!(", rank {r}"));
    eprintln!(
        "failed[{}]: {}{rank}\n  {}\n\nmore: tessera explain {}",
        f.code,
        f.class.words(),
        f.text.replace("; ", "\n  "),
        f.code
    );
}

/// What a run's folder may hold, in the order in which a person looks.
const CONTENTS: &[(&str, &str)] = &[
    ("clip.png", "the video, an animated PNG for any browser"),
    ("latents.f32", "latents: the model has no decoder"),
    ("frames", "each frame as a PNG"),
    ("report.html", "what happened, for a browser"),
    ("trace.json", "a timeline for ui.perfetto.dev"),
    ("record.jsonl", "every chunk, for programs"),
];

fn text(r: &StreamReport) -> String {
    let state = match (&r.failure, r.interrupted) {
        (Some(_), _) => ", failed",
        (None, true) => ", stopped on request",
        (None, false) => "",
    };
    let chunks = if r.chunks == 1 { "1 chunk".to_string() } else { format!("{} chunks", r.chunks) };
    let frames = if r.frames > 0 {
        format!(", {} frames, {:.1} frames per second", r.frames, r.fps)
    } else {
        String::new()
    };
    let dropped = if r.dropped > 0 { format!(", {} dropped", r.dropped) } else { String::new() };
    let mut out = format!("{}: {chunks}{dropped}{frames}{state}\n", r.out.display());
    if let Some(machine) = &r.machine {
        out += &format!("modelled time on {machine}; no numbers computed, so there is no clip\n");
    }
    if let Some(golden) = &r.golden {
        out += &format!("golden {golden}\n");
    }
    if let Some(o) = &r.overlap {
        let ms = |ns: u64| ns as f64 / 1e6;
        let score = match o.stage0_ns {
            0 => "nothing to overlap".to_string(),
            _ => format!("OverlapScore {:.2}", o.score),
        };
        out += &format!(
            "period {:.1} ms: leader {:.1} ms, generator {:.1} ms, mesh idle {:.1} ms; {score}\n",
            ms(o.period_ns),
            ms(o.stage0_ns),
            ms(o.stage1_ns),
            ms(o.idle_ns),
        );
    }
    let there: Vec<Vec<String>> = CONTENTS
        .iter()
        .map(|(name, what)| (r.out.join(name), what))
        .filter(|(path, _)| path.exists())
        .map(|(path, what)| vec![path.display().to_string(), what.to_string()])
        .collect();
    out + &crate::say::table(&there, &[false, false])
}

fn json(r: &StreamReport) -> String {
    let failure = r.failure.as_ref().map(
        |f| serde_json::json!({"class": f.class.words(), "rank": f.rank, "code": f.code, "text": f.text}),
    );
    let fields = serde_json::json!({
        "out": r.out.display().to_string(),
        "chunks": r.chunks,
        "dropped": r.dropped,
        "frames": r.frames,
        "fps": r.fps,
        "golden": r.golden,
        "machine": r.machine,
        "pipeline": r.overlap.as_ref().map(|o| serde_json::json!({
            "chunks": o.chunks,
            "overlap_score": o.score,
            "passes": o.passes(),
            "period_ns": o.period_ns,
            "stage0_ns": o.stage0_ns,
            "stage1_ns": o.stage1_ns,
            "idle_ns": o.idle_ns,
            "queue_in": o.queue_in,
            "queue_out": o.queue_out,
            "digest_share": o.digest_share,
        })),
        "interrupted": r.interrupted,
        "exit_code": r.exit_code,
        "failure": failure,
    });
    fields.to_string() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_free_folder_is_taken() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(free_folder(dir.path(), "demo"), dir.path().join("demo-1"));
        std::fs::create_dir(dir.path().join("demo-1")).unwrap();
        std::fs::write(dir.path().join("demo-2"), "").unwrap();
        assert_eq!(free_folder(dir.path(), "demo"), dir.path().join("demo-3"));
    }

    #[test]
    fn a_chunk_named_twice_is_found() {
        assert!(twice("--at", [3, 1, 3].into_iter()).unwrap().message.contains("chunk 3 twice"));
        assert!(twice("--at", [3, 1].into_iter()).is_none());
    }
}
