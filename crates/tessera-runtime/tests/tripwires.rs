//! Tests that each tripwire fires at its site, with its code and rank, and does not fire when it is
//! disabled.

mod support;

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use support::net::{Hop, NEXT, Net, Request, Tamper};
use support::{
    Bug, LeaderPlacement, context_tensor, leader_config, mesh_leader_config, prompt_tensor, test_programs,
    weights_at, worker_config,
};
use tessera_mesh::HostMap;
use tessera_runtime::call_state::CallState;
use tessera_runtime::director::{ChunkRequest, SceneCut};
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Engine, EngineFault, PhaseReport, ProgramCount, ReadyCall, RehashResult,
    run_call,
};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::leader::{self, Leader};
use tessera_runtime::mesh_leader::MeshLeader;
use tessera_runtime::program_index::{ArgKind, ProgramIndex, ProgramInfo};
use tessera_runtime::wire::{
    CallAction, CallMeta, Commit, Done, Envelope, Message, PhaseCall, Reload, ScalarArg, Tensor, Tensors,
};
use tessera_runtime::{CheckSite, Digest, Failure, FailureClass, Limits, ParityClass, TRIPWIRES, Tripwires};

/// A run with one injected fault.
struct TripwireCase {
    code: &'static str,
    site: CheckSite,
    rank: Option<u32>,
    shape: LeaderPlacement,
    regime: CacheRegime,
    fault: Box<dyn Fn(&mut Net)>,
}

fn case(
    code: &'static str,
    place: CheckSite,
    rank: Option<u32>,
    fault: impl Fn(&mut Net) + 'static,
) -> TripwireCase {
    let shape =
        if place == CheckSite::MeshLeader { LeaderPlacement::Outside } else { LeaderPlacement::InMesh };
    TripwireCase { code, site: place, rank, shape, regime: CacheRegime::Resident, fault: Box::new(fault) }
}

fn faulty_net(shape: LeaderPlacement, regime: CacheRegime, off: &Tripwires) -> Net {
    let mut config = leader_config(shape, 3, regime);
    config.tripwires = off.clone();
    Net::with_configs(shape, config, regime, 4, |r| {
        let mut w = worker_config(shape, r, regime);
        w.tripwires = off.clone();
        w
    })
}

/// Returns the failure of a run with this fault. A run that does not end counts as one without a
/// failure.
fn run_outcome(c: &TripwireCase, off: &Tripwires) -> Option<Failure> {
    let mut net = faulty_net(c.shape, c.regime, off);
    (c.fault)(&mut net);
    net.run_for(40).flatten()
}

/// Changes the envelope of a call on its way to a rank.
fn tamper_envelope(to: u32, call: u64, change: impl Fn(&mut Envelope) + 'static) -> Tamper {
    Box::new(move |way, _, m| match m {
        Message::Envelope(mut e) if way == Hop::To(to) && e.header.call_id == call => {
            change(&mut e);
            vec![Message::Envelope(e)]
        }
        m => vec![m],
    })
}

fn change_meta(change: impl Fn(&mut CallMeta) + 'static) -> impl Fn(&mut Envelope) {
    move |e| {
        if let Some(m) = &mut e.meta {
            change(m);
        }
    }
}

/// Changes the phases and updates the expected totals to match.
fn change_phases(change: impl Fn(&mut Vec<PhaseCall>) + 'static) -> impl Fn(&mut Envelope) {
    change_meta(move |m| {
        change(&mut m.phases);
        if let Ok(want) = test_programs().expected_totals(&m.phases) {
            m.expected_generator_calls = want.generator_calls;
            m.expected_collectives = want.collectives;
            m.expected_trace_digest = want.trace;
        }
    })
}

fn tamper_done(from: u32, call: u64, change: impl Fn(&mut Done) + 'static) -> Tamper {
    Box::new(move |way, _, m| match m {
        Message::Done(mut d) if way == Hop::From(from) && d.call_id == call => {
            change(&mut d);
            vec![Message::Done(d)]
        }
        m => vec![m],
    })
}

fn replace_message(way: Hop, of: impl Fn(&Message) -> bool + 'static, other: Message) -> Tamper {
    Box::new(move |w, _, m| if w == way && of(&m) { vec![other.clone()] } else { vec![m] })
}

fn reload() -> leader::Event {
    leader::Event::Reload(Reload { source: "other".into(), weights: weights_at("other") })
}

fn is_commit(m: &Message) -> bool {
    matches!(m, Message::Commit(c) if c.call_id == 3)
}

fn cases() -> Vec<TripwireCase> {
    use CheckSite::{Init, Leader as Lead, MeshLeader as Relay, Worker};
    let rank2 = |code, change: Box<dyn Fn(&mut Envelope)>| {
        let change = Rc::new(change);
        case(code, Worker, Some(2), move |n| {
            let change = Rc::clone(&change);
            n.tamper = tamper_envelope(2, 3, move |e| change(e));
        })
    };
    let mut all = vec![
        rank2("T0701", Box::new(|e| e.header.version += 1)),
        rank2(
            "T0710",
            Box::new(change_phases(|p| {
                p.insert(0, PhaseCall::new("rebase", vec![("shift".into(), ScalarArg::I64(0))]))
            })),
        ),
        rank2("T0712", Box::new(|e| e.header.chunk = 0)),
        case("T0712", Worker, Some(2), |n| {
            n.rank(2).engine.cache_fault = Some((4, CacheFault::Lost("emptied".into())));
        }),
        case("T0772", Worker, Some(2), |n| {
            n.rank(2).engine.cache_fault = Some((4, CacheFault::Changed("another digest".into())));
        }),
        rank2("T0722", Box::new(change_phases(|p| p.insert(0, PhaseCall::new("rebasement", vec![]))))),
        rank2("T0723", Box::new(change_phases(|p| p[0].args.clear()))),
        rank2("T0730", Box::new(|e| e.header.call_id = 9)),
        rank2("T0731", Box::new(|e| e.header.session += 1)),
        rank2("T0732", Box::new(|e| e.header.deadline_ms = 0)),
        rank2(
            "T0733",
            Box::new(|e| {
                e.header.action = CallAction::Reload;
                e.header.cache_epoch += 1;
                (e.meta, e.reload) = (None, Some(Reload { source: "x".into(), weights: Digest::default() }));
            }),
        ),
        rank2("T0734", Box::new(change_meta(|m| m.expected_collectives += 1))),
        rank2("T0735", Box::new(|e| e.tensors.0.push(prompt_tensor(1)))),
        case("T0707", Lead, Some(1), |n| {
            let ready = |m: &Message| matches!(m, Message::Ready(_));
            n.tamper = replace_message(Hop::From(1), ready, Message::Commit(Commit { call_id: 1 }));
        }),
        case("T0707", Worker, Some(1), |n| {
            n.tamper = replace_message(Hop::To(1), is_commit, Message::Finished)
        }),
        case("T0707", Relay, Some(0), |n| {
            n.tamper = replace_message(Hop::To(1), is_commit, Message::Finished)
        }),
        case("T0721", Lead, None, |n| {
            n.requests[0] = Request { request: NEXT, text: Some(prompt_tensor(1)) }
        }),
        case("T0736", Lead, Some(2), |n| {
            n.requests[2] = Request { request: ChunkRequest { cut: SceneCut::Ordered, ..NEXT }, text: None };
            n.tamper = tamper_done(2, 4, |d| d.cache_epoch -= 1);
        }),
        case("T0737", Worker, Some(2), |n| {
            n.inject.insert(30, reload());
            n.rank(2).engine.bug = Bug::WrongReload;
        }),
        case("T0737", Lead, Some(1), |n| {
            n.inject.insert(30, reload());
            n.tamper = Box::new(|way, _, m| match m {
                Message::Done(mut d) if way == Hop::From(1) && !d.fingerprints.is_empty() => {
                    d.observed.weights = Digest::default();
                    vec![Message::Done(d)]
                }
                m => vec![m],
            });
        }),
        case("T0742", Lead, Some(2), |n| n.kill = Some((40, 2))),
        case("T0742", Relay, Some(2), |n| n.kill = Some((60, 2))),
        case("T0743", Lead, Some(2), |n| n.stuck.extend([(2, 3)])),
        case("T0744", Lead, Some(2), |n| n.rank(2).engine.bug = Bug::OtherResult(4)),
        case("T0746", Worker, Some(1), |n| {
            n.tamper = replace_message(Hop::To(1), is_commit, Message::Commit(Commit { call_id: 2 }));
        }),
        case("T0747", Worker, Some(2), |n| n.rank(2).engine.bug = Bug::ExtraCollective(4)),
        case("T0749", Lead, None, |n| n.launcher_gone_at = Some(20)),
        case("T0752", Lead, Some(2), |n| n.rank(2).engine.bug = Bug::CompilesAt(4)),
        case("T0753", Lead, Some(2), |n| n.rank(2).engine.bug = Bug::IncompleteWarmup),
        case("T0754", Init, Some(1), |n| {
            n.rank(1).engine.fingerprints[1].digest = Digest::hash_bytes(b"other")
        }),
        case("T0754", Init, Some(2), |n| {
            let first = n.rank(0).engine.fingerprints[0].digest;
            n.rank(2).engine.fingerprints[0].digest = first;
        }),
        case("T0754", Lead, Some(2), |n| {
            n.inject.insert(30, reload());
            n.rank(2).engine.bug = Bug::WrongShardReload;
        }),
        case("T0754", Worker, Some(2), |n| n.rank(2).engine.bug = Bug::WeightChangeAt(4)),
        case("T0755", Relay, Some(1), |n| n.tamper = tamper_envelope(1, 3, |e| e.header.chunk = 0)),
        case("T0755", Relay, Some(1), |n| {
            n.tamper = tamper_envelope(1, 3, change_meta(|m| m.expected_collectives += 1))
        }),
        // The leader commits before all ranks are ready.
        case("T0755", Relay, Some(1), |n| {
            n.tamper = Box::new(|way, _, m| match m {
                Message::Envelope(e) if way == Hop::To(1) && e.header.call_id == 3 => {
                    vec![Message::Envelope(e), Message::Commit(Commit { call_id: 3 })]
                }
                m => vec![m],
            });
        }),
    ];
    let other_context = |n: &mut Net| {
        n.tamper = Box::new(|way, _, m| match m {
            Message::Context(mut c) if way == Hop::To(2) => {
                c.tensors.0 = vec![context_tensor(&Tensor::from_f32("x", &[4], &[9.0; 4]).expect("fits"))];
                vec![Message::Context(c)]
            }
            m => vec![m],
        });
    };
    let recompute = |code, place, rank, fault: fn(&mut Net)| TripwireCase {
        regime: CacheRegime::Recompute,
        ..case(code, place, rank, fault)
    };
    all.push(recompute("T0759", Lead, Some(2), other_context));
    // A recompute call arrives without its context: no older context is used.
    all.push(recompute("T0735", Worker, Some(2), |n| {
        n.tamper = Box::new(|way, _, m| match m {
            Message::Context(mut c) if way == Hop::To(2) => {
                c.tensors.0.clear();
                vec![Message::Context(c)]
            }
            m => vec![m],
        });
    }));
    all.push(recompute("T0755", Relay, Some(1), |n| {
        n.tamper = Box::new(|way, _, m| match m {
            Message::Context(mut c) if way == Hop::To(1) => {
                c.tensors.0.clear();
                vec![Message::Context(c)]
            }
            m => vec![m],
        });
    }));
    all
}

#[test]
fn each_tripwire_fires_at_its_site_and_not_when_it_is_disabled() {
    let mut fired = BTreeSet::new();
    for c in cases() {
        let on = run_outcome(&c, &Tripwires::default())
            .unwrap_or_else(|| panic!("{} {:?}: clean", c.code, c.site));
        assert_eq!((on.code.as_str(), on.site, on.rank), (c.code, c.site, c.rank), "{on}");
        let off = run_outcome(&c, &Tripwires::disabling([c.code]));
        assert!(off.as_ref().is_none_or(|f| f.code != c.code), "{} is off and fired: {off:?}", c.code);
        let listed = TRIPWIRES.iter().find(|t| t.code.id == c.code).expect("listed");
        assert!(listed.sites.contains(&c.site), "{} {:?}", c.code, c.site);
        fired.insert(c.code);
    }
    // The codes below have their own tests. Some are raised outside of the state machines: by an
    // engine's guard, by peer authentication, by the frame encoder and decoder.
    fired.extend([
        "T0702", "T0703", "T0704", "T0705", "T0706", "T0740", "T0741", "T0751", "T0756", "T0757", "T0775",
    ]);
    fired.extend(["T0765", "T0770", "T0771", "T0773", "T0777", "T0785"]);
    for t in TRIPWIRES {
        assert!(fired.contains(t.code.id), "{} has no test", t.code.id);
    }
}

/// An engine whose latents are given.
struct GivenLatents {
    latents: Vec<f32>,
    changed: Option<RehashResult>,
}

impl Engine for GivenLatents {
    fn run(
        &mut self,
        _: &PhaseCall,
        _: &Tensors,
        _: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        Err(EngineFault::local_failure("the call has no phases"))
    }

    fn reset(&mut self) {}

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        let latents = Tensor::from_f32("latents", &[self.latents.len() as u64], &self.latents).ok();
        Ok(Tensors(latents.into_iter().collect()))
    }

    fn program_count(&self) -> ProgramCount {
        ProgramCount::default()
    }

    fn finish_warmup(&mut self) {}

    fn audit_weights(&mut self) -> Option<RehashResult> {
        self.changed.clone()
    }

    fn audit_caches(&mut self, _: &ReadyCall) -> Vec<CacheFault> {
        Vec::new()
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }
}

// proves: D-20
#[test]
fn latents_that_are_not_finite_end_the_call_unless_the_tripwire_is_off() {
    let call = ReadyCall {
        call_id: 4,
        action: CallAction::Infer,
        chunk: 2,
        cache_epoch: 0,
        meta: None,
        reload: None,
        inputs: Tensors::default(),
    };
    let run_with = |latents: &[f32], changed: Option<RehashResult>, off: &str| {
        let config = worker_config(LeaderPlacement::InMesh, 1, CacheRegime::Resident);
        let mut state = CallState::new(config.session_spec.state_spec()).expect("legal");
        let off = Tripwires::disabling([off]);
        let mut engine = GivenLatents { latents: latents.to_vec(), changed };
        run_call(&mut engine, &call, &test_programs(), &mut state, &off, &|_| {})
    };
    let run = |latents: &[f32], off: &str| run_with(latents, None, off);
    assert!(run(&[1.0, f32::MAX, -0.0], "").is_ok());
    for (bad, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "with inf"), (f32::NEG_INFINITY, "with -inf")] {
        let fault = run(&[1.0, bad, 0.0, bad, 2.0], "").unwrap_err();
        assert_eq!(fault.code, "T0771");
        for part in ["call 4, chunk 2", "2 of 5 latents", "element 1", shown, "ends before chunk 2"] {
            assert!(fault.text.contains(part), "{part} in {}", fault.text);
        }
        assert!(run(&[1.0, bad], "T0771").is_ok());
    }
    // The rank whose weights changed names them, so that no rank that a collective reached is blamed.
    let changed = RehashResult {
        label: "`w` in memory".to_string(),
        digest_at_load: Digest([1; 32]),
        digest_now: Digest([2; 32]),
    };
    let fault = run_with(&[f32::NAN], Some(changed), "").unwrap_err();
    assert_eq!(fault.code, "T0754");
    assert!(fault.text.contains("`w` in memory changed"), "{}", fault.text);
}

#[test]
fn an_oversized_meta_is_never_sent() {
    let frames = 2_000_000;
    let facts = |scalars: &[(&str, ArgKind)]| ProgramInfo {
        scalars: scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect(),
        ..ProgramInfo::default()
    };
    let denoise = facts(&[("t", ArgKind::F32s(frames))]);
    let names = ["denoise.fill0", "clean.fill0", "recompute"];
    let programs = names.map(|n| (n.to_string(), denoise.clone()));
    let mut config = leader_config(LeaderPlacement::InMesh, 1, CacheRegime::Resident);
    config.programs = Arc::new(ProgramIndex::new(programs));
    let mut net = Net::with_configs(LeaderPlacement::InMesh, config.clone(), CacheRegime::Resident, 1, |r| {
        let mut w = worker_config(LeaderPlacement::InMesh, r, CacheRegime::Resident);
        w.programs = Arc::clone(&config.programs);
        w
    });
    let failure = net.run(10).expect("a failure");
    assert_eq!((failure.code.as_str(), failure.site), ("T0703", CheckSite::Leader), "{failure}");
    assert!(!net.trace.iter().any(|(_, m)| matches!(m, Message::Envelope(_))));
}

#[test]
fn every_rank_reports_its_effective_settings_at_its_start() {
    for placement in [LeaderPlacement::InMesh, LeaderPlacement::Outside] {
        let mut config = leader_config(placement, 3, CacheRegime::Resident);
        config.tripwires = Tripwires::disabling(["T0744"]);
        let mut net = Net::with_configs(placement, config, CacheRegime::Resident, 2, |r| {
            let mut w = worker_config(placement, r, CacheRegime::Resident);
            w.tripwires = Tripwires::disabling(["T0744"]);
            w.limits.stale_ns += u64::from(r == 2);
            w
        });
        assert!(net.run(10).is_none());
        let ranks: Vec<u32> = net.startups.keys().copied().collect();
        assert!(ranks.contains(&0) && ranks.contains(&2), "{ranks:?}");
        for (rank, (settings, armed)) in &net.startups {
            let value = |key: &str| settings.keys().iter().find(|k| k.key == key).unwrap().value.clone();
            let stale_ns = 3_000_000_000 + u64::from(*rank == 2);
            assert!(value("watchdogs").contains(&format!(" stale_ns={stale_ns} ")), "{settings:?}");
            assert_eq!(value("tripwires off"), "T0744");
            assert!(armed.contains(&"T0743") && !armed.contains(&"T0744"), "{armed:?}");
        }
        assert!(
            net.notes.iter().any(|n| n.contains("`watchdogs`")),
            "a difference is noted: {:?}",
            net.notes
        );
    }
}

#[test]
fn every_differing_key_is_shown_with_all_its_values_and_ranks() {
    for off in ["", "T0740"] {
        let off = Tripwires::disabling([off]);
        let mut config = leader_config(LeaderPlacement::InMesh, 4, CacheRegime::Resident);
        config.tripwires = off.clone();
        let mut net = Net::with_configs(LeaderPlacement::InMesh, config, CacheRegime::Resident, 2, |r| {
            let mut w = worker_config(LeaderPlacement::InMesh, r, CacheRegime::Resident);
            w.tripwires = off.clone();
            w.parity = w.parity.with_known_key("threads", r.to_string());
            if r == 2 {
                w.build = "another".into();
                w.parity = w.parity.with_key("backend.matmul", ParityClass::AtInit, "fast");
            }
            w
        });
        let Some(failure) = net.run(10) else {
            assert_eq!(net.delivered.len(), 2);
            continue;
        };
        assert_eq!((failure.code.as_str(), failure.site, failure.rank), ("T0740", CheckSite::Init, Some(2)));
        assert_eq!(
            failure.text,
            "2 keys differ\n  `backend.matmul`: `fast` on rank 2; `naive` on ranks 0, 1, 3\n  \
             `build`: `another` on rank 2; `test` on ranks 0, 1, 3"
        );
        assert!(net.notes[0].contains("`threads`: `0` on rank 0; `1` on rank 1"), "{:?}", net.notes);
        for rank in net.ranks.values() {
            assert!(matches!(&rank.outcome, Some(Some(f)) if f.text == failure.text), "each rank shows it");
        }
    }
}

#[test]
fn other_group_orders_and_tripwires_disabled_on_one_rank_are_refused() {
    for (key, code) in [("groups", "T0757"), ("tripwires off", "T0740")] {
        let config = leader_config(LeaderPlacement::Outside, 3, CacheRegime::Resident);
        let mut net = Net::with_configs(LeaderPlacement::Outside, config, CacheRegime::Resident, 2, |r| {
            let mut w = worker_config(LeaderPlacement::Outside, r, CacheRegime::Resident);
            w.parity =
                w.parity.with_known_key("groups", if key == "groups" && r == 3 { "b, a" } else { "a, b" });
            if key != "groups" && r == 3 {
                w.tripwires = Tripwires::disabling(["T0744"]);
            }
            w
        });
        let failure = net.run(10).expect("a failure");
        assert_eq!(
            (failure.code.as_str(), failure.site, failure.rank),
            (code, CheckSite::Init, Some(3)),
            "{failure}"
        );
        assert!(failure.text.contains(key), "{failure}");
    }
}

/// Runs ranks 1 to 3 and a leader outside of the mesh, whose real hosts are the letters of `real`, under a
/// plan that states these numbers of ranks on hosts. Returns the failure and the notes.
fn run_on_hosts(stated: &[u32], real: &str, off: &Tripwires) -> (Option<Failure>, Vec<String>) {
    let host = |rank: u32| real[rank as usize..=rank as usize].to_string();
    let mut config = leader_config(LeaderPlacement::Outside, 3, CacheRegime::Resident);
    config.hosts = Some(HostMap::from_counts(stated, &[]));
    config.parity = config.parity.with_known_key("host", host(0));
    config.tripwires = off.clone();
    let mut net = Net::with_configs(LeaderPlacement::Outside, config, CacheRegime::Resident, 2, |rank| {
        let mut w = worker_config(LeaderPlacement::Outside, rank, CacheRegime::Resident);
        w.parity = w.parity.with_known_key("host", host(rank));
        w.tripwires = off.clone();
        w
    });
    let failure = net.run(10);
    (failure, net.notes)
}

#[test]
fn ranks_of_a_stated_host_on_two_hosts_end_the_run_and_hosts_that_share_one_are_noted() {
    let armed = Tripwires::default();
    let (failure, _) = run_on_hosts(&[2, 2], "aabb", &armed);
    assert!(failure.is_none(), "{failure:?}");
    let (failure, _) = run_on_hosts(&[2, 2], "aaab", &armed);
    let failure = failure.expect("a failure");
    assert_eq!((failure.code.as_str(), failure.site, failure.rank), ("T0777", CheckSite::Init, Some(3)));
    assert_eq!(failure.text, "rank 3 is on b, but the plan states it on host 1 with rank 2, which is on a");
    // The host of a leader outside of the mesh counts as well.
    let (failure, _) = run_on_hosts(&[2, 2], "abcc", &armed);
    assert_eq!(failure.expect("a failure").rank, Some(1));
    let (failure, _) = run_on_hosts(&[2, 2], "aaab", &Tripwires::disabling(["T0777"]));
    assert!(failure.is_none(), "{failure:?}");
    let (failure, notes) = run_on_hosts(&[1, 3], "aaaa", &armed);
    assert!(failure.is_none(), "{failure:?}");
    let note = "the plan states 2 hosts: ranks 0; 1 to 3, and the ranks of its hosts 0 and 1 all run on a. The run \
                continues, because memory of one host is no slower than a network. To measure the network between the \
                hosts, start the ranks of each on a host of its own.";
    assert!(notes.iter().any(|n| n == note), "{notes:?}");
}

#[test]
fn an_invalid_bound_is_refused_unless_its_tripwire_is_off() {
    let limits = Limits { d_in: u32::MAX, ..Limits::default() };
    for (off, refused) in [("none", true), ("T0741", false)] {
        let mut config = leader_config(LeaderPlacement::InMesh, 2, CacheRegime::Resident);
        (config.limits, config.tripwires) = (limits.clone(), Tripwires::disabling([off]));
        assert_eq!(Leader::new(config).is_err(), refused);
        let mut relay = mesh_leader_config(2, CacheRegime::Resident);
        (relay.limits, relay.tripwires) = (limits.clone(), Tripwires::disabling([off]));
        assert_eq!(MeshLeader::new(relay).is_err(), refused);
    }
}

#[test]
fn a_worker_detects_its_own_stall_without_the_leader() {
    let mut config = leader_config(LeaderPlacement::InMesh, 3, CacheRegime::Resident);
    config.tripwires = Tripwires::disabling(["T0740", "T0743"]);
    let mut net = Net::with_configs(LeaderPlacement::InMesh, config, CacheRegime::Resident, 4, |r| {
        let mut w = worker_config(LeaderPlacement::InMesh, r, CacheRegime::Resident);
        w.tripwires = Tripwires::disabling(["T0740"]);
        w
    });
    net.stuck.insert((2, 3));
    let failure = net.run(30).expect("a failure");
    assert_eq!(
        (failure.code.as_str(), failure.site, failure.rank),
        ("T0743", CheckSite::Worker, Some(2)),
        "{failure}"
    );
    assert_eq!(failure.class, FailureClass::Stall);
    assert!(net.now_ns < 12_000_000_000, "{}", net.now_ns);
}
