//! The four failure modes of the mapping guide, each injected, and what the doctor offers.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera_cost::knobs::{Recompute, Scheme};
use tessera_cost::moe::Routing;
use tessera_cost::{Machine, Profile};
use tessera_mesh::{Precision, clusters};
use tessera_models::zoo;
use tessera_plan::search::remedy::{Finding, Limits, Mode, Numbers, Signs, diagnose};
use tessera_plan::search::{Candidate, Job, Objective, Pins, Question, Space, search};

fn question(model: &str, cluster: &str, racks: u32, job: Job, routing: Routing, fused: bool) -> Question {
    let cluster = clusters::named(cluster).unwrap().with_racks(racks);
    let work = zoo::named(model).unwrap().work(fused);
    let machine = Machine::new(cluster, Profile::named("torch-2.11").unwrap());
    let space = Space::of(&work, job, &machine.cluster);
    Question { work, job, objective: Objective::Throughput, machine, routing, pins: Pins::default(), space }
}

fn best(q: &Question, pins: &str) -> Candidate {
    let q = Question { pins: Pins::parse(pins).unwrap(), ..q.clone() };
    let o = search(&q);
    o.best.first().unwrap_or_else(|| panic!("{:#?}", o.rejected)).candidate
}

fn find(q: &Question, c: &Candidate, signs: Signs, mode: Mode) -> Finding {
    let found = diagnose(q, c, &signs, &Limits::default()).unwrap();
    assert_eq!(found.iter().map(|f| f.mode).collect::<Vec<_>>(), [mode]);
    let d = found[0].diagnostic("plan");
    assert_eq!((d.code, d.notes.len()), (mode.code(), found[0].remedies.len()));
    found[0].clone()
}

#[test]
fn a_healthy_plan_has_no_findings() {
    let q = question(
        "deepseek-v3",
        "gb200-nvl72",
        1,
        Job::Decode { batch: 1152, context: 4096 },
        Routing::Random,
        true,
    );
    let c = best(&q, "");
    let healthy = Signs { overflows: Some(0), drifted: Some(0), a2a_rate: Some(0.9), ..Signs::default() };
    assert!(diagnose(&q, &c, &healthy, &Limits::default()).unwrap().is_empty());
}

#[test]
fn congestion_is_named_and_each_action_lowers_it() {
    // One large exchange over the network between hosts, popular experts.
    let job = Job::Prefill { batch: 512, sequence: 2048 };
    let q = question("qwen3-235b-a22b", "hgx-h200", 8, job, Routing::PowerLaw(1.2), true);
    let c = best(&q, "tp=1,ep=64,expert_tp=1,pp=1,micro_batch=8,capacity_pct=125,wire=bf16,precision=bf16");
    let before = Numbers::of(&q, &c).unwrap();
    let f = find(&q, &c, Signs::of(&q, &before), Mode::Congestion);
    assert_eq!(f.before, before);
    let actions: Vec<_> = f.remedies.iter().map(|r| r.action).collect();
    assert_eq!(actions, ["tighten bucketing", "reduce the capacity factor", "enlarge the expert bank"]);
    for r in &f.remedies {
        let after = r.after.unwrap_or_else(|| panic!("{r:?}"));
        assert!(after.a2a_ns < before.a2a_ns, "{}: {} to {}", r.action, before.a2a_ns, after.a2a_ns);
    }
    // What each costs is shown too.
    assert!(f.remedies[1].after.unwrap().dropped > before.dropped);
    assert!(f.remedies[2].after.unwrap().peak_bytes > before.peak_bytes);
    assert!(f.best().is_some());
}

#[test]
fn ragged_sources_are_evened_out_by_bucketing() {
    let job = Job::Prefill { batch: 72, sequence: 4096 };
    let q = question("deepseek-v3", "gb200-nvl72", 1, job, Routing::W(4), true);
    let c = best(&q, "tp=1,ep=72,expert_tp=1,pp=1,micro_batch=1,capacity_pct=0");
    let low = Limits { a2a_share: 0.0, ..Limits::default() };
    let signs = Signs { a2a_share: Some(0.5), ..Signs::default() };
    let found = diagnose(&q, &c, &signs, &low).unwrap();
    let bucketing = &found[0].remedies[0];
    assert!(bucketing.how.contains("every source sends as many"), "{}", bucketing.how);
    assert!(bucketing.after.unwrap().a2a_ns < found[0].before.a2a_ns);
}

#[test]
fn memory_spikes_are_named_with_three_new_peaks() {
    // Scores are stored, so attention is worth computing again.
    let job = Job::Train { batch: 288, sequence: 4096 };
    let q = question("qwen3-235b-a22b", "gb200-nvl72", 1, job, Routing::Random, false);
    let mut c = best(&q, "tp=4,ep=8,pp=1,recompute=full,optimizer=sharded,scheme=megatron_sp");
    (c.recompute, c.micro_batch) = (Recompute::None, 4);
    let before = Numbers::of(&q, &c).unwrap();
    assert!(!before.fits, "{before:?}");
    let f = find(&q, &c, Signs { a2a_share: None, ..Signs::of(&q, &before) }, Mode::Memory);
    let actions: Vec<_> = f.remedies.iter().map(|r| r.action).collect();
    assert_eq!(actions, ["recompute attention", "smaller micro-batch", "lower top-k by stochastic gating"]);
    for r in &f.remedies {
        assert!(r.after.unwrap().peak_bytes < before.peak_bytes, "{r:?}");
    }
    assert!(f.remedies[0].how.contains("from none to attention"), "{}", f.remedies[0].how);
    assert!(f.remedies[2].how.contains("from 8 to 7.5"), "{}", f.remedies[2].how);
    // The whole change of one expert is twice the half.
    let fewer = Question { work: q.work.routed(128, 7), ..q.clone() };
    let whole = Numbers::of(&fewer, &c).unwrap().peak_bytes;
    let half = f.remedies[2].after.unwrap().peak_bytes;
    assert!((2.0 * half - whole - before.peak_bytes).abs() < 1.0);
}

#[test]
fn fp8_has_three_switches_with_prices() {
    let job = Job::Train { batch: 288, sequence: 4096 };
    let q = question("deepseek-v3", "gb200-nvl72", 2, job, Routing::Random, true);
    let c = best(&q, "precision=fp8,wire=fp8,ep=8");
    let f = find(&q, &c, Signs { overflows: Some(12), ..Signs::default() }, Mode::Fp8);
    let actions: Vec<_> = f.remedies.iter().map(|r| r.action).collect();
    assert_eq!(actions, ["accumulate in f32 earlier", "finer scaling", "scale the loss", "leave fp8"]);
    let step = |i: usize| f.remedies[i].after.unwrap().step_ns;
    assert!(step(0) > f.before.step_ns && step(1) > f.before.step_ns);
    assert_eq!(step(2), f.before.step_ns);
    // Finer scales cost a tenth of what leaving fp8 on the wire would.
    let bf16 = Candidate { layout: tessera_cost::knobs::Layout { wire: Precision::Bf16, ..c.layout }, ..c };
    let wire = Numbers::of(&q, &bf16).unwrap().step_ns - f.before.step_ns;
    let share = (step(1) - f.before.step_ns) / wire;
    assert!((share - 0.09375 / 0.96875).abs() < 1e-9, "{share}");
}

#[test]
fn drift_is_named_and_draws_are_the_same_over_tp() {
    let job = Job::Prefill { batch: 72, sequence: 4096 };
    let q = question("llama-3.1-70b", "hgx-h200", 1, job, Routing::Balanced, true);
    let c = best(&q, "tp=8,scheme=megatron");
    let f = find(&q, &c, Signs { drifted: Some(1), ..Signs::default() }, Mode::Drift);
    let actions: Vec<_> = f.remedies.iter().map(|r| r.action).collect();
    assert_eq!(
        actions,
        [
            "pin algorithms",
            "pin algorithms, and add in rank order",
            "fix the order of ranks",
            "deterministic draws per axis"
        ]
    );
    // No algorithm is faster than the one that was chosen, and adding in order is not free.
    assert!(f.remedies[0].after.unwrap().step_ns >= f.before.step_ns);
    assert!(f.remedies[1].after.unwrap().step_ns > f.before.step_ns);
    assert!(f.remedies[3].how.contains("the same over tp"), "{}", f.remedies[3].how);
    // Without sums over ranks there is nothing to pin.
    let ulysses =
        Candidate { layout: tessera_cost::knobs::Layout { scheme: Scheme::Ulysses, ..c.layout }, ..c };
    let f = find(&q, &ulysses, Signs { drifted: Some(1), ..Signs::default() }, Mode::Drift);
    assert!(f.remedies[0].after.is_none());
}
