//! Measures how deep queues must be and what a coupled decoder costs. The runtime's state machines
//! run on a simulated clock with the stage times of a large model on eight-GPU hosts.

use std::fmt::Write as _;

use tessera_base::Diagnostics;
use tessera_report::overlap::{OVERLAP_GATE, overlap_score};
use tessera_runtime::Limits;
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::sim::{ChunkTimes, StageTimes, simulate_pipeline};

const US: u64 = 1_000;

/// Time per chunk of a 14-billion-parameter generator at 480 by 832 on a mesh of 4 H200 at 60 % of
/// peak: 731 TFLOP.
const GENERATE_NS: u64 = 385_500 * US;
/// Time per latent of the VAE decoder on one more GPU at 175 TFLOP/s. A chunk has three latents.
const LATENT_NS: u64 = 77_430 * US;
/// Time to encode the anchor, which is one frame.
const ENCODE_NS: u64 = 15_500 * US;

/// Number of chunks in a measurement, and number of chunks excluded at its start and at its end.
const CHUNKS: u32 = 40;
const EDGE_CHUNKS: usize = 8;

/// Queue depths that the sweep compares.
pub const DEPTHS: [u32; 4] = [1, 2, 3, 4];
/// Maximum relative gain in the period from a depth above 2.
const MAX_FURTHER_GAIN: f64 = 0.02;
/// Tolerance between a measured gain and the gain that the stage times predict.
const GAIN_TOLERANCE: f64 = 0.10;

/// Medians over the steady-state chunks of a stream.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StreamMedians {
    /// OverlapScore, computed from the times of both stages and the period.
    pub score: f64,
    /// Time from one commit to the next, in nanoseconds.
    pub period_ns: u64,
    /// Time that the mesh waits before a commit, in nanoseconds.
    pub mesh_idle_ns: u64,
    /// Time from the decision to generate a chunk to its delivery, in nanoseconds.
    pub latency_ns: u64,
    /// Average number of chunks between decision and delivery, which is the latency divided by the
    /// period.
    pub chunks_in_flight: f64,
}

fn measure_stream(stages: StageTimes, regime: CacheRegime, depth: u32) -> Result<StreamMedians, Diagnostics> {
    let limits = Limits { d_in: depth, d_out: depth, max_outstanding: depth, ..Limits::default() };
    let times = simulate_pipeline(stages, regime, &limits, CHUNKS)?;
    let steady = times.get(EDGE_CHUNKS..times.len().saturating_sub(EDGE_CHUNKS)).unwrap_or_default();
    let median = |field: &dyn Fn(&ChunkTimes) -> u64| {
        let mut all: Vec<u64> = steady.iter().map(field).collect();
        all.sort_unstable();
        all.get(all.len() / 2).copied().unwrap_or(0)
    };
    // A chunk's record holds the period that ends with its commit, in which the chunk before ran.
    let mut scores: Vec<f64> = steady
        .windows(2)
        .map(|pair| overlap_score(pair[0].stage0_ns, pair[0].stage1_ns, pair[1].period_ns))
        .collect();
    scores.sort_by(f64::total_cmp);
    let (period_ns, latency_ns) = (median(&|t| t.period_ns), median(&|t| t.latency_ns));
    Ok(StreamMedians {
        score: scores.get(scores.len() / 2).copied().unwrap_or(0.0),
        period_ns,
        mesh_idle_ns: median(&|t| t.idle_ns),
        latency_ns,
        chunks_in_flight: latency_ns as f64 / period_ns.max(1) as f64,
    })
}

/// One requirement of a measurement drill, with the measured value and the verdict.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeasuredGate {
    /// What the measurement must show for the gate to pass.
    pub requirement: String,
    /// Measured value, as text for display.
    pub observed: String,
    /// Whether the requirement is met.
    pub passes: bool,
}

impl MeasuredGate {
    pub(super) fn new(what: impl Into<String>, seen: impl Into<String>, passes: bool) -> MeasuredGate {
        MeasuredGate { requirement: what.into(), observed: seen.into(), passes }
    }
}

/// Measures a stream at each depth of `DEPTHS` without decoder coupling.
///
/// # Errors
/// Diagnostics of the limits; none occur with these constants.
pub fn sweep_depths() -> Result<Vec<(u32, StreamMedians)>, Diagnostics> {
    let stages =
        StageTimes { context_ns: 1, delivery_ns: 3 * LATENT_NS, generate_ns: GENERATE_NS, jitter_percent: 0 };
    DEPTHS.iter().map(|d| Ok((*d, measure_stream(stages, CacheRegime::Resident, *d)?))).collect()
}

/// Checks the measurements of [`sweep_depths`] against their requirements.
#[must_use]
pub fn sweep_gates(rows: &[(u32, StreamMedians)]) -> Vec<MeasuredGate> {
    let [(_, one), (_, two), deeper @ ..] = rows else { return Vec::new() };
    let mut gates = vec![
        MeasuredGate::new(
            format!("depth 1 stays below {OVERLAP_GATE:.2}"),
            format!("{:.2}", one.score),
            one.score < OVERLAP_GATE,
        ),
        MeasuredGate::new(
            format!("depth 2 reaches {OVERLAP_GATE:.2}"),
            format!("{:.2}", two.score),
            two.score >= OVERLAP_GATE,
        ),
    ];
    let mut before = two;
    for (depth, m) in deeper {
        let gain = 1.0 - m.period_ns as f64 / two.period_ns.max(1) as f64;
        gates.push(MeasuredGate::new(
            format!("depth {depth} shortens the period by at most {:.0} %", MAX_FURTHER_GAIN * 100.0),
            format!("{:.1} %", gain * 100.0),
            gain <= MAX_FURTHER_GAIN,
        ));
        gates.push(MeasuredGate::new(
            format!("depth {depth} adds latency and chunks in flight"),
            format!("{} ms, {:.1} chunks", m.latency_ns / 1_000_000, m.chunks_in_flight),
            m.latency_ns > before.latency_ns && m.chunks_in_flight > before.chunks_in_flight,
        ));
        before = m;
    }
    gates
}

/// Formats the measurements as the Markdown table of the manual.
#[must_use]
pub fn sweep_markdown(rows: &[(u32, StreamMedians)]) -> String {
    let mut out = format!(
        "Generator {} ms, decode and write {} ms, on the simulated clock:\n\n\
         | depth | OverlapScore | period | mesh idle | latency | chunks in flight |\n\
         | --- | --- | --- | --- | --- | --- |\n",
        GENERATE_NS / 1_000_000,
        3 * LATENT_NS / 1_000_000,
    );
    let ms = |ns: u64| format!("{} ms", (ns + 500_000) / 1_000_000);
    for (depth, m) in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(
            out,
            "| {depth} | {:.2} | {} | {} | {} | {:.1} |",
            m.score,
            ms(m.period_ns),
            ms(m.mesh_idle_ns),
            ms(m.latency_ns),
            m.chunks_in_flight
        );
    }
    out
}

/// Measures a stream whose context needs the whole decode, a stream whose context needs only the
/// anchor, and a stream without coupling.
///
/// # Errors
/// Diagnostics of the limits; none occur with these constants.
pub fn measure_coupling() -> Result<[(&'static str, StreamMedians); 3], Diagnostics> {
    let stages = |first_ns, rest_ns| StageTimes {
        context_ns: first_ns,
        delivery_ns: rest_ns,
        generate_ns: GENERATE_NS,
        jitter_percent: 0,
    };
    let whole = stages(3 * LATENT_NS + ENCODE_NS, 1);
    let anchor = stages(LATENT_NS + ENCODE_NS, 2 * LATENT_NS);
    let free = stages(1, 3 * LATENT_NS + ENCODE_NS);
    Ok([
        ("whole decode before the context", measure_stream(whole, CacheRegime::Recompute, 2)?),
        ("anchor before the context", measure_stream(anchor, CacheRegime::Recompute, 2)?),
        ("no coupling", measure_stream(free, CacheRegime::Resident, 2)?),
    ])
}

/// Checks the measurements of [`measure_coupling`] against their requirements.
#[must_use]
pub fn coupling_gates(rows: &[(&'static str, StreamMedians); 3]) -> Vec<MeasuredGate> {
    let stage0 = 3 * LATENT_NS + ENCODE_NS;
    let predicted = 2.0 * LATENT_NS as f64 / stage0.min(GENERATE_NS) as f64;
    let [(_, whole), (_, anchor), (_, free)] = rows;
    let delta = anchor.score - whole.score;
    vec![
        MeasuredGate::new(
            format!("decoding the anchor first raises the score by {predicted:.2} ± {GAIN_TOLERANCE:.2}"),
            format!("{delta:.2}, from {:.2} to {:.2}", whole.score, anchor.score),
            (delta - predicted).abs() <= GAIN_TOLERANCE,
        ),
        MeasuredGate::new(
            "each weaker coupling shortens the period",
            format!(
                "{} ms, {} ms, {} ms",
                whole.period_ns / 1_000_000,
                anchor.period_ns / 1_000_000,
                free.period_ns / 1_000_000
            ),
            whole.period_ns > anchor.period_ns && anchor.period_ns > free.period_ns,
        ),
        MeasuredGate::new(
            "the shorter stage is hidden without coupling",
            format!("{:.2}", free.score),
            free.score > 1.0 - GAIN_TOLERANCE,
        ),
    ]
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    // proves: V-03
    #[test]
    fn the_gates_pass_and_detect_a_flat_sweep() {
        let rows = sweep_depths().unwrap();
        for gate in sweep_gates(&rows).iter().chain(&coupling_gates(&measure_coupling().unwrap())) {
            assert!(gate.passes, "{gate:?}");
        }
        let flat: Vec<(u32, StreamMedians)> = rows.iter().map(|(d, _)| (*d, rows[1].1)).collect();
        assert_eq!(
            sweep_gates(&flat).iter().filter(|g| !g.passes).count(),
            3,
            "depth 1, and two depths without growth"
        );
    }

    #[test]
    fn jitter_does_not_hide_that_the_stages_overlap() {
        let stages = StageTimes {
            context_ns: 1,
            delivery_ns: 3 * LATENT_NS / 2,
            generate_ns: GENERATE_NS,
            jitter_percent: 40,
        };
        let two = measure_stream(stages, CacheRegime::Resident, 2).unwrap();
        assert!(two.score > 0.95, "{two:?}");
        let one = measure_stream(stages, CacheRegime::Resident, 1).unwrap();
        assert!(one.score < 0.05, "{one:?}");
    }

    #[test]
    fn the_table_in_the_manual_is_up_to_date() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/manual/overlap.md");
        let kept = std::fs::read_to_string(page).unwrap();
        let block = kept.split("<!-- drill:sweep -->").nth(1).unwrap().split("<!-- /drill:sweep -->").next();
        let printed = sweep_markdown(&sweep_depths().unwrap());
        assert_eq!(block.unwrap().trim(), printed.trim(), "`tessera drill depth-sweep --markdown`");
    }
}
