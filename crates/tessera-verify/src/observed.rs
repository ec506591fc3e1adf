//! Checks observed collective sequences: what the ranks of any program launched, under the same
//! rules as plans.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Mismatch, RankCollective, Span};

use crate::codes::{T0301, T0302, T0303, T0304, T0305, T0334, T0338, T0341, T0342};
use crate::matching::{CommunicatorRanks, HeldLaunches, LaunchSequences, RankEndpoint, RoleLaunches};
use crate::sequence::SequenceSource;
use crate::{display, launch_order, sequence};

/// Maximum number of ranks in a trace; a larger rank number is treated as an error.
const RANKS_MAX: u32 = 65_536;

/// A collective as one rank launched it. Names are not interpreted: unknown ops and dtypes are
/// compared as well.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct ObservedCall {
    /// Op name: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`,
    /// `recv`, or another.
    pub op: String,
    /// Element type, such as `bf16`.
    pub dtype: String,
    /// Elements that this rank passes in; for a receive, elements that it receives.
    pub count: u64,
    /// Extents that multiply to `count`, if known: shown in messages, never compared.
    pub shape: Vec<u64>,
    /// Reduction: `sum`, `max`…; `None` if the call has none.
    pub reduction: Option<String>,
    /// World rank of the root, such as that of a `broadcast`; `None` if the call has no root.
    pub root: Option<u32>,
    /// World rank of the peer of a send or receive.
    pub peer: Option<u32>,
    /// Elements sent to each member and received from each member, in the order of the group's
    /// ranks, for an all-to-all with per-peer counts.
    pub per_peer: Option<(Vec<u64>, Vec<u64>)>,
    /// Name of the graph that the call was captured into; `None` for an eager call.
    pub graph: Option<String>,
}

/// The index of a group in [`Traces`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub(crate) u32);

/// The launches of all ranks, each rank's in host order.
#[derive(Debug, Clone, Default)]
pub struct Traces {
    pub(crate) groups: Vec<(String, Vec<u32>)>,
    pub(crate) calls: Vec<ObservedCall>,
    pub(crate) streams: Vec<String>,
    pub(crate) ranks: Vec<RankTrace>,
    known_calls: HashMap<ObservedCall, u32>,
    known_streams: HashMap<String, u32>,
    known_groups: HashMap<(String, Vec<u32>), u32>,
}

#[derive(Debug, Clone)]
pub(crate) struct RankTrace {
    pub(crate) rank: u32,
    /// Name of the file or text that the trace was read from.
    pub(crate) source: String,
    pub(crate) launches: Vec<ObservedLaunch>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct ObservedLaunch {
    pub(crate) group: u32,
    pub(crate) call: u32,
    pub(crate) stream: u32,
    /// Batch number: launches with the same number are issued together; 0 for a launch on its own.
    pub(crate) batch: u32,
    pub(crate) span: Span,
}

impl Traces {
    /// Creates traces without ranks.
    #[must_use]
    pub fn new() -> Traces {
        Traces::default()
    }

    /// Adds a group by name and members (world ranks; sorted, duplicates removed). Groups with
    /// equal names and different members are distinct.
    pub fn add_group(&mut self, name: &str, ranks: &[u32]) -> GroupId {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        GroupId(intern_item(&mut self.known_groups, &mut self.groups, &(name.to_string(), ranks)))
    }

    /// Begins the trace of a rank, read from `source`, and returns the index of the trace.
    pub fn add_rank(&mut self, rank: u32, source: &str) -> usize {
        self.ranks.push(RankTrace { rank, source: source.to_string(), launches: Vec::new() });
        self.ranks.len() - 1
    }

    /// Appends a launch to trace `trace`. `batch` numbers launches that are issued together
    /// (grouped sends and receives), 0 for a launch on its own; `span` locates the launch in the
    /// source. An unknown trace or group is ignored.
    pub fn push_launch(
        &mut self,
        trace: usize,
        group: GroupId,
        call: ObservedCall,
        stream: &str,
        batch: u32,
        span: Span,
    ) {
        let call = intern_item(&mut self.known_calls, &mut self.calls, &call);
        let stream = intern_item(&mut self.known_streams, &mut self.streams, stream);
        let known = (group.0 as usize) < self.groups.len();
        if let Some(t) = self.ranks.get_mut(trace).filter(|_| known) {
            t.launches.push(ObservedLaunch { group: group.0, call, stream, batch, span });
        }
    }
}

/// Returns the index of an item in `list`, appending the item if it is new.
fn intern_item<T, Q>(known: &mut HashMap<T, u32>, list: &mut Vec<T>, item: &Q) -> u32
where
    T: std::borrow::Borrow<Q> + std::hash::Hash + Eq + Clone,
    Q: ToOwned<Owned = T> + std::hash::Hash + Eq + ?Sized,
{
    if let Some(id) = known.get(item) {
        return *id;
    }
    let id = list.len() as u32;
    list.push(item.to_owned());
    known.insert(item.to_owned(), id);
    id
}

/// Checks observed sequences across ranks: groups agree position by position, sends match receives,
/// per-peer counts agree, no wait cycle exists, and one launch order serves all ranks. Traces
/// contain no layouts, events or memory, so these are not checked.
#[must_use]
pub fn check_traces(traces: &Traces) -> Diagnostics {
    let membership_errors = check_memberships(traces);
    let mut out = check_completeness(traces);
    // A table indexed by rank is as long as the largest rank number, with one entry per number.
    let ranks: BTreeSet<u32> = traces.ranks.iter().map(|t| t.rank).collect();
    let numbered = ranks.len() == traces.ranks.len() && ranks.last().is_none_or(|r| *r < RANKS_MAX);
    if !membership_errors.is_empty() || !numbered {
        out.extend(membership_errors);
        return out;
    }
    let witness = ObservedSequences::new(traces);
    let found = sequence::check(&witness);
    let agree = found.is_empty();
    out.extend(found);
    if agree {
        out.extend(witness.check_exchanges());
    }
    // With a trace missing, a wait cycle through that rank would be a guess.
    if out.is_empty() {
        out.extend(launch_order::check(&witness, || witness.held_by_streams()));
    }
    out
}

/// Checks that every member of every group has exactly one trace.
fn check_completeness(traces: &Traces) -> Diagnostics {
    let mut out = Vec::new();
    let mut known: BTreeMap<u32, &str> = BTreeMap::new();
    for t in &traces.ranks {
        if t.rank >= RANKS_MAX {
            let message = format!("rank {} exceeds the limit of {RANKS_MAX} ranks", t.rank);
            out.push(Diagnostic::error(&T0341, message).with_label(&t.source, "this trace"));
        }
        if let Some(first) = known.insert(t.rank, &t.source) {
            let message = format!("two traces of rank {}", t.rank);
            out.push(
                Diagnostic::error(&T0341, message)
                    .with_label(first, "the first trace")
                    .with_label(&t.source, "the second trace"),
            );
        }
    }
    let mut missing: BTreeMap<u32, &str> = BTreeMap::new();
    for (name, ranks) in &traces.groups {
        for r in ranks.iter().filter(|r| !known.contains_key(r)) {
            missing.entry(*r).or_insert(name);
        }
    }
    if let Some((_, group)) = missing.iter().next() {
        let ranks: Vec<u32> = missing.keys().copied().collect();
        let message = format!("no trace of {}", display::list_rank_numbers(&ranks));
        let label = format!("the first missing rank is a member of group {group}");
        out.push(
            Diagnostic::error(&T0341, message).with_label(format!("{} traces", traces.ranks.len()), label),
        );
    }
    out
}

/// Checks that every rank uses its own groups, with roots and peers inside these groups.
fn check_memberships(traces: &Traces) -> Diagnostics {
    let mut out = Vec::new();
    for t in &traces.ranks {
        let mut reported = BTreeSet::new();
        for item in &t.launches {
            if !reported.insert((item.group, item.call)) {
                continue;
            }
            let (group, ranks) = &traces.groups[item.group as usize];
            let call = &traces.calls[item.call as usize];
            let lacks_peer = matches!(call.op.as_str(), "send" | "recv") && call.peer.is_none();
            let outside = |r: &u32| ranks.binary_search(r).is_err();
            let why = if outside(&t.rank) {
                format!("rank {} is not a member", t.rank)
            } else if let Some(root) = call.root.filter(|r| outside(r)) {
                format!("the root, rank {root}, is not a member")
            } else if let Some(peer) = call.peer.filter(|p| outside(p) || *p == t.rank) {
                format!("rank {} names rank {peer} as its peer", t.rank)
            } else if lacks_peer {
                "the call names no peer".to_string()
            } else {
                continue;
            };
            let message = format!("{} on group {group}: {why}", call.op);
            let label = format!("the members of group {group} are {}", display::list_rank_numbers(ranks));
            out.push(Diagnostic::error(&T0342, message).with_span_label(&t.source, label, item.span));
        }
    }
    out
}

/// Traces in the form that matching expects. Every rank has a role of its own.
struct ObservedSequences<'a> {
    traces: &'a Traces,
    sequences: LaunchSequences,
    /// Group index of each communicator.
    groups: Vec<u32>,
}

/// A rank's endpoint: a group, with the peer and whether the rank sends for a pair.
type RankEndpointKey = (u32, Option<(u32, bool)>);

impl<'a> ObservedSequences<'a> {
    fn new(traces: &'a Traces) -> ObservedSequences<'a> {
        let world = traces.ranks.iter().map(|t| t.rank as usize + 1).max().unwrap_or(0);
        // Rank numbers without a trace launch nothing.
        let mut meetings =
            LaunchSequences { role_of: vec![traces.ranks.len(); world], ..LaunchSequences::default() };
        let common = matching_ids(&traces.calls);
        let mut channels: Vec<BTreeMap<RankEndpointKey, u32>> = Vec::new();
        for (i, t) in traces.ranks.iter().enumerate() {
            meetings.role_of[t.rank as usize] = i;
            let (mut script, mut endpoints) = (RoleLaunches::default(), BTreeMap::new());
            // Traces repeat few kinds of calls, so this cache looks up the endpoint once per kind.
            let mut at: HashMap<(u32, u32), u32> = HashMap::new();
            for item in &t.launches {
                let channel = *at.entry((item.group, item.call)).or_insert_with(|| {
                    let call = &traces.calls[item.call as usize];
                    let pair = call.peer.map(|p| (p, call.op == "send"));
                    let next = endpoints.len() as u32;
                    *endpoints.entry((item.group, pair)).or_insert(next)
                });
                script.push_launch(channel, common[item.call as usize], item.batch);
            }
            meetings.launches_by_role.push(script);
            channels.push(endpoints);
        }
        meetings.launches_by_role.push(RoleLaunches::default());
        channels.push(BTreeMap::new());
        let mut observed = ObservedSequences { traces, sequences: meetings, groups: Vec::new() };
        observed.add_communicators(&channels);
        observed
    }

    fn add_communicators(&mut self, channels: &[BTreeMap<RankEndpointKey, u32>]) {
        let present: BTreeSet<u32> = self.traces.ranks.iter().map(|t| t.rank).collect();
        let of = |rank: u32, channel: RankEndpointKey| {
            let role = self.sequences.role_of[rank as usize];
            (rank, channels[role].get(&channel).copied())
        };
        for (g, (_, ranks)) in self.traces.groups.iter().enumerate() {
            let members: Vec<_> =
                ranks.iter().filter(|r| present.contains(r)).map(|r| of(*r, (g as u32, None))).collect();
            if members.iter().any(|m| m.1.is_some()) {
                self.sequences.communicators.push(CommunicatorRanks { members, is_pair: false });
                self.groups.push(g as u32);
            }
        }
        for rank in &present {
            let mine = &channels[self.sequences.role_of[*rank as usize]];
            for (group, pair) in mine.keys() {
                let Some((peer, sends)) = pair.filter(|(k, _)| present.contains(k)) else { continue };
                let (here, there) = (of(*rank, (*group, *pair)), of(peer, (*group, Some((*rank, !sends)))));
                if let Some(line) = CommunicatorRanks::for_transfer(here, there, sends) {
                    self.sequences.communicators.push(line);
                    self.groups.push(*group);
                }
            }
        }
    }

    /// Returns the edges that streams impose: each stream runs one launch after the other.
    fn held_by_streams(&self) -> Vec<HeldLaunches> {
        let one = |(script, t): (&RoleLaunches, &RankTrace)| {
            let mut edges: HeldLaunches = vec![Vec::new(); t.launches.len()];
            let mut last: HashMap<u32, Vec<usize>> = HashMap::new();
            for launch in script.batches() {
                let streams: BTreeSet<u32> = t.launches[launch.clone()].iter().map(|i| i.stream).collect();
                let before: BTreeSet<usize> =
                    streams.iter().filter_map(|s| last.get(s)).flatten().copied().collect();
                before.into_iter().for_each(|e| edges[e].extend(launch.clone()));
                streams.into_iter().for_each(|s| drop(last.insert(s, launch.clone().collect())));
            }
            edges
        };
        let mut out: Vec<HeldLaunches> =
            self.sequences.launches_by_role.iter().zip(&self.traces.ranks).map(one).collect();
        out.push(Vec::new());
        out
    }

    /// Checks that members of each all-to-all send what the others expect.
    fn check_exchanges(&self) -> Diagnostics {
        let exchange = |c: &ObservedCall| c.per_peer.is_some();
        if !self.traces.calls.iter().any(exchange) {
            return Vec::new();
        }
        let mut out = Vec::new();
        let places: Vec<Vec<Vec<usize>>> =
            self.sequences.launches_by_role.iter().map(RoleLaunches::launches_by_endpoint).collect();
        for (line, group) in self.sequences.communicators.iter().zip(&self.groups).filter(|(l, _)| !l.is_pair)
        {
            let steps = |m: &RankEndpoint| -> &[usize] {
                m.1.map_or(&[], |c| &places[self.sequences.role_of[m.0 as usize]][c as usize])
            };
            let all: Vec<&[usize]> = line.members.iter().map(steps).collect();
            let found = (0..all.first().map_or(0, |s| s.len())).find_map(|n| {
                let at: Vec<(u32, usize)> = line.members.iter().zip(&all).map(|(m, s)| (m.0, s[n])).collect();
                self.check_exchange(*group, n, &at)
            });
            out.extend(found);
        }
        out
    }

    /// Checks the n-th call of a group, if every member of the group has a trace.
    fn check_exchange(&self, group: u32, n: usize, at: &[(u32, usize)]) -> Option<Diagnostic> {
        let (name, ranks) = &self.traces.groups[group as usize];
        if at.len() != ranks.len() {
            return None;
        }
        let counts: Vec<&(Vec<u64>, Vec<u64>)> =
            at.iter().map(|(r, i)| self.observed_call(*r, *i).per_peer.as_ref()).collect::<Option<_>>()?;
        let proof = |d: Diagnostic, a: (u32, usize), b: (u32, usize)| {
            d.with_counterexample(Counterexample::Mismatch(Mismatch {
                group: format!("{name} of {}", display::list_rank_numbers(ranks)),
                position: n,
                field: "per-peer count".to_string(),
                sides: [a, b].map(|(r, i)| (r, Some(self.launch_step(r, i)))),
            }))
        };
        for (a, (sends, takes)) in at.iter().zip(&counts) {
            if sends.len() != ranks.len() || takes.len() != ranks.len() {
                let message = format!(
                    "rank {} lists {} send counts and {} receive counts, but its group {name} has {} members",
                    a.0,
                    sends.len(),
                    takes.len(),
                    ranks.len()
                );
                return Some(self.with_launch_label(
                    Diagnostic::error(&T0338, message),
                    a.0,
                    a.1,
                    self.describe_launch(a.0, a.1),
                ));
            }
        }
        for i in 0..at.len() {
            for j in 0..at.len() {
                let (sent, taken) = (counts[i].0[j], counts[j].1[i]);
                if sent != taken {
                    let (a, b) = (at[i], at[j]);
                    let message = format!(
                        "rank {} sends {sent} elements to rank {}, which expects {taken}, at position {n} of group {name}",
                        a.0, b.0
                    );
                    let d = self.with_launch_label(
                        Diagnostic::error(&T0338, message),
                        a.0,
                        a.1,
                        format!("sends {:?}", counts[i].0),
                    );
                    return Some(proof(
                        self.with_launch_label(d, b.0, b.1, format!("expects {:?}", counts[j].1)),
                        a,
                        b,
                    ));
                }
            }
        }
        None
    }

    fn observed_launch(&self, rank: u32, at: usize) -> (&RankTrace, &ObservedLaunch) {
        let t = &self.traces.ranks[self.sequences.role_of[rank as usize]];
        (t, &t.launches[at])
    }

    fn observed_call(&self, rank: u32, at: usize) -> &ObservedCall {
        &self.traces.calls[self.observed_launch(rank, at).1.call as usize]
    }
}

/// Returns, per call, a number that equals the number of every call that another member may match
/// with it.
fn matching_ids(calls: &[ObservedCall]) -> Vec<u32> {
    let mut known: HashMap<ObservedCall, u32> = HashMap::new();
    let one = |c: &ObservedCall| {
        let op = matching_op(c);
        // With per-peer counts, the total count differs between ranks.
        let count = if c.per_peer.is_some() { 0 } else { c.count };
        let per_peer = c.per_peer.as_ref().map(|_| Default::default());
        let key =
            ObservedCall { op: op.to_string(), count, shape: Vec::new(), peer: None, per_peer, ..c.clone() };
        let next = known.len() as u32;
        *known.entry(key).or_insert(next)
    };
    calls.iter().map(one).collect()
}

/// Returns the op name for matching, with a receive named after the send that it matches.
fn matching_op(c: &ObservedCall) -> &str {
    if c.op == "recv" { "send" } else { &c.op }
}

fn describe_call(c: &ObservedCall, group: &str) -> String {
    let reduction = c.reduction.as_ref().map_or(String::new(), |r| format!("({r})"));
    let moved = match &c.per_peer {
        Some((sends, takes)) => format!("{} {sends:?} to and {takes:?} from the members", c.dtype),
        None => format!("{}{}", c.dtype, format_extents(c)),
    };
    match (c.op.as_str(), c.peer) {
        ("send", Some(p)) => format!("send to rank {p} over {group} of {moved}"),
        (op, Some(p)) => format!("{op} from rank {p} over {group} of {moved}"),
        (op, None) if c.count == 0 && c.dtype.is_empty() => format!("{op} over {group}"),
        (op, None) => format!("{op}{reduction} over {group} of {moved}"),
    }
}

fn format_extents(c: &ObservedCall) -> String {
    if c.shape.is_empty() {
        return format!("[{}]", c.count);
    }
    let dims: Vec<String> = c.shape.iter().map(u64::to_string).collect();
    format!("[{}]", dims.join(", "))
}

impl SequenceSource for ObservedSequences<'_> {
    fn launch_sequences(&self) -> &LaunchSequences {
        &self.sequences
    }

    fn group_name(&self, line: usize) -> String {
        self.traces.groups[self.groups[line] as usize].0.clone()
    }

    fn rank_title(&self, rank: u32) -> String {
        let t = self.traces.ranks.get(self.sequences.role_of[rank as usize]);
        format!("rank {rank}, {}", t.map_or("no trace", |t| &t.source))
    }

    fn launch_step(&self, rank: u32, at: usize) -> RankCollective {
        let ((t, item), c) = (self.observed_launch(rank, at), self.observed_call(rank, at));
        let (name, members) = &self.traces.groups[item.group as usize];
        let mut ranks = c.peer.map_or(members.clone(), |p| vec![p, rank]);
        ranks.sort_unstable();
        RankCollective {
            description: describe_call(c, name),
            op: c.op.clone(),
            dtype: c.dtype.clone(),
            shape: format_extents(c),
            ranks,
            stream: self.traces.streams[item.stream as usize].clone(),
            index: at,
            source: Some((t.source.clone(), item.span)),
        }
    }

    fn describe_launch(&self, rank: u32, at: usize) -> String {
        let ((_, item), c) = (self.observed_launch(rank, at), self.observed_call(rank, at));
        let mut out = describe_call(c, &self.traces.groups[item.group as usize].0);
        if let Some(r) = c.root {
            out += &format!(" root {r}");
        }
        if c.per_peer.is_none() && !c.shape.is_empty() {
            out += &format!(" ({} elements)", c.count);
        }
        match &c.graph {
            Some(g) => out + &format!(" captured in graph {g}"),
            None => out,
        }
    }

    fn with_launch_label(&self, d: Diagnostic, rank: u32, at: usize, says: String) -> Diagnostic {
        let (t, item) = self.observed_launch(rank, at);
        let stream = &self.traces.streams[item.stream as usize];
        d.with_span_label(&t.source, format!("rank {rank}, stream {stream}: {says}"), item.span)
    }

    fn launch_difference(&self, a: (u32, usize), b: (u32, usize)) -> (&'static Code, &'static str) {
        let (a, b) = (self.observed_call(a.0, a.1), self.observed_call(b.0, b.1));
        let fields = [
            (matching_op(a) != matching_op(b), &T0301, "op"),
            (a.dtype != b.dtype, &T0303, "dtype"),
            (a.reduction != b.reduction, &T0304, "reduction"),
            (a.root != b.root, &T0305, "root"),
            (a.graph != b.graph, &T0334, "graph"),
        ];
        let first = fields.into_iter().find(|(differs, ..)| *differs);
        first.map_or((&T0302, "count"), |(_, code, field)| (code, field))
    }
}
