//! Published runs, and what the planner says of each.

use tessera_base::fields::toml;
use tessera_cost::knobs::{Layout, Optimizer, Recompute, Schedule, Scheme};
use tessera_cost::layer::{LayerCost, Load, Spans, layer};
use tessera_cost::moe::{ExpertLoad, Routing};
use tessera_cost::profile::Hides;
use tessera_cost::schedule::in_flight;
use tessera_cost::{Machine, Profile, Span};
use tessera_ir::work::Work;
use tessera_mesh::{Tier, clusters};
use tessera_models::zoo;
use tessera_plan::search::budget::{Held, totals};
use tessera_plan::search::{Candidate, Job, Objective, Pins, Question, Space, Use, estimate};

/// Tokens of a sequence in all of these runs.
const SEQUENCE: u64 = 2048;

/// Micro-batches that the planner may choose among where a source does not say.
const MICRO_BATCHES: [u32; 5] = [1, 2, 4, 8, 16];

/// A number as published and as estimated.
#[derive(Clone, Copy)]
pub struct Pair {
    pub published: f64,
    pub estimated: f64,
}

impl Pair {
    /// Error as a share of what is published.
    pub fn error(&self) -> f64 {
        self.estimated / self.published - 1.0
    }
}

/// Mean and largest of the errors' magnitudes.
pub fn spread(pairs: &[Pair]) -> (f64, f64) {
    let errors = pairs.iter().map(|p| p.error().abs());
    (errors.clone().sum::<f64>() / pairs.len() as f64, errors.fold(0.0, f64::max))
}

/// One model of the recomputation paper.
pub struct Trained {
    pub model: String,
    pub arrangement: String,
    /// Whether the profile was fitted on its iteration times.
    pub fitted: bool,
    /// Everything computed again; attention computed again and sequence parallel. Seconds.
    pub iteration: [Pair; 2],
    /// GiB of weights, gradients and optimizer on a rank, embedding and head apart.
    pub state: Pair,
    /// GiB of activations of the first stage's layers: tensor parallel; attention computed again, sequence parallel.
    pub activations: [Pair; 2],
    /// Per cent of tensor parallel alone: sequence parallel, attention computed again, both, all computed again.
    pub shares: [Pair; 4],
}

/// One layer of it, alone.
pub struct Layer {
    pub variant: String,
    pub forward: Pair,
    pub backward: Pair,
}

/// One row of the scaling table.
pub struct Scaled {
    pub model: String,
    pub devices: u32,
    pub arrangement: String,
    /// What the planner chose.
    pub micro_batch: u32,
    pub interleave: u32,
    /// TFLOP/s per device, the one scalar not applied.
    pub rate: Pair,
}

/// The scaling table under one executor and the scalar that fits it best.
pub struct Scaling {
    pub rows: Vec<Scaled>,
    pub scalar: f64,
}

impl Scaling {
    /// Rates with the scalar applied.
    pub fn rates(&self) -> Vec<Pair> {
        self.rows.iter().map(|r| Pair { estimated: r.rate.estimated * self.scalar, ..r.rate }).collect()
    }

    /// Spearman's rank correlation of estimates with what is published; ties share their ranks.
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

/// A host of eight A100s, as many as wanted, under a profile.
fn machine(devices: u32, profile: Profile) -> Machine {
    let hosts = devices.div_ceil(8).max(1);
    Machine::new(clusters::named("hgx-a100").expect("a cluster").with_racks(hosts), profile)
}

fn megatron() -> Profile {
    Profile::named("megatron").expect("a profile")
}

/// The same executor as it was in April 2021: nothing hidden, gradients of weights added up in a pass of their own.
pub fn megatron_2021() -> Profile {
    let mut p = megatron();
    p.base.overlap.tp = Hides::Nothing;
    p.base.overlap.weight_gradient_fused = false;
    p
}

fn work(model: &str, profile: &Profile) -> Work {
    zoo::named(model).expect("a model").work(!profile.base.attention.stores_scores)
}

fn candidate(tp: u32, pp: u32, replicas: u32, interleave: u32, micro_batch: u32) -> Candidate {
    Candidate {
        layout: Layout { tp, ..Layout::WHOLE },
        pp,
        replicas,
        expert_replicas: tp * replicas,
        schedule: if interleave > 1 { Schedule::Interleaved } else { Schedule::OneFOneB },
        interleave,
        micro_batch,
        recompute: Recompute::Full,
        optimizer: Optimizer::Replicated,
        experts_at: tessera_cost::knobs::ExpertsAt::Hbm,
        cache_at: tessera_cost::knobs::CacheAt::Hbm,
    }
}

fn question(model: &str, devices: u32, batch: u64, profile: Profile) -> Question {
    let (work, machine) = (work(model, &profile), machine(devices, profile));
    let job = Job::Train { batch, sequence: SEQUENCE };
    let space = Space { devices, ..Space::of(&work, job, &machine.cluster) };
    Question {
        work,
        job,
        objective: Objective::Latency,
        machine,
        routing: Routing::Balanced,
        pins: Pins::default(),
        space,
    }
}

/// The tables of the recomputation paper.
pub fn recomputation() -> (Vec<Trained>, Vec<Layer>) {
    let text = include_str!("korthikanti-2022.toml");
    let file = toml("korthikanti-2022.toml", text).expect("the tables");
    let of = |key: &str| file[key].as_array().expect("a table").clone();
    let models = of("models").into_iter().map(|row| {
        let n = |key: &str| row[key].as_f64().unwrap_or_else(|| panic!("{key}"));
        let (tp, pp, v) = (n("tp") as u32, n("pp") as u32, n("interleave") as u32);
        let (batch, micro_batch) = (n("batch") as u64, n("micro_batch") as u32);
        let model = row["model"].as_str().expect("a name").to_string();
        let full = candidate(tp, pp, 1, v, micro_batch);
        let scheme = Scheme::MegatronSequence;
        let selective =
            Candidate { layout: Layout { scheme, ..full.layout }, recompute: Recompute::Attention, ..full };
        let q = question(&model, tp * pp, batch, megatron());
        let seconds = |c: &Candidate| match estimate(&q, c) {
            Ok(r) => r.estimate.step_ns / 1e9,
            Err(why) => panic!("{model}: {why:?}"),
        };
        let held = |scheme, recompute| {
            let c = Candidate { layout: Layout { scheme, ..full.layout }, recompute, ..full };
            let cost = one_layer(&q.machine, &q.work, &c.layout, recompute, micro_batch);
            let layers = q.work.layers() as f64 / f64::from(pp);
            totals(
                &q.machine,
                &c,
                true,
                &Held {
                    weights: layers * cost.weights,
                    keep_bytes: layers * cost.keep_bytes,
                    in_flight: in_flight(c.schedule, pp, v, (batch / u64::from(micro_batch)) as u32),
                    ..Held::default()
                },
            )
        };
        let kept = |scheme, recompute| held(scheme, recompute).of(Use::Activations);
        let plain = held(Scheme::Megatron, Recompute::None);
        let state = plain.of(Use::Weights) + plain.of(Use::Gradients) + plain.of(Use::Optimizer);
        assert!(plain.tier(Tier::Host) == 0.0);
        let whole = plain.of(Use::Activations);
        let gib = |key: &str, bytes: f64| Pair { published: n(key), estimated: bytes / f64::from(1 << 30) };
        let share = |key: &str, scheme, recompute| Pair {
            published: n(key),
            estimated: 100.0 * kept(scheme, recompute) / whole,
        };
        let (plain, both) = (Scheme::Megatron, Scheme::MegatronSequence);
        Trained {
            arrangement: format!(
                "tp {tp}, pp {pp}, {v} {}, {batch} × 2048 tokens by {micro_batch}",
                if v == 1 { "piece" } else { "pieces" }
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
        let word = |key: &str| row[key].as_str().expect("a word").to_string();
        let n = |key: &str| row[key].as_f64().expect("a number");
        let scheme = Scheme::named(&word("scheme")).expect("a scheme");
        let recompute = Recompute::named(&word("recompute")).expect("a variant");
        let cost = one_layer(&m, &w, &Layout { tp: 8, scheme, ..Layout::WHOLE }, recompute, 4);
        let pair = |key: &str, ns: f64| Pair { published: n(key), estimated: ns / 1e6 };
        Layer {
            variant: word("variant"),
            forward: pair("forward_ms", cost.forward.ns()),
            backward: pair("backward_ms", cost.backward().ns()),
        }
    });
    (models.collect(), layers.collect())
}

fn one_layer(m: &Machine, w: &Work, layout: &Layout, recompute: Recompute, micro_batch: u32) -> LayerCost {
    let sequences = f64::from(micro_batch);
    let load = Load {
        tokens: sequences * SEQUENCE as f64,
        sequences,
        keys: SEQUENCE as f64,
        window: None,
        training: true,
        recompute,
    };
    let spans = Spans { tp: Span::of(layout.tp, 1, &m.cluster), ep: Span::ONE, expert_tp: Span::ONE };
    layer(m, &w.stacks[0].rows, layout, &load, &spans, &ExpertLoad::NONE)
}

/// The scaling table. The source gives neither micro-batch nor interleaving of a row: both are whatever the planner finds
/// fastest among those that fit, interleaving only where there are stages.
pub fn scaling(profile: &Profile, most_pieces: u32) -> Scaling {
    let text = include_str!("narayanan-2021.toml");
    let file = toml("narayanan-2021.toml", text).expect("the table");
    let rows = file["rows"].as_array().expect("rows").iter().map(|row| {
        let n = |key: &str| row[key].as_u64().unwrap_or_else(|| panic!("{key}"));
        let (tp, pp, devices) = (n("tp") as u32, n("pp") as u32, n("devices") as u32);
        let model = row["model"].as_str().expect("a name").to_string();
        let q = question(&model, devices, n("batch"), profile.clone());
        let replicas = devices / tp / pp;
        let per_stage = q.work.layers() as u32 / pp;
        let pieces = (1..=if pp > 1 { per_stage.min(most_pieces) } else { 1 })
            .filter(|v| per_stage.is_multiple_of(*v));
        let best = pieces
            .flat_map(|v| MICRO_BATCHES.map(|b| candidate(tp, pp, replicas, v, b)))
            .filter(|c| (n("batch") / u64::from(replicas)).is_multiple_of(u64::from(c.micro_batch)))
            .filter_map(|c| Some((estimate(&q, &c).ok()?.estimate.step_ns, c)))
            .min_by(|a, b| a.0.total_cmp(&b.0))
            .unwrap_or_else(|| panic!("{model} fits nowhere"));
        let (b, s) = (n("batch") as f64, SEQUENCE as f64);
        let (l, h, words) = (q.work.layers() as f64, q.work.width as f64, q.work.vocab as f64);
        // The paper's own count, recomputation included.
        let flops = 96.0 * b * s * l * h * h * (1.0 + s / (6.0 * h) + words / (16.0 * l * h));
        Scaled {
            arrangement: format!("tp {tp}, pp {pp}, {replicas} replicas, batch {}", n("batch")),
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
    let rows: Vec<Scaled> = rows.collect();
    // The mean error is piecewise linear in the scalar, with its corners where a row fits exactly.
    let error = |scalar: f64| -> f64 {
        rows.iter().map(|r| (r.rate.estimated * scalar / r.rate.published - 1.0).abs()).sum()
    };
    let scalar = rows
        .iter()
        .map(|r| r.rate.published / r.rate.estimated)
        .min_by(|a, b| error(*a).total_cmp(&error(*b)))
        .expect("a row");
    Scaling { rows, scalar }
}
