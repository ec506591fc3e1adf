//! The media thread: the leader embeds prompts, creates contexts, and decodes and writes chunks on
//! it, concurrently with the running call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use tessera_base::Diagnostic;

use super::engine_thread::panic_text;
use super::reactor::{InboxSender, Reactor};
use crate::array_director::ArrayRequest;
use crate::codes::T0748;
use crate::director::SceneCut;
use crate::engine::{MediaJob, MediaPipeline};
use crate::leader::{self, ChunkStart};
use crate::limits::{AwakeClock, format_ms};
use crate::token_director::TokenRequest;
use crate::wire::{F32Bits, Reload, Tensor};
use crate::{Failure, FailureClass, Limits};

/// Builds the media pipeline on the media thread.
pub type MediaPipelineFactory = Box<dyn FnOnce() -> Result<Box<dyn MediaPipeline>, Diagnostic> + Send>;

/// The user's request for the next chunk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamRequest {
    /// A new prompt, which takes effect with this chunk.
    pub prompt: Option<String>,
    /// Seed of the chunk's random draws.
    pub seed: u64,
    /// Hard cut before this chunk.
    pub cut: SceneCut,
    /// Index of the chunk's list of denoise steps among those of the plan.
    pub step_list: u32,
    /// Attention bias on context keys; `None` for that of the plan.
    pub bias: Option<F32Bits>,
    /// Weights that every rank loads before this chunk, which then opens a scene.
    pub reload: Option<Reload>,
    /// What the chunk's first step begins with.
    pub start: ChunkStart,
}

/// A request of the application to the leader.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallRequest {
    /// The next chunk of a video.
    Chunk(StreamRequest),
    /// The next call of a language model.
    Tokens(Box<TokenRequest>),
    /// The next call of an array program.
    Arrays(Box<ArrayRequest>),
}

impl CallRequest {
    /// Returns the new prompt that the leader must embed before the call.
    pub(super) fn new_prompt(&self) -> Option<&String> {
        match self {
            CallRequest::Chunk(request) => request.prompt.as_ref(),
            CallRequest::Tokens(_) | CallRequest::Arrays(_) => None,
        }
    }
}

impl From<StreamRequest> for CallRequest {
    fn from(request: StreamRequest) -> CallRequest {
        CallRequest::Chunk(request)
    }
}

pub(crate) enum MediaCommand {
    Run(MediaJob),
    Finish,
}

pub(crate) enum MediaEvent {
    /// The factory built the pipeline; answers are now due within `media_ns` instead of `hello_ns`.
    Built,
    PromptEmbedded(Tensor),
    /// A context, a delivered or discarded chunk, or a failure.
    Leader(leader::Event),
    Finished,
}

/// The control thread's handle to the media thread.
pub(super) struct MediaThread {
    commands: SyncSender<MediaCommand>,
    inbox: Receiver<MediaEvent>,
    /// Chunks of an earlier epoch than this are not written.
    min_epoch: Arc<AtomicU32>,
    /// Commands without an answer, plus 1 until the pipeline is built.
    pending: u32,
    built: bool,
    clock: AwakeClock,
    /// Time of the last answer, or of the first command since the pipeline was idle.
    last_progress_ns: u64,
}

impl MediaThread {
    /// Starts the thread; its queue holds `depth` commands.
    pub(super) fn spawn_thread(
        factory: MediaPipelineFactory,
        depth: usize,
        reactor: &Reactor,
    ) -> std::io::Result<MediaThread> {
        let (commands, command_queue) = sync_channel::<MediaCommand>(depth);
        let (post, inbox) = reactor.new_inbox();
        let min_epoch = Arc::new(AtomicU32::new(0));
        let shared = Arc::clone(&min_epoch);
        std::thread::Builder::new().name("media".into()).spawn(move || {
            if let Err(panic) =
                catch_unwind(AssertUnwindSafe(|| run_media_thread(factory, &command_queue, &shared, &post)))
            {
                let text = format!("the media pipeline panicked: {}", panic_text(&*panic));
                let failure = Failure::new(FailureClass::Output, Some(0), &T0748, text);
                post.send(MediaEvent::Leader(leader::Event::Failed(failure)));
            }
        })?;
        let clock = AwakeClock::default();
        Ok(MediaThread { commands, inbox, min_epoch, pending: 1, built: false, clock, last_progress_ns: 0 })
    }

    /// Sends a command without blocking.
    ///
    /// # Errors
    /// An output failure if the queue is full. If the thread has ended, the failure that it reported last, because the
    /// caller may not have read it yet.
    pub(super) fn send_command(&mut self, command: MediaCommand) -> Result<(), Failure> {
        let reason = match self.commands.try_send(command) {
            Ok(()) => {
                if self.pending == 0 {
                    self.last_progress_ns = self.clock.now_ns();
                }
                self.pending += 1;
                return Ok(());
            }
            Err(TrySendError::Full(_)) => "the queue of the media pipeline is full",
            Err(TrySendError::Disconnected(_)) => match self.find_reported_failure() {
                Some(failure) => return Err(failure),
                None => "the thread of the media pipeline has ended",
            },
        };
        Err(Failure::new(FailureClass::Output, Some(0), &T0748, reason))
    }

    /// Allows only chunks of `epoch` and later epochs to be written.
    pub(super) fn set_min_epoch(&self, epoch: u32) {
        self.min_epoch.store(epoch, Ordering::Release);
    }

    pub(super) fn next_event(&mut self) -> Option<MediaEvent> {
        let event = self.inbox.try_recv().ok()?;
        self.pending = self.pending.saturating_sub(1);
        self.last_progress_ns = self.clock.now_ns();
        self.built = true;
        Some(event)
    }

    /// The thread reports why it ends before it drops its end of the queue.
    fn find_reported_failure(&mut self) -> Option<Failure> {
        std::iter::from_fn(|| self.next_event()).find_map(|event| match event {
            MediaEvent::Leader(leader::Event::Failed(failure)) => Some(failure),
            _ => None,
        })
    }

    /// Returns a failure if the pipeline's answer is overdue. No other check would detect this,
    /// because the ranks wait for the pipeline too.
    pub(super) fn check_stalled(&mut self, now_ns: u64, limits: &Limits) -> Option<Failure> {
        let quiet_ns =
            self.clock.advance_to(now_ns, limits.heartbeat_ns).saturating_sub(self.last_progress_ns);
        let limit_ns = if self.built { limits.media_ns } else { limits.hello_ns };
        if self.pending == 0 || quiet_ns <= limit_ns {
            return None;
        }
        let text = format!(
            "the media pipeline has not answered for {}, limit {}",
            format_ms(quiet_ns),
            format_ms(limit_ns)
        );
        Some(Failure::new(FailureClass::Output, Some(0), &T0748, text))
    }
}

fn run_media_thread(
    factory: MediaPipelineFactory,
    command_queue: &Receiver<MediaCommand>,
    min_epoch: &AtomicU32,
    events: &InboxSender<MediaEvent>,
) {
    let failed = |class, d: &Diagnostic| {
        let failure = Failure::from_diagnostic(class, Some(0), d);
        events.send(MediaEvent::Leader(leader::Event::Failed(failure)));
    };
    let mut pipeline = match factory() {
        Ok(pipeline) => pipeline,
        Err(d) => return failed(FailureClass::Output, &d),
    };
    events.send(MediaEvent::Built);
    while let Ok(command) = command_queue.recv() {
        let class = match &command {
            MediaCommand::Run(MediaJob::EncodePrompt(_)) => FailureClass::Preflight,
            _ => FailureClass::Output,
        };
        match run_command(&mut *pipeline, command, min_epoch) {
            Ok(event) => drop(events.send(event)),
            Err(d) => return failed(class, &d),
        }
    }
}

fn run_command(
    pipeline: &mut dyn MediaPipeline,
    command: MediaCommand,
    min_epoch: &AtomicU32,
) -> Result<MediaEvent, Diagnostic> {
    let job = match command {
        MediaCommand::Run(job) => job,
        MediaCommand::Finish => return pipeline.finish_output().map(|()| MediaEvent::Finished),
    };
    Ok(MediaEvent::Leader(match job {
        MediaJob::EncodePrompt(prompt) => {
            return pipeline.encode_prompt(&prompt).map(MediaEvent::PromptEmbedded);
        }
        MediaJob::Context { chunk, previous, opens_scene } => {
            let tensor = pipeline.encode_context(chunk, &previous, opens_scene)?;
            leader::Event::Context { chunk, tensor }
        }
        MediaJob::Deliver { chunk, epoch, .. } if epoch < min_epoch.load(Ordering::Acquire) => {
            leader::Event::Discarded { chunk }
        }
        MediaJob::Deliver { chunk, outputs, opens_scene, .. } => {
            let delivery = pipeline.deliver_chunk(chunk, &outputs, opens_scene)?;
            leader::Event::Delivered { chunk, delivery }
        }
    }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tripwire::T0765;

    /// The thread may end between two commands, before the control thread reads its events.
    #[test]
    fn a_command_after_the_end_of_the_thread_fails_with_the_reported_reason() {
        let reactor = Reactor::new(&Limits::default()).unwrap();
        let factory: MediaPipelineFactory = Box::new(|| Err(Diagnostic::error(&T0765, "the folder is gone")));
        let mut media = MediaThread::spawn_thread(factory, 4, &reactor).unwrap();
        let failure = loop {
            match media.send_command(MediaCommand::Finish) {
                Err(failure) if !failure.text.contains("is full") => break failure,
                _ => std::thread::yield_now(),
            }
        };
        assert_eq!(failure.code, "T0765", "{failure:?}");
    }
}
