//! The host function that decides where the experts of a layer lie.
//!
//! It runs in the stream, between the kernel that counts the rows of experts and the one that multiplies them. So the host
//! launches such a program as a whole, and a CUDA graph may hold it. Rejected: waiting on the host for the counts, which
//! delays the launches of all later ops, and deciding on the device, which needs the rule of the cost model a second time.

#![allow(unsafe_code, reason = "a function that the driver calls, and memory that the device writes")]

use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::expert_table::{TableLayout, TierDecisions};
use crate::device_memory::PinnedMemory;
use crate::driver::CudaResult;

/// The argument of the host function that decides a layer of a program.
#[derive(Debug)]
pub(super) struct LayerDecision {
    decisions: Arc<Mutex<TierDecisions>>,
    layer: usize,
    layout: TableLayout,
    /// Numbers of rows per expert.
    counts_per_expert: usize,
    memory: Mutex<DecisionMemory>,
    /// The addresses of the two parts of the memory, for the device.
    pub(super) counts_address: u64,
    pub(super) table_address: u64,
}

/// Pinned memory from which a decision reads the counts of rows, and to which it writes the table.
#[derive(Debug)]
struct DecisionMemory {
    counts: PinnedMemory,
    table: PinnedMemory,
}

impl LayerDecision {
    pub(super) fn new(
        decisions: &Arc<Mutex<TierDecisions>>,
        layer: usize,
        layout: TableLayout,
        counts_per_expert: usize,
    ) -> CudaResult<LayerDecision> {
        let counts = PinnedMemory::new(4 * layout.experts * counts_per_expert)?;
        let table = PinnedMemory::new(8 * layout.word_count())?;
        let (counts_address, table_address) = (counts.device_address(), table.device_address());
        Ok(LayerDecision {
            decisions: Arc::clone(decisions),
            layer,
            layout,
            counts_per_expert,
            memory: Mutex::new(DecisionMemory { counts, table }),
            counts_address,
            table_address,
        })
    }

    pub(super) fn count_bytes(&self) -> usize {
        4 * self.layout.experts * self.counts_per_expert
    }

    pub(super) fn table_bytes(&self) -> usize {
        8 * self.layout.word_count()
    }

    /// Reads the counts and writes the table.
    fn write_table(&self) {
        let mut memory = lock(&self.memory);
        let len = self.layout.experts * self.counts_per_expert;
        // SAFETY: the stream has completed the copy of the counts, and the next one follows in a later run.
        let counts: &[f32] = unsafe { memory.counts.as_slice(0, len) };
        let has_rows = |of_expert: &[f32]| of_expert.iter().any(|count| *count > 0.0);
        let of_experts = counts.chunks(self.counts_per_expert.max(1)).enumerate();
        let needed: Vec<usize> = of_experts.filter(|(_, own)| has_rows(own)).map(|(at, _)| at).collect();
        let words = lock(&self.decisions).decide_run(self.layer, &needed, &self.layout);
        memory.table.write(0, &words);
    }
}

/// The host function that decides a layer.
///
/// # Safety
/// `argument` must be the address of a [`LayerDecision`].
pub(super) unsafe extern "C" fn decide_layer(argument: *mut c_void) {
    // SAFETY: the caller guarantees the address.
    unsafe { &*argument.cast::<LayerDecision>() }.write_table();
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
