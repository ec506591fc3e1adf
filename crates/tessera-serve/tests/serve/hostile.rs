//! Clients that misbehave.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use serde_json::json;
use tungstenite::Message;

use crate::client::{Received, SocketClient, get, request};
use crate::{TestServer, test_options};

/// Returns the last message before the server closes a connection.
fn read_farewell(client: &mut SocketClient) -> serde_json::Value {
    let mut last = serde_json::Value::Null;
    loop {
        match client.receive() {
            Received::Text(message) => last = message,
            Received::Frame(_) => {}
            Received::Closed => return last,
        }
    }
}

pub(crate) fn malformed_messages_end_one_connection_and_no_other() {
    let server = TestServer::start(test_options());
    let address = server.at.address;
    let mut watcher = SocketClient::join_in_control(address);
    watcher.wait_for_frame(|_| true);
    let expect = |message: Message, code: &str| {
        let mut socket = SocketClient::join(address, json!({}));
        socket.send_raw(message);
        let bye = read_farewell(&mut socket);
        assert_eq!((bye["type"].as_str(), bye["code"].as_str()), (Some("bye"), Some(code)), "{bye}");
    };
    expect(Message::text("no JSON"), "T1603");
    expect(Message::text(r#"{"type":"reboot"}"#), "T1603");
    expect(Message::binary(vec![0; 16]), "T1603");
    expect(Message::text("w".repeat(40_000)), "T1603");
    // A first message that is no hello, and an old version.
    for first in [r#"{"type":"credits","frames":1}"#, r#"{"type":"hello","version":9,"format":"raw"}"#] {
        let mut socket = SocketClient::open(address);
        socket.send(Message::text(first)).unwrap();
        let bye: serde_json::Value = serde_json::from_str(socket.read().unwrap().to_text().unwrap()).unwrap();
        assert_eq!(bye["code"], "T1603", "{bye}");
    }
    // A flood is refused, and ends at last.
    let mut flood = SocketClient::join(address, json!({}));
    for _ in 0..600 {
        if !flood.try_send(&json!({ "type": "credits", "frames": 0 })) {
            break;
        }
    }
    assert_eq!(read_farewell(&mut flood)["code"], "T1606");
    let frame = watcher.wait_for_frame(|_| true);
    watcher.wait_for_frame(|later| later.request > frame.request + 1);
}

pub(crate) fn connections_that_say_nothing_or_too_much_do_not_disturb_the_stream() {
    let mut options = test_options();
    options.limits.handshake = Duration::from_secs(1);
    let server = TestServer::start(options);
    let address = server.at.address;
    let mut watcher = SocketClient::join_in_control(address);
    let first = watcher.wait_for_frame(|_| true).number;
    let body = "w".repeat(100_000);
    let large = request(address, "POST", "/api/v1/changes", &["content-type: application/json"], &body);
    assert_eq!(large.status, 413);
    let long_header = format!("x-long: {}", "w".repeat(40_000));
    assert_eq!(request(address, "GET", "/api/v1/status", &[&long_header], "").status, 431);
    for junk in ["\x16\x03\x01 no HTTP\r\n\r\n", "GET / HTTP/1.1\r\n\r\n", "\r\n\r\n\r\n"] {
        let mut stream = TcpStream::connect(address).unwrap();
        stream.write_all(junk.as_bytes()).unwrap();
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer);
        assert!(!answer.starts_with(b"HTTP/1.1 200"), "{junk:?}");
    }
    // A thousand connections that say nothing: forty are held for a second, the others are refused at once.
    let silent: Vec<TcpStream> = (0..1000).filter_map(|_| TcpStream::connect(address).ok()).collect();
    assert!(silent.len() > 900);
    let until = Instant::now() + Duration::from_secs(30);
    while !is_healthy(address) {
        assert!(Instant::now() < until, "the server did not recover from silent connections");
        std::thread::sleep(Duration::from_millis(100));
    }
    drop(silent);
    // A request that stops in the middle of its header, and a socket without a hello, are closed.
    let mut half = TcpStream::connect(address).unwrap();
    half.write_all(b"GET / HTTP/1.1\r\nhost: loc").unwrap();
    half.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    let mut rest = Vec::new();
    assert!(half.read_to_end(&mut rest).is_ok(), "the half request was not closed");
    let mut mute = SocketClient::open(address);
    assert!(mute.read().unwrap().to_text().unwrap().contains("T1603"));
    let now = watcher.wait_for_frame(|frame| frame.number > first + 36).number;
    watcher.wait_for_frame(|frame| frame.number > now + 24);
    assert_eq!(get(address, "/api/v1/status").json()["status"]["run"], 1);
}

fn is_healthy(address: std::net::SocketAddr) -> bool {
    let Ok(mut stream) = TcpStream::connect(address) else { return false };
    let mut answer = String::new();
    let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n");
    let _ = stream.read_to_string(&mut answer);
    answer.starts_with("HTTP/1.1 200")
}
