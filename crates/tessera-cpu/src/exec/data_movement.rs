//! Small kernels that only add or move elements.

use std::ops::Range;

use tessera_device::Fault;

/// Adds the table to each row of the embedding, which repeats if the table is wider.
pub(super) fn add_modulation(out: &mut [f32], table: &[f32], embedding: &[f32], width: usize) {
    let rows = embedding.len() / width;
    for (r, o) in out.chunks_exact_mut(table.len()).enumerate().take(rows) {
        let e = &embedding[r * width..(r + 1) * width];
        for (o, t) in o.chunks_mut(width).zip(table.chunks(width)) {
            for ((o, t), e) in o.iter_mut().zip(t).zip(e) {
                *o = t + e;
            }
        }
    }
}

/// Copies the part of `x` that a range of one dim covers.
pub(super) fn take_range(out: &mut [f32], x: &[f32], shape: &[u64], dim: usize, range: Range<usize>) {
    let run = shape[dim + 1..].iter().product::<u64>() as usize;
    let (whole, part) = (shape[dim] as usize * run, range.len() * run);
    for (o, x) in out.chunks_exact_mut(part).zip(x.chunks_exact(whole)) {
        o.copy_from_slice(&x[range.start * run..][..part]);
    }
}

/// Copies row `ids[i]` of `table`, widened to f32, to row i of `out`.
pub(super) fn take_rows_by_id<T>(
    out: &mut [f32],
    ids: &[f32],
    table: &[T],
    rows: TableRows,
    widen: impl Fn(&T) -> f32,
) -> Result<(), Fault> {
    let width = (out.len() / ids.len().max(1)).max(1);
    for (o, id) in out.chunks_exact_mut(width).zip(ids) {
        if id.fract() != 0.0 || !(0.0..rows.all as f32).contains(id) {
            return Err(Fault::Failed(format!("id {id} is not a row of a table with {} rows", rows.all)));
        }
        let row =
            (*id as usize).checked_sub(rows.first).and_then(|row| table.get(row * width..)?.get(..width));
        match row {
            Some(row) => o.iter_mut().zip(row).for_each(|(o, x)| *o = widen(x)),
            None => o.fill(0.0),
        }
    }
    Ok(())
}

/// The rows of a table of which this rank may hold a shard.
#[derive(Debug, Clone, Copy)]
pub(super) struct TableRows {
    /// First row that this rank holds.
    pub(super) first: usize,
    /// Rows of the whole table.
    pub(super) all: usize,
}

/// Copies blocks of `have` elements of `x` to blocks of `want`, and fills the rest of each with zeros.
pub(super) fn pad_zeros(out: &mut [f32], x: &[f32], (have, want): (usize, usize)) {
    for (to, from) in out.chunks_exact_mut(want).zip(x.chunks_exact(have)) {
        to[..have].copy_from_slice(from);
        to[have..].fill(0.0);
    }
}

/// Copies the rows of `parts` padded shards without their padding; together they have `extent` rows
/// in units of `unit`, and this for each index of the dims before.
pub(super) fn compact_padding(out: &mut [f32], x: &[f32], width: usize, [extent, parts, unit]: [usize; 3]) {
    let units = (extent / unit) as u64;
    let each = (extent / unit).div_ceil(parts) * unit;
    for (out, x) in out.chunks_exact_mut(extent * width).zip(x.chunks_exact(each * parts * width)) {
        for at in 0..parts {
            let (start, len) = tessera_mesh::split_units(units, parts as u32, at as u32);
            let (start, len) = (start as usize * unit * width, len as usize * unit * width);
            out[start..start + len].copy_from_slice(&x[at * each * width..][..len]);
        }
    }
}
