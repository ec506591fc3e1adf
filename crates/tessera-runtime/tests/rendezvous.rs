//! Tests of the rendezvous over loopback, with one thread per rank.

#![allow(clippy::unwrap_used)]

use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::driver::rendezvous::{RendezvousPeers, RendezvousSpec, join_peers};
use tessera_runtime::driver::secure::{Credentials, Secret, read_exact, write_all};
use tessera_runtime::driver::{ControlTopology, StopHandle};

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn rank_spec(rank: u32, world: u32, port: u16) -> RendezvousSpec {
    RendezvousSpec {
        rank,
        world_size: world,
        master: ("127.0.0.1".into(), port),
        bind: None,
        credentials: Credentials::Secret(Secret::new(&[5; 32]).unwrap()),
        topology: ControlTopology::Mesh,
        communicators: vec![(0..world).collect(), vec![1, 0]],
        parity_values: vec![("plan".into(), "abc".into())],
        session: 77,
        leader_payload: vec![rank as u8; 3],
        join_limit: Duration::from_secs(20),
    }
}

type Outcome = (Result<RendezvousPeers, Diagnostics>, Vec<Diagnostic>);

fn join_all(specs: Vec<RendezvousSpec>) -> Vec<Outcome> {
    std::thread::scope(|s| {
        let run = |spec: RendezvousSpec| {
            let mut notes = Vec::new();
            let met = join_peers(&spec, &StopHandle::default(), &mut |d| notes.push(d), &mut || Ok(()));
            (met, notes)
        };
        let threads: Vec<_> = specs.into_iter().map(|spec| s.spawn(move || run(spec))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn test_deadline() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn every_link_connects_the_ranks_it_names() {
    for (topology, counts) in [
        (ControlTopology::Mesh, [3, 1, 1, 1].as_slice()),
        (ControlTopology::ExternalLeader, &[1, 3, 1, 1]),
        (ControlTopology::Mesh, &[0]),
    ] {
        let world = counts.len() as u32;
        let port = free_port();
        let lanes = match world {
            1 => vec![vec![0]],
            _ => vec![vec![1, 2, 3], vec![3, 1], vec![0, 1, 2, 3]],
        };
        let specs: Vec<RendezvousSpec> = (0..world)
            .map(|r| RendezvousSpec { topology, communicators: lanes.clone(), ..rank_spec(r, world, port) })
            .collect();
        let mut peers: Vec<RendezvousPeers> = join_all(specs).into_iter().map(|(p, _)| p.unwrap()).collect();
        assert!(peers.iter().all(|p| p.session == 77 && p.digest == peers[0].digest));
        // Every rank must get rank 0's payload, whatever payload the rank itself has.
        assert!(peers.iter().all(|p| p.leader_payload == [0; 3]));
        assert_eq!(peers.iter().map(|p| p.control.len()).collect::<Vec<_>>(), counts);
        // Each rank sends its rank and the link's index over every link.
        for (me, p) in peers.iter_mut().enumerate() {
            for s in &mut p.control {
                write_all(&mut **s, &[me as u8, 99], test_deadline()).unwrap();
            }
            for (lane, streams) in &mut p.communicators {
                for s in streams {
                    write_all(&mut **s, &[me as u8, *lane as u8], test_deadline()).unwrap();
                }
            }
        }
        let read_tag = |s: &mut dyn tessera_runtime::driver::ByteStream| {
            let mut said = [0; 2];
            read_exact(s, &mut said, test_deadline()).unwrap();
            said
        };
        for (me, p) in peers.iter_mut().enumerate() {
            let linked = topology.control_links(world);
            let others = linked.iter().filter_map(|(a, b)| match me as u32 {
                r if r == *a => Some(*b),
                r if r == *b => Some(*a),
                _ => None,
            });
            for (s, other) in p.control.iter_mut().zip(others) {
                assert_eq!(read_tag(&mut **s), [other as u8, 99]);
            }
            for (lane, streams) in &mut p.communicators {
                let others: Vec<u32> = lanes[*lane].iter().copied().filter(|m| *m != me as u32).collect();
                assert_eq!(streams.len(), others.len());
                for (s, other) in streams.iter_mut().zip(others) {
                    assert_eq!(read_tag(&mut **s), [other as u8, *lane as u8]);
                }
            }
        }
    }
}

/// Returns the codes and texts of every rank's refusal.
fn refusals(specs: Vec<RendezvousSpec>) -> Vec<String> {
    let text = |d: &Diagnostic| format!("{} {} {:?}", d.code.id, d.message, d.labels);
    join_all(specs).iter().map(|(met, _)| met.as_ref().unwrap_err().iter().map(text).collect()).collect()
}

#[test]
fn differing_values_are_reported_to_every_rank() {
    let port = free_port();
    let mut odd = rank_spec(2, 3, port);
    odd.parity_values = vec![("plan".into(), "xyz".into())];
    odd.communicators = vec![vec![1, 0], vec![0, 1, 2]];
    let said = refusals(vec![rank_spec(0, 3, port), rank_spec(1, 3, port), odd]);
    for s in &said {
        assert!(s.contains("T0740 ranks hold different values of `plan`"), "{s}");
        assert!(s.contains("ranks 0, 1") && s.contains("\"rank 2\", message: \"xyz\""), "{s}");
        assert!(s.contains("T0757 ranks hold different values of `groups`"), "{s}");
    }
}

#[test]
fn a_wrong_world_size_a_duplicate_rank_and_an_excess_rank_are_named() {
    let port = free_port();
    let said = refusals(vec![rank_spec(0, 2, port), rank_spec(1, 3, port)]);
    for s in &said {
        assert!(
            s.contains("T0757 rank 1 at ") && s.contains("WORLD_SIZE 2") && s.contains("WORLD_SIZE 3"),
            "{s}"
        );
    }
    let port = free_port();
    let said = refusals(vec![rank_spec(0, 3, port), rank_spec(1, 3, port), rank_spec(1, 3, port)]);
    for s in &said {
        assert!(s.contains("T0757 two processes claim to be rank 1 of 3"), "{s}");
    }
    let said = refusals(vec![rank_spec(2, 2, port)]);
    assert!(said[0].contains("T0758 there is no rank 2 in a world of 2"), "{said:?}");
}

#[test]
fn a_stranger_is_reported_and_blocks_nobody() {
    let port = free_port();
    let stranger = Credentials::Secret(Secret::new(&[6; 32]).unwrap());
    let outcomes = std::thread::scope(|s| {
        let stranger = RendezvousSpec { credentials: stranger, ..rank_spec(1, 2, port) };
        let run = |spec: RendezvousSpec| {
            let mut notes = Vec::new();
            (join_peers(&spec, &StopHandle::default(), &mut |d| notes.push(d), &mut || Ok(())), notes)
        };
        let zero = s.spawn(move || run(rank_spec(0, 2, port)));
        let refused = run(stranger);
        let one = run(rank_spec(1, 2, port));
        [zero.join().unwrap(), one, refused]
    });
    let [(zero, notes), (one, _), (refused, _)] = outcomes;
    assert!(zero.is_ok() && one.is_ok());
    assert_eq!(notes[0].code.id, "T0756");
    assert!(
        notes[0].message.contains("which claims to be rank 1 of 2, did not prove"),
        "{}",
        notes[0].message
    );
    assert_eq!(refused.unwrap_err()[0].code.id, "T0756");
}

#[test]
fn waits_time_out_and_name_the_missing_ranks() {
    let port = free_port();
    let brief =
        |r, world| RendezvousSpec { join_limit: Duration::from_millis(300), ..rank_spec(r, world, port) };
    let begun = Instant::now();
    let said = refusals(vec![brief(1, 2)]);
    assert!(
        said[0].contains("T0758 timed out waiting for rank 0 at 127.0.0.1:") && said[0].contains("refused"),
        "{said:?}"
    );
    let said = refusals(vec![brief(0, 4)]);
    assert!(said[0].contains("timed out waiting for missing ranks"), "{said:?}");
    assert!(said[0].contains("ranks 1, 2, 3"), "{said:?}");
    let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let said = refusals(vec![brief(0, 2)]);
    assert!(said[0].contains("T0758 this rank cannot listen at 127.0.0.1:"), "{said:?}");
    let stop = StopHandle::default();
    stop.request_stop();
    let d = join_peers(&rank_spec(0, 2, free_port()), &stop, &mut |_| (), &mut || Ok(())).unwrap_err();
    assert!(d[0].message.contains("stopped on request"), "{d:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn a_rank_that_leaves_early_ends_the_rendezvous() {
    let port = free_port();
    let said = std::thread::scope(|s| {
        let zero = s.spawn(move || {
            join_peers(&rank_spec(0, 3, port), &StopHandle::default(), &mut |_| (), &mut || Ok(()))
        });
        let stop = StopHandle::default();
        let leaver = {
            let stop = stop.clone();
            s.spawn(move || join_peers(&rank_spec(1, 3, port), &stop, &mut |_| (), &mut || Ok(())))
        };
        // By now the rank has joined, or it leaves while joining; either way rank 0 waits for it
        // until the stop request.
        std::thread::sleep(Duration::from_millis(500));
        stop.request_stop();
        assert!(leaver.join().unwrap().is_err());
        zero.join().unwrap().unwrap_err()
    });
    assert!(said[0].message.contains("rank 1 left before all ranks had joined"), "{said:?}");
}

/// Joins one rank and returns its outcome with its notes.
fn join_one(spec: &RendezvousSpec) -> Outcome {
    let mut notes = Vec::new();
    let met = join_peers(spec, &StopHandle::default(), &mut |d| notes.push(d), &mut || Ok(()));
    (met, notes)
}

/// Connects to a port on which a rank is about to listen.
fn connect_stranger(port: u16) -> TcpStream {
    let deadline = test_deadline();
    loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => return stream,
            Err(e) if Instant::now() > deadline => panic!("nobody listens: {e}"),
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

#[test]
fn idle_connections_do_not_keep_a_run_from_starting() {
    let port = free_port();
    std::thread::scope(|s| {
        let zero = s.spawn(move || join_one(&rank_spec(0, 2, port)));
        let idle: Vec<TcpStream> = (0..150).map(|_| connect_stranger(port)).collect();
        let begun = Instant::now();
        let (one, _) = join_one(&rank_spec(1, 2, port));
        let waited = begun.elapsed();
        let (zero, notes) = zero.join().unwrap();
        assert!(one.is_ok() && zero.is_ok(), "{one:?} {zero:?}");
        assert!(waited < Duration::from_secs(15), "rank 1 joined after {waited:?}");
        assert!(notes.len() <= 4, "{} lines for {} connections", notes.len(), idle.len());
    });
}

#[test]
fn refused_strangers_are_reported_in_one_line_per_kind_and_a_count() {
    let port = free_port();
    let (zero, notes) = std::thread::scope(|s| {
        let zero = s.spawn(move || join_one(&rank_spec(0, 2, port)));
        for i in 0..60 {
            let mut stranger = connect_stranger(port);
            if i % 2 == 0 {
                stranger.write_all(&[b'x'; 200]).unwrap();
                // Rank 0 answers with the end of the stream, or resets it because of unread input.
                let _ = stranger.read(&mut [0]);
            }
        }
        assert!(join_one(&rank_spec(1, 2, port)).0.is_ok());
        zero.join().unwrap()
    });
    assert!(zero.is_ok());
    let text = |d: &Diagnostic| format!("{} {}", d.message, d.labels[0].message);
    let texts: Vec<String> = notes.iter().map(text).collect();
    assert!(notes.iter().all(|d| d.code.id == "T0756") && notes.len() <= 4, "{texts:?}");
    // Rank 0 does not wait for handshakes that are still ending when the last rank has joined.
    for reason in ["proof is invalid", "closed the connection"] {
        let count = texts.iter().filter(|t| t.contains(reason)).find_map(|t| {
            let (count, _) = t.split_once(" more processes")?;
            count.parse().ok()
        });
        assert!(count.is_some_and(|c: u32| (20..=29).contains(&c)), "{reason}: {texts:?}");
    }
}

#[test]
fn a_handshake_that_the_listener_drops_is_retried() {
    let port = free_port();
    let other = TcpListener::bind(("127.0.0.1", port)).unwrap();
    std::thread::scope(|s| {
        let one = s.spawn(move || join_one(&rank_spec(1, 2, port)));
        drop(other.accept().unwrap());
        drop(other);
        assert!(join_one(&rank_spec(0, 2, port)).0.is_ok());
        assert!(one.join().unwrap().0.is_ok());
    });
}

#[test]
fn a_listener_that_never_answers_is_described_as_such() {
    let port = free_port();
    let silent = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let spec = RendezvousSpec { join_limit: Duration::from_secs(1), ..rank_spec(1, 2, port) };
    let begun = Instant::now();
    let d = join_one(&spec).0.unwrap_err().remove(0);
    assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
    assert_eq!(d.code.id, "T0756");
    let hint = d.hint.unwrap();
    assert!(
        hint.contains("accepted the connection and did not answer") && !hint.contains("secret"),
        "{hint}"
    );
    drop(silent);
}
