//! Runs role programs on the CPU: kernels over planned slots, collectives over shared memory or streams.
//!
//! Streams are run in program order on one thread, which any order of events allows. An issue hands its operand
//! to the lane and goes on; the peers' work between issue and wait is what overlaps.

mod admit;
mod weights;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_base::random::DrawKey;
use tessera_device::{
    Abort, Audited, Backend, CallData, Fault, Fingerprint, Hasher, Loaded, Observer, Route, Scalar, Seat,
    T0801, WeightSource, agreed, as_matrix, brought, pieces,
};
use tessera_ir::{Attr, DType, Kind, Op, Opcode, Program, Slots, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Reduction, Shard};

use admit::unsupported;
use weights::{Cursor, Piece};

use crate::Pool;
use crate::collectives;
use crate::exchange::{Aborter, CommFault, Exchange, Ticket};
use crate::kernels::{
    Act, Frames, KeyBias, PackedWeight, PixelGeometry, RopeCache, RopeSpec, Scratch, Weight, add, attention,
    bias_act, depth_to_space_time, dot, gate_residual, layer_norm, matmul, norm_modulate, renoise, rms_norm,
    rms_scale, rope, row_square_sum, silu, softmax, space_time_to_depth, time_embed, to_x0,
};

/// The CPU backend.
#[derive(Debug)]
pub struct Cpu {
    seat: Seat,
    pool: Pool,
    ends: Vec<End>,
    /// Longest wait for a peer in one collective.
    patience: Duration,
    programs: Vec<Arc<Prepared>>,
    memory: Memory,
    weight_index: BTreeMap<WeightKey, usize>,
    /// Of each held weight, where it came from.
    pieces: Vec<Piece>,
    /// Fingerprints of tables that kernels derive.
    derived: Vec<Fingerprint>,
    cursor: Cursor,
    buffer_index: BTreeMap<String, usize>,
    scratch: Scratch,
    tables: RopeCache,
    outputs: BTreeMap<String, Output>,
    compensated: u64,
}

/// A rank's end of a lane.
#[derive(Debug)]
pub struct End {
    /// How the rank's ops name the lane.
    pub route: Route,
    /// Where it meets the others, as the member that the rank is.
    pub exchange: Exchange,
}

/// Which piece of which tensor, and how it is held.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WeightKey {
    name: String,
    ty: String,
    load: Option<String>,
    packed: bool,
}

/// A value put out; its memory is kept from run to run.
#[derive(Debug)]
struct Output {
    /// Whether the last run wrote it.
    fresh: bool,
    values: Vec<f32>,
}

/// What values live in.
#[derive(Debug, Default)]
struct Memory {
    weights: Vec<Held>,
    buffers: Vec<Vec<f32>>,
    /// One set for all programs: only one runs at a time.
    slots: Vec<Vec<f32>>,
}

#[derive(Debug)]
enum Held {
    Plain(Vec<f32>),
    Packed(PackedWeight),
}

/// Where a value's elements are.
#[derive(Debug, Clone)]
enum Place {
    Nowhere,
    Slot(usize, usize),
    Buffer(usize, Range<usize>),
    Weight(usize),
    Input(String),
    Scalar(String),
}

#[derive(Debug)]
struct Prepared {
    program: Arc<Program>,
    places: Vec<Place>,
    /// Issuing op of each ticket value.
    issues: BTreeMap<ValueId, usize>,
    /// Backend's buffer of each of the program's.
    buffers: Vec<usize>,
}

/// Collectives in flight of one run.
type Pending = BTreeMap<ValueId, (usize, Ticket)>;

impl Cpu {
    /// A backend for a seat, with its end of every lane that its programs use.
    #[must_use]
    pub fn new(seat: Seat, pool: Pool, ends: Vec<End>, patience: Duration) -> Cpu {
        Cpu {
            seat,
            pool,
            ends,
            patience,
            programs: Vec::new(),
            memory: Memory::default(),
            weight_index: BTreeMap::new(),
            pieces: Vec::new(),
            derived: Vec::new(),
            cursor: Cursor::default(),
            buffer_index: BTreeMap::new(),
            scratch: Scratch::new(),
            tables: RopeCache::new(),
            outputs: BTreeMap::new(),
            compensated: 0,
        }
    }

    /// What no kernel here covers, of a whole program, before any rank is started: T0801 for its first such op, as
    /// [`Backend::load`] refuses it.
    #[must_use]
    pub fn refusal(p: &Program) -> Option<Diagnostic> {
        p.ops.iter().find_map(|op| unsupported(p, op).map(|why| Cpu::refuse(p, op, &why)))
    }

    fn refuse(p: &Program, op: &Op, why: &str) -> Diagnostic {
        Diagnostic::error(&T0801, format!("{} in @{} of {}: {why}", op.opcode.name(), p.name, p.role))
            .at("backend", "cpu")
    }
}

impl Backend for Cpu {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<Loaded, Diagnostic> {
        let p = &**program;
        for (i, bytes) in slots.bytes.iter().enumerate() {
            let elements = (*bytes as usize).div_ceil(4);
            match self.memory.slots.get_mut(i) {
                Some(s) if s.len() >= elements => {}
                Some(s) => s.resize(elements, 0.0),
                None => self.memory.slots.push(vec![0.0; elements]),
            }
        }
        let mut buffers = Vec::new();
        for b in &p.buffers {
            let next = self.memory.buffers.len();
            let i = *self.buffer_index.entry(b.name.clone()).or_insert(next);
            if i == next {
                self.memory.buffers.push(vec![0.0; b.ty.elements() as usize]);
            }
            buffers.push(i);
        }
        let mut places = vec![Place::Nowhere; p.values.len()];
        let mut issues = BTreeMap::new();
        for (i, op) in p.ops.iter().enumerate() {
            if let Some(why) = unsupported(p, op) {
                return Err(Cpu::refuse(p, op, &why));
            }
            self.derive(p, op);
            for r in &op.results {
                let ty = p.ty(*r);
                let len = ty.elements() as usize;
                places[r.0 as usize] = match op.opcode {
                    _ if ty.is_token() => {
                        if ty.dtype == DType::Ticket {
                            issues.insert(*r, i);
                        }
                        Place::Nowhere
                    }
                    Opcode::Weight => Place::Weight(self.load_weight(p, op, weights)?),
                    Opcode::Input => Place::Input(op.name.clone().unwrap_or_default()),
                    Opcode::Call => Place::Scalar(op.name.clone().unwrap_or_default()),
                    Opcode::CacheRead => {
                        let width: usize = ty.shape[1..].iter().product::<u64>() as usize;
                        let start = op.int("row").unwrap_or(0) as usize * width;
                        Place::Buffer(op.buffer.map_or(0, |b| buffers[b.0 as usize]), start..start + len)
                    }
                    _ => match slots.of.get(r.0 as usize).copied().flatten() {
                        Some(s) => Place::Slot(s as usize, len),
                        None => return Err(Cpu::refuse(p, op, "the plan gives its result no memory")),
                    },
                };
            }
        }
        self.programs.push(Arc::new(Prepared { program: Arc::clone(program), places, issues, buffers }));
        Ok(Loaded(self.programs.len() - 1))
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.prints()
    }

    fn audit(&mut self, bytes: u64) -> Audited {
        self.look(bytes)
    }

    fn reload(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.exchange(weights)?;
        self.reset();
        Ok(())
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.poke(name, index, value)
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        let mut hash = Hasher::default();
        hash.update(&self.memory.buffers[*self.buffer_index.get(name)?]);
        Some(hash.finish(name, slice))
    }

    fn run(
        &mut self,
        program: Loaded,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        let prepared = Arc::clone(&self.programs[program.0]);
        let pool = self.pool.clone();
        // Inside the pool, so that a kernel's blocks cost no wake-up of this thread.
        pool.install(|| self.run_prepared(&prepared.program, &prepared, call, observer))
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        self.outputs.get(name).filter(|o| o.fresh).map(|o| o.values.as_slice())
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

    fn reset(&mut self) {
        for b in &mut self.memory.buffers {
            b.fill(0.0);
        }
    }

    fn memory(&self) -> [u64; 3] {
        let bytes = |n: usize| n as u64 * 4;
        let weights = self
            .memory
            .weights
            .iter()
            .map(|w| match w {
                Held::Plain(v) => v.len(),
                Held::Packed(p) => p.shape().0 * p.shape().1,
            })
            .sum();
        [
            bytes(weights),
            bytes(self.memory.buffers.iter().map(Vec::len).sum()),
            bytes(self.memory.slots.iter().map(Vec::len).sum()),
        ]
    }

    fn compensated(&self) -> u64 {
        self.compensated
    }

    fn abort(&self) -> Abort {
        let aborters: Vec<Aborter> = self.ends.iter().map(|e| e.exchange.aborter()).collect();
        Arc::new(move |reason| aborters.iter().for_each(|a| a.abort(reason)))
    }
}

impl Memory {
    /// Elements of a value.
    fn view<'a>(&'a self, place: &Place, call: &'a CallData<'_>) -> Result<&'a [f32], Fault> {
        Ok(match place {
            Place::Slot(s, len) => &self.slots[*s][..*len],
            Place::Buffer(b, range) => &self.buffers[*b][range.clone()],
            Place::Weight(w) => match &self.weights[*w] {
                Held::Plain(v) => v,
                Held::Packed(_) => return Err(Fault::Failed("a packed weight outside a product".into())),
            },
            Place::Input(name) => call
                .inputs
                .get(name.as_str())
                .copied()
                .ok_or_else(|| Fault::Failed(format!("the call brings no `{name}`")))?,
            Place::Scalar(name) => match call.scalars.get(name.as_str()) {
                Some(Scalar::F32s(v)) => v,
                Some(Scalar::F32(v)) => std::slice::from_ref(v),
                _ => return Err(Fault::Failed(format!("the call brings no numbers `{name}`"))),
            },
            Place::Nowhere => return Err(Fault::Failed("a token read as data".into())),
        })
    }
}

impl Cpu {
    fn run_prepared(
        &mut self,
        p: &Program,
        prepared: &Prepared,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        for op in p.ops.iter().filter(|o| matches!(o.opcode, Opcode::Input | Opcode::Call)) {
            brought(p, op, call)?;
        }
        self.outputs.values_mut().for_each(|o| o.fresh = false);
        let mut pending = Pending::new();
        for (i, op) in p.ops.iter().enumerate() {
            observer.progress(i as u32);
            match op.opcode.row().kind {
                Kind::Source => {}
                Kind::Sink => self.sink(p, prepared, op, call)?,
                Kind::Compute => self.compute(p, prepared, op, call)?,
                Kind::Collective => {
                    observer.issuing(i).map_err(Fault::Refused)?;
                    let ticket = self.issue(p, prepared, op, call)?;
                    observer.issued(i);
                    if op.issue {
                        pending.insert(op.results[0], ticket);
                    } else {
                        self.complete(p, prepared, op, op, ticket)?;
                        observer.completed(i);
                    }
                }
                Kind::Order if op.opcode == Opcode::Wait => {
                    let missing = || Fault::Failed(format!("@{} op {i} waits for nothing", p.name));
                    let ticket = pending.remove(&op.operands[0]).ok_or_else(missing)?;
                    let issue = prepared.issues.get(&op.operands[0]).ok_or_else(missing)?;
                    observer.waiting(*issue);
                    self.complete(p, prepared, &p.ops[*issue], op, ticket)?;
                    observer.completed(*issue);
                }
                Kind::Order => {}
            }
        }
        Ok(())
    }

    fn sink(&mut self, p: &Program, prepared: &Prepared, op: &Op, call: &CallData<'_>) -> Result<(), Fault> {
        let source = &prepared.places[op.operands[0].0 as usize];
        if op.opcode == Opcode::Output {
            let data = self.memory.view(source, call)?;
            let name = op.name.as_deref().unwrap_or_default();
            if let Some(out) = self.outputs.get_mut(name) {
                out.fresh = true;
                out.values.clear();
                out.values.extend_from_slice(data);
            } else {
                self.outputs.insert(name.to_string(), Output { fresh: true, values: data.to_vec() });
            }
            return Ok(());
        }
        let width: usize = p.ty(op.operands[0]).shape[1..].iter().product::<u64>() as usize;
        let row = match op.key("row") {
            None => 0,
            Some(v) => whole(prepared, call, v)?,
        };
        let row = row.saturating_add(op.int("first").unwrap_or(0));
        let b = op.buffer.map_or(0, |b| prepared.buffers[b.0 as usize]);
        // Taken out while its source is read: the source may be another buffer.
        let mut buffer = std::mem::take(&mut self.memory.buffers[b]);
        let result = self.memory.view(source, call).and_then(|data| {
            let start = usize::try_from(row).ok().and_then(|r| r.checked_mul(width));
            let end = start.and_then(|s| s.checked_add(data.len())).filter(|e| *e <= buffer.len());
            match (start, end) {
                (Some(s), Some(e)) => {
                    buffer[s..e].copy_from_slice(data);
                    Ok(())
                }
                _ => Err(Fault::Failed(format!(
                    "@{}: row {row} + {} of a cache of {} rows",
                    p.name,
                    data.len() / width.max(1),
                    buffer.len() / width.max(1)
                ))),
            }
        });
        self.memory.buffers[b] = buffer;
        result
    }

    /// Index of the first global row and the number of tokens per frame.
    fn frames(&self, ty: &Type, op: &Op) -> Frames {
        Frames {
            first_row: self.first_row(op, ty),
            rows_per_frame: op.int("frame_rows").unwrap_or(1).max(1) as usize,
        }
    }

    /// Number of the first row here of a value of an op, in the whole of which it may be a piece.
    fn first_row(&self, op: &Op, ty: &Type) -> usize {
        let here = ty.layout.ranges(&ty.shape, &self.seat.mesh, self.seat.coord())[0].0;
        here as usize + op.int("first").unwrap_or(0) as usize
    }

    fn compute(
        &mut self,
        p: &Program,
        prepared: &Prepared,
        op: &Op,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let out_ty = p.ty(op.results[0]);
        let Place::Slot(slot, len) = prepared.places[op.results[0].0 as usize] else {
            return Err(Fault::Failed(format!("{} has no slot", op.opcode.name())));
        };
        // Everything that is written is taken out of `self` first, so that reads may borrow the rest.
        let mut memory = std::mem::take(&mut self.memory.slots[slot]);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut tables = std::mem::take(&mut self.tables);
        let result =
            self.kernel(p, prepared, op, call, out_ty, &mut memory[..len], &mut scratch, &mut tables);
        self.memory.slots[slot] = memory;
        self.scratch = scratch;
        self.tables = tables;
        result
    }

    #[allow(clippy::too_many_arguments)]
    fn kernel(
        &self,
        p: &Program,
        prepared: &Prepared,
        op: &Op,
        call: &CallData<'_>,
        out_ty: &Type,
        out: &mut [f32],
        scratch: &mut Scratch,
        tables: &mut RopeCache,
    ) -> Result<(), Fault> {
        let pool = &self.pool;
        let place = |v: ValueId| &prepared.places[v.0 as usize];
        let x = |i: usize| self.memory.view(place(op.operands[i]), call);
        let ty = |i: usize| p.ty(op.operands[i]);
        let width = |i: usize| ty(i).shape.last().copied().unwrap_or(1) as usize;
        let int = |name: &str| op.int(name).unwrap_or(0) as usize;
        let segments = op.int("segments").unwrap_or(1) as usize;
        let eps = op.float("eps").unwrap_or(1e-6) as f32;
        let act = match op.str("act") {
            Some("silu") => Act::Silu,
            Some("gelu_tanh") => Act::GeluTanh,
            _ => Act::None,
        };
        match op.opcode {
            Opcode::Matmul => {
                let (m, k, n) = (ty(0).shape[0] as usize, width(0), ty(1).shape[0] as usize);
                let w = match place(op.operands[1]) {
                    Place::Weight(w) => match &self.memory.weights[*w] {
                        Held::Packed(p) => Weight::Packed(p),
                        Held::Plain(v) => Weight::Plain(v),
                    },
                    other => Weight::Plain(self.memory.view(other, call)?),
                };
                let bias = op.key("bias").map(|b| self.memory.view(place(b), call)).transpose()?;
                matmul(pool, scratch, out, x(0)?, w, (m, n, k), bias, act, segments);
            }
            Opcode::BiasAct => bias_act(pool, out, x(0)?, x(1)?, act),
            Opcode::Add => add(pool, out, x(0)?, x(1)?),
            Opcode::Silu => silu(pool, out, x(0)?),
            Opcode::LayerNorm => layer_norm(pool, out, x(0)?, x(1)?, x(2)?, eps),
            Opcode::Modulation => modulation(out, x(0)?, x(1)?, width(1)),
            Opcode::NormModulate => {
                let (d, parts) = (width(0), width(1) / width(0));
                let columns = (int("shift"), int("scale"));
                norm_modulate(pool, out, x(0)?, d, x(1)?, parts, columns, self.frames(ty(0), op), eps);
            }
            Opcode::GateResidual if op.operands.len() == 2 => add(pool, out, x(0)?, x(1)?),
            Opcode::GateResidual => {
                let (d, parts) = (width(0), width(2) / width(0));
                gate_residual(pool, out, x(0)?, x(1)?, d, x(2)?, parts, int("gate"), self.frames(ty(0), op));
            }
            Opcode::RmsNorm => rms_norm(pool, out, x(0)?, x(1)?, segments, eps),
            Opcode::RowSquareSum => {
                let xs: Vec<&[f32]> = (0..op.operands.len()).map(x).collect::<Result<_, _>>()?;
                row_square_sum(pool, out, &xs, width(0), segments);
            }
            Opcode::RmsScale => {
                rms_scale(pool, out, x(0)?, x(1)?, (int("col"), width(1)), x(2)?, int("width"), eps);
            }
            Opcode::Rope => {
                let grid = op.ints("grid").unwrap_or(&[1, 1, 1]);
                let spec = RopeSpec {
                    head_dim: int("head_dim"),
                    grid: [grid[0] as usize, grid[1] as usize, grid[2] as usize],
                    start: op.key("start").map_or(Ok(0), |v| whole(prepared, call, v))?,
                    frame_stride: op.int("frame_stride").unwrap_or(1),
                };
                rope(pool, out, x(0)?, width(0), self.first_row(op, ty(0)), tables.get(spec));
            }
            Opcode::Attention => {
                let bias = match (op.key("bias"), op.ints("bias_rows")) {
                    (Some(b), Some([from, to])) => {
                        let log_b = self.memory.view(place(b), call)?[0];
                        Some(KeyBias { log_b, rows: *from as usize..*to as usize })
                    }
                    _ => None,
                };
                attention(
                    pool,
                    scratch,
                    out,
                    x(0)?,
                    x(1)?,
                    x(2)?,
                    (width(0), int("head_dim")),
                    bias.as_ref(),
                );
            }
            Opcode::Softmax => softmax(pool, out, x(0)?, width(0)),
            Opcode::Dot => {
                let (n, k) = (ty(0).shape[ty(0).shape.len() - 2] as usize, width(0));
                let m = out_ty.shape.last().copied().unwrap_or(1) as usize;
                let transposed = op.attrs.get("transposed") == Some(&Attr::Bool(true));
                let scale = op.float("scale").unwrap_or(1.0) as f32;
                dot(pool, out, x(0)?, x(1)?, [n, k, m], transposed, scale);
            }
            Opcode::TimeEmbed => time_embed(out, x(0)?),
            Opcode::Renoise => {
                let key = |name| op.key(name).map_or(Ok(0), |v| whole(prepared, call, v));
                let draw = DrawKey {
                    seed: key("seed")? as u64,
                    chunk: key("chunk")? as u32,
                    draw: key("draw")? as u32,
                };
                let sigma =
                    op.key("sigma").map_or(Ok(0.0), |v| self.memory.view(place(v), call).map(|s| s[0]))?;
                let first = (self.first_row(op, ty(0)) * width(0)) as u64;
                renoise(pool, out, x(0)?, sigma, draw, first);
            }
            Opcode::ToX0 => {
                let sigma =
                    op.key("sigma").map_or(Ok(0.0), |v| self.memory.view(place(v), call).map(|s| s[0]))?;
                to_x0(pool, out, x(0)?, x(1)?, f64::from(sigma));
            }
            Opcode::SpaceTimeToDepth => space_time_to_depth(out, x(0)?, geometry(op, &ty(0).shape)),
            Opcode::DepthToSpaceTime => depth_to_space_time(out, x(0)?, geometry(op, &out_ty.shape)),
            Opcode::TakeRows => {
                let range = int("row")..int("row") + int("rows");
                take(out, x(0)?, &ty(0).shape, 0, range);
            }
            Opcode::TakeShard => {
                let axis = op.axis().unwrap_or(Axis::Tp);
                // The operand may be cut over other axes already; only this op's axis cuts it here.
                let (dim, range) = match out_ty.layout.on(axis) {
                    AxisLayout::Shard(s) => {
                        let (parts, at) = (self.seat.mesh.size(axis), self.seat.coord().on(axis));
                        (s.dim, span(s, out_ty.shape[s.dim], parts, at))
                    }
                    _ => (0, 0..ty(0).shape[0] as usize),
                };
                take(out, x(0)?, &ty(0).shape, dim, range);
            }
            Opcode::Pad => {
                let data = x(0)?;
                out[..data.len()].copy_from_slice(data);
                out[data.len()..].fill(0.0);
            }
            Opcode::Compact => compact(out, x(0)?, width(0), [int("extent"), int("parts"), int("unit")]),
            other => return Err(Fault::Failed(format!("{} is no kernel", other.name()))),
        }
        Ok(())
    }

    // Collectives.

    fn end(&self, op: &Op) -> Result<usize, Fault> {
        Route::of(op)
            .and_then(|route| self.ends.iter().position(|e| e.route == route))
            .ok_or_else(|| Fault::Failed(format!("no communicator for {} {:?}", op.opcode.name(), op.attrs)))
    }

    fn issue(
        &mut self,
        p: &Program,
        prepared: &Prepared,
        op: &Op,
        call: &CallData<'_>,
    ) -> Result<(usize, Ticket), Fault> {
        let at = self.end(op)?;
        let deadline = Instant::now() + self.patience;
        let fingerprint = collectives::fingerprint(agreed(p, op).as_bytes());
        let end = &mut self.ends[at];
        let empty: &[f32] = &[];
        let brings = op.opcode != Opcode::Recv
            && !(op.opcode == Opcode::Broadcast && op.int("root") != Some(end.exchange.me() as i64));
        let data = match op.operands.first() {
            Some(v) if brings => self.memory.view(&prepared.places[v.0 as usize], call),
            _ => Ok(empty),
        };
        let ticket =
            end.exchange.publish(fingerprint, data?, deadline).map_err(|e| fault(p, op, end.route, &e))?;
        Ok((at, ticket))
    }

    /// Takes the result of an issued collective into the slot of `into`'s result.
    fn complete(
        &mut self,
        p: &Program,
        prepared: &Prepared,
        issue: &Op,
        into: &Op,
        (at, ticket): (usize, Ticket),
    ) -> Result<(), Fault> {
        let deadline = Instant::now() + self.patience;
        let (seat, mut none) = (self.seat, Vec::new());
        let result = into.results.first();
        let (memory, len) = match result.map(|r| &prepared.places[r.0 as usize]) {
            Some(Place::Slot(slot, len)) => (&mut self.memory.slots[*slot], *len),
            _ => (&mut none, 0),
        };
        let end = &mut self.ends[at];
        let me = end.exchange.me();
        let outcome = end.exchange.collect(ticket, deadline, |views| match result {
            Some(r) => finish(p, issue, p.ty(*r), &seat, me, &mut memory[..len], views),
            None => 0,
        });
        self.compensated += outcome.map_err(|e| fault(p, issue, end.route, &e))?;
        Ok(())
    }
}

/// Writes a collective's result from the members' contributions; how many sums were compensated.
fn finish(
    p: &Program,
    op: &Op,
    out_ty: &Type,
    seat: &Seat,
    me: usize,
    out: &mut [f32],
    views: &[&[f32]],
) -> u64 {
    let reduction = op.reduction().unwrap_or(Reduction::Sum);
    let (axis, parts) = (op.axis().unwrap_or(Axis::Tp), views.len() as u32);
    let operand = op.operands.first().map(|v| p.ty(*v));
    let pieces = |ty: &Type| pieces(ty, axis, parts);
    match (op.opcode, operand) {
        (Opcode::AllReduce, _) => return collectives::all_reduce(out, views, reduction),
        (Opcode::AllGather, Some(x)) => {
            let (dim, parts) = pieces(x);
            collectives::all_gather(out, views, as_matrix(&out_ty.shape, dim), dim.min(1), &parts);
        }
        (Opcode::ReduceScatter, Some(x)) => {
            let (dim, parts) = pieces(out_ty);
            let shape = as_matrix(&x.shape, dim);
            collectives::reduce_scatter(out, views, shape, dim.min(1), parts[me].clone(), reduction);
        }
        (Opcode::AllToAll, Some(x)) => {
            let (dim, concat) = pieces(x);
            let (_, split) = pieces(out_ty);
            let whole = x.layout.global(&x.shape, &seat.mesh);
            collectives::all_to_all(out, views, me, as_matrix(&whole, 1), dim, &concat, &split);
        }
        (Opcode::Broadcast, _) => collectives::receive(out, views, op.int("root").unwrap_or(0) as usize),
        // Of a transfer, the sender.
        _ => collectives::receive(out, views, 0),
    }
    0
}

fn span(shard: Shard, local: u64, parts: u32, at: u32) -> Range<usize> {
    let (start, len) = shard.range(local, parts, at);
    start as usize..(start + len) as usize
}

fn fault(p: &Program, op: &Op, route: Route, e: &CommFault) -> Fault {
    let text = format!("{} over {route} in @{}: {e}", op.opcode.name(), p.name);
    match e {
        // Who is gone did not depart here: its own end is told on another way.
        CommFault::Aborted { .. } | CommFault::Gone { .. } => Fault::Aborted(text),
        CommFault::Timeout { .. } => Fault::Stalled(text),
        _ => Fault::Failed(text),
    }
}

// Small kernels that only move elements.

fn modulation(out: &mut [f32], table: &[f32], embedding: &[f32], width: usize) {
    let rows = embedding.len() / width;
    for (r, o) in out.chunks_exact_mut(table.len()).enumerate().take(rows) {
        let e = &embedding[r * width..(r + 1) * width];
        for (o, t) in o.chunks_mut(width).zip(table.chunks(width)) {
            for ((o, t), e) in o.iter_mut().zip(t).zip(e) {
                *o = t + e;
            }
        }
    }
}

/// The part of `x` that a range of one dim covers.
fn take(out: &mut [f32], x: &[f32], shape: &[u64], dim: usize, range: Range<usize>) {
    let run = shape[dim + 1..].iter().product::<u64>() as usize;
    let (whole, part) = (shape[dim] as usize * run, range.len() * run);
    for (o, x) in out.chunks_exact_mut(part).zip(x.chunks_exact(whole)) {
        o.copy_from_slice(&x[range.start * run..][..part]);
    }
}

fn compact(out: &mut [f32], x: &[f32], width: usize, [extent, parts, unit]: [usize; 3]) {
    let units = (extent / unit) as u64;
    let each = (extent / unit).div_ceil(parts) * unit;
    for at in 0..parts {
        let (start, len) = tessera_mesh::split(units, parts as u32, at as u32);
        let (start, len) = (start as usize * unit * width, len as usize * unit * width);
        out[start..start + len].copy_from_slice(&x[at * each * width..][..len]);
    }
}

fn geometry(op: &Op, pixels: &[u64]) -> PixelGeometry {
    let stride = op.ints("stride").unwrap_or(&[1, 1, 1]);
    let stride = [stride[0] as usize, stride[1] as usize, stride[2] as usize];
    PixelGeometry {
        frames: pixels[0] as usize / stride[0],
        height: pixels[1] as usize / stride[1],
        width: pixels[2] as usize / stride[2],
        stride,
    }
}

/// A whole-number scalar of the call.
fn whole(prepared: &Prepared, call: &CallData<'_>, v: ValueId) -> Result<i64, Fault> {
    match &prepared.places[v.0 as usize] {
        Place::Scalar(name) => match call.scalars.get(name.as_str()) {
            Some(Scalar::I64(i)) => Ok(*i),
            other => Err(Fault::Failed(format!("call scalar `{name}` must be a whole number, is {other:?}"))),
        },
        _ => Err(Fault::Failed("a whole number that is no call scalar".into())),
    }
}
