//! The kernel of each compute op, and its run on the values of a program. A kernel computes in f32; its result is
//! rounded to the dtype of its type.

mod expert_features;
mod experts;
mod language;
mod rounding;

use tessera_base::random::DrawKey;
use tessera_device::{CallData, Fault, MeshRank};
use tessera_ir::{CommAxis, ComputeOp, Program, Type, ValueId, views};
use tessera_mesh::AxisLayout;

use super::data_movement::{
    TableRows, add_modulation, compact_padding, pad_zeros, take_range, take_rows_by_id,
};
use super::expert_tiers::ExpertTiers;
use super::memory::{MemoryView, ValueLocation, WeightData};
use super::{CpuBackend, PreparedProgram};
use crate::Pool;
use crate::kernels::{
    ConvSpec, DistanceBias, FrameIndexing, GroupWeights, KeyBias, MatmulScales, MatmulWeight, PatchGrid,
    PixelGeometry, RopeCache, RopeSpec, Scratch, add, attention, bias_act, bmm, channels_to_frames,
    compute_row_scales, conv3d, depth_to_space_time, divide_rows_by_scales, gate_residual, guide, layer_norm,
    map_elements, matmul, multiply, norm_modulate, patchify, relative_attention, relu, renoise, rms_norm,
    rms_scale, rope, rotate_heads, round_to_dtype, row_square_sum, scale_matmul, scale_shift, silu,
    soft_clamp, softmax, space_time_to_depth, time_embed, to_x0, unpatchify, upsample_nearest, widen_to_f32,
};

impl CpuBackend {
    /// Computes the result of op number `at` into its slot.
    pub(super) fn run_compute(
        &mut self,
        prepared: &PreparedProgram,
        at: usize,
        call: &CallData<'_>,
    ) -> Result<(), Fault> {
        let op = &prepared.program.ops[at];
        let Some(kernel) = &prepared.kernels[at] else {
            return Err(Fault::Failed(format!("{} has no kernel", op.opcode.name())));
        };
        // Memory lends one place for writing, so an op with two results computes each by itself.
        for (nth_result, result) in op.results.iter().enumerate() {
            let ValueLocation::Slot(place) = prepared.locations[result.0 as usize] else {
                return Err(Fault::Failed(format!("the result of {} has no slot", op.opcode.name())));
            };
            let (memory, out) = self.memory.split_at_place(place);
            let inputs = KernelInputs {
                program: &prepared.program,
                locations: &prepared.locations,
                memory,
                call,
                placement: self.placement,
            };
            let out_ty = prepared.program.type_of(*result);
            let mut run = KernelRun {
                inputs,
                pool: &self.pool,
                scratch: &mut self.scratch,
                tables: &mut self.rope_cache,
                tiers: &mut self.tiers,
                out,
                out_ty,
                nth_result,
            };
            (kernel.0)(&mut run)?;
            round_to_dtype(&self.pool, run.out, out_ty.dtype);
        }
        Ok(())
    }
}

/// The values that kernels read, and the place of this rank in the mesh.
struct KernelInputs<'a> {
    program: &'a Program,
    locations: &'a [ValueLocation],
    memory: MemoryView<'a>,
    call: &'a CallData<'a>,
    placement: MeshRank,
}

impl<'a> KernelInputs<'a> {
    fn values(&self, v: ValueId) -> Result<&'a [f32], Fault> {
        self.memory.view_value(self.location(v), self.call)
    }

    fn scalar(&self, v: ValueId) -> Result<f32, Fault> {
        Ok(self.values(v)?[0])
    }

    fn int(&self, v: ValueId) -> Result<i64, Fault> {
        self.location(v).integer_scalar(self.call)
    }

    fn weight(&self, v: ValueId) -> Result<MatmulWeight<'a>, Fault> {
        Ok(match self.location(v) {
            ValueLocation::Weight(w) => match &self.memory.weights[*w] {
                WeightData::Packed(p) => match p.as_slice() {
                    [matrix] => MatmulWeight::Packed(matrix),
                    _ => return Err(Fault::Failed("the matrices of groups are used in one matmul".into())),
                },
                _ => MatmulWeight::Plain(self.values(v)?),
            },
            _ => MatmulWeight::Plain(self.values(v)?),
        })
    }

    /// Returns the matrices of a grouped matmul.
    fn group_weights(&self, v: ValueId) -> Result<GroupWeights<'a>, Fault> {
        Ok(match self.location(v) {
            ValueLocation::Weight(w) if let WeightData::Packed(p) = &self.memory.weights[*w] => {
                GroupWeights::Packed(p)
            }
            _ => GroupWeights::Plain(self.values(v)?),
        })
    }

    /// Returns which of the weights with tiers the matrices of a grouped matmul are.
    fn tiered_weight(&self, v: ValueId) -> Option<usize> {
        match self.location(v) {
            ValueLocation::Weight(w) if let WeightData::Tiered(bank) = &self.memory.weights[*w] => {
                Some(*bank)
            }
            _ => None,
        }
    }

    fn type_of(&self, v: ValueId) -> &'a Type {
        self.program.type_of(v)
    }

    fn shape(&self, v: ValueId) -> &'a [u64] {
        &self.type_of(v).shape
    }

    /// Returns the extent of the last dim.
    fn width(&self, v: ValueId) -> usize {
        self.shape(v).last().copied().unwrap_or(1) as usize
    }

    /// Returns the global index of this shard's first row.
    fn global_row(&self, v: ValueId) -> usize {
        let ty = self.type_of(v);
        ty.layout.global_ranges(&ty.shape, &self.placement.mesh, self.placement.coord())[0].0 as usize
    }

    /// Returns the global index of this shard's first column, and the number of all columns.
    fn global_columns(&self, v: ValueId) -> (usize, usize) {
        let (ty, mesh) = (self.type_of(v), &self.placement.mesh);
        let ranges = ty.layout.global_ranges(&ty.shape, mesh, self.placement.coord());
        let all = ty.layout.global_shape(&ty.shape, mesh);
        (ranges.last().map_or(0, |r| r.0 as usize), all.last().map_or(1, |n| *n as usize))
    }

    fn location(&self, v: ValueId) -> &'a ValueLocation {
        &self.locations[v.0 as usize]
    }
}

/// One run of a kernel.
struct KernelRun<'a> {
    inputs: KernelInputs<'a>,
    pool: &'a Pool,
    scratch: &'a mut Scratch,
    tables: &'a mut RopeCache,
    tiers: &'a mut ExpertTiers,
    out: &'a mut [f32],
    out_ty: &'a Type,
    /// Which result of the op `out` is.
    nth_result: usize,
}

/// A kernel with the operands and attributes of one op.
pub(super) struct Kernel(KernelFn);

type KernelFn = Box<dyn Fn(&mut KernelRun<'_>) -> Result<(), Fault> + Send + Sync>;

impl std::fmt::Debug for Kernel {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Kernel")
    }
}

/// Returns the kernel of an op.
///
/// # Errors
/// What the op does, if no kernel here does it.
pub(super) fn find_kernel(op: ComputeOp<'_>) -> Result<Kernel, &'static str> {
    use ComputeOp as C;
    Ok(match op {
        C::Matmul(v) => bind_op(v, |r, v| r.run_matmul(v)),
        C::BiasAct(v) => {
            bind_values(v, [v.x, v.bias], |r, v, [x, bias]| bias_act(r.pool, r.out, x, bias, v.act))
        }
        C::Add(v) => bind_values(v, [v.x, v.y], |r, _, [x, y]| add(r.pool, r.out, x, y)),
        C::Mul(v) => bind_values(v, [v.x, v.y], |r, _, [x, y]| multiply(r.pool, r.out, x, y)),
        C::Silu(v) => bind_values(v, [v.x], |r, _, [x]| map_elements(r.pool, r.out, x, silu)),
        C::Relu(v) => bind_values(v, [v.x], |r, _, [x]| map_elements(r.pool, r.out, x, relu)),
        // The result of every kernel is rounded to its dtype.
        C::Cast(v) => bind_values(v, [v.x], |r, v, [x]| {
            r.out.copy_from_slice(x);
            r.round_stochastically(v.x, v.stochastic_rounding());
        }),
        C::Quantize(v) => bind_values(v, [v.x], |r, v, [x]| {
            let width = r.inputs.width(v.x);
            match r.nth_result {
                0 => {
                    divide_rows_by_scales(r.pool, r.out, x, width);
                    r.round_stochastically(v.x, v.stochastic_rounding());
                }
                _ => compute_row_scales(r.pool, r.out, x, width),
            }
        }),
        C::LayerNorm(v) => bind_values(v, [v.x, v.w, v.b], |r, v, [x, w, b]| {
            layer_norm(r.pool, r.out, x, w, b, v.eps as f32);
        }),
        C::Modulation(v) => bind_values(v, [v.table, v.embedding], |r, v, [table, embedding]| {
            add_modulation(r.out, table, embedding, r.inputs.width(v.embedding));
        }),
        C::NormModulate(v) => bind_values(v, [v.x, v.m], |r, v, x| r.run_norm_modulate(v, x)),
        C::GateResidual(v) => bind_op(v, |r, v| r.run_gate_residual(v)),
        C::RmsNorm(v) => bind_values(v, [v.x, v.w], |r, v, [x, w]| {
            rms_norm(r.pool, r.out, x, w, v.segments as usize, v.eps as f32);
        }),
        C::RowSquareSum(v) => bind_op(v, |r, v| r.run_row_square_sum(v)),
        C::RmsScale(v) => bind_values(v, [v.x, v.square_sums, v.w], |r, v, [x, sums, w]| {
            let column = (v.col as usize, r.inputs.width(v.square_sums));
            rms_scale(r.pool, r.out, x, sums, column, w, v.width as usize, v.eps as f32);
        }),
        C::Rope(v) => bind_op(v, |r, v| r.run_rope(v)),
        C::Attention(v) => bind_op(v, |r, v| r.run_attention(v)),
        C::RelativeAttention(v) => bind_op(v, |r, v| r.run_relative_attention(v)),
        C::Rotary(v) => bind_values(v, [v.x, v.frequencies, v.start], |r, v, [x, frequencies, start]| {
            let widths = (r.inputs.width(v.x), v.head_dim as usize);
            rotate_heads(r.pool, r.out, x, widths, (frequencies, v.scale as f32, v.interleaved), start);
        }),
        C::HeadNorm(v) => {
            // A head is a row as wide as the weights.
            bind_values(v, [v.x, v.w], |r, v, [x, w]| rms_norm(r.pool, r.out, x, w, 1, v.eps as f32))
        }
        C::HeadColumns(v) => bind_values(v, [v.x], |r, v, x| r.run_head_columns(v, x)),
        C::HeadJoin(v) => bind_values(v, [v.x, v.y], |r, v, x| r.run_head_join(v, x)),
        C::HeadMatmul(v) => bind_values(v, [v.x, v.w], |r, v, x| r.run_head_matmul(v, x)),
        C::PagedAttention(v) => bind_op(v, |r, v| r.run_paged_attention(v)),
        C::Sample(v) => bind_op(v, |r, v| r.run_sample(v)),
        C::Softmax(v) => bind_values(v, [v.x], |r, v, [x]| softmax(r.pool, r.out, x, r.inputs.width(v.x))),
        C::Bmm(v) => bind_values(v, [v.x, v.y], |r, v, x| r.run_bmm(v, x)),
        C::TopKExperts(v) => bind_op(v, |r, v| r.run_top_k_experts(v)),
        C::ExpertWeights(v) => bind_op(v, |r, v| r.run_expert_weights(v)),
        C::ExpertTokens(v) => bind_values(v, [v.x], |r, _, [x]| {
            let (tokens, padding) = r.out.split_at_mut(x.len());
            tokens.copy_from_slice(x);
            padding.fill(0.0);
        }),
        C::ExpertGates(v) => bind_op(v, |r, v| r.run_expert_gates(v)),
        C::ExpertLocality(v) => bind_op(v, |r, v| r.run_expert_locality(v)),
        C::ExpertDistance(v) => bind_op(v, |r, v| r.run_expert_distance(v)),
        C::ExpertDistanceGradient(v) => bind_op(v, |r, v| r.run_expert_distance_gradient(v)),
        C::ExpertPlaces(v) => bind_op(v, |r, v| r.run_expert_places(v)),
        C::ExpertDraw(v) => bind_op(v, |r, v| r.run_expert_draw(v)),
        C::ExpertReroute(v) => bind_op(v, |r, v| r.run_expert_reroute(v)),
        C::ExpertSlots(v) => bind_op(v, |r, v| r.run_expert_slots(v)),
        C::ExpertCounts(v) => bind_op(v, |r, v| r.run_expert_counts(v)),
        C::ExpertStatistics(v) => bind_op(v, |r, v| r.run_expert_statistics(v)),
        C::ExpertPack(v) => bind_op(v, |r, v| r.run_expert_pack(v)),
        C::ExpertPackFused(v) => bind_op(v, |r, v| r.run_expert_pack_fused(v)),
        C::GroupedMatmul(v) => bind_op(v, |r, v| r.run_grouped_matmul(v)),
        C::ExpertCombine(v) => bind_op(v, |r, v| r.run_expert_combine(v)),
        C::MoeRoute(_) => return Err("MoE routing as one op"),
        C::TimeEmbed(v) => bind_values(v, [v.timesteps], |r, _, [timesteps]| time_embed(r.out, timesteps)),
        C::Renoise(v) => bind_op(v, |r, v| r.run_renoise(v)),
        C::ToX0(v) => bind_values(v, [v.x, v.flow, v.sigma], |r, _, [x, flow, sigma]| {
            to_x0(r.pool, r.out, x, flow, f64::from(sigma[0]));
        }),
        C::Guide(v) => bind_values(v, [v.x, v.y], |r, v, [x, y]| guide(r.pool, r.out, x, y, v.scale)),
        C::SpaceTimeToDepth(v) => bind_values(v, [v.x], |r, v, [x]| {
            space_time_to_depth(r.out, x, pixel_geometry(v.stride, r.inputs.shape(v.x)));
        }),
        C::DepthToSpaceTime(v) => bind_values(v, [v.x], |r, v, [x]| {
            depth_to_space_time(r.out, x, pixel_geometry(v.stride, &r.out_ty.shape));
        }),
        C::Conv3d(v) => bind_op(v, |r, v| r.run_conv3d(v)),
        C::UpsampleNearest(v) => bind_values(v, [v.x], |r, v, [x]| {
            let frame = [r.inputs.shape(v.x)[2] as usize, r.inputs.width(v.x)];
            upsample_nearest(r.out, x, frame, v.scale.map(|n| n as usize));
        }),
        C::ChannelsToFrames(v) => bind_values(v, [v.x], |r, v, [x]| {
            let cells = r.inputs.shape(v.x)[1..3].iter().product::<u64>() as usize;
            channels_to_frames(r.out, x, cells, v.parts as usize, r.inputs.width(v.x) / v.parts as usize);
        }),
        C::Patchify(v) => bind_values(v, [v.x], |r, v, [x]| {
            patchify(r.out, x, patch_grid(v.patch, r.inputs.shape(v.x)));
        }),
        C::Unpatchify(v) => bind_values(v, [v.x], |r, v, [x]| {
            unpatchify(r.out, x, patch_grid(v.patch, &r.out_ty.shape));
        }),
        C::ScaleShift(v) => bind_values(v, [v.x, v.scale, v.shift], |r, v, [x, scale, shift]| {
            scale_shift(r.out, x, scale, shift, v.inverse);
        }),
        C::Clamp(v) => bind_values(v, [v.x], |r, v, [x]| {
            let limit = v.limit as f32;
            map_elements(r.pool, r.out, x, |x| x.clamp(-limit, limit));
        }),
        C::SoftClamp(v) => bind_values(v, [v.x], |r, v, [x]| {
            map_elements(r.pool, r.out, x, |x| soft_clamp(x, v.limit as f32));
        }),
        C::Embed(v) => bind_op(v, |r, v| r.run_embed(v)),
        C::TakeRows(v) => bind_values(v, [v.x], |r, v, x| r.run_take_rows(v, x)),
        C::TakeShard(v) => bind_values(v, [v.x], |r, v, x| r.run_take_shard(v, x)),
        C::Pad(v) => bind_values(v, [v.x], |r, v, [x]| r.run_pad(v, x)),
        C::Compact(v) => bind_values(v, [v.x], |r, v, [x]| r.run_compact(v, x)),
    })
}

/// Returns the number of elements in a block of the dims from `dim` on.
fn elements_behind(shape: &[u64], dim: usize) -> usize {
    shape.iter().skip(dim).product::<u64>() as usize
}

/// Returns a kernel that reads the elements of some operands.
fn bind_values<V: Clone + Send + Sync + 'static, const N: usize>(
    view: &V,
    operands: [ValueId; N],
    run: fn(&mut KernelRun<'_>, &V, [&[f32]; N]),
) -> Kernel {
    let view = view.clone();
    Kernel(Box::new(move |r| {
        let mut values: [&[f32]; N] = [&[]; N];
        for (values, operand) in values.iter_mut().zip(operands) {
            *values = r.inputs.values(operand)?;
        }
        run(r, &view, values);
        Ok(())
    }))
}

/// Returns a kernel that reads its operands itself, because some are optional, packed or integers.
fn bind_op<V: Clone + Send + Sync + 'static>(
    view: &V,
    run: fn(&mut KernelRun<'_>, &V) -> Result<(), Fault>,
) -> Kernel {
    let view = view.clone();
    Kernel(Box::new(move |r| run(r, &view)))
}

impl KernelRun<'_> {
    fn run_matmul(&mut self, v: &views::Matmul) -> Result<(), Fault> {
        let x = &self.inputs;
        let extents = (x.shape(v.x)[0] as usize, x.shape(v.w)[0] as usize, x.width(v.x));
        let (w, bias) = (x.weight(v.w)?, v.bias.map(|b| x.values(b)).transpose()?);
        let (rows, segments) = (x.values(v.x)?, v.segments as usize);
        let [row_scales, columns] = [v.x_scale, v.w_scale].map(|s| s.map(|s| x.values(s)).transpose());
        let scales = MatmulScales { rows: row_scales?, columns: columns?, bias, act: v.act };
        if scales.rows.is_none() && scales.columns.is_none() {
            matmul(self.pool, self.scratch, self.out, rows, w, extents, bias, v.act, segments);
        } else {
            matmul(self.pool, self.scratch, self.out, rows, w, extents, None, None, segments);
            scale_matmul(self.pool, self.out, extents.1, scales);
        }
        Ok(())
    }

    fn run_conv3d(&mut self, v: &views::Conv3d) -> Result<(), Fault> {
        let x = &self.inputs;
        let shape = x.shape(v.x);
        let extents = |n: [u64; 3]| n.map(|n| n as usize);
        let spec = ConvSpec {
            history: v.history.map(|h| x.values(h)).transpose()?.unwrap_or_default(),
            halo: v.halo.map(|h| x.values(h)).transpose()?,
            pad_frames: v.pad_frames as usize,
            frame: extents([shape[1], shape[2], shape[3]]),
            kernel: extents(v.kernel),
            stride: extents(v.stride.unwrap_or([1; 3])),
            pad_before: v.pad_before as usize,
        };
        let out = &self.out_ty.shape;
        let (w, bias) = (x.weight(v.w)?, v.bias.map(|b| x.values(b)).transpose()?);
        let extents = extents([out[1], out[2], out[3]]);
        let columns = v.w_scale.map(|s| x.values(s)).transpose()?;
        let added = if columns.is_some() { None } else { bias };
        conv3d(self.pool, self.scratch, self.out, x.values(v.x)?, w, added, extents, &spec);
        if columns.is_some() {
            let scales = MatmulScales { rows: None, columns, bias, act: None };
            scale_matmul(self.pool, self.out, extents[2], scales);
        }
        Ok(())
    }

    fn run_pad(&mut self, v: &views::Pad, x: &[f32]) {
        let block = |shape: &[u64]| elements_behind(shape, v.dim);
        pad_zeros(self.out, x, (block(self.inputs.shape(v.x)), block(&self.out_ty.shape)));
    }

    fn run_compact(&mut self, v: &views::Compact, x: &[f32]) {
        let extents = [v.extent as usize, v.parts as usize, v.unit as usize];
        let width = elements_behind(self.inputs.shape(v.x), v.dim as usize + 1);
        compact_padding(self.out, x, width, extents);
    }

    fn run_bmm(&mut self, v: &views::Bmm, [x, y]: [&[f32]; 2]) {
        let (shape, k) = (self.inputs.shape(v.x), self.inputs.width(v.x));
        let (n, m) =
            (shape[shape.len() - 2] as usize, self.out_ty.shape.last().copied().unwrap_or(1) as usize);
        bmm(self.pool, self.out, x, y, [n, k, m], v.transposed, v.scale as f32);
    }

    fn run_row_square_sum(&mut self, v: &views::RowSquareSum) -> Result<(), Fault> {
        let xs = [Some(v.x), v.y].into_iter().flatten().map(|x| self.inputs.values(x));
        let xs = xs.collect::<Result<Vec<_>, _>>()?;
        row_square_sum(self.pool, self.out, &xs, self.inputs.width(v.x), v.segments as usize);
        Ok(())
    }

    fn run_norm_modulate(&mut self, v: &views::NormModulate, [x, m]: [&[f32]; 2]) {
        let d = self.inputs.width(v.x);
        let (parts, columns) = (self.inputs.width(v.m) / d, (v.shift as usize, v.scale as usize));
        let frames = self.frame_indexing(v.x, v.first_row, v.frame_rows);
        norm_modulate(self.pool, self.out, x, d, m, parts, columns, frames, v.eps as f32);
    }

    fn run_gate_residual(&mut self, v: &views::GateResidual) -> Result<(), Fault> {
        let (x, y) = (self.inputs.values(v.x)?, self.inputs.values(v.y)?);
        let Some(gate) = v.gate() else {
            add(self.pool, self.out, x, y);
            return Ok(());
        };
        let (d, m) = (self.inputs.width(v.x), self.inputs.values(gate.columns)?);
        let parts = self.inputs.width(gate.columns) / d;
        let frames = self.frame_indexing(v.x, v.first_row, gate.frame_rows);
        gate_residual(self.pool, self.out, x, y, d, m, parts, gate.block as usize, frames);
        Ok(())
    }

    fn run_rope(&mut self, v: &views::Rope) -> Result<(), Fault> {
        let tables = self.tables.get(RopeSpec {
            head_dim: v.head_dim as usize,
            grid: v.grid.map(|n| n as usize),
            start: self.inputs.int(v.start)?,
            frame_stride: v.frame_stride,
        });
        let first = self.inputs.global_row(v.x) + v.first_row as usize;
        rope(self.pool, self.out, self.inputs.values(v.x)?, self.inputs.width(v.x), first, tables);
        Ok(())
    }

    fn run_attention(&mut self, v: &views::Attention) -> Result<(), Fault> {
        let x = &self.inputs;
        let bias = match v.key_bias() {
            Some((b, rows)) => {
                Some(KeyBias { log_b: x.scalar(b)?, rows: rows.start as usize..rows.end as usize })
            }
            None => None,
        };
        let (q, k, values) = (x.values(v.q)?, x.values(v.k)?, x.values(v.v)?);
        let widths = (x.width(v.q), v.head_dim as usize);
        attention(self.pool, self.scratch, self.out, q, k, values, widths, bias.as_ref());
        Ok(())
    }

    fn run_embed(&mut self, v: &views::Embed) -> Result<(), Fault> {
        let x = &self.inputs;
        let (ids, ty) = (x.values(v.ids)?, x.type_of(v.table));
        let all = ty.layout.global_shape(&ty.shape, &x.placement.mesh)[0];
        let rows = TableRows { first: x.global_row(v.table), all: all as usize };
        if let ValueLocation::Weight(w) = x.location(v.table)
            && let WeightData::Bf16(table) = &x.memory.weights[*w]
        {
            return take_rows_by_id(self.out, ids, table, rows, |x| widen_to_f32(*x));
        }
        take_rows_by_id(self.out, ids, x.values(v.table)?, rows, |x| *x)
    }

    fn run_relative_attention(&mut self, v: &views::RelativeAttention) -> Result<(), Fault> {
        let x = &self.inputs;
        let (width, keys, length) = (x.width(v.q), x.shape(v.k)[0] as usize, x.int(v.length)?);
        let Some(length) = usize::try_from(length).ok().filter(|n| (1..=keys).contains(n)) else {
            return Err(Fault::Failed(format!("`length` is {length}, but there are {keys} keys")));
        };
        let (q, k, values) = (x.values(v.q)?, x.values(v.k)?, x.values(v.v)?);
        let extents = (x.shape(v.q)[0] as usize, length);
        let bias = DistanceBias::new(x.values(v.table)?, x.width(v.table), v.max_distance, extents);
        // Keys beyond the length take no part, so the kernel never sees them.
        let (k, values) = (&k[..length * width], &values[..length * width]);
        let widths = (width, v.head_dim as usize);
        relative_attention(self.pool, self.scratch, self.out, [q, k, values], widths, &bias);
        Ok(())
    }

    fn run_renoise(&mut self, v: &views::Renoise) -> Result<(), Fault> {
        let x = &self.inputs;
        let key = DrawKey {
            seed: x.int(v.seed)? as u64,
            chunk: x.int(v.chunk)? as u32,
            draw: x.int(v.draw)? as u32,
        };
        let first = (x.global_row(v.x) * x.width(v.x)) as u64;
        renoise(self.pool, self.out, x.values(v.x)?, x.scalar(v.sigma)?, key, first);
        Ok(())
    }

    fn run_take_rows(&mut self, v: &views::TakeRows, [x]: [&[f32]; 1]) {
        let (row, rows) = (v.row as usize, v.rows as usize);
        take_range(self.out, x, self.inputs.shape(v.x), 0, row..row + rows);
    }

    fn run_take_shard(&mut self, v: &views::TakeShard, [x]: [&[f32]; 1]) {
        let (shape, placement) = (self.inputs.shape(v.x), &self.inputs.placement);
        // The operand may already be sharded over other axes; this op only splits it over its own
        // axis.
        let shard = match v.axis {
            CommAxis::Axis(axis) => match self.out_ty.layout.on_axis(axis) {
                AxisLayout::Shard(s) => Some((axis, s)),
                AxisLayout::Replicated | AxisLayout::Partial { .. } => None,
            },
            CommAxis::World => None,
        };
        let (dim, range) = match shard {
            Some((axis, s)) => {
                let (parts, at) = (placement.mesh.axis_size(axis), placement.coord().on_axis(axis));
                let (start, len) = s.global_range(self.out_ty.shape[s.dim], parts, at);
                (s.dim, start as usize..(start + len) as usize)
            }
            // On an axis of one rank, the shard is the whole value.
            None => (0, 0..shape[0] as usize),
        };
        take_range(self.out, x, shape, dim, range);
    }

    /// Returns the frames of the rows of `x`, which start `first_row` rows after the shard.
    fn frame_indexing(&self, x: ValueId, first_row: u64, frame_rows: u64) -> FrameIndexing {
        FrameIndexing {
            first_row: self.inputs.global_row(x) + first_row as usize,
            rows_per_frame: frame_rows as usize,
        }
    }
}

/// Returns the patches of a grid [t, h, w, c].
fn patch_grid(patch: [u64; 2], grid: &[u64]) -> PatchGrid {
    PatchGrid {
        extents: [grid[1] as usize, grid[2] as usize],
        channels: grid[3] as usize,
        patch: patch.map(|n| n as usize),
    }
}

fn pixel_geometry(stride: [u64; 3], pixels: &[u64]) -> PixelGeometry {
    let stride = stride.map(|n| n as usize);
    PixelGeometry {
        frames: pixels[0] as usize / stride[0],
        height: pixels[1] as usize / stride[1],
        width: pixels[2] as usize / stride[2],
        stride,
    }
}
