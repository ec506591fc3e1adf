//! Runs that fail.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_serve::{AfterFailure, ServeOptions};

use crate::client::{Received, SocketClient, get};
use crate::{TestServer, demo_stream, test_options};

/// Kills the process of a rank.
pub(crate) fn kill_rank(process: u32) {
    let kill = std::process::Command::new("kill").args(["-9", &process.to_string()]).status().unwrap();
    assert!(kill.success());
}

/// Returns the processes that this one has started and that run still.
pub(crate) fn rank_processes() -> Vec<u32> {
    let this = std::process::id();
    let children = |pid: u32| -> Vec<u32> {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
        let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
        lists
            .flat_map(|list| list.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
            .collect()
    };
    children(this)
}

pub(crate) fn a_killed_rank_ends_the_run_with_its_code_and_the_next_run_continues() {
    let dir = tempfile::tempdir().unwrap();
    let options = ServeOptions { out: Some(dir.path().join("out")), ..test_options() };
    let server = TestServer::start_stream(demo_stream("tp=2"), options);
    let mut client = SocketClient::join_in_control(server.at.address);
    client.wait_for_frame(|_| true);
    client.change(json!({ "prompt": "a green triangle moves up" }));
    client.wait_until("effect", |effect| effect["change"] == "prompt");
    let ranks = rank_processes();
    assert_eq!(ranks.len(), 2, "{ranks:?}");
    kill_rank(*ranks.iter().max().unwrap());
    let alarm = client.wait_for("alarm");
    let code = alarm["code"].as_str().unwrap();
    assert!(code.starts_with('T') && !alarm["explanation"].as_str().unwrap().is_empty(), "{alarm}");
    assert_eq!((alarm["restarts"].as_bool(), alarm["run"].as_u64()), (Some(true), Some(1)));
    assert!(alarm["message"].as_str().unwrap().contains("rank"), "{alarm}");
    let frame = client.wait_for_frame(|frame| frame.run == 2);
    assert_eq!(frame.request, 0);
    let status = client.wait_until("status", |status| status["run"] == 2 && status["state"] == "running");
    assert_eq!(status["prompt"], "a green triangle moves up");
    let alarms = get(server.at.address, "/api/v1/alarms").json();
    assert_eq!(alarms.as_array().map(Vec::len), Some(1));
    let metrics = get(server.at.address, "/metrics").text();
    assert!(metrics.contains(&format!("tessera_failures_total{{code=\"{code}\"}} 1")), "{metrics}");
    // A later client sees the alarm, too, and a page would show it.
    let mut later = SocketClient::join(server.at.address, json!({}));
    assert_eq!(later.wait_for("alarm")["code"].as_str(), Some(code));
    drop((client, later));
    server.stop().unwrap();
    assert_eq!(rank_processes(), Vec::<u32>::new());
    let record = std::fs::read_to_string(dir.path().join("out/run-1/record.jsonl")).unwrap();
    let end: Value = serde_json::from_str(record.lines().last().unwrap()).unwrap();
    assert_eq!((end["kind"].as_str(), end["status"].as_str()), (Some("end"), Some("failed")));
}

/// What a client received, frames by their number.
#[derive(Default)]
struct Seen {
    pictures: BTreeMap<u64, Vec<u8>>,
    /// The first request of each run.
    first_requests: BTreeMap<u32, u64>,
    last_request: u64,
    fences: Vec<Value>,
}

impl Seen {
    /// Receives until a message arrives for which something holds, and returns it.
    fn wait_for(&mut self, client: &mut SocketClient, holds: impl Fn(&Value) -> bool) -> Value {
        loop {
            match client.receive() {
                Received::Text(message) if holds(&message) => return message,
                Received::Text(message) if message["type"] == "fence" => self.fences.push(message),
                Received::Text(_) => {}
                Received::Frame(frame) => {
                    self.first_requests.entry(frame.run).or_insert(frame.request);
                    self.last_request = frame.request;
                    self.pictures.insert(frame.number, frame.picture);
                }
                Received::Closed => panic!("the server closed the connection"),
            }
        }
    }

    /// Receives until a request was delivered.
    fn wait_for_request(&mut self, client: &mut SocketClient, request: u64) {
        while self.last_request < request {
            self.wait_for(client, |message| message["type"] == "status");
        }
    }

    /// Requests a change and waits for its effect. Returns the first request with it.
    fn change(&mut self, client: &mut SocketClient, change: Value) -> u64 {
        let id = client.change(change);
        let effect = self.wait_for(client, |message| message["type"] == "effect" && message["id"] == id);
        effect["request"].as_u64().unwrap()
    }
}

/// Waits for two ranks that are none of these, and kills one.
fn kill_new_rank(old: &[u32]) {
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let ranks = rank_processes();
        if ranks.len() == 2 && !ranks.iter().any(|rank| old.contains(rank)) {
            return kill_rank(*ranks.iter().max().unwrap());
        }
        assert!(Instant::now() < until, "no new ranks: {ranks:?}");
        std::thread::yield_now();
    }
}

pub(crate) fn a_scene_goes_on_after_failures_as_though_nothing_had_happened() {
    let after_failure = AfterFailure::Continue { max_chunks: 64 };
    let server =
        TestServer::start_stream(demo_stream("tp=2"), ServeOptions { after_failure, ..test_options() });
    let (mut client, mut seen) = (SocketClient::join_in_control(server.at.address), Seen::default());
    seen.wait_for_request(&mut client, 1);
    let prompt = seen.change(&mut client, json!({ "prompt": "a green triangle moves up" }));
    seen.wait_for_request(&mut client, prompt);
    let cut = seen.change(&mut client, json!("cut"));
    // The leader takes it with a request that is not delivered when the rank dies.
    let seed = seen.change(&mut client, json!({ "seed": 11 }));
    let ranks = rank_processes();
    kill_rank(*ranks.iter().max().unwrap());
    let alarm = seen.wait_for(&mut client, |message| message["type"] == "alarm");
    let shown = alarm["regenerates"].as_u64().unwrap();
    assert_eq!((alarm["restarts"].as_bool(), shown), (Some(true), seen.last_request + 1));
    // Another failure while the ranks generate the chunks again, or soon after.
    kill_new_rank(&ranks);
    let alarm = seen.wait_for(&mut client, |message| message["type"] == "alarm");
    assert!(alarm["regenerates"].as_u64().unwrap() >= shown, "{alarm}");
    let end = cut.max(seed).max(shown) + 3;
    seen.wait_for_request(&mut client, end);
    let status = seen.wait_for(&mut client, |message| message["type"] == "status");
    assert_eq!(
        (status["prompt"].as_str(), status["seed"].as_u64()),
        (Some("a green triangle moves up"), Some(11))
    );
    assert!(seen.fences.is_empty(), "{:?}", seen.fences);
    let later: Vec<u64> = seen.first_requests.range(2..).map(|(_, request)| *request).collect();
    assert!(!later.is_empty() && later.iter().all(|request| *request >= shown), "{later:?}");
    drop(client);
    server.stop().unwrap();

    let mut stream = demo_stream("tp=2");
    let chunk = |request: u64| request as u32;
    stream.options.prompts_at = vec![(chunk(prompt), "a green triangle moves up".into())];
    stream.options.seeds_at = vec![(chunk(seed), 11)];
    stream.options.cuts_at = vec![chunk(cut)];
    let server = TestServer::start_stream(stream, test_options());
    let (mut client, mut expected) = (SocketClient::join_in_control(server.at.address), Seen::default());
    expected.wait_for_request(&mut client, end + 1);
    let first = *seen.pictures.keys().next().unwrap().max(expected.pictures.keys().next().unwrap());
    assert!(first <= 24, "{first}");
    for number in first..12 * end {
        assert!(seen.pictures.get(&number) == expected.pictures.get(&number), "frame {number} differs");
        assert!(seen.pictures.contains_key(&number), "frame {number} is missing");
    }
}

pub(crate) fn a_scene_beyond_the_limit_does_not_go_on() {
    let after_failure = AfterFailure::Continue { max_chunks: 1 };
    let server =
        TestServer::start_stream(demo_stream("tp=2"), ServeOptions { after_failure, ..test_options() });
    let (mut client, mut seen) = (SocketClient::join_in_control(server.at.address), Seen::default());
    seen.wait_for_request(&mut client, 2);
    kill_rank(*rank_processes().iter().max().unwrap());
    let alarm = seen.wait_for(&mut client, |message| message["type"] == "alarm");
    assert!(alarm["regenerates"].is_null() && alarm["restarts"] == true, "{alarm}");
    let reason = seen.wait_for(&mut client, |message| message["type"] == "alarm");
    assert_eq!((reason["code"].as_str(), reason["restarts"].as_bool()), (Some("T1614"), Some(true)));
    let fence = client.wait_for("fence");
    assert_eq!((fence["run"].as_u64(), fence["request"].as_u64()), (Some(2), Some(0)));
    assert_eq!(client.wait_for_frame(|frame| frame.run == 2).request, 0);
}

pub(crate) fn a_stream_that_cannot_start_says_why() {
    let mut stream = demo_stream("tp=1");
    stream.options.prompt = "a purple elephant".into();
    let server = TestServer::start_stream(stream, test_options());
    let ds = server.stop().unwrap_err();
    assert!(ds[0].message.contains("purple"), "{ds:?}");
}
