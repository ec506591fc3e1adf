//! Sums over many ranks: the same bits whoever comes first.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use tessera_base::random::{DrawKey, normals};
use tessera_cpu::arena::{Arena, ArenaLayout};
use tessera_cpu::collectives::{all_reduce, fingerprint, reduce_scatter};
use tessera_mesh::Reduction;

const ELEMENTS: usize = 100;

/// What each rank contributes: magnitudes far apart, so that another order of adding gives other bits.
fn terms(ranks: usize) -> Vec<Vec<f32>> {
    (0..ranks)
        .map(|r| {
            let mut x = vec![0.0; ELEMENTS];
            normals(DrawKey { seed: 1, chunk: r as u32, draw: 0 }, 0, &mut x);
            x.iter().map(|v| v * 10f32.powi(r as i32 % 7 - 3)).collect()
        })
        .collect()
}

/// Delays before each rank comes, another for each run.
fn delays(ranks: usize, run: u32) -> Vec<Duration> {
    let mut x = vec![0.0; ranks];
    normals(DrawKey { seed: 2, chunk: run, draw: 0 }, 0, &mut x);
    x.into_iter().map(|v| Duration::from_micros((v.abs() * 500.0) as u64)).collect()
}

/// All ranks on threads, in the order that their delays make; every rank's sum.
fn one_run(terms: &[Vec<f32>], run: u32, reduction: Reduction) -> Vec<Vec<f32>> {
    let layout = ArenaLayout { members: terms.len(), slots: 2, slot_bytes: ELEMENTS * 4 };
    let fd = Arena::create(layout).unwrap();
    let arenas: Vec<Arena> = (0..terms.len()).map(|m| Arena::attach(&fd, layout, m).unwrap()).collect();
    std::thread::scope(|s| {
        let ranks = arenas.into_iter().zip(delays(terms.len(), run));
        let threads: Vec<_> = ranks
            .map(|(mut arena, delay)| {
                s.spawn(move || {
                    std::thread::sleep(delay);
                    let mut out = vec![0.0; ELEMENTS];
                    let (mine, until) = (&terms[arena.me()], Instant::now() + Duration::from_secs(30));
                    let sum = |views: &[&[f32]]| all_reduce(&mut out, views, reduction);
                    arena.exchange(fingerprint(b"sum"), mine, until, sum).unwrap();
                    out
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn always_the_same(ranks: usize, reduction: Reduction, by_hand: &dyn Fn(&[f32]) -> f32) {
    let terms = terms(ranks);
    let expected: Vec<f32> =
        (0..ELEMENTS).map(|i| by_hand(&terms.iter().map(|t| t[i]).collect::<Vec<_>>())).collect();
    for run in 0..20 {
        for (rank, sum) in one_run(&terms, run, reduction).iter().enumerate() {
            assert_eq!(bits(sum), bits(&expected), "run {run}, rank {rank} of {ranks}");
        }
    }
}

#[test]
fn a_sum_over_72_ranks_has_the_same_bits_whoever_comes_first() {
    always_the_same(72, Reduction::Sum, &|x| x[1..].iter().fold(x[0], |s, v| s + v));
}

#[test]
fn a_tree_over_64_ranks_has_the_same_bits_whoever_comes_first() {
    fn tree(x: &[f32]) -> f32 {
        if x.len() == 1 { x[0] } else { tree(&x[..x.len() / 2]) + tree(&x[x.len() / 2..]) }
    }
    always_the_same(64, Reduction::Tree, &tree);
}

#[test]
fn these_terms_would_show_another_order() {
    let terms = terms(72);
    let views: Vec<&[f32]> = terms.iter().map(Vec::as_slice).collect();
    let backwards: Vec<&[f32]> = views.iter().rev().copied().collect();
    let (mut a, mut b) = (vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]);
    all_reduce(&mut a, &views, Reduction::Sum);
    all_reduce(&mut b, &backwards, Reduction::Sum);
    assert_ne!(bits(&a), bits(&b));
}

#[test]
fn a_scattered_sum_is_a_piece_of_the_whole_one() {
    let terms = terms(72);
    let views: Vec<&[f32]> = terms.iter().map(Vec::as_slice).collect();
    let mut whole = vec![0.0; ELEMENTS];
    all_reduce(&mut whole, &views, Reduction::Sum);
    let mut pieces = Vec::new();
    for part in 0..10 {
        let mut out = vec![0.0; ELEMENTS / 10];
        reduce_scatter(&mut out, &views, (ELEMENTS, 1), 0, part * 10..part * 10 + 10, Reduction::Sum);
        pieces.extend(out);
    }
    assert_eq!(bits(&pieces), bits(&whole));
}
