//! Parser for fragments: statements without an enclosing program.

use std::collections::BTreeMap;

use tessera_base::{Diagnostics, Span, closest_name, format_choices};

use super::lexer::TokenKind;
use super::{MAX_DIAGNOSTICS, ParseResult, ParsedOp, Parser, check_text_size};
use crate::codes::{T0201, T0203, T0204};
use crate::fragment::{Fragment, FragmentOp, SpannedName};
use crate::{Dialect, HINT_ATTRS, Program};

/// Returns whether a text is a fragment: it begins with an op instead of `program`.
#[must_use]
pub fn is_fragment(text: &str) -> bool {
    // Only a prefix of the text is tokenized, so that a long text is not read twice.
    let end = text.char_indices().nth(MAX_PREFIX_CHARS).map_or(text.len(), |(i, _)| i);
    let p = Parser::new(&text[..end], "");
    match p.peek() {
        Some(TokenKind::Value(_)) => true,
        Some(TokenKind::Word(w)) => p.begins_statement() && w != "program" && w != "buffer",
        _ => false,
    }
}

/// Parses a text of ops without an enclosing `program`. Operands may be undefined and attributes
/// may be missing ([`Fragment::review`] lists both), but types are not allowed.
///
/// # Errors
/// All syntax errors: T0201 to T0204.
pub fn parse_fragment(text: &str, file: &str) -> Result<Fragment, Diagnostics> {
    check_text_size(text, file)?;
    let mut p = Parser::new(text, file);
    let mut f = Fragment::default();
    // All values so far, with whether they are defined: a value must not be defined after its first
    // use.
    let mut names: BTreeMap<String, (bool, Span)> = BTreeMap::new();
    while p.position < p.tokens.len() && p.diagnostics.len() < MAX_DIAGNOSTICS {
        let begin = p.position;
        match p.parse_fragment_op(&mut names) {
            Ok(op) => f.ops.push(op),
            Err(d) => {
                p.diagnostics.push(*d);
                let mut refused = BTreeMap::new();
                if !p.skip_branch(begin, &mut refused) {
                    p.position = p.position.max(begin + 1);
                    p.skip_to_statement(begin);
                }
                // A fragment has no closing brace; an unmatched brace was already reported with its
                // op.
                while p.position > begin && p.eat_punct('}') {}
            }
        }
    }
    if p.diagnostics.is_empty() { Ok(f) } else { Err(p.diagnostics) }
}

/// Length of the prefix that [`is_fragment`] examines, in characters.
const MAX_PREFIX_CHARS: usize = 1 << 16;

impl Parser<'_> {
    fn parse_fragment_op(&mut self, names: &mut BTreeMap<String, (bool, Span)>) -> ParseResult<FragmentOp> {
        let start = self.next_span();
        if self.begins_statement() && self.eat_word("buffer") {
            let m = "a declaration in a fragment";
            let mut d = self.error_at(&T0201, m, "here", start);
            *d = d.with_hint("write a program: `program @name … { buffer @name : type … }`");
            return Err(d);
        }
        let dialect = self.next_dialect();
        // The op is parsed as part of a stand-in program, because a fragment has none.
        let w = self.parse_op(&Program {
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
            let mut d = self.error_at(&T0201, "a type in a fragment", "this type", *span);
            *d = d.with_hint(
                "a fragment has no mesh, so it cannot have layouts: put `program @name … { … }` around it",
            );
            return Err(d);
        }
        self.check_attr_names(&w)?;
        let name = |(text, span): (String, Span)| SpannedName { text, span };
        let row = w.opcode.table_row();
        let mut keyed = Vec::new();
        for (key, value, span) in w.keyed {
            keyed.push((self.resolve_key(row, &key, span)?, SpannedName { text: value, span }));
        }
        keyed.sort_by_key(|(k, _)| row.keyed_position(k));
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
        for n in op.used_names() {
            names.entry(n.text.clone()).or_insert((false, n.span));
        }
        for n in &op.results {
            if let Some((defined, first)) = names.get(&n.text) {
                let (how, there) = match defined {
                    true => ("defined twice", "first here"),
                    false => ("defined below its use", "used here"),
                };
                let m = format!("value %{} is {how}", n.text);
                let mut d = self.error_at(&T0204, m, "here", n.span);
                *d = d.with_span_label(self.file, there, *first);
                return Err(d);
            }
            names.insert(n.text.clone(), (true, n.span));
        }
        Ok(op)
    }

    /// Returns the dialect in which the next op is written.
    fn next_dialect(&self) -> Dialect {
        let word = self.tokens[self.position..].iter().find_map(|t| match &t.kind {
            TokenKind::Word(w) => Some(w.as_str()),
            _ => None,
        });
        if word.is_some_and(|w| w.starts_with("toperator.")) { Dialect::Logical } else { Dialect::Role }
    }

    fn check_attr_names(&self, w: &ParsedOp) -> ParseResult<()> {
        let known: Vec<&str> = w.opcode.table_row().attrs.iter().map(|a| a.name).collect();
        let odd = |a: &&String| !known.contains(&a.as_str()) && !HINT_ATTRS.contains(&a.as_str());
        let Some(odd) = w.attrs.keys().find(odd) else { return Ok(()) };
        let m = format!("{} has no attribute `{odd}`", w.opcode.name());
        let mut d = self.error_at(&T0203, m, "this op", w.op_span);
        *d = d.with_hint(match closest_name(odd, known.iter().copied()) {
            Some(n) => format!("did you mean `{n}`?"),
            None => format!("its attributes: {}", format_choices(&known)),
        });
        Err(d)
    }
}
