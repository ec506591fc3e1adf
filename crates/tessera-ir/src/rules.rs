//! The shape rule and the shard rule of every op: from operand types to result types, or why not.
//!
//! The builder uses them to give types, the judge to check them again. The reference evaluator does not read
//! them, so that a wrong rule cannot vouch for itself.

use tessera_base::Code;
use tessera_mesh::{Axis, AxisLayout, Layout, Mesh, Shard, Uneven};

use crate::{DType, Op, Opcode, Program, Type};

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
replicated activation with a weight sharded over its inner dim, which would multiply different extents.",
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
pub fn infer(program: &Program, op: &Op, declared: &[Type]) -> Rule<Vec<Type>> {
    if op.opcode == Opcode::Wait {
        return infer_wait(program, op, declared);
    }
    let results = infer_whole(program, op, declared)?;
    if op.issue { Ok(vec![Type::scalar(DType::Ticket)]) } else { Ok(results) }
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
    cx.infer(declared)
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
                [t] => one(t.clone()),
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
            O::NormModulate => one(self.modulated(0, 1, "scale")?),
            O::GateResidual => one(self.gate_residual()?),
            O::Modulation => one(self.modulation()?),
            O::RowSquareSum => one(self.row_square_sum()?),
            O::RmsScale => one(self.rms_scale()?),
            O::Rope => one(self.rope()?),
            O::Attention => one(self.attention()?),
            O::TimeEmbed => one(Type::new(DType::F32, [self.dim(0, 0)?, self.positive("width")?])),
            O::SpaceTimeToDepth => one(self.space_time_to_depth()?),
            O::DepthToSpaceTime => one(self.depth_to_space_time()?),
            O::TakeShard => one(self.take_shard()?),
            O::Pad => one(self.pad()?),
            O::Compact => one(self.compact()?),
            O::AllReduce => one(self.all_reduce()?),
            O::AllGather => one(self.all_gather()?),
            O::ReduceScatter => one(self.reduce_scatter()?),
            O::AllToAll => one(self.all_to_all()?),
            O::Broadcast => one(self.x[0].clone()),
            O::Send => Ok(vec![]),
            O::EventRecord => one(Type::scalar(DType::Event)),
            O::Wait => refuse(&T0212, "a wait has no rule of its own"),
        }
    }

    fn positive(&self, name: &str) -> Rule<u64> {
        match self.op.int(name).and_then(|i| u64::try_from(i).ok()).filter(|i| *i > 0) {
            Some(i) => Ok(i),
            None => refuse(&T0215, format!("{} needs a whole number `{name}` ≥ 1", self.op.opcode.name())),
        }
    }

    fn dim(&self, operand: usize, dim: usize) -> Rule<u64> {
        match self.x[operand].shape.get(dim) {
            Some(n) => Ok(*n),
            None => refuse(&T0210, format!("operand {operand} has no dim {dim}: {}", self.show(operand))),
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
                        format!("{} cannot take layouts {} on {axis}", self.op.opcode.name(), words.join(" · ")),
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
        if self.x[a] == self.x[b] {
            Ok(self.x[a].clone())
        } else {
            refuse(&T0210, format!("{} and {} differ", self.show(a), self.show(b)))
        }
    }

    fn add(&self) -> Rule<Type> {
        self.same(0, 1)
    }

    fn buffer(&self) -> Rule<&Type> {
        match self.op.buffer {
            Some(b) => Ok(&self.program.buffer(b).ty),
            None => refuse(&T0215, format!("{} names no buffer", self.op.opcode.name())),
        }
    }

    fn cache_read(&self) -> Rule<Type> {
        let b = self.buffer()?;
        let Some(have) = b.shape.first().copied() else { return refuse(&T0210, "a scalar buffer has no rows") };
        let row = u64::try_from(self.op.int("row").unwrap_or(0)).unwrap_or(u64::MAX);
        let rows = match self.op.int("rows") {
            None => have,
            Some(r) => u64::try_from(r).unwrap_or(0),
        };
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
            return refuse(&T0210, format!("{} does not fit the buffer {}", self.show(0), b.display(self.mesh)));
        }
        if b.layout != v.layout {
            return refuse(&T0214, format!("{} written to {}", self.show(0), b.display(self.mesh)));
        }
        Ok(())
    }

    fn shards_dim(&self, layout: &Layout, dim: usize) -> Option<Axis> {
        self.mesh.axes().find(|a| matches!(layout.on(*a), AxisLayout::Shard(s) if s.dim == dim))
    }

    fn matmul(&self) -> Rule<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let ([n, k], [m, k2]) = (self.matrix(0)?, self.matrix(1)?);
        if k != k2 {
            return refuse(&T0210, format!("inner extents differ: x {} · w {}", self.show(0), self.show(1)));
        }
        let segments = self.op.int("segments").unwrap_or(1);
        if segments < 1 || !(segments as u64).is_power_of_two() || !k.is_multiple_of(segments as u64) {
            return refuse(&T0215, format!("{segments} equal segments of an inner extent of {k}"));
        }
        let bias = self.op.key("bias").map(|b| self.program.ty(b));
        if let Some(b) = bias
            && b.shape != [m]
        {
            return refuse(&T0210, format!("bias {} for {m} columns", b.display(self.mesh)));
        }
        let plain = bias.is_none() && self.op.str("act").is_none();
        let layout = self.combine(&self.layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(s), R) if s.dim == 0 => Some(S(s)),
            (R, S(s)) if s.dim == 0 => Some(S(Shard { dim: 1, ..s })),
            (S(a), S(b)) if a == b && a.dim == 1 && plain => {
                Some(Partial(if segments_tree(self.op) { tessera_mesh::Reduction::Tree } else { tessera_mesh::Reduction::Sum }))
            }
            _ => None,
        })?;
        if let Some(b) = bias {
            for axis in self.mesh.axes() {
                let want = match self.x[1].layout.on(axis) {
                    S(s) if s.dim == 0 => S(s),
                    _ => R,
                };
                if b.layout.on(axis) != want {
                    return refuse(&T0214, format!("bias {} beside weight {}", b.display(self.mesh), self.show(1)));
                }
            }
        }
        Ok(self.typed([n, m], layout))
    }

    fn bias_act(&self) -> Rule<Type> {
        let [n, m] = self.matrix(0)?;
        if self.x[1].shape != [m] {
            return refuse(&T0210, format!("bias {} for {m} columns", self.show(1)));
        }
        use AxisLayout::{Replicated as R, Shard as S};
        let layout = self.combine(&self.layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(s), R) if s.dim == 0 => Some(S(s)),
            (S(s), S(b)) if s.dim == 1 && b == (Shard { dim: 0, ..s }) => Some(S(s)),
            _ => None,
        })?;
        Ok(self.typed([n, m], layout))
    }

    /// An op that reduces each row of operand 0; its vectors must be whole.
    fn row_norm(&self, vectors: &[usize], dim: usize) -> Rule<Type> {
        let [_, d] = self.matrix(0)?;
        if let Some(axis) = self.shards_dim(&self.x[0].layout, dim) {
            return refuse(&T0213, format!("{} over dim {dim}, which is sharded over {axis}", self.op.opcode.name()));
        }
        for v in vectors {
            if self.x[*v].shape != [d] || !self.x[*v].layout.is_replicated() {
                return refuse(&T0210, format!("vector {} for rows of {d}", self.show(*v)));
            }
        }
        Ok(self.x[0].clone())
    }

    /// A row op that also takes per-frame columns.
    fn modulated(&self, x: usize, m: usize, column: &str) -> Rule<Type> {
        let ([_, d], [_, width]) = (self.matrix(x)?, self.matrix(m)?);
        self.positive("frame_rows")?;
        let col = self.op.int(column).or(self.op.int("gate")).unwrap_or(-1);
        let cols = if d == 0 { 0 } else { width / d };
        if width != cols * d || u64::try_from(col).map_or(true, |c| c >= cols) {
            return refuse(&T0210, format!("column block {col} of {} for rows of {d}", self.show(m)));
        }
        if !self.x[m].layout.is_replicated() {
            return refuse(&T0214, format!("per-frame columns must be whole, are {}", self.show(m)));
        }
        if let Some(axis) = self.shards_dim(&self.x[x].layout, 1) {
            return refuse(&T0213, format!("{} over dim 1, which is sharded over {axis}", self.op.opcode.name()));
        }
        Ok(self.x[x].clone())
    }

    fn gate_residual(&self) -> Rule<Type> {
        let t = self.same(0, 1)?;
        if self.x.len() == 3 { self.modulated(0, 2, "gate") } else { Ok(t) }
    }

    fn modulation(&self) -> Rule<Type> {
        let [f, width] = self.matrix(1)?;
        match self.x[0].shape[..] {
            [1, c, d] if width == c * d || width == d => {
                let layout = self.combine(&self.layouts(), |l| {
                    (l[0] == AxisLayout::Replicated && l[1] == AxisLayout::Replicated).then_some(AxisLayout::Replicated)
                })?;
                Ok(Type { dtype: self.x[1].dtype, shape: vec![f, c * d], layout })
            }
            _ => refuse(&T0210, format!("table {} with embedding {}", self.show(0), self.show(1))),
        }
    }

    fn row_square_sum(&self) -> Rule<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let [n, d] = self.matrix(0)?;
        if self.x.len() == 2 && self.x[0] != self.x[1] {
            return refuse(&T0210, format!("{} and {} differ", self.show(0), self.show(1)));
        }
        let segments = self.op.int("segments").unwrap_or(1);
        if segments < 1 || !d.is_multiple_of(segments as u64) {
            return refuse(&T0215, format!("{segments} equal segments of rows of {d}"));
        }
        let reduction =
            if segments_tree(self.op) { tessera_mesh::Reduction::Tree } else { tessera_mesh::Reduction::Sum };
        let layout = self.combine(&self.layouts()[..1], |l| match l[0] {
            R => Some(R),
            S(s) if s.dim == 0 => Some(S(s)),
            S(_) => Some(Partial(reduction)),
            Partial(_) => None,
        })?;
        Ok(Type { dtype: DType::F32, shape: vec![n, self.x.len() as u64], layout })
    }

    fn rms_scale(&self) -> Rule<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [n2, cols]) = (self.matrix(0)?, self.matrix(1)?);
        let col = self.op.int("col").unwrap_or(-1);
        if n != n2 || u64::try_from(col).map_or(true, |c| c >= cols) || self.x[2].shape != [d] {
            return refuse(
                &T0210,
                format!("{} with sums {} column {col} and weight {}", self.show(0), self.show(1), self.show(2)),
            );
        }
        let layout = self.combine(&self.layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(s), S(t), R) if s == t && s.dim == 0 => Some(S(s)),
            (S(s), R, S(w)) if s.dim == 1 && w == (Shard { dim: 0, ..s }) => Some(S(s)),
            _ => None,
        })?;
        Ok(self.typed([n, d], layout))
    }

    fn rope(&self) -> Rule<Type> {
        let [_, d] = self.matrix(0)?;
        let hd = self.positive("head_dim")?;
        let grid = self.op.ints("grid").unwrap_or(&[]);
        if grid.len() != 3 || !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
            return refuse(&T0210, format!("heads of {hd} over {}, grid {grid:?}", self.show(0)));
        }
        let rows: u64 = self.x[0].layout.global(&self.x[0].shape, self.mesh)[0];
        let tokens: i64 = grid.iter().product();
        if u64::try_from(tokens) != Ok(rows) && self.op.int("frame_stride") != Some(0) {
            return refuse(&T0210, format!("grid {grid:?} has {tokens} tokens, the value {rows}"));
        }
        Ok(self.x[0].clone())
    }

    fn attention(&self) -> Rule<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [r, dk], [rv, dv]) = (self.matrix(0)?, self.matrix(1)?, self.matrix(2)?);
        let hd = self.positive("head_dim")?;
        if d != dk || d != dv || r != rv || !d.is_multiple_of(hd) {
            return refuse(
                &T0210,
                format!("q {} k {} v {} with heads of {hd}", self.show(0), self.show(1), self.show(2)),
            );
        }
        for i in [1, 2] {
            if let Some(axis) = self.shards_dim(&self.x[i].layout, 0) {
                return refuse(&T0213, format!("softmax over keys, which are sharded over {axis}"));
            }
        }
        let layout = self.combine(&self.layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(q), R, R) if q.dim == 0 => Some(S(q)),
            (S(q), S(k), S(v)) if q == k && k == v && q.dim == 1 => Some(S(q)),
            _ => None,
        })?;
        Ok(self.typed([n, d], layout))
    }

    fn video(&self) -> Rule<([u64; 3], [u64; 2])> {
        let take = |name: &str, n: usize| -> Rule<Vec<u64>> {
            let v = self.op.ints(name).unwrap_or(&[]);
            let v: Vec<u64> = v.iter().filter_map(|i| u64::try_from(*i).ok()).filter(|i| *i > 0).collect();
            if v.len() == n { Ok(v) } else { refuse(&T0215, format!("`{name}` must be {n} whole numbers ≥ 1")) }
        };
        let (s, p) = (take("stride", 3)?, take("patch", 2)?);
        Ok(([s[0], s[1], s[2]], [p[0], p[1]]))
    }

    fn space_time_to_depth(&self) -> Rule<Type> {
        let ([st, sh, sw], [ph, pw]) = self.video()?;
        match self.x[0].shape[..] {
            [t, h, w, c] if t.is_multiple_of(st) && h.is_multiple_of(sh * ph) && w.is_multiple_of(sw * pw) => {
                let tokens = (t / st) * (h / (sh * ph)) * (w / (sw * pw));
                Ok(Type::new(self.x[0].dtype, [tokens, ph * pw * st * sh * sw * c]))
            }
            _ => refuse(&T0210, format!("{} in blocks of {st}×{}×{}", self.show(0), sh * ph, sw * pw)),
        }
    }

    fn depth_to_space_time(&self) -> Rule<Type> {
        let ([st, sh, sw], [ph, pw]) = self.video()?;
        let [n, p] = self.matrix(0)?;
        let grid = self.op.ints("grid").unwrap_or(&[]);
        let block = ph * pw * st * sh * sw;
        match grid {
            [f, h, w] if u64::try_from(f * h * w) == Ok(n) && p.is_multiple_of(block) => {
                let (f, h, w) = (*f as u64, *h as u64, *w as u64);
                Ok(Type::new(self.x[0].dtype, [f * st, h * ph * sh, w * pw * sw, p / block]))
            }
            _ => refuse(&T0210, format!("{} on a grid of {grid:?}", self.show(0))),
        }
    }

    fn take_shard(&self) -> Rule<Type> {
        let (axis, dim) = (self.axis()?, self.tensor_dim("dim")?);
        if self.x[0].layout.on(axis) != AxisLayout::Replicated {
            return refuse(&T0212, format!("take_shard of {}", self.show(0)));
        }
        let unit = self.op.int("unit").and_then(|u| u64::try_from(u).ok()).unwrap_or(1);
        self.sharded(self.x[0].shape.clone(), self.x[0].layout, axis, dim, unit)
    }

    /// The type after dim `dim` of a tensor with these extents was cut over `axis`. The piece is this role's:
    /// for uneven shards the role's declared result tells which, see [`role_piece`].
    fn sharded(&self, mut shape: Vec<u64>, layout: Layout, axis: Axis, dim: usize, unit: u64) -> Rule<Type> {
        let parts = self.mesh.size(axis);
        let Some(shard) = Shard::of(dim, shape[dim], unit, parts) else {
            return refuse(
                &T0210,
                format!("dim {dim} of extent {} in units of {unit} over {parts} ranks", shape[dim]),
            );
        };
        shape[dim] = match shard.uneven {
            None => shape[dim] / u64::from(parts),
            Some(u) => role_piece(self.program, axis, u),
        };
        Ok(self.typed(shape, layout.with(axis, AxisLayout::Shard(shard))))
    }

    fn pad(&self) -> Rule<Type> {
        let (axis, dim, rows) = (self.axis()?, self.tensor_dim("dim")?, self.positive("rows")?);
        let mut t = self.x[0].clone();
        match t.layout.on(axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: Some(u) })
                if d == dim && dim == 0 && rows == widest(u, self.mesh.size(axis)) =>
            {
                t.shape[0] = rows;
                t.layout = t.layout.with(axis, AxisLayout::Shard(Shard { dim, uneven: None }));
                Ok(t)
            }
            _ => refuse(&T0212, format!("pad to {rows} rows of {}", self.show(0))),
        }
    }

    fn compact(&self) -> Rule<Type> {
        let (extent, parts, unit) = (self.positive("extent")?, self.positive("parts")?, self.positive("unit")?);
        let mut t = self.x[0].clone();
        let each = (extent / unit).div_ceil(parts) * unit;
        if t.shape.first() != Some(&(each * parts)) {
            return refuse(&T0210, format!("{} is not {parts} pieces of {each} rows", self.show(0)));
        }
        t.shape[0] = extent;
        Ok(t)
    }

    fn all_reduce(&self) -> Rule<Type> {
        let axis = self.axis()?;
        match (self.x[0].layout.on(axis), self.op.reduction()) {
            (AxisLayout::Partial(have), Some(want)) if have == want => {
                Ok(Type { layout: self.x[0].layout.with(axis, AxisLayout::Replicated), ..self.x[0].clone() })
            }
            (_, None) => refuse(&T0215, "all_reduce names no reduction"),
            (have, Some(want)) => refuse(&T0212, format!("all_reduce({}) over {axis} of a value that is {have}", want.name())),
        }
    }

    fn all_gather(&self) -> Rule<Type> {
        let (axis, dim) = (self.axis()?, self.tensor_dim("dim")?);
        let t = self.x[0];
        match t.layout.on(axis) {
            AxisLayout::Shard(Shard { dim: d, uneven: None }) if d == dim => {
                let mut out = t.clone();
                out.shape[dim] *= u64::from(self.mesh.size(axis));
                out.layout = out.layout.with(axis, AxisLayout::Replicated);
                Ok(out)
            }
            AxisLayout::Shard(Shard { uneven: Some(_), .. }) => {
                refuse(&T0212, format!("all_gather of uneven pieces {}; pad them first", self.show(0)))
            }
            have => refuse(&T0212, format!("all_gather over {axis} dim {dim} of a value that is {have}")),
        }
    }

    fn reduce_scatter(&self) -> Rule<Type> {
        let (axis, dim) = (self.axis()?, self.tensor_dim("dim")?);
        match (self.x[0].layout.on(axis), self.op.reduction()) {
            (AxisLayout::Partial(have), Some(want)) if have == want => {
                let parts = u64::from(self.mesh.size(axis));
                if !self.x[0].shape[dim].is_multiple_of(parts) {
                    return refuse(&T0210, format!("dim {dim} of {} over {parts} ranks", self.show(0)));
                }
                self.sharded(self.x[0].shape.clone(), self.x[0].layout, axis, dim, 1)
            }
            (_, None) => refuse(&T0215, "reduce_scatter names no reduction"),
            (have, Some(want)) => {
                refuse(&T0212, format!("reduce_scatter({}) over {axis} of a value that is {have}", want.name()))
            }
        }
    }

    fn all_to_all(&self) -> Rule<Type> {
        let (axis, split, concat) = (self.axis()?, self.tensor_dim("split")?, self.tensor_dim("concat")?);
        let t = self.x[0];
        match t.layout.on(axis) {
            AxisLayout::Shard(s) if s.dim == concat && split != concat => {
                let mut shape = t.shape.clone();
                shape[concat] = s.extent(shape[concat], self.mesh.size(axis));
                let unit = self.op.int("unit").and_then(|u| u64::try_from(u).ok()).unwrap_or(1);
                self.sharded(shape, t.layout.with(axis, AxisLayout::Replicated), axis, split, unit)
            }
            have => refuse(&T0212, format!("all_to_all over {axis} concat {concat} of a value that is {have}")),
        }
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
    let at = role_coord(&program.role, axis);
    tessera_mesh::split(u.extent / u.unit, program.mesh.size(axis), at).1 * u.unit
}

/// The coordinate on `axis` that a role's name stands for: `stage0@tp1` gives 1 on tp. 0 when not named.
#[must_use]
pub fn role_coord(role: &str, axis: Axis) -> u32 {
    role.split('@').skip(1).find_map(|p| p.strip_prefix(axis.name())?.parse().ok()).unwrap_or(0)
}
