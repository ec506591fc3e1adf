//! The roles of array programs: ranks whose shards have equal sizes.
//!
//! A program is lowered once, at the first coordinate. The programs of other coordinates have the
//! same ops, and differ in the local lengths of uneven shards only.

use std::collections::BTreeSet;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::rules::infer_types;
use tessera_ir::{Program, RoleRanks, Type};
use tessera_mesh::{Axis, AxisLayout, Coord, Mesh, Rank, Shard, Uneven};

use super::rule_diagnostic;
use crate::codes::T0615;

/// Name of the role of all ranks, if all have shards of equal sizes.
pub(super) const ROLE: &str = "ranks";

/// Returns the name of the role that begins at a coordinate.
pub(super) fn role_at(mesh: &Mesh, at: Coord) -> String {
    mesh.active_axes().fold(ROLE.to_string(), |name, axis| name + &format!("@{axis}{}", at.on_axis(axis)))
}

/// A role with the coordinate that its name states.
pub(super) struct RoleClass {
    pub(super) ranks: RoleRanks,
    at: Coord,
}

/// Coordinates of one axis at which all uneven shards have equal sizes, in ascending order.
type Positions = Vec<u32>;

/// Divides the ranks of a mesh into roles, so that each has one size of every uneven shard in these
/// programs.
pub(super) fn divide_into_roles(mesh: &Mesh, programs: &[Program]) -> Vec<RoleClass> {
    let classes = Axis::ALL.map(|axis| divide_axis(mesh, axis, programs));
    let mut at: Vec<[usize; 4]> = vec![[0; 4]];
    for (i, of_axis) in classes.iter().enumerate().rev() {
        let with = |base: &[usize; 4], n: usize| {
            let mut out = *base;
            out[i] = n;
            out
        };
        at = at.iter().flat_map(|base| (0..of_axis.len()).map(move |n| with(base, n))).collect();
    }
    let one = |at: [usize; 4]| {
        let mut name = ROLE.to_string();
        let mut coord = Coord::default();
        for (axis, n) in Axis::ALL.into_iter().zip(at) {
            let of_axis = &classes[axis as usize];
            coord = coord.with_axis(axis, of_axis[n][0]);
            if of_axis.len() > 1 {
                name += &format!("@{axis}{}", of_axis[n][0]);
            }
        }
        let is_member = |r: &Rank| {
            let c = mesh.coord_of(*r);
            Axis::ALL.into_iter().zip(at).all(|(a, n)| classes[a as usize][n].contains(&c.on_axis(a)))
        };
        let ranks = mesh.inner_ranks().filter(is_member).collect();
        RoleClass { ranks: RoleRanks { role: name, ranks }, at: coord }
    };
    at.into_iter().map(one).collect()
}

/// Returns the program of a role, from that of the first coordinate.
///
/// # Errors
/// T0615 if a rule rejects an op for the shards of this role.
pub(super) fn program_of_role(first: &Program, role: &RoleClass) -> Result<Program, Diagnostics> {
    let mut p = first.clone();
    p.role.clone_from(&role.ranks.role);
    for value in &mut p.values {
        let global = value.ty.layout.global_shape(&value.ty.shape, &p.mesh);
        if !value.ty.is_token() {
            value.ty.shape = value.ty.layout.local_shape(&global, &p.mesh, role.at);
        }
    }
    let definitions = p.defining_ops();
    let mut ds = Vec::new();
    for op in &p.ops {
        let written: Vec<Type> = op.results.iter().map(|r| p.type_of(*r).clone()).collect();
        match infer_types(&p, op, &written, &definitions) {
            Ok(types) if types == written => {}
            Ok(_) => {
                let message = format!("{} has another shape on {}", op.opcode.name(), p.role);
                ds.push(
                    Diagnostic::error(&T0615, message).with_label(format!("@{}", p.name), "this program"),
                );
            }
            Err(e) => ds.push(rule_diagnostic(&p.name, &e)),
        }
    }
    if ds.is_empty() { Ok(p) } else { Err(ds) }
}

fn divide_axis(mesh: &Mesh, axis: Axis, programs: &[Program]) -> Vec<Positions> {
    let types = programs.iter().flat_map(|p| &p.values).map(|v| &v.ty);
    let uneven: BTreeSet<(Uneven, Option<u32>)> = types
        .filter_map(|ty| match ty.layout.on_axis(axis) {
            AxisLayout::Shard(Shard { uneven: Some(u), subgroup_size, .. }) => Some((u, subgroup_size)),
            _ => None,
        })
        .collect();
    let size = mesh.axis_size(axis);
    let mut classes: Vec<(Vec<u64>, Positions)> = Vec::new();
    for at in 0..size {
        let length = |(u, subgroup_size): &(Uneven, Option<u32>)| {
            Shard { dim: 0, uneven: Some(*u), subgroup_size: *subgroup_size }.global_range(0, size, at).1
        };
        let lengths: Vec<u64> = uneven.iter().map(length).collect();
        match classes.iter_mut().find(|(known, _)| *known == lengths) {
            Some((_, positions)) => positions.push(at),
            None => classes.push((lengths, vec![at])),
        }
    }
    classes.into_iter().map(|(_, positions)| positions).collect()
}
