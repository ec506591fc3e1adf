//! Enqueues the transfers of a program whose experts lie in two tiers: before a layer multiplies its experts, the decision
//! which of them to copy and the copies, and beside the layer those for a later one.

#![allow(unsafe_code, reason = "copies of counts and tables, and the host function that decides")]

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_ir::{OpView, Program, StreamKind, ValueId};

use super::layer_decision::{LayerDecision, decide_layer, lock};
use super::{CudaBackend, ValueLocation};
use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream};
use crate::kernel_table::{FETCH_EXPERTS, FetchExperts};
use crate::kernels::KernelLaunch;

/// Blocks and threads that copy experts. With four loads of 16 bytes by each thread, 512 KiB are in flight, several times
/// what a link of 64 GB/s with a latency of 2 µs needs, and most multiprocessors stay free.
const FETCH_GRID: (u64, u32) = (32, 256);

/// A layer of a program whose experts lie in two tiers.
#[derive(Debug)]
pub(super) struct TieredLayer {
    layer: usize,
    /// The first and the last op that multiply its experts.
    first_op: usize,
    last_op: usize,
    /// The number of rows of each expert.
    counts: ValueId,
    decision: Arc<LayerDecision>,
}

/// The copies on the stream `io` that a layer of the current run waits for, by layer.
#[derive(Debug, Default)]
pub(super) struct AheadCopies(BTreeMap<usize, CudaEvent>);

impl CudaBackend {
    /// Returns the layers of a program whose experts lie in two tiers. The weights of the program are loaded.
    pub(super) fn find_tiered_layers(
        &mut self,
        p: &Program,
        views: &[OpView],
        locations: &[ValueLocation],
    ) -> CudaResult<Vec<TieredLayer>> {
        self.weights.tiers_mut().place_tables()?;
        let tiers = self.weights.tiers();
        let mut found: Vec<TieredLayer> = Vec::new();
        for (at, view) in views.iter().enumerate() {
            let OpView::GroupedMatmul(v) = view else { continue };
            let Some(weight) = self.find_tiered(locations, v.w) else { continue };
            let layer = tiers.layer_of_weight(weight);
            if let Some(own) = found.iter_mut().find(|own| own.layer == layer) {
                own.last_op = at;
                continue;
            }
            let layout = tiers.layout_of_layer(layer);
            let counts_per_expert = p.type_of(v.counts).element_count() as usize / layout.experts.max(1);
            let decision = LayerDecision::new(tiers.decisions(), layer, layout, counts_per_expert)?;
            let (counts, decision) = (v.counts, Arc::new(decision));
            found.push(TieredLayer { layer, first_op: at, last_op: at, counts, decision });
        }
        Ok(found)
    }

    /// Returns the index of a value among the weights in two tiers; `None` for another value.
    fn find_tiered(&self, locations: &[ValueLocation], v: ValueId) -> Option<usize> {
        match locations[v.0 as usize] {
            ValueLocation::Weight(weight) => self.weights.find_tiered(weight),
            _ => None,
        }
    }

    /// Returns the address of the list in which a run states where the experts of a weight lie; 0 for a weight in one tier.
    pub(super) fn expert_addresses(&self, program: usize, w: ValueId) -> CudaResult<u64> {
        let weight = self.find_tiered(&self.programs[program].locations, w);
        Ok(weight.map_or(0, |weight| self.weights.tiers().expert_addresses(weight)))
    }

    /// Before the first op of a layer: enqueues the decision where its experts lie, the copies that it waits for, and those
    /// for a later layer.
    pub(super) fn enqueue_layer_start(
        &mut self,
        program: usize,
        at: usize,
        (own, io): (&CudaStream, Option<&CudaStream>),
        ahead: &mut AheadCopies,
    ) -> CudaResult<()> {
        let layers = &self.programs[program].tiered_layers;
        let Some(TieredLayer { layer, counts, decision, .. }) = layers.iter().find(|l| l.first_op == at)
        else {
            return Ok(());
        };
        let (layer, decision) = (*layer, Arc::clone(decision));
        let counts = self.value_address(program, *counts)?;
        let tiers = self.weights.tiers();
        let ((table, _), times) = (tiers.copy_lists(layer), tiers.times_of_layer(layer));
        // SAFETY: the counts are a value of the program, the rest is memory of the backend, and the program holds the
        // decision as long as its graphs; a backend with an unfinished run leaks it.
        unsafe {
            own.copy_async(decision.counts_address, counts, decision.count_bytes())?;
            own.call_host(decide_layer, Arc::as_ptr(&decision).cast_mut().cast())?;
            own.copy_async(table, decision.table_address, decision.table_bytes())?;
        }
        own.record_time(&times.wait_begin)?;
        if let Some(copied) = ahead.0.remove(&layer) {
            own.wait_event(&copied)?;
        }
        self.enqueue_launch(&fetch_launch(table), own)?;
        own.record_time(&times.wait_end)?;
        match self.announced_layers(layer, true).is_empty() {
            true => self.enqueue_ahead(layer, (own, io), ahead),
            false => Ok(()),
        }
    }

    /// Behind the last op of a layer: enqueues the copies for its own next run.
    pub(super) fn enqueue_layer_end(
        &mut self,
        program: usize,
        at: usize,
        (own, io): (&CudaStream, Option<&CudaStream>),
        ahead: &mut AheadCopies,
    ) -> CudaResult<()> {
        let Some(layer) = self.programs[program].tiered_layers.iter().find(|l| l.last_op == at) else {
            return Ok(());
        };
        let layer = layer.layer;
        match self.announced_layers(layer, true).is_empty() {
            true => Ok(()),
            false => self.enqueue_ahead(layer, (own, io), ahead),
        }
    }

    fn announced_layers(&self, layer: usize, has_ended: bool) -> Vec<usize> {
        lock(self.weights.tiers().decisions()).pools.announced_layers(layer, has_ended)
    }

    /// Makes the first stream wait for all copies, and marks the end of the run.
    pub(super) fn join_expert_copies(
        &mut self,
        program: usize,
        main: &CudaStream,
        ahead: &AheadCopies,
    ) -> CudaResult<()> {
        if self.programs[program].tiered_layers.is_empty() {
            return Ok(());
        }
        ahead.0.values().try_for_each(|copied| main.wait_event(copied))?;
        self.weights.tiers().run_end().map_or(Ok(()), |end| main.record_time(&end))
    }

    /// Enqueues the copies of the experts that a layer requests ahead, behind the work on `own` so far: the layer's table
    /// is there, and earlier layers have ended, whose slots the copies may take.
    fn enqueue_ahead(
        &mut self,
        layer: usize,
        (own, io): (&CudaStream, Option<&CudaStream>),
        ahead: &mut AheadCopies,
    ) -> CudaResult<()> {
        let targets: Vec<usize> =
            [false, true].into_iter().flat_map(|ended| self.announced_layers(layer, ended)).collect();
        if targets.is_empty() {
            return Ok(());
        }
        let io = io.ok_or_else(|| CudaError(format!("no stream {}", StreamKind::Io.name())))?;
        let tiers = self.weights.tiers();
        let ((_, copies), times) = (tiers.copy_lists(layer), tiers.times_of_layer(layer));
        let begin = CudaEvent::new()?;
        own.record_event(&begin)?;
        io.wait_event(&begin)?;
        io.record_time(&times.ahead_begin)?;
        self.enqueue_launch(&fetch_launch(copies), io)?;
        io.record_time(&times.ahead_end)?;
        for target in targets {
            let copied = CudaEvent::new()?;
            io.record_event(&copied)?;
            ahead.0.insert(target, copied);
        }
        Ok(())
    }
}

fn fetch_launch(copies: u64) -> KernelLaunch {
    let (blocks, threads) = FETCH_GRID;
    KernelLaunch::blocks(FETCH_EXPERTS, (blocks, threads, 0), FetchExperts { copies: copies.into() })
}
