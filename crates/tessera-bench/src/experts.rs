//! The slowest rank of a layer of experts under the imbalanced workloads W0 to W7: what the cost model estimates, and
//! what four CPU ranks need.
//!
//! The time is that of the grouped matmuls of experts. Ranks are threads that run these ops one after another, so that
//! no rank takes caches and cores from another, and the CPU time of the thread is measured, so that other processes do
//! not count; the shortest of several rounds counts, because what still disturbs a thread only lengthens its time.
//! The estimate is `grouped_gemm_ns` of the cost model under a profile that the same run fits to other choices of
//! experts, which are equal on all ranks.

mod profile;
mod ranks;

use anyhow::ensure;
use tessera_cost::moe::{ExpertLoad, Routing, expert_load, expert_popularity};
use tessera_filetests::experts::{Layer, draw_layer};

use self::profile::ExpertProfile;
use self::ranks::{LayerShape, RankWork, time_layers};
use crate::BenchResult;
use crate::stats::round_to_millis;

/// Time the experts of each rank under the imbalanced workloads W0 to W7, beside the cost model
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of timed rounds, of which the shortest time of each rank counts
    #[arg(long, value_name = "N", default_value_t = 15)]
    rounds: usize,

    /// Number of experts, a multiple of 4
    #[arg(long, value_name = "N", default_value_t = 64)]
    experts: usize,

    /// Experts of each token
    #[arg(long, value_name = "N", default_value_t = 2)]
    top_k: usize,

    /// Tokens of a step, a multiple of 4
    #[arg(long, value_name = "N", default_value_t = 256)]
    tokens: usize,

    /// Channels of a token, above the number of experts
    #[arg(long, value_name = "N", default_value_t = 512)]
    width: usize,

    /// Channels inside of an expert
    #[arg(long, value_name = "N", default_value_t = 512)]
    inner: usize,
}

/// Number of ranks, each with a part of the experts.
const RANKS: usize = 4;
/// Parts of each rank's experts among which the tokens of a fitted batch choose: all, a half and a quarter.
const FITTED_PARTS: [usize; 3] = [1, 2, 4];

/// Times every workload and compares the slowest rank with the estimate.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    let own = args.experts / RANKS;
    ensure!(args.rounds > 0, "--rounds 0: nothing to time");
    ensure!(
        args.experts.is_multiple_of(RANKS) && args.tokens.is_multiple_of(RANKS),
        "--experts and --tokens are multiples of {RANKS}"
    );
    ensure!(args.width > args.experts, "--width {}: a token carries a logit per expert", args.width);
    ensure!(
        args.top_k > 0 && 2 * args.top_k <= RANKS * (own / FITTED_PARTS[2]),
        "--top-k {}: twice as many are chosen among a quarter of the experts",
        args.top_k
    );
    let profile = fit_profile(args)?;
    let mut rows = Vec::new();
    for number in 0..8 {
        rows.push(WorkloadRow::measure(args, &profile, number)?);
    }
    let head = format!(
        "{} experts, {} per token, {} tokens, {} by {} channels; {RANKS} ranks one after another, shortest CPU time of each rank's thread\n\
         estimate: grouped_gemm_ns of the cost model; profile fitted to batches that are equal on all ranks: {}\n\
         workload  rows estimated  counted  experts estimated  counted  estimated  measured  ratio",
        args.experts,
        args.top_k,
        args.tokens,
        args.width,
        args.inner,
        profile.describe()
    );
    let lines: Vec<String> = std::iter::once(head).chain(rows.iter().map(WorkloadRow::format_line)).collect();
    let numbers = serde_json::json!({
        "bench": "cpu-experts",
        "ranks": RANKS,
        "experts": args.experts,
        "top_k": args.top_k,
        "tokens": args.tokens,
        "width": args.width,
        "inner": args.inner,
        "rounds": args.rounds,
        "time": "shortest CPU time of the thread in the grouped matmuls, one rank after another",
        "profile": profile.to_json(),
        "workloads": rows.iter().map(WorkloadRow::to_json).collect::<Vec<_>>(),
    });
    Ok(BenchResult { text: lines.join("\n"), numbers })
}

/// Fits the profile to batches whose tokens choose equally often among all experts of each rank, or among a part of
/// them: the parts vary the number of experts, and the choices per token the number of rows.
fn fit_profile(args: &Args) -> anyhow::Result<ExpertProfile> {
    let own = args.experts / RANKS;
    let mut points = Vec::new();
    for top_k in [args.top_k.div_ceil(2), args.top_k, 2 * args.top_k] {
        let draw = |part: usize| {
            let chosen = (own / part).max(1);
            let share = top_k as f64 / (chosen * RANKS) as f64;
            let popularity: Vec<f64> =
                (0..args.experts).map(|e| if e % own < chosen { share } else { 0.0 }).collect();
            args.draw(&popularity, top_k, 100 + part as u32)
        };
        let layers: Vec<Layer> = FITTED_PARTS.into_iter().map(draw).collect();
        points.extend(time_layers(&layers, args.shape(), args.rounds)?.concat());
    }
    ExpertProfile::fit(&points, args.width, args.inner)
}

impl Args {
    fn shape(&self) -> LayerShape {
        LayerShape { experts: self.experts, ranks: RANKS }
    }

    fn draw(&self, popularity: &[f64], top_k: usize, seed: u32) -> Layer {
        let layer = draw_layer(popularity, (top_k, self.tokens), seed);
        Layer { channels: self.width - self.experts, inner: self.inner, ..layer }
    }
}

/// A workload: the load that the cost model expects, and the slowest rank of its steps in the mean.
struct WorkloadRow {
    name: String,
    load: ExpertLoad,
    estimated_ns: f64,
    slowest: RankWork,
    steps: Vec<Vec<RankWork>>,
}

impl WorkloadRow {
    fn measure(args: &Args, profile: &ExpertProfile, number: u8) -> anyhow::Result<WorkloadRow> {
        let routing = Routing::Workload(number);
        let (experts, top_k, ranks, tokens) =
            (args.experts as u64, args.top_k as u64, RANKS as u32, args.tokens as f64);
        // The hotspot of W6 comes to every rank, and W7 has a burst in one step of eight.
        let steps = if number >= 6 { 8 } else { 2 };
        let draw = |step: u64| {
            let popularity = expert_popularity(experts, top_k, ranks, tokens, routing, step);
            args.draw(&popularity, args.top_k, step as u32)
        };
        let layers: Vec<Layer> = (0..steps).map(draw).collect();
        let steps = time_layers(&layers, args.shape(), args.rounds)?;
        let load = expert_load(experts, top_k, ranks, tokens, routing, 0);
        let slowest =
            steps.iter().filter_map(|of_ranks| of_ranks.iter().copied().max_by(|a, b| a.ns.total_cmp(&b.ns)));
        Ok(WorkloadRow {
            name: routing.name(),
            load,
            estimated_ns: profile.estimate_ns(&load),
            slowest: RankWork::mean(slowest),
            steps,
        })
    }

    fn ratio(&self) -> f64 {
        self.estimated_ns / self.slowest.ns
    }

    fn format_line(&self) -> String {
        format!(
            "{:8}  {:14.1}  {:7.1}  {:17.1}  {:7.1}  {:6.3} ms  {:5.3} ms  {:5.2}",
            self.name,
            self.load.slowest_rows(),
            self.slowest.rows,
            self.load.active_experts,
            self.slowest.experts,
            self.estimated_ns / 1e6,
            self.slowest.ns / 1e6,
            self.ratio()
        )
    }

    fn to_json(&self) -> serde_json::Value {
        let step = |of_ranks: &Vec<RankWork>| of_ranks.iter().map(|w| w.to_json()).collect::<Vec<_>>();
        serde_json::json!({
            "workload": self.name,
            "estimated": {
                "rows": round_to_millis(self.load.slowest_rows()),
                "experts": round_to_millis(self.load.active_experts),
                "ms": round_to_millis(self.estimated_ns / 1e6),
            },
            "slowest_rank": self.slowest.to_json(),
            "ratio": round_to_millis(self.ratio()),
            "steps": self.steps.iter().map(step).collect::<Vec<_>>(),
        })
    }
}
