//! `tessera generate`: continues texts with a language model.

mod prompts;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use serde_json::json;
use tessera::faults::DrillConfig;
use tessera::files::RunFolder;
use tessera::generate::{
    CallTimes, ExpertLoadRow, GenerateEvent, GenerateOptions, GenerateReport, GeneratedText, LanguagePlace,
    LanguagePlan, ShownText, TextExtents, TextModel, describe_expert_load, finish_name, read_expert_load,
    write_run_outputs,
};
use tessera::gpus::GpuDiscovery;
use tessera::opened_run::EstimateComparison;
use tessera::program_command::ProgramCommand;
use tessera::stream_options::RunDevice;
use tessera::terminal::print_stderr_line;
use tessera::{DtypePolicy, Mapping, WeightsBase};
use tessera_base::Diagnostic;
use tessera_estimate::{CPU_HOST, load_machine};
use tessera_tools::bench::machine_for;

use crate::flags::mapping::{DTYPES, read_mapping_or_mesh, require_axes};
use crate::flags::named_values;
use crate::output::{CliError, CliResult, OutputFormat, print_diagnostics, print_failure, write_stdout};
use crate::parse::{invalid_argument, parse_weights_base};
use crate::progress::stop_on_signals;

use prompts::read_prompts;
pub(super) use prompts::{encode_prompt, parse_ids};

const EXAMPLES: &str = "\
Examples:
  tessera generate models/tales --prompt 'The red circle' --max-tokens 120      a small model of the repository
  tessera generate Qwen3-8B --mesh tp=2 --prompt 'The sea is' --max-tokens 200 --temperature 0.7 --seed 1
  tessera generate Qwen3-8B --chat --system 'Be brief.' --prompt 'Why is the sky blue?'
  tessera generate Qwen3-8B --prompt 'One.' --prompt 'Two.'                     several texts at once
  tessera generate Qwen3-8B --prompts prompts.jsonl                             a JSON object per line, with its kind of text
  tessera generate fixtures/lm/llama --prompt-ids 17,4,99 --max-tokens 8        ids in place of text

The folder is one of Hugging Face: config.json, safetensors, tokenizer.json. Models of Llama, Mistral, Mixtral, Qwen2,
Qwen3, Qwen3-MoE and DeepSeek-V3 run, with a process for each rank. The text goes to standard output as it is
generated, and the speed to standard error. With --out the folder holds text.jsonl, record.jsonl, trace.json for
ui.perfetto.dev, report.html, and comparison.json with the estimate beside the measured times of each class of ops.
`tessera doctor DIR` and `tessera autopsy DIR` read it.

Exit status: 0 success, 1 the model or a text was rejected, 2 usage error, 130 interrupted, 10-29 a rank failed.";

/// Values of `--device`, each with its help text.
const DEVICES: &[(&str, RunDevice, &str)] = &[
    ("cpu", RunDevice::Cpu, "Processes of this machine"),
    ("cuda", RunDevice::Cuda, "NVIDIA GPUs of this machine, one per rank"),
];

/// Continue texts with a language model
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES, allow_negative_numbers = true)]
pub struct Args {
    /// Folder of the model
    #[arg(value_name = "FOLDER")]
    model: PathBuf,

    /// Text to continue; may be repeated
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_ids", "prompts"])]
    prompt: Vec<String>,

    /// JSON lines with the texts to continue, each {"prompt": TEXT} or {"prompt_ids": [ID, ...]}, and if wanted "kind":
    /// a label of your own such as code or chat. Calls read prompts of one kind only
    #[arg(long, value_name = "FILE", conflicts_with_all = ["prompt", "prompt_ids"])]
    prompts: Option<PathBuf>,

    /// Write each prompt as the message of a user, with the model's chat template
    #[arg(long, conflicts_with = "prompt_ids")]
    chat: bool,

    /// Message of the system before the prompt
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,

    /// Ids to continue, for a folder without a tokenizer; may be repeated
    #[arg(long, value_name = "LIST", conflicts_with = "prompt")]
    prompt_ids: Vec<String>,

    /// Largest number of ids to generate per text
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    max_tokens: u32,

    /// Divisor of the logits: 0 takes the likeliest id, and larger values make unlikely ids more frequent
    #[arg(long, value_name = "T", default_value_t = 0.0)]
    temperature: f32,

    /// Choose among the N likeliest ids; 0 for all
    #[arg(long, value_name = "N", default_value_t = 0)]
    top_k: u32,

    /// Choose among the likeliest ids that have this probability together
    #[arg(long, value_name = "P", default_value_t = 1.0)]
    top_p: f32,

    /// Seed of the choices, below 2^24; equal seeds give equal texts on every mesh
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u32,

    /// Mesh axes and their sizes: tp shards each block, ep shares the experts, pp splits the blocks into stages
    #[arg(long, value_name = "MESH", value_parser = require_axes, default_value = "tp=1")]
    mesh: String,

    /// Mapping file in place of --mesh, such as one with a table [experts]
    #[arg(long, value_name = "FILE", conflicts_with = "mesh")]
    mapping: Option<PathBuf>,

    /// Device of the ranks
    #[arg(long, value_parser = named_values(DEVICES), default_value = "cpu")]
    device: RunDevice,

    /// Compute dtype of matmuls and of the activations that they produce [default: that of the mapping, or f32]
    #[arg(long, value_parser = named_values(DTYPES))]
    dtype: Option<DtypePolicy>,

    /// Draw the weights from a seed instead of reading them, for a measurement without a checkpoint
    #[arg(long, value_name = "synthetic:SEED")]
    weights: Option<String>,

    /// Threads of each rank [default: the cores of this host, divided among the ranks]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    threads: Option<u16>,

    /// Folder for the texts, the report, the trace, the plan and the records of the run [default: none, unless the run
    /// fails]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,

    /// Cluster of the estimate beside the run: a name of the catalog, or a cluster.toml of `tessera measure --out`
    /// [default: laptop for CPUs, and the entry with this host's GPUs]
    #[arg(long, value_name = "NAME|FILE")]
    cluster: Option<String>,

    /// Executor profile of the estimate: a name of the catalog, or a profile.toml of `tessera measure --out`
    #[arg(long, value_name = "NAME|FILE")]
    profile: Option<String>,

    /// Allow more ranks than this host has cores
    #[arg(long)]
    oversubscribe: bool,

    /// Write the messages that each rank sends to the folder of the run
    #[arg(long, requires = "out")]
    wire_dump: bool,

    /// Arm a fault, for `tessera drill`
    #[arg(long, hide = true, value_parser = DrillConfig::from_armed_text)]
    arm_fault: Option<DrillConfig>,

    /// Ids of a prompt that one call reads
    #[arg(long, value_name = "N", default_value_t = 64, value_parser = clap::value_parser!(u16).range(1..=4096))]
    prompt_rows: u16,

    /// Most prompts that calls read together, a part of each; prompts of one kind and of like length share calls
    /// [default: as many as fill 64 rows]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=4096))]
    prompts_per_call: Option<u64>,

    /// Most ids of each text that one call decodes; the ids appear together [default: 8 on GPUs, 1 on CPUs]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=64))]
    ids_per_call: Option<u64>,

    /// Format of the texts and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Generates the texts and prints them.
pub fn run(args: &Args, program: Result<ProgramCommand, Diagnostic>) -> CliResult {
    check_sampling(args)?;
    let model = TextModel::open(&args.model)?;
    if model.decoder.prediction_layers > 0 {
        print_stderr_line(&format!(
            "left out: what predicts further tokens ({} behind layer {})",
            model.decoder.prediction_layers,
            model.decoder.extents.layers - 1
        ));
    }
    let prompts = read_prompts(args, &model)?;
    let base = match &args.weights {
        None => WeightsBase::Files,
        Some(text) => parse_weights_base(text).map_err(CliError::usage)?,
    };
    let mapping = read_run_mapping(args)?;
    let extents = TextExtents {
        max_ids: u64::from(args.max_tokens),
        prompt_rows: u64::from(args.prompt_rows),
        prompts_per_call: args.prompts_per_call,
        ids_per_call: args.ids_per_call,
    };
    let ids: Vec<Vec<u32>> = prompts.requests.iter().map(|request| request.prompt.clone()).collect();
    let settings = extents.choose_settings(&ids, args.device);
    let plan = Arc::new(LanguagePlan::new(&model.decoder, &mapping, settings)?);
    print_stderr_line(&format!(
        "plan {}: mesh {}, positions: {} in pages of {}",
        plan.sealed.digest_hex().get(..12).unwrap_or_default(),
        plan.sealed.mesh(),
        settings.positions,
        plan.cache.page_rows,
    ));
    // A run whose folder is removed shows no estimate, but a mistake in the options of one ends any run at its start.
    let names_machine = args.cluster.is_some() || args.profile.is_some();
    let estimate = (args.out.is_some() || names_machine).then(|| estimate_calls(args, &plan)).transpose()?;
    let run_folder = RunFolder::new(args.out.as_deref(), "tessera-generate")?;
    let options = GenerateOptions {
        weights: LanguagePlace { dir: args.model.clone(), base },
        device: args.device,
        requests: prompts.requests,
        prompts: prompts.shown,
        out: run_folder.path().to_path_buf(),
        threads: args.threads.map(usize::from),
        oversubscribe: args.oversubscribe,
        wire_dump: args.wire_dump,
        drill: args.arm_fault.clone(),
        command: std::env::args_os().map(|a| a.to_string_lossy().into_owned()).collect(),
    };
    let (report, texts) = run_ranks(&model, &plan, (&options, &program?), args.format)?;
    let written = write_outputs(args, (&plan, &options), (&report, &texts), estimate);
    let ((comparison, experts), error) = match written {
        Ok(measured) => (measured, None),
        Err(e) => ((None, Vec::new()), Some(e)),
    };
    print_texts((&plan, &report), &texts, (comparison.as_ref(), &experts), args.format)?;
    if let Some(e) = error {
        return Err(e);
    }
    run_folder.close(report.failure.is_some());
    if let Some(failure) = &report.failure {
        print_failure(failure);
        print_stderr_line(&format!("the run is in {}", options.out.display()));
    }
    print_stderr_line(&format!(
        "prompts: {}; texts: {}",
        describe_speed(report.prefill),
        describe_speed(report.decode)
    ));
    if let Some(load) = describe_expert_load(&experts) {
        print_stderr_line(&load);
    }
    Ok(report.exit_code)
}

/// Returns the mapping of the run. Warns where several of its keys count the same distance.
fn read_run_mapping(args: &Args) -> Result<Mapping, CliError> {
    let mapping = read_mapping_or_mesh(args.mapping.as_deref(), &args.mesh)?;
    let stacked: Vec<Diagnostic> = mapping.find_stacked_biases().into_iter().collect();
    print_diagnostics(&stacked, args.format.into(), &|_| None);
    Ok(Mapping { dtype: args.dtype.unwrap_or(mapping.dtype), ..mapping })
}

/// Estimates the calls of a plan on the machine that the user named, or on the usual one of the device.
fn estimate_calls(args: &Args, plan: &LanguagePlan) -> Result<EstimateComparison, CliError> {
    let (cluster, profile) = (args.cluster.as_deref(), args.profile.as_deref());
    let ranks = plan.sealed.mesh().world_size();
    let machine = match args.device {
        RunDevice::Cuda => machine_for(&GpuDiscovery::discover(), cluster, profile, ranks)?,
        RunDevice::Cpu | RunDevice::Sim => {
            Ok(load_machine(cluster.unwrap_or(CPU_HOST), profile, Some(ranks))?)
        }
    };
    Ok(match machine {
        Ok(machine) => plan.estimate_calls(&machine)?,
        Err(why) => plan.calls_without_estimate(&why),
    })
}

/// Reads the load of experts and, if the folder of the run stays, writes the estimate beside the run, the trace and the
/// report. A run that failed has its own cause to show, and may lack what these need.
fn write_outputs(
    args: &Args,
    (plan, options): (&LanguagePlan, &GenerateOptions),
    (report, texts): (&GenerateReport, &[ShownText]),
    estimate: Option<EstimateComparison>,
) -> Result<(Option<EstimateComparison>, Vec<ExpertLoadRow>), CliError> {
    let write = || -> Result<_, CliError> {
        let experts = match read_expert_load(plan, &options.out) {
            // A run that ended early may have counted nothing.
            Err(_) if report.failure.is_some() || report.interrupted => Vec::new(),
            read => read?,
        };
        if args.out.is_none() && report.failure.is_none() {
            return Ok((None, experts));
        }
        let estimate = estimate.map_or_else(|| estimate_calls(args, plan), Ok)?;
        let comparison = write_run_outputs(plan, &options.out, (texts, &experts), estimate)?;
        Ok((Some(comparison), experts))
    };
    write().or_else(|e| if report.failure.is_some() { Ok((None, Vec::new())) } else { Err(e) })
}

/// Runs the ranks. A single text is printed as it is generated. Returns the report, and the texts in words.
fn run_ranks(
    model: &TextModel,
    plan: &Arc<LanguagePlan>,
    (options, program): (&GenerateOptions, &ProgramCommand),
    format: OutputFormat,
) -> Result<(GenerateReport, Vec<ShownText>), CliError> {
    // Several texts at once would mix, so they are printed when they have ended.
    let streams = options.requests.len() == 1 && format == OutputFormat::Text;
    let mut show_next = model.show_one_by_one();
    let mut printed = Ok(());
    let rank = program.to_argv(&["rank"]);
    let report = stop_on_signals("stopping after this call", |interrupt| {
        tessera::generate::run(plan, options, rank, interrupt, &mut |event| {
            if let GenerateEvent::Id(event) = event
                && streams
                && printed.is_ok()
            {
                printed = show_next(event.id).and_then(|text| write_stdout(&text));
            }
        })
    })?;
    printed?;
    if streams {
        write_stdout("\n")?;
    }
    let shown = options.prompts.iter().zip(&options.requests).zip(&report.texts);
    let texts: Result<Vec<ShownText>, Diagnostic> = shown
        .map(|((prompt, request), generated)| {
            Ok(ShownText {
                prompt: prompt.clone(),
                kind: request.kind.clone(),
                prompt_ids: request.prompt.len() as u64,
                text: model.show_ids(&generated.ids)?,
                are_ids: model.tokenizer.is_none(),
                generated: generated.clone(),
            })
        })
        .collect();
    Ok((report, texts?))
}

/// Prints the texts that were not printed while they were generated.
fn print_texts(
    run: (&LanguagePlan, &GenerateReport),
    texts: &[ShownText],
    measured: (Option<&EstimateComparison>, &[ExpertLoadRow]),
    format: OutputFormat,
) -> Result<(), CliError> {
    match format {
        OutputFormat::Json => write_stdout(&format!("{}\n", describe_texts(run, texts, measured)))?,
        OutputFormat::Text if texts.len() == 1 => {}
        OutputFormat::Text => {
            for (i, text) in texts.iter().enumerate() {
                write_stdout(&format!("{}: {}\n", i + 1, text.text))?;
            }
        }
    }
    Ok(())
}

fn check_sampling(args: &Args) -> Result<(), CliError> {
    let reject = |option: &str, value: f32, why: &str, example: &str| {
        Err(CliError::usage(invalid_argument(option, &value.to_string(), why, example)))
    };
    if !args.temperature.is_finite() || args.temperature < 0.0 {
        return reject("--temperature", args.temperature, "it is not a number from 0", "0.7");
    }
    if !(args.top_p > 0.0 && args.top_p <= 1.0) {
        return reject("--top-p", args.top_p, "it is not a probability above 0", "0.95");
    }
    Ok(())
}

fn describe_texts(
    (plan, report): (&LanguagePlan, &GenerateReport),
    texts: &[ShownText],
    (comparison, experts): (Option<&EstimateComparison>, &[ExpertLoadRow]),
) -> serde_json::Value {
    let describe = |text: &ShownText| {
        let GeneratedText { ids, finish } = &text.generated;
        json!({"text": text.text, "kind": text.kind, "ids": ids, "finish": finish_name(*finish)})
    };
    let speed = |t: CallTimes| json!({"calls": t.calls, "ids": t.rows, "seconds": t.time.as_secs_f64()});
    json!({
        "plan": plan.sealed.digest_hex(),
        "texts": texts.iter().map(describe).collect::<Vec<_>>(),
        "prompts": speed(report.prefill),
        "decode": speed(report.decode),
        "estimate": comparison,
        "experts": experts,
    })
}

fn describe_speed(times: CallTimes) -> String {
    let seconds = times.time.max(Duration::from_nanos(1)).as_secs_f64();
    format!("{} ids in {seconds:.2} s, {:.1} per second", times.rows, times.rows as f64 / seconds)
}
