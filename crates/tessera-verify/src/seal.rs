//! The sealed plan: everything that a run may execute, verified, with one digest.

use std::collections::BTreeSet;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Bundle, GroupStatement, HostStatement, Phase, Program, RoleRanks, Slots, canonical_text};
use tessera_mesh::{Group, Mesh, Rank, RankMap};

use crate::codes::{T0329, T0330};
use crate::graph_mixing::check_graph_mixing;
use crate::hosts::check_hosts;
use crate::memory::{check_limits, check_slots, role_memory};
use crate::phase::check_roles;
use crate::signature::to_hex;
use crate::{CollectiveDigest, DeviceLimits, RoleMemory, Verified, verify_phase};

/// Version of the digest's contents; part of the digest.
const DIGEST_VERSION: &str = "tessera sealed plan 1";

/// Verifies a bundle and seals it.
///
/// # Errors
/// All diagnostics found, with codes T02xx and T03xx. Programs are compared across ranks only if
/// each is correct by itself.
pub fn seal(bundle: Bundle, limits: &DeviceLimits) -> Result<SealedPlan, Diagnostics> {
    let mut out = check_bundle(&bundle);
    if !out.is_empty() {
        return Err(out);
    }
    for phase in &bundle.phases {
        let found = verify_phase(&bundle.mesh, &bundle.roles, phase);
        if found.is_empty() {
            out.extend(phase.programs.iter().zip(&phase.slots).flat_map(|(p, s)| check_slots(p, s)));
            if limits.graph_mixing_off {
                out.extend(phase.programs.iter().flat_map(check_graph_mixing));
            }
        }
        out.extend(found);
    }
    if !out.is_empty() {
        return Err(out);
    }
    out.extend(check_hosts(&bundle));
    let mut memory = Vec::new();
    for (i, role) in bundle.roles.iter().enumerate() {
        let in_calls =
            |phase: &str| bundle.calls.iter().any(|(_, of_call)| of_call.iter().any(|p| p == phase));
        let (needs, found) = role_memory(&bundle.phases, i, in_calls);
        out.extend(found);
        out.extend(check_limits(&role.role, &needs, limits));
        memory.push(needs);
    }
    if out.is_empty() { Ok(SealedPlan::new(bundle, memory)) } else { Err(out) }
}

/// A plan that this process verified as a whole. It is immutable.
#[derive(Debug, Clone)]
pub struct SealedPlan {
    digest: [u8; 32],
    mesh: Mesh,
    rank_map: RankMap,
    hosts: Option<HostStatement>,
    roles: Vec<RoleRanks>,
    role_of: Vec<usize>,
    phase_names: Vec<String>,
    /// Programs by phase, in the order of `phase_names`, then by role, in the order of `roles`.
    phases: Vec<Vec<SealedProgram>>,
    calls: Vec<(String, Vec<String>)>,
    mapping: String,
    /// Bytes of weights, buffers, inputs and temporaries of one rank, per role.
    memory: Vec<RoleMemory>,
}

#[derive(Debug, Clone)]
struct SealedProgram {
    program: Verified<Program>,
    slots: Slots,
    collectives: CollectiveDigest,
}

impl SealedPlan {
    fn new(bundle: Bundle, memory: Vec<RoleMemory>) -> SealedPlan {
        let digest = bundle_digest(&bundle);
        let mut role_of = vec![0; bundle.mesh.world_size() as usize];
        for (i, role) in bundle.roles.iter().enumerate() {
            role.ranks.iter().for_each(|r| role_of[r.0 as usize] = i);
        }
        let part = |(program, slots): (Program, Slots)| SealedProgram {
            collectives: CollectiveDigest::from_program(&program),
            program: Verified::new(program),
            slots,
        };
        SealedPlan {
            digest,
            mesh: bundle.mesh,
            rank_map: bundle.rank_map,
            hosts: bundle.hosts,
            roles: bundle.roles,
            role_of,
            phase_names: bundle.phases.iter().map(|p| p.name.clone()).collect(),
            phases: bundle
                .phases
                .into_iter()
                .map(|p| p.programs.into_iter().zip(p.slots).map(part).collect())
                .collect(),
            calls: bundle.calls,
            mapping: bundle.mapping,
            memory,
        }
    }

    /// Returns the BLAKE3 digest of the whole plan's canonical text. Value names, source positions
    /// and the order in which roles, phases and calls are listed do not affect the digest.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        self.digest
    }

    /// Returns the digest as 64 hex digits.
    #[must_use]
    pub fn digest_hex(&self) -> String {
        to_hex(&self.digest)
    }

    /// Returns the mesh for which the programs were verified.
    #[must_use]
    pub fn mesh(&self) -> &Mesh {
        &self.mesh
    }

    /// Returns the devices in rank order.
    #[must_use]
    pub fn rank_map(&self) -> &RankMap {
        &self.rank_map
    }

    /// Returns the hosts of the ranks with the path of every group, if the plan states them.
    #[must_use]
    pub fn hosts(&self) -> Option<&HostStatement> {
        self.hosts.as_ref()
    }

    /// Returns the roles with their ranks; [`SealedPlan::role_of`] returns an index into this list.
    #[must_use]
    pub fn roles(&self) -> &[RoleRanks] {
        &self.roles
    }

    /// Returns the index of a rank's role in [`SealedPlan::roles`].
    #[must_use]
    pub fn role_of(&self, rank: Rank) -> Option<usize> {
        self.role_of.get(rank.0 as usize).copied()
    }

    /// Returns the names of the phases, in plan order.
    #[must_use]
    pub fn phase_names(&self) -> &[String] {
        &self.phase_names
    }

    /// Returns the permitted calls: name, and phases in order.
    #[must_use]
    pub fn calls(&self) -> &[(String, Vec<String>)] {
        &self.calls
    }

    /// Returns the canonical text of the mapping.
    #[must_use]
    pub fn mapping_text(&self) -> &str {
        &self.mapping
    }

    /// Returns the program of a rank in a phase, or `None` if the plan lacks the phase or the rank.
    #[must_use]
    pub fn rank_program(&self, phase: &str, rank: Rank) -> Option<&Verified<Program>> {
        Some(&self.sealed_program(phase, rank)?.program)
    }

    /// Lists the program of each role in each phase, by role.
    pub fn role_programs(&self) -> impl Iterator<Item = &Verified<Program>> {
        let firsts = self.roles().iter().filter_map(|role| role.ranks.first());
        firsts.flat_map(move |rank| {
            self.phase_names().iter().filter_map(move |phase| self.rank_program(phase, *rank))
        })
    }

    /// Returns the memory slots of a rank's temporaries in a phase.
    #[must_use]
    pub fn rank_slots(&self, phase: &str, rank: Rank) -> Option<&Slots> {
        Some(&self.sealed_program(phase, rank)?.slots)
    }

    /// Returns the number and digest of a rank's collectives in a phase.
    #[must_use]
    pub fn collective_digest(&self, phase: &str, rank: Rank) -> Option<CollectiveDigest> {
        Some(self.sealed_program(phase, rank)?.collectives)
    }

    /// Returns the planned device memory of a rank by use, or `None` if the plan lacks the rank.
    #[must_use]
    pub fn rank_memory(&self, rank: Rank) -> Option<RoleMemory> {
        self.memory.get(self.role_of(rank)?).copied()
    }

    fn sealed_program(&self, phase: &str, rank: Rank) -> Option<&SealedProgram> {
        let at = self.phase_names.iter().position(|n| n == phase)?;
        self.phases[at].get(self.role_of(rank)?)
    }
}

/// Checks that the components of a bundle fit together.
fn check_bundle(b: &Bundle) -> Diagnostics {
    let mut out = check_roles(&b.mesh, &b.roles);
    let mut bad = |message: String| out.push(Diagnostic::error(&T0329, message));
    if b.rank_map.devices().len() != b.mesh.world_size() as usize {
        bad(format!("{} devices for {} ranks", b.rank_map.devices().len(), b.mesh.world_size()));
    }
    let mut names = BTreeSet::new();
    for phase in &b.phases {
        if !names.insert(&phase.name) {
            bad(format!("two phases are called {}", phase.name));
        }
        for (what, n) in [("programs", phase.programs.len()), ("memory plans", phase.slots.len())] {
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
                format!("call {name} lists phase {phase}, which is not in the plan"),
            );
            out.push(match tessera_base::closest_name(phase, known) {
                Some(n) => d.with_hint(format!("did you mean {n}?")),
                None => d,
            });
        }
    }
    out
}

/// Returns the digest of the plan's canonical bytes: every field preceded by its length, lists
/// sorted by name.
fn bundle_digest(b: &Bundle) -> [u8; 32] {
    let mut fields = DigestWriter(blake3::Hasher::new());
    fields.write_text(DIGEST_VERSION);
    fields.write_text(&b.mapping);
    fields.write_text(&b.mesh.to_string());
    fields.write_number(b.rank_map.devices().len() as u64);
    b.rank_map.devices().iter().for_each(|d| fields.write_text(d));
    let mut roles: Vec<(usize, &RoleRanks)> = b.roles.iter().enumerate().collect();
    roles.sort_by_key(|(_, r)| &r.role);
    fields.write_number(roles.len() as u64);
    for (_, role) in &roles {
        fields.write_text(&role.role);
        fields.write_number(role.ranks.len() as u64);
        role.ranks.iter().for_each(|r| fields.write_number(u64::from(r.0)));
    }
    let mut calls: Vec<_> = b.calls.iter().collect();
    calls.sort();
    fields.write_number(calls.len() as u64);
    for (name, phases) in calls {
        fields.write_text(name);
        fields.write_number(phases.len() as u64);
        phases.iter().for_each(|p| fields.write_text(p));
    }
    let mut phases: Vec<&Phase> = b.phases.iter().collect();
    phases.sort_by_key(|p| &p.name);
    fields.write_number(phases.len() as u64);
    for phase in phases {
        fields.write_text(&phase.name);
        for (i, _) in &roles {
            fields.write_text(&canonical_text(&phase.programs[*i]));
            let slots = &phase.slots[*i];
            fields.write_number(slots.slot_bytes.len() as u64);
            slots.slot_bytes.iter().for_each(|n| fields.write_number(*n));
            fields.write_number(slots.value_slots.len() as u64);
            slots.value_slots.iter().for_each(|s| fields.write_number(s.map_or(0, |s| u64::from(s) + 1)));
        }
    }
    // A plan without hosts has the digest that it had before plans could state them.
    if let Some(stated) = &b.hosts {
        write_hosts(&mut fields, stated);
    }
    *fields.0.finalize().as_bytes()
}

fn write_hosts(fields: &mut DigestWriter, stated: &HostStatement) {
    fields.write_text("hosts");
    fields.write_number(stated.hosts.hosts().len() as u64);
    for host in stated.hosts.hosts() {
        fields.write_number(u64::from(host.domain));
        fields.write_number(host.ranks.len() as u64);
        host.ranks.iter().for_each(|r| fields.write_number(u64::from(r.0)));
    }
    fields.write_number(stated.groups.len() as u64);
    for GroupStatement { communicator, path } in &stated.groups {
        match communicator.group {
            Group::World => fields.write_text("world"),
            Group::Axis { axis, subgroup_size } => {
                fields.write_text(axis.name());
                fields.write_number(subgroup_size.map_or(0, u64::from));
            }
        }
        fields.write_number(u64::from(communicator.is_transfer));
        fields.write_number(communicator.members.len() as u64);
        communicator.members.iter().for_each(|r| fields.write_number(u64::from(r.0)));
        fields.write_text(path.name());
    }
}

struct DigestWriter(blake3::Hasher);

impl DigestWriter {
    fn write_number(&mut self, n: u64) {
        self.0.update(&n.to_le_bytes());
    }

    fn write_text(&mut self, s: &str) {
        self.write_number(s.len() as u64);
        self.0.update(s.as_bytes());
    }
}
