//! Executes role programs on one GPU. A program that declares a graph is captured once as a CUDA
//! graph over planned memory and then replayed; any other is launched op by op.
//!
//! A program has one area of device memory for the inputs and scalars of a call; a copy at the head
//! of its graph fills the area. Kernels read call scalars from the area, so one graph serves every
//! call. Streams and events follow the program. The first run after a load captures the graph;
//! later runs allocate, compile and capture nothing.

mod backend;
mod buffer_digests;
mod call_checks;
mod capture;
mod comm_groups;
mod device_calls;
mod effective_values;
mod enqueue;
mod expert_fetches;
mod expert_table;
mod expert_tiers;
mod fused_groups;
mod launch;
mod layer_decision;
mod list_tables;
mod memory;
mod op_support;
mod prepare;
mod rank_threads;
mod reduced_operands;
mod rope_tables;
mod rounding;
mod run;
mod step_trace;
mod transfer_batches;
mod wait;
mod weights;
mod wire_words;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_device::{CommRoute, MeshRank, StepTimes, T0801};
use tessera_ir::{CapturedGraph, Op, OpView, Program, Type};

use crate::allocation_lock::AllocationPermit;
use crate::attention_cudnn::CudnnAttention;
use crate::attention_sm90::AttentionSm90;
use crate::call_arrays::GpuCallArrays;
use crate::capabilities::{Capabilities, FeatureMask};
use crate::codes::T1304;
use crate::compile::{Compiler, KernelCache};
use crate::conv::ConvSm90;
use crate::device_memory::{DeviceMemory, PinnedMemory};
use crate::devices::used_bytes;
use crate::driver::{Context, CudaError, CudaEvent, CudaResult, CudaStream, GraphExec};
use crate::dylib::{CublasLt, Cudnn, Nvrtc};
use crate::fusion::comm_fusion::CommOffload;
use crate::fusion::horizontal_fusion::ScratchPlace;
use crate::fusion::launch_step::LaunchStep;
use crate::gemm::Gemms;
use crate::gemm::autotune_cache::AutotuneCache;
use crate::gpu_array::GpuArray;
use crate::kernels::KernelSet;
use crate::libraries::Libraries;
use crate::nccl::UniqueId;
use crate::thread_ranks::ThreadRank;

use buffer_digests::BufferDigests;
use comm_groups::CommGroups;
use expert_fetches::TieredLayer;
use list_tables::ListTables;
use op_support::{read_supported, unsupported_streams};
use rope_tables::RopeTables;
use step_trace::TracedGraph;
use weights::{DeviceWeights, WaitingAudit};
use wire_words::WireWords;

/// Settings for opening a [`CudaBackend`].
#[derive(Debug, Clone)]
pub struct CudaOptions {
    /// Index of the device among the visible ones.
    pub device_index: u32,
    /// Cache that keeps compiled kernels between runs, if there is one.
    pub kernel_cache: Option<Arc<dyn KernelCache>>,
    /// Longest time that one collective waits for a peer.
    pub peer_timeout: Duration,
    /// Longest time to wait for peers to connect, before the first collective.
    pub setup_timeout: Duration,
    /// Identifies this host: ranks share the number exactly when they run on the same host. Ranks
    /// of one host use peer-to-peer memory where their GPUs support it.
    pub host_id: u64,
    /// Features of the GPU that kernels must not use. All ranks must mask the same ones, because
    /// other kernels may give other bits.
    pub masked_features: FeatureMask,
    /// The place of the rank among ranks that are threads of this process, if they are. They use peer-to-peer memory alone.
    pub thread_rank: Option<ThreadRank>,
}

/// A communicator that a rank's backend joins when it is created, and the rank's place in it.
#[derive(Debug, Clone)]
pub struct CommunicatorMember {
    /// The route by which the rank's ops name the communicator.
    pub route: CommRoute,
    /// NCCL id of the communicator. One process creates it and distributes it to all members. For threads of one process,
    /// any number that the communicators of a plan do not share.
    pub id: UniqueId,
    /// Index of this rank among the members.
    pub member: usize,
    /// Number of ranks in the communicator, including this one.
    pub member_count: usize,
}

/// The CUDA backend of one rank on one GPU.
#[derive(Debug)]
pub struct CudaBackend {
    placement: MeshRank,
    options: CudaOptions,
    // Fields drop in order: graphs hold NCCL work of the groups, so they drop first; the groups
    // drop before the memory that they share.
    programs: Vec<PreparedProgram>,
    groups: CommGroups,
    weights: DeviceWeights,
    waiting_audit: WaitingAudit,
    buffers: Vec<DeviceBuffer>,
    buffer_index: BTreeMap<String, usize>,
    /// What digests all buffers; `None` before the first digest after a load.
    buffer_digests: Option<BufferDigests>,
    /// Bytes of the slots of the program with the most, because only one program runs at a time.
    slot_bytes: u64,
    slot_memory: Option<SlotMemory>,
    outputs: BTreeMap<String, HostOutput>,
    streams: BTreeMap<String, CudaStream>,
    done_event: CudaEvent,
    kernels: KernelSet,
    gemms: Gemms,
    attentions: CudnnAttention,
    /// The sm90 attention kernel, if the device supports it.
    sm90_attention: Option<AttentionSm90>,
    /// The sm90 convolution kernels, if the device supports them.
    sm90_convs: Option<ConvSm90>,
    capabilities: Capabilities,
    one_time_counts: OneTimeCounts,
    /// Whether runs begin with a kernel that never ends (an injected hang).
    hang_injected: bool,
    /// Whether every run begins with slots full of NaN.
    is_poisoned: bool,
    /// How often all buffers were zeroed.
    reset_count: u64,
    /// Program that ran last, and the results so far that reused a slot.
    last_program: Option<usize>,
    slot_reuses: u64,
    /// Whether a run was launched and has not completed. Its work may still be on the device.
    has_unfinished_run: bool,
    memory_use: DeviceMemoryUse,
    /// Whether runs time their steps.
    times_steps: bool,
    /// When the steps of the last run were on the device, if it timed them.
    step_times: Option<StepTimes>,
    /// Where the caller puts inputs in GPU memory and finds outputs; `None` if calls pass host memory alone.
    call_arrays: Option<Arc<GpuCallArrays>>,
    /// The inputs that an unfinished run may read.
    call_inputs: Vec<GpuArray>,
    context: Arc<Context>,
    /// Acquired by the drop of this value, and dropped behind all memory.
    permit: Option<AllocationPermit>,
}

/// What tells the memory use of a device.
#[derive(Debug)]
struct DeviceMemoryUse {
    libraries: Libraries,
    device_index: u32,
    /// Bytes in use before this process opened the device.
    at_open: Option<u64>,
}

/// Counts of the one-time work of a backend. No count grows after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OneTimeCounts {
    /// Modules that this process compiled. Modules loaded from the kernel cache do not count.
    pub kernels_compiled: u32,
    /// GEMM shapes that this process autotuned. Shapes found in the autotune cache of an earlier
    /// run do not count.
    pub gemms_autotuned: u32,
    /// Graphs captured for runs. Graphs that [`CudaBackend::trace_run`] captures do not count.
    pub graphs_captured: u32,
    /// Allocations of slot and scratch memory. The first run after programs were loaded makes one.
    pub slot_allocations: u32,
}

/// The allocation that holds all slots, followed by scratch memory.
#[derive(Debug)]
struct SlotMemory {
    memory: DeviceMemory,
    /// Offset of the scratch memory, which holds intermediate data of steps that has no slot.
    scratch_offset: u64,
}

#[derive(Debug)]
struct DeviceBuffer {
    ty: Type,
    memory: DeviceMemory,
}

/// Location of an output value in host memory.
#[derive(Debug)]
struct HostOutput {
    program: usize,
    offset: usize,
    len: usize,
    is_current: bool,
}

/// Location of the host's copy of the ids that an op chooses. An id is NaN if the logits of its row contain NaN.
#[derive(Debug, Clone, Copy)]
struct ChosenIds {
    op: usize,
    offset: usize,
    rows: usize,
}

/// Which allocation of the backend holds a value's elements, and at which offset.
#[derive(Debug, Clone, Copy)]
enum ValueLocation {
    NoStorage,
    Slot(usize),
    /// Index of a buffer and a byte offset into it.
    Buffer(usize, u64),
    Weight(usize),
    /// Byte offset into the program's call area.
    CallArea(u64),
    Scratch(ScratchPlace),
}

#[derive(Debug)]
struct PreparedProgram {
    program: Arc<Program>,
    /// The view of each op of the program.
    views: Arc<[OpView]>,
    locations: Vec<ValueLocation>,
    /// Backend buffer index of each buffer of the program.
    buffer_indices: Vec<usize>,
    steps: Vec<LaunchStep>,
    /// Collectives that run without a kernel of their own, by op.
    comm_offloads: BTreeMap<usize, CommOffload>,
    rope_tables: Vec<RopeTables>,
    list_tables: ListTables,
    /// The words of each exchange that sends e4m3, by op.
    wire_words: BTreeMap<usize, WireWords>,
    /// For each reduction whose operand has no slot: the offset in scratch memory of the operand's copy.
    reduced_operands: BTreeMap<usize, u64>,
    /// The layers whose experts lie in two tiers.
    tiered_layers: Vec<Arc<TieredLayer>>,
    scratch_bytes: usize,
    /// Offset of each slot in the slot memory, in bytes.
    slot_offsets: Vec<u64>,
    call_area: DeviceMemory,
    /// Pinned host memory that is copied into the call area before a run, and its length.
    staged: PinnedMemory,
    staged_bytes: usize,
    /// Pinned host memory that outputs are copied to, unless they stay on the device.
    host_outputs: PinnedMemory,
    /// The device memory of outputs that stay on the device, with the offsets of those on the host. Behind them lie
    /// the words in which the summary of an output counts.
    device_outputs: Option<DeviceMemory>,
    /// Bytes of the outputs in `device_outputs`.
    device_output_bytes: usize,
    /// The host's copies of chosen ids, which lie behind the outputs.
    chosen_ids: Vec<ChosenIds>,
    /// The graph that the program declares, and that the backend captures.
    declared_graph: Option<CapturedGraph>,
    graph: Option<GraphExec>,
    /// The same program captured with timestamp events, after the first trace.
    traced_graph: Option<TracedGraph>,
    /// Whether the program has run since its memory was placed.
    has_run: bool,
}

impl CudaBackend {
    /// Opens a device for a rank and connects to the other members of every communicator. All ranks
    /// must list the communicators in the same order.
    ///
    /// # Errors
    /// T1301 for a missing library, T1304 for a refused library call, T1303 if ranks fail to
    /// connect.
    pub fn open(
        libraries: &Libraries,
        seat: MeshRank,
        ends: Vec<CommunicatorMember>,
        options: CudaOptions,
    ) -> Result<CudaBackend, Diagnostic> {
        libraries.check_loaded(crate::Library::Driver)?;
        let (nvrtc, lt, dnn) = (Nvrtc::load(libraries)?, CublasLt::load(libraries)?, Cudnn::load(libraries)?);
        let device = options.device_index;
        // The driver must be initialized before it is queried for a device.
        cudarc::driver::result::init().map_err(|e| cuda_error("driver", &e.into()))?;
        let (at_open, libraries_in_use) = (used_bytes(libraries, device), libraries.share_handles());
        let used = DeviceMemoryUse { libraries: libraries_in_use, device_index: device, at_open };
        let (tables, seated) = ((nvrtc, lt, dnn), (seat, ends));
        CudaBackend::open_with_libraries(libraries, tables, seated, options, used)
            .map_err(|e| cuda_error(&format!("device {device}"), &e))
    }

    fn open_with_libraries(
        libraries: &Libraries,
        (nvrtc, lt, dnn): (Nvrtc, CublasLt, Cudnn),
        (seat, ends): (MeshRank, Vec<CommunicatorMember>),
        options: CudaOptions,
        used: DeviceMemoryUse,
    ) -> CudaResult<CudaBackend> {
        let context = Arc::new(Context::open(options.device_index)?);
        let capabilities = Capabilities::query(&context, options.masked_features.clone())?;
        let mut compiler = Compiler::new(nvrtc, capabilities.architecture(), options.kernel_cache.clone())?;
        let choices = AutotuneCache::new(options.kernel_cache.clone(), &context, &lt);
        let flash = AttentionSm90::new(&mut compiler, &capabilities)?;
        let groups = CommGroups::join_all(libraries, &mut compiler, seat, ends, &options)?;
        Ok(CudaBackend {
            placement: seat,
            options,
            programs: Vec::new(),
            weights: DeviceWeights::default(),
            waiting_audit: WaitingAudit::default(),
            buffers: Vec::new(),
            buffer_index: BTreeMap::new(),
            buffer_digests: None,
            slot_bytes: 0,
            slot_memory: None,
            outputs: BTreeMap::new(),
            streams: BTreeMap::new(),
            groups,
            done_event: CudaEvent::new()?,
            kernels: KernelSet::new(compiler, &capabilities)?,
            gemms: Gemms::new(lt, capabilities.clone(), choices)?,
            attentions: CudnnAttention::new(dnn)?,
            sm90_attention: flash,
            sm90_convs: ConvSm90::new(&capabilities),
            capabilities,
            one_time_counts: OneTimeCounts::default(),
            hang_injected: false,
            times_steps: false,
            step_times: None,
            is_poisoned: false,
            reset_count: 0,
            last_program: None,
            slot_reuses: 0,
            has_unfinished_run: false,
            memory_use: used,
            call_arrays: None,
            call_inputs: Vec::new(),
            context,
            permit: None,
        })
    }

    /// Checks a whole program before any rank starts. Returns T0801 for the first op that no kernel
    /// of this backend supports, or for ops that share memory on several streams, as [`load`](tessera_device::Backend::load) would.
    #[must_use]
    pub fn find_unsupported(p: &Program) -> Option<Diagnostic> {
        CudaBackend::read_views(p).err()
    }

    /// Returns the views of a program's ops, or the error of [`CudaBackend::find_unsupported`].
    fn read_views(p: &Program) -> Result<Vec<OpView>, Diagnostic> {
        let read = |i: usize| {
            read_supported(p, i).map_err(|why| CudaBackend::unsupported_op_error(p, &p.ops[i], &why))
        };
        let views = (0..p.ops.len()).map(read).collect::<Result<_, _>>()?;
        match unsupported_streams(p) {
            Some(why) => Err(Diagnostic::error(&T0801, format!("@{} of {}: {why}", p.name, p.role))
                .with_label("backend", "cuda")),
            None => Ok(views),
        }
    }

    /// Returns the counts of one-time work so far.
    #[must_use]
    pub fn one_time_counts(&self) -> OneTimeCounts {
        OneTimeCounts {
            kernels_compiled: self.kernels.compiler.compiled_count,
            gemms_autotuned: self.gemms.timed_count(),
            ..self.one_time_counts
        }
    }

    /// Returns the device memory in bytes that this process uses, including its context and the
    /// libraries. The value is the memory in use now minus the memory in use before the process
    /// opened the device, so other processes that start or exit meanwhile distort it.
    #[must_use]
    pub fn process_memory(&self) -> Option<u64> {
        let DeviceMemoryUse { libraries, device_index, at_open } = &self.memory_use;
        used_bytes(libraries, *device_index)?.checked_sub((*at_open)?)
    }

    /// Returns the device memory in bytes that a process uses beyond its plan: the context, code
    /// and workspaces of the libraries, and NCCL's memory for each communicator. Measured on H200
    /// GPUs with CUDA 13.0 and NCCL 2.28.
    #[must_use]
    pub fn overhead_bytes(communicators: usize) -> u64 {
        (1100 + 760 * communicators as u64) << 20
    }

    /// Describes the transport of each communicator, one line per communicator: `tp: peer memory`, or
    /// `tp: NCCL, because` and the reason. Valid once the memory is shared.
    #[must_use]
    pub fn describe_transports(&self) -> Vec<String> {
        self.groups.list_joined().iter().map(|c| format!("{}: {}", c.route, c.transport)).collect()
    }

    fn unsupported_op_error(p: &Program, op: &Op, why: &str) -> Diagnostic {
        Diagnostic::error(&T0801, format!("{} in @{} of {}: {why}", op.opcode.name(), p.name, p.role))
            .with_label("backend", "cuda")
    }

    /// Returns a program and the views of its ops.
    fn program_and_views(&self, program: usize) -> (Arc<Program>, Arc<[OpView]>) {
        let own = &self.programs[program];
        (Arc::clone(&own.program), Arc::clone(&own.views))
    }
}

fn cuda_error(what: &str, e: &CudaError) -> Diagnostic {
    Diagnostic::error(&T1304, e.0.clone()).with_label("cuda", what.to_string())
}
