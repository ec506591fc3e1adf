//! The messages between server and clients on the socket `/socket`, version 1: JSON in text messages, frames of the video in
//! binary messages. `docs/reference/stream-protocol.md` describes them for the author of a client.

mod video_frame;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

pub use video_frame::{VIDEO_FRAME_HEADER_BYTES, VIDEO_FRAME_MAGIC, VideoFrameHeader};

/// Version of the protocol. A client states it, and the server refuses any other.
pub const PROTOCOL_VERSION: u32 = 1;
/// Most bytes of a text message that a client may send.
pub const MAX_CLIENT_MESSAGE_BYTES: usize = 16 << 10;
/// First bytes of a binary message.
pub const FRAME_MAGIC: [u8; 4] = *b"TSF1";
/// Bytes of the header of a binary message.
pub const FRAME_HEADER_BYTES: usize = 48;

/// Format of the frames that a client takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FrameFormat {
    /// Bytes of RGB, row by row.
    Raw,
    /// JPEG.
    Jpeg,
    /// A fragment of MP4 with the H.264 of a chunk.
    Mp4,
    /// No frames: the client controls or observes only.
    None,
}

impl FrameFormat {
    /// Returns the name, as messages spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            FrameFormat::Raw => "raw",
            FrameFormat::Jpeg => "jpeg",
            FrameFormat::Mp4 => "mp4",
            FrameFormat::None => "none",
        }
    }
}

/// A message of a client.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "type", rename_all = "snake_case", deny_unknown_fields)]
pub enum ClientMessage {
    /// The first message.
    Hello(ClientHello),
    /// So many more frames may be sent to this client.
    Credits {
        /// Number of frames.
        frames: u32,
    },
    /// A change of the stream, which only the client in control may request.
    Change {
        /// Number that the client chose, which the answers repeat.
        id: u64,
        /// What changes.
        change: Change,
    },
    /// A request about the control of the stream.
    Control {
        /// What the client wants.
        action: ControlAction,
    },
}

/// The first message of a client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ClientHello {
    /// [`PROTOCOL_VERSION`] of the client.
    pub version: u32,
    /// Format of the frames that it takes.
    pub format: FrameFormat,
    /// Whether it wants to control the stream if nobody does.
    #[serde(default)]
    pub control: bool,
    /// The secret of an earlier connection, as which it continues.
    #[serde(default)]
    pub resume: Option<String>,
    /// Number of frames that may be sent before the first `credits`.
    #[serde(default)]
    pub credits: u32,
}

/// A change of the stream.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Change {
    /// The prompt, from the next requested chunk on.
    Prompt(String),
    /// The seed, from the next requested chunk on.
    Seed(u64),
    /// The list of denoise steps, by its name, from the next requested chunk on.
    Steps(String),
    /// The attention bias on context keys, from the next requested chunk on.
    Bias(f32),
    /// The LoRA, by its name, or none, from the next requested chunk on, which opens a new scene.
    Lora(Option<String>),
    /// The next requested chunk opens a new scene.
    Cut,
    /// As `cut`, and chunks that are not delivered yet are discarded.
    Flush,
    /// No further chunk is requested until `resume`.
    Pause,
    /// Chunks are requested again.
    Resume,
}

impl Change {
    /// Returns the name of the kind, as messages spell it.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Change::Prompt(_) => "prompt",
            Change::Seed(_) => "seed",
            Change::Steps(_) => "steps",
            Change::Bias(_) => "bias",
            Change::Lora(_) => "lora",
            Change::Cut => "cut",
            Change::Flush => "flush",
            Change::Pause => "pause",
            Change::Resume => "resume",
        }
    }
}

/// What a client wants about the control of the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ControlAction {
    /// Control the stream if nobody does; otherwise ask the client that does.
    Take,
    /// Give the control up.
    Release,
    /// Hand the control over to the client with this number.
    HandOver(u64),
}

/// A message of the server.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub enum ServerMessage {
    /// The answer to [`ClientMessage::Hello`].
    Hello(Box<ServerHello>),
    /// A change was sent to the leader.
    Accepted {
        /// The client's number of the change.
        id: u64,
        /// Kind of the change.
        change: &'static str,
    },
    /// The chunk with which a change takes effect.
    Effect {
        /// The client's number of the change.
        id: u64,
        /// Kind of the change.
        change: &'static str,
        /// Run of the stream, which a restart increases.
        run: u32,
        /// The first request with the change; frames carry the same number.
        request: u64,
    },
    /// A message of the client was refused.
    Refused(Refusal),
    /// Frames of this run and of earlier requests are out of date: a client discards those that it has not shown.
    Fence {
        /// Run of the stream.
        run: u32,
        /// The first request whose frames are valid.
        request: u64,
    },
    /// Who controls the stream.
    Control(ControlState),
    /// A client asks the one in control to hand it over.
    ControlWanted {
        /// Number of the client that asks.
        client: u64,
    },
    /// What the stream does, after each chunk and each change of its state.
    Status(Box<StreamStatus>),
    /// So many more frames of the input video may be sent by this client, which is in control.
    VideoCredits {
        /// Number of frames.
        frames: usize,
        /// Number of frames of the client that were discarded, because the run that should have taken them has ended.
        dropped: usize,
    },
    /// Something went wrong.
    Alarm(Alarm),
    /// The connection ends.
    Bye(Refusal),
}

/// The first message of the server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ServerHello {
    /// [`PROTOCOL_VERSION`].
    pub version: u32,
    /// Number of this client.
    pub client: u64,
    /// Secret with which the client continues after its connection was lost.
    pub resume: String,
    /// Most bytes of a text message of the client.
    pub max_message_bytes: usize,
    /// Most frames that wait for the client. The oldest is dropped when another one arrives.
    pub max_waiting_frames: usize,
    /// The stream.
    pub stream: StreamFacts,
    /// Who controls it.
    pub control: ControlState,
}

/// What does not change while the server runs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StreamFacts {
    /// Name of the model.
    pub model: String,
    /// Axes of the mesh and their sizes.
    pub mesh: String,
    /// Kind of device of the ranks.
    pub device: &'static str,
    /// Digest of the sealed plan.
    pub plan: String,
    /// Width of a frame in pixels.
    pub width: u32,
    /// Height of a frame in pixels.
    pub height: u32,
    /// Frames per second at which the model's video plays.
    pub frame_rate: f64,
    /// Frames of a chunk.
    pub chunk_frames: u32,
    /// How the stream is paced: `model`, `client` or `free`.
    pub pace: Pace,
    /// Number of chunks that are requested ahead of the one that plays.
    pub lead: u32,
    /// Formats that a client may name in its hello.
    pub formats: Vec<&'static str>,
    /// Media type of the format `mp4`, with its codec; `None` if the server has no such format.
    pub mp4_type: Option<String>,
    /// Prompts that the model knows, as suggestions.
    pub examples: Vec<String>,
    /// Names of the lists of denoise steps that the plan admits, that of the model first.
    pub step_lists: Vec<String>,
    /// Whether the stream takes another attention bias.
    pub reads_bias: bool,
    /// The attention bias of the plan.
    pub bias: f64,
    /// Names of the LoRAs that a client may choose.
    pub loras: Vec<String>,
    /// The input video that the client in control sends; `None` if the stream has none.
    pub video_in: Option<VideoInFacts>,
}

/// What a client that sends an input video needs to know beside the size and the rate of frames.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct VideoInFacts {
    /// Frames of the first chunk of a scene.
    pub first_chunk_frames: usize,
    /// Frames that a client may send ahead of those that were taken.
    pub frames_ahead: usize,
}

/// What paces a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Pace {
    /// The model's frame rate: no chunk is generated long before it plays.
    Model,
    /// The client in control: chunks are generated as fast as it takes their frames. Without such a client, the model's
    /// frame rate.
    Client,
    /// The ranks: a chunk is requested as soon as an earlier one was delivered. A client that cannot follow loses frames.
    Free,
}

/// Who controls the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct ControlState {
    /// Number of the client in control.
    pub holder: Option<u64>,
    /// Whether it is the client that receives this message.
    pub is_you: bool,
}

/// Why something was refused.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Refusal {
    /// The client's number of the refused change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<u64>,
    /// Code of the reason, such as `T1604`.
    pub code: &'static str,
    /// The reason.
    pub message: String,
    /// What to do.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

impl Refusal {
    /// States a diagnostic as the reason.
    #[must_use]
    pub fn from_diagnostic(d: &Diagnostic) -> Refusal {
        let labels = d.labels.iter().map(|label| format!("; {}: {}", label.location, label.message));
        let message = std::iter::once(d.message.clone()).chain(labels).collect();
        Refusal { id: None, code: d.code.id, message, hint: d.hint.clone() }
    }

    /// Names the change that is refused.
    #[must_use]
    pub fn with_id(self, id: u64) -> Refusal {
        Refusal { id: Some(id), ..self }
    }
}

/// Something that went wrong.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Alarm {
    /// Code, such as `T0750`.
    pub code: String,
    /// Title of the code.
    pub title: String,
    /// What happened, in one sentence.
    pub message: String,
    /// Further lines: labels, notes and the hint.
    pub details: Vec<String>,
    /// The page of the code.
    pub explanation: String,
    /// Whether the stream starts again.
    pub restarts: bool,
    /// Number of chunks that the next run generates again before it continues the scene; `None` if it begins a new one.
    pub regenerates: Option<u32>,
    /// Run of the stream that ended.
    pub run: u32,
}

/// What a stream does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum StreamState {
    /// The ranks load.
    Starting,
    /// Chunks are generated.
    Running,
    /// The client in control paused the stream.
    Paused,
    /// Nobody watches, so nothing is requested.
    Idle,
    /// The client in control sends no frames of the input video, or too slowly.
    WaitingForVideo,
    /// A run failed and the next one starts soon.
    Restarting,
    /// The server starts no further run.
    Ended,
}

impl StreamState {
    /// Every state.
    pub const ALL: [StreamState; 7] = [
        StreamState::Starting,
        StreamState::Running,
        StreamState::Paused,
        StreamState::Idle,
        StreamState::WaitingForVideo,
        StreamState::Restarting,
        StreamState::Ended,
    ];

    /// Returns the name, as messages spell it.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            StreamState::Starting => "starting",
            StreamState::Running => "running",
            StreamState::Paused => "paused",
            StreamState::Idle => "idle",
            StreamState::WaitingForVideo => "waiting_for_video",
            StreamState::Restarting => "restarting",
            StreamState::Ended => "ended",
        }
    }
}

/// What the stream does now, and the figures of its latest chunk.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct StreamStatus {
    /// What the stream does.
    pub state: StreamState,
    /// Run of the stream, from 1. A restart increases it.
    pub run: u32,
    /// Number of chunks that this run has delivered.
    pub chunks: u32,
    /// Number of frames that all runs have delivered.
    pub frames: u64,
    /// Request of the latest chunk.
    pub request: Option<u64>,
    /// Cache epoch of the latest chunk.
    pub epoch: Option<u32>,
    /// Prompt of the latest chunk.
    pub prompt: String,
    /// Seed of the latest chunk.
    pub seed: u64,
    /// List of denoise steps of the latest chunk.
    pub steps: String,
    /// Attention bias of the latest chunk, if a client has changed it.
    pub bias: Option<f32>,
    /// LoRA of the latest chunk, if a client has chosen one.
    pub lora: Option<String>,
    /// Frames per second of this run since its first chunk.
    pub generated_fps: f64,
    /// Frames per second that the ranks would reach without pacing: frames of the latest chunk over the time of its phases
    /// on the first rank.
    pub possible_fps: f64,
    /// Milliseconds from the decision about the latest call to its delivery.
    pub call_ms: f64,
    /// Name and milliseconds of each phase of the latest chunk on the first rank.
    pub phases: Vec<(String, f64)>,
    /// Requests that wait at the leader.
    pub queued_in: u32,
    /// Finished chunks that wait for delivery.
    pub queued_out: u32,
    /// OverlapScore of the latest chunks, once there are enough.
    pub overlap_score: Option<f64>,
    /// Number of connected clients.
    pub clients: usize,
    /// Number of frames that were dropped for the client that receives this message.
    pub dropped: u64,
}

/// The header of a binary message, in front of the bytes of the picture. All numbers are little-endian.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FrameHeader {
    /// Format of the picture.
    pub format: FrameFormat,
    /// Whether the frame is the first one of its chunk.
    pub is_first: bool,
    /// Whether it is the last one.
    pub is_last: bool,
    /// Whether the picture is the initialisation segment of a video instead.
    pub is_initialisation: bool,
    /// Run of the stream.
    pub run: u32,
    /// Cache epoch of the chunk.
    pub epoch: u32,
    /// Request that the chunk serves.
    pub request: u64,
    /// Number of the frame among those of all runs.
    pub frame: u64,
    /// Microseconds since the start of the server at which the chunk was delivered.
    pub delivered_us: u64,
    /// Width of the picture in pixels.
    pub width: u16,
    /// Height of the picture in pixels.
    pub height: u16,
    /// Bytes of the picture.
    pub picture_bytes: u32,
}

impl FrameHeader {
    /// Returns the bytes of the header.
    #[must_use]
    pub fn encode(&self) -> [u8; FRAME_HEADER_BYTES] {
        let format = match self.format {
            FrameFormat::None => 0,
            FrameFormat::Raw => 1,
            FrameFormat::Jpeg => 2,
            FrameFormat::Mp4 => 3,
        };
        let flags =
            u8::from(self.is_first) | u8::from(self.is_last) << 1 | u8::from(self.is_initialisation) << 2;
        let mut bytes = [0; FRAME_HEADER_BYTES];
        bytes[..4].copy_from_slice(&FRAME_MAGIC);
        bytes[4..8].copy_from_slice(&[format, flags, 0, 0]);
        bytes[8..12].copy_from_slice(&self.run.to_le_bytes());
        bytes[12..16].copy_from_slice(&self.epoch.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.request.to_le_bytes());
        bytes[24..32].copy_from_slice(&self.frame.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.delivered_us.to_le_bytes());
        bytes[40..42].copy_from_slice(&self.width.to_le_bytes());
        bytes[42..44].copy_from_slice(&self.height.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.picture_bytes.to_le_bytes());
        bytes
    }

    /// Reads a binary message, and returns its header with the bytes of the picture. Returns `None` for what is no frame.
    #[must_use]
    pub fn decode(message: &[u8]) -> Option<(FrameHeader, &[u8])> {
        let (head, picture) = message.split_first_chunk::<FRAME_HEADER_BYTES>()?;
        let format = match head[4] {
            1 => FrameFormat::Raw,
            2 => FrameFormat::Jpeg,
            3 => FrameFormat::Mp4,
            _ => return None,
        };
        let u16_at = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
        let u32_at = |at: usize| u32::from(u16_at(at)) | u32::from(u16_at(at + 2)) << 16;
        let u64_at = |at: usize| u64::from(u32_at(at)) | u64::from(u32_at(at + 4)) << 32;
        let header = FrameHeader {
            format,
            is_first: head[5] & 1 != 0,
            is_last: head[5] & 2 != 0,
            is_initialisation: head[5] & 4 != 0,
            run: u32_at(8),
            epoch: u32_at(12),
            request: u64_at(16),
            frame: u64_at(24),
            delivered_us: u64_at(32),
            width: u16_at(40),
            height: u16_at(42),
            picture_bytes: u32_at(44),
        };
        // What the format leaves open, such as bytes that are 0, is none of its frames either.
        (*head == header.encode() && picture.len() as u64 == u64::from(header.picture_bytes))
            .then_some((header, picture))
    }
}

/// Reads a message of a client.
///
/// # Errors
/// Says what is wrong with the text, for the person who wrote the client.
pub fn parse_client_message(text: &str) -> Result<ClientMessage, String> {
    if text.len() > MAX_CLIENT_MESSAGE_BYTES {
        return Err(format!("a message of {} bytes; the limit is {MAX_CLIENT_MESSAGE_BYTES}", text.len()));
    }
    serde_json::from_str(text).map_err(|e| e.to_string())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parse(text: &str) -> ClientMessage {
        parse_client_message(text).unwrap()
    }

    #[test]
    fn messages_are_spelled_as_the_reference_page_says() {
        let hello = parse(r#"{"type":"hello","version":1,"format":"jpeg","control":true,"credits":24}"#);
        let expected =
            ClientHello { version: 1, format: FrameFormat::Jpeg, control: true, resume: None, credits: 24 };
        assert_eq!(hello, ClientMessage::Hello(expected));
        let change = |text: &str| match parse(&format!(r#"{{"type":"change","id":7,"change":{text}}}"#)) {
            ClientMessage::Change { id: 7, change } => change,
            other => panic!("{other:?}"),
        };
        assert_eq!(change(r#"{"prompt":"a dog"}"#), Change::Prompt("a dog".into()));
        assert_eq!(change(r#"{"seed":9}"#), Change::Seed(9));
        assert_eq!(change(r#"{"steps":"fast"}"#), Change::Steps("fast".into()));
        assert_eq!(change(r#"{"bias":0.5}"#), Change::Bias(0.5));
        assert_eq!(change(r#"{"lora":"sketch"}"#), Change::Lora(Some("sketch".into())));
        assert_eq!(change(r#"{"lora":null}"#), Change::Lora(None));
        assert_eq!(change(r#""flush""#), Change::Flush);
        let hand_over = parse(r#"{"type":"control","action":{"hand_over":3}}"#);
        assert_eq!(hand_over, ClientMessage::Control { action: ControlAction::HandOver(3) });
    }

    #[test]
    fn what_is_no_message_is_refused_with_its_place() {
        for wrong in [
            "",
            "[]",
            "{}",
            r#"{"type":"shutdown"}"#,
            r#"{"type":"credits","frames":-1}"#,
            r#"{"type":"credits","frames":1,"more":2}"#,
            r#"{"type":"change","id":1,"change":"reboot"}"#,
            r#"{"type":"hello","version":1,"format":"bmp"}"#,
        ] {
            assert!(parse_client_message(wrong).is_err(), "{wrong}");
        }
        let long = format!(r#"{{"type":"change","id":1,"change":{{"prompt":"{}"}}}}"#, "w".repeat(20_000));
        assert!(parse_client_message(&long).unwrap_err().contains("limit"));
    }

    #[test]
    fn a_header_has_the_bytes_that_the_reference_page_lists() {
        let header = FrameHeader {
            format: FrameFormat::Raw,
            is_first: true,
            is_last: false,
            is_initialisation: false,
            run: 1,
            epoch: 2,
            request: 3,
            frame: 4,
            delivered_us: 5,
            width: 128,
            height: 64,
            picture_bytes: 24_576,
        };
        let bytes = header.encode();
        assert_eq!(&bytes[..8], b"TSF1\x01\x01\0\0");
        assert_eq!(
            bytes[8..48].iter().map(|b| u32::from(*b)).sum::<u32>(),
            1 + 2 + 3 + 4 + 5 + 128 + 64 + 96
        );
        assert_eq!(&bytes[40..48], [128, 0, 64, 0, 0, 96, 0, 0]);
        let message = [&bytes[..], &[7; 24_576]].concat();
        assert_eq!(FrameHeader::decode(&message), Some((header, &message[48..])));
        assert_eq!(FrameHeader::decode(&message[..message.len() - 1]), None);
        assert_eq!(FrameHeader::decode(&[b"TSF2", &message[4..]].concat()), None);
    }

    proptest! {
        #[test]
        fn no_text_makes_the_parser_fail_otherwise(text in any::<String>()) {
            let _ = parse_client_message(&text);
        }

        #[test]
        fn a_message_survives_its_own_text(id in any::<u64>(), prompt in "[a-z<>&\"\\\\ ]{0,40}") {
            let message = ClientMessage::Change { id, change: Change::Prompt(prompt) };
            let text = serde_json::to_string(&message).unwrap();
            prop_assert_eq!(parse_client_message(&text).unwrap(), message);
        }
    }
}
