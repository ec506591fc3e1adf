//! Writes a run directory: its plan and the first line of its record before the run, and after it
//! the end of a record that the leader could not close, the report and the trace.

use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use tessera_base::Diagnostic;
use tessera_models::PixelDecoder;
use tessera_report::overlap::OverlapStats;
use tessera_report::raw_video::RawFormat;
use tessera_report::record::{
    RankRole, RecordLine, RunDevice, RunEnd, RunEvent, RunHost, RunKind, RunOutput, RunRecord, RunStart,
    RunStatus, SCHEMA, ScheduledPrompt,
};
use tessera_report::slow_rank::SlowRank;
use tessera_report::timeline::TimelineSpan;
use tessera_runtime::tripwire::T0765;
use tessera_runtime::{Failure, FailureClass};

use crate::clock::format_utc;
use crate::files::{StagedFolder, lost_output, write_error};
use crate::frame_writer::{CLIP_FILE, FRAMES_FOLDER};
use crate::html_writer;
use crate::latents_file::LATENTS_FILE;
use crate::machine_shape::describe_machine;
use crate::noise_file::NoiseFile;
use crate::plan::Plan;
use crate::rank_config::{RankConfig, checks_output};
use crate::rank_launch::exit_status;
use crate::record::{DROPPED_EVENT, RECORD_FILE, failure_cause};
use crate::run_dir::read_record;
use crate::run_settings::build_id;
use crate::stream_options::{OutputOptions, StreamOptions, StreamReport};

/// Event of a run in performance mode; its detail says which gates allowed the run, or who overrode them.
const PERFORMANCE_EVENT: &str = "performance mode";

/// Event of a run whose noise came from a file; its detail names the file and its digest.
const NOISE_EVENT: &str = "given noise";

/// Writes the run directory with its plan and the first line of its record, atomically. `weights` is
/// the digest of all weights.
pub(crate) fn write_run_dir(
    plan: &Plan,
    orders: &RankConfig,
    options: &StreamOptions,
    weights: String,
) -> Result<(), Diagnostic> {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    write_run_dir_with(
        plan,
        options,
        RunStart {
            started_at: format_utc(started),
            weights,
            host: Some(Box::new(RunHost {
                build: build_id(),
                machine_shape: describe_machine(options.device),
            })),
            ..start_line(plan, orders, options)
        },
    )
}

/// Like [`write_run_dir`], with a given first line.
pub(crate) fn write_run_dir_with(
    plan: &Plan,
    options: &StreamOptions,
    start: RunStart,
) -> Result<(), Diagnostic> {
    options.check_out()?;
    let mut folder = StagedFolder::create_over(&options.out)?;
    let mut lines = RecordLine::Start(Box::new(start)).to_json();
    if let Some(detail) = &options.performance {
        lines += &RecordLine::Event(RunEvent {
            at_ns: 0,
            event: PERFORMANCE_EVENT.into(),
            detail: detail.clone(),
            startup: None,
            memory: None,
        })
        .to_json();
    }
    if let Some(path) = &options.noise {
        let detail = NoiseFile::open(path, &plan.video)?.describe();
        let event = NOISE_EVENT.into();
        lines +=
            &RecordLine::Event(RunEvent { at_ns: 0, event, detail, startup: None, memory: None }).to_json();
    }
    folder.write(RECORD_FILE, lines.as_bytes())?;
    plan.write_into(&mut folder, "plan/")?;
    folder.commit()
}

/// Builds the first line of a record, without the start time.
pub(crate) fn start_line(plan: &Plan, orders: &RankConfig, options: &StreamOptions) -> RunStart {
    let stream = &plan.video.stream;
    let sealed = &plan.sealed;
    RunStart {
        schema: SCHEMA,
        tessera: env!("CARGO_PKG_VERSION").into(),
        host: None,
        plan: sealed.digest_hex(),
        model: plan.model.clone(),
        generates: RunKind::Video,
        mesh: sealed.mesh().to_string(),
        strategy: plan.mapping.strategy_label(),
        numerics: plan.mapping.numerics.name().into(),
        weights: String::new(),
        dtype: plan.mapping.dtype.name().into(),
        cache: if stream.recompute { "recompute" } else { "resident" }.into(),
        topology: plan.mapping.topology.name().into(),
        seed: options.seed,
        prompts: orders
            .prompts
            .iter()
            .map(|(chunk, text)| ScheduledPrompt { chunk: *chunk, text: text.clone(), kind: None })
            .collect(),
        chunks: Some(options.chunks),
        fps: stream.fps,
        width: stream.width as u32,
        height: stream.height as u32,
        steps: stream.steps.len() as u32,
        command: options.command.clone(),
        started_at: String::new(),
        status: RunStatus::Running,
        ranks: sealed
            .roles()
            .iter()
            .flat_map(|r| r.ranks.iter().map(|rank| RankRole { rank: rank.0, role: r.role.clone() }))
            .collect(),
        device: options.device,
        machine: None,
        outputs: list_outputs(plan, options),
    }
}

/// Lists where the frames and latents of a run go; a simulated run has none.
fn list_outputs(plan: &Plan, options: &StreamOptions) -> Vec<RunOutput> {
    if options.device == RunDevice::Sim {
        return Vec::new();
    }
    let OutputOptions { no_clip, png, latents, pipes } = &options.outputs;
    let decodes = plan.video.stream.decoder != PixelDecoder::None;
    let files = [
        ("clip", CLIP_FILE, decodes && !no_clip),
        ("latents", LATENTS_FILE, *latents || !decodes),
        ("png", FRAMES_FOLDER, *png),
    ];
    let files = files.into_iter().filter(|(.., written)| *written);
    let files = files.map(|(kind, to, _)| RunOutput { kind: kind.into(), to: to.into() });
    let pipes = pipes.iter().map(|pipe| {
        let kind = match pipe.format {
            RawFormat::Rgb24 => "raw",
            RawFormat::Y4m => "y4m",
        };
        RunOutput { kind: kind.into(), to: pipe.to.to_text() }
    });
    files.chain(pipes).collect()
}

/// Closes the record if the leader could not, and writes the report and the trace. If the run has
/// not failed, the first output file that is missing or cannot be written is its failure.
pub(crate) fn close_run(
    plan: &Plan,
    options: &StreamOptions,
    failure: Option<Failure>,
    interrupted: bool,
) -> StreamReport {
    close_run_with_ops(plan, options, failure, interrupted, Vec::new())
}

/// Like [`close_run`], with ops to show in the trace.
pub(crate) fn close_run_with_ops(
    plan: &Plan,
    options: &StreamOptions,
    failure: Option<Failure>,
    interrupted: bool,
    ops: Vec<TimelineSpan>,
) -> StreamReport {
    let (record, mut written) = close_record(&options.out, failure.as_ref());
    if let Some(record) = &record {
        written = written
            .and(html_writer::write_reports(plan, record, &options.out, ops))
            .and(check_frames_file(record, options));
    }
    let written = written.err().filter(|d| d.code != &T0765 || checks_output(options.drill.as_ref()));
    let failure = failure.or_else(|| Some(Failure::from_diagnostic(FailureClass::Output, None, &written?)));
    let events = record.as_ref().map_or(&[][..], |r| &r.events);
    let dropped = events.iter().filter(|e| e.event == DROPPED_EVENT).count() as u32;
    let ratios = record.iter().flat_map(|r| r.chunks.iter().filter_map(|c| c.decoder_psnr_db));
    let decoder_psnr_db = ratios.reduce(f64::min);
    let overlap = record.as_ref().and_then(|r| OverlapStats::from_chunks(&r.chunks));
    let slow_rank = record.as_ref().and_then(|r| SlowRank::from_chunks(&r.start.ranks, &r.chunks));
    let machine = record.as_ref().and_then(|r| r.start.machine.clone());
    let weights = record.as_ref().map(|r| r.start.weights.clone()).filter(|w| !w.is_empty());
    let end = record.and_then(|r| r.end);
    let (chunks, frames, fps) = end.as_ref().map_or((0, 0, 0.0), |e| (e.chunks, e.frames, e.fps));
    let exit_code = exit_status(failure.as_ref(), interrupted);
    let golden = end.filter(|e| !e.golden.is_empty() && e.chunks > 0).map(|e| e.golden);
    let out = options.out.clone();
    StreamReport {
        exit_code,
        failure,
        interrupted,
        chunks,
        dropped,
        frames,
        fps,
        golden,
        weights,
        decoder_psnr_db,
        overlap,
        slow_rank,
        machine,
        out,
    }
}

/// Reads the record of a run that is over, and adds the end if its leader wrote none. Returns the record, and why it
/// could not be read or closed.
pub(crate) fn close_record(
    out: &Path,
    failure: Option<&Failure>,
) -> (Option<RunRecord>, Result<(), Diagnostic>) {
    let path = out.join(RECORD_FILE);
    let mut record = match read_record(&path) {
        Some(Ok(record)) => record,
        Some(Err(d)) => return (None, Err(d)),
        None => return (None, Err(lost_output(&path, "no such file"))),
    };
    let mut written = Ok(());
    if record.end.is_none() {
        let end = missing_end_line(&record, failure);
        written = append_line(&path, record.truncated, &RecordLine::End(end.clone()));
        record.end = Some(end);
    }
    (Some(record), written)
}

/// Builds the end line of a record whose leader wrote none.
fn missing_end_line(record: &RunRecord, failure: Option<&Failure>) -> RunEnd {
    let (chunks, frames) = (record.chunk_count(), record.frame_count());
    let begun = record.chunks.first().map_or(0, |c| c.start_ns);
    let ended = record.chunks.last().map_or(0, |c| c.start_ns + c.wall_ns);
    let wall_ns = ended.saturating_sub(begun);
    RunEnd {
        status: if failure.is_some() { RunStatus::Failed } else { RunStatus::Interrupted },
        cause: failure.map(failure_cause),
        chunks,
        frames,
        wall_ns,
        fps: if wall_ns == 0 { 0.0 } else { frames as f64 / (wall_ns as f64 / 1e9) },
        output_complete: false,
        // The hash was lost with the leader.
        golden: String::new(),
    }
}

/// Checks that a run that delivered chunks has a file with their frames or latents.
fn check_frames_file(record: &RunRecord, options: &StreamOptions) -> Result<(), Diagnostic> {
    let files = [CLIP_FILE, LATENTS_FILE].map(|name| options.out.join(name));
    let computes = record.start.device != RunDevice::Sim;
    // A stream that the user wants without a clip has frames and needs no file of them.
    let is_wanted = !options.outputs.no_clip || options.outputs.latents || record.frame_count() == 0;
    if !computes || !is_wanted || record.chunk_count() == 0 || files.iter().any(|f| f.is_file()) {
        return Ok(());
    }
    Err(lost_output(&files[usize::from(record.frame_count() == 0)], "no such file"))
}

/// Appends a line, on a new line after a truncated one.
fn append_line(path: &Path, truncated: bool, line: &RecordLine) -> Result<(), Diagnostic> {
    let text = if truncated { format!("\n{}", line.to_json()) } else { line.to_json() };
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::OpenOptions::new().append(true).open(path)?;
        std::io::Write::write_all(&mut file, text.as_bytes())
    };
    write().map_err(|e| write_error(path, &e))
}
