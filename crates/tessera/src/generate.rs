//! Generates text with a language model: folder → plan → verify → run.
//!
//! The ranks are threads of this process. Every call runs a sealed program on all of them: each compares its
//! collectives with the seal as it issues them, and the ids that ranks choose are compared before the next
//! call depends on them.

mod chat;
mod language_plan;
mod language_weights;
mod pages;
mod text_model;
mod token_ranks;
mod token_run;

pub use chat::chat_messages;
pub use language_plan::{LanguagePlan, LanguageSettings};
pub use tessera_models::TokenOutput;
pub use text_model::TextModel;
pub use token_run::{CallTimes, FinishReason, GeneratedText, Sampling, TextRequest, TokenEvent, TokenRun};
