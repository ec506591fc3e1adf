//! The file format `tokenizer.json` of the library tokenizers.

use tessera_base::{Code, Diagnostic};
use tokenizers::Tokenizer;

/// Reads a tokenizer without its own padding and truncation: a model decides how many ids it takes.
///
/// # Errors
/// `code` with what is wrong with the file.
pub(crate) fn read_tokenizer(code: &'static Code, file: &str, bytes: &[u8]) -> Result<Tokenizer, Diagnostic> {
    let refuse = |e: tokenizers::Error| refuse_file(code, file, e.to_string());
    let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(refuse)?;
    tokenizer.with_padding(None);
    tokenizer.with_truncation(None).map_err(refuse)?;
    Ok(tokenizer)
}

/// Returns the diagnostic of a file that is no tokenizer of the model.
pub(crate) fn refuse_file(code: &'static Code, file: &str, why: String) -> Diagnostic {
    Diagnostic::error(code, "the tokenizer cannot be used")
        .with_label(file, why)
        .with_hint("fetch the file again from the publisher of the model")
}
