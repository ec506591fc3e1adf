//! What a run's flight records say happened: who departed, who fell silent, who waits for whom, and who is only an echo.
//!
//! A pure function of records. Waits form a graph over ranks: a rank whose host waits in a collective waits for the
//! hosts that have not come to it, or, where all came, for the devices that are behind. Whoever is waited for and
//! waits for nobody is where the hang began. Accusations need more than that: a rank that told of somebody else's
//! failure was well, and a wait that is no longer than others were is work.

mod graph;
mod print;
mod say;
mod view;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};
use tessera_base::Counterexample;

use crate::flight::{Flight, Header, Mark, write_ranks};
use crate::record::{Record, Status};

use graph::Waits;
use view::{Departure, RankView};

/// A rank that is silent for less is never accused of it.
const SILENCE_FLOOR_NS: u64 = 2_000_000_000;
/// How many times the longest quiet time of a healthy stretch a silence must last.
const SILENCE_FACTOR: u64 = 4;
/// A header that tells of more ranks than that is damaged.
const MOST_RANKS: u32 = 65_536;

/// How a process is at the moment of the autopsy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Vitals {
    /// It runs or sleeps.
    Alive,
    /// It was stopped by a signal and goes on when told to.
    Stopped,
    /// It is no more.
    Gone,
}

/// How a rank's process ended, as its launcher saw it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEnd {
    /// The rank.
    pub rank: u32,
    /// Its exit status.
    pub status: Option<i32>,
    /// The signal that killed it.
    pub signal: Option<i32>,
}

/// What is known of a run.
#[derive(Debug, Clone, Default)]
pub struct Evidence {
    /// The record, if it can be read.
    pub record: Option<Record>,
    /// Flight records, of other runs too.
    pub flights: Vec<Flight>,
    /// How processes ended.
    pub ends: Vec<ProcessEnd>,
    /// How processes are now, where that can be known.
    pub vitals: BTreeMap<u32, Vitals>,
    /// Now, in nanoseconds since 1970; only where some process of the run is alive.
    pub now_ns: Option<u64>,
    /// Collectives of the sealed plan by phase and rank, where it is at hand.
    pub plan: BTreeMap<(String, u32), Vec<String>>,
    /// Members of groups by name, for lines that do not say them.
    pub groups: BTreeMap<String, Vec<Vec<u32>>>,
    /// Trouble with files, for the reader of the report.
    pub notes: Vec<String>,
}

/// What became of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RunState {
    /// It ended well.
    Complete,
    /// Its user stopped it.
    Interrupted,
    /// It failed, by its record or by what its ranks wrote.
    Failed,
    /// It goes on.
    Running,
    /// It is over and never said how it ended.
    Unfinished,
}

/// What is wrong with a rank, or with several.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Its collectives are not those of the plan, or not those of its peers.
    Departed,
    /// It reported a failure of its own.
    Failed,
    /// Its results or state are not those of its peers, as the leader found.
    Drifted,
    /// It was refused, or broke the protocol, before any collective.
    Refused,
    /// Somebody waits for its host, and it waits for nobody: dead, stopped, or stuck between two collectives.
    HostSilent,
    /// Somebody waits for its device, which is behind its peers'.
    DeviceBehind,
    /// Others wait in a call that it never began.
    NeverReached,
    /// Ranks wait for each other in a circle.
    Cycle,
    /// All members are in one collective, which does not end.
    Transport,
    /// What the ranks share is gone: the launcher, or the host.
    Launcher,
}

/// One cause.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Finding {
    /// What.
    pub class: Class,
    /// The culprits; empty where it is no rank's fault. Of a circle all of it, which no evidence tells apart.
    pub ranks: Vec<u32>,
    /// One sentence.
    pub says: String,
    /// Facts behind it.
    pub evidence: Vec<String>,
    /// Who waits for whom, from somebody who only waits to the culprit.
    pub chain: Vec<String>,
    /// The same as a drawing.
    #[serde(skip)]
    pub proof: Option<Counterexample>,
}

/// How a rank stands.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct RankState {
    /// The rank.
    pub rank: u32,
    /// In a word or two.
    pub state: String,
    /// The last thing it began.
    pub at: String,
    /// Nanoseconds from its last line to the end of the run, or to now; nothing without a flight record.
    pub silent_ns: Option<u64>,
    /// For whom it waits.
    pub waits_for: Vec<u32>,
}

/// How far the members of a group came.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct GroupState {
    /// Name and members.
    pub group: String,
    /// Rank, and its last collective over the group.
    pub reached: Vec<(u32, String)>,
}

/// What the record says against what was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Agreement {
    /// Both name the same, or nothing.
    Agrees,
    /// They name others.
    Disagrees,
    /// The record names no failure.
    Silent,
    /// There is no record, or it names no rank.
    Open,
}

/// The report.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Autopsy {
    /// What became of the run.
    pub state: RunState,
    /// Causes, the strongest first. None: nothing wrong was found.
    pub findings: Vec<Finding>,
    /// The record against the findings.
    pub agreement: Agreement,
    /// The same in words; empty without a record.
    pub record_says: String,
    /// What kind of trouble it is: `hang`, `drift`, `crash`, `refusal` or `none`.
    pub triage: &'static str,
    /// What to do next.
    pub next: String,
    /// Every rank.
    pub ranks: Vec<RankState>,
    /// Every group of the last call.
    pub groups: Vec<GroupState>,
    /// What should be known about the evidence itself.
    pub notes: Vec<String>,
}

impl Autopsy {
    /// Ranks that are named as culprits, ascending.
    #[must_use]
    pub fn culprits(&self) -> Vec<u32> {
        let all: BTreeSet<u32> = self.findings.iter().flat_map(|f| f.ranks.iter().copied()).collect();
        all.into_iter().collect()
    }
}

/// Looks at everything that a run left behind.
#[must_use]
pub fn autopsy(evidence: &Evidence) -> Autopsy {
    let mut notes = evidence.notes.clone();
    let flights = own(evidence, &mut notes);
    let world = world(evidence, &flights);
    let views: Vec<RankView<'_>> =
        (0..world).map(|r| RankView::new(r, flights.get(&r).copied(), evidence)).collect();
    let state = state(evidence, &views);
    let end_ns = end_ns(evidence, &views);
    let case = Case { evidence, waits: Waits::of(&views), views, state, end_ns };
    let findings = case.findings(&mut notes);
    let mut absent = Vec::new();
    for v in &case.views {
        match v.flight {
            None if findings.iter().any(|f| f.ranks == [v.rank]) => {}
            None => absent.push(v.rank),
            Some(f) if f.torn > 0 => {
                notes.push(format!("{} of rank {} cannot be read", lines(f.torn), v.rank))
            }
            Some(_) => {}
        }
    }
    match (&absent[..], write_ranks(&absent)) {
        ([], _) => {}
        ([one], _) => notes.push(format!("rank {one} has no flight record")),
        (many, said) if said.is_empty() => notes.push(format!("{} ranks have no flight record", many.len())),
        (_, said) => notes.push(format!("ranks {said} have no flight record")),
    }
    let (agreement, record_says) = case.agreement(&findings);
    let (triage, next) = say::next(&case, &findings);
    Autopsy {
        state,
        agreement,
        record_says,
        triage,
        next,
        ranks: case.views.iter().map(|v| case.rank_state(v, &findings)).collect(),
        groups: case.groups(),
        findings,
        notes,
    }
}

/// The flights of this run, by rank. The run is the one that most files are of, and the record names its plan.
fn own<'a>(evidence: &'a Evidence, notes: &mut Vec<String>) -> BTreeMap<u32, &'a Flight> {
    let mut sessions: BTreeMap<&str, (bool, usize, u64)> = BTreeMap::new();
    let planned = |f: &Flight| evidence.record.as_ref().is_none_or(|r| r.start.plan == f.header.plan);
    let (whole, damaged): (Vec<&Flight>, Vec<&Flight>) =
        evidence.flights.iter().partition(|f| is_possible(&f.header));
    for f in damaged {
        let (rank, world) = (f.header.rank, f.header.world);
        notes.push(format!("a record says that it is of rank {rank} of {world}: it is damaged and left out"));
    }
    for f in &whole {
        let s = sessions.entry(&f.header.session).or_default();
        *s = (s.0 || planned(f), s.1 + 1, s.2.max(f.header.wall_ns));
    }
    let run = sessions.iter().max_by_key(|(_, weight)| **weight).map(|(s, _)| *s);
    let mut own: BTreeMap<u32, &Flight> = BTreeMap::new();
    for f in whole {
        let rank = f.header.rank;
        if Some(f.header.session.as_str()) != run {
            notes.push(format!("a record of rank {rank} is of another run (session {})", f.header.session));
        } else if own.get(&rank).is_some_and(|other| other.last_ns() >= f.last_ns()) {
            notes.push(format!("a second record of rank {rank} is older and left out"));
        } else {
            own.insert(rank, f);
        }
    }
    own
}

/// Whether there can be such a rank.
fn is_possible(header: &Header) -> bool {
    let (rank, world) = (header.rank, header.world);
    // A world of 0 is one that its rank did not know.
    rank < MOST_RANKS && world <= MOST_RANKS && (world == 0 || rank < world)
}

/// Ranks of the run, at most [`MOST_RANKS`].
fn world(evidence: &Evidence, flights: &BTreeMap<u32, &Flight>) -> u32 {
    let recorded = evidence.record.iter().flat_map(|r| &r.start.ranks).map(|r| r.rank.saturating_add(1));
    let said = flights.values().map(|f| f.header.world.max(f.header.rank.saturating_add(1)));
    recorded.filter(|n| *n <= MOST_RANKS).chain(said).max().unwrap_or(0).min(MOST_RANKS)
}

fn state(evidence: &Evidence, views: &[RankView<'_>]) -> RunState {
    let by_record = evidence.record.as_ref().map_or(Status::Running, Record::status);
    let failed = || views.iter().any(|v| v.marks().any(|(_, m)| m.mark == "failed"));
    match by_record {
        Status::Complete => RunState::Complete,
        Status::Interrupted => RunState::Interrupted,
        Status::Failed => RunState::Failed,
        Status::Running if failed() => RunState::Failed,
        Status::Running if evidence.vitals.values().any(|v| *v != Vitals::Gone) => RunState::Running,
        Status::Running => RunState::Unfinished,
    }
}

/// The moment to which silences are counted: now for a run that goes on, otherwise the last word of any rank that was
/// said before the end was known.
fn end_ns(evidence: &Evidence, views: &[RankView<'_>]) -> u64 {
    evidence.now_ns.unwrap_or_else(|| views.iter().map(|v| v.last_wall_ns).max().unwrap_or(0))
}

/// Everything at hand while causes are looked for.
struct Case<'a> {
    evidence: &'a Evidence,
    views: Vec<RankView<'a>>,
    waits: Waits,
    state: RunState,
    end_ns: u64,
}

impl Case<'_> {
    /// From what is certain to what is likely: the first kind of evidence that names a cause ends the search.
    fn findings(&self, notes: &mut Vec<String>) -> Vec<Finding> {
        let departed = self.departed();
        if !departed.is_empty() {
            return departed;
        }
        if matches!(self.state, RunState::Complete | RunState::Interrupted) {
            return Vec::new();
        }
        let kinds: [&dyn Fn() -> Vec<Finding>; 6] = [
            &|| self.differing(),
            &|| self.failed(),
            &|| self.reported(),
            &|| self.launcher(),
            &|| self.gone(),
            &|| self.stuck(),
        ];
        let found = kinds.iter().map(|k| k()).find(|f| !f.is_empty()).unwrap_or_default();
        if found.is_empty() && self.state == RunState::Unfinished {
            notes.push(
                "the run has no end line and no rank says why: every process may have been killed at once"
                    .into(),
            );
        }
        found
    }

    /// Ranks whose own sequence is not the plan's.
    fn departed(&self) -> Vec<Finding> {
        self.views.iter().filter_map(|v| Some(say::departed(self, v, v.departure.as_ref()?))).collect()
    }

    /// Members that called another thing at the same position, where no plan was compared.
    fn differing(&self) -> Vec<Finding> {
        let Some(first) = self.waits.differences.first() else { return Vec::new() };
        vec![say::differing(self, first)]
    }

    /// The rank that first reported a failure of its own.
    fn failed(&self) -> Vec<Finding> {
        let own = self.views.iter().filter_map(|v| {
            let (at, mark) = v.marks().find(|(_, m)| is_own_failure(v.rank, m))?;
            Some((v.wall(at), v, mark))
        });
        // Deaths are told by others, and a rank that names itself as stalled is its leader's voice.
        own.min_by_key(|(at, ..)| *at).map(|(_, v, mark)| say::failed(self, v, mark)).into_iter().collect()
    }

    /// What the leader found out about a rank that did not know it itself: results that differ, refusals.
    fn reported(&self) -> Vec<Finding> {
        let told = self.views.iter().flat_map(|v| v.marks().map(move |(at, m)| (v.wall(at), m)));
        let about = told.filter(|(_, m)| m.mark == "failed" && !is_death(m.class.as_deref()));
        let first = about.filter(|(_, m)| m.about.is_some()).min_by_key(|(at, _)| *at);
        let by_record = self.evidence.record.as_ref().and_then(|r| r.end.as_ref()?.cause.as_ref());
        match (first, by_record) {
            (Some((_, m)), _) => say::reported(
                m.about,
                m.code.as_deref(),
                m.class.as_deref().unwrap_or_default(),
                m.text.as_deref().unwrap_or_default(),
            ),
            (None, Some(c)) if !is_death(Some(&c.class)) && c.class != LAUNCHER_GONE => {
                say::reported(c.rank, c.code.as_deref(), &c.class, &c.message)
            }
            _ => None,
        }
        .into_iter()
        .collect()
    }

    /// Ranks that were well when last heard of and said no goodbye, while somebody else could.
    fn gone(&self) -> Vec<Finding> {
        let mut suspects: Vec<&RankView<'_>> = self.views.iter().filter(|v| self.is_gone(v)).collect();
        let told = self.testimony();
        let named: Vec<&RankView<'_>> = suspects.iter().copied().filter(|v| told.contains(&v.rank)).collect();
        if !named.is_empty() {
            suspects = named;
        } else if self.views.iter().all(|v| v.flight.is_none() || self.is_gone(v)) {
            // All went at once: nothing tells the first from the rest.
            return Vec::new();
        } else if self.state != RunState::Running {
            // The launcher kills who does not leave, so of several silent ones those count that somebody waits for.
            let waited: Vec<&RankView<'_>> =
                suspects.iter().copied().filter(|v| self.waits.roots().contains(&v.rank)).collect();
            if waited.is_empty() {
                suspects.retain(|v| self.waits.direct(v.rank).is_empty());
            } else {
                suspects = waited;
            }
        }
        suspects.into_iter().map(|v| say::silent(self, v)).collect()
    }

    fn is_gone(&self, v: &RankView<'_>) -> bool {
        if v.said_goodbye() {
            return false;
        }
        let vitals = self.evidence.vitals.get(&v.rank);
        match self.state {
            // While others live, a stopped process and one that is no more are facts.
            RunState::Running => {
                matches!(vitals, Some(Vitals::Stopped | Vitals::Gone))
                    || (v.flight.is_none() && self.waits.roots().contains(&v.rank) && self.is_long(v))
            }
            // A record that is not here says nothing: somebody must have missed its rank.
            _ => {
                let killed = self.evidence.ends.iter().any(|e| e.rank == v.rank && e.signal.is_some());
                v.flight.is_some() || killed || self.is_long(v) || self.testimony().contains(&v.rank)
            }
        }
    }

    /// Ranks that others say are dead or do not answer.
    fn testimony(&self) -> BTreeSet<u32> {
        let told = self.views.iter().flat_map(|v| v.marks().map(move |(_, m)| (v.rank, m)));
        let mut about: BTreeSet<u32> = told
            .filter(|(rank, m)| m.mark == "failed" && m.about != Some(*rank))
            .filter_map(|(_, m)| m.about)
            .collect();
        let cause = self.evidence.record.as_ref().and_then(|r| r.end.as_ref()?.cause.as_ref()?.rank);
        if about.is_empty() {
            about.extend(cause);
        }
        about
    }

    fn launcher(&self) -> Vec<Finding> {
        let gone = |class: Option<&str>| class == Some(LAUNCHER_GONE);
        let by_record = self.evidence.record.as_ref().and_then(|r| r.end.as_ref()?.cause.as_ref());
        let told = self.views.iter().flat_map(|v| v.marks().map(move |(at, m)| (v.wall(at), m)));
        let first = told.filter(|(_, m)| m.mark == "failed").min_by_key(|(at, _)| *at);
        let first = first.and_then(|(_, m)| m.class.as_deref());
        if gone(first) || gone(by_record.map(|c| c.class.as_str())) {
            vec![say::launcher()]
        } else {
            Vec::new()
        }
    }

    /// What the graph of waits says, where a wait is long enough to be one.
    fn stuck(&self) -> Vec<Finding> {
        let mut out = Vec::new();
        // Who stopped a run for a stall had a limit of its own, learned over more than the ring holds.
        let told = if self.state == RunState::Running { BTreeSet::new() } else { self.testimony() };
        let counts = |v: &RankView<'_>| self.is_long(v) || told.contains(&v.rank);
        for v in &self.views {
            if self.waits.hosts.contains(&v.rank) && counts(v) {
                out.push(say::silent(self, v));
            } else if self.waits.devices.contains(&v.rank) && counts(v) {
                out.push(say::behind(self, v));
            }
        }
        let long = |ranks: &[u32]| {
            ranks.iter().all(|r| self.views.get(*r as usize).is_some_and(|v| self.is_long(v)))
        };
        // What is over cannot go on by itself, however short it was.
        let over = self.state != RunState::Running;
        for circle in self.waits.circles.iter().filter(|c| over || long(c)) {
            out.push(say::cycle(self, circle));
        }
        if out.is_empty()
            && let Some(ranks) = self.waits.together.iter().find(|t| long(t))
        {
            out.push(say::transport(self, ranks));
        }
        out
    }

    /// Whether a rank has been silent for longer than work explains; of one without a record, whether another waits
    /// for it for so long.
    fn is_long(&self, v: &RankView<'_>) -> bool {
        let gaps = self.views.iter().map(|v| v.longest_gap_ns).max().unwrap_or(0);
        let limit = SILENCE_FLOOR_NS.max(gaps.saturating_mul(SILENCE_FACTOR));
        let long = |v: &RankView<'_>| self.end_ns.saturating_sub(v.engine_wall_ns) > limit;
        match v.flight {
            Some(_) => long(v),
            None => self
                .waits
                .waiters(v.rank)
                .into_iter()
                .filter_map(|r| self.views.get(r as usize))
                .any(|waiter| waiter.flight.is_some() && long(waiter)),
        }
    }

    fn agreement(&self, findings: &[Finding]) -> (Agreement, String) {
        let Some(record) = &self.evidence.record else { return (Agreement::Open, String::new()) };
        let culprits: BTreeSet<u32> = findings.iter().flat_map(|f| f.ranks.iter().copied()).collect();
        let Some(cause) = record.end.as_ref().and_then(|e| e.cause.as_ref()) else {
            let what = match (&record.end, findings.is_empty()) {
                (Some(_), true) => return (Agreement::Agrees, "the record ends without a failure".into()),
                (Some(_), false) => "the record ends without a failure",
                (None, _) => "the record has no end line",
            };
            return (Agreement::Silent, what.to_string());
        };
        let code = cause.code.as_deref().unwrap_or("no code");
        let rank = cause.rank.map_or(String::new(), |r| format!(", rank {r}"));
        let said = format!("{code}, {}{rank}", cause.class);
        match cause.rank {
            _ if culprits.is_empty() => (Agreement::Open, format!("the record says {said}")),
            Some(r) if culprits.contains(&r) => (Agreement::Agrees, format!("the record agrees: {said}")),
            Some(r) => {
                let view = self.views.get(r as usize);
                let why = view.map_or("no such rank".to_string(), |v| say::innocent(self, v));
                (Agreement::Disagrees, format!("the record says otherwise: {said}; but {why}"))
            }
            None => (Agreement::Open, format!("the record names no rank: {said}")),
        }
    }
}

/// Words of the class of failure that no rank can be blamed for.
const LAUNCHER_GONE: &str = "the launching process is gone";

/// Whether a failure of this class is told of a rank that cannot tell it itself.
fn is_death(class: Option<&str>) -> bool {
    matches!(class, Some("a rank died" | "a rank stalled"))
}

/// Whether a rank speaks of itself, and not as the echo of somebody else.
fn is_own_failure(rank: u32, m: &Mark) -> bool {
    m.mark == "failed" && !m.echo && m.about == Some(rank) && !is_death(m.class.as_deref())
}

fn lines(n: usize) -> String {
    format!("{n} line{}", if n == 1 { "" } else { "s" })
}

/// A departure is of one of these kinds.
impl Departure<'_> {
    fn is_missing(&self) -> bool {
        matches!(self, Departure::Missing { .. })
    }
}
