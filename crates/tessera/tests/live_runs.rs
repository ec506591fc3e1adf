//! Streams and texts that the process that started them takes while they run, and changes on the way: this test
//! executable starts itself again as each rank.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the test starts itself again and reads /proc and records"
)]

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use safetensors::tensor::{Dtype, TensorView};
use serde_json::Value;
use tessera::admitted_settings::AdmittedSettings;
use tessera::files::RunFolder;
use tessera::generate::{
    GenerateOptions, LanguagePlace, LanguagePlan, LiveText, Sampling, TextExtents, TextModel, TextPiece,
    TextRequest,
};
use tessera::plan::plan_model;
use tessera::stream::{LeaderSockets, LiveChunk, LiveStream, run, run_steered};
use tessera::stream_control::{MAX_LIVE_PROMPT_BYTES, StreamControl};
use tessera::stream_options::{RunDevice, StreamOptions, StreamReport};
use tessera::{LoraFile, Mapping, Model, Overrides, Plan, StopHandle, WeightChange, WeightsBase};
use tessera_harness::tests;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    if args.get(1).map(String::as_str) == Some("as-rank") {
        return u8::try_from(tessera::rank_main(|| {})).unwrap_or(1).into();
    }
    tessera_harness::run(&tests![
        changes_that_arrive_equal_scheduled_ones_bit_for_bit
        step_lists_and_biases_that_change_equal_scheduled_ones_bit_for_bit
        loras_that_change_equal_scheduled_ones_bit_for_bit
        a_control_socket_that_closes_early_changes_nothing
        a_change_without_effect_is_refused
        a_stream_that_is_closed_or_dropped_leaves_no_process
        a_reader_that_stops_taking_chunks_loses_none
        pieces_add_up_to_the_texts_of_the_run
        a_run_of_texts_that_is_dropped_leaves_no_process
        what_is_wrong_before_the_start_starts_nothing
    ])
}

const FIRST_PROMPT: &str = "a red circle moves right";
const LATER_PROMPT: &str = "a blue square moves down";

fn argv() -> Vec<String> {
    vec![std::env::current_exe().unwrap().to_string_lossy().into_owned(), "as-rank".into()]
}

fn models(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(name)
}

fn demo(mesh: &str) -> (Arc<Plan>, Model) {
    let model = Model::open(&models("demo"), &Overrides::default()).unwrap();
    let mapping = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
    (Arc::new(plan_model(&model.video, &model.name, "", &mapping).unwrap()), model)
}

fn options(chunks: u32) -> StreamOptions {
    StreamOptions {
        chunks,
        prompt: FIRST_PROMPT.into(),
        seed: 3,
        oversubscribe: true,
        ..StreamOptions::default()
    }
}

fn start(mesh: &str, options: StreamOptions, out: &Path) -> LiveStream {
    let (plan, model) = demo(mesh);
    let folder = RunFolder::new(Some(out), "").unwrap();
    LiveStream::start(plan, model, options, argv(), folder).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn take_rest(live: &LiveStream) -> Vec<LiveChunk> {
    std::iter::from_fn(|| live.next_chunk().unwrap_or_else(|ds| panic!("{ds:#?}"))).collect()
}

/// Returns the lines of a record that describe chunks, as far as they are whole.
fn read_chunks(out: &Path) -> Vec<Value> {
    let record = std::fs::read_to_string(out.join("record.jsonl")).unwrap();
    let whole = record.rsplit_once('\n').map_or("", |(whole, _)| whole);
    let lines = whole.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
    lines.filter(|line| line.get("latents_digest").is_some()).collect()
}

fn assert_gone(pids: &[u32]) {
    assert!(!pids.is_empty());
    for pid in pids {
        assert!(!PathBuf::from(format!("/proc/{pid}")).exists(), "process {pid} is left");
    }
}

fn changes_that_arrive_equal_scheduled_ones_bit_for_bit() {
    const CHUNKS: u32 = 20;
    let dir = tempfile::tempdir().unwrap();
    let live = start("tp=2", options(CHUNKS), &dir.path().join("live"));
    let mut chunks = vec![live.next_chunk().unwrap().unwrap()];
    let prompt = live.control().set_prompt(LATER_PROMPT).unwrap();
    chunks.push(live.next_chunk().unwrap().unwrap());
    let seed = live.control().set_seed(11).unwrap();
    chunks.push(live.next_chunk().unwrap().unwrap());
    let cut = live.control().cut().unwrap();
    chunks.extend(take_rest(&live));
    let [prompt, seed, cut] = [prompt, seed, cut].map(|change| live.control().chunk_of(change).unwrap());
    assert!(0 < prompt && prompt <= seed && seed <= cut && cut < CHUNKS, "{prompt} {seed} {cut}");

    let record = read_chunks(&dir.path().join("live"));
    assert_eq!((chunks.len(), record.len()), (CHUNKS as usize, CHUNKS as usize));
    for (at, line) in (0_u32..).zip(&record) {
        let expected = if at < prompt { FIRST_PROMPT } else { LATER_PROMPT };
        assert_eq!(line["prompt"], expected, "chunk {at}");
        assert_eq!(line["seed"], if at < seed { 3 } else { 11 }, "chunk {at}");
        assert_eq!(line["cut"], at == cut, "chunk {at}");
    }

    let scheduled = StreamOptions {
        prompts_at: vec![(prompt, LATER_PROMPT.into())],
        seeds_at: vec![(seed, 11)],
        cuts_at: vec![cut],
        ..options(CHUNKS)
    };
    let repeated = start("tp=2", scheduled, &dir.path().join("scheduled"));
    let pictures = |chunks: Vec<LiveChunk>| chunks.into_iter().map(|chunk| chunk.rgb).collect::<Vec<_>>();
    assert!(pictures(take_rest(&repeated)) == pictures(chunks.clone()), "the frames differ");
    assert_eq!(golden(&live), golden(&repeated));
    let plain = start("tp=2", options(CHUNKS), &dir.path().join("plain"));
    let plain = take_rest(&plain);
    let changed = plain.iter().zip(&chunks).position(|(a, b)| a.rgb != b.rgb);
    assert_eq!(changed, Some(prompt.min(seed).min(cut) as usize));
}

/// Opens the demo in the recompute regime, whose context has a bias.
fn recomputing_demo() -> (Arc<Plan>, Model) {
    let overrides = Overrides { recompute: Some(true), ..Overrides::default() };
    let model = Model::open(&models("demo"), &overrides).unwrap();
    let mapping = Mapping { mesh: "tp=2".parse().unwrap(), ..Mapping::default() };
    (Arc::new(plan_model(&model.video, &model.name, "", &mapping).unwrap()), model)
}

/// Starts a stream of a model with a plan of its own.
fn start_planned((plan, model): &(Arc<Plan>, Model), options: StreamOptions, out: &Path) -> LiveStream {
    let folder = RunFolder::new(Some(out), "").unwrap();
    LiveStream::start(Arc::clone(plan), model.clone(), options, argv(), folder)
        .unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn golden(live: &LiveStream) -> String {
    live.report().unwrap().golden.unwrap()
}

fn step_lists_and_biases_that_change_equal_scheduled_ones_bit_for_bit() {
    const CHUNKS: u32 = 14;
    let dir = tempfile::tempdir().unwrap();
    let planned = recomputing_demo();
    let calls: Vec<&String> = planned.0.sealed.calls().iter().map(|(name, _)| name).collect();
    assert!(calls.iter().any(|name| name.contains(".steps-fast")), "{calls:?}");
    let live = start_planned(&planned, options(CHUNKS), &dir.path().join("live"));
    let control = live.control();
    let admitted = AdmittedSettings::from_plan(&planned.0);
    assert_eq!(
        (admitted.step_lists(), admitted.reads_bias()),
        (&["default".into(), "fast".into()][..], true)
    );
    live.next_chunk().unwrap().unwrap();
    let fast = control.set_step_list("fast").unwrap();
    live.next_chunk().unwrap().unwrap();
    let bias = control.set_bias(0.25).unwrap();
    live.next_chunk().unwrap().unwrap();
    let back = control.set_step_list("default").unwrap();
    for refused in [control.set_step_list("slow"), control.set_bias(0.0), control.set_bias(f32::NAN)] {
        assert_eq!(refused.unwrap_err().code.id, "T0054");
    }
    take_rest(&live);
    let [fast, bias, back] = [fast, bias, back].map(|change| live.control().chunk_of(change).unwrap());
    let forwards = |line: &Value| {
        let phases = line["ranks"][0]["phases"].as_array().unwrap();
        phases.iter().filter(|p| p["name"].as_str().unwrap().starts_with("denoise")).count()
    };
    for (at, line) in (0_u32..).zip(&read_chunks(&dir.path().join("live"))) {
        let is_fast = (fast..back).contains(&at);
        assert_eq!(line["step_list"].as_str(), is_fast.then_some("fast"), "chunk {at}");
        assert_eq!(line["bias"].as_f64(), (at >= bias).then_some(0.25), "chunk {at}");
        assert_eq!(forwards(line), if is_fast { 2 } else { 4 }, "chunk {at}");
    }
    let scheduled = StreamOptions {
        step_lists_at: vec![(fast, "fast".into()), (back, "default".into())],
        biases_at: vec![(bias, 0.25)],
        ..options(CHUNKS)
    };
    let repeated = start_planned(&planned, scheduled, &dir.path().join("scheduled"));
    take_rest(&repeated);
    assert_eq!(golden(&live), golden(&repeated));
    let unbiased = StreamOptions {
        step_lists_at: vec![(fast, "fast".into()), (back, "default".into())],
        ..options(CHUNKS)
    };
    let unbiased = start_planned(&planned, unbiased, &dir.path().join("unbiased"));
    take_rest(&unbiased);
    assert_ne!(golden(&live), golden(&unbiased), "the bias has an effect");
}

/// Writes a LoRA of rank 1 for a square matrix of the generator, whose update has equal elements.
fn write_lora(path: &Path, dim: usize) {
    let factor = 0.05_f32.to_le_bytes().repeat(dim);
    let view = |shape: [usize; 2]| TensorView::new(Dtype::F32, shape.to_vec(), &factor).unwrap();
    let factors = [
        ("blocks.0.self_attn.q.lora_A.weight", view([1, dim])),
        ("blocks.0.self_attn.q.lora_B.weight", view([dim, 1])),
    ];
    std::fs::write(path, safetensors::serialize(factors, None).unwrap()).unwrap();
}

fn loras_that_change_equal_scheduled_ones_bit_for_bit() {
    const CHUNKS: u32 = 12;
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("style.safetensors");
    let planned = demo("tp=2");
    write_lora(&path, planned.1.video.wan.dim as usize);
    let style = WeightChange::Loras(vec![LoraFile { path: path.clone(), strength: 1.0 }]);
    let plain = WeightChange::Loras(Vec::new());
    let live = start_planned(&planned, options(CHUNKS), &dir.path().join("live"));
    live.next_chunk().unwrap().unwrap();
    let on = live.control().set_weights(&style).unwrap();
    live.next_chunk().unwrap().unwrap();
    let off = live.control().set_weights(&plain).unwrap();
    let missing = WeightChange::Loras(vec![LoraFile { path: dir.path().join("absent"), strength: 1.0 }]);
    live.control().set_weights(&missing).unwrap_err();
    take_rest(&live);
    let [on, off] = [on, off].map(|change| live.control().chunk_of(change).unwrap());
    let record = read_chunks(&dir.path().join("live"));
    for (at, line) in (0_u32..).zip(&record) {
        assert_eq!(line["weights"].is_null(), at < on, "chunk {at}");
        assert_eq!(line["cut"], at == on || at == off, "chunk {at}");
        assert_eq!(line["weights"].as_str().is_some_and(|w| w.contains("style")), (on..off).contains(&at));
    }
    let scheduled = StreamOptions { weights_at: vec![(on, style), (off, plain)], ..options(CHUNKS) };
    let repeated = start_planned(&planned, scheduled, &dir.path().join("scheduled"));
    take_rest(&repeated);
    assert_eq!(golden(&live), golden(&repeated));
    let cut = StreamOptions { cuts_at: vec![on, off], ..options(CHUNKS) };
    let cut = start_planned(&planned, cut, &dir.path().join("cut"));
    take_rest(&cut);
    assert_ne!(golden(&live), golden(&cut), "the LoRA has an effect");
}

fn run_plain(out: &Path, control: bool) -> StreamReport {
    let (plan, model) = demo("tp=1");
    let (options, stop) = (StreamOptions { out: out.to_path_buf(), ..options(4) }, StopHandle::default());
    let report = if control {
        let (handle, socket) = StreamControl::new(&plan, &model, stop.clone()).unwrap();
        drop(handle);
        let sockets = LeaderSockets { control: Some(socket), ..LeaderSockets::default() };
        run_steered(&plan, &model, &options, argv(), &stop, sockets, &mut |_| {})
    } else {
        run(&plan, &model, &options, argv(), &stop, &mut |_| {})
    };
    report.unwrap()
}

fn a_control_socket_that_closes_early_changes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let [with, without] = [("with", true), ("without", false)].map(|(name, control)| {
        let out = dir.path().join(name);
        let report = run_plain(&out, control);
        assert!(report.failure.is_none(), "{:?}", report.failure);
        (report.golden.unwrap(), std::fs::read(out.join("clip.png")).unwrap())
    });
    assert!(with == without);
}

fn a_change_without_effect_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let live = start("tp=1", options(3), &dir.path().join("run"));
    let control = live.control().clone();
    let unknown = control.set_prompt("a purple elephant").unwrap_err();
    assert!(unknown.message.contains("purple"), "{unknown:?}");
    let long = control.set_prompt(&"red ".repeat(MAX_LIVE_PROMPT_BYTES)).unwrap_err();
    assert_eq!(long.code.id, "T0093");
    assert_eq!(take_rest(&live).len(), 3);
    assert_eq!(control.cut().unwrap_err().code.id, "T0093");
    assert!(read_chunks(&dir.path().join("run")).iter().all(|line| line["prompt"] == FIRST_PROMPT));
}

fn a_stream_that_is_closed_or_dropped_leaves_no_process() {
    let dir = tempfile::tempdir().unwrap();
    let live = start("tp=2", options(10_000), &dir.path().join("closed"));
    let pids = live.process_ids();
    assert_eq!(live.next_chunk().unwrap().unwrap().progress.chunk, 0);
    live.close().unwrap();
    assert_gone(&pids);
    assert!(live.next_chunk().unwrap().is_none());
    let record = std::fs::read_to_string(dir.path().join("closed/record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("interrupted"), "{record}");
    let live = start("tp=2", options(10_000), &dir.path().join("dropped"));
    let pids = live.process_ids();
    drop(live);
    assert_gone(&pids);
}

fn a_reader_that_stops_taking_chunks_loses_none() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let live = start("tp=1", options(9), &out);
    let first = live.next_chunk().unwrap().unwrap();
    assert_eq!(first.rgb.len(), first.shape.iter().product::<usize>() * 3);
    // The leader cannot have delivered everything, because nobody takes the frames.
    assert!(read_chunks(&out).len() < 9);
    let rest = take_rest(&live);
    assert_eq!(rest.iter().map(|chunk| chunk.progress.chunk).collect::<Vec<_>>(), (1..9).collect::<Vec<_>>());
}

fn start_texts(prompts: &[&str], max_ids: usize) -> LiveText {
    let model = TextModel::open(&models("tales")).unwrap();
    let texts: Vec<String> = prompts.iter().map(ToString::to_string).collect();
    let ids = model.encode_prompts(&texts, None).unwrap();
    let settings = TextExtents::with_max_ids(max_ids as u64).choose_settings(&ids, RunDevice::Cpu);
    let plan = LanguagePlan::new(&model.decoder, &Mapping::default(), settings).unwrap();
    let sampling = Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 };
    let request = |prompt| TextRequest { prompt, max_ids, sampling, kind: None };
    let options = GenerateOptions {
        weights: LanguagePlace { dir: models("tales"), base: WeightsBase::Files },
        device: RunDevice::Cpu,
        requests: ids.into_iter().map(request).collect(),
        prompts: texts,
        out: PathBuf::new(),
        threads: Some(1),
        oversubscribe: true,
        wire_dump: false,
        drill: None,
        command: Vec::new(),
    };
    let folder = RunFolder::new(None, "tessera-test").unwrap();
    LiveText::start(model, Arc::new(plan), options, argv(), folder).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn pieces_add_up_to_the_texts_of_the_run() {
    let live = start_texts(&["The red circle", "The sea"], 12);
    assert!(live.texts().is_none(), "the run has not ended");
    let mut shown = vec![String::new(); 2];
    let mut last = None;
    while let Some(TextPiece { text, piece, finish, .. }) = live.next_piece().unwrap() {
        shown[text].push_str(&piece);
        last = finish.or(last);
    }
    assert!(last.is_some());
    assert_eq!(live.texts(), Some(shown));
    let report = live.report().unwrap();
    assert!(report.texts.iter().all(|text| text.ids.len() <= 12 && !text.ids.is_empty()));
    assert_gone(live.process_ids());
}

fn a_run_of_texts_that_is_dropped_leaves_no_process() {
    let live = start_texts(&["The red circle"], 100);
    let pids = live.process_ids().to_vec();
    assert!(live.next_piece().unwrap().is_some());
    drop(live);
    assert_gone(&pids);
}

fn what_is_wrong_before_the_start_starts_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (plan, model) = demo("tp=1");
    let options = StreamOptions { prompt: "a purple elephant".into(), ..options(2) };
    let folder = RunFolder::new(Some(&dir.path().join("run")), "").unwrap();
    let refused = LiveStream::start(plan, model, options, argv(), folder).unwrap_err();
    assert!(refused[0].message.contains("purple"), "{refused:?}");
    assert!(!dir.path().join("run").exists());
}
