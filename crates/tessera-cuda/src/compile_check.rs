//! Compiles every kernel with NVRTC for every architecture that its family declares. It needs the
//! compiler and no GPU.
//!
//! TESSERA_CUDA_LIBS names the folder of libnvrtc.so.13, which the Python wheel `nvidia-cuda-nvrtc`
//! contains; version 13.0.88 is the one of CUDA 13.0, to which the bindings are pinned. Without NVRTC
//! the check prints that it did not run, and with TESSERA_REQUIRE_NVRTC=1 it fails. No kernel includes
//! a header of the toolkit, so no other wheel is needed.

use std::io::Write;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::attention_sm90;
use crate::capabilities::{
    ATTENTION_FAMILY, CONV_FAMILY, Capabilities, FeatureMask, GEMM_FAMILY, KernelFamily,
};
use crate::compile::{compile_cubin, compile_options};
use crate::conv;
use crate::cubin::is_complete_cubin;
use crate::dylib::Nvrtc;
use crate::gemm::sm90::{self, EPILOGUES};
use crate::kernels::{elementwise_source, head_defines, head_sources, row_variants};
use crate::libraries::Libraries;

/// A family for Ampere, Ada, Hopper and Blackwell.
const fn portable_family(name: &'static str) -> KernelFamily {
    KernelFamily { name, needs: None, architectures: &[(8, 0), (8, 9), (9, 0), (10, 0)] }
}

const ELEMENTWISE_FAMILY: KernelFamily = portable_family("elementwise kernels");
const HEAD_FAMILY: KernelFamily = portable_family("attention kernels for a head size");
const ROW_FAMILY: KernelFamily = portable_family("row kernels");
const COLLECTIVE_FAMILY: KernelFamily = portable_family("collective kernels");

/// One compilation: a source with macros, for an architecture.
struct Compilation {
    family: KernelFamily,
    architecture: String,
    source: String,
    defines: Vec<(&'static str, String)>,
}

/// Returns the compilations of a source for all architectures of its family.
fn compilations(
    family: KernelFamily,
    source: &str,
    defines: &[(&'static str, String)],
) -> impl Iterator<Item = Compilation> {
    let (source, defines) = (source.to_string(), defines.to_vec());
    family.architectures.iter().map(move |compute| {
        let c = Capabilities { compute: *compute, multiprocessors: 1, mask: FeatureMask::default() };
        Compilation {
            family,
            architecture: c.architecture(),
            source: source.clone(),
            defines: defines.clone(),
        }
    })
}

/// Returns all kernels, in the variants that runs compile.
fn all_compilations() -> Vec<Compilation> {
    let mut out: Vec<Compilation> = compilations(ELEMENTWISE_FAMILY, &elementwise_source(), &[]).collect();
    for (width, is_bf16) in [(5120, true), (384, true), (128, false), (7, false)] {
        for (source, defines) in row_variants(width, is_bf16) {
            out.extend(compilations(ROW_FAMILY, &source, &defines));
        }
    }
    for (module, source, _) in head_sources() {
        let heads: &[u64] = match module {
            "frame_attention" => &[32, 96, 384],
            "paged_attention" => &[5, 128],
            // The latents of DeepSeek-V3, and heads that lanes do not divide.
            "latent_attention" => &[13, 576],
            "merge_parts" => &[0],
            _ => &[0, 16, 48, 64, 128],
        };
        for head in heads {
            out.extend(compilations(HEAD_FAMILY, &source, &head_defines(*head)));
        }
    }
    for (members, me) in [(1, 0), (2, 1), (4, 2), (16, 15)] {
        let group = [("MEMBERS", members.to_string()), ("ME", me.to_string())];
        let source = include_str!("kernels/p2p_collectives.cu");
        out.extend(compilations(COLLECTIVE_FAMILY, source, &group));
    }
    for tiling in attention_sm90::TILINGS {
        let source = attention_sm90::kernel_source();
        out.extend(compilations(ATTENTION_FAMILY, &source, &tiling.compile_defines()));
    }
    for tile in conv::tile_candidates() {
        out.extend(compilations(CONV_FAMILY, &tile.kernel_source(), &tile.compile_defines().0));
    }
    for tile in EPILOGUES.into_iter().flat_map(sm90::tile_candidates) {
        out.extend(compilations(GEMM_FAMILY, &tile.kernel_source(), &tile.compile_defines().0));
    }
    out
}

/// Returns the compiler, or `None` after saying that the check does not run.
///
/// # Panics
/// If TESSERA_REQUIRE_NVRTC is 1 and there is no compiler.
#[allow(clippy::disallowed_methods, reason = "the environment names the folders of the compiler")]
fn find_compiler() -> Option<Nvrtc> {
    let folders = std::env::var_os("TESSERA_CUDA_LIBS").unwrap_or_default();
    let libraries = Libraries::load(&std::env::split_paths(&folders).collect::<Vec<_>>());
    match Nvrtc::load(&libraries) {
        Ok(nvrtc) => Some(nvrtc),
        Err(why) => {
            let is_required = std::env::var("TESSERA_REQUIRE_NVRTC").is_ok_and(|v| v == "1");
            assert!(!is_required, "TESSERA_REQUIRE_NVRTC is set, but {}", why.message);
            // The test harness hides what the print macros write in a test that passes.
            let note = format!("SKIPPED: no kernel was compiled: {}\n", why.message);
            std::io::stderr().write_all(note.as_bytes()).expect("standard error");
            None
        }
    }
}

#[test]
fn every_kernel_compiles_for_every_declared_architecture() {
    let Some(nvrtc) = find_compiler() else { return };
    let all = all_compilations();
    let next = AtomicUsize::new(0);
    let compile_some = || -> Vec<String> {
        let own = std::iter::from_fn(|| all.get(next.fetch_add(1, Ordering::Relaxed)));
        own.filter_map(|c| find_problem(&nvrtc, c)).collect()
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let problems: Vec<String> = std::thread::scope(|s| {
        let workers: Vec<_> = (0..threads).map(|_| s.spawn(compile_some)).collect();
        workers.into_iter().flat_map(|w| w.join().expect("a worker")).collect()
    });
    // The log of one kernel is long enough.
    let first = problems.first().map_or("", String::as_str);
    assert!(problems.is_empty(), "{} of {} kernels fail, the first: {first}", problems.len(), all.len());
}

/// Compiles a kernel and returns what is wrong with it.
fn find_problem(nvrtc: &Nvrtc, c: &Compilation) -> Option<String> {
    let options = compile_options(&c.architecture, &c.defines);
    let why = match compile_cubin(nvrtc, "kernel", &c.source, &options) {
        Err(e) => e.0,
        // The cache would otherwise never return this image.
        Ok(image) if !is_complete_cubin(&image) => "an incomplete cubin".to_string(),
        Ok(_) => return None,
    };
    Some(format!("{} for {} with {:?}: {why}", c.family.name, c.architecture, c.defines))
}

#[test]
fn a_kernel_that_does_not_compile_is_reported() {
    let Some(nvrtc) = find_compiler() else { return };
    let options = compile_options("sm_80", &[]);
    let refused = compile_cubin(&nvrtc, "kernel", "__global__ void f() { unknown(); }", &options);
    assert!(refused.is_err_and(|e| e.0.contains("kernel.cu does not compile") && e.0.contains("unknown")));
    // Ampere has no wgmma, so an architecture that a family does not declare is refused.
    let tile = sm90::tile_candidates(EPILOGUES[0]).next().expect("a tile");
    let options = compile_options("sm_80", &tile.compile_defines().0);
    assert!(compile_cubin(&nvrtc, "gemm", &tile.kernel_source(), &options).is_err());
}
