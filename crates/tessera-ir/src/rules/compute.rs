//! Rules of the ops that compute on one rank only.

use tessera_mesh::{AxisLayout, Shard};

use super::{
    RuleContext, RuleResult, T0203, T0210, T0213, T0214, T0215, has_segments, multiply_extents, rule_error,
};
use crate::{DType, Type};

impl RuleContext<'_> {
    pub(super) fn matmul_type(&self) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, k], [m, k2]) = (self.matrix_shape(0)?, self.matrix_shape(1)?);
        if k != k2 {
            return rule_error(
                &T0210,
                format!(
                    "inner extents differ: x {} · w {}",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            );
        }
        self.check_same_dtype(0, 1)?;
        let result = self.matmul_dtype([n, m])?;
        self.segment_count(k)?;
        self.check_act()?;
        let bias = self.op.keyed_operand("bias").map(|b| self.program.type_of(b));
        if let Some(b) = bias
            && b.shape != [m]
        {
            return rule_error(&T0210, format!("bias {} for {m} columns", b.display_on(self.mesh)));
        }
        if let Some(b) = bias
            && b.dtype != result
        {
            let b = b.display_on(self.mesh);
            return rule_error(&T0210, format!("bias {b} for a matmul with a {result} result"));
        }
        let scaled = self.op.keyed_operand("x_scale").is_some();
        let plain = bias.is_none() && self.op.str_attr("act").is_none() && !scaled;
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(s), R) if s.dim == 0 => Some(S(s)),
            (R, S(s)) if s.dim == 0 => Some(S(Shard { dim: 1, ..s })),
            (S(a), S(b)) if a == b && a.dim == 1 && plain => self.partial_layout(a),
            _ => None,
        })?;
        // A bias or scale vector must be sharded like the rows of its operand.
        for (vector, rows) in [("bias", 1), ("x_scale", 0), ("w_scale", 1)] {
            let Some(v) = self.op.keyed_operand(vector).map(|v| self.program.type_of(v)) else { continue };
            for axis in self.mesh.active_axes() {
                let want = match self.operands[rows].layout.on_axis(axis) {
                    S(s) if s.dim == 0 => S(s),
                    _ => R,
                };
                if v.layout.on_axis(axis) != want {
                    let beside = if rows == 0 { "rows" } else { "weight" };
                    return rule_error(
                        &T0214,
                        format!(
                            "{vector} {} does not match {beside} {}",
                            v.display_on(self.mesh),
                            self.display_operand(rows)
                        ),
                    );
                }
            }
        }
        Ok(Type { dtype: result, shape: vec![n, m], layout })
    }

    /// Returns the result dtype of a matmul. In e4m3 a matmul needs a scale per row of both
    /// operands; in other dtypes it takes none.
    fn matmul_dtype(&self, rows: [u64; 2]) -> RuleResult<DType> {
        let scales =
            ["x_scale", "w_scale"].map(|k| self.op.keyed_operand(k).map(|v| self.program.type_of(v)));
        let dtype = self.operands[0].dtype;
        match scales {
            [None, None] if dtype != DType::E4m3 => Ok(dtype),
            [Some(x), Some(w)] if dtype == DType::E4m3 => {
                for (scale, n) in [x, w].into_iter().zip(rows) {
                    if scale.dtype != DType::F32 || scale.shape != [n] {
                        let message =
                            format!("scales {} for {n} rows: expected f32[{n}]", scale.display_on(self.mesh));
                        return rule_error(&T0210, message);
                    }
                }
                Ok(DType::Bf16)
            }
            _ if dtype == DType::E4m3 => {
                rule_error(&T0210, "a matmul in e4m3 needs both x_scale and w_scale")
            }
            _ => rule_error(
                &T0210,
                format!("operands in {dtype} cannot have scales: only a matmul in e4m3 takes them"),
            ),
        }
    }

    /// Checks the declared type of a weight that is loaded as one of the results of `quantize`.
    pub(super) fn check_load(&self, declared: &Type) -> RuleResult<()> {
        let (dtype, dims) = match self.op.str_attr("load") {
            Some("e4m3") => (DType::E4m3, 2),
            Some("e4m3.scale") => (DType::F32, 1),
            _ => return Ok(()),
        };
        if declared.dtype == dtype && declared.shape.len() == dims {
            return Ok(());
        }
        let load = self.op.str_attr("load").unwrap_or_default();
        let message = format!(
            "load = \"{load}\" has type {dtype} with {dims} dims, not {}",
            declared.display_on(self.mesh)
        );
        rule_error(&T0210, message)
    }

    pub(super) fn quantize_types(&self) -> RuleResult<Vec<Type>> {
        use AxisLayout::{Replicated as R, Shard as S};
        let [n, _] = self.matrix_shape(0)?;
        if self.operands[0].dtype != DType::Bf16 {
            return rule_error(
                &T0210,
                format!("quantize needs rows in bf16, not {}", self.display_operand(0)),
            );
        }
        if let Some(axis) = self.axis_that_shards(&self.operands[0].layout, 1) {
            let message = format!("the maximum of a row over dim 1, which is sharded over {axis}");
            return rule_error(&T0213, message);
        }
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match l[0] {
            R => Some(R),
            S(s) if s.dim == 0 => Some(S(s)),
            _ => None,
        })?;
        let rows = Type { dtype: DType::E4m3, ..self.operands[0].clone() };
        Ok(vec![rows, Type { dtype: DType::F32, shape: vec![n], layout }])
    }

    /// Returns the partial layout of a sum over the dim of shard `s`. `None` if a fixed tree
    /// (`segments`) meets uneven shards, because the tree needs equal shards.
    pub(super) fn partial_layout(&self, s: Shard) -> Option<AxisLayout> {
        use tessera_mesh::Reduction::{Sum, Tree};
        match (has_segments(self.op), s.uneven) {
            (false, _) => Some(AxisLayout::Partial { reduction: Sum, subgroup_size: s.subgroup_size }),
            (true, None) => Some(AxisLayout::Partial { reduction: Tree, subgroup_size: s.subgroup_size }),
            (true, Some(_)) => None,
        }
    }

    pub(super) fn bias_act_type(&self) -> RuleResult<Type> {
        let [n, m] = self.matrix_shape(0)?;
        self.check_act()?;
        if self.operands[1].shape != [m] {
            return rule_error(&T0210, format!("bias {} for {m} columns", self.display_operand(1)));
        }
        self.check_same_dtype(0, 1)?;
        use AxisLayout::{Replicated as R, Shard as S};
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(s), R) if s.dim == 0 => Some(S(s)),
            (S(s), S(b)) if s.dim == 1 && b == (Shard { dim: 0, ..s }) => Some(S(s)),
            _ => None,
        })?;
        Ok(self.type_like_first([n, m], layout))
    }

    /// Infers the type of an op that reduces each row of operand 0; the operands in `vectors` must
    /// be replicated.
    pub(super) fn row_norm_type(&self, vectors: &[usize], dim: usize) -> RuleResult<Type> {
        let [_, d] = self.matrix_shape(0)?;
        self.check_eps()?;
        self.segment_count(d)?;
        if let Some(axis) = self.axis_that_shards(&self.operands[0].layout, dim) {
            return rule_error(
                &T0213,
                format!("{} over dim {dim}, which is sharded over {axis}", self.op.opcode.name()),
            );
        }
        for v in vectors {
            if self.operands[*v].shape != [d] || !self.operands[*v].layout.is_replicated() {
                return rule_error(
                    &T0210,
                    format!("vector {} does not match rows of length {d}", self.display_operand(*v)),
                );
            }
            self.check_vector_dtype(*v, 0)?;
        }
        Ok(self.operands[0].clone())
    }

    /// Infers the type of a row op that also reads per-frame columns of operand `m`.
    pub(super) fn modulated_type(&self, x: usize, m: usize, columns: &[&str]) -> RuleResult<Type> {
        let ([_, d], [_, width]) = (self.matrix_shape(x)?, self.matrix_shape(m)?);
        let frame_rows = self.positive_attr("frame_rows")?;
        for column in columns {
            let Some(col) = self.op.int_attr(column).and_then(|c| u64::try_from(c).ok()) else {
                return rule_error(
                    &T0215,
                    format!("`{column}` must be a column block of {}", self.display_operand(m)),
                );
            };
            if !width.is_multiple_of(d) || col >= width / d {
                return rule_error(
                    &T0210,
                    format!("column block {col} of {} for rows of length {d}", self.display_operand(m)),
                );
            }
        }
        let rows = self.operands[x].layout.global_shape(&self.operands[x].shape, self.mesh)[0];
        let first = self.first_row()?;
        if first.saturating_add(rows) > frame_rows.saturating_mul(self.operands[m].shape[0]) {
            let from = if first > 0 { format!(" from row {first}") } else { String::new() };
            return rule_error(
                &T0210,
                format!(
                    "{rows} rows{from} with {frame_rows} rows per frame exceed the frames of {}",
                    self.display_operand(m)
                ),
            );
        }
        self.check_vector_dtype(m, x)?;
        if !self.operands[m].layout.is_replicated() {
            return rule_error(
                &T0214,
                format!("per-frame columns must be replicated, but are {}", self.display_operand(m)),
            );
        }
        if let Some(axis) = self.axis_that_shards(&self.operands[x].layout, 1) {
            return rule_error(
                &T0213,
                format!("{} over dim 1, which is sharded over {axis}", self.op.opcode.name()),
            );
        }
        Ok(self.operands[x].clone())
    }

    /// Checks that a vector or column operand has the dtype of its rows, or f32. Vectors are small,
    /// so they may stay f32 when the rows have a lower precision.
    fn check_vector_dtype(&self, vector: usize, rows: usize) -> RuleResult<()> {
        let (vector_dtype, rows_of) = (self.operands[vector].dtype, self.operands[rows].dtype);
        if vector_dtype == rows_of || vector_dtype == DType::F32 {
            return Ok(());
        }
        let message = format!(
            "{} with rows {}: expected f32 or {rows_of}",
            self.display_operand(vector),
            self.display_operand(rows)
        );
        rule_error(&T0210, message)
    }

    pub(super) fn norm_modulate_type(&self) -> RuleResult<Type> {
        self.check_eps()?;
        self.modulated_type(0, 1, &["scale", "shift"])
    }

    pub(super) fn gate_residual_type(&self) -> RuleResult<Type> {
        let t = self.same_type(0, 1)?;
        let given = |name: &str| self.op.attrs.contains_key(name);
        match (self.operands.len() == 3, given("gate"), given("first_row")) {
            (true, ..) => self.modulated_type(0, 2, &["gate"]),
            (false, false, false) => Ok(t),
            (false, true, _) => rule_error(&T0203, "`gate` needs the operand with the gate columns"),
            (false, _, true) => rule_error(&T0203, "`first` needs the operand with the gate columns"),
        }
    }

    pub(super) fn modulation_type(&self) -> RuleResult<Type> {
        let [f, width] = self.matrix_shape(1)?;
        self.check_same_dtype(0, 1)?;
        match self.operands[0].shape[..] {
            [1, c, d] if width == c.saturating_mul(d) || width == d => {
                let layout = self.combine_layouts(&self.operand_layouts(), |l| {
                    (l[0] == AxisLayout::Replicated && l[1] == AxisLayout::Replicated)
                        .then_some(AxisLayout::Replicated)
                })?;
                Ok(Type { dtype: self.operands[1].dtype, shape: vec![f, c * d], layout })
            }
            _ => rule_error(
                &T0210,
                format!(
                    "table {} does not match embedding {}",
                    self.display_operand(0),
                    self.display_operand(1)
                ),
            ),
        }
    }

    pub(super) fn row_square_sum_type(&self) -> RuleResult<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let [n, d] = self.matrix_shape(0)?;
        if self.operands.len() == 2 && self.operands[0] != self.operands[1] {
            return rule_error(
                &T0210,
                format!("{} and {} differ", self.display_operand(0), self.display_operand(1)),
            );
        }
        self.segment_count(d)?;
        let layout = self.combine_layouts(&self.operand_layouts()[..1], |l| match l[0] {
            R => Some(R),
            S(s) if s.dim == 0 => Some(S(s)),
            S(s) => self.partial_layout(s),
            Partial { .. } => None,
        })?;
        Ok(Type { dtype: DType::F32, shape: vec![n, self.operands.len() as u64], layout })
    }

    pub(super) fn rms_scale_type(&self) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [n2, cols]) = (self.matrix_shape(0)?, self.matrix_shape(1)?);
        let col = self.op.int_attr("col").unwrap_or(-1);
        self.check_eps()?;
        let (width, global_width) = (
            self.positive_attr("width")?,
            self.operands[0].layout.global_shape(&self.operands[0].shape, self.mesh)[1],
        );
        if width != global_width {
            return rule_error(
                &T0215,
                format!("`width` is {width}, but the global rows have length {global_width}"),
            );
        }
        if n != n2 || u64::try_from(col).map_or(true, |c| c >= cols) || self.operands[2].shape != [d] {
            return rule_error(
                &T0210,
                format!(
                    "{} with sums {} column {col} and weight {}",
                    self.display_operand(0),
                    self.display_operand(1),
                    self.display_operand(2)
                ),
            );
        }
        if self.operands[1].dtype != DType::F32 {
            return rule_error(
                &T0210,
                format!("sums of squares must be f32, but are {}", self.display_operand(1)),
            );
        }
        self.check_vector_dtype(2, 0)?;
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(s), S(t), R) if s == t && s.dim == 0 => Some(S(s)),
            (S(s), R, S(w)) if s.dim == 1 && w == (Shard { dim: 0, ..s }) => Some(S(s)),
            _ => None,
        })?;
        Ok(self.type_like_first([n, d], layout))
    }

    pub(super) fn rope_type(&self) -> RuleResult<Type> {
        let [_, d] = self.matrix_shape(0)?;
        let hd = self.positive_attr("head_dim")?;
        let grid = self.extents_attr("grid", 3)?;
        if !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
            return rule_error(&T0210, format!("heads of {hd} over {}", self.display_operand(0)));
        }
        if self.op.attrs.contains_key("frame_stride") && self.op.int_attr("frame_stride").is_none() {
            return rule_error(&T0215, "`frame_stride` must be an integer");
        }
        let rows: u64 = self.operands[0].layout.global_shape(&self.operands[0].shape, self.mesh)[0];
        let tokens = multiply_extents(&grid)?;
        let first = self.first_row()?;
        let fits = match self.op.attrs.contains_key("first_row") {
            true => first.saturating_add(rows) <= tokens,
            false => rows == tokens,
        };
        if !fits && self.op.int_attr("frame_stride") != Some(0) {
            let from = if first > 0 { format!(" from row {first}") } else { String::new() };
            return rule_error(
                &T0210,
                format!("grid {grid:?} has {tokens} tokens, but the value has {rows} rows{from}"),
            );
        }
        Ok(self.operands[0].clone())
    }

    pub(super) fn attention_type(&self) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [r, dk], [rv, dv]) =
            (self.matrix_shape(0)?, self.matrix_shape(1)?, self.matrix_shape(2)?);
        let hd = self.positive_attr("head_dim")?;
        if d != dk || d != dv || r != rv || !d.is_multiple_of(hd) {
            return rule_error(
                &T0210,
                format!(
                    "q {} k {} v {} with heads of {hd}",
                    self.display_operand(0),
                    self.display_operand(1),
                    self.display_operand(2)
                ),
            );
        }
        self.check_same_dtype(0, 1)?;
        self.check_same_dtype(0, 2)?;
        if let Some(b) =
            self.op.keyed_operand("bias").map(|b| self.program.type_of(b)).filter(|b| b.dtype != DType::F32)
        {
            return rule_error(
                &T0210,
                format!("the bias of attention scores must be f32, but is {}", b.display_on(self.mesh)),
            );
        }
        match (self.op.keyed_operand("bias").is_some(), self.op.ints_attr("bias_rows")) {
            (false, None) if !self.op.attrs.contains_key("bias_rows") => {}
            (true, Some(&[from, to]))
                if 0 <= from && from <= to && u64::try_from(to).is_ok_and(|to| to <= r) => {}
            (true, _) => {
                return rule_error(&T0215, format!("`bias_rows` must be [from, to] within the {r} keys"));
            }
            (false, _) => return rule_error(&T0203, "`bias_rows` without a bias"),
        }
        for i in [1, 2] {
            if let Some(axis) = self.axis_that_shards(&self.operands[i].layout, 0) {
                return rule_error(&T0213, format!("softmax over keys, which are sharded over {axis}"));
            }
        }
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(q), R, R) if q.dim == 0 => Some(S(q)),
            (S(q), S(k), S(v)) if q == k && k == v && q.dim == 1 => Some(S(q)),
            _ => None,
        })?;
        Ok(self.type_like_first([n, d], layout))
    }

    pub(super) fn cast_type(&self) -> RuleResult<Type> {
        const TO: [DType; 4] = [DType::F32, DType::F64, DType::Bf16, DType::F16];
        let from = self.operands[0].dtype;
        let to = self.op.str_attr("to").and_then(DType::parse).filter(|to| TO.contains(to));
        match to {
            // e4m3 numbers are meaningless without their scale.
            _ if !TO.contains(&from) => {
                rule_error(&T0210, format!("cannot cast {}", self.display_operand(0)))
            }
            None => rule_error(
                &T0215,
                format!("`to` must be {}", tessera_base::format_choices(&TO.map(DType::name))),
            ),
            Some(to) if to == from => {
                rule_error(&T0215, format!("{} already has the dtype of the cast", self.display_operand(0)))
            }
            Some(to) => Ok(Type { dtype: to, ..self.operands[0].clone() }),
        }
    }

    /// Returns an attribute that is a list of `n` integers ≥ 1.
    pub(super) fn extents_attr(&self, name: &str, n: usize) -> RuleResult<Vec<u64>> {
        let v: Vec<u64> =
            self.op.ints_attr(name).unwrap_or(&[]).iter().filter_map(|i| u64::try_from(*i).ok()).collect();
        if v.len() == n && self.op.ints_attr(name).is_some_and(|i| i.len() == n) && !v.contains(&0) {
            Ok(v)
        } else {
            rule_error(&T0215, format!("`{name}` must be {n} integers ≥ 1"))
        }
    }

    /// Returns the extents of the pixel block of one token: frames, rows and columns.
    pub(super) fn pixel_block(&self) -> RuleResult<[u64; 3]> {
        let (s, p) = (self.extents_attr("stride", 3)?, self.extents_attr("patch", 2)?);
        let block = [s[0], multiply_extents(&[s[1], p[0]])?, multiply_extents(&[s[2], p[1]])?];
        multiply_extents(&block)?;
        Ok(block)
    }

    pub(super) fn space_time_to_depth_type(&self) -> RuleResult<Type> {
        let [bt, bh, bw] = self.pixel_block()?;
        self.check_replicated(0)?;
        match self.operands[0].shape[..] {
            [t, h, w, c] if t.is_multiple_of(bt) && h.is_multiple_of(bh) && w.is_multiple_of(bw) => {
                let tokens = multiply_extents(&[t / bt, h / bh, w / bw])?;
                Ok(Type::new(self.operands[0].dtype, [tokens, multiply_extents(&[bt, bh, bw, c])?]))
            }
            _ => rule_error(
                &T0210,
                format!("{} cannot be split into blocks of {bt}×{bh}×{bw}", self.display_operand(0)),
            ),
        }
    }

    pub(super) fn depth_to_space_time_type(&self) -> RuleResult<Type> {
        let [bt, bh, bw] = self.pixel_block()?;
        let [n, p] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        let (grid, block) = (self.extents_attr("grid", 3)?, multiply_extents(&[bt, bh, bw])?);
        if multiply_extents(&grid)? != n || !p.is_multiple_of(block) {
            return rule_error(
                &T0210,
                format!(
                    "{} does not match a grid of {grid:?} with blocks of {bt}×{bh}×{bw}",
                    self.display_operand(0)
                ),
            );
        }
        let shape = [
            multiply_extents(&[grid[0], bt])?,
            multiply_extents(&[grid[1], bh])?,
            multiply_extents(&[grid[2], bw])?,
            p / block,
        ];
        Ok(Type::new(self.operands[0].dtype, shape))
    }
}
