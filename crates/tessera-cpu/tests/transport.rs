//! Collectives between threads, each with its own transport, and between processes, over shared
//! memory and over streams.

#![allow(clippy::unwrap_used)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the test starts itself again and passes open files on"
)]

mod support;

use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use support::{TransportKind, create_transports};
use tessera_cpu::arena::Arena;
use tessera_cpu::collectives::{
    all_gather, all_reduce, all_to_all, copy_from_member, fingerprint_collective, reduce_scatter,
};
use tessera_cpu::tcp::{PeerStream, TcpTransport};
use tessera_cpu::transport::{CommFault, CommLayout, MAX_MEMBERS, PeerAction, Transport, TransportError};
use tessera_mesh::Reduction;

/// Runs every property of the suite over both transports, each as a test of its own.
macro_rules! conformance {
    ($($property:ident),* $(,)?) => {
        mod memory {
            $(#[test] fn $property() { super::$property(super::TransportKind::Memory) })*
        }

        mod streams {
            $(#[test] fn $property() { super::$property(super::TransportKind::Streams) })*
        }
    };
}

conformance! {
    thousands_of_collectives_deliver_all_contributions,
    several_collectives_in_flight_collect_in_any_order,
    a_slow_reader_keeps_its_view,
    a_mismatch_names_the_peer,
    a_mismatch_takes_precedence_over_a_timeout,
    a_timeout_names_the_absent_members,
    a_timeout_names_the_members_that_did_not_read,
    an_abort_wakes_all_waits_and_persists,
    an_oversized_contribution_is_rejected,
    invalid_layouts_and_indices_are_rejected,
}

fn layout(members: usize, slots: usize) -> CommLayout {
    CommLayout { members, slots, slot_bytes: 4096 }
}

fn test_deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

/// Runs `f` once per member, each on its own thread with its own transport. The transports live
/// until every member has finished.
fn run_members<R: Send>(
    kind: TransportKind,
    layout: CommLayout,
    f: impl Fn(&mut dyn Transport) -> R + Sync,
) -> Vec<R> {
    let mut ends = create_transports(kind, layout);
    std::thread::scope(|s| {
        let f = &f;
        let threads: Vec<_> = ends.iter_mut().map(|e| s.spawn(move || f(&mut **e))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn thousands_of_collectives_deliver_all_contributions(kind: TransportKind) {
    let rounds = if kind == TransportKind::Memory { 10_000u32 } else { 2_500 };
    for members in [2, 4] {
        run_members(kind, layout(members, 4), |end| {
            let me = end.member_index();
            for s in 0..rounds {
                // Lengths differ by member and collective, so a stale slot would be visible.
                let len = |m: usize| (s as usize * 7 + m * 3) % 50;
                let value = |m: usize, i: usize| (s * 64) as f32 + (m * 50 + i) as f32 * 0.25;
                let mine: Vec<f32> = (0..len(me)).map(|i| value(me, i)).collect();
                end.publish_and_collect(u64::from(s), &mine, test_deadline(), &mut |views| {
                    assert_eq!(views.len(), members);
                    for (m, view) in views.iter().enumerate() {
                        assert_eq!(view.len(), len(m));
                        assert!(view.iter().enumerate().all(|(i, v)| *v == value(m, i)));
                    }
                })
                .unwrap();
            }
        });
    }
}

fn several_collectives_in_flight_collect_in_any_order(kind: TransportKind) {
    run_members(kind, layout(3, 3), |end| {
        let me = end.member_index() as f32;
        for round in 0..200 {
            let mut tickets: Vec<_> = (0..3)
                .map(|i| end.publish(i, &[me, i as f32, round as f32], test_deadline()).unwrap())
                .collect();
            if end.member_index() == 1 {
                tickets.reverse();
            }
            for t in tickets {
                let i = (t.sequence_number() % 3) as f32;
                let ok = |m: usize, v: &[f32]| v == [m as f32, i, round as f32];
                end.collect(t, test_deadline(), &mut |views| {
                    assert!(views.iter().enumerate().all(|(m, v)| ok(m, v)));
                })
                .unwrap();
            }
        }
    });
}

fn a_slow_reader_keeps_its_view(kind: TransportKind) {
    run_members(kind, layout(2, 2), |end| {
        for s in 0..40 {
            let data = [s as f32; 1000];
            let ticket = end.publish(1, &data, test_deadline()).unwrap();
            let slow = end.member_index() == 1 && s % 8 == 0;
            end.collect(ticket, test_deadline(), &mut |views| {
                if slow {
                    // The other member runs ahead meanwhile, as far as its slots allow.
                    std::thread::sleep(Duration::from_millis(20));
                }
                assert!(views.iter().all(|v| *v == data));
            })
            .unwrap();
        }
    });
}

fn a_mismatch_names_the_peer(kind: TransportKind) {
    let faults = run_members(kind, layout(3, 2), |end| {
        let mine = if end.member_index() == 2 { 20 } else { 10 };
        end.publish_and_collect(9, &[], test_deadline(), &mut |_| ()).unwrap();
        end.publish_and_collect(mine, &[], test_deadline(), &mut |_| ()).unwrap_err()
    });
    assert_eq!(faults[0], CommFault::Mismatch { peer: 2, mine: 10, theirs: 20, seq: 1 });
    assert_eq!(faults[2], CommFault::Mismatch { peer: 0, mine: 20, theirs: 10, seq: 1 });
}

fn a_mismatch_takes_precedence_over_a_timeout(kind: TransportKind) {
    let faults = run_members(kind, layout(3, 2), |end| match end.member_index() {
        0 => None,
        me => {
            let deadline = Instant::now() + Duration::from_millis(200);
            Some(end.publish_and_collect(me as u64, &[], deadline, &mut |_| ()).unwrap_err())
        }
    });
    assert_eq!(faults[1], Some(CommFault::Mismatch { peer: 2, mine: 1, theirs: 2, seq: 0 }));
}

fn a_timeout_names_the_absent_members(kind: TransportKind) {
    let begin = Instant::now();
    let faults = run_members(kind, layout(4, 2), |end| {
        let deadline = Instant::now() + Duration::from_millis(300);
        match end.member_index() {
            1 | 3 => None,
            _ => Some(end.publish_and_collect(1, &[1.0], deadline, &mut |_| ()).unwrap_err()),
        }
    });
    let missing = vec![1, 3];
    assert_eq!(faults[0], Some(CommFault::Timeout { missing, seq: 0, awaited: PeerAction::Publish }));
    assert!(begin.elapsed() < Duration::from_secs(5));
}

fn a_timeout_names_the_members_that_did_not_read(kind: TransportKind) {
    let faults = run_members(kind, layout(2, 2), |end| {
        let deadline = Instant::now() + Duration::from_millis(300);
        if end.member_index() == 1 {
            let _first = end.publish(1, &[], deadline).unwrap();
            let _second = end.publish(1, &[], deadline).unwrap();
            // This member's own fault, found at once.
            return end.publish(1, &[], deadline).unwrap_err();
        }
        for _ in 0..2 {
            end.publish_and_collect(1, &[], deadline, &mut |_| ()).unwrap();
        }
        end.publish(1, &[], deadline).unwrap_err()
    });
    assert_eq!(faults[0], CommFault::Timeout { missing: vec![1], seq: 2, awaited: PeerAction::Read });
    assert_eq!(faults[1], CommFault::InFlight { seq: 2, uncollected: 0 });
}

fn an_abort_wakes_all_waits_and_persists(kind: TransportKind) {
    let long = "é".repeat(200);
    let begin = Instant::now();
    let faults = run_members(kind, layout(4, 2), |end| {
        if end.member_index() == 3 {
            let abort = end.abort_fn();
            std::thread::scope(|s| {
                s.spawn(|| {
                    std::thread::sleep(Duration::from_millis(100));
                    abort(&long);
                    abort("later");
                });
            });
        }
        end.publish_and_collect(1, &[1.0], Instant::now() + Duration::from_secs(60), &mut |_| ())
    });
    for fault in &faults[..3] {
        assert_eq!(*fault, Err(CommFault::Aborted { by: 3, reason: "é".repeat(120) }));
    }
    assert!(begin.elapsed() < Duration::from_secs(5));
}

fn an_oversized_contribution_is_rejected(kind: TransportKind) {
    let mut members = create_transports(kind, layout(2, 1));
    let fault = members[0].publish(1, &[0.0; 1025], test_deadline()).unwrap_err();
    assert_eq!(fault, CommFault::TooLarge { seq: 0, bytes: 4100, slot_bytes: 4096 });
}

fn invalid_layouts_and_indices_are_rejected(kind: TransportKind) {
    for bad in [layout(0, 1), layout(MAX_MEMBERS + 1, 1), layout(2, 0), layout(2, usize::MAX / 4096)] {
        assert!(matches!(create_end(kind, bad, 0), Err(TransportError::InvalidLayout(l)) if l == bad));
    }
    let fault = create_end(kind, layout(1, 1), 1).unwrap_err();
    assert!(matches!(fault, TransportError::IndexTaken { index: 1, members: 1 }), "{fault}");
}

/// Creates the end of one member alone.
fn create_end(
    kind: TransportKind,
    layout: CommLayout,
    me: usize,
) -> Result<Box<dyn Transport>, TransportError> {
    Ok(match kind {
        TransportKind::Memory => Box::new(Arena::attach(Arena::create_memfd(layout)?, layout, me)?),
        TransportKind::Streams => Box::new(TcpTransport::new(layout, me, vec![None])?),
    })
}

#[test]
fn an_arena_rejects_a_taken_index_and_foreign_descriptors() {
    let l = layout(2, 1);
    let fd = Arena::create_memfd(l).unwrap();
    let _first = Arena::attach(&fd, l, 0).unwrap();
    assert!(matches!(Arena::attach(&fd, l, 0), Err(TransportError::IndexTaken { index: 0, members: 2 })));
    assert!(matches!(Arena::attach(&fd, l, 2), Err(TransportError::IndexTaken { .. })));
    assert!(matches!(Arena::attach(&fd, layout(3, 1), 1), Err(TransportError::LayoutMismatch { .. })));
    // The same size with other dimensions.
    let swapped = CommLayout { slot_bytes: 4095, ..l };
    assert!(matches!(Arena::attach(&fd, swapped, 1), Err(TransportError::LayoutMismatch { .. })));
    let plain = rustix::fs::memfd_create("plain", rustix::fs::MemfdFlags::CLOEXEC).unwrap();
    rustix::fs::ftruncate(&plain, rustix::fs::fstat(&fd).unwrap().st_size as u64).unwrap();
    let fault = Arena::attach(&plain, l, 1).unwrap_err();
    assert!(matches!(&fault, TransportError::LayoutMismatch { found, .. } if found.contains("not sealed")));
}

#[test]
fn two_processes_reduce() {
    const CHILD: &str = "TESSERA_TEST_PEER";
    let l = layout(2, 4);
    let run = |mut end: Box<dyn Transport>| {
        let me = end.member_index() as f32;
        let mut out = [0.0; 8];
        for s in 0..1000 {
            let data = [me + s as f32; 8];
            end.publish_and_collect(3, &data, test_deadline(), &mut |v| {
                all_reduce(&mut out, v, Reduction::Sum);
            })
            .unwrap();
            assert_eq!(out, [1.0 + 2.0 * s as f32; 8]);
        }
    };
    let child = |at: String| {
        std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "two_processes_reduce"])
            .env(CHILD, at)
            .stdout(std::process::Stdio::null())
            .spawn()
            .unwrap()
    };
    let over = |stream: TcpStream, me: usize| -> Box<dyn Transport> {
        stream.set_nodelay(true).unwrap();
        let mut wires: Vec<Option<Box<dyn PeerStream>>> = vec![None, None];
        wires[1 - me] = Some(Box::new(stream));
        Box::new(TcpTransport::new(l, me, wires).unwrap())
    };
    if let Ok(at) = std::env::var(CHILD) {
        return match at.parse::<SocketAddr>() {
            Ok(address) => run(over(TcpStream::connect(address).unwrap(), 1)),
            Err(_) => {
                let file = std::fs::File::options().read(true).write(true).open(at).unwrap();
                run(Box::new(Arena::attach(file, l, 1).unwrap()));
            }
        };
    }
    let fd = Arena::create_memfd(l).unwrap();
    let path = format!("/proc/{}/fd/{}", std::process::id(), rustix::fd::AsRawFd::as_raw_fd(&fd));
    let mut peer = child(path);
    run(Box::new(Arena::attach(&fd, l, 0).unwrap()));
    assert!(peer.wait().unwrap().success());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = child(listener.local_addr().unwrap().to_string());
    run(over(listener.accept().unwrap().0, 0));
    assert!(peer.wait().unwrap().success());
}

#[test]
fn reductions_have_a_fixed_order() {
    let views: Vec<Vec<f32>> = (0..8)
        .map(|m| (0..2500).map(|i| ((m * 7919 + i * 31) % 1009) as f32 * 0.37 - 99.1).collect())
        .collect();
    let views: Vec<&[f32]> = views.iter().map(Vec::as_slice).collect();
    let (mut rank, mut tree) = (vec![0.0; 2500], vec![0.0; 2500]);
    all_reduce(&mut rank, &views, Reduction::Sum);
    all_reduce(&mut tree, &views, Reduction::Tree);
    for i in 0..2500 {
        let v: Vec<f32> = views.iter().map(|x| x[i]).collect();
        assert_eq!(rank[i], v.iter().skip(1).fold(v[0], |a, b| a + b));
        assert_eq!(tree[i], ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])));
    }
    // Members that reduced their own subtree first get the same bits.
    let mut halves = [vec![0.0; 2500], vec![0.0; 2500]];
    for (half, views) in halves.iter_mut().zip(views.chunks(4)) {
        all_reduce(half, views, Reduction::Tree);
    }
    let mut joined = vec![0.0; 2500];
    all_reduce(&mut joined, &[&halves[0], &halves[1]], Reduction::Tree);
    assert_eq!(joined, tree);
    // Scattered parts are slices of the whole, along both dims.
    for (shape, dim, range) in [((25, 100), 0, 3..11), ((25, 100), 1, 40..75), ((5, 500), 1, 7..7)] {
        let whole = &tree;
        let (rows, columns) = shape;
        let want: Vec<f32> = (0..rows * columns)
            .filter(|i| range.contains(&[i / columns, i % columns][dim]))
            .map(|i| whole[i])
            .collect();
        let mut got = vec![0.0; want.len()];
        reduce_scatter(&mut got, &views, shape, dim, range, Reduction::Tree);
        assert_eq!(got, want);
    }
}

#[test]
fn gather_and_all_to_all_place_data_correctly() {
    let (rows, columns) = (7, 10);
    let whole: Vec<f32> = (0..rows * columns).map(|i| i as f32).collect();
    let cut = |dim: usize, part: &std::ops::Range<usize>| -> Vec<f32> {
        whole
            .iter()
            .enumerate()
            .filter(|(i, _)| part.contains(&[i / columns, i % columns][dim]))
            .map(|(_, v)| *v)
            .collect()
    };
    let parts = [[0..3, 3..5, 5..7], [0..4, 4..4, 4..10]];
    for dim in 0..2 {
        let held: Vec<Vec<f32>> = parts[dim].iter().map(|p| cut(dim, p)).collect();
        let views: Vec<&[f32]> = held.iter().map(Vec::as_slice).collect();
        let mut out = vec![-1.0; whole.len()];
        all_gather(&mut out, &views, (rows, columns), dim, &parts[dim]);
        assert_eq!(out, whole);
        for me in 0..3 {
            let split = &parts[1 - dim];
            let want = cut(1 - dim, &split[me]);
            let mut out = vec![-1.0; want.len()];
            all_to_all(&mut out, &views, me, (rows, columns), dim, &parts[dim], split);
            assert_eq!(out, want);
        }
        let mut out = vec![0.0; held[2].len()];
        copy_from_member(&mut out, &views, 2);
        assert_eq!(out, held[2]);
    }
    assert_ne!(
        fingerprint_collective(b"all_reduce f32[7, 10]"),
        fingerprint_collective(b"all_reduce f32[10, 7]")
    );
}
