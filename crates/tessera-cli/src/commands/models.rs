//! `tessera models`: describes a model folder or a checkpoint as it was published.

use std::path::PathBuf;

use tessera::checkpoint_report::{CheckpointReport, PartReport};
use tessera_base::Bytes;

use crate::output::{
    CliResult, EXIT_DIAGNOSTICS, OutputFormat, format_pairs, format_table, print_diagnostics, write_stdout,
};

const EXAMPLES: &str = "\
Examples:
  tessera models inspect models/demo
  tessera models inspect checkpoints/self_forcing_dmd.pt       one checkpoint; finds VAE and text encoder beside it
  tessera models inspect Wan2.1-T2V-1.3B --json | jq .parts

Exit status: 0 a stream can run, 1 something is missing or does not fit, 2 the path does not exist.";

/// Describe a model folder or a checkpoint: its parts, what is missing, and which preset fits
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Describe the files of a folder or of one checkpoint, and the command to run next
    Inspect {
        /// Folder or checkpoint, as it was downloaded
        #[arg(value_name = "FOLDER")]
        path: PathBuf,

        /// Print the report as JSON; the same as --format json
        #[arg(long)]
        json: bool,

        /// Format of the report and of diagnostics
        #[arg(long, value_enum, default_value_t)]
        format: OutputFormat,
    },
}

impl Args {
    /// Returns the format of the report and of diagnostics.
    pub fn format(&self) -> OutputFormat {
        let Action::Inspect { json, format, .. } = &self.action;
        if *json { OutputFormat::Json } else { *format }
    }
}

/// Prints a report on a folder.
pub fn run(args: &Args) -> CliResult {
    let Action::Inspect { path, .. } = &args.action;
    let report = CheckpointReport::inspect(path).map_err(crate::output::CliError::usage)?;
    match args.format() {
        // The report holds the problems, so that its reader gets one object.
        OutputFormat::Json => write_stdout(&(serde_json::to_string(&report).unwrap_or_default() + "\n"))?,
        OutputFormat::Text => {
            write_stdout(&render(&report))?;
            print_diagnostics(&report.problems, OutputFormat::Text.into(), &|_| None);
        }
    }
    Ok(if report.problems.is_empty() { 0 } else { EXIT_DIAGNOSTICS })
}

fn render(report: &CheckpointReport) -> String {
    let mut facts = vec![("path", report.path.clone()), ("is", report.form.to_string())];
    if let Some(g) = &report.generator {
        let millions = g.parameters / 1_000_000;
        let text = format!(
            "{} blocks of width {}, {} heads, {millions} million parameters",
            g.layers, g.dim, g.heads
        );
        facts.push(("generator", text));
    }
    facts.extend(report.settings.as_ref().map(|settings| ("settings", settings.clone())));
    if !report.missing.is_empty() {
        facts.push(("missing", report.missing.join(", ")));
    }
    if !report.incomplete.is_empty() {
        facts.push(("incomplete", report.incomplete.join(", ")));
    }
    let mut text = format_pairs(facts);
    if !report.parts.is_empty() {
        let heading = ["part", "form", "files", "bytes", "tensors", "dtypes", "names", "source"];
        let rows = std::iter::once(heading.map(String::from)).chain(report.parts.iter().map(render_part));
        text += "\n";
        text += &format_table(rows, [false, false, true, true, true, false, false, false]);
    }
    if !report.presets.is_empty() {
        text += "\npresets for a generator of this size:\n";
        text += &format_pairs(report.presets.iter().map(|p| (p.name, p.description)));
    }
    if let Some(command) = &report.next_command {
        text += &format!("\nnext: {command}\n");
    }
    text
}

fn render_part(part: &PartReport) -> [String; 8] {
    let dtypes: Vec<String> = part.dtypes.keys().cloned().collect();
    let names = match (part.naming, part.prefix.as_str()) {
        (None, _) => "-".to_string(),
        (Some(naming), "") => naming.to_string(),
        (Some(naming), prefix) => format!("{naming} after {prefix}"),
    };
    [
        part.part.to_string(),
        part.form.to_string(),
        part.files.to_string(),
        Bytes(part.bytes).to_string(),
        part.tensors.to_string(),
        if dtypes.is_empty() { "-".to_string() } else { dtypes.join(" ") },
        names,
        part.source.clone(),
    ]
}
