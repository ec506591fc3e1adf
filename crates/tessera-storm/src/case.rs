//! What a seed is: the shape of a run, its requests, and what strikes it.

use std::collections::BTreeSet;

use tessera_base::random::Dice;
use tessera_runtime::Limits;
use tessera_runtime::cache::Regime;
use tessera_runtime::decide::{ChunkRequest, Cut};
use tessera_runtime::sim::Blow;

const MS: u64 = 1_000_000;

/// One run.
#[derive(Debug, Clone, PartialEq)]
pub struct Case {
    /// The seed that it is.
    pub seed: u64,
    /// Ranks of the mesh.
    pub ranks: u32,
    /// Whether the leader stands outside the mesh.
    pub outside: bool,
    /// Whether a launcher started the processes.
    pub launcher: bool,
    /// How the caches live.
    pub regime: Regime,
    /// Chunks that are wanted; a number for a new prompt.
    pub requests: Vec<(ChunkRequest, Option<u32>)>,
    /// What strikes processes, and when, in nanoseconds.
    pub blows: Vec<(u64, Blow)>,
    /// How often a frame is lost or doubled, once in so many; 0 for never.
    pub frames_hurt: u32,
    /// A rank whose engine never ends a phase of this call.
    pub stuck: Option<(u32, u64)>,
    /// A rank that is much slower than before in this call, and goes on.
    pub slow: Option<(u32, u64)>,
}

impl Case {
    /// The case of a seed.
    #[must_use]
    pub fn random(seed: u64) -> Case {
        let mut dice = Dice::new(seed, [1, 0]);
        let outside = dice.chance(1, 2);
        let ranks = 1 + dice.below(4) as u32;
        let launcher = dice.chance(3, 4);
        let regime = if dice.chance(1, 2) { Regime::Resident } else { Regime::Recompute };
        let chunks = 2 + dice.below(9);
        let requests = (0..chunks)
            .map(|k| {
                let prompt = (k == 0 || dice.chance(1, 6)).then_some(k as u32 + 1);
                let cut = match dice.below(12) {
                    0 if k > 0 => Cut::Ordered,
                    1 if k > 0 => Cut::Flush,
                    _ => Cut::None,
                };
                (ChunkRequest { prompt_change: prompt.is_some(), seed: dice.below(4) as u64, cut }, prompt)
            })
            .collect();
        let mut case = Case {
            seed,
            ranks,
            outside,
            launcher,
            regime,
            requests,
            blows: Vec::new(),
            frames_hurt: 0,
            stuck: None,
            slow: None,
        };
        match dice.below(10) {
            // Nothing, but for weather.
            0 | 1 => {}
            2 => case.slow = Some((case.some_rank(&mut dice), 2 + dice.below(6) as u64)),
            3 => case.stuck = Some((case.some_rank(&mut dice), 1 + dice.below(6) as u64)),
            4 => case.frames_hurt = [20, 60, 200][dice.below(3)],
            5 => case.blows.push((case.moment(&mut dice), Blow::Interrupt)),
            6 => case.short_stop(&mut dice),
            7 => {
                let blow = case.blow(&mut dice);
                case.blows.push((case.moment(&mut dice), blow));
            }
            _ => {
                for _ in 0..1 + dice.below(3) {
                    let blow = case.blow(&mut dice);
                    case.blows.push((case.moment(&mut dice), blow));
                }
                if dice.chance(1, 3) {
                    case.frames_hurt = 100;
                }
            }
        }
        case
    }

    /// Bounds of every case.
    #[must_use]
    pub fn limits() -> Limits {
        Limits { hello_ns: 5_000 * MS, ..Limits::default() }
    }

    /// Ranks of every process.
    #[must_use]
    pub fn processes(&self) -> Vec<u32> {
        (0..self.ranks + u32::from(self.outside)).collect()
    }

    /// Ranks of the mesh.
    #[must_use]
    pub fn mesh(&self) -> Vec<u32> {
        (u32::from(self.outside)..self.ranks + u32::from(self.outside)).collect()
    }

    /// Whether nothing was done to it that may end a run.
    #[must_use]
    pub fn harmless(&self) -> bool {
        let short = |b: &Blow| matches!(b, Blow::Stop(_) | Blow::Continue(_) | Blow::Interrupt);
        let blows = self.blows.iter().all(|(_, b)| short(b));
        // A stop without its end is harmful.
        let ends = |r: &u32| self.blows.iter().any(|(_, b)| *b == Blow::Continue(*r));
        let stops = self.blows.iter().all(|(_, b)| if let Blow::Stop(r) = b { ends(r) } else { true });
        blows && stops && self.frames_hurt == 0 && self.stuck.is_none()
    }

    /// The one rank that a run must blame, where only one thing was done to it.
    #[must_use]
    pub fn culprit(&self) -> Option<u32> {
        if self.frames_hurt > 0 {
            return None;
        }
        match (&self.blows[..], self.stuck) {
            ([], Some((rank, _))) => Some(rank),
            ([(_, Blow::Kill(rank) | Blow::Stop(rank))], None) => Some(*rank),
            _ => None,
        }
    }

    /// Within what time everything must be gone, and since when, where only one process was struck; nanoseconds.
    #[must_use]
    pub fn bound(&self) -> Option<(u64, u64)> {
        if self.frames_hurt > 0 || self.stuck.is_some() {
            return None;
        }
        match self.blows[..] {
            [(at_ns, Blow::Kill(_) | Blow::KillLauncher)] => Some((2_000 * MS, at_ns)),
            // Nobody but a launcher ends a stopped process, and a leader that has not spoken yet may be loading.
            [(at_ns, Blow::Stop(_))] if self.launcher && at_ns > 300 * MS => Some((5_000 * MS, at_ns)),
            _ => None,
        }
    }

    fn some_rank(&self, dice: &mut Dice) -> u32 {
        u32::from(self.outside) + dice.below(self.ranks as usize) as u32
    }

    fn some_process(&self, dice: &mut Dice) -> u32 {
        dice.below(self.processes().len()) as u32
    }

    fn moment(&self, dice: &mut Dice) -> u64 {
        // Most runs are over within two seconds.
        dice.below(1_500) as u64 * MS + dice.below(1_000) as u64 * 1_000
    }

    /// Shorter than any watchdog allows for.
    fn short_stop(&mut self, dice: &mut Dice) {
        let rank = self.some_process(dice);
        let at = self.moment(dice);
        self.blows.push((at, Blow::Stop(rank)));
        self.blows.push((at + dice.below(2_000) as u64 * MS, Blow::Continue(rank)));
    }

    fn blow(&self, dice: &mut Dice) -> Blow {
        let rank = self.some_process(dice);
        match dice.below(8) {
            0..=2 => Blow::Kill(rank),
            3 | 4 => Blow::Stop(rank),
            5 if self.launcher => Blow::KillLauncher,
            6 if !self.launcher => {
                let side: BTreeSet<u32> =
                    self.processes().into_iter().filter(|_| dice.chance(1, 2)).collect();
                Blow::Partition(side)
            }
            _ => Blow::Kill(rank),
        }
    }
}
