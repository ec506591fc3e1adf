//! The message boundary: every message enters and leaves a process through this one type, which
//! records it and lets a drill alter it.

use std::sync::Arc;

use tessera_base::Diagnostic;

use super::link::Frame;
use super::reactor::{LinkId, Reactor};
use crate::flight::{FlightEvent, FlightSink};
use crate::tripwire::Tripwires;
use crate::wire::Message;

/// The direction of a message, seen from this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MessageDirection {
    /// From a peer into this process.
    Inbound,
    /// From this process to a peer; a broadcast counts once per peer.
    Outbound,
}

/// Intercepts every message between this rank's state machines and a peer, and returns the messages
/// to pass on: the same one, another one, none, or several. Only drills use one, to inject faults.
/// An error represents the diagnostic of a broken frame.
pub type Interceptor = Box<dyn FnMut(MessageDirection, u32, Message) -> Result<Vec<Message>, Diagnostic>>;

/// A rank's reactor with its flight recorder and interceptor.
pub(super) struct MessageBoundary {
    pub(super) reactor: Reactor,
    pub(super) rank: u32,
    pub(super) flight: Option<Arc<dyn FlightSink>>,
    pub(super) interceptor: Option<Interceptor>,
    /// Tripwires that are off suppress the diagnostics of frames.
    pub(super) tripwires: Tripwires,
}

impl MessageBoundary {
    /// Sends one message to each of `peers`.
    ///
    /// # Errors
    /// A wire limit, such as T0703, unless its tripwire is off.
    pub(super) fn send_to<'a>(
        &mut self,
        peers: impl IntoIterator<Item = (&'a u32, &'a LinkId)>,
        message: &Message,
    ) -> Result<(), Diagnostic> {
        self.record_mark(FlightEvent::from_sent(self.rank, message));
        let Some(interceptor) = &mut self.interceptor else {
            let frame = match Frame::new(self.rank, message) {
                Ok(frame) => frame,
                Err(d) if self.tripwires.is_armed(d.code) => return Err(d),
                // The tripwire is off, so the message is dropped silently.
                Err(_) => return Ok(()),
            };
            for (_, link) in peers {
                self.reactor.send(*link, &frame);
            }
            return Ok(());
        };
        for (peer, link) in peers {
            for message in interceptor(MessageDirection::Outbound, *peer, message.clone())? {
                self.reactor.send(*link, &Frame::new(self.rank, &message)?);
            }
        }
        Ok(())
    }

    /// Reads a frame from a peer and returns the messages that it delivers.
    pub(super) fn receive_frame(&mut self, frame: &Frame) -> Result<Vec<Message>, Diagnostic> {
        let messages = frame.decode_message().and_then(|message| {
            self.record_mark(FlightEvent::from_received(&message));
            self.intercept_message(MessageDirection::Inbound, frame.origin(), message)
        });
        messages.or_else(|d| if self.tripwires.is_armed(d.code) { Err(d) } else { Ok(Vec::new()) })
    }

    /// Applies the interceptor to a message between two state machines of this process.
    pub(super) fn intercept_message(
        &mut self,
        direction: MessageDirection,
        peer: u32,
        message: Message,
    ) -> Result<Vec<Message>, Diagnostic> {
        match &mut self.interceptor {
            Some(interceptor) => interceptor(direction, peer, message),
            None => Ok(vec![message]),
        }
    }

    pub(super) fn record_mark(&self, mark: Option<FlightEvent<'_>>) {
        if let (Some(flight), Some(mark)) = (&self.flight, mark) {
            flight.record_event(mark);
        }
    }

    /// Records the last flight marks of a rank that ends by itself.
    pub(super) fn record_exit(&self, failure: Option<&crate::Failure>) {
        self.record_mark(failure.map(FlightEvent::from_failure));
        let status = failure.map_or(0, |f| f.class.exit_code());
        self.record_mark(Some(FlightEvent::Exit { status }));
    }
}
