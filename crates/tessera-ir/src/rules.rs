//! The shape rule and the shard rule of every op: from operand types to result types, or why not.
//!
//! The builder uses them to give types, the judge to check them again. The reference evaluator does not read
//! them, so that a wrong rule cannot vouch for itself.

mod compute;
mod exchange;
mod row;
mod tile;

use tessera_base::Code;
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Shard, Uneven};

use crate::parse::T0203;
use crate::{Attr, DType, Op, Opcode, Program, Type};
use row::well_formed;
pub(crate) use tile::moe_constants;

/// A shape that an op cannot take.
pub static T0210: Code = Code {
    id: "T0210",
    title: "shapes do not fit the op",
    page: "The operands' local shapes break the op's shape rule: for instance a matmul whose inner extents differ, \
or a cache write past the buffer's rows. The message shows both shapes.",
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
multiply it by the group's size.",
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
mesh axis and, where it moves pieces of a tensor, the tensor dim: scattered over the wrong dim before a local softmax a \
program runs and is wrong everywhere.",
};

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
/// # Errors
/// T0203 for what the op's row does not allow, T0210 to T0215 for what its rule refuses.
pub fn infer(program: &Program, op: &Op, declared: &[Type]) -> Rule<Vec<Type>> {
    well_formed(program, op)?;
    if op.opcode == Opcode::Wait {
        return infer_wait(program, op, declared);
    }
    let ticket = vec![Type::scalar(DType::Ticket)];
    // The type of an issued receive is known at its wait alone.
    if op.issue && op.opcode == Opcode::Recv {
        Cx { program, op, mesh: &program.mesh, x: vec![] }.peer("from")?;
        return Ok(ticket);
    }
    let results = infer_whole(program, op, declared)?;
    if op.issue { Ok(ticket) } else { Ok(results) }
}

/// Most elements of a value on one rank; a larger number is taken for a slip.
const ELEMENTS_MAX: u64 = 1 << 40;

/// Whether a type can be: extents within bounds, every sharded dim there, cut over one axis alone and, where it
/// is uneven, of the length that this role holds.
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
        let AxisLayout::Shard(s) = ty.layout.on(axis) else { continue };
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
        match Shard::of(s.dim, u.extent, u.unit, mesh.size(axis)) {
            Some(Shard { uneven: Some(_), .. }) if u.extent <= ELEMENTS_MAX => {
                let piece = role_piece(program, axis, u);
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
                        "dim {} of {}: extent {} in units of {} over {} ranks",
                        s.dim,
                        shown(),
                        u.extent,
                        u.unit,
                        mesh.size(axis)
                    ),
                );
            }
        }
    }
    Ok(())
}

fn infer_wait(program: &Program, op: &Op, declared: &[Type]) -> Rule<Vec<Type>> {
    let ticket = op.operands[0];
    let issue = program.ops.iter().find(|o| o.results.contains(&ticket) && o.issue);
    match issue {
        None => refuse(&T0212, "waits for something that is not an issued collective"),
        Some(issue) => infer_whole(program, issue, declared),
    }
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
                    if self.op.opcode == O::Recv {
                        self.peer("from")?;
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
            O::TakeShard => one(self.take_shard()?),
            O::Pad => one(self.pad()?),
            O::Compact => one(self.compact()?),
            O::AllReduce => one(self.all_reduce()?),
            O::AllGather => one(self.all_gather()?),
            O::ReduceScatter => one(self.reduce_scatter()?),
            O::AllToAll => one(self.all_to_all()?),
            O::Broadcast => one(self.broadcast()?),
            O::Send => self.peer("to").map(|_| vec![]),
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

    /// A member's position on the collective's axis.
    fn peer(&self, name: &str) -> Rule<(Axis, u32)> {
        let axis = self.axis()?;
        let size = self.mesh.size(axis);
        match self.op.int(name).and_then(|i| u32::try_from(i).ok()).filter(|i| *i < size) {
            Some(i) => Ok((axis, i)),
            None => refuse(&T0215, format!("`{name}` must be a position on {axis}, 0 to {}", size - 1)),
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

    /// The group's axis of a collective.
    fn axis(&self) -> Rule<Axis> {
        match self.op.axis() {
            Some(a) => Ok(a),
            None => refuse(&T0215, format!("{} names no mesh axis", self.op.opcode.name())),
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
        for axis in self.mesh.axes() {
            let on: Vec<AxisLayout> = layouts.iter().map(|l| l.on(axis)).collect();
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
        if let Some((axis, tessera_mesh::Reduction::Max)) = self.x[0].layout.partial() {
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
        let (axis, _) = self.peer("root")?;
        match self.x[0].layout.on(axis) {
            AxisLayout::Replicated => Ok(self.x[0].clone()),
            have => refuse(&T0212, format!("broadcast over {axis} of a value that is {have}")),
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
        let whole = |name: &str, absent: u64, wrong: u64| match self.op.attrs.get(name) {
            None => absent,
            Some(Attr::Int(i)) => u64::try_from(*i).unwrap_or(wrong),
            Some(_) => wrong,
        };
        let (row, rows) = (whole("row", 0, u64::MAX), whole("rows", have, 0));
        if rows == 0 || row.saturating_add(rows) > have {
            return refuse(&T0210, format!("rows {row}..{} of a buffer of {have}", row.saturating_add(rows)));
        }
        if rows != have && self.shards_dim(&b.layout, 0).is_some() {
            return refuse(&T0213, "part of the rows of a buffer sharded by rows");
        }
        let mut t = b.clone();
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
        if self.shards_dim(&b.layout, 0).is_some() && (b.shape != v.shape || self.op.key("row").is_some()) {
            return refuse(&T0213, "part of the rows of a buffer sharded by rows");
        }
        Ok(())
    }

    fn shards_dim(&self, layout: &Layout, dim: usize) -> Option<Axis> {
        self.mesh.axes().find(|a| matches!(layout.on(*a), AxisLayout::Shard(s) if s.dim == dim))
    }
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

/// Which piece of an uneven dim this role holds. A role's name ends in its coordinate class, `…@k`, when
/// shards are uneven: k is the coordinate of the first rank of the class on `axis`.
#[must_use]
pub fn role_piece(program: &Program, axis: Axis, u: Uneven) -> u64 {
    let parts = program.mesh.size(axis);
    let at = role_coord(&program.role, axis).min(parts - 1);
    tessera_mesh::split(u.extent / u.unit, parts, at).1 * u.unit
}

/// The coordinate on `axis` that a role's name stands for: `stage0@tp1` gives 1 on tp. 0 when not named.
#[must_use]
pub fn role_coord(role: &str, axis: Axis) -> u32 {
    role.split('@').skip(1).find_map(|p| p.strip_prefix(axis.name())?.parse().ok()).unwrap_or(0)
}
