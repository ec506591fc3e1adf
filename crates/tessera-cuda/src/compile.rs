//! Compiles kernels for the device at hand, and keeps what was compiled.
//!
//! A cubin is kept under the hash of everything that it depends on: source, options, the compiler's version. Where is up to
//! whoever opens the backend; without a shelf, every process compiles anew.

use std::ffi::{CString, c_char, c_int};
use std::fmt::Debug;
use std::sync::Arc;

use cudarc::nvrtc::sys::nvrtcResult;

use crate::driver::{Done, Failed, Module, failed};
use crate::tables::Nvrtc;

/// Where compiled kernels, and what makes a product best, are kept from run to run.
pub trait Shelf: Debug + Send + Sync {
    /// What is kept under a name, if anything.
    fn find(&self, name: &str) -> Option<Vec<u8>>;
    /// Keeps it, or not: what is not found is made again.
    fn keep(&self, name: &str, image: &[u8]);
}

/// Compiles for one kind of device.
#[derive(Debug)]
pub(crate) struct Compiler {
    nvrtc: Nvrtc,
    arch: String,
    version: String,
    kept: Option<Arc<dyn Shelf>>,
    /// Sources compiled by this process, those found on disk not counted.
    pub(crate) compiled: u32,
}

impl Compiler {
    /// For a compute capability, such as (9, 0).
    pub(crate) fn new(nvrtc: Nvrtc, capability: (i32, i32), kept: Option<Arc<dyn Shelf>>) -> Done<Compiler> {
        let (mut major, mut minor) = (0, 0);
        check((nvrtc.version)(&mut major, &mut minor), "nvrtcVersion")?;
        // `a`: instructions of exactly this device may be used.
        let (x, y) = capability;
        let arch = if x >= 9 { format!("sm_{x}{y}a") } else { format!("sm_{x}{y}") };
        Ok(Compiler { nvrtc, arch, version: format!("{major}.{minor}"), kept, compiled: 0 })
    }

    /// A module of a source with macros defined.
    pub(crate) fn module(&mut self, name: &str, source: &str, defines: &[(&str, String)]) -> Done<Module> {
        let options = options(&self.arch, defines);
        let parts = options.iter().map(String::as_str).chain([self.version.as_str(), source]);
        let file = kept_name(name, parts, "cubin");
        if let Some(image) = self.kept.as_ref().and_then(|k| k.find(&file))
            && let Ok(module) = Module::load(&image)
        {
            return Ok(module);
        }
        let image = compile(&self.nvrtc, name, source, &options)?;
        self.compiled += 1;
        if let Some(kept) = &self.kept {
            kept.keep(&file, &image);
        }
        Module::load(&image)
    }
}

/// Under which name something is kept: one that tells all that it depends on.
pub(crate) fn kept_name<'a>(what: &str, parts: impl IntoIterator<Item = &'a str>, kind: &str) -> String {
    let mut hash = blake3::Hasher::new();
    for part in parts {
        hash.update(&(part.len() as u64).to_le_bytes()).update(part.as_bytes());
    }
    format!("{what}-{}.{kind}", &hash.finalize().to_hex()[..32])
}

/// How every source is compiled.
pub(crate) fn options(arch: &str, defines: &[(&str, String)]) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={arch}"),
        "--std=c++17".to_string(),
        "--device-as-default-execution-space".to_string(),
        // Sums and products stay apart, as on the CPU; kernels that want them fused say so.
        "--fmad=false".to_string(),
    ];
    options.extend(defines.iter().map(|(k, v)| format!("-D{k}={v}")));
    options
}

/// The code of a source for a device, or what the compiler says of it.
pub(crate) fn compile(nvrtc: &Nvrtc, name: &str, source: &str, options: &[String]) -> Done<Vec<u8>> {
    let text = |s: &str| CString::new(s).map_err(|_| Failed("a zero in a kernel's source".into()));
    let (code, file) = (text(source)?, text(&format!("{name}.cu"))?);
    let options = options.iter().map(|o| text(o)).collect::<Done<Vec<CString>>>()?;
    let pointers: Vec<*const c_char> = options.iter().map(|o| o.as_ptr()).collect();
    let mut program = std::ptr::null_mut();
    let none = std::ptr::null();
    check((nvrtc.create)(&mut program, code.as_ptr(), file.as_ptr(), 0, none, none), "nvrtcCreateProgram")?;
    let done = (nvrtc.compile)(program, pointers.len() as c_int, pointers.as_ptr());
    let out = if done == nvrtcResult::NVRTC_SUCCESS {
        let mut size = 0;
        check((nvrtc.cubin_size)(program, &mut size), "nvrtcGetCUBINSize").and_then(|()| {
            let mut image = vec![0_u8; size];
            check((nvrtc.cubin)(program, image.as_mut_ptr().cast::<c_char>()), "nvrtcGetCUBIN")?;
            Ok(image)
        })
    } else {
        let mut size = 0;
        (nvrtc.log_size)(program, &mut size);
        let mut log = vec![0_u8; size.max(1)];
        (nvrtc.log)(program, log.as_mut_ptr().cast::<c_char>());
        let log = String::from_utf8_lossy(&log).trim_end_matches('\0').to_string();
        failed(format!("{name}.cu does not compile: {log}"))
    };
    (nvrtc.destroy)(&mut program);
    out
}

fn check(result: nvrtcResult, call: &str) -> Done<()> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        other => failed(format!("{call}: {other:?}")),
    }
}
