//! Where ranks meet: who must agree with whom, whether they do, and whether they all get through.
//!
//! This file knows launches as numbers. A *channel* is one way in which a role meets others (a group it belongs
//! to, or the sends to one peer); a *line* is the set of ranks that meet: a group, or a sender and a receiver.
//! Programs of plans and observed sequences both come down to this.

use std::collections::{BTreeMap, HashMap};

/// One launch of a role.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Step {
    /// Which of the role's channels it is on.
    pub(crate) channel: u32,
    /// Launches in a row with one number other than 0 are issued as one.
    pub(crate) batch: u32,
}

/// What a role launches, in host order.
#[derive(Debug, Default)]
pub(crate) struct Script {
    pub(crate) steps: Vec<Step>,
    /// Per channel, the signatures of its launches in order. Equal numbers are equal calls.
    pub(crate) signatures: Vec<Vec<u32>>,
}

impl Script {
    /// Adds a launch.
    pub(crate) fn push(&mut self, channel: u32, signature: u32, batch: u32) {
        let at = channel as usize;
        if self.signatures.len() <= at {
            self.signatures.resize_with(at + 1, Vec::new);
        }
        self.signatures[at].push(signature);
        self.steps.push(Step { channel, batch });
    }

    /// Signatures of a channel's launches.
    pub(crate) fn on(&self, channel: Option<u32>) -> &[u32] {
        channel.and_then(|c| self.signatures.get(c as usize)).map_or(&[], Vec::as_slice)
    }

    /// Index of a channel's n-th launch. Linear: for what is shown to a person.
    pub(crate) fn nth(&self, channel: u32, n: usize) -> Option<usize> {
        let mut on = self.steps.iter().enumerate().filter(|(_, s)| s.channel == channel);
        on.nth(n).map(|(i, _)| i)
    }

    /// Per channel, the indices of its launches.
    pub(crate) fn places(&self) -> Vec<Vec<usize>> {
        let mut out = vec![Vec::new(); self.signatures.len()];
        for (i, step) in self.steps.iter().enumerate() {
            out[step.channel as usize].push(i);
        }
        out
    }

    /// Per launch, its place in its channel's sequence.
    pub(crate) fn ordinals(&self) -> Vec<u32> {
        let mut count = vec![0u32; self.signatures.len()];
        let place = |step: &Step| {
            let n = &mut count[step.channel as usize];
            *n += 1;
            *n - 1
        };
        self.steps.iter().map(place).collect()
    }

    /// Launches in order, each with those that are issued as one with it.
    pub(crate) fn launches(&self) -> impl Iterator<Item = std::ops::Range<usize>> + '_ {
        let mut at = 0;
        std::iter::from_fn(move || {
            let launch = self.launch(at);
            at = launch.end;
            (!launch.is_empty()).then_some(launch)
        })
    }

    /// The launches that begin at `at` and are issued as one.
    pub(crate) fn launch(&self, at: usize) -> std::ops::Range<usize> {
        let end = match self.steps.get(at) {
            None => at,
            Some(s) if s.batch == 0 => at + 1,
            Some(s) => {
                let rest = self.steps[at..].iter();
                at + rest.take_while(|o| o.batch == s.batch).count()
            }
        };
        at..end
    }
}

/// A rank of a line, with the channel of its role; `None` where the role never launches there.
pub(crate) type Member = (u32, Option<u32>);

/// The same by role.
type RoleChannel = (usize, Option<u32>);

/// Ranks that must launch the same, position by position.
#[derive(Debug)]
pub(crate) struct Line {
    /// Sender and receiver, or a group in order of position.
    pub(crate) members: Vec<Member>,
    /// A sender and its receiver instead of a group.
    pub(crate) pair: bool,
}

impl Line {
    /// The line of a rank that sends to another or receives from it. The sender tells of both; a receiver only of
    /// sends that nobody makes.
    pub(crate) fn pair(mine: Member, theirs: Member, sends: bool) -> Option<Line> {
        let members = match (sends, theirs.1) {
            (true, _) => vec![mine, theirs],
            (false, None) => vec![theirs, mine],
            (false, Some(_)) => return None,
        };
        Some(Line { members, pair: true })
    }
}

/// The scripts of all roles and the lines between ranks.
#[derive(Debug, Default)]
pub(crate) struct Meetings {
    /// Role of each rank.
    pub(crate) role_of: Vec<usize>,
    pub(crate) scripts: Vec<Script>,
    pub(crate) lines: Vec<Line>,
}

/// For each launch of a role, those that cannot start before it has finished.
pub(crate) type Edges = Vec<Vec<usize>>;

/// A rank of a circle: inside launch `holds`, it reaches `wants` only afterwards, and the rank of the next link
/// waits there.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    pub(crate) rank: u32,
    pub(crate) holds: usize,
    pub(crate) wants: usize,
}

/// Searches for a shorter circle stop after this many steps; the circle at hand is then shown.
const SEARCH_STEPS: usize = 4_000_000;

impl Meetings {
    fn script(&self, rank: u32) -> &Script {
        &self.scripts[self.role_of[rank as usize]]
    }

    /// What a member of a line launches on it.
    pub(crate) fn sequence(&self, member: Member) -> &[u32] {
        self.script(member.0).on(member.1)
    }

    /// Lines whose members do not launch the same, one per set of roles, with how many lines share it.
    pub(crate) fn departures(&self) -> Vec<(usize, usize)> {
        let mut equal: HashMap<[RoleChannel; 2], bool> = HashMap::new();
        // By roles and channels: the first such line, and how many there are.
        let mut found: BTreeMap<(bool, Vec<RoleChannel>), (usize, usize)> = BTreeMap::new();
        for (at, line) in self.lines.iter().enumerate() {
            let key = |m: &Member| (self.role_of[m.0 as usize], m.1);
            let Some(first) = line.members.first() else { continue };
            let agree = |m: &Member| self.sequence(*first) == self.sequence(*m);
            let mut all = line.members[1..].iter();
            if all.all(|m| {
                key(m) == key(first) || *equal.entry([key(first), key(m)]).or_insert_with(|| agree(m))
            }) {
                continue;
            }
            let mut roles: Vec<_> = line.members.iter().map(key).collect();
            if !line.pair {
                roles.sort_unstable();
                roles.dedup();
            }
            found.entry((line.pair, roles)).or_insert((at, 0)).1 += 1;
        }
        let mut out: Vec<(usize, usize)> = found.into_values().collect();
        out.sort_unstable();
        out
    }

    /// Whether all launches complete on devices that run one at a time, in host order. Expects no departures.
    pub(crate) fn complete(&self) -> bool {
        // Ranks of one role launch alike: play roles first. Meeting roles instead of ranks can close a circle that
        // is none, so only success counts.
        self.complete_as_roles() || self.complete_as_ranks()
    }

    fn complete_as_roles(&self) -> bool {
        let mut first = vec![0];
        for s in &self.scripts {
            first.push(first.last().copied().unwrap_or(0) + s.signatures.len());
        }
        let node = |m: &Member| {
            let role = self.role_of[m.0 as usize];
            m.1.map(|c| first[role] + c as usize)
        };
        let mut union = petgraph::unionfind::UnionFind::<usize>::new(first[self.scripts.len()]);
        for line in &self.lines {
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
        let meets: Vec<Vec<u32>> = (0..self.scripts.len())
            .map(|r| label[first[r]..first[r + 1]].iter().map(|l| *l as u32).collect())
            .collect();
        let actors = self.scripts.iter().zip(&meets).map(|(s, m)| (s, m.as_slice())).collect();
        play(actors, &size)
    }

    fn complete_as_ranks(&self) -> bool {
        let meets = self.lines_of_ranks();
        let size: Vec<u32> = self.lines.iter().map(|l| l.members.len() as u32).collect();
        let ranks = self.role_of.iter().zip(&meets);
        play(ranks.map(|(role, m)| (&self.scripts[*role], m.as_slice())).collect(), &size)
    }

    /// Per rank, the line of each channel of its role.
    fn lines_of_ranks(&self) -> Vec<Vec<u32>> {
        let channels = |r: &usize| vec![u32::MAX; self.scripts[*r].signatures.len()];
        let mut out: Vec<Vec<u32>> = self.role_of.iter().map(channels).collect();
        for (at, line) in self.lines.iter().enumerate() {
            for (rank, channel) in &line.members {
                if let Some(c) = channel {
                    out[*rank as usize][*c as usize] = at as u32;
                }
            }
        }
        out
    }

    /// Host order: each launch holds all later ones of its role.
    pub(crate) fn host_order(&self) -> Vec<Edges> {
        let one = |s: &Script| {
            let mut edges = vec![Vec::new(); s.steps.len()];
            for launch in s.launches() {
                let next = s.launch(launch.end);
                launch.for_each(|i| edges[i] = next.clone().collect());
            }
            edges
        };
        self.scripts.iter().map(one).collect()
    }

    /// Starts every launch as soon as `held` lets it and says who waits for whom where that ends too early: the
    /// shortest circle among what is then in flight. `None`: everything completes.
    pub(crate) fn circle(&self, held: &[Edges]) -> Option<Vec<Hold>> {
        Stuck::of(self, held)?.circle()
    }
}

/// Plays actors that each launch in order, one launch at a time; a meeting takes place when all its `size` members
/// are at it. Whether everyone gets to the end.
fn play(actors: Vec<(&Script, &[u32])>, size: &[u32]) -> bool {
    struct Actor {
        next: usize,
        /// Parts of the launch in flight that have not met: meeting and how many of them in a row.
        open: Vec<(u32, u32)>,
    }
    let mut state: Vec<Actor> = actors.iter().map(|_| Actor { next: 0, open: Vec::new() }).collect();
    let mut present: Vec<Vec<u32>> = size.iter().map(|n| Vec::with_capacity(*n as usize)).collect();
    let mut idle: Vec<u32> = (0..actors.len() as u32).collect();
    let mut met: Vec<u32> = Vec::new();
    let mut left = actors.len();
    loop {
        while let Some(a) = idle.pop() {
            let ((script, meets), me) = (&actors[a as usize], &mut state[a as usize]);
            let launch = script.launch(me.next);
            if launch.is_empty() {
                left -= 1;
                continue;
            }
            me.next = launch.end;
            for step in &script.steps[launch] {
                let meeting = meets[step.channel as usize];
                match me.open.iter_mut().find(|(m, _)| *m == meeting) {
                    Some((_, n)) => *n += 1,
                    None => me.open.push((meeting, 1)),
                }
            }
            for (meeting, _) in &me.open {
                let there = &mut present[*meeting as usize];
                there.push(a);
                if there.len() == size[*meeting as usize] as usize {
                    met.push(*meeting);
                }
            }
        }
        let Some(meeting) = met.pop() else { return left == 0 };
        let mut there = std::mem::take(&mut present[meeting as usize]);
        for a in there.drain(..) {
            let me = &mut state[a as usize];
            let Some(i) = me.open.iter().position(|(m, _)| *m == meeting) else { continue };
            me.open[i].1 -= 1;
            if me.open[i].1 > 0 {
                present[meeting as usize].push(a);
                if present[meeting as usize].len() == size[meeting as usize] as usize {
                    met.push(meeting);
                }
                continue;
            }
            me.open.swap_remove(i);
            if me.open.is_empty() {
                idle.push(a);
            }
        }
        if present[meeting as usize].is_empty() {
            present[meeting as usize] = there;
        }
    }
}

/// Every rank as far as it gets.
struct Stuck<'a> {
    meetings: &'a Meetings,
    lines: Vec<Vec<u32>>,
    /// Per role and launch: its place in its channel's sequence.
    ordinal: Vec<Vec<u32>>,
    /// Per role and channel: its launches.
    places: Vec<Vec<Vec<usize>>>,
    /// Per role and launch: launches that hold it.
    before: Vec<Edges>,
    /// Per rank: launches that are neither finished nor held, ascending.
    in_flight: Vec<Vec<usize>>,
    /// Per rank and launch: whether it has started.
    started: Vec<Vec<bool>>,
}

/// A launch of a rank.
type Node = (u32, usize);

impl<'a> Stuck<'a> {
    fn of(meetings: &'a Meetings, held: &[Edges]) -> Option<Stuck<'a>> {
        let lines = meetings.lines_of_ranks();
        let ordinal: Vec<Vec<u32>> = meetings.scripts.iter().map(Script::ordinals).collect();
        let places: Vec<Vec<Vec<usize>>> = meetings.scripts.iter().map(Script::places).collect();
        let before: Vec<Edges> = held.iter().map(reversed).collect();
        let ranks = meetings.role_of.len();
        let mut blocked: Vec<Vec<u32>> =
            meetings.role_of.iter().map(|r| before[*r].iter().map(|b| b.len() as u32).collect()).collect();
        let mut started: Vec<Vec<bool>> = blocked.iter().map(|b| vec![false; b.len()]).collect();
        let mut finished: Vec<Vec<bool>> = started.clone();
        let mut arrived: Vec<Vec<u32>> = meetings
            .lines
            .iter()
            .map(|l| vec![0; l.members.iter().map(|m| meetings.sequence(*m).len()).max().unwrap_or(0)])
            .collect();
        let mut work: Vec<Node> = Vec::new();
        for (rank, blocked) in blocked.iter().enumerate() {
            let free = (0..blocked.len()).rev().filter(|i| blocked[*i] == 0);
            work.extend(free.map(|i| (rank as u32, i)));
        }
        let mut left: usize = started.iter().map(Vec::len).sum();
        while let Some((rank, i)) = work.pop() {
            let role = meetings.role_of[rank as usize];
            started[rank as usize][i] = true;
            let line = lines[rank as usize][meetings.scripts[role].steps[i].channel as usize] as usize;
            let n = ordinal[role][i] as usize;
            arrived[line][n] += 1;
            let members = &meetings.lines[line].members;
            if arrived[line][n] as usize != members.len() {
                continue;
            }
            for (m, channel) in members {
                let role = meetings.role_of[*m as usize];
                let Some(j) = channel.and_then(|c| places[role][c as usize].get(n).copied()) else {
                    continue;
                };
                finished[*m as usize][j] = true;
                left -= 1;
                for k in &held[role][j] {
                    blocked[*m as usize][*k] -= 1;
                    if blocked[*m as usize][*k] == 0 {
                        work.push((*m, *k));
                    }
                }
            }
        }
        if left == 0 {
            return None;
        }
        let waits = |r: usize| (0..started[r].len()).filter(|i| started[r][*i] && !finished[r][*i]).collect();
        let in_flight = (0..ranks).map(waits).collect();
        Some(Stuck { meetings, lines, ordinal, places, before, in_flight, started })
    }

    /// Launches in flight that keep members from joining `node`, each with the member's launch that would join.
    fn waits_for(&self, node: Node) -> Vec<(Node, usize)> {
        let (rank, i) = node;
        let role = self.meetings.role_of[rank as usize];
        let line = self.lines[rank as usize][self.meetings.scripts[role].steps[i].channel as usize] as usize;
        let n = self.ordinal[role][i] as usize;
        let mut out = Vec::new();
        for (m, channel) in &self.meetings.lines[line].members {
            let role = self.meetings.role_of[*m as usize];
            let Some(join) = channel.and_then(|c| self.places[role][c as usize].get(n).copied()) else {
                continue;
            };
            if self.started[*m as usize][join] {
                continue;
            }
            // Back through what holds it, to what is in flight.
            let mut seen = std::collections::BTreeSet::from([join]);
            let mut back = vec![join];
            while let Some(j) = back.pop() {
                for k in &self.before[role][j] {
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

    fn circle(&self) -> Option<Vec<Hold>> {
        let mut next: HashMap<Node, Vec<(Node, usize)>> = HashMap::new();
        let mut best: Option<Vec<Hold>> = None;
        let mut steps = 0;
        let nodes = self.in_flight.iter().enumerate();
        for start in nodes.flat_map(|(r, open)| open.iter().map(move |i| (r as u32, *i))) {
            // Breadth first, so that the first way back is the shortest through `start`.
            let mut from: HashMap<Node, (Node, usize)> = HashMap::new();
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
            let mut circle = vec![Hold { rank: start.0, holds: start.1, wants: join }];
            while node != start {
                let (before, join) = from[&node];
                circle.push(Hold { rank: node.0, holds: node.1, wants: join });
                node = before;
            }
            if best.as_ref().is_none_or(|b| circle.len() < b.len()) {
                best = Some(circle);
            }
            // Two ranks are the fewest that can contradict each other.
            if steps > SEARCH_STEPS || best.as_ref().is_some_and(|b| b.len() <= 2) {
                break;
            }
        }
        best
    }
}

fn reversed(edges: &Edges) -> Edges {
    let mut out = vec![Vec::new(); edges.len()];
    for (i, next) in edges.iter().enumerate() {
        next.iter().for_each(|j| out[*j].push(i));
    }
    out
}
