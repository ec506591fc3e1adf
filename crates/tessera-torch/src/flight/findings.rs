//! What the dumps of a run show: causes, waits and notes.

use tessera_base::named_enum;

use super::dump::FlightEntry;
use super::wait::Wait;

named_enum! {
    /// How a rank departed from its peers.
    pub enum FaultKind {
        /// The rank did not issue one or more collectives that its peers issued.
        Skipped = "skipped a collective",
        /// The rank issued one or more collectives that its peers did not issue.
        Extra = "issued an extra collective",
        /// The rank issued another operation.
        OtherOp = "issued another op",
        /// The rank passed another number of elements.
        OtherShape = "passed another shape",
        /// The rank passed another dtype.
        OtherDtype = "passed another dtype",
        /// The ranks wait for each other in a cycle.
        WaitCycle = "wait for each other",
        /// The rank's host issued nothing more, although its device was idle.
        HostSilent = "host is silent",
        /// The rank's device did not start or complete what its peers' devices did.
        DeviceBehind = "device is behind",
        /// The rank left no dump, and others wait for it.
        NoDump = "left no dump",
    }
}

named_enum! {
    /// How sure a finding is.
    pub enum Certainty {
        /// The dumps leave no other explanation.
        Certain = "certain",
        /// Something is missing that could show another explanation.
        Likely = "likely",
        /// The dumps show that ranks departed from each other, and not which side did.
        Unclear = "unclear",
    }
}

/// A cause of the hang.
#[derive(Debug, Clone)]
pub struct FlightFinding {
    /// How the ranks departed.
    pub kind: FaultKind,
    /// Ranks at fault; both sides if the dumps do not show which side departed, and the ranks of a cycle.
    pub ranks: Vec<u32>,
    /// How sure this is.
    pub certainty: Certainty,
    /// Why it is no more certain than that.
    pub doubts: Vec<String>,
    /// The group, such as `group 0 (default_pg)`.
    pub group: String,
    /// Number of the collective in its group, from 1; `None` for a send, a receive or a cycle.
    pub sequence: Option<u64>,
    /// How many collectives the ranks skipped or issued in excess, where the dumps show their number.
    pub count: Option<usize>,
    /// What each side issued there.
    pub sides: Vec<CallSide>,
}

/// What some ranks issued.
#[derive(Debug, Clone)]
pub struct CallSide {
    /// The ranks.
    pub ranks: Vec<u32>,
    /// Op, number, dtype and shapes, such as `all_reduce 7 of Float [2048]`.
    pub call: String,
    /// Group of the collective.
    pub group: String,
    /// The innermost line of the user's program, such as `train.py:72 in step`.
    pub site: Option<String>,
}

/// A rank that waits, for the wait graph.
#[derive(Debug, Clone)]
pub struct RankWait {
    /// The rank.
    pub rank: u32,
    /// The ranks for which it waits.
    pub awaited: Vec<u32>,
    /// What it waits in.
    pub call: String,
    /// Group of the collective.
    pub group: String,
    /// Where the program issued it.
    pub site: Option<String>,
}

/// What the dumps of a run show.
#[derive(Debug, Clone, Default)]
pub struct FlightReport {
    /// Causes, the first one first. Empty if no rank is accused.
    pub findings: Vec<FlightFinding>,
    /// The wait graph at the time of the dumps.
    pub waits: Vec<RankWait>,
    /// Ranks with a dump.
    pub ranks: Vec<u32>,
    /// Ranks that a group names and that left no dump.
    pub missing: Vec<u32>,
    /// What the reader of the report should know.
    pub notes: Vec<String>,
}

/// Maximum number of ranks that a list names one by one.
const MAX_LISTED_RANKS: usize = 8;

impl RankWait {
    pub(super) fn from_wait(rank: u32, wait: &Wait<'_>) -> RankWait {
        RankWait {
            rank,
            awaited: wait.awaited.iter().copied().collect(),
            call: describe_call(wait.entry),
            group: wait.group.clone(),
            site: find_user_site(wait.entry),
        }
    }
}

impl CallSide {
    pub(super) fn from_entry(ranks: Vec<u32>, entry: &FlightEntry, group: String) -> CallSide {
        CallSide { ranks, call: describe_call(entry), group, site: find_user_site(entry) }
    }
}

/// Describes a collective: op, number, dtype, shapes.
fn describe_call(entry: &FlightEntry) -> String {
    let shapes: Vec<String> = entry.input_shapes.iter().take(3).map(|s| format!("{s:?}")).collect();
    let more = if entry.input_shapes.len() > 3 { ", …" } else { "" };
    let number = if entry.is_p2p { String::new() } else { format!(" {}", entry.sequence) };
    let op = name_function(&entry.op);
    match entry.input_dtypes.first() {
        None => format!("{op}{number}"),
        Some(dtype) => format!("{op}{number} of {dtype} {}{more}", shapes.join(", ")),
    }
}

/// Returns the function of `torch.distributed` that issues a recorded op.
fn name_function(op: &str) -> &str {
    match op {
        "_all_gather_base" => "all_gather_into_tensor",
        "_reduce_scatter_base" => "reduce_scatter_tensor",
        "alltoall_base" => "all_to_all_single",
        _ => op,
    }
}

/// Returns the innermost line that is not of PyTorch itself.
fn find_user_site(entry: &FlightEntry) -> Option<String> {
    let is_own = |file: &str| !file.contains("/torch/") && !file.starts_with("??");
    let frame = entry.frames.iter().find(|f| is_own(&f.file)).or(entry.frames.first())?;
    Some(format!("{}:{} in {}", frame.file, frame.line, frame.function))
}

/// Lists ranks: `rank 3`, `ranks 0, 2`. In a long list, consecutive ranks are a range: `ranks 0 to 1022`.
#[must_use]
pub fn list_ranks(ranks: &[u32]) -> String {
    let mut runs: Vec<(u32, u32)> = Vec::new();
    for rank in ranks {
        match runs.last_mut() {
            Some((_, end)) if ranks.len() > MAX_LISTED_RANKS && end.checked_add(1) == Some(*rank) => {
                *end = *rank
            }
            _ => runs.push((*rank, *rank)),
        }
    }
    let texts: Vec<String> = runs
        .iter()
        .map(|(first, last)| match last - first {
            0 => first.to_string(),
            1 => format!("{first}, {last}"),
            _ => format!("{first} to {last}"),
        })
        .collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, texts.join(", "))
}
