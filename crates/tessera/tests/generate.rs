//! Language models against transformers: logits, and greedy continuations, on several meshes.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera::Mapping;
use tessera::generate::{
    FinishReason, LanguagePlan, LanguageSettings, Sampling, TextModel, TextRequest, TokenRun,
};
use tessera_models::TokenOutput;
use tessera_weights::WeightFiles;

const FAMILIES: [&str; 7] = ["llama", "qwen3", "qwen2", "mistral", "mixtral", "qwen3-moe", "deepseek-v3"];

fn folder(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm").join(family)
}

/// What transformers computes for a folder.
struct Reference {
    prompts: [Vec<u32>; 2],
    logits: [Vec<f32>; 2],
    continuations: [Vec<u32>; 2],
}

impl Reference {
    fn read(family: &str) -> Reference {
        let file = folder(family).join("reference.safetensors");
        let set = WeightFiles::open_file(&file).unwrap().resolve_as_is().unwrap();
        let values = |name: &str| set.read_whole_f32(name).unwrap();
        let both = |name: &str| [0, 1].map(|i| values(&format!("{name}.{i}")));
        let ids = |v: Vec<f32>| v.into_iter().map(|id| id as u32).collect::<Vec<u32>>();
        Reference {
            prompts: both("prompt").map(ids),
            logits: both("logits"),
            continuations: both("continuation").map(ids),
        }
    }
}

/// Loads a model over a mesh; `prompt_rows` is the size of the pieces in which prompts are read.
fn load(family: &str, mesh: &str, prompt_rows: u64, output: TokenOutput) -> TokenRun {
    let settings = LanguageSettings { sequences: 2, ..LanguageSettings::new(128, prompt_rows, output) };
    // The reference ignores the ends of texts.
    load_with(family, mesh, settings, &[])
}

/// Loads a model whose texts end with these ids and no others.
fn load_with(family: &str, mesh: &str, settings: LanguageSettings, end_ids: &[u32]) -> TokenRun {
    let mut model = TextModel::open(&folder(family)).unwrap().decoder;
    model.end_ids = end_ids.to_vec();
    let mapping = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
    let plan =
        LanguagePlan::new(&model, &mapping, settings).unwrap_or_else(|ds| panic!("{family} {mesh}: {ds:#?}"));
    TokenRun::load(&Arc::new(plan), &folder(family), 1)
        .unwrap_or_else(|ds| panic!("{family} {mesh}: {ds:#?}"))
}

/// Returns meshes of every kind, and each tp up to the number of query heads.
fn meshes(family: &str) -> Vec<String> {
    let decoder = TextModel::open(&folder(family)).unwrap().decoder;
    let mut meshes: Vec<String> = (1..=decoder.heads).map(|tp| format!("tp={tp}")).collect();
    meshes.extend(["pp=2", "tp=2,pp=2"].map(str::to_string));
    let more = match family {
        "mixtral" => &["ep=5", "tp=3,ep=5"][..],
        "qwen3-moe" => &["ep=2", "ep=3", "tp=2,ep=2", "tp=3,ep=2", "ep=2,pp=2"],
        "deepseek-v3" => &["tp=2,ep=3", "ep=3,pp=3"],
        _ => &[],
    };
    meshes.extend(more.iter().map(|mesh| mesh.to_string()));
    meshes
}

#[test]
fn logits_are_those_of_transformers_on_every_mesh() {
    for family in FAMILIES {
        let reference = Reference::read(family);
        for mesh in &meshes(family) {
            // Pieces of 5 rows divide neither prompt.
            let mut run = load(family, mesh, 5, TokenOutput::Logits);
            for (prompt, expected) in reference.prompts.iter().zip(&reference.logits) {
                let found = run.compute_logits(prompt).unwrap();
                assert_eq!(found.len(), expected.len());
                let largest = expected.iter().fold(0.0_f32, |m, x| m.max(x.abs()));
                let far =
                    found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max) / largest;
                println!("{family} {mesh}, {} ids: {far:.1e}", prompt.len());
                assert!(far <= 2e-5, "{family} {mesh}, {} ids: {far:e} of the largest logit", prompt.len());
            }
        }
    }
}

#[test]
fn greedy_texts_are_those_of_transformers_alone_and_in_a_batch() {
    for family in FAMILIES {
        let reference = Reference::read(family);
        let request = |i: usize| TextRequest {
            prompt: reference.prompts[i].clone(),
            max_ids: 64,
            sampling: Sampling::default(),
            kind: None,
        };
        for mesh in &meshes(family) {
            let mut run = load(family, mesh, 16, TokenOutput::Next);
            for batch in [&[0][..], &[1], &[0, 1], &[1, 0]] {
                let requests: Vec<TextRequest> = batch.iter().map(|i| request(*i)).collect();
                let mut streamed = vec![Vec::new(); batch.len()];
                let texts =
                    run.generate(&requests, |event| streamed[event.text as usize].push(event.id)).unwrap();
                for ((text, streamed), i) in texts.iter().zip(&streamed).zip(batch) {
                    assert_eq!(
                        text.ids, reference.continuations[*i],
                        "{family} {mesh}, prompt {i} of {batch:?}"
                    );
                    assert_eq!(&text.ids, streamed);
                }
            }
        }
    }
}

#[test]
fn sampled_texts_depend_on_the_seed_and_neither_on_the_mesh_nor_on_the_batch() {
    let reference = Reference::read("llama");
    let request = |i: usize, seed| TextRequest {
        prompt: reference.prompts[i].clone(),
        max_ids: 24,
        sampling: Sampling { temperature: 0.8, top_k: 40, top_p: 0.95, seed },
        kind: None,
    };
    let sample = |mesh: &str, requests: &[TextRequest]| {
        let texts = load("llama", mesh, 16, TokenOutput::Next).generate(requests, |_| {}).unwrap();
        texts.into_iter().map(|t| t.ids).collect::<Vec<_>>()
    };
    let alone = sample("tp=1", &[request(1, 7)]);
    assert_eq!(sample("tp=2", &[request(1, 7)]), alone);
    assert_eq!(sample("pp=2", &[request(0, 3), request(1, 7)])[1], alone[0]);
    assert_ne!(sample("tp=1", &[request(1, 8)]), alone);
}

// The ids of a call stay on the ranks from one phase to the next. 5 divides neither the length of a text nor the ids
// before the end of one; a plan of 64 decodes a whole text in one call.
#[test]
fn a_call_of_several_ids_decodes_the_text_of_calls_of_one() {
    let reference = Reference::read("qwen3");
    let request = |i: usize, max_ids, temperature| TextRequest {
        prompt: reference.prompts[i].clone(),
        max_ids,
        sampling: Sampling { temperature, top_k: 30, top_p: 0.95, seed: 5 },
        kind: None,
    };
    let generate = |mesh: &str, ids_per_call: u64, end: Option<u32>| {
        let settings = LanguageSettings {
            sequences: 2,
            ids_per_call,
            ..LanguageSettings::new(128, 16, TokenOutput::Next)
        };
        let mut run = load_with("qwen3", mesh, settings, end.as_slice());
        // The second text of the first batch ends long before the first one, and its pages go to the next batch.
        let batches = [vec![request(0, 64, 0.0), request(1, 7, 0.8)], vec![request(1, 64, 0.0)]];
        let texts = batches.map(|batch| {
            let mut streamed = vec![Vec::new(); batch.len()];
            let texts = run.generate(&batch, |event| streamed[event.text as usize].push(event.id)).unwrap();
            assert!(texts.iter().zip(&streamed).all(|(text, ids)| text.ids == *ids));
            texts
        });
        (texts, run.decode)
    };
    let (alone, calls) = generate("tp=1", 1, None);
    assert_eq!(alone[0][0].ids, reference.continuations[0]);
    assert_eq!((alone[0][1].ids.len(), calls.calls, calls.rows), (7, 63 + 63, 63 + 6 + 63));
    // The eighth id of a text ends it in the middle of a call.
    let end = reference.continuations[0][7];
    let (ended, _) = generate("tp=1", 1, Some(end));
    assert_eq!(ended[0][0].finish, FinishReason::EndId);
    for mesh in ["tp=1", "tp=2", "pp=2", "tp=2,pp=2"] {
        for ids_per_call in [2, 5, 64] {
            let (found, calls) = generate(mesh, ids_per_call, None);
            assert_eq!(found, alone, "{mesh}, {ids_per_call} ids");
            assert_eq!(calls.calls, 2 * 63_u64.div_ceil(ids_per_call), "{mesh}, {ids_per_call} ids");
            assert_eq!(generate(mesh, ids_per_call, Some(end)).0, ended, "{mesh}, {ids_per_call} ids");
        }
    }
}

// Prompts of like length are read together, and every text stays in its place.
#[test]
fn prompts_that_a_call_reads_together_give_the_texts_of_prompts_read_alone() {
    for (family, mesh) in [("qwen3", "tp=2"), ("qwen3-moe", "ep=2"), ("deepseek-v3", "pp=2")] {
        let [short, long] = Reference::read(family).prompts;
        let generate = |prompts_per_call: u64, kinds: [Option<&str>; 5]| {
            let settings = LanguageSettings {
                sequences: 5,
                prompts_per_call,
                ..LanguageSettings::new(64, 6, TokenOutput::Next)
            };
            let prompts = [&long[..], &short[..], &long[..13], &short[..2], &long[3..]];
            let request = |(prompt, kind): (&[u32], Option<&str>)| TextRequest {
                prompt: prompt.to_vec(),
                max_ids: 9,
                sampling: Sampling { temperature: 0.7, seed: 3, ..Sampling::default() },
                kind: kind.map(str::to_string),
            };
            let requests: Vec<TextRequest> = prompts.into_iter().zip(kinds).map(request).collect();
            let mut run = load_with(family, mesh, settings, &[]);
            (run.generate(&requests, |_| {}).unwrap(), run.prefill)
        };
        let (alone, calls) = generate(1, [None; 5]);
        // 29, 7, 13, 2 and 26 ids in parts of 6.
        assert_eq!((calls.calls, calls.rows), (5 + 2 + 3 + 1 + 5, 29 + 7 + 13 + 2 + 26));
        for (prompts_per_call, expected) in [(2, 5 + 3 + 1), (3, 5 + 2), (5, 5)] {
            let (texts, calls) = generate(prompts_per_call, [None; 5]);
            assert_eq!(texts, alone, "{family} {mesh}, {prompts_per_call} prompts per call");
            assert_eq!((calls.calls, calls.rows), (expected, 77), "{family} {mesh}");
        }
        // The prompts of 29 and 13 ids are chat, those of 7 and 26 code, and the one of 2 ids has no kind.
        let kinds = [Some("chat"), Some("code"), Some("chat"), None, Some("code")];
        for (prompts_per_call, expected) in [(1, 16), (2, 5 + 5 + 1), (5, 5 + 5 + 1)] {
            let (texts, calls) = generate(prompts_per_call, kinds);
            assert_eq!(texts, alone, "{family} {mesh}, {prompts_per_call} prompts of one kind per call");
            assert_eq!((calls.calls, calls.rows), (expected, 77), "{family} {mesh}");
        }
    }
}

// The results of experts are added by ascending expert on every mesh.
#[test]
fn logits_have_the_same_bits_for_any_number_of_ranks_that_share_the_experts() {
    for (family, meshes) in
        [("mixtral", &["ep=5"][..]), ("qwen3-moe", &["ep=2", "ep=3", "ep=6"]), ("deepseek-v3", &["ep=3"])]
    {
        let prompt = &Reference::read(family).prompts[1];
        let logits = |mesh: &str| load(family, mesh, 8, TokenOutput::Logits).compute_logits(prompt).unwrap();
        let alone: Vec<u32> = logits("ep=1").into_iter().map(f32::to_bits).collect();
        for mesh in meshes {
            let found: Vec<u32> = logits(mesh).into_iter().map(f32::to_bits).collect();
            assert!(found == alone, "{family} {mesh}");
        }
    }
}

// A checkpoint of DeepSeek-V3 holds a layer more, which predicts a further token. Other layers are not expected.
#[test]
fn a_layer_that_predicts_further_tokens_is_left_out_and_any_other_is_rejected() {
    let reference = Reference::read("deepseek-v3");
    let extra = |name: &str| {
        let (dir, from) = (tempfile::tempdir().unwrap(), folder("deepseek-v3"));
        std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
        std::fs::copy(from.join("model.safetensors"), dir.path().join("first.safetensors")).unwrap();
        let view =
            safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![1, 2], &[0; 8]).unwrap();
        safetensors::serialize_to_file([(name, view)], None, &dir.path().join("more.safetensors")).unwrap();
        let files = WeightFiles::open(&from).unwrap();
        let known = files.iter_tensors().map(|t| (t.name, "first.safetensors"));
        let weight_map: std::collections::BTreeMap<_, _> =
            known.chain([(name, "more.safetensors")]).collect();
        let index = serde_json::json!({ "weight_map": weight_map }).to_string();
        std::fs::write(dir.path().join("model.safetensors.index.json"), index).unwrap();
        let model = TextModel::open(dir.path()).unwrap().decoder;
        let settings = LanguageSettings::new(64, 8, TokenOutput::Logits);
        let plan = LanguagePlan::new(&model, &Mapping::default(), settings).unwrap();
        TokenRun::load(&Arc::new(plan), dir.path(), 1)
            .map(|mut run| run.compute_logits(&reference.prompts[0]).unwrap())
    };
    let largest = reference.logits[0].iter().fold(0.0_f32, |m, x| m.max(x.abs()));
    let found = extra("model.layers.3.eh_proj.weight").unwrap();
    assert!(found.iter().zip(&reference.logits[0]).all(|(a, b)| (a - b).abs() <= 2e-5 * largest));
    let ds = extra("model.layers.4.eh_proj.weight").unwrap_err();
    assert!(
        ds[0].code.id == "T0506" && format!("{ds:?}").contains("model.layers.4.eh_proj.weight"),
        "{ds:?}"
    );
}

#[test]
fn the_demo_model_writes_the_text_that_pytorch_computes_in_f64() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/tales");
    let golden: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(dir.join("golden.json")).unwrap()).unwrap();
    let list = |key: &str| {
        golden[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect::<Vec<_>>()
    };
    let model = TextModel::open(&dir).unwrap();
    let tokenizer = model.tokenizer.as_ref().unwrap();
    let prompt = tokenizer.encode(golden["prompt"].as_str().unwrap()).unwrap();
    assert_eq!(prompt, list("ids"));
    for mesh in ["tp=1", "tp=2", "pp=3"] {
        let mapping = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
        let settings = LanguageSettings::new(128, 64, TokenOutput::Next);
        let plan = Arc::new(LanguagePlan::new(&model.decoder, &mapping, settings).unwrap());
        let request =
            TextRequest { prompt: prompt.clone(), max_ids: 120, sampling: Sampling::default(), kind: None };
        let texts = TokenRun::load(&plan, &dir, 1).unwrap().generate(&[request], |_| {}).unwrap();
        assert_eq!(texts[0].ids, list("continuation"), "{mesh}");
        assert_eq!(texts[0].finish, FinishReason::EndId);
        assert_eq!(tokenizer.decode(&texts[0].ids).unwrap(), golden["text"].as_str().unwrap());
    }
}
