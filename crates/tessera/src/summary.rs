//! What a plan comes to, as plain numbers: for a person's table, a program's JSON, a report.

use serde::Serialize;
use tessera_ir::cost;
use tessera_mesh::Rank;

use crate::plan::Plan;

/// A plan in numbers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Summary {
    /// Name of the model.
    pub model: String,
    /// The seal's digest, 64 hex digits.
    pub digest: String,
    /// Where the leader stands: `mesh`, `pp0` or `pp1`.
    pub topology: &'static str,
    /// Mesh, such as `tp=2, pp=3`, with `outside=1` behind where the leader stands outside it.
    pub mesh: String,
    /// Strategy over tp.
    pub strategy: &'static str,
    /// Pieces that rows are cut into; 1 for whole rows.
    pub pieces: u32,
    /// Numerics policy.
    pub numerics: &'static str,
    /// What programs compute in: `f32`; `bf16` where products and what works on their results do; `fp8` where products of blocks do.
    pub dtype: &'static str,
    /// `resident` or `recompute`.
    pub cache: &'static str,
    /// Timesteps before the warp.
    pub steps: Vec<f64>,
    /// Picture in pixels: width, height.
    pub picture: [u64; 2],
    /// Playback rate in frames per second.
    pub fps: f64,
    /// Pixel frames of a chunk.
    pub frames_per_chunk: u64,
    /// Transformer blocks on each stage.
    pub blocks_per_stage: Vec<u64>,
    /// Ranks, in order.
    pub ranks: Vec<RankSummary>,
    /// Phases, in order of the plan.
    pub phases: Vec<PhaseSummary>,
    /// Calls that may be made.
    pub calls: Vec<CallSummary>,
}

/// One rank.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct RankSummary {
    /// The rank.
    pub rank: u32,
    /// Position on each axis of more than one rank, such as `tp=1, pp=0`; `outside` for a rank outside the mesh.
    pub coordinates: String,
    /// Role it plays.
    pub role: String,
    /// Device it drives.
    pub device: String,
    /// Bytes of weights.
    pub weights_bytes: u64,
    /// Bytes of caches and latents.
    pub buffers_bytes: u64,
    /// Bytes of what a call brings.
    pub inputs_bytes: u64,
    /// Bytes of the largest phase's slots.
    pub temporaries_bytes: u64,
    /// All of it.
    pub total_bytes: u64,
}

/// One phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct PhaseSummary {
    /// Name and variant.
    pub name: String,
    /// Floating-point operations of the rank that has most.
    pub flops: u64,
    /// Collectives by op and axis, in order of first appearance.
    pub collectives: Vec<CollectiveSummary>,
}

/// Collectives of one kind in one phase.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CollectiveSummary {
    /// Op, such as `all_to_all`.
    pub op: String,
    /// What it is over: a mesh axis, blocks of one (`tp/2`) or `world`.
    pub axis: String,
    /// How many the rank that has most of them issues.
    pub count: u64,
    /// Bytes that the rank with most hands to the link.
    pub rank_bytes: u64,
    /// Bytes that all ranks together hand to the link.
    pub all_bytes: u64,
}

/// One admitted call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CallSummary {
    /// Name.
    pub name: String,
    /// Phases, in order.
    pub phases: Vec<String>,
    /// Collectives that the ranks with most of them issue, over all phases.
    pub collectives: u64,
    /// Bytes that all ranks together hand to links.
    pub bytes: u64,
    /// Floating-point operations of the busiest ranks, over all phases.
    pub flops: u64,
}

impl Summary {
    /// Adds a plan up.
    #[must_use]
    pub fn of(plan: &Plan) -> Summary {
        let (sealed, stream) = (&plan.sealed, &plan.video.stream);
        let phases: Vec<PhaseSummary> = sealed.phases().iter().map(|name| phase(plan, name)).collect();
        let calls = sealed.calls().iter().map(|(name, list)| call(name, list, &phases)).collect();
        Summary {
            model: plan.model.clone(),
            digest: sealed.digest_hex(),
            topology: plan.mapping.topology.name(),
            mesh: sealed.mesh().to_string(),
            strategy: plan.mapping.strategy.name(),
            pieces: plan.mapping.pieces,
            numerics: plan.mapping.numerics.name(),
            dtype: plan.mapping.dtype.name(),
            cache: if stream.recompute { "recompute" } else { "resident" },
            steps: stream.steps.clone(),
            picture: [stream.width, stream.height],
            fps: stream.fps,
            frames_per_chunk: stream.frames_per_chunk(),
            blocks_per_stage: plan.mapping.blocks.clone(),
            ranks: sealed.mesh().iter().map(|r| rank(plan, r)).collect(),
            phases,
            calls,
        }
    }

    /// The call of a chunk in the middle of a scene: full window, no new prompt.
    #[must_use]
    pub fn steady_call(&self) -> Option<&CallSummary> {
        let steady = |c: &&CallSummary| !c.name.contains(".text") && !c.name.contains(".rebase");
        self.calls.iter().rev().find(steady).or(self.calls.last())
    }
}

fn rank(plan: &Plan, rank: Rank) -> RankSummary {
    let (sealed, mesh) = (&plan.sealed, plan.sealed.mesh());
    let at = mesh.coord_of(rank);
    let coordinates: Vec<String> = mesh.axes().map(|a| format!("{a}={}", at.on(a))).collect();
    let memory = sealed.memory(rank);
    let bytes = |f: fn(&tessera_verify::RoleMemory) -> u64| memory.as_ref().map_or(0, f);
    RankSummary {
        rank: rank.0,
        coordinates: if mesh.contains(rank) { coordinates.join(", ") } else { "outside".to_string() },
        role: sealed.role_of(rank).map_or(String::new(), |i| sealed.roles()[i].role.clone()),
        device: sealed.rank_map().device(rank).unwrap_or_default().to_string(),
        weights_bytes: bytes(|m| m.weights.0),
        buffers_bytes: bytes(|m| m.buffers.0),
        inputs_bytes: bytes(|m| m.inputs.0),
        temporaries_bytes: bytes(|m| m.temporaries.0),
        total_bytes: bytes(|m| m.total().0),
    }
}

/// Ranks of one role run one program, so the work is by roles.
fn phase(plan: &Plan, name: &str) -> PhaseSummary {
    let mut out = PhaseSummary { name: name.to_string(), flops: 0, collectives: Vec::new() };
    for role in plan.sealed.roles() {
        let Some(program) = role.ranks.first().and_then(|r| plan.sealed.program(name, *r)) else { continue };
        out.flops = out.flops.max(program.ops.iter().map(|op| cost(program, op).flops.0).sum());
        let mut own: Vec<CollectiveSummary> = Vec::new();
        for (_, op) in program.collectives() {
            let name = op.opcode.name().trim_start_matches("collective.").to_string();
            let axis = op.group().map_or(String::new(), |g| g.to_string());
            let bytes = cost(program, op).wire.0;
            let at = position(&mut own, name, axis);
            own[at].count += 1;
            own[at].rank_bytes += bytes;
        }
        for c in own {
            let at = position(&mut out.collectives, c.op, c.axis);
            let sum = &mut out.collectives[at];
            sum.count = sum.count.max(c.count);
            sum.rank_bytes = sum.rank_bytes.max(c.rank_bytes);
            sum.all_bytes += c.rank_bytes * role.ranks.len() as u64;
        }
    }
    out
}

fn position(list: &mut Vec<CollectiveSummary>, op: String, axis: String) -> usize {
    list.iter().position(|c| c.op == op && c.axis == axis).unwrap_or_else(|| {
        list.push(CollectiveSummary { op, axis, count: 0, rank_bytes: 0, all_bytes: 0 });
        list.len() - 1
    })
}

fn call(name: &str, list: &[String], phases: &[PhaseSummary]) -> CallSummary {
    let mut out =
        CallSummary { name: name.to_string(), phases: list.to_vec(), collectives: 0, bytes: 0, flops: 0 };
    for phase in list.iter().filter_map(|n| phases.iter().find(|p| p.name == *n)) {
        out.flops += phase.flops;
        out.collectives += phase.collectives.iter().map(|c| c.count).sum::<u64>();
        out.bytes += phase.collectives.iter().map(|c| c.all_bytes).sum::<u64>();
    }
    out
}
