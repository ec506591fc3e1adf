//! Hands a file's programs to the judge.

use tessera_base::Diagnostics;
use tessera_ir::{Bundle, Dialect, Phase, Program, Slots};
use tessera_mesh::RankMap;
use tessera_verify::{Limits, check_program, seal};

use crate::eval::phases;
use crate::header::Header;
use crate::own_slots;

/// Everything the judge says: each program alone, then all of the file as one plan.
pub(crate) fn judge(header: &Header, programs: &[Program]) -> Diagnostics {
    let out: Diagnostics = programs.iter().flat_map(check_program).collect();
    let of_roles: Vec<&Program> = programs.iter().filter(|p| p.dialect == Dialect::Role).collect();
    if !out.is_empty() || of_roles.is_empty() {
        return out;
    }
    let limits = Limits { device_bytes: header.device_bytes, graph_mixing_off: header.graph_mixing_off };
    seal(bundle(header, &of_roles), &limits).err().unwrap_or_default()
}

/// A phase for each name, a role for each name of the first phase, a call of all phases unless the file lists
/// its own.
pub(crate) fn bundle(header: &Header, programs: &[&Program]) -> Bundle {
    let phases = phases(programs);
    let (mesh, first) = (programs[0].mesh, &phases[0].1);
    let roles = header.roles(&mesh, first);
    let names: Vec<String> = phases.iter().map(|(name, _)| name.clone()).collect();
    let calls =
        if header.calls.is_empty() { vec![("call".to_string(), names)] } else { header.calls.clone() };
    let phase = |(name, programs): (String, Vec<&Program>)| Phase {
        name,
        memory: programs.iter().map(|p| slots(header, p)).collect(),
        programs: programs.into_iter().cloned().collect(),
    };
    Bundle {
        mesh,
        rank_map: RankMap::logical(&mesh, "cpu"),
        roles,
        phases: phases.into_iter().map(phase).collect(),
        calls,
        mapping: String::new(),
    }
}

/// A slot per value, less what the file's header takes away.
fn slots(header: &Header, p: &Program) -> Slots {
    let mut slots = own_slots(p);
    let at = |name: &String| p.values.iter().position(|v| v.name == *name);
    for names in &header.share {
        let values: Vec<usize> = names.iter().filter_map(at).collect();
        let Some(first) = values.first().map(|v| slots.of[*v]) else { continue };
        values.into_iter().for_each(|v| slots.of[v] = first);
    }
    header.homeless.iter().filter_map(at).for_each(|v| slots.of[v] = None);
    slots
}
