//! Reference semantics of the ops that normalise, modulate and gate rows.

use tessera_ir::{ValueId, views};

use super::{OpContext, TensorResult, matrix_extents, row_extents, vector_data, zip_elements};
use crate::Tensor;

pub(super) fn layer_norm(cx: &OpContext<'_>, v: &views::LayerNorm) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (_, d) = matrix_extents(x)?;
    let (w, b) = (vector_data(cx.tensor(v.w)?, d)?, vector_data(cx.tensor(v.b)?, d)?);
    Ok(Tensor::from_fn(x.shape(), |i| {
        let row = x.row(i / d);
        let (mean, scale) = row_moments(row, v.eps);
        (row[i % d] - mean) * scale * w[i % d] + b[i % d]
    }))
}

pub(super) fn modulation(cx: &OpContext<'_>, v: &views::Modulation) -> TensorResult {
    let (table, embedding) = (cx.tensor(v.table)?, cx.tensor(v.embedding)?);
    let [1, c, d] = table.shape()[..] else {
        return Err(format!("table has shape {:?}, expected [1, c, d]", table.shape()));
    };
    let (f, width) = matrix_extents(embedding)?;
    if width != c * d && width != d {
        return Err(format!("table {:?} does not fit an embedding with {width} columns", table.shape()));
    }
    Ok(Tensor::from_fn(&[f, c * d], |i| {
        let column = i % (c * d);
        table.data()[column] + embedding.row(i / (c * d))[column % width]
    }))
}

pub(super) fn norm_modulate(cx: &OpContext<'_>, v: &views::NormModulate) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (n, d) = matrix_extents(x)?;
    let columns = FrameColumns::new(cx, v.x, v.m, v.first_row, v.frame_rows)?;
    let mut y = x.clone();
    for i in 0..n {
        let (mean, norm) = row_moments(x.row(i), v.eps);
        let (scale, shift) = (columns.of_row(i, d, v.scale)?, columns.of_row(i, d, v.shift)?);
        for (j, y) in y.data_mut()[i * d..(i + 1) * d].iter_mut().enumerate() {
            *y = (*y - mean) * norm * (1.0 + scale[j]) + shift[j];
        }
    }
    Ok(y)
}

pub(super) fn gate_residual(cx: &OpContext<'_>, v: &views::GateResidual) -> TensorResult {
    let (x, added) = (cx.tensor(v.x)?, cx.tensor(v.y)?);
    let sum = zip_elements(x, added, |a, b| a + b)?;
    let Some(m) = v.m else { return Ok(sum) };
    let gate = v.gate.ok_or("`gate` is missing")?;
    let frame_rows = v.frame_rows.ok_or("`frame_rows` is missing")?;
    let columns = FrameColumns::new(cx, v.x, m, v.first_row, frame_rows)?;
    let (n, d) = matrix_extents(x)?;
    let mut y = x.clone();
    for i in 0..n {
        let gate = columns.of_row(i, d, gate)?;
        for (j, y) in y.data_mut()[i * d..(i + 1) * d].iter_mut().enumerate() {
            *y += added.row(i)[j] * gate[j];
        }
    }
    Ok(y)
}

pub(super) fn rms_norm(cx: &OpContext<'_>, v: &views::RmsNorm) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (_, d) = row_extents(x)?;
    let w = vector_data(cx.tensor(v.w)?, d)?;
    Ok(Tensor::from_fn(x.shape(), |i| {
        let row = x.row(i / d);
        let mean = row.iter().map(|x| x * x).sum::<f64>() / d as f64;
        row[i % d] / (mean + v.eps).sqrt() * w[i % d]
    }))
}

pub(super) fn row_square_sum(cx: &OpContext<'_>, v: &views::RowSquareSum) -> TensorResult {
    let xs = [Some(v.x), v.y].into_iter().flatten().map(|x| cx.tensor(x)).collect::<Result<Vec<_>, _>>()?;
    let ((n, _), c) = (matrix_extents(xs[0])?, xs.len());
    if xs.iter().any(|x| matrix_extents(x).map(|(rows, _)| rows) != Ok(n)) {
        return Err("operands have different numbers of rows".to_string());
    }
    Ok(Tensor::from_fn(&[n, c], |i| xs[i % c].row(i / c).iter().map(|x| x * x).sum()))
}

pub(super) fn rms_scale(cx: &OpContext<'_>, v: &views::RmsScale) -> TensorResult {
    let (x, sums, col) = (cx.tensor(v.x)?, cx.tensor(v.square_sums)?, v.col as usize);
    let ((n, d), (n2, cols)) = (matrix_extents(x)?, matrix_extents(sums)?);
    if n != n2 || col >= cols {
        return Err(format!("sums {:?} do not fit column {col} for {n} rows", sums.shape()));
    }
    let w = vector_data(cx.tensor(v.w)?, d)?;
    Ok(Tensor::from_fn(&[n, d], |i| {
        let mean = sums.row(i / d)[col] / v.width as f64;
        x.data()[i] / (mean + v.eps).sqrt() * w[i % d]
    }))
}

/// Returns the mean and the reciprocal standard deviation of a row.
fn row_moments(row: &[f64], eps: f64) -> (f64, f64) {
    let n = row.len() as f64;
    let mean = row.iter().sum::<f64>() / n;
    let variance = row.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    (mean, 1.0 / (variance + eps).sqrt())
}

/// The matrix of per-frame columns of an op, and the global tokens of the op's rows.
struct FrameColumns<'a> {
    m: &'a Tensor,
    /// Global token of the op's row 0.
    first_token: usize,
    frame_rows: usize,
}

impl<'a> FrameColumns<'a> {
    fn new(
        cx: &OpContext<'a>,
        x: ValueId,
        m: ValueId,
        first_row: u64,
        frame_rows: u64,
    ) -> Result<FrameColumns<'a>, String> {
        let first_token = first_row as usize + cx.position(x).global_row(0);
        Ok(FrameColumns { m: cx.tensor(m)?, first_token, frame_rows: frame_rows as usize })
    }

    /// Returns the d-wide column block `block` of the frame that contains local row `i`.
    fn of_row(&self, i: usize, d: usize, block: u64) -> Result<&'a [f64], String> {
        let ((frames, width), block) = (matrix_extents(self.m)?, block as usize);
        let frame = (self.first_token + i) / self.frame_rows;
        if frame >= frames || (block + 1) * d > width {
            return Err(format!("frame {frame}, column block {block} is outside {:?}", self.m.shape()));
        }
        Ok(&self.m.row(frame)[block * d..(block + 1) * d])
    }
}
