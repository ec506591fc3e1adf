//! The rows of a call in pieces that take turns: a pass over a logical program, before it is cut.
//!
//! Under `megatron` a product cut by input features gives a term of a sum, and so do the squares of a row cut by columns. What
//! reads the sum waits for an all-reduce. Between two self-attentions a block works row by row, so the rows are cut into pieces
//! and each op is done once per piece: while the sum of one piece is under way, the next one computes.
//!
//! - Pieces are all values whose rows are those of such a product, followed through ops that work row by row. An op that depends
//!   on a row's place says in `first` how many rows come before its piece.
//! - A stretch ends where a sum leaves: at a product cut by input features, whose bias is added behind the sum, and at the
//!   squares of norms over columns that ranks share, those of neighbouring norms together. It ends too before a buffer is read
//!   that pieces write: all of them have written by then. Pieces take turns, a stretch each.
//! - A program in which something else wants those rows whole stays as it is, and so does one without such products or one that
//!   writes a buffer in pieces after reading it.
//!
//! It knows no collective and no rank: lowering issues a sum where it is made and waits where it is read.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Attr, BufferId, Builder, Op, Opcode, Program, ValueId};

use crate::lower::T0606;

/// The program with its rows in `pieces`, at least 1, or itself where it stays whole.
///
/// # Errors
/// T0606 where an op does not take a piece of its rows.
pub(crate) fn apply(p: &Program, pieces: u32) -> Result<Program, Diagnostics> {
    match Pass::new(p, pieces) {
        Some(pass) if pieces > 1 => pass.emit(),
        _ => Ok(p.clone()),
    }
}

struct Pass<'a> {
    p: &'a Program,
    defs: Vec<Option<usize>>,
    /// First row and number of rows of each piece.
    pieces: Vec<(u64, u64)>,
    /// Values that are in pieces.
    cut: BTreeSet<ValueId>,
}

/// What is done in a turn.
#[derive(Clone, Copy)]
enum Item {
    /// An op on no rows of the call: in the first piece's turn alone.
    Once(usize),
    /// An op on the rows of the piece; of a product that ends a stretch all but its bias and activation.
    Each(usize),
    /// These, once the terms have met.
    Finish(usize),
    /// The squares of the rows that a norm reads, and of those that another one reads.
    Squares(usize, Option<usize>),
    /// A norm by the squares that were made for the norm `of`.
    Scale { norm: usize, of: usize, col: u64 },
}

impl<'a> Pass<'a> {
    fn new(p: &'a Program, pieces: u32) -> Option<Pass<'a>> {
        let mut pass = Pass { p, defs: p.definitions(), pieces: Vec::new(), cut: BTreeSet::new() };
        let mut met: Vec<ValueId> =
            p.ops.iter().filter(|o| pass.ends_in_a_sum(o)).map(|o| o.operands[0]).collect();
        let rows = *p.ty(*met.first()?).shape.first()?;
        let readers = p.readers();
        while let Some(v) = met.pop() {
            if !pass.cut.insert(v) {
                continue;
            }
            if p.ty(v).shape.first() != Some(&rows) {
                return None;
            }
            let maker = pass.defs[v.0 as usize];
            for i in maker.into_iter().chain(readers[v.0 as usize].iter().copied()) {
                let op = &p.ops[i];
                let by_row = by_row(op)?;
                // An op may read a value whole, and by row as well.
                if op.uses().filter(|u| *u == v).count() > by_row.iter().filter(|u| **u == v).count() {
                    return None;
                }
                met.extend(by_row.into_iter().chain(op.results.iter().copied()));
            }
        }
        pass.pieces = (0..pieces).map(|k| tessera_mesh::split(rows, pieces, k)).collect();
        (rows >= u64::from(pieces) && !pass.writes_what_was_read()).then_some(pass)
    }

    /// The `part` of the weight that an op reads at a place.
    fn part(&self, op: &Op, at: usize) -> Option<&str> {
        let weight = &self.p.ops[self.defs[op.operands.get(at)?.0 as usize]?];
        if weight.opcode == Opcode::Weight { weight.str("part") } else { None }
    }

    /// Whether an op is a product cut by input features, with nothing but a bias and what follows it behind the sum.
    fn ends_in_a_sum(&self, op: &Op) -> bool {
        let plain = op.key("x_scale").is_none() && (op.key("bias").is_some() || op.str("act").is_none());
        op.opcode == Opcode::Matmul && plain && self.part(op, 1) == Some("row")
    }

    /// Whether an op is a norm over columns that ranks share.
    fn norms_shared_columns(&self, op: &Op) -> bool {
        op.opcode == Opcode::RmsNorm && self.part(op, 1) == Some("col")
    }

    fn in_pieces(&self, op: &Op) -> bool {
        op.results.iter().chain(&op.operands).any(|v| self.cut.contains(v))
    }

    /// Whether pieces write a buffer that was read before: a later piece would find what an earlier one has written.
    fn writes_what_was_read(&self) -> bool {
        let mut read: BTreeSet<BufferId> = BTreeSet::new();
        self.p.ops.iter().any(|op| match (op.opcode, op.buffer) {
            (Opcode::CacheRead, Some(b)) => {
                read.insert(b);
                false
            }
            (Opcode::CacheWrite, Some(b)) => self.in_pieces(op) && read.contains(&b),
            _ => false,
        })
    }

    /// What pieces do, stretch by stretch.
    fn stretches(&self) -> Vec<Vec<Item>> {
        let ops = &self.p.ops;
        let mut out: Vec<Vec<Item>> = Vec::new();
        let mut now: Vec<Item> = Vec::new();
        let mut written: BTreeSet<BufferId> = BTreeSet::new();
        // Norms whose squares an earlier one's travel with.
        let mut along: BTreeMap<usize, usize> = BTreeMap::new();
        for (i, op) in ops.iter().enumerate() {
            if op.opcode == Opcode::CacheRead && op.buffer.is_some_and(|b| written.contains(&b)) {
                out.push(std::mem::take(&mut now));
                written.clear();
            }
            if !self.in_pieces(op) {
                now.push(Item::Once(i));
            } else if self.ends_in_a_sum(op) {
                now.push(Item::Each(i));
                out.push(std::mem::take(&mut now));
                if op.key("bias").is_some() {
                    now.push(Item::Finish(i));
                }
            } else if let Some(of) = along.get(&i) {
                now.push(Item::Scale { norm: i, of: *of, col: 1 });
            } else if self.norms_shared_columns(op) {
                let next = (i + 1..ops.len()).find(|j| ops[*j].opcode != Opcode::Weight);
                let ty = |op: &Op| self.p.ty(op.operands[0]);
                let joins = |j: &usize| {
                    let next = &ops[*j];
                    self.norms_shared_columns(next) && self.in_pieces(next) && ty(next) == ty(op)
                };
                let next = next.filter(joins);
                along.extend(next.map(|j| (j, i)));
                now.push(Item::Squares(i, next));
                out.push(std::mem::take(&mut now));
                now.push(Item::Scale { norm: i, of: i, col: 0 });
            } else {
                now.push(Item::Each(i));
                written.extend(op.buffer.filter(|_| op.opcode == Opcode::CacheWrite));
            }
        }
        out.push(now);
        out
    }

    fn emit(self) -> Result<Program, Diagnostics> {
        let p = self.p;
        let mut out = Out { b: Builder::logical(&p.name), of: BTreeMap::new(), squares: BTreeMap::new() };
        for b in &p.buffers {
            out.b.buffer(&b.name, b.ty.clone());
        }
        for stretch in self.stretches() {
            for k in 0..self.pieces.len() {
                for item in &stretch {
                    match *item {
                        Item::Once(i) if k == 0 => self.op(i, None, &mut out),
                        Item::Once(_) => {}
                        Item::Each(i) => self.op(i, Some(k), &mut out),
                        Item::Finish(i) => self.finish(i, k, &mut out),
                        Item::Squares(i, also) => self.squares(i, also, k, &mut out),
                        Item::Scale { norm, of, col } => self.scale(norm, (of, col), k, &mut out),
                    }
                }
            }
        }
        out.b.finish().map_err(|es| {
            let says = |message: String| {
                Diagnostic::error(&T0606, message)
                    .at(format!("@{}", p.name), "this phase, its rows in pieces")
            };
            es.into_iter().map(|e| says(e.message).note(e.code.title)).collect()
        })
    }

    /// An op on the rows of a piece, or on none of them.
    fn op(&self, i: usize, piece: Option<usize>, out: &mut Out) {
        let op = &self.p.ops[i];
        let ends = piece.is_some() && self.ends_in_a_sum(op);
        let operands: Vec<ValueId> = op.operands.iter().map(|v| self.held(*v, piece, out)).collect();
        let name = op.name.as_deref().unwrap_or_default();
        let ty = || self.p.ty(op.results[0]).clone();
        let mut attrs = op.attrs.clone();
        if ends {
            attrs.remove("act");
        }
        if let Some((first, rows)) = piece.map(|k| self.pieces[k]) {
            let plus = |name: &str| {
                Attr::from(op.int(name).and_then(|n| u64::try_from(n).ok()).unwrap_or(0) + first)
            };
            match op.opcode {
                // An input comes whole, whoever reads it.
                Opcode::Input => {
                    out.b.attrs(std::mem::take(&mut attrs)).label(&self.p.value(op.results[0]).name);
                    let whole = out.b.input(name, ty());
                    self.place(op, &[], out);
                    out.b.attr("row", first).attr("rows", rows);
                    let taken = out.b.op(Opcode::TakeRows, &[whole]);
                    out.of.insert((op.results[0], piece), taken);
                    return;
                }
                Opcode::CacheRead => {
                    attrs.extend([("row".to_string(), plus("row")), ("rows".to_string(), rows.into())]);
                }
                _ if knows_places(op) => {
                    attrs.insert("first".to_string(), plus("first"));
                }
                _ => {}
            }
        }
        for (k, v) in op.keyed.iter().filter(|(k, _)| !(ends && *k == "bias")) {
            let v = self.held(*v, piece, out);
            out.b.key(k, v);
        }
        let b = &mut out.b;
        b.attrs(attrs);
        if let Some(r) = op.results.first() {
            let label = &self.p.value(*r).name;
            b.label(&piece.map_or(label.clone(), |k| format!("{label}.{k}")));
        }
        let made = match (op.opcode, op.buffer) {
            (Opcode::Weight, _) => vec![b.weight(name, ty())],
            (Opcode::Input, _) => vec![b.input(name, ty())],
            (Opcode::Call, _) => vec![b.call(name, ty())],
            (Opcode::CacheRead, Some(buffer)) => vec![b.read(buffer)],
            (Opcode::CacheWrite, Some(buffer)) => return b.write(buffer, operands[0]),
            (Opcode::Output, _) => return b.output(name, operands[0]),
            (Opcode::Quantize, _) => b.quantize(operands[0]).to_vec(),
            _ => vec![b.op(op.opcode, &operands)],
        };
        out.of.extend(op.results.iter().map(|r| (*r, piece)).zip(made));
    }

    /// The bias and activation of a product whose terms have met.
    fn finish(&self, i: usize, k: usize, out: &mut Out) {
        let op = &self.p.ops[i];
        let (v, Some(bias)) = (op.results[0], op.key("bias")) else { return };
        let (sum, bias) = (self.held(v, Some(k), out), self.held(bias, None, out));
        self.place(op, &["act"], out);
        let made = out.b.op(Opcode::BiasAct, &[sum, bias]);
        out.of.insert((v, Some(k)), made);
    }

    fn squares(&self, i: usize, also: Option<usize>, k: usize, out: &mut Out) {
        let norms = [Some(i), also].into_iter().flatten().map(|j| &self.p.ops[j]);
        let rows: Vec<ValueId> = norms.map(|op| self.held(op.operands[0], Some(k), out)).collect();
        self.place(&self.p.ops[i], &[], out);
        let made = out.b.op(Opcode::RowSquareSum, &rows);
        out.squares.insert((i, k), made);
    }

    fn scale(&self, i: usize, (of, col): (usize, u64), k: usize, out: &mut Out) {
        let op = &self.p.ops[i];
        let Some(squares) = out.squares.get(&(of, k)).copied() else { return };
        let (x, w) = (self.held(op.operands[0], Some(k), out), self.held(op.operands[1], None, out));
        let width = self.p.ty(op.results[0]).shape[1];
        self.place(op, &["eps"], out);
        let made = out.b.attr("col", col).attr("width", width).op(Opcode::RmsScale, &[x, squares, w]);
        out.of.insert((op.results[0], Some(k)), made);
    }

    /// Gives the next op the place of another and some of its constants.
    fn place(&self, op: &Op, also: &[&str], out: &mut Out) {
        let kept = op.attrs.iter().filter(|(k, _)| *k == "at" || also.contains(&k.as_str()));
        out.b.attrs(kept.map(|(k, a)| (k.clone(), a.clone())).collect());
    }

    /// What became of a value, for a piece.
    fn held(&self, v: ValueId, piece: Option<usize>, out: &Out) -> ValueId {
        let piece = piece.filter(|_| self.cut.contains(&v));
        out.of.get(&(v, piece)).copied().unwrap_or(v)
    }
}

/// The program that is made, and what became of each value, by piece where it is in pieces.
struct Out {
    b: Builder,
    of: BTreeMap<(ValueId, Option<usize>), ValueId>,
    /// Squares that were made for a norm, by piece.
    squares: BTreeMap<(usize, usize), ValueId>,
}

/// What an op reads row by row for its results, rows that stand alike in all of them; none of an op that may want rows whole.
fn by_row(op: &Op) -> Option<Vec<ValueId>> {
    use Opcode as O;
    let operands = match op.opcode {
        O::Input | O::CacheRead => 0,
        O::CacheWrite | O::Matmul | O::BiasAct | O::Silu | O::Cast | O::Quantize => 1,
        O::LayerNorm | O::NormModulate | O::RmsNorm | O::Rope | O::Attention => 1,
        O::Add | O::GateResidual | O::RmsScale | O::RowSquareSum | O::ToX0 => 2,
        _ => return None,
    };
    Some(op.operands.iter().take(operands).copied().chain(op.key("x_scale")).collect())
}

/// Whether an op goes by where a row stands among all.
fn knows_places(op: &Op) -> bool {
    match op.opcode {
        Opcode::NormModulate | Opcode::Rope | Opcode::CacheWrite => true,
        Opcode::GateResidual => op.operands.len() > 2,
        _ => false,
    }
}
