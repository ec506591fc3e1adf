//! Parser for IR text, both printed by [`crate::print`] and written manually.
//!
//! Manually written text may contain white space and `//` comments anywhere. It may omit a result
//! type that the op's rule determines, and the stream of an op, which defaults to the first stream.
//! An error affects only its own op: the parser continues with the next op and does not report
//! consequences of an error that it already reported.

mod branch;
mod cursor;
mod fragment;
mod lexer;
mod op;
mod program;
mod resolve;
mod types;

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics, Span};

use crate::codes::T0201;
use crate::{Attrs, Dialect, OpKind, Opcode, Program, Type, ValueId};
pub use fragment::{is_fragment, parse_fragment};
use lexer::{Token, TokenKind, tokenize};

/// Maximum size of a text in bytes; a larger text is rejected before it is tokenized.
const MAX_TEXT_BYTES: usize = 256 << 20;
/// Maximum number of items in a list: operands, attributes, streams, a shape.
const MAX_LIST_ITEMS: usize = 4096;
/// Maximum number of diagnostics per text.
const MAX_DIAGNOSTICS: usize = 200;

/// Parses a text that contains exactly one program. `file` names the text in diagnostics.
///
/// # Errors
/// All problems of the text: T0201 to T0205, and the errors of the ops' rules.
pub fn parse(text: &str, file: &str) -> Result<Program, Diagnostics> {
    let mut programs = parse_all(text, file)?;
    match (programs.pop(), programs.len()) {
        (Some(p), 0) => Ok(p),
        (_, n) => {
            let says = format!("{} programs", if n == 0 { 0 } else { n + 1 });
            Err(vec![
                Diagnostic::error(&T0201, "one program expected")
                    .with_span_label(file, says, Span { start: 0, end: 0 })
                    .with_hint("begin with `program @name streams(compute) {`"),
            ])
        }
    }
}

/// Parses all programs of a text, in order.
///
/// # Errors
/// All problems of the text: T0201 to T0205, and the errors of the ops' rules.
pub fn parse_all(text: &str, file: &str) -> Result<Vec<Program>, Diagnostics> {
    check_text_size(text, file)?;
    let mut p = Parser::new(text, file);
    let mut programs = Vec::new();
    while p.position < p.tokens.len() && p.diagnostics.len() < MAX_DIAGNOSTICS {
        match p.parse_program() {
            Ok(program) => programs.push(program),
            Err(d) => {
                p.diagnostics.push(*d);
                p.skip_to(|t| matches!(&t.kind, TokenKind::Word(w) if w == "program"));
            }
        }
    }
    if p.diagnostics.is_empty() { Ok(programs) } else { Err(p.diagnostics) }
}

fn check_text_size(text: &str, file: &str) -> Result<(), Diagnostics> {
    if text.len() <= MAX_TEXT_BYTES {
        return Ok(());
    }
    let m = format!("text has {} bytes, the maximum is {MAX_TEXT_BYTES}", text.len());
    Err(vec![Diagnostic::error(&T0201, m).with_label(file, "too large")])
}

type ParseResult<T> = Result<T, Box<Diagnostic>>;

/// All names with the value (`None` if its op was rejected) and the position of the definition.
type NameTable = BTreeMap<String, (Option<ValueId>, Span)>;

struct Parser<'a> {
    text: &'a str,
    file: &'a str,
    tokens: Vec<Token>,
    position: usize,
    diagnostics: Diagnostics,
    /// Index of the op that defines each value of the current program.
    definitions: Vec<Option<usize>>,
}

impl<'a> Parser<'a> {
    fn new(text: &'a str, file: &'a str) -> Parser<'a> {
        Parser {
            text,
            file,
            tokens: tokenize(text),
            position: 0,
            diagnostics: Vec::new(),
            definitions: Vec::new(),
        }
    }
}

/// An op in syntactic form, before name resolution.
struct ParsedOp {
    results: Vec<(String, Span)>,
    opcode: Opcode,
    issue: bool,
    op_span: Span,
    name: Option<(String, Span)>,
    buffer: Option<(String, Span)>,
    operands: Vec<(String, Span)>,
    keyed: Vec<(String, String, Span)>,
    attrs: Attrs,
    types: Vec<(Type, Span)>,
    stream: Option<(String, Span)>,
    after: Vec<(String, Span)>,
    span: Span,
}

/// Returns the spelling of an op in a dialect, with its prefix.
pub(crate) fn qualified_name(op: Opcode, dialect: Dialect) -> String {
    let row = op.table_row();
    match row.kind {
        OpKind::Collective => format!("ttile.collective.{}", row.name),
        OpKind::Order if op == Opcode::Wait => "ttile.collective.wait".to_string(),
        OpKind::Compute if dialect == Dialect::Logical => format!("toperator.{}", row.name),
        OpKind::Compute => format!("ttile.{}", row.name),
        _ => row.name.to_string(),
    }
}

#[cfg(test)]
mod tests;
