//! Bytes of dispatch and combine, and the capacity that trades them against dropped rows.

use tessera_mesh::Precision;

use super::{Routing, expert_load};

/// Returns the bytes that one rank sends to others when it dispatches `tokens` tokens (its own, not
/// the group's) of `width` values to `copies` remote ranks each. Combine sends the same in the
/// reverse direction, at its own precision.
#[must_use]
pub fn dispatch_bytes(tokens: f64, width: u64, copies: f64, wire: Precision) -> f64 {
    tokens * copies * width as f64 * wire.wire_element_bytes()
}

/// Returns the full buffer of an all-to-all over `ep` ranks, own shard included, whose remote
/// shards have `remote` bytes.
#[must_use]
pub fn buffer_bytes(remote: f64, ep: u32) -> f64 {
    if ep > 1 { remote * f64::from(ep) / f64::from(ep - 1) } else { 0.0 }
}

/// Drops, receive buffer and slowest rank at one capacity.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CapacityPoint {
    /// Capacity in per cent of the even share.
    pub pct: u32,
    /// Share of assignments of a token to an expert that this capacity drops, 0 to 1.
    pub dropped: f64,
    /// Maximum bytes that a rank must be able to receive in one dispatch: full buffers of all its
    /// experts, as static shapes require.
    pub peak_bytes: f64,
    /// Rows that the slowest rank keeps, divided by the mean rows per rank before drops.
    pub slowest: f64,
}

/// Drops, receive buffer and slowest rank at many capacities, and the recommended capacity.
#[derive(Debug, Clone, PartialEq)]
pub struct CapacitySweep {
    /// Points from 100 to 200 per cent in steps of 5.
    pub points: Vec<CapacityPoint>,
    /// The smallest allowed point that drops few enough rows, or else the smallest that drops as
    /// few as the largest allowed.
    pub chosen: CapacityPoint,
    /// The largest allowed capacity, if `chosen` is smaller and drops as few rows.
    pub tied_pct: Option<u32>,
}

/// Sweeps the capacity and chooses the smallest within `allowed` per cent (the published guide: 110
/// to 130) that drops at most `most_dropped` of the assignments, or else the smallest that drops as
/// few as the largest allowed. More capacity costs buffers and network spikes in proportion, and
/// saves at most the dropped rows. `tokens` counts the tokens of all ranks of the group.
#[must_use]
pub fn tune_capacity(
    (count, top_k, ep): (u64, u64, u32),
    tokens: f64,
    (width, wire): (u64, Precision),
    routing: Routing,
    allowed: (u32, u32),
    most_dropped: f64,
) -> CapacitySweep {
    let even = tokens * top_k as f64 / count.max(1) as f64;
    let held = (count as f64 / f64::from(ep.max(1))).ceil();
    let point = |pct: u32| {
        let load = expert_load(count, top_k, ep, tokens, routing, pct);
        let rows = (even * f64::from(pct) / 100.0 - 1e-9).ceil() * held;
        CapacityPoint {
            pct,
            dropped: load.dropped,
            peak_bytes: dispatch_bytes(rows, width, 1.0, wire),
            slowest: load.slowest_over_mean * (1.0 - load.dropped),
        }
    };
    let (low, high) = (allowed.0.min(allowed.1), allowed.1.max(allowed.0));
    let sweep: Vec<CapacityPoint> = (100..=200).step_by(5).map(point).collect();
    let largest = point(high);
    // Where no capacity drops few enough, a smaller one that drops as few as the largest is cheaper.
    let enough = most_dropped.max(largest.dropped);
    let inside = sweep.iter().filter(|p| p.pct >= low && p.pct <= high);
    let chosen = inside.copied().find(|p| p.dropped <= enough).unwrap_or(largest);
    let tied_pct = (largest.pct > chosen.pct && chosen.dropped > most_dropped).then_some(largest.pct);
    CapacitySweep { points: sweep, chosen, tied_pct }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacity_stays_within_the_allowed_range() {
        let tune = |tokens, routing, allowed| {
            tune_capacity((256, 8, 8), tokens, (7168, Precision::Fp8), routing, allowed, 0.01)
        };
        // 1024 rows per expert vary by 3 %, so the smallest allowed capacity is enough. 32 rows
        // vary by 17 %, so it is not.
        assert_eq!(tune(32768.0, Routing::Random, (110, 130)).chosen.pct, 110);
        let small = tune(1024.0, Routing::Random, (110, 130)).chosen;
        assert!((115..=130).contains(&small.pct), "{small:?}");
        // A power law drops many rows at any allowed capacity, and the bound holds unless the
        // caller raises it.
        let skewed = tune(32768.0, Routing::PowerLaw(1.2), (110, 130));
        assert_eq!(skewed.chosen.pct, 130);
        assert!(skewed.chosen.dropped > 0.2);
        assert_eq!(tune(32768.0, Routing::PowerLaw(1.2), (110, 200)).chosen.pct, 200);
        // With one row each, every allowed capacity rounds up to two rows and drops equally.
        let tied = tune(32.0, Routing::PowerLaw(1.2), (110, 130));
        assert_eq!((tied.chosen.pct, tied.tied_pct), (110, Some(130)));
        assert!(tied.chosen.dropped > 0.01 && skewed.tied_pct.is_none());
        assert!(
            skewed
                .points
                .windows(2)
                .all(|w| w[1].dropped <= w[0].dropped && w[1].peak_bytes >= w[0].peak_bytes)
        );
    }

    #[test]
    fn dispatch_bytes_match_a_worked_example() {
        // 4096 tokens, 4.633 remote copies of 7168 values and a scale per 128: 140 MB; combined in
        // bf16, 272 MB.
        let load = expert_load(256, 8, 8, 32768.0, Routing::Random, 0);
        let out = dispatch_bytes(4096.0, 7168, load.remote_copies, Precision::Fp8);
        let back = dispatch_bytes(4096.0, 7168, load.remote_copies, Precision::Bf16);
        assert!((out / 140.3e6 - 1.0).abs() < 2e-3, "{out}");
        assert!((back / 272.1e6 - 1.0).abs() < 2e-3, "{back}");
        assert!((buffer_bytes(out, 8) - out * 8.0 / 7.0).abs() < 1.0);
    }
}
