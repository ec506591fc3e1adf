//! Faults that only streams can have: they close, are slow, or carry invalid frames.

#![allow(clippy::unwrap_used)]

mod support;

use std::io::Write;
use std::net::TcpStream;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use support::{TransportKind, create_transports, tcp_pair};
use tessera_base::random::philox4x32;
use tessera_cpu::tcp::TcpTransport;
use tessera_cpu::transport::{CommFault, CommLayout, Transport};

const ELEMENTS_8_MIB: usize = 2 << 20;

fn layout(members: usize, slots: usize) -> CommLayout {
    CommLayout { members, slots, slot_bytes: 4 * ELEMENTS_8_MIB }
}

fn test_deadline() -> Instant {
    Instant::now() + Duration::from_secs(20)
}

#[test]
fn a_closed_peer_is_a_fault_at_once() {
    let mut members = create_transports(TransportKind::Streams, layout(3, 2));
    drop(members.remove(1));
    let begun = Instant::now();
    for (me, end) in [(0, 0), (2, 1)] {
        let fault = match members[end].publish(1, &[1.0], test_deadline()) {
            Ok(ticket) => members[end].collect(ticket, test_deadline(), &mut |_| ()).unwrap_err(),
            Err(fault) => fault,
        };
        assert!(matches!(fault, CommFault::Disconnected { peer: 1, seq: 0, .. }), "{me}: {fault}");
    }
    // A fault that comes late would come with the deadline.
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn a_disconnect_wakes_a_sleeping_wait() {
    let mut members = create_transports(TransportKind::Streams, layout(2, 2));
    let (leaves, mut waits) = (members.remove(1), members.remove(0));
    std::thread::scope(|s| {
        let (tell, asleep) = channel();
        let waiting = s.spawn(move || {
            let ticket = waits.publish(1, &[1.0], test_deadline()).unwrap();
            tell.send(()).unwrap();
            let begun = Instant::now();
            (waits.collect(ticket, test_deadline(), &mut |_| ()).unwrap_err(), begun.elapsed())
        });
        asleep.recv().unwrap();
        drop(leaves);
        let (fault, took) = waiting.join().unwrap();
        assert!(matches!(fault, CommFault::Disconnected { peer: 1, .. }), "{fault}");
        assert!(took < Duration::from_secs(5), "{took:?}");
    });
}

/// A contribution larger than the socket buffers is sent while its sender computes, and the
/// receiver waits for nothing else.
#[test]
fn contributions_are_sent_while_their_sender_computes() {
    let mut members = create_transports(TransportKind::Streams, layout(2, 2));
    let (mut reader, mut sender) = (members.remove(1), members.remove(0));
    let data: Vec<f32> = (0..ELEMENTS_8_MIB).map(|i| i as f32).collect();
    std::thread::scope(|s| {
        let (tell, read) = channel();
        let data = &data;
        s.spawn(move || {
            let ticket = reader.publish(7, &[], test_deadline()).unwrap();
            reader.collect(ticket, test_deadline(), &mut |views| assert!(views[0] == data)).unwrap();
            tell.send(reader).unwrap();
        });
        let ticket = sender.publish(7, data, test_deadline()).unwrap();
        // Only the background thread moves data here.
        let _reader = read.recv_timeout(Duration::from_secs(20)).unwrap();
        sender.collect(ticket, test_deadline(), &mut |views| assert!(views[0] == data)).unwrap();
    });
}

#[test]
fn the_last_contribution_of_a_closing_member_arrives() {
    let mut members = create_transports(TransportKind::Streams, layout(2, 2));
    let (mut stays, mut leaves) = (members.remove(1), members.remove(0));
    let data = vec![3.0; ELEMENTS_8_MIB];
    std::thread::scope(|s| {
        let data = &data;
        let mine = stays.publish(1, &[], test_deadline()).unwrap();
        s.spawn(move || {
            leaves.publish_and_collect(1, data, test_deadline(), &mut |_| ()).unwrap();
        });
        stays.collect(mine, test_deadline(), &mut |views| assert!(views[0] == data)).unwrap();
    });
}

fn transport_and_raw_peer(slots: usize) -> (TcpTransport, TcpStream) {
    let [a, b] = tcp_pair();
    let layout = CommLayout { members: 2, slots, slot_bytes: 64 };
    (TcpTransport::new(layout, 0, vec![None, Some(Box::new(a))]).unwrap(), b)
}

/// Builds a frame as the module documentation of `frame.rs` describes it.
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
fn invalid_frames_name_their_sender() {
    let mut damaged = frame(1, 0, &[1, 2, 3, 4]);
    *damaged.last_mut().unwrap() ^= 1;
    let ahead: Vec<u8> = (0..3).flat_map(|s| frame(1, s, &[0; 4])).collect();
    let cases: [(&str, Vec<u8>); 9] = [
        ("unknown frame kind", frame(4, 0, &[])),
        ("wrong checksum", damaged),
        ("contribution 1 out of order or too early: 0 expected", frame(1, 1, &[])),
        ("contribution 2 out of order or too early: 2 expected, at most 2 ahead", ahead),
        ("68 bytes for a slot of 64", frame(1, 0, &[0; 68])),
        ("6 bytes for a slot of 64", frame(1, 0, &[0; 6])),
        ("collective 1 finished, of 1", frame(2, 1, &[])),
        ("collective 0 finished, of 1", [frame(2, 0, &[]), frame(2, 0, &[])].concat()),
        ("an abort reason of 241 bytes", frame(3, 0, &[b'x'; 241])),
    ];
    for (why, bytes) in cases {
        let (mut end, mut raw) = transport_and_raw_peer(2);
        let ticket = end.publish(9, &[], test_deadline()).unwrap();
        raw.write_all(&bytes).unwrap();
        let fault = end.collect(ticket, test_deadline(), &mut |_| ()).unwrap_err();
        let CommFault::InvalidFrame { peer: 1, what, .. } = &fault else { panic!("{why}: {fault}") };
        assert!(what.contains(why), "{what}");
    }
    let (mut end, mut raw) = transport_and_raw_peer(2);
    let ticket = end.publish(9, &[], test_deadline()).unwrap();
    raw.write_all(&frame(3, 0, b"enough")).unwrap();
    let fault = end.collect(ticket, test_deadline(), &mut |_| ()).unwrap_err();
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
        let (mut end, mut raw) = transport_and_raw_peer(2);
        raw.write_all(&bytes).unwrap();
        drop(raw);
        loop {
            let brief = Instant::now() + Duration::from_millis(20);
            if end.publish_and_collect(9, &[1.0], brief, &mut |views| assert!(views[1].len() <= 16)).is_err()
            {
                break;
            }
        }
    }
}
