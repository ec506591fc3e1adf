//! The programs of a phase as meetings: groups and peers of every rank, and words for what they launch.

use std::collections::{BTreeMap, HashMap};

use tessera_base::{Code, Diagnostic, Step};
use tessera_ir::{Opcode, Program, RoleRanks};
use tessera_mesh::{Axis, Group, Mesh, Rank};

use crate::meet::{Edges, Line, Meetings, Script};
use crate::order::Order;
use crate::sequence::Witness;
use crate::trace::{Signature, trace};
use crate::{graph, say};

/// The programs of a phase with what the checks across ranks need to know, each worked out once per role.
pub(crate) struct Ranks<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) roles: &'a [RoleRanks],
    pub(crate) programs: &'a [Program],
    meetings: Meetings,
    /// Group of each line.
    groups: Vec<Group>,
    /// Per role and launch: its op, and its number in `signatures`.
    launches: Vec<Vec<(usize, u32)>>,
    signatures: Vec<Signature>,
}

/// What a role does on one of its channels: group calls, or sends to or receives from a position.
type Channel = (Group, Option<(u32, bool)>);

impl<'a> Ranks<'a> {
    /// Expects roles that cover the mesh and well-formed programs.
    pub(crate) fn of(mesh: &'a Mesh, roles: &'a [RoleRanks], programs: &'a [Program]) -> Ranks<'a> {
        let mut meetings = Meetings { role_of: vec![0; mesh.ranks() as usize], ..Meetings::default() };
        for (i, role) in roles.iter().enumerate() {
            role.ranks.iter().for_each(|r| meetings.role_of[r.0 as usize] = i);
        }
        let mut known: HashMap<Signature, (u32, u32)> = HashMap::new();
        let mut signatures: Vec<Signature> = Vec::new();
        let mut channels: Vec<BTreeMap<Channel, u32>> = Vec::new();
        let mut launches = Vec::new();
        for p in programs {
            let (mut script, mut mine, mut list) = (Script::default(), BTreeMap::new(), Vec::new());
            for item in trace(p) {
                let s = item.signature;
                let channel = (s.group, s.peer.map(|k| (k, s.opcode == Opcode::Send)));
                let next = mine.len() as u32;
                let channel = *mine.entry(channel).or_insert(next);
                let (own, common) = match known.get(&s) {
                    Some(ids) => *ids,
                    None => intern(&mut known, &mut signatures, s),
                };
                let batch = item.batch.and_then(|b| u32::try_from(b).ok()).unwrap_or(0);
                script.push(channel, common, batch);
                list.push((item.op, own));
            }
            meetings.scripts.push(script);
            channels.push(mine);
            launches.push(list);
        }
        let mut ranks = Ranks { mesh, roles, programs, meetings, groups: Vec::new(), launches, signatures };
        ranks.lines(&channels);
        ranks
    }

    fn lines(&mut self, channels: &[BTreeMap<Channel, u32>]) {
        let mesh = self.mesh;
        let role_of = &self.meetings.role_of;
        let member = |rank: Rank, channel: Channel| {
            (rank.0, channels[role_of[rank.0 as usize]].get(&channel).copied())
        };
        let mut groups: Vec<Group> =
            channels.iter().flat_map(|c| c.keys()).filter(|c| c.1.is_none()).map(|c| c.0).collect();
        groups.sort_unstable();
        groups.dedup();
        let mut lines = Vec::new();
        for group in groups {
            for first in mesh.iter().filter(|r| mesh.position(*r, group) == Some(0)) {
                let members = mesh.members(first, group);
                let members = members.into_iter().map(|r| member(r, (group, None))).collect();
                lines.push((group, Line { members, pair: false }));
            }
        }
        for rank in mesh.iter() {
            for (group, pair) in channels[role_of[rank.0 as usize]].keys() {
                let Some((peer, sends)) = *pair else { continue };
                let other = at_position(mesh, rank, *group, peer);
                let (Some(here), Some(other)) = (mesh.position(rank, *group), other) else {
                    continue;
                };
                let mine = member(rank, (*group, *pair));
                let theirs = member(other, (*group, Some((here, !sends))));
                lines.extend(Line::pair(mine, theirs, sends).map(|line| (*group, line)));
            }
        }
        (self.groups, self.meetings.lines) = lines.into_iter().unzip();
    }

    /// For each launch of a role, those that its streams, events and waits hold back until it has finished.
    pub(crate) fn held(&self) -> Vec<Edges> {
        self.programs.iter().zip(&self.launches).map(|(p, l)| held_by(p, l)).collect()
    }

    /// Whether a line is a group of tp or of its blocks.
    pub(crate) fn is_over_tp(&self, line: usize) -> bool {
        matches!(self.groups[line], Group::Axis { axis: Axis::Tp, .. })
    }

    /// What a role launches.
    pub(crate) fn script(&self, role: usize) -> &Script {
        &self.meetings.scripts[role]
    }

    /// Ops of a role's launches, in order.
    pub(crate) fn ops_launched(&self, role: usize) -> impl Iterator<Item = usize> + '_ {
        self.launches[role].iter().map(|l| l.0)
    }

    /// A launch of a role in words.
    pub(crate) fn what(&self, role: usize, at: usize) -> String {
        self.signatures[self.launches[role][at].1 as usize].short()
    }

    /// The ranks of a role in words.
    pub(crate) fn who(&self, role: usize) -> String {
        say::ranks(&self.roles[role].ranks)
    }

    /// One launch of each kind that a role makes: its op and signature, in order of first appearance.
    pub(crate) fn kinds(&self, role: usize) -> Vec<(usize, &Signature)> {
        let mut seen = vec![false; self.signatures.len()];
        let first = |(_, own): &&(usize, u32)| !std::mem::replace(&mut seen[*own as usize], true);
        let launches = self.launches[role].iter().filter(first);
        launches.map(|(op, own)| (*op, &self.signatures[*own as usize])).collect()
    }

    fn signature(&self, rank: u32, at: usize) -> &Signature {
        &self.signatures[self.launch(rank, at).1 as usize]
    }

    fn launch(&self, rank: u32, at: usize) -> (usize, u32) {
        self.launches[self.meetings.role_of[rank as usize]][at]
    }

    fn program(&self, rank: u32) -> &Program {
        &self.programs[self.meetings.role_of[rank as usize]]
    }
}

/// The member of a rank's group that stands at a position. To list all members of each rank would take the square of
/// their number.
fn at_position(mesh: &Mesh, rank: Rank, group: Group, at: u32) -> Option<Rank> {
    let here = mesh.position(rank, group).filter(|_| at < mesh.group_size(group))?;
    match group {
        Group::World => Some(Rank(at)),
        Group::Axis { axis, .. } => {
            let c = mesh.coord_of(rank);
            Some(mesh.rank_at(c.with(axis, c.on(axis) - here + at)))
        }
    }
}

/// Numbers of a signature and of what it has in common with the other side.
fn intern(
    known: &mut HashMap<Signature, (u32, u32)>,
    signatures: &mut Vec<Signature>,
    s: Signature,
) -> (u32, u32) {
    let common = s.common();
    let shared = known.get(&common).map(|ids| ids.1);
    let own = signatures.len() as u32;
    signatures.push(s.clone());
    let ids = if common == s {
        (own, own)
    } else {
        let shared = shared.unwrap_or_else(|| {
            let id = signatures.len() as u32;
            signatures.push(common.clone());
            known.insert(common, (id, id));
            id
        });
        (own, shared)
    };
    known.insert(s, ids);
    ids
}

fn held_by(p: &Program, launches: &[(usize, u32)]) -> Edges {
    let order = Order::of(p, &p.definitions(), &graph::runs(p));
    let mut edges = vec![Vec::new(); launches.len()];
    // Collectives of each stream so far, in program order, which is the order in which they finish.
    let mut lanes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, (op, _)) in launches.iter().enumerate() {
        for earlier in lanes.values() {
            let finished = earlier.partition_point(|e| order.before(launches[*e].0, *op));
            if let Some(last) = finished.checked_sub(1) {
                // Launches issued as one finish as one.
                let last = earlier[last];
                let mates = earlier[..finished].iter().rev();
                let mates =
                    mates.take_while(|e| **e == last || order.together(launches[**e].0, launches[last].0));
                mates.for_each(|e| edges[*e].push(i));
            }
        }
        lanes.entry(order.lane(*op)).or_default().push(i);
    }
    edges
}

impl Witness for Ranks<'_> {
    fn meetings(&self) -> &Meetings {
        &self.meetings
    }

    fn group(&self, line: usize) -> String {
        self.groups[line].to_string()
    }

    fn title(&self, rank: u32) -> String {
        format!("rank {rank}, {}", say::title(self.program(rank)))
    }

    fn step(&self, rank: u32, at: usize) -> Step {
        let (s, p, (op, _)) = (self.signature(rank, at), self.program(rank), self.launch(rank, at));
        let members = self.mesh.members(Rank(rank), s.group);
        let mut ranks: Vec<u32> = match s.peer {
            None => members.into_iter().map(|r| r.0).collect(),
            Some(k) => members.get(k as usize).map(|r| r.0).into_iter().chain([rank]).collect(),
        };
        ranks.sort_unstable();
        Step {
            what: s.short(),
            op: s.opcode.name().to_string(),
            dtype: s.dtype.to_string(),
            shape: s.extents(),
            ranks,
            stream: say::stream(p, &p.ops[op]).to_string(),
            index: op,
            source: p.ops[op].span.map(|span| (say::place(p, op), span)),
        }
    }

    fn full(&self, rank: u32, at: usize) -> String {
        self.signature(rank, at).full()
    }

    fn at(&self, d: Diagnostic, rank: u32, at: usize, says: String) -> Diagnostic {
        let (p, (op, _)) = (self.program(rank), self.launch(rank, at));
        let at = format!("rank {rank}, {}, stream {}", say::place(p, op), say::stream(p, &p.ops[op]));
        match p.ops[op].span {
            Some(span) => d.at_span(at, says, span),
            None => d.at(at, says),
        }
    }

    fn difference(&self, a: (u32, usize), b: (u32, usize)) -> (&'static Code, &'static str) {
        self.signature(a.0, a.1).difference(self.signature(b.0, b.1))
    }
}
