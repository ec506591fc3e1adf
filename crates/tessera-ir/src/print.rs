//! The canonical text of a program, and its digest.
//!
//! `print` keeps the names a person gave. `canonical` renumbers values in order of definition, so that two
//! programs that differ in names alone have one digest. Source positions appear in neither.

use crate::parse::spelling;
use crate::{Attr, Dialect, Op, Opcode, Program, ValueId};

/// The text of a program; [`crate::parse`] reads it back to an equal program.
#[must_use]
pub fn print(p: &Program) -> String {
    Printer { p, name: &|v| p.value(v).name.clone() }.program()
}

/// The text with values renumbered: equal for programs that differ in value names alone.
#[must_use]
pub fn canonical(p: &Program) -> String {
    Printer { p, name: &|v| v.0.to_string() }.program()
}

/// BLAKE3 of the canonical text.
#[must_use]
pub fn digest(p: &Program) -> [u8; 32] {
    *blake3::hash(canonical(p).as_bytes()).as_bytes()
}

struct Printer<'a> {
    p: &'a Program,
    name: &'a dyn Fn(ValueId) -> String,
}

impl Printer<'_> {
    fn program(&self) -> String {
        let p = self.p;
        let mut out = format!("program @{}", p.name);
        if p.dialect == Dialect::Role {
            out += &format!(" role({}) mesh({})", p.role, p.mesh);
        }
        out += &format!(" streams({}) {{\n", p.streams.join(", "));
        for b in &p.buffers {
            out += &format!("  buffer @{} : {}\n", b.name, b.ty.display(&p.mesh));
        }
        for op in &p.ops {
            out += &format!("  {}\n", self.op(op));
        }
        out + "}\n"
    }

    fn op(&self, op: &Op) -> String {
        let row = op.opcode.row();
        let mut out = String::new();
        if !op.results.is_empty() {
            let names: Vec<String> = op.results.iter().map(|r| format!("%{}", (self.name)(*r))).collect();
            out += &format!("{} = ", names.join(", "));
        }
        out += &match op.issue {
            true => format!("ttile.collective.issue {}", row.name),
            false => spelling(op.opcode, self.p.dialect),
        };
        let mut operands = Vec::new();
        if let Some(n) = &op.name {
            operands.push(quoted(n));
        }
        let values = op.operands.iter().map(|v| format!("%{}", (self.name)(*v)));
        let buffer = op.buffer.map(|b| format!("@{}", self.p.buffer(b).name));
        operands.extend(with_buffer(op.opcode, buffer, values));
        operands.extend(op.keyed.iter().map(|(k, v)| format!("{k}=%{}", (self.name)(*v))));
        if !operands.is_empty() {
            out += &format!(" {}", operands.join(", "));
        }
        if !op.attrs.is_empty() {
            let attrs: Vec<String> = op.attrs.iter().map(|(k, v)| format!("{k} = {}", attr(v))).collect();
            out += &format!(" {{{}}}", attrs.join(", "));
        }
        let types: Vec<String> = op
            .results
            .iter()
            .map(|r| self.p.ty(*r))
            .filter(|t| !t.is_token())
            .map(|t| t.display(&self.p.mesh))
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

/// Operands by position: a cache stands before what is written to it, experts after what is routed to them.
pub(crate) fn with_buffer(
    opcode: Opcode,
    buffer: Option<String>,
    values: impl Iterator<Item = String>,
) -> Vec<String> {
    let (before, after) = if opcode == Opcode::MoeRoute { (None, buffer) } else { (buffer, None) };
    before.into_iter().chain(values).chain(after).collect()
}

pub(crate) fn attr(a: &Attr) -> String {
    match a {
        Attr::Int(i) => i.to_string(),
        Attr::Float(x) => float(*x),
        Attr::Str(s) => quoted(s),
        Attr::Ints(v) => format!("[{}]", v.iter().map(i64::to_string).collect::<Vec<_>>().join(", ")),
        Attr::Bool(b) => b.to_string(),
    }
}

pub(crate) fn quoted(s: &str) -> String {
    let mut out = String::from("\"");
    for c in s.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            c => out.push(c),
        }
    }
    out + "\""
}

/// The shortest decimal that reads back to the same bits, always with a point or an exponent; what has no
/// decimal is written by its bits.
fn float(x: f64) -> String {
    if x.is_finite() { format!("{x:?}") } else { format!("f64:{:#018x}", x.to_bits()) }
}
