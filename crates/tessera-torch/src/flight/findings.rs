//! The causes of a hang, with how sure the dumps make each of them.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::named_enum;

use super::departure::{Decision, Departure, DepartureKind, find_departure};
use super::dump::{FlightDump, FlightEntry};
use super::sequence::{GroupSequences, align_groups};
use super::wait::{Wait, Waits};

named_enum! {
    /// How a rank departed from its peers.
    pub enum FaultKind {
        /// The rank did not issue a collective that its peers issued.
        Skipped = "skipped a collective",
        /// The rank issued a collective that its peers did not issue.
        Extra = "issued an extra collective",
        /// The rank issued another operation.
        OtherOp = "issued another op",
        /// The rank passed another number of elements.
        OtherShape = "passed another shape",
        /// The rank passed another dtype.
        OtherDtype = "passed another dtype",
        /// The ranks wait for each other in a cycle, over two groups or more.
        WaitCycle = "wait for each other",
        /// The rank's host issued nothing more, although its device was idle.
        HostSilent = "host is silent",
        /// The rank's device did not start what its peers' devices started.
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
        /// The dumps show that something departed, and not which side.
        Unclear = "unclear",
    }
}

/// A cause of the hang.
#[derive(Debug, Clone)]
pub struct FlightFinding {
    /// How the ranks departed.
    pub kind: FaultKind,
    /// Ranks at fault; several if the dumps do not tell them apart, or for a cycle all of its ranks.
    pub ranks: Vec<u32>,
    /// How sure this is.
    pub certainty: Certainty,
    /// Why it is no more certain than that.
    pub doubts: Vec<String>,
    /// The group, such as `group 0 (default_pg)`.
    pub group: String,
    /// Number of the collective in its group, from 1; `None` for a send or a receive.
    pub sequence: Option<u64>,
    /// What each side issued there.
    pub sides: Vec<CallSide>,
}

/// What some ranks issued.
#[derive(Debug, Clone)]
pub struct CallSide {
    /// The ranks.
    pub ranks: Vec<u32>,
    /// Op, elements and dtype, such as `all_reduce of 2048 Float`.
    pub call: String,
    /// The innermost line of the user's program, such as `train.py:72 in step`.
    pub site: Option<String>,
}

/// A rank that waits, for the wait graph.
#[derive(Debug, Clone)]
pub struct RankWait {
    /// The rank.
    pub rank: u32,
    /// The ranks that have not issued their side.
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
    /// Causes, the first one first. Empty if nobody is accused.
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

/// Finds the rank that departed first.
#[must_use]
pub fn examine_dumps(dumps: &BTreeMap<u32, FlightDump>) -> FlightReport {
    let groups = align_groups(dumps);
    let waits = Waits::from_groups(dumps, &groups);
    let members: BTreeSet<u32> = groups.iter().flat_map(|g| g.members.iter().copied()).collect();
    let missing: Vec<u32> = members.into_iter().filter(|r| !dumps.contains_key(r)).collect();
    let mut report = FlightReport {
        ranks: dumps.keys().copied().collect(),
        waits: waits.by_rank.iter().map(|(rank, w)| RankWait::from_wait(*rank, w)).collect(),
        missing,
        ..FlightReport::default()
    };
    let departures: Vec<_> = groups.iter().filter_map(|g| Some((g, find_departure(g)?))).collect();
    let first = departures.iter().min_by_key(|(_, d)| d.created_ns);
    if let Some((group, departure)) = first {
        report.findings.push(departure_finding(dumps, group, departure));
        if departures.len() > 1 {
            report.notes.push(format!("{} later groups differ too, as consequences", departures.len() - 1));
        }
    } else {
        report.findings = wait_findings(dumps, &groups, &waits);
    }
    report.notes.extend(list_notes(dumps, &waits, &report));
    report
}

fn departure_finding(
    dumps: &BTreeMap<u32, FlightDump>,
    group: &GroupSequences<'_>,
    departure: &Departure<'_>,
) -> FlightFinding {
    let kind = match departure.kind {
        DepartureKind::Skipped => FaultKind::Skipped,
        DepartureKind::Extra => FaultKind::Extra,
        DepartureKind::Other("dtype") => FaultKind::OtherDtype,
        DepartureKind::Other("shape") => FaultKind::OtherShape,
        DepartureKind::Other(_) => FaultKind::OtherOp,
    };
    let mut doubts = Vec::new();
    let first_known =
        group.sequences.values().filter(|s| s.lost_head).filter_map(|s| s.calls.keys().next()).max();
    if first_known.is_some_and(|first| *first >= departure.sequence) {
        doubts.push("the rings lost what came before, so an earlier departure may be lost too".to_string());
    }
    if group.members.iter().any(|r| !dumps.contains_key(r)) {
        doubts.push("a member of the group left no dump".to_string());
    }
    match departure.decided {
        Some(Decision::Majority) => {}
        Some(Decision::History) => {
            doubts.push(
                "the sides have equally many ranks; earlier rounds of the program tell them apart".into(),
            );
        }
        None => {
            doubts.push("the sides have equally many ranks, and no earlier round tells them apart".into())
        }
    }
    let certainty = match (departure.decided, doubts.len()) {
        (None, _) => Certainty::Unclear,
        (_, 0) => Certainty::Certain,
        _ => Certainty::Likely,
    };
    let sides = departure.sides.iter().map(|(ranks, call)| CallSide {
        ranks: ranks.clone(),
        call: describe_call(call.entry),
        site: find_user_site(call.entry),
    });
    FlightFinding {
        kind,
        ranks: departure.ranks.clone(),
        certainty,
        doubts,
        group: group.label(),
        sequence: Some(departure.sequence),
        sides: sides.collect(),
    }
}

/// Finds the ranks at which chains of waits end.
fn wait_findings(
    dumps: &BTreeMap<u32, FlightDump>,
    groups: &[GroupSequences<'_>],
    waits: &Waits<'_>,
) -> Vec<FlightFinding> {
    if let Some(cycle) = waits.find_cycle() {
        let sides: Vec<CallSide> =
            cycle.iter().filter_map(|r| Some(wait_side(*r, waits.by_rank.get(r)?))).collect();
        let group =
            cycle.first().and_then(|r| waits.by_rank.get(r)).map_or(String::new(), |w| w.group.clone());
        return vec![FlightFinding {
            kind: FaultKind::WaitCycle,
            ranks: cycle,
            certainty: Certainty::Certain,
            doubts: Vec::new(),
            group,
            sequence: None,
            sides,
        }];
    }
    let mut findings = Vec::new();
    for root in waits.roots().difference(&waits.older) {
        let waiting = waits.by_rank.iter().filter(|(_, w)| w.awaited.contains(root));
        let Some((_, wait)) = waiting.clone().next() else { continue };
        let mut doubts = vec!["dumps do not say when they were written".to_string()];
        let kind = if dumps.contains_key(root) { FaultKind::HostSilent } else { FaultKind::NoDump };
        if kind == FaultKind::NoDump {
            doubts = vec![
                "a rank that was killed or stopped leaves no dump, and neither does one whose host is gone"
                    .into(),
            ];
        }
        findings.push(FlightFinding {
            kind,
            ranks: vec![*root],
            certainty: Certainty::Likely,
            doubts,
            group: wait.group.clone(),
            sequence: (!wait.entry.is_p2p).then_some(wait.entry.sequence),
            sides: waiting.map(|(r, w)| wait_side(*r, w)).collect(),
        });
    }
    if findings.is_empty() {
        findings.extend(waits.stalled.iter().find_map(|stalled| device_finding(groups, stalled)));
    }
    findings
}

/// Finds the devices that did not start a collective that others started.
fn device_finding(
    groups: &[GroupSequences<'_>],
    (members, started, entry): &(Vec<u32>, Vec<u32>, &FlightEntry),
) -> Option<FlightFinding> {
    let behind: Vec<u32> = members.iter().copied().filter(|r| !started.contains(r)).collect();
    if started.is_empty() || behind.is_empty() {
        return None;
    }
    let group = groups.iter().find(|g| *g.name == *entry.group)?;
    let side = CallSide { ranks: started.clone(), call: describe_call(entry), site: find_user_site(entry) };
    Some(FlightFinding {
        kind: FaultKind::DeviceBehind,
        ranks: behind,
        certainty: Certainty::Likely,
        doubts: vec!["dumps do not say what the device runs instead".to_string()],
        group: group.label(),
        sequence: Some(entry.sequence),
        sides: vec![side],
    })
}

fn list_notes(dumps: &BTreeMap<u32, FlightDump>, waits: &Waits<'_>, report: &FlightReport) -> Vec<String> {
    let mut notes = Vec::new();
    let lost: Vec<u32> = dumps.values().filter(|d| d.lost_head).map(|d| d.rank).collect();
    if !lost.is_empty() {
        notes.push(format!("the ring of {} lost its oldest entries", list_ranks(&lost)));
    }
    if !waits.older.is_empty() {
        let older: Vec<u32> = waits.older.iter().copied().collect();
        notes.push(format!(
            "the dump of {} is older than those of ranks that wait for it",
            list_ranks(&older)
        ));
    }
    if !report.missing.is_empty() {
        notes.push(format!("{} left no dump", list_ranks(&report.missing)));
    }
    if report.findings.is_empty() && !waits.stalled.is_empty() {
        notes.push(
            "all members enqueued a collective that no device completed: the dumps show no rank at fault; with \
             TORCH_NCCL_ENABLE_TIMING=1 they show which device started it"
                .to_string(),
        );
    }
    notes.push(
        "not recorded, so not compared: the reduction, roots, the splits of an all-to-all, contents, and what a CUDA graph \
         replays"
            .to_string(),
    );
    notes
}

fn wait_side(rank: u32, wait: &Wait<'_>) -> CallSide {
    CallSide { ranks: vec![rank], call: describe_call(wait.entry), site: find_user_site(wait.entry) }
}

impl RankWait {
    fn from_wait(rank: u32, wait: &Wait<'_>) -> RankWait {
        RankWait {
            rank,
            awaited: wait.awaited.iter().copied().collect(),
            call: describe_call(wait.entry),
            group: wait.group.clone(),
            site: find_user_site(wait.entry),
        }
    }
}

/// Describes a collective: op, shapes, dtype.
fn describe_call(entry: &FlightEntry) -> String {
    let shapes: Vec<String> = entry.input_shapes.iter().take(3).map(|s| format!("{s:?}")).collect();
    let more = if entry.input_shapes.len() > 3 { ", …" } else { "" };
    let dtype = entry.input_dtypes.first().map_or("", |d| d);
    let number = if entry.is_p2p { String::new() } else { format!(" {}", entry.sequence) };
    format!("{}{number} of {dtype} {}{more}", entry.op, shapes.join(", "))
}

/// Returns the innermost line that is not of PyTorch itself.
fn find_user_site(entry: &FlightEntry) -> Option<String> {
    let is_own = |file: &str| !file.contains("/torch/distributed/") && !file.contains("/torch/nn/");
    let frame = entry.frames.iter().find(|f| is_own(&f.file)).or(entry.frames.first())?;
    Some(format!("{}:{} in {}", frame.file, frame.line, frame.function))
}

/// Lists ranks: `rank 3`, `ranks 0, 2`.
#[must_use]
pub fn list_ranks(ranks: &[u32]) -> String {
    let texts: Vec<String> = ranks.iter().map(ToString::to_string).collect();
    format!("rank{} {}", if ranks.len() == 1 { "" } else { "s" }, texts.join(", "))
}
