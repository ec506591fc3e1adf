//! Parser for IR text, both printed by [`crate::print`] and written manually.
//!
//! Manually written text may contain white space and `//` comments anywhere. It may omit a result
//! type that the op's rule determines, and the stream of an op, which defaults to the first stream.
//! An error affects only its own op: the parser continues with the next op and does not report
//! consequences of an error that it already reported.

mod branch;
mod fragment;
mod lexer;
mod resolve;
mod types;

use tessera_base::{Code, Diagnostic, Diagnostics, Span, closest_name};
use tessera_mesh::Mesh;

use crate::rules::{T0211, check_type};
use crate::{Attr, Attrs, Buffer, Dialect, OP_TABLE, OpKind, Opcode, Program, Type};
pub use fragment::{is_fragment, parse_fragment};
use lexer::{Token, TokenKind, tokenize};
use resolve::{NameTable, define_value};

/// The text violates the grammar.
pub static T0201: Code = Code {
    id: "T0201",
    title: "IR text cannot be read",
    page: "The text violates the grammar at the position shown. A program is\n\n\
    program @name role(stage0) mesh(tp=2) streams(compute, tp_collective) {\n\
      buffer @kv.0.k : f32[90, 24] {tp: shard(1)}\n\
      %y = ttile.matmul %x, %w, bias=%b {act = \"silu\"} : f32[30, 24] {tp: shard(1)} @compute after(%e)\n\
    }\n\n\
A logical program has neither role nor mesh. An op consists of, in this order: results, op name, operands, attributes in braces, \
result types after a colon, stream, events. A layout lists for each mesh axis replicated, shard(dim), \
shard(dim, extent=n, unit=u) or partial(sum|tree|max); an omitted axis is replicated. A final `group_size=w` in a shard or partial means \
that each subgroup of w positions of the axis holds the whole value. mesh(tp=2, outside=1) has a rank 0 outside the mesh.\n\n\
After an error the parser continues at the next line that begins an op, so `tessera check` reports all errors at once.",
};
/// The op is unknown.
pub static T0202: Code = Code {
    id: "T0202",
    title: "unknown op",
    page: "The op table has no op with this name, or the op is written in the wrong dialect. Logical programs compute with \
`toperator.*` and have no collectives. Programs of a role compute with `ttile.*` and issue collectives as \
`ttile.collective.*`, or as `ttile.collective.issue` with a later `ttile.collective.wait`. Sources and sinks (input, \
call, weight, output, cache.read, cache.write, event.record) have no prefix.\n\n\
There is no `if`, no loop and no `select`. The ops that a program issues must not depend on data, because a rank that skips a collective \
blocks the other ranks. Let the leader decide, through the phase list of a call or through another phase; issue the collective \
unconditionally, with an empty payload if necessary.\n\n\
The message shows the closest known name, if there is one.",
};
/// Operands or attributes do not match the op table.
pub static T0203: Code = Code {
    id: "T0203",
    title: "operands or attributes do not match the op",
    page: "The op table lists for each op its positional operands, its keyed operands (`start=%s`), and its \
required and optional attributes. This op lacks a required one, gives one twice, or gives one that the table does not list. An unknown attribute \
is rejected instead of being ignored: a misspelt `segments` would otherwise silently change the numbers.\n\n\
Tickets can only be used by `wait`, events only in `after(…)`, and call scalars only as keyed operands.",
};
/// A name is undefined or redefined.
pub static T0204: Code = Code {
    id: "T0204",
    title: "name is undefined or defined twice",
    page: "A value (%name) is defined once, above its first use. Buffers (@name) are declared in the program with \
`buffer @name : type`, streams in its header with `streams(…)`. With two definitions of a name it would be unclear which value \
later ops read, so the second definition is rejected and the first one is shown with it.",
};
/// The written type differs from the inferred type.
pub static T0205: Code = Code {
    id: "T0205",
    title: "written type differs from the inferred type",
    page: "The type written after the colon differs from the type that the op's rule infers from its operands; the message shows both. The \
inference uses local shapes and layouts, so the written type, an operand's type, or the choice of op is wrong.\n\n\
With uneven shards the local extent depends on the role: the coordinate in the role's name determines the shard, so \
`role(stage0@tp1)` has the shard at position 1 of tp. Omit the type to use the inferred one; inputs, call scalars, \
weights and receives always need a type.",
};

/// Maximum size of a text in bytes.
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
    if text.len() > MAX_TEXT_BYTES {
        let m = format!("text has {} bytes, the maximum is {MAX_TEXT_BYTES}", text.len());
        return Err(vec![Diagnostic::error(&T0201, m).with_label(file, "too large")]);
    }
    let mut p = Parser {
        text,
        file,
        tokens: tokenize(text),
        position: 0,
        diagnostics: Vec::new(),
        definitions: Vec::new(),
    };
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

type ParseResult<T> = Result<T, Box<Diagnostic>>;

struct Parser<'a> {
    text: &'a str,
    file: &'a str,
    tokens: Vec<Token>,
    position: usize,
    diagnostics: Diagnostics,
    /// Index of the op that defines each value of the current program.
    definitions: Vec<Option<usize>>,
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

impl Parser<'_> {
    fn peek(&self) -> Option<&TokenKind> {
        self.peek_at(0)
    }

    fn peek_at(&self, ahead: usize) -> Option<&TokenKind> {
        self.tokens.get(self.position + ahead).map(|t| &t.kind)
    }

    fn next_is(&self, c: char) -> bool {
        self.peek() == Some(&TokenKind::Punct(c))
    }

    /// Returns the span of the next token, or the end of the text.
    fn next_span(&self) -> Span {
        let end = self.text.len();
        self.tokens.get(self.position).map_or(Span { start: end, end }, |t| t.span)
    }

    /// Returns the span from `start` to the last consumed token.
    fn span_since(&self, start: Span) -> Span {
        let end = self.tokens[..self.position].last().map_or(start.end, |t| t.span.end);
        Span { start: start.start, end: end.max(start.end) }
    }

    fn error_at(
        &self,
        code: &'static Code,
        message: impl Into<String>,
        says: impl Into<String>,
        span: Span,
    ) -> Box<Diagnostic> {
        Box::new(Diagnostic::error(code, message).with_span_label(self.file, says, span))
    }

    fn expected_error<T>(&self, what: &str) -> ParseResult<T> {
        let found = match self.peek() {
            None => "the end of the text".to_string(),
            Some(TokenKind::Bad(why)) => (*why).to_string(),
            Some(_) => {
                let s = self.next_span();
                format!("`{}`", self.text.get(s.start..s.end).unwrap_or(""))
            }
        };
        Err(self.error_at(&T0201, format!("expected {what}"), format!("found {found}"), self.next_span()))
    }

    fn eat_punct(&mut self, c: char) -> bool {
        let there = self.next_is(c);
        self.position += usize::from(there);
        there
    }

    fn expect_punct(&mut self, c: char) -> ParseResult<()> {
        if self.eat_punct(c) { Ok(()) } else { self.expected_error(&format!("`{c}`")) }
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let there = matches!(self.peek(), Some(TokenKind::Word(w)) if w == word);
        self.position += usize::from(there);
        there
    }

    fn expect_word(&mut self, what: &str) -> ParseResult<String> {
        match self.peek() {
            Some(TokenKind::Word(w)) => {
                let w = w.clone();
                self.position += 1;
                Ok(w)
            }
            _ => self.expected_error(what),
        }
    }

    fn expect_at_name(&mut self, what: &str) -> ParseResult<String> {
        match self.peek() {
            Some(TokenKind::Symbol(n)) => {
                let n = n.clone();
                self.position += 1;
                Ok(n)
            }
            _ => self.expected_error(what),
        }
    }

    fn expect_value(&mut self) -> ParseResult<(String, Span)> {
        match self.peek() {
            Some(TokenKind::Value(n)) => {
                let found = (n.clone(), self.next_span());
                self.position += 1;
                Ok(found)
            }
            _ => self.expected_error("a value (`%name`)"),
        }
    }

    fn expect_natural(&mut self, what: &str) -> ParseResult<u64> {
        match self.peek() {
            Some(TokenKind::Int(i)) if *i >= 0 => {
                let n = i.unsigned_abs();
                self.position += 1;
                Ok(n)
            }
            _ => self.expected_error(what),
        }
    }

    /// Parses items separated by commas, up to `close`.
    fn parse_list<T>(
        &mut self,
        close: char,
        mut item: impl FnMut(&mut Self) -> ParseResult<T>,
    ) -> ParseResult<Vec<T>> {
        let mut out = Vec::new();
        if self.eat_punct(close) {
            return Ok(out);
        }
        loop {
            out.push(item(self)?);
            if self.eat_punct(close) {
                return Ok(out);
            }
            if out.len() >= MAX_LIST_ITEMS {
                return self.expected_error(&format!("at most {MAX_LIST_ITEMS} items"));
            }
            if !self.eat_punct(',') {
                return self.expected_error(&format!("`,` or `{close}`"));
            }
        }
    }

    fn skip_to(&mut self, stop: impl Fn(&Token) -> bool) {
        while let Some(t) = self.tokens.get(self.position) {
            if t.starts_line && stop(t) {
                return;
            }
            self.position += 1;
        }
    }

    /// Returns whether a statement begins at the next token.
    fn begins_statement(&self) -> bool {
        match self.peek() {
            Some(TokenKind::Value(_)) => {
                let mut ahead = 1;
                while self.peek_at(ahead) == Some(&TokenKind::Punct(','))
                    && matches!(self.peek_at(ahead + 1), Some(TokenKind::Value(_)))
                {
                    ahead += 2;
                }
                self.peek_at(ahead) == Some(&TokenKind::Punct('='))
            }
            Some(TokenKind::Word(w)) => {
                matches!(w.as_str(), "buffer" | "program")
                    || OP_TABLE.iter().any(|r| {
                        matches!(r.kind, OpKind::Source | OpKind::Sink | OpKind::Order) && r.name == w
                    })
                    || w.starts_with("ttile.")
                    || w.starts_with("toperator.")
                    || (branch::is_branch(w) && self.peek_at(1) != Some(&TokenKind::Punct('=')))
            }
            Some(TokenKind::Punct('}')) | None => true,
            _ => false,
        }
    }

    /// Skips from an invalid statement, which began at token `begin`, to the next statement or the
    /// end of the program.
    fn skip_to_statement(&mut self, begin: usize) {
        let from = self.position;
        self.position = begin;
        let mut open = 0usize;
        while let Some(t) = self.tokens.get(self.position) {
            let outside = open == 0 && matches!(t.kind, TokenKind::Value(_) | TokenKind::Punct('}'));
            if self.position >= from && (t.starts_line || outside) && self.begins_statement() {
                return;
            }
            match t.kind {
                TokenKind::Punct('{') => open += 1,
                TokenKind::Punct('}') => open = open.saturating_sub(1),
                _ => {}
            }
            self.position += 1;
        }
    }

    fn parse_program(&mut self) -> ParseResult<Program> {
        if !self.eat_word("program") {
            return self.expected_error("`program`");
        }
        let name = self.expect_at_name("the program's name (`@name`)")?;
        let mut p = Program {
            name,
            dialect: Dialect::Logical,
            role: String::new(),
            mesh: Mesh::default(),
            streams: Vec::new(),
            buffers: Vec::new(),
            values: Vec::new(),
            ops: Vec::new(),
        };
        let mut mesh_span = None;
        while !self.eat_punct('{') {
            let start = self.next_span();
            let part = self.expect_word("role(…), mesh(…), streams(…) or `{`")?;
            if !matches!(part.as_str(), "role" | "mesh" | "streams") {
                self.position -= 1;
                return self.expected_error("role(…), mesh(…), streams(…) or `{`");
            }
            self.expect_punct('(')?;
            match part.as_str() {
                "role" => {
                    p.dialect = Dialect::Role;
                    p.role = self.parse_role()?;
                }
                "mesh" => {
                    p.mesh = self.parse_mesh()?;
                    mesh_span = Some(self.span_since(start));
                }
                _ => {
                    p.streams = self.parse_list(')', |s| s.expect_word("the name of a stream"))?;
                    if let Some(twice) =
                        (1..p.streams.len()).find(|i| p.streams[..*i].contains(&p.streams[*i]))
                    {
                        let m = format!("stream {} is declared twice", p.streams[twice]);
                        return Err(self.error_at(&T0204, m, "here", self.span_since(start)));
                    }
                }
            }
        }
        if let (Dialect::Logical, Some(span)) = (p.dialect, mesh_span) {
            return Err(self.error_at(
                &T0201,
                "a mesh without a role",
                "a logical program has no mesh",
                span,
            ));
        }
        if p.streams.is_empty() {
            p.streams.push("compute".to_string());
        }
        self.parse_body(&mut p);
        Ok(p)
    }

    /// Parses a role name up to `)`. The name may contain coordinates, as in `stage0@tp1`.
    fn parse_role(&mut self) -> ParseResult<String> {
        let mut role = String::new();
        while !self.eat_punct(')') {
            match self.peek() {
                Some(TokenKind::Word(w)) if role.is_empty() => role.push_str(w),
                Some(TokenKind::Symbol(n)) => role.extend(["@", n.as_str()]),
                _ => return self.expected_error("a role such as `stage0` or `stage0@tp1`"),
            }
            self.position += 1;
        }
        Ok(role)
    }

    fn parse_mesh(&mut self) -> ParseResult<Mesh> {
        let start = self.next_span();
        let axes = self.parse_list(')', |s| {
            let axis = s.expect_word("a mesh axis")?;
            s.expect_punct('=')?;
            Ok(format!("{axis}={}", s.expect_natural("the size of the axis")?))
        })?;
        axes.join(",")
            .parse::<Mesh>()
            .map_err(|d| Box::new(d.with_span_label(self.file, "this mesh", self.span_since(start))))
    }

    fn parse_body(&mut self, p: &mut Program) {
        let mut names = NameTable::new();
        self.definitions.clear();
        loop {
            if self.diagnostics.len() >= MAX_DIAGNOSTICS {
                self.position = self.tokens.len();
                return;
            }
            if self.eat_punct('}') {
                return;
            }
            if self.peek().is_none_or(|t| *t == TokenKind::Word("program".into())) {
                let d = self.expected_error::<()>("`}` at the end of the program");
                self.diagnostics.extend(d.err().map(|d| *d));
                return;
            }
            let begin = self.position;
            if let Err(d) = self.parse_statement(p, &mut names) {
                self.diagnostics.push(*d);
                // Mark the values defined here as known, so that their uses are not reported as
                // well.
                let taken = self.position.max(begin + 1);
                self.position = begin;
                while let (Some(TokenKind::Value(n)), true) = (self.peek(), self.begins_statement()) {
                    names.entry(n.clone()).or_insert((None, self.next_span()));
                    self.position += if self.peek_at(1) == Some(&TokenKind::Punct(',')) { 2 } else { 1 };
                }
                self.position = taken;
                if !self.skip_branch(begin, &mut names) {
                    self.skip_to_statement(begin);
                }
            }
        }
    }

    fn parse_statement(&mut self, p: &mut Program, names: &mut NameTable) -> ParseResult<()> {
        if self.eat_word("buffer") {
            return self.parse_buffer(p);
        }
        let w = self.parse_op(p)?;
        let written: Vec<Type> = w.types.iter().map(|(t, _)| t.clone()).collect();
        let results = w.results.clone();
        match self.resolve_op(p, names, w) {
            Ok(Some(types)) => {
                for (name, ty) in results.into_iter().zip(types) {
                    define_value(p, names, name, Some(ty));
                }
            }
            // A rejected op: later ops are checked against its written types, if there are any.
            refused => {
                self.diagnostics.extend(refused.err().map(|d| *d));
                let mut written = written.into_iter();
                for name in results {
                    let ty = written.next().filter(|t| check_type(p, t).is_ok());
                    define_value(p, names, name, ty);
                }
            }
        }
        Ok(())
    }

    fn parse_buffer(&mut self, p: &mut Program) -> ParseResult<()> {
        let start = self.next_span();
        let name = self.expect_at_name("the buffer's name (`@name`)")?;
        let named = self.span_since(start);
        self.expect_punct(':')?;
        let start = self.next_span();
        let ty = self.parse_type(&p.mesh)?;
        if p.buffers.iter().any(|b| b.name == name) {
            return Err(self.error_at(
                &T0204,
                format!("buffer @{name} is declared twice"),
                "again here",
                named,
            ));
        }
        if ty.is_token() {
            return Err(self.error_at(
                &T0203,
                format!("a buffer cannot have the type {}", ty.dtype),
                "a token holds no data",
                self.span_since(start),
            ));
        }
        let refused = if let Err(e) = check_type(p, &ty) {
            Err(self.error_at(e.code, e.message, "this type", self.span_since(start)))
        } else if let Some((axis, r)) = ty.layout.partial_axis() {
            let m = format!("a buffer cannot be partial, but is partial({}) over {axis}", r.name());
            Err(self.error_at(&T0211, m, "reduce the value before writing it", self.span_since(start)))
        } else {
            Ok(())
        };
        // Declared even if it is rejected, so that its uses are not reported as well.
        p.buffers.push(Buffer { name, ty });
        refused
    }

    fn parse_op(&mut self, p: &Program) -> ParseResult<ParsedOp> {
        let start = self.next_span();
        let mut results = Vec::new();
        if matches!(self.peek(), Some(TokenKind::Value(_))) {
            loop {
                results.push(self.expect_value()?);
                if !self.eat_punct(',') {
                    break;
                }
            }
            self.expect_punct('=')?;
        }
        let op_start = self.next_span();
        let spelled = self.expect_word("an op")?;
        let (opcode, issue) = self.parse_opcode(&spelled, op_start, p.dialect)?;
        let mut w = ParsedOp {
            results,
            opcode,
            issue,
            op_span: self.span_since(op_start),
            name: None,
            buffer: None,
            operands: Vec::new(),
            keyed: Vec::new(),
            attrs: Attrs::new(),
            types: Vec::new(),
            stream: None,
            after: Vec::new(),
            span: start,
        };
        self.parse_operands(&mut w)?;
        if self.eat_punct('{') {
            let attrs = self.parse_list('}', Self::parse_attr)?;
            for (name, value, span) in attrs {
                if w.attrs.insert(name.clone(), value).is_some() {
                    return Err(self.error_at(
                        &T0203,
                        format!("attribute `{name}` appears twice"),
                        "again here",
                        span,
                    ));
                }
            }
        }
        if self.eat_punct(':') {
            loop {
                let start = self.next_span();
                let ty = self.parse_type(&p.mesh)?;
                w.types.push((ty, self.span_since(start)));
                if !self.eat_punct(',') {
                    break;
                }
            }
        }
        let start_stream = self.next_span();
        if let Some(TokenKind::Symbol(_)) = self.peek() {
            w.stream = Some((self.expect_at_name("a stream")?, start_stream));
        }
        if self.eat_word("after") {
            self.expect_punct('(')?;
            w.after = self.parse_list(')', Self::expect_value)?;
        }
        w.span = self.span_since(start);
        let word_on_a_new_line = self
            .tokens
            .get(self.position)
            .is_some_and(|t| t.starts_line && matches!(t.kind, TokenKind::Word(_)));
        if !self.begins_statement() && !word_on_a_new_line {
            return self.expected_error("the next op or `}`");
        }
        Ok(w)
    }

    fn parse_operands(&mut self, w: &mut ParsedOp) -> ParseResult<()> {
        let takes_buffer = w.opcode.takes_buffer();
        let mut more = match self.peek() {
            Some(TokenKind::Str(_)) => true,
            Some(TokenKind::Symbol(_)) => takes_buffer,
            Some(TokenKind::Value(_)) => !self.begins_statement(),
            Some(TokenKind::Word(_)) => self.peek_at(1) == Some(&TokenKind::Punct('=')),
            _ => false,
        };
        while more {
            let start = self.next_span();
            let twice = |p: &Self, what: &str| {
                Err(p.error_at(&T0203, format!("two {what}s"), "the second one", start))
            };
            match self.peek().cloned() {
                Some(TokenKind::Str(s)) => {
                    self.position += 1;
                    if w.name.replace((s, start)).is_some() {
                        return twice(self, "name");
                    }
                }
                Some(TokenKind::Symbol(b)) if takes_buffer => {
                    self.position += 1;
                    if w.buffer.replace((b, start)).is_some() {
                        return twice(self, "buffer");
                    }
                }
                Some(TokenKind::Value(_)) => w.operands.push(self.expect_value()?),
                Some(TokenKind::Word(key)) => {
                    self.position += 1;
                    self.expect_punct('=')?;
                    let (value, span) = self.expect_value()?;
                    w.keyed.push((key, value, span));
                }
                _ => return self.expected_error("an operand"),
            }
            if w.operands.len() + w.keyed.len() > MAX_LIST_ITEMS {
                return self.expected_error(&format!("at most {MAX_LIST_ITEMS} operands"));
            }
            more = self.eat_punct(',');
        }
        Ok(())
    }

    fn parse_opcode(&mut self, spelled: &str, start: Span, dialect: Dialect) -> ParseResult<(Opcode, bool)> {
        let known: Vec<(String, Opcode)> =
            OP_TABLE.iter().map(|r| (qualified_name(r.opcode, dialect), r.opcode)).collect();
        if spelled == "ttile.collective.issue" {
            let name = self.expect_word("the collective to issue")?;
            let collectives = OP_TABLE.iter().filter(|r| r.kind == OpKind::Collective);
            return match collectives.clone().find(|r| r.name == name) {
                Some(r) if dialect == Dialect::Role => Ok((r.opcode, true)),
                Some(_) => Err(self.collective_in_logical_error(spelled, start)),
                None => {
                    let mut d = self.error_at(
                        &T0202,
                        format!("unknown collective `{name}`"),
                        "this one",
                        self.span_since(start),
                    );
                    if let Some(n) = closest_name(&name, collectives.map(|r| r.name)) {
                        *d = d.with_hint(format!("did you mean `{n}`?"));
                    }
                    Err(d)
                }
            };
        }
        match known.iter().find(|(s, _)| s == spelled) {
            Some((_, op)) if dialect == Dialect::Logical && spelled.starts_with("ttile.") => {
                let _ = op;
                Err(self.collective_in_logical_error(spelled, start))
            }
            Some((_, op)) => Ok((*op, false)),
            None => {
                let mut d = self.error_at(&T0202, format!("unknown op `{spelled}`"), "this one", start);
                // Prefer the same op with the correct prefix over any other suggestion.
                let bare = spelled
                    .rsplit_once("collective.")
                    .or(spelled.split_once('.'))
                    .map_or(spelled, |(_, b)| b);
                let same = known.iter().find(|(_, op)| op.name() == bare || op.name() == spelled);
                let near = same
                    .map(|(s, _)| s.as_str())
                    .or_else(|| closest_name(spelled, known.iter().map(|(s, _)| s.as_str())));
                if branch::is_branch(spelled) {
                    *d = d.with_hint(branch::NO_BRANCHES);
                } else if let Some(n) = near {
                    *d = d.with_hint(format!("did you mean `{n}`?"));
                }
                Err(d)
            }
        }
    }

    fn collective_in_logical_error(&self, spelled: &str, span: Span) -> Box<Diagnostic> {
        let mut d =
            self.error_at(&T0202, format!("`{spelled}` in a logical program"), "this is a collective", span);
        *d = d.with_hint("add role(…) and mesh(…) to the program header: a logical program has no ranks");
        d
    }

    fn parse_attr(&mut self) -> ParseResult<(String, Attr, Span)> {
        let start = self.next_span();
        let name = self.expect_word("an attribute name")?;
        self.expect_punct('=')?;
        let value = match self.peek() {
            Some(TokenKind::Int(i)) => Attr::Int(*i),
            Some(TokenKind::Float(x)) => Attr::Float(*x),
            Some(TokenKind::Str(s)) => Attr::Str(s.clone()),
            Some(TokenKind::Word(w)) if w == "true" => Attr::Bool(true),
            Some(TokenKind::Word(w)) if w == "false" => Attr::Bool(false),
            Some(TokenKind::Punct('[')) => {
                self.position += 1;
                let ints = self.parse_list(']', |s| match s.peek() {
                    Some(TokenKind::Int(i)) => {
                        let i = *i;
                        s.position += 1;
                        Ok(i)
                    }
                    _ => s.expected_error("an integer"),
                })?;
                return Ok((name, Attr::Ints(ints), self.span_since(start)));
            }
            _ => return self.expected_error("a number, a string, true, false or a list of integers"),
        };
        self.position += 1;
        Ok((name, value, self.span_since(start)))
    }
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
