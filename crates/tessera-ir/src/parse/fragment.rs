//! Reads fragments: statements without a program around them.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics, Span, choices, nearest};

use super::lex::{Tok, lex};
use super::{DIAGNOSTICS_MAX, Parsed, Parser, T0201, T0203, T0204, TEXT_BYTES_MAX, Written};
use crate::fragment::{Fragment, FragmentOp, Name};
use crate::{Dialect, HINTS, Program};

/// Whether a text is a fragment: it begins with an op, not with `program`.
#[must_use]
pub fn is_fragment(text: &str) -> bool {
    // The first op stands on the first lines that are no comment; a long text is not read twice for it.
    let end = text.char_indices().nth(FIRST_OP_CHARS_MAX).map_or(text.len(), |(i, _)| i);
    let p = parser(&text[..end], "");
    match p.peek() {
        Some(Tok::Value(_)) => true,
        Some(Tok::Word(w)) => p.begins_statement() && w != "program" && w != "buffer",
        _ => false,
    }
}

/// The ops of a text that has no `program` around them. Operands may be defined by nobody, constants may be missing
/// ([`Fragment::review`] lists both); types are not written in a fragment.
///
/// # Errors
/// Everything that cannot be read: T0201 to T0204.
pub fn parse_fragment(text: &str, file: &str) -> Result<Fragment, Diagnostics> {
    if text.len() > TEXT_BYTES_MAX {
        let m = format!("text of {} bytes; at most {TEXT_BYTES_MAX} are read", text.len());
        return Err(vec![Diagnostic::error(&T0201, m).at(file, "too large")]);
    }
    let mut p = parser(text, file);
    let mut f = Fragment::default();
    // Every value seen, with whether it is defined: one that is read first may not be defined later.
    let mut names: BTreeMap<String, (bool, Span)> = BTreeMap::new();
    while p.at < p.tokens.len() && p.found.len() < DIAGNOSTICS_MAX {
        let begin = p.at;
        match p.fragment_op(&mut names) {
            Ok(op) => f.ops.push(op),
            Err(d) => {
                p.found.push(*d);
                let mut refused = BTreeMap::new();
                if !p.skip_branch(begin, &mut refused) {
                    p.at = p.at.max(begin + 1);
                    p.recover(begin);
                }
                // Nothing closes here: a brace that no op opened was reported with its op.
                while p.at > begin && p.eat('}') {}
            }
        }
    }
    if p.found.is_empty() { Ok(f) } else { Err(p.found) }
}

/// Comments aside, more than any op before its name.
const FIRST_OP_CHARS_MAX: usize = 1 << 16;

fn parser<'a>(text: &'a str, file: &'a str) -> Parser<'a> {
    Parser { text, file, tokens: lex(text), at: 0, found: Vec::new(), definitions: Vec::new() }
}

impl Parser<'_> {
    fn fragment_op(&mut self, names: &mut BTreeMap<String, (bool, Span)>) -> Parsed<FragmentOp> {
        let start = self.span();
        if self.begins_statement() && self.eat_word("buffer") {
            let m = "a declaration in a fragment";
            let mut d = self.error(&T0201, m, "here", start);
            *d = d.hint("write a program: `program @name … { buffer @name : type … }`");
            return Err(d);
        }
        let dialect = self.dialect_here();
        // The op's name and its types are read as in a program, which a fragment lacks.
        let w = self.op(&Program {
            name: String::new(),
            dialect,
            role: String::new(),
            mesh: tessera_mesh::Mesh::new([2; 4]).unwrap_or_default(),
            streams: Vec::new(),
            buffers: Vec::new(),
            values: Vec::new(),
            ops: Vec::new(),
        })?;
        if let Some((_, span)) = w.types.first() {
            let mut d = self.error(&T0201, "a type in a fragment", "this type", *span);
            *d = d.hint("a fragment has no mesh to lay types over: put `program @name … { … }` around it");
            return Err(d);
        }
        self.known_constants(&w)?;
        let name = |(text, span): (String, Span)| Name { text, span };
        let row = w.opcode.row();
        let mut keyed = Vec::new();
        for (key, value, span) in w.keyed {
            keyed.push((self.keyed_operand(row, &key, span)?, Name { text: value, span }));
        }
        keyed.sort_by_key(|(k, _)| row.keyed.iter().position(|o| o.trim_end_matches('?') == *k));
        let op = FragmentOp {
            opcode: w.opcode,
            dialect,
            issue: w.issue,
            results: w.results.into_iter().map(name).collect(),
            name: w.name.map(|(n, _)| n),
            symbol: w.buffer.map(name),
            operands: w.operands.into_iter().map(name).collect(),
            keyed,
            attrs: w.attrs,
            stream: w.stream.map(|(s, _)| s),
            after: w.after.into_iter().map(name).collect(),
            span: w.span,
            op_span: w.op_span,
        };
        for n in op.uses() {
            names.entry(n.text.clone()).or_insert((false, n.span));
        }
        for n in &op.results {
            if let Some((defined, first)) = names.get(&n.text) {
                let (how, there) = match defined {
                    true => ("defined twice", "first here"),
                    false => ("defined below its use", "used here"),
                };
                let m = format!("value %{} is {how}", n.text);
                let mut d = self.error(&T0204, m, "here", n.span);
                *d = d.at_span(self.file, there, *first);
                return Err(d);
            }
            names.insert(n.text.clone(), (true, n.span));
        }
        Ok(op)
    }

    /// Which dialect the op that follows is spelled in.
    fn dialect_here(&self) -> Dialect {
        let word = self.tokens[self.at..].iter().find_map(|t| match &t.tok {
            Tok::Word(w) => Some(w.as_str()),
            _ => None,
        });
        if word.is_some_and(|w| w.starts_with("toperator.")) { Dialect::Logical } else { Dialect::Role }
    }

    fn known_constants(&self, w: &Written) -> Parsed<()> {
        let known: Vec<&str> = w.opcode.row().attrs.iter().map(|a| a.trim_end_matches('?')).collect();
        let odd = |a: &&String| !known.contains(&a.as_str()) && !HINTS.contains(&a.as_str());
        let Some(odd) = w.attrs.keys().find(odd) else { return Ok(()) };
        let m = format!("{} has no constant `{odd}`", w.opcode.name());
        let mut d = self.error(&T0203, m, "this op", w.op_span);
        *d = d.hint(match nearest(odd, known.iter().copied()) {
            Some(n) => format!("did you mean `{n}`?"),
            None => format!("its constants: {}", choices(&known)),
        });
        Err(d)
    }
}
