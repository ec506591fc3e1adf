//! A client of the socket and of the HTTP interface, which waits for everything with a limit.

use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tessera_serve::protocol::FrameHeader;
use tungstenite::client::IntoClientRequest;
use tungstenite::{Message, WebSocket};

/// Longest wait for anything; a development build on a busy machine is slow.
const PATIENCE: Duration = Duration::from_secs(60);

/// A frame as it arrived.
#[derive(Debug, Clone)]
pub(crate) struct ReceivedFrame {
    pub(crate) run: u32,
    pub(crate) epoch: u32,
    pub(crate) request: u64,
    pub(crate) number: u64,
    pub(crate) is_first: bool,
    pub(crate) is_last: bool,
    pub(crate) is_initialisation: bool,
    pub(crate) size: (u16, u16),
    pub(crate) picture: Vec<u8>,
}

/// What a socket received.
#[derive(Debug)]
pub(crate) enum Received {
    Text(Value),
    Frame(ReceivedFrame),
    Closed,
}

/// A connection whose reads outlast signals. The end of a rank interrupts reads of the process that started it, and the
/// kernel restarts none that has a time limit.
#[derive(Debug)]
pub(crate) struct PatientStream(TcpStream);

impl Read for PatientStream {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        loop {
            match self.0.read(into) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                read => return read,
            }
        }
    }
}

impl Write for PatientStream {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}

/// A client of the socket.
pub(crate) struct SocketClient {
    socket: WebSocket<PatientStream>,
    /// The answer to its hello.
    pub(crate) hello: Value,
    changes: u64,
}

impl SocketClient {
    /// Opens the socket and says nothing.
    pub(crate) fn open(address: SocketAddr) -> WebSocket<PatientStream> {
        let stream = TcpStream::connect(address).unwrap();
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        let request = format!("ws://{address}/socket").into_client_request().unwrap();
        tungstenite::client(request, PatientStream(stream)).unwrap().0
    }

    /// Joins and waits for the hello of the server.
    pub(crate) fn join(address: SocketAddr, hello: Value) -> SocketClient {
        let mut client = SocketClient { socket: SocketClient::open(address), hello: Value::Null, changes: 0 };
        let mut greeting = json!({ "type": "hello", "version": 1, "format": "raw" });
        greeting.as_object_mut().unwrap().extend(hello.as_object().unwrap().clone());
        client.send(&greeting);
        client.hello = client.wait_for("hello");
        client
    }

    /// Joins in control, with credits for everything.
    pub(crate) fn join_in_control(address: SocketAddr) -> SocketClient {
        SocketClient::join(address, json!({ "control": true, "credits": 1_000_000 }))
    }

    pub(crate) fn number(&self) -> u64 {
        self.hello["client"].as_u64().unwrap()
    }

    pub(crate) fn send(&mut self, message: &Value) {
        self.socket.send(Message::text(message.to_string())).unwrap();
    }

    /// Requests a change and returns its number.
    pub(crate) fn change(&mut self, change: Value) -> u64 {
        self.changes += 1;
        self.send(&json!({ "type": "change", "id": self.changes, "change": change }));
        self.changes
    }

    /// Waits for what arrives next.
    pub(crate) fn receive(&mut self) -> Received {
        loop {
            match self.socket.read() {
                Ok(Message::Text(text)) => return Received::Text(serde_json::from_str(&text).unwrap()),
                Ok(Message::Binary(bytes)) => return Received::Frame(read_frame(&bytes)),
                Ok(Message::Close(_)) => return Received::Closed,
                Ok(_) => {}
                Err(tungstenite::Error::Io(e)) if e.kind() == ErrorKind::WouldBlock => {
                    panic!("nothing arrived for {PATIENCE:?}");
                }
                Err(_) => return Received::Closed,
            }
        }
    }

    /// Waits for a message of a type, and passes over everything else.
    pub(crate) fn wait_for(&mut self, kind: &str) -> Value {
        self.wait_until(kind, |_| true)
    }

    /// Waits for a message of a type for which something holds.
    pub(crate) fn wait_until(&mut self, kind: &str, holds: impl Fn(&Value) -> bool) -> Value {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            match self.receive() {
                Received::Text(message) if message["type"] == kind && holds(&message) => return message,
                Received::Closed => panic!("the server closed the connection before {kind}"),
                _ => {}
            }
        }
        panic!("no such {kind} for {PATIENCE:?}");
    }

    /// Waits for a frame for which something holds.
    pub(crate) fn wait_for_frame(&mut self, holds: impl Fn(&ReceivedFrame) -> bool) -> ReceivedFrame {
        let until = Instant::now() + PATIENCE;
        while Instant::now() < until {
            match self.receive() {
                Received::Frame(frame) if holds(&frame) => return frame,
                Received::Closed => panic!("the server closed the connection before the frame"),
                _ => {}
            }
        }
        panic!("no such frame for {PATIENCE:?}");
    }
}

fn read_frame(bytes: &[u8]) -> ReceivedFrame {
    let (header, picture) = FrameHeader::decode(bytes).unwrap();
    ReceivedFrame {
        run: header.run,
        epoch: header.epoch,
        request: header.request,
        number: header.frame,
        is_first: header.is_first,
        is_last: header.is_last,
        is_initialisation: header.is_initialisation,
        size: (header.width, header.height),
        picture: picture.to_vec(),
    }
}

/// An answer of the HTTP interface.
#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: String,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    pub(crate) fn json(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.body).into_owned()
    }
}

/// Sends a request and reads its whole answer.
pub(crate) fn request(address: SocketAddr, method: &str, path: &str, headers: &[&str], body: &str) -> Answer {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(PATIENCE)).unwrap();
    let host = if headers.iter().any(|h| h.to_ascii_lowercase().starts_with("host:")) {
        String::new()
    } else {
        format!("host: {address}\r\n")
    };
    let extra: String = headers.iter().map(|header| format!("{header}\r\n")).collect();
    let length = body.len();
    let head = format!(
        "{method} {path} HTTP/1.1\r\n{host}{extra}connection: close\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).unwrap();
    // A server that refuses a body may close before it has read it.
    let _ = stream.write_all(body.as_bytes());
    read_answer(&mut stream)
}

/// Reads an answer until the end of the connection.
pub(crate) fn read_answer(stream: &mut impl Read) -> Answer {
    let mut bytes = Vec::new();
    let _ = stream.read_to_end(&mut bytes);
    let end =
        bytes.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or_else(|| panic!("no answer: {bytes:?}"));
    let headers = String::from_utf8_lossy(&bytes[..end]).to_ascii_lowercase();
    let status = headers.split(' ').nth(1).unwrap().parse().unwrap();
    let mut body = bytes[end + 4..].to_vec();
    if headers.contains("transfer-encoding: chunked") {
        body = join_chunks(&body);
    }
    Answer { status, headers, body }
}

fn join_chunks(mut rest: &[u8]) -> Vec<u8> {
    let mut body = Vec::new();
    while let Some(end) = rest.windows(2).position(|w| w == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&rest[..end]).unwrap(), 16).unwrap();
        body.extend_from_slice(&rest[end + 2..end + 2 + size]);
        rest = &rest[(end + 4 + size).min(rest.len())..];
        if size == 0 {
            break;
        }
    }
    body
}

/// Requests without a body.
pub(crate) fn get(address: SocketAddr, path: &str) -> Answer {
    request(address, "GET", path, &[], "")
}

impl SocketClient {
    /// Sends a message that no client should.
    pub(crate) fn send_raw(&mut self, message: Message) {
        self.socket.send(message).unwrap();
    }

    /// Sends a message and returns whether the connection took it.
    pub(crate) fn try_send(&mut self, message: &Value) -> bool {
        self.socket.send(Message::text(message.to_string())).is_ok()
    }
}
