//! The CUDA backend. It loads NVIDIA's libraries at run time: a binary built on a machine without
//! them runs on a machine that has them, and a diagnostic names the missing ones elsewhere.
//!
//! The crate reads no environment variables: its caller passes the folders to search. It knows
//! nothing of models, plans or other ranks' programs.

mod attention_cudnn;
mod attention_sm90;
mod autotune;
mod autotune_cache;
mod collectives;
mod compile;
mod devices;
mod driver;
mod dylib;
mod exec;
mod gemm_cublaslt;
mod gemm_sm90;
mod kernels;
mod libraries;
mod nccl;
mod tensor_map;
#[cfg(test)]
mod test_gpu;

use tessera_base::Code;

/// Raised if a library call fails while a backend is opened or loaded.
pub static T1304: Code = Code {
    id: "T1304",
    title: "the GPU or one of its libraries returned an error",
    page: "A call to the driver, NVRTC, cuBLASLt or cuDNN failed while a rank was being prepared. The text is the library's own, with \
the call and the requested shape.\n\nToo little free memory is the usual reason: another process may hold some, which nvidia-smi lists, \
or an earlier run may still be exiting. If a library has no algorithm for a shape, the message gives the shape's sizes; another mesh or \
dtype may work. Each rank needs its own GPU: if there are more ranks than visible GPUs, the message states both numbers. A lost device \
returns errors from every call until an administrator resets it.",
};

pub use compile::KernelCache;
pub use devices::{Devices, Gpu, PeerLink, T1302, list_devices};
pub use exec::{CommunicatorMember, CudaBackend, CudaOptions, OneTimeCounts, StepSpan};
pub use libraries::{FoundLibrary, Libraries, Library, MissingLibrary, T1301};
pub use nccl::{T1303, UniqueId, unique_id};

/// The diagnostic codes that this crate raises.
pub const CODES: &[&Code] = &[&T1301, &T1302, &T1303, &T1304];
