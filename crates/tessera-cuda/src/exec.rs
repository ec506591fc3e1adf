//! Runs role programs on one GPU: each program captured once as a graph over planned memory, then replayed.
//!
//! What a call brings lies in one area per program, copied at the head of its graph; kernels read call scalars there, so
//! that a graph serves every call. Streams and events are the program's own. The first run after a load captures; a run
//! after that allocates nothing, compiles nothing and captures nothing.

mod admit;
mod ahead;
mod batches;
mod enqueue;
mod groups;
mod joined;
mod steps;
mod trace;
mod turns;
mod weights;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_device::{
    Abort, Audited, Backend, CallData, Fault, Fingerprint, Hasher, Loaded, Observer, Route, Scalar, Seat,
    T0801, WeightSource, brought,
};
use tessera_ir::{DType, Op, Opcode, Program, Slots, Type};

use crate::T1304;
use crate::attention::Attentions;
use crate::choices::Choices;
use crate::compile::{Compiler, Shelf};
use crate::devices::used_bytes;
use crate::driver::{Args, Context, Done, Event, Failed, Graph, Memory, Pinned, Stream, download};
use crate::flash::Flash;
use crate::kernels::Kernels;
use crate::libraries::Libraries;
use crate::nccl::UniqueId;
use crate::products::Products;
use crate::tables::{CublasLt, Cudnn, Nvrtc};
use crate::warpgroups::Warpgroups;

use admit::unsupported;
use ahead::{Carried, carried};
use batches::Batches;
use groups::{Groups, PAGE_BYTES, Told};
use steps::{Step, steps};
use trace::Traced;
use turns::{Turns, turns};
use weights::Weights;

pub use trace::Span;

/// How a backend is opened.
#[derive(Debug, Clone)]
pub struct Options {
    /// Which of the visible devices.
    pub device: u32,
    /// Where compiled kernels are kept from run to run, if anywhere.
    pub kernels: Option<Arc<dyn Shelf>>,
    /// Longest wait for a peer in one collective.
    pub patience: Duration,
    /// Longest wait for peers to come, before the first collective.
    pub setup: Duration,
    /// Names this host: ranks of one host have one number, others another. Ranks of one host meet in one another's memory
    /// where their GPUs can.
    pub host: u64,
    /// Whether programs are captured as graphs, or launched op by op: slower, for looking at.
    pub graphs: bool,
}

/// A rank's end of a lane.
#[derive(Debug, Clone)]
pub struct End {
    /// How the rank's ops name the lane.
    pub route: Route,
    /// Names the lane among all processes: made by one, told to all.
    pub id: UniqueId,
    /// Which member this rank is.
    pub me: usize,
    /// How many there are.
    pub members: usize,
}

/// The CUDA backend: one rank on one GPU.
#[derive(Debug)]
pub struct Cuda {
    seat: Seat,
    options: Options,
    // Graphs go before groups, whose work they hold, and groups before the memory that they share.
    programs: Vec<Prepared>,
    groups: Groups,
    weights: Weights,
    buffers: Vec<Buffer>,
    buffer_index: BTreeMap<String, usize>,
    /// Bytes that each slot needs, over all programs: only one runs at a time.
    slot_bytes: Vec<usize>,
    slots: Option<Placed>,
    outputs: BTreeMap<String, Output>,
    streams: BTreeMap<String, Stream>,
    done: Event,
    kernels: Kernels,
    products: Products,
    attentions: Attentions,
    /// Where the device can.
    flash: Option<Flash>,
    counts: Counts,
    /// Whether runs begin with a kernel that never ends.
    stuck: bool,
    /// Whether something was launched for a run that has not come to its end: it may still be on the device.
    unfinished: bool,
    /// Asks how many bytes of the device are in use.
    used: Used,
    context: Arc<Context>,
}

/// Bytes of the device in use, and how many were before this process opened it.
struct Used {
    now: Box<dyn Fn() -> Option<u64> + Send>,
    before: Option<u64>,
}

impl std::fmt::Debug for Used {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} bytes in use before", self.before)
    }
}

/// What a backend made so far. After the warm-up none of them grows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Counts {
    /// Kernels compiled by this process.
    pub compiled: u32,
    /// Products for which this process timed who makes them. Where that was kept from an earlier run, none.
    pub timed: u32,
    /// Graphs captured for runs. One that [`Cuda::traced`] captures is asked for, not made by a run, and is not among them.
    pub captured: u32,
    /// Allocations of temporaries.
    pub allocated: u32,
}

/// Slots in memory.
#[derive(Debug)]
struct Placed {
    memory: Memory,
    offsets: Vec<u64>,
    /// Where steps keep what no value is, behind the slots.
    scratch: u64,
}

#[derive(Debug)]
struct Buffer {
    ty: Type,
    memory: Memory,
}

/// Where a value put out lies on the host.
#[derive(Debug)]
struct Output {
    program: usize,
    offset: usize,
    len: usize,
    fresh: bool,
}

/// Where a value's elements are.
#[derive(Debug, Clone, Copy)]
enum Place {
    Nowhere,
    Slot(usize),
    /// A buffer, and bytes into it.
    Buffer(usize, u64),
    Weight(usize),
    /// Bytes into the program's area.
    Area(u64),
    /// Rows beside those of others behind the slots: bytes into what lies there, and elements from a row to the next.
    Beside(u64, u64),
}

#[derive(Debug)]
struct Prepared {
    program: Arc<Program>,
    places: Vec<Place>,
    /// Backend's buffer of each of the program's.
    buffers: Vec<usize>,
    steps: Vec<Step>,
    /// Exchanges that others than their own launches carry, by op.
    carried: BTreeMap<usize, Carried>,
    turns: Vec<Turns>,
    scratch_bytes: usize,
    area: Memory,
    /// What is copied into the area before a run, and its length.
    staged: Pinned,
    staged_bytes: usize,
    /// What outputs are copied to.
    put_out: Pinned,
    graph: Option<Graph>,
    /// The same with marks, once somebody asked for it.
    traced: Option<Traced>,
    /// Whether it has run since its memory was placed.
    ran: bool,
}

impl Cuda {
    /// Opens a device for a seat and meets the other members of every lane, in the order given: the same on all ranks.
    ///
    /// # Errors
    /// T1301 for a library that is missing, T1304 for what a library refuses, T1303 where ranks do not meet.
    pub fn open(
        libraries: &Libraries,
        seat: Seat,
        ends: Vec<End>,
        options: Options,
    ) -> Result<Cuda, Diagnostic> {
        libraries.need(crate::Library::Driver)?;
        let (nvrtc, lt, dnn) = (Nvrtc::load(libraries)?, CublasLt::load(libraries)?, Cudnn::load(libraries)?);
        let device = options.device;
        // The driver must be up before a device is asked for.
        cudarc::driver::result::init().map_err(|e| refused("driver", &e.into()))?;
        let of = libraries.shared();
        let now = Box::new(move || used_bytes(&of, device));
        let used = Used { before: now(), now };
        let (tables, seated) = ((nvrtc, lt, dnn), (seat, ends));
        Cuda::with(libraries, tables, seated, options, used)
            .map_err(|e| refused(&format!("device {device}"), &e))
    }

    fn with(
        libraries: &Libraries,
        (nvrtc, lt, dnn): (Nvrtc, CublasLt, Cudnn),
        (seat, ends): (Seat, Vec<End>),
        options: Options,
        used: Used,
    ) -> Done<Cuda> {
        use cudarc::driver::sys::CUdevice_attribute as Attribute;
        let context = Arc::new(Context::open(options.device)?);
        let capability = (
            context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        );
        let mut compiler = Compiler::new(nvrtc, capability, options.kernels.clone())?;
        let choices = Choices::new(options.kernels.clone(), &context, &lt);
        let multiprocessors = context.attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let flash = Flash::new(&mut compiler, capability, multiprocessors)?;
        let groups = Groups::join(libraries, &mut compiler, seat, ends, &options)?;
        Ok(Cuda {
            seat,
            options,
            programs: Vec::new(),
            weights: Weights::default(),
            buffers: Vec::new(),
            buffer_index: BTreeMap::new(),
            slot_bytes: Vec::new(),
            slots: None,
            outputs: BTreeMap::new(),
            streams: BTreeMap::new(),
            groups,
            done: Event::new()?,
            kernels: Kernels::new(compiler, multiprocessors)?,
            products: Products::new(lt, Warpgroups::new(capability, multiprocessors), choices)?,
            attentions: Attentions::new(dnn)?,
            flash,
            counts: Counts::default(),
            stuck: false,
            unfinished: false,
            used,
            context,
        })
    }

    /// What no kernel here covers, of a whole program, before any rank is started: T0801 for its first such op, as
    /// [`Backend::load`] refuses it.
    #[must_use]
    pub fn refusal(p: &Program) -> Option<Diagnostic> {
        p.ops.iter().find_map(|op| unsupported(p, op).map(|why| Cuda::refuse(p, op, &why)))
    }

    /// What was made so far.
    #[must_use]
    pub fn counts(&self) -> Counts {
        Counts { compiled: self.kernels.compiler.compiled, timed: self.products.timed(), ..self.counts }
    }

    /// Bytes of the device that this process took, its context and the libraries' own included: what is in use now beyond
    /// what was before it opened the device. Another process that comes or goes meanwhile is counted in.
    #[must_use]
    pub fn process_memory(&self) -> Option<u64> {
        (self.used.now)()?.checked_sub(self.used.before?)
    }

    /// Bytes that a process takes beside what its plan says: the context, the libraries' code and workspaces, and what NCCL
    /// holds for each lane. Measured on H200s with CUDA 13.0 and NCCL 2.28.
    #[must_use]
    pub fn overhead_bytes(lanes: usize) -> u64 {
        (1100 + 760 * lanes as u64) << 20
    }

    /// How ranks meet in each lane, in words.
    #[must_use]
    pub fn ways(&self) -> Vec<String> {
        self.groups.ways()
    }

    fn refuse(p: &Program, op: &Op, why: &str) -> Diagnostic {
        Diagnostic::error(&T0801, format!("{} in @{} of {}: {why}", op.opcode.name(), p.name, p.role))
            .at("backend", "cuda")
    }

    /// Gives every slot its place, once all programs that will run are loaded.
    fn place(&mut self) -> Done<()> {
        if self.slots.is_some() {
            return Ok(());
        }
        let (mut offsets, mut end) = (Vec::new(), 0_u64);
        for bytes in &self.slot_bytes {
            offsets.push(end);
            end += (*bytes as u64).next_multiple_of(ALIGNMENT);
        }
        let memory = Memory::new((end as usize + self.scratch_bytes()).next_multiple_of(PAGE_BYTES))?;
        memory.zero()?;
        self.counts.allocated += 1;
        self.products.freeze(true);
        self.attentions.freeze(true);
        if let Err(e) = self.share(&memory, &offsets) {
            // Peers may see it already, and to free it is to wait for what did not end.
            std::mem::forget(memory);
            return Err(e);
        }
        self.slots = Some(Placed { memory, offsets, scratch: end });
        // Addresses have changed.
        self.programs.iter_mut().for_each(|p| (p.graph, p.traced, p.ran) = (None, None, false));
        Ok(())
    }

    /// Bytes behind the slots.
    fn scratch_bytes(&self) -> usize {
        self.programs.iter().map(|p| p.scratch_bytes).max().unwrap_or(0)
    }

    fn prepare(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        source: &mut dyn WeightSource,
    ) -> Result<Prepared, Diagnostic> {
        let p = &**program;
        if let Some(refusal) = Cuda::refusal(p) {
            return Err(refusal);
        }
        let broken = |e: Failed| refused(&format!("@{}", p.name), &e);
        let mut buffers = Vec::new();
        for b in &p.buffers {
            let next = self.buffers.len();
            let i = *self.buffer_index.entry(b.name.clone()).or_insert(next);
            if i == next {
                let memory = Memory::new(b.ty.bytes().0 as usize).map_err(broken)?;
                memory.zero().map_err(broken)?;
                self.buffers.push(Buffer { ty: b.ty.clone(), memory });
            }
            buffers.push(i);
        }
        let joined = self.join(p, source)?;
        let steps = steps(p, slots, &joined);
        let mut places = vec![Place::Nowhere; p.values.len()];
        let (mut area, mut put_out) = (0_u64, 0_usize);
        for op in &p.ops {
            for r in &op.results {
                let ty = p.ty(*r);
                places[r.0 as usize] = match op.opcode {
                    _ if ty.is_token() => Place::Nowhere,
                    Opcode::Weight => Place::Weight(self.weights.load(&self.seat, p, op, source)?),
                    Opcode::Input | Opcode::Call => {
                        let at = area;
                        area = (area + ty.bytes().0).next_multiple_of(ALIGNMENT);
                        Place::Area(at)
                    }
                    Opcode::CacheRead => {
                        let width: u64 = ty.shape[1..].iter().product::<u64>() * ty.dtype.bytes();
                        let row = op.int("row").unwrap_or(0) as u64;
                        Place::Buffer(op.buffer.map_or(0, |b| buffers[b.0 as usize]), row * width)
                    }
                    _ => match slots.of.get(r.0 as usize).copied().flatten() {
                        Some(s) => Place::Slot(s as usize),
                        None => return Err(Cuda::refuse(p, op, "the plan gives its result no memory")),
                    },
                };
            }
            if op.opcode == Opcode::Output {
                let len = p.ty(op.operands[0]).elements() as usize;
                let name = op.name.clone().unwrap_or_default();
                let output = Output { program: self.programs.len(), offset: put_out, len, fresh: false };
                self.outputs.insert(format!("{}/{name}", self.programs.len()), output);
                put_out += (len * 4).next_multiple_of(ALIGNMENT as usize);
            }
            self.prepare_op(p, op).map_err(broken)?;
        }
        for step in &steps {
            match *step {
                Step::One(i) => self.prepare_product(p, &p.ops[i], false).map_err(broken)?,
                Step::ProductAdd { product, .. } => {
                    self.prepare_product(p, &p.ops[product], true).map_err(broken)?;
                }
                _ => {}
            }
        }
        let staged_bytes = area as usize;
        let turns = turns(p, &mut area);
        let memory = Memory::new(area as usize).map_err(broken)?;
        for t in &turns {
            t.upload(&memory).map_err(broken)?;
        }
        for name in p.streams.iter().cloned().chain(Batches::streams(p)) {
            // Transfers go first where both could run: peers wait for them.
            let urgent = name != "compute";
            if let Entry::Vacant(place) = self.streams.entry(name) {
                place.insert(Stream::new(urgent).map_err(broken)?);
            }
        }
        let of_ops = p.ops.iter().map(|o| scratch_bytes(p, o)).max().unwrap_or(0);
        let of_ops = of_ops.next_multiple_of(ALIGNMENT as usize);
        let together = steps.iter().filter_map(|s| if let Step::Joined(j) = s { Some(j) } else { None });
        let (beside, end) = joined::places(p, together, of_ops as u64);
        for (v, place) in beside {
            places[v.0 as usize] = place;
        }
        Ok(Prepared {
            carried: carried(p, slots, &steps),
            steps,
            scratch_bytes: end as usize,
            program: Arc::clone(program),
            places,
            buffers,
            turns,
            area: memory,
            staged: Pinned::new(staged_bytes).map_err(broken)?,
            staged_bytes,
            put_out: Pinned::new(put_out).map_err(broken)?,
            graph: None,
            traced: None,
            ran: false,
        })
    }

    /// Whether every row that the call says lies in its buffer: a kernel does not look.
    fn rows_fit(&self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let prepared = &self.programs[program];
        let p = &prepared.program;
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite) {
            let (Some(row), Some(b)) = (op.key("row"), op.buffer) else { continue };
            let named =
                p.ops.iter().find(|o| o.results.first() == Some(&row)).and_then(|o| o.name.as_deref());
            let Some(Scalar::I64(row)) = named.and_then(|n| call.scalars.get(n)) else { continue };
            let first = op.int("first").unwrap_or(0) as u64;
            let (rows, all) = (first + p.ty(op.operands[0]).shape[0], p.buffer(b).ty.shape[0]);
            if u64::try_from(*row).map_or(true, |r| r.saturating_add(rows) > all) {
                return Err(Fault::Failed(format!(
                    "@{}: row {row} + {rows} of a cache of {all} rows",
                    p.name
                )));
            }
        }
        Ok(())
    }

    /// Brings what a call brings to the place that the graph copies from.
    fn stage(&mut self, program: usize, call: &CallData<'_>) -> Result<(), Fault> {
        let prepared = &mut self.programs[program];
        let p = Arc::clone(&prepared.program);
        for op in p.ops.iter().filter(|o| matches!(o.opcode, Opcode::Input | Opcode::Call)) {
            brought(&p, op, call)?;
            let Place::Area(at) = prepared.places[op.results[0].0 as usize] else { continue };
            let (at, name) = (at as usize, op.name.as_deref().unwrap_or_default());
            match (call.inputs.get(name), call.scalars.get(name)) {
                (Some(x), _) if op.opcode == Opcode::Input => {
                    prepared.staged.slice_mut::<f32>(at, x.len()).copy_from_slice(x);
                }
                (_, Some(Scalar::I64(v))) => prepared.staged.slice_mut::<i64>(at, 1)[0] = *v,
                (_, Some(Scalar::F32(v))) => prepared.staged.slice_mut::<f32>(at, 1)[0] = *v,
                (_, Some(Scalar::F32s(v))) => {
                    prepared.staged.slice_mut::<f32>(at, v.len()).copy_from_slice(v);
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
        let broken = |e: Failed| Fault::Failed(e.0);
        self.ready(program, call, observer)?;
        let p = Arc::clone(&self.programs[program].program);
        if self.stuck {
            let streams = std::mem::take(&mut self.streams);
            let name = p.streams.first().map_or("compute", String::as_str);
            let spun = streams.get(name).map(|s| self.kernels.blocks("spin", 1, 1, 0, Args::new(), s));
            self.streams = streams;
            spun.unwrap_or(Ok(())).map_err(broken)?;
        }
        // A library that connects at first use is let do so before anything is captured.
        let first = self.programs[program].graph.is_none();
        let eager = !self.options.graphs || (first && self.groups.lazy() && !self.programs[program].ran);
        if eager {
            self.enqueue(program, &mut |_, _, _| Ok(())).map_err(broken)?;
        } else {
            if first {
                self.record(program).map_err(broken)?;
            }
            let (main, graph) = (self.main(&p).map_err(broken)?, self.programs[program].graph.as_ref());
            graph.map_or(Ok(()), |g| main.replay(g)).map_err(broken)?;
        }
        self.programs[program].ran = true;
        self.finish(program, observer)?;
        if eager && self.options.graphs {
            // Connected by now: the next run replays and makes nothing.
            self.groups.rewind();
            self.record(program).map_err(broken)?;
        }
        Ok(())
    }

    /// All that comes before the launch of a program.
    fn ready(
        &mut self,
        program: usize,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let broken = |e: Failed| Fault::Failed(e.0);
        self.context.bind().map_err(broken)?;
        self.stage(program, call)?;
        self.rows_fit(program, call)?;
        for (i, _) in self.programs[program].program.collectives() {
            observer.issuing(i).map_err(Fault::Refused)?;
        }
        self.unfinished = true;
        self.place().map_err(broken)?;
        self.groups.rewind();
        Ok(())
    }

    /// Waits for a program that was launched.
    fn finish(&mut self, program: usize, observer: &mut dyn Observer) -> Result<(), Fault> {
        let p = Arc::clone(&self.programs[program].program);
        self.main(&p).and_then(|s| s.record(&self.done)).map_err(|e| Fault::Failed(e.0))?;
        // A graph is launched as a whole, and so are all its collectives, in the program's order.
        for (i, _) in p.collectives() {
            observer.issued(i);
        }
        self.wait(&p, observer)?;
        for o in self.outputs.values_mut() {
            o.fresh = o.program == program;
        }
        self.unfinished = false;
        Ok(())
    }

    /// Captures a program as the graph that runs replay.
    fn record(&mut self, program: usize) -> Done<()> {
        let graph = self.capture(program, |own| own.enqueue(program, &mut |_, _, _| Ok(())))?;
        self.counts.captured += 1;
        self.programs[program].graph = Some(graph);
        Ok(())
    }

    /// Waits until the device is done: looking all the time at first, since a phase may be short. Tells how far it is, and
    /// ends where a collective ended badly or nothing moves for as long as a peer may take.
    fn wait(&self, p: &Program, observer: &mut dyn Observer) -> Result<(), Fault> {
        let mut told = Told::new(p);
        let mut moved = Instant::now();
        let began = moved;
        loop {
            match self.done.passed() {
                Ok(true) => break,
                Ok(false) => {}
                Err(e) => return Err(Fault::Failed(format!("@{}: {e}", p.name))),
            }
            if told.look(&self.groups, observer) {
                moved = Instant::now();
            }
            if let Some(fault) = self.groups.fault(p) {
                return Err(fault);
            }
            // Kernels over peers' memory keep the time themselves; this is for NCCL, and for a kernel that never ends.
            if moved.elapsed() > self.options.patience + STUCK {
                return Err(Fault::Stalled(format!(
                    "@{}: nothing moved on the GPU for {:?}",
                    p.name,
                    moved.elapsed()
                )));
            }
            if began.elapsed() < Duration::from_micros(200) {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(Duration::from_micros(20));
            }
        }
        // A kernel whose wait failed has ended, and so may all the rest.
        if let Some(fault) = self.groups.fault(p) {
            return Err(fault);
        }
        told.rest(observer);
        Ok(())
    }

    /// The stream that a program begins and ends on.
    fn main(&self, p: &Program) -> Done<&Stream> {
        let name = p.streams.first().map_or("compute", String::as_str);
        self.streams.get(name).ok_or_else(|| Failed(format!("no stream {name}")))
    }
}

impl Backend for Cuda {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<Loaded, Diagnostic> {
        self.context.bind().map_err(|e| refused("context", &e))?;
        self.products.freeze(false);
        self.attentions.freeze(false);
        let prepared = self.prepare(program, slots, weights)?;
        for (i, bytes) in slots.bytes.iter().enumerate() {
            match self.slot_bytes.get_mut(i) {
                Some(b) => *b = (*b).max(*bytes as usize),
                None => self.slot_bytes.push(*bytes as usize),
            }
        }
        self.slots = None;
        self.programs.push(prepared);
        Ok(Loaded(self.programs.len() - 1))
    }

    fn made(&self) -> u64 {
        let Counts { compiled, timed, captured, allocated } = self.counts();
        [compiled, timed, captured, allocated].map(u64::from).iter().sum()
    }

    fn stick(&mut self) -> bool {
        self.stuck = self.context.bind().is_ok() && self.kernels.prepare("spin").is_ok();
        self.stuck
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.weights.prints()
    }

    fn audit(&mut self, bytes: u64) -> Audited {
        // A device that cannot be read any more fails the next run, which has words for it.
        match self.context.bind() {
            Ok(()) => self.weights.look(bytes),
            Err(_) => Audited::default(),
        }
    }

    fn reload(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.context.bind().map_err(|e| refused("context", &e))?;
        self.weights.exchange(&self.seat, weights)?;
        self.reset();
        Ok(())
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.context.bind().is_ok() && self.weights.poke(name, index, value)
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        let values = self.read_buffer(name)?;
        let mut hash = Hasher::default();
        hash.update(&values);
        Some(hash.finish(name, slice))
    }

    fn run(
        &mut self,
        program: Loaded,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        self.run_program(program.0, call, observer)
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        let named =
            self.outputs.iter().filter(|(n, o)| o.fresh && n.split_once('/').is_some_and(|(_, n)| n == name));
        let (_, o) = named.max_by_key(|(_, o)| o.program)?;
        Some(self.programs[o.program].put_out.slice(o.offset, o.len))
    }

    fn read_buffer(&self, name: &str) -> Option<Vec<f32>> {
        let b = &self.buffers[*self.buffer_index.get(name)?];
        self.context.bind().ok()?;
        let n = b.ty.elements() as usize;
        if b.ty.dtype == DType::Bf16 {
            let mut bits = vec![0_u16; n];
            download(&mut bits, b.memory.at()).ok()?;
            return Some(bits.into_iter().map(widened).collect());
        }
        let mut out = vec![0.0_f32; n];
        download(&mut out, b.memory.at()).ok()?;
        Some(out)
    }

    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool {
        let Some(b) = self.buffer_index.get(name).map(|i| &self.buffers[*i]) else { return false };
        if b.ty.elements() as usize != data.len() || self.context.bind().is_err() {
            return false;
        }
        weights::put(b.memory.at(), b.ty.dtype, data).is_ok()
    }

    fn reset(&mut self) {
        if self.context.bind().is_ok() {
            for b in &self.buffers {
                // As in `audit`.
                let _ = b.memory.zero();
            }
        }
    }

    fn memory(&self) -> [u64; 3] {
        [
            self.weights.bytes(),
            self.buffers.iter().map(|b| b.memory.bytes() as u64).sum(),
            self.slot_bytes.iter().map(|b| *b as u64).sum::<u64>() + self.scratch_bytes() as u64,
        ]
    }

    fn compensated(&self) -> u64 {
        0
    }

    fn abort(&self) -> Abort {
        self.groups.abort()
    }
}

impl Drop for Cuda {
    /// To free memory is to wait for the work that uses it. What a run left waiting for peers is ended first, or it would wait for
    /// ever.
    fn drop(&mut self) {
        if !self.unfinished || self.context.bind().is_err() {
            return;
        }
        let ending = self.groups.end();
        self.programs.iter_mut().for_each(|p| (p.graph, p.traced) = (None, None));
        for lane in ending {
            // A thread of these does not panic, and what it would say is of no use here.
            let _ = lane.join();
        }
    }
}

/// What a device may take between two collectives, beyond the wait for a peer.
const STUCK: Duration = Duration::from_secs(2);

/// Boundaries of values in memory: what every library and vector access asks for at most.
const ALIGNMENT: u64 = 256;

fn refused(what: &str, e: &Failed) -> Diagnostic {
    Diagnostic::error(&T1304, e.0.clone()).at("cuda", what.to_string())
}

/// A bf16 as f32.
pub(crate) fn widened(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

/// Bytes of scratch that an op needs.
fn scratch_bytes(p: &Program, op: &Op) -> usize {
    match (op.opcode, op.operands.first()) {
        (Opcode::Attention, Some(q)) if op.key("bias").is_some() && p.ty(*q).dtype == DType::Bf16 => {
            let (ty, head) = (p.ty(*q), op.int("head_dim").unwrap_or(1).max(1) as u64);
            let heads = ty.shape[1] / head;
            let outs = (ty.bytes().0 as usize).next_multiple_of(ALIGNMENT as usize);
            let sums = (heads * ty.shape[0] * 4) as usize;
            MOST_PIECES * (outs + sums)
        }
        _ => 0,
    }
}

/// Before, among and after the keys that a bias is added to.
const MOST_PIECES: usize = 3;
