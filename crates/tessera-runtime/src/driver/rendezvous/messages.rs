//! The messages that authenticated ranks exchange during the rendezvous.

use std::io::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic, Diagnostics};

use super::handshake_deadline;
use crate::codes::{T0740, T0756, T0757, T0758};
use crate::digest::canonical_bytes;
use crate::driver::byte_stream::ByteStream;
use crate::driver::launcher::StopHandle;
use crate::driver::secure::{read_exact, write_all};

/// Maximum bytes of a message, checked before memory is allocated for it.
const MAX_MESSAGE_BYTES: u32 = 1 << 20;
/// Interval at which a wait checks for a stop request.
const STOP_CHECK_INTERVAL: Duration = Duration::from_millis(200);

/// The first message of a rank to rank 0: the values that rank 0 compares, and where the rank
/// listens.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct RankInfo {
    pub(super) parity_values: Vec<(String, String)>,
    pub(super) communicators_digest: String,
    /// Where the rank listens: a port, and an address if it differs from the one that rank 0 sees.
    pub(super) port: u16,
    pub(super) address: Option<String>,
}

/// The address of every rank. The entry of rank 0 is empty, because every rank knows the master's
/// address.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct AddressTable {
    pub(super) addresses: Vec<String>,
    /// Bytes that the application gives to rank 0 for every rank; opaque to the rendezvous.
    pub(super) leader_payload: Vec<u8>,
}

/// A diagnostic as a rank sends it to another: all parts are text, and the code is its id alone.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct WireDiagnostic {
    code: String,
    message: String,
    labels: Vec<(String, String)>,
    hint: Option<String>,
}

/// A message between rank 0 and another rank, in this order: info, table, linked, start. Either
/// side may send a refusal instead of its next message.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum RendezvousMessage {
    Info(RankInfo),
    Table(AddressTable),
    Linked,
    Start,
    Refused(Vec<WireDiagnostic>),
}

/// Tells the peer why this rank ends the rendezvous. A peer that cannot be reached sees the stream
/// end.
pub(super) fn send_refusal(stream: &mut dyn ByteStream, reasons: &[Diagnostic]) {
    let to_wire = |d: &Diagnostic| WireDiagnostic {
        code: d.code.id.to_string(),
        message: d.message.clone(),
        labels: d.labels.iter().map(|p| (p.location.clone(), p.message.clone())).collect(),
        hint: d.hint.clone(),
    };
    let refusal = RendezvousMessage::Refused(reasons.iter().map(to_wire).collect());
    let _ = send_message(stream, &refusal, handshake_deadline());
}

/// Returns the reasons of a peer's refusal.
pub(super) fn into_diagnostics(refusal: Vec<WireDiagnostic>) -> Diagnostics {
    let known: [&'static Code; 4] = [&T0740, &T0756, &T0757, &T0758];
    let from_wire = |w: WireDiagnostic| {
        let code = known.into_iter().find(|c| c.id == w.code).unwrap_or(&T0758);
        let d = Diagnostic { hint: w.hint, ..Diagnostic::error(code, w.message) };
        w.labels.into_iter().fold(d, |d, (location, message)| d.with_label(location, message))
    };
    refusal.into_iter().map(from_wire).collect()
}

pub(super) fn send_message(
    stream: &mut dyn ByteStream,
    message: &RendezvousMessage,
    deadline: Instant,
) -> Result<()> {
    let bytes = canonical_bytes(message);
    let length = u32::try_from(bytes.len()).ok().filter(|n| *n <= MAX_MESSAGE_BYTES);
    let length = length.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a message over the limit"))?;
    write_all(stream, &[&length.to_le_bytes(), &bytes[..]].concat(), deadline)
}

/// Waits for a message. A stop request ends the wait only before the first byte of the message.
pub(super) fn receive_message(
    stream: &mut dyn ByteStream,
    deadline: Instant,
    stop: Option<&StopHandle>,
) -> Result<RendezvousMessage> {
    let mut length = [0; 4];
    loop {
        if stop.is_some_and(|s| s.request_count() > 0) {
            return Err(Error::new(ErrorKind::Interrupted, "stopped on request"));
        }
        let read_deadline = deadline.min(Instant::now() + STOP_CHECK_INTERVAL);
        match read_exact(stream, &mut length[..1], read_deadline) {
            Ok(()) => break,
            Err(e) if e.kind() == ErrorKind::TimedOut && Instant::now() < deadline => {}
            Err(e) => return Err(e),
        }
    }
    read_exact(stream, &mut length[1..], deadline)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_MESSAGE_BYTES {
        return Err(Error::new(ErrorKind::InvalidData, "a message over the limit"));
    }
    let mut bytes = vec![0; length as usize];
    read_exact(stream, &mut bytes, deadline)?;
    postcard::from_bytes(&bytes).map_err(|e| Error::new(ErrorKind::InvalidData, e.to_string()))
}
