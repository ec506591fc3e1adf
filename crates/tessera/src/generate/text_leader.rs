//! Runs the leader of a language model: rank 0, which schedules the texts and writes the record.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::Failure;
use tessera_runtime::driver::{CallRequest, LeaderParts};
use tessera_runtime::engine::{Delivery, MediaPipeline};
use tessera_runtime::leader::RecordEntry;
use tessera_runtime::wire::{Tensor, Tensors};

use super::LanguagePlan;
use super::expert_counts::ExpertCountLog;
use super::generate_config::GenerateConfig;
use super::language_rank::read_facts;
use super::language_weights::LanguageWeights;
use super::scheduler::TokenScheduler;
use crate::codes::T0087;
use crate::media_pipeline::lock_record;
use crate::parity::{ExecutorState, rank_parity};
use crate::rank::{LeaderSeat, RankSetup, run_leader_rank};
use crate::record::{ChunkSettings, RecordWriter};
use crate::synthetic_delays::SyntheticDelays;

/// Runs the leader of a language model, which writes the record.
pub(crate) fn run_text_leader(
    arrive: impl FnOnce() -> Result<RankSetup<LanguagePlan>, Diagnostics>,
    config: &GenerateConfig,
) -> Result<Option<Failure>, Diagnostics> {
    let record = Arc::new(Mutex::new(RecordWriter::open(&config.out).map_err(|d| vec![d])?));
    let texts = Arc::new(SharedTexts::default());
    let build = |seat: LeaderSeat<'_, LanguagePlan>| build_parts(seat, config, &record, &texts);
    let is_complete = |_: &RecordWriter| texts.lock().have_ended;
    run_leader_rank(arrive, &config.settings(), &record, build, is_complete)
}

fn build_parts(
    seat: LeaderSeat<'_, LanguagePlan>,
    config: &GenerateConfig,
    record: &Arc<Mutex<RecordWriter>>,
    texts: &Arc<SharedTexts>,
) -> Result<LeaderParts, Diagnostics> {
    let LeaderSeat { session, communicators, context, .. } = seat;
    let plan = &context.plan;
    let one = |d: Diagnostic| vec![d];
    let weights = LanguageWeights::open(&config.weights, plan)?;
    let parity = rank_parity(
        (&plan.sealed, &plan.mapping),
        &read_facts(&weights, &config.weights.dir).map_err(one)?,
        &SyntheticDelays::default(),
        &ExecutorState::from_request(&plan.sealed, config.gpus.is_some(), &context.tripwires),
        context.peers,
    );
    let mut scheduler = TokenScheduler::new(plan, &config.end_ids);
    scheduler.open(&config.requests).map_err(one)?;
    texts.lock().scheduler = Some(scheduler);
    let (requests, deliveries) = (Arc::clone(texts), Arc::clone(texts));
    let (writer, calls) = (Arc::clone(record), Arc::clone(record));
    let experts = ExpertCountLog::create(plan, &config.out).map_err(one)?;
    Ok(LeaderParts {
        config: context.leader_config(session, parity),
        local_rank: context.local_rank(config.weights.clone(), config.threads, communicators),
        topology: context.topology,
        media: Box::new(move || {
            let pipeline: Box<dyn MediaPipeline> =
                Box::new(TextPipeline { texts: deliveries, record: writer, experts });
            Ok(pipeline)
        }),
        requests: Box::new(std::iter::from_fn(move || requests.wait_for_call())),
        record: Box::new(move |entry: &RecordEntry| {
            let mut record = lock_record(&calls);
            // An error here also makes the delivery fail, and the pipeline reports it there.
            let _ = record.record_entry(entry);
            if let RecordEntry::Call(call) = entry {
                let settings = ChunkSettings::default();
                record.record_call(call, Some(&settings), None);
            }
        }),
        stop: None,
        flight: context.flight_sink(),
        interceptor: context.build_interceptor(tessera_mesh::Rank(0)).map_err(one)?,
    })
}

/// The texts of a run, between the thread that requests calls and the one that takes their outputs: the ids of a
/// call are part of the next one.
#[derive(Default)]
struct SharedTexts {
    state: Mutex<TextState>,
    changed: Condvar,
}

#[derive(Default)]
struct TextState {
    scheduler: Option<TokenScheduler>,
    /// Why no further call can be requested.
    failure: Option<Diagnostic>,
    have_ended: bool,
}

impl SharedTexts {
    fn lock(&self) -> MutexGuard<'_, TextState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for the outputs of the call in flight, and returns the next one; `None` ends the run.
    fn wait_for_call(&self) -> Option<CallRequest> {
        let mut state = self.lock();
        while state.scheduler.as_ref().is_some_and(TokenScheduler::is_in_flight) {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        match state.scheduler.as_mut()?.next_call() {
            Ok(Some(request)) => Some(CallRequest::Tokens(Box::new(request))),
            Ok(None) => {
                state.have_ended = true;
                None
            }
            Err(d) => {
                state.failure = Some(d);
                None
            }
        }
    }
}

/// Takes the outputs of calls and closes the record. A language model has no media.
struct TextPipeline {
    texts: Arc<SharedTexts>,
    record: Arc<Mutex<RecordWriter>>,
    /// The file for the counts of experts, if the plan returns any.
    experts: Option<ExpertCountLog>,
}

impl MediaPipeline for TextPipeline {
    fn encode_prompt(&mut self, _: &str) -> Result<Tensor, Diagnostic> {
        Err(Diagnostic::error(&T0087, "a language model has no text encoder"))
    }

    fn encode_context(&mut self, _: u32, _: &Tensors, _: bool) -> Result<Tensor, Diagnostic> {
        Err(Diagnostic::error(&T0087, "a language model has no context frames"))
    }

    fn deliver_chunk(&mut self, chunk: u32, outputs: &Tensors, _: bool) -> Result<Delivery, Diagnostic> {
        let mut state = self.texts.lock();
        let scheduler = state.scheduler.as_mut();
        let ids = match scheduler {
            Some(scheduler) => scheduler.take_outputs(outputs)?,
            None => return Err(Diagnostic::error(&T0087, "no text was requested")),
        };
        drop(state);
        if let Some(log) = &mut self.experts {
            log.write_call(chunk, outputs)?;
        }
        let bytes: Vec<u8> = ids.iter().flat_map(|event| event.id.to_le_bytes()).collect();
        lock_record(&self.record).record_delivery(chunk, ids.len() as u32, &bytes, None)?;
        self.texts.changed.notify_all();
        Ok(Delivery { frames: ids.len() as u32, ids })
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        let mut state = self.texts.lock();
        if let Some(d) = state.failure.take() {
            return Err(d);
        }
        let complete = state.have_ended;
        lock_record(&self.record).write_end(None, complete)
    }
}
