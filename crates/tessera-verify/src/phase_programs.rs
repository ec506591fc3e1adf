//! The programs of a phase in the form that matching expects: the communicators of every rank, and
//! descriptions of its launches.

use std::collections::{BTreeMap, HashMap};

use tessera_base::{Code, Diagnostic, RankCollective};
use tessera_ir::{Opcode, Program, RoleRanks};
use tessera_mesh::{Axis, Group, Mesh, Rank};

use crate::happens_before::HappensBefore;
use crate::matching::{CommunicatorRanks, HeldLaunches, LaunchSequences, RoleLaunches};
use crate::sequence::SequenceSource;
use crate::signature::{CollectiveSignature, trace_collectives};
use crate::{captured_graph, display};

/// The programs of a phase, one per role, with their launches, signatures and communicators. The
/// checks across ranks share this data, which is computed once per role instead of once per rank.
pub(crate) struct PhasePrograms<'a> {
    pub(crate) mesh: &'a Mesh,
    pub(crate) roles: &'a [RoleRanks],
    pub(crate) programs: &'a [Program],
    sequences: LaunchSequences,
    /// Group that the ops of each communicator name, in the order of `sequences.communicators`.
    groups: Vec<Group>,
    /// Per role and launch: the index of its op, and its index in `signatures`.
    launches: Vec<Vec<(usize, u32)>>,
    signatures: Vec<CollectiveSignature>,
}

/// A role's endpoint: a group, with the peer's position and whether the role sends for a pair.
type RoleEndpointKey = (Group, Option<(u32, bool)>);

impl<'a> PhasePrograms<'a> {
    /// Analyses the programs. Expects roles that cover the mesh and well-formed programs.
    pub(crate) fn new(mesh: &'a Mesh, roles: &'a [RoleRanks], programs: &'a [Program]) -> PhasePrograms<'a> {
        let mut meetings =
            LaunchSequences { role_of: vec![0; mesh.world_size() as usize], ..LaunchSequences::default() };
        for (i, role) in roles.iter().enumerate() {
            role.ranks.iter().for_each(|r| meetings.role_of[r.0 as usize] = i);
        }
        let mut known: HashMap<CollectiveSignature, (u32, u32)> = HashMap::new();
        let mut signatures: Vec<CollectiveSignature> = Vec::new();
        let mut channels: Vec<BTreeMap<RoleEndpointKey, u32>> = Vec::new();
        let mut launches = Vec::new();
        for p in programs {
            let (mut script, mut mine, mut list) = (RoleLaunches::default(), BTreeMap::new(), Vec::new());
            for item in trace_collectives(p) {
                let s = item.signature;
                let channel = (s.group, s.peer.map(|k| (k, s.opcode == Opcode::Send)));
                let next = mine.len() as u32;
                let channel = *mine.entry(channel).or_insert(next);
                let (own, common) = match known.get(&s) {
                    Some(ids) => *ids,
                    None => intern_signature(&mut known, &mut signatures, s),
                };
                let batch = item.batch.and_then(|b| u32::try_from(b).ok()).unwrap_or(0);
                script.push_launch(channel, common, batch);
                list.push((item.op, own));
            }
            meetings.launches_by_role.push(script);
            channels.push(mine);
            launches.push(list);
        }
        let mut ranks = PhasePrograms {
            mesh,
            roles,
            programs,
            sequences: meetings,
            groups: Vec::new(),
            launches,
            signatures,
        };
        ranks.add_communicators(&channels);
        ranks
    }

    fn add_communicators(&mut self, channels: &[BTreeMap<RoleEndpointKey, u32>]) {
        let mesh = self.mesh;
        let role_of = &self.sequences.role_of;
        let member = |rank: Rank, channel: RoleEndpointKey| {
            (rank.0, channels[role_of[rank.0 as usize]].get(&channel).copied())
        };
        let mut groups: Vec<Group> =
            channels.iter().flat_map(|c| c.keys()).filter(|c| c.1.is_none()).map(|c| c.0).collect();
        groups.sort_unstable();
        groups.dedup();
        let mut lines = Vec::new();
        for group in groups {
            for first in mesh.iter().filter(|r| mesh.group_position(*r, group) == Some(0)) {
                let members = mesh.group_members(first, group);
                let members = members.into_iter().map(|r| member(r, (group, None))).collect();
                lines.push((group, CommunicatorRanks { members, is_pair: false }));
            }
        }
        for rank in mesh.iter() {
            for (group, pair) in channels[role_of[rank.0 as usize]].keys() {
                let Some((peer, sends)) = *pair else { continue };
                let other = member_at_position(mesh, rank, *group, peer);
                let (Some(here), Some(other)) = (mesh.group_position(rank, *group), other) else {
                    continue;
                };
                let mine = member(rank, (*group, *pair));
                let theirs = member(other, (*group, Some((here, !sends))));
                lines.extend(CommunicatorRanks::for_transfer(mine, theirs, sends).map(|line| (*group, line)));
            }
        }
        (self.groups, self.sequences.communicators) = lines.into_iter().unzip();
    }

    /// Returns, for each launch of a role, the launches that streams, events and waits hold back
    /// until it has finished.
    pub(crate) fn held_launches(&self) -> Vec<HeldLaunches> {
        self.programs.iter().zip(&self.launches).map(|(p, l)| held_by_program(p, l)).collect()
    }

    /// Returns whether a communicator is a group of tp or of a subgroup of tp.
    pub(crate) fn is_over_tp(&self, communicator: usize) -> bool {
        matches!(self.groups[communicator], Group::Axis { axis: Axis::Tp, .. })
    }

    /// Returns the collective launches of a role in host order; `role` is an index into `roles`.
    pub(crate) fn role_launches(&self, role: usize) -> &RoleLaunches {
        &self.sequences.launches_by_role[role]
    }

    /// Returns the op indices of a role's launches, in order.
    pub(crate) fn launched_ops(&self, role: usize) -> impl Iterator<Item = usize> + '_ {
        self.launches[role].iter().map(|l| l.0)
    }

    /// Describes a launch of a role in one line.
    pub(crate) fn launch_summary(&self, role: usize, at: usize) -> String {
        self.signatures[self.launches[role][at].1 as usize].short_text()
    }

    /// Lists the ranks of a role for a message, abbreviated beyond eight.
    pub(crate) fn list_role_ranks(&self, role: usize) -> String {
        display::list_ranks(&self.roles[role].ranks)
    }

    /// Returns one launch of each kind that a role makes: op index and signature, in order of first
    /// appearance.
    pub(crate) fn distinct_launches(&self, role: usize) -> Vec<(usize, &CollectiveSignature)> {
        let mut seen = vec![false; self.signatures.len()];
        let first = |(_, own): &&(usize, u32)| !std::mem::replace(&mut seen[*own as usize], true);
        let launches = self.launches[role].iter().filter(first);
        launches.map(|(op, own)| (*op, &self.signatures[*own as usize])).collect()
    }

    fn launch_signature(&self, rank: u32, at: usize) -> &CollectiveSignature {
        &self.signatures[self.launch_entry(rank, at).1 as usize]
    }

    fn launch_entry(&self, rank: u32, at: usize) -> (usize, u32) {
        self.launches[self.sequences.role_of[rank as usize]][at]
    }

    fn rank_program(&self, rank: u32) -> &Program {
        &self.programs[self.sequences.role_of[rank as usize]]
    }
}

/// Returns the member of a rank's group at a position. Listing all members for each rank would take
/// quadratic time.
fn member_at_position(mesh: &Mesh, rank: Rank, group: Group, at: u32) -> Option<Rank> {
    let here = mesh.group_position(rank, group).filter(|_| at < mesh.group_size(group))?;
    match group {
        Group::World => Some(Rank(at)),
        Group::Axis { axis, .. } => {
            let c = mesh.coord_of(rank);
            Some(mesh.rank_at(c.with_axis(axis, c.on_axis(axis) - here + at)))
        }
    }
}

/// Returns the indices of a signature and of the signature that matches it on the other side.
fn intern_signature(
    known: &mut HashMap<CollectiveSignature, (u32, u32)>,
    signatures: &mut Vec<CollectiveSignature>,
    s: CollectiveSignature,
) -> (u32, u32) {
    let common = s.without_side();
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

fn held_by_program(p: &Program, launches: &[(usize, u32)]) -> HeldLaunches {
    let order = HappensBefore::new(p, &p.defining_ops(), &captured_graph::captured_graphs(p));
    let mut edges = vec![Vec::new(); launches.len()];
    // The collectives of each lane so far in program order, which is the order in which they
    // finish.
    let mut lanes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (i, (op, _)) in launches.iter().enumerate() {
        for earlier in lanes.values() {
            let finished = earlier.partition_point(|e| order.finishes_before(launches[*e].0, *op));
            if let Some(last) = finished.checked_sub(1) {
                // Launches of one batch finish together.
                let last = earlier[last];
                let mates = earlier[..finished].iter().rev();
                let mates =
                    mates.take_while(|e| **e == last || order.same_batch(launches[**e].0, launches[last].0));
                mates.for_each(|e| edges[*e].push(i));
            }
        }
        lanes.entry(order.lane_of_op(*op)).or_default().push(i);
    }
    edges
}

impl SequenceSource for PhasePrograms<'_> {
    fn launch_sequences(&self) -> &LaunchSequences {
        &self.sequences
    }

    fn group_name(&self, line: usize) -> String {
        self.groups[line].to_string()
    }

    fn rank_title(&self, rank: u32) -> String {
        format!("rank {rank}, {}", display::program_title(self.rank_program(rank)))
    }

    fn launch_step(&self, rank: u32, at: usize) -> RankCollective {
        let (s, p, (op, _)) =
            (self.launch_signature(rank, at), self.rank_program(rank), self.launch_entry(rank, at));
        let members = self.mesh.group_members(Rank(rank), s.group);
        let mut ranks: Vec<u32> = match s.peer {
            None => members.into_iter().map(|r| r.0).collect(),
            Some(k) => members.get(k as usize).map(|r| r.0).into_iter().chain([rank]).collect(),
        };
        ranks.sort_unstable();
        RankCollective {
            description: s.short_text(),
            op: s.opcode.name().to_string(),
            dtype: s.dtype.to_string(),
            shape: s.extents_text(),
            ranks,
            stream: display::stream_name(p, &p.ops[op]).to_string(),
            index: op,
            source: p.ops[op].span.map(|span| (display::op_location(p, op), span)),
        }
    }

    fn describe_launch(&self, rank: u32, at: usize) -> String {
        self.launch_signature(rank, at).full_text()
    }

    fn with_launch_label(&self, d: Diagnostic, rank: u32, at: usize, says: String) -> Diagnostic {
        let (p, (op, _)) = (self.rank_program(rank), self.launch_entry(rank, at));
        let at = format!(
            "rank {rank}, {}, stream {}",
            display::op_location(p, op),
            display::stream_name(p, &p.ops[op])
        );
        match p.ops[op].span {
            Some(span) => d.with_span_label(at, says, span),
            None => d.with_label(at, says),
        }
    }

    fn launch_difference(&self, a: (u32, usize), b: (u32, usize)) -> (&'static Code, &'static str) {
        self.launch_signature(a.0, a.1).first_difference(self.launch_signature(b.0, b.1))
    }
}
