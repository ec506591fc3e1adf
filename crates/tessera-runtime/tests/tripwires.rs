//! Each tripwire fires at its place, with its code and the rank, and not when it is off.

mod support;

use std::collections::BTreeSet;
use std::rc::Rc;
use std::sync::Arc;

use support::net::{NEXT, Net, Request, Tamper, Way};
use support::{
    Bug, Shape, census, context, leader_config, mesh_leader_config, text, weights_at, worker_config,
};
use tessera_runtime::cache::Regime;
use tessera_runtime::census::{ArgKind, Census, ProgramFacts};
use tessera_runtime::decide::{ChunkRequest, Cut};
use tessera_runtime::leader::{self, Leader};
use tessera_runtime::mesh_leader::MeshLeader;
use tessera_runtime::wire::{
    Arg, CallAction, CallMeta, Commit, Done, Envelope, Message, PhaseCall, Reload, Tensor,
};
use tessera_runtime::{Digest, Failure, FailureClass, Limits, ParityClass, Place, TRIPWIRES, Tripwires};

/// A run with one fault in it.
struct Case {
    code: &'static str,
    place: Place,
    rank: Option<u32>,
    shape: Shape,
    regime: Regime,
    fault: Box<dyn Fn(&mut Net)>,
}

fn case(code: &'static str, place: Place, rank: Option<u32>, fault: impl Fn(&mut Net) + 'static) -> Case {
    let shape = if place == Place::MeshLeader { Shape::Pp } else { Shape::Mesh };
    Case { code, place, rank, shape, regime: Regime::Resident, fault: Box::new(fault) }
}

fn net(shape: Shape, regime: Regime, off: &Tripwires) -> Net {
    let mut config = leader_config(shape, 3, regime);
    config.tripwires = off.clone();
    Net::with(shape, config, regime, 4, |r| {
        let mut w = worker_config(shape, r, regime);
        w.tripwires = off.clone();
        w
    })
}

/// How the run with this fault ends; a run that nobody ends counts as one without a failure.
fn outcome(c: &Case, off: &Tripwires) -> Option<Failure> {
    let mut net = net(c.shape, c.regime, off);
    (c.fault)(&mut net);
    net.run_for(40).flatten()
}

/// Changes an envelope of a chunk on its way to a rank.
fn envelope(to: u32, call: u64, change: impl Fn(&mut Envelope) + 'static) -> Tamper {
    Box::new(move |way, _, m| match m {
        Message::Envelope(mut e) if way == Way::To(to) && e.header.call_id == call => {
            change(&mut e);
            vec![Message::Envelope(e)]
        }
        m => vec![m],
    })
}

fn meta(change: impl Fn(&mut CallMeta) + 'static) -> impl Fn(&mut Envelope) {
    move |e| {
        if let Some(m) = &mut e.meta {
            change(m);
        }
    }
}

/// The same, with counts that fit the changed phases.
fn phases(change: impl Fn(&mut Vec<PhaseCall>) + 'static) -> impl Fn(&mut Envelope) {
    meta(move |m| {
        change(&mut m.phases);
        if let Ok(want) = census().expect(&m.phases) {
            m.expected_generator_calls = want.generator_calls;
            m.expected_collectives = want.collectives;
            m.expected_trace_digest = want.trace;
        }
    })
}

fn done(from: u32, call: u64, change: impl Fn(&mut Done) + 'static) -> Tamper {
    Box::new(move |way, _, m| match m {
        Message::Done(mut d) if way == Way::From(from) && d.call_id == call => {
            change(&mut d);
            vec![Message::Done(d)]
        }
        m => vec![m],
    })
}

fn instead(way: Way, of: impl Fn(&Message) -> bool + 'static, other: Message) -> Tamper {
    Box::new(move |w, _, m| if w == way && of(&m) { vec![other.clone()] } else { vec![m] })
}

fn reload() -> leader::Event {
    leader::Event::Reload { source: "other".into(), weights: weights_at("other") }
}

fn is_commit(m: &Message) -> bool {
    matches!(m, Message::Commit(c) if c.call_id == 3)
}

fn cases() -> Vec<Case> {
    use Place::{Init, Leader as Lead, MeshLeader as Relay, Worker};
    let rank2 = |code, change: Box<dyn Fn(&mut Envelope)>| {
        let change = Rc::new(change);
        case(code, Worker, Some(2), move |n| {
            let change = Rc::clone(&change);
            n.tamper = envelope(2, 3, move |e| change(e));
        })
    };
    let mut all = vec![
        rank2("T0701", Box::new(|e| e.header.version = 9)),
        rank2(
            "T0710",
            Box::new(phases(|p| p.insert(0, PhaseCall::new("rebase", vec![("shift".into(), Arg::I64(0))])))),
        ),
        rank2("T0712", Box::new(|e| e.header.chunk = 0)),
        rank2("T0722", Box::new(phases(|p| p.insert(0, PhaseCall::new("rebasement", vec![]))))),
        rank2("T0723", Box::new(phases(|p| p[0].args.clear()))),
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
        rank2("T0734", Box::new(meta(|m| m.expected_collectives += 1))),
        rank2("T0735", Box::new(|e| e.tensors.0.push(text(1)))),
        case("T0707", Lead, Some(1), |n| {
            let ready = |m: &Message| matches!(m, Message::Ready(_));
            n.tamper = instead(Way::From(1), ready, Message::Commit(Commit { call_id: 1 }));
        }),
        case("T0707", Worker, Some(1), |n| n.tamper = instead(Way::To(1), is_commit, Message::Finished)),
        case("T0707", Relay, Some(0), |n| n.tamper = instead(Way::To(1), is_commit, Message::Finished)),
        case("T0721", Lead, None, |n| n.requests[0] = Request { request: NEXT, text: Some(text(1)) }),
        case("T0732", Lead, None, |_| {}),
        case("T0736", Lead, Some(2), |n| {
            n.requests[2] = Request { request: ChunkRequest { cut: Cut::Ordered, ..NEXT }, text: None };
            n.tamper = done(2, 4, |d| d.cache_epoch -= 1);
        }),
        case("T0737", Worker, Some(2), |n| {
            n.inject.insert(30, reload());
            n.rank(2).engine.bug = Bug::ReloadsOthers;
        }),
        case("T0737", Lead, Some(1), |n| {
            n.inject.insert(30, reload());
            n.tamper = Box::new(|way, _, m| match m {
                Message::Done(mut d) if way == Way::From(1) && !d.fingerprints.is_empty() => {
                    d.observed.weights = Digest::default();
                    vec![Message::Done(d)]
                }
                m => vec![m],
            });
        }),
        case("T0742", Lead, Some(2), |n| n.kill = Some((40, 2))),
        case("T0742", Relay, Some(2), |n| n.kill = Some((60, 2))),
        case("T0743", Lead, Some(2), |n| n.stuck.extend([(2, 3)])),
        case("T0744", Lead, Some(2), |n| n.rank(2).engine.bug = Bug::OtherNumbers(4)),
        case("T0746", Worker, Some(1), |n| {
            n.tamper = instead(Way::To(1), is_commit, Message::Commit(Commit { call_id: 2 }));
        }),
        case("T0747", Worker, Some(2), |n| n.rank(2).engine.bug = Bug::ExtraCollective(4)),
        case("T0749", Lead, None, |n| n.launcher_gone_at = Some(20)),
        case("T0752", Lead, Some(2), |n| n.rank(2).engine.bug = Bug::CompilesAt(4)),
        case("T0753", Lead, Some(2), |n| n.rank(2).engine.bug = Bug::WarmsLess),
        case("T0754", Init, Some(1), |n| n.rank(1).engine.prints[1].digest = Digest::of(b"other")),
        case("T0754", Init, Some(2), |n| {
            let first = n.rank(0).engine.prints[0].digest;
            n.rank(2).engine.prints[0].digest = first;
        }),
        case("T0754", Lead, Some(2), |n| {
            n.inject.insert(30, reload());
            n.rank(2).engine.bug = Bug::ReloadsOtherShards;
        }),
        case("T0754", Worker, Some(2), |n| n.rank(2).engine.bug = Bug::ForgetsAt(4)),
        case("T0755", Relay, Some(1), |n| n.tamper = envelope(1, 3, |e| e.header.chunk = 0)),
        case("T0755", Relay, Some(1), |n| n.tamper = envelope(1, 3, meta(|m| m.expected_collectives += 1))),
        // The leader commits before all are ready.
        case("T0755", Relay, Some(1), |n| {
            n.tamper = Box::new(|way, _, m| match m {
                Message::Envelope(e) if way == Way::To(1) && e.header.call_id == 3 => {
                    vec![Message::Envelope(e), Message::Commit(Commit { call_id: 3 })]
                }
                m => vec![m],
            });
        }),
    ];
    let other_context = |n: &mut Net| {
        n.tamper = Box::new(|way, _, m| match m {
            Message::Context(mut c) if way == Way::To(2) => {
                c.tensors.0 = vec![context(&Tensor::from_f32("x", &[4], &[9.0; 4]).expect("fits"))];
                vec![Message::Context(c)]
            }
            m => vec![m],
        });
    };
    let recompute = |code, place, rank, fault: fn(&mut Net)| Case {
        regime: Regime::Recompute,
        ..case(code, place, rank, fault)
    };
    all.push(recompute("T0759", Lead, Some(2), other_context));
    // A recompute call without its context: nothing older is used.
    all.push(recompute("T0735", Worker, Some(2), |n| {
        n.tamper = Box::new(|way, _, m| match m {
            Message::Context(mut c) if way == Way::To(2) => {
                c.tensors.0.clear();
                vec![Message::Context(c)]
            }
            m => vec![m],
        });
    }));
    all.push(recompute("T0755", Relay, Some(1), |n| {
        n.tamper = Box::new(|way, _, m| match m {
            Message::Context(mut c) if way == Way::To(1) => {
                c.tensors.0.clear();
                vec![Message::Context(c)]
            }
            m => vec![m],
        });
    }));
    all.retain(|c| (c.code, c.place) != ("T0732", Lead));
    all
}

#[test]
fn each_fires_at_its_place_and_not_when_it_is_off() {
    let mut fired = BTreeSet::new();
    for c in cases() {
        let on =
            outcome(&c, &Tripwires::default()).unwrap_or_else(|| panic!("{} {:?}: clean", c.code, c.place));
        assert_eq!((on.code.as_str(), on.place, on.rank), (c.code, c.place, c.rank), "{on}");
        let off = outcome(&c, &Tripwires::off([c.code]));
        assert!(off.as_ref().is_none_or(|f| f.code != c.code), "{} is off and fired: {off:?}", c.code);
        let listed = TRIPWIRES.iter().find(|t| t.code.id == c.code).expect("listed");
        assert!(listed.places.contains(&c.place), "{} {:?}", c.code, c.place);
        fired.insert(c.code);
    }
    // Those below have tests of their own; some are raised beside the machines: by an engine's guard, by the proof of
    // a peer, by the writer and the reader of frames.
    fired.extend(["T0702", "T0703", "T0704", "T0705", "T0706", "T0740", "T0741", "T0751", "T0756", "T0757"]);
    for t in TRIPWIRES {
        assert!(fired.contains(t.code.id), "{} has no test", t.code.id);
    }
}

#[test]
fn a_meta_that_cannot_travel_never_leaves_the_leader() {
    let frames = 2_000_000;
    let facts = |scalars: &[(&str, ArgKind)]| ProgramFacts {
        scalars: scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect(),
        ..ProgramFacts::default()
    };
    let denoise = facts(&[("t", ArgKind::F32s(frames))]);
    let names = ["denoise.fill0", "clean.fill0", "recompute"];
    let programs = names.map(|n| (n.to_string(), denoise.clone()));
    let mut config = leader_config(Shape::Mesh, 1, Regime::Resident);
    config.census = Arc::new(Census::new(programs));
    let mut net = Net::with(Shape::Mesh, config.clone(), Regime::Resident, 1, |r| {
        let mut w = worker_config(Shape::Mesh, r, Regime::Resident);
        w.census = Arc::clone(&config.census);
        w
    });
    let failure = net.run(10).expect("a failure");
    assert_eq!((failure.code.as_str(), failure.place), ("T0703", Place::Leader), "{failure}");
    assert!(!net.trace.iter().any(|(_, m)| matches!(m, Message::Envelope(_))));
}

#[test]
fn every_differing_key_is_shown_with_all_its_values_and_ranks() {
    for off in ["", "T0740"] {
        let off = Tripwires::off([off]);
        let mut config = leader_config(Shape::Mesh, 4, Regime::Resident);
        config.tripwires = off.clone();
        let mut net = Net::with(Shape::Mesh, config, Regime::Resident, 2, |r| {
            let mut w = worker_config(Shape::Mesh, r, Regime::Resident);
            w.tripwires = off.clone();
            w.parity = w.parity.set("threads", r.to_string());
            if r == 2 {
                w.build = "another".into();
                w.parity = w.parity.with("backend.matmul", ParityClass::AtInit, "fast");
            }
            w
        });
        let Some(failure) = net.run(10) else {
            assert_eq!(net.delivered.len(), 2);
            continue;
        };
        assert_eq!((failure.code.as_str(), failure.place, failure.rank), ("T0740", Place::Init, Some(2)));
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
fn groups_in_another_order_and_tripwires_that_only_one_rank_lacks_are_refused() {
    for (key, code) in [("groups", "T0757"), ("tripwires off", "T0740")] {
        let config = leader_config(Shape::Pp, 3, Regime::Resident);
        let mut net = Net::with(Shape::Pp, config, Regime::Resident, 2, |r| {
            let mut w = worker_config(Shape::Pp, r, Regime::Resident);
            w.parity = w.parity.set("groups", if key == "groups" && r == 3 { "b, a" } else { "a, b" });
            if key != "groups" && r == 3 {
                w.tripwires = Tripwires::off(["T0744"]);
            }
            w
        });
        let failure = net.run(10).expect("a failure");
        assert_eq!(
            (failure.code.as_str(), failure.place, failure.rank),
            (code, Place::Init, Some(3)),
            "{failure}"
        );
        assert!(failure.text.contains(key), "{failure}");
    }
}

#[test]
fn a_bound_that_is_none_is_refused_unless_its_tripwire_is_off() {
    let limits = Limits { d_in: u32::MAX, ..Limits::default() };
    for (off, refused) in [("none", true), ("T0741", false)] {
        let mut config = leader_config(Shape::Mesh, 2, Regime::Resident);
        (config.limits, config.tripwires) = (limits.clone(), Tripwires::off([off]));
        assert_eq!(Leader::new(config).is_err(), refused);
        let mut relay = mesh_leader_config(2, Regime::Resident);
        (relay.limits, relay.tripwires) = (limits.clone(), Tripwires::off([off]));
        assert_eq!(MeshLeader::new(relay).is_err(), refused);
    }
}

#[test]
fn a_worker_ends_by_itself_what_nobody_else_watches() {
    let mut config = leader_config(Shape::Mesh, 3, Regime::Resident);
    config.tripwires = Tripwires::off(["T0740", "T0743"]);
    let mut net = Net::with(Shape::Mesh, config, Regime::Resident, 4, |r| {
        let mut w = worker_config(Shape::Mesh, r, Regime::Resident);
        w.tripwires = Tripwires::off(["T0740"]);
        w
    });
    net.stuck.insert((2, 3));
    let failure = net.run(30).expect("a failure");
    assert_eq!(
        (failure.code.as_str(), failure.place, failure.rank),
        ("T0743", Place::Worker, Some(2)),
        "{failure}"
    );
    assert_eq!(failure.class, FailureClass::Stall);
    assert!(net.now_ns < 12_000_000_000, "{}", net.now_ns);
}
