//! Timelines against the sums that estimates are made from: the same rows, the same transfers, bar by bar.

use tessera_base::Nanoseconds;
use tessera_cost::bars::{Bar, Kind, makespan_ns, overlap};
use tessera_cost::knobs::Scheme;
use tessera_cost::layer::{LayerCost, Load, Spans, layer};
use tessera_cost::moe::{ExpertLoad, Routing, experts};
use tessera_cost::profile::Hides;
use tessera_cost::{Machine, Profile, Span};
use tessera_mesh::clusters;
use tessera_models::zoo;
use tessera_plan::search::axes::axes;
use tessera_plan::search::timeline::{LAYERS, Timeline, timeline};
use tessera_plan::search::{Job, Objective, Pins, Question, Ranked, Space, search};

fn question(model: &str, cluster: &str, job: Job, pins: &str, hides: Hides) -> Question {
    let work = zoo::named(model).expect("a model").work(true);
    let cluster = clusters::named(cluster).expect("a cluster");
    let mut profile = Profile::named("ideal").expect("a profile");
    profile.base.overlap.tp = hides;
    profile.families.values_mut().for_each(|c| c.overlap.tp = hides);
    let space = Space::of(&work, job, &cluster);
    let pins = Pins::parse(pins).expect("pins");
    let machine = Machine::new(cluster, profile);
    Question {
        work,
        job,
        objective: Objective::Latency,
        machine,
        routing: Routing::PowerLaw(0.6),
        pins,
        space,
    }
}

fn drawn(q: &Question) -> (Ranked, Timeline) {
    let best = search(q).best.into_iter().next().expect("a legal arrangement");
    let t = timeline(q, &best);
    (best, t)
}

/// The layer that a timeline draws, as the estimate adds it up.
fn summed(q: &Question, r: &Ranked) -> LayerCost {
    let (c, l) = (&r.candidate, &r.candidate.layout);
    let tokens = f64::from(c.micro_batch) * q.job.queries() as f64;
    let load = Load {
        tokens,
        sequences: f64::from(c.micro_batch),
        keys: q.job.context() as f64,
        window: None,
        training: false,
        recompute: c.recompute,
    };
    let of = |ranks, stride| Span::of(ranks, stride, &q.machine.cluster);
    let spans = Spans { tp: of(l.tp, 1), expert_tp: of(l.expert_tp, 1), ep: of(l.ep, l.expert_tp) };
    let group = tokens * f64::from(l.expert_tp * l.ep) / f64::from(l.tp);
    let load_of = |(n, k)| experts(n, k, l.ep, group, q.routing, l.capacity_pct);
    let routed = q.work.experts().map_or(ExpertLoad::NONE, load_of);
    let stack =
        q.work.stacks.iter().find(|s| s.rows.iter().any(|r| r.cut == tessera_ir::work::RowCut::Experts));
    layer(&q.machine, &stack.unwrap_or(&q.work.stacks[0]).rows, l, &load, &spans, &routed)
}

fn close(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-6 * a.abs().max(b.abs()), "{a} against {b}");
}

fn sum(bars: &[Bar], rank: u32, of: impl Fn(&Bar) -> bool) -> f64 {
    bars.iter().filter(|b| b.rank == rank && of(b)).map(Bar::ns).sum()
}

#[test]
fn layers_with_nothing_hidden_take_the_sum_of_their_rows_and_transfers() {
    let job = Job::Prefill { batch: 1, sequence: 4096 };
    for scheme in [Scheme::Megatron, Scheme::MegatronSequence, Scheme::Ulysses] {
        let pins = format!("tp=8,pp=1,scheme={},micro_batch=1", scheme.name());
        let q = question("llama-3.1-70b", "hgx-h200", job, &pins, Hides::Nothing);
        let (r, t) = drawn(&q);
        let layers = f64::from(LAYERS);
        let cost = summed(&q, &r);
        close(makespan_ns(&t.block), layers * cost.forward.ns());
        close(sum(&t.block, 0, |b| b.kind == Kind::Collective), layers * cost.forward.tp_ns);
        close(
            sum(&t.block, 0, |b| b.lane == "compute"),
            layers * (cost.forward.compute_ns + cost.forward.memory_ns),
        );
        assert_eq!(t.ranks.len(), 1);
        assert_eq!(t.overlap.hidden_ns, 0.0);
    }
}

#[test]
fn chunks_hide_part_of_what_they_carry() {
    let job = Job::Prefill { batch: 1, sequence: 16384 };
    let drawn_with = |hides| {
        let q =
            question("llama-3.1-70b", "hgx-h200", job, "tp=8,pp=1,scheme=megatron_sp,micro_batch=1", hides);
        drawn(&q).1
    };
    let (whole, chunks) = (drawn_with(Hides::Nothing), drawn_with(Hides::Chunks));
    assert!(chunks.overlap.ratio() > 0.4, "{}", chunks.overlap.ratio());
    assert!(makespan_ns(&chunks.block) < makespan_ns(&whole.block));
}

#[test]
fn a_ring_sends_while_it_computes() {
    let job = Job::Prefill { batch: 1, sequence: 65536 };
    let q = question(
        "llama-3.1-70b",
        "hgx-h200",
        job,
        "tp=8,ring=4,pp=1,scheme=striped,micro_batch=1",
        Hides::Nothing,
    );
    let (r, t) = drawn(&q);
    let cost = summed(&q, &r);
    close(sum(&t.block, 0, |b| b.kind == Kind::Collective), f64::from(LAYERS) * cost.forward.tp_ns);
    let sends: Vec<Bar> = t
        .block
        .iter()
        .filter(|b| b.kind != Kind::Collective || b.name.starts_with("send"))
        .cloned()
        .collect();
    assert!(overlap(&sends, false).ratio() > 0.99);
}

#[test]
fn experts_are_drawn_for_a_mean_rank_and_the_slowest_which_exchange_together() {
    let job = Job::Prefill { batch: 72, sequence: 2048 };
    let q = question("deepseek-v3", "gb200-nvl72", job, "tp=1,ep=72,pp=1,micro_batch=1", Hides::Nothing);
    let (r, t) = drawn(&q);
    let (cost, layers) = (summed(&q, &r), f64::from(LAYERS));
    assert_eq!(t.layer, "experts");
    assert_eq!(t.ranks.len(), 2);
    close(makespan_ns(&t.block), layers * cost.forward.ns());
    for rank in 0..2 {
        close(sum(&t.block, rank, |b| b.lane == "a2a"), layers * cost.forward.ep_ns);
    }
    let busy = |rank| sum(&t.block, rank, |b| b.lane == "compute");
    close(busy(1) - busy(0), layers * cost.forward.imbalance_ns);
    assert!(cost.forward.imbalance_ns > 0.0);
}

#[test]
fn two_micro_batches_at_once_hide_their_exchanges() {
    let pins = "tp=1,ep=72,pp=1,micro_batch=1";
    let of = |batch| {
        question("deepseek-v3", "gb200-nvl72", Job::Prefill { batch, sequence: 4096 }, pins, Hides::Nothing)
    };
    let (one, two) = (drawn(&of(72)).1, drawn(&of(4 * 72)).1);
    assert_eq!(one.overlap.hidden_ns, 0.0);
    assert!(two.overlap.ratio() > 0.5, "{}", two.overlap.ratio());
    assert!(makespan_ns(&two.block) < 2.0 * makespan_ns(&one.block));
    assert!(two.block.iter().any(|b| b.name.ends_with("(2)")));
}

#[test]
fn a_wave_waits_as_its_schedule_says() {
    let job = Job::Train { batch: 64, sequence: 4096 };
    let q =
        question("gpt-18b", "hgx-h200", job, "tp=2,pp=4,dp=1,schedule=1f1b,micro_batch=1", Hides::Nothing);
    let (r, t) = drawn(&q);
    let m = f64::from(r.micro_batches);
    assert_eq!(t.wave.len(), 4 * 2 * r.micro_batches as usize);
    // Stages differ a little (embedding, head), so the fullest waits a little less than equal ones would.
    let fullest = t.idle.iter().copied().fold(1.0, f64::min);
    let even = 3.0 / (m + 3.0);
    assert!(fullest < even + 0.01 && fullest > even - 0.06, "{fullest} against {even}");
    assert!((makespan_ns(&t.wave) / r.estimate.step_ns - 1.0).abs() < 0.1);
}

#[test]
fn every_schedule_draws_each_micro_batch_on_each_stage() {
    let job = Job::Train { batch: 32, sequence: 2048 };
    for (schedule, turns) in [("interleaved,interleave=2", 4), ("zb-h1", 3), ("zb-h2", 3)] {
        let pins = format!("tp=2,pp=4,dp=1,schedule={schedule},micro_batch=1");
        let q = question("gpt-18b", "hgx-h200", job, &pins, Hides::Nothing);
        let (r, t) = drawn(&q);
        assert_eq!(t.wave.len(), 4 * turns * r.micro_batches as usize, "{schedule}");
        assert!(t.wave.iter().all(|b| b.ns() > 0.0));
    }
}

#[test]
fn a_deadline_that_one_device_misses_is_met_by_cutting_products() {
    let job = Job::Decode { batch: 8, context: 4096 };
    let ask = |ns| {
        let mut q = question("llama-3.1-8b", "hgx-h200", job, "", Hides::Nothing);
        q.objective = Objective::Deadline(Nanoseconds(ns));
        axes(&q).expect("a choice")
    };
    let easy = ask(100_000_000);
    assert_eq!((easy.tp, easy.pp, easy.dp, easy.meets), (1, 1, 1, true));
    let hard = ask(easy.latency_ns as u64 * 2 / 3);
    assert!(hard.tp > 1 && hard.pp == 1 && hard.meets, "{hard:?}");
    // Eight tokens read every weight once, and tp divides nearly all of them.
    assert!(hard.says.iter().any(|s| s.contains("bandwidth-bound") && s.contains("at best")), "{hard:?}");
    let hopeless = ask(1000);
    assert!(!hopeless.meets && hopeless.says.iter().any(|s| s.contains("closest")), "{hopeless:?}");
}

#[test]
fn a_model_larger_than_a_device_is_cut_before_anything_else() {
    let mut q =
        question("llama-3.1-405b", "hgx-h200", Job::Decode { batch: 1, context: 1024 }, "", Hides::Nothing);
    q.objective = Objective::Deadline(Nanoseconds(u64::MAX));
    let choice = axes(&q).expect("a choice");
    // 810 GB over devices of 141 GB.
    assert!(choice.tp * choice.pp >= 6, "{choice:?}");
}

#[test]
fn cold_experts_are_fetched_ahead_as_far_as_they_are_forecast() {
    let job = Job::Decode { batch: 512, context: 4096 };
    let pins = "tp=1,ep=8,pp=1,experts_at=host,precision=bf16";
    let of = |share: f64| {
        let mut q = question("deepseek-v3", "hgx-h200", job, pins, Hides::Nothing);
        q.space.forecast = share;
        drawn(&q).1
    };
    let (blind, half, all) = (of(0.0), of(0.5), of(1.0));
    let fetched =
        |t: &Timeline, word: &str| sum(&t.block, 0, |b| b.kind == Kind::Fetch && b.name.starts_with(word));
    // What the router asks for, its layer waits for.
    assert!(fetched(&blind, "prefetch") == 0.0 && fetched(&blind, "fetch") > 0.0);
    for fetch in blind.block.iter().filter(|b| b.kind == Kind::Fetch) {
        let beside =
            |b: &&Bar| b.rank == fetch.rank && b.start_ns < fetch.end_ns && b.end_ns > fetch.start_ns;
        let busy: Vec<&Bar> = blind.block.iter().filter(beside).filter(|b| b.kind == Kind::Compute).collect();
        assert!(busy.is_empty(), "{} beside {busy:?}", fetch.name);
    }
    assert!(fetched(&all, "fetch") == 0.0 && fetched(&all, "prefetch") > 0.0);
    // Two fetches begin where one did; no byte is moved twice.
    let (both, one) = (fetched(&half, "fetch") + fetched(&half, "prefetch"), fetched(&blind, "fetch"));
    assert!(both >= one && both < 1.001 * one, "{both} {one}");
    // The io stream is busy with one layer's fetch per layer, and layers are no faster than it.
    assert!(makespan_ns(&all.block) + 1.0 >= fetched(&all, "prefetch"));
    let spans = [&all, &half, &blind].map(|t| makespan_ns(&t.block));
    assert!(spans[0] < spans[1] && spans[1] < spans[2], "{spans:?}");
}
