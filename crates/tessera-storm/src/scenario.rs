//! A scenario: the run that a seed determines, with its configuration, its requests and the
//! injected events.

use std::collections::BTreeSet;

use tessera_base::random::Rng;
use tessera_runtime::Limits;
use tessera_runtime::director::{ChunkRequest, SceneCut};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::sim::ExternalEvent;

const MS: u64 = 1_000_000;

/// The configuration, the requests and the injected events of one simulated run.
#[derive(Debug, Clone, PartialEq)]
pub struct Scenario {
    /// Seed from which the scenario was generated.
    pub seed: u64,
    /// Number of ranks in the mesh; a leader outside of it is not counted.
    pub ranks: u32,
    /// Whether the leader runs outside the mesh.
    pub outside: bool,
    /// Whether a launcher started the processes.
    pub launcher: bool,
    /// How KV caches are filled: kept from chunk to chunk, or recomputed before each chunk.
    pub regime: CacheRegime,
    /// Requested chunks, in order, each with the number of its new prompt, if any.
    pub requests: Vec<(ChunkRequest, Option<u32>)>,
    /// Injected process events with their times in nanoseconds.
    pub external_events: Vec<(u64, ExternalEvent)>,
    /// Average number of frames per lost, duplicated or delayed frame; 0 disables these faults.
    pub frame_fault_period: u32,
    /// Rank and call in which the rank's engine never finishes a phase.
    pub stuck_call: Option<(u32, u64)>,
    /// Rank and call in which the rank is much slower than before, but makes progress.
    pub slow_call: Option<(u32, u64)>,
}

impl Scenario {
    /// Generates a scenario; equal seeds give equal scenarios.
    #[must_use]
    pub fn from_seed(seed: u64) -> Scenario {
        let mut dice = Rng::new(seed, [1, 0]);
        let outside = dice.next_ratio(1, 2);
        let ranks = 1 + dice.next_below(4) as u32;
        let launcher = dice.next_ratio(3, 4);
        let regime = if dice.next_ratio(1, 2) { CacheRegime::Resident } else { CacheRegime::Recompute };
        let chunks = 2 + dice.next_below(9);
        let requests = (0..chunks)
            .map(|k| {
                let prompt = (k == 0 || dice.next_ratio(1, 6)).then_some(k as u32 + 1);
                let cut = match dice.next_below(12) {
                    0 if k > 0 => SceneCut::Ordered,
                    1 if k > 0 => SceneCut::Flush,
                    _ => SceneCut::None,
                };
                (
                    ChunkRequest {
                        prompt_change: prompt.is_some(),
                        seed: dice.next_below(4) as u64,
                        cut,
                        ..ChunkRequest::default()
                    },
                    prompt,
                )
            })
            .collect();
        let mut case = Scenario {
            seed,
            ranks,
            outside,
            launcher,
            regime,
            requests,
            external_events: Vec::new(),
            frame_fault_period: 0,
            stuck_call: None,
            slow_call: None,
        };
        match dice.next_below(10) {
            // No fault; only the usual variation of delays.
            0 | 1 => {}
            2 => case.slow_call = Some((case.random_rank(&mut dice), 2 + dice.next_below(6) as u64)),
            3 => case.stuck_call = Some((case.random_rank(&mut dice), 1 + dice.next_below(6) as u64)),
            4 => case.frame_fault_period = [20, 60, 200][dice.next_below(3)],
            5 => case.external_events.push((case.random_time(&mut dice), ExternalEvent::Interrupt)),
            6 => case.add_short_stop(&mut dice),
            7 => {
                let blow = case.random_event(&mut dice);
                case.external_events.push((case.random_time(&mut dice), blow));
            }
            _ => {
                for _ in 0..1 + dice.next_below(3) {
                    let blow = case.random_event(&mut dice);
                    case.external_events.push((case.random_time(&mut dice), blow));
                }
                if dice.next_ratio(1, 3) {
                    case.frame_fault_period = 100;
                }
            }
        }
        case
    }

    /// Returns the runtime limits of every scenario.
    #[must_use]
    pub fn runtime_limits() -> Limits {
        Limits { hello_ns: 5_000 * MS, ..Limits::default() }
    }

    /// Returns the ranks from 0, including that of a leader outside the mesh.
    #[must_use]
    pub fn process_ranks(&self) -> Vec<u32> {
        (0..self.ranks + u32::from(self.outside)).collect()
    }

    /// Returns the ranks of the mesh: from 1 if the leader runs outside it, otherwise from 0.
    #[must_use]
    pub fn mesh_ranks(&self) -> Vec<u32> {
        (u32::from(self.outside)..self.ranks + u32::from(self.outside)).collect()
    }

    /// Returns whether the scenario contains no event that may end a run.
    #[must_use]
    pub fn is_harmless(&self) -> bool {
        let short = |b: &ExternalEvent| {
            matches!(b, ExternalEvent::Stop(_) | ExternalEvent::Continue(_) | ExternalEvent::Interrupt)
        };
        let blows = self.external_events.iter().all(|(_, b)| short(b));
        // A stop without a continue is harmful.
        let ends = |r: &u32| self.external_events.iter().any(|(_, b)| *b == ExternalEvent::Continue(*r));
        let stops = self
            .external_events
            .iter()
            .all(|(_, b)| if let ExternalEvent::Stop(r) = b { ends(r) } else { true });
        blows && stops && self.frame_fault_period == 0 && self.stuck_call.is_none()
    }

    /// Returns the rank that a run must blame, if the scenario has exactly one fault.
    #[must_use]
    pub fn expected_culprit(&self) -> Option<u32> {
        if self.frame_fault_period > 0 {
            return None;
        }
        match (&self.external_events[..], self.stuck_call) {
            ([], Some((rank, _))) => Some(rank),
            ([(_, ExternalEvent::Kill(rank) | ExternalEvent::Stop(rank))], None) => Some(*rank),
            _ => None,
        }
    }

    /// Returns the time within which every process must exit and the time from which it counts, in
    /// nanoseconds, if exactly one process was hit.
    #[must_use]
    pub fn exit_bound(&self) -> Option<(u64, u64)> {
        if self.frame_fault_period > 0 || self.stuck_call.is_some() {
            return None;
        }
        match self.external_events[..] {
            [(at_ns, ExternalEvent::Kill(_) | ExternalEvent::KillLauncher)] => Some((2_000 * MS, at_ns)),
            // Only a launcher ends a stopped process, and a leader without any message so far may
            // still be loading.
            [(at_ns, ExternalEvent::Stop(_))] if self.launcher && at_ns > 300 * MS => {
                Some((5_000 * MS, at_ns))
            }
            _ => None,
        }
    }

    fn random_rank(&self, dice: &mut Rng) -> u32 {
        u32::from(self.outside) + dice.next_below(self.ranks as usize) as u32
    }

    fn random_process(&self, dice: &mut Rng) -> u32 {
        dice.next_below(self.process_ranks().len()) as u32
    }

    fn random_time(&self, dice: &mut Rng) -> u64 {
        // Most runs finish within two seconds.
        dice.next_below(1_500) as u64 * MS + dice.next_below(1_000) as u64 * 1_000
    }

    /// Adds a stop that is shorter than every watchdog limit.
    fn add_short_stop(&mut self, dice: &mut Rng) {
        let rank = self.random_process(dice);
        let at = self.random_time(dice);
        self.external_events.push((at, ExternalEvent::Stop(rank)));
        self.external_events.push((at + dice.next_below(2_000) as u64 * MS, ExternalEvent::Continue(rank)));
    }

    fn random_event(&self, dice: &mut Rng) -> ExternalEvent {
        let rank = self.random_process(dice);
        match dice.next_below(8) {
            0..=2 => ExternalEvent::Kill(rank),
            3 | 4 => ExternalEvent::Stop(rank),
            5 if self.launcher => ExternalEvent::KillLauncher,
            6 if !self.launcher => {
                let side: BTreeSet<u32> =
                    self.process_ranks().into_iter().filter(|_| dice.next_ratio(1, 2)).collect();
                ExternalEvent::Partition(side)
            }
            _ => ExternalEvent::Kill(rank),
        }
    }
}
