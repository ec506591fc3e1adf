//! The stages of a call: planned and checked, sent, ready on every rank, committed, done on every
//! rank, delivered.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::Diagnostics;

use super::inbox::InboxItem;
use super::{
    Action, CallRecord, CallTimes, ChunkStart, FinishedChunk, Leader, LeaderStage, OpenCall, RecordEntry,
    WarmupStage,
};
use crate::FailureClass;
use crate::array_director::ArrayRequest;
use crate::codes::{T0707, T0736, T0737, T0744, T0752, T0753, T0759};
use crate::director::{CallPlan, ChunkRequest};
use crate::drift::{find_deviation, find_output_mismatch};
use crate::engine::MediaJob;
use crate::envelope_check::{LocalState, check_context, check_envelope, input_digest};
use crate::program_index::ProgramIndex;
use crate::token_director::TokenRequest;
use crate::tripwire::CheckSite;
use crate::wire::{
    self, CallAction, CallContext, CallMeta, Commit, Done, Envelope, EnvelopeHeader, Message, Ready, Reload,
    Tensor, Tensors, WIRE_VERSION,
};
use crate::worker::needs_context;

impl Leader {
    /// Prepares, commits and finishes every call that can proceed now.
    pub(super) fn advance_calls(&mut self) {
        if self.stage == LeaderStage::Running && !self.stopping {
            if self.warmup == WarmupStage::Due {
                self.send_warmup();
            }
            while self.warmup == WarmupStage::Finished && !self.has_ended() && self.can_prepare() {
                match self.inbox.pop_front() {
                    Some(InboxItem::Chunk { ordinal, request, text, start }) => {
                        self.prepare_chunk(ordinal, &request, text, start);
                    }
                    Some(InboxItem::Tokens { ordinal, request }) => self.prepare_tokens(ordinal, request),
                    Some(InboxItem::Arrays { ordinal, request }) => self.prepare_arrays(ordinal, request),
                    Some(InboxItem::Control(action)) => self.prepare_control(action, None),
                    Some(InboxItem::Reload(reload)) => {
                        self.prepare_control(CallAction::Reload, Some(reload));
                    }
                    None => break,
                }
            }
            if self.has_ended() {
                return;
            }
            self.request_context();
            self.commit_front();
        }
        let now = self.clock.now_ns();
        let runs = self.open_calls.front().is_some_and(|o| o.committed_ns.is_some());
        match self.stage {
            LeaderStage::Hello { .. } if self.stopping => self.send_shutdown(now),
            LeaderStage::Running if self.stopping && !runs => self.send_shutdown(now),
            LeaderStage::Running
                if self.no_more_requests && self.inbox.is_empty() && self.open_calls.is_empty() =>
            {
                self.send_shutdown(now);
            }
            _ => {}
        }
        if matches!(self.stage, LeaderStage::Stopping { .. })
            && self.undelivered.is_empty()
            && self.peers.values().all(|p| p.answered_shutdown)
        {
            self.stage = LeaderStage::Ended;
            self.actions.push(Action::Report(Message::Finished));
            self.actions.push(Action::Exit(None));
        }
    }

    /// Whether the next queued call may be sent now: the number of open calls is bounded, and a
    /// reload runs alone.
    fn can_prepare(&self) -> bool {
        let reloads = |o: &OpenCall| o.plan.action == CallAction::Reload;
        match self.inbox.front() {
            None => false,
            Some(InboxItem::Reload(_)) => self.open_calls.is_empty(),
            Some(_) => {
                self.open_calls.len() < self.config.limits.max_outstanding as usize
                    && !self.open_calls.iter().any(reloads)
            }
        }
    }

    fn send_warmup(&mut self) {
        let prepared = self.planner.plan_warmup(&self.config.programs).and_then(|plan| {
            let inputs = zero_inputs(&self.config.programs, &plan)?;
            Ok((plan, inputs))
        });
        match prepared {
            Ok((plan, tensors)) => {
                self.warmup = WarmupStage::Sent;
                self.send_call(plan, None, None, tensors);
            }
            Err(found) => self.preflight_failed(found),
        }
    }

    fn prepare_chunk(
        &mut self,
        ordinal: u64,
        request: &ChunkRequest,
        text: Option<Tensor>,
        start: ChunkStart,
    ) {
        if text.is_some() {
            self.prompt_embedding = text;
        }
        let (given, video_step) = match start {
            ChunkStart::Drawn => (None, None),
            ChunkStart::Noise(noise) => (Some(noise), None),
            ChunkStart::Video { latents, step } => (Some(latents), Some(step)),
            ChunkStart::Unavailable(d) => return self.fail_request(&d),
        };
        let plan = match self.planner.plan_chunk(request, video_step, &self.config.programs) {
            Ok(plan) => plan,
            Err(found) => return self.preflight_failed(found),
        };
        let wants_text = plan.meta.as_ref().is_some_and(CallMeta::replaces_prompt);
        let text = self.prompt_embedding.as_ref().filter(|_| wants_text).cloned();
        self.send_call(plan, Some(ordinal), None, Tensors(text.into_iter().chain(given).collect()));
    }

    fn prepare_tokens(&mut self, ordinal: u64, request: TokenRequest) {
        match self.planner.plan_tokens(&request, &self.config.programs) {
            Ok(plan) => self.send_call(plan, Some(ordinal), None, request.inputs),
            Err(found) => self.preflight_failed(found),
        }
    }

    fn prepare_arrays(&mut self, ordinal: u64, request: ArrayRequest) {
        match self.planner.plan_arrays(&request.phase, &self.config.programs) {
            Ok(plan) => self.send_call(plan, Some(ordinal), None, request.inputs),
            Err(found) => self.preflight_failed(found),
        }
    }

    fn prepare_control(&mut self, action: CallAction, reload: Option<Reload>) {
        match self.planner.plan_control_call(action) {
            Ok(plan) => self.send_call(plan, None, reload, Tensors::default()),
            Err(found) => self.preflight_failed(found),
        }
    }

    /// Checks a call and sends its envelope. Nothing is sent before the last check passes.
    fn send_call(&mut self, plan: CallPlan, request: Option<u64>, reload: Option<Reload>, tensors: Tensors) {
        let envelope = Envelope { header: self.next_header(&plan), meta: plan.meta.clone(), reload, tensors };
        let local = LocalState {
            plan: self.config.plan,
            session: self.config.session,
            last_call_id: self.last_call_id,
            state: &self.preflight_state,
            session_spec: &self.config.session_spec,
            programs: &self.config.programs,
            open_calls: self.open_calls.len(),
            tripwires: &self.config.tripwires,
        };
        let after = match check_envelope(&envelope, &local) {
            Ok(after) => after,
            Err(found) => return self.preflight_failed(found),
        };
        let inputs = input_digest(&envelope, &Tensors::default());
        let message = Message::Envelope(Box::new(envelope.clone()));
        if let Err(d) = wire::encode(0, &message)
            && self.is_armed(d.code)
        {
            return self.preflight_failed(vec![d]);
        }
        self.last_call_id = envelope.header.call_id;
        let digest = after.state_digest();
        self.preflight_state = after;
        self.open_calls.push_back(OpenCall {
            plan,
            request,
            envelope,
            predicted_state: digest,
            inputs,
            context_requested: false,
            context_sent: false,
            discard: false,
            ready: BTreeSet::new(),
            sent_ns: self.clock.now_ns(),
            committed_ns: None,
            times: CallTimes { decided_ns: self.now_ns, ..CallTimes::default() },
            done: BTreeMap::new(),
            fingerprints: BTreeMap::new(),
            outputs: BTreeMap::new(),
        });
        self.actions.push(Action::Broadcast(message));
    }

    fn next_header(&self, plan: &CallPlan) -> EnvelopeHeader {
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

    /// Requests the front call's context once the output that it depends on exists.
    fn request_context(&mut self) {
        if let (Some(front), Some((previous, opens_scene))) =
            (self.open_calls.front_mut(), &self.last_outputs)
            && needs_context(&front.envelope)
            && !front.context_requested
            && !self.stopping
        {
            front.context_requested = true;
            let (previous, opens_scene) = (previous.clone(), *opens_scene);
            let job = MediaJob::Context { chunk: front.plan.chunk, previous, opens_scene };
            self.actions.push(Action::Media(job));
        }
    }

    pub(super) fn handle_context(&mut self, chunk: u32, tensor: Tensor) {
        if self.stopping {
            return;
        }
        let now = self.clock.now_ns();
        let waits = |o: &&mut OpenCall| o.plan.chunk == chunk && o.context_requested && !o.context_sent;
        let Some(open) = self.open_calls.iter_mut().find(waits) else {
            let text = format!("a context arrived for chunk {chunk}, which does not wait for one");
            self.trip_if_armed(FailureClass::Protocol, None, &T0707, text);
            return;
        };
        let tensors = Tensors(vec![tensor]);
        if let Some(meta) = &open.envelope.meta
            && let Err(found) = check_context(meta, &tensors, &self.config.programs, &self.config.tripwires)
        {
            return self.preflight_failed(found);
        }
        open.inputs = input_digest(&open.envelope, &tensors);
        open.context_sent = true;
        open.sent_ns = now;
        let call_id = open.call_id();
        self.actions.push(Action::Broadcast(Message::Context(CallContext { call_id, tensors })));
    }

    pub(super) fn handle_ready(&mut self, rank: u32, r: &Ready) {
        let Some(open) = self.open_calls.iter().find(|o| o.call_id() == r.call_id) else {
            // This rank answers a prepared call that a stop has cancelled in the meantime.
            if matches!(self.stage, LeaderStage::Stopping { .. }) && r.call_id <= self.last_call_id {
                return;
            }
            return self.protocol_violation(rank, format!("ready for call {}, which is not open", r.call_id));
        };
        if open.committed_ns.is_some() || open.ready.contains(&rank) {
            return self.protocol_violation(rank, format!("a second ready for call {}", r.call_id));
        }
        let (inputs, after, chunk) = (open.inputs, open.predicted_state, open.plan.chunk);
        for (code, key, sent, here) in
            [(&T0759, "inputs", r.inputs, inputs), (&T0744, "predicted state", r.predicted_state, after)]
        {
            let text = || {
                let id = r.call_id;
                format!("call {id}, chunk {chunk}: {key} of rank {rank} is {sent}, the leader has {here}")
            };
            if sent != here && self.trip_if_armed(FailureClass::Drift, Some(rank), code, text()) {
                return;
            }
        }
        let (now_ns, ranks) = (self.now_ns, self.config.ranks.len());
        if let Some(open) = self.open_calls.iter_mut().find(|o| o.call_id() == r.call_id) {
            open.ready.insert(rank);
            if open.ready.len() == ranks {
                open.times.ready_ns = now_ns;
            }
        }
    }

    fn commit_front(&mut self) {
        let has_room = self.undelivered.len() < self.config.limits.d_out as usize;
        let now = self.clock.now_ns();
        let ranks = self.config.ranks.len();
        if let Some(front) = self.open_calls.front_mut()
            && front.committed_ns.is_none()
            && front.ready.len() == ranks
            && (has_room || front.request.is_none() || front.discard)
        {
            front.committed_ns = Some(now);
            front.times.committed_ns = self.now_ns;
            for p in self.peers.values_mut() {
                (p.progress, p.last_progress_ns) = (0, now);
            }
            self.actions.push(Action::Broadcast(Message::Commit(Commit { call_id: front.call_id() })));
        }
    }

    pub(super) fn handle_done(&mut self, rank: u32, d: Done) {
        if let LeaderStage::Stopping { call_id, .. } = self.stage
            && d.call_id == call_id
        {
            if let Some(p) = self.peers.get_mut(&rank) {
                p.answered_shutdown = true;
            }
            return;
        }
        let runs = |o: &&OpenCall| o.call_id() == d.call_id && o.committed_ns.is_some();
        let Some(open) = self.open_calls.front().filter(runs) else {
            let epoch = self.preflight_state.epoch();
            if d.call_id <= self.last_call_id && d.cache_epoch < epoch && self.is_armed(&T0736) {
                let text = format!(
                    "rank {rank} sent a result of call {} from epoch {}; the epoch is {epoch}",
                    d.call_id, d.cache_epoch
                );
                self.trip_if_armed(FailureClass::Protocol, Some(rank), &T0736, text);
                return;
            }
            return self
                .protocol_violation(rank, format!("done for call {}, which is not running", d.call_id));
        };
        if open.done.contains_key(&rank) {
            return self.protocol_violation(rank, format!("call {} ran a second time", d.call_id));
        }
        let (chunk, deviations) = (open.plan.chunk, find_deviations(open, rank, &d));
        for (class, code, text) in deviations {
            let text = format!("call {}, chunk {chunk}: rank {rank}: {text}", d.call_id);
            if self.trip_if_armed(class, Some(rank), code, text) {
                return;
            }
        }
        let ranks = self.config.ranks.len();
        self.progress += 1;
        if let Some(peer) = self.peers.get_mut(&rank) {
            peer.last_progress_ns = self.clock.now_ns();
        }
        let Some(open) = self.open_calls.front_mut() else { return };
        open.done.insert(rank, d.observed);
        open.fingerprints.insert(rank, d.fingerprints);
        if !d.output.0.is_empty() {
            open.outputs.insert(rank, d.output);
        }
        if open.done.len() == ranks
            && self.ranks_agree()
            && let Some(finished) = self.open_calls.pop_front()
        {
            self.finish_call(finished);
        }
    }

    /// Whether the ranks agree on the front call, which all have finished. If they do not agree,
    /// the run fails.
    fn ranks_agree(&mut self) -> bool {
        let Some(open) = self.open_calls.front() else { return false };
        match open.plan.action {
            CallAction::Infer => {
                let Some((outlier, text)) = find_output_mismatch(&open.done, &self.config.output_groups)
                else {
                    return true;
                };
                let text = format!("call {}, chunk {}: {text}", open.call_id(), open.plan.chunk);
                !self.trip_if_armed(FailureClass::Drift, outlier, &T0744, text)
            }
            CallAction::Reload => {
                let fingerprints = open.fingerprints.clone();
                self.shards_agree(&fingerprints, (FailureClass::Drift, CheckSite::Leader))
            }
            _ => true,
        }
    }

    /// Records a call that every rank has finished and delivers its output.
    fn finish_call(&mut self, mut open: OpenCall) {
        let (chunk, epoch) = (open.plan.chunk, open.plan.cache_epoch);
        let call_id = open.call_id();
        if open.plan.action == CallAction::Warmup {
            self.warmup = WarmupStage::Finished;
        }
        let outputs = std::mem::take(&mut open.outputs).into_values().flat_map(|sent| sent.0);
        let outputs = Tensors(outputs.collect());
        let served = open.request.filter(|_| !open.discard);
        if let Some(request) = served {
            let ns = open.done.values().next().map(|o| o.phase_ns.clone()).unwrap_or_default();
            let names = open.plan.meta.iter().flat_map(|m| m.phases.iter().map(|p| p.program.clone()));
            let phases = names.zip(ns).collect();
            self.undelivered.push_back(FinishedChunk {
                chunk,
                epoch,
                request,
                decided_ns: open.times.decided_ns,
                phases,
            });
        }
        let (request, discarded, opens_scene) = (open.request, open.discard, open.plan.opens_scene);
        let record = CallRecord {
            call_id,
            request,
            plan: open.plan,
            observed: open.done,
            decided_ns: open.times.decided_ns,
            ready_ns: open.times.ready_ns,
            committed_ns: open.times.committed_ns,
            done_ns: self.now_ns,
            run_ns: self.clock.now_ns() - open.committed_ns.unwrap_or_default(),
            queued_in: self.waiting_chunks() as u32,
            queued_out: self.undelivered.len() as u32,
            discarded,
        };
        self.add_entry(RecordEntry::Call(Box::new(record)));
        let Some(request) = request else { return };
        if outputs.0.is_empty() {
            let text = format!("chunk {chunk} is done, but no rank sent its latents");
            self.trip_if_armed(FailureClass::Protocol, None, &T0707, text);
            return;
        }
        self.last_outputs = Some((outputs.clone(), opens_scene));
        if discarded {
            let why = "a hard cut came while the chunk was computed";
            self.add_entry(RecordEntry::Dropped { request, chunk: Some(chunk), epoch, why });
        } else {
            self.actions.push(Action::Media(MediaJob::Deliver { chunk, epoch, outputs, opens_scene }));
        }
    }

    /// Sends the shutdown. The leader and the ranks drop calls that are prepared but not committed.
    fn send_shutdown(&mut self, now: u64) {
        self.open_calls.clear();
        let plan = match self.planner.plan_control_call(CallAction::Shutdown) {
            Ok(plan) => plan,
            Err(found) => return self.preflight_failed(found),
        };
        let header = self.next_header(&plan);
        self.last_call_id = header.call_id;
        self.stage = LeaderStage::Stopping { since_ns: now, call_id: header.call_id };
        let envelope = Envelope { header, meta: None, reload: None, tensors: Tensors::default() };
        self.actions.push(Action::Broadcast(Message::Envelope(Box::new(envelope))));
    }
}

/// Returns every deviation of a rank's result from its call, most important first.
fn find_deviations(
    open: &OpenCall,
    rank: u32,
    d: &Done,
) -> Vec<(FailureClass, &'static tessera_base::Code, String)> {
    let (action, epoch) = (open.plan.action, open.plan.cache_epoch);
    let mut found = Vec::new();
    if d.cache_epoch != epoch {
        let text = format!("a result of epoch {}, its call is of epoch {epoch}", d.cache_epoch);
        found.push((FailureClass::Protocol, &T0736, text));
    }
    if let Some(text) = find_deviation(open.envelope.meta.as_ref(), open.predicted_state, &d.observed) {
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
        let (loaded, announced) = (d.observed.weights, reload.weights);
        let text = format!("loaded weights {loaded} on rank {rank}, the leader announced {announced}");
        found.push((FailureClass::Drift, &T0737, text));
    }
    found
}

/// Creates a tensor of zeros for each input that a warm-up carries.
fn zero_inputs(programs: &ProgramIndex, plan: &CallPlan) -> Result<Tensors, Diagnostics> {
    let phases = plan.meta.as_ref().map_or(&[][..], |m| &m.phases);
    let mut tensors = Vec::new();
    for input in programs.warmup_inputs(phases) {
        let bytes = input.shape.iter().try_fold(input.dtype.element_bytes(), |n, d| n.checked_mul(*d));
        let within = bytes.filter(|n| *n <= u64::from(wire::MAX_TENSOR_BYTES)).unwrap_or(0);
        let tensor = Tensor::new(&input.name, input.dtype, &input.shape, vec![0; within as usize]);
        tensors.push(tensor.map_err(|d| vec![d])?);
    }
    Ok(Tensors(tensors))
}
