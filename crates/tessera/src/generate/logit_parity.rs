//! The comparison of a language model's logits under two precision policies: the same ids, two sealed plans.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, named_enum};
use tessera_ir::{DType, OpView, Opcode, Program};
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::{DtypePolicy, Mapping, TokenNumerics, TokenPlacement, TokenWire};

use super::LanguagePlan;
use crate::codes::{T0088, T0089};

named_enum! {
    /// What a model computes and sends in less than f32.
    pub enum PrecisionPolicy {
        /// All values are f32, and nothing is rounded on its way.
        F32 = "f32",
        /// Matmuls and the activations between them are bf16.
        Bf16 = "bf16",
        /// As bf16, and the operands of the column-parallel matmuls of blocks are e4m3.
        Fp8 = "fp8",
        /// All values are f32; tokens travel to the ranks of their experts as e4m3.
        Fp8Wire = "fp8-wire",
    }
}

impl PrecisionPolicy {
    /// Returns a mapping under this policy. Its other keys stay.
    #[must_use]
    pub fn apply(self, mapping: &Mapping) -> Mapping {
        let mut out = mapping.clone();
        out.dtype = match self {
            PrecisionPolicy::F32 | PrecisionPolicy::Fp8Wire => DtypePolicy::F32,
            PrecisionPolicy::Bf16 => DtypePolicy::Bf16,
            PrecisionPolicy::Fp8 => DtypePolicy::Fp8,
        };
        let rounds_tokens = self == PrecisionPolicy::Fp8Wire;
        out.token_numerics = if rounds_tokens { TokenNumerics::Fp8E4m3 } else { TokenNumerics::F32 };
        out.experts.wire = if rounds_tokens { TokenWire::Fp8 } else { TokenWire::F32 };
        if rounds_tokens {
            out.experts.tokens = TokenPlacement::Sharded;
        }
        out
    }

    /// Checks that the policy changes anything on a mapping.
    ///
    /// # Errors
    /// T0088 for tokens in e4m3 where no token travels.
    pub fn check(self, mapping: &Mapping, has_experts: bool) -> Result<(), Diagnostic> {
        if self != PrecisionPolicy::Fp8Wire || (has_experts && mapping.expert_ranks() > 1) {
            return Ok(());
        }
        let why = if has_experts { "every expert is on one rank" } else { "the model has no experts" };
        Err(Diagnostic::error(&T0088, format!("under fp8-wire no token travels: {why}"))
            .with_label("mesh", mapping.mesh.to_string())
            .with_hint(
                "share the experts of a model with experts, as with --mesh ep=2, or compare bf16 or fp8",
            ))
    }

    /// Returns the largest mean squared error, relative to the variance of the reference, that the gate accepts.
    #[must_use]
    pub fn limit(self, limits: &Thresholds) -> f64 {
        match self {
            PrecisionPolicy::F32 => limits.max_f32_mse,
            PrecisionPolicy::Bf16 => limits.max_bf16_mse,
            PrecisionPolicy::Fp8 => limits.max_fp8_mse,
            PrecisionPolicy::Fp8Wire => limits.max_fp8_wire_mse,
        }
    }
}

/// How far logits are from those of a reference, over all positions of all texts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LogitDifference {
    /// Number of compared positions.
    pub positions: u64,
    /// Standard deviation of the reference's logits.
    pub reference_deviation: f64,
    /// Mean of the squared differences of all logits.
    pub mse: f64,
    /// Mean squared difference of the logits divided by `reference_deviation`: the number that the gate limits. A
    /// constant factor of all logits does not change it.
    pub normalised_mse: f64,
    /// Root of `mse`, over the root mean square of the reference's logits.
    pub relative_error: f64,
    /// Cosine of the angle between the two vectors of all logits.
    pub cosine: f64,
    /// Share of the positions at which both give the same id the largest logit.
    pub same_likeliest: f64,
}

/// Compares logits [positions, vocabulary] with those of a reference.
///
/// # Errors
/// T0087 if the logits have other extents, or if one of them is NaN or infinite.
pub fn compare_logits(
    reference: &[f32],
    found: &[f32],
    vocabulary: usize,
) -> Result<LogitDifference, Diagnostic> {
    let vocabulary = vocabulary.max(1);
    let fits = reference.len() == found.len() && reference.len().is_multiple_of(vocabulary);
    if !fits || reference.is_empty() {
        let message = format!("{} and {} logits of {vocabulary} ids", reference.len(), found.len());
        return Err(Diagnostic::error(&crate::codes::T0087, message));
    }
    if let Some(at) = reference.iter().chain(found).position(|x| !x.is_finite()) {
        let (which, at) =
            if at < reference.len() { ("reference", at) } else { ("other", at - reference.len()) };
        let message = format!("logit {} at position {} is not finite", at % vocabulary, at / vocabulary);
        return Err(Diagnostic::error(&crate::codes::T0087, message).with_label("policy", which));
    }
    let count = reference.len() as f64;
    let pairs = || reference.iter().zip(found).map(|(a, b)| (f64::from(*a), f64::from(*b)));
    let sum = |f: &dyn Fn(f64, f64) -> f64| pairs().map(|(a, b)| f(a, b)).sum::<f64>();
    let mean = sum(&|a, _| a) / count;
    let variance = sum(&|a, _| (a - mean) * (a - mean)) / count;
    let mse = sum(&|a, b| (a - b) * (a - b)) / count;
    let (squares, others) = (sum(&|a, _| a * a), sum(&|_, b| b * b));
    let ratio = |x: f64, of: f64| if x == 0.0 { 0.0 } else { x / of };
    let rows = || reference.chunks_exact(vocabulary).zip(found.chunks_exact(vocabulary));
    let same = rows().filter(|(a, b)| likeliest(a) == likeliest(b)).count();
    Ok(LogitDifference {
        positions: rows().count() as u64,
        reference_deviation: variance.sqrt(),
        mse,
        normalised_mse: ratio(mse, variance),
        relative_error: ratio(mse, squares / count).sqrt(),
        cosine: if mse == 0.0 { 1.0 } else { ratio(sum(&|a, b| a * b), (squares * others).sqrt()) },
        same_likeliest: same as f64 / rows().count() as f64,
    })
}

/// Compares a difference with the limit of a policy.
///
/// # Errors
/// T0089 if the difference exceeds the limit.
pub fn check_parity(
    policy: PrecisionPolicy,
    difference: &LogitDifference,
    limits: &Thresholds,
) -> Result<(), Diagnostic> {
    let (found, limit) = (difference.normalised_mse, policy.limit(limits));
    if found <= limit {
        return Ok(());
    }
    let message = format!("logits under {} differ too much: {found:.2e} of their variance", policy.name());
    Err(Diagnostic::error(&T0089, message)
        .with_label("found", format!("normalised MSE {found:.3e}, raw MSE {:.3e}", difference.mse))
        .with_label("limit", format!("parity.max_{}_mse = {limit:e}", policy.name().replace('-', "_")))
        .with_hint("keep the model in a wider dtype, or set the limit of your use in a file for --gates"))
}

/// Lists what a plan computes or sends in less than f32: by dtype, the weights of matmuls with their layer left out
/// and the number of layers, and the exchanges whose rows travel in e4m3.
#[must_use]
pub fn list_low_precision(plan: &LanguagePlan) -> BTreeMap<String, BTreeMap<String, usize>> {
    let mut names: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    let sealed = &plan.sealed;
    let phases = sealed.phase_names().iter();
    let programs = phases.flat_map(|phase| sealed.mesh().iter().map(move |rank| (phase, rank)));
    for program in programs.filter_map(|(phase, rank)| sealed.rank_program(phase, rank)) {
        for (dtype, name) in list_of_program(program) {
            names.entry(dtype).or_default().insert(name);
        }
    }
    let count = |names: BTreeSet<String>| {
        let mut by_pattern: BTreeMap<String, usize> = BTreeMap::new();
        names.into_iter().for_each(|name| *by_pattern.entry(leave_out_numbers(&name)).or_default() += 1);
        by_pattern
    };
    names.into_iter().map(|(dtype, names)| (dtype, count(names))).collect()
}

fn list_of_program(p: &Program) -> impl Iterator<Item = (String, String)> + '_ {
    p.ops.iter().filter_map(|op| match op.view().ok()? {
        OpView::AllToAll(v) if v.wire.is_some() => {
            let label = op.placement_hint().map_or_else(|| p.value(v.x).name.clone(), str::to_string);
            Some(("e4m3 on the wire".to_string(), label))
        }
        OpView::Matmul(_) | OpView::GroupedMatmul(_) | OpView::HeadMatmul(_) => {
            let w = *op.operands.get(1)?;
            let dtype = p.type_of(w).dtype;
            let weight = p.ops.iter().find(|o| o.opcode == Opcode::Weight && o.results.contains(&w))?;
            (dtype != DType::F32).then(|| (dtype.to_string(), weight.name.clone().unwrap_or_default()))
        }
        _ => None,
    })
}

/// Replaces the numbers among the parts of a dotted name.
fn leave_out_numbers(name: &str) -> String {
    let part = |part: &str| {
        let is_number = !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
        if is_number { "*".to_string() } else { part.to_string() }
    };
    name.split('.').map(part).collect::<Vec<_>>().join(".")
}

/// Returns the first id with the largest logit.
fn likeliest(logits: &[f32]) -> Option<usize> {
    (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_factor_of_all_logits_changes_the_raw_error_alone() {
        let reference = [1.0, -1.0, 3.0, -3.0, 0.0, 0.0];
        let found = [1.5, -1.0, 3.0, -3.0, 0.0, 0.5];
        let of = |scale: f32| {
            let [a, b] = [reference, found].map(|x| x.map(|x| x * scale));
            compare_logits(&a, &b, 3).unwrap()
        };
        let (once, twice) = (of(1.0), of(2.0));
        assert!((once.mse - 0.5 / 6.0).abs() < 1e-12 && (twice.mse - 4.0 * once.mse).abs() < 1e-12);
        assert!((once.normalised_mse - (0.5 / 6.0) / (20.0 / 6.0)).abs() < 1e-12);
        assert!((once.normalised_mse - twice.normalised_mse).abs() < 1e-12);
        assert!((once.relative_error - (0.5f64 / 20.0).sqrt()).abs() < 1e-12);
        let cosine = (1.5 + 1.0 + 18.0) / (20.0f64 * (20.0 + 1.25 + 0.25)).sqrt();
        assert!((once.cosine - cosine).abs() < 1e-12);
        // Row 1 has its largest logit at id 2 in one of the two.
        assert_eq!((once.positions, once.same_likeliest), (2, 0.5));
    }

    #[test]
    fn equal_logits_have_no_error_and_others_are_refused() {
        let same = compare_logits(&[2.0; 4], &[2.0; 4], 2).unwrap();
        assert_eq!((same.mse, same.normalised_mse, same.relative_error, same.cosine), (0.0, 0.0, 0.0, 1.0));
        for (a, b) in [(&[1.0, 2.0][..], &[1.0][..]), (&[1.0, 2.0, 3.0], &[1.0, 2.0, 3.0]), (&[], &[])] {
            assert_eq!(compare_logits(a, b, 2).unwrap_err().code.id, "T0087");
        }
        let d = compare_logits(&[1.0, 2.0], &[1.0, f32::NAN], 2).unwrap_err();
        assert!(d.message.contains("logit 1 at position 0"), "{d:?}");
    }

    #[test]
    fn a_difference_above_the_limit_of_its_policy_is_refused() {
        let limits = Thresholds::default();
        let mut difference = compare_logits(&[1.0, -1.0], &[1.0, -1.0], 2).unwrap();
        for policy in PrecisionPolicy::ALL {
            difference.normalised_mse = policy.limit(&limits);
            assert_eq!(check_parity(policy, &difference, &limits), Ok(()));
            difference.normalised_mse = policy.limit(&limits) * 1.01 + f64::MIN_POSITIVE;
            let d = check_parity(policy, &difference, &limits).unwrap_err();
            assert_eq!(d.code.id, "T0089");
            let key = format!("parity.max_{}_mse", policy.name().replace('-', "_"));
            assert!(format!("{d:?}").contains(&key), "{d:?}");
        }
    }
}
