//! The handshake of two ranks: Noise, pattern `NNpsk0`, with the run's secret as pre-shared key.
//!
//! | flight | from | bytes |
//! | --- | --- | --- |
//! | 1 | connector | its hello, then Noise message 1 without payload |
//! | 2 | acceptor | Noise message 2 with its hello as payload |
//! | 3 | connector | an empty record |
//! | 4 | acceptor | an empty record |
//!
//! The first hello is not encrypted, so that the acceptor can name the rank that failed to prove
//! itself. The prologue covers it. Message 1 can be replayed, as every first message of Noise, so
//! the acceptor admits a peer only after flight 3, which depends on the acceptor's ephemeral key.
//! Flight 4 tells the connector that it was admitted. Every flight has a fixed size.

use std::io::{self, Error, ErrorKind};
use std::time::Instant;

use snow::{Builder, TransportState};

use super::hello::{HELLO_BYTES, parse_hello, write_hello};
use super::{Claim, HandshakeError, HandshakeSide, read_exact, write_all};
use crate::driver::byte_stream::ByteStream;

/// The protocol's name, which Noise hashes into every key. Nothing is negotiated.
const PROTOCOL: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";
/// Separates this use of Noise from other programs that hold the same secret.
const PROLOGUE: &[u8; 24] = b"tessera 2026-11 noise v2";
const EPHEMERAL_BYTES: usize = 32;
/// Length of the authentication tag of every Noise message.
pub(super) const TAG_BYTES: usize = 16;
const MESSAGE_1_BYTES: usize = EPHEMERAL_BYTES + TAG_BYTES;
const MESSAGE_2_BYTES: usize = EPHEMERAL_BYTES + HELLO_BYTES + TAG_BYTES;

/// What both ends of a handshake must have in common.
pub(super) struct SharedKeys {
    /// The pre-shared key.
    pub(super) psk: [u8; 32],
    /// A value that only the two ends of the stream below know; zeros if there is none.
    pub(super) channel_binding: [u8; 32],
}

/// Exchanges claims and proves to each side that the other one holds the pre-shared key. Returns
/// the peer's claim and the ciphers of the records that follow.
pub(super) fn exchange_proofs(
    stream: &mut dyn ByteStream,
    own_claim: &Claim,
    side: HandshakeSide,
    keys: &SharedKeys,
    deadline: Instant,
) -> Result<(Claim, TransportState), HandshakeError> {
    match side {
        HandshakeSide::Connector => prove_as_connector(stream, own_claim, keys, deadline),
        HandshakeSide::Acceptor => prove_as_acceptor(stream, own_claim, keys, deadline),
    }
}

fn prove_as_connector(
    stream: &mut dyn ByteStream,
    own_claim: &Claim,
    keys: &SharedKeys,
    deadline: Instant,
) -> Result<(Claim, TransportState), HandshakeError> {
    let without_claim = |e: Error| (None, e);
    let mut flight_1 = [0; HELLO_BYTES + MESSAGE_1_BYTES];
    let (hello, message_1) = flight_1.split_at_mut(HELLO_BYTES);
    hello.copy_from_slice(&write_hello(own_claim));
    let prologue = join_prologue(hello, &keys.channel_binding);
    let mut noise = start_builder(&keys.psk, &prologue)
        .and_then(Builder::build_initiator)
        .map_err(|e| without_claim(setup_error(&e)))?;
    noise.write_message(&[], message_1).map_err(|e| without_claim(setup_error(&e)))?;
    write_all(stream, &flight_1, deadline).map_err(without_claim)?;
    let mut message_2 = [0; MESSAGE_2_BYTES];
    read_exact(stream, &mut message_2, deadline).map_err(without_claim)?;
    let mut hello = [0; HELLO_BYTES];
    noise.read_message(&message_2, &mut hello).map_err(|_| without_claim(invalid_proof()))?;
    let claim = parse_hello(&hello).ok_or_else(|| without_claim(invalid_proof()))?;
    let with_claim = |e: Error| (Some(claim), e);
    let mut records = noise.into_transport_mode().map_err(|e| with_claim(setup_error(&e)))?;
    write_empty_record(stream, &mut records, deadline).map_err(with_claim)?;
    read_empty_record(stream, &mut records, deadline).map_err(with_claim)?;
    Ok((claim, records))
}

fn prove_as_acceptor(
    stream: &mut dyn ByteStream,
    own_claim: &Claim,
    keys: &SharedKeys,
    deadline: Instant,
) -> Result<(Claim, TransportState), HandshakeError> {
    let without_claim = |e: Error| (None, e);
    let mut hello = [0; HELLO_BYTES];
    read_exact(stream, &mut hello, deadline).map_err(without_claim)?;
    let claim = parse_hello(&hello).ok_or_else(|| without_claim(invalid_proof()))?;
    let with_claim = |e: Error| (Some(claim), e);
    let prologue = join_prologue(&hello, &keys.channel_binding);
    let mut noise = start_builder(&keys.psk, &prologue)
        .and_then(Builder::build_responder)
        .map_err(|e| with_claim(setup_error(&e)))?;
    let mut message_1 = [0; MESSAGE_1_BYTES];
    read_exact(stream, &mut message_1, deadline).map_err(with_claim)?;
    noise.read_message(&message_1, &mut []).map_err(|_| with_claim(invalid_proof()))?;
    let mut message_2 = [0; MESSAGE_2_BYTES];
    noise.write_message(&write_hello(own_claim), &mut message_2).map_err(|e| with_claim(setup_error(&e)))?;
    write_all(stream, &message_2, deadline).map_err(with_claim)?;
    let mut records = noise.into_transport_mode().map_err(|e| with_claim(setup_error(&e)))?;
    read_empty_record(stream, &mut records, deadline).map_err(with_claim)?;
    write_empty_record(stream, &mut records, deadline).map_err(with_claim)?;
    Ok((claim, records))
}

/// Returns the ciphers of two connected ends whose handshake took place in memory under a fixed
/// pre-shared key.
pub(super) fn connect_in_memory() -> io::Result<(TransportState, TransportState)> {
    let start = || start_builder(&[0; 32], b"in memory");
    let build = || -> Result<(TransportState, TransportState), snow::Error> {
        let (mut connector, mut acceptor) = (start()?.build_initiator()?, start()?.build_responder()?);
        let mut message = [0; MESSAGE_1_BYTES];
        connector.write_message(&[], &mut message)?;
        acceptor.read_message(&message, &mut [])?;
        acceptor.write_message(&[], &mut message)?;
        connector.read_message(&message, &mut [])?;
        Ok((connector.into_transport_mode()?, acceptor.into_transport_mode()?))
    };
    build().map_err(|e| setup_error(&e))
}

fn start_builder<'a>(psk: &'a [u8; 32], prologue: &'a [u8]) -> Result<Builder<'a>, snow::Error> {
    Builder::new(PROTOCOL.parse()?).prologue(prologue)?.psk(0, psk)
}

/// Joins everything that the two ends must agree on besides the key.
fn join_prologue(connector_hello: &[u8], channel_binding: &[u8; 32]) -> Vec<u8> {
    [PROLOGUE, connector_hello, channel_binding].concat()
}

fn write_empty_record(
    stream: &mut dyn ByteStream,
    records: &mut TransportState,
    deadline: Instant,
) -> io::Result<()> {
    let mut tag = [0; TAG_BYTES];
    records.write_message(&[], &mut tag).map_err(|e| setup_error(&e))?;
    write_all(stream, &tag, deadline)
}

fn read_empty_record(
    stream: &mut dyn ByteStream,
    records: &mut TransportState,
    deadline: Instant,
) -> io::Result<()> {
    let mut tag = [0; TAG_BYTES];
    read_exact(stream, &mut tag, deadline)?;
    records.read_message(&tag, &mut []).map(drop).map_err(|_| invalid_proof())
}

fn invalid_proof() -> Error {
    ErrorKind::PermissionDenied.into()
}

/// Wraps an error that no peer can cause, such as missing randomness.
fn setup_error(e: &snow::Error) -> Error {
    Error::other(e.to_string())
}
