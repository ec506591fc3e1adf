//! Random secrets of clients.

use crate::hex::to_hex;

/// Returns a secret of 128 random bits, in hex.
pub(crate) fn new_secret() -> String {
    let mut bytes = [0_u8; 16];
    // Without a source of random bytes nothing else on the machine works either; a guessable secret would let one client
    // continue as another, so the server stops.
    #[allow(clippy::expect_used, reason = "there is no secure way to go on")]
    getrandom::fill(&mut bytes).expect("the system provides random bytes");
    to_hex(&bytes)
}
