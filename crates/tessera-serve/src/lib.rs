//! `tessera serve`: one stream, a page that shows it, and a socket and an HTTP interface for applications.
//!
//! The crate decides which chunks are requested and what clients see. The leader, the envelope and the ranks are those of
//! `tessera stream`: a change travels to the leader, which answers with the chunk that it takes effect with.
//! tokio serves connections here, and nowhere on the path of a step.

#![forbid(unsafe_code)]

mod access;
mod backoff;
mod client_queue;
pub mod codes;
mod control;
mod file_body;
mod frames;
mod hex;
mod lingering_stream;
mod lora_table;
mod metrics;
mod mp4;
mod options;
mod otlp;
mod pacing;
mod page;
pub mod protocol;
mod recent_chunks;
mod recorded_session;
mod recorder;
mod routes;
mod secret;
mod server;
mod server_state;
mod settings;
mod socket;
mod supervisor;
mod video_intake;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use tessera::admitted_settings::AdmittedSettings;
use tessera::stream_options::{RunDevice, StreamOptions};
use tessera::video_input::VideoOrigin;
use tessera::{LoraFile, Model, Plan, StopHandle};
use tessera_base::{Diagnostic, Diagnostics};
use tokio::sync::Semaphore;

use crate::access::AccessRules;
use crate::codes::T1609;
use crate::lora_table::LoraTable;
use crate::mp4::Mp4Encoder;
use crate::protocol::{FrameFormat, StreamFacts, VideoInFacts};
use crate::recorded_session::RecordedSession;
use crate::recorder::Recorder;
use crate::routes::{Shared, router};
use crate::server::{Listening, SPARE_SOCKETS, serve_until_stopped};
use crate::server_state::{ServerParts, ServerState};
use crate::settings::Settings;
use crate::supervisor::RunTemplate;
use crate::video_intake::VideoIntake;

pub use options::{Access, AfterFailure, ExplainCode, ServeLimits, ServeOptions};
pub use otlp::{CollectorEndpoint, ShowWarning, TraceOptions};

/// The stream that a server runs.
pub struct ServedStream {
    /// The sealed plan.
    pub plan: Arc<Plan>,
    /// The model.
    pub model: Model,
    /// How it runs. Length, outputs and folder are those of a server.
    pub options: StreamOptions,
    /// Command line of a rank's process, which must call [`tessera::rank_main`].
    pub argv: Vec<String>,
    /// Prompts that the page suggests.
    pub examples: Vec<String>,
    /// LoRAs that a client may choose, by name.
    pub loras: Vec<LoraChoice>,
    /// Returns the page of a code, for alarms.
    pub explain: ExplainCode,
    /// Shows a warning to the person who started the server.
    pub warn: ShowWarning,
}

/// A LoRA that clients know by a name, so that none of them names a file of the server.
#[derive(Debug, Clone)]
pub struct LoraChoice {
    /// Name of the choice.
    pub name: String,
    /// The file and its strength.
    pub file: LoraFile,
}

/// Where a server is reached.
#[derive(Debug, Clone)]
pub struct ServerAddress {
    /// Address and port.
    pub address: SocketAddr,
    /// Whether connections are encrypted.
    pub is_tls: bool,
    /// Folder of recordings.
    pub recordings: PathBuf,
}

/// Serves a stream until `stop` is requested, and returns after the last process has ended. `on_ready` is called once the
/// server is reached.
///
/// # Errors
/// What is wrong with the options, the address or the stream before its ranks were started.
pub fn serve(
    stream: ServedStream,
    options: ServeOptions,
    stop: &StopHandle,
    on_ready: &mut dyn FnMut(&ServerAddress),
) -> Result<(), Diagnostics> {
    let wrong = options.check();
    if !wrong.is_empty() {
        return Err(wrong);
    }
    let one = |d: Diagnostic| vec![d];
    let (width, height) = frame_size(&stream.plan).map_err(one)?;
    let rate = stream.plan.video.stream.frame_rate_fraction();
    let mp4 = Mp4Encoder::new((width.into(), height.into()), rate);
    let video = new_video_intake(&stream, &options).map_err(one)?;
    let loras = LoraTable::open(&stream)?;
    let read = |folder: &PathBuf| RecordedSession::read(folder, &stream.plan, None);
    let session = options.resume.as_ref().map(read).transpose().map_err(one)?;
    if let Some(out) = &options.out {
        std::fs::create_dir_all(out)
            .map_err(|e| one(Diagnostic::error(&T1609, format!("{}: {e}", out.display()))))?;
    }
    let listening = Listening::open(&options).map_err(one)?;
    let recordings =
        options.recordings.clone().or_else(|| options.out.as_ref().map(|out| out.join("recordings")));
    let recordings = recordings
        .unwrap_or_else(|| std::env::temp_dir().join(format!("tessera-recordings-{}", std::process::id())));
    let limits = options.limits;
    let given = Settings::from_options(&stream.options);
    let parts = ServerParts {
        facts: describe_stream(&stream, &options, mp4.as_ref(), video.as_ref()),
        loras,
        mp4,
        video,
        recorder: Recorder::new(&recordings, (width.into(), height.into()), rate, limits.recording_bytes),
        settings: session.as_ref().map_or(given, |session| session.last.clone()),
        explain: stream.explain,
        warn: stream.warn,
    };
    let server = Arc::new(ServerState::new(parts, &options));
    let is_tls = listening.is_tls();
    let shared = Shared {
        server: Arc::clone(&server),
        rules: Arc::new(AccessRules::new(options.access.clone(), listening.address, is_tls)),
        sockets: Arc::new(Semaphore::new(limits.max_clients + SPARE_SOCKETS)),
        is_tls,
    };
    let template = RunTemplate {
        plan: stream.plan,
        model: stream.model,
        options: stream.options,
        argv: stream.argv,
        out: options.out,
        max_restarts: options.max_restarts,
        after_failure: options.after_failure,
        session,
    };
    on_ready(&ServerAddress { address: listening.address, is_tls, recordings });
    serve_until_stopped(listening, router(shared), &server, &template, stop)
}

/// Returns where frames of the client in control wait; `None` if clients send no video.
///
/// # Errors
/// T1609 if chunks are to be generated again, because nobody keeps the frames of a video.
fn new_video_intake(
    stream: &ServedStream,
    options: &ServeOptions,
) -> Result<Option<VideoIntake>, Diagnostic> {
    if stream.options.video.as_ref().is_none_or(|video| video.from != VideoOrigin::Feed) {
        return Ok(None);
    }
    if options.resume.is_some() || options.after_failure != AfterFailure::NewScene {
        let message =
            "chunks of a video that clients send cannot be generated again: its frames are not kept";
        return Err(Diagnostic::error(&T1609, message)
            .with_hint("leave out --resume and --continue-after-failure, or --video-in"));
    }
    let video = &stream.plan.video.stream;
    Ok(Some(VideoIntake::new(video.first_chunk_frames() as usize, video.frames_per_chunk() as usize)))
}

/// Returns the width and height of a frame.
///
/// # Errors
/// T1609 if the protocol cannot state them.
fn frame_size(plan: &Plan) -> Result<(u16, u16), Diagnostic> {
    let video = &plan.video.stream;
    let (Ok(width), Ok(height)) = (u16::try_from(video.width), u16::try_from(video.height)) else {
        let message = format!("frames of {} x {} pixels", video.width, video.height);
        return Err(Diagnostic::error(&T1609, message).with_hint("the protocol states each in 16 bits"));
    };
    Ok((width, height))
}

/// Returns what does not change while the server runs.
fn describe_stream(
    stream: &ServedStream,
    options: &ServeOptions,
    mp4: Option<&Mp4Encoder>,
    intake: Option<&VideoIntake>,
) -> StreamFacts {
    let ServedStream { plan, examples, loras, options: run, .. } = stream;
    let admitted = AdmittedSettings::from_plan(plan);
    let video = &plan.video.stream;
    let (num, den) = video.frame_rate_fraction();
    let formats = [FrameFormat::Raw, FrameFormat::Jpeg, FrameFormat::None];
    StreamFacts {
        model: plan.model.clone(),
        mesh: plan.sealed.mesh().to_string(),
        device: match run.device {
            RunDevice::Cpu => "cpu",
            RunDevice::Cuda => "gpu",
            RunDevice::Sim => "sim",
        },
        plan: plan.sealed.digest_hex(),
        width: video.width as u32,
        height: video.height as u32,
        frame_rate: f64::from(num) / f64::from(den.max(1)),
        chunk_frames: video.frames_per_chunk() as u32,
        pace: options.pace,
        lead: options.lead,
        formats: formats.into_iter().chain(mp4.map(|_| FrameFormat::Mp4)).map(FrameFormat::name).collect(),
        mp4_type: mp4.map(|mp4| mp4.media_type().to_string()),
        examples: examples.clone(),
        step_lists: admitted.step_lists().to_vec(),
        reads_bias: admitted.reads_bias(),
        bias: video.bias,
        loras: loras.iter().map(|choice| choice.name.clone()).collect(),
        video_in: intake.map(|intake| VideoInFacts {
            first_chunk_frames: video.first_chunk_frames() as usize,
            frames_ahead: intake.frames_ahead(),
        }),
    }
}
