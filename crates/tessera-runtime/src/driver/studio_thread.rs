//! The thread on which the leader embeds prompts, makes contexts, decodes and writes, beside the running call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::mpsc::{SyncSender, sync_channel};

use tessera_base::Diagnostic;

use super::engine_thread::panic_text;
use crate::decide::Cut;
use crate::engine::Studio;
use crate::leader::T0748;
use crate::wire::Tensor;
use crate::{Failure, FailureClass};

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
}

pub(crate) enum StudioCommand {
    Text { prompt: String },
    Context { chunk: u32, previous: Tensor, opens_scene: bool },
    Deliver { chunk: u32, epoch: u32, latents: Tensor },
    Finish,
}

pub(crate) enum StudioEvent {
    Text(Tensor),
    Context { chunk: u32, tensor: Tensor },
    Delivered { chunk: u32, frames: u32 },
    Discarded { chunk: u32 },
    Finished,
    Failed(Failure),
}

/// Starts the thread; its queue holds `depth` commands. Chunks of an epoch below `fence` are not written.
pub(crate) fn spawn_studio(
    factory: StudioFactory,
    depth: usize,
    fence: Arc<AtomicU32>,
    tell: impl Fn(StudioEvent) + Send + 'static,
) -> std::io::Result<SyncSender<StudioCommand>> {
    let (commands, inbox) = sync_channel::<StudioCommand>(depth);
    std::thread::Builder::new().name("studio".into()).spawn(move || {
        let ran = catch_unwind(AssertUnwindSafe(|| {
            let mut studio = match factory() {
                Ok(studio) => studio,
                Err(d) => return tell(failed(FailureClass::Output, &d)),
            };
            while let Ok(command) = inbox.recv() {
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
                        studio
                            .deliver(chunk, &latents)
                            .map(|frames| StudioEvent::Delivered { chunk, frames }),
                    ),
                    StudioCommand::Finish => {
                        (FailureClass::Output, studio.finish().map(|()| StudioEvent::Finished))
                    }
                };
                match outcome {
                    Ok(event) => tell(event),
                    Err(d) => return tell(failed(class, &d)),
                }
            }
        }));
        if let Err(panic) = ran {
            let text = format!("the studio panicked: {}", panic_text(&*panic));
            tell(StudioEvent::Failed(Failure::new(FailureClass::Output, Some(0), &T0748, text)));
        }
    })?;
    Ok(commands)
}

fn failed(class: FailureClass, d: &Diagnostic) -> StudioEvent {
    StudioEvent::Failed(Failure::from_diagnostic(class, Some(0), d))
}
