//! The search over mappings: all mappings of a model on a rack of 72 devices, and how the time
//! grows up to 128 racks.
//!
//! Lower bound from the data that the search must touch once: a mapping that is priced individually
//! needs the bytes of up to four stages that may use the most memory, 24 numbers each, and a
//! comparison with the best mapping so far. These are about 200 operations, or 50 ns. Mappings
//! share layer times. Most mappings are rejected together with one choice that violates a
//! constraint; the search counts them and does not visit them.

use anyhow::{Context, ensure};
use tessera_cost::moe::Routing;
use tessera_cost::{MachineModel, Profile};
use tessera_mesh::catalog;
use tessera_models::zoo;
use tessera_plan::search::{Job, Objective, Pins, SearchOutcome, SearchQuery, SearchSpace, search};

use crate::BenchResult;
use crate::stats::{Rounds, median, min_value, regression_slope, round_to_millis};

/// Time the search over mappings of one rack and of many
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of repetitions of each search
    #[arg(long, value_name = "N", default_value_t = 3)]
    rounds: u32,

    /// Number of racks of the largest machine, 72 devices each
    #[arg(long, value_name = "N", default_value_t = 128)]
    racks: u32,
}

const MODELS: [&str; 2] = ["sr-moe", "deepseek-v3"];
const CLUSTER: &str = "gb200-nvl72";

/// Name and job of each search. The batches are for one rack.
const JOBS: [(&str, Job); 3] = [
    ("train", Job::Train { batch: 4608, sequence: 4096 }),
    ("prefill", Job::Prefill { batch: 576, sequence: 2048 }),
    ("decode", Job::Decode { batch: 9216, context: 4096 }),
];

/// Times the mapping search on one rack of 72 devices and on clusters of up to 128 racks.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.rounds > 0 && args.racks > 0, "--rounds and --racks are at least 1");
    let mut lines = Vec::new();
    let mut searches = Vec::new();
    for model in MODELS {
        for (name, job) in JOBS {
            let timed = TimedSearch::measure(&build_query(model, job, 1)?, args.rounds)?;
            lines.push(format!("{model:12} {name:8} {}", timed.format_line()));
            searches.push(
                serde_json::json!({"model": model, "job": name, "devices": 72, "search": timed.to_json()}),
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
                let timed = TimedSearch::measure(&build_query(model, job, racks)?, args.rounds)?;
                lines.push(format!("{model:12} {name:8} {:>5} devices: {}", racks * 72, timed.format_line()));
                points.push((f64::from(racks).ln(), timed.median_cpu_s().ln()));
                timings.push(serde_json::json!({"devices": racks * 72, "search": timed.to_json()}));
            }
            let power = regression_slope(&points);
            lines
                .push(format!("{model:12} {name:8} grows with exponent {power:.2} in the number of devices"));
            growth.push(
                serde_json::json!({"model": model, "job": name, "slope": round_to_millis(power), "points": timings}),
            );
        }
    }
    let numbers = serde_json::json!({
        "bench": "search",
        "rounds": args.rounds,
        "searches": searches,
        "growth": growth,
    });
    Ok(BenchResult { text: lines.join("\n"), numbers })
}

/// Builds a query over the whole search space on `racks` racks, with the batch scaled by the number
/// of racks.
fn build_query(model: &str, job: Job, racks: u32) -> anyhow::Result<SearchQuery> {
    let work = zoo::find_model(model).with_context(|| format!("no model {model}"))?.to_analytic_model(true);
    let cluster = catalog::get(CLUSTER).with_context(|| format!("no cluster {CLUSTER}"))?.with_racks(racks);
    let profile =
        Profile::builtin(&cluster.profile).with_context(|| format!("no profile {}", cluster.profile))?;
    let times = u64::from(racks);
    let job = match job {
        Job::Train { batch, sequence } => Job::Train { batch: batch * times, sequence },
        Job::Prefill { batch, sequence } => Job::Prefill { batch: batch * times, sequence },
        Job::Decode { batch, context } => Job::Decode { batch: batch * times, context },
    };
    let space = SearchSpace::for_job(&work, job, &cluster);
    Ok(SearchQuery {
        work,
        job,
        objective: Objective::Throughput,
        machine: MachineModel::new(cluster, profile),
        routing: Routing::Random,
        pins: Pins::default(),
        space,
    })
}

/// The outcome of a search and the durations of its repetitions.
struct TimedSearch {
    outcome: SearchOutcome,
    rounds: Rounds,
}

impl TimedSearch {
    fn measure(q: &SearchQuery, rounds: u32) -> anyhow::Result<TimedSearch> {
        let (outcome, rounds) = Rounds::measure(rounds, || Ok(search(q)))?;
        Ok(TimedSearch { outcome, rounds })
    }

    fn median_cpu_s(&self) -> f64 {
        median(&self.rounds.cpu_seconds)
    }

    fn format_line(&self) -> String {
        let f = &self.outcome;
        format!(
            "{} mappings, {} priced, {} legal, in {:.3} s (min {:.3} s, CPU {:.3} s): {:.2} million/s, priced {:.2}",
            f.candidate_count,
            f.costed_count,
            f.legal_count,
            median(&self.rounds.seconds),
            min_value(&self.rounds.seconds),
            self.median_cpu_s(),
            f.candidate_count as f64 / self.median_cpu_s() / 1e6,
            f.costed_count as f64 / self.median_cpu_s() / 1e6,
        )
    }

    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "considered": self.outcome.candidate_count,
            "priced": self.outcome.costed_count,
            "legal": self.outcome.legal_count,
            "median_s": round_to_millis(median(&self.rounds.seconds)),
            "min_s": round_to_millis(min_value(&self.rounds.seconds)),
            "median_cpu_s": round_to_millis(self.median_cpu_s()),
            "per_s": (self.outcome.candidate_count as f64 / self.median_cpu_s()).round(),
            "priced_per_s": (self.outcome.costed_count as f64 / self.median_cpu_s()).round(),
        })
    }
}
