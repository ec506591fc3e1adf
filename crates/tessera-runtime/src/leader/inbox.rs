//! What is wanted and not yet a call: requests in order, and the cut that does not wait its turn.

use super::{Action, Leader, Stage};
use crate::decide::{ChunkRequest, Cut, T0721};
use crate::wire::{CallAction, Reload, Tensor};
use crate::worker::T0707;
use crate::{Digest, FailureClass, Limits};

/// Something wanted.
#[derive(Debug)]
pub(super) enum Item {
    Chunk { ordinal: u64, request: ChunkRequest, text: Option<Tensor> },
    Control(CallAction),
    Reload(Reload),
}

impl Leader {
    /// Chunks that wait to become calls.
    pub(super) fn waiting(&self) -> usize {
        self.inbox.iter().filter(|i| matches!(i, Item::Chunk { .. })).count()
    }

    pub(super) fn request(
        &mut self,
        mut request: ChunkRequest,
        mut text: Option<Tensor>,
        out: &mut Vec<Action>,
    ) {
        if self.ending() {
            return;
        }
        let flush = request.cut == Cut::Flush;
        if self.wants() == 0 && !flush {
            let why = format!("a request came while {} wait, the limit", self.waiting());
            if self.trip(FailureClass::Protocol, None, &T0707, why, out) {
                return;
            }
        }
        if request.prompt_change != text.is_some() {
            let why = "a new prompt and its embedding come together or not at all";
            if self.trip(FailureClass::Preflight, None, &T0721, why.into(), out) {
                return;
            }
        }
        let ordinal = self.requests;
        self.requests += 1;
        if flush && let Some(kept) = self.flush(out) {
            // The prompt of a request that is dropped holds for what comes after it.
            text = text.or(Some(kept));
            request.prompt_change = true;
        }
        self.inbox.push_back(Item::Chunk { ordinal, request, text });
    }

    pub(super) fn control(&mut self, action: CallAction, out: &mut Vec<Action>) {
        if !matches!(action, CallAction::Noop | CallAction::Reset) {
            let why = format!("{} is not a call that can be asked for", action.name());
            self.trip(FailureClass::Protocol, None, &T0707, why, out);
            return;
        }
        self.wait(Item::Control(action), out);
    }

    pub(super) fn reload(&mut self, source: String, weights: Digest, out: &mut Vec<Action>) {
        self.wait(Item::Reload(Reload { source, weights }), out);
    }

    /// Whether nothing that is wanted now can become a call any more.
    fn ending(&self) -> bool {
        self.stopping || matches!(self.stage, Stage::Stopping { .. } | Stage::Ended)
    }

    fn wait(&mut self, item: Item, out: &mut Vec<Action>) {
        if self.ending() {
            return;
        }
        if self.inbox.len() >= Limits::MAX_DEPTH as usize {
            let why = format!("a call was asked for while {} wait, the limit", self.inbox.len());
            self.trip(FailureClass::Protocol, None, &T0707, why, out);
            return;
        }
        self.inbox.push_back(item);
    }

    /// Gives up what was wanted before, and marks what is under way to be finished for nobody. The text of the
    /// last prompt that is given up with its request.
    fn flush(&mut self, out: &mut Vec<Action>) -> Option<Tensor> {
        let epoch = self.director.cache().epoch();
        let mut kept = None;
        for item in std::mem::take(&mut self.inbox) {
            match item {
                Item::Chunk { ordinal, text, .. } => {
                    kept = text.or(kept);
                    let why = "a hard cut came before it was prepared";
                    out.push(Action::Dropped { request: ordinal, chunk: None, epoch, why });
                }
                Item::Reload(_) => self.inbox.push_back(item),
                // The cut resets, and proves the way as well as a call that does nothing.
                Item::Control(_) => {}
            }
        }
        for open in self.open.iter_mut().filter(|o| o.request.is_some()) {
            open.discard = true;
        }
        out.push(Action::Fence { epoch: epoch.saturating_add(1) });
        kept
    }
}
