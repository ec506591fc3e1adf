//! Whether an envelope may run here. The leader asks before the first byte leaves, each worker before it
//! answers ready; both ask this one function.

use std::fmt::Display;

use tessera_base::{Code, Diagnostic, Diagnostics};

use crate::Digest;
use crate::cache::{Cache, T0712, Transition};
use crate::census::{Census, InputFacts, PhaseKind};
use crate::decide::warmup_meta;
use crate::tripwire::Tripwires;
use crate::wire::{CallAction, CallMeta, Envelope, MAX_PHASES, T0701, Tensors, WIRE_VERSION};

/// An id out of turn.
pub(crate) static T0730: Code = Code {
    id: "T0730",
    title: "a call id is out of turn",
    page: "Call ids grow by one with every envelope of a session, whatever the action. An id that repeats or falls \
is an envelope handled twice or a sender that went back in time; a gap is an envelope that was lost. Either way the \
ranks no longer agree on which call this is, so it is refused before any collective. The message gives both ids.",
};
/// Another plan or session.
pub(crate) static T0731: Code = Code {
    id: "T0731",
    title: "an envelope belongs to another plan or session",
    page: "Every envelope names the digest of the sealed plan and the session under which it runs. This rank holds \
another one: it was started from another plan folder, or a process of an earlier run still writes to this socket. \
Stop every rank, check that all read the same plan, and start again.",
};
/// Fields that do not fit together.
pub(crate) static T0732: Code = Code {
    id: "T0732",
    title: "an envelope's fields are missing or contradict each other",
    page: "The table in docs/reference/envelope.md says which field an envelope needs when. The message names the \
field, what it says and what the rest of the envelope requires. The leader checks the same before it sends, so on a \
worker this means that leader and worker are different builds, or that the envelope was made by something else.",
};
/// An action out of place.
pub(crate) static T0733: Code = Code {
    id: "T0733",
    title: "an action that this rank refuses at this place",
    page: "WARMUP is the first call of a session and comes once. RELOAD exchanges the weights on every rank between \
the same two calls, so it comes when no other call is open and nothing follows before it is done. This rank was sent one \
of them at another place: the leader lost its own order, or the message was made by something else.",
};
/// Counts that the seal contradicts.
pub(crate) static T0734: Code = Code {
    id: "T0734",
    title: "an envelope's counts differ from its phases",
    page: "An envelope says how many generator passes and collectives the call has and which trace they leave. The \
same follows from its list of phases and the sealed plan, and it is something else. A rank that ran the phases would \
issue another number of collectives than its peers wait for, so it refuses.",
};
/// Tensors that the call needs or does not.
pub(crate) static T0735: Code = Code {
    id: "T0735",
    title: "a call's tensors are not those that its programs read",
    page: "The programs of a call declare the tensors that they read. Each must arrive once, with that dtype and \
shape, in that order; nothing else may. `text` comes in the envelope of a call that replaces the text keys and \
values; `context` follows in a message of its own when the call recomputes.\n\nA recompute call without its context \
is refused: falling back to an older context would produce a picture that no other rank agrees with.",
};

/// The tensor that follows an envelope in a message of its own.
pub const CONTEXT: &str = "context";

/// What a rank knows by itself when an envelope arrives.
#[derive(Debug, Clone, Copy)]
pub struct Local<'a> {
    /// Digest of the plan it holds.
    pub plan: Digest,
    /// Its session.
    pub session: u64,
    /// Id of the last envelope.
    pub last_call_id: u64,
    /// Cache state after the last envelope.
    pub cache: &'a Cache,
    /// The seal's programs.
    pub census: &'a Census,
    /// Calls that are open here.
    pub open: usize,
    /// What is not checked.
    pub tripwires: &'a Tripwires,
}

/// The cache state after the call, or everything that is wrong with it. The context tensor is checked by
/// [`check_context`] when it comes.
pub fn check_envelope(e: &Envelope, local: &Local<'_>) -> Result<Cache, Diagnostics> {
    let h = &e.header;
    if h.version != WIRE_VERSION && local.tripwires.armed(&T0701) {
        return Err(vec![both(&T0701, "envelope version", h.version, WIRE_VERSION)]);
    }
    let mut found = Vec::new();
    if h.plan != local.plan {
        found.push(both(&T0731, "plan digest", h.plan, local.plan));
    }
    if h.session != local.session {
        found.push(both(&T0731, "session", h.session, local.session));
    }
    if local.last_call_id.checked_add(1) != Some(h.call_id) {
        let what = if h.call_id <= local.last_call_id { "repeated or earlier call_id" } else { "call_id" };
        found.push(both(&T0730, what, h.call_id, format!("last {}", local.last_call_id)));
    }
    if h.deadline_ms == 0 {
        found.push(Diagnostic::error(&T0732, "deadline_ms is 0: every wait has a limit"));
    }
    if h.chunk != local.cache.chunk() {
        found.push(both(&T0712, "chunk", h.chunk, local.cache.chunk()));
    }
    let mut after = local.cache.clone();
    let action = h.action;
    found.extend(payload(e));
    found.extend(out_of_place(action, local));
    match (action, &e.meta) {
        (CallAction::Infer, Some(meta)) => infer(meta, &e.tensors, local, &mut after, &mut found),
        (CallAction::Warmup, Some(meta)) => warmup(meta, &e.tensors, local, &mut found),
        (CallAction::Reset | CallAction::Reload, _) => {
            if let Err(d) = after.apply(Transition::Reset) {
                found.push(d);
            }
        }
        _ => {}
    }
    if h.cache_epoch != after.epoch() {
        found.push(both(&T0712, "cache_epoch", h.cache_epoch, after.epoch()));
    }
    local.tripwires.filter(&mut found);
    if found.is_empty() { Ok(after) } else { Err(found) }
}

/// Whether the tensors that follow an envelope are those that its call waits for.
pub fn check_context(
    meta: &CallMeta,
    tensors: &Tensors,
    census: &Census,
    tripwires: &Tripwires,
) -> Result<(), Diagnostics> {
    let inputs = census.inputs(&meta.phases);
    let late: Vec<_> = inputs.into_iter().filter(|i| i.name == CONTEXT).collect();
    let mut found = manifest(&late, tensors);
    tripwires.filter(&mut found);
    if found.is_empty() { Ok(()) } else { Err(found) }
}

/// Digest of a call's header, meta and tensors: what must be the same on every rank.
#[must_use]
pub fn input_digest(e: &Envelope, context: &Tensors) -> Digest {
    Digest::of_value("inputs", &(&e.header, &e.meta, &e.reload, e.tensors.specs(), context.specs()))
}

/// Whether the envelope carries the payload of its action and no other.
fn payload(e: &Envelope) -> Diagnostics {
    let action = e.header.action;
    let with_meta = matches!(action, CallAction::Infer | CallAction::Warmup);
    let mut found = Vec::new();
    let mut check = |what: &str, is: bool, must: bool| {
        if is != must {
            let words = if must { "lacks its" } else { "carries a" };
            let text = format!("a {} envelope {words} {what}", action.name());
            found.push(Diagnostic::error(&T0732, text));
        }
    };
    check("meta", e.meta.is_some(), with_meta);
    check("reload", e.reload.is_some(), action == CallAction::Reload);
    if !with_meta {
        check("tensor", !e.tensors.0.is_empty(), false);
    }
    found
}

/// Whether the action may come now.
fn out_of_place(action: CallAction, local: &Local<'_>) -> Option<Diagnostic> {
    let refuse = |what: &str, is: String| {
        Some(Diagnostic::error(&T0733, format!("{} {what}", action.name())).at("this rank", is))
    };
    match action {
        CallAction::Warmup if local.last_call_id != 0 => {
            refuse("is not the first call", format!("last call {}", local.last_call_id))
        }
        CallAction::Reload if local.open > 0 => {
            refuse("came while other calls are open", format!("{} open calls", local.open))
        }
        _ => None,
    }
}

fn warmup(m: &CallMeta, tensors: &Tensors, local: &Local<'_>, found: &mut Diagnostics) {
    let want = match warmup_meta(local.census, local.cache) {
        Ok(want) => want,
        Err(ds) => return found.extend(ds),
    };
    if m.phases != want.phases {
        found.push(
            Diagnostic::error(&T0732, "phases is not every program of the plan, once each")
                .at("envelope", format!("{} phases", m.phases.len()))
                .at("this rank", format!("{} programs", want.phases.len())),
        );
    }
    counts(m, local.census, found);
    if m.predicted_state != want.predicted_state {
        found.push(both(&T0712, "predicted_state", m.predicted_state, want.predicted_state));
    }
    let settings = |m: &CallMeta| CallMeta {
        phases: Vec::new(),
        expected_generator_calls: 0,
        expected_collectives: 0,
        expected_trace_digest: Digest::default(),
        predicted_state: Digest::default(),
        ..m.clone()
    };
    if settings(m) != settings(&want) {
        found.push(Diagnostic::error(&T0732, "a WARMUP envelope carries settings of a chunk"));
    }
    found.extend(manifest(&local.census.inputs(&want.phases), tensors));
}

/// Whether the counts of a call are those of its phases.
fn counts(m: &CallMeta, census: &Census, found: &mut Diagnostics) {
    // Unknown programs are reported with their scalars.
    let Ok(want) = census.expect(&m.phases) else { return };
    let mut count = |field: &str, differs: bool, says: &dyn Display, adds_up: &dyn Display| {
        if differs {
            found.push(
                Diagnostic::error(&T0734, format!("{field} differs from the phases"))
                    .at("envelope", says.to_string())
                    .at("its phases", adds_up.to_string()),
            );
        }
    };
    let (calls, collectives) = (m.expected_generator_calls, m.expected_collectives);
    let trace = m.expected_trace_digest;
    let differs = calls != want.generator_calls;
    count("expected_generator_calls", differs, &calls, &want.generator_calls);
    let differs = collectives != want.collectives;
    count("expected_collectives", differs, &collectives, &want.collectives);
    count("expected_trace_digest", trace != want.trace, &trace, &want.trace);
}

fn infer(m: &CallMeta, tensors: &Tensors, local: &Local<'_>, after: &mut Cache, found: &mut Diagnostics) {
    let mut refuse = |what: String| found.push(Diagnostic::error(&T0732, what));
    let count = |k: PhaseKind| m.phases.iter().filter(|p| PhaseKind::of(&p.program) == Some(k)).count();
    if m.phases.len() > MAX_PHASES {
        refuse(format!("phases lists {} phases, at most {MAX_PHASES} may be", m.phases.len()));
        return;
    }
    let denoise = count(PhaseKind::Denoise);
    if m.n_steps == 0 || denoise != m.n_steps as usize {
        refuse(format!("n_steps is {}, phases holds {denoise} denoise passes", m.n_steps));
    }
    for (field, says, kind, most) in [
        ("reset_cross", m.reset_cross, PhaseKind::Text, 1),
        ("recompute", m.recompute, PhaseKind::Recompute, 1),
        ("phases", true, PhaseKind::Emit, 1),
    ] {
        let n = count(kind);
        if n > most || (n == 1) != says {
            refuse(format!("{field} is {says}, phases holds {n} of kind {kind:?}"));
        }
    }
    if m.phases.last().and_then(|p| PhaseKind::of(&p.program)) != Some(PhaseKind::Emit) {
        refuse("phases does not end with an emit".into());
    }
    let bias = m.kv_bias.get();
    if !(bias.is_finite() && bias > 0.0) {
        refuse(format!("kv_bias is {bias}, not a number above 0"));
    }
    for phase in &m.phases {
        found.extend(local.census.check_args(phase));
        if let (Some(Some(seed)), Some(PhaseKind::Renoise)) =
            (phase.arg("seed").map(|_| phase.int("seed")), PhaseKind::of(&phase.program))
            && seed != m.seed as i64
        {
            found.push(both(&T0732, "seed", m.seed, format!("{seed} in phase `{}`", phase.program)));
        }
    }
    counts(m, local.census, found);
    if let Err(d) = replay(m, after, found) {
        found.push(d);
        return;
    }
    if m.prompt_epoch != after.prompt_epoch() {
        found.push(both(&T0712, "prompt_epoch", m.prompt_epoch, after.prompt_epoch()));
    }
    if m.predicted_state != after.digest() {
        found.push(both(&T0712, "predicted_state", m.predicted_state, after.digest()).note(after.describe()));
    }
    let inputs = local.census.inputs(&m.phases);
    if inputs.iter().any(|i| i.name == CONTEXT) != m.recompute {
        let what =
            format!("recompute is {}, which its programs' use of `{CONTEXT}` contradicts", m.recompute);
        found.push(Diagnostic::error(&T0735, what));
    }
    let early: Vec<_> = inputs.into_iter().filter(|i| i.name != CONTEXT).collect();
    found.extend(manifest(&early, tensors));
}

/// Runs the phases over the cache state alone.
fn replay(m: &CallMeta, cache: &mut Cache, found: &mut Diagnostics) -> Result<(), Diagnostic> {
    cache.begin_call(m.reset_kv)?;
    let mut first_pass = true;
    for phase in &m.phases {
        if first_pass && PhaseKind::of(&phase.program) == Some(PhaseKind::Denoise) {
            first_pass = false;
            if m.start_frame != cache.start_frame() {
                found.push(both(&T0712, "start_frame", m.start_frame, cache.start_frame()));
            }
        }
        cache.run_phase(phase)?;
    }
    Ok(())
}

fn manifest(inputs: &[&InputFacts], tensors: &Tensors) -> Diagnostics {
    let mut found = Vec::new();
    for input in inputs {
        let want = format!("{}{:?}", input.dtype, input.shape);
        match tensors.get(&input.name) {
            None => found.push(
                Diagnostic::error(&T0735, format!("tensor `{}` is missing", input.name)).at("program", want),
            ),
            Some(t) if t.spec().dtype != input.dtype || t.spec().shape != input.shape => {
                found.push(
                    Diagnostic::error(&T0735, format!("tensor `{}` has another type", input.name))
                        .at("program", want)
                        .at("manifest", t.spec().type_text()),
                );
            }
            Some(_) => {}
        }
    }
    for t in &tensors.0 {
        if !inputs.iter().any(|i| i.name == t.name()) {
            found.push(Diagnostic::error(
                &T0735,
                format!("tensor `{}` arrived and no program reads it now", t.name()),
            ));
        }
    }
    if found.is_empty() && !tensors.0.iter().map(|t| t.name()).eq(inputs.iter().map(|i| i.name.as_str())) {
        found.push(Diagnostic::error(&T0735, "the tensors are not in the order in which they are read"));
    }
    found
}

fn both(code: &'static Code, field: &str, sent: impl ToString, here: impl ToString) -> Diagnostic {
    Diagnostic::error(code, format!("{field} is not what this rank holds"))
        .at("envelope", sent.to_string())
        .at("this rank", here.to_string())
}
