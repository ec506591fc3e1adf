//! The table of drills: the fault that each drill injects, its placement, and the expected failure.

use std::fmt::Write as _;

use tessera_runtime::CheckSite;
use tessera_runtime::drill::{ArmedFault, DrillFault};

use tessera::{MediaPlacement, Strategy, Topology};

/// The expected failure of a drill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FailureSignature {
    /// Code of the single failure of the run.
    pub code: &'static str,
    /// The rank that the failure names, or `None` if no rank deviated.
    pub rank: Option<u32>,
    /// The site of the check that must find the failure.
    pub site: CheckSite,
}

impl std::fmt::Display for FailureSignature {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} {} {}", self.code, rank_label(self.rank), self.site.as_str())
    }
}

/// Formats a rank as `rank 1`, or its absence as `no rank`.
pub(super) fn rank_label(rank: Option<u32>) -> String {
    rank.map_or("no rank".to_string(), |r| format!("rank {r}"))
}

/// The kind of a drill, which determines how it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrillKind {
    /// A stream over processes with an armed fault.
    Stream,
    /// Texts of the minimal language model over processes with an armed fault.
    Text,
    /// A stream whose launcher is a separate process, which the drill kills.
    OrphanedRanks,
    /// Two processes that connect over TCP, one of them with the wrong secret.
    WrongSecret,
    /// A measurement without a fault, which passes if all of its gates pass.
    Measurement,
}

/// The model that a drill streams.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DrillModel {
    /// The smallest generator, with a word table and without pixels; the command line may name another.
    Generator,
    /// The same generator with a UMT5 text encoder and a causal VAE.
    WithMedia,
}

/// A test that injects one fault and checks how the run fails, or a measurement with gates.
#[derive(Debug, Clone, Copy)]
pub struct Drill {
    /// Name on the command line.
    pub id: &'static str,
    /// The injected fault in a few words.
    pub description: &'static str,
    /// Which processes the drill runs, or that the drill only measures.
    pub kind: DrillKind,
    /// The armed fault; `None` for a measurement.
    pub fault: Option<DrillFault>,
    /// The model that the drill streams.
    pub model: DrillModel,
    /// The rank on which the fault is armed; it has no effect in a measurement.
    pub rank: u32,
    /// The call in which the fault fires: the warm-up is 1, the first chunk is 2.
    pub call: u64,
    /// The mesh, of one rank for [`Topology::Pp0`] and of two ranks otherwise.
    pub mesh: &'static str,
    /// Placement of the leader.
    pub topology: Topology,
    /// How tensor parallelism splits a block.
    pub strategy: Strategy,
    /// Whether the context is recomputed before each chunk.
    pub recompute: bool,
    /// Where the pixels are computed.
    pub media: MediaPlacement,
    /// The chunk before which the scene is cut.
    pub cut_before: Option<u32>,
    /// The expected failure; `None` for a measurement.
    pub expected: Option<FailureSignature>,
    /// Maximum time from the fault to the end of the last process, in milliseconds.
    pub limit_ms: u64,
    /// File stem of the manual page.
    pub page: &'static str,
}

impl Drill {
    /// Returns the armed fault with its rank and call.
    #[must_use]
    pub fn armed_fault(&self) -> Option<ArmedFault> {
        self.fault.map(|fault| ArmedFault { fault, rank: self.rank, call: self.call })
    }

    /// Returns the drill with this name.
    #[must_use]
    pub fn find(id: &str) -> Option<&'static Drill> {
        DRILLS.iter().find(|d| d.id == id)
    }
}

/// Default time limit of a drill in milliseconds.
const LIMIT_MS: u64 = 3_000;

/// The usual mesh, whose ranks share one communicator.
pub(super) const TWO_RANKS: &str = "tp=2";

const fn stream_drill(
    fault: DrillFault,
    what: &'static str,
    code: &'static str,
    place: CheckSite,
    page: &'static str,
) -> Drill {
    Drill {
        id: fault.name(),
        description: what,
        kind: DrillKind::Stream,
        fault: Some(fault),
        model: DrillModel::Generator,
        rank: 1,
        call: 4,
        mesh: TWO_RANKS,
        topology: Topology::Mesh,
        strategy: Strategy::Ulysses,
        recompute: false,
        media: MediaPlacement::Leader,
        cut_before: None,
        expected: Some(FailureSignature { code, rank: Some(1), site: place }),
        limit_ms: LIMIT_MS,
        page,
    }
}

impl Drill {
    const fn armed_at(self, rank: u32, call: u64) -> Drill {
        let expect = match self.expected {
            Some(s) => Some(FailureSignature { rank: Some(rank), ..s }),
            None => None,
        };
        Drill { rank, call, expected: expect, ..self }
    }

    /// Expects a failure that names no rank, because the request or the launch is at fault.
    const fn naming_no_rank(self) -> Drill {
        let expect = match self.expected {
            Some(s) => Some(FailureSignature { rank: None, ..s }),
            None => None,
        };
        Drill { expected: expect, ..self }
    }

    const fn with_topology(self, topology: Topology) -> Drill {
        let mesh = if matches!(topology, Topology::Pp0) { "tp=1" } else { self.mesh };
        Drill { mesh, topology, ..self }
    }

    const fn with_media(self) -> Drill {
        Drill { model: DrillModel::WithMedia, ..self }
    }

    /// Shares the pictures of the model with media among the ranks, by rows.
    const fn with_shared_pictures(self) -> Drill {
        Drill { model: DrillModel::WithMedia, media: MediaPlacement::Mesh, ..self }
    }

    const fn with_scene_cut(self, chunk: u32) -> Drill {
        Drill { cut_before: Some(chunk), ..self }
    }
}

/// A drill that generates texts on two ranks which share each block, or on two that share the experts.
const fn text_drill(
    fault: DrillFault,
    what: &'static str,
    mesh: &'static str,
    (code, place): (&'static str, CheckSite),
    page: &'static str,
) -> Drill {
    Drill { kind: DrillKind::Text, mesh, ..stream_drill(fault, what, code, place, page) }
}

const fn measurement(id: &'static str, what: &'static str) -> Drill {
    let like = stream_drill(DrillFault::UnboundedOutput, what, "", CheckSite::Leader, "overlap");
    Drill { id, kind: DrillKind::Measurement, fault: None, expected: None, limit_ms: 30_000, ..like }
}

/// All drills, in the order of the manual pages.
#[rustfmt::skip]
pub static DRILLS: &[Drill] = {
    use CheckSite::{Init, Leader, MeshLeader, Worker};
    use Topology::Pp1;
    const CONTROL: &str = "control-plane";
    const GROUPS: &str = "groups";
    const OVERLAP: &str = "overlap";
    const KV: &str = "kv";
    const SHUTDOWN: &str = "shutdown";
    const SAME: &str = "determinism";
    const REPLAY: &str = "replay";
    &[
        stream_drill(DrillFault::UnserialisableMeta, "the leader's metadata exceeds the size of a frame", "T0703", Leader, CONTROL).armed_at(0, 4).naming_no_rank(),
        stream_drill(DrillFault::UnsupportedDtype, "the text embedding has an unsupported dtype", "T0735", Leader, CONTROL).armed_at(0, 2).naming_no_rank(),
        stream_drill(DrillFault::MissingTensor, "the text embedding is missing", "T0735", Leader, CONTROL).armed_at(0, 2).naming_no_rank(),
        stream_drill(DrillFault::ShortText, "the text embedding has a row too few", "T0735", Leader, CONTROL).armed_at(0, 2).naming_no_rank().with_media(),
        stream_drill(DrillFault::OtherVersion, "a rank receives an envelope of another version", "T0701", Worker, CONTROL),
        stream_drill(DrillFault::OtherPlan, "a rank receives an envelope of another plan", "T0731", Worker, CONTROL),
        stream_drill(DrillFault::UnlistedTensor, "a frame contains bytes that its manifest does not list", "T0706", Worker, CONTROL),
        stream_drill(DrillFault::OtherPlanAtInit, "a rank loads another plan", "T0740", Init, CONTROL),
        stream_drill(DrillFault::ArmedAlone, "a fault is armed on one rank only", "T0740", Init, CONTROL),
        stream_drill(DrillFault::UnarmedCheck, "the engine of a rank leaves out a check", "T0740", Init, CONTROL),
        Drill { kind: DrillKind::WrongSecret, limit_ms: 5_000, ..stream_drill(DrillFault::WrongSecret, "a peer has the wrong secret for the run", "T0756", Init, CONTROL) },
        stream_drill(DrillFault::ExtraForward, "a rank runs one extra generator forward", "T0747", Worker, GROUPS),
        stream_drill(DrillFault::MissingForward, "a rank runs one generator forward too few", "T0747", Worker, GROUPS),
        stream_drill(DrillFault::ConditionalCollective, "a rank skips a collective behind a flag", "T0751", Worker, GROUPS).armed_at(1, 1),
        stream_drill(DrillFault::AdHocBroadcast, "a rank issues an unplanned broadcast", "T0751", Worker, GROUPS).armed_at(1, 1),
        stream_drill(DrillFault::WrongGroup, "a rank issues a collective over another group", "T0751", Worker, GROUPS).armed_at(1, 1),
        stream_drill(DrillFault::WrongShape, "a rank issues a collective with another shape", "T0751", Worker, GROUPS).armed_at(1, 1),
        stream_drill(DrillFault::SwappedHalo, "the halo rows above and below a shard arrive swapped", "T0773", Worker, GROUPS).with_shared_pictures(),
        // A pipeline has a communicator for each direction, and an order needs two.
        Drill { mesh: "pp=2", ..stream_drill(DrillFault::GroupOrder, "a rank creates its groups in another order", "T0757", Init, GROUPS) },
        stream_drill(DrillFault::RelayRefuses, "an envelope is corrupted before it reaches the mesh leader", "T0755", MeshLeader, GROUPS).with_topology(Pp1),
        stream_drill(DrillFault::UnboundedOutput, "the consumer is slow and d_out is unbounded", "T0741", Leader, OVERLAP).armed_at(0, 1),
        measurement("depth-sweep", "queue depths 1, 2, 3 and 4 with the same stages"),
        measurement("overlap-signature", "synthetic stage times on processes, depths 2 and 1"),
        measurement("recompute-coupling", "whole decode before the context, anchor first, no coupling"),
        stream_drill(DrillFault::StaleResult, "a result names an expired epoch", "T0736", Leader, OVERLAP).with_scene_cut(2),
        stream_drill(DrillFault::ResetOnOne, "the caches of one rank are reset in the middle of a scene", "T0747", Worker, KV),
        stream_drill(DrillFault::StartSkew, "a rank receives another start frame", "T0712", Worker, KV),
        text_drill(DrillFault::OtherPages, "a rank receives another page table", TWO_RANKS, ("T0712", Worker), KV),
        stream_drill(DrillFault::CachesLost, "the caches of one rank are emptied unannounced within a scene", "T0712", Worker, KV),
        stream_drill(DrillFault::HistoryCleared, "the VAE history of one rank is reset between two chunks", "T0772", Worker, KV).with_shared_pictures(),
        Drill { recompute: true, ..stream_drill(DrillFault::RecomputeWithoutContext, "the context message has no context tensor", "T0735", Worker, KV) },
        stream_drill(DrillFault::LateAfterReset, "a result from before the cut arrives again after the cut", "T0736", Leader, KV).armed_at(1, 3).with_scene_cut(2),
        stream_drill(DrillFault::LeaderDies, "the leader is killed after the envelope is received", "T0742", Worker, SHUTDOWN).armed_at(0, 4),
        stream_drill(DrillFault::MeshLeaderDies, "the mesh leader is killed", "T0742", Leader, SHUTDOWN).with_topology(Pp1),
        stream_drill(DrillFault::MemberDies, "a rank is killed", "T0742", Leader, SHUTDOWN),
        Drill { kind: DrillKind::OrphanedRanks, ..stream_drill(DrillFault::OrphanedWorker, "the launcher is killed", "T0749", Leader, SHUTDOWN).naming_no_rank() },
        stream_drill(DrillFault::StoppedRank, "a rank is stopped by SIGSTOP", "T0743", Leader, SHUTDOWN),
        stream_drill(DrillFault::StuckInLibrary, "an engine hangs and ignores its abort", "T0743", Leader, SHUTDOWN),
        stream_drill(DrillFault::StuckKernel, "a kernel never ends", "T0743", Leader, SHUTDOWN),
        stream_drill(DrillFault::OutputFolderRemoved, "the output folder is removed during the run", "T0765", Leader, SHUTDOWN).armed_at(0, 4),
        stream_drill(DrillFault::PerturbedInput, "one bit of an input differs on one rank", "T0759", Leader, SAME).armed_at(1, 2),
        stream_drill(DrillFault::MutatedWeight, "a weight changes in the memory of one rank", "T0754", Worker, SAME),
        Drill { strategy: Strategy::Megatron, ..stream_drill(DrillFault::WrongShard, "a rank loads the shards of another rank", "T0754", Init, SAME) },
        stream_drill(DrillFault::PerturbedOutput, "a rank computes a different output", "T0744", Leader, SAME).naming_no_rank(),
        text_drill(DrillFault::SampledToken, "a rank samples another token", TWO_RANKS, ("T0744", Leader), SAME).naming_no_rank(),
        text_drill(DrillFault::OtherGate, "a rank loads another gate of the experts", TWO_RANKS, ("T0754", Init), SAME),
        text_drill(DrillFault::SwappedExperts, "a rank loads two experts in each other's place", "ep=2", ("T0754", Init), SAME),
        text_drill(DrillFault::EditedRouting, "a rank routes rows by another table", TWO_RANKS, ("T0744", Leader), SAME).naming_no_rank(),
        text_drill(DrillFault::OtherSeed, "a rank draws experts with another seed", TWO_RANKS, ("T0744", Leader), SAME).naming_no_rank(),
        stream_drill(DrillFault::NanWeight, "an element of a weight is NaN when a rank loads it", "T0770", Init, SAME),
        // The only rank of the mesh returns the latents, so no other rank can report first.
        stream_drill(DrillFault::NanLatent, "a layer computes NaN", "T0771", Worker, SAME).with_topology(Topology::Pp0),
        stream_drill(DrillFault::LoraOnOne, "one rank adds a LoRA to its weights", "T0740", Init, SAME).with_media(),
        stream_drill(DrillFault::OtherTokenizer, "a rank has another tokenizer", "T0740", Init, SAME).with_media(),
        stream_drill(DrillFault::PrivateReload, "a rank reloads its weights on its own", "T0737", Worker, SAME),
        stream_drill(DrillFault::ProgramSet, "a rank does not load one of the programs", "T0740", Init, SAME),
        stream_drill(DrillFault::CapturedOnOne, "one rank captures a program into another graph", "T0740", Init, SAME),
        stream_drill(DrillFault::UndeclaredCapture, "a rank captures what the plan does not declare", "T0785", Worker, SAME),
        stream_drill(DrillFault::EffectiveBackend, "the backend of a rank chooses other kernels", "T0740", Init, SAME),
        stream_drill(DrillFault::OtherKernel, "a kernel of a rank computes other numbers", "T0775", Init, SAME),
        stream_drill(DrillFault::SkippedWarmUp, "a rank skips the warm-up of a program", "T0753", Leader, SAME).armed_at(1, 1),
        stream_drill(DrillFault::NewProgram, "a rank first runs a program after the warm-up", "T0752", Leader, SAME).armed_at(1, 1),
        stream_drill(DrillFault::RepeatedCall, "a rank receives an envelope twice", "T0730", Worker, REPLAY),
        stream_drill(DrillFault::LostCall, "a rank never receives an envelope", "T0730", Worker, REPLAY),
        stream_drill(DrillFault::SecondCommit, "a rank receives a commit twice", "T0746", Worker, REPLAY),
    ]
};

/// Renders the table as a page of the reference.
#[must_use]
pub fn reference_page() -> String {
    let mut out = String::from(
        "# Drills\n\n\
         Generated by `tessera drill --list --markdown`; do not edit. `tessera drill` runs all drills on this machine, \
         `tessera drill ID...` runs some.\n\n\
         A drill streams a video, or generates texts, over real processes with one armed fault. The drill passes if the run ends within the limit with \
         this code, names this rank and this place, and leaves no process behind. Every rank announces the fault as a parity \
         key. Measurements have gates instead of a code.\n\n\
         | id | code | rank | place | fault | limit | page |\n\
         | --- | --- | --- | --- | --- | --- | --- |\n",
    );
    for d in DRILLS {
        let (code, rank, place) = match &d.expected {
            Some(s) => {
                let rank = s.rank.map_or("—".to_string(), |r| r.to_string());
                (s.code, rank, s.site.as_str())
            }
            None => ("—", "—".to_string(), "—"),
        };
        let (id, what, page, seconds) = (d.id, d.description, d.page, d.limit_ms / 1000);
        // Writing to a String cannot fail.
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
        for fault in DrillFault::ALL.iter().filter(|f| !DrillFault::DRAWN.contains(f)) {
            let drill = Drill::find(fault.name()).unwrap_or_else(|| panic!("{} has no drill", fault.name()));
            assert_eq!(drill.fault, Some(*fault));
        }
    }

    #[test]
    fn every_expected_failure_is_a_tripwire_at_one_of_its_sites() {
        for (d, s) in DRILLS.iter().filter_map(|d| Some((d, d.expected?))) {
            let wire = TRIPWIRES.iter().find(|t| t.code.id == s.code);
            let wire = wire.unwrap_or_else(|| panic!("{}: {} is no tripwire", d.id, s.code));
            assert!(
                wire.sites.contains(&s.site),
                "{}: {} is not raised at the {}",
                d.id,
                s.code,
                s.site.as_str()
            );
        }
    }

    #[test]
    fn the_reference_page_is_up_to_date() {
        let page = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/reference/drills.md");
        let kept = std::fs::read_to_string(page).unwrap();
        assert!(kept == reference_page(), "run `tessera drill --list --markdown > docs/reference/drills.md`");
    }
}
