//! The zoo: interprets a model's own config and builds its logical graphs, weight names and schedules. Video models
//! run; language models are only counted, as op rows.
//!
//! This room executes nothing and reads no file: doors hand it texts. It knows no mesh, no strategy and no
//! backend; what it says about a weight is which cuts are natural (`part`), not which is taken.

mod config;
mod graph;
mod lm;
mod names;
mod schedule;
mod stream;
mod text;
pub mod zoo;

pub use config::WanConfig;
pub use graph::{Regime, VideoModel, calls, phases};
pub use lm::{Attention, Experts, LanguageModel, Mlp, Norm};
pub use names::{ExpectedWeight, expected_weights};
pub use schedule::{Step, steps};
pub use stream::{Decoder, Prediction, StreamConfig, TextEncoder};
pub use text::Words;

use tessera_base::Code;

/// Codes this room raises.
pub const CODES: &[&Code] = &[
    &config::T0410,
    &stream::T0411,
    &text::T0420,
    &text::T0421,
    &text::T0422,
    &lm::T0430,
    &lm::T0431,
    &lm::T0432,
];
