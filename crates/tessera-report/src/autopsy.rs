//! Diagnosis of a run from its flight records: which ranks diverged from the plan or fell silent,
//! which rank waits for which, and which failures are only consequences.
//!
//! The autopsy is a pure function of the records. Waits form a graph over ranks: a rank whose host
//! waits in a collective waits for the hosts that have not reached it or, if all have, for the
//! devices that lag behind. The hang began at a rank that others wait for and that waits for no
//! rank. A finding needs more evidence: a rank that reported another's failure was healthy, and a
//! wait as long as earlier ones is normal.

mod findings;
mod next_step;
mod phrases;
mod rank_table;
mod rank_view;
mod render;
mod run_flights;
mod wait_graph;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize, Serializer};
use tessera_base::{Counterexample, named_enum};

use crate::flight::{FlightLog, FlightMark, write_ranks};
use crate::record::{FailureCause, RunRecord, RunStatus};
use rank_view::{PlanDivergence, RankView};
use run_flights::{select_run_flights, world_size};
use wait_graph::WaitGraph;

/// Minimum silence in nanoseconds after which a finding can name a rank.
const MIN_SILENCE_NS: u64 = 2_000_000_000;
/// Minimum silence as a multiple of the longest gap between two events in healthy operation.
const SILENCE_FACTOR: u64 = 4;

/// The state of a process at the time of the autopsy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ProcessVitals {
    /// The process runs or sleeps.
    Alive,
    /// A signal stopped the process; it continues on SIGCONT.
    Stopped,
    /// The process no longer exists.
    Gone,
}

/// The end of a rank's process, as its launcher observed it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEnd {
    /// Rank whose process ended.
    pub rank: u32,
    /// Exit status; `None` if a signal killed the process.
    pub status: Option<i32>,
    /// Number of the signal that killed the process; `None` if the process exited.
    pub signal: Option<i32>,
}

/// The input of an autopsy: records, states of processes, and the collectives of the plan.
#[derive(Debug, Clone, Default)]
pub struct AutopsyEvidence {
    /// Record of the run, if it is readable.
    pub record: Option<RunRecord>,
    /// Flight records, possibly including those of other runs.
    pub flight_records: Vec<FlightLog>,
    /// How the processes of ranks ended, where that is known.
    pub process_ends: Vec<ProcessEnd>,
    /// Current state of each rank's process, by rank; unknown states are absent.
    pub vitals: BTreeMap<u32, ProcessVitals>,
    /// Current time in nanoseconds since 1970; `None` if no process of the run is alive.
    pub now_ns: Option<u64>,
    /// Collectives of the sealed plan by phase and rank, if the plan is available.
    pub plan: BTreeMap<(String, u32), Vec<String>>,
    /// Every group by the name of its kind, such as `tp`, as lists of ranks; for lines without
    /// members.
    pub groups: BTreeMap<String, Vec<Vec<u32>>>,
    /// Problems with files, for the reader of the report.
    pub notes: Vec<String>,
}

/// How far a run got, from its record or, without an end line, from its ranks and processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum AutopsyRunState {
    /// The record states that the run produced all that was requested.
    Complete,
    /// The user stopped the run.
    Interrupted,
    /// The run failed, according to its record or to its ranks.
    Failed,
    /// There is no end line and no reported failure, and a process of the run still exists.
    Running,
    /// The run is over and left no end line.
    Unfinished,
}

named_enum! {
    /// Class of a finding about one or several ranks. The name is its text in JSON and in file names
    /// of drawings.
    pub enum FindingClass {
        /// The rank's collectives differ from those of the plan or of its peers.
        Diverged = "diverged",
        /// The rank reported a failure of its own.
        Failed = "failed",
        /// The leader found that the rank's results or state differ from those of its peers.
        Drifted = "drifted",
        /// The rank was rejected, or violated the protocol, before any collective.
        Refused = "refused",
        /// Other ranks wait for this rank's host, which waits for no rank: the process is dead,
        /// stopped, or stuck between two collectives.
        HostSilent = "host_silent",
        /// Other ranks wait for this rank's device, which lags behind its peers.
        DeviceBehind = "device_behind",
        /// Other ranks wait in a call that this rank never began.
        NeverReached = "never_reached",
        /// The ranks wait for each other in a cycle.
        Cycle = "cycle",
        /// All members are in one collective, which does not complete.
        Transport = "transport",
        /// A resource that all ranks share is gone: the launcher, or the host.
        LauncherGone = "launcher",
    }
}

impl Serialize for FindingClass {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(self.name())
    }
}

/// A cause of the run's failure.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// Kind of fault, on which the advice to the user depends.
    pub class: FindingClass,
    /// Ranks at fault; empty if no rank is. For a cycle, all of its ranks, because the evidence
    /// does not distinguish them.
    pub ranks: Vec<u32>,
    /// What went wrong, in one sentence.
    pub summary: String,
    /// Facts that support the finding.
    pub evidence: Vec<String>,
    /// Chain of waits, from a rank that only waits to the rank at fault.
    pub chain: Vec<String>,
    /// Counterexample for a drawing of the finding.
    #[serde(skip)]
    pub counterexample: Option<Counterexample>,
}

/// A row of the report's table of ranks: what one rank did last, and for which ranks it waits.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankDiagnosis {
    /// The rank, which is also the index of this entry in [`Autopsy::ranks`].
    pub rank: u32,
    /// State in one or two words.
    pub state: String,
    /// The rank's most recent event.
    pub last_event: String,
    /// Nanoseconds from the rank's last line to the end of the run, or to now; `None` without a
    /// flight record.
    pub silent_ns: Option<u64>,
    /// Ranks for which this rank waits.
    pub waits_for: Vec<u32>,
}

/// How far each member of a group came in the last call.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupProgress {
    /// Name and members of the group, such as `tp of ranks 0-3`; for transfers, the sender and the
    /// receiver, such as `pp 0 → 1`.
    pub group: String,
    /// Each member of the group with its last collective over the group.
    pub reached: Vec<(u32, String)>,
}

/// Result of the comparison between the run record and the findings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RecordAgreement {
    /// The record names a rank that the findings name, or neither reports a failure.
    Agrees,
    /// They name different ranks.
    Disagrees,
    /// The record has no end line, or it reports no failure although there are findings.
    Silent,
    /// There is no record, or either the record or the findings name no rank.
    Unknown,
}

/// The causes of a run's failure, the state of every rank, and advice for the user.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Autopsy {
    /// Whether the run completed, was stopped, failed, still runs, or left no end line.
    pub state: AutopsyRunState,
    /// Causes, the strongest first; empty if no problem was found.
    pub findings: Vec<Finding>,
    /// Result of the comparison between the record and the findings.
    pub agreement: RecordAgreement,
    /// The same comparison in words; empty without a record.
    pub record_comparison: String,
    /// Kind of problem: `hang`, `drift`, `crash`, `refusal` or `none`.
    pub triage: &'static str,
    /// What the user should do next, derived from the findings.
    pub next_step: String,
    /// State of every rank in order of rank, also of ranks without a flight record.
    pub ranks: Vec<RankDiagnosis>,
    /// Progress in all groups of the last call.
    pub groups: Vec<GroupProgress>,
    /// Remarks about the evidence itself.
    pub notes: Vec<String>,
}

impl Autopsy {
    /// Returns the ranks that the findings name, in ascending order.
    #[must_use]
    pub fn culprits(&self) -> Vec<u32> {
        let all: BTreeSet<u32> = self.findings.iter().flat_map(|f| f.ranks.iter().copied()).collect();
        all.into_iter().collect()
    }
}

/// Finds why a run failed and what each rank was doing. Any part of the evidence may be absent.
#[must_use]
pub fn diagnose_run(evidence: &AutopsyEvidence) -> Autopsy {
    let mut notes = evidence.notes.clone();
    let flights = select_run_flights(evidence, &mut notes);
    let world = world_size(evidence, &flights);
    let views: Vec<RankView<'_>> =
        (0..world).map(|r| RankView::new(r, flights.get(&r).copied(), evidence)).collect();
    let state = run_state(evidence, &views);
    let end_ns = silence_end_ns(evidence, &views);
    let case = Investigation { evidence, waits: WaitGraph::from_views(&views), views, state, end_ns };
    let findings = case.find_causes(&mut notes);
    let mut absent = Vec::new();
    for v in &case.views {
        match v.flight {
            None if findings.iter().any(|f| f.ranks == [v.rank]) => {}
            None => absent.push(v.rank),
            Some(f) if f.unreadable_lines > 0 => notes.push(format!(
                "{} of rank {} could not be read",
                format_line_count(f.unreadable_lines),
                v.rank
            )),
            Some(_) => {}
        }
    }
    match (&absent[..], write_ranks(&absent)) {
        ([], _) => {}
        ([one], _) => notes.push(format!("rank {one} has no flight record")),
        (many, said) if said.is_empty() => notes.push(format!("{} ranks have no flight record", many.len())),
        (_, said) => notes.push(format!("ranks {said} have no flight record")),
    }
    let (agreement, record_comparison) = case.compare_with_record(&findings);
    let (triage, next_step) = next_step::triage_and_next_step(&case, &findings);
    Autopsy {
        state,
        agreement,
        record_comparison,
        triage,
        next_step,
        ranks: case.views.iter().map(|v| case.rank_diagnosis(v, &findings)).collect(),
        groups: case.group_progress(),
        findings,
        notes,
    }
}

fn run_state(evidence: &AutopsyEvidence, views: &[RankView<'_>]) -> AutopsyRunState {
    let by_record = evidence.record.as_ref().map_or(RunStatus::Running, RunRecord::status);
    let failed = || views.iter().any(|v| v.marks().any(|(_, m)| m.event == "failed"));
    match by_record {
        RunStatus::Complete => AutopsyRunState::Complete,
        RunStatus::Interrupted => AutopsyRunState::Interrupted,
        RunStatus::Failed => AutopsyRunState::Failed,
        RunStatus::Running if failed() => AutopsyRunState::Failed,
        RunStatus::Running if evidence.vitals.values().any(|v| *v != ProcessVitals::Gone) => {
            AutopsyRunState::Running
        }
        RunStatus::Running => AutopsyRunState::Unfinished,
    }
}

/// Returns the instant up to which silence counts: now if the run is in progress, otherwise the
/// time of the last event of any rank.
fn silence_end_ns(evidence: &AutopsyEvidence, views: &[RankView<'_>]) -> u64 {
    evidence.now_ns.unwrap_or_else(|| views.iter().map(|v| v.last_wall_ns).max().unwrap_or(0))
}

/// The evidence and what follows from it directly, during the search for causes.
struct Investigation<'a> {
    evidence: &'a AutopsyEvidence,
    views: Vec<RankView<'a>>,
    waits: WaitGraph,
    state: AutopsyRunState,
    end_ns: u64,
}

impl Investigation<'_> {
    /// Looks for causes, from certain to likely evidence: the first kind of evidence that names a
    /// cause ends the search.
    fn find_causes(&self, notes: &mut Vec<String>) -> Vec<Finding> {
        let diverged = self.find_divergences();
        if !diverged.is_empty() {
            return diverged;
        }
        if matches!(self.state, AutopsyRunState::Complete | AutopsyRunState::Interrupted) {
            return Vec::new();
        }
        let kinds: [&dyn Fn() -> Vec<Finding>; 8] = [
            &|| Vec::from_iter(self.find_mismatch()),
            &|| Vec::from_iter(self.find_own_failure()),
            &|| Vec::from_iter(self.find_reported_failure()),
            &|| Vec::from_iter(self.find_lost_launcher()),
            &|| Vec::from_iter(self.find_cut_link()),
            &|| self.find_vanished_ranks(),
            &|| self.find_stuck_ranks(),
            &|| Vec::from_iter(self.find_blamed_rank()),
        ];
        let found = kinds.iter().map(|k| k()).find(|f| !f.is_empty()).unwrap_or_default();
        if found.is_empty() && self.state == AutopsyRunState::Unfinished {
            notes.push(
                "the record has no end line and no rank reported a reason: all processes may have been killed at once"
                    .into(),
            );
        }
        found
    }

    /// Finds ranks whose own sequence of collectives differs from the plan.
    fn find_divergences(&self) -> Vec<Finding> {
        self.views
            .iter()
            .filter_map(|v| Some(findings::divergence_finding(self, v, v.divergence.as_ref()?)))
            .collect()
    }

    /// Finds members that issued different collectives at one position, for collectives that were
    /// compared with no plan.
    fn find_mismatch(&self) -> Option<Finding> {
        self.waits.mismatches.first().map(|first| findings::mismatch_finding(self, first))
    }

    /// Finds the rank that first reported a failure of its own.
    fn find_own_failure(&self) -> Option<Finding> {
        let own = self.views.iter().filter_map(|v| {
            let (at, mark) = v.marks().find(|(_, m)| is_own_failure(v.rank, m) && !repeats_relayed(v, m))?;
            Some((v.wall_ns(at), v, mark))
        });
        // Other ranks report deaths, and a rank that names itself as stalled relays its leader's
        // report.
        own.min_by_key(|(at, ..)| *at).map(|(_, v, mark)| findings::own_failure_finding(self, v, mark))
    }

    /// Finds failures that the leader detected at a rank which could not know of them: results that
    /// differ, rejected settings.
    fn find_reported_failure(&self) -> Option<Finding> {
        let about = self.failure_marks().filter(|(_, m)| !is_death(m.class.as_deref()));
        let first = about.filter(|(_, m)| m.blamed_rank.is_some()).min_by_key(|(at, _)| *at);
        let by_record = self.recorded_cause();
        match (first, by_record) {
            (Some((_, m)), _) => Some(findings::reported_failure_finding(
                m.blamed_rank,
                m.code.as_deref(),
                m.class.as_deref().unwrap_or_default(),
                m.detail.as_deref().unwrap_or_default(),
            )),
            (None, Some(c)) if !is_death(Some(&c.class)) && c.class != LAUNCHER_GONE => {
                Some(findings::reported_failure_finding(c.rank, c.code.as_deref(), &c.class, &c.message))
            }
            _ => None,
        }
    }

    /// Finds ranks that were healthy at their last event and left without an exit mark, while at
    /// least one other rank could write it.
    fn find_vanished_ranks(&self) -> Vec<Finding> {
        let mut suspects: Vec<&RankView<'_>> = self.views.iter().filter(|v| self.has_vanished(v)).collect();
        let blamed = self.ranks_blamed_by_others();
        let blamed_suspects: Vec<&RankView<'_>> =
            suspects.iter().copied().filter(|v| blamed.contains(&v.rank)).collect();
        if !blamed_suspects.is_empty() {
            suspects = blamed_suspects;
        } else if self.views.iter().all(|v| v.flight.is_none() || self.has_vanished(v)) {
            // All ranks vanished at once: nothing distinguishes the first one.
            return Vec::new();
        } else if self.state != AutopsyRunState::Running {
            // The launcher kills ranks that do not exit, so among several silent ranks only those
            // count that others wait for.
            let waited: Vec<&RankView<'_>> =
                suspects.iter().copied().filter(|v| self.waits.root_ranks().contains(&v.rank)).collect();
            if waited.is_empty() {
                suspects.retain(|v| self.waits.awaited_ranks(v.rank).is_empty());
            } else {
                suspects = waited;
            }
        }
        suspects.into_iter().map(|v| findings::silence_finding(self, v)).collect()
    }

    fn has_vanished(&self, v: &RankView<'_>) -> bool {
        if v.announced_end() {
            return false;
        }
        let vitals = self.evidence.vitals.get(&v.rank);
        match self.state {
            // While other processes live, a process that is stopped or gone is a fact.
            AutopsyRunState::Running => {
                matches!(vitals, Some(ProcessVitals::Stopped | ProcessVitals::Gone))
                    || (v.flight.is_none()
                        && self.waits.root_ranks().contains(&v.rank)
                        && self.is_silent_too_long(v))
            }
            // A missing flight record proves nothing: another rank must have waited for the missing
            // rank.
            _ => {
                let killed =
                    self.evidence.process_ends.iter().any(|e| e.rank == v.rank && e.signal.is_some());
                v.flight.is_some()
                    || killed
                    || self.is_silent_too_long(v)
                    || self.ranks_blamed_by_others().contains(&v.rank)
            }
        }
    }

    /// Returns the ranks that other ranks reported as dead or unresponsive, or without such a
    /// report the rank that the record names.
    fn ranks_blamed_by_others(&self) -> BTreeSet<u32> {
        let marks = self.views.iter().flat_map(|v| v.marks().map(move |(_, m)| (v.rank, m)));
        let mut blamed: BTreeSet<u32> = marks
            .filter(|(rank, m)| m.event == "failed" && m.blamed_rank != Some(*rank))
            .filter_map(|(_, m)| m.blamed_rank)
            .collect();
        if blamed.is_empty() {
            blamed.extend(self.recorded_cause().and_then(|c| c.rank));
        }
        blamed
    }

    fn find_lost_launcher(&self) -> Option<Finding> {
        let gone = |class: Option<&str>| class == Some(LAUNCHER_GONE);
        let by_record = self.recorded_cause();
        let first = self.failure_marks().min_by_key(|(at, _)| *at).and_then(|(_, m)| m.class.as_deref());
        let is_lost = gone(first) || gone(by_record.map(|c| c.class.as_str()));
        is_lost.then(findings::lost_launcher_finding)
    }

    /// Finds two ranks that both lived and reported each other as dead or stalled: neither is at
    /// fault, but what connects them.
    fn find_cut_link(&self) -> Option<Finding> {
        let reported = |v: &RankView<'_>| {
            let own = v.marks().map(|(_, m)| m).find(|m| m.event == "failed" && !m.is_relayed)?;
            own.blamed_rank.filter(|rank| *rank != v.rank && is_death(own.class.as_deref()))
        };
        let pairs = self.views.iter().filter_map(|v| Some((v, self.view(reported(v)?)?)));
        let mut mutual = pairs.filter(|(v, other)| v.rank < other.rank && reported(other) == Some(v.rank));
        mutual.next().map(|(v, other)| findings::cut_link_finding(v.rank, other.rank))
    }

    /// Returns the failure that ended the run, according to its record.
    fn recorded_cause(&self) -> Option<&FailureCause> {
        self.evidence.record.as_ref()?.cause()
    }

    /// Iterates over the failures that ranks reported, with their times since 1970.
    fn failure_marks(&self) -> impl Iterator<Item = (u64, &FlightMark)> {
        self.views.iter().flat_map(|v| {
            let failed = v.marks().filter(|(_, m)| m.event == "failed" && !repeats_relayed(v, m));
            failed.map(|(at, m)| (v.wall_ns(at), m))
        })
    }

    fn view(&self, rank: u32) -> Option<&RankView<'_>> {
        self.views.get(rank as usize)
    }

    /// Finds the ranks at which the wait graph ends or cycles, if their silence, another rank's
    /// report or the end of the run shows that they are stuck.
    fn find_stuck_ranks(&self) -> Vec<Finding> {
        let mut out = Vec::new();
        // A process that stopped the run for a stall had a limit of its own, learned over more
        // history than the ring holds.
        let blamed = if self.state == AutopsyRunState::Running {
            BTreeSet::new()
        } else {
            self.ranks_blamed_by_others()
        };
        let counts = |v: &RankView<'_>| self.is_silent_too_long(v) || blamed.contains(&v.rank);
        for v in &self.views {
            if self.waits.root_hosts.contains(&v.rank) && counts(v) {
                out.push(findings::silence_finding(self, v));
            } else if self.waits.root_devices.contains(&v.rank) && counts(v) {
                out.push(findings::device_behind_finding(self, v));
            }
        }
        let long =
            |ranks: &[u32]| ranks.iter().all(|r| self.view(*r).is_some_and(|v| self.is_silent_too_long(v)));
        // A cycle in a run that has ended is a cause, however short the wait was.
        let over = self.state != AutopsyRunState::Running;
        for cycle in self.waits.cycles.iter().filter(|c| over || long(c)) {
            out.push(findings::cycle_finding(self, cycle));
        }
        if let Some(ranks) = self.waits.stalled_groups.iter().find(|t| long(t)).filter(|_| out.is_empty()) {
            // A rank that was stopped and continued after the end of the run enters the collective
            // late, and only the report of its peer shows who was missing.
            let reported = blamed.first().filter(|_| blamed.len() == 1).and_then(|rank| self.view(*rank));
            out.push(match reported {
                Some(v) => findings::silence_finding(self, v),
                None => findings::transport_finding(self, ranks),
            });
        }
        out
    }

    /// Finds the only rank that others reported as dead or stalled, if nothing else distinguishes it:
    /// it was stopped and continued after the end of the run.
    fn find_blamed_rank(&self) -> Option<Finding> {
        let blamed = self.ranks_blamed_by_others();
        let only = blamed.first().filter(|_| blamed.len() == 1 && self.state == AutopsyRunState::Failed)?;
        Some(findings::silence_finding(self, self.view(*only)?))
    }

    /// Returns whether a rank has been silent for longer than work explains; for a rank without a
    /// record, whether another rank has waited for it for that long.
    fn is_silent_too_long(&self, v: &RankView<'_>) -> bool {
        let gaps = self.views.iter().map(|v| v.longest_gap_ns).max().unwrap_or(0);
        let limit = MIN_SILENCE_NS.max(gaps.saturating_mul(SILENCE_FACTOR));
        let long = |v: &RankView<'_>| self.end_ns.saturating_sub(v.engine_wall_ns) > limit;
        match v.flight {
            Some(_) => long(v),
            None => self
                .waits
                .waiting_ranks(v.rank)
                .into_iter()
                .filter_map(|r| self.view(r))
                .any(|waiter| waiter.flight.is_some() && long(waiter)),
        }
    }

    fn compare_with_record(&self, findings: &[Finding]) -> (RecordAgreement, String) {
        let Some(record) = &self.evidence.record else { return (RecordAgreement::Unknown, String::new()) };
        let culprits: BTreeSet<u32> = findings.iter().flat_map(|f| f.ranks.iter().copied()).collect();
        let Some(cause) = self.recorded_cause() else {
            let what = match (&record.end, findings.is_empty()) {
                (Some(_), true) => return (RecordAgreement::Agrees, "the record reports no failure".into()),
                (Some(_), false) => "the record reports no failure",
                (None, _) => "the record has no end line",
            };
            return (RecordAgreement::Silent, what.to_string());
        };
        let code = cause.code.as_deref().unwrap_or("no code");
        let rank = cause.rank.map_or(String::new(), |r| format!(", rank {r}"));
        let said = format!("{code}, {}{rank}", cause.class);
        match cause.rank {
            _ if culprits.is_empty() => (RecordAgreement::Unknown, format!("the record reports {said}")),
            Some(r) if culprits.contains(&r) => {
                (RecordAgreement::Agrees, format!("the record agrees: {said}"))
            }
            Some(r) => {
                let why =
                    self.view(r).map_or("no such rank".to_string(), |v| findings::explain_innocence(self, v));
                (RecordAgreement::Disagrees, format!("the record disagrees: {said}; but {why}"))
            }
            None => (RecordAgreement::Unknown, format!("the record names no rank: {said}")),
        }
    }
}

/// Class of a failure for which no rank is at fault.
const LAUNCHER_GONE: &str = "the launching process is gone";

/// Returns whether a failure of this class is one that a rank cannot report about itself.
fn is_death(class: Option<&str>) -> bool {
    matches!(class, Some("a rank died" | "a rank stalled"))
}

/// Returns whether a rank reports a failure of its own and does not relay another rank's.
fn is_own_failure(rank: u32, m: &FlightMark) -> bool {
    m.event == "failed" && !m.is_relayed && m.blamed_rank == Some(rank) && !is_death(m.class.as_deref())
}

/// Returns whether a rank repeats a failure that it relayed before, as it does when it exits.
fn repeats_relayed(v: &RankView<'_>, m: &FlightMark) -> bool {
    !m.is_relayed && v.marks().any(|(_, r)| r.event == "failed" && r.is_relayed && r.code == m.code)
}

fn format_line_count(n: usize) -> String {
    format!("{n} line{}", if n == 1 { "" } else { "s" })
}

impl PlanDivergence<'_> {
    fn is_missing(&self) -> bool {
        matches!(self, PlanDivergence::Missing { .. })
    }
}
