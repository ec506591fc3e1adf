//! `tessera doctor`: describes this machine, or diagnoses a plan, runs, or what a PyTorch run compiled.

use std::path::{Path, PathBuf};

use tessera_base::Diagnostic;
use tessera_estimate::{load_machine, read_query};
use tessera_tools::codes::T0053;
use tessera_tools::compile_traces::{examine_compile_traces, find_compile_traces};
use tessera_tools::doctor::{
    DoctorReport, FAILURE_MODES, FolderKind, ReportedSigns, describe_machine, examine_estimate, examine_plan,
    open_folders,
};

use crate::flags::search::SearchArgs;
use crate::output::{CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, format_pairs, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera doctor                                               describe this machine and this build
  tessera doctor --recipe sr-moe --routing w1                  diagnose a recipe under hot experts
  tessera doctor --model deepseek-v3 --pin tp=8 --overflows 3  diagnose a model whose run counted 3 infinities or NaNs
  tessera doctor my-plan                                       diagnose a plan folder from tessera plan --out
  tessera doctor out/demo-1 out/demo-2                         diagnose runs of one plan, oldest first
  tessera doctor torch-trace                                   what a PyTorch run compiled, from TORCH_TRACE=torch-trace
  tessera doctor torch-trace --budget compile.toml             the same against limits of your own

The doctor looks for four failure modes: congested all-to-alls, memory overflow, fp8 instability, and results that differ
between reruns. For each one found it lists mitigations: changes of the plan that may remove it, each with its estimated
effect. docs/guides/plan-a-rack.md explains the estimates. Results are compared between runs that completed with the same plan,
model, prompts, seed and number of chunks. If the model ran outside Tessera, for example in your training
framework, state what that run showed with --overflows, --drifted, --a2a-rate and --peak-gb.

In a folder of TORCH_TRACE logs the doctor counts graph breaks, recompiles, CUDA graphs that were recorded again, caches that
some ranks missed, and gaps, for each rank. It compares the numbers with a budget, and says when to stop tuning and to change
the structure (docs/guides/compile-traces.md).

Exit status: 0 no failure mode found and every budget line passes, 1 at least one found or failed, 2 usage error or nothing to
diagnose.";

/// Diagnose this machine, a plan or runs, and estimate what each mitigation would gain; or count what
/// a PyTorch run compiled
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Run folders (from `tessera stream --out`), or one folder of a plan or an estimate (from
    /// `tessera plan --out`), or of TORCH_TRACE; with neither a folder nor a model, the doctor
    /// describes this machine
    #[arg(value_name = "PLAN|RUN|TRACE")]
    pub folders: Vec<PathBuf>,

    #[command(flatten)]
    pub search_args: SearchArgs,

    /// Symptom: a run outside Tessera counted N infinities or NaNs under fp8
    #[arg(long, value_name = "N")]
    pub overflows: Option<u64>,

    /// Symptom: N reruns outside Tessera gave other results than the first run
    #[arg(long, value_name = "N")]
    pub drifted: Option<u64>,

    /// Symptom: the all-to-alls of a run outside Tessera reached only this share of the link rate,
    /// for example 0.6
    #[arg(long, value_name = "SHARE")]
    pub a2a_rate: Option<f64>,

    /// Symptom: the fullest device of a run outside Tessera held this many gigabytes
    #[arg(long, value_name = "GB")]
    pub peak_gb: Option<f64>,

    /// Limits for a folder of TORCH_TRACE, in TOML; absent keys keep their built-in values
    #[arg(long, value_name = "FILE")]
    pub budget: Option<PathBuf>,

    /// Number of ranks of the PyTorch run; without it, the logs of TORCH_TRACE tell
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    pub ranks: Option<u32>,

    /// Format of the report and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Describes this machine, or diagnoses the given plan or runs.
pub fn run(args: &Args) -> CliResult {
    diagnose_args(args).map_err(CliError::into_usage)
}

fn diagnose_args(args: &Args) -> CliResult {
    let signs = ReportedSigns {
        a2a_rate: args.a2a_rate,
        peak_bytes: args.peak_gb.map(|gb| gb * 1e9),
        overflows: args.overflows,
        drifted: args.drifted,
    };
    let has_model = args.search_args.recipe.is_some() || args.search_args.zoo.is_some();
    let of_traces = args.budget.is_some() || args.ranks.is_some();
    if let ([one], false, false) = (&args.folders[..], has_model, signs.is_any_given())
        && FolderKind::from_folder(one)? == FolderKind::CompileTraces
    {
        return diagnose_compile_traces(one, args);
    }
    let report = match (&args.folders[..], has_model) {
        _ if of_traces => {
            return Err(Diagnostic::error(
                &T0053,
                "--budget or --ranks is given without a folder of TORCH_TRACE",
            )
            .with_hint("name the folder with dedicated_log_torch_trace_… of all ranks: tessera doctor --help")
            .into());
        }
        ([], false) if !signs.is_any_given() => return print_machine(args.format),
        ([], true) => examine_estimate(&args.search_args.named_query()?, &signs)?,
        ([one], false) if FolderKind::from_folder(one)? == FolderKind::Estimate => {
            examine_estimate(&read_query(one)?, &signs)?
        }
        ([_, ..], false) if !signs.is_any_given() => {
            let s = &args.search_args;
            let on =
                s.cluster.as_deref().map(|c| load_machine(c, s.profile.as_deref(), s.devices)).transpose()?;
            let runs = open_folders(&args.folders)?;
            examine_plan(&runs, on)?
        }
        (folders, _) => {
            let what = match (folders, has_model) {
                ([], _) => "symptoms are given without a model, recipe or estimate to diagnose",
                (_, true) => "both a folder and a model or recipe are given",
                _ => "symptom options do not apply to a run or a sealed plan",
            };
            return Err(Diagnostic::error(&T0053, what)
                .with_hint("give one thing to diagnose: tessera doctor --help")
                .into());
        }
    };
    write_stdout(&match args.format {
        OutputFormat::Text => render_text(&report),
        OutputFormat::Json => render_json(&report) + "\n",
    })?;
    Ok(if report.failures.is_empty() { 0 } else { EXIT_DIAGNOSTICS })
}

fn diagnose_compile_traces(folder: &Path, args: &Args) -> CliResult {
    let logs = find_compile_traces(folder)?.unwrap_or_default();
    let report = examine_compile_traces(&logs, args.ranks, args.budget.as_deref())?;
    write_stdout(&match args.format {
        OutputFormat::Text => report.to_text(&folder.display().to_string()),
        OutputFormat::Json => format!("{}\n", report.to_json()),
    })?;
    Ok(if report.passes() { 0 } else { EXIT_DIAGNOSTICS })
}

fn print_machine(format: OutputFormat) -> CliResult {
    let facts = describe_machine();
    write_stdout(&match format {
        OutputFormat::Text => format_pairs(facts),
        OutputFormat::Json => {
            let map: serde_json::Map<_, _> =
                facts.into_iter().map(|(name, fact)| (name, fact.into())).collect();
            serde_json::Value::from(map).to_string() + "\n"
        }
    })?;
    Ok(0)
}

fn render_text(c: &DoctorReport) -> String {
    let mut text = format!("{}\n", c.title);
    text += &format_pairs(c.observations.clone());
    for f in &c.failures {
        text += &format!("\n{} ({}): {}\n  now: {}\n", f.code.title, f.code.id, f.sign, f.before);
        for r in &f.mitigations {
            text += &format!("  {}: {}\n", r.action, r.how);
            if let Some(after) = &r.after {
                text += &format!("    {after}\n");
            }
        }
    }
    let is_found = |code: &str| c.failures.iter().any(|f| f.code.id == code);
    let others: Vec<&str> =
        FAILURE_MODES.iter().map(|m| m.code()).filter(|k| !is_found(k.id)).map(|k| k.title).collect();
    if !others.is_empty() {
        text += &format!("\nnot found: {}\n", others.join("; "));
    }
    if !c.not_recorded.is_empty() {
        text += "not recorded\n";
        for u in &c.not_recorded {
            text += &format!("  {u}\n");
        }
    }
    if let Some(f) = c.failures.first() {
        text += &format!("more: tessera explain {}\n", f.code.id);
    }
    text
}

fn render_json(c: &DoctorReport) -> String {
    use serde_json::json;
    let pairs = |list: &[(String, String)]| {
        list.iter().map(|(k, v)| json!({"what": k, "value": v})).collect::<Vec<_>>()
    };
    let found: Vec<_> = c
        .failures
        .iter()
        .map(|f| {
            let mitigations: Vec<_> = f
                .mitigations
                .iter()
                .map(|r| json!({"action": r.action, "how": r.how, "after": r.after}))
                .collect();
            json!({"code": f.code.id, "title": f.code.title, "symptom": f.sign, "before": f.before, "mitigations": mitigations})
        })
        .collect();
    json!({"title": c.title, "observed": pairs(&c.observations), "recognised": found, "not_recorded": c.not_recorded})
        .to_string()
}
