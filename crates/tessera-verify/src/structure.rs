//! Checks that a program is well-formed: ids in range, arity as in the op table, values defined
//! once and in order, extents small enough to compute with. Every other check relies on this one
//! and may index freely.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::rules::T0215;
use tessera_ir::{Attr, Dialect, HINT_ATTRS, Op, OpKind, Opcode, Program, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh};

use crate::codes::{T0319, T0320, T0322, T0335};
use crate::display;

/// Maximum number of streams of a program. A device offers a handful; a larger number is treated as
/// an error.
const MAX_STREAMS: usize = 64;
/// Maximum number of elements of one tensor, so that byte counts and element counts stay below
/// 2^63.
const MAX_ELEMENTS: u64 = 1 << 46;

/// Returns an error for every way in which a program is not well-formed.
pub(crate) fn check(p: &Program) -> Diagnostics {
    let mut out = Vec::new();
    check_header(p, &mut out);
    let mut next = 0usize;
    for (i, op) in p.ops.iter().enumerate() {
        if let Err(why) = check_op(p, op) {
            out.push(malformed_op(p, i, why));
        }
        if let Some(a) = op.missing_attribute() {
            out.push(display::error_at_op(
                &T0215,
                p,
                i,
                format!("{} needs the attribute `{a}`", op.opcode.name()),
            ));
        }
        if op.attrs.iter().any(|(k, v)| k == "graph" && !matches!(v, Attr::Str(g) if !g.is_empty())) {
            out.push(display::error_at_op(&T0335, p, i, "`graph` must be the name of a graph, in quotes"));
        }
        for v in op.used_values() {
            if v.0 as usize >= next {
                out.push(undefined_value(p, i, v));
            }
        }
        for r in &op.results {
            let at = r.0 as usize;
            if at < next {
                out.push(redefined_value(p, i, *r));
            } else if at > next || at >= p.values.len() {
                out.push(malformed_op(p, i, format!("result has id {at}, expected id {next}")));
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
            .with_label(display::program_title(p), display::value_name(p, ValueId(next as u32))),
        );
    }
    out
}

fn check_header(p: &Program, out: &mut Diagnostics) {
    let mut bad = |why: String| {
        out.push(
            Diagnostic::error(&T0322, why)
                .with_label(display::program_title(p), "the header of this program"),
        )
    };
    let names = [&p.name].into_iter().chain(p.buffers.iter().map(|b| &b.name)).map(|n| (n, is_name(n)));
    let words = p.streams.iter().map(|s| (s, is_word(s)));
    for (name, _) in names.chain(words).chain([(&p.role, is_role(&p.role))]).filter(|(_, fits)| !fits) {
        bad(format!("the name {name:?} is empty or has characters that the text form cannot represent"));
    }
    if p.streams.is_empty() || p.streams.len() > MAX_STREAMS {
        bad(format!("{} streams; a program has between 1 and {MAX_STREAMS}", p.streams.len()));
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
        if let Err(why) = check_type(&b.ty, &p.mesh) {
            bad(format!("buffer @{}: {why}", b.name));
        }
        if b.ty.is_token() {
            bad(format!("buffer @{} would hold values of type {}", b.name, b.ty.dtype));
        }
    }
    for axis in Axis::ALL {
        let at = tessera_ir::rules::role_coord(&p.role, axis);
        if at >= p.mesh.axis_size(axis) {
            bad(format!(
                "role {} names position {at} of {axis}, which has {} positions",
                p.role,
                p.mesh.axis_size(axis)
            ));
        }
    }
    let outside = p.mesh.outside_count();
    if let Some(at) = tessera_ir::rules::role_outside(&p.role).filter(|at| *at >= outside) {
        bad(format!(
            "role {} names rank {at} outside the mesh, but the mesh has {outside} outside ranks",
            p.role
        ));
    }
    if p.dialect == Dialect::Logical && (p.mesh != Mesh::default() || !p.role.is_empty()) {
        bad("a logical program must have neither role nor mesh".to_string());
    }
    if p.dialect == Dialect::Role && p.role.is_empty() {
        bad("a program of the tile dialect must name a role".to_string());
    }
    for v in &p.values {
        if let Err(why) = check_type(&v.ty, &p.mesh) {
            bad(format!("%{}: {why}", v.name));
        }
    }
}

/// Returns whether the text form permits a name after `@`.
fn is_name(name: &str) -> bool {
    !name.is_empty() && name.chars().all(|c| c.is_ascii_alphanumeric() || "._-".contains(c))
}

/// Returns whether the text form permits a name without a sigil.
fn is_word(name: &str) -> bool {
    is_name(name) && name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
}

/// Returns whether a role name is a word with coordinates; it is empty in a logical program.
fn is_role(name: &str) -> bool {
    let mut parts = name.split('@');
    parts.next().is_some_and(|first| first.is_empty() || is_word(first)) && parts.all(is_name)
}

fn check_type(t: &Type, mesh: &Mesh) -> Result<(), String> {
    if t.shape.contains(&0) {
        return Err(format!("{:?} has an empty dim", t.shape));
    }
    let elements = t.shape.iter().try_fold(1u64, |e, n| e.checked_mul(*n));
    if elements.is_none_or(|e| e > MAX_ELEMENTS) {
        return Err(format!("{:?} has more than {MAX_ELEMENTS} elements", t.shape));
    }
    // Check axes of one rank too: the text form omits their layout, so a shard there must be
    // trivial.
    for axis in Axis::ALL {
        if let Some(w) = t.layout.on_axis(axis).subgroup_size().filter(|w| !mesh.has_subgroups(axis, *w)) {
            return Err(format!(
                "subgroups of {w} positions do not divide {axis} of size {}",
                mesh.axis_size(axis)
            ));
        }
        let AxisLayout::Shard(s) = t.layout.on_axis(axis) else { continue };
        if s.dim >= t.shape.len() {
            return Err(format!("sharded over dim {}, but the value has {} dims", s.dim, t.shape.len()));
        }
        if let Some(u) = s.uneven
            && (mesh.axis_size(axis) == 1
                || u.unit == 0
                || !u.extent.is_multiple_of(u.unit)
                || u.extent > MAX_ELEMENTS)
        {
            return Err(format!("invalid uneven shard: extent {} in units of {}", u.extent, u.unit));
        }
    }
    Ok(())
}

fn check_op(p: &Program, op: &Op) -> Result<(), String> {
    let row = op.opcode.table_row();
    let name = row.name;
    if op.stream.0 as usize >= p.streams.len() {
        return Err(format!("stream index {} is out of range: there are {}", op.stream.0, p.streams.len()));
    }
    if let Some(b) = op.buffer
        && b.0 as usize >= p.buffers.len()
    {
        return Err(format!("buffer index {} is out of range: there are {}", b.0, p.buffers.len()));
    }
    let (min_operands, max_operands) = row.operands;
    if op.operands.len() < min_operands || op.operands.len() > max_operands {
        return Err(format!(
            "{name} takes {min_operands} to {max_operands} operands, but has {}",
            op.operands.len()
        ));
    }
    let results = match (op.opcode, op.issue) {
        (_, true) if row.kind != OpKind::Collective => return Err(format!("{name} cannot be issued")),
        (_, true) => 1..=1,
        (Opcode::Wait, false) => 0..=1,
        _ => row.results..=row.results,
    };
    if !results.contains(&op.results.len()) {
        return Err(format!("{name} returns {} results, but has {}", row.results, op.results.len()));
    }
    let takes_buffer = op.opcode.takes_buffer();
    if takes_buffer != op.buffer.is_some() {
        return Err(format!("{name} {} a buffer", if takes_buffer { "needs" } else { "does not take" }));
    }
    let takes_name = op.is_source() || op.opcode == Opcode::Output;
    match &op.name {
        Some(n) if takes_name && !n.is_empty() => {}
        None if !takes_name => {}
        n => return Err(format!("{name} cannot have the name {n:?}")),
    }
    check_keys(op)?;
    check_attributes(op)
}

fn check_keys(op: &Op) -> Result<(), String> {
    let row = op.opcode.table_row();
    let mut last = None;
    for (key, _) in &op.keyed {
        match row.keyed_position(key) {
            None => return Err(format!("{} has no operand `{key}`", row.name)),
            Some(at) if last.is_some_and(|l| at <= l) => {
                return Err(format!("operand `{key}` of {} is repeated or out of order", row.name));
            }
            Some(at) => last = Some(at),
        }
    }
    let has = |name: &str| op.keyed.iter().any(|(k, _)| *k == name);
    let missing = row.keyed.iter().find(|k| !k.optional && !has(k.name));
    missing.map_or(Ok(()), |k| Err(format!("{} needs the operand `{}`", row.name, k.name)))
}

fn check_attributes(op: &Op) -> Result<(), String> {
    let row = op.opcode.table_row();
    let known = |a: &str| row.find_attr(a).is_some() || HINT_ATTRS.contains(&a);
    match op.attrs.keys().find(|a| !known(a)) {
        Some(a) => Err(format!("{} has no attribute `{a}`", row.name)),
        None => Ok(()),
    }
}

fn malformed_op(p: &Program, op: usize, why: String) -> Diagnostic {
    display::error_at_op(&T0322, p, op, why)
}

fn undefined_value(p: &Program, op: usize, v: ValueId) -> Diagnostic {
    let later = p.ops.iter().position(|o| o.results.contains(&v));
    let d = display::error_at_op(
        &T0319,
        p,
        op,
        format!("{} is used before it is defined", display::value_name(p, v)),
    );
    match later {
        Some(l) => {
            display::with_op_label(d, p, l, format!("{} is defined only here", display::value_name(p, v)))
        }
        None => d.with_note("no op defines it"),
    }
}

fn redefined_value(p: &Program, op: usize, v: ValueId) -> Diagnostic {
    let first = p.ops.iter().position(|o| o.results.contains(&v)).unwrap_or(op);
    display::with_op_label(
        display::error_at_op(
            &T0320,
            p,
            op,
            format!("{} is defined a second time", display::value_name(p, v)),
        ),
        p,
        first,
        "the first definition",
    )
}
