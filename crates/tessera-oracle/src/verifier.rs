//! Runs `tessera-verify` in the form that the comparison expects: each program alone, then all as
//! roles of one phase. Ranks with equal programs share a role.

use tessera_ir::rules::role_outside;
use tessera_ir::{Phase, Program, RoleRanks, Slots};
use tessera_mesh::{Mesh, Rank};
use tessera_verify::{check_phase, check_program};

/// Returns the error codes for a set of programs, one per rank.
pub fn verify_programs(mesh: &Mesh, programs: &[Program]) -> Vec<&'static str> {
    verify_with_roles(mesh, programs, &share_role)
}

/// Like [`verify_programs`], with `shares` deciding which programs share a role.
#[allow(dead_code, reason = "the binary uses the default only")]
pub fn verify_with_roles(
    mesh: &Mesh,
    programs: &[Program],
    shares: &dyn Fn(&Program, &Program) -> bool,
) -> Vec<&'static str> {
    let alone = programs.iter().flat_map(check_program);
    let codes: Vec<&str> = alone.filter(|d| d.is_error()).map(|d| d.code.id).collect();
    if !codes.is_empty() {
        return codes;
    }
    let mut roles: Vec<RoleRanks> = Vec::new();
    let mut played: Vec<Program> = Vec::new();
    for (i, p) in programs.iter().enumerate() {
        // Ranks with equal programs share one role, named after the first.
        match played.iter().position(|q| shares(p, q)) {
            Some(role) => roles[role].ranks.push(Rank(i as u32)),
            None => {
                roles.push(RoleRanks { role: p.role.clone(), ranks: vec![Rank(i as u32)] });
                played.push(p.clone());
            }
        }
    }
    let memory =
        played.iter().map(|p| Slots { slot_bytes: Vec::new(), value_slots: vec![None; p.values.len()] });
    let phase = Phase { name: "denoise".to_string(), slots: memory.collect(), programs: played };
    let found = check_phase(mesh, &roles, &phase);
    found.iter().filter(|d| d.is_error()).map(|d| d.code.id).collect()
}

/// Returns whether two programs are equal except for the role's name; both roles must be inside or
/// both outside the mesh.
pub fn share_role(a: &Program, b: &Program) -> bool {
    let leads = |p: &Program| role_outside(&p.role).is_some();
    leads(a) == leads(b)
        && a.ops == b.ops
        && a.values == b.values
        && a.buffers == b.buffers
        && a.streams == b.streams
}
