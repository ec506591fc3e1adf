//! Keys and values in segments over three tiers: who keeps which segment near, and how often a read finds it there.

use tessera_base::random::Dice;

/// Bytes by tier, in the order of [`tessera_mesh::Tier::ALL`]: the newest fill device memory up to its room, older ones
/// peers' up to theirs, the oldest lie on the host.
#[must_use]
pub fn spill(bytes: f64, room: f64, peer_room: f64) -> [f64; 3] {
    let near = bytes.min(room.max(0.0));
    let peer = (bytes - near).min(peer_room.max(0.0));
    [near, peer, bytes - near - peer]
}

/// Which segments a long context reads.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Reads {
    /// Seed of what is drawn.
    pub seed: u64,
    /// Segments of the context before the first step.
    pub segments: usize,
    /// Steps.
    pub steps: usize,
    /// Steps that fill one further segment.
    pub steps_per_segment: usize,
    /// Newest segments that every step reads.
    pub recent: usize,
    /// Older segments that a step reads, drawn by popularity 1 / place over a fixed random order; all older ones if
    /// absent (attention without a choice).
    pub older: Option<usize>,
}

/// Which segments stay in device memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Residency {
    /// The newest.
    Window,
    /// Those read last.
    Lru,
    /// Those read most, each count halved every 64 steps; the newest two stay in any case.
    Hotness,
}

impl Residency {
    /// All policies.
    pub const ALL: [Residency; 3] = [Residency::Window, Residency::Lru, Residency::Hotness];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["window", "lru", "hotness"][self as usize]
    }
}

/// Where reads found their segments.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CacheHits {
    /// Share of reads by tier, in the order of [`tessera_mesh::Tier::ALL`]; they add up to 1.
    pub by_tier: [f64; 3],
}

impl CacheHits {
    /// Share of reads served from the hot tiers: device memory, and peers' where `peer` says that it is hot.
    #[must_use]
    pub fn hot(&self, peer: bool) -> f64 {
        self.by_tier[0] + if peer { self.by_tier[1] } else { 0.0 }
    }
}

/// Replays reads over `room` segments of device memory and `peer_room` of peers; the rest lies on the host. A read of a
/// segment that is not in device memory counts where it lies; the policy then chooses anew what stays near.
#[must_use]
pub fn replay_cache(reads: &Reads, policy: Residency, room: usize, peer_room: usize) -> CacheHits {
    let mut dice = Dice::new(reads.seed, [0x7365_676d, 0]);
    let most = reads.segments + reads.steps / reads.steps_per_segment.max(1) + 1;
    // A fixed random order of popularity, and how much a segment was read of late.
    let mut popular: Vec<usize> = (0..most).collect();
    for i in (1..most).rev() {
        popular.swap(i, dice.below(i + 1));
    }
    let mut state = Segments { last: vec![0; most], heat: vec![0.0; most], near: Vec::new() };
    state.choose(policy, reads.segments, room);
    let (mut found, mut wanted) = ([0u64; 3], Vec::new());
    for step in 0..reads.steps {
        let count = reads.segments + step / reads.steps_per_segment.max(1);
        wanted.clear();
        let old = count.saturating_sub(reads.recent);
        wanted.extend(old..count);
        match reads.older {
            None => wanted.extend(0..old),
            Some(n) => draw(&mut dice, &popular, old, n, &mut wanted),
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
        state.choose(policy, count + usize::from((step + 1) % reads.steps_per_segment.max(1) == 0), room);
    }
    let all = found.iter().sum::<u64>().max(1) as f64;
    CacheHits { by_tier: found.map(|f| f as f64 / all) }
}

struct Segments {
    last: Vec<usize>,
    heat: Vec<f64>,
    /// In device memory, ascending.
    near: Vec<usize>,
}

impl Segments {
    fn choose(&mut self, policy: Residency, count: usize, room: usize) {
        let mut order: Vec<usize> = (0..count.min(self.last.len())).collect();
        match policy {
            Residency::Window => order.reverse(),
            Residency::Lru => order.sort_by(|a, b| self.last[*b].cmp(&self.last[*a]).then(b.cmp(a))),
            Residency::Hotness => order.sort_by(|a, b| {
                let fresh = |s: usize| s + 2 >= count;
                fresh(*b).cmp(&fresh(*a)).then(self.heat[*b].total_cmp(&self.heat[*a])).then(b.cmp(a))
            }),
        }
        order.truncate(room);
        order.sort_unstable();
        self.near = order;
    }

    /// How many newer segments are outside of device memory too: peers hold the newest of them.
    fn rank_outside(&self, segment: usize, count: usize) -> usize {
        let newer_near = self.near.len() - self.near.partition_point(|s| *s <= segment);
        (count - segment - 1).saturating_sub(newer_near)
    }
}

/// `n` different segments below `old`, by popularity.
fn draw(dice: &mut Dice, popular: &[usize], old: usize, n: usize, wanted: &mut Vec<usize>) {
    let from = wanted.len();
    let candidates: Vec<usize> = popular.iter().copied().filter(|s| *s < old).collect();
    let total: f64 = (1..=candidates.len()).map(|p| 1.0 / p as f64).sum();
    let mut tries = 0;
    while wanted.len() < from + n.min(candidates.len()) && tries < 64 * (n + 1) {
        tries += 1;
        let mut left = f64::from(dice.word()) / 4_294_967_296.0 * total;
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

    const LONG: Reads =
        Reads { seed: 5, segments: 128, steps: 400, steps_per_segment: 16, recent: 8, older: Some(4) };

    #[test]
    fn policies_differ_on_a_long_context() {
        let hits = Residency::ALL.map(|p| replay_cache(&LONG, p, 48, 48));
        for (p, h) in Residency::ALL.iter().zip(&hits) {
            println!("{}: {h:?}", p.name());
            assert!((h.by_tier.iter().sum::<f64>() - 1.0).abs() < 1e-9);
        }
        let [window, lru, hotness] = hits.map(|h| h.hot(false));
        // A window misses what is popular and old; who counts reads keeps it.
        assert!(window < lru && lru <= hotness, "{window} {lru} {hotness}");
        assert!(window < 0.85 && hotness >= 0.85);
        assert!(hits[0].hot(true) > window);
        // With room for all, everything hits.
        assert_eq!(replay_cache(&LONG, Residency::Lru, 400, 0).by_tier, [1.0, 0.0, 0.0]);
    }

    #[test]
    fn reading_everything_hits_what_is_there() {
        let all = Reads { older: None, steps: 64, steps_per_segment: 1000, ..LONG };
        let hits = |p| replay_cache(&all, p, 64, 32).by_tier;
        // Half the segments fit, a quarter lies with peers, whatever the policy.
        assert_eq!(hits(Residency::Window), [0.5, 0.25, 0.25]);
        assert!((hits(Residency::Hotness)[0] - 0.5).abs() < 0.01);
    }

    #[test]
    fn old_bytes_spill_outwards() {
        assert_eq!(spill(100.0, 60.0, 30.0), [60.0, 30.0, 10.0]);
        assert_eq!(spill(50.0, 60.0, 30.0), [50.0, 0.0, 0.0]);
        assert_eq!(spill(100.0, -5.0, 0.0), [0.0, 0.0, 100.0]);
    }
}
