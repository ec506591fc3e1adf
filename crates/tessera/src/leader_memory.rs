//! The memory of the leader's own programs, which run beside the calls: the text encoder, and the phases of
//! pixels that no call contains.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_ir::{Opcode, Program};
use tessera_mesh::Rank;

use crate::plan::{LeaderPart, Plan, has_cpu_variant, leader_phases};

/// Planned bytes of the leader's own programs on one backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct LeaderMemory {
    /// Bytes of distinct weights.
    #[serde(rename = "weights_bytes")]
    pub weights: u64,
    /// Bytes of distinct buffers: the histories of a VAE.
    #[serde(rename = "buffers_bytes")]
    pub buffers: u64,
    /// Bytes of the slots of each backend's largest phase.
    #[serde(rename = "temporaries_bytes")]
    pub temporaries: u64,
}

impl LeaderMemory {
    /// Sums all programs that the leader runs beside the calls, with those of the encoders of text and of an
    /// input video for a CPU. The backends of different parts share no memory, so the temporaries of each count.
    #[must_use]
    pub fn from_plan(plan: &Plan) -> LeaderMemory {
        LeaderMemory::from_phases(plan, |name| !has_cpu_variant(name))
    }

    /// Sums the leader's programs of the phases that `is_counted` accepts.
    pub(crate) fn from_phases(plan: &Plan, is_counted: impl Fn(&str) -> bool) -> LeaderMemory {
        let (mut weights, mut buffers) = (BTreeMap::new(), BTreeMap::new());
        let mut temporaries = BTreeMap::new();
        for name in leader_phases(&plan.sealed).filter(|name| is_counted(name)) {
            let (Some(p), Some(slots)) =
                (plan.sealed.rank_program(name, Rank(0)), plan.sealed.rank_slots(name, Rank(0)))
            else {
                continue;
            };
            weights.extend(weight_bytes(p));
            buffers.extend(p.buffers.iter().map(|b| (b.name.as_str(), b.ty.byte_size().0)));
            let bytes = slots.slot_bytes.iter().copied().fold(0, u64::saturating_add);
            let most: &mut u64 = temporaries.entry(LeaderPart::from_phase(name)).or_default();
            *most = bytes.max(*most);
        }
        let [weights, buffers] =
            [weights, buffers].map(|of: BTreeMap<&str, u64>| of.into_values().fold(0, u64::saturating_add));
        LeaderMemory { weights, buffers, temporaries: temporaries.into_values().fold(0, u64::saturating_add) }
    }

    /// Returns the sum of all fields.
    #[must_use]
    pub fn total_bytes(&self) -> u64 {
        [self.weights, self.buffers, self.temporaries].into_iter().fold(0, u64::saturating_add)
    }
}

fn weight_bytes(p: &Program) -> impl Iterator<Item = (&str, u64)> {
    let weights = p.ops.iter().filter(|op| op.opcode == Opcode::Weight);
    weights.flat_map(|op| Some((op.name.as_deref()?, p.type_of(*op.results.first()?).byte_size().0)))
}
