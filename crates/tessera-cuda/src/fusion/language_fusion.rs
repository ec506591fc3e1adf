//! Kernel fusion for language models. In a decoding step most ops have one row, so that starting a launch takes
//! longer than its work: fewer launches are what makes the step fast.

use tessera_ir::{DType, Op, OpView, Opcode, Program, ValueId, views};

use super::launch_step::{HeadRows, LaunchStep};
use super::rounds_to_nearest;
use crate::gemm::shape::uses_few_rows_kernel;
use crate::kernel_table::{MAX_HEAD_PARTS, MAX_ROW_MATRICES};

/// Returns the longest fusion of ops of a language model that starts with op `i`. Only ops for which `is_free`
/// holds may follow it: those of its stream that wait for no event and are in no other step.
pub(super) fn language_fusion_from(
    p: &Program,
    readers: &[Vec<usize>],
    is_free: &dyn Fn(usize) -> bool,
    i: usize,
) -> Option<LaunchStep> {
    let search = FusionSearch { p, readers, is_free };
    match p.ops[i].view().ok()? {
        OpView::Matmul(v) => search.row_matmuls(i, &v),
        OpView::Cast(_) | OpView::Add(_) | OpView::RmsNorm(_) => search.residual_rms(i),
        OpView::HeadNorm(_) | OpView::Rotary(_) | OpView::CacheWrite(_) => search.put_heads(i),
        _ => None,
    }
}

struct FusionSearch<'a> {
    p: &'a Program,
    readers: &'a [Vec<usize>],
    is_free: &'a dyn Fn(usize) -> bool,
}

impl FusionSearch<'_> {
    fn opcode(&self, i: usize) -> Opcode {
        self.p.ops[i].opcode
    }

    /// Returns the only reader of an op's result, if it may follow in the same step.
    fn only_reader(&self, i: usize) -> Option<usize> {
        let result = self.p.ops[i].results.first()?;
        match self.readers[result.0 as usize][..] {
            [reader] if (self.is_free)(reader) => Some(reader),
            _ => None,
        }
    }

    /// Returns the matmuls that have the row of op `i` as well, and the op that multiplies the results of two of them.
    fn row_matmuls(&self, i: usize, first: &views::Matmul) -> Option<LaunchStep> {
        let fits = |j: &usize| match self.p.ops[*j].view() {
            Ok(OpView::Matmul(v)) => {
                let is_row = self.p.type_of(v.x).dtype == DType::Bf16 && uses_few_rows_kernel(self.p, &v);
                is_row && v.x == first.x && v.segments == 1
            }
            _ => false,
        };
        let later = self.readers[first.x.0 as usize].iter().copied().filter(|j| *j > i && (self.is_free)(*j));
        let matmuls: Vec<usize> =
            std::iter::once(i).chain(later).filter(fits).take(MAX_ROW_MATRICES).collect();
        if matmuls.len() < 2 || matmuls[0] != i {
            return None;
        }
        let mul = match matmuls[..] {
            [gate, up] => self.multiplied_results(gate, up),
            _ => None,
        };
        Some(LaunchStep::RowMatmuls { matmuls, mul })
    }

    /// Returns the op that multiplies the results of two matmuls without a bias, if nothing else reads them.
    fn multiplied_results(&self, gate: usize, up: usize) -> Option<usize> {
        let mul = self.only_reader(gate).filter(|j| self.opcode(*j) == Opcode::Mul)?;
        let is_plain = |i: usize| matches!(self.p.ops[i].view(), Ok(OpView::Matmul(v)) if v.bias.is_none());
        // The kernel applies an activation to the first alone.
        let has_no_activation = matches!(self.p.ops[up].view(), Ok(OpView::Matmul(v)) if v.act.is_none());
        (self.only_reader(up) == Some(mul) && is_plain(gate) && is_plain(up) && has_no_activation)
            .then_some(mul)
    }

    /// Returns a sum, its norm and the casts around them, of which op `i` is the first.
    fn residual_rms(&self, i: usize) -> Option<LaunchStep> {
        let cast_to = |j: usize, dtype: DType| {
            let op = &self.p.ops[j];
            op.opcode == Opcode::Cast && self.p.type_of(op.results[0]).dtype == dtype && rounds_to_nearest(op)
        };
        let from_bf16 = |j: usize| self.p.type_of(self.p.ops[j].operands[0]).dtype == DType::Bf16;
        let widen = (cast_to(i, DType::F32) && from_bf16(i)).then_some(i);
        let add = match widen {
            Some(cast) => Some(self.only_reader(cast)?),
            None => (self.opcode(i) == Opcode::Add).then_some(i),
        };
        if let Some(add) = add {
            let OpView::Add(v) = self.p.ops[add].view().ok()? else { return None };
            if v.x == v.y {
                return None;
            }
        }
        let norm = match add {
            // The sum may have other readers.
            Some(add) => *self.readers[self.p.ops[add].results.first()?.0 as usize].first()?,
            None => i,
        };
        let OpView::RmsNorm(v) = self.p.ops[norm].view().ok()? else { return None };
        let ty = self.p.type_of(v.x);
        let fits = ty.shape.len() == 2 && ty.dtype == DType::F32 && v.segments == 1;
        if !fits || (norm != i && !(self.is_free)(norm)) {
            return None;
        }
        let narrow = self.only_reader(norm).filter(|j| cast_to(*j, DType::Bf16));
        (add.is_some() || narrow.is_some()).then_some(LaunchStep::ResidualRms { widen, add, norm, narrow })
    }

    /// Returns what happens to the heads of queries, keys and values up to attention, from op `i` on.
    fn put_heads(&self, i: usize) -> Option<LaunchStep> {
        let first = self.heads_from(i)?;
        let mut parts = vec![first];
        let ends = |j: &usize| self.opcode(*j) == Opcode::PagedAttention;
        for j in (i + 1..self.p.ops.len()).take_while(|j| !ends(j)) {
            let is_taken = parts.iter().any(|part| part.ops().any(|op| op == j));
            if parts.len() == MAX_HEAD_PARTS || is_taken || !(self.is_free)(j) {
                continue;
            }
            if let Some(part) = self.heads_from(j).filter(|part| self.can_share_launch(&first, part)) {
                parts.push(part);
            }
        }
        let ops: Vec<usize> = parts.iter().flat_map(HeadRows::ops).collect();
        let last = *ops.iter().max()?;
        let stay = parts.iter().filter_map(|part| part.write).all(|w| self.is_untouched_until(w, last, &ops));
        let head_dim = parts.iter().find_map(|part| HeadRowsKey::new(self.p, part).head_dim)?;
        let width =
            |part: &HeadRows| part.ops().next().map(|op| self.p.type_of(self.p.ops[op].operands[0]).shape[1]);
        let has_whole_heads =
            parts.iter().all(|part| width(part).is_some_and(|w| w.is_multiple_of(head_dim)));
        (ops.len() > 1 && stay && has_whole_heads).then_some(LaunchStep::PutHeads(parts))
    }

    /// Returns the norm, the rotation and the write to pages of one value's heads, from op `i` on.
    fn heads_from(&self, i: usize) -> Option<HeadRows> {
        let norm = (self.opcode(i) == Opcode::HeadNorm).then_some(i);
        let rotary = match norm {
            Some(norm) => self.only_reader(norm),
            None => Some(i),
        };
        let rotary =
            rotary.filter(|j| matches!(self.p.ops[*j].view(), Ok(OpView::Rotary(v)) if !v.interleaved));
        let write = match rotary.or(norm) {
            Some(last) => self.only_reader(last),
            None => Some(i),
        };
        let write =
            write.filter(|j| matches!(self.p.ops[*j].view(), Ok(OpView::CacheWrite(v)) if v.pages.is_some()));
        let part = HeadRows { norm, rotary, write };
        let x = part.ops().next().map(|op| self.p.ops[op].operands[0])?;
        let is_stored = matches!(self.p.type_of(x).dtype, DType::F32 | DType::Bf16);
        let has_same_dtype = write.is_none_or(|w| {
            self.p.ops[w].buffer.is_some_and(|b| self.p.buffer(b).ty.dtype == self.p.type_of(x).dtype)
        });
        // A rotation or a write names the positions that the kernel reads.
        let has_positions = rotary.is_some() || write.is_some();
        (is_stored && has_same_dtype && has_positions).then_some(part)
    }

    /// Returns whether two parts have the same rows, heads of the same size, rotation and pages.
    fn can_share_launch(&self, a: &HeadRows, b: &HeadRows) -> bool {
        let (of_a, of_b) = (HeadRowsKey::new(self.p, a), HeadRowsKey::new(self.p, b));
        of_a.rows == of_b.rows
            && are_compatible(of_a.head_dim, of_b.head_dim)
            && are_compatible(of_a.start, of_b.start)
            && are_compatible(of_a.rotation, of_b.rotation)
            && are_compatible(of_a.pages, of_b.pages)
    }

    /// Returns whether no op outside of the step touches the buffer of a write before the step's last op, at
    /// whose place the rows are written.
    fn is_untouched_until(&self, write: usize, last: usize, step: &[usize]) -> bool {
        let buffer = self.p.ops[write].buffer;
        let defs = self.p.defining_ops();
        let reads = |v: ValueId| defs[v.0 as usize].is_some_and(|d| self.p.ops[d].buffer == buffer);
        let touches = |op: &Op| {
            let is_source = op.opcode == Opcode::CacheRead;
            !is_source && (op.buffer == buffer || op.used_values().any(reads))
        };
        (write + 1..last).all(|j| step.contains(&j) || !touches(&self.p.ops[j]))
    }
}

/// What the parts of one launch have in common; `None` where a part does not say.
struct HeadRowsKey {
    rows: (u64, DType),
    head_dim: Option<u64>,
    start: Option<ValueId>,
    /// Frequencies and the bits of the factor.
    rotation: Option<(ValueId, u64)>,
    /// Pages, rows of a page, and rows of the pool.
    pages: Option<(ValueId, u64, u64)>,
}

impl HeadRowsKey {
    fn new(p: &Program, part: &HeadRows) -> HeadRowsKey {
        let view = |op: Option<usize>| op.and_then(|i| p.ops[i].view().ok());
        let x = part.ops().next().map(|i| p.ops[i].operands[0]);
        let rows = x.map_or((0, DType::F32), |x| (p.type_of(x).shape[0], p.type_of(x).dtype));
        let mut key = HeadRowsKey { rows, head_dim: None, start: None, rotation: None, pages: None };
        if let Some(OpView::HeadNorm(v)) = view(part.norm) {
            key.head_dim = Some(v.head_dim);
        }
        if let Some(OpView::Rotary(v)) = view(part.rotary) {
            (key.head_dim, key.start) = (Some(v.head_dim), Some(v.start));
            key.rotation = Some((v.frequencies, v.scale.to_bits()));
        }
        if let Some(OpView::CacheWrite(v)) = view(part.write) {
            let pool = part.write.and_then(|w| p.ops[w].buffer).map_or(0, |b| p.buffer(b).ty.shape[0]);
            key.start = v.start;
            key.pages = v.pages.zip(v.page_rows).map(|(pages, rows)| (pages, rows, pool));
        }
        key
    }
}

/// Returns whether two keys are equal, or one of them is absent.
fn are_compatible<T: PartialEq>(a: Option<T>, b: Option<T>) -> bool {
    a.zip(b).is_none_or(|(a, b)| a == b)
}

#[cfg(test)]
mod tests {
    use tessera_ir::{Slots, parse_all};

    use super::*;
    use crate::fusion::kernel_fusion::plan_launch_steps;

    fn program(text: &str) -> Program {
        parse_all(text, "test").expect("a program").remove(0)
    }

    /// Returns the names of the ops of each step that has several, with a slot per value, except that the first
    /// of each pair of values shares the slot of the second.
    fn fused_steps(p: &Program, shared: &[(&str, &str)]) -> Vec<String> {
        let index = |name: &str| p.values.iter().position(|v| v.name == name).expect("a value") as u32;
        let shared: Vec<(u32, u32)> = shared.iter().map(|(a, b)| (index(a), index(b))).collect();
        let slot = |v: u32| Some(shared.iter().find(|(a, _)| *a == v).map_or(v, |(_, b)| *b));
        let value_slots = (0..p.values.len() as u32).map(slot).collect();
        let slots = Slots { slot_bytes: vec![1 << 20; p.values.len()], value_slots };
        let steps = plan_launch_steps(p, &slots, &[]).into_iter().map(|step| step.all_ops());
        let name = |i: &usize| p.ops[*i].opcode.name();
        steps
            .filter(|ops| ops.len() > 1)
            .map(|ops| ops.iter().map(name).collect::<Vec<_>>().join("+"))
            .collect()
    }

    /// A layer of `rows` rows up to attention, and the feed-forward part behind it.
    fn layer(rows: u64) -> String {
        format!(
            "program @p {{ buffer @k : bf16[32, 32] buffer @v : bf16[32, 32] %h = input : f32[{rows}, 64] \
             %g = weight \"g\" : f32[64] %gh = weight \"gh\" : f32[16] %f = weight \"f\" : f32[8] \
             %wq = weight \"wq\" : bf16[64, 64] %wk = weight \"wk\" : bf16[32, 64] %wv = weight \"wv\" : bf16[32, 64] \
             %wg = weight \"wg\" : bf16[96, 64] %wu = weight \"wu\" : bf16[96, 64] %wd = weight \"wd\" : bf16[64, 96] \
             %start = call \"start\" : f32[1] %pages = call \"pages\" : f32[1, 2] \
             %n = toperator.rms_norm %h, %g {{eps = 1e-6}} : f32[{rows}, 64] \
             %x = toperator.cast %n {{to = \"bf16\"}} : bf16[{rows}, 64] \
             %q = toperator.matmul %x, %wq : bf16[{rows}, 64] %k = toperator.matmul %x, %wk : bf16[{rows}, 32] \
             %v = toperator.matmul %x, %wv : bf16[{rows}, 32] \
             %qn = toperator.head_norm %q, %gh {{eps = 1e-6, head_dim = 16}} : bf16[{rows}, 64] \
             %qr = toperator.rotary %qn, %f, start=%start {{head_dim = 16}} : bf16[{rows}, 64] \
             %kr = toperator.rotary %k, %f, start=%start {{head_dim = 16}} : bf16[{rows}, 32] \
             cache.write @k, %kr, pages=%pages, start=%start {{page_rows = 16}} %ck = cache.read @k : bf16[32, 32] \
             cache.write @v, %v, pages=%pages, start=%start {{page_rows = 16}} %cv = cache.read @v : bf16[32, 32] \
             %a = toperator.paged_attention %qr, %ck, %cv, pages=%pages, start=%start \
             {{head_dim = 16, page_rows = 16}} : bf16[{rows}, 64] \
             %aw = toperator.cast %a {{to = \"f32\"}} : f32[{rows}, 64] %s = toperator.add %h, %aw : f32[{rows}, 64] \
             %sn = toperator.rms_norm %s, %g {{eps = 1e-6}} : f32[{rows}, 64] \
             %y = toperator.cast %sn {{to = \"bf16\"}} : bf16[{rows}, 64] \
             %gate = toperator.matmul %y, %wg {{act = \"silu\"}} : bf16[{rows}, 96] \
             %up = toperator.matmul %y, %wu : bf16[{rows}, 96] %m = toperator.mul %gate, %up : bf16[{rows}, 96] \
             %d = toperator.matmul %m, %wd : bf16[{rows}, 64] %dw = toperator.cast %d {{to = \"f32\"}} : f32[{rows}, 64] \
             %z = toperator.add %s, %dw : f32[{rows}, 64] output \"z\", %z }}"
        )
    }

    const HEADS: &str = "head_norm+rotary+rotary+cache.write+cache.write";
    const SUM: &str = "cast+add+rms_norm+cast";

    #[test]
    fn a_layer_of_one_row_is_few_launches() {
        let found = fused_steps(&program(&layer(1)), &[]);
        let gated = "matmul+matmul+mul";
        assert_eq!(found, ["rms_norm+cast", "matmul+matmul+matmul", HEADS, SUM, gated]);
        // Several rows are GEMMs of their own.
        assert_eq!(fused_steps(&program(&layer(3)), &[]), ["rms_norm+cast", HEADS, SUM]);
    }

    #[test]
    fn heads_may_overwrite_what_they_were_and_no_others() {
        let p = program(&layer(1));
        assert!(fused_steps(&p, &[("qr", "q")]).contains(&HEADS.to_string()));
        // Other heads of the launch still read the keys.
        assert!(!fused_steps(&p, &[("qr", "k")]).contains(&HEADS.to_string()));
    }

    #[test]
    fn results_of_matmuls_in_one_launch_may_not_overwrite_their_operand() {
        let p = program(&layer(1));
        assert!(!fused_steps(&p, &[("m", "y")]).contains(&"matmul+matmul+mul".to_string()));
        assert!(!fused_steps(&p, &[("v", "x")]).iter().any(|f| f.starts_with("matmul+matmul+matmul")));
    }

    #[test]
    fn keys_stay_in_their_own_step_if_something_reads_their_pages_before_the_values_are_written() {
        let between = "%early = toperator.paged_attention %qr, %ck, %ck, pages=%pages, start=%start \
                       {head_dim = 16, page_rows = 16} : bf16[1, 64] cache.write @v, %v,";
        let text = layer(1).replace("cache.write @v, %v,", between).replace(
            "output \"z\", %z",
            "%e = toperator.cast %early {to = \"f32\"} : f32[1, 64] output \"z\", %z output \"e\", %e",
        );
        let found = fused_steps(&program(&text), &[]);
        assert!(found.contains(&"head_norm+rotary+rotary+cache.write".to_string()), "{found:?}");
    }
}
