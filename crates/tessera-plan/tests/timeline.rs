//! Compares timelines with the sums of the estimates: the same cost rows and transfers, interval by
//! interval.

use tessera_base::Nanoseconds;
use tessera_cost::intervals::{Interval, IntervalKind, makespan_ns, measure_overlap};
use tessera_cost::layer::{GroupSpans, LayerCost, LayerLoad, layer_cost};
use tessera_cost::moe::{ExpertLoad, Routing, expert_load};
use tessera_cost::params::TpScheme;
use tessera_cost::profile::TpOverlap;
use tessera_cost::{GroupSpan, MachineModel, Profile};
use tessera_mesh::catalog;
use tessera_models::zoo;
use tessera_plan::search::axes::choose_axes;
use tessera_plan::search::timeline::{BLOCK_LAYERS, CandidateTimeline, draw_timeline};
use tessera_plan::search::{Job, Objective, Pins, RankedCandidate, SearchQuery, SearchSpace, search};

fn query(model: &str, cluster: &str, job: Job, pins: &str, hides: TpOverlap) -> SearchQuery {
    let work = zoo::find_model(model).expect("known model").to_analytic_model(true);
    let cluster = catalog::get(cluster).expect("known cluster");
    let mut profile = Profile::builtin("ideal").expect("known profile");
    profile.base.overlap.tp = hides;
    profile.families.values_mut().for_each(|c| c.overlap.tp = hides);
    let space = SearchSpace::for_job(&work, job, &cluster);
    let pins = Pins::parse(pins).expect("valid pins");
    let machine = MachineModel::new(cluster, profile);
    SearchQuery {
        work,
        job,
        objective: Objective::Latency,
        machine,
        routing: Routing::PowerLaw(0.6),
        pins,
        space,
    }
}

fn draw_best(q: &SearchQuery) -> (RankedCandidate, CandidateTimeline) {
    let best = search(q).best_candidates.into_iter().next().expect("a legal candidate");
    let t = draw_timeline(q, &best);
    (best, t)
}

/// Returns the cost of the drawn layer, as the estimate computes it.
fn drawn_layer_cost(q: &SearchQuery, r: &RankedCandidate) -> LayerCost {
    let (c, l) = (&r.candidate, &r.candidate.layout);
    let tokens = f64::from(c.micro_batch) * q.job.query_tokens() as f64;
    let load = LayerLoad {
        tokens,
        sequences: f64::from(c.micro_batch),
        keys: q.job.context_tokens() as f64,
        window: None,
        training: false,
        recompute: c.recompute,
    };
    let of = |ranks, stride| GroupSpan::from_stride(ranks, stride, &q.machine.cluster);
    let spans = GroupSpans { tp: of(l.tp, 1), expert_tp: of(l.expert_tp, 1), ep: of(l.ep, l.expert_tp) };
    let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp);
    let load_of = |(n, k)| expert_load(n, k, l.ep, group, q.routing, l.capacity_pct);
    let routed = q.work.routed_experts().map_or(ExpertLoad::NONE, load_of);
    let stack = q
        .work
        .stacks
        .iter()
        .find(|s| s.ops.iter().any(|r| r.sharding == tessera_ir::analytic_model::OpSharding::Experts));
    layer_cost(&q.machine, &stack.unwrap_or(&q.work.stacks[0]).ops, l, &load, &spans, &routed)
}

fn assert_close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-6 * a.abs().max(b.abs()), "{a} against {b}");
}

fn sum_bars(bars: &[Interval], rank: u32, of: impl Fn(&Interval) -> bool) -> f64 {
    bars.iter().filter(|b| b.rank == rank && of(b)).map(Interval::duration_ns).sum()
}

#[test]
fn layers_with_nothing_hidden_take_the_sum_of_their_rows_and_transfers() {
    let job = Job::Prefill { batch: 1, sequence: 4096 };
    for scheme in [TpScheme::Megatron, TpScheme::MegatronSequence, TpScheme::Ulysses] {
        let pins = format!("tp=8,pp=1,scheme={},micro_batch=1", scheme.name());
        let q = query("llama-3.1-70b", "hgx-h200", job, &pins, TpOverlap::Nothing);
        let (r, t) = draw_best(&q);
        let layers = f64::from(BLOCK_LAYERS);
        let cost = drawn_layer_cost(&q, &r);
        assert_close(makespan_ns(&t.block_bars), layers * cost.forward.total_ns());
        assert_close(
            sum_bars(&t.block_bars, 0, |b| b.kind == IntervalKind::Collective),
            layers * cost.forward.tp_ns,
        );
        assert_close(
            sum_bars(&t.block_bars, 0, |b| b.track == "compute"),
            layers * (cost.forward.compute_ns + cost.forward.memory_ns),
        );
        assert_eq!(t.rank_labels.len(), 1);
        assert_eq!(t.overlap.hidden_ns, 0.0);
    }
}

#[test]
fn chunks_hide_part_of_what_they_carry() {
    let job = Job::Prefill { batch: 1, sequence: 16384 };
    let drawn_with = |hides| {
        let q = query("llama-3.1-70b", "hgx-h200", job, "tp=8,pp=1,scheme=megatron_sp,micro_batch=1", hides);
        draw_best(&q).1
    };
    let (whole, chunks) = (drawn_with(TpOverlap::Nothing), drawn_with(TpOverlap::Chunks));
    assert!(chunks.overlap.ratio() > 0.4, "{}", chunks.overlap.ratio());
    assert!(makespan_ns(&chunks.block_bars) < makespan_ns(&whole.block_bars));
}

#[test]
fn a_ring_sends_while_it_computes() {
    let job = Job::Prefill { batch: 1, sequence: 65536 };
    let q = query(
        "llama-3.1-70b",
        "hgx-h200",
        job,
        "tp=8,ring=4,pp=1,scheme=striped,micro_batch=1",
        TpOverlap::Nothing,
    );
    let (r, t) = draw_best(&q);
    let cost = drawn_layer_cost(&q, &r);
    assert_close(
        sum_bars(&t.block_bars, 0, |b| b.kind == IntervalKind::Collective),
        f64::from(BLOCK_LAYERS) * cost.forward.tp_ns,
    );
    let sends: Vec<Interval> = t
        .block_bars
        .iter()
        .filter(|b| b.kind != IntervalKind::Collective || b.name.starts_with("send"))
        .cloned()
        .collect();
    assert!(measure_overlap(&sends, false).ratio() > 0.99);
}

#[test]
fn experts_are_drawn_for_a_mean_rank_and_the_slowest_which_exchange_together() {
    let job = Job::Prefill { batch: 72, sequence: 2048 };
    let q = query("deepseek-v3", "gb200-nvl72", job, "tp=1,ep=72,pp=1,micro_batch=1", TpOverlap::Nothing);
    let (r, t) = draw_best(&q);
    let (cost, layers) = (drawn_layer_cost(&q, &r), f64::from(BLOCK_LAYERS));
    assert_eq!(t.layer_name, "experts");
    assert_eq!(t.rank_labels.len(), 2);
    assert_close(makespan_ns(&t.block_bars), layers * cost.forward.total_ns());
    for rank in 0..2 {
        let exchanged = |b: &Interval| b.track == "a2a" && b.kind == IntervalKind::Collective;
        assert_close(sum_bars(&t.block_bars, rank, exchanged), layers * cost.forward.ep_ns);
    }
    // Packing belongs to the exchange and leaves the compute stream free.
    let packing: Vec<&Interval> = t.block_bars.iter().filter(|b| b.kind == IntervalKind::Pack).collect();
    assert!(!packing.is_empty() && packing.iter().all(|b| b.track == "a2a"), "{packing:?}");
    let busy = |rank| sum_bars(&t.block_bars, rank, |b| b.kind != IntervalKind::Collective);
    assert_close(busy(1) - busy(0), layers * cost.forward.imbalance_ns);
    assert!(cost.forward.imbalance_ns > 0.0);
}

#[test]
fn two_micro_batches_at_once_hide_their_exchanges() {
    let pins = "tp=1,ep=72,pp=1,micro_batch=1";
    let of = |batch| {
        query("deepseek-v3", "gb200-nvl72", Job::Prefill { batch, sequence: 4096 }, pins, TpOverlap::Nothing)
    };
    let (one, two) = (draw_best(&of(72)).1, draw_best(&of(4 * 72)).1);
    assert_eq!(one.overlap.hidden_ns, 0.0);
    assert!(two.overlap.ratio() > 0.5, "{}", two.overlap.ratio());
    assert!(makespan_ns(&two.block_bars) < 2.0 * makespan_ns(&one.block_bars));
    assert!(two.block_bars.iter().any(|b| b.name.ends_with("(2)")));
}

#[test]
fn a_wave_waits_as_its_schedule_says() {
    let job = Job::Train { batch: 64, sequence: 4096 };
    let q =
        query("gpt-18b", "hgx-h200", job, "tp=2,pp=4,dp=1,schedule=1f1b,micro_batch=1", TpOverlap::Nothing);
    let (r, t) = draw_best(&q);
    let m = f64::from(r.micro_batches);
    assert_eq!(t.wave_bars.len(), 4 * 2 * r.micro_batches as usize);
    // Stages differ a little (embedding, head), so the slowest stage idles a little less than equal
    // stages would.
    let fullest = t.idle_shares.iter().copied().fold(1.0, f64::min);
    let even = 3.0 / (m + 3.0);
    assert!(fullest < even + 0.01 && fullest > even - 0.06, "{fullest} against {even}");
    assert!((makespan_ns(&t.wave_bars) / r.estimate.step_ns - 1.0).abs() < 0.1);
}

#[test]
fn every_schedule_draws_each_micro_batch_on_each_stage() {
    let job = Job::Train { batch: 32, sequence: 2048 };
    for (schedule, turns) in [("interleaved,interleave=2", 4), ("zb-h1", 3), ("zb-h2", 3)] {
        let pins = format!("tp=2,pp=4,dp=1,schedule={schedule},micro_batch=1");
        let q = query("gpt-18b", "hgx-h200", job, &pins, TpOverlap::Nothing);
        let (r, t) = draw_best(&q);
        assert_eq!(t.wave_bars.len(), 4 * turns * r.micro_batches as usize, "{schedule}");
        assert!(t.wave_bars.iter().all(|b| b.duration_ns() > 0.0));
    }
}

#[test]
fn a_deadline_that_one_device_misses_is_met_by_sharding_matmuls() {
    let job = Job::Decode { batch: 8, context: 4096 };
    let ask = |ns| {
        let mut q = query("llama-3.1-8b", "hgx-h200", job, "", TpOverlap::Nothing);
        q.objective = Objective::Deadline(Nanoseconds(ns));
        choose_axes(&q).expect("an axis choice")
    };
    let easy = ask(100_000_000);
    assert_eq!((easy.tp, easy.pp, easy.dp, easy.meets_targets), (1, 1, 1, true));
    let hard = ask(easy.latency_ns as u64 * 2 / 3);
    assert!(hard.tp > 1 && hard.pp == 1 && hard.meets_targets, "{hard:?}");
    // A decode step of eight tokens reads every weight once, and tp shards nearly all of them.
    assert!(hard.reasons.iter().any(|s| s.contains("bandwidth-bound") && s.contains("at best")), "{hard:?}");
    let hopeless = ask(1000);
    assert!(
        !hopeless.meets_targets && hopeless.reasons.iter().any(|s| s.contains("closest")),
        "{hopeless:?}"
    );
}

#[test]
fn a_model_larger_than_a_device_is_cut_before_anything_else() {
    let mut q =
        query("llama-3.1-405b", "hgx-h200", Job::Decode { batch: 1, context: 1024 }, "", TpOverlap::Nothing);
    q.objective = Objective::Deadline(Nanoseconds(u64::MAX));
    let choice = choose_axes(&q).expect("an axis choice");
    // 810 GB over devices of 141 GB.
    assert!(choice.tp * choice.pp >= 6, "{choice:?}");
}

#[test]
fn cold_experts_are_fetched_ahead_as_far_as_they_are_forecast() {
    let job = Job::Decode { batch: 512, context: 4096 };
    let pins = "tp=1,ep=8,pp=1,experts_at=host,precision=bf16";
    let of = |share: f64| {
        let mut q = query("deepseek-v3", "hgx-h200", job, pins, TpOverlap::Nothing);
        q.space.prefetch_hit_rate = share;
        draw_best(&q).1
    };
    let (blind, half, all) = (of(0.0), of(0.5), of(1.0));
    let fetched = |t: &CandidateTimeline, word: &str| {
        sum_bars(&t.block_bars, 0, |b| b.kind == IntervalKind::Fetch && b.name.starts_with(word))
    };
    // A layer waits for the experts that its router selects.
    assert!(fetched(&blind, "prefetch") == 0.0 && fetched(&blind, "fetch") > 0.0);
    for fetch in blind.block_bars.iter().filter(|b| b.kind == IntervalKind::Fetch) {
        let beside =
            |b: &&Interval| b.rank == fetch.rank && b.start_ns < fetch.end_ns && b.end_ns > fetch.start_ns;
        let busy: Vec<&Interval> =
            blind.block_bars.iter().filter(beside).filter(|b| b.kind == IntervalKind::Compute).collect();
        assert!(busy.is_empty(), "{} overlaps {busy:?}", fetch.name);
    }
    assert!(fetched(&all, "fetch") == 0.0 && fetched(&all, "prefetch") > 0.0);
    // Two fetches begin instead of one; no byte is moved twice.
    let (both, one) = (fetched(&half, "fetch") + fetched(&half, "prefetch"), fetched(&blind, "fetch"));
    assert!(both >= one && both < 1.001 * one, "{both} {one}");
    // The gate, the estimate and the drawing have one window: experts arrive one layer ahead.
    let mut q = query("deepseek-v3", "hgx-h200", job, pins, TpOverlap::Nothing);
    q.space.prefetch_hit_rate = 0.01;
    let (best, drawn) = draw_best(&q);
    let gate = best.gates.iter().find(|g| g.id == "experts.prefetch").expect("known gate");
    assert_eq!(gate.value, 2.0, "{}", gate.explanation);
    let start = |name: &str| {
        drawn.block_bars.iter().find(|b| b.name == name).unwrap_or_else(|| panic!("no {name}")).start_ns
    };
    assert!(start("prefetch experts of layer 1") < 1.0, "the fetch for layer 1 begins with layer 0");
    // The io stream fetches once per layer, and layers are no faster than their fetch.
    assert!(makespan_ns(&all.block_bars) + 1.0 >= fetched(&all, "prefetch"));
    let spans = [&all, &half, &blind].map(|t| makespan_ns(&t.block_bars));
    assert!(spans[0] < spans[1] && spans[1] < spans[2], "{spans:?}");
}
