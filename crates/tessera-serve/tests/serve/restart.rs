//! Runs that fail.

use serde_json::{Value, json};

use crate::client::{SocketClient, get};
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
    let options = tessera_serve::ServeOptions { out: Some(dir.path().join("out")), ..test_options() };
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

pub(crate) fn a_stream_that_cannot_start_says_why() {
    let mut stream = demo_stream("tp=1");
    stream.options.prompt = "a purple elephant".into();
    let server = TestServer::start_stream(stream, test_options());
    let ds = server.stop().unwrap_err();
    assert!(ds[0].message.contains("purple"), "{ds:?}");
}
