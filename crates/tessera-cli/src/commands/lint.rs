//! `tessera lint`: finds mistakes with collectives in Python sources.

use std::path::{Path, PathBuf};

use tessera_base::{Diagnostic, DiagnosticFormat};
use tessera_tools::lint::{LintSummary, lint_paths, read_source};

use crate::flags::named_values;
use crate::output::{
    CliError, CliResult, DIAGNOSTIC_FORMATS, EXIT_DIAGNOSTICS, print_diagnostics, write_stdout,
};

const EXAMPLES: &str = "\
Examples:
  tessera lint train.py model.py
  tessera lint src                          all files that end in .py, without hidden folders
  tessera lint src --format github          annotations for a GitHub workflow
  tessera explain T1435                     what a rule finds, with a bad and a good example

Rules: T1431 to T1444. A comment on the line of a finding suppresses one rule there: # tessera: ignore T1435. Names are resolved
within one file: a function that another file compiles is not known to be compiled.

Exit status: 0 nothing found, 1 something was found, also if it is a warning, 2 usage error.";

/// Find mistakes with collectives in PyTorch sources, without running them: a collective on one rank
/// only, a missing wait, a group or a side effect in compiled code
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Python files, and folders with them
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,

    /// Format of the findings and of the last line
    #[arg(long, value_parser = named_values(DIAGNOSTIC_FORMATS), default_value = "text")]
    pub format: DiagnosticFormat,
}

/// Lints the given files and folders.
pub fn run(args: &Args) -> CliResult {
    let summary = lint_paths(&args.paths).map_err(CliError::usage)?;
    print_diagnostics(&summary.findings, args.format, &|name| read_source(Path::new(name)).ok());
    write_stdout(&summary_line(&summary, args.format))?;
    Ok(if summary.findings.is_empty() { 0 } else { EXIT_DIAGNOSTICS })
}

fn summary_line(summary: &LintSummary, format: DiagnosticFormat) -> String {
    let errors = summary.findings.iter().filter(|d: &&Diagnostic| d.is_error()).count();
    let (files, warnings, suppressed) = (summary.files, summary.findings.len() - errors, summary.suppressed);
    if format == DiagnosticFormat::Json {
        let line = serde_json::json!({
            "files": files, "errors": errors, "warnings": warnings, "suppressed": suppressed,
            "omitted": summary.omitted, "certifies": false,
        });
        return line.to_string() + "\n";
    }
    let omitted = match summary.omitted {
        0 => String::new(),
        n => format!(", not shown: {n}"),
    };
    format!(
        "files: {files}, errors: {errors}, warnings: {warnings}{omitted}, suppressed by comments: {suppressed}. Lint finds known \
         mistakes and certifies nothing: a file without findings may still hang.\n"
    )
}
