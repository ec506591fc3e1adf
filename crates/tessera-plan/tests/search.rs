//! Tests the mapping search: every candidate is counted, the best is optimal, rejections give
//! reasons, and a better machine is never slower.

use tessera_base::GateStatus;
use tessera_base::Nanoseconds;
use tessera_cost::moe::Routing;
use tessera_cost::params::{
    ExpertStorage, KvCacheStorage, OptimizerSharding, PipelineSchedule, Recompute, TpScheme,
};
use tessera_cost::{CollectiveOp, GroupSpan, MachineModel, Profile};
use tessera_mesh::{Cluster, LinkClass, MemoryTier, Precision, catalog};
use tessera_models::zoo;
use tessera_plan::search::{
    Candidate, Job, MemoryUse, Objective, Pins, RankedCandidate, Reason, SearchOutcome, SearchQuery,
    SearchSpace, StepEstimate, WhyVerdict, estimate_candidate, explain_pins, search,
};

const TRAIN: Job = Job::Train { batch: 96, sequence: 2048 };
const PREFILL: Job = Job::Prefill { batch: 40, sequence: 3000 };
const DECODE: Job = Job::Decode { batch: 300, context: 5000 };

fn machine(cluster: Cluster) -> MachineModel {
    let profile = Profile::builtin(&cluster.profile).expect("known profile");
    MachineModel::new(cluster, profile)
}

fn query_on(model: &str, cluster: Cluster, job: Job, pins: &str) -> SearchQuery {
    let work = zoo::find_model(model).expect("known model").to_analytic_model(true);
    let space = SearchSpace::for_job(&work, job, &cluster);
    let pins = Pins::parse(pins).expect("valid pins");
    SearchQuery {
        work,
        job,
        objective: Objective::Throughput,
        machine: machine(cluster),
        routing: Routing::Random,
        pins,
        space,
    }
}

fn query(model: &str, cluster: &str, job: Job, pins: &str) -> SearchQuery {
    query_on(model, catalog::get(cluster).expect("known cluster"), job, pins)
}

fn assert_counts(out: &SearchOutcome) {
    let rejected: u64 = out.rejected.values().map(|r| r.count).sum();
    assert_eq!(out.candidate_count, out.legal_count + rejected);
    assert_eq!(out.best_candidates.is_empty(), out.legal_count == 0);
    for r in out.rejected.values() {
        assert!(!r.explanation.is_empty());
    }
    for r in out.best_candidates.iter().chain(&out.pareto_front) {
        let sum: f64 = r.estimate.times.named_parts().iter().map(|(_, ns)| ns).sum();
        assert!((sum / r.estimate.step_ns - 1.0).abs() < 1e-9, "parts add up to the step");
    }
}

fn hbm_bytes(r: &tessera_plan::search::RankedCandidate) -> u64 {
    r.estimate.budget.bytes.iter().filter(|((t, _), _)| *t == MemoryTier::Hbm).map(|(_, b)| b.0).sum()
}

#[test]
fn every_candidate_is_legal_or_has_a_reason() {
    for model in ["sr-moe", "deepseek-v3", "llama-3.1-70b"] {
        for job in [TRAIN, PREFILL, DECODE] {
            let out = search(&query(model, "gb200-nvl72", job, "micro_batch=1"));
            assert_counts(&out);
            assert!(out.legal_count > 0, "{model} {job:?}: {:?}", out.rejected);
            assert_eq!((out.used_devices, out.idle_devices), (72, 0));
            assert!(out.notes.iter().any(|n| n.contains("estimate")), "an unmeasured rack is reported");
        }
    }
}

/// Enumerates all candidates of a small space independently of the search, from the meaning of the
/// knobs alone.
fn enumerate_all(q: &SearchQuery) -> Vec<Candidate> {
    let (n, s) = (q.space.devices, &q.space);
    let moe = q.work.routed_experts().is_some();
    let mut out = Vec::new();
    let divides = |d: u32, n: u32| n.is_multiple_of(d);
    for (pp, tp, ep, expert_tp) in (1..=n).flat_map(|a| {
        (1..=n).flat_map(move |b| (1..=n).flat_map(move |c| (1..=n).map(move |d| (a, b, c, d))))
    }) {
        let fits = divides(pp, n) && divides(tp, n / pp) && divides(ep * expert_tp, n / pp);
        if !fits || !moe && ep * expert_tp > 1 {
            continue;
        }
        let (replicas, expert_replicas) = (n / pp / tp, n / pp / ep / expert_tp);
        let mut schemes = vec![];
        for x in &s.schemes {
            match x {
                _ if tp == 1 && *x != s.schemes[0] => {}
                TpScheme::Ring | TpScheme::Striped => {
                    schemes.extend((2..=tp).filter(|r| divides(*r, tp)).map(|r| (*x, r)));
                }
                _ => schemes.push((*x, 1)),
            }
        }
        let mut schedules = vec![];
        for x in &s.schedules {
            match x {
                _ if pp == 1 && *x != s.schedules[0] => {}
                PipelineSchedule::Interleaved => schedules.extend(s.interleaves.iter().map(|v| (*x, *v))),
                _ => schedules.push((*x, 1)),
            }
        }
        let optimizers = if replicas > 1 || tp > 1 { &s.optimizers[..] } else { &s.optimizers[..1] };
        let wires = if ep > 1 { &s.wires[..] } else { &s.wires[..1] };
        for &(scheme, ring) in &schemes {
            for &(schedule, interleave) in &schedules {
                for &optimizer in optimizers {
                    for &wire in wires {
                        for &precision in &s.precisions {
                            for &micro_batch in &s.micro_batches {
                                for recompute in s.recompute.iter().filter(|r| **r != Recompute::Attention) {
                                    let layout = tessera_cost::params::LayerLayout {
                                        tp,
                                        ring,
                                        scheme,
                                        expert_tp,
                                        ep,
                                        precision,
                                        wire_precision: wire,
                                        capacity_pct: 0,
                                    };
                                    out.push(Candidate {
                                        layout,
                                        pp,
                                        replicas,
                                        expert_replicas,
                                        schedule,
                                        interleave,
                                        micro_batch,
                                        recompute: *recompute,
                                        optimizer,
                                        experts_at: ExpertStorage::Hbm,
                                        cache_at: KvCacheStorage::Hbm,
                                    });
                                }
                            }
                        }
                    }
                }
            }
        }
    }
    out
}

#[test]
fn the_best_is_what_trying_all_of_them_finds() {
    for (model, objective) in [
        ("mixtral-8x7b", Objective::Throughput),
        ("mixtral-8x7b", Objective::Memory),
        ("llama-3.1-8b", Objective::Latency),
        ("llama-3.1-8b", Objective::Deadline(Nanoseconds(9_000_000_000))),
    ] {
        let mut q = query(model, "hgx-h200", TRAIN, "");
        q.objective = objective;
        q.space.capacities_pct = vec![0];
        let out = search(&q);
        assert_counts(&out);
        let candidates = enumerate_all(&q);
        assert_eq!(out.candidate_count, candidates.len() as u64, "{model}");
        let legal: Vec<_> = candidates.iter().filter_map(|c| estimate_candidate(&q, c).ok()).collect();
        assert_eq!(out.legal_count, legal.len() as u64, "{model}");
        let best = &out.best_candidates[0];
        let score = |r: &tessera_plan::search::RankedCandidate| match objective {
            Objective::Memory => hbm_bytes(r) as f64,
            _ => r.estimate.step_ns,
        };
        let least = legal.iter().map(&score).fold(f64::INFINITY, f64::min);
        assert_eq!(score(best), least, "{model} {objective:?}: {}", best.candidate.to_text());
        // No legal candidate beats a point of the front in both step time and memory.
        for f in &out.pareto_front {
            let beaten =
                legal.iter().any(|r| r.estimate.step_ns < f.estimate.step_ns && hbm_bytes(r) < hbm_bytes(f));
            assert!(!beaten, "{}", f.candidate.to_text());
        }
    }
}

#[test]
fn the_same_question_has_the_same_answer() {
    let q = query("mixtral-8x7b", "hgx-h200", TRAIN, "");
    assert_eq!(search(&q), search(&q));
    let pins = Pins::parse("tp=4,ep=2").expect("valid pins");
    assert_eq!(explain_pins(&q, &pins), explain_pins(&q, &pins));
}

/// Returns a diverse set of legal candidates.
fn samples() -> Vec<(SearchQuery, Candidate)> {
    let mut out = Vec::new();
    for (model, cluster, racks) in
        [("sr-moe", "gb200-nvl72", 1), ("deepseek-v3", "gb200-nvl72", 4), ("mixtral-8x7b", "hgx-h100", 4)]
    {
        for job in [TRAIN, PREFILL, DECODE] {
            for (objective, pins) in [
                (Objective::Latency, "micro_batch=1"),
                (Objective::Memory, "micro_batch=2"),
                (Objective::Throughput, "pp=2,micro_batch=1"),
            ] {
                let cluster = catalog::get(cluster).expect("known cluster").with_racks(racks);
                let mut q = query_on(model, cluster, job, pins);
                q.objective = objective;
                let found = search(&q);
                let some = found.best_candidates.iter().take(3).chain(found.pareto_front.iter().step_by(5));
                out.extend(some.map(|r| (q.clone(), r.candidate)));
            }
        }
    }
    assert!(out.len() > 60);
    out
}

#[test]
fn more_bandwidth_is_never_slower_and_more_memory_never_forbids() {
    type Change = fn(&mut Cluster);
    let changes: [(&str, Change); 6] = [
        ("links of a domain", |c| c.links[0].bytes_per_s.value *= 2.0),
        ("links between domains", |c| c.links[1].bytes_per_s.value *= 1.7),
        ("links to the host", |c| {
            c.links[2].bytes_per_s.value *= 3.0;
            c.host_bytes_per_s.value *= 3.0;
        }),
        ("memory bandwidth", |c| c.device.memory_bytes_per_s.value *= 1.3),
        ("memory", |c| c.device.memory_bytes.value *= 1.1),
        ("peak", |c| c.device.flops_per_s.iter_mut().flatten().for_each(|f| f.value *= 1.5)),
    ];
    for (q, c) in samples() {
        let before = estimate_candidate(&q, &c).expect("the candidate is legal").estimate.step_ns;
        for (what, change) in changes {
            let mut cluster = q.machine.cluster.clone();
            change(&mut cluster);
            let better = SearchQuery { machine: machine(cluster), ..q.clone() };
            let after = estimate_candidate(&better, &c)
                .unwrap_or_else(|d| panic!("more {what} forbids {}: {d:?}", c.to_text()));
            let after = after.estimate.step_ns;
            assert!(after <= before * (1.0 + 1e-9), "more {what}: {before} to {after}, {}", c.to_text());
        }
    }
}

#[test]
fn bytes_over_links_are_those_of_the_collectives() {
    // 80 layers with two all-reduces each, and one for the embedding: with tp=8 within a host,
    // nothing else moves.
    let q =
        query("llama-3.1-70b", "hgx-h200", PREFILL, "tp=8,pp=1,scheme=megatron,micro_batch=5,precision=bf16");
    let best = search(&q).best_candidates.remove(0);
    let bytes = 5.0 * 3000.0 * 8192.0 * 2.0;
    let one = q.machine.collective_cost(CollectiveOp::AllReduce, bytes, GroupSpan { ranks: 8, domains: 1 });
    let times = f64::from(best.micro_batches) * 161.0;
    let got = best.estimate.link_bytes[&LinkClass::Domain];
    assert!(
        (got / (one.sent_bytes[0] * times) - 1.0).abs() < 1e-9,
        "{got} and {}",
        one.sent_bytes[0] * times
    );
    assert_eq!(best.estimate.link_bytes.len(), 1);
}

#[test]
fn twice_the_batch_is_twice_the_traffic_of_layers() {
    let pins = "tp=2,ep=4,dp=1,pp=2,expert_tp=1,micro_batch=1,optimizer=replicated,schedule=1f1b,wire=bf16,scheme=megatron_sp,precision=bf16,capacity_pct=0,recompute=full";
    let traffic = |batch: u64| {
        let cluster = catalog::get("hgx-h200").expect("known cluster").with_racks(2);
        let mut q = query_on("mixtral-8x7b", cluster, Job::Train { batch, sequence: 2048 }, pins);
        q.space.devices = 8;
        let out = search(&q);
        let best =
            out.best_candidates.first().unwrap_or_else(|| panic!("{:?}", out.rejected)).estimate.clone();
        best.link_bytes[&LinkClass::Domain]
    };
    let (one, two, three) = (traffic(8), traffic(16), traffic(24));
    assert!(two - one > 0.0 && ((three - two) / (two - one) - 1.0).abs() < 1e-9, "{one} {two} {three}");
}

fn rejections(q: &SearchQuery, pins: &str) -> (Vec<(Reason, String)>, Vec<String>) {
    match explain_pins(q, &Pins::parse(pins).expect("valid pins")).verdict {
        WhyVerdict::Refused { reasons, neighbours } => (
            reasons.into_iter().map(|(r, x)| (r, x.explanation)).collect(),
            neighbours
                .iter()
                .map(|n| {
                    let c = &n.ranked.candidate;
                    assert!(
                        estimate_candidate(q, c).is_ok() && !n.changed.is_empty(),
                        "a neighbour is legal and differs"
                    );
                    format!("{},{},{},{}", c.layout.tp, c.layout.ep, c.pp, c.model_replicas())
                })
                .collect(),
        ),
        WhyVerdict::Legal { ranked, .. } => panic!("unexpectedly legal: {}", ranked.candidate.to_text()),
    }
}

#[test]
fn a_mesh_of_144_ranks_on_72_devices_is_refused_with_its_rank_count_and_neighbours() {
    let q = query("sr-moe", "gb200-nvl72", TRAIN, "");
    let (reasons, near) = rejections(&q, "tp=8,ep=6,pp=3,dp=1");
    assert_eq!(reasons.len(), 1);
    assert_eq!(reasons[0].0, Reason::Ranks);
    assert!(reasons[0].1.contains("8·6·3·1 = 144 ranks, 72 devices"), "{}", reasons[0].1);
    for mesh in ["8,3,3,1", "4,6,3,1", "12,2,3,1"] {
        assert!(near.contains(&mesh.to_string()), "{mesh} is not among {near:?}");
    }
    // The experts of this mesh may fold the attention ranks: tp=8, ep=6 and pp=3 then fit.
    assert!(near.contains(&"8,6,3,1".to_string()), "{near:?}");

    let two = catalog::get("gb200-nvl72").expect("known cluster").with_racks(2);
    let q = query_on("sr-moe", two, TRAIN, "tp=8,ep=6,pp=3,dp=1");
    let out = search(&q);
    assert!(out.legal_count > 0, "{:?}", out.rejected);
    assert!(out.best_candidates[0].estimate.link_bytes[&LinkClass::Network] > 0.0, "it crosses racks");
}

#[test]
fn copies_that_do_not_divide_the_devices_count_as_ranks() {
    let q = query("deepseek-v3", "gb200-nvl72", DECODE, "");
    for (pins, says) in [
        ("dp=5", "tp·ep·pp·dp = 1·1·1·5 = 5 ranks, 72 devices"),
        ("dp=5,pp=2", "tp·ep·pp·dp = 1·1·2·5 = 10 ranks, 72 devices"),
        (
            "dp=5,tp=2,ep=3",
            "pp·tp·replicas = 1·2·15, pp·expert_tp·ep·expert replicas = 1·1·3·10 = 30 ranks, 72 devices",
        ),
    ] {
        let (reasons, _) = rejections(&q, pins);
        assert_eq!(reasons, [(Reason::Ranks, says.to_string())]);
    }
}

#[test]
fn uneven_heads_run_and_are_refused_only_where_asked() {
    let mut q = query("sr-moe", "gb200-nvl72", TRAIN, "");
    let pins = Pins::parse("tp=12,ep=6,pp=1,dp=1").expect("valid pins");
    let WhyVerdict::Legal { ranked, better, legal, best, terms } = explain_pins(&q, &pins).verdict else {
        panic!("12 ranks of 10 or 11 heads are legal")
    };
    assert!(better > 0 && better < legal);
    assert!(ranked.estimate.step_ns > best.estimate.step_ns);
    let lost: f64 = terms.iter().map(|t| t.requested_ns - t.best_ns).sum();
    assert!((lost / (ranked.estimate.step_ns - best.estimate.step_ns) - 1.0).abs() < 1e-6);
    assert!(terms[0].requested_ns - terms[0].best_ns >= terms[9].requested_ns - terms[9].best_ns);

    q.space.even_only = true;
    let (reasons, near) = rejections(&q, "tp=12,ep=6,pp=1,dp=1");
    assert!(
        reasons.iter().any(|(_, says)| says.contains("4096 experts over ep = 6 are 682.67")),
        "{reasons:?}"
    );
    // Neither 128 heads nor 4096 experts divide by 3, so the factor 9 of 72 goes to stages or
    // replicas.
    let divides = |m: &String| m.split(',').take(2).all(|x| x.parse::<u32>().is_ok_and(u32::is_power_of_two));
    assert!(!near.is_empty() && near.iter().all(divides), "{near:?}");
    let (reasons, _) = rejections(&q, "tp=12,ep=1");
    assert!(reasons.iter().any(|(_, says)| says.contains("over 12 ranks are 10.67 each")), "{reasons:?}");
}

#[test]
fn precision_and_context_and_racks_have_their_rules() {
    let q = query("sr-moe", "gb200-nvl72", TRAIN, "");
    let (reasons, near) = rejections(&q, "precision=fp4");
    assert_eq!(reasons.iter().map(|r| r.0).filter(|r| *r == Reason::Fp4Training).count(), 1);
    assert!(!near.is_empty(), "other precisions are legal");
    let mut q = query("llama-3.1-8b", "gb200-nvl72", TRAIN, "precision=fp4,micro_batch=1,tp=1,pp=1");
    assert_eq!(search(&q).legal_count, 0);
    q.space.fp4_training = true;
    assert!(search(&q).legal_count > 0);

    let q = query("llama-3.1-8b", "hgx-a100", TRAIN, "");
    let (reasons, _) = rejections(&q, "precision=fp8");
    assert!(reasons.iter().any(|(r, says)| *r == Reason::Precision && says.contains("bf16")), "{reasons:?}");

    // Materialized scores of a long context do not fit; those of a decode step do.
    let long = query("llama-3.1-8b", "hgx-h200", Job::Prefill { batch: 8, sequence: 131_072 }, "");
    let (reasons, _) = rejections(&long, "scheme=rs_mm_ag,tp=8,micro_batch=1");
    assert!(
        reasons.iter().any(|(r, says)| *r == Reason::Logits && says.contains("131072 keys")),
        "{reasons:?}"
    );
    let short = query("llama-3.1-8b", "hgx-h200", DECODE, "scheme=rs_mm_ag,tp=8");
    assert!(search(&short).legal_count > 0);

    let two = catalog::get("gb200-nvl72").expect("known cluster").with_racks(2);
    let racks = query_on("sr-moe", two, TRAIN, "");
    let (reasons, _) = rejections(&racks, "dp=9,ep=16,expert_tp=1,tp=1,pp=1,micro_batch=1");
    assert!(reasons.iter().any(|(r, _)| *r == Reason::Rack), "16 ranks do not divide a rack: {reasons:?}");
}

#[test]
fn devices_stay_idle_only_where_nothing_fits_on_all() {
    let q = query("llama-3.1-8b", "gb200-nvl72", TRAIN, "dp=5,tp=1,micro_batch=1");
    let out = search(&q);
    assert_counts(&out);
    assert_eq!((out.used_devices, out.idle_devices), (60, 12));
    assert!(out.notes.iter().any(|n| n.contains("12 stay idle")), "{:?}", out.notes);
    assert!(out.best_candidates.iter().all(|r| r.candidate.rank_count() == 60));
}

#[test]
fn smaller_device_counts_are_tried_only_if_the_pins_fit_them() {
    // The pins multiply to 256 ranks, which span racks of 72: fewer devices cannot hold them.
    let cluster = catalog::get("gb200-nvl72").unwrap().with_racks(4);
    let job = Job::Train { batch: 1024, sequence: 4096 };
    let mut q = query_on("llama-3.1-70b", cluster, job, "tp=8,pp=16,dp=2");
    q.space.devices = 256;
    q.space.replica_in_rack = true;
    let outcome = search(&q);
    assert_counts(&outcome);
    assert_eq!(outcome.legal_count, 0);
    let reasons: Vec<Reason> = outcome.rejected.keys().copied().collect();
    assert!(reasons.contains(&Reason::Rack) && !reasons.contains(&Reason::Ranks), "{:?}", outcome.rejected);
}

#[test]
fn the_bubble_gate_names_the_micro_batches_that_pass_it() {
    let gate_of = |micro_batches: u64| {
        let job = Job::Train { batch: micro_batches, sequence: 2048 };
        let pins = "tp=2,pp=4,dp=1,schedule=1f1b,micro_batch=1,recompute=none,scheme=megatron,precision=bf16";
        let best = search(&query("gpt-18b", "hgx-h200", job, pins)).best_candidates.swap_remove(0);
        assert_eq!(u64::from(best.micro_batches), micro_batches);
        best.gates.into_iter().find(|g| g.id == "pipeline.bubble").unwrap()
    };
    let few = gate_of(8);
    let words: Vec<&str> = few.explanation.split(' ').collect();
    let at = words.iter().position(|w| *w == "with").unwrap_or_else(|| panic!("{}", few.explanation));
    let needed: u64 = words[at + 1].parse().unwrap();
    let statuses = [needed - 1, needed].map(|n| gate_of(n).status);
    assert_eq!(statuses, [GateStatus::Fail, GateStatus::Pass], "{needed}: {}", few.explanation);
}

#[test]
fn stages_are_contiguous_complete_and_balanced() {
    let q = query("deepseek-v3", "gb200-nvl72", PREFILL, "pp=4,micro_batch=1");
    let best = &search(&q).best_candidates[0];
    let mut next = 0;
    for stage in &best.stages {
        assert_eq!(stage.chunks.len(), 1);
        assert_eq!(stage.chunks[0].start, next);
        next = stage.chunks[0].end;
    }
    assert_eq!((next, best.stages.len()), (61, 4));
    let most = best.stages.iter().map(|s| s.micro_batch_ns).fold(0.0, f64::max);
    let mean = best.stages.iter().map(|s| s.micro_batch_ns).sum::<f64>() / 4.0;
    assert!(most / mean < 1.08, "{most} against {mean}");
}

#[test]
fn cold_experts_and_old_keys_leave_only_where_they_must() {
    let full = query("sr-moe", "gb200-nvl72", Job::Decode { batch: 9216, context: 4096 }, "");
    let out = search(&full);
    let moved = out
        .best_candidates
        .iter()
        .find(|r| r.candidate.cache_at == KvCacheStorage::Host)
        .expect("a candidate with the cache on the host");
    assert!(moved.estimate.budget.bytes.keys().any(|(t, _)| *t == MemoryTier::Host));
    let few = query("llama-3.1-8b", "gb200-nvl72", Job::Decode { batch: 144, context: 1000 }, "");
    let best = &search(&few).best_candidates[0].candidate;
    assert_eq!((best.cache_at, best.experts_at), (KvCacheStorage::Hbm, ExpertStorage::Hbm));
}

#[test]
fn pins_are_read_printed_and_refused() {
    let text = "tp=12,ep=6,scheme=ring,ring=3,schedule=zb-h1,micro_batch=2,recompute=every_other,optimizer=sharded,experts_at=host,cache_at=window,precision=fp8,wire=fp4,capacity_pct=125";
    let pins = Pins::parse(text).expect("valid pins");
    assert_eq!(pins.to_text(), text);
    assert_eq!(pins.optimizer, Some(OptimizerSharding::Sharded));
    assert_eq!(pins.wire, Some(Precision::Fp4));
    let bad = Pins::parse("tpp=1,tp=0,scheme=mega,nothing").expect_err("all four are wrong");
    assert_eq!(bad.len(), 4);
    assert!(bad.iter().all(|d| d.code.id == "T1200"));
    assert!(bad[0].hint.as_deref().is_some_and(|h| h.contains("`tp`")));
}

/// Returns the estimate of a query's best candidate, and of the same candidate after a change.
fn estimates_around(mut q: SearchQuery, change: impl Fn(&mut SearchQuery)) -> (StepEstimate, StepEstimate) {
    let out = search(&q);
    let c = out.best_candidates.first().unwrap_or_else(|| panic!("{:?}", out.rejected)).candidate;
    let before = out.best_candidates[0].estimate.clone();
    change(&mut q);
    (before, estimate_candidate(&q, &c).expect("the candidate is legal").estimate)
}

fn change_overlap(q: &mut SearchQuery, change: impl Fn(&mut tessera_cost::profile::OverlapTraits)) {
    let mut profile = q.machine.profile.clone();
    change(&mut profile.base.overlap);
    profile.families.values_mut().for_each(|c| change(&mut c.overlap));
    q.machine = MachineModel::new(q.machine.cluster.clone(), profile);
}

#[test]
fn only_what_the_executor_overlaps_is_hidden() {
    let prefill = Job::Prefill { batch: 4 * 72, sequence: 4096 };
    let q = query("deepseek-v3", "gb200-nvl72", prefill, "tp=1,ep=72,pp=1,micro_batch=1");
    let (waits, hides) = estimates_around(q, |q| change_overlap(q, |o| o.overlaps_dispatch = true));
    assert!(hides.times.ep_ns < waits.times.ep_ns && hides.step_ns < waits.step_ns);
    assert_eq!(hides.times.collective_ns, waits.times.collective_ns);

    let pins = "tp=1,pp=1,optimizer=full_shard,micro_batch=1,recompute=full";
    let q = query("llama-3.1-8b", "hgx-h200", TRAIN, pins);
    let (ahead, apart) = estimates_around(q, |q| change_overlap(q, |o| o.overlaps_gathers = false));
    assert!(apart.times.pp_dp_ns > 2.0 * ahead.times.pp_dp_ns && apart.step_ns > ahead.step_ns);
    assert_eq!(apart.times.collective_ns, ahead.times.collective_ns);
}

#[test]
fn bars_widen_for_what_nothing_validates() {
    let error = |model, cluster, job| {
        let out = search(&query(model, cluster, job, "micro_batch=1"));
        (out.best_candidates[0].estimate.error_share, out.notes.join("; "))
    };
    let (decode, notes) = error("llama-3.1-8b", "hgx-h200", DECODE);
    let torch = Profile::builtin("torch-2.11").expect("known profile").error_share;
    assert_eq!(decode, 2.0 * torch);
    assert!(notes.contains("no measurement validates decode under the profile torch-2.11"), "{notes}");
    let (rack, notes) = error("llama-3.1-8b", "gb200-nvl72", PREFILL);
    assert_eq!(rack, 4.0 * torch);
    assert!(notes.contains("was not measured by this project"), "{notes}");

    let mut q = query("llama-3.1-8b", "hgx-h200", DECODE, "");
    q.machine =
        MachineModel::new(q.machine.cluster.clone(), Profile::builtin("ideal").expect("known profile"));
    let out = search(&q);
    assert_eq!(out.best_candidates[0].estimate.error_share, 0.0);
    assert!(out.notes.iter().any(|n| n.contains("is a lower bound")), "{:?}", out.notes);
}

#[test]
fn cold_experts_hide_as_far_as_a_predictor_names_them() {
    let job = Job::Decode { batch: 8 * 64, context: 4096 };
    let q = query("deepseek-v3", "hgx-h200", job, "tp=1,ep=8,pp=1,experts_at=host,precision=bf16");
    let at = |share: f64| {
        let (blind, seen) = estimates_around(q.clone(), |q| q.space.prefetch_hit_rate = share);
        assert!(blind.times.fetch_ns > 0.0, "no experts on the host");
        (blind.times.fetch_ns, seen.times.fetch_ns)
    };
    let (blind, half) = at(0.5);
    let (_, all) = at(1.0);
    assert!(all < half && half < blind, "{all} {half} {blind}");
    let gate = |share: f64| {
        let mut q = q.clone();
        q.space.prefetch_hit_rate = share;
        let best = search(&q).best_candidates.remove(0);
        let gate = best.gates.iter().find(|g| g.id == "experts.prefetch").expect("known gate");
        (gate.value, gate.status)
    };
    assert_eq!(gate(0.0), (0.0, tessera_base::GateStatus::Fail));
    let (window, _) = gate(1.0);
    assert!(window >= 1.0, "{window}");
}

#[test]
fn both_directions_of_a_pipeline_add_up_their_gradients() {
    let of = |schedule: &str| {
        let pins = format!(
            "tp=2,pp=4,dp=1,scheme=megatron_sp,precision=bf16,micro_batch=1,recompute=full,schedule={schedule}"
        );
        search(&query("llama-3.1-8b", "hgx-h200", TRAIN, &pins)).best_candidates.remove(0)
    };
    let (one, both) = (of("1f1b"), of("dualpipe"));
    let bytes = |r: &RankedCandidate| r.estimate.link_bytes[&LinkClass::Domain];
    // Each rank holds two of four stages with half the weights, and adds four gradient bytes of
    // each to its partner's.
    let weights =
        zoo::find_model("llama-3.1-8b").expect("known model").to_analytic_model(true).parameter_count()
            as f64;
    let more = bytes(&both) - bytes(&one);
    assert!(more > 0.9 * weights && more < 1.3 * weights, "{more} against {weights}");
    assert!(both.estimate.times.pp_dp_ns > one.estimate.times.pp_dp_ns);
}

#[test]
fn a_tied_table_lies_once_on_a_single_stage() {
    let of = |pp: u32| {
        let pins = format!("tp=1,pp={pp},micro_batch=1,precision=bf16");
        let best = search(&query("gpt-3.6b", "hgx-h200", PREFILL, &pins)).best_candidates.remove(0);
        best.estimate.budget.bytes[&(MemoryTier::Hbm, MemoryUse::Weights)].0 as f64
    };
    let work = zoo::find_model("gpt-3.6b").expect("known model").to_analytic_model(true);
    assert!(work.tied_embeddings);
    assert_eq!(of(1), 2.0 * work.parameter_count() as f64);
    assert!(of(2) > work.parameter_count() as f64);
}

#[test]
fn ranks_that_hold_the_same_weights_may_share_the_optimizer() {
    let pins = |scheme: &str| format!("tp=8,pp=1,scheme={scheme},optimizer=sharded,micro_batch=1");
    let of = |scheme| search(&query("llama-3.1-8b", "hgx-h200", TRAIN, &pins(scheme)));
    let ulysses = of("ulysses");
    assert!(ulysses.legal_count > 0, "{:?}", ulysses.rejected);
    let optimizer = |o: &SearchOutcome| {
        o.best_candidates[0].estimate.budget.bytes[&(MemoryTier::Hbm, MemoryUse::OptimizerSharding)].0 as f64
    };
    let weights =
        zoo::find_model("llama-3.1-8b").expect("known model").to_analytic_model(true).parameter_count()
            as f64;
    assert!((optimizer(&ulysses) / (12.0 * weights / 8.0) - 1.0).abs() < 0.01);
    let cut = of("megatron_sp");
    assert_eq!((cut.legal_count, cut.rejected.contains_key(&Reason::OptimizerSharding)), (0, true));
}
