//! Sums over many ranks give the same bits in any order of arrival.

#![allow(clippy::unwrap_used)]

use std::time::{Duration, Instant};

use tessera_base::random::{DrawKey, fill_normals};
use tessera_cpu::arena::Arena;
use tessera_cpu::collectives::{all_reduce, fingerprint_collective, reduce_scatter};
use tessera_cpu::transport::{CommLayout, Transport};
use tessera_mesh::Reduction;

const ELEMENTS: usize = 100;

/// Returns the contribution of each rank. The magnitudes differ widely, so that another order of
/// addition gives other bits.
fn test_terms(ranks: usize) -> Vec<Vec<f32>> {
    (0..ranks)
        .map(|r| {
            let mut x = vec![0.0; ELEMENTS];
            fill_normals(DrawKey { seed: 1, chunk: r as u32, draw: 0 }, 0, &mut x);
            x.iter().map(|v| v * 10f32.powi(r as i32 % 7 - 3)).collect()
        })
        .collect()
}

/// Returns the delay before each rank arrives, different in each run.
fn random_delays(ranks: usize, run: u32) -> Vec<Duration> {
    let mut x = vec![0.0; ranks];
    fill_normals(DrawKey { seed: 2, chunk: run, draw: 0 }, 0, &mut x);
    x.into_iter().map(|v| Duration::from_micros((v.abs() * 500.0) as u64)).collect()
}

/// Runs all ranks on threads with their delays and returns every rank's sum.
fn run_ranks(terms: &[Vec<f32>], run: u32, reduction: Reduction) -> Vec<Vec<f32>> {
    let layout = CommLayout { members: terms.len(), slots: 2, slot_bytes: ELEMENTS * 4 };
    let fd = Arena::create_memfd(layout).unwrap();
    let arenas: Vec<Arena> = (0..terms.len()).map(|m| Arena::attach(&fd, layout, m).unwrap()).collect();
    std::thread::scope(|s| {
        let ranks = arenas.into_iter().zip(random_delays(terms.len(), run));
        let threads: Vec<_> = ranks
            .map(|(mut arena, delay)| {
                s.spawn(move || {
                    std::thread::sleep(delay);
                    let mut out = vec![0.0; ELEMENTS];
                    let (mine, until) =
                        (&terms[arena.member_index()], Instant::now() + Duration::from_secs(30));
                    let mut sum = |views: &[&[f32]]| {
                        all_reduce(&mut out, views, reduction);
                    };
                    arena.publish_and_collect(fingerprint_collective(b"sum"), mine, until, &mut sum).unwrap();
                    out
                })
            })
            .collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

fn to_bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|v| v.to_bits()).collect()
}

fn check_same_bits(ranks: usize, reduction: Reduction, expected_sum: &dyn Fn(&[f32]) -> f32) {
    let terms = test_terms(ranks);
    let expected: Vec<f32> =
        (0..ELEMENTS).map(|i| expected_sum(&terms.iter().map(|t| t[i]).collect::<Vec<_>>())).collect();
    for run in 0..20 {
        for (rank, sum) in run_ranks(&terms, run, reduction).iter().enumerate() {
            assert_eq!(to_bits(sum), to_bits(&expected), "run {run}, rank {rank} of {ranks}");
        }
    }
}

#[test]
fn a_sum_over_72_ranks_has_the_same_bits_in_any_arrival_order() {
    check_same_bits(72, Reduction::Sum, &|x| x[1..].iter().fold(x[0], |s, v| s + v));
}

#[test]
fn a_tree_over_64_ranks_has_the_same_bits_in_any_arrival_order() {
    fn tree(x: &[f32]) -> f32 {
        if x.len() == 1 { x[0] } else { tree(&x[..x.len() / 2]) + tree(&x[x.len() / 2..]) }
    }
    check_same_bits(64, Reduction::Tree, &tree);
}

#[test]
fn the_terms_reveal_another_order() {
    let terms = test_terms(72);
    let views: Vec<&[f32]> = terms.iter().map(Vec::as_slice).collect();
    let backwards: Vec<&[f32]> = views.iter().rev().copied().collect();
    let (mut a, mut b) = (vec![0.0; ELEMENTS], vec![0.0; ELEMENTS]);
    all_reduce(&mut a, &views, Reduction::Sum);
    all_reduce(&mut b, &backwards, Reduction::Sum);
    assert_ne!(to_bits(&a), to_bits(&b));
}

#[test]
fn a_reduce_scatter_is_a_shard_of_the_all_reduce() {
    let terms = test_terms(72);
    let views: Vec<&[f32]> = terms.iter().map(Vec::as_slice).collect();
    let mut whole = vec![0.0; ELEMENTS];
    all_reduce(&mut whole, &views, Reduction::Sum);
    let mut pieces = Vec::new();
    for part in 0..10 {
        let mut out = vec![0.0; ELEMENTS / 10];
        reduce_scatter(&mut out, &views, (ELEMENTS, 1), 0, part * 10..part * 10 + 10, Reduction::Sum);
        pieces.extend(out);
    }
    assert_eq!(to_bits(&pieces), to_bits(&whole));
}
