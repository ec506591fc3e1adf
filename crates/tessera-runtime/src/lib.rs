//! Lockstep runtime: a leader that plans every call, workers that check, run and answer, and the
//! drivers that connect them.
//!
//! This crate never names a model, a backend or a file format. Leader, worker, mesh leader and
//! cache state are pure state machines: `handle_event(now, event)` returns actions, and only
//! [`driver`] owns sockets, processes, threads and clocks. Wire types are defined here and nowhere
//! else.
//!
//! - [`wire`]: messages and frames.
//! - [`kv_cache`]: the state machine of the KV caches.
//! - [`program_index`]: the properties of each program in the sealed plan.
//! - [`director`]: the choice of phases for each call.
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
pub mod parity;
pub mod program_index;
mod reference;
pub mod sim;
pub mod tripwire;
pub mod wire;
pub mod worker;

pub use digest::Digest;
pub use drift::{T0754, find_shard_mismatch};
pub use failure::{Failure, FailureClass};
pub use limits::Limits;
pub use parity::{Parity, ParityClass, ParityKey};
pub use reference::{parity_reference, tripwire_reference};
pub use tripwire::{CheckSite, TRIPWIRES, Tripwire, Tripwires};

/// The diagnostic codes that this crate raises.
pub const CODES: &[&tessera_base::Code] = &[
    &wire::T0701,
    &wire::T0702,
    &wire::T0703,
    &wire::T0704,
    &wire::T0705,
    &wire::T0706,
    &worker::T0707,
    &kv_cache::T0710,
    &kv_cache::T0711,
    &kv_cache::T0712,
    &director::T0720,
    &director::T0721,
    &program_index::T0722,
    &program_index::T0723,
    &envelope_check::T0730,
    &envelope_check::T0731,
    &envelope_check::T0732,
    &envelope_check::T0733,
    &envelope_check::T0734,
    &envelope_check::T0735,
    &leader::T0736,
    &engine::T0737,
    &parity::T0740,
    &limits::T0741,
    &worker::T0742,
    &leader::T0743,
    &drift::T0744,
    &engine::T0745,
    &worker::T0746,
    &engine::T0747,
    &leader::T0748,
    &worker::T0749,
    &driver::T0750,
    &tripwire::T0751,
    &engine::T0752,
    &engine::T0753,
    &drift::T0754,
    &mesh_leader::T0755,
    &tripwire::T0756,
    &tripwire::T0757,
    &driver::rendezvous::T0758,
    &drift::T0759,
];

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
