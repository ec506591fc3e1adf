//! Rules of the ops that compute on one rank alone.

use tessera_mesh::{AxisLayout, Shard};

use super::{Cx, Rule, T0203, T0210, T0213, T0214, T0215, product, refuse, segments_tree};
use crate::{DType, Type};

impl Cx<'_> {
    pub(super) fn matmul(&self) -> Rule<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, k], [m, k2]) = (self.matrix(0)?, self.matrix(1)?);
        if k != k2 {
            return refuse(&T0210, format!("inner extents differ: x {} · w {}", self.show(0), self.show(1)));
        }
        self.same_dtype(0, 1)?;
        let result = self.scaled([n, m])?;
        self.segments(k)?;
        self.act()?;
        let bias = self.op.key("bias").map(|b| self.program.ty(b));
        if let Some(b) = bias
            && b.shape != [m]
        {
            return refuse(&T0210, format!("bias {} for {m} columns", b.display(self.mesh)));
        }
        if let Some(b) = bias
            && b.dtype != result
        {
            let b = b.display(self.mesh);
            return refuse(&T0210, format!("bias {b} for a product that gives {result}"));
        }
        let scaled = self.op.key("x_scale").is_some();
        let plain = bias.is_none() && self.op.str("act").is_none() && !scaled;
        let layout = self.combine(&self.layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(s), R) if s.dim == 0 => Some(S(s)),
            (R, S(s)) if s.dim == 0 => Some(S(Shard { dim: 1, ..s })),
            (S(a), S(b)) if a == b && a.dim == 1 && plain => self.partial_of(a),
            _ => None,
        })?;
        // A vector beside rows is cut as they are.
        for (vector, rows) in [("bias", 1), ("x_scale", 0), ("w_scale", 1)] {
            let Some(v) = self.op.key(vector).map(|v| self.program.ty(v)) else { continue };
            for axis in self.mesh.axes() {
                let want = match self.x[rows].layout.on(axis) {
                    S(s) if s.dim == 0 => S(s),
                    _ => R,
                };
                if v.layout.on(axis) != want {
                    let beside = if rows == 0 { "rows" } else { "weight" };
                    return refuse(
                        &T0214,
                        format!("{vector} {} beside {beside} {}", v.display(self.mesh), self.show(rows)),
                    );
                }
            }
        }
        Ok(Type { dtype: result, shape: vec![n, m], layout })
    }

    /// The dtype that a product gives; in e4m3 it takes a scale for each row of both operands, elsewhere none.
    fn scaled(&self, rows: [u64; 2]) -> Rule<DType> {
        let scales = ["x_scale", "w_scale"].map(|k| self.op.key(k).map(|v| self.program.ty(v)));
        let dtype = self.x[0].dtype;
        match scales {
            [None, None] if dtype != DType::E4m3 => Ok(dtype),
            [Some(x), Some(w)] if dtype == DType::E4m3 => {
                for (scale, n) in [x, w].into_iter().zip(rows) {
                    if scale.dtype != DType::F32 || scale.shape != [n] {
                        let says =
                            format!("scales {} for {n} rows: f32[{n}] expected", scale.display(self.mesh));
                        return refuse(&T0210, says);
                    }
                }
                Ok(DType::Bf16)
            }
            _ if dtype == DType::E4m3 => refuse(
                &T0210,
                "a product in e4m3 needs both x_scale and w_scale: its numbers mean nothing without",
            ),
            _ => {
                refuse(&T0210, format!("scales beside operands in {dtype}: they belong to a product in e4m3"))
            }
        }
    }

    /// A weight that is loaded as one of the results of `quantize`.
    pub(super) fn loaded(&self, declared: &Type) -> Rule<()> {
        let (dtype, dims) = match self.op.str("load") {
            Some("e4m3") => (DType::E4m3, 2),
            Some("e4m3.scale") => (DType::F32, 1),
            _ => return Ok(()),
        };
        if declared.dtype == dtype && declared.shape.len() == dims {
            return Ok(());
        }
        let load = self.op.str("load").unwrap_or_default();
        let says =
            format!("load = \"{load}\" gives {dtype} of {dims} dims, not {}", declared.display(self.mesh));
        refuse(&T0210, says)
    }

    pub(super) fn quantize(&self) -> Rule<Vec<Type>> {
        use AxisLayout::{Replicated as R, Shard as S};
        let [n, _] = self.matrix(0)?;
        if self.x[0].dtype != DType::Bf16 {
            return refuse(&T0210, format!("rows of bf16 are quantized, not {}", self.show(0)));
        }
        if let Some(axis) = self.shards_dim(&self.x[0].layout, 1) {
            let says = format!("the largest of a row over dim 1, which is sharded over {axis}");
            return refuse(&T0213, says);
        }
        let layout = self.combine(&self.layouts(), |l| match l[0] {
            R => Some(R),
            S(s) if s.dim == 0 => Some(S(s)),
            _ => None,
        })?;
        let rows = Type { dtype: DType::E4m3, ..self.x[0].clone() };
        Ok(vec![rows, Type { dtype: DType::F32, shape: vec![n], layout }])
    }

    /// The terms that ranks hold of a sum over a dim cut by `s`. A fixed tree needs equal pieces.
    pub(super) fn partial_of(&self, s: Shard) -> Option<AxisLayout> {
        use tessera_mesh::Reduction::{Sum, Tree};
        match (segments_tree(self.op), s.uneven) {
            (false, _) => Some(AxisLayout::Partial { reduction: Sum, ways: s.ways }),
            (true, None) => Some(AxisLayout::Partial { reduction: Tree, ways: s.ways }),
            (true, Some(_)) => None,
        }
    }

    pub(super) fn bias_act(&self) -> Rule<Type> {
        let [n, m] = self.matrix(0)?;
        self.act()?;
        if self.x[1].shape != [m] {
            return refuse(&T0210, format!("bias {} for {m} columns", self.show(1)));
        }
        self.same_dtype(0, 1)?;
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
    pub(super) fn row_norm(&self, vectors: &[usize], dim: usize) -> Rule<Type> {
        let [_, d] = self.matrix(0)?;
        self.eps()?;
        self.segments(d)?;
        if let Some(axis) = self.shards_dim(&self.x[0].layout, dim) {
            return refuse(
                &T0213,
                format!("{} over dim {dim}, which is sharded over {axis}", self.op.opcode.name()),
            );
        }
        for v in vectors {
            if self.x[*v].shape != [d] || !self.x[*v].layout.is_replicated() {
                return refuse(&T0210, format!("vector {} for rows of {d}", self.show(*v)));
            }
            self.beside(*v, 0)?;
        }
        Ok(self.x[0].clone())
    }

    /// A row op that also takes per-frame columns.
    pub(super) fn modulated(&self, x: usize, m: usize, columns: &[&str]) -> Rule<Type> {
        let ([_, d], [_, width]) = (self.matrix(x)?, self.matrix(m)?);
        let frame_rows = self.positive("frame_rows")?;
        for column in columns {
            let Some(col) = self.op.int(column).and_then(|c| u64::try_from(c).ok()) else {
                return refuse(&T0215, format!("`{column}` must be a column block of {}", self.show(m)));
            };
            if !width.is_multiple_of(d) || col >= width / d {
                return refuse(&T0210, format!("column block {col} of {} for rows of {d}", self.show(m)));
            }
        }
        let rows = self.x[x].layout.global(&self.x[x].shape, self.mesh)[0];
        let first = self.first()?;
        if first.saturating_add(rows) > frame_rows.saturating_mul(self.x[m].shape[0]) {
            let from = if first > 0 { format!(" from row {first}") } else { String::new() };
            return refuse(
                &T0210,
                format!("{rows} rows{from} of {frame_rows} a frame, more frames than {} has", self.show(m)),
            );
        }
        self.beside(m, x)?;
        if !self.x[m].layout.is_replicated() {
            return refuse(&T0214, format!("per-frame columns must be whole, are {}", self.show(m)));
        }
        if let Some(axis) = self.shards_dim(&self.x[x].layout, 1) {
            return refuse(
                &T0213,
                format!("{} over dim 1, which is sharded over {axis}", self.op.opcode.name()),
            );
        }
        Ok(self.x[x].clone())
    }

    /// Vectors and columns beside rows are of the rows' dtype or f32: they are few, and kept exact beside rounded rows.
    fn beside(&self, vector: usize, rows: usize) -> Rule<()> {
        let (of, rows_of) = (self.x[vector].dtype, self.x[rows].dtype);
        if of == rows_of || of == DType::F32 {
            return Ok(());
        }
        let says =
            format!("{} beside rows {}: f32 or {rows_of} would do", self.show(vector), self.show(rows));
        refuse(&T0210, says)
    }

    pub(super) fn norm_modulate(&self) -> Rule<Type> {
        self.eps()?;
        self.modulated(0, 1, &["scale", "shift"])
    }

    pub(super) fn gate_residual(&self) -> Rule<Type> {
        let t = self.same(0, 1)?;
        let given = |name: &str| self.op.attrs.contains_key(name);
        match (self.x.len() == 3, given("gate"), given("first")) {
            (true, ..) => self.modulated(0, 2, &["gate"]),
            (false, false, false) => Ok(t),
            (false, true, _) => refuse(&T0203, "a gate column without the operand that holds it"),
            (false, _, true) => refuse(&T0203, "`first` without the operand that has a row per frame"),
        }
    }

    pub(super) fn modulation(&self) -> Rule<Type> {
        let [f, width] = self.matrix(1)?;
        self.same_dtype(0, 1)?;
        match self.x[0].shape[..] {
            [1, c, d] if width == c.saturating_mul(d) || width == d => {
                let layout = self.combine(&self.layouts(), |l| {
                    (l[0] == AxisLayout::Replicated && l[1] == AxisLayout::Replicated)
                        .then_some(AxisLayout::Replicated)
                })?;
                Ok(Type { dtype: self.x[1].dtype, shape: vec![f, c * d], layout })
            }
            _ => refuse(&T0210, format!("table {} with embedding {}", self.show(0), self.show(1))),
        }
    }

    pub(super) fn row_square_sum(&self) -> Rule<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let [n, d] = self.matrix(0)?;
        if self.x.len() == 2 && self.x[0] != self.x[1] {
            return refuse(&T0210, format!("{} and {} differ", self.show(0), self.show(1)));
        }
        self.segments(d)?;
        let layout = self.combine(&self.layouts()[..1], |l| match l[0] {
            R => Some(R),
            S(s) if s.dim == 0 => Some(S(s)),
            S(s) => self.partial_of(s),
            Partial { .. } => None,
        })?;
        Ok(Type { dtype: DType::F32, shape: vec![n, self.x.len() as u64], layout })
    }

    pub(super) fn rms_scale(&self) -> Rule<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [n2, cols]) = (self.matrix(0)?, self.matrix(1)?);
        let col = self.op.int("col").unwrap_or(-1);
        self.eps()?;
        let (width, whole) =
            (self.positive("width")?, self.x[0].layout.global(&self.x[0].shape, self.mesh)[1]);
        if width != whole {
            return refuse(&T0215, format!("width {width} for rows of {whole} over all ranks"));
        }
        if n != n2 || u64::try_from(col).map_or(true, |c| c >= cols) || self.x[2].shape != [d] {
            return refuse(
                &T0210,
                format!(
                    "{} with sums {} column {col} and weight {}",
                    self.show(0),
                    self.show(1),
                    self.show(2)
                ),
            );
        }
        if self.x[1].dtype != DType::F32 {
            return refuse(&T0210, format!("sums of squares are f32, are {}", self.show(1)));
        }
        self.beside(2, 0)?;
        let layout = self.combine(&self.layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(s), S(t), R) if s == t && s.dim == 0 => Some(S(s)),
            (S(s), R, S(w)) if s.dim == 1 && w == (Shard { dim: 0, ..s }) => Some(S(s)),
            _ => None,
        })?;
        Ok(self.typed([n, d], layout))
    }

    pub(super) fn rope(&self) -> Rule<Type> {
        let [_, d] = self.matrix(0)?;
        let hd = self.positive("head_dim")?;
        let grid = self.extents("grid", 3)?;
        if !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
            return refuse(&T0210, format!("heads of {hd} over {}", self.show(0)));
        }
        if self.op.attrs.contains_key("frame_stride") && self.op.int("frame_stride").is_none() {
            return refuse(&T0215, "`frame_stride` must be a whole number");
        }
        let rows: u64 = self.x[0].layout.global(&self.x[0].shape, self.mesh)[0];
        let tokens = product(&grid)?;
        let first = self.first()?;
        let fits = match self.op.attrs.contains_key("first") {
            true => first.saturating_add(rows) <= tokens,
            false => rows == tokens,
        };
        if !fits && self.op.int("frame_stride") != Some(0) {
            let from = if first > 0 { format!(" from row {first}") } else { String::new() };
            return refuse(&T0210, format!("grid {grid:?} has {tokens} tokens, the value {rows}{from}"));
        }
        Ok(self.x[0].clone())
    }

    pub(super) fn attention(&self) -> Rule<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [r, dk], [rv, dv]) = (self.matrix(0)?, self.matrix(1)?, self.matrix(2)?);
        let hd = self.positive("head_dim")?;
        if d != dk || d != dv || r != rv || !d.is_multiple_of(hd) {
            return refuse(
                &T0210,
                format!("q {} k {} v {} with heads of {hd}", self.show(0), self.show(1), self.show(2)),
            );
        }
        self.same_dtype(0, 1)?;
        self.same_dtype(0, 2)?;
        if let Some(b) = self.op.key("bias").map(|b| self.program.ty(b)).filter(|b| b.dtype != DType::F32) {
            return refuse(&T0210, format!("a bias of scores is f32, is {}", b.display(self.mesh)));
        }
        match (self.op.key("bias").is_some(), self.op.ints("bias_rows")) {
            (false, None) if !self.op.attrs.contains_key("bias_rows") => {}
            (true, Some(&[from, to]))
                if 0 <= from && from <= to && u64::try_from(to).is_ok_and(|to| to <= r) => {}
            (true, _) => {
                return refuse(&T0215, format!("`bias_rows` must be [from, to] within the {r} keys"));
            }
            (false, _) => return refuse(&T0203, "`bias_rows` without a bias"),
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

    pub(super) fn cast(&self) -> Rule<Type> {
        const TO: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];
        let from = self.x[0].dtype;
        let to = self.op.str("to").and_then(DType::parse).filter(|to| TO.contains(to));
        match to {
            // Numbers in 8 bits mean nothing without their scale.
            _ if !TO.contains(&from) => refuse(&T0210, format!("a cast of {}", self.show(0))),
            None => refuse(&T0215, format!("`to` must be {}", tessera_base::choices(&TO.map(DType::name)))),
            Some(to) if to == from => refuse(&T0215, format!("a cast of {} to what it is", self.show(0))),
            Some(to) => Ok(Type { dtype: to, ..self.x[0].clone() }),
        }
    }

    /// A list of `n` whole numbers ≥ 1.
    pub(super) fn extents(&self, name: &str, n: usize) -> Rule<Vec<u64>> {
        let v: Vec<u64> =
            self.op.ints(name).unwrap_or(&[]).iter().filter_map(|i| u64::try_from(*i).ok()).collect();
        if v.len() == n && self.op.ints(name).is_some_and(|i| i.len() == n) && !v.contains(&0) {
            Ok(v)
        } else {
            refuse(&T0215, format!("`{name}` must be {n} whole numbers ≥ 1"))
        }
    }

    /// Extents of the block of pixels that one token covers: frames, rows and columns.
    pub(super) fn video(&self) -> Rule<[u64; 3]> {
        let (s, p) = (self.extents("stride", 3)?, self.extents("patch", 2)?);
        let block = [s[0], product(&[s[1], p[0]])?, product(&[s[2], p[1]])?];
        product(&block)?;
        Ok(block)
    }

    pub(super) fn space_time_to_depth(&self) -> Rule<Type> {
        let [bt, bh, bw] = self.video()?;
        self.whole(0)?;
        match self.x[0].shape[..] {
            [t, h, w, c] if t.is_multiple_of(bt) && h.is_multiple_of(bh) && w.is_multiple_of(bw) => {
                let tokens = product(&[t / bt, h / bh, w / bw])?;
                Ok(Type::new(self.x[0].dtype, [tokens, product(&[bt, bh, bw, c])?]))
            }
            _ => refuse(&T0210, format!("{} in blocks of {bt}×{bh}×{bw}", self.show(0))),
        }
    }

    pub(super) fn depth_to_space_time(&self) -> Rule<Type> {
        let [bt, bh, bw] = self.video()?;
        let [n, p] = self.matrix(0)?;
        self.whole(0)?;
        let (grid, block) = (self.extents("grid", 3)?, product(&[bt, bh, bw])?);
        if product(&grid)? != n || !p.is_multiple_of(block) {
            return refuse(
                &T0210,
                format!("{} on a grid of {grid:?} in blocks of {bt}×{bh}×{bw}", self.show(0)),
            );
        }
        let shape = [product(&[grid[0], bt])?, product(&[grid[1], bh])?, product(&[grid[2], bw])?, p / block];
        Ok(Type::new(self.x[0].dtype, shape))
    }
}
