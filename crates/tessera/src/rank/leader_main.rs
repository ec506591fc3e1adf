//! Runs the leader: rank 0, which takes requests, encodes, decodes and writes the record.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_mesh::Rank;
use tessera_runtime::driver::{LeaderParts, MediaPipelineFactory, run_leader};
use tessera_runtime::engine::MediaPipeline;
use tessera_runtime::leader::RecordEntry;
use tessera_runtime::{Failure, FailureClass};

use super::chunk_requests::{ChunkRequests, DecidedSettings, LeaderInputs};
use super::context::{LeaderEvent, LeaderEventHandler, RankContext, RankSetup, report_refusal};
use super::rank_plan::RankPlan;
use crate::communicators::EndpointSources;
use crate::faults::DrillMediaPipeline;
use crate::frame_writer::OpenPipes;
use crate::media_pipeline::{RunMediaPipeline, lock_record};
use crate::parity::{ExecutorState, ModelFacts, rank_parity};
use crate::plan::Plan;
use crate::prompt_rows::PromptRows;
use crate::rank_config::{RankConfig, RankSettings, first_diagnostic};
use crate::record::RecordWriter;
use crate::stream_control::ChangeIntake;
use crate::video_feed::FeedReader;

/// Runs the leader of a stream of video, which writes the record.
pub(crate) fn run_as_leader(
    arrive: impl FnOnce() -> Result<RankSetup<Plan>, Diagnostics>,
    orders: &RankConfig,
) -> Result<Option<Failure>, Diagnostics> {
    let record = Arc::new(Mutex::new(RecordWriter::open(&orders.out).map_err(|d| vec![d])?));
    let build = |seat: LeaderSeat<'_, Plan>| build_leader_parts(seat, orders, &record);
    let is_complete = |record: &RecordWriter| record.settled_requests() == orders.chunks;
    run_leader_rank(arrive, &orders.settings(), &record, build, is_complete)
}

/// What the parts of a leader are built from.
pub(crate) struct LeaderSeat<'a, P> {
    pub(crate) session: u64,
    pub(crate) communicators: EndpointSources,
    pub(crate) frame_pipes: Vec<OwnedFd>,
    pub(crate) context: &'a RankContext<P>,
    pub(crate) on_event: Option<LeaderEventHandler>,
}

/// Runs a leader of any kind of session to its end and closes its record. `is_complete` tells whether the
/// record holds all that was requested.
pub(crate) fn run_leader_rank<P: RankPlan>(
    arrive: impl FnOnce() -> Result<RankSetup<P>, Diagnostics>,
    settings: &RankSettings<'_>,
    record: &Mutex<RecordWriter>,
    build: impl FnOnce(LeaderSeat<'_, P>) -> Result<LeaderParts, Diagnostics>,
    is_complete: impl FnOnce(&RecordWriter) -> bool,
) -> Result<Option<Failure>, Diagnostics> {
    let setup = arrive().map(|arrival| {
        let RankSetup { joined, communicators, mut context, frame_pipes, interrupt, on_event } = arrival;
        let session = joined.welcome.session;
        context.apply_settings(settings, Rank(0));
        context.begin_flight(settings.out, session, Rank(0));
        lock_record(record).set_plan(context.plan.sealed());
        let parts = build(LeaderSeat { session, communicators, frame_pipes, context: &context, on_event });
        (joined, context, parts.map(|parts| LeaderParts { stop: interrupt, ..parts }))
    });
    let outcome = match setup {
        Ok((joined, common, Ok(parts))) => {
            let outcome = run_leader(joined, parts);
            common.end_flight(&outcome);
            outcome
        }
        Ok((mut joined, common, Err(ds))) => {
            let outcome = report_refusal(&mut joined, ds).map(Some);
            common.end_flight(&outcome);
            outcome
        }
        Err(ds) => Err(ds),
    };
    let failure = match &outcome {
        Ok(f) => f.clone(),
        Err(ds) => ds.first().map(|d| Failure::from_diagnostic(FailureClass::Preflight, Some(0), d)),
    };
    let mut record = lock_record(record);
    let complete = is_complete(&record);
    // A successful run closed the record together with its output. If closing fails here, the
    // launcher finds a record without an end and closes it.
    let _ = record.write_end(failure.as_ref(), complete);
    outcome
}

fn build_leader_parts(
    seat: LeaderSeat<'_, Plan>,
    orders: &RankConfig,
    record: &Arc<Mutex<RecordWriter>>,
) -> Result<LeaderParts, Diagnostics> {
    let LeaderSeat { session, communicators, mut frame_pipes, context, on_event } = seat;
    let model = orders.open_model(&context.plan).map_err(|d| vec![d])?;
    let parity = rank_parity(
        (&context.plan.sealed, &context.plan.mapping),
        &ModelFacts::read(&model, &model.open_weights()?).map_err(|d| vec![d])?,
        &orders.delays,
        &ExecutorState::from_request(&context.plan.sealed, orders.gpus.is_some(), &context.tripwires),
        context.peers,
    );
    let inputs = take_inputs(orders, &context.plan, &mut frame_pipes).map_err(|d| vec![d])?;
    let (decided, drill) = (DecidedSettings::default(), context.fault_injector.clone());
    let requests = ChunkRequests::new(orders, &context.plan, drill, inputs, decided.clone());
    let requests = Box::new(requests.map_err(|d| vec![d])?);
    Ok(LeaderParts {
        config: context.leader_config(session, parity),
        local_rank: context.local_rank(orders.weights_place(), orders.threads, communicators),
        topology: context.topology,
        media: media_factory(context, orders, frame_pipes, record),
        requests,
        record: entry_recorder(decided, record, on_event),
        stop: None,
        flight: context.flight_sink(),
        interceptor: context.build_interceptor(Rank(0)).map_err(|d| vec![d])?,
    })
}

/// Takes the sockets that the launching process passes behind the pipes: that of changes, and then that of the input video.
fn take_inputs(orders: &RankConfig, plan: &Plan, fds: &mut Vec<OwnedFd>) -> Result<LeaderInputs, Diagnostic> {
    let video = if orders.is_fed() { fds.pop() } else { None };
    let changes = if orders.is_steered { fds.pop() } else { None };
    let frame_bytes = (plan.video.stream.width * plan.video.stream.height * 3) as usize;
    Ok(LeaderInputs {
        changes: changes.map(ChangeIntake::from_fd).transpose()?,
        video: video.map(|fd| FeedReader::from_fd(fd, frame_bytes)),
    })
}

/// Returns the factory of the media pipeline, which is built on the media thread.
fn media_factory(
    context: &RankContext<Plan>,
    orders: &RankConfig,
    fds: Vec<OwnedFd>,
    record: &Arc<Mutex<RecordWriter>>,
) -> MediaPipelineFactory {
    let (plan, orders, record) = (Arc::clone(&context.plan), orders.clone(), Arc::clone(record));
    let drill = context.fault_injector.clone();
    // A reader that stalls should be named before the media pipeline counts as stalled.
    let pipes = OpenPipes { fds, patience: Duration::from_nanos(context.limits.media_ns / 4 * 3) };
    Box::new(move || {
        let model = orders.open_model(&plan)?;
        let text = model.open_text_encoder().map_err(first_diagnostic)?;
        let text = PromptRows::load_at(&plan, text, orders.leader.text)?;
        let vae = model.open_vae_weights().map_err(first_diagnostic)?;
        let pipeline = RunMediaPipeline::new(&plan, text, vae, &orders, pipes, record)?;
        let pipeline: Box<dyn MediaPipeline> = Box::new(pipeline);
        Ok(match drill {
            None => pipeline,
            Some(injector) => Box::new(DrillMediaPipeline::new(pipeline, injector)),
        })
    })
}

/// Returns the writer of the run's record, which first passes chunks and failures to `on_event`.
fn entry_recorder(
    decided: DecidedSettings,
    record: &Arc<Mutex<RecordWriter>>,
    mut on_event: Option<LeaderEventHandler>,
) -> Box<dyn FnMut(&RecordEntry)> {
    let record = Arc::clone(record);
    Box::new(move |entry: &RecordEntry| {
        if let Some(on_event) = &mut on_event {
            match entry {
                RecordEntry::Progress(p) => on_event(LeaderEvent::Chunk(p)),
                RecordEntry::Failed(f) => on_event(LeaderEvent::Failed(f)),
                _ => {}
            }
        }
        let mut record = lock_record(&record);
        // An error here also makes the delivery fail, and the media pipeline reports it there.
        let _ = record.record_entry(entry);
        if let RecordEntry::Call(call) = entry {
            let settings = call.request.filter(|_| !call.discarded).and_then(|r| decided.take(r));
            record.record_call(call, settings.as_ref(), None);
        }
    })
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use tessera_plan::Mapping;
    use tessera_runtime::driver::JoinedRank;

    use super::*;
    use crate::model::{Model, Overrides};
    use crate::plan::plan_model;
    use crate::run_dir_writer::write_run_dir;
    use crate::stream_options::StreamOptions;

    #[test]
    fn a_leader_that_cannot_begin_marks_it() {
        let dir = tempfile::tempdir().unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
        let model = Model::open(&demo, &Overrides::default()).unwrap();
        let plan = plan_model(&model.video, &model.name, "", &Mapping::default()).unwrap();
        let options = StreamOptions { chunks: 1, out: dir.path().join("out"), ..StreamOptions::default() };
        let mut orders = RankConfig::from_options(&plan, &model, &options, 1).unwrap();
        write_run_dir(&plan, &orders, &options, String::new()).unwrap();
        // The model folder disappears after the ranks have connected.
        orders.model = dir.path().join("gone");
        let welcome = tessera_runtime::wire::Welcome {
            rank: 0,
            world_size: 1,
            session: 7,
            control_sockets: 0,
            extra_fds: 0,
            payload: Vec::new(),
        };
        let arrival = RankSetup {
            joined: JoinedRank::from_links(welcome, Vec::new(), Vec::new()),
            communicators: Vec::new().into(),
            context: RankContext::new(Arc::new(plan), orders.delays),
            frame_pipes: Vec::new(),
            interrupt: None,
            on_event: None,
        };
        let refused = run_as_leader(|| Ok(arrival), &orders).unwrap_err();
        assert_eq!(refused[0].code.id, "T0010");
        let flight = std::fs::read_to_string(options.out.join("flight/rank-0.jsonl")).unwrap();
        assert!(flight.contains("failed") && flight.contains("T0010") && flight.contains("exit"), "{flight}");
    }
}
