//! Requests on their way from the door to the leader.

use std::collections::VecDeque;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};

use super::hub::Hub;
use super::studio_thread::StreamRequest;
use crate::wire::Tensor;

/// Asks the door for as many requests as the leader has room for, on a thread of its own because the door may
/// block, and keeps their order while their texts are made.
pub(super) struct Intake {
    permits: SyncSender<()>,
    inbox: Receiver<Option<StreamRequest>>,
    granted: usize,
    waiting: VecDeque<(StreamRequest, Option<Tensor>)>,
    over: bool,
}

/// What comes out of it.
pub(super) enum Taken {
    /// A prompt to embed.
    Text(String),
    /// A request, with the embedding of its prompt.
    Request(StreamRequest, Option<Tensor>),
    /// There will be no more.
    Over,
}

impl Intake {
    pub(super) fn spawn(
        mut requests: Box<dyn Iterator<Item = StreamRequest> + Send>,
        hub: &Hub,
    ) -> std::io::Result<Intake> {
        let (permits, granted) = sync_channel::<()>(crate::Limits::MAX_DEPTH as usize);
        let (post, inbox) = hub.inbox();
        std::thread::Builder::new().name("intake".into()).spawn(move || {
            while granted.recv().is_ok() {
                let request = requests.next();
                let last = request.is_none();
                if !post.send(request) || last {
                    return;
                }
            }
        })?;
        Ok(Intake { permits, inbox, granted: 0, waiting: VecDeque::new(), over: false })
    }

    /// Lets the door be asked until so many requests are on their way.
    pub(super) fn grant(&mut self, wants: usize) {
        while self.granted < wants && self.permits.try_send(()).is_ok() {
            self.granted += 1;
        }
    }

    /// What the door has asked for since.
    pub(super) fn heard(&mut self, out: &mut Vec<Taken>) {
        while let Ok(request) = self.inbox.try_recv() {
            match request {
                None => self.over = true,
                Some(request) => {
                    out.extend(request.prompt.clone().map(Taken::Text));
                    self.waiting.push_back((request, None));
                }
            }
        }
        self.hand_over(out);
    }

    /// The oldest prompt that waits was embedded.
    pub(super) fn text(&mut self, tensor: Tensor, out: &mut Vec<Taken>) {
        let next = self.waiting.iter_mut().find(|(r, t)| r.prompt.is_some() && t.is_none());
        if let Some((_, text)) = next {
            *text = Some(tensor);
        }
        self.hand_over(out);
    }

    /// Passes on, in order, the requests whose text is made.
    fn hand_over(&mut self, out: &mut Vec<Taken>) {
        while let Some((request, text)) = self.waiting.pop_front() {
            if request.prompt.is_some() && text.is_none() {
                return self.waiting.push_front((request, text));
            }
            self.granted = self.granted.saturating_sub(1);
            out.push(Taken::Request(request, text));
        }
        if std::mem::take(&mut self.over) {
            out.push(Taken::Over);
        }
    }
}
