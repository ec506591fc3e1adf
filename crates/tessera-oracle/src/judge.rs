//! The judge of `tessera-verify` as the comparison wants it: each program alone, then all as roles of one phase. Ranks with
//! equal programs share a role.

use tessera_ir::rules::role_outside;
use tessera_ir::{Phase, Program, RoleRanks, Slots};
use tessera_mesh::{Mesh, Rank};
use tessera_verify::{check_phase, check_program};

/// Codes of the refusals of a set, one program per rank.
pub fn judge(mesh: &Mesh, programs: &[Program]) -> Vec<&'static str> {
    judge_as(mesh, programs, &same)
}

/// [`judge`], with `shares` saying which programs are one role's.
#[allow(dead_code, reason = "the binary judges in one way alone")]
pub fn judge_as(
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
        // Ranks of equal programs play one role, named after the first.
        match played.iter().position(|q| shares(p, q)) {
            Some(role) => roles[role].ranks.push(Rank(i as u32)),
            None => {
                roles.push(RoleRanks { role: p.role.clone(), ranks: vec![Rank(i as u32)] });
                played.push(p.clone());
            }
        }
    }
    let memory = played.iter().map(|p| Slots { bytes: Vec::new(), of: vec![None; p.values.len()] });
    let phase = Phase { name: "denoise".to_string(), memory: memory.collect(), programs: played };
    let found = check_phase(mesh, &roles, &phase);
    found.iter().filter(|d| d.is_error()).map(|d| d.code.id).collect()
}

/// Equal but for the role's name, which must agree about standing outside the mesh.
pub fn same(a: &Program, b: &Program) -> bool {
    let leads = |p: &Program| role_outside(&p.role).is_some();
    leads(a) == leads(b)
        && a.ops == b.ops
        && a.values == b.values
        && a.buffers == b.buffers
        && a.streams == b.streams
}
