//! Splits the rows of a call into interleaved chunks: a transformation of a logical program before
//! it is sharded.
//!
//! Under `megatron` a row-parallel matmul gives a partial sum, and so do the square sums of a row
//! that is sharded by columns. The reader of the sum waits for an all-reduce. Between two
//! self-attentions a block works row by row, so this transformation splits the rows into chunks and
//! repeats each op once per chunk: while the all-reduce of one chunk is in flight, the next chunk
//! computes.
//!
//! - All values that share the rows of such a matmul are chunked, followed through ops that work
//!   row by row. An op that depends on the index of a row states in `first_row` how many rows precede
//!   its chunk.
//! - A section ends where a partial sum is complete: at a row-parallel matmul, whose bias is added
//!   after the all-reduce, and at the square sums of norms over sharded columns, with those of
//!   neighbouring norms together. A section also ends before a read of a buffer that chunks write,
//!   because all chunks must have written by then. Chunks alternate, one section each.
//! - A program in which another op needs those rows whole remains unchanged, and so does a program
//!   without such matmuls or one that writes a buffer in chunks after reading it.
//!
//! This file knows no collective and no rank: lowering issues an all-reduce where the sum is
//! produced and waits where it is read.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::op_traits::RowAccess;
use tessera_ir::{Attr, BufferId, Builder, Op, OpView, Opcode, Program, ValueId};

use crate::codes::T0606;

/// Splits the rows of a program into the given number of chunks, at least 1; returns a copy of the
/// program if its rows must stay whole.
///
/// # Errors
/// Returns T0606 if an op does not accept a chunk of its rows.
pub(crate) fn split_rows(p: &Program, chunks: u32) -> Result<Program, Diagnostics> {
    match RowChunker::new(p, chunks) {
        Some(pass) if chunks > 1 => pass.emit_program(),
        _ => Ok(p.clone()),
    }
}

struct RowChunker<'a> {
    program: &'a Program,
    defs: Vec<Option<usize>>,
    /// First row and row count of each chunk.
    chunks: Vec<(u64, u64)>,
    /// Values whose rows are split into chunks, found from the operands of row-parallel matmuls.
    chunked: BTreeSet<ValueId>,
}

/// An op in a section, or a part of one: a row-parallel matmul and a norm over sharded columns are
/// each split at the end of a section.
#[derive(Clone, Copy)]
enum SectionItem {
    /// An op on no rows of the call; emitted with the first chunk alone.
    Once(usize),
    /// An op on the rows of a chunk; for a row-parallel matmul all but its bias and activation.
    PerChunk(usize),
    /// The bias and activation of a row-parallel matmul, after its all-reduce.
    Epilogue(usize),
    /// The square sums of the rows that a norm reads, and of those that a second norm reads.
    SquareSums(usize, Option<usize>),
    /// A norm that uses the square sums computed for the norm `sums_of`.
    Scale { norm: usize, sums_of: usize, col: u64 },
}

impl<'a> RowChunker<'a> {
    fn new(p: &'a Program, chunks: u32) -> Option<RowChunker<'a>> {
        let mut chunker =
            RowChunker { program: p, defs: p.defining_ops(), chunks: Vec::new(), chunked: BTreeSet::new() };
        let mut pending: Vec<ValueId> =
            p.ops.iter().filter(|o| chunker.is_row_parallel_matmul(o)).map(|o| o.operands[0]).collect();
        let rows = *p.type_of(*pending.first()?).shape.first()?;
        let readers = p.value_readers();
        while let Some(v) = pending.pop() {
            if !chunker.chunked.insert(v) {
                continue;
            }
            if p.type_of(v).shape.first() != Some(&rows) {
                return None;
            }
            let maker = chunker.defs[v.0 as usize];
            for i in maker.into_iter().chain(readers[v.0 as usize].iter().copied()) {
                let op = &p.ops[i];
                let by_row = row_operands(op)?;
                // An op may read the same value both by row and whole.
                if op.used_values().filter(|u| *u == v).count() > by_row.iter().filter(|u| **u == v).count() {
                    return None;
                }
                pending.extend(by_row.into_iter().chain(op.results.iter().copied()));
            }
        }
        chunker.chunks = (0..chunks).map(|k| tessera_mesh::split_units(rows, chunks, k)).collect();
        (rows >= u64::from(chunks) && !chunker.writes_after_read()).then_some(chunker)
    }

    /// Returns the `part` of the weight that an op reads as operand `at`.
    fn weight_part(&self, op: &Op, at: usize) -> Option<&str> {
        let weight = &self.program.ops[self.defs[op.operands.get(at)?.0 as usize]?];
        if weight.opcode == Opcode::Weight { weight.part_hint() } else { None }
    }

    /// Returns whether an op is a row-parallel matmul after whose sum only a bias and an activation
    /// follow.
    fn is_row_parallel_matmul(&self, op: &Op) -> bool {
        let Ok(OpView::Matmul(v)) = op.view() else { return false };
        let plain = v.x_scale.is_none() && (v.bias.is_some() || v.act.is_none());
        plain && self.weight_part(op, 1) == Some("row")
    }

    /// Returns whether an op is a norm over sharded columns.
    fn is_sharded_norm(&self, op: &Op) -> bool {
        op.opcode == Opcode::RmsNorm && self.weight_part(op, 1) == Some("col")
    }

    fn is_chunked(&self, op: &Op) -> bool {
        op.results.iter().chain(&op.operands).any(|v| self.chunked.contains(v))
    }

    /// Returns whether chunks write a buffer after the program has read it: a later chunk would
    /// then read what an earlier one has written.
    fn writes_after_read(&self) -> bool {
        let mut read: BTreeSet<BufferId> = BTreeSet::new();
        self.program.ops.iter().any(|op| match (op.opcode, op.buffer) {
            (Opcode::CacheRead, Some(b)) => {
                read.insert(b);
                false
            }
            (Opcode::CacheWrite, Some(b)) => self.is_chunked(op) && read.contains(&b),
            _ => false,
        })
    }

    /// Splits the ops into the sections in which chunks alternate.
    fn split_sections(&self) -> Vec<Vec<SectionItem>> {
        let ops = &self.program.ops;
        let mut out: Vec<Vec<SectionItem>> = Vec::new();
        let mut section: Vec<SectionItem> = Vec::new();
        let mut written: BTreeSet<BufferId> = BTreeSet::new();
        // Norms that share the all-reduce of an earlier norm's square sums.
        let mut shared_with: BTreeMap<usize, usize> = BTreeMap::new();
        for (i, op) in ops.iter().enumerate() {
            if op.opcode == Opcode::CacheRead && op.buffer.is_some_and(|b| written.contains(&b)) {
                out.push(std::mem::take(&mut section));
                written.clear();
            }
            if !self.is_chunked(op) {
                section.push(SectionItem::Once(i));
            } else if self.is_row_parallel_matmul(op) {
                section.push(SectionItem::PerChunk(i));
                out.push(std::mem::take(&mut section));
                if matmul_bias(op).is_some() {
                    section.push(SectionItem::Epilogue(i));
                }
            } else if let Some(sums_of) = shared_with.get(&i) {
                section.push(SectionItem::Scale { norm: i, sums_of: *sums_of, col: 1 });
            } else if self.is_sharded_norm(op) {
                let next = (i + 1..ops.len()).find(|j| ops[*j].opcode != Opcode::Weight);
                let ty = |op: &Op| self.program.type_of(op.operands[0]);
                let joins = |j: &usize| {
                    let next = &ops[*j];
                    self.is_sharded_norm(next) && self.is_chunked(next) && ty(next) == ty(op)
                };
                let next = next.filter(joins);
                shared_with.extend(next.map(|j| (j, i)));
                section.push(SectionItem::SquareSums(i, next));
                out.push(std::mem::take(&mut section));
                section.push(SectionItem::Scale { norm: i, sums_of: i, col: 0 });
            } else {
                section.push(SectionItem::PerChunk(i));
                written.extend(op.buffer.filter(|_| op.opcode == Opcode::CacheWrite));
            }
        }
        out.push(section);
        out
    }

    fn emit_program(self) -> Result<Program, Diagnostics> {
        let p = self.program;
        let mut out = ChunkedProgram {
            builder: Builder::new_logical(&p.name),
            values: BTreeMap::new(),
            square_sums: BTreeMap::new(),
        };
        for b in &p.buffers {
            out.builder.declare_buffer(&b.name, b.ty.clone());
        }
        for stretch in self.split_sections() {
            for k in 0..self.chunks.len() {
                for item in &stretch {
                    match *item {
                        SectionItem::Once(i) if k == 0 => self.emit_op(i, None, &mut out),
                        SectionItem::Once(_) => {}
                        SectionItem::PerChunk(i) => self.emit_op(i, Some(k), &mut out),
                        SectionItem::Epilogue(i) => self.emit_epilogue(i, k, &mut out),
                        SectionItem::SquareSums(i, also) => self.emit_square_sums(i, also, k, &mut out),
                        SectionItem::Scale { norm, sums_of: of, col } => {
                            self.emit_scale(norm, (of, col), k, &mut out)
                        }
                    }
                }
            }
        }
        out.builder.finish().map_err(|es| {
            let diagnostic = |message: String| {
                Diagnostic::error(&T0606, message)
                    .with_label(format!("@{}", p.name), "this phase, split into row chunks")
            };
            es.into_iter().map(|e| diagnostic(e.message).with_note(e.code.title)).collect()
        })
    }

    /// Emits an op on the rows of a chunk, or once for all chunks.
    fn emit_op(&self, i: usize, chunk: Option<usize>, out: &mut ChunkedProgram) {
        let op = &self.program.ops[i];
        let ends = chunk.is_some() && self.is_row_parallel_matmul(op);
        let operands: Vec<ValueId> = op.operands.iter().map(|v| self.chunk_value(*v, chunk, out)).collect();
        let name = op.name.as_deref().unwrap_or_default();
        let ty = || self.program.type_of(op.results[0]).clone();
        let mut attrs = op.attrs.clone();
        if ends {
            attrs.remove("act");
        }
        if let Some((first, rows)) = chunk.map(|k| self.chunks[k]) {
            match op.view() {
                // An input arrives whole, for any reader.
                Ok(OpView::Input(_)) => {
                    out.builder
                        .set_attrs(std::mem::take(&mut attrs))
                        .set_label(&self.program.value(op.results[0]).name);
                    let whole = out.builder.add_input(name, ty());
                    self.copy_attrs(op, &[], out);
                    out.builder.set_attr("row", first).set_attr("rows", rows);
                    let taken = out.builder.add_op(Opcode::TakeRows, &[whole]);
                    out.values.insert((op.results[0], chunk), taken);
                    return;
                }
                Ok(OpView::CacheRead(v)) => {
                    let row = Attr::from(v.row + first);
                    attrs.extend([("row".to_string(), row), ("rows".to_string(), rows.into())]);
                }
                Ok(view) => {
                    if let Some(first_row) = first_row_of(&view) {
                        attrs.insert("first_row".to_string(), Attr::from(first_row + first));
                    }
                }
                Err(_) => {}
            }
        }
        for (k, v) in op.keyed.iter().filter(|(k, _)| !(ends && *k == "bias")) {
            let v = self.chunk_value(*v, chunk, out);
            out.builder.add_keyed(k, v);
        }
        let b = &mut out.builder;
        b.set_attrs(attrs);
        if let Some(r) = op.results.first() {
            let label = &self.program.value(*r).name;
            b.set_label(&chunk.map_or(label.clone(), |k| format!("{label}.{k}")));
        }
        let made = match (op.opcode, op.buffer) {
            (Opcode::Weight, _) => vec![b.add_weight(name, ty())],
            (Opcode::Input, _) => vec![b.add_input(name, ty())],
            (Opcode::Call, _) => vec![b.add_call_scalar(name, ty())],
            (Opcode::CacheRead, Some(buffer)) => vec![b.read_buffer(buffer)],
            (Opcode::CacheWrite, Some(buffer)) => return b.write_buffer(buffer, operands[0]),
            (Opcode::Output, _) => return b.add_output(name, operands[0]),
            (Opcode::Quantize, _) => b.add_quantize(operands[0]).to_vec(),
            _ => vec![b.add_op(op.opcode, &operands)],
        };
        out.values.extend(op.results.iter().map(|r| (*r, chunk)).zip(made));
    }

    /// Emits the bias and activation of a matmul after its all-reduce.
    fn emit_epilogue(&self, i: usize, k: usize, out: &mut ChunkedProgram) {
        let op = &self.program.ops[i];
        let (v, Some(bias)) = (op.results[0], matmul_bias(op)) else { return };
        let (sum, bias) = (self.chunk_value(v, Some(k), out), self.chunk_value(bias, None, out));
        self.copy_attrs(op, &["act"], out);
        let made = out.builder.add_op(Opcode::BiasAct, &[sum, bias]);
        out.values.insert((v, Some(k)), made);
    }

    fn emit_square_sums(&self, i: usize, also: Option<usize>, k: usize, out: &mut ChunkedProgram) {
        let norms = [Some(i), also].into_iter().flatten().map(|j| &self.program.ops[j]);
        let rows: Vec<ValueId> = norms.map(|op| self.chunk_value(op.operands[0], Some(k), out)).collect();
        self.copy_attrs(&self.program.ops[i], &[], out);
        let made = out.builder.add_op(Opcode::RowSquareSum, &rows);
        out.square_sums.insert((i, k), made);
    }

    fn emit_scale(&self, i: usize, (of, col): (usize, u64), k: usize, out: &mut ChunkedProgram) {
        let op = &self.program.ops[i];
        let Some(squares) = out.square_sums.get(&(of, k)).copied() else { return };
        let (x, w) =
            (self.chunk_value(op.operands[0], Some(k), out), self.chunk_value(op.operands[1], None, out));
        let width = self.program.type_of(op.results[0]).shape[1];
        self.copy_attrs(op, &["eps"], out);
        let made = out
            .builder
            .set_attr("col", col)
            .set_attr("width", width)
            .add_op(Opcode::RmsScale, &[x, squares, w]);
        out.values.insert((op.results[0], Some(k)), made);
    }

    /// Copies another op's stage owner and some of its attributes to the next op.
    fn copy_attrs(&self, op: &Op, also: &[&str], out: &mut ChunkedProgram) {
        out.builder.copy_attrs(op, &["at"]).copy_attrs(op, also);
    }

    /// Returns the value of the new program that replaces a value, or its part in a chunk.
    fn chunk_value(&self, v: ValueId, chunk: Option<usize>, out: &ChunkedProgram) -> ValueId {
        let chunk = chunk.filter(|_| self.chunked.contains(&v));
        out.values.get(&(v, chunk)).copied().unwrap_or(v)
    }
}

/// The program under construction, with the new counterpart of each value, by chunk if the value is
/// chunked.
struct ChunkedProgram {
    builder: Builder,
    values: BTreeMap<(ValueId, Option<usize>), ValueId>,
    /// Square sums by the op index of the norm and the index of the chunk.
    square_sums: BTreeMap<(usize, usize), ValueId>,
}

/// Returns the operands that an op reads row by row, with rows aligned to those of its results;
/// `None` for an op that may need whole rows.
fn row_operands(op: &Op) -> Option<Vec<ValueId>> {
    let RowAccess::Aligned(leading) = op.opcode.table_row().traits.rows else { return None };
    let x_scale = match op.view() {
        Ok(OpView::Matmul(v)) => v.x_scale,
        _ => None,
    };
    Some(op.operands.iter().take(leading).copied().chain(x_scale).collect())
}

/// Returns the index of the first row of an op that depends on the index of its rows.
fn first_row_of(view: &OpView) -> Option<u64> {
    match view {
        OpView::NormModulate(v) => Some(v.first_row),
        OpView::Rope(v) => Some(v.first_row),
        OpView::CacheWrite(v) => Some(v.first_row),
        OpView::GateResidual(v) => v.m.map(|_| v.first_row),
        OpView::Cast(v) => v.stochastic_rounding().map(|r| r.first_row),
        OpView::Quantize(v) => v.stochastic_rounding().map(|r| r.first_row),
        _ => None,
    }
}

fn matmul_bias(op: &Op) -> Option<ValueId> {
    match op.view() {
        Ok(OpView::Matmul(v)) => v.bias,
        _ => None,
    }
}
