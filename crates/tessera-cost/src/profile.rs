//! Executor profiles: the efficiency that an executor reaches on a device. The executor matters as
//! much as the hardware, so the same cluster with another profile is priced differently.
//!
//! Curves are shares of the device's own peaks, so that a profile carries over from one device to
//! another. Numbers that do not carry over are given per device family.

mod library;
mod overlap;
mod toml_format;

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, closest_name};
use tessera_mesh::Precision;

pub use crate::codes::T1105;
use crate::executor_traits::ExecutorTraits;

pub use library::{AlgorithmLines, CollectiveLibrary, CostLine};
pub use overlap::{OverlapTraits, TpOverlap};

/// Jobs for which a profile may be validated: training steps, prompts, decoded tokens, and video by
/// the chunk.
pub const JOBS: [&str; 4] = ["training", "prefill", "decode", "stream"];

/// How efficiently an executor uses devices: its traits, its curves, and what validated them.
#[derive(Debug, Clone, PartialEq)]
pub struct Profile {
    /// Name that selects the profile, for example `torch-2.11`.
    pub name: String,
    /// One-line description for people, for example `No overhead: a floor`.
    pub title: String,
    /// Half-width of an estimate's error bar, as a share, from comparisons with measurements.
    pub error_share: f64,
    /// Jobs of [`JOBS`] for which estimates were compared with measurements.
    pub validated_jobs: Vec<String>,
    /// Precision, fusions and power limit of the executor; the same for all device families.
    pub executor: ExecutorTraits,
    /// Curves on devices whose family `families` does not list.
    pub base: Curves,
    /// Curves by device family, for the families that do not use `base`.
    pub families: BTreeMap<String, Curves>,
}

/// Efficiency curves of an executor on one device family.
#[derive(Debug, Clone, PartialEq)]
pub struct Curves {
    /// GEMM curves by precision, in the order of [`Precision::ALL`]. A precision that the file
    /// omits has the curve of the next wider precision that the file names.
    pub gemms: [GemmCurve; 4],
    /// Efficiency of attention by the number of queries and keys.
    pub attention: AttentionCurve,
    /// Efficiency of the grouped GEMMs of experts, by the rows of one expert.
    pub grouped_gemm: GroupedGemmCurve,
    /// Efficiency of memory-bound kernels, and the memory that the executor reserves.
    pub memory: MemoryCurve,
    /// Kernel launch overhead, and the slowdown of compute by transfers in flight.
    pub host: HostCosts,
    /// Constant costs of the collective library, by collective and algorithm.
    pub library: CollectiveLibrary,
    /// Transfers that overlap compute, and the accumulation of weight gradients.
    pub overlap: OverlapTraits,
}

/// Efficiency of an `m·k` by `k·n` GEMM relative to the device's peak: `min(max_efficiency, share ·
/// m/(m+m_half) · n/(n+n_half) · k/(k+k_half))`.
#[derive(Debug, Clone, PartialEq)]
pub struct GemmCurve {
    /// Share of the device's peak that no GEMM exceeds, whatever its shape.
    pub max_efficiency: f64,
    /// Factor before the three saturation terms: the efficiency of a huge GEMM, unless
    /// `max_efficiency` is lower.
    pub share: f64,
    /// Rows at which half the efficiency is reached.
    pub m_half: f64,
    /// Output features at which half the efficiency is reached.
    pub n_half: f64,
    /// Input features at which half the efficiency is reached.
    pub k_half: f64,
    /// Fixed device time of every GEMM, to which the time for its FLOPs or bytes is added.
    pub start_ns: f64,
    /// Origin of the numbers, as free text that each GEMM table of a file must state.
    pub source: String,
}

/// Efficiency of attention relative to the device's peak: `share · q/(q+queries_half) ·
/// k/(k+keys_half)`, with q the queries of all heads and k the keys.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionCurve {
    /// Efficiency that attention approaches as queries and keys grow, as a share of the peak.
    pub share: f64,
    /// Value of q, queries times heads, at which its factor is one half.
    pub queries_half: f64,
    /// Value of k, the number of keys, at which its factor is one half.
    pub keys_half: f64,
    /// Share of the memory bandwidth while few queries read keys and values.
    pub memory_share: f64,
    /// Fixed device time of every attention, to which the time for its FLOPs or bytes is added.
    pub start_ns: f64,
    /// Whether training writes scores to memory and keeps them for the backward pass, as unfused
    /// attention does.
    pub stores_scores: bool,
    /// Origin of the numbers, as free text that a file must state.
    pub source: String,
}

/// Efficiency of grouped GEMMs of experts: the GEMM's own `share` and `k_half`, times `share ·
/// rows/(rows+rows_half)`.
#[derive(Debug, Clone, PartialEq)]
pub struct GroupedGemmCurve {
    /// Efficiency relative to one GEMM of the same total size.
    pub share: f64,
    /// Rows of one expert at which half the efficiency is reached.
    pub rows_half: f64,
    /// Bandwidth of reading weights for few rows, as a share of a plain memory-bound kernel's
    /// bandwidth.
    pub memory_share: f64,
    /// Fixed device time of every grouped GEMM, to which the time for its FLOPs or bytes is added.
    pub start_ns: f64,
    /// Origin of the numbers, as free text that a file must state.
    pub source: String,
}

/// Efficiency of memory-bound kernels.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryCurve {
    /// Share of the bandwidth that a large kernel reaches.
    pub share: f64,
    /// Fixed device time of every memory-bound kernel, to which the time for its bytes is added.
    pub start_ns: f64,
    /// Bytes of device memory that the executor and its libraries reserve.
    pub reserved_bytes: f64,
    /// Bytes of a kernel's inputs that caches hold from the previous kernel; 0 without cache reuse.
    pub cached_bytes: f64,
    /// Rate of reading the `cached_bytes` relative to the rate of device memory; at least 1.
    pub cached_speedup: f64,
    /// Origin of the numbers, as free text that a file must state.
    pub source: String,
}

/// Host overheads, and the slowdown of streams by each other.
#[derive(Debug, Clone, PartialEq)]
pub struct HostCosts {
    /// Host time to launch one kernel.
    pub launch_ns: f64,
    /// Whether launches are captured once and replayed (CUDA graphs), so that they cost the host
    /// nothing.
    pub captured: bool,
    /// Slowdown of compute while a transfer is in flight; at least 1.
    pub contention: f64,
    /// Origin of the numbers, as free text that a file must state.
    pub source: String,
}

/// Name and file of every built-in profile.
const ENTRIES: &[(&str, &str)] = &[
    ("torch-2.11", include_str!("../profiles/torch-2.11.toml")),
    ("megatron", include_str!("../profiles/megatron.toml")),
    ("tessera", include_str!("../profiles/tessera.toml")),
    ("ideal", include_str!("../profiles/ideal.toml")),
];

impl Profile {
    /// Returns the names of the built-in profiles.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> {
        ENTRIES.iter().map(|(name, _)| *name)
    }

    /// Returns the built-in profile with this name.
    #[must_use]
    pub fn builtin(name: &str) -> Option<Profile> {
        let (name, text) = ENTRIES.iter().find(|(n, _)| *n == name)?;
        // A test parses every entry, so parsing does not fail here.
        Profile::parse(name, text).ok()
    }

    /// Returns a built-in profile, or an error that lists the names.
    ///
    /// # Errors
    /// T1105.
    pub fn find_builtin(name: &str) -> Result<Profile, Box<Diagnostic>> {
        Profile::builtin(name).ok_or_else(|| {
            let mut d = Diagnostic::error(&T1105, format!("no profile is called `{name}`"))
                .with_hint(format!("profiles: {}", Profile::builtin_names().collect::<Vec<_>>().join(", ")));
            if let Some(n) = closest_name(name, Profile::builtin_names()) {
                d = d.with_note(format!("closest: `{n}`"));
            }
            Box::new(d)
        })
    }

    /// Returns whether the profile was compared with measurements of a job, one of [`JOBS`].
    #[must_use]
    pub fn is_validated_for(&self, job: &str) -> bool {
        self.validated_jobs.iter().any(|v| v == job)
    }

    /// Returns the curves of a device family; `base` if the family has none of its own.
    #[must_use]
    pub fn curves_for(&self, family: &str) -> &Curves {
        self.families.get(family).unwrap_or(&self.base)
    }
}

impl Curves {
    /// Returns the GEMM curve of a precision.
    #[must_use]
    pub fn gemm_curve(&self, p: Precision) -> &GemmCurve {
        &self.gemms[p as usize]
    }
}

impl GemmCurve {
    /// Returns the share of the peak that a GEMM of `m` rows, `n` output and `k` input features
    /// reaches, 0 to 1.
    #[must_use]
    pub fn efficiency(&self, m: f64, n: f64, k: f64) -> f64 {
        let at = |x: f64, half: f64| if x.is_finite() { x / (x + half) } else { 1.0 };
        (self.share * at(m, self.m_half) * at(n, self.n_half) * at(k, self.k_half)).min(self.max_efficiency)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_profile_round_trips() {
        for (name, text) in ENTRIES {
            let p = Profile::parse(name, text).unwrap_or_else(|d| panic!("{name}: {d:?}"));
            assert_eq!(p.name, *name);
            let printed = p.to_toml();
            let again = Profile::parse(name, &printed).unwrap_or_else(|d| panic!("{name}: {d:?}\n{printed}"));
            assert_eq!(p, again, "{name}");
            assert_eq!(printed, again.to_toml(), "{name}");
        }
    }

    #[test]
    fn a_family_changes_what_it_names_and_keeps_the_rest() {
        let p = Profile::builtin("torch-2.11").unwrap();
        let (base, blackwell) = (p.curves_for("hopper"), p.curves_for("blackwell"));
        assert_eq!(base, &p.base);
        assert_ne!(base.library, blackwell.library);
        assert_ne!(base.gemm_curve(Precision::Bf16), blackwell.gemm_curve(Precision::Bf16));
        assert_eq!(base.attention, blackwell.attention);
        assert_eq!(p.curves_for("unheard of"), &p.base);
    }

    #[test]
    fn curves_out_of_range_are_refused_together() {
        let text = ENTRIES[0].1;
        let bad =
            text.replacen("\nshare = ", "\nshare = -", 1).replacen("contention = ", "contention = -", 1);
        let ids: Vec<_> = Profile::parse("p.toml", &bad).unwrap_err().iter().map(|d| d.code.id).collect();
        assert_eq!(ids, ["T1106", "T1106"]);
        let unknown = text.replacen("m_half", "mhalf", 1);
        let ids: Vec<_> = Profile::parse("p.toml", &unknown).unwrap_err().iter().map(|d| d.code.id).collect();
        assert_eq!(ids, ["T0003", "T0002"]);
        let d = Profile::find_builtin("torch-2.1").unwrap_err();
        assert_eq!(d.notes, ["closest: `torch-2.11`"]);
    }
}
