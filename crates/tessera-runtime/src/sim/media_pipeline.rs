//! The simulated media pipeline of the leader: one job at a time, in order of request.

use std::collections::VecDeque;

use super::{OPEN_ENDED, QueuedEvent, Sim, SimEvent, World};
use crate::director::ChunkRequest;
use crate::engine::{Delivery, MediaJob};
use crate::leader;

#[derive(Debug, Default)]
pub(super) struct MediaQueue {
    pub(super) jobs: VecDeque<MediaJob>,
    pub(super) busy: bool,
    /// Start of the running job in nanoseconds if its duration is [`OPEN_ENDED`], else `None`.
    open_ns: Option<u64>,
    pub(super) min_epoch: u32,
    /// Requests that are not yet passed to the leader. The flag tells whether the prompt is
    /// encoded.
    incoming: VecDeque<(ChunkRequest, Option<u32>, bool)>,
}

impl<W: World> Sim<W> {
    pub(super) fn enqueue_job(&mut self, work: MediaJob) {
        self.media.jobs.push_back(work);
        self.start_next_job();
    }

    fn start_next_job(&mut self) {
        if self.media.busy {
            return;
        }
        let Some(work) = self.media.jobs.front() else { return };
        self.media.busy = true;
        let ns = self.world.media_ns(self.now_ns, work);
        let begun_ns = self.now_ns;
        match ns {
            OPEN_ENDED => self.media.open_ns = Some(begun_ns),
            _ => self.schedule_event(ns, QueuedEvent::MediaJobEnds { begun_ns }),
        }
    }

    /// Ends the job whose duration is [`OPEN_ENDED`] if [`World::media_job_ended`] reports its end.
    pub(super) fn end_open_job(&mut self) {
        if self.media.open_ns.is_some()
            && self.world.media_job_ended()
            && let Some(begun_ns) = self.media.open_ns.take()
        {
            self.schedule_event(0, QueuedEvent::MediaJobEnds { begun_ns });
        }
    }

    pub(super) fn end_job(&mut self, begun_ns: u64) {
        let Some(work) = self.media.jobs.pop_front() else { return };
        self.media.busy = false;
        let fence = self.media.min_epoch;
        let emitted = match work {
            MediaJob::Deliver { epoch, .. } => self.world.should_write(epoch, fence),
            _ => true,
        };
        let waiting = self.media.jobs.len();
        self.world.observe_event(
            self.now_ns,
            SimEvent::MediaJobFinished { work: &work, begun_ns, emitted, waiting },
        );
        match work {
            MediaJob::EncodePrompt(_) => {
                if let Some(first) = self.media.incoming.iter_mut().find(|(_, p, made)| p.is_some() && !made)
                {
                    first.2 = true;
                }
                self.hand_over_requests();
            }
            MediaJob::Context { chunk, previous, .. } => {
                let context = previous.0.first().and_then(|latents| self.world.make_context(latents));
                if let Some(tensor) = context {
                    self.step_leader(leader::Event::Context { chunk, tensor });
                }
            }
            MediaJob::Deliver { chunk, .. } if emitted => {
                let delivery = Delivery::from_frames(self.world.frames_per_chunk());
                self.step_leader(leader::Event::Delivered { chunk, delivery });
            }
            MediaJob::Deliver { chunk, .. } => self.step_leader(leader::Event::Discarded { chunk }),
        }
        self.start_next_job();
    }

    /// Pulls as many requests as the leader has capacity for.
    pub(super) fn pull_requests(&mut self, wants: usize) {
        while self.media.incoming.len() < wants {
            let Some((request, prompt)) = self.config.requests.pop_front() else {
                if !self.requests_ended && self.media.incoming.is_empty() {
                    self.requests_ended = true;
                    self.step_leader(leader::Event::NoMoreRequests);
                }
                break;
            };
            self.media.incoming.push_back((request, prompt, false));
            if let Some(number) = prompt {
                self.enqueue_job(MediaJob::EncodePrompt(number.to_string()));
            }
        }
        self.hand_over_requests();
    }

    fn hand_over_requests(&mut self) {
        while let Some((_, prompt, made)) = self.media.incoming.front()
            && (prompt.is_none() || *made)
        {
            let Some((request, prompt, _)) = self.media.incoming.pop_front() else { return };
            let text = prompt.and_then(|n| self.world.prompt_embedding(n));
            self.step_leader(leader::Event::Request { request, text, start: leader::ChunkStart::Drawn });
        }
    }
}
