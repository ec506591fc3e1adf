//! `tessera wire`: decodes the messages that a run wrote with `--wire-dump`.

use std::path::PathBuf;

use tessera::files;
use tessera_base::Diagnostic;
use tessera_tools::codes::T0062;
use tessera_tools::wire_dump::decode_frames;

use crate::output::{CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, print_diagnostics, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera stream models/demo --wire-dump --out run
  tessera wire dump run/wire/rank-0.bin                  header, meta and tensors of each frame, with byte offsets
  tessera wire dump run/wire/rank-0.bin --format json    one JSON line per frame, with every field of the meta

Exit status: 0 every frame decodes, 1 one does not, 2 the file cannot be read.";

/// Decode a file of captured messages into header, meta and tensors
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, clap::Subcommand)]
enum Action {
    /// Print each frame of a file with its byte offsets
    Dump {
        /// File of frames, such as RUN/wire/rank-0.bin
        #[arg(value_name = "FILE")]
        file: PathBuf,

        /// Format of the frames and of diagnostics
        #[arg(long, value_enum, default_value_t)]
        format: OutputFormat,
    },
}

impl Args {
    /// Returns the format of the frames and of diagnostics.
    pub fn format(&self) -> OutputFormat {
        let Action::Dump { format, .. } = &self.action;
        *format
    }
}

/// Prints the frames of a file.
pub fn run(args: &Args) -> CliResult {
    let Action::Dump { file, format } = &args.action;
    let bytes = files::read_file(file, u64::MAX).map_err(|why| {
        CliError::usage(
            Diagnostic::error(&T0062, format!("{} cannot be read", file.display()))
                .with_label(file.display().to_string(), why.to_string())
                .with_hint(
                    "name a file that `tessera stream --wire-dump` wrote, such as RUN/wire/rank-0.bin",
                ),
        )
    })?;
    let (frames, broken) = decode_frames(&bytes);
    let text: String = frames
        .iter()
        .map(|frame| match format {
            OutputFormat::Text => frame.to_text(),
            OutputFormat::Json => format!("{}\n", frame.to_json()),
        })
        .collect();
    write_stdout(&text)?;
    let Some(broken) = broken else { return Ok(0) };
    print_diagnostics(&[broken], (*format).into(), &|_| None);
    Ok(EXIT_DIAGNOSTICS)
}
