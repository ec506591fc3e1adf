//! The tokenizer of a text encoder, from either of its two file formats.

use tessera_base::Diagnostic;
use tokenizers::Tokenizer;

use crate::clean::clean_prompt;
use crate::codes::T0451;
use crate::json_file::{read_tokenizer, refuse_file};
use crate::sentence_piece::SentencePieceModel;

/// Id that ends every prompt, in every T5 vocabulary.
pub const END_ID: u32 = 1;

/// Id that follows the prompt up to the length that the encoder reads.
pub const PADDING_ID: u32 = 0;

/// A tokenizer for prompts.
pub struct PromptTokenizer(Format);

enum Format {
    SentencePiece(Box<SentencePieceModel>),
    Json(Box<Tokenizer>),
}

impl std::fmt::Debug for PromptTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PromptTokenizer({} ids)", self.vocabulary_size())
    }
}

impl PromptTokenizer {
    /// Reads a `spiece.model` of SentencePiece. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// T0451 with what is wrong with the file.
    pub fn from_spiece(file: &str, bytes: &[u8]) -> Result<PromptTokenizer, Diagnostic> {
        Ok(PromptTokenizer(Format::SentencePiece(Box::new(SentencePieceModel::parse(file, bytes)?))))
    }

    /// Reads a `tokenizer.json` of the library tokenizers. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// T0451 if the file is damaged, or does not end a prompt with id 1.
    pub fn from_json(file: &str, bytes: &[u8]) -> Result<PromptTokenizer, Diagnostic> {
        let refuse = |why: String| refuse_file(&T0451, file, why);
        let tokenizer = read_tokenizer(&T0451, file, bytes)?;
        let empty = tokenizer.encode("", true).map_err(|e| refuse(e.to_string()))?;
        if empty.get_ids() != [END_ID] {
            return Err(refuse(format!(
                "an empty prompt has the ids {:?}; expected [{END_ID}]",
                empty.get_ids()
            )));
        }
        Ok(PromptTokenizer(Format::Json(Box::new(tokenizer))))
    }

    /// Cleans and tokenizes a prompt: its ids with the end, at most `text_len` of them. As in the
    /// reference pipelines, the rest of a longer prompt is not read.
    ///
    /// # Errors
    /// T0451 if the tokenizer fails.
    pub fn encode_prompt(&self, prompt: &str, text_len: usize) -> Result<Vec<u32>, Diagnostic> {
        let mut ids = self.encode_clean(&clean_prompt(prompt))?;
        ids.truncate(text_len.saturating_sub(1));
        ids.push(END_ID);
        Ok(ids)
    }

    /// Checks that an encoder whose table has this many rows has one for each id.
    ///
    /// # Errors
    /// T0451 with both numbers.
    pub fn check_vocabulary(&self, file: &str, rows: u64) -> Result<(), Diagnostic> {
        let ids = self.vocabulary_size();
        if ids as u64 <= rows {
            return Ok(());
        }
        Err(Diagnostic::error(&T0451, "the tokenizer belongs to another text encoder")
            .with_label(file, format!("has {ids} ids"))
            .with_label("the text encoder", format!("has {rows} rows (vocab_size)"))
            .with_hint("use the tokenizer that was published with the text encoder"))
    }

    /// Returns the number of ids.
    fn vocabulary_size(&self) -> usize {
        match &self.0 {
            Format::SentencePiece(model) => model.vocabulary_size(),
            Format::Json(tokenizer) => tokenizer.get_vocab_size(true),
        }
    }

    /// Tokenizes cleaned text, without the end.
    fn encode_clean(&self, text: &str) -> Result<Vec<u32>, Diagnostic> {
        match &self.0 {
            Format::SentencePiece(model) => model.encode(text),
            Format::Json(tokenizer) => {
                let encoding = tokenizer.encode(text, true).map_err(|e| {
                    Diagnostic::error(&T0451, "the prompt cannot be tokenized")
                        .with_label("the tokenizer", e.to_string())
                })?;
                let ids = encoding.get_ids();
                Ok(ids.strip_suffix(&[END_ID]).unwrap_or(ids).to_vec())
            }
        }
    }
}
