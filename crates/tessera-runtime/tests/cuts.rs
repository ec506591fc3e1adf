//! Tests of hard cuts, calls without a chunk, weight reloads between two calls, and time limits.

mod support;

use support::net::{FIRST, NEXT, Net, Request};
use support::{Bug, LeaderPlacement, leader_config, prompt_tensor, weights_at, worker_config};
use tessera_runtime::director::{ChunkRequest, SceneCut};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::leader;
use tessera_runtime::wire::{CallAction, CallMeta, Message, Reload, Tensor};
use tessera_runtime::{FailureClass, Tripwires};

const BOTH: [LeaderPlacement; 2] = [LeaderPlacement::InMesh, LeaderPlacement::Outside];
const FLUSH: ChunkRequest = ChunkRequest { cut: SceneCut::Flush, ..NEXT };

fn chunk_ids(delivered: &[(u32, Tensor)]) -> Vec<u32> {
    delivered.iter().map(|(k, _)| *k).collect()
}

fn clean_message_count(shape: LeaderPlacement, regime: CacheRegime, chunks: u32) -> u64 {
    let mut net = Net::with_placement(shape, 2, regime, chunks);
    net.run_clean();
    net.carried
}

// proves: O-06, O-11, R-05, R-06
#[test]
fn after_a_flush_no_chunk_of_an_older_epoch_is_delivered_and_every_dropped_request_is_recorded() {
    for (shape, regime) in
        BOTH.into_iter().flat_map(|s| [(s, CacheRegime::Resident), (s, CacheRegime::Recompute)])
    {
        let mut kinds = [0; 3];
        for n in 0..clean_message_count(shape, regime, 6) {
            for held in [false, true] {
                let mut net = Net::with_placement(shape, 2, regime, 6);
                let request = FLUSH;
                net.inject.insert(
                    n,
                    leader::Event::Request { request, text: None, start: leader::ChunkStart::Drawn },
                );
                net.deliver = !held;
                if held {
                    // Finished chunks wait for the media pipeline, then the cut comes, then the
                    // pipeline continues.
                    net.run_for(1);
                    net.deliver = true;
                    assert_eq!(net.resume(60), None);
                } else {
                    assert_eq!(net.run(60), None, "{shape:?} {regime:?} {n}");
                }
                let cut =
                    net.records.iter().find(|r| r.plan.meta.as_ref().is_some_and(CallMeta::resets_caches));
                let Some(cut) = cut else {
                    // The stop came first, so no request followed it.
                    assert!(net.dropped.is_empty());
                    continue;
                };
                let epoch = cut.plan.cache_epoch;
                assert_eq!(epoch, 1);
                // Only chunks of the older epoch that were delivered before the cut took effect.
                let taken = net.delivered_at_cut.expect("a fence");
                assert!(net.delivered[taken..].iter().all(|(k, _)| *k >= cut.plan.chunk), "{n}");
                // Each request is either delivered or recorded as dropped, exactly once.
                let given: Vec<u64> = net.dropped.iter().map(|(r, ..)| *r).collect();
                let mut all: Vec<u64> = net
                    .records
                    .iter()
                    .filter(|r| net.delivered.iter().any(|(k, _)| *k == r.plan.chunk))
                    .filter_map(|r| r.request)
                    .chain(given)
                    .collect();
                all.sort_unstable();
                assert_eq!(all, (0..7).collect::<Vec<u64>>(), "{shape:?} {regime:?} {n} {held}");
                assert!(net.dropped.iter().all(|(_, _, e)| *e == 0));
                kinds[0] += net.dropped.iter().filter(|(_, chunk, _)| chunk.is_none()).count();
                kinds[1] += net.records.iter().filter(|r| r.discarded).count();
                kinds[2] += net.dropped.len();
                // The stream continues in a new scene, and chunk ids only grow.
                assert!(chunk_ids(&net.delivered).is_sorted_by(|a, b| a < b));
                assert!(net.max_undelivered <= 2);
            }
        }
        assert!(kinds[0] > 0 && kinds[1] > 0, "before and while being computed: {kinds:?}");
        assert!(kinds[2] > kinds[0] + kinds[1], "and while waiting for delivery: {kinds:?}");
    }
}

#[test]
fn the_prompt_of_a_dropped_request_applies_to_the_flush() {
    let mut net = Net::new(2, CacheRegime::Resident, 1);
    net.requests.clear();
    // The ranks have not sent their hello, so the first request still waits.
    net.inject.insert(
        0,
        leader::Event::Request {
            request: FIRST,
            text: Some(prompt_tensor(5)),
            start: leader::ChunkStart::Drawn,
        },
    );
    net.inject
        .insert(1, leader::Event::Request { request: FLUSH, text: None, start: leader::ChunkStart::Drawn });
    net.inject.insert(2, leader::Event::NoMoreRequests);
    net.hold_requests = true;
    assert_eq!(net.run(60), None);
    assert_eq!((net.dropped.as_slice(), chunk_ids(&net.delivered)), (&[(0, None, 0)][..], vec![0]));
    let sent = net.trace.iter().find_map(|(_, m)| match m {
        Message::Envelope(e) if e.header.action == CallAction::Infer => e.tensors.get("text").cloned(),
        _ => None,
    });
    assert_eq!(sent, Some(prompt_tensor(5)));
}

#[test]
fn a_noop_reaches_every_rank_and_a_reset_is_a_cut_without_a_chunk() {
    for shape in BOTH {
        let regime = CacheRegime::Recompute;
        let mut net = Net::with_placement(shape, 2, regime, 8);
        net.inject.insert(20, leader::Event::Control(CallAction::Noop));
        net.inject.insert(21, leader::Event::Control(CallAction::Reset));
        net.run_clean();
        let actions: Vec<CallAction> = net.controls.iter().map(|c| c.plan.action).collect();
        assert_eq!(actions, [CallAction::Warmup, CallAction::Noop, CallAction::Reset]);
        assert!(net.controls.iter().all(|c| c.observed.len() == 2));
        assert_eq!(chunk_ids(&net.delivered), [0, 1, 2, 3, 4, 5, 6, 7]);
        let last = net.records.last().expect("eight");
        assert_eq!(last.plan.cache_epoch, 1);
        let opens: Vec<u32> =
            net.records.iter().filter(|r| r.plan.opens_scene).map(|r| r.plan.chunk).collect();
        assert_eq!((opens.len(), opens[0]), (2, 0));
        // The context request tells whether the previous chunk opened its scene; the first chunk of
        // a scene has no context.
        let scenes: Vec<(u32, bool)> =
            (1..8).filter(|k| !opens.contains(k)).map(|k| (k, opens.contains(&(k - 1)))).collect();
        assert_eq!(net.scenes, scenes);
        for bad in [CallAction::Infer, CallAction::Shutdown, CallAction::Warmup, CallAction::Reload] {
            let mut net = Net::with_placement(shape, 2, regime, 4);
            net.inject.insert(20, leader::Event::Control(bad));
            assert_eq!(net.run(10).expect("a failure").code, "T0707");
        }
    }
}

// proves: D-07
#[test]
fn a_reload_waits_for_open_calls_runs_alone_and_bumps_the_epoch() {
    for (shape, regime) in
        BOTH.into_iter().flat_map(|s| [(s, CacheRegime::Resident), (s, CacheRegime::Recompute)])
    {
        for n in 0..clean_message_count(shape, regime, 4) {
            let mut net = Net::with_placement(shape, 2, regime, 4);
            let (source, weights) = ("other".to_string(), weights_at("other"));
            net.inject.insert(n, leader::Event::Reload(Reload { source, weights }));
            assert_eq!(net.run(60), None, "{shape:?} {regime:?} {n}");
            assert_eq!(chunk_ids(&net.delivered), [0, 1, 2, 3]);
            let Some(reload) = net.controls.iter().find(|c| c.plan.action == CallAction::Reload) else {
                continue; // the shutdown was on its way
            };
            assert_eq!(reload.plan.cache_epoch, 1);
            assert!(reload.observed.values().all(|o| o.weights == weights));
            let mut open = 0;
            for (_, m) in net.trace.iter().filter(|(way, _)| match shape {
                LeaderPlacement::InMesh => true,
                LeaderPlacement::Outside => !matches!(way, support::net::Hop::Relay(_)),
            }) {
                match m {
                    Message::Envelope(e) if e.header.action == CallAction::Infer => open += 1,
                    Message::Done(d) if !d.output.0.is_empty() || d.observed.generator_calls > 0 => {
                        open -= i32::from(d.fingerprints.is_empty() && d.observed.new_programs == 0);
                    }
                    Message::Envelope(e) if e.header.action == CallAction::Reload => {
                        assert_eq!(open, 0, "{n}: other calls are open");
                    }
                    _ => {}
                }
            }
        }
    }
}

// proves: S-04
#[test]
fn a_slow_phase_with_progress_survives_and_one_without_fails_in_time() {
    for shape in BOTH {
        // A minute inside one phase with progress every second, more than twenty times the
        // durations seen before.
        let mut net = Net::with_placement(shape, 2, CacheRegime::Resident, 4);
        net.slow.insert((1, 4), (1200, 20));
        assert_eq!(net.run(120), None);
        assert!(net.now_ns >= 60_000_000_000);
        // The same without progress.
        let mut net = Net::with_placement(shape, 2, CacheRegime::Resident, 4);
        net.slow.insert((1, 4), (1200, 5000));
        let f = net.run(120).expect("a failure");
        assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(1)), "{f}");
        assert!(net.now_ns < 6_000_000_000, "{}", net.now_ns);
    }
}

#[test]
fn a_rank_that_waited_for_a_slow_one_has_time_to_finish_after_it() {
    for shape in BOTH {
        // Rank 1 works for ten seconds and reports progress; rank 2 waits for it in a collective
        // and ends a moment later.
        let mut net = Net::with_placement(shape, 3, CacheRegime::Resident, 4);
        net.slow.insert((1, 4), (200, 20));
        net.slow.insert((2, 4), (203, 5000));
        assert_eq!(net.run(120), None);
    }
}

#[test]
fn limits_are_learned_from_the_program_that_was_slow() {
    // Gaps of 2 s in one program allow 7 s in that program, but not in others.
    let mut net = Net::new(2, CacheRegime::Resident, 4);
    net.slow.insert((1, 3), (200, 40));
    net.slow.insert((1, 4), (140, 5000));
    assert_eq!(net.run(120), None);
    let mut net = Net::new(2, CacheRegime::Resident, 4);
    net.slow.insert((1, 4), (140, 5000));
    assert_eq!(net.run(120).map(|f| f.class), Some(FailureClass::Stall));
}

// proves: O-12
#[test]
fn a_call_is_recorded_with_its_instants_in_order() {
    let mut net = Net::new(2, CacheRegime::Resident, 3);
    net.slow.insert((1, 3), (10, 1));
    net.run_clean();
    for r in net.records.iter().chain(&net.controls) {
        let order = [r.decided_ns, r.ready_ns, r.committed_ns, r.done_ns];
        assert!(order.is_sorted(), "{order:?}");
    }
    let slow = &net.records[1];
    assert_eq!(slow.done_ns - slow.committed_ns, 500_000_000);
    let next = &net.records[2];
    assert!(
        next.ready_ns < slow.done_ns && next.committed_ns == slow.done_ns,
        "it was prepared in the meantime"
    );
}

#[test]
fn nothing_grows_over_ten_thousand_chunks() {
    let short = run_chunks(1_000);
    let net = run_chunks(10_000);
    assert_eq!(net.delivered.len(), 10_000);
    assert_eq!(net.records.last().map(|r| r.plan.cache_epoch), Some(99));
    assert!(net.max_undelivered <= 2);
    // All that the state machines hold, as text. Longer runs have longer numbers and nothing else.
    let state_bytes = |net: &Net| {
        let ranks: usize = net.ranks.values().map(|r| format!("{:?}", r.machine).len()).sum();
        format!("{:?}", net.leader).len() + ranks
    };
    let (before, after) = (state_bytes(&short), state_bytes(&net));
    assert!(after < before + before / 20, "{before} bytes after 1,000 chunks, {after} after 10,000");
}

/// Streams this many chunks on two ranks, with a cut every hundred chunks.
fn run_chunks(chunks: u32) -> Net {
    let mut net = Net::new(2, CacheRegime::Resident, 0);
    net.requests.push_back(Request { request: FIRST, text: Some(prompt_tensor(1)) });
    net.requests.extend((1..chunks).map(|k| {
        let cut = if k % 100 == 0 { SceneCut::Ordered } else { SceneCut::None };
        Request { request: ChunkRequest { cut, ..NEXT }, text: None }
    }));
    net.keep_trace = false;
    net.run_clean();
    net
}

#[test]
fn a_deviation_that_a_disabled_check_misses_is_found_by_the_next_check() {
    // A rank issues one extra collective and its own check is disabled; the leader compares the
    // counts.
    let off = Tripwires::disabling(["T0747"]);
    let mut config = leader_config(LeaderPlacement::InMesh, 3, CacheRegime::Resident);
    config.tripwires = off.clone();
    let mut net = Net::with_configs(LeaderPlacement::InMesh, config, CacheRegime::Resident, 3, |r| {
        let mut w = worker_config(LeaderPlacement::InMesh, r, CacheRegime::Resident);
        w.tripwires = off.clone();
        w
    });
    net.rank(1).engine.bug = Bug::ExtraCollective(4);
    let f = net.run(10).expect("a failure");
    assert_eq!((f.code.as_str(), f.rank), ("T0744", Some(1)), "{f}");
}
