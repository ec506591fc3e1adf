//! Runs a sealed plan as processes on this host and writes the run directory.

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cpu::CpuBackend;
use tessera_cuda::CudaBackend;
use tessera_mesh::Rank;
use tessera_models::PixelDecoder;
use tessera_report::overlap::OverlapStats;
pub use tessera_report::record::RunDevice;
use tessera_report::record::{
    RankRole, RecordLine, RecordReader, RunEnd, RunRecord, RunStart, RunStatus, SCHEMA, ScheduledPrompt,
};
use tessera_report::timeline::TimelineSpan;
use tessera_runtime::driver::{LaunchEvent, LaunchSpec, StopHandle, launch_ranks};
use tessera_runtime::{Failure, FailureClass, Limits};

use crate::cuda::{self, GpuRankConfig};
use crate::drill::DrillConfig;
use crate::engine::LEADER_PHASES;
use crate::files::{StagedFolder, refuse_existing, write_error};
use crate::gpus::GpuDiscovery;
use crate::media_pipeline::new_clip_stream;
use crate::model::T0016;
use crate::plan::Plan;
use crate::rank::{RankConfig, control_topology, first_diagnostic, stream_spec};
use crate::record::{DROPPED_EVENT, RECORD_FILE, failure_cause};
use crate::synthetic_delays::SyntheticDelays;
use crate::{DtypePolicy, Model, communicators, flight, html_writer, preflight_reload};

/// The mesh has more ranks than this machine has cores.
pub static T0015: Code = Code {
    id: "T0015",
    title: "mesh is larger than this machine",
    page: "Each rank is a process that computes; if there are more ranks than cores, ranks share cores and run slower than fewer would. \
A leader outside the mesh only encodes and decodes and is not counted. Use a smaller mesh, or pass --oversubscribe, for instance to try a plan for another machine.",
};
/// Options that contradict each other.
pub static T0018: Code = Code {
    id: "T0018",
    title: "stream options contradict each other",
    page: "The options request something impossible: no chunks at all, a chunk that is both cut and flushed, or a change at a chunk that the stream never \
reaches. Chunks are counted from 0; a change at chunk N takes effect when chunk N begins.",
};

/// Maximum number of chunks that the report and the trace of a run cover: the first and the last
/// chunks.
const KEPT_CHUNKS: usize = 1_000;
/// Maximum length of a record line in bytes; the ranks of the largest mesh take a tenth of it.
const MAX_LINE_BYTES: u64 = 64 << 20;

/// The options of a stream.
#[derive(Debug, Clone, Default)]
pub struct StreamOptions {
    /// Number of chunks to generate.
    pub chunks: u32,
    /// Prompt from chunk 0 until the first of `prompts_at`.
    pub prompt: String,
    /// Seed from chunk 0 until the first of `seeds_at`.
    pub seed: u64,
    /// Later prompts by chunk.
    pub prompts_at: Vec<(u32, String)>,
    /// Later seeds by chunk.
    pub seeds_at: Vec<(u32, u64)>,
    /// Chunks before which the scene is cut.
    pub cuts_at: Vec<u32>,
    /// Chunks before which the scene is cut at once: undelivered earlier requests are discarded.
    pub flushes_at: Vec<u32>,
    /// Weight folders that every rank loads before a chunk; that chunk opens a scene.
    pub weights_at: Vec<(u32, PathBuf)>,
    /// Run directory; it must not exist.
    pub out: PathBuf,
    /// Whether to write every frame as a PNG too.
    pub png: bool,
    /// Whether to run more ranks than cores.
    pub oversubscribe: bool,
    /// Synthetic delays, for measuring overlap.
    pub delays: SyntheticDelays,
    /// Device of the mesh ranks: CPUs or GPUs. A simulated run ignores it.
    pub device: RunDevice,
    /// The fault that a drill injects.
    pub drill: Option<DrillConfig>,
    /// The command line, for the record.
    pub command: Vec<String>,
}

/// An event of a running stream.
#[derive(Debug, Clone)]
pub enum StreamEvent {
    /// All ranks were started.
    Started {
        /// Process ids in order of rank.
        pids: Vec<u32>,
    },
    /// A chunk is on disk.
    Chunk(ChunkProgress),
    /// No process of the run is left; the run directory is closed next.
    Exited,
}

/// The progress of a stream after a delivered chunk.
#[derive(Debug, Clone)]
pub struct ChunkProgress {
    /// Index of the chunk, from 0.
    pub chunk: u32,
    /// Number of requested chunks.
    pub chunks: u32,
    /// Frames on disk so far.
    pub frames: u64,
    /// Frames per second since the first delivery; for the first chunk, since the ranks started.
    pub fps: f64,
    /// Name and duration in nanoseconds of each phase on the first rank.
    pub phases: Vec<(String, u64)>,
    /// Requests queued at the leader.
    pub queued_in: u32,
    /// Finished chunks queued for delivery.
    pub queued_out: u32,
}

/// The outcome of a stream.
#[derive(Debug, Clone)]
pub struct StreamReport {
    /// Exit status of the command.
    pub exit_code: u8,
    /// The failure, if the run failed.
    pub failure: Option<Failure>,
    /// Whether the run was interrupted.
    pub interrupted: bool,
    /// Number of chunks written to disk.
    pub chunks: u32,
    /// Requested chunks that were dropped for a cut.
    pub dropped: u32,
    /// Number of pixel frames written to disk.
    pub frames: u64,
    /// Frames per second from the first call to the last delivery.
    pub fps: f64,
    /// Hash of all latents, if any chunk was delivered.
    pub golden: Option<String>,
    /// Overlap of the run's stages; `None` for a run of one chunk.
    pub overlap: Option<OverlapStats>,
    /// Description of the simulated machine; `None` if the ranks ran on this host.
    pub machine: Option<String>,
    /// Directory that holds the output of the run.
    pub out: PathBuf,
}

/// Runs a plan and blocks until no process is left. `argv` is the command line of a rank's process,
/// which must call [`crate::rank_main`].
///
/// # Errors
/// Returns what is wrong before anything was started or written. Later failures are in the report.
pub fn run(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    argv: Vec<String>,
    interrupt: &StopHandle,
    on_event: &mut dyn FnMut(StreamEvent),
) -> Result<StreamReport, Diagnostics> {
    let ranks = plan.sealed.mesh().world_size();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let computing = plan.sealed.mesh().mesh_size();
    let gpus = find_gpus(plan, options, computing as usize)?;
    check_stream(plan, model, options, computing, cores)?;
    let on_gpus = gpus
        .as_ref()
        .map(|g| cuda::create_communicator_ids(g, &plan.sealed))
        .transpose()
        .map_err(|d| vec![d])?;
    let on_gpus = on_gpus.map(|communicator_ids| GpuRankConfig { communicator_ids, first_rank_of_host: 0 });
    // GPU ranks communicate on the GPUs and need no CPU communicators.
    let specs = if on_gpus.is_some() { Vec::new() } else { communicators::communicator_specs(&plan.sealed) };
    let arenas: Vec<Arc<OwnedFd>> =
        communicators::create_arenas(&specs).map_err(|d| vec![d])?.into_iter().map(Arc::new).collect();
    let threads = (cores / computing as usize).max(1);
    let orders = build_rank_config(plan, model, options, threads).map_err(|d| vec![d])?;
    let orders = RankConfig { gpus: on_gpus, ..orders };
    let payload = serde_json::to_vec(&orders).map_err(|e| {
        vec![Diagnostic::error(&T0018, format!("the rank configuration cannot be serialised: {e}"))]
    })?;
    write_run_dir(plan, &orders, options).map_err(|d| vec![d])?;
    let spec = LaunchSpec {
        argv,
        rank_count: ranks,
        topology: control_topology(plan),
        session: new_session_id(plan),
        extra_fds: (0..ranks)
            .map(|r| {
                communicators::indices_of_rank(&specs, Rank(r)).map(|i| Arc::clone(&arenas[i])).collect()
            })
            .collect(),
        payload,
        env: if gpus.is_some() { cuda::missing_env() } else { Vec::new() },
        limits: options.drill.as_ref().map_or_else(Limits::default, |d| d.limits.clone()),
    };
    let mut tally = ProgressTally::new(options.chunks);
    let launched = launch_ranks(&spec, interrupt, &mut |event| match event {
        LaunchEvent::Started(pids) => on_event(StreamEvent::Started { pids: pids.to_vec() }),
        LaunchEvent::Progress(p) => on_event(StreamEvent::Chunk(tally.count_chunk(p))),
    });
    on_event(StreamEvent::Exited);
    let (failure, interrupted) = match launched {
        Ok(report) => {
            flight::write_exits(&options.out, &report.exits);
            (report.failure, report.interrupted)
        }
        Err(ds) => {
            let d =
                ds.into_iter().next().unwrap_or_else(|| Diagnostic::error(&T0018, "the launch was refused"));
            (Some(Failure::from_diagnostic(FailureClass::Preflight, None, &d)), false)
        }
    };
    Ok(close_run(plan, options, failure, interrupted))
}

pub(crate) struct ProgressTally {
    begun: Instant,
    /// Time of the first delivery, and its number of frames.
    first: Option<(Instant, u64)>,
    frames: u64,
    chunks: u32,
}

impl ProgressTally {
    pub(crate) fn new(chunks: u32) -> ProgressTally {
        ProgressTally { begun: Instant::now(), first: None, frames: 0, chunks }
    }

    pub(crate) fn count_chunk(&mut self, p: &tessera_runtime::wire::Progress) -> ChunkProgress {
        self.frames += u64::from(p.frames);
        let now = Instant::now();
        let (since, before) = self.first.map_or((self.begun, 0), |f| f);
        self.first.get_or_insert((now, self.frames));
        let seconds = now.duration_since(since).as_secs_f64();
        ChunkProgress {
            chunk: p.chunk,
            chunks: self.chunks,
            frames: self.frames,
            fps: if seconds > 0.0 { (self.frames - before) as f64 / seconds } else { 0.0 },
            phases: p.phases.clone(),
            queued_in: p.queued_in,
            queued_out: p.queued_out,
        }
    }
}

/// Returns the GPUs of this host if `options` request GPUs, after a check that they suffice for
/// `ranks` ranks.
///
/// # Errors
/// Returns what is missing.
pub(crate) fn find_gpus(
    plan: &Plan,
    options: &StreamOptions,
    ranks: usize,
) -> Result<Option<GpuDiscovery>, Diagnostics> {
    if options.device != RunDevice::Cuda {
        return Ok(None);
    }
    let gpus = GpuDiscovery::discover();
    cuda::check_plan(&gpus, &plan.sealed, ranks)?;
    Ok(Some(gpus))
}

/// Checks everything that can be checked before anything is written.
pub(crate) fn check_stream(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    ranks: u32,
    cores: usize,
) -> Result<(), Diagnostics> {
    let mut ds = Vec::new();
    let on_gpus = options.device == RunDevice::Cuda;
    if ranks as usize > cores && !options.oversubscribe && !on_gpus {
        ds.push(
            Diagnostic::error(&T0015, format!("{ranks} ranks on {cores} cores"))
                .with_label("mesh", plan.sealed.mesh().to_string())
                .with_hint(format!("use a mesh of at most {cores} ranks, or --oversubscribe")),
        );
    }
    ds.extend(check_options(options));
    ds.extend(unsupported_op(plan, on_gpus));
    if plan.video.stream.recompute && plan.sealed.rank_program("encode", Rank(0)).is_none() {
        ds.push(
            Diagnostic::error(&T0016, "the recompute regime needs a decoder for its anchor")
                .with_hint("use --cache resident"),
        );
    }
    ds.extend(refuse_existing(&options.out).err());
    let model = Model::open_for_plan(&model.dir, plan).map_err(|d| vec![d])?;
    match model.open_text_encoder() {
        Ok(words) => {
            let prompts = std::iter::once(&options.prompt).chain(options.prompts_at.iter().map(|(_, p)| p));
            ds.extend(prompts.filter_map(|p| words.encode(p).err()).map(|d| *d));
        }
        Err(e) => ds.extend(e),
    }
    ds.extend(model.open_weights().err().into_iter().flatten());
    for (_, folder) in &options.weights_at {
        ds.extend(preflight_reload(plan, &model.dir, folder).err().into_iter().flatten());
    }
    ds.extend(stream_spec(plan).check_settings());
    if plan.video.stream.decoder == PixelDecoder::SpaceTimeDepth {
        ds.extend(new_clip_stream(&plan.video).err());
    }
    if ds.is_empty() { Ok(()) } else { Err(ds) }
}

/// Returns a diagnostic for the first op of the plan for which its device has no kernel; every rank
/// would reject that op after the start. The leader's own phases run on the CPU.
fn unsupported_op(plan: &Plan, on_gpus: bool) -> Option<Diagnostic> {
    let firsts = plan.sealed.roles().iter().filter_map(|role| role.ranks.first());
    let mut programs = firsts.flat_map(|rank| {
        plan.sealed.phase_names().iter().filter_map(move |phase| plan.sealed.rank_program(phase, *rank))
    });
    let refused = programs.find_map(|p| {
        let beside = LEADER_PHASES.contains(&p.name.as_str());
        if on_gpus && !beside { CudaBackend::find_unsupported(p) } else { CpuBackend::find_unsupported(p) }
    })?;
    if on_gpus {
        return Some(refused);
    }
    Some(match plan.mapping.dtype {
        DtypePolicy::F32 => refused,
        other => refused.with_label("plan", format!("dtype = \"{}\"", other.name())).with_hint(
            "plan it with --dtype f32, or run it on another device: cuda, or sim, which takes any dtype and computes no numbers",
        ),
    })
}

/// Checks the options independently of plan and model.
pub(crate) fn check_options(options: &StreamOptions) -> Diagnostics {
    let mut ds = Vec::new();
    let changes = options.prompts_at.iter().map(|(c, _)| *c).chain(options.seeds_at.iter().map(|(c, _)| *c));
    let cuts = options.cuts_at.iter().chain(&options.flushes_at).copied();
    for c in changes.chain(cuts).chain(options.weights_at.iter().map(|(c, _)| *c)) {
        if c >= options.chunks {
            ds.push(Diagnostic::error(
                &T0018,
                format!("a change at chunk {c} of a stream of {} chunks", options.chunks),
            ));
        }
    }
    for c in options.flushes_at.iter().filter(|c| options.cuts_at.contains(c)) {
        ds.push(Diagnostic::error(&T0018, format!("chunk {c} is both cut and flushed")).with_hint(
            "a flush is a cut that takes effect at once: give the chunk to only one of the two options",
        ));
    }
    if options.chunks == 0 {
        ds.push(Diagnostic::error(&T0018, "a stream of no chunks"));
    }
    ds
}

/// Builds the configuration that every rank receives.
pub(crate) fn build_rank_config(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    threads: usize,
) -> Result<RankConfig, Diagnostic> {
    let mut prompts = vec![(0, options.prompt.clone())];
    prompts.extend(options.prompts_at.iter().cloned());
    let mut seeds = vec![(0, options.seed)];
    seeds.extend(options.seeds_at.iter().copied());
    let absolute = |p: &Path| std::path::absolute(p).map_err(|e| write_error(p, &e));
    let out = absolute(&options.out)?;
    let weights = options.weights_at.iter().map(|(chunk, folder)| {
        let digest = preflight_reload(plan, &model.dir, folder).map_err(first_diagnostic)?;
        Ok((*chunk, absolute(folder)?.display().to_string(), digest))
    });
    let weights = weights.collect::<Result<Vec<_>, Diagnostic>>()?;
    Ok(RankConfig {
        plan: out.join("plan"),
        digest: plan.sealed.digest_hex(),
        model: absolute(&model.dir)?,
        out,
        threads,
        chunks: options.chunks,
        prompts,
        seeds,
        cuts: options.cuts_at.clone(),
        flushes: options.flushes_at.clone(),
        weights,
        png: options.png,
        delays: options.delays,
        gpus: None,
        drill: options.drill.clone(),
    })
}

/// Writes the run directory with its plan and the first line of its record, atomically.
pub(crate) fn write_run_dir(
    plan: &Plan,
    orders: &RankConfig,
    options: &StreamOptions,
) -> Result<(), Diagnostic> {
    let started = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    write_run_dir_with(
        plan,
        options,
        RunStart { started_at: format_utc(started), ..start_line(plan, orders, options) },
    )
}

/// Like [`write_run_dir`], with a given first line.
pub(crate) fn write_run_dir_with(
    plan: &Plan,
    options: &StreamOptions,
    start: RunStart,
) -> Result<(), Diagnostic> {
    let mut folder = StagedFolder::create(&options.out)?;
    folder.write(RECORD_FILE, RecordLine::Start(start).to_json().as_bytes())?;
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
        plan: sealed.digest_hex(),
        model: plan.model.clone(),
        mesh: sealed.mesh().to_string(),
        strategy: plan.mapping.strategy_label(),
        numerics: plan.mapping.numerics.name().into(),
        dtype: plan.mapping.dtype.name().into(),
        cache: if stream.recompute { "recompute" } else { "resident" }.into(),
        topology: plan.mapping.topology.name().into(),
        seed: options.seed,
        prompts: orders
            .prompts
            .iter()
            .map(|(chunk, text)| ScheduledPrompt { chunk: *chunk, text: text.clone() })
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
    }
}

/// Returns a session id from the plan and the current time. The id only separates the messages of
/// two runs.
pub(crate) fn new_session_id(plan: &Plan) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_nanos() as u64);
    let digest = plan.sealed.digest();
    let head = digest.first_chunk::<8>().map_or(0, |b| u64::from_le_bytes(*b));
    head ^ now ^ (u64::from(std::process::id()) << 32)
}

/// Closes the record if the leader could not, and writes the report and the trace.
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
    let path = options.out.join(RECORD_FILE);
    let mut record = read_record(&path).and_then(Result::ok);
    if let Some(record) = &mut record
        && record.end.is_none()
    {
        let end = missing_end_line(record, failure.as_ref());
        append_line(&path, record.truncated, &RecordLine::End(end.clone()));
        record.end = Some(end);
    }
    if let Some(record) = &record {
        html_writer::write_reports(plan, record, &options.out, ops);
    }
    let events = record.as_ref().map_or(&[][..], |r| &r.events);
    let dropped = events.iter().filter(|e| e.event == DROPPED_EVENT).count() as u32;
    let overlap = record.as_ref().and_then(|r| OverlapStats::from_chunks(&r.chunks));
    let machine = record.as_ref().and_then(|r| r.start.machine.clone());
    let end = record.and_then(|r| r.end);
    let (chunks, frames, fps) = end.as_ref().map_or((0, 0, 0.0), |e| (e.chunks, e.frames, e.fps));
    let exit_code = match (&failure, interrupted) {
        (Some(f), _) => u8::try_from(f.class.exit_code()).unwrap_or(1),
        (None, true) => 130,
        (None, false) => 0,
    };
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
        overlap,
        machine,
        out,
    }
}

/// Reads a run's record, or returns what is wrong with it; `None` if there is no such file. For a
/// long run only the first and the last chunks are kept, so that reading takes no more memory than
/// running.
pub(crate) fn read_record(path: &Path) -> Option<Result<RunRecord, Diagnostic>> {
    // Reading a named pipe would never end.
    std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
    let mut file = BufReader::new(std::fs::File::open(path).ok()?);
    let mut reader = RecordReader::new(KEPT_CHUNKS);
    let mut line = Vec::new();
    loop {
        line.clear();
        if file.by_ref().take(MAX_LINE_BYTES).read_until(b'\n', &mut line).ok()? == 0 {
            return Some(reader.into_record());
        }
        if let Err(d) = reader.push_line(&line) {
            return Some(Err(d));
        }
    }
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

/// Appends a line, on a new line after a truncated one. A write error is ignored, because the
/// terminal shows the failure anyway.
fn append_line(path: &Path, truncated: bool, line: &RecordLine) {
    let text = if truncated { format!("\n{}", line.to_json()) } else { line.to_json() };
    let write = || -> std::io::Result<()> {
        let mut file = std::fs::OpenOptions::new().append(true).open(path)?;
        std::io::Write::write_all(&mut file, text.as_bytes())
    };
    let _ = write();
}

/// Formats seconds since 1970 as `2026-11-20T23:51:00Z`.
#[must_use]
pub fn format_utc(seconds: u64) -> String {
    let (days, rest) = (seconds / 86_400, seconds % 86_400);
    // Converts days to a civil date by eras of 400 years that begin on 1 March.
    let z = days + 719_468;
    let (era, day) = (z / 146_097, z % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let date = day - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year + era * 400 + u64::from(month <= 2);
    format!("{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest / 60 % 60, rest % 60)
}

#[cfg(test)]
mod tests {
    use super::format_utc;

    #[test]
    fn instants_read_as_dates() {
        assert_eq!(format_utc(0), "1970-01-01T00:00:00Z");
        assert_eq!(format_utc(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(format_utc(1_795_219_200), "2026-11-21T00:00:00Z");
    }
}
