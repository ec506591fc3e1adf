//! Reads IR text: what [`crate::print`] writes, and the same written by hand.
//!
//! Commas, constants, types and streams are as printed. By hand, white space and `//` comments may stand
//! anywhere, a result type may be left out where the op's rule gives it, and an op without a stream runs on the
//! first. A mistake costs its own op alone: the parser goes on with the next one, and does not report what
//! follows from a mistake already reported.

mod branch;
mod fragment;
mod lex;
mod resolve;
mod types;

use tessera_base::{Code, Diagnostic, Diagnostics, Span, nearest};
use tessera_mesh::Mesh;

use crate::rules::{T0211, check_type};
use crate::{Attr, Attrs, Buffer, Dialect, Kind, Opcode, Program, TABLE, Type};
pub use fragment::{is_fragment, parse_fragment};
use lex::{Tok, Token, lex};
use resolve::{Names, define};

/// Syntax.
pub static T0201: Code = Code {
    id: "T0201",
    title: "IR text cannot be read",
    page: "The text does not follow the grammar at the place shown. A program is\n\n\
    program @name role(stage0) mesh(tp=2) streams(compute, tp_collective) {\n\
      buffer @kv.0.k : f32[90, 24] {tp: shard(1)}\n\
      %y = ttile.matmul %x, %w, bias=%b {act = \"silu\"} : f32[30, 24] {tp: shard(1)} @compute after(%e)\n\
    }\n\n\
A logical program has neither role nor mesh. Order inside an op: results, name, operands, constants in braces, \
result types after a colon, stream, events. Layouts are replicated, shard(dim), shard(dim, of=extent, unit=u) and \
partial(sum|tree|max), one per mesh axis; an axis left out is replicated. `ways=w` last in a shard or partial means that \
each block of w positions of the axis holds the whole value. mesh(tp=2, outside=1) has a rank 0 outside the mesh.\n\n\
After a mistake the parser goes on at the next line that begins an op. `tessera check` reports all of them at once.",
};
/// Unknown op.
pub static T0202: Code = Code {
    id: "T0202",
    title: "unknown op",
    page: "The name is in no row of the op table, or is written in the wrong dialect. Logical programs compute with \
`toperator.*` and have no collectives; programs of a role compute with `ttile.*` and call collectives as \
`ttile.collective.*`, or `ttile.collective.issue` with a later `ttile.collective.wait`. Sources and sinks (input, \
call, weight, output, cache.read, cache.write, event.record) have no prefix.\n\n\
There is no `if`, no loop and no `select`. What a program issues may not depend on data: a rank that skips a collective \
leaves the others waiting. A decision belongs to the leader, as a call's list of phases or another phase; a collective \
is always called, with an empty payload if need be.\n\n\
The nearest known name is shown where there is one.",
};
/// Operands or constants.
pub static T0203: Code = Code {
    id: "T0203",
    title: "operands or constants do not fit the op",
    page: "Every op has a row that says how many operands it takes by position, which by key (`start=%s`), which \
constants it needs and which it may have. Something is missing, is there twice, or is not in the row. A constant \
that the row does not know is refused rather than ignored: a misspelt `segments` would otherwise change the numbers \
in silence.\n\n\
Tickets go to `wait` alone, events to `after(…)` alone, and call scalars to keyed operands.",
};
/// Undefined or redefined names.
pub static T0204: Code = Code {
    id: "T0204",
    title: "name is undefined or defined twice",
    page: "Values (%name) are defined once, above their first use. Buffers (@name) are declared in the program with \
`buffer @name : type`, streams in its header with `streams(…)`. A name defined twice would make it unclear which value \
later ops read, so the second definition is refused and the first is shown beside it.",
};
/// Written type differs from the inferred one.
pub static T0205: Code = Code {
    id: "T0205",
    title: "written type differs from what the op gives",
    page: "The type written after the colon is not what the op's rule gives for these operands; both are shown. The \
rule is derived from local shapes and layouts, so one of three things is wrong: the written type, an operand's type, \
or the choice of op.\n\n\
With uneven shards the local extent depends on the role: the name of the role says which piece it holds, \
`role(stage0@tp1)` being the one at position 1 of tp. Leave the type out to take the rule's; inputs, call scalars, \
weights and receives always need one.",
};

/// Largest text in bytes.
const TEXT_BYTES_MAX: usize = 256 << 20;
/// Most items of one list: operands, constants, streams, a shape.
const LIST_MAX: usize = 4096;
/// Most diagnostics of one text; more would be of no use to anyone.
const DIAGNOSTICS_MAX: usize = 200;

/// The one program of a text. `file` names it in diagnostics.
///
/// # Errors
/// Everything wrong with it: T0201 to T0205, and what the ops' rules refuse.
pub fn parse(text: &str, file: &str) -> Result<Program, Diagnostics> {
    let mut programs = parse_all(text, file)?;
    match (programs.pop(), programs.len()) {
        (Some(p), 0) => Ok(p),
        (_, n) => {
            let says = format!("{} programs", if n == 0 { 0 } else { n + 1 });
            Err(vec![
                Diagnostic::error(&T0201, "one program expected")
                    .at_span(file, says, Span { start: 0, end: 0 })
                    .hint("begin with `program @name streams(compute) {`"),
            ])
        }
    }
}

/// All programs of a text, in order.
///
/// # Errors
/// Everything wrong with it: T0201 to T0205, and what the ops' rules refuse.
pub fn parse_all(text: &str, file: &str) -> Result<Vec<Program>, Diagnostics> {
    if text.len() > TEXT_BYTES_MAX {
        let m = format!("text of {} bytes; at most {TEXT_BYTES_MAX} are read", text.len());
        return Err(vec![Diagnostic::error(&T0201, m).at(file, "too large")]);
    }
    let mut p = Parser { text, file, tokens: lex(text), at: 0, found: Vec::new(), definitions: Vec::new() };
    let mut programs = Vec::new();
    while p.at < p.tokens.len() && p.found.len() < DIAGNOSTICS_MAX {
        match p.program() {
            Ok(program) => programs.push(program),
            Err(d) => {
                p.found.push(*d);
                p.skip_to(|t| matches!(&t.tok, Tok::Word(w) if w == "program"));
            }
        }
    }
    if p.found.is_empty() { Ok(programs) } else { Err(p.found) }
}

type Parsed<T> = Result<T, Box<Diagnostic>>;

struct Parser<'a> {
    text: &'a str,
    file: &'a str,
    tokens: Vec<Token>,
    at: usize,
    found: Diagnostics,
    /// The op that defines each value of the program being read.
    definitions: Vec<Option<usize>>,
}

/// An op as written, before its names are looked up.
struct Written {
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
    fn peek(&self) -> Option<&Tok> {
        self.peek_at(0)
    }

    fn peek_at(&self, ahead: usize) -> Option<&Tok> {
        self.tokens.get(self.at + ahead).map(|t| &t.tok)
    }

    fn is(&self, c: char) -> bool {
        self.peek() == Some(&Tok::Punct(c))
    }

    /// Span of the next token; the end of the text after the last.
    fn span(&self) -> Span {
        let end = self.text.len();
        self.tokens.get(self.at).map_or(Span { start: end, end }, |t| t.span)
    }

    /// From `start` to the last token taken.
    fn since(&self, start: Span) -> Span {
        let end = self.tokens[..self.at].last().map_or(start.end, |t| t.span.end);
        Span { start: start.start, end: end.max(start.end) }
    }

    fn error(
        &self,
        code: &'static Code,
        message: impl Into<String>,
        says: impl Into<String>,
        span: Span,
    ) -> Box<Diagnostic> {
        Box::new(Diagnostic::error(code, message).at_span(self.file, says, span))
    }

    fn expected<T>(&self, what: &str) -> Parsed<T> {
        let found = match self.peek() {
            None => "the end of the text".to_string(),
            Some(Tok::Bad(why)) => (*why).to_string(),
            Some(_) => {
                let s = self.span();
                format!("`{}`", self.text.get(s.start..s.end).unwrap_or(""))
            }
        };
        Err(self.error(&T0201, format!("expected {what}"), format!("found {found}"), self.span()))
    }

    fn eat(&mut self, c: char) -> bool {
        let there = self.is(c);
        self.at += usize::from(there);
        there
    }

    fn need(&mut self, c: char) -> Parsed<()> {
        if self.eat(c) { Ok(()) } else { self.expected(&format!("`{c}`")) }
    }

    fn eat_word(&mut self, word: &str) -> bool {
        let there = matches!(self.peek(), Some(Tok::Word(w)) if w == word);
        self.at += usize::from(there);
        there
    }

    fn word(&mut self, what: &str) -> Parsed<String> {
        match self.peek() {
            Some(Tok::Word(w)) => {
                let w = w.clone();
                self.at += 1;
                Ok(w)
            }
            _ => self.expected(what),
        }
    }

    fn at_name(&mut self, what: &str) -> Parsed<String> {
        match self.peek() {
            Some(Tok::At(n)) => {
                let n = n.clone();
                self.at += 1;
                Ok(n)
            }
            _ => self.expected(what),
        }
    }

    fn value_name(&mut self) -> Parsed<(String, Span)> {
        match self.peek() {
            Some(Tok::Value(n)) => {
                let found = (n.clone(), self.span());
                self.at += 1;
                Ok(found)
            }
            _ => self.expected("a value (`%name`)"),
        }
    }

    fn natural(&mut self, what: &str) -> Parsed<u64> {
        match self.peek() {
            Some(Tok::Int(i)) if *i >= 0 => {
                let n = i.unsigned_abs();
                self.at += 1;
                Ok(n)
            }
            _ => self.expected(what),
        }
    }

    /// Items up to `close`, separated by commas.
    fn list<T>(&mut self, close: char, mut item: impl FnMut(&mut Self) -> Parsed<T>) -> Parsed<Vec<T>> {
        let mut out = Vec::new();
        if self.eat(close) {
            return Ok(out);
        }
        loop {
            out.push(item(self)?);
            if self.eat(close) {
                return Ok(out);
            }
            if out.len() >= LIST_MAX {
                return self.expected(&format!("at most {LIST_MAX} items"));
            }
            if !self.eat(',') {
                return self.expected(&format!("`,` or `{close}`"));
            }
        }
    }

    fn skip_to(&mut self, stop: impl Fn(&Token) -> bool) {
        while let Some(t) = self.tokens.get(self.at) {
            if t.first && stop(t) {
                return;
            }
            self.at += 1;
        }
    }

    /// Whether a statement begins at the next token.
    fn begins_statement(&self) -> bool {
        match self.peek() {
            Some(Tok::Value(_)) => {
                let mut ahead = 1;
                while self.peek_at(ahead) == Some(&Tok::Punct(','))
                    && matches!(self.peek_at(ahead + 1), Some(Tok::Value(_)))
                {
                    ahead += 2;
                }
                self.peek_at(ahead) == Some(&Tok::Punct('='))
            }
            Some(Tok::Word(w)) => {
                matches!(w.as_str(), "buffer" | "program")
                    || TABLE
                        .iter()
                        .any(|r| matches!(r.kind, Kind::Source | Kind::Sink | Kind::Order) && r.name == w)
                    || w.starts_with("ttile.")
                    || w.starts_with("toperator.")
                    || (branch::is_branch(w) && self.peek_at(1) != Some(&Tok::Punct('=')))
            }
            Some(Tok::Punct('}')) | None => true,
            _ => false,
        }
    }

    /// After a mistake in the statement that began at token `begin`: on to the next one, or to the program's end.
    fn recover(&mut self, begin: usize) {
        let from = self.at;
        self.at = begin;
        let mut open = 0usize;
        while let Some(t) = self.tokens.get(self.at) {
            let outside = open == 0 && matches!(t.tok, Tok::Value(_) | Tok::Punct('}'));
            if self.at >= from && (t.first || outside) && self.begins_statement() {
                return;
            }
            match t.tok {
                Tok::Punct('{') => open += 1,
                Tok::Punct('}') => open = open.saturating_sub(1),
                _ => {}
            }
            self.at += 1;
        }
    }

    fn program(&mut self) -> Parsed<Program> {
        if !self.eat_word("program") {
            return self.expected("`program`");
        }
        let name = self.at_name("the program's name (`@name`)")?;
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
        let mut meshed = None;
        while !self.eat('{') {
            let start = self.span();
            let part = self.word("role(…), mesh(…), streams(…) or `{`")?;
            if !matches!(part.as_str(), "role" | "mesh" | "streams") {
                self.at -= 1;
                return self.expected("role(…), mesh(…), streams(…) or `{`");
            }
            self.need('(')?;
            match part.as_str() {
                "role" => {
                    p.dialect = Dialect::Role;
                    p.role = self.role()?;
                }
                "mesh" => {
                    p.mesh = self.mesh()?;
                    meshed = Some(self.since(start));
                }
                _ => {
                    p.streams = self.list(')', |s| s.word("the name of a stream"))?;
                    if let Some(twice) =
                        (1..p.streams.len()).find(|i| p.streams[..*i].contains(&p.streams[*i]))
                    {
                        let m = format!("stream {} is named twice", p.streams[twice]);
                        return Err(self.error(&T0204, m, "here", self.since(start)));
                    }
                }
            }
        }
        if let (Dialect::Logical, Some(span)) = (p.dialect, meshed) {
            return Err(self.error(&T0201, "a mesh but no role", "a logical program has no mesh", span));
        }
        if p.streams.is_empty() {
            p.streams.push("compute".to_string());
        }
        self.body(&mut p);
        Ok(p)
    }

    /// The text up to `)`: a role's name carries coordinates, `stage0@tp1`.
    fn role(&mut self) -> Parsed<String> {
        let mut role = String::new();
        while !self.eat(')') {
            match self.peek() {
                Some(Tok::Word(w)) if role.is_empty() => role.push_str(w),
                Some(Tok::At(n)) => role.extend(["@", n.as_str()]),
                _ => return self.expected("a role such as `stage0` or `stage0@tp1`"),
            }
            self.at += 1;
        }
        Ok(role)
    }

    fn mesh(&mut self) -> Parsed<Mesh> {
        let start = self.span();
        let axes = self.list(')', |s| {
            let axis = s.word("a mesh axis")?;
            s.need('=')?;
            Ok(format!("{axis}={}", s.natural("the size of the axis")?))
        })?;
        axes.join(",")
            .parse::<Mesh>()
            .map_err(|d| Box::new(d.at_span(self.file, "this mesh", self.since(start))))
    }

    fn body(&mut self, p: &mut Program) {
        let mut names = Names::new();
        self.definitions.clear();
        loop {
            if self.found.len() >= DIAGNOSTICS_MAX {
                self.at = self.tokens.len();
                return;
            }
            if self.eat('}') {
                return;
            }
            if self.peek().is_none_or(|t| *t == Tok::Word("program".into())) {
                let d = self.expected::<()>("`}` at the end of the program");
                self.found.extend(d.err().map(|d| *d));
                return;
            }
            let begin = self.at;
            if let Err(d) = self.statement(p, &mut names) {
                self.found.push(*d);
                // Names defined here are known, so that their uses are not reported as well.
                let taken = self.at.max(begin + 1);
                self.at = begin;
                while let (Some(Tok::Value(n)), true) = (self.peek(), self.begins_statement()) {
                    names.entry(n.clone()).or_insert((None, self.span()));
                    self.at += if self.peek_at(1) == Some(&Tok::Punct(',')) { 2 } else { 1 };
                }
                self.at = taken;
                if !self.skip_branch(begin, &mut names) {
                    self.recover(begin);
                }
            }
        }
    }

    fn statement(&mut self, p: &mut Program, names: &mut Names) -> Parsed<()> {
        if self.eat_word("buffer") {
            return self.buffer(p);
        }
        let w = self.op(p)?;
        let written: Vec<Type> = w.types.iter().map(|(t, _)| t.clone()).collect();
        let results = w.results.clone();
        match self.resolve(p, names, w) {
            Ok(Some(types)) => {
                for (name, ty) in results.into_iter().zip(types) {
                    define(p, names, name, Some(ty));
                }
            }
            // A refused op: later ops are checked against what was written, if anything was.
            refused => {
                self.found.extend(refused.err().map(|d| *d));
                let mut written = written.into_iter();
                for name in results {
                    let ty = written.next().filter(|t| check_type(p, t).is_ok());
                    define(p, names, name, ty);
                }
            }
        }
        Ok(())
    }

    fn buffer(&mut self, p: &mut Program) -> Parsed<()> {
        let start = self.span();
        let name = self.at_name("the buffer's name (`@name`)")?;
        let named = self.since(start);
        self.need(':')?;
        let start = self.span();
        let ty = self.ty(&p.mesh)?;
        if p.buffers.iter().any(|b| b.name == name) {
            return Err(self.error(&T0204, format!("buffer @{name} is declared twice"), "again here", named));
        }
        if ty.is_token() {
            return Err(self.error(
                &T0203,
                format!("a buffer of {}", ty.dtype),
                "holds no data",
                self.since(start),
            ));
        }
        let refused = if let Err(e) = check_type(p, &ty) {
            Err(self.error(e.code, e.message, "this type", self.since(start)))
        } else if let Some((axis, r)) = ty.layout.partial() {
            let m = format!("a buffer that is partial({}) over {axis}", r.name());
            Err(self.error(&T0211, m, "reduce before writing", self.since(start)))
        } else {
            Ok(())
        };
        // Known even if it is refused, so that its uses are not reported as well.
        p.buffers.push(Buffer { name, ty });
        refused
    }

    fn op(&mut self, p: &Program) -> Parsed<Written> {
        let start = self.span();
        let mut results = Vec::new();
        if matches!(self.peek(), Some(Tok::Value(_))) {
            loop {
                results.push(self.value_name()?);
                if !self.eat(',') {
                    break;
                }
            }
            self.need('=')?;
        }
        let op_start = self.span();
        let spelled = self.word("an op")?;
        let (opcode, issue) = self.opcode(&spelled, op_start, p.dialect)?;
        let mut w = Written {
            results,
            opcode,
            issue,
            op_span: self.since(op_start),
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
        self.operands(&mut w)?;
        if self.eat('{') {
            let attrs = self.list('}', Self::attr)?;
            for (name, value, span) in attrs {
                if w.attrs.insert(name.clone(), value).is_some() {
                    return Err(self.error(
                        &T0203,
                        format!("constant `{name}` is given twice"),
                        "again here",
                        span,
                    ));
                }
            }
        }
        if self.eat(':') {
            loop {
                let start = self.span();
                let ty = self.ty(&p.mesh)?;
                w.types.push((ty, self.since(start)));
                if !self.eat(',') {
                    break;
                }
            }
        }
        let start_stream = self.span();
        if let Some(Tok::At(_)) = self.peek() {
            w.stream = Some((self.at_name("a stream")?, start_stream));
        }
        if self.eat_word("after") {
            self.need('(')?;
            w.after = self.list(')', Self::value_name)?;
        }
        w.span = self.since(start);
        let word_on_a_new_line =
            self.tokens.get(self.at).is_some_and(|t| t.first && matches!(t.tok, Tok::Word(_)));
        if !self.begins_statement() && !word_on_a_new_line {
            return self.expected("the next op or `}`");
        }
        Ok(w)
    }

    fn operands(&mut self, w: &mut Written) -> Parsed<()> {
        let takes_buffer = w.opcode.takes_buffer();
        let mut more = match self.peek() {
            Some(Tok::Str(_)) => true,
            Some(Tok::At(_)) => takes_buffer,
            Some(Tok::Value(_)) => !self.begins_statement(),
            Some(Tok::Word(_)) => self.peek_at(1) == Some(&Tok::Punct('=')),
            _ => false,
        };
        while more {
            let start = self.span();
            let twice =
                |p: &Self, what: &str| Err(p.error(&T0203, format!("two {what}s"), "the second one", start));
            match self.peek().cloned() {
                Some(Tok::Str(s)) => {
                    self.at += 1;
                    if w.name.replace((s, start)).is_some() {
                        return twice(self, "name");
                    }
                }
                Some(Tok::At(b)) if takes_buffer => {
                    self.at += 1;
                    if w.buffer.replace((b, start)).is_some() {
                        return twice(self, "buffer");
                    }
                }
                Some(Tok::Value(_)) => w.operands.push(self.value_name()?),
                Some(Tok::Word(key)) => {
                    self.at += 1;
                    self.need('=')?;
                    let (value, span) = self.value_name()?;
                    w.keyed.push((key, value, span));
                }
                _ => return self.expected("an operand"),
            }
            if w.operands.len() + w.keyed.len() > LIST_MAX {
                return self.expected(&format!("at most {LIST_MAX} operands"));
            }
            more = self.eat(',');
        }
        Ok(())
    }

    fn opcode(&mut self, spelled: &str, start: Span, dialect: Dialect) -> Parsed<(Opcode, bool)> {
        let known: Vec<(String, Opcode)> =
            TABLE.iter().map(|r| (spelling(r.opcode, dialect), r.opcode)).collect();
        if spelled == "ttile.collective.issue" {
            let name = self.word("the collective to issue")?;
            let collectives = TABLE.iter().filter(|r| r.kind == Kind::Collective);
            return match collectives.clone().find(|r| r.name == name) {
                Some(r) if dialect == Dialect::Role => Ok((r.opcode, true)),
                Some(_) => Err(self.foreign(spelled, start)),
                None => {
                    let mut d = self.error(
                        &T0202,
                        format!("unknown collective `{name}`"),
                        "this one",
                        self.since(start),
                    );
                    if let Some(n) = nearest(&name, collectives.map(|r| r.name)) {
                        *d = d.hint(format!("did you mean `{n}`?"));
                    }
                    Err(d)
                }
            };
        }
        match known.iter().find(|(s, _)| s == spelled) {
            Some((_, op)) if dialect == Dialect::Logical && spelled.starts_with("ttile.") => {
                let _ = op;
                Err(self.foreign(spelled, start))
            }
            Some((_, op)) => Ok((*op, false)),
            None => {
                let mut d = self.error(&T0202, format!("unknown op `{spelled}`"), "this one", start);
                // The same op with the right prefix is nearer than any other.
                let bare = spelled
                    .rsplit_once("collective.")
                    .or(spelled.split_once('.'))
                    .map_or(spelled, |(_, b)| b);
                let same = known.iter().find(|(_, op)| op.name() == bare || op.name() == spelled);
                let near = same
                    .map(|(s, _)| s.as_str())
                    .or_else(|| nearest(spelled, known.iter().map(|(s, _)| s.as_str())));
                if branch::is_branch(spelled) {
                    *d = d.hint(branch::NO_BRANCHES);
                } else if let Some(n) = near {
                    *d = d.hint(format!("did you mean `{n}`?"));
                }
                Err(d)
            }
        }
    }

    fn foreign(&self, spelled: &str, span: Span) -> Box<Diagnostic> {
        let mut d = self.error(&T0202, format!("`{spelled}` in a logical program"), "a collective", span);
        *d = d.hint("give the program a role(…) and a mesh(…): a logical program has no ranks");
        d
    }

    fn attr(&mut self) -> Parsed<(String, Attr, Span)> {
        let start = self.span();
        let name = self.word("the name of a constant")?;
        self.need('=')?;
        let value = match self.peek() {
            Some(Tok::Int(i)) => Attr::Int(*i),
            Some(Tok::Float(x)) => Attr::Float(*x),
            Some(Tok::Str(s)) => Attr::Str(s.clone()),
            Some(Tok::Word(w)) if w == "true" => Attr::Bool(true),
            Some(Tok::Word(w)) if w == "false" => Attr::Bool(false),
            Some(Tok::Punct('[')) => {
                self.at += 1;
                let ints = self.list(']', |s| match s.peek() {
                    Some(Tok::Int(i)) => {
                        let i = *i;
                        s.at += 1;
                        Ok(i)
                    }
                    _ => s.expected("a whole number"),
                })?;
                return Ok((name, Attr::Ints(ints), self.since(start)));
            }
            _ => return self.expected("a number, a string, true, false or a list of whole numbers"),
        };
        self.at += 1;
        Ok((name, value, self.since(start)))
    }
}

/// How an op is written in a dialect.
pub(crate) fn spelling(op: Opcode, dialect: Dialect) -> String {
    let row = op.row();
    match row.kind {
        Kind::Collective => format!("ttile.collective.{}", row.name),
        Kind::Order if op == Opcode::Wait => "ttile.collective.wait".to_string(),
        Kind::Compute if dialect == Dialect::Logical => format!("toperator.{}", row.name),
        Kind::Compute => format!("ttile.{}", row.name),
        _ => row.name.to_string(),
    }
}

#[cfg(test)]
mod tests;
