//! Convolutions of frames in bf16 or e4m3 with the sm90 kernel, an implicit GEMM that loads patches with
//! TMA and multiplies with wgmma. docs/design/0024 gives its measurements.

#![allow(unsafe_code, reason = "launches of kernels on raw addresses")]

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use cudarc::driver::sys::CUtensorMap;
use tessera_ir::DType;

use crate::capabilities::{CONV_FAMILY, Capabilities};
use crate::compile::Compiler;
use crate::conv_shape::ConvShape;
use crate::driver::{CudaError, CudaResult, CudaStream};
use crate::kernel_params::{Bf16, DevicePtr, LoadedKernel, kernel_signatures};
use crate::kernels::{COMMON, CONV_SHAPE, HOPPER, wgmma_source};
use crate::tensor_map::{BOX_COLUMNS, E4M3_BOX_COLUMNS, encode_strided_tensor_map};

const SOURCE: &str = include_str!("kernels/conv_sm90.cu");

kernel_signatures! {
    CONV_TABLE:

    /// out = scale · (x ∗ w) + bias + residual. Absent operands are null, and so is the scale in bf16. Without
    /// a history, its maps are those of x, and without a halo, the maps of single rows are unused.
    Conv {
        x_map: CUtensorMap, history_map: CUtensorMap, x_row_map: CUtensorMap, history_row_map: CUtensorMap,
        halo_map: CUtensorMap, w_map: CUtensorMap, scale: DevicePtr<f32>, bias: DevicePtr<Bf16>,
        residual: DevicePtr<Bf16>, out: DevicePtr<Bf16>, shape: ConvShape,
    } = CONV "conv_sm90";
}

/// Device addresses of a convolution's operands; 0 for an absent one.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ConvOperands {
    pub(crate) x: u64,
    pub(crate) history: u64,
    pub(crate) halo: u64,
    pub(crate) w: u64,
    /// Scales of the weights in e4m3.
    pub(crate) scale: u64,
    pub(crate) bias: u64,
    pub(crate) residual: u64,
    pub(crate) out: u64,
}

/// The part of a result that a block of the kernel computes at once, and how it does so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct ConvTile {
    out_channels: u64,
    width: u64,
    height: u64,
    shares_patch: bool,
    has_residual: bool,
    is_e4m3: bool,
}

/// Threads per block: one warpgroup loads, and two compute.
const THREADS: u32 = 384;
/// Maximum shared memory of a block on sm_90, in bytes.
const MAX_SHARED_BYTES: u64 = 232_448;
/// Most output channels with which the kernel stores each alone: its tile has no multiple of 32 then.
const MAX_SINGLE_STORES: i32 = 24;
/// Most stages of weights that a block loads ahead.
const MAX_WEIGHT_STAGES: u64 = 8;
/// Channels, columns and rows of the tiles with which a warpgroup holds 192 accumulators per thread. The
/// wide ones serve frames whose rows the others do not divide, such as half of a picture.
const LARGE_TILES: [(u64, u64, u64); 5] =
    [(192, 16, 16), (128, 16, 24), (96, 16, 32), (192, 32, 8), (96, 32, 16)];
/// Tiles for small frames, of which large ones would leave multiprocessors idle.
const SMALL_TILES: [(u64, u64, u64); 2] = [(96, 16, 16), (64, 16, 16)];
/// The cost of a tile beside its multiply-adds, in multiply-adds of a cell and a channel per input
/// channel and tap. An assumption, with which the tiles that were fastest on an H100 are chosen.
const TILE_OVERHEAD: u64 = 6_000;

/// The convolution kernels that were compiled for one device, one per tile.
#[derive(Debug)]
pub(crate) struct ConvSm90 {
    multiprocessors: u64,
    kernels: BTreeMap<ConvTile, (LoadedKernel<Conv>, u32)>,
}

impl ConvSm90 {
    /// Returns `None` if the device does not support the kernels.
    pub(crate) fn new(capabilities: &Capabilities) -> Option<ConvSm90> {
        let multiprocessors = u64::from(capabilities.multiprocessors.max(1));
        capabilities.supports(&CONV_FAMILY).then(|| ConvSm90 { multiprocessors, kernels: BTreeMap::new() })
    }

    /// Returns whether the kernels support a convolution: TMA needs strides of 16 bytes, patches the same
    /// step for rows and columns, and the stores of 8 channels at once that all cells begin at 16 bytes.
    pub(crate) fn is_supported(dtype: DType, s: &ConvShape) -> bool {
        let stores_fit = s.channels % 8 == 0 || s.channels <= MAX_SINGLE_STORES;
        matches!(dtype, DType::Bf16 | DType::E4m3)
            && (s.in_channels as u64 * dtype.element_bytes()).is_multiple_of(16)
            && stores_fit
            && s.row_step == s.column_step
            && s.row_step <= 2
    }

    /// Returns the tile with the lowest estimated time. The bits of a cell do not depend on the tile.
    pub(crate) fn choose_tile(&self, s: &ConvShape, dtype: DType, has_residual: bool) -> ConvTile {
        let tile = |(out_channels, width, height): (u64, u64, u64)| ConvTile {
            out_channels,
            width,
            height,
            shares_patch: s.shares_patch(),
            has_residual,
            is_e4m3: dtype == DType::E4m3,
        };
        let channels = s.out_channels().next_multiple_of(8);
        if channels < 64 {
            return tile((channels, 16, if s.shares_patch() { 32 } else { 16 }));
        }
        let cost = |t: &ConvTile| {
            let waves = t.count_tiles(s).div_ceil(self.multiprocessors);
            waves * (t.out_channels * t.width * t.height + TILE_OVERHEAD)
        };
        let candidates = LARGE_TILES.into_iter().chain(SMALL_TILES).map(tile);
        candidates.min_by_key(cost).unwrap_or_else(|| tile(LARGE_TILES[0]))
    }

    /// Compiles the kernel of a tile on first use; [`launch_conv`](ConvSm90::launch_conv) needs it.
    pub(crate) fn prepare_kernel(&mut self, compiler: &mut Compiler, tile: ConvTile) -> CudaResult<()> {
        if let Entry::Vacant(place) = self.kernels.entry(tile) {
            let (defines, shared_bytes) = tile.compile_defines();
            let module = compiler.compile_module("conv", &tile.kernel_source(), &defines)?;
            let kernel = LoadedKernel::new(&module, CONV)?;
            kernel.set_max_shared_bytes(shared_bytes)?;
            place.insert((kernel, shared_bytes));
        }
        Ok(())
    }

    /// Launches the kernel of a tile.
    ///
    /// # Safety
    /// Every operand that is not 0 must be device memory of the shape's extent. All must stay allocated
    /// until the stream has completed the work; until then no other stream may write the inputs or
    /// access the result. The residual may be the result.
    pub(crate) unsafe fn launch_conv(
        &self,
        tile: ConvTile,
        s: &ConvShape,
        operands: &ConvOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let Some((kernel, shared_bytes)) = self.kernels.get(&tile) else {
            return Err(CudaError(format!("no convolution kernel was compiled for {tile:?}")));
        };
        let row_bytes = tile.dtype().element_bytes() * s.in_channels as u64;
        let w_map = encode_strided_tensor_map(
            tile.dtype(),
            operands.w,
            [s.in_channels as u64, s.count_taps(), s.out_channels()],
            &[row_bytes, row_bytes * s.count_taps()],
            [tile.channel_step() as u32, 1, tile.out_channels as u32],
            [1; 3],
        )?;
        let (patch, row) = (tile.patch_extents(), [tile.patch_extents()[0], 1]);
        let maps_of = |extents: [u64; 2]| {
            let x_map = map_cells(s, tile, operands.x, [s.in_height, s.in_frames], extents)?;
            let history_map = match s.history {
                0 => x_map,
                frames => map_cells(s, tile, operands.history, [s.in_height, frames], extents)?,
            };
            CudaResult::Ok((x_map, history_map))
        };
        let (x_map, history_map) = maps_of(patch)?;
        let (x_row_map, history_row_map, halo_map) = match s.halo_frames {
            0 => (x_map, history_map, x_map),
            frames => {
                let (x_row_map, history_row_map) = maps_of(row)?;
                (x_row_map, history_row_map, map_cells(s, tile, operands.halo, [2, frames], row)?)
            }
        };
        let args = Conv {
            x_map,
            history_map,
            x_row_map,
            history_row_map,
            halo_map,
            w_map,
            scale: operands.scale.into(),
            bias: operands.bias.into(),
            residual: operands.residual.into(),
            out: operands.out.into(),
            shape: *s,
        };
        let blocks = tile.count_tiles(s).min(self.multiprocessors) as u32;
        // SAFETY: the caller guarantees the operands; the kernel was compiled for this tile and keeps
        // inside the shape.
        unsafe { kernel.launch([blocks, 1, 1], THREADS, *shared_bytes, &args, stream) }
    }
}

impl ConvTile {
    /// Returns the number of tiles of a shape.
    fn count_tiles(self, s: &ConvShape) -> u64 {
        let along = |extent: i32, tile: u64| (extent as u64).div_ceil(tile);
        s.out_channels().div_ceil(self.out_channels)
            * along(s.width, self.width)
            * along(s.height, self.height)
            * s.frames as u64
    }

    /// Returns the dtype of the operands that the kernel multiplies.
    fn dtype(self) -> DType {
        if self.is_e4m3 { DType::E4m3 } else { DType::Bf16 }
    }

    /// Returns the channels of a cell that a patch holds: 128 bytes.
    fn channel_step(self) -> u64 {
        if self.is_e4m3 { E4M3_BOX_COLUMNS } else { BOX_COLUMNS }
    }

    /// Returns the columns and rows of cells that a patch holds.
    fn patch_extents(self) -> [u64; 2] {
        let border = if self.shares_patch { 2 } else { 0 };
        [self.width + border, self.height + border]
    }

    /// Returns the kernel's macros and its shared memory in bytes.
    pub(crate) fn compile_defines(self) -> ([(&'static str, String); 8], u32) {
        let [columns, rows] = self.patch_extents();
        let patch_bytes = (columns * rows * 128).next_multiple_of(1024);
        // A patch lasts for nine taps, or for one.
        let patch_stages: u64 = if self.shares_patch { 2 } else { 3 };
        let bytes = |stages: u64| patch_stages * (patch_bytes + 16) + stages * (self.out_channels * 128 + 16);
        let stages = (2..=MAX_WEIGHT_STAGES).rev().find(|s| bytes(*s) <= MAX_SHARED_BYTES).unwrap_or(2);
        let defines = [
            ("OUT_TILE", self.out_channels),
            ("TILE_WIDTH", self.width),
            ("TILE_HEIGHT", self.height),
            ("SHARED_TAPS", self.shares_patch.into()),
            ("RESIDUAL", self.has_residual.into()),
            ("E4M3", self.is_e4m3.into()),
            ("PATCH_STAGES", patch_stages),
            ("STAGES", stages),
        ];
        (defines.map(|(k, v)| (k, v.to_string())), bytes(stages) as u32)
    }

    /// Returns the kernel's source.
    pub(crate) fn kernel_source(self) -> String {
        format!("{COMMON}{HOPPER}{CONV_SHAPE}{}{SOURCE}", wgmma_source(self.out_channels, self.dtype()))
    }
}

/// Describes the frames at an address, of so many rows each, in boxes of columns and rows that the kernel
/// reads at the step of the convolution.
fn map_cells(
    s: &ConvShape,
    tile: ConvTile,
    address: u64,
    [height, frames]: [i32; 2],
    [columns, rows]: [u64; 2],
) -> CudaResult<CUtensorMap> {
    let [channels, width, height] = [s.in_channels, s.in_width, height].map(|n| n as u64);
    let step = s.row_step as u32;
    let row_step = if rows == 1 { 1 } else { step };
    let cell_bytes = tile.dtype().element_bytes() * channels;
    encode_strided_tensor_map(
        tile.dtype(),
        address,
        [channels, width, height, frames as u64],
        &[cell_bytes, cell_bytes * width, cell_bytes * width * height],
        [tile.channel_step() as u32, columns as u32 * step, rows as u32 * row_step, 1],
        [1, step, row_step, 1],
    )
}

/// Returns every tile that the kernel is compiled for, apart from few output channels.
#[cfg(test)]
pub(crate) fn tile_candidates() -> Vec<ConvTile> {
    let few = [(8, 16, 32), (24, 16, 16)];
    let all = LARGE_TILES.into_iter().chain(SMALL_TILES).chain(few);
    let variants = all.flat_map(|(out_channels, width, height)| {
        let tile = move |(shares_patch, has_residual, is_e4m3)| ConvTile {
            out_channels,
            width,
            height,
            shares_patch,
            has_residual,
            is_e4m3,
        };
        // Only convolutions whose taps share a patch are e4m3.
        let is = [(true, true), (true, false), (false, true), (false, false)];
        let e4m3 = [(true, true, true), (true, false, true)];
        is.into_iter().map(move |(shares, has)| tile((shares, has, false))).chain(e4m3.map(tile))
    });
    variants.filter(|t| t.compile_defines().1 <= u32::try_from(MAX_SHARED_BYTES).unwrap()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::FeatureMask;

    fn conv_shape(size: [i32; 4], in_channels: i32, kernel: [i32; 3]) -> ConvShape {
        let [frames, height, width, channels] = size;
        ConvShape {
            frames,
            height,
            width,
            channels,
            in_frames: frames,
            in_height: height,
            in_width: width,
            in_channels,
            kernel_frames: kernel[0],
            kernel_rows: kernel[1],
            kernel_columns: kernel[2],
            frame_step: 1,
            row_step: 1,
            column_step: 1,
            pad: kernel[1] / 2,
            past: kernel[0] - 1,
            history: 0,
            halo_frames: 0,
        }
    }

    #[test]
    fn tiles_suit_the_channels_and_fill_the_device() {
        let capabilities =
            Capabilities { compute: (9, 0), multiprocessors: 132, mask: FeatureMask::default() };
        let own = ConvSm90::new(&capabilities).unwrap();
        let tile = |s: &ConvShape| {
            let t = own.choose_tile(s, DType::Bf16, false);
            (t.out_channels, t.width, t.height)
        };
        assert_eq!(tile(&conv_shape([4, 480, 832, 96], 96, [3, 3, 3])), (96, 16, 32));
        assert_eq!(tile(&conv_shape([4, 240, 416, 192], 192, [3, 3, 3])), (192, 16, 16));
        // Half of the rows: 15 and 7.5 tiles high.
        assert_eq!(tile(&conv_shape([4, 240, 832, 96], 96, [3, 3, 3])), (96, 32, 16));
        assert_eq!(tile(&conv_shape([4, 120, 416, 192], 192, [3, 3, 3])), (192, 32, 8));
        // One wave of small tiles instead of one of large tiles.
        assert_eq!(tile(&conv_shape([1, 60, 104, 384], 384, [3, 3, 3])), (96, 16, 16));
        assert_eq!(tile(&conv_shape([4, 480, 832, 3], 96, [3, 3, 3])), (8, 16, 32));
        assert_eq!(tile(&conv_shape([1, 60, 104, 16], 16, [1, 1, 1])), (16, 16, 16));
    }

    #[test]
    fn every_tile_fits_shared_memory() {
        let is_large = |t: &ConvTile| LARGE_TILES.contains(&(t.out_channels, t.width, t.height));
        let tiles = tile_candidates();
        assert_eq!(tiles.iter().filter(|t| is_large(t)).count(), 6 * LARGE_TILES.len(), "{tiles:?}");
    }

    #[test]
    fn other_convolutions_have_the_plain_kernel() {
        let s = conv_shape([1, 8, 8, 96], 3, [3, 3, 3]);
        assert!(!ConvSm90::is_supported(DType::Bf16, &s));
        let s = ConvShape { in_channels: 96, ..s };
        assert!(ConvSm90::is_supported(DType::Bf16, &s) && !ConvSm90::is_supported(DType::F32, &s));
        assert!(!ConvSm90::is_supported(DType::Bf16, &ConvShape { row_step: 3, column_step: 3, ..s }));
        let in_e4m3 = |in_channels| ConvSm90::is_supported(DType::E4m3, &ConvShape { in_channels, ..s });
        assert!(in_e4m3(96) && !in_e4m3(24), "a cell of 24 bytes");
        // A store of 8 channels would write into the next cell.
        let with_channels = |channels| ConvSm90::is_supported(DType::Bf16, &ConvShape { channels, ..s });
        assert!(with_channels(3) && with_channels(24) && with_channels(40));
        assert!(!with_channels(30) && !with_channels(100));
    }
}
