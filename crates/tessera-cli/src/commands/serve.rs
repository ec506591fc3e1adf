//! `tessera serve`: one stream, a page that shows and steers it, and an interface for applications.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::files::read_text;
use tessera::program_command::ProgramCommand;
use tessera::stream_options::{DEFAULT_PROMPT, RunDevice, StreamOptions};
use tessera::terminal::print_stderr_line;
use tessera::{LoraFile, Model, Plan, WeightsBase, WeightsOrigin};
use tessera_base::{Diagnostic, DiagnosticFormat};
use tessera_serve::codes::T1609;
use tessera_serve::protocol::Pace;
use tessera_serve::{
    Access, AfterFailure, CollectorEndpoint, LoraChoice, ServeLimits, ServeOptions, ServedStream,
    ServerAddress, TraceOptions, serve,
};

use super::stream::{plan_conflict_error, read_sealed_plan};
use crate::flags::mapping::{MappingArgs, MappingUse};
use crate::flags::named_values;
use crate::flags::video::SentVideoArgs;
use crate::output::{CliError, CliResult, OutputFormat, print_diagnostics};
use crate::parse::{invalid_argument, parse_weights_base};
use crate::progress::{STOPPING_MESSAGE, stop_on_signals};

const EXAMPLES: &str = "\
Examples:
  tessera serve
  tessera serve models/demo --mesh tp=2 --listen 127.0.0.1:8000
  tessera serve models/wan2.1-1.3b --weights synthetic:1 --device cuda      without a checkpoint
  tessera serve --listen 0.0.0.0:8443 --token-file token --tls-cert chain.pem --tls-key key.pem
  tessera serve models/wan2.1-1.3b --preset stream-diffusion-v2 --video-in --device cuda      a client sends a video
  curl -X POST localhost:7860/api/v1/changes -H content-type:application/json -d '{\"change\":\"cut\"}'

Ctrl-C stops after the current chunk; a second Ctrl-C kills the ranks. `docs/guides/serve.md` describes the page, the socket and the
HTTP interface, and says how to run the server for other people.";

/// Variable with the token, which a file or a secret of a cluster may set.
const TOKEN_VARIABLE: &str = "TESSERA_SERVE_TOKEN";
/// Chunks that a restart generates again at most, unless the flag names a number.
const DEFAULT_REGENERATED: &str = "256";
/// Variables that name a collector of traces for any program. The first holds the whole address.
const TRACES_VARIABLE: &str = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT";
const COLLECTOR_VARIABLE: &str = "OTEL_EXPORTER_OTLP_ENDPOINT";
/// Variable that ignores those two.
const DISABLED_VARIABLE: &str = "OTEL_SDK_DISABLED";
/// Variable with the name of the service in its traces.
const SERVICE_VARIABLE: &str = "OTEL_SERVICE_NAME";
/// Name of the service without that variable.
const DEFAULT_SERVICE: &str = "tessera-serve";
/// File of a model folder with prompts that the page suggests, one per line.
const EXAMPLES_FILE: &str = "examples.txt";

/// Serve a stream to browsers and applications, and steer it while it runs
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Model folder
    #[arg(default_value = "models/demo")]
    pub model: PathBuf,

    /// Run the plan in this folder (from `tessera plan --out`) instead of making a new one
    #[arg(long, value_name = "DIR")]
    pub plan: Option<PathBuf>,

    #[command(flatten)]
    pub mapping: MappingArgs,

    /// Device that runs the plan
    #[arg(long, value_parser = named_values(DEVICES), default_value = "cpu")]
    pub device: RunDevice,

    /// Prompt of the first chunk
    #[arg(long, value_name = "TEXT", default_value = DEFAULT_PROMPT)]
    pub prompt: String,

    /// Random seed of the first chunk's noise
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Continue the session of this run folder: its chunks are generated again, and those that follow are shown
    #[arg(long, value_name = "DIR", conflicts_with_all = ["prompt", "seed"])]
    pub resume: Option<PathBuf>,

    /// Prompt that the page suggests; may be repeated [default: the lines of examples.txt in the model folder]
    #[arg(long, value_name = "TEXT")]
    pub example: Vec<String>,

    /// LoRA that the client in control may choose by this name; may be repeated
    #[arg(long, value_name = "NAME=FILE[:STRENGTH]")]
    pub lora: Vec<String>,

    #[command(flatten)]
    pub video: SentVideoArgs,

    /// Compute all weights from a seed instead of reading files
    #[arg(long, value_name = "synthetic:SEED")]
    pub weights: Option<String>,

    /// Address and port; port 0 lets the system choose
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "127.0.0.1:7860", help_heading = ACCESS_HEADING)]
    pub listen: SocketAddr,

    /// File with the token that every request states; needed unless the address is a loopback address. The variable
    /// TESSERA_SERVE_TOKEN may hold it instead
    #[arg(long, value_name = "FILE", help_heading = ACCESS_HEADING)]
    pub token_file: Option<PathBuf>,

    /// Name of this server besides its address; may be repeated
    #[arg(long, value_name = "NAME", help_heading = ACCESS_HEADING)]
    pub host: Vec<String>,

    /// Site whose pages may use this server, such as https://watch.example; may be repeated
    #[arg(long, value_name = "SITE", help_heading = ACCESS_HEADING)]
    pub origin: Vec<String>,

    /// Certificate chain, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_key", help_heading = ACCESS_HEADING)]
    pub tls_cert: Option<PathBuf>,

    /// Key of the certificate, as PEM
    #[arg(long, value_name = "FILE", requires = "tls_cert", help_heading = ACCESS_HEADING)]
    pub tls_key: Option<PathBuf>,

    /// Most clients with a socket
    #[arg(long, value_name = "N", default_value_t = ServeLimits::default().max_clients, help_heading = ACCESS_HEADING)]
    pub max_clients: usize,

    /// What paces the stream
    #[arg(long, value_parser = named_values(PACES), default_value = "model", help_heading = PACE_HEADING)]
    pub pace: Pace,

    /// Chunks that are requested ahead of the one that plays. More of them hide a slow chunk, and a prompt takes as much
    /// longer to appear
    #[arg(long, value_name = "N", default_value_t = 2, help_heading = PACE_HEADING)]
    pub lead: u32,

    /// Generate while nobody watches, too
    #[arg(long, help_heading = PACE_HEADING)]
    pub keep_running: bool,

    /// How often the stream starts again after failures in a row
    #[arg(long, value_name = "N", default_value_t = 3)]
    pub restarts: u32,

    /// Continue the scene bit for bit after a failure, for up to 256 chunks or the stated number. After more chunks, a new
    /// scene begins with the alarm T1614
    ///
    /// The ranks generate the chunks again that were shown, and the server shows those that follow. Without this flag,
    /// every failure begins a new scene.
    #[arg(long, value_name = "CHUNKS", num_args = 0..=1, require_equals = true,
          default_missing_value = DEFAULT_REGENERATED)]
    pub continue_after_failure: Option<u32>,

    /// Folder of the runs and of recordings; without it, both are temporary
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,

    /// Allow more ranks than CPU cores
    #[arg(long)]
    pub oversubscribe: bool,

    /// Print a line per chunk, change and client: as text or as JSON
    #[arg(long, value_parser = named_values(LOGS), default_value = "none")]
    pub log: LogFormat,

    /// Send traces to this OpenTelemetry collector, such as http://localhost:4318 [default:
    /// OTEL_EXPORTER_OTLP_ENDPOINT, if it is set]
    #[arg(long, value_name = "URL")]
    pub otlp: Option<String>,

    /// Format of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

const ACCESS_HEADING: &str = "Access";
const PACE_HEADING: &str = "Pace";

const DEVICES: &[(&str, RunDevice, &str)] = &[
    ("cpu", RunDevice::Cpu, "CPU cores of this machine"),
    ("cuda", RunDevice::Cuda, "NVIDIA GPUs of this machine, one per rank; `tessera doctor` lists them"),
];

const PACES: &[(&str, Pace, &str)] = &[
    ("model", Pace::Model, "The frame rate of the model: no chunk is generated long before it plays"),
    ("client", Pace::Client, "The client in control: as fast as it takes frames"),
    ("free", Pace::Free, "The ranks: as fast as they generate, for recordings; slow clients lose frames"),
];

/// Format of the lines about chunks, changes and clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogFormat {
    /// The server prints no such lines.
    None,
    /// A line of text for a person.
    Text,
    /// A JSON object for a program.
    Json,
}

const LOGS: &[(&str, LogFormat, &str)] = &[
    ("none", LogFormat::None, "No lines"),
    ("text", LogFormat::Text, "Lines for people"),
    ("json", LogFormat::Json, "A JSON object per line, with run, chunk, request, epoch and rank"),
];

/// Serves a stream until it is interrupted.
pub fn run(args: &Args, program: Result<ProgramCommand, Diagnostic>) -> CliResult {
    let options = ServeOptions {
        listen: args.listen,
        access: Access { token: read_token(args)?, hosts: args.host.clone(), origins: args.origin.clone() },
        tls: args.tls_cert.clone().zip(args.tls_key.clone()),
        limits: ServeLimits { max_clients: args.max_clients, ..ServeLimits::default() },
        pace: args.pace,
        lead: args.lead,
        keeps_running: args.keep_running,
        max_restarts: args.restarts,
        after_failure: match args.continue_after_failure {
            None => AfterFailure::NewScene,
            Some(max_chunks) => AfterFailure::Continue { max_chunks },
        },
        out: args.out.clone(),
        resume: args.resume.clone(),
        traces: read_trace_options(args)?,
        ..ServeOptions::default()
    };
    let wrong = options.check();
    if !wrong.is_empty() {
        return Err(CliError::from_usage_errors(wrong));
    }
    let loras = args.lora.iter().map(|text| parse_lora_choice(text)).collect::<Result<_, _>>();
    let loras = loras.map_err(CliError::usage)?;
    let (model, plan) = open_model_and_plan(args)?;
    let stream = ServedStream {
        examples: read_examples(args, &model.dir),
        loras,
        plan: Arc::new(plan),
        model,
        options: StreamOptions {
            prompt: args.prompt.clone(),
            seed: args.seed,
            video: args.video.to_input(),
            oversubscribe: args.oversubscribe,
            device: args.device,
            command: std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect(),
            ..StreamOptions::default()
        },
        argv: program?.to_argv(&["rank"]),
        explain: crate::explain_code,
        warn: match args.format {
            OutputFormat::Text => |d| print_warning(d, DiagnosticFormat::Text),
            OutputFormat::Json => |d| print_warning(d, DiagnosticFormat::Json),
        },
    };
    start_log(args.log);
    let token = if options.access.token.is_some() { "?token=TOKEN" } else { "" };
    let show_address = |at: &ServerAddress| {
        let scheme = if at.is_tls { "https" } else { "http" };
        print_stderr_line(&format!("serving {} at {scheme}://{}/{token}", args.model.display(), at.address));
        print_stderr_line(&format!("recordings go to {}; Ctrl-C stops", at.recordings.display()));
    };
    stop_on_signals(STOPPING_MESSAGE, |stop| serve(stream, options, stop, &mut |at| show_address(at)))?;
    Ok(0)
}

fn open_model_and_plan(args: &Args) -> Result<(Model, Plan), CliError> {
    let base = args.weights.as_deref().map_or(Ok(WeightsBase::Files), parse_weights_base);
    let base = base.map_err(CliError::usage)?;
    let (model, plan) = match &args.plan {
        None => {
            let mut mapping = args.mapping.clone();
            if args.video.to_input().is_some() {
                mapping.video_input.get_or_insert(true);
            }
            let planned = mapping
                .open_and_plan(Some(&args.model), None, args.device == RunDevice::Cuda)
                .map_err(CliError::into_usage_if_invalid)?;
            (planned.model, planned.plan)
        }
        Some(folder) => {
            if let Some(option) = args.mapping.given_flags(&MappingUse::ALL).first() {
                return Err(plan_conflict_error(option));
            }
            read_sealed_plan(folder, Some(&args.model))?
        }
    };
    Ok((model.with_weights(WeightsOrigin { base, loras: Vec::new() }), plan))
}

/// Parses a LoRA with the name by which clients choose it, such as `sketch=sketch.safetensors:0.8`.
fn parse_lora_choice(text: &str) -> Result<LoraChoice, Diagnostic> {
    let example = "--lora sketch=sketch.safetensors:0.8";
    let refuse = |why: &str| invalid_argument("--lora", text, why, example);
    let (name, file) = text.split_once('=').ok_or_else(|| refuse("no `=` after the name"))?;
    if name.trim().is_empty() {
        return Err(refuse("no name in front of `=`"));
    }
    let file = LoraFile::parse(file).map_err(refuse)?;
    Ok(LoraChoice { name: name.trim().to_string(), file })
}

/// Reads the token from its file or its variable.
fn read_token(args: &Args) -> Result<Option<String>, CliError> {
    let text = match &args.token_file {
        Some(path) => Some(read_text(path, &T1609).map_err(CliError::usage)?),
        None => std::env::var(TOKEN_VARIABLE).ok(),
    };
    Ok(text.map(|text| text.trim().to_string()).filter(|token| !token.is_empty()))
}

/// Returns where traces go. The flag goes before the variables, which an operator may set for all programs of a cluster.
fn read_trace_options(args: &Args) -> Result<Option<TraceOptions>, CliError> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
    let is_disabled = variable(DISABLED_VARIABLE).is_some_and(|value| value.eq_ignore_ascii_case("true"));
    let of_variable = |name: &'static str| variable(name).filter(|_| !is_disabled).map(|value| (name, value));
    let endpoint = if let Some(address) = &args.otlp {
        CollectorEndpoint::from_address(address)
    } else if let Some((name, address)) = of_variable(TRACES_VARIABLE) {
        CollectorEndpoint::from_traces_address(&address).map_err(|d| d.with_label("variable", name))
    } else if let Some((name, address)) = of_variable(COLLECTOR_VARIABLE) {
        CollectorEndpoint::from_address(&address).map_err(|d| d.with_label("variable", name))
    } else {
        return Ok(None);
    };
    let service = variable(SERVICE_VARIABLE).unwrap_or_else(|| DEFAULT_SERVICE.to_string());
    endpoint.map(|endpoint| Some(TraceOptions { endpoint, service })).map_err(CliError::usage)
}

fn print_warning(d: &Diagnostic, format: DiagnosticFormat) {
    print_diagnostics(std::slice::from_ref(d), format, &|_| None);
}

/// Returns the prompts that the page suggests.
fn read_examples(args: &Args, model: &Path) -> Vec<String> {
    if !args.example.is_empty() {
        return args.example.clone();
    }
    // Suggestions are no part of the model, so a folder without a readable file has no suggestions.
    let text = read_text(&model.join(EXAMPLES_FILE), &T1609).unwrap_or_default();
    text.lines().map(str::trim).filter(|line| !line.is_empty()).map(str::to_string).collect()
}

fn start_log(format: LogFormat) {
    let lines = || tracing_subscriber::fmt().with_writer(std::io::stderr);
    match format {
        LogFormat::None => {}
        LogFormat::Text => lines().init(),
        LogFormat::Json => lines().json().flatten_event(true).init(),
    }
}
