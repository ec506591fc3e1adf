//! `tessera parity`: compares the logits of a language model under two precision policies.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::json;
use tessera::Mapping;
use tessera::codes::T0010;
use tessera::files::read_text_file;
use tessera::generate::{
    LanguagePlan, LanguageSettings, LogitDifference, PrecisionPolicy, TextModel, TokenOutput, TokenRun,
    check_parity, compare_logits, list_low_precision,
};
use tessera_base::Diagnostic;
use tessera_estimate::load_thresholds;

use super::generate::{encode_prompt, parse_ids};
use crate::flags::mapping::{read_mapping_or_mesh, require_axes};
use crate::flags::named_values;
use crate::output::{CliError, CliResult, OutputFormat, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera parity models/tales --prompt 'The red circle' --against bf16
  tessera parity models/tales --prompts prompts.txt --against fp8           one prompt per line
  tessera parity fixtures/lm/mixtral --prompt-ids 17,4,99 --against fp8-wire --mesh ep=2
  tessera parity models/tales --prompts prompts.txt --gates own.toml --format json

Both policies read the same ids and choose none, so that a different choice does not change what follows. The logits of every
position are an output of the two sealed plans. The gate limits the mean squared error of the logits divided by the standard deviation
of those of the reference; crates/tessera-plan/gates.toml has the limits, and --gates overrides them.

Exit status: 0 the gate is passed, 1 the model or a prompt was rejected, or the gate failed (T0089), 2 usage error.";

/// Values of `--policy` and `--against`, each with its help text.
const POLICIES: &[(&str, PrecisionPolicy, &str)] = &[
    ("f32", PrecisionPolicy::F32, "All values are f32"),
    ("bf16", PrecisionPolicy::Bf16, "Matmuls and the activations between them are bf16"),
    ("fp8", PrecisionPolicy::Fp8, "As bf16, with e4m3 operands of the column-parallel matmuls of blocks"),
    (
        "fp8-wire",
        PrecisionPolicy::Fp8Wire,
        "All values are f32; tokens travel to other ranks' experts as e4m3",
    ),
];

/// Compare the logits of a language model under two precision policies
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of the model
    #[arg(value_name = "FOLDER")]
    model: PathBuf,

    /// Policy of the reference
    #[arg(long, value_parser = named_values(POLICIES), default_value = "f32")]
    policy: PrecisionPolicy,

    /// Policy that is compared with the reference
    #[arg(long, value_parser = named_values(POLICIES), default_value = "bf16")]
    against: PrecisionPolicy,

    /// Text that both policies read; may be repeated
    #[arg(long, value_name = "TEXT", required_unless_present_any = ["prompt_ids", "prompts"])]
    prompt: Vec<String>,

    /// Ids that both policies read, for a folder without a tokenizer; may be repeated
    #[arg(long, value_name = "LIST")]
    prompt_ids: Vec<String>,

    /// File with one text per line; empty lines are left out
    #[arg(long, value_name = "FILE")]
    prompts: Option<PathBuf>,

    /// Mesh axes and their sizes: tp shards each block, ep shares the experts, pp splits the blocks into stages
    #[arg(long, value_name = "MESH", value_parser = require_axes, default_value = "tp=1")]
    mesh: String,

    /// Mapping file in place of --mesh; the policies replace its numerics
    #[arg(long, value_name = "FILE", conflicts_with = "mesh")]
    mapping: Option<PathBuf>,

    /// TOML file with limits of the gates; a limit that it omits keeps its default
    #[arg(long, value_name = "FILE")]
    gates: Option<PathBuf>,

    /// Threads of each rank
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u16).range(1..))]
    threads: u16,

    /// Format of the comparison and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Computes the logits of all prompts under both policies, prints how they differ, and applies the gate.
pub fn run(args: &Args) -> CliResult {
    let limits = load_thresholds(args.gates.as_deref())?;
    let model = TextModel::open(&args.model)?;
    let prompts = read_prompts(args, &model)?;
    let mapping = read_mapping_or_mesh(args.mapping.as_deref(), &args.mesh)?;
    let [reference, found] = [args.policy, args.against].map(|policy| -> Result<PolicyLogits, CliError> {
        policy.check(&mapping, model.decoder.experts.is_some())?;
        let plan = plan_logits(&model, &policy.apply(&mapping), &prompts)?;
        let mut run = TokenRun::load(&plan, &args.model, usize::from(args.threads))?;
        let mut logits = Vec::new();
        for ids in &prompts {
            logits.extend(run.compute_logits(ids)?);
        }
        Ok(PolicyLogits { plan, logits })
    });
    let (reference, found) = (reference?, found?);
    let vocabulary = model.decoder.extents.vocab as usize;
    let difference = compare_logits(&reference.logits, &found.logits, vocabulary)?;
    let verdict = check_parity(args.against, &difference, &limits);
    let limit = args.against.limit(&limits);
    write_stdout(&match args.format {
        OutputFormat::Text => describe_as_text(args, &found, &difference, (verdict.is_ok(), limit)),
        OutputFormat::Json => {
            format!(
                "{}\n",
                describe_as_json(args, [&reference, &found], &difference, (verdict.is_ok(), limit))
            )
        }
    })?;
    verdict?;
    Ok(0)
}

/// The sealed plan of a policy, and what it computed.
struct PolicyLogits {
    plan: Arc<LanguagePlan>,
    /// Logits of all positions of all prompts.
    logits: Vec<f32>,
}

/// Largest number of ids of a prompt that one call reads.
const PROMPT_ROWS: u64 = 64;

fn plan_logits(
    model: &TextModel,
    mapping: &Mapping,
    prompts: &[Vec<u32>],
) -> Result<Arc<LanguagePlan>, CliError> {
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) as u64;
    // A text has room for an id behind it, which nothing chooses here.
    let settings = LanguageSettings::new(longest + 1, longest.clamp(1, PROMPT_ROWS), TokenOutput::Logits);
    Ok(Arc::new(LanguagePlan::new(&model.decoder, mapping, settings)?))
}

fn read_prompts(args: &Args, model: &TextModel) -> Result<Vec<Vec<u32>>, CliError> {
    let mut texts = args.prompt.clone();
    if let Some(file) = &args.prompts {
        texts.extend(read_lines(file)?);
    }
    let texts = texts.iter().map(|text| encode_prompt(model, text, None));
    texts.chain(args.prompt_ids.iter().map(|list| parse_ids(list))).collect()
}

fn read_lines(file: &Path) -> Result<Vec<String>, Diagnostic> {
    let refuse = |why: String| {
        Diagnostic::error(&T0010, format!("no prompts in {}: {why}", file.display()))
            .with_label(file.display().to_string(), "this file")
            .with_hint("write one text per line")
    };
    let text = read_text_file(file).map_err(|e| refuse(e.to_string()))?;
    let lines: Vec<String> =
        text.lines().filter(|line| !line.trim().is_empty()).map(str::to_string).collect();
    if lines.is_empty() { Err(refuse("every line is empty".to_string())) } else { Ok(lines) }
}

fn describe_as_text(
    args: &Args,
    found: &PolicyLogits,
    d: &LogitDifference,
    (is_passed, limit): (bool, f64),
) -> String {
    let [policy, against] = [args.policy, args.against].map(PrecisionPolicy::name);
    let mut out = format!(
        "{against} against {policy}: mesh {}, positions: {}, ids: {}\n",
        found.plan.sealed.mesh(),
        d.positions,
        found.plan.model.extents.vocab
    );
    let mut row = |name: &str, value: String, meaning: &str| {
        let _ = writeln!(out, "  {name:<16} {value:<10} {meaning}");
    };
    row(
        "normalised MSE",
        format!("{:.3e}", d.normalised_mse),
        "of logits divided by the deviation of the reference's logits",
    );
    row("raw MSE", format!("{:.3e}", d.mse), "of the logits as they are");
    row("deviation", format!("{:.3}", d.reference_deviation), "standard deviation of the reference's logits");
    row(
        "relative error",
        format!("{:.3e}", d.relative_error),
        "RMS of the difference over RMS of the reference",
    );
    row("cosine", format!("{:.7}", d.cosine), "of the two vectors of all logits");
    row("likeliest ids", format!("{:.1} %", 100.0 * d.same_likeliest), "of the positions have the same one");
    for (dtype, names) in list_low_precision(&found.plan) {
        let of = |(name, count): (String, usize)| format!("{name} x {count}");
        let names: Vec<String> = names.into_iter().map(of).collect();
        let _ = writeln!(out, "  {dtype}: {}", names.join(", "));
    }
    let verdict = if is_passed { "passed" } else { "failed" };
    let _ = writeln!(out, "gate parity.{against} {verdict}: {:.3e}, limit {limit:e}", d.normalised_mse);
    out
}

fn describe_as_json(
    args: &Args,
    [reference, found]: [&PolicyLogits; 2],
    d: &LogitDifference,
    (is_passed, limit): (bool, f64),
) -> serde_json::Value {
    json!({
        "policy": args.policy.name(),
        "against": args.against.name(),
        "mesh": found.plan.sealed.mesh().to_string(),
        "plans": [reference.plan.sealed.digest_hex(), found.plan.sealed.digest_hex()],
        "positions": d.positions,
        "normalisation": "logits divided by the standard deviation of the reference's logits",
        "reference_deviation": d.reference_deviation,
        "normalised_mse": d.normalised_mse,
        "mse": d.mse,
        "relative_error": d.relative_error,
        "cosine": d.cosine,
        "same_likeliest": d.same_likeliest,
        "low_precision": list_low_precision(&found.plan),
        "gate": {"id": format!("parity.{}", args.against.name()), "limit": limit, "passed": is_passed},
    })
}
