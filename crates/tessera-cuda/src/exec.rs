//! Executes role programs on one GPU. Each program is captured once as a CUDA graph over planned
//! memory and then replayed.
//!
//! A program has one area of device memory for the inputs and scalars of a call; a copy at the head
//! of its graph fills the area. Kernels read call scalars from the area, so one graph serves every
//! call. Streams and events follow the program. The first run after a load captures the graph;
//! later runs allocate, compile and capture nothing.

mod comm_fusion;
mod comm_groups;
mod enqueue;
mod horizontal_fusion;
mod kernel_fusion;
mod op_support;
mod prepare;
mod rope_tables;
mod step_trace;
mod transfer_batches;
mod weights;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_device::{
    AbortFn, AuditResult, Backend, CallData, CommRoute, Fault, Fingerprint, FingerprintHasher, MeshRank,
    Observer, ProgramHandle, Scalar, T0801, WeightSource, check_input,
};
use tessera_ir::{DType, Op, Opcode, Program, Slots, Type};

use crate::T1304;
use crate::attention_cudnn::CudnnAttention;
use crate::attention_sm90::AttentionSm90;
use crate::autotune_cache::AutotuneCache;
use crate::compile::{Compiler, KernelCache};
use crate::devices::used_bytes;
use crate::driver::{
    Context, CudaError, CudaEvent, CudaResult, CudaStream, DeviceMemory, GraphExec, KernelArgs, PinnedMemory,
    copy_to_host,
};
use crate::dylib::{CublasLt, Cudnn, Nvrtc};
use crate::gemm_cublaslt::Gemms;
use crate::gemm_sm90::GemmSm90;
use crate::kernels::KernelSet;
use crate::libraries::Libraries;
use crate::nccl::UniqueId;

use comm_fusion::CommOffload;
use comm_groups::{CommGroups, PAGE_BYTES, ProgressReporter};
use kernel_fusion::LaunchStep;
use op_support::unsupported_reason;
use rope_tables::RopeTables;
use step_trace::TracedGraph;
use weights::DeviceWeights;

pub use step_trace::StepSpan;

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
    /// Whether programs are captured as graphs. Otherwise they are launched op by op, which is
    /// slower but easier to inspect.
    pub use_graphs: bool,
}

/// One rank's membership in a communicator.
#[derive(Debug, Clone)]
pub struct CommunicatorMember {
    /// The route by which the rank's ops name the communicator.
    pub route: CommRoute,
    /// NCCL id of the communicator. One process creates it and distributes it to all members.
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
    buffers: Vec<DeviceBuffer>,
    buffer_index: BTreeMap<String, usize>,
    /// Bytes of each slot: the maximum over all programs, because only one program runs at a time.
    slot_bytes: Vec<usize>,
    slot_memory: Option<SlotMemory>,
    outputs: BTreeMap<String, HostOutput>,
    streams: BTreeMap<String, CudaStream>,
    done_event: CudaEvent,
    kernels: KernelSet,
    gemms: Gemms,
    attentions: CudnnAttention,
    /// The sm90 attention kernel, if the device supports it.
    sm90_attention: Option<AttentionSm90>,
    one_time_counts: OneTimeCounts,
    /// Whether runs begin with a kernel that never ends (an injected hang).
    hang_injected: bool,
    /// Whether a run was launched and has not completed. Its work may still be on the device.
    has_unfinished_run: bool,
    /// Device memory in use, now and before this process opened the device.
    memory_use: DeviceMemoryUse,
    context: Arc<Context>,
}

/// Reads the device's memory use and remembers how much was in use before this process opened it.
struct DeviceMemoryUse {
    query: Box<dyn Fn() -> Option<u64> + Send>,
    at_open: Option<u64>,
}

impl std::fmt::Debug for DeviceMemoryUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} bytes in use at open", self.at_open)
    }
}

/// Counts of the one-time work of a backend. No count grows after the warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct OneTimeCounts {
    /// Kernels that this process compiled.
    pub kernels_compiled: u32,
    /// GEMM shapes that this process autotuned. Shapes found in the autotune cache of an earlier
    /// run do not count.
    pub gemms_autotuned: u32,
    /// Graphs captured for runs. Graphs that [`CudaBackend::trace_run`] captures do not count.
    pub graphs_captured: u32,
    /// Allocations of memory for temporaries.
    pub slot_allocations: u32,
}

/// The allocation that holds all slots, followed by scratch memory.
#[derive(Debug)]
struct SlotMemory {
    memory: DeviceMemory,
    slot_offsets: Vec<u64>,
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

/// Location of a value's elements.
#[derive(Debug, Clone, Copy)]
enum ValueLocation {
    NoStorage,
    Slot(usize),
    /// Index of a buffer and a byte offset into it.
    Buffer(usize, u64),
    Weight(usize),
    /// Byte offset into the program's call area.
    CallArea(u64),
    /// Byte offset into scratch memory, and the row pitch in elements. Rows of several values may
    /// be interleaved there.
    Scratch(u64, u64),
}

#[derive(Debug)]
struct PreparedProgram {
    program: Arc<Program>,
    locations: Vec<ValueLocation>,
    /// Backend buffer index of each buffer of the program.
    buffer_indices: Vec<usize>,
    steps: Vec<LaunchStep>,
    /// Collectives that run without a kernel of their own, by op.
    comm_offloads: BTreeMap<usize, CommOffload>,
    rope_tables: Vec<RopeTables>,
    scratch_bytes: usize,
    call_area: DeviceMemory,
    /// Pinned host memory that is copied into the call area before a run, and its length.
    staged: PinnedMemory,
    staged_bytes: usize,
    /// Pinned host memory that outputs are copied to.
    host_outputs: PinnedMemory,
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
        let shared_libraries = libraries.share_handles();
        let query = Box::new(move || used_bytes(&shared_libraries, device));
        let used = DeviceMemoryUse { at_open: query(), query };
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
        use cudarc::driver::sys::CUdevice_attribute as Attribute;
        let context = Arc::new(Context::open(options.device_index)?);
        let capability = (
            context.device_attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            context.device_attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut compiler = Compiler::new(nvrtc, capability, options.kernel_cache.clone())?;
        let choices = AutotuneCache::new(options.kernel_cache.clone(), &context, &lt);
        let multiprocessors =
            context.device_attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let flash = AttentionSm90::new(&mut compiler, capability, multiprocessors)?;
        let groups = CommGroups::join_all(libraries, &mut compiler, seat, ends, &options)?;
        Ok(CudaBackend {
            placement: seat,
            options,
            programs: Vec::new(),
            weights: DeviceWeights::default(),
            buffers: Vec::new(),
            buffer_index: BTreeMap::new(),
            slot_bytes: Vec::new(),
            slot_memory: None,
            outputs: BTreeMap::new(),
            streams: BTreeMap::new(),
            groups,
            done_event: CudaEvent::new()?,
            kernels: KernelSet::new(compiler, multiprocessors)?,
            gemms: Gemms::new(lt, GemmSm90::new(capability, multiprocessors), choices)?,
            attentions: CudnnAttention::new(dnn)?,
            sm90_attention: flash,
            one_time_counts: OneTimeCounts::default(),
            hang_injected: false,
            has_unfinished_run: false,
            memory_use: used,
            context,
        })
    }

    /// Checks a whole program before any rank starts. Returns T0801 for the first op that no kernel
    /// of this backend supports, as [`Backend::load`] would.
    #[must_use]
    pub fn find_unsupported(p: &Program) -> Option<Diagnostic> {
        p.ops.iter().find_map(|op| {
            unsupported_reason(p, op).map(|why| CudaBackend::unsupported_op_error(p, op, &why))
        })
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
        (self.memory_use.query)()?.checked_sub(self.memory_use.at_open?)
    }

    /// Returns the device memory in bytes that a process uses beyond its plan: the context, code
    /// and workspaces of the libraries, and NCCL's memory for each communicator. Measured on H200
    /// GPUs with CUDA 13.0 and NCCL 2.28.
    #[must_use]
    pub fn overhead_bytes(communicators: usize) -> u64 {
        (1100 + 760 * communicators as u64) << 20
    }

    /// Describes the transport of each communicator, one line per communicator.
    #[must_use]
    pub fn describe_transports(&self) -> Vec<String> {
        self.groups.describe_transports()
    }

    fn unsupported_op_error(p: &Program, op: &Op, why: &str) -> Diagnostic {
        Diagnostic::error(&T0801, format!("{} in @{} of {}: {why}", op.opcode.name(), p.name, p.role))
            .with_label("backend", "cuda")
    }

    /// Allocates the slots, once all programs that will run are loaded.
    fn place_slots(&mut self) -> CudaResult<()> {
        if self.slot_memory.is_some() {
            return Ok(());
        }
        let (mut offsets, mut end) = (Vec::new(), 0_u64);
        for bytes in &self.slot_bytes {
            offsets.push(end);
            end += (*bytes as u64).next_multiple_of(ALIGNMENT);
        }
        let memory = DeviceMemory::new((end as usize + self.scratch_bytes()).next_multiple_of(PAGE_BYTES))?;
        memory.zero_fill()?;
        self.one_time_counts.slot_allocations += 1;
        self.gemms.set_frozen(true);
        self.attentions.set_frozen(true);
        if let Err(e) = self.share_memory(&memory, &offsets) {
            // Peers may have mapped the memory already, and freeing it would wait for work that
            // never completes.
            std::mem::forget(memory);
            return Err(e);
        }
        self.slot_memory = Some(SlotMemory { memory, slot_offsets: offsets, scratch_offset: end });
        // The slot addresses have changed, so captured graphs are invalid.
        self.programs.iter_mut().for_each(|p| (p.graph, p.traced_graph, p.has_run) = (None, None, false));
        Ok(())
    }

    /// Bytes of the scratch memory behind the slots.
    fn scratch_bytes(&self) -> usize {
        self.programs.iter().map(|p| p.scratch_bytes).max().unwrap_or(0)
    }

    /// Checks that every row index of the call lies within its buffer. Kernels do not check bounds.
    fn check_cache_rows(&self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let prepared = &self.programs[program];
        let p = &prepared.program;
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite) {
            let (Some(row), Some(b)) = (op.keyed_operand("row"), op.buffer) else { continue };
            let named =
                p.ops.iter().find(|o| o.results.first() == Some(&row)).and_then(|o| o.name.as_deref());
            let Some(Scalar::I64(row)) = named.and_then(|n| call.scalars.get(n)) else { continue };
            let first = op.int_attr("first_row").unwrap_or(0) as u64;
            let (rows, all) = (first + p.type_of(op.operands[0]).shape[0], p.buffer(b).ty.shape[0]);
            if u64::try_from(*row).map_or(true, |r| r.saturating_add(rows) > all) {
                return Err(Fault::Failed(format!(
                    "@{}: row {row} + {rows} exceeds a cache of {all} rows",
                    p.name
                )));
            }
        }
        Ok(())
    }

    /// Copies a call's inputs and scalars into the pinned memory that the graph reads.
    fn stage_call_data(&mut self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let prepared = &mut self.programs[program];
        let p = Arc::clone(&prepared.program);
        for op in p.ops.iter().filter(|o| matches!(o.opcode, Opcode::Input | Opcode::Call)) {
            check_input(&p, op, call)?;
            let ValueLocation::CallArea(at) = prepared.locations[op.results[0].0 as usize] else { continue };
            let (at, name) = (at as usize, op.name.as_deref().unwrap_or_default());
            match (call.inputs.get(name), call.scalars.get(name)) {
                (Some(x), _) if op.opcode == Opcode::Input => {
                    prepared.staged.as_mut_slice::<f32>(at, x.len()).copy_from_slice(x);
                }
                (_, Some(Scalar::I64(v))) => prepared.staged.as_mut_slice::<i64>(at, 1)[0] = *v,
                (_, Some(Scalar::F32(v))) => prepared.staged.as_mut_slice::<f32>(at, 1)[0] = *v,
                (_, Some(Scalar::F32s(v))) => {
                    prepared.staged.as_mut_slice::<f32>(at, v.len()).copy_from_slice(v);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn run_program(
        &mut self,
        program: usize,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let to_fault = |e: CudaError| Fault::Failed(e.0);
        self.prepare_run(program, call, observer)?;
        let p = Arc::clone(&self.programs[program].program);
        if self.hang_injected {
            let streams = std::mem::take(&mut self.streams);
            let name = p.streams.first().map_or("compute", String::as_str);
            let spin_launch =
                streams.get(name).map(|s| self.kernels.launch_blocks("spin", 1, 1, 0, KernelArgs::new(), s));
            self.streams = streams;
            spin_launch.unwrap_or(Ok(())).map_err(to_fault)?;
        }
        // NCCL connects on first use, which must not happen inside a capture: the first run is
        // eager.
        let first = self.programs[program].graph.is_none();
        let eager = !self.options.use_graphs
            || (first && self.groups.has_lazy_connections() && !self.programs[program].has_run);
        if eager {
            self.enqueue_program(program, &mut |_, _, _| Ok(())).map_err(to_fault)?;
        } else {
            if first {
                self.capture_run_graph(program).map_err(to_fault)?;
            }
            let (main, graph) =
                (self.main_stream(&p).map_err(to_fault)?, self.programs[program].graph.as_ref());
            graph.map_or(Ok(()), |g| main.launch_graph(g)).map_err(to_fault)?;
        }
        self.programs[program].has_run = true;
        self.finish_run(program, observer)?;
        if eager && self.options.use_graphs {
            // All connections exist now. Capturing here keeps the next run free of captures.
            self.groups.reset_progress();
            self.capture_run_graph(program).map_err(to_fault)?;
        }
        Ok(())
    }

    /// Does all host work that precedes the launch of a program.
    fn prepare_run(
        &mut self,
        program: usize,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let broken = |e: CudaError| Fault::Failed(e.0);
        self.context.make_current().map_err(broken)?;
        self.stage_call_data(program, call)?;
        self.check_cache_rows(program, call)?;
        for (i, _) in self.programs[program].program.collective_ops() {
            observer.on_issuing(i).map_err(Fault::Refused)?;
        }
        self.has_unfinished_run = true;
        self.place_slots().map_err(broken)?;
        self.groups.reset_progress();
        Ok(())
    }

    /// Waits for a launched program to complete.
    fn finish_run(&mut self, program: usize, observer: &mut dyn Observer) -> Result<(), Fault> {
        let p = Arc::clone(&self.programs[program].program);
        self.main_stream(&p)
            .and_then(|s| s.record_event(&self.done_event))
            .map_err(|e| Fault::Failed(e.0))?;
        // A graph launches all its collectives at once, in program order.
        for (i, _) in p.collective_ops() {
            observer.on_issued(i);
        }
        self.wait_for_device(&p, observer)?;
        for o in self.outputs.values_mut() {
            o.is_current = o.program == program;
        }
        self.has_unfinished_run = false;
        Ok(())
    }

    /// Captures the graph that runs of a program replay.
    fn capture_run_graph(&mut self, program: usize) -> CudaResult<()> {
        let graph = self.capture_graph(program, |own| own.enqueue_program(program, &mut |_, _, _| Ok(())))?;
        self.one_time_counts.graphs_captured += 1;
        self.programs[program].graph = Some(graph);
        Ok(())
    }

    /// Waits until the device completes the program. Spins at first because a phase may be short,
    /// then sleeps between polls. Reports progress to the observer. Fails if a collective fails, or
    /// if the device makes no progress for longer than the peer timeout.
    fn wait_for_device(&self, p: &Program, observer: &mut dyn Observer) -> Result<(), Fault> {
        let mut reporter = ProgressReporter::new(p);
        let mut last_progress = Instant::now();
        let started = last_progress;
        loop {
            match self.done_event.is_complete() {
                Ok(true) => break,
                Ok(false) => {}
                Err(e) => return Err(Fault::Failed(format!("@{}: {e}", p.name))),
            }
            if reporter.report_progress(&self.groups, observer) {
                last_progress = Instant::now();
            }
            if let Some(fault) = self.groups.find_fault(p) {
                return Err(fault);
            }
            // P2P kernels enforce the timeout themselves. This check covers NCCL and kernels that
            // never end.
            if last_progress.elapsed() > self.options.peer_timeout + DEVICE_STALL_GRACE {
                return Err(Fault::Stalled(format!(
                    "@{}: no progress on the GPU for {:?}",
                    p.name,
                    last_progress.elapsed()
                )));
            }
            if started.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        // A kernel whose wait for a peer failed ends early, so the program may complete with a
        // fault.
        if let Some(fault) = self.groups.find_fault(p) {
            return Err(fault);
        }
        reporter.report_completion(observer);
        Ok(())
    }

    /// Returns the stream on which a program begins and ends.
    fn main_stream(&self, p: &Program) -> CudaResult<&CudaStream> {
        let name = p.streams.first().map_or("compute", String::as_str);
        self.streams.get(name).ok_or_else(|| CudaError(format!("no stream {name}")))
    }
}

impl Backend for CudaBackend {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<ProgramHandle, Diagnostic> {
        self.context.make_current().map_err(|e| cuda_error("context", &e))?;
        self.gemms.set_frozen(false);
        self.attentions.set_frozen(false);
        let prepared = self.prepare_program(program, slots, weights)?;
        for (i, bytes) in slots.slot_bytes.iter().enumerate() {
            match self.slot_bytes.get_mut(i) {
                Some(b) => *b = (*b).max(*bytes as usize),
                None => self.slot_bytes.push(*bytes as usize),
            }
        }
        self.slot_memory = None;
        self.programs.push(prepared);
        Ok(ProgramHandle(self.programs.len() - 1))
    }

    fn setup_count(&self) -> u64 {
        let OneTimeCounts {
            kernels_compiled: compiled,
            gemms_autotuned: timed,
            graphs_captured: captured,
            slot_allocations: allocated,
        } = self.one_time_counts();
        [compiled, timed, captured, allocated].map(u64::from).iter().sum()
    }

    fn inject_hang(&mut self) -> bool {
        self.hang_injected =
            self.context.make_current().is_ok() && self.kernels.prepare_elementwise("spin").is_ok();
        self.hang_injected
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.weights.list_fingerprints()
    }

    fn audit_weights(&mut self, bytes: u64) -> AuditResult {
        // An unreadable device fails the next run, which reports the error in detail.
        match self.context.make_current() {
            Ok(()) => self.weights.audit_next(bytes),
            Err(_) => AuditResult::default(),
        }
    }

    fn reload_weights(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.context.make_current().map_err(|e| cuda_error("context", &e))?;
        self.weights.reload_all(&self.placement, weights)?;
        self.reset_buffers();
        Ok(())
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.context.make_current().is_ok() && self.weights.overwrite_element(name, index, value)
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        let values = self.read_buffer(name)?;
        let mut hash = FingerprintHasher::default();
        hash.update(&values);
        Some(hash.finish(name, slice))
    }

    fn run(
        &mut self,
        program: ProgramHandle,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        self.run_program(program.0, call, observer)
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        let candidates = self
            .outputs
            .iter()
            .filter(|(n, o)| o.is_current && n.split_once('/').is_some_and(|(_, n)| n == name));
        let (_, o) = candidates.max_by_key(|(_, o)| o.program)?;
        Some(self.programs[o.program].host_outputs.as_slice(o.offset, o.len))
    }

    fn read_buffer(&self, name: &str) -> Option<Vec<f32>> {
        let b = &self.buffers[*self.buffer_index.get(name)?];
        self.context.make_current().ok()?;
        let n = b.ty.element_count() as usize;
        if b.ty.dtype == DType::Bf16 {
            let mut bits = vec![0_u16; n];
            copy_to_host(&mut bits, b.memory.device_address()).ok()?;
            return Some(bits.into_iter().map(widen_bf16).collect());
        }
        let mut out = vec![0.0_f32; n];
        copy_to_host(&mut out, b.memory.device_address()).ok()?;
        Some(out)
    }

    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool {
        let Some(b) = self.buffer_index.get(name).map(|i| &self.buffers[*i]) else { return false };
        if b.ty.element_count() as usize != data.len() || self.context.make_current().is_err() {
            return false;
        }
        weights::upload_rounded(b.memory.device_address(), b.ty.dtype, data).is_ok()
    }

    fn reset_buffers(&mut self) {
        if self.context.make_current().is_ok() {
            for b in &self.buffers {
                // An unreadable device fails the next run.
                let _ = b.memory.zero_fill();
            }
        }
    }

    fn memory_bytes(&self) -> [u64; 3] {
        [
            self.weights.total_bytes(),
            self.buffers.iter().map(|b| b.memory.byte_len() as u64).sum(),
            self.slot_bytes.iter().map(|b| *b as u64).sum::<u64>() + self.scratch_bytes() as u64,
        ]
    }

    fn compensated_sums(&self) -> u64 {
        0
    }

    fn abort_fn(&self) -> AbortFn {
        self.groups.abort_handle()
    }
}

impl Drop for CudaBackend {
    /// Aborts waits of an incomplete run first: freeing memory waits for the work that uses it, and
    /// work that waits for absent peers would never complete.
    fn drop(&mut self) {
        if !self.has_unfinished_run || self.context.make_current().is_err() {
            return;
        }
        let abort_threads = self.groups.abort_all();
        self.programs.iter_mut().for_each(|p| (p.graph, p.traced_graph) = (None, None));
        for thread in abort_threads {
            // These threads do not panic, and their result is of no use here.
            let _ = thread.join();
        }
    }
}

/// Time that the device may spend between two collectives, in addition to the peer timeout.
const DEVICE_STALL_GRACE: Duration = Duration::from_secs(2);

/// Alignment of values in memory, in bytes: the maximum that any library or vectorized access
/// requires.
const ALIGNMENT: u64 = 256;

fn cuda_error(what: &str, e: &CudaError) -> Diagnostic {
    Diagnostic::error(&T1304, e.0.clone()).with_label("cuda", what.to_string())
}

/// Converts the bits of a bf16 to f32.
pub(crate) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}
