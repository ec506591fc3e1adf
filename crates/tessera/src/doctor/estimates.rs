//! The doctor for estimates from op rows: recipes, models of the zoo, and folders that hold what was asked.

use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_plan::search::remedy::{Finding, Limits, Mode, Numbers, Signs, diagnose};
use tessera_plan::search::{Candidate, Outcome, Pins, Question, Reason, search};

use super::asked::{asked_of, machine_of};
use super::{Action, Checkup, Found, Shown, T0051, T0052};
use crate::files::read_text;
use crate::search::{Asked, question};

/// What was asked in a folder of `tessera plan --out`.
///
/// # Errors
/// T0051.
pub fn kept(folder: &Path) -> Result<Asked, Diagnostics> {
    let (file, v) = json_of(folder)?;
    asked_of(&file, &v["asked"])
}

/// The machine that an estimate beside a sealed plan was made for, where there is one.
pub(super) fn machine_beside(folder: &Path) -> Option<Result<tessera_cost::Machine, Diagnostics>> {
    folder.join("estimate.json").is_file().then(|| {
        let (file, v) = json_of(folder)?;
        machine_of(&file, &v["asked"]["machine"])
    })
}

fn json_of(folder: &Path) -> Result<(String, serde_json::Value), Diagnostics> {
    let path = folder.join("estimate.json");
    let file = path.display().to_string();
    let text = read_text(&path, &T0051).map_err(|d| vec![d])?;
    let v = serde_json::from_str(&text).map_err(|e| {
        vec![Diagnostic::error(&T0051, format!("{file} is no JSON: {e}")).at(file.clone(), "this file")]
    })?;
    Ok((file, v))
}

/// Examines the best arrangement that a question leaves, or, where only memory forbids any, one of those.
///
/// # Errors
/// What is wrong with the question, and T0052.
pub fn rows(asked: &Asked, shown: &Shown) -> Result<Checkup, Diagnostics> {
    let (q, title) = question(asked)?;
    let outcome = search(&q);
    let candidate = patient(&q, &outcome)?;
    let numbers = Numbers::of(&q, &candidate)?;
    let estimated = Signs::of(&q, &numbers);
    let signs = Signs {
        a2a_rate: shown.a2a_rate,
        peak_bytes: shown.peak_bytes.or(estimated.peak_bytes),
        overflows: shown.overflows,
        drifted: shown.drifted,
        ..estimated
    };
    let found = diagnose(&q, &candidate, &signs, &Limits::default())?;
    let of = |x: Option<f64>| x.unwrap_or(0.0);
    let mut seen = vec![
        ("arrangement".to_string(), Pins::of(&candidate).text()),
        ("estimate".to_string(), words(&numbers)),
        (
            "exchange of experts".to_string(),
            format!("{:.1} % of the step in the open", of(estimated.a2a_share) * 100.0),
        ),
        (
            "memory".to_string(),
            format!(
                "{:.1} GB of {:.1} on the fullest rank{}",
                of(signs.peak_bytes) / 1e9,
                of(signs.capacity_bytes) / 1e9,
                if shown.peak_bytes.is_some() { ", as was told" } else { "" }
            ),
        ),
    ];
    let mut unknown = Vec::new();
    let mut told = |known: Option<String>, name: &str, absent: &str| match known {
        Some(value) => seen.push((name.to_string(), value)),
        None => unknown.push(format!("{name}: {absent}")),
    };
    let rate = shown.a2a_rate.map(|r| format!("{:.0} % of the links, as was told", r * 100.0));
    if q.work.experts().is_some() {
        told(rate, "bandwidth of the exchange in bursts", "only a run shows it; --a2a-rate SHARE tells it");
    }
    let count = |n: Option<u64>| n.map(|n| format!("{n}, as was told"));
    told(
        count(shown.overflows),
        "infinities and NaN under fp8",
        "only a run shows them; --overflows N tells them",
    );
    told(count(shown.drifted), "reruns that differ", "only runs show them; --drifted N tells them");
    Ok(Checkup { title, seen, found: found.iter().map(Found::of).collect(), unknown })
}

/// Whom to examine.
fn patient(q: &Question, outcome: &Outcome) -> Result<Candidate, Diagnostics> {
    if let Some(best) = outcome.best.first() {
        return Ok(best.candidate);
    }
    if let Some(full) = outcome.rejected.get(&Reason::Memory) {
        return Ok(full.example);
    }
    let mut d = Diagnostic::error(&T0052, format!("none of {} arrangements can run", outcome.considered))
        .at(q.work.name.clone(), format!("{} devices of {}", q.space.devices, q.machine.cluster.title));
    for (reason, r) in &outcome.rejected {
        d = d.note(format!(
            "{} ({}): {} of them, such as {}",
            reason.title(),
            reason.code().id,
            r.count,
            r.says
        ));
    }
    Err(vec![d.hint("tessera plan --why says what would be legal")])
}

impl Found {
    fn of(f: &Finding) -> Found {
        Found {
            code: f.mode.code(),
            sign: f.sign.clone(),
            before: words(&f.before),
            remedies: f
                .remedies
                .iter()
                .map(|r| Action {
                    action: r.action.to_string(),
                    how: r.how.clone(),
                    after: r.after.map(|n| compared(f.mode, &n, &f.before)),
                })
                .collect(),
        }
    }
}

fn words(n: &Numbers) -> String {
    format!(
        "step {:.2} ms, exchange {:.2} ms, {:.1} % dropped, peak {:.1} GB{}",
        n.step_ns / 1e6,
        n.a2a_ns / 1e6,
        n.dropped * 100.0,
        n.peak_bytes / 1e9,
        if n.fits { "" } else { ", which does not fit" }
    )
}

/// The new numbers, and which way the one in question went.
fn compared(mode: Mode, after: &Numbers, before: &Numbers) -> String {
    let in_question = |n: &Numbers| match mode {
        Mode::Congestion => Some(n.a2a_ns),
        Mode::Memory => Some(n.peak_bytes),
        Mode::Fp8 | Mode::Drift => None,
    };
    let helps = match (in_question(after), in_question(before)) {
        (Some(a), Some(b)) if a < b => ": helps",
        (Some(a), Some(b)) if a > b => ": makes it worse",
        (Some(_), Some(_)) => ": changes nothing",
        _ => "",
    };
    words(after) + helps
}
