//! What a server offers, to whom, and within which limits.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T1609;
use crate::otlp::TraceOptions;
use crate::protocol::Pace;

/// Fewest characters of a token.
const MIN_TOKEN_CHARACTERS: usize = 16;

/// Returns the page of a code.
pub type ExplainCode = fn(&str) -> Option<&'static str>;

/// How a server is reached and how its stream runs.
#[derive(Debug, Clone)]
pub struct ServeOptions {
    /// Address and port; port 0 lets the system choose.
    pub listen: SocketAddr,
    /// Who may use the server.
    pub access: Access,
    /// Certificate chain and key as PEM files, for TLS.
    pub tls: Option<(PathBuf, PathBuf)>,
    /// Limits of clients.
    pub limits: ServeLimits,
    /// What paces the stream.
    pub pace: Pace,
    /// Number of chunks that are requested ahead of the one that plays, from 1.
    pub lead: u32,
    /// Whether chunks are generated while nobody watches.
    pub keeps_running: bool,
    /// How often the stream starts again after a failure, in a row without a delivered chunk.
    pub max_restarts: u32,
    /// What a restart after a failure shows.
    pub after_failure: AfterFailure,
    /// Folder of the runs; `None` for temporary ones, which are kept if a run fails.
    pub out: Option<PathBuf>,
    /// Folder of recordings; `None` for one beside the runs.
    pub recordings: Option<PathBuf>,
    /// Folder of a run whose recorded session the first run continues.
    pub resume: Option<PathBuf>,
    /// Where traces go; `None` for nowhere.
    pub traces: Option<TraceOptions>,
}

/// What a restart after a failure shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AfterFailure {
    /// A new scene with the prompt and the seed in force.
    NewScene,
    /// The chunk that would have followed. The ranks first generate the chunks again that were shown: at most so many, otherwise a
    /// new scene begins.
    Continue {
        /// Most chunks that are generated again.
        max_chunks: u32,
    },
}

/// Who may use a server.
#[derive(Debug, Clone, Default)]
pub struct Access {
    /// Token that every request states; `None` for a server on a loopback address.
    pub token: Option<String>,
    /// Names of the server besides its address, as a browser writes them in `Host`.
    pub hosts: Vec<String>,
    /// Other sites whose pages may use the server, such as `https://watch.example`.
    pub origins: Vec<String>,
}

/// Limits of clients.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServeLimits {
    /// Most clients with a socket.
    pub max_clients: usize,
    /// Most connections beside the sockets of clients.
    pub max_connections: usize,
    /// Longest time of a request's header, and until the first message of a socket.
    pub handshake: Duration,
    /// Interval of pings; a client that answers none for three of them is disconnected.
    pub ping: Duration,
    /// Longest time for which a client may take no byte.
    pub send: Duration,
    /// Most bytes of a recording.
    pub recording_bytes: u64,
}

impl Default for ServeLimits {
    fn default() -> ServeLimits {
        ServeLimits {
            max_clients: 64,
            max_connections: 256,
            handshake: Duration::from_secs(5),
            ping: Duration::from_secs(5),
            send: Duration::from_secs(10),
            recording_bytes: 4 << 30,
        }
    }
}

impl Default for ServeOptions {
    /// A server for a person at this machine.
    fn default() -> ServeOptions {
        ServeOptions {
            listen: SocketAddr::from((Ipv4Addr::LOCALHOST, 7860)),
            access: Access::default(),
            tls: None,
            limits: ServeLimits::default(),
            pace: Pace::Model,
            lead: 2,
            keeps_running: false,
            max_restarts: 3,
            after_failure: AfterFailure::NewScene,
            out: None,
            recordings: None,
            resume: None,
            traces: None,
        }
    }
}

impl ServeOptions {
    /// Returns what contradicts each other.
    #[must_use]
    pub fn check(&self) -> Diagnostics {
        let mut ds = Vec::new();
        let is_local = self.listen.ip().is_loopback();
        match &self.access.token {
            None if !is_local => ds.push(
                Diagnostic::error(
                    &T1609,
                    format!("{} is reached over the network, and there is no token", self.listen),
                )
                .with_hint("write one into a file and give --token-file FILE, or listen on 127.0.0.1"),
            ),
            Some(token) if token.len() < MIN_TOKEN_CHARACTERS => {
                let message =
                    format!("the token has {} characters; {MIN_TOKEN_CHARACTERS} are needed", token.len());
                ds.push(
                    Diagnostic::error(&T1609, message).with_hint("use the output of `openssl rand -hex 16`"),
                );
            }
            Some(token) if !token.bytes().all(|b| b.is_ascii_graphic()) => {
                ds.push(Diagnostic::error(&T1609, "the token has a space or a character outside of ASCII"));
            }
            _ => {}
        }
        if self.lead == 0 {
            ds.push(Diagnostic::error(&T1609, "a lead of no chunks").with_hint("use --lead 1 or more"));
        }
        if self.limits.max_clients == 0 {
            ds.push(
                Diagnostic::error(&T1609, "a server of no clients").with_hint("use --max-clients 1 or more"),
            );
        }
        ds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_on_the_network_needs_a_token() {
        let with = |listen: [u8; 4], token: Option<&str>| {
            let access = Access { token: token.map(str::to_string), ..Access::default() };
            let listen = SocketAddr::from((listen, 80));
            ServeOptions { listen, access, ..ServeOptions::default() }.check().len()
        };
        assert_eq!(with([127, 0, 0, 1], None), 0);
        assert_eq!(with([0, 0, 0, 0], None), 1);
        assert_eq!(with([10, 0, 0, 1], Some("short")), 1);
        assert_eq!(with([10, 0, 0, 1], Some("0123456789abc ef")), 1);
        assert_eq!(with([10, 0, 0, 1], Some("0123456789abcdef")), 0);
    }
}
