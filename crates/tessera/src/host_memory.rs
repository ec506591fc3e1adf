//! The memory that this host has available, as its operating system reports it, and what ranks on its CPUs hold.

use std::collections::BTreeMap;

use tessera_base::{Bytes, Diagnostic};
use tessera_device::T0804;
use tessera_ir::{DType, Opcode, Program, Type};
use tessera_mesh::Rank;
use tessera_verify::SealedPlan;

use crate::communicators;
use crate::system::available_bytes;

/// Checks that this host has the memory of all ranks, which run on its CPUs: weights, buffers, temporaries, the shared
/// memory of their collectives, and `others` bytes.
///
/// # Errors
/// T0804, with the largest tensor.
pub(crate) fn check_host_memory(sealed: &SealedPlan, others: u64) -> Result<(), Diagnostic> {
    match available_bytes() {
        Some(available) => check_against(sealed, others, available),
        None => Ok(()),
    }
}

fn check_against(sealed: &SealedPlan, others: u64, available: u64) -> Result<(), Diagnostic> {
    let ranks = sealed.mesh().iter().map(|rank| held_bytes(sealed, rank));
    let arenas = communicators::communicator_specs(sealed).into_iter().map(|s| {
        let slots = (s.layout.members as u64).saturating_mul(s.layout.slots as u64);
        slots.saturating_mul(s.layout.slot_bytes as u64)
    });
    let needed = ranks.chain(arenas).chain([others]).fold(0, u64::saturating_add);
    if needed <= available {
        return Ok(());
    }
    let programs = sealed.mesh().iter().flat_map(|rank| programs_of(sealed, rank));
    let tensors = programs.flat_map(|p| {
        let buffers = p.buffers.iter().map(|b| (format!("buffer @{}", b.name), &b.ty));
        let values = p.values.iter().map(|v| (format!("%{} of @{}", v.name, p.name), &v.ty));
        buffers.chain(values).map(|(name, ty)| (cpu_bytes(ty), name))
    });
    let needed_text = format!("{needed} bytes for all ranks of {}", sealed.mesh());
    let message =
        format!("the plan needs {}, but this host has {} available", Bytes(needed), Bytes(available));
    let d = Diagnostic::error(&T0804, message)
        .with_label("plan", needed_text)
        .with_label("this host", format!("{available} bytes available"))
        .with_hint("check the sizes in the files of the model, or use ranks on GPUs");
    Err(match tensors.max() {
        Some((bytes, name)) => d.with_label(name, format!("{bytes} bytes, the largest tensor")),
        None => d,
    })
}

/// Returns the bytes that a rank on a CPU holds at least: weights of a narrower dtype are stored in bf16, and everything
/// else in f32. Temporaries count as the plan states them.
fn held_bytes(sealed: &SealedPlan, rank: Rank) -> u64 {
    let mut held = BTreeMap::new();
    for p in programs_of(sealed, rank) {
        held.extend(p.buffers.iter().map(|b| ((b.name.as_str(), None), cpu_bytes(&b.ty))));
        let weights = p.ops.iter().filter(|op| op.opcode == Opcode::Weight);
        held.extend(weights.filter_map(|op| {
            let name = op.name.as_deref()?;
            let ty = p.type_of(*op.results.first()?);
            let bytes = match op.expert_tier() {
                // An expert takes as much as its share of the weight.
                Some(tier) => tier.resident_bytes(&Type { dtype: DType::F32, ..ty.clone() }).0,
                None => cpu_bytes(ty),
            };
            let bytes = if ty.dtype == DType::F32 { bytes } else { bytes / 2 };
            Some(((name, Some(op.weight_load())), bytes))
        }));
    }
    let rest = sealed.rank_memory(rank).map_or(0, |m| m.inputs.0.saturating_add(m.temporaries.0));
    held.into_values().fold(rest, u64::saturating_add)
}

fn cpu_bytes(ty: &Type) -> u64 {
    ty.element_count().saturating_mul(size_of::<f32>() as u64)
}

fn programs_of(sealed: &SealedPlan, rank: Rank) -> impl Iterator<Item = &Program> {
    sealed.phase_names().iter().filter_map(move |phase| Some(&**sealed.rank_program(phase, rank)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    use tessera_models::TokenOutput;
    use tessera_plan::{DtypePolicy, Mapping};

    use crate::generate::{LanguagePlan, LanguageSettings, TextModel};

    fn plan(dtype: DtypePolicy, mesh: &str) -> SealedPlan {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm/llama");
        let model = TextModel::open(&folder).unwrap().decoder;
        let mapping = Mapping { dtype, mesh: mesh.parse().unwrap(), ..Mapping::default() };
        let settings = LanguageSettings::new(64, 8, TokenOutput::Next);
        LanguagePlan::new(&model, &mapping, settings).unwrap().sealed
    }

    #[test]
    fn a_rank_holds_narrow_weights_in_bf16_and_buffers_in_f32() {
        let (f32, bf16) = (plan(DtypePolicy::F32, "tp=1"), plan(DtypePolicy::Bf16, "tp=1"));
        let planned = f32.rank_memory(Rank(0)).unwrap();
        assert_eq!(held_bytes(&f32, Rank(0)), planned.total_bytes().0);
        let narrow = bf16.rank_memory(Rank(0)).unwrap();
        assert!(narrow.weights.0 < planned.weights.0 && narrow.buffers.0 < planned.buffers.0);
        let rest = narrow.inputs.0 + narrow.temporaries.0;
        assert_eq!(held_bytes(&bf16, Rank(0)), narrow.weights.0 + planned.buffers.0 + rest);
    }

    #[test]
    fn a_plan_of_all_ranks_is_refused_by_one_byte() {
        let sealed = plan(DtypePolicy::F32, "tp=2");
        let d = check_against(&sealed, 10, 0).unwrap_err();
        let needed: u64 = d.labels[0].message.split(' ').next().unwrap().parse().unwrap();
        assert!(needed > held_bytes(&sealed, Rank(0)) + held_bytes(&sealed, Rank(1)));
        assert_eq!(check_against(&sealed, 10, needed), Ok(()));
        let d = check_against(&sealed, 10, needed - 1).unwrap_err();
        assert!(
            d.code == &T0804 && d.labels.iter().any(|l| l.message.contains("the largest tensor")),
            "{d:?}"
        );
    }
}
