//! Bytes as messages on the socket of `tessera serve`.

use tessera_serve::protocol::{
    ClientMessage, FrameHeader, MAX_CLIENT_MESSAGE_BYTES, VideoFrameHeader, parse_client_message,
};

/// A text is refused with a reason, or it is a message that has the same meaning when it is written again.
pub(super) fn check_client_message(bytes: &[u8]) {
    // The socket refuses what is no UTF-8 before anything reads it.
    let Ok(text) = std::str::from_utf8(bytes) else { return };
    match parse_client_message(text) {
        Err(why) => assert!(!why.is_empty(), "a message is refused without a reason"),
        Ok(message) => {
            assert!(text.len() <= MAX_CLIENT_MESSAGE_BYTES, "a message of {} bytes is accepted", text.len());
            let written = serde_json::to_string(&message)
                .unwrap_or_else(|e| panic!("an accepted message cannot be written: {e}"));
            // A message at the limit may be longer in another spelling.
            if written.len() <= MAX_CLIENT_MESSAGE_BYTES {
                let again: Result<ClientMessage, String> = parse_client_message(&written);
                assert_eq!(again, Ok(message), "a message changes when it is written again");
            }
        }
    }
}

/// Bytes are no frame, or they are exactly a header and its picture.
pub(super) fn check_frame(bytes: &[u8]) {
    if let Some((header, picture)) = FrameHeader::decode(bytes) {
        assert_eq!(
            [&header.encode()[..], picture].concat(),
            bytes,
            "a frame changes when it is written again"
        );
    }
    if let Some((header, picture)) = VideoFrameHeader::decode(bytes) {
        assert_eq!(
            [&header.encode()[..], picture].concat(),
            bytes,
            "a frame of an input video changes when it is written again"
        );
    }
}
