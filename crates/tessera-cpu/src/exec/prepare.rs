//! Prepares a program for runs: reads the view of each op, allocates memory and locates each value.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::{WeightSource, declared_graph};
use tessera_ir::{DType, Op, OpView, Program, Slots, ValueId};

use super::memory::{SlotPlace, ValueLocation};
use super::op_support::read_supported;
use super::{CpuBackend, PreparedProgram};

/// Elements to whose multiple the start of each slot is rounded: one cache line.
const SLOT_ALIGNMENT: u64 = 16;

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
        let slot_starts = self.place_slots(p, slots)?;
        let buffers = self.allocate_buffers(p)?;
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
                        self.locate_result(p, op, &view, *r, (slots, &slot_starts), &buffers, weights)?;
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

    /// Places the slots of a program one after another in the temporaries, which grow if needed, and
    /// returns the first element of each.
    fn place_slots(&mut self, p: &Program, slots: &Slots) -> Result<Vec<usize>, Diagnostic> {
        // The plan counts bytes of dtypes, and memory here holds every element as f32.
        let mut elements: Vec<u64> = slots.slot_bytes.iter().map(|bytes| bytes.div_ceil(4)).collect();
        for (value, slot) in p.values.iter().zip(&slots.value_slots) {
            if let Some(most) = slot.and_then(|s| elements.get_mut(s as usize)) {
                *most = (*most).max(value.ty.element_count());
            }
        }
        let (mut starts, mut end) = (Vec::with_capacity(elements.len()), 0_u64);
        for elements in elements {
            starts.push(usize::try_from(end).unwrap_or(usize::MAX));
            end = end.saturating_add(elements).checked_next_multiple_of(SLOT_ALIGNMENT).unwrap_or(u64::MAX);
        }
        if (self.memory.temporaries.len() as u64) < end {
            // The old memory is returned first, because no run reads what an earlier one wrote.
            self.budget.give_back(self.memory.temporaries.len() as u64 * 4);
            self.memory.temporaries = Vec::new();
            self.memory.temporaries =
                self.budget.allocate_zeros(&format!("temporaries of @{} of {}", p.name, p.role), end)?;
        }
        Ok(starts)
    }

    /// Returns the index of the backend's buffer for each buffer of a program.
    fn allocate_buffers(&mut self, p: &Program) -> Result<Vec<usize>, Diagnostic> {
        let mut buffers = Vec::new();
        for b in &p.buffers {
            let next = self.memory.buffers.len();
            let i = *self.buffer_index.entry(b.name.clone()).or_insert(next);
            if i == next {
                let what = format!("buffer @{} of {}", b.name, p.role);
                self.memory.buffers.push(self.budget.allocate_zeros(&what, b.ty.element_count())?);
            }
            buffers.push(i);
        }
        Ok(buffers)
    }

    #[allow(clippy::too_many_arguments, reason = "one value of one op, and where values can lie")]
    fn locate_result(
        &mut self,
        p: &Program,
        op: &Op,
        view: &OpView,
        result: ValueId,
        (slots, slot_starts): (&Slots, &[usize]),
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
                Some(s) if slots.slot_bytes.get(s as usize).is_some_and(|b| ty.byte_size().0 <= *b) => {
                    let slot = s as usize;
                    ValueLocation::Slot(SlotPlace { slot, start: slot_starts[slot], len })
                }
                _ => {
                    let why = "the plan assigns no memory to its result, or too little";
                    return Err(CpuBackend::unsupported_error(p, op, why));
                }
            },
        })
    }
}
