//! Generates text with a language model: folder → plan → verify → run.
//!
//! Every call runs a sealed program on all ranks: each compares its collectives with the seal as it issues them,
//! and the ids that ranks choose are compared before the next call depends on them. [`run`] starts a process for
//! each rank, under a leader; [`TokenRun`] runs the same calls on threads of this process.

mod call_estimate;
mod chat;
mod expert_counts;
mod generate_config;
mod language_plan;
mod language_rank;
mod language_weights;
mod launch;
mod live_text;
mod logit_parity;
mod pages;
mod prompt_calls;
mod prompts_file;
mod run_outputs;
mod scheduler;
mod text_choices;
mod text_leader;
mod text_model;
mod token_run;

pub use call_estimate::LEADER_NS;
pub use chat::chat_messages;
pub use expert_counts::{EXPERTS_FILE, read_expert_choices, read_expert_load};
pub(crate) use generate_config::GenerateConfig;
pub use language_plan::{LanguagePlan, LanguageSettings};
pub use language_weights::LanguagePlace;
pub use launch::{GenerateEvent, GenerateOptions, GenerateReport, run};
pub use live_text::{LiveText, TextPiece};
pub use logit_parity::{LogitDifference, PrecisionPolicy, check_parity, compare_logits, list_low_precision};
pub use prompts_file::{GivenPrompt, PromptSource, read_prompts_file};
pub use run_outputs::{COMPARISON_FILE, ShownText, TEXTS_FILE, finish_name, write_run_outputs};
pub use scheduler::{CallTimes, GeneratedText, Sampling, TextRequest};
pub use tessera_models::TokenOutput;
pub use tessera_report::expert_load::{ExpertLoadRow, describe_expert_load};
pub use tessera_runtime::wire::{FinishReason, TokenEvent};
pub use tessera_text::ChatTemplate;
pub use text_choices::TextExtents;
pub(crate) use text_leader::run_text_leader;
pub use text_model::TextModel;
pub use token_run::TokenRun;
