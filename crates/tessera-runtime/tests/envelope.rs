//! Breaks each field of the envelope once and checks that the check reports the code listed in the
//! table.

mod support;

use support::{
    SESSION, context_tensor, plan_digest, prompt_tensor, test_programs, test_programs_with_noise,
    test_programs_with_recache, test_programs_with_video, test_stream,
};
use tessera_runtime::call_state::{CallState, CallStateSpec, SessionSpec};
use tessera_runtime::director::{ChunkRequest, Director, SceneCut};
use tessera_runtime::envelope_check::{LocalState, check_context, check_envelope};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::paged_cache::PagedCacheSpec;
use tessera_runtime::program_index::{ArgKind, InputSpec, ProgramIndex, ProgramInfo};
use tessera_runtime::wire::{
    CallAction, CallMeta, CallWork, ChunkWork, Dtype, ENVELOPE_FIELDS, Envelope, EnvelopeHeader, F32Bits,
    NewSequence, PhaseCall, Reload, ScalarArg, SequenceRows, Tensor, Tensors, TokenWork, WIRE_VERSION,
};
use tessera_runtime::{Digest, Tripwires};

/// The second call of a recompute stream with a new prompt, and the cache before that call.
fn second_call() -> (Envelope, CallState) {
    let mut director = Director::new(test_stream(CacheRegime::Recompute)).expect("legal");
    let request = ChunkRequest { prompt_change: true, seed: 7, ..ChunkRequest::default() };
    director.plan_chunk(&request, &test_programs()).expect("planned");
    let before = CallState::Video(director.cache_state().clone());
    let call = director.plan_chunk(&request, &test_programs()).expect("planned");
    let header = EnvelopeHeader {
        version: WIRE_VERSION,
        action: CallAction::Infer,
        plan: plan_digest(),
        session: SESSION,
        call_id: 2,
        chunk: call.chunk,
        cache_epoch: call.cache_epoch,
        deadline_ms: 5000,
    };
    (Envelope { header, meta: call.meta, reload: None, tensors: Tensors(vec![prompt_tensor(1)]) }, before)
}

fn refusal_codes(e: &Envelope, before: &CallState) -> Vec<&'static str> {
    codes_under(e, before, &test_programs(), &Tripwires::default())
}

fn codes_under(
    e: &Envelope,
    before: &CallState,
    programs: &ProgramIndex,
    tripwires: &Tripwires,
) -> Vec<&'static str> {
    let session_spec = match before {
        CallState::Video(_) => SessionSpec::Video(test_stream(CacheRegime::Recompute)),
        CallState::Text(_) => SessionSpec::Text(token_pages()),
        CallState::Arrays(_) => SessionSpec::Arrays,
    };
    let local = LocalState {
        plan: plan_digest(),
        session: SESSION,
        last_call_id: 1,
        state: before,
        session_spec: &session_spec,
        programs,
        open_calls: 0,
        tripwires,
    };
    check_envelope(e, &local).err().unwrap_or_default().iter().map(|d| d.code.id).collect()
}

fn noise_tensor() -> Tensor {
    Tensor::from_f32("noise", &[2, 2], &[0.5; 4]).expect("fits")
}

/// A plan whose calls carry noise accepts no call without it, and none that draws the noise instead; the
/// usual plan accepts no call that carries it.
#[test]
fn given_noise_is_sent_exactly_where_the_plan_takes_it() {
    let takes_noise = test_programs_with_noise();
    let mut director = Director::new(test_stream(CacheRegime::Resident)).expect("legal");
    let request = ChunkRequest { prompt_change: true, seed: 7, ..ChunkRequest::default() };
    let before = CallState::Video(director.cache_state().clone());
    let mut drawing = director.clone();
    let call = director.plan_chunk(&request, &takes_noise).expect("planned");
    let (mut e, _) = second_call();
    e.header.chunk = call.chunk;
    e.header.cache_epoch = call.cache_epoch;
    e.meta = call.meta;
    e.tensors = Tensors(vec![prompt_tensor(1), noise_tensor()]);
    let codes = |e: &Envelope| codes_under(e, &before, &takes_noise, &Tripwires::default());
    assert_eq!(codes(&e), [] as [&str; 0]);
    let without = Envelope { tensors: Tensors(vec![prompt_tensor(1)]), ..e.clone() };
    assert_eq!(codes(&without), ["T0735"]);
    let drawn = drawing.plan_chunk(&request, &test_programs()).expect("planned").meta;
    let drawn = Envelope { meta: drawn, ..without };
    assert!(codes(&drawn).contains(&"T0732"), "{:?}", codes(&drawn));
    assert!(codes_under(&e, &before, &test_programs(), &Tripwires::default()).contains(&"T0722"));
}

/// The test programs and those of pixels.
fn programs_with_pixels() -> ProgramIndex {
    let known = test_programs();
    let names = known.warmup_phases().into_iter().map(|p| p.program);
    let pixels = ["decode.open", "decode.first", "decode.rest", "encode"].map(String::from);
    ProgramIndex::new(
        names.chain(pixels).map(|name| (name.clone(), known.get(&name).cloned().unwrap_or_default())),
    )
}

/// A chunk's call ends with the phases of pixels that fit its place in the scene, and a rank refuses it
/// with others, because the decoder's history would belong to another scene.
#[test]
fn a_call_ends_with_the_phases_of_pixels_that_its_scene_needs() {
    let programs = programs_with_pixels();
    let mut director = Director::new(test_stream(CacheRegime::Recompute)).expect("legal");
    let request = |cut| ChunkRequest { prompt_change: true, seed: 7, cut, ..ChunkRequest::default() };
    let open = ["emit", "decode.open", "decode.rest"];
    let later = ["emit", "decode.first", "encode", "decode.rest"];
    for (call_id, (cut, tail)) in
        [(SceneCut::None, &open[..]), (SceneCut::None, &later), (SceneCut::Ordered, &open)]
            .into_iter()
            .enumerate()
    {
        let before = CallState::Video(director.cache_state().clone());
        let call = director.plan_chunk(&request(cut), &programs).expect("planned");
        let meta = call.meta.expect("a chunk");
        let names: Vec<&str> = meta.phases.iter().map(|p| p.program.as_str()).collect();
        assert!(names.ends_with(tail), "call {call_id}: {names:?}");
        let (mut e, _) = second_call();
        (e.header.chunk, e.header.cache_epoch, e.meta) = (call.chunk, call.cache_epoch, Some(meta));
        let codes = |e: &Envelope| codes_under(e, &before, &programs, &Tripwires::default());
        assert_eq!(codes(&e), [] as [&str; 0], "call {call_id}");
        let change = |change: &dyn Fn(&mut Vec<tessera_runtime::wire::PhaseCall>)| {
            let mut changed = e.clone();
            change(&mut changed.meta.as_mut().expect("a chunk").phases);
            codes(&changed)
        };
        let other = if tail[1] == "decode.open" { "decode.first" } else { "decode.open" };
        let wrong_scene = change(&|phases| {
            phases.iter_mut().filter(|p| p.program == tail[1]).for_each(|p| p.program = other.into());
        });
        assert!(wrong_scene.contains(&"T0732"), "call {call_id}: {wrong_scene:?}");
        assert!(change(&|phases| drop(phases.pop())).contains(&"T0732"), "call {call_id}");
    }
    assert_eq!(
        programs.warmup_phases().len(),
        test_programs().warmup_phases().len() + 4,
        "all are warmed up"
    );
}

fn video_tensor() -> Tensor {
    Tensor::from_f32("video", &[2, 2], &[0.25; 4]).expect("fits")
}

/// A call that begins with a video carries its latents, and no other call does; the number of steps is that
/// of the phases.
#[test]
fn a_video_is_sent_exactly_where_the_call_begins_with_it() {
    let takes_video = test_programs_with_video();
    let mut director = Director::new(test_stream(CacheRegime::Resident)).expect("legal");
    let request = ChunkRequest { prompt_change: true, seed: 7, ..ChunkRequest::default() };
    let before = CallState::Video(director.cache_state().clone());
    let mut drawing = director.clone();
    let call = director.plan_chunk_from(&request, Some(1), &takes_video).expect("planned");
    let (mut e, _) = second_call();
    (e.header.chunk, e.header.cache_epoch, e.meta) = (call.chunk, call.cache_epoch, call.meta);
    e.tensors = Tensors(vec![prompt_tensor(1), video_tensor()]);
    let codes = |e: &Envelope| codes_under(e, &before, &takes_video, &Tripwires::default());
    assert_eq!(codes(&e), [] as [&str; 0]);
    let without = Envelope { tensors: Tensors(vec![prompt_tensor(1)]), ..e.clone() };
    assert_eq!(codes(&without), ["T0735"]);
    let drawn = drawing.plan_chunk(&request, &takes_video).expect("planned").meta;
    assert_eq!(codes(&Envelope { meta: drawn.clone(), ..without }), [] as [&str; 0]);
    assert_eq!(codes(&Envelope { meta: drawn, ..e.clone() }), ["T0735"]);
    let mut longer = e.clone();
    longer.meta.iter_mut().for_each(|m| chunk_work(m).n_steps += 1);
    assert!(codes(&longer).contains(&"T0732"));
    assert!(codes_under(&e, &before, &test_programs(), &Tripwires::default()).contains(&"T0722"));
}

/// A prompt that changes within a scene writes every chunk of the ring again. A rank refuses a call that
/// leaves one out, that recalls them in another order, or that recalls without a new prompt.
#[test]
fn a_new_prompt_recalls_every_chunk_of_the_ring() {
    let recaches = test_programs_with_recache();
    let mut director = Director::new(test_stream(CacheRegime::Resident)).expect("legal");
    let request = ChunkRequest { prompt_change: true, seed: 7, ..ChunkRequest::default() };
    let next = ChunkRequest { prompt_change: false, ..request };
    for chunk in 0..4 {
        director.plan_chunk(if chunk == 0 { &request } else { &next }, &recaches).expect("planned");
    }
    let before = CallState::Video(director.cache_state().clone());
    let mut keeping = director.clone();
    let mut steady = director.clone();
    let call = director.plan_chunk(&request, &recaches).expect("planned");
    let (mut e, _) = second_call();
    (e.header.chunk, e.header.cache_epoch, e.meta) = (call.chunk, call.cache_epoch, call.meta);
    let codes = |e: &Envelope| codes_under(e, &before, &recaches, &Tripwires::default());
    assert_eq!(codes(&e), [] as [&str; 0]);

    let keeps = keeping.plan_chunk(&request, &test_programs()).expect("planned").meta;
    assert!(codes(&Envelope { meta: keeps, ..e.clone() }).contains(&"T0732"));
    let mut swapped = e.clone();
    swapped.meta.iter_mut().for_each(|m| m.phases.swap(1, 3));
    assert!(codes(&swapped).contains(&"T0712"), "{:?}", codes(&swapped));
    let mut partial = e.clone();
    partial.meta.iter_mut().for_each(|m| drop(m.phases.drain(5..7)));
    // The first row of the chunk differs already, because the ring's head moves with the last recache.
    assert!(codes(&partial).contains(&"T0712"), "{:?}", codes(&partial));

    let same_prompt = steady.plan_chunk(&next, &recaches).expect("planned").meta;
    let mut recalls = Envelope { meta: same_prompt, tensors: Tensors(Vec::new()), ..e.clone() };
    assert_eq!(codes(&recalls), [] as [&str; 0]);
    let recall = e.meta.iter().flat_map(|m| m.phases[1..7].to_vec()).collect::<Vec<_>>();
    recalls.meta.iter_mut().for_each(|m| drop(m.phases.splice(0..0, recall.clone())));
    assert!(codes(&recalls).contains(&"T0732"), "{:?}", codes(&recalls));
}

/// A text embedding has the rows and the columns that the text program declares, or no rank computes.
#[test]
fn a_text_embedding_of_another_length_is_refused_with_both_shapes() {
    let request = ChunkRequest { prompt_change: true, seed: 7, ..ChunkRequest::default() };
    let mut director = Director::new(test_stream(CacheRegime::Resident)).expect("legal");
    let before = CallState::Video(director.cache_state().clone());
    let call = director.plan_chunk(&request, &test_programs()).expect("planned");
    let (mut e, _) = second_call();
    (e.header.chunk, e.header.cache_epoch, e.meta) = (call.chunk, call.cache_epoch, call.meta);
    let codes = |e: &Envelope| codes_under(e, &before, &test_programs(), &Tripwires::default());
    e.tensors = Tensors(vec![prompt_tensor(1)]);
    assert_eq!(codes(&e), [] as [&str; 0]);
    for shape in [[3, 2], [5, 2], [4, 1], [4, 3], [2, 4]] {
        let values = vec![0.5; (shape[0] * shape[1]) as usize];
        e.tensors = Tensors(vec![Tensor::from_f32("text", &shape, &values).expect("fits")]);
        assert_eq!(codes(&e), ["T0735"], "{shape:?}");
    }
}

/// A chunk has the noise levels, the timesteps and the number of steps of a list that the plan admits, and one bias.
#[test]
fn a_chunk_with_steps_that_the_plan_does_not_admit_is_refused() {
    let mut director = Director::new(test_stream(CacheRegime::Recompute)).expect("legal");
    let before = CallState::Video(director.cache_state().clone());
    let fast = ChunkRequest {
        prompt_change: true,
        step_list: 1,
        bias: Some(F32Bits::new(0.5)),
        ..ChunkRequest::default()
    };
    let call = director.plan_chunk(&fast, &test_programs()).expect("planned");
    let (mut e, _) = second_call();
    (e.header.chunk, e.header.cache_epoch, e.meta) = (call.chunk, call.cache_epoch, call.meta);
    let codes = |e: &Envelope| codes_under(e, &before, &test_programs(), &Tripwires::default());
    assert_eq!(codes(&e), [] as [&str; 0]);
    type Edit = fn(&mut CallMeta);
    let set = |program: &'static str, name: &'static str, value: ScalarArg| {
        move |m: &mut CallMeta| {
            let phase = m.phases.iter_mut().find(|p| p.program.starts_with(program)).expect("a phase");
            phase.args.iter_mut().filter(|(n, _)| n == name).for_each(|(_, arg)| *arg = value.clone());
        }
    };
    let work: [Edit; 3] = [
        |m| chunk_work(m).step_list = 0,
        |m| chunk_work(m).step_list = 2,
        |m| chunk_work(m).kv_bias = F32Bits::new(0.3),
    ];
    type BoxedEdit = Box<dyn Fn(&mut CallMeta)>;
    let scalars: [BoxedEdit; 3] = [
        Box::new(set("denoise", "sigma", ScalarArg::from_f32(0.5))),
        Box::new(set("denoise", "t", ScalarArg::from_f32s(&[1000.0, 1000.0, 999.0]))),
        Box::new(set("denoise", "bias", ScalarArg::from_f32(0.3f32.ln()))),
    ];
    let edits = work.iter().map(|edit| edit as &dyn Fn(&mut CallMeta));
    for (i, edit) in edits.chain(scalars.iter().map(|edit| &**edit)).enumerate() {
        let mut e = e.clone();
        e.meta.iter_mut().for_each(edit);
        assert_eq!(codes(&e), ["T0732"], "edit {i}");
    }
    // The last bit of a logarithm may differ between hosts.
    let near = f32::from_bits(0.5f32.ln().to_bits() + 1);
    e.meta.iter_mut().for_each(set("denoise", "bias", ScalarArg::from_f32(near)));
    assert_eq!(codes(&e), [] as [&str; 0]);
}

fn chunk_work(m: &mut CallMeta) -> &mut ChunkWork {
    m.chunk_work_mut().expect("a call of a chunk")
}

fn token_work(m: &mut CallMeta) -> &mut TokenWork {
    match &mut m.work {
        CallWork::Tokens(work) => work,
        other => panic!("a call of {other:?}"),
    }
}

/// The pages of the language models of these tests.
fn token_pages() -> PagedCacheSpec {
    PagedCacheSpec { page_rows: 4, pages: 4, pages_per_sequence: 2 }
}

/// A program that takes 4 rows of each of 2 sequences, with 2 pages each.
fn token_programs() -> ProgramIndex {
    let scalars = vec![("pages".to_string(), ArgKind::F32s(4)), ("start".to_string(), ArgKind::F32s(2))];
    let inputs = vec![InputSpec { name: "ids".into(), dtype: Dtype::F32, shape: vec![8] }];
    let info = ProgramInfo { collectives: 5, scalars, inputs, ..ProgramInfo::default() };
    ProgramIndex::new([("tokens.b2.n4".to_string(), info)])
}

/// A program that decodes a row of each of 2 sequences, and one that decodes the ids which the phase before chose.
fn decoding_programs() -> ProgramIndex {
    let scalars = vec![("pages".to_string(), ArgKind::F32s(4)), ("start".to_string(), ArgKind::F32s(2))];
    let next = ProgramInfo { collectives: 5, scalars, ..ProgramInfo::default() };
    let inputs = vec![InputSpec { name: "ids".into(), dtype: Dtype::F32, shape: vec![2] }];
    let first = ProgramInfo { inputs, ..next.clone() };
    ProgramIndex::new([("tokens.b2.n1".to_string(), first), ("tokens.b2.n1.next".to_string(), next)])
}

/// The first call of a language model, whose phases decode an id each: 3 of one sequence and 2 of another.
fn call_of_phases(programs: &[&str]) -> (Envelope, CallState) {
    let before = CallState::new(CallStateSpec::Text(token_pages())).expect("legal");
    let rows = |sequence, count| Some(SequenceRows { sequence, first: 0, count });
    let begin = |sequence, pages: &[u32]| NewSequence { sequence, pages: pages.to_vec() };
    let work = CallWork::Tokens(TokenWork {
        ended: Vec::new(),
        begun: vec![begin(0, &[2]), begin(1, &[1])],
        rows: vec![rows(0, 3), rows(1, 2)],
    });
    let args = [
        ([0.0, 0.0], [2.0, -1.0, 1.0, -1.0]),
        ([1.0, 1.0], [2.0, -1.0, 1.0, -1.0]),
        ([2.0, -1.0], [2.0, -1.0, -1.0, -1.0]),
    ];
    let phase = |(program, (start, pages)): (&&str, ([f32; 2], [f32; 4]))| {
        let args = [("pages", ScalarArg::from_f32s(&pages)), ("start", ScalarArg::from_f32s(&start))];
        PhaseCall::new(*program, args.map(|(name, arg)| (name.to_string(), arg)).to_vec())
    };
    let phases: Vec<PhaseCall> = programs.iter().zip(args).map(phase).collect();
    (envelope_of(&before, work, phases, &decoding_programs()), before)
}

/// Returns the envelope of a call in this state, with numbers for every element of its inputs.
fn envelope_of(
    before: &CallState,
    work: CallWork,
    phases: Vec<PhaseCall>,
    programs: &ProgramIndex,
) -> Envelope {
    let mut after = before.clone();
    after.begin_call(&work).expect("legal");
    phases.iter().for_each(|phase| after.apply_phase(phase).expect("legal"));
    let totals = programs.expected_totals(&phases).expect("known");
    let ids = programs.call_inputs(&phases).into_iter().map(|input| {
        let count = input.shape.iter().product::<u64>() as usize;
        Tensor::from_f32(&input.name, &input.shape, &vec![1.0; count]).expect("fits")
    });
    let tensors = Tensors(ids.collect());
    let (mut e, _) = second_call();
    (e.header.chunk, e.header.cache_epoch) = (before.next_unit(), before.epoch());
    e.meta = Some(CallMeta {
        expected_generator_calls: totals.generator_calls,
        expected_collectives: totals.collectives,
        expected_trace_digest: totals.trace,
        phases,
        predicted_state: after.state_digest(),
        work,
    });
    Envelope { tensors, ..e }
}

// A phase that repeated the first one would decode the ids of the call again, instead of those chosen since.
#[test]
fn every_phase_but_the_first_decodes_the_ids_that_the_one_before_chose() {
    let codes = |programs: &[&str]| {
        let (e, before) = call_of_phases(programs);
        codes_under(&e, &before, &decoding_programs(), &Tripwires::default())
    };
    let (first, next) = ("tokens.b2.n1", "tokens.b2.n1.next");
    assert_eq!(codes(&[first, next, next]), [] as [&str; 0]);
    for programs in [[first, first, next], [first, next, first], [next, next, next]] {
        assert!(codes(&programs).contains(&"T0732"), "{programs:?}");
    }
}

/// The second call of a language model: it ends a sequence, begins another and continues a third.
fn second_token_call() -> (Envelope, CallState) {
    let mut before = CallState::new(CallStateSpec::Text(token_pages())).expect("legal");
    let numbers = |values: &[f32]| ScalarArg::from_f32s(values);
    let phase = |start: &[f32], pages: &[f32]| {
        let args = [("start", numbers(start)), ("pages", numbers(pages))];
        PhaseCall::new("tokens.b2.n4", args.map(|(name, arg)| (name.to_string(), arg)).to_vec())
    };
    let rows = |sequence, first, count| Some(SequenceRows { sequence, first, count });
    let begin = |sequence, pages: &[u32]| NewSequence { sequence, pages: pages.to_vec() };
    let first = TokenWork {
        ended: Vec::new(),
        begun: vec![begin(0, &[2, 0]), begin(1, &[1])],
        rows: vec![rows(0, 0, 3), rows(1, 0, 4)],
    };
    before.begin_call(&CallWork::Tokens(first)).expect("legal");
    before.apply_phase(&phase(&[0.0, 0.0], &[2.0, 0.0, 1.0, -1.0])).expect("legal");
    let work = TokenWork {
        ended: vec![1],
        begun: vec![begin(2, &[1, 3])],
        rows: vec![rows(0, 3, 1), rows(2, 0, 4)],
    };
    let work = CallWork::Tokens(work);
    let phases = vec![phase(&[3.0, 0.0], &[2.0, 0.0, 1.0, 3.0])];
    (envelope_of(&before, work, phases, &token_programs()), before)
}

/// A session of a language model accepts its own calls, and none of a video; a session of a video none of tokens.
#[test]
fn a_call_belongs_to_the_kind_of_its_session() {
    let (e, before) = second_token_call();
    let codes = |e: &Envelope, before, programs: &ProgramIndex| {
        codes_under(e, before, programs, &Tripwires::default())
    };
    assert_eq!(codes(&e, &before, &token_programs()), [] as [&str; 0]);
    let (video, caches) = second_call();
    assert!(
        codes(&Envelope { header: e.header.clone(), ..video }, &before, &test_programs()).contains(&"T0732")
    );
    let (video, _) = second_call();
    assert!(codes(&Envelope { header: video.header, ..e }, &caches, &token_programs()).contains(&"T0732"));
}

/// The index of two array programs, of which each reads an array of its own.
fn array_programs() -> ProgramIndex {
    let program = |name: &str, rows| {
        let inputs = vec![InputSpec { name: format!("{name}.x"), dtype: Dtype::F32, shape: vec![rows, 2] }];
        (name.to_string(), ProgramInfo { collectives: 3, inputs, ..ProgramInfo::default() })
    };
    ProgramIndex::new([program("array.f", 3), program("array.g", 5)])
}

/// The second call of array programs.
fn second_array_call() -> (Envelope, CallState) {
    let mut before = CallState::new(CallStateSpec::Arrays).expect("legal");
    let phase = |name| PhaseCall::new(name, Vec::new());
    before.begin_call(&CallWork::Arrays).expect("legal");
    before.apply_phase(&phase("array.g")).expect("legal");
    (envelope_of(&before, CallWork::Arrays, vec![phase("array.f")], &array_programs()), before)
}

/// A call of arrays runs one program of the plan with its whole inputs, after as many calls on every rank.
#[test]
fn a_call_of_arrays_runs_one_program_of_its_session() {
    let (e, before) = second_array_call();
    let programs = array_programs();
    let codes = |e: &Envelope, before| codes_under(e, before, &programs, &Tripwires::default());
    assert_eq!(codes(&e, &before), [] as [&str; 0]);
    type Edit = fn(&mut Envelope);
    let edits: [(&str, Edit); 5] = [
        ("T0732", |e| e.meta.iter_mut().for_each(|m| m.phases.push(PhaseCall::new("array.g", Vec::new())))),
        ("T0732", |e| e.meta.iter_mut().for_each(|m| m.phases.clear())),
        ("T0722", |e| e.meta.iter_mut().for_each(|m| m.phases[0].program = "array.h".into())),
        ("T0732", |e| e.meta.iter_mut().for_each(|m| m.work = CallWork::Tokens(TokenWork::default()))),
        ("T0735", |e| {
            e.tensors = Tensors(vec![Tensor::from_f32("array.f.x", &[2, 3], &[0.0; 6]).expect("fits")])
        }),
    ];
    for (i, (code, edit)) in edits.iter().enumerate() {
        let mut e = e.clone();
        edit(&mut e);
        assert!(codes(&e, &before).contains(code), "edit {i}: {:?}", codes(&e, &before));
    }
    // A rank that missed a call, and one of another kind of session.
    let behind = CallState::new(CallStateSpec::Arrays).expect("legal");
    assert!(codes(&e, &behind).contains(&"T0712"));
    let (_, caches) = second_call();
    assert!(codes(&e, &caches).contains(&"T0732"));
    let (tokens, _) = second_token_call();
    assert!(codes(&Envelope { header: e.header.clone(), ..tokens }, &before).contains(&"T0732"));
}

// proves: K-02
/// A rank refuses pages, positions and rows that differ from its own sequences, whichever of them an edit
/// changes.
#[test]
fn a_page_table_that_differs_on_one_rank_is_refused() {
    let (untouched, before) = second_token_call();
    type Edit = fn(&mut CallMeta);
    let edits: [(&str, Edit); 6] = [
        ("T0712", |m| m.phases[0].args[0].1 = ScalarArg::from_f32s(&[2.0, 1.0, 1.0, 3.0])),
        ("T0712", |m| m.phases[0].args[1].1 = ScalarArg::from_f32s(&[2.0, 0.0])),
        ("T0710", |m| token_work(m).begun[0].pages = vec![0, 3]),
        ("T0712", |m| token_work(m).begun[0].pages = vec![3, 1]),
        ("T0710", |m| token_work(m).ended.clear()),
        ("T0712", |m| token_work(m).rows.swap(0, 1)),
    ];
    for (i, (code, edit)) in edits.iter().enumerate() {
        let mut e = untouched.clone();
        e.meta.iter_mut().for_each(edit);
        let found = codes_under(&e, &before, &token_programs(), &Tripwires::default());
        assert!(found.contains(code), "edit {i}: {found:?}");
    }
}

fn break_field(e: &mut Envelope, field: &str) {
    let Envelope { header: h, meta, reload, tensors } = e;
    let m: &mut CallMeta = meta.as_mut().expect("a chunk");
    match field {
        "version" => h.version += 1,
        "action" => h.action = CallAction::Warmup,
        "reload" => *reload = Some(Reload { source: "elsewhere".into(), weights: plan_digest() }),
        "plan" => h.plan = Digest::default(),
        "session" => h.session += 1,
        "call_id" => h.call_id = 1,
        "chunk" => h.chunk += 1,
        "cache_epoch" => h.cache_epoch += 1,
        "deadline_ms" => h.deadline_ms = 0,
        "meta" => *meta = None,
        "step_list" => chunk_work(m).step_list = 9,
        "n_steps" => chunk_work(m).n_steps += 1,
        "expected_generator_calls" => m.expected_generator_calls += 1,
        "expected_collectives" => m.expected_collectives -= 1,
        "expected_trace_digest" => m.expected_trace_digest = Digest::default(),
        "reset_kv" => chunk_work(m).reset_kv = true,
        "reset_cross" => chunk_work(m).reset_cross = false,
        "recompute" => chunk_work(m).recompute = false,
        "start_frame" => chunk_work(m).start_frame += 1,
        "seed" => chunk_work(m).seed += 1,
        "prompt_epoch" => chunk_work(m).prompt_epoch -= 1,
        "kv_bias" => chunk_work(m).kv_bias = F32Bits::new(f32::NAN),
        "ended" => token_work(m).ended.push(0),
        "begun" => token_work(m).begun[0].pages = vec![2],
        "rows" => token_work(m).rows[0] = None,
        "work" => m.work = CallWork::Warmup,
        "phases" => m.phases[1].program = "denoise.fill99".into(),
        "predicted_state" => m.predicted_state = Digest::default(),
        "noise" => tensors.0.push(noise_tensor()),
        "video" => tensors.0.push(video_tensor()),
        "text" | "array inputs" => tensors.0.clear(),
        other => panic!("no rule breaks `{other}`: add one for the new field"),
    }
}

#[test]
fn the_untouched_envelope_is_accepted() {
    let (e, before) = second_call();
    assert_eq!(refusal_codes(&e, &before), [] as [&str; 0]);
}

// proves: C-04
#[test]
fn each_broken_field_is_refused_with_its_listed_code() {
    for field in ENVELOPE_FIELDS.iter().filter(|f| f.name != "context") {
        let ((mut e, before), programs) = match field.name {
            "ended" | "begun" | "rows" => (second_token_call(), token_programs()),
            "array inputs" => (second_array_call(), array_programs()),
            _ => (second_call(), test_programs()),
        };
        break_field(&mut e, field.name);
        let found = codes_under(&e, &before, &programs, &Tripwires::default());
        assert!(found.contains(&field.codes), "`{}`: {found:?} lacks {}", field.name, field.codes);
        let off = codes_under(&e, &before, &programs, &Tripwires::disabling([field.codes]));
        assert!(!off.contains(&field.codes), "`{}` is reported although its tripwire is off", field.name);
    }
}

// proves: C-05, C-12
#[test]
fn a_recompute_call_accepts_only_its_own_context() {
    let (e, _) = second_call();
    let meta = e.meta.expect("a chunk");
    let check = |tensors: Vec<Tensor>| {
        check_context(&meta, &Tensors(tensors), &test_programs(), &Tripwires::default())
            .err()
            .unwrap_or_default()
            .first()
            .map(|d| d.code.id)
    };
    let good = context_tensor(&Tensor::from_f32("x", &[4], &[0.0; 4]).expect("fits"));
    assert_eq!(check(vec![good.clone()]), None);
    assert_eq!(check(vec![]), Some("T0735"), "no fallback to an older context");
    assert_eq!(check(vec![prompt_tensor(1)]), Some("T0735"));
    assert_eq!(check(vec![good, prompt_tensor(1)]), Some("T0735"));
}

// proves: K-08
#[test]
fn keys_or_values_of_a_cache_in_a_message_are_refused() {
    let (mut e, before) = second_call();
    assert_eq!(refusal_codes(&e, &before), [] as [&str; 0]);
    e.tensors.0.push(Tensor::from_f32("kv.0.k", &[4], &[0.0; 4]).expect("fits"));
    assert_eq!(refusal_codes(&e, &before), ["T0735"]);
}

#[test]
fn actions_without_payload_carry_none() {
    let (e, before) = second_call();
    for action in [CallAction::Noop, CallAction::Reset, CallAction::Shutdown] {
        let epoch = u32::from(action == CallAction::Reset);
        let header = EnvelopeHeader { action, cache_epoch: epoch, ..e.header.clone() };
        let bare = Envelope { header, meta: None, reload: None, tensors: Tensors::default() };
        assert_eq!(refusal_codes(&bare, &before), [] as [&str; 0], "{action:?}");
        assert_eq!(
            refusal_codes(&Envelope { tensors: Tensors(vec![prompt_tensor(1)]), ..bare.clone() }, &before),
            ["T0732"]
        );
        assert_eq!(refusal_codes(&Envelope { meta: e.meta.clone(), ..bare }, &before), ["T0732"]);
    }
}

// proves: K-04, R-04
#[test]
fn the_epoch_grows_only_at_a_hard_cut() {
    let (mut e, before) = second_call();
    e.header.action = CallAction::Noop;
    (e.meta, e.tensors) = (None, Tensors::default());
    e.header.cache_epoch = 1;
    assert_eq!(refusal_codes(&e, &before), ["T0712"]);
    e.header.action = CallAction::Reset;
    assert_eq!(refusal_codes(&e, &before), [] as [&str; 0]);
    e.header.cache_epoch = 0;
    assert_eq!(refusal_codes(&e, &before), ["T0712"]);
}

// proves: K-02
#[test]
fn a_phase_at_another_position_or_row_is_refused() {
    for scalar in ["start", "row"] {
        let (mut e, before) = second_call();
        let m = e.meta.as_mut().expect("a chunk");
        let phase = m.phases.iter_mut().find(|p| p.program == "denoise.fill3").expect("one");
        for (name, arg) in &mut phase.args {
            if name == scalar {
                *arg = tessera_runtime::wire::ScalarArg::I64(0);
            }
        }
        assert!(refusal_codes(&e, &before).contains(&"T0712"));
    }
}
