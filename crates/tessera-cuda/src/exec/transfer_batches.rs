//! Batched sends and receives. Each communicator of a batch gets its own stream, so that none waits
//! for another.
//!
//! A communicator covers one direction between two ranks. Work for several communicators on one
//! stream runs sequentially, both in an NCCL group and with P2P kernels, so two neighbours that
//! both send first would deadlock.

use std::collections::BTreeMap;

use tessera_device::CommRoute;
use tessera_ir::Program;

use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream};

/// Where an op runs in its batch of sends and receives, and whether the batch begins or ends with
/// it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct BatchPosition {
    /// Name of the side stream of the op. Ops of the batch's first communicator have none and run
    /// on the planned stream.
    side_stream: Option<String>,
    is_first: bool,
    is_last: bool,
}

/// State of a program's batches while it is enqueued. The verifier has checked that the ops of a
/// batch are adjacent and on one stream.
#[derive(Debug)]
pub(super) struct TransferBatches {
    positions: BTreeMap<usize, BatchPosition>,
    /// Records the position of the planned stream at the start of the current batch.
    start_event: Option<CudaEvent>,
    end_events: Vec<CudaEvent>,
}

impl TransferBatches {
    pub(super) fn from_program(p: &Program) -> TransferBatches {
        TransferBatches { positions: batch_positions(p), start_event: None, end_events: Vec::new() }
    }

    /// Returns the names of the side streams, which the program does not list.
    pub(super) fn side_stream_names(p: &Program) -> impl Iterator<Item = String> {
        batch_positions(p).into_values().filter_map(|place| place.side_stream)
    }

    /// Returns the stream that an op runs on: a side stream for every communicator of a batch but
    /// the first, otherwise `planned`.
    pub(super) fn begin_op<'a>(
        &mut self,
        at: usize,
        planned: &'a CudaStream,
        streams: &'a BTreeMap<String, CudaStream>,
    ) -> CudaResult<&'a CudaStream> {
        let Some(place) = self.positions.get(&at) else { return Ok(planned) };
        if place.is_first {
            planned.record_event(self.start_event.insert(CudaEvent::new()?))?;
        }
        let Some(name) = &place.side_stream else { return Ok(planned) };
        let aside = streams.get(name).ok_or_else(|| CudaError(format!("no stream {name}")))?;
        aside.wait_event(
            self.start_event
                .as_ref()
                .ok_or_else(|| CudaError(format!("a batch on {name} has no first op")))?,
        )?;
        Ok(aside)
    }

    /// Ends an op on the stream that [`begin_op`](TransferBatches::begin_op) returned. After the
    /// last op of a batch, `planned` waits for the whole batch.
    pub(super) fn end_op(&mut self, at: usize, planned: &CudaStream, used: &CudaStream) -> CudaResult<()> {
        let Some(place) = self.positions.get(&at) else { return Ok(()) };
        if place.side_stream.is_some() {
            let ended = CudaEvent::new()?;
            used.record_event(&ended)?;
            self.end_events.push(ended);
        }
        if place.is_last {
            self.end_events.drain(..).try_for_each(|e| planned.wait_event(&e))?;
        }
        Ok(())
    }
}

fn batch_positions(p: &Program) -> BTreeMap<usize, BatchPosition> {
    let mut out = BTreeMap::new();
    // Maps each batch to its communicators, in the order of their first ops, and to its last op.
    let mut batches: BTreeMap<i64, (Vec<Option<CommRoute>>, usize)> = BTreeMap::new();
    for (at, op) in p.ops.iter().enumerate() {
        let Some(number) = op.batch_number() else { continue };
        let (lanes, last) = batches.entry(number).or_default();
        let (route, first) = (CommRoute::from_op(op), lanes.is_empty());
        let lane = lanes.iter().position(|r| *r == route).unwrap_or_else(|| {
            lanes.push(route);
            lanes.len() - 1
        });
        let planned = p.streams.get(op.stream.0 as usize).map_or("", String::as_str);
        let aside = (lane > 0).then(|| format!("{planned} beside {lane}"));
        out.insert(at, BatchPosition { side_stream: aside, is_first: first, is_last: false });
        *last = at;
    }
    for (_, last) in batches.values() {
        out.entry(*last).and_modify(|place: &mut BatchPosition| place.is_last = true);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    #[test]
    fn communicators_of_a_batch_run_concurrently_and_each_in_order() {
        let text = "program @p role(a@tp0) mesh(tp=3) streams(compute, comm) { \
            %x = input : f32[2] \
            %before = ttile.collective.issue send %x {axis = \"tp\", to = 1} @comm \
            %a = ttile.collective.issue send %x {axis = \"tp\", batch = 4, to = 1} @comm \
            %b = ttile.collective.issue recv {axis = \"tp\", batch = 4, from = 2} : ticket @comm \
            %c = ttile.collective.issue send %x {axis = \"tp\", batch = 4, to = 1} @comm \
            %d = ttile.collective.issue send %x {axis = \"tp\", batch = 5, to = 2} @comm \
            ttile.collective.wait %before @compute ttile.collective.wait %a @compute \
            %y = ttile.collective.wait %b : f32[2] @compute \
            ttile.collective.wait %c @compute ttile.collective.wait %d @compute output \"y\", %y }";
        let p = parse_all(text, "test").expect("a program").remove(0);
        let found: Vec<Option<BatchPosition>> =
            p.collective_ops().map(|(at, _)| batch_positions(&p).get(&at).cloned()).collect();
        let place = |aside: Option<&str>, first, last| {
            Some(BatchPosition { side_stream: aside.map(String::from), is_first: first, is_last: last })
        };
        let wanted = [
            None,
            place(None, true, false),
            place(Some("comm beside 1"), false, false),
            // Uses the communicator of the first op again, so it runs after that op.
            place(None, false, true),
            place(None, true, true),
        ];
        assert_eq!(found, wanted);
        assert_eq!(TransferBatches::side_stream_names(&p).collect::<Vec<_>>(), ["comm beside 1"]);
    }
}
