//! `tessera explain`: the page of a code.

use tessera_base::{Code, Diagnostic, Registry};

use crate::say::{Outcome, Refusal, Shape, out, registry, table};

/// A code that does not exist.
pub static T0032: Code = Code {
    id: "T0032",
    title: "unknown code",
    page: "Every diagnostic carries a code such as T0301, and `tessera explain` without a code lists those of this build. A \
code from another version may have been retired; ids are never used again for something else.",
};

const EXAMPLES: &str = "\
Examples:
  tessera explain T0301
  tessera explain                list every code
  tessera explain | grep -i mesh";

/// Where the codes of a range are raised: what the first two digits say.
const RANGES: &[(&str, &str)] = &[
    ("T00", "command line, model folders, plan folders, traces"),
    ("T01", "mesh"),
    ("T02", "program text, types and layouts"),
    ("T03", "the judge"),
    ("T04", "models"),
    ("T05", "weights"),
    ("T06", "mappings and planning"),
    ("T07", "lockstep"),
    ("T08", "devices"),
    ("T09", "records and reports"),
    ("T11", "clusters and what things take"),
    ("T12", "the search over mappings"),
    ("T13", "GPUs and their libraries"),
];

/// How many near misses are named.
const SUGGESTIONS: usize = 4;

/// Print what a diagnostic's code means and what to do
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A code such as T0301, in upper or lower case; without one, every code is listed
    pub code: Option<String>,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    let registry = registry();
    let text = match (&args.code, args.format) {
        (None, Shape::Text) => list(&registry),
        (None, Shape::Json) => registry.iter().map(json).collect(),
        (Some(id), format) => {
            let code = registry.get(id.trim()).ok_or_else(|| unknown(id, &registry))?;
            if format == Shape::Json { json(code) } else { page(code) }
        }
    };
    out(&text)?;
    Ok(0)
}

fn range(code: &Code) -> &'static str {
    RANGES.iter().find(|(prefix, _)| code.id.starts_with(prefix)).map_or("other", |(_, room)| room)
}

fn list(registry: &Registry) -> String {
    let mut out = String::new();
    for (prefix, room) in RANGES {
        let rows: Vec<Vec<String>> = registry
            .iter()
            .filter(|c| c.id.starts_with(prefix))
            .map(|c| vec![c.id.to_string(), c.title.to_string()])
            .collect();
        if !rows.is_empty() {
            out += &format!("{prefix}xx: {room}\n{}", table(&rows, &[false, false]));
        }
    }
    out + "\n`tessera explain CODE` prints a page.\n"
}

fn json(code: &'static Code) -> String {
    let fields =
        serde_json::json!({"code": code.id, "title": code.title, "room": range(code), "page": code.page});
    fields.to_string() + "\n"
}

/// Widest line of a page.
const WIDTH: usize = 100;

fn page(code: &Code) -> String {
    let body: Vec<String> = code.page.split("\n\n").map(wrap).collect();
    format!("{}: {}\n\n{}\nRaised by: {}.\n", code.id, code.title, body.join("\n"), range(code))
}

/// A paragraph in lines of at most [`WIDTH`] characters, where words allow.
fn wrap(paragraph: &str) -> String {
    let mut out = String::new();
    let mut column = 0;
    for word in paragraph.split_whitespace() {
        let width = word.chars().count();
        if column > 0 && column + 1 + width > WIDTH {
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

fn unknown(id: &str, registry: &Registry) -> Refusal {
    let digits = |s: &str| {
        s.chars().filter_map(|c| c.to_digit(10)).fold(0i64, |n, d| (n * 10 + i64::from(d)) % 1_000_000)
    };
    let wanted = digits(id);
    let mut near: Vec<&Code> = registry.iter().collect();
    near.sort_by_key(|c| ((digits(c.id) - wanted).abs(), c.id));
    let d = near
        .into_iter()
        .take(SUGGESTIONS)
        .fold(Diagnostic::error(&T0032, format!("no code `{id}` in this build")), |d, c| d.at(c.id, c.title));
    Refusal::usage(vec![d.hint("`tessera explain` lists every code")])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paragraphs_are_wrapped_between_words() {
        let text = wrap(&"word ".repeat(60));
        assert!(
            text.lines().all(|l| l.len() <= WIDTH && !l.ends_with(' ')) && text.lines().count() == 3,
            "{text}"
        );
    }

    #[test]
    fn every_code_belongs_to_a_range() {
        assert!(registry().iter().all(|c| range(c) != "other"));
    }
}
