//! Executes role programs on the CPU: kernels over planned slots, collectives over shared memory or
//! streams.
//!
//! All streams run in program order on one thread, which every event order permits. An issue op
//! hands its operand to the communicator and returns; the work of peers between issue and wait
//! overlaps with the transfer.

mod collective_ops;
mod op_support;
mod weights;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_base::random::DrawKey;
use tessera_device::{
    AbortFn, AuditResult, Backend, CallData, CommRoute, Fault, Fingerprint, FingerprintHasher, MeshRank,
    Observer, ProgramHandle, Scalar, T0801, WeightSource, check_input,
};
use tessera_ir::{Attr, DType, Op, OpKind, Opcode, Program, Slots, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Shard};

use op_support::unsupported_reason;
use weights::{LoadedShard, WeightAuditCursor};

use crate::Pool;
use crate::kernels::{
    Activation, FrameIndexing, KeyBias, MatmulWeight, PackedWeight, PixelGeometry, RopeCache, RopeSpec,
    Scratch, add, attention, bias_act, bmm, depth_to_space_time, gate_residual, layer_norm, matmul,
    norm_modulate, renoise, rms_norm, rms_scale, rope, row_square_sum, silu, softmax, space_time_to_depth,
    time_embed, to_x0,
};
use crate::transport::{HostTransport, Ticket, TransportAborter};

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
    /// The origin and fingerprint of each loaded weight.
    shards: Vec<LoadedShard>,
    /// Fingerprints of the tables that kernels derive.
    derived_fingerprints: Vec<Fingerprint>,
    audit_cursor: WeightAuditCursor,
    buffer_index: BTreeMap<String, usize>,
    scratch: Scratch,
    rope_cache: RopeCache,
    outputs: BTreeMap<String, OutputValue>,
    compensated_sums: u64,
}

/// A rank's end of a communicator.
#[derive(Debug)]
pub struct CommEndpoint {
    /// The route by which the rank's ops refer to the communicator.
    pub route: CommRoute,
    /// The transport to the other members.
    pub transport: HostTransport,
}

/// Identifies a shard of a tensor and its memory layout.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct WeightKey {
    name: String,
    ty: String,
    load: Option<String>,
    packed: bool,
}

/// The value of an output op; its memory is reused from run to run.
#[derive(Debug)]
struct OutputValue {
    /// Whether the last run wrote it.
    written: bool,
    values: Vec<f32>,
}

/// The memory of all values.
#[derive(Debug, Default)]
struct BackendMemory {
    weights: Vec<WeightData>,
    buffers: Vec<Vec<f32>>,
    /// One set of slots for all programs, because only one program runs at a time.
    slots: Vec<Vec<f32>>,
}

#[derive(Debug)]
enum WeightData {
    Plain(Vec<f32>),
    Packed(PackedWeight),
}

/// Where a value's elements are stored.
#[derive(Debug, Clone)]
enum ValueLocation {
    Unallocated,
    Slot(usize, usize),
    Buffer(usize, Range<usize>),
    Weight(usize),
    Input(String),
    Scalar(String),
}

#[derive(Debug)]
struct PreparedProgram {
    program: Arc<Program>,
    locations: Vec<ValueLocation>,
    /// Index of the issuing op of each ticket value.
    issue_ops: BTreeMap<ValueId, usize>,
    /// Index of the backend's buffer for each buffer of the program.
    buffers: Vec<usize>,
}

/// The collectives in flight during one run.
type PendingCollectives = BTreeMap<ValueId, (usize, Ticket)>;

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
            shards: Vec::new(),
            derived_fingerprints: Vec::new(),
            audit_cursor: WeightAuditCursor::default(),
            buffer_index: BTreeMap::new(),
            scratch: Scratch::new(),
            rope_cache: RopeCache::new(),
            outputs: BTreeMap::new(),
            compensated_sums: 0,
        }
    }

    /// Checks a whole program before any rank starts: returns T0801 for its first op that no kernel
    /// here supports, as [`Backend::load`] does.
    #[must_use]
    pub fn find_unsupported(p: &Program) -> Option<Diagnostic> {
        p.ops
            .iter()
            .find_map(|op| unsupported_reason(p, op).map(|why| CpuBackend::unsupported_error(p, op, &why)))
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
        let p = &**program;
        for (i, bytes) in slots.slot_bytes.iter().enumerate() {
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
                self.memory.buffers.push(vec![0.0; b.ty.element_count() as usize]);
            }
            buffers.push(i);
        }
        let mut places = vec![ValueLocation::Unallocated; p.values.len()];
        let mut issues = BTreeMap::new();
        for (i, op) in p.ops.iter().enumerate() {
            if let Some(why) = unsupported_reason(p, op) {
                return Err(CpuBackend::unsupported_error(p, op, &why));
            }
            self.fingerprint_derived(p, op);
            for r in &op.results {
                let ty = p.type_of(*r);
                let len = ty.element_count() as usize;
                places[r.0 as usize] = match op.opcode {
                    _ if ty.is_token() => {
                        if ty.dtype == DType::Ticket {
                            issues.insert(*r, i);
                        }
                        ValueLocation::Unallocated
                    }
                    Opcode::Weight => ValueLocation::Weight(self.load_weight(p, op, weights)?),
                    Opcode::Input => ValueLocation::Input(op.name.clone().unwrap_or_default()),
                    Opcode::Call => ValueLocation::Scalar(op.name.clone().unwrap_or_default()),
                    Opcode::CacheRead => {
                        let width: usize = ty.shape[1..].iter().product::<u64>() as usize;
                        let start = op.int_attr("row").unwrap_or(0) as usize * width;
                        ValueLocation::Buffer(
                            op.buffer.map_or(0, |b| buffers[b.0 as usize]),
                            start..start + len,
                        )
                    }
                    _ => match slots.value_slots.get(r.0 as usize).copied().flatten() {
                        Some(s) => ValueLocation::Slot(s as usize, len),
                        None => {
                            return Err(CpuBackend::unsupported_error(
                                p,
                                op,
                                "the plan assigns no memory to its result",
                            ));
                        }
                    },
                };
            }
        }
        self.programs.push(Arc::new(PreparedProgram {
            program: Arc::clone(program),
            locations: places,
            issue_ops: issues,
            buffers,
        }));
        Ok(ProgramHandle(self.programs.len() - 1))
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

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        let mut hash = FingerprintHasher::default();
        hash.update(&self.memory.buffers[*self.buffer_index.get(name)?]);
        Some(hash.finish(name, slice))
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
        pool.install(|| self.run_prepared(&prepared.program, &prepared, call, observer))
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
        for b in &mut self.memory.buffers {
            b.fill(0.0);
        }
    }

    fn memory_bytes(&self) -> [u64; 3] {
        let bytes = |n: usize| n as u64 * 4;
        let weights = self
            .memory
            .weights
            .iter()
            .map(|w| match w {
                WeightData::Plain(v) => v.len(),
                WeightData::Packed(p) => p.shape().0 * p.shape().1,
            })
            .sum();
        [
            bytes(weights),
            bytes(self.memory.buffers.iter().map(Vec::len).sum()),
            bytes(self.memory.slots.iter().map(Vec::len).sum()),
        ]
    }

    fn compensated_sums(&self) -> u64 {
        self.compensated_sums
    }

    fn abort_fn(&self) -> AbortFn {
        let aborters: Vec<TransportAborter> = self.endpoints.iter().map(|e| e.transport.aborter()).collect();
        Arc::new(move |reason| aborters.iter().for_each(|a| a.abort(reason)))
    }
}

impl BackendMemory {
    /// Returns the elements of a value.
    fn view_value<'a>(&'a self, place: &ValueLocation, call: &'a CallData<'_>) -> Result<&'a [f32], Fault> {
        Ok(match place {
            ValueLocation::Slot(s, len) => &self.slots[*s][..*len],
            ValueLocation::Buffer(b, range) => &self.buffers[*b][range.clone()],
            ValueLocation::Weight(w) => match &self.weights[*w] {
                WeightData::Plain(v) => v,
                WeightData::Packed(_) => {
                    return Err(Fault::Failed("a packed weight is used outside a matmul".into()));
                }
            },
            ValueLocation::Input(name) => call
                .inputs
                .get(name.as_str())
                .copied()
                .ok_or_else(|| Fault::Failed(format!("the call has no input `{name}`")))?,
            ValueLocation::Scalar(name) => match call.scalars.get(name.as_str()) {
                Some(Scalar::F32s(v)) => v,
                Some(Scalar::F32(v)) => std::slice::from_ref(v),
                _ => return Err(Fault::Failed(format!("the call has no float scalar `{name}`"))),
            },
            ValueLocation::Unallocated => return Err(Fault::Failed("a token is read as data".into())),
        })
    }
}

impl CpuBackend {
    fn run_prepared(
        &mut self,
        p: &Program,
        prepared: &PreparedProgram,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        for op in p.ops.iter().filter(|o| matches!(o.opcode, Opcode::Input | Opcode::Call)) {
            check_input(p, op, call)?;
        }
        self.outputs.values_mut().for_each(|o| o.written = false);
        let mut pending = PendingCollectives::new();
        for (i, op) in p.ops.iter().enumerate() {
            observer.on_progress(i as u32);
            match op.opcode.table_row().kind {
                OpKind::Source => {}
                OpKind::Sink => self.run_sink(p, prepared, op, call)?,
                OpKind::Compute => self.run_compute(p, prepared, op, call)?,
                OpKind::Collective => {
                    observer.on_issuing(i).map_err(Fault::Refused)?;
                    let ticket = self.issue_collective(p, prepared, op, call)?;
                    observer.on_issued(i);
                    if op.issue {
                        pending.insert(op.results[0], ticket);
                    } else {
                        self.complete_collective(p, prepared, op, op, ticket)?;
                        observer.on_completed(i);
                    }
                }
                OpKind::Order if op.opcode == Opcode::Wait => {
                    let missing =
                        || Fault::Failed(format!("@{} op {i} waits for no issued collective", p.name));
                    let ticket = pending.remove(&op.operands[0]).ok_or_else(missing)?;
                    let issue = prepared.issue_ops.get(&op.operands[0]).ok_or_else(missing)?;
                    observer.on_waiting(*issue);
                    self.complete_collective(p, prepared, &p.ops[*issue], op, ticket)?;
                    observer.on_completed(*issue);
                }
                OpKind::Order => {}
            }
        }
        Ok(())
    }

    fn run_sink(
        &mut self,
        p: &Program,
        prepared: &PreparedProgram,
        op: &Op,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let source = &prepared.locations[op.operands[0].0 as usize];
        if op.opcode == Opcode::Output {
            let data = self.memory.view_value(source, call)?;
            let name = op.name.as_deref().unwrap_or_default();
            if let Some(out) = self.outputs.get_mut(name) {
                out.written = true;
                out.values.clear();
                out.values.extend_from_slice(data);
            } else {
                self.outputs.insert(name.to_string(), OutputValue { written: true, values: data.to_vec() });
            }
            return Ok(());
        }
        let width: usize = p.type_of(op.operands[0]).shape[1..].iter().product::<u64>() as usize;
        let row = match op.keyed_operand("row") {
            None => 0,
            Some(v) => integer_scalar(prepared, call, v)?,
        };
        let row = row.saturating_add(op.int_attr("first_row").unwrap_or(0));
        let b = op.buffer.map_or(0, |b| prepared.buffers[b.0 as usize]);
        // The buffer is taken out while its source is read, because the source may be another
        // buffer.
        let mut buffer = std::mem::take(&mut self.memory.buffers[b]);
        let result = self.memory.view_value(source, call).and_then(|data| {
            let start = usize::try_from(row).ok().and_then(|r| r.checked_mul(width));
            let end = start.and_then(|s| s.checked_add(data.len())).filter(|e| *e <= buffer.len());
            match (start, end) {
                (Some(s), Some(e)) => {
                    buffer[s..e].copy_from_slice(data);
                    Ok(())
                }
                _ => Err(Fault::Failed(format!(
                    "@{}: rows {row} + {} exceed a cache of {} rows",
                    p.name,
                    data.len() / width.max(1),
                    buffer.len() / width.max(1)
                ))),
            }
        });
        self.memory.buffers[b] = buffer;
        result
    }

    /// Returns the global index of the first row and the number of tokens per frame.
    fn frame_indexing(&self, ty: &Type, op: &Op) -> FrameIndexing {
        FrameIndexing {
            first_row: self.first_row(op, ty),
            rows_per_frame: op.int_attr("frame_rows").unwrap_or(1).max(1) as usize,
        }
    }

    /// Returns the global index of this shard's first row of an op's value.
    fn first_row(&self, op: &Op, ty: &Type) -> usize {
        let here = ty.layout.global_ranges(&ty.shape, &self.placement.mesh, self.placement.coord())[0].0;
        here as usize + op.int_attr("first_row").unwrap_or(0) as usize
    }

    fn run_compute(
        &mut self,
        p: &Program,
        prepared: &PreparedProgram,
        op: &Op,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let out_ty = p.type_of(op.results[0]);
        let ValueLocation::Slot(slot, len) = prepared.locations[op.results[0].0 as usize] else {
            return Err(Fault::Failed(format!("the result of {} has no slot", op.opcode.name())));
        };
        // Everything that is written is taken out of `self` first, so that reads can borrow the
        // rest.
        let mut memory = std::mem::take(&mut self.memory.slots[slot]);
        let mut scratch = std::mem::take(&mut self.scratch);
        let mut tables = std::mem::take(&mut self.rope_cache);
        let result =
            self.run_kernel(p, prepared, op, call, out_ty, &mut memory[..len], &mut scratch, &mut tables);
        self.memory.slots[slot] = memory;
        self.scratch = scratch;
        self.rope_cache = tables;
        result
    }

    #[allow(clippy::too_many_arguments)]
    fn run_kernel(
        &self,
        p: &Program,
        prepared: &PreparedProgram,
        op: &Op,
        call: &CallData<'_>,
        out_ty: &Type,
        out: &mut [f32],
        scratch: &mut Scratch,
        tables: &mut RopeCache,
    ) -> Result<(), Fault> {
        let pool = &self.pool;
        let place = |v: ValueId| &prepared.locations[v.0 as usize];
        let x = |i: usize| self.memory.view_value(place(op.operands[i]), call);
        let ty = |i: usize| p.type_of(op.operands[i]);
        let width = |i: usize| ty(i).shape.last().copied().unwrap_or(1) as usize;
        let int = |name: &str| op.int_attr(name).unwrap_or(0) as usize;
        let segments = op.int_attr("segments").unwrap_or(1) as usize;
        let eps = op.float_attr("eps").unwrap_or(1e-6) as f32;
        let act = match op.str_attr("act") {
            Some("silu") => Activation::Silu,
            Some("gelu_tanh") => Activation::GeluTanh,
            _ => Activation::None,
        };
        match op.opcode {
            Opcode::Matmul => {
                let (m, k, n) = (ty(0).shape[0] as usize, width(0), ty(1).shape[0] as usize);
                let w = match place(op.operands[1]) {
                    ValueLocation::Weight(w) => match &self.memory.weights[*w] {
                        WeightData::Packed(p) => MatmulWeight::Packed(p),
                        WeightData::Plain(v) => MatmulWeight::Plain(v),
                    },
                    other => MatmulWeight::Plain(self.memory.view_value(other, call)?),
                };
                let bias =
                    op.keyed_operand("bias").map(|b| self.memory.view_value(place(b), call)).transpose()?;
                matmul(pool, scratch, out, x(0)?, w, (m, n, k), bias, act, segments);
            }
            Opcode::BiasAct => bias_act(pool, out, x(0)?, x(1)?, act),
            Opcode::Add => add(pool, out, x(0)?, x(1)?),
            Opcode::Silu => silu(pool, out, x(0)?),
            Opcode::LayerNorm => layer_norm(pool, out, x(0)?, x(1)?, x(2)?, eps),
            Opcode::Modulation => add_modulation(out, x(0)?, x(1)?, width(1)),
            Opcode::NormModulate => {
                let (d, parts) = (width(0), width(1) / width(0));
                let columns = (int("shift"), int("scale"));
                norm_modulate(
                    pool,
                    out,
                    x(0)?,
                    d,
                    x(1)?,
                    parts,
                    columns,
                    self.frame_indexing(ty(0), op),
                    eps,
                );
            }
            Opcode::GateResidual if op.operands.len() == 2 => add(pool, out, x(0)?, x(1)?),
            Opcode::GateResidual => {
                let (d, parts) = (width(0), width(2) / width(0));
                gate_residual(
                    pool,
                    out,
                    x(0)?,
                    x(1)?,
                    d,
                    x(2)?,
                    parts,
                    int("gate"),
                    self.frame_indexing(ty(0), op),
                );
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
                let grid = op.ints_attr("grid").unwrap_or(&[1, 1, 1]);
                let spec = RopeSpec {
                    head_dim: int("head_dim"),
                    grid: [grid[0] as usize, grid[1] as usize, grid[2] as usize],
                    start: op.keyed_operand("start").map_or(Ok(0), |v| integer_scalar(prepared, call, v))?,
                    frame_stride: op.int_attr("frame_stride").unwrap_or(1),
                };
                rope(pool, out, x(0)?, width(0), self.first_row(op, ty(0)), tables.get(spec));
            }
            Opcode::Attention => {
                let bias = match (op.keyed_operand("bias"), op.ints_attr("bias_rows")) {
                    (Some(b), Some([from, to])) => {
                        let log_b = self.memory.view_value(place(b), call)?[0];
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
            Opcode::Bmm => {
                let (n, k) = (ty(0).shape[ty(0).shape.len() - 2] as usize, width(0));
                let m = out_ty.shape.last().copied().unwrap_or(1) as usize;
                let transposed = op.attrs.get("transposed") == Some(&Attr::Bool(true));
                let scale = op.float_attr("scale").unwrap_or(1.0) as f32;
                bmm(pool, out, x(0)?, x(1)?, [n, k, m], transposed, scale);
            }
            Opcode::TimeEmbed => time_embed(out, x(0)?),
            Opcode::Renoise => {
                let key = |name| op.keyed_operand(name).map_or(Ok(0), |v| integer_scalar(prepared, call, v));
                let draw = DrawKey {
                    seed: key("seed")? as u64,
                    chunk: key("chunk")? as u32,
                    draw: key("draw")? as u32,
                };
                let sigma = op
                    .keyed_operand("sigma")
                    .map_or(Ok(0.0), |v| self.memory.view_value(place(v), call).map(|s| s[0]))?;
                let first = (self.first_row(op, ty(0)) * width(0)) as u64;
                renoise(pool, out, x(0)?, sigma, draw, first);
            }
            Opcode::ToX0 => {
                let sigma = op
                    .keyed_operand("sigma")
                    .map_or(Ok(0.0), |v| self.memory.view_value(place(v), call).map(|s| s[0]))?;
                to_x0(pool, out, x(0)?, x(1)?, f64::from(sigma));
            }
            Opcode::SpaceTimeToDepth => space_time_to_depth(out, x(0)?, pixel_geometry(op, &ty(0).shape)),
            Opcode::DepthToSpaceTime => depth_to_space_time(out, x(0)?, pixel_geometry(op, &out_ty.shape)),
            Opcode::TakeRows => {
                let range = int("row")..int("row") + int("rows");
                take_range(out, x(0)?, &ty(0).shape, 0, range);
            }
            Opcode::TakeShard => {
                let axis = op.mesh_axis().unwrap_or(Axis::Tp);
                // The operand may already be sharded over other axes; this op only splits it over
                // its own axis.
                let (dim, range) = match out_ty.layout.on_axis(axis) {
                    AxisLayout::Shard(s) => {
                        let (parts, at) =
                            (self.placement.mesh.axis_size(axis), self.placement.coord().on_axis(axis));
                        (s.dim, shard_range(s, out_ty.shape[s.dim], parts, at))
                    }
                    _ => (0, 0..ty(0).shape[0] as usize),
                };
                take_range(out, x(0)?, &ty(0).shape, dim, range);
            }
            Opcode::Pad => {
                let data = x(0)?;
                out[..data.len()].copy_from_slice(data);
                out[data.len()..].fill(0.0);
            }
            Opcode::Compact => {
                compact_padding(out, x(0)?, width(0), [int("extent"), int("parts"), int("unit")])
            }
            other => return Err(Fault::Failed(format!("{} has no kernel", other.name()))),
        }
        Ok(())
    }
}

fn shard_range(shard: Shard, local: u64, parts: u32, at: u32) -> Range<usize> {
    let (start, len) = shard.global_range(local, parts, at);
    start as usize..(start + len) as usize
}

// Small kernels that only move elements.

fn add_modulation(out: &mut [f32], table: &[f32], embedding: &[f32], width: usize) {
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

/// Copies the part of `x` that a range of one dim covers.
fn take_range(out: &mut [f32], x: &[f32], shape: &[u64], dim: usize, range: Range<usize>) {
    let run = shape[dim + 1..].iter().product::<u64>() as usize;
    let (whole, part) = (shape[dim] as usize * run, range.len() * run);
    for (o, x) in out.chunks_exact_mut(part).zip(x.chunks_exact(whole)) {
        o.copy_from_slice(&x[range.start * run..][..part]);
    }
}

fn compact_padding(out: &mut [f32], x: &[f32], width: usize, [extent, parts, unit]: [usize; 3]) {
    let units = (extent / unit) as u64;
    let each = (extent / unit).div_ceil(parts) * unit;
    for at in 0..parts {
        let (start, len) = tessera_mesh::split_units(units, parts as u32, at as u32);
        let (start, len) = (start as usize * unit * width, len as usize * unit * width);
        out[start..start + len].copy_from_slice(&x[at * each * width..][..len]);
    }
}

fn pixel_geometry(op: &Op, pixels: &[u64]) -> PixelGeometry {
    let stride = op.ints_attr("stride").unwrap_or(&[1, 1, 1]);
    let stride = [stride[0] as usize, stride[1] as usize, stride[2] as usize];
    PixelGeometry {
        frames: pixels[0] as usize / stride[0],
        height: pixels[1] as usize / stride[1],
        width: pixels[2] as usize / stride[2],
        stride,
    }
}

/// Returns an integer scalar of the call.
fn integer_scalar(prepared: &PreparedProgram, call: &CallData<'_>, v: ValueId) -> Result<i64, Fault> {
    match &prepared.locations[v.0 as usize] {
        ValueLocation::Scalar(name) => match call.scalars.get(name.as_str()) {
            Some(Scalar::I64(i)) => Ok(*i),
            other => Err(Fault::Failed(format!("call scalar `{name}` must be an integer, is {other:?}"))),
        },
        _ => Err(Fault::Failed("an integer attribute does not refer to a call scalar".into())),
    }
}
