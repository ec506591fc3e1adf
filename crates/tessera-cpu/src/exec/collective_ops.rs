//! Collectives of a run: publishes a rank's contribution, collects the result, and turns transport
//! faults into faults of the run.

use std::time::Instant;

use tessera_device::{CallData, CommRoute, Fault, MeshRank, as_matrix, collective_signature, shard_ranges};
use tessera_ir::{Op, Opcode, Program, Type};
use tessera_mesh::{Axis, Reduction};

use super::{CpuBackend, PreparedProgram, ValueLocation};
use crate::collectives;
use crate::transport::{CommFault, Ticket};

impl CpuBackend {
    pub(super) fn issue_collective(
        &mut self,
        p: &Program,
        prepared: &PreparedProgram,
        op: &Op,
        call: &CallData<'_>,
    ) -> Result<(usize, Ticket), Fault> {
        let at = self.find_endpoint(op)?;
        let deadline = Instant::now() + self.collective_timeout;
        let fingerprint = collectives::fingerprint_collective(collective_signature(p, op).as_bytes());
        let end = &mut self.endpoints[at];
        let empty: &[f32] = &[];
        let contributes = op.opcode != Opcode::Recv
            && !(op.opcode == Opcode::Broadcast
                && op.int_attr("root") != Some(end.transport.member_index() as i64));
        let data = match op.operands.first() {
            Some(v) if contributes => self.memory.view_value(&prepared.locations[v.0 as usize], call),
            _ => Ok(empty),
        };
        let ticket = end
            .transport
            .publish(fingerprint, data?, deadline)
            .map_err(|e| to_fault(p, op, end.route, &e))?;
        Ok((at, ticket))
    }

    /// Writes the result of an issued collective into the slot of `into`'s result.
    pub(super) fn complete_collective(
        &mut self,
        p: &Program,
        prepared: &PreparedProgram,
        issue_op: &Op,
        result_op: &Op,
        (at, ticket): (usize, Ticket),
    ) -> Result<(), Fault> {
        let deadline = Instant::now() + self.collective_timeout;
        let (seat, mut none) = (self.placement, Vec::new());
        let result = result_op.results.first();
        let (memory, len) = match result.map(|r| &prepared.locations[r.0 as usize]) {
            Some(ValueLocation::Slot(slot, len)) => (&mut self.memory.slots[*slot], *len),
            _ => (&mut none, 0),
        };
        let end = &mut self.endpoints[at];
        let me = end.transport.member_index();
        let outcome = end.transport.collect(ticket, deadline, |views| match result {
            Some(r) => write_result(p, issue_op, p.type_of(*r), &seat, me, &mut memory[..len], views),
            None => 0,
        });
        self.compensated_sums += outcome.map_err(|e| to_fault(p, issue_op, end.route, &e))?;
        Ok(())
    }

    fn find_endpoint(&self, op: &Op) -> Result<usize, Fault> {
        CommRoute::from_op(op)
            .and_then(|route| self.endpoints.iter().position(|e| e.route == route))
            .ok_or_else(|| Fault::Failed(format!("no communicator for {} {:?}", op.opcode.name(), op.attrs)))
    }
}

/// Computes a collective's result from the members' contributions. Returns the number of
/// compensated sums.
fn write_result(
    p: &Program,
    op: &Op,
    out_ty: &Type,
    placement: &MeshRank,
    me: usize,
    out: &mut [f32],
    views: &[&[f32]],
) -> u64 {
    let reduction = op.reduction().unwrap_or(Reduction::Sum);
    let (axis, parts) = (op.mesh_axis().unwrap_or(Axis::Tp), views.len() as u32);
    let operand = op.operands.first().map(|v| p.type_of(*v));
    let dim_shards = |ty: &Type| shard_ranges(ty, axis, parts);
    match (op.opcode, operand) {
        (Opcode::AllReduce, _) => return collectives::all_reduce(out, views, reduction),
        (Opcode::AllGather, Some(x)) => {
            let (dim, parts) = dim_shards(x);
            collectives::all_gather(out, views, as_matrix(&out_ty.shape, dim), dim.min(1), &parts);
        }
        (Opcode::ReduceScatter, Some(x)) => {
            let (dim, parts) = dim_shards(out_ty);
            let shape = as_matrix(&x.shape, dim);
            collectives::reduce_scatter(out, views, shape, dim.min(1), parts[me].clone(), reduction);
        }
        (Opcode::AllToAll, Some(x)) => {
            let (dim, concat) = dim_shards(x);
            let (_, split) = dim_shards(out_ty);
            let whole = x.layout.global_shape(&x.shape, &placement.mesh);
            collectives::all_to_all(out, views, me, as_matrix(&whole, 1), dim, &concat, &split);
        }
        (Opcode::Broadcast, _) => {
            collectives::copy_from_member(out, views, op.int_attr("root").unwrap_or(0) as usize)
        }
        // In a transfer, member 0 is the sender.
        _ => collectives::copy_from_member(out, views, 0),
    }
    0
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
