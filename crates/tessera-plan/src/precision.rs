//! Chooses which values of a logical program are bf16 or e4m3: a transformation before the program
//! is sharded.
//!
//! Under `dtype = "bf16"`:
//!
//! - f32 remain values that are small, or in which rounding errors would accumulate over steps and
//!   chunks: calls and inputs, the conditioning (values computed from calls alone: `time_embed`,
//!   the matmuls after it, `modulation`), latent buffers (every buffer except those
//!   named below), `renoise`, `to_x0`, pixels, outputs, the vectors of norms, square sums.
//! - f32 is the matmul whose result chooses experts, because a rounding there would choose others, and so are
//!   the numbers of experts, slots and counts.
//! - bf16 are the operands, biases and results of every other matmul and of every convolution, and the
//!   buffers `kv.*`, `kv_all.*`, `latent.*`, `cross.*` and `vae.*`.
//! - A table whose rows an `embed` takes is stored in bf16, and its rows are f32. So is therefore the
//!   sum of a text encoder's layers, in which roundings would accumulate.
//! - An op that works row by row has the dtype of its first operand and requires it of its other
//!   operands, except norm vectors and per-frame columns.
//! - If an op requires another dtype of a value, one `cast` follows, shared by all ops that require
//!   the same dtype. A narrowing cast runs where the value is produced and a widening one where it
//!   is read: a stage sends the narrower value.
//!
//! `dtype = "fp8"` differs only for matmuls of blocks on values produced in blocks: their operands
//! are e4m3 with one scale per row. An activation is quantized once, for all its readers, where it
//! is produced; the weight is loaded in e4m3. Ops before and after the blocks stay bf16, and so do
//! keys and values of the prompt, which are computed once per scene. Under `megatron` row-parallel
//! matmuls stay bf16 on any number of ranks: no rank has the maximum of a whole row there.
//!
//! A fast decoder differs for 3×3×3 convolutions of a norm's SiLU: their frames, history and weights are
//! e4m3. The frames have the scale 1, because a norm limits its results to the square root of the channels
//! times its weight, far from both ends of the range of e4m3. The weights have a scale per channel of the
//! result. Only the bias and the sum with a residual stay bf16.
//!
//! A program of arrays has no blocks. There, every matmul whose result chooses no experts reads e4m3 under `dtype = "fp8"`. A
//! second operand that is no weight is quantized as the first one is. Where a matmul has terms of a sum on several ranks, they
//! exchange shards of its first operand to quantize whole rows, so that scales do not depend on the mesh.
//!
//! Weights keep their names, and all ops except casts keep their order: without casts and scales
//! and with every dtype f32 the result equals the original program. Lowering adds collectives
//! later; each has the dtype of its operand.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::op_traits::ResultDtype;
use tessera_ir::{
    BufferId, Builder, DType, Op, OpKind, OpView, Opcode, Program, Type, ValueId, WeightLoad, views,
};

use crate::codes::T0606;
use crate::{DtypePolicy, Strategy};

/// Applies a dtype policy to a program, for a strategy; returns a copy under f32.
///
/// # Errors
/// Returns T0606 if an op does not accept operands of the dtypes that the policy assigns.
pub fn apply_dtype_policy(
    p: &Program,
    dtype: DtypePolicy,
    strategy: Strategy,
    decoder: DecoderPrecision,
) -> Result<Program, Diagnostics> {
    match dtype {
        DtypePolicy::F32 => Ok(p.clone()),
        DtypePolicy::Bf16 => DtypePass::new(p, decoder).emit_program(),
        DtypePolicy::Fp8 => {
            let mut pass = DtypePass::new(p, decoder);
            pass.select_quantized_weights(strategy);
            pass.emit_program()
        }
    }
}

/// Applies a dtype policy to a program of arrays; returns a copy under f32.
///
/// # Errors
/// Returns T0606 if an op does not accept operands of the dtypes that the policy assigns.
pub fn apply_dtype_policy_to_arrays(p: &Program, dtype: DtypePolicy) -> Result<Program, Diagnostics> {
    if dtype == DtypePolicy::F32 {
        return Ok(p.clone());
    }
    let mut pass = DtypePass::new(p, DecoderPrecision::Exact);
    if dtype == DtypePolicy::Fp8 {
        pass.has_blocks = false;
        pass.select_quantized_weights(Strategy::Ulysses);
    }
    pass.emit_program()
}

/// The precision of a decoder's convolutions under a policy other than f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DecoderPrecision {
    /// All convolutions are bf16.
    Exact,
    /// 3×3×3 convolutions of a norm's SiLU are e4m3.
    Fast,
}

/// Multiple of channels that a cell in e4m3 has, so that cells begin at 16 bytes.
const E4M3_CHANNELS: u64 = 16;

/// The dtype that an op requires of an operand; `None` accepts any.
type RequiredDtype = Option<DType>;

struct DtypePass<'a> {
    program: &'a Program,
    defs: Vec<Option<usize>>,
    readers: Vec<Vec<usize>>,
    /// Whether each value is conditioning, which stays f32: it is computed from call scalars and
    /// weights alone.
    conditioning: Vec<bool>,
    /// Dtype of each value after the transformation.
    dtypes: Vec<DType>,
    /// Whether each value is a weight that is loaded in e4m3 with scales.
    quantized: Vec<bool>,
    /// Whether each value is the SiLU of a norm that convolutions read in e4m3.
    fast_frames: Vec<bool>,
    /// Whether each buffer is the history of such frames.
    fast_histories: Vec<bool>,
    /// Whether matmuls in e4m3 are those of blocks alone.
    has_blocks: bool,
}

impl<'a> DtypePass<'a> {
    fn new(p: &'a Program, decoder: DecoderPrecision) -> DtypePass<'a> {
        let mut pass = DtypePass {
            program: p,
            defs: p.defining_ops(),
            readers: p.value_readers(),
            conditioning: vec![false; p.values.len()],
            dtypes: p.values.iter().map(|v| v.ty.dtype).collect(),
            quantized: vec![false; p.values.len()],
            fast_frames: vec![false; p.values.len()],
            fast_histories: vec![false; p.buffers.len()],
            has_blocks: true,
        };
        if decoder == DecoderPrecision::Fast {
            pass.select_fast_convolutions();
        }
        for op in &p.ops {
            pass.infer_dtype(op);
        }
        // A weight is loaded in bf16 if all its readers require bf16.
        for op in p.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let v = op.results[0];
            let mut wants = pass.readers[v.0 as usize].iter().map(|i| pass.required_dtype(&p.ops[*i], v));
            if wants.next() == Some(Some(DType::Bf16)) && wants.all(|w| w == Some(DType::Bf16)) {
                pass.dtypes[v.0 as usize] = DType::Bf16;
            }
        }
        pass
    }

    fn infer_dtype(&mut self, op: &Op) {
        let Some(result) = op.results.first().map(|r| r.0 as usize) else { return };
        self.conditioning[result] = match op.opcode.table_row().kind {
            OpKind::Source => op.opcode == Opcode::Call,
            OpKind::Compute => {
                let from_calls = |v: &ValueId| self.conditioning[v.0 as usize];
                op.operands.iter().any(from_calls)
                    && data_operands(op).all(|v| from_calls(&v) || self.is_weight(v))
            }
            _ => false,
        };
        let first = op.operands.first().map_or(DType::F32, |v| self.dtypes[v.0 as usize]);
        let is = match op.opcode.table_row().traits.result_dtype {
            ResultDtype::Matmul if self.conditioning[result] || self.chooses_experts(result) => DType::F32,
            ResultDtype::Matmul => DType::Bf16,
            _ if self.fast_frames[result] => DType::E4m3,
            ResultDtype::Buffer => op.buffer.map_or(first, |b| self.buffer_type(b).dtype),
            ResultDtype::Stated => self.dtypes[result],
            ResultDtype::FirstOperand if op.opcode == Opcode::ExpertPack => DType::Bf16,
            ResultDtype::FirstOperand => first,
            ResultDtype::Sums => DType::F32,
            ResultDtype::Fixed(dtype) => dtype,
        };
        self.dtypes[result] = is;
    }

    /// Returns whether experts are chosen by a value, given by index, or by what is added to it or multiplied by it.
    fn chooses_experts(&self, value: usize) -> bool {
        let follow = |op: &Op| op.results.first().is_some_and(|r| self.chooses_experts(r.0 as usize));
        self.readers[value].iter().map(|i| &self.program.ops[*i]).any(|op| match op.opcode {
            Opcode::TopKExperts | Opcode::ExpertWeights => true,
            Opcode::ExpertDistance | Opcode::ExpertDistanceGradient => true,
            Opcode::ExpertLocality | Opcode::BiasAct | Opcode::Add | Opcode::Mul => follow(op),
            _ => false,
        })
    }

    /// Selects the convolutions of a fast decoder, with their weights and histories.
    fn select_fast_convolutions(&mut self) {
        let p = self.program;
        for op in &p.ops {
            let Some(v) = self.view_fast_convolution(op) else { continue };
            self.fast_frames[v.x.0 as usize] = true;
            self.quantized[v.w.0 as usize] = true;
            let history = v.history.and_then(|h| self.defs[h.0 as usize]).and_then(|d| p.ops[d].buffer);
            history.into_iter().for_each(|b| self.fast_histories[b.0 as usize] = true);
        }
    }

    /// Returns an op as a convolution of a fast decoder, if it is one: of 3×3×3 over the SiLU of a norm, which
    /// nothing else computes with, with a kernel in e4m3 for its channels.
    fn view_fast_convolution(&self, op: &Op) -> Option<views::Conv3d> {
        let Ok(OpView::Conv3d(v)) = op.view() else { return None };
        let p = self.program;
        let maker = |v: ValueId| self.defs[v.0 as usize].map(|d| &p.ops[d]);
        let silu = maker(v.x).filter(|op| op.opcode == Opcode::Silu)?;
        maker(*silu.operands.first()?).filter(|op| op.opcode == Opcode::RmsNorm)?;
        let is_own_weight = self.readers[v.w.0 as usize].len() == 1
            && maker(v.w).is_some_and(|op| op.weight_load() == Some(WeightLoad::Conv));
        let channels = [p.type_of(v.x).shape.last(), p.type_of(op.results[0]).shape.last()];
        let fits = channels.into_iter().flatten().all(|c| c.is_multiple_of(E4M3_CHANNELS));
        let moves_or_reads = |i: &usize| {
            let reader = &p.ops[*i];
            matches!(reader.opcode, Opcode::TakeRows | Opcode::CacheWrite) || std::ptr::eq(reader, op)
        };
        let is_alone = self.readers[v.x.0 as usize].iter().all(moves_or_reads);
        (v.kernel == [3, 3, 3] && v.stride.is_none() && is_own_weight && fits && is_alone).then_some(v)
    }

    /// Returns a buffer's type: the caches of blocks, and the histories of convolutions, have the dtype of
    /// the ops that read them.
    fn buffer_type(&self, b: BufferId) -> Type {
        let buffer = self.program.buffer(b);
        let is_operand = ["kv.", "kv_all.", "latent.", "cross.", "vae."]
            .iter()
            .any(|family| buffer.name.starts_with(family));
        let dtype = match is_operand {
            _ if self.fast_histories[b.0 as usize] => DType::E4m3,
            true => DType::Bf16,
            false => buffer.ty.dtype,
        };
        Type { dtype, ..buffer.ty.clone() }
    }

    /// Selects the weights that are loaded in e4m3: those of the matmuls of blocks.
    fn select_quantized_weights(&mut self, strategy: Strategy) {
        for weight in self.program.ops.iter().filter(|o| o.opcode == Opcode::Weight) {
            let v = weight.results[0];
            let cut_by_inputs = strategy == Strategy::Megatron && weight.part_hint() == Some("row");
            let plain = !cut_by_inputs && weight.weight_load().is_none();
            let readers = &self.readers[v.0 as usize];
            let reads = |i: &usize| {
                self.is_block_matmul(&self.program.ops[*i]) && self.program.ops[*i].operands[1] == v
            };
            self.quantized[v.0 as usize] |= plain && !readers.is_empty() && readers.iter().all(reads);
        }
    }

    /// Returns whether an op is a bf16 matmul of a block on a value that a block produces.
    fn is_block_matmul(&self, op: &Op) -> bool {
        let in_block =
            |op: &Op| !self.has_blocks || op.placement_hint().is_some_and(|at| at.starts_with("block."));
        let maker = op.operands.first().and_then(|x| self.defs[x.0 as usize]).map(|d| &self.program.ops[d]);
        op.opcode == Opcode::Matmul
            && in_block(op)
            && maker.is_some_and(in_block)
            && self.operand_dtype(op, 0) == Some(DType::Bf16)
    }

    fn is_weight(&self, v: ValueId) -> bool {
        self.defs[v.0 as usize].is_some_and(|d| self.program.ops[d].opcode == Opcode::Weight)
    }

    /// Returns the dtype that an op requires of its positional operand `at`.
    fn operand_dtype(&self, op: &Op, at: usize) -> RequiredDtype {
        let first = || self.dtypes[op.operands[0].0 as usize];
        let row = op.opcode.table_row();
        match (op.opcode, at) {
            // The rows of a table of words are copied, so that storing them in bf16 rounds once. Rows of a value
            // keep its dtype.
            (Opcode::Embed, 1) => return self.is_weight(op.operands[1]).then_some(DType::Bf16),
            // Rounding before the copies to slots rounds each token once.
            (Opcode::ExpertPack, 0) => return Some(DType::Bf16),
            // Experts, slots, counts and weights of choices.
            (Opcode::ExpertPack | Opcode::ExpertCombine, 1..) | (Opcode::GroupedMatmul, 2) => {
                return Some(DType::F32);
            }
            _ => {}
        }
        match row.traits.result_dtype {
            // The weights of a fast convolution are replaced where it is emitted.
            ResultDtype::Matmul if at == 0 && self.reads_fast_frames(op) => Some(DType::E4m3),
            ResultDtype::Matmul => Some(match op.results.first() {
                Some(r) => self.dtypes[r.0 as usize],
                None => DType::F32,
            }),
            ResultDtype::Buffer => op.buffer.map(|b| self.buffer_type(b).dtype),
            ResultDtype::Stated => None,
            ResultDtype::FirstOperand | ResultDtype::Sums if at == 0 => None,
            ResultDtype::FirstOperand if row.vectors[at] => Some(DType::F32),
            ResultDtype::FirstOperand | ResultDtype::Sums => Some(first()),
            ResultDtype::Fixed(dtype) => Some(dtype),
        }
    }

    /// Returns the dtype that an op requires of a value among its operands.
    fn required_dtype(&self, op: &Op, v: ValueId) -> RequiredDtype {
        match op.operands.iter().position(|o| *o == v) {
            Some(at) => self.operand_dtype(op, at),
            None => op.keyed.iter().find(|(_, o)| *o == v).and_then(|(k, _)| self.keyed_operand_dtype(op, k)),
        }
    }

    fn reads_fast_frames(&self, op: &Op) -> bool {
        op.opcode == Opcode::Conv3d && op.operands.first().is_some_and(|x| self.fast_frames[x.0 as usize])
    }

    /// Returns the dtype that an op requires of a keyed operand: the bias of a matmul or of a
    /// convolution has the dtype of the result, and the history of the latter that of its frames; the
    /// others are calls.
    fn keyed_operand_dtype(&self, op: &Op, key: &str) -> RequiredDtype {
        let multiplies = op.opcode.table_row().traits.result_dtype == ResultDtype::Matmul;
        match key {
            _ if !multiplies => None,
            "bias" if self.reads_fast_frames(op) => Some(DType::Bf16),
            _ => self.operand_dtype(op, 0),
        }
    }

    fn emit_program(self) -> Result<Program, Diagnostics> {
        let p = self.program;
        let mut out = RoundedProgram {
            builder: Builder::new_logical(&p.name),
            values: BTreeMap::new(),
            casts: BTreeMap::new(),
            scaled: BTreeMap::new(),
        };
        for i in 0..p.buffers.len() {
            let b = BufferId(i as u32);
            out.builder.declare_buffer(&p.buffer(b).name, self.buffer_type(b));
        }
        for op in &p.ops {
            self.emit_op(op, &mut out);
        }
        out.builder.finish().map_err(|es| {
            let diagnostic = |message: String| {
                Diagnostic::error(&T0606, message)
                    .with_label(format!("@{}", p.name), "this phase, under its dtype policy")
            };
            es.into_iter().map(|e| diagnostic(e.message).with_note(e.code.title)).collect()
        })
    }

    fn emit_op(&self, op: &Op, out: &mut RoundedProgram) {
        if op.opcode == Opcode::Weight && self.quantized[op.results[0].0 as usize] {
            return self.load_quantized(op, out);
        }
        let mut operands: Vec<ValueId> = op
            .operands
            .iter()
            .enumerate()
            .map(|(at, v)| self.value_as(*v, self.operand_dtype(op, at), out))
            .collect();
        let mut keyed: Vec<(&'static str, ValueId)> = op
            .keyed
            .iter()
            .map(|(k, v)| (*k, self.value_as(*v, self.keyed_operand_dtype(op, k), out)))
            .collect();
        if let (Opcode::Matmul, [x, w]) = (op.opcode, &op.operands[..])
            && let Some([w, w_scale]) = self.quantized_matrix(op, *w, operands[1], out)
        {
            let [x, x_scale] = self.quantized_value(*x, operands[0], out);
            operands = vec![x, w];
            keyed.extend([("x_scale", x_scale), ("w_scale", w_scale)]);
        }
        if let (Opcode::Conv3d, [_, w]) = (op.opcode, &op.operands[..])
            && let Some([w, w_scale]) = out.scaled.get(w).copied()
        {
            operands[1] = w;
            keyed.push(("w_scale", w_scale));
        }
        let after: Vec<ValueId> = op.after.iter().filter_map(|v| out.values.get(v).copied()).collect();
        let b = &mut out.builder;
        b.set_attrs(op.attrs.clone()).set_stream(&self.program.streams[op.stream.0 as usize]);
        for (k, v) in keyed {
            b.add_keyed(k, v);
        }
        for event in after {
            b.start_after(event);
        }
        let name = op.name.as_deref().unwrap_or_default();
        let result = op.results.first().copied();
        if let Some(r) = result {
            b.set_label(&self.program.value(r).name);
        }
        let ty = |r: ValueId| Type { dtype: self.dtypes[r.0 as usize], ..self.program.type_of(r).clone() };
        let made = match (op.opcode, result, op.buffer) {
            (Opcode::Weight, Some(r), _) => b.add_weight(name, ty(r)),
            (Opcode::Input, Some(r), _) => b.add_input(name, ty(r)),
            (Opcode::Call, Some(r), _) => b.add_call_scalar(name, ty(r)),
            (Opcode::CacheRead, _, Some(buffer)) => b.read_buffer(buffer),
            (Opcode::CacheWrite, _, Some(buffer)) => return b.write_buffer(buffer, operands[0]),
            (Opcode::Output, ..) => return b.add_output(name, operands[0]),
            _ => b.add_op(op.opcode, &operands),
        };
        let made = match result {
            Some(r) if self.fast_frames[r.0 as usize] => self.emit_fast_frames(r, made, out),
            _ => made,
        };
        out.values.extend(result.map(|r| (r, made)));
    }

    /// Converts frames to e4m3 where they are made, for all readers.
    fn emit_fast_frames(&self, v: ValueId, frames: ValueId, out: &mut RoundedProgram) -> ValueId {
        let name = &self.program.value(v).name;
        if let Some(at) = self.defs[v.0 as usize].and_then(|d| self.program.ops[d].placement_hint()) {
            out.builder.set_attr("at", at);
        }
        out.builder
            .set_label(&format!("{name}.e4m3"))
            .set_attr("to", DType::E4m3.name())
            .add_op(Opcode::Cast, &[frames])
    }

    /// Loads the e4m3 elements of a weight and their scales.
    fn load_quantized(&self, op: &Op, out: &mut RoundedProgram) {
        let (name, v) = (op.name.as_deref().unwrap_or_default(), op.results[0]);
        let label = &self.program.value(v).name;
        let (of, rows) = (self.program.type_of(v), self.program.type_of(v).shape[0]);
        let mut load = |load: &str, label: &str, ty| {
            out.builder
                .set_attrs(op.attrs.clone())
                .set_attr("load", load)
                .set_label(label)
                .add_weight(name, ty)
        };
        let [values, scales] = match op.weight_load() {
            Some(WeightLoad::Conv) => [WeightLoad::ConvE4m3, WeightLoad::ConvE4m3Scale],
            _ => [WeightLoad::E4m3, WeightLoad::E4m3Scale],
        };
        let numbers = load(values.name(), label, Type { dtype: DType::E4m3, ..of.clone() });
        let scales = load(scales.name(), &format!("{label}.scale"), Type::new(DType::F32, [rows]));
        out.values.insert(v, numbers);
        out.scaled.insert(v, [numbers, scales]);
    }

    /// Returns the second operand of a matmul in e4m3 with its scales, if the matmul reads e4m3. `rounded` is the operand in
    /// bf16.
    fn quantized_matrix(
        &self,
        op: &Op,
        w: ValueId,
        rounded: ValueId,
        out: &mut RoundedProgram,
    ) -> Option<[ValueId; 2]> {
        if self.quantized[w.0 as usize] {
            return out.scaled.get(&w).copied();
        }
        let is_value = !self.has_blocks && !self.is_weight(w);
        (is_value && self.is_block_matmul(op)).then(|| self.quantized_value(w, rounded, out))
    }

    /// Returns a value in e4m3 with the scales of its rows, quantized once, where the value is
    /// produced. `rounded` is the value in bf16.
    fn quantized_value(&self, v: ValueId, rounded: ValueId, out: &mut RoundedProgram) -> [ValueId; 2] {
        if let Some(made) = out.scaled.get(&v) {
            return *made;
        }
        if let Some(at) = self.defs[v.0 as usize].and_then(|d| self.program.ops[d].placement_hint()) {
            out.builder.set_attr("at", at);
        }
        let made =
            out.builder.set_label(&format!("{}.e4m3", self.program.value(v).name)).add_quantize(rounded);
        out.scaled.insert(v, made);
        made
    }

    /// Returns the value in the dtype that an op requires: the value itself, or its only cast to
    /// that dtype.
    fn value_as(&self, v: ValueId, want: RequiredDtype, out: &mut RoundedProgram) -> ValueId {
        let is = self.dtypes[v.0 as usize];
        let Some(made) = out.values.get(&v).copied() else { return v };
        let Some(to) = want.filter(|to| *to != is && !matches!(is, DType::I64 | DType::Event)) else {
            return made;
        };
        if let Some(cast) = out.casts.get(&(v, to)) {
            return *cast;
        }
        let label = format!("{}.{to}", self.program.value(v).name);
        if let Some(at) = self.cast_owner(v, to) {
            out.builder.set_attr("at", at);
        }
        let cast = out.builder.set_label(&label).set_attr("to", to.name()).add_op(Opcode::Cast, &[made]);
        out.casts.insert((v, to), cast);
        cast
    }

    /// Returns the stage owner of a cast: that of the producer or that of the readers, whichever
    /// sends fewer bytes. A source is never sent.
    fn cast_owner(&self, v: ValueId, to: DType) -> Option<&'a str> {
        let maker = self.defs[v.0 as usize].map(|d| &self.program.ops[d]);
        let is_source = maker
            .is_some_and(|m| m.opcode.table_row().kind == OpKind::Source && m.opcode != Opcode::CacheRead);
        let made_at = maker.and_then(|m| m.placement_hint());
        let narrower = to.element_bytes() < self.dtypes[v.0 as usize].element_bytes();
        if narrower && !is_source {
            return made_at;
        }
        let readers = self.readers[v.0 as usize].iter().map(|i| &self.program.ops[*i]);
        let mut places =
            readers.filter(|o| self.required_dtype(o, v) == Some(to)).map(|o| o.placement_hint());
        let first = places.next().flatten();
        match places.all(|at| at == first) {
            true => first,
            false if is_source => Some("all"),
            false => made_at,
        }
    }
}

/// The program under construction, with the new counterpart of each value.
struct RoundedProgram {
    builder: Builder,
    values: BTreeMap<ValueId, ValueId>,
    casts: BTreeMap<(ValueId, DType), ValueId>,
    /// E4m3 values and their row scales, by the value of the original program.
    scaled: BTreeMap<ValueId, [ValueId; 2]>,
}

/// Iterates over the operands of an op, without events.
fn data_operands(op: &Op) -> impl Iterator<Item = ValueId> + '_ {
    op.operands.iter().copied().chain(op.keyed.iter().map(|(_, v)| *v))
}
