//! Sessions that go on in another server.

use std::collections::BTreeMap;
use std::path::Path;

use serde_json::{Value, json};
use tessera_serve::ServeOptions;

use crate::client::{Received, SocketClient};
use crate::{TestServer, demo_stream, test_options};

/// Reads frames until a chunk after `last` arrives, and returns the pictures of each chunk.
fn collect_chunks(client: &mut SocketClient, last: u64) -> BTreeMap<u64, Vec<Vec<u8>>> {
    let mut chunks: BTreeMap<u64, Vec<Vec<u8>>> = BTreeMap::new();
    loop {
        match client.receive() {
            Received::Frame(frame) if frame.request > last => return chunks,
            Received::Frame(frame) => chunks.entry(frame.request).or_default().push(frame.picture),
            Received::Text(_) => {}
            Received::Closed => panic!("the server closed the connection"),
        }
    }
}

fn read_chunk_lines(run: &Path) -> Vec<Value> {
    let record = std::fs::read_to_string(run.join("record.jsonl")).unwrap();
    let lines = record.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line["kind"] == "chunk").collect()
}

/// Returns the options of a server whose runs have folders in `dir`, and which continues a session there.
fn options_in(dir: &Path, name: &str, resume: Option<&str>) -> ServeOptions {
    ServeOptions {
        out: Some(dir.join(name)),
        resume: resume.map(|folder| dir.join(folder)),
        ..test_options()
    }
}

/// Writes the record of a run as if the run had ended after so many chunks.
fn cut_record(run: &Path, to: &Path, chunks: usize, edit: impl Fn(&str) -> String) {
    let record = std::fs::read_to_string(run.join("record.jsonl")).unwrap();
    let mut seen = 0;
    let is_kept = |line: &&str| {
        seen += usize::from(line.starts_with("{\"kind\":\"chunk\""));
        !line.starts_with("{\"kind\":\"end\"") && (!line.starts_with("{\"kind\":\"chunk\"") || seen <= chunks)
    };
    let kept: Vec<String> = record.lines().filter(is_kept).map(|line| edit(line) + "\n").collect();
    std::fs::create_dir_all(to).unwrap();
    std::fs::write(to.join("record.jsonl"), kept.concat()).unwrap();
}

pub(crate) fn a_session_goes_on_with_the_chunk_that_would_have_followed() {
    let dir = tempfile::tempdir().unwrap();
    let options = |name: &str, resume: Option<&str>| options_in(dir.path(), name, resume);
    let server = TestServer::start(options("first", None));
    let mut client = SocketClient::join_in_control(server.at.address);
    client.wait_for_frame(|frame| frame.request == 1);
    client.change(json!({ "prompt": "a blue square moves left" }));
    client.wait_until("effect", |effect| effect["change"] == "prompt");
    client.change(json!({ "seed": 11 }));
    client.wait_until("effect", |effect| effect["change"] == "seed");
    client.change(json!("cut"));
    let cut = client.wait_until("effect", |effect| effect["change"] == "cut")["request"].as_u64().unwrap();
    // The prompt of before again, which the ranks encode again.
    client.change(json!({ "prompt": "a blue square moves left" }));
    let again =
        client.wait_until("effect", |effect| effect["change"] == "prompt")["request"].as_u64().unwrap();
    // The session ends in the middle of a scene, behind all changes.
    let kept = cut.max(again) + 2;
    let expected = collect_chunks(&mut client, kept + 2);
    drop(client);
    server.stop().unwrap();
    let first = dir.path().join("first/run-1");
    cut_record(&first, &dir.path().join("recorded"), kept as usize, str::to_string);
    assert_eq!(read_chunk_lines(&dir.path().join("recorded")).len() as u64, kept);

    let server = TestServer::start(options("second", Some("recorded")));
    let mut client = SocketClient::join_in_control(server.at.address);
    let resumed = collect_chunks(&mut client, kept + 2);
    assert_eq!(resumed.keys().copied().collect::<Vec<_>>(), [kept, kept + 1, kept + 2]);
    for (request, pictures) in &resumed {
        assert!(expected[request] == *pictures, "the pictures of chunk {request} differ");
    }
    let status = client.wait_for("status");
    assert_eq!(
        (status["prompt"].as_str(), status["seed"].as_u64()),
        (Some("a blue square moves left"), Some(11))
    );
    drop(client);
    server.stop().unwrap();
    let digests = |run: &Path| -> Vec<Value> {
        let lines = read_chunk_lines(run);
        lines.iter().take(kept as usize + 3).map(|line| line["latents_digest"].clone()).collect()
    };
    assert_eq!(digests(&first), digests(&dir.path().join("second/run-1")));
}

pub(crate) fn a_session_that_comes_out_differently_does_not_go_on() {
    let dir = tempfile::tempdir().unwrap();
    let options = |name: &str, resume: Option<&str>| options_in(dir.path(), name, resume);
    let server = TestServer::start(options("first", None));
    SocketClient::join_in_control(server.at.address).wait_for_frame(|frame| frame.request == 3);
    server.stop().unwrap();
    let first = dir.path().join("first/run-1");
    // As if another model had made the last chunk.
    let digest = read_chunk_lines(&first)[2]["latents_digest"].as_str().unwrap().to_string();
    cut_record(&first, &dir.path().join("changed"), 3, |line| line.replace(&digest, "0123456789abcdef"));
    let server = TestServer::start(options("second", Some("changed")));
    let ds = server.wait().unwrap_err();
    assert_eq!(ds[0].code.id, "T1611");
    assert!(ds[0].message.contains("chunk 2"), "{ds:?}");

    cut_record(&first, &dir.path().join("empty"), 0, str::to_string);
    for (folder, mesh) in [("empty", "tp=1"), ("first/run-1", "tp=2"), ("nowhere", "tp=1")] {
        let (stop, resume) = (tessera::StopHandle::default(), Some(dir.path().join(folder)));
        let options = ServeOptions { resume, ..test_options() };
        let refused = tessera_serve::serve(demo_stream(mesh), options, &stop, &mut |_| panic!("it serves"));
        assert_eq!(refused.unwrap_err()[0].code.id, "T1611", "{folder}");
    }
}
