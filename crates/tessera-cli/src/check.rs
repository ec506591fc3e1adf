//! `tessera check`: judges plans' folders, program files, and traces of collectives.

use std::path::PathBuf;

use clap::ValueEnum;
use tessera::Plan;
use tessera::charts::{check_chart, is_chart};
use tessera::check::{Limits, T0026, check_file};
use tessera::drawings::Drawings;
use tessera::trace::{self, check_trace};
use tessera_base::{Diagnostic, Diagnostics, Format};

use crate::say::{DIAGNOSED, Outcome, diagnostics, out};

const EXAMPLES: &str = "\
Examples:
  tessera check my-plan
  tessera check filetests/check/pipeline.tir
  tessera check trace/rank-*.jsonl            what ranks of any program launched
  tessera check layer.mmd                     a timeline that was drawn: its overlap, bubble and what cannot be
  tessera check my-plan --svg why             draws each counterexample, as why/T0311-1.svg
  tessera check my-plan --format github       annotations in a workflow

A folder with seal.json is a plan: it must be the one that was sealed. A .tir file holds programs: each is judged alone,
and all ranks together where every rank has a program. A .mmd file is a Mermaid gantt chart of a block's streams or of a
pipeline's stages, such as the timeline.mmd of a plan's folder. A trace is one .jsonl file per rank: the .jsonl files named
together are one trace, and so is a folder of them (docs/guides/trace-door.md). Exit status 1 when anything is refused;
warnings refuse nothing.";

/// Judge plans, programs and traces: would the ranks wait for each other, drift, or run out of memory?
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders of plans or traces, .tir files, and .jsonl files
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: CheckFormat,

    /// Folder for drawings of counterexamples; drawings of the same name are replaced
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,

    /// Judge for a run with NCCL_GRAPH_MIXING_SUPPORT=0
    ///
    /// A communicator then serves one captured graph at a time, and no eager collective while a graph that uses it is
    /// outstanding. Traces are not judged for it: they do not say when a graph ended.
    #[arg(long)]
    pub no_graph_mixing: bool,
}

/// `--format` of this verb.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum CheckFormat {
    /// For a person
    #[default]
    Text,
    /// One JSON object a line
    Json,
    /// GitHub workflow commands
    Github,
}

impl From<CheckFormat> for Format {
    fn from(f: CheckFormat) -> Format {
        match f {
            CheckFormat::Text => Format::Text,
            CheckFormat::Json => Format::Json,
            CheckFormat::Github => Format::Github,
        }
    }
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    let mut drawings = args.svg.as_deref().map(Drawings::create).transpose()?;
    let limits = Limits { graph_mixing_off: args.no_graph_mixing, ..Limits::default() };
    let mut status = 0;
    for input in inputs(&args.paths) {
        let found = judge(&input, &limits);
        diagnostics(&found.diagnostics, args.format.into(), &*found.source);
        if let Some(drawings) = &mut drawings {
            for file in drawings.add(&found.diagnostics, &*found.source)? {
                eprintln!("wrote {}", file.display());
            }
        }
        if found.diagnostics.iter().any(Diagnostic::is_error) {
            status = DIAGNOSED;
        } else if let Some(what) = found.verified {
            out(&verified(&input, &what, args.format))?;
        }
    }
    Ok(status)
}

/// One thing to judge.
#[derive(Debug, PartialEq, Eq)]
enum Input {
    Plan(PathBuf),
    Programs(PathBuf),
    Chart(PathBuf),
    /// What it is called, and its files.
    Trace(String, Vec<PathBuf>),
}

/// What the paths name, in their order; loose files of traces stand together where the first of them does.
fn inputs(paths: &[PathBuf]) -> Vec<Input> {
    let loose: Vec<PathBuf> = paths.iter().filter(|p| trace::is_trace(p) && !p.is_dir()).cloned().collect();
    let mut told = false;
    let mut out = Vec::new();
    for path in paths {
        if path.is_dir() {
            let plan = ["seal.json", "mapping.toml", "programs"].iter().any(|f| path.join(f).exists());
            out.push(match trace::files_of(path) {
                Ok(files) if !plan => Input::Trace(path.display().to_string(), files),
                _ => Input::Plan(path.clone()),
            });
        } else if is_chart(path) {
            out.push(Input::Chart(path.clone()));
        } else if !trace::is_trace(path) {
            out.push(Input::Programs(path.clone()));
        } else if !told {
            told = true;
            let first = path.display();
            let name = match loose.len() {
                1 => first.to_string(),
                n => format!("{first} and {} more", n - 1),
            };
            out.push(Input::Trace(name, loose.clone()));
        }
    }
    out
}

/// Text of a named file, where it is at hand.
type Source = Box<dyn Fn(&str) -> Option<String>>;

/// What the judge says of an input.
struct Found {
    diagnostics: Diagnostics,
    source: Source,
    /// Only without errors.
    verified: Option<Verified>,
}

enum Verified {
    Digest(String),
    /// Programs by themselves; whether their ranks would wait for each other is not known.
    Alone(String),
    Trace {
        ranks: usize,
        launches: usize,
        groups: usize,
    },
    /// What was measured on a chart.
    Chart(Vec<String>),
}

fn judge(input: &Input, limits: &Limits) -> Found {
    match input {
        Input::Plan(folder) => {
            let source = Box::new(|at: &str| std::fs::read_to_string(at).ok());
            match Plan::read_within(folder, limits) {
                Ok(plan) => {
                    let verified = Some(Verified::Digest(plan.sealed.digest_hex()));
                    Found { diagnostics: Vec::new(), source, verified }
                }
                Err(diagnostics) => Found { diagnostics, source, verified: None },
            }
        }
        Input::Programs(file) => {
            let checked = check_file(file, limits);
            let alone = checked.diagnostics.iter().any(|d| d.code == &T0026);
            let digest = checked.digest.clone().filter(|_| checked.verified());
            let verified = digest.map(if alone { Verified::Alone } else { Verified::Digest });
            let (name, text) = (file.display().to_string(), checked.source);
            let source = Box::new(move |at: &str| (at == name).then(|| text.clone()));
            Found { diagnostics: checked.diagnostics, source, verified }
        }
        Input::Chart(file) => {
            let found = check_chart(file);
            let fine = !found.diagnostics.iter().any(Diagnostic::is_error);
            let (name, text) = (file.display().to_string(), found.source);
            let source = Box::new(move |at: &str| (at == name).then(|| text.clone()));
            let verified = fine.then_some(Verified::Chart(found.measured));
            Found { diagnostics: found.diagnostics, source, verified }
        }
        Input::Trace(name, files) => {
            let mut judged = check_trace(files);
            if files.is_empty() {
                judged.diagnostics =
                    judged.diagnostics.into_iter().map(|d| d.at(name, "this folder")).collect();
            }
            let verified = judged.verified().then_some(Verified::Trace {
                ranks: judged.ranks,
                launches: judged.launches,
                groups: judged.groups,
            });
            Found { diagnostics: judged.diagnostics, source: Box::new(trace::text), verified }
        }
    }
}

fn verified(input: &Input, what: &Verified, format: CheckFormat) -> String {
    let path = match input {
        Input::Plan(path) | Input::Programs(path) | Input::Chart(path) => path.display().to_string(),
        Input::Trace(name, _) => name.clone(),
    };
    match (what, format) {
        (Verified::Digest(digest), CheckFormat::Json) => {
            serde_json::json!({"path": path, "verified": true, "digest": digest}).to_string() + "\n"
        }
        (Verified::Digest(digest), _) => format!("{path}: verified, digest {digest}\n"),
        (Verified::Alone(digest), CheckFormat::Json) => {
            let line = serde_json::json!({
                "path": path, "verified": true, "ranks_compared": false, "digest": digest,
            });
            line.to_string() + "\n"
        }
        (Verified::Alone(digest), _) => {
            format!("{path}: each program verified by itself, ranks not compared, digest {digest}\n")
        }
        (Verified::Chart(measured), CheckFormat::Json) => {
            serde_json::json!({"path": path, "measured": measured}).to_string() + "\n"
        }
        (Verified::Chart(measured), _) => format!("{path}: {}\n", measured.join("; ")),
        (Verified::Trace { ranks, launches, groups }, CheckFormat::Json) => {
            let line = serde_json::json!({
                "path": path, "verified": true, "ranks": ranks, "collectives": launches, "groups": groups,
            });
            line.to_string() + "\n"
        }
        (Verified::Trace { ranks, launches, groups }, _) => format!(
            "{path}: {}, {}, {}: no hang or mismatch in what was seen\n",
            plural(*ranks, "rank"),
            plural(*launches, "collective"),
            plural(*groups, "group"),
        ),
    }
}

fn plural(n: usize, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}
