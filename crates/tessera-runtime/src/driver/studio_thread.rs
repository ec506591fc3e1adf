//! The thread on which the leader embeds prompts, makes contexts, decodes and writes, beside the running call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};

use tessera_base::Diagnostic;

use super::engine_thread::panic_text;
use super::hub::{Hub, Post};
use crate::decide::Cut;
use crate::engine::Studio;
use crate::leader::T0748;
use crate::limits::{AwakeClock, ms};
use crate::wire::{Reload, Tensor};
use crate::{Failure, FailureClass, Limits};

/// Makes the studio on its own thread.
pub type StudioFactory = Box<dyn FnOnce() -> Result<Box<dyn Studio>, Diagnostic> + Send>;

/// What a person asks of the next chunk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StreamRequest {
    /// A new prompt, from this chunk on.
    pub prompt: Option<String>,
    /// Seed of the chunk's random draws.
    pub seed: u64,
    /// Hard cut before this chunk.
    pub cut: Cut,
    /// Weights that every rank loads before this chunk, which opens a scene.
    pub reload: Option<Reload>,
}

pub(crate) enum StudioCommand {
    Text { prompt: String },
    Context { chunk: u32, previous: Tensor, opens_scene: bool },
    Deliver { chunk: u32, epoch: u32, latents: Tensor },
    Finish,
}

pub(crate) enum StudioEvent {
    /// The studio is made.
    Made,
    Text(Tensor),
    Context {
        chunk: u32,
        tensor: Tensor,
    },
    Delivered {
        chunk: u32,
        frames: u32,
    },
    Discarded {
        chunk: u32,
    },
    Finished,
    Failed(Failure),
}

/// The other end of the studio's thread.
pub(super) struct Desk {
    commands: SyncSender<StudioCommand>,
    inbox: Receiver<StudioEvent>,
    /// Chunks of an epoch below this one are not written any more.
    fence: Arc<AtomicU32>,
    /// Its making, and commands that it has not answered.
    pending: u32,
    made: bool,
    clock: AwakeClock,
    /// When it last answered, or was first asked for something.
    moved_ns: u64,
}

impl Desk {
    /// Starts the thread; its queue holds `depth` commands.
    pub(super) fn spawn(factory: StudioFactory, depth: usize, hub: &Hub) -> std::io::Result<Desk> {
        let (commands, orders) = sync_channel::<StudioCommand>(depth);
        let (post, inbox) = hub.inbox();
        let fence = Arc::new(AtomicU32::new(0));
        let shared = Arc::clone(&fence);
        std::thread::Builder::new().name("studio".into()).spawn(move || {
            if let Err(panic) = catch_unwind(AssertUnwindSafe(|| work(factory, &orders, &shared, &post))) {
                let text = format!("the studio panicked: {}", panic_text(&*panic));
                let failure = Failure::new(FailureClass::Output, Some(0), &T0748, text);
                post.send(StudioEvent::Failed(failure));
            }
        })?;
        let clock = AwakeClock::default();
        Ok(Desk { commands, inbox, fence, pending: 1, made: false, clock, moved_ns: 0 })
    }

    /// Hands over a command without waiting.
    pub(super) fn command(&mut self, command: StudioCommand) -> Result<(), Failure> {
        let why = match self.commands.try_send(command) {
            Ok(()) => {
                if self.pending == 0 {
                    self.moved_ns = self.clock.now();
                }
                self.pending += 1;
                return Ok(());
            }
            Err(TrySendError::Full(_)) => "the studio's queue is full",
            Err(TrySendError::Disconnected(_)) => "the studio's thread has ended",
        };
        Err(Failure::new(FailureClass::Output, Some(0), &T0748, why))
    }

    /// From now on only chunks of this epoch and later ones are written.
    pub(super) fn fence(&self, epoch: u32) {
        self.fence.store(epoch, Ordering::Release);
    }

    pub(super) fn heard(&mut self) -> Option<StudioEvent> {
        let event = self.inbox.try_recv().ok()?;
        self.pending = self.pending.saturating_sub(1);
        self.moved_ns = self.clock.now();
        self.made = true;
        Some(event)
    }

    /// A studio that does not answer: nobody else would notice, for the ranks wait with it.
    pub(super) fn stuck(&mut self, now_ns: u64, limits: &Limits) -> Option<Failure> {
        let quiet_ns = self.clock.advance(now_ns, limits.heartbeat_ns).saturating_sub(self.moved_ns);
        let limit_ns = if self.made { limits.studio_ns } else { limits.hello_ns };
        if self.pending == 0 || quiet_ns <= limit_ns {
            return None;
        }
        let text = format!("the studio has not answered for {}, limit {}", ms(quiet_ns), ms(limit_ns));
        Some(Failure::new(FailureClass::Output, Some(0), &T0748, text))
    }
}

fn work(
    factory: StudioFactory,
    orders: &Receiver<StudioCommand>,
    fence: &AtomicU32,
    post: &Post<StudioEvent>,
) {
    let failed = |class, d: &Diagnostic| {
        post.send(StudioEvent::Failed(Failure::from_diagnostic(class, Some(0), d)));
    };
    let mut studio = match factory() {
        Ok(studio) => studio,
        Err(d) => return failed(FailureClass::Output, &d),
    };
    post.send(StudioEvent::Made);
    while let Ok(command) = orders.recv() {
        let (class, outcome) = match command {
            StudioCommand::Text { prompt } => {
                (FailureClass::Preflight, studio.text(&prompt).map(StudioEvent::Text))
            }
            StudioCommand::Context { chunk, previous, opens_scene } => (
                FailureClass::Output,
                studio
                    .context(chunk, &previous, opens_scene)
                    .map(|tensor| StudioEvent::Context { chunk, tensor }),
            ),
            StudioCommand::Deliver { chunk, epoch, .. } if epoch < fence.load(Ordering::Acquire) => {
                (FailureClass::Output, Ok(StudioEvent::Discarded { chunk }))
            }
            StudioCommand::Deliver { chunk, latents, .. } => (
                FailureClass::Output,
                studio.deliver(chunk, &latents).map(|frames| StudioEvent::Delivered { chunk, frames }),
            ),
            StudioCommand::Finish => (FailureClass::Output, studio.finish().map(|()| StudioEvent::Finished)),
        };
        match outcome {
            Ok(event) => drop(post.send(event)),
            Err(d) => return failed(class, &d),
        }
    }
}
