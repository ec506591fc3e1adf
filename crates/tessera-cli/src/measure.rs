//! `tessera measure`: measures the machine at hand and writes a cluster and a profile for planning.

use std::path::PathBuf;

use clap::ValueEnum;
use tessera::measure::{Asked, Measured, STEPS, T0049, free, measure};
use tessera_base::Diagnostic;

use crate::say::{Outcome, Refusal, Shape, out, table};

const EXAMPLES: &str = "\
Examples:
  tessera measure --out here                    every core a rank, under half a minute
  tessera measure --ranks 1 --quick --out one   one rank that has all cores, a few seconds
  tessera plan models/demo --cluster here/cluster.toml --profile here/profile.toml

An entry holds for its number of ranks: each has its share of the cores, as in a stream over so many ranks. Close what
else computes; figures are of the fastest repetitions.";

/// Measure this machine, to plan for it
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Ranks that share the cores [default: one per core]
    #[arg(long, value_name = "N")]
    pub ranks: Option<usize>,

    /// Fewer sizes, less time for each
    #[arg(long)]
    pub quick: bool,

    /// What to measure
    #[arg(long, value_enum, default_value_t)]
    pub device: DeviceName,

    /// New folder for cluster.toml and profile.toml
    #[arg(long, value_name = "DIR")]
    pub out: PathBuf,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

/// `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub enum DeviceName {
    /// The processor, by the CPU backend
    #[default]
    Cpu,
    /// GPUs: not in this build
    Gpu,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    if args.device == DeviceName::Gpu {
        return Err(Refusal::usage(vec![
            Diagnostic::error(&T0049, "this build has no backend that runs on a GPU").hint(
                "plan with an entry of the catalog, such as --cluster hgx-h200, or measure the processor",
            ),
        ]));
    }
    free(&args.out)?;
    let mut step = 0;
    let mut on = |name: &str| {
        step += 1;
        eprintln!("measuring {name} ({step} of {})", STEPS.len());
    };
    let measured = measure(Asked { ranks: args.ranks, quick: args.quick }, &mut on)?;
    measured.write(&args.out)?;
    out(&match args.format {
        Shape::Text => text(&measured, &args.out.display().to_string()),
        Shape::Json => json(&measured) + "\n",
    })?;
    Ok(0)
}

fn text(m: &Measured, folder: &str) -> String {
    let row = |cells: &[&str]| cells.iter().map(|c| (*c).to_string()).collect::<Vec<_>>();
    let mut text = format!("{}\n", m.cluster.title);
    text += &table(&m.figures.iter().map(|(k, v)| row(&[k, v])).collect::<Vec<_>>(), &[false, false]);
    text += "\ncurves against what was measured\n";
    let mut rows = vec![row(&["curve", "points", "mean error", "largest"])];
    let percent = |x: f64| format!("{:.1} %", x * 100.0);
    rows.extend(
        m.fits.iter().map(|f| row(&[f.what, &f.points.to_string(), &percent(f.mean), &percent(f.worst)])),
    );
    text += &table(&rows, &[false, true, true, true]);
    text += "\nnot measured\n";
    for o in &m.open {
        text += &format!("  {o}\n");
    }
    text +=
        &format!("\n  {folder}/cluster.toml  the machine\n  {folder}/profile.toml  the CPU backend on it\n");
    text + &format!(
        "plan with it: tessera plan models/demo --cluster {folder}/cluster.toml --profile {folder}/profile.toml\n"
    )
}

fn json(m: &Measured) -> String {
    let fits: Vec<_> = m
        .fits
        .iter()
        .map(|f| serde_json::json!({"curve": f.what, "points": f.points, "mean_error": f.mean, "largest_error": f.worst}))
        .collect();
    let figures: serde_json::Map<_, _> =
        m.figures.iter().map(|(k, v)| ((*k).to_string(), v.clone().into())).collect();
    serde_json::json!({
        "machine": m.cluster.title,
        "ranks": m.cluster.devices(),
        "figures": figures,
        "fits": fits,
        "not_measured": m.open,
    })
    .to_string()
}
