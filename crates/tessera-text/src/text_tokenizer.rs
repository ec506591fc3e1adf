//! The tokenizer of a language model, from its `tokenizer.json`.

use tessera_base::Diagnostic;
use tokenizers::Tokenizer;

use crate::codes::T0452;
use crate::json_file::read_tokenizer;

/// A tokenizer of a language model.
pub struct TextTokenizer(Tokenizer);

impl std::fmt::Debug for TextTokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "TextTokenizer({} ids)", self.0.get_vocab_size(true))
    }
}

impl TextTokenizer {
    /// Reads a `tokenizer.json` of the library tokenizers. `file` appears only in diagnostics.
    ///
    /// # Errors
    /// T0452 with what is wrong with the file.
    pub fn from_json(file: &str, bytes: &[u8]) -> Result<TextTokenizer, Diagnostic> {
        read_tokenizer(&T0452, file, bytes).map(TextTokenizer)
    }

    /// Checks that a model whose embedding has this many rows has one for each id.
    ///
    /// # Errors
    /// T0452 with both numbers.
    pub fn check_vocabulary(&self, file: &str, rows: u64) -> Result<(), Diagnostic> {
        let largest = self.0.get_vocab(true).into_values().max().map_or(0, u64::from);
        if largest < rows {
            return Ok(());
        }
        Err(Diagnostic::error(&T0452, "the tokenizer belongs to another model")
            .with_label(file, format!("has the id {largest}"))
            .with_label("the model", format!("has {rows} ids (vocab_size)"))
            .with_hint("use the tokenizer that was published with the model"))
    }

    /// Tokenizes a text, with the ids that the file adds to every text, such as a beginning of a text.
    ///
    /// # Errors
    /// T0452 if the tokenizer fails.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>, Diagnostic> {
        self.encode_with(text, true)
    }

    /// Tokenizes what a chat template has written, which contains every special token by its text.
    ///
    /// # Errors
    /// T0452 if the tokenizer fails.
    pub fn encode_chat(&self, text: &str) -> Result<Vec<u32>, Diagnostic> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, Diagnostic> {
        let failed = |e: tokenizers::Error| {
            Diagnostic::error(&T0452, "the prompt cannot be tokenized")
                .with_label("the tokenizer", e.to_string())
        };
        Ok(self.0.encode(text, add_special_tokens).map_err(failed)?.get_ids().to_vec())
    }

    /// Returns the text of ids, without those that only mark places, such as the end of a text.
    ///
    /// # Errors
    /// T0452 if the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String, Diagnostic> {
        self.0.decode(ids, true).map_err(|e| refuse_ids(&e))
    }

    /// Returns a function that takes the ids of a text one by one, and returns the text that each adds. An id that
    /// holds a part of a character adds nothing until the rest has come.
    pub fn decode_one_by_one(&self) -> impl FnMut(u32) -> Result<String, Diagnostic> + '_ {
        let mut stream = self.0.decode_stream(true);
        move |id| Ok(stream.step(id).map_err(|e| refuse_ids(&e))?.unwrap_or_default())
    }
}

fn refuse_ids(e: &tokenizers::Error) -> Diagnostic {
    Diagnostic::error(&T0452, "the generated ids have no text").with_label("the tokenizer", e.to_string())
}
