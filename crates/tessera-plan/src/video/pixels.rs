//! Prices the phases of pixels that ranks run in calls: their times, halo exchanges and the gather
//! included, and the memory that they need.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_cost::MachineModel;
use tessera_mesh::{Axis, Mesh};

use super::call::estimate_call;
use super::memory::{RankMemory, memory_by_role};
use super::period::MediaTimes;
use crate::ownership::is_media_phase;
use crate::stages::pixel_flops_per_pass;
use crate::{DtypePolicy, LogicalModel, Mapping, MediaPlacement, lower};

/// A model whose calls contain the phases of pixels, for their prices.
#[derive(Debug, Clone, Copy)]
pub struct PixelModel<'a> {
    /// Model with the phases of pixels in its calls.
    pub logical: &'a LogicalModel,
    /// Name of the call of a chunk in the middle of a stream.
    pub call: &'a str,
}

/// Returns the times of the phases of pixels on one device that computes whole pictures.
///
/// # Errors
/// Why the phases cannot be lowered or estimated.
pub fn estimate_device_times(
    model: PixelModel<'_>,
    machine: &MachineModel,
    dtype: DtypePolicy,
) -> Result<MediaTimes, Diagnostics> {
    PixelPrices::new(model, machine, dtype).price_ranks(1, MediaPlacement::Replicas).map(|p| p.times)
}

/// The phases of pixels of one call, on the ranks of one stage.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct RankPixels {
    pub times: MediaTimes,
    /// Memory of the fullest rank, without the generator.
    pub memory: RankMemory,
}

/// Prices by tp and placement, each computed once.
pub(super) struct PixelPrices<'a> {
    model: PixelModel<'a>,
    phases: Vec<String>,
    /// The phases of pixels of the call alone.
    pixels: LogicalModel,
    machine: &'a MachineModel,
    dtype: DtypePolicy,
    known: BTreeMap<(u32, MediaPlacement), RankPixels>,
}

impl<'a> PixelPrices<'a> {
    pub fn new(model: PixelModel<'a>, machine: &'a MachineModel, dtype: DtypePolicy) -> PixelPrices<'a> {
        let logical = model.logical;
        let call = logical.calls.iter().find(|(name, _)| name == model.call);
        let of_call = |name: &str| call.is_some_and(|(_, phases)| phases.iter().any(|p| p == name));
        let programs = logical.phases.iter().filter(|p| is_media_phase(p) && of_call(&p.name));
        let pixels = LogicalModel { phases: programs.cloned().collect(), calls: Vec::new(), ..*logical };
        let names = call.into_iter().flat_map(|(_, phases)| phases);
        let phases = names.filter(|n| pixels.phases.iter().any(|p| p.name == **n)).cloned().collect();
        PixelPrices { model, phases, pixels, machine, dtype, known: BTreeMap::new() }
    }

    /// Returns the prices of `tp` ranks that run the phases in calls.
    ///
    /// # Errors
    /// Why the phases cannot be lowered or estimated.
    pub fn price_ranks(&mut self, tp: u32, media: MediaPlacement) -> Result<RankPixels, Diagnostics> {
        if let Some(known) = self.known.get(&(tp, media)) {
            return Ok(*known);
        }
        let mut sizes = [1; 4];
        sizes[Axis::Tp as usize] = tp;
        let mesh = Mesh::new(sizes).map_err(|d| vec![*d])?;
        let blocks = vec![self.pixels.blocks];
        let mut mapping = Mapping { mesh, media, dtype: self.dtype, blocks, ..Mapping::default() };
        let bundle = lower(&self.pixels, &mut mapping)?;
        let estimate = estimate_call(&bundle, self.model.call, &self.phases, self.machine, false)
            .map_err(|d| vec![*d])?;
        let mut times = MediaTimes::default();
        let mut begun = 0.0;
        for phase in &estimate.phases {
            let ns = phase.end_ns - begun;
            match phase.name.as_str() {
                "encode" => times.encode_ns += ns,
                "decode.rest" => times.rest_ns += ns,
                _ => times.first_ns += ns,
            }
            begun = phase.end_ns;
        }
        let memory = memory_by_role(&bundle).into_iter().max_by_key(RankMemory::total_bytes);
        let prices = RankPixels { times, memory: memory.unwrap_or_default() };
        self.known.insert((tp, media), prices);
        Ok(prices)
    }

    /// Returns the FLOPs per pass through the blocks that the balance of stages counts.
    pub fn flops_per_pass(&self, tp: u32, media: MediaPlacement) -> u64 {
        pixel_flops_per_pass(self.model.logical, media, tp)
    }
}
