//! The shape rule and the shard rule of every op: from operand types to result types, or why not.
//!
//! The builder uses them to give types, the judge to check them again. The reference evaluator does not read
//! them, so that a wrong rule cannot vouch for itself.

mod compute;
mod exchange;
mod row;
mod tile;

use tessera_base::Code;
use tessera_mesh::{Axis, AxisLayout, Group, Layout, Mesh, Reduction, Shard, Uneven};

use crate::parse::T0203;
use crate::{Attr, DType, Op, Opcode, Program, Type, ValueId};
use row::well_formed;
pub(crate) use tile::moe_constants;

/// A shape that an op cannot take.
pub static T0210: Code = Code {
    id: "T0210",
    title: "shapes do not fit the op",
    page: "The operands' local shapes break the op's shape rule: for instance a matmul whose inner extents differ, \
or a cache write past the buffer's rows. The message shows both shapes.\n\n\
A type must be possible on the mesh too: a dim is cut over one axis at most, `ways` cuts an axis into blocks of at least \
2 positions, more than one of them, and a role outside the mesh holds whole values.",
};
/// A partial value reached an op that needs the reduced one.
pub static T0211: Code = Code {
    id: "T0211",
    title: "partial value used before its reduction",
    page: "A value marked partial(sum) is one rank's term of a sum: the number itself exists only after an \
all_reduce or reduce_scatter. Only ops that commute with addition may take it. Anything else (a norm, an \
activation, a softmax, a bias, a cache, an output) would silently compute on a fraction of the value on each rank.\n\n\
Insert `ttile.collective.all_reduce` before the op.",
};
/// Gather or exchange of a value that is not sharded so.
pub static T0212: Code = Code {
    id: "T0212",
    title: "collective does not match the operand's layout",
    page: "all_gather needs a value sharded over the named dim; all_reduce and reduce_scatter need a partial one; \
all_to_all needs the `concat` dim sharded. Gathering a replicated value would concatenate copies; reducing one would \
multiply it by the group's size.\n\n\
A collective with `ways = 2` works on blocks of 2 positions of the axis and needs a layout with the same ways: across \
blocks the pieces repeat. Over `world` a broadcast, send or receive moves a value that is replicated on every axis, and \
all_reduce needs one that is partial on every axis, on a mesh without ranks outside. To gather, scatter or exchange, go \
axis by axis: no layout says which piece a rank of the world holds. A rank outside the mesh is in no group of an axis.",
};
/// Reduction inside a rank over a dim that is spread over ranks.
pub static T0213: Code = Code {
    id: "T0213",
    title: "op needs a whole dim that is sharded",
    page: "Norms and softmax reduce over a dim. If that dim is sharded, each rank would normalise its own piece: the \
result is wrong by O(1) and no error is raised at run time. Gather the dim first, or split the op into partial sums \
and one small all_reduce (row_square_sum, all_reduce, rms_scale).",
};
/// Layouts of operands do not agree.
pub static T0214: Code = Code {
    id: "T0214",
    title: "operand layouts do not fit together",
    page: "The op's shard rule has no case for this combination of layouts on an axis: for instance a matmul of a \
replicated activation with a weight sharded over its inner dim, which would multiply different extents. Gather or \
exchange one operand first, or choose a strategy whose cuts meet.",
};
/// Missing or impossible constant.
pub static T0215: Code = Code {
    id: "T0215",
    title: "constant missing or impossible",
    page: "A constant (attribute) of the op is absent or has a value the op cannot take. A collective must name its \
mesh axis (or `world`) and, where it moves pieces of a tensor, the tensor dim: scattered over the wrong dim before a \
local softmax a program runs and is wrong everywhere.\n\n\
`ways` is at least 2, less than the axis's size, and divides it. `root`, `to` and `from` are positions in the group: on \
the axis, in the block, or in the world, where a position is a rank. `via` is `kernels` or `nccl`.",
};

/// By what a program may say that a collective is moved.
pub const VIA: [&str; 2] = ["kernels", "nccl"];

/// Why a rule refuses.
#[derive(Debug)]
pub struct RuleError {
    /// Which kind.
    pub code: &'static Code,
    /// In words, with both numbers.
    pub message: String,
}

type Rule<T> = Result<T, RuleError>;

fn refuse<T>(code: &'static Code, message: impl Into<String>) -> Rule<T> {
    Err(RuleError { code, message: message.into() })
}

/// Result types of an op of `program`. `declared` are the types written at the results: sources, receives and
/// their waits take them as given.
///
/// A wait looks through the whole program for what it waits for; whoever asks about every op of a program uses
/// [`infer_with`].
///
/// # Errors
/// T0203 for what the op's row does not allow, T0210 to T0215 for what its rule refuses.
pub fn infer(program: &Program, op: &Op, declared: &[Type]) -> Rule<Vec<Type>> {
    infer_by(program, op, declared, |ticket| program.ops.iter().find(|o| o.results.contains(&ticket)))
}

/// [`infer`] in time that does not depend on the program's length. `definitions` says which op defines each value,
/// as [`Program::definitions`] does; it may end before values that the op does not read.
///
/// # Errors
/// As [`infer`].
pub fn infer_with(
    program: &Program,
    op: &Op,
    declared: &[Type],
    definitions: &[Option<usize>],
) -> Rule<Vec<Type>> {
    infer_by(program, op, declared, |ticket| program.ops.get((*definitions.get(ticket.0 as usize)?)?))
}

/// `definition` gives the op that defines a value.
fn infer_by<'p>(
    program: &'p Program,
    op: &Op,
    declared: &[Type],
    definition: impl FnOnce(ValueId) -> Option<&'p Op>,
) -> Rule<Vec<Type>> {
    well_formed(program, op)?;
    if op.opcode == Opcode::Wait {
        return match definition(op.operands[0]).filter(|o| o.issue) {
            None => refuse(&T0212, "waits for something that is not an issued collective"),
            Some(issue) => infer_whole(program, issue, declared),
        };
    }
    let ticket = || Ok(vec![Type::scalar(DType::Ticket)]);
    // The type of an issued receive is known at its wait alone.
    if op.issue && op.opcode == Opcode::Recv {
        Cx { program, op, mesh: &program.mesh, x: vec![] }.peer("from")?;
        return ticket();
    }
    let results = infer_whole(program, op, declared)?;
    if op.issue { ticket() } else { Ok(results) }
}

/// Most elements of a value on one rank; a larger number is taken for a slip.
const ELEMENTS_MAX: u64 = 1 << 40;

/// Whether a type can be: extents within bounds, every sharded dim there, cut over one axis alone and, where it
/// is uneven, of the length that this role holds; blocks that cut their axis; no pieces or terms outside the mesh.
///
/// # Errors
/// T0210 with the dim and both numbers.
pub fn check_type(program: &Program, ty: &Type) -> Rule<()> {
    let mesh = &program.mesh;
    let shown = || ty.display(mesh);
    let elements = ty.shape.iter().try_fold(1u64, |n, e| n.checked_mul(*e));
    if !elements.is_some_and(|n| (1..=ELEMENTS_MAX).contains(&n)) {
        return refuse(&T0210, format!("{} has no elements, or more than {ELEMENTS_MAX}", shown()));
    }
    let mut cut: Vec<(usize, Axis)> = Vec::new();
    for axis in mesh.axes() {
        let on = ty.layout.on(axis);
        if on != AxisLayout::Replicated && role_outside(&program.role).is_some() {
            let role = &program.role;
            return refuse(
                &T0210,
                format!("{}: role({role}) stands outside the mesh and holds whole values", shown()),
            );
        }
        if let Some(w) = on.ways().filter(|w| !mesh.cuts(axis, *w)) {
            return refuse(&T0210, format!("{}: {}", shown(), no_cut(mesh, axis, i64::from(w))));
        }
        let AxisLayout::Shard(s) = on else { continue };
        let Some(local) = ty.shape.get(s.dim) else {
            return refuse(&T0210, format!("{} has no dim {} to shard over {axis}", shown(), s.dim));
        };
        if let Some((_, other)) = cut.iter().find(|(d, _)| *d == s.dim) {
            return refuse(
                &T0210,
                format!("dim {} of {} is cut over both {other} and {axis}", s.dim, shown()),
            );
        }
        cut.push((s.dim, axis));
        let Some(u) = s.uneven else { continue };
        let parts = s.parts(mesh.size(axis));
        match Shard::of(s.dim, u.extent, u.unit, parts) {
            Some(Shard { uneven: Some(_), .. }) if u.extent <= ELEMENTS_MAX => {
                let piece = role_piece(program, axis, u, s.ways);
                if piece != *local {
                    return refuse(
                        &T0210,
                        format!(
                            "dim {} of {} is {local}; role({}) holds {piece} of it",
                            s.dim,
                            shown(),
                            program.role
                        ),
                    );
                }
            }
            Some(Shard { uneven: None, .. }) => {
                return refuse(
                    &T0210,
                    format!("dim {} of {} is cut evenly: leave out of= and unit=", s.dim, shown()),
                );
            }
            _ => {
                return refuse(
                    &T0210,
                    format!(
                        "dim {} of {}: extent {} in units of {} over {parts} ranks",
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

fn infer_whole(program: &Program, op: &Op, declared: &[Type]) -> Rule<Vec<Type>> {
    let operands: Vec<&Type> = op.operands.iter().map(|v| program.ty(*v)).collect();
    let cx = Cx { program, op, mesh: &program.mesh, x: operands };
    cx.check_partial()?;
    let results = cx.infer(declared)?;
    results.iter().try_for_each(|t| check_type(program, t))?;
    Ok(results)
}

struct Cx<'a> {
    program: &'a Program,
    op: &'a Op,
    mesh: &'a Mesh,
    x: Vec<&'a Type>,
}

impl Cx<'_> {
    fn check_partial(&self) -> Rule<()> {
        use Opcode::{AllReduce, ReduceScatter};
        if self.op.opcode.row().linear || matches!(self.op.opcode, AllReduce | ReduceScatter) {
            return Ok(());
        }
        for (i, t) in self.x.iter().enumerate() {
            if let Some((axis, r)) = t.layout.partial() {
                return refuse(
                    &T0211,
                    format!("operand {i} of {} is partial({}) over {axis}", self.op.opcode.name(), r.name()),
                );
            }
        }
        Ok(())
    }

    fn infer(&self, declared: &[Type]) -> Rule<Vec<Type>> {
        use Opcode as O;
        let one = |t: Type| Ok(vec![t]);
        match self.op.opcode {
            O::Input | O::Call | O::Weight | O::Recv => match declared {
                [t] if t.is_token() => refuse(&T0203, format!("{} of {}", self.op.opcode.name(), t.dtype)),
                [t] => {
                    if self.op.opcode == O::Weight {
                        self.loaded(t)?;
                    }
                    if self.op.opcode == O::Recv {
                        self.whole_over_world(self.peer("from")?, t)?;
                    }
                    one(t.clone())
                }
                _ => refuse(&T0215, format!("{} needs its type written", self.op.opcode.name())),
            },
            O::Output => Ok(vec![]),
            O::CacheRead => one(self.cache_read()?),
            O::CacheWrite => self.cache_write().map(|()| vec![]),
            O::Matmul => one(self.matmul()?),
            O::BiasAct => one(self.bias_act()?),
            O::Add => one(self.add()?),
            O::Silu => one(self.x[0].clone()),
            O::Cast => one(self.cast()?),
            O::Quantize => self.quantize(),
            O::ToX0 => one(self.same(0, 1)?),
            O::Renoise => one(self.x[0].clone()),
            O::LayerNorm => one(self.row_norm(&[1, 2], 1)?),
            O::RmsNorm => one(self.row_norm(&[1], 1)?),
            O::NormModulate => one(self.norm_modulate()?),
            O::GateResidual => one(self.gate_residual()?),
            O::Modulation => one(self.modulation()?),
            O::RowSquareSum => one(self.row_square_sum()?),
            O::RmsScale => one(self.rms_scale()?),
            O::Rope => one(self.rope()?),
            O::Attention => one(self.attention()?),
            O::Softmax => one(self.softmax()?),
            O::Dot => one(self.dot()?),
            O::MoeRoute => one(self.moe_route()?),
            O::TimeEmbed => one(self.time_embed()?),
            O::SpaceTimeToDepth => one(self.space_time_to_depth()?),
            O::DepthToSpaceTime => one(self.depth_to_space_time()?),
            O::TakeRows => one(self.take_rows()?),
            O::TakeShard => one(self.take_shard()?),
            O::Pad => one(self.pad()?),
            O::Compact => one(self.compact()?),
            O::AllReduce => one(self.all_reduce()?),
            O::AllGather => one(self.all_gather()?),
            O::ReduceScatter => one(self.reduce_scatter()?),
            O::AllToAll => one(self.all_to_all()?),
            O::Broadcast => one(self.broadcast()?),
            O::Send => self.whole_over_world(self.peer("to")?, self.x[0]).map(|()| vec![]),
            O::EventRecord => one(Type::scalar(DType::Event)),
            O::Wait => refuse(&T0212, "a wait has no rule of its own"),
        }
    }

    fn positive(&self, name: &str) -> Rule<u64> {
        match self.op.int(name).and_then(|i| u64::try_from(i).ok()).filter(|i| (1..=ELEMENTS_MAX).contains(i))
        {
            Some(i) => Ok(i),
            None => refuse(&T0215, format!("{} needs a whole number `{name}` ≥ 1", self.op.opcode.name())),
        }
    }

    /// `first`, 0 where absent: rows of the whole before the first of this piece.
    fn first(&self) -> Rule<u64> {
        let at = match self.op.attrs.get("first") {
            None => Some(0),
            Some(_) => self.op.int("first").and_then(|i| u64::try_from(i).ok()),
        };
        match at.filter(|i| *i <= ELEMENTS_MAX) {
            Some(i) => Ok(i),
            None => {
                refuse(&T0215, format!("`first` of {} must be a whole number ≥ 0", self.op.opcode.name()))
            }
        }
    }

    /// `unit`, 1 where absent.
    fn unit(&self) -> Rule<u64> {
        if self.op.attrs.contains_key("unit") { self.positive("unit") } else { Ok(1) }
    }

    /// `segments`, 1 where absent: equal pieces of an extent, summed in a binary tree.
    fn segments(&self, extent: u64) -> Rule<u64> {
        if !self.op.attrs.contains_key("segments") {
            return Ok(1);
        }
        let n = self.positive("segments")?;
        if n.is_power_of_two() && extent.is_multiple_of(n) {
            Ok(n)
        } else {
            refuse(&T0215, format!("{n} equal segments, a power of two, of an extent of {extent}"))
        }
    }

    fn act(&self) -> Rule<()> {
        match self.op.attrs.get("act") {
            None => Ok(()),
            Some(Attr::Str(a)) if ACTS.contains(&a.as_str()) => Ok(()),
            _ => refuse(&T0215, format!("`act` must be {}", tessera_base::choices(ACTS))),
        }
    }

    fn eps(&self) -> Rule<()> {
        match self.op.float("eps") {
            Some(e) if e.is_finite() && e >= 0.0 => Ok(()),
            _ => refuse(&T0215, "`eps` must be a number ≥ 0"),
        }
    }

    /// The group of an op that names a member of it by position.
    fn peer(&self, name: &str) -> Rule<Group> {
        let group = self.group()?;
        let size = self.mesh.group_size(group);
        match self.op.int(name).and_then(|i| u32::try_from(i).ok()).filter(|i| *i < size) {
            Some(_) => Ok(group),
            None => refuse(&T0215, format!("`{name}` must be a position on {group}, 0 to {}", size - 1)),
        }
    }

    /// What a single rank of the world hands on must be whole there.
    fn whole_over_world(&self, group: Group, t: &Type) -> Rule<()> {
        let cut = self.mesh.axes().find(|a| t.layout.on(*a) != AxisLayout::Replicated);
        match cut.filter(|_| group == Group::World) {
            None => Ok(()),
            Some(axis) => refuse(
                &T0212,
                format!(
                    "{} over world of a value that is {} on {axis}; make it replicated on every axis first",
                    self.op.opcode.name(),
                    t.layout.on(axis)
                ),
            ),
        }
    }

    fn same_dtype(&self, a: usize, b: usize) -> Rule<()> {
        if self.x[a].dtype == self.x[b].dtype {
            Ok(())
        } else {
            refuse(&T0210, format!("dtypes of {} and {} differ", self.show(a), self.show(b)))
        }
    }

    /// Ops that know their place in no other way than by the whole value.
    fn whole(&self, operand: usize) -> Rule<()> {
        match self.mesh.axes().find(|a| self.x[operand].layout.on(*a) != AxisLayout::Replicated) {
            None => Ok(()),
            Some(a) => refuse(&T0213, format!("{} is not whole: it is cut over {a}", self.show(operand))),
        }
    }

    fn matrix(&self, operand: usize) -> Rule<[u64; 2]> {
        match self.x[operand].shape[..] {
            [n, m] => Ok([n, m]),
            _ => refuse(&T0210, format!("operand {operand} must be a matrix, is {}", self.show(operand))),
        }
    }

    fn show(&self, operand: usize) -> String {
        self.x[operand].display(self.mesh)
    }

    /// The group of a collective, or of an op that goes by positions in one.
    fn group(&self) -> Rule<Group> {
        let name = self.op.opcode.name();
        if self.op.attrs.contains_key("via") && !self.op.str("via").is_some_and(|v| VIA.contains(&v)) {
            return refuse(&T0215, format!("{name}: `via` is one of {}", VIA.join(", ")));
        }
        let group = self.op.group();
        // The axis is looked up again only to say what is wrong with the group.
        match (group, if group.is_none() { self.op.axis() } else { None }) {
            (Some(Group::Axis { axis, ways: Some(w) }), _) if !self.mesh.cuts(axis, w) => {
                refuse(&T0215, format!("{name}: {}", no_cut(self.mesh, axis, i64::from(w))))
            }
            (Some(Group::Axis { axis, .. }), _) if role_outside(&self.program.role).is_some() => refuse(
                &T0212,
                format!(
                    "{name} over {axis}: role({}) stands outside the mesh, in no group of an axis; send over world and broadcast from there",
                    self.program.role
                ),
            ),
            (Some(group), _) => Ok(group),
            (None, Some(axis)) => match self.op.int("ways") {
                Some(w) => refuse(&T0215, format!("{name}: {}", no_cut(self.mesh, axis, w))),
                None => refuse(&T0215, format!("{name}: `ways` must be a whole number")),
            },
            (None, None) if self.op.str("axis") == Some("world") => {
                refuse(&T0215, format!("{name}: `ways` cuts an axis, and the world is none"))
            }
            (None, None) => refuse(&T0215, format!("{name} names no mesh axis")),
        }
    }

    /// The group of an op that moves or makes pieces of a dim.
    fn over_axis(&self) -> Rule<Over> {
        match self.group()? {
            Group::Axis { axis, ways } => {
                Ok(Over { axis, ways, parts: ways.unwrap_or(self.mesh.size(axis)) })
            }
            Group::World => refuse(
                &T0212,
                format!(
                    "{} over world: no layout says which piece of a dim a rank of the world holds; go axis by axis",
                    self.op.opcode.name()
                ),
            ),
        }
    }

    fn tensor_dim(&self, name: &str) -> Rule<usize> {
        match self.op.int(name).and_then(|i| usize::try_from(i).ok()) {
            Some(d) if d < self.x[0].shape.len() => Ok(d),
            Some(d) => refuse(&T0215, format!("dim {d} of {}", self.show(0))),
            None => refuse(&T0215, format!("{} names no tensor dim (`{name}`)", self.op.opcode.name())),
        }
    }

    /// Combines layouts axis by axis with `f`.
    fn combine(&self, layouts: &[Layout], f: impl Fn(&[AxisLayout]) -> Option<AxisLayout>) -> Rule<Layout> {
        let mut out = Layout::REPLICATED;
        let mut on: Vec<AxisLayout> = Vec::with_capacity(layouts.len());
        for axis in self.mesh.axes() {
            on.clear();
            on.extend(layouts.iter().map(|l| l.on(axis)));
            match f(&on) {
                Some(l) => out = out.with(axis, l),
                None => {
                    let words: Vec<String> = on.iter().map(AxisLayout::to_string).collect();
                    return refuse(
                        &T0214,
                        format!(
                            "{} cannot take layouts {} on {axis}",
                            self.op.opcode.name(),
                            words.join(" · ")
                        ),
                    );
                }
            }
        }
        Ok(out)
    }

    fn layouts(&self) -> Vec<Layout> {
        self.x.iter().map(|t| t.layout).collect()
    }

    fn typed(&self, shape: impl Into<Vec<u64>>, layout: Layout) -> Type {
        Type { dtype: self.x[0].dtype, shape: shape.into(), layout }
    }

    fn same(&self, a: usize, b: usize) -> Rule<Type> {
        let (x, y) = (self.x[a], self.x[b]);
        if x == y {
            Ok(x.clone())
        } else if x.dtype == y.dtype && x.shape == y.shape {
            refuse(&T0214, format!("layouts of {} and {} differ", self.show(a), self.show(b)))
        } else {
            refuse(&T0210, format!("{} and {} differ", self.show(a), self.show(b)))
        }
    }

    fn add(&self) -> Rule<Type> {
        // The maximum of sums is not the sum of maxima.
        let max = |a: &Axis| {
            matches!(self.x[0].layout.on(*a), AxisLayout::Partial { reduction: Reduction::Max, .. })
        };
        if let Some(axis) = self.mesh.axes().find(max) {
            return refuse(&T0211, format!("a sum of values that are partial(max) over {axis}"));
        }
        self.same(0, 1)
    }

    fn time_embed(&self) -> Rule<Type> {
        self.whole(0)?;
        let width = self.positive("width")?;
        match self.x[0].shape[..] {
            [f] if width.is_multiple_of(2) => Ok(Type::new(DType::F32, [f, width])),
            [_] => refuse(&T0215, format!("`width` must be even, is {width}")),
            _ => refuse(&T0210, format!("one number per frame expected, is {}", self.show(0))),
        }
    }

    fn broadcast(&self) -> Rule<Type> {
        let group = self.peer("root")?;
        self.whole_over_world(group, self.x[0])?;
        match group {
            Group::Axis { axis, .. } if self.x[0].layout.on(axis) != AxisLayout::Replicated => {
                let have = self.x[0].layout.on(axis);
                refuse(&T0212, format!("broadcast over {group} of a value that is {have}"))
            }
            _ => Ok(self.x[0].clone()),
        }
    }

    fn buffer(&self) -> Rule<&Type> {
        match self.op.buffer {
            Some(b) => Ok(&self.program.buffer(b).ty),
            None => refuse(&T0215, format!("{} names no buffer", self.op.opcode.name())),
        }
    }

    fn cache_read(&self) -> Rule<Type> {
        let b = self.buffer()?;
        let Some(have) = b.shape.first().copied() else {
            return refuse(&T0210, "a scalar buffer has no rows");
        };
        self.some_rows(b, have, "a buffer")
    }

    fn take_rows(&self) -> Rule<Type> {
        match self.x[0].shape.first() {
            Some(have) => self.some_rows(self.x[0], *have, "a value"),
            None => refuse(&T0210, "a scalar has no rows"),
        }
    }

    /// Rows `row..row + rows` of the `have` that something has.
    fn some_rows(&self, of: &Type, have: u64, what: &str) -> Rule<Type> {
        let whole = |name: &str, absent: u64, wrong: u64| match self.op.attrs.get(name) {
            None => absent,
            Some(Attr::Int(i)) => u64::try_from(*i).unwrap_or(wrong),
            Some(_) => wrong,
        };
        let (row, rows) = (whole("row", 0, u64::MAX), whole("rows", have, 0));
        if rows == 0 || row.saturating_add(rows) > have {
            return refuse(&T0210, format!("rows {row}..{} of {what} of {have}", row.saturating_add(rows)));
        }
        if rows != have && self.shards_dim(&of.layout, 0).is_some() {
            return refuse(&T0213, format!("part of the rows of {what} sharded by rows"));
        }
        let mut t = of.clone();
        t.shape[0] = rows;
        Ok(t)
    }

    fn cache_write(&self) -> Rule<()> {
        let (b, v) = (self.buffer()?, self.x[0]);
        let rows_fit = matches!((b.shape.first(), v.shape.first()), (Some(b), Some(v)) if v <= b);
        if b.dtype != v.dtype || b.shape.get(1..) != v.shape.get(1..) || !rows_fit {
            return refuse(
                &T0210,
                format!("{} does not fit the buffer {}", self.show(0), b.display(self.mesh)),
            );
        }
        if b.layout != v.layout {
            return refuse(&T0214, format!("{} written to {}", self.show(0), b.display(self.mesh)));
        }
        let (first, rows, have) = (self.first()?, v.shape[0], b.shape[0]);
        if first.saturating_add(rows) > have {
            return refuse(
                &T0210,
                format!("rows {first}..{} of a buffer of {have}", first.saturating_add(rows)),
            );
        }
        let part = b.shape != v.shape || self.op.key("row").is_some() || first > 0;
        if self.shards_dim(&b.layout, 0).is_some() && part {
            return refuse(&T0213, "part of the rows of a buffer sharded by rows");
        }
        Ok(())
    }

    fn shards_dim(&self, layout: &Layout, dim: usize) -> Option<Axis> {
        self.mesh.axes().find(|a| matches!(layout.on(*a), AxisLayout::Shard(s) if s.dim == dim))
    }
}

/// The part of an axis that an op works over.
#[derive(Clone, Copy)]
struct Over {
    axis: Axis,
    ways: Option<u32>,
    /// Members of each group.
    parts: u32,
}

impl std::fmt::Display for Over {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        Group::Axis { axis: self.axis, ways: self.ways }.fmt(f)
    }
}

/// Why blocks of so many positions do not cut an axis.
fn no_cut(mesh: &Mesh, axis: Axis, ways: i64) -> String {
    let may = tessera_base::choices(&mesh.cuts_of(axis));
    format!("blocks of {ways} positions do not cut {axis} of {}; possible ways: {may}", mesh.size(axis))
}

/// Activations of `act`; gelu is the tanh form.
const ACTS: &[&str] = &["gelu_tanh", "silu"];

fn product(extents: &[u64]) -> Rule<u64> {
    match extents.iter().try_fold(1u64, |n, e| n.checked_mul(*e)) {
        Some(n) if n <= ELEMENTS_MAX => Ok(n),
        _ => refuse(&T0210, format!("extents {extents:?} multiply beyond {ELEMENTS_MAX}")),
    }
}

/// Whether partial sums of this op continue a fixed binary tree.
fn segments_tree(op: &Op) -> bool {
    op.attrs.contains_key("segments")
}

/// Rows of the widest piece.
fn widest(u: Uneven, parts: u32) -> u64 {
    tessera_mesh::split(u.extent / u.unit, parts, 0).1 * u.unit
}

/// Which piece of an uneven dim this role holds, cut over `axis` or over each block of `ways` positions of it. A
/// role's name ends in its coordinate class, `…@k`, when shards are uneven: k is the coordinate of the first rank of
/// the class on `axis`.
#[must_use]
pub fn role_piece(program: &Program, axis: Axis, u: Uneven, ways: Option<u32>) -> u64 {
    let size = program.mesh.size(axis);
    let at = role_coord(&program.role, axis).min(size - 1);
    Shard { dim: 0, uneven: Some(u), ways }.range(0, size, at).1
}

/// The coordinate on `axis` that a role's name stands for: `stage0@tp1` gives 1 on tp. 0 when not named.
#[must_use]
pub fn role_coord(role: &str, axis: Axis) -> u32 {
    place(role, axis.name()).unwrap_or(0)
}

/// The first rank outside the mesh that a role's name stands for: `leader@out0` gives 0. None for a role of the
/// mesh.
#[must_use]
pub fn role_outside(role: &str) -> Option<u32> {
    place(role, "out")
}

/// The number behind `@what` in a role's name.
pub(crate) fn place(role: &str, what: &str) -> Option<u32> {
    role.split('@').skip(1).find_map(|p| p.strip_prefix(what)?.parse().ok())
}
