//! What each collective makes of its members' contributions: safe functions from views of all of them (see
//! [`crate::arena::Arena::collect`]) and this member's part to this member's output.
//!
//! Tensors are two-dimensional, row-major; a caller folds other dims into these. Lengths are those of a
//! verified program whose fingerprint all members have just agreed on, so a wrong one panics.

use crate::arena::MAX_MEMBERS;
use crate::simd::vectorized;
use std::ops::Range;
use tessera_mesh::Reduction;
use xxhash_rust::xxh3::xxh3_64;

/// Names a collective for the comparison between members: a hash of whatever describes it.
#[must_use]
pub fn fingerprint(description: &[u8]) -> u64 {
    xxh3_64(description)
}

/// Terms whose magnitudes add up to more than this many times their sum have cancelled at least three decimal
/// digits, and their sum is taken again with compensation.
pub const CANCELLED: f32 = 1024.0;

/// `out`: all views as one, by
///
/// - `Sum`: ((v0 + v1) + v2) + …
/// - `Tree`: (v0 + v1) + (v2 + v3), and so on upwards; a last one without a neighbour goes up as it is
/// - `Max`: the largest; what is no number counts only where all are none, and of two zeros the first stays
///
/// Gives back how many elements were summed with compensation because their terms cancelled. In rank order three
/// terms or more can lose what a fixed order alone cannot give back; two terms round once and lose nothing.
pub fn all_reduce(out: &mut [f32], views: &[&[f32]], reduction: Reduction) -> u64 {
    assert!(views.iter().all(|v| v.len() == out.len()), "all_reduce of {} elements", out.len());
    reduce_run(out, views, 0, reduction);
    if reduction == Reduction::Sum && views.len() > 2 { compensate(out, views) } else { 0 }
}

/// `out`: the part `range` along `dim` of all views as one, each `[rows, columns]`.
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

/// `out[rows, columns]` from parts: member m holds `parts[m]` of `dim`.
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

/// Exchanges which dim is cut. Before, member m holds `concat[m]` of dim `concat_dim` and all of the other; after, it
/// holds `split[m]` of the other and all of `concat_dim`. `(rows, columns)` are those of the whole.
pub fn all_to_all(
    out: &mut [f32],
    views: &[&[f32]],
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
            assert!(view.len() == part.len() * columns && out.len() == rows * mine.len());
            for (i, r) in part.clone().enumerate() {
                out[r * mine.len()..][..mine.len()].copy_from_slice(&view[i * columns..][mine.clone()]);
            }
        } else {
            assert!(view.len() == part.len() * rows && out.len() == columns * mine.len());
            for (i, r) in mine.clone().enumerate() {
                out[i * columns..][part.clone()].copy_from_slice(&view[r * part.len()..][..part.len()]);
            }
        }
    }
}

/// `out` is the contribution of member `from`: a broadcast, or the receiving side of a send. The others
/// contribute nothing.
pub fn receive(out: &mut [f32], views: &[&[f32]], from: usize) {
    out.copy_from_slice(views[from]);
}

/// Elements reduced at a time: all the views' pieces stay in the nearest cache.
const RUN: usize = 1024;

/// `out`: the views from `offset` on as one.
fn reduce_run(out: &mut [f32], views: &[&[f32]], offset: usize, reduction: Reduction) {
    assert!((1..=MAX_MEMBERS).contains(&views.len()));
    for (i, o) in out.chunks_mut(RUN).enumerate() {
        let at = offset + i * RUN;
        let into: fn(&mut [f32], &[f32]) = match reduction {
            Reduction::Sum => add_into,
            Reduction::Max => max_into,
            Reduction::Tree => {
                tree(o, views, at);
                continue;
            }
        };
        o.copy_from_slice(&views[0][at..at + o.len()]);
        for v in &views[1..] {
            into(o, &v[at..at + o.len()]);
        }
    }
}

/// Sums again, after Neumaier, each element whose terms cancelled. The same on every member: all see the same terms.
fn compensate(out: &mut [f32], views: &[&[f32]]) -> u64 {
    let mut count = 0;
    let mut magnitude = [0.0; RUN];
    for (i, o) in out.chunks_mut(RUN).enumerate() {
        let (at, m) = (i * RUN, &mut magnitude[..o.len()]);
        m.fill(0.0);
        for v in views {
            add_magnitude(m, &v[at..at + o.len()]);
        }
        for (j, o) in o.iter_mut().enumerate() {
            if m[j] > CANCELLED * o.abs() {
                *o = neumaier(views.iter().map(|v| v[at + j]));
                count += 1;
            }
        }
    }
    count
}

fn neumaier(terms: impl Iterator<Item = f32>) -> f32 {
    let (mut sum, mut lost) = (0.0f32, 0.0f32);
    for x in terms {
        let next = sum + x;
        lost += if sum.abs() >= x.abs() { (sum - next) + x } else { (x - next) + sum };
        sum = next;
    }
    sum + lost
}

fn tree(out: &mut [f32], views: &[&[f32]], at: usize) {
    let [view] = views else {
        let (left, right) = views.split_at(views.len().next_power_of_two() / 2);
        tree(out, left, at);
        if let [right] = right {
            return add_into(out, &right[at..at + out.len()]);
        }
        let mut other = [0.0; RUN];
        let other = &mut other[..out.len()];
        tree(other, right, at);
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
    // Spelled out: what `f32::max` makes of two zeros is the vector unit's to choose.
    fn max_into(out: &mut [f32], x: &[f32]) {
        for (o, x) in out.iter_mut().zip(x) {
            *o = if *x > *o || o.is_nan() { *x } else { *o };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Members' terms that cancel: large ones of both signs around small ones.
    fn cancelling(members: usize, elements: usize) -> Vec<Vec<f32>> {
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
        let terms = cancelling(72, 1500);
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
    fn the_largest_is_the_same_whatever_stands_beside_it() {
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
    fn a_tree_need_not_be_full() {
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
