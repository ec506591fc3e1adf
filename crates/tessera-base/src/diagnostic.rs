//! The [`Diagnostic`] type: a problem in an input, the locations involved, and what to do about it.

use crate::{Code, Counterexample, Span};

/// Severity of a diagnostic. Only errors make a command fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Severity {
    /// The input is suspicious, but the result is valid.
    Warning,
    /// The input is rejected.
    Error,
}

/// A location that a diagnostic refers to (a file position, a rank, an op, a tensor), with a
/// message about it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Label {
    /// Name of the location: `plan/stage0.tir`, `rank 1`, `models/demo/config.json`,
    /// `weight blocks.0.ffn.0.bias`…
    pub location: String,
    /// Statement about the location, with its numbers.
    pub message: String,
    /// Position in the text that `location` names, if it names a text.
    pub span: Option<Span>,
}

/// A diagnostic: a code, a one-sentence message, labels with the numbers of both sides, notes and a
/// hint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Diagnostic {
    /// Stable code of the kind of problem.
    pub code: &'static Code,
    /// Whether the input is rejected, or is only suspicious.
    pub severity: Severity,
    /// One sentence without a final period.
    pub message: String,
    /// Locations involved, the primary one first.
    pub labels: Vec<Label>,
    /// Facts that belong to no location, in the order of printing.
    pub notes: Vec<String>,
    /// Suggestion what to do next.
    pub hint: Option<String>,
    /// Machine-readable counterexample of an error that involves several ranks. Boxed because few
    /// diagnostics have one.
    pub counterexample: Option<Box<Counterexample>>,
}

/// A list of diagnostics. Checkers collect every problem instead of stopping at the first.
pub type Diagnostics = Vec<Diagnostic>;

impl Diagnostic {
    /// Creates a diagnostic that rejects the input, without labels, notes or a hint.
    #[must_use]
    pub fn error(code: &'static Code, message: impl Into<String>) -> Diagnostic {
        Diagnostic {
            code,
            severity: Severity::Error,
            message: message.into(),
            labels: Vec::new(),
            notes: Vec::new(),
            hint: None,
            counterexample: None,
        }
    }

    /// Creates a diagnostic of a suspicious but valid input, without labels, notes or a hint.
    #[must_use]
    pub fn warning(code: &'static Code, message: impl Into<String>) -> Diagnostic {
        Diagnostic { severity: Severity::Warning, ..Diagnostic::error(code, message) }
    }

    /// Adds a label for a location that is not a position in a text.
    #[must_use]
    pub fn with_label(mut self, location: impl Into<String>, message: impl Into<String>) -> Diagnostic {
        self.labels.push(Label { location: location.into(), message: message.into(), span: None });
        self
    }

    /// Adds a label for a position in a text.
    #[must_use]
    pub fn with_span_label(
        mut self,
        location: impl Into<String>,
        message: impl Into<String>,
        span: Span,
    ) -> Diagnostic {
        self.labels.push(Label { location: location.into(), message: message.into(), span: Some(span) });
        self
    }

    /// Appends a fact that belongs to no location.
    #[must_use]
    pub fn with_note(mut self, note: impl Into<String>) -> Diagnostic {
        self.notes.push(note.into());
        self
    }

    /// Sets the suggestion what to do next, and replaces an earlier one.
    #[must_use]
    pub fn with_hint(mut self, hint: impl Into<String>) -> Diagnostic {
        self.hint = Some(hint.into());
        self
    }

    /// Attaches the counterexample of an error that involves several ranks.
    #[must_use]
    pub fn with_counterexample(mut self, counterexample: Counterexample) -> Diagnostic {
        self.counterexample = Some(Box::new(counterexample));
        self
    }

    /// Returns whether this diagnostic rejects the input.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.severity == Severity::Error
    }
}
