//! Loads published runs and estimates each with the planner.

use tessera_base::config::parse_toml;
use tessera_cost::layer::{GroupSpans, LayerCost, LayerLoad, layer_cost};
use tessera_cost::moe::{ExpertLoad, Routing};
use tessera_cost::params::{LayerLayout, OptimizerSharding, PipelineSchedule, Recompute, TpScheme};
use tessera_cost::profile::TpOverlap;
use tessera_cost::schedule::peak_in_flight;
use tessera_cost::{GroupSpan, MachineModel, Profile};
use tessera_ir::analytic_model::AnalyticModel;
use tessera_mesh::{MemoryTier, catalog};
use tessera_models::zoo;
use tessera_plan::search::budget::{StageFootprint, compute_totals};
use tessera_plan::search::{
    Candidate, Job, MemoryUse, Objective, Pins, SearchQuery, SearchSpace, estimate_candidate,
};

/// Tokens per sequence in all of these runs.
const SEQUENCE: u64 = 2048;

/// Micro-batches that the planner may choose among if a source does not give one.
const MICRO_BATCHES: [u32; 5] = [1, 2, 4, 8, 16];

/// A published number and its estimate.
#[derive(Clone, Copy)]
pub struct Pair {
    pub published: f64,
    pub estimated: f64,
}

impl Pair {
    /// Returns the error relative to the published number.
    pub fn error(&self) -> f64 {
        self.estimated / self.published - 1.0
    }
}

/// Returns the mean and the maximum of the absolute errors.
pub fn mean_and_max_error(pairs: &[Pair]) -> (f64, f64) {
    let errors = pairs.iter().map(|p| p.error().abs());
    (errors.clone().sum::<f64>() / pairs.len() as f64, errors.fold(0.0, f64::max))
}

/// One model of the recomputation paper.
pub struct TrainingRun {
    pub model: String,
    pub layout: String,
    /// Whether the profile was fitted on its iteration times.
    pub fitted: bool,
    /// Seconds per iteration: full recomputation; attention recomputed with sequence parallelism.
    pub iteration: [Pair; 2],
    /// GiB of weights, gradients and optimizer on a rank, without embedding and head.
    pub state: Pair,
    /// GiB of activations of the first stage's layers: tensor parallelism; attention recomputed
    /// with sequence parallelism.
    pub activations: [Pair; 2],
    /// Per cent of tensor parallelism alone: sequence parallelism, attention recomputed, both, full
    /// recomputation.
    pub shares: [Pair; 4],
}

/// One layer of the recomputation paper.
pub struct LayerRun {
    pub variant: String,
    pub forward: Pair,
    pub backward: Pair,
}

/// One row of the scaling table.
pub struct ScalingRow {
    pub model: String,
    pub devices: u32,
    pub layout: String,
    /// The planner's choice.
    pub micro_batch: u32,
    pub interleave: u32,
    /// TFLOP/s per device, before the scalar.
    pub rate: Pair,
}

/// The scaling table under one executor, and the scalar that fits it best.
pub struct ScalingTable {
    pub rows: Vec<ScalingRow>,
    pub scalar: f64,
}

impl ScalingTable {
    /// Returns the rates with the scalar applied.
    pub fn rates(&self) -> Vec<Pair> {
        self.rows.iter().map(|r| Pair { estimated: r.rate.estimated * self.scalar, ..r.rate }).collect()
    }

    /// Returns Spearman's rank correlation of estimated and published rates; ties share their
    /// ranks.
    pub fn rank_correlation(&self) -> f64 {
        let ranks = |of: fn(&Pair) -> f64| -> Vec<f64> {
            let all: Vec<f64> = self.rows.iter().map(|r| of(&r.rate)).collect();
            let rank = |x: &f64| {
                let below = all.iter().filter(|y| *y < x).count() as f64;
                let equal = all.iter().filter(|y| *y == x).count() as f64;
                below + (equal - 1.0) / 2.0
            };
            all.iter().map(rank).collect()
        };
        let (x, y) = (ranks(|p| p.published), ranks(|p| p.estimated));
        let middle = (x.len() as f64 - 1.0) / 2.0;
        let dot =
            |a: &[f64], b: &[f64]| -> f64 { a.iter().zip(b).map(|(a, b)| (a - middle) * (b - middle)).sum() };
        dot(&x, &y) / (dot(&x, &x) * dot(&y, &y)).sqrt()
    }
}

/// Returns enough 8×A100 hosts for `devices`, under a profile.
fn machine(devices: u32, profile: Profile) -> MachineModel {
    let hosts = devices.div_ceil(8).max(1);
    MachineModel::new(catalog::get("hgx-a100").expect("known cluster").with_racks(hosts), profile)
}

fn megatron() -> Profile {
    Profile::builtin("megatron").expect("known profile")
}

/// Returns the executor as of April 2021: no overlap, and a separate pass that accumulates weight
/// gradients.
pub fn megatron_2021() -> Profile {
    let mut p = megatron();
    p.base.overlap.tp = TpOverlap::Nothing;
    p.base.overlap.fuses_weight_gradient = false;
    p
}

fn work(model: &str, profile: &Profile) -> AnalyticModel {
    zoo::find_model(model).expect("known model").to_analytic_model(!profile.base.attention.stores_scores)
}

fn candidate(tp: u32, pp: u32, replicas: u32, interleave: u32, micro_batch: u32) -> Candidate {
    Candidate {
        layout: LayerLayout { tp, ..LayerLayout::SINGLE_RANK },
        pp,
        replicas,
        expert_replicas: tp * replicas,
        schedule: if interleave > 1 { PipelineSchedule::Interleaved } else { PipelineSchedule::OneFOneB },
        interleave,
        micro_batch,
        recompute: Recompute::Full,
        optimizer: OptimizerSharding::Replicated,
        experts_at: tessera_cost::params::ExpertStorage::Hbm,
        cache_at: tessera_cost::params::KvCacheStorage::Hbm,
    }
}

fn query(model: &str, devices: u32, batch: u64, profile: Profile) -> SearchQuery {
    let (work, machine) = (work(model, &profile), machine(devices, profile));
    let job = Job::Train { batch, sequence: SEQUENCE };
    let space = SearchSpace { devices, ..SearchSpace::for_job(&work, job, &machine.cluster) };
    SearchQuery {
        work,
        job,
        objective: Objective::Latency,
        machine,
        routing: Routing::Balanced,
        pins: Pins::default(),
        space,
    }
}

/// Returns the tables of the recomputation paper.
pub fn recomputation() -> (Vec<TrainingRun>, Vec<LayerRun>) {
    let text = include_str!("korthikanti-2022.toml");
    let file = parse_toml("korthikanti-2022.toml", text).expect("the tables");
    let of = |key: &str| file[key].as_array().expect("a table").clone();
    let models = of("models").into_iter().map(|row| {
        let n = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("missing number {key}"));
        let (tp, pp, v) = (n("tp") as u32, n("pp") as u32, n("interleave") as u32);
        let (batch, micro_batch) = (n("batch") as u64, n("micro_batch") as u32);
        let model = row["model"].as_str().expect("a name").to_string();
        let full = candidate(tp, pp, 1, v, micro_batch);
        let scheme = TpScheme::MegatronSequence;
        let selective = Candidate {
            layout: LayerLayout { scheme, ..full.layout },
            recompute: Recompute::Attention,
            ..full
        };
        let q = query(&model, tp * pp, batch, megatron());
        let seconds = |c: &Candidate| match estimate_candidate(&q, c) {
            Ok(r) => r.estimate.step_ns / 1e9,
            Err(why) => panic!("{model}: {why:?}"),
        };
        let held = |scheme, recompute| {
            let c = Candidate { layout: LayerLayout { scheme, ..full.layout }, recompute, ..full };
            let cost = one_layer(&q.machine, &q.work, &c.layout, recompute, micro_batch);
            let layers = q.work.layer_count() as f64 / f64::from(pp);
            compute_totals(
                &q.machine,
                &c,
                true,
                &StageFootprint {
                    dense_weights: layers * cost.weights,
                    saved_bytes: layers * cost.kept_bytes,
                    in_flight: peak_in_flight(c.schedule, pp, v, (batch / u64::from(micro_batch)) as u32),
                    ..StageFootprint::default()
                },
            )
        };
        let kept = |scheme, recompute| held(scheme, recompute).use_bytes(MemoryUse::Activations);
        let plain = held(TpScheme::Megatron, Recompute::None);
        let state = plain.use_bytes(MemoryUse::Weights)
            + plain.use_bytes(MemoryUse::Gradients)
            + plain.use_bytes(MemoryUse::OptimizerSharding);
        assert!(plain.tier_bytes(MemoryTier::Host) == 0.0);
        let whole = plain.use_bytes(MemoryUse::Activations);
        let gib = |key: &str, bytes: f64| Pair { published: n(key), estimated: bytes / f64::from(1 << 30) };
        let share = |key: &str, scheme, recompute| Pair {
            published: n(key),
            estimated: 100.0 * kept(scheme, recompute) / whole,
        };
        let (plain, both) = (TpScheme::Megatron, TpScheme::MegatronSequence);
        TrainingRun {
            layout: format!(
                "tp {tp}, pp {pp}, {v} {}, {batch} × 2048 tokens by {micro_batch}",
                if v == 1 { "chunk" } else { "chunks" }
            ),
            fitted: row["fitted"].as_bool().expect("a flag"),
            iteration: [
                Pair { published: n("full_s"), estimated: seconds(&full) },
                Pair { published: n("selective_s"), estimated: seconds(&selective) },
            ],
            state: gib("state_gib", state),
            activations: [
                gib("activations_gib", whole),
                gib("selective_gib", kept(both, Recompute::Attention)),
            ],
            shares: [
                share("sequence_pct", both, Recompute::None),
                share("attention_pct", plain, Recompute::Attention),
                share("selective_pct", both, Recompute::Attention),
                share("full_pct", plain, Recompute::Full),
            ],
            model,
        }
    });
    let m = machine(8, megatron());
    let w = work("gpt-22b", &m.profile);
    let layers = of("layer").into_iter().map(|row| {
        let word = |key: &str| row[key].as_str().expect("a string").to_string();
        let n = |key: &str| row[key].as_f64().expect("a number");
        let scheme = TpScheme::from_name(&word("scheme")).expect("a scheme");
        let recompute = Recompute::from_name(&word("recompute")).expect("a variant");
        let cost =
            one_layer(&m, &w, &LayerLayout { tp: 8, scheme, ..LayerLayout::SINGLE_RANK }, recompute, 4);
        let pair = |key: &str, ns: f64| Pair { published: n(key), estimated: ns / 1e6 };
        LayerRun {
            variant: word("variant"),
            forward: pair("forward_ms", cost.forward.total_ns()),
            backward: pair("backward_ms", cost.backward_total().total_ns()),
        }
    });
    (models.collect(), layers.collect())
}

fn one_layer(
    m: &MachineModel,
    w: &AnalyticModel,
    layout: &LayerLayout,
    recompute: Recompute,
    micro_batch: u32,
) -> LayerCost {
    let sequences = f64::from(micro_batch);
    let load = LayerLoad {
        tokens: sequences * SEQUENCE as f64,
        sequences,
        keys: SEQUENCE as f64,
        window: None,
        training: true,
        recompute,
    };
    let spans = GroupSpans {
        tp: GroupSpan::from_stride(layout.tp, 1, &m.cluster),
        ep: GroupSpan::ONE,
        expert_tp: GroupSpan::ONE,
    };
    layer_cost(m, &w.stacks[0].ops, layout, &load, &spans, &ExpertLoad::NONE)
}

/// Returns the scaling table. The source gives neither micro-batch nor interleaving of a row: the
/// planner chooses the fastest that fit, interleaving only with several stages.
pub fn scaling(profile: &Profile, most_pieces: u32) -> ScalingTable {
    let text = include_str!("narayanan-2021.toml");
    let file = parse_toml("narayanan-2021.toml", text).expect("the table");
    let rows = file["rows"].as_array().expect("rows").iter().map(|row| {
        let n = |key: &str| row[key].as_u64().unwrap_or_else(|| panic!("missing number {key}"));
        let (tp, pp, devices) = (n("tp") as u32, n("pp") as u32, n("devices") as u32);
        let model = row["model"].as_str().expect("a name").to_string();
        let q = query(&model, devices, n("batch"), profile.clone());
        let replicas = devices / tp / pp;
        let per_stage = q.work.layer_count() as u32 / pp;
        let pieces = (1..=if pp > 1 { per_stage.min(most_pieces) } else { 1 })
            .filter(|v| per_stage.is_multiple_of(*v));
        let best = pieces
            .flat_map(|v| MICRO_BATCHES.map(|b| candidate(tp, pp, replicas, v, b)))
            .filter(|c| (n("batch") / u64::from(replicas)).is_multiple_of(u64::from(c.micro_batch)))
            .filter_map(|c| Some((estimate_candidate(&q, &c).ok()?.estimate.step_ns, c)))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or_else(|| panic!("no candidate fits for {model}"));
        let (b, s) = (n("batch") as f64, SEQUENCE as f64);
        let (l, h, words) =
            (q.work.layer_count() as f64, q.work.hidden_size as f64, q.work.vocab_size as f64);
        // The paper's own count, recomputation included.
        let flops = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + words / (16.0 * l * h));
        ScalingRow {
            layout: format!("tp {tp}, pp {pp}, {replicas} replicas, batch {}", n("batch")),
            devices,
            micro_batch: best.1.micro_batch,
            interleave: best.1.interleave,
            rate: Pair {
                published: n("tflops") as f64,
                estimated: flops / best.0 / f64::from(devices) / 1e3,
            },
            model,
        }
    });
    let rows: Vec<ScalingRow> = rows.collect();
    // The mean error is piecewise linear in the scalar, with corners where a row fits exactly.
    let error = |scalar: f64| -> f64 {
        rows.iter().map(|r| (r.rate.estimated * scalar / r.rate.published - 1.0).abs()).sum()
    };
    let scalar = rows
        .iter()
        .map(|r| r.rate.published / r.rate.estimated)
        .min_by(|a, b| error(*a).total_cmp(&error(*b)))
        .expect("a row");
    ScalingTable { rows, scalar }
}
