//! The leader's own work beside the mesh: one piece at a time, in the order in which it was asked for.

use std::collections::VecDeque;

use super::{Item, OPEN, Seen, Sim, World};
use crate::decide::ChunkRequest;
use crate::leader;
use crate::wire::Tensor;

/// A piece of work.
#[derive(Debug, Clone, PartialEq)]
pub enum Work {
    /// A prompt is embedded.
    Text,
    /// The first latent of a chunk is decoded and encoded again, for the next one.
    Context {
        /// The chunk that waits for it.
        chunk: u32,
        /// Output of the chunk before.
        previous: Tensor,
        /// Whether the chunk before is the first of its scene.
        opens_scene: bool,
    },
    /// The rest of a chunk is decoded and written.
    Deliver {
        /// The chunk.
        chunk: u32,
        /// Its life of the caches.
        epoch: u32,
    },
}

#[derive(Debug, Default)]
pub(super) struct Studio {
    pub(super) work: VecDeque<Work>,
    pub(super) busy: bool,
    /// When the work under way began, where the world says when it ends.
    open_ns: Option<u64>,
    pub(super) fence: u32,
    /// Requests on their way to the leader, each with whether its prompt is embedded.
    intake: VecDeque<(ChunkRequest, Option<u32>, bool)>,
}

impl<W: World> Sim<W> {
    pub(super) fn command(&mut self, work: Work) {
        self.studio.work.push_back(work);
        self.studio_goes();
    }

    fn studio_goes(&mut self) {
        if self.studio.busy {
            return;
        }
        let Some(work) = self.studio.work.front() else { return };
        self.studio.busy = true;
        let ns = self.world.studio_ns(self.now_ns, work);
        let begun_ns = self.now_ns;
        match ns {
            OPEN => self.studio.open_ns = Some(begun_ns),
            _ => self.push(ns, Item::StudioEnds { begun_ns }),
        }
    }

    /// The world may say that the studio's open work has ended.
    pub(super) fn open_studio_ends(&mut self) {
        if self.studio.open_ns.is_some()
            && self.world.studio_ended()
            && let Some(begun_ns) = self.studio.open_ns.take()
        {
            self.push(0, Item::StudioEnds { begun_ns });
        }
    }

    pub(super) fn studio_ends(&mut self, begun_ns: u64) {
        let Some(work) = self.studio.work.pop_front() else { return };
        self.studio.busy = false;
        let fence = self.studio.fence;
        let emitted = match work {
            Work::Deliver { epoch, .. } => self.world.writes(epoch, fence),
            _ => true,
        };
        let waiting = self.studio.work.len();
        self.world.seen(self.now_ns, Seen::Studio { work: &work, begun_ns, emitted, waiting });
        match work {
            Work::Text => {
                if let Some(first) = self.studio.intake.iter_mut().find(|(_, p, made)| p.is_some() && !made) {
                    first.2 = true;
                }
                self.hand_over();
            }
            Work::Context { chunk, previous, .. } => {
                if let Some(tensor) = self.world.context(&previous) {
                    self.leader(leader::Event::Context { chunk, tensor });
                }
            }
            Work::Deliver { chunk, .. } if emitted => {
                let frames = self.world.frames();
                self.leader(leader::Event::Delivered { chunk, frames });
            }
            Work::Deliver { chunk, .. } => self.leader(leader::Event::Discarded { chunk }),
        }
        self.studio_goes();
    }

    /// Asks for as many requests as the leader has room for.
    pub(super) fn intake(&mut self, wants: usize) {
        while self.studio.intake.len() < wants {
            let Some((request, prompt)) = self.asked.pop_front() else {
                if !self.over && self.studio.intake.is_empty() {
                    self.over = true;
                    self.leader(leader::Event::NoMoreRequests);
                }
                break;
            };
            self.studio.intake.push_back((request, prompt, false));
            if prompt.is_some() {
                self.command(Work::Text);
            }
        }
        self.hand_over();
    }

    fn hand_over(&mut self) {
        while let Some((_, prompt, made)) = self.studio.intake.front()
            && (prompt.is_none() || *made)
        {
            let Some((request, prompt, _)) = self.studio.intake.pop_front() else { return };
            let text = prompt.and_then(|n| self.world.text(n));
            self.leader(leader::Event::Request { request, text });
        }
    }
}
