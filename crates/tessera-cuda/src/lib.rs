//! NVIDIA GPUs, through libraries that are found when the program runs: a binary built where there are none runs where there
//! are, and says what is missing where they are not.
//!
//! This room reads no environment: where to look is told by whoever opens it. It knows nothing of models, plans or other
//! ranks.

mod devices;
mod libraries;

use tessera_base::Code;

pub use devices::{Devices, Gpu, Link, T1302, devices};
pub use libraries::{Found, Libraries, Library, Lost, T1301};

/// Codes this room raises.
pub const CODES: &[&Code] = &[&T1301, &T1302];
