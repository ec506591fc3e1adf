//! NVIDIA GPUs, through libraries that are found when the program runs: a binary built where there are none runs where there
//! are, and says what is missing where they are not.
//!
//! This room reads no environment: where to look is told by whoever opens it. It knows nothing of models, plans or other
//! ranks.

mod attention;
mod choices;
mod compile;
mod devices;
mod driver;
mod exchange;
mod exec;
#[cfg(test)]
mod first_gpu;
mod flash;
mod kernels;
mod libraries;
mod maps;
mod nccl;
mod products;
mod tables;
mod tuning;
mod warpgroups;

use tessera_base::Code;

/// A library's call that failed while a backend was opened or loaded.
pub static T1304: Code = Code {
    id: "T1304",
    title: "the GPU or one of its libraries refused a call",
    page: "A call of the driver, NVRTC, cuBLASLt or cuDNN failed while a rank was made ready. The text is the library's own, with \
the call and the shape that was asked for.\n\nToo little free memory is the usual reason: another process may hold some, which \
nvidia-smi lists, or an earlier run may not be gone yet. A shape that a library has no algorithm for is named with its sizes; \
another mesh or dtype may do. Each rank wants a GPU of its own: more ranks than visible GPUs are refused with both numbers. A \
device that is lost says so in every call until it is reset by whoever runs the machine.",
};

pub use compile::Shelf;
pub use devices::{Devices, Gpu, Link, T1302, devices};
pub use exec::{Counts, Cuda, End, Options, Span};
pub use libraries::{Found, Libraries, Library, Lost, T1301};
pub use nccl::{T1303, UniqueId, unique_id};

/// Codes this room raises.
pub const CODES: &[&Code] = &[&T1301, &T1302, &T1303, &T1304];
