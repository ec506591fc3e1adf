//! Edits that turn a good plan into almost any other value of its type.

use tessera_ir::{
    Attr, BufferId, Bundle, DType, Dialect, HINTS, Op, Opcode, Program, StreamId, TABLE, Type, ValueId,
};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Rank, RankMap, Reduction, Shard, Uneven};

use super::choices::Choices;

const NAMES: [&str; 10] =
    ["", "a", "stage0", "stage0@tp1", "r@out0", "r@tp99999999999", "x y", "é", "g\"\n", "compute"];
const DTYPES: [DType; 8] =
    [DType::F32, DType::F64, DType::Bf16, DType::F16, DType::E4m3, DType::I64, DType::Ticket, DType::Event];
/// Programs do not grow beyond this many ops, streams, buffers or roles.
const MOST: usize = 200;

/// One edit of a plan.
pub(super) fn bundle(b: &mut Bundle, c: &mut Choices<'_>, donors: &[Program]) {
    match c.below(24) {
        0 => {
            if let Some(m) = mesh(c) {
                b.mesh = m;
                // Alone, it is noticed at once.
                if c.flag() {
                    b.phases.iter_mut().flat_map(|p| &mut p.programs).for_each(|p| p.mesh = m);
                    b.rank_map = RankMap::logical(&m, "cpu");
                    let names: Vec<String> = b.roles.iter().map(|r| r.role.clone()).collect();
                    let names: Vec<&str> = names.iter().map(String::as_str).collect();
                    b.roles = tessera_ir::RoleRanks::by_name(&m, &names);
                }
            }
        }
        1 => {
            let n = b.roles.len();
            if let Some(role) = b.roles.get_mut(c.below(n)) {
                match c.below(4) {
                    0 => role.ranks.push(Rank(c.number() as u32)),
                    1 => drop(role.ranks.pop()),
                    2 => role.ranks.reverse(),
                    _ => role.role = name(c),
                }
            }
        }
        2 => {
            let n = b.phases.len();
            let Some(phase) = b.phases.get_mut(c.below(n)) else { return };
            let n = phase.memory.len();
            let Some(slots) = phase.memory.get_mut(c.below(n)) else { return };
            let (of, bytes) = (slots.of.len(), slots.bytes.len());
            match c.below(4) {
                0 => drop(slots.bytes.get_mut(c.below(bytes)).map(|n| *n = c.number())),
                1 => drop(slots.of.get_mut(c.below(of)).map(|s| *s = c.flag().then(|| c.index(bytes)))),
                2 => drop(slots.of.pop()),
                _ => slots.of.push(Some(c.index(bytes))),
            }
        }
        3 => {
            let names: Vec<String> = b.phases.iter().map(|p| p.name.clone()).collect();
            let listed = if c.flag() { name(c) } else { c.pick(&names).cloned().unwrap_or_default() };
            b.calls.push((name(c), vec![listed]));
        }
        4 if b.phases.len() < 4 => {
            let n = b.phases.len();
            if let Some(mut phase) = b.phases.get(c.below(n)).cloned() {
                phase.name = name(c);
                if c.flag() {
                    phase.programs.iter_mut().for_each(|p| p.name.clone_from(&phase.name));
                }
                b.phases.push(phase);
            }
        }
        5 => drop(b.phases.iter_mut().next().and_then(|p| p.programs.pop())),
        // The same edit everywhere stays a plan more often.
        n => {
            let of_phase = c.below(b.phases.len());
            let Some(phase) = b.phases.get_mut(of_phase) else { return };
            let programs = phase.programs.len();
            let same = n % 2 == 0;
            let only = c.below(programs);
            let begun = c.clone();
            for (i, p) in phase.programs.iter_mut().enumerate() {
                if same || i == only {
                    *c = begun.clone();
                    program(p, c, donors);
                }
            }
            // Memory follows, or stays behind.
            if n % 3 != 0 {
                for (p, slots) in phase.programs.iter().zip(&mut phase.memory) {
                    slots.of.resize(p.values.len(), Some(slots.bytes.len() as u32));
                }
            }
        }
    }
}

/// One edit of a program.
pub(super) fn program(p: &mut Program, c: &mut Choices<'_>, donors: &[Program]) {
    let (values, ops) = (p.values.len(), p.ops.len());
    match c.below(24) {
        0 => {
            if let Some(m) = mesh(c) {
                p.mesh = m;
            }
        }
        1 => match c.below(6) {
            0 => p.name = name(c),
            1 => p.role = name(c),
            2 if p.streams.len() < MOST => p.streams.push(name(c)),
            3 => drop(p.streams.pop()),
            4 => p.dialect = if c.flag() { Dialect::Role } else { Dialect::Logical },
            _ => {
                let n = p.buffers.len();
                if let Some(buffer) = p.buffers.get_mut(c.below(n)) {
                    match c.flag() {
                        true => ty(&mut buffer.ty, c),
                        false => buffer.name = name(c),
                    }
                }
            }
        },
        2..=7 => {
            if let Some(v) = p.values.get_mut(c.below(values)) {
                ty(&mut v.ty, c);
            }
        }
        8 if ops < MOST => {
            // A copy with results of its own, somewhere.
            let from = c.below(ops);
            let Some(mut op) = p.ops.get(from).cloned() else { return };
            let at = c.below(ops + 1);
            if c.flag() {
                for r in &mut op.results {
                    let Some(v) = p.values.get(r.0 as usize).cloned() else { continue };
                    *r = ValueId(p.values.len() as u32);
                    p.values.push(v);
                }
            }
            p.ops.insert(at, op);
            renumber(p);
        }
        9 => {
            let (a, b) = (c.below(ops), c.below(ops));
            if ops > 0 {
                p.ops.swap(a, b);
            }
            if c.flag() {
                renumber(p);
            }
        }
        10 => {
            if ops > 0 {
                p.ops.remove(c.below(ops));
            }
        }
        11 if ops < MOST => {
            let donor = c.pick(donors);
            let taken = donor.and_then(|d| d.ops.get(c.below(d.ops.len())).map(|o| (d, o.clone())));
            if let Some((d, mut op)) = taken {
                for r in &mut op.results {
                    let Some(v) = d.values.get(r.0 as usize).cloned() else { continue };
                    *r = ValueId(p.values.len() as u32);
                    p.values.push(v);
                }
                op.stream = StreamId(c.index(p.streams.len()));
                op.operands.iter_mut().for_each(|v| *v = ValueId(c.index(values)));
                p.ops.insert(c.below(ops + 1), op);
                renumber(p);
            }
        }
        _ => {
            let (streams, buffers) = (p.streams.len(), p.buffers.len());
            if let Some(o) = p.ops.get_mut(c.below(ops)) {
                op(o, c, [values, streams, buffers]);
            }
        }
    }
}

/// Values in order of definition, as the judge asks for them.
fn renumber(p: &mut Program) {
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

fn op(o: &mut Op, c: &mut Choices<'_>, [values, streams, buffers]: [usize; 3]) {
    let row = o.opcode.row();
    match c.below(14) {
        0 => {
            let n = o.operands.len();
            if let Some(v) = o.operands.get_mut(c.below(n)) {
                *v = ValueId(c.index(values));
            }
        }
        1 => {
            let n = o.results.len();
            if let Some(v) = o.results.get_mut(c.below(n)) {
                *v = ValueId(c.index(values));
            }
        }
        2 => {
            let keys: Vec<&'static str> =
                TABLE.iter().flat_map(|r| r.keyed).map(|k| k.trim_end_matches('?')).collect();
            if let Some(k) = c.pick(&keys).filter(|_| o.keyed.len() < MOST) {
                o.keyed.push((k, ValueId(c.index(values))));
            }
        }
        3..=6 => {
            let mut known: Vec<&str> = row.attrs.iter().map(|a| a.trim_end_matches('?')).collect();
            known.extend(HINTS);
            known.extend(["axis", "ways", "graph", "batch", "odd"]);
            if let Some(k) = c.pick(&known) {
                let value = attr(c);
                o.attrs.insert((*k).to_string(), value);
            }
        }
        7 => {
            let key = o.attrs.keys().nth(c.below(o.attrs.len())).cloned();
            key.map(|k| o.attrs.remove(&k));
        }
        8 => o.stream = StreamId(c.index(streams)),
        9 if o.after.len() < MOST => o.after.push(ValueId(c.index(values))),
        10 => o.opcode = c.pick(TABLE).map_or(Opcode::Add, |r| r.opcode),
        11 => o.issue = !o.issue,
        12 => o.buffer = c.flag().then(|| BufferId(c.index(buffers))),
        _ => match c.below(4) {
            0 => o.name = c.flag().then(|| name(c)),
            1 => drop(o.operands.pop()),
            2 if o.operands.len() < MOST => o.operands.push(ValueId(c.index(values))),
            _ => drop(o.results.pop()),
        },
    }
}

fn attr(c: &mut Choices<'_>) -> Attr {
    const WORDS: [&str; 14] =
        ["tp", "ep", "pp", "dp", "world", "sum", "tree", "max", "silu", "gelu", "", "a b\"", "g", "h"];
    match c.below(8) {
        0..=2 => Attr::Int(c.number() as i64),
        3 => Attr::Float([0.0, -0.0, 1.5, f64::NAN, f64::INFINITY, 1e-300][c.below(6)]),
        4 | 5 => Attr::Str(WORDS[c.below(WORDS.len())].to_string()),
        6 => Attr::Ints((0..c.below(6)).map(|_| c.number() as i64).collect()),
        _ => Attr::Bool(c.flag()),
    }
}

fn name(c: &mut Choices<'_>) -> String {
    NAMES[c.below(NAMES.len())].to_string()
}

fn mesh(c: &mut Choices<'_>) -> Option<Mesh> {
    let mut size = || match c.byte() {
        0..=150 => 1,
        b @ 151..=250 => u32::from(b) % 5 + 1,
        b => [65_536, 256, 255, 72, 17][usize::from(b) % 5],
    };
    let sizes = [size(), size(), size(), size()];
    let outside = size() - 1;
    Mesh::new(sizes).and_then(|m| m.with_outside(outside)).ok()
}

fn ty(t: &mut Type, c: &mut Choices<'_>) {
    match c.below(6) {
        0 => t.dtype = DTYPES[c.below(8)],
        1 => {
            let n = t.shape.len();
            if let Some(e) = t.shape.get_mut(c.below(n)) {
                *e = c.number();
            }
        }
        2 if t.shape.len() < MOST => t.shape.push(c.number()),
        3 => drop(t.shape.pop()),
        _ => {
            let axis = Axis::ALL[c.below(4)];
            let dim = match c.byte() {
                255 => usize::MAX,
                b => usize::from(b) % 4,
            };
            let ways = if c.byte() > 200 { Some(c.number() as u32) } else { None };
            let on = match c.below(8) {
                0 | 1 => AxisLayout::Replicated,
                2 | 3 => AxisLayout::Shard(Shard { dim, uneven: None, ways }),
                4 | 5 => {
                    let uneven = Some(Uneven { extent: c.number(), unit: c.number() });
                    AxisLayout::Shard(Shard { dim, uneven, ways })
                }
                n => {
                    let reduction = if n == 6 { Reduction::Sum } else { Reduction::Max };
                    AxisLayout::Partial { reduction, ways }
                }
            };
            let before = if c.flag() { t.layout } else { Layout::REPLICATED };
            t.layout = before.with(axis, on);
        }
    }
}
