//! The cache of autotuning results for large GEMMs, stored beside compiled kernels and reused by
//! later runs. [`autotune`](crate::gemm::autotune) makes the choices.

use std::sync::Arc;

use cudarc::cublaslt::sys::cublasLtMatmulAlgo_t;
use cudarc::driver::sys::CUdevice_attribute as Attribute;

use super::shape::{GemmKernel, GemmShape, Sm90Candidate};
use crate::compile::{KernelCache, cache_file_name};
use crate::driver::Context;
use crate::dylib::CublasLt;

/// Choices of GEMM implementations by this and earlier processes, stored in the kernel cache.
#[derive(Debug)]
pub(crate) struct AutotuneCache {
    store: Option<Arc<dyn KernelCache>>,
    /// Everything constant that timings depend on: the device's attributes and the cuBLASLt
    /// version.
    environment: String,
}

impl AutotuneCache {
    pub(crate) fn new(
        store: Option<Arc<dyn KernelCache>>,
        context: &Context,
        lt: &CublasLt,
    ) -> AutotuneCache {
        use Attribute as A;
        let attributes = [
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
            A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
            A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE,
            A::CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH,
            A::CU_DEVICE_ATTRIBUTE_CLOCK_RATE,
            A::CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE,
        ];
        let attributes = attributes.map(|which| context.device_attribute(which).ok());
        AutotuneCache { store, environment: format!("{attributes:?} {}", lt.query_version()) }
    }

    pub(crate) fn load_choice(&self, key: &str) -> Option<GemmChoice> {
        let text = self.store.as_ref()?.load(key)?;
        GemmChoice::from_text(std::str::from_utf8(&text).ok()?)
    }

    pub(crate) fn save_choice(&self, key: &str, choice: GemmChoice) {
        if let Some(kept) = &self.store {
            kept.save(key, choice.to_text().as_bytes());
        }
    }

    /// Returns the cache file name of a shape's choice: a hash of the shape, the text of the tuning
    /// policy and all candidates.
    pub(crate) fn cache_key(
        &self,
        s: &GemmShape,
        policy: &str,
        listed: &[cublasLtMatmulAlgo_t],
        sm90: Option<&Sm90Candidate>,
    ) -> String {
        let mut parts = vec![self.environment.clone(), format!("{s:?} {policy}")];
        parts.extend(listed.iter().map(|algo| format!("{:x?}", algo.data)));
        if let Some(sm90) = sm90 {
            parts.extend([format!("{sm90:?}{:?}", sm90.tile.compile_defines()), sm90.tile.kernel_source()]);
        }
        cache_file_name("gemm", parts.iter().map(String::as_str), "choice")
    }
}

/// The implementation chosen for a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum GemmChoice {
    /// cuBLASLt with the candidate at this index: the listed algorithms come first, then those with
    /// the other CTA swizzling.
    CublasLt(usize),
    Sm90,
}

impl GemmChoice {
    fn to_text(self) -> String {
        match self {
            GemmChoice::CublasLt(i) => format!("library {i}\n"),
            GemmChoice::Sm90 => "own\n".to_string(),
        }
    }

    fn from_text(text: &str) -> Option<GemmChoice> {
        match text.trim_end() {
            "own" => Some(GemmChoice::Sm90),
            other => other.strip_prefix("library ")?.parse().ok().map(GemmChoice::CublasLt),
        }
    }

    /// Returns the chosen kernel, or `None` if the candidates do not contain it.
    pub(crate) fn to_kernel(
        self,
        candidates: &[GemmKernel],
        sm90: Option<&Sm90Candidate>,
    ) -> Option<GemmKernel> {
        match self {
            GemmChoice::CublasLt(i) => candidates.get(i).copied(),
            GemmChoice::Sm90 => sm90.map(|r| GemmKernel::Sm90(r.tile)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    use crate::gemm::shape::{GemmEpilogue, GemmTile, VIDEO_GEMM};

    #[test]
    fn choices_round_trip_as_text() {
        for choice in [GemmChoice::Sm90, GemmChoice::CublasLt(0), GemmChoice::CublasLt(17)] {
            assert_eq!(GemmChoice::from_text(&choice.to_text()), Some(choice));
        }
        for text in ["", "library", "library -1", "library 1 2", "OWN"] {
            assert_eq!(GemmChoice::from_text(text), None, "{text:?}");
        }
        // A choice that refers to another candidate list or to a missing kernel.
        assert!(GemmChoice::CublasLt(3).to_kernel(&[], None).is_none());
        assert!(GemmChoice::Sm90.to_kernel(&[], None).is_none());
    }

    #[test]
    fn cache_keys_depend_on_device_shape_and_candidates() {
        let choices = |here: &str| AutotuneCache { store: None, environment: here.into() };
        let algo = |n: u64| cublasLtMatmulAlgo_t { data: [n; 8] };
        let cut = |width| GemmTile { tile_rows: width, shares_columns: true, epilogue: GemmEpilogue::Plain };
        let rival = |width, spared_bytes| Sm90Candidate { tile: cut(width), saved_copy_bytes: spared_bytes };
        let fewer = GemmShape { rows: 2340, ..VIDEO_GEMM };
        let keys = [
            choices("a").cache_key(&VIDEO_GEMM, "p", &[algo(1), algo(2)], None),
            choices("b").cache_key(&VIDEO_GEMM, "p", &[algo(1), algo(2)], None),
            choices("a").cache_key(&VIDEO_GEMM, "q", &[algo(1), algo(2)], None),
            choices("a").cache_key(&fewer, "p", &[algo(1), algo(2)], None),
            choices("a").cache_key(&VIDEO_GEMM, "p", &[algo(2), algo(1)], None),
            choices("a").cache_key(&VIDEO_GEMM, "p", &[algo(1), algo(2)], Some(&rival(184, 0))),
            choices("a").cache_key(&VIDEO_GEMM, "p", &[algo(1), algo(2)], Some(&rival(192, 0))),
            choices("a").cache_key(&VIDEO_GEMM, "p", &[algo(1), algo(2)], Some(&rival(184, 8))),
        ];
        let distinct: BTreeSet<&String> = keys.iter().collect();
        assert_eq!(distinct.len(), keys.len());
        assert_eq!(keys[0], choices("a").cache_key(&VIDEO_GEMM, "p", &[algo(1), algo(2)], None));
    }
}
