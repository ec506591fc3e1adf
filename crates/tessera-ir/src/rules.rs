//! The shape rule and the sharding rule of every op. A rule maps operand types to result types, or
//! reports why it rejects them.
//!
//! The builder uses the rules to infer types, and the verifier uses them again to check programs.
//! The reference evaluator does not use them, so that a wrong rule cannot confirm itself.

mod compute;
mod resharding;
mod softmax_bmm_moe;
mod well_formed;

use tessera_base::Code;
use tessera_mesh::{Axis, AxisLayout, Group, Layout, Mesh, Reduction, Shard, Uneven};

use crate::parse::T0203;
use crate::{Attr, DType, Op, Opcode, Program, Type, ValueId};
pub(crate) use softmax_bmm_moe::check_moe_attrs;
use well_formed::check_well_formed;

/// The op cannot take these shapes.
pub static T0210: Code = Code {
    id: "T0210",
    title: "shapes do not fit the op",
    page: "The local shapes of the operands violate the op's shape rule: for instance the inner extents of a matmul differ, \
or a cache write exceeds the rows of the buffer. The message shows both shapes.\n\n\
A type must also be possible on the mesh: a dim is sharded over at most one axis, `group_size` splits an axis into several subgroups of at \
least 2 positions, and a role outside the mesh holds replicated values.",
};
/// An op that needs the reduced value has a partial operand.
pub static T0211: Code = Code {
    id: "T0211",
    title: "partial value used before its reduction",
    page: "A value marked partial(sum) is one rank's term of a sum: the sum itself exists only after an \
all_reduce or reduce_scatter. Only ops that commute with addition accept a partial operand. Any other op (a norm, an \
activation, a softmax, a bias, a cache, an output) would silently compute on a fraction of the value on each rank.\n\n\
Insert `ttile.collective.all_reduce` before the op.",
};
/// The operand of a collective has the wrong layout.
pub static T0212: Code = Code {
    id: "T0212",
    title: "collective does not match the operand's layout",
    page: "all_gather needs a value sharded over the named dim; all_reduce and reduce_scatter need a partial value; \
all_to_all needs the `concat` dim sharded. Gathering a replicated value would concatenate copies; reducing it would \
multiply it by the group size.\n\n\
A collective with `group_size = 2` runs on subgroups of 2 positions of the axis and needs a layout with the same `group_size`, because the \
shards repeat in each subgroup. Over `world`, a broadcast, send or receive moves a value that is replicated on every axis, and \
all_reduce needs a value that is partial on every axis, on a mesh without ranks outside. To gather, scatter or exchange shards, use one \
axis after the other: no layout defines the shard of a rank of the world. A rank outside the mesh is in no group of an axis.",
};
/// The op reduces over a dim that is sharded over ranks.
pub static T0213: Code = Code {
    id: "T0213",
    title: "op needs a whole dim that is sharded",
    page: "Norms and softmax reduce over a dim. If that dim is sharded, each rank normalises only its own shard: the \
result is wrong by O(1), and no error occurs at run time. Gather the dim first, or split the op into partial sums \
and one small all_reduce (row_square_sum, all_reduce, rms_scale).",
};
/// The layouts of the operands do not fit together.
pub static T0214: Code = Code {
    id: "T0214",
    title: "operand layouts do not fit together",
    page: "The op's sharding rule does not support this combination of layouts on an axis: for instance a matmul of a \
replicated activation with a weight sharded over its inner dim, whose inner extents would differ. Gather or \
reshard one operand first, or choose a strategy with compatible shardings.",
};
/// An attribute is missing or invalid.
pub static T0215: Code = Code {
    id: "T0215",
    title: "attribute missing or invalid",
    page: "An attribute of the op is missing or has an invalid value. A collective must name its \
mesh axis (or `world`) and, if it moves shards of a tensor, the tensor dim: if scores are scattered over the wrong dim before a \
local softmax, the program runs and every result is wrong.\n\n\
`group_size` is at least 2, less than the size of the axis, and divides it. `root`, `to` and `from` are positions in the group: on \
the axis, in the subgroup, or in the world, where the position is the rank. `transport` is `p2p` or `nccl`.",
};

/// Permitted values of a collective's `transport` attribute.
pub const TRANSPORTS: [&str; 2] = ["p2p", "nccl"];

/// Reason why a rule rejects an op.
#[derive(Debug)]
pub struct RuleError {
    /// Code of the kind of error.
    pub code: &'static Code,
    /// Message with the values of both sides.
    pub message: String,
}

type RuleResult<T> = Result<T, RuleError>;

fn rule_error<T>(code: &'static Code, message: impl Into<String>) -> RuleResult<T> {
    Err(RuleError { code, message: message.into() })
}

/// Infers the result types of an op of `program`. `declared` are the types written at the results;
/// sources, receives and their waits use them as they are.
///
/// For a wait, this function searches the whole program for the issuing op. Callers that infer
/// every op of a program should use [`infer_types_with`].
///
/// # Errors
/// T0203 if the op does not match its row of the op table, T0210 to T0215 if its rule rejects it.
pub fn infer_types(program: &Program, op: &Op, declared: &[Type]) -> RuleResult<Vec<Type>> {
    infer_types_by(program, op, declared, |ticket| program.ops.iter().find(|o| o.results.contains(&ticket)))
}

/// Version of [`infer_types`] whose time does not depend on the length of the program.
/// `definitions` holds the index of the op that defines each value, as [`Program::defining_ops`]
/// returns it; it may omit trailing values that the op does not read.
///
/// # Errors
/// The errors of [`infer_types`].
pub fn infer_types_with(
    program: &Program,
    op: &Op,
    declared: &[Type],
    definitions: &[Option<usize>],
) -> RuleResult<Vec<Type>> {
    infer_types_by(program, op, declared, |ticket| program.ops.get((*definitions.get(ticket.0 as usize)?)?))
}

/// Infers the result types; `definition` returns the op that defines a value.
fn infer_types_by<'p>(
    program: &'p Program,
    op: &Op,
    declared: &[Type],
    definition: impl FnOnce(ValueId) -> Option<&'p Op>,
) -> RuleResult<Vec<Type>> {
    check_well_formed(program, op)?;
    if op.opcode == Opcode::Wait {
        return match definition(op.operands[0]).filter(|o| o.issue) {
            None => rule_error(&T0212, "the operand is not the ticket of an issued collective"),
            Some(issue) => infer_results(program, issue, declared),
        };
    }
    let ticket = || Ok(vec![Type::scalar(DType::Ticket)]);
    // The type of an issued receive is only known at its wait.
    if op.issue && op.opcode == Opcode::Recv {
        RuleContext { program, op, mesh: &program.mesh, operands: vec![] }.peer_group("from")?;
        return ticket();
    }
    let results = infer_results(program, op, declared)?;
    if op.issue { ticket() } else { Ok(results) }
}

/// Maximum number of elements of a value on one rank; a larger number is assumed to be a mistake.
const MAX_ELEMENTS: u64 = 1 << 40;

/// Checks that a type is possible: its extents are within bounds, every sharded dim exists, is
/// sharded over only one axis and, if it is uneven, has the local length of this role; subgroups
/// divide their axis; and roles outside the mesh hold replicated values only.
///
/// # Errors
/// T0210 with the dim and both numbers.
pub fn check_type(program: &Program, ty: &Type) -> RuleResult<()> {
    let mesh = &program.mesh;
    let shown = || ty.display_on(mesh);
    let elements = ty.shape.iter().try_fold(1u64, |n, e| n.checked_mul(*e));
    if !elements.is_some_and(|n| (1..=MAX_ELEMENTS).contains(&n)) {
        return rule_error(&T0210, format!("{} has no elements, or more than {MAX_ELEMENTS}", shown()));
    }
    let mut cut: Vec<(usize, Axis)> = Vec::new();
    for axis in mesh.active_axes() {
        let on = ty.layout.on_axis(axis);
        if on != AxisLayout::Replicated && role_outside(&program.role).is_some() {
            let role = &program.role;
            return rule_error(
                &T0210,
                format!("{}: role({role}) is outside the mesh and can only hold replicated values", shown()),
            );
        }
        if let Some(w) = on.subgroup_size().filter(|w| !mesh.has_subgroups(axis, *w)) {
            return rule_error(&T0210, format!("{}: {}", shown(), subgroup_error(mesh, axis, i64::from(w))));
        }
        let AxisLayout::Shard(s) = on else { continue };
        let Some(local) = ty.shape.get(s.dim) else {
            return rule_error(&T0210, format!("{} has no dim {} to shard over {axis}", shown(), s.dim));
        };
        if let Some((_, other)) = cut.iter().find(|(d, _)| *d == s.dim) {
            return rule_error(
                &T0210,
                format!("dim {} of {} is sharded over both {other} and {axis}", s.dim, shown()),
            );
        }
        cut.push((s.dim, axis));
        let Some(u) = s.uneven else { continue };
        let parts = s.part_count(mesh.axis_size(axis));
        match Shard::new(s.dim, u.extent, u.unit, parts) {
            Some(Shard { uneven: Some(_), .. }) if u.extent <= MAX_ELEMENTS => {
                let piece = role_shard_len(program, axis, u, s.subgroup_size);
                if piece != *local {
                    return rule_error(
                        &T0210,
                        format!(
                            "dim {} of {} has extent {local}, but the shard of role({}) has {piece}",
                            s.dim,
                            shown(),
                            program.role
                        ),
                    );
                }
            }
            Some(Shard { uneven: None, .. }) => {
                return rule_error(
                    &T0210,
                    format!("dim {} of {} is sharded evenly: omit extent= and unit=", s.dim, shown()),
                );
            }
            _ => {
                return rule_error(
                    &T0210,
                    format!(
                        "dim {} of {}: cannot shard extent {} in units of {} over {parts} ranks",
                        s.dim,
                        shown(),
                        u.extent,
                        u.unit
                    ),
                );
            }
        }
    }
    Ok(())
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
        use Opcode as O;
        let one = |t: Type| Ok(vec![t]);
        match self.op.opcode {
            O::Input | O::Call | O::Weight | O::Recv => match declared {
                [t] if t.is_token() => {
                    rule_error(&T0203, format!("{} of {}", self.op.opcode.name(), t.dtype))
                }
                [t] => {
                    if self.op.opcode == O::Weight {
                        self.check_load(t)?;
                    }
                    if self.op.opcode == O::Recv {
                        self.check_replicated_over_world(self.peer_group("from")?, t)?;
                    }
                    one(t.clone())
                }
                _ => rule_error(&T0215, format!("{} needs a written type", self.op.opcode.name())),
            },
            O::Output => Ok(vec![]),
            O::CacheRead => one(self.cache_read_type()?),
            O::CacheWrite => self.check_cache_write().map(|()| vec![]),
            O::Matmul => one(self.matmul_type()?),
            O::BiasAct => one(self.bias_act_type()?),
            O::Add => one(self.add_type()?),
            O::Silu => one(self.operands[0].clone()),
            O::Cast => one(self.cast_type()?),
            O::Quantize => self.quantize_types(),
            O::ToX0 => one(self.same_type(0, 1)?),
            O::Renoise => one(self.operands[0].clone()),
            O::LayerNorm => one(self.row_norm_type(&[1, 2], 1)?),
            O::RmsNorm => one(self.row_norm_type(&[1], 1)?),
            O::NormModulate => one(self.norm_modulate_type()?),
            O::GateResidual => one(self.gate_residual_type()?),
            O::Modulation => one(self.modulation_type()?),
            O::RowSquareSum => one(self.row_square_sum_type()?),
            O::RmsScale => one(self.rms_scale_type()?),
            O::Rope => one(self.rope_type()?),
            O::Attention => one(self.attention_type()?),
            O::Softmax => one(self.softmax_type()?),
            O::Bmm => one(self.bmm_type()?),
            O::MoeRoute => one(self.moe_route_type()?),
            O::TimeEmbed => one(self.time_embed_type()?),
            O::SpaceTimeToDepth => one(self.space_time_to_depth_type()?),
            O::DepthToSpaceTime => one(self.depth_to_space_time_type()?),
            O::TakeRows => one(self.take_rows_type()?),
            O::TakeShard => one(self.take_shard_type()?),
            O::Pad => one(self.pad_type()?),
            O::Compact => one(self.compact_type()?),
            O::AllReduce => one(self.all_reduce_type()?),
            O::AllGather => one(self.all_gather_type()?),
            O::ReduceScatter => one(self.reduce_scatter_type()?),
            O::AllToAll => one(self.all_to_all_type()?),
            O::Broadcast => one(self.broadcast_type()?),
            O::Send => {
                self.check_replicated_over_world(self.peer_group("to")?, self.operands[0]).map(|()| vec![])
            }
            O::EventRecord => one(Type::scalar(DType::Event)),
            O::Wait => rule_error(&T0212, "the ticket of a wait cannot come from another wait"),
        }
    }

    fn positive_attr(&self, name: &str) -> RuleResult<u64> {
        match self
            .op
            .int_attr(name)
            .and_then(|i| u64::try_from(i).ok())
            .filter(|i| (1..=MAX_ELEMENTS).contains(i))
        {
            Some(i) => Ok(i),
            None => rule_error(&T0215, format!("{} needs an integer `{name}` ≥ 1", self.op.opcode.name())),
        }
    }

    /// Returns `first` (default 0): the index of the operand's first row in the whole value.
    fn first_row(&self) -> RuleResult<u64> {
        let at = match self.op.attrs.get("first_row") {
            None => Some(0),
            Some(_) => self.op.int_attr("first_row").and_then(|i| u64::try_from(i).ok()),
        };
        match at.filter(|i| *i <= MAX_ELEMENTS) {
            Some(i) => Ok(i),
            None => {
                rule_error(&T0215, format!("`first` of {} must be an integer ≥ 0", self.op.opcode.name()))
            }
        }
    }

    /// Returns `unit` (default 1).
    fn unit_attr(&self) -> RuleResult<u64> {
        if self.op.attrs.contains_key("unit") { self.positive_attr("unit") } else { Ok(1) }
    }

    /// Returns `segments` (default 1): the number of equal segments of an extent whose partial sums
    /// are added in a binary tree.
    fn segment_count(&self, extent: u64) -> RuleResult<u64> {
        if !self.op.attrs.contains_key("segments") {
            return Ok(1);
        }
        let n = self.positive_attr("segments")?;
        if n.is_power_of_two() && extent.is_multiple_of(n) {
            Ok(n)
        } else {
            rule_error(
                &T0215,
                format!("`segments` is {n}, but must be a power of two that divides the extent {extent}"),
            )
        }
    }

    fn check_act(&self) -> RuleResult<()> {
        match self.op.attrs.get("act") {
            None => Ok(()),
            Some(Attr::Str(a)) if ACTIVATIONS.contains(&a.as_str()) => Ok(()),
            _ => rule_error(&T0215, format!("`act` must be {}", tessera_base::format_choices(ACTIVATIONS))),
        }
    }

    fn check_eps(&self) -> RuleResult<()> {
        match self.op.float_attr("eps") {
            Some(e) if e.is_finite() && e >= 0.0 => Ok(()),
            _ => rule_error(&T0215, "`eps` must be a number ≥ 0"),
        }
    }

    /// Returns the group of an op that names one of its members by position.
    fn peer_group(&self, name: &str) -> RuleResult<Group> {
        let group = self.comm_group()?;
        let size = self.mesh.group_size(group);
        match self.op.int_attr(name).and_then(|i| u32::try_from(i).ok()).filter(|i| *i < size) {
            Some(_) => Ok(group),
            None => rule_error(&T0215, format!("`{name}` must be a position on {group}, 0 to {}", size - 1)),
        }
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

    fn display_operand(&self, operand: usize) -> String {
        self.operands[operand].display_on(self.mesh)
    }

    /// Returns the group of a collective, or of an op whose shards depend on positions in a group.
    fn comm_group(&self) -> RuleResult<Group> {
        let name = self.op.opcode.name();
        if self.op.attrs.contains_key("transport")
            && !self.op.str_attr("transport").is_some_and(|v| TRANSPORTS.contains(&v))
        {
            return rule_error(
                &T0215,
                format!("{name}: `transport` must be one of {}", TRANSPORTS.join(", ")),
            );
        }
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
            (None, Some(axis)) => match self.op.int_attr("group_size") {
                Some(w) => rule_error(&T0215, format!("{name}: {}", subgroup_error(self.mesh, axis, w))),
                None => rule_error(&T0215, format!("{name}: `group_size` must be an integer")),
            },
            (None, None) if self.op.str_attr("axis") == Some("world") => {
                rule_error(&T0215, format!("{name}: `group_size` applies to a mesh axis, not to the world"))
            }
            (None, None) => rule_error(&T0215, format!("{name} names no mesh axis")),
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

    fn dim_attr(&self, name: &str) -> RuleResult<usize> {
        match self.op.int_attr(name).and_then(|i| usize::try_from(i).ok()) {
            Some(d) if d < self.operands[0].shape.len() => Ok(d),
            Some(d) => rule_error(&T0215, format!("dim {d} of {}", self.display_operand(0))),
            None => rule_error(&T0215, format!("{} names no tensor dim (`{name}`)", self.op.opcode.name())),
        }
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

    fn time_embed_type(&self) -> RuleResult<Type> {
        self.check_replicated(0)?;
        let width = self.positive_attr("width")?;
        match self.operands[0].shape[..] {
            [f] if width.is_multiple_of(2) => Ok(Type::new(DType::F32, [f, width])),
            [_] => rule_error(&T0215, format!("`width` must be even, but is {width}")),
            _ => rule_error(
                &T0210,
                format!("the operand must have one number per frame, but is {}", self.display_operand(0)),
            ),
        }
    }

    fn broadcast_type(&self) -> RuleResult<Type> {
        let group = self.peer_group("root")?;
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

    fn buffer_type(&self) -> RuleResult<&Type> {
        match self.op.buffer {
            Some(b) => Ok(&self.program.buffer(b).ty),
            None => rule_error(&T0215, format!("{} names no buffer", self.op.opcode.name())),
        }
    }

    fn cache_read_type(&self) -> RuleResult<Type> {
        let b = self.buffer_type()?;
        let Some(have) = b.shape.first().copied() else {
            return rule_error(&T0210, "a scalar buffer has no rows");
        };
        self.row_range_type(b, have, "a buffer")
    }

    fn take_rows_type(&self) -> RuleResult<Type> {
        match self.operands[0].shape.first() {
            Some(have) => self.row_range_type(self.operands[0], *have, "a value"),
            None => rule_error(&T0210, "a scalar has no rows"),
        }
    }

    /// Infers the type of rows `row..row + rows` of a value with `have` rows.
    fn row_range_type(&self, of: &Type, have: u64, what: &str) -> RuleResult<Type> {
        let whole = |name: &str, absent: u64, wrong: u64| match self.op.attrs.get(name) {
            None => absent,
            Some(Attr::Int(i)) => u64::try_from(*i).unwrap_or(wrong),
            Some(_) => wrong,
        };
        let (row, rows) = (whole("row", 0, u64::MAX), whole("rows", have, 0));
        if rows == 0 || row.saturating_add(rows) > have {
            return rule_error(
                &T0210,
                format!("rows {row}..{} of {what} with {have} rows", row.saturating_add(rows)),
            );
        }
        if rows != have && self.axis_that_shards(&of.layout, 0).is_some() {
            return rule_error(&T0213, format!("the op needs all rows of {what} that is sharded by rows"));
        }
        let mut t = of.clone();
        t.shape[0] = rows;
        Ok(t)
    }

    fn check_cache_write(&self) -> RuleResult<()> {
        let (b, v) = (self.buffer_type()?, self.operands[0]);
        let rows_fit = matches!((b.shape.first(), v.shape.first()), (Some(b), Some(v)) if v <= b);
        if b.dtype != v.dtype || b.shape.get(1..) != v.shape.get(1..) || !rows_fit {
            return rule_error(
                &T0210,
                format!("{} does not fit the buffer {}", self.display_operand(0), b.display_on(self.mesh)),
            );
        }
        if b.layout != v.layout {
            return rule_error(
                &T0214,
                format!("{} cannot be written to {}", self.display_operand(0), b.display_on(self.mesh)),
            );
        }
        let (first, rows, have) = (self.first_row()?, v.shape[0], b.shape[0]);
        if first.saturating_add(rows) > have {
            return rule_error(
                &T0210,
                format!("rows {first}..{} of a buffer with {have} rows", first.saturating_add(rows)),
            );
        }
        let part = b.shape != v.shape || self.op.keyed_operand("row").is_some() || first > 0;
        if self.axis_that_shards(&b.layout, 0).is_some() && part {
            return rule_error(&T0213, "a buffer that is sharded by rows must be written as a whole");
        }
        Ok(())
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

/// Values of `act`; gelu_tanh is the tanh approximation.
const ACTIVATIONS: &[&str] = &["gelu_tanh", "silu"];

fn multiply_extents(extents: &[u64]) -> RuleResult<u64> {
    match extents.iter().try_fold(1u64, |n, e| n.checked_mul(*e)) {
        Some(n) if n <= MAX_ELEMENTS => Ok(n),
        _ => rule_error(&T0210, format!("the extents {extents:?} multiply to more than {MAX_ELEMENTS}")),
    }
}

/// Returns whether the partial sums of this op are part of a fixed binary tree.
fn has_segments(op: &Op) -> bool {
    op.attrs.contains_key("segments")
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

/// Returns the number after `@what` in a role's name.
pub(crate) fn role_coordinate(role: &str, what: &str) -> Option<u32> {
    role.split('@').skip(1).find_map(|p| p.strip_prefix(what)?.parse().ok())
}
