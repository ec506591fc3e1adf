//! The elementwise kernels and the row kernels of this crate. Row kernels are compiled for each row
//! width.

use std::collections::BTreeMap;

use tessera_ir::DType;

use crate::compile::Compiler;
use crate::driver::{CudaError, CudaModule, CudaResult, CudaStream, KernelArgs, KernelFunction};

pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");
/// Definitions shared by the kernels for Hopper.
pub(crate) const HOPPER: &str = include_str!("kernels/hopper.cuh");
const ROW_COMMON: &str = include_str!("kernels/rows.cuh");
const NORMS: &str = include_str!("kernels/norms.cu");
const RMS_ROPE: &str = include_str!("kernels/rms_rope.cu");
const ELEMENTWISE: &str = include_str!("kernels/elements.cu");

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
    row_modules: Vec<CudaModule>,
    multiprocessors: u32,
}

/// A kernel for rows of one width and dtype.
#[derive(Debug, Clone, Copy)]
struct RowKernel {
    kernel: KernelFunction,
    threads: u32,
    /// The number of blocks that the device can run at once.
    max_blocks: u32,
}

/// Sources of the row kernels: their kernels, and how many bytes of a bf16 row a thread loads at
/// once. Rotary embedding loads rotations for each vector and wants long vectors. Norms load two
/// f32 columns for each element; with vectors of four elements a warp's loads are contiguous.
const ROW_SOURCES: [(&str, &str, u64, &[&str]); 2] = [
    ("norms", NORMS, 8, &["residual_norm", "row_square_sum", "quantize"]),
    ("rms_rope", RMS_ROPE, 16, &["rms_rope"]),
];

impl KernelSet {
    pub(crate) fn new(mut compiler: Compiler, multiprocessors: i32) -> CudaResult<KernelSet> {
        let elements = compiler.compile_module("elements", &format!("{COMMON}{ELEMENTWISE}"), &[])?;
        let multiprocessors = multiprocessors.max(1) as u32;
        Ok(KernelSet {
            compiler,
            elementwise: elements,
            functions: BTreeMap::new(),
            row_kernels: BTreeMap::new(),
            row_modules: vec![],
            multiprocessors,
        })
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
            let module =
                self.compiler.compile_module(name, &format!("{COMMON}{ROW_COMMON}{source}"), &defines)?;
            for name in kernels {
                let kernel = module.get_function(name)?;
                let most_blocks = kernel.max_active_blocks(threads)? * self.multiprocessors;
                found.insert(*name, RowKernel { kernel, threads, max_blocks: most_blocks });
            }
            self.row_modules.push(module);
        }
        self.row_kernels.insert((width, is_bf16), found);
        Ok(())
    }

    /// Launches a row kernel with as many blocks as the device can run at once; each block loops
    /// over rows.
    pub(crate) fn launch_rows(
        &self,
        name: &'static str,
        (rows, width, dtype): (u64, u64, DType),
        args: KernelArgs,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let prepared = self.row_kernels.get(&(width, dtype == DType::Bf16)).and_then(|r| r.get(name));
        let Some(r) = prepared else {
            return Err(CudaError(format!("kernel {name} was not compiled for rows of {width} {dtype}")));
        };
        if rows == 0 {
            return Ok(());
        }
        stream.launch_kernel(r.kernel, [(rows as u32).min(r.max_blocks), 1, 1], r.threads, 0, args)
    }

    /// Looks up an elementwise kernel in advance, so that no launch has to.
    pub(crate) fn prepare_elementwise(&mut self, name: &'static str) -> CudaResult<()> {
        if !self.functions.contains_key(name) {
            self.functions.insert(name, self.elementwise.get_function(name)?);
        }
        Ok(())
    }

    /// Launches an elementwise kernel with one thread per element.
    pub(crate) fn launch_elementwise(
        &mut self,
        name: &'static str,
        n: u64,
        args: KernelArgs,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        self.launch_blocks(
            name,
            n.div_ceil(u64::from(ELEMENTWISE_THREADS)),
            ELEMENTWISE_THREADS,
            0,
            args,
            stream,
        )
    }

    /// Launches a kernel with `n` blocks.
    pub(crate) fn launch_blocks(
        &mut self,
        name: &'static str,
        n: u64,
        threads: u32,
        shared: u32,
        args: KernelArgs,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        if n == 0 {
            return Ok(());
        }
        self.prepare_elementwise(name)?;
        stream.launch_kernel(self.functions[name], [n as u32, 1, 1], threads, shared, args)
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attention_sm90;
    use crate::compile::{compile_cubin, compile_options};
    use crate::dylib::Nvrtc;
    use crate::gemm_sm90;
    use crate::libraries::Libraries;

    /// Checks that a source compiles for an architecture.
    fn assert_compiles(nvrtc: &Nvrtc, arch: &str, (name, source): (&str, &str), defines: &[(&str, String)]) {
        if let Err(e) = compile_cubin(nvrtc, name, source, &compile_options(arch, defines)) {
            panic!("{name} for {arch} with {defines:?}: {}", e.0);
        }
    }

    #[test]
    fn every_kernel_compiles() {
        let folders = std::env::var_os("TESSERA_CUDA_LIBS").unwrap_or_default();
        let libraries = Libraries::load(&std::env::split_paths(&folders).collect::<Vec<_>>());
        let Ok(nvrtc) = Nvrtc::load(&libraries) else {
            eprintln!("skipped: no NVRTC found; TESSERA_CUDA_LIBS lists the folders to search");
            return;
        };
        let elements = format!("{COMMON}{ELEMENTWISE}");
        let exchange = include_str!("kernels/p2p_collectives.cu");
        let number = |(name, value): (&'static str, u64)| (name, value.to_string());
        for arch in ["sm_80", "sm_90a"] {
            assert_compiles(&nvrtc, arch, ("elements", &elements), &[]);
            for (name, source, bytes, _) in ROW_SOURCES {
                let source = format!("{COMMON}{ROW_COMMON}{source}");
                for (width, half) in [(5120, true), (384, true), (128, false), (7, false)] {
                    assert_compiles(&nvrtc, arch, (name, &source), &row_launch_params(width, half, bytes).1);
                }
            }
            for (members, me) in [(1, 0), (2, 1), (4, 2), (16, 15)] {
                let group = [("MEMBERS", members), ("ME", me)].map(number);
                assert_compiles(&nvrtc, arch, ("exchange", exchange), &group);
            }
        }
        for cut in attention_sm90::TILINGS {
            assert_compiles(
                &nvrtc,
                "sm_90a",
                ("attention", &attention_sm90::kernel_source()),
                &cut.compile_defines(),
            );
        }
        for cut in gemm_sm90::EPILOGUES.into_iter().flat_map(gemm_sm90::tile_candidates) {
            assert_compiles(&nvrtc, "sm_90a", ("gemm", &cut.kernel_source()), &cut.compile_defines().0);
        }
    }
}
