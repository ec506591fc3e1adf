//! One client on the socket `/socket`.

use std::sync::Arc;
use std::time::Instant;

use axum::extract::ws::{Message, Utf8Bytes, WebSocket, close_code};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tessera_base::Diagnostic;
use tokio::time::{MissedTickBehavior, interval, timeout};

use crate::client_queue::{ClientQueue, Outgoing};
use crate::codes::{T1603, T1606, T1607};
use crate::metrics::FormatLabels;
use crate::protocol::{
    ClientHello, ClientMessage, ControlAction, FrameFormat, PROTOCOL_VERSION, Refusal, ServerMessage,
    parse_client_message,
};
use crate::server_state::{Joined, ServerState, to_text};

/// Messages that a client may send at once, and per second after that.
const BURST_MESSAGES: f64 = 100.0;
const MESSAGES_PER_SECOND: f64 = 50.0;
/// Refused messages after which a client is disconnected.
const MAX_EXCESS_MESSAGES: u32 = 200;
/// Pings that a client may leave unanswered.
const MISSED_PINGS: u32 = 3;

type Sender = SplitSink<WebSocket, Message>;
type Receiver = SplitStream<WebSocket>;

/// Serves a client until one side ends the connection.
pub(crate) async fn serve_socket(socket: WebSocket, server: Arc<ServerState>) {
    let (mut sender, mut receiver) = socket.split();
    let joined = match receive_hello(&server, &mut receiver).await {
        Ok(hello) => server.join(&hello).map(|joined| (joined, hello.format)),
        Err(refusal) => Err(server.count_refusal(refusal)),
    };
    let (joined, format) = match joined {
        Ok(joined) => joined,
        Err(refusal) => {
            let farewell = send_farewell(&mut sender, &refusal);
            let _ = timeout(server.limits.handshake, farewell).await;
            return;
        }
    };
    tracing::info!(client = joined.client, "client joined");
    let reason = {
        let writing = write_outgoing(&server, &joined, format, &mut sender);
        tokio::pin!(writing);
        tokio::select! {
            () = &mut writing => None,
            reason = read_messages(&server, &joined, &mut receiver) => {
                if let Some(refusal) = &reason {
                    joined.queue.end(server.count_refusal(refusal.clone()));
                    let _ = timeout(server.limits.handshake, writing).await;
                }
                reason
            }
        }
    };
    let code = reason.map_or("", |refusal| refusal.code);
    tracing::info!(client = joined.client, code, "client left");
    server.leave(&joined);
}

/// Waits for the first message of a client.
async fn receive_hello(server: &ServerState, receiver: &mut Receiver) -> Result<ClientHello, Refusal> {
    let refuse = |message: String| Refusal::from_diagnostic(&Diagnostic::error(&T1603, message));
    let first = timeout(server.limits.handshake, receiver.next()).await;
    let Ok(Some(Ok(Message::Text(text)))) = first else {
        return Err(refuse("the first message was no text, or it did not arrive in time".into()));
    };
    match parse_client_message(&text) {
        Ok(ClientMessage::Hello(hello)) if hello.version == PROTOCOL_VERSION => Ok(hello),
        Ok(ClientMessage::Hello(hello)) => {
            let message =
                format!("version {} of the protocol; this server has {PROTOCOL_VERSION}", hello.version);
            Err(refuse(message))
        }
        Ok(_) => Err(refuse("the first message is no hello".into())),
        Err(what) => Err(refuse(what)),
    }
}

/// Sends what waits for a client, and pings, until the connection ends.
async fn write_outgoing(server: &ServerState, joined: &Joined, format: FrameFormat, sender: &mut Sender) {
    let mut pings = interval(server.limits.ping);
    pings.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_initialised = false;
    loop {
        let outgoing = tokio::select! {
            outgoing = joined.queue.next() => outgoing,
            _ = pings.tick() => {
                if !send(server, sender, Message::Ping(Default::default())).await {
                    return;
                }
                continue;
            }
        };
        let is_sent = match outgoing {
            Outgoing::Message(text) => send(server, sender, Message::Text(text.into())).await,
            Outgoing::Frame(frame) => {
                let Some(message) = frame.message(format) else { continue };
                if !is_initialised && let Some(first) = frame.initialisation(format) {
                    if !send(server, sender, Message::Binary(first)).await {
                        return;
                    }
                    is_initialised = true;
                }
                let is_sent = send(server, sender, Message::Binary(message)).await;
                if is_sent {
                    server.metrics.frames_sent.get_or_create(&FormatLabels { format: format.name() }).inc();
                    let header = frame.header();
                    if header.is_last {
                        server.mark_taken(joined.client, header.run, header.request);
                    }
                }
                is_sent
            }
            Outgoing::End(refusal) => {
                let _ = timeout(server.limits.send, send_farewell(sender, &refusal)).await;
                return;
            }
        };
        if !is_sent {
            return;
        }
    }
}

/// Sends a message. Returns false if the client is gone or takes nothing.
async fn send(server: &ServerState, sender: &mut Sender, message: Message) -> bool {
    match timeout(server.limits.send, sender.send(message)).await {
        Ok(sent) => sent.is_ok(),
        Err(_) => {
            let stalled = Diagnostic::error(&T1607, "the client takes nothing");
            server.count_refusal(Refusal::from_diagnostic(&stalled));
            false
        }
    }
}

async fn send_farewell(sender: &mut Sender, refusal: &Refusal) {
    let bye = Utf8Bytes::from(to_text(&ServerMessage::Bye(refusal.clone())));
    // A client that is gone needs no farewell.
    let _ = sender.send(Message::Text(bye)).await;
    let _ = sender.send(Message::Close(None)).await;
}

/// Handles the messages of a client. Returns why its connection is to end; `None` if the client ended it.
async fn read_messages(server: &ServerState, joined: &Joined, receiver: &mut Receiver) -> Option<Refusal> {
    let silence = server.limits.ping * MISSED_PINGS;
    let mut budget = MessageBudget::new(Instant::now());
    loop {
        let message = match timeout(silence, receiver.next()).await {
            Ok(Some(Ok(message))) => message,
            Ok(Some(Err(e))) => {
                // Too long a message, or bytes that are no WebSocket.
                return Some(Refusal::from_diagnostic(&Diagnostic::error(&T1603, e.to_string())));
            }
            Ok(None) => return None,
            Err(_) => {
                let message = format!("the client was silent for {} s", silence.as_secs_f64());
                return Some(Refusal::from_diagnostic(&Diagnostic::error(&T1607, message)));
            }
        };
        let text = match message {
            Message::Text(text) => text,
            Message::Close(frame) => {
                // A page that is reloaded or closed says 1001, and may return.
                if frame.is_some_and(|frame| frame.code == close_code::NORMAL) {
                    // It may have had no control.
                    let _ = server.change_control(joined.client, ControlAction::Release);
                }
                return None;
            }
            Message::Ping(_) | Message::Pong(_) => continue,
            Message::Binary(bytes) => {
                // Credits limit the frames that are taken, and the budget those that are refused.
                let Err(refusal) = server.take_video_frame(joined, &bytes) else { continue };
                if refusal.code == T1603.id {
                    return Some(refusal);
                }
                let refusal = budget.check().map_or(refusal, |excess| excess);
                if budget.is_exhausted() {
                    return Some(refusal);
                }
                refuse(server, &joined.queue, refusal);
                continue;
            }
        };
        if let Some(excess) = budget.check() {
            if budget.is_exhausted() {
                return Some(excess);
            }
            refuse(server, &joined.queue, excess);
            continue;
        }
        match parse_client_message(&text) {
            Ok(message) => handle_message(server, joined, message),
            Err(what) => return Some(Refusal::from_diagnostic(&Diagnostic::error(&T1603, what))),
        }
    }
}

fn handle_message(server: &ServerState, joined: &Joined, message: ClientMessage) {
    let outcome = match message {
        ClientMessage::Hello(_) => {
            let again = Diagnostic::error(&T1603, "a second hello");
            Err(Refusal::from_diagnostic(&again))
        }
        ClientMessage::Credits { frames } => {
            joined.queue.add_credits(frames);
            Ok(())
        }
        ClientMessage::Control { action } => server.change_control(joined.client, action),
        ClientMessage::Change { id, change } => {
            // It may encode a prompt, and wait for the socket to the leader.
            tokio::task::block_in_place(|| server.request_change(Some(joined.client), Some(id), &change))
                .map(|_| ())
        }
    };
    if let Err(refusal) = outcome {
        refuse(server, &joined.queue, refusal);
    }
}

fn refuse(server: &ServerState, queue: &ClientQueue, refusal: Refusal) {
    queue.push_message(to_text(&ServerMessage::Refused(server.count_refusal(refusal))));
}

/// How many messages a client may send now.
#[derive(Debug)]
struct MessageBudget {
    left: f64,
    last: Instant,
    /// Messages beyond the limit.
    excess: u32,
}

impl MessageBudget {
    fn new(now: Instant) -> MessageBudget {
        MessageBudget { left: BURST_MESSAGES, last: now, excess: 0 }
    }

    /// Counts a message that arrives now. Returns why it is refused, if it is beyond the limit.
    fn check(&mut self) -> Option<Refusal> {
        let excess = || Refusal::from_diagnostic(&Diagnostic::error(&T1606, "more messages than the limit"));
        (!self.take(Instant::now())).then(excess)
    }

    /// Whether the client has sent so many messages beyond the limit that its connection ends.
    fn is_exhausted(&self) -> bool {
        self.excess > MAX_EXCESS_MESSAGES
    }

    /// Counts a message. Returns whether it is within the limit.
    fn take(&mut self, now: Instant) -> bool {
        let earned = (now - self.last).as_secs_f64() * MESSAGES_PER_SECOND;
        self.left = (self.left + earned).min(BURST_MESSAGES);
        self.last = now;
        let is_within = self.left >= 1.0;
        if is_within {
            self.left -= 1.0;
        } else {
            self.excess += 1;
        }
        is_within
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_budget_allows_a_burst_and_then_a_rate() {
        let now = Instant::now();
        let mut budget = MessageBudget::new(now);
        assert_eq!((0..150).filter(|_| budget.take(now)).count(), 100);
        assert_eq!(budget.excess, 50);
        let later = now + Duration::from_secs(1);
        assert_eq!((0..150).filter(|_| budget.take(later)).count(), 50);
    }
}
