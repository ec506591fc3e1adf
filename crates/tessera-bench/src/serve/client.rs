//! One client of a server: it takes raw frames, plays them as the page does, and notes when each arrived and was shown.

use std::collections::BTreeMap;
use std::net::{SocketAddr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use serde_json::{Value, json};
use tessera_serve::protocol::FrameHeader;
use tungstenite::client::IntoClientRequest;
use tungstenite::{Error, Message, WebSocket};

use super::play_out::PlayOut;

/// Longest time in a read without a look at the clock.
const READ_TIME: Duration = Duration::from_millis(50);
/// Longest wait for the answer to a hello.
const HELLO_TIME: Duration = Duration::from_secs(30);
/// Longest time in which a client that has stalled reads what is left on its connection.
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// What a client does.
#[derive(Debug, Clone)]
pub enum Part {
    /// It takes every frame.
    Watch,
    /// It takes every frame, controls the stream, and sends one of the prompts every so often.
    Steer {
        /// Prompts, which it sends alternately.
        prompts: Vec<String>,
        /// Time between two prompts.
        every: Duration,
    },
    /// It stops to read after a while.
    Stall {
        /// Time from the start of the phase until it stops.
        after: Duration,
    },
}

/// A frame that arrived.
#[derive(Debug, Clone, Copy)]
pub struct Arrival {
    /// Seconds since the start of the phase.
    pub at_s: f64,
    /// Request of its chunk.
    pub request: u64,
    /// Number of the frame among those of the server.
    pub frame: u64,
    /// Whether it is the first frame of its chunk.
    pub is_first: bool,
}

/// What a client has seen.
#[derive(Debug, Default)]
pub struct ClientLog {
    /// Number of the client at the server.
    pub number: u64,
    /// Frames in order of arrival.
    pub arrivals: Vec<Arrival>,
    /// Milliseconds between frames that were shown.
    pub shown_intervals_ms: Vec<f64>,
    /// How often a frame was due and none waited.
    pub stalls: u64,
    /// Seconds from each prompt until the first frame of the first chunk with it arrived.
    pub prompt_s: Vec<f64>,
    /// Prompts that the server refused.
    pub refused: Vec<String>,
    /// Why the server ended the connection.
    pub ended: Option<String>,
}

impl ClientLog {
    /// Returns the number of frames that did not arrive, up to the last frame of the server that anyone has seen.
    pub fn lost_frames(&self, last_frame: u64) -> u64 {
        let Some(first) = self.arrivals.first() else { return 0 };
        (last_frame + 1).saturating_sub(first.frame).saturating_sub(self.arrivals.len() as u64)
    }

    /// Returns the number of frames that did not arrive, up to the last one that did.
    pub fn lost_before_last(&self) -> u64 {
        self.arrivals.last().map_or(0, |last| self.lost_frames(last.frame))
    }

    /// Returns the frames per second that arrived for the requests of a range, from the last frame of the first one on.
    pub fn delivered_fps(&self, requests: std::ops::Range<u64>) -> f64 {
        let first = self.arrivals.iter().rfind(|a| a.request == requests.start);
        let last = self.arrivals.iter().rfind(|a| a.request + 1 == requests.end);
        let (Some(first), Some(last)) = (first, last) else { return 0.0 };
        let count = self.arrivals.iter().filter(|a| a.frame > first.frame && a.frame <= last.frame).count();
        let seconds = last.at_s - first.at_s;
        if seconds > 0.0 { count as f64 / seconds } else { 0.0 }
    }
}

/// What the server says of its stream.
#[derive(Debug, Clone)]
pub struct StreamFacts {
    /// Frames per second of the video.
    pub frame_rate: f64,
    /// Frames of a chunk.
    pub chunk_frames: u32,
    /// Prompts that the model suggests.
    pub examples: Vec<String>,
}

/// A client that has joined.
pub struct Client {
    socket: WebSocket<TcpStream>,
    part: Part,
    hello: Value,
}

impl Client {
    /// Connects to a server and waits for its hello.
    pub fn join(address: SocketAddr, part: Part) -> anyhow::Result<Client> {
        let stream = TcpStream::connect(address).context("cannot reach the server")?;
        stream.set_read_timeout(Some(HELLO_TIME))?;
        let request = format!("ws://{address}/socket").into_client_request()?;
        let (mut socket, _) = tungstenite::client(request, stream)
            .map_err(|e| anyhow::anyhow!("the server opened no socket: {e}"))?;
        let controls = matches!(part, Part::Steer { .. });
        // Every frame is taken at once, so credits are no matter of these clients.
        let hello =
            json!({"type": "hello", "version": 1, "format": "raw", "control": controls, "credits": u32::MAX});
        socket.send(Message::text(hello.to_string()))?;
        loop {
            let Message::Text(text) = socket.read()? else { continue };
            let message: Value = serde_json::from_str(&text)?;
            match message["type"].as_str() {
                Some("hello") => {
                    socket.get_ref().set_read_timeout(Some(READ_TIME))?;
                    return Ok(Client { socket, part, hello: message });
                }
                Some("bye") => bail!("the server refused a client: {message}"),
                _ => {}
            }
        }
    }

    /// Returns what the server says of its stream.
    pub fn facts(&self) -> anyhow::Result<StreamFacts> {
        let stream = &self.hello["stream"];
        let examples = stream["examples"].as_array().into_iter().flatten();
        Ok(StreamFacts {
            frame_rate: stream["frame_rate"].as_f64().context("the hello has no frame rate")?,
            chunk_frames: u32::try_from(stream["chunk_frames"].as_u64().context("no frames of a chunk")?)?,
            examples: examples.filter_map(|text| text.as_str().map(str::to_string)).collect(),
        })
    }

    /// Takes frames until `stops` is set. Times are counted from `start`.
    pub fn run(mut self, start: Instant, stops: &AtomicBool) -> anyhow::Result<ClientLog> {
        let facts = self.facts()?;
        let (frames, waiting) = channel();
        std::thread::scope(|scope| {
            let facts = &facts;
            let player = scope.spawn(move || play_frames(facts, &waiting, start));
            let log = self.read_until(start, stops, &frames);
            drop(frames);
            let (intervals, stalls) = player.join().map_err(|_| anyhow::anyhow!("a player panicked"))?;
            log.map(|log| ClientLog { shown_intervals_ms: intervals, stalls, ..log })
        })
    }

    fn read_until(
        &mut self,
        start: Instant,
        stops: &AtomicBool,
        frames: &Sender<(bool, Instant)>,
    ) -> anyhow::Result<ClientLog> {
        let number = self.hello["client"].as_u64().unwrap_or_default();
        let mut log = ClientLog { number, ..ClientLog::default() };
        let mut steering = Steering::default();
        while !stops.load(Ordering::Acquire) {
            match &self.part {
                Part::Stall { after } if start.elapsed() >= *after => {
                    return self.stall_until(start, stops, log);
                }
                Part::Steer { prompts, every } if steering.is_due(*every) => {
                    let change = steering.next_change(prompts);
                    self.socket.send(Message::text(change.to_string()))?;
                }
                Part::Watch | Part::Stall { .. } | Part::Steer { .. } => {}
            }
            match self.socket.read() {
                Ok(Message::Binary(bytes)) => {
                    let now = Instant::now();
                    let Some((header, _)) = FrameHeader::decode(&bytes) else {
                        bail!("a message is no frame")
                    };
                    log.arrivals.push(note_arrival(&header, now, start));
                    // The player ends after this thread.
                    let _ = frames.send((header.is_first, now));
                    log.prompt_s.extend(steering.note_frame(&header, now));
                }
                Ok(Message::Text(text)) => {
                    let message: Value = serde_json::from_str(&text)?;
                    match message["type"].as_str() {
                        Some("bye") => bail!("the server ended the connection of a client: {message}"),
                        Some("alarm") => bail!("the run failed: {message}"),
                        Some("refused") => log.refused.push(message.to_string()),
                        _ => steering.note_message(&message),
                    }
                }
                Ok(_) => {}
                Err(e) if is_timeout(&e) => {}
                Err(e) => bail!("the connection of a client ended: {e}"),
            }
        }
        Ok(log)
    }

    /// Reads nothing until `stops` is set, and then what is left.
    fn stall_until(
        &mut self,
        start: Instant,
        stops: &AtomicBool,
        mut log: ClientLog,
    ) -> anyhow::Result<ClientLog> {
        while !stops.load(Ordering::Acquire) {
            std::thread::sleep(READ_TIME);
        }
        let until = Instant::now() + DRAIN_TIME;
        while Instant::now() < until {
            match self.socket.read() {
                Ok(Message::Binary(bytes)) => {
                    let Some((header, _)) = FrameHeader::decode(&bytes) else {
                        bail!("a message is no frame")
                    };
                    log.arrivals.push(note_arrival(&header, Instant::now(), start));
                }
                Ok(_) => {}
                Err(e) if is_timeout(&e) => break,
                Err(e) => {
                    log.ended = Some(e.to_string());
                    break;
                }
            }
        }
        Ok(log)
    }
}

fn note_arrival(header: &FrameHeader, now: Instant, start: Instant) -> Arrival {
    let FrameHeader { request, frame, is_first, .. } = *header;
    Arrival { at_s: (now - start).as_secs_f64(), request, frame, is_first }
}

fn is_timeout(e: &Error) -> bool {
    use std::io::ErrorKind::{TimedOut, WouldBlock};
    matches!(e, Error::Io(e) if matches!(e.kind(), WouldBlock | TimedOut))
}

/// Shows frames when they are due, and returns the milliseconds between them and the number of stalls.
fn play_frames(facts: &StreamFacts, frames: &Receiver<(bool, Instant)>, start: Instant) -> (Vec<f64>, u64) {
    let mut play_out = PlayOut::new(facts.frame_rate, facts.chunk_frames);
    let ms = |at: Instant| (at - start).as_secs_f64() * 1e3;
    let (mut waiting, mut last_shown, mut intervals) = (0, None, Vec::new());
    loop {
        // An empty queue is looked at half a frame after its time, when it is a stall.
        let grace = if waiting == 0 { 600.0 / facts.frame_rate } else { 0.0 };
        let wait = play_out.due_ms().map_or(1e3, |due| (due + grace - ms(Instant::now())).clamp(0.0, 1e3));
        match frames.recv_timeout(Duration::from_secs_f64(wait / 1e3)) {
            Ok((is_first, at)) => {
                play_out.arrive(is_first, waiting, ms(at));
                waiting += 1;
                let surplus = waiting.saturating_sub(3 * facts.chunk_frames as usize);
                play_out.drop_frames(surplus, ms(at));
                waiting -= surplus;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => return (intervals, play_out.stalls()),
        }
        let now = ms(Instant::now());
        let taken = play_out.take(waiting, now);
        waiting -= taken.skipped + usize::from(taken.shows);
        if taken.shows {
            intervals.extend(last_shown.map(|last: f64| now - last));
            last_shown = Some(now);
        }
    }
}

/// The prompts of a client in control, until their first frames arrive.
#[derive(Debug, Default)]
struct Steering {
    sent: u64,
    last_sent: Option<Instant>,
    /// When each prompt was sent, by its number.
    pending: BTreeMap<u64, Instant>,
    /// Run and request of the first chunk with a prompt, and when it was sent.
    awaited: Vec<(u32, u64, Instant)>,
}

impl Steering {
    fn is_due(&self, every: Duration) -> bool {
        self.last_sent.is_none_or(|last| last.elapsed() >= every)
    }

    fn next_change(&mut self, prompts: &[String]) -> Value {
        let now = Instant::now();
        self.sent += 1;
        self.last_sent = Some(now);
        self.pending.insert(self.sent, now);
        let prompt = &prompts[self.sent as usize % prompts.len()];
        json!({"type": "change", "id": self.sent, "change": {"prompt": prompt}})
    }

    fn note_message(&mut self, message: &Value) {
        if message["type"] != "effect" {
            return;
        }
        let number = |key: &str| message[key].as_u64().unwrap_or_default();
        if let Some(sent) = self.pending.remove(&number("id")) {
            self.awaited.push((number("run") as u32, number("request"), sent));
        }
    }

    /// Returns the seconds since each prompt whose first frame this is.
    fn note_frame(&mut self, header: &FrameHeader, now: Instant) -> Vec<f64> {
        let arrived =
            |(run, request, _): &mut (u32, u64, Instant)| (header.run, header.request) >= (*run, *request);
        self.awaited.extract_if(.., arrived).map(|(_, _, sent)| (now - sent).as_secs_f64()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(frames: &[(u64, f64)]) -> ClientLog {
        let arrival = |(frame, at_s): &(u64, f64)| Arrival {
            at_s: *at_s,
            request: frame / 3,
            frame: *frame,
            is_first: frame.is_multiple_of(3),
        };
        ClientLog { arrivals: frames.iter().map(arrival).collect(), ..ClientLog::default() }
    }

    #[test]
    fn frames_that_did_not_arrive_are_counted_from_the_first_one_on() {
        let log = log(&[(4, 0.0), (5, 0.0), (7, 0.1), (8, 0.1)]);
        assert_eq!((log.lost_frames(8), log.lost_frames(12)), (1, 5));
        assert_eq!(ClientLog::default().lost_frames(12), 0);
    }

    #[test]
    fn a_rate_counts_the_frames_between_two_chunks() {
        let log =
            log(&[(0, 0.0), (1, 0.0), (2, 1.0), (3, 2.0), (4, 2.0), (5, 2.0), (6, 4.0), (7, 4.0), (8, 4.0)]);
        assert_eq!(log.delivered_fps(0..3), 2.0);
        assert_eq!(log.delivered_fps(0..9), 0.0);
    }

    #[test]
    fn a_prompt_ends_with_the_first_frame_of_its_chunk() {
        let mut steering = Steering::default();
        assert!(steering.is_due(Duration::from_secs(9)));
        let change = steering.next_change(&["a".into(), "b".into()]);
        assert_eq!((change["id"].as_u64(), change["change"]["prompt"].as_str()), (Some(1), Some("b")));
        assert!(!steering.is_due(Duration::from_secs(9)));
        steering
            .note_message(&json!({"type": "effect", "id": 1, "change": "prompt", "run": 1, "request": 5}));
        let frame = |request| FrameHeader {
            format: tessera_serve::protocol::FrameFormat::Raw,
            is_first: true,
            is_initialisation: false,
            is_last: false,
            run: 1,
            epoch: 0,
            request,
            frame: 60,
            delivered_us: 0,
            width: 1,
            height: 1,
            picture_bytes: 3,
        };
        let later = Instant::now() + Duration::from_secs(1);
        assert!(steering.note_frame(&frame(4), later).is_empty());
        let waited = steering.note_frame(&frame(5), later);
        assert!(waited.len() == 1 && waited[0] >= 1.0, "{waited:?}");
        assert!(steering.note_frame(&frame(6), later).is_empty());
    }
}
