//! The one place where a message leaves a process and the one where it enters.

use std::sync::Arc;

use tessera_base::Diagnostic;

use super::hub::{Hub, LinkId};
use super::link::Frame;
use crate::flight::{Mark, Sink};
use crate::tripwire::Tripwires;
use crate::wire::Message;

/// Which way a message goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Way {
    /// Into this process.
    In,
    /// Out of it.
    Out,
}

/// Sees every message between this rank's machines and a peer, and says what goes on: the message, another one,
/// none, or several. Breaks things on purpose in a drill; absent otherwise.
/// An error is what the reader of a broken frame would have found.
pub type Tap = Box<dyn FnMut(Way, u32, Message) -> Result<Vec<Message>, Diagnostic>>;

/// The hub of a rank with what listens at its door.
pub(super) struct Gate {
    pub(super) hub: Hub,
    rank: u32,
    flight: Option<Arc<dyn Sink>>,
    tap: Option<Tap>,
    /// Frames are not judged by these.
    tripwires: Tripwires,
}

impl Gate {
    pub(super) fn new(
        rank: u32,
        hub: Hub,
        flight: Option<Arc<dyn Sink>>,
        tap: Option<Tap>,
        tripwires: Tripwires,
    ) -> Gate {
        Gate { hub, rank, flight, tap, tripwires }
    }

    /// Sends one message to each of these peers.
    pub(super) fn send<'a>(
        &mut self,
        peers: impl IntoIterator<Item = (&'a u32, &'a LinkId)>,
        message: &Message,
    ) -> Result<(), Diagnostic> {
        self.mark(Mark::sent(self.rank, message));
        let Some(tap) = &mut self.tap else {
            let frame = match Frame::new(self.rank, message) {
                Ok(frame) => frame,
                Err(d) if self.tripwires.armed(d.code) => return Err(d),
                // Nobody is to say why it does not leave.
                Err(_) => return Ok(()),
            };
            for (_, link) in peers {
                self.hub.send(*link, &frame);
            }
            return Ok(());
        };
        for (peer, link) in peers {
            for message in tap(Way::Out, *peer, message.clone())? {
                self.hub.send(*link, &Frame::new(self.rank, &message)?);
            }
        }
        Ok(())
    }

    /// Reads a frame that came from a peer.
    pub(super) fn receive(&mut self, frame: &Frame) -> Result<Vec<Message>, Diagnostic> {
        let read = frame.message().and_then(|message| {
            self.mark(Mark::received(&message));
            self.pass(Way::In, frame.origin(), message)
        });
        read.or_else(|d| if self.tripwires.armed(d.code) { Err(d) } else { Ok(Vec::new()) })
    }

    /// What becomes of a message that goes from one machine of this process to another.
    pub(super) fn pass(&mut self, way: Way, peer: u32, message: Message) -> Result<Vec<Message>, Diagnostic> {
        match &mut self.tap {
            Some(tap) => tap(way, peer, message),
            None => Ok(vec![message]),
        }
    }

    pub(super) fn mark(&self, mark: Option<Mark<'_>>) {
        if let (Some(flight), Some(mark)) = (&self.flight, mark) {
            flight.mark(mark);
        }
    }

    /// The last marks of a rank that ends by itself.
    pub(super) fn ends(&self, failure: Option<&crate::Failure>) {
        self.mark(failure.map(Mark::failed));
        let status = failure.map_or(0, |f| f.class.exit_code());
        self.mark(Some(Mark::Exit { status }));
    }
}
