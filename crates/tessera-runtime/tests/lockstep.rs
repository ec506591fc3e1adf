//! Tests of leader and ranks over a deterministic network: clean runs, and runs with failures.

mod support;

use std::cell::Cell;
use std::rc::Rc;

use support::net::{FIRST, Hop, NEXT, Net, Request};
use support::{Bug, LeaderPlacement, context_tensor, leader_config, prompt_tensor, worker_config};
use tessera_runtime::director::{ChunkRequest, SceneCut};
use tessera_runtime::engine::EngineFault;
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::leader::Leader;
use tessera_runtime::wire::{CallAction, Commit, DuplicatePolicy, Message, PhaseCall, Tensor};
use tessera_runtime::worker::{Action, Event, Worker, WorkerConfig};
use tessera_runtime::{Digest, Failure, FailureClass, Limits, ParityClass};

const BOTH: [CacheRegime; 2] = [CacheRegime::Resident, CacheRegime::Recompute];

fn run_to_failure(net: &mut Net) -> Failure {
    let failure = net.run(60).expect("a failure");
    // Every surviving rank ends with a failure, and no rank ends as if the run were clean.
    for (r, rank) in net.ranks.iter().filter(|(_, r)| r.alive) {
        assert!(matches!(rank.outcome, Some(Some(_))), "rank {r} after {failure}: {:?}", rank.outcome);
    }
    failure
}

fn clean_message_count(shape: LeaderPlacement, regime: CacheRegime, ranks: u32, chunks: u32) -> u64 {
    let mut net = Net::with_placement(shape, ranks, regime, chunks);
    net.run_clean();
    net.carried
}

/// Returns every leader placement in both regimes.
fn all_placements() -> impl Iterator<Item = (LeaderPlacement, CacheRegime)> {
    [LeaderPlacement::InMesh, LeaderPlacement::Outside].into_iter().flat_map(|s| BOTH.map(|r| (s, r)))
}

#[test]
fn a_clean_run_delivers_every_chunk_once_and_equal_on_every_mesh() {
    for regime in BOTH {
        let mut want: Option<Vec<(u32, Tensor)>> = None;
        for (shape, ranks) in
            [1, 2, 4].into_iter().flat_map(|n| [(LeaderPlacement::InMesh, n), (LeaderPlacement::Outside, n)])
        {
            let mut net = Net::with_placement(shape, ranks, regime, 7);
            net.requests[3] =
                Request { request: ChunkRequest { cut: SceneCut::Ordered, ..NEXT }, text: None };
            net.requests[5] = Request { request: FIRST, text: Some(prompt_tensor(9)) };
            net.run_clean();
            let chunks: Vec<u32> = net.delivered.iter().map(|(k, _)| *k).collect();
            assert_eq!(chunks, [0, 1, 2, 3, 4, 5, 6]);
            assert_eq!(net.delivered, *want.get_or_insert(net.delivered.clone()));
            let epochs: Vec<u32> = net.records.iter().map(|r| r.plan.cache_epoch).collect();
            assert_eq!(epochs, [0, 0, 0, 1, 1, 1, 1]);
            for rank in net.ranks.values() {
                assert_eq!(rank.runs.len(), 8);
                assert!(rank.runs.values().all(|n| *n == 1), "one run per chunk, and the warm-up");
            }
        }
    }
}

// proves: G-08, O-04
#[test]
fn preparing_overlaps_running_and_no_rank_runs_before_all_are_ready() {
    for regime in BOTH {
        let mut net = Net::new(3, regime, 5);
        net.run_clean();
        let mut ready = [0; 10];
        let (mut done, mut prepared_ahead) = ([0; 10], 0);
        for (_, m) in &net.trace {
            match m {
                Message::Ready(r) => ready[r.call_id as usize] += 1,
                Message::Done(d) => done[d.call_id as usize] += 1,
                Message::Commit(c) => {
                    let id = c.call_id as usize;
                    assert_eq!(ready[id], 3, "call {id} was committed before every rank was ready");
                    assert!(id == 1 || done[id - 1] == 3, "call {id} was committed before {} ended", id - 1);
                }
                Message::Envelope(e) => {
                    let id = e.header.call_id as usize;
                    prepared_ahead += usize::from(id > 2 && done[id - 1] == 0);
                    let late = e.header.action == CallAction::Warmup
                        || !e.tensors.0.iter().any(|t| t.name() == "context");
                    assert!(late, "context follows");
                }
                _ => {}
            }
        }
        assert!(prepared_ahead >= 4 * 3, "envelopes are sent before the previous call is done");
    }
}

#[test]
fn text_travels_on_change_only_and_context_only_when_recomputing() {
    let count = |regime, name: &str| {
        let mut net = Net::new(1, regime, 6);
        net.run_clean();
        let tensors = net.trace.iter().flat_map(|(_, m)| match m {
            Message::Envelope(e) if e.header.action == CallAction::Infer => e.tensors.0.clone(),
            Message::Context(c) => c.tensors.0.clone(),
            _ => Vec::new(),
        });
        tensors.filter(|t| t.name() == name).count()
    };
    assert_eq!((count(CacheRegime::Resident, "text"), count(CacheRegime::Resident, "context")), (1, 0));
    assert_eq!((count(CacheRegime::Recompute, "text"), count(CacheRegime::Recompute, "context")), (1, 5));
}

#[test]
fn an_engine_that_fails_in_any_phase_is_named_and_every_rank_ends() {
    for (bug, class, code) in [
        (Bug::FailAt as fn(u32) -> Bug, FailureClass::Engine, "T0745"),
        (Bug::ExtraCollective, FailureClass::Drift, "T0747"),
        (Bug::OtherTrace, FailureClass::Drift, "T0747"),
        (Bug::OtherResult, FailureClass::Drift, "T0744"),
    ] {
        for phase in 0..14 {
            let mut net = Net::new(3, CacheRegime::Resident, 4);
            net.rank(2).engine.bug = bug(phase);
            let failure = run_to_failure(&mut net);
            assert_eq!(
                (failure.class, failure.rank, failure.code.as_str()),
                (class, Some(2), code),
                "{bug:?} {phase}: {failure}"
            );
        }
    }
}

#[test]
fn a_rank_that_runs_one_phase_more_or_less_stops_at_the_boundary() {
    for more in [true, false] {
        let mut net = Net::new(3, CacheRegime::Resident, 4);
        net.alter_call = Box::new(move |rank, call, _| {
            if let (1, 3, Some(meta)) = (rank, call.call_id, &mut call.meta) {
                let at = meta.phases.iter().position(|p| p.program.starts_with("denoise")).expect("one");
                if more {
                    let again = meta.phases[at].clone();
                    meta.phases.insert(at, again);
                } else {
                    meta.phases.remove(at);
                }
            }
        });
        let failure = run_to_failure(&mut net);
        assert_eq!(
            (failure.class, failure.rank, failure.code.as_str()),
            (FailureClass::Drift, Some(1), "T0747")
        );
        let says = if more { "would be generator call 4" } else { "after 2 generator calls" };
        assert!(failure.text.contains(says), "{failure}");
    }
}

#[test]
fn an_out_of_band_reset_on_one_rank_is_caught() {
    let mut net = Net::new(2, CacheRegime::Resident, 4);
    net.alter_call = Box::new(|rank, call, state| {
        if (rank, call.call_id) == (1, 4) {
            state.reset().expect("legal in itself");
        }
    });
    let failure = run_to_failure(&mut net);
    assert_eq!((failure.class, failure.rank), (FailureClass::Drift, Some(1)));
    assert!(failure.text.contains("T0712"), "{failure}");
}

// proves: R-11
#[test]
fn every_single_lost_message_ends_the_run_in_bounded_time() {
    for (shape, regime) in all_placements() {
        for n in 0..clean_message_count(shape, regime, 2, 3) {
            let mut net = Net::with_placement(shape, 2, regime, 3);
            let lost = Rc::new(Cell::new(None));
            let seen = Rc::clone(&lost);
            net.tamper = Box::new(move |way, at, m| {
                if at == n {
                    seen.set(Some((way, matches!(m, Message::Heartbeat(_)))));
                    return Vec::new();
                }
                vec![m]
            });
            let failure = net.run(30);
            let (way, heartbeat) = lost.get().expect("a message was lost");
            if heartbeat {
                assert_eq!(failure, None);
                continue;
            }
            let (Hop::To(rank) | Hop::From(rank) | Hop::Relay(rank)) = way;
            let failure = failure.unwrap_or_else(|| panic!("message {n} was lost without a failure"));
            assert_eq!(failure.rank, Some(rank), "{shape:?}, message {n}, {way:?}: {failure}");
        }
    }
}

// proves: R-10
#[test]
fn every_single_doubled_message_is_refused_or_harmless_and_nothing_runs_twice() {
    for (shape, regime) in all_placements() {
        for n in 0..clean_message_count(shape, regime, 2, 3) {
            let mut net = Net::with_placement(shape, 2, regime, 3);
            let doubled = Rc::new(Cell::new(None));
            let kind = Rc::clone(&doubled);
            net.tamper = Box::new(move |_, at, m| {
                if at != n {
                    return vec![m];
                }
                kind.set(Some(m.kind()));
                vec![m.clone(), m]
            });
            let failure = net.run(30);
            let kind = doubled.get().expect("the message was sent");
            match (kind.duplicate_policy(), &failure) {
                // The second of two shutdowns, or answers to one, may arrive after the end.
                (_, None) => {}
                (DuplicatePolicy::Refused(codes), Some(f)) => {
                    assert!(codes.iter().any(|c| c.id == f.code), "{shape:?} {regime:?} {kind:?}: {f}");
                }
                (DuplicatePolicy::Harmless, Some(f)) => panic!("a second {kind:?} ended the run: {f}"),
            }
            let at_shutdown =
                n + 8 * u64::from(net.ranks.len() as u32) > clean_message_count(shape, regime, 2, 3);
            if matches!(kind.duplicate_policy(), DuplicatePolicy::Refused(_)) && !at_shutdown {
                assert!(failure.is_some(), "{shape:?} {regime:?}: a second {kind:?} was dropped silently");
            }
            for rank in net.ranks.values() {
                assert!(rank.runs.values().all(|runs| *runs == 1));
            }
            if failure.is_none() {
                assert_eq!(net.delivered.len(), 3);
            }
        }
    }
}

#[test]
fn a_rank_that_dies_at_any_message_is_named() {
    for (shape, regime) in all_placements() {
        let all = clean_message_count(shape, regime, 3, 3);
        for (n, who) in (0..all).flat_map(|n| [(n, 1), (n, 2)]) {
            let mut net = Net::with_placement(shape, 3, regime, 3);
            net.kill = Some((n, who));
            match net.run(10) {
                Some(f) => {
                    assert_eq!((f.class, f.rank), (FailureClass::RankDied, Some(who)), "{shape:?} {n}: {f}");
                }
                // The rank had answered the shutdown.
                None => assert!(n + 8 > all, "rank {who} died at message {n} of {all} without a failure"),
            }
        }
    }
}

// proves: S-11
#[test]
fn a_rank_that_stops_at_any_message_is_named_before_the_ranks_behind_it() {
    for (shape, regime) in all_placements() {
        let all = clean_message_count(shape, regime, 3, 3);
        // The waits for the rank end before it counts as silent in one case, and after it in the
        // other.
        for (n, who, ready_s) in (0..all).flat_map(|n| [(n, 1, 2), (n, 2, 2), (n, 1, 30), (n, 2, 30)]) {
            let mut config = leader_config(shape, 3, regime);
            config.limits.ready_ns = ready_s * 1_000_000_000;
            config.limits.done_floor_ns = config.limits.ready_ns;
            let limits = config.limits.clone();
            let mut net = Net::with_configs(shape, config, regime, 3, |r| WorkerConfig {
                limits: limits.clone(),
                ..worker_config(shape, r, regime)
            });
            net.freeze = Some((n, who));
            match net.run(60) {
                Some(f) => {
                    assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(who)), "{shape:?} {n}: {f}");
                }
                None => assert!(n + 8 > all, "rank {who} stopped at message {n} of {all} without a failure"),
            }
        }
    }
}

#[test]
fn a_leader_that_dies_at_any_message_ends_every_rank() {
    for regime in BOTH {
        for n in 0..clean_message_count(LeaderPlacement::Outside, regime, 3, 3) {
            let mut net = Net::with_placement(LeaderPlacement::Outside, 3, regime, 3);
            net.kill = Some((n, 0));
            net.run(10);
            assert!(net.now_ns < 1_000_000_000, "{n}: {}", net.now_ns);
            for (r, rank) in &net.ranks {
                let outcome = rank.outcome.as_ref().expect("it ended");
                assert!(outcome.as_ref().is_none_or(|f| f.rank == Some(0)), "{n}: rank {r}: {outcome:?}");
            }
        }
    }
}

// proves: S-05
#[test]
fn every_rank_detects_a_stopped_leader() {
    for shape in [LeaderPlacement::InMesh, LeaderPlacement::Outside] {
        let mut net = Net::with_placement(shape, 3, CacheRegime::Resident, 50);
        net.deliver = false;
        assert_eq!(net.run_for(2), None, "it waits for its consumer");
        net.leader_frozen = true;
        net.resume(60);
        assert!(net.now_ns <= 5_500_000_000, "{}", net.now_ns);
        for rank in net.ranks.values() {
            let f = rank.outcome.clone().flatten().expect("a failure");
            assert_eq!((f.class, f.rank, f.code.as_str()), (FailureClass::Stall, Some(0), "T0743"), "{f}");
        }
        // A leader that continues reads the reason before it sees its peers' sockets close.
        let names_leader = |m: &Message| matches!(m, Message::Fault(f) if f.failure.rank == Some(0));
        assert!(net.trace.iter().any(|(way, m)| *way == Hop::From(1) && names_leader(m)), "no report");
    }
}

#[test]
fn a_rank_names_its_upstream_rank() {
    let end = |actions: Vec<Action>| {
        let ends = actions.into_iter().find_map(|a| if let Action::Exit(end) = a { end } else { None });
        ends.expect("a failure")
    };
    for (shape, rank, above, who) in [
        (LeaderPlacement::InMesh, 2, 0, "the leader"),
        (LeaderPlacement::Outside, 1, 0, "the leader"),
        (LeaderPlacement::Outside, 2, 1, "the mesh leader"),
    ] {
        let config = worker_config(shape, rank, CacheRegime::Resident);
        let hello_ns = config.limits.hello_ns;
        let mut worker = Worker::new(config.clone()).expect("legal");
        let f = end(worker.handle_event(1, Event::UpstreamGone("its socket closed".into())));
        assert_eq!((f.class, f.rank), (FailureClass::RankDied, Some(above)), "{f}");
        assert!(f.text.starts_with(&format!("{who} is gone")), "{f}");
        let mut worker = Worker::new(config).expect("legal");
        let mut silent = (0..).map(|n| n * 200_000_000).flat_map(|now_ns| {
            assert!(now_ns < 2 * hello_ns, "it waits forever");
            worker.handle_event(now_ns, Event::Tick { progress: 0 })
        });
        let f = end(silent.find(|a| matches!(a, Action::Exit(_))).into_iter().collect());
        assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(above)), "{f}");
        assert!(f.text.contains(&format!("no message from {who} for")), "{f}");
    }
}

#[test]
fn a_rank_whose_engine_was_aborted_waits_for_the_cause() {
    let config = worker_config(LeaderPlacement::InMesh, 1, CacheRegime::Resident);
    let blame_ns = config.limits.blame_ns;
    let aborted_worker = || {
        let mut worker = Worker::new(config.clone()).expect("legal");
        let aborted = EngineFault::peer_abort("member 0 disconnected");
        let actions = worker.handle_event(1, Event::CallEnded(Box::new(Err(aborted))));
        let reports = |a: &Action| matches!(a, Action::Send(Message::Fault(f)) if f.secondary);
        assert!(actions.iter().any(reports), "{actions:?}");
        assert!(!worker.has_ended(), "{actions:?}");
        worker
    };
    let end = |actions: Vec<Action>| {
        actions.into_iter().find_map(|a| if let Action::Exit(end) = a { end } else { None })
    };
    let mut worker = aborted_worker();
    let f = end(worker.handle_event(2, Event::UpstreamGone("its socket closed".into()))).expect("a failure");
    assert_eq!((f.code.as_str(), f.rank), ("T0742", Some(0)), "{f}");
    // Without a cause the wait ends, but not before the leader's.
    let mut worker = aborted_worker();
    assert_eq!(end(worker.handle_event(1 + blame_ns, Event::Tick { progress: 0 })), None);
    let ticks = (4..).map(|n| 1 + n * blame_ns / 4).take(8);
    let ends: Vec<_> =
        ticks.filter_map(|at| end(worker.handle_event(at, Event::Tick { progress: 0 }))).collect();
    assert_eq!(ends.iter().map(|f| f.code.as_str()).collect::<Vec<_>>(), ["T0745"]);
    assert_eq!(ends[0].rank, None, "a rank that lost a link is not the cause");
}

/// Drops every message on a rank's control link, starting with message number `from`.
fn cut_link(shape: LeaderPlacement, rank: u32, from: u64) -> support::net::Tamper {
    Box::new(move |way, n, m| {
        let on_link = match way {
            Hop::To(r) | Hop::From(r) => r == rank,
            Hop::Relay(_) => shape == LeaderPlacement::Outside && rank == 1,
        };
        if n >= from && on_link { Vec::new() } else { vec![m] }
    })
}

#[test]
fn a_link_that_is_cut_ends_both_sides_and_names_the_far_one() {
    for (shape, who) in
        [(LeaderPlacement::InMesh, 2), (LeaderPlacement::Outside, 1), (LeaderPlacement::Outside, 3)]
    {
        let all = clean_message_count(shape, CacheRegime::Resident, 3, 3);
        for n in (0..all).step_by(5) {
            let mut net = Net::with_placement(shape, 3, CacheRegime::Resident, 3);
            net.tamper = cut_link(shape, who, n);
            let failure = net.run(20);
            assert!(net.now_ns < 9_000_000_000, "{shape:?} {who} {n}: {}", net.now_ns);
            let Some(f) = failure else {
                assert!(n + 12 > all, "message {n} of {all}");
                continue;
            };
            assert_eq!(f.rank, Some(who), "{shape:?} {who} {n}: {f}");
            assert!(net.ranks.values().all(|r| r.outcome.is_some()));
        }
    }
}

// proves: S-12
#[test]
fn a_clock_jump_and_a_host_sleep_end_no_run() {
    for shape in [LeaderPlacement::InMesh, LeaderPlacement::Outside] {
        let mut net = Net::with_placement(shape, 3, CacheRegime::Resident, 9);
        net.deliver = false;
        for _ in 0..20 {
            let until = net.now_ns / 1_000_000_000 + 1;
            assert_eq!(net.run_until(until), None);
            net.now_ns += 3_600_000_000_000;
        }
        net.deliver = true;
        assert_eq!(net.resume(u64::MAX / 1_000_000_000), None);
        assert_eq!(net.delivered.len(), 9);
    }
}

// proves: S-01
#[test]
fn a_stop_at_any_message_ends_cleanly_at_a_chunk_boundary() {
    for (shape, regime) in all_placements() {
        for n in 0..clean_message_count(shape, regime, 2, 4) {
            let mut net = Net::with_placement(shape, 2, regime, 4);
            net.inject.insert(n, tessera_runtime::leader::Event::Stop);
            net.run_clean();
            assert!(net.now_ns < 5_000_000_000);
            assert_eq!(net.delivered.len(), net.records.len(), "every finished chunk is delivered");
        }
    }
}

#[test]
fn the_end_of_the_launcher_ends_every_rank() {
    for shape in [LeaderPlacement::InMesh, LeaderPlacement::Outside] {
        for n in 0..clean_message_count(shape, CacheRegime::Resident, 2, 3) {
            let mut net = Net::with_placement(shape, 2, CacheRegime::Resident, 3);
            net.launcher_gone_at = Some(n);
            let failure = net.run(10).expect("a failure");
            assert_eq!(failure.class, FailureClass::LauncherGone);
            assert!(net.now_ns < 1_000_000_000);
        }
    }
}

#[test]
fn a_stuck_engine_and_a_frozen_process_are_stalls_of_the_right_rank() {
    for shape in [LeaderPlacement::InMesh, LeaderPlacement::Outside] {
        for who in [1, 2] {
            let mut net = Net::with_placement(shape, 3, CacheRegime::Resident, 4);
            net.stuck.insert((who, 3));
            let failure = run_to_failure(&mut net);
            assert_eq!((failure.class, failure.rank), (FailureClass::Stall, Some(who)));
            assert!(failure.text.contains(&format!("rank {who} made no progress")), "{failure}");
            assert!(net.now_ns < 7_000_000_000, "{}", net.now_ns);
            assert!(net.lost.iter().any(|(id, ready, done)| *id == 3 && ready.len() == 3 && done.len() == 2));

            let mut net = Net::with_placement(shape, 3, CacheRegime::Resident, 4);
            net.frozen.insert((who, 3));
            let failure = net.run(30).expect("a failure");
            assert_eq!(
                (failure.class, failure.rank),
                (FailureClass::Stall, Some(who)),
                "{shape:?} {failure}"
            );
            assert!(net.now_ns < 4_000_000_000, "{}", net.now_ns);
        }
    }
}

// proves: S-03, S-13
#[test]
fn a_secondary_failure_is_never_reported_as_the_cause() {
    // Rank 1 only learns that another rank aborted, and reports it before rank 2 can report the
    // cause.
    let mut net = Net::new(3, CacheRegime::Resident, 4);
    net.rank(1).engine.bug = Bug::PeerAbortAt(2);
    net.rank(2).engine.bug = Bug::FailAt(2);
    let failure = run_to_failure(&mut net);
    assert_eq!((failure.class, failure.rank), (FailureClass::Engine, Some(2)));
    // Without another failure the secondary one is reported, and names no rank: if only a data link is
    // lost, the rank that noticed is no more at fault than the other end.
    let mut net = Net::new(3, CacheRegime::Resident, 4);
    net.rank(1).engine.bug = Bug::PeerAbortAt(2);
    let failure = run_to_failure(&mut net);
    assert_eq!((failure.code.as_str(), failure.rank), ("T0745", None));
}

// proves: D-20
#[test]
fn values_that_a_collective_made_not_finite_on_all_ranks_blame_none() {
    let blamed = |ranks: &[u32]| {
        let mut net = Net::new(3, CacheRegime::Resident, 4);
        ranks.iter().for_each(|r| net.rank(*r).engine.bug = Bug::NotFiniteAt(2));
        let failure = run_to_failure(&mut net);
        assert_eq!(failure.code, "T0771");
        failure.rank
    };
    assert_eq!(blamed(&[1]), Some(1));
    assert_eq!(blamed(&[1, 2]), None);
}

fn tamper_envelope(
    rank: u32,
    call: u64,
    change: impl Fn(&mut tessera_runtime::wire::Envelope) + 'static,
) -> support::net::Tamper {
    Box::new(move |way, _, m| match m {
        Message::Envelope(mut e) if way == Hop::To(rank) && e.header.call_id == call => {
            change(&mut e);
            vec![Message::Envelope(e)]
        }
        m => vec![m],
    })
}

// proves: R-12
#[test]
fn a_rank_with_a_changed_message_refuses_or_is_detected_before_the_call_runs() {
    type Change = Box<dyn Fn(&mut tessera_runtime::wire::Envelope)>;
    let cases: Vec<(&str, FailureClass, &str, Change)> = vec![
        (
            "T0731",
            FailureClass::Parity,
            "plan digest",
            Box::new(|e| e.header.plan = Digest::hash_bytes(b"another")),
        ),
        ("T0731", FailureClass::Parity, "session", Box::new(|e| e.header.session += 1)),
        ("T0730", FailureClass::Protocol, "repeated or earlier call_id", Box::new(|e| e.header.call_id = 2)),
        ("T0730", FailureClass::Protocol, "call_id", Box::new(|e| e.header.call_id = 9)),
        ("T0712", FailureClass::Drift, "cache_epoch", Box::new(|e| e.header.cache_epoch = 1)),
        ("T0712", FailureClass::Drift, "chunk", Box::new(|e| e.header.chunk = 0)),
        ("T0733", FailureClass::Protocol, "WARMUP", Box::new(|e| e.header.action = CallAction::Warmup)),
        ("T0701", FailureClass::Protocol, "version", Box::new(|e| e.header.version += 1)),
    ];
    for (code, class, says, change) in cases {
        let mut net = Net::new(3, CacheRegime::Resident, 4);
        net.tamper = tamper_envelope(2, 3, change);
        let failure = run_to_failure(&mut net);
        assert_eq!((failure.code.as_str(), failure.class, failure.rank), (code, class, Some(2)), "{failure}");
        assert!(failure.text.contains(says), "{failure}");
        assert!(net.ranks.values().all(|r| !r.runs.contains_key(&3)), "no rank ran the call");
    }
    // A change that is legal in itself is found by the digest of the arrived inputs.
    let mut net = Net::new(3, CacheRegime::Recompute, 4);
    net.tamper = Box::new(|way, _, m| match m {
        Message::Context(mut c) if way == Hop::To(1) => {
            c.tensors.0 = vec![context_tensor(&Tensor::from_f32("x", &[4], &[9.0; 4]).expect("fits"))];
            vec![Message::Context(c)]
        }
        m => vec![m],
    });
    let failure = run_to_failure(&mut net);
    assert_eq!((failure.class, failure.rank), (FailureClass::Drift, Some(1)));
    assert!(failure.text.contains("inputs of rank 1"), "{failure}");
    assert!(net.ranks.values().all(|r| !r.runs.contains_key(&3)));
}

// proves: D-04
#[test]
fn what_a_rank_reports_is_compared_with_the_plan_and_with_its_peers() {
    type Change = fn(&mut tessera_runtime::wire::CallObservation);
    let cases: [(&str, Change); 5] = [
        ("generator calls: planned 3, observed 4", |o| o.generator_calls += 1),
        ("collectives: planned", |o| o.collectives += 1),
        ("trace: planned", |o| o.trace = Digest::default()),
        ("cache state: planned", |o| o.state = Digest::default()),
        ("output differs: ranks [", |o| o.output = Digest::default()),
    ];
    for (says, change) in cases {
        let mut net = Net::new(3, CacheRegime::Resident, 3);
        net.tamper = Box::new(move |way, _, m| match m {
            Message::Done(mut d) if way == Hop::From(1) && d.call_id == 3 => {
                change(&mut d.observed);
                vec![Message::Done(d)]
            }
            m => vec![m],
        });
        let failure = run_to_failure(&mut net);
        assert_eq!((failure.class, failure.rank), (FailureClass::Drift, Some(1)), "{failure}");
        assert!(failure.text.contains(says), "{failure}");
        assert_eq!(net.delivered.len(), 1, "no output of the chunk is delivered");
    }
}

// proves: C-13
#[test]
fn a_second_run_of_a_call_and_a_message_of_the_wrong_role_are_refused() {
    let mut net = Net::new(2, CacheRegime::Resident, 4);
    net.tamper = Box::new(|way, _, m| match m {
        Message::Commit(c) if way == Hop::To(1) && c.call_id == 3 => {
            vec![Message::Commit(Commit { call_id: 2 })]
        }
        m => vec![m],
    });
    let failure = run_to_failure(&mut net);
    assert_eq!((failure.code.as_str(), failure.rank), ("T0746", Some(1)));

    let mut net = Net::new(2, CacheRegime::Resident, 4);
    net.tamper = Box::new(|way, _, m| match m {
        Message::Ready(r) if way == Hop::From(1) => vec![Message::Commit(Commit { call_id: r.call_id })],
        m => vec![m],
    });
    let failure = run_to_failure(&mut net);
    assert_eq!(
        (failure.code.as_str(), failure.class, failure.rank),
        ("T0707", FailureClass::Protocol, Some(1))
    );

    let mut net = Net::new(2, CacheRegime::Resident, 4);
    net.tamper = Box::new(|way, _, m| match m {
        Message::Commit(_) if way == Hop::To(1) => vec![Message::Finished],
        m => vec![m],
    });
    assert_eq!(run_to_failure(&mut net).code, "T0707");
}

#[test]
fn a_call_that_the_leader_refuses_is_never_sent() {
    for bad in [
        Request { request: NEXT, text: None },
        Request { request: FIRST, text: None },
        Request { request: FIRST, text: Some(Tensor::from_f32("text", &[5], &[0.0; 5]).expect("fits")) },
        Request {
            request: FIRST,
            text: Some(context_tensor(&Tensor::from_f32("x", &[4], &[0.0; 4]).expect("fits"))),
        },
    ] {
        let mut net = Net::new(2, CacheRegime::Resident, 1);
        net.requests[0] = bad;
        let failure = run_to_failure(&mut net);
        assert_eq!((failure.class, failure.rank), (FailureClass::Preflight, None), "{failure}");
        let sent = |m: &Message| matches!(m, Message::Envelope(e) if e.header.action == CallAction::Infer);
        assert!(!net.trace.iter().any(|(_, m)| sent(m)));
    }
}

#[test]
fn a_rank_with_another_build_or_plan_never_starts() {
    for (says, key) in [("`build`", 0), ("`plan digest`", 1), ("`backend.matmul`", 2)] {
        let config = leader_config(LeaderPlacement::InMesh, 3, CacheRegime::Resident);
        let mut net = Net::with_configs(LeaderPlacement::InMesh, config, CacheRegime::Resident, 2, |r| {
            let mut w = worker_config(LeaderPlacement::InMesh, r, CacheRegime::Resident);
            match (r, key) {
                (2, 0) => w.build = "another".into(),
                (2, 1) => w.plan = Digest::hash_bytes(b"another"),
                (2, 2) => w.parity = w.parity.with_key("backend.matmul", ParityClass::AtInit, "fast"),
                _ => {}
            }
            w
        });
        let failure = run_to_failure(&mut net);
        assert_eq!((failure.class, failure.rank), (FailureClass::Parity, Some(2)), "{failure}");
        assert!(failure.text.contains(says), "{failure}");
        assert!(!net.trace.iter().any(|(_, m)| matches!(m, Message::Envelope(_))));
    }
}

// proves: O-02, O-03
#[test]
fn a_slow_consumer_blocks_the_producer_at_the_bound() {
    let mut net = Net::new(2, CacheRegime::Resident, 10);
    net.deliver = false;
    assert_eq!(net.run_for(20), None, "the stream waits for its consumer");
    assert_eq!((net.max_undelivered, net.records.len()), (2, 2));
    assert!(net.leader.request_capacity() == 0, "and accepts no further requests");
    net.deliver = true;
    assert_eq!(net.resume(60), None);
    assert_eq!(net.delivered.len(), 10);
    assert_eq!(net.max_undelivered, 2);
}

#[test]
fn a_configuration_without_bounds_is_refused() {
    for limits in [
        Limits { d_in: 0, ..Limits::default() },
        Limits { d_out: u32::MAX, ..Limits::default() },
        Limits { max_outstanding: 0, ..Limits::default() },
    ] {
        let mut config = leader_config(LeaderPlacement::InMesh, 2, CacheRegime::Resident);
        config.limits = limits;
        assert_eq!(Leader::new(config).expect_err("refused")[0].code.id, "T0741");
    }
}

#[test]
fn a_phase_that_is_not_in_the_seal_is_refused_by_name() {
    let mut net = Net::new(2, CacheRegime::Resident, 3);
    net.tamper = tamper_envelope(1, 3, |e| {
        if let Some(m) = &mut e.meta {
            m.phases[0] = PhaseCall::new("renoize", vec![]);
        }
    });
    let failure = run_to_failure(&mut net);
    assert_eq!((failure.code.as_str(), failure.rank), ("T0722", Some(1)));
    assert!(failure.text.contains("`renoise`"), "{failure}");
}

/// A cheap deterministic random number generator.
fn random_numbers(seed: u64) -> impl FnMut(u64) -> u64 {
    let mut x = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    move |n| {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        (x >> 33) % n
    }
}

#[test]
fn any_message_faults_end_every_rank_and_only_agreed_calls_run() {
    for seed in 0..400 {
        let mut roll = random_numbers(seed);
        let shape = [LeaderPlacement::InMesh, LeaderPlacement::Outside][roll(2) as usize];
        let mut net = Net::with_placement(shape, 2 + roll(3) as u32, BOTH[roll(2) as usize], 6);
        let rare = 10 + roll(60);
        let mut held: Vec<(Hop, Message)> = Vec::new();
        net.tamper = Box::new(move |way, _, m| {
            let late = held.iter().position(|(w, _)| *w == way).map(|i| held.remove(i).1);
            let mut out = match roll(rare) {
                0 => Vec::new(),
                1 => vec![m.clone(), m],
                2 => {
                    held.push((way, m));
                    Vec::new()
                }
                _ => vec![m],
            };
            out.extend(late);
            out
        });
        let failure = net.run(40);
        let ranks = net.ranks.len();
        let mut ready = std::collections::BTreeMap::<u64, std::collections::BTreeSet<u32>>::new();
        for (way, m) in &net.trace {
            match (way, m) {
                (Hop::From(r) | Hop::Relay(r), Message::Ready(m)) => {
                    ready.entry(m.call_id).or_default().insert(*r);
                }
                (_, Message::Commit(c)) => assert_eq!(ready[&c.call_id].len(), ranks, "seed {seed}"),
                _ => {}
            }
        }
        assert!(net.ranks.values().all(|r| r.runs.values().all(|n| *n == 1)), "seed {seed}");
        let chunks: Vec<u32> = net.delivered.iter().map(|(k, _)| *k).collect();
        assert_eq!(chunks, (0..chunks.len() as u32).collect::<Vec<_>>(), "seed {seed}");
        assert!(failure.is_some() || chunks.len() == 6, "seed {seed}: {chunks:?}");
    }
}
