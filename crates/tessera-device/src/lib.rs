//! The contract of a backend: load programs with their weights, run them on a seat, hand values in and out.
//!
//! A backend owns its memory, streams and communicators; how it orders work inside a program is its own affair
//! as long as the program's order and events hold. This room knows no model, no plan and no process, and names no
//! backend.

mod call;
mod fingerprint;
mod lane;
pub mod numbers;
mod prices;

pub use call::{CallData, Scalar, T0802, brought};
pub use fingerprint::{Audited, Fingerprint, Hasher, slice_words};
pub use lane::{Lane, Peer, Route, agreed, as_matrix, pieces};
pub use prices::Prices;

use std::sync::Arc;

use tessera_base::{Code, Diagnostic};
use tessera_ir::{Program, Slots, Type};
use tessera_mesh::{Coord, Mesh, Rank};

/// A program that a backend cannot run.
pub static T0801: Code = Code {
    id: "T0801",
    title: "backend cannot run this program",
    page: "The program is well formed, but this backend has no kernel for one of its ops in the dtype and layout at \
hand. The message names the op. Another backend, strategy or dtype may do.",
};
/// Codes this room raises.
pub const CODES: &[&Code] = &[&T0801, &T0802];

/// Where a backend sits.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Seat {
    /// Mesh of the plan.
    pub mesh: Mesh,
    /// This rank.
    pub rank: Rank,
}

impl Seat {
    /// This rank's coordinate.
    #[must_use]
    pub fn coord(&self) -> Coord {
        self.mesh.coord_of(self.rank)
    }
}

/// Reads weights for a backend: the piece of a named tensor that a seat holds, row-major f32 whatever the dtype of the type or
/// the file. Rounding it to the type's dtype is the backend's last step, and fingerprints are of what comes of it.
pub trait WeightSource {
    /// The piece of `name` with this local type at `coord`. `load` is the weight op's reordering, if any; the
    /// type is that of the reordered tensor.
    ///
    /// # Errors
    /// Whatever is wrong with the tensor.
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        seat: &Seat,
    ) -> Result<Vec<f32>, Diagnostic>;

    /// Whether [`WeightSource::read`] of the same piece would give it, without reading: where this is granted for every
    /// piece, no read of them fails.
    ///
    /// # Errors
    /// Whatever is wrong with the tensor.
    fn check(&mut self, name: &str, ty: &Type, load: Option<&str>, seat: &Seat) -> Result<(), Diagnostic> {
        self.read(name, ty, load, seat).map(drop)
    }
}

/// A loaded program.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Loaded(pub usize);

/// Why a program did not end.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// This rank failed by itself.
    Failed(String),
    /// A collective ran into its deadline; the text names who was missing.
    Stalled(String),
    /// Somebody else ended the run.
    Aborted(String),
    /// The observer refused a collective before it was issued; the text is its own.
    Refused(String),
}

/// What a backend saw while it ran a program. A backend may call from a thread of its own.
pub trait Observer: Send {
    /// A collective is about to be issued: index of its op in the program. Asked before any communication of it,
    /// for every op of a batch by itself.
    ///
    /// # Errors
    /// Why it must not be. The backend then ends the program with [`Fault::Refused`] and has sent nothing of it.
    fn issuing(&mut self, _op: usize) -> Result<(), String> {
        Ok(())
    }
    /// A collective was issued: index of its op in the program.
    fn issued(&mut self, op: usize);
    /// The host begins to wait for a collective that was issued before: index of the issuing op. Not told of one that
    /// is waited for as it is issued.
    fn waiting(&mut self, _op: usize) {}
    /// A collective is complete on this rank: index of the issuing op.
    fn completed(&mut self, _op: usize) {}
    /// Progress, for whoever watches: ops done so far.
    fn progress(&mut self, ops: u32);
}

/// Makes a backend's blocked collectives return, from any thread.
pub type Abort = Arc<dyn Fn(&str) + Send + Sync>;

/// A device with programs loaded on it.
pub trait Backend {
    /// Loads a program: allocates its slots and buffers, reads the weights it does not hold yet.
    ///
    /// # Errors
    /// T0801, or what the weight source refuses.
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<Loaded, Diagnostic>;

    /// How many things were compiled, captured or allocated for runs so far. After every program has run once it stays
    /// as it is.
    fn made(&self) -> u64 {
        0
    }

    /// From now on a run begins with work that never ends; `false` where nothing can be done about it. For drills alone.
    fn stick(&mut self) -> bool {
        false
    }

    /// Fingerprints of what this rank must hold as others do: every weight piece, once however many programs read
    /// it, as of the last load; and tables that the backend derives by itself.
    fn fingerprints(&self) -> Vec<Fingerprint>;

    /// Hashes the next weights in turn, at most `bytes` of them, and compares each piece with its fingerprint when
    /// it is whole. Less than a backend's smallest step of work does nothing.
    fn audit(&mut self, bytes: u64) -> Audited;

    /// Reads every weight again from another source, then zeroes every buffer. Everything is checked before the first
    /// piece is replaced.
    ///
    /// # Errors
    /// What the source refuses; the old weights are still there.
    fn reload(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic>;

    /// Sets one element of a weight in memory, behind the back of its fingerprint; `false` when there is no such
    /// element. For drills alone: this is the fault that [`Backend::audit`] must find.
    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool;

    /// Fingerprint of a buffer's contents; `slice` says which piece it is.
    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint>;

    /// Runs a loaded program to its end.
    ///
    /// # Errors
    /// A fault; the backend is of no further use after it.
    fn run(&mut self, program: Loaded, call: &CallData<'_>, observer: &mut dyn Observer)
    -> Result<(), Fault>;

    /// A value that the last run put out.
    fn output(&self, name: &str) -> Option<&[f32]>;

    /// Contents of a buffer, row-major.
    fn read_buffer(&self, name: &str) -> Option<Vec<f32>>;

    /// Overwrites a buffer; `false` when there is none of this name and length.
    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool;

    /// Zeroes every buffer.
    fn reset(&mut self);

    /// Bytes held: weights, buffers, temporaries.
    fn memory(&self) -> [u64; 3];

    /// Sums over ranks so far whose terms cancelled and were added with compensation.
    fn compensated(&self) -> u64;

    /// Ends blocked collectives.
    fn abort(&self) -> Abort;
}
