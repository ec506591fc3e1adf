//! Lowers array programs: logical programs whose sources and outputs have stated layouts.
//!
//! [`crate::lower()`] knows the structure of a model and shards it by a strategy. Here the layouts of
//! the sources decide: an op runs in the layouts of its operands if its sharding rule accepts them,
//! and otherwise in those that the fewest bytes lead to. See note 28 of the design notes.

mod choice;
mod coordinates;
mod emission;
mod redistribution;
mod segments;
mod steps;
mod stream_overlap;
mod token_groups;

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics, closest_name, format_choices};
use tessera_ir::rules::RuleError;
use tessera_ir::{Bundle, Dialect, Opcode, Phase, Program, ValueId};
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, RankMap, Shard};

use crate::codes::{T0614, T0615};
use crate::mapping::Numerics;
use crate::memory;
pub use redistribution::emit_redistribution;
use steps::{is_scale_of_rows, named_ops, on_active_axes, program_diagnostic};
pub use stream_overlap::StreamOverlap;

/// A logical program whose sources arrive in stated layouts.
#[derive(Debug, Clone)]
pub struct LaidOutProgram {
    /// The logical program.
    pub program: Program,
    /// Layouts by name of an input or a weight; a source without an entry is replicated.
    pub sources: BTreeMap<String, Layout>,
    /// Layouts that ops read of a value: it is converted to it before its first reader, and ops that do not accept it
    /// convert it again.
    pub values: BTreeMap<ValueId, Layout>,
    /// Layouts by name of an output; an output without an entry leaves in the layout that it has,
    /// and a partial sum is reduced first.
    pub outputs: BTreeMap<String, Layout>,
}

/// Lowers array programs. Each becomes a phase, and a call of its own name. The caller fills in the
/// mapping of the bundle.
///
/// # Errors
/// T0614 for a layout that does not fit, T0615 for a program that cannot be lowered, or the rule
/// that an op breaks.
pub fn lower_by_layouts(
    programs: &[LaidOutProgram],
    mesh: &Mesh,
    rank_map: RankMap,
    overlap: &StreamOverlap,
) -> Result<Bundle, Diagnostics> {
    lower_programs(programs, mesh, rank_map, (overlap, Numerics::Standard))
}

/// As [`lower_by_layouts`], and no bit of an output depends on the mesh. A sum is split over ranks only if one binary tree
/// adds its segments on every mesh; otherwise the operands are gathered before it.
///
/// # Errors
/// As [`lower_by_layouts`].
pub fn lower_mesh_invariant(
    programs: &[LaidOutProgram],
    mesh: &Mesh,
    rank_map: RankMap,
    overlap: &StreamOverlap,
) -> Result<Bundle, Diagnostics> {
    lower_programs(programs, mesh, rank_map, (overlap, Numerics::MeshInvariant))
}

fn lower_programs(
    programs: &[LaidOutProgram],
    mesh: &Mesh,
    rank_map: RankMap,
    (overlap, numerics): (&StreamOverlap, Numerics),
) -> Result<Bundle, Diagnostics> {
    let mut ds: Diagnostics = programs.iter().flat_map(|p| check_program(p, mesh)).collect();
    ds.extend(check_names(programs));
    if !ds.is_empty() {
        return Err(ds);
    }
    let mut first = Vec::new();
    for laid_out in programs {
        let grouped = token_groups::group_sharded_tokens(laid_out, mesh, numerics);
        let planned = grouped.and_then(|grouped| steps::plan_steps(&grouped, mesh, numerics));
        let lowered = planned.and_then(|plan| {
            emission::emit_program(&plan, mesh, coordinates::ROLE, overlap)
                .map_err(|es| es.iter().map(|e| rule_diagnostic(&plan.name, e)).collect())
        });
        match lowered {
            Ok(p) => first.push(p),
            Err(found) => ds.extend(found),
        }
    }
    if !ds.is_empty() {
        return Err(ds);
    }
    let roles = coordinates::divide_into_roles(mesh, &first);
    let mut phases = Vec::new();
    for p in &first {
        let programs: Vec<Program> =
            roles.iter().map(|role| coordinates::program_of_role(p, role)).collect::<Result<_, _>>()?;
        let slots = programs.iter().map(memory::assign_slots).collect();
        phases.push(Phase { name: p.name.clone(), programs, slots });
    }
    Ok(Bundle {
        mesh: *mesh,
        rank_map,
        hosts: None,
        roles: roles.into_iter().map(|role| role.ranks).collect(),
        calls: phases.iter().map(|p| (p.name.clone(), vec![p.name.clone()])).collect(),
        phases,
        mapping: String::new(),
    })
}

/// Returns the diagnostic of an op that a rule rejects.
fn rule_diagnostic(program: &str, e: &RuleError) -> Diagnostic {
    Diagnostic::error(&T0615, e.message.clone())
        .with_label(format!("@{program}"), "this program")
        .with_note(e.code.title)
}

/// Checks that the names of the programs differ.
fn check_names(programs: &[LaidOutProgram]) -> Diagnostics {
    let mut seen = BTreeSet::new();
    let repeated = programs.iter().filter(|p| !seen.insert(&p.program.name));
    repeated.map(|p| program_diagnostic(&p.program, "two programs have this name")).collect()
}

fn check_program(laid_out: &LaidOutProgram, mesh: &Mesh) -> Diagnostics {
    let p = &laid_out.program;
    let mut ds = Vec::new();
    if p.dialect != Dialect::Logical {
        ds.push(program_diagnostic(p, "an array program is logical, and this one is written for a role"));
    }
    if mesh.outside_count() > 0 {
        let message =
            format!("{} ranks outside the mesh: array programs run on its ranks", mesh.outside_count());
        ds.push(program_diagnostic(p, message).with_label("mesh", mesh.to_string()));
    }
    ds.extend(p.buffers.iter().map(|b| {
        program_diagnostic(p, format!("buffer @{}: an array program keeps nothing between its calls", b.name))
            .with_hint("pass the values in as inputs, and return them as outputs")
    }));
    // The scales of a quantized weight follow it.
    let is_scale = |v: &ValueId| p.ops.iter().any(|op| op.results.first() == Some(v) && is_scale_of_rows(op));
    let mut sources = named_ops(p, &[Opcode::Input, Opcode::Weight]);
    sources.retain(|(_, v)| !is_scale(v));
    let outputs = named_ops(p, &[Opcode::Output]);
    for (kind, layouts, named) in
        [("source", &laid_out.sources, &sources), ("output", &laid_out.outputs, &outputs)]
    {
        for (name, layout) in layouts {
            let values: Vec<_> = named.iter().filter(|(n, _)| n == name).map(|(_, v)| *v).collect();
            if values.is_empty() {
                ds.push(unknown_name(p, kind, name, named.iter().map(|(n, _)| n.as_str()).collect()));
            }
            for v in values {
                let shape = &p.type_of(v).shape;
                let bad = check_layout(mesh, shape, &on_active_axes(mesh, *layout));
                ds.extend(bad.map(|why| {
                    Diagnostic::error(&T0614, format!("{kind} \"{name}\" of shape {shape:?}: {why}"))
                        .with_label(format!("@{}", p.name), "this program")
                        .with_label("mesh", mesh.to_string())
                }));
            }
        }
    }
    for (v, layout) in &laid_out.values {
        let Some(value) = p.values.get(v.0 as usize) else {
            ds.push(program_diagnostic(p, "a layout is stated for a value of another program"));
            continue;
        };
        let bad = check_layout(mesh, &value.ty.shape, &on_active_axes(mesh, *layout));
        ds.extend(bad.map(|why| {
            Diagnostic::error(&T0614, format!("value %{} of shape {:?}: {why}", value.name, value.ty.shape))
                .with_label(format!("@{}", p.name), "this program")
                .with_label("mesh", mesh.to_string())
        }));
    }
    let mut seen = BTreeSet::new();
    let repeated = outputs.iter().filter(|(name, _)| !seen.insert(name));
    ds.extend(repeated.map(|(name, _)| program_diagnostic(p, format!("two outputs are called \"{name}\""))));
    ds
}

fn unknown_name(p: &Program, kind: &str, name: &str, names: Vec<&str>) -> Diagnostic {
    let d = Diagnostic::error(
        &T0614,
        format!("a layout for the {kind} \"{name}\", which the program does not have"),
    )
    .with_label(format!("@{}", p.name), "this program");
    let d = match closest_name(name, names.iter().copied()) {
        Some(n) => d.with_note(format!("closest: \"{n}\"")),
        None => d,
    };
    match names[..] {
        [] => d,
        _ => d.with_hint(format!("its {kind}s are {}", format_choices(&names))),
    }
}

/// Returns why a tensor of this global shape cannot have a layout.
fn check_layout(mesh: &Mesh, shape: &[u64], layout: &Layout) -> Option<String> {
    let mut sharded: Vec<(usize, Axis)> = Vec::new();
    for axis in mesh.active_axes() {
        let on = layout.on_axis(axis);
        if let Some(w) = on.subgroup_size().filter(|w| !mesh.has_subgroups(axis, *w)) {
            return Some(format!("subgroups of {w} do not divide {axis}={}", mesh.axis_size(axis)));
        }
        let s = match on {
            AxisLayout::Replicated => continue,
            AxisLayout::Partial { .. } => {
                return Some(format!("{on} over {axis} is no layout of a whole value"));
            }
            AxisLayout::Shard(s) => s,
        };
        let Some(extent) = shape.get(s.dim) else {
            return Some(format!("it has no dim {} to shard over {axis}", s.dim));
        };
        if let Some((_, other)) = sharded.iter().find(|(d, _)| *d == s.dim) {
            return Some(format!("dim {} is sharded over both {other} and {axis}", s.dim));
        }
        sharded.push((s.dim, axis));
        let parts = s.part_count(mesh.axis_size(axis));
        let unit = s.uneven.map_or(1, |u| u.unit);
        let fits = Shard::new(s.dim, *extent, unit, parts).map(|f| f.with_subgroup_size(s.subgroup_size));
        if fits != Some(s) {
            return Some(format!(
                "{on} over {axis} is not how {extent} elements are sharded over {parts} ranks"
            ));
        }
    }
    None
}
