//! Every drill: what it breaks, where it runs, and what must be seen of it.

use std::fmt::Write as _;

use tessera_runtime::Place;
use tessera_runtime::drill::{Armed, Fault};

use crate::{Strategy, Topology};

/// How a fault must show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Signature {
    /// Code of the one failure of the run.
    pub code: &'static str,
    /// The rank that it names, where one departed.
    pub rank: Option<u32>,
    /// Where it was found.
    pub place: Place,
}

impl std::fmt::Display for Signature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.code, rank_words(self.rank), self.place.words())
    }
}

/// `rank 1`, or `no rank`.
pub(super) fn rank_words(rank: Option<u32>) -> String {
    rank.map_or("no rank".to_string(), |r| format!("rank {r}"))
}

/// How a drill is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// A stream over processes with a fault armed.
    Stream,
    /// The same under a launcher that is killed.
    Orphans,
    /// Two processes that meet over TCP, one without the secret.
    Strangers,
    /// A measurement with gates.
    Measured,
}

/// One break-it test.
#[derive(Debug, Clone, Copy)]
pub struct Drill {
    /// Name on the command line.
    pub id: &'static str,
    /// What is broken, in a few words.
    pub what: &'static str,
    /// How it is run.
    pub way: Way,
    /// The fault; none for a measurement.
    pub fault: Option<Fault>,
    /// Rank that has the fault.
    pub rank: u32,
    /// Call in which it strikes: 1 is the warm-up, the first chunk has 2.
    pub call: u64,
    /// Where the leader stands.
    pub topology: Topology,
    /// How tp cuts a block.
    pub strategy: Strategy,
    /// Whether the context is recomputed before each chunk.
    pub recompute: bool,
    /// Chunk before which the scene is cut.
    pub cut: Option<u32>,
    /// What must be seen; none for a measurement.
    pub expect: Option<Signature>,
    /// From the fault to the end of the last process, in milliseconds.
    pub limit_ms: u64,
    /// Stem of the manual's page.
    pub page: &'static str,
}

impl Drill {
    /// What is armed.
    #[must_use]
    pub fn armed(&self) -> Option<Armed> {
        self.fault.map(|fault| Armed { fault, rank: self.rank, call: self.call })
    }

    /// The drill of a name.
    #[must_use]
    pub fn find(id: &str) -> Option<&'static Drill> {
        DRILLS.iter().find(|d| d.id == id)
    }
}

/// Most faults end within this.
const LIMIT_MS: u64 = 3_000;

const fn drill(
    fault: Fault,
    what: &'static str,
    code: &'static str,
    place: Place,
    page: &'static str,
) -> Drill {
    Drill {
        id: fault.name(),
        what,
        way: Way::Stream,
        fault: Some(fault),
        rank: 1,
        call: 4,
        topology: Topology::Mesh,
        strategy: Strategy::Ulysses,
        recompute: false,
        cut: None,
        expect: Some(Signature { code, rank: Some(1), place }),
        limit_ms: LIMIT_MS,
        page,
    }
}

impl Drill {
    const fn at(self, rank: u32, call: u64) -> Drill {
        let expect = match self.expect {
            Some(s) => Some(Signature { rank: Some(rank), ..s }),
            None => None,
        };
        Drill { rank, call, expect, ..self }
    }

    /// No rank departed: the request or the launch did.
    const fn nobody(self) -> Drill {
        let expect = match self.expect {
            Some(s) => Some(Signature { rank: None, ..s }),
            None => None,
        };
        Drill { expect, ..self }
    }

    const fn over(self, topology: Topology) -> Drill {
        Drill { topology, ..self }
    }

    const fn cut_at(self, chunk: u32) -> Drill {
        Drill { cut: Some(chunk), ..self }
    }
}

const fn measured(id: &'static str, what: &'static str) -> Drill {
    let like = drill(Fault::UnboundedOutput, what, "", Place::Leader, "overlap");
    Drill { id, way: Way::Measured, fault: None, expect: None, limit_ms: 30_000, ..like }
}

/// Every drill, in the order of the manual's pages.
#[rustfmt::skip]
pub static DRILLS: &[Drill] = {
    use Place::{Init, Leader, MeshLeader, Worker};
    use Topology::Pp1;
    const CONTROL: &str = "control-plane";
    const GROUPS: &str = "groups";
    const OVERLAP: &str = "overlap";
    const KV: &str = "kv";
    const SHUTDOWN: &str = "shutdown";
    const SAME: &str = "determinism";
    const REPLAY: &str = "replay";
    &[
        drill(Fault::UnserialisableMeta, "the leader's meta does not fit a frame", "T0703", Leader, CONTROL).at(0, 4).nobody(),
        drill(Fault::UnsupportedDtype, "the text comes in a dtype that no program reads", "T0735", Leader, CONTROL).at(0, 2).nobody(),
        drill(Fault::MissingTensor, "the text does not come", "T0735", Leader, CONTROL).at(0, 2).nobody(),
        drill(Fault::OtherVersion, "a rank is sent an envelope of another version", "T0701", Worker, CONTROL),
        drill(Fault::OtherPlan, "a rank is sent an envelope of another plan", "T0731", Worker, CONTROL),
        drill(Fault::UnlistedTensor, "a frame with bytes that its manifest does not list", "T0706", Worker, CONTROL),
        drill(Fault::OtherPlanAtInit, "a rank holds another plan", "T0740", Init, CONTROL),
        drill(Fault::ArmedAlone, "a rank has a fault armed that the others do not know of", "T0740", Init, CONTROL),
        Drill { way: Way::Strangers, limit_ms: 5_000, ..drill(Fault::WrongSecret, "a peer without the secret of the run", "T0756", Init, CONTROL) },
        drill(Fault::OneCallMore, "a rank makes one generator pass more", "T0747", Worker, GROUPS),
        drill(Fault::OneCallLess, "a rank makes one generator pass less", "T0747", Worker, GROUPS),
        drill(Fault::ConditionalCollective, "a rank skips a collective behind a flag", "T0751", Worker, GROUPS).at(1, 1),
        drill(Fault::AdHocBroadcast, "a rank adds a broadcast that nobody planned", "T0751", Worker, GROUPS).at(1, 1),
        drill(Fault::WrongGroup, "a rank issues a collective over another group", "T0751", Worker, GROUPS).at(1, 1),
        drill(Fault::WrongShape, "a rank brings another shape to a collective", "T0751", Worker, GROUPS).at(1, 1),
        drill(Fault::GroupOrder, "a rank made its groups in another order", "T0757", Init, GROUPS),
        drill(Fault::RelayRefuses, "an envelope is damaged before the mesh leader sees it", "T0755", MeshLeader, GROUPS).over(Pp1),
        drill(Fault::UnboundedOutput, "a slow consumer, and d_out without a bound", "T0741", Leader, OVERLAP).at(0, 1),
        measured("depth-sweep", "queues of 1, 2, 3 and 4 places with the same stages"),
        measured("overlap-signature", "modelled stages on processes, 2 places and 1"),
        measured("recompute-coupling", "decode in full before the context, the anchor first, no coupling"),
        drill(Fault::StaleResult, "a result names an epoch that is over", "T0736", Leader, OVERLAP).cut_at(2),
        drill(Fault::ResetOnOne, "a rank's caches are reset in the middle of a scene", "T0747", Worker, KV),
        drill(Fault::StartSkew, "a rank is sent another start frame", "T0712", Worker, KV),
        Drill { recompute: true, ..drill(Fault::RecomputeWithoutContext, "the context message comes without the context", "T0735", Worker, KV) },
        drill(Fault::LateAfterReset, "a result of before the cut arrives once more after it", "T0736", Leader, KV).at(1, 3).cut_at(2),
        drill(Fault::LeaderDies, "the leader is killed after the envelope was received", "T0742", Worker, SHUTDOWN).at(0, 4),
        drill(Fault::MeshLeaderDies, "the mesh leader is killed", "T0742", Leader, SHUTDOWN).over(Pp1),
        drill(Fault::MemberDies, "a rank is killed", "T0742", Leader, SHUTDOWN),
        Drill { way: Way::Orphans, ..drill(Fault::OrphanedWorker, "the launcher is killed", "T0749", Leader, SHUTDOWN).nobody() },
        drill(Fault::StoppedRank, "a rank is stopped", "T0743", Leader, SHUTDOWN),
        drill(Fault::StuckInLibrary, "an engine never comes back and ignores its abort", "T0743", Leader, SHUTDOWN),
        drill(Fault::StuckKernel, "a kernel never ends", "T0743", Leader, SHUTDOWN),
        drill(Fault::PerturbedInput, "one bit of an input differs on a rank", "T0759", Leader, SAME).at(1, 2),
        drill(Fault::MutatedWeight, "a weight changes in a rank's memory", "T0754", Worker, SAME),
        Drill { strategy: Strategy::Megatron, ..drill(Fault::WrongShard, "a rank loads the shards of another", "T0754", Init, SAME) },
        drill(Fault::OtherOutput, "a rank computes something else", "T0744", Leader, SAME),
        drill(Fault::PrivateReload, "a rank loads weights by itself", "T0737", Worker, SAME),
        drill(Fault::ProgramSet, "a rank holds another set of programs", "T0740", Init, SAME),
        drill(Fault::CapturedOnOne, "a rank alone captured a region", "T0740", Init, SAME),
        drill(Fault::EffectiveBackend, "a rank resolved another backend", "T0740", Init, SAME),
        drill(Fault::SkippedWarmUp, "a rank did not warm up a program", "T0753", Leader, SAME).at(1, 1),
        drill(Fault::NewProgram, "a rank runs a program first after the warm-up", "T0752", Leader, SAME).at(1, 1),
        drill(Fault::RepeatedCall, "a rank is sent an envelope twice", "T0730", Worker, REPLAY),
        drill(Fault::LostCall, "an envelope never comes to a rank", "T0730", Worker, REPLAY),
        drill(Fault::SecondCommit, "a rank is sent a commit twice", "T0746", Worker, REPLAY),
    ]
};

/// The table as a page of the reference.
#[must_use]
pub fn reference() -> String {
    let mut out = String::from(
        "# Drills\n\n\
         Printed by `tessera drill --list --markdown`; do not edit. `tessera drill` runs all of them on this machine, \
         `tessera drill ID...` some.\n\n\
         A drill streams over real processes with one fault armed, and passes when the run ends within the limit, with \
         this code, naming this rank, found at this place, and no process is left. The fault is a parity key that every \
         rank announces. Measurements have gates instead of a code.\n\n\
         | id | code | rank | place | what | limit | page |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for d in DRILLS {
        let (code, rank, place) = match &d.expect {
            Some(s) => {
                let rank = s.rank.map_or("—".to_string(), |r| r.to_string());
                (s.code, rank, s.place.words())
            }
            None => ("—", "—".to_string(), "—"),
        };
        let (id, what, page, seconds) = (d.id, d.what, d.page, d.limit_ms / 1000);
        // Writing to a String does not fail.
        let _ = writeln!(
            out,
            "| `{id}` | {code} | {rank} | {place} | {what} | {seconds} s | [{page}](../manual/{page}.md) |"
        );
    }
    out
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::collections::BTreeSet;

    use tessera_runtime::TRIPWIRES;

    use super::*;

    #[test]
    fn ids_are_unique_and_every_fault_has_its_drill() {
        let ids: BTreeSet<_> = DRILLS.iter().map(|d| d.id).collect();
        assert_eq!(ids.len(), DRILLS.len());
        for fault in Fault::ALL {
            let drill = Drill::find(fault.name()).unwrap_or_else(|| panic!("{} has no drill", fault.name()));
            assert_eq!(drill.fault, Some(*fault));
        }
    }

    #[test]
    fn every_expectation_is_a_tripwire_at_one_of_its_places() {
        for (d, s) in DRILLS.iter().filter_map(|d| Some((d, d.expect?))) {
            let wire = TRIPWIRES.iter().find(|t| t.code.id == s.code);
            let wire = wire.unwrap_or_else(|| panic!("{}: {} is no tripwire", d.id, s.code));
            assert!(
                wire.places.contains(&s.place),
                "{}: {} is not raised at the {}",
                d.id,
                s.code,
                s.place.words()
            );
        }
    }

    #[test]
    fn the_reference_is_what_the_table_says() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/drills.md");
        let kept = std::fs::read_to_string(page).unwrap();
        assert!(kept == reference(), "run `tessera drill --list --markdown > docs/reference/drills.md`");
    }
}
