//! The judge against an oracle that shares none of its code: it plays small sets of programs on devices that
//! launch collectives first in, first out in host order, and a mismatch at a rendezvous is a failure.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use tessera_ir::{Builder, Opcode, Program, Type, ValueId};
use tessera_verify::{check_phase, check_program};

/// One call as the test writes it down. The mesh is tp=2, pp=2: rank = tp + 2 · pp.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Call {
    /// axis (0 tp, 1 pp), root, elements
    Broadcast(u8, u8, u64),
    /// axis, elements; to the other rank on the axis
    Send(u8, u64),
    /// axis, elements
    Recv(u8, u64),
}

fn other(rank: usize, axis: u8) -> usize {
    rank ^ (1 << axis)
}

/// Plays to the end. Rendezvous of two: each rank offers its next call, and a pair goes on when both offer
/// fitting calls to each other. With one call offered per rank, the order of play does not change the outcome.
fn plays(programs: &[Vec<Call>; 4]) -> bool {
    let mut at = [0; 4];
    loop {
        let mut moved = false;
        for r in 0..4 {
            let Some(mine) = programs[r].get(at[r]).copied() else { continue };
            let axis = match mine {
                Call::Broadcast(a, ..) | Call::Send(a, _) | Call::Recv(a, _) => a,
            };
            let q = other(r, axis);
            let meets = match (mine, programs[q].get(at[q]).copied()) {
                (Call::Broadcast(..), theirs) => theirs == Some(mine),
                (Call::Send(a, n), theirs) => theirs == Some(Call::Recv(a, n)),
                (Call::Recv(a, n), theirs) => theirs == Some(Call::Send(a, n)),
            };
            if meets {
                at[r] += 1;
                at[q] += 1;
                moved = true;
            }
        }
        if (0..4).all(|r| at[r] == programs[r].len()) {
            return true;
        }
        if !moved {
            return false;
        }
    }
}

/// The same calls as IR; `streams` tells on which stream each rank issues, `lazy` whether it waits at once.
fn lower(rank: usize, calls: &[Call], streams: u64, lazy: bool) -> Program {
    let mut b = builder(&format!("r{rank}"), mesh("tp=2,pp=2"));
    let name = |axis: u8| ["tp", "pp"][axis as usize];
    let mut open = Vec::new();
    for (i, call) in calls.iter().enumerate() {
        let peer = |axis: u8| ((rank >> axis) & 1 ^ 1) as i64;
        if streams >> (i % 64) & 1 == 1 {
            b.stream("comm");
        }
        let (ticket, ty) = match *call {
            Call::Broadcast(a, root, n) => {
                // A source takes the pending stream with it; ask for it first.
                let x = b.weight(&format!("x{n}"), f32s(&[n]));
                if streams >> (i % 64) & 1 == 1 {
                    b.stream("comm");
                }
                b.attr("axis", name(a)).attr("root", i64::from(root));
                (b.issue(Opcode::Broadcast, &[x]), None)
            }
            Call::Send(a, n) => {
                let x = b.weight(&format!("x{n}"), f32s(&[n]));
                b.attr("axis", name(a)).attr("to", peer(a));
                (b.issue(Opcode::Send, &[x]), None)
            }
            Call::Recv(a, n) => {
                b.attr("axis", name(a)).attr("from", peer(a));
                (b.recv(f32s(&[n])), Some(f32s(&[n])))
            }
        };
        open.push((ticket, ty));
        if !lazy {
            finish(&mut b, &mut open);
        }
    }
    finish(&mut b, &mut open);
    done(b)
}

fn finish(b: &mut Builder, open: &mut Vec<(ValueId, Option<Type>)>) {
    for (ticket, ty) in open.drain(..) {
        b.wait(ticket, ty);
    }
}

fn accepts(programs: &[Vec<Call>; 4], streams: u64, lazy: bool) -> bool {
    let lowered: Vec<Program> =
        (0..4).map(|r| lower(r, &programs[r], streams.rotate_left(7 * r as u32), lazy)).collect();
    for p in &lowered {
        clean(&check_program(p));
    }
    check_phase(&mesh("tp=2,pp=2"), &roles(&lowered), &phase(lowered)).is_empty()
}

fn calls() -> impl Strategy<Value = [Vec<Call>; 4]> {
    // A list of meetings in one order, then a few changes on single ranks.
    let meeting = (0..4usize, 0..2u8, 0..3u8, 0..2u8, 4..6u64);
    let change = (0..4usize, any::<prop::sample::Index>(), 0..3u8);
    (prop::collection::vec(meeting, 0..8), prop::collection::vec(change, 0..4)).prop_map(
        |(meetings, changes)| {
            let mut out: [Vec<Call>; 4] = Default::default();
            for (rank, axis, kind, root, n) in meetings {
                let (a, b) = match kind {
                    0 => (Call::Send(axis, n), Call::Recv(axis, n)),
                    _ => (Call::Broadcast(axis, root, n), Call::Broadcast(axis, root, n)),
                };
                out[rank].push(a);
                out[other(rank, axis)].push(b);
            }
            for (rank, at, kind) in changes {
                let list = &mut out[rank];
                if list.len() < 2 {
                    continue;
                }
                match kind {
                    0 => drop(list.remove(at.index(list.len()))),
                    _ => {
                        let at = at.index(list.len() - 1);
                        list.swap(at, at + 1);
                    }
                }
            }
            out
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]
    #[test]
    fn the_judge_accepts_exactly_what_plays(programs in calls(), streams in any::<u64>(), lazy in any::<bool>()) {
        let (expected, got) = (plays(&programs), accepts(&programs, streams, lazy));
        prop_assert_eq!(got, expected, "{:?}", programs);
    }
}

#[test]
fn the_cases_hold_both_outcomes() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let sets: Vec<[Vec<Call>; 4]> = (0..300)
        .map(|_| calls().new_tree(&mut runner).unwrap().current())
        .filter(|s| s.concat().len() > 6)
        .collect();
    let good = sets.iter().filter(|s| plays(s)).count();
    assert!(good > 40 && sets.len() - good > 40, "{good} of {}", sets.len());
}

#[test]
fn all_orders_of_two_calls_on_four_ranks() {
    // Every rank calls a broadcast over tp and one over pp, in either order: 16 sets.
    let mut accepted = 0;
    for bits in 0..16usize {
        let order = |r: usize| {
            let mut list = vec![Call::Broadcast(0, 0, 4), Call::Broadcast(1, 0, 4)];
            if bits >> r & 1 == 1 {
                list.reverse();
            }
            list
        };
        let programs = [order(0), order(1), order(2), order(3)];
        assert_eq!(accepts(&programs, 0, true), plays(&programs), "{bits:04b}");
        accepted += usize::from(plays(&programs));
    }
    // Only the two checkerboards of orders close the circle of four.
    assert_eq!(accepted, 14);
}
