//! Reference semantics of rotary embeddings and of attention.

use tessera_ir::views;

use super::{OpContext, TensorResult, matrix_extents, row_extents};
use crate::Tensor;

pub(super) fn rope(cx: &OpContext<'_>, v: &views::Rope) -> TensorResult {
    let (x, start) = (cx.tensor(v.x)?, cx.int(v.start)? as f64);
    let ((n, d), hd) = (matrix_extents(x)?, v.head_dim as usize);
    let [_, gh, gw] = v.grid.map(|n| n as usize);
    if !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
        return Err(format!("heads of {hd} do not divide rows of {d} into pairs"));
    }
    let first_token = v.first_row as usize + cx.position(v.x).global_row(0);
    let spatial = 2 * (hd / 6);
    let widths = [hd - 2 * spatial, spatial, spatial];
    let mut y = x.clone();
    for i in 0..n {
        let row = first_token + i;
        // With a frame stride of 0, all rows have the frame position `start` and no position in
        // the grid.
        let at = match v.frame_stride {
            0 => [start, 0.0, 0.0],
            s => [start + s as f64 * (row / (gh * gw)) as f64, (row / gw % gh) as f64, (row % gw) as f64],
        };
        for head in 0..d / hd {
            let mut column = i * d + head * hd;
            for (position, width) in at.into_iter().zip(widths) {
                for pair in 0..width / 2 {
                    let angle = position / 10000f64.powf(2.0 * pair as f64 / width as f64);
                    let (a, b) = (x.data()[column], x.data()[column + 1]);
                    y.data_mut()[column] = a * angle.cos() - b * angle.sin();
                    y.data_mut()[column + 1] = a * angle.sin() + b * angle.cos();
                    column += 2;
                }
            }
        }
    }
    Ok(y)
}

pub(super) fn attention(cx: &OpContext<'_>, v: &views::Attention) -> TensorResult {
    let (queries, keys, values) = (cx.tensor(v.q)?, cx.tensor(v.k)?, cx.tensor(v.v)?);
    let ((n, d), (r, dk)) = (row_extents(queries)?, row_extents(keys)?);
    let hd = v.head_dim as usize;
    if d != dk || row_extents(values)? != (r, d) || !d.is_multiple_of(hd) {
        return Err(format!("q {:?} k {:?} v {:?}", queries.shape(), keys.shape(), values.shape()));
    }
    let biased = match (v.bias, &v.bias_rows) {
        (Some(b), Some(rows)) => Some((cx.scalar(b)?, rows)),
        (None, None) => None,
        _ => return Err("`bias` and `bias_rows` must be given together".to_string()),
    };
    let mut y = Tensor::full(queries.shape(), 0.0);
    for i in 0..n {
        for h in (0..d).step_by(hd) {
            let q = &queries.row(i)[h..h + hd];
            let scores: Vec<f64> = (0..r)
                .map(|j| {
                    let dot: f64 = q.iter().zip(&keys.row(j)[h..h + hd]).map(|(a, b)| a * b).sum();
                    let extra = match &biased {
                        Some((b, rows)) if rows.contains(&(j as u64)) => *b,
                        _ => 0.0,
                    };
                    dot / (hd as f64).sqrt() + extra
                })
                .collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = scores.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for c in h..h + hd {
                let sum: f64 = (0..r).map(|j| weights[j] * values.row(j)[c]).sum();
                y.data_mut()[i * d + c] = sum / total;
            }
        }
    }
    Ok(y)
}

pub(super) fn relative_attention(cx: &OpContext<'_>, v: &views::RelativeAttention) -> TensorResult {
    let (queries, keys, values) = (cx.tensor(v.q)?, cx.tensor(v.k)?, cx.tensor(v.v)?);
    let (table, hd) = (cx.tensor(v.table)?, v.head_dim as usize);
    let ((n, d), (r, dk), (buckets, heads)) =
        (matrix_extents(queries)?, matrix_extents(keys)?, matrix_extents(table)?);
    if d != dk || values.shape() != [r, d] || heads * hd != d {
        return Err(format!(
            "q {:?} k {:?} v {:?}, {heads} heads of {hd}",
            queries.shape(),
            keys.shape(),
            values.shape()
        ));
    }
    let length = cx.int(v.length)?;
    if length < 1 || length as u64 > r as u64 {
        return Err(format!("`length` is {length}, but there are {r} keys"));
    }
    let mut y = Tensor::full(&[n, d], 0.0);
    for i in 0..n {
        for h in 0..heads {
            let columns = h * hd..(h + 1) * hd;
            let weights: Vec<f64> = (0..length as usize)
                .map(|j| {
                    let (q, k) = (&queries.row(i)[columns.clone()], &keys.row(j)[columns.clone()]);
                    let dot: f64 = q.iter().zip(k).map(|(a, b)| a * b).sum();
                    dot + table.row(distance_bucket(i, j, buckets, v.max_distance))[h]
                })
                .collect();
            let top = weights.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let weights: Vec<f64> = weights.iter().map(|s| (s - top).exp()).collect();
            let total: f64 = weights.iter().sum();
            for c in columns {
                let sum: f64 = weights.iter().enumerate().map(|(j, w)| w * values.row(j)[c]).sum();
                y.data_mut()[i * d + c] = sum / total;
            }
        }
    }
    Ok(y)
}

/// Returns the bucket of the key at `j` for the query at `i`: the first half of the buckets holds
/// the keys up to the query, the second half those after it.
fn distance_bucket(i: usize, j: usize, buckets: usize, max_distance: u64) -> usize {
    let half = buckets / 2;
    let (distance, exact) = (i.abs_diff(j), half / 2);
    let bucket = if distance < exact {
        distance
    } else {
        let e = exact as f64;
        let share = (distance as f64 / e).ln() / (max_distance as f64 / e).ln();
        (exact + (share * (half - exact) as f64) as usize).min(half - 1)
    };
    if j > i { half + bucket } else { bucket }
}
