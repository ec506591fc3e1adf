//! Lockstep: a leader that decides every call, workers that check, run and answer, and the drivers beneath.
//!
//! This room never names a model, a backend or a file format. Leader, worker and caches are pure state
//! machines: `step(now, event)` returns actions, and only [`driver`] owns sockets, processes, threads and
//! clocks. Wire types live here and nowhere else.
//!
//! - [`wire`]: messages and frames.
//! - [`cache`]: the life of the key/value caches.
//! - [`census`]: what the seal says of each program.
//! - [`decide`]: which phases a call has.
//! - [`check`]: whether an envelope may run.
//! - [`leader`], [`worker`]: the two sides of lockstep; [`mesh_leader`] between them where the leader stands outside.
//! - [`tripwire`]: every check that ends a run, and where it is made.
//! - [`engine`]: what the door implements.
//! - [`sim`]: all of it on a made-up clock.
//! - [`driver`]: processes, sockets, threads.
//!
//! [`tripwire_reference`] and [`parity_reference`] print two pages of docs/reference from the tables.

pub mod cache;
pub mod census;
pub mod check;
pub mod decide;
mod digest;
mod drift;
pub mod drill;
pub mod driver;
pub mod engine;
mod failure;
pub mod flight;
pub mod leader;
mod limits;
pub mod mesh_leader;
pub mod parity;
mod reference;
pub mod sim;
pub mod tripwire;
pub mod wire;
pub mod worker;

pub use digest::Digest;
pub use drift::{T0754, shards_differ};
pub use failure::{Failure, FailureClass};
pub use limits::Limits;
pub use parity::{Parity, ParityClass, ParityKey};
pub use reference::{parity_reference, tripwire_reference};
pub use tripwire::{Place, TRIPWIRES, Tripwire, Tripwires};

/// Codes that this room raises.
pub const CODES: &[&tessera_base::Code] = &[
    &wire::T0701,
    &wire::T0702,
    &wire::T0703,
    &wire::T0704,
    &wire::T0705,
    &wire::T0706,
    &worker::T0707,
    &cache::T0710,
    &cache::T0711,
    &cache::T0712,
    &decide::T0720,
    &decide::T0721,
    &census::T0722,
    &census::T0723,
    &check::T0730,
    &check::T0731,
    &check::T0732,
    &check::T0733,
    &check::T0734,
    &check::T0735,
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
