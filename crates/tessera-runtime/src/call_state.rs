//! What a call leaves behind for the next one: the caches of a video, the sequences of a language model, or nothing but
//! its number.
//! Leader and workers execute the same state machine.

use tessera_base::Diagnostic;

use crate::Digest;
use crate::array_state::ArrayCallState;
use crate::codes::{T0710, T0722};
use crate::director::StreamSpec;
use crate::kv_cache::{CacheSpec, CacheState, Transition};
use crate::paged_cache::{PagedCacheSpec, PagedCacheState};
use crate::program_index::PhaseKind;
use crate::wire::{CallWork, PhaseCall};

/// What the calls of a session compute, with the settings that never change.
#[derive(Debug, Clone, PartialEq)]
pub enum SessionSpec {
    /// Chunks of a video.
    Video(StreamSpec),
    /// Rows of token sequences.
    Text(PagedCacheSpec),
    /// Programs of arrays.
    Arrays,
}

impl SessionSpec {
    /// Returns the sizes of the state, which workers need.
    #[must_use]
    pub fn state_spec(&self) -> CallStateSpec {
        match self {
            SessionSpec::Video(stream) => CallStateSpec::Video(stream.cache),
            SessionSpec::Text(pages) => CallStateSpec::Text(*pages),
            SessionSpec::Arrays => CallStateSpec::Arrays,
        }
    }
}

/// The sizes of a [`CallState`], which are constant in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CallStateSpec {
    /// KV caches of a video.
    Video(CacheSpec),
    /// KV caches in pages.
    Text(PagedCacheSpec),
    /// No caches.
    Arrays,
}

/// What a call leaves behind for the next one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallState {
    /// The caches of a video.
    Video(CacheState),
    /// The sequences of a language model.
    Text(PagedCacheState),
    /// The number of calls.
    Arrays(ArrayCallState),
}

impl CallState {
    /// Creates the state of epoch 0, or returns T0711 for invalid sizes.
    pub fn new(spec: CallStateSpec) -> Result<CallState, Diagnostic> {
        Ok(match spec {
            CallStateSpec::Video(spec) => CallState::Video(CacheState::new(spec)?),
            CallStateSpec::Text(spec) => CallState::Text(PagedCacheState::new(spec)?),
            CallStateSpec::Arrays => CallState::Arrays(ArrayCallState::default()),
        })
    }

    /// Applies what a call changes before its first phase.
    ///
    /// # Errors
    /// T0710 or T0712 if the work is not legal here, or is not the work of this session.
    pub fn begin_call(&mut self, work: &CallWork) -> Result<(), Diagnostic> {
        match (self, work) {
            (_, CallWork::Warmup) => Ok(()),
            (CallState::Video(state), CallWork::Chunk(work)) => state.begin_call(work.reset_kv),
            (CallState::Text(state), CallWork::Tokens(work)) => state.begin_call(work),
            (CallState::Arrays(state), CallWork::Arrays) => state.begin_call(),
            (state @ (CallState::Video(_) | CallState::Text(_) | CallState::Arrays(_)), work) => {
                let what = format!("{} in a session of {}", work.describe(), state.describe_session());
                Err(Diagnostic::error(&T0710, what))
            }
        }
    }

    /// Applies a phase of a call.
    ///
    /// # Errors
    /// T0722 for a program that is no phase of such a call, otherwise T0710 or T0712.
    pub fn apply_phase(&mut self, phase: &PhaseCall) -> Result<(), Diagnostic> {
        match (self, PhaseKind::from_program(&phase.program)) {
            (CallState::Text(state), Some(PhaseKind::Tokens)) => state.apply_phase(phase),
            (CallState::Arrays(state), Some(PhaseKind::Array)) => state.apply_phase(phase),
            (CallState::Video(_), Some(PhaseKind::Tokens | PhaseKind::Array))
            | (CallState::Text(_) | CallState::Arrays(_), _) => {
                Err(Diagnostic::error(&T0722, format!("`{}` is not a phase of this session", phase.program)))
            }
            (CallState::Video(state), _) => state.apply_phase(phase),
        }
    }

    /// Clears the caches and begins an epoch, as a `RESET` or a `RELOAD` does.
    ///
    /// # Errors
    /// T0710 if that is not legal here.
    pub fn reset(&mut self) -> Result<(), Diagnostic> {
        match self {
            CallState::Video(state) => state.apply_transition(Transition::Reset),
            CallState::Text(state) => state.reset(),
            CallState::Arrays(state) => state.reset(),
        }
    }

    /// Returns the number of resets so far.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        match self {
            CallState::Video(state) => state.epoch(),
            CallState::Text(state) => state.epoch(),
            CallState::Arrays(state) => state.epoch(),
        }
    }

    /// Returns the index of the next unit of output: a chunk of a video, or a call of tokens or of an array program.
    #[must_use]
    pub fn next_unit(&self) -> u32 {
        match self {
            CallState::Video(state) => state.next_chunk(),
            CallState::Text(state) => state.next_call(),
            CallState::Arrays(state) => state.next_call(),
        }
    }

    /// Returns the digest of the whole state, which must be equal on the leader and on every rank.
    #[must_use]
    pub fn state_digest(&self) -> Digest {
        match self {
            CallState::Video(state) => state.state_digest(),
            CallState::Text(state) => state.state_digest(),
            CallState::Arrays(state) => state.state_digest(),
        }
    }

    /// Returns the state in one line, for diagnostics.
    #[must_use]
    pub fn describe(&self) -> String {
        match self {
            CallState::Video(state) => state.describe(),
            CallState::Text(state) => state.describe(),
            CallState::Arrays(state) => state.describe(),
        }
    }

    /// Returns what the calls of this session compute.
    fn describe_session(&self) -> &'static str {
        match self {
            CallState::Video(_) => "a video model",
            CallState::Text(_) => "a language model",
            CallState::Arrays(_) => "array programs",
        }
    }
}
