//! Parses a program: its header, buffers and statements.

use tessera_base::Span;
use tessera_mesh::Mesh;

use super::lexer::TokenKind;
use super::resolve::define_value;
use super::{MAX_DIAGNOSTICS, NameTable, ParseResult, Parser};
use crate::codes::{T0201, T0203, T0204, T0211};
use crate::rules::check_type;
use crate::{Buffer, Dialect, Program, StreamKind};

/// What the header of a program states besides the fields of the program.
struct HeaderSpans {
    mesh: Option<Span>,
    /// The graph that captures the whole program.
    graph: Option<(String, Span)>,
}

impl Parser<'_> {
    pub(super) fn parse_program(&mut self) -> ParseResult<Program> {
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
        let HeaderSpans { mesh: mesh_span, graph } = self.parse_header(&mut p)?;
        if let (Dialect::Logical, Some(span)) = (p.dialect, mesh_span) {
            return Err(self.error_at(
                &T0201,
                "a mesh without a role",
                "a logical program has no mesh",
                span,
            ));
        }
        if p.streams.is_empty() {
            p.streams.push(StreamKind::Compute.name().to_string());
        }
        self.parse_body(&mut p);
        if let Some((graph, span)) = graph {
            let is_stated = p.ops.iter().any(|o| !o.is_source() && o.graph_name().is_some());
            if is_stated || p.dialect == Dialect::Logical {
                let m = "`graph(…)` captures the whole program of a role, whose ops then name no graph";
                return Err(self.error_at(&T0204, m, "here", span));
            }
            p.capture_into(&graph);
        }
        Ok(p)
    }

    /// Parses role, mesh, streams and graph up to `{`.
    fn parse_header(&mut self, p: &mut Program) -> ParseResult<HeaderSpans> {
        let mut spans = HeaderSpans { mesh: None, graph: None };
        while !self.eat_punct('{') {
            let start = self.next_span();
            let part = self.expect_word("role(…), mesh(…), streams(…), graph(…) or `{`")?;
            if !matches!(part.as_str(), "role" | "mesh" | "streams" | "graph") {
                self.position -= 1;
                return self.expected_error("role(…), mesh(…), streams(…), graph(…) or `{`");
            }
            self.expect_punct('(')?;
            match part.as_str() {
                "role" => {
                    p.dialect = Dialect::Role;
                    p.role = self.parse_role()?;
                }
                "mesh" => {
                    p.mesh = self.parse_mesh()?;
                    spans.mesh = Some(self.span_since(start));
                }
                "graph" => {
                    let Some(TokenKind::Str(name)) = self.peek().cloned() else {
                        return self.expected_error("the name of a graph, in quotes");
                    };
                    self.position += 1;
                    self.expect_punct(')')?;
                    spans.graph = Some((name, self.span_since(start)));
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
        Ok(spans)
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
                let taken = self.position.max(begin + 1);
                self.position = begin;
                self.define_rejected_results(&mut names);
                self.position = taken;
                if !self.skip_branch(begin, &mut names) {
                    self.skip_to_statement(begin);
                }
            }
        }
    }

    /// Marks the results of the statement at the next token as known, so that their uses are not
    /// reported as well.
    fn define_rejected_results(&mut self, names: &mut NameTable) {
        while let (Some(TokenKind::Value(n)), true) = (self.peek(), self.begins_statement()) {
            names.entry(n.clone()).or_insert((None, self.next_span()));
            self.position += if self.peek_at(1) == Some(&TokenKind::Punct(',')) { 2 } else { 1 };
        }
    }

    fn parse_statement(&mut self, p: &mut Program, names: &mut NameTable) -> ParseResult<()> {
        if self.eat_word("buffer") {
            return self.parse_buffer(p);
        }
        let w = self.parse_op(p)?;
        match self.resolve_op(p, names, &w) {
            Ok(Some(types)) => {
                for (name, ty) in w.results.into_iter().zip(types) {
                    define_value(p, names, name, Some(ty));
                }
            }
            // A rejected op: later ops are checked against its written types, if there are any.
            refused => {
                self.diagnostics.extend(refused.err().map(|d| *d));
                let mut written = w.types.into_iter();
                for name in w.results {
                    let ty = written.next().map(|(t, _)| t).filter(|t| check_type(p, t).is_ok());
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
}
