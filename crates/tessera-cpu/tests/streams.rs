//! What only streams can do: end, be slow, carry what no member sends.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use support::{Kind, ends, linked};
use tessera_base::random::philox4x32;
use tessera_cpu::arena::ArenaLayout;
use tessera_cpu::exchange::CommFault;
use tessera_cpu::tcp::Tcp;

const MEGABYTES_8: usize = 2 << 20;

fn layout(members: usize, slots: usize) -> ArenaLayout {
    ArenaLayout { members, slots, slot_bytes: 4 * MEGABYTES_8 }
}

fn soon() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn a_member_that_is_gone_is_a_fault_at_once() {
    let mut members = ends(Kind::Streams, layout(3, 2));
    drop(members.remove(1));
    let begun = Instant::now();
    for (me, end) in [(0, 0), (2, 1)] {
        let fault = match members[end].publish(1, &[1.0], soon()) {
            Ok(ticket) => members[end].collect(ticket, soon(), |_| ()).unwrap_err(),
            Err(fault) => fault,
        };
        assert!(matches!(fault, CommFault::Gone { peer: 1, seq: 0, .. }), "{me}: {fault}");
    }
    assert!(begun.elapsed() < Duration::from_secs(2));
}

#[test]
fn a_fault_wakes_who_sleeps() {
    let mut members = ends(Kind::Streams, layout(2, 2));
    let (leaves, mut waits) = (members.remove(1), members.remove(0));
    std::thread::scope(|s| {
        let (tell, asleep) = channel();
        let waiting = s.spawn(move || {
            let ticket = waits.publish(1, &[1.0], soon()).unwrap();
            tell.send(()).unwrap();
            let begun = Instant::now();
            (waits.collect(ticket, soon(), |_| ()).unwrap_err(), begun.elapsed())
        });
        asleep.recv().unwrap();
        drop(leaves);
        let (fault, took) = waiting.join().unwrap();
        assert!(matches!(fault, CommFault::Gone { peer: 1, .. }), "{fault}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    });
}

/// More than sockets hold goes out while its sender computes, and its receiver waits for nothing else.
#[test]
fn contributions_flow_while_their_sender_is_away() {
    let mut members = ends(Kind::Streams, layout(2, 2));
    let (mut reader, mut sender) = (members.remove(1), members.remove(0));
    let data: Vec<f32> = (0..MEGABYTES_8).map(|i| i as f32).collect();
    std::thread::scope(|s| {
        let (tell, read) = channel();
        let data = &data;
        s.spawn(move || {
            let ticket = reader.publish(7, &[], soon()).unwrap();
            reader.collect(ticket, soon(), |views| assert!(views[0] == data)).unwrap();
            tell.send(reader).unwrap();
        });
        let ticket = sender.publish(7, data, soon()).unwrap();
        // Only the lane's own thread moves anything here.
        let _reader = read.recv_timeout(Duration::from_secs(20)).unwrap();
        sender.collect(ticket, soon(), |views| assert!(views[0] == data)).unwrap();
    });
}

#[test]
fn what_a_member_brought_last_arrives_although_it_leaves() {
    let mut members = ends(Kind::Streams, layout(2, 2));
    let (mut stays, mut leaves) = (members.remove(1), members.remove(0));
    let data = vec![3.0; MEGABYTES_8];
    std::thread::scope(|s| {
        let data = &data;
        let mine = stays.publish(1, &[], soon()).unwrap();
        s.spawn(move || {
            leaves.exchange(1, data, soon(), |_| ()).unwrap();
        });
        stays.collect(mine, soon(), |views| assert!(views[0] == data)).unwrap();
    });
}

fn against_raw(slots: usize) -> (Tcp, TcpStream) {
    let [a, b] = linked();
    let layout = ArenaLayout { members: 2, slots, slot_bytes: 64 };
    (Tcp::new(layout, 0, vec![None, Some(Box::new(a))]).unwrap(), b)
}

/// A frame as the module's page describes it.
fn frame(kind: u32, seq: u64, payload: &[u8]) -> Vec<u8> {
    let mut out = kind.to_le_bytes().to_vec();
    out.extend((payload.len() as u32).to_le_bytes());
    out.extend(seq.to_le_bytes());
    out.extend(9u64.to_le_bytes());
    let hashed = [&out, payload].concat();
    out.extend(xxhash_rust::xxh3::xxh3_64(&hashed).to_le_bytes());
    out.extend(payload);
    out
}

#[test]
fn what_is_no_contribution_names_who_sent_it() {
    let mut damaged = frame(1, 0, &[1, 2, 3, 4]);
    *damaged.last_mut().unwrap() ^= 1;
    let ahead: Vec<u8> = (0..3).flat_map(|s| frame(1, s, &[0; 4])).collect();
    let cases: [(&str, Vec<u8>); 9] = [
        ("unknown kind", frame(4, 0, &[])),
        ("changed on the way", damaged),
        ("contribution 1 where 0", frame(1, 1, &[])),
        ("contribution 2 where 2 of 2 ahead", ahead),
        ("68 bytes for a slot of 64", frame(1, 0, &[0; 68])),
        ("6 bytes for a slot of 64", frame(1, 0, &[0; 6])),
        ("collective 1 read, of 1", frame(2, 1, &[])),
        ("collective 0 read, of 1", [frame(2, 0, &[]), frame(2, 0, &[])].concat()),
        ("a reason of 241 bytes", frame(3, 0, &[b'x'; 241])),
    ];
    for (why, bytes) in cases {
        let (mut end, mut raw) = against_raw(2);
        let ticket = end.publish(9, &[], soon()).unwrap();
        raw.write_all(&bytes).unwrap();
        let fault = end.collect(ticket, soon(), |_| ()).unwrap_err();
        let CommFault::Garbled { peer: 1, what, .. } = &fault else { panic!("{why}: {fault}") };
        assert!(what.contains(why), "{what}");
    }
    let (mut end, mut raw) = against_raw(2);
    let ticket = end.publish(9, &[], soon()).unwrap();
    raw.write_all(&frame(3, 0, b"enough")).unwrap();
    let fault = end.collect(ticket, soon(), |_| ()).unwrap_err();
    assert_eq!(fault, CommFault::Aborted { by: 1, reason: "enough".into() });
}

#[test]
fn any_bytes_from_a_peer_end_in_a_fault() {
    let mut drawn = 0;
    let mut number = || {
        drawn += 1;
        philox4x32([drawn, 0, 0, 0], [11, 0])[0] as usize
    };
    for _ in 0..300 {
        let mut bytes = Vec::new();
        for seq in 0..number() as u64 % 4 {
            bytes.extend(frame(1 + number() as u32 % 3, seq, &vec![7; number() % 17 * 4]));
        }
        for _ in 0..1 + number() % 3 {
            let at = number() % (bytes.len() + 1);
            match number() % 3 {
                0 => bytes.truncate(at),
                1 => bytes.insert(at, number() as u8),
                _ => bytes.iter_mut().skip(at).take(1).for_each(|b| *b ^= 1 << (at % 8)),
            }
        }
        let (mut end, mut raw) = against_raw(2);
        raw.write_all(&bytes).unwrap();
        drop(raw);
        loop {
            let brief = Instant::now() + Duration::from_millis(20);
            if end.exchange(9, &[1.0], brief, |views| assert!(views[1].len() <= 16)).is_err() {
                break;
            }
        }
    }
}
