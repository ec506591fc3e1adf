//! The leader's queue of requests that are not yet calls, and the flush, which skips the queue.

use super::{Action, ChunkStart, Leader, LeaderStage, RecordEntry};
use crate::array_director::ArrayRequest;
use crate::codes::{T0707, T0721};
use crate::director::{ChunkRequest, SceneCut};
use crate::token_director::TokenRequest;
use crate::wire::{CallAction, Reload, Tensor};
use crate::{FailureClass, Limits};

/// A chunk request, control call or reload that waits to become a call.
#[derive(Debug)]
pub(super) enum InboxItem {
    Chunk { ordinal: u64, request: ChunkRequest, text: Option<Tensor>, start: ChunkStart },
    Tokens { ordinal: u64, request: TokenRequest },
    Arrays { ordinal: u64, request: ArrayRequest },
    Control(CallAction),
    Reload(Reload),
}

impl Leader {
    /// Returns the number of queued requests for output.
    pub(super) fn waiting_chunks(&self) -> usize {
        let is_request = |i: &&InboxItem| match i {
            InboxItem::Chunk { .. } | InboxItem::Tokens { .. } | InboxItem::Arrays { .. } => true,
            InboxItem::Control(_) | InboxItem::Reload(_) => false,
        };
        self.inbox.iter().filter(is_request).count()
    }

    pub(super) fn handle_request(
        &mut self,
        mut request: ChunkRequest,
        mut text: Option<Tensor>,
        start: ChunkStart,
    ) {
        if self.is_stopping() {
            return;
        }
        let flush = request.cut == SceneCut::Flush;
        if !flush && self.is_over_capacity() {
            return;
        }
        if request.prompt_change != text.is_some() {
            let why = "a new prompt and its embedding must come together";
            if self.trip_if_armed(FailureClass::Preflight, None, &T0721, why) {
                return;
            }
        }
        let ordinal = self.requests;
        self.requests += 1;
        if flush && let Some(dropped_embedding) = self.flush_requests() {
            // The prompt of a dropped request applies to the requests after it.
            text = text.or(Some(dropped_embedding));
            request.prompt_change = true;
        }
        self.inbox.push_back(InboxItem::Chunk { ordinal, request, text, start });
    }

    pub(super) fn handle_token_request(&mut self, request: TokenRequest) {
        if self.is_stopping() || self.is_over_capacity() {
            return;
        }
        let ordinal = self.requests;
        self.requests += 1;
        self.inbox.push_back(InboxItem::Tokens { ordinal, request });
    }

    pub(super) fn handle_array_request(&mut self, request: ArrayRequest) {
        if self.is_stopping() || self.is_over_capacity() {
            return;
        }
        let ordinal = self.requests;
        self.requests += 1;
        self.inbox.push_back(InboxItem::Arrays { ordinal, request });
    }

    /// Whether a request that arrived now is one too many, so that the run has failed.
    fn is_over_capacity(&mut self) -> bool {
        let waiting = self.waiting_chunks();
        let why = format!("a request arrived while {waiting} wait, the limit");
        self.request_capacity() == 0 && self.trip_if_armed(FailureClass::Protocol, None, &T0707, why)
    }

    pub(super) fn enqueue_control(&mut self, action: CallAction) {
        if !matches!(action, CallAction::Noop | CallAction::Reset) {
            let why = format!("{} is not a call that an application may request", action.name());
            self.trip_if_armed(FailureClass::Protocol, None, &T0707, why);
            return;
        }
        self.enqueue_item(InboxItem::Control(action));
    }

    /// Whether the run is stopping, so that queued requests can no longer become calls.
    fn is_stopping(&self) -> bool {
        self.stopping || matches!(self.stage, LeaderStage::Stopping { .. } | LeaderStage::Ended)
    }

    pub(super) fn enqueue_item(&mut self, item: InboxItem) {
        if self.is_stopping() {
            return;
        }
        if self.inbox.len() >= Limits::MAX_DEPTH as usize {
            let why = format!("a call was requested while {} wait, the limit", self.inbox.len());
            self.trip_if_armed(FailureClass::Protocol, None, &T0707, why);
            return;
        }
        self.inbox.push_back(item);
    }

    /// Drops the queued chunk requests and marks the open calls as discarded. Returns the prompt
    /// embedding of the last dropped request that had one.
    fn flush_requests(&mut self) -> Option<Tensor> {
        let epoch = self.planner.state().epoch();
        let mut last_embedding = None;
        for item in std::mem::take(&mut self.inbox) {
            match item {
                InboxItem::Chunk { ordinal, text, .. } => {
                    last_embedding = text.or(last_embedding);
                    let why = "a hard cut came before the call was prepared";
                    self.add_entry(RecordEntry::Dropped { request: ordinal, chunk: None, epoch, why });
                }
                InboxItem::Reload(_) | InboxItem::Tokens { .. } | InboxItem::Arrays { .. } => {
                    self.inbox.push_back(item);
                }
                // The cut includes a reset, and its call tests the path to every rank like a NOOP.
                InboxItem::Control(_) => {}
            }
        }
        for open in self.open_calls.iter_mut().filter(|o| o.request.is_some()) {
            open.discard = true;
        }
        self.actions.push(Action::SetMinEpoch { epoch: epoch.saturating_add(1) });
        last_embedding
    }
}
