//! Sequences that were seen instead of planned: what ranks of any program launched, under the rules for plans.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use tessera_base::{Code, Counterexample, Diagnostic, Diagnostics, Mismatch, Span, Step};

use crate::meet::{Edges, Line, Meetings, Member, Script};
use crate::sequence::{T0301, T0302, T0303, T0304, T0305, T0334, Witness};
use crate::{launch, say, sequence};

/// What one member sends is not what the other expects.
pub static T0338: Code = Code {
    id: "T0338",
    title: "exchanged counts do not fit",
    page: "In an exchange with a count per member, what rank i sends to rank j must be exactly what rank j expects from rank \
i. Otherwise j waits for elements that never come, or takes the beginning of the next message for the end of this one. Both \
vectors have one entry per member, in the order of the group.\n\n\
The counts are usually exchanged before: one side computed them from other inputs (a token count, a capacity), or \
from those of the step before.",
};
/// Not all ranks can be seen.
pub static T0341: Code = Code {
    id: "T0341",
    title: "trace of a rank is missing",
    page: "A group names a rank of which there is no trace, or there are two, or its number cannot be one. The members that are there are \
compared; whether everyone gets through cannot be known, since the rank that leaves no trace is often the one that hung \
or died first.\n\n\
Add its file. Of a rank that launched nothing the file holds one line, `{\"rank\": 3}`.",
};
/// A rank in a group that is not its own.
pub static T0342: Code = Code {
    id: "T0342",
    title: "collective on a group by a rank that is not in it",
    page: "A rank launched a collective over a group that it is no member of, or named a root or a peer that is not. Nobody \
in the group expects it: the call hangs, or meets another group's traffic. The usual cause is a group handle taken from the \
wrong list (the world group instead of the mesh group), or ranks that built their groups in different orders.",
};

/// Largest number of ranks of a trace; a larger rank number is taken for a slip.
const RANKS_MAX: u32 = 65_536;

/// A collective as one rank launched it. Words are taken as they are: ops and dtypes that Tessera does not know
/// are compared all the same.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Default)]
pub struct Call {
    /// `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all`, `broadcast`, `send`, `recv`, or another name.
    pub op: String,
    /// Element type, as `bf16`.
    pub dtype: String,
    /// Elements that this rank hands in; for a receive, that it takes.
    pub count: u64,
    /// Extents behind `count`, where known: shown, never compared.
    pub shape: Vec<u64>,
    /// `sum`, `max`…
    pub reduction: Option<String>,
    /// World rank whose value counts.
    pub root: Option<u32>,
    /// World rank on the other side of a send or receive.
    pub peer: Option<u32>,
    /// For an exchange with a count per member, in order of the group's ranks: elements to each, from each.
    pub per_peer: Option<(Vec<u64>, Vec<u64>)>,
    /// Name of the graph it was captured into; none for eager.
    pub graph: Option<String>,
}

/// A group of a trace.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupId(pub(crate) u32);

/// What ranks launched, each in host order.
#[derive(Debug, Clone, Default)]
pub struct Traces {
    pub(crate) groups: Vec<(String, Vec<u32>)>,
    pub(crate) calls: Vec<Call>,
    pub(crate) streams: Vec<String>,
    pub(crate) ranks: Vec<RankTrace>,
    known_calls: HashMap<Call, u32>,
    known_streams: HashMap<String, u32>,
    known_groups: HashMap<(String, Vec<u32>), u32>,
}

#[derive(Debug, Clone)]
pub(crate) struct RankTrace {
    pub(crate) rank: u32,
    /// Name of the text it was read from.
    pub(crate) source: String,
    pub(crate) items: Vec<Seen>,
}

#[derive(Debug, Clone, Copy)]
pub(crate) struct Seen {
    pub(crate) group: u32,
    pub(crate) call: u32,
    pub(crate) stream: u32,
    /// Launches of one number are one launch; 0 for a launch of its own.
    pub(crate) batch: u32,
    pub(crate) span: Span,
}

impl Traces {
    /// No ranks yet.
    #[must_use]
    pub fn new() -> Traces {
        Traces::default()
    }

    /// A group by name and members (world ranks, taken in ascending order and once each). Groups of one name and other
    /// members are two groups.
    pub fn group(&mut self, name: &str, ranks: &[u32]) -> GroupId {
        let mut ranks = ranks.to_vec();
        ranks.sort_unstable();
        ranks.dedup();
        GroupId(intern(&mut self.known_groups, &mut self.groups, &(name.to_string(), ranks)))
    }

    /// Begins the trace of a rank, read from `source`, and gives its place among the traces.
    pub fn rank(&mut self, rank: u32, source: &str) -> usize {
        self.ranks.push(RankTrace { rank, source: source.to_string(), items: Vec::new() });
        self.ranks.len() - 1
    }

    /// Adds a launch to the trace at `trace`. `batch` numbers launches that are issued as one (grouped sends and
    /// receives), 0 for one of its own; `span` is where it stands in the source. A place or a group that is not of
    /// these traces takes nothing.
    pub fn push(&mut self, trace: usize, group: GroupId, call: Call, stream: &str, batch: u32, span: Span) {
        let call = intern(&mut self.known_calls, &mut self.calls, &call);
        let stream = intern(&mut self.known_streams, &mut self.streams, stream);
        let known = (group.0 as usize) < self.groups.len();
        if let Some(t) = self.ranks.get_mut(trace).filter(|_| known) {
            t.items.push(Seen { group: group.0, call, stream, batch, span });
        }
    }
}

/// The number of an item, which is its place in `list`.
fn intern<T, Q>(known: &mut HashMap<T, u32>, list: &mut Vec<T>, item: &Q) -> u32
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

/// Judges observed sequences across ranks: groups agree position by position, sends meet receives, exchanged counts
/// fit, no circle of waits, one order of launches. Layouts, events and memory are not in a trace.
#[must_use]
pub fn check_traces(traces: &Traces) -> Diagnostics {
    let astray = memberships(traces);
    let mut out = complete(traces);
    // A table of ranks is as long as the largest number, and has one place for each.
    let ranks: BTreeSet<u32> = traces.ranks.iter().map(|t| t.rank).collect();
    let numbered = ranks.len() == traces.ranks.len() && ranks.last().is_none_or(|r| *r < RANKS_MAX);
    if !astray.is_empty() || !numbered {
        out.extend(astray);
        return out;
    }
    let witness = Observed::of(traces);
    let found = sequence::check(&witness);
    let agree = found.is_empty();
    out.extend(found);
    if agree {
        out.extend(witness.exchanges());
    }
    // With a trace missing every circle through that rank would be guessed.
    if out.is_empty() {
        out.extend(launch::check(&witness, || witness.held()));
    }
    out
}

/// Groups whose members are all there.
fn complete(traces: &Traces) -> Diagnostics {
    let mut out = Vec::new();
    let mut known: BTreeMap<u32, &str> = BTreeMap::new();
    for t in &traces.ranks {
        if t.rank >= RANKS_MAX {
            let message = format!("rank {} of at most {RANKS_MAX}", t.rank);
            out.push(Diagnostic::error(&T0341, message).at(&t.source, "this trace"));
        }
        if let Some(first) = known.insert(t.rank, &t.source) {
            let message = format!("two traces of rank {}", t.rank);
            out.push(Diagnostic::error(&T0341, message).at(first, "the first").at(&t.source, "the second"));
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
        let message = format!("no trace of {}", say::numbers(&ranks));
        let says = format!("the first of them is a member of group {group}");
        out.push(Diagnostic::error(&T0341, message).at(format!("{} traces", traces.ranks.len()), says));
    }
    out
}

/// Every rank calls on its own groups, with roots and peers of theirs.
fn memberships(traces: &Traces) -> Diagnostics {
    let mut out = Vec::new();
    for t in &traces.ranks {
        let mut told = BTreeSet::new();
        for item in &t.items {
            if !told.insert((item.group, item.call)) {
                continue;
            }
            let (group, ranks) = &traces.groups[item.group as usize];
            let call = &traces.calls[item.call as usize];
            let bare = matches!(call.op.as_str(), "send" | "recv") && call.peer.is_none();
            let outside = |r: &u32| ranks.binary_search(r).is_err();
            let why = if outside(&t.rank) {
                format!("rank {} is not in it", t.rank)
            } else if let Some(root) = call.root.filter(|r| outside(r)) {
                format!("its root, rank {root}, is not in it")
            } else if let Some(peer) = call.peer.filter(|p| outside(p) || *p == t.rank) {
                format!("rank {} names rank {peer} as its peer", t.rank)
            } else if bare {
                "it names no peer".to_string()
            } else {
                continue;
            };
            let message = format!("{} on group {group}: {why}", call.op);
            let says = format!("group {group} is {}", say::numbers(ranks));
            out.push(Diagnostic::error(&T0342, message).at_span(&t.source, says, item.span));
        }
    }
    out
}

/// Traces as meetings. Every rank plays a role of its own.
struct Observed<'a> {
    traces: &'a Traces,
    meetings: Meetings,
    /// Group of each line.
    groups: Vec<u32>,
}

/// What a rank does on one of its channels: calls of a group, or sends to or receives from a rank.
type Channel = (u32, Option<(u32, bool)>);

impl<'a> Observed<'a> {
    fn of(traces: &'a Traces) -> Observed<'a> {
        let world = traces.ranks.iter().map(|t| t.rank as usize + 1).max().unwrap_or(0);
        // A number without a trace launches nothing.
        let mut meetings = Meetings { role_of: vec![traces.ranks.len(); world], ..Meetings::default() };
        let common = common(&traces.calls);
        let mut channels: Vec<BTreeMap<Channel, u32>> = Vec::new();
        for (i, t) in traces.ranks.iter().enumerate() {
            meetings.role_of[t.rank as usize] = i;
            let (mut script, mut mine) = (Script::default(), BTreeMap::new());
            // Calls come in runs on few channels; the map is asked once per kind of call.
            let mut at: HashMap<(u32, u32), u32> = HashMap::new();
            for item in &t.items {
                let channel = *at.entry((item.group, item.call)).or_insert_with(|| {
                    let call = &traces.calls[item.call as usize];
                    let pair = call.peer.map(|p| (p, call.op == "send"));
                    let next = mine.len() as u32;
                    *mine.entry((item.group, pair)).or_insert(next)
                });
                script.push(channel, common[item.call as usize], item.batch);
            }
            meetings.scripts.push(script);
            channels.push(mine);
        }
        meetings.scripts.push(Script::default());
        channels.push(BTreeMap::new());
        let mut observed = Observed { traces, meetings, groups: Vec::new() };
        observed.lines(&channels);
        observed
    }

    fn lines(&mut self, channels: &[BTreeMap<Channel, u32>]) {
        let present: BTreeSet<u32> = self.traces.ranks.iter().map(|t| t.rank).collect();
        let of = |rank: u32, channel: Channel| {
            let role = self.meetings.role_of[rank as usize];
            (rank, channels[role].get(&channel).copied())
        };
        for (g, (_, ranks)) in self.traces.groups.iter().enumerate() {
            let members: Vec<_> =
                ranks.iter().filter(|r| present.contains(r)).map(|r| of(*r, (g as u32, None))).collect();
            if members.iter().any(|m| m.1.is_some()) {
                self.meetings.lines.push(Line { members, pair: false });
                self.groups.push(g as u32);
            }
        }
        for rank in &present {
            let mine = &channels[self.meetings.role_of[*rank as usize]];
            for (group, pair) in mine.keys() {
                let Some((peer, sends)) = pair.filter(|(k, _)| present.contains(k)) else { continue };
                let (here, there) = (of(*rank, (*group, *pair)), of(peer, (*group, Some((*rank, !sends)))));
                if let Some(line) = Line::pair(here, there, sends) {
                    self.meetings.lines.push(line);
                    self.groups.push(*group);
                }
            }
        }
    }

    /// Streams run one launch after the other.
    fn held(&self) -> Vec<Edges> {
        let one = |(script, t): (&Script, &RankTrace)| {
            let mut edges: Edges = vec![Vec::new(); t.items.len()];
            let mut last: HashMap<u32, Vec<usize>> = HashMap::new();
            for launch in script.launches() {
                let streams: BTreeSet<u32> = t.items[launch.clone()].iter().map(|i| i.stream).collect();
                let before: BTreeSet<usize> =
                    streams.iter().filter_map(|s| last.get(s)).flatten().copied().collect();
                before.into_iter().for_each(|e| edges[e].extend(launch.clone()));
                streams.into_iter().for_each(|s| drop(last.insert(s, launch.clone().collect())));
            }
            edges
        };
        let mut out: Vec<Edges> = self.meetings.scripts.iter().zip(&self.traces.ranks).map(one).collect();
        out.push(Vec::new());
        out
    }

    /// What everyone sends in an exchange is what the others expect.
    fn exchanges(&self) -> Diagnostics {
        let exchange = |c: &Call| c.per_peer.is_some();
        if !self.traces.calls.iter().any(exchange) {
            return Vec::new();
        }
        let mut out = Vec::new();
        let places: Vec<Vec<Vec<usize>>> = self.meetings.scripts.iter().map(Script::places).collect();
        for (line, group) in self.meetings.lines.iter().zip(&self.groups).filter(|(l, _)| !l.pair) {
            let steps = |m: &Member| -> &[usize] {
                m.1.map_or(&[], |c| &places[self.meetings.role_of[m.0 as usize]][c as usize])
            };
            let all: Vec<&[usize]> = line.members.iter().map(steps).collect();
            let found = (0..all.first().map_or(0, |s| s.len())).find_map(|n| {
                let at: Vec<(u32, usize)> = line.members.iter().zip(&all).map(|(m, s)| (m.0, s[n])).collect();
                self.exchange(*group, n, &at)
            });
            out.extend(found);
        }
        out
    }

    /// The n-th call of a group's members, all of whom are there.
    fn exchange(&self, group: u32, n: usize, at: &[(u32, usize)]) -> Option<Diagnostic> {
        let (name, ranks) = &self.traces.groups[group as usize];
        if at.len() != ranks.len() {
            return None;
        }
        let counts: Vec<&(Vec<u64>, Vec<u64>)> =
            at.iter().map(|(r, i)| self.call(*r, *i).per_peer.as_ref()).collect::<Option<_>>()?;
        let proof = |d: Diagnostic, a: (u32, usize), b: (u32, usize)| {
            d.proof(Counterexample::Mismatch(Mismatch {
                group: format!("{name} of {}", say::numbers(ranks)),
                position: n,
                field: "per-peer count".to_string(),
                sides: [a, b].map(|(r, i)| (r, Some(self.step(r, i)))),
            }))
        };
        for (a, (sends, takes)) in at.iter().zip(&counts) {
            if sends.len() != ranks.len() || takes.len() != ranks.len() {
                let message = format!(
                    "rank {} lists {} counts to send and {} to take, its group {name} has {} members",
                    a.0,
                    sends.len(),
                    takes.len(),
                    ranks.len()
                );
                return Some(self.at(Diagnostic::error(&T0338, message), a.0, a.1, self.full(a.0, a.1)));
            }
        }
        for i in 0..at.len() {
            for j in 0..at.len() {
                let (sent, taken) = (counts[i].0[j], counts[j].1[i]);
                if sent != taken {
                    let (a, b) = (at[i], at[j]);
                    let message = format!(
                        "rank {} sends {sent} to rank {}, which takes {taken}, at position {n} of group {name}",
                        a.0, b.0
                    );
                    let d = self.at(
                        Diagnostic::error(&T0338, message),
                        a.0,
                        a.1,
                        format!("sends {:?}", counts[i].0),
                    );
                    return Some(proof(self.at(d, b.0, b.1, format!("takes {:?}", counts[j].1)), a, b));
                }
            }
        }
        None
    }

    fn seen(&self, rank: u32, at: usize) -> (&RankTrace, &Seen) {
        let t = &self.traces.ranks[self.meetings.role_of[rank as usize]];
        (t, &t.items[at])
    }

    fn call(&self, rank: u32, at: usize) -> &Call {
        &self.traces.calls[self.seen(rank, at).1.call as usize]
    }
}

/// Per call, a number that it shares with what the other members must launch.
fn common(calls: &[Call]) -> Vec<u32> {
    let mut known: HashMap<Call, u32> = HashMap::new();
    let one = |c: &Call| {
        let op = one_sided(c);
        // With a count per member the whole differs from rank to rank.
        let count = if c.per_peer.is_some() { 0 } else { c.count };
        let per_peer = c.per_peer.as_ref().map(|_| Default::default());
        let key = Call { op: op.to_string(), count, shape: Vec::new(), peer: None, per_peer, ..c.clone() };
        let next = known.len() as u32;
        *known.entry(key).or_insert(next)
    };
    calls.iter().map(one).collect()
}

/// The op, a receive by the name of what it meets.
fn one_sided(c: &Call) -> &str {
    if c.op == "recv" { "send" } else { &c.op }
}

fn what(c: &Call, group: &str) -> String {
    let reduction = c.reduction.as_ref().map_or(String::new(), |r| format!("({r})"));
    let moved = match &c.per_peer {
        Some((sends, takes)) => format!("{} {sends:?} to and {takes:?} from the members", c.dtype),
        None => format!("{}{}", c.dtype, extents(c)),
    };
    match (c.op.as_str(), c.peer) {
        ("send", Some(p)) => format!("send to rank {p} over {group} of {moved}"),
        (op, Some(p)) => format!("{op} from rank {p} over {group} of {moved}"),
        (op, None) if c.count == 0 && c.dtype.is_empty() => format!("{op} over {group}"),
        (op, None) => format!("{op}{reduction} over {group} of {moved}"),
    }
}

fn extents(c: &Call) -> String {
    if c.shape.is_empty() {
        return format!("[{}]", c.count);
    }
    let dims: Vec<String> = c.shape.iter().map(u64::to_string).collect();
    format!("[{}]", dims.join(", "))
}

impl Witness for Observed<'_> {
    fn meetings(&self) -> &Meetings {
        &self.meetings
    }

    fn group(&self, line: usize) -> String {
        self.traces.groups[self.groups[line] as usize].0.clone()
    }

    fn title(&self, rank: u32) -> String {
        let t = self.traces.ranks.get(self.meetings.role_of[rank as usize]);
        format!("rank {rank}, {}", t.map_or("no trace", |t| &t.source))
    }

    fn step(&self, rank: u32, at: usize) -> Step {
        let ((t, item), c) = (self.seen(rank, at), self.call(rank, at));
        let (name, members) = &self.traces.groups[item.group as usize];
        let mut ranks = c.peer.map_or(members.clone(), |p| vec![p, rank]);
        ranks.sort_unstable();
        Step {
            what: what(c, name),
            op: c.op.clone(),
            dtype: c.dtype.clone(),
            shape: extents(c),
            ranks,
            stream: self.traces.streams[item.stream as usize].clone(),
            index: at,
            source: Some((t.source.clone(), item.span)),
        }
    }

    fn full(&self, rank: u32, at: usize) -> String {
        let ((_, item), c) = (self.seen(rank, at), self.call(rank, at));
        let mut out = what(c, &self.traces.groups[item.group as usize].0);
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

    fn at(&self, d: Diagnostic, rank: u32, at: usize, says: String) -> Diagnostic {
        let (t, item) = self.seen(rank, at);
        let stream = &self.traces.streams[item.stream as usize];
        d.at_span(&t.source, format!("rank {rank}, stream {stream}: {says}"), item.span)
    }

    fn difference(&self, a: (u32, usize), b: (u32, usize)) -> (&'static Code, &'static str) {
        let (a, b) = (self.call(a.0, a.1), self.call(b.0, b.1));
        if one_sided(a) != one_sided(b) {
            (&T0301, "op")
        } else if a.dtype != b.dtype {
            (&T0303, "dtype")
        } else if a.reduction != b.reduction {
            (&T0304, "reduction")
        } else if a.root != b.root {
            (&T0305, "root")
        } else if a.graph != b.graph {
            (&T0334, "graph")
        } else {
            (&T0302, "count")
        }
    }
}
