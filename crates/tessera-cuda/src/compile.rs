//! Compiles kernels for the present device with NVRTC and caches the cubins.
//!
//! A cubin's cache key is a hash of everything it depends on: source, options, compiler version.
//! The caller that opens the backend supplies the cache; without one, every process compiles all
//! kernels.

#![allow(unsafe_code, reason = "NVRTC's own functions")]

use std::ffi::{CStr, CString, c_char, c_int};
use std::fmt::Debug;
use std::sync::Arc;

use cudarc::nvrtc::sys::{nvrtcProgram, nvrtcResult};

use crate::cubin::is_complete_cubin;
use crate::driver::{CudaError, CudaModule, CudaResult, cuda_failure};
use crate::dylib::Nvrtc;

/// A persistent cache of compiled kernels and autotuning results.
pub trait KernelCache: Debug + Send + Sync {
    /// Returns the data stored under a name, if any.
    fn load(&self, name: &str) -> Option<Vec<u8>>;
    /// Stores data under a name. Failing to store is allowed: a missing entry is built again.
    fn save(&self, name: &str, image: &[u8]);
}

/// NVRTC for one device architecture, with an optional cache of its cubins.
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
    /// Creates a compiler for an architecture, for example `sm_90a`.
    pub(crate) fn new(
        nvrtc: Nvrtc,
        arch: String,
        cache: Option<Arc<dyn KernelCache>>,
    ) -> CudaResult<Compiler> {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: NVRTC writes two ints of this stack frame.
        check_result(unsafe { (nvrtc.version)(&mut major, &mut minor) }, "nvrtcVersion")?;
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
        // The driver would read beyond the end of a truncated file.
        if let Some(image) = self.cache.as_ref().and_then(|k| k.load(&file)).filter(|i| is_complete_cubin(i))
            // SAFETY: the image contains all that its headers name.
            && let Ok(module) = unsafe { CudaModule::load(&image) }
        {
            return Ok(module);
        }
        let image = compile_cubin(&self.nvrtc, name, source, &options)?;
        self.compiled_count += 1;
        if let Some(kept) = &self.cache {
            kept.save(&file, &image);
        }
        // SAFETY: NVRTC returned the whole image.
        unsafe { CudaModule::load(&image) }
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
    let program = NvrtcProgram::new(nvrtc, &to_c_string(source)?, &to_c_string(&format!("{name}.cu"))?)?;
    let options = options.iter().map(|o| to_c_string(o)).collect::<CudaResult<Vec<CString>>>()?;
    match program.compile(&options) {
        nvrtcResult::NVRTC_SUCCESS => program.read_cubin(),
        _ => cuda_failure(format!("{name}.cu does not compile: {}", program.read_log())),
    }
}

fn to_c_string(text: &str) -> CudaResult<CString> {
    CString::new(text).map_err(|_| CudaError("a kernel's source contains a NUL byte".into()))
}

/// An NVRTC program, destroyed on drop.
struct NvrtcProgram<'a> {
    nvrtc: &'a Nvrtc,
    raw: nvrtcProgram,
}

impl NvrtcProgram<'_> {
    fn new<'a>(nvrtc: &'a Nvrtc, source: &CStr, file: &CStr) -> CudaResult<NvrtcProgram<'a>> {
        let mut raw = std::ptr::null_mut();
        let none = std::ptr::null();
        // SAFETY: both strings end with a NUL and NVRTC copies them; without headers it reads
        // neither of the two lists; it writes the handle to this stack frame.
        let created = unsafe { (nvrtc.create)(&mut raw, source.as_ptr(), file.as_ptr(), 0, none, none) };
        check_result(created, "nvrtcCreateProgram")?;
        Ok(NvrtcProgram { nvrtc, raw })
    }

    fn compile(&self, options: &[CString]) -> nvrtcResult {
        let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
        // SAFETY: the program is alive, and the list has as many NUL-terminated strings as stated.
        unsafe { (self.nvrtc.compile)(self.raw, pointers.len() as c_int, pointers.as_ptr()) }
    }

    /// Returns the cubin of a program that compiled.
    fn read_cubin(&self) -> CudaResult<Vec<u8>> {
        let mut size = 0;
        // SAFETY: the program is alive; NVRTC writes one size to this stack frame.
        check_result(unsafe { (self.nvrtc.cubin_size)(self.raw, &mut size) }, "nvrtcGetCUBINSize")?;
        let mut image = vec![0_u8; size];
        // SAFETY: the program is alive, and the buffer has the size that NVRTC asked for.
        let read = unsafe { (self.nvrtc.cubin)(self.raw, image.as_mut_ptr().cast::<c_char>()) };
        check_result(read, "nvrtcGetCUBIN")?;
        Ok(image)
    }

    /// Returns the compiler's messages.
    fn read_log(&self) -> String {
        let mut size = 0;
        // SAFETY: the program is alive; NVRTC writes one size to this stack frame.
        unsafe { (self.nvrtc.log_size)(self.raw, &mut size) };
        let mut log = vec![0_u8; size.max(1)];
        // SAFETY: the program is alive, and the buffer has the size that NVRTC asked for.
        unsafe { (self.nvrtc.log)(self.raw, log.as_mut_ptr().cast::<c_char>()) };
        String::from_utf8_lossy(&log).trim_end_matches('\0').to_string()
    }
}

impl Drop for NvrtcProgram<'_> {
    fn drop(&mut self) {
        // SAFETY: `new` created the program, and nothing uses it afterwards.
        unsafe { (self.nvrtc.destroy)(&mut self.raw) };
    }
}

fn check_result(result: nvrtcResult, call: &str) -> CudaResult<()> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => cuda_failure(format!("{call}: {other:?}")),
    }
}
