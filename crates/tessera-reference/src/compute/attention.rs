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
