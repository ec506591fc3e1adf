//! Prefetch of the bytes of later layers on a separate stream while earlier layers compute.

/// Compute and fetch times of one layer on one rank. The compute is split where it first needs the
/// fetched bytes.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct LayerTimes {
    /// Computation before the fetched bytes are needed (attention before experts; projections
    /// before old keys).
    pub before_ns: f64,
    /// Computation that needs the fetched bytes.
    pub after_ns: f64,
    /// Time to fetch the layer's bytes, without any wait for free memory or for earlier fetches.
    pub fetch_ns: f64,
}

/// The time of one pass, which computes all layers once in order. The pass is in steady state: the
/// previous pass has already prefetched its first layers.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefetchResult {
    /// Number of layers whose fetched bytes fit at once, including the layer that computes; 0
    /// fetches on demand.
    pub window: usize,
    /// Time that computation waits for fetches.
    pub stall_ns: f64,
    /// Time of the pass, including waits.
    pub pass_ns: f64,
}

/// Simulates the layers with room for the bytes of `window` layers. Fetches run one after another
/// in order of layers; a fetch starts as soon as there is room, and a layer frees its room when it
/// ends.
#[must_use]
pub fn simulate_prefetch(layers: &[LayerTimes], window: usize) -> PrefetchResult {
    let n = layers.len();
    // Fetches slower than computation accumulate over passes; from the third pass on the waits
    // repeat.
    let passes = 3;
    let mut ends: Vec<f64> = Vec::with_capacity(n * passes);
    let (mut now, mut fetched, mut stall, mut pass_start) = (0.0f64, 0.0f64, 0.0, 0.0);
    for i in 0..n * passes {
        if i + n == n * passes {
            (stall, pass_start) = (0.0, now);
        }
        let l = &layers[i % n];
        let needed = now + l.before_ns;
        let room = match window {
            0 => needed,
            w if i < w => 0.0,
            w => ends[i - w],
        };
        fetched = fetched.max(room) + l.fetch_ns;
        let start = if l.fetch_ns > 0.0 { needed.max(fetched) } else { needed };
        stall += start - needed;
        now = start + l.after_ns;
        ends.push(now);
    }
    PrefetchResult { window, stall_ns: stall, pass_ns: now - pass_start }
}

/// Returns the smallest window up to `most` whose pass time is within a thousandth of the shortest.
/// A larger window costs memory.
#[must_use]
pub fn choose_window(layers: &[LayerTimes], most: usize) -> PrefetchResult {
    let all: Vec<PrefetchResult> = (1..=most.max(1)).map(|w| simulate_prefetch(layers, w)).collect();
    let least = all.iter().fold(f64::INFINITY, |m, p| m.min(p.pass_ns));
    all.iter().find(|p| p.pass_ns <= least * 1.001).copied().unwrap_or_else(|| simulate_prefetch(layers, 1))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 100 MB of cold experts per layer at 200 GB/s, the rate of one device reading from Grace
    /// while its neighbour reads too.
    fn reference() -> Vec<LayerTimes> {
        vec![LayerTimes { before_ns: 300e3, after_ns: 300e3, fetch_ns: 100e6 / 200.0 }; 24]
    }

    #[test]
    fn window_of_two_hides_every_fetch() {
        let stall = |window| simulate_prefetch(&reference(), window).stall_ns;
        // With one layer, a fetch of 500 µs overlaps only the 300 µs before the experts.
        assert!((stall(1) - 24.0 * 200e3).abs() < 1.0, "{}", stall(1));
        assert_eq!((stall(2), stall(3)), (0.0, 0.0));
        assert!((stall(0) - 24.0 * 500e3).abs() < 1.0);
        assert_eq!(choose_window(&reference(), 3).window, 2);
    }

    #[test]
    fn a_third_layer_evens_out_fetches_that_vary() {
        let mut layers = reference();
        for (i, l) in layers.iter_mut().enumerate() {
            l.fetch_ns = if i % 4 < 2 { 950e3 } else { 150e3 };
        }
        let stall = |window| simulate_prefetch(&layers, window).stall_ns;
        assert!(stall(1) > stall(2) && stall(2) > stall(3) && stall(3) == 0.0, "{} {}", stall(2), stall(3));
        assert_eq!(choose_window(&layers, 3).window, 3);
    }

    #[test]
    fn no_window_hides_more_than_there_is() {
        let layers: Vec<LayerTimes> =
            reference().iter().map(|l| LayerTimes { fetch_ns: 900e3, ..*l }).collect();
        let p = simulate_prefetch(&layers, 3);
        // Bound by the fetches: 900 µs per layer instead of 600.
        assert!((p.pass_ns - 24.0 * 900e3).abs() < 1e-3 * p.pass_ns, "{p:?}");
    }
}
