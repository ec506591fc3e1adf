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

use tessera_ir::{DType, Op, OpView, Opcode, Program, ValueId, views};

use super::launch_step::FusedGroup;
use super::writes_matrix_rows;
use crate::device_memory::ALIGNMENT;
use crate::gemm::shape::GemmShape;

/// The place of a value in scratch memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ScratchPlace {
    /// Byte offset into scratch memory.
    pub(crate) offset: u64,
    /// Distance of two rows, in elements. Rows of several values may be interleaved.
    pub(crate) row_pitch: u64,
}

/// Returns the groups that the program allows to fuse, regardless of memory and kernels.
pub(crate) fn find_fusable_groups(p: &Program) -> Vec<FusedGroup> {
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
    let mut groups: Vec<Vec<(usize, views::Modulation)>> = Vec::new();
    for (i, op) in p.ops.iter().enumerate() {
        let Ok(OpView::Modulation(v)) = op.view() else { continue };
        let can_share_launch = |other: &views::Modulation| {
            v.embedding == other.embedding && p.type_of(v.table) == p.type_of(other.table)
        };
        match groups.iter_mut().find(|ops| can_share_launch(&ops[0].1)) {
            Some(ops) => ops.push((i, v)),
            None => groups.push(vec![(i, v)]),
        }
    }
    let is_aligned = |(i, v): &(usize, views::Modulation)| {
        let op = &p.ops[*i];
        is_on_main_stream(op)
            && op.after.is_empty()
            && [v.table, op.results[0]].iter().all(|v| p.type_of(*v).byte_size().0.is_multiple_of(ALIGNMENT))
    };
    groups.retain(|ops| ops.len() > 1 && ops.iter().all(is_aligned));
    groups.into_iter().map(|ops| ops.into_iter().map(|(i, _)| i).collect()).collect()
}

/// Returns the triples of matmuls with a common operand that one GEMM may compute.
fn qkv_candidates(p: &Program, readers: &[Vec<usize>]) -> Vec<[usize; 3]> {
    let mut by_operand: BTreeMap<ValueId, Vec<(usize, views::Matmul)>> = BTreeMap::new();
    for (i, op) in p.ops.iter().enumerate() {
        if let Ok(OpView::Matmul(v)) = op.view() {
            by_operand.entry(v.x).or_default().push((i, v));
        }
    }
    let triples = by_operand.into_values().filter_map(|ops| <[_; 3]>::try_from(ops).ok());
    let fusable = triples.filter(|triple| can_fuse(p, readers, triple));
    let mut found: Vec<[usize; 3]> = fusable.map(|triple| triple.map(|(i, _)| i)).collect();
    found.sort_unstable();
    found
}

fn can_fuse(p: &Program, readers: &[Vec<usize>], triple: &[(usize, views::Matmul); 3]) -> bool {
    let first = &triple[0].1;
    let shape = GemmShape::from_matmul(p, first);
    triple.iter().all(|(i, v)| {
        let op = &p.ops[*i];
        let same_gemm = GemmShape::from_matmul(p, v) == shape
            && is_on_main_stream(op)
            && v.x_scale == first.x_scale
            && v.bias.is_some() == first.bias.is_some()
            && v.w_scale.is_some() == first.w_scale.is_some();
        // The next weight starts right behind this one, so the size must keep the alignment.
        let is_aligned = matmul_weights(v).all(|w| p.type_of(w).byte_size().0.is_multiple_of(ALIGNMENT));
        same_gemm
            && is_aligned
            && v.act.is_none()
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
        let OpView::CacheWrite(write) = write.view().ok()? else { return None };
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
        let row_is_known =
            write.row.is_none_or(|v| defs[v.0 as usize].is_some_and(|d| p.ops[d].opcode == Opcode::Call));
        (buffer_untouched && in_order && row_is_known && p.buffer(buffer).ty.dtype == from.dtype).then_some(w)
    })
}

/// Returns whether the op runs on the program's first stream, where program order is execution
/// order.
fn is_on_main_stream(op: &Op) -> bool {
    op.stream.0 == 0
}

/// Returns whether all readers of a matmul's result are row kernels, or kernels of attention with a bias by
/// distance, on the same stream: they take the row pitch as an argument.
fn read_by_row_kernels(p: &Program, readers: &[Vec<usize>], op: &Op) -> bool {
    let result = op.results[0];
    readers[result.0 as usize].iter().all(|j| {
        let reader = &p.ops[*j];
        let rows = match reader.opcode {
            Opcode::RmsNorm | Opcode::Rope => reader.operands[0] == result,
            Opcode::RelativeAttention => reader.operands[..3].contains(&result),
            Opcode::CacheWrite => reader.operands[0] == result && writes_matrix_rows(p, *j),
            _ => false,
        };
        rows && reader.stream == op.stream && reader.after.is_empty()
    })
}

/// Returns the weight operands of an op: a modulation table, or those of a matmul. Other ops are in
/// no fused group.
pub(crate) fn weight_operands(view: &OpView) -> Option<Vec<ValueId>> {
    match view {
        OpView::Modulation(v) => Some(vec![v.table]),
        OpView::Matmul(v) => Some(matmul_weights(v).collect()),
        _ => None,
    }
}

/// Returns the weight, bias and scale of a matmul.
fn matmul_weights(v: &views::Matmul) -> impl Iterator<Item = ValueId> {
    [Some(v.w), v.bias, v.w_scale].into_iter().flatten()
}

/// Returns the shape of the GEMM that computes `count` matmuls like this one.
pub(crate) fn fused_gemm_shape(p: &Program, first: &views::Matmul, count: usize) -> GemmShape {
    let one = GemmShape::from_matmul(p, first);
    GemmShape { out_columns: count as u64 * one.out_columns, ..one }
}

/// Assigns scratch memory to the results of fused groups, from the offset `begin` on. Returns the
/// place of each result and the end of the scratch memory in use.
pub(crate) fn assign_scratch<'a>(
    p: &Program,
    all: impl Iterator<Item = &'a FusedGroup> + Clone,
    begin: u64,
) -> (Vec<(ValueId, ScratchPlace)>, u64) {
    let (mut out, mut end) = (Vec::new(), begin);
    let result = |i: &usize| p.ops[*i].results[0];
    let bytes =
        |j: &FusedGroup| j.fused_ops().iter().map(|i| p.type_of(result(i)).byte_size().0).sum::<u64>();
    for tables in all.clone().filter(|j| matches!(j, FusedGroup::Modulations(_))) {
        for i in tables.fused_ops() {
            let ty = p.type_of(result(i));
            out.push((result(i), ScratchPlace { offset: end, row_pitch: ty.shape[1] }));
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
            out.push((result(i), ScratchPlace { offset: column, row_pitch: pitch }));
            column += ty.shape[1] * ty.dtype.element_bytes();
        }
        max_bytes = max_bytes.max(bytes(group));
    }
    (out, gemm_base + max_bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fusion::kernel_fusion::plan_launch_steps;
    use crate::fusion::launch_step::LaunchStep;
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
    fn three_matmuls_fuse_if_attention_by_distance_reads_them() {
        let found = |operands: &str| {
            let three = ["v", "q", "k"].map(|n| matmul_text("x", n)).concat();
            let p = program(&format!(
                "program @p {{ %x = input : bf16[16, 128] %n = call \"n\" : i64 {three} \
                 %table = weight \"table\" : f32[32, 2] \
                 %a = toperator.relative_attention {operands}, %table, length=%n \
                 {{head_dim = 64, max_distance = 128}} output \"a\", %a }}"
            ));
            qkv_candidates(&p, &p.value_readers()).iter().map(|t| value_names(&p, t)).collect::<Vec<_>>()
        };
        assert_eq!(found("%q, %k, %v"), [["v", "q", "k"]]);
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
