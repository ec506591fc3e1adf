//! What a seal stands for: the properties that were proved of a plan, and the parts that its digest covers.

use std::fmt;

use tessera_base::Code;
use tessera_ir::canonical_text;

use crate::codes::{
    T0301, T0307, T0311, T0312, T0313, T0316, T0317, T0319, T0321, T0325, T0327, T0329, T0330, T0332, T0343,
    T0346, T0347, T0348,
};
use crate::signature::to_hex;
use crate::{SealedPlan, collective_lines};

/// A property that [`crate::seal`] proves of every plan that it returns.
#[derive(Debug, Clone)]
pub struct ProvedProperty {
    /// Short name, such as `no deadlock`.
    pub name: &'static str,
    /// The property, with the numbers of this plan.
    pub statement: String,
    /// The main codes of plans without it.
    pub codes: Vec<&'static Code>,
}

impl fmt::Display for ProvedProperty {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let codes: Vec<&str> = self.codes.iter().map(|code| code.id).collect();
        write!(f, "{}: {} ({})", self.name, self.statement, codes.join(", "))
    }
}

impl SealedPlan {
    /// Returns the properties that were proved when the plan was sealed.
    #[must_use]
    pub fn list_properties(&self) -> Vec<ProvedProperty> {
        let (ranks, roles, phases) = (self.mesh().world_size(), self.roles().len(), self.phase_names().len());
        let of_roles =
            || self.phase_names().iter().flat_map(|phase| self.roles().iter().map(move |r| (phase, r)));
        let collectives: u64 = of_roles()
            .filter_map(|(phase, role)| {
                Some((self.rank_program(phase, *role.ranks.first()?)?, role.ranks.len()))
            })
            .map(|(program, members)| collective_lines(program).len() as u64 * members as u64)
            .sum();
        let slots: usize = of_roles()
            .filter_map(|(phase, role)| self.rank_slots(phase, *role.ranks.first()?))
            .map(|slots| slots.slot_bytes.len())
            .sum();
        let property = |name, statement, codes| ProvedProperty { name, statement, codes };
        let mut properties = vec![
            property(
                "complete",
                format!("each of {ranks} ranks has one of {roles} roles, and each role a program in every one of {phases} phases"),
                vec![&T0329, &T0330, &T0332],
            ),
            property(
                "well formed",
                "every op obeys its rule, every layout follows from those of the sources, and no partial sum leaves a program"
                    .to_string(),
                vec![&T0317, &T0319, &T0321],
            ),
            property(
                "matching collectives",
                format!("the members of every group issue the same of {collectives} collectives in the same order"),
                vec![&T0301, &T0307],
            ),
            property(
                "no deadlock",
                "no ranks wait for one another in a cycle, and one launch order serves all groups".to_string(),
                vec![&T0311, &T0312],
            ),
            property(
                "no race",
                "every issued collective is waited for once, and data crosses streams behind an event".to_string(),
                vec![&T0313, &T0316],
            ),
            property(
                "no drift",
                "ranks that must hold one value compute it from the same values by the same ops".to_string(),
                vec![&T0343],
            ),
            property(
                "memory",
                format!("every temporary has room in one of {slots} slots, and no two that live at once share bytes"),
                vec![&T0325, &T0327],
            ),
        ];
        properties.extend(self.hosts().map(|stated| {
            property(
                "hosts",
                format!(
                    "every rank is on one of {} hosts, {} groups have the path of their members' hosts, and no op needs memory of another host",
                    stated.hosts.hosts().len(),
                    stated.groups.len()
                ),
                vec![&T0346, &T0347, &T0348],
            )
        }));
        properties
    }

    /// Returns the parts that the digest covers, by name. Plans have one digest if and only if these are equal, so the
    /// parts that differ say why two plans do.
    #[must_use]
    pub fn covered_parts(&self) -> Vec<(String, String)> {
        let mut parts = vec![
            ("mapping".to_string(), self.mapping_text().to_string()),
            ("mesh".to_string(), self.mesh().to_string()),
            ("devices".to_string(), self.rank_map().devices().join(", ")),
        ];
        if let Some(stated) = self.hosts() {
            let domains: Vec<String> = stated.hosts.hosts().iter().map(|h| h.domain.to_string()).collect();
            parts.push((
                "hosts".to_string(),
                format!("{}; switch domains {}", stated.hosts.describe(), domains.join(" ")),
            ));
            parts.extend(
                stated
                    .groups
                    .iter()
                    .map(|g| (format!("path of {}", g.communicator), g.path.name().to_string())),
            );
        }
        for role in self.roles() {
            let ranks: Vec<String> = role.ranks.iter().map(ToString::to_string).collect();
            parts.push((format!("ranks of {}", role.role), ranks.join(" ")));
        }
        for (call, phases) in self.calls() {
            parts.push((format!("call {call}"), phases.join(", ")));
        }
        for phase in self.phase_names() {
            for role in self.roles() {
                let Some(rank) = role.ranks.first() else { continue };
                let (Some(program), Some(slots)) =
                    (self.rank_program(phase, *rank), self.rank_slots(phase, *rank))
                else {
                    continue;
                };
                let digest = blake3::hash(canonical_text(program).as_bytes());
                parts.push((format!("program @{phase} of {}", role.role), to_hex(digest.as_bytes())));
                let slots = format!("{:?} bytes, value slots {:?}", slots.slot_bytes, slots.value_slots);
                let digest = blake3::hash(slots.as_bytes());
                parts.push((format!("memory of @{phase} of {}", role.role), to_hex(digest.as_bytes())));
            }
        }
        parts.sort();
        parts
    }
}
