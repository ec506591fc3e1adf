//! Frames, changes and the pace.

use std::time::{Duration, Instant};

use serde_json::json;
use tessera_serve::ServeOptions;
use tessera_serve::protocol::Pace;

use crate::client::{Received, SocketClient, get};
use crate::{TestServer, demo_stream_at, test_options};

/// Returns how much stronger blue than red the strongest pixels of a picture are.
fn blue_over_red(picture: &[u8]) -> i64 {
    picture.chunks_exact(3).map(|p| i64::from(p[2]) - i64::from(p[0])).sum()
}

pub(crate) fn frames_arrive_and_a_prompt_changes_the_picture() {
    let server = TestServer::start(test_options());
    let mut client = SocketClient::join_in_control(server.at.address);
    assert_eq!(client.hello["stream"]["width"], 128);
    assert_eq!(client.hello["control"]["is_you"], true);
    let red = client.wait_for_frame(|_| true);
    assert_eq!((red.run, red.request, red.number, red.size), (1, 0, 0, (128, 128)));
    let id = client.change(json!({ "prompt": "a blue square moves left" }));
    assert_eq!(client.wait_for("accepted")["id"], id);
    let effect = client.wait_for("effect");
    assert_eq!((effect["id"].as_u64(), effect["change"].as_str()), (Some(id), Some("prompt")));
    let from = effect["request"].as_u64().unwrap();
    assert!(from >= 1);
    let blue = client.wait_for_frame(|frame| frame.request > from);
    let (before, after) = (blue_over_red(&red.picture), blue_over_red(&blue.picture));
    assert!(after > before + 10_000, "{before} {after}");
    let status = client.wait_until("status", |status| status["request"].as_u64() >= Some(from));
    assert_eq!(status["prompt"], "a blue square moves left");
    let unknown = client.change(json!({ "prompt": "a <script>purple</script> elephant" }));
    let refused = client.wait_for("refused");
    assert_eq!(refused["id"].as_u64(), Some(unknown));
    assert!(refused["message"].as_str().unwrap().contains("purple"), "{refused}");
    client.wait_for_frame(|frame| frame.request > from + 2);
}

pub(crate) fn a_stalled_client_loses_its_own_frames_alone() {
    let server = TestServer::start(test_options());
    let mut watcher = SocketClient::join_in_control(server.at.address);
    let mut stalled = SocketClient::join(server.at.address, json!({}));
    // Six chunks of twelve frames; two of them wait for the client that takes none.
    let mut next = watcher.wait_for_frame(|_| true).number + 1;
    while next < 72 {
        match watcher.receive() {
            Received::Frame(frame) => {
                assert_eq!(frame.number, next, "the watching client lost a frame");
                next += 1;
            }
            Received::Text(status) if status["type"] == "status" => assert_eq!(status["dropped"], 0),
            other => assert!(!matches!(other, Received::Closed), "{other:?}"),
        }
    }
    let status = stalled.wait_until("status", |status| status["dropped"].as_u64() > Some(0));
    assert!(status["frames"].as_u64().unwrap() > 24);
    stalled.send(&json!({ "type": "credits", "frames": 1 }));
    let kept = stalled.wait_for_frame(|_| true);
    assert!(kept.number >= status["dropped"].as_u64().unwrap(), "{kept:?}");
}

pub(crate) fn a_paused_stream_requests_nothing_and_a_flush_discards_what_is_on_its_way() {
    let server = TestServer::start(test_options());
    let mut client = SocketClient::join_in_control(server.at.address);
    client.wait_for_frame(|frame| frame.request == 1);
    let id = client.change(json!("pause"));
    let effect = client.wait_until("effect", |effect| effect["id"].as_u64() == Some(id));
    let held = effect["request"].as_u64().unwrap();
    // Chunks before the one that is held back arrive; the one after never does.
    client.wait_for_frame(|frame| frame.request + 1 == held);
    std::thread::sleep(Duration::from_secs(2));
    let status = get(server.at.address, "/api/v1/status").json();
    assert_eq!(status["status"]["state"], "paused");
    assert_eq!(status["status"]["request"].as_u64(), Some(held - 1));
    client.change(json!("resume"));
    let before = client.wait_for_frame(|frame| frame.request >= held);
    client.change(json!("flush"));
    let effect = client.wait_until("effect", |effect| effect["change"] == "flush");
    let from = effect["request"].as_u64().unwrap();
    let after = client.wait_for_frame(|frame| frame.request >= from);
    assert!(after.epoch > before.epoch, "{} {}", after.epoch, before.epoch);
    let later = client.wait_for_frame(|frame| frame.request > from + 1);
    assert_eq!(later.run, 1);
}

pub(crate) fn a_stream_without_a_pace_does_not_wait_for_its_video_to_play() {
    let options = ServeOptions { pace: Pace::Free, keeps_running: true, ..test_options() };
    // A chunk of twelve frames plays for twelve seconds, so at the pace of the model twelve chunks take two minutes.
    let server = TestServer::start_stream(demo_stream_at("tp=1", 1.0), options);
    let chunks = || get(server.at.address, "/api/v1/status").json()["status"]["chunks"].as_u64().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while chunks() < 12 {
        assert!(Instant::now() < until, "a stream without a pace stopped after {} chunks", chunks());
        std::thread::sleep(Duration::from_millis(50));
    }
    let mut client = SocketClient::join_in_control(server.at.address);
    assert_eq!(client.hello["stream"]["pace"], "free");
    client.wait_for_frame(|frame| frame.request >= 14);
}

pub(crate) fn nothing_is_generated_while_nobody_watches() {
    let server = TestServer::start(test_options());
    let address = server.at.address;
    let chunks = || get(address, "/api/v1/status").json()["status"]["chunks"].as_u64().unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    while chunks() < 2 {
        assert!(Instant::now() < until, "the first chunks of a server did not arrive");
        std::thread::sleep(Duration::from_millis(50));
    }
    std::thread::sleep(Duration::from_secs(2));
    assert_eq!(chunks(), 2, "the lead is two chunks");
    assert_eq!(get(address, "/api/v1/status").json()["status"]["state"], "idle");
    assert_eq!(get(address, "/readyz").status, 200);
    let mut client = SocketClient::join_in_control(address);
    client.wait_for_frame(|frame| frame.request >= 3);
}
