//! The canonical text of a program, and its digest.
//!
//! `print` keeps the value names of the source. `canonical_text` renumbers values in order of
//! definition, so that programs that differ only in value names have the same digest. Neither
//! contains source positions.

use crate::attr::{format_attr, quote_string};
use crate::parse::qualified_name;
use crate::{CapturedGraph, Dialect, Op, Opcode, Program, ValueId};

/// Returns the text of a program. [`crate::parse`] restores an equal program from it.
#[must_use]
pub fn print(p: &Program) -> String {
    Printer::new(p, &|v| p.value(v).name.clone()).format_program()
}

/// Returns the text with renumbered values, which is equal for programs that differ only in value
/// names.
#[must_use]
pub fn canonical_text(p: &Program) -> String {
    Printer::new(p, &|v| v.0.to_string()).format_program()
}

/// Returns the BLAKE3 digest of the canonical text.
#[must_use]
pub fn program_digest(p: &Program) -> [u8; 32] {
    *blake3::hash(canonical_text(p).as_bytes()).as_bytes()
}

struct Printer<'a> {
    p: &'a Program,
    name: &'a dyn Fn(ValueId) -> String,
    /// The graph that captures the whole program, which the header states instead of every op.
    graph: Option<CapturedGraph>,
}

impl<'a> Printer<'a> {
    fn new(p: &'a Program, name: &'a dyn Fn(ValueId) -> String) -> Printer<'a> {
        let is_role = p.dialect == Dialect::Role;
        Printer { p, name, graph: p.captured_graph().ok().flatten().filter(|_| is_role) }
    }

    fn format_program(&self) -> String {
        let p = self.p;
        let mut out = format!("program @{}", p.name);
        if p.dialect == Dialect::Role {
            out += &format!(" role({}) mesh({})", p.role, p.mesh);
        }
        out += &format!(" streams({})", p.streams.join(", "));
        if let Some(graph) = &self.graph {
            out += &format!(" graph({})", quote_string(&graph.name));
        }
        out += " {\n";
        for b in &p.buffers {
            out += &format!("  buffer @{} : {}\n", b.name, b.ty.display_on(&p.mesh));
        }
        for op in &p.ops {
            out += &format!("  {}\n", self.format_op(op));
        }
        out + "}\n"
    }

    fn format_op(&self, op: &Op) -> String {
        let row = op.opcode.table_row();
        let mut out = String::new();
        if !op.results.is_empty() {
            let names: Vec<String> = op.results.iter().map(|r| format!("%{}", (self.name)(*r))).collect();
            out += &format!("{} = ", names.join(", "));
        }
        out += &match op.issue {
            true => format!("ttile.collective.issue {}", row.name),
            false => qualified_name(op.opcode, self.p.dialect),
        };
        let mut operands = Vec::new();
        if let Some(n) = &op.name {
            operands.push(quote_string(n));
        }
        let values = op.operands.iter().map(|v| format!("%{}", (self.name)(*v)));
        let buffer = op.buffer.map(|b| format!("@{}", self.p.buffer(b).name));
        operands.extend(insert_buffer_operand(op.opcode, buffer, values));
        operands.extend(op.keyed.iter().map(|(k, v)| format!("{k}=%{}", (self.name)(*v))));
        if !operands.is_empty() {
            out += &format!(" {}", operands.join(", "));
        }
        let in_header = |k: &str| k == "graph" && self.graph.is_some() && !op.is_source();
        let stated = op.attrs.iter().filter(|(k, _)| !in_header(k));
        let attrs: Vec<String> = stated.map(|(k, v)| format!("{k} = {}", format_attr(v))).collect();
        if !attrs.is_empty() {
            out += &format!(" {{{}}}", attrs.join(", "));
        }
        let types: Vec<String> = op
            .results
            .iter()
            .map(|r| self.p.type_of(*r))
            .filter(|t| !t.is_token())
            .map(|t| t.display_on(&self.p.mesh))
            .collect();
        if !types.is_empty() {
            out += &format!(" : {}", types.join(", "));
        }
        if !matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight) {
            out += &format!(" @{}", self.p.streams[op.stream.0 as usize]);
        }
        if !op.after.is_empty() {
            let events: Vec<String> = op.after.iter().map(|v| format!("%{}", (self.name)(*v))).collect();
            out += &format!(" after({})", events.join(", "));
        }
        out
    }
}

/// Inserts the buffer into the positional operands: after the values for `moe_route`, in front of
/// them for the cache ops.
pub(crate) fn insert_buffer_operand(
    opcode: Opcode,
    buffer: Option<String>,
    values: impl Iterator<Item = String>,
) -> Vec<String> {
    let (before, after) = if opcode == Opcode::MoeRoute { (None, buffer) } else { (buffer, None) };
    before.into_iter().chain(values).chain(after).collect()
}
