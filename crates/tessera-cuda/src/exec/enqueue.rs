//! Launches a program's steps on its streams: what a capture records and what an uncaptured run does.

use std::collections::BTreeMap;
use std::ops::Range;

use tessera_ir::{Attr, DType, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout};

use super::ahead::Carried;
use super::batches::Batches;
use super::steps::{Step, few_rows};
use super::{ALIGNMENT, Cuda, MOST_PIECES, Place, Turns};
use crate::attention;
use crate::driver::{Args, Done, Event, Failed, Graph, Stream, failed};
use crate::exchange::Targets;
use crate::flash::Flash;
use crate::products::{self, Shape};

/// Told of each step, its stream, and whether it ends: for whoever records times.
pub(super) type Watch<'a> = dyn FnMut(usize, &Stream, bool) -> Done<()> + 'a;

/// An exchange whose pieces the step that makes them writes, step and place of its first half, and the event of that.
struct Sent {
    op: usize,
    maker: usize,
    opens: usize,
    targets: Targets,
    opened: Option<Event>,
}

/// Words that a thread moves, as elements.cu says.
const PUT: u64 = 4;

impl Cuda {
    /// Chooses what makes a product that is launched by itself, with a residual added to it or not. Other ops are none.
    pub(super) fn prepare_product(&mut self, p: &Program, op: &Op, residual: bool) -> Done<()> {
        if op.opcode != Opcode::Matmul || few_rows(p, op) {
            return Ok(());
        }
        self.products.prepare(Shape { residual, ..product(p, op) }, &mut self.kernels.compiler)
    }

    /// Compiles and plans what an op other than a product will launch.
    pub(super) fn prepare_op(&mut self, p: &Program, op: &Op) -> Done<()> {
        let Some(x) = op.operands.first().map(|v| p.ty(*v)) else { return Ok(()) };
        let width = x.shape.last().copied().unwrap_or(1);
        match op.opcode {
            Opcode::LayerNorm
            | Opcode::NormModulate
            | Opcode::GateResidual
            | Opcode::RmsNorm
            | Opcode::RmsScale
            | Opcode::Rope
            | Opcode::RowSquareSum => self.kernels.prepare_rows(width, x.dtype),
            Opcode::Attention => {
                for (shape, _) in pieces(p, op) {
                    if shape.fits() && x.dtype == DType::Bf16 && !self.by_flash(&shape) {
                        self.attentions.prepare(shape)?;
                    }
                }
                Ok(())
            }
            Opcode::Quantize => self.kernels.prepare_rows(width, x.dtype),
            _ => Ok(()),
        }
    }

    /// Records what is launched for a program.
    pub(super) fn capture(
        &mut self,
        program: usize,
        launch: impl FnOnce(&mut Cuda) -> Done<()>,
    ) -> Done<Graph> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        self.main(&p)?.begin_capture()?;
        let launched = launch(self);
        // A capture is ended whatever happened in it: the stream is of no use before.
        let graph = self.main(&p)?.end_capture();
        launched?;
        graph
    }

    /// Launches all of a program.
    pub(super) fn enqueue(&mut self, program: usize, watch: &mut Watch<'_>) -> Done<()> {
        // Streams are taken out while the rest of the backend is borrowed.
        let streams = std::mem::take(&mut self.streams);
        let done = self.enqueue_on(program, &streams, watch);
        self.streams = streams;
        done
    }

    fn enqueue_on(
        &mut self,
        program: usize,
        streams: &BTreeMap<String, Stream>,
        watch: &mut Watch<'_>,
    ) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let stream = |i: usize| -> Done<&Stream> {
            p.streams
                .get(i)
                .and_then(|n| streams.get(n))
                .ok_or_else(|| Failed(format!("@{} has no stream {i}", p.name)))
        };
        let main = stream(0)?;
        let (area, staged, bytes) = {
            let own = &self.programs[program];
            (own.area.at(), own.staged.at(), own.staged_bytes)
        };
        main.copy(area, staged, bytes)?;
        for at in 0..self.programs[program].turns.len() {
            if !self.programs[program].turns[at].shared {
                self.turn(program, at, main)?;
            }
        }
        // Other streams begin when what the call brought is there.
        let began = Event::new()?;
        main.record(&began)?;
        for i in 1..p.streams.len() {
            stream(i)?.wait(&began)?;
        }
        let mut events: BTreeMap<ValueId, Event> = BTreeMap::new();
        let steps = self.programs[program].steps.clone();
        let mut sent = self.sent(program, &steps)?;
        let mut batches = Batches::of(&p);
        for (k, step) in steps.iter().enumerate() {
            let at = step.at();
            let op = &p.ops[at];
            let planned = stream(op.stream.0 as usize)?;
            let own = batches.enter(at, planned, streams)?;
            for s in sent.iter_mut().filter(|s| s.opens == k) {
                let (maker, lane) = (steps[s.maker].at(), stream(p.ops[s.op].stream.0 as usize)?);
                let free = Event::new()?;
                stream(p.ops[maker].stream.0 as usize)?.record(&free)?;
                lane.wait(&free)?;
                self.exchange_opens(program, s.op, lane)?;
                lane.record(s.opened.insert(Event::new()?))?;
            }
            for e in &op.after {
                if let Some(e) = events.get(e) {
                    own.wait(e)?;
                }
            }
            match op.opcode {
                Opcode::EventRecord => {
                    let e = Event::new()?;
                    own.record(&e)?;
                    events.insert(op.results[0], e);
                }
                Opcode::Wait => {
                    let missing = || Failed(format!("@{} op {at} waits for nothing", p.name));
                    own.wait(events.get(&op.operands[0]).ok_or_else(missing)?)?;
                }
                _ if op.opcode.is_collective() => {
                    watch(at, own, false)?;
                    if sent.iter().any(|s| s.op == at) {
                        self.exchange_closes(program, at, own)?;
                    } else {
                        self.exchange(program, at, own)?;
                    }
                    watch(at, own, true)?;
                    if op.issue {
                        let e = Event::new()?;
                        own.record(&e)?;
                        events.insert(op.results[0], e);
                    }
                    batches.leave(at, planned, own)?;
                }
                _ => {
                    let targets = sent.iter().find(|s| s.maker == k);
                    if let Some(opened) = targets.and_then(|s| s.opened.as_ref()) {
                        own.wait(opened)?;
                    }
                    watch(at, own, false)?;
                    self.step(program, step, targets.map(|s| &s.targets), own)?;
                    watch(at, own, true)?;
                }
            }
        }
        // The program ends on the stream that it began on.
        for i in 1..p.streams.len() {
            let ended = Event::new()?;
            stream(i)?.record(&ended)?;
            main.wait(&ended)?;
        }
        Ok(())
    }

    /// The turns of frames for this call.
    fn turn(&mut self, program: usize, at: usize, stream: &Stream) -> Done<()> {
        let own = &self.programs[program];
        let t = &own.turns[at];
        let start = own.program.ops[t.op].key("start").map_or(Ok(0), |v| self.at(program, v))?;
        let (n, out) = (t.frames * t.pairs(), own.area.at() + t.by_frame);
        let args = Args::new().at(start).int(t.stride).int(t.pairs() as i64).at(out).int(n as i64);
        self.kernels.elements("turns", n, args, stream)
    }

    /// Where a value lies.
    pub(super) fn at(&self, program: usize, v: ValueId) -> Done<u64> {
        let own = &self.programs[program];
        Ok(match own.places[v.0 as usize] {
            Place::Slot(s) => {
                let slots = self.slots.as_ref().ok_or_else(|| Failed("no memory for temporaries".into()))?;
                slots.memory.at() + slots.offsets[s]
            }
            Place::Buffer(b, bytes) => self.buffers[b].memory.at() + bytes,
            Place::Weight(w) => self.weights.at(w),
            Place::Area(bytes) => own.area.at() + bytes,
            Place::Beside(bytes, _) => self.behind_slots()? + bytes,
            Place::Nowhere => return failed("a token read as data"),
        })
    }

    /// Where what lies behind the slots begins.
    fn behind_slots(&self) -> Done<u64> {
        let slots = self.slots.as_ref().ok_or_else(|| Failed("no memory for temporaries".into()))?;
        Ok(slots.memory.at() + slots.scratch)
    }

    /// Elements from a row of a value to the next.
    fn pitch(&self, program: usize, v: ValueId) -> u64 {
        let own = &self.programs[program];
        match own.places[v.0 as usize] {
            Place::Beside(_, pitch) => pitch,
            _ => own.program.ty(v).shape.last().copied().unwrap_or(1),
        }
    }

    pub(super) fn key(&self, program: usize, op: &Op, name: &str) -> Done<u64> {
        op.key(name).map_or(Ok(0), |v| self.at(program, v))
    }

    /// The exchanges whose pieces the steps that make them write.
    fn sent(&self, program: usize, steps: &[Step]) -> Done<Vec<Sent>> {
        let own = &self.programs[program];
        let mut out = Vec::new();
        for (op, carried) in &own.carried {
            let Carried::Maker { maker, opens, along } = *carried else { continue };
            // Of the kernels for attention the one for Hopper alone knows where rows go.
            let made = &own.program.ops[steps[maker].at()];
            if made.opcode == Opcode::Attention && !self.by_one_flash(&own.program, made) {
                continue;
            }
            if let Some(targets) = self.targets(program, *op, along)? {
                out.push(Sent { op: *op, maker, opens, targets, opened: None });
            }
        }
        Ok(out)
    }

    fn step(&mut self, program: usize, step: &Step, targets: Option<&Targets>, stream: &Stream) -> Done<()> {
        match *step {
            Step::One(i) => self.one(program, i, targets, stream),
            Step::ResidualNorm { add, norm, quantize } => {
                self.residual_norm(program, add, Some(norm), quantize, stream)
            }
            Step::Turned { scale, rope, write } => self.turned(program, scale, rope, write, targets, stream),
            Step::ProductAdd { product, add } => self.product(program, product, Some(add), stream),
            Step::Joined(ref joined) => self.joined(program, joined, stream),
        }
    }

    fn one(&mut self, program: usize, i: usize, targets: Option<&Targets>, stream: &Stream) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let op = &p.ops[i];
        let x = |at: usize| self.at(program, op.operands[at]);
        let ty = |at: usize| p.ty(op.operands[at]);
        let width = |at: usize| ty(at).shape.last().copied().unwrap_or(1);
        let int = |name: &str| op.int(name).unwrap_or(0);
        let out = || self.at(program, op.results[0]);
        let elements = op.results.first().map_or(0, |r| p.ty(*r).elements());
        let act = act(op);
        match op.opcode {
            Opcode::Matmul => self.product(program, i, None, stream),
            Opcode::GateResidual => self.residual_norm(program, Some(i), None, None, stream),
            Opcode::LayerNorm | Opcode::NormModulate => {
                self.residual_norm(program, None, Some(i), None, stream)
            }
            Opcode::RmsNorm | Opcode::RmsScale => self.turned(program, Some(i), None, None, targets, stream),
            Opcode::Rope => self.turned(program, None, Some(i), None, targets, stream),
            Opcode::CacheWrite if self.pitch(program, op.operands[0]) != width(0) => {
                self.turned(program, None, None, Some(i), targets, stream)
            }
            Opcode::CacheWrite => self.write(program, op, stream),
            Opcode::Output => {
                let at = self.put_out(program, op)?;
                stream.copy(at, x(0)?, ty(0).bytes().0 as usize)
            }
            Opcode::Attention => self.attend(program, op, targets, stream),
            Opcode::RowSquareSum => {
                let second = if op.operands.len() > 1 { x(1)? } else { 0 };
                let args = Args::new().int(ty(0).shape[0] as i64).at(x(0)?).at(second).at(out()?);
                let args = args.int(op.operands.len() as i64);
                self.kernels.rows("row_square_sum", (ty(0).shape[0], width(0), ty(0).dtype), args, stream)
            }
            Opcode::Add => {
                let args = Args::new().at(x(0)?).at(x(1)?).at(out()?).long(elements as i64);
                self.kernels.elements(by(ty(0), "add_f32", "add_bf16"), elements, args, stream)
            }
            Opcode::Silu | Opcode::BiasAct => {
                let bias = if op.operands.len() > 1 { x(1)? } else { 0 };
                let act = if op.opcode == Opcode::Silu { SILU } else { act };
                let (x, out) = (x(0)?, out()?);
                self.bias_act(ty(0), (x, bias, out), act, stream)
            }
            Opcode::Modulation => self.modulate(program, op, 1, stream),
            Opcode::TimeEmbed => {
                let wide = p.ty(op.results[0]).shape.last().copied().unwrap_or(2);
                let args = Args::new().at(x(0)?).at(out()?).int(wide as i64).long(elements as i64);
                self.kernels.elements("time_embed", elements, args, stream)
            }
            Opcode::Renoise => {
                let first = self.first_row(op, ty(0)) * width(0);
                let key = |name: &str| self.key(program, op, name);
                let args = Args::new().at(x(0)?).at(key("sigma")?).at(key("seed")?).at(key("chunk")?);
                let args = args.at(key("draw")?).long(first as i64).at(out()?).long(elements as i64);
                self.kernels.elements("renoise", elements, args, stream)
            }
            Opcode::ToX0 => {
                let args = Args::new().at(x(0)?).at(x(1)?).at(self.key(program, op, "sigma")?);
                let args = args.at(out()?).long(elements as i64);
                self.kernels.elements("to_x0", elements, args, stream)
            }
            Opcode::SpaceTimeToDepth | Opcode::DepthToSpaceTime => {
                let back = op.opcode == Opcode::DepthToSpaceTime;
                let pixels = if back { p.ty(op.results[0]) } else { ty(0) };
                let stride = op.ints("stride").unwrap_or(&[1, 1, 1]);
                let (high, wide) = (pixels.shape[1] as i64 / stride[1], pixels.shape[2] as i64 / stride[2]);
                let args = Args::new().at(x(0)?).at(out()?).int(high).int(wide);
                let args = args.int(stride[0]).int(stride[1]).int(stride[2]).int(i64::from(back));
                self.kernels.elements("pixels", elements, args.long(elements as i64), stream)
            }
            Opcode::Softmax => {
                let args = Args::new().at(x(0)?).at(out()?).int(width(0) as i64);
                let rows = elements / width(0).max(1);
                self.kernels.blocks(by(ty(0), "softmax_f32", "softmax_bf16"), rows, 256, 0, args, stream)
            }
            Opcode::Dot => {
                let shape = &ty(0).shape;
                let (n, k) = (shape[shape.len() - 2], width(0));
                let m = p.ty(op.results[0]).shape.last().copied().unwrap_or(1);
                let transposed = op.attrs.get("transposed") == Some(&Attr::Bool(true));
                let args =
                    Args::new().at(x(0)?).at(x(1)?).at(out()?).int(n as i64).int(k as i64).int(m as i64);
                let args = args.int(i64::from(transposed)).float(op.float("scale").unwrap_or(1.0) as f32);
                self.kernels.elements("dot", elements, args.long(elements as i64), stream)
            }
            Opcode::TakeRows => {
                let row = int("row") as u64;
                take(stream, (out()?, x(0)?), ty(0), 0, row..row + int("rows") as u64)
            }
            Opcode::TakeShard => {
                let axis = op.axis().unwrap_or(Axis::Tp);
                let out_ty = p.ty(op.results[0]);
                // The operand may be cut over other axes already; only this op's axis cuts it here.
                let (dim, range) = match out_ty.layout.on(axis) {
                    AxisLayout::Shard(s) => {
                        let (parts, at) = (self.seat.mesh.size(axis), self.seat.coord().on(axis));
                        let (start, len) = s.range(out_ty.shape[s.dim], parts, at);
                        (s.dim, start..start + len)
                    }
                    _ => (0, 0..ty(0).shape[0]),
                };
                take(stream, (out()?, x(0)?), ty(0), dim, range)
            }
            Opcode::Pad => {
                let (from, to) = (ty(0).bytes().0, p.ty(op.results[0]).bytes().0);
                stream.copy(out()?, x(0)?, from as usize)?;
                stream.zero(out()? + from, (to - from) as usize)
            }
            Opcode::Compact => {
                let (extent, parts, unit) =
                    (int("extent") as u64, int("parts") as u64, int("unit").max(1) as u64);
                let row = width(0) * ty(0).dtype.bytes();
                let units = extent / unit;
                let each = units.div_ceil(parts.max(1)) * unit;
                for at in 0..parts {
                    let (start, len) = tessera_mesh::split(units, parts as u32, at as u32);
                    let (start, len) = (start * unit * row, len * unit * row);
                    stream.copy(out()? + start, x(0)? + at * each * row, len as usize)?;
                }
                Ok(())
            }
            Opcode::Cast => {
                let name = match (ty(0).dtype, p.ty(op.results[0]).dtype) {
                    (DType::F32, DType::Bf16) => "cast_f32_bf16",
                    (DType::Bf16, DType::F32) => "cast_bf16_f32",
                    (a, b) if a == b => return stream.copy(out()?, x(0)?, ty(0).bytes().0 as usize),
                    (a, b) => return failed(format!("no kernel casts {a} to {b}")),
                };
                let args = Args::new().at(x(0)?).at(out()?).long(elements as i64);
                self.kernels.elements(name, elements, args, stream)
            }
            Opcode::Quantize => {
                let args = Args::new().int(ty(0).shape[0] as i64).at(x(0)?).at(out()?);
                let args = args.at(self.at(program, op.results[1])?);
                self.kernels.rows("quantize", (ty(0).shape[0], width(0), ty(0).dtype), args, stream)
            }
            other => failed(format!("{} is no kernel", other.name())),
        }
    }

    /// An op's table plus its embedding, and so with the tables behind it to behind its result.
    pub(super) fn modulate(&mut self, program: usize, op: &Op, tables: u64, stream: &Stream) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let at = |v: ValueId| self.at(program, v);
        let (wide, each) = (p.ty(op.operands[0]).elements(), p.ty(op.results[0]).elements());
        let width = p.ty(op.operands[1]).shape.last().copied().unwrap_or(1);
        let args = Args::new().at(at(op.operands[0])?).at(at(op.operands[1])?).at(at(op.results[0])?);
        let args = args.int(wide as i64).int(width as i64).int(each as i64).long((tables * each) as i64);
        self.kernels.elements("modulation", tables * each, args, stream)
    }

    fn bias_act(
        &mut self,
        ty: &Type,
        (x, bias, out): (u64, u64, u64),
        act: i64,
        stream: &Stream,
    ) -> Done<()> {
        let columns = ty.shape.last().copied().unwrap_or(1) as i64;
        let args = Args::new().at(x).at(bias).at(out).int(columns).int(act).long(ty.elements() as i64);
        self.kernels.elements(by(ty, "bias_act_f32", "bias_act_bf16"), ty.elements(), args, stream)
    }

    fn product(&mut self, program: usize, i: usize, add: Option<usize>, stream: &Stream) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let op = &p.ops[i];
        let into = &p.ops[add.unwrap_or(i)];
        let mut shape = product(&p, op);
        let (x, w) = (self.at(program, op.operands[0])?, self.at(program, op.operands[1])?);
        let (bias, out) = (self.key(program, op, "bias")?, self.at(program, into.results[0])?);
        if few_rows(&p, op) {
            let args =
                Args::new().at(x).at(w).at(bias).at(out).int(shape.rows as i64).int(shape.inner as i64);
            let args = args.int(shape.columns as i64).int(act(op));
            return self.kernels.blocks("few_rows", shape.columns.div_ceil(8), 256, 0, args, stream);
        }
        let residual = match add {
            Some(a) => self.at(program, p.ops[a].operands[0])?,
            None => 0,
        };
        shape.residual = add.is_some();
        let (wanted, shape) = (shape, self.products.form(shape));
        let scales = (self.key(program, op, "x_scale")?, self.key(program, op, "w_scale")?);
        self.products.run(shape, products::At { x, w, bias, residual, out, scales, away: None }, stream)?;
        // What the epilogue does not do follows, in place.
        let f32 = shape.dtype == DType::F32;
        let left_bias = if f32 || wanted.bias != shape.bias { bias } else { 0 };
        let left_act = if f32 || act(op) == SILU || wanted.gelu != shape.gelu { act(op) } else { 0 };
        if left_bias == 0 && left_act == 0 {
            return Ok(());
        }
        self.bias_act(p.ty(into.results[0]), (out, left_bias, out), left_act, stream)
    }

    fn residual_norm(
        &mut self,
        program: usize,
        add: Option<usize>,
        norm: Option<usize>,
        quantize: Option<usize>,
        stream: &Stream,
    ) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let (add, norm) = (add.map(|i| &p.ops[i]), norm.map(|i| &p.ops[i]));
        let quantize = quantize.map(|i| &p.ops[i]);
        let Some(first) = add.or(norm) else { return Ok(()) };
        let ty = p.ty(first.operands[0]);
        let at = |op: Option<&Op>, i: usize| -> Done<u64> {
            op.and_then(|o| o.operands.get(i)).map_or(Ok(0), |v| self.at(program, *v))
        };
        let result = |op: Option<&Op>| op.map_or(Ok(0), |o| self.at(program, o.results[0]));
        let int = |op: Option<&Op>, name: &str| op.and_then(|o| o.int(name));
        let affine = norm.is_some_and(|o| o.opcode == Opcode::LayerNorm);
        let modulated = norm.filter(|_| !affine);
        let table = |v: Option<&ValueId>| -> Done<(u64, u64)> {
            match v {
                Some(v) => Ok((self.at(program, *v)?, p.ty(*v).shape.last().copied().unwrap_or(0))),
                None => Ok((0, 0)),
            }
        };
        let (gates, gate_columns) = table(add.and_then(|o| o.operands.get(2)))?;
        let (m, columns) = table(modulated.and_then(|o| o.operands.get(1)))?;
        let gate = int(add, "gate").unwrap_or(0);
        let frame_rows = int(add, "frame_rows").or(int(norm, "frame_rows")).unwrap_or(1).max(1);
        let eps = norm.and_then(|o| o.float("eps")).unwrap_or(1e-6) as f32;
        let affine = if affine { norm } else { None };
        let args = Args::new().int(ty.shape[0] as i64).at(at(Some(first), 0)?).at(at(add, 1)?);
        let args = args.at(gates).int(gate_columns as i64).int(gate).at(m).int(columns as i64);
        let args = args.int(int(modulated, "shift").unwrap_or(0)).int(int(modulated, "scale").unwrap_or(0));
        let args = args.at(at(affine, 1)?).at(at(affine, 2)?).at(result(add)?);
        let narrow = |i: usize| quantize.map_or(Ok(0), |o| self.at(program, o.results[i]));
        let wide = if quantize.is_some() { 0 } else { result(norm)? };
        let args = args.at(wide).at(narrow(0)?).at(narrow(1)?);
        // Where both say which row is the first, they say the same.
        let places = add.filter(|o| o.operands.len() > 2).or(norm).unwrap_or(first);
        let args = args.int(self.first_row(places, ty) as i64).int(frame_rows).float(eps);
        self.kernels.rows("residual_norm", (ty.shape[0], ty.shape[1], ty.dtype), args, stream)
    }

    fn turned(
        &mut self,
        program: usize,
        scale: Option<usize>,
        rope: Option<usize>,
        write: Option<usize>,
        targets: Option<&Targets>,
        stream: &Stream,
    ) -> Done<()> {
        let own = &self.programs[program];
        let p = std::sync::Arc::clone(&own.program);
        let (Some(first), Some(last)) = (scale.or(rope).or(write), write.or(rope).or(scale)) else {
            return Ok(());
        };
        let ty = p.ty(p.ops[first].operands[0]);
        let (out, row) = match write.map(|i| &p.ops[i]) {
            Some(op) => (self.written_at(program, op)?, self.key(program, op, "row")?),
            None => (self.at(program, p.ops[last].results[0])?, 0),
        };
        let x = p.ops[first].operands[0];
        let args = Args::new().int(ty.shape[0] as i64).at(self.at(program, x)?);
        let args = args.int(self.pitch(program, x) as i64);
        let args = match scale.map(|i| &p.ops[i]) {
            None => args.at(0).at(0).int(0).int(0).float(1.0).float(0.0),
            Some(op) => {
                let own_sum = op.opcode == Opcode::RmsNorm;
                let w = self.at(program, op.operands[if own_sum { 1 } else { 2 }])?;
                let (sums, columns) = match own_sum {
                    true => (0, 0),
                    false => (self.at(program, op.operands[1])?, p.ty(op.operands[1]).shape[1]),
                };
                let whole = op.int("width").unwrap_or(ty.shape[1] as i64) as f32;
                let args = args.at(w).at(sums).int(columns as i64).int(op.int("col").unwrap_or(0));
                args.float(whole).float(op.float("eps").unwrap_or(1e-6) as f32)
            }
        };
        let args = args.at(out).at(row);
        let args = match rope.and_then(|i| own.turns.iter().find(|t| t.op == i)) {
            None => args.int(0).at(0).at(0).at(0).int(0).int(1).int(1).int(0),
            Some(Turns { head, grid, stride, by_frame, by_row, by_column, .. }) => {
                let area = own.area.at();
                let args = args.int(*head as i64).at(area + by_frame).at(area + by_row).at(area + by_column);
                let row = rope.map_or(0, |i| self.first_row(&p.ops[i], ty));
                let args = args.int(row as i64).int(grid[0] as i64).int(grid[1] as i64);
                args.int(i64::from(*stride != 0))
            }
        };
        let args = args.words(targets.copied().unwrap_or_default().words());
        self.kernels.rows("rms_rope", (ty.shape[0], ty.shape[1], ty.dtype), args, stream)
    }

    fn buffer_of(&self, program: usize, op: &Op) -> Done<u64> {
        let own = op.buffer.and_then(|b| self.programs[program].buffers.get(b.0 as usize));
        own.map(|i| self.buffers[*i].memory.at()).ok_or_else(|| Failed("a write to no buffer".into()))
    }

    /// Where the first row that an op writes would lie, did the call not say how many come before.
    pub(super) fn written_at(&self, program: usize, op: &Op) -> Done<u64> {
        let ty = self.programs[program].program.ty(op.operands[0]);
        let row_bytes = ty.shape[1..].iter().product::<u64>() * ty.dtype.bytes();
        Ok(self.buffer_of(program, op)? + op.int("first").unwrap_or(0) as u64 * row_bytes)
    }

    /// Rows into a buffer, from a row that the call says.
    fn write(&mut self, program: usize, op: &Op, stream: &Stream) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let ty = p.ty(op.operands[0]);
        let (from, to) = (self.at(program, op.operands[0])?, self.written_at(program, op)?);
        let row_bytes = ty.shape[1..].iter().product::<u64>() * ty.dtype.bytes();
        let Some(row) = op.key("row") else { return stream.copy(to, from, ty.bytes().0 as usize) };
        let (name, word) = match row_bytes {
            b if b.is_multiple_of(16) => ("put_rows_16", 16),
            b if b.is_multiple_of(4) => ("put_rows_4", 4),
            _ => ("put_rows_2", 2),
        };
        let n = ty.bytes().0 / word;
        let args = Args::new().at(from).at(to).at(self.at(program, row)?);
        let args = args.long((row_bytes / word) as i64).long(n as i64);
        self.kernels.elements(name, n.div_ceil(PUT), args, stream)
    }

    fn attend(&mut self, program: usize, op: &Op, targets: Option<&Targets>, stream: &Stream) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let at = |i: usize| self.at(program, op.operands[i]);
        let (q, k, v, out) = (at(0)?, at(1)?, at(2)?, self.at(program, op.results[0])?);
        let (ty, bias) = (p.ty(op.operands[0]), self.key(program, op, "bias")?);
        let parts = pieces(&p, op);
        if ty.dtype != DType::Bf16 || !parts.iter().all(|(s, _)| s.fits()) {
            let (s, _) = attention_shape(&p, op);
            let rows = op.ints("bias_rows").unwrap_or(&[0, 0]);
            let args = Args::new().at(q).at(k).at(v).at(bias).int(rows[0]).int(rows[1]).at(out);
            let args = args.int(s.queries as i64).int(s.keys as i64).int(s.heads as i64).int(s.head as i64);
            let name = by(ty, "attention_f32", "attention_bf16");
            let shared = (4 * s.head * 4) as u32;
            let args = args.float(1.0 / (s.head as f32).sqrt());
            return self.kernels.blocks(name, (s.queries * s.heads).div_ceil(4), 128, shared, args, stream);
        }
        if let [(shape, _)] = parts[..] {
            return self.attention(shape, attention::At { q, k, v, out, sums: 0 }, targets, stream);
        }
        // A bias that is the same for a range of keys is a weight of that range: each range by itself, then all as one.
        let scratch = self.behind_slots()?;
        let (whole, row) = (ty.bytes().0, ty.shape[1] * ty.dtype.bytes());
        let sums = scratch + (MOST_PIECES as u64) * whole.next_multiple_of(ALIGNMENT);
        let rows = op.ints("bias_rows").unwrap_or(&[0, 0]);
        let (mut biased, heads) = (0, parts[0].0.heads);
        for (i, (shape, keys)) in parts.iter().enumerate() {
            if keys.start == rows[0] as u64 && keys.end == rows[1] as u64 {
                biased = i;
            }
            let at = attention::At {
                q,
                k: k + keys.start * row,
                v: v + keys.start * row,
                out: scratch + i as u64 * whole,
                sums: sums + i as u64 * heads * ty.shape[0] * 4,
            };
            self.attention(*shape, at, None, stream)?;
        }
        let args = Args::new().at(scratch).at(sums).at(bias).int(biased as i64).int(parts.len() as i64);
        let args = args.int(heads as i64).int(parts[0].0.head as i64).long(ty.shape[0] as i64).at(out);
        self.kernels.elements("merge_bf16", ty.elements(), args, stream)
    }

    fn by_flash(&self, shape: &attention::Shape) -> bool {
        self.flash.is_some() && Flash::fits(shape)
    }

    /// Whether attention is one launch of the kernel of this crate.
    fn by_one_flash(&self, p: &Program, op: &Op) -> bool {
        let half = p.ty(op.operands[0]).dtype == DType::Bf16;
        half && matches!(&pieces(p, op)[..], [(shape, _)] if shape.fits() && self.by_flash(shape))
    }

    fn attention(
        &mut self,
        shape: attention::Shape,
        at: attention::At,
        targets: Option<&Targets>,
        stream: &Stream,
    ) -> Done<()> {
        match &self.flash {
            Some(flash) if Flash::fits(&shape) => flash.run(shape, at, targets, stream),
            _ => self.attentions.run(shape, at, stream),
        }
    }

    fn put_out(&self, program: usize, op: &Op) -> Done<u64> {
        let name = format!("{program}/{}", op.name.as_deref().unwrap_or_default());
        let o = self.outputs.get(&name).ok_or_else(|| Failed(format!("no room for output {name}")))?;
        Ok(self.programs[program].put_out.at() + o.offset as u64)
    }

    /// Number of the first row here of a value of an op, in the whole of which it may be a piece.
    fn first_row(&self, op: &Op, ty: &Type) -> u64 {
        let here = ty.layout.ranges(&ty.shape, &self.seat.mesh, self.seat.coord()).first().map_or(0, |r| r.0);
        here + op.int("first").unwrap_or(0) as u64
    }
}

const SILU: i64 = 1;
const GELU: i64 = 2;

/// What a product ends with; 0 for nothing.
pub(super) fn act(op: &Op) -> i64 {
    match op.str("act") {
        Some("silu") => SILU,
        Some("gelu_tanh") => GELU,
        _ => 0,
    }
}

/// A kernel by the dtype of its first operand.
fn by(ty: &Type, single: &'static str, half: &'static str) -> &'static str {
    if ty.dtype == DType::Bf16 { half } else { single }
}

/// A product by what the program says of it, without a residual.
pub(super) fn product(p: &Program, op: &Op) -> Shape {
    let (x, w) = (p.ty(op.operands[0]), p.ty(op.operands[1]));
    let fused = x.dtype != DType::F32;
    Shape {
        rows: x.shape[0],
        inner: x.shape[1],
        columns: w.shape[0],
        dtype: x.dtype,
        bias: fused && op.key("bias").is_some(),
        gelu: fused && act(op) == GELU,
        residual: false,
    }
}

fn attention_shape(p: &Program, op: &Op) -> (attention::Shape, u64) {
    let (q, k) = (p.ty(op.operands[0]), p.ty(op.operands[1]));
    let head = op.int("head_dim").unwrap_or(1).max(1) as u64;
    let heads = q.shape[1] / head;
    (attention::Shape { queries: q.shape[0], keys: k.shape[0], heads, head, sums: false }, k.shape[0])
}

/// The ranges of keys that attention runs over by itself: all of them, or what stands before, among and after the rows
/// that a bias is added to.
fn pieces(p: &Program, op: &Op) -> Vec<(attention::Shape, Range<u64>)> {
    let (whole, keys) = attention_shape(p, op);
    let Some(&[from, to]) = op.ints("bias_rows").filter(|_| op.key("bias").is_some()) else {
        return vec![(whole, 0..keys)];
    };
    let (from, to) = (from as u64, to as u64);
    let piece = |r: Range<u64>| (attention::Shape { keys: r.end - r.start, sums: true, ..whole }, r);
    [0..from, from..to, to..keys].into_iter().filter(|r| !r.is_empty()).map(piece).collect()
}

/// The part of a value that a range of one dim covers.
fn take(stream: &Stream, (to, from): (u64, u64), ty: &Type, dim: usize, range: Range<u64>) -> Done<()> {
    let run = ty.shape[dim + 1..].iter().product::<u64>() * ty.dtype.bytes();
    let rows = ty.shape[..dim].iter().product::<u64>();
    let (whole, part) = ((ty.shape[dim] * run) as usize, ((range.end - range.start) * run) as usize);
    stream.copy_rows((to, part), (from + range.start * run, whole), part, rows as usize)
}
