//! Whether ranks compute the same thing: every value gets a number from how it was made, and ranks that must hold
//! the same, or pieces of the same, must have equal numbers.
//!
//! A number knows names of inputs, weights and buffers, ops with their constants, and what was received, but no local
//! extent: pieces of one value have one number on all ranks. This finds drift that types cannot see.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{Attr, Kind, Op, Opcode, Program, RoleRanks, ValueId};
use tessera_mesh::{Axis, AxisLayout, Group, Rank};
use xxhash_rust::xxh3::xxh3_128;

use crate::meet::{Line, Step};
use crate::ranks::Ranks;
use crate::say;
use crate::sequence::Witness;

/// Two computations where one is meant.
pub static T0343: Code = Code {
    id: "T0343",
    title: "ranks compute different things where one is meant",
    page: "The calls of all ranks fit, and still the ranks do not work on one model. Members of tp hold pieces of one computation, \
but what one of them brings to a collective was computed in another way than what the others bring; or two roles of one replica hand \
out or cache different values under one name. (Over dp and ep every member may bring data of its own.) Typical: \
two tensors of one shape reduced in another order, a context that reached the first rank of a mesh and was not broadcast, random \
draws keyed by another scalar, an activation left out on one role.\n\n\
The judge follows each value back through its ops, names and messages, and shows the first two ops that differ. Pieces of one value \
count as the same: only names, ops and constants are compared, never numbers in tensors. If two roles mean the same \
thing under two names, give it one name.",
};

/// What a value is, for comparing; equal numbers are equal computations.
type Number = u128;

/// Members of a line: role and channel.
type Members = Vec<(usize, Option<u32>)>;

/// Refuses groups whose members bring different computations. Expects ranks that meet and get through.
pub(crate) fn check(ranks: &Ranks<'_>) -> Diagnostics {
    let (replicas, lines) = (replicas(ranks), lines(ranks));
    // A role that is given something by several others, or all must be looked at.
    if lines.values().all(|sets| sets.len() == 1) && !compares(ranks, &replicas) {
        return Vec::new();
    }
    let mut roles: Vec<Role<'_>> = (0..ranks.programs.len()).map(|r| Role::of(ranks, r)).collect();
    let mut out = Vec::new();
    loop {
        let mut moved = false;
        for r in 0..roles.len() {
            while advance(ranks, &mut roles, &lines, r, &mut out) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    // Ranks of a role seen as one can wait for each other although the ranks do not: nothing is known of the rest then.
    let finished = roles.iter().all(|r| r.next == r.p.ops.len());
    if out.is_empty() && finished {
        out.extend(handed_out(&roles, &replicas));
    }
    out
}

/// Whether two roles have anything that must be the same: a group of tp, or the name of an output or a buffer.
fn compares(ranks: &Ranks<'_>, replicas: &Replicas) -> bool {
    let m = ranks.meetings();
    let mixed = |line: &Line| {
        let mut roles = line.members.iter().map(|m2| m.role_of[m2.0 as usize]);
        let first = roles.next();
        roles.any(|r| Some(r) != first)
    };
    if m.lines.iter().enumerate().any(|(i, l)| !l.pair && ranks.is_over_tp(i) && mixed(l)) {
        return true;
    }
    let mut firsts: Firsts<'_, (Opcode, &str), ()> = Firsts::new(replicas);
    ranks.programs.iter().enumerate().any(|(r, p)| {
        let outputs = p.ops.iter().filter(|o| o.opcode == Opcode::Output);
        let outputs = outputs.filter_map(|o| Some((Opcode::Output, o.name.as_deref()?)));
        let writes = p.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite);
        let written: BTreeSet<_> = writes.filter_map(|o| o.buffer).collect();
        let buffers = written.iter().map(|b| (Opcode::CacheWrite, p.buffer(*b).name.as_str()));
        let names: BTreeSet<(Opcode, &str)> = outputs.chain(buffers).collect();
        names.into_iter().any(|name| !firsts.met(r, name, ()).is_empty())
    })
}

/// The first role of each replica that has something of a name.
struct Firsts<'a, K, T> {
    replicas: &'a Replicas,
    /// By name and replica; no replica for roles outside the mesh.
    by_replica: BTreeMap<(K, Option<(u32, u32)>), T>,
    any: BTreeMap<K, T>,
}

impl<'a, K: Ord + Copy, T: Copy + PartialEq> Firsts<'a, K, T> {
    fn new(replicas: &'a Replicas) -> Firsts<'a, K, T> {
        Firsts { replicas, by_replica: BTreeMap::new(), any: BTreeMap::new() }
    }

    /// What earlier roles of the role's replicas have under a name, each once; remembers `mine` where it is the first.
    fn met(&mut self, role: usize, name: K, mine: T) -> Vec<T> {
        let mut out: Vec<T> = Vec::new();
        let mut meet = |other: Option<&T>| {
            if let Some(o) = other.filter(|o| !out.contains(o)) {
                out.push(*o);
            }
        };
        let replicas = &self.replicas[role];
        if replicas.is_empty() {
            // It serves all replicas, so any of them will do.
            meet(self.any.get(&name));
            self.by_replica.entry((name, None)).or_insert(mine);
        } else {
            meet(self.by_replica.get(&(name, None)));
        }
        for at in replicas {
            meet(self.by_replica.get(&(name, Some(*at))));
            self.by_replica.entry((name, Some(*at))).or_insert(mine);
        }
        self.any.entry(name).or_insert(mine);
        out
    }
}

/// Positions on ep and dp of each role's ranks; none for ranks outside the mesh, which serve all of them.
type Replicas = Vec<BTreeSet<(u32, u32)>>;

fn replicas(ranks: &Ranks<'_>) -> Replicas {
    let inside = |role: &RoleRanks| -> BTreeSet<(u32, u32)> {
        let within = role.ranks.iter().filter(|r| ranks.mesh.contains(**r)).map(|r| ranks.mesh.coord_of(*r));
        within.map(|c| (c.on(Axis::Ep), c.on(Axis::Dp))).collect()
    };
    ranks.roles.iter().map(inside).collect()
}

/// A role as far as its values are known.
struct Role<'a> {
    p: &'a Program,
    definitions: Vec<Option<usize>>,
    /// Next op.
    next: usize,
    numbers: Vec<Option<Number>>,
    /// Contents of each buffer, and the last op that wrote it here.
    buffers: Vec<(Number, Option<usize>)>,
    /// Launch of each op that is one.
    launch: BTreeMap<usize, usize>,
    launches: Vec<Launch>,
    /// Per channel, its launches.
    places: Vec<Vec<usize>>,
}

struct Launch {
    op: usize,
    channel: u32,
    /// Place on the channel.
    n: usize,
    /// What it brought, once it was issued.
    brought: Option<Number>,
}

impl<'a> Role<'a> {
    fn of(ranks: &Ranks<'a>, role: usize) -> Role<'a> {
        let p = &ranks.programs[role];
        let script = ranks.script(role);
        let steps = script.steps.iter().zip(script.ordinals()).zip(ranks.ops_launched(role));
        let launch = |((step, n), op): ((&Step, u32), usize)| Launch {
            op,
            channel: step.channel,
            n: n as usize,
            brought: None,
        };
        Role {
            p,
            definitions: p.definitions(),
            next: 0,
            numbers: vec![None; p.values.len()],
            buffers: p.buffers.iter().map(|b| (xxh3_128(b.name.as_bytes()), None)).collect(),
            launch: ranks.ops_launched(role).enumerate().map(|(i, op)| (op, i)).collect(),
            launches: steps.map(launch).collect(),
            places: script.places(),
        }
    }

    fn known(&self, v: ValueId) -> Number {
        self.numbers[v.0 as usize].unwrap_or_default()
    }
}

/// Per role and channel, the different lists of roles that its ranks meet there.
fn lines(ranks: &Ranks<'_>) -> BTreeMap<(usize, u32), Vec<Members>> {
    let m = ranks.meetings();
    let mut sets: BTreeMap<(usize, u32), BTreeSet<Members>> = BTreeMap::new();
    for line in &m.lines {
        let members: Members = line.members.iter().map(|(r, c)| (m.role_of[*r as usize], *c)).collect();
        let keys: BTreeSet<(usize, u32)> = members.iter().filter_map(|(r, c)| Some((*r, (*c)?))).collect();
        for key in keys {
            let known = sets.entry(key).or_default();
            if !known.contains(&members) {
                known.insert(members.clone());
            }
        }
    }
    sets.into_iter().map(|(k, v)| (k, v.into_iter().collect())).collect()
}

/// Takes a role one op further; `false` at its end, or while it waits for what another has not brought yet.
fn advance(
    ranks: &Ranks<'_>,
    roles: &mut [Role<'_>],
    lines: &BTreeMap<(usize, u32), Vec<Members>>,
    r: usize,
    out: &mut Diagnostics,
) -> bool {
    let p = roles[r].p;
    let i = roles[r].next;
    let Some(op) = p.ops.get(i) else { return false };
    // Whose launch it is that begins or ends here.
    let launched = match op.opcode {
        Opcode::Wait => op.operands.first().and_then(|t| roles[r].definitions[t.0 as usize]),
        _ => op.opcode.is_collective().then_some(i),
    };
    let Some(launched) = launched else {
        compute(&mut roles[r], op, i);
        roles[r].next += 1;
        return true;
    };
    let Some(launch) = roles[r].launch.get(&launched).copied() else { return false };
    if roles[r].launches[launch].brought.is_none() {
        // Those issued as one are in flight together.
        for mate in ranks.script(r).launch(launch) {
            let brings = op_of(&roles[r], mate).operands.first().map_or(0, |v| roles[r].known(*v));
            roles[r].launches[mate].brought = Some(brings);
        }
        check_alike(ranks, roles, lines, (r, launch), out);
    }
    if !op.issue {
        let Some(number) = taken(roles, lines, r, launch) else { return false };
        out.extend(given_apart(ranks, roles, lines, (r, launch)).filter(|_| out.is_empty()));
        set(&mut roles[r], op, number);
    }
    roles[r].next += 1;
    true
}

fn set(role: &mut Role<'_>, op: &Op, number: Number) {
    for v in &op.results {
        role.numbers[v.0 as usize] = Some(number);
    }
}

/// An op of one rank.
fn compute(role: &mut Role<'_>, op: &Op, at: usize) {
    let made = made_of(role, op);
    match (op.opcode, op.buffer) {
        (Opcode::CacheWrite, Some(b)) => {
            let before = role.buffers[b.0 as usize].0;
            role.buffers[b.0 as usize] = (joined(&[before, made]), Some(at));
        }
        (_, Some(b)) => {
            let contents = role.buffers[b.0 as usize].0;
            set(role, op, joined(&[contents, made]));
        }
        _ => set(role, op, made),
    }
}

/// Op, name, constants and operands in one number.
fn made_of(role: &Role<'_>, op: &Op) -> Number {
    let mut parts = Parts::default();
    parts.add(op.opcode.name().as_bytes());
    parts.add(op.name.as_deref().unwrap_or_default().as_bytes());
    let whole = reads_all(role, op);
    for (name, value) in op.attrs.iter().filter(|(n, _)| !PLACEMENT.contains(&n.as_str())) {
        // Constants that say what holds without them.
        let idle = match name.as_str() {
            "unit" | "segments" => *value == Attr::Int(1),
            "first" => *value == Attr::Int(0),
            "row" | "rows" => whole,
            _ => false,
        };
        if idle {
            continue;
        }
        parts.add(name.as_bytes());
        match value {
            // `1` and `1.0` are one number.
            Attr::Int(i) if i.unsigned_abs() < 1 << 53 => parts.add(&(*i as f64).to_bits().to_le_bytes()),
            Attr::Int(i) => parts.add(&i.to_le_bytes()),
            Attr::Float(x) => parts.add(&x.to_bits().to_le_bytes()),
            Attr::Str(s) => parts.add(s.as_bytes()),
            Attr::Bool(b) => parts.add(&[u8::from(*b)]),
            Attr::Ints(list) => list.iter().for_each(|i| parts.add(&i.to_le_bytes())),
        }
    }
    if op.opcode.row().kind == Kind::Source {
        // What a rank holds of it: another cut is another value.
        for (axis, v) in role.p.mesh.axes().flat_map(|a| op.results.iter().map(move |v| (a, v))) {
            let on = role.p.ty(*v).layout.on(axis);
            if on != AxisLayout::Replicated {
                parts.add(format!("{axis} {on}").as_bytes());
            }
        }
    }
    // What a collective is given is compared, or joined with what the others give, by whoever asks.
    let given = if op.opcode.is_collective() { &[][..] } else { &op.operands[..] };
    let mut operands: Vec<Number> = given.iter().map(|v| role.known(*v)).collect();
    if op.opcode == Opcode::Add {
        operands.sort_unstable();
    }
    operands.iter().for_each(|n| parts.add(&n.to_le_bytes()));
    for (key, v) in &op.keyed {
        parts.add(key.as_bytes());
        parts.add(&role.known(*v).to_le_bytes());
    }
    parts.number()
}

/// Whether a read of a buffer takes all of its rows, said or not.
fn reads_all(role: &Role<'_>, op: &Op) -> bool {
    let rows = op.buffer.and_then(|b| role.p.buffer(b).ty.shape.first().copied());
    let said = op.int("rows").and_then(|n| u64::try_from(n).ok());
    op.int("row").unwrap_or(0) == 0 && rows.is_some() && said.is_none_or(|n| Some(n) == rows)
}

/// Constants that say where and how an op is launched, and change no number.
const PLACEMENT: &[&str] = &["at", "batch", "graph", "part"];

/// What a number is made of, each part with its length.
#[derive(Default)]
struct Parts(Vec<u8>);

impl Parts {
    fn add(&mut self, part: &[u8]) {
        self.0.extend_from_slice(&(part.len() as u32).to_le_bytes());
        self.0.extend_from_slice(part);
    }

    fn number(&self) -> Number {
        xxh3_128(&self.0)
    }
}

/// One number of several.
fn joined(numbers: &[Number]) -> Number {
    let mut parts = Parts::default();
    numbers.iter().for_each(|n| parts.add(&n.to_le_bytes()));
    parts.number()
}

/// What a member of a line brought at one place of it.
fn brought(roles: &[Role<'_>], member: (usize, Option<u32>), n: usize) -> Option<Number> {
    let role = &roles[member.0];
    role.launches[*role.places[member.1? as usize].get(n)?].brought
}

/// The result of a launch; `None` while a member that it depends on has not issued its own.
fn taken(
    roles: &[Role<'_>],
    lines: &BTreeMap<(usize, u32), Vec<Members>>,
    r: usize,
    launch: usize,
) -> Option<Number> {
    let Launch { channel, n, brought: own, .. } = roles[r].launches[launch];
    let op = op_of(&roles[r], launch);
    let meets = lines.get(&(r, channel)).map_or(&[][..], Vec::as_slice);
    let from = match op.opcode {
        Opcode::Recv => 0,
        Opcode::Broadcast => usize::try_from(op.int("root").unwrap_or(0)).unwrap_or(0),
        // Over tp all members bring the same, which was compared.
        _ if is_over_tp(op) => return Some(joined(&[own?, made_of(&roles[r], op)])),
        _ => {
            // Elsewhere each brings its own, and what comes out is made of all of it, in order of position.
            let made = made_of(&roles[r], op);
            let whole = |members: &Members| -> Option<Number> {
                let all: Option<Vec<Number>> = members.iter().map(|m| brought(roles, *m, n)).collect();
                Some(joined(&[joined(&all?), made]))
            };
            return one_of(meets.iter().map(whole));
        }
    };
    // The value of whoever gave it.
    one_of(meets.iter().map(|members| brought(roles, *members.get(from)?, n)))
}

/// The number that all ranks of a role have; where they have several, one for all of these together, so that the role
/// differs from one whose ranks have another. `None` while one is missing.
fn one_of(numbers: impl Iterator<Item = Option<Number>>) -> Option<Number> {
    let all: BTreeSet<Number> = numbers.collect::<Option<_>>()?;
    match all.first() {
        Some(one) if all.len() == 1 => Some(*one),
        Some(_) => Some(joined(&all.into_iter().collect::<Vec<_>>())),
        None => None,
    }
}

fn is_over_tp(op: &Op) -> bool {
    matches!(op.group(), Some(Group::Axis { axis: Axis::Tp, .. }))
}

fn op_of<'a>(role: &Role<'a>, launch: usize) -> &'a Op {
    &role.p.ops[role.launches[launch].op]
}

/// Two ranks of one role and one group of tp that receive different values.
fn given_apart(
    ranks: &Ranks<'_>,
    roles: &[Role<'_>],
    lines: &BTreeMap<(usize, u32), Vec<Members>>,
    (r, launch): (usize, usize),
) -> Option<Diagnostic> {
    let givers = lines.get(&(r, roles[r].launches[launch].channel)).map_or(0, Vec::len);
    if givers < 2 || op_of(&roles[r], launch).opcode != Opcode::Recv {
        return None;
    }
    let (Launch { channel, n, op, .. }, m) = (&roles[r].launches[launch], ranks.meetings());
    let mut first: BTreeMap<u32, (Rank, Number, (usize, usize))> = BTreeMap::new();
    for line in m.lines.iter().filter(|l| l.pair) {
        let [from, to] = line.members[..] else { continue };
        let role = m.role_of[from.0 as usize];
        let rank = Rank(to.0);
        if m.role_of[to.0 as usize] != r || to.1 != Some(*channel) || !ranks.mesh.contains(rank) {
            continue;
        }
        let number = brought(roles, (role, from.1), *n)?;
        let sent = *roles[role].places.get(from.1? as usize)?.get(*n)?;
        let group = ranks.mesh.rank_at(ranks.mesh.coord_of(rank).with(Axis::Tp, 0)).0;
        let (other, theirs, there) = *first.entry(group).or_insert((rank, number, (role, sent)));
        if theirs != number {
            let message =
                format!("{} of one group of tp are given different values", say::ranks(&[other, rank]));
            let d = say::at_op(Diagnostic::error(&T0343, message), roles[r].p, *op, "received here");
            let (a, b) = (op_of(&roles[there.0], there.1), op_of(&roles[role], sent));
            return Some(match (a.operands.first(), b.operands.first()) {
                (Some(x), Some(y)) => differs(d, &roles[there.0], *x, &roles[role], *y),
                _ => d,
            });
        }
    }
    None
}

/// Compares what a role just brought with what the others brought to the same meeting.
fn check_alike(
    ranks: &Ranks<'_>,
    roles: &[Role<'_>],
    lines: &BTreeMap<(usize, u32), Vec<Members>>,
    (r, launch): (usize, usize),
    out: &mut Diagnostics,
) {
    let op = op_of(&roles[r], launch);
    if !is_over_tp(op)
        || matches!(op.opcode, Opcode::Broadcast | Opcode::Send | Opcode::Recv)
        || !out.is_empty()
    {
        return;
    }
    let Launch { channel, n, brought: own, .. } = roles[r].launches[launch];
    let meets = lines.get(&(r, channel)).map_or(&[][..], Vec::as_slice);
    let other = meets.iter().flatten().find(|m| {
        let theirs = brought(roles, **m, n);
        theirs.is_some() && theirs != own
    });
    let Some((other, Some(c))) = other else { return };
    let theirs = roles[*other].places[*c as usize][n];
    let (a, b) = (op_of(&roles[*other], theirs), op);
    let Some((x, y)) = a.operands.first().zip(b.operands.first()) else { return };
    let message = format!(
        "{} and {} bring different values to {}",
        ranks.who(*other),
        ranks.who(r),
        ranks.what(r, launch)
    );
    let d = Diagnostic::error(&T0343, message);
    out.push(differs(d, &roles[*other], *x, &roles[r], *y));
}

/// Adds the first two ops in which two values' histories differ.
fn differs(d: Diagnostic, a: &Role<'_>, mut x: ValueId, b: &Role<'_>, mut y: ValueId) -> Diagnostic {
    while let (Some(i), Some(j)) = (a.definitions[x.0 as usize], b.definitions[y.0 as usize]) {
        let (f, g) = (&a.p.ops[i], &b.p.ops[j]);
        let operands =
            |o: &Op| o.operands.iter().copied().chain(o.keyed.iter().map(|(_, v)| *v)).collect::<Vec<_>>();
        let pairs = operands(f).into_iter().zip(operands(g));
        let alike = f.opcode == g.opcode && f.name == g.name && f.operands.len() == g.operands.len();
        let deeper = pairs.into_iter().find(|(v, w)| {
            let token = a.p.ty(*v).is_token() || b.p.ty(*w).is_token();
            !token && a.numbers[v.0 as usize] != b.numbers[w.0 as usize]
        });
        match deeper {
            Some((v, w)) if alike => (x, y) = (v, w),
            _ => {
                let d = say::at_op(
                    d,
                    a.p,
                    i,
                    format!("one has {}: {}", say::value(a.p, x), say::describe(a.p, i)),
                );
                return say::at_op(
                    d,
                    b.p,
                    j,
                    format!("the other {}: {}", say::value(b.p, y), say::describe(b.p, j)),
                );
            }
        }
    }
    d
}

/// Outputs and buffers of one name are one value on all roles of a replica that make them.
fn handed_out(roles: &[Role<'_>], replicas: &Replicas) -> Diagnostics {
    let mut out = Vec::new();
    let mut outputs: Firsts<'_, &str, (usize, ValueId)> = Firsts::new(replicas);
    let mut buffers: Firsts<'_, &str, (usize, usize, Number)> = Firsts::new(replicas);
    for (r, role) in roles.iter().enumerate() {
        for op in role.p.ops.iter().filter(|o| o.opcode == Opcode::Output) {
            let (Some(name), Some(v)) = (op.name.as_deref(), op.operands.first()) else { continue };
            let others = outputs.met(r, name, (r, *v));
            if let Some((q, w)) =
                others.into_iter().find(|(q, w)| *q != r && roles[*q].known(*w) != role.known(*v))
            {
                let d =
                    Diagnostic::error(&T0343, format!("two roles hand out different values as \"{name}\""));
                out.push(differs(d, &roles[q], w, role, *v));
            }
        }
        for (b, (contents, written)) in role.p.buffers.iter().zip(&role.buffers) {
            let Some(at) = *written else { continue };
            let others = buffers.met(r, &b.name, (r, at, *contents));
            let Some((q, first, _)) = others.into_iter().find(|o| o.2 != *contents) else { continue };
            let message = format!("two roles leave different contents in buffer @{}", b.name);
            let d = Diagnostic::error(&T0343, message);
            let values = (roles[q].p.ops[first].operands.first(), role.p.ops[at].operands.first());
            out.push(match values {
                (Some(x), Some(y)) if roles[q].known(*x) != role.known(*y) => {
                    differs(d, &roles[q], *x, role, *y)
                }
                _ => {
                    let d = say::at_op(d, roles[q].p, first, "the last write of one");
                    say::at_op(d, role.p, at, "the last write of the other")
                }
            });
        }
    }
    out
}
