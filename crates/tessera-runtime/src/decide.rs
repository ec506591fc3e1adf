//! Decides each call on the leader: which phases run, with which scalars, and what they add up to.
//!
//! Everything that may change what a rank does is decided here once and sent; workers derive nothing.

use tessera_base::{Code, Diagnostic, Diagnostics};

use crate::cache::{Cache, CacheSpec, Regime, Stage, Transition};
use crate::census::Census;
use crate::wire::{Arg, CallAction, CallMeta, F32Bits, PhaseCall};

use serde::{Deserialize, Serialize};

/// A stream that cannot be.
pub(crate) static T0720: Code = Code {
    id: "T0720",
    title: "the stream's settings are refused",
    page: "A stream needs at least one denoise step, each with a finite timestep and a noise level between 0 and 1 \
that never grows, and an attention bias above 0. Only the leader reads these; a worker receives what follows from \
them.\n\nThe step list of a distilled model belongs to the model: start from the values that its recipe gives.",
};
/// A request that no plan can serve.
pub(crate) static T0721: Code = Code {
    id: "T0721",
    title: "a chunk request is refused",
    page: "The first chunk of a session must bring a prompt, because there are no text keys and values to attend \
to before it. A request that brings a prompt must bring its embedding. The request was refused before any rank heard of \
it.",
};

/// One denoise step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Step {
    /// What the time embedding receives.
    pub timestep: f32,
    /// Noise level, 1 for pure noise.
    pub sigma: f32,
}

/// What never changes in a stream.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamSpec {
    /// Sizes and regime of the caches.
    pub cache: CacheSpec,
    /// Attention bias b on context keys; 1 for none. Programs that take it receive ln b.
    pub bias: f32,
    /// Denoise steps, noisiest first.
    pub steps: Vec<Step>,
}

impl StreamSpec {
    /// Everything that is wrong with it.
    #[must_use]
    pub fn check(&self) -> Diagnostics {
        let mut found = Vec::new();
        let mut refuse = |what: String| found.push(Diagnostic::error(&T0720, what));
        if self.steps.is_empty() {
            refuse("a stream needs at least one denoise step".into());
        }
        for (i, s) in self.steps.iter().enumerate() {
            if !s.timestep.is_finite() || !(0.0..=1.0).contains(&s.sigma) {
                refuse(format!("step {i} has timestep {} and noise level {}", s.timestep, s.sigma));
            }
        }
        for (i, pair) in self.steps.windows(2).enumerate() {
            if pair[1].sigma > pair[0].sigma {
                refuse(format!(
                    "the noise level grows from {} at step {i} to {} at step {}",
                    pair[0].sigma,
                    pair[1].sigma,
                    i + 1
                ));
            }
        }
        if !(self.bias.is_finite() && self.bias > 0.0) {
            refuse(format!("the attention bias is {}, not a number above 0", self.bias));
        }
        if let Err(d) = Cache::new(self.cache) {
            found.push(d);
        }
        found
    }
}

/// Whether a chunk begins a new scene, and what becomes of the chunks before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub enum Cut {
    /// The scene goes on.
    #[default]
    None,
    /// A new scene, after everything that was asked for before it.
    Ordered,
    /// A new scene now: what was asked for before it and is not delivered yet is drained and discarded.
    Flush,
}

impl Cut {
    /// Whether a scene begins.
    #[must_use]
    pub fn is_cut(self) -> bool {
        self != Cut::None
    }
}

/// What a person asked of one chunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChunkRequest {
    /// A new prompt takes effect with this chunk.
    pub prompt_change: bool,
    /// Seed of the chunk's random draws.
    pub seed: u64,
    /// Hard cut before this chunk.
    pub cut: Cut,
}

/// A call as the leader decided it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CallPlan {
    /// What it is for.
    pub action: CallAction,
    /// Chunk of the stream.
    pub chunk: u32,
    /// Life of the caches in which it runs.
    pub cache_epoch: u32,
    /// The payload of a chunk or of the warm-up.
    pub meta: Option<CallMeta>,
    /// Whether the chunk is the first of its scene.
    pub opens_scene: bool,
}

/// Plans the calls of a stream one after the other, ahead of their running.
#[derive(Debug, Clone)]
pub struct Director {
    spec: StreamSpec,
    /// State after the last planned call.
    cache: Cache,
}

impl Director {
    /// Refuses a stream that cannot be.
    pub fn new(spec: StreamSpec) -> Result<Director, Diagnostics> {
        let found = spec.check();
        if !found.is_empty() {
            return Err(found);
        }
        let cache = Cache::new(spec.cache).map_err(|d| vec![d])?;
        Ok(Director { spec, cache })
    }

    /// Plans the next chunk. A refusal leaves the director as it was.
    pub fn next(&mut self, request: &ChunkRequest, census: &Census) -> Result<CallPlan, Diagnostics> {
        let mut draft = Draft { cache: self.cache.clone(), phases: Vec::new(), census, found: Vec::new() };
        let cut = request.cut.is_cut();
        draft.cache.begin_call(cut).map_err(|d| vec![d])?;
        let chunk = draft.cache.chunk();
        let opens_scene = draft.cache.stage() == Stage::Empty;
        // A cut forgets the text keys and values too, also one that came without a chunk.
        let text = request.prompt_change || opens_scene;
        if draft.cache.prompt_epoch() == 0 && !request.prompt_change {
            return Err(vec![
                Diagnostic::error(&T0721, "the first chunk of a session brings no prompt")
                    .at("request", format!("chunk {chunk}, no prompt")),
            ]);
        }
        if text {
            draft.phase("text", &[]);
        }
        if let Some(frames) = draft.cache.rebase_due() {
            // Keys turn back, so the rotation is negative.
            draft.phase("rebase", &[("shift", Arg::I64(-i64::from(frames)))]);
        }
        let zeros = Arg::f32s(&vec![0.0; self.spec.cache.chunk_frames as usize]);
        let recompute = self.spec.cache.regime == Regime::Recompute && draft.cache.stage() == Stage::Holding;
        if recompute {
            let args = [("t", zeros.clone()), ("start", Arg::I64(0)), ("row", Arg::I64(0))];
            draft.phase("recompute", &args);
        }
        let start_frame = draft.cache.start_frame();
        let start = Arg::I64(i64::from(start_frame));
        let row = Arg::I64(draft.cache.row() as i64);
        let fill = draft.cache.fill_frames();
        let bias = Arg::f32(self.spec.bias.ln());
        for (draw, step) in self.spec.steps.iter().enumerate() {
            draft.phase(
                "renoise",
                &[
                    ("sigma", Arg::f32(step.sigma)),
                    ("seed", Arg::I64(request.seed as i64)),
                    ("chunk", Arg::I64(i64::from(chunk))),
                    ("draw", Arg::I64(draw as i64)),
                ],
            );
            let t = Arg::f32s(&vec![step.timestep; self.spec.cache.chunk_frames as usize]);
            draft.phase(
                &format!("denoise.fill{fill}"),
                &[
                    ("t", t),
                    ("sigma", Arg::f32(step.sigma)),
                    ("start", start.clone()),
                    ("row", row.clone()),
                    ("bias", bias.clone()),
                ],
            );
        }
        if self.spec.cache.regime == Regime::Resident {
            let args = [("t", zeros), ("start", start), ("row", row), ("bias", bias)];
            draft.phase(&format!("clean.fill{fill}"), &args);
        }
        draft.phase("emit", &[]);
        let (cache, phases) = draft.finish()?;
        let expected = census.expect(&phases)?;
        let meta = CallMeta {
            n_steps: self.spec.steps.len() as u32,
            expected_generator_calls: expected.generator_calls,
            expected_collectives: expected.collectives,
            expected_trace_digest: expected.trace,
            reset_kv: cut,
            reset_cross: text,
            recompute,
            start_frame,
            seed: request.seed,
            prompt_epoch: cache.prompt_epoch(),
            kv_bias: F32Bits::new(self.spec.bias),
            phases,
            predicted_state: cache.digest(),
        };
        let plan = CallPlan {
            action: CallAction::Infer,
            chunk,
            cache_epoch: cache.epoch(),
            meta: Some(meta),
            opens_scene,
        };
        self.cache = cache;
        Ok(plan)
    }

    /// Plans the call that runs every program of the plan once. It leaves the state as it is.
    pub fn warmup(&self, census: &Census) -> Result<CallPlan, Diagnostics> {
        let meta = warmup_meta(census, &self.cache)?;
        Ok(CallPlan {
            action: CallAction::Warmup,
            chunk: self.cache.chunk(),
            cache_epoch: self.cache.epoch(),
            meta: Some(meta),
            opens_scene: false,
        })
    }

    /// Plans a call without a chunk: one that cuts, reloads, ends, or does nothing.
    pub fn control(&mut self, action: CallAction) -> Result<CallPlan, Diagnostics> {
        if matches!(action, CallAction::Reset | CallAction::Reload) {
            self.cache.apply(Transition::Reset).map_err(|d| vec![d])?;
        }
        Ok(CallPlan {
            action,
            chunk: self.cache.chunk(),
            cache_epoch: self.cache.epoch(),
            meta: None,
            opens_scene: false,
        })
    }

    /// State after the last planned call.
    #[must_use]
    pub fn cache(&self) -> &Cache {
        &self.cache
    }
}

/// The payload of a warm-up in this state: the one that leader and workers compute alike.
pub(crate) fn warmup_meta(census: &Census, cache: &Cache) -> Result<CallMeta, Diagnostics> {
    let phases = census.warmup();
    let expected = census.expect(&phases)?;
    Ok(CallMeta {
        n_steps: 0,
        expected_generator_calls: expected.generator_calls,
        expected_collectives: expected.collectives,
        expected_trace_digest: expected.trace,
        reset_kv: false,
        reset_cross: false,
        recompute: false,
        start_frame: 0,
        seed: 0,
        prompt_epoch: cache.prompt_epoch(),
        kv_bias: F32Bits::new(1.0),
        phases,
        predicted_state: cache.digest(),
    })
}

/// A call under construction.
struct Draft<'a> {
    cache: Cache,
    phases: Vec<PhaseCall>,
    census: &'a Census,
    found: Diagnostics,
}

impl Draft<'_> {
    /// Adds a phase with those of the offered scalars that its program declares.
    fn phase(&mut self, program: &str, offered: &[(&str, Arg)]) {
        let facts = match self.census.get(program) {
            Ok(facts) => facts,
            Err(d) => return self.found.push(d),
        };
        let args = offered
            .iter()
            .filter(|(name, _)| facts.scalars.iter().any(|(n, _)| n == name))
            .map(|(name, arg)| ((*name).to_string(), arg.clone()))
            .collect();
        let phase = PhaseCall::new(program, args);
        self.found.extend(self.census.check_args(&phase));
        if let Err(d) = self.cache.run_phase(&phase) {
            self.found.push(d);
        }
        self.phases.push(phase);
    }

    fn finish(self) -> Result<(Cache, Vec<PhaseCall>), Diagnostics> {
        if self.found.is_empty() { Ok((self.cache, self.phases)) } else { Err(self.found) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::census::{ArgKind, PhaseKind, ProgramFacts};
    use crate::wire::PhaseCall;

    fn census() -> Census {
        let mut programs = Vec::new();
        let mut add = |name: &str, scalars: &[(&str, ArgKind)]| {
            let scalars = scalars.iter().map(|(n, k)| ((*n).to_string(), *k)).collect();
            let facts = ProgramFacts { collectives: name.len() as u64, scalars, ..ProgramFacts::default() };
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
        Census::new(programs)
    }

    fn spec(regime: Regime, window_frames: u32) -> StreamSpec {
        let cache =
            CacheSpec { regime, chunk_frames: 3, window_frames, table_frames: 1024, tokens_per_frame: 10 };
        let steps = vec![Step { timestep: 1000.0, sigma: 1.0 }, Step { timestep: 500.0, sigma: 0.5 }];
        StreamSpec { cache, bias: 0.3, steps }
    }

    fn programs(plan: &CallPlan) -> Vec<&str> {
        plan.meta.iter().flat_map(|m| &m.phases).map(|p| p.program.as_str()).collect()
    }

    const FIRST: ChunkRequest = ChunkRequest { prompt_change: true, seed: 7, cut: Cut::None };
    const NEXT: ChunkRequest = ChunkRequest { prompt_change: false, seed: 7, cut: Cut::None };

    #[test]
    fn resident_chunks_fill_the_ring_then_stay_in_steady_state() {
        let (mut d, census) = (Director::new(spec(Regime::Resident, 9)).expect("legal"), census());
        let first = d.next(&FIRST, &census).expect("planned");
        let pass = ["renoise", "denoise.fill0"];
        assert_eq!(programs(&first), [&["text"][..], &pass, &pass, &["clean.fill0", "emit"]].concat());
        assert_eq!(first.meta.as_ref().map(|m| m.expected_generator_calls), Some(3));
        d.next(&NEXT, &census).expect("planned");
        for chunk in 2..6u32 {
            let plan = d.next(&NEXT, &census).expect("planned");
            assert_eq!(
                programs(&plan),
                ["renoise", "denoise.fill6", "renoise", "denoise.fill6", "clean.fill6", "emit"]
            );
            let meta = plan.meta.expect("a chunk");
            assert_eq!((plan.chunk, meta.start_frame), (chunk, chunk * 3));
            assert_eq!(meta.phases[1].int("row"), Some(i64::from(chunk * 3 % 9 * 10)));
            assert_eq!(meta.phases[2].int("draw"), Some(1));
        }
    }

    #[test]
    fn the_end_of_the_table_is_a_rebase_and_not_a_cut() {
        let (mut d, census) = (Director::new(spec(Regime::Resident, 9)).expect("legal"), census());
        d.next(&FIRST, &census).expect("planned");
        let mut rebased = Vec::new();
        for chunk in 1..700 {
            let plan = d.next(&NEXT, &census).expect("planned");
            assert_eq!(plan.cache_epoch, 0);
            if let Some(p) = plan.meta.iter().flat_map(|m| &m.phases).find(|p| p.program == "rebase") {
                rebased.push((chunk, p.int("shift")));
            }
        }
        assert_eq!(rebased, [(341, Some(-1017)), (680, Some(-1017))]);
    }

    #[test]
    fn recompute_chunks_begin_with_their_context() {
        let (mut d, census) = (Director::new(spec(Regime::Recompute, 6)).expect("legal"), census());
        let first = d.next(&FIRST, &census).expect("planned");
        assert_eq!(
            programs(&first),
            ["text", "renoise", "denoise.fill0", "renoise", "denoise.fill0", "emit"]
        );
        let next = d.next(&NEXT, &census).expect("planned");
        assert_eq!(
            programs(&next),
            ["recompute", "renoise", "denoise.fill3", "renoise", "denoise.fill3", "emit"]
        );
        let meta = next.meta.expect("a chunk");
        assert_eq!((meta.start_frame, meta.expected_generator_calls, meta.recompute), (3, 3, true));
        assert_eq!(meta.phases[2].arg("bias"), Some(&Arg::f32(0.3f32.ln())));
        let cut = ChunkRequest { cut: Cut::Ordered, ..NEXT };
        let plan = d.next(&cut, &census).expect("planned");
        assert_eq!((plan.cache_epoch, plan.chunk), (1, 2), "the stream's chunk number goes on");
        assert_eq!(programs(&plan)[..3], ["text", "renoise", "denoise.fill0"]);
        assert_eq!(plan.meta.expect("a chunk").phases[1].int("chunk"), Some(2));
    }

    #[test]
    fn a_reset_without_a_chunk_opens_a_scene_and_brings_the_text_again() {
        let (mut d, census) = (Director::new(spec(Regime::Recompute, 6)).expect("legal"), census());
        assert!(d.next(&FIRST, &census).expect("planned").opens_scene);
        assert!(!d.next(&NEXT, &census).expect("planned").opens_scene);
        assert_eq!(d.control(CallAction::Noop).expect("planned").cache_epoch, 0);
        assert_eq!(d.control(CallAction::Reset).expect("planned").cache_epoch, 1);
        assert_eq!(d.control(CallAction::Reload).expect("planned").cache_epoch, 2);
        let plan = d.next(&NEXT, &census).expect("planned");
        assert!(plan.opens_scene && programs(&plan)[0] == "text");
        assert_eq!((plan.chunk, plan.cache_epoch), (2, 2));
        assert!(plan.meta.is_some_and(|m| m.reset_cross && !m.reset_kv && !m.recompute));
    }

    #[test]
    fn a_warm_up_runs_each_program_once_and_moves_nothing() {
        let (d, census) = (Director::new(spec(Regime::Resident, 9)).expect("legal"), census());
        let before = d.cache().digest();
        let plan = d.warmup(&census).expect("planned");
        let mut names = programs(&plan);
        assert_eq!((names.len(), names[0], names[names.len() - 1]), (11, "text", "emit"));
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), 11);
        let meta = plan.meta.expect("a payload");
        let renoise = meta.phases.iter().find(|p| p.program == "renoise").expect("one");
        assert_eq!((renoise.arg("sigma"), renoise.int("draw")), (Some(&Arg::f32(1.0)), Some(0)));
        assert_eq!((meta.predicted_state, d.cache().digest()), (before, before));
    }

    #[test]
    fn refusals_leave_the_director_as_it_was() {
        let mut d = Director::new(spec(Regime::Resident, 9)).expect("legal");
        let before = d.cache().digest();
        assert_eq!(d.next(&NEXT, &census()).expect_err("no prompt")[0].code.id, "T0721");
        let ids: Vec<_> =
            d.next(&FIRST, &Census::default()).expect_err("empty").iter().map(|d| d.code.id).collect();
        assert!(ids.iter().all(|id| *id == "T0722") && ids.len() == 7);
        assert_eq!(d.cache().digest(), before);
        let mut bad = spec(Regime::Resident, 9);
        (bad.bias, bad.steps[1].sigma) = (0.0, 2.0);
        assert_eq!(Director::new(bad).expect_err("refused").len(), 3);
    }

    #[test]
    fn equal_content_has_equal_bytes_whatever_the_order_of_its_making() {
        let args: Vec<(String, Arg)> =
            (0..6).map(|i| (format!("a{i}"), Arg::f32(if i == 3 { -f32::NAN } else { i as f32 }))).collect();
        let want = PhaseCall::new("denoise", args.clone());
        let mut order = args;
        for i in 0..1000usize {
            let n = order.len();
            order.swap(i % n, (i * 7 + 3) % n);
            assert_eq!(PhaseCall::new("denoise", order.clone()), want);
        }
        assert!(PhaseKind::of("denoise.fill3").is_some_and(PhaseKind::is_generator));
    }
}
