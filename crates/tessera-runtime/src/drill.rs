//! The faults that a drill can arm, and the injection of those that act on messages: the part of a
//! drill that needs no process.
//!
//! An armed fault is one line of text that every rank announces at the hello, so that no rank runs
//! with a fault unknown to the others. This module reads no clock and makes no system calls.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

use crate::driver::MessageDirection;
use crate::paged_cache::PAGES;
use crate::wire::{self, CallAction, CallMeta, Envelope, F32Bits, Message, ScalarArg, Tensor, Tensors};
use crate::{Digest, Limits};

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident $text:literal,)*) => {
        /// What a drill breaks on purpose; [`ArmedFault`] adds the rank and the call.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum DrillFault {
            $($(#[$doc])* $name,)*
        }

        impl DrillFault {
            /// Every fault, in declaration order.
            pub const ALL: &[DrillFault] = &[$(DrillFault::$name,)*];

            /// Returns the fault's name on a command line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(DrillFault::$name => $text,)*
                }
            }
        }
    };
}

faults! {
    /// The meta of a call is larger than a frame may carry.
    UnserialisableMeta "unserialisable-meta",
    /// The text embedding has a dtype that no program reads.
    UnsupportedDtype "unsupported-dtype",
    /// The text embedding is sent under another name, so that the tensor `text` is missing.
    MissingTensor "missing-tensor",
    /// The text embedding has one row less than the model reads.
    ShortText "short-text",
    /// The version in an envelope is one above this build's.
    OtherVersion "other-version",
    /// An envelope names the digest of a plan that no rank has.
    OtherPlan "other-plan",
    /// A frame carries bytes that its manifest does not list.
    UnlistedTensor "unlisted-tensor",
    /// A rank announces the digest of a plan that no other rank has.
    OtherPlanAtInit "other-plan-at-init",
    /// A fault is armed in the process of one rank alone.
    ArmedAlone "armed-alone",
    /// The engine of a rank leaves out the check of its collectives.
    UnarmedCheck "unarmed-check",
    /// A peer does not have the secret of the run.
    WrongSecret "wrong-secret",
    /// A rank runs one extra generator forward.
    ExtraForward "extra-forward",
    /// A rank runs one generator forward too few.
    MissingForward "missing-forward",
    /// A rank issues a collective behind a flag that only it has set.
    ConditionalCollective "conditional-collective",
    /// A rank issues a broadcast that is not in the plan.
    AdHocBroadcast "ad-hoc-broadcast",
    /// A rank issues a collective over the world instead of its axis.
    WrongGroup "wrong-group",
    /// A rank issues a collective whose operand has another shape than in the plan.
    WrongShape "wrong-shape",
    /// A rank joins its communicators in reverse order.
    GroupOrder "group-order",
    /// An envelope is damaged before the mesh leader receives it.
    RelayRefuses "relay-refuses",
    /// The queue of finished chunks has no bound.
    UnboundedOutput "unbounded-output",
    /// A result names an epoch that is over.
    StaleResult "stale-result",
    /// A rank's caches are cleared in the middle of a scene.
    ResetOnOne "reset-on-one",
    /// The start frame in an envelope is one too high.
    StartSkew "start-skew",
    /// The context message of a recompute call reaches a rank without its tensor.
    RecomputeWithoutContext "recompute-without-context",
    /// The result of a call before a cut is sent once more after the cut.
    LateAfterReset "late-after-reset",
    /// The leader is killed after every rank has received the envelope.
    LeaderDies "leader-dies",
    /// The mesh leader is killed by SIGKILL when it begins the armed call.
    MeshLeaderDies "mesh-leader-dies",
    /// A rank is killed by SIGKILL when it begins the armed call.
    MemberDies "member-dies",
    /// The launching process is killed after the first chunk; its ranks must end too.
    OrphanedWorker "orphaned-worker",
    /// A rank's process is stopped by SIGSTOP when it begins the armed call.
    StoppedRank "stopped-rank",
    /// An engine call does not return and ignores its abort.
    StuckInLibrary "stuck-in-library",
    /// The run directory is removed, and an empty one takes its place.
    OutputFolderRemoved "output-folder-removed",
    /// A rank's device, or its engine thread on a CPU, spins without end inside a phase.
    StuckKernel "stuck-kernel",
    /// The frames and rows that a rank's VAE has kept are zeroed between two calls.
    HistoryCleared "history-cleared",
    /// All caches of a rank are emptied between two calls of a scene, and the runtime does not know it.
    CachesLost "caches-lost",
    /// The rows above and below a rank's shard of the picture arrive swapped.
    SwappedHalo "swapped-halo",
    /// One bit of an input is flipped.
    PerturbedInput "perturbed-input",
    /// One element of a weight is changed in memory.
    MutatedWeight "mutated-weight",
    /// One bit of a weight flips in memory, at a drawn place.
    FlippedWeight "flipped-weight",
    /// One bit of a cache flips in memory, at a drawn place.
    FlippedCache "flipped-cache",
    /// A rank loads the shards of another rank.
    WrongShard "wrong-shard",
    /// One bit of an output is flipped.
    PerturbedOutput "perturbed-output",
    /// A rank chooses another id after a row than the other ranks.
    SampledToken "sampled-token",
    /// A rank loads another router of experts than the other ranks.
    OtherGate "other-gate",
    /// A rank loads the matrices of two experts in each other's place.
    SwappedExperts "swapped-experts",
    /// A rank routes the rows of one layer by the scores of another.
    EditedRouting "edited-routing",
    /// A rank draws the number of experts of a token with another seed.
    OtherSeed "other-seed",
    /// The page table in an envelope gives a sequence other pages.
    OtherPages "other-pages",
    /// An element of a weight is NaN when a rank loads it.
    NanWeight "nan-weight",
    /// The layers of a rank compute NaN in one call, because its timesteps and sigmas are NaN.
    NanLatent "nan-latent",
    /// One rank alone adds a LoRA to its weights when it loads them.
    LoraOnOne "lora-on-one",
    /// A rank loads a model folder whose tokenizer is another file.
    OtherTokenizer "other-tokenizer",
    /// A rank loads weights outside of a RELOAD.
    PrivateReload "private-reload",
    /// A rank does not load one of the programs.
    ProgramSet "program-set",
    /// One rank alone captures a program into another graph than the plan's.
    CapturedOnOne "captured-on-one",
    /// From the armed call on, a rank captures its programs into a graph that the plan does not declare.
    UndeclaredCapture "undeclared-capture",
    /// The backend of a rank chooses other implementations of the same ops.
    EffectiveBackend "effective-backend",
    /// The normalisations of one rank add another epsilon.
    OtherKernel "other-kernel",
    /// A rank skips one program of the warm-up.
    SkippedWarmUp "skipped-warm-up",
    /// A rank runs a program for the first time after the warm-up.
    NewProgram "new-program",
    /// An envelope is received twice.
    RepeatedCall "repeated-call",
    /// A rank never receives the envelope of the armed call.
    LostCall "lost-call",
    /// A rank receives the commit of the armed call twice.
    SecondCommit "second-commit",
}

impl DrillFault {
    /// The faults that only a campaign of drawn faults arms, and no drill: each run flips a bit at
    /// another place.
    pub const DRAWN: &[DrillFault] = &[DrillFault::FlippedWeight, DrillFault::FlippedCache];
}

impl FromStr for DrillFault {
    type Err = String;

    fn from_str(text: &str) -> Result<DrillFault, String> {
        DrillFault::ALL
            .iter()
            .copied()
            .find(|f| f.name() == text)
            .ok_or_else(|| format!("unknown fault `{text}`"))
    }
}

/// A fault with the rank and the call in which it fires; as text `wrong-group@1:3`. Faults that act
/// before the first call ignore the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct ArmedFault {
    /// The fault to inject; in the text form, [`DrillFault::name`] before the `@`.
    pub fault: DrillFault,
    /// The rank on which the fault fires.
    pub rank: u32,
    /// Id of the call: 1 is the warm-up, 2 is the first chunk.
    pub call: u64,
}

impl ArmedFault {
    /// Whether this rank has this fault armed.
    #[must_use]
    pub fn is_armed_for(&self, fault: DrillFault, rank: u32) -> bool {
        self.fault == fault && self.rank == rank
    }
}

impl fmt::Display for ArmedFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}", self.fault.name(), self.rank, self.call)
    }
}

impl FromStr for ArmedFault {
    type Err = String;

    fn from_str(text: &str) -> Result<ArmedFault, String> {
        let parts = text.split_once('@').and_then(|(fault, at)| Some((fault, at.split_once(':')?)));
        let (fault, (rank, call)) =
            parts.ok_or_else(|| format!("`{text}` is not of the form fault@rank:call"))?;
        let number = |what: &str, digits: &str| -> Result<u64, String> {
            let plain = digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|_| plain).ok_or_else(|| format!("`{digits}` is not a {what}"))
        };
        let rank = number("rank", rank)?;
        Ok(ArmedFault {
            fault: fault.parse()?,
            rank: u32::try_from(rank).map_err(|_| format!("`{rank}` is not a rank"))?,
            call: number("call", call)?,
        })
    }
}

impl TryFrom<String> for ArmedFault {
    type Error = String;

    fn try_from(text: String) -> Result<ArmedFault, String> {
        text.parse()
    }
}

impl From<ArmedFault> for String {
    fn from(armed: ArmedFault) -> String {
        armed.to_string()
    }
}

/// Returns the text with which every rank announces a drill: the fault and the time limits of the
/// run.
#[must_use]
pub fn announcement_text(armed: &ArmedFault, limits: &Limits) -> String {
    let ms = |ns: u64| ns / 1_000_000;
    format!(
        "{armed}, d_out {}, heartbeat {} ms, stale {} ms, floor {} ms",
        limits.d_out,
        ms(limits.heartbeat_ns),
        ms(limits.stale_ns),
        ms(limits.done_floor_ns)
    )
}

/// Injects faults into the messages that enter or leave the armed rank's process.
#[derive(Debug)]
pub struct MessageFaultInjector {
    armed: ArmedFault,
    fired: bool,
    /// A message that is sent once more later.
    delayed: Option<Message>,
}

impl MessageFaultInjector {
    /// Creates an injector for one process, or `None` if the fault belongs to another rank or does
    /// not act on messages.
    #[must_use]
    pub fn new(armed: ArmedFault, rank: u32) -> Option<MessageFaultInjector> {
        use DrillFault::*;
        let acts_on_messages = matches!(
            armed.fault,
            LateAfterReset
                | LostCall
                | OtherPages
                | OtherPlan
                | OtherVersion
                | PerturbedInput
                | RecomputeWithoutContext
                | RelayRefuses
                | RepeatedCall
                | SecondCommit
                | StaleResult
                | StartSkew
                | UnlistedTensor
        );
        (acts_on_messages && armed.rank == rank).then_some(MessageFaultInjector {
            armed,
            fired: false,
            delayed: None,
        })
    }

    /// Whether the fault has acted on a message; afterwards all messages pass unchanged.
    #[must_use]
    pub fn has_fired(&self) -> bool {
        self.fired
    }

    /// Returns the messages that replace `message`: the same message, a changed one, none, or two.
    ///
    /// # Errors
    /// The error that a reader of the broken frame would find.
    pub fn inject_message(
        &mut self,
        way: MessageDirection,
        message: Message,
    ) -> Result<Vec<Message>, Diagnostic> {
        if self.fired {
            return Ok(vec![message]);
        }
        let armed = self.armed;
        let at = |id: u64| id == armed.call;
        let mut out = match (way, message) {
            (MessageDirection::Inbound, Message::Envelope(mut e)) if at(e.header.call_id) => {
                self.fired = true;
                match armed.fault {
                    DrillFault::OtherVersion => e.header.version = e.header.version.wrapping_add(1),
                    DrillFault::OtherPlan | DrillFault::RelayRefuses => {
                        e.header.plan = Digest::hash_bytes(b"another plan")
                    }
                    DrillFault::StartSkew => {
                        let work = e.meta.as_mut().and_then(CallMeta::chunk_work_mut);
                        work.into_iter().for_each(|w| w.start_frame = w.start_frame.wrapping_add(1));
                    }
                    DrillFault::OtherPages => swap_pages(&mut e),
                    DrillFault::PerturbedInput => flip_bit(&mut e),
                    DrillFault::UnlistedTensor => return decode_with_unlisted_bytes(&e),
                    DrillFault::LostCall => return Ok(Vec::new()),
                    DrillFault::RepeatedCall => {
                        let message = Message::Envelope(e);
                        return Ok(vec![message.clone(), message]);
                    }
                    _ => self.fired = false,
                }
                vec![Message::Envelope(e)]
            }
            (MessageDirection::Inbound, Message::Context(mut c))
                if armed.fault == DrillFault::RecomputeWithoutContext && at(c.call_id) =>
            {
                self.fired = true;
                c.tensors = Tensors::default();
                vec![Message::Context(c)]
            }
            (MessageDirection::Inbound, Message::Commit(c))
                if armed.fault == DrillFault::SecondCommit && at(c.call_id) =>
            {
                self.fired = true;
                vec![Message::Commit(c.clone()), Message::Commit(c)]
            }
            (MessageDirection::Outbound, Message::Done(mut d))
                if armed.fault == DrillFault::StaleResult && at(d.call_id) =>
            {
                self.fired = true;
                d.cache_epoch = d.cache_epoch.wrapping_sub(1);
                vec![Message::Done(d)]
            }
            (_, message) => vec![message],
        };
        if armed.fault == DrillFault::LateAfterReset && way == MessageDirection::Outbound {
            match &out[..] {
                [Message::Done(d)] if at(d.call_id) => self.delayed = Some(Message::Done(d.clone())),
                // This message answers a call after the one whose result was delayed, so it belongs
                // to the next epoch.
                [Message::Done(d)] if d.call_id > armed.call => {
                    self.fired = self.delayed.is_some();
                    let late = self.delayed.take();
                    out.splice(0..0, late);
                }
                _ => {}
            }
        }
        Ok(out)
    }
}

/// Flips the lowest bit of the first tensor's first byte, or of the seed if the call carries no
/// tensor.
fn flip_bit(e: &mut Envelope) {
    let changed = e.tensors.0.first().and_then(|t| {
        let mut data = t.data().to_vec();
        *data.first_mut()? ^= 1;
        Tensor::new(t.name(), t.manifest_entry().dtype, &t.manifest_entry().shape, data).ok()
    });
    match changed {
        Some(tensor) => e.tensors.0[0] = tensor,
        // A chunk's call without a tensor has a seed, and a call of tokens has its ids as a tensor.
        None => e.meta.as_mut().and_then(CallMeta::chunk_work_mut).into_iter().for_each(|w| w.seed ^= 1),
    }
}

/// Exchanges the first two pages in the page table of a call of tokens.
fn swap_pages(e: &mut Envelope) {
    for (name, arg) in e.meta.iter_mut().flat_map(|m| &mut m.phases).flat_map(|p| &mut p.args) {
        if let ScalarArg::F32s(pages) = arg
            && name == PAGES
            && pages.len() > 1
        {
            pages.swap(0, 1);
        }
    }
}

/// Returns the result of decoding a frame that carries more tensor bytes than its manifest lists.
fn decode_with_unlisted_bytes(e: &Envelope) -> Result<Vec<Message>, Diagnostic> {
    let bytes = wire::encode(0, &Message::Envelope(Box::new(e.clone())))?;
    let (_, message) = wire::decode(&wire::with_unlisted_bytes(bytes, &[0; 4]))?;
    Ok(vec![message])
}

/// Changes a committed call just before the armed rank runs it. Returns whether it changed the
/// call.
pub fn inject_call_fault(armed: &ArmedFault, call: &mut crate::engine::ReadyCall) -> bool {
    use crate::program_index::PhaseKind;
    let Some(meta) = call.meta.as_mut().filter(|_| call.action == CallAction::Infer) else { return false };
    if call.call_id != armed.call {
        return false;
    }
    let is_generator =
        |p: &crate::wire::PhaseCall| PhaseKind::from_program(&p.program).is_some_and(PhaseKind::is_generator);
    let Some(last_forward) = meta.phases.iter().rposition(is_generator) else { return false };
    match armed.fault {
        DrillFault::ExtraForward => {
            let again = meta.phases[last_forward].clone();
            meta.phases.insert(last_forward + 1, again);
        }
        // The phases after that forward would issue collectives on peers that are still inside it.
        DrillFault::MissingForward => meta.phases.truncate(last_forward),
        DrillFault::ResetOnOne => meta.chunk_work_mut().into_iter().for_each(|w| w.reset_kv = true),
        // Weights and inputs stay intact, so that only the check of the latents finds the fault.
        DrillFault::NanLatent => {
            let nan = F32Bits::new(f32::NAN);
            for (_, arg) in meta.phases.iter_mut().flat_map(|p| &mut p.args) {
                match arg {
                    ScalarArg::I64(_) => {}
                    ScalarArg::F32(value) => *value = nan,
                    ScalarArg::F32s(values) => values.fill(nan),
                }
            }
        }
        _ => return false,
    }
    true
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire::{CallObservation, Commit, Done};

    fn armed(text: &str) -> ArmedFault {
        text.parse().unwrap()
    }

    fn done(call_id: u64, cache_epoch: u32) -> Message {
        let (observed, output) = (CallObservation::default(), Tensors::default());
        Message::Done(Box::new(Done { call_id, cache_epoch, observed, fingerprints: Vec::new(), output }))
    }

    #[test]
    fn an_armed_fault_round_trips_as_text() {
        for fault in DrillFault::ALL {
            let armed = ArmedFault { fault: *fault, rank: 3, call: 17 };
            assert_eq!(armed.to_string().parse(), Ok(armed));
        }
        assert_eq!(armed("wrong-group@1:3"), ArmedFault { fault: DrillFault::WrongGroup, rank: 1, call: 3 });
        for (text, says) in [
            ("wrong-group", "form"),
            ("wrong-group@1", "form"),
            ("wrong-grop@1:3", "unknown fault"),
            ("wrong-group@-1:3", "not a rank"),
            ("wrong-group@1:+3", "not a call"),
            ("wrong-group@99999999999:3", "not a rank"),
        ] {
            let why = text.parse::<ArmedFault>().unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
    }

    #[test]
    fn only_the_armed_rank_and_call_are_touched_and_once() {
        assert!(MessageFaultInjector::new(armed("second-commit@1:3"), 0).is_none());
        assert!(MessageFaultInjector::new(armed("wrong-group@1:3"), 1).is_none(), "not a message fault");
        let mut injector = MessageFaultInjector::new(armed("second-commit@1:3"), 1).unwrap();
        let mut commits = |id| {
            injector
                .inject_message(MessageDirection::Inbound, Message::Commit(Commit { call_id: id }))
                .unwrap()
                .len()
        };
        assert_eq!([commits(2), commits(3), commits(3), commits(4)], [1, 2, 1, 1]);
    }

    #[test]
    fn a_delayed_result_is_sent_before_the_result_of_the_next_call() {
        let mut injector = MessageFaultInjector::new(armed("late-after-reset@1:3"), 1).unwrap();
        let mut sent =
            |message: &Message| injector.inject_message(MessageDirection::Outbound, message.clone()).unwrap();
        let (old, new) = (done(3, 0), done(4, 1));
        assert_eq!(sent(&old), std::slice::from_ref(&old));
        assert_eq!(sent(&new), [old, new.clone()]);
        assert_eq!(sent(&new), [new], "once");
    }
}
