//! Places for temporaries: values whose lives do not meet share a slot.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::rc::Rc;

use tessera_base::Bytes;
use tessera_ir::{Kind, Op, Opcode, Program, Slots, ValueId};

/// Assigns slots by one pass over the program: best fit among free slots, else grow the largest free one, else
/// a new one. An issued collective reads its operand until its wait and may write its result from the issue on,
/// so both slots stay taken so long, the result's also where nobody reads it.
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
    end: usize,
}

pub(crate) fn lives(p: &Program) -> Lives {
    let last = p.last_uses();
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
    p.ops.iter().enumerate().map(of).collect()
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
