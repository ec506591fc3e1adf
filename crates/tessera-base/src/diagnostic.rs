//! One type for everything Tessera has to say about an input: what, where, the other where, and what to do.

use crate::{Code, Counterexample};

/// How bad it is. Only errors stop a verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// Worth knowing; the result stands.
    Warning,
    /// The input is refused.
    Error,
}

/// A half-open byte range in a text.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub struct Span {
    /// First byte.
    pub start: usize,
    /// One past the last byte.
    pub end: usize,
}

/// A place a diagnostic speaks of: a file position, a rank, an op, a tensor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// `plan/stage0.tir`, `rank 1`, `models/demo/config.json`, `weight blocks.0.ffn.0.bias`…
    pub at: String,
    /// What is there, with its numbers.
    pub says: String,
    /// Where in the text named by `at`, if it is one.
    pub span: Option<Span>,
}

/// A finding: a code, one terse sentence, the places with both sides' numbers, notes and a hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Stable code.
    pub code: &'static Code,
    /// Error or warning.
    pub severity: Severity,
    /// One sentence without a final period.
    pub message: String,
    /// The place and the other place.
    pub places: Vec<Place>,
    /// Further facts.
    pub notes: Vec<String>,
    /// What to do next.
    pub hint: Option<String>,
    /// For a refusal across ranks, the facts behind its words. Boxed: few diagnostics have one.
    pub counterexample: Option<Box<Counterexample>>,
}

/// What a checker collects. Checkers return these beside a value and do not stop at the first.
pub type Diagnostics = Vec<Diagnostic>;

impl Diagnostic {
    /// An error.
    #[must_use]
    pub fn error(code: &'static Code, message: impl Into<String>) -> Diagnostic {
        Diagnostic {
            code,
            severity: Severity::Error,
            message: message.into(),
            places: Vec::new(),
            notes: Vec::new(),
            hint: None,
            counterexample: None,
        }
    }

    /// A warning.
    #[must_use]
    pub fn warning(code: &'static Code, message: impl Into<String>) -> Diagnostic {
        Diagnostic { severity: Severity::Warning, ..Diagnostic::error(code, message) }
    }

    /// Adds a place that is not a text position.
    #[must_use]
    pub fn at(mut self, at: impl Into<String>, says: impl Into<String>) -> Diagnostic {
        self.places.push(Place { at: at.into(), says: says.into(), span: None });
        self
    }

    /// Adds a position in a text.
    #[must_use]
    pub fn at_span(mut self, at: impl Into<String>, says: impl Into<String>, span: Span) -> Diagnostic {
        self.places.push(Place { at: at.into(), says: says.into(), span: Some(span) });
        self
    }

    /// Adds a note.
    #[must_use]
    pub fn note(mut self, note: impl Into<String>) -> Diagnostic {
        self.notes.push(note.into());
        self
    }

    /// Sets the hint.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Diagnostic {
        self.hint = Some(hint.into());
        self
    }

    /// Adds the facts behind a refusal across ranks.
    #[must_use]
    pub fn proof(mut self, counterexample: Counterexample) -> Diagnostic {
        self.counterexample = Some(Box::new(counterexample));
        self
    }

    /// Whether this refuses the input.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}
