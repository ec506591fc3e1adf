//! Input videos that a client sends.

use std::path::Path;

use serde_json::{Value, json};
use tessera::stream_options::StreamOptions;
use tessera::video_input::{VideoInput, VideoOrigin};
use tessera::{Model, Overrides, StopHandle};
use tessera_serve::protocol::{Pace, VideoFrameHeader};
use tessera_serve::{AfterFailure, ServeOptions, ServedStream};
use tungstenite::Message;

use crate::client::{Received, ReceivedFrame, SocketClient, get};
use crate::restart::{kill_rank, rank_processes};
use crate::{TestServer, project_root, serve_model, test_options};

/// Size of a frame of the model, whose scenes begin with a chunk of 9 frames; later chunks take 12.
const SIZE: (u16, u16) = (80, 48);
const FRAME_BYTES: usize = 80 * 48 * 3;
const FIRST: usize = 9;
const LATER: usize = 12;

/// A model with a causal VAE: a generator fixture and the fixture of a VAE.
fn video_stream(dir: &Path, from: VideoOrigin, mesh: &str) -> ServedStream {
    let (model, fixtures) = (dir.join("model"), project_root().join("fixtures"));
    std::fs::create_dir_all(model.join("vae")).unwrap();
    for file in ["config.json", "model.safetensors", "vocab.txt", "text_encoder.safetensors"] {
        std::fs::copy(fixtures.join("wan-odd").join(file), model.join(file)).unwrap();
    }
    for file in ["config.json", "diffusion_pytorch_model.safetensors"] {
        std::fs::copy(fixtures.join("wan-vae/vae").join(file), model.join("vae").join(file)).unwrap();
    }
    let settings = std::fs::read_to_string(fixtures.join("wan-odd/stream.toml")).unwrap();
    let settings = settings.replace("kind = \"none\"", "kind = \"wan_vae\"");
    std::fs::write(model.join("stream.toml"), settings).unwrap();
    let takes_video = Overrides { takes_video: Some(true), ..Overrides::default() };
    let mut stream = serve_model(Model::open(&model, &takes_video).unwrap(), mesh);
    stream.options.prompt = "a red square".into();
    stream.options.video = Some(VideoInput { from, strength: 0.95, follows_motion: false });
    stream
}

/// Options of a server that waits for nothing but frames, and keeps its runs in `dir`.
fn options_in(dir: &Path) -> ServeOptions {
    ServeOptions { pace: Pace::Free, out: Some(dir.join("out")), ..test_options() }
}

/// Draws a frame of a video.
fn draw(video: usize, frame: usize) -> Vec<u8> {
    (0..FRAME_BYTES).map(|i| ((i * 7 + frame * 40 + video * 90) % 251) as u8).collect()
}

fn draw_all(video: usize, frames: usize) -> Vec<u8> {
    (0..frames).flat_map(|frame| draw(video, frame)).collect()
}

fn frame_message((width, height): (u16, u16), rgb: &[u8]) -> Message {
    Message::binary([&VideoFrameHeader { width, height }.encode()[..], rgb].concat())
}

/// A chunk of the server, as far as its frames have arrived.
#[derive(Debug)]
struct ArrivedChunk {
    run: u32,
    request: u64,
    epoch: u32,
    frames: usize,
    is_whole: bool,
}

/// A client that sends a video as far as its credits reach.
struct Sender {
    client: SocketClient,
    video: usize,
    sent: usize,
    credits: u64,
    /// The chunks of which frames have arrived.
    chunks: Vec<ArrivedChunk>,
}

impl Sender {
    fn new(client: SocketClient, video: usize) -> Sender {
        Sender { client, video, sent: 0, credits: 0, chunks: Vec::new() }
    }

    /// Sends frames up to a number while there are credits.
    fn send_up_to(&mut self, frames: usize) {
        while self.sent < frames && self.credits > 0 {
            self.client.send_raw(frame_message(SIZE, &draw(self.video, self.sent)));
            self.sent += 1;
            self.credits -= 1;
        }
    }

    /// Receives a message, and keeps account of credits and frames.
    fn receive(&mut self) -> Value {
        match self.client.receive() {
            Received::Text(message) => {
                if message["type"] == "video_credits" {
                    self.credits += message["frames"].as_u64().unwrap();
                }
                message
            }
            Received::Frame(ReceivedFrame { run, request, epoch, is_last, .. }) => {
                match self.chunks.last_mut() {
                    Some(chunk) if (chunk.run, chunk.request) == (run, request) => {
                        chunk.frames += 1;
                        chunk.is_whole = is_last;
                    }
                    _ => self.chunks.push(ArrivedChunk { run, request, epoch, frames: 1, is_whole: is_last }),
                }
                Value::Null
            }
            Received::Closed => panic!("the server closed the connection"),
        }
    }

    /// Sends frames up to a number until a message arrives for which something holds, and returns it.
    fn wait_for(&mut self, frames: usize, holds: impl Fn(&Value) -> bool) -> Value {
        loop {
            self.send_up_to(frames);
            let message = self.receive();
            if holds(&message) {
                return message;
            }
        }
    }

    /// Waits until the server has received all that was sent: it answers messages in their order.
    fn wait_until_received(&mut self) {
        let id = self.client.change(json!("resume"));
        self.wait_for(0, |message| message["type"] == "effect" && message["id"] == id);
    }

    /// Sends frames up to a number until so many chunks have arrived whole.
    fn wait_for_chunks(&mut self, frames: usize, chunks: usize) {
        let is_whole = |sender: &Sender| sender.chunks.get(chunks - 1).is_some_and(|chunk| chunk.is_whole);
        while !is_whole(self) {
            self.send_up_to(frames);
            self.receive();
        }
    }
}

fn state_is(state: &'static str) -> impl Fn(&Value) -> bool {
    move |message| message["type"] == "status" && message["state"] == state
}

/// Returns the digests of the latents of the first chunks of a run.
fn read_digests(run: &Path, chunks: usize) -> Vec<String> {
    let record = std::fs::read_to_string(run.join("record.jsonl")).unwrap();
    let lines = record.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let chunk_lines = lines.filter(|line| line["kind"] == "chunk").take(chunks);
    let digests: Vec<String> =
        chunk_lines.map(|line| line["latents_digest"].as_str().unwrap().to_string()).collect();
    assert_eq!(digests.len(), chunks, "{}", run.display());
    digests
}

/// Generates chunks from a file with these frames, without a server, and returns their digests.
fn stream_file(dir: &Path, mesh: &str, rgb: &[u8], cuts_at: Vec<u32>, chunks: usize) -> Vec<String> {
    let (file, out) = (dir.join("video.rgb"), dir.join("expected"));
    std::fs::write(&file, rgb).unwrap();
    let stream = video_stream(&dir.join("file"), VideoOrigin::Path(file), mesh);
    let options = StreamOptions { chunks: chunks as u32, cuts_at, out: out.clone(), ..stream.options };
    let report = tessera::stream::run(
        &stream.plan,
        &stream.model,
        &options,
        stream.argv,
        &StopHandle::default(),
        &mut |_| {},
    );
    assert!(report.as_ref().is_ok_and(|report| report.failure.is_none()), "{report:?}");
    read_digests(&out, chunks)
}

pub(crate) fn frames_of_a_client_give_the_bits_of_a_file_whatever_others_send() {
    let dir = tempfile::tempdir().unwrap();
    let server =
        TestServer::start_stream(video_stream(dir.path(), VideoOrigin::Feed, "tp=1"), options_in(dir.path()));
    let address = server.at.address;
    let mut sender = Sender::new(SocketClient::join_in_control(address), 0);
    assert_eq!(
        sender.client.hello["stream"]["video_in"],
        json!({ "first_chunk_frames": FIRST, "frames_ahead": 2 * LATER })
    );
    let mut other = SocketClient::join(address, json!({}));
    let refused = |client: &mut SocketClient, message: Message, code: &str| {
        client.send_raw(message);
        let refusal = client.wait_for("refused");
        assert_eq!(refusal["code"], code, "{refusal}");
    };
    let rgb = draw(1, 0);
    refused(&mut other, frame_message(SIZE, &rgb), "T1604");
    refused(&mut sender.client, frame_message((48, 80), &rgb), "T1617");
    refused(&mut sender.client, frame_message(SIZE, &rgb[1..]), "T1617");
    refused(&mut sender.client, Message::binary(rgb.clone()), "T1617");
    refused(&mut sender.client, Message::binary(Vec::new()), "T1617");
    // The messages that were passed over state the first credits.
    sender.credits = 2 * LATER as u64;
    // The leader has requested two chunks, and takes no other while the stream is paused.
    sender.client.change(json!("pause"));
    let most = FIRST + LATER + 2 * LATER;
    sender.wait_for_chunks(most, 2);
    while sender.sent < most {
        sender.receive();
        sender.send_up_to(most);
    }
    assert_eq!(sender.credits, 0);
    refused(&mut sender.client, frame_message(SIZE, &draw(0, most)), "T1617");
    sender.client.change(json!("resume"));
    sender.wait_for_chunks(usize::MAX, 3);
    let id = sender.client.change(json!("cut"));
    let effect = sender.wait_for(usize::MAX, |message| message["type"] == "effect" && message["id"] == id);
    let cut = effect["request"].as_u64().unwrap() as usize;
    sender.wait_for_chunks(usize::MAX, cut + 2);
    // A message of more bytes than a frame and than 16 KiB ends the connection of its client alone.
    other.send_raw(Message::binary(vec![0; (16 << 10) + 1]));
    assert_eq!(other.wait_for("bye")["code"], "T1603");
    // Frames of the first two chunks may have arrived while this client waited for refusals.
    let counts: Vec<usize> = sender.chunks[2..cut + 2].iter().map(|chunk| chunk.frames).collect();
    let expected_counts = (2..cut + 2).map(|chunk| if chunk == cut { FIRST } else { LATER });
    assert_eq!(counts, expected_counts.collect::<Vec<_>>());
    drop(sender);
    server.stop().unwrap();
    assert_eq!(rank_processes(), Vec::<u32>::new());
    let frames = draw_all(0, 2 * FIRST + cut * LATER);
    let expected = stream_file(dir.path(), "tp=1", &frames, vec![cut as u32], cut + 2);
    assert_eq!(read_digests(&dir.path().join("out/run-1"), cut + 2), expected);
}

pub(crate) fn a_client_that_stalls_delays_the_stream_alone_and_the_next_one_begins_a_scene() {
    let dir = tempfile::tempdir().unwrap();
    let server =
        TestServer::start_stream(video_stream(dir.path(), VideoOrigin::Feed, "tp=1"), options_in(dir.path()));
    let address = server.at.address;
    let mut first = Sender::new(SocketClient::join_in_control(address), 0);
    let mut second = Sender::new(SocketClient::join(address, json!({ "credits": 1_000_000 })), 1);
    // A chunk, and five frames of the next one.
    first.wait_for_chunks(FIRST + 5, 1);
    first.wait_for(FIRST + 5, state_is("waiting_for_video"));
    second.wait_for(0, state_is("waiting_for_video"));
    let status = get(address, "/api/v1/status").json();
    assert_eq!(status["status"]["state"], "waiting_for_video");
    assert_eq!(get(address, "/readyz").status, 200);
    first.client.change(json!("pause"));
    first.wait_for(0, state_is("paused"));
    first.client.change(json!("resume"));
    first.wait_for(0, state_is("waiting_for_video"));
    let credits = first.credits;
    assert_eq!(credits, 2 * LATER as u64 - 5);
    first.client.send(&json!({ "type": "control", "action": { "hand_over": second.client.number() } }));
    second.wait_for_chunks(FIRST + LATER, 3);
    assert_eq!(second.chunks.iter().map(|chunk| chunk.frames).collect::<Vec<_>>(), [FIRST, FIRST, LATER]);
    assert!(second.chunks[1].epoch > second.chunks[0].epoch, "{:?}", second.chunks);
    first.client.send_raw(frame_message(SIZE, &draw(0, first.sent)));
    assert_eq!(first.client.wait_for("refused")["code"], "T1604");
    // A client that leaves in the middle of a chunk keeps the control for a while, and goes on with the same chunk.
    second.send_up_to(FIRST + LATER + 7);
    second.wait_until_received();
    let resume = second.client.hello["resume"].clone();
    drop(second.client);
    let returned = SocketClient::join(address, json!({ "resume": resume, "credits": 1_000_000 }));
    let mut second = Sender { client: returned, credits: 0, chunks: Vec::new(), ..second };
    second.wait_for_chunks(FIRST + 2 * LATER, 1);
    drop((first, second));
    server.stop().unwrap();
    let frames = [draw_all(0, FIRST), draw_all(1, FIRST + 2 * LATER)].concat();
    let expected = stream_file(dir.path(), "tp=1", &frames, vec![1], 4);
    assert_eq!(read_digests(&dir.path().join("out/run-1"), 4), expected);
}

pub(crate) fn a_restart_discards_the_frames_that_wait_and_returns_their_credits() {
    let dir = tempfile::tempdir().unwrap();
    let server =
        TestServer::start_stream(video_stream(dir.path(), VideoOrigin::Feed, "tp=2"), options_in(dir.path()));
    let mut sender = Sender::new(SocketClient::join_in_control(server.at.address), 0);
    sender.wait_for_chunks(FIRST + 4, 1);
    sender.wait_until_received();
    kill_rank(*rank_processes().iter().max().unwrap());
    sender.wait_for(FIRST + 4, |message| message["type"] == "alarm");
    let returned =
        sender.wait_for(0, |message| message["type"] == "video_credits" && message["dropped"] != 0);
    assert_eq!((returned["frames"].as_u64(), returned["dropped"].as_u64()), (Some(4), Some(4)));
    assert_eq!(sender.credits, 2 * LATER as u64);
    // The new run begins with the frames that follow.
    let begun = sender.sent;
    sender.chunks.clear();
    sender.wait_for_chunks(begun + FIRST + LATER, 2);
    assert!(sender.chunks.iter().all(|chunk| chunk.run == 2), "{:?}", sender.chunks);
    drop(sender);
    server.stop().unwrap();
    let frames = draw_all(0, begun + FIRST + LATER).split_off(begun * FRAME_BYTES);
    let expected = stream_file(dir.path(), "tp=2", &frames, Vec::new(), 2);
    assert_eq!(read_digests(&dir.path().join("out/run-2"), 2), expected);
}

pub(crate) fn a_stream_that_waits_for_frames_stops_at_once_and_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let stream = video_stream(dir.path(), VideoOrigin::Feed, "tp=1");
    let server = TestServer::start_stream(stream, options_in(dir.path()));
    let mut sender = Sender::new(SocketClient::join_in_control(server.at.address), 0);
    // Three frames of the first chunk, which takes nine.
    sender.wait_for(3, state_is("waiting_for_video"));
    server.stop().unwrap();
    assert_eq!(rank_processes(), Vec::<u32>::new());
    for options in [
        ServeOptions { resume: Some(dir.path().join("out/run-1")), ..test_options() },
        ServeOptions { after_failure: AfterFailure::Continue { max_chunks: 8 }, ..test_options() },
    ] {
        let stream = video_stream(dir.path(), VideoOrigin::Feed, "tp=1");
        let refused = tessera_serve::serve(stream, options, &StopHandle::default(), &mut |_| {
            panic!("the server is reached");
        });
        assert_eq!(refused.unwrap_err()[0].code.id, "T1609");
    }
}
