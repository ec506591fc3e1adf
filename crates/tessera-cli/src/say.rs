//! How this binary speaks: diagnostics with an exit status, and text to standard output that may be closed.

use std::io::{ErrorKind, Write};
use std::process::ExitCode;

use clap::ValueEnum;
use tessera_base::{Code, Diagnostic, Diagnostics, Format, Registry, render_all};

/// Standard output that takes nothing.
pub static T0033: Code = Code {
    id: "T0033",
    title: "standard output cannot be written",
    page: "What the verb had to say could not be written to standard output, most often because it is redirected to a \
file on a full disk. The work itself was done: a folder that was to be made is there. Redirect to another place and run \
the verb again with another --out.",
};

/// Exit status of a refused input.
pub const DIAGNOSED: u8 = 1;
/// Exit status of a wrong command line.
pub const USAGE: u8 = 2;

/// What a verb comes to: an exit status after it said everything, or a refusal that is still to be told.
pub type Outcome = Result<u8, Refusal>;

/// Diagnostics that end a verb.
#[derive(Debug)]
pub struct Refusal {
    diagnostics: Diagnostics,
    status: u8,
}

impl Refusal {
    /// The command line is wrong.
    pub fn usage(diagnostics: impl Into<Diagnostics>) -> Refusal {
        Refusal { diagnostics: diagnostics.into(), status: USAGE }
    }

    /// A run was refused for a reason that has an exit status of its own.
    pub fn with_status(diagnostics: Diagnostics, status: u8) -> Refusal {
        Refusal { diagnostics, status }
    }

    /// The same with the status of a wrong command line, where 1 says something else.
    pub fn into_usage(self) -> Refusal {
        Refusal { status: USAGE, ..self }
    }

    /// A refusal of a question: the status of a wrong command line where the question is not understood.
    pub fn of_question(self) -> Refusal {
        let wrong = self.status == DIAGNOSED && self.diagnostics.iter().any(tessera::search::not_understood);
        if wrong { self.into_usage() } else { self }
    }

    /// Prints it once: JSON to standard output, anything else to standard error.
    pub fn tell(self, format: Format) -> ExitCode {
        // Standard output that cannot be written cannot carry the diagnostic either.
        let format = if self.diagnostics.iter().any(|d| d.code == &T0033) { Format::Text } else { format };
        diagnostics(&self.diagnostics, format, &|_| None);
        ExitCode::from(self.status)
    }
}

impl From<Diagnostics> for Refusal {
    fn from(diagnostics: Diagnostics) -> Refusal {
        Refusal { diagnostics, status: DIAGNOSED }
    }
}

impl From<Diagnostic> for Refusal {
    fn from(d: Diagnostic) -> Refusal {
        vec![d].into()
    }
}

/// Every code of the build, those of this binary included.
pub fn registry() -> Registry {
    let rooms = tessera::registry();
    let rooms: Vec<&'static Code> = rooms.iter().collect();
    Registry::new(&[&rooms, crate::CODES])
}

/// Prints diagnostics where their format belongs: text to standard error, JSON lines and workflow commands to
/// standard output.
pub fn diagnostics(ds: &[Diagnostic], format: Format, source: &dyn Fn(&str) -> Option<String>) {
    if ds.is_empty() {
        return;
    }
    let text = render_all(ds, format, source);
    if format != Format::Text {
        // Nothing is left to tell it with.
        let _ = out(&text);
        return;
    }
    // What refuses is worth more than what warns.
    let (errors, warnings): (Vec<&Diagnostic>, Vec<&Diagnostic>) = ds.iter().partition(|d| d.is_error());
    let mut codes: Vec<&str> = errors.into_iter().chain(warnings).map(|d| d.code.id).collect();
    let mut told = std::collections::BTreeSet::new();
    codes.retain(|c| told.insert(*c));
    let more = match codes[..] {
        [one] => format!("tessera explain {one}"),
        [first, ..] => format!("tessera explain {first} (also {})", codes[1..].join(", ")),
        [] => return,
    };
    eprintln!("{text}more: {more}");
}

/// Writes to standard output. A reader that has gone away, as in `tessera explain | head`, is no failure.
///
/// # Errors
/// T0033.
pub fn out(text: &str) -> Result<(), Diagnostic> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(e) if e.kind() != ErrorKind::BrokenPipe => {
            Err(Diagnostic::error(&T0033, format!("standard output cannot be written: {e}")))
        }
        _ => Ok(()),
    }
}

/// `--format` of most verbs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum Shape {
    /// For a person
    #[default]
    Text,
    /// For a program
    Json,
}

impl From<Shape> for Format {
    fn from(shape: Shape) -> Format {
        match shape {
            Shape::Text => Format::Text,
            Shape::Json => Format::Json,
        }
    }
}

/// Lays out rows in columns, the first row a heading. Columns of numbers stand right.
pub fn table(rows: &[Vec<String>], right: &[bool]) -> String {
    let width = |i: usize| rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max().unwrap_or(0);
    let widths: Vec<usize> = (0..right.len()).map(width).collect();
    let line = |row: &Vec<String>| {
        let cells = row
            .iter()
            .zip(&widths)
            .zip(right)
            .map(|((cell, w), right)| if *right { format!("{cell:>w$}") } else { format!("{cell:<w$}") });
        format!("  {}", cells.collect::<Vec<_>>().join("  ")).trim_end().to_string() + "\n"
    };
    rows.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn codes_of_rooms_and_binary_do_not_collide() {
        assert!(registry().get("T0033").is_some() && registry().get("t0301").is_some());
    }

    #[test]
    fn columns_line_up() {
        let row = |a: &str, b: &str| vec![a.to_string(), b.to_string()];
        let text = table(&[row("phase", "bytes"), row("µs", "7"), row("", "1234567")], &[false, true]);
        assert_eq!(text, "  phase    bytes\n  µs           7\n         1234567\n");
    }
}
