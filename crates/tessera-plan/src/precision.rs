//! Which values of a logical program are bf16 or e4m3: a pass over it, before it is cut.
//!
//! Under `dtype = "bf16"`:
//!
//! - f32 stays what few numbers carry or what errors would add up in over steps and chunks: calls and inputs, the
//!   conditioning (what is computed from calls alone: `time_embed`, the products behind it, `modulation`), latent buffers
//!   (every buffer but `kv.*` and `cross.*`), `renoise`, `to_x0`, pixels, outputs, the vectors of norms, sums of squares.
//! - bf16 are the operands, biases and results of every other product, and the buffers `kv.*` and `cross.*`.
//! - An op that works row by row gives the dtype of its first operand, and takes the others so, its norm vectors and
//!   per-frame columns aside.
//! - Where a value meets an op that wants it otherwise stands one `cast`, shared by all who want the same. A value that
//!   becomes narrower does so where it is made, one that becomes wider where it is read: a stage sends the narrower.
//!
//! Under `dtype = "fp8"` it is the same, but for products of blocks on values made in blocks: their operands are e4m3 with a
//! scale per row. What they read is quantized once, for all who read it, where it is made; the weight is loaded so. What stands
//! before and after the blocks stays bf16, and so do keys and values of the prompt, made once a scene. Under `megatron` products
//! cut by input features stay bf16, on any number of ranks: no rank sees the largest of a row there.
//!
//! Weights keep their names, and all ops but casts their order: with casts and scales dropped and every dtype f32 it is the
//! program that was. Collectives come later and carry what their operand is.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Builder, DType, Kind, Op, Opcode, Program, Type, ValueId};

use crate::lower::T0606;
use crate::{DtypePolicy, Strategy};

/// The program under a dtype policy, to be cut by a strategy; itself under f32.
///
/// # Errors
/// T0606 where an op takes no operands of the dtypes that the policy gives them.
pub fn apply(p: &Program, dtype: DtypePolicy, strategy: Strategy) -> Result<Program, Diagnostics> {
    match dtype {
        DtypePolicy::F32 => Ok(p.clone()),
        DtypePolicy::Bf16 => Pass::new(p).emit(),
        DtypePolicy::Fp8 => {
            let mut pass = Pass::new(p);
            pass.quantize(strategy);
            pass.emit()
        }
    }
}

/// What an operand has to be; none for what it is.
type Want = Option<DType>;

struct Pass<'a> {
    p: &'a Program,
    defs: Vec<Option<usize>>,
    readers: Vec<Vec<usize>>,
    /// Values that are computed from calls alone.
    conditioning: Vec<bool>,
    /// Dtype of each value after the pass.
    dtypes: Vec<DType>,
    /// Weights that are loaded in e4m3 with scales.
    quantized: Vec<bool>,
}

impl<'a> Pass<'a> {
    fn new(p: &'a Program) -> Pass<'a> {
        let mut pass = Pass {
            p,
            defs: p.definitions(),
            readers: p.readers(),
            conditioning: vec![false; p.values.len()],
            dtypes: p.values.iter().map(|v| v.ty.dtype).collect(),
            quantized: vec![false; p.values.len()],
        };
        for op in &p.ops {
            pass.visit(op);
        }
        // A weight is loaded as all who read it want it.
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let v = op.results[0];
            let mut wants = pass.readers[v.0 as usize].iter().map(|i| pass.wants_of(&p.ops[*i], v));
            if wants.next() == Some(Some(DType::Bf16)) && wants.all(|w| w == Some(DType::Bf16)) {
                pass.dtypes[v.0 as usize] = DType::Bf16;
            }
        }
        pass
    }

    fn visit(&mut self, op: &Op) {
        let Some(result) = op.results.first().map(|r| r.0 as usize) else { return };
        self.conditioning[result] = match op.opcode.row().kind {
            Kind::Source => op.opcode == Opcode::Call,
            Kind::Compute => {
                let from_calls = |v: &ValueId| self.conditioning[v.0 as usize];
                op.operands.iter().any(from_calls) && inputs(op).all(|v| from_calls(&v) || self.is_weight(v))
            }
            _ => false,
        };
        let first = op.operands.first().map_or(DType::F32, |v| self.dtypes[v.0 as usize]);
        let is = match op.opcode {
            Opcode::Matmul if !self.conditioning[result] => DType::Bf16,
            Opcode::CacheRead => op.buffer.map_or(first, |b| buffer_type(self.p, b).dtype),
            Opcode::Cast => self.dtypes[result],
            _ if op.opcode.row().kind == Kind::Source => self.dtypes[result],
            _ if by_rows(op.opcode) => first,
            _ => DType::F32,
        };
        self.dtypes[result] = is;
    }

    /// Has the weights of blocks' own products loaded in e4m3.
    fn quantize(&mut self, strategy: Strategy) {
        for weight in self.p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let v = weight.results[0];
            let cut_by_inputs = strategy == Strategy::Megatron && weight.str("part") == Some("row");
            let plain = !cut_by_inputs && !weight.attrs.contains_key("load");
            let readers = &self.readers[v.0 as usize];
            let reads = |i: &usize| self.is_of_a_block(&self.p.ops[*i]) && self.p.ops[*i].operands[1] == v;
            self.quantized[v.0 as usize] = plain && !readers.is_empty() && readers.iter().all(reads);
        }
    }

    /// Whether an op is a rounded product of a block on a value that a block made.
    fn is_of_a_block(&self, op: &Op) -> bool {
        let in_block = |op: &Op| op.str("at").is_some_and(|at| at.starts_with("block."));
        let maker = op.operands.first().and_then(|x| self.defs[x.0 as usize]).map(|d| &self.p.ops[d]);
        op.opcode == Opcode::Matmul
            && in_block(op)
            && maker.is_some_and(in_block)
            && self.want(op, 0) == Some(DType::Bf16)
    }

    fn is_weight(&self, v: ValueId) -> bool {
        self.defs[v.0 as usize].is_some_and(|d| self.p.ops[d].opcode == Opcode::Weight)
    }

    /// What an op wants its positional operand `at` to be.
    fn want(&self, op: &Op, at: usize) -> Want {
        let first = || self.dtypes[op.operands[0].0 as usize];
        match op.opcode {
            Opcode::Matmul => Some(match op.results.first() {
                Some(r) => self.dtypes[r.0 as usize],
                None => DType::F32,
            }),
            Opcode::CacheWrite => op.buffer.map(|b| buffer_type(self.p, b).dtype),
            Opcode::Cast => None,
            o if by_rows(o) && at == 0 => None,
            // Vectors and columns beside rows.
            Opcode::LayerNorm | Opcode::RmsNorm | Opcode::NormModulate => Some(DType::F32),
            Opcode::RmsScale => Some(DType::F32),
            Opcode::GateResidual if at == 2 => Some(DType::F32),
            Opcode::RowSquareSum if at == 0 => None,
            Opcode::RowSquareSum => Some(first()),
            o if by_rows(o) => Some(first()),
            _ => Some(DType::F32),
        }
    }

    /// What an op wants a value to be that it reads somewhere.
    fn wants_of(&self, op: &Op, v: ValueId) -> Want {
        match op.operands.iter().position(|o| *o == v) {
            Some(at) => self.want(op, at),
            None => self.want_keyed(op),
        }
    }

    /// What an op wants a keyed operand to be: a product's bias is of its result's dtype, the others are calls.
    fn want_keyed(&self, op: &Op) -> Want {
        if op.opcode == Opcode::Matmul { self.want(op, 0) } else { None }
    }

    fn emit(self) -> Result<Program, Diagnostics> {
        let p = self.p;
        let mut out = Out {
            b: Builder::logical(&p.name),
            of: BTreeMap::new(),
            casts: BTreeMap::new(),
            scaled: BTreeMap::new(),
        };
        for i in 0..p.buffers.len() {
            let b = tessera_ir::BufferId(i as u32);
            out.b.buffer(&p.buffer(b).name, buffer_type(p, b));
        }
        for op in &p.ops {
            self.emit_op(op, &mut out);
        }
        out.b.finish().map_err(|es| {
            let says = |message: String| {
                Diagnostic::error(&T0606, message)
                    .at(format!("@{}", p.name), "this phase, in dtypes of its own")
            };
            es.into_iter().map(|e| says(e.message).note(e.code.title)).collect()
        })
    }

    fn emit_op(&self, op: &Op, out: &mut Out) {
        if op.opcode == Opcode::Weight && self.quantized[op.results[0].0 as usize] {
            return self.load_quantized(op, out);
        }
        let mut operands: Vec<ValueId> = op
            .operands
            .iter()
            .enumerate()
            .map(|(at, v)| self.as_wanted(*v, self.want(op, at), out))
            .collect();
        let mut keyed: Vec<(&'static str, ValueId)> =
            op.keyed.iter().map(|(k, v)| (*k, self.as_wanted(*v, self.want_keyed(op), out))).collect();
        if let (Opcode::Matmul, [x, w]) = (op.opcode, &op.operands[..])
            && self.quantized[w.0 as usize]
            && let Some([w, w_scale]) = out.scaled.get(w).copied()
        {
            let [x, x_scale] = self.as_quantized(*x, operands[0], out);
            operands = vec![x, w];
            keyed.extend([("x_scale", x_scale), ("w_scale", w_scale)]);
        }
        let after: Vec<ValueId> = op.after.iter().filter_map(|v| out.of.get(v).copied()).collect();
        let b = &mut out.b;
        b.attrs(op.attrs.clone()).stream(&self.p.streams[op.stream.0 as usize]);
        for (k, v) in keyed {
            b.key(k, v);
        }
        for event in after {
            b.after(event);
        }
        let name = op.name.as_deref().unwrap_or_default();
        let result = op.results.first().copied();
        if let Some(r) = result {
            b.label(&self.p.value(r).name);
        }
        let ty = |r: ValueId| Type { dtype: self.dtypes[r.0 as usize], ..self.p.ty(r).clone() };
        let made = match (op.opcode, result, op.buffer) {
            (Opcode::Weight, Some(r), _) => b.weight(name, ty(r)),
            (Opcode::Input, Some(r), _) => b.input(name, ty(r)),
            (Opcode::Call, Some(r), _) => b.call(name, ty(r)),
            (Opcode::CacheRead, _, Some(buffer)) => b.read(buffer),
            (Opcode::CacheWrite, _, Some(buffer)) => return b.write(buffer, operands[0]),
            (Opcode::Output, ..) => return b.output(name, operands[0]),
            _ => b.op(op.opcode, &operands),
        };
        out.of.extend(result.map(|r| (r, made)));
    }

    /// The numbers of a weight and their scales.
    fn load_quantized(&self, op: &Op, out: &mut Out) {
        let (name, v) = (op.name.as_deref().unwrap_or_default(), op.results[0]);
        let label = &self.p.value(v).name;
        let (of, rows) = (self.p.ty(v), self.p.ty(v).shape[0]);
        let mut load = |load: &str, label: &str, ty| {
            out.b.attrs(op.attrs.clone()).attr("load", load).label(label).weight(name, ty)
        };
        let numbers = load("e4m3", label, Type { dtype: DType::E4m3, ..of.clone() });
        let scales = load("e4m3.scale", &format!("{label}.scale"), Type::new(DType::F32, [rows]));
        out.of.insert(v, numbers);
        out.scaled.insert(v, [numbers, scales]);
    }

    /// A value that products read in e4m3, with the scales of its rows: once, where it is made. `rounded` is it in bf16.
    fn as_quantized(&self, v: ValueId, rounded: ValueId, out: &mut Out) -> [ValueId; 2] {
        if let Some(made) = out.scaled.get(&v) {
            return *made;
        }
        if let Some(at) = self.defs[v.0 as usize].and_then(|d| self.p.ops[d].str("at")) {
            out.b.attr("at", at);
        }
        let made = out.b.label(&format!("{}.e4m3", self.p.value(v).name)).quantize(rounded);
        out.scaled.insert(v, made);
        made
    }

    /// The value as an op wants it: itself, or its one cast.
    fn as_wanted(&self, v: ValueId, want: Want, out: &mut Out) -> ValueId {
        let is = self.dtypes[v.0 as usize];
        let Some(made) = out.of.get(&v).copied() else { return v };
        let Some(to) = want.filter(|to| *to != is && !matches!(is, DType::I64 | DType::Event)) else {
            return made;
        };
        if let Some(cast) = out.casts.get(&(v, to)) {
            return *cast;
        }
        let label = format!("{}.{to}", self.p.value(v).name);
        if let Some(at) = self.place_of_cast(v, to) {
            out.b.attr("at", at);
        }
        let cast = out.b.label(&label).attr("to", to.name()).op(Opcode::Cast, &[made]);
        out.casts.insert((v, to), cast);
        cast
    }

    /// Where a cast stands: beside what makes the value or beside those who want it, wherever fewer bytes travel. A source
    /// travels nowhere.
    fn place_of_cast(&self, v: ValueId, to: DType) -> Option<&'a str> {
        let maker = self.defs[v.0 as usize].map(|d| &self.p.ops[d]);
        let is_source =
            maker.is_some_and(|m| m.opcode.row().kind == Kind::Source && m.opcode != Opcode::CacheRead);
        let made_at = maker.and_then(|m| m.str("at"));
        let narrower = to.bytes() < self.dtypes[v.0 as usize].bytes();
        if narrower && !is_source {
            return made_at;
        }
        let readers = self.readers[v.0 as usize].iter().map(|i| &self.p.ops[*i]);
        let mut places = readers.filter(|o| self.wants_of(o, v) == Some(to)).map(|o| o.str("at"));
        let first = places.next().flatten();
        match places.all(|at| at == first) {
            true => first,
            false if is_source => Some("all"),
            false => made_at,
        }
    }
}

/// The program that is made, and what became of each value.
struct Out {
    b: Builder,
    of: BTreeMap<ValueId, ValueId>,
    casts: BTreeMap<(ValueId, DType), ValueId>,
    /// Values in e4m3, and their scales.
    scaled: BTreeMap<ValueId, [ValueId; 2]>,
}

/// Ops that give the dtype of their first operand, whatever it is.
fn by_rows(op: Opcode) -> bool {
    use Opcode as O;
    matches!(
        op,
        O::BiasAct
            | O::Add
            | O::Silu
            | O::LayerNorm
            | O::NormModulate
            | O::GateResidual
            | O::RmsNorm
            | O::RmsScale
            | O::Rope
            | O::Attention
            | O::Softmax
            | O::Dot
            | O::TakeRows
            | O::TakeShard
            | O::Pad
            | O::Compact
    )
}

/// A buffer's type: what blocks keep of earlier tokens is as their products give it.
fn buffer_type(p: &Program, b: tessera_ir::BufferId) -> Type {
    let buffer = p.buffer(b);
    let of_blocks = ["kv.", "cross."].iter().any(|family| buffer.name.starts_with(family));
    let dtype = if of_blocks { DType::Bf16 } else { buffer.ty.dtype };
    Type { dtype, ..buffer.ty.clone() }
}

/// What an op reads, without events.
fn inputs(op: &Op) -> impl Iterator<Item = ValueId> + '_ {
    op.operands.iter().copied().chain(op.keyed.iter().map(|(_, v)| *v))
}
