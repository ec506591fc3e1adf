//! Mutations that turn a valid plan into almost any other value of its type.

use tessera_ir::{
    Attr, BufferId, Bundle, DType, Dialect, HINT_ATTRS, OP_TABLE, Op, Opcode, Program, StreamId, Type,
    ValueId,
};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Rank, RankMap, Reduction, Shard, Uneven};

use super::fuzz_input::FuzzInput;

const NAMES: [&str; 10] =
    ["", "a", "stage0", "stage0@tp1", "r@out0", "r@tp99999999999", "x y", "é", "g\"\n", "compute"];
const DTYPES: [DType; 8] =
    [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::E4m3, DType::I64, DType::Ticket, DType::Event];
/// Maximum number of ops, streams, buffers or roles to which mutations grow a program.
const MAX_ITEMS: usize = 200;

/// Applies one mutation to a plan.
pub(super) fn mutate_bundle(b: &mut Bundle, c: &mut FuzzInput<'_>, donors: &[Program]) {
    match c.next_below(24) {
        0 => {
            if let Some(m) = random_mesh(c) {
                b.mesh = m;
                // The verifier rejects a changed mesh at once unless its users follow.
                if c.next_flag() {
                    b.phases.iter_mut().flat_map(|p| &mut p.programs).for_each(|p| p.mesh = m);
                    b.rank_map = RankMap::from_device_kind(&m, "cpu");
                    let names: Vec<String> = b.roles.iter().map(|r| r.role.clone()).collect();
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    b.roles = tessera_ir::RoleRanks::assign_by_name(&m, &names);
                }
            }
        }
        1 => {
            let n = b.roles.len();
            if let Some(role) = b.roles.get_mut(c.next_below(n)) {
                match c.next_below(4) {
                    0 => role.ranks.push(Rank(c.next_number() as u32)),
                    1 => drop(role.ranks.pop()),
                    2 => role.ranks.reverse(),
                    _ => role.role = random_name(c),
                }
            }
        }
        2 => {
            let n = b.phases.len();
            let Some(phase) = b.phases.get_mut(c.next_below(n)) else { return };
            let n = phase.slots.len();
            let Some(slots) = phase.slots.get_mut(c.next_below(n)) else { return };
            let (of, bytes) = (slots.value_slots.len(), slots.slot_bytes.len());
            match c.next_below(4) {
                0 => drop(slots.slot_bytes.get_mut(c.next_below(bytes)).map(|n| *n = c.next_number())),
                1 => drop(
                    slots
                        .value_slots
                        .get_mut(c.next_below(of))
                        .map(|s| *s = c.next_flag().then(|| c.next_index(bytes))),
                ),
                2 => drop(slots.value_slots.pop()),
                _ => slots.value_slots.push(Some(c.next_index(bytes))),
            }
        }
        3 => {
            let names: Vec<String> = b.phases.iter().map(|p| p.name.clone()).collect();
            let listed =
                if c.next_flag() { random_name(c) } else { c.pick_from(&names).cloned().unwrap_or_default() };
            b.calls.push((random_name(c), vec![listed]));
        }
        4 if b.phases.len() < 4 => {
            let n = b.phases.len();
            if let Some(mut phase) = b.phases.get(c.next_below(n)).cloned() {
                phase.name = random_name(c);
                if c.next_flag() {
                    phase.programs.iter_mut().for_each(|p| p.name.clone_from(&phase.name));
                }
                b.phases.push(phase);
            }
        }
        5 => drop(b.phases.iter_mut().next().and_then(|p| p.programs.pop())),
        // A plan stays valid more often if every program gets the same mutation.
        n => {
            let of_phase = c.next_below(b.phases.len());
            let Some(phase) = b.phases.get_mut(of_phase) else { return };
            let programs = phase.programs.len();
            let in_all_programs = n % 2 == 0;
            let only = c.next_below(programs);
            let saved_choices = c.clone();
            for (i, p) in phase.programs.iter_mut().enumerate() {
                if in_all_programs || i == only {
                    *c = saved_choices.clone();
                    mutate_program(p, c, donors);
                }
            }
            // Resize the slot table with the values, or leave it stale.
            if n % 3 != 0 {
                for (p, slots) in phase.programs.iter().zip(&mut phase.slots) {
                    slots.value_slots.resize(p.values.len(), Some(slots.slot_bytes.len() as u32));
                }
            }
        }
    }
}

/// Applies one mutation to a program: to its header, buffers, value types or ops. `donors` supply
/// ops of other programs.
pub(super) fn mutate_program(p: &mut Program, c: &mut FuzzInput<'_>, donors: &[Program]) {
    let (values, ops) = (p.values.len(), p.ops.len());
    match c.next_below(24) {
        0 => {
            if let Some(m) = random_mesh(c) {
                p.mesh = m;
            }
        }
        1 => match c.next_below(6) {
            0 => p.name = random_name(c),
            1 => p.role = random_name(c),
            2 if p.streams.len() < MAX_ITEMS => p.streams.push(random_name(c)),
            3 => drop(p.streams.pop()),
            4 => p.dialect = if c.next_flag() { Dialect::Role } else { Dialect::Logical },
            _ => {
                let n = p.buffers.len();
                if let Some(buffer) = p.buffers.get_mut(c.next_below(n)) {
                    match c.next_flag() {
                        true => mutate_type(&mut buffer.ty, c),
                        false => buffer.name = random_name(c),
                    }
                }
            }
        },
        2..=7 => {
            if let Some(v) = p.values.get_mut(c.next_below(values)) {
                mutate_type(&mut v.ty, c);
            }
        }
        8 if ops < MAX_ITEMS => {
            // Insert a copy of an op, possibly with new results, at any position.
            let from = c.next_below(ops);
            let Some(mut op) = p.ops.get(from).cloned() else { return };
            let at = c.next_below(ops + 1);
            if c.next_flag() {
                for r in &mut op.results {
                    let Some(v) = p.values.get(r.0 as usize).cloned() else { continue };
                    *r = ValueId(p.values.len() as u32);
                    p.values.push(v);
                }
            }
            p.ops.insert(at, op);
            renumber_values(p);
        }
        9 => {
            let (a, b) = (c.next_below(ops), c.next_below(ops));
            if ops > 0 {
                p.ops.swap(a, b);
            }
            if c.next_flag() {
                renumber_values(p);
            }
        }
        10 => {
            if ops > 0 {
                p.ops.remove(c.next_below(ops));
            }
        }
        11 if ops < MAX_ITEMS => {
            let donor = c.pick_from(donors);
            let taken = donor.and_then(|d| d.ops.get(c.next_below(d.ops.len())).map(|o| (d, o.clone())));
            if let Some((d, mut op)) = taken {
                for r in &mut op.results {
                    let Some(v) = d.values.get(r.0 as usize).cloned() else { continue };
                    *r = ValueId(p.values.len() as u32);
                    p.values.push(v);
                }
                op.stream = StreamId(c.next_index(p.streams.len()));
                op.operands.iter_mut().for_each(|v| *v = ValueId(c.next_index(values)));
                p.ops.insert(c.next_below(ops + 1), op);
                renumber_values(p);
            }
        }
        _ => {
            let (streams, buffers) = (p.streams.len(), p.buffers.len());
            if let Some(o) = p.ops.get_mut(c.next_below(ops)) {
                mutate_op(o, c, [values, streams, buffers]);
            }
        }
    }
}

/// Renumbers values in order of definition, as the verifier requires.
fn renumber_values(p: &mut Program) {
    let mut new: Vec<Option<u32>> = vec![None; p.values.len()];
    let mut values = Vec::new();
    for r in p.ops.iter().flat_map(|o| &o.results) {
        if let Some(slot @ None) = new.get_mut(r.0 as usize) {
            *slot = Some(values.len() as u32);
            values.push(p.values[r.0 as usize].clone());
        }
    }
    let map = |v: &mut ValueId| {
        if let Some(Some(n)) = new.get(v.0 as usize) {
            *v = ValueId(*n);
        }
    };
    for o in &mut p.ops {
        let keyed = o.keyed.iter_mut().map(|(_, v)| v);
        o.operands.iter_mut().chain(keyed).chain(&mut o.after).chain(&mut o.results).for_each(map);
    }
    p.values = values;
}

fn mutate_op(o: &mut Op, c: &mut FuzzInput<'_>, [values, streams, buffers]: [usize; 3]) {
    let row = o.opcode.table_row();
    match c.next_below(14) {
        0 => {
            let n = o.operands.len();
            if let Some(v) = o.operands.get_mut(c.next_below(n)) {
                *v = ValueId(c.next_index(values));
            }
        }
        1 => {
            let n = o.results.len();
            if let Some(v) = o.results.get_mut(c.next_below(n)) {
                *v = ValueId(c.next_index(values));
            }
        }
        2 => {
            let keys: Vec<&'static str> = OP_TABLE.iter().flat_map(|r| r.keyed).map(|k| k.name).collect();
            if let Some(k) = c.pick_from(&keys).filter(|_| o.keyed.len() < MAX_ITEMS) {
                o.keyed.push((k, ValueId(c.next_index(values))));
            }
        }
        3..=6 => {
            let mut known: Vec<&str> = row.attrs.iter().map(|a| a.name).collect();
            known.extend(HINT_ATTRS);
            known.extend(["axis", "group_size", "graph", "batch", "odd"]);
            if let Some(k) = c.pick_from(&known) {
                let value = random_attr(c);
                o.attrs.insert((*k).to_string(), value);
            }
        }
        7 => {
            let key = o.attrs.keys().nth(c.next_below(o.attrs.len())).cloned();
            key.map(|k| o.attrs.remove(&k));
        }
        8 => o.stream = StreamId(c.next_index(streams)),
        9 if o.after.len() < MAX_ITEMS => o.after.push(ValueId(c.next_index(values))),
        10 => o.opcode = c.pick_from(OP_TABLE).map_or(Opcode::Add, |r| r.opcode),
        11 => o.issue = !o.issue,
        12 => o.buffer = c.next_flag().then(|| BufferId(c.next_index(buffers))),
        _ => match c.next_below(4) {
            0 => o.name = c.next_flag().then(|| random_name(c)),
            1 => drop(o.operands.pop()),
            2 if o.operands.len() < MAX_ITEMS => o.operands.push(ValueId(c.next_index(values))),
            _ => drop(o.results.pop()),
        },
    }
}

fn random_attr(c: &mut FuzzInput<'_>) -> Attr {
    const WORDS: [&str; 14] =
        ["tp", "ep", "pp", "dp", "world", "sum", "tree", "max", "silu", "gelu", "", "a b\"", "g", "h"];
    match c.next_below(8) {
        0..=2 => Attr::Int(c.next_number() as i64),
        3 => Attr::Float([0.0, -0.0, 1.5, f64::NAN, f64::INFINITY, 1e-300][c.next_below(6)]),
        4 | 5 => Attr::Str(WORDS[c.next_below(WORDS.len())].to_string()),
        6 => Attr::Ints((0..c.next_below(6)).map(|_| c.next_number() as i64).collect()),
        _ => Attr::Bool(c.next_flag()),
    }
}

fn random_name(c: &mut FuzzInput<'_>) -> String {
    NAMES[c.next_below(NAMES.len())].to_string()
}

fn random_mesh(c: &mut FuzzInput<'_>) -> Option<Mesh> {
    let mut size = || match c.next_byte() {
        0..=150 => 1,
        b @ 151..=250 => u32::from(b) % 5 + 1,
        b => [65_536, 256, 255, 72, 17][usize::from(b) % 5],
    };
    let sizes = [size(), size(), size(), size()];
    let outside = size() - 1;
    Mesh::new(sizes).and_then(|m| m.with_outside(outside)).ok()
}

fn mutate_type(t: &mut Type, c: &mut FuzzInput<'_>) {
    match c.next_below(6) {
        0 => t.dtype = DTYPES[c.next_below(8)],
        1 => {
            let n = t.shape.len();
            if let Some(e) = t.shape.get_mut(c.next_below(n)) {
                *e = c.next_number();
            }
        }
        2 if t.shape.len() < MAX_ITEMS => t.shape.push(c.next_number()),
        3 => drop(t.shape.pop()),
        _ => {
            let axis = Axis::ALL[c.next_below(4)];
            let dim = match c.next_byte() {
                255 => usize::MAX,
                b => usize::from(b) % 4,
            };
            let subgroup_size = if c.next_byte() > 200 { Some(c.next_number() as u32) } else { None };
            let on = match c.next_below(8) {
                0 | 1 => AxisLayout::Replicated,
                2 | 3 => AxisLayout::Shard(Shard { dim, uneven: None, subgroup_size }),
                4 | 5 => {
                    let uneven = Some(Uneven { extent: c.next_number(), unit: c.next_number() });
                    AxisLayout::Shard(Shard { dim, uneven, subgroup_size })
                }
                n => {
                    let reduction = if n == 6 { Reduction::Sum } else { Reduction::Max };
                    AxisLayout::Partial { reduction, subgroup_size }
                }
            };
            let before = if c.next_flag() { t.layout } else { Layout::REPLICATED };
            t.layout = before.with_axis(axis, on);
        }
    }
}
