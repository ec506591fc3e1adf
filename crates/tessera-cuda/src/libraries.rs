//! Finds and loads NVIDIA's libraries, with their paths and versions.
//!
//! A library is loaded by path, with global symbol visibility, and stays loaded for the life of the
//! process: libraries find one another, and bindings find them, by the names that they were built
//! with.

#![allow(unsafe_code, reason = "loading libraries and reading their versions")]

use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW, Symbol};
use tessera_base::Diagnostic;

use crate::codes::T1301;

/// A library that the backend uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// The CUDA driver, which all work on a GPU needs.
    Driver,
    /// The management library, which reports links and the driver's version.
    Nvml,
    /// The run-time kernel compiler.
    Nvrtc,
    /// The GEMM library. On Hopper, this crate's own kernel runs some of the bf16 GEMMs instead.
    CublasLt,
    /// The library for attention and convolutions.
    Cudnn,
    /// The library that connects the members of a communicator, and carries its collectives where
    /// P2P memory does not.
    Nccl,
}

impl Library {
    /// All libraries, in load order.
    pub const ALL: [Library; 6] =
        [Library::Driver, Library::Nvml, Library::Nvrtc, Library::CublasLt, Library::Cudnn, Library::Nccl];

    /// Returns the name, the file name and the purpose.
    fn describe(self) -> (&'static str, &'static str, &'static str) {
        match self {
            Library::Driver => ("driver", "libcuda.so.1", "all work on a GPU"),
            Library::Nvml => ("NVML", "libnvidia-ml.so.1", "the list of NVLinks"),
            Library::Nvrtc => ("NVRTC", "libnvrtc.so.13", "compiling fused kernels"),
            Library::CublasLt => ("cuBLASLt", "libcublasLt.so.13", "choosing and running GEMM kernels"),
            Library::Cudnn => ("cuDNN", "libcudnn.so.9", "attention or convolution"),
            Library::Nccl => ("NCCL", "libnccl.so.2", "communication between GPUs"),
        }
    }

    /// Returns the library's common name, for example `cuBLASLt`.
    #[must_use]
    pub fn name(self) -> &'static str {
        self.describe().0
    }

    /// Returns the file name to load, which includes the major version.
    #[must_use]
    pub fn file_name(self) -> &'static str {
        self.describe().1
    }

    /// Returns whether the library belongs to the installed driver, so that only the system's
    /// loader finds the right version.
    #[must_use]
    pub fn is_part_of_driver(self) -> bool {
        matches!(self, Library::Driver | Library::Nvml)
    }

    /// Returns the purpose of the library, for diagnostics.
    #[must_use]
    pub fn needed_for(self) -> &'static str {
        self.describe().2
    }
}

/// A library that [`Libraries::load`] loaded, for the life of the process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FoundLibrary {
    /// Which of the backend's libraries was loaded.
    pub library: Library,
    /// Its path, or its file name if the system's loader found it.
    pub path: PathBuf,
    /// The version that it reports, for example `2.28.9`, if it reports one.
    pub version: Option<String>,
}

/// A library that could not be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingLibrary {
    /// Which of the backend's libraries is missing.
    pub library: Library,
    /// Files with its name that failed to load, with the loader's error.
    pub load_errors: Vec<(PathBuf, String)>,
}

impl MissingLibrary {
    /// Returns the diagnostic for a user who needs the library.
    #[must_use]
    pub fn to_diagnostic(&self) -> Diagnostic {
        let library = self.library;
        let what = format!("no {}, which {} needs", library.file_name(), library.needed_for());
        let mut d = Diagnostic::error(&T1301, what);
        for (path, why) in &self.load_errors {
            d = d.with_label(path.display().to_string(), why.clone());
        }
        d.with_hint(match library.is_part_of_driver() {
            true => "it is part of the machine's driver; a container gets it together with its GPUs",
            false => "`tessera doctor` lists the searched folders; TESSERA_CUDA_LIBS adds folders",
        })
    }
}

/// The result of loading each library of [`Library::ALL`]: it was either found or is missing.
#[derive(Debug)]
pub struct Libraries {
    /// The loaded libraries, in the order of [`Library::ALL`].
    pub found: Vec<FoundLibrary>,
    /// The libraries that could not be loaded, with the loader's errors.
    pub missing: Vec<MissingLibrary>,
    handles: Vec<(Library, Arc<PermanentHandle>)>,
}

/// A loaded library. It is never unloaded: its threads and handlers would lose their code.
#[derive(Debug)]
struct PermanentHandle(std::mem::ManuallyDrop<Handle>);

impl Libraries {
    /// Loads each library from the first folder whose file loads, or else from where the system's
    /// loader finds it. Missing libraries are recorded, not raised.
    #[must_use]
    pub fn load(folders: &[PathBuf]) -> Libraries {
        let mut out = Libraries { found: Vec::new(), missing: Vec::new(), handles: Vec::new() };
        for library in Library::ALL {
            let file = library.file_name();
            // Toolkit folders contain stubs of the driver's libraries.
            let system = [PathBuf::from(file)];
            let candidates = folders
                .iter()
                .filter(|_| !library.is_part_of_driver())
                .map(|f| f.join(file))
                .filter(|p| p.exists());
            let mut load_errors = Vec::new();
            let loaded = candidates.chain(system).find_map(|path| match open_library(&path) {
                Ok(handle) => Some((path, handle)),
                Err(why) => {
                    if path.components().count() > 1 {
                        load_errors.push((path, why));
                    }
                    None
                }
            });
            match loaded {
                Some((path, handle)) => {
                    let version = query_version(library, &handle);
                    let companion = companion_path(library, &path, version.as_deref());
                    let companion = companion.filter(|p| p.exists()).and_then(|p| open_library(&p).ok());
                    out.found.push(FoundLibrary { library, path, version });
                    // Symbols are looked up in the first handle of a library.
                    for handle in [handle].into_iter().chain(companion) {
                        let handle = PermanentHandle(std::mem::ManuallyDrop::new(handle));
                        out.handles.push((library, Arc::new(handle)));
                    }
                }
                None => out.missing.push(MissingLibrary { library, load_errors }),
            }
        }
        out
    }

    /// Checks that a library was loaded.
    ///
    /// # Errors
    /// T1301 if it is missing.
    pub(crate) fn check_loaded(&self, library: Library) -> Result<(), Diagnostic> {
        match self.missing.iter().find(|l| l.library == library) {
            Some(lost) => Err(lost.to_diagnostic()),
            None => Ok(()),
        }
    }

    /// Returns the version of a loaded library, in words if it is unknown.
    pub(crate) fn describe_version(&self, library: Library) -> &str {
        let found = self.found.iter().find(|f| f.library == library);
        found.and_then(|f| f.version.as_deref()).unwrap_or("of unknown version")
    }

    /// Returns another handle to the same libraries.
    pub(crate) fn share_handles(&self) -> Libraries {
        Libraries { found: self.found.clone(), missing: self.missing.clone(), handles: self.handles.clone() }
    }

    /// Looks up a function of a library.
    ///
    /// # Safety
    /// `T` must be the function's type.
    pub(crate) unsafe fn get_symbol<T>(&self, library: Library, name: &str) -> Option<Symbol<T>> {
        let (_, handle) = self.handles.iter().find(|(l, _)| *l == library)?;
        // SAFETY: the caller guarantees the type.
        unsafe { handle.0.get(name.as_bytes()) }.ok()
    }
}

/// Returns the file that a library opens by name when it is used, beside the library itself. NVRTC
/// from a Python wheel does not search its own folder for its built-in definitions, but finds them if
/// they are loaded already.
fn companion_path(library: Library, path: &Path, version: Option<&str>) -> Option<PathBuf> {
    let is_in_folder = library == Library::Nvrtc && path.components().count() > 1;
    version.filter(|_| is_in_folder).map(|v| path.with_file_name(format!("libnvrtc-builtins.so.{v}")))
}

fn open_library(path: &Path) -> Result<Handle, String> {
    // SAFETY: the initialisers of these libraries have no preconditions.
    unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())
}

// SAFETY: types only; `query_version` states why the arguments are valid.
type QueryNumber = unsafe extern "C" fn(*mut c_int) -> c_int;
// SAFETY: as above.
type QueryPair = unsafe extern "C" fn(*mut c_int, *mut c_int) -> c_int;
// SAFETY: as above.
type QueryText = unsafe extern "C" fn(*mut c_char, u32) -> c_int;
// SAFETY: as above.
type CallWithoutArguments = unsafe extern "C" fn() -> c_int;
// SAFETY: as above.
type ReturnSize = unsafe extern "C" fn() -> usize;

fn query_version(library: Library, handle: &Handle) -> Option<String> {
    let dotted = |v: usize| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100);
    // SAFETY: each function is called with its documented type, on memory of this stack frame that
    // is as long as the library is told. None of these functions has a precondition, except that
    // NVML is initialised before it is asked for the driver's version.
    unsafe {
        match library {
            Library::Driver => {
                let get: Symbol<QueryNumber> = handle.get(b"cuDriverGetVersion").ok()?;
                let mut v = 0;
                (get(&mut v) == 0).then(|| format!("CUDA {}.{}", v / 1000, v % 1000 / 10))
            }
            Library::Nvml => {
                let init: Symbol<CallWithoutArguments> = handle.get(b"nvmlInit_v2").ok()?;
                let get: Symbol<QueryText> = handle.get(b"nvmlSystemGetDriverVersion").ok()?;
                let mut text = [0_u8; 80];
                (init() == 0 && get(text.as_mut_ptr().cast(), text.len() as u32) == 0).then(|| {
                    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
                    String::from_utf8_lossy(&text[..end]).into_owned()
                })
            }
            Library::Nvrtc => {
                let get: Symbol<QueryPair> = handle.get(b"nvrtcVersion").ok()?;
                let (mut major, mut minor) = (0, 0);
                (get(&mut major, &mut minor) == 0).then(|| format!("{major}.{minor}"))
            }
            Library::CublasLt => {
                let get: Symbol<ReturnSize> = handle.get(b"cublasLtGetVersion").ok()?;
                Some(dotted(get()))
            }
            Library::Cudnn => {
                let get: Symbol<ReturnSize> = handle.get(b"cudnnGetVersion").ok()?;
                Some(dotted(get()))
            }
            Library::Nccl => {
                let get: Symbol<QueryNumber> = handle.get(b"ncclGetVersion").ok()?;
                let mut v = 0;
                (get(&mut v) == 0).then(|| dotted(v as usize))
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::disallowed_methods, reason = "a test writes a library")]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_fails_to_load_is_reported_with_the_loader_error() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join(Library::Nccl.file_name());
        std::fs::write(&file, "no library").expect("a file");
        let all = Libraries::load(&[dir.path().to_path_buf()]);
        assert_eq!(all.found.len() + all.missing.len(), Library::ALL.len());
        // If the system has its own NCCL, that one is loaded.
        let Some(missing) = all.missing.iter().find(|l| l.library == Library::Nccl) else { return };
        assert_eq!(missing.load_errors.len(), 1);
        let diagnostic = missing.to_diagnostic();
        assert!(
            diagnostic.message.contains("libnccl.so.2") && diagnostic.message.contains("communication"),
            "{diagnostic:?}"
        );
        assert!(format!("{diagnostic:?}").contains(&file.display().to_string()), "{diagnostic:?}");
    }

    #[test]
    fn nvrtc_from_a_folder_brings_its_built_in_definitions() {
        let path = |library, at: &str| companion_path(library, Path::new(at), Some("13.0"));
        let found = path(Library::Nvrtc, "/wheel/lib/libnvrtc.so.13");
        assert_eq!(found, Some(PathBuf::from("/wheel/lib/libnvrtc-builtins.so.13.0")));
        assert_eq!(path(Library::Nvrtc, "libnvrtc.so.13"), None);
        assert_eq!(path(Library::Cudnn, "/wheel/lib/libcudnn.so.9"), None);
    }
}
