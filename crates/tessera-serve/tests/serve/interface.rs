//! The HTTP interface.

use std::collections::BTreeSet;

use serde_json::Value;
use tessera_serve::ServeOptions;

use crate::client::{SocketClient, get, request};
use crate::{TestServer, project_root, test_options};

pub(crate) fn every_path_of_the_description_answers() {
    let dir = tempfile::tempdir().unwrap();
    let recordings = Some(dir.path().to_path_buf());
    let server = TestServer::start(ServeOptions { recordings, ..test_options() });
    let address = server.at.address;
    let mut client = SocketClient::join_in_control(address);
    client.wait_for_frame(|frame| frame.request >= 1);
    let description = get(address, "/api/v1/openapi.json").json();
    let paths = description["paths"].as_object().unwrap();
    assert!(paths.len() > 10);
    for (path, methods) in paths {
        for method in methods.as_object().unwrap().keys() {
            let path = path.replace("{number}", "1").replace("{name}", "7.y4m");
            let answer = request(address, &method.to_uppercase(), &path, &[], "");
            let codes: Vec<&String> = paths
                .get(&path)
                .map_or(Vec::new(), |p| p[method]["responses"].as_object().unwrap().keys().collect());
            // An unknown path has an empty answer; a known one says what is missing.
            assert!(answer.status != 404 || !answer.body.is_empty(), "{method} {path}");
            assert!(answer.status != 405, "{method} {path}");
            let is_described =
                codes.is_empty() || codes.iter().any(|code| **code == answer.status.to_string());
            let is_malformed = [400, 415, 426].contains(&answer.status);
            assert!(is_described || is_malformed, "{method} {path}: {}", answer.status);
        }
    }
    assert_eq!(get(address, "/api/v1/nothing").status, 404);
    let png = get(address, "/api/v1/snapshot.png");
    let decoder = png::Decoder::new(std::io::Cursor::new(png.body));
    assert_eq!(decoder.read_info().unwrap().info().size(), (128, 128));
    assert!(get(address, "/api/v1/snapshot.jpg").body.starts_with(&[0xff, 0xd8]));
    client.wait_for_frame(|frame| frame.request >= 4);
    let timeline = get(address, "/api/v1/timeline").json();
    let chunks = timeline["chunks"].as_array().unwrap();
    assert!(
        !chunks.is_empty() && chunks.iter().all(|c| !c["ranks"][0]["phases"].as_array().unwrap().is_empty())
    );
    let status = get(address, "/api/v1/status").json();
    let schema = &description["components"]["schemas"]["Status"];
    let described: BTreeSet<&String> = schema["properties"].as_object().unwrap().keys().collect();
    let sent: BTreeSet<&String> = status["status"].as_object().unwrap().keys().collect();
    assert_eq!(described, sent);
    let page = get(address, "/").text();
    assert!(page.contains("page.js") && !page.contains("http://") && !page.contains("https://"), "{page}");
}

pub(crate) fn metrics_are_those_of_the_reference_page_and_of_the_dashboard() {
    let server = TestServer::start(test_options());
    let mut client = SocketClient::join_in_control(server.at.address);
    client.wait_for_frame(|frame| frame.request >= 1);
    client.change(serde_json::json!("cut"));
    client.wait_for("effect");
    let foreign = request(server.at.address, "GET", "/metrics", &["host: evil.example"], "");
    assert_eq!(foreign.status, 403);
    let text = get(server.at.address, "/metrics").text();
    assert!(text.ends_with("# EOF\n"));
    let families: BTreeSet<&str> =
        text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split(' ').next()).collect();
    let page = std::fs::read_to_string(project_root().join("docs/reference/serve-metrics.md")).unwrap();
    let documented: BTreeSet<&str> =
        page.lines().filter_map(|line| line.strip_prefix("| `tessera_")?.split('`').next()).collect();
    let named: BTreeSet<&str> = families.iter().map(|name| name.trim_start_matches("tessera_")).collect();
    // A family with labels has no line before its first sample; no run has failed, and there is no collector of traces.
    let without_samples = ["failures", "spans"];
    let expected: BTreeSet<&str> =
        documented.iter().copied().filter(|name| !without_samples.contains(name)).collect();
    assert_eq!(expected, named);
    assert!(without_samples.iter().all(|name| documented.contains(name)));
    let dashboard =
        std::fs::read_to_string(project_root().join("deploy/grafana/tessera-stream.json")).unwrap();
    let dashboard: Value = serde_json::from_str(&dashboard).unwrap();
    let panels = dashboard["panels"].as_array().unwrap();
    assert!(panels.len() >= 6);
    for panel in panels {
        let target = panel["targets"][0]["expr"].as_str().unwrap();
        let metric = target
            .split(|c: char| !c.is_ascii_alphanumeric() && c != '_')
            .find(|w| w.starts_with("tessera_"));
        let family =
            metric.unwrap().trim_end_matches("_total").trim_end_matches("_bucket").trim_end_matches("_info");
        assert!(documented.contains(family.trim_start_matches("tessera_")), "{target}");
    }
}

pub(crate) fn a_recording_holds_every_frame() {
    let dir = tempfile::tempdir().unwrap();
    let recordings = Some(dir.path().to_path_buf());
    let server = TestServer::start(ServeOptions { recordings, ..test_options() });
    let address = server.at.address;
    let mut client = SocketClient::join_in_control(address);
    client.wait_for_frame(|_| true);
    assert_eq!(request(address, "DELETE", "/api/v1/recordings/current", &[], "").status, 409);
    let started = request(address, "POST", "/api/v1/recordings", &[], "");
    assert_eq!((started.status, started.json()["number"].as_u64()), (201, Some(1)));
    assert_eq!(request(address, "POST", "/api/v1/recordings", &[], "").status, 409);
    let number = client.wait_for_frame(|_| true).number;
    client.wait_for_frame(|frame| frame.number > number + 36);
    let stopped = request(address, "DELETE", "/api/v1/recordings/current", &[], "").json();
    let frames = stopped["frames"].as_u64().unwrap();
    assert!(frames >= 24 && frames.is_multiple_of(12), "{stopped}");
    let file = get(address, "/api/v1/recordings/1.y4m");
    assert_eq!(file.body.len() as u64, stopped["bytes"].as_u64().unwrap());
    assert_eq!(file.body.windows(6).filter(|w| w == b"FRAME\n").count() as u64, frames);
    assert_eq!(get(address, "/api/v1/recordings/2.y4m").status, 404);
    assert_eq!(get(address, "/api/v1/recordings/..%2f..%2fetc%2fpasswd").status, 404);
    assert_eq!(get(address, "/api/v1/recordings").json().as_array().map(Vec::len), Some(1));
}
