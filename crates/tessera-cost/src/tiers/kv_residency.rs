//! A segmented KV cache over three tiers: residency policies, and the share of reads that hit each
//! tier.

use tessera_base::named_enum;
use tessera_base::random::Rng;

/// Returns the bytes by tier, in the order of [`tessera_mesh::MemoryTier::ALL`]: the newest fill device
/// memory up to `room`, older ones the memory of peers up to `peer_room`, and the oldest spill to
/// the host.
#[must_use]
pub fn spill_bytes(bytes: f64, room: f64, peer_room: f64) -> [f64; 3] {
    let near = bytes.min(room.max(0.0));
    let peer = (bytes - near).min(peer_room.max(0.0));
    [near, peer, bytes - near - peer]
}

/// Which segments of a growing KV cache each step reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SegmentReads {
    /// Seed of the order of popularity and of the sampled reads.
    pub seed: u64,
    /// Segments of the context before the first step.
    pub segments: usize,
    /// Number of steps to simulate; each reads its segments once.
    pub steps: usize,
    /// Number of steps that fill one more segment.
    pub steps_per_segment: usize,
    /// Number of newest segments that every step reads.
    pub recent: usize,
    /// Number of older segments that a step reads, sampled with popularity 1 / rank over a fixed
    /// random order; `None` reads all older ones (dense attention).
    pub older: Option<usize>,
}

named_enum! {
    /// Policy for the segments that stay in device memory.
    pub enum KvResidency {
        /// The newest segments, however often older ones are read.
        Window = "window",
        /// The most recently read segments.
        Lru = "lru",
        /// The most frequently read segments, with each count halved every 64 steps; the newest two
        /// always stay.
        Hotness = "hotness",
    }
}

/// Result of [`replay_reads`]: which memory tiers served the reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TierHits {
    /// Share of reads by tier, in the order of [`tessera_mesh::MemoryTier::ALL`]; the shares add up to 1.
    pub by_tier: [f64; 3],
}

impl TierHits {
    /// Returns the share of reads served from hot tiers: device memory, and the memory of peers if
    /// `peer` is set.
    #[must_use]
    pub fn hot_share(&self, peer: bool) -> f64 {
        self.by_tier[0] + if peer { self.by_tier[1] } else { 0.0 }
    }
}

/// Replays reads with `room` segments in device memory and `peer_room` in the memory of peers; the
/// rest lies on the host. A read of a segment outside device memory counts for the tier of the
/// segment; then the policy selects the resident segments again.
#[must_use]
pub fn replay_reads(reads: &SegmentReads, policy: KvResidency, room: usize, peer_room: usize) -> TierHits {
    let mut dice = Rng::new(reads.seed, [0x7365_676d, 0]);
    let most = reads.segments + reads.steps / reads.steps_per_segment.max(1) + 1;
    // A fixed random order of popularity, and the recent read count of each segment.
    let mut popular: Vec<usize> = (0..most).collect();
    for i in (1..most).rev() {
        popular.swap(i, dice.next_below(i + 1));
    }
    let mut state = SegmentState { last: vec![0; most], heat: vec![0.0; most], near: Vec::new() };
    state.select_resident(policy, reads.segments, room);
    let (mut found, mut wanted) = ([0u64; 3], Vec::new());
    for step in 0..reads.steps {
        let count = reads.segments + step / reads.steps_per_segment.max(1);
        wanted.clear();
        let old = count.saturating_sub(reads.recent);
        wanted.extend(old..count);
        match reads.older {
            None => wanted.extend(0..old),
            Some(n) => sample_segments(&mut dice, &popular, old, n, &mut wanted),
        }
        for s in &wanted {
            let at = match state.near.binary_search(s) {
                Ok(_) => 0,
                Err(_) => 1 + usize::from(state.rank_outside(*s, count) >= peer_room),
            };
            found[at] += 1;
            state.last[*s] = step + 1;
            state.heat[*s] += 1.0;
        }
        state.heat.iter_mut().for_each(|h| *h *= 0.5f64.powf(1.0 / 64.0));
        state.select_resident(
            policy,
            count + usize::from((step + 1) % reads.steps_per_segment.max(1) == 0),
            room,
        );
    }
    let all = found.iter().sum::<u64>().max(1) as f64;
    TierHits { by_tier: found.map(|f| f as f64 / all) }
}

struct SegmentState {
    last: Vec<usize>,
    heat: Vec<f64>,
    /// Segments in device memory, ascending.
    near: Vec<usize>,
}

impl SegmentState {
    fn select_resident(&mut self, policy: KvResidency, count: usize, room: usize) {
        let mut order: Vec<usize> = (0..count.min(self.last.len())).collect();
        match policy {
            KvResidency::Window => order.reverse(),
            KvResidency::Lru => order.sort_by(|a, b| self.last[*b].cmp(&self.last[*a]).then(b.cmp(a))),
            KvResidency::Hotness => order.sort_by(|a, b| {
                let fresh = |s: usize| s + 2 >= count;
                fresh(*b).cmp(&fresh(*a)).then(self.heat[*b].total_cmp(&self.heat[*a])).then(b.cmp(a))
            }),
        }
        order.truncate(room);
        order.sort_unstable();
        self.near = order;
    }

    /// Returns the number of newer segments that are outside device memory too; peers hold the
    /// newest of these.
    fn rank_outside(&self, segment: usize, count: usize) -> usize {
        let newer_near = self.near.len() - self.near.partition_point(|s| *s <= segment);
        (count - segment - 1).saturating_sub(newer_near)
    }
}

/// Adds up to `n` different segments below `old` to `wanted`, sampled with weight 1 / rank in the
/// order `popular`.
fn sample_segments(dice: &mut Rng, popular: &[usize], old: usize, n: usize, wanted: &mut Vec<usize>) {
    let from = wanted.len();
    let candidates: Vec<usize> = popular.iter().copied().filter(|s| *s < old).collect();
    let total: f64 = (1..=candidates.len()).map(|p| 1.0 / p as f64).sum();
    let mut tries = 0;
    while wanted.len() < from + n.min(candidates.len()) && tries < 64 * (n + 1) {
        tries += 1;
        let mut left = f64::from(dice.next_u32()) / 4_294_967_296.0 * total;
        let at = candidates.iter().enumerate().find_map(|(p, s)| {
            left -= 1.0 / (p as f64 + 1.0);
            (left < 0.0).then_some(*s)
        });
        wanted.extend(at.filter(|s| !wanted[from..].contains(s)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LONG: SegmentReads =
        SegmentReads { seed: 5, segments: 128, steps: 400, steps_per_segment: 16, recent: 8, older: Some(4) };

    #[test]
    fn policies_differ_on_a_long_context() {
        let hits = KvResidency::ALL.map(|p| replay_reads(&LONG, p, 48, 48));
        for (p, h) in KvResidency::ALL.iter().zip(&hits) {
            println!("{}: {h:?}", p.name());
            assert!((h.by_tier.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        }
        let [window, lru, hotness] = hits.map(|h| h.hot_share(false));
        // A window misses popular old segments; a policy that counts reads keeps them.
        assert!(window < lru && lru <= hotness, "{window} {lru} {hotness}");
        assert!(window < 0.85 && hotness >= 0.85);
        assert!(hits[0].hot_share(true) > window);
        // With room for all segments every read hits.
        assert_eq!(replay_reads(&LONG, KvResidency::Lru, 400, 0).by_tier, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn reading_everything_hits_what_is_there() {
        let all = SegmentReads { older: None, steps: 64, steps_per_segment: 1000, ..LONG };
        let hits = |p| replay_reads(&all, p, 64, 32).by_tier;
        // Half of the segments fit and a quarter lies with peers, independent of the policy.
        assert_eq!(hits(KvResidency::Window), [0.5, 0.25, 0.25]);
        assert!((hits(KvResidency::Hotness)[0] - 0.5).abs() < 0.01);
    }

    #[test]
    fn old_bytes_spill_outwards() {
        assert_eq!(spill_bytes(100.0, 60.0, 30.0), [60.0, 30.0, 10.0]);
        assert_eq!(spill_bytes(50.0, 60.0, 30.0), [50.0, 0.0, 0.0]);
        assert_eq!(spill_bytes(100.0, -5.0, 0.0), [0.0, 0.0, 100.0]);
    }
}
