//! Text to token ids: cleans a prompt as Wan does, and tokenizes it with the checkpoint's own
//! tokenizer. The tokenizer of a language model also makes text of ids.
//!
//! The crate knows no model, no file system and no run: the caller passes the bytes of a tokenizer
//! file, and decides what the ids are for.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod charsmap;
mod chat_template;
mod clean;
mod codes;
mod fix_text;
mod json_file;
mod sentence_piece;
mod spiece_file;
mod text_tokenizer;
mod tokenizer;

pub use chat_template::{ChatMessage, ChatTemplate, ChatTokens};
pub use clean::clean_prompt;
pub use codes::CODES;
pub use text_tokenizer::TextTokenizer;
pub use tokenizer::{END_ID, PADDING_ID, PromptTokenizer};
