//! Injects the four failure modes of the mapping guide and checks the diagnosis and its
//! mitigations.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera_cost::moe::Routing;
use tessera_cost::params::{Recompute, TpScheme};
use tessera_cost::{MachineModel, Profile};
use tessera_mesh::{Precision, catalog};
use tessera_models::zoo;
use tessera_plan::search::mitigation::{
    CandidateMetrics, Diagnosis, FailureMode, SymptomThresholds, Symptoms, diagnose,
};
use tessera_plan::search::{Candidate, Job, Objective, Pins, SearchQuery, SearchSpace, search};

fn query(model: &str, cluster: &str, racks: u32, job: Job, routing: Routing, fused: bool) -> SearchQuery {
    let cluster = catalog::get(cluster).unwrap().with_racks(racks);
    let work = zoo::find_model(model).unwrap().to_analytic_model(fused);
    let machine = MachineModel::new(cluster, Profile::builtin("torch-2.11").unwrap());
    let space = SearchSpace::for_job(&work, job, &machine.cluster);
    SearchQuery {
        work,
        job,
        objective: Objective::Throughput,
        machine,
        routing,
        pins: Pins::default(),
        space,
    }
}

fn best_candidate(q: &SearchQuery, pins: &str) -> Candidate {
    let q = SearchQuery { pins: Pins::parse(pins).unwrap(), ..q.clone() };
    let o = search(&q);
    o.best_candidates.first().unwrap_or_else(|| panic!("{:#?}", o.rejected)).candidate
}

fn diagnose_one(q: &SearchQuery, c: &Candidate, signs: Symptoms, mode: FailureMode) -> Diagnosis {
    let found = diagnose(q, c, &signs, &SymptomThresholds::default()).unwrap();
    assert_eq!(found.iter().map(|f| f.mode).collect::<Vec<_>>(), [mode]);
    let d = found[0].to_diagnostic("plan");
    assert_eq!((d.code, d.notes.len()), (mode.code(), found[0].mitigations.len()));
    found[0].clone()
}

#[test]
fn a_healthy_plan_has_no_findings() {
    let q = query(
        "deepseek-v3",
        "gb200-nvl72",
        1,
        Job::Decode { batch: 1152, context: 4096 },
        Routing::Random,
        true,
    );
    let c = best_candidate(&q, "");
    let healthy =
        Symptoms { overflows: Some(0), drifted: Some(0), a2a_rate: Some(0.9), ..Symptoms::default() };
    assert!(diagnose(&q, &c, &healthy, &SymptomThresholds::default()).unwrap().is_empty());
}

#[test]
fn congestion_is_named_and_each_action_lowers_it() {
    // One large all-to-all over the network between hosts, with popular experts.
    let job = Job::Prefill { batch: 512, sequence: 2048 };
    let q = query("qwen3-235b-a22b", "hgx-h200", 8, job, Routing::PowerLaw(1.2), true);
    let c = best_candidate(
        &q,
        "tp=1,ep=64,expert_tp=1,pp=1,micro_batch=8,capacity_pct=125,wire=bf16,precision=bf16",
    );
    let before = CandidateMetrics::estimate(&q, &c).unwrap();
    let f = diagnose_one(&q, &c, Symptoms::from_metrics(&q, &before), FailureMode::Congestion);
    assert_eq!(f.current, before);
    let actions: Vec<_> = f.mitigations.iter().map(|r| r.action).collect();
    assert_eq!(actions, ["tighten bucketing", "reduce the capacity factor", "enlarge the expert bank"]);
    for r in &f.mitigations {
        let after = r.predicted.unwrap_or_else(|| panic!("{r:?}"));
        assert!(after.a2a_ns < before.a2a_ns, "{}: {} to {}", r.action, before.a2a_ns, after.a2a_ns);
    }
    // The cost of each mitigation is reported too.
    assert!(f.mitigations[1].predicted.unwrap().dropped > before.dropped);
    assert!(f.mitigations[2].predicted.unwrap().peak_bytes > before.peak_bytes);
}

#[test]
fn bucketing_balances_ragged_sources() {
    let job = Job::Prefill { batch: 72, sequence: 4096 };
    let q = query("deepseek-v3", "gb200-nvl72", 1, job, Routing::Workload(4), true);
    let c = best_candidate(&q, "tp=1,ep=72,expert_tp=1,pp=1,micro_batch=1,capacity_pct=0");
    let low = SymptomThresholds { a2a_share: 0.0, ..SymptomThresholds::default() };
    let signs = Symptoms { a2a_share: Some(0.5), ..Symptoms::default() };
    let found = diagnose(&q, &c, &signs, &low).unwrap();
    let bucketing = &found[0].mitigations[0];
    assert!(bucketing.details.contains("every source sends equally many"), "{}", bucketing.details);
    assert!(bucketing.predicted.unwrap().a2a_ns < found[0].current.a2a_ns);
}

#[test]
fn memory_overflow_has_three_mitigations_with_new_peaks() {
    // Scores are stored, so recomputing attention pays off.
    let job = Job::Train { batch: 288, sequence: 4096 };
    let q = query("qwen3-235b-a22b", "gb200-nvl72", 1, job, Routing::Random, false);
    let mut c = best_candidate(&q, "tp=4,ep=8,pp=1,recompute=full,optimizer=sharded,scheme=megatron_sp");
    (c.recompute, c.micro_batch) = (Recompute::None, 4);
    let before = CandidateMetrics::estimate(&q, &c).unwrap();
    assert!(!before.fits, "{before:?}");
    let f = diagnose_one(
        &q,
        &c,
        Symptoms { a2a_share: None, ..Symptoms::from_metrics(&q, &before) },
        FailureMode::Memory,
    );
    let actions: Vec<_> = f.mitigations.iter().map(|r| r.action).collect();
    assert_eq!(actions, ["recompute attention", "smaller micro-batch", "lower top-k by stochastic gating"]);
    for r in &f.mitigations {
        assert!(r.predicted.unwrap().peak_bytes < before.peak_bytes, "{r:?}");
    }
    assert!(f.mitigations[0].details.contains("from none to attention"), "{}", f.mitigations[0].details);
    assert!(f.mitigations[2].details.contains("from 8 to 7.5"), "{}", f.mitigations[2].details);
    // The full change of one expert is twice the half change.
    let fewer = SearchQuery { work: q.work.with_experts(128, 7), ..q.clone() };
    let whole = CandidateMetrics::estimate(&fewer, &c).unwrap().peak_bytes;
    let half = f.mitigations[2].predicted.unwrap().peak_bytes;
    assert!((2.0 * half - whole - before.peak_bytes).abs() < 1.0);
}

#[test]
fn fp8_has_three_switches_with_prices() {
    let job = Job::Train { batch: 288, sequence: 4096 };
    let q = query("deepseek-v3", "gb200-nvl72", 2, job, Routing::Random, true);
    let c = best_candidate(&q, "precision=fp8,wire=fp8,ep=8");
    let f = diagnose_one(&q, &c, Symptoms { overflows: Some(12), ..Symptoms::default() }, FailureMode::Fp8);
    let actions: Vec<_> = f.mitigations.iter().map(|r| r.action).collect();
    assert_eq!(actions, ["accumulate in f32 earlier", "finer scaling", "scale the loss", "leave fp8"]);
    let step = |i: usize| f.mitigations[i].predicted.unwrap().step_ns;
    assert!(step(0) > f.current.step_ns && step(1) > f.current.step_ns);
    assert_eq!(step(2), f.current.step_ns);
    let words = |i: usize| f.compare_step(&f.mitigations[i].predicted.unwrap());
    assert!(words(0).contains("instead of") && words(0).ends_with("% longer"), "{}", words(0));
    assert!(words(2).starts_with("the step stays"), "{}", words(2));
    // Finer scales cost a tenth of leaving fp8 on the wire.
    let bf16 = Candidate {
        layout: tessera_cost::params::LayerLayout { wire_precision: Precision::Bf16, ..c.layout },
        ..c
    };
    let wire = CandidateMetrics::estimate(&q, &bf16).unwrap().step_ns - f.current.step_ns;
    let share = (step(1) - f.current.step_ns) / wire;
    assert!((share - 0.09375 / 0.96875).abs() < 1e-9, "{share}");
}

#[test]
fn drift_is_diagnosed_and_draws_match_over_tp() {
    let job = Job::Prefill { batch: 72, sequence: 4096 };
    let q = query("llama-3.1-70b", "hgx-h200", 1, job, Routing::Balanced, true);
    let c = best_candidate(&q, "tp=8,scheme=megatron");
    let f = diagnose_one(&q, &c, Symptoms { drifted: Some(1), ..Symptoms::default() }, FailureMode::Drift);
    let actions: Vec<_> = f.mitigations.iter().map(|r| r.action).collect();
    assert_eq!(
        actions,
        [
            "pin algorithms",
            "pin algorithms, and add in rank order",
            "fix the order of ranks",
            "deterministic draws per axis"
        ]
    );
    // No algorithm is faster than the chosen one, and adding in rank order costs time.
    assert!(f.mitigations[0].predicted.unwrap().step_ns >= f.current.step_ns);
    assert!(f.mitigations[1].predicted.unwrap().step_ns > f.current.step_ns);
    assert!(f.mitigations[3].details.contains("the same over tp"), "{}", f.mitigations[3].details);
    // Without reductions over ranks there is nothing to pin.
    let ulysses = Candidate {
        layout: tessera_cost::params::LayerLayout { scheme: TpScheme::Ulysses, ..c.layout },
        ..c
    };
    let f =
        diagnose_one(&q, &ulysses, Symptoms { drifted: Some(1), ..Symptoms::default() }, FailureMode::Drift);
    assert!(f.mitigations[0].predicted.is_none());
}
