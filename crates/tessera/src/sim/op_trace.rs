//! The ops of a simulated run for its trace: the busy intervals of each stream, up to a maximum
//! number.

use std::collections::{BTreeMap, VecDeque};

use tessera_ir::{Opcode, Program};
use tessera_report::timeline::TimelineSpan;
use tessera_sim::{BusyInterval, SimProgramId};

/// Maximum number of ops in a trace. The phases of all chunks and ranks are recorded separately.
const MAX_OPS: usize = 80_000;

/// Busy intervals of the ops of the latest chunks, at most [`MAX_OPS`] in total.
#[derive(Debug, Default)]
pub(super) struct OpTrace {
    chunks: VecDeque<(u32, Vec<BusyInterval>)>,
    total: usize,
}

impl OpTrace {
    /// Stores a chunk's ops and evicts the oldest chunks, as a whole, while the total exceeds
    /// [`MAX_OPS`]. If the chunk alone exceeds it, keeps only the ops of its first ranks and
    /// returns the first rank left out.
    pub(super) fn push_chunk(&mut self, chunk: u32, mut bars: Vec<BusyInterval>) -> Option<u32> {
        let mut first_dropped = None;
        if bars.len() > MAX_OPS {
            bars.sort_by_key(|b| b.rank);
            let first = bars[MAX_OPS].rank;
            bars.retain(|b| b.rank < first);
            first_dropped = Some(first.0);
        }
        self.total += bars.len();
        self.chunks.push_back((chunk, bars));
        while self.total > MAX_OPS
            && let Some((_, old)) = self.chunks.pop_front()
        {
            self.total -= old.len();
        }
        first_dropped
    }

    /// Converts the ops to timeline spans with the names of ops and streams.
    pub(super) fn into_spans(self, names: &BTreeMap<SimProgramId, ProgramNames>) -> Vec<TimelineSpan> {
        let mut spans = Vec::with_capacity(self.total);
        for (chunk, bars) in self.chunks {
            spans.extend(bars.into_iter().filter_map(|b| {
                let names = names.get(&b.program)?;
                Some(TimelineSpan {
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

/// The names of a program's streams and ops.
#[derive(Debug)]
pub(super) struct ProgramNames {
    pub(super) streams: Vec<String>,
    ops: Vec<String>,
}

impl ProgramNames {
    /// Builds the names. An op's name is its opcode with the tag of its algorithm, followed by the weight
    /// that it reads or the group of its collective.
    pub(super) fn from_program(p: &Program) -> ProgramNames {
        let definitions = p.defining_ops();
        let weight = |v: &tessera_ir::ValueId| {
            let at = definitions.get(v.0 as usize).copied().flatten()?;
            p.ops[at].name.clone().filter(|_| p.ops[at].opcode == Opcode::Weight)
        };
        let ops = p.ops.iter().map(|op| {
            let of = match op.comm_group().filter(|_| op.opcode.is_collective()) {
                Some(group) => Some(format!("over {group}")),
                None => op.operands.iter().find_map(weight),
            };
            match of {
                Some(of) => format!("{} {of}", op.timeline_name()),
                None => op.timeline_name().to_string(),
            }
        });
        ProgramNames { streams: p.streams.clone(), ops: ops.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_mesh::Rank;
    use tessera_sim::SimDevices;

    fn chunk_bars(loaded: SimProgramId, ranks: u32, each: usize) -> Vec<BusyInterval> {
        let bar = |rank| BusyInterval {
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
    impl tessera_device::TimingModel for Free {
        fn op_ns(&self, _: &Program, _: usize) -> u64 {
            0
        }
        fn collective_ns(&self, _: &Program, _: usize, _: &tessera_mesh::Mesh) -> u64 {
            0
        }
    }

    #[test]
    fn the_name_of_a_sum_shows_its_tag() {
        let text = "program @p role(r) mesh(tp=2) streams(compute) {\n  %x = input \"x\" : f32[2] {tp: partial(sum)}\n  \
                    %y = ttile.collective.all_reduce %x {algorithm = \"ring\", axis = \"tp\", reduction = \"sum\"}\n  \
                    %z = ttile.collective.all_reduce %x {axis = \"tp\", reduction = \"sum\"}\n}\n";
        let names = ProgramNames::from_program(&tessera_ir::parse(text, "p.tir").unwrap());
        assert_eq!(names.ops, ["input", "all_reduce ring over tp", "all_reduce over tp"]);
    }

    #[test]
    fn old_chunks_are_evicted_and_a_large_chunk_keeps_its_first_ranks() {
        let text = "program @p role(r) mesh(tp=1) streams(compute) {\n  %x = input \"x\" : f32[2]\n}\n";
        let program = tessera_ir::parse(text, "p.tir").unwrap();
        let mut devices = SimDevices::new("tp=1".parse().unwrap(), 1.0);
        let loaded = devices.load(&program, &[Rank(0)], &Free).unwrap();
        let mut ops = OpTrace::default();
        for chunk in 0..5 {
            assert_eq!(ops.push_chunk(chunk, chunk_bars(loaded, 3, MAX_OPS / 9)), None);
        }
        assert_eq!(ops.chunks.iter().map(|(c, _)| *c).collect::<Vec<_>>(), [2, 3, 4]);
        assert_eq!(ops.push_chunk(5, chunk_bars(loaded, 4, MAX_OPS / 3)), Some(3));
        assert_eq!((ops.chunks.len(), ops.total), (1, MAX_OPS / 3 * 3));
        let names = BTreeMap::from([(loaded, ProgramNames::from_program(&program))]);
        let spans = ops.into_spans(&names);
        assert_eq!((spans.len(), spans[0].start_ns, spans[0].end_ns), (MAX_OPS / 3 * 3, 1, 3));
        assert_eq!((spans[0].name.as_str(), spans[0].stream.as_str()), ("input", "compute"));
    }
}
