//! Weights on disk: safetensors files, their tensors' names and slices, memory maps and fingerprints.
//!
//! A caller says which tensors it expects ([`Expected`]: a canonical name, aliases, a shape) and then reads one
//! range per dim. This room knows nothing of models, meshes or layouts, never unpickles and never writes.
//! The one `unsafe` block is the memory map.
//!
//! ```no_run
//! # use tessera_weights::{Expected, WeightFiles};
//! # fn main() -> Result<(), tessera_base::Diagnostics> {
//! let files = WeightFiles::open("models/demo".as_ref())?;
//! let weights = files.resolve(&[Expected {
//!     name: "blocks.0.self_attn.q.weight".into(),
//!     aliases: vec!["blocks.0.attn1.to_q.weight".into()],
//!     shape: vec![64, 64],
//! }])?;
//! // Rows 32..64: the second of two column-parallel shards.
//! let shard = weights.read_f32("blocks.0.self_attn.q.weight", &[32..64, 0..64]);
//! # Ok(()) }
//! ```

mod dtype;
mod files;
mod header;
mod resolve;
mod set;
mod slice;

pub use dtype::FileDtype;
pub use files::{TensorInfo, WeightFiles};
pub use resolve::Expected;
pub use set::WeightSet;

use tessera_base::Code;

/// Codes this room raises.
pub const CODES: &[&Code] = &[
    &files::T0501,
    &header::T0502,
    &header::T0503,
    &header::T0504,
    &files::T0505,
    &resolve::T0506,
    &set::T0507,
    &files::T0508,
];

#[cfg(test)]
mod tests {
    #[test]
    fn codes_are_unique_and_have_pages() {
        let registry = tessera_base::Registry::new(&[super::CODES]);
        for code in registry.iter() {
            assert!(code.id.starts_with("T05") && code.page.len() > 200, "{}", code.id);
        }
    }
}
