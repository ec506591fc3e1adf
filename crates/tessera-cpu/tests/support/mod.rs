//! Ends of a lane for every member, by memory and by streams.

#![allow(dead_code, clippy::unwrap_used)]

use std::net::{TcpListener, TcpStream};

use tessera_cpu::arena::{Arena, ArenaLayout};
use tessera_cpu::exchange::Exchange;
use tessera_cpu::tcp::{Tcp, Wire};

/// How members meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    Memory,
    Streams,
}

pub const BOTH: [Kind; 2] = [Kind::Memory, Kind::Streams];

/// Two ends of a connection.
pub fn linked() -> [TcpStream; 2] {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let a = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
    let b = listener.accept().unwrap().0;
    for s in [&a, &b] {
        s.set_nodelay(true).unwrap();
    }
    [a, b]
}

/// An end for every member.
pub fn ends(kind: Kind, layout: ArenaLayout) -> Vec<Exchange> {
    let members = layout.members;
    if kind == Kind::Memory {
        let fd = Arena::create(layout).unwrap();
        return (0..members).map(|m| Arena::attach(&fd, layout, m).unwrap().into()).collect();
    }
    let mut wires: Vec<Vec<Option<Box<dyn Wire>>>> =
        (0..members).map(|_| (0..members).map(|_| None).collect()).collect();
    for (low, high) in (0..members).flat_map(|low| (low + 1..members).map(move |high| (low, high))) {
        let [a, b] = linked();
        wires[low][high] = Some(Box::new(a));
        wires[high][low] = Some(Box::new(b));
    }
    wires.into_iter().enumerate().map(|(m, w)| Tcp::new(layout, m, w).unwrap().into()).collect()
}
