//! What ranks tell each other at the rendezvous, once they have proved themselves.

use std::io::{Error, ErrorKind, Result};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};

use super::T0758;
use crate::digest::canonical_bytes;
use crate::driver::launcher::Interrupt;
use crate::driver::secure::{read_exact, write_all};
use crate::driver::stream::Stream;
use crate::parity::T0740;
use crate::tripwire::{T0756, T0757};

/// Most bytes of a word.
const MAX_WORD_BYTES: u32 = 1 << 20;
/// How often a wait looks whether it was asked to stop.
const LOOK: Duration = Duration::from_millis(200);

/// A rank's own.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Card {
    pub(super) facts: Vec<(String, String)>,
    pub(super) lanes: String,
    /// Where it listens: a port, and an address if it is another than rank 0 sees.
    pub(super) port: u16,
    pub(super) address: Option<String>,
}

/// Where everybody is; rank 0's place is empty, for everybody knows the master.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Table {
    pub(super) addresses: Vec<String>,
    /// What rank 0 has to tell beyond that.
    pub(super) told: Vec<u8>,
}

/// A diagnostic that travels.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct Said {
    code: String,
    message: String,
    places: Vec<(String, String)>,
    hint: Option<String>,
}

/// One word of the talk.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) enum Word {
    Card(Card),
    Table(Table),
    Linked,
    Go,
    Refused(Vec<Said>),
}

impl Said {
    pub(super) fn of(d: &Diagnostic) -> Said {
        Said {
            code: d.code.id.to_string(),
            message: d.message.clone(),
            places: d.places.iter().map(|p| (p.at.clone(), p.says.clone())).collect(),
            hint: d.hint.clone(),
        }
    }

    pub(super) fn into_diagnostic(self) -> Diagnostic {
        let known: [&'static Code; 4] = [&T0740, &T0756, &T0757, &T0758];
        let code = known.into_iter().find(|c| c.id == self.code).unwrap_or(&T0758);
        let d = Diagnostic::error(code, self.message);
        let d = self.places.into_iter().fold(d, |d, (at, says)| d.at(at, says));
        match self.hint {
            Some(hint) => d.hint(hint),
            None => d,
        }
    }
}

pub(super) fn say(stream: &mut dyn Stream, word: &Word, until: Instant) -> Result<()> {
    let bytes = canonical_bytes(word);
    let length = u32::try_from(bytes.len()).ok().filter(|n| *n <= MAX_WORD_BYTES);
    let length = length.ok_or_else(|| Error::new(ErrorKind::InvalidInput, "a word over the limit"))?;
    write_all(stream, &[&length.to_le_bytes(), &bytes[..]].concat(), until)
}

/// Waits for a word; a request to stop ends the wait before it begins.
pub(super) fn hear(stream: &mut dyn Stream, until: Instant, stop: Option<&Interrupt>) -> Result<Word> {
    let mut length = [0; 4];
    loop {
        if stop.is_some_and(|s| s.count() > 0) {
            return Err(Error::new(ErrorKind::Interrupted, "stopped on request"));
        }
        let look = until.min(Instant::now() + LOOK);
        match read_exact(stream, &mut length[..1], look) {
            Ok(()) => break,
            Err(e) if e.kind() == ErrorKind::TimedOut && Instant::now() < until => {}
            Err(e) => return Err(e),
        }
    }
    read_exact(stream, &mut length[1..], until)?;
    let length = u32::from_le_bytes(length);
    if length > MAX_WORD_BYTES {
        return Err(Error::new(ErrorKind::InvalidData, "a word over the limit"));
    }
    let mut bytes = vec![0; length as usize];
    read_exact(stream, &mut bytes, until)?;
    postcard::from_bytes(&bytes).map_err(|e| Error::new(ErrorKind::InvalidData, e.to_string()))
}
