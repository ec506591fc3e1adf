//! Places the memory of loaded programs, and finds the address of each value in it.

use std::collections::BTreeMap;

use tessera_device::dtype::poison_word;
use tessera_ir::{DType, Op, ValueId};

use super::comm_groups::PAGE_BYTES;
use super::{CudaBackend, SlotMemory, ValueLocation};
use crate::device_memory::{ALIGNMENT, DeviceMemory};
use crate::driver::{CudaError, CudaResult, cuda_failure};

/// Returns the offset of each slot of a program, one behind the other, and their end, in bytes.
pub(super) fn place_in_order(slot_bytes: &[u64]) -> (Vec<u64>, u64) {
    let mut end = 0_u64;
    let offsets = slot_bytes.iter().map(|bytes| {
        let offset = end;
        end += bytes.next_multiple_of(ALIGNMENT);
        offset
    });
    (offsets.collect(), end)
}

impl CudaBackend {
    /// Allocates the slots, once all programs that will run are loaded.
    pub(super) fn place_slots(&mut self) -> CudaResult<()> {
        if self.slot_memory.is_some() {
            return Ok(());
        }
        let end = self.slot_bytes;
        let memory = DeviceMemory::new((end as usize + self.scratch_bytes()).next_multiple_of(PAGE_BYTES))?;
        memory.zero_fill()?;
        self.one_time_counts.slot_allocations += 1;
        self.gemms.set_frozen(true);
        self.attentions.set_frozen(true);
        if let Err(e) = self.share_memory(&memory) {
            // Peers may have mapped the memory already, and freeing it would wait for work that
            // never completes.
            std::mem::forget(memory);
            if self.options.thread_rank.is_some() {
                self.groups.leak_groups();
            }
            return Err(e);
        }
        self.slot_memory = Some(SlotMemory { memory, scratch_offset: end });
        // The slot addresses have changed, so captured graphs are invalid.
        self.programs.iter_mut().for_each(|p| (p.graph, p.traced_graph, p.has_run) = (None, None, false));
        Ok(())
    }

    /// Returns the slots that a program writes: of each the largest value in bytes, the dtype of its
    /// first value, and the number of values.
    pub(super) fn used_slots(&self, program: usize) -> BTreeMap<usize, (u64, DType, u64)> {
        let own = &self.programs[program];
        let mut used = BTreeMap::new();
        for (value, location) in own.program.values.iter().zip(&own.locations) {
            if let ValueLocation::Slot(s) = location {
                let (bytes, _, values) = used.entry(*s).or_insert((0, value.ty.dtype, 0));
                *bytes = value.ty.byte_size().0.max(*bytes);
                *values += 1;
            }
        }
        used
    }

    /// Fills the slots of a program with NaN of the dtype that each holds first.
    pub(super) fn fill_slots_with_poison(&self, program: usize) -> CudaResult<()> {
        let Some(slots) = &self.slot_memory else { return Ok(()) };
        for (slot, (bytes, dtype, _)) in self.used_slots(program) {
            let words =
                slots.memory.slice(self.programs[program].slot_offsets[slot], bytes.div_ceil(4) as usize)?;
            words.fill_with_word(poison_word(dtype))?;
        }
        Ok(())
    }

    /// Bytes of the scratch memory behind the slots.
    pub(super) fn scratch_bytes(&self) -> usize {
        self.programs.iter().map(|p| p.scratch_bytes).max().unwrap_or(0)
    }

    /// Returns the device address of a value's first element. Fails for a token, and for a
    /// temporary before the slots are placed.
    pub(super) fn value_address(&self, program: usize, v: ValueId) -> CudaResult<u64> {
        let own = &self.programs[program];
        Ok(match own.locations[v.0 as usize] {
            ValueLocation::Slot(s) => {
                let slots =
                    self.slot_memory.as_ref().ok_or_else(|| CudaError("no memory for temporaries".into()))?;
                slots.memory.device_address() + own.slot_offsets[s]
            }
            ValueLocation::Buffer(b, bytes) => self.buffers[b].memory.device_address() + bytes,
            ValueLocation::Weight(w) => self.weights.shard_address(w),
            ValueLocation::CallArea(bytes) => own.call_area.device_address() + bytes,
            ValueLocation::Scratch(place) => self.scratch_address()? + place.offset,
            ValueLocation::NoStorage => return cuda_failure("a token has no address"),
        })
    }

    /// Returns the start address of the scratch memory, which follows the slots.
    pub(super) fn scratch_address(&self) -> CudaResult<u64> {
        let slots = self.slot_memory.as_ref().ok_or_else(|| CudaError("no memory for temporaries".into()))?;
        Ok(slots.memory.device_address() + slots.scratch_offset)
    }

    /// Returns the address at which a collective has its operand; 0 without one.
    pub(super) fn operand_address(&self, program: usize, op: usize) -> CudaResult<u64> {
        let own = &self.programs[program];
        match (own.reduced_operands.get(&op), own.program.ops[op].operands.first()) {
            (Some(copy), _) => Ok(self.scratch_address()? + copy),
            (None, operand) => operand.map_or(Ok(0), |v| self.value_address(program, *v)),
        }
    }

    /// Returns the addresses of the words that an exchange of e4m3 sends and receives; `None` for another op.
    pub(super) fn wire_addresses(&self, program: usize, op: usize) -> CudaResult<Option<[u64; 2]>> {
        let Some(words) = self.programs[program].wire_words.get(&op) else { return Ok(None) };
        let scratch = self.scratch_address()?;
        Ok(Some([scratch + words.sent, scratch + words.received]))
    }

    /// Returns the row pitch of a value in scratch memory, in elements; `None` for a value elsewhere,
    /// whose rows are contiguous.
    pub(super) fn planned_pitch(&self, program: usize, v: ValueId) -> Option<u64> {
        match self.programs[program].locations[v.0 as usize] {
            ValueLocation::Scratch(place) => Some(place.row_pitch),
            _ => None,
        }
    }

    /// Returns the address of the buffer that an op writes.
    pub(super) fn buffer_address(&self, program: usize, op: &Op) -> CudaResult<u64> {
        let own = op.buffer.and_then(|b| self.programs[program].buffer_indices.get(b.0 as usize));
        own.map(|i| self.buffers[*i].memory.device_address())
            .ok_or_else(|| CudaError("a write without a buffer".into()))
    }

    /// Returns the address to which a run copies an output.
    pub(super) fn output_address(&self, program: usize, op: &Op) -> CudaResult<u64> {
        let name = format!("{program}/{}", op.name.as_deref().unwrap_or_default());
        let o = self.outputs.get(&name).ok_or_else(|| CudaError(format!("no memory for output {name}")))?;
        let own = &self.programs[program];
        let start = match &own.device_outputs {
            Some(memory) => memory.device_address(),
            None => own.host_outputs.device_address(),
        };
        Ok(start + o.offset as u64)
    }

    /// Returns the address of a list that ops of a program state as an attribute.
    pub(super) fn list_address(&self, program: usize, list: &[u64]) -> CudaResult<u64> {
        let own = &self.programs[program];
        Ok(own.call_area.device_address() + own.list_tables.offset_of(list)?)
    }

    /// Returns the address of the host's copy of the ids that an op chooses.
    pub(super) fn chosen_ids_address(&self, program: usize, op: usize) -> CudaResult<u64> {
        let own = &self.programs[program];
        let at = own.chosen_ids.iter().find(|ids| ids.op == op);
        at.map(|ids| own.host_outputs.device_address() + ids.offset as u64)
            .ok_or_else(|| CudaError(format!("no host memory for the ids of op {op}")))
    }
}
