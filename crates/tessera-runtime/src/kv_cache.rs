//! The state machine of the KV caches, which leader and workers execute identically.
//!
//! There are two regimes. *Resident*: a window of latent frames survives from chunk to chunk. Its
//! first rows are the sink, which keeps the first frames of the scene; the others are a ring. Chunk
//! rows are written at the ring's head, the oldest chunk of the ring is evicted when the window is
//! full, and rotary positions are absolute until the position table ends; then a rebase rotates every
//! key of the ring back. A new prompt may bring a recache: the ring's chunks are written again, oldest
//! first, from their latents. *Recompute*: nothing survives between chunks; a forward over context
//! frames fills the cache before each chunk except the first of an epoch.
//!
//! Cache contents are never sent: equal digests of this small state, and equal inputs, imply equal
//! caches.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

use crate::Digest;
use crate::codes::{T0710, T0711, T0712, T0722};
use crate::program_index::PhaseKind;
use crate::wire::PhaseCall;

/// How the caches are filled.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheRegime {
    /// A window that survives from chunk to chunk.
    Resident,
    /// A forward over context frames fills the cache before each chunk.
    Recompute,
}

/// Cache sizes, which are constant in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSpec {
    /// Whether the caches survive from chunk to chunk or are filled again before each chunk.
    pub regime: CacheRegime,
    /// Latent frames per chunk.
    pub chunk_frames: u32,
    /// Capacity of the cache in latent frames, including the current chunk.
    pub window_frames: u32,
    /// First frames of a scene that stay cached until the next scene; 0 without a sink.
    pub sink_frames: u32,
    /// Number of RoPE positions, one per latent frame. A chunk that would exceed them needs a
    /// rebase first.
    pub table_frames: u32,
    /// Cache rows per latent frame.
    pub tokens_per_frame: u32,
}

/// The stage of the caches, between two chunks or within one. It determines the legal transitions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum CacheStage {
    /// No chunk was generated in this epoch.
    Empty,
    /// Between chunks, with room for another chunk.
    Holding,
    /// Between chunks with a full window: an evict must precede the next append.
    Full,
    /// The latents of a chunk of the ring are recalled, and its rows are not written again yet.
    Recalled,
    /// Some chunks of the ring are written again under the new prompt, and others are not.
    Recaching,
    /// The context frames are written, the chunk is not.
    Context,
    /// The chunk's rows are being written, once per forward.
    Open,
}

/// A change of the cache state. A table lists the stages in which each is legal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// Begins a new epoch and clears the caches.
    Reset,
    /// Replaces the text keys and values.
    Prompt,
    /// Drops the oldest chunk. Each rank derives it from the fill level; it is never sent.
    Evict,
    /// Moves the positions of the ring back by this number of frames, so that its oldest frame
    /// follows the sink, or is at position 0 without one.
    Rebase(u32),
    /// Takes the latents of the oldest chunk of the ring that was not written again yet.
    Recall,
    /// Writes the rows of the recalled chunk again.
    Recache,
    /// Fills the cache from context frames.
    Recompute,
    /// Writes the chunk's rows; later forwards of the call overwrite them.
    Append,
    /// Ends the chunk after its last forward and increments the chunk index.
    Advance,
}

/// Every legal transition: the regime, the stage before, the transition's name, and the stage after.
/// An advance that fills the window leads to [`CacheStage::Full`] instead, and the recache of the
/// newest chunk to [`CacheStage::Holding`]. All others are refused.
const TRANSITIONS: &[(CacheRegime, CacheStage, &str, CacheStage)] = {
    use CacheRegime::{Recompute, Resident};
    use CacheStage::{Context, Empty, Full, Holding, Open, Recaching, Recalled};
    &[
        (Resident, Empty, "reset", Empty),
        (Resident, Empty, "prompt", Empty),
        (Resident, Empty, "append", Open),
        (Resident, Open, "append", Open),
        (Resident, Open, "advance", Holding),
        (Resident, Holding, "reset", Empty),
        (Resident, Holding, "prompt", Holding),
        (Resident, Holding, "rebase", Holding),
        (Resident, Holding, "append", Open),
        (Resident, Holding, "recall", Recalled),
        (Resident, Recalled, "recache", Recaching),
        (Resident, Recaching, "recall", Recalled),
        (Resident, Full, "reset", Empty),
        (Resident, Full, "prompt", Full),
        (Resident, Full, "evict", Holding),
        (Recompute, Empty, "reset", Empty),
        (Recompute, Empty, "prompt", Empty),
        (Recompute, Empty, "append", Open),
        (Recompute, Open, "append", Open),
        (Recompute, Open, "advance", Holding),
        (Recompute, Holding, "reset", Empty),
        (Recompute, Holding, "prompt", Holding),
        (Recompute, Holding, "recompute", Context),
        (Recompute, Context, "append", Open),
    ]
};

impl Transition {
    /// Returns its name in [`TRANSITIONS`].
    fn name(self) -> &'static str {
        match self {
            Transition::Reset => "reset",
            Transition::Prompt => "prompt",
            Transition::Evict => "evict",
            Transition::Rebase(_) => "rebase",
            Transition::Recall => "recall",
            Transition::Recache => "recache",
            Transition::Recompute => "recompute",
            Transition::Append => "append",
            Transition::Advance => "advance",
        }
    }
}

/// The cache state, which is equal on every rank. It determines the position and the meaning of
/// cache rows, but does not hold their contents.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheState {
    spec: CacheSpec,
    stage: CacheStage,
    epoch: u32,
    prompt_epoch: u32,
    /// Index of the next chunk in the output; it continues across epochs.
    chunk: u32,
    /// Index of the first chunk of this epoch.
    first_chunk: u32,
    /// Rotary position of the next appended frame (resident).
    position: u32,
    /// Cache frame at which the next chunk is written (resident).
    head: u32,
    /// Frames that are cached for a forward over the next chunk.
    fill: u32,
    /// Frames by which positions were moved back in this epoch.
    rebased: u64,
    /// Chunks of the ring that a recache in progress has written again.
    recached: u32,
}

/// Where a forward writes the rows of a chunk, and what it attends to.
pub(crate) struct ForwardPlace {
    /// Rotary position of the first frame.
    pub(crate) start: u32,
    /// First row.
    pub(crate) row: u64,
    /// Cached frames before the chunk to which it attends.
    pub(crate) fill: u32,
}

impl CacheState {
    /// Creates an empty cache of epoch 0, or returns T0711 for invalid sizes.
    pub fn new(spec: CacheSpec) -> Result<CacheState, Diagnostic> {
        let CacheSpec {
            regime, chunk_frames: c, window_frames: w, table_frames: t, tokens_per_frame, ..
        } = spec;
        let sink = spec.sink_frames;
        let refuse = |what: &str| {
            Err(Diagnostic::error(&T0711, what)
                .with_label("window", format!("{w} frames"))
                .with_label("sink", format!("{sink} frames"))
                .with_label("chunk", format!("{c} frames of {tokens_per_frame} tokens"))
                .with_label("position table", format!("{t} frames")))
        };
        if c == 0 || tokens_per_frame == 0 || w == 0 || !w.is_multiple_of(c) {
            return refuse("the window is not a whole number of chunks");
        }
        if w > t {
            return refuse("the window is longer than the position table");
        }
        if regime == CacheRegime::Recompute && u64::from(w) != 2 * u64::from(c) {
            return refuse("the window of the recompute regime is not two chunks");
        }
        if regime == CacheRegime::Recompute && sink > 0 {
            return refuse("the recompute regime keeps no frames, and therefore no sink");
        }
        if sink >= w || !sink.is_multiple_of(c) {
            return refuse("the sink is not a whole number of chunks below the window");
        }
        Ok(CacheState {
            spec,
            stage: CacheStage::Empty,
            epoch: 0,
            prompt_epoch: 0,
            chunk: 0,
            first_chunk: 0,
            position: 0,
            head: 0,
            fill: 0,
            rebased: 0,
            recached: 0,
        })
    }

    /// Applies a transition. On an error the state is unchanged.
    pub fn apply_transition(&mut self, transition: Transition) -> Result<(), Diagnostic> {
        let wanted = (self.spec.regime, self.stage, transition.name());
        let rule = TRANSITIONS.iter().find(|(regime, from, name, _)| (*regime, *from, *name) == wanted);
        let Some((.., to)) = rule else {
            return Err(self.transition_error(&format!("{} is not legal here", transition.name())));
        };
        let c = self.spec.chunk_frames;
        let mut to = *to;
        match transition {
            Transition::Reset => {
                self.epoch = self.next_number(self.epoch, "epoch")?;
                (self.position, self.head, self.fill, self.rebased) = (0, 0, 0, 0);
                self.first_chunk = self.chunk;
            }
            Transition::Prompt => self.prompt_epoch = self.next_number(self.prompt_epoch, "prompt epoch")?,
            Transition::Evict => self.fill -= c,
            Transition::Rebase(frames) => {
                if frames == 0 || frames != self.rebase_shift() {
                    return Err(self
                        .transition_error("a rebase does not move the next chunk to the end of the window")
                        .with_label("rebase", format!("{frames} frames"))
                        .with_label("this rank", format!("{} frames", self.rebase_shift())));
                }
                self.position -= frames;
                self.rebased += u64::from(frames);
            }
            Transition::Recall => {
                if self.ring_chunks() == 0 {
                    return Err(self.transition_error("the ring holds no chunk to recall"));
                }
            }
            Transition::Recache => {
                self.recached += 1;
                if self.recached == self.ring_chunks() {
                    // The oldest chunk is now in the ring's first rows, which the next chunk takes if the
                    // window is full.
                    self.head = self.spec.sink_frames + self.recached * c % self.ring_frames();
                    self.recached = 0;
                    to = CacheStage::Holding;
                }
            }
            Transition::Recompute => self.fill = c,
            Transition::Append => {
                if u64::from(self.start_frame()) + u64::from(c) > u64::from(self.spec.table_frames) {
                    return Err(
                        self.transition_error("the chunk would exceed the position table; rebase first")
                    );
                }
            }
            Transition::Advance => {
                self.chunk = self.next_number(self.chunk, "chunk")?;
                match self.spec.regime {
                    CacheRegime::Resident => {
                        self.position += c;
                        self.head += c;
                        if self.head == self.spec.window_frames {
                            self.head = self.spec.sink_frames;
                        }
                        self.fill += c;
                        if self.fill == self.spec.window_frames {
                            to = CacheStage::Full;
                        }
                    }
                    CacheRegime::Recompute => self.fill = 0,
                }
            }
        }
        self.stage = to;
        Ok(())
    }

    /// Applies the transitions before the first phase of a chunk: a reset if `reset` is set, then
    /// an evict if the window is full.
    pub fn begin_call(&mut self, reset: bool) -> Result<(), Diagnostic> {
        if reset {
            self.apply_transition(Transition::Reset)?;
        }
        if self.stage == CacheStage::Full {
            self.apply_transition(Transition::Evict)?;
        }
        Ok(())
    }

    /// Applies a phase's transition. A phase with another position or row than this state's is
    /// refused.
    pub fn apply_phase(&mut self, phase: &PhaseCall) -> Result<(), Diagnostic> {
        let Some(kind) = PhaseKind::from_program(&phase.program) else {
            return Err(Diagnostic::error(&T0722, format!("`{}` is not a phase of a call", phase.program)));
        };
        match kind {
            PhaseKind::Renoise
            | PhaseKind::Noise
            | PhaseKind::Video
            | PhaseKind::Decode
            | PhaseKind::Encode => Ok(()),
            PhaseKind::Tokens | PhaseKind::Array => Err(Diagnostic::error(
                &T0722,
                format!("`{}` is not a phase of a video's call", phase.program),
            )),
            PhaseKind::Text => self.apply_transition(Transition::Prompt),
            PhaseKind::Emit => self.apply_transition(Transition::Advance),
            PhaseKind::Rebase => {
                let frames = phase
                    .int_arg("shift")
                    .and_then(i64::checked_neg)
                    .and_then(|v| u32::try_from(v).ok())
                    .unwrap_or(0);
                self.apply_transition(Transition::Rebase(frames))
            }
            PhaseKind::Recompute => {
                self.check_scalar(phase, "start", 0)?;
                self.check_scalar(phase, "row", 0)?;
                self.apply_transition(Transition::Recompute)
            }
            PhaseKind::Recall => {
                let back = self.chunks_to_recache().to_string();
                match phase.program.split_once(".back") {
                    Some((_, sent)) if sent != back => {
                        Err(self.mismatch_error(phase, "recalled chunk", sent, &back))
                    }
                    _ => self.apply_transition(Transition::Recall),
                }
            }
            PhaseKind::Denoise | PhaseKind::Clean => {
                let recalled = kind == PhaseKind::Clean && self.stage == CacheStage::Recalled;
                let place = if recalled { self.recache_place() } else { self.append_place() };
                self.check_scalar(phase, "start", u64::from(place.start))?;
                self.check_scalar(phase, "row", place.row)?;
                let fill = place.fill.to_string();
                if let Some((_, sent)) = phase.program.split_once(".fill")
                    && sent.split('.').next() != Some(fill.as_str())
                {
                    return Err(self.mismatch_error(phase, "fill level", sent, &fill));
                }
                self.apply_transition(if recalled { Transition::Recache } else { Transition::Append })
            }
        }
    }

    /// Returns the frames by which positions must move back before the next append, if the append
    /// would exceed the position table.
    #[must_use]
    pub fn pending_rebase(&self) -> Option<u32> {
        let end = u64::from(self.start_frame()) + u64::from(self.spec.chunk_frames);
        (end > u64::from(self.spec.table_frames)).then(|| self.rebase_shift())
    }

    /// Returns the rotary position of the next chunk's first frame.
    #[must_use]
    pub fn start_frame(&self) -> u32 {
        match self.spec.regime {
            CacheRegime::Resident => self.position,
            CacheRegime::Recompute => self.fill,
        }
    }

    /// Returns the first cache row of the next chunk.
    #[must_use]
    pub fn start_row(&self) -> u64 {
        let frame = match self.spec.regime {
            CacheRegime::Resident => self.head,
            CacheRegime::Recompute => self.fill,
        };
        u64::from(frame) * u64::from(self.spec.tokens_per_frame)
    }

    /// Returns the number of chunks that a recache still has to write again, oldest first. A recache
    /// begins with every chunk that the ring held after the last call: one that this call evicts is
    /// context of the others.
    #[must_use]
    pub fn chunks_to_recache(&self) -> u32 {
        self.ring_chunks() - self.recached
    }

    /// Returns the chunks whose keys and values are cached between calls, oldest first, each with
    /// its range of cache rows. Rows index the time dim, so the ranges are equal for every shard.
    /// The list is empty in the recompute regime.
    #[must_use]
    pub fn cached_chunks(&self) -> Vec<(u32, Range<u64>)> {
        if self.spec.regime == CacheRegime::Recompute {
            return Vec::new();
        }
        let CacheSpec { chunk_frames: c, window_frames, sink_frames: sink, .. } = self.spec;
        // A due evict is not applied yet.
        let fill = if self.stage == CacheStage::Full { window_frames } else { self.fill };
        let at_frame = |chunk: u32, frame: u32| {
            let rows = u64::from(self.spec.tokens_per_frame);
            (chunk, u64::from(frame) * rows..u64::from(frame + c) * rows)
        };
        let of_sink = (0..fill.min(sink) / c).map(|i| at_frame(self.first_chunk + i, i * c));
        let of_ring = (1..=fill.saturating_sub(sink) / c).rev().map(|back| {
            let frame = sink + (self.head - sink + self.ring_frames() - back * c) % self.ring_frames();
            at_frame(self.chunk - back, frame)
        });
        of_sink.chain(of_ring).collect()
    }

    /// Returns the latent frames that are cached between calls; a due evict is not applied yet. It
    /// is 0 in the recompute regime.
    #[must_use]
    pub fn cached_frames(&self) -> u32 {
        self.cached_chunks().len() as u32 * self.spec.chunk_frames
    }

    /// Returns the stage, which determines the transitions that are legal next.
    #[must_use]
    pub fn stage(&self) -> CacheStage {
        self.stage
    }

    /// Returns the number of frames that are cached for a forward over the next chunk.
    #[must_use]
    pub fn fill_frames(&self) -> u32 {
        self.fill
    }

    /// Returns the cache epoch: the number of resets so far.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Returns the prompt epoch, which counts replacements of the text keys and values.
    #[must_use]
    pub fn prompt_epoch(&self) -> u32 {
        self.prompt_epoch
    }

    /// Returns the index of the next chunk in the output; it continues across epochs.
    #[must_use]
    pub fn next_chunk(&self) -> u32 {
        self.chunk
    }

    /// Returns the cache sizes.
    #[must_use]
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// Returns the digest of the whole state, which must be equal on the leader and on every rank.
    #[must_use]
    pub fn state_digest(&self) -> Digest {
        Digest::hash_value("cache", self)
    }

    /// Returns epochs, chunk, stage, start frame and fill level in one line, for diagnostics.
    #[must_use]
    pub fn describe(&self) -> String {
        format!(
            "epoch {}, chunk {}, {:?}, start frame {}, {} of {} frames, chunks in rows {:?}, prompt epoch {}",
            self.epoch,
            self.chunk,
            self.stage,
            self.start_frame(),
            self.fill,
            self.spec.window_frames,
            self.cached_chunks(),
            self.prompt_epoch
        )
    }

    /// Returns the frames by which a rebase moves the ring: the next chunk is then at the position
    /// that it had when the window was first full. Without a sink, this is the position of the oldest
    /// cached frame.
    fn rebase_shift(&self) -> u32 {
        self.position.saturating_sub(self.fill)
    }

    /// Returns the frames of the window that are not the sink.
    fn ring_frames(&self) -> u32 {
        self.spec.window_frames - self.spec.sink_frames
    }

    /// Returns the chunks of the ring after the last call, before an evict of this one.
    fn ring_chunks(&self) -> u32 {
        let c = self.spec.chunk_frames;
        let after_sink = (self.chunk - self.first_chunk).saturating_sub(self.spec.sink_frames / c);
        match self.spec.regime {
            CacheRegime::Resident => after_sink.min(self.ring_frames() / c),
            CacheRegime::Recompute => 0,
        }
    }

    fn append_place(&self) -> ForwardPlace {
        ForwardPlace { start: self.start_frame(), row: self.start_row(), fill: self.fill }
    }

    /// Returns the place of the oldest chunk that is not recached: the ring is written from its first
    /// row on, so that each chunk attends to the rows before it.
    pub(crate) fn recache_place(&self) -> ForwardPlace {
        let c = self.spec.chunk_frames;
        let fill = self.spec.sink_frames + self.recached * c;
        ForwardPlace {
            start: self.position.saturating_sub(self.chunks_to_recache() * c),
            row: u64::from(fill) * u64::from(self.spec.tokens_per_frame),
            fill,
        }
    }

    fn next_number(&self, number: u32, what: &str) -> Result<u32, Diagnostic> {
        let used_up = || self.transition_error(&format!("the last {what} of a session is used up"));
        number.checked_add(1).ok_or_else(used_up)
    }

    fn check_scalar(&self, phase: &PhaseCall, scalar: &str, expected: u64) -> Result<(), Diagnostic> {
        match phase.int_arg(scalar) {
            Some(v) if u64::try_from(v) == Ok(expected) => Ok(()),
            // A program without this scalar has the value fixed; the program index checks whether
            // that is allowed.
            None => Ok(()),
            Some(v) => Err(self.mismatch_error(phase, scalar, &v.to_string(), &expected.to_string())),
        }
    }

    fn mismatch_error(&self, phase: &PhaseCall, what: &str, sent: &str, expected: &str) -> Diagnostic {
        Diagnostic::error(&T0712, format!("the {what} of phase `{}` differs from this rank's", phase.program))
            .with_label("envelope", sent)
            .with_label("this rank", format!("{expected} ({})", self.describe()))
    }

    fn transition_error(&self, what: &str) -> Diagnostic {
        Diagnostic::error(&T0710, what)
            .with_label("cache", format!("{:?}, {}", self.spec.regime, self.describe()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(regime: CacheRegime, chunk: u32, window: u32, table: u32) -> CacheSpec {
        CacheSpec {
            regime,
            chunk_frames: chunk,
            window_frames: window,
            sink_frames: 0,
            table_frames: table,
            tokens_per_frame: 10,
        }
    }

    fn spec_with_sink(chunk: u32, window: u32, sink: u32, table: u32) -> CacheSpec {
        CacheSpec { sink_frames: sink, ..spec(CacheRegime::Resident, chunk, window, table) }
    }

    /// Generates a chunk of two forwards, after a rebase if one is due.
    fn generate_chunk(cache: &mut CacheState) {
        cache.begin_call(false).expect("legal");
        if let Some(frames) = cache.pending_rebase() {
            cache.apply_transition(Transition::Rebase(frames)).expect("legal");
        }
        cache.apply_transition(Transition::Append).expect("legal");
        cache.apply_transition(Transition::Append).expect("the clean phase rewrites the same rows");
        cache.apply_transition(Transition::Advance).expect("legal");
    }

    // proves: K-01, K-13
    #[test]
    fn every_sequence_up_to_six_keeps_two_ranks_equal_and_inside_their_bounds() {
        // A window of 2 and a table of 3 reach eviction and rebase within six transitions after two
        // chunks.
        // With a sink of 1, a window of 3 is such a ring behind it.
        let (resident, recompute) = (CacheRegime::Resident, CacheRegime::Recompute);
        for (cache, warm) in [
            (spec(resident, 1, 2, 3), 0),
            (spec(resident, 1, 2, 3), 2),
            (spec(resident, 1, 2, 3), 3),
            (spec_with_sink(1, 3, 1, 4), 3),
            (spec_with_sink(1, 3, 1, 4), 5),
            (spec(recompute, 1, 2, 3), 0),
        ] {
            let regime = cache.regime;
            let mut start = CacheState::new(cache).expect("legal");
            for _ in 0..warm {
                generate_chunk(&mut start);
            }
            let all = [
                Transition::Reset,
                Transition::Prompt,
                Transition::Evict,
                Transition::Rebase(1),
                Transition::Recall,
                Transition::Recache,
                Transition::Recompute,
                Transition::Append,
                Transition::Advance,
            ];
            let mut legal = 0;
            for n in 0..9u32.pow(6) {
                let (mut a, mut b) = (start.clone(), start.clone());
                let mut rest = n;
                for _ in 0..6 {
                    let t = all[(rest % 9) as usize];
                    rest /= 9;
                    let before = a.clone();
                    let outcome = a.apply_transition(t);
                    assert_eq!(outcome.is_ok(), b.apply_transition(t).is_ok());
                    assert_eq!(a, b);
                    if outcome.is_err() {
                        assert_eq!(a, before, "a refused transition changes nothing");
                        break;
                    }
                    legal += 1;
                    let listed = TRANSITIONS
                        .iter()
                        .any(|(r, from, name, _)| (*r, *from, *name) == (regime, before.stage, t.name()));
                    assert!(listed);
                    let CacheSpec { window_frames, table_frames, .. } = cache;
                    assert!(a.fill <= window_frames && a.head < window_frames && a.position <= table_frames);
                    assert!(a.fill <= a.position || regime == CacheRegime::Recompute);
                    assert!(a.stage != CacheStage::Open || a.start_frame() < table_frames);
                    assert!(
                        a.recached == 0 || matches!(a.stage, CacheStage::Recalled | CacheStage::Recaching)
                    );
                    assert_ne!(a.state_digest(), Digest::default());
                }
            }
            assert!(legal > 1000);
        }
    }

    #[test]
    fn a_long_resident_stream_never_leaves_the_table_and_never_cuts() {
        let mut cache = CacheState::new(spec(CacheRegime::Resident, 3, 9, 1024)).expect("legal");
        let mut rebases = 0;
        for k in 0..2000u32 {
            cache.begin_call(false).expect("legal");
            assert_eq!(cache.fill_frames(), (k * 3).min(6));
            assert_eq!(cache.start_row(), u64::from((k * 3) % 9) * 10);
            if let Some(frames) = cache.pending_rebase() {
                rebases += 1;
                cache.apply_transition(Transition::Rebase(frames)).expect("legal");
                assert_eq!(cache.start_frame(), 6, "the oldest of six cached frames is at 0");
            }
            cache.apply_transition(Transition::Append).expect("legal");
            cache.apply_transition(Transition::Append).expect("the clean phase rewrites the same rows");
            assert!(cache.start_frame() + 3 <= 1024);
            cache.apply_transition(Transition::Advance).expect("legal");
            assert_eq!((cache.epoch(), cache.next_chunk()), (0, k + 1));
        }
        assert_eq!(rebases, 5);
    }

    #[test]
    fn recompute_forgets_between_chunks() {
        let mut cache = CacheState::new(spec(CacheRegime::Recompute, 3, 6, 1024)).expect("legal");
        assert_eq!((cache.start_frame(), cache.start_row()), (0, 0));
        cache.apply_transition(Transition::Append).expect("legal");
        cache.apply_transition(Transition::Advance).expect("legal");
        assert_eq!(cache.fill_frames(), 0);
        assert!(
            cache.apply_transition(Transition::Append).is_err(),
            "a second chunk needs its context first"
        );
        for _ in 0..1000 {
            cache.apply_transition(Transition::Recompute).expect("legal");
            assert_eq!((cache.start_frame(), cache.start_row(), cache.pending_rebase()), (3, 30, None));
            cache.apply_transition(Transition::Append).expect("legal");
            cache.apply_transition(Transition::Advance).expect("legal");
        }
    }

    // proves: K-05
    #[test]
    fn every_written_chunk_is_found_in_its_rows_until_it_is_evicted() {
        let spec = CacheSpec {
            regime: CacheRegime::Resident,
            chunk_frames: 3,
            window_frames: 9,
            sink_frames: 0,
            table_frames: 1024,
            tokens_per_frame: 10,
        };
        let mut cache = CacheState::new(spec).expect("legal");
        for k in 0..7u32 {
            cache.begin_call(k == 0).expect("legal");
            let row = cache.start_row();
            cache.apply_transition(Transition::Append).expect("legal");
            cache.apply_transition(Transition::Advance).expect("legal");
            let held = cache.cached_chunks();
            assert_eq!(
                held.iter().map(|(c, _)| *c).collect::<Vec<_>>(),
                (k.saturating_sub(2)..=k).collect::<Vec<_>>()
            );
            assert_eq!(held.last().expect("the newest").1, row..row + 30);
            let mut rows: Vec<u64> = held.iter().flat_map(|(_, r)| r.clone()).collect();
            rows.sort_unstable();
            rows.dedup();
            assert_eq!(rows.len(), held.len() * 30, "no row belongs to two chunks");
        }
    }

    #[test]
    fn a_sink_stays_in_its_rows_while_the_ring_behind_it_turns() {
        let mut cache = CacheState::new(spec_with_sink(3, 12, 3, 1024)).expect("legal");
        for k in 0..2000u32 {
            generate_chunk(&mut cache);
            let held = cache.cached_chunks();
            let ring = k.saturating_sub(2).max(1)..=k;
            assert_eq!(
                held.iter().map(|(c, _)| *c).collect::<Vec<_>>(),
                [0].into_iter().chain(ring).collect::<Vec<_>>()
            );
            assert_eq!(held[0].1, 0..30, "the sink");
            let mut rows: Vec<u64> = held.iter().flat_map(|(_, r)| r.clone()).collect();
            rows.sort_unstable();
            rows.dedup();
            assert_eq!((rows.len(), rows.last()), (held.len() * 30, Some(&(held.len() as u64 * 30 - 1))));
        }
        assert!(cache.rebased > 0);
        cache.begin_call(true).expect("legal");
        generate_chunk(&mut cache);
        assert_eq!(cache.cached_chunks(), [(2000, 0..30)], "the next scene has a sink of its own");
    }

    #[test]
    fn a_rebase_moves_the_ring_behind_the_sink() {
        let mut cache = CacheState::new(spec_with_sink(1, 6, 3, 50)).expect("legal");
        for _ in 0..50 {
            assert_eq!(cache.pending_rebase(), None);
            generate_chunk(&mut cache);
        }
        cache.begin_call(false).expect("legal");
        // Frames 48 and 49 move to positions 3 and 4.
        assert_eq!((cache.pending_rebase(), cache.fill_frames()), (Some(45), 5));
        assert!(cache.apply_transition(Transition::Rebase(48)).is_err(), "the ring would overlap the sink");
        cache.apply_transition(Transition::Rebase(45)).expect("legal");
        assert_eq!(cache.start_frame(), 5);
    }

    /// Applies a recache and returns the place of each of its forwards: start, row and fill level.
    fn recache(cache: &mut CacheState) -> Vec<(u32, u64, u32)> {
        let mut places = Vec::new();
        while cache.stage != CacheStage::Holding || places.is_empty() {
            let place = cache.recache_place();
            let phase = |name: &str, args: &[(&str, i64)]| {
                let args = args.iter().map(|(k, v)| ((*k).to_string(), crate::wire::ScalarArg::I64(*v)));
                PhaseCall::new(name, args.collect())
            };
            let back = cache.chunks_to_recache();
            let recall = phase(&format!("recall.back{back}"), &[]);
            let args = [("row", place.row as i64), ("start", i64::from(place.start))];
            let clean = phase(&format!("clean.fill{}", place.fill), &args);
            assert!(cache.clone().apply_phase(&phase(&format!("recall.back{}", back + 1), &[])).is_err());
            cache.apply_phase(&recall).expect("legal");
            let late = phase(&format!("clean.fill{}", place.fill), &[("row", place.row as i64 + 30)]);
            assert_eq!(cache.clone().apply_phase(&late).expect_err("another row").code.id, "T0712");
            let denoise = phase(&format!("denoise.fill{}", cache.fill), &[]);
            assert_eq!(cache.clone().apply_phase(&denoise).expect_err("a mixed ring").code.id, "T0710");
            cache.apply_phase(&clean).expect("legal");
            places.push((place.start, place.row, place.fill));
        }
        places
    }

    #[test]
    fn a_recache_writes_the_ring_in_order_and_the_next_chunk_replaces_the_oldest() {
        let mut cache = CacheState::new(spec_with_sink(3, 12, 3, 1024)).expect("legal");
        generate_chunk(&mut cache);
        cache.begin_call(false).expect("legal");
        assert_eq!(cache.chunks_to_recache(), 0, "the sink is not written again");
        assert_eq!(cache.apply_transition(Transition::Recall).expect_err("nothing").code.id, "T0710");
        generate_chunk(&mut cache);
        cache.begin_call(false).expect("legal");
        assert_eq!(recache(&mut cache), [(3, 30, 3)]);
        for _ in 0..6 {
            generate_chunk(&mut cache);
        }
        // Chunks 5, 6 and 7 of a ring that has turned.
        assert_ne!(cache.cached_chunks()[1].1, 30..60);
        cache.begin_call(false).expect("legal");
        assert_eq!(recache(&mut cache), [(15, 30, 3), (18, 60, 6), (21, 90, 9)]);
        assert_eq!(cache.cached_chunks(), [(0, 0..30), (6, 60..90), (7, 90..120)]);
        assert_eq!((cache.start_frame(), cache.start_row(), cache.fill_frames()), (24, 30, 9));
        cache.apply_transition(Transition::Append).expect("legal");
    }

    #[test]
    fn impossible_geometries_are_refused() {
        for (chunk, window, sink) in [(3, 12, 12), (3, 12, 15), (3, 12, 4)] {
            let refused = CacheState::new(spec_with_sink(chunk, window, sink, 1024)).expect_err("refused");
            assert_eq!(refused.code.id, "T0711", "{sink}");
        }
        let kept = CacheSpec { sink_frames: 3, ..spec(CacheRegime::Recompute, 3, 6, 10) };
        assert_eq!(CacheState::new(kept).expect_err("refused").code.id, "T0711");
        for (regime, c, w, t) in [
            (CacheRegime::Resident, 0, 3, 10),
            (CacheRegime::Resident, 3, 7, 10),
            (CacheRegime::Resident, 3, 0, 10),
            (CacheRegime::Resident, 3, 12, 10),
            (CacheRegime::Recompute, 3, 9, 10),
        ] {
            assert_eq!(CacheState::new(spec(regime, c, w, t)).expect_err("refused").code.id, "T0711");
        }
    }
}
