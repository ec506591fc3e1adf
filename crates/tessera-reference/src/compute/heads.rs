//! Reference semantics of the ops that work on the columns of each head.

use tessera_ir::views;

use super::{OpContext, TensorResult, matrix_extents};
use crate::Tensor;

pub(super) fn head_columns(cx: &OpContext<'_>, v: &views::HeadColumns) -> TensorResult {
    let (x, hd, columns) = (cx.tensor(v.x)?, v.head_dim as usize, v.columns as usize);
    let ((n, d), first) = (matrix_extents(x)?, v.first as usize);
    if !d.is_multiple_of(hd) || first + columns > hd {
        return Err(format!("{columns} columns from {first} on of heads of {hd} in {:?}", x.shape()));
    }
    let out = d / hd * columns;
    Ok(Tensor::from_fn(&[n, out], |i| {
        let (row, head, column) = (i / out, i % out / columns, i % columns);
        x.row(row)[head * hd + first + column]
    }))
}

pub(super) fn head_join(cx: &OpContext<'_>, v: &views::HeadJoin) -> TensorResult {
    let (x, y, hd) = (cx.tensor(v.x)?, cx.tensor(v.y)?, v.head_dim as usize);
    let ((n, d), (rows, dy)) = (matrix_extents(x)?, matrix_extents(y)?);
    if !d.is_multiple_of(hd) || d == 0 || n != rows || !dy.is_multiple_of(d / hd) {
        return Err(format!("{:?} in heads of {hd}, and {:?}", x.shape(), y.shape()));
    }
    let more = dy / (d / hd);
    let (out, joined) = (d + dy, hd + more);
    Ok(Tensor::from_fn(&[n, out], |i| {
        let (row, head, column) = (i / out, i % out / joined, i % out % joined);
        if column < hd { x.row(row)[head * hd + column] } else { y.row(row)[head * more + column - hd] }
    }))
}

pub(super) fn head_matmul(cx: &OpContext<'_>, v: &views::HeadMatmul) -> TensorResult {
    let (x, w, rows) = (cx.tensor(v.x)?, cx.tensor(v.w)?, v.rows as usize);
    let ((n, d), (w_rows, width), of) = (matrix_extents(x)?, matrix_extents(w)?, v.head_rows as usize);
    let heads = w_rows / of;
    let (k, columns) = if v.transposed { (rows, width) } else { (width, rows) };
    if heads * of != w_rows || heads * k != d || v.first as usize + rows > of {
        return Err(format!("x {:?}, w {:?} in heads of {of} rows", x.shape(), w.shape()));
    }
    let out = heads * columns;
    Ok(Tensor::from_fn(&[n, out], |i| {
        let (row, head, column) = (i / out, i % out / columns, i % columns);
        let weight = |j: usize| {
            let (r, c) = if v.transposed { (j, column) } else { (column, j) };
            w.row(head * of + v.first as usize + r)[c]
        };
        (0..k).map(|j| x.row(row)[head * k + j] * weight(j)).sum()
    }))
}
