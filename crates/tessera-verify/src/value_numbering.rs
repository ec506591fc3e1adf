//! Value numbering across ranks: every value gets a number from the way it was computed, and ranks
//! that must hold the same value, or shards of the same value, must have equal numbers.
//!
//! A number covers names of inputs, weights and buffers, ops with their attributes, and received
//! values, but no local extent: shards of one value have one number on all ranks. This finds drift
//! that types cannot express.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Attr, Op, OpKind, Opcode, Program, RoleRanks, ValueId, views};
use tessera_mesh::{Axis, AxisLayout, Group, Rank};
use xxhash_rust::xxh3::xxh3_128;

use crate::codes::T0343;
use crate::display;
use crate::matching::{CommunicatorRanks, EndpointLaunch};
use crate::phase_programs::PhasePrograms;
use crate::sequence::SequenceSource;

/// Identifies a computation; equal numbers mean equal computations.
type ValueNumber = u128;

/// Members of a communicator, as roles and endpoints.
type RoleEndpoints = Vec<(usize, Option<u32>)>;

/// Rejects groups whose members contribute different computations. Expects ranks whose launches
/// match and complete.
pub(crate) fn check(ranks: &PhasePrograms<'_>) -> Diagnostics {
    let (replicas, lines) = (role_replicas(ranks), endpoint_peers(ranks));
    // Skip the analysis unless a role receives from several other roles, or roles must be compared.
    if lines.values().all(|sets| sets.len() == 1) && !needs_numbering(ranks, &replicas) {
        return Vec::new();
    }
    let mut roles: Vec<RoleValues<'_>> =
        (0..ranks.programs.len()).map(|r| RoleValues::new(ranks, r)).collect();
    let mut out = Vec::new();
    loop {
        let mut moved = false;
        for r in 0..roles.len() {
            while advance_role(ranks, &mut roles, &lines, r, &mut out) {
                moved = true;
            }
        }
        if !moved {
            break;
        }
    }
    // If all ranks of a role are treated as one, they may wait for each other although the ranks do
    // not; then the remaining values are unknown.
    let finished = roles.iter().all(|r| r.next_op == r.program.ops.len());
    if out.is_empty() && finished {
        out.extend(check_outputs_and_buffers(&roles, &replicas));
    }
    out
}

/// Returns whether two roles share anything that must be equal: a group of tp, or the name of an
/// output or a buffer.
fn needs_numbering(ranks: &PhasePrograms<'_>, replicas: &RoleReplicas) -> bool {
    let m = ranks.launch_sequences();
    let mixed = |line: &CommunicatorRanks| {
        let mut roles = line.members.iter().map(|m2| m.role_of[m2.0 as usize]);
        let first = roles.next();
        roles.any(|r| Some(r) != first)
    };
    if m.communicators.iter().enumerate().any(|(i, l)| !l.is_pair && ranks.is_over_tp(i) && mixed(l)) {
        return true;
    }
    let mut firsts: FirstByReplica<'_, (Opcode, &str), ()> = FirstByReplica::new(replicas);
    ranks.programs.iter().enumerate().any(|(r, p)| {
        let outputs = p.ops.iter().filter(|o| o.opcode == Opcode::Output);
        let outputs = outputs.filter_map(|o| Some((Opcode::Output, o.name.as_deref()?)));
        let writes = p.ops.iter().filter(|o| o.opcode == Opcode::CacheWrite);
        let written: BTreeSet<_> = writes.filter_map(|o| o.buffer).collect();
        let buffers = written.iter().map(|b| (Opcode::CacheWrite, p.buffer(*b).name.as_str()));
        let names: BTreeSet<(Opcode, &str)> = outputs.chain(buffers).collect();
        names.into_iter().any(|name| !firsts.insert_and_get_earlier(r, name, ()).is_empty())
    })
}

/// The entry of the first role of each replica that has a given name.
struct FirstByReplica<'a, K, T> {
    replicas: &'a RoleReplicas,
    /// Entries by name and replica; `None` stands for roles outside the mesh.
    by_replica: BTreeMap<(K, Option<(u32, u32)>), T>,
    any: BTreeMap<K, T>,
}

impl<'a, K: Ord + Copy, T: Copy + PartialEq> FirstByReplica<'a, K, T> {
    fn new(replicas: &'a RoleReplicas) -> FirstByReplica<'a, K, T> {
        FirstByReplica { replicas, by_replica: BTreeMap::new(), any: BTreeMap::new() }
    }

    /// Returns the distinct entries that earlier roles of the role's replicas have under a name,
    /// and stores `mine` for replicas that have none.
    fn insert_and_get_earlier(&mut self, role: usize, name: K, mine: T) -> Vec<T> {
        let mut out: Vec<T> = Vec::new();
        let mut meet = |other: Option<&T>| {
            if let Some(o) = other.filter(|o| !out.contains(o)) {
                out.push(*o);
            }
        };
        let replicas = &self.replicas[role];
        if replicas.is_empty() {
            // A role outside the mesh serves all replicas, so it compares with any of them.
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

/// Positions on ep and dp of each role's ranks; empty for ranks outside the mesh, which serve all
/// replicas.
type RoleReplicas = Vec<BTreeSet<(u32, u32)>>;

fn role_replicas(ranks: &PhasePrograms<'_>) -> RoleReplicas {
    let inside = |role: &RoleRanks| -> BTreeSet<(u32, u32)> {
        let within = role.ranks.iter().filter(|r| ranks.mesh.contains(**r)).map(|r| ranks.mesh.coord_of(*r));
        within.map(|c| (c.on_axis(Axis::Ep), c.on_axis(Axis::Dp))).collect()
    };
    ranks.roles.iter().map(inside).collect()
}

/// A role with the values numbered so far.
struct RoleValues<'a> {
    program: &'a Program,
    definitions: Vec<Option<usize>>,
    /// Index of the op that [`advance_role`] takes next; the number of ops once the program is
    /// done.
    next_op: usize,
    numbers: Vec<Option<ValueNumber>>,
    /// Number of each buffer's contents, and the last op that wrote the buffer in this program.
    buffers: Vec<(ValueNumber, Option<usize>)>,
    /// Index in `launches`, by the index of the launched op.
    launch_by_op: BTreeMap<usize, usize>,
    launches: Vec<NumberedLaunch>,
    /// Indices in `launches` of the launches of each endpoint, in host order.
    launches_by_endpoint: Vec<Vec<usize>>,
}

struct NumberedLaunch {
    op: usize,
    endpoint: u32,
    /// Position in the endpoint's sequence, from 0.
    position: usize,
    /// Number of the operand, once the launch was issued.
    operand: Option<ValueNumber>,
}

impl<'a> RoleValues<'a> {
    fn new(ranks: &PhasePrograms<'a>, role: usize) -> RoleValues<'a> {
        let program = &ranks.programs[role];
        let script = ranks.role_launches(role);
        let steps = script.launches.iter().zip(script.sequence_positions()).zip(ranks.launched_ops(role));
        let launch = |((step, n), op): ((&EndpointLaunch, u32), usize)| NumberedLaunch {
            op,
            endpoint: step.endpoint,
            position: n as usize,
            operand: None,
        };
        RoleValues {
            program,
            definitions: program.defining_ops(),
            next_op: 0,
            numbers: vec![None; program.values.len()],
            buffers: program.buffers.iter().map(|b| (xxh3_128(b.name.as_bytes()), None)).collect(),
            launch_by_op: ranks.launched_ops(role).enumerate().map(|(i, op)| (op, i)).collect(),
            launches: steps.map(launch).collect(),
            launches_by_endpoint: script.launches_by_endpoint(),
        }
    }

    fn value_number(&self, v: ValueId) -> ValueNumber {
        self.numbers[v.0 as usize].unwrap_or_default()
    }
}

/// Returns, per role and endpoint, the distinct lists of roles that its ranks meet there.
fn endpoint_peers(ranks: &PhasePrograms<'_>) -> BTreeMap<(usize, u32), Vec<RoleEndpoints>> {
    let m = ranks.launch_sequences();
    let mut sets: BTreeMap<(usize, u32), BTreeSet<RoleEndpoints>> = BTreeMap::new();
    for line in &m.communicators {
        let members: RoleEndpoints = line.members.iter().map(|(r, c)| (m.role_of[*r as usize], *c)).collect();
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

/// Advances a role by one op. Returns `false` at the end of its program, or while it waits for a
/// contribution of another role.
fn advance_role(
    ranks: &PhasePrograms<'_>,
    roles: &mut [RoleValues<'_>],
    lines: &BTreeMap<(usize, u32), Vec<RoleEndpoints>>,
    r: usize,
    out: &mut Diagnostics,
) -> bool {
    let p = roles[r].program;
    let i = roles[r].next_op;
    let Some(op) = p.ops.get(i) else { return false };
    // The collective that begins or ends at this op.
    let launched = match op.opcode {
        Opcode::Wait => op.operands.first().and_then(|t| roles[r].definitions[t.0 as usize]),
        _ => op.opcode.is_collective().then_some(i),
    };
    let Some(launched) = launched else {
        number_local_op(&mut roles[r], op, i);
        roles[r].next_op += 1;
        return true;
    };
    let Some(launch) = roles[r].launch_by_op.get(&launched).copied() else { return false };
    if roles[r].launches[launch].operand.is_none() {
        // Launches of one batch are in flight together.
        for mate in ranks.role_launches(r).batch_at(launch) {
            let brings = launch_op(&roles[r], mate).operands.first().map_or(0, |v| roles[r].value_number(*v));
            roles[r].launches[mate].operand = Some(brings);
        }
        check_equal_operands(ranks, roles, lines, (r, launch), out);
    }
    if !op.issue {
        let Some(number) = result_number(roles, lines, r, launch) else { return false };
        out.extend(find_divergent_receives(ranks, roles, lines, (r, launch)).filter(|_| out.is_empty()));
        set_results(&mut roles[r], op, number);
    }
    roles[r].next_op += 1;
    true
}

fn set_results(role: &mut RoleValues<'_>, op: &Op, number: ValueNumber) {
    for v in &op.results {
        role.numbers[v.0 as usize] = Some(number);
    }
}

/// Numbers the results of an op that involves only one rank.
fn number_local_op(role: &mut RoleValues<'_>, op: &Op, at: usize) {
    let made = number_of_op(role, op);
    match (op.opcode, op.buffer) {
        (Opcode::CacheWrite, Some(b)) => {
            let before = role.buffers[b.0 as usize].0;
            role.buffers[b.0 as usize] = (combine_numbers(&[before, made]), Some(at));
        }
        (_, Some(b)) => {
            let contents = role.buffers[b.0 as usize].0;
            set_results(role, op, combine_numbers(&[contents, made]));
        }
        _ => set_results(role, op, made),
    }
}

/// Combines op, name, attributes and operands into one number.
fn number_of_op(role: &RoleValues<'_>, op: &Op) -> ValueNumber {
    let mut parts = NumberInput::default();
    parts.add_part(op.opcode.name().as_bytes());
    parts.add_part(op.name.as_deref().unwrap_or_default().as_bytes());
    let whole = reads_whole_buffer(role, op);
    for (name, value) in op.attrs.iter().filter(|(n, _)| !PLACEMENT.contains(&n.as_str())) {
        // Skip attributes that are equal to their default.
        let idle = match name.as_str() {
            "unit" | "segments" => *value == Attr::Int(1),
            "first_row" => *value == Attr::Int(0),
            "row" | "rows" => whole,
            _ => false,
        };
        if idle {
            continue;
        }
        parts.add_part(name.as_bytes());
        match value {
            // `1` and `1.0` count as one number.
            Attr::Int(i) if i.unsigned_abs() < 1 << 53 => {
                parts.add_part(&(*i as f64).to_bits().to_le_bytes())
            }
            Attr::Int(i) => parts.add_part(&i.to_le_bytes()),
            Attr::Float(x) => parts.add_part(&x.to_bits().to_le_bytes()),
            Attr::Str(s) => parts.add_part(s.as_bytes()),
            Attr::Bool(b) => parts.add_part(&[u8::from(*b)]),
            Attr::Ints(list) => list.iter().for_each(|i| parts.add_part(&i.to_le_bytes())),
        }
    }
    if op.opcode.table_row().kind == OpKind::Source {
        // A source's number covers its sharding: a different layout is a different value.
        for (axis, v) in role.program.mesh.active_axes().flat_map(|a| op.results.iter().map(move |v| (a, v)))
        {
            let on = role.program.type_of(*v).layout.on_axis(axis);
            if on != AxisLayout::Replicated {
                parts.add_part(format!("{axis} {on}").as_bytes());
            }
        }
    }
    // The caller compares the operands of a collective, or combines them with those of the other
    // members.
    let given = if op.opcode.is_collective() { &[][..] } else { &op.operands[..] };
    let mut operands: Vec<ValueNumber> = given.iter().map(|v| role.value_number(*v)).collect();
    if op.opcode == Opcode::Add {
        operands.sort_unstable();
    }
    operands.iter().for_each(|n| parts.add_part(&n.to_le_bytes()));
    for (key, v) in &op.keyed {
        parts.add_part(key.as_bytes());
        parts.add_part(&role.value_number(*v).to_le_bytes());
    }
    parts.to_number()
}

/// Returns whether a read of a buffer covers all of its rows, explicitly or by default.
fn reads_whole_buffer(role: &RoleValues<'_>, op: &Op) -> bool {
    let rows = op.buffer.and_then(|b| role.program.buffer(b).ty.shape.first().copied());
    match views::CacheRead::new(op) {
        Ok(read) => read.row == 0 && rows.is_some() && read.rows.is_none_or(|n| Some(n) == rows),
        Err(_) => false,
    }
}

/// Attributes that determine where and how an op is launched, and do not affect its value.
const PLACEMENT: &[&str] = &["at", "batch", "graph", "part"];

/// The input of a number: a sequence of parts, each preceded by its length.
#[derive(Default)]
struct NumberInput(Vec<u8>);

impl NumberInput {
    fn add_part(&mut self, part: &[u8]) {
        self.0.extend_from_slice(&(part.len() as u32).to_le_bytes());
        self.0.extend_from_slice(part);
    }

    fn to_number(&self) -> ValueNumber {
        xxh3_128(&self.0)
    }
}

/// Hashes several numbers, in order, to one number.
fn combine_numbers(numbers: &[ValueNumber]) -> ValueNumber {
    let mut parts = NumberInput::default();
    numbers.iter().for_each(|n| parts.add_part(&n.to_le_bytes()));
    parts.to_number()
}

/// Returns the operand's number of a member's n-th launch on a communicator.
fn operand_number(roles: &[RoleValues<'_>], member: (usize, Option<u32>), n: usize) -> Option<ValueNumber> {
    let role = &roles[member.0];
    role.launches[*role.launches_by_endpoint[member.1? as usize].get(n)?].operand
}

/// Returns the number of a launch's result, or `None` while a member on which it depends has not
/// issued its launch.
fn result_number(
    roles: &[RoleValues<'_>],
    lines: &BTreeMap<(usize, u32), Vec<RoleEndpoints>>,
    r: usize,
    launch: usize,
) -> Option<ValueNumber> {
    let NumberedLaunch { endpoint: channel, position: n, operand: own, .. } = roles[r].launches[launch];
    let op = launch_op(&roles[r], launch);
    let peer_lists = lines.get(&(r, channel)).map_or(&[][..], Vec::as_slice);
    let from = match op.opcode {
        Opcode::Recv => 0,
        Opcode::Broadcast => usize::try_from(views::Broadcast::new(op).ok()?.root).ok()?,
        // Over tp all members contribute equal operands, which the check has compared.
        _ if is_over_tp(op) => return Some(combine_numbers(&[own?, number_of_op(&roles[r], op)])),
        _ => {
            // Over other axes each member contributes its own operand, and the result depends on
            // all of them in order of position.
            let made = number_of_op(&roles[r], op);
            let whole = |members: &RoleEndpoints| -> Option<ValueNumber> {
                let all: Option<Vec<ValueNumber>> =
                    members.iter().map(|m| operand_number(roles, *m, n)).collect();
                Some(combine_numbers(&[combine_numbers(&all?), made]))
            };
            return combine_distinct(peer_lists.iter().map(whole));
        }
    };
    // The result is the value of the sender or root.
    combine_distinct(peer_lists.iter().map(|members| operand_number(roles, *members.get(from)?, n)))
}

/// Returns the number that all ranks of a role share. If they have several, it returns one combined
/// number, so that the role differs from a role whose ranks have others. Returns `None` while one
/// is missing.
fn combine_distinct(numbers: impl Iterator<Item = Option<ValueNumber>>) -> Option<ValueNumber> {
    let all: BTreeSet<ValueNumber> = numbers.collect::<Option<_>>()?;
    match all.first() {
        Some(one) if all.len() == 1 => Some(*one),
        Some(_) => Some(combine_numbers(&all.into_iter().collect::<Vec<_>>())),
        None => None,
    }
}

fn is_over_tp(op: &Op) -> bool {
    matches!(op.comm_group(), Some(Group::Axis { axis: Axis::Tp, .. }))
}

fn launch_op<'a>(role: &RoleValues<'a>, launch: usize) -> &'a Op {
    &role.program.ops[role.launches[launch].op]
}

/// Finds two ranks of one role and one group of tp that receive different values.
fn find_divergent_receives(
    ranks: &PhasePrograms<'_>,
    roles: &[RoleValues<'_>],
    lines: &BTreeMap<(usize, u32), Vec<RoleEndpoints>>,
    (r, launch): (usize, usize),
) -> Option<Diagnostic> {
    let givers = lines.get(&(r, roles[r].launches[launch].endpoint)).map_or(0, Vec::len);
    if givers < 2 || launch_op(&roles[r], launch).opcode != Opcode::Recv {
        return None;
    }
    let (NumberedLaunch { endpoint: channel, position: n, op, .. }, m) =
        (&roles[r].launches[launch], ranks.launch_sequences());
    let mut first: BTreeMap<u32, (Rank, ValueNumber, (usize, usize))> = BTreeMap::new();
    for line in m.communicators.iter().filter(|l| l.is_pair) {
        let [from, to] = line.members[..] else { continue };
        let role = m.role_of[from.0 as usize];
        let rank = Rank(to.0);
        if m.role_of[to.0 as usize] != r || to.1 != Some(*channel) || !ranks.mesh.contains(rank) {
            continue;
        }
        let number = operand_number(roles, (role, from.1), *n)?;
        let sent = *roles[role].launches_by_endpoint.get(from.1? as usize)?.get(*n)?;
        let group = ranks.mesh.rank_at(ranks.mesh.coord_of(rank).with_axis(Axis::Tp, 0)).0;
        let (other, theirs, there) = *first.entry(group).or_insert((rank, number, (role, sent)));
        if theirs != number {
            let message =
                format!("{} of one tp group receive different values", display::list_ranks(&[other, rank]));
            let d = display::with_op_label(
                Diagnostic::error(&T0343, message),
                roles[r].program,
                *op,
                "received here",
            );
            let (a, b) = (launch_op(&roles[there.0], there.1), launch_op(&roles[role], sent));
            return Some(match (a.operands.first(), b.operands.first()) {
                (Some(x), Some(y)) => label_first_difference(d, &roles[there.0], *x, &roles[role], *y),
                _ => d,
            });
        }
    }
    None
}

/// Compares the operand of a role's launch with the operands of the other members.
fn check_equal_operands(
    ranks: &PhasePrograms<'_>,
    roles: &[RoleValues<'_>],
    lines: &BTreeMap<(usize, u32), Vec<RoleEndpoints>>,
    (r, launch): (usize, usize),
    out: &mut Diagnostics,
) {
    let op = launch_op(&roles[r], launch);
    if !is_over_tp(op)
        || matches!(op.opcode, Opcode::Broadcast | Opcode::Send | Opcode::Recv)
        || !out.is_empty()
    {
        return;
    }
    let NumberedLaunch { endpoint: channel, position: n, operand: own, .. } = roles[r].launches[launch];
    let peer_lists = lines.get(&(r, channel)).map_or(&[][..], Vec::as_slice);
    let other = peer_lists.iter().flatten().find(|m| {
        let theirs = operand_number(roles, **m, n);
        theirs.is_some() && theirs != own
    });
    let Some((other, Some(c))) = other else { return };
    let theirs = roles[*other].launches_by_endpoint[*c as usize][n];
    let (a, b) = (launch_op(&roles[*other], theirs), op);
    let Some((x, y)) = a.operands.first().zip(b.operands.first()) else { return };
    let message = format!(
        "{} and {} pass different values to {}",
        ranks.list_role_ranks(*other),
        ranks.list_role_ranks(r),
        ranks.launch_summary(r, launch)
    );
    let d = Diagnostic::error(&T0343, message);
    out.push(label_first_difference(d, &roles[*other], *x, &roles[r], *y));
}

/// Adds labels at the first two ops in which the histories of two values differ.
fn label_first_difference(
    d: Diagnostic,
    a: &RoleValues<'_>,
    mut x: ValueId,
    b: &RoleValues<'_>,
    mut y: ValueId,
) -> Diagnostic {
    while let (Some(i), Some(j)) = (a.definitions[x.0 as usize], b.definitions[y.0 as usize]) {
        let (f, g) = (&a.program.ops[i], &b.program.ops[j]);
        let operands =
            |o: &Op| o.operands.iter().copied().chain(o.keyed.iter().map(|(_, v)| *v)).collect::<Vec<_>>();
        let pairs = operands(f).into_iter().zip(operands(g));
        let alike = f.opcode == g.opcode && f.name == g.name && f.operands.len() == g.operands.len();
        let deeper = pairs.into_iter().find(|(v, w)| {
            let token = a.program.type_of(*v).is_token() || b.program.type_of(*w).is_token();
            !token && a.numbers[v.0 as usize] != b.numbers[w.0 as usize]
        });
        match deeper {
            Some((v, w)) if alike => (x, y) = (v, w),
            _ => {
                let d = display::with_op_label(
                    d,
                    a.program,
                    i,
                    format!(
                        "one side computes {}: {}",
                        display::value_name(a.program, x),
                        display::describe_op(a.program, i)
                    ),
                );
                return display::with_op_label(
                    d,
                    b.program,
                    j,
                    format!(
                        "the other side computes {}: {}",
                        display::value_name(b.program, y),
                        display::describe_op(b.program, j)
                    ),
                );
            }
        }
    }
    d
}

/// Checks that all roles of a replica compute the same value for an output of one name, and leave
/// the same contents in a buffer of one name.
fn check_outputs_and_buffers(roles: &[RoleValues<'_>], replicas: &RoleReplicas) -> Diagnostics {
    let mut out = Vec::new();
    let mut outputs: FirstByReplica<'_, &str, (usize, ValueId)> = FirstByReplica::new(replicas);
    let mut buffers: FirstByReplica<'_, &str, (usize, usize, ValueNumber)> = FirstByReplica::new(replicas);
    for (r, role) in roles.iter().enumerate() {
        for op in role.program.ops.iter().filter(|o| o.opcode == Opcode::Output) {
            let (Some(name), Some(v)) = (op.name.as_deref(), op.operands.first()) else { continue };
            let others = outputs.insert_and_get_earlier(r, name, (r, *v));
            if let Some((q, w)) = others
                .into_iter()
                .find(|(q, w)| *q != r && roles[*q].value_number(*w) != role.value_number(*v))
            {
                let d = Diagnostic::error(&T0343, format!("two roles output different values as \"{name}\""));
                out.push(label_first_difference(d, &roles[q], w, role, *v));
            }
        }
        for (b, (contents, written)) in role.program.buffers.iter().zip(&role.buffers) {
            let Some(at) = *written else { continue };
            let others = buffers.insert_and_get_earlier(r, &b.name, (r, at, *contents));
            let Some((q, first, _)) = others.into_iter().find(|o| o.2 != *contents) else { continue };
            let message = format!("two roles leave different contents in buffer @{}", b.name);
            let d = Diagnostic::error(&T0343, message);
            let values =
                (roles[q].program.ops[first].operands.first(), role.program.ops[at].operands.first());
            out.push(match values {
                (Some(x), Some(y)) if roles[q].value_number(*x) != role.value_number(*y) => {
                    label_first_difference(d, &roles[q], *x, role, *y)
                }
                _ => {
                    let d = display::with_op_label(d, roles[q].program, first, "the last write of one role");
                    display::with_op_label(d, role.program, at, "the last write of the other role")
                }
            });
        }
    }
    out
}
