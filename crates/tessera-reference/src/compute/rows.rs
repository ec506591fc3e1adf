//! Reference semantics of the ops that select, pad and compact rows.

use tessera_ir::views;
use tessera_mesh::Group;

use super::{OpContext, TensorResult};
use crate::Tensor;
use crate::collectives::{no_group_error, take_shard};

pub(super) fn take_rows(cx: &OpContext<'_>, v: &views::TakeRows) -> TensorResult {
    let (x, row, rows) = (cx.tensor(v.x)?, v.row, v.rows);
    x.slice(0, row as usize, rows as usize)
        .ok_or_else(|| format!("rows {rows} from {row} are outside {:?}", x.shape()))
}

pub(super) fn embed(cx: &OpContext<'_>, v: &views::Embed) -> TensorResult {
    let (ids, table) = (cx.tensor(v.ids)?, cx.tensor(v.table)?);
    let [rows, d] = table.shape()[..] else {
        return Err(format!("table {:?} is not a matrix", table.shape()));
    };
    let position = cx.position(v.table);
    let (first, all) = (position.global_row(0), position.global[0]);
    if let Some(id) = ids.data().iter().find(|id| id.fract() != 0.0 || **id < 0.0 || **id >= all as f64) {
        return Err(format!("id {id} is not a row of a table with {all} rows"));
    }
    Ok(Tensor::from_fn(&[ids.data().len(), d], |i| match (ids.data()[i / d] as usize).checked_sub(first) {
        Some(row) if row < rows => table.row(row)[i % d],
        _ => 0.0,
    }))
}

pub(super) fn take_own_shard(cx: &OpContext<'_>, v: &views::TakeShard) -> TensorResult {
    let group = cx.op.comm_group().filter(|g| *g != Group::World).ok_or("names no mesh axis")?;
    let at = cx.mesh.group_position(cx.rank, group).ok_or_else(|| no_group_error(cx.mesh, group))?;
    let (x, parts) = (cx.tensor(v.x)?, cx.mesh.group_size(group));
    take_shard(x, v.dim, v.unit as usize, parts as usize, at as usize)
        .ok_or_else(|| format!("dim {} of {:?} cannot be sharded in units of {}", v.dim, x.shape(), v.unit))
}

pub(super) fn pad_rows(cx: &OpContext<'_>, v: &views::Pad) -> TensorResult {
    let (x, dim, rows) = (cx.tensor(v.x)?, v.dim, v.rows as usize);
    let mut shape = x.shape().to_vec();
    let have = *shape.get(dim).ok_or_else(|| format!("no dim {dim} in {shape:?}"))?;
    let missing =
        rows.checked_sub(have).ok_or_else(|| format!("{have} rows exceed the padded size {rows}"))?;
    shape[dim] = missing;
    let pieces = [x.clone(), Tensor::full(&shape, 0.0)];
    Tensor::concat(dim, &pieces).ok_or_else(|| format!("cannot pad {:?}", x.shape()))
}

pub(super) fn compact_rows(cx: &OpContext<'_>, v: &views::Compact) -> TensorResult {
    let x = cx.tensor(v.x)?;
    let (extent, parts, unit) = (v.extent as usize, v.parts as usize, v.unit as usize);
    let dim = v.dim as usize;
    let have = *x.shape().get(dim).ok_or_else(|| format!("no dim {dim} in {:?}", x.shape()))?;
    if !have.is_multiple_of(parts) || !extent.is_multiple_of(unit) {
        return Err(format!("{have} rows are not divisible into {parts} shards"));
    }
    let (units, each) = (extent / unit, have / parts);
    // Shards are as even as whole units permit, longer ones first.
    let pieces: Option<Vec<Tensor>> = (0..parts)
        .map(|i| {
            let len = (units / parts + usize::from(i < units % parts)) * unit;
            if len > each { None } else { x.slice(dim, i * each, len) }
        })
        .collect();
    pieces
        .and_then(|p| Tensor::concat(dim, &p))
        .ok_or_else(|| format!("{have} rows do not hold {extent} in {parts} shards"))
}
