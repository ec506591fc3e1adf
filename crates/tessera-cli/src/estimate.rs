//! `tessera plan --cluster`, `--model` and `--recipe`: the mapping search, which estimates mappings
//! on a cluster.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use tessera::search::{
    DEFAULT_HOST, DEFAULT_RACK, EstimateReport, JobKind, LanguageQuery, MachineModel, ModelSource,
    VideoQuery, explain_language, explain_video, job_with_defaults, load_machine, load_thresholds,
    search_language, search_video, video_pins,
};
use tessera::{Model, Overrides, Plan, plan};
use tessera_base::{Diagnostic, Nanoseconds};

use crate::options::{CacheArg, MappingArgs, T0031};
use crate::output::{CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, write_stdout};
use crate::parse;
use crate::progress::SearchProgress;

/// The options of the mapping search.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Mapping search")]
pub struct SearchArgs {
    /// Cluster to estimate on: a catalog name (gb200-nvl72, hgx-h200, laptop, …) or a TOML file
    /// that `tessera measure` wrote [default: gb200-nvl72 with --model or --recipe, else hgx-h200]
    ///
    /// `tessera plan` then searches for the best mapping on this cluster. Axes given by --mesh stay
    /// fixed.
    #[arg(long, value_name = "NAME|FILE")]
    pub cluster: Option<String>,

    /// Language model of the zoo, such as deepseek-v3, instead of a model folder
    #[arg(long = "model", value_name = "NAME")]
    pub zoo: Option<String>,

    /// Preset of model, workload and mapping from the 72-GPU guide: A, B, C, sr-moe, long-context
    /// or throughput-training
    ///
    /// A trains an attention-heavy MoE model (tp=12,ep=6), B runs prefill of an expert-heavy one
    /// (tp=8,ep=9), C trains with pipeline stages (tp=8,ep=6,pp=3, which needs 144 GPUs).
    #[arg(long, value_name = "NAME")]
    pub recipe: Option<String>,

    /// Executor profile, a runtime's efficiency curves: a name (torch-2.11, tessera, megatron,
    /// ideal) or a TOML file [default: the cluster's own]
    #[arg(long, value_name = "NAME|FILE")]
    pub profile: Option<String>,

    /// Number of devices to use; more than one rack has means several racks [default: all devices
    /// of the cluster]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    pub devices: Option<u32>,

    /// Workload of a language model [default: decode, or the recipe's]
    #[arg(long)]
    pub job: Option<JobArg>,

    /// Sequences per step, over all replicas
    #[arg(long, value_name = "N", requires = "job", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub batch: Option<u64>,

    /// Tokens per sequence; with --job decode, the tokens that its KV cache already holds
    #[arg(long, value_name = "N", requires = "job", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    pub sequence: Option<u64>,

    /// Goal of the search: throughput, latency, memory, or a deadline per step or chunk such as
    /// deadline=40ms
    #[arg(long, value_name = "GOAL")]
    pub objective: Option<String>,

    /// Fix knobs of the mapping, for example tp=8,scheme=ulysses; the search chooses the others
    ///
    /// Knobs of a language model: tp, ep, pp, dp, expert_tp, scheme, ring, schedule, interleave,
    /// micro_batch, recompute, optimizer, experts_at, cache_at, precision, wire, capacity_pct,
    /// window. Knobs of a video model: tp, pp, strategy, overlap_chunks, topology, decode,
    /// max_outstanding. An invalid value is rejected with the list of
    /// valid ones.
    #[arg(long, value_name = "KNOB=VALUE,…")]
    pub pin: Option<String>,

    /// Explain one mapping, given as knobs like those of --pin: why it is rejected, or what it
    /// costs compared with the best one
    #[arg(long, value_name = "KNOB=VALUE,…")]
    pub why: Option<String>,

    /// Assumed distribution of tokens over experts: balanced, random, power:ALPHA, or w0 to w7
    /// [default: random]
    ///
    /// balanced and w0 give every expert the same load. random picks experts uniformly, so that
    /// loads vary. power:1.2 is a power law with exponent 1.2 (any number above 0, at most 5). w1
    /// to w7 are imbalanced workloads: hot experts (w1, w3), a hot rank (w2, w6), uneven tokens per
    /// rank (w4), a rank without load (w5), bursts (w7).
    #[arg(long, value_name = "ROUTING")]
    pub routing: Option<String>,

    /// Share of the experts in host memory that a predictor prefetches one layer ahead, 0 to 1
    /// [default: 0]
    #[arg(long, value_name = "FRACTION", allow_negative_numbers = true)]
    pub prefetch_hit_rate: Option<f64>,

    /// Reject meshes that shard heads, experts or sequences unevenly; by default, ranks may differ
    /// by one of them
    #[arg(long)]
    pub strict: bool,

    /// TOML file with limits of the gates, the pass/warn/fail checks of a report; it overrides any
    /// part of the defaults in crates/tessera-plan/gates.toml
    #[arg(long, value_name = "FILE")]
    pub gates: Option<PathBuf>,

    /// Time to decode one chunk on one device, in milliseconds, for a video model without its own
    /// decoder
    #[arg(long, value_name = "MS")]
    pub decode_ms: Option<String>,

    /// Time to encode the anchor of a chunk on one device, in milliseconds, for a video model
    /// without its own encoder
    ///
    /// The anchor exists with --cache recompute only: the context of each chunk then begins with a
    /// frame of the previous chunk that is decoded and encoded again.
    #[arg(long, value_name = "MS")]
    pub encode_ms: Option<String>,

    /// Decode and encode each chunk on one rank; by default the search may split this work over
    /// ranks
    #[arg(long)]
    pub whole_decode: bool,
}

/// The values of `--job`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum JobArg {
    /// Training steps
    Train,
    /// Prompt processing up to the first token
    Prefill,
    /// Generation of one token per sequence
    Decode,
}

/// Maximum number of devices for a video model: the search simulates a call of every mesh.
const MAX_VIDEO_DEVICES: u32 = 1024;

impl SearchArgs {
    /// Returns whether any option requests a mapping search.
    pub fn is_requested(&self) -> bool {
        self.cluster.is_some()
            || self.zoo.is_some()
            || self.recipe.is_some()
            || self.profile.is_some()
            || self.why.is_some()
            || self.pin.is_some()
            || self.devices.is_some()
            || self.objective.is_some()
            || self.video_options().iter().chain(&self.language_options()).any(|(_, given)| *given)
    }

    /// Searches the mappings of the chosen model on the cluster and prints the estimates.
    pub fn run(
        &self,
        dir: Option<&Path>,
        planning: &MappingArgs,
        folder: Option<&Path>,
        format: OutputFormat,
    ) -> CliResult {
        if folder.is_some() && self.why.is_some() {
            return Err(usage_error("--why prints an explanation and writes no folder", "leave out --out"));
        }
        if self.why.as_ref().is_some_and(|why| why.split([',', ' ']).all(str::is_empty)) {
            return Err(usage_error(
                "--why needs at least one knob",
                "give some knobs, for example --why tp=8,pp=1",
            ));
        }
        if dir.is_some() && (self.recipe.is_some() || self.zoo.is_some()) {
            return Err(several_models_error());
        }
        let default_cluster =
            if self.recipe.is_some() || self.zoo.is_some() { DEFAULT_RACK } else { DEFAULT_HOST };
        let machine = load_machine(
            self.cluster.as_deref().unwrap_or(default_cluster),
            self.profile.as_deref(),
            self.devices,
        )?;
        // A mesh on the command line acts as a pin.
        let pins = merge_pins(&[planning.mesh.clone(), self.pin.clone()])?;
        if let Some(dir) = dir.filter(|d| d.join("stream.toml").exists()) {
            return self.search_video(dir, planning, machine, &pins, folder, format);
        }
        let subject = match (&self.recipe, &self.zoo, dir) {
            (Some(recipe), None, None) => ModelSource::Recipe(recipe.clone()),
            (None, Some(name), None) => ModelSource::Zoo(name.clone()),
            (None, None, Some(dir)) if dir.is_dir() => ModelSource::Config(dir.join("config.json")),
            (None, None, Some(file)) => ModelSource::Config(file.to_path_buf()),
            (None, None, None) => return Err(no_model_error()),
            _ => return Err(several_models_error()),
        };
        self.reject_unused("a language model", &self.video_options())?;
        self.reject_unused("a language model", &planning.stream_options())?;
        let query = self.build_query(subject, machine, &pins)?;
        if let Some(why) = &self.why {
            return print_explanation(
                explain_language(&query, &tessera::search::parse_language_pins(why)?)?,
                format,
            );
        }
        let sheet = search_language(&query)?;
        if let Some(folder) = folder {
            sheet.write(folder)?;
        }
        print_report(&sheet, folder, format, None)
    }

    /// Builds the query about a zoo model or a recipe.
    pub fn named_query(&self) -> Result<LanguageQuery, CliError> {
        let subject = match (&self.recipe, &self.zoo) {
            (Some(recipe), None) => ModelSource::Recipe(recipe.clone()),
            (None, Some(name)) => ModelSource::Zoo(name.clone()),
            (None, None) => return Err(no_model_error()),
            (Some(_), Some(_)) => return Err(several_models_error()),
        };
        let cluster = self.cluster.as_deref().unwrap_or(DEFAULT_RACK);
        let machine = load_machine(cluster, self.profile.as_deref(), self.devices)?;
        self.build_query(subject, machine, self.pin.as_deref().unwrap_or_default())
    }

    fn build_query(
        &self,
        subject: ModelSource,
        machine: MachineModel,
        pins: &str,
    ) -> Result<LanguageQuery, CliError> {
        let kind = self.job.map(JobKind::from);
        Ok(LanguageQuery {
            job: kind.map(|k| job_with_defaults(k, self.batch, self.sequence, &machine, self.devices)),
            model_source: subject,
            machine,
            devices: self.devices,
            objective: self.objective.as_deref().map(parse_objective).transpose()?,
            pins: tessera::search::parse_language_pins(pins)?,
            routing: self.routing.as_deref().map(parse_routing).transpose()?,
            prefetch_hit_rate: self.prefetch_hit_rate,
            strict: self.strict,
            limits: load_thresholds(self.gates.as_deref())?,
            command: command_line(),
        })
    }

    /// Returns the options that apply to video models only, and whether each was given.
    fn video_options(&self) -> [(&'static str, bool); 3] {
        [
            ("--decode-ms", self.decode_ms.is_some()),
            ("--encode-ms", self.encode_ms.is_some()),
            ("--whole-decode", self.whole_decode),
        ]
    }

    /// Returns the options that apply to language models only, and whether each was given.
    fn language_options(&self) -> [(&'static str, bool); 5] {
        [
            ("--job", self.job.is_some()),
            ("--routing", self.routing.is_some()),
            ("--prefetch-hit-rate", self.prefetch_hit_rate.is_some()),
            ("--strict", self.strict),
            ("--gates", self.gates.is_some()),
        ]
    }

    /// Rejects options that would have no effect.
    fn reject_unused(&self, subject: &str, options: &[(&'static str, bool)]) -> Result<(), CliError> {
        match options.iter().find(|(_, given)| *given) {
            None => Ok(()),
            Some((option, _)) => Err(CliError::usage(vec![
                Diagnostic::error(&parse::T0030, format!("{option} does not apply to {subject}"))
                    .with_hint("leave it out"),
            ])),
        }
    }

    fn search_video(
        &self,
        dir: &Path,
        planning: &MappingArgs,
        machine: MachineModel,
        pins: &str,
        folder: Option<&Path>,
        format: OutputFormat,
    ) -> CliResult {
        self.reject_unused("a video model", &self.language_options())?;
        let max_devices = Some(MAX_VIDEO_DEVICES);
        if self.devices > max_devices {
            return Err(usage_error(
                "a video model can be planned over at most 1,024 devices",
                "give fewer --devices",
            ));
        }
        let to_usage_error = |d: Diagnostic| CliError::usage(vec![d]);
        let recompute = planning.cache.map(|c| c == CacheArg::Recompute);
        let steps = planning.steps.as_deref().map(parse::parse_steps).transpose().map_err(to_usage_error)?;
        let ns = |option, text: &Option<String>| {
            let ns = text.as_deref().map(|t| parse::parse_milliseconds(option, t)).transpose();
            ns.map(|ns| ns.map(|ns| ns as f64)).map_err(to_usage_error)
        };
        let (decode_ns, encode_ns) =
            (ns("--decode-ms", &self.decode_ms)?, ns("--encode-ms", &self.encode_ms)?);
        let model = Model::open(dir, &Overrides { recompute, steps })?;
        let query = VideoQuery {
            model: &model,
            machine,
            devices: self.devices,
            objective: self.objective.as_deref().map(parse_objective).transpose()?,
            dtype: planning.dtype.map_or_else(Default::default, Into::into),
            pins: video_pins(&planning.merge_video_pins(pins)?)?,
            decode_ns,
            encode_ns,
            whole_decode: self.whole_decode,
            command: command_line(),
        };
        let searching = SearchProgress::new();
        let on_progress = &mut |done, all| searching.set_position(done, all);
        if let Some(why) = &self.why {
            let explanation = explain_video(&query, &video_pins(why)?, on_progress);
            searching.clear_bar();
            return print_explanation(explanation?, format);
        }
        let found = search_video(&query, on_progress);
        searching.clear_bar();
        let (sheet, mapping) = found?;
        let Some(mut mapping) = mapping else {
            if let Some(folder) = folder {
                sheet.write(folder)?;
            }
            return print_report(&sheet, folder, format, None);
        };
        planning.apply_fixed_options(&mut mapping);
        if let Some(folder) = folder {
            let plan: Plan =
                plan::plan_model(&model.video, &model.name, &dir.display().to_string(), &mapping)?;
            sheet.write_with_plan(&plan, folder)?;
        }
        print_report(&sheet, folder, format, Some(&query.machine.cluster.name))
    }
}

impl From<JobArg> for JobKind {
    fn from(name: JobArg) -> JobKind {
        match name {
            JobArg::Train => JobKind::Train,
            JobArg::Prefill => JobKind::Prefill,
            JobArg::Decode => JobKind::Decode,
        }
    }
}

fn command_line() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

fn no_model_error() -> CliError {
    let hint = "give a model: --recipe sr-moe, --model deepseek-v3, or a model folder such as models/demo";
    CliError::usage(vec![Diagnostic::error(&T0031, "no model given").with_hint(hint)])
}

fn several_models_error() -> CliError {
    let message = "a model folder, --model and --recipe exclude each other; give one of them";
    CliError::usage(vec![Diagnostic::error(&parse::T0030, message)])
}

fn print_explanation((legal, text): (bool, String), format: OutputFormat) -> CliResult {
    write_stdout(&match format {
        OutputFormat::Text => text,
        OutputFormat::Json => {
            format!("{}\n", serde_json::json!({"legal": legal, "message": text.lines().collect::<Vec<_>>()}))
        }
    })?;
    Ok(if legal { 0 } else { EXIT_DIAGNOSTICS })
}

fn usage_error(message: &str, hint: &str) -> CliError {
    CliError::usage(vec![Diagnostic::error(&parse::T0030, message.to_string()).with_hint(hint)])
}

/// Merges pins from several options into one list.
///
/// # Errors
/// T0030 if two options set one knob to different values.
pub fn merge_pins(parts: &[Option<String>]) -> Result<String, CliError> {
    let mut merged: Vec<(&str, &str)> = Vec::new();
    for item in parts.iter().flatten().flat_map(|p| p.split(',')).map(str::trim).filter(|i| !i.is_empty()) {
        let (knob, value) = item.split_once('=').unwrap_or((item, ""));
        match merged.iter().find(|(k, _)| *k == knob) {
            Some((_, other)) if *other != value => {
                let says = format!("{knob} is given as {other} and as {value}");
                return Err(usage_error(&says, "give one value"));
            }
            Some(_) => {}
            None => merged.push((knob, value)),
        }
    }
    Ok(merged.iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(","))
}

/// Prints the report of a search. `cluster_name` is the cluster of a plan that can be streamed.
fn print_report(
    report: &EstimateReport,
    folder: Option<&Path>,
    format: OutputFormat,
    cluster_name: Option<&str>,
) -> CliResult {
    let mut text = match format {
        OutputFormat::Json => format!("{}\n", report.json),
        OutputFormat::Text => report.to_text(),
    };
    if let (Some(folder), OutputFormat::Text) = (folder, format) {
        let dir = folder.display();
        text += &format!("\n  {dir}/report.html    this report, for a browser\n");
        if report.is_feasible() {
            text += &format!(
                "  {dir}/timeline.json  a timeline for ui.perfetto.dev\n  {dir}/ranks.txt      the device of each rank\n  {dir}/env.sh         suggested environment variables for the ranks\n"
            );
        }
        if let Some(cluster) = cluster_name {
            text += &format!(
                "run it: tessera stream --plan {dir}, or on a simulated cluster: tessera stream --plan {dir} --device sim --cluster {cluster}\n"
            );
        }
    }
    write_stdout(&text)?;
    Ok(if report.is_feasible() { 0 } else { EXIT_DIAGNOSTICS })
}

fn parse_objective(word: &str) -> Result<tessera::search::Objective, CliError> {
    use tessera::search::Objective;
    let deadline =
        word.strip_prefix("deadline=").and_then(|t| t.strip_suffix("ms")).and_then(|t| t.parse::<f64>().ok());
    match (word, deadline) {
        ("throughput", _) => Ok(Objective::Throughput),
        ("latency", _) => Ok(Objective::Latency),
        ("memory", _) => Ok(Objective::Memory),
        (_, Some(ms)) if ms.is_finite() && ms > 0.0 => {
            Ok(Objective::Deadline(Nanoseconds((ms * 1e6) as u64)))
        }
        _ => Err(CliError::usage(vec![
            Diagnostic::error(&parse::T0030, format!("unknown --objective `{word}`"))
                .with_hint("use throughput, latency, memory, or a deadline such as deadline=40ms"),
        ])),
    }
}

fn parse_routing(word: &str) -> Result<tessera::search::Routing, CliError> {
    tessera::search::Routing::from_name(word).ok_or_else(|| {
        CliError::usage(vec![
            Diagnostic::error(&parse::T0030, format!("unknown --routing `{word}`"))
                .with_hint("use balanced, random, power:1.2, or w0 to w7"),
        ])
    })
}
