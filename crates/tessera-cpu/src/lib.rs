//! The parts of the CPU backend: f32 kernels on slices, and collectives through shared memory or
//! through streams that the application crate has opened.
//!
//! Every kernel is *row-invariant*: the bits of a row depend neither on the number of rows nor on
//! the number of threads, and the bits of a matmul's output column do not depend on the other
//! columns. A shard therefore computes exactly its part of the unsharded result. The bits do not
//! depend on the width of the vector unit either: each element is one fixed chain of fused
//! multiply-adds, however many SIMD lanes run side by side.
//!
//! This library crate knows nothing of models, plans, programs of other roles, sockets or files.

#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod arena;
pub mod collectives;
mod exec;
mod filled_rows;
pub mod halo;
mod host_memory;
pub mod kernels;
mod pool;
mod simd;
mod system;
pub mod tcp;
pub mod transport;
pub mod wire;

pub use exec::{CommEndpoint, CpuBackend, contribution_bytes};
pub use pool::Pool;
pub use transport::Transport;
