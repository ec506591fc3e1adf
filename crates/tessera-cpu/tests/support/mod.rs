//! Creates the transports of all members of a communicator, over shared memory or streams.

#![allow(dead_code, clippy::unwrap_used)]

use std::net::{TcpListener, TcpStream};

use tessera_cpu::arena::Arena;
use tessera_cpu::tcp::{PeerStream, TcpTransport};
use tessera_cpu::transport::{CommLayout, Transport};

/// The transport under test.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TransportKind {
    Memory,
    Streams,
}

/// Returns both ends of a TCP connection.
pub fn tcp_pair() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let b = listener.accept().unwrap().0;
    for s in [&a, &b] {
        s.set_nodelay(true).unwrap();
    }
    [a, b]
}

/// Returns one transport per member.
pub fn create_transports(kind: TransportKind, layout: CommLayout) -> Vec<Box<dyn Transport>> {
    let members = layout.members;
    if kind == TransportKind::Memory {
        let fd = Arena::create_memfd(layout).unwrap();
        return (0..members).map(|m| Box::new(Arena::attach(&fd, layout, m).unwrap()) as _).collect();
    }
    let mut wires: Vec<Vec<Option<Box<dyn PeerStream>>>> =
        (0..members).map(|_| (0..members).map(|_| None).collect()).collect();
    for (low, high) in (0..members).flat_map(|low| (low + 1..members).map(move |high| (low, high))) {
        let [a, b] = tcp_pair();
        wires[low][high] = Some(Box::new(a));
        wires[high][low] = Some(Box::new(b));
    }
    wires
        .into_iter()
        .enumerate()
        .map(|(m, w)| Box::new(TcpTransport::new(layout, m, w).unwrap()) as _)
        .collect()
}
