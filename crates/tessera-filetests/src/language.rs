//! Random language models under random plans: experts, all-to-all, paged attention, rotary positions, latent heads
//! and the choice of ids. They run on the reference evaluator and on the ranks of any backend.

#![allow(clippy::unwrap_used, reason = "a case that cannot be made ends the test that draws it")]

mod draw;
mod run;

use tessera_ir::{Bundle, Opcode};

pub use draw::{Case, FAMILIES, TokenCall, programs_of_ranks};
pub use run::{Results, evaluate, run_on_ranks, stack_listed_experts};

/// Seed of the cases that [`planned_cases`] draws.
pub const SEED: u64 = 5;

/// Ops that the drawn cases have between them, beside collectives.
pub const DRAWN_OPS: [Opcode; 16] = [
    Opcode::TopKExperts,
    Opcode::ExpertWeights,
    Opcode::ExpertPlaces,
    Opcode::ExpertSlots,
    Opcode::ExpertCounts,
    Opcode::ExpertPack,
    Opcode::ExpertReroute,
    Opcode::GroupedMatmul,
    Opcode::ExpertCombine,
    Opcode::Rotary,
    Opcode::HeadNorm,
    Opcode::HeadColumns,
    Opcode::HeadJoin,
    Opcode::HeadMatmul,
    Opcode::PagedAttention,
    Opcode::Sample,
];

/// Codes of mappings that ask for more ranks than the model has heads, columns, experts or blocks.
const UNFIT: [&str; 2] = ["T0602", "T0603"];

/// Draws some cases, and returns those whose mapping fits the model, with their plans.
///
/// # Panics
/// If a mapping is refused for another reason, or if fewer than half fit.
#[must_use]
pub fn planned_cases(count: u32) -> Vec<(u32, Case, Bundle)> {
    let draw = |index| {
        let case = Case::draw(SEED, index);
        match case.lower(&case.mapping) {
            Ok(bundle) => Some((index, case, bundle)),
            Err(ds) if ds.iter().all(|d| UNFIT.contains(&d.code.id)) => None,
            Err(ds) => panic!("case {index}, {}: {ds:#?}", case.mapping),
        }
    };
    let cases: Vec<_> = (0..count).filter_map(draw).collect();
    assert!(cases.len() as u32 * 2 > count, "{} of {count} mappings fit", cases.len());
    cases
}

/// Returns the largest difference over the largest magnitude.
#[must_use]
pub fn measure_difference(found: &Results, expected: &Results) -> f64 {
    let largest = expected.iter().flatten().fold(0.0_f64, |m, x| m.max(x.abs()));
    let pairs = found.iter().flatten().zip(expected.iter().flatten());
    pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max) / largest.max(1e-30)
}
