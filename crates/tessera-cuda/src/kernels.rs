//! Kernels of this crate, compiled for the device and, where they hold whole rows, for a row's width.

use std::collections::BTreeMap;

use tessera_ir::DType;

use crate::compile::Compiler;
use crate::driver::{Args, Done, Failed, Function, Module, Stream};

pub(crate) const COMMON: &str = include_str!("kernels/common.cuh");
/// What kernels for Hopper share.
pub(crate) const HOPPER: &str = include_str!("kernels/hopper.cuh");
const ROWS: &str = include_str!("kernels/rows.cuh");
const NORMS: &str = include_str!("kernels/norms.cu");
const TURNS: &str = include_str!("kernels/turns.cu");
const ELEMENTS: &str = include_str!("kernels/elements.cu");

/// Threads of a block that works on elements.
const BLOCK: u32 = 256;

/// All kernels of one device.
#[derive(Debug)]
pub(crate) struct Kernels {
    pub(crate) compiler: Compiler,
    elements: Module,
    found: BTreeMap<&'static str, Function>,
    /// Kernels for rows of a width, in bf16 or in f32.
    rows: BTreeMap<(u64, bool), BTreeMap<&'static str, Rows>>,
    row_modules: Vec<Module>,
    multiprocessors: u32,
}

/// A kernel for rows of one width and dtype.
#[derive(Debug, Clone, Copy)]
struct Rows {
    kernel: Function,
    threads: u32,
    /// As many as the device holds at once.
    most_blocks: u32,
}

/// Sources of kernels over rows: which they hold, and how many bytes of a bf16 row a thread takes at once. Rotations read the
/// turns of a pair for every piece and want long ones; norms read two columns of f32 for every element, and a warp's lie
/// side by side where pieces are of four.
const ROW_SOURCES: [(&str, &str, u64, &[&str]); 2] = [
    ("norms", NORMS, 8, &["residual_norm", "row_square_sum", "quantize"]),
    ("turns", TURNS, 16, &["rms_rope"]),
];

impl Kernels {
    pub(crate) fn new(mut compiler: Compiler, multiprocessors: i32) -> Done<Kernels> {
        let elements = compiler.module("elements", &format!("{COMMON}{ELEMENTS}"), &[])?;
        let multiprocessors = multiprocessors.max(1) as u32;
        Ok(Kernels {
            compiler,
            elements,
            found: BTreeMap::new(),
            rows: BTreeMap::new(),
            row_modules: vec![],
            multiprocessors,
        })
    }

    /// Compiles what rows of a width need.
    pub(crate) fn prepare_rows(&mut self, width: u64, dtype: DType) -> Done<()> {
        let half = dtype == DType::Bf16;
        if self.rows.contains_key(&(width, half)) {
            return Ok(());
        }
        let mut found = BTreeMap::new();
        for (name, source, bytes, kernels) in ROW_SOURCES {
            let (threads, defines) = row_cut(width, half, bytes);
            let module = self.compiler.module(name, &format!("{COMMON}{ROWS}{source}"), &defines)?;
            for name in kernels {
                let kernel = module.function(name)?;
                let most_blocks = kernel.blocks_at_once(threads)? * self.multiprocessors;
                found.insert(*name, Rows { kernel, threads, most_blocks });
            }
            self.row_modules.push(module);
        }
        self.rows.insert((width, half), found);
        Ok(())
    }

    /// Launches a kernel over rows, which is told how many there are: as many blocks as the device holds at once.
    pub(crate) fn rows(
        &self,
        name: &'static str,
        (rows, width, dtype): (u64, u64, DType),
        args: Args,
        stream: &Stream,
    ) -> Done<()> {
        let prepared = self.rows.get(&(width, dtype == DType::Bf16)).and_then(|r| r.get(name));
        let Some(r) = prepared else {
            return Err(Failed(format!("{name} was not compiled for rows of {width} {dtype}")));
        };
        if rows == 0 {
            return Ok(());
        }
        stream.launch(r.kernel, [(rows as u32).min(r.most_blocks), 1, 1], r.threads, 0, args)
    }

    /// Makes a kernel of elements ready, so that no call looks for it.
    pub(crate) fn prepare(&mut self, name: &'static str) -> Done<()> {
        if !self.found.contains_key(name) {
            self.found.insert(name, self.elements.function(name)?);
        }
        Ok(())
    }

    /// Launches a kernel that gives each of `n` elements a thread.
    pub(crate) fn elements(&mut self, name: &'static str, n: u64, args: Args, stream: &Stream) -> Done<()> {
        self.blocks(name, n.div_ceil(u64::from(BLOCK)), BLOCK, 0, args, stream)
    }

    /// Launches a kernel of `n` blocks.
    pub(crate) fn blocks(
        &mut self,
        name: &'static str,
        n: u64,
        threads: u32,
        shared: u32,
        args: Args,
        stream: &Stream,
    ) -> Done<()> {
        if n == 0 {
            return Ok(());
        }
        self.prepare(name)?;
        stream.launch(self.found[name], [n as u32, 1, 1], threads, shared, args)
    }
}

/// Threads a row of a width, and what its kernels are compiled with: pieces of at most so many bytes in bf16, of 16 in f32.
fn row_cut(width: u64, half: bool, bytes: u64) -> (u32, [(&'static str, String); 4]) {
    let most = if half { bytes / 2 } else { 4 };
    let vector = [most, 4, 2, 1].into_iter().find(|v| width.is_multiple_of(*v)).unwrap_or(1);
    // About five pieces a thread: enough is read ahead, many rows fit a multiprocessor, and what is done once a row by every
    // thread (places, turns, sums across warps) is done by few. Measured over 64 to 640 threads for rows of 5,120.
    let threads = (width / vector).div_ceil(5).next_multiple_of(32).min(1024);
    let defines = [
        ("WIDTH", width.to_string()),
        ("BF16", u8::from(half).to_string()),
        ("ROW_VECTOR", vector.to_string()),
        ("ROW_THREADS", threads.to_string()),
    ];
    (threads as u32, defines)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compile::{compile, options};
    use crate::flash;
    use crate::libraries::Libraries;
    use crate::tables::Nvrtc;
    use crate::warpgroups;

    /// Compiles a source as a device of a kind would have it.
    fn compiles(nvrtc: &Nvrtc, arch: &str, (name, source): (&str, &str), defines: &[(&str, String)]) {
        if let Err(e) = compile(nvrtc, name, source, &options(arch, defines)) {
            panic!("{name} for {arch} with {defines:?}: {}", e.0);
        }
    }

    #[test]
    fn every_kernel_compiles_where_the_compiler_is() {
        let told = std::env::var_os("TESSERA_CUDA_LIBS").unwrap_or_default();
        let libraries = Libraries::load(&std::env::split_paths(&told).collect::<Vec<_>>());
        let Ok(nvrtc) = Nvrtc::load(&libraries) else {
            eprintln!("skipped: no NVRTC here; TESSERA_CUDA_LIBS names folders to look in");
            return;
        };
        let elements = format!("{COMMON}{ELEMENTS}");
        let exchange = include_str!("kernels/exchange.cu");
        let number = |(name, value): (&'static str, u64)| (name, value.to_string());
        for arch in ["sm_80", "sm_90a"] {
            compiles(&nvrtc, arch, ("elements", &elements), &[]);
            for (name, source, bytes, _) in ROW_SOURCES {
                let source = format!("{COMMON}{ROWS}{source}");
                for (width, half) in [(5120, true), (384, true), (128, false), (7, false)] {
                    compiles(&nvrtc, arch, (name, &source), &row_cut(width, half, bytes).1);
                }
            }
            for (members, me) in [(1, 0), (2, 1), (4, 2), (16, 15)] {
                let place = [("MEMBERS", members), ("ME", me)].map(number);
                compiles(&nvrtc, arch, ("exchange", exchange), &place);
            }
        }
        for cut in flash::CUTS {
            compiles(&nvrtc, "sm_90a", ("attention", &flash::source()), &cut.defines());
        }
        for cut in warpgroups::ENDINGS.into_iter().flat_map(warpgroups::cuts) {
            compiles(&nvrtc, "sm_90a", ("products", &cut.source()), &cut.defines().0);
        }
    }
}
