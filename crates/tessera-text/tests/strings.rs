//! Ids of 500 strings in ten scripts, compared with those of the reference implementations.

#![allow(clippy::unwrap_used, clippy::disallowed_methods, reason = "a test reads its fixtures")]

use std::path::{Path, PathBuf};

use serde_json::Value;
use tessera_text::{PromptTokenizer, clean_prompt};

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/umt5").join(name)
}

fn read_lines() -> Vec<Value> {
    let text = std::fs::read_to_string(fixture("strings.jsonl")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn tokenizer(
    name: &str,
    read: fn(&str, &[u8]) -> Result<PromptTokenizer, tessera_base::Diagnostic>,
) -> PromptTokenizer {
    read(name, &std::fs::read(fixture(name)).unwrap()).unwrap()
}

fn expected_ids(line: &Value, key: &str) -> Vec<u32> {
    line[key].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

/// Asserts that the ids of every string are those under `key`, or under `otherwise` without it.
fn assert_ids(tokenizer: &PromptTokenizer, key: &str, otherwise: &str) {
    let mut differ = Vec::new();
    let lines = read_lines();
    for line in &lines {
        let key = if line[key].is_null() { otherwise } else { key };
        let text = line["text"].as_str().unwrap();
        let found = tokenizer.encode_prompt(text, 100_000).unwrap();
        if found != expected_ids(line, key) {
            differ.push(format!("{text:?}: {found:?}, expected {:?}", expected_ids(line, key)));
        }
    }
    assert_eq!(lines.len(), 500);
    assert!(differ.is_empty(), "{} of 500 differ:\n{}", differ.len(), differ.join("\n"));
}

#[test]
fn cleaning_agrees_with_the_reference() {
    for line in read_lines() {
        let text = line["text"].as_str().unwrap();
        assert_eq!(clean_prompt(text), line["clean"].as_str().unwrap_or(text), "{text:?}");
    }
}

#[test]
fn a_model_with_unknown_ids_agrees_with_sentencepiece() {
    assert_ids(&tokenizer("tokenizers/nfkc.model", PromptTokenizer::from_spiece), "nfkc", "nfkc");
}

#[test]
fn a_model_with_bytes_agrees_with_sentencepiece() {
    assert_ids(&tokenizer("tokenizer/spiece.model", PromptTokenizer::from_spiece), "bytes", "bytes");
}

#[test]
fn a_json_tokenizer_agrees_with_the_reference() {
    assert_ids(&tokenizer("tokenizer/tokenizer.json", PromptTokenizer::from_json), "json", "bytes");
}

#[test]
fn a_long_prompt_is_cut_and_still_ends() {
    let t = tokenizer("tokenizer/spiece.model", PromptTokenizer::from_spiece);
    let all = t.encode_prompt("a red square moves slowly", 100).unwrap();
    let cut = t.encode_prompt("a red square moves slowly", 4).unwrap();
    assert!(all.len() > 4 && cut.len() == 4 && cut[..3] == all[..3] && cut[3] == 1);
}

#[test]
fn damaged_tokenizers_are_refused() {
    let spiece = std::fs::read(fixture("tokenizer/spiece.model")).unwrap();
    let json = std::fs::read(fixture("tokenizer/tokenizer.json")).unwrap();
    let other_end = String::from_utf8(json.clone()).unwrap().replace("\"ids\":[1]", "\"ids\":[2]");
    for (what, bytes) in
        [("cut", &spiece[..700]), ("empty", b""), ("pointer", b"version https://git-lfs.github.com/spec/v1")]
    {
        let d = PromptTokenizer::from_spiece("spiece.model", bytes).unwrap_err();
        assert_eq!((d.code.id, d.labels[0].location.as_str()), ("T0451", "spiece.model"), "{what}");
    }
    for (what, bytes) in [("cut", &json[..700]), ("empty", b""), ("another end", other_end.as_bytes())] {
        let d = PromptTokenizer::from_json("tokenizer.json", bytes).unwrap_err();
        assert_eq!((d.code.id, d.labels[0].location.as_str()), ("T0451", "tokenizer.json"), "{what}");
    }
    // No cut leaves a file that makes a panic.
    for len in (0..spiece.len()).step_by(97) {
        let _ =
            PromptTokenizer::from_spiece("cut", &spiece[..len]).map(|t| t.encode_prompt("a red square", 9));
    }
}
