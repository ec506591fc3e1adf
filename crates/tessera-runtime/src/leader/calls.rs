//! A call's way: planned and checked, sent, ready everywhere, committed, done everywhere, handed on.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Diagnostics;

use super::inbox::Item;
use super::{Action, CallRecord, Finished, Leader, Open, Stage, T0736, Times, Warmup};
use crate::FailureClass;
use crate::census::Census;
use crate::check::{Local, check_context, check_envelope, input_digest};
use crate::decide::{CallPlan, ChunkRequest};
use crate::drift::{T0744, T0759, departs, outputs_differ};
use crate::engine::{T0737, T0752, T0753};
use crate::tripwire::Place;
use crate::wire::{
    self, CallAction, Commit, Context, Done, Envelope, EnvelopeHeader, Message, Ready, Reload, Tensor,
    Tensors, WIRE_VERSION,
};
use crate::worker::{T0707, wants_context};

impl Leader {
    /// Prepares, commits and ends whatever may be now.
    pub(super) fn pump(&mut self, out: &mut Vec<Action>) {
        if self.stage == Stage::Running && !self.stopping {
            if self.warmup == Warmup::Due {
                self.warm_up(out);
            }
            while self.warmup == Warmup::Over && !self.ended() && self.may_prepare() {
                match self.inbox.pop_front() {
                    Some(Item::Chunk { ordinal, request, text }) => {
                        self.prepare_chunk(ordinal, &request, text, out);
                    }
                    Some(Item::Control(action)) => self.prepare_control(action, None, out),
                    Some(Item::Reload(reload)) => {
                        self.prepare_control(CallAction::Reload, Some(reload), out);
                    }
                    None => break,
                }
            }
            if self.ended() {
                return;
            }
            self.ask_context(out);
            self.commit(out);
        }
        let now = self.clock.now();
        let runs = self.open.front().is_some_and(|o| o.committed_ns.is_some());
        match self.stage {
            Stage::Hello { .. } if self.stopping => self.shutdown(now, out),
            Stage::Running if self.stopping && !runs => self.shutdown(now, out),
            Stage::Running if self.no_more && self.inbox.is_empty() && self.open.is_empty() => {
                self.shutdown(now, out);
            }
            _ => {}
        }
        if matches!(self.stage, Stage::Stopping { .. })
            && self.undelivered.is_empty()
            && self.peers.values().all(|p| p.stopped)
        {
            self.stage = Stage::Ended;
            out.push(Action::Report(Message::Finished));
            out.push(Action::Exit(None));
        }
    }

    /// Whether the next wanted call may be sent now: within the bound, and a reload alone.
    fn may_prepare(&self) -> bool {
        let reloads = |o: &Open| o.plan.action == CallAction::Reload;
        match self.inbox.front() {
            None => false,
            Some(Item::Reload(_)) => self.open.is_empty(),
            Some(_) => {
                self.open.len() < self.config.limits.max_outstanding as usize
                    && !self.open.iter().any(reloads)
            }
        }
    }

    fn warm_up(&mut self, out: &mut Vec<Action>) {
        let prepared = self.director.warmup(&self.config.census).and_then(|plan| {
            let inputs = zeros(&self.config.census, &plan)?;
            Ok((plan, inputs))
        });
        match prepared {
            Ok((plan, tensors)) => {
                self.warmup = Warmup::Sent;
                self.send(plan, None, None, tensors, out);
            }
            Err(found) => self.preflight_failed(found, out),
        }
    }

    fn prepare_chunk(
        &mut self,
        ordinal: u64,
        request: &ChunkRequest,
        text: Option<Tensor>,
        out: &mut Vec<Action>,
    ) {
        if text.is_some() {
            self.text = text;
        }
        let plan = match self.director.next(request, &self.config.census) {
            Ok(plan) => plan,
            Err(found) => return self.preflight_failed(found, out),
        };
        let wants_text = plan.meta.as_ref().is_some_and(|m| m.reset_cross);
        let tensors = if wants_text { self.text.iter().cloned().collect() } else { Vec::new() };
        self.send(plan, Some(ordinal), None, Tensors(tensors), out);
    }

    fn prepare_control(&mut self, action: CallAction, reload: Option<Reload>, out: &mut Vec<Action>) {
        match self.director.control(action) {
            Ok(plan) => self.send(plan, None, reload, Tensors::default(), out),
            Err(found) => self.preflight_failed(found, out),
        }
    }

    /// Checks a call, then sends its envelope. Nothing leaves before the last check passed.
    fn send(
        &mut self,
        plan: CallPlan,
        request: Option<u64>,
        reload: Option<Reload>,
        tensors: Tensors,
        out: &mut Vec<Action>,
    ) {
        let envelope = Envelope { header: self.header(&plan), meta: plan.meta.clone(), reload, tensors };
        let local = Local {
            plan: self.config.plan,
            session: self.config.session,
            last_call_id: self.last_call_id,
            cache: &self.checked,
            census: &self.config.census,
            open: self.open.len(),
            tripwires: &self.config.tripwires,
        };
        let after = match check_envelope(&envelope, &local) {
            Ok(after) => after,
            Err(found) => return self.preflight_failed(found, out),
        };
        let inputs = input_digest(&envelope, &Tensors::default());
        let message = Message::Envelope(Box::new(envelope.clone()));
        if let Err(d) = wire::encode(0, &message)
            && self.armed(d.code)
        {
            return self.preflight_failed(vec![d], out);
        }
        self.last_call_id = envelope.header.call_id;
        let digest = after.digest();
        self.checked = after;
        self.open.push_back(Open {
            plan,
            request,
            envelope,
            after: digest,
            inputs,
            context_asked: false,
            context_sent: false,
            discard: false,
            ready: BTreeSet::new(),
            sent_ns: self.clock.now(),
            committed_ns: None,
            times: Times { decided_ns: self.now_ns, ..Times::default() },
            done: BTreeMap::new(),
            fingerprints: BTreeMap::new(),
            output: None,
        });
        out.push(Action::Broadcast(message));
    }

    fn header(&self, plan: &CallPlan) -> EnvelopeHeader {
        EnvelopeHeader {
            version: WIRE_VERSION,
            action: plan.action,
            plan: self.config.plan,
            session: self.config.session,
            call_id: self.last_call_id + 1,
            chunk: plan.chunk,
            cache_epoch: plan.cache_epoch,
            deadline_ms: self.deadline_ms(plan),
        }
    }

    /// Asks for the front call's context once the output that it depends on exists.
    fn ask_context(&mut self, out: &mut Vec<Action>) {
        if let (Some(front), Some((previous, opens_scene))) = (self.open.front_mut(), &self.last_output)
            && wants_context(&front.envelope)
            && !front.context_asked
            && !self.stopping
        {
            front.context_asked = true;
            let (previous, opens_scene) = (previous.clone(), *opens_scene);
            out.push(Action::MakeContext { chunk: front.plan.chunk, previous, opens_scene });
        }
    }

    pub(super) fn context(&mut self, chunk: u32, tensor: Tensor, out: &mut Vec<Action>) {
        if self.stopping {
            return;
        }
        let now = self.clock.now();
        let waits = |o: &&mut Open| o.plan.chunk == chunk && o.context_asked && !o.context_sent;
        let Some(open) = self.open.iter_mut().find(waits) else {
            let text = format!("a context for chunk {chunk}, which does not wait for it");
            self.trip(FailureClass::Protocol, None, &T0707, text, out);
            return;
        };
        let tensors = Tensors(vec![tensor]);
        if let Some(meta) = &open.envelope.meta
            && let Err(found) = check_context(meta, &tensors, &self.config.census, &self.config.tripwires)
        {
            return self.preflight_failed(found, out);
        }
        open.inputs = input_digest(&open.envelope, &tensors);
        open.context_sent = true;
        open.sent_ns = now;
        let call_id = open.call_id();
        out.push(Action::Broadcast(Message::Context(Context { call_id, tensors })));
    }

    pub(super) fn ready(&mut self, rank: u32, r: &Ready, out: &mut Vec<Action>) {
        let Some(open) = self.open.iter().find(|o| o.call_id() == r.call_id) else {
            // The answer to a prepared call that a stop has since cancelled.
            if matches!(self.stage, Stage::Stopping { .. }) && r.call_id <= self.last_call_id {
                return;
            }
            return self.protocol(rank, format!("ready for call {}, which is not open", r.call_id), out);
        };
        if open.committed_ns.is_some() || open.ready.contains(&rank) {
            return self.protocol(rank, format!("a second ready for call {}", r.call_id), out);
        }
        let (inputs, after, chunk) = (open.inputs, open.after, open.plan.chunk);
        for (code, key, sent, here) in
            [(&T0759, "inputs", r.inputs, inputs), (&T0744, "predicted state", r.predicted_state, after)]
        {
            let text = || {
                let id = r.call_id;
                format!("call {id}, chunk {chunk}: {key} of rank {rank} is {sent}, of the leader {here}")
            };
            if sent != here && self.trip(FailureClass::Drift, Some(rank), code, text(), out) {
                return;
            }
        }
        let (now_ns, ranks) = (self.now_ns, self.config.ranks.len());
        if let Some(open) = self.open.iter_mut().find(|o| o.call_id() == r.call_id) {
            open.ready.insert(rank);
            if open.ready.len() == ranks {
                open.times.ready_ns = now_ns;
            }
        }
    }

    fn commit(&mut self, out: &mut Vec<Action>) {
        let room = self.undelivered.len() < self.config.limits.d_out as usize;
        let now = self.clock.now();
        let ranks = self.config.ranks.len();
        if let Some(front) = self.open.front_mut()
            && front.committed_ns.is_none()
            && front.ready.len() == ranks
            && (room || front.request.is_none() || front.discard)
        {
            front.committed_ns = Some(now);
            front.times.committed_ns = self.now_ns;
            for p in self.peers.values_mut() {
                (p.mark, p.marked_ns) = (0, now);
            }
            out.push(Action::Broadcast(Message::Commit(Commit { call_id: front.call_id() })));
        }
    }

    pub(super) fn done(&mut self, rank: u32, d: Done, out: &mut Vec<Action>) {
        if let Stage::Stopping { call_id, .. } = self.stage
            && d.call_id == call_id
        {
            if let Some(p) = self.peers.get_mut(&rank) {
                p.stopped = true;
            }
            return;
        }
        let runs = |o: &&Open| o.call_id() == d.call_id && o.committed_ns.is_some();
        let Some(open) = self.open.front().filter(runs) else {
            let epoch = self.checked.epoch();
            if d.call_id <= self.last_call_id && d.cache_epoch < epoch && self.armed(&T0736) {
                let text = format!(
                    "rank {rank} sent a result of call {} from epoch {}; the epoch is {epoch}",
                    d.call_id, d.cache_epoch
                );
                self.trip(FailureClass::Protocol, Some(rank), &T0736, text, out);
                return;
            }
            return self.protocol(rank, format!("done for call {}, which does not run", d.call_id), out);
        };
        if open.done.contains_key(&rank) {
            return self.protocol(rank, format!("call {} was run a second time", d.call_id), out);
        }
        for (class, code, text) in departures(open, rank, &d) {
            let text = format!("call {}, chunk {}: rank {rank}: {text}", d.call_id, open.plan.chunk);
            if self.armed(code) {
                self.trip(class, Some(rank), code, text, out);
                return;
            }
        }
        let ranks = self.config.ranks.len();
        self.progress += 1;
        if let Some(peer) = self.peers.get_mut(&rank) {
            peer.marked_ns = self.clock.now();
        }
        let Some(open) = self.open.front_mut() else { return };
        open.done.insert(rank, d.observed);
        open.fingerprints.insert(rank, d.fingerprints);
        if let Some(tensor) = d.output.0.into_iter().next() {
            open.output = Some(tensor);
        }
        if open.done.len() == ranks
            && self.agreed(out)
            && let Some(finished) = self.open.pop_front()
        {
            self.finish(finished, out);
        }
    }

    /// Whether the ranks agree about the front call, which all have finished; otherwise the run ends.
    fn agreed(&mut self, out: &mut Vec<Action>) -> bool {
        let Some(open) = self.open.front() else { return false };
        match open.plan.action {
            CallAction::Infer => {
                let Some((odd, text)) = outputs_differ(&open.done, &self.config.silent) else { return true };
                let text = format!("call {}, chunk {}: {text}", open.call_id(), open.plan.chunk);
                !self.trip(FailureClass::Drift, Some(odd), &T0744, text, out)
            }
            CallAction::Reload => {
                let prints = open.fingerprints.clone();
                self.shards_agree(&prints, (FailureClass::Drift, Place::Leader), out)
            }
            _ => true,
        }
    }

    /// Every rank is done: writes the call down and hands its output on.
    fn finish(&mut self, mut open: Open, out: &mut Vec<Action>) {
        let (chunk, epoch) = (open.plan.chunk, open.plan.cache_epoch);
        let call_id = open.call_id();
        if open.plan.action == CallAction::Warmup {
            self.warmup = Warmup::Over;
        }
        let output = open.output.take();
        let served = open.request.filter(|_| !open.discard);
        if let Some(request) = served {
            let ns = open.done.values().next().map(|o| o.phase_ns.clone()).unwrap_or_default();
            let names = open.plan.meta.iter().flat_map(|m| m.phases.iter().map(|p| p.program.clone()));
            let phases = names.zip(ns).collect();
            self.undelivered.push_back(Finished { chunk, epoch, request, phases });
        }
        let (request, discarded, opens_scene) = (open.request, open.discard, open.plan.opens_scene);
        out.push(Action::Record(Box::new(CallRecord {
            call_id,
            request,
            plan: open.plan,
            observed: open.done,
            decided_ns: open.times.decided_ns,
            ready_ns: open.times.ready_ns,
            committed_ns: open.times.committed_ns,
            done_ns: self.now_ns,
            run_ns: self.clock.now() - open.committed_ns.unwrap_or_default(),
            queued_in: self.waiting() as u32,
            queued_out: self.undelivered.len() as u32,
            discarded,
        })));
        let Some(request) = request else { return };
        let Some(latents) = output else {
            let text = format!("chunk {chunk} is done and no rank sent its latents");
            self.trip(FailureClass::Protocol, None, &T0707, text, out);
            return;
        };
        self.last_output = Some((latents.clone(), opens_scene));
        if discarded {
            let why = "a hard cut came while it was computed";
            out.push(Action::Dropped { request, chunk: Some(chunk), epoch, why });
        } else {
            out.push(Action::Deliver { chunk, epoch, latents });
        }
    }

    /// Calls that were prepared and not committed are dropped here and by the ranks.
    fn shutdown(&mut self, now: u64, out: &mut Vec<Action>) {
        self.open.clear();
        let plan = match self.director.control(CallAction::Shutdown) {
            Ok(plan) => plan,
            Err(found) => return self.preflight_failed(found, out),
        };
        let header = self.header(&plan);
        self.last_call_id = header.call_id;
        self.stage = Stage::Stopping { since_ns: now, call_id: header.call_id };
        let envelope = Envelope { header, meta: None, reload: None, tensors: Tensors::default() };
        out.push(Action::Broadcast(Message::Envelope(Box::new(envelope))));
    }
}

/// In what a rank's result departs from its call, the first thing first.
fn departures(open: &Open, rank: u32, d: &Done) -> Vec<(FailureClass, &'static tessera_base::Code, String)> {
    let (action, epoch) = (open.plan.action, open.plan.cache_epoch);
    let mut found = Vec::new();
    if d.cache_epoch != epoch {
        let text = format!("a result of epoch {}, its call is of epoch {epoch}", d.cache_epoch);
        found.push((FailureClass::Protocol, &T0736, text));
    }
    if let Some(text) = departs(open.envelope.meta.as_ref(), open.after, &d.observed) {
        found.push((FailureClass::Drift, &T0744, text));
    }
    let new = d.observed.new_programs;
    if action == CallAction::Warmup {
        let all = open.plan.meta.as_ref().map_or(0, |m| m.phases.len());
        if new as usize != all {
            let text = format!("warmed up {new} programs of {all}");
            found.push((FailureClass::Parity, &T0753, text));
        }
    } else if new > 0 {
        let text = format!("{new} programs were compiled, captured or first run after the warm-up");
        found.push((FailureClass::Drift, &T0752, text));
    }
    if let Some(reload) = &open.envelope.reload
        && d.observed.weights != reload.weights
    {
        let (seen, announced) = (d.observed.weights, reload.weights);
        let text = format!("loaded weights {seen} on rank {rank}, announced were {announced}");
        found.push((FailureClass::Drift, &T0737, text));
    }
    found
}

/// A tensor of zeros for each input of a warm-up.
fn zeros(census: &Census, plan: &CallPlan) -> Result<Tensors, Diagnostics> {
    let phases = plan.meta.as_ref().map_or(&[][..], |m| &m.phases);
    let mut tensors = Vec::new();
    for input in census.inputs(phases) {
        let bytes = input.shape.iter().try_fold(input.dtype.bytes(), |n, d| n.checked_mul(*d));
        let within = bytes.filter(|n| *n <= u64::from(wire::MAX_TENSOR_BYTES)).unwrap_or(0);
        let tensor = Tensor::new(&input.name, input.dtype, &input.shape, vec![0; within as usize]);
        tensors.push(tensor.map_err(|d| vec![d])?);
    }
    Ok(Tensors(tensors))
}
