//! How deep queues must be, and what a coupled decoder costs: the runtime's machines on a made-up clock, with the stage
//! times of a large model on eight-GPU hosts.

use std::fmt::Write as _;

use tessera_base::Diagnostics;
use tessera_report::overlap::{OVERLAP_GATE, score};
use tessera_runtime::Limits;
use tessera_runtime::cache::Regime;
use tessera_runtime::sim::{ChunkTimes, Stages, pipeline};

const US: u64 = 1_000;

/// A generator of 14 billion parameters at 480 by 832 on a mesh of 4 H200 at 60 % of their peak, 731 TFLOP a chunk.
const GENERATE_NS: u64 = 385_500 * US;
/// Its decoder on one more at 175 TFLOP/s: one latent of three.
const LATENT_NS: u64 = 77_430 * US;
/// Encode of the anchor, one frame.
const ENCODE_NS: u64 = 15_500 * US;

/// Chunks of a measurement, and how many of the first and the last are left out.
const CHUNKS: u32 = 40;
const EDGE: usize = 8;

/// Depths that are swept.
pub const DEPTHS: [u32; 4] = [1, 2, 3, 4];
/// By how much more depth may still shorten the period.
const NO_GAIN: f64 = 0.02;
/// How near a measured gain must come to the one that the stage times predict.
const DELTA: f64 = 0.10;

/// Medians over the steady chunks of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Measured {
    /// OverlapScore.
    pub score: f64,
    /// From one commit to the next, in nanoseconds.
    pub period_ns: u64,
    /// How long the mesh waited before a commit, in nanoseconds.
    pub idle_ns: u64,
    /// From decision to delivery, in nanoseconds.
    pub latency_ns: u64,
    /// Chunks between decision and delivery on average: latency over period.
    pub held: f64,
}

fn measure(stages: Stages, regime: Regime, depth: u32) -> Result<Measured, Diagnostics> {
    let limits = Limits { d_in: depth, d_out: depth, max_outstanding: depth, ..Limits::default() };
    let times = pipeline(stages, regime, &limits, CHUNKS)?;
    let steady = times.get(EDGE..times.len().saturating_sub(EDGE)).unwrap_or_default();
    let median = |of: &dyn Fn(&ChunkTimes) -> u64| {
        let mut all: Vec<u64> = steady.iter().map(of).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    };
    let mut scores: Vec<f64> = steady.iter().map(|t| score(t.stage0_ns, t.stage1_ns, t.period_ns)).collect();
    scores.sort_by(f64::total_cmp);
    let (period_ns, latency_ns) = (median(&|t| t.period_ns), median(&|t| t.latency_ns));
    Ok(Measured {
        score: scores.get(scores.len() / 2).copied().unwrap_or(0.0),
        period_ns,
        idle_ns: median(&|t| t.idle_ns),
        latency_ns,
        held: latency_ns as f64 / period_ns.max(1) as f64,
    })
}

/// A gate with what was seen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gate {
    /// What must hold.
    pub what: String,
    /// What was seen.
    pub seen: String,
    /// Whether it holds.
    pub passes: bool,
}

impl Gate {
    pub(super) fn new(what: impl Into<String>, seen: impl Into<String>, passes: bool) -> Gate {
        Gate { what: what.into(), seen: seen.into(), passes }
    }
}

/// A stream at each depth of [`DEPTHS`], decoder uncoupled.
///
/// # Errors
/// None with these numbers: limits without bounds.
pub fn sweep() -> Result<Vec<(u32, Measured)>, Diagnostics> {
    let stages = Stages { first_ns: 1, rest_ns: 3 * LATENT_NS, generate_ns: GENERATE_NS, jitter_percent: 0 };
    DEPTHS.iter().map(|d| Ok((*d, measure(stages, Regime::Resident, *d)?))).collect()
}

/// What must hold of a sweep.
#[must_use]
pub fn sweep_gates(rows: &[(u32, Measured)]) -> Vec<Gate> {
    let [(_, one), (_, two), deeper @ ..] = rows else { return Vec::new() };
    let mut gates = vec![
        Gate::new(
            format!("1 place stays below {OVERLAP_GATE:.2}"),
            format!("{:.2}", one.score),
            one.score < OVERLAP_GATE,
        ),
        Gate::new(
            format!("2 places reach {OVERLAP_GATE:.2}"),
            format!("{:.2}", two.score),
            two.score >= OVERLAP_GATE,
        ),
    ];
    let mut before = two;
    for (depth, m) in deeper {
        let gain = 1.0 - m.period_ns as f64 / two.period_ns.max(1) as f64;
        gates.push(Gate::new(
            format!("{depth} places shorten the period by at most {:.0} %", NO_GAIN * 100.0),
            format!("{:.1} %", gain * 100.0),
            gain <= NO_GAIN,
        ));
        gates.push(Gate::new(
            format!("{depth} places add latency and chunks held"),
            format!("{} ms, {:.1} chunks", m.latency_ns / 1_000_000, m.held),
            m.latency_ns > before.latency_ns && m.held > before.held,
        ));
        before = m;
    }
    gates
}

/// The sweep as a table of the manual.
#[must_use]
pub fn sweep_markdown(rows: &[(u32, Measured)]) -> String {
    let mut out = format!(
        "Generator {} ms, decode and write {} ms, on the made-up clock:\n\n\
         | places | OverlapScore | period | mesh idle | latency | chunks held |\n\
         | --- | --- | --- | --- | --- | --- |\n",
        GENERATE_NS / 1_000_000,
        3 * LATENT_NS / 1_000_000,
    );
    let ms = |ns: u64| format!("{} ms", (ns + 500_000) / 1_000_000);
    for (depth, m) in rows {
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "| {depth} | {:.2} | {} | {} | {} | {:.1} |",
            m.score,
            ms(m.period_ns),
            ms(m.idle_ns),
            ms(m.latency_ns),
            m.held
        );
    }
    out
}

/// A stream whose context needs all of the decode, one that needs its first latent, and one that needs none.
///
/// # Errors
/// None with these numbers: limits without bounds.
pub fn coupling() -> Result<[(&'static str, Measured); 3], Diagnostics> {
    let stages =
        |first_ns, rest_ns| Stages { first_ns, rest_ns, generate_ns: GENERATE_NS, jitter_percent: 0 };
    let whole = stages(3 * LATENT_NS + ENCODE_NS, 1);
    let anchor = stages(LATENT_NS + ENCODE_NS, 2 * LATENT_NS);
    let free = stages(1, 3 * LATENT_NS + ENCODE_NS);
    Ok([
        ("all of the decode first", measure(whole, Regime::Recompute, 2)?),
        ("the anchor first", measure(anchor, Regime::Recompute, 2)?),
        ("not coupled", measure(free, Regime::Resident, 2)?),
    ])
}

/// What must hold of the three.
#[must_use]
pub fn coupling_gates(rows: &[(&'static str, Measured); 3]) -> Vec<Gate> {
    let stage0 = 3 * LATENT_NS + ENCODE_NS;
    let predicted = 2.0 * LATENT_NS as f64 / stage0.min(GENERATE_NS) as f64;
    let [(_, whole), (_, anchor), (_, free)] = rows;
    let delta = anchor.score - whole.score;
    vec![
        Gate::new(
            format!("the anchor first raises the score by {predicted:.2} ± {DELTA:.2}"),
            format!("{delta:.2}, from {:.2} to {:.2}", whole.score, anchor.score),
            (delta - predicted).abs() <= DELTA,
        ),
        Gate::new(
            "each loosening shortens the period",
            format!(
                "{} ms, {} ms, {} ms",
                whole.period_ns / 1_000_000,
                anchor.period_ns / 1_000_000,
                free.period_ns / 1_000_000
            ),
            whole.period_ns > anchor.period_ns && anchor.period_ns > free.period_ns,
        ),
        Gate::new(
            "without coupling the shorter stage is hidden",
            format!("{:.2}", free.score),
            free.score > 1.0 - DELTA,
        ),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn the_gates_hold_and_notice_a_sweep_that_is_not_one() {
        let rows = sweep().unwrap();
        for gate in sweep_gates(&rows).iter().chain(&coupling_gates(&coupling().unwrap())) {
            assert!(gate.passes, "{gate:?}");
        }
        let flat: Vec<(u32, Measured)> = rows.iter().map(|(d, _)| (*d, rows[1].1)).collect();
        assert_eq!(
            sweep_gates(&flat).iter().filter(|g| !g.passes).count(),
            3,
            "one place, and no growth twice"
        );
    }

    #[test]
    fn the_manual_holds_the_table_that_the_drill_prints() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/manual/overlap.md");
        let kept = std::fs::read_to_string(page).unwrap();
        let block = kept.split("<!-- drill:sweep -->").nth(1).unwrap().split("<!-- /drill:sweep -->").next();
        let printed = sweep_markdown(&sweep().unwrap());
        assert_eq!(block.unwrap().trim(), printed.trim(), "`tessera drill depth-sweep --markdown`");
    }
}
