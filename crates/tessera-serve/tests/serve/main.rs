//! A server with a stream of the demo model, and clients that behave and misbehave. This test executable starts itself again as
//! each rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]
#![allow(clippy::print_stdout, reason = "the test prints the warnings of its servers")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the test reads pages and kills ranks"
)]

mod access;
mod client;
mod control;
mod hostile;
mod interface;
mod mp4;
mod otlp;
mod play;
mod restart;
mod resume;
mod settings;
mod video;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::thread::JoinHandle;

use tessera::plan::plan_model;
use tessera::stream_options::StreamOptions;
use tessera::{Mapping, Model, Overrides, StopHandle};
use tessera_base::Diagnostics;
use tessera_harness::{run, tests};
use tessera_serve::{ServeLimits, ServeOptions, ServedStream, ServerAddress, serve};

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("as-rank") {
        return u8::try_from(tessera::rank_main(|| {})).unwrap_or(1).into();
    }
    run(&tests![
        play::frames_arrive_and_a_prompt_changes_the_picture
        play::a_stalled_client_loses_its_own_frames_alone
        play::a_paused_stream_requests_nothing_and_a_flush_discards_what_is_on_its_way
        play::a_stream_without_a_pace_does_not_wait_for_its_video_to_play
        play::nothing_is_generated_while_nobody_watches
        control::one_client_controls_and_hands_over
        control::a_client_that_returns_keeps_the_control
        control::further_clients_are_refused_with_a_reason
        restart::a_killed_rank_ends_the_run_with_its_code_and_the_next_run_continues
        restart::a_scene_goes_on_after_failures_as_though_nothing_had_happened
        restart::a_scene_beyond_the_limit_does_not_go_on
        restart::a_stream_that_cannot_start_says_why
        resume::a_session_goes_on_with_the_chunk_that_would_have_followed
        resume::a_session_that_comes_out_differently_does_not_go_on
        settings::a_client_changes_what_the_plan_and_the_server_admit
        settings::a_lora_that_cannot_be_read_ends_the_server_before_it_starts
        video::frames_of_a_client_give_the_bits_of_a_file_whatever_others_send
        video::a_client_that_stalls_delays_the_stream_alone_and_the_next_one_begins_a_scene
        video::a_restart_discards_the_frames_that_wait_and_returns_their_credits
        video::a_stream_that_waits_for_frames_stops_at_once_and_leaves_no_process
        hostile::malformed_messages_end_one_connection_and_no_other
        hostile::connections_that_say_nothing_or_too_much_do_not_disturb_the_stream
        access::foreign_sites_and_missing_tokens_are_refused
        access::a_server_with_certificates_speaks_tls
        interface::every_path_of_the_description_answers
        interface::metrics_are_those_of_the_reference_page_and_of_the_dashboard
        interface::a_recording_holds_every_frame
        mp4::a_client_gets_whole_chunks_as_mp4_where_the_program_has_the_encoder
        otlp::a_collector_receives_the_spans_of_chunks_changes_and_runs
        otlp::a_collector_that_hangs_does_not_disturb_the_stream
    ])
}

/// A server that runs on threads of this process. Dropping it stops it, and fails the test if it did not end well.
pub(crate) struct TestServer {
    pub(crate) at: ServerAddress,
    stop: StopHandle,
    thread: Option<JoinHandle<Result<(), Diagnostics>>>,
}

impl TestServer {
    /// Starts a server of the demo model.
    pub(crate) fn start(options: ServeOptions) -> TestServer {
        TestServer::start_stream(demo_stream("tp=1"), options)
    }

    /// Starts a server of a stream.
    pub(crate) fn start_stream(stream: ServedStream, options: ServeOptions) -> TestServer {
        let (stop, (ready, address)) = (StopHandle::default(), channel());
        let handle = stop.clone();
        let thread = std::thread::spawn(move || {
            serve(stream, options, &handle, &mut |at| {
                ready.send(at.clone()).unwrap();
            })
        });
        let at = address.recv().unwrap();
        TestServer { at, stop, thread: Some(thread) }
    }

    /// Waits until the server ends by itself, and returns how.
    pub(crate) fn wait(mut self) -> Result<(), Diagnostics> {
        self.thread.take().unwrap().join().unwrap()
    }

    /// Stops the server and returns how it ended.
    pub(crate) fn stop(mut self) -> Result<(), Diagnostics> {
        self.stop.request_stop();
        self.thread.take().unwrap().join().unwrap()
    }
}

impl Drop for TestServer {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.stop.request_stop();
            let ended = thread.join();
            if !std::thread::panicking() {
                ended.unwrap().unwrap();
            }
        }
    }
}

/// Options of a server that nobody but a test reaches, with few places.
pub(crate) fn test_options() -> ServeOptions {
    ServeOptions {
        listen: "127.0.0.1:0".parse().unwrap(),
        limits: ServeLimits { max_clients: 6, max_connections: 40, ..ServeLimits::default() },
        ..ServeOptions::default()
    }
}

/// The demo model on a mesh.
pub(crate) fn demo_stream(mesh: &str) -> ServedStream {
    demo_stream_at(mesh, 24.0)
}

/// The demo model on a mesh, whose video plays at so many frames per second.
pub(crate) fn demo_stream_at(mesh: &str, frame_rate: f64) -> ServedStream {
    let mut model = Model::open(&demo_folder(), &Overrides::default()).unwrap();
    model.video.stream.fps = frame_rate;
    serve_model(model, mesh)
}

/// Folder of the demo model.
pub(crate) fn demo_folder() -> PathBuf {
    project_root().join("models/demo")
}

/// Plans a model for a mesh.
pub(crate) fn serve_model(model: Model, mesh: &str) -> ServedStream {
    let mapping = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
    let plan = plan_model(&model.video, &model.name, "", &mapping).unwrap();
    let this = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    ServedStream {
        plan: Arc::new(plan),
        model,
        options: StreamOptions {
            prompt: "a red circle moves right".into(),
            seed: 3,
            oversubscribe: true,
            ..StreamOptions::default()
        },
        argv: vec![this, "as-rank".into()],
        examples: vec!["a blue square moves left".into()],
        loras: Vec::new(),
        explain: |_| None,
        warn: |d| println!("{}: {}", d.code.id, d.message),
    }
}

/// Returns the root folder of the project.
pub(crate) fn project_root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}
