//! Runs the leader of array programs: rank 0, which takes calls from the launching process, returns their outputs and
//! writes the record.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::Failure;
use tessera_runtime::array_director::ArrayRequest;
use tessera_runtime::driver::{CallRequest, LeaderParts};
use tessera_runtime::engine::{Delivery, MediaPipeline};
use tessera_runtime::leader::{CallRecord, RecordEntry};
use tessera_runtime::wire::{
    ArrayCall, ArrayOutputs, CallAction, CallObservation, Message, PhaseCall, PhaseOpTimes, Tensor, Tensors,
};

use super::array_config::ArrayConfig;
use super::array_link::ArrayLink;
use super::array_plan::ArrayPlan;
use super::array_program::PHASE_PREFIX;
use super::array_weights::ArrayWeights;
use crate::codes::T0092;
use crate::media_pipeline::lock_record;
use crate::parity::{ExecutorState, ModelFacts, rank_parity};
use crate::rank::{LeaderSeat, RankSetup, run_leader_rank};
use crate::record::{ChunkSettings, RecordWriter};
use crate::synthetic_delays::SyntheticDelays;

/// Runs the leader of array programs, which writes the record.
pub(crate) fn run_array_leader(
    arrive: impl FnOnce() -> Result<RankSetup<ArrayPlan>, Diagnostics>,
    config: &ArrayConfig,
) -> Result<Option<Failure>, Diagnostics> {
    let record = Arc::new(Mutex::new(RecordWriter::open(&config.out).map_err(|d| vec![d])?));
    let calls = Arc::new(OpenCalls::default());
    let build = |seat: LeaderSeat<'_, ArrayPlan>| build_parts(seat, config, &record, &calls);
    let is_complete = |_: &RecordWriter| calls.lock().have_ended;
    run_leader_rank(arrive, &config.settings(), &record, build, is_complete)
}

fn build_parts(
    seat: LeaderSeat<'_, ArrayPlan>,
    config: &ArrayConfig,
    record: &Arc<Mutex<RecordWriter>>,
    calls: &Arc<OpenCalls>,
) -> Result<LeaderParts, Diagnostics> {
    let LeaderSeat { session, communicators, context, mut frame_pipes, .. } = seat;
    let plan = Arc::clone(&context.plan);
    let one = |d: Diagnostic| vec![d];
    let weights = ArrayWeights::open(&config.weights_place(), &plan.programs)?;
    let parity = rank_parity(
        (&plan.sealed, &plan.mapping),
        &ModelFacts::of_arrays(weights.digest()),
        &SyntheticDelays::default(),
        &ExecutorState::from_request(&plan.sealed, config.gpus.is_some(), &context.tripwires),
        context.peers,
    );
    let Some(socket) = frame_pipes.pop() else {
        return Err(one(Diagnostic::error(&T0092, "the launching process passed no socket for calls")));
    };
    let mut requests = ArrayLink::of_leader(socket);
    let outputs = Arc::new(Mutex::new(requests.try_clone().map_err(one)?));
    let (requested, delivered, called) = (Arc::clone(calls), Arc::clone(calls), Arc::clone(&plan));
    let (writer, recorder, warm) = (Arc::clone(record), Arc::clone(record), Arc::clone(&outputs));
    let timed = Arc::clone(calls);
    Ok(LeaderParts {
        config: context.leader_config(session, parity),
        local_rank: context.local_rank(config.weights_place(), config.threads, communicators),
        topology: context.topology,
        media: Box::new(move || {
            let pipeline: Box<dyn MediaPipeline> =
                Box::new(ArrayPipeline { plan, calls: delivered, link: outputs, record: writer });
            Ok(pipeline)
        }),
        requests: Box::new(std::iter::from_fn(move || requested.receive_call(&mut requests, &called))),
        record: Box::new(move |entry: &RecordEntry| {
            let mut record = lock_record(&recorder);
            // An error here also makes the delivery fail, and the pipeline reports it there.
            let _ = record.record_entry(entry);
            if let RecordEntry::Call(call) = entry {
                let settings = ChunkSettings::default();
                record.record_call(call, Some(&settings), None);
                if call.plan.action == CallAction::Warmup {
                    // The launching process that does not read this has ended, which the control link reports.
                    let _ = send_outputs(&warm, ArrayOutputs::default());
                } else {
                    timed.keep_op_times(call);
                }
            }
        }),
        stop: None,
        flight: context.flight_sink(),
        interceptor: context.build_interceptor(tessera_mesh::Rank(0)).map_err(one)?,
    })
}

fn send_outputs(link: &Mutex<ArrayLink>, outputs: ArrayOutputs) -> Result<(), Diagnostic> {
    let mut link = link.lock().unwrap_or_else(PoisonError::into_inner);
    let frame = link.encode(&Message::ArrayOutputs(outputs))?;
    link.send(&frame)
}

/// The calls between the thread that receives them and the one that returns their outputs.
#[derive(Default)]
struct OpenCalls(Mutex<CallQueue>);

#[derive(Default)]
struct CallQueue {
    /// Number and phase of each call whose outputs are due, oldest first.
    due: VecDeque<(u64, String)>,
    /// Times of the ops of each rank in calls whose outputs are due, by the call's index; empty unless the run is traced.
    op_times: BTreeMap<u32, Vec<(u32, PhaseOpTimes)>>,
    /// Why no further call can be received.
    failure: Option<Diagnostic>,
    /// Whether the launching process requests no further call.
    have_ended: bool,
}

impl OpenCalls {
    fn lock(&self) -> MutexGuard<'_, CallQueue> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Keeps the times of a call's ops until its outputs are returned. A call of arrays has one phase.
    fn keep_op_times(&self, call: &CallRecord) {
        let of_rank = |(rank, observed): (&u32, &CallObservation)| {
            observed.phase_op_times.first().map(|times| (*rank, times.clone()))
        };
        let times: Vec<_> = call.observed.iter().filter_map(of_rank).collect();
        if !times.is_empty() {
            self.lock().op_times.insert(call.plan.chunk, times);
        }
    }

    /// Waits for the next call; `None` ends the run.
    fn receive_call(&self, link: &mut ArrayLink, plan: &ArrayPlan) -> Option<CallRequest> {
        let received = link.receive();
        let mut queue = self.lock();
        match received {
            Ok(Some(Message::ArrayCall(ArrayCall { number, program, inputs }))) => {
                queue.due.push_back((number, program.clone()));
                let phase = PhaseCall::new(program.clone(), plan.programs.constants_of(&program));
                Some(CallRequest::Arrays(Box::new(ArrayRequest { phase, inputs })))
            }
            Ok(Some(message)) => {
                let what = format!("a {:?} message arrived in place of a call", message.kind());
                queue.failure = Some(Diagnostic::error(&T0092, what));
                None
            }
            Ok(None) => {
                queue.have_ended = true;
                None
            }
            Err(d) => {
                queue.failure = Some(d);
                None
            }
        }
    }
}

/// Returns the outputs of calls to the launching process and closes the record. Array programs have no media.
struct ArrayPipeline {
    plan: Arc<ArrayPlan>,
    calls: Arc<OpenCalls>,
    link: Arc<Mutex<ArrayLink>>,
    record: Arc<Mutex<RecordWriter>>,
}

impl MediaPipeline for ArrayPipeline {
    fn encode_prompt(&mut self, _: &str) -> Result<Tensor, Diagnostic> {
        Err(Diagnostic::error(&T0092, "array programs have no text encoder"))
    }

    fn encode_context(&mut self, _: u32, _: &Tensors, _: bool) -> Result<Tensor, Diagnostic> {
        Err(Diagnostic::error(&T0092, "array programs have no context frames"))
    }

    fn deliver_chunk(&mut self, chunk: u32, returned: &Tensors, _: bool) -> Result<Delivery, Diagnostic> {
        let (due, op_times) = {
            let mut calls = self.calls.lock();
            (calls.due.pop_front(), calls.op_times.remove(&chunk).unwrap_or_default())
        };
        let Some((number, phase)) = due else {
            return Err(Diagnostic::error(&T0092, format!("call {chunk} was not requested")));
        };
        let programs = &self.plan.programs;
        let program = programs.get(phase.strip_prefix(PHASE_PREFIX).unwrap_or(&phase))?;
        let arrays = program.assemble_outputs(returned, &programs.output_groups)?;
        let tensors =
            arrays.iter().map(|(name, array)| Tensor::from_f32(name, array.shape(), array.values()));
        let outputs = Tensors(tensors.collect::<Result<_, _>>()?);
        let bytes: Vec<u8> = outputs.0.iter().flat_map(|tensor| tensor.data()).copied().collect();
        let count = outputs.0.len() as u32;
        send_outputs(&self.link, ArrayOutputs { number, op_times, outputs })?;
        lock_record(&self.record).record_delivery(chunk, count, &bytes, None)?;
        Ok(Delivery { frames: count, ids: Vec::new() })
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        let mut queue = self.calls.lock();
        if let Some(d) = queue.failure.take() {
            return Err(d);
        }
        let complete = queue.have_ended;
        lock_record(&self.record).write_end(None, complete)
    }
}
