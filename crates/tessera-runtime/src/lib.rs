//! Lockstep runtime: a leader that plans every call, workers that check, run and answer, and the
//! drivers that connect them.
//!
//! This crate never names a model, a backend or a file format. Leader, worker, mesh leader and
//! cache state are pure state machines: `handle_event(now, event)` returns actions, and only
//! [`driver`] owns sockets, processes, threads and clocks. Wire types are defined here and nowhere
//! else.
//!
//! - [`wire`]: messages and frames.
//! - [`call_state`]: what a call leaves behind for the next one: [`kv_cache`] for a video, [`paged_cache`] for
//!   token sequences, [`array_state`] for array programs.
//! - [`program_index`]: the properties of each program in the sealed plan.
//! - [`director`], [`token_director`], [`array_director`]: the plan of each call.
//! - [`envelope_check`]: the checks that an envelope must pass before it runs.
//! - [`leader`], [`worker`]: the two sides of lockstep; [`mesh_leader`] relays between them if the
//!   leader is outside the mesh.
//! - [`tripwire`]: every check that ends a run, and where it is made.
//! - [`engine`]: the traits that the application crate implements.
//! - [`sim`]: the whole runtime on a simulated clock.
//! - [`driver`]: processes, sockets, threads.
//!
//! [`tripwire_reference`] and [`parity_reference`] render two pages of docs/reference from the
//! tables in the code.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

pub mod array_director;
pub mod array_state;
pub mod call_state;
mod codes;
mod digest;
pub mod director;
mod drift;
pub mod drill;
pub mod driver;
pub mod engine;
pub mod envelope_check;
mod failure;
pub mod flight;
pub mod kv_cache;
pub mod leader;
mod limits;
pub mod mesh_leader;
pub mod paged_cache;
pub mod parity;
pub mod program_index;
mod reference;
pub mod sim;
pub mod token_director;
pub mod tripwire;
pub mod wire;
pub mod worker;

pub use codes::{CODES, T0754, T0770, T0771, T0776};
pub use digest::Digest;
pub use drift::find_shard_mismatch;
pub use failure::{Failure, FailureClass};
pub use limits::Limits;
pub use parity::{Parity, ParityClass, ParityKey};
pub use reference::{parity_reference, tripwire_reference};
pub use tripwire::{CheckSite, TRIPWIRES, Tripwire, Tripwires};

#[cfg(test)]
mod tests {
    #[test]
    fn codes_are_listed_once_and_explained() {
        let registry = tessera_base::Registry::new(&[super::CODES]);
        for c in registry.iter() {
            assert!(c.id.starts_with("T07") && c.page.len() > 150, "{}: {} bytes", c.id, c.page.len());
        }
    }
}
