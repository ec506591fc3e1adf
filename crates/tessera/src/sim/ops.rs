//! Ops of a modelled run, for its trace: what each stream was busy with, as far as a trace has room.

use std::collections::{BTreeMap, VecDeque};

use tessera_ir::{Opcode, Program};
use tessera_report::timeline::Span;
use tessera_sim::{Bar, Loaded};

/// Most ops of a trace. Phases of all chunks and ranks come beside them.
const MAX_OPS: usize = 80_000;

/// The ops of the latest chunks.
#[derive(Debug, Default)]
pub(super) struct Ops {
    chunks: VecDeque<(u32, Vec<Bar>)>,
    total: usize,
}

impl Ops {
    /// Keeps a chunk's ops, and of earlier chunks as many as there is room for, the latest whole chunks. Of a chunk with
    /// more ops than that the first ranks are kept: the first rank that is left out is returned.
    pub(super) fn keep(&mut self, chunk: u32, mut bars: Vec<Bar>) -> Option<u32> {
        let mut cut = None;
        if bars.len() > MAX_OPS {
            bars.sort_by_key(|b| b.rank);
            let first = bars[MAX_OPS].rank;
            bars.retain(|b| b.rank < first);
            cut = Some(first.0);
        }
        self.total += bars.len();
        self.chunks.push_back((chunk, bars));
        while self.total > MAX_OPS
            && let Some((_, old)) = self.chunks.pop_front()
        {
            self.total -= old.len();
        }
        cut
    }

    /// As spans of a timeline, by the names of ops and streams.
    pub(super) fn spans(self, names: &BTreeMap<Loaded, Names>) -> Vec<Span> {
        let mut spans = Vec::with_capacity(self.total);
        for (chunk, bars) in self.chunks {
            spans.extend(bars.into_iter().filter_map(|b| {
                let names = names.get(&b.program)?;
                Some(Span {
                    rank: b.rank.0,
                    stream: names.streams.get(b.stream)?.clone(),
                    name: names.ops.get(b.op)?.clone(),
                    chunk,
                    start_ns: b.start_ns.round() as u64,
                    end_ns: b.end_ns.round() as u64,
                    collectives: u32::from(b.transfer),
                    waits: None,
                })
            }));
        }
        spans
    }
}

/// What a program calls its streams and ops.
#[derive(Debug)]
pub(super) struct Names {
    pub(super) streams: Vec<String>,
    ops: Vec<String>,
}

impl Names {
    /// An op by its name in the op table, with the weight that it reads, or the group that it meets.
    pub(super) fn of(p: &Program) -> Names {
        let definitions = p.definitions();
        let weight = |v: &tessera_ir::ValueId| {
            let at = definitions.get(v.0 as usize).copied().flatten()?;
            p.ops[at].name.clone().filter(|_| p.ops[at].opcode == Opcode::Weight)
        };
        let ops = p.ops.iter().map(|op| {
            let of = match op.group().filter(|_| op.opcode.is_collective()) {
                Some(group) => Some(format!("over {group}")),
                None => op.operands.iter().find_map(weight),
            };
            match of {
                Some(of) => format!("{} {of}", op.opcode.name()),
                None => op.opcode.name().to_string(),
            }
        });
        Names { streams: p.streams.clone(), ops: ops.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_mesh::Rank;
    use tessera_sim::Devices;

    fn bars(loaded: Loaded, ranks: u32, each: usize) -> Vec<Bar> {
        let bar = |rank| Bar {
            rank: Rank(rank),
            program: loaded,
            op: 0,
            stream: 0,
            transfer: false,
            start_ns: 1.4,
            end_ns: 2.6,
        };
        (0..ranks).flat_map(|r| std::iter::repeat_n(bar(r), each)).collect()
    }

    struct Free;
    impl tessera_device::Prices for Free {
        fn op_ns(&self, _: &Program, _: usize) -> u64 {
            0
        }
        fn collective_ns(&self, _: &Program, _: usize, _: &tessera_mesh::Mesh) -> u64 {
            0
        }
    }

    #[test]
    fn the_latest_chunks_are_kept_whole_and_a_large_one_by_its_first_ranks() {
        let text = "program @p role(r) mesh(tp=1) streams(compute) {\n  %x = input \"x\" : f32[2]\n}\n";
        let program = tessera_ir::parse(text, "p.tir").unwrap();
        let mut devices = Devices::new("tp=1".parse().unwrap(), 1.0);
        let loaded = devices.load(&program, &[Rank(0)], &Free).unwrap();
        let mut ops = Ops::default();
        for chunk in 0..5 {
            assert_eq!(ops.keep(chunk, bars(loaded, 3, MAX_OPS / 9)), None);
        }
        assert_eq!(ops.chunks.iter().map(|(c, _)| *c).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(ops.keep(5, bars(loaded, 4, MAX_OPS / 3)), Some(3));
        assert_eq!((ops.chunks.len(), ops.total), (1, MAX_OPS / 3 * 3));
        let names = BTreeMap::from([(loaded, Names::of(&program))]);
        let spans = ops.spans(&names);
        assert_eq!((spans.len(), spans[0].start_ns, spans[0].end_ns), (MAX_OPS / 3 * 3, 1, 3));
        assert_eq!((spans[0].name.as_str(), spans[0].stream.as_str()), ("input", "compute"));
    }
}
