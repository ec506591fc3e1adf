//! Weights on disk: safetensors files and PyTorch checkpoints, their tensors' names and slices,
//! memory maps and fingerprints.
//!
//! A caller lists the tensors that it expects ([`ExpectedTensor`]: a canonical name, aliases, a shape)
//! and then reads one range per dim. This library crate knows nothing of models, meshes or layouts,
//! never executes a pickle and never writes. [`WeightSet::synthetic`] computes seeded tensors
//! instead, for a run without files. Its only `unsafe` block is the memory map.
//!
//! ```no_run
//! # use tessera_weights::{ExpectedTensor, WeightFiles};
//! # fn main() -> Result<(), tessera_base::Diagnostics> {
//! let files = WeightFiles::open("models/demo".as_ref())?;
//! let weights = files.resolve(&[ExpectedTensor {
//!     name: "blocks.0.self_attn.q.weight".into(),
//!     aliases: vec!["blocks.0.attn1.to_q.weight".into()],
//!     shape: vec![64, 64],
//! }])?;
//! // Rows 32..64: the second of two column-parallel shards.
//! let shard = weights.read_f32("blocks.0.self_attn.q.weight", &[32..64, 0..64]);
//! # Ok(()) }
//! ```

#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod byte_runs;
mod codes;
mod dtype;
mod generator;
mod header;
mod lora;
mod lora_file;
mod mapped_pages;
mod resolve;
mod scales;
mod stored_tensor;
mod torch_file;
mod weight_files;
mod weight_set;

pub use codes::CODES;
pub use lora::Lora;
pub use resolve::ExpectedTensor;
pub use weight_files::{TensorInfo, WeightFiles};
pub use weight_set::WeightSet;

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
