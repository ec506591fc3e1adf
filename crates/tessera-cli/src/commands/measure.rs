//! `tessera measure`: measures this machine and writes a cluster and an executor profile for
//! planning.

use std::path::PathBuf;

use tessera::files::refuse_existing;
use tessera::stream_options::RunDevice;
use tessera::terminal::print_stderr_line;
use tessera_base::Diagnostic;
use tessera_tools::codes::T0049;
use tessera_tools::measure::{MeasureOptions, MeasuredMachine, STEP_NAMES, measure_machine};

use crate::flags::named_values;
use crate::output::{CliError, CliResult, OutputFormat, format_pairs, format_table, write_stdout};

const EXAMPLES: &str = "\
Examples:
  tessera measure --out here                    one rank per core, under half a minute
  tessera measure --ranks 1 --quick --out one   one rank with all cores, a few seconds
  tessera plan models/demo --cluster here/cluster.toml --profile here/profile.toml

All ranks compute at the same time and share the cores, so a measurement is valid only for streams over as many ranks. A kernel
has its median time, a collective its shortest time, both on the slowest rank; close other programs that compute. GPUs cannot be
measured: to plan for GPUs, name a cluster of the catalog, for example tessera plan models/wan2.1-14b --cluster hgx-h200.";

/// Measure the CPU of this machine, and write it as a cluster and a profile for `tessera plan`
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Number of ranks that share the cores [default: one per core]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,

    /// Measure fewer sizes, for less time each
    #[arg(long)]
    pub quick: bool,

    /// Device to measure; only cpu is supported
    #[arg(long, value_parser = named_values(DEVICES), default_value = "cpu")]
    pub device: RunDevice,

    /// New folder for cluster.toml and profile.toml
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// Format of the printed summary; the files are always TOML
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Values of `--device`, each with its help text; [`run`] rejects GPUs with T0049.
const DEVICES: &[(&str, RunDevice, &str)] = &[
    ("cpu", RunDevice::Cpu, "CPU cores of this machine, with the CPU backend"),
    ("cuda", RunDevice::Cuda, "NVIDIA GPUs: not supported, rejected with T0049"),
];

/// Measures this machine, and writes its cluster and profile as TOML files.
pub fn run(args: &Args) -> CliResult {
    if args.device == RunDevice::Cuda {
        return Err(CliError::usage(
            Diagnostic::error(&T0049, "this build cannot measure GPUs")
                .with_hint("plan with a catalog entry, such as --cluster hgx-h200, or measure the CPU"),
        ));
    }
    // An existing folder is rejected before any time is spent.
    refuse_existing(&args.out)?;
    let mut step = 0;
    let mut on_step = |name: &str| {
        step += 1;
        print_stderr_line(&format!("measuring {name} ({step} of {})", STEP_NAMES.len()));
    };
    let measured = measure_machine(MeasureOptions { ranks: args.ranks, quick: args.quick }, &mut on_step)?;
    measured.write(&args.out)?;
    write_stdout(&match args.format {
        OutputFormat::Text => render_text(&measured, &args.out.display().to_string()),
        OutputFormat::Json => render_json(&measured) + "\n",
    })?;
    Ok(0)
}

fn render_text(m: &MeasuredMachine, folder: &str) -> String {
    let mut text = format!("{}\n", m.cluster.title);
    text += &format_pairs(m.figures.clone());
    text += "\nfitted curves against measurements\n";
    let mut rows = vec![["curve", "points", "mean error", "maximum"].map(String::from)];
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    rows.extend(m.fits.iter().map(|f| {
        let name = f.curve_name.to_string();
        [name, f.point_count.to_string(), percent(f.mean_error), percent(f.max_error)]
    }));
    text += &format_table(rows, [false, true, true, true]);
    text += "\nnot measured\n";
    for o in &m.not_measured {
        text += &format!("  {o}\n");
    }
    text += &format!(
        "\n  {folder}/cluster.toml  the cluster\n  {folder}/profile.toml  the profile of the CPU backend\n"
    );
    text + &format!(
        "plan with it: tessera plan models/demo --cluster {folder}/cluster.toml --profile {folder}/profile.toml\n"
    )
}

fn render_json(m: &MeasuredMachine) -> String {
    let fits: Vec<_> = m
        .fits
        .iter()
        .map(|f| serde_json::json!({"curve": f.curve_name, "points": f.point_count, "mean_error": f.mean_error, "largest_error": f.max_error}))
        .collect();
    let figures: serde_json::Map<_, _> =
        m.figures.iter().map(|(k, v)| ((*k).to_string(), v.clone().into())).collect();
    serde_json::json!({
        "machine": m.cluster.title,
        "ranks": m.cluster.device_count(),
        "figures": figures,
        "fits": fits,
        "not_measured": m.not_measured,
    })
    .to_string()
}
