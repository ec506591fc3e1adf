//! Changes that are sent while one run ends and another begins.

use std::path::{Path, PathBuf};

use tessera::plan::plan_model;
use tessera::stream_options::StreamOptions;
use tessera::{Mapping, Model, Overrides, StopHandle};

use super::*;
use crate::{ServedStream, describe_stream};

/// The demo model on one rank.
fn demo_stream() -> ServedStream {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../models/demo");
    let model = Model::open(&folder, &Overrides::default()).unwrap();
    let mapping = Mapping { mesh: "tp=1".parse().unwrap(), ..Mapping::default() };
    let plan = plan_model(&model.video, &model.name, "", &mapping).unwrap();
    ServedStream {
        plan: Arc::new(plan),
        model,
        options: StreamOptions::default(),
        argv: Vec::new(),
        examples: Vec::new(),
        loras: Vec::new(),
        explain: |_| None,
        warn: |_| {},
    }
}

/// A server of a stream that has started no run.
fn server_of(stream: &ServedStream) -> ServerState {
    let options = ServeOptions::default();
    let parts = ServerParts {
        facts: describe_stream(stream, &options, None, None),
        loras: LoraTable::default(),
        mp4: None,
        video: None,
        recorder: Recorder::new(Path::new("no recordings"), (128, 128), (24, 1), 0),
        settings: Settings::from_options(&stream.options),
        explain: stream.explain,
        warn: stream.warn,
    };
    ServerState::new(parts, &options)
}

fn flush(number_in_run: u64) -> PendingChange {
    PendingChange {
        number: number_in_run,
        number_in_run,
        owner: None,
        kind: "flush",
        setting: NewSetting::FlushedScene,
        since: Instant::now(),
    }
}

#[test]
fn a_change_that_was_sent_to_a_run_which_has_ended_is_refused() {
    let stream = demo_stream();
    let server = server_of(&stream);
    let begin_run = || {
        let (control, socket) =
            StreamControl::new(&stream.plan, &stream.model, StopHandle::default()).unwrap();
        let (run, ..) = server.begin_run(None);
        assert!(server.set_control(control));
        (run, socket)
    };
    let waiting = || server.lock().pending.iter().map(|change| change.number_in_run).collect::<Vec<_>>();
    let refusal_of = |run, number| server.accept_change(run, flush(number)).unwrap_err();
    let (first, _socket) = begin_run();
    assert_eq!(server.accept_change(first, flush(1)), Ok(()));
    assert_eq!(waiting(), [1]);
    // The first run has ended, and another one has not begun.
    server.close_run();
    assert_eq!(refusal_of(first, 2).code, "T1610");
    server.fail_run(&Vec::new(), AfterRun::NewScene);
    let (second, _socket) = begin_run();
    let refusal = refusal_of(first, 3);
    assert_eq!(
        (refusal.code, refusal.message.as_str()),
        ("T1610", "the run ended before a chunk took the change `flush`")
    );
    assert!(waiting().is_empty(), "{:?}", waiting());
    assert_eq!(server.accept_change(second, flush(1)), Ok(()));
    assert_eq!(waiting(), [1]);
}
