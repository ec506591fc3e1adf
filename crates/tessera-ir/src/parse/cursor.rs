//! Reads tokens one after the other: looks ahead, takes what a statement expects, and skips what it
//! cannot read.

use tessera_base::{Code, Diagnostic, Span};

use super::lexer::{Token, TokenKind};
use super::{MAX_LIST_ITEMS, ParseResult, Parser, branch};
use crate::codes::T0201;
use crate::{OP_TABLE, OpKind};

impl Parser<'_> {
    pub(super) fn peek(&self) -> Option<&TokenKind> {
        self.peek_at(0)
    }

    pub(super) fn peek_at(&self, ahead: usize) -> Option<&TokenKind> {
        self.tokens.get(self.position + ahead).map(|t| &t.kind)
    }

    pub(super) fn next_is(&self, c: char) -> bool {
        self.peek() == Some(&TokenKind::Punct(c))
    }

    /// Returns the span of the next token, or the end of the text.
    pub(super) fn next_span(&self) -> Span {
        let end = self.text.len();
        self.tokens.get(self.position).map_or(Span { start: end, end }, |t| t.span)
    }

    /// Returns the span from `start` to the last consumed token.
    pub(super) fn span_since(&self, start: Span) -> Span {
        let end = self.tokens[..self.position].last().map_or(start.end, |t| t.span.end);
        Span { start: start.start, end: end.max(start.end) }
    }

    pub(super) fn error_at(
        &self,
        code: &'static Code,
        message: impl Into<String>,
        says: impl Into<String>,
        span: Span,
    ) -> Box<Diagnostic> {
        Box::new(Diagnostic::error(code, message).with_span_label(self.file, says, span))
    }

    pub(super) fn expected_error<T>(&self, what: &str) -> ParseResult<T> {
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

    pub(super) fn eat_punct(&mut self, c: char) -> bool {
        let there = self.next_is(c);
        self.position += usize::from(there);
        there
    }

    pub(super) fn expect_punct(&mut self, c: char) -> ParseResult<()> {
        if self.eat_punct(c) { Ok(()) } else { self.expected_error(&format!("`{c}`")) }
    }

    pub(super) fn eat_word(&mut self, word: &str) -> bool {
        let there = matches!(self.peek(), Some(TokenKind::Word(w)) if w == word);
        self.position += usize::from(there);
        there
    }

    pub(super) fn expect_word(&mut self, what: &str) -> ParseResult<String> {
        match self.peek() {
            Some(TokenKind::Word(w)) => {
                let w = w.clone();
                self.position += 1;
                Ok(w)
            }
            _ => self.expected_error(what),
        }
    }

    pub(super) fn expect_at_name(&mut self, what: &str) -> ParseResult<String> {
        match self.peek() {
            Some(TokenKind::Symbol(n)) => {
                let n = n.clone();
                self.position += 1;
                Ok(n)
            }
            _ => self.expected_error(what),
        }
    }

    pub(super) fn expect_value(&mut self) -> ParseResult<(String, Span)> {
        match self.peek() {
            Some(TokenKind::Value(n)) => {
                let found = (n.clone(), self.next_span());
                self.position += 1;
                Ok(found)
            }
            _ => self.expected_error("a value (`%name`)"),
        }
    }

    pub(super) fn expect_natural(&mut self, what: &str) -> ParseResult<u64> {
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
    pub(super) fn parse_list<T>(
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

    /// Parses one or more items separated by commas.
    pub(super) fn parse_one_or_more<T>(
        &mut self,
        mut item: impl FnMut(&mut Self) -> ParseResult<T>,
    ) -> ParseResult<Vec<T>> {
        let mut out = vec![item(self)?];
        while self.eat_punct(',') {
            out.push(item(self)?);
        }
        Ok(out)
    }

    /// Skips to the next line whose first token fits `stop`.
    pub(super) fn skip_to(&mut self, stop: impl Fn(&Token) -> bool) {
        while let Some(t) = self.tokens.get(self.position) {
            if t.starts_line && stop(t) {
                return;
            }
            self.position += 1;
        }
    }

    /// Returns whether a statement begins at the next token.
    pub(super) fn begins_statement(&self) -> bool {
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
    pub(super) fn skip_to_statement(&mut self, begin: usize) {
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
}
