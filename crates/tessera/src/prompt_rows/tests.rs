//! Rows of prompts, compared with those of transformers, and what is refused.

use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::time::Instant;

use safetensors::tensor::{Dtype, TensorView};
use safetensors::{SafeTensors, serialize_to_file};
use tempfile::TempDir;
use tessera_plan::{DtypePolicy, Mapping};
use tessera_runtime::driver::StreamRequest;

use super::*;
use crate::model::{Model, Overrides};
use crate::plan::plan_model;

/// Length of the prompts in fixtures/umt5, as its generator pads them.
const TEXT_LEN: usize = 160;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

/// Writes a model folder: the DiT of wan-odd with the text encoder of fixtures/umt5.
fn write_model() -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let config = std::fs::read_to_string(fixture("wan-odd/config.json")).unwrap();
    let longer = config.replace("\"text_len\": 7", &format!("\"text_len\": {TEXT_LEN}"));
    assert_ne!(longer, config);
    std::fs::write(dir.path().join("config.json"), longer).unwrap();
    let stream = std::fs::read_to_string(fixture("wan-odd/stream.toml")).unwrap();
    std::fs::write(dir.path().join("stream.toml"), stream.replace("\"words\"", "\"umt5\"")).unwrap();
    std::fs::copy(fixture("wan-odd/model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    for folder in ["text_encoder", "tokenizer"] {
        std::fs::create_dir(dir.path().join(folder)).unwrap();
        for file in std::fs::read_dir(fixture("umt5").join(folder)).unwrap() {
            let file = file.unwrap();
            std::fs::copy(file.path(), dir.path().join(folder).join(file.file_name())).unwrap();
        }
    }
    dir
}

fn open_and_plan(dir: &Path, overrides: &Overrides) -> (Model, Arc<Plan>) {
    let (model, plan) = Model::open_and_plan(dir, overrides, &Mapping::default()).unwrap();
    (model, Arc::new(plan))
}

fn load_rows(model: &Model, plan: &Plan) -> PromptRows {
    PromptRows::load(plan, model.open_text_encoder().unwrap()).unwrap()
}

/// The prompts of the fixture with their rows, by the name of the case.
fn expected_rows() -> BTreeMap<String, (String, Vec<f32>)> {
    let bytes = std::fs::read(fixture("umt5/expected.safetensors")).unwrap();
    let (_, metadata) = SafeTensors::read_metadata(&bytes).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let prompts: &HashMap<String, String> = metadata.metadata().as_ref().unwrap();
    let rows = |name: &str| read_f32(&tensors.tensor(name).unwrap());
    prompts.iter().map(|(name, prompt)| (name.clone(), (prompt.clone(), rows(name)))).collect()
}

fn read_f32(tensor: &TensorView<'_>) -> Vec<f32> {
    assert_eq!(tensor.dtype(), Dtype::F32);
    tensor.data().as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
}

/// Returns the largest difference, in parts of the largest expected number.
fn relative_error(found: &[f32], expected: &[f32]) -> f32 {
    assert_eq!(found.len(), expected.len());
    let largest = expected.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let error = found.iter().zip(expected).fold(0.0f32, |m, (a, b)| m.max((a - b).abs()));
    assert!(!found.iter().any(|x| x.is_nan()));
    error / largest
}

#[test]
fn an_unloaded_encoder_frees_its_memory_and_returns_the_same_rows() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let open = |unload| {
        let PromptEncoder::Umt5(files) = model.open_text_encoder().unwrap() else { panic!("a UMT5 encoder") };
        TextProgram::load(&plan, *files, TextPlace { gpu: None, unload }).unwrap()
    };
    let held = |p: &TextProgram| p.loaded.as_ref().map_or(0, |l| l.backend.memory_bytes().iter().sum());
    let (mut kept, mut unloaded) = (open(false), open(true));
    let loaded_bytes: u64 = held(&unloaded);
    assert!(loaded_bytes > 0 && loaded_bytes == held(&kept));
    for (prompt, _) in expected_rows().into_values() {
        assert_eq!(unloaded.encode(&prompt).unwrap(), kept.encode(&prompt).unwrap(), "{prompt}");
        assert_eq!((held(&unloaded), held(&kept)), (0, loaded_bytes));
    }
}

#[test]
fn the_rows_of_prompts_agree_with_transformers() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let mut rows = load_rows(&model, &plan);
    let cases = expected_rows();
    assert_eq!(cases.len(), 3);
    for (name, (prompt, expected)) in cases {
        let error = relative_error(rows.encode(&prompt).unwrap(), &expected);
        println!("{name}: {error:.1e}");
        assert!(error <= 2e-5, "{name}: {error}");
    }
}

#[test]
fn the_original_names_of_wan_give_the_same_rows() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let prompt = "A red square moves";
    let expected = load_rows(&model, &plan).encode(prompt).unwrap().to_vec();
    let weights = dir.path().join("text_encoder/model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let names = tessera_models::umt5_weights(plan.video.text_encoder.as_ref().unwrap());
    let renamed = names.iter().map(|w| (w.aliases[0].clone(), tensors.tensor(&w.aliases[1]).unwrap()));
    let digest = model.digest_weights(&plan).unwrap();
    serialize_to_file(renamed.collect::<Vec<_>>(), None, &weights).unwrap();
    assert_eq!(load_rows(&model, &plan).encode(prompt).unwrap(), expected);
    assert_eq!(model.digest_weights(&plan).unwrap(), digest);
}

#[test]
fn each_prompt_is_encoded_once() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let mut rows = load_rows(&model, &plan);
    let first = rows.encode("a red square").unwrap().to_vec();
    let address = rows.encode("a red square").unwrap().as_ptr();
    for i in 1..CACHED_PROMPTS {
        rows.encode(&format!("a red square {i}")).unwrap();
    }
    assert_eq!(rows.encode("a red square").unwrap().as_ptr(), address);
    for i in 0..CACHED_PROMPTS {
        rows.encode(&format!("another {i}")).unwrap();
    }
    assert!(!rows.cached.iter().any(|(prompt, _)| prompt == "a red square"));
    assert_eq!(rows.encode("a red square").unwrap(), first);
}

fn stream_latents(model: &Model, plan: &Arc<Plan>, prompt: &str) -> Vec<u8> {
    let mut latents = Vec::new();
    let requests = [Some(prompt.to_string()), None].map(|prompt| StreamRequest {
        prompt,
        seed: 3,
        cut: tessera_runtime::director::SceneCut::None,
        reload: None,
        ..StreamRequest::default()
    });
    crate::local::run(plan, model, 1, requests, |chunk| latents.extend(chunk.latents.data())).unwrap();
    latents
}

#[test]
fn a_model_with_umt5_streams_the_rows_that_a_file_holds() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let prompt = "A red  square moves slowly";
    let latents = stream_latents(&model, &plan, prompt);
    assert_ne!(latents, stream_latents(&model, &plan, "Greek letters"));

    // The same rows from a file, without their padding, stream the same latents.
    let rows = load_rows(&model, &plan).encode(prompt).unwrap().to_vec();
    let width = plan.video.wan.text_dim as usize;
    let length = rows.chunks_exact(width).take_while(|row| row.iter().any(|x| *x != 0.0)).count();
    let file = dir.path().join("rows.safetensors");
    write_rows(&file, prompt, &rows[..length * width], width);
    let overrides = Overrides { text_embeddings: Some(file.clone()), ..Overrides::default() };
    let (model, plan) = open_and_plan(dir.path(), &overrides);
    assert!(plan.sealed.rank_program(TEXT_PHASE, Rank(0)).is_none());
    assert_eq!(stream_latents(&model, &plan, prompt), latents);

    // Another prompt, and rows of another width, are refused with what the file holds.
    let d = model.open_text_encoder().unwrap().check_prompt("a dog").unwrap_err();
    assert_eq!(d.code.id, "T0058");
    assert!(d.labels[0].message.contains(prompt), "{d:?}");
    write_rows(&file, prompt, &rows[..2 * length], 2);
    let d = model.open_text_encoder().unwrap().check_prompt(prompt).unwrap_err();
    assert_eq!(d.code.id, "T0058");
    assert!(d.labels[1].message.contains("1 to 160 rows of 20 columns"), "{d:?}");
}

fn write_rows(file: &Path, prompt: &str, rows: &[f32], width: usize) {
    let bytes: Vec<u8> = rows.iter().flat_map(|x| x.to_le_bytes()).collect();
    let view = TensorView::new(Dtype::F32, vec![rows.len() / width, width], &bytes).unwrap();
    serialize_to_file([(prompt.to_string(), view)], None, file).unwrap();
}

#[test]
fn a_plan_with_umt5_survives_its_folder_and_every_mapping_keeps_the_encoder_in_f32() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let folder = dir.path().join("plan");
    plan.write(&folder).unwrap();
    let read = Plan::read(&folder).unwrap();
    assert_eq!((read.sealed.digest(), &read.video), (plan.sealed.digest(), &plan.video));

    let mapping = Mapping { dtype: DtypePolicy::Bf16, overlap_chunks: 1, ..Mapping::default() };
    let bf16 = plan_model(&model.video, &model.name, "", &mapping).unwrap();
    let encoder = |plan: &Plan| plan.sealed.rank_program(TEXT_PHASE, Rank(0)).map(|p| tessera_ir::print(p));
    assert_eq!(encoder(&bf16), encoder(&plan));
    // The encoder's weights are the leader's, and no rank's.
    let weights = |plan: &Plan| plan.memory_bytes(Rank(0))[0];
    let mut without = model.video.clone();
    without.text_encoder = None;
    let without = plan_model(&without, &model.name, "", &Mapping::default()).unwrap();
    assert_eq!(weights(&plan), weights(&without));
}

#[test]
fn another_tokenizer_is_caught_by_the_digest_and_by_its_size() {
    let dir = write_model();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let digest = model.digest_weights(&plan).unwrap();
    let (json, spiece) =
        (dir.path().join("tokenizer/tokenizer.json"), dir.path().join("tokenizer/spiece.model"));
    std::fs::remove_file(&json).unwrap();
    assert_ne!(model.digest_weights(&plan).unwrap(), digest);
    let rows = load_rows(&model, &plan).encode("a red square").unwrap().to_vec();
    assert!(rows.iter().any(|x| *x != 0.0));

    let mut small = model.clone();
    small.video.text_encoder.as_mut().unwrap().vocab_size = 300;
    let ds = small.open_text_encoder().unwrap_err();
    assert!(ds.iter().any(|d| d.code.id == "T0451" && d.labels[1].message.contains("300 rows")), "{ds:?}");
    std::fs::remove_file(spiece).unwrap();
    assert_eq!(model.open_text_encoder().unwrap_err()[0].code.id, "T0070");
}

#[test]
fn a_weight_that_is_not_finite_is_named() {
    let dir = write_model();
    let weights = dir.path().join("text_encoder/model.safetensors");
    let bytes = std::fs::read(&weights).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let name = "encoder.block.1.layer.0.SelfAttention.v.weight";
    let mut data = tensors.tensor(name).unwrap().data().to_vec();
    data[..2].copy_from_slice(&[0xc0, 0x7f]);
    let changed = |(n, t): (String, TensorView<'_>)| {
        let data = if n == name { data.clone() } else { t.data().to_vec() };
        (n, (t.dtype(), t.shape().to_vec(), data))
    };
    let all: Vec<_> = tensors.tensors().into_iter().map(changed).collect();
    let views =
        all.iter().map(|(n, (d, s, data))| (n.clone(), TensorView::new(*d, s.clone(), data).unwrap()));
    serialize_to_file(views.collect::<Vec<_>>(), None, &weights).unwrap();
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let d = load_rows(&model, &plan).encode("a red square").unwrap_err();
    assert_eq!(d.code.id, "T0509");
    assert!(d.message.contains("blocks.1.attn.v.weight"), "{d:?}");
}

#[test]
fn an_encoder_of_another_width_is_refused() {
    let dir = write_model();
    let file = dir.path().join("text_encoder/config.json");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("\"d_model\": 20", "\"d_model\": 24")).unwrap();
    let ds = Model::open(dir.path(), &Overrides::default()).unwrap_err();
    assert_eq!(ds[0].code.id, "T0450");
    assert_eq!(
        ds[0].labels.iter().map(|l| l.message.as_str()).collect::<Vec<_>>(),
        ["d_model = 24", "text_dim = 20"]
    );
}

/// Compares an encoder of real width: `make_text.py --wide FOLDER` writes it, and `UMT5_WIDE` names
/// the folder.
#[test]
#[ignore = "reads 1 GB that tools/fixtures/make_text.py --wide writes"]
fn an_encoder_of_real_width_agrees_with_transformers() {
    let folder = PathBuf::from(std::env::var("UMT5_WIDE").unwrap());
    let dir = write_model();
    let config = std::fs::read_to_string(dir.path().join("config.json")).unwrap();
    std::fs::write(dir.path().join("config.json"), config.replace("\"text_dim\": 20", "\"text_dim\": 4096"))
        .unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::remove_file(dir.path().join("text_encoder").join(file)).unwrap();
        std::os::unix::fs::symlink(
            folder.join("text_encoder").join(file),
            dir.path().join("text_encoder").join(file),
        )
        .unwrap();
    }
    let (model, plan) = open_and_plan(dir.path(), &Overrides::default());
    let PromptEncoder::Umt5(files) = model.open_text_encoder().unwrap() else { panic!("a UMT5 encoder") };
    let mut program = TextProgram::load(&plan, *files, TextPlace::default()).unwrap();
    let bytes = std::fs::read(folder.join("expected.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids: Vec<u32> = read_f32(&tensors.tensor("ids").unwrap()).iter().map(|id| *id as u32).collect();
    let begun = Instant::now();
    let rows = program.encode_ids(ids).unwrap();
    println!("{:.1} s for {TEXT_LEN} rows", begun.elapsed().as_secs_f64());
    let error = relative_error(&rows, &read_f32(&tensors.tensor("rows").unwrap()));
    println!("real width: {error:.1e}");
    assert!(error <= 2e-5, "{error}");
}
