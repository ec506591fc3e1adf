//! Rules of the ops that compute on one rank only.

use tessera_mesh::{AxisLayout, Shard};

use super::{RuleContext, RuleResult, multiply_extents, rule_error};
use crate::codes::{T0203, T0210, T0213, T0214, T0215};
use crate::{DType, RoundingMode, Type, WeightLoad, views};

impl RuleContext<'_> {
    pub(super) fn matmul_type(&self, v: &views::Matmul) -> RuleResult<Type> {
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
        let result = self.matmul_dtype(v, [n, m])?;
        self.check_segments(v.segments, k)?;
        let bias = v.bias.map(|b| self.program.type_of(b));
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
        // The scales of e4m3 multiply every term of a sum alike.
        let plain = bias.is_none() && v.act.is_none();
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1]) {
            (R, R) => Some(R),
            (S(s), R) if s.dim == 0 => Some(S(s)),
            (R, S(s)) if s.dim == 0 => Some(S(Shard { dim: 1, ..s })),
            (S(a), S(b)) if a == b && a.dim == 1 && plain => self.partial_layout(a),
            _ => None,
        })?;
        // A bias or scale vector must be sharded like the rows of its operand.
        for (vector, operand, rows) in
            [("bias", v.bias, 1), ("x_scale", v.x_scale, 0), ("w_scale", v.w_scale, 1)]
        {
            let Some(v) = operand.map(|v| self.program.type_of(v)) else { continue };
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
    fn matmul_dtype(&self, v: &views::Matmul, rows: [u64; 2]) -> RuleResult<DType> {
        let scales = [v.x_scale, v.w_scale].map(|scale| scale.map(|v| self.program.type_of(v)));
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
    pub(super) fn check_load(&self, load: Option<WeightLoad>, declared: &Type) -> RuleResult<()> {
        let (load, dtype, dims) = match load {
            Some(load @ (WeightLoad::E4m3 | WeightLoad::ConvE4m3)) => (load, DType::E4m3, 2),
            Some(load @ (WeightLoad::E4m3Scale | WeightLoad::ConvE4m3Scale)) => (load, DType::F32, 1),
            Some(WeightLoad::Patch | WeightLoad::Conv | WeightLoad::ConvPast) | None => return Ok(()),
        };
        if declared.dtype == dtype && declared.shape.len() == dims {
            return Ok(());
        }
        let message = format!(
            "load = \"{}\" has type {dtype} with {dims} dims, not {}",
            load.name(),
            declared.display_on(self.mesh)
        );
        rule_error(&T0210, message)
    }

    pub(super) fn quantize_types(&self, v: &views::Quantize) -> RuleResult<Vec<Type>> {
        use AxisLayout::{Replicated as R, Shard as S};
        let [n, _] = self.matrix_shape(0)?;
        check_rounding((v.rounding, v.seed), (v.draw, v.first_row), DType::E4m3)?;
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
        match (self.op.states_attr("segments"), s.uneven) {
            (false, _) => Some(AxisLayout::Partial { reduction: Sum, subgroup_size: s.subgroup_size }),
            (true, None) => Some(AxisLayout::Partial { reduction: Tree, subgroup_size: s.subgroup_size }),
            (true, Some(_)) => None,
        }
    }

    pub(super) fn bias_act_type(&self) -> RuleResult<Type> {
        let [n, m] = self.matrix_shape(0)?;
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
    pub(super) fn row_norm_type(&self, vectors: &[usize], segments: u64) -> RuleResult<Type> {
        let [_, d] = self.row_extents(0)?;
        let last = self.operands[0].shape.len() - 1;
        self.check_segments(segments, d)?;
        if let Some(axis) = self.axis_that_shards(&self.operands[0].layout, last) {
            return rule_error(
                &T0213,
                format!("{} over dim {last}, which is sharded over {axis}", self.op.opcode.name()),
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

    /// Infers the type of a row op that also reads per-frame columns of operand `m`. `first` is the
    /// index of the operand's first row in the whole value.
    fn modulated_type(&self, m: usize, columns: &[u64], frame_rows: u64, first: u64) -> RuleResult<Type> {
        let x = 0;
        let ([_, d], [_, width]) = (self.matrix_shape(x)?, self.matrix_shape(m)?);
        if let Some(col) = columns.iter().find(|col| !width.is_multiple_of(d) || **col >= width / d) {
            return rule_error(
                &T0210,
                format!("column block {col} of {} for rows of length {d}", self.display_operand(m)),
            );
        }
        let rows = self.operands[x].layout.global_shape(&self.operands[x].shape, self.mesh)[0];
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
    pub(super) fn check_vector_dtype(&self, vector: usize, rows: usize) -> RuleResult<()> {
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

    pub(super) fn norm_modulate_type(&self, v: &views::NormModulate) -> RuleResult<Type> {
        self.modulated_type(1, &[v.scale, v.shift], v.frame_rows, v.first_row)
    }

    pub(super) fn gate_residual_type(&self, v: &views::GateResidual) -> RuleResult<Type> {
        let t = self.same_type(0, 1)?;
        match (v.m, v.gate, v.frame_rows) {
            (Some(_), Some(gate), Some(frame_rows)) => {
                self.modulated_type(2, &[gate], frame_rows, v.first_row)
            }
            (Some(_), None, _) => rule_error(&T0215, "attribute `gate` is missing"),
            (Some(_), _, None) => rule_error(&T0215, "attribute `frame_rows` is missing"),
            (None, Some(_), _) => rule_error(&T0203, "`gate` needs the operand with the gate columns"),
            (None, None, _) if self.op.states_attr("first_row") => {
                rule_error(&T0203, "`first_row` needs the operand with the gate columns")
            }
            (None, None, _) => Ok(t),
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

    pub(super) fn row_square_sum_type(&self, v: &views::RowSquareSum) -> RuleResult<Type> {
        use AxisLayout::{Partial, Replicated as R, Shard as S};
        let [n, d] = self.matrix_shape(0)?;
        if self.operands.len() == 2 && self.operands[0] != self.operands[1] {
            return rule_error(
                &T0210,
                format!("{} and {} differ", self.display_operand(0), self.display_operand(1)),
            );
        }
        self.check_segments(v.segments, d)?;
        let layout = self.combine_layouts(&self.operand_layouts()[..1], |l| match l[0] {
            R => Some(R),
            S(s) if s.dim == 0 => Some(S(s)),
            S(s) => self.partial_layout(s),
            Partial { .. } => None,
        })?;
        Ok(Type { dtype: DType::F32, shape: vec![n, self.operands.len() as u64], layout })
    }

    pub(super) fn rms_scale_type(&self, v: &views::RmsScale) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([n, d], [n2, cols]) = (self.matrix_shape(0)?, self.matrix_shape(1)?);
        let (col, width) = (v.col, v.width);
        let global_width = self.operands[0].layout.global_shape(&self.operands[0].shape, self.mesh)[1];
        if width != global_width {
            return rule_error(
                &T0215,
                format!("`width` is {width}, but the global rows have length {global_width}"),
            );
        }
        if n != n2 || col >= cols || self.operands[2].shape != [d] {
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

    pub(super) fn rope_type(&self, v: &views::Rope) -> RuleResult<Type> {
        let [_, d] = self.matrix_shape(0)?;
        let (hd, grid) = (v.head_dim, v.grid);
        if !hd.is_multiple_of(2) || !d.is_multiple_of(hd) {
            return rule_error(&T0210, format!("heads of {hd} over {}", self.display_operand(0)));
        }
        let rows: u64 = self.operands[0].layout.global_shape(&self.operands[0].shape, self.mesh)[0];
        let tokens = multiply_extents(&grid)?;
        let first = v.first_row;
        let fits = match self.op.states_attr("first_row") {
            true => first.saturating_add(rows) <= tokens,
            false => rows == tokens,
        };
        if !fits && v.frame_stride != 0 {
            let from = if first > 0 { format!(" from row {first}") } else { String::new() };
            return rule_error(
                &T0210,
                format!("grid {grid:?} has {tokens} tokens, but the value has {rows} rows{from}"),
            );
        }
        Ok(self.operands[0].clone())
    }

    pub(super) fn attention_type(&self, v: &views::Attention) -> RuleResult<Type> {
        use AxisLayout::{Replicated as R, Shard as S};
        let ([_, d], [r, dk], [rv, dv]) = (self.row_extents(0)?, self.row_extents(1)?, self.row_extents(2)?);
        let (hd, last) = (v.head_dim, self.operands[0].shape.len() - 1);
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
        if let Some(b) = v.bias.map(|b| self.program.type_of(b)).filter(|b| b.dtype != DType::F32) {
            return rule_error(
                &T0210,
                format!("the bias of attention scores must be f32, but is {}", b.display_on(self.mesh)),
            );
        }
        match (v.bias, &v.bias_rows) {
            (None, None) => {}
            (Some(_), Some(rows)) if rows.end <= r => {}
            (Some(_), _) => {
                return rule_error(&T0215, format!("`bias_rows` must be [from, to] within the {r} keys"));
            }
            (None, Some(_)) => return rule_error(&T0203, "`bias_rows` without a bias"),
        }
        for i in [1, 2] {
            let mut rows = 0..self.operands[i].shape.len() - 1;
            if let Some(axis) = rows.find_map(|dim| self.axis_that_shards(&self.operands[i].layout, dim)) {
                return rule_error(&T0213, format!("softmax over keys, which are sharded over {axis}"));
            }
        }
        let layout = self.combine_layouts(&self.operand_layouts(), |l| match (l[0], l[1], l[2]) {
            (R, R, R) => Some(R),
            (S(q), R, R) if q.dim < last => Some(S(q)),
            (S(q), S(k), S(v)) if q == k && k == v && q.dim == last => Some(S(q)),
            _ => None,
        })?;
        Ok(self.type_like_first(self.operands[0].shape.clone(), layout))
    }

    pub(super) fn cast_type(&self, v: &views::Cast) -> RuleResult<Type> {
        let (from, to) = (self.operands[0].dtype, v.to);
        check_rounding((v.rounding, v.seed), (v.draw, v.first_row), to)?;
        // Values in e4m3 may have a scale, which the op that reads them applies.
        if !matches!(from, DType::F32 | DType::F64 | DType::Bf16 | DType::F16) {
            return rule_error(&T0210, format!("cannot cast {}", self.display_operand(0)));
        }
        if to == from {
            return rule_error(
                &T0215,
                format!("{} already has the dtype of the cast", self.display_operand(0)),
            );
        }
        Ok(Type { dtype: to, ..self.operands[0].clone() })
    }

    pub(super) fn space_time_to_depth_type(&self, v: &views::SpaceTimeToDepth) -> RuleResult<Type> {
        let [bt, bh, bw] = pixel_block(v.stride, v.patch)?;
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

    pub(super) fn depth_to_space_time_type(&self, v: &views::DepthToSpaceTime) -> RuleResult<Type> {
        let [bt, bh, bw] = pixel_block(v.stride, v.patch)?;
        let [n, p] = self.matrix_shape(0)?;
        self.check_replicated(0)?;
        let (grid, block) = (v.grid, multiply_extents(&[bt, bh, bw])?);
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

/// Checks the attributes of a rounding to a dtype: `mode` with the seed, and the draw with the first row.
fn check_rounding(
    (mode, seed): (RoundingMode, Option<u64>),
    (draw, first_row): (u64, u64),
    to: DType,
) -> RuleResult<()> {
    let refuse = |message: String| rule_error(&T0215, message);
    match (mode, seed) {
        (RoundingMode::Stochastic, None) => refuse("stochastic rounding without a `seed`".to_string()),
        (RoundingMode::Stochastic, Some(_)) if !matches!(to, DType::Bf16 | DType::E4m3) => {
            refuse(format!("stochastic rounding to {to}: only bf16 and e4m3 are rounded so"))
        }
        (RoundingMode::Stochastic, Some(_)) if u32::try_from(draw).is_err() => {
            refuse(format!("`draw` is {draw}, beyond 32 bits"))
        }
        (RoundingMode::Stochastic, Some(_)) => Ok(()),
        (RoundingMode::Nearest, _) if seed.is_some() || draw != 0 || first_row != 0 => {
            refuse("`seed`, `draw` or `first_row` of a rounding to nearest, which draws nothing".to_string())
        }
        (RoundingMode::Nearest, _) => Ok(()),
    }
}

/// Returns the extents of the pixel block of one token: frames, rows and columns.
fn pixel_block(stride: [u64; 3], patch: [u64; 2]) -> RuleResult<[u64; 3]> {
    let block =
        [stride[0], multiply_extents(&[stride[1], patch[0]])?, multiply_extents(&[stride[2], patch[1]])?];
    multiply_extents(&block)?;
    Ok(block)
}
