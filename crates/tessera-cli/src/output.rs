//! Output of the binary: diagnostics with an exit status, and text on standard output.

use std::io::{ErrorKind, Write};

use clap::ValueEnum;
use tessera::terminal::{escape_controls, print_stderr, print_stderr_line};
use tessera_base::{Code, Diagnostic, DiagnosticFormat, Diagnostics, Registry, render_all};

use crate::codes::T0033;

/// Exit status of a rejected input.
pub const EXIT_DIAGNOSTICS: u8 = 1;
/// Exit status of an invalid request: an unknown option, name, pin or file. clap exits with it too.
pub const EXIT_USAGE: u8 = 2;

/// The result of a subcommand: an exit status after all output is written, or an error that `main`
/// prints.
pub type CliResult = Result<u8, CliError>;

/// Diagnostics that end a subcommand, with their exit status.
#[derive(Debug)]
pub struct CliError {
    diagnostics: Diagnostics,
    status: u8,
}

impl CliError {
    /// Returns an error with exit status [`EXIT_USAGE`]; `From<Diagnostic>` gives
    /// [`EXIT_DIAGNOSTICS`].
    pub fn usage(diagnostic: Diagnostic) -> CliError {
        CliError::from(diagnostic).into_usage()
    }

    /// Like [`CliError::usage`], for all mistakes of a command line.
    pub fn from_usage_errors(diagnostics: impl IntoIterator<Item = Diagnostic>) -> CliError {
        CliError::from(diagnostics.into_iter().collect::<Diagnostics>()).into_usage()
    }

    /// Returns the failure of a run, whose class has its own exit status.
    pub fn with_status(diagnostics: Diagnostics, status: u8) -> CliError {
        CliError { diagnostics, status }
    }

    /// Returns the error of a rank that joined others: a failure of all ranks has the status of its class.
    pub fn from_join(diagnostics: Diagnostics) -> CliError {
        match tessera::join::joint_failure_class(&diagnostics) {
            Some(class) => CliError::with_status(diagnostics, u8::try_from(class.exit_code()).unwrap_or(1)),
            None => diagnostics.into(),
        }
    }

    /// Returns the same error with the exit status of a usage error, for subcommands in which
    /// status 1 has another meaning.
    pub fn into_usage(self) -> CliError {
        CliError { status: EXIT_USAGE, ..self }
    }

    /// Returns the same error; it gets the exit status of a usage error if the command line names
    /// something that does not exist or cannot be understood.
    pub fn into_usage_if_invalid(self) -> CliError {
        let is_usage_error = self.status == EXIT_DIAGNOSTICS
            && self.diagnostics.iter().any(tessera_estimate::is_invalid_query);
        if is_usage_error { self.into_usage() } else { self }
    }

    /// Returns the same error with a note under its first diagnostic.
    pub fn with_note(mut self, note: &str) -> CliError {
        if let Some(first) = self.diagnostics.first_mut() {
            first.notes.push(note.to_string());
        }
        self
    }

    /// Prints the diagnostics once and returns the exit status. JSON goes to standard output, other
    /// formats to standard error.
    pub fn print(self, format: DiagnosticFormat) -> u8 {
        // If standard output cannot be written, it cannot carry this diagnostic either.
        let format =
            if self.diagnostics.iter().any(|d| d.code == &T0033) { DiagnosticFormat::Text } else { format };
        print_diagnostics(&self.diagnostics, format, &|_| None);
        self.status
    }
}

impl From<Diagnostics> for CliError {
    fn from(diagnostics: Diagnostics) -> CliError {
        CliError { diagnostics, status: EXIT_DIAGNOSTICS }
    }
}

impl From<Diagnostic> for CliError {
    fn from(d: Diagnostic) -> CliError {
        vec![d].into()
    }
}

/// Returns all diagnostic codes of the build, including those of this binary.
pub fn full_registry() -> Registry {
    let library_codes = tessera_tools::diagnostic_registry();
    let library_codes: Vec<&'static Code> = library_codes.iter().collect();
    Registry::new(&[&library_codes, tessera_serve::codes::CODES, crate::codes::CODES])
}

/// Prints diagnostics: text to standard error, JSON lines and GitHub workflow commands to standard
/// output.
pub fn print_diagnostics(
    ds: &[Diagnostic],
    format: DiagnosticFormat,
    source: &dyn Fn(&str) -> Option<String>,
) {
    if ds.is_empty() {
        return;
    }
    let text = render_all(ds, format, source);
    if format != DiagnosticFormat::Text {
        if let Err(d) = write_stdout(&text) {
            // The report is lost there, so standard error gets it.
            print_stderr(&(text + &render_all(&[d], DiagnosticFormat::Text, &|_| None)));
        }
        return;
    }
    // Errors come before warnings in the list of codes.
    let (errors, warnings): (Vec<&Diagnostic>, Vec<&Diagnostic>) = ds.iter().partition(|d| d.is_error());
    let mut codes: Vec<&str> = errors.into_iter().chain(warnings).map(|d| d.code.id).collect();
    let mut listed = std::collections::BTreeSet::new();
    codes.retain(|c| listed.insert(*c));
    let more = match codes[..] {
        [one] => format!("tessera explain {one}"),
        [first, ..] => format!("tessera explain {first} (also {})", codes[1..].join(", ")),
        [] => return,
    };
    print_stderr_line(&format!("{text}more: {more}"));
}

/// Writes to standard output, with control characters escaped. A closed pipe, as in `tessera explain | head`, is not an error.
pub fn write_stdout(text: &str) -> Result<(), Diagnostic> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(escape_controls(text).as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Diagnostic::error(&T0033, format!("standard output cannot be written: {e}")))
        }
        _ => Ok(()),
    }
}

/// Values of `--format` where a finding has a place in a file, each with its help text.
pub const DIAGNOSTIC_FORMATS: &[(&str, DiagnosticFormat, &str)] = &[
    ("text", DiagnosticFormat::Text, "Human-readable text"),
    ("json", DiagnosticFormat::Json, "One JSON object per line"),
    ("github", DiagnosticFormat::Github, "GitHub workflow commands, which GitHub shows as annotations"),
];

/// The values of `--format` of most subcommands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum OutputFormat {
    /// Human-readable text
    #[default]
    Text,
    /// JSON, for scripts
    Json,
}

impl From<OutputFormat> for DiagnosticFormat {
    fn from(shape: OutputFormat) -> DiagnosticFormat {
        match shape {
            OutputFormat::Text => DiagnosticFormat::Text,
            OutputFormat::Json => DiagnosticFormat::Json,
        }
    }
}

/// Lays rows out in columns; the first row is the heading, if there is one. `right_aligned` selects
/// the right-aligned columns.
pub fn format_table<const N: usize>(
    rows: impl IntoIterator<Item = [String; N]>,
    right_aligned: [bool; N],
) -> String {
    let rows: Vec<[String; N]> = rows.into_iter().collect();
    let width = |i: usize| rows.iter().map(|r| r[i].chars().count()).max().unwrap_or(0);
    let widths: [usize; N] = std::array::from_fn(width);
    let line = |row: &[String; N]| {
        let cells = row.iter().zip(&widths).zip(right_aligned).map(|((cell, w), right_aligned)| {
            if right_aligned { format!("{cell:>w$}") } else { format!("{cell:<w$}") }
        });
        format!("  {}", cells.collect::<Vec<_>>().join("  ")).trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

/// Lays pairs of a name and a text out in two columns.
pub fn format_pairs(pairs: impl IntoIterator<Item = (impl Into<String>, impl Into<String>)>) -> String {
    format_table(pairs.into_iter().map(|(name, text)| [name.into(), text.into()]), [false, false])
}

/// Prints code, class, rank and text of a failure to standard error.
pub fn print_failure(f: &tessera::Failure) {
    let rank = f.rank.map_or(String::new(), |r| format!(", rank {r}"));
    print_stderr_line(&format!(
        "failed[{}]: {}{rank}\n  {}\n\nmore: tessera explain {}",
        f.code,
        f.class.as_str(),
        f.text.replace("; ", "\n  "),
        f.code
    ));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_library_and_binary_do_not_collide() {
        assert!(full_registry().get("T0033").is_some() && full_registry().get("t0301").is_some());
    }

    #[test]
    fn columns_are_aligned() {
        let rows = [["phase", "bytes"], ["µs", "7"], ["", "1234567"]];
        let text = format_table(rows.map(|row| row.map(String::from)), [false, true]);
        assert_eq!(text, "  phase    bytes\n  µs           7\n         1234567\n");
    }
}
