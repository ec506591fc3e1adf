//! Fragments: ops without an enclosing program, as papers and notes contain them. A fragment has no
//! types, its operands may be undefined, and attributes may be missing. It can be parsed, printed
//! and reviewed, but not run.

use std::collections::BTreeSet;

use tessera_base::{Diagnostic, Diagnostics, Span};
use tessera_mesh::Axis;

use crate::attr::{format_attr, quote_string};
use crate::attr_kind::{AttrKind, MeshAxis};
use crate::codes::{T0203, T0206, T0215};
use crate::parse::qualified_name;
use crate::print::insert_buffer_operand;
use crate::rules::quantize_without_policy;
use crate::view_reader::invalid_attr;
use crate::{Attrs, Dialect, Opcode};

/// A name with its position in the text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SpannedName {
    /// The name without `%` or `@`.
    pub text: String,
    /// Byte range in the parsed text; [`Fragment::without_spans`] clears it.
    pub span: Span,
}

/// One op of a fragment, with names where an [`Op`](crate::Op) has indices.
#[derive(Debug, Clone, PartialEq)]
pub struct FragmentOp {
    /// Operation, independent of the dialect in which it is spelled.
    pub opcode: Opcode,
    /// Dialect of the op's prefix: `Logical` for `toperator.`, otherwise `Role`.
    pub dialect: Dialect,
    /// Whether the op only issues a collective, which a later op waits for.
    pub issue: bool,
    /// Names that the text gives to the results, left of `=`.
    pub results: Vec<SpannedName>,
    /// Quoted operand: the name of an input, call scalar, weight or output.
    pub name: Option<String>,
    /// Buffer that the op accesses, written `@name`; the fragment need not declare it.
    pub symbol: Option<SpannedName>,
    /// Operands identified by position; a fragment may leave them undefined.
    pub operands: Vec<SpannedName>,
    /// Keyed operands, in the order of the op table.
    pub keyed: Vec<(&'static str, SpannedName)>,
    /// Compile-time attributes as written; required ones may be missing.
    pub attrs: Attrs,
    /// Stream, if the text names one.
    pub stream: Option<String>,
    /// Events in `after(…)`, which the op waits for before it starts.
    pub after: Vec<SpannedName>,
    /// Span of the whole op, from its results to its events.
    pub span: Span,
    /// Span of the op's name, which diagnostics about the op mark.
    pub op_span: Span,
}

/// A sequence of ops without an enclosing program.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fragment {
    /// Ops in text order.
    pub ops: Vec<FragmentOp>,
}

/// Returns the text of a fragment. [`crate::parse_fragment`] restores an equal fragment from it,
/// except for positions.
#[must_use]
pub fn print_fragment(f: &Fragment) -> String {
    f.ops.iter().map(|op| op.to_text() + "\n").collect()
}

impl Fragment {
    /// Returns the same fragment with all positions cleared.
    #[must_use]
    pub fn without_spans(mut self) -> Fragment {
        let none = Span::default();
        for op in &mut self.ops {
            (op.span, op.op_span) = (none, none);
            let keyed = op.keyed.iter_mut().map(|(_, n)| n);
            let names = op.results.iter_mut().chain(&mut op.symbol).chain(&mut op.operands);
            names.chain(keyed).chain(&mut op.after).for_each(|n| n.span = none);
        }
        self
    }

    /// Returns the problems that separate the fragment from a program: missing or invalid
    /// attributes (T0215), wrong operands (T0203), and finally one T0206 that lists what must be
    /// added. `file` names the text in diagnostics.
    #[must_use]
    pub fn review(&self, file: &str) -> Diagnostics {
        let mut out: Diagnostics = self.ops.iter().flat_map(|op| op.review(file)).collect();
        out.push(self.completion_error(file));
        out
    }

    /// Returns the values that are read but not defined, each at its first use.
    #[must_use]
    pub fn undefined_values(&self) -> Vec<&SpannedName> {
        let defined: BTreeSet<&str> =
            self.ops.iter().flat_map(|op| &op.results).map(|n| n.text.as_str()).collect();
        first_occurrences(
            self.ops.iter().flat_map(FragmentOp::used_names).filter(|n| !defined.contains(n.text.as_str())),
        )
    }

    fn completion_error(&self, file: &str) -> Diagnostic {
        let list = |names: &[&SpannedName], sigil: &str| {
            names.iter().map(|n| format!("{sigil}{}", n.text)).collect::<Vec<_>>().join(", ")
        };
        let free = self.undefined_values();
        let symbols = first_occurrences(self.ops.iter().filter_map(|op| op.symbol.as_ref()));
        let used: BTreeSet<&str> =
            self.ops.iter().flat_map(FragmentOp::used_names).map(|n| n.text.as_str()).collect();
        let unread: Vec<&SpannedName> =
            self.ops.iter().flat_map(|op| &op.results).filter(|n| !used.contains(n.text.as_str())).collect();
        let logical = self.ops.iter().any(|op| op.dialect == Dialect::Logical);
        let of_role = self.ops.iter().any(|op| op.dialect == Dialect::Role);
        let header = match (logical, of_role) {
            (true, false) => "program @name { … }".to_string(),
            _ => format!("program @name role(r) mesh({}) streams(compute) {{ … }}", self.mesh_text()),
        };
        let mut missing = vec!["a header".to_string()];
        if !free.is_empty() {
            missing.push(format!("types of {}", list(&free, "%")));
        }
        if !symbols.is_empty() {
            missing.push(format!("a declaration of {}", list(&symbols, "@")));
        }
        let at = free.first().map(|n| n.span).or(self.ops.first().map(|op| op.op_span)).unwrap_or_default();
        let label = if free.is_empty() { "begins here" } else { "undefined value" };
        let mut d =
            Diagnostic::error(&T0206, format!("fragment is not a program: it lacks {}", missing.join("; ")))
                .with_span_label(file, label, at);
        for n in free.iter().skip(1) {
            d = d.with_span_label(file, "undefined value", n.span);
        }
        for s in &symbols {
            d = d.with_span_label(file, "not declared", s.span);
        }
        d = d.with_note(format!("header: {header}"));
        if !free.is_empty() {
            d = d.with_note(format!(
                "{}: an input, weight or cache.read with its type, such as f32[4, 8] {{tp: shard(0)}}",
                list(&free, "%")
            ));
        }
        if !symbols.is_empty() {
            d = d.with_note(format!("{}: `buffer @name : type`", list(&symbols, "@")));
        }
        if !unread.is_empty() {
            d = d.with_note(format!("{}: unused; return it with `output`", list(&unread, "%")));
        }
        if logical && of_role {
            d = d.with_note(
                "one program cannot contain both logical ops (toperator) and ops of a role (ttile)",
            );
        }
        d.with_hint("complete the program and check it: its layouts determine whether these ops are correct")
    }

    /// Returns the text of a mesh with the axes that the attributes name, with placeholders for the
    /// sizes.
    fn mesh_text(&self) -> String {
        let named: BTreeSet<Axis> = self
            .ops
            .iter()
            .flat_map(|op| ["axis", "a2a_axis"].map(|a| op.attrs.get(a)))
            .filter_map(|a| MeshAxis::parse(a?))
            .collect();
        let axes: Vec<String> = named.iter().map(|a| format!("{a}=…")).collect();
        if axes.is_empty() { "tp=…".to_string() } else { axes.join(", ") }
    }
}

impl FragmentOp {
    /// Iterates over all values that the op reads, in text order.
    pub fn used_names(&self) -> impl Iterator<Item = &SpannedName> {
        self.operands.iter().chain(self.keyed.iter().map(|(_, n)| n)).chain(&self.after)
    }

    fn to_text(&self) -> String {
        let values = |names: &[SpannedName]| names.iter().map(|n| format!("%{}", n.text)).collect::<Vec<_>>();
        let mut out = values(&self.results).join(", ");
        if !out.is_empty() {
            out += " = ";
        }
        out += &match self.issue {
            true => format!("ttile.collective.issue {}", self.opcode.name()),
            false => qualified_name(self.opcode, self.dialect),
        };
        let mut operands: Vec<String> = self.name.iter().map(|n| quote_string(n)).collect();
        let symbol = self.symbol.as_ref().map(|s| format!("@{}", s.text));
        operands.extend(insert_buffer_operand(self.opcode, symbol, values(&self.operands).into_iter()));
        operands.extend(self.keyed.iter().map(|(k, n)| format!("{k}=%{}", n.text)));
        if !operands.is_empty() {
            out += &format!(" {}", operands.join(", "));
        }
        if !self.attrs.is_empty() {
            let attrs: Vec<String> =
                self.attrs.iter().map(|(k, v)| format!("{k} = {}", format_attr(v))).collect();
            out += &format!(" {{{}}}", attrs.join(", "));
        }
        if let Some(s) = &self.stream {
            out += &format!(" @{s}");
        }
        if !self.after.is_empty() {
            out += &format!(" after({})", values(&self.after).join(", "));
        }
        out
    }

    fn review(&self, file: &str) -> Diagnostics {
        let row = self.opcode.table_row();
        let refuse = |code, m: String| {
            Diagnostic::error(code, format!("{}: {m}", row.name)).with_span_label(file, "here", self.op_span)
        };
        let mut out = Vec::new();
        let (min_operands, max_operands) = row.operands;
        let n = self.operands.len();
        if n < min_operands || n > max_operands {
            let want = if min_operands == max_operands {
                min_operands.to_string()
            } else {
                format!("{min_operands} to {max_operands}")
            };
            out.push(refuse(&T0203, format!("has {n} operands, expected {want}")));
        }
        let gives = match (self.opcode, self.issue) {
            (_, true) => 1..=1,
            (Opcode::Wait, _) => 0..=1,
            _ => row.results..=row.results,
        };
        if !gives.contains(&self.results.len()) {
            out.push(refuse(
                &T0203,
                format!("has {} results, but {} are named", gives.end(), self.results.len()),
            ));
        }
        let named = matches!(self.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::Output);
        if self.name.is_some() && !named {
            out.push(refuse(&T0203, "does not take a name".to_string()));
        }
        for key in row.keyed.iter().filter(|k| !k.optional) {
            if !self.keyed.iter().any(|(k, _)| *k == key.name) {
                out.push(refuse(&T0203, format!("operand `{}=%…` is missing", key.name)));
            }
        }
        if self.opcode.takes_buffer() && self.symbol.is_none() {
            out.push(refuse(&T0203, "needs a buffer (`@name`)".to_string()));
        }
        for attr in row.attrs {
            let name = attr.name;
            match self.attrs.get(name) {
                None if attr.optional => {}
                None => out.push(match dim_reason(self.opcode, name) {
                    Some((what, why)) => {
                        refuse(&T0215, format!("attribute `{name}` is missing: it determines {what}"))
                            .with_note(why)
                    }
                    None => refuse(&T0215, format!("attribute `{name}` is missing")),
                }),
                Some(value) if !(attr.accepts)(value) => {
                    out.push(refuse(&T0215, invalid_attr(name, value, attr.expected)));
                }
                Some(_) => {}
            }
        }
        if let Some(why) = quantize_without_policy(&self.attrs) {
            out.push(refuse(&T0215, why.to_string()));
        }
        out
    }
}

/// For an attribute that names a tensor dim, returns what the dim determines and why it has no
/// default.
fn dim_reason(op: Opcode, name: &str) -> Option<(&'static str, &'static str)> {
    match (op, name) {
        (Opcode::ReduceScatter, "dim") => Some((
            "the dim that is scattered",
            "scores scattered over heads (V sharded by heads) or over query rows (V replicated) leave each softmax whole rows; \
if they are scattered over key positions, each rank normalises its own shard: wrong by O(1), and nothing fails at run time",
        )),
        (Opcode::AllGather, "dim") => Some((
            "the dim along which the shards are concatenated",
            "it must be the dim that the value is sharded over; concatenated along another dim, the shards end up in the wrong place, \
and nothing fails at run time",
        )),
        (Opcode::AllToAll, "concat" | "split") => Some((
            "the sharded dim before and after",
            "shards of one dim are sent and shards of another received; with other dims the values end up in the wrong \
place, and nothing fails at run time",
        )),
        _ => None,
    }
}

fn first_occurrences<'a>(names: impl Iterator<Item = &'a SpannedName>) -> Vec<&'a SpannedName> {
    let mut seen = BTreeSet::new();
    names.filter(|n| seen.insert(n.text.as_str())).collect()
}
