//! Weights whose experts lie in two tiers: all of a rank's experts in pinned host memory, and a few of them in a pool of
//! device memory.
//!
//! A kernel copies an expert from one to the other over PCIe or NVLink-C2C. The DMA copy engine would leave the
//! multiprocessors free, but its copies need addresses that the host knows when it launches them.

#![allow(unsafe_code, reason = "host memory that a device reads")]

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_device::{
    ExpertBank, ExpertReport, ExpertTransfer, Fingerprint, FingerprintHasher, MeshRank, describe_slice,
};
use tessera_ir::{ExpertTier, Type};

use super::cuda_error;
use super::expert_table::{BankAddresses, TableLayout, TierDecisions};
use super::layer_decision::lock;
use super::rounding::{round_to_dtype, upload_rounded};
use crate::device_memory::{ALIGNMENT, DeviceMemory, PinnedMemory, copy_to_host};
use crate::driver::{CudaEvent, CudaResult, cuda_failure};

/// The weights of a rank whose experts lie in two tiers.
#[derive(Debug, Default)]
pub(super) struct ExpertTiers {
    decisions: Arc<Mutex<TierDecisions>>,
    weights: Vec<TieredWeight>,
    layers: Vec<LayerMemory>,
    /// The end of a run on the device, from which the times of its transfers count.
    run_end: Option<Arc<CudaEvent>>,
    report: ExpertReport,
}

#[derive(Debug)]
struct TieredWeight {
    name: String,
    ty: Type,
    layer: usize,
    /// Index of the weight among those of its layer.
    in_layer: usize,
    /// Bytes from one expert to the next in both memories.
    stride: u64,
    host: PinnedMemory,
    pool: DeviceMemory,
}

/// What a layer needs beside its weights.
#[derive(Debug)]
struct LayerMemory {
    layout: TableLayout,
    table: DeviceMemory,
    times: Arc<LayerTimes>,
}

/// When a layer waits for experts, and when those that it requests ahead are copied.
#[derive(Debug)]
pub(super) struct LayerTimes {
    pub(super) wait_begin: CudaEvent,
    pub(super) wait_end: CudaEvent,
    pub(super) ahead_begin: CudaEvent,
    pub(super) ahead_end: CudaEvent,
}

impl ExpertTiers {
    /// Allocates both memories of a weight of a program, and returns its index.
    pub(super) fn add_weight(
        &mut self,
        (program, name): (&str, &str),
        (tier, ty): (ExpertTier, &Type),
        placement: &MeshRank,
    ) -> Result<usize, Diagnostic> {
        let experts = ty.shape[0];
        let stride = expert_bytes(ty).next_multiple_of(ALIGNMENT);
        let host_bytes = (experts * stride) as usize;
        let host = PinnedMemory::new(host_bytes).map_err(|e| {
            let what = format!("{host_bytes} bytes of pinned host memory for the experts of `{name}`");
            cuda_error(&what, &e)
        })?;
        let pool = DeviceMemory::new((tier.pool_size(experts) * stride) as usize)
            .map_err(|e| cuda_error(&format!("the resident experts of `{name}`"), &e))?;
        let ranges = ty.layout.global_ranges(&ty.shape, &placement.mesh, placement.coord());
        let first_expert = ranges.first().map_or(0, |(start, _)| *start);
        let mut decisions = lock(&self.decisions);
        let layer = decisions.pools.add_weight(program, tier, ty, first_expert);
        let layer_count = decisions.pools.layer_count();
        decisions.banks.resize_with(layer_count, Vec::new);
        let in_layer = decisions.banks[layer].len();
        let (host_address, pool_address) = (host.device_address(), pool.device_address());
        decisions.banks[layer].push(BankAddresses { host: host_address, pool: pool_address, stride });
        drop(decisions);
        let (name, ty) = (name.to_string(), ty.clone());
        self.weights.push(TieredWeight { name, ty, layer, in_layer, stride, host, pool });
        Ok(self.weights.len() - 1)
    }

    /// Reads all experts of a weight into host memory, and returns their fingerprint. No pool holds an expert afterwards.
    pub(super) fn read_experts(
        &mut self,
        weight: usize,
        source: &dyn ExpertBank,
        mesh_rank: &MeshRank,
    ) -> Result<Fingerprint, Diagnostic> {
        self.reset();
        let TieredWeight { name, ty, stride, host, .. } = &mut self.weights[weight];
        let mut elements = vec![0.0; ty.shape.iter().skip(1).product::<u64>() as usize];
        let mut bytes = vec![0; expert_bytes(ty) as usize];
        let mut hash = FingerprintHasher::default();
        for expert in 0..ty.shape[0] {
            source.read_rows(expert, 0, &mut elements)?;
            round_to_dtype(ty.dtype, &elements, &mut bytes);
            hash.update_raw(&bytes, ty.dtype);
            host.write((expert * *stride) as usize, &bytes);
        }
        Ok(hash.finish(name.as_str(), describe_slice(ty, None, mesh_rank)))
    }

    /// Allocates the tables of the layers that have none yet. All weights of their program have been added.
    pub(super) fn place_tables(&mut self) -> CudaResult<()> {
        let decisions = lock(&self.decisions);
        let matrices = |layer: usize| decisions.banks[layer].len() * decisions.pools.holders(layer).len();
        for layer in self.layers.len()..decisions.pools.layer_count() {
            let announced = [false, true].into_iter();
            let announced = announced.flat_map(|ended| decisions.pools.announced_layers(layer, ended));
            let experts = self.weights.iter().find(|w| w.layer == layer).map_or(0, |w| w.ty.shape[0]);
            let layout = TableLayout {
                fetches: matrices(layer),
                ahead: announced.map(matrices).sum(),
                weights: decisions.banks[layer].len(),
                experts: experts as usize,
            };
            let table = DeviceMemory::new(8 * layout.word_count())?;
            self.layers.push(LayerMemory { layout, table, times: Arc::new(LayerTimes::new()?) });
        }
        if self.run_end.is_none() && !self.layers.is_empty() {
            self.run_end = Some(Arc::new(CudaEvent::with_timing()?));
        }
        Ok(())
    }

    pub(super) fn decisions(&self) -> &Arc<Mutex<TierDecisions>> {
        &self.decisions
    }

    pub(super) fn layer_of_weight(&self, weight: usize) -> usize {
        self.weights[weight].layer
    }

    pub(super) fn layout_of_layer(&self, layer: usize) -> TableLayout {
        self.layers[layer].layout
    }

    /// Returns the addresses of a layer's lists of copies: those that it waits for, and those that it requests ahead. The
    /// first is the address of its table.
    pub(super) fn copy_lists(&self, layer: usize) -> (u64, u64) {
        let LayerMemory { layout, table, .. } = &self.layers[layer];
        (table.device_address(), table.device_address() + 8 * layout.ahead_word() as u64)
    }

    /// Returns the address of the list of addresses of a weight's experts.
    pub(super) fn expert_addresses(&self, weight: usize) -> u64 {
        let TieredWeight { layer, in_layer, .. } = &self.weights[weight];
        let LayerMemory { layout, table, .. } = &self.layers[*layer];
        table.device_address() + 8 * layout.address_word(*in_layer) as u64
    }

    pub(super) fn pool_address(&self, weight: usize) -> u64 {
        self.weights[weight].pool.device_address()
    }

    pub(super) fn pool_bytes(&self, weight: usize) -> u64 {
        self.weights[weight].pool.byte_len() as u64
    }

    pub(super) fn times_of_layer(&self, layer: usize) -> Arc<LayerTimes> {
        Arc::clone(&self.layers[layer].times)
    }

    pub(super) fn run_end(&self) -> Option<Arc<CudaEvent>> {
        self.run_end.clone()
    }

    /// Forgets which experts were used, and with that the contents of all pools.
    pub(super) fn reset(&mut self) {
        let mut decisions = lock(&self.decisions);
        decisions.pools.reset();
        decisions.runs.clear();
        drop(decisions);
        self.report = ExpertReport::default();
    }

    /// Forgets what a run decided that failed.
    pub(super) fn forget_failed_run(&self) {
        lock(&self.decisions).runs.clear();
    }

    /// Adds what the last run did to the report. The device had completed the run at `finished`.
    pub(super) fn report_run(&mut self, finished: Instant) -> CudaResult<()> {
        let mut decisions = lock(&self.decisions);
        let runs = std::mem::take(&mut decisions.runs);
        let (Some(end), false) = (&self.run_end, runs.is_empty()) else { return Ok(()) };
        for run in runs {
            let LayerTimes { wait_begin, wait_end, ahead_begin, ahead_end } = &*self.layers[run.layer].times;
            let mut counts = run.counts;
            counts.waited_ns += (f64::from(wait_begin.elapsed_ms_to(wait_end)?) * 1e6) as u64;
            self.report.layers.push(counts);
            let at = |event: &CudaEvent| -> CudaResult<Instant> {
                let before_end = f64::from(event.elapsed_ms_to(end)?.max(0.0)) / 1e3;
                Ok(finished.checked_sub(Duration::from_secs_f64(before_end)).unwrap_or(finished))
            };
            let mut add = |layer: usize, expert: usize, is_prefetch: bool, [begin, end]: [Instant; 2]| {
                let expert = decisions.pools.global_expert(layer, expert);
                let weights = self.weights.iter().filter(|w| w.layer == layer).map(|w| w.name.clone());
                let transfer = |weight| ExpertTransfer { weight, expert, is_prefetch, begin, end };
                self.report.transfers.extend(weights.map(transfer));
            };
            if !run.fetched.is_empty() {
                let span = [at(wait_begin)?, at(wait_end)?];
                run.fetched.iter().for_each(|expert| add(run.layer, *expert, false, span));
            }
            if run.ahead.iter().any(|request| !request.fetched.is_empty()) {
                let span = [at(ahead_begin)?, at(ahead_end)?];
                for request in &run.ahead {
                    request.fetched.iter().for_each(|pooled| add(request.layer, pooled.expert, true, span));
                }
            }
        }
        Ok(())
    }

    pub(super) fn take_report(&mut self) -> ExpertReport {
        std::mem::take(&mut self.report)
    }

    /// Reads bytes of a weight, from the memory in which the kernels would read each expert. No run is in flight.
    pub(super) fn read_bytes(&self, weight: usize, offset: u64, to: &mut [u8]) -> CudaResult<()> {
        let own = &self.weights[weight];
        let expert_bytes = expert_bytes(&own.ty);
        let decisions = lock(&self.decisions);
        let (mut at, mut rest) = (offset, to);
        while !rest.is_empty() {
            let (expert, inside) = ((at / expert_bytes) as usize, at % expert_bytes);
            let bytes = rest.len().min((expert_bytes - inside) as usize);
            let (part, behind) = rest.split_at_mut(bytes);
            match decisions.pools.find_slot(own.layer, expert) {
                Some(slot) => copy_to_host(part, own.pool.slice(slot as u64 * own.stride + inside, bytes)?)?,
                None => {
                    let first = (expert as u64 * own.stride + inside) as usize;
                    // SAFETY: no kernel writes the host memory of experts.
                    part.copy_from_slice(unsafe { own.host.as_slice(first, bytes) });
                }
            }
            (at, rest) = (at + bytes as u64, behind);
        }
        Ok(())
    }

    /// Sets an element in a pool. Fails if no slot holds its expert: host memory is the source of every later copy.
    pub(super) fn overwrite_element(&self, weight: usize, index: u64, value: f32) -> CudaResult<()> {
        let own = &self.weights[weight];
        let width = own.ty.dtype.element_bytes();
        let of_expert = expert_bytes(&own.ty) / width;
        let (expert, inside) = ((index / of_expert) as usize, index % of_expert);
        let Some(slot) = lock(&self.decisions).pools.find_slot(own.layer, expert) else {
            return cuda_failure("no slot holds the expert");
        };
        let to = own.pool.slice(slot as u64 * own.stride + inside * width, width as usize)?;
        upload_rounded(to, own.ty.dtype, &[value])
    }
}

impl LayerTimes {
    fn new() -> CudaResult<LayerTimes> {
        let event = CudaEvent::with_timing;
        Ok(LayerTimes {
            wait_begin: event()?,
            wait_end: event()?,
            ahead_begin: event()?,
            ahead_end: event()?,
        })
    }
}

fn expert_bytes(ty: &Type) -> u64 {
    ty.byte_size().0.checked_div(ty.shape[0]).unwrap_or(0).max(1)
}
