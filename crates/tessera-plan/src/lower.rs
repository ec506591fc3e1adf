//! Lowers logical programs to one program per role: chooses layouts, inserts collectives, computes
//! local shapes and assigns stages.
//!
//! One walk over the logical program lowers all stages of one tp coordinate, so that both ends of a
//! send have the same type at the same position. Coordinates with equal programs form one role. A
//! leader outside the mesh is a role of its own: it runs the encode and decode phases and the mesh
//! runs the others, and each has an empty program for the phases of the other.

mod collectives;
mod experts;
mod frames;
mod ops;
mod values;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::CollectiveOp;
use tessera_cost::program_cost::transfer_payload;
use tessera_ir::op_traits::LoweringRule;
use tessera_ir::{
    Attr, Builder, Bundle, CollectiveAlgorithm, OpKind, OpView, Opcode, Phase, Program, RoleRanks, Slots,
    StreamKind, ValueId,
};
use tessera_mesh::{Axis, Mesh, Rank, Shard, Uneven};

use crate::codes::{T0606, T0609, T0610};
use crate::host_statement::state_hosts;
use crate::ownership::{
    OpOwner, ProgramAnalysis, is_leader_cpu_phase, is_leader_phase, is_media_phase, is_outside_media_phase,
};
use crate::roles::{RankClass, group_roles, uneven_shards};
use crate::stages::{StageCosts, pixel_flops_per_pass};
use crate::strategy::{ShardingRules, check_opcodes, check_parts};
use crate::{
    CapturePolicy, DecoderPrecision, DtypePolicy, ExpertMapping, LogicalModel, Mapping, MediaPlacement,
    Numerics, Strategy, Transport, expert_placement, expert_routing, memory, moe_route, op_order, precision,
    router_features, row_chunks,
};

/// The phase that decodes without the shortcuts of a fast decoder, for a comparison with it.
const EXACT_DECODE_PHASE: &str = "decode.exact";

/// The role of the leader outside the mesh.
const LEADER: &str = "leader@out0";

/// Lowers every phase under a mapping and fills in the mapping's blocks per stage if they are
/// empty.
///
/// # Errors
/// Returns every reason why the mapping does not fit, or T0606.
pub fn lower(logical: &LogicalModel, mapping: &mut Mapping) -> Result<Bundle, Diagnostics> {
    let logical = &with_routes_spelled_out(logical, mapping)?;
    let mut ds = mapping.check_fit(&logical.model_extents());
    ds.extend(check_parts(&logical.phases));
    ds.extend(check_opcodes(&logical.phases));
    ds.extend(check_media(logical, mapping));
    ds.extend(check_fast_decoder(logical, mapping));
    if !ds.is_empty() {
        return Err(ds);
    }
    let logical = &with_router_features(logical, mapping)?;
    let logical = &with_expert_places(logical, mapping)?;
    let logical = with_token_groups(logical, mapping)?;
    let logical = with_dtype_policy(&logical, mapping)?;
    let mesh = mapping.mesh;
    if mapping.blocks.is_empty() {
        let stages = u64::from(mesh.axis_size(Axis::Pp));
        let pixels = pixel_flops_per_pass(&logical, mapping.media, mesh.axis_size(Axis::Tp));
        mapping.blocks = StageCosts::from_model(&logical).with_pixels(pixels).split_blocks(stages);
    }
    let logical = with_row_chunks(logical, mapping.overlap_chunks)?;
    let rank_map = mapping.rank_map().map_err(|d| vec![*d])?;
    let world = mapping.world_mesh().map_err(|d| vec![*d])?;

    // If ranks hold shards of a row, the square sums of queries and keys share one all-reduce, so
    // both are computed first.
    let joint_norms = mapping.strategy == Strategy::Megatron && mesh.axis_size(Axis::Tp) > 1;
    let ordered: Vec<Cow<'_, Program>> = logical
        .phases
        .iter()
        .map(|p| if joint_norms { Cow::Borrowed(p) } else { op_order::reorder_chains(p) })
        .collect();
    let sources: Vec<ProgramAnalysis<'_>> = ordered.iter().map(|p| ProgramAnalysis::new(p)).collect();
    let lower_phase = |phase, target| Lowering::new(&logical, mapping, world, phase, target).run();
    let (mut roles, mut of_role) = group_roles(
        &world,
        lower_classes(mapping.mesh, mapping.expert_places(logical.experts), &sources, lower_phase)?,
    );
    if world.outside_count() > 0 {
        let mut leader_programs = Vec::new();
        for phase in &sources {
            leader_programs.extend(lower_phase(phase, LoweringTarget::Leader)?);
        }
        roles.insert(
            0,
            RoleRanks { role: LEADER.to_string(), ranks: (0..world.outside_count()).map(Rank).collect() },
        );
        of_role.insert(0, leader_programs);
    }
    let mut bundle = Bundle {
        mesh: world,
        rank_map,
        hosts: None,
        roles,
        phases: collect_phases(&sources, of_role, mapping),
        calls: logical.calls.clone(),
        mapping: mapping.to_toml(),
    };
    state_hosts(&mut bundle, mapping.host_map());
    Ok(bundle)
}

/// Checks that the model has phases of pixels for the place that the mapping names.
fn check_media(logical: &LogicalModel, mapping: &Mapping) -> Option<Diagnostic> {
    let (found, place) = match mapping.media {
        MediaPlacement::Leader => return None,
        MediaPlacement::Mesh | MediaPlacement::Replicas => {
            (logical.phases.iter().any(is_media_phase), "the ranks")
        }
        MediaPlacement::Outside => {
            (logical.phases.iter().any(is_outside_media_phase), "a GPU outside of the mesh")
        }
    };
    if found {
        return None;
    }
    let media = format!("media = \"{}\"", mapping.media.name());
    let message = format!("{media}, but the model has no phases of pixels for {place}");
    Some(
        Diagnostic::error(&T0609, message)
            .with_label("mapping", media)
            .with_hint("use media = \"leader\", or a model whose decoder is wan_vae or tiny"),
    )
}

/// Checks that a fast decoder runs where its convolutions can be e4m3.
fn check_fast_decoder(logical: &LogicalModel, mapping: &Mapping) -> Option<Diagnostic> {
    let why = match (mapping.media, mapping.dtype) {
        // A search also lowers a model without its phases of pixels.
        _ if !logical.phases.iter().any(|p| p.name == EXACT_DECODE_PHASE) => return None,
        (MediaPlacement::Leader, _) => "the leader's cores decode",
        (_, DtypePolicy::F32) => "the dtype is f32",
        _ => return None,
    };
    let message = format!("a fast decoder convolves in e4m3 on GPUs, but {why}");
    Some(
        Diagnostic::error(&T0610, message)
            .with_label("mapping", format!("media = \"{}\"", mapping.media.name()))
            .with_label("mapping", format!("dtype = \"{}\"", mapping.dtype.name()))
            .with_hint("use --dtype bf16 or fp8 with --media mesh, replicas or outside, or --quality exact"),
    )
}

/// Replaces each `moe_route` by the ops of which it consists.
fn with_routes_spelled_out<'a>(
    logical: &'a LogicalModel,
    mapping: &Mapping,
) -> Result<Cow<'a, LogicalModel>, Diagnostics> {
    if logical.phases.iter().all(|p| p.ops.iter().all(|op| op.opcode != Opcode::MoeRoute)) {
        return Ok(Cow::Borrowed(logical));
    }
    let spell_out = |p| moe_route::spell_out_routes(p, mapping);
    let phases = logical.phases.iter().map(spell_out).collect::<Result<_, _>>()?;
    Ok(Cow::Owned(LogicalModel { phases, ..logical.clone() }))
}

/// Changes what routers prefer as the mapping states it.
fn with_router_features<'a>(
    logical: &'a LogicalModel,
    mapping: &Mapping,
) -> Result<Cow<'a, LogicalModel>, Diagnostics> {
    if logical.experts == 0 || !mapping.experts.router.changes_programs() {
        return Ok(Cow::Borrowed(logical));
    }
    let change = |p| router_features::apply_router_features(p, mapping, logical.experts);
    let phases = logical.phases.iter().map(change).collect::<Result<_, _>>()?;
    Ok(Cow::Owned(LogicalModel { phases, ..logical.clone() }))
}

/// Gives experts the places that the mapping states.
fn with_expert_places<'a>(
    logical: &'a LogicalModel,
    mapping: &Mapping,
) -> Result<Cow<'a, LogicalModel>, Diagnostics> {
    if logical.experts == 0 || !mapping.experts.copies.changes_programs() {
        return Ok(Cow::Borrowed(logical));
    }
    let place = |p| expert_placement::place_experts(p, mapping, logical.experts);
    let phases = logical.phases.iter().map(place).collect::<Result<_, _>>()?;
    Ok(Cow::Owned(LogicalModel { phases, ..logical.clone() }))
}

/// Gives the tokens of experts the groups and slots that the mapping states, and states the number of groups in it.
fn with_token_groups<'a>(
    logical: &'a LogicalModel,
    mapping: &mut Mapping,
) -> Result<Cow<'a, LogicalModel>, Diagnostics> {
    if logical.experts == 0 || !mapping.experts.changes_programs() {
        return Ok(Cow::Borrowed(logical));
    }
    let groups = mapping.token_groups(logical.experts);
    mapping.experts.token_groups = u32::try_from(groups).ok();
    let route = |p| expert_routing::route_in_groups(p, &mapping.experts, (logical.experts, groups));
    let phases = logical.phases.iter().map(route).collect::<Result<_, _>>()?;
    Ok(Cow::Owned(LogicalModel { phases, ..logical.clone() }))
}

/// Inserts the casts and quantizations of the mapping's dtype policy.
fn with_dtype_policy<'a>(
    logical: &'a LogicalModel,
    mapping: &Mapping,
) -> Result<Cow<'a, LogicalModel>, Diagnostics> {
    if mapping.dtype == DtypePolicy::F32 {
        return Ok(Cow::Borrowed(logical));
    }
    let apply = |p: &Program| match is_leader_cpu_phase(p) {
        true => Ok(Program::clone(p)),
        false => {
            // What encodes stays exact: the next chunk begins with it, so its errors would add up.
            let decodes = p.name.starts_with("decode.") && p.name != EXACT_DECODE_PHASE;
            let decoder = if decodes { logical.decoder } else { DecoderPrecision::Exact };
            precision::apply_dtype_policy(p, mapping.dtype, mapping.strategy, decoder)
        }
    };
    let phases = logical.phases.iter().map(apply).collect::<Result<_, _>>()?;
    Ok(Cow::Owned(LogicalModel { phases, ..logical.clone() }))
}

/// Splits the rows of every phase into chunks, so that their collectives overlap compute.
fn with_row_chunks(
    logical: Cow<'_, LogicalModel>,
    chunks: u32,
) -> Result<Cow<'_, LogicalModel>, Diagnostics> {
    if chunks == 1 {
        return Ok(logical);
    }
    // Frames have no rows of tokens to split.
    let split = |p| match is_leader_phase(p) || is_media_phase(p) {
        true => Ok(Program::clone(p)),
        false => row_chunks::split_rows(p, chunks),
    };
    let phases = logical.phases.iter().map(split).collect::<Result<_, _>>()?;
    Ok(Cow::Owned(LogicalModel { phases, ..logical.into_owned() }))
}

/// Lowers every phase for every coordinate of tp and, if ranks have unequal numbers of places of experts, of ep.
fn lower_classes<'a>(
    mesh: Mesh,
    places: u64,
    phases: &'a [ProgramAnalysis<'a>],
    lower_phase: impl Fn(&'a ProgramAnalysis<'a>, LoweringTarget) -> Result<Vec<Program>, Diagnostics>,
) -> Result<Vec<RankClass>, Diagnostics> {
    let ep = mesh.axis_size(Axis::Ep);
    // The first ranks have a place more.
    let more = u32::try_from(places % u64::from(ep)).unwrap_or(0);
    let mut classes = Vec::new();
    for members in [0..more, more..ep].into_iter().filter(|members| !members.is_empty()) {
        let at = (more > 0).then_some(members.start);
        let target = |tp| LoweringTarget::Mesh { tp, ep: at };
        let mut of_tp = lower_tp_classes(mesh, phases, |phase, tp| lower_phase(phase, target(tp)))?;
        of_tp.iter_mut().for_each(|class| class.experts = at.map(|_| members.clone()));
        classes.append(&mut of_tp);
    }
    Ok(classes)
}

/// Lowers every phase for every tp coordinate. A coordinate affects nothing but the sizes of uneven
/// shards: coordinates with equal sizes are lowered once.
fn lower_tp_classes<'a>(
    mesh: Mesh,
    phases: &'a [ProgramAnalysis<'a>],
    lower_phase: impl Fn(&'a ProgramAnalysis<'a>, u32) -> Result<Vec<Program>, Diagnostics>,
) -> Result<Vec<RankClass>, Diagnostics> {
    let tp = mesh.axis_size(Axis::Tp);
    let mut classes: Vec<RankClass> = Vec::new();
    let mut uneven: BTreeSet<(Uneven, Option<u32>)> = BTreeSet::new();
    for at in 0..tp {
        let size = |(u, subgroup_size): &(Uneven, Option<u32>)| {
            Shard { dim: 0, uneven: Some(*u), subgroup_size: *subgroup_size }.global_range(0, tp, at).1
        };
        let sizes: Vec<u64> = uneven.iter().map(size).collect();
        if at > 0
            && let Some(class) = classes.iter_mut().find(|k| k.shard_sizes == sizes)
        {
            class.coordinates.push(at);
            continue;
        }
        let mut per_stage: Vec<Vec<Program>> = vec![Vec::new(); mesh.axis_size(Axis::Pp) as usize];
        for phase in phases {
            let lowered = lower_phase(phase, at)?;
            for (stage, p) in lowered.into_iter().enumerate() {
                per_stage[stage].push(p);
            }
        }
        uneven.extend(per_stage.iter().flatten().flat_map(uneven_shards));
        let sizes = uneven.iter().map(size).collect();
        classes.push(RankClass { shard_sizes: sizes, coordinates: vec![at], experts: None, per_stage });
    }
    Ok(classes)
}

/// Regroups the programs of each role by phase, and assigns their transport, the algorithms of their
/// sums, and slots.
fn collect_phases(
    sources: &[ProgramAnalysis<'_>],
    of_role: Vec<Vec<Program>>,
    mapping: &Mapping,
) -> Vec<Phase> {
    let mut of_role: Vec<std::vec::IntoIter<Program>> = of_role.into_iter().map(Vec::into_iter).collect();
    sources
        .iter()
        .map(|phase| {
            let name = &phase.program.name;
            let mut programs: Vec<Program> = of_role.iter_mut().filter_map(Iterator::next).collect();
            programs.iter_mut().for_each(|p| set_transport(p, mapping.transport));
            programs.iter_mut().for_each(|p| tag_algorithms(p, mapping.ring_from_bytes));
            // A CPU captures nothing.
            if mapping.capture == CapturePolicy::Programs && !is_leader_cpu_phase(phase.program) {
                programs.iter_mut().for_each(|p| p.capture_into(name));
            }
            let slots: Vec<Slots> = programs.iter().map(memory::assign_slots).collect();
            Phase { name: name.clone(), programs, slots }
        })
        .collect()
}

/// Writes the transport into every collective, unless the choice is left open.
fn set_transport(p: &mut Program, transport: Transport) {
    if transport == Transport::Best {
        return;
    }
    for op in p.ops.iter_mut().filter(|op| op.opcode.is_collective()) {
        op.attrs.insert("transport".into(), Attr::Str(transport.name().into()));
    }
}

/// Tags every all-reduce with the tree or, from this many bytes on, with the ring; without a threshold,
/// with neither. The bytes are those of one rank's operand, as in an estimate. A gather has no tag: it
/// knows no tree.
fn tag_algorithms(p: &mut Program, ring_from_bytes: Option<u64>) {
    let Some(from) = ring_from_bytes else { return };
    let payload = |op| match transfer_payload(p, op)? {
        (CollectiveOp::AllReduce, bytes) => Some(bytes),
        _ => None,
    };
    let payloads: Vec<Option<f64>> = p.ops.iter().map(payload).collect();
    for (op, bytes) in p.ops.iter_mut().zip(payloads) {
        let Some(bytes) = bytes else { continue };
        let is_small = bytes < from as f64;
        let tag = if is_small { CollectiveAlgorithm::Tree } else { CollectiveAlgorithm::Ring };
        op.attrs.insert("algorithm".into(), Attr::Str(tag.name().into()));
    }
}

/// The local counterpart of a logical value on one stage.
#[derive(Clone, Copy)]
enum LocalValue {
    /// The value is defined in the stage's program and needs no wait.
    Ready(ValueId),
    /// The value's collective has been issued; its first reader waits for it.
    Pending(ValueId),
}

/// The ranks whose programs are lowered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoweringTarget {
    /// All stages at this tp coordinate, and from this ep coordinate on, if that determines the number of experts.
    Mesh { tp: u32, ep: Option<u32> },
    /// The leader outside the mesh, which runs the encode and decode phases.
    Leader,
}

struct Lowering<'a> {
    program: &'a Program,
    analysis: &'a ProgramAnalysis<'a>,
    /// Whether this target runs the phase. A leader outside the mesh runs the encode and decode
    /// phases, and the mesh runs the others; in topology `mesh`, the mesh runs all.
    is_active: bool,
    sharding: ShardingRules,
    experts: &'a ExpertMapping,
    mesh_invariant: bool,
    /// Rows of latents in a phase of pixels, of which each rank of tp owns whole ones.
    latent_rows: Option<u64>,
    /// First block of each stage, and one past the last block.
    stage_bounds: Vec<u64>,
    stages: Vec<StageBuilder>,
    mesh: Mesh,
}

struct StageBuilder {
    builder: Builder,
    values: BTreeMap<ValueId, LocalValue>,
    /// Tickets of sends that have no wait yet.
    pending_sends: Vec<ValueId>,
}

impl<'a> Lowering<'a> {
    fn new(
        logical: &LogicalModel,
        mapping: &'a Mapping,
        mesh: Mesh,
        analysis: &'a ProgramAnalysis<'a>,
        target: LoweringTarget,
    ) -> Lowering<'a> {
        let program = analysis.program;
        let mut stage_bounds = vec![0];
        for n in &mapping.blocks {
            stage_bounds.push(stage_bounds[stage_bounds.len() - 1] + n);
        }
        let expert_axis = mapping.experts.axis.mesh_axis();
        // Phases of a model without experts have no collectives of experts, whatever the axis.
        let axes = [Some(Axis::Tp), Some(Axis::Pp), (logical.experts > 0).then_some(expert_axis)];
        let [tp, pp, expert_ranks] = match target {
            LoweringTarget::Mesh { .. } => axes.map(|axis| axis.map_or(1, |axis| mesh.axis_size(axis))),
            LoweringTarget::Leader => [1; 3],
        };
        let streams: Vec<StreamKind> = [
            Some(StreamKind::Compute),
            (tp > 1).then_some(StreamKind::TpCollective),
            (pp > 1).then_some(StreamKind::Pp),
            (expert_ranks > 1).then_some(StreamKind::A2a),
        ]
        .into_iter()
        .flatten()
        .collect();
        let role = |s| match target {
            LoweringTarget::Mesh { tp, ep: None } => format!("stage{s}@tp{tp}"),
            LoweringTarget::Mesh { tp, ep: Some(ep) } => format!("stage{s}@tp{tp}@ep{ep}"),
            LoweringTarget::Leader => LEADER.to_string(),
        };
        let stages = (0..pp)
            .map(|s| StageBuilder {
                builder: Builder::new_role(&program.name, &role(s), mesh, &streams),
                values: BTreeMap::new(),
                pending_sends: Vec::new(),
            })
            .collect();
        Lowering {
            program,
            analysis,
            is_active: mesh.outside_count() == 0
                || analysis.is_leader_phase == (target == LoweringTarget::Leader),
            sharding: ShardingRules {
                strategy: mapping.strategy,
                tp,
                expert_axis,
                expert_ranks,
                head_dim: logical.head_dim,
            },
            experts: &mapping.experts,
            mesh_invariant: mapping.numerics == Numerics::MeshInvariant,
            latent_rows: (analysis.is_media_phase && mapping.media == MediaPlacement::Mesh)
                .then(|| frames::latent_rows(program))
                .flatten(),
            stage_bounds,
            stages,
            mesh,
        }
    }

    fn run(mut self) -> Result<Vec<Program>, Diagnostics> {
        let mut lowered = vec![!self.is_active; self.program.ops.len()];
        for i in 0..self.program.ops.len() {
            let op = &self.program.ops[i];
            if lowered[i] || op.opcode.table_row().kind == OpKind::Source && op.opcode != Opcode::CacheRead {
                continue;
            }
            for s in self.owning_stages(i) {
                if self.analysis.owners[i] == OpOwner::All && !self.is_needed(i, s) {
                    continue;
                }
                if let Some(also) = self.lower_op(i, s) {
                    lowered[also] = true;
                }
            }
        }
        let mut out = Vec::new();
        let mut ds = Vec::new();
        for mut stage in self.stages {
            for t in std::mem::take(&mut stage.pending_sends) {
                stage.builder.set_stream(StreamKind::Compute);
                stage.builder.add_wait(t, None);
            }
            match stage.builder.finish() {
                Ok(p) => out.push(p),
                Err(es) => ds.extend(
                    es.into_iter().map(|e| Diagnostic::error(&T0606, e.message).with_note(e.code.title)),
                ),
            }
        }
        if ds.is_empty() { Ok(out) } else { Err(ds) }
    }

    /// Returns the stages that run an op. An `all` op may run on every stage that needs it.
    fn owning_stages(&self, i: usize) -> std::ops::RangeInclusive<usize> {
        let last = self.stages.len() - 1;
        match self.analysis.owners[i] {
            OpOwner::All => 0..=last,
            OpOwner::Last => last..=last,
            OpOwner::Block(block) => {
                let stage = self.stage_bounds.iter().rposition(|b| *b <= block).unwrap_or(0).min(last);
                stage..=stage
            }
            OpOwner::First => 0..=0,
        }
    }

    /// Returns whether a stage needs an `all` op: an op that the stage owns, or an `all` op that it
    /// needs, reads a result.
    fn is_needed(&self, i: usize, s: usize) -> bool {
        let readers = self.program.ops[i].results.iter().flat_map(|r| &self.analysis.readers[r.0 as usize]);
        let mut owned = readers.filter(|j| self.owning_stages(**j).contains(&s));
        owned.any(|j| self.analysis.owners[*j] != OpOwner::All || self.is_needed(*j, s))
    }

    /// Lowers one op on one stage and returns the index of another op that was lowered with it, if
    /// any.
    fn lower_op(&mut self, i: usize, s: usize) -> Option<usize> {
        let op = &self.program.ops[i];
        let by_heads = self.analysis.wants_heads[i];
        if self.analysis.is_media_phase && self.lower_frame_op(op, s) {
            return None;
        }
        match (op.opcode.table_row().traits.lowering, op.view()) {
            (LoweringRule::Own, Ok(OpView::Matmul(v))) => self.lower_matmul(op, &v, s, by_heads),
            (LoweringRule::Own, Ok(OpView::RmsNorm(_))) => return self.lower_rms_norm(i, s),
            (LoweringRule::Own, Ok(OpView::RowSquareSum(_))) => self.lower_row_square_sum(op, s),
            (LoweringRule::Own, Ok(OpView::CacheWrite(v))) => self.lower_cache_write(op, &v, s),
            (LoweringRule::Own, Ok(OpView::CacheRead(_))) => self.lower_cache_read(op, s),
            (LoweringRule::Own, Ok(OpView::Attention(v))) => self.lower_attention(op, &v, s),
            (LoweringRule::Own, Ok(OpView::Sample(_))) => self.lower_sample(op, s),
            (LoweringRule::Own, Ok(OpView::Embed(_))) => self.lower_with_sum(op, s),
            (LoweringRule::Own, Ok(OpView::ExpertTokens(v))) => self.lower_expert_tokens(op, &v, s),
            (
                LoweringRule::Own,
                Ok(OpView::ExpertCounts(_) | OpView::ExpertPack(_) | OpView::ExpertPackFused(_)),
            ) => self.lower_to_experts(op, s),
            (LoweringRule::Own, Ok(OpView::ExpertStatistics(_) | OpView::ExpertDistance(_))) => {
                self.lower_expert_statistics(op, s);
            }
            (LoweringRule::Own, Ok(OpView::ExpertCombine(v))) => self.lower_expert_combine(op, &v, s),
            // A rank has the query heads that read its KV heads.
            (
                LoweringRule::Own,
                Ok(OpView::GroupedMatmul(_) | OpView::HeadMatmul(_) | OpView::PagedAttention(_)),
            ) => self.lower_as_is(op, s),
            (LoweringRule::Own, Ok(OpView::Output(_))) => self.lower_output(op, s),
            (LoweringRule::Own, Ok(OpView::Quantize(_))) => self.lower_quantize(op, s),
            // `check_opcodes` has refused the third kind, and sources are lowered where they are read.
            (LoweringRule::ByRow | LoweringRule::Own | LoweringRule::Refused, _) => {
                self.lower_rowwise(op, s, by_heads);
            }
        }
        None
    }
}
