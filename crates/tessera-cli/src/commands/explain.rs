//! `tessera explain`: prints what a code, a rule, a drill, a page, a topic, an explainer, a card or a
//! symptom means, and what to look at first; writes all pages as a site, and packs of pages as one text.

mod lookup;
mod render;

use std::path::{Path, PathBuf};

use tessera::files::StagedFolder;
use tessera_base::{Code, Diagnostic, Registry};
use tessera_library::{Library, read_packs, render_site};

use crate::codes::T0032;
use crate::output::{CliError, CliResult, OutputFormat, format_pairs, full_registry, write_stdout};
use lookup::{find_subjects, named_pages};
use render::Sources;

const EXAMPLES: &str = "\
Examples:
  tessera explain T0301
  tessera explain black frames   a symptom, in your words
  tessera explain D-03           a rule of the manual
  tessera explain stopped-rank   a drill
  tessera explain shutdown       a page of the manual
  tessera explain failure-modes  an explainer, a topic or a card
  tessera explain --html out/library   all pages as a site, for a browser
  tessera explain --pack review  several pages as one text, for a reviewer
  tessera explain                list all codes, pages, topics, explainers, cards and symptoms
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
    ("T15", "programs of arrays in Python"),
    ("T16", "servers of streams"),
];

/// Explain a diagnostic code, a symptom, a rule, a drill, a page, a topic or a source
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// A code such as T0301, a rule such as D-03, a drill, a page, a topic, an explainer, a card, or a symptom in
    /// plain words, in upper or lower case; if absent, all of them but the rules are listed
    #[arg(value_name = "QUESTION")]
    pub question: Vec<String>,

    /// Write all pages as one site to a new folder: open DIR/index.html, which needs no network
    #[arg(long, value_name = "DIR", conflicts_with_all = ["question", "full", "format", "pack"])]
    pub html: Option<PathBuf>,

    /// Print several pages as one text for a reviewer who has nothing else: review or compile
    #[arg(long, value_name = "NAME", conflicts_with_all = ["question", "full", "format"])]
    pub pack: Option<String>,

    /// Print the whole page
    #[arg(long)]
    pub full: bool,

    /// Format of the documentation; json prints one line per code, rule, drill, page or symptom
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Prints the explanation of a question.
pub fn run(args: &Args) -> CliResult {
    let text = match (&args.html, &args.pack) {
        (Some(folder), _) => write_site(folder)?,
        (None, Some(name)) => render_pack(name).map_err(CliError::usage)?,
        (None, None) => answer(args).map_err(CliError::usage)?,
    };
    write_stdout(&text)?;
    Ok(0)
}

/// Writes the site, and returns the line that names its first page.
fn write_site(folder: &Path) -> Result<String, Diagnostic> {
    let registry = full_registry();
    let codes: Vec<(&Code, &str)> = registry.iter().map(|c| (c, code_area(c))).collect();
    let mut staged = StagedFolder::create(folder)?;
    let files = render_site(&read_library(), &codes);
    for file in &files {
        staged.write(&file.path, &file.bytes)?;
    }
    staged.commit()?;
    let index = folder.join("index.html");
    Ok(format!("{}: {} files; open it in a browser\n", index.display(), files.len()))
}

/// Returns the text of a prompt pack.
///
/// # Errors
/// Returns T0032 with the known names if there is no such pack.
fn render_pack(name: &str) -> Result<String, Diagnostic> {
    let unknown = |text: String| Diagnostic::error(&T0032, text);
    let packs = read_packs().map_err(unknown)?;
    let names: Vec<&str> = packs.iter().map(|p| p.name.as_str()).collect();
    match packs.iter().find(|p| p.name == name) {
        Some(pack) => pack.render().map_err(unknown),
        None => Err(unknown(format!("no pack `{name}` in this build"))
            .with_hint(format!("the packs are {}", names.join(", ")))),
    }
}

/// Returns the text that answers a question.
///
/// # Errors
/// Returns T0032 with the nearest names if the question names nothing that this build knows.
fn answer(args: &Args) -> Result<String, Diagnostic> {
    let (registry, library) = (full_registry(), read_library());
    let sources = Sources { library: &library, registry: &registry };
    let question = args.question.join(" ");
    if question.trim().is_empty() {
        return Ok(match args.format {
            OutputFormat::Text => list_codes(&registry) + &list_pages(&library),
            OutputFormat::Json => registry.iter().map(|c| sources.code_value(c).to_string() + "\n").collect(),
        });
    }
    let subjects = find_subjects(question.trim(), &library, &registry)?;
    let texts: Vec<String> = subjects
        .iter()
        .map(|s| match args.format {
            OutputFormat::Text => sources.render_text(s, args.full),
            OutputFormat::Json => sources.render_json(s),
        })
        .collect();
    Ok(texts.join(if args.format == OutputFormat::Json { "" } else { "\n" }))
}

/// Reads the library of this build.
///
/// # Panics
/// Panics if the embedded data are not valid, which every test that calls this function finds.
fn read_library() -> Library {
    Library::read().unwrap_or_else(|e| panic!("{e}"))
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

/// Lists pages, topics, explainers and cards, and each symptom with the first words that find it.
fn list_pages(library: &Library) -> String {
    let pages: Vec<_> = named_pages().collect();
    let topics: Vec<_> = library.topics.iter().map(|t| format!("{} {}", t.number, t.name)).collect();
    let explainers: Vec<_> = library.explainers.iter().map(|e| format!("{} {}", e.number, e.name)).collect();
    let symptoms = library
        .symptoms
        .iter()
        .map(|s| (s.words.first().map(String::as_str).unwrap_or_default(), s.title.as_str()));
    let titled =
        |names: &[String], titles: Vec<&str>| format_pairs(names.iter().map(String::as_str).zip(titles));
    format!(
        "Pages\n{}Topics\n{}Explainers\n{}Cards\n{}Symptoms\n{}\n`tessera explain NAME` explains any of them, a rule or \
a drill.\n",
        format_pairs(pages.iter().map(|p| (p.name(), p.title()))),
        titled(&topics, library.topics.iter().map(|t| t.title.as_str()).collect()),
        titled(&explainers, library.explainers.iter().map(|e| e.title.as_str()).collect()),
        format_pairs(library.cards.iter().map(|c| (c.name.as_str(), c.title.as_str()))),
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
        let question = vec![question.to_string()];
        let args = Args { question, html: None, pack: None, full: false, format: OutputFormat::Text };
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
    fn each_name_finds_its_subject() {
        let library = read_library();
        let is_known = |name: &str| !ask(name).starts_with("T0032");
        assert!(library.rules.iter().all(|r| ask(&r.id).starts_with(&format!("{}, ", r.id))));
        assert!(library.drills.iter().all(|d| ask(&d.id).contains(&format!("Drill {}:", d.id))));
        assert!(named_pages().all(|p| ask(p.name()).contains(p.title())));
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
