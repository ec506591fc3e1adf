//! The flags of the mapping search, which `plan` and `doctor` share.

use std::path::PathBuf;

use tessera_base::{Diagnostic, Nanoseconds};
use tessera_estimate::{
    DEFAULT_RACK, JobKind, LanguageQuery, MachineModel, ModelSource, Objective, Pins, Routing,
    job_with_defaults, load_machine, load_thresholds,
};

use super::{AppliesTo, named_values};
use crate::codes::{T0030, T0031};
use crate::output::CliError;

flag_set! {
    /// The options of the mapping search.
    #[command(next_help_heading = "Mapping search")]
    SearchArgs by AppliesTo {
        [AnyRequest]
        /// Cluster to estimate on: a catalog name (gb200-nvl72, hgx-h200, laptop, …) or a TOML file
        /// that `tessera measure` wrote [default: gb200-nvl72 with --model or --recipe, else hgx-h200]
        ///
        /// `tessera plan` searches for the best mapping on this cluster. `tessera doctor` estimates the
        /// plan and its mitigations on this cluster.
        #[arg(long, value_name = "NAME|FILE")]
        cluster: Option<String>,

        [AnyRequest]
        /// Language model of the zoo, such as deepseek-v3, instead of a model folder
        #[arg(long = "model", value_name = "NAME")]
        zoo: Option<String>,

        [AnyRequest]
        /// Preset of a language model, a workload and a mapping: A, B, C, sr-moe, long-context or
        /// throughput-training
        ///
        /// Each recipe is for an MoE model with 4,096 experts. Four recipes are for 72 GPUs: A is
        /// training of a model with wide attention (tp=12,ep=6), B is prefill (tp=8,ep=9), sr-moe is
        /// decode (tp=8,ep=9), and long-context is prefill of long prompts (tp=12,ep=6). Two recipes
        /// have pipeline stages and need 144 GPUs, so add --devices 144: C and throughput-training are
        /// training (tp=8,ep=6,pp=3), and throughput-training has micro-batches of one sequence.
        ///
        /// docs/guides/plan-a-rack.md describes the recipes.
        #[arg(long, value_name = "NAME")]
        recipe: Option<String>,

        [AnyRequest]
        /// Executor profile: a runtime's efficiency curves, which set the estimated time of each op
        /// and collective; a name (torch-2.11, tessera, megatron, ideal) or a TOML file [default:
        /// the cluster's own]
        #[arg(long, value_name = "NAME|FILE")]
        profile: Option<String>,

        [AnyRequest]
        /// Number of devices to use; if one rack has fewer, several racks are used [default: all
        /// devices of the cluster]
        #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=65_536))]
        devices: Option<u32>,

        [LanguageModels]
        /// Workload of a language model [default: decode, or the recipe's]
        #[arg(long, value_parser = named_values(JOBS))]
        job: Option<JobKind>,

        [LanguageModels]
        /// Sequences per step, over all replicas [default per device: 16 for train, 2 for prefill, 64
        /// for decode]
        #[arg(long, value_name = "N", requires = "job", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
        batch: Option<u64>,

        [LanguageModels]
        /// Tokens per sequence; with --job decode, tokens already in the KV cache, per sequence
        /// [default: 4096]
        #[arg(long, value_name = "N", requires = "job", value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
        sequence: Option<u64>,

        [AnyRequest]
        /// Goal of the search: throughput, latency, memory, or a deadline per step or chunk such as
        /// deadline=40ms [default: throughput]
        #[arg(long, value_name = "GOAL")]
        objective: Option<String>,

        [AnyRequest]
        /// Fix some knobs (properties of the mapping), for example tp=8,scheme=ulysses; the search
        /// chooses the others
        ///
        /// Knobs of a language model: tp, ep, pp, dp, expert_tp, scheme, ring, schedule,
        /// interleave, micro_batch, recompute, optimizer, experts_at, cache_at, precision, wire,
        /// capacity_pct, window. Knobs of a video model: tp, pp, strategy, overlap_chunks,
        /// topology, decode, media, max_outstanding. An invalid value is rejected with the list of valid
        /// ones.
        #[arg(long, value_name = "KNOB=VALUE,…")]
        pin: Option<String>,

        [AnyRequest]
        /// Explain one mapping, given by knobs as for --pin: the reason why it is rejected, or its
        /// time compared with the best mapping
        #[arg(long, value_name = "KNOB=VALUE,…")]
        why: Option<String>,

        [LanguageModels]
        /// Assumed distribution of tokens over experts: balanced, random, power:ALPHA, or w0 to w7
        /// [default: random]
        ///
        /// balanced and w0 give every expert the same load. random picks experts uniformly, so that
        /// loads vary. power:1.2 is a power law with exponent 1.2 (any number above 0, at most 5).
        /// w1 to w7 are imbalanced workloads: hot experts (w1, w3), a hot rank (w2, w6), uneven
        /// tokens per rank (w4), a rank without load (w5), bursts (w7).
        #[arg(long, value_name = "ROUTING")]
        routing: Option<String>,

        [LanguageModels]
        /// Assumed hit rate of a predictor of experts, 0 to 1: of the experts that a layer fetches from
        /// host memory, the share that the predictor names one layer ahead [default: 0]
        ///
        /// The fetch of a predicted expert overlaps the compute of the preceding layer. A layer waits
        /// until its other experts are fetched. Tessera includes no predictor: this option only
        /// estimates one.
        #[arg(long, value_name = "FRACTION", allow_negative_numbers = true)]
        prefetch_hit_rate: Option<f64>,

        [LanguageModels]
        /// Reject meshes that shard heads, experts or sequences unevenly; by default, two ranks may
        /// differ by one head, expert or sequence
        #[arg(long)]
        strict: bool,

        [LanguageModels]
        /// TOML file with limits of the gates, the pass/warn/fail checks of a report; a limit that the
        /// file omits keeps its default from crates/tessera-plan/gates.toml
        #[arg(long, value_name = "FILE")]
        gates: Option<PathBuf>,

        [VideoModels]
        /// Time to decode one chunk on one device, in milliseconds, for a video model without its
        /// own decoder
        #[arg(long, value_name = "MS")]
        decode_ms: Option<String>,

        [VideoModels]
        /// Time to encode the anchor (a decoded frame that is encoded again) of a chunk on one
        /// device, in milliseconds, for a video model without its own encoder
        ///
        /// The anchor exists with --cache recompute only: the context of each chunk then begins
        /// with a frame of the previous chunk that is decoded and encoded again.
        #[arg(long, value_name = "MS")]
        encode_ms: Option<String>,

        [VideoModels]
        /// Decode and encode each chunk on one rank; by default the search may split this work over
        /// ranks
        #[arg(long)]
        whole_decode: bool,
    }
}

/// Values of `--job`, each with its help text.
const JOBS: &[(&str, JobKind, &str)] = &[
    ("train", JobKind::Train, "Training steps: forward, backward and optimizer"),
    ("prefill", JobKind::Prefill, "Prompt processing up to the first token"),
    ("decode", JobKind::Decode, "Generation of one token per sequence"),
];

impl SearchArgs {
    /// Returns whether any option requests a mapping search.
    pub fn is_requested(&self) -> bool {
        !self
            .given_flags(&[AppliesTo::AnyRequest, AppliesTo::VideoModels, AppliesTo::LanguageModels])
            .is_empty()
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

    /// Builds the query about a language model.
    pub fn build_query(
        &self,
        subject: ModelSource,
        machine: MachineModel,
        pins: &str,
    ) -> Result<LanguageQuery, CliError> {
        Ok(LanguageQuery {
            job: self.job.map(|k| job_with_defaults(k, self.batch, self.sequence, &machine, self.devices)),
            model_source: subject,
            machine,
            devices: self.devices,
            objective: self.objective.as_deref().map(parse_objective).transpose()?,
            pins: Pins::parse(pins)?,
            routing: self.routing.as_deref().map(parse_routing).transpose()?,
            prefetch_hit_rate: self.prefetch_hit_rate,
            strict: self.strict,
            limits: load_thresholds(self.gates.as_deref())?,
            command: command_line(),
        })
    }
}

pub fn command_line() -> String {
    std::env::args().collect::<Vec<_>>().join(" ")
}

pub fn no_model_error() -> CliError {
    let hint = "give a model: --recipe sr-moe, --model deepseek-v3, or a model folder such as models/demo";
    CliError::usage(Diagnostic::error(&T0031, "no model given").with_hint(hint))
}

pub fn several_models_error() -> CliError {
    let message = "a model folder, --model and --recipe exclude each other; give one of them";
    CliError::usage(Diagnostic::error(&T0030, message))
}

pub fn usage_error(message: &str, hint: &str) -> CliError {
    CliError::usage(Diagnostic::error(&T0030, message.to_string()).with_hint(hint))
}

pub fn parse_objective(word: &str) -> Result<Objective, CliError> {
    let deadline =
        word.strip_prefix("deadline=").and_then(|t| t.strip_suffix("ms")).and_then(|t| t.parse::<f64>().ok());
    match (word, deadline) {
        ("throughput", _) => Ok(Objective::Throughput),
        ("latency", _) => Ok(Objective::Latency),
        ("memory", _) => Ok(Objective::Memory),
        (_, Some(ms)) if ms.is_finite() && ms > 0.0 => {
            Ok(Objective::Deadline(Nanoseconds((ms * 1e6) as u64)))
        }
        _ => Err(CliError::usage(
            Diagnostic::error(&T0030, format!("unknown --objective `{word}`"))
                .with_hint("use throughput, latency, memory, or a deadline such as deadline=40ms"),
        )),
    }
}

fn parse_routing(word: &str) -> Result<Routing, CliError> {
    Routing::from_name(word).ok_or_else(|| {
        CliError::usage(
            Diagnostic::error(&T0030, format!("unknown --routing `{word}`"))
                .with_hint("use balanced, random, power:1.2, or w0 to w7"),
        )
    })
}
