//! The CPU backend's parts: f32 kernels on slices, and collectives through shared memory or
//! through streams that a door has opened.
//!
//! Every kernel is *row-invariant*: the bits of a row depend neither on how many rows there are nor on the
//! number of threads, and the bits of a column of a product do not depend on the other columns. So a shard
//! computes exactly its part of the whole. They do not depend on the width of the vector unit either: each
//! element is one fixed chain of fused multiply-adds, however many lanes run side by side.
//!
//! This room knows nothing of models, plans, programs of other roles, sockets or files.

pub mod arena;
pub mod collectives;
pub mod exchange;
mod exec;
pub mod kernels;
mod pool;
mod simd;
pub mod tcp;

pub use exchange::Exchange;
pub use exec::{Cpu, End};
pub use pool::Pool;
