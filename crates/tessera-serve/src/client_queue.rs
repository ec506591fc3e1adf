//! What waits to be sent to one client. The stream never waits for it: frames are dropped, oldest first.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tessera_base::Diagnostic;
use tokio::sync::Notify;

use crate::codes::T1607;
use crate::frames::Frame;
use crate::protocol::Refusal;

/// Most text messages that wait for a client, which reads about three per chunk.
const MAX_WAITING_MESSAGES: usize = 256;

/// The queue of one client.
#[derive(Debug)]
pub(crate) struct ClientQueue {
    state: Mutex<QueueState>,
    changed: Notify,
    max_frames: usize,
}

#[derive(Debug, Default)]
struct QueueState {
    messages: VecDeque<String>,
    frames: VecDeque<Arc<Frame>>,
    /// Frames that the client still takes.
    credits: u64,
    dropped: u64,
    end: Option<Refusal>,
}

/// What is to be sent next.
#[derive(Debug)]
pub(crate) enum Outgoing {
    Message(String),
    Frame(Arc<Frame>),
    /// The connection ends; nothing follows.
    End(Refusal),
}

impl ClientQueue {
    /// Creates a queue in which at most so many frames wait.
    pub(crate) fn new(max_frames: usize, credits: u32) -> ClientQueue {
        let state = QueueState { credits: u64::from(credits), ..QueueState::default() };
        ClientQueue { state: Mutex::new(state), changed: Notify::new(), max_frames: max_frames.max(1) }
    }

    /// Adds a text message. A client that takes none is disconnected.
    pub(crate) fn push_message(&self, message: String) {
        let mut state = self.lock();
        if state.messages.len() >= MAX_WAITING_MESSAGES {
            let message = format!("{MAX_WAITING_MESSAGES} messages wait for this client");
            let reason = Refusal::from_diagnostic(&Diagnostic::error(&T1607, message));
            state.end.get_or_insert(reason);
        } else {
            state.messages.push_back(message);
        }
        self.changed.notify_one();
    }

    /// Adds a frame. Returns the number of frames that were dropped for it.
    pub(crate) fn push_frame(&self, frame: Arc<Frame>) -> u64 {
        let mut state = self.lock();
        state.frames.push_back(frame);
        let dropped = state.frames.len().saturating_sub(self.max_frames);
        state.frames.drain(..dropped);
        state.dropped += dropped as u64;
        self.changed.notify_one();
        dropped as u64
    }

    /// Lets so many more frames be sent.
    pub(crate) fn add_credits(&self, frames: u32) {
        let mut state = self.lock();
        state.credits = state.credits.saturating_add(u64::from(frames));
        self.changed.notify_one();
    }

    /// Removes the frames of a run that come before a request; they are out of date and do not count as dropped.
    pub(crate) fn fence(&self, run: u32, request: u64) {
        self.lock().frames.retain(|frame| (frame.header().run, frame.header().request) >= (run, request));
    }

    /// Ends the connection after the messages that wait.
    pub(crate) fn end(&self, reason: Refusal) {
        self.lock().end.get_or_insert(reason);
        self.changed.notify_one();
    }

    /// Returns the number of frames that were dropped.
    pub(crate) fn dropped(&self) -> u64 {
        self.lock().dropped
    }

    /// Waits for what is to be sent next. Messages come before frames, because they say which frames are valid.
    pub(crate) async fn next(&self) -> Outgoing {
        loop {
            if let Some(outgoing) = self.lock().take_next() {
                return outgoing;
            }
            self.changed.notified().await;
        }
    }

    fn lock(&self) -> MutexGuard<'_, QueueState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl QueueState {
    fn take_next(&mut self) -> Option<Outgoing> {
        if let Some(message) = self.messages.pop_front() {
            return Some(Outgoing::Message(message));
        }
        if let Some(end) = &self.end {
            return Some(Outgoing::End(end.clone()));
        }
        let frame = if self.credits > 0 { self.frames.pop_front() } else { None };
        frame.map(|frame| {
            self.credits -= 1;
            Outgoing::Frame(frame)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::frames::tests::frame;

    fn take(queue: &ClientQueue) -> Option<Outgoing> {
        queue.lock().take_next()
    }

    fn push(queue: &ClientQueue, request: u64, number: u64) -> u64 {
        queue.push_frame(Arc::new(frame(request, number, true)))
    }

    fn taken_number(queue: &ClientQueue) -> Option<u64> {
        match take(queue) {
            Some(Outgoing::Frame(frame)) => Some(frame.header().frame),
            None => None,
            Some(other) => panic!("{other:?}"),
        }
    }

    #[test]
    fn the_oldest_frame_is_dropped_for_a_client_that_takes_none() {
        let queue = ClientQueue::new(2, 0);
        assert_eq!([push(&queue, 0, 0), push(&queue, 0, 1), push(&queue, 1, 2)], [0, 0, 1]);
        assert_eq!((queue.dropped(), taken_number(&queue)), (1, None));
        queue.add_credits(1);
        assert_eq!([taken_number(&queue), taken_number(&queue)], [Some(1), None]);
    }

    #[test]
    fn a_fence_removes_frames_of_earlier_requests() {
        let queue = ClientQueue::new(8, 8);
        (0..4).for_each(|request| {
            push(&queue, request, request);
        });
        queue.fence(1, 2);
        assert_eq!((queue.dropped(), taken_number(&queue)), (0, Some(2)));
        queue.fence(2, 0);
        assert_eq!(taken_number(&queue), None);
    }

    #[test]
    fn a_client_that_takes_no_messages_is_disconnected() {
        let queue = ClientQueue::new(1, 1);
        (0..=MAX_WAITING_MESSAGES).for_each(|i| queue.push_message(i.to_string()));
        let taken: Vec<_> = std::iter::from_fn(|| take(&queue)).take(MAX_WAITING_MESSAGES + 1).collect();
        assert!(matches!(taken.last(), Some(Outgoing::End(end)) if end.code == "T1607"), "{taken:?}");
    }
}
