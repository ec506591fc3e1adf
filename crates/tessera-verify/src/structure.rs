//! Whether a program is one at all: ids in range, arity as in the op table, values defined once and in order,
//! numbers small enough to compute with. Every other check leans on this one and may index freely.

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::rules::T0215;
use tessera_ir::{Attr, Dialect, HINTS, Kind, Op, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh};

use crate::graph::T0335;
use crate::say;

/// A value read before it exists.
pub static T0319: Code = Code {
    id: "T0319",
    title: "value used before its definition",
    page: "Ops run in program order on each stream, so an op can only read what an earlier op defined. The message \
names the reader and, where there is one, the later op that defines the value.\n\n\
Move the definition up or the use down. In a plan that Tessera lowered this is a defect of the lowering.",
};
/// A value defined by two ops.
pub static T0320: Code = Code {
    id: "T0320",
    title: "value defined twice",
    page: "Every value has exactly one definition (static single assignment). With two, readers, streams and memory \
slots could disagree about which one is meant, and ranks could too.\n\nGive the second result its own name.",
};
/// Not a well-formed program.
pub static T0322: Code = Code {
    id: "T0322",
    title: "program is malformed",
    page: "The program breaks the form that everything else relies on: an id out of range, a number of operands or \
results that the op table does not have, an unknown constant, a name with characters that the text form \
cannot carry, or an extent too large to compute with (2^46 elements of one tensor).\n\n\
The parser and the builder cannot make such a program; a damaged file or a peer of another version can. Nothing \
else about the program is checked until this is right.",
};

/// Most streams of a program. A device offers a handful; more is taken for a slip.
const STREAMS_MAX: usize = 64;
/// Most elements of one tensor, so that bytes and products of extents stay below 2^63.
const ELEMENTS_MAX: u64 = 1 << 46;

/// Everything that is wrong with the form of a program.
pub(crate) fn check(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    header(p, &mut out);
    let mut next = 0usize;
    for (i, op) in p.ops.iter().enumerate() {
        if let Err(why) = form(p, op) {
            out.push(malformed(p, i, why));
        }
        if let Some(a) = missing_constant(op) {
            out.push(say::refuse(&T0215, p, i, format!("{} needs the constant `{a}`", op.opcode.name())));
        }
        if op.attrs.iter().any(|(k, v)| k == "graph" && !matches!(v, Attr::Str(g) if !g.is_empty())) {
            out.push(say::refuse(&T0335, p, i, "`graph` is the name of a graph, in quotes"));
        }
        for v in op.uses() {
            if v.0 as usize >= next {
                out.push(undefined(p, i, v));
            }
        }
        for r in &op.results {
            let at = r.0 as usize;
            if at < next {
                out.push(twice(p, i, *r));
            } else if at > next || at >= p.values.len() {
                out.push(malformed(p, i, format!("result {at} stands where value {next} is due")));
                next = at.saturating_add(1);
            } else {
                next += 1;
            }
        }
    }
    if next < p.values.len() && out.is_empty() {
        out.push(
            Diagnostic::error(
                &T0322,
                format!("{} of {} values have no definition", p.values.len() - next, p.values.len()),
            )
            .at(say::title(p), say::value(p, ValueId(next as u32))),
        );
    }
    out
}

fn header(p: &Program, out: &mut Diagnostics) {
    let mut bad = |why: String| out.push(Diagnostic::error(&T0322, why).at(say::title(p), "its header"));
    let names = [&p.name].into_iter().chain(p.buffers.iter().map(|b| &b.name)).map(|n| (n, is_name(n)));
    let words = p.streams.iter().map(|s| (s, is_word(s)));
    for (name, _) in names.chain(words).chain([(&p.role, is_role(&p.role))]).filter(|(_, fits)| !fits) {
        bad(format!("the name {name:?} is empty or has characters that the text form cannot carry"));
    }
    if p.streams.is_empty() || p.streams.len() > STREAMS_MAX {
        bad(format!("{} streams; between 1 and {STREAMS_MAX} are possible", p.streams.len()));
    }
    for (i, s) in p.streams.iter().enumerate() {
        if p.streams[..i].contains(s) {
            bad(format!("stream {s} is declared twice"));
        }
    }
    let mut buffers = std::collections::BTreeSet::new();
    for b in &p.buffers {
        if !buffers.insert(&b.name) {
            bad(format!("buffer @{} is declared twice", b.name));
        }
        if let Err(why) = type_form(&b.ty, &p.mesh) {
            bad(format!("buffer @{}: {why}", b.name));
        }
        if b.ty.is_token() {
            bad(format!("buffer @{} would hold {}s", b.name, b.ty.dtype));
        }
    }
    for axis in Axis::ALL {
        let at = tessera_ir::rules::role_coord(&p.role, axis);
        if at >= p.mesh.size(axis) {
            bad(format!(
                "role {} stands for position {at} of {axis}, which has {}",
                p.role,
                p.mesh.size(axis)
            ));
        }
    }
    let outside = p.mesh.outside();
    if let Some(at) = tessera_ir::rules::role_outside(&p.role).filter(|at| *at >= outside) {
        bad(format!("role {} stands for rank {at} of those outside the mesh, which are {outside}", p.role));
    }
    if p.dialect == Dialect::Logical && (p.mesh != Mesh::default() || !p.role.is_empty()) {
        bad("a logical program has neither role nor mesh".to_string());
    }
    if p.dialect == Dialect::Role && p.role.is_empty() {
        bad("a program of the tile dialect names no role".to_string());
    }
    for v in &p.values {
        if let Err(why) = type_form(&v.ty, &p.mesh) {
            bad(format!("%{}: {why}", v.name));
        }
    }
}

/// What may stand behind `@` in the text form.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// What may stand there without a sign in front.
fn is_word(name: &str) -> bool {
    is_name(name) && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// A word with coordinates; empty in a logical program.
fn is_role(name: &str) -> bool {
    let mut parts = name.split('@');
    parts.next().is_some_and(|first| first.is_empty() || is_word(first)) && parts.all(is_name)
}

fn type_form(t: &Type, mesh: &Mesh) -> Result<(), String> {
    if t.shape.contains(&0) {
        return Err(format!("{:?} has an empty dim", t.shape));
    }
    let elements = t.shape.iter().try_fold(1u64, |e, n| e.checked_mul(*n));
    if elements.is_none_or(|e| e > ELEMENTS_MAX) {
        return Err(format!("{:?} has more than {ELEMENTS_MAX} elements", t.shape));
    }
    // On an axis of one rank too: its text leaves the layout out, so that a cut there must come to nothing.
    for axis in Axis::ALL {
        if let Some(w) = t.layout.on(axis).ways().filter(|w| !mesh.cuts(axis, *w)) {
            return Err(format!("blocks of {w} positions on {axis} of {}", mesh.size(axis)));
        }
        let AxisLayout::Shard(s) = t.layout.on(axis) else { continue };
        if s.dim >= t.shape.len() {
            return Err(format!("sharded over dim {} of {} dims", s.dim, t.shape.len()));
        }
        if let Some(u) = s.uneven
            && (mesh.size(axis) == 1
                || u.unit == 0
                || !u.extent.is_multiple_of(u.unit)
                || u.extent > ELEMENTS_MAX)
        {
            return Err(format!("an uneven dim of {} in units of {}", u.extent, u.unit));
        }
    }
    Ok(())
}

fn form(p: &Program, op: &Op) -> Result<(), String> {
    let row = op.opcode.row();
    let name = row.name;
    if op.stream.0 as usize >= p.streams.len() {
        return Err(format!("stream {} of {}", op.stream.0, p.streams.len()));
    }
    if let Some(b) = op.buffer
        && b.0 as usize >= p.buffers.len()
    {
        return Err(format!("buffer {} of {}", b.0, p.buffers.len()));
    }
    let (least, most) = row.operands;
    if op.operands.len() < least || op.operands.len() > most {
        return Err(format!("{name} takes {least} to {most} operands, has {}", op.operands.len()));
    }
    let results = match (op.opcode, op.issue) {
        (_, true) if row.kind != Kind::Collective => return Err(format!("{name} cannot be issued")),
        (_, true) => 1..=1,
        (Opcode::Wait, false) => 0..=1,
        _ => row.results..=row.results,
    };
    if !results.contains(&op.results.len()) {
        return Err(format!("{name} gives {} results, has {}", row.results, op.results.len()));
    }
    let takes_buffer = op.opcode.takes_buffer();
    if takes_buffer != op.buffer.is_some() {
        return Err(format!("{name} {} a buffer", if takes_buffer { "needs" } else { "does not take" }));
    }
    let takes_name = say::is_given(op) || op.opcode == Opcode::Output;
    match &op.name {
        Some(n) if takes_name && !n.is_empty() => {}
        None if !takes_name => {}
        n => return Err(format!("{name} with the name {n:?}")),
    }
    keys(op)?;
    constants(op)
}

fn keys(op: &Op) -> Result<(), String> {
    let row = op.opcode.row();
    let mut last = None;
    for (key, _) in &op.keyed {
        let at = row.keyed.iter().position(|k| stem(k) == *key);
        match at {
            None => return Err(format!("{} has no operand `{key}`", row.name)),
            Some(at) if last.is_some_and(|l| at <= l) => {
                return Err(format!("operand `{key}` of {} is repeated or out of order", row.name));
            }
            Some(at) => last = Some(at),
        }
    }
    let missing = row.keyed.iter().find(|k| !k.ends_with('?') && op.key(k).is_none());
    missing.map_or(Ok(()), |k| Err(format!("{} needs the operand `{k}`", row.name)))
}

fn constants(op: &Op) -> Result<(), String> {
    let row = op.opcode.row();
    let known = |a: &str| row.attrs.iter().any(|k| stem(k) == a) || HINTS.contains(&a);
    match op.attrs.keys().find(|a| !known(a)) {
        Some(a) => Err(format!("{} has no constant `{a}`", row.name)),
        None => Ok(()),
    }
}

/// A name of the op table without the mark of what may be absent.
fn stem(name: &'static str) -> &'static str {
    name.strip_suffix('?').unwrap_or(name)
}

/// A constant that the op table asks for and the op lacks.
fn missing_constant(op: &Op) -> Option<&'static str> {
    op.opcode.row().attrs.iter().copied().find(|a| !a.ends_with('?') && !op.attrs.contains_key(*a))
}

fn malformed(p: &Program, op: usize, why: String) -> Diagnostic {
    say::refuse(&T0322, p, op, why)
}

fn undefined(p: &Program, op: usize, v: ValueId) -> Diagnostic {
    let later = p.ops.iter().position(|o| o.results.contains(&v));
    let d = say::refuse(&T0319, p, op, format!("{} is used before it is defined", say::value(p, v)));
    match later {
        Some(l) => say::at_op(d, p, l, format!("defines {} only here", say::value(p, v))),
        None => d.note("no op defines it"),
    }
}

fn twice(p: &Program, op: usize, v: ValueId) -> Diagnostic {
    let first = p.ops.iter().position(|o| o.results.contains(&v)).unwrap_or(op);
    say::at_op(
        say::refuse(&T0320, p, op, format!("{} is defined a second time", say::value(p, v))),
        p,
        first,
        "the first definition",
    )
}
