//! Changes of a stream that runs: the handle of the launching process, the leader's end, and the socket between them.
//!
//! A change is a request. The leader takes what has arrived when it requests the next chunk, and answers with the number of
//! that chunk. It waits for the socket only if the launching process limits the number of chunks, and a socket that closes
//! leaves the stream as it is.

use std::collections::VecDeque;
use std::io::{ErrorKind, Read, Write};
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::director::SceneCut;
use tessera_runtime::driver::StopHandle;
use tessera_runtime::wire::{
    ChangeEffect, ChangedSetting, F32Bits, HEADER_BYTES, LAUNCHER, Message, Reload, RequestLimit,
    StreamChange, decode_body, decode_header, encode,
};

use crate::admitted_settings::AdmittedSettings;
use crate::codes::{T0017, T0093};
use crate::files::write_error;
use crate::model::Model;
use crate::plan::Plan;
use crate::rank_config::first_diagnostic;
use crate::shards::preflight_reload;
use crate::text_encoder::PromptEncoder;
use crate::weights_origin::WeightChange;

/// Most bytes of a prompt that a running stream takes.
pub const MAX_LIVE_PROMPT_BYTES: usize = 4096;
/// Most changes that may wait for the next requested chunk. Together they fit the buffer of a socket.
pub const MAX_PENDING_CHANGES: usize = 16;
/// Number of changes, the latest ones, whose chunks a handle remembers.
const KNOWN_EFFECTS: usize = 1024;
/// Most bytes of a message on the socket.
const MAX_MESSAGE_BYTES: usize = HEADER_BYTES + MAX_LIVE_PROMPT_BYTES + 128;
/// Longest wait for room in the buffer of the socket.
const SEND_PATIENCE: Duration = Duration::from_secs(2);

/// A handle that changes a stream while it runs. Its clones change the same stream.
///
/// A change holds from the next chunk that the leader requests. A few requested chunks may be under way, so the effect
/// appears that much later.
#[derive(Clone, Debug)]
pub struct StreamControl {
    sender: Arc<Mutex<ChangeSender>>,
    encoder: Arc<PromptEncoder>,
    /// The plan and the model with which the stream began.
    stream: Arc<(Arc<Plan>, Model)>,
    admitted: Arc<AdmittedSettings>,
    stop: StopHandle,
}

/// The leader's end of the socket, for [`run_steered`](crate::stream::run_steered).
#[derive(Debug)]
pub struct ControlSocket(OwnedFd);

impl ControlSocket {
    pub(crate) fn into_fd(self) -> OwnedFd {
        self.0
    }
}

impl StreamControl {
    /// Creates a handle for a run of a plan that `stop` stops, and the end of the socket for the leader.
    ///
    /// # Errors
    /// What is wrong with the text encoder of the model, which checks prompts, or T0017.
    pub fn new(
        plan: &Arc<Plan>,
        model: &Model,
        stop: StopHandle,
    ) -> Result<(StreamControl, ControlSocket), Diagnostics> {
        let one = |d: Diagnostic| vec![d];
        let model = Model::open_for_plan(&model.dir, plan).map_err(one)?.with_weights(model.weights.clone());
        let encoder = Arc::new(model.open_text_encoder()?);
        let (here, there) = UnixStream::pair().map_err(|e| one(socket_error(&e)))?;
        let link = ControlLink::new(here, (LAUNCHER, 0)).map_err(one)?;
        let sender = ChangeSender { link, last: 0, pending: 0, effects: VecDeque::new() };
        let control = StreamControl {
            sender: Arc::new(Mutex::new(sender)),
            encoder,
            admitted: Arc::new(AdmittedSettings::from_plan(plan)),
            stream: Arc::new((Arc::clone(plan), model)),
            stop,
        };
        Ok((control, ControlSocket(there.into())))
    }

    /// Replaces the prompt. Returns the number of the change.
    ///
    /// # Errors
    /// T0093 if it is too long, too many changes wait or the stream requests no further chunk, or why the prompt
    /// cannot be encoded.
    pub fn set_prompt(&self, prompt: &str) -> Result<u64, Diagnostic> {
        if prompt.len() > MAX_LIVE_PROMPT_BYTES {
            return Err(Diagnostic::error(&T0093, "a prompt for a running stream is too long")
                .with_label("prompt", format!("{} bytes", prompt.len()))
                .with_label("limit", format!("{MAX_LIVE_PROMPT_BYTES} bytes"))
                .with_hint("shorten the prompt, or start a new stream with it"));
        }
        self.encoder.check_prompt(prompt)?;
        self.lock().send(ChangedSetting::Prompt(prompt.to_string()))
    }

    /// Replaces the seed. Returns the number of the change.
    ///
    /// # Errors
    /// T0093 if too many changes wait or the stream requests no further chunk.
    pub fn set_seed(&self, seed: u64) -> Result<u64, Diagnostic> {
        self.lock().send(ChangedSetting::Seed(seed))
    }

    /// Replaces the list of denoise steps by one that the plan admits. Returns the number of the change.
    ///
    /// # Errors
    /// T0054 if the plan has no list of this name, otherwise as [`StreamControl::set_seed`].
    pub fn set_step_list(&self, name: &str) -> Result<u64, Diagnostic> {
        let at = self.admitted.find_step_list(name)?;
        self.lock().send(ChangedSetting::StepList(at))
    }

    /// Replaces the attention bias on context keys. Returns the number of the change.
    ///
    /// # Errors
    /// T0054 if no program of the plan reads it or if it is not above 0 and at most 1, otherwise as
    /// [`StreamControl::set_seed`].
    pub fn set_bias(&self, bias: f32) -> Result<u64, Diagnostic> {
        self.admitted.check_bias(bias)?;
        self.lock().send(ChangedSetting::Bias(F32Bits::new(bias)))
    }

    /// Replaces the weights, which every rank loads before the next requested chunk; it opens a scene. This process reads
    /// them first, because every rank compares what it has loaded with this digest. Returns the number of the change.
    ///
    /// # Errors
    /// T0018 for files of weights where the stream began with synthetic ones, what is wrong with the files, or as
    /// [`StreamControl::set_seed`].
    pub fn set_weights(&self, change: &WeightChange) -> Result<u64, Diagnostic> {
        let (plan, model) = &*self.stream;
        change.check_base(model.weights.base)?;
        let weights = preflight_reload(plan, model, change).map_err(first_diagnostic)?;
        let source = change.to_absolute().map_err(|e| write_error(&model.dir, &e))?.to_string();
        if source.len() > MAX_LIVE_PROMPT_BYTES {
            return Err(Diagnostic::error(
                &T0093,
                "the names of the weights are too long for a running stream",
            )
            .with_label("names", format!("{} bytes", source.len()))
            .with_label("limit", format!("{MAX_LIVE_PROMPT_BYTES} bytes"))
            .with_hint("move the files to a shorter path"));
        }
        self.lock().send(ChangedSetting::Weights(Reload { source, weights }))
    }

    /// Cuts the scene. Returns the number of the change.
    ///
    /// # Errors
    /// As [`StreamControl::set_seed`].
    pub fn cut(&self) -> Result<u64, Diagnostic> {
        self.lock().send(ChangedSetting::Cut)
    }

    /// Cuts the scene at once: chunks that are requested and not delivered yet are discarded. Returns the number of the
    /// change.
    ///
    /// # Errors
    /// As [`StreamControl::set_seed`].
    pub fn flush(&self) -> Result<u64, Diagnostic> {
        self.lock().send(ChangedSetting::Flush)
    }

    /// Lets the leader request so many chunks since the start of the run, and no more until a later limit. A stream is
    /// paced and paused in this way: chunks that are requested are generated.
    ///
    /// # Errors
    /// T0093 if the stream requests no further chunk.
    pub fn limit_requests(&self, chunks: u32) -> Result<(), Diagnostic> {
        self.lock().link.send(&Message::RequestLimit(RequestLimit { chunks }))
    }

    /// Returns the first chunk with a change, once the leader has taken it. Chunks count from 0 in the order of their
    /// requests, as in the options of a stream.
    #[must_use]
    pub fn chunk_of(&self, change: u64) -> Option<u32> {
        let mut sender = self.lock();
        sender.take_effects();
        sender.effects.iter().find(|effect| effect.number == change).map(|effect| effect.chunk)
    }

    /// Ends the stream after the chunks that are under way; a second request ends it at once.
    pub fn stop(&self) {
        self.stop.request_stop();
    }

    fn lock(&self) -> MutexGuard<'_, ChangeSender> {
        self.sender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The launching process's end of the socket.
#[derive(Debug)]
struct ChangeSender {
    link: ControlLink,
    last: u64,
    /// Number of changes that the leader has not answered.
    pending: usize,
    /// The latest answers, oldest first.
    effects: VecDeque<ChangeEffect>,
}

impl ChangeSender {
    fn send(&mut self, setting: ChangedSetting) -> Result<u64, Diagnostic> {
        self.take_effects();
        if self.pending >= MAX_PENDING_CHANGES {
            return Err(Diagnostic::error(&T0093, "too many changes wait for the next chunk of the stream")
                .with_label("waiting", self.pending.to_string())
                .with_label("limit", MAX_PENDING_CHANGES.to_string())
                .with_hint("send a change when an earlier one has taken effect"));
        }
        let number = self.last + 1;
        self.link.send(&Message::StreamChange(StreamChange { number, setting }))?;
        self.last = number;
        self.pending += 1;
        Ok(number)
    }

    /// Takes the answers that have arrived. An answer that cannot be read is the leader's mistake, and leaves its change
    /// pending.
    fn take_effects(&mut self) {
        while let Ok(Some(Message::ChangeEffect(effect))) = self.link.receive() {
            self.pending = self.pending.saturating_sub(1);
            self.effects.push_back(effect);
            if self.effects.len() > KNOWN_EFFECTS {
                self.effects.pop_front();
            }
        }
    }
}

/// The leader's end of the socket. When it is dropped, the launching process can send no further change.
#[derive(Debug)]
pub(crate) struct ChangeIntake {
    link: ControlLink,
    /// Changes that have arrived and that no chunk has taken.
    arrived: VecDeque<StreamChange>,
    /// How many chunks may be requested since the start of the run; `None` without a limit.
    limit: Option<u32>,
}

/// The changes that take effect with one chunk: the last one of each kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct TakenChanges {
    pub(crate) prompt: Option<String>,
    pub(crate) seed: Option<u64>,
    pub(crate) cut: SceneCut,
    pub(crate) step_list: Option<u32>,
    pub(crate) bias: Option<F32Bits>,
    pub(crate) weights: Option<Reload>,
}

impl ChangeIntake {
    /// Wraps the descriptor that the launching process passed.
    ///
    /// # Errors
    /// T0017.
    pub(crate) fn from_fd(fd: OwnedFd) -> Result<ChangeIntake, Diagnostic> {
        let link = ControlLink::new(fd.into(), (0, LAUNCHER))?;
        Ok(ChangeIntake { link, arrived: VecDeque::new(), limit: None })
    }

    /// Waits until `chunk` may be requested. Without a limit it does not wait, and a socket that closes ends the limit.
    ///
    /// # Errors
    /// T0093 or T0701 to T0706 for bytes that are no change.
    pub(crate) fn wait_for_limit(&mut self, chunk: u32) -> Result<(), Diagnostic> {
        self.receive_all()?;
        while self.limit.is_some_and(|limit| chunk >= limit) && !self.link.is_closed {
            self.link.wait_for_bytes();
            self.receive_all()?;
        }
        Ok(())
    }

    /// Waits until `chunk` may be requested, takes the changes that have arrived, and answers that they take effect
    /// with it.
    ///
    /// # Errors
    /// As [`ChangeIntake::wait_for_limit`].
    pub(crate) fn take_changes(&mut self, chunk: u32) -> Result<TakenChanges, Diagnostic> {
        self.wait_for_limit(chunk)?;
        let mut taken = TakenChanges::default();
        for StreamChange { number, setting } in self.arrived.drain(..) {
            match setting {
                ChangedSetting::Prompt(prompt) => taken.prompt = Some(prompt),
                ChangedSetting::Seed(seed) => taken.seed = Some(seed),
                // A cut that follows a flush adds nothing to it.
                ChangedSetting::Cut if taken.cut == SceneCut::Flush => {}
                ChangedSetting::Cut => taken.cut = SceneCut::Ordered,
                ChangedSetting::Flush => taken.cut = SceneCut::Flush,
                ChangedSetting::StepList(at) => taken.step_list = Some(at),
                ChangedSetting::Bias(bias) => taken.bias = Some(bias),
                ChangedSetting::Weights(reload) => taken.weights = Some(reload),
            }
            // A launching process that has closed its end wants no answer.
            let _ = self.link.send(&Message::ChangeEffect(ChangeEffect { number, chunk }));
        }
        Ok(taken)
    }

    /// Receives every message that has arrived. A limit may stand behind as many changes as may wait.
    fn receive_all(&mut self) -> Result<(), Diagnostic> {
        while let Some(message) = self.link.receive()? {
            match message {
                Message::StreamChange(_) if self.arrived.len() >= MAX_PENDING_CHANGES => {
                    let what = format!("more than {MAX_PENDING_CHANGES} changes wait for a chunk");
                    return Err(Diagnostic::error(&T0093, what));
                }
                Message::StreamChange(change) => self.arrived.push_back(change),
                Message::RequestLimit(limit) => self.limit = Some(limit.chunks),
                message => {
                    let what = format!("a {:?} message arrived in place of a change", message.kind());
                    return Err(Diagnostic::error(&T0093, what));
                }
            }
        }
        Ok(())
    }
}

impl Drop for ChangeIntake {
    fn drop(&mut self) {
        // The launching process holds a second descriptor of this end, so closing this one would not end the socket.
        let _ = self.link.stream.shutdown(Shutdown::Both);
    }
}

/// One end of the socket, which neither end waits for.
#[derive(Debug)]
struct ControlLink {
    stream: UnixStream,
    /// Origin of the frames that this process sends, and of those that it receives.
    origins: (u32, u32),
    /// Bytes of frames that have not arrived whole.
    received: Vec<u8>,
    /// Whether the other end sends nothing more.
    is_closed: bool,
}

impl ControlLink {
    fn new(stream: UnixStream, origins: (u32, u32)) -> Result<ControlLink, Diagnostic> {
        stream.set_nonblocking(true).map_err(|e| socket_error(&e))?;
        Ok(ControlLink { stream, origins, received: Vec::new(), is_closed: false })
    }

    /// Sends a message.
    ///
    /// # Errors
    /// T0093 if the other end is closed or reads nothing.
    fn send(&mut self, message: &Message) -> Result<(), Diagnostic> {
        let frame = encode(self.origins.0, message)?;
        let (mut rest, begun) = (&frame[..], Instant::now());
        while !rest.is_empty() {
            match self.stream.write(rest) {
                Ok(written) => rest = &rest[written..],
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock && begun.elapsed() < SEND_PATIENCE => {
                    self.wait_for_room();
                }
                Err(e) => return Err(send_error(&e)),
            }
        }
        Ok(())
    }

    /// Waits until bytes have arrived or the other end is closed.
    fn wait_for_bytes(&self) {
        // The read that follows finds out what an error means; a signal ends the wait early.
        let _ = poll(&mut [PollFd::new(&self.stream, PollFlags::IN)], None);
    }

    /// Waits until the socket takes bytes, for a while.
    fn wait_for_room(&self) {
        let limit = Timespec { tv_sec: SEND_PATIENCE.as_secs() as i64, tv_nsec: 0 };
        // The write that follows finds out what an error means.
        let _ = poll(&mut [PollFd::new(&self.stream, PollFlags::OUT)], Some(&limit));
    }

    /// Returns the next message that has arrived; `None` if there is none, or if the other end is closed.
    fn receive(&mut self) -> Result<Option<Message>, Diagnostic> {
        loop {
            if let Some(message) = self.take_message()? {
                return Ok(Some(message));
            }
            let mut bytes = [0; MAX_MESSAGE_BYTES];
            match self.stream.read(&mut bytes) {
                Ok(0) => {
                    self.is_closed = true;
                    return Ok(None);
                }
                Ok(count) => self.received.extend_from_slice(&bytes[..count]),
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) if e.kind() == ErrorKind::WouldBlock => return Ok(None),
                // A socket that breaks is one that closes: nothing more arrives.
                Err(_) => {
                    self.is_closed = true;
                    return Ok(None);
                }
            }
        }
    }

    /// Takes a whole message from the bytes that have arrived.
    fn take_message(&mut self) -> Result<Option<Message>, Diagnostic> {
        let Some(head) = self.received.first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let header = decode_header(head)?;
        let bytes = HEADER_BYTES + header.body_bytes();
        if header.origin != self.origins.1 || bytes > MAX_MESSAGE_BYTES {
            let what = format!("a message of {} with {bytes} bytes on the socket of changes", header.origin);
            return Err(Diagnostic::error(&T0093, what)
                .with_label("expected", format!("{}, at most {MAX_MESSAGE_BYTES} bytes", self.origins.1)));
        }
        let Some(body) = self.received.get(HEADER_BYTES..bytes) else { return Ok(None) };
        let message = decode_body(&header, body)?;
        self.received.drain(..bytes);
        Ok(Some(message))
    }
}

fn socket_error(e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0017, format!("the socket for changes of the stream: {e}"))
}

fn send_error(e: &std::io::Error) -> Diagnostic {
    Diagnostic::error(&T0093, "the stream takes no further change")
        .with_label("the socket to the leader", e.to_string())
        .with_hint("its last chunk is requested, or the run has ended: start a new stream")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pair() -> (ChangeSender, ChangeIntake) {
        let (here, there) = UnixStream::pair().unwrap();
        let link = ControlLink::new(here, (LAUNCHER, 0)).unwrap();
        let sender = ChangeSender { link, last: 0, pending: 0, effects: VecDeque::new() };
        (sender, ChangeIntake::from_fd(there.into()).unwrap())
    }

    fn prompt(text: &str) -> ChangedSetting {
        ChangedSetting::Prompt(text.to_string())
    }

    #[test]
    fn the_last_change_of_each_kind_takes_effect_and_is_answered() {
        let (mut sender, mut leader) = pair();
        assert_eq!(leader.take_changes(0).unwrap(), TakenChanges::default());
        for setting in [prompt("a"), ChangedSetting::Seed(3), prompt("b"), ChangedSetting::Cut] {
            sender.send(setting).unwrap();
        }
        let values = [ChangedSetting::StepList(1), ChangedSetting::Bias(F32Bits::new(0.5))];
        for setting in values {
            sender.send(setting).unwrap();
        }
        let taken = TakenChanges {
            prompt: Some("b".into()),
            seed: Some(3),
            cut: SceneCut::Ordered,
            step_list: Some(1),
            bias: Some(F32Bits::new(0.5)),
            weights: None,
        };
        assert_eq!(leader.take_changes(5).unwrap(), taken);
        assert_eq!(leader.take_changes(6).unwrap(), TakenChanges::default());
        sender.take_effects();
        let effects: Vec<_> = sender.effects.iter().map(|e| (e.number, e.chunk)).collect();
        assert_eq!((sender.pending, effects), (0, (1..=6).map(|n| (n, 5)).collect()));
    }

    #[test]
    fn changes_beyond_the_limit_are_refused_until_some_are_taken() {
        let (mut sender, mut leader) = pair();
        let long = "w".repeat(MAX_LIVE_PROMPT_BYTES);
        for _ in 0..MAX_PENDING_CHANGES {
            sender.send(prompt(&long)).unwrap();
        }
        assert_eq!(sender.send(ChangedSetting::Cut).unwrap_err().code.id, "T0093");
        assert_eq!(leader.take_changes(1).unwrap().prompt, Some(long));
        assert_eq!(sender.send(ChangedSetting::Cut).unwrap(), MAX_PENDING_CHANGES as u64 + 1);
    }

    #[test]
    fn a_flush_outranks_a_cut() {
        let (mut sender, mut leader) = pair();
        for setting in [ChangedSetting::Flush, ChangedSetting::Cut] {
            sender.send(setting).unwrap();
        }
        assert_eq!(leader.take_changes(0).unwrap().cut, SceneCut::Flush);
    }

    #[test]
    fn a_limit_behind_as_many_changes_as_may_wait_is_read() {
        let (mut sender, mut leader) = pair();
        let limit = |chunks| Message::RequestLimit(RequestLimit { chunks });
        sender.link.send(&limit(1)).unwrap();
        leader.take_changes(0).unwrap();
        (0..MAX_PENDING_CHANGES).for_each(|seed| {
            sender.send(ChangedSetting::Seed(seed as u64)).unwrap();
        });
        sender.link.send(&limit(2)).unwrap();
        let (done, taken) = std::sync::mpsc::channel();
        std::thread::spawn(move || done.send(leader.take_changes(1).unwrap().seed));
        let seed = taken.recv_timeout(Duration::from_secs(20)).expect("the leader reads the limit");
        assert_eq!(seed, Some(MAX_PENDING_CHANGES as u64 - 1));
    }

    #[test]
    fn chunks_beyond_the_limit_wait_for_a_larger_one_or_for_the_end_of_the_socket() {
        let (mut sender, mut leader) = pair();
        let limit = |sender: &mut ChangeSender, chunks| {
            sender.link.send(&Message::RequestLimit(RequestLimit { chunks })).unwrap();
        };
        limit(&mut sender, 1);
        leader.take_changes(0).unwrap();
        sender.send(prompt("before")).unwrap();
        let waiting = std::thread::spawn(move || (leader.take_changes(1).unwrap().prompt, leader));
        sender.send(prompt("during")).unwrap();
        limit(&mut sender, 2);
        let (prompt, mut leader) = waiting.join().unwrap();
        assert_eq!(prompt.as_deref(), Some("during"));
        let waiting = std::thread::spawn(move || leader.take_changes(2).unwrap());
        drop(sender);
        assert_eq!(waiting.join().unwrap(), TakenChanges::default());
    }

    #[test]
    fn an_end_that_closes_is_no_change_and_no_failure() {
        let (mut sender, mut leader) = pair();
        sender.send(ChangedSetting::Seed(9)).unwrap();
        drop(sender);
        assert_eq!(leader.take_changes(2).unwrap().seed, Some(9));
        assert_eq!(leader.take_changes(3).unwrap(), TakenChanges::default());
        let (mut sender, leader) = pair();
        let second = leader.link.stream.try_clone().unwrap();
        drop(leader);
        assert_eq!(sender.send(ChangedSetting::Cut).unwrap_err().code.id, "T0093");
        drop(second);
    }

    #[test]
    fn a_message_that_is_no_change_is_refused() {
        let (mut sender, mut leader) = pair();
        sender.link.send(&Message::Stop).unwrap();
        assert_eq!(leader.take_changes(0).unwrap_err().code.id, "T0093");
        let (mut sender, mut leader) = pair();
        sender.send(prompt(&"w".repeat(2 * MAX_LIVE_PROMPT_BYTES))).unwrap();
        assert_eq!(leader.take_changes(0).unwrap_err().code.id, "T0093");
    }
}
