//! `tessera check`: judges plans' folders and program files again.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use tessera::Plan;
use tessera::check::check_file;
use tessera_base::Format;

use crate::say::{DIAGNOSED, Outcome, diagnostics, out};

const EXAMPLES: &str = "\
Examples:
  tessera check my-plan
  tessera check filetests/check/pipeline.tir my-plan/programs/*.tir
  tessera check my-plan --format github        annotations in a workflow

A folder is a plan: it must be the one that was sealed. A file holds programs: each is judged alone, and all ranks
together where every rank has a program. Exit status 1 when anything is refused.";

/// Judge plans and programs: would the ranks wait for each other, drift, or run out of memory?
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folders of plans, and .tir files
    #[arg(required = true, value_name = "PATH")]
    pub paths: Vec<PathBuf>,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: CheckFormat,
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
    let mut status = 0;
    for path in &args.paths {
        match judge(path, args.format.into()) {
            Some(digest) => out(&verified(path, &digest, args.format))?,
            None => status = DIAGNOSED,
        }
    }
    Ok(status)
}

fn verified(path: &Path, digest: &str, format: CheckFormat) -> String {
    let path = path.display().to_string();
    match format {
        CheckFormat::Json => {
            serde_json::json!({"path": path, "verified": true, "digest": digest}).to_string() + "\n"
        }
        _ => format!("{path}: verified, digest {digest}\n"),
    }
}

/// The digest of what was verified; otherwise why not has been printed.
fn judge(path: &Path, format: Format) -> Option<String> {
    if path.is_dir() {
        let plan = Plan::read(path);
        let read = |at: &str| std::fs::read_to_string(at).ok();
        plan.map_err(|ds| diagnostics(&ds, format, &read)).ok().map(|p| p.sealed.digest_hex())
    } else {
        let checked = check_file(path);
        let name = path.display().to_string();
        diagnostics(&checked.diagnostics, format, &|at| (at == name).then(|| checked.source.clone()));
        if checked.verified() { checked.digest } else { None }
    }
}
