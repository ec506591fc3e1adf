//! Collectives of a run: publishes a rank's contribution, collects the result, and turns transport
//! faults into faults of the run.

use std::time::Instant;

use tessera_device::{
    CallData, CommRoute, Fault, MeshRank, Observer, as_matrix, collective_signature, shard_ranges,
};
use tessera_ir::{CollectiveOp, Op, OpByKind, OpView, Program, Type};
use tessera_mesh::{Axis, AxisLayout};

use super::memory::ValueLocation;
use super::{CpuBackend, PreparedProgram};
use crate::collectives;
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
    ) -> Result<(usize, Ticket), Fault> {
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
            OpView::AllToAll(v) if v.wire.is_some() => {
                Some(wire::encode_rows(data, row_width(p.type_of(v.x))))
            }
            _ => None,
        };
        let data = edges.as_deref().or(encoded.as_deref()).unwrap_or(data);
        let ticket =
            end.transport.publish(fingerprint, data, deadline).map_err(|e| to_fault(p, op, end.route, &e))?;
        Ok((at, ticket))
    }

    /// Writes the result of the collective that op number `issue` issued into the slot of
    /// `result_op`'s result, and checks a halo against the digests of its senders.
    pub(super) fn complete_collective(
        &mut self,
        prepared: &PreparedProgram,
        issue: usize,
        result_op: &Op,
        (at, ticket): (usize, Ticket),
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let (p, op) = (&*prepared.program, &prepared.program.ops[issue]);
        let deadline = Instant::now() + self.collective_timeout;
        let (seat, mut none) = (self.placement, Vec::new());
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
                let cx = ResultContext { program: p, op, out_ty: p.type_of(*r), placement: &seat, me };
                report = cx.write_result(collective, memory, views);
            }
        });
        self.compensated_sums += report.compensated_sums;
        // Members add in f32; the sum is rounded once, as on every device.
        if let (Ok(()), Some(r)) = (&collected, result) {
            round_to_dtype(&self.pool, memory, p.type_of(*r).dtype);
        }
        collected.map_err(|e| to_fault(p, op, end.route, &e))?;
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

/// What the computation of a collective's result found.
#[derive(Debug, Default)]
struct CollectiveReport {
    compensated_sums: u64,
    /// What the result of a halo exchange must be.
    halo: Option<ExpectedHalo>,
}

/// A collective whose result is computed.
struct ResultContext<'a> {
    program: &'a Program,
    op: &'a Op,
    out_ty: &'a Type,
    placement: &'a MeshRank,
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
            (V::AllToAll(v), Some(axis)) if v.wire.is_some() => {
                let width = row_width(out_ty);
                // The words of rows take the place of their elements: no rule shards the last dim here.
                let with_words = |ty: &Type| {
                    let mut shape = ty.shape.clone();
                    shape.pop();
                    shape.push(wire::words_per_row(width) as u64);
                    Type { shape, ..ty.clone() }
                };
                let (x, words_ty) = (with_words(p.type_of(v.x)), with_words(out_ty));
                let (dim, concat) = shard_ranges(&x, axis, parts);
                let (_, split) = shard_ranges(&words_ty, axis, parts);
                let whole = x.layout.global_shape(&x.shape, &self.placement.mesh);
                let mut words = vec![0.0; words_ty.element_count() as usize];
                let shape = as_matrix(&whole, 1);
                collectives::all_to_all(&mut words, views, self.me, shape, dim, &concat, &split);
                wire::decode_rows(out, &words, width);
            }
            (V::AllToAll(v), Some(axis)) => {
                let x = p.type_of(v.x);
                let (dim, concat) = shard_ranges(x, axis, parts);
                let (_, split) = shard_ranges(out_ty, axis, parts);
                let whole = x.layout.global_shape(&x.shape, &self.placement.mesh);
                collectives::all_to_all(out, views, self.me, as_matrix(&whole, 1), dim, &concat, &split);
            }
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

fn to_fault(p: &Program, op: &Op, route: CommRoute, e: &CommFault) -> Fault {
    let text = format!("{} over {route} in @{}: {e}", op.opcode.name(), p.name);
    match e {
        // A closed peer did not fail here: another channel reports how its process ended.
        CommFault::Aborted { .. } | CommFault::Disconnected { .. } => Fault::Aborted(text),
        CommFault::Timeout { .. } => Fault::Stalled(text),
        _ => Fault::Failed(text),
    }
}
