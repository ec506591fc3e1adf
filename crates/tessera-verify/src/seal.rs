//! The sealed plan: everything a run may execute, judged, with one digest.

use std::collections::BTreeSet;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{Bundle, Phase, Program, RoleRanks, Slots, canonical};
use tessera_mesh::{Mesh, Rank, RankMap};

use crate::memory::{check_limits, check_slots, of_role};
use crate::phase::{T0329, check_roles};
use crate::trace::hex;
use crate::{Census, Limits, RoleMemory, Verified, graph, judge};

/// A call that lists a phase which is not there.
pub static T0330: Code = Code {
    id: "T0330",
    title: "call lists an unknown phase",
    page: "A call is a list of phases that the plan has programs for; the seal admits these calls and no others. A name \
in the list that no phase has would be noticed only when the request comes, on every rank at once.\n\n\
Correct the name or add the phase.",
};

/// Version of what the digest covers; part of it.
const DIGEST_VERSION: &str = "tessera sealed plan 1";

/// Judges a bundle and seals it.
///
/// # Errors
/// Everything found: T02xx and T03xx. Ranks are compared only where each program is right by itself.
pub fn seal(bundle: Bundle, limits: &Limits) -> Result<SealedPlan, Diagnostics> {
    let mut out = check_frame(&bundle);
    if !out.is_empty() {
        return Err(out);
    }
    for phase in &bundle.phases {
        let found = judge(&bundle.mesh, &bundle.roles, phase);
        if found.is_empty() {
            out.extend(phase.programs.iter().zip(&phase.memory).flat_map(|(p, s)| check_slots(p, s)));
            if limits.graph_mixing_off {
                out.extend(phase.programs.iter().flat_map(graph::check_graph_mixing));
            }
        }
        out.extend(found);
    }
    if !out.is_empty() {
        return Err(out);
    }
    let mut memory = Vec::new();
    for (i, role) in bundle.roles.iter().enumerate() {
        let (needs, found) = of_role(&bundle.phases, i);
        out.extend(found);
        out.extend(check_limits(&role.role, &needs, limits));
        memory.push(needs);
    }
    if out.is_empty() { Ok(SealedPlan::of(bundle, memory)) } else { Err(out) }
}

/// A plan that was judged as a whole, in this process. It cannot be changed.
#[derive(Debug, Clone)]
pub struct SealedPlan {
    digest: [u8; 32],
    mesh: Mesh,
    rank_map: RankMap,
    roles: Vec<RoleRanks>,
    role_of: Vec<usize>,
    names: Vec<String>,
    /// Per phase, per role.
    phases: Vec<Vec<Part>>,
    calls: Vec<(String, Vec<String>)>,
    mapping: String,
    /// Per role.
    memory: Vec<RoleMemory>,
}

#[derive(Debug, Clone)]
struct Part {
    program: Verified<Program>,
    slots: Slots,
    census: Census,
}

impl SealedPlan {
    fn of(bundle: Bundle, memory: Vec<RoleMemory>) -> SealedPlan {
        let digest = digest(&bundle);
        let mut role_of = vec![0; bundle.mesh.ranks() as usize];
        for (i, role) in bundle.roles.iter().enumerate() {
            role.ranks.iter().for_each(|r| role_of[r.0 as usize] = i);
        }
        let part = |(program, slots): (Program, Slots)| Part {
            census: Census::of(&program),
            program: Verified::mark(program),
            slots,
        };
        SealedPlan {
            digest,
            mesh: bundle.mesh,
            rank_map: bundle.rank_map,
            roles: bundle.roles,
            role_of,
            names: bundle.phases.iter().map(|p| p.name.clone()).collect(),
            phases: bundle
                .phases
                .into_iter()
                .map(|p| p.programs.into_iter().zip(p.memory).map(part).collect())
                .collect(),
            calls: bundle.calls,
            mapping: bundle.mapping,
            memory,
        }
    }

    /// BLAKE3 over the canonical text of the whole plan. Names of values, source positions and the order in
    /// which roles, phases and calls are listed do not enter.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// The digest as 64 hex digits.
    #[must_use]
    pub fn digest_hex(&self) -> String {
        hex(&self.digest)
    }

    /// Mesh.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Devices in rank order.
    #[must_use]
    pub fn rank_map(&self) -> &RankMap {
        &self.rank_map
    }

    /// Roles and their ranks.
    #[must_use]
    pub fn roles(&self) -> &[RoleRanks] {
        &self.roles
    }

    /// Index into [`SealedPlan::roles`] of a rank's role.
    #[must_use]
    pub fn role_of(&self, rank: Rank) -> Option<usize> {
        self.role_of.get(rank.0 as usize).copied()
    }

    /// Names of the phases, in the order of the plan.
    #[must_use]
    pub fn phases(&self) -> &[String] {
        &self.names
    }

    /// Calls that may be made: name and phases in order.
    #[must_use]
    pub fn calls(&self) -> &[(String, Vec<String>)] {
        &self.calls
    }

    /// The mapping's canonical text.
    #[must_use]
    pub fn mapping(&self) -> &str {
        &self.mapping
    }

    /// What a rank runs in a phase. `None` for a phase or rank that the plan does not have.
    #[must_use]
    pub fn program(&self, phase: &str, rank: Rank) -> Option<&Verified<Program>> {
        Some(&self.part(phase, rank)?.program)
    }

    /// Where a rank keeps the temporaries of a phase.
    #[must_use]
    pub fn slots(&self, phase: &str, rank: Rank) -> Option<&Slots> {
        Some(&self.part(phase, rank)?.slots)
    }

    /// The collectives of a rank in a phase.
    #[must_use]
    pub fn census(&self, phase: &str, rank: Rank) -> Option<Census> {
        Some(self.part(phase, rank)?.census)
    }

    /// Memory that a rank needs.
    #[must_use]
    pub fn memory(&self, rank: Rank) -> Option<RoleMemory> {
        self.memory.get(self.role_of(rank)?).copied()
    }

    fn part(&self, phase: &str, rank: Rank) -> Option<&Part> {
        let at = self.names.iter().position(|n| n == phase)?;
        self.phases[at].get(self.role_of(rank)?)
    }
}

/// The parts of a bundle line up.
fn check_frame(b: &Bundle) -> Diagnostics {
    let mut out = check_roles(&b.mesh, &b.roles);
    let mut bad = |message: String| out.push(Diagnostic::error(&T0329, message));
    if b.rank_map.devices().len() != b.mesh.ranks() as usize {
        bad(format!("{} devices for {} ranks", b.rank_map.devices().len(), b.mesh.ranks()));
    }
    let mut names = BTreeSet::new();
    for phase in &b.phases {
        if !names.insert(&phase.name) {
            bad(format!("two phases are called {}", phase.name));
        }
        for (what, n) in [("programs", phase.programs.len()), ("memory plans", phase.memory.len())] {
            if n != b.roles.len() {
                bad(format!("phase {} has {n} {what} for {} roles", phase.name, b.roles.len()));
            }
        }
    }
    let mut calls = BTreeSet::new();
    for (name, _) in &b.calls {
        if !calls.insert(name) {
            bad(format!("two calls are named {name}"));
        }
    }
    for (name, phases) in &b.calls {
        for phase in phases.iter().filter(|p| !names.contains(p)) {
            let known = b.phases.iter().map(|p| p.name.as_str());
            let d = Diagnostic::error(
                &T0330,
                format!("call {name} lists the phase {phase}, which the plan does not have"),
            );
            out.push(match tessera_base::nearest(phase, known) {
                Some(n) => d.hint(format!("did you mean {n}?")),
                None => d,
            });
        }
    }
    out
}

/// Canonical bytes of the plan: every field by its length, lists sorted by name.
fn digest(b: &Bundle) -> [u8; 32] {
    let mut fields = Fields(blake3::Hasher::new());
    fields.text(DIGEST_VERSION);
    fields.text(&b.mapping);
    fields.text(&b.mesh.to_string());
    fields.number(b.rank_map.devices().len() as u64);
    b.rank_map.devices().iter().for_each(|d| fields.text(d));
    let mut roles: Vec<(usize, &RoleRanks)> = b.roles.iter().enumerate().collect();
    roles.sort_by_key(|(_, r)| &r.role);
    fields.number(roles.len() as u64);
    for (_, role) in &roles {
        fields.text(&role.role);
        fields.number(role.ranks.len() as u64);
        role.ranks.iter().for_each(|r| fields.number(u64::from(r.0)));
    }
    let mut calls: Vec<_> = b.calls.iter().collect();
    calls.sort();
    fields.number(calls.len() as u64);
    for (name, phases) in calls {
        fields.text(name);
        fields.number(phases.len() as u64);
        phases.iter().for_each(|p| fields.text(p));
    }
    let mut phases: Vec<&Phase> = b.phases.iter().collect();
    phases.sort_by_key(|p| &p.name);
    fields.number(phases.len() as u64);
    for phase in phases {
        fields.text(&phase.name);
        for (i, _) in &roles {
            fields.text(&canonical(&phase.programs[*i]));
            let slots = &phase.memory[*i];
            fields.number(slots.bytes.len() as u64);
            slots.bytes.iter().for_each(|n| fields.number(*n));
            fields.number(slots.of.len() as u64);
            slots.of.iter().for_each(|s| fields.number(s.map_or(0, |s| u64::from(s) + 1)));
        }
    }
    *fields.0.finalize().as_bytes()
}

struct Fields(blake3::Hasher);

impl Fields {
    fn number(&mut self, n: u64) {
        self.0.update(&n.to_le_bytes());
    }

    fn text(&mut self, s: &str) {
        self.number(s.len() as u64);
        self.0.update(s.as_bytes());
    }
}
