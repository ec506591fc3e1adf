//! Hands a file's programs to the judge.

use tessera_base::Diagnostics;
use tessera_ir::{Phase, Program, Slots};
use tessera_mesh::Rank;
use tessera_verify::{check_phase, check_program};

use crate::eval::phases;
use crate::header::Header;

/// Everything the judge says: each program alone, then all ranks of each phase together.
pub(crate) fn judge(header: &Header, programs: &[Program]) -> Result<Diagnostics, Vec<String>> {
    let mut out: Diagnostics = programs.iter().flat_map(check_program).collect();
    if !out.is_empty() {
        return Ok(out);
    }
    let of_roles: Vec<&Program> = programs.iter().filter(|p| !p.role.is_empty()).collect();
    for (name, phase) in phases(&of_roles) {
        let mesh = phase[0].mesh;
        let cast = header.cast(&mesh, &phase).map_err(|e| vec![e])?;
        let roles = phase
            .iter()
            .map(|p| {
                let plays = |r: &Rank| std::ptr::eq(cast[r.0 as usize], *p);
                tessera_ir::RoleRanks { role: p.role.clone(), ranks: mesh.iter().filter(plays).collect() }
            })
            .collect::<Vec<_>>();
        let phase = Phase {
            name,
            programs: phase.iter().map(|p| (*p).clone()).collect(),
            memory: vec![Slots::default(); phase.len()],
        };
        out.extend(check_phase(&mesh, &roles, &phase));
    }
    Ok(out)
}
