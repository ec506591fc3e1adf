//! `tessera explain`: prints the documentation of a diagnostic code.

use tessera_base::{Code, Diagnostic, Registry};

use crate::codes::T0032;
use crate::output::{CliError, CliResult, OutputFormat, format_table, full_registry, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera explain T0301
  tessera explain                list all codes
  tessera explain | grep -i mesh";

/// The area that raises the codes of each range, by the first two digits.
const CODE_AREAS: &[(&str, &str)] = &[
    ("T00", "command line, model folders, plan folders, traces"),
    ("T01", "mesh"),
    ("T02", "program text, types and layouts"),
    ("T03", "verifier"),
    ("T04", "models"),
    ("T05", "weights"),
    ("T06", "mappings and planning"),
    ("T07", "lockstep runtime"),
    ("T08", "devices"),
    ("T09", "records and reports"),
    ("T11", "clusters and cost models"),
    ("T12", "mapping search"),
    ("T13", "GPUs and their libraries"),
];

/// Maximum number of suggested codes.
const MAX_SUGGESTIONS: usize = 4;

/// Print the documentation of a diagnostic code
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A code such as T0301, in upper or lower case; if absent, all codes are listed
    pub code: Option<String>,

    /// Format of the documentation; json prints one line per code
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Prints the documentation of a diagnostic code.
pub fn run(args: &Args) -> CliResult {
    let registry = full_registry();
    let text = match (&args.code, args.format) {
        (None, OutputFormat::Text) => list_codes(&registry),
        (None, OutputFormat::Json) => registry.iter().map(code_json).collect(),
        (Some(id), format) => {
            let code = registry.get(id.trim()).ok_or_else(|| unknown_code_error(id, &registry))?;
            if format == OutputFormat::Json { code_json(code) } else { render_page(code) }
        }
    };
    write_stdout(&text)?;
    Ok(0)
}

fn code_area(code: &Code) -> &'static str {
    CODE_AREAS.iter().find(|(prefix, _)| code.id.starts_with(prefix)).map_or("other", |(_, area)| area)
}

fn list_codes(registry: &Registry) -> String {
    let mut out = String::new();
    for (prefix, area) in CODE_AREAS {
        let rows: Vec<Vec<String>> = registry
            .iter()
            .filter(|c| c.id.starts_with(prefix))
            .map(|c| vec![c.id.to_string(), c.title.to_string()])
            .collect();
        if !rows.is_empty() {
            out += &format!("{prefix}xx: {area}\n{}", format_table(&rows, &[false, false]));
        }
    }
    out + "\n`tessera explain CODE` prints the documentation of a code.\n"
}

fn code_json(code: &'static Code) -> String {
    let fields =
        serde_json::json!({"code": code.id, "title": code.title, "area": code_area(code), "page": code.page});
    fields.to_string() + "\n"
}

/// Maximum line width of a page, in characters.
const PAGE_WIDTH: usize = 100;

fn render_page(code: &Code) -> String {
    let body: Vec<String> = code.page.split("\n\n").map(wrap_paragraph).collect();
    format!("{}: {}\n\n{}\nRaised by: {}.\n", code.id, code.title, body.join("\n"), code_area(code))
}

/// Wraps a paragraph into lines of at most [`PAGE_WIDTH`] characters; a longer word stays whole.
fn wrap_paragraph(paragraph: &str) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > PAGE_WIDTH {
            out.push('\n');
            column = 0;
        } else if column > 0 {
            out.push(' ');
            column += 1;
        }
        out += word;
        column += width;
    }
    out + "\n"
}

fn unknown_code_error(id: &str, registry: &Registry) -> CliError {
    let digits = |s: &str| {
        s.chars().filter_map(|c| c.to_digit(10)).fold(0i64, |n, d| (n * 10 + i64::from(d)) % 1_000_000)
    };
    let wanted_number = digits(id);
    let mut candidates: Vec<&Code> = registry.iter().collect();
    candidates.sort_by_key(|c| ((digits(c.id) - wanted_number).abs(), c.id));
    let d = candidates
        .into_iter()
        .take(MAX_SUGGESTIONS)
        .fold(Diagnostic::error(&T0032, format!("no code `{id}` in this build")), |d, c| {
            d.with_label(c.id, c.title)
        });
    CliError::usage(vec![d.with_hint("`tessera explain` lists all codes")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        let text = wrap_paragraph(&"word ".repeat(60));
        assert!(
            text.lines().all(|l| l.len() <= PAGE_WIDTH && !l.ends_with(' ')) && text.lines().count() == 3,
            "{text}"
        );
    }

    #[test]
    fn every_code_has_an_area() {
        assert!(full_registry().iter().all(|c| code_area(c) != "other"));
    }
}
