//! Matches the collective launches of all ranks: which ranks must agree, whether they agree, and
//! whether every rank terminates.
//!
//! This file identifies launches by number. A *communicator* is a set of ranks that must launch the
//! same collectives in the same order: a group, or a sender and a receiver. An *endpoint* is a
//! role's side of a communicator: a group that the role belongs to, or its sends to or receives
//! from one peer. Programs of plans and observed traces are both reduced to this form.

use std::collections::{BTreeMap, HashMap};

/// One collective launch of a role.
#[derive(Debug, Clone, Copy)]
pub(crate) struct EndpointLaunch {
    /// Index of the role's endpoint that the launch uses.
    pub(crate) endpoint: u32,
    /// Batch number: consecutive launches with the same nonzero number are issued as one batch.
    pub(crate) batch: u32,
}

/// The collective launches of a role in host order.
#[derive(Debug, Default)]
pub(crate) struct RoleLaunches {
    pub(crate) launches: Vec<EndpointLaunch>,
    /// Signatures of the launches in order, per endpoint. Equal numbers mean equal calls.
    pub(crate) signatures: Vec<Vec<u32>>,
}

impl RoleLaunches {
    /// Appends a launch in host order and its signature to the sequence of its endpoint.
    pub(crate) fn push_launch(&mut self, endpoint: u32, signature: u32, batch: u32) {
        let at = endpoint as usize;
        if self.signatures.len() <= at {
            self.signatures.resize_with(at + 1, Vec::new);
        }
        self.signatures[at].push(signature);
        self.launches.push(EndpointLaunch { endpoint, batch });
    }

    /// Returns the signatures of an endpoint's launches; empty for `None`.
    pub(crate) fn signatures_on(&self, endpoint: Option<u32>) -> &[u32] {
        endpoint.and_then(|c| self.signatures.get(c as usize)).map_or(&[], Vec::as_slice)
    }

    /// Returns the index of an endpoint's n-th launch. Takes linear time, so only diagnostics use
    /// it.
    pub(crate) fn nth_launch(&self, endpoint: u32, n: usize) -> Option<usize> {
        let mut on = self.launches.iter().enumerate().filter(|(_, s)| s.endpoint == endpoint);
        on.nth(n).map(|(i, _)| i)
    }

    /// Returns the indices of the launches, per endpoint.
    pub(crate) fn launches_by_endpoint(&self) -> Vec<Vec<usize>> {
        let mut out = vec![Vec::new(); self.signatures.len()];
        for (i, step) in self.launches.iter().enumerate() {
            out[step.endpoint as usize].push(i);
        }
        out
    }

    /// Returns, per launch, its position in its endpoint's sequence.
    pub(crate) fn sequence_positions(&self) -> Vec<u32> {
        let mut count = vec![0u32; self.signatures.len()];
        let place = |step: &EndpointLaunch| {
            let n = &mut count[step.endpoint as usize];
            *n += 1;
            *n - 1
        };
        self.launches.iter().map(place).collect()
    }

    /// Iterates over the batches in order, each as a range of launches.
    pub(crate) fn batches(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let launch = self.batch_at(at);
            at = launch.end;
            (!launch.is_empty()).then_some(launch)
        })
    }

    /// Returns the batch that begins at launch `at`: one launch, or all launches issued together;
    /// empty past the end.
    pub(crate) fn batch_at(&self, at: usize) -> std::ops::Range<usize> {
        let end = match self.launches.get(at) {
            None => at,
            Some(s) if s.batch == 0 => at + 1,
            Some(s) => {
                let rest = self.launches[at..].iter();
                at + rest.take_while(|o| o.batch == s.batch).count()
            }
        };
        at..end
    }
}

/// A member rank of a communicator and its role's endpoint there; `None` if the role never launches
/// on the communicator.
pub(crate) type RankEndpoint = (u32, Option<u32>);

/// A role and its endpoint on a communicator, as in [`RankEndpoint`].
type RoleEndpoint = (usize, Option<u32>);

/// The ranks of one communicator, which must launch equal collectives position by position.
#[derive(Debug)]
pub(crate) struct CommunicatorRanks {
    /// Sender and receiver, or the members of a group in order of position.
    pub(crate) members: Vec<RankEndpoint>,
    /// Whether the communicator joins a sender and its receiver rather than a group.
    pub(crate) is_pair: bool,
}

impl CommunicatorRanks {
    /// Creates the communicator of a rank that sends to a peer or receives from it. The sender's
    /// side creates it for both ranks; the receiver's side creates it only if the peer has no
    /// matching sends.
    pub(crate) fn for_transfer(
        mine: RankEndpoint,
        theirs: RankEndpoint,
        sends: bool,
    ) -> Option<CommunicatorRanks> {
        let members = match (sends, theirs.1) {
            (true, _) => vec![mine, theirs],
            (false, None) => vec![theirs, mine],
            (false, Some(_)) => return None,
        };
        Some(CommunicatorRanks { members, is_pair: true })
    }
}

/// The launches of all roles and the communicators between ranks.
#[derive(Debug, Default)]
pub(crate) struct LaunchSequences {
    /// Role index of each rank.
    pub(crate) role_of: Vec<usize>,
    pub(crate) launches_by_role: Vec<RoleLaunches>,
    pub(crate) communicators: Vec<CommunicatorRanks>,
}

/// For each launch of a role, the launches that cannot start before it has finished.
pub(crate) type HeldLaunches = Vec<Vec<usize>>;

/// One rank of a wait cycle: the rank is blocked in launch `in_flight` and reaches `blocked` only
/// afterwards, and the rank of the next link waits there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct WaitLink {
    pub(crate) rank: u32,
    pub(crate) in_flight: usize,
    pub(crate) blocked: usize,
}

/// The search for a shorter wait cycle ends after this many steps and returns the shortest cycle
/// found so far.
const MAX_SEARCH_STEPS: usize = 4_000_000;

impl LaunchSequences {
    fn launches_of_rank(&self, rank: u32) -> &RoleLaunches {
        &self.launches_by_role[self.role_of[rank as usize]]
    }

    /// Returns the signatures that a member launches on its communicator.
    pub(crate) fn member_sequence(&self, member: RankEndpoint) -> &[u32] {
        self.launches_of_rank(member.0).signatures_on(member.1)
    }

    /// Returns the communicators whose members launch different sequences, one per distinct set of
    /// roles, each with the number of communicators that share the set.
    pub(crate) fn find_divergences(&self) -> Vec<(usize, usize)> {
        let mut equal: HashMap<[RoleEndpoint; 2], bool> = HashMap::new();
        // Keyed by roles and endpoints: the first differing communicator, and the number of them.
        let mut found: BTreeMap<(bool, Vec<RoleEndpoint>), (usize, usize)> = BTreeMap::new();
        for (at, line) in self.communicators.iter().enumerate() {
            let key = |m: &RankEndpoint| (self.role_of[m.0 as usize], m.1);
            let Some(first) = line.members.first() else { continue };
            let agree = |m: &RankEndpoint| self.member_sequence(*first) == self.member_sequence(*m);
            let mut all = line.members[1..].iter();
            if all.all(|m| {
                key(m) == key(first) || *equal.entry([key(first), key(m)]).or_insert_with(|| agree(m))
            }) {
                continue;
            }
            let mut roles: Vec<_> = line.members.iter().map(key).collect();
            if !line.is_pair {
                roles.sort_unstable();
                roles.dedup();
            }
            found.entry((line.is_pair, roles)).or_insert((at, 0)).1 += 1;
        }
        let mut out: Vec<(usize, usize)> = found.into_values().collect();
        out.sort_unstable();
        out
    }

    /// Returns whether all launches complete on devices that run one launch at a time in host
    /// order. Expects matching sequences.
    pub(crate) fn can_complete(&self) -> bool {
        // Ranks of one role launch alike, so simulate roles first. Treating a role's ranks as one
        // may create false cycles, so only a completed simulation of roles is trusted.
        self.can_complete_by_role() || self.can_complete_by_rank()
    }

    fn can_complete_by_role(&self) -> bool {
        let mut first = vec![0];
        for s in &self.launches_by_role {
            first.push(first.last().copied().unwrap_or(0) + s.signatures.len());
        }
        let node = |m: &RankEndpoint| {
            let role = self.role_of[m.0 as usize];
            m.1.map(|c| first[role] + c as usize)
        };
        let mut union = petgraph::unionfind::UnionFind::<usize>::new(first[self.launches_by_role.len()]);
        for line in &self.communicators {
            let mut nodes = line.members.iter().filter_map(node);
            if let Some(a) = nodes.next() {
                nodes.for_each(|b| {
                    union.union(a, b);
                });
            }
        }
        let label = union.into_labeling();
        let mut size = vec![0u32; label.len()];
        label.iter().for_each(|l| size[*l] += 1);
        let meets: Vec<Vec<u32>> = (0..self.launches_by_role.len())
            .map(|r| label[first[r]..first[r + 1]].iter().map(|l| *l as u32).collect())
            .collect();
        let actors = self.launches_by_role.iter().zip(&meets).map(|(s, m)| (s, m.as_slice())).collect();
        simulate_launches(actors, &size)
    }

    fn can_complete_by_rank(&self) -> bool {
        let meets = self.communicators_by_rank();
        let size: Vec<u32> = self.communicators.iter().map(|l| l.members.len() as u32).collect();
        let ranks = self.role_of.iter().zip(&meets);
        simulate_launches(
            ranks.map(|(role, m)| (&self.launches_by_role[*role], m.as_slice())).collect(),
            &size,
        )
    }

    /// Returns, per rank, the communicator of each endpoint of its role.
    fn communicators_by_rank(&self) -> Vec<Vec<u32>> {
        let channels = |r: &usize| vec![u32::MAX; self.launches_by_role[*r].signatures.len()];
        let mut out: Vec<Vec<u32>> = self.role_of.iter().map(channels).collect();
        for (at, line) in self.communicators.iter().enumerate() {
            for (rank, channel) in &line.members {
                if let Some(c) = channel {
                    out[*rank as usize][*c as usize] = at as u32;
                }
            }
        }
        out
    }

    /// Returns the edges of host order: each launch holds back all later launches of its role.
    pub(crate) fn host_order_edges(&self) -> Vec<HeldLaunches> {
        let one = |s: &RoleLaunches| {
            let mut edges = vec![Vec::new(); s.launches.len()];
            for launch in s.batches() {
                let next = s.batch_at(launch.end);
                launch.for_each(|i| edges[i] = next.clone().collect());
            }
            edges
        };
        self.launches_by_role.iter().map(one).collect()
    }

    /// Simulates with every launch starting as soon as `held` permits. Returns the shortest wait
    /// cycle among the launches that are then in flight, or `None` if everything completes.
    pub(crate) fn find_wait_cycle(&self, held: &[HeldLaunches]) -> Option<Vec<WaitLink>> {
        StalledRanks::simulate_until_stall(self, held)?.shortest_cycle()
    }
}

/// Simulates participants that launch their batches in order, one batch at a time. A collective
/// completes when all `size` members of its communicator have launched it. Returns whether every
/// participant reaches its end.
fn simulate_launches(participants: Vec<(&RoleLaunches, &[u32])>, size: &[u32]) -> bool {
    struct Actor {
        next: usize,
        /// Unmatched communicators of the batch in flight, each with the number of its launches
        /// there.
        open: Vec<(u32, u32)>,
    }
    let mut state: Vec<Actor> = participants.iter().map(|_| Actor { next: 0, open: Vec::new() }).collect();
    let mut present: Vec<Vec<u32>> = size.iter().map(|n| Vec::with_capacity(*n as usize)).collect();
    let mut ready: Vec<u32> = (0..participants.len() as u32).collect();
    let mut complete: Vec<u32> = Vec::new();
    let mut left = participants.len();
    loop {
        while let Some(a) = ready.pop() {
            let ((script, meets), me) = (&participants[a as usize], &mut state[a as usize]);
            let launch = script.batch_at(me.next);
            if launch.is_empty() {
                left -= 1;
                continue;
            }
            me.next = launch.end;
            for step in &script.launches[launch] {
                let meeting = meets[step.endpoint as usize];
                match me.open.iter_mut().find(|(m, _)| *m == meeting) {
                    Some((_, n)) => *n += 1,
                    None => me.open.push((meeting, 1)),
                }
            }
            for (meeting, _) in &me.open {
                let arrived = &mut present[*meeting as usize];
                arrived.push(a);
                if arrived.len() == size[*meeting as usize] as usize {
                    complete.push(*meeting);
                }
            }
        }
        let Some(meeting) = complete.pop() else { return left == 0 };
        let mut arrived = std::mem::take(&mut present[meeting as usize]);
        for a in arrived.drain(..) {
            let me = &mut state[a as usize];
            let Some(i) = me.open.iter().position(|(m, _)| *m == meeting) else { continue };
            me.open[i].1 -= 1;
            if me.open[i].1 > 0 {
                present[meeting as usize].push(a);
                if present[meeting as usize].len() == size[meeting as usize] as usize {
                    complete.push(meeting);
                }
                continue;
            }
            me.open.swap_remove(i);
            if me.open.is_empty() {
                ready.push(a);
            }
        }
        if present[meeting as usize].is_empty() {
            present[meeting as usize] = arrived;
        }
    }
}

/// The state of all ranks after a simulation in which no rank can make progress.
struct StalledRanks<'a> {
    sequences: &'a LaunchSequences,
    communicators: Vec<Vec<u32>>,
    /// Position of each launch in its endpoint's sequence, per role.
    positions: Vec<Vec<u32>>,
    /// Launches of each endpoint, per role.
    launches_by_endpoint: Vec<Vec<Vec<usize>>>,
    /// For each launch, the launches that must finish before it can start, per role.
    held_by: Vec<HeldLaunches>,
    /// Launches in flight that have started and not finished, per rank, in ascending order.
    in_flight: Vec<Vec<usize>>,
    /// Whether each launch has started, per rank.
    started: Vec<Vec<bool>>,
}

/// A rank and the index of one of its launches.
type RankLaunch = (u32, usize);

impl<'a> StalledRanks<'a> {
    fn simulate_until_stall(
        meetings: &'a LaunchSequences,
        held: &[HeldLaunches],
    ) -> Option<StalledRanks<'a>> {
        let lines = meetings.communicators_by_rank();
        let ordinal: Vec<Vec<u32>> =
            meetings.launches_by_role.iter().map(RoleLaunches::sequence_positions).collect();
        let places: Vec<Vec<Vec<usize>>> =
            meetings.launches_by_role.iter().map(RoleLaunches::launches_by_endpoint).collect();
        let before: Vec<HeldLaunches> = held.iter().map(reverse_edges).collect();
        let ranks = meetings.role_of.len();
        let mut blocked: Vec<Vec<u32>> =
            meetings.role_of.iter().map(|r| before[*r].iter().map(|b| b.len() as u32).collect()).collect();
        let mut started: Vec<Vec<bool>> = blocked.iter().map(|b| vec![false; b.len()]).collect();
        let mut finished: Vec<Vec<bool>> = started.clone();
        let mut arrived: Vec<Vec<u32>> = meetings
            .communicators
            .iter()
            .map(|l| vec![0; l.members.iter().map(|m| meetings.member_sequence(*m).len()).max().unwrap_or(0)])
            .collect();
        let mut ready: Vec<RankLaunch> = Vec::new();
        for (rank, blocked) in blocked.iter().enumerate() {
            let free = (0..blocked.len()).rev().filter(|i| blocked[*i] == 0);
            ready.extend(free.map(|i| (rank as u32, i)));
        }
        let mut unfinished: usize = started.iter().map(Vec::len).sum();
        while let Some((rank, i)) = ready.pop() {
            let role = meetings.role_of[rank as usize];
            started[rank as usize][i] = true;
            let line =
                lines[rank as usize][meetings.launches_by_role[role].launches[i].endpoint as usize] as usize;
            let n = ordinal[role][i] as usize;
            arrived[line][n] += 1;
            let members = &meetings.communicators[line].members;
            if arrived[line][n] as usize != members.len() {
                continue;
            }
            for (m, channel) in members {
                let role = meetings.role_of[*m as usize];
                let Some(j) = channel.and_then(|c| places[role][c as usize].get(n).copied()) else {
                    continue;
                };
                finished[*m as usize][j] = true;
                unfinished -= 1;
                for k in &held[role][j] {
                    blocked[*m as usize][*k] -= 1;
                    if blocked[*m as usize][*k] == 0 {
                        ready.push((*m, *k));
                    }
                }
            }
        }
        if unfinished == 0 {
            return None;
        }
        let waits = |r: usize| (0..started[r].len()).filter(|i| started[r][*i] && !finished[r][*i]).collect();
        let in_flight = (0..ranks).map(waits).collect();
        Some(StalledRanks {
            sequences: meetings,
            communicators: lines,
            positions: ordinal,
            launches_by_endpoint: places,
            held_by: before,
            in_flight,
            started,
        })
    }

    /// Returns the launches in flight that keep members from joining `node`, each with the member's
    /// launch that would join.
    fn waits_for(&self, node: RankLaunch) -> Vec<(RankLaunch, usize)> {
        let (rank, i) = node;
        let role = self.sequences.role_of[rank as usize];
        let line = self.communicators[rank as usize]
            [self.sequences.launches_by_role[role].launches[i].endpoint as usize] as usize;
        let n = self.positions[role][i] as usize;
        let mut out = Vec::new();
        for (m, channel) in &self.sequences.communicators[line].members {
            let role = self.sequences.role_of[*m as usize];
            let Some(join) =
                channel.and_then(|c| self.launches_by_endpoint[role][c as usize].get(n).copied())
            else {
                continue;
            };
            if self.started[*m as usize][join] {
                continue;
            }
            // Walk back from the missing launch to the launches in flight that hold it back.
            let mut seen = std::collections::BTreeSet::from([join]);
            let mut back = vec![join];
            while let Some(j) = back.pop() {
                for k in &self.held_by[role][j] {
                    if self.in_flight[*m as usize].binary_search(k).is_ok() {
                        out.push(((*m, *k), join));
                    } else if !self.started[*m as usize][*k] && seen.insert(*k) {
                        back.push(*k);
                    }
                }
            }
        }
        out.sort_unstable();
        out.dedup_by_key(|(node, _)| *node);
        out
    }

    fn shortest_cycle(&self) -> Option<Vec<WaitLink>> {
        let mut next: HashMap<RankLaunch, Vec<(RankLaunch, usize)>> = HashMap::new();
        let mut best: Option<Vec<WaitLink>> = None;
        let mut steps = 0;
        let nodes = self.in_flight.iter().enumerate();
        for start in nodes.flat_map(|(r, open)| open.iter().map(move |i| (r as u32, *i))) {
            // The search is breadth first, so the first path back to `start` is the shortest.
            let mut from: HashMap<RankLaunch, (RankLaunch, usize)> = HashMap::new();
            let mut queue = std::collections::VecDeque::from([start]);
            let mut closed = None;
            'search: while let Some(node) = queue.pop_front() {
                for (to, join) in next.entry(node).or_insert_with(|| self.waits_for(node)) {
                    steps += 1;
                    if *to == start {
                        closed = Some((node, *join));
                        break 'search;
                    }
                    if let std::collections::hash_map::Entry::Vacant(v) = from.entry(*to) {
                        v.insert((node, *join));
                        queue.push_back(*to);
                    }
                }
            }
            let Some((mut node, join)) = closed else { continue };
            let mut cycle = vec![WaitLink { rank: start.0, in_flight: start.1, blocked: join }];
            while node != start {
                let (before, join) = from[&node];
                cycle.push(WaitLink { rank: node.0, in_flight: node.1, blocked: join });
                node = before;
            }
            if best.as_ref().is_none_or(|b| cycle.len() < b.len()) {
                best = Some(cycle);
            }
            // A cycle of two ranks is the shortest possible.
            if steps > MAX_SEARCH_STEPS || best.as_ref().is_some_and(|b| b.len() <= 2) {
                break;
            }
        }
        best
    }
}

fn reverse_edges(edges: &HeldLaunches) -> HeldLaunches {
    let mut out = vec![Vec::new(); edges.len()];
    for (i, next) in edges.iter().enumerate() {
        next.iter().for_each(|j| out[*j].push(i));
    }
    out
}
