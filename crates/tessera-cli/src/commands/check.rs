//! `tessera check`: verifies plan folders, program files, traces of collectives, and compile traces.

use std::path::{Path, PathBuf};

use tessera::check::{DeviceLimits, check_file};
use tessera::codes::T0026;
use tessera::files::read_text_file;
use tessera::opened_run::RunPlan;
use tessera::terminal::print_stderr_line;
use tessera_base::{Diagnostic, DiagnosticFormat, Diagnostics};
use tessera_tools::charts::{check_chart, is_chart};
use tessera_tools::codes::T0053;
use tessera_tools::compile_traces::{check_compile_traces, find_compile_traces, summarize_comparison};
use tessera_tools::drawings::DrawingDir;
use tessera_tools::trace::{self, check_trace};

use crate::flags::named_values;
use crate::output::{
    CliError, CliResult, DIAGNOSTIC_FORMATS, EXIT_DIAGNOSTICS, print_diagnostics, write_stdout,
};

const EXAMPLES: &str = "\
Examples:
  tessera check my-plan
  tessera check filetests/check/pipeline.tir
  tessera check trace/rank-*.jsonl            the collectives that the ranks of any framework launched
  tessera check torch-trace --ranks 8         the collectives that the ranks of a PyTorch run compiled (TORCH_TRACE=torch-trace)
  tessera check layer.mmd                     a timeline as a Gantt chart: overlap ratio, bubble, impossible intervals
  tessera check my-plan --svg why             draw each counterexample, as why/T0311-1.svg
  tessera check my-plan --format github       annotations for a GitHub workflow

A folder with seal.json is a plan; its content must match its digest. A .tir file contains programs: each is verified alone,
and the ranks are verified together if every rank has a program. A .mmd file is a Mermaid Gantt chart, drawn by hand or written
by `tessera plan --out` as timeline.mmd. Each section of the chart is a stream of a rank or a pipeline stage. A trace has one
.jsonl file per rank; the .jsonl files on the command line, or those in a folder, form one trace (docs/guides/trace-import.md).
The logs that TORCH_TRACE writes into a folder, one per rank, show what each rank compiled, not what ran
(docs/guides/compile-traces.md).

Exit status: 0 no errors (there may be warnings), 1 something was rejected, 2 usage error.";

/// Verify plans, programs and collective traces: no deadlock, no mismatched collectives, enough
/// memory
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Plan folders, folders with the .jsonl files of a trace or the logs of TORCH_TRACE, and .tir,
    /// .mmd or .jsonl files
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,

    /// Format of diagnostics and summary lines
    #[arg(long, value_parser = named_values(DIAGNOSTIC_FORMATS), default_value = "text")]
    pub format: DiagnosticFormat,

    /// Draw counterexamples as SVG files in this folder; existing drawings of the same name are
    /// replaced
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,

    /// Verify for a run with NCCL_GRAPH_MIXING_SUPPORT=0
    ///
    /// A communicator then serves one captured graph at a time: until that graph has finished,
    /// neither another graph nor a collective outside any graph may use the communicator. Traces
    /// are not verified for this, because they do not record when a graph ends.
    #[arg(long)]
    pub no_graph_mixing: bool,

    /// Number of ranks of the PyTorch run whose TORCH_TRACE folder is given; without it, the rank
    /// numbers and group sizes in the logs tell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: Option<u32>,
}

/// Verifies the given plan folders, program files or traces of collectives.
pub fn run(args: &Args) -> CliResult {
    let mut drawings = args.svg.as_deref().map(DrawingDir::create_in).transpose()?;
    let limits = DeviceLimits { graph_mixing_off: args.no_graph_mixing, ..DeviceLimits::default() };
    let mut status = 0;
    let inputs = classify_paths(&args.paths).map_err(CliError::usage)?;
    if args.ranks.is_some() && !inputs.iter().any(|i| matches!(i, CheckInput::CompileTraces(..))) {
        let d = Diagnostic::error(&T0053, "--ranks is given without a folder of compile traces")
            .with_hint("it applies to the folder of TORCH_TRACE: tessera check --help");
        return Err(CliError::usage(d));
    }
    for input in inputs {
        let outcome = check_input(&input, &limits, args.ranks);
        print_diagnostics(&outcome.diagnostics, args.format, &*outcome.source);
        if let Some(drawings) = &mut drawings {
            for file in drawings.write_drawings(&outcome.diagnostics, &*outcome.source)? {
                print_stderr_line(&format!("wrote {}", file.display()));
            }
        }
        if outcome.diagnostics.iter().any(Diagnostic::is_error) {
            status = EXIT_DIAGNOSTICS;
        } else if let Some(what) = outcome.summary {
            write_stdout(&summary_line(&input, &what, args.format))?;
        }
    }
    Ok(status)
}

/// What `tessera check` verifies at a time; the files of a trace are verified together.
#[derive(Debug, PartialEq, Eq)]
enum CheckInput {
    Plan(PathBuf),
    Programs(PathBuf),
    Chart(PathBuf),
    /// The name of the trace in messages, and its files, one per rank.
    Trace(String, Vec<PathBuf>),
    /// The folder of a PyTorch run's compile traces, and its files, one per rank.
    CompileTraces(PathBuf, Vec<PathBuf>),
}

/// Classifies the paths, in their order. Loose trace files form one trace, at the position of the
/// first.
///
/// # Errors
/// T1425 for a folder with compile traces and something else.
fn classify_paths(paths: &[PathBuf]) -> Result<Vec<CheckInput>, Diagnostic> {
    let trace_files: Vec<PathBuf> =
        paths.iter().filter(|p| trace::is_trace(p) && !p.is_dir()).cloned().collect();
    let mut trace_added = false;
    let mut out = Vec::new();
    for path in paths {
        if let Some(logs) = find_compile_traces(path)? {
            out.push(CheckInput::CompileTraces(path.clone(), logs));
        } else if path.is_dir() {
            let plan = ["seal.json", "mapping.toml", "programs"].iter().any(|f| path.join(f).exists());
            out.push(match trace::trace_files(path) {
                Ok(files) if !plan => CheckInput::Trace(path.display().to_string(), files),
                _ => CheckInput::Plan(path.clone()),
            });
        } else if is_chart(path) {
            out.push(CheckInput::Chart(path.clone()));
        } else if !trace::is_trace(path) {
            out.push(CheckInput::Programs(path.clone()));
        } else if !trace_added {
            trace_added = true;
            let first = path.display();
            let name = match trace_files.len() {
                1 => first.to_string(),
                n => format!("{first} and {} more", n - 1),
            };
            out.push(CheckInput::Trace(name, trace_files.clone()));
        }
    }
    Ok(out)
}

/// Returns the text of a named file, if it is available.
type SourceReader = Box<dyn Fn(&str) -> Option<String>>;

/// The verification result of one input.
struct CheckOutcome {
    diagnostics: Diagnostics,
    source: SourceReader,
    /// A summary, present only if there are no errors.
    summary: Option<VerifiedSummary>,
}

enum VerifiedSummary {
    Digest(String),
    /// Programs verified one by one; the ranks were not compared.
    DigestWithoutRanks(String),
    Trace {
        ranks: usize,
        launches: usize,
        groups: usize,
    },
    /// What was compared of compile traces.
    CompileTraces(String),
    /// One sentence per measurement of a chart, such as its overlap ratio and the goal.
    Chart(Vec<String>),
}

fn check_input(input: &CheckInput, limits: &DeviceLimits, ranks: Option<u32>) -> CheckOutcome {
    match input {
        CheckInput::CompileTraces(_, logs) => {
            let (diagnostics, summary) = match check_compile_traces(logs, ranks) {
                Err(diagnostics) => (diagnostics, None),
                Ok(compared) => {
                    let summary = VerifiedSummary::CompileTraces(summarize_comparison(&compared));
                    (compared.diagnostics, Some(summary))
                }
            };
            CheckOutcome { diagnostics, source: Box::new(|_| None), summary }
        }
        CheckInput::Plan(folder) => {
            let source = Box::new(|at: &str| read_text_file(Path::new(at)).ok());
            match RunPlan::read_with_limits(folder, limits) {
                Ok(plan) => {
                    let verified = Some(VerifiedSummary::Digest(plan.sealed().digest_hex()));
                    CheckOutcome { diagnostics: Vec::new(), source, summary: verified }
                }
                Err(diagnostics) => CheckOutcome { diagnostics, source, summary: None },
            }
        }
        CheckInput::Programs(file) => {
            let checked = check_file(file, limits);
            let ranks_not_compared = checked.diagnostics.iter().any(|d| d.code == &T0026);
            let digest = checked.digest.clone().filter(|_| checked.is_verified());
            let verified = digest.map(if ranks_not_compared {
                VerifiedSummary::DigestWithoutRanks
            } else {
                VerifiedSummary::Digest
            });
            let (name, text) = (file.display().to_string(), checked.source);
            let source = Box::new(move |at: &str| (at == name).then(|| text.clone()));
            CheckOutcome { diagnostics: checked.diagnostics, source, summary: verified }
        }
        CheckInput::Chart(file) => {
            let chart = check_chart(file);
            let has_no_errors = !chart.diagnostics.iter().any(Diagnostic::is_error);
            let (name, text) = (file.display().to_string(), chart.source);
            let source = Box::new(move |at: &str| (at == name).then(|| text.clone()));
            let verified = has_no_errors.then_some(VerifiedSummary::Chart(chart.measured));
            CheckOutcome { diagnostics: chart.diagnostics, source, summary: verified }
        }
        CheckInput::Trace(name, files) => {
            let mut checked = check_trace(files);
            if files.is_empty() {
                checked.diagnostics =
                    checked.diagnostics.into_iter().map(|d| d.with_label(name, "this folder")).collect();
            }
            let verified = checked.is_verified().then_some(VerifiedSummary::Trace {
                ranks: checked.ranks,
                launches: checked.launches,
                groups: checked.groups,
            });
            CheckOutcome {
                diagnostics: checked.diagnostics,
                source: Box::new(trace::read_lossy),
                summary: verified,
            }
        }
    }
}

fn summary_line(input: &CheckInput, summary: &VerifiedSummary, format: DiagnosticFormat) -> String {
    let path = match input {
        CheckInput::Plan(path)
        | CheckInput::Programs(path)
        | CheckInput::Chart(path)
        | CheckInput::CompileTraces(path, _) => path.display().to_string(),
        CheckInput::Trace(name, _) => name.clone(),
    };
    match (summary, format) {
        (VerifiedSummary::Digest(digest), DiagnosticFormat::Json) => {
            serde_json::json!({"path": path, "verified": true, "digest": digest}).to_string() + "\n"
        }
        (VerifiedSummary::Digest(digest), _) => format!("{path}: verified, digest {digest}\n"),
        (VerifiedSummary::DigestWithoutRanks(digest), DiagnosticFormat::Json) => {
            let line = serde_json::json!({
                "path": path, "verified": true, "ranks_compared": false, "digest": digest,
            });
            line.to_string() + "\n"
        }
        (VerifiedSummary::DigestWithoutRanks(digest), _) => {
            format!("{path}: each program verified alone, ranks not compared, digest {digest}\n")
        }
        (VerifiedSummary::CompileTraces(compared), DiagnosticFormat::Json) => {
            serde_json::json!({"path": path, "equal": true, "compared": compared}).to_string() + "\n"
        }
        (VerifiedSummary::CompileTraces(compared), _) => format!("{path}: {compared}\n"),
        (VerifiedSummary::Chart(measured), DiagnosticFormat::Json) => {
            serde_json::json!({"path": path, "measured": measured}).to_string() + "\n"
        }
        (VerifiedSummary::Chart(measured), _) => format!("{path}: {}\n", measured.join("; ")),
        (VerifiedSummary::Trace { ranks, launches, groups }, DiagnosticFormat::Json) => {
            let line = serde_json::json!({
                "path": path, "verified": true, "ranks": ranks, "collectives": launches, "groups": groups,
            });
            line.to_string() + "\n"
        }
        (VerifiedSummary::Trace { ranks, launches, groups }, _) => format!(
            "{path}: {}, {}, {}: no hang or mismatch in the trace\n",
            count_noun(*ranks, "rank"),
            count_noun(*launches, "collective"),
            count_noun(*groups, "group"),
        ),
    }
}

fn count_noun(n: usize, word: &str) -> String {
    format!("{n} {word}{}", if n == 1 { "" } else { "s" })
}
