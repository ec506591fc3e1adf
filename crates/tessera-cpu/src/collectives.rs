//! The data movement and arithmetic of each collective: safe functions from views of all
//! contributions (see [`crate::transport::Transport::collect`]) and this member's shard to this member's
//! output.
//!
//! Tensors are two-dimensional and row-major; a caller folds other dims into these two. Lengths
//! come from a verified program on whose fingerprint all members have just agreed, so a wrong
//! length panics.

use crate::simd::vectorized;
use crate::transport::MAX_MEMBERS;
use std::ops::Range;
use tessera_mesh::Reduction;
use xxhash_rust::xxh3::xxh3_64;

/// Hashes the description of a collective, so that members can check that they execute the same
/// one.
#[must_use]
pub fn fingerprint_collective(description: &[u8]) -> u64 {
    xxh3_64(description)
}

/// Compensation threshold: if the magnitudes of an element's terms add up to more than this
/// multiple of their sum, at least three decimal digits have cancelled, and the sum is recomputed
/// with compensation.
pub const CANCELLATION_RATIO: f32 = 1024.0;

/// Reduces all views to `out`:
///
/// - `Sum`: ((v0 + v1) + v2) + …
/// - `Tree`: (v0 + v1) + (v2 + v3), and so on upwards; a last term without a neighbour moves up
///   unchanged
/// - `Max`: the maximum; the result is NaN only if all terms are NaN, and of two zeros the first
///   one wins
///
/// Returns the number of elements whose sum was recomputed with compensation because their terms
/// cancelled. A sum of three or more terms in rank order can lose digits that no fixed order
/// recovers; two terms round once and lose nothing.
pub fn all_reduce(out: &mut [f32], views: &[&[f32]], reduction: Reduction) -> u64 {
    assert!(views.iter().all(|v| v.len() == out.len()), "all_reduce of {} elements", out.len());
    reduce_run(out, views, 0, reduction);
    if reduction == Reduction::Sum && views.len() > 2 { compensate_sums(out, views) } else { 0 }
}

/// Reduces all views, each `[rows, columns]`, and writes the part `range` along `dim` to `out`.
pub fn reduce_scatter(
    out: &mut [f32],
    views: &[&[f32]],
    (rows, columns): (usize, usize),
    dim: usize,
    range: Range<usize>,
    reduction: Reduction,
) {
    assert!(dim < 2 && range.end <= [rows, columns][dim]);
    assert!(views.iter().all(|v| v.len() == rows * columns));
    if dim == 0 {
        assert_eq!(out.len(), range.len() * columns);
        return reduce_run(out, views, range.start * columns, reduction);
    }
    assert_eq!(out.len(), range.len() * rows);
    if range.is_empty() {
        return;
    }
    for (r, row) in out.chunks_exact_mut(range.len()).enumerate() {
        reduce_run(row, views, r * columns + range.start, reduction);
    }
}

/// Gathers `out[rows, columns]` from shards: member m contributes `parts[m]` of `dim`.
pub fn all_gather(
    out: &mut [f32],
    views: &[&[f32]],
    (rows, columns): (usize, usize),
    dim: usize,
    parts: &[Range<usize>],
) {
    assert!(dim < 2 && parts.len() == views.len() && out.len() == rows * columns);
    for (view, part) in views.iter().zip(parts) {
        if dim == 0 {
            out[part.start * columns..part.end * columns].copy_from_slice(view);
            continue;
        }
        assert_eq!(view.len(), rows * part.len());
        for r in 0..rows {
            out[r * columns..][part.clone()].copy_from_slice(&view[r * part.len()..][..part.len()]);
        }
    }
}

/// Changes the sharded dim. Before, member m has `concat[m]` of dim `concat_dim` and all of the
/// other dim; after, it has `split[m]` of the other dim and all of `concat_dim`. `(rows, columns)`
/// is the shape of the unsharded tensor.
pub fn all_to_all<C: Contribution>(
    out: &mut [f32],
    views: &[C],
    me: usize,
    (rows, columns): (usize, usize),
    concat_dim: usize,
    concat: &[Range<usize>],
    split: &[Range<usize>],
) {
    assert!(concat_dim < 2 && concat.len() == views.len() && split.len() == views.len());
    let mine = split[me].clone();
    for (view, part) in views.iter().zip(concat) {
        if concat_dim == 0 {
            assert!(view.element_count() == part.len() * columns && out.len() == rows * mine.len());
            for (i, r) in part.clone().enumerate() {
                view.copy_to(&mut out[r * mine.len()..][..mine.len()], i * columns + mine.start);
            }
        } else {
            assert!(view.element_count() == part.len() * rows && out.len() == columns * mine.len());
            for (i, r) in mine.clone().enumerate() {
                view.copy_to(&mut out[i * columns..][part.clone()], r * part.len());
            }
        }
    }
}

/// What a member passed to an exchange, read by the index of its elements.
pub trait Contribution {
    /// Returns the number of elements that the contribution stands for.
    fn element_count(&self) -> usize;
    /// Copies the elements from `from` on, as many as `out` has.
    fn copy_to(&self, out: &mut [f32], from: usize);
}

impl Contribution for &[f32] {
    fn element_count(&self) -> usize {
        self.len()
    }

    fn copy_to(&self, out: &mut [f32], from: usize) {
        out.copy_from_slice(&self[from..][..out.len()]);
    }
}

/// Copies the contribution of member `from` to `out`: a broadcast, or the receiving side of a send.
/// The other members contribute nothing.
pub fn copy_from_member(out: &mut [f32], views: &[&[f32]], from: usize) {
    out.copy_from_slice(views[from]);
}

/// Number of elements reduced at a time: this many elements of all views stay in the L1 cache.
const RUN_ELEMENTS: usize = 1024;

/// Reduces the views, starting at `offset`, to `out`.
fn reduce_run(out: &mut [f32], views: &[&[f32]], offset: usize, reduction: Reduction) {
    assert!((1..=MAX_MEMBERS).contains(&views.len()));
    for (i, o) in out.chunks_mut(RUN_ELEMENTS).enumerate() {
        let at = offset + i * RUN_ELEMENTS;
        let into: fn(&mut [f32], &[f32]) = match reduction {
            Reduction::Sum => add_into,
            Reduction::Max => max_into,
            Reduction::Tree => {
                tree_reduce(o, views, at);
                continue;
            }
        };
        o.copy_from_slice(&views[0][at..at + o.len()]);
        for v in &views[1..] {
            into(o, &v[at..at + o.len()]);
        }
    }
}

/// Recomputes with Neumaier's algorithm each element whose terms cancelled. The result is the same
/// on every member, because all members see the same terms.
fn compensate_sums(out: &mut [f32], views: &[&[f32]]) -> u64 {
    let mut count = 0;
    let mut magnitude = [0.0; RUN_ELEMENTS];
    for (i, o) in out.chunks_mut(RUN_ELEMENTS).enumerate() {
        let (at, m) = (i * RUN_ELEMENTS, &mut magnitude[..o.len()]);
        m.fill(0.0);
        for v in views {
            add_magnitude(m, &v[at..at + o.len()]);
        }
        for (j, o) in o.iter_mut().enumerate() {
            if m[j] > CANCELLATION_RATIO * o.abs() {
                *o = neumaier_sum(views.iter().map(|v| v[at + j]));
                count += 1;
            }
        }
    }
    count
}

fn neumaier_sum(terms: impl Iterator<Item = f32>) -> f32 {
    let (mut sum, mut lost) = (0.0f32, 0.0f32);
    for x in terms {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    sum + lost
}

fn tree_reduce(out: &mut [f32], views: &[&[f32]], at: usize) {
    let [view] = views else {
        let (left, right) = views.split_at(views.len().next_power_of_two() / 2);
        tree_reduce(out, left, at);
        if let [right] = right {
            return add_into(out, &right[at..at + out.len()]);
        }
        let mut other = [0.0; RUN_ELEMENTS];
        let other = &mut other[..out.len()];
        tree_reduce(other, right, at);
        return add_into(out, other);
    };
    out.copy_from_slice(&view[at..at + out.len()]);
}

vectorized! {
    fn add_magnitude(out: &mut [f32], x: &[f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o += x.abs();
        }
    }
}

vectorized! {
    fn add_into(out: &mut [f32], x: &[f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o += x;
        }
    }
}

vectorized! {
    // Written out because the result of `f32::max` for two zeros depends on the vector unit.
    fn max_into(out: &mut [f32], x: &[f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = if *x > *o || o.is_nan() { *x } else { *o };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns members' terms that cancel: large ones of both signs around small ones.
    fn cancelling_terms(members: usize, elements: usize) -> Vec<Vec<f32>> {
        let term = |m: usize, e: usize| {
            let small = 1.0 + (m * 31 + e * 17) as f32 / 1000.0;
            let large = 3.0e6 * (1.0 + (e % 7) as f32 + (m / 2) as f32);
            match m % 2 {
                0 if m + 1 < members => large + small,
                1 => -large,
                _ => small,
            }
        };
        (0..members).map(|m| (0..elements).map(|e| term(m, e)).collect()).collect()
    }

    #[test]
    fn cancelling_terms_are_summed_with_compensation_and_counted() {
        let terms = cancelling_terms(72, 1500);
        let views: Vec<&[f32]> = terms.iter().map(Vec::as_slice).collect();
        let mut out = vec![0.0; 1500];
        assert_eq!(all_reduce(&mut out, &views, Reduction::Sum), 1500);
        let (mut worst, mut worst_plain) = (0.0f64, 0.0f64);
        for (e, o) in out.iter().enumerate() {
            let exact: f64 = terms.iter().map(|t| f64::from(t[e])).sum();
            let plain = terms.iter().fold(0.0f32, |s, t| s + t[e]);
            worst = worst.max((f64::from(*o) - exact).abs() / exact.abs());
            worst_plain = worst_plain.max((f64::from(plain) - exact).abs() / exact.abs());
        }
        assert!(worst < 4.0 * f64::from(f32::EPSILON), "{worst:e}");
        assert!(worst_plain > 1000.0 * worst, "the series is ill-conditioned: {worst_plain:e}");
    }

    #[test]
    fn ordinary_terms_keep_their_rank_order_sum() {
        let terms: Vec<Vec<f32>> =
            (0..5).map(|m| (0..300).map(|e| (m * e) as f32 * 0.37 + 1.0).collect()).collect();
        let views: Vec<&[f32]> = terms.iter().map(Vec::as_slice).collect();
        let mut out = vec![0.0; 300];
        assert_eq!(all_reduce(&mut out, &views, Reduction::Sum), 0);
        assert!(
            out.iter()
                .enumerate()
                .all(|(e, o)| *o == terms.iter().skip(1).fold(terms[0][e], |s, t| s + t[e]))
        );
    }
    #[test]
    fn max_handles_nan_and_signed_zeros() {
        let nan = f32::NAN;
        let views: [&[f32]; 3] = [
            &[1.0, -3.0, nan, nan, 0.0, -0.0],
            &[2.0, -1.0, nan, 5.0, -0.0, 0.0],
            &[-9.0, -2.0, nan, nan, 0.0, 0.0],
        ];
        let mut out = [0.0; 6];
        assert_eq!(all_reduce(&mut out, &views, Reduction::Max), 0);
        assert_eq!((&out[..2], out[2].is_nan(), &out[3..]), (&[2.0, -1.0][..], true, &[5.0, 0.0, 0.0][..]));
        assert_eq!([out[4], out[5]].map(f32::to_bits), [0.0f32, -0.0].map(f32::to_bits));
        let mut half = [0.0; 3];
        reduce_scatter(&mut half, &views, (2, 3), 0, 1..2, Reduction::Max);
        assert_eq!(half.map(f32::to_bits), [out[3], out[4], out[5]].map(f32::to_bits));
    }

    #[test]
    fn incomplete_trees_reduce_in_order() {
        let terms: Vec<[f32; 2]> =
            (0..7).map(|m| [10f32.powi(m - 3) * 1.7, 1.0 / (m as f32 - 2.3)]).collect();
        let views: Vec<&[f32]> = terms.iter().map(|t| &t[..]).collect();
        for members in [1, 3, 5, 6, 7] {
            let mut out = [0.0; 2];
            all_reduce(&mut out, &views[..members], Reduction::Tree);
            let t = |m: usize, e: usize| terms[m][e];
            let pair = |m: usize, e: usize| t(m, e) + t(m + 1, e);
            let want = [0, 1].map(|e| match members {
                1 => t(0, e),
                3 => pair(0, e) + t(2, e),
                5 => (pair(0, e) + pair(2, e)) + t(4, e),
                6 => (pair(0, e) + pair(2, e)) + pair(4, e),
                _ => (pair(0, e) + pair(2, e)) + (pair(4, e) + t(6, e)),
            });
            assert_eq!(out.map(f32::to_bits), want.map(f32::to_bits), "{members} members");
        }
    }
}
