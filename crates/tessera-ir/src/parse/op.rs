//! Parses one op in syntactic form: results, opcode, operands, attributes, types, stream and events.

use tessera_base::{Diagnostic, Span, closest_name};

use super::lexer::TokenKind;
use super::{MAX_LIST_ITEMS, ParseResult, ParsedOp, Parser, branch, qualified_name};
use crate::codes::{T0202, T0203};
use crate::{Attr, Attrs, Dialect, OP_TABLE, OpKind, Opcode, Program};

impl Parser<'_> {
    pub(super) fn parse_op(&mut self, p: &Program) -> ParseResult<ParsedOp> {
        let start = self.next_span();
        let mut results = Vec::new();
        if matches!(self.peek(), Some(TokenKind::Value(_))) {
            results = self.parse_one_or_more(Self::expect_value)?;
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
            w.types = self.parse_one_or_more(|s| {
                let start = s.next_span();
                Ok((s.parse_type(&p.mesh)?, s.span_since(start)))
            })?;
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
        if spelled == "ttile.collective.issue" {
            return Ok((self.parse_issued_collective(spelled, start, dialect)?, true));
        }
        let known: Vec<(String, Opcode)> =
            OP_TABLE.iter().map(|r| (qualified_name(r.opcode, dialect), r.opcode)).collect();
        match known.iter().find(|(s, _)| s == spelled) {
            Some(_) if dialect == Dialect::Logical && spelled.starts_with("ttile.") => {
                Err(self.collective_in_logical_error(spelled, start))
            }
            Some((_, op)) => Ok((*op, false)),
            None => Err(self.unknown_op_error(spelled, start, &known)),
        }
    }

    /// Parses the name of the collective after `ttile.collective.issue`.
    fn parse_issued_collective(
        &mut self,
        spelled: &str,
        start: Span,
        dialect: Dialect,
    ) -> ParseResult<Opcode> {
        let name = self.expect_word("the collective to issue")?;
        let collectives = OP_TABLE.iter().filter(|r| r.kind == OpKind::Collective);
        match collectives.clone().find(|r| r.name == name) {
            Some(r) if dialect == Dialect::Role => Ok(r.opcode),
            Some(_) => Err(self.collective_in_logical_error(spelled, start)),
            None => {
                let message = format!("unknown collective `{name}`");
                let mut d = self.error_at(&T0202, message, "this one", self.span_since(start));
                if let Some(n) = closest_name(&name, collectives.map(|r| r.name)) {
                    *d = d.with_hint(format!("did you mean `{n}`?"));
                }
                Err(d)
            }
        }
    }

    fn unknown_op_error(&self, spelled: &str, start: Span, known: &[(String, Opcode)]) -> Box<Diagnostic> {
        let mut d = self.error_at(&T0202, format!("unknown op `{spelled}`"), "this one", start);
        // Prefer the same op with the correct prefix over any other suggestion.
        let bare = spelled.rsplit_once("collective.").or(spelled.split_once('.')).map_or(spelled, |(_, b)| b);
        let same = known.iter().find(|(_, op)| op.name() == bare || op.name() == spelled);
        let near = same
            .map(|(s, _)| s.as_str())
            .or_else(|| closest_name(spelled, known.iter().map(|(s, _)| s.as_str())));
        if branch::is_branch(spelled) {
            *d = d.with_hint(branch::NO_BRANCHES);
        } else if let Some(n) = near {
            *d = d.with_hint(format!("did you mean `{n}`?"));
        }
        d
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
