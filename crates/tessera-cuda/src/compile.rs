//! Compiles kernels for the present device with NVRTC and caches the cubins.
//!
//! A cubin's cache key is a hash of everything it depends on: source, options, compiler version.
//! The caller that opens the backend supplies the cache; without one, every process compiles all
//! kernels.

use std::ffi::{CString, c_char, c_int};
use std::fmt::Debug;
use std::sync::Arc;

use cudarc::nvrtc::sys::nvrtcResult;

use crate::driver::{CudaError, CudaModule, CudaResult, cuda_failure};
use crate::dylib::Nvrtc;

/// A persistent cache of compiled kernels and autotuning results.
pub trait KernelCache: Debug + Send + Sync {
    /// Returns the data stored under a name, if any.
    fn load(&self, name: &str) -> Option<Vec<u8>>;
    /// Stores data under a name. Failing to store is allowed: a missing entry is built again.
    fn save(&self, name: &str, image: &[u8]);
}

/// A compiler for one device architecture.
#[derive(Debug)]
pub(crate) struct Compiler {
    nvrtc: Nvrtc,
    arch: String,
    version: String,
    cache: Option<Arc<dyn KernelCache>>,
    /// Number of sources compiled by this process; cache hits do not count.
    pub(crate) compiled_count: u32,
}

impl Compiler {
    /// Creates a compiler for a compute capability, for example (9, 0).
    pub(crate) fn new(
        nvrtc: Nvrtc,
        capability: (i32, i32),
        cache: Option<Arc<dyn KernelCache>>,
    ) -> CudaResult<Compiler> {
        let (mut major, mut minor) = (0, 0);
        check_result((nvrtc.version)(&mut major, &mut minor), "nvrtcVersion")?;
        // The suffix `a` enables instructions of exactly this architecture.
        let (cc_major, cc_minor) = capability;
        let arch = if cc_major >= 9 {
            format!("sm_{cc_major}{cc_minor}a")
        } else {
            format!("sm_{cc_major}{cc_minor}")
        };
        Ok(Compiler { nvrtc, arch, version: format!("{major}.{minor}"), cache, compiled_count: 0 })
    }

    /// Compiles a source with the given macros, or loads it from the cache.
    pub(crate) fn compile_module(
        &mut self,
        name: &str,
        source: &str,
        defines: &[(&str, String)],
    ) -> CudaResult<CudaModule> {
        let options = compile_options(&self.arch, defines);
        let parts = options.iter().map(String::as_str).chain([self.version.as_str(), source]);
        let file = cache_file_name(name, parts, "cubin");
        if let Some(image) = self.cache.as_ref().and_then(|k| k.load(&file))
            && let Ok(module) = CudaModule::load(&image)
        {
            return Ok(module);
        }
        let image = compile_cubin(&self.nvrtc, name, source, &options)?;
        self.compiled_count += 1;
        if let Some(kept) = &self.cache {
            kept.save(&file, &image);
        }
        CudaModule::load(&image)
    }
}

/// Returns a cache file name that contains a hash of all `parts`.
pub(crate) fn cache_file_name<'a>(
    what: &str,
    parts: impl IntoIterator<Item = &'a str>,
    extension: &str,
) -> String {
    let mut hash = blake3::Hasher::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("{what}-{}.{extension}", &hash.finalize().to_hex()[..32])
}

/// Returns the compiler options that every source is compiled with.
pub(crate) fn compile_options(arch: &str, defines: &[(&str, String)]) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_string(),
        "--device-as-default-execution-space".to_string(),
        // No FMA contraction, as on the CPU; kernels that want an FMA call fmaf.
        "--fmad=false".to_string(),
    ];
    options.extend(defines.iter().map(|(k, v)| format!("-D{k}={v}")));
    options
}

/// Compiles a source to a cubin.
///
/// # Errors
/// The compiler's log.
pub(crate) fn compile_cubin(
    nvrtc: &Nvrtc,
    name: &str,
    source: &str,
    options: &[String],
) -> CudaResult<Vec<u8>> {
    let text =
        |s: &str| CString::new(s).map_err(|_| CudaError("a kernel's source contains a NUL byte".into()));
    let (code, file) = (text(source)?, text(&format!("{name}.cu"))?);
    let options = options.iter().map(|o| text(o)).collect::<CudaResult<Vec<CString>>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    let none = std::ptr::null();
    check_result(
        (nvrtc.create)(&mut program, code.as_ptr(), file.as_ptr(), 0, none, none),
        "nvrtcCreateProgram",
    )?;
    let done = (nvrtc.compile)(program, pointers.len() as c_int, pointers.as_ptr());
    let out = if done == nvrtcResult::NVRTC_SUCCESS {
        let mut size = 0;
        check_result((nvrtc.cubin_size)(program, &mut size), "nvrtcGetCUBINSize").and_then(|()| {
            let mut image = vec![0_u8; size];
            check_result((nvrtc.cubin)(program, image.as_mut_ptr().cast::<c_char>()), "nvrtcGetCUBIN")?;
            Ok(image)
        })
    } else {
        let mut size = 0;
        (nvrtc.log_size)(program, &mut size);
        let mut log = vec![0_u8; size.max(1)];
        (nvrtc.log)(program, log.as_mut_ptr().cast::<c_char>());
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        cuda_failure(format!("{name}.cu does not compile: {log}"))
    };
    (nvrtc.destroy)(&mut program);
    out
}

fn check_result(result: nvrtcResult, call: &str) -> CudaResult<()> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => cuda_failure(format!("{call}: {other:?}")),
    }
}
