//! Lowers single ops: reshards their operands as their kind needs, and adds them to the program of a
//! stage.

use tessera_ir::{BufferId, DType, Op, Opcode, Type, ValueId, views};
use tessera_mesh::{Axis, AxisLayout};

use super::{LocalValue, Lowering};
use crate::strategy::reads_self_cache;

/// Number of segments of a split contraction under the mesh-invariant policy.
const SEGMENTS: i64 = 8;

impl Lowering<'_> {
    pub(super) fn lower_matmul(&mut self, op: &Op, v: &views::Matmul, s: usize, by_heads: bool) {
        use AxisLayout::{Replicated, Shard as S};
        let w = self.local_value(v.w, s);
        let mut x = self.local_value(v.x, s);
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
        let bias = v.bias.map(|b| self.local_value(b, s));
        let scales = [("x_scale", v.x_scale), ("w_scale", v.w_scale)]
            .map(|(k, scale)| scale.map(|scale| (k, self.local_value(scale, s))));
        let segmented = self.mesh_invariant && self.weight_part(v.w) == Some("row");
        let b = &mut self.stages[s].builder;
        if segmented {
            b.set_attr("segments", if split { SEGMENTS / i64::from(self.sharding.tp) } else { SEGMENTS });
        }
        let y = if split {
            // A bias or activation inside the matmul would apply to each rank's partial sum.
            let y = b.add_op(Opcode::Matmul, &[x, w]);
            if bias.is_none() && v.act.is_none() {
                return self.set_reduced_result(op, s, y);
            }
            let mut y = self.all_reduce(y, s);
            if let Some(bias) = bias {
                let b = &mut self.stages[s].builder;
                y = b.copy_attrs(op, &["act"]).add_op(Opcode::BiasAct, &[y, bias]);
            }
            y
        } else {
            b.copy_attrs(op, &["act"]);
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
    pub(super) fn lower_quantize(&mut self, op: &Op, s: usize) {
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
        self.analysis.defs[weight.0 as usize].and_then(|d| self.program.ops[d].part_hint())
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
    pub(super) fn lower_rms_norm(&mut self, i: usize, s: usize) -> Option<usize> {
        let op = &self.program.ops[i];
        let x = self.local_value(op.operands[0], s);
        let last = self.program.type_of(op.operands[0]).shape.len() - 1;
        let sharded = matches!(self.tp_layout(x, s), AxisLayout::Shard(shard) if shard.dim == last);
        let by_heads = self.analysis.wants_heads[i];
        if !sharded {
            let w = self.local_value(op.operands[1], s);
            let segmented = self.mesh_invariant;
            let b = &mut self.stages[s].builder;
            if segmented {
                b.set_attr("segments", SEGMENTS);
            }
            let y = b.copy_attrs(op, &["eps"]).add_op(Opcode::RmsNorm, &[x, w]);
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
            b.set_attr("col", col as u64).set_attr("width", width).copy_attrs(op, &["eps"]);
            let y = b.add_op(Opcode::RmsScale, &[*x, sums, w]);
            self.set_result(op, s, y);
        }
        second
    }

    pub(super) fn lower_row_square_sum(&mut self, op: &Op, s: usize) {
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

    fn local_buffer(&mut self, op: &Op, s: usize) -> (BufferId, Type) {
        let logical = op.buffer.map(|b| self.program.buffer(b));
        let (name, ty) = logical.map_or((String::new(), None), |b| (b.name.clone(), Some(b.ty.clone())));
        let ty = ty.unwrap_or_else(|| Type::scalar(DType::F32));
        let layout = match name.starts_with("vae.") {
            _ if self.analysis.is_leader_phase => AxisLayout::Replicated,
            true => self.frame_buffer_layout(&name, &ty.shape),
            false => self.sharding.buffer_layout(&name, &ty.shape),
        };
        let local = self.with_own_experts(self.local_type(&ty, layout, s), &ty.shape, s);
        (self.stages[s].builder.declare_buffer(&name, local.clone()), local)
    }

    pub(super) fn lower_cache_write(&mut self, op: &Op, v: &views::CacheWrite, s: usize) {
        let x = self.local_value(v.x, s);
        let (buffer, ty) = self.local_buffer(op, s);
        let unit = if op.buffer.is_some_and(|b| self.program.buffer(b).name.contains('.')) {
            self.sharding.head_dim
        } else {
            1
        };
        let mut x = self.reshard(x, ty.layout.on_axis(Axis::Tp), s, unit);
        if ty.layout.on_axis(Axis::Ep) != AxisLayout::Replicated {
            let b = &mut self.stages[s].builder;
            b.set_attr("axis", Axis::Ep.name()).set_attr("dim", 0_u64);
            x = b.add_op(Opcode::TakeShard, &[x]);
        }
        let keyed = [("pages", v.pages), ("row", v.row), ("start", v.start)]
            .map(|(k, value)| value.map(|value| (k, self.local_value(value, s))));
        let b = &mut self.stages[s].builder;
        b.copy_attrs(op, &["first_row", "page_rows"]);
        for (k, value) in keyed.into_iter().flatten() {
            b.add_keyed(k, value);
        }
        b.write_buffer(buffer, x);
    }

    pub(super) fn lower_cache_read(&mut self, op: &Op, s: usize) {
        let (buffer, _) = self.local_buffer(op, s);
        let b = &mut self.stages[s].builder;
        let mut x = b.copy_attrs(op, &["row", "rows"]).read_buffer(buffer);
        // Tokens become frames on every rank, which are then sharded by rows.
        if self.analysis.is_media_phase && self.program.type_of(op.results[0]).shape.len() == 2 {
            x = self.reshard(x, AxisLayout::Replicated, s, 1);
        }
        self.set_result(op, s, x);
    }

    pub(super) fn lower_attention(&mut self, op: &Op, a: &views::Attention, s: usize) {
        let is_self_attention = reads_self_cache(self.program, self.analysis.defs[a.k.0 as usize]);
        let mut q = self.local_value(a.q, s);
        let (k, v) = (self.local_value(a.k, s), self.local_value(a.v, s));
        if is_self_attention {
            let want = self.tp_layout(k, s);
            let unit = self.sharding.head_dim;
            q = self.reshard(q, want, s, unit);
        }
        let bias = a.bias.map(|b| self.local_value(b, s));
        let b = &mut self.stages[s].builder;
        b.set_attr("head_dim", a.head_dim).copy_attrs(op, &["bias_rows"]);
        if let Some(bias) = bias {
            b.add_keyed("bias", bias);
        }
        let y = b.add_op(Opcode::Attention, &[q, k, v]);
        self.set_result(op, s, y);
    }

    /// Lowers the choice of tokens, for which every rank needs the logits of the whole vocabulary.
    pub(super) fn lower_sample(&mut self, op: &Op, s: usize) {
        let logits = self.local_value(op.operands[0], s);
        let logits = self.reshard(logits, AxisLayout::Replicated, s, 1);
        let y = self.emit_with_operands(op, &[logits], s);
        self.set_result(op, s, y);
    }

    /// Lowers an op whose operands keep their layouts. Its result may be partial.
    pub(super) fn lower_as_is(&mut self, op: &Op, s: usize) {
        let y = self.emit_as_is(op, s);
        self.set_result(op, s, y);
    }

    /// As [`Lowering::lower_as_is`], and sums a partial result over the ranks.
    pub(super) fn lower_with_sum(&mut self, op: &Op, s: usize) {
        let y = self.emit_as_is(op, s);
        match self.tp_layout(y, s) {
            AxisLayout::Partial { .. } => self.set_reduced_result(op, s, y),
            AxisLayout::Replicated | AxisLayout::Shard(_) => self.set_result(op, s, y),
        }
    }

    pub(super) fn emit_as_is(&mut self, op: &Op, s: usize) -> ValueId {
        let operands: Vec<ValueId> = op.operands.iter().map(|v| self.local_value(*v, s)).collect();
        self.emit_with_operands(op, &operands, s)
    }

    /// Emits an op with these local operands, and with the attributes and keyed operands of the logical one.
    fn emit_with_operands(&mut self, op: &Op, operands: &[ValueId], s: usize) -> ValueId {
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
        b.add_op(op.opcode, operands)
    }

    pub(super) fn lower_output(&mut self, op: &Op, s: usize) {
        let x = self.local_value(op.operands[0], s);
        let x = self.reshard(x, AxisLayout::Replicated, s, 1);
        // Ranks that return an output return the same one, so that it can be compared.
        let x = self.gather_tokens(x, s);
        self.stages[s].builder.add_output(op.name.as_deref().unwrap_or("out"), x);
    }

    /// Lowers an op that works row by row, so its rows may be sharded. Operands after the first
    /// take the first one's layout if they have the same shape; per-frame and per-column operands
    /// keep theirs.
    pub(super) fn lower_rowwise(&mut self, op: &Op, s: usize, by_heads: bool) {
        let mut operands = Vec::new();
        for v in &op.operands {
            let x = self.local_value(*v, s);
            operands.push(x);
        }
        if self.analysis.is_media_phase {
            self.align_frames(&mut operands, op, s);
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
        let y = self.emit_with_operands(op, &operands, s);
        self.finish_row_op(op, s, y, by_heads);
    }
}
