//! The flags of the leader's encoders: of text, and of an input video.

use tessera::stream_options::{EncoderDevice, TextOptions};

use super::named_values;

/// The devices of the leader's encoders.
#[derive(Debug, Clone, clap::Args)]
pub struct EncoderArgs {
    /// Device of the program of a text encoder such as UMT5
    #[arg(long, value_name = "DEVICE", value_parser = named_values(ENCODER_DEVICES), default_value = "auto")]
    text_on: EncoderDevice,

    /// Free the memory of the text encoder after each prompt and load it again for the next one
    #[arg(long)]
    text_unload: bool,

    /// Device of the programs that encode the input video
    #[arg(
        long,
        value_name = "DEVICE",
        requires = "video",
        value_parser = named_values(ENCODER_DEVICES),
        default_value = "auto"
    )]
    pub video_on: EncoderDevice,
}

impl EncoderArgs {
    /// Returns where the text encoder runs, and whether it stays loaded.
    #[must_use]
    pub fn to_text_options(&self) -> TextOptions {
        TextOptions { on: self.text_on, unload: self.text_unload }
    }
}

/// Values of `--text-on` and `--video-on`, each with its help text.
const ENCODER_DEVICES: &[(&str, EncoderDevice, &str)] = &[
    (
        "auto",
        EncoderDevice::Auto,
        "A GPU of the leader if the ranks run on GPUs and it has the memory, else the CPU",
    ),
    ("cpu", EncoderDevice::Cpu, "CPU cores of the leader's host"),
    ("gpu", EncoderDevice::Gpu, "A GPU of the leader; refused if its memory does not suffice"),
];
