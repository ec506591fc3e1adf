//! The director plans each call on the leader: its phases, their scalars, and the expected totals.
//!
//! Every decision that may change a rank's execution is made here once and sent. Workers derive
//! nothing.

use tessera_base::{Diagnostic, Diagnostics};

use crate::Digest;
use crate::codes::{T0720, T0721};
use crate::kv_cache::{CacheRegime, CacheSpec, CacheStage, CacheState, Transition};
use crate::program_index::{NOISE_PROGRAM, ProgramIndex, VIDEO_PROGRAM};
use crate::wire::{CallAction, CallMeta, CallWork, ChunkWork, F32Bits, PhaseCall, ScalarArg};

use serde::{Deserialize, Serialize};

/// Parameters of one denoise step of a chunk.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct DenoiseStep {
    /// Input of the time embedding, on the models' scale from 1000 (pure noise) to 0 (clean
    /// latents).
    pub timestep: f32,
    /// Noise level; 1 is pure noise.
    pub sigma: f32,
}

/// The settings of a stream, which never change.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamSpec {
    /// Sizes and regime of the KV caches, equal on the leader and on every rank.
    pub cache: CacheSpec,
    /// Attention bias b on context keys; 1 disables it. Programs with a bias scalar receive ln b. A chunk may have another.
    pub bias: f32,
    /// The lists of denoise steps that the plan admits, of which each chunk has one. The first is that of a chunk whose
    /// request names none.
    pub step_lists: Vec<StepList>,
}

/// A list of denoise steps that a plan admits.
#[derive(Debug, Clone, PartialEq)]
pub struct StepList {
    /// Name of the list, by which a change chooses it.
    pub name: String,
    /// The steps, noisiest first.
    pub steps: Vec<DenoiseStep>,
}

impl StreamSpec {
    /// Returns a diagnostic for every invalid setting.
    #[must_use]
    pub fn check_settings(&self) -> Diagnostics {
        let mut found = Vec::new();
        let mut refuse = |what: String| found.push(Diagnostic::error(&T0720, what));
        if self.step_lists.is_empty() {
            refuse("a stream needs a list of denoise steps".into());
        }
        self.step_lists.iter().for_each(|list| list.check_steps(&mut refuse));
        if !is_bias(self.bias) {
            refuse(format!("the attention bias is {}, not a number above 0", self.bias));
        }
        if let Err(d) = CacheState::new(self.cache) {
            found.push(d);
        }
        found
    }
}

impl StepList {
    /// Creates a list for a stream that has no other, so that its name chooses nothing.
    #[must_use]
    pub fn from_steps(steps: Vec<DenoiseStep>) -> StepList {
        StepList { name: "default".into(), steps }
    }

    /// Reports every step that is no step, or out of order.
    fn check_steps(&self, refuse: &mut impl FnMut(String)) {
        let (name, steps) = (&self.name, &self.steps);
        if steps.is_empty() {
            refuse(format!("list `{name}` has no denoise step"));
        }
        for (i, s) in steps.iter().enumerate() {
            if !s.timestep.is_finite() || !(0.0..=1.0).contains(&s.sigma) {
                refuse(format!(
                    "step {i} of list `{name}` has timestep {} and noise level {}",
                    s.timestep, s.sigma
                ));
            }
        }
        for (i, pair) in steps.windows(2).enumerate() {
            if pair[1].sigma > pair[0].sigma {
                refuse(format!(
                    "the noise level of list `{name}` grows from {} at step {i} to {} at step {}",
                    pair[0].sigma,
                    pair[1].sigma,
                    i + 1
                ));
            }
        }
    }
}

/// Returns whether a number is a weight of context keys.
#[must_use]
pub fn is_bias(bias: f32) -> bool {
    bias.is_finite() && bias > 0.0
}

/// Whether a chunk begins a new scene, and how the chunks before it are treated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum SceneCut {
    /// The chunk continues the scene of the chunk before it.
    #[default]
    None,
    /// A new scene begins after every chunk that was requested before.
    Ordered,
    /// A new scene begins now: chunks that were requested before and are not delivered yet are
    /// drained and discarded.
    Flush,
}

impl SceneCut {
    /// Whether a new scene begins.
    #[must_use]
    pub fn is_cut(self) -> bool {
        self != SceneCut::None
    }
}

/// One requested chunk as the [`Director`] needs it: without the text of its prompt.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ChunkRequest {
    /// Whether a new prompt takes effect with this chunk.
    pub prompt_change: bool,
    /// Seed of the chunk's random draws.
    pub seed: u64,
    /// The hard cut before this chunk, if any.
    pub cut: SceneCut,
    /// Index of the chunk's list of denoise steps among [`StreamSpec::step_lists`].
    pub step_list: u32,
    /// Attention bias on context keys; `None` for that of the plan.
    pub bias: Option<F32Bits>,
}

/// One call that the [`Director`] planned. The leader adds the call's id, a deadline and the
/// tensors, and sends the result as an envelope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPlan {
    /// What the call does; `INFER` and `WARMUP` have a `meta`, other actions have none.
    pub action: CallAction,
    /// Index of the chunk that the call generates; for a call without a chunk, of the next chunk.
    pub chunk: u32,
    /// Epoch of the KV caches in which the call runs; a hard cut, reset or reload begins another.
    pub cache_epoch: u32,
    /// Payload of an `INFER` or `WARMUP` call; `None` for any other action.
    pub meta: Option<CallMeta>,
    /// Whether the chunk is the first of its scene.
    pub opens_scene: bool,
    /// Latent frames that the call evicts from a full window. A cut clears the caches instead.
    pub evicted_frames: u32,
}

impl CallPlan {
    /// Creates the plan of a call that runs programs of a session without scenes.
    pub(crate) fn new_infer(chunk: u32, cache_epoch: u32, meta: CallMeta) -> CallPlan {
        CallPlan {
            action: CallAction::Infer,
            chunk,
            cache_epoch,
            meta: Some(meta),
            opens_scene: false,
            evicted_frames: 0,
        }
    }
}

/// Plans the calls of a stream one after the other, ahead of their execution.
#[derive(Debug, Clone)]
pub struct Director {
    spec: StreamSpec,
    /// The cache state after the last planned call.
    cache: CacheState,
}

impl Director {
    /// Creates a director, or returns a diagnostic for every invalid setting.
    pub fn new(spec: StreamSpec) -> Result<Director, Diagnostics> {
        let found = spec.check_settings();
        if !found.is_empty() {
            return Err(found);
        }
        let cache = CacheState::new(spec.cache).map_err(|d| vec![d])?;
        Ok(Director { spec, cache })
    }

    /// Plans the next chunk, which begins with noise. On an error the director is unchanged.
    pub fn plan_chunk(
        &mut self,
        request: &ChunkRequest,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        self.plan_chunk_from(request, None, programs)
    }

    /// Plans the next chunk. With `video_step` it begins with the latents of an input video at this step,
    /// whose noise is added to them; the steps before are left out. On an error the director is unchanged.
    pub fn plan_chunk_from(
        &mut self,
        request: &ChunkRequest,
        video_step: Option<u32>,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        let steps = &self.find_step_list(request.step_list)?.steps;
        let bias = request.bias.map_or(self.spec.bias, F32Bits::get);
        if let Some(step) = video_step
            && steps.get(step as usize).is_none_or(|s| s.sigma >= 1.0)
        {
            let steps: Vec<f32> = steps.iter().map(|s| s.sigma).collect();
            return Err(vec![
                Diagnostic::error(&T0721, format!("a video cannot begin at step {step}"))
                    .with_label("the stream", format!("has the noise levels {steps:?}"))
                    .with_hint("begin at a step whose noise level is below 1"),
            ]);
        }
        let mut draft =
            CallDraft { cache: self.cache.clone(), phases: Vec::new(), programs, found: Vec::new() };
        let cut = request.cut.is_cut();
        let cached: u32 = if cut { 0 } else { draft.cache.cached_frames() };
        draft.cache.begin_call(cut).map_err(|d| vec![d])?;
        let evicted_frames = cached.saturating_sub(draft.cache.cached_frames());
        let chunk = draft.cache.next_chunk();
        let opens_scene = draft.cache.stage() == CacheStage::Empty;
        // A cut also clears the text keys and values, as does a RESET without a chunk.
        let text = request.prompt_change || opens_scene;
        if draft.cache.prompt_epoch() == 0 && !request.prompt_change {
            return Err(vec![
                Diagnostic::error(&T0721, "the first chunk of a session has no prompt")
                    .with_label("request", format!("chunk {chunk}, no prompt")),
            ]);
        }
        if text {
            draft.push_phase("text", &[]);
        }
        if text && !opens_scene {
            // Before a rebase: the chunk that this call evicts may have no position after it.
            draft.push_recache(self.spec.cache.chunk_frames);
        }
        draft.push_rebase();
        let recompute =
            self.spec.cache.regime == CacheRegime::Recompute && draft.cache.stage() == CacheStage::Holding;
        if recompute {
            draft.push_recompute(self.spec.cache.chunk_frames);
        }
        let start_frame = draft.cache.start_frame();
        draft.push_steps(&self.spec, &ChunkValues { steps, bias, seed: request.seed, chunk, video_step });
        draft.push_phase("emit", &[]);
        for phase in programs.media_phases(opens_scene) {
            draft.push_phase(&phase.program, &[]);
        }
        let (cache, phases) = draft.into_phases()?;
        let work = CallWork::Chunk(ChunkWork {
            step_list: request.step_list,
            n_steps: steps.len() as u32 - video_step.unwrap_or(0),
            reset_kv: cut,
            reset_cross: text,
            recompute,
            start_frame,
            seed: request.seed,
            prompt_epoch: cache.prompt_epoch(),
            kv_bias: F32Bits::new(bias),
        });
        let meta = call_meta(phases, work, programs, cache.state_digest())?;
        self.cache = cache;
        Ok(CallPlan { chunk, opens_scene, evicted_frames, ..self.plan_call(CallAction::Infer, Some(meta)) })
    }

    /// Plans the warm-up call, which runs every program of the plan once. The cache state does not
    /// change.
    pub fn plan_warmup(&self, programs: &ProgramIndex) -> Result<CallPlan, Diagnostics> {
        let meta = warmup_meta(programs, self.cache.state_digest())?;
        Ok(self.plan_call(CallAction::Warmup, Some(meta)))
    }

    /// Plans a call without a chunk: a reset, a reload, a shutdown or a no-op.
    pub fn plan_control_call(&mut self, action: CallAction) -> Result<CallPlan, Diagnostics> {
        if matches!(action, CallAction::Reset | CallAction::Reload) {
            self.cache.apply_transition(Transition::Reset).map_err(|d| vec![d])?;
        }
        Ok(self.plan_call(action, None))
    }

    /// Returns a list of denoise steps that the plan admits.
    fn find_step_list(&self, at: u32) -> Result<&StepList, Diagnostics> {
        self.spec.step_lists.get(at as usize).ok_or_else(|| {
            let admitted = self.spec.step_lists.len();
            vec![
                Diagnostic::error(&T0721, format!("the plan admits no list {at} of denoise steps"))
                    .with_label("the plan", format!("admits {admitted}, which count from 0")),
            ]
        })
    }

    /// Returns a call in the current cache state.
    fn plan_call(&self, action: CallAction, meta: Option<CallMeta>) -> CallPlan {
        let (chunk, cache_epoch) = (self.cache.next_chunk(), self.cache.epoch());
        CallPlan { action, chunk, cache_epoch, meta, opens_scene: false, evicted_frames: 0 }
    }

    /// Returns the cache state after the last planned call.
    #[must_use]
    pub fn cache_state(&self) -> &CacheState {
        &self.cache
    }
}

/// Builds the payload of the warm-up, which leaves the state of this digest as it is. Leader and workers
/// compute the same payload.
pub(crate) fn warmup_meta(programs: &ProgramIndex, state: Digest) -> Result<CallMeta, Diagnostics> {
    call_meta(programs.warmup_phases(), CallWork::Warmup, programs, state)
}

/// Builds the payload of a call from its phases and its work. `predicted_state` is the digest of the
/// state after the call.
pub(crate) fn call_meta(
    phases: Vec<PhaseCall>,
    work: CallWork,
    programs: &ProgramIndex,
    predicted_state: Digest,
) -> Result<CallMeta, Diagnostics> {
    let expected = programs.expected_totals(&phases)?;
    Ok(CallMeta {
        expected_generator_calls: expected.generator_calls,
        expected_collectives: expected.collectives,
        expected_trace_digest: expected.trace,
        phases,
        predicted_state,
        work,
    })
}

/// The values of a chunk that its denoise steps read.
struct ChunkValues<'a> {
    steps: &'a [DenoiseStep],
    bias: f32,
    seed: u64,
    chunk: u32,
    /// Step at which an input video begins; the steps before it are left out.
    video_step: Option<u32>,
}

/// The phases of a chunk's call so far, the cache state after them, and the problems found.
struct CallDraft<'a> {
    cache: CacheState,
    phases: Vec<PhaseCall>,
    programs: &'a ProgramIndex,
    found: Diagnostics,
}

impl CallDraft<'_> {
    /// Adds the rebase of the cached keys, if one is pending.
    fn push_rebase(&mut self) {
        if let Some(frames) = self.cache.pending_rebase() {
            // A rebase rotates keys back, so the shift is negative.
            self.push_phase("rebase", &[("shift", ScalarArg::I64(-i64::from(frames)))]);
        }
    }

    /// Adds the phases that write the chunks of the ring again under the new prompt, oldest first, if
    /// the plan has them.
    fn push_recache(&mut self, chunk_frames: u32) {
        let chunks = if self.programs.recaches() { self.cache.chunks_to_recache() } else { 0 };
        for back in (1..=chunks).rev() {
            let place = self.cache.recache_place();
            self.push_phase(&format!("recall.back{back}"), &[]);
            let args = [
                ("t", frame_timesteps(0.0, chunk_frames)),
                ("start", ScalarArg::I64(i64::from(place.start))),
                ("row", ScalarArg::I64(place.row as i64)),
            ];
            self.push_phase(&format!("clean.fill{}", place.fill), &args);
        }
    }

    /// Adds the phase that computes the keys and values of the context again, at timestep 0.
    fn push_recompute(&mut self, chunk_frames: u32) {
        let t = frame_timesteps(0.0, chunk_frames);
        self.push_phase("recompute", &[("t", t), ("start", ScalarArg::I64(0)), ("row", ScalarArg::I64(0))]);
    }

    /// Adds the denoise steps of a chunk and, in the resident regime, the phase that caches the
    /// keys and values of the clean chunk.
    fn push_steps(&mut self, spec: &StreamSpec, values: &ChunkValues<'_>) {
        let start = ScalarArg::I64(i64::from(self.cache.start_frame()));
        let row = ScalarArg::I64(self.cache.start_row() as i64);
        let fill = self.cache.fill_frames();
        let bias = ScalarArg::from_f32(values.bias.ln());
        if values.video_step.is_some() {
            self.push_phase(VIDEO_PROGRAM, &[]);
        }
        for (draw, step) in values.steps.iter().enumerate().skip(values.video_step.unwrap_or(0) as usize) {
            let sigma = ScalarArg::from_f32(step.sigma);
            if draw == 0 && self.programs.takes_noise() {
                self.push_phase(NOISE_PROGRAM, &[]);
            } else {
                self.push_phase(
                    "renoise",
                    &[
                        ("sigma", sigma.clone()),
                        ("seed", ScalarArg::I64(values.seed as i64)),
                        ("chunk", ScalarArg::I64(i64::from(values.chunk))),
                        ("draw", ScalarArg::I64(draw as i64)),
                    ],
                );
            }
            self.push_phase(
                &format!("denoise.fill{fill}"),
                &[
                    ("t", frame_timesteps(step.timestep, spec.cache.chunk_frames)),
                    ("sigma", sigma),
                    ("start", start.clone()),
                    ("row", row.clone()),
                    ("bias", bias.clone()),
                ],
            );
        }
        if spec.cache.regime == CacheRegime::Resident {
            let t = frame_timesteps(0.0, spec.cache.chunk_frames);
            let args = [("t", t), ("start", start), ("row", row), ("bias", bias)];
            self.push_phase(&format!("clean.fill{fill}"), &args);
        }
    }

    /// Adds a phase with those of the given scalars that its program declares.
    fn push_phase(&mut self, program: &str, candidate_args: &[(&str, ScalarArg)]) {
        let facts = match self.programs.get(program) {
            Ok(facts) => facts,
            Err(d) => return self.found.push(d),
        };
        let args = candidate_args
            .iter()
            .filter(|(name, _)| facts.scalars.iter().any(|(n, _)| n == name))
            .map(|(name, arg)| ((*name).to_string(), arg.clone()))
            .collect();
        let phase = PhaseCall::new(program, args);
        self.found.extend(self.programs.check_args(&phase));
        if let Err(d) = self.cache.apply_phase(&phase) {
            self.found.push(d);
        }
        self.phases.push(phase);
    }

    fn into_phases(self) -> Result<(CacheState, Vec<PhaseCall>), Diagnostics> {
        if self.found.is_empty() { Ok((self.cache, self.phases)) } else { Err(self.found) }
    }
}

/// Returns the same timestep for each frame of a chunk.
pub(crate) fn frame_timesteps(timestep: f32, chunk_frames: u32) -> ScalarArg {
    ScalarArg::from_f32s(&vec![timestep; chunk_frames as usize])
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program_index::{ArgKind, ProgramInfo};

    fn program_index() -> ProgramIndex {
        let mut programs = Vec::new();
        let mut add = |name: &str, scalars: &[(&str, ArgKind)]| {
            let scalars = scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect();
            let facts = ProgramInfo { collectives: name.len() as u64, scalars, ..ProgramInfo::default() };
            programs.push((name.to_string(), facts));
        };
        let place = [("start", ArgKind::I64), ("row", ArgKind::I64), ("t", ArgKind::F32s(3))];
        add("text", &[]);
        add("emit", &[]);
        add("rebase", &[("shift", ArgKind::I64)]);
        add("recompute", &place);
        let draw = [("seed", ArgKind::I64), ("chunk", ArgKind::I64), ("draw", ArgKind::I64)];
        add("renoise", &[draw[0], draw[1], draw[2], ("sigma", ArgKind::F32)]);
        for fill in [0, 3, 6] {
            add(
                &format!("denoise.fill{fill}"),
                &[place[0], place[1], place[2], ("sigma", ArgKind::F32), ("bias", ArgKind::F32)],
            );
            add(&format!("clean.fill{fill}"), &place);
        }
        ProgramIndex::new(programs)
    }

    fn spec(regime: CacheRegime, window_frames: u32) -> StreamSpec {
        let cache = CacheSpec {
            regime,
            chunk_frames: 3,
            window_frames,
            sink_frames: 0,
            table_frames: 1024,
            tokens_per_frame: 10,
        };
        let steps =
            vec![DenoiseStep { timestep: 1000.0, sigma: 1.0 }, DenoiseStep { timestep: 500.0, sigma: 0.5 }];
        let fast = steps[..1].to_vec();
        let list = |name: &str, steps| StepList { name: name.into(), steps };
        StreamSpec { cache, bias: 0.3, step_lists: vec![list("default", steps), list("fast", fast)] }
    }

    fn programs(plan: &CallPlan) -> Vec<&str> {
        plan.meta.iter().flat_map(|m| &m.phases).map(|p| p.program.as_str()).collect()
    }

    #[test]
    fn given_noise_replaces_the_draw_of_the_first_step_alone() {
        let drawn = program_index();
        let names = drawn.warmup_phases().into_iter().map(|p| p.program).chain(["noise".to_string()]);
        let infos = names.map(|n| (n.clone(), drawn.get(&n).cloned().unwrap_or_default()));
        let given = ProgramIndex::new(infos.collect::<Vec<_>>());
        let mut d = Director::new(spec(CacheRegime::Resident, 9)).expect("legal");
        let first = d.plan_chunk(&FIRST, &given).expect("planned");
        assert_eq!(programs(&first)[..5], ["text", "noise", "denoise.fill0", "renoise", "denoise.fill0"]);
        let meta = first.meta.expect("a chunk");
        assert_eq!(
            (meta.chunk_work().map(|w| w.n_steps), meta.phases[3].int_arg("draw")),
            (Some(2), Some(1))
        );
        let warmup = given.warmup_phases();
        let at = |name: &str| warmup.iter().position(|p| p.program == name).expect("listed");
        assert!(at("renoise") < at("noise") && at("noise") < at("denoise.fill0"));
    }

    #[test]
    fn a_video_replaces_the_steps_above_its_noise_level() {
        let drawn = program_index();
        let names = drawn.warmup_phases().into_iter().map(|p| p.program).chain(["video".to_string()]);
        let infos = names.map(|n| (n.clone(), drawn.get(&n).cloned().unwrap_or_default()));
        let index = ProgramIndex::new(infos.collect::<Vec<_>>());
        let mut d = Director::new(spec(CacheRegime::Resident, 9)).expect("legal");
        let first = d.plan_chunk_from(&FIRST, Some(1), &index).expect("planned");
        assert_eq!(programs(&first)[..4], ["text", "video", "renoise", "denoise.fill0"]);
        let meta = first.meta.expect("a chunk");
        // The draw is that of the step, so that it differs from those of the steps left out.
        assert_eq!(
            (meta.chunk_work().map(|w| w.n_steps), meta.phases[2].int_arg("draw")),
            (Some(1), Some(1))
        );
        assert_eq!(programs(&d.plan_chunk(&NEXT, &index).expect("planned"))[0], "renoise");
        for step in [0, 2] {
            let refused = d.plan_chunk_from(&NEXT, Some(step), &index).expect_err("no such start");
            assert_eq!(refused[0].code.id, "T0721", "step {step}");
        }
        let refused = d.plan_chunk_from(&NEXT, Some(1), &drawn).expect_err("the plan takes no video");
        assert_eq!(refused[0].code.id, "T0722");
        let warmup = index.warmup_phases();
        let at = |name: &str| warmup.iter().position(|p| p.program == name).expect("listed");
        assert!(at("video") < at("renoise"));
    }

    const FIRST: ChunkRequest = ChunkRequest { prompt_change: true, ..NEXT };
    const NEXT: ChunkRequest =
        ChunkRequest { prompt_change: false, seed: 7, cut: SceneCut::None, step_list: 0, bias: None };

    #[test]
    fn a_request_chooses_an_admitted_list_of_steps_and_a_bias() {
        let (mut d, index) = (Director::new(spec(CacheRegime::Resident, 9)).expect("legal"), program_index());
        d.plan_chunk(&FIRST, &index).expect("planned");
        let request = ChunkRequest { step_list: 1, bias: Some(F32Bits::new(0.5)), ..NEXT };
        let fast = d.plan_chunk(&request, &index).expect("planned");
        assert_eq!(programs(&fast), ["renoise", "denoise.fill3", "clean.fill3", "emit"]);
        let meta = fast.meta.expect("a chunk");
        let work = meta.chunk_work().expect("a chunk");
        assert_eq!((work.step_list, work.n_steps, work.kv_bias.get()), (1, 1, 0.5));
        assert_eq!(meta.phases[1].scalar_arg("bias"), Some(&ScalarArg::from_f32(0.5f32.ln())));
        let own = d.plan_chunk(&NEXT, &index).expect("planned").meta.expect("a chunk");
        let work = own.chunk_work().expect("a chunk");
        assert_eq!(
            (work.step_list, work.n_steps, work.kv_bias.get()),
            (0, 2, 0.3),
            "a request changes one chunk"
        );
        let refused = d.plan_chunk(&ChunkRequest { step_list: 2, ..NEXT }, &index).expect_err("not admitted");
        assert_eq!(refused[0].code.id, "T0721");
    }

    #[test]
    fn resident_chunks_fill_the_ring_then_stay_in_steady_state() {
        let (mut d, index) = (Director::new(spec(CacheRegime::Resident, 9)).expect("legal"), program_index());
        let first = d.plan_chunk(&FIRST, &index).expect("planned");
        let pass = ["renoise", "denoise.fill0"];
        assert_eq!(programs(&first), [&["text"][..], &pass, &pass, &["clean.fill0", "emit"]].concat());
        assert_eq!(first.meta.as_ref().map(|m| m.expected_generator_calls), Some(3));
        d.plan_chunk(&NEXT, &index).expect("planned");
        let mut evicted = Vec::new();
        for chunk in 2..6u32 {
            let plan = d.plan_chunk(&NEXT, &index).expect("planned");
            assert_eq!(
                programs(&plan),
                ["renoise", "denoise.fill6", "renoise", "denoise.fill6", "clean.fill6", "emit"]
            );
            evicted.push(plan.evicted_frames);
            let meta = plan.meta.expect("a chunk");
            assert_eq!((plan.chunk, meta.start_frame()), (chunk, chunk * 3));
            assert_eq!(meta.phases[1].int_arg("row"), Some(i64::from(chunk * 3 % 9 * 10)));
            assert_eq!(meta.phases[2].int_arg("draw"), Some(1));
        }
        assert_eq!(evicted, [0, 3, 3, 3], "the window holds three chunks");
        let cut = ChunkRequest { cut: SceneCut::Ordered, ..FIRST };
        let cut = d.plan_chunk(&cut, &index).expect("planned");
        assert_eq!(cut.evicted_frames, 0, "a cut clears the caches instead");
    }

    #[test]
    fn the_end_of_the_table_is_a_rebase_and_not_a_cut() {
        let (mut d, index) = (Director::new(spec(CacheRegime::Resident, 9)).expect("legal"), program_index());
        d.plan_chunk(&FIRST, &index).expect("planned");
        let mut rebased = Vec::new();
        for chunk in 1..700 {
            let plan = d.plan_chunk(&NEXT, &index).expect("planned");
            assert_eq!(plan.cache_epoch, 0);
            if let Some(p) = plan.meta.iter().flat_map(|m| &m.phases).find(|p| p.program == "rebase") {
                rebased.push((chunk, p.int_arg("shift")));
            }
        }
        assert_eq!(rebased, [(341, Some(-1017)), (680, Some(-1017))]);
    }

    #[test]
    fn a_new_prompt_recaches_the_ring_and_leaves_the_sink() {
        let drawn = program_index();
        let more = ["recall.back1", "recall.back2", "clean.fill9", "denoise.fill9"].map(String::from);
        let names = drawn.warmup_phases().into_iter().map(|p| p.program).chain(more);
        let clean = drawn.get("clean.fill6").cloned().unwrap_or_default();
        let infos = names.map(|n| {
            let info = if n.starts_with("clean") {
                clean.clone()
            } else {
                drawn.get(&n).cloned().unwrap_or_default()
            };
            (n, info)
        });
        let index = ProgramIndex::new(infos.collect::<Vec<_>>());
        let mut stream = spec(CacheRegime::Resident, 12);
        (stream.cache.sink_frames, stream.cache.table_frames) = (6, 24);
        let mut d = Director::new(stream).expect("legal");
        let again = ChunkRequest { prompt_change: true, ..NEXT };
        assert!(!programs(&d.plan_chunk(&FIRST, &index).expect("planned")).contains(&"recall.back1"));
        let in_sink = d.plan_chunk(&again, &index).expect("planned");
        assert_eq!(programs(&in_sink)[..2], ["text", "renoise"], "the sink alone is cached");
        for _ in 2..7 {
            d.plan_chunk(&NEXT, &index).expect("planned");
        }
        let plan = d.plan_chunk(&again, &index).expect("planned");
        let recached = ["text", "recall.back2", "clean.fill6", "recall.back1", "clean.fill9", "renoise"];
        assert_eq!(programs(&plan)[..6], recached);
        let meta = plan.meta.expect("a chunk");
        let place = |at: usize| (meta.phases[at].int_arg("start"), meta.phases[at].int_arg("row"));
        assert_eq!((place(2), place(4)), ((Some(15), Some(60)), (Some(18), Some(90))));
        assert_eq!((meta.start_frame(), meta.expected_generator_calls), (21, 5));
        // The positions end: the ring is written at its old positions and then moves behind the sink.
        let plan = d.plan_chunk(&again, &index).expect("planned");
        assert_eq!(programs(&plan)[3..7], ["recall.back1", "clean.fill9", "rebase", "renoise"]);
        let meta = plan.meta.expect("a chunk");
        assert_eq!((meta.phases[5].int_arg("shift"), meta.start_frame()), (Some(-15), 9));
    }

    #[test]
    fn recompute_chunks_begin_with_their_context() {
        let (mut d, index) =
            (Director::new(spec(CacheRegime::Recompute, 6)).expect("legal"), program_index());
        let first = d.plan_chunk(&FIRST, &index).expect("planned");
        assert_eq!(
            programs(&first),
            ["text", "renoise", "denoise.fill0", "renoise", "denoise.fill0", "emit"]
        );
        let next = d.plan_chunk(&NEXT, &index).expect("planned");
        assert_eq!(
            programs(&next),
            ["recompute", "renoise", "denoise.fill3", "renoise", "denoise.fill3", "emit"]
        );
        let meta = next.meta.expect("a chunk");
        assert_eq!(
            (meta.start_frame(), meta.expected_generator_calls, meta.recomputes_context()),
            (3, 3, true)
        );
        assert_eq!(meta.phases[2].scalar_arg("bias"), Some(&ScalarArg::from_f32(0.3f32.ln())));
        let cut = ChunkRequest { cut: SceneCut::Ordered, ..NEXT };
        let plan = d.plan_chunk(&cut, &index).expect("planned");
        assert_eq!((plan.cache_epoch, plan.chunk), (1, 2), "the stream's chunk number continues");
        assert_eq!(programs(&plan)[..3], ["text", "renoise", "denoise.fill0"]);
        assert_eq!(plan.meta.expect("a chunk").phases[1].int_arg("chunk"), Some(2));
    }

    // proves: K-04, K-07
    #[test]
    fn a_reset_without_a_chunk_opens_a_scene_and_brings_the_text_again() {
        let (mut d, index) =
            (Director::new(spec(CacheRegime::Recompute, 6)).expect("legal"), program_index());
        assert!(d.plan_chunk(&FIRST, &index).expect("planned").opens_scene);
        assert!(!d.plan_chunk(&NEXT, &index).expect("planned").opens_scene);
        assert_eq!(d.plan_control_call(CallAction::Noop).expect("planned").cache_epoch, 0);
        assert_eq!(d.plan_control_call(CallAction::Reset).expect("planned").cache_epoch, 1);
        assert_eq!(d.plan_control_call(CallAction::Reload).expect("planned").cache_epoch, 2);
        let plan = d.plan_chunk(&NEXT, &index).expect("planned");
        assert!(plan.opens_scene && programs(&plan)[0] == "text");
        assert_eq!((plan.chunk, plan.cache_epoch), (2, 2));
        assert!(
            plan.meta.is_some_and(|m| m.replaces_prompt() && !m.resets_caches() && !m.recomputes_context())
        );
    }

    #[test]
    fn a_warm_up_runs_each_program_once_and_moves_nothing() {
        let (d, index) = (Director::new(spec(CacheRegime::Resident, 9)).expect("legal"), program_index());
        let before = d.cache_state().state_digest();
        let plan = d.plan_warmup(&index).expect("planned");
        let mut names = programs(&plan);
        assert_eq!((names.len(), names[0], names[names.len() - 1]), (11, "text", "emit"));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 11);
        let meta = plan.meta.expect("a payload");
        let renoise = meta.phases.iter().find(|p| p.program == "renoise").expect("one");
        assert_eq!(
            (renoise.scalar_arg("sigma"), renoise.int_arg("draw")),
            (Some(&ScalarArg::from_f32(1.0)), Some(0))
        );
        assert_eq!((meta.predicted_state, d.cache_state().state_digest()), (before, before));
    }

    #[test]
    fn refusals_leave_the_director_as_it_was() {
        let mut d = Director::new(spec(CacheRegime::Resident, 9)).expect("legal");
        let before = d.cache_state().state_digest();
        assert_eq!(d.plan_chunk(&NEXT, &program_index()).expect_err("no prompt")[0].code.id, "T0721");
        let ids: Vec<_> = d
            .plan_chunk(&FIRST, &ProgramIndex::default())
            .expect_err("empty")
            .iter()
            .map(|d| d.code.id)
            .collect();
        assert!(ids.iter().all(|id| *id == "T0722") && ids.len() == 7);
        assert_eq!(d.cache_state().state_digest(), before);
        let mut bad = spec(CacheRegime::Resident, 9);
        (bad.bias, bad.step_lists[0].steps[1].sigma) = (0.0, 2.0);
        assert_eq!(Director::new(bad).expect_err("refused").len(), 3);
    }
}
