//! GEMM by this crate's own kernel for bf16 on Hopper: out = act(x · wᵀ + bias) + residual, with a
//! tile chosen for the shape. docs/design/0014 compares it with cuBLASLt.
//! [`autotune`](crate::gemm::autotune) chooses between the two; a GEMM with a GELU or residual
//! epilogue always uses this kernel, because its last bits differ from cuBLASLt's.

#![allow(unsafe_code, reason = "launches of kernels on raw addresses")]

use std::collections::BTreeMap;

use cudarc::driver::sys::CUtensorMap;
use tessera_ir::DType;

use super::shape::{GemmEpilogue, GemmOperands, GemmShape, GemmTile};
use crate::capabilities::{Capabilities, GEMM_FAMILY};
use crate::compile::Compiler;
use crate::driver::{CudaError, CudaResult, CudaStream};
use crate::kernel_params::{Bf16, DevicePtr, KernelParam, LoadedKernel, ParamType, kernel_signatures};
use crate::kernels::{COMMON, HOPPER, wgmma_source};
use crate::tensor_map::{BOX_COLUMNS, encode_tensor_map};

const SOURCE: &str = include_str!("../kernels/gemm_sm90.cu");

kernel_signatures! {
    GEMM_TABLE:

    /// out = act(x · wᵀ + bias) + residual. Absent operands are null.
    Gemm {
        w_map: CUtensorMap, x_map: CUtensorMap, x_rest_map: CUtensorMap, bias: DevicePtr<Bf16>,
        residual: DevicePtr<Bf16>, out: DevicePtr<Bf16>, rows: i32, columns: i32, inner: i32,
        redirected: RedirectedRange,
    } = GEMM "gemm";
}

/// Kernel argument with the layout of `RedirectedColumns` in gemm_sm90.cu; all zero for none.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct RedirectedRange {
    to: u64,
    row: u64,
    first: u64,
    last: u64,
}

impl KernelParam for RedirectedRange {
    const TYPE: ParamType = ParamType::Value("RedirectedColumns");
}

// The next four constants must equal those of the kernel.

/// Columns of out that a block computes.
const TILE_COLUMNS: u64 = 256;
/// Neighbouring blocks that form a cluster and share the loads of a row tile or a column tile.
const CLUSTER: u64 = 2;
/// Threads per block: one warpgroup loads, and two compute.
const THREADS: u32 = 384;
/// Bytes of shared memory for the epilogue: both computing warpgroups have two buffers of 32 rows
/// of 128 bytes.
const EPILOGUE_BYTES: u64 = 2 * 2 * 32 * 128;
/// Columns of a row that one lane stores at once.
pub(crate) const COLUMN_STEP: u64 = 8;
/// Maximum rows of a tile: more rows leave too few registers for the main loop.
const MAX_TILE_ROWS: u64 = 200;
/// Rows of a tile for small shapes: three cluster tiles hold 270 rows.
const MIN_TILE_ROWS: u64 = 48;
/// Number of the 4 k-slices in flight when the previous stage's buffers are released; in a tile's
/// last k-step it is doubled, for one accumulator.
const RELEASE_SLICES: u64 = 1;
/// Multiply-adds per multiprocessor and cycle: the peak rate of sm_90 in bf16.
const MULTIPLY_ADDS_PER_CYCLE: u64 = 2048;
/// Overhead of a tile in cycles, measured on an H200 with an epilogue that does not overlap the
/// main loop.
const TILE_OVERHEAD_CYCLES: u64 = 5400;
/// Cost of each loaded row or column relative to the tile's rows, in thousandths of the time:
/// blocks that share columns load a tenth less and take 0.4 to 0.8 % less time, and narrow tiles
/// take longer than their multiply-adds do.
const LOAD_COST_PER_MILLE: u64 = 37;
/// Maximum number of stages of a block's load pipeline; a stage holds the operands of one k-step.
const MAX_STAGES: u64 = 5;
/// Maximum shared memory of a block on sm_90, in bytes.
const MAX_SHARED_BYTES: u64 = 232_448;

/// The sm90 GEMM kernels that were compiled for one device, one per tile.
#[derive(Debug)]
pub(crate) struct GemmSm90 {
    cluster_count: u64,
    kernels: BTreeMap<GemmTile, CompiledGemm>,
}

#[derive(Debug)]
struct CompiledGemm {
    kernel: LoadedKernel<Gemm>,
    shared_bytes: u32,
}

impl GemmSm90 {
    /// Returns `None` if the device does not support the kernels.
    pub(crate) fn new(capabilities: &Capabilities) -> Option<GemmSm90> {
        let clusters = u64::from(capabilities.multiprocessors) / CLUSTER;
        (capabilities.supports(&GEMM_FAMILY) && clusters > 0)
            .then(|| GemmSm90 { cluster_count: clusters, kernels: BTreeMap::new() })
    }

    /// Returns whether the kernels support the shape.
    pub(crate) fn is_supported(s: &GemmShape) -> bool {
        !(s.gelu && s.residual)
            && s.dtype == DType::Bf16
            && s.out_columns.is_multiple_of(COLUMN_STEP)
            && s.inner.is_multiple_of(8)
    }

    /// Returns the tile with the lowest estimated time, or `None` if the kernel does not support
    /// the shape.
    pub(crate) fn choose_tile(&self, s: &GemmShape) -> Option<GemmTile> {
        let epilogue = match (s.gelu, s.residual) {
            (false, false) => GemmEpilogue::Plain,
            (true, false) => GemmEpilogue::Gelu,
            (false, true) => GemmEpilogue::Residual,
            (true, true) => return None,
        };
        let cost = |cut: &GemmTile| {
            let tile = TILE_COLUMNS * cut.tile_rows.max(cut.shared_read_rows()) * s.inner
                / MULTIPLY_ADDS_PER_CYCLE
                + TILE_OVERHEAD_CYCLES;
            let per_mille = 1000 + LOAD_COST_PER_MILLE * cut.loaded_extent() / cut.tile_rows;
            cut.tile_count(s).div_ceil(self.cluster_count) * tile * per_mille
        };
        // Of two equal candidates the first, which has more rows, wins: it reuses each loaded byte
        // more often.
        GemmSm90::is_supported(s).then(|| tile_candidates(epilogue).min_by_key(cost)).flatten()
    }

    /// Compiles the kernel of a tile on first use; [`launch_gemm`](GemmSm90::launch_gemm) needs it.
    pub(crate) fn prepare_kernel(&mut self, compiler: &mut Compiler, tile: GemmTile) -> CudaResult<()> {
        if self.kernels.contains_key(&tile) {
            return Ok(());
        }
        let (defines, shared_bytes) = tile.compile_defines();
        let module = compiler.compile_module("gemm", &tile.kernel_source(), &defines)?;
        let kernel = LoadedKernel::new(&module, GEMM)?;
        kernel.set_max_shared_bytes(shared_bytes)?;
        self.kernels.insert(tile, CompiledGemm { kernel, shared_bytes });
        Ok(())
    }

    /// Launches the kernel of a tile.
    ///
    /// # Safety
    /// Every operand that the shape has must be device memory of the shape's extent, and so must the
    /// rows that redirected columns go to. All must stay allocated until the stream has completed the
    /// GEMM; meanwhile no other stream may write the inputs or access the results. The residual may be
    /// the result.
    pub(crate) unsafe fn launch_gemm(
        &self,
        tile: GemmTile,
        s: GemmShape,
        operands: GemmOperands,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let Some(CompiledGemm { kernel, shared_bytes }) = self.kernels.get(&tile) else {
            return Err(CudaError(format!("no GEMM kernel was compiled for {tile:?}")));
        };
        let (row_bytes, box_columns) = (2 * s.inner, BOX_COLUMNS as u32);
        let rows = |box_rows: u64| {
            encode_tensor_map(operands.x, [s.inner, s.rows], &[row_bytes], [box_columns, box_rows as u32])
        };
        // Box sizes: of the shared tile, a block loads its part.
        let (first, rest, columns) = if tile.shares_columns {
            (tile.tile_rows, tile.tile_rows, TILE_COLUMNS / CLUSTER)
        } else {
            let first = tile.first_block_rows();
            (first, tile.tile_rows - first, TILE_COLUMNS)
        };
        let columns = encode_tensor_map(
            operands.w,
            [s.inner, s.out_columns],
            &[row_bytes],
            [box_columns, columns as u32],
        )?;
        let redirected = operands.redirected.map_or(RedirectedRange::default(), |a| RedirectedRange {
            to: a.address,
            row: a.row_address,
            first: a.columns.0,
            last: a.columns.1,
        });
        let args = Gemm {
            w_map: columns,
            x_map: rows(first)?,
            x_rest_map: rows(rest)?,
            bias: if s.bias { operands.bias.into() } else { DevicePtr::NULL },
            residual: operands.residual.into(),
            out: operands.out.into(),
            rows: s.rows as i32,
            columns: s.out_columns as i32,
            inner: s.inner as i32,
            redirected,
        };
        let blocks = CLUSTER * tile.tile_count(&s).min(self.cluster_count);
        // SAFETY: the caller guarantees the operands; the kernel was compiled for this tile and
        // keeps inside the shape.
        unsafe { kernel.launch([blocks as u32, 1, 1], THREADS, *shared_bytes, &args, stream) }
    }
}

impl GemmTile {
    /// Returns the number of cluster tiles of a shape.
    fn tile_count(self, s: &GemmShape) -> u64 {
        let (rows, columns) = if self.shares_columns {
            (CLUSTER * self.tile_rows, TILE_COLUMNS)
        } else {
            (self.tile_rows, CLUSTER * TILE_COLUMNS)
        };
        s.rows.div_ceil(rows) * s.out_columns.div_ceil(columns)
    }

    /// Returns the rows and columns that a block loads per k-step.
    fn loaded_extent(self) -> u64 {
        if self.shares_columns {
            TILE_COLUMNS / CLUSTER + self.tile_rows
        } else {
            TILE_COLUMNS + self.tile_rows / CLUSTER
        }
    }

    /// Returns the number of rows whose multiply-adds take as long as the wgmmas' reads of shared
    /// memory: each wgmma reads 64 columns and all rows of the tile.
    fn shared_read_rows(self) -> u64 {
        (self.tile_rows + 64) / 2
    }

    /// Returns the rows of a shared row tile that the first block of a cluster loads.
    fn first_block_rows(self) -> u64 {
        (self.tile_rows / 2).next_multiple_of(8)
    }

    /// Returns the kernel's macros and its shared memory in bytes.
    pub(crate) fn compile_defines(self) -> ([(&'static str, String); 7], u32) {
        let bytes =
            |stages: u64| stages * ((TILE_COLUMNS + self.tile_rows) * 2 * BOX_COLUMNS + 16) + EPILOGUE_BYTES;
        let stages = (2..=MAX_STAGES).rev().find(|s| bytes(*s) <= MAX_SHARED_BYTES).unwrap_or(2);
        // Cluster tiles of rows per band; these values minimise the bytes that one wave of tiles
        // reads.
        let band = if self.shares_columns { 7 } else { 13 };
        let defines = [
            ("TILE_ROWS", self.tile_rows),
            ("SAME_COLUMNS", self.shares_columns.into()),
            ("GELU", (self.epilogue == GemmEpilogue::Gelu).into()),
            ("RESIDUAL", (self.epilogue == GemmEpilogue::Residual).into()),
            ("STAGES", stages),
            ("BAND", band),
            ("RELEASE_SLICES", RELEASE_SLICES),
        ];
        (defines.map(|(k, v)| (k, v.to_string())), bytes(stages) as u32)
    }

    /// Returns the kernel's source.
    pub(crate) fn kernel_source(self) -> String {
        format!("{COMMON}{HOPPER}{}{SOURCE}", wgmma_source(self.tile_rows, DType::Bf16))
    }
}

#[cfg(test)]
pub(crate) const EPILOGUES: [GemmEpilogue; 3] =
    [GemmEpilogue::Plain, GemmEpilogue::Gelu, GemmEpilogue::Residual];

/// Returns all tile candidates, the tallest first.
pub(crate) fn tile_candidates(epilogue: GemmEpilogue) -> impl Iterator<Item = GemmTile> {
    let row_counts = (96..=MAX_TILE_ROWS).rev().step_by(8).chain([MIN_TILE_ROWS]);
    row_counts.flat_map(move |width| {
        [true, false].map(|same_columns| GemmTile {
            tile_rows: width,
            shares_columns: same_columns,
            epilogue,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::capabilities::FeatureMask;
    use crate::gemm::shape::VIDEO_GEMM;

    #[test]
    fn chosen_tiles_minimise_idle_blocks() {
        let capabilities =
            |compute| Capabilities { compute, multiprocessors: 132, mask: FeatureMask::default() };
        let own = GemmSm90::new(&capabilities((9, 0))).unwrap();
        let cut = |rows, columns| {
            let cut = own.choose_tile(&GemmShape { rows, out_columns: columns, ..VIDEO_GEMM });
            cut.map(|c| (c.tile_rows, c.shares_columns))
        };
        // 13 by 20 tiles: four waves of 66 clusters, with four idle clusters in the last.
        assert_eq!(cut(4680, 5120), Some((184, true)));
        assert_eq!(cut(4680, 15360), Some((200, true)));
        assert_eq!(cut(2340, 5120), Some((184, false)));
        assert_eq!(cut(2160, 5120), Some((168, false)));
        assert_eq!(cut(2160, 15360), Some((200, false)));
        assert_eq!(cut(1170, 5120), Some((200, true)));
        assert_eq!(cut(1170, 15360), Some((200, true)));
        // Short tiles where taller ones would leave half of the device idle.
        assert_eq!(cut(540, 5120), Some((96, true)));
        assert_eq!(cut(270, 5120), Some((48, true)));
        // Five waves of shorter tiles would take as long and read more from L2.
        let long = GemmShape { inner: 13824, ..VIDEO_GEMM };
        assert_eq!(own.choose_tile(&long).map(|c| (c.tile_rows, c.shares_columns)), Some((184, true)));
        assert_eq!(cut(4680, 5140), None);
        assert_eq!(own.choose_tile(&GemmShape { gelu: true, residual: true, ..VIDEO_GEMM }), None);
        assert!(GemmSm90::new(&capabilities((10, 0))).is_none());
    }

    #[test]
    fn every_tile_fits_shared_memory() {
        for cut in EPILOGUES.into_iter().flat_map(tile_candidates) {
            let (_, bytes) = cut.compile_defines();
            assert!(u64::from(bytes) <= MAX_SHARED_BYTES, "{cut:?}: {bytes} bytes");
            assert!(cut.first_block_rows() < cut.tile_rows);
        }
    }
}
