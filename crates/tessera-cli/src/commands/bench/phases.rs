//! `tessera bench phases`: measures single phases of a plan on the GPUs of this host.

use std::path::PathBuf;

use tessera::program_command::ProgramCommand;
use tessera::{DtypePolicy, Mapping};
use tessera_tools::bench::{
    PhaseBenchConfig, PhaseBenchReport, PhaseTimes, median_and_deciles, run_phase_rank, time_phases,
};

use super::{parse_size, to_gib};
use crate::flags::mapping::{MappingArgs, MappingUse, parse_mesh};
use crate::output::{CliError, CliResult, OutputFormat, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera bench phases decode.first,decode.rest,encode --preset krea-realtime --media mesh
  tessera bench phases decode.rest --preset self-forcing --media mesh --size 320x576 --trace
  tessera bench phases decode.rest --preset krea-realtime --mesh tp=2      two GPUs share each picture by rows

Weights and inputs are random. A phase is timed as a call runs it, with its inputs and outputs on the host.";

/// Measure single phases of a plan on GPUs, for example those of a VAE
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct PhasesArgs {
    /// Names of the phases, separated by commas
    #[arg(value_name = "PHASES", value_delimiter = ',', required = true)]
    pub phases: Vec<String>,

    /// Folder with the model's config; weights are not read
    #[arg(long, value_name = "DIR", default_value = "models/wan2.1-14b")]
    pub model: PathBuf,

    /// Height and width of the picture in pixels [default: the model's]
    #[arg(long, value_name = "HxW", value_parser = parse_size)]
    pub size: Option<(u64, u64)>,

    /// Number of runs to measure
    #[arg(long, value_name = "N", default_value_t = 30)]
    pub runs: usize,

    /// Warm-up of each phase before measuring, in seconds; several GPUs warm up for --runs runs instead
    #[arg(long, value_name = "S", default_value_t = 2.0)]
    pub warm: f64,

    /// Trace one run of each phase, and print the time of its launches by ops and shapes
    #[arg(long)]
    pub trace: bool,

    #[command(flatten)]
    pub mapping: MappingArgs,

    /// Run this rank of several, which the command itself starts
    #[arg(long, value_name = "RANK", hide = true)]
    pub rank: Option<u32>,

    /// Format of the measurements and of diagnostics
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Measures single phases of a plan.
pub fn run(args: &PhasesArgs, program: &ProgramCommand) -> CliResult {
    let mut mapping = Mapping { dtype: DtypePolicy::Bf16, ..Mapping::default() };
    args.mapping.apply_options(&mut mapping, &MappingUse::ALL);
    if let Some(mesh) = &args.mapping.mesh {
        mapping.mesh = parse_mesh(mesh).map_err(CliError::usage)?;
    }
    args.mapping.apply_hosts(&mut mapping)?;
    let config = PhaseBenchConfig {
        model: args.model.clone(),
        overrides: args.mapping.parse_overrides().map_err(CliError::usage)?,
        size: args.size,
        mapping,
        phases: args.phases.clone(),
        warm_s: args.warm,
        runs: args.runs.max(1),
        trace: args.trace,
    };
    if let Some(rank) = args.rank {
        run_phase_rank(&config, rank)?;
        return Ok(0);
    }
    let arguments = |rank: u32| std::env::args().skip(1).chain([format!("--rank={rank}")]).collect();
    let report = time_phases(program, &config, arguments)?;
    write_stdout(&match args.format {
        OutputFormat::Json => format!("{}\n", report_json(&report)),
        OutputFormat::Text => report_text(&report),
    })?;
    Ok(0)
}

fn report_json(report: &PhaseBenchReport) -> serde_json::Value {
    let phase = |p: &PhaseTimes| {
        let (median, low, high) = median_and_deciles(&p.runs_ms);
        let launches: Vec<_> = p.launches.iter().map(|l| (&l.launch, l.count, l.ms)).collect();
        serde_json::json!({
            "phase": p.phase, "median_ms": median, "p10_ms": low, "p90_ms": high, "flops": p.flops,
            "runs_ms": p.runs_ms, "launches": launches,
        })
    };
    serde_json::json!({
        "bench": "phases", "size": report.size, "plan": report.plan, "planned": report.planned,
        "measured": report.measured, "phases": report.phases.iter().map(phase).collect::<Vec<_>>(),
    })
}

fn report_text(report: &PhaseBenchReport) -> String {
    let mut text = format!(
        "{}, plan {}: weights, buffers and temporaries of the phases take {:.2} GiB; the process uses {:.2} GiB, with context and libraries\n",
        report.size,
        &report.plan[..12.min(report.plan.len())],
        to_gib(report.planned.iter().sum()),
        to_gib(report.measured),
    );
    let mut rows = vec![["phase", "median ms", "p10", "p90", "TFLOP", "TFLOP/s"].map(String::from)];
    rows.extend(report.phases.iter().map(|p| {
        let (median, low, high) = median_and_deciles(&p.runs_ms);
        let tflop = p.flops as f64 / 1e12;
        let numbers = [median, low, high, tflop].map(|x| format!("{x:.3}"));
        let [median_text, low, high, tflop_text] = numbers;
        [p.phase.clone(), median_text, low, high, tflop_text, format!("{:.0}", tflop / median * 1e3)]
    }));
    text += &format_table(rows, [false, true, true, true, true, true]);
    for p in report.phases.iter().filter(|p| !p.launches.is_empty()) {
        text += &super::format_launches(&format!("launches of {}", p.phase), &p.launches);
    }
    text
}
