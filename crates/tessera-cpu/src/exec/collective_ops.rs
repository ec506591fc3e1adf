//! Collectives of a run: publishes a rank's contribution, collects the result, and turns transport
//! faults into faults of the run.

use std::time::Instant;

use tessera_device::{
    CallData, CommRoute, Fault, MeshRank, Observer, as_matrix, collective_signature, exchanged_shape,
    shard_ranges,
};
use tessera_ir::{CollectiveOp, Op, OpByKind, OpView, Opcode, Program, Type, ValueId, views};
use tessera_mesh::{Axis, AxisLayout};

use super::memory::ValueLocation;
use super::{CpuBackend, PreparedProgram};
use crate::collectives;
use crate::filled_rows::{self, FilledRows};
use crate::halo::{self, ExpectedHalo};
use crate::kernels::round_to_dtype;
use crate::transport::{CommFault, Ticket};
use crate::wire;

impl CpuBackend {
    /// Publishes this rank's contribution to the collective that op number `issue` issues.
    pub(super) fn issue_collective(
        &mut self,
        prepared: &PreparedProgram,
        issue: usize,
        call: &CallData<'_>,
    ) -> Result<IssuedCollective, Fault> {
        let (p, op) = (&*prepared.program, &prepared.program.ops[issue]);
        let at = self.find_endpoint(op)?;
        let deadline = Instant::now() + self.collective_timeout;
        let fingerprint = collectives::fingerprint_collective(collective_signature(p, op).as_bytes());
        let end = &mut self.endpoints[at];
        let contributes = match &prepared.views[issue] {
            OpView::Broadcast(v) => v.root == end.transport.member_index() as u64,
            _ => true,
        };
        let data: &[f32] = match op.operands.first() {
            Some(v) if contributes => {
                self.memory.view_all().view_value(&prepared.locations[v.0 as usize], call)?
            }
            _ => &[],
        };
        let edges = match &prepared.views[issue] {
            OpView::HaloExchange(v) => {
                Some(halo::collect_edge_rows(data, end.transport.member_index(), frame_rows(p.type_of(v.x))))
            }
            _ => None,
        };
        let encoded = match &prepared.views[issue] {
            OpView::AllToAll(v) => encode_exchange(op, v, p.type_of(v.x), data),
            _ => None,
        };
        let data = edges.as_deref().or(encoded.as_deref()).unwrap_or(data);
        let kept = match &prepared.views[issue] {
            OpView::AllToAll(v) => kept_words(p, op, v, (end.transport.member_index(), data)),
            _ => 0,
        };
        let sent_bytes = (size_of::<f32>() * (data.len() - kept)) as u64;
        let end = &mut self.endpoints[at];
        let ticket = end
            .transport
            .publish(fingerprint, data, deadline)
            .map_err(|e| to_fault(p, op, (end.route, &self.placement), &e))?;
        Ok(IssuedCollective { endpoint: at, ticket, sent_bytes })
    }

    /// Writes the result of the collective that op number `issue` issued into the slot of
    /// `result_op`'s result, and checks a halo against the digests of its senders.
    pub(super) fn complete_collective(
        &mut self,
        prepared: &PreparedProgram,
        issue: usize,
        result_op: &Op,
        IssuedCollective { endpoint: at, ticket, .. }: IssuedCollective,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let (p, op) = (&*prepared.program, &prepared.program.ops[issue]);
        let deadline = Instant::now() + self.collective_timeout;
        let mut none = Vec::new();
        let result = result_op.results.first();
        let memory = match result.map(|r| &prepared.locations[r.0 as usize]) {
            Some(ValueLocation::Slot(place)) => &mut self.memory.temporaries[place.to_range()],
            _ => &mut none[..],
        };
        let end = &mut self.endpoints[at];
        let me = end.transport.member_index();
        let mut report = CollectiveReport::default();
        let collected = end.transport.collect(ticket, deadline, &mut |views| {
            if let (Some(r), OpByKind::Collective(collective)) = (result, prepared.views[issue].by_kind()) {
                let cx = ResultContext { program: p, op, out_ty: p.type_of(*r), me };
                report = cx.write_result(collective, memory, views);
            }
        });
        self.compensated_sums += report.compensated_sums;
        // Members add in f32; the sum is rounded once, as on every device.
        if let (Ok(()), Some(r)) = (&collected, result) {
            round_to_dtype(&self.pool, memory, p.type_of(*r).dtype);
        }
        collected.map_err(|e| to_fault(p, op, (end.route, &self.placement), &e))?;
        if let Some(member) = report.invalid_member {
            let name = op.opcode.name();
            return Err(Fault::Failed(format!(
                "{name} over {} in @{}: the mask and the length of member {member}'s contribution differ",
                end.route, p.name
            )));
        }
        let (Some(expected), OpView::HaloExchange(v)) = (report.halo, &prepared.views[issue]) else {
            return Ok(());
        };
        let (_, row) = frame_rows(p.type_of(v.x));
        if self.swaps_halos {
            halo::swap_sides(memory, row);
        }
        match expected.find_difference(memory, row) {
            Some(what) => observer.on_other_halo(issue, &what).map_err(Fault::Refused),
            None => Ok(()),
        }
    }

    fn find_endpoint(&self, op: &Op) -> Result<usize, Fault> {
        CommRoute::from_op(op)
            .and_then(|route| self.endpoints.iter().position(|e| e.route == route))
            .ok_or_else(|| Fault::Failed(format!("no communicator for {} {:?}", op.opcode.name(), op.attrs)))
    }
}

/// A collective in flight.
#[derive(Debug)]
pub(super) struct IssuedCollective {
    /// Index of its endpoint.
    pub(super) endpoint: usize,
    ticket: Ticket,
    /// Bytes that other members receive; what stays on this rank does not count.
    pub(super) sent_bytes: u64,
}

/// Returns the words of an exchange that do not travel as they are: those of slots without the empty ones, or of rows
/// in a narrower dtype.
fn encode_exchange(op: &Op, v: &views::AllToAll, x: &Type, data: &[f32]) -> Option<Vec<f32>> {
    let width = row_width(x);
    match (filled_rows::exchanges_slots(op, x), v.wire.is_some()) {
        (true, true) => Some(filled_rows::pack_rows(data, width, wire::encode_row)),
        (true, false) => Some(filled_rows::pack_rows(data, width, |row, out| out.extend_from_slice(row))),
        (false, true) => Some(wire::encode_rows(data, width)),
        (false, false) => None,
    }
}

/// Returns the words of an exchange's contribution that stay on this rank.
fn kept_words(p: &Program, op: &Op, v: &views::AllToAll, (me, data): (usize, &[f32])) -> usize {
    let (x, Some(axis)) = (p.type_of(v.x), op.mesh_axis()) else { return 0 };
    let Some(out) = p.collective_result(op).map(|r| p.type_of(r)) else { return 0 };
    let parts = p.mesh.axis_size(axis);
    let (concat_dim, _) = shard_ranges(x, axis, parts);
    let (_, split) = shard_ranges(out, axis, parts);
    let (rows, columns) = as_matrix(&x.shape, 1);
    let width = row_width(x).max(1);
    let mine = split[me].clone();
    let kept_rows = move |row: &usize| match concat_dim {
        0 => mine.contains(&(row * width % columns)),
        _ => mine.contains(&(row * width / columns)),
    };
    let all = rows * columns / width;
    if filled_rows::exchanges_slots(op, x) {
        let width = if v.wire.is_some() { wire::words_per_row(width) } else { width };
        return filled_rows::words_of_rows(data, all, width, &mut (0..all).filter(kept_rows));
    }
    // Without packing every row has as many words, and a part of the columns may stay.
    let kept = if concat_dim == 0 { rows * split[me].len() } else { split[me].len() * columns };
    data.len() * kept / (rows * columns).max(1)
}

/// Returns the largest number of bytes that a member passes to a collective, which a slot of its communicator must
/// hold.
#[must_use]
pub fn contribution_bytes(p: &Program, op: &Op) -> u64 {
    // Members pass numbers of every dtype as f32.
    let bytes = |v: ValueId| p.type_of(v).element_count() * size_of::<f32>() as u64;
    match (op.opcode, op.operands.first()) {
        // A halo exchange passes the first and the last row of each frame, as many as it receives.
        (Opcode::HaloExchange, _) => halo::contribution_bytes(p.collective_result(op).map_or(0, bytes)),
        (_, Some(x)) if filled_rows::exchanges_slots(op, p.type_of(*x)) => {
            let ty = p.type_of(*x);
            let rows = ty.element_count() as usize / row_width(ty).max(1);
            bytes(*x) + (size_of::<f32>() * filled_rows::mask_words(rows)) as u64
        }
        (_, operand) => operand.map_or(0, |v| bytes(*v)),
    }
}

/// What the computation of a collective's result found.
#[derive(Debug, Default)]
struct CollectiveReport {
    compensated_sums: u64,
    /// What the result of a halo exchange must be.
    halo: Option<ExpectedHalo>,
    /// A member whose contribution cannot be read.
    invalid_member: Option<usize>,
}

/// A collective whose result is computed.
struct ResultContext<'a> {
    program: &'a Program,
    op: &'a Op,
    out_ty: &'a Type,
    /// Position of this rank in the group.
    me: usize,
}

impl ResultContext<'_> {
    /// Computes a collective's result from the members' contributions.
    fn write_result(
        &self,
        collective: CollectiveOp<'_>,
        out: &mut [f32],
        contributions: &[&[f32]],
    ) -> CollectiveReport {
        use CollectiveOp as V;
        let (p, out_ty, views) = (self.program, self.out_ty, contributions);
        let parts = views.len() as u32;
        let mut report = CollectiveReport::default();
        match (collective, self.op.mesh_axis().or_else(|| self.sharded_axis())) {
            (V::AllReduce(v), _) => {
                report.compensated_sums = collectives::all_reduce(out, views, v.reduction);
            }
            (V::AllGather(v), Some(axis)) => {
                let (dim, parts) = shard_ranges(p.type_of(v.x), axis, parts);
                collectives::all_gather(out, views, as_matrix(&out_ty.shape, dim), dim.min(1), &parts);
            }
            (V::ReduceScatter(v), Some(axis)) => {
                let (dim, parts) = shard_ranges(out_ty, axis, parts);
                let (shape, own) = (as_matrix(&p.type_of(v.x).shape, dim), parts[self.me].clone());
                collectives::reduce_scatter(out, views, shape, dim.min(1), own, v.reduction);
            }
            (V::AllToAll(v), Some(axis)) => report.invalid_member = self.write_exchange(v, axis, out, views),
            (V::HaloExchange(v), _) => {
                let (_, row) = frame_rows(p.type_of(v.x));
                report.halo = Some(halo::write_halo(out, views, self.me, row));
            }
            (V::Broadcast(v), _) => collectives::copy_from_member(out, views, v.root as usize),
            // Member 0 of a transfer is the sender.
            (V::Send(_) | V::Recv(_), _) => collectives::copy_from_member(out, views, 0),
            // The rules reject a gather, scatter or exchange of a value that no axis shards.
            (V::AllGather(_) | V::ReduceScatter(_) | V::AllToAll(_), None) => {}
        }
        report
    }

    /// Writes the result of an exchange. Returns a member whose contribution cannot be read.
    fn write_exchange(
        &self,
        v: &views::AllToAll,
        axis: Axis,
        out: &mut [f32],
        contributions: &[&[f32]],
    ) -> Option<usize> {
        let parts = contributions.len() as u32;
        let (packs, width) =
            (filled_rows::exchanges_slots(self.op, self.program.type_of(v.x)), row_width(self.out_ty));
        let words_per_row = if v.wire.is_some() { wire::words_per_row(width) } else { width };
        // The words of rows take the place of their elements: no rule shards the last dim here.
        let with_words = |ty: &Type| {
            let mut shape = ty.shape.clone();
            if v.wire.is_some() {
                shape.pop();
                shape.push(words_per_row as u64);
            }
            Type { shape, ..ty.clone() }
        };
        let (x, words_ty) = (with_words(self.program.type_of(v.x)), with_words(self.out_ty));
        let (dim, concat) = shard_ranges(&x, axis, parts);
        let (_, split) = shard_ranges(&words_ty, axis, parts);
        let whole = as_matrix(&exchanged_shape(&x, &words_ty), 1);
        let mut decoded = Vec::new();
        let words = match v.wire {
            Some(_) => {
                decoded.resize(words_ty.element_count() as usize, 0.0);
                &mut decoded[..]
            }
            None => &mut *out,
        };
        if packs {
            let other = if dim == 0 { whole.1 } else { whole.0 };
            let mut read = Vec::with_capacity(contributions.len());
            for (member, (part, view)) in concat.iter().zip(contributions).enumerate() {
                let rows = part.len() * other / words_per_row.max(1);
                match FilledRows::read(view, rows, words_per_row) {
                    Some(filled) => read.push(filled),
                    None => return Some(member),
                }
            }
            collectives::all_to_all(words, &read, self.me, whole, dim, &concat, &split);
        } else {
            collectives::all_to_all(words, contributions, self.me, whole, dim, &concat, &split);
        }
        if v.wire.is_some() {
            wire::decode_rows(out, &decoded, width);
        }
        None
    }

    /// Returns the axis that shards the operand or the result. An op over the world names no axis; the
    /// verifier refuses it for shards, so only a program that a drill has changed contains one.
    fn sharded_axis(&self) -> Option<Axis> {
        let operand = self.op.operands.first().map(|v| self.program.type_of(*v));
        let types = operand.into_iter().chain([self.out_ty]);
        types
            .flat_map(|t| self.program.mesh.active_axes().map(move |a| (t, a)))
            .find_map(|(t, a)| matches!(t.layout.on_axis(a), AxisLayout::Shard(_)).then_some(a))
    }
}

/// Returns the extent of the last dim.
fn row_width(ty: &Type) -> usize {
    ty.shape.last().map_or(1, |n| *n as usize)
}

/// Returns the rows of each frame of a value [t, h, w, c] and the elements of a row.
fn frame_rows(ty: &Type) -> (usize, usize) {
    let extent = |dim: usize| ty.shape.get(dim).map_or(1, |n| *n as usize);
    (extent(1), extent(2) * extent(3))
}

fn to_fault(p: &Program, op: &Op, (route, own): (CommRoute, &MeshRank), e: &CommFault) -> Fault {
    let place = format!("{} over {route} in @{}", op.opcode.name(), p.name);
    match e {
        // A closed peer did not fail here: another channel reports how its process ended. If none does,
        // only the link is lost, and this text is all that an operator learns of it.
        CommFault::Disconnected { peer, how, .. } => {
            let members = route.communicator_of(&own.mesh, own.rank).map(|c| c.members);
            let other = match members.as_ref().and_then(|m| m.get(*peer)) {
                Some(rank) => format!("rank {rank}"),
                None => format!("member {peer}"),
            };
            Fault::Aborted(format!("rank {} lost its data link to {other} in {place}: {how}", own.rank))
        }
        CommFault::Aborted { .. } => Fault::Aborted(format!("{place}: {e}")),
        CommFault::Timeout { .. } => Fault::Stalled(format!("{place}: {e}")),
        _ => Fault::Failed(format!("{place}: {e}")),
    }
}
