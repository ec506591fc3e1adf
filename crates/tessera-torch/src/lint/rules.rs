//! The rules, and how they report.

mod branches;
mod compiled;
mod waits;

use tessera_base::{Diagnostic, Span};

use super::module::Module;

pub(super) use branches::find_conditional_collectives;
pub(super) use compiled::find_misplaced_calls;
pub(super) use waits::find_missing_waits;

/// Collects the findings in one file.
#[derive(Debug)]
pub(super) struct Finder<'a> {
    pub(super) module: &'a Module<'a>,
    pub(super) file: &'a str,
    pub(super) found: Vec<Diagnostic>,
}

impl Finder<'_> {
    /// Adds a finding with the place that it is about, and further places.
    fn report(&mut self, finding: Diagnostic, at: Span, label: &str, others: &[(Span, &str)]) {
        let mut finding = finding.with_span_label(self.file, label, at);
        for (span, label) in others {
            finding = finding.with_span_label(self.file, *label, *span);
        }
        self.found.push(finding);
    }
}
