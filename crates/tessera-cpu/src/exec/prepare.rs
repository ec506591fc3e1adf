//! Prepares a program for runs: reads the view of each op, allocates memory and locates each value.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::{WeightSource, declared_graph};
use tessera_ir::{DType, Op, OpView, Program, Slots, ValueId};

use super::memory::ValueLocation;
use super::op_support::read_supported;
use super::{CpuBackend, PreparedProgram};

impl CpuBackend {
    /// Loads the weights of a program and allocates what its values need beyond the memory of the
    /// programs loaded before.
    pub(super) fn prepare_program(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<PreparedProgram, Diagnostic> {
        let p = &**program;
        self.grow_slots(&slots.slot_bytes);
        let buffers = self.allocate_buffers(p);
        let (mut views, mut kernels) = (Vec::with_capacity(p.ops.len()), Vec::with_capacity(p.ops.len()));
        let mut locations = vec![ValueLocation::Unallocated; p.values.len()];
        let mut issue_ops = BTreeMap::new();
        for (i, op) in p.ops.iter().enumerate() {
            let (view, kernel) =
                read_supported(p, op).map_err(|why| CpuBackend::unsupported_error(p, op, &why))?;
            self.fingerprint_derived(p, op, &view);
            for r in &op.results {
                let ty = p.type_of(*r);
                if ty.dtype == DType::Ticket {
                    issue_ops.insert(*r, i);
                }
                if !ty.is_token() {
                    locations[r.0 as usize] =
                        self.locate_result(p, op, &view, *r, slots, &buffers, weights)?;
                }
            }
            views.push(view);
            kernels.push(kernel);
        }
        Ok(PreparedProgram {
            graph: declared_graph(program)?,
            program: Arc::clone(program),
            views,
            kernels,
            locations,
            issue_ops,
            buffers,
        })
    }

    fn grow_slots(&mut self, slot_bytes: &[u64]) {
        for (i, bytes) in slot_bytes.iter().enumerate() {
            let elements = (*bytes as usize).div_ceil(4);
            match self.memory.slots.get_mut(i) {
                Some(s) if s.len() >= elements => {}
                Some(s) => s.resize(elements, 0.0),
                None => self.memory.slots.push(vec![0.0; elements]),
            }
        }
    }

    /// Returns the index of the backend's buffer for each buffer of a program.
    fn allocate_buffers(&mut self, p: &Program) -> Vec<usize> {
        let mut buffers = Vec::new();
        for b in &p.buffers {
            let next = self.memory.buffers.len();
            let i = *self.buffer_index.entry(b.name.clone()).or_insert(next);
            if i == next {
                self.memory.buffers.push(vec![0.0; b.ty.element_count() as usize]);
            }
            buffers.push(i);
        }
        buffers
    }

    #[allow(clippy::too_many_arguments, reason = "one value of one op, and where values can lie")]
    fn locate_result(
        &mut self,
        p: &Program,
        op: &Op,
        view: &OpView,
        result: ValueId,
        slots: &Slots,
        buffers: &[usize],
        weights: &mut dyn WeightSource,
    ) -> Result<ValueLocation, Diagnostic> {
        let ty = p.type_of(result);
        let (len, name) = (ty.element_count() as usize, || op.name.clone().unwrap_or_default());
        Ok(match view {
            OpView::Weight(v) => ValueLocation::Weight(self.load_weight(p, op, v.load, weights)?),
            OpView::Input(_) => ValueLocation::Input(name()),
            OpView::Call(_) => ValueLocation::Scalar(name()),
            OpView::CacheRead(v) => {
                let start = v.row as usize * ty.shape[1..].iter().product::<u64>() as usize;
                let buffer = op.buffer.map_or(0, |b| buffers[b.0 as usize]);
                ValueLocation::Buffer(buffer, start..start + len)
            }
            // The plan assigns a slot to every value that an op writes.
            _ => match slots.value_slots.get(result.0 as usize).copied().flatten() {
                Some(s) => ValueLocation::Slot(s as usize, len),
                None => {
                    let why = "the plan assigns no memory to its result";
                    return Err(CpuBackend::unsupported_error(p, op, why));
                }
            },
        })
    }
}
