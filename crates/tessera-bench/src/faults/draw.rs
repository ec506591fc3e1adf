//! What a campaign draws for each fault: layout, kind, victim and moment, all from its seed.

use std::time::Duration;

use tessera_base::random::Rng;

/// How the ranks of a run are arranged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Layout {
    /// Two ranks, of which rank 0 leads, with the strategy megatron.
    Megatron,
    /// The same with the strategy ulysses.
    Ulysses,
    /// A leader and one mesh rank.
    Pp0,
    /// A leader, the mesh leader and one member.
    Pp1,
    /// Two ranks, one for each pipeline stage.
    Stages,
    /// Two ranks that joined over TCP, without a launcher.
    Joined,
}

impl Layout {
    pub const ALL: [Layout; 6] =
        [Layout::Megatron, Layout::Ulysses, Layout::Pp0, Layout::Pp1, Layout::Stages, Layout::Joined];

    pub fn name(self) -> &'static str {
        match self {
            Layout::Megatron => "tp=2 megatron",
            Layout::Ulysses => "tp=2 ulysses",
            Layout::Pp0 => "pp0",
            Layout::Pp1 => "pp1 tp=2",
            Layout::Stages => "pp=2",
            Layout::Joined => "tcp tp=2",
        }
    }

    /// Returns mesh, topology and strategy as the command line takes them.
    pub fn mapping_flags(self) -> [&'static str; 3] {
        match self {
            Layout::Megatron | Layout::Joined => ["tp=2", "mesh", "megatron"],
            Layout::Ulysses => ["tp=2", "mesh", "ulysses"],
            Layout::Pp0 => ["tp=1", "pp0", "megatron"],
            Layout::Pp1 => ["tp=2", "pp1", "megatron"],
            Layout::Stages => ["pp=2", "mesh", "megatron"],
        }
    }

    /// Returns the number of ranks.
    pub fn rank_count(self) -> u32 {
        if self == Layout::Pp1 { 3 } else { 2 }
    }

    /// Returns the first rank that computes.
    fn first_mesh_rank(self) -> u32 {
        u32::from(matches!(self, Layout::Pp0 | Layout::Pp1))
    }
}

/// A fault that the campaign injects from outside, or arms in a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, clap::ValueEnum)]
pub enum FaultKind {
    /// SIGKILL of a rank
    Kill,
    /// SIGSTOP of a rank
    Stop,
    /// SIGSTOP of a rank, and SIGCONT before the deadline
    Pause,
    /// SIGKILL of the launcher
    KillLauncher,
    /// SIGSTOP of the launcher
    StopLauncher,
    /// SIGSTOP of the launcher and of a rank
    StopLauncherAndRank,
    /// Shut every TCP connection of a rank
    CutClosed,
    /// Take the link between two hosts (network namespaces) down
    CutDown,
    /// Drop all packets between two hosts
    CutSilent,
    /// Freeze the file system of the run folder for a time below the deadline
    SlowDisk,
    /// Flip one bit of a weight in memory
    FlippedWeight,
    /// Flip one bit of a cache in memory
    FlippedCache,
}

impl FaultKind {
    pub const ALL: [FaultKind; 12] = [
        FaultKind::Kill,
        FaultKind::Stop,
        FaultKind::Pause,
        FaultKind::KillLauncher,
        FaultKind::StopLauncher,
        FaultKind::StopLauncherAndRank,
        FaultKind::CutClosed,
        FaultKind::CutDown,
        FaultKind::CutSilent,
        FaultKind::SlowDisk,
        FaultKind::FlippedWeight,
        FaultKind::FlippedCache,
    ];

    pub fn name(self) -> &'static str {
        match self {
            FaultKind::Kill => "kill a rank",
            FaultKind::Stop => "stop a rank",
            FaultKind::Pause => "pause a rank",
            FaultKind::KillLauncher => "kill the launcher",
            FaultKind::StopLauncher => "stop the launcher",
            FaultKind::StopLauncherAndRank => "stop launcher and rank",
            FaultKind::CutClosed => "close the connections",
            FaultKind::CutDown => "take the link down",
            FaultKind::CutSilent => "drop all packets",
            FaultKind::SlowDisk => "freeze the disk",
            FaultKind::FlippedWeight => "flip a bit of a weight",
            FaultKind::FlippedCache => "flip a bit of a cache",
        }
    }

    /// Whether the fault concerns the link of two joined ranks.
    pub fn cuts_link(self) -> bool {
        matches!(self, FaultKind::CutClosed | FaultKind::CutDown | FaultKind::CutSilent)
    }

    /// Whether the link is one between network namespaces.
    pub fn needs_namespaces(self) -> bool {
        matches!(self, FaultKind::CutDown | FaultKind::CutSilent)
    }

    /// Whether the run must complete in spite of the fault.
    pub fn is_harmless(self) -> bool {
        matches!(self, FaultKind::Pause | FaultKind::StopLauncher | FaultKind::SlowDisk)
    }

    /// Whether the fault is armed in the rank and not applied from outside.
    pub fn is_armed(self) -> bool {
        matches!(self, FaultKind::FlippedWeight | FaultKind::FlippedCache)
    }

    /// How often the kind is drawn, relative to the other kinds that a layout allows.
    fn draw_weight(self) -> usize {
        match self {
            FaultKind::Kill | FaultKind::Stop | FaultKind::Pause => 3,
            FaultKind::FlippedWeight | FaultKind::FlippedCache => 2,
            _ => 1,
        }
    }

    fn applies_to(self, layout: Layout) -> bool {
        let concerns_launcher = matches!(
            self,
            FaultKind::KillLauncher | FaultKind::StopLauncher | FaultKind::StopLauncherAndRank
        );
        match layout {
            Layout::Joined => !concerns_launcher,
            _ => !self.cuts_link(),
        }
    }
}

/// When the fault is applied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Moment {
    /// This long after all rank processes exist.
    StartUp(Duration),
    /// This long after this many chunks are on disk.
    Running(u64, Duration),
    /// When the rank begins this call.
    Call(u64),
}

/// One fault of a campaign.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DrawnFault {
    /// Number of the fault in its campaign.
    pub number: u32,
    pub layout: Layout,
    pub kind: FaultKind,
    /// The rank that the fault hits; also drawn for faults that hit no rank.
    pub rank: u32,
    pub moment: Moment,
    /// Duration of a pause or of a frozen disk.
    pub duration: Duration,
    /// Selects the place of a flipped bit.
    pub place: u32,
}

/// Maximum time from the existence of all processes to a fault at the start-up, in milliseconds.
const MAX_START_MS: usize = 800;
/// Maximum time from a chunk to the fault in milliseconds: longer than a chunk takes.
const MAX_DELAY_MS: usize = 300;
/// Bounds of a pause in milliseconds. A rank counts as stopped after 3 s.
const PAUSE_MS: [usize; 2] = [100, 2500];
/// Share of faults at the start-up.
const START_SHARE: (usize, usize) = (1, 5);
/// First call in which a bit is flipped; 1 is the warm-up.
const FIRST_CALL: usize = 3;

impl DrawnFault {
    /// Draws the fault `number` of a campaign among `kinds`. The same arguments give the same fault.
    ///
    /// # Panics
    /// Panics if no layout allows any of `kinds`.
    pub fn from_seed(seed: u64, number: u32, kinds: &[FaultKind]) -> DrawnFault {
        let mut rng = Rng::new(seed, [number, 0]);
        let suited = |layout: Layout| kinds.iter().copied().filter(move |k| k.applies_to(layout));
        let layouts: Vec<Layout> = Layout::ALL.into_iter().filter(|l| suited(*l).next().is_some()).collect();
        let layout = rng.pick_one(&layouts);
        let urn: Vec<FaultKind> = suited(layout).flat_map(|k| vec![k; k.draw_weight()]).collect();
        let kind = rng.pick_one(&urn);
        let first = if kind.is_armed() { layout.first_mesh_rank() } else { 0 };
        let rank = first + rng.next_below((layout.rank_count() - first) as usize) as u32;
        let ms = |n: usize| Duration::from_millis(n as u64);
        // A cut before the ranks have met is a rendezvous that times out, which is no detection. A
        // rank that is stopped before its first heartbeat may still be loading, unless a launcher
        // sees its process.
        let unseen = kind == FaultKind::Stop && layout == Layout::Joined;
        let may_start = !(kind.cuts_link() || unseen || kind == FaultKind::StopLauncherAndRank);
        let moment = if kind.is_armed() {
            Moment::Call((FIRST_CALL + rng.next_below(6)) as u64)
        } else if rng.next_ratio(START_SHARE.0, START_SHARE.1) && may_start {
            Moment::StartUp(ms(rng.next_below(MAX_START_MS)))
        } else {
            Moment::Running(1 + rng.next_below(4) as u64, ms(rng.next_below(MAX_DELAY_MS)))
        };
        let duration = ms(PAUSE_MS[0] + rng.next_below(PAUSE_MS[1] - PAUSE_MS[0]));
        DrawnFault { number, layout, kind, rank, moment, duration, place: rng.next_u32() }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn a_seed_draws_every_kind_in_every_layout_that_allows_it() {
        let draw = |n| DrawnFault::from_seed(1, n, &FaultKind::ALL);
        assert_eq!(draw(17), draw(17));
        let drawn: BTreeSet<_> = (0..2000).map(|n| (draw(n).layout, draw(n).kind)).collect();
        for layout in Layout::ALL {
            for kind in FaultKind::ALL {
                assert_eq!(drawn.contains(&(layout, kind)), kind.applies_to(layout), "{layout:?} {kind:?}");
            }
        }
    }

    #[test]
    fn a_flipped_bit_is_on_a_rank_that_computes() {
        for n in 0..500 {
            let f = DrawnFault::from_seed(2, n, &[FaultKind::FlippedCache]);
            assert!(
                f.rank < f.layout.rank_count() && (f.rank > 0 || f.layout.first_mesh_rank() == 0),
                "{f:?}"
            );
        }
    }
}
