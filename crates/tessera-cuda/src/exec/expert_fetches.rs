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
    /// The layers of which it requests experts ahead, and whether it does so when it has ended.
    targets: Vec<usize>,
    requests_at_end: bool,
    decision: LayerDecision,
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
    ) -> CudaResult<Vec<Arc<TieredLayer>>> {
        self.weights.tiers_mut().place_tables()?;
        let tiers = self.weights.tiers();
        let announced = |layer, has_ended| lock(tiers.decisions()).pools.announced_layers(layer, has_ended);
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
            let at_end = announced(layer, true);
            found.push(TieredLayer {
                layer,
                first_op: at,
                last_op: at,
                counts: v.counts,
                requests_at_end: !at_end.is_empty(),
                targets: announced(layer, false).into_iter().chain(at_end).collect(),
                decision,
            });
        }
        Ok(found.into_iter().map(Arc::new).collect())
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
        let Some(layer) = layers.iter().find(|l| l.first_op == at).cloned() else { return Ok(()) };
        let decision = &layer.decision;
        let counts = self.value_address(program, layer.counts)?;
        let tiers = self.weights.tiers();
        let ((table, _), times) = (tiers.copy_lists(layer.layer), tiers.times_of_layer(layer.layer));
        // SAFETY: the counts are a value of the program, the rest is memory of the backend, and the program holds the
        // layer as long as its graphs; a backend with an unfinished run leaks it.
        unsafe {
            own.copy_async(decision.counts_address, counts, decision.count_bytes())?;
            own.call_host(decide_layer, std::ptr::from_ref(decision).cast_mut().cast())?;
            own.copy_async(table, decision.table_address, decision.table_bytes())?;
        }
        own.record_time(&times.wait_begin)?;
        if let Some(copied) = ahead.0.remove(&layer.layer) {
            own.wait_event(&copied)?;
        }
        self.enqueue_launch(&fetch_launch(table), own)?;
        own.record_time(&times.wait_end)?;
        match layer.requests_at_end {
            true => Ok(()),
            false => self.enqueue_ahead(&layer, (own, io), ahead),
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
        let mut layers = self.programs[program].tiered_layers.iter();
        let ending = layers.find(|l| l.last_op == at && l.requests_at_end).cloned();
        ending.map_or(Ok(()), |layer| self.enqueue_ahead(&layer, (own, io), ahead))
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
        TieredLayer { layer, targets, .. }: &TieredLayer,
        (own, io): (&CudaStream, Option<&CudaStream>),
        ahead: &mut AheadCopies,
    ) -> CudaResult<()> {
        if targets.is_empty() {
            return Ok(());
        }
        let io = io.ok_or_else(|| CudaError(format!("no stream {}", StreamKind::Io.name())))?;
        let tiers = self.weights.tiers();
        let ((_, copies), times) = (tiers.copy_lists(*layer), tiers.times_of_layer(*layer));
        let begin = CudaEvent::new()?;
        own.record_event(&begin)?;
        io.wait_event(&begin)?;
        io.record_time(&times.ahead_begin)?;
        self.enqueue_launch(&fetch_launch(copies), io)?;
        io.record_time(&times.ahead_end)?;
        for target in targets {
            let copied = CudaEvent::new()?;
            io.record_event(&copied)?;
            ahead.0.insert(*target, copied);
        }
        Ok(())
    }
}

fn fetch_launch(copies: u64) -> KernelLaunch {
    let (blocks, threads) = FETCH_GRID;
    KernelLaunch::blocks(FETCH_EXPERTS, (blocks, threads, 0), FetchExperts { copies: copies.into() })
}
