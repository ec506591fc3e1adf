//! Who controls the stream.

use serde_json::json;

use crate::client::{Received, SocketClient, request};
use crate::{TestServer, test_options};

pub(crate) fn one_client_controls_and_hands_over() {
    let server = TestServer::start(test_options());
    let address = server.at.address;
    let mut first = SocketClient::join_in_control(address);
    first.wait_for_frame(|_| true);
    let mut second = SocketClient::join_in_control(address);
    assert_eq!(second.hello["control"]["is_you"], false);
    let id = second.change(json!("cut"));
    let refused = second.wait_for("refused");
    assert_eq!((refused["id"].as_u64(), refused["code"].as_str()), (Some(id), Some("T1604")));
    let over_http = request(
        address,
        "POST",
        "/api/v1/changes",
        &["content-type: application/json"],
        r#"{"change":"cut"}"#,
    );
    assert_eq!((over_http.status, over_http.json()["code"].as_str()), (409, Some("T1604")));
    second.send(&json!({ "type": "control", "action": "take" }));
    assert_eq!(first.wait_for("control_wanted")["client"].as_u64(), Some(second.number()));
    first.send(&json!({ "type": "control", "action": { "hand_over": second.number() } }));
    let control = second.wait_until("control", |control| control["is_you"] == true);
    assert_eq!(control["holder"].as_u64(), Some(second.number()));
    second.change(json!("cut"));
    second.wait_until("effect", |effect| effect["change"] == "cut");
    let secret = format!("tessera-client: {}", second.hello["resume"].as_str().unwrap());
    let headers = [secret.as_str(), "content-type: application/json"];
    let accepted = request(address, "POST", "/api/v1/changes", &headers, r#"{"change":{"seed":5}}"#);
    assert_eq!(accepted.status, 202, "{}", accepted.text());
    second.wait_until("status", |status| status["seed"] == 5);
    let number = accepted.json()["change"].as_u64().unwrap();
    let outcome = request(address, "GET", &format!("/api/v1/changes/{number}"), &[], "");
    assert_eq!((outcome.status, outcome.json()["run"].as_u64()), (200, Some(1)));
    second.send(&json!({ "type": "control", "action": "release" }));
    first.wait_until("control", |control| control["holder"].is_null());
}

pub(crate) fn a_client_that_returns_keeps_the_control() {
    let server = TestServer::start(test_options());
    let address = server.at.address;
    let mut first = SocketClient::join_in_control(address);
    first.wait_for_frame(|_| true);
    let (number, secret) = (first.number(), first.hello["resume"].clone());
    drop(first);
    let mut other = SocketClient::join_in_control(address);
    assert_eq!(other.hello["control"]["holder"].as_u64(), Some(number));
    let mut again = SocketClient::join(address, json!({ "resume": secret, "credits": 1000 }));
    assert_eq!((again.number(), again.hello["control"]["is_you"].as_bool()), (number, Some(true)));
    again.change(json!({ "seed": 8 }));
    again.wait_until("effect", |effect| effect["change"] == "seed");
    drop(again);
    // Ten seconds later the control is free.
    other.wait_until("control", |control| control["holder"].is_null());
}

pub(crate) fn further_clients_are_refused_with_a_reason() {
    let server = TestServer::start(test_options());
    let mut clients: Vec<SocketClient> =
        (0..6).map(|_| SocketClient::join(server.at.address, json!({ "credits": 100_000 }))).collect();
    let mut socket = SocketClient::open(server.at.address);
    let hello = json!({ "type": "hello", "version": 1, "format": "raw" });
    socket.send(tungstenite::Message::text(hello.to_string())).unwrap();
    let bye: serde_json::Value = serde_json::from_str(socket.read().unwrap().to_text().unwrap()).unwrap();
    assert_eq!((bye["type"].as_str(), bye["code"].as_str()), (Some("bye"), Some("T1605")));
    for client in &mut clients {
        client.wait_for_frame(|_| true);
    }
    clients[0].send(&json!({ "type": "hello", "version": 1, "format": "raw" }));
    assert_eq!(clients[0].wait_for("refused")["code"], "T1603");
    assert!(matches!(clients[0].receive(), Received::Text(_) | Received::Frame(_)));
}
