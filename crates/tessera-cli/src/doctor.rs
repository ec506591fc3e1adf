//! `tessera doctor`: this machine, or what ails a plan or a run.

use std::path::PathBuf;

use tessera::doctor::{Checkup, Kind, MODES, Shown, T0053, kept, machine_at_hand, open, rows, video};
use tessera::search::machine;
use tessera_base::Diagnostic;

use crate::estimate::Search;
use crate::say::{DIAGNOSED, Outcome, Refusal, Shape, out, table};

const EXAMPLES: &str = "\
Examples:
  tessera doctor                                       this machine and what this build knows
  tessera doctor --recipe sr-moe --routing w1          a recipe under hot experts
  tessera doctor --model deepseek-v3 --pin tp=8 --overflows 3
  tessera doctor my-plan                               a folder of tessera plan --out
  tessera doctor out/demo-1 out/demo-2                 runs of one request, oldest first

Four ways to fail are looked for: an exchange that is congested, memory that overflows, fp8 that is not stable, results
that drift. Each that is recognised comes with the remedies of the mapping guide and their predicted numbers.

Exit status: 0 nothing recognised, 1 something recognised, 2 usage or nothing that could be examined.";

/// What ails a plan or a run, and what each remedy would bring
#[derive(Debug, clap::Args)]
#[command(after_help = EXAMPLES)]
pub struct Args {
    /// Folder of a plan, of an estimate, or of runs; none for this machine
    #[arg(value_name = "PLAN|RUN")]
    pub folders: Vec<PathBuf>,

    #[command(flatten)]
    pub search: Search,

    /// A run elsewhere counted so many infinities or NaN under fp8
    #[arg(long, value_name = "N")]
    pub overflows: Option<u64>,

    /// Reruns elsewhere gave so many other digests
    #[arg(long, value_name = "N")]
    pub drifted: Option<u64>,

    /// A run elsewhere reached this share of the links in bursts, such as 0.6
    #[arg(long, value_name = "SHARE")]
    pub a2a_rate: Option<f64>,

    /// A run elsewhere held so many gigabytes on its fullest device
    #[arg(long, value_name = "GB")]
    pub peak_gb: Option<f64>,

    /// How to print
    #[arg(long, value_enum, default_value_t)]
    pub format: Shape,
}

/// Runs the verb.
pub fn run(args: &Args) -> Outcome {
    examine(args).map_err(Refusal::into_usage)
}

fn examine(args: &Args) -> Outcome {
    let shown = Shown {
        a2a_rate: args.a2a_rate,
        peak_bytes: args.peak_gb.map(|gb| gb * 1e9),
        overflows: args.overflows,
        drifted: args.drifted,
    };
    let named = args.search.recipe.is_some() || args.search.zoo.is_some();
    let checkup = match (&args.folders[..], named) {
        ([], false) if !shown.any() => return here(args.format),
        ([], true) => rows(&args.search.named()?, &shown)?,
        ([one], false) if Kind::of(one)? == Kind::Estimate => rows(&kept(one)?, &shown)?,
        ([_, ..], false) if !shown.any() => {
            let s = &args.search;
            let on = s.cluster.as_deref().map(|c| machine(c, s.profile.as_deref(), s.devices)).transpose()?;
            let patient = open(&args.folders)?;
            video(&patient, on)?
        }
        (folders, _) => {
            let what = match (folders, named) {
                ([], _) => "signs were told, and nothing that they are signs of",
                (_, true) => "a folder and a model or recipe were named",
                _ => "a run or a sealed plan shows its own signs",
            };
            return Err(Diagnostic::error(&T0053, what).hint("name one thing: tessera doctor --help").into());
        }
    };
    out(&match args.format {
        Shape::Text => text(&checkup),
        Shape::Json => json(&checkup) + "\n",
    })?;
    Ok(if checkup.found.is_empty() { 0 } else { DIAGNOSED })
}

fn here(format: Shape) -> Outcome {
    let facts = machine_at_hand();
    out(&match format {
        Shape::Text => {
            table(&facts.iter().map(|(k, v)| vec![k.clone(), v.clone()]).collect::<Vec<_>>(), &[false, false])
        }
        Shape::Json => {
            let map: serde_json::Map<_, _> =
                facts.iter().map(|(k, v)| (k.clone(), v.clone().into())).collect();
            serde_json::Value::from(map).to_string() + "\n"
        }
    })?;
    Ok(0)
}

fn text(c: &Checkup) -> String {
    let mut text = format!("{}\n", c.title);
    text +=
        &table(&c.seen.iter().map(|(k, v)| vec![k.clone(), v.clone()]).collect::<Vec<_>>(), &[false, false]);
    for f in &c.found {
        text += &format!("\n{} ({}): {}\n  now: {}\n", f.code.title, f.code.id, f.sign, f.before);
        for r in &f.remedies {
            text += &format!("  {}: {}\n", r.action, r.how);
            if let Some(after) = &r.after {
                text += &format!("    {after}\n");
            }
        }
    }
    let recognised = |code: &str| c.found.iter().any(|f| f.code.id == code);
    let others: Vec<&str> =
        MODES.iter().map(|m| m.code()).filter(|k| !recognised(k.id)).map(|k| k.title).collect();
    if !others.is_empty() {
        text += &format!("\nnot recognised: {}\n", others.join("; "));
    }
    if !c.unknown.is_empty() {
        text += "not recorded\n";
        for u in &c.unknown {
            text += &format!("  {u}\n");
        }
    }
    if let Some(f) = c.found.first() {
        text += &format!("more: tessera explain {}\n", f.code.id);
    }
    text
}

fn json(c: &Checkup) -> String {
    use serde_json::json;
    let pairs = |list: &[(String, String)]| {
        list.iter().map(|(k, v)| json!({"what": k, "says": v})).collect::<Vec<_>>()
    };
    let found: Vec<_> = c
        .found
        .iter()
        .map(|f| {
            let remedies: Vec<_> = f
                .remedies
                .iter()
                .map(|r| json!({"action": r.action, "how": r.how, "after": r.after}))
                .collect();
            json!({"code": f.code.id, "title": f.code.title, "sign": f.sign, "before": f.before, "remedies": remedies})
        })
        .collect();
    json!({"title": c.title, "seen": pairs(&c.seen), "recognised": found, "not_recorded": c.unknown})
        .to_string()
}
