//! Lowers logical programs to one program per role: chooses layouts, inserts collectives, computes
//! local shapes and assigns stages.
//!
//! One walk over the logical program lowers all stages of one tp coordinate, so that both ends of a
//! send have the same type at the same position. Coordinates with equal programs form one role. A
//! leader outside the mesh is a role of its own: it runs the encode and decode phases and the mesh
//! runs the others, and each has an empty program for the phases of the other.

mod collectives;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_ir::{
    Attr, Builder, Bundle, Op, OpKind, Opcode, Phase, Program, RoleRanks, Slots, Type, ValueId,
};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, Shard, Uneven};

use crate::mapping::ModelExtents;
use crate::ownership::{OpOwner, ProgramAnalysis};
use crate::roles::{TpClass, group_roles, uneven_shards};
use crate::stages::StageCosts;
use crate::strategy::{ShardingRules, check_opcodes, check_parts, reads_self_cache};
use crate::{DtypePolicy, Mapping, Numerics, Strategy, Transport, memory, op_order, precision, row_chunks};

/// Lowering produced a program that fails the op rules.
pub static T0606: Code = Code {
    id: "T0606",
    title: "strategy has no rule for this op",
    page: "The strategy met an op with operands in layouts that no rule covers, so no correct program could be made. \
The message names the op and the layouts. This code also rejects a hint `part` that no strategy knows: treating it as \
`whole` would give correct results but waste ranks. Another strategy, or tp=1, may work; the rejection itself is a gap in the planner.",
};

/// The role of the leader outside the mesh.
const LEADER: &str = "leader@out0";

/// Number of segments of a split contraction under the mesh-invariant policy.
const SEGMENTS: i64 = 8;

/// The logical programs of a model and the sizes that the planner needs.
#[derive(Debug, Clone)]
pub struct LogicalModel {
    /// Logical programs, one per phase.
    pub phases: Vec<Program>,
    /// Legal calls: a name and its phases in order.
    pub calls: Vec<(String, Vec<String>)>,
    /// Number of attention heads.
    pub heads: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width of the feed-forward layer.
    pub ffn_size: u64,
    /// Video tokens per generated chunk: the rows that a block processes in one call.
    pub tokens: u64,
    /// Number of transformer blocks.
    pub blocks: u64,
}

impl LogicalModel {
    pub(crate) fn model_extents(&self) -> ModelExtents {
        ModelExtents {
            heads: self.heads,
            hidden_size: self.hidden_size,
            ffn_size: self.ffn_size,
            tokens: self.tokens,
            blocks: self.blocks,
        }
    }
}

/// Lowers every phase under a mapping and fills in the mapping's blocks per stage if they are
/// empty.
///
/// # Errors
/// Returns every reason why the mapping does not fit, or T0606.
pub fn lower(logical: &LogicalModel, mapping: &mut Mapping) -> Result<Bundle, Diagnostics> {
    let mut ds = mapping.check_fit(&logical.model_extents());
    ds.extend(check_parts(&logical.phases));
    ds.extend(check_opcodes(&logical.phases));
    if !ds.is_empty() {
        return Err(ds);
    }
    let rounded;
    let logical = match mapping.dtype {
        DtypePolicy::F32 => logical,
        dtype => {
            let phases = logical
                .phases
                .iter()
                .map(|p| precision::apply_dtype_policy(p, dtype, mapping.strategy))
                .collect::<Result<_, _>>()?;
            rounded = LogicalModel { phases, ..logical.clone() };
            &rounded
        }
    };
    let mesh = mapping.mesh;
    let stages = u64::from(mesh.axis_size(Axis::Pp));
    if mapping.blocks.is_empty() {
        mapping.blocks = StageCosts::from_model(logical).split_blocks(stages);
    }
    let chunked;
    let logical = match mapping.overlap_chunks {
        1 => logical,
        n => {
            let phases =
                logical.phases.iter().map(|p| row_chunks::split_rows(p, n)).collect::<Result<_, _>>()?;
            chunked = LogicalModel { phases, ..logical.clone() };
            &chunked
        }
    };
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
    // A coordinate affects nothing but the sizes of uneven shards: coordinates with equal sizes are
    // lowered once.
    let tp = mesh.axis_size(Axis::Tp);
    let mut classes: Vec<TpClass> = Vec::new();
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
        let mut per_stage: Vec<Vec<Program>> = vec![Vec::new(); stages as usize];
        for phase in &sources {
            let lowered =
                Lowering::new(logical, mapping, world, phase, LoweringTarget::Mesh { tp: at }).run()?;
            for (stage, p) in lowered.into_iter().enumerate() {
                per_stage[stage].push(p);
            }
        }
        uneven.extend(per_stage.iter().flatten().flat_map(uneven_shards));
        let sizes = uneven.iter().map(size).collect();
        classes.push(TpClass { shard_sizes: sizes, coordinates: vec![at], per_stage });
    }
    let (mut roles, mut of_role) = group_roles(&world, classes);
    if world.outside_count() > 0 {
        let mut leader_programs = Vec::new();
        for phase in &sources {
            leader_programs
                .extend(Lowering::new(logical, mapping, world, phase, LoweringTarget::Leader).run()?);
        }
        roles.insert(
            0,
            RoleRanks { role: LEADER.to_string(), ranks: (0..world.outside_count()).map(Rank).collect() },
        );
        of_role.insert(0, leader_programs);
    }
    let mut of_role: Vec<std::vec::IntoIter<Program>> = of_role.into_iter().map(Vec::into_iter).collect();
    let phases = logical
        .phases
        .iter()
        .map(|l| {
            let mut programs: Vec<Program> = of_role.iter_mut().filter_map(Iterator::next).collect();
            programs.iter_mut().for_each(|p| set_transport(p, mapping.transport));
            let memory: Vec<Slots> = programs.iter().map(memory::assign_slots).collect();
            Phase { name: l.name.clone(), programs, slots: memory }
        })
        .collect();
    Ok(Bundle {
        mesh: world,
        rank_map,
        roles,
        phases,
        calls: logical.calls.clone(),
        mapping: mapping.to_toml(),
    })
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

/// The local counterpart of a logical value on one stage.
#[derive(Clone, Copy)]
enum LocalValue {
    /// The value is available.
    Ready(ValueId),
    /// The value's collective has been issued; its first reader waits for it.
    Pending(ValueId),
}

/// The ranks whose programs are lowered.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LoweringTarget {
    /// All stages at this tp coordinate.
    Mesh { tp: u32 },
    /// The leader outside the mesh.
    Leader,
}

struct Lowering<'a> {
    program: &'a Program,
    analysis: &'a ProgramAnalysis<'a>,
    /// Whether the phase runs on this target at all.
    is_active: bool,
    sharding: ShardingRules,
    mesh_invariant: bool,
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
        mapping: &Mapping,
        mesh: Mesh,
        analysis: &'a ProgramAnalysis<'a>,
        target: LoweringTarget,
    ) -> Lowering<'a> {
        let program = analysis.program;
        let mut stage_bounds = vec![0];
        for n in &mapping.blocks {
            stage_bounds.push(stage_bounds[stage_bounds.len() - 1] + n);
        }
        let (tp, pp) = match target {
            LoweringTarget::Mesh { .. } => (mesh.axis_size(Axis::Tp), mesh.axis_size(Axis::Pp)),
            LoweringTarget::Leader => (1, 1),
        };
        let streams: &[&str] = match (tp > 1, pp > 1) {
            (false, false) => &["compute"],
            (true, false) => &["compute", "tp_collective"],
            (false, true) => &["compute", "pp"],
            (true, true) => &["compute", "tp_collective", "pp"],
        };
        let role = |s| match target {
            LoweringTarget::Mesh { tp } => format!("stage{s}@tp{tp}"),
            LoweringTarget::Leader => LEADER.to_string(),
        };
        let stages = (0..pp)
            .map(|s| StageBuilder {
                builder: Builder::new_role(&program.name, &role(s), mesh, streams),
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
                head_dim: logical.hidden_size / logical.heads,
            },
            mesh_invariant: mapping.numerics == Numerics::MeshInvariant,
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
                stage.builder.set_stream("compute");
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
        match op.opcode {
            Opcode::Matmul => self.lower_matmul(op, s, self.analysis.wants_heads[i]),
            Opcode::RmsNorm => return self.lower_rms_norm(i, s),
            Opcode::RowSquareSum => self.lower_row_square_sum(op, s),
            Opcode::CacheWrite => self.lower_cache_write(op, s),
            Opcode::CacheRead => self.lower_cache_read(op, s),
            Opcode::Attention => self.lower_attention(op, s),
            Opcode::Output => self.lower_output(op, s),
            Opcode::Quantize => self.lower_quantize(op, s),
            _ => self.lower_rowwise(op, s, self.analysis.wants_heads[i]),
        }
        None
    }

    // Values.

    /// Returns the local counterpart of a logical value on stage `s`, in any layout.
    fn local_value(&mut self, v: ValueId, s: usize) -> ValueId {
        match self.stages[s].values.get(&v) {
            Some(LocalValue::Ready(x)) => return *x,
            Some(LocalValue::Pending(ticket)) => {
                let ticket = *ticket;
                let x = self.wait_for(s, ticket, None);
                self.stages[s].values.insert(v, LocalValue::Ready(x));
                return x;
            }
            None => {}
        }
        let x = match self.analysis.defs[v.0 as usize].map(|d| &self.program.ops[d]) {
            Some(op) if op.opcode.table_row().kind == OpKind::Source && op.opcode != Opcode::CacheRead => {
                self.lower_source(op, s)
            }
            _ => self.receive_from_owner(v, s),
        };
        self.stages[s].values.insert(v, LocalValue::Ready(x));
        x
    }

    fn lower_source(&mut self, op: &Op, s: usize) -> ValueId {
        let logical = self.program.type_of(op.results[0]).clone();
        let layout = match op.opcode {
            Opcode::Weight => self.sharding.weight_layout(op, &logical.shape),
            _ => AxisLayout::Replicated,
        };
        let ty = self.local_type(&logical, layout, s);
        let name = op.name.clone().unwrap_or_default();
        let b = &mut self.stages[s].builder;
        if let Some(load) = op.str_attr("load") {
            b.set_attr("load", load);
        }
        b.set_label(&self.program.value(op.results[0]).name);
        let x = match op.opcode {
            Opcode::Weight => b.add_weight(&name, ty),
            Opcode::Call => b.add_call_scalar(&name, ty),
            _ => b.add_input(&name, ty),
        };
        // An input that holds tokens arrives whole; each rank keeps its own.
        if op.str_attr("part") == Some("tokens") {
            let want = self.sharding.token_layout(&logical.shape);
            return self.reshard(x, want, s, 1);
        }
        x
    }

    /// Sends a value from the stage that holds it to stage `s` and waits for it there.
    fn receive_from_owner(&mut self, v: ValueId, s: usize) -> ValueId {
        let from =
            (0..self.stages.len()).find(|t| *t != s && self.stages[*t].values.contains_key(&v)).unwrap_or(0);
        let x = self.local_value(v, from);
        let ty = self.stages[from].builder.type_of(x).clone();
        let ticket = self.issue_collective(from, Opcode::Send, &[x], &[("to", s as i64)], "pp", Axis::Pp);
        self.stages[from].pending_sends.push(ticket);
        let b = &mut self.stages[s].builder;
        // The compute stream is the last that touched the memory which the receive overwrites.
        b.set_stream("compute");
        let event = b.add_op(Opcode::EventRecord, &[]);
        b.set_attr("axis", "pp").set_attr("from", from as i64).set_stream("pp").start_after(event);
        let ticket = b.add_recv(ty.clone());
        self.wait_for(s, ticket, Some(ty))
    }

    fn local_type(&self, logical: &Type, layout: AxisLayout, s: usize) -> Type {
        let program = self.stages[s].builder.program();
        let mut ty = logical.clone().with_axis_layout(Axis::Tp, layout);
        if let AxisLayout::Shard(shard) = layout {
            ty.shape[shard.dim] = match shard.uneven {
                None => ty.shape[shard.dim] / u64::from(shard.part_count(self.mesh.axis_size(Axis::Tp))),
                Some(u) => tessera_ir::rules::role_shard_len(program, Axis::Tp, u, shard.subgroup_size),
            };
        }
        ty
    }

    fn set_result(&mut self, op: &Op, s: usize, x: ValueId) {
        self.stages[s].values.insert(op.results[0], LocalValue::Ready(x));
    }

    fn tp_layout(&self, x: ValueId, s: usize) -> AxisLayout {
        self.stages[s].builder.type_of(x).layout.on_axis(Axis::Tp)
    }

    // Ops.

    fn lower_matmul(&mut self, op: &Op, s: usize, by_heads: bool) {
        use AxisLayout::{Replicated, Shard as S};
        let w = self.local_value(op.operands[1], s);
        let mut x = self.local_value(op.operands[0], s);
        let (lx, lw) = (self.tp_layout(x, s), self.tp_layout(w, s));
        // The rows of x may be sharded; its columns only if w is sharded alike.
        let split = matches!((lx, lw), (S(a), S(b)) if a.dim == 1 && a == b);
        if let S(a) = lx
            && a.dim == 1
            && !split
        {
            let global = self.stages[s].builder.type_of(x).shape[0];
            let want = if lw == Replicated { self.sharding.token_layout(&[global]) } else { Replicated };
            x = self.reshard(x, want, s, 1);
        }
        let bias = op.keyed_operand("bias").map(|b| self.local_value(b, s));
        let scales = ["x_scale", "w_scale"].map(|k| op.keyed_operand(k).map(|v| (k, self.local_value(v, s))));
        let act = op.str_attr("act").map(str::to_string);
        let segmented = self.mesh_invariant && self.weight_part(op.operands[1]) == Some("row");
        let b = &mut self.stages[s].builder;
        if segmented {
            b.set_attr("segments", if split { SEGMENTS / i64::from(self.sharding.tp) } else { SEGMENTS });
        }
        let y = if split {
            // A bias or activation inside the matmul would apply to each rank's partial sum.
            let y = b.add_op(Opcode::Matmul, &[x, w]);
            if bias.is_none() && act.is_none() {
                return self.set_reduced_result(op, s, y);
            }
            let mut y = self.all_reduce(y, s);
            if let Some(bias) = bias {
                let b = &mut self.stages[s].builder;
                if let Some(act) = &act {
                    b.set_attr("act", act.as_str());
                }
                y = b.add_op(Opcode::BiasAct, &[y, bias]);
            }
            y
        } else {
            if let Some(act) = &act {
                b.set_attr("act", act.as_str());
            }
            if let Some(bias) = bias {
                b.add_keyed("bias", bias);
            }
            for (k, scale) in scales.into_iter().flatten() {
                b.add_keyed(k, scale);
            }
            b.add_op(Opcode::Matmul, &[x, w])
        };
        self.finish_row_op(op, s, y, by_heads);
    }

    /// Lowers a quantization, which needs whole rows: reshards from columns to rows, as the reading
    /// matmul would require anyway.
    fn lower_quantize(&mut self, op: &Op, s: usize) {
        let mut x = self.local_value(op.operands[0], s);
        if matches!(self.tp_layout(x, s), AxisLayout::Shard(shard) if shard.dim == 1) {
            let want = self.sharding.token_layout(&self.program.type_of(op.operands[0]).shape);
            x = self.reshard(x, want, s, 1);
        }
        let made = self.stages[s].builder.add_quantize(x);
        for (logical, local) in op.results.iter().zip(made) {
            self.stages[s].values.insert(*logical, LocalValue::Ready(local));
        }
    }

    fn weight_part(&self, weight: ValueId) -> Option<&str> {
        self.analysis.defs[weight.0 as usize].and_then(|d| self.program.ops[d].str_attr("part"))
    }

    /// Stores a result; if every reader wants it by heads and it is sharded by tokens, issues its
    /// all-to-all now.
    fn finish_row_op(&mut self, op: &Op, s: usize, y: ValueId, by_heads: bool) {
        if by_heads && let AxisLayout::Shard(from) = self.tp_layout(y, s) {
            let width = self.stages[s].builder.type_of(y).shape[1];
            if from.dim == 0
                && let AxisLayout::Shard(to) = self.sharding.head_layout(width)
            {
                let unit = self.sharding.head_dim;
                let ticket = self.issue_all_to_all(y, from, to, s, unit);
                self.stages[s].values.insert(op.results[0], LocalValue::Pending(ticket));
                return;
            }
        }
        self.set_result(op, s, y);
    }

    /// Lowers a norm over whole rows, or over sharded rows with one small all-reduce of the square
    /// sums. A following norm of the same shape shares that all-reduce.
    fn lower_rms_norm(&mut self, i: usize, s: usize) -> Option<usize> {
        let op = &self.program.ops[i];
        let x = self.local_value(op.operands[0], s);
        let sharded = matches!(self.tp_layout(x, s), AxisLayout::Shard(shard) if shard.dim == 1);
        let by_heads = self.analysis.wants_heads[i];
        if !sharded {
            let w = self.local_value(op.operands[1], s);
            let segmented = self.mesh_invariant;
            let b = &mut self.stages[s].builder;
            if segmented {
                b.set_attr("segments", SEGMENTS);
            }
            b.set_attr("eps", op.float_attr("eps").unwrap_or(1e-6));
            let y = b.add_op(Opcode::RmsNorm, &[x, w]);
            self.finish_row_op(op, s, y, by_heads);
            return None;
        }
        let mut ops = vec![(op, x)];
        let mut second = None;
        let next_op = (i + 1..self.program.ops.len()).find(|j| self.program.ops[*j].opcode != Opcode::Weight);
        if let Some(j) = next_op
            && self.program.ops[j].opcode == Opcode::RmsNorm
            && self.owning_stages(j) == (s..=s)
        {
            let next = &self.program.ops[j];
            let y = self.local_value(next.operands[0], s);
            if self.stages[s].builder.type_of(y) == self.stages[s].builder.type_of(x) {
                ops.push((next, y));
                second = Some(j);
            }
        }
        let width = self.program.type_of(op.results[0]).shape[1];
        let values: Vec<ValueId> = ops.iter().map(|o| o.1).collect();
        let sums = self.emit_square_sums(&values, s);
        let sums = self.all_reduce(sums, s);
        for (col, (op, x)) in ops.iter().enumerate() {
            let w = self.local_value(op.operands[1], s);
            let b = &mut self.stages[s].builder;
            b.set_attr("col", col as u64)
                .set_attr("width", width)
                .set_attr("eps", op.float_attr("eps").unwrap_or(1e-6));
            let y = b.add_op(Opcode::RmsScale, &[*x, sums, w]);
            self.set_result(op, s, y);
        }
        second
    }

    fn lower_row_square_sum(&mut self, op: &Op, s: usize) {
        let values: Vec<ValueId> = op.operands.iter().map(|v| self.local_value(*v, s)).collect();
        let sums = self.emit_square_sums(&values, s);
        self.set_reduced_result(op, s, sums);
    }

    /// Emits the per-row square sums of values with equal layouts; the result is partial if columns
    /// are sharded.
    fn emit_square_sums(&mut self, values: &[ValueId], s: usize) -> ValueId {
        let split = matches!(self.tp_layout(values[0], s), AxisLayout::Shard(shard) if shard.dim == 1);
        let b = &mut self.stages[s].builder;
        if self.mesh_invariant {
            b.set_attr("segments", if split { SEGMENTS / i64::from(self.sharding.tp) } else { SEGMENTS });
        }
        b.add_op(Opcode::RowSquareSum, values)
    }

    fn local_buffer(&mut self, op: &Op, s: usize) -> (tessera_ir::BufferId, Type) {
        let logical = op.buffer.map(|b| self.program.buffer(b));
        let (name, ty) = logical.map_or((String::new(), None), |b| (b.name.clone(), Some(b.ty.clone())));
        let ty = ty.unwrap_or_else(|| Type::scalar(tessera_ir::DType::F32));
        let layout = self.sharding.buffer_layout(&name, &ty.shape);
        let local = self.local_type(&ty, layout, s);
        (self.stages[s].builder.declare_buffer(&name, local.clone()), local)
    }

    fn lower_cache_write(&mut self, op: &Op, s: usize) {
        let x = self.local_value(op.operands[0], s);
        let (buffer, ty) = self.local_buffer(op, s);
        let unit = if op.buffer.is_some_and(|b| self.program.buffer(b).name.contains('.')) {
            self.sharding.head_dim
        } else {
            1
        };
        let x = self.reshard(x, ty.layout.on_axis(Axis::Tp), s, unit);
        let row = op.keyed_operand("row").map(|r| self.local_value(r, s));
        let b = &mut self.stages[s].builder;
        if let Some(first) = op.int_attr("first_row") {
            b.set_attr("first_row", first);
        }
        if let Some(row) = row {
            b.add_keyed("row", row);
        }
        b.write_buffer(buffer, x);
    }

    fn lower_cache_read(&mut self, op: &Op, s: usize) {
        let (buffer, _) = self.local_buffer(op, s);
        let b = &mut self.stages[s].builder;
        for name in ["row", "rows"] {
            if let Some(n) = op.int_attr(name) {
                b.set_attr(name, n);
            }
        }
        let x = b.read_buffer(buffer);
        self.set_result(op, s, x);
    }

    fn lower_attention(&mut self, op: &Op, s: usize) {
        let is_self_attention = reads_self_cache(self.program, self.analysis.defs[op.operands[1].0 as usize]);
        let mut q = self.local_value(op.operands[0], s);
        let (k, v) = (self.local_value(op.operands[1], s), self.local_value(op.operands[2], s));
        if is_self_attention {
            let want = self.tp_layout(k, s);
            let unit = self.sharding.head_dim;
            q = self.reshard(q, want, s, unit);
        }
        let bias = op.keyed_operand("bias").map(|b| self.local_value(b, s));
        let b = &mut self.stages[s].builder;
        b.set_attr("head_dim", self.sharding.head_dim);
        if let Some(rows) = op.ints_attr("bias_rows") {
            b.set_attr("bias_rows", rows.to_vec());
        }
        if let Some(bias) = bias {
            b.add_keyed("bias", bias);
        }
        let y = b.add_op(Opcode::Attention, &[q, k, v]);
        self.set_result(op, s, y);
    }

    fn lower_output(&mut self, op: &Op, s: usize) {
        let x = self.local_value(op.operands[0], s);
        let x = self.reshard(x, AxisLayout::Replicated, s, 1);
        self.stages[s].builder.add_output(op.name.as_deref().unwrap_or("out"), x);
    }

    /// Lowers an op that works row by row, so its rows may be sharded. Operands after the first
    /// take the first one's layout if they have the same shape; per-frame and per-column operands
    /// keep theirs.
    fn lower_rowwise(&mut self, op: &Op, s: usize, by_heads: bool) {
        let mut operands = Vec::new();
        for v in &op.operands {
            let x = self.local_value(*v, s);
            operands.push(x);
        }
        if let Some(first) = operands.first().copied() {
            let rows = self.program.type_of(op.operands[0]).shape.clone();
            let want = self.tp_layout(first, s);
            for (i, x) in operands.iter_mut().enumerate().skip(1) {
                if self.program.type_of(op.operands[i]).shape == rows {
                    *x = self.reshard(*x, want, s, 1);
                }
            }
        }
        let keyed: Vec<(&'static str, ValueId)> =
            op.keyed.iter().map(|(k, v)| (*k, self.local_value(*v, s))).collect();
        let b = &mut self.stages[s].builder;
        let mut attrs = op.attrs.clone();
        for logical_only in ["at", "part", "unit"] {
            attrs.remove(logical_only);
        }
        b.set_attrs(attrs);
        for (k, v) in keyed {
            b.add_keyed(k, v);
        }
        let y = b.add_op(op.opcode, &operands);
        self.finish_row_op(op, s, y, by_heads);
    }
}
