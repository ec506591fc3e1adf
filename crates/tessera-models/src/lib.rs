//! The model zoo: parses a model's own config and builds its logical graphs, weight names and
//! schedules. Video models are executable; language models are only described as op rows for
//! estimates.
//!
//! This library crate executes nothing and reads no file: application crates pass it texts. It
//! knows no mesh, no strategy and no backend; for each weight it states the natural shardings
//! (`part`), not the chosen one.

#![forbid(unsafe_code)]
#![warn(clippy::expect_used, clippy::print_stderr, clippy::print_stdout)]

mod calls;
mod codes;
mod forward_pass;
mod graph;
mod graph_builder;
mod lm;
mod presets;
mod schedule;
mod stream_config;
mod umt5;
mod vae;
mod video_model;
mod wan_config;
mod weight_names;
mod word_encoder;
pub mod zoo;

pub use calls::list_calls;
pub use codes::CODES;
pub use graph::build_phases;
pub use lm::{
    AttentionKind, DecoderModel, ExpertConfig, ExpertGate, ExpertLayers, ExpertNames, IdSource, LOGITS,
    LanguageModel, MlpConfig, NEXT_IDS, NormKind, PagedCache, ROTARY_FREQUENCIES, RotaryConfig,
    RotaryScaling, TokenBucket, TokenInput, TokenOutput, TokenPhase, build_token_phases, token_ids_name,
};
pub use presets::Preset;
pub use schedule::SigmaStep;
pub use stream_config::{
    DEFAULT_STEP_LIST, DecoderQuality, Guidance, PixelDecoder, PredictionTarget, StreamConfig, TextEncoder,
    denoising_steps,
};
pub use umt5::{
    TEXT_DEVICE_PHASE, TEXT_IDS, TEXT_LENGTH, TEXT_PHASE, TEXT_ROWS, Umt5Config, Umt5Weight, umt5_weights,
};
pub use vae::{
    EXACT_DECODE_PHASE, EXACT_PIXELS, MediaPhases, TinyDecoderConfig, VIDEO_DEVICE_PHASES, VIDEO_PHASES,
    VaeConfig, expected_tiny_weights, expected_vae_weights,
};
pub use video_model::{ContextRegime, VideoModel};
pub use wan_config::WanConfig;
pub use weight_names::{ExpectedWeight, expected_weights};
pub use word_encoder::WordEncoder;
