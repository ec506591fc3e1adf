//! The backend interface: load programs with their weights, run them on a rank, and exchange values
//! with the host.
//!
//! A backend owns its memory, streams and communicators. It may schedule the work inside a program
//! freely, as long as it respects program order and events. This library crate has no notion of
//! models, plans and processes, and does not depend on any backend.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod cache_checks;
mod call_data;
mod codes;
mod communicator;
pub mod dtype;
mod expert_pools;
mod expert_transfers;
mod fingerprint;
mod memory_use;
mod step_times;
mod timing_model;

pub use cache_checks::CacheChecks;
pub use call_data::{CallData, Scalar, check_input};
pub use codes::{CODES, T0801, T0802, T0803, T0804, T0805, T0806};
pub use communicator::{as_matrix, collective_signature, exchanged_shape, shard_ranges};
pub use expert_pools::{AheadRequest, ExpertPools, LayerStart, PooledExpert};
pub use expert_transfers::{ExpertBank, ExpertReport, ExpertTransfer, LayerTransfers};
pub use fingerprint::{AuditResult, Fingerprint, FingerprintHasher, describe_slice, first_nonfinite};
pub use memory_use::MemoryUse;
pub use step_times::{StepSpan, StepTimes};
pub use tessera_ir::{CommRoute, Communicator, TransferPeer};
pub use timing_model::TimingModel;

use std::fmt;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_ir::{CapturedGraph, Program, Slots, Type};
use tessera_mesh::{Coord, Mesh, Rank};

/// A rank and its mesh: the position at which a backend runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MeshRank {
    /// Mesh of the plan, including the number of ranks outside it.
    pub mesh: Mesh,
    /// Rank of the backend in the world; ranks outside the mesh come first.
    pub rank: Rank,
}

impl MeshRank {
    /// Returns the rank's position on each axis; the origin for a rank outside the mesh.
    #[must_use]
    pub fn coord(&self) -> Coord {
        self.mesh.coord_of(self.rank)
    }
}

/// Source of weights for a backend. It returns the shard of a named tensor that a rank holds as
/// row-major f32, whatever the dtype of the type or the file. The backend rounds the shard to the
/// dtype of the type as its last step, and computes fingerprints of the rounded values.
pub trait WeightSource {
    /// Returns the shard of `name` that `rank` holds; `ty` is its local type. `load` is the load
    /// transformation of the weight op, if any; the type describes the transformed tensor.
    ///
    /// # Errors
    /// Any problem with the tensor.
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic>;

    /// Checks whether [`WeightSource::read`] would succeed for the same shard, without reading the
    /// data. If the check succeeds for every shard, none of the reads fails.
    ///
    /// # Errors
    /// Any problem with the tensor.
    fn check(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        rank: &MeshRank,
    ) -> Result<(), Diagnostic> {
        self.read(name, ty, load, rank).map(drop)
    }

    /// Opens the experts of a weight of which a backend keeps a few, with the local type of the weight.
    ///
    /// # Errors
    /// T0806 for a source that lends no single experts, or any problem with the tensor.
    fn open_experts(
        &mut self,
        name: &str,
        _ty: &Type,
        _rank: &MeshRank,
    ) -> Result<Arc<dyn ExpertBank>, Diagnostic> {
        Err(Diagnostic::error(&T0806, format!("the experts of `{name}` cannot be read one by one here")))
    }

    /// Checks that every element of the stored tensor is finite, and otherwise returns where the
    /// first other element lies. A source without stored tensors finds none.
    ///
    /// # Errors
    /// The file and the index of the element, or any problem with the tensor.
    fn check_finite(&mut self, _name: &str) -> Result<(), Diagnostic> {
        Ok(())
    }
}

/// Returns the graph into which a program declares to be captured.
///
/// # Errors
/// T0801 if it is captured only in part or into several graphs, which no backend supports.
pub fn declared_graph(p: &Program) -> Result<Option<CapturedGraph>, Diagnostic> {
    p.captured_graph().map_err(|why| {
        Diagnostic::error(
            &T0801,
            format!("@{} of {}: {why}; a backend captures whole programs", p.name, p.role),
        )
    })
}

/// Handle of a program that a backend has loaded; only this backend accepts the handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct ProgramHandle(pub usize);

/// A program that a backend has loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LoadedProgram {
    /// Name of the program, which is that of its phase.
    pub name: String,
    /// Graph into which the backend captures the program; `None` if it launches every op by itself.
    pub graph: Option<CapturedGraph>,
}

/// A communicator that a backend has joined.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinedCommunicator {
    /// Route by which the rank's ops name the communicator.
    pub route: CommRoute,
    /// Name of the memory or connection that all members share and no other communicator has;
    /// `None` if the transport has no such name.
    pub shared: Option<String>,
    /// How its members exchange data.
    pub transport: UsedTransport,
}

/// How the members of a communicator exchange data, as the backend found or chose it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UsedTransport {
    /// Through host memory that the processes of one host share.
    SharedMemory,
    /// Through a TCP connection between every two members.
    Tcp,
    /// GPUs read and write one another's memory.
    PeerMemory,
    /// Through NCCL; the text says why the members do not use peer memory.
    Nccl(String),
}

impl UsedTransport {
    /// Returns the name that records show, such as `NCCL`.
    #[must_use]
    pub fn name(&self) -> &'static str {
        match self {
            UsedTransport::SharedMemory => "shared memory",
            UsedTransport::Tcp => "TCP",
            UsedTransport::PeerMemory => "peer memory",
            UsedTransport::Nccl(_) => "NCCL",
        }
    }
}

impl fmt::Display for UsedTransport {
    /// Writes `peer memory`, or `NCCL, because GPU 1 has no peer access to GPU 0`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UsedTransport::Nccl(why) => write!(f, "{}, because {why}", self.name()),
            _ => f.write_str(self.name()),
        }
    }
}

/// Reason why a program did not complete.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// This rank detected an error itself; the text gives the cause.
    Failed(String),
    /// A collective exceeded its deadline; the text names the missing ranks.
    Stalled(String),
    /// Another rank or the host ended the run; the text gives the cause as far as this rank knows
    /// it.
    Aborted(String),
    /// The observer rejected a collective before it was issued, or the halo that it received; the text
    /// comes from the observer.
    Refused(String),
    /// An op accessed memory that held no valid value for it (T0803); only a poisoned backend finds
    /// this. The text names the op and the slot.
    Poisoned(String),
}

/// Callbacks for the progress of a program. A backend may call them from its own thread.
pub trait Observer: Send {
    /// Called before a collective is issued, with the index of its op in the program. The call
    /// precedes all communication of the collective; every op of a batch gets its own call.
    ///
    /// # Errors
    /// The reason why the collective must not be issued. The backend then ends the program with
    /// [`Fault::Refused`] and sends nothing for this collective.
    fn on_issuing(&mut self, _op: usize) -> Result<(), String> {
        Ok(())
    }
    /// Called after [`Observer::on_issuing`] of a program's last collective by a backend that
    /// launches a program as a whole, before it launches anything.
    ///
    /// # Errors
    /// The reason why the program must not be launched, as for [`Observer::on_issuing`].
    fn on_all_issuing(&mut self) -> Result<(), String> {
        Ok(())
    }
    /// Called once per run before anything is launched, with the graph that the backend captures or
    /// replays; `None` if it launches every op by itself. A backend that cannot capture executes the
    /// ops of the graph one by one and reports the graph that it was told.
    ///
    /// # Errors
    /// The reason why the program must not be launched like that, as for
    /// [`Observer::on_issuing`].
    fn on_launching(&mut self, _graph: Option<&CapturedGraph>) -> Result<(), String> {
        Ok(())
    }
    /// Called after a collective was issued, with the index of its op in the program.
    fn on_issued(&mut self, op: usize);
    /// Called before [`Observer::on_issued`] by a backend that counts bytes: the rank passed so many bytes to the
    /// other members. A backend whose device sends them by itself does not call it.
    fn on_sent(&mut self, _op: usize, _bytes: u64) {}
    /// Called when the host begins to wait for a collective that was issued earlier, with the index
    /// of the issuing op. Not called for a collective that is issued and waited for in one step.
    fn on_waiting(&mut self, _op: usize) {}
    /// Called when a collective is complete on this rank, with the index of the issuing op.
    fn on_completed(&mut self, _op: usize) {}
    /// Called when a halo that this rank holds differs from the rows that its neighbours sent, with the
    /// index of the issuing op and a text that says which rows differ.
    ///
    /// # Errors
    /// The reason why the program must end, as for [`Observer::on_issuing`]. An observer that goes on
    /// computes with the wrong rows.
    fn on_other_halo(&mut self, _op: usize, what: &str) -> Result<(), String> {
        Err(what.to_string())
    }
    /// Reports the number of ops completed so far.
    fn on_progress(&mut self, ops: u32);
}

/// The observer of a program whose progress nobody watches.
#[derive(Debug)]
pub struct NoObserver;

impl Observer for NoObserver {
    fn on_issued(&mut self, _: usize) {}
    fn on_progress(&mut self, _: u32) {}
}

/// Callback that makes a backend's blocked collectives return; callable from any thread.
pub type AbortFn = Arc<dyn Fn(&str) + Send + Sync>;

/// A device that runs loaded programs.
pub trait Backend {
    /// Loads a program: allocates its slots and buffers, and reads the weights that are not loaded
    /// yet.
    ///
    /// # Errors
    /// T0801, or an error of the weight source.
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<ProgramHandle, Diagnostic>;

    /// Returns how many objects were compiled, captured or allocated for runs so far. The number is
    /// constant after every program has run once.
    fn setup_count(&self) -> u64 {
        0
    }

    /// Returns the loaded programs, in the order in which they were loaded.
    fn loaded_programs(&self) -> Vec<LoadedProgram>;

    /// Returns the communicators, in the order in which this rank joined them.
    fn joined_communicators(&self) -> Vec<JoinedCommunicator>;

    /// Returns parity keys with the values that are in effect: `backend` with its name, the versions
    /// of its device and libraries, and a key that begins with `route:` for each class of shapes of
    /// the loaded programs for which the backend has chosen among several implementations. Ranks
    /// that choose for the same class must choose the same.
    fn effective_values(&self) -> Vec<(String, String)>;

    /// Makes later loads choose another implementation wherever the backend has one with the same
    /// bits. For drills only.
    fn choose_other_routes(&mut self) {}

    /// Captures every program from now on into a graph of this name, whatever the program declares.
    /// For drills only.
    fn rename_graphs(&mut self, _name: &str) {}

    /// Makes every later run begin with work that never ends. Returns `false` if the backend does
    /// not support that. For drills only.
    fn inject_hang(&mut self) -> bool {
        false
    }

    /// Returns the fingerprints of everything that this rank must have in common with other ranks:
    /// every weight shard, listed once however many programs read it, as of the last load, and the
    /// tables that the backend derives.
    fn fingerprints(&self) -> Vec<Fingerprint>;

    /// Hashes up to `bytes` of the weights, continuing after the last call, and compares each shard
    /// with its fingerprint once it is hashed completely. Does nothing if `bytes` is below the
    /// backend's smallest unit of work.
    fn audit_weights(&mut self, bytes: u64) -> AuditResult;

    /// As [`Backend::audit_weights`], but a backend whose host waits while its device computes hashes during
    /// the next runs, and returns what it has hashed since the last call.
    fn audit_weights_while_waiting(&mut self, bytes: u64) -> AuditResult {
        self.audit_weights(bytes)
    }

    /// Reloads every weight from another source, then zeroes every buffer. All weights are checked
    /// before the first one is replaced.
    ///
    /// # Errors
    /// An error of the source; the old weights are then still loaded.
    fn reload_weights(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic>;

    /// Sets one element of a weight in memory without updating its fingerprint. Returns `false` if
    /// there is no such element. For drills only: [`Backend::audit_weights`] must detect this
    /// fault.
    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool;

    /// Returns one element of a weight in memory, or `None` if there is no such element or if the
    /// backend reads no single elements. For drills only.
    fn read_weight(&self, _name: &str, _index: u64) -> Option<f32> {
        None
    }

    /// Returns which checks of stored state the backend offers. A rank announces them, so that a record
    /// shows which it runs without.
    fn cache_checks(&self) -> CacheChecks {
        CacheChecks::default()
    }

    /// Returns a digest of the present contents of each of these buffers, in their order, made where the
    /// buffers are stored. The change of a single bit always changes a digest. Returns `None` if there is no
    /// such buffer, or if the backend does not offer digests ([`CacheChecks::contents`]). Backends mix the
    /// bytes in different ways, so a rank compares a digest only with its own of the same run.
    fn digest_buffers(&mut self, _names: &[&str]) -> Option<Vec<u64>> {
        None
    }

    /// Returns the fingerprint of a buffer's contents; `slice` describes the shard.
    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint>;

    /// Runs every GEMM of the loaded programs that has a kernel of its own, at its full extents and
    /// on fixed operands, and returns its name with a digest of its result. A GEMM for whose operands
    /// the device has no memory left is missing.
    ///
    /// # Errors
    /// A GEMM that fails.
    fn probe_gemms(&mut self) -> Result<Vec<(String, [u8; 32])>, Diagnostic> {
        Ok(Vec::new())
    }

    /// Runs a loaded program to completion.
    ///
    /// # Errors
    /// A fault; the backend is unusable afterwards.
    fn run(
        &mut self,
        program: ProgramHandle,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault>;

    /// Makes later runs time their steps on the device, or ends that. A backend that runs op by op reports
    /// each one to the observer, and ignores this.
    fn time_steps(&mut self, _wanted: bool) {}

    /// Returns when the device ran the steps of the last run, and forgets it; `None` if the backend did not time them.
    fn take_step_times(&mut self) -> Option<StepTimes> {
        None
    }

    /// Returns what the layers with experts in two tiers did in the last run, and forgets it. A backend without tiers
    /// reports none.
    fn take_expert_report(&mut self) -> ExpertReport {
        ExpertReport::default()
    }

    /// Returns an output value of the last run.
    fn output(&self, name: &str) -> Option<&[f32]>;

    /// Returns the contents of a buffer, row-major.
    fn read_buffer(&self, name: &str) -> Option<Vec<f32>>;

    /// Overwrites a buffer. Returns `false` if there is no buffer with this name and length.
    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool;

    /// Zeroes every named buffer that keeps state between runs; weights stay. A backend forgets which experts of two
    /// tiers were used, so that runs after a reset repeat.
    fn reset_buffers(&mut self);

    /// Returns how often every buffer was zeroed, for whatever reason. There is no default: a backend
    /// that forgot it would hide that a rank lost its caches.
    fn reset_count(&self) -> u64;

    /// Makes the rows above and below a shard arrive swapped in every later halo exchange. Returns
    /// `false` if the backend exchanges no halos. For drills only.
    fn swap_halos(&mut self) -> bool {
        false
    }

    /// Returns the bytes allocated for weights, buffers and temporaries.
    fn memory_bytes(&self) -> [u64; 3];

    /// Returns the memory that the backend has allocated so far, and how its last run used it.
    fn memory_use(&self) -> MemoryUse;

    /// Makes later runs fill temporaries that hold no value with a NaN pattern, so that an access to
    /// memory before it is written, or after it is freed, cannot pass for a result. A backend that
    /// executes ops one by one checks every access and ends the run with [`Fault::Poisoned`]; a
    /// device that replays whole programs fills its slots before each run.
    fn poison_temporaries(&mut self);

    /// Returns the number of sums over ranks so far whose terms cancelled and were therefore added
    /// with compensation.
    fn compensated_sums(&self) -> u64;

    /// Returns a callback that ends blocked collectives.
    fn abort_fn(&self) -> AbortFn;
}
