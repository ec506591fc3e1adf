//! Runs a sealed plan as processes on this host and writes the run directory.

mod live_stream;

use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cpu::CpuBackend;
use tessera_cuda::CudaBackend;
use tessera_mesh::Rank;
use tessera_models::{PixelDecoder, StreamConfig, denoising_steps};
use tessera_runtime::driver::{LaunchEvent, LaunchSpec, StopHandle, launch_ranks};

use crate::admitted_settings::AdmittedSettings;
use crate::codes::{T0016, T0018};
use crate::communicators;
use crate::cuda::{self, GpuRankConfig};
use crate::frame_writer::new_clip_stream;
use crate::gpu_placement::find_gpu;
use crate::gpus::GpuDiscovery;
use crate::host_memory::check_host_memory;
use crate::leader_memory::LeaderMemory;
use crate::leader_placement::place_leader_programs;
use crate::model::Model;
use crate::noise_file::NoiseFile;
use crate::pixel_placement::is_outside_phase;
use crate::plan::{Plan, has_cpu_variant, is_leader_phase};
use crate::rank_config::RankConfig;
use crate::rank_launch::{check_cores, launcher_limits, new_session_id, settle_launch};
use crate::rank_orders::RankOrders;
use crate::run_dir_writer::{close_run, write_run_dir};
use crate::run_settings::stream_spec;
use crate::shards::preflight_reload;
use crate::stream_control::ControlSocket;
use crate::stream_options::{ChunkProgress, RunDevice, StreamEvent, StreamOptions, StreamReport};
use crate::video_feed::VideoSocket;
use crate::video_file::VideoFile;
use crate::video_input::VideoOrigin;

pub use live_stream::{LiveChunk, LiveStream};

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
    run_steered(plan, model, options, argv, interrupt, LeaderSockets::default(), on_event)
}

/// The leader's ends of the sockets of a run that its launching process steers.
#[derive(Debug, Default)]
pub struct LeaderSockets {
    /// Changes arrive on it: [`StreamControl::new`](crate::stream_control::StreamControl::new) creates it.
    pub control: Option<ControlSocket>,
    /// Frames of the input video arrive on it: [`VideoFeed::new`](crate::video_feed::VideoFeed::new) creates it.
    pub video: Option<VideoSocket>,
}

/// Like [`run`], with sockets on which changes and an input video arrive while the stream runs.
///
/// # Errors
/// As [`run`].
pub fn run_steered(
    plan: &Plan,
    model: &Model,
    options: &StreamOptions,
    argv: Vec<String>,
    interrupt: &StopHandle,
    sockets: LeaderSockets,
    on_event: &mut dyn FnMut(StreamEvent),
) -> Result<StreamReport, Diagnostics> {
    let ranks = plan.sealed.mesh().world_size();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let computing = plan.sealed.mesh().mesh_size();
    let digest = model.start_digest();
    let gpus = find_gpus(plan, options, computing as usize)?;
    if let Some(Ok(found)) = gpus.as_ref().map(|g| &g.devices) {
        for rank in plan.mesh_ranks() {
            let placed = find_gpu(&found.gpus, (plan.sealed.mesh(), plan.sealed.rank_map()), 0, rank);
            placed.map_err(|d| vec![d])?;
        }
    }
    if gpus.is_none() {
        check_host_memory(&plan.sealed, LeaderMemory::from_plan(plan).total_bytes()).map_err(|d| vec![d])?;
    }
    check_stream(plan, model, options, computing, cores)?;
    let on_gpus = gpus
        .as_ref()
        .map(|g| cuda::create_communicator_ids(g, &plan.sealed))
        .transpose()
        .map_err(|d| vec![d])?;
    let on_gpus = on_gpus.map(|communicator_ids| GpuRankConfig { communicator_ids, first_rank_of_host: 0 });
    let is_steered = sockets.control.is_some();
    let extra_fds = gather_descriptors(plan, options, on_gpus.is_some(), sockets).map_err(|d| vec![d])?;
    let threads = (cores / computing as usize).max(1);
    let orders = RankConfig::from_options(plan, model, options, threads).map_err(|d| vec![d])?;
    let (leader, notes) = place_leader_programs(plan, model, options, gpus.as_ref().map(|g| (g, 0)))?;
    notes.into_iter().for_each(|d| on_event(StreamEvent::Note(d)));
    let orders = RankConfig { gpus: on_gpus, leader, is_steered, ..orders };
    let payload = serde_json::to_vec(&RankOrders::Stream(Box::new(orders.clone()))).map_err(|e| {
        vec![Diagnostic::error(&T0018, format!("the rank configuration cannot be serialised: {e}"))]
    })?;
    write_run_dir(plan, &orders, options, digest.finish(plan)?).map_err(|d| vec![d])?;
    let (limits, tripwires) = launcher_limits(options.drill.as_ref());
    let spec = LaunchSpec {
        argv,
        rank_count: ranks,
        topology: plan.control_topology(),
        session: new_session_id(&plan.sealed),
        extra_fds,
        payload,
        env: if gpus.is_some() { cuda::missing_env() } else { Vec::new() },
        limits,
        tripwires,
    };
    let mut tally = ProgressTally::new(options.chunks);
    let launched = launch_ranks(&spec, interrupt, &mut |event| match event {
        LaunchEvent::Started(pids) => on_event(StreamEvent::Started { pids: pids.to_vec() }),
        LaunchEvent::Progress(p) => on_event(StreamEvent::Chunk(tally.count_chunk(p))),
    });
    on_event(StreamEvent::Exited);
    let (failure, interrupted) = settle_launch(launched, &options.out);
    Ok(close_run(plan, options, failure, interrupted))
}

/// Returns the descriptors of each rank: those of its communicators, and on the leader those of frames, of changes and of the
/// input video, in this order.
fn gather_descriptors(
    plan: &Plan,
    options: &StreamOptions,
    uses_gpus: bool,
    sockets: LeaderSockets,
) -> Result<Vec<Vec<Arc<OwnedFd>>>, Diagnostic> {
    let is_fed = options.video.as_ref().is_some_and(|video| video.from == VideoOrigin::Feed);
    if is_fed != sockets.video.is_some() {
        return Err(Diagnostic::error(
            &T0018,
            "an input video that the launching process hands over needs a socket, and no other video has one",
        ));
    }
    let ranks = plan.sealed.mesh().world_size();
    // GPU ranks communicate on the GPUs and need no CPU communicators.
    let specs = if uses_gpus { Vec::new() } else { communicators::communicator_specs(&plan.sealed) };
    let mut fds = communicators::create_arenas_of_ranks(&specs, ranks)?;
    let mut of_leader = options.outputs.open_pipes()?;
    of_leader.extend(sockets.control.map(ControlSocket::into_fd));
    of_leader.extend(sockets.video.map(VideoSocket::into_fd));
    if !of_leader.is_empty() {
        fds.resize(ranks as usize, Vec::new());
        // The leader takes them from the end of its list.
        fds[0].extend(of_leader.into_iter().map(Arc::new));
    }
    Ok(fds)
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
            request: p.request,
            epoch: p.epoch,
            chunks: self.chunks,
            frames: self.frames,
            fps: if seconds > 0.0 { (self.frames - before) as f64 / seconds } else { 0.0 },
            phases: p.phases.clone(),
            queued_in: p.queued_in,
            queued_out: p.queued_out,
            call_ns: p.call_ns,
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
    if !options.oversubscribe && !on_gpus {
        ds.extend(check_cores(plan.sealed.mesh(), ranks, cores));
    }
    ds.extend(options.check());
    ds.extend(unsupported_op(plan, on_gpus));
    if plan.video.stream.recompute && plan.sealed.rank_program("encode", Rank(0)).is_none() {
        ds.push(
            Diagnostic::error(&T0016, "the recompute regime needs a decoder for its anchor")
                .with_hint("use --cache resident"),
        );
    }
    if plan.video.stream.decoder == PixelDecoder::None {
        let writes = [(options.outputs.png, "--png"), (!options.outputs.pipes.is_empty(), "--raw or --y4m")];
        for (_, option) in writes.iter().filter(|(given, _)| *given) {
            ds.push(
                Diagnostic::error(
                    &T0016,
                    format!("{option} needs frames, and {} has no decoder", plan.model),
                )
                .with_hint(format!("leave out {option}; the run writes the latents to latents.safetensors")),
            );
        }
    }
    ds.extend(options.check_out().err());
    let admitted = AdmittedSettings::from_plan(plan);
    ds.extend(options.step_lists_at.iter().filter_map(|(_, name)| admitted.find_step_list(name).err()));
    ds.extend(options.biases_at.iter().filter_map(|(_, bias)| admitted.check_bias(*bias).err()));
    ds.extend(check_noise(plan, options));
    ds.extend(check_video(plan, options));
    if let Some(d) = options.weights_at.iter().find_map(|(_, c)| c.check_base(model.weights.base).err()) {
        ds.push(d);
        return Err(ds);
    }
    let model =
        Model::open_for_plan(&model.dir, plan).map_err(|d| vec![d])?.with_weights(model.weights.clone());
    match model.open_text_encoder() {
        Ok(encoder) => {
            let prompts = std::iter::once(&options.prompt).chain(options.prompts_at.iter().map(|(_, p)| p));
            ds.extend(prompts.filter_map(|p| encoder.check_prompt(p).err()));
            let negative = plan.video.stream.guidance.as_ref().map(|g| &g.negative_prompt);
            ds.extend(negative.and_then(|p| encoder.check_negative_prompt(p).err()));
        }
        Err(e) => ds.extend(e),
    }
    ds.extend(model.open_weights().err().into_iter().flatten());
    ds.extend(model.open_vae_weights().err().into_iter().flatten());
    for (_, change) in &options.weights_at {
        ds.extend(preflight_reload(plan, &model, change).err().into_iter().flatten());
    }
    ds.extend(stream_spec(plan).check_settings());
    if plan.video.stream.decoder != PixelDecoder::None {
        ds.extend(new_clip_stream(&plan.video).err());
    }
    if ds.is_empty() { Ok(()) } else { Err(ds) }
}

/// Checks that noise is given exactly if the calls of the plan carry it, and that the file fits.
fn check_noise(plan: &Plan, options: &StreamOptions) -> Option<Diagnostic> {
    match (&options.noise, plan.video.stream.given_noise) {
        (Some(path), true) => NoiseFile::open(path, &plan.video).and_then(|f| f.check(options.chunks)).err(),
        (None, true) => Some(
            Diagnostic::error(&T0018, "the calls of this plan carry noise, and no file of noise is given")
                .with_hint("give --noise FILE, or plan with --noise-source seed"),
        ),
        (Some(_), false) => Some(
            Diagnostic::error(
                &T0018,
                "a file of noise is given, and the ranks of this plan draw their noise",
            )
            .with_hint("leave out --noise, or plan with --noise-source call"),
        ),
        (None, false) => None,
    }
}

/// Checks that a video is given if the plan needs one, that the plan takes it, and that it fits.
fn check_video(plan: &Plan, options: &StreamOptions) -> Option<Diagnostic> {
    let stream = &plan.video.stream;
    let needs = denoising_steps(stream).first().is_some_and(|step| step.sigma < 1.0);
    match &options.video {
        Some(input) if stream.takes_video => {
            let fits = || match &input.from {
                VideoOrigin::Path(path) => {
                    VideoFile::check(path, &plan.video, count_video_frames(stream, options), options.chunks)
                }
                VideoOrigin::Feed => Ok(()),
            };
            input.check_strength(&plan.video).and_then(|()| fits()).err()
        }
        Some(_) => Some(
            Diagnostic::error(&T0018, "a video is given, and this plan takes none")
                .with_hint("leave out --video, or plan with --video-input frames"),
        ),
        None if needs => Some(
            Diagnostic::error(&T0018, "the first denoising step of this plan needs an input video")
                .with_hint("give --video PATH"),
        ),
        None => None,
    }
}

/// Returns the number of frames that a stream takes from its input video.
fn count_video_frames(stream: &StreamConfig, options: &StreamOptions) -> u64 {
    let opens = |c: &u32| {
        let begins = |chunks: &[u32]| chunks.contains(c);
        begins(&options.cuts_at)
            || begins(&options.flushes_at)
            || options.weights_at.iter().any(|(at, _)| at == c)
    };
    let scenes = 1 + (1..options.chunks).filter(opens).count() as u64;
    let later = u64::from(options.chunks).saturating_sub(scenes);
    scenes * stream.first_chunk_frames() + later * stream.frames_per_chunk()
}

/// Returns a diagnostic for the first op of the plan for which its device has no kernel; every rank
/// would reject that op after the start. The leader's own phases run on the CPU, except those outside of the
/// mesh and those that [`place_leader_programs`] checks.
fn unsupported_op(plan: &Plan, on_gpus: bool) -> Option<Diagnostic> {
    plan.sealed.role_programs().filter(|p| !has_cpu_variant(&p.name)).find_map(|p| {
        let beside = is_leader_phase(&plan.sealed, &p.name) && !is_outside_phase(plan, &p.name);
        if on_gpus && !beside { CudaBackend::find_unsupported(p) } else { CpuBackend::find_unsupported(p) }
    })
}
