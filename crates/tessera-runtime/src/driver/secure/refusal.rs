//! Why a handshake failed, as far as it may be told: neither side reports what was wrong with the
//! other side's proof.

use std::io::{self, ErrorKind};

use tessera_base::Diagnostic;

use super::Claim;
use crate::codes::T0756;

/// The kind of a failed handshake.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum RefusalKind {
    /// The peer did not finish the handshake in time.
    Late,
    /// The peer closed the connection.
    Closed,
    /// This process closed the connection in favour of newer ones.
    Displaced,
    /// The peer sent something else than a valid proof.
    Invalid,
}

impl RefusalKind {
    /// Returns the reason as a clause about the peer.
    #[must_use]
    pub fn describe(self) -> &'static str {
        match self {
            RefusalKind::Late => "the peer did not finish the handshake in time",
            RefusalKind::Closed => "the peer closed the connection",
            RefusalKind::Displaced => "the peer was slow, and other connections needed its place",
            RefusalKind::Invalid => "the peer's proof is invalid",
        }
    }
}

/// A failed handshake.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Refusal {
    /// The kind of the failure.
    pub kind: RefusalKind,
    /// Address of the peer.
    pub address: String,
    /// The claim that the peer sent, which nothing has proved.
    pub peer_claim: Option<Claim>,
    /// This process's claim if it connected; `None` if it accepted.
    own_claim: Option<Claim>,
    /// What this process proves itself with.
    methods: &'static str,
}

impl Refusal {
    pub(super) fn from_connector(
        error: &io::Error,
        address: String,
        own_claim: Claim,
        methods: &'static str,
    ) -> Refusal {
        Refusal {
            kind: classify_error(error),
            address,
            peer_claim: None,
            own_claim: Some(own_claim),
            methods,
        }
    }

    pub(super) fn from_acceptor(
        error: &io::Error,
        address: String,
        peer_claim: Option<Claim>,
        methods: &'static str,
    ) -> Refusal {
        Refusal { kind: classify_error(error), address, peer_claim, own_claim: None, methods }
    }

    /// Returns the diagnostic of this refusal, T0756.
    #[must_use]
    pub fn to_diagnostic(&self) -> Diagnostic {
        let (at, reason) = (self.address.clone(), self.kind.describe());
        let Some(own_claim) = self.own_claim else {
            let who = self.peer_claim.map_or(String::new(), |c| format!(", which claims to be {c},"));
            let message = format!("a process at {at}{who} did not prove that it belongs to this run");
            return Diagnostic::error(&T0756, message)
                .with_label(at, reason)
                .with_label("here", self.methods);
        };
        let message = format!("mutual authentication with the process at {at} failed");
        Diagnostic::error(&T0756, message)
            .with_label("here", format!("{own_claim}, {}", self.methods))
            .with_label(at, reason)
            .with_hint(match self.kind {
                RefusalKind::Late => "a process accepted the connection and did not answer: check that a rank of this run listens there, and that no other program holds many connections to its port",
                _ => "every rank of a run needs the same secret file, or certificates of the same authority; and only one run may listen at an address",
            })
    }
}

fn classify_error(e: &io::Error) -> RefusalKind {
    match e.kind() {
        ErrorKind::TimedOut => RefusalKind::Late,
        ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => RefusalKind::Closed,
        _ => RefusalKind::Invalid,
    }
}
