//! Check that a type is possible on a mesh, for a role.

use tessera_mesh::{Axis, AxisLayout, Shard, Uneven};

use super::{RuleResult, role_outside, role_shard_len, rule_error, subgroup_error};
use crate::attr_kind::MAX_ELEMENTS;
use crate::codes::T0210;
use crate::{Program, Type};

/// Checks that a type is possible: its extents are within bounds, every sharded dim exists, is
/// sharded over only one axis and, if it is uneven, has the local length of this role; subgroups
/// divide their axis; and roles outside the mesh hold replicated values only.
///
/// # Errors
/// T0210 with the dim and both numbers.
pub fn check_type(program: &Program, ty: &Type) -> RuleResult<()> {
    let mesh = &program.mesh;
    let shown = || ty.display_on(mesh);
    let elements = ty.shape.iter().try_fold(1u64, |n, e| n.checked_mul(*e));
    if !elements.is_some_and(|n| (1..=MAX_ELEMENTS).contains(&n)) {
        return rule_error(&T0210, format!("{} has no elements, or more than {MAX_ELEMENTS}", shown()));
    }
    let mut cut: Vec<(usize, Axis)> = Vec::new();
    for axis in mesh.active_axes() {
        let on = ty.layout.on_axis(axis);
        if on != AxisLayout::Replicated && role_outside(&program.role).is_some() {
            let role = &program.role;
            return rule_error(
                &T0210,
                format!("{}: role({role}) is outside the mesh and can only hold replicated values", shown()),
            );
        }
        if let Some(w) = on.subgroup_size().filter(|w| !mesh.has_subgroups(axis, *w)) {
            return rule_error(&T0210, format!("{}: {}", shown(), subgroup_error(mesh, axis, i64::from(w))));
        }
        let AxisLayout::Shard(s) = on else { continue };
        let Some(local) = ty.shape.get(s.dim) else {
            return rule_error(&T0210, format!("{} has no dim {} to shard over {axis}", shown(), s.dim));
        };
        if let Some((_, other)) = cut.iter().find(|(d, _)| *d == s.dim) {
            return rule_error(
                &T0210,
                format!("dim {} of {} is sharded over both {other} and {axis}", s.dim, shown()),
            );
        }
        cut.push((s.dim, axis));
        if let Some(u) = s.uneven {
            check_uneven_shard(program, ty, axis, s, u, *local)?;
        }
    }
    Ok(())
}

/// Checks that an uneven shard over `axis` is possible and has the local length of this role.
fn check_uneven_shard(
    program: &Program,
    ty: &Type,
    axis: Axis,
    s: Shard,
    u: Uneven,
    local: u64,
) -> RuleResult<()> {
    let shown = ty.display_on(&program.mesh);
    let parts = s.part_count(program.mesh.axis_size(axis));
    match Shard::new(s.dim, u.extent, u.unit, parts) {
        Some(Shard { uneven: Some(_), .. }) if u.extent <= MAX_ELEMENTS => {
            let piece = role_shard_len(program, axis, u, s.subgroup_size);
            if piece == local {
                return Ok(());
            }
            rule_error(
                &T0210,
                format!(
                    "dim {} of {shown} has extent {local}, but the shard of role({}) has {piece}",
                    s.dim, program.role
                ),
            )
        }
        Some(Shard { uneven: None, .. }) => {
            rule_error(&T0210, format!("dim {} of {shown} is sharded evenly: omit extent= and unit=", s.dim))
        }
        _ => rule_error(
            &T0210,
            format!(
                "dim {} of {shown}: cannot shard extent {} in units of {} over {parts} ranks",
                s.dim, u.extent, u.unit
            ),
        ),
    }
}
