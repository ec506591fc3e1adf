//! `tessera explain`: prints what a code, a rule, a drill, a page or a symptom means, and what to look
//! at first.

mod library;
mod lookup;
mod render;

use tessera_base::{Code, Diagnostic, Registry};

use crate::output::{CliError, CliResult, OutputFormat, format_pairs, full_registry, write_stdout};
use library::{Library, PAGES};
use lookup::find_topics;
use render::Sources;

const EXAMPLES: &str = "\
Examples:
  tessera explain T0301
  tessera explain black frames   a symptom, in your words
  tessera explain D-03           a rule of the manual
  tessera explain stopped-rank   a drill
  tessera explain shutdown       a page of the manual
  tessera explain                list all codes, pages and symptoms
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
    ("T14", "PyTorch runs"),
];

/// Explain a diagnostic code, a symptom, a rule, a drill or a page of the manual
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A code such as T0301, a rule such as D-03, a drill, a page of the manual, or a symptom in plain words, in
    /// upper or lower case; if absent, all codes, pages and symptoms are listed
    #[arg(value_name = "QUESTION")]
    pub question: Vec<String>,

    /// Print the whole page of the manual
    #[arg(long)]
    pub full: bool,

    /// Format of the documentation; json prints one line per code, rule, drill, page or symptom
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Prints the explanation of a question.
pub fn run(args: &Args) -> CliResult {
    let text = answer(args).map_err(CliError::usage)?;
    write_stdout(&text)?;
    Ok(0)
}

/// Returns the text that answers a question.
///
/// # Errors
/// Returns T0032 with the nearest names if the question names nothing that this build knows.
fn answer(args: &Args) -> Result<String, Diagnostic> {
    let (registry, library) = (full_registry(), Library::read());
    let sources = Sources { library: &library, registry: &registry };
    let question = args.question.join(" ");
    if question.trim().is_empty() {
        return Ok(match args.format {
            OutputFormat::Text => list_codes(&registry) + &list_topics(&library),
            OutputFormat::Json => registry.iter().map(|c| sources.code_value(c).to_string() + "\n").collect(),
        });
    }
    let topics = find_topics(question.trim(), &library, &registry)?;
    let texts: Vec<String> = topics
        .iter()
        .map(|t| match args.format {
            OutputFormat::Text => sources.render_text(t, args.full),
            OutputFormat::Json => sources.render_json(t),
        })
        .collect();
    Ok(texts.join(if args.format == OutputFormat::Json { "" } else { "\n" }))
}

fn code_area(code: &Code) -> &'static str {
    CODE_AREAS.iter().find(|(prefix, _)| code.id.starts_with(prefix)).map_or("other", |(_, area)| area)
}

fn list_codes(registry: &Registry) -> String {
    let mut out = String::new();
    for (prefix, area) in CODE_AREAS {
        let codes = registry.iter().filter(|c| c.id.starts_with(prefix)).map(|c| (c.id, c.title));
        let rows = format_pairs(codes);
        if !rows.is_empty() {
            out += &format!("{prefix}xx: {area}\n{rows}");
        }
    }
    out
}

/// Lists the pages, and each symptom with the first words that find it.
fn list_topics(library: &Library) -> String {
    let symptoms = library
        .symptoms
        .iter()
        .map(|s| (s.words.first().map(String::as_str).unwrap_or_default(), s.title.as_str()));
    format!(
        "Pages\n{}Symptoms\n{}\n`tessera explain NAME` explains a code, a rule, a drill, a page or a symptom.\n",
        format_pairs(PAGES.iter().map(|p| (p.name, p.title()))),
        format_pairs(symptoms)
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Questions with parts of their answers.
    const QUESTIONS: &str = include_str!("explain/questions.txt");

    /// Returns the answer, or the message and the labels of the diagnostic.
    fn ask(question: &str) -> String {
        let args = Args { question: vec![question.to_string()], full: false, format: OutputFormat::Text };
        answer(&args).unwrap_or_else(|d| {
            let labels: Vec<String> = d.labels.iter().map(|l| format!("{l:?}")).collect();
            format!("{}: {}\n{}", d.code.id, d.message, labels.join("\n"))
        })
    }

    #[test]
    fn every_question_has_its_answer() {
        let rows = QUESTIONS.lines().filter(|l| !l.is_empty() && !l.starts_with('#'));
        let (mut count, mut wrong) = (0, Vec::new());
        for row in rows {
            let (question, parts) = row.split_once(" => ").unwrap_or_else(|| panic!("no answer: {row}"));
            let text = ask(question);
            let missing = parts.split(" | ").filter(|part| !text.contains(part));
            wrong.extend(missing.map(|part| format!("`{question}` lacks `{part}`:\n{text}")));
            count += 1;
        }
        assert!(wrong.is_empty(), "{}", wrong.join("\n"));
        assert!(count > 50, "{count}");
    }

    #[test]
    fn each_name_finds_its_topic() {
        let library = Library::read();
        let is_known = |name: &str| !ask(name).starts_with("T0032");
        assert!(library.rules.iter().all(|r| ask(&r.id).starts_with(&format!("{}, ", r.id))));
        assert!(library.drills.iter().all(|d| ask(&d.id).contains(&format!("Drill {}:", d.id))));
        assert!(PAGES.iter().all(|p| ask(p.name).contains(p.title())));
        for symptom in &library.symptoms {
            assert!(
                symptom.words.iter().all(|w| is_known(w) && ask(w).contains(&symptom.title)),
                "{symptom:?}"
            );
        }
    }

    #[test]
    fn every_code_has_an_area() {
        assert!(full_registry().iter().all(|c| code_area(c) != "other"));
    }
}
