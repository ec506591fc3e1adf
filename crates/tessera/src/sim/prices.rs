//! Op durations of a plan's programs on a cluster, from the curves and executor traits of a
//! profile.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_cost::MachineModel;
use tessera_cost::program_cost::{ProgramEstimate, op_span};
use tessera_device::TimingModel;
use tessera_ir::{Bundle, Phase, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_plan::video::estimate_call;
use tessera_verify::SealedPlan;

use crate::plan::{Plan, is_leader_phase};
use crate::summary::PlanSummary;

/// The durations of all ops of one plan on one machine. Ranks are placed on the cluster's devices
/// in order.
#[derive(Debug, Clone)]
pub struct ClusterPrices {
    /// Op durations by phase, then by role.
    programs: BTreeMap<String, BTreeMap<String, Vec<OpPrice>>>,
    contention: f64,
    throttle_factor: f64,
    name: String,
}

/// The durations of one op, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
struct OpPrice {
    kernel_ns: u64,
    launch_ns: u64,
    /// Duration of a collective between the ranks of its role with the slowest placement.
    collective_ns: u64,
}

impl ClusterPrices {
    /// Prices every program of a plan. In a long run the power limit throttles matmuls and
    /// attention. The throttle factor is that of the estimate of the steady chunk, and follows from
    /// how busy that chunk keeps its devices.
    ///
    /// # Errors
    /// T1115 if the ranks of the estimate deadlock, which cannot happen for a sealed plan.
    pub fn from_plan(plan: &Plan, machine: &MachineModel) -> Result<ClusterPrices, Diagnostics> {
        let sealed = &plan.sealed;
        let steady = PlanSummary::from_plan(plan).steady_call().map(|c| (c.name.clone(), c.phases.clone()));
        let pace = match steady {
            Some((call, phases)) => {
                estimate_call(&to_bundle(sealed), &call, &phases, machine, false)
                    .map_err(|d| vec![*d])?
                    .throttle_factor
            }
            None => 1.0,
        };
        let mut programs: BTreeMap<String, BTreeMap<String, Vec<OpPrice>>> = BTreeMap::new();
        for phase in sealed.phase_names() {
            // A single program of the leader is too short to heat the device.
            let pace = if is_leader_phase(sealed, phase) { 1.0 } else { pace };
            for role in sealed.roles() {
                let Some(program) = role.ranks.first().and_then(|r| sealed.rank_program(phase, *r)) else {
                    continue;
                };
                let priced = price_program(program, sealed.mesh(), &role.ranks, machine, pace);
                programs.entry(phase.clone()).or_default().insert(role.role.clone(), priced);
            }
        }
        let name = format!("{}, profile {}", machine.cluster.name, machine.profile.name);
        Ok(ClusterPrices { programs, contention: machine.contention_factor(), throttle_factor: pace, name })
    }

    /// Returns the machine's name, for example `gb200-nvl72, profile torch-2.11`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the share of full speed at which matmuls and attention run.
    #[must_use]
    pub fn throttle_factor(&self) -> f64 {
        self.throttle_factor
    }

    fn op_price(&self, p: &Program, op: usize) -> OpPrice {
        let priced = self.programs.get(&p.name).and_then(|roles| roles.get(&p.role));
        priced.and_then(|ops| ops.get(op)).copied().unwrap_or_default()
    }
}

impl TimingModel for ClusterPrices {
    fn op_ns(&self, program: &Program, op: usize) -> u64 {
        self.op_price(program, op).kernel_ns
    }

    fn launch_ns(&self, program: &Program, op: usize) -> u64 {
        self.op_price(program, op).launch_ns
    }

    fn collective_ns(&self, program: &Program, op: usize, _: &Mesh) -> u64 {
        self.op_price(program, op).collective_ns
    }

    fn contention_factor(&self) -> f64 {
        self.contention
    }
}

fn price_program(
    program: &Program,
    mesh: &Mesh,
    ranks: &[Rank],
    machine: &MachineModel,
    pace: f64,
) -> Vec<OpPrice> {
    let round_ns = |ns: f64| ns.round().max(0.0) as u64;
    let priced = ProgramEstimate::new(machine, program, pace);
    let ops = program.ops.iter().zip(&priced.ops).enumerate();
    ops.map(|(i, (op, price))| {
        let met = ranks
            .iter()
            .filter(|_| op.opcode.is_collective())
            .map(|r| op_span(&machine.cluster, mesh, *r, op))
            .max_by_key(|s| (s.domains, s.ranks))
            .and_then(|widest| priced.transfer_cost(i, widest));
        OpPrice {
            kernel_ns: round_ns(price.ns),
            launch_ns: round_ns(machine.launch_ns() * f64::from(price.launches)),
            collective_ns: met.map_or(0, |t| round_ns(t.ns)),
        }
    })
    .collect()
}

/// Converts a sealed plan back to the bundle that the verifier checked, without the leader's phases
/// outside of calls.
#[must_use]
pub fn to_bundle(sealed: &SealedPlan) -> Bundle {
    let phase = |name: &String| {
        let ranks = || sealed.roles().iter().filter_map(|r| r.ranks.first().copied());
        Phase {
            name: name.clone(),
            programs: ranks().filter_map(|r| sealed.rank_program(name, r)).map(|p| (**p).clone()).collect(),
            slots: ranks().filter_map(|r| sealed.rank_slots(name, r)).cloned().collect(),
        }
    };
    let computes = |name: &&String| !is_leader_phase(sealed, name);
    Bundle {
        mesh: *sealed.mesh(),
        rank_map: sealed.rank_map().clone(),
        hosts: sealed.hosts().cloned(),
        roles: sealed.roles().to_vec(),
        phases: sealed.phase_names().iter().filter(computes).map(phase).collect(),
        calls: sealed.calls().to_vec(),
        mapping: sealed.mapping_text().to_string(),
    }
}
