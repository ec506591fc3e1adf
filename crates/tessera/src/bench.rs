//! `bench dit`: the network alone on GPUs, one process a GPU, with weights that nobody trained.
//!
//! A step is what a chunk costs: five denoising forwards over three frames of context, twelve frames of video. The coordinator
//! starts a process for each rank, tells all of them at once to go, and takes the slowest.

mod rank;
mod traced;
mod weights;

use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cost::measured::{Ran, medians};

use crate::gpus::Gpus;
use crate::{Mapping, Model, Overrides, Plan, cuda, plan};

pub use rank::rank_main;
pub use tessera_cost::Machine;
pub use tessera_cost::bars::Overlap;
pub use tessera_cost::measured::Line;
pub use traced::{OfRank, Traced, machine_for, write_timeline};
pub use weights::Synthetic;

/// A benchmark's rank that ended.
pub static T0061: Code = Code {
    id: "T0061",
    title: "a rank of a benchmark ended or fell silent",
    page: "`tessera bench dit` runs one process for each GPU. One of them ended, or said nothing for three minutes. Its last words \
follow; the other ranks were ended with it. Too little free memory on a GPU that others use is the usual reason: `tessera doctor` \
lists the GPUs, nvidia-smi who uses them.",
};

/// What is timed.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Asked {
    /// Folder with the model's config.
    pub model: PathBuf,
    /// How it is laid out; its text.
    pub mapping: String,
    /// Height and width of each picture in pixels, each timed by itself; the model's own where none is named.
    pub sizes: Vec<(u64, u64)>,
    /// Blocks, where not all.
    pub layers: Option<u64>,
    /// Whether the folder is a case: weights and inputs are its own, and what comes out is written beside them.
    pub case: bool,
}

/// One size of the picture.
#[derive(Debug)]
pub struct Point {
    /// Height and width in pixels, such as `480x832`.
    pub size: String,
    /// The model at that size.
    pub model: Model,
    /// Its plan.
    pub plan: Plan,
}

/// What a rank says when it is ready.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Ready {
    /// Digests of the plans, in the order of sizes.
    pub plans: Vec<String>,
    /// Bytes by plan, of all sizes together: weights, buffers, temporaries, and what context and libraries take.
    pub planned: [u64; 4],
    /// Bytes of the device that this process took, as the driver says.
    pub measured: u64,
    /// How ranks meet, by lane.
    pub ways: Vec<String>,
    /// Seconds from start to here.
    pub load_s: f64,
    /// What was compiled, captured and allocated before.
    pub counts: (u32, u32, u32),
}

impl Ready {
    /// Bytes by plan in all.
    #[must_use]
    pub fn planned_bytes(&self) -> u64 {
        self.planned.iter().sum()
    }

    /// By how much the plan is off, as a share of what was measured; none where nothing was.
    #[must_use]
    pub fn memory_error(&self) -> Option<f64> {
        (self.measured > 0).then(|| self.planned_bytes() as f64 / self.measured as f64 - 1.0)
    }
}

/// A step of a traced forward as a rank tells it: indices of its ops, its stream, its begin and its end in nanoseconds.
type Told = (Vec<usize>, String, f64, f64);

/// A coordinator of ranks.
#[derive(Debug)]
pub struct Ranks {
    ranks: Vec<Running>,
    /// What each rank said of itself.
    pub ready: Vec<Ready>,
}

#[derive(Debug)]
struct Running {
    child: Child,
    to: ChildStdin,
    from: Receiver<String>,
    rank: u32,
}

/// Longest silence of a rank while it loads 28 GB of weights or runs steps.
const SILENCE: Duration = Duration::from_secs(180);

/// Longest wait for a peer in one collective.
const PATIENCE: Duration = Duration::from_secs(30);

/// Forwards of a step.
pub const FORWARDS: usize = 5;

/// Frames of video that a step stands for.
pub const FRAMES: usize = 12;

impl Ranks {
    /// Starts a process for each rank of the mapping and waits until all have loaded and run every size.
    ///
    /// # Errors
    /// What a rank refuses, T0061.
    pub fn start(asked: &Asked) -> Result<Ranks, Diagnostics> {
        let mapping = Mapping::parse("mapping", &asked.mapping)?;
        let world = mapping.world().map_err(|d| vec![*d])?.iter().count() as u32;
        // What is missing is said once, before any process starts.
        cuda::check(&Gpus::look(), world as usize)?;
        let orders = serde_json::to_string(asked).map_err(|e| one(format!("orders: {e}")))?;
        let program = std::env::current_exe().map_err(|e| one(format!("this program's path: {e}")))?;
        let mut ranks = Vec::new();
        for rank in 0..world {
            let mut child = Command::new(&program)
                .args(["bench-rank", &rank.to_string(), &orders])
                .envs(cuda::environment())
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn()
                .map_err(|e| one(format!("rank {rank} cannot be started: {e}")))?;
            let (to, out) = match (child.stdin.take(), child.stdout.take()) {
                (Some(to), Some(out)) => (to, out),
                _ => return Err(one(format!("rank {rank} has no pipes"))),
            };
            let (send, from) = channel();
            std::thread::spawn(move || {
                for line in BufReader::new(out).lines().map_while(Result::ok) {
                    if send.send(line).is_err() {
                        return;
                    }
                }
            });
            ranks.push(Running { child, to, from, rank });
        }
        let mut all = Ranks { ranks, ready: Vec::new() };
        if world > 1 {
            // The first makes the names by which ranks find one another.
            let ids = all.ranks[0].answer()?;
            for r in &mut all.ranks[1..] {
                r.say(&ids)?;
            }
        }
        all.ready = all
            .ranks
            .iter_mut()
            .map(|r| {
                let line = r.answer()?;
                serde_json::from_str(&line).map_err(|e| one(format!("rank {} said {line:?}: {e}", r.rank)))
            })
            .collect::<Result<_, _>>()?;
        Ok(all)
    }

    /// Runs steps of a size for so long: a GPU settles under its power limit.
    ///
    /// # Errors
    /// T0061.
    pub fn warm(&mut self, at: usize, seconds: f64) -> Result<(), Diagnostics> {
        // Ranks step together or not at all, so it is not theirs to say when they are warm.
        let began = Instant::now();
        while began.elapsed().as_secs_f64() < seconds {
            self.steps(at, 1)?;
        }
        Ok(())
    }

    /// Runs steps of a size on all ranks together: milliseconds of each, the slowest rank's.
    ///
    /// # Errors
    /// T0061.
    pub fn steps(&mut self, at: usize, count: usize) -> Result<Vec<f64>, Diagnostics> {
        (0..count)
            .map(|_| {
                self.ask(&format!("step {at}"))?
                    .into_iter()
                    .try_fold(0.0, |most: f64, line| number(&line).map(|v| most.max(v)))
            })
            .collect()
    }

    /// Traces forwards of a size on all ranks together: each rank's steps, at their medians.
    ///
    /// # Errors
    /// T0061.
    pub fn trace(&mut self, at: usize, count: usize) -> Result<Vec<Vec<Ran>>, Diagnostics> {
        let ran = |(ops, stream, start_ns, end_ns): Told| Ran { ops, stream, start_ns, end_ns };
        self.ask(&format!("trace {at} {count}"))?
            .iter()
            .map(|line| {
                let told: Vec<Vec<Told>> =
                    serde_json::from_str(line).map_err(|e| one(format!("a trace cannot be read: {e}")))?;
                Ok(medians(&told.into_iter().map(|t| t.into_iter().map(ran).collect()).collect::<Vec<_>>()))
            })
            .collect()
    }

    /// Each rank's bits of the latent that a size's last forward predicted.
    ///
    /// # Errors
    /// T0061.
    pub fn latents(&mut self, at: usize) -> Result<Vec<String>, Diagnostics> {
        self.ask(&format!("latent {at}"))
    }

    /// What each rank answers to a word.
    fn ask(&mut self, word: &str) -> Result<Vec<String>, Diagnostics> {
        for r in &mut self.ranks {
            r.say(word)?;
        }
        self.ranks.iter_mut().map(Running::answer).collect()
    }
}

impl Drop for Ranks {
    fn drop(&mut self) {
        for r in &mut self.ranks {
            // One that has ended already has nothing to be ended.
            let _ = r.child.kill();
            let _ = r.child.wait();
        }
    }
}

impl Running {
    fn say(&mut self, word: &str) -> Result<(), Diagnostics> {
        let said = writeln!(self.to, "{word}").and_then(|()| self.to.flush());
        said.map_err(|e| one(format!("rank {} does not listen: {e}", self.rank)))
    }

    fn answer(&mut self) -> Result<String, Diagnostics> {
        match self.from.recv_timeout(SILENCE) {
            Ok(line) => Ok(line),
            Err(RecvTimeoutError::Timeout) => {
                Err(one(format!("rank {} said nothing for {} s", self.rank, SILENCE.as_secs())))
            }
            Err(RecvTimeoutError::Disconnected) => {
                let status = self.child.wait().map(|s| s.to_string()).unwrap_or_default();
                Err(one(format!("rank {} ended: {status}", self.rank)))
            }
        }
    }
}

fn one(message: impl Into<String>) -> Diagnostics {
    vec![Diagnostic::error(&T0061, message)]
}

fn number(line: &str) -> Result<f64, Diagnostics> {
    line.parse().map_err(|_| one(format!("a rank said {line:?} where milliseconds were due")))
}

/// The models and plans that are timed, by size.
///
/// # Errors
/// What is wrong with any of them.
pub fn planned(asked: &Asked) -> Result<Vec<Point>, Diagnostics> {
    if asked.case && asked.sizes.len() > 1 {
        return Err(one("a case is of one size"));
    }
    let named = asked.sizes.iter().map(|s| Point::of(asked, Some(*s)));
    let own = asked.sizes.is_empty().then(|| Point::of(asked, None));
    let points: Vec<Point> = named.chain(own).collect::<Result<_, _>>()?;
    for (i, p) in points.iter().enumerate() {
        if points[..i].iter().any(|q| q.size == p.size) {
            return Err(one(format!("size {} is asked for twice", p.size)));
        }
    }
    Ok(points)
}

impl Point {
    fn of(asked: &Asked, size: Option<(u64, u64)>) -> Result<Point, Diagnostics> {
        let overrides = Overrides { recompute: Some(false), ..Overrides::default() };
        let mut model = Model::open(&asked.model, &overrides)?;
        let (s, patch) = (&mut model.video.stream, model.video.wan.patch);
        if let Some((height, width)) = size {
            let cell = [s.stride[1] * patch[0], s.stride[2] * patch[1]];
            if height % cell[0] != 0 || width % cell[1] != 0 || height * width == 0 {
                return Err(one(format!(
                    "{height}x{width} is not a whole number of tokens of {} × {}",
                    cell[0], cell[1]
                )));
            }
            (s.height, s.width) = (height, width);
        }
        let size = format!("{}x{}", s.height, s.width);
        if let Some(layers) = asked.layers {
            model.video.wan.layers = layers.clamp(1, model.video.wan.layers);
        }
        let mapping = Mapping::parse("mapping", &asked.mapping)?;
        let plan = plan::make(&model.video, &model.name, "", &mapping)?;
        Ok(Point { size, model, plan })
    }

    /// Frames of context.
    #[must_use]
    pub fn fill(&self) -> u64 {
        self.model.video.stream.window_frames - self.model.video.stream.chunk_frames
    }

    /// The phase that is timed.
    #[must_use]
    pub fn phase(&self) -> String {
        format!("denoise.fill{}", self.fill())
    }
}

/// Digest of the bits that ranks hold of one tensor, by rows in order of rank; ranks that hold all of it count once.
#[must_use]
pub fn digest(parts: &[String]) -> String {
    let whole = match parts {
        [first, rest @ ..] if rest.iter().all(|r| r == first) => first.clone(),
        parts => parts.concat(),
    };
    blake3::hash(whole.as_bytes()).to_hex()[..16].to_string()
}

/// Median, and the tenth and ninetieth of a hundred.
#[must_use]
pub fn spread(times: &[f64]) -> (f64, f64, f64) {
    let mut sorted = times.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = |share: f64| {
        sorted.get(((sorted.len() as f64 - 1.0) * share).round() as usize).copied().unwrap_or(0.0)
    };
    (at(0.5), at(0.1), at(0.9))
}

#[cfg(test)]
mod tests {
    use tessera_ir::Opcode;
    use tessera_mesh::Rank;

    use super::*;
    use crate::{DtypePolicy, Strategy, comm};

    /// The demo in bf16 on two ranks.
    pub(crate) fn asked(sizes: &[(u64, u64)]) -> Asked {
        let mapping = Mapping {
            mesh: "tp=2".parse().unwrap(),
            strategy: Strategy::Ulysses,
            dtype: DtypePolicy::Bf16,
            ..Mapping::default()
        };
        Asked {
            model: std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo"),
            mapping: mapping.text(),
            sizes: sizes.to_vec(),
            layers: None,
            case: false,
        }
    }

    #[test]
    fn a_size_twice_or_of_a_fraction_of_a_token_is_refused() {
        let message = |sizes| planned(&asked(sizes)).unwrap_err()[0].message.clone();
        assert!(message(&[(96, 128), (96, 128)]).contains("twice"));
        assert!(message(&[(96, 128), (97, 128)]).contains("whole number of tokens"));
        let case = Asked { case: true, ..asked(&[(96, 128), (48, 64)]) };
        assert!(planned(&case).unwrap_err()[0].message.contains("one size"));
    }

    #[test]
    fn sizes_have_the_same_weights_and_lanes() {
        let points = planned(&asked(&[(96, 128), (48, 64)])).unwrap();
        let [a, b] = [&points[0], &points[1]];
        let weights = |p: &Point| {
            let program = p.plan.sealed.program(&p.phase(), Rank(1)).unwrap();
            let held = program.ops.iter().filter(|o| o.opcode == Opcode::Weight).map(|o| {
                (
                    o.name.clone(),
                    program.ty(o.results[0]).display(&program.mesh),
                    o.str("load").map(String::from),
                )
            });
            held.collect::<std::collections::BTreeSet<_>>()
        };
        assert!(weights(a).len() > 10 && weights(a) == weights(b));
        let lanes = |p: &Point| comm::groups(&p.plan.sealed).into_iter().map(|g| g.lane).collect::<Vec<_>>();
        assert_eq!(lanes(a), lanes(b));
        assert_ne!(a.plan.sealed.digest(), b.plan.sealed.digest());
    }
}
