//! The thread on which the leader embeds prompts, makes contexts, decodes and writes, beside the running call.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{SyncSender, sync_channel};

use tessera_base::Diagnostic;

use super::engine_thread::panic_text;
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
    pub cut: bool,
}

pub(crate) enum StudioCommand {
    Text { prompt: String },
    Context { chunk: u32, previous: Tensor },
    Deliver { chunk: u32, latents: Tensor },
    Finish,
}

pub(crate) enum StudioEvent {
    Text(Tensor),
    Context { chunk: u32, tensor: Tensor },
    Delivered { chunk: u32, frames: u32 },
    Finished,
    Failed(Failure),
}

/// Starts the thread; its queue holds `depth` commands.
pub(crate) fn spawn_studio(
    factory: StudioFactory,
    depth: usize,
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
                    StudioCommand::Context { chunk, previous } => (
                        FailureClass::Output,
                        studio.context(chunk, &previous).map(|tensor| StudioEvent::Context { chunk, tensor }),
                    ),
                    StudioCommand::Deliver { chunk, latents } => (
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
