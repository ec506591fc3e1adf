//! The elementwise kernels and the row kernels of this crate. Row kernels are compiled for each row
//! width.

#![allow(unsafe_code, reason = "launches of kernels on raw addresses")]

use std::collections::BTreeMap;

use tessera_ir::DType;

use crate::capabilities::Capabilities;
use crate::compile::Compiler;
use crate::driver::{CudaError, CudaModule, CudaResult, CudaStream, KernelFunction};
use crate::kernel_params::{Kernel, KernelParams};
use crate::kernel_table;

pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");
/// Mbarrier, TMA and wgmma building blocks, included by the sm90 GEMM and attention kernels.
pub(crate) const HOPPER: &str = include_str!("kernels/hopper.cuh");
/// Extents of a convolution, for both of its kernels.
pub(crate) const CONV_SHAPE: &str = include_str!("kernels/conv.cuh");
const FRAMES: &str = include_str!("kernels/frames.cu");
const LANGUAGE: &str = include_str!("kernels/language.cu");
const HEADS: &str = include_str!("kernels/heads.cu");
const FUSED_LANGUAGE: &str = include_str!("kernels/fused_language.cu");
const EXPERTS: &str = include_str!("kernels/experts.cu");
const ROUTER: &str = include_str!("kernels/router.cu");
const WIRE: &str = include_str!("kernels/wire.cu");
const BUFFERS: &str = include_str!("kernels/buffers.cu");
const ROW_COMMON: &str = include_str!("kernels/rows.cuh");
const NORMS: &str = include_str!("kernels/norms.cu");
const RMS_ROPE: &str = include_str!("kernels/rms_rope.cu");
const ELEMENTWISE: &str = include_str!("kernels/elements.cu");
/// Building blocks of the attention kernels that multiply with mma.sync.
const MMA: &str = include_str!("kernels/mma.cuh");
const RELATIVE_ATTENTION: &str = include_str!("kernels/relative_attention.cu");
const FRAME_ATTENTION: &str = include_str!("kernels/frame_attention.cu");
const PAGED_ATTENTION: &str =
    concat!(include_str!("kernels/paged.cuh"), include_str!("kernels/paged_attention.cu"));
const LATENT_ATTENTION: &str =
    concat!(include_str!("kernels/paged.cuh"), include_str!("kernels/latent_attention.cu"));
const MERGE_PARTS: &str = concat!(include_str!("kernels/paged.cuh"), include_str!("kernels/merge_parts.cu"));

/// Threads per block of an elementwise kernel.
const ELEMENTWISE_THREADS: u32 = 256;

/// All kernels of one device except GEMM and attention.
#[derive(Debug)]
pub(crate) struct KernelSet {
    pub(crate) compiler: Compiler,
    elementwise: CudaModule,
    functions: BTreeMap<&'static str, KernelFunction>,
    /// Row kernels by width, and by whether rows are bf16 rather than f32.
    row_kernels: BTreeMap<(u64, bool), BTreeMap<&'static str, RowKernel>>,
    /// Attention kernels by name and the head size that they are compiled for.
    head_kernels: BTreeMap<(&'static str, u64), HeadKernel>,
    multiprocessors: u32,
    /// Whether launches of one stream may overlap.
    overlaps_launches: bool,
}

/// A kernel for rows of one width and dtype.
#[derive(Debug)]
struct RowKernel {
    kernel: KernelFunction,
    threads: u32,
    /// The number of blocks that the device can run at once.
    max_blocks: u32,
}

/// A kernel for heads of one size.
#[derive(Debug)]
struct HeadKernel {
    kernel: KernelFunction,
    /// The most dynamic shared memory of its launches so far, in bytes.
    shared_bytes: u32,
}

/// One launch of an elementwise or a row kernel, with all that it needs except the stream.
#[derive(Debug)]
pub(crate) struct KernelLaunch {
    name: &'static str,
    grid: LaunchGrid,
    /// Arguments of the type that the kernel declares.
    args: Box<dyn KernelParams>,
    /// Whether the kernel may begin before the one before it has ended.
    is_dependent: bool,
}

/// The grid of a launch.
#[derive(Debug, Clone, Copy)]
enum LaunchGrid {
    /// `count` blocks of an elementwise kernel with dynamic shared memory; nothing is launched for 0
    /// blocks.
    Blocks { count: u64, threads: u32, shared_bytes: u32 },
    /// A row kernel with as many blocks as the device can run at once; each block loops over rows.
    Rows { rows: u64, width: u64, dtype: DType },
    /// Blocks of a kernel that is compiled for a head size; 0 stands for any.
    Heads { head: u64, blocks: HeadBlocks },
}

/// The blocks of a kernel that is compiled for a head size.
#[derive(Debug, Clone, Copy)]
pub(crate) struct HeadBlocks {
    pub(crate) count: u64,
    pub(crate) threads: u32,
    /// Bytes of dynamic shared memory per block.
    pub(crate) shared_bytes: u32,
}

impl KernelLaunch {
    /// An elementwise kernel with one thread per element.
    pub(crate) fn elements<P: KernelParams + 'static>(kernel: Kernel<P>, n: u64, args: P) -> KernelLaunch {
        let blocks = n.div_ceil(u64::from(ELEMENTWISE_THREADS));
        KernelLaunch::blocks(kernel, (blocks, ELEMENTWISE_THREADS, 0), args)
    }

    /// An elementwise kernel with this many blocks, threads per block, and bytes of dynamic shared
    /// memory.
    pub(crate) fn blocks<P: KernelParams + 'static>(
        kernel: Kernel<P>,
        (count, threads, shared_bytes): (u64, u32, u32),
        args: P,
    ) -> KernelLaunch {
        let grid = LaunchGrid::Blocks { count, threads, shared_bytes };
        KernelLaunch { name: kernel.name(), grid, args: Box::new(args), is_dependent: false }
    }

    /// Describes a launch of a row kernel for rows of this width and dtype.
    pub(crate) fn for_rows<P: KernelParams + 'static>(
        kernel: Kernel<P>,
        (rows, width, dtype): (u64, u64, DType),
        args: P,
    ) -> KernelLaunch {
        KernelLaunch {
            name: kernel.name(),
            grid: LaunchGrid::Rows { rows, width, dtype },
            args: Box::new(args),
            is_dependent: false,
        }
    }

    /// Describes a launch of a kernel that is compiled for this head size; 0 stands for any.
    pub(crate) fn for_heads<P: KernelParams + 'static>(
        kernel: Kernel<P>,
        head: u64,
        blocks: HeadBlocks,
        args: P,
    ) -> KernelLaunch {
        KernelLaunch {
            name: kernel.name(),
            grid: LaunchGrid::Heads { head, blocks },
            args: Box::new(args),
            is_dependent: false,
        }
    }

    /// Lets the kernel begin before the one before it has ended, where the device can. Its source must call
    /// `wait_for_predecessor`.
    pub(crate) fn begin_early(self) -> KernelLaunch {
        KernelLaunch { is_dependent: true, ..self }
    }

    /// Returns the row width and dtype for which [`KernelSet::prepare_rows`] must compile the kernel;
    /// `None` for an elementwise kernel.
    pub(crate) fn row_variant(&self) -> Option<(u64, DType)> {
        match self.grid {
            LaunchGrid::Rows { width, dtype, .. } => Some((width, dtype)),
            LaunchGrid::Blocks { .. } | LaunchGrid::Heads { .. } => None,
        }
    }
}

/// Sources of the row kernels: their kernels, and how many bytes of a bf16 row a thread loads at
/// once. Rotary embedding loads rotations for each vector and wants long vectors. Norms load two
/// f32 columns for each element; with vectors of four elements a warp's loads are contiguous.
const ROW_SOURCES: [(&str, &str, u64, &[&str]); 2] = [
    (
        "norms",
        NORMS,
        8,
        &[
            kernel_table::RESIDUAL_NORM.name(),
            kernel_table::RESIDUAL_RMS.name(),
            kernel_table::ROW_SQUARE_SUM.name(),
            kernel_table::QUANTIZE.name(),
            kernel_table::QUANTIZE_BY_WORD.name(),
        ],
    ),
    ("rms_rope", RMS_ROPE, 16, &[kernel_table::RMS_ROPE.name()]),
];

/// Modules of the kernels that are compiled for a head size: their sources and their kernels.
const HEAD_SOURCES: [(&str, &str, &[&str]); 5] = [
    (
        "relative_attention",
        RELATIVE_ATTENTION,
        &[
            kernel_table::RELATIVE_ATTENTION_F32.name(),
            kernel_table::RELATIVE_ATTENTION_BF16.name(),
            kernel_table::RELATIVE_ATTENTION_TILED.name(),
        ],
    ),
    ("frame_attention", FRAME_ATTENTION, &[kernel_table::FRAME_ATTENTION.name()]),
    (
        "paged_attention",
        PAGED_ATTENTION,
        &[kernel_table::PAGED_ATTENTION_F32.name(), kernel_table::PAGED_ATTENTION_BF16.name()],
    ),
    (
        "latent_attention",
        LATENT_ATTENTION,
        &[kernel_table::LATENT_ATTENTION_F32.name(), kernel_table::LATENT_ATTENTION_BF16.name()],
    ),
    (
        "merge_parts",
        MERGE_PARTS,
        &[kernel_table::MERGE_PARTS_F32.name(), kernel_table::MERGE_PARTS_BF16.name()],
    ),
];

impl KernelSet {
    pub(crate) fn new(mut compiler: Compiler, capabilities: &Capabilities) -> CudaResult<KernelSet> {
        let elements = compiler.compile_module("elements", &elementwise_source(), &[])?;
        Ok(KernelSet {
            compiler,
            elementwise: elements,
            functions: BTreeMap::new(),
            row_kernels: BTreeMap::new(),
            head_kernels: BTreeMap::new(),
            multiprocessors: capabilities.multiprocessors.max(1),
            overlaps_launches: capabilities.compute.0 >= 9,
        })
    }

    /// Compiles what a launch needs, so that no launch has to. Elementwise kernels are compiled when the
    /// backend opens.
    pub(crate) fn prepare_launch(&mut self, launch: &KernelLaunch) -> CudaResult<()> {
        if let Some((width, dtype)) = launch.row_variant() {
            self.prepare_rows(width, dtype)?;
        }
        match launch.grid {
            LaunchGrid::Heads { head, blocks } => self.prepare_heads(launch.name, head, blocks.shared_bytes),
            LaunchGrid::Blocks { .. } | LaunchGrid::Rows { .. } => Ok(()),
        }
    }

    /// Compiles an attention kernel for a head size.
    fn prepare_heads(&mut self, name: &'static str, head: u64, shared_bytes: u32) -> CudaResult<()> {
        if !self.head_kernels.contains_key(&(name, head)) {
            let Some((module, source, _)) = HEAD_SOURCES.iter().find(|(.., kernels)| kernels.contains(&name))
            else {
                return Err(CudaError(format!("no source holds the kernel {name}")));
            };
            let module = self.compiler.compile_module(module, &head_source(source), &head_defines(head))?;
            let own = HeadKernel { kernel: module.get_function(name)?, shared_bytes: 0 };
            self.head_kernels.insert((name, head), own);
        }
        // Launches of one kernel need more or less shared memory, and a limit for less would end those for more.
        match self.head_kernels.get_mut(&(name, head)) {
            Some(own) if own.shared_bytes < shared_bytes => {
                own.shared_bytes = shared_bytes;
                own.kernel.set_max_shared_bytes(shared_bytes)
            }
            _ => Ok(()),
        }
    }

    /// Compiles the kernels for rows of a width.
    pub(crate) fn prepare_rows(&mut self, width: u64, dtype: DType) -> CudaResult<()> {
        let is_bf16 = dtype == DType::Bf16;
        if self.row_kernels.contains_key(&(width, is_bf16)) {
            return Ok(());
        }
        let mut found = BTreeMap::new();
        for (name, source, bytes, kernels) in ROW_SOURCES {
            let (threads, defines) = row_launch_params(width, is_bf16, bytes);
            let module = self.compiler.compile_module(name, &row_source(source), &defines)?;
            for name in kernels {
                let kernel = module.get_function(name)?;
                let most_blocks = kernel.max_active_blocks(threads)? * self.multiprocessors;
                found.insert(*name, RowKernel { kernel, threads, max_blocks: most_blocks });
            }
        }
        self.row_kernels.insert((width, is_bf16), found);
        Ok(())
    }

    /// Enqueues a launch.
    ///
    /// # Safety
    /// The addresses among the arguments must be device memory of the extents that the kernel's other
    /// arguments and the grid give, or 0 where the kernel accepts an absent operand. The memory must
    /// stay allocated until the stream has completed the launch; meanwhile no other stream may write
    /// what the kernel reads, or access what it writes.
    pub(crate) unsafe fn launch(&mut self, launch: &KernelLaunch, stream: &CudaStream) -> CudaResult<()> {
        let name = launch.name;
        if matches!(launch.grid, LaunchGrid::Blocks { .. }) {
            self.prepare_elementwise(name)?;
        }
        let (function, blocks, threads, shared_bytes) = match launch.grid {
            LaunchGrid::Blocks { count, threads, shared_bytes } => {
                (&self.functions[name], count as u32, threads, shared_bytes)
            }
            LaunchGrid::Rows { rows, width, dtype } => {
                let prepared = self.row_kernels.get(&(width, dtype == DType::Bf16)).and_then(|r| r.get(name));
                let Some(r) = prepared else {
                    let what = format!("kernel {name} was not compiled for rows of {width} {dtype}");
                    return Err(CudaError(what));
                };
                (&r.kernel, (rows as u32).min(r.max_blocks), r.threads, 0)
            }
            LaunchGrid::Heads { head, blocks: HeadBlocks { count, threads, shared_bytes } } => {
                let Some(own) = self.head_kernels.get(&(name, head)) else {
                    return Err(CudaError(format!("kernel {name} was not compiled for heads of {head}")));
                };
                (&own.kernel, count as u32, threads, shared_bytes)
            }
        };
        let (grid, mut arguments) = ([blocks, 1, 1], launch.args.addresses());
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the kernel of this name declares arguments of this type, and was compiled for the width or
        // head size of the grid; a dependent kernel waits for its predecessor. The caller guarantees the rest.
        unsafe {
            if launch.is_dependent && self.overlaps_launches {
                stream.launch_dependent_kernel(function, grid, threads, shared_bytes, &mut arguments)
            } else {
                stream.launch_kernel(function, grid, threads, shared_bytes, &mut arguments)
            }
        }
    }

    /// Looks up an elementwise kernel in advance, so that no launch has to.
    pub(crate) fn prepare_elementwise(&mut self, name: &'static str) -> CudaResult<()> {
        if !self.functions.contains_key(name) {
            self.functions.insert(name, self.elementwise.get_function(name)?);
        }
        Ok(())
    }
}

/// Returns the CUDA source of the elementwise kernels.
pub(crate) fn elementwise_source() -> String {
    format!(
        "{COMMON}{CONV_SHAPE}{ELEMENTWISE}{FRAMES}{LANGUAGE}{HEADS}{FUSED_LANGUAGE}{EXPERTS}{ROUTER}{WIRE}{BUFFERS}"
    )
}

/// Returns the function `wgmma_step`, which multiplies 64 rows by `columns` columns. It is generated
/// because the instruction names every accumulator register, which a macro cannot enumerate.
pub(crate) fn wgmma_source(columns: u64, dtype: DType) -> String {
    // Both operands are K-major, which the instruction for 8-bit elements does not state.
    let (elements, kind, majors) = match dtype {
        DType::E4m3 => (32, "e4m3.e4m3", ""),
        _ => (16, "bf16.bf16", ", 0, 0"),
    };
    let n = columns / 2;
    let list = |each: &dyn Fn(u64) -> String| (0..n).map(each).collect::<Vec<String>>().join(", ");
    let (names, constraints) = (list(&|i| format!("%{i}")), list(&|i| format!("\"+f\"(d[{i}])")));
    let (a, b, accumulate) = (n, n + 1, n + 2);
    format!(
        "// D (+)= A Bᵀ over one k-slice of {elements}, which is 32 bytes.\n\
         __device__ __forceinline__ void wgmma_step(float (&d)[{n}], u64 a, u64 b, int more) {{\n\
         asm volatile(\"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{accumulate}, 0;\\n\
         wgmma.mma_async.sync.aligned.m64n{columns}k{elements}.f32.{kind} {{{names}}}, %{a}, %{b}, p, 1, 1{majors};\\n}}\" \
         : {constraints} : \"l\"(a), \"l\"(b), \"r\"(more));\n}}\n"
    )
}

/// Returns the CUDA source of attention kernels that are compiled for a head size.
fn head_source(kernels: &str) -> String {
    format!("{COMMON}{MMA}{kernels}")
}

/// Returns the CUDA sources of [`HEAD_SOURCES`], each with its module and the names of its kernels.
#[cfg(test)]
pub(crate) fn head_sources() -> Vec<(&'static str, String, &'static [&'static str])> {
    HEAD_SOURCES.iter().map(|(module, source, kernels)| (*module, head_source(source), *kernels)).collect()
}

/// Returns the macros of an attention kernel for a head size; 0 stands for any.
pub(crate) fn head_defines(head: u64) -> [(&'static str, String); 1] {
    [("HEAD", head.to_string())]
}

/// Returns the CUDA source of row kernels with all that they include.
fn row_source(kernels: &str) -> String {
    format!("{COMMON}{ROW_COMMON}{kernels}")
}

/// Returns the CUDA sources of the row kernels, each with the names of its kernels.
#[cfg(test)]
pub(crate) fn row_sources() -> Vec<(String, &'static [&'static str])> {
    ROW_SOURCES.iter().map(|(_, source, _, kernels)| (row_source(source), *kernels)).collect()
}

/// Returns the sources of the row kernels with the macros for rows of a width.
#[cfg(test)]
pub(crate) fn row_variants(width: u64, is_bf16: bool) -> Vec<(String, [(&'static str, String); 4])> {
    let variant = |source, bytes| (row_source(source), row_launch_params(width, is_bf16, bytes).1);
    ROW_SOURCES.iter().map(|(_, source, bytes, _)| variant(source, *bytes)).collect()
}

/// Returns the threads per row and the macros of the row kernels. A vector has at most `bytes`
/// bytes in bf16 and 16 bytes in f32.
fn row_launch_params(width: u64, is_bf16: bool, max_vector_bytes: u64) -> (u32, [(&'static str, String); 4]) {
    let max_elements = if is_bf16 { max_vector_bytes / 2 } else { 4 };
    let vector = [max_elements, 4, 2, 1].into_iter().find(|v| width.is_multiple_of(*v)).unwrap_or(1);
    // About five vectors per thread: enough loads are in flight, many rows fit on a multiprocessor,
    // and per-row work that every thread repeats (addresses, rotations, cross-warp sums) is shared
    // by few threads. Measured with 64 to 640 threads for rows of 5,120.
    let threads = (width / vector).div_ceil(5).next_multiple_of(32).min(1024);
    let defines = [
        ("WIDTH", width.to_string()),
        ("BF16", u8::from(is_bf16).to_string()),
        ("ROW_VECTOR", vector.to_string()),
        ("ROW_THREADS", threads.to_string()),
    ];
    (threads as u32, defines)
}
