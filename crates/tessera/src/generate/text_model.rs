//! A folder with a language model as Hugging Face publishes it.

use std::path::{Path, PathBuf};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::DecoderModel;
use tessera_text::TextTokenizer;

use crate::codes::T0010;
use crate::files::read_text_file;

/// A language model and its tokenizer.
#[derive(Debug)]
pub struct TextModel {
    /// Folder of the model, where the ranks read its weights.
    pub dir: PathBuf,
    /// The model, from `config.json`.
    pub decoder: DecoderModel,
    /// The tokenizer, if the folder has a `tokenizer.json`. Without it prompts are lists of ids.
    pub tokenizer: Option<TextTokenizer>,
}

impl TextModel {
    /// Reads `config.json` and `tokenizer.json` of a folder; weights are read by the ranks.
    ///
    /// # Errors
    /// T0010 if the folder has no config, T0430 to T0433 for a model that cannot run, T0452 for a tokenizer
    /// that cannot be read or belongs to another model.
    pub fn open(dir: &Path) -> Result<TextModel, Diagnostics> {
        let config = dir.join("config.json");
        let text = read_text_file(&config).map_err(|e| {
            vec![
                Diagnostic::error(&T0010, format!("no language model in {}: {e}", dir.display()))
                    .with_label(config.display().to_string(), "this file")
                    .with_hint("give a folder with config.json, safetensors and tokenizer.json"),
            ]
        })?;
        let decoder = DecoderModel::parse(&config.display().to_string(), &text)?;
        let file = dir.join("tokenizer.json");
        let tokenizer = match std::fs::read(&file) {
            Ok(bytes) => {
                let name = file.display().to_string();
                let tokenizer = TextTokenizer::from_json(&name, &bytes).map_err(|d| vec![d])?;
                tokenizer.check_vocabulary(&name, decoder.extents.vocab).map_err(|d| vec![d])?;
                Some(tokenizer)
            }
            Err(_) => None,
        };
        Ok(TextModel { dir: dir.to_path_buf(), decoder, tokenizer })
    }
}
