//! Prices of a plan's programs on a cluster, under the curves and habits of an executor's profile.

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_cost::Machine;
use tessera_cost::program::{Priced, span};
use tessera_device::Prices;
use tessera_ir::{Bundle, Phase, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_plan::video::estimate_call;
use tessera_verify::SealedPlan;

use crate::engine::LEADER_PHASES;
use crate::plan::Plan;
use crate::summary::Summary;

/// What the programs of one plan take on one machine. Ranks stand on the cluster's devices in order.
#[derive(Debug, Clone)]
pub struct ClusterPrices {
    /// By phase, then by role.
    programs: BTreeMap<String, BTreeMap<String, Vec<OpPrice>>>,
    contention: f64,
    pace: f64,
    name: String,
}

/// One op, in nanoseconds.
#[derive(Debug, Clone, Copy, Default)]
struct OpPrice {
    own: u64,
    launch: u64,
    /// Of a collective, between the worst placed ranks of its role.
    met: u64,
}

impl ClusterPrices {
    /// Prices every program of a plan. Power limits the pace of products in a long run by how busy the steady chunk keeps
    /// its devices, which is the pace of the estimate of that chunk.
    ///
    /// # Errors
    /// T1115 when the ranks of the estimate wait for each other, as those of no sealed plan do.
    pub fn of(plan: &Plan, machine: &Machine) -> Result<ClusterPrices, Diagnostics> {
        let sealed = &plan.sealed;
        let steady = Summary::of(plan).steady_call().map(|c| (c.name.clone(), c.phases.clone()));
        let pace = match steady {
            Some((call, phases)) => {
                estimate_call(&bundle(sealed), &call, &phases, machine, false).map_err(|d| vec![*d])?.pace
            }
            None => 1.0,
        };
        let mut programs: BTreeMap<String, BTreeMap<String, Vec<OpPrice>>> = BTreeMap::new();
        for phase in sealed.phases() {
            // One program of the leader by itself never heats the device for long.
            let pace = if LEADER_PHASES.contains(&phase.as_str()) { 1.0 } else { pace };
            for role in sealed.roles() {
                let Some(program) = role.ranks.first().and_then(|r| sealed.program(phase, *r)) else {
                    continue;
                };
                let priced = price(program, sealed.mesh(), &role.ranks, machine, pace);
                programs.entry(phase.clone()).or_default().insert(role.role.clone(), priced);
            }
        }
        let name = format!("{}, profile {}", machine.cluster.name, machine.profile.name);
        Ok(ClusterPrices { programs, contention: machine.contention(), pace, name })
    }

    /// The machine in words: `gb200-nvl72, profile torch-2.11`.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Share of full speed at which products and attention run.
    #[must_use]
    pub fn pace(&self) -> f64 {
        self.pace
    }

    fn get(&self, p: &Program, op: usize) -> OpPrice {
        let priced = self.programs.get(&p.name).and_then(|roles| roles.get(&p.role));
        priced.and_then(|ops| ops.get(op)).copied().unwrap_or_default()
    }
}

impl Prices for ClusterPrices {
    fn op_ns(&self, program: &Program, op: usize) -> u64 {
        self.get(program, op).own
    }

    fn launch_ns(&self, program: &Program, op: usize) -> u64 {
        self.get(program, op).launch
    }

    fn collective_ns(&self, program: &Program, op: usize, _: &Mesh) -> u64 {
        self.get(program, op).met
    }

    fn contention(&self) -> f64 {
        self.contention
    }
}

fn price(program: &Program, mesh: &Mesh, ranks: &[Rank], machine: &Machine, pace: f64) -> Vec<OpPrice> {
    let whole = |ns: f64| ns.round().max(0.0) as u64;
    let priced = Priced::of(machine, program, pace);
    let ops = program.ops.iter().zip(&priced.ops).enumerate();
    ops.map(|(i, (op, price))| {
        let met = ranks
            .iter()
            .filter(|_| op.opcode.is_collective())
            .map(|r| span(&machine.cluster, mesh, *r, op))
            .max_by_key(|s| (s.domains, s.ranks))
            .and_then(|widest| priced.exchange(i, widest));
        OpPrice {
            own: whole(price.ns),
            launch: whole(machine.launch_ns() * f64::from(price.launches)),
            met: met.map_or(0, |t| whole(t.ns)),
        }
    })
    .collect()
}

/// A sealed plan as the bundle that it was judged as, without what a rank outside the mesh does beside calls.
#[must_use]
pub fn bundle(sealed: &SealedPlan) -> Bundle {
    let phase = |name: &String| {
        let ranks = || sealed.roles().iter().filter_map(|r| r.ranks.first().copied());
        Phase {
            name: name.clone(),
            programs: ranks().filter_map(|r| sealed.program(name, r)).map(|p| (**p).clone()).collect(),
            memory: ranks().filter_map(|r| sealed.slots(name, r)).cloned().collect(),
        }
    };
    let computes = |name: &&String| !LEADER_PHASES.contains(&name.as_str());
    Bundle {
        mesh: *sealed.mesh(),
        rank_map: sealed.rank_map().clone(),
        roles: sealed.roles().to_vec(),
        phases: sealed.phases().iter().filter(computes).map(phase).collect(),
        calls: sealed.calls().to_vec(),
        mapping: sealed.mapping().to_string(),
    }
}
