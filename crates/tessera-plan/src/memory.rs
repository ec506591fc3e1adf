//! Places for temporaries: values whose lives do not meet share a slot.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use tessera_base::Bytes;
use tessera_ir::{Kind, Op, Opcode, Program, Slots, ValueId};

/// Assigns slots by one pass over the program: best fit among free slots, else grow the largest free one, else
/// a new one. An issued collective reads its operand until its wait and may write its result from the issue on,
/// so both slots stay taken so long, the result's also where nobody reads it. The result of an exchange that no product hides
/// may be written from where its operand begins to be made: peers then write it there at once.
#[must_use]
pub fn place(p: &Program) -> Slots {
    let lives = lives(p);
    let mut slots = Slots { bytes: Vec::new(), of: vec![None; p.values.len()] };
    let mut free: Vec<u32> = Vec::new();
    // Values whose last reader is op i.
    let mut ending: Vec<Vec<u32>> = vec![Vec::new(); p.ops.len()];
    for (i, made) in lives.iter().enumerate() {
        for life in made {
            let slot = take(&mut free, &mut slots.bytes, life.bytes);
            slots.of[life.value.0 as usize] = Some(slot);
            ending[life.end].push(slot);
        }
        // Freed after the results were placed: an op never writes over its own operand.
        free.append(&mut ending[i]);
    }
    slots
}

/// The temporaries of a program of which a range of ops, equal to those that follow it, is repeated some times.
pub(crate) struct Repeated {
    lives: Rc<Lives>,
    again: Range<usize>,
}

impl Repeated {
    pub(crate) fn new(lives: Rc<Lives>, again: Range<usize>) -> Repeated {
        Repeated { lives, again }
    }

    /// Bytes of all slots with `times` repetitions more, as [`place`] would assign them.
    pub(crate) fn bytes(&self, times: u64) -> Bytes {
        let mut now = Placing::default();
        (0..self.again.end).for_each(|i| self.op(&mut now, i));
        let mut before = now.seen();
        for _ in 0..times {
            self.again.clone().for_each(|i| self.op(&mut now, i));
            let after = now.seen();
            // What comes next depends on nothing else.
            if before == after {
                break;
            }
            before = after;
        }
        (self.again.end..self.lives.len()).for_each(|i| self.op(&mut now, i));
        Bytes(now.bytes.iter().sum())
    }

    fn op(&self, now: &mut Placing, i: usize) {
        for life in &self.lives[i] {
            let slot = take(&mut now.free, &mut now.bytes, life.bytes);
            // What outlives the range ends where it ended, however often the range is repeated.
            if i < self.again.start && life.end >= self.again.end {
                now.far.entry(life.end).or_default().push(slot);
            } else {
                let back = life.end - i;
                now.near.resize_with(now.near.len().max(back + 1), Vec::new);
                now.near[back].push(slot);
            }
        }
        if i >= self.again.end {
            now.free.extend(now.far.remove(&i).unwrap_or_default());
        }
        now.free.extend(now.near.pop_front().unwrap_or_default());
    }
}

/// How slots stand after an op.
#[derive(Default)]
struct Placing {
    bytes: Vec<u64>,
    free: Vec<u32>,
    /// Slots that are freed after so many ops more.
    near: VecDeque<Vec<u32>>,
    /// Slots that are freed after an op behind the repeated range.
    far: BTreeMap<usize, Vec<u32>>,
}

impl Placing {
    /// Sizes of the free slots in order, and of those that will be free.
    fn seen(&self) -> (Vec<u64>, Vec<Vec<u64>>) {
        let sizes = |slots: &Vec<u32>| slots.iter().map(|s| self.bytes[*s as usize]).collect::<Vec<u64>>();
        let near = self.near.iter().rev().skip_while(|n| n.is_empty());
        (sizes(&self.free), near.map(sizes).collect())
    }
}

/// The values that each op of a program takes slots for.
pub(crate) type Lives = Vec<Vec<Life>>;

/// A value that needs a slot.
pub(crate) struct Life {
    value: ValueId,
    bytes: u64,
    /// Its last reader.
    pub(crate) end: usize,
}

pub(crate) fn lives(p: &Program) -> Lives {
    let last = last_uses(p);
    let waits = results_of_waits(p);
    let of = |(i, op): (usize, &Op)| {
        let (written, made) = if op.issue {
            waits.get(&op.results[0]).copied().unwrap_or((i, &[]))
        } else {
            (i, &op.results[..])
        };
        let needs = |r: &&ValueId| {
            !p.ty(**r).is_token() && op.opcode.row().kind != Kind::Source && op.opcode != Opcode::Wait
        };
        let life = |r: &ValueId| Life {
            value: *r,
            bytes: p.ty(*r).bytes().0,
            end: last[r.0 as usize].unwrap_or(written),
        };
        made.iter().filter(needs).map(life).collect()
    };
    let mut lives: Lives = p.ops.iter().enumerate().map(of).collect();
    let exchanges = p.ops.iter().enumerate().filter(|(_, op)| op.issue && op.opcode == Opcode::AllToAll);
    let defs = p.definitions();
    let readers = p.readers();
    for (i, op) in exchanges {
        let wait = waits.get(&op.results[0]).map_or(i, |(w, _)| *w);
        let hides = |o: &Op| matches!(o.opcode, Opcode::Matmul | Opcode::Attention);
        if p.ops[i..wait].iter().any(hides) {
            continue;
        }
        let begins = begins(p, &defs, &readers, op.operands[0]).unwrap_or(i);
        let result = std::mem::take(&mut lives[i]);
        lives[begins].extend(result);
    }
    lives
}

/// The last reader of each value. What a residual adds stays until the norm that reads the sum first, and what a norm reads until
/// its result is quantized, so that all of it may be one pass over memory, whatever small op stands between them.
fn last_uses(p: &Program) -> Vec<Option<usize>> {
    let mut last = p.last_uses();
    let readers = p.readers();
    let norms = |op: &Op| matches!(op.opcode, Opcode::NormModulate | Opcode::LayerNorm);
    let mut stays = |op: &Op, until: usize| {
        for v in op.uses() {
            let end = &mut last[v.0 as usize];
            *end = (*end).max(Some(until));
        }
    };
    // Where a norm's result is last needed in wide numbers.
    let ends = |norm: usize| match p.ops[norm].results.first().map(|r| &readers[r.0 as usize][..]) {
        Some([only]) if p.ops[*only].opcode == Opcode::Quantize => *only,
        _ => norm,
    };
    let small = |o: &Op| {
        o.opcode.row().kind == Kind::Source || matches!(o.opcode, Opcode::Modulation | Opcode::EventRecord)
    };
    for (i, op) in p.ops.iter().enumerate() {
        if norms(op) {
            stays(op, ends(i));
        }
        let norm = op.results.first().and_then(|r| readers[r.0 as usize].first().map(|n| (r, *n)));
        let Some((sum, norm)) = norm.filter(|_| op.opcode == Opcode::GateResidual) else { continue };
        let reads = norms(&p.ops[norm]) && p.ops[norm].operands.first() == Some(sum);
        if reads && p.ops[i + 1..norm].iter().all(small) {
            stays(op, ends(norm));
        }
    }
    last
}

/// The op by which an exchange's operand begins to be made: attention with what only brings its operands, or the first of the
/// row ops behind one another.
fn begins(p: &Program, defs: &[Option<usize>], readers: &[Vec<usize>], operand: ValueId) -> Option<usize> {
    let row = |op: &Op| matches!(op.opcode, Opcode::RmsNorm | Opcode::RmsScale | Opcode::Rope);
    let mut at = defs[operand.0 as usize]?;
    if p.ops[at].opcode == Opcode::Attention {
        let brings = |op: &Op| {
            let moves = [Opcode::Wait, Opcode::CacheWrite, Opcode::CacheRead, Opcode::EventRecord];
            op.opcode.row().kind == Kind::Source || moves.contains(&op.opcode)
        };
        return Some(at - p.ops[..at].iter().rev().take_while(|op| brings(op)).count());
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

/// The wait of each ticket: its place and what it gives.
fn results_of_waits(p: &Program) -> BTreeMap<ValueId, (usize, &[ValueId])> {
    let waits = p.ops.iter().enumerate().filter(|(_, o)| o.opcode == Opcode::Wait);
    waits.map(|(i, o)| (o.operands[0], (i, &o.results[..]))).collect()
}

fn take(free: &mut Vec<u32>, bytes: &mut Vec<u64>, need: u64) -> u32 {
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

    fn program(text: &str) -> Program {
        tessera_ir::parse_all(text, "test").expect("a program").remove(0)
    }

    fn slot(p: &Program, name: &str) -> u32 {
        let v = p.values.iter().position(|v| v.name == name).expect("a value");
        place(p).of[v].expect("a slot")
    }

    #[test]
    fn what_peers_write_lies_over_nothing_that_its_maker_reads() {
        let p = program(
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
            assert_ne!(slot(&p, result), slot(&p, read), "{result} over {read}");
        }
    }

    #[test]
    fn what_a_sum_reads_stays_for_the_norm_of_the_sum() {
        let p = program(
            "program @p { %x = input : f32[4, 8] %m = weight \"m\" : f32[1, 6, 8] %c = input : f32[1, 48] \
             %g = toperator.modulation %m, %c : f32[1, 48] \
             %s = toperator.silu %x : f32[4, 8] %y = toperator.silu %s : f32[4, 8] \
             %t = toperator.gate_residual %s, %y, %g {frame_rows = 4, gate = 2} : f32[4, 8] \
             %h = toperator.modulation %m, %c : f32[1, 48] \
             %z = toperator.norm_modulate %t, %h {eps = 1e-6, frame_rows = 4, scale = 1, shift = 0} : f32[4, 8] \
             %w = toperator.add %t, %z : f32[4, 8] output \"w\", %w }",
        );
        for read in ["s", "y", "g"] {
            assert_ne!(slot(&p, "h"), slot(&p, read), "{read}");
            assert_ne!(slot(&p, "z"), slot(&p, read), "{read}");
        }
    }

    #[test]
    fn an_unread_result_keeps_its_slot_until_its_wait() {
        let mut b = Builder::role("p", "r", "tp=2".parse().unwrap(), &["compute", "tp_collective"]);
        let ty = Type::new(DType::F32, [4, 4]);
        let x = b.input("x", ty.clone().on(Axis::Tp, AxisLayout::partial(Reduction::Sum)));
        let y = b.input("y", ty);
        b.attr("axis", "tp").attr("reduction", "sum").stream("tp_collective");
        let ticket = b.issue(Opcode::AllReduce, &[x]);
        let meanwhile = b.stream("compute").op(Opcode::Silu, &[y]);
        let unread = b.wait(ticket, None).unwrap();
        let after = b.op(Opcode::Silu, &[y]);
        let p = b.finish().unwrap();
        let slots = place(&p).of;
        let slot = |v: ValueId| slots[v.0 as usize].unwrap();
        assert_ne!(slot(unread), slot(meanwhile));
        assert!(
            [slot(unread), slot(meanwhile)].contains(&slot(after)),
            "the slot is free again after the wait"
        );
    }
}
