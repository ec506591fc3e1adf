//! The UMT5 text encoder: its dimensions, its weights, and the program that encodes a prompt.

mod config;
mod program;
mod weights;

pub use config::Umt5Config;
pub(crate) use program::encode_text_phases;
pub use program::{TEXT_DEVICE_PHASE, TEXT_IDS, TEXT_LENGTH, TEXT_PHASE, TEXT_ROWS};
pub use weights::{Umt5Weight, umt5_weights};
