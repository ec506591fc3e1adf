//! Assigns memory slots to temporaries: values with disjoint live ranges share a slot.

mod language_ranges;

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use tessera_base::Bytes;
use tessera_ir::{Op, OpKind, Opcode, Program, Slots, ValueId};

use language_ranges::extend_for_language_launches;

/// Assigns slots in one walk over the program: the best fit among free slots, else the largest free
/// slot, which grows, else a new one. An issued collective reads its operand until its wait and may
/// write its result from the issue on, so both slots stay occupied that long, the result's even if
/// nothing reads it. If no matmul or attention hides an all-to-all, peers may write its result
/// while the producer still computes its operand; the result then occupies its slot from the start
/// of that producer.
#[must_use]
pub fn assign_slots(p: &Program) -> Slots {
    let lives = live_ranges(p);
    let mut slots = Slots { slot_bytes: Vec::new(), value_slots: vec![None; p.values.len()] };
    let mut free: Vec<u32> = Vec::new();
    // Slots whose last reader is op i.
    let mut ending: Vec<Vec<u32>> = vec![Vec::new(); p.ops.len()];
    for (i, made) in lives.iter().enumerate() {
        for life in made {
            let slot = take_slot(&mut free, &mut slots.slot_bytes, life.bytes);
            slots.value_slots[life.value.0 as usize] = Some(slot);
            ending[life.last_use].push(slot);
        }
        // Slots become free only after the results have theirs: an op never overwrites its own
        // operand.
        free.append(&mut ending[i]);
    }
    slots
}

/// The temporaries of a program in which a range of ops repeats; the ops after the range equal
/// those in it.
pub(crate) struct RepeatedRange {
    live_ranges: Rc<LiveRanges>,
    repeat: Range<usize>,
}

impl RepeatedRange {
    pub(crate) fn new(live_ranges: Rc<LiveRanges>, repeat: Range<usize>) -> RepeatedRange {
        RepeatedRange { live_ranges, repeat }
    }

    /// Returns the bytes of all slots with `times` more repetitions, as [`assign_slots`] would
    /// assign them.
    pub(crate) fn slot_bytes(&self, times: u64) -> Bytes {
        let mut state = SlotAssignment::default();
        (0..self.repeat.end).for_each(|i| self.assign_op(&mut state, i));
        let mut before = state.sizes_ahead();
        for _ in 0..times {
            self.repeat.clone().for_each(|i| self.assign_op(&mut state, i));
            let after = state.sizes_ahead();
            // The next repetition depends on this state alone, so equal states mean no further
            // change.
            if before == after {
                break;
            }
            before = after;
        }
        (self.repeat.end..self.live_ranges.len()).for_each(|i| self.assign_op(&mut state, i));
        Bytes(state.bytes.iter().sum())
    }

    fn assign_op(&self, state: &mut SlotAssignment, i: usize) {
        for life in &self.live_ranges[i] {
            let slot = take_slot(&mut state.free, &mut state.bytes, life.bytes);
            // A value that outlives the range has its last use after the range, for any number of
            // repetitions.
            if i < self.repeat.start && life.last_use >= self.repeat.end {
                state.freed_after_range.entry(life.last_use).or_default().push(slot);
            } else {
                let back = life.last_use - i;
                state.freed_in.resize_with(state.freed_in.len().max(back + 1), Vec::new);
                state.freed_in[back].push(slot);
            }
        }
        if i >= self.repeat.end {
            state.free.extend(state.freed_after_range.remove(&i).unwrap_or_default());
        }
        state.free.extend(state.freed_in.pop_front().unwrap_or_default());
    }
}

/// The slots after an op: the bytes of each, the free ones, and when the others become free.
#[derive(Default)]
struct SlotAssignment {
    bytes: Vec<u64>,
    free: Vec<u32>,
    /// Slots that become free after as many more ops as their index.
    freed_in: VecDeque<Vec<u32>>,
    /// Slots of values that outlive the repeated range, by the index of the op that reads the value
    /// last.
    freed_after_range: BTreeMap<usize, Vec<u32>>,
}

impl SlotAssignment {
    /// Returns the sizes of the free slots in order, and of those that will become free.
    fn sizes_ahead(&self) -> (Vec<u64>, Vec<Vec<u64>>) {
        let sizes = |slots: &Vec<u32>| slots.iter().map(|s| self.bytes[*s as usize]).collect::<Vec<u64>>();
        let near = self.freed_in.iter().rev().skip_while(|n| n.is_empty());
        (sizes(&self.free), near.map(sizes).collect())
    }
}

/// The values for which each op of a program takes slots.
pub(crate) type LiveRanges = Vec<Vec<LiveRange>>;

/// A value that needs a slot from the op that lists it until its last use.
pub(crate) struct LiveRange {
    value: ValueId,
    bytes: u64,
    /// Index of the op that reads the value last.
    pub(crate) last_use: usize,
}

pub(crate) fn live_ranges(p: &Program) -> LiveRanges {
    let last = extended_last_uses(p);
    let waits = wait_results(p);
    let op_ranges = |(i, op): (usize, &Op)| {
        let (written, results) = if op.issue {
            waits.get(&op.results[0]).copied().unwrap_or((i, &[]))
        } else {
            (i, &op.results[..])
        };
        let needs = |r: &&ValueId| {
            !p.type_of(**r).is_token()
                && op.opcode.table_row().kind != OpKind::Source
                && op.opcode != Opcode::Wait
        };
        let life = |r: &ValueId| LiveRange {
            value: *r,
            bytes: p.type_of(*r).byte_size().0,
            last_use: last[r.0 as usize].unwrap_or(written),
        };
        results.iter().filter(needs).map(life).collect()
    };
    let mut lives: LiveRanges = p.ops.iter().enumerate().map(op_ranges).collect();
    let all_to_alls = p.ops.iter().enumerate().filter(|(_, op)| op.issue && op.opcode == Opcode::AllToAll);
    let defs = p.defining_ops();
    let readers = p.value_readers();
    for (i, op) in all_to_alls {
        let wait = waits.get(&op.results[0]).map_or(i, |(w, _)| *w);
        let hides_transfer = |o: &Op| matches!(o.opcode, Opcode::Matmul | Opcode::Attention);
        if p.ops[i..wait].iter().any(hides_transfer) {
            continue;
        }
        let begins = first_producing_op(p, &defs, &readers, op.operands[0]).unwrap_or(i);
        let result = std::mem::take(&mut lives[i]);
        lives[begins].extend(result);
    }
    lives
}

/// Returns the last reader of each value. Extends the operands of a residual add until the norm
/// that reads the sum first, and the operands of a norm until its result is quantized, so that a
/// backend may fuse all of it into one kernel, with any small ops between them; and likewise the operands of
/// ops of language models.
fn extended_last_uses(p: &Program) -> Vec<Option<usize>> {
    let mut last = p.last_uses();
    let readers = p.value_readers();
    let is_norm = |op: &Op| matches!(op.opcode, Opcode::NormModulate | Opcode::LayerNorm);
    let mut extend_to = |op: &Op, until: usize| {
        for v in op.used_values() {
            let end = &mut last[v.0 as usize];
            *end = (*end).max(Some(until));
        }
    };
    // The op up to which the norm's operands must stay: the quantization of its result, or the norm
    // itself.
    let end_of_norm = |norm: usize| match p.ops[norm].results.first().map(|r| &readers[r.0 as usize][..]) {
        Some([only]) if p.ops[*only].opcode == Opcode::Quantize => *only,
        _ => norm,
    };
    let is_small = |o: &Op| {
        o.opcode.table_row().kind == OpKind::Source
            || matches!(o.opcode, Opcode::Modulation | Opcode::EventRecord)
    };
    for (i, op) in p.ops.iter().enumerate() {
        if is_norm(op) {
            extend_to(op, end_of_norm(i));
        }
        let norm = op.results.first().and_then(|r| readers[r.0 as usize].first().map(|n| (r, *n)));
        let Some((sum, norm)) = norm.filter(|_| op.opcode == Opcode::GateResidual) else { continue };
        let reads = is_norm(&p.ops[norm]) && p.ops[norm].operands.first() == Some(sum);
        if reads && p.ops[i + 1..norm].iter().all(is_small) {
            extend_to(op, end_of_norm(norm));
        }
    }
    extend_for_language_launches(p, &readers, &mut last);
    last
}

/// Returns the first op of the kernel that produces the operand of an all-to-all: attention with
/// the ops that only bring its operands, or the first of a chain of row ops.
fn first_producing_op(
    p: &Program,
    defs: &[Option<usize>],
    readers: &[Vec<usize>],
    operand: ValueId,
) -> Option<usize> {
    let row = |op: &Op| matches!(op.opcode, Opcode::RmsNorm | Opcode::RmsScale | Opcode::Rope);
    let mut at = defs[operand.0 as usize]?;
    if p.ops[at].opcode == Opcode::Attention {
        let is_transfer = |op: &Op| {
            let moves = [Opcode::Wait, Opcode::CacheWrite, Opcode::CacheRead, Opcode::EventRecord];
            op.opcode.table_row().kind == OpKind::Source || moves.contains(&op.opcode)
        };
        return Some(at - p.ops[..at].iter().rev().take_while(|op| is_transfer(op)).count());
    }
    if !row(&p.ops[at]) {
        return None;
    }
    while let Some(x) = p.ops[at].operands.first()
        && let Some(before) = defs[x.0 as usize].filter(|d| row(&p.ops[*d]))
        && readers[x.0 as usize].len() == 1
    {
        at = before;
    }
    Some(at)
}

/// Returns, by ticket, the index and the results of the op that waits for the ticket.
fn wait_results(p: &Program) -> BTreeMap<ValueId, (usize, &[ValueId])> {
    let waits = p.ops.iter().enumerate().filter(|(_, o)| o.opcode == Opcode::Wait);
    waits.map(|(i, o)| (o.operands[0], (i, &o.results[..]))).collect()
}

fn take_slot(free: &mut Vec<u32>, bytes: &mut Vec<u64>, need: u64) -> u32 {
    let fitting =
        (0..free.len()).filter(|i| bytes[free[*i] as usize] >= need).min_by_key(|i| bytes[free[*i] as usize]);
    let any = || (0..free.len()).max_by_key(|i| bytes[free[*i] as usize]);
    match fitting.or_else(any) {
        Some(i) => {
            let slot = free.swap_remove(i);
            let size = &mut bytes[slot as usize];
            *size = (*size).max(need);
            slot
        }
        None => {
            bytes.push(need);
            (bytes.len() - 1) as u32
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::{Builder, DType, Type};
    use tessera_mesh::{Axis, AxisLayout, Reduction};

    fn parse_program(text: &str) -> Program {
        tessera_ir::parse_all(text, "test").expect("the text is a program").remove(0)
    }

    fn slot_of(p: &Program, name: &str) -> u32 {
        let v = p.values.iter().position(|v| v.name == name).expect("the program has this value");
        assign_slots(p).value_slots[v].expect("the value has a slot")
    }

    #[test]
    fn a_result_written_by_peers_shares_no_slot_with_its_producers_operands() {
        let p = parse_program(
            "program @p role(r) mesh(tp=2) streams(compute, tp_collective) { \
             %x = input : f32[4, 8] {tp: shard(0)} @compute \
             %n = weight \"n\" : f32[8] {tp: replicated} @compute \
             %k = ttile.silu %x : f32[4, 8] {tp: shard(0)} @compute \
             %r = ttile.rms_norm %k, %n {eps = 1e-6} : f32[4, 8] {tp: shard(0)} @compute \
             %e = event.record @compute \
             %t = ttile.collective.issue all_to_all %r {axis = \"tp\", concat = 0, split = 1, unit = 4} @tp_collective after(%e) \
             %q = ttile.collective.wait %t : f32[8, 4] {tp: shard(1)} @compute \
             %a = ttile.attention %q, %q, %q {head_dim = 4} : f32[8, 4] {tp: shard(1)} @compute \
             %f = event.record @compute \
             %u = ttile.collective.issue all_to_all %a {axis = \"tp\", concat = 1, split = 0, unit = 1} @tp_collective after(%f) \
             %o = ttile.collective.wait %u : f32[4, 8] {tp: shard(0)} @compute \
             output \"o\", %o }",
        );
        for (result, read) in [("q", "k"), ("o", "q")] {
            assert_ne!(slot_of(&p, result), slot_of(&p, read), "{result} shares a slot with {read}");
        }
    }

    #[test]
    fn operands_of_a_residual_add_live_until_the_norm_of_the_sum() {
        let p = parse_program(
            "program @p { %x = input : f32[4, 8] %m = weight \"m\" : f32[1, 6, 8] %c = input : f32[1, 48] \
             %g = toperator.modulation %m, %c : f32[1, 48] \
             %s = toperator.silu %x : f32[4, 8] %y = toperator.silu %s : f32[4, 8] \
             %t = toperator.gate_residual %s, %y, %g {frame_rows = 4, gate = 2} : f32[4, 8] \
             %h = toperator.modulation %m, %c : f32[1, 48] \
             %z = toperator.norm_modulate %t, %h {eps = 1e-6, frame_rows = 4, scale = 1, shift = 0} : f32[4, 8] \
             %w = toperator.add %t, %z : f32[4, 8] output \"w\", %w }",
        );
        for read in ["s", "y", "g"] {
            assert_ne!(slot_of(&p, "h"), slot_of(&p, read), "{read}");
            assert_ne!(slot_of(&p, "z"), slot_of(&p, read), "{read}");
        }
    }

    #[test]
    fn operands_of_a_language_models_launches_live_until_its_last_op() {
        let p = parse_program(
            "program @p { buffer @c : bf16[32, 32] %h = input : f32[1, 64] %g = weight \"g\" : f32[64] \
             %f = weight \"f\" : f32[8] %start = call \"start\" : f32[1] %pages = call \"pages\" : f32[1, 2] \
             %wk = weight \"wk\" : bf16[32, 64] %wq = weight \"wq\" : bf16[32, 64] %wo = weight \"wo\" : bf16[64, 32] \
             %n = toperator.rms_norm %h, %g {eps = 1e-6} : f32[1, 64] \
             %x = toperator.cast %n {to = \"bf16\"} : bf16[1, 64] %q = toperator.matmul %x, %wq : bf16[1, 32] \
             %k = toperator.matmul %x, %wk : bf16[1, 32] \
             %qr = toperator.rotary %q, %f, start=%start {head_dim = 16} : bf16[1, 32] \
             %kr = toperator.rotary %k, %f, start=%start {head_dim = 16} : bf16[1, 32] \
             cache.write @c, %kr, pages=%pages, start=%start {page_rows = 16} %ck = cache.read @c : bf16[32, 32] \
             %a = toperator.paged_attention %qr, %ck, %ck, pages=%pages, start=%start \
             {head_dim = 16, page_rows = 16} : bf16[1, 32] %o = toperator.matmul %a, %wo : bf16[1, 64] \
             %ow = toperator.cast %o {to = \"f32\"} : f32[1, 64] %s = toperator.add %h, %ow : f32[1, 64] \
             %sn = toperator.rms_norm %s, %g {eps = 1e-6} : f32[1, 64] \
             %y = toperator.cast %sn {to = \"bf16\"} : bf16[1, 64] \
             %gate = toperator.matmul %y, %wk {act = \"silu\"} : bf16[1, 32] %up = toperator.matmul %y, %wq : bf16[1, 32] \
             %m = toperator.mul %gate, %up : bf16[1, 32] %d = toperator.matmul %m, %wo : bf16[1, 64] \
             %dw = toperator.cast %d {to = \"f32\"} : f32[1, 64] %z = toperator.add %s, %dw : f32[1, 64] output \"z\", %z }",
        );
        for (written, read) in [("kr", "q"), ("qr", "k"), ("y", "o"), ("m", "y"), ("sn", "ow")] {
            assert_ne!(slot_of(&p, written), slot_of(&p, read), "{written} shares a slot with {read}");
        }
    }

    #[test]
    fn an_unread_result_keeps_its_slot_until_its_wait() {
        let mut b = Builder::new_role("p", "r", "tp=2".parse().unwrap(), &["compute", "tp_collective"]);
        let ty = Type::new(DType::F32, [4, 4]);
        let x =
            b.add_input("x", ty.clone().with_axis_layout(Axis::Tp, AxisLayout::new_partial(Reduction::Sum)));
        let y = b.add_input("y", ty);
        b.set_attr("axis", "tp").set_attr("reduction", "sum").set_stream("tp_collective");
        let ticket = b.add_issue(Opcode::AllReduce, &[x]);
        let meanwhile = b.set_stream("compute").add_op(Opcode::Silu, &[y]);
        let unread = b.add_wait(ticket, None).unwrap();
        let after = b.add_op(Opcode::Silu, &[y]);
        let p = b.finish().unwrap();
        let slots = assign_slots(&p).value_slots;
        let slot = |v: ValueId| slots[v.0 as usize].unwrap();
        assert_ne!(slot(unread), slot(meanwhile));
        assert!([slot(unread), slot(meanwhile)].contains(&slot(after)), "the wait frees the slot");
    }
}
