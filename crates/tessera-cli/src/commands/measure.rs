//! `tessera measure`: measures this machine and writes a cluster and an executor profile for
//! planning.

use std::path::PathBuf;

use clap::ValueEnum;
use tessera_base::Diagnostic;
use tessera_tools::codes::T0049;
use tessera_tools::measure::{MeasureOptions, MeasuredMachine, STEP_NAMES, check_out_dir, measure_machine};

use crate::output::{CliError, CliResult, OutputFormat, format_table, write_stdout};

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
    #[arg(long, value_enum, default_value_t)]
    pub device: MeasureDevice,

    /// New folder for cluster.toml and profile.toml
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// Format of the printed summary; the files are always TOML
    #[arg(long, value_enum, default_value_t)]
    pub format: OutputFormat,
}

/// Devices that the option accepts; [`run`] rejects GPUs with T0049.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum MeasureDevice {
    /// CPU cores of this machine, with the CPU backend
    #[default]
    Cpu,
    /// GPUs: not supported, rejected with T0049
    Gpu,
}

/// Measures this machine, and writes its cluster and profile as TOML files.
pub fn run(args: &Args) -> CliResult {
    if args.device == MeasureDevice::Gpu {
        return Err(CliError::usage(vec![
            Diagnostic::error(&T0049, "this build cannot measure GPUs")
                .with_hint("plan with a catalog entry, such as --cluster hgx-h200, or measure the CPU"),
        ]));
    }
    check_out_dir(&args.out)?;
    let mut step = 0;
    let mut on_step = |name: &str| {
        step += 1;
        eprintln!("measuring {name} ({step} of {})", STEP_NAMES.len());
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
    let row = |cells: &[&str]| cells.iter().map(|c| (*c).to_string()).collect::<Vec<_>>();
    let mut text = format!("{}\n", m.cluster.title);
    text += &format_table(&m.figures.iter().map(|(k, v)| row(&[k, v])).collect::<Vec<_>>(), &[false, false]);
    text += "\nfitted curves against measurements\n";
    let mut rows = vec![row(&["curve", "points", "mean error", "maximum"])];
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    rows.extend(m.fits.iter().map(|f| {
        row(&[f.curve_name, &f.point_count.to_string(), &percent(f.mean_error), &percent(f.max_error)])
    }));
    text += &format_table(&rows, &[false, true, true, true]);
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
