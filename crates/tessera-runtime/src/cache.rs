//! The life of the key/value caches as a state machine that leader and workers run alike.
//!
//! Two regimes. *Resident*: a ring of latent frames survives from chunk to chunk; chunk rows are written at
//! the ring's head, the oldest chunk is evicted when the ring is full, and rotary positions are absolute until
//! the position table ends, when a rebase rotates every cached key back. *Recompute*: nothing survives; a pass
//! over context frames fills the cache anew before each chunk but the first of an epoch.
//!
//! No contents ever travel: equal digests of these few numbers, and equal inputs, make equal caches.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use tessera_base::{Code, Diagnostic};

use crate::Digest;
use crate::census::PhaseKind;
use crate::wire::PhaseCall;

/// A transition that the table does not hold.
pub(crate) static T0710: Code = Code {
    id: "T0710",
    title: "illegal transition of the caches",
    page: "The caches go through reset, prompt, evict, rebase, recompute, append and advance in an order that one \
table fixes. Something asked for a step that the table does not allow from the present stage: an append into a full \
ring without an evict, a recompute in the resident regime, an advance with nothing appended.\n\nOn a worker this \
means that leader and worker do not hold the same state; on the leader it is a fault of the program. The state is \
left as it was and the call is refused before any collective.",
};
/// A shape that no cache can have.
pub(crate) static T0711: Code = Code {
    id: "T0711",
    title: "impossible cache geometry",
    page: "The window must be a whole number of chunks, at least one, and fit the rotary position table. In the \
recompute regime it is exactly two chunks: the context and the chunk itself. Change the window or the chunk length \
in the mapping.",
};
/// Two ideas of the same state.
pub(crate) static T0712: Code = Code {
    id: "T0712",
    title: "an envelope does not fit the cache state of this rank",
    page: "Every envelope carries the epoch, the start frame and the digest of the state that follows it; every \
phase that touches the caches carries its position and row. This rank computes the same from its own state and got \
something else, so leader and rank no longer agree about what the caches hold. The chunk is refused before any \
collective.\n\nLook for something that reset one rank's caches out of band, for a message that was handled twice, \
or for a restarted process.",
};

/// How the caches live.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Regime {
    /// A ring that survives from chunk to chunk.
    Resident,
    /// Filled anew from context frames before each chunk.
    Recompute,
}

/// Sizes that never change in a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct CacheSpec {
    /// How the caches live.
    pub regime: Regime,
    /// Latent frames of a chunk.
    pub chunk_frames: u32,
    /// Latent frames that the cache has room for, the present chunk included.
    pub window_frames: u32,
    /// Rotary positions that exist.
    pub table_frames: u32,
    /// Cache rows of one latent frame.
    pub tokens_per_frame: u32,
}

/// Where in its life a cache is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum Stage {
    /// Nothing was generated in this epoch.
    Empty,
    /// Between chunks, with room for one more.
    Holding,
    /// Between chunks, ring full: evict comes before append.
    Full,
    /// Context frames are written, the chunk is not.
    Context,
    /// The chunk's rows are being written, once per pass.
    Open,
}

/// One step of a cache's life.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Transition {
    /// A new epoch: everything is forgotten.
    Reset,
    /// New text keys and values.
    Prompt,
    /// Drops the oldest chunk. Derived from the fill level, never sent.
    Evict,
    /// Moves all cached positions back by so many frames, so that the oldest cached frame is at 0.
    Rebase(u32),
    /// Fills the cache from context frames.
    Recompute,
    /// Writes the chunk's rows; later passes of the call overwrite them.
    Append,
    /// Closes the chunk.
    Advance,
}

/// A row of the table: in this regime, from this stage, this transition leads to that stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Rule {
    /// Regime in which the row holds.
    pub regime: Regime,
    /// Stage before.
    pub from: Stage,
    /// The transition's name.
    pub transition: &'static str,
    /// Stage after. An advance that fills the ring leads to [`Stage::Full`] instead.
    pub to: Stage,
}

const fn rule(regime: Regime, from: Stage, transition: &'static str, to: Stage) -> Rule {
    Rule { regime, from, transition, to }
}

/// Every legal transition. What is not here is refused.
pub const TRANSITIONS: &[Rule] = {
    use Regime::{Recompute, Resident};
    use Stage::{Context, Empty, Full, Holding, Open};
    &[
        rule(Resident, Empty, "reset", Empty),
        rule(Resident, Empty, "prompt", Empty),
        rule(Resident, Empty, "append", Open),
        rule(Resident, Open, "append", Open),
        rule(Resident, Open, "advance", Holding),
        rule(Resident, Holding, "reset", Empty),
        rule(Resident, Holding, "prompt", Holding),
        rule(Resident, Holding, "rebase", Holding),
        rule(Resident, Holding, "append", Open),
        rule(Resident, Full, "reset", Empty),
        rule(Resident, Full, "prompt", Full),
        rule(Resident, Full, "evict", Holding),
        rule(Recompute, Empty, "reset", Empty),
        rule(Recompute, Empty, "prompt", Empty),
        rule(Recompute, Empty, "append", Open),
        rule(Recompute, Open, "append", Open),
        rule(Recompute, Open, "advance", Holding),
        rule(Recompute, Holding, "reset", Empty),
        rule(Recompute, Holding, "prompt", Holding),
        rule(Recompute, Holding, "recompute", Context),
        rule(Recompute, Context, "append", Open),
    ]
};

impl Transition {
    /// Its name in [`TRANSITIONS`].
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Transition::Reset => "reset",
            Transition::Prompt => "prompt",
            Transition::Evict => "evict",
            Transition::Rebase(_) => "rebase",
            Transition::Recompute => "recompute",
            Transition::Append => "append",
            Transition::Advance => "advance",
        }
    }
}

/// The state that every rank holds alike. It says where rows go and what they mean, never what they contain.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cache {
    spec: CacheSpec,
    stage: Stage,
    epoch: u32,
    prompt_epoch: u32,
    /// Stream number of the next chunk; goes on across epochs.
    chunk: u32,
    /// Rotary position of the next frame to be appended (resident).
    position: u32,
    /// Ring frame where the next chunk goes (resident).
    head: u32,
    /// Frames that a pass over the next chunk finds cached.
    fill: u32,
    /// Frames by which positions were moved back in this epoch.
    rebased: u64,
}

impl Cache {
    /// An empty cache of epoch 0.
    pub fn new(spec: CacheSpec) -> Result<Cache, Diagnostic> {
        let CacheSpec { regime, chunk_frames: c, window_frames: w, table_frames: t, tokens_per_frame } = spec;
        let refuse = |what: &str| {
            Err(Diagnostic::error(&T0711, what)
                .at("window", format!("{w} frames"))
                .at("chunk", format!("{c} frames of {tokens_per_frame} tokens"))
                .at("position table", format!("{t} frames")))
        };
        if c == 0 || tokens_per_frame == 0 || w == 0 || !w.is_multiple_of(c) {
            return refuse("the window is not a whole number of chunks");
        }
        if w > t {
            return refuse("the window is longer than the position table");
        }
        if regime == Regime::Recompute && u64::from(w) != 2 * u64::from(c) {
            return refuse("the window of the recompute regime is not two chunks");
        }
        Ok(Cache {
            spec,
            stage: Stage::Empty,
            epoch: 0,
            prompt_epoch: 0,
            chunk: 0,
            position: 0,
            head: 0,
            fill: 0,
            rebased: 0,
        })
    }

    /// Takes one step, or refuses it and stays as it was.
    pub fn apply(&mut self, transition: Transition) -> Result<(), Diagnostic> {
        let found = TRANSITIONS.iter().find(|r| {
            r.regime == self.spec.regime && r.from == self.stage && r.transition == transition.name()
        });
        let Some(rule) = found else {
            return Err(self.refuse(&format!("{} is not legal here", transition.name())));
        };
        let c = self.spec.chunk_frames;
        let mut to = rule.to;
        match transition {
            Transition::Reset => {
                self.epoch = match self.epoch.checked_add(1) {
                    Some(e) => e,
                    None => return Err(self.refuse("the last epoch of a session is used up")),
                };
                (self.position, self.head, self.fill, self.rebased) = (0, 0, 0, 0);
            }
            Transition::Prompt => {
                self.prompt_epoch = match self.prompt_epoch.checked_add(1) {
                    Some(e) => e,
                    None => return Err(self.refuse("the last prompt epoch of a session is used up")),
                };
            }
            Transition::Evict => self.fill -= c,
            Transition::Rebase(frames) => {
                if frames == 0 || frames != self.oldest() {
                    return Err(self
                        .refuse("a rebase does not bring the oldest cached frame to position 0")
                        .at("rebase", format!("{frames} frames"))
                        .at("oldest cached frame", format!("position {}", self.oldest())));
                }
                self.position -= frames;
                self.rebased += u64::from(frames);
            }
            Transition::Recompute => self.fill = c,
            Transition::Append => {
                if u64::from(self.start_frame()) + u64::from(c) > u64::from(self.spec.table_frames) {
                    return Err(self.refuse("the chunk would leave the position table; rebase first"));
                }
            }
            Transition::Advance => {
                self.chunk = match self.chunk.checked_add(1) {
                    Some(k) => k,
                    None => return Err(self.refuse("the last chunk of a session is used up")),
                };
                match self.spec.regime {
                    Regime::Resident => {
                        self.position += c;
                        self.head = (self.head + c) % self.spec.window_frames;
                        self.fill += c;
                        if self.fill == self.spec.window_frames {
                            to = Stage::Full;
                        }
                    }
                    Regime::Recompute => self.fill = 0,
                }
            }
        }
        self.stage = to;
        Ok(())
    }

    /// What happens before the first phase of a chunk: a hard cut if asked for, then the derived evict.
    pub fn begin_call(&mut self, reset: bool) -> Result<(), Diagnostic> {
        if reset {
            self.apply(Transition::Reset)?;
        }
        if self.stage == Stage::Full {
            self.apply(Transition::Evict)?;
        }
        Ok(())
    }

    /// What a phase does to the caches. A phase whose position or row is not this state's is refused.
    pub fn run_phase(&mut self, phase: &PhaseCall) -> Result<(), Diagnostic> {
        let Some(kind) = PhaseKind::of(&phase.program) else {
            return Err(Diagnostic::error(
                &crate::census::T0722,
                format!("`{}` is no phase of a call", phase.program),
            ));
        };
        match kind {
            PhaseKind::Renoise => Ok(()),
            PhaseKind::Text => self.apply(Transition::Prompt),
            PhaseKind::Emit => self.apply(Transition::Advance),
            PhaseKind::Rebase => {
                let frames = phase
                    .int("shift")
                    .and_then(i64::checked_neg)
                    .and_then(|v| u32::try_from(v).ok())
                    .unwrap_or(0);
                self.apply(Transition::Rebase(frames))
            }
            PhaseKind::Recompute => {
                self.agree(phase, "start", 0)?;
                self.agree(phase, "row", 0)?;
                self.apply(Transition::Recompute)
            }
            PhaseKind::Denoise | PhaseKind::Clean => {
                self.agree(phase, "start", u64::from(self.start_frame()))?;
                self.agree(phase, "row", self.row())?;
                if let Some((_, fill)) = phase.program.split_once(".fill")
                    && fill.split('.').next() != Some(self.fill.to_string().as_str())
                {
                    return Err(self.differs(phase, "fill level", fill, &self.fill.to_string()));
                }
                self.apply(Transition::Append)
            }
        }
    }

    /// Frames by which positions must move back before the next append, if the table would end.
    #[must_use]
    pub fn rebase_due(&self) -> Option<u32> {
        let end = u64::from(self.start_frame()) + u64::from(self.spec.chunk_frames);
        (end > u64::from(self.spec.table_frames)).then(|| self.oldest())
    }

    /// Rotary position of the next chunk's first frame.
    #[must_use]
    pub fn start_frame(&self) -> u32 {
        match self.spec.regime {
            Regime::Resident => self.position,
            Regime::Recompute => self.fill,
        }
    }

    /// First cache row of the next chunk.
    #[must_use]
    pub fn row(&self) -> u64 {
        let frame = match self.spec.regime {
            Regime::Resident => self.head,
            Regime::Recompute => self.fill,
        };
        u64::from(frame) * u64::from(self.spec.tokens_per_frame)
    }

    /// Positions that the next evict drops; empty unless the ring is full.
    #[must_use]
    pub fn evicted(&self) -> Range<u32> {
        let len = if self.stage == Stage::Full { self.spec.chunk_frames } else { 0 };
        self.oldest()..self.oldest() + len
    }

    /// Chunks whose keys and values are held between calls, oldest first, each with its cache rows: the time index
    /// of every shard alike. Nothing is held in the recompute regime.
    #[must_use]
    pub fn held(&self) -> Vec<(u32, Range<u64>)> {
        if self.spec.regime == Regime::Recompute {
            return Vec::new();
        }
        let (frames, rows) = (self.spec.chunk_frames, u64::from(self.spec.tokens_per_frame));
        // An evict that is due has not happened yet.
        let fill = if self.stage == Stage::Full { self.spec.window_frames } else { self.fill };
        (1..=fill / frames)
            .rev()
            .map(|back| {
                let frame = (self.head + self.spec.window_frames - back * frames) % self.spec.window_frames;
                (self.chunk - back, u64::from(frame) * rows..u64::from(frame + frames) * rows)
            })
            .collect()
    }

    /// Where in its life the cache is.
    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    /// Frames that a pass over the next chunk finds cached.
    #[must_use]
    pub fn fill_frames(&self) -> u32 {
        self.fill
    }

    /// Life of the caches.
    #[must_use]
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Life of the text keys and values.
    #[must_use]
    pub fn prompt_epoch(&self) -> u32 {
        self.prompt_epoch
    }

    /// Stream number of the next chunk.
    #[must_use]
    pub fn chunk(&self) -> u32 {
        self.chunk
    }

    /// Sizes that never change.
    #[must_use]
    pub fn spec(&self) -> &CacheSpec {
        &self.spec
    }

    /// Digest of the whole state.
    #[must_use]
    pub fn digest(&self) -> Digest {
        Digest::of_value("cache", self)
    }

    /// One line for a person.
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
            self.held(),
            self.prompt_epoch
        )
    }

    /// Position of the oldest cached frame.
    fn oldest(&self) -> u32 {
        self.position.saturating_sub(self.fill)
    }

    fn agree(&self, phase: &PhaseCall, scalar: &str, here: u64) -> Result<(), Diagnostic> {
        match phase.int(scalar) {
            Some(v) if u64::try_from(v) == Ok(here) => Ok(()),
            // A program without the scalar has it fixed; the census decides whether it may.
            None => Ok(()),
            Some(v) => Err(self.differs(phase, scalar, &v.to_string(), &here.to_string())),
        }
    }

    fn differs(&self, phase: &PhaseCall, what: &str, sent: &str, here: &str) -> Diagnostic {
        Diagnostic::error(&T0712, format!("the {what} of phase `{}` is not this rank's", phase.program))
            .at("envelope", sent)
            .at("this rank", format!("{here} ({})", self.describe()))
    }

    fn refuse(&self, what: &str) -> Diagnostic {
        Diagnostic::error(&T0710, what).at("cache", format!("{:?}, {}", self.spec.regime, self.describe()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(regime: Regime, chunk: u32, window: u32, table: u32) -> CacheSpec {
        CacheSpec {
            regime,
            chunk_frames: chunk,
            window_frames: window,
            table_frames: table,
            tokens_per_frame: 10,
        }
    }

    #[test]
    fn every_sequence_up_to_six_keeps_two_ranks_equal_and_inside_their_bounds() {
        // A window of 2 and a table of 3 reach eviction and rebase within six steps after two chunks.
        for (regime, warm) in
            [(Regime::Resident, 0), (Regime::Resident, 2), (Regime::Resident, 3), (Regime::Recompute, 0)]
        {
            let mut start = Cache::new(spec(regime, 1, 2, 3)).expect("legal");
            for _ in 0..warm {
                start.begin_call(false).expect("legal");
                start.apply(Transition::Append).expect("legal");
                start.apply(Transition::Advance).expect("legal");
            }
            let all = [
                Transition::Reset,
                Transition::Prompt,
                Transition::Evict,
                Transition::Rebase(1),
                Transition::Recompute,
                Transition::Append,
                Transition::Advance,
            ];
            let mut legal = 0;
            for n in 0..7u32.pow(6) {
                let (mut a, mut b) = (start.clone(), start.clone());
                let mut rest = n;
                for _ in 0..6 {
                    let t = all[(rest % 7) as usize];
                    rest /= 7;
                    let before = a.clone();
                    let outcome = a.apply(t);
                    assert_eq!(outcome.is_ok(), b.apply(t).is_ok());
                    assert_eq!(a, b);
                    if outcome.is_err() {
                        assert_eq!(a, before, "a refused step changes nothing");
                        break;
                    }
                    legal += 1;
                    let listed = TRANSITIONS
                        .iter()
                        .any(|r| r.regime == regime && r.from == before.stage && r.transition == t.name());
                    assert!(listed);
                    assert!(a.fill <= 2 && a.head < 2 && a.position <= 3);
                    assert!(a.fill <= a.position || regime == Regime::Recompute);
                    assert!(a.stage != Stage::Open || a.start_frame() < 3);
                    assert_ne!(a.digest(), Digest::default());
                }
            }
            assert!(legal > 1000);
        }
    }

    #[test]
    fn a_long_resident_stream_never_leaves_the_table_and_never_cuts() {
        let mut cache = Cache::new(spec(Regime::Resident, 3, 9, 1024)).expect("legal");
        let mut rebases = 0;
        for k in 0..2000u32 {
            let full = cache.stage() == Stage::Full;
            let evicted = cache.evicted();
            assert_eq!(evicted.len(), if full { 3 } else { 0 });
            cache.begin_call(false).expect("legal");
            assert_eq!(cache.fill_frames(), (k * 3).min(6));
            assert_eq!(cache.row(), u64::from((k * 3) % 9) * 10);
            if let Some(frames) = cache.rebase_due() {
                rebases += 1;
                cache.apply(Transition::Rebase(frames)).expect("legal");
                assert_eq!(cache.start_frame(), 6, "the oldest of six cached frames is at 0");
            }
            cache.apply(Transition::Append).expect("legal");
            cache.apply(Transition::Append).expect("the clean pass rewrites the same rows");
            assert!(cache.start_frame() + 3 <= 1024);
            cache.apply(Transition::Advance).expect("legal");
            assert_eq!((cache.epoch(), cache.chunk()), (0, k + 1));
        }
        assert_eq!(rebases, 5);
    }

    #[test]
    fn recompute_forgets_between_chunks() {
        let mut cache = Cache::new(spec(Regime::Recompute, 3, 6, 1024)).expect("legal");
        assert_eq!((cache.start_frame(), cache.row()), (0, 0));
        cache.apply(Transition::Append).expect("legal");
        cache.apply(Transition::Advance).expect("legal");
        assert_eq!(cache.fill_frames(), 0);
        assert!(cache.apply(Transition::Append).is_err(), "a second chunk needs its context first");
        for _ in 0..1000 {
            cache.apply(Transition::Recompute).expect("legal");
            assert_eq!((cache.start_frame(), cache.row(), cache.rebase_due()), (3, 30, None));
            cache.apply(Transition::Append).expect("legal");
            cache.apply(Transition::Advance).expect("legal");
        }
    }

    #[test]
    fn every_written_chunk_is_found_in_its_rows_until_it_is_evicted() {
        let spec = CacheSpec {
            regime: Regime::Resident,
            chunk_frames: 3,
            window_frames: 9,
            table_frames: 1024,
            tokens_per_frame: 10,
        };
        let mut cache = Cache::new(spec).expect("legal");
        for k in 0..7u32 {
            cache.begin_call(k == 0).expect("legal");
            let row = cache.row();
            cache.apply(Transition::Append).expect("legal");
            cache.apply(Transition::Advance).expect("legal");
            let held = cache.held();
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
    fn impossible_geometries_are_refused() {
        for (regime, c, w, t) in [
            (Regime::Resident, 0, 3, 10),
            (Regime::Resident, 3, 7, 10),
            (Regime::Resident, 3, 0, 10),
            (Regime::Resident, 3, 12, 10),
            (Regime::Recompute, 3, 9, 10),
        ] {
            assert_eq!(Cache::new(spec(regime, c, w, t)).expect_err("refused").code.id, "T0711");
        }
    }
}
