//! Any bytes as edits of the plans in `filetests/`.
#![no_main]

use std::path::Path;
use std::sync::OnceLock;

use tessera_filetests::hostile::{self, SeedCorpus};

static SEEDS: OnceLock<SeedCorpus> = OnceLock::new();

/// Texts of every `.tir` file, in order of their paths, so that a finding can be run again.
fn texts() -> Vec<String> {
    let mut folders = vec![Path::new(env!("CARGO_MANIFEST_DIR")).join("../filetests")];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for path in
            std::fs::read_dir(folder).expect("filetests/ is there").map(|e| e.expect("an entry").path())
        {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "tir") {
                files.push(path);
            }
        }
    }
    files.sort();
    files.iter().map(|f| std::fs::read_to_string(f).expect("text")).collect()
}

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| hostile::fuzz_plan(bytes, SEEDS.get_or_init(|| SeedCorpus::from_texts(texts()))));
