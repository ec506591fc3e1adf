//! Which of NVIDIA's libraries are here, where each lies and which version it is.
//!
//! A library is loaded by its path and kept for as long as the process lives, with its names open to libraries loaded after
//! it: they find one another, and bindings find them, by the names that they were built with.

#![allow(unsafe_code, reason = "loading libraries and asking their versions")]

use std::ffi::{c_char, c_int};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use libloading::os::unix::{Library as Handle, RTLD_GLOBAL, RTLD_NOW, Symbol};
use tessera_base::{Code, Diagnostic};

/// A library is not here.
pub static T1301: Code = Code {
    id: "T1301",
    title: "a CUDA library is not here",
    page: "Runs on GPUs need the driver's libcuda.so.1 and, of CUDA 13, NVRTC, cuBLASLt, cuDNN 9 and, for more than one GPU, NCCL. \
The driver's own, libcuda.so.1 and libnvidia-ml.so.1, are looked for where the system's loader looks and nowhere else; the \
others in the folders of TESSERA_CUDA_LIBS (separated by colons), in the nvidia/*/lib folders of the Pythons on PATH (where \
wheels of PyTorch put them), in /usr/local/cuda, and then where the loader looks. The first that loads is used.\n\nThe driver comes with the machine: in a container it is there only if the container was started with GPUs. The others \
come with `pip install torch`, or as the wheels nvidia-cuda-nvrtc, nvidia-cublas, nvidia-cudnn-cu13 and nvidia-nccl-cu13. \
`tessera doctor` lists what was found where. The CPU backend needs none of them.",
};

/// One of the libraries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Library {
    /// The driver.
    Driver,
    /// What the driver says of links and itself.
    Nvml,
    /// Compiles kernels.
    Nvrtc,
    /// Products.
    CublasLt,
    /// Attention and convolutions.
    Cudnn,
    /// Collectives.
    Nccl,
}

impl Library {
    /// All, in the order in which they are loaded.
    pub const ALL: [Library; 6] =
        [Library::Driver, Library::Nvml, Library::Nvrtc, Library::CublasLt, Library::Cudnn, Library::Nccl];

    /// What people call it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Library::Driver => "driver",
            Library::Nvml => "NVML",
            Library::Nvrtc => "NVRTC",
            Library::CublasLt => "cuBLASLt",
            Library::Cudnn => "cuDNN",
            Library::Nccl => "NCCL",
        }
    }

    /// The name it is loaded by, which says its major version.
    #[must_use]
    pub fn file(self) -> &'static str {
        match self {
            Library::Driver => "libcuda.so.1",
            Library::Nvml => "libnvidia-ml.so.1",
            Library::Nvrtc => "libnvrtc.so.13",
            Library::CublasLt => "libcublasLt.so.13",
            Library::Cudnn => "libcudnn.so.9",
            Library::Nccl => "libnccl.so.2",
        }
    }

    /// Whether it belongs to the running kernel's driver, so that only the system's loader knows the right one.
    #[must_use]
    pub fn of_driver(self) -> bool {
        matches!(self, Library::Driver | Library::Nvml)
    }

    /// What it is needed for.
    #[must_use]
    pub fn purpose(self) -> &'static str {
        match self {
            Library::Driver => "all work on a GPU",
            Library::Nvml => "the list of links",
            Library::Nvrtc => "compiling fused kernels",
            Library::CublasLt => "every product",
            Library::Cudnn => "attention or convolution",
            Library::Nccl => "communication between GPUs",
        }
    }
}

/// A library that is here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Found {
    /// Which.
    pub library: Library,
    /// Its path, or its bare name where the system's loader found it.
    pub path: PathBuf,
    /// As it says itself, such as `2.28.9`; none where it does not.
    pub version: Option<String>,
}

/// A library that is not.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lost {
    /// Which.
    pub library: Library,
    /// Files of its name that would not load, and what the loader said of each.
    pub refused: Vec<(PathBuf, String)>,
}

impl Lost {
    /// What to tell whoever needs it.
    #[must_use]
    pub fn diagnostic(&self) -> Diagnostic {
        let library = self.library;
        let what = format!("no {}, which {} needs", library.file(), library.purpose());
        let mut d = Diagnostic::error(&T1301, what);
        for (path, why) in &self.refused {
            d = d.at(path.display().to_string(), why.clone());
        }
        d.hint(match library.of_driver() {
            true => "it comes with the machine's driver, and into a container with its GPUs",
            false => "`tessera doctor` says where was looked; TESSERA_CUDA_LIBS names further folders",
        })
    }
}

/// All that are here.
#[derive(Debug)]
pub struct Libraries {
    /// Here, in the order of [`Library::ALL`].
    pub found: Vec<Found>,
    /// Not here.
    pub lost: Vec<Lost>,
    handles: Vec<(Library, Arc<Kept>)>,
}

/// A loaded library, never unloaded: one that has made threads or handlers must not be unmapped under them.
#[derive(Debug)]
struct Kept(std::mem::ManuallyDrop<Handle>);

impl Libraries {
    /// Loads what there is: each library from the first folder whose file of its name loads, or from where the system's loader
    /// finds it.
    #[must_use]
    pub fn load(folders: &[PathBuf]) -> Libraries {
        let mut out = Libraries { found: Vec::new(), lost: Vec::new(), handles: Vec::new() };
        for library in Library::ALL {
            let file = library.file();
            // Folders of toolkits hold stubs of the driver.
            let system = [PathBuf::from(file)];
            let told =
                folders.iter().filter(|_| !library.of_driver()).map(|f| f.join(file)).filter(|p| p.exists());
            let mut refused = Vec::new();
            let loaded = told.chain(system).find_map(|path| match open(&path) {
                Ok(handle) => Some((path, handle)),
                Err(why) => {
                    if path.components().count() > 1 {
                        refused.push((path, why));
                    }
                    None
                }
            });
            match loaded {
                Some((path, handle)) => {
                    let version = version(library, &handle);
                    out.found.push(Found { library, path, version });
                    out.handles.push((library, Arc::new(Kept(std::mem::ManuallyDrop::new(handle)))));
                }
                None => out.lost.push(Lost { library, refused }),
            }
        }
        out
    }

    /// What to tell whoever needs one that is not here.
    ///
    /// # Errors
    /// T1301.
    pub(crate) fn need(&self, library: Library) -> Result<(), Diagnostic> {
        match self.lost.iter().find(|l| l.library == library) {
            Some(lost) => Err(lost.diagnostic()),
            None => Ok(()),
        }
    }

    /// The same libraries for another owner.
    pub(crate) fn shared(&self) -> Libraries {
        Libraries { found: self.found.clone(), lost: self.lost.clone(), handles: self.handles.clone() }
    }

    /// A function of one.
    ///
    /// # Safety
    /// `T` is the function's type.
    pub(crate) unsafe fn symbol<T>(&self, library: Library, name: &str) -> Option<Symbol<T>> {
        let (_, handle) = self.handles.iter().find(|(l, _)| *l == library)?;
        // SAFETY: the caller answers for the type.
        unsafe { handle.0.get(name.as_bytes()) }.ok()
    }
}

fn open(path: &Path) -> Result<Handle, String> {
    // SAFETY: initialisers of these libraries ask nothing of their caller.
    unsafe { Handle::open(Some(path), RTLD_NOW | RTLD_GLOBAL) }.map_err(|e| e.to_string())
}

fn version(library: Library, handle: &Handle) -> Option<String> {
    // SAFETY: each function is called with the type that its library documents, on memory of this frame.
    unsafe {
        match library {
            Library::Driver => {
                let get: Symbol<extern "C" fn(*mut c_int) -> c_int> =
                    handle.get(b"cuDriverGetVersion").ok()?;
                let mut v = 0;
                (get(&mut v) == 0).then(|| format!("CUDA {}.{}", v / 1000, v % 1000 / 10))
            }
            Library::Nvml => {
                let init: Symbol<extern "C" fn() -> c_int> = handle.get(b"nvmlInit_v2").ok()?;
                let get: Symbol<extern "C" fn(*mut c_char, u32) -> c_int> =
                    handle.get(b"nvmlSystemGetDriverVersion").ok()?;
                let mut text = [0_u8; 80];
                (init() == 0 && get(text.as_mut_ptr().cast(), text.len() as u32) == 0).then(|| {
                    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
                    String::from_utf8_lossy(&text[..end]).into_owned()
                })
            }
            Library::Nvrtc => {
                let get: Symbol<extern "C" fn(*mut c_int, *mut c_int) -> c_int> =
                    handle.get(b"nvrtcVersion").ok()?;
                let (mut major, mut minor) = (0, 0);
                (get(&mut major, &mut minor) == 0).then(|| format!("{major}.{minor}"))
            }
            Library::CublasLt => {
                let get: Symbol<extern "C" fn() -> usize> = handle.get(b"cublasLtGetVersion").ok()?;
                let v = get();
                Some(format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100))
            }
            Library::Cudnn => {
                let get: Symbol<extern "C" fn() -> usize> = handle.get(b"cudnnGetVersion").ok()?;
                let v = get();
                Some(format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100))
            }
            Library::Nccl => {
                let get: Symbol<extern "C" fn(*mut c_int) -> c_int> = handle.get(b"ncclGetVersion").ok()?;
                let mut v = 0;
                (get(&mut v) == 0).then(|| format!("{}.{}.{}", v / 10_000, v % 10_000 / 100, v % 100))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_is_no_library_is_named_with_what_the_loader_says() {
        let dir = tempfile::tempdir().expect("a folder");
        let file = dir.path().join(Library::Nccl.file());
        std::fs::write(&file, "no library").expect("a file");
        let all = Libraries::load(&[dir.path().to_path_buf()]);
        assert_eq!(all.found.len() + all.lost.len(), Library::ALL.len());
        // Where the system has one of its own, that one is taken.
        let Some(lost) = all.lost.iter().find(|l| l.library == Library::Nccl) else { return };
        assert_eq!(lost.refused.len(), 1);
        let said = lost.diagnostic();
        assert!(said.message.contains("libnccl.so.2") && said.message.contains("communication"), "{said:?}");
        assert!(format!("{said:?}").contains(&file.display().to_string()), "{said:?}");
    }
}
