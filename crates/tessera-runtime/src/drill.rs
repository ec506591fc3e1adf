//! Faults that are armed on purpose, and what each does to messages: the part of a drill that needs no process.
//!
//! An armed fault is one line of text that every rank announces at the hello, so that nobody runs with a fault that the
//! others do not know of. Nothing here asks the time, the system or another rank.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;

use crate::driver::Way;
use crate::wire::{self, CallAction, Envelope, Message, Tensor, Tensors};
use crate::{Digest, Limits};

macro_rules! faults {
    ($($(#[$doc:meta])* $name:ident $text:literal,)*) => {
        /// Something that is broken on purpose.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
        pub enum Fault {
            $($(#[$doc])* $name,)*
        }

        impl Fault {
            /// Every fault.
            pub const ALL: &[Fault] = &[$(Fault::$name,)*];

            /// Its name on a command line.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Fault::$name => $text,)*
                }
            }
        }
    };
}

faults! {
    /// The meta of a call is larger than a frame may carry.
    UnserialisableMeta "unserialisable-meta",
    /// The text comes in a dtype that no program reads.
    UnsupportedDtype "unsupported-dtype",
    /// The text does not come.
    MissingTensor "missing-tensor",
    /// An envelope of another version.
    OtherVersion "other-version",
    /// An envelope of another plan.
    OtherPlan "other-plan",
    /// A frame with bytes that its manifest does not list.
    UnlistedTensor "unlisted-tensor",
    /// Another plan from the start.
    OtherPlanAtInit "other-plan-at-init",
    /// A fault that one rank alone has armed.
    ArmedAlone "armed-alone",
    /// A peer without the secret of the run.
    WrongSecret "wrong-secret",
    /// One generator pass more than the envelope has.
    OneCallMore "one-call-more",
    /// One generator pass less than the envelope has.
    OneCallLess "one-call-less",
    /// A collective behind a flag that one rank has.
    ConditionalCollective "conditional-collective",
    /// A broadcast that is in no plan.
    AdHocBroadcast "ad-hoc-broadcast",
    /// A collective over another group.
    WrongGroup "wrong-group",
    /// A collective of another shape.
    WrongShape "wrong-shape",
    /// Groups made in another order.
    GroupOrder "group-order",
    /// An envelope that is damaged before the mesh leader sees it.
    RelayRefuses "relay-refuses",
    /// A queue of finished chunks without a bound.
    UnboundedOutput "unbounded-output",
    /// A result that names an epoch that is over.
    StaleResult "stale-result",
    /// Caches that are emptied in the middle of a scene.
    ResetOnOne "reset-on-one",
    /// Another first frame.
    StartSkew "start-skew",
    /// A context message without the context.
    RecomputeWithoutContext "recompute-without-context",
    /// The result of a call before a cut, once more after it.
    LateAfterReset "late-after-reset",
    /// The leader is killed after every rank has the envelope.
    LeaderDies "leader-dies",
    /// The mesh leader is killed.
    MeshLeaderDies "mesh-leader-dies",
    /// A rank is killed.
    MemberDies "member-dies",
    /// The launcher is killed.
    OrphanedWorker "orphaned-worker",
    /// A rank's process is stopped.
    StoppedRank "stopped-rank",
    /// An engine that does not come back and ignores its abort.
    StuckInLibrary "stuck-in-library",
    /// A kernel that never ends.
    StuckKernel "stuck-kernel",
    /// One bit of an input.
    PerturbedInput "perturbed-input",
    /// One element of a weight, in memory.
    MutatedWeight "mutated-weight",
    /// The shards of another rank.
    WrongShard "wrong-shard",
    /// One bit of an output.
    OtherOutput "other-output",
    /// Weights that are loaded outside of a RELOAD.
    PrivateReload "private-reload",
    /// A program less than the others hold.
    ProgramSet "program-set",
    /// A region that is captured here alone.
    CapturedOnOne "captured-on-one",
    /// A backend that `auto` resolved to otherwise.
    EffectiveBackend "effective-backend",
    /// A program that was not warmed up.
    SkippedWarmUp "skipped-warm-up",
    /// A program that is run first after the warm-up.
    NewProgram "new-program",
    /// An envelope twice.
    RepeatedCall "repeated-call",
    /// An envelope that never comes.
    LostCall "lost-call",
    /// A commit twice.
    SecondCommit "second-commit",
}

impl FromStr for Fault {
    type Err = String;

    fn from_str(text: &str) -> Result<Fault, String> {
        Fault::ALL
            .iter()
            .copied()
            .find(|f| f.name() == text)
            .ok_or_else(|| format!("there is no fault `{text}`"))
    }
}

/// A fault, the rank that has it and the call in which it strikes; as text `wrong-group@1:3`. Faults of the time before
/// the first call ignore the call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Armed {
    /// What breaks.
    pub fault: Fault,
    /// Where.
    pub rank: u32,
    /// Id of the call: 1 is the warm-up, the first chunk has 2.
    pub call: u64,
}

impl Armed {
    /// Whether this rank has this fault.
    #[must_use]
    pub fn is(&self, fault: Fault, rank: u32) -> bool {
        self.fault == fault && self.rank == rank
    }
}

impl fmt::Display for Armed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}@{}:{}", self.fault.name(), self.rank, self.call)
    }
}

impl FromStr for Armed {
    type Err = String;

    fn from_str(text: &str) -> Result<Armed, String> {
        let parts = text.split_once('@').and_then(|(fault, at)| Some((fault, at.split_once(':')?)));
        let (fault, (rank, call)) =
            parts.ok_or_else(|| format!("`{text}` is not of the form fault@rank:call"))?;
        let number = |what: &str, digits: &str| -> Result<u64, String> {
            let plain = digits.bytes().all(|b| b.is_ascii_digit());
            digits.parse().ok().filter(|_| plain).ok_or_else(|| format!("`{digits}` is not a {what}"))
        };
        let rank = number("rank", rank)?;
        Ok(Armed {
            fault: fault.parse()?,
            rank: u32::try_from(rank).map_err(|_| format!("`{rank}` is not a rank"))?,
            call: number("call", call)?,
        })
    }
}

impl TryFrom<String> for Armed {
    type Error = String;

    fn try_from(text: String) -> Result<Armed, String> {
        text.parse()
    }
}

impl From<Armed> for String {
    fn from(armed: Armed) -> String {
        armed.to_string()
    }
}

/// What every rank announces of a drill: the fault, and the waits that it runs under.
#[must_use]
pub fn announced(armed: &Armed, limits: &Limits) -> String {
    let ms = |ns: u64| ns / 1_000_000;
    format!(
        "{armed}, d_out {}, heartbeat {} ms, stale {} ms, floor {} ms",
        limits.d_out,
        ms(limits.heartbeat_ns),
        ms(limits.stale_ns),
        ms(limits.done_floor_ns)
    )
}

/// Breaks the messages of the armed rank. It stands where a message enters or leaves that rank's process.
#[derive(Debug)]
pub struct Meddler {
    armed: Armed,
    struck: bool,
    /// A message that is sent once more later.
    kept: Option<Message>,
}

impl Meddler {
    /// For one process; none where the fault is not of this rank, or not one of messages.
    #[must_use]
    pub fn new(armed: Armed, rank: u32) -> Option<Meddler> {
        use Fault::{
            LateAfterReset, LostCall, OtherPlan, OtherVersion, PerturbedInput, RecomputeWithoutContext,
            RelayRefuses, RepeatedCall, SecondCommit, StaleResult, StartSkew, UnlistedTensor,
        };
        let meddles = matches!(
            armed.fault,
            LateAfterReset
                | LostCall
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
        (meddles && armed.rank == rank).then_some(Meddler { armed, struck: false, kept: None })
    }

    /// Whether anything was broken so far.
    #[must_use]
    pub fn struck(&self) -> bool {
        self.struck
    }

    /// What goes on instead of a message: another one, none, or two.
    ///
    /// # Errors
    /// What a reader of the broken frame would find.
    pub fn pass(&mut self, way: Way, message: Message) -> Result<Vec<Message>, Diagnostic> {
        if self.struck {
            return Ok(vec![message]);
        }
        let armed = self.armed;
        let at = |id: u64| id == armed.call;
        let mut out = match (way, message) {
            (Way::In, Message::Envelope(mut e)) if at(e.header.call_id) => {
                self.struck = true;
                match armed.fault {
                    Fault::OtherVersion => e.header.version = e.header.version.wrapping_add(1),
                    Fault::OtherPlan | Fault::RelayRefuses => e.header.plan = Digest::of(b"another plan"),
                    Fault::StartSkew => {
                        e.meta.iter_mut().for_each(|m| m.start_frame = m.start_frame.wrapping_add(1));
                    }
                    Fault::PerturbedInput => flip_bit(&mut e),
                    Fault::UnlistedTensor => return read_unlisted(&e),
                    Fault::LostCall => return Ok(Vec::new()),
                    Fault::RepeatedCall => {
                        let message = Message::Envelope(e);
                        return Ok(vec![message.clone(), message]);
                    }
                    _ => self.struck = false,
                }
                vec![Message::Envelope(e)]
            }
            (Way::In, Message::Context(mut c))
                if armed.fault == Fault::RecomputeWithoutContext && at(c.call_id) =>
            {
                self.struck = true;
                c.tensors = Tensors::default();
                vec![Message::Context(c)]
            }
            (Way::In, Message::Commit(c)) if armed.fault == Fault::SecondCommit && at(c.call_id) => {
                self.struck = true;
                vec![Message::Commit(c.clone()), Message::Commit(c)]
            }
            (Way::Out, Message::Done(mut d)) if armed.fault == Fault::StaleResult && at(d.call_id) => {
                self.struck = true;
                d.cache_epoch = d.cache_epoch.wrapping_sub(1);
                vec![Message::Done(d)]
            }
            (_, message) => vec![message],
        };
        if armed.fault == Fault::LateAfterReset && way == Way::Out {
            match &out[..] {
                [Message::Done(d)] if at(d.call_id) => self.kept = Some(Message::Done(d.clone())),
                // The answer to the call behind the one whose result is kept: it is of the next epoch.
                [Message::Done(d)] if d.call_id > armed.call => {
                    self.struck = self.kept.is_some();
                    let late = self.kept.take();
                    out.splice(0..0, late);
                }
                _ => {}
            }
        }
        Ok(out)
    }
}

/// Flips the lowest bit of the first tensor's first byte; of the seed where the call brings no tensor.
fn flip_bit(e: &mut Envelope) {
    let changed = e.tensors.0.first().and_then(|t| {
        let mut data = t.data().to_vec();
        *data.first_mut()? ^= 1;
        Tensor::new(t.name(), t.spec().dtype, &t.spec().shape, data).ok()
    });
    match changed {
        Some(tensor) => e.tensors.0[0] = tensor,
        // A call without a tensor has a seed.
        None => e.meta.iter_mut().for_each(|m| m.seed ^= 1),
    }
}

/// What is found in a frame that carries more tensor bytes than its manifest lists.
fn read_unlisted(e: &Envelope) -> Result<Vec<Message>, Diagnostic> {
    let bytes = wire::encode(0, &Message::Envelope(Box::new(e.clone())))?;
    let (_, message) = wire::decode(&wire::with_unlisted_bytes(bytes, &[0; 4]))?;
    Ok(vec![message])
}

/// Changes a committed call as the armed rank is about to run it.
pub fn meddle_call(armed: &Armed, call: &mut crate::engine::ReadyCall) -> bool {
    use crate::census::PhaseKind;
    let Some(meta) = call.meta.as_mut().filter(|_| call.action == CallAction::Infer) else { return false };
    if call.call_id != armed.call {
        return false;
    }
    let generator =
        |p: &crate::wire::PhaseCall| PhaseKind::of(&p.program).is_some_and(PhaseKind::is_generator);
    let Some(last) = meta.phases.iter().rposition(generator) else { return false };
    match armed.fault {
        Fault::OneCallMore => {
            let again = meta.phases[last].clone();
            meta.phases.insert(last + 1, again);
        }
        // What follows it would be issued to peers that are still in it.
        Fault::OneCallLess => meta.phases.truncate(last),
        Fault::ResetOnOne => meta.reset_kv = true,
        _ => return false,
    }
    true
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::wire::{Commit, Done, Observed};

    fn armed(text: &str) -> Armed {
        text.parse().unwrap()
    }

    fn done(call_id: u64, cache_epoch: u32) -> Message {
        let (observed, output) = (Observed::default(), Tensors::default());
        Message::Done(Box::new(Done { call_id, cache_epoch, observed, fingerprints: Vec::new(), output }))
    }

    #[test]
    fn an_armed_fault_is_one_word_and_back() {
        for fault in Fault::ALL {
            let armed = Armed { fault: *fault, rank: 3, call: 17 };
            assert_eq!(armed.to_string().parse(), Ok(armed));
        }
        assert_eq!(armed("wrong-group@1:3"), Armed { fault: Fault::WrongGroup, rank: 1, call: 3 });
        for (text, says) in [
            ("wrong-group", "form"),
            ("wrong-group@1", "form"),
            ("wrong-grop@1:3", "no fault"),
            ("wrong-group@-1:3", "not a rank"),
            ("wrong-group@1:+3", "not a call"),
            ("wrong-group@99999999999:3", "not a rank"),
        ] {
            let why = text.parse::<Armed>().unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
    }

    #[test]
    fn only_the_armed_rank_and_call_are_touched_and_once() {
        assert!(Meddler::new(armed("second-commit@1:3"), 0).is_none());
        assert!(Meddler::new(armed("wrong-group@1:3"), 1).is_none(), "not a fault of messages");
        let mut meddler = Meddler::new(armed("second-commit@1:3"), 1).unwrap();
        let mut commits = |id| meddler.pass(Way::In, Message::Commit(Commit { call_id: id })).unwrap().len();
        assert_eq!([commits(2), commits(3), commits(3), commits(4)], [1, 2, 1, 1]);
    }

    #[test]
    fn a_late_result_comes_before_that_of_the_next_call() {
        let mut meddler = Meddler::new(armed("late-after-reset@1:3"), 1).unwrap();
        let mut sent = |message: &Message| meddler.pass(Way::Out, message.clone()).unwrap();
        let (old, new) = (done(3, 0), done(4, 1));
        assert_eq!(sent(&old), std::slice::from_ref(&old));
        assert_eq!(sent(&new), [old, new.clone()]);
        assert_eq!(sent(&new), [new], "once");
    }
}
