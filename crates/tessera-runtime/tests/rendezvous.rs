//! Ranks that nobody launched find each other, on loopback, each on a thread.

#![allow(clippy::unwrap_used)]

use std::net::TcpListener;
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::driver::rendezvous::{Peers, Rendezvous, meet};
use tessera_runtime::driver::secure::{Credentials, Secret, read_exact, write_all};
use tessera_runtime::driver::{Interrupt, Topology};

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn rank(rank: u32, world: u32, port: u16) -> Rendezvous {
    Rendezvous {
        rank,
        world,
        master: ("127.0.0.1".into(), port),
        bind: None,
        credentials: Credentials::Secret(Secret::new(&[5; 32]).unwrap()),
        topology: Topology::Mesh,
        lanes: vec![(0..world).collect(), vec![1, 0]],
        facts: vec![("plan".into(), "abc".into())],
        session: 77,
        tells: vec![rank as u8; 3],
        limit: Duration::from_secs(20),
    }
}

type Outcome = (Result<Peers, Diagnostics>, Vec<Diagnostic>);

fn all(specs: Vec<Rendezvous>) -> Vec<Outcome> {
    std::thread::scope(|s| {
        let run = |spec: Rendezvous| {
            let mut notes = Vec::new();
            let met = meet(&spec, &Interrupt::default(), &mut |d| notes.push(d), &mut || Ok(()));
            (met, notes)
        };
        let threads: Vec<_> = specs.into_iter().map(|spec| s.spawn(move || run(spec))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(10)
}

#[test]
fn every_link_leads_to_who_it_names() {
    for (topology, counts) in [
        (Topology::Mesh, [3, 1, 1, 1].as_slice()),
        (Topology::Outside, &[1, 3, 1, 1]),
        (Topology::Mesh, &[0]),
    ] {
        let world = counts.len() as u32;
        let port = free_port();
        let lanes = match world {
            1 => vec![vec![0]],
            _ => vec![vec![1, 2, 3], vec![3, 1], vec![0, 1, 2, 3]],
        };
        let specs: Vec<Rendezvous> = (0..world)
            .map(|r| Rendezvous { topology, lanes: lanes.clone(), ..rank(r, world, port) })
            .collect();
        let mut peers: Vec<Peers> = all(specs).into_iter().map(|(p, _)| p.unwrap()).collect();
        assert!(peers.iter().all(|p| p.session == 77 && p.digest == peers[0].digest));
        // Rank 0 tells, whatever the others hold.
        assert!(peers.iter().all(|p| p.told == [0; 3]));
        assert_eq!(peers.iter().map(|p| p.control.len()).collect::<Vec<_>>(), counts);
        // Everybody says, on every link, who it is and which link it means.
        for (me, p) in peers.iter_mut().enumerate() {
            for s in &mut p.control {
                write_all(&mut **s, &[me as u8, 99], soon()).unwrap();
            }
            for (lane, streams) in &mut p.lanes {
                for s in streams {
                    write_all(&mut **s, &[me as u8, *lane as u8], soon()).unwrap();
                }
            }
        }
        let hear = |s: &mut dyn tessera_runtime::driver::Stream| {
            let mut said = [0; 2];
            read_exact(s, &mut said, soon()).unwrap();
            said
        };
        for (me, p) in peers.iter_mut().enumerate() {
            let linked = topology.links(world);
            let others = linked.iter().filter_map(|(a, b)| match me as u32 {
                r if r == *a => Some(*b),
                r if r == *b => Some(*a),
                _ => None,
            });
            for (s, other) in p.control.iter_mut().zip(others) {
                assert_eq!(hear(&mut **s), [other as u8, 99]);
            }
            for (lane, streams) in &mut p.lanes {
                let others: Vec<u32> = lanes[*lane].iter().copied().filter(|m| *m != me as u32).collect();
                assert_eq!(streams.len(), others.len());
                for (s, other) in streams.iter_mut().zip(others) {
                    assert_eq!(hear(&mut **s), [other as u8, *lane as u8]);
                }
            }
        }
    }
}

/// Codes and the words of every rank's refusal.
fn refusals(specs: Vec<Rendezvous>) -> Vec<String> {
    let text = |d: &Diagnostic| format!("{} {} {:?}", d.code.id, d.message, d.places);
    all(specs).iter().map(|(met, _)| met.as_ref().unwrap_err().iter().map(text).collect()).collect()
}

#[test]
fn what_ranks_hold_differently_is_told_to_all_of_them() {
    let port = free_port();
    let mut odd = rank(2, 3, port);
    odd.facts = vec![("plan".into(), "xyz".into())];
    odd.lanes = vec![vec![1, 0], vec![0, 1, 2]];
    let said = refusals(vec![rank(0, 3, port), rank(1, 3, port), odd]);
    for s in &said {
        assert!(s.contains("T0740 ranks hold different values of `plan`"), "{s}");
        assert!(s.contains("ranks 0, 1") && s.contains("\"rank 2\", says: \"xyz\""), "{s}");
        assert!(s.contains("T0757 ranks hold different values of `groups`"), "{s}");
    }
}

#[test]
fn a_wrong_world_a_second_rank_and_a_rank_too_many_are_named() {
    let port = free_port();
    let said = refusals(vec![rank(0, 2, port), rank(1, 3, port)]);
    for s in &said {
        assert!(
            s.contains("T0757 rank 1 at ") && s.contains("WORLD_SIZE 2") && s.contains("WORLD_SIZE 3"),
            "{s}"
        );
    }
    let port = free_port();
    let said = refusals(vec![rank(0, 3, port), rank(1, 3, port), rank(1, 3, port)]);
    for s in &said {
        assert!(s.contains("T0757 two processes call themselves rank 1 of 3"), "{s}");
    }
    let said = refusals(vec![rank(2, 2, port)]);
    assert!(said[0].contains("T0758 there is no rank 2 in a world of 2"), "{said:?}");
}

#[test]
fn a_stranger_is_told_of_and_keeps_nobody_out() {
    let port = free_port();
    let stranger = Credentials::Secret(Secret::new(&[6; 32]).unwrap());
    let outcomes = std::thread::scope(|s| {
        let stranger = Rendezvous { credentials: stranger, ..rank(1, 2, port) };
        let run = |spec: Rendezvous| {
            let mut notes = Vec::new();
            (meet(&spec, &Interrupt::default(), &mut |d| notes.push(d), &mut || Ok(())), notes)
        };
        let zero = s.spawn(move || run(rank(0, 2, port)));
        let refused = run(stranger);
        let one = run(rank(1, 2, port));
        [zero.join().unwrap(), one, refused]
    });
    let [(zero, notes), (one, _), (refused, _)] = outcomes;
    assert!(zero.is_ok() && one.is_ok());
    assert_eq!(notes[0].code.id, "T0756");
    assert!(
        notes[0].message.contains("which calls itself rank 1 of 2, did not prove"),
        "{}",
        notes[0].message
    );
    assert_eq!(refused.unwrap_err()[0].code.id, "T0756");
}

#[test]
fn waits_end_and_say_for_whom() {
    let port = free_port();
    let brief = |r, world| Rendezvous { limit: Duration::from_millis(300), ..rank(r, world, port) };
    let begun = Instant::now();
    let said = refusals(vec![brief(1, 2)]);
    assert!(said[0].contains("T0758 rank 0 at 127.0.0.1:") && said[0].contains("refused"), "{said:?}");
    let said = refusals(vec![brief(0, 4)]);
    assert!(said[0].contains("ranks that are missing did not come in time"), "{said:?}");
    assert!(said[0].contains("ranks 1, 2, 3"), "{said:?}");
    let _taken = TcpListener::bind(("127.0.0.1", port)).unwrap();
    let said = refusals(vec![brief(0, 2)]);
    assert!(said[0].contains("T0758 this rank cannot listen at 127.0.0.1:"), "{said:?}");
    let stop = Interrupt::default();
    stop.interrupt();
    let d = meet(&rank(0, 2, free_port()), &stop, &mut |_| (), &mut || Ok(())).unwrap_err();
    assert!(d[0].message.contains("stopped on request"), "{d:?}");
    assert!(begun.elapsed() < Duration::from_secs(5));
}

#[test]
fn who_leaves_while_others_are_waited_for_ends_it() {
    let port = free_port();
    let said = std::thread::scope(|s| {
        let zero =
            s.spawn(move || meet(&rank(0, 3, port), &Interrupt::default(), &mut |_| (), &mut || Ok(())));
        let stop = Interrupt::default();
        let leaver = {
            let stop = stop.clone();
            s.spawn(move || meet(&rank(1, 3, port), &stop, &mut |_| (), &mut || Ok(())))
        };
        // It is in by now, or leaves on its way: rank 0 then waits for it until somebody asks it not to.
        std::thread::sleep(Duration::from_millis(500));
        stop.interrupt();
        assert!(leaver.join().unwrap().is_err());
        zero.join().unwrap().unwrap_err()
    });
    assert!(said[0].message.contains("rank 1 left before all ranks had met"), "{said:?}");
}
