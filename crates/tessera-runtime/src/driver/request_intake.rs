//! Transfers requests from the application crate to the leader.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::media_thread::CallRequest;
use super::reactor::Reactor;
use crate::wire::Tensor;

/// Pulls at most as many requests from the application as the leader has room for, and keeps their
/// order while their prompts are embedded. The requests come from an iterator that may block, so a
/// separate thread drives it.
pub(super) struct RequestIntake {
    permits: SyncSender<()>,
    inbox: Receiver<Option<CallRequest>>,
    in_flight: usize,
    waiting: VecDeque<(CallRequest, Option<Tensor>)>,
    finished: bool,
}

/// What [`RequestIntake`] hands to the leader: prompts to embed, and requests.
pub(super) enum IntakeEvent {
    /// A new prompt to embed; its request and all later ones wait for the embedding.
    Prompt(String),
    /// A request and the embedding of its prompt.
    Request(Box<CallRequest>, Option<Tensor>),
    /// The application has no more requests.
    Finished,
}

impl RequestIntake {
    pub(super) fn spawn_thread(
        mut requests: Box<dyn Iterator<Item = CallRequest> + Send>,
        reactor: &Reactor,
    ) -> std::io::Result<RequestIntake> {
        let (permits, granted) = sync_channel::<()>(crate::Limits::MAX_DEPTH as usize);
        let (post, inbox) = reactor.new_inbox();
        std::thread::Builder::new().name("intake".into()).spawn(move || {
            while granted.recv().is_ok() {
                let request = requests.next();
                let last = request.is_none();
                if !post.send(request) || last {
                    return;
                }
            }
        })?;
        Ok(RequestIntake { permits, inbox, in_flight: 0, waiting: VecDeque::new(), finished: false })
    }

    /// Issues permits until `wanted` requests are in flight.
    pub(super) fn grant_permits(&mut self, wanted: usize) {
        while self.in_flight < wanted && self.permits.try_send(()).is_ok() {
            self.in_flight += 1;
        }
    }

    /// Collects the requests that arrived since the last call, and returns those that are
    /// complete.
    pub(super) fn poll_events(&mut self, out: &mut Vec<IntakeEvent>) {
        while let Ok(request) = self.inbox.try_recv() {
            match request {
                None => self.finished = true,
                Some(request) => {
                    out.extend(request.new_prompt().cloned().map(IntakeEvent::Prompt));
                    self.waiting.push_back((request, None));
                }
            }
        }
        self.release_complete(out);
    }

    /// Attaches an embedding to the oldest request that waits for one.
    pub(super) fn attach_embedding(&mut self, tensor: Tensor, out: &mut Vec<IntakeEvent>) {
        let next = self.waiting.iter_mut().find(|(r, t)| r.new_prompt().is_some() && t.is_none());
        if let Some((_, text)) = next {
            *text = Some(tensor);
        }
        self.release_complete(out);
    }

    /// Returns, in order, the requests whose embeddings are complete.
    fn release_complete(&mut self, out: &mut Vec<IntakeEvent>) {
        while let Some((request, text)) = self.waiting.pop_front() {
            if request.new_prompt().is_some() && text.is_none() {
                return self.waiting.push_front((request, text));
            }
            self.in_flight = self.in_flight.saturating_sub(1);
            out.push(IntakeEvent::Request(Box::new(request), text));
        }
        if std::mem::take(&mut self.finished) {
            out.push(IntakeEvent::Finished);
        }
    }
}
