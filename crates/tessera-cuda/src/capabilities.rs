//! What a GPU offers to the kernels of this backend, which features are masked, and which kernels
//! need which features.

use std::fmt;
use std::str::FromStr;

use cudarc::driver::sys::CUdevice_attribute as Attribute;
use tessera_base::Diagnostic;

use crate::codes::T1305;
use crate::driver::{Context, CudaResult};

/// A group of instructions that only some GPUs have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GpuFeature {
    /// TMA and wgmma of compute capability 9.0.
    Hopper,
}

impl GpuFeature {
    /// All features.
    pub const ALL: [GpuFeature; 1] = [GpuFeature::Hopper];

    /// Returns the name by which a user masks the feature.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            GpuFeature::Hopper => "hopper",
        }
    }
}

/// The features that kernels must not use although the GPU may have them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct FeatureMask(Vec<GpuFeature>);

impl FeatureMask {
    /// Returns the mask of every feature.
    pub(crate) fn all() -> FeatureMask {
        FeatureMask(GpuFeature::ALL.to_vec())
    }

    /// Returns whether a feature is masked.
    #[must_use]
    pub fn contains(&self, feature: GpuFeature) -> bool {
        self.0.contains(&feature)
    }

    /// Returns whether no feature is masked.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for FeatureMask {
    type Err = Diagnostic;

    /// Parses names that commas separate; an empty text masks nothing.
    ///
    /// # Errors
    /// T1305 for an unknown name.
    fn from_str(text: &str) -> Result<FeatureMask, Diagnostic> {
        let names = text.split(',').map(str::trim).filter(|n| !n.is_empty());
        let feature = |name: &str| {
            GpuFeature::ALL.into_iter().find(|f| f.name() == name).ok_or_else(|| {
                Diagnostic::error(&T1305, format!("no feature of a GPU is called `{name}`"))
                    .with_hint(format!("known: {}", GpuFeature::ALL.map(GpuFeature::name).join(", ")))
            })
        };
        names.map(feature).collect::<Result<_, _>>().map(FeatureMask)
    }
}

impl fmt::Display for FeatureMask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.iter().map(|x| x.name()).collect::<Vec<_>>().join(","))
    }
}

/// What a GPU offers to the kernels of this backend.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Capabilities {
    /// Compute capability as (major, minor).
    pub(crate) compute: (u32, u32),
    pub(crate) multiprocessors: u32,
    pub(crate) mask: FeatureMask,
}

/// Kernels that are compiled together, with the architectures that they are written for. Everything
/// else runs on any GPU that the libraries support.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct KernelFamily {
    pub(crate) name: &'static str,
    /// The feature without which the kernels are not used.
    pub(crate) needs: Option<GpuFeature>,
    /// The architectures for which the kernels must compile.
    #[cfg_attr(not(test), allow(dead_code, reason = "read by the check that compiles all kernels"))]
    pub(crate) architectures: &'static [(u32, u32)],
}

/// wgmma exists in no other architecture.
const HOPPER_ARCHITECTURES: &[(u32, u32)] = &[(9, 0)];

pub(crate) const GEMM_FAMILY: KernelFamily =
    KernelFamily { name: "sm90 GEMM", needs: Some(GpuFeature::Hopper), architectures: HOPPER_ARCHITECTURES };
pub(crate) const CONV_FAMILY: KernelFamily = KernelFamily {
    name: "sm90 convolution",
    needs: Some(GpuFeature::Hopper),
    architectures: HOPPER_ARCHITECTURES,
};
pub(crate) const ATTENTION_FAMILY: KernelFamily = KernelFamily {
    name: "sm90 attention",
    needs: Some(GpuFeature::Hopper),
    architectures: HOPPER_ARCHITECTURES,
};

impl Capabilities {
    /// Asks the driver what a device offers.
    pub(crate) fn query(context: &Context, mask: FeatureMask) -> CudaResult<Capabilities> {
        let number = |which| context.device_attribute(which).map(|v| v.max(0) as u32);
        Ok(Capabilities {
            compute: (
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            multiprocessors: number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            mask,
        })
    }

    /// Returns whether the GPU has a feature that is not masked.
    pub(crate) fn has(&self, feature: GpuFeature) -> bool {
        let is_present = match feature {
            GpuFeature::Hopper => self.compute == (9, 0),
        };
        is_present && !self.mask.contains(feature)
    }

    /// Returns whether the kernels of a family are used.
    pub(crate) fn supports(&self, family: &KernelFamily) -> bool {
        family.needs.is_none_or(|feature| self.has(feature))
    }

    /// Returns the architecture that NVRTC compiles for. The suffix `a` enables the instructions of
    /// exactly this architecture.
    pub(crate) fn architecture(&self) -> String {
        let (major, minor) = self.compute;
        format!("sm_{major}{minor}{}", if major >= 9 { "a" } else { "" })
    }

    /// Explains why the kernels of a family are not used; `None` if they are.
    pub(crate) fn refusal(&self, family: &KernelFamily) -> Option<String> {
        let feature = family.needs.filter(|f| !self.has(*f))?;
        Some(match self.mask.contains(feature) {
            true => format!("{} is masked", feature.name()),
            false => format!("the {} needs {}", family.name, feature.name()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unknown_features_are_refused() {
        assert_eq!("".parse(), Ok(FeatureMask::default()));
        let both: FeatureMask = " hopper, ".parse().unwrap();
        assert!(both.contains(GpuFeature::Hopper) && both.to_string() == "hopper");
        let refused = "hopper,tma".parse::<FeatureMask>().unwrap_err();
        assert!(refused.code.id == "T1305" && refused.message.contains("`tma`"), "{refused:?}");
    }
}
