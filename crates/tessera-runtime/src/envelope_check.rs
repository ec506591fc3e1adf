//! The checks that an envelope must pass before it runs. The leader calls them before it sends the
//! first byte, and each worker before it answers ready; both call the same function.

use std::fmt::Display;

use tessera_base::{Code, Diagnostic, Diagnostics};

use crate::Digest;
use crate::call_state::{CallState, SessionSpec};
use crate::codes::{T0701, T0712, T0730, T0731, T0732, T0733, T0734, T0735};
use crate::director::{StreamSpec, frame_timesteps, is_bias, warmup_meta};
use crate::kv_cache::{CacheStage, CacheState};
use crate::program_index::{InputSpec, PhaseKind, ProgramIndex};
use crate::tripwire::Tripwires;
use crate::wire::{
    CallAction, CallMeta, CallWork, ChunkWork, Envelope, MAX_PHASES, PhaseCall, ScalarArg, Tensors,
    WIRE_VERSION,
};

/// Name of the tensor that follows an envelope in a separate message.
pub const CONTEXT_TENSOR: &str = "context";

/// The state of a rank against which an arriving envelope is checked.
#[derive(Debug, Clone, Copy)]
pub struct LocalState<'a> {
    /// Digest of the sealed plan on this rank; an envelope of another plan is refused.
    pub plan: Digest,
    /// Id of the session this rank joined; an envelope of another session is refused.
    pub session: u64,
    /// Id of the last accepted envelope; 0 before the first.
    pub last_call_id: u64,
    /// Call state after the last accepted envelope.
    pub state: &'a CallState,
    /// Settings of the sealed plan that never change: what a chunk may choose from.
    pub session_spec: &'a SessionSpec,
    /// Programs of the sealed plan, which define the scalars, inputs and counts of each phase.
    pub programs: &'a ProgramIndex,
    /// Number of accepted calls that are not finished; a `RELOAD` requires 0.
    pub open_calls: usize,
    /// Tripwires whose checks are skipped; empty except in a self-test.
    pub tripwires: &'a Tripwires,
}

/// Returns the call state after the call, or a diagnostic for every problem. [`check_context`]
/// checks the context tensor when it arrives.
pub fn check_envelope(e: &Envelope, local: &LocalState<'_>) -> Result<CallState, Diagnostics> {
    let h = &e.header;
    if h.version != WIRE_VERSION && local.tripwires.is_armed(&T0701) {
        return Err(vec![mismatch_error(&T0701, "envelope version", h.version, WIRE_VERSION)]);
    }
    let mut found = Vec::new();
    found.extend(check_equal(&T0731, "plan digest", h.plan, local.plan));
    found.extend(check_equal(&T0731, "session", h.session, local.session));
    if local.last_call_id.checked_add(1) != Some(h.call_id) {
        let what = if h.call_id <= local.last_call_id { "repeated or earlier call_id" } else { "call_id" };
        found.push(mismatch_error(&T0730, what, h.call_id, format!("last {}", local.last_call_id)));
    }
    if h.deadline_ms == 0 {
        found.push(Diagnostic::error(&T0732, "deadline_ms is 0: every wait needs a limit"));
    }
    found.extend(check_equal(&T0712, "chunk", h.chunk, local.state.next_unit()));
    let mut after = local.state.clone();
    let action = h.action;
    found.extend(check_payload(e));
    found.extend(check_action_order(action, local));
    match (action, &e.meta) {
        (CallAction::Infer, Some(meta)) => check_infer(meta, &e.tensors, local, &mut after, &mut found),
        (CallAction::Warmup, Some(meta)) => check_warmup(meta, &e.tensors, local, &mut found),
        (CallAction::Reset | CallAction::Reload, _) => {
            if let Err(d) = after.reset() {
                found.push(d);
            }
        }
        _ => {}
    }
    found.extend(check_equal(&T0712, "cache_epoch", h.cache_epoch, after.epoch()));
    local.tripwires.check_findings(found).map(|()| after)
}

/// Checks that the tensors that follow an envelope match its context input.
pub fn check_context(
    meta: &CallMeta,
    tensors: &Tensors,
    programs: &ProgramIndex,
    tripwires: &Tripwires,
) -> Result<(), Diagnostics> {
    let inputs = programs.call_inputs(&meta.phases);
    let late: Vec<_> = inputs.into_iter().filter(|i| i.name == CONTEXT_TENSOR).collect();
    tripwires.check_findings(check_tensors(&late, tensors))
}

/// Returns the digest of a call's header, meta, reload and manifests, which must be equal on every
/// rank.
#[must_use]
pub fn input_digest(e: &Envelope, context: &Tensors) -> Digest {
    Digest::hash_value("inputs", &(e, context))
}

/// Checks that the envelope carries the payload of its action and no other.
fn check_payload(e: &Envelope) -> Diagnostics {
    let action = e.header.action;
    let with_meta = matches!(action, CallAction::Infer | CallAction::Warmup);
    let mut found = Vec::new();
    let mut check = |what: &str, is: bool, must: bool| {
        if is != must {
            let words = if must { "has no" } else { "must not carry a" };
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

/// Checks that a warm-up is the first call and that no call is open when a reload arrives.
fn check_action_order(action: CallAction, local: &LocalState<'_>) -> Option<Diagnostic> {
    let refuse = |what: &str, is: String| {
        Some(Diagnostic::error(&T0733, format!("{} {what}", action.name())).with_label("this rank", is))
    };
    match action {
        CallAction::Warmup if local.last_call_id != 0 => {
            refuse("is not the first call", format!("last call {}", local.last_call_id))
        }
        CallAction::Reload if local.open_calls > 0 => {
            refuse("came while other calls are open", format!("{} open calls", local.open_calls))
        }
        _ => None,
    }
}

fn check_warmup(m: &CallMeta, tensors: &Tensors, local: &LocalState<'_>, found: &mut Diagnostics) {
    let want = match warmup_meta(local.programs, local.state.state_digest()) {
        Ok(want) => want,
        Err(ds) => return found.extend(ds),
    };
    if m.phases != want.phases {
        found.push(
            Diagnostic::error(&T0732, "phases does not list every program of the plan exactly once")
                .with_label("envelope", format!("{} phases", m.phases.len()))
                .with_label("this rank", format!("{} programs", want.phases.len())),
        );
    }
    check_counts(m, local.programs, found);
    found.extend(check_equal(&T0712, "predicted_state", m.predicted_state, want.predicted_state));
    if m.work != CallWork::Warmup {
        found.push(Diagnostic::error(&T0732, "a WARMUP envelope carries the work of a call"));
    }
    found.extend(check_tensors(&local.programs.warmup_inputs(&want.phases), tensors));
}

/// Checks that the expected totals of a call match its phases.
fn check_counts(m: &CallMeta, programs: &ProgramIndex, found: &mut Diagnostics) {
    // `check_args` reports unknown programs.
    let Ok(totals) = programs.expected_totals(&m.phases) else { return };
    let mut count = |field: &str, differs: bool, says: &dyn Display, adds_up: &dyn Display| {
        if differs {
            found.push(
                Diagnostic::error(&T0734, format!("{field} differs from the phases"))
                    .with_label("envelope", says.to_string())
                    .with_label("its phases", adds_up.to_string()),
            );
        }
    };
    let (calls, collectives) = (m.expected_generator_calls, m.expected_collectives);
    let trace = m.expected_trace_digest;
    let differs = calls != totals.generator_calls;
    count("expected_generator_calls", differs, &calls, &totals.generator_calls);
    let differs = collectives != totals.collectives;
    count("expected_collectives", differs, &collectives, &totals.collectives);
    count("expected_trace_digest", trace != totals.trace, &trace, &totals.trace);
}

/// Checks the payload of an `INFER` envelope, and applies the call to `after`.
fn check_infer(
    m: &CallMeta,
    tensors: &Tensors,
    local: &LocalState<'_>,
    after: &mut CallState,
    found: &mut Diagnostics,
) {
    if m.phases.len() > MAX_PHASES {
        let what = format!("phases lists {} phases, the maximum is {MAX_PHASES}", m.phases.len());
        return found.push(Diagnostic::error(&T0732, what));
    }
    match (&m.work, &*after, local.session_spec) {
        (CallWork::Chunk(work), CallState::Video(before), SessionSpec::Video(stream)) => {
            found.extend(check_chunk(m, work, before, local.programs));
            found.extend(check_step_values(m, work, stream));
        }
        (CallWork::Tokens(_), CallState::Text(_), _) => found.extend(check_tokens(m, local.programs)),
        (CallWork::Arrays, CallState::Arrays(_), _) => found.extend(check_array_phase(m)),
        (work, ..) => {
            let kind = work.describe();
            let what = format!("an INFER envelope carries {kind}, which this session does not compute");
            return found.push(Diagnostic::error(&T0732, what));
        }
    }
    found.extend(m.phases.iter().flat_map(|phase| local.programs.check_args(phase)));
    check_counts(m, local.programs, found);
    if let Err(d) = replay_phases(m, after, found) {
        found.push(d);
        return;
    }
    if let (CallWork::Chunk(work), CallState::Video(after)) = (&m.work, &*after) {
        found.extend(check_equal(&T0712, "prompt_epoch", work.prompt_epoch, after.prompt_epoch()));
    }
    let difference = check_equal(&T0712, "predicted_state", m.predicted_state, after.state_digest());
    found.extend(difference.map(|d| d.with_note(after.describe())));
    let inputs = local.programs.call_inputs(&m.phases);
    let recompute = m.recomputes_context();
    if inputs.iter().any(|i| i.name == CONTEXT_TENSOR) != recompute {
        let what =
            format!("recompute is {recompute}, but the programs' use of `{CONTEXT_TENSOR}` contradicts that");
        found.push(Diagnostic::error(&T0735, what));
    }
    let early: Vec<_> = inputs.into_iter().filter(|i| i.name != CONTEXT_TENSOR).collect();
    found.extend(check_tensors(&early, tensors));
}

/// Checks the phases of a call that computes rows of tokens: the first takes its ids from the call, and each further
/// one those that the phase before it chose.
fn check_tokens(m: &CallMeta, programs: &ProgramIndex) -> Option<Diagnostic> {
    let names: Vec<&str> = m.phases.iter().map(|p| p.program.as_str()).collect();
    let is_tokens = |name: &str| PhaseKind::from_program(name) == Some(PhaseKind::Tokens);
    // A program that the plan lacks is reported as such.
    let reads_call = |name: &str| programs.get(name).map_or(true, |facts| !facts.inputs.is_empty());
    let what = match &names[..] {
        [first, rest @ ..] if names.iter().all(|name| is_tokens(name)) => {
            let misplaced = !reads_call(first) || rest.iter().any(|name| reads_call(name));
            misplaced
                .then_some("a phase other than the first takes its ids from the call, or the first does not")
        }
        _ => Some("a call of tokens does not have phases of kind Tokens alone"),
    };
    what.map(|what| Diagnostic::error(&T0732, what).with_label("envelope", format!("phases {names:?}")))
}

/// Checks that a call of an array program has one phase, which is such a program.
fn check_array_phase(m: &CallMeta) -> Option<Diagnostic> {
    let names: Vec<&str> = m.phases.iter().map(|p| p.program.as_str()).collect();
    let is_one = matches!(names[..], [name] if PhaseKind::from_program(name) == Some(PhaseKind::Array));
    (!is_one).then(|| {
        Diagnostic::error(&T0732, "a call of arrays does not have one phase of kind Array")
            .with_label("envelope", format!("phases {names:?}"))
    })
}

/// Checks the phases and the settings of a call that computes a chunk, given the caches before it.
fn check_chunk(m: &CallMeta, work: &ChunkWork, before: &CacheState, programs: &ProgramIndex) -> Diagnostics {
    let mut found = Vec::new();
    let mut refuse = |what: String| found.push(Diagnostic::error(&T0732, what));
    let count =
        |k: PhaseKind| m.phases.iter().filter(|p| PhaseKind::from_program(&p.program) == Some(k)).count();
    let denoise = count(PhaseKind::Denoise);
    if work.n_steps == 0 || denoise != work.n_steps as usize {
        refuse(format!("n_steps is {}, phases lists {denoise} denoise phases", work.n_steps));
    }
    for (field, value, kind, max_count) in [
        ("reset_cross", work.reset_cross, PhaseKind::Text, 1),
        ("recompute", work.recompute, PhaseKind::Recompute, 1),
        ("phases", true, PhaseKind::Emit, 1),
        ("the plan's use of given noise", programs.takes_noise(), PhaseKind::Noise, 1),
    ] {
        let n = count(kind);
        if n > max_count || (n == 1) != value {
            refuse(format!("{field} is {value}, phases lists {n} of kind {kind:?}"));
        }
    }
    let (recalls, due) = (count(PhaseKind::Recall), due_recalls(work, before, programs));
    if recalls != due {
        refuse(format!(
            "phases lists {recalls} of kind Recall, {due} chunks are cached under another prompt"
        ));
    }
    let videos = count(PhaseKind::Video);
    if videos > 1 {
        refuse(format!("phases lists {videos} of kind Video, a chunk begins with one"));
    }
    if let Some(why) = find_wrong_end(m, &programs.media_phases(opens_scene(work, before))) {
        refuse(why);
    }
    if !is_bias(work.kv_bias.get()) {
        refuse(format!("kv_bias is {}, not a number above 0", work.kv_bias.get()));
    }
    for phase in &m.phases {
        if let (Some(Some(seed)), Some(PhaseKind::Renoise)) =
            (phase.scalar_arg("seed").map(|_| phase.int_arg("seed")), PhaseKind::from_program(&phase.program))
            && seed != work.seed as i64
        {
            let here = format!("{seed} in phase `{}`", phase.program);
            found.push(mismatch_error(&T0732, "seed", work.seed, here));
        }
    }
    found
}

/// Largest difference between the logarithms of one bias on two hosts. Their mathematical libraries may round the last bit
/// differently, and every rank computes with the leader's value, so that only another bias counts.
const LN_TOLERANCE: f32 = 1e-5;

/// Checks that the denoise steps of a chunk have the values of the list that the chunk names, and that they and the phases of
/// its clean rows have the chunk's bias.
fn check_step_values(m: &CallMeta, work: &ChunkWork, stream: &StreamSpec) -> Diagnostics {
    let Some(list) = stream.step_lists.get(work.step_list as usize) else {
        let what = format!("step_list is {}, the plan admits {}", work.step_list, stream.step_lists.len());
        return vec![Diagnostic::error(&T0732, what)];
    };
    // A chunk of an input video leaves out the first steps.
    let begins_with_video =
        m.phases.iter().any(|p| PhaseKind::from_program(&p.program) == Some(PhaseKind::Video));
    let skipped = list.steps.len().checked_sub(work.n_steps as usize);
    let Some(skipped) = skipped.filter(|n| *n == 0 || begins_with_video) else {
        let what =
            format!("n_steps is {}, list `{}` of the plan has {}", work.n_steps, list.name, list.steps.len());
        return vec![Diagnostic::error(&T0732, what)];
    };
    let mut found = Vec::new();
    let mut steps = list.steps.iter().skip(skipped).peekable();
    let ln_bias = work.kv_bias.get().ln();
    for phase in &m.phases {
        let kind = PhaseKind::from_program(&phase.program);
        let mut expect = |name: &str, is_expected: &dyn Fn(&ScalarArg) -> bool, want: String| {
            if phase.scalar_arg(name).is_some_and(|arg| !is_expected(arg)) {
                let what = format!("`{name}` of phase `{}` is not that of the chunk", phase.program);
                found.push(
                    Diagnostic::error(&T0732, what).with_label("the plan and the chunk's settings", want),
                );
            }
        };
        if let (Some(PhaseKind::Renoise | PhaseKind::Denoise), Some(step)) = (kind, steps.peek()) {
            let sigma = ScalarArg::from_f32(step.sigma);
            expect(
                "sigma",
                &|arg| *arg == sigma,
                format!("noise level {} of list `{}`", step.sigma, list.name),
            );
        }
        if let (Some(PhaseKind::Denoise), Some(step)) = (kind, steps.peek()) {
            let timestep = frame_timesteps(step.timestep, stream.cache.chunk_frames);
            expect(
                "t",
                &|arg| *arg == timestep,
                format!("timestep {} of list `{}`", step.timestep, list.name),
            );
            steps.next();
        }
        if let Some(PhaseKind::Denoise | PhaseKind::Clean) = kind {
            let is_near = |arg: &ScalarArg| matches!(arg, ScalarArg::F32(bias) if (bias.get() - ln_bias).abs() <= LN_TOLERANCE);
            expect("bias", &is_near, format!("the logarithm of kv_bias, {ln_bias}"));
        }
    }
    found
}

/// Says what is wrong with the last phases of a call, which must be an emit and the phases of pixels.
fn find_wrong_end(m: &CallMeta, media: &[PhaseCall]) -> Option<String> {
    let generated = m.phases.strip_suffix(media).and_then(<[_]>::last);
    if generated.and_then(|p| PhaseKind::from_program(&p.program)) == Some(PhaseKind::Emit) {
        return None;
    }
    let names: Vec<&str> = media.iter().map(|p| p.program.as_str()).collect();
    Some(match names[..] {
        [] => "the last phase is not an emit".to_string(),
        _ => format!("the last phases are not an emit and {}", names.join(", ")),
    })
}

/// Returns whether the call's chunk is the first of its scene, given the cache state before the call.
fn opens_scene(work: &ChunkWork, before: &CacheState) -> bool {
    let mut cache = before.clone();
    cache.begin_call(work.reset_kv).is_ok() && cache.stage() == CacheStage::Empty
}

/// Returns the chunks that the call must write again because it brings a new prompt, given the cache state
/// before the call.
fn due_recalls(work: &ChunkWork, before: &CacheState, programs: &ProgramIndex) -> usize {
    let mut cache = before.clone();
    let is_due = work.reset_cross && programs.recaches() && cache.begin_call(work.reset_kv).is_ok();
    if is_due { cache.chunks_to_recache() as usize } else { 0 }
}

/// Applies a call to `state`, and checks the start frame of a chunk before its first denoise phase.
fn replay_phases(m: &CallMeta, state: &mut CallState, found: &mut Diagnostics) -> Result<(), Diagnostic> {
    state.begin_call(&m.work)?;
    let mut first_pass = true;
    for phase in &m.phases {
        if let (CallWork::Chunk(work), CallState::Video(cache)) = (&m.work, &*state)
            && first_pass
            && PhaseKind::from_program(&phase.program) == Some(PhaseKind::Denoise)
        {
            first_pass = false;
            found.extend(check_equal(&T0712, "start_frame", work.start_frame, cache.start_frame()));
        }
        state.apply_phase(phase)?;
    }
    Ok(())
}

fn check_tensors(inputs: &[&InputSpec], tensors: &Tensors) -> Diagnostics {
    let mut found = Vec::new();
    for input in inputs {
        let want = format!("{}{:?}", input.dtype, input.shape);
        match tensors.get(&input.name) {
            None => found.push(
                Diagnostic::error(&T0735, format!("tensor `{}` is missing", input.name))
                    .with_label("program", want),
            ),
            Some(t) if t.manifest_entry().dtype != input.dtype || t.manifest_entry().shape != input.shape => {
                found.push(
                    Diagnostic::error(&T0735, format!("tensor `{}` has another type", input.name))
                        .with_label("program", want)
                        .with_label("manifest", t.manifest_entry().type_text()),
                );
            }
            Some(_) => {}
        }
    }
    for t in &tensors.0 {
        if !inputs.iter().any(|i| i.name == t.name()) {
            found.push(Diagnostic::error(
                &T0735,
                format!("tensor `{}` arrived, but no program reads it", t.name()),
            ));
        }
    }
    if found.is_empty() && !tensors.0.iter().map(|t| t.name()).eq(inputs.iter().map(|i| i.name.as_str())) {
        found.push(Diagnostic::error(&T0735, "the tensors are not in the order in which programs read them"));
    }
    found
}

fn check_equal<T: PartialEq + ToString>(
    code: &'static Code,
    field: &str,
    sent: T,
    here: T,
) -> Option<Diagnostic> {
    (sent != here).then(|| mismatch_error(code, field, sent, here))
}

fn mismatch_error(code: &'static Code, field: &str, sent: impl ToString, here: impl ToString) -> Diagnostic {
    Diagnostic::error(code, format!("{field} differs from this rank's value"))
        .with_label("envelope", sent.to_string())
        .with_label("this rank", here.to_string())
}
