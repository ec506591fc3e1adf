//! The search over mappings: all arrangements of a model over a rack of 72 devices, and how the time grows to 128 racks.
//!
//! The floor, by what has to be touched once. An arrangement that is priced one by one needs the bytes of up to four stages
//! that may be the fullest, 24 numbers each, and a comparison with the best so far: about 200 operations, 50 ns. Times of
//! layers are shared between arrangements, and most arrangements fall with a choice that breaks a rule: those are counted,
//! not visited.

use std::time::Instant;

use anyhow::{Context, ensure};
use tessera_cost::moe::Routing;
use tessera_cost::{Machine, Profile};
use tessera_mesh::clusters;
use tessera_models::zoo;
use tessera_plan::search::{Job, Objective, Outcome, Pins, Question, Space, search};

use crate::stats::{least, median, round, slope};
use crate::{Measured, Output};

/// Time the search over mappings of a rack and of many
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Times that each search is repeated
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,

    /// Racks of the largest machine, 72 devices each
    #[arg(long, value_name = "N", default_value_t = 128)]
    racks: u32,

    #[command(flatten)]
    pub output: Output,
}

const MODELS: [&str; 2] = ["sr-moe", "deepseek-v3"];
const CLUSTER: &str = "gb200-nvl72";

/// Name and job of each search; batches are those of one rack.
const JOBS: [(&str, Job); 3] = [
    ("train", Job::Train { batch: 4608, sequence: 4096 }),
    ("prefill", Job::Prefill { batch: 576, sequence: 2048 }),
    ("decode", Job::Decode { batch: 9216, context: 4096 }),
];

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.rounds > 0 && args.racks > 0, "--rounds and --racks are at least 1");
    let mut lines = Vec::new();
    let mut searches = Vec::new();
    for model in MODELS {
        for (name, job) in JOBS {
            let timed = Timed::of(&question(model, job, 1)?, args.rounds);
            lines.push(format!("{model:12} {name:8} {}", timed.line()));
            searches.push(
                serde_json::json!({"model": model, "job": name, "devices": 72, "search": timed.json()}),
            );
        }
    }
    let mut growth = Vec::new();
    for model in MODELS {
        for (name, job) in JOBS {
            let racks = std::iter::successors(Some(1), |r| Some(r * 4)).take_while(|r| *r < args.racks);
            let mut points = Vec::new();
            let mut timings = Vec::new();
            for racks in racks.chain([args.racks]) {
                let timed = Timed::of(&question(model, job, racks)?, args.rounds);
                lines.push(format!("{model:12} {name:8} {:>5} devices: {}", racks * 72, timed.line()));
                points.push((f64::from(racks).ln(), timed.cpu_s().ln()));
                timings.push(serde_json::json!({"devices": racks * 72, "search": timed.json()}));
            }
            let power = slope(&points);
            lines.push(format!("{model:12} {name:8} grows with the power {power:.2} of devices"));
            growth.push(
                serde_json::json!({"model": model, "job": name, "slope": round(power), "points": timings}),
            );
        }
    }
    let numbers = serde_json::json!({
        "bench": "search",
        "rounds": args.rounds,
        "searches": searches,
        "growth": growth,
    });
    Ok(Measured { text: lines.join("\n"), numbers })
}

/// A search of everything, on so many racks with so many times the batch.
fn question(model: &str, job: Job, racks: u32) -> anyhow::Result<Question> {
    let work = zoo::named(model).with_context(|| format!("no model {model}"))?.work(true);
    let cluster =
        clusters::named(CLUSTER).with_context(|| format!("no cluster {CLUSTER}"))?.with_racks(racks);
    let profile =
        Profile::named(&cluster.profile).with_context(|| format!("no profile {}", cluster.profile))?;
    let times = u64::from(racks);
    let job = match job {
        Job::Train { batch, sequence } => Job::Train { batch: batch * times, sequence },
        Job::Prefill { batch, sequence } => Job::Prefill { batch: batch * times, sequence },
        Job::Decode { batch, context } => Job::Decode { batch: batch * times, context },
    };
    let space = Space::of(&work, job, &cluster);
    Ok(Question {
        work,
        job,
        objective: Objective::Throughput,
        machine: Machine::new(cluster, profile),
        routing: Routing::Random,
        pins: Pins::default(),
        space,
    })
}

/// What a search found, and how long it took, each time.
struct Timed {
    found: Outcome,
    seconds: Vec<f64>,
    /// By the clock of the thread, which stands while others have the core.
    cpu_seconds: Vec<f64>,
}

impl Timed {
    fn of(q: &Question, rounds: u32) -> Timed {
        let time = || {
            let (begun, cpu) = (Instant::now(), thread_seconds());
            let found = search(q);
            (found, begun.elapsed().as_secs_f64(), thread_seconds() - cpu)
        };
        let (found, seconds, cpu) = time();
        let mut out = Timed { found, seconds: vec![seconds], cpu_seconds: vec![cpu] };
        for _ in 1..rounds {
            let (_, seconds, cpu) = time();
            out.seconds.push(seconds);
            out.cpu_seconds.push(cpu);
        }
        out
    }

    fn cpu_s(&self) -> f64 {
        median(&self.cpu_seconds)
    }

    fn line(&self) -> String {
        let f = &self.found;
        format!(
            "{} mappings, {} priced, {} legal, in {:.3} s (least {:.3} s, {:.3} s on the core): {:.2} million/s, priced {:.2}",
            f.considered,
            f.priced,
            f.legal,
            median(&self.seconds),
            least(&self.seconds),
            self.cpu_s(),
            f.considered as f64 / self.cpu_s() / 1e6,
            f.priced as f64 / self.cpu_s() / 1e6,
        )
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "considered": self.found.considered,
            "priced": self.found.priced,
            "legal": self.found.legal,
            "median_s": round(median(&self.seconds)),
            "min_s": round(least(&self.seconds)),
            "median_cpu_s": round(self.cpu_s()),
            "per_s": (self.found.considered as f64 / self.cpu_s()).round(),
            "priced_per_s": (self.found.priced as f64 / self.cpu_s()).round(),
        })
    }
}

/// Time that this thread has had a core.
fn thread_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}
