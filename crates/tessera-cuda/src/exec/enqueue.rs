//! Enqueues a program's steps on its streams, under graph capture or for an eager run.

#![allow(unsafe_code, reason = "copies within the memory of the backend")]

use std::collections::BTreeMap;

use tessera_ir::{Op, OpKind, OpView, Program, StreamKind, ValueId};

use super::CudaBackend;
use super::expert_fetches::AheadCopies;
use super::launch::elementwise::build_frame_table;
use super::launch::site::LaunchSite;
use super::launch::wire::build_wire_launches;
use super::transfer_batches::TransferBatches;
use crate::collectives::{Synchronization, Targets};
use crate::driver::{CudaError, CudaEvent, CudaResult, CudaStream, cuda_failure};
use crate::fusion::comm_fusion::CommOffload;
use crate::fusion::launch_step::LaunchStep;
use crate::kernels::KernelLaunch;

/// Callback before and after each step, for timing. Takes the launch op, its stream, and whether
/// the step ends.
pub(super) type StepObserver<'a> = dyn FnMut(usize, &CudaStream, bool) -> CudaResult<()> + 'a;

/// A collective whose data its producer step stores, the step before which it opens, and the event
/// that follows the opening.
struct FusedCollective {
    op: usize,
    producer_step: usize,
    open_step: usize,
    targets: Targets,
    opened_event: Option<CudaEvent>,
}

impl CudaBackend {
    /// Enqueues all steps of a program on its streams; the work begins and ends on the first one.
    /// Calls `watch` before and after each step that launches work.
    pub(super) fn enqueue_program(&mut self, program: usize, watch: &mut StepObserver<'_>) -> CudaResult<()> {
        // Moves the streams out, because the backend is borrowed mutably below.
        let streams = std::mem::take(&mut self.streams);
        let done = self.enqueue_on_streams(program, &streams, watch);
        self.streams = streams;
        done
    }

    fn enqueue_on_streams(
        &mut self,
        program: usize,
        streams: &BTreeMap<String, CudaStream>,
        watch: &mut StepObserver<'_>,
    ) -> CudaResult<()> {
        let (p, views) = self.program_and_views(program);
        let lanes = ProgramStreams::new(&p, streams)?;
        self.enqueue_call_data(program, &lanes)?;
        let mut events: BTreeMap<ValueId, CudaEvent> = BTreeMap::new();
        let steps = self.programs[program].steps.clone();
        let mut fused_collectives = self.find_fused_collectives(program, &steps)?;
        let mut batches = TransferBatches::from_program(&p);
        let (io, mut copies) = (streams.get(StreamKind::Io.name()), AheadCopies::default());
        for (k, step) in steps.iter().enumerate() {
            let at = step.launch_op();
            let op = &p.ops[at];
            let planned = lanes.stream_of(op)?;
            let own = batches.begin_op(at, planned, streams)?;
            for s in fused_collectives.iter_mut().filter(|s| s.open_step == k) {
                let maker = steps[s.producer_step].launch_op();
                let (maker, lane) = (lanes.stream_of(&p.ops[maker])?, lanes.stream_of(&p.ops[s.op])?);
                self.enqueue_fused_open(program, s, maker, lane)?;
            }
            for e in op.after.iter().filter_map(|e| events.get(e)) {
                own.wait_event(e)?;
            }
            match op.opcode.table_row().kind {
                OpKind::Order => enqueue_order(&p, at, &views[at], own, &mut events)?,
                OpKind::Collective => {
                    watch(at, own, false)?;
                    if fused_collectives.iter().any(|s| s.op == at) {
                        self.launch_synchronization(program, at, Synchronization::Close, own)?;
                    } else {
                        self.enqueue_collective(program, at, own)?;
                    }
                    watch(at, own, true)?;
                    if op.issue {
                        record_new_event(op.results[0], own, &mut events)?;
                    }
                    batches.end_op(at, planned, own)?;
                }
                OpKind::Source | OpKind::Sink | OpKind::Compute => {
                    let targets = fused_collectives.iter().find(|s| s.producer_step == k);
                    if let Some(opened) = targets.and_then(|s| s.opened_event.as_ref()) {
                        own.wait_event(opened)?;
                    }
                    self.enqueue_layer_start(program, at, (own, io), &mut copies)?;
                    watch(at, own, false)?;
                    self.launch_step(program, step, targets.map(|s| &s.targets), own)?;
                    watch(at, own, true)?;
                    self.enqueue_layer_end(program, at, (own, io), &mut copies)?;
                }
            }
        }
        lanes.join_main()?;
        self.join_expert_copies(program, lanes.streams[0], &copies)
    }

    /// Fills the call area and computes the RoPE tables of the call, on the first stream. The other
    /// streams wait for the call area.
    fn enqueue_call_data(&mut self, program: usize, lanes: &ProgramStreams<'_>) -> CudaResult<()> {
        let main = lanes.streams[0];
        let (area, staged, bytes) = {
            let own = &self.programs[program];
            (own.call_area.device_address(), own.staged.device_address(), own.staged_bytes)
        };
        // SAFETY: the call area begins with the staged bytes; the host writes these only before a
        // run.
        unsafe { main.copy_async(area, staged, bytes) }?;
        let site = LaunchSite::new(self, program);
        let own_tables = self.programs[program].rope_tables.iter().filter(|t| !t.is_shared);
        let launches: Vec<KernelLaunch> =
            own_tables.map(|t| build_frame_table(&site, t, area)).collect::<CudaResult<_>>()?;
        launches.iter().try_for_each(|launch| self.enqueue_launch(launch, main))?;
        lanes.fork_main()
    }

    /// Enqueues a collective, between the encoding and the decoding of an exchange that sends e4m3.
    fn enqueue_collective(&mut self, program: usize, op: usize, stream: &CudaStream) -> CudaResult<()> {
        if !self.programs[program].wire_words.contains_key(&op) {
            self.copy_reduced_operand(program, op, stream)?;
            return self.launch_collective(program, op, stream);
        }
        let [encode, decode] = build_wire_launches(&LaunchSite::new(self, program), op)?;
        self.enqueue_launch(&encode, stream)?;
        self.launch_collective(program, op, stream)?;
        self.enqueue_launch(&decode, stream)
    }

    /// Opens a fused collective once the stream of its producer is at this step.
    fn enqueue_fused_open(
        &mut self,
        program: usize,
        fused: &mut FusedCollective,
        producer: &CudaStream,
        own: &CudaStream,
    ) -> CudaResult<()> {
        let free = CudaEvent::new()?;
        producer.record_event(&free)?;
        own.wait_event(&free)?;
        self.launch_synchronization(program, fused.op, Synchronization::Open, own)?;
        own.record_event(fused.opened_event.insert(CudaEvent::new()?))
    }

    /// Returns the collectives without a launch of their own: the kernel that produces the operand
    /// stores it into the results of the members.
    fn find_fused_collectives(
        &self,
        program: usize,
        steps: &[LaunchStep],
    ) -> CudaResult<Vec<FusedCollective>> {
        let own = &self.programs[program];
        let mut out = Vec::new();
        for (op, carried) in &own.comm_offloads {
            let CommOffload::FusedIntoProducer { producer: maker, open_step: opens, split_dim: along } =
                *carried
            else {
                continue;
            };
            // Of the attention kernels, only the sm90 kernel can store to peers.
            if let OpView::Attention(v) = &own.views[steps[maker].launch_op()]
                && !self.is_single_sm90_attention(&own.program, v)
            {
                continue;
            }
            if let Some(targets) = self.store_targets(program, *op, along)? {
                out.push(FusedCollective {
                    op: *op,
                    producer_step: maker,
                    open_step: opens,
                    targets,
                    opened_event: None,
                });
            }
        }
        Ok(out)
    }
}

/// The streams of a program, in the order in which the program lists them. The program begins and ends
/// on the first.
struct ProgramStreams<'a> {
    program: &'a Program,
    streams: Vec<&'a CudaStream>,
}

impl<'a> ProgramStreams<'a> {
    fn new(program: &'a Program, all: &'a BTreeMap<String, CudaStream>) -> CudaResult<ProgramStreams<'a>> {
        let streams: Vec<&CudaStream> = program.streams.iter().map_while(|name| all.get(name)).collect();
        let lanes = ProgramStreams { program, streams };
        // A program has a first stream even if it lists none.
        (0..program.streams.len().max(1)).try_for_each(|i| lanes.stream(i).map(drop))?;
        Ok(lanes)
    }

    fn stream(&self, i: usize) -> CudaResult<&'a CudaStream> {
        let missing = || CudaError(format!("@{} has no stream {i}", self.program.name));
        self.streams.get(i).copied().ok_or_else(missing)
    }

    fn stream_of(&self, op: &Op) -> CudaResult<&'a CudaStream> {
        self.stream(op.stream.0 as usize)
    }

    /// Makes the other streams wait for the work on the first one.
    fn fork_main(&self) -> CudaResult<()> {
        let filled = CudaEvent::new()?;
        self.streams[0].record_event(&filled)?;
        self.streams[1..].iter().try_for_each(|stream| stream.wait_event(&filled))
    }

    /// Makes the first stream wait for the work on the others.
    fn join_main(&self) -> CudaResult<()> {
        self.streams[1..].iter().try_for_each(|stream| {
            let ended = CudaEvent::new()?;
            stream.record_event(&ended)?;
            self.streams[0].wait_event(&ended)
        })
    }
}

/// Records the event of an `event.record`, or waits for that of an issued collective.
fn enqueue_order(
    p: &Program,
    at: usize,
    view: &OpView,
    stream: &CudaStream,
    events: &mut BTreeMap<ValueId, CudaEvent>,
) -> CudaResult<()> {
    match view {
        OpView::EventRecord(_) => record_new_event(p.ops[at].results[0], stream, events),
        OpView::Wait(v) => {
            let missing = || CudaError(format!("@{} op {at} waits for an unrecorded event", p.name));
            stream.wait_event(events.get(&v.ticket).ok_or_else(missing)?)
        }
        _ => cuda_failure(format!("{} orders no stream", p.ops[at].opcode.name())),
    }
}

fn record_new_event(
    token: ValueId,
    stream: &CudaStream,
    events: &mut BTreeMap<ValueId, CudaEvent>,
) -> CudaResult<()> {
    let event = CudaEvent::new()?;
    stream.record_event(&event)?;
    events.insert(token, event);
    Ok(())
}
