//! The summary of a plan as plain numbers, for the CLI table, the JSON output and the report.

use std::collections::BTreeMap;

use serde::Serialize;
use tessera_ir::{Opcode, Program, ValueId, op_workload};
use tessera_mesh::{Axis, HostMap, Rank};
use tessera_plan::{Mapping, Strategy};

use crate::group_traffic::{GroupPathSummary, summarize_group_paths};
use crate::leader_memory::LeaderMemory;
use crate::plan::Plan;

/// Settings, memory, work and communication of a sealed plan; the field names are the keys in JSON.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PlanSummary {
    /// Name of the model for display, as in `seal.json`.
    pub model: String,
    /// The seal's digest, 64 hex digits.
    pub digest: String,
    /// Placement of the leader: `mesh`, `pp0` or `pp1`.
    pub topology: &'static str,
    /// Mesh, for example `tp=2, pp=3`; `outside=1` follows if the leader is outside the mesh.
    pub mesh: String,
    /// Sharding strategy over tp: `megatron` or `ulysses`.
    pub strategy: &'static str,
    /// Number of row chunks; 1 if rows are not split.
    pub overlap_chunks: u32,
    /// Summation order of partial sums: by rank, or in a tree that is equal on any mesh.
    pub numerics: &'static str,
    /// Compute dtype: `f32`; `bf16` for matmuls and the activations they produce; `fp8` for the
    /// matmuls of blocks.
    pub dtype: &'static str,
    /// Digest of the weights that the plan pins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub weights: Option<String>,
    /// Cache regime: `resident` or `recompute`.
    pub cache: &'static str,
    /// Denoising timesteps as configured, before any warp by the noise schedule's shift.
    pub steps: Vec<f64>,
    /// Width and height of a frame in pixels.
    pub picture: [u64; 2],
    /// Playback rate in frames per second.
    pub fps: f64,
    /// Number of pixel frames per chunk.
    pub frames_per_chunk: u64,
    /// Collectives over tp that a denoising forward needs per transformer block, counted from the
    /// strategy alone; `None` if rows are split into chunks, which multiplies some of them.
    pub analytic_block_sync_points: Option<u64>,
    /// Number of transformer blocks on each stage.
    pub blocks_per_stage: Vec<u64>,
    /// Role, device and memory of each rank, in rank order.
    pub ranks: Vec<RankSummary>,
    /// Memory of the leader's own programs, in its process beside that of its rank.
    pub leader: LeaderMemory,
    /// The hosts, if the plan states them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hosts: Option<HostsSummary>,
    /// The groups with the paths that the plan states, and the bytes of a call in the middle of a scene.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<GroupPathSummary>,
    /// Phases, in the order of the plan.
    pub phases: Vec<PhaseSummary>,
    /// One entry per kind of call that the plan admits: its phases in order, and its collectives,
    /// bytes and FLOPs, summed over these phases.
    pub calls: Vec<CallSummary>,
}

/// The hosts that a plan states.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HostsSummary {
    /// The ranks of each host, such as `2 hosts: ranks 0 to 3; 4 to 7`.
    pub text: String,
    /// The ranks of each host.
    pub ranks: Vec<Vec<u32>>,
    /// The switch domain of each host.
    pub domains: Vec<u32>,
}

impl HostsSummary {
    fn new(map: &HostMap) -> HostsSummary {
        HostsSummary {
            text: map.describe(),
            ranks: map.hosts().iter().map(|h| h.ranks.iter().map(|r| r.0).collect()).collect(),
            domains: map.hosts().iter().map(|h| h.domain).collect(),
        }
    }
}

/// Position, role, device and planned memory of one rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankSummary {
    /// Number of the rank in the world; the ranks outside the mesh come first.
    pub rank: u32,
    /// Coordinate on each axis with more than one rank, for example `tp=1, pp=0`; `outside` for a
    /// rank outside the mesh.
    pub coordinates: String,
    /// Name of the role whose programs the rank runs, such as `stage0`.
    pub role: String,
    /// Name of the rank's device in the mapping; `rank` and its number if the mapping names none.
    pub device: String,
    /// Bytes of the rank's distinct weight shards over all phases.
    pub weights_bytes: u64,
    /// Bytes of caches and latents.
    pub buffers_bytes: u64,
    /// Bytes of inputs and call scalars in the phase with the largest such total.
    pub inputs_bytes: u64,
    /// Bytes of the largest phase's slots.
    pub temporaries_bytes: u64,
    /// Sum of the bytes above.
    pub total_bytes: u64,
}

/// FLOPs and collectives of one phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseSummary {
    /// Name of the phase with its variant, such as `denoise.fill3`.
    pub name: String,
    /// Floating-point operations of the busiest rank.
    pub flops: u64,
    /// Collectives by op and axis, in order of first appearance.
    pub collectives: Vec<CollectiveSummary>,
    /// Number of collectives over tp in each transformer block of the phase, for the rank that issues
    /// the most: the points at which the ranks of a tp group wait for each other.
    pub block_sync_points: Vec<u64>,
}

/// The collectives of one op and scope in one phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CollectiveSummary {
    /// Op, such as `all_to_all`.
    pub op: String,
    /// Scope: a mesh axis, a subgroup of an axis (`tp/2`) or `world`.
    pub axis: String,
    /// Number of collectives that the busiest rank issues.
    pub count: u64,
    /// Bytes that the busiest rank sends over the link.
    pub rank_bytes: u64,
    /// Bytes that all ranks together send over the link.
    pub all_bytes: u64,
}

/// One kind of call that the plan admits, with its costs summed over its phases.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CallSummary {
    /// Name of the call in the sealed plan.
    pub name: String,
    /// Names of the phases that the call runs, in order.
    pub phases: Vec<String>,
    /// Collectives that the busiest ranks issue, summed over all phases.
    pub collectives: u64,
    /// Bytes of the collectives' operands on all ranks together. How much of them travels depends on the
    /// algorithm: of an all-to-all over two ranks, half.
    pub bytes: u64,
    /// Floating-point operations of the busiest ranks, over all phases.
    pub flops: u64,
}

impl PlanSummary {
    /// Sums the memory per rank and the FLOPs and collectives per phase and call of a plan.
    #[must_use]
    pub fn from_plan(plan: &Plan) -> PlanSummary {
        let (sealed, stream) = (&plan.sealed, &plan.video.stream);
        let phases: Vec<PhaseSummary> =
            sealed.phase_names().iter().map(|name| summarize_phase(plan, name)).collect();
        let calls = sealed.calls().iter().map(|(name, list)| summarize_call(name, list, &phases)).collect();
        let mut summary = PlanSummary {
            hosts: sealed.hosts().map(|stated| HostsSummary::new(&stated.hosts)),
            groups: Vec::new(),
            model: plan.model.clone(),
            digest: sealed.digest_hex(),
            topology: plan.mapping.topology.name(),
            mesh: sealed.mesh().to_string(),
            strategy: plan.mapping.strategy.name(),
            overlap_chunks: plan.mapping.overlap_chunks,
            numerics: plan.mapping.numerics.name(),
            dtype: plan.mapping.dtype.name(),
            weights: plan.mapping.weights.clone(),
            cache: if stream.recompute { "recompute" } else { "resident" },
            steps: stream.steps.clone(),
            picture: [stream.width, stream.height],
            fps: stream.fps,
            frames_per_chunk: stream.frames_per_chunk(),
            analytic_block_sync_points: analytic_block_sync_points(&plan.mapping),
            blocks_per_stage: plan.mapping.blocks.clone(),
            ranks: sealed.mesh().iter().map(|r| summarize_rank(plan, r)).collect(),
            leader: LeaderMemory::from_plan(plan),
            phases,
            calls,
        };
        let steady = summary.steady_call().map_or(Vec::new(), |call| call.phases.clone());
        summary.groups = summarize_group_paths(sealed, &steady);
        summary
    }

    /// Returns the call of a chunk in the middle of a scene: full window, no new prompt.
    #[must_use]
    pub fn steady_call(&self) -> Option<&CallSummary> {
        let steady = |c: &&CallSummary| !c.name.contains(".text") && !c.name.contains(".rebase");
        self.calls.iter().rev().find(steady).or(self.calls.last())
    }
}

/// Counts the collectives over tp of one block from the structure of a block: `ulysses` exchanges
/// query, key, value and output; `megatron` sums the outputs of three row-parallel matmuls and the
/// two norms over heads that span the ranks.
fn analytic_block_sync_points(mapping: &Mapping) -> Option<u64> {
    let count = match (mapping.mesh.axis_size(Axis::Tp), mapping.strategy) {
        (0 | 1, _) => 0,
        (_, Strategy::Ulysses) => 4,
        (_, Strategy::Megatron) => 5,
    };
    (mapping.overlap_chunks <= 1).then_some(count)
}

fn summarize_rank(plan: &Plan, rank: Rank) -> RankSummary {
    let (sealed, mesh) = (&plan.sealed, plan.sealed.mesh());
    let at = mesh.coord_of(rank);
    let coordinates: Vec<String> = mesh.active_axes().map(|a| format!("{a}={}", at.on_axis(a))).collect();
    let memory = sealed.rank_memory(rank);
    let bytes = |f: fn(&tessera_verify::RoleMemory) -> u64| memory.as_ref().map_or(0, f);
    RankSummary {
        rank: rank.0,
        coordinates: if mesh.contains(rank) { coordinates.join(", ") } else { "outside".to_string() },
        role: sealed.role_of(rank).map_or(String::new(), |i| sealed.roles()[i].role.clone()),
        device: sealed.rank_map().device_of(rank).unwrap_or_default().to_string(),
        weights_bytes: bytes(|m| m.weights.0),
        buffers_bytes: bytes(|m| m.buffers.0),
        inputs_bytes: bytes(|m| m.inputs.0),
        temporaries_bytes: bytes(|m| m.temporaries.0),
        total_bytes: bytes(|m| m.total_bytes().0),
    }
}

/// Summarizes a phase role by role, because all ranks of a role run the same program.
fn summarize_phase(plan: &Plan, name: &str) -> PhaseSummary {
    let mut out = PhaseSummary {
        name: name.to_string(),
        flops: 0,
        collectives: Vec::new(),
        block_sync_points: Vec::new(),
    };
    for role in plan.sealed.roles() {
        let Some(program) = role.ranks.first().and_then(|r| plan.sealed.rank_program(name, *r)) else {
            continue;
        };
        out.flops = out.flops.max(program.ops.iter().map(|op| op_workload(program, op).flops.0).sum());
        let counts = count_block_sync_points(program);
        out.block_sync_points.resize(out.block_sync_points.len().max(counts.len()), 0);
        for (most, count) in out.block_sync_points.iter_mut().zip(counts) {
            *most = count.max(*most);
        }
        let mut role_collectives: Vec<CollectiveSummary> = Vec::new();
        for (_, op) in program.collective_ops() {
            let name = op.opcode.name().trim_start_matches("collective.").to_string();
            let axis = op.comm_group().map_or(String::new(), |g| g.to_string());
            let bytes = op_workload(program, op).wire.0;
            let index = find_or_insert(&mut role_collectives, name, axis);
            role_collectives[index].count += 1;
            role_collectives[index].rank_bytes += bytes;
        }
        for c in role_collectives {
            let index = find_or_insert(&mut out.collectives, c.op, c.axis);
            let sum = &mut out.collectives[index];
            sum.count = sum.count.max(c.count);
            sum.rank_bytes = sum.rank_bytes.max(c.rank_bytes);
            sum.all_bytes += c.rank_bytes * role.ranks.len() as u64;
        }
    }
    out
}

/// The part of the model that a value belongs to.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
enum ModelPart {
    /// Before the blocks, or in common with all of them.
    #[default]
    Entry,
    /// The block of this index.
    Block(u64),
    /// After the blocks.
    Exit,
}

/// Counts the collectives over tp in each block. A value belongs to the last block whose weights it
/// depends on, and to no block once it meets the weights of the exit.
fn count_block_sync_points(program: &Program) -> Vec<u64> {
    let mut parts: BTreeMap<ValueId, (ModelPart, bool)> = BTreeMap::new();
    let mut counts = Vec::new();
    for op in &program.ops {
        let used: Vec<(ModelPart, bool)> =
            op.used_values().map(|v| parts.get(&v).copied().unwrap_or_default()).collect();
        let own = op.name.as_deref().filter(|_| op.opcode == Opcode::Weight);
        let block = own.and_then(|n| n.strip_prefix("blocks.")?.split('.').next()?.parse().ok());
        let is_weight = own.is_some() || (!used.is_empty() && used.iter().all(|(_, weight)| *weight));
        let latest = used.iter().map(|(part, _)| *part).max().unwrap_or_default();
        let meets_exit = used.iter().any(|(part, weight)| *weight && *part == ModelPart::Entry)
            && used.iter().any(|(part, weight)| !*weight && *part != ModelPart::Entry);
        let part = match block {
            Some(block) => ModelPart::Block(block),
            None if meets_exit => ModelPart::Exit,
            None => latest,
        };
        if let ModelPart::Block(block) = part
            && op.opcode.is_collective()
            && op.comm_group().is_some_and(|g| g.to_string().starts_with("tp"))
        {
            let block = usize::try_from(block).unwrap_or(usize::MAX);
            counts.resize(counts.len().max(block.saturating_add(1)), 0);
            counts[block] += 1;
        }
        parts.extend(op.results.iter().map(|v| (*v, (part, is_weight))));
    }
    counts
}

fn find_or_insert(list: &mut Vec<CollectiveSummary>, op: String, axis: String) -> usize {
    list.iter().position(|c| c.op == op && c.axis == axis).unwrap_or_else(|| {
        list.push(CollectiveSummary { op, axis, count: 0, rank_bytes: 0, all_bytes: 0 });
        list.len() - 1
    })
}

fn summarize_call(name: &str, list: &[String], phases: &[PhaseSummary]) -> CallSummary {
    let mut out =
        CallSummary { name: name.to_string(), phases: list.to_vec(), collectives: 0, bytes: 0, flops: 0 };
    for phase in list.iter().filter_map(|n| phases.iter().find(|p| p.name == *n)) {
        out.flops += phase.flops;
        out.collectives += phase.collectives.iter().map(|c| c.count).sum::<u64>();
        out.bytes += phase.collectives.iter().map(|c| c.all_bytes).sum::<u64>();
    }
    out
}
