//! Experts in two tiers of memory, as a weight states it.
//!
//! A weight [experts, …] with this statement lies in host memory as a whole, and a rank holds at most `resident` of its
//! experts in fast memory. It is a statement of the weight and not of an op, because it changes no value: a program with
//! it computes what it computes without.

use tessera_base::Bytes;

use crate::Type;
use crate::attr::{Attr, Attrs};
use crate::expert_cache::EvictionPolicy;
use crate::op_table::{Opcode, views};
use crate::program::Op;

/// What a weight states of its tiers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ExpertTier {
    /// Number of the layer in its program; the weights of one layer have the same experts.
    pub layer: u64,
    /// Largest number of experts that a rank holds in fast memory.
    pub resident: u64,
    /// Number of layers before this one at which its likely experts are requested.
    pub window: u64,
    /// Which experts stay, and which are likely.
    pub policy: EvictionPolicy,
}

impl ExpertTier {
    /// Returns the attributes with which a weight states this.
    #[must_use]
    pub fn to_attrs(&self) -> Attrs {
        let attrs = [
            ("tier_layer", self.layer.into()),
            ("tier_policy", self.policy.name().into()),
            ("tier_resident", self.resident.into()),
            ("tier_window", self.window.into()),
        ];
        attrs.into_iter().map(|(name, attr): (&str, Attr)| (name.to_string(), attr)).collect()
    }

    /// Returns the number of pool slots of a rank, for a weight of which it has so many experts.
    #[must_use]
    pub fn pool_size(&self, experts: u64) -> u64 {
        self.resident.min(experts)
    }

    /// Returns the bytes of fast memory of a weight with this local type.
    #[must_use]
    pub fn resident_bytes(&self, ty: &Type) -> Bytes {
        let experts = ty.shape.first().copied().unwrap_or(0);
        let bytes = ty.byte_size().0.checked_div(experts).unwrap_or(0);
        Bytes(bytes.saturating_mul(self.pool_size(experts)))
    }
}

impl Op {
    /// Returns the tiers that a weight states; `None` for another op, and for a weight that states a part of them, which
    /// the verifier refuses.
    #[must_use]
    pub fn expert_tier(&self) -> Option<ExpertTier> {
        let v = self.tier_fields()?;
        Some(ExpertTier {
            layer: v.tier_layer?,
            resident: v.tier_resident?,
            window: v.tier_window?,
            policy: v.tier_policy?,
        })
    }

    /// Returns whether a weight states anything of tiers.
    #[must_use]
    pub fn states_tier(&self) -> bool {
        let states = |v: views::Weight| {
            let numbers = [v.tier_layer, v.tier_resident, v.tier_window];
            v.tier_policy.is_some() || numbers.iter().any(Option::is_some)
        };
        self.tier_fields().is_some_and(states)
    }

    fn tier_fields(&self) -> Option<views::Weight> {
        views::Weight::new(self).ok().filter(|_| self.opcode == Opcode::Weight)
    }

    /// Returns the bytes that the shard of a weight takes in the memory in which a rank computes: those of the experts
    /// that it holds there, or of the whole shard.
    #[must_use]
    pub fn weight_bytes(&self, ty: &Type) -> Bytes {
        self.expert_tier().map_or(ty.byte_size(), |tier| tier.resident_bytes(ty))
    }
}
