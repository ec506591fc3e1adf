//! A fragment: ops written down without a program around them, as papers and notes write them. It has no types, its
//! operands come from nowhere, and constants may be missing; so it can be read, printed and reviewed, not run.

use std::collections::BTreeSet;

use tessera_base::{Code, Diagnostic, Diagnostics, Span};
use tessera_mesh::{Axis, Reduction};

use crate::parse::{T0203, spelling};
use crate::print::{attr, quoted, with_buffer};
use crate::rules::{T0215, moe_constants};
use crate::{Attrs, Dialect, Opcode};

/// Ops without a program.
pub static T0206: Code = Code {
    id: "T0206",
    title: "fragment is not a program",
    page: "The text has ops and no `program` around them. It can be read and printed, but nothing can be proved of it: \
without types nobody knows which dim of a value is sharded over which axis, and the same ops are right for one layout \
and wrong for another.\n\n\
The message lists what is missing. Put `program @name role(r) mesh(tp=4) streams(compute) { … }` around the ops, or \
`program @name { … }` around logical ones; define every value that nobody defines as an input, a weight or a \
cache.read with its type; declare every `@name` as `buffer @name : type`; hand results out with `output`. Types of \
other results may be left out: the ops' rules give them.",
};

/// A name and where it stands.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Name {
    /// Without `%` or `@`.
    pub text: String,
    /// Position in the text.
    pub span: Span,
}

/// One op as written.
#[derive(Debug, Clone, PartialEq)]
pub struct FragmentOp {
    /// Which row of the op table.
    pub opcode: Opcode,
    /// The dialect it is spelled in.
    pub dialect: Dialect,
    /// Whether a collective is issued, to be waited for later.
    pub issue: bool,
    /// Values it defines.
    pub results: Vec<Name>,
    /// Name in quotes.
    pub name: Option<String>,
    /// Symbol operand: a buffer.
    pub symbol: Option<Name>,
    /// Operands by position.
    pub operands: Vec<Name>,
    /// Operands by key, in the order of the op table.
    pub keyed: Vec<(&'static str, Name)>,
    /// Constants.
    pub attrs: Attrs,
    /// Stream, where one is written.
    pub stream: Option<String>,
    /// Events to come after.
    pub after: Vec<Name>,
    /// From the first result to the last word.
    pub span: Span,
    /// The op's name.
    pub op_span: Span,
}

/// Ops in order.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Fragment {
    /// As written.
    pub ops: Vec<FragmentOp>,
}

/// The text of a fragment; [`crate::parse_fragment`] reads it back to an equal one, positions aside.
#[must_use]
pub fn print_fragment(f: &Fragment) -> String {
    f.ops.iter().map(|op| op.line() + "\n").collect()
}

impl Fragment {
    /// The same fragment with no positions.
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

    /// What stands between the fragment and a program: constants that are missing or impossible (T0215), operands
    /// (T0203), and last one T0206 that lists what must be completed. `file` names the text.
    #[must_use]
    pub fn review(&self, file: &str) -> Diagnostics {
        let mut out: Diagnostics = self.ops.iter().flat_map(|op| op.review(file)).collect();
        out.push(self.completion(file));
        out
    }

    /// Values that are read and that no op defines, each at its first use.
    #[must_use]
    pub fn free(&self) -> Vec<&Name> {
        let defined: BTreeSet<&str> =
            self.ops.iter().flat_map(|op| &op.results).map(|n| n.text.as_str()).collect();
        first_of_each(
            self.ops.iter().flat_map(FragmentOp::uses).filter(|n| !defined.contains(n.text.as_str())),
        )
    }

    fn completion(&self, file: &str) -> Diagnostic {
        let list = |names: &[&Name], sigil: &str| {
            names.iter().map(|n| format!("{sigil}{}", n.text)).collect::<Vec<_>>().join(", ")
        };
        let free = self.free();
        let symbols = first_of_each(self.ops.iter().filter_map(|op| op.symbol.as_ref()));
        let used: BTreeSet<&str> =
            self.ops.iter().flat_map(FragmentOp::uses).map(|n| n.text.as_str()).collect();
        let unread: Vec<&Name> =
            self.ops.iter().flat_map(|op| &op.results).filter(|n| !used.contains(n.text.as_str())).collect();
        let logical = self.ops.iter().any(|op| op.dialect == Dialect::Logical);
        let of_role = self.ops.iter().any(|op| op.dialect == Dialect::Role);
        let header = match (logical, of_role) {
            (true, false) => "program @name { … }".to_string(),
            _ => format!("program @name role(r) mesh({}) streams(compute) {{ … }}", self.mesh()),
        };
        let mut lacks = vec!["a header".to_string()];
        if !free.is_empty() {
            lacks.push(format!("types of {}", list(&free, "%")));
        }
        if !symbols.is_empty() {
            lacks.push(format!("a declaration of {}", list(&symbols, "@")));
        }
        let at = free.first().map(|n| n.span).or(self.ops.first().map(|op| op.op_span)).unwrap_or_default();
        let says = if free.is_empty() { "begins here" } else { "nobody defines it" };
        let mut d =
            Diagnostic::error(&T0206, format!("fragment is not a program: it lacks {}", lacks.join("; ")))
                .at_span(file, says, at);
        for n in free.iter().skip(1) {
            d = d.at_span(file, "nor this", n.span);
        }
        for s in &symbols {
            d = d.at_span(file, "not declared", s.span);
        }
        d = d.note(format!("header: {header}"));
        if !free.is_empty() {
            d = d.note(format!(
                "{}: an input, weight or cache.read with its type, such as f32[4, 8] {{tp: shard(0)}}",
                list(&free, "%")
            ));
        }
        if !symbols.is_empty() {
            d = d.note(format!("{}: `buffer @name : type`", list(&symbols, "@")));
        }
        if !unread.is_empty() {
            d = d.note(format!("{}: read by nobody; hand it out with `output`", list(&unread, "%")));
        }
        if logical && of_role {
            d = d.note("logical ops (toperator) and ops of a role (ttile) do not go into one program");
        }
        d.hint("complete it, and check the program: its layouts decide whether these ops are right")
    }

    /// The axes that constants name, sizes open.
    fn mesh(&self) -> String {
        let named: BTreeSet<Axis> = self
            .ops
            .iter()
            .flat_map(|op| ["axis", "a2a_axis"].map(|a| op.word(a)))
            .filter_map(|a| a?.parse().ok())
            .collect();
        let axes: Vec<String> = named.iter().map(|a| format!("{a}=…")).collect();
        if axes.is_empty() { "tp=…".to_string() } else { axes.join(", ") }
    }
}

impl FragmentOp {
    /// Every value it reads, in text order.
    pub fn uses(&self) -> impl Iterator<Item = &Name> {
        self.operands.iter().chain(self.keyed.iter().map(|(_, n)| n)).chain(&self.after)
    }

    fn word(&self, name: &str) -> Option<&str> {
        match self.attrs.get(name) {
            Some(crate::Attr::Str(s)) => Some(s),
            _ => None,
        }
    }

    fn line(&self) -> String {
        let values = |names: &[Name]| names.iter().map(|n| format!("%{}", n.text)).collect::<Vec<_>>();
        let mut out = values(&self.results).join(", ");
        if !out.is_empty() {
            out += " = ";
        }
        out += &match self.issue {
            true => format!("ttile.collective.issue {}", self.opcode.name()),
            false => spelling(self.opcode, self.dialect),
        };
        let mut operands: Vec<String> = self.name.iter().map(|n| quoted(n)).collect();
        let symbol = self.symbol.as_ref().map(|s| format!("@{}", s.text));
        operands.extend(with_buffer(self.opcode, symbol, values(&self.operands).into_iter()));
        operands.extend(self.keyed.iter().map(|(k, n)| format!("{k}=%{}", n.text)));
        if !operands.is_empty() {
            out += &format!(" {}", operands.join(", "));
        }
        if !self.attrs.is_empty() {
            let attrs: Vec<String> = self.attrs.iter().map(|(k, v)| format!("{k} = {}", attr(v))).collect();
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
        let row = self.opcode.row();
        let refuse = |code, m: String| {
            Diagnostic::error(code, format!("{}: {m}", row.name)).at_span(file, "here", self.op_span)
        };
        let mut out = Vec::new();
        let (least, most) = row.operands;
        let n = self.operands.len();
        if n < least || n > most {
            let want = if least == most { least.to_string() } else { format!("{least} to {most}") };
            out.push(refuse(&T0203, format!("{n} operands, takes {want}")));
        }
        let gives = match (self.opcode, self.issue) {
            (_, true) => 1..=1,
            (Opcode::Wait, _) => 0..=1,
            _ => row.results..=row.results,
        };
        if !gives.contains(&self.results.len()) {
            out.push(refuse(
                &T0203,
                format!("gives {} results, {} are named", gives.end(), self.results.len()),
            ));
        }
        let named = matches!(self.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::Output);
        if self.name.is_some() && !named {
            out.push(refuse(&T0203, "takes no name".to_string()));
        }
        for key in row.keyed.iter().filter(|k| !k.ends_with('?')) {
            if !self.keyed.iter().any(|(k, _)| k == key) {
                out.push(refuse(&T0203, format!("operand `{key}=%…` is missing")));
            }
        }
        if self.opcode.takes_buffer() && self.symbol.is_none() {
            out.push(refuse(&T0203, "needs a buffer (`@name`)".to_string()));
        }
        for name in row.attrs.iter().filter(|a| !a.ends_with('?') && !self.attrs.contains_key(**a)) {
            out.push(match dim_reason(self.opcode, name) {
                Some((what, why)) => {
                    refuse(&T0215, format!("names no tensor dim (`{name}`): {what} must be said")).note(why)
                }
                None => refuse(&T0215, format!("constant `{name}` is missing")),
            });
        }
        for (name, is_known) in [
            ("axis", (|w: &str| w.parse::<Axis>().is_ok()) as fn(&str) -> bool),
            ("reduction", |w| Reduction::parse(w).is_some()),
        ] {
            let written = self.attrs.get(name).filter(|_| row.attrs.contains(&name));
            if written.is_some() && !self.word(name).is_some_and(is_known) {
                let what = if name == "axis" { "mesh axis" } else { "reduction" };
                out.push(refuse(&T0215, format!("`{name}` names no {what}")));
            }
        }
        let complete = row.attrs.iter().all(|a| a.ends_with('?') || self.attrs.contains_key(*a));
        if self.opcode == Opcode::MoeRoute
            && complete
            && let Err(e) = moe_constants(&self.attrs, None)
        {
            out.push(refuse(e.code, e.message));
        }
        out
    }
}

/// For a constant that names a tensor dim: which one, and why it may not be guessed.
fn dim_reason(op: Opcode, name: &str) -> Option<(&'static str, &'static str)> {
    match (op, name) {
        (Opcode::ReduceScatter, "dim") => Some((
            "which dim is scattered",
            "scores scattered over heads (V cut by heads) or over query rows (V whole) leave each softmax whole rows; \
scattered over key positions, each rank normalises its own piece: wrong by O(1), and nothing fails at run time",
        )),
        (Opcode::AllGather, "dim") => Some((
            "along which dim the pieces are joined",
            "it is the dim that the value is sharded over; along another one the pieces come out in the wrong place, \
and nothing fails at run time",
        )),
        (Opcode::AllToAll, "concat" | "split") => Some((
            "which dim it is sharded over before and after",
            "pieces of one dim go out and pieces of another come in; with other dims the values come out in the wrong \
place, and nothing fails at run time",
        )),
        _ => None,
    }
}

fn first_of_each<'a>(names: impl Iterator<Item = &'a Name>) -> Vec<&'a Name> {
    let mut seen = BTreeSet::new();
    names.filter(|n| seen.insert(n.text.as_str())).collect()
}
