//! What clients do: join, leave, take control, request changes.

use std::sync::Arc;
use std::time::Instant;

use tessera_base::Diagnostic;

use super::{ChangeOutcome, Client, GuardedState, NewSetting, PendingChange, ServerState};
use crate::client_queue::ClientQueue;
use crate::codes::{T1604, T1605, T1610, T1615};
use crate::metrics::{ChangeLabels, CodeLabels};
use crate::protocol::{
    Change, ClientHello, ControlAction, FrameFormat, MAX_CLIENT_MESSAGE_BYTES, PROTOCOL_VERSION, Pace,
    Refusal, ServerHello, ServerMessage, StreamState,
};
use crate::secret::new_secret;

/// A client that has joined.
#[derive(Debug)]
pub(crate) struct Joined {
    pub(crate) client: u64,
    pub(crate) connection: u64,
    pub(crate) queue: Arc<ClientQueue>,
}

impl ServerState {
    /// Adds a client, or continues one whose connection was lost.
    ///
    /// # Errors
    /// T1605 if there are too many.
    pub(crate) fn join(&self, hello: &ClientHello) -> Result<Joined, Refusal> {
        let now = Instant::now();
        let mut state = self.lock();
        let known = hello.resume.as_deref().and_then(|secret| state.find_client(secret));
        if known.is_none() && state.connected().count() >= self.limits.max_clients {
            let message = format!("{} clients are connected", self.limits.max_clients);
            let full = Diagnostic::error(&T1605, message).with_hint("close one, or raise --max-clients");
            return Err(self.count_refusal(Refusal::from_diagnostic(&full)));
        }
        if hello.format == FrameFormat::Mp4 && self.mp4.is_none() {
            let formats = self.facts.formats.join(", ");
            let absent = Diagnostic::error(&T1615, "this server has no format mp4")
                .with_hint(format!("name one of {formats}"));
            return Err(self.count_refusal(Refusal::from_diagnostic(&absent)));
        }
        let connection = state.next_connection;
        state.next_connection += 1;
        let client = known.unwrap_or(state.next_client);
        state.next_client = state.next_client.max(client + 1);
        let queue = Arc::new(ClientQueue::new(self.max_waiting_frames(hello.format), hello.credits));
        let old = state.clients.remove(&client);
        if let Some(old) = &old {
            let replaced = Diagnostic::error(&T1605, "the client continues on another connection");
            old.queue.end(Refusal::from_diagnostic(&replaced));
        }
        let secret = old.map_or_else(new_secret, |old| old.secret);
        let joined =
            Client { queue: Arc::clone(&queue), format: hello.format, secret, connection, lost: None };
        state.clients.insert(client, joined);
        self.video.iter().for_each(|video| video.forget_credits(client));
        state.lease.mark_connected(client);
        if hello.control {
            state.lease.take(now, client);
        }
        self.greet(&state, now, client);
        self.metrics.clients.set(state.connected().count() as i64);
        self.send_control(&state, now);
        self.send_status(&state);
        drop(state);
        self.pace_changed.notify_one();
        Ok(Joined { client, connection, queue })
    }

    /// Notes that a connection has ended. The client may continue on another one for a while.
    pub(crate) fn leave(&self, joined: &Joined) {
        let now = Instant::now();
        let mut state = self.lock();
        let Some(client) = state.clients.get_mut(&joined.client) else { return };
        if client.connection != joined.connection {
            return;
        }
        client.lost = Some(now);
        state.lease.mark_lost(now, joined.client);
        self.metrics.clients.set(state.connected().count() as i64);
        self.send_status(&state);
        drop(state);
        self.pace_changed.notify_one();
    }

    /// Notes that a client was sent the last frame of a chunk. The pace of the client in control is that of the stream,
    /// if the stream has such a pace.
    pub(crate) fn mark_taken(&self, client: u64, run: u32, request: u64) {
        if self.facts.pace != Pace::Client {
            return;
        }
        let mut state = self.lock();
        if state.run == run && state.lease.holder(Instant::now()) == Some(client) {
            state.pacer.mark_taken(request);
            drop(state);
            self.pace_changed.notify_one();
        }
    }

    /// Does what a client wants about the control.
    ///
    /// # Errors
    /// T1604 if it has none, or another client has it.
    pub(crate) fn change_control(&self, client: u64, action: ControlAction) -> Result<(), Refusal> {
        let now = Instant::now();
        let mut state = self.lock();
        let refuse = |message: String| Err(Refusal::from_diagnostic(&Diagnostic::error(&T1604, message)));
        match action {
            ControlAction::Take => {
                if !state.lease.take(now, client) {
                    let holder = state.lease.holder(now).unwrap_or_default();
                    if let Some(holder) = state.clients.get(&holder) {
                        holder.send(&ServerMessage::ControlWanted { client });
                    }
                    return refuse(format!(
                        "client {holder} controls the stream; it was asked to hand it over"
                    ));
                }
            }
            ControlAction::Release => {
                if !state.lease.release(client) {
                    return refuse("this client does not control the stream".into());
                }
            }
            ControlAction::HandOver(to) => {
                if state.clients.get(&to).is_none_or(|client| client.lost.is_some()) {
                    return refuse(format!("client {to} is not connected"));
                }
                if !state.lease.hand_over(now, client, to) {
                    return refuse("this client does not control the stream".into());
                }
            }
        }
        self.send_control(&state, now);
        Ok(())
    }

    /// Requests a change for a client and returns its number among those of the server. `id` is the number by which the
    /// client knows it on its socket; the HTTP interface gives none, and no client while nobody controls the stream.
    ///
    /// # Errors
    /// T1604 if the client is not in control, T1610 if nothing runs, T0093 if too many changes wait, or why the model
    /// cannot take the prompt.
    pub(crate) fn request_change(
        &self,
        client: Option<u64>,
        id: Option<u64>,
        change: &Change,
    ) -> Result<u64, Refusal> {
        let outcome = self.try_change(client, id, change);
        let labels = |outcome| ChangeLabels { change: change.kind(), outcome };
        let counted = if outcome.is_ok() { "accepted" } else { "refused" };
        self.metrics.changes.get_or_create(&labels(counted)).inc();
        outcome.map_err(|refusal| Refusal { id, ..refusal })
    }

    /// Returns the client with a secret.
    pub(crate) fn find_client(&self, secret: &str) -> Option<u64> {
        self.lock().find_client(secret)
    }

    /// Counts a refusal and returns it.
    pub(crate) fn count_refusal(&self, refusal: Refusal) -> Refusal {
        self.metrics.refused.get_or_create(&CodeLabels { code: refusal.code.into() }).inc();
        refusal
    }

    /// Most frames that wait for a client: those of two chunks. A fragment counts as one.
    fn max_waiting_frames(&self, format: FrameFormat) -> usize {
        match format {
            FrameFormat::Mp4 => 2,
            FrameFormat::Raw | FrameFormat::Jpeg | FrameFormat::None => 2 * self.facts.chunk_frames as usize,
        }
    }

    /// Sends a client its first messages.
    fn greet(&self, state: &GuardedState, now: Instant, id: u64) {
        let Some(client) = state.clients.get(&id) else { return };
        client.send(&ServerMessage::Hello(Box::new(ServerHello {
            version: PROTOCOL_VERSION,
            client: id,
            resume: client.secret.clone(),
            max_message_bytes: MAX_CLIENT_MESSAGE_BYTES,
            max_waiting_frames: self.max_waiting_frames(client.format),
            stream: self.facts.clone(),
            control: state.control_of(now, id),
        })));
        state.alarms.iter().for_each(|alarm| client.send(&ServerMessage::Alarm(alarm.clone())));
    }

    fn try_change(&self, client: Option<u64>, id: Option<u64>, change: &Change) -> Result<u64, Refusal> {
        let (now, owner) = (Instant::now(), client.zip(id));
        let (control, run, number) = {
            let mut state = self.lock();
            self.check_control(&state, now, client)?;
            if let Change::Pause | Change::Resume = change {
                return Ok(self.set_paused(&mut state, owner, change));
            }
            let control = state.control.clone().filter(|_| state.phase == StreamState::Running);
            let Some(control) = control else {
                let name = self.state_of(&state).name();
                let message = format!("the stream is {name}");
                return Err(Refusal::from_diagnostic(&Diagnostic::error(&T1610, message)));
            };
            state.changes += 1;
            (control, state.run, state.changes)
        };
        // A long prompt is encoded here, files of weights are read, and a full socket is waited for.
        let (sent, setting) = match change {
            Change::Prompt(text) => (control.set_prompt(text), NewSetting::Prompt(text.clone())),
            Change::Seed(seed) => (control.set_seed(*seed), NewSetting::Seed(*seed)),
            Change::Steps(list) => (control.set_step_list(list), NewSetting::Steps(list.clone())),
            Change::Bias(bias) => (control.set_bias(*bias), NewSetting::Bias(*bias)),
            Change::Lora(name) => {
                let weights = self.loras.find(name.as_deref()).map_err(|d| Refusal::from_diagnostic(&d))?;
                (control.set_weights(&weights), NewSetting::Weights(weights.to_string()))
            }
            Change::Cut => (control.cut(), NewSetting::Scene),
            Change::Flush => (control.flush(), NewSetting::FlushedScene),
            Change::Pause | Change::Resume => return Ok(number),
        };
        let number_in_run = sent.map_err(|d| Refusal::from_diagnostic(&d))?;
        let kind = change.kind();
        self.accept_change(run, PendingChange { number, number_in_run, owner, kind, setting, since: now })?;
        Ok(number)
    }

    /// Lets a change that was sent to the leader of a run wait for its answer.
    ///
    /// # Errors
    /// T1610 if the run ended while the change was sent: the leader of another run would answer for a change of its own.
    pub(super) fn accept_change(&self, run: u32, change: PendingChange) -> Result<(), Refusal> {
        let mut state = self.lock();
        if state.run != run || state.control.is_none() {
            return Err(change.refuse_after_run());
        }
        if change.setting == NewSetting::FlushedScene {
            // Without one more request, the flush would wait for the chunks that it shall discard.
            state.pacer.admit_one();
        }
        if let Some((client, id)) = change.owner
            && let Some(client) = state.clients.get(&client)
        {
            client.send(&ServerMessage::Accepted { id, change: change.kind });
        }
        state.pending.push(change);
        drop(state);
        self.pace_changed.notify_one();
        Ok(())
    }

    fn check_control(&self, state: &GuardedState, now: Instant, client: Option<u64>) -> Result<(), Refusal> {
        let holder = state.lease.holder(now);
        let message = match (holder, client) {
            (holder, client) if holder == client => return Ok(()),
            (Some(holder), _) => format!("client {holder} controls the stream"),
            (None, _) => "no client controls the stream".to_string(),
        };
        let hint = "take the control first: {\"type\":\"control\",\"action\":\"take\"}";
        Err(Refusal::from_diagnostic(&Diagnostic::error(&T1604, message).with_hint(hint)))
    }

    /// Pauses or resumes the stream, which the leader need not be asked for.
    fn set_paused(&self, state: &mut GuardedState, owner: Option<(u64, u64)>, change: &Change) -> u64 {
        state.is_paused = *change == Change::Pause;
        state.changes += 1;
        let (number, run, request) = (state.changes, state.run, state.pacer.first_held_request());
        state.record_outcome(ChangeOutcome { change: number, run, request });
        if let Some((client, id)) = owner
            && let Some(client) = state.clients.get(&client)
        {
            client.send(&ServerMessage::Effect { id, change: change.kind(), run, request });
        }
        self.send_status(state);
        self.pace_changed.notify_one();
        number
    }
}
