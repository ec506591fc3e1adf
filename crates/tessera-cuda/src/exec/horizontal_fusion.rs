//! Horizontal fusion: one launch computes several ops of one kind whose weights are contiguous. The
//! results lie in scratch memory.
//!
//! The query, key and value matmuls of one operand become one GEMM. Its output rows hold all three
//! results side by side, and the row kernels that read them take the row pitch as an argument. One
//! GEMM leaves fewer tiles in its last wave than three. The three stay separate where an all-to-all
//! of one of them overlaps the next matmul, because the overlap saves more. The sm90 GEMM kernel
//! stores the columns that only go to a cache directly into the cache.
//!
//! The modulation tables of all blocks are contiguous, and one launch adds the embedding to all of
//! them: a launch per block would take longer than its work, all the more when several ranks share
//! a block.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{DType, Op, Opcode, Program, ValueId};

use super::enqueue::{activation_code, gemm_shape};
use super::kernel_fusion::writes_matrix_rows;
use super::{ALIGNMENT, CudaBackend, ValueLocation, cuda_error};
use crate::driver::{CudaResult, CudaStream};
use crate::gemm_cublaslt::{self, GemmShape, RedirectedColumns};

/// Ops that one launch computes, in program order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum FusedGroup {
    Qkv {
        matmuls: Arc<[usize]>,
        /// The cache write that is fused as well: the only reader of one of the matmuls.
        cache_write: Option<usize>,
    },
    Modulations(Arc<[usize]>),
}

impl FusedGroup {
    /// Returns the ops that the launch computes, without the fused cache write.
    pub(super) fn fused_ops(&self) -> &[usize] {
        match self {
            FusedGroup::Qkv { matmuls: made, .. } | FusedGroup::Modulations(made) => made,
        }
    }

    pub(super) fn all_ops(&self) -> Vec<usize> {
        let write = match self {
            FusedGroup::Qkv { cache_write: write, .. } => *write,
            FusedGroup::Modulations(_) => None,
        };
        self.fused_ops().iter().copied().chain(write).collect()
    }

    /// Returns whether the results of this group overwrite the scratch memory of `other`.
    pub(super) fn reuses_scratch_of(&self, other: &FusedGroup) -> bool {
        matches!((self, other), (FusedGroup::Qkv { .. }, FusedGroup::Qkv { .. }))
    }
}

/// Names of the weight operands that each matmul has in addition to its weight.
const EXTRA_WEIGHT_OPERANDS: [&str; 2] = ["bias", "w_scale"];

/// Returns the groups that the program allows to fuse, regardless of memory and kernels.
pub(super) fn find_fusable_groups(p: &Program) -> Vec<FusedGroup> {
    let (readers, defs) = (p.value_readers(), p.defining_ops());
    let qkv_groups = qkv_candidates(p, &readers).into_iter().map(|made| {
        let write = fusable_cache_write(p, &readers, &defs, &made);
        FusedGroup::Qkv { matmuls: Arc::new(made), cache_write: write }
    });
    qkv_groups
        .chain(modulation_candidates(p).into_iter().map(|ops| FusedGroup::Modulations(ops.into())))
        .collect()
}

/// Groups modulation ops that share an embedding and have tables of one type.
fn modulation_candidates(p: &Program) -> Vec<Vec<usize>> {
    let mut groups: Vec<Vec<usize>> = Vec::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::Modulation) {
        let can_share_launch = |other: &Op| {
            op.operands[1] == other.operands[1] && p.type_of(op.operands[0]) == p.type_of(other.operands[0])
        };
        match groups.iter_mut().find(|ops| can_share_launch(&p.ops[ops[0]])) {
            Some(ops) => ops.push(i),
            None => groups.push(vec![i]),
        }
    }
    let is_aligned = |i: usize| {
        let op = &p.ops[i];
        is_on_main_stream(op)
            && op.after.is_empty()
            && [op.operands[0], op.results[0]]
                .iter()
                .all(|v| p.type_of(*v).byte_size().0.is_multiple_of(ALIGNMENT))
    };
    groups.retain(|ops| ops.len() > 1 && ops.iter().all(|i| is_aligned(*i)));
    groups
}

/// Returns the triples of matmuls with a common operand that one GEMM may compute.
fn qkv_candidates(p: &Program, readers: &[Vec<usize>]) -> Vec<[usize; 3]> {
    let mut by_operand: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::Matmul) {
        by_operand.entry(op.operands[0]).or_default().push(i);
    }
    let exact_triples = by_operand.into_values().filter_map(|ops| <[usize; 3]>::try_from(ops).ok());
    let mut found: Vec<[usize; 3]> = exact_triples.filter(|t| can_fuse(p, readers, *t)).collect();
    found.sort_unstable();
    found
}

fn can_fuse(p: &Program, readers: &[Vec<usize>], triple: [usize; 3]) -> bool {
    let [first, ..] = triple.map(|i| &p.ops[i]);
    let shape = gemm_shape(p, first);
    triple.iter().all(|i| {
        let op = &p.ops[*i];
        let same_gemm = gemm_shape(p, op) == shape
            && is_on_main_stream(op)
            && op.keyed_operand("x_scale") == first.keyed_operand("x_scale")
            && EXTRA_WEIGHT_OPERANDS
                .iter()
                .all(|k| op.keyed_operand(k).is_some() == first.keyed_operand(k).is_some());
        // The next weight starts right behind this one, so the size must keep the alignment.
        let is_aligned =
            weight_operands(op).into_iter().all(|v| p.type_of(v).byte_size().0.is_multiple_of(ALIGNMENT));
        same_gemm
            && is_aligned
            && activation_code(op) == 0
            && op.after.is_empty()
            && shape.dtype != DType::F32
            && read_by_row_kernels(p, readers, op)
    })
}

/// Returns a cache write that is the sole reader of one of the matmuls and whose buffer no other op
/// touches between the matmuls and the write.
fn fusable_cache_write(
    p: &Program,
    readers: &[Vec<usize>],
    defs: &[Option<usize>],
    made: &[usize],
) -> Option<usize> {
    made.iter().find_map(|i| {
        let result = p.ops[*i].results[0];
        let [w] = readers[result.0 as usize][..] else { return None };
        let (write, from) = (&p.ops[w], p.type_of(result));
        let buffer = write.buffer.filter(|_| writes_matrix_rows(p, w))?;
        let touches = |op: &Op| {
            let lies_there = |v: ValueId| defs[v.0 as usize].is_some_and(|d| p.ops[d].buffer == Some(buffer));
            op.buffer == Some(buffer) || op.used_values().into_iter().any(lies_there)
        };
        let buffer_untouched = !p.ops[made[0]..w].iter().any(touches);
        // Other ops may be fused into a step that runs later than their position in the program.
        let is_unfused_op =
            |op: &Op| matches!(op.opcode, Opcode::CacheRead | Opcode::CacheWrite | Opcode::Attention);
        let in_order =
            p.ops.iter().filter(|op| touches(op)).all(|op| is_on_main_stream(op) && is_unfused_op(op));
        // The row index must be a call scalar or absent, because the fused launch runs before the
        // write's position.
        let row_is_known = write
            .keyed_operand("row")
            .is_none_or(|v| defs[v.0 as usize].is_some_and(|d| p.ops[d].opcode == Opcode::Call));
        (buffer_untouched && in_order && row_is_known && p.buffer(buffer).ty.dtype == from.dtype).then_some(w)
    })
}

/// Returns whether the op runs on the program's first stream, where program order is execution
/// order.
fn is_on_main_stream(op: &Op) -> bool {
    op.stream.0 == 0
}

/// Returns whether all readers of a matmul's result are row kernels on the same stream.
fn read_by_row_kernels(p: &Program, readers: &[Vec<usize>], op: &Op) -> bool {
    let result = op.results[0];
    readers[result.0 as usize].iter().all(|j| {
        let reader = &p.ops[*j];
        let rows = match reader.opcode {
            Opcode::RmsNorm | Opcode::Rope => true,
            Opcode::CacheWrite => writes_matrix_rows(p, *j),
            _ => false,
        };
        rows && reader.stream == op.stream && reader.operands[0] == result && reader.after.is_empty()
    })
}

/// Returns the weight operands of an op: a modulation table, or the weight, bias and scale of a
/// matmul.
fn weight_operands(op: &Op) -> Vec<ValueId> {
    match op.opcode {
        Opcode::Modulation => vec![op.operands[0]],
        _ => [op.operands[1]]
            .into_iter()
            .chain(EXTRA_WEIGHT_OPERANDS.iter().filter_map(|k| op.keyed_operand(k)))
            .collect(),
    }
}

/// Returns the shape of the GEMM that computes all the matmuls.
fn fused_gemm_shape(p: &Program, ops: &[usize]) -> GemmShape {
    let one = gemm_shape(p, &p.ops[ops[0]]);
    GemmShape { out_columns: ops.len() as u64 * one.out_columns, ..one }
}

/// Assigns scratch memory to the results of fused groups, from the offset `begin` on. Returns the
/// location of each result (byte offset and row pitch in elements) and the end of the scratch
/// memory in use.
pub(super) fn assign_scratch<'a>(
    p: &Program,
    all: impl Iterator<Item = &'a FusedGroup> + Clone,
    begin: u64,
) -> (Vec<(ValueId, ValueLocation)>, u64) {
    let (mut out, mut end) = (Vec::new(), begin);
    let result = |i: &usize| p.ops[*i].results[0];
    let bytes =
        |j: &FusedGroup| j.fused_ops().iter().map(|i| p.type_of(result(i)).byte_size().0).sum::<u64>();
    for tables in all.clone().filter(|j| matches!(j, FusedGroup::Modulations(_))) {
        for i in tables.fused_ops() {
            let ty = p.type_of(result(i));
            out.push((result(i), ValueLocation::Scratch(end, ty.shape[1])));
            end += ty.byte_size().0;
        }
    }
    // All QKV groups reuse one region, one after another.
    let (gemm_base, mut max_bytes) = (end, 0);
    for group in all.filter(|j| matches!(j, FusedGroup::Qkv { .. })) {
        let pitch = group.fused_ops().iter().map(|i| p.type_of(result(i)).shape[1]).sum();
        let mut column = gemm_base;
        for i in group.fused_ops() {
            let ty = p.type_of(result(i));
            out.push((result(i), ValueLocation::Scratch(column, pitch)));
            column += ty.shape[1] * ty.dtype.element_bytes();
        }
        max_bytes = max_bytes.max(bytes(group));
    }
    (out, gemm_base + max_bytes)
}

impl CudaBackend {
    /// Fuses the candidate groups whose weights are contiguous and for which a GEMM kernel exists.
    /// A cache write is fused only if that kernel can store columns to a second destination.
    pub(super) fn fuse_horizontally(
        &mut self,
        p: &Program,
        source: &mut dyn WeightSource,
    ) -> Result<Vec<FusedGroup>, Diagnostic> {
        let mut out = Vec::new();
        for one in find_fusable_groups(p) {
            if !self.load_contiguous_weights(p, one.fused_ops(), source)? {
                continue;
            }
            match one {
                FusedGroup::Qkv { matmuls: made, cache_write: write } => {
                    let shape = fused_gemm_shape(p, &made);
                    let each = shape.out_columns / made.len() as u64;
                    if self.prepare_fused_gemm(p, &made, shape, if write.is_some() { each } else { 0 })? {
                        let write = write.filter(|_| self.gemms.can_redirect(shape, each));
                        out.push(FusedGroup::Qkv { matmuls: made, cache_write: write });
                    }
                }
                FusedGroup::Modulations(_) => out.push(one),
            }
        }
        Ok(out)
    }

    fn load_contiguous_weights(
        &mut self,
        p: &Program,
        ops: &[usize],
        source: &mut dyn WeightSource,
    ) -> Result<bool, Diagnostic> {
        let defs = p.defining_ops();
        let mut all = true;
        for k in 0..weight_operands(&p.ops[ops[0]]).len() {
            let made = ops.iter().map(|i| defs[weight_operands(&p.ops[*i])[k].0 as usize].map(|d| &p.ops[d]));
            let made: Option<Vec<&Op>> = made.collect();
            let weights = made.filter(|m| m.iter().all(|w| w.opcode == Opcode::Weight));
            all &= match weights {
                Some(weights) => self.weights.load_contiguous(&self.placement, p, &weights, source)?,
                None => false,
            };
        }
        Ok(all)
    }

    /// Prepares a GEMM for the fused matmuls, of which `apart` columns may go to a second
    /// destination. Returns whether one kernel can compute the whole group.
    fn prepare_fused_gemm(
        &mut self,
        p: &Program,
        made: &[usize],
        shape: GemmShape,
        split_columns: u64,
    ) -> Result<bool, Diagnostic> {
        let ty = p.type_of(p.ops[made[0]].results[0]);
        let rows = self.kernels.prepare_rows(ty.shape[1], ty.dtype);
        rows.map_err(|e| cuda_error(&format!("@{}", p.name), &e))?;
        let chosen = self.gemms.plan_with_redirect(shape, split_columns, &mut self.kernels.compiler);
        Ok(chosen.is_ok() && self.gemms.executed_shape(shape) == shape)
    }

    pub(super) fn launch_fused_group(
        &mut self,
        program: usize,
        one: &FusedGroup,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let p = Arc::clone(&self.programs[program].program);
        let first = &p.ops[one.fused_ops()[0]];
        let out = self.value_address(program, first.results[0])?;
        match one {
            FusedGroup::Qkv { matmuls: made, cache_write: write } => {
                let shape = fused_gemm_shape(&p, made);
                let away = write.map(|w| self.cache_write_columns(program, made, w)).transpose()?;
                let at = gemm_cublaslt::GemmOperands {
                    x: self.value_address(program, first.operands[0])?,
                    w: self.value_address(program, first.operands[1])?,
                    bias: self.keyed_address(program, first, "bias")?,
                    residual: 0,
                    out,
                    scales: (
                        self.keyed_address(program, first, "x_scale")?,
                        self.keyed_address(program, first, "w_scale")?,
                    ),
                    redirected: away,
                };
                self.gemms.run_gemm(shape, at, stream)
            }
            FusedGroup::Modulations(ops) => self.launch_modulation(program, first, ops.len() as u64, stream),
        }
    }

    /// Returns the range of GEMM columns that the cache write stores, and their destination.
    fn cache_write_columns(
        &self,
        program: usize,
        made: &[usize],
        write: usize,
    ) -> CudaResult<RedirectedColumns> {
        let p = &self.programs[program].program;
        let op = &p.ops[write];
        let wide = |i: &usize| p.type_of(p.ops[*i].results[0]).shape[1];
        let before = made.iter().take_while(|i| p.ops[**i].results[0] != op.operands[0]);
        let first: u64 = before.map(wide).sum();
        let columns = (first, first + p.type_of(op.operands[0]).shape[1]);
        Ok(RedirectedColumns {
            columns,
            address: self.write_address(program, op)?,
            row_address: self.keyed_address(program, op, "row")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernel_fusion::{LaunchStep, plan_launch_steps};
    use super::*;
    use tessera_ir::{Slots, parse_all};

    fn program(text: &str) -> Program {
        parse_all(text, "test").expect("a program").remove(0)
    }

    /// A matmul of an operand with its own weight.
    fn matmul_text(x: &str, name: &str) -> String {
        format!(
            "%w{name} = weight \"w{name}\" : bf16[128, 128] %b{name} = weight \"b{name}\" : bf16[128] \
             %{name} = toperator.matmul %{x}, %w{name}, bias=%b{name} : bf16[16, 128] "
        )
    }

    fn norm_text(name: &str) -> String {
        format!("%{name}n = toperator.rms_norm %{name}, %n {{eps = 1e-6}} : bf16[16, 128] ")
    }

    fn value_names(p: &Program, joined: &[usize]) -> Vec<String> {
        joined.iter().map(|i| p.value(p.ops[*i].results[0]).name.clone()).collect()
    }

    #[test]
    fn three_matmuls_of_one_operand_fuse_if_row_kernels_read_them() {
        let found = |reads_v: &str| -> Vec<Vec<String>> {
            let text = format!(
                "program @p {{ buffer @c : bf16[32, 128] buffer @d : bf16[32, 128] %x = input : bf16[16, 128] \
                 %n = weight \"n\" : f32[128] %row = call \"row\" : i64 {}{}{}{} \
                 cache.write @c, %k, row=%row {reads_v} output \"q\", %qn }}",
                matmul_text("x", "v"),
                matmul_text("x", "q"),
                matmul_text("x", "k"),
                norm_text("q"),
            );
            let p = program(&text);
            qkv_candidates(&p, &p.value_readers()).iter().map(|t| value_names(&p, t)).collect()
        };
        assert_eq!(found("cache.write @d, %v, row=%row"), [["v", "q", "k"]]);
        assert!(found("%s = toperator.silu %v : bf16[16, 128] output \"s\", %s").is_empty());
    }

    #[test]
    fn a_cache_write_fuses_unless_another_op_accesses_the_cache_in_between() {
        let found = |between: &str, row: &str| -> Option<String> {
            let three = ["v", "q", "k"].map(|n| matmul_text("x", n)).concat();
            let text = format!(
                "program @p {{ buffer @c : bf16[32, 128] buffer @d : bf16[32, 128] %x = input : bf16[16, 128] \
                 %n = weight \"n\" : f32[128] %row = call \"row\" : i64 %old = cache.read @d : bf16[32, 128] \
                 {three}{}{}{between} cache.write @c, %kn, row=%row cache.write @d, %v, {row} output \"q\", %qn }}",
                norm_text("q"),
                norm_text("k"),
            );
            let p = program(&text);
            let [FusedGroup::Qkv { cache_write: write, .. }] = find_fusable_groups(&p)[..] else {
                panic!("no QKV group")
            };
            write.map(|w| p.value(p.ops[w].operands[0]).name.clone())
        };
        assert_eq!(found("", "row=%row"), Some("v".to_string()));
        let reads = "%s = toperator.silu %old : bf16[32, 128] output \"s\", %s";
        assert_eq!(found(reads, "row=%row"), None);
        assert_eq!(found("cache.write @d, %qn, row=%row", "row=%row"), None);
    }

    #[test]
    fn a_cache_write_is_in_its_fused_group_or_a_separate_step() {
        // Number of fused groups, and whether the write is a separate step.
        let found = |before: &str, after: &str| -> (usize, bool) {
            let three = |x: &str, names: [&str; 3]| names.map(|n| matmul_text(x, n)).concat();
            let text = format!(
                "program @p {{ buffer @d : bf16[32, 128] %x = input : bf16[16, 128] %y = input : bf16[16, 128] \
                 %n = weight \"n\" : f32[128] %row = call \"row\" : i64 {}{}{before}{}{}\
                 cache.write @d, %b, row=%row {after} output \"a\", %an }}",
                three("x", ["q", "k", "v"]),
                ["k", "v"].map(norm_text).concat(),
                three("y", ["a", "b", "c"]),
                ["a", "c"].map(norm_text).concat(),
            );
            let p = program(&text);
            let n = p.values.len();
            let slots =
                Slots { slot_bytes: vec![1 << 20; n], value_slots: (0..n as u32).map(Some).collect() };
            let all = plan_launch_steps(&p, &slots, &find_fusable_groups(&p));
            let mut ops: Vec<usize> = all.iter().flat_map(LaunchStep::all_ops).collect();
            let (launched, write) = (ops.len(), p.ops.iter().position(|o| o.opcode == Opcode::CacheWrite));
            ops.sort_unstable();
            ops.dedup();
            assert_eq!(ops.len(), launched, "an op in two steps");
            let apart = all.iter().any(|s| Some(s) == write.map(LaunchStep::Single).as_ref());
            (all.iter().filter(|s| matches!(s, LaunchStep::Fused(_))).count(), apart)
        };
        assert_eq!(found(&norm_text("q"), ""), (2, false));
        assert_eq!(found("", &norm_text("q")), (1, true));
    }

    #[test]
    fn qkv_rows_are_read_before_the_next_group_overwrites_them() {
        let joined_of = |before: &str, after: &str| -> usize {
            let three = |x: &str, names: [&str; 3]| names.map(|n| matmul_text(x, n)).concat();
            let text = format!(
                "program @p {{ %x = input : bf16[16, 128] %y = input : bf16[16, 128] %n = weight \"n\" : f32[128] \
                 {}{}{before}{}{after}{} output \"a\", %an }}",
                three("x", ["q", "k", "v"]),
                ["k", "v"].map(norm_text).concat(),
                three("y", ["a", "b", "c"]),
                ["a", "b", "c"].map(norm_text).concat(),
            );
            let p = program(&text);
            let n = p.values.len();
            let slots =
                Slots { slot_bytes: vec![1 << 20; n], value_slots: (0..n as u32).map(Some).collect() };
            let all = plan_launch_steps(&p, &slots, &find_fusable_groups(&p));
            all.iter().filter(|s| matches!(s, LaunchStep::Fused(_))).count()
        };
        assert_eq!(joined_of(&norm_text("q"), ""), 2);
        assert_eq!(joined_of("", &norm_text("q")), 1);
    }

    #[test]
    fn modulations_of_one_embedding_fuse() {
        let text = "program @p { %e = input : f32[2, 384] %f = input : f32[2, 64] %w = input : f32[2, 384] \
            %a = weight \"a\" : f32[1, 6, 64] %b = weight \"b\" : f32[1, 6, 64] %c = weight \"c\" : f32[1, 2, 64] \
            %x = toperator.modulation %a, %e : f32[2, 384] %y = toperator.modulation %b, %e : f32[2, 384] \
            %z = toperator.modulation %c, %f : f32[2, 128] %o = toperator.modulation %b, %w : f32[2, 384] \
            output \"x\", %x output \"y\", %y output \"z\", %z output \"o\", %o }";
        let p = program(text);
        let found: Vec<Vec<String>> =
            modulation_candidates(&p).iter().map(|ops| value_names(&p, ops)).collect();
        assert_eq!(found, [["x", "y"]]);
    }
}
