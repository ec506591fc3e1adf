//! The CUDA backend. It loads NVIDIA's libraries at run time: a binary built on a machine without
//! them runs on a machine that has them, and a diagnostic names the missing ones elsewhere.
//!
//! The crate reads no environment variables: its caller passes the folders to search. It knows
//! nothing of models, plans or other ranks' programs.

#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod allocation_lock;
mod attention_cudnn;
mod attention_sm90;
mod call_arrays;
mod capabilities;
mod codes;
mod collectives;
mod compile;
#[cfg(test)]
mod compile_check;
mod conv;
mod conv_shape;
mod cubin;
mod cublaslt_objects;
mod device_memory;
mod devices;
mod driver;
mod dylib;
mod exec;
mod fusion;
mod gemm;
mod gpu_array;
mod kernel_choice;
mod kernel_params;
mod kernel_table;
mod kernels;
mod libraries;
mod nccl;
mod required_gpus;
#[cfg(test)]
mod signature_check;
mod tensor_map;
#[cfg(test)]
mod test_gpu;
mod thread_ranks;

pub use allocation_lock::{AllocationPermit, ExclusiveCall};
pub use call_arrays::{GpuCallArrays, GpuOutput, NonFinite};
pub use capabilities::{FeatureMask, GpuFeature};
pub use codes::{CODES, T1301, T1304};
pub use compile::KernelCache;
pub use devices::{Devices, Gpu, PeerLink, free_bytes, list_devices};
pub use exec::{CommunicatorMember, CudaBackend, CudaOptions, OneTimeCounts};
pub use fusion::launched_ops;
pub use gpu_array::{GpuArray, GpuStream, MemoryOwner, RowRun};
pub use kernel_choice::describe_kernels;
pub use libraries::{FoundLibrary, Libraries, Library, MissingLibrary};
pub use nccl::{UniqueId, unique_id};
pub use required_gpus::{REQUIRE_GPUS, assert_may_skip};
pub use thread_ranks::{ThreadRank, ThreadRanks};
