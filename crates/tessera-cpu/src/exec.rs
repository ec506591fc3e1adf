//! Executes role programs on the CPU: kernels over planned slots, collectives over shared memory or
//! streams.
//!
//! All streams run in program order on one thread, which every event order permits. An issue op
//! hands its operand to the communicator and returns; the work of peers between issue and wait
//! overlaps with the transfer.

mod collective_ops;
mod data_movement;
mod dispatch;
mod expert_io;
mod expert_tiers;
mod memory;
mod memory_check;
mod op_support;
mod prepare;
mod run;
mod weight_units;
mod weights;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_device::{
    AbortFn, AuditResult, Backend, CacheChecks, CallData, CommRoute, ExpertReport, Fault, Fingerprint,
    FingerprintHasher, JoinedCommunicator, LoadedProgram, MemoryUse, MeshRank, Observer, ProgramHandle,
    T0801, WeightSource,
};
use tessera_ir::{CapturedGraph, ExpertTier, Op, OpView, Program, Slots, ValueId, WeightLoad};
use xxhash_rust::xxh3::xxh3_64;

pub use collective_ops::contribution_bytes;
use dispatch::Kernel;
use expert_tiers::ExpertTiers;
use memory::{BackendMemory, ValueLocation};
use op_support::read_supported;
use weights::{LoadedShard, WeightAuditCursor};

use crate::Pool;
use crate::host_memory::MemoryBudget;
use crate::kernels::{RopeCache, Scratch, vector_unit};
use crate::transport::Transport;

/// Runs the programs of one rank on CPU threads, with collectives over a host transport.
#[derive(Debug)]
pub struct CpuBackend {
    placement: MeshRank,
    pool: Pool,
    endpoints: Vec<CommEndpoint>,
    /// Maximum wait for a peer in one collective.
    collective_timeout: Duration,
    programs: Vec<Arc<PreparedProgram>>,
    memory: BackendMemory,
    weight_index: BTreeMap<WeightKey, usize>,
    /// Whether the weights of matmuls are stored in packed form.
    packs_weights: bool,
    /// Whether weights of matmuls and embeds are stored in bf16 where that is exact.
    stores_bf16: bool,
    /// Type and index of the weights that are used by matmuls alone, which read both forms.
    matmul_weights: BTreeSet<(String, usize)>,
    /// The origin and fingerprint of each loaded weight.
    shards: Vec<LoadedShard>,
    /// Fingerprints of the RoPE tables, time tables and normal draws that the loaded programs use.
    derived_fingerprints: Vec<Fingerprint>,
    /// Weights whose experts lie in two tiers of memory.
    tiers: ExpertTiers,
    audit_cursor: WeightAuditCursor,
    buffer_index: BTreeMap<String, usize>,
    scratch: Scratch,
    rope_cache: RopeCache,
    outputs: BTreeMap<String, OutputValue>,
    compensated_sums: u64,
    /// Largest number of allocated bytes after a load or a run.
    peak_bytes: u64,
    /// Memory that later loads may allocate.
    budget: MemoryBudget,
    /// Whether runs check every access to temporaries.
    is_poisoned: bool,
    /// How often all buffers were zeroed.
    reset_count: u64,
    /// Whether the rows of every halo arrive swapped, as a drill has asked for.
    swaps_halos: bool,
}

/// A rank's end of a communicator.
#[derive(Debug)]
pub struct CommEndpoint {
    /// The route by which the rank's ops refer to the communicator.
    pub route: CommRoute,
    /// Shared memory or streams to the other members, with this rank's index among them.
    pub transport: Box<dyn Transport>,
}

/// Identifies a shard of a tensor and its memory layout.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WeightKey {
    name: String,
    ty: String,
    load: Option<WeightLoad>,
    form: WeightForm,
    /// Tiers in which its experts lie: a pool is read by programs that state it.
    tier: Option<ExpertTier>,
}

/// The form of a shard in memory, which decides who can read it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum WeightForm {
    /// Elements in the order of the tensor, which every kernel reads.
    Plain,
    /// Panels for matmuls and convolutions.
    Packed,
    /// Elements that only `embed` reads, in bf16 if that is exact.
    Table,
}

/// The value of an output op; its memory is reused from run to run.
#[derive(Debug)]
struct OutputValue {
    /// Whether the last run executed the output op, so that `values` is current.
    written: bool,
    values: Vec<f32>,
}

#[derive(Debug)]
struct PreparedProgram {
    program: Arc<Program>,
    /// The graph that a device would replay; its ops are executed one by one.
    graph: Option<CapturedGraph>,
    /// View of each op.
    views: Vec<OpView>,
    /// Kernel of each compute op.
    kernels: Vec<Option<Kernel>>,
    /// Location of each value.
    locations: Vec<ValueLocation>,
    /// Index of the issuing op of each ticket value.
    issue_ops: BTreeMap<ValueId, usize>,
    /// Index of the backend's buffer for each buffer of the program.
    buffers: Vec<usize>,
}

impl CpuBackend {
    /// Creates a backend for a rank, given its endpoint of every communicator that its programs
    /// use.
    #[must_use]
    pub fn new(
        placement: MeshRank,
        pool: Pool,
        endpoints: Vec<CommEndpoint>,
        collective_timeout: Duration,
    ) -> CpuBackend {
        CpuBackend {
            placement,
            pool,
            endpoints,
            collective_timeout,
            programs: Vec::new(),
            memory: BackendMemory::default(),
            weight_index: BTreeMap::new(),
            packs_weights: true,
            stores_bf16: false,
            matmul_weights: BTreeSet::new(),
            shards: Vec::new(),
            derived_fingerprints: Vec::new(),
            tiers: ExpertTiers::default(),
            audit_cursor: WeightAuditCursor::default(),
            buffer_index: BTreeMap::new(),
            scratch: Scratch::new(),
            rope_cache: RopeCache::new(),
            outputs: BTreeMap::new(),
            compensated_sums: 0,
            peak_bytes: 0,
            budget: MemoryBudget::default(),
            is_poisoned: false,
            reset_count: 0,
            swaps_halos: false,
        }
    }

    /// Stores the weights of later loads in bf16, where that is exact and only matmuls or embeds read
    /// them. Results keep their bits, in half the memory; a matmul widens each panel for every 48 rows.
    pub fn store_bf16_weights(&mut self) {
        self.stores_bf16 = true;
    }

    /// Refuses (T0804) to allocate more than this for weights, buffers and temporaries; without a call,
    /// only the operating system limits them.
    pub fn limit_memory(&mut self, bytes: u64) {
        self.budget = MemoryBudget::new(bytes);
    }

    /// Checks a whole program before any rank starts: returns T0801 for its first op that no kernel
    /// here supports, as [`Backend::load`] does.
    #[must_use]
    pub fn find_unsupported(p: &Program) -> Option<Diagnostic> {
        p.ops
            .iter()
            .find_map(|op| read_supported(p, op).err().map(|why| CpuBackend::unsupported_error(p, op, &why)))
    }

    fn unsupported_error(p: &Program, op: &Op, why: &str) -> Diagnostic {
        Diagnostic::error(&T0801, format!("{} in @{} of {}: {why}", op.opcode.name(), p.name, p.role))
            .with_label("backend", "cpu")
    }
}

impl Backend for CpuBackend {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<ProgramHandle, Diagnostic> {
        let prepared = self.prepare_program(program, slots, weights)?;
        self.programs.push(Arc::new(prepared));
        self.peak_bytes = self.memory_use().peak_bytes;
        Ok(ProgramHandle(self.programs.len() - 1))
    }

    fn loaded_programs(&self) -> Vec<LoadedProgram> {
        let describe =
            |p: &Arc<PreparedProgram>| LoadedProgram { name: p.program.name.clone(), graph: p.graph.clone() };
        self.programs.iter().map(describe).collect()
    }

    fn joined_communicators(&self) -> Vec<JoinedCommunicator> {
        let describe = |e: &CommEndpoint| JoinedCommunicator {
            route: e.route,
            shared: e.transport.shared_id().map(|id| format!("shared memory {id}")),
            transport: e.transport.used_transport(),
        };
        self.endpoints.iter().map(describe).collect()
    }

    fn effective_values(&self) -> Vec<(String, String)> {
        let mut values = vec![
            ("backend".to_string(), "cpu".to_string()),
            ("kernels".to_string(), vector_unit().to_string()),
            ("threads".to_string(), self.pool.thread_count().to_string()),
        ];
        values.extend(self.describe_matmul_routes());
        values
    }

    fn choose_other_routes(&mut self) {
        self.packs_weights = false;
    }

    fn rename_graphs(&mut self, name: &str) {
        for p in self.programs.iter_mut().filter_map(Arc::get_mut) {
            let ops = p.graph.as_ref().map_or(0, |g| g.ops);
            p.graph = Some(CapturedGraph { name: name.to_string(), ops });
        }
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.list_fingerprints()
    }

    fn audit_weights(&mut self, bytes: u64) -> AuditResult {
        self.audit_next_units(bytes)
    }

    fn reload_weights(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.replace_weights(weights)?;
        self.reset_buffers();
        Ok(())
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.write_element(name, index, value)
    }

    fn read_weight(&self, name: &str, index: u64) -> Option<f32> {
        self.read_element(name, index)
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        let mut hash = FingerprintHasher::default();
        hash.update(&self.memory.buffers[*self.buffer_index.get(name)?]);
        Some(hash.finish(name, slice))
    }

    fn cache_checks(&self) -> CacheChecks {
        CacheChecks { contents: true, halos: true }
    }

    fn digest_buffers(&mut self, names: &[&str]) -> Option<Vec<u64>> {
        let digest = |name: &&str| {
            let buffer = &self.memory.buffers[*self.buffer_index.get(*name)?];
            Some(xxh3_64(bytemuck::cast_slice(buffer)))
        };
        names.iter().map(digest).collect()
    }

    fn swap_halos(&mut self) -> bool {
        self.swaps_halos = true;
        true
    }

    fn run(
        &mut self,
        program: ProgramHandle,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let prepared = Arc::clone(&self.programs[program.0]);
        let pool = self.pool.clone();
        // The run executes inside the pool, so that a kernel's blocks cost no wake-up of this
        // thread.
        pool.install(|| self.run_prepared(&prepared, call, observer))
    }

    fn take_expert_report(&mut self) -> ExpertReport {
        self.tiers.take_report()
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        self.outputs.get(name).filter(|o| o.written).map(|o| o.values.as_slice())
    }

    fn read_buffer(&self, name: &str) -> Option<Vec<f32>> {
        self.buffer_index.get(name).map(|i| self.memory.buffers[*i].clone())
    }

    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool {
        match self.buffer_index.get(name).map(|i| &mut self.memory.buffers[*i]) {
            Some(b) if b.len() == data.len() => {
                b.copy_from_slice(data);
                true
            }
            _ => false,
        }
    }

    fn reset_buffers(&mut self) {
        self.reset_count += 1;
        for b in &mut self.memory.buffers {
            b.fill(0.0);
        }
        self.tiers.reset();
    }

    fn reset_count(&self) -> u64 {
        self.reset_count
    }

    fn memory_bytes(&self) -> [u64; 3] {
        let [weights, buffers, temporaries] = self.memory.allocated_bytes();
        [weights + self.tiers.allocated_bytes(), buffers, temporaries]
    }

    fn memory_use(&self) -> MemoryUse {
        let kinds = self.memory_bytes();
        let outputs: usize = self.outputs.values().map(|o| o.values.capacity()).sum();
        let audited = self.audit_cursor.row_capacity();
        let workspace = self.scratch.allocated_bytes()
            + self.rope_cache.allocated_bytes()
            + size_of::<f32>() * (outputs + audited);
        let (allocated_bytes, workspace_bytes) = (kinds.iter().sum::<u64>(), workspace as u64);
        MemoryUse {
            allocated_bytes,
            workspace_bytes,
            peak_bytes: self.peak_bytes.max(allocated_bytes + workspace_bytes),
            temporary_bytes: kinds[2],
            run_temporary_bytes: self.memory.run_temporary_bytes(),
            slot_reuses: self.memory.slot_reuses,
        }
    }

    fn poison_temporaries(&mut self) {
        self.is_poisoned = true;
    }

    fn compensated_sums(&self) -> u64 {
        self.compensated_sums
    }

    fn abort_fn(&self) -> AbortFn {
        let abort_fns: Vec<AbortFn> = self.endpoints.iter().map(|e| e.transport.abort_fn()).collect();
        Arc::new(move |reason| abort_fns.iter().for_each(|abort| abort(reason)))
    }
}
