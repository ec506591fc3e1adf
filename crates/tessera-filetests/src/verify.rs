//! Passes the programs of a file to the verifier.

use tessera_base::Diagnostics;
use tessera_ir::{Bundle, Dialect, Phase, Program, Slots};
use tessera_mesh::RankMap;
use tessera_plan::state_hosts;
use tessera_verify::{DeviceLimits, check_program, seal};

use crate::dedicated_slots;
use crate::eval::group_by_phase;
use crate::header::Header;

/// Returns the verifier's diagnostics: of each program alone and, if there are none, of all
/// programs as one plan.
pub(crate) fn verify_file(header: &Header, programs: &[Program]) -> Diagnostics {
    let out: Diagnostics = programs.iter().flat_map(check_program).collect();
    let role_programs: Vec<&Program> = programs.iter().filter(|p| p.dialect == Dialect::Role).collect();
    if !out.is_empty() || role_programs.is_empty() {
        return out;
    }
    let limits =
        DeviceLimits { device_bytes: header.device_bytes, graph_mixing_off: header.graph_mixing_off };
    seal(build_bundle(header, &role_programs), &limits).err().unwrap_or_default()
}

/// Builds a bundle with one phase per program name, the roles of the first phase, and one call of
/// all phases unless the file lists its calls.
pub(crate) fn build_bundle(header: &Header, programs: &[&Program]) -> Bundle {
    let phases = group_by_phase(programs);
    let (mesh, first) = (programs[0].mesh, &phases[0].1);
    let roles = header.role_ranks(&mesh, first);
    let names: Vec<String> = phases.iter().map(|(name, _)| name.clone()).collect();
    let calls =
        if header.calls.is_empty() { vec![("call".to_string(), names)] } else { header.calls.clone() };
    let phase = |(name, programs): (String, Vec<&Program>)| Phase {
        name,
        slots: programs.iter().map(|p| assign_slots(header, p)).collect(),
        programs: programs.into_iter().cloned().collect(),
    };
    let mut bundle = Bundle {
        mesh,
        rank_map: RankMap::from_device_kind(&mesh, "cpu"),
        hosts: None,
        roles,
        phases: phases.into_iter().map(phase).collect(),
        calls,
        mapping: String::new(),
    };
    state_hosts(&mut bundle, header.hosts.clone());
    if let Some(stated) = bundle.hosts.as_mut().filter(|_| !header.paths.is_empty()) {
        stated.groups = header.paths.clone();
    }
    bundle
}

/// Gives each value its own slot and applies the slot keys of the header.
fn assign_slots(header: &Header, p: &Program) -> Slots {
    let mut slots = dedicated_slots(p);
    let value_index = |name: &String| p.values.iter().position(|v| v.name == *name);
    for names in &header.shared_slots {
        let values: Vec<usize> = names.iter().filter_map(value_index).collect();
        let Some(first) = values.first().map(|v| slots.value_slots[*v]) else { continue };
        values.into_iter().for_each(|v| slots.value_slots[v] = first);
    }
    header.unslotted.iter().filter_map(value_index).for_each(|v| slots.value_slots[v] = None);
    slots
}
