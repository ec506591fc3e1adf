//! The shape rule and the sharding rule of every op. A rule maps operand types to result types, or
//! reports why it rejects them.
//!
//! The builder uses the rules to infer types, and the verifier uses them again to check programs.
//! The reference evaluator does not use them, so that a wrong rule cannot confirm itself.

mod buffers;
mod compute;
mod embedding;
mod expert_features;
mod experts;
mod heads;
mod image;
mod language;
mod possible_types;
mod resharding;
mod softmax_bmm_moe;
mod well_formed;

use tessera_base::Code;
use tessera_mesh::{Axis, AxisLayout, Group, Layout, Mesh, Reduction, Shard, Uneven};

use crate::attr_kind::{AttrKind, Int, MAX_ELEMENTS};
pub use crate::codes::T0215;
use crate::codes::{T0203, T0210, T0211, T0212, T0213, T0214};
use crate::{DType, Op, OpView, Opcode, Program, Type, ViewError, views};
pub use possible_types::check_type;
pub(crate) use softmax_bmm_moe::quantize_without_policy;
use well_formed::check_well_formed;

/// Reason why a rule rejects an op.
#[derive(Debug)]
pub struct RuleError {
    /// Diagnostic code: T0203, or one of T0210 to T0215.
    pub code: &'static Code,
    /// The broken rule, with the conflicting values of this op where there are any.
    pub message: String,
}

type RuleResult<T> = Result<T, RuleError>;

impl From<ViewError> for RuleError {
    fn from(e: ViewError) -> RuleError {
        RuleError { code: &T0215, message: e.message }
    }
}

fn rule_error<T>(code: &'static Code, message: impl Into<String>) -> RuleResult<T> {
    Err(RuleError { code, message: message.into() })
}

/// Infers the result types of an op of `program`. `declared` are the types written at the results;
/// sources, receives and their waits use them as they are. `definitions` holds the index of the op
/// that defines each value, as [`Program::defining_ops`] returns it; it may omit trailing values
/// that the op does not read. A wait finds its issue there: a search for it would take time
/// proportional to the program at every wait.
///
/// # Errors
/// T0203 if the op does not match its row of the op table, T0210 to T0215 if its rule rejects it.
pub fn infer_types(
    program: &Program,
    op: &Op,
    declared: &[Type],
    definitions: &[Option<usize>],
) -> RuleResult<Vec<Type>> {
    check_well_formed(program, op)?;
    if op.opcode == Opcode::Wait {
        let definition = definitions.get(op.operands[0].0 as usize).copied().flatten();
        return match definition.and_then(|d| program.ops.get(d)).filter(|o| o.issue) {
            None => rule_error(&T0212, "the operand is not the ticket of an issued collective"),
            Some(issue) => infer_results(program, issue, declared),
        };
    }
    let ticket = || Ok(vec![Type::scalar(DType::Ticket)]);
    // The type of an issued receive is only known at its wait.
    if op.issue && op.opcode == Opcode::Recv {
        let recv = views::Recv::new(op)?;
        let cx = RuleContext { program, op, mesh: &program.mesh, operands: vec![] };
        cx.peer_group("from", recv.from)?;
        return ticket();
    }
    let results = infer_results(program, op, declared)?;
    if op.issue { ticket() } else { Ok(results) }
}

fn infer_results(program: &Program, op: &Op, declared: &[Type]) -> RuleResult<Vec<Type>> {
    let operands: Vec<&Type> = op.operands.iter().map(|v| program.type_of(*v)).collect();
    let cx = RuleContext { program, op, mesh: &program.mesh, operands };
    cx.check_not_partial()?;
    let results = cx.infer_op(declared)?;
    results.iter().try_for_each(|t| check_type(program, t))?;
    Ok(results)
}

struct RuleContext<'a> {
    program: &'a Program,
    op: &'a Op,
    mesh: &'a Mesh,
    operands: Vec<&'a Type>,
}

impl RuleContext<'_> {
    fn check_not_partial(&self) -> RuleResult<()> {
        use Opcode::{AllReduce, ReduceScatter};
        if self.op.opcode.table_row().linear || matches!(self.op.opcode, AllReduce | ReduceScatter) {
            return Ok(());
        }
        for (i, t) in self.operands.iter().enumerate() {
            if let Some((axis, r)) = t.layout.partial_axis() {
                return rule_error(
                    &T0211,
                    format!("operand {i} of {} is partial({}) over {axis}", self.op.opcode.name(), r.name()),
                );
            }
        }
        Ok(())
    }

    fn infer_op(&self, declared: &[Type]) -> RuleResult<Vec<Type>> {
        use OpView as V;
        let one = |t: Type| Ok(vec![t]);
        match &self.op.view()? {
            V::Input(_) | V::Call(_) => one(self.declared_type(declared)?.clone()),
            V::Weight(v) => {
                let t = self.declared_type(declared)?;
                self.check_load(v.load, t)?;
                one(t.clone())
            }
            V::Recv(v) => {
                let t = self.declared_type(declared)?;
                self.check_replicated_over_world(self.peer_group("from", v.from)?, t)?;
                one(t.clone())
            }
            V::Output(_) => Ok(vec![]),
            V::CacheRead(v) => one(self.cache_read_type(v)?),
            V::CacheWrite(v) => self.check_cache_write(v).map(|()| vec![]),
            V::Matmul(v) => one(self.matmul_type(v)?),
            V::BiasAct(_) => one(self.bias_act_type()?),
            V::Add(_) => one(self.add_type()?),
            V::Mul(_) => one(self.same_type(0, 1)?),
            V::Silu(_) | V::Relu(_) | V::Clamp(_) | V::SoftClamp(_) | V::Renoise(_) => {
                one(self.operands[0].clone())
            }
            V::Cast(v) => one(self.cast_type(v)?),
            V::Quantize(v) => self.quantize_types(v),
            V::ToX0(_) | V::Guide(_) => one(self.same_type(0, 1)?),
            V::LayerNorm(_) => one(self.row_norm_type(&[1, 2], 1)?),
            V::RmsNorm(v) => one(self.row_norm_type(&[1], v.segments)?),
            V::NormModulate(v) => one(self.norm_modulate_type(v)?),
            V::GateResidual(v) => one(self.gate_residual_type(v)?),
            V::Modulation(_) => one(self.modulation_type()?),
            V::RowSquareSum(v) => one(self.row_square_sum_type(v)?),
            V::RmsScale(v) => one(self.rms_scale_type(v)?),
            V::Rope(v) => one(self.rope_type(v)?),
            V::Attention(v) => one(self.attention_type(v)?),
            V::RelativeAttention(v) => one(self.relative_attention_type(v)?),
            V::Rotary(v) => one(self.rotary_type(v)?),
            V::HeadNorm(v) => one(self.head_norm_type(v)?),
            V::HeadColumns(v) => one(self.head_columns_type(v)?),
            V::HeadJoin(v) => one(self.head_join_type(v)?),
            V::HeadMatmul(v) => one(self.head_matmul_type(v)?),
            V::PagedAttention(v) => one(self.paged_attention_type(v)?),
            V::Sample(_) => one(self.sample_type()?),
            V::Softmax(v) => one(self.softmax_type(v)?),
            V::Bmm(v) => one(self.bmm_type(v)?),
            V::MoeRoute(v) => one(self.moe_route_type(v)?),
            V::TopKExperts(v) => one(self.top_k_experts_type(v)?),
            V::ExpertWeights(_) | V::ExpertGates(_) => one(self.expert_weights_type()?),
            V::ExpertTokens(v) => one(self.expert_tokens_type(v)?),
            V::ExpertLocality(v) => one(self.expert_locality_type(v)?),
            V::ExpertDistance(v) => one(self.expert_distance_type(&v.distances, &v.expert_homes)?),
            V::ExpertDistanceGradient(v) => {
                self.expert_distance_type(&v.distances, &v.expert_homes)?;
                one(self.type_like_first(self.matrix_shape(0)?, self.token_layout(&[0])?))
            }
            V::ExpertDraw(v) => one(self.expert_draw_type(v)?),
            V::ExpertPlaces(v) => one(self.expert_places_type(v)?),
            V::ExpertReroute(v) => one(self.expert_reroute_type(v)?),
            V::ExpertSlots(v) => one(self.expert_slots_type(v)?),
            V::ExpertCounts(v) => one(self.expert_counts_type(v)?),
            V::ExpertStatistics(v) => one(self.expert_statistics_type(v)?),
            V::ExpertPack(v) => one(self.expert_pack_type(&[1, 2], (v.groups, v.capacity, v.group_tokens))?),
            V::ExpertPackFused(v) => {
                one(self.expert_pack_type(&[1], (v.groups, v.capacity, v.group_tokens))?)
            }
            V::GroupedMatmul(v) => one(self.grouped_matmul_type(v)?),
            V::ExpertCombine(v) => one(self.expert_combine_type(v)?),
            V::TimeEmbed(v) => one(self.time_embed_type(v)?),
            V::SpaceTimeToDepth(v) => one(self.space_time_to_depth_type(v)?),
            V::DepthToSpaceTime(v) => one(self.depth_to_space_time_type(v)?),
            V::Conv3d(v) => one(self.conv3d_type(v)?),
            V::UpsampleNearest(v) => one(self.upsample_nearest_type(v)?),
            V::ChannelsToFrames(v) => one(self.channels_to_frames_type(v)?),
            V::Patchify(v) => one(self.patchify_type(v)?),
            V::Unpatchify(v) => one(self.unpatchify_type(v)?),
            V::ScaleShift(_) => one(self.scale_shift_type()?),
            V::Embed(_) => one(self.embed_type()?),
            V::TakeRows(v) => one(self.take_rows_type(v)?),
            V::TakeShard(v) => one(self.take_shard_type(v)?),
            V::Pad(v) => one(self.pad_type(v)?),
            V::Compact(v) => one(self.compact_type(v)?),
            V::AllReduce(v) => one(self.all_reduce_type(v)?),
            V::AllGather(v) => one(self.all_gather_type(v)?),
            V::ReduceScatter(v) => one(self.reduce_scatter_type(v)?),
            V::AllToAll(v) => one(self.all_to_all_type(v)?),
            V::HaloExchange(_) => one(self.halo_exchange_type()?),
            V::Broadcast(v) => one(self.broadcast_type(v)?),
            V::Send(v) => {
                let group = self.peer_group("to", v.to)?;
                self.check_replicated_over_world(group, self.operands[0]).map(|()| vec![])
            }
            V::EventRecord(_) => one(Type::scalar(DType::Event)),
            V::Wait(_) => rule_error(&T0212, "the ticket of a wait cannot come from another wait"),
        }
    }

    /// Returns the type that the text states for the result of a source.
    fn declared_type<'t>(&self, declared: &'t [Type]) -> RuleResult<&'t Type> {
        let name = self.op.opcode.name();
        match declared {
            [t] if t.is_token() => rule_error(&T0203, format!("{name} of {}", t.dtype)),
            [t] => Ok(t),
            _ => rule_error(&T0215, format!("{name} needs a written type")),
        }
    }

    /// Checks the number of equal segments of an extent whose partial sums are added in a binary
    /// tree.
    fn check_segments(&self, n: u64, extent: u64) -> RuleResult<()> {
        if n.is_power_of_two() && extent.is_multiple_of(n) {
            return Ok(());
        }
        rule_error(
            &T0215,
            format!("`segments` is {n}, but must be a power of two that divides the extent {extent}"),
        )
    }

    /// Returns the group of an op that names one of its members by position.
    fn peer_group(&self, name: &str, position: u64) -> RuleResult<Group> {
        let group = self.comm_group()?;
        let size = self.mesh.group_size(group);
        if position < u64::from(size) {
            return Ok(group);
        }
        rule_error(&T0215, format!("`{name}` must be a position on {group}, 0 to {}", size - 1))
    }

    /// Checks that a value which a single rank sends over the world is replicated.
    fn check_replicated_over_world(&self, group: Group, t: &Type) -> RuleResult<()> {
        let cut = self.mesh.active_axes().find(|a| t.layout.on_axis(*a) != AxisLayout::Replicated);
        match cut.filter(|_| group == Group::World) {
            None => Ok(()),
            Some(axis) => rule_error(
                &T0212,
                format!(
                    "{} over world of a value that is {} on {axis}; make it replicated on every axis first",
                    self.op.opcode.name(),
                    t.layout.on_axis(axis)
                ),
            ),
        }
    }

    fn check_same_dtype(&self, a: usize, b: usize) -> RuleResult<()> {
        if self.operands[a].dtype == self.operands[b].dtype {
            Ok(())
        } else {
            rule_error(
                &T0210,
                format!("dtypes of {} and {} differ", self.display_operand(a), self.display_operand(b)),
            )
        }
    }

    /// Checks that an operand is replicated on every axis.
    fn check_replicated(&self, operand: usize) -> RuleResult<()> {
        match self
            .mesh
            .active_axes()
            .find(|a| self.operands[operand].layout.on_axis(*a) != AxisLayout::Replicated)
        {
            None => Ok(()),
            Some(a) => rule_error(
                &T0213,
                format!("{} must be replicated, but is not on {a}", self.display_operand(operand)),
            ),
        }
    }

    fn matrix_shape(&self, operand: usize) -> RuleResult<[u64; 2]> {
        match self.operands[operand].shape[..] {
            [n, m] => Ok([n, m]),
            _ => rule_error(
                &T0210,
                format!("operand {operand} must be a matrix, but is {}", self.display_operand(operand)),
            ),
        }
    }

    /// Returns the number of rows of an operand and their length: the last dim is the row, and all
    /// others count rows.
    fn row_extents(&self, operand: usize) -> RuleResult<[u64; 2]> {
        match self.operands[operand].shape.split_last() {
            Some((d, rows)) if !rows.is_empty() => Ok([multiply_extents(rows)?, *d]),
            _ => rule_error(
                &T0210,
                format!("operand {operand} must have rows, but is {}", self.display_operand(operand)),
            ),
        }
    }

    fn display_operand(&self, operand: usize) -> String {
        self.operands[operand].display_on(self.mesh)
    }

    /// Returns the group of a collective, or of an op whose shards depend on positions in a group.
    fn comm_group(&self) -> RuleResult<Group> {
        let name = self.op.opcode.name();
        let group = self.op.comm_group();
        // The axis is only needed for the error message.
        match (group, if group.is_none() { self.op.mesh_axis() } else { None }) {
            (Some(Group::Axis { axis, subgroup_size: Some(w) }), _) if !self.mesh.has_subgroups(axis, w) => {
                rule_error(&T0215, format!("{name}: {}", subgroup_error(self.mesh, axis, i64::from(w))))
            }
            (Some(Group::Axis { axis, .. }), _) if role_outside(&self.program.role).is_some() => rule_error(
                &T0212,
                format!(
                    "{name} over {axis}: role({}) is outside the mesh and in no group of an axis; send over world, then broadcast",
                    self.program.role
                ),
            ),
            (Some(group), _) => Ok(group),
            (None, Some(axis)) => {
                let stated = self.op.attrs.get("group_size").and_then(Int::parse).unwrap_or_default();
                rule_error(&T0215, format!("{name}: {}", subgroup_error(self.mesh, axis, stated)))
            }
            (None, None) => {
                rule_error(&T0215, format!("{name}: `group_size` applies to a mesh axis, not to the world"))
            }
        }
    }

    /// Returns the axis and the subgroup size of an op that moves or creates shards of a dim.
    fn axis_groups(&self) -> RuleResult<AxisGroups> {
        match self.comm_group()? {
            Group::Axis { axis, subgroup_size } => Ok(AxisGroups {
                axis,
                subgroup_size,
                group_size: subgroup_size.unwrap_or(self.mesh.axis_size(axis)),
            }),
            Group::World => rule_error(
                &T0212,
                format!(
                    "{} over world: no layout defines the shard of a rank of the world; use one axis after the other",
                    self.op.opcode.name()
                ),
            ),
        }
    }

    fn check_dim(&self, dim: usize) -> RuleResult<()> {
        if dim < self.operands[0].shape.len() {
            return Ok(());
        }
        rule_error(&T0215, format!("dim {dim} of {}", self.display_operand(0)))
    }

    /// Combines the operand layouts axis by axis with `f`, which returns `None` for an unsupported
    /// combination.
    fn combine_layouts(
        &self,
        layouts: &[Layout],
        f: impl Fn(&[AxisLayout]) -> Option<AxisLayout>,
    ) -> RuleResult<Layout> {
        let mut out = Layout::REPLICATED;
        let mut on: Vec<AxisLayout> = Vec::with_capacity(layouts.len());
        for axis in self.mesh.active_axes() {
            on.clear();
            on.extend(layouts.iter().map(|l| l.on_axis(axis)));
            match f(&on) {
                Some(l) => out = out.with_axis(axis, l),
                None => {
                    let words: Vec<String> = on.iter().map(AxisLayout::to_string).collect();
                    return rule_error(
                        &T0214,
                        format!(
                            "{} does not support the layouts {} on {axis}",
                            self.op.opcode.name(),
                            words.join(" · ")
                        ),
                    );
                }
            }
        }
        Ok(out)
    }

    fn operand_layouts(&self) -> Vec<Layout> {
        self.operands.iter().map(|t| t.layout).collect()
    }

    fn type_like_first(&self, shape: impl Into<Vec<u64>>, layout: Layout) -> Type {
        Type { dtype: self.operands[0].dtype, shape: shape.into(), layout }
    }

    fn same_type(&self, a: usize, b: usize) -> RuleResult<Type> {
        let (x, y) = (self.operands[a], self.operands[b]);
        if x == y {
            Ok(x.clone())
        } else if x.dtype == y.dtype && x.shape == y.shape {
            rule_error(
                &T0214,
                format!("layouts of {} and {} differ", self.display_operand(a), self.display_operand(b)),
            )
        } else {
            rule_error(&T0210, format!("{} and {} differ", self.display_operand(a), self.display_operand(b)))
        }
    }

    fn add_type(&self) -> RuleResult<Type> {
        // The maximum of sums differs from the sum of maxima.
        let max = |a: &Axis| {
            matches!(
                self.operands[0].layout.on_axis(*a),
                AxisLayout::Partial { reduction: Reduction::Max, .. }
            )
        };
        if let Some(axis) = self.mesh.active_axes().find(max) {
            return rule_error(&T0211, format!("a sum of values that are partial(max) over {axis}"));
        }
        self.same_type(0, 1)
    }

    fn time_embed_type(&self, &views::TimeEmbed { width, .. }: &views::TimeEmbed) -> RuleResult<Type> {
        self.check_replicated(0)?;
        match self.operands[0].shape[..] {
            [f] if width.is_multiple_of(2) => Ok(Type::new(DType::F32, [f, width])),
            [_] => rule_error(&T0215, format!("`width` must be even, but is {width}")),
            _ => rule_error(
                &T0210,
                format!("the operand must have one number per frame, but is {}", self.display_operand(0)),
            ),
        }
    }

    fn broadcast_type(&self, v: &views::Broadcast) -> RuleResult<Type> {
        let group = self.peer_group("root", v.root)?;
        self.check_replicated_over_world(group, self.operands[0])?;
        match group {
            Group::Axis { axis, .. } if self.operands[0].layout.on_axis(axis) != AxisLayout::Replicated => {
                let have = self.operands[0].layout.on_axis(axis);
                rule_error(
                    &T0212,
                    format!("broadcast over {group} needs a replicated value, but it is {have}"),
                )
            }
            _ => Ok(self.operands[0].clone()),
        }
    }

    fn axis_that_shards(&self, layout: &Layout, dim: usize) -> Option<Axis> {
        self.mesh.active_axes().find(|a| matches!(layout.on_axis(*a), AxisLayout::Shard(s) if s.dim == dim))
    }
}

/// The groups that an op runs over: a mesh axis, or the subgroups of an axis.
#[derive(Clone, Copy)]
struct AxisGroups {
    axis: Axis,
    subgroup_size: Option<u32>,
    /// Number of members of each group.
    group_size: u32,
}

impl std::fmt::Display for AxisGroups {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Group::Axis { axis: self.axis, subgroup_size: self.subgroup_size }.fmt(f)
    }
}

/// Returns a message why subgroups of this size do not divide an axis.
fn subgroup_error(mesh: &Mesh, axis: Axis, subgroup_size: i64) -> String {
    let may = tessera_base::format_choices(&mesh.subgroup_sizes(axis));
    format!(
        "subgroups of {subgroup_size} positions do not divide {axis} of size {}; possible sizes: {may}",
        mesh.axis_size(axis)
    )
}

fn multiply_extents(extents: &[u64]) -> RuleResult<u64> {
    match extents.iter().try_fold(1u64, |n, e| n.checked_mul(*e)) {
        Some(n) if n <= MAX_ELEMENTS => Ok(n),
        _ => rule_error(&T0210, format!("the extents {extents:?} multiply to more than {MAX_ELEMENTS}")),
    }
}

/// Returns the number of rows of the largest shard.
fn largest_shard(u: Uneven, parts: u32) -> u64 {
    tessera_mesh::split_units(u.extent / u.unit, parts, 0).1 * u.unit
}

/// Returns the length of this role's shard of an uneven dim, sharded over `axis` or over each
/// subgroup of it. With uneven shards, a role's name ends in its coordinate
/// class, `…@k`, where k is the coordinate on `axis` of the first rank of the class.
#[must_use]
pub fn role_shard_len(program: &Program, axis: Axis, u: Uneven, subgroup_size: Option<u32>) -> u64 {
    let size = program.mesh.axis_size(axis);
    let at = role_coord(&program.role, axis).min(size - 1);
    Shard { dim: 0, uneven: Some(u), subgroup_size }.global_range(0, size, at).1
}

/// Returns the coordinate on `axis` in a role's name: 1 on tp for `stage0@tp1`. Returns 0 if the
/// name has none.
#[must_use]
pub fn role_coord(role: &str, axis: Axis) -> u32 {
    role_coordinate(role, axis.name()).unwrap_or(0)
}

/// Returns the first rank outside the mesh that a role's name denotes: 0 for `leader@out0`. `None`
/// for a role of the mesh.
#[must_use]
pub fn role_outside(role: &str) -> Option<u32> {
    role_coordinate(role, "out")
}

/// Returns the number after `@` and `what` in a role's name: 2 for `tp` in `stage1@tp2`.
pub(crate) fn role_coordinate(role: &str, what: &str) -> Option<u32> {
    role.split('@').skip(1).find_map(|p| p.strip_prefix(what)?.parse().ok())
}
