//! Chunks as fragments of MP4, where the program was built with the encoder.

use serde_json::json;
use tungstenite::Message;

use crate::client::{Received, ReceivedFrame, SocketClient, get};
use crate::{TestServer, test_options};

/// Returns the names of the boxes of a picture, and fails if they do not fill it.
fn box_names(picture: &[u8]) -> Vec<String> {
    let (mut names, mut rest) = (Vec::new(), picture);
    while let Some((length, _)) = rest.split_first_chunk::<4>() {
        let length = u32::from_be_bytes(*length) as usize;
        names.push(String::from_utf8_lossy(&rest[4..8]).into_owned());
        rest = &rest[length..];
    }
    names
}

fn next_frame(client: &mut SocketClient) -> ReceivedFrame {
    loop {
        match client.receive() {
            Received::Frame(frame) => return frame,
            Received::Text(_) => {}
            Received::Closed => panic!("the server closed the connection"),
        }
    }
}

pub(crate) fn a_client_gets_whole_chunks_as_mp4_where_the_program_has_the_encoder() {
    let server = TestServer::start(test_options());
    let address = server.at.address;
    let stream = get(address, "/api/v1/status").json()["stream"].clone();
    let formats = stream["formats"].as_array().unwrap();
    assert_eq!(formats.contains(&json!("mp4")), cfg!(feature = "h264"), "{formats:?}");
    if !cfg!(feature = "h264") {
        assert!(stream["mp4_type"].is_null());
        let mut socket = SocketClient::open(address);
        let hello = json!({ "type": "hello", "version": 1, "format": "mp4" });
        socket.send(Message::text(hello.to_string())).unwrap();
        let bye = socket.read().unwrap();
        assert!(bye.to_text().unwrap().contains("T1615"), "{bye:?}");
        return;
    }
    assert!(stream["mp4_type"].as_str().unwrap().starts_with("video/mp4; codecs=\"avc1."), "{stream}");
    let mut other = SocketClient::join_in_control(address);
    let mut client = SocketClient::join(address, json!({ "format": "mp4", "credits": 4 }));
    let first = next_frame(&mut client);
    assert!(first.is_initialisation && !first.is_first && !first.is_last, "{first:?}");
    assert_eq!(box_names(&first.picture), ["ftyp", "moov"]);
    let fragments: Vec<ReceivedFrame> = (0..4).map(|_| next_frame(&mut client)).collect();
    for fragment in &fragments {
        assert!(!fragment.is_initialisation && fragment.is_first && fragment.is_last);
        assert_eq!((fragment.number % 12, fragment.size), (0, (128, 128)));
        assert_eq!(box_names(&fragment.picture), ["moof", "mdat"]);
    }
    assert!(fragments.windows(2).all(|pair| pair[1].number == pair[0].number + 12));
    // A fragment needs a credit as a frame does. Two wait, and later ones replace them.
    let last = fragments[3].number;
    other.wait_for_frame(|frame| frame.number > last + 60);
    client.send(&json!({ "type": "credits", "frames": 1 }));
    assert!(next_frame(&mut client).number > last + 12);
    assert!(client.wait_until("status", |status| status["dropped"].as_u64() > Some(0))["dropped"].is_u64());
}
