//! The file of a tiny decoder: which files are one, and of which model.

use std::collections::BTreeMap;
use std::path::Path;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::TinyDecoderConfig;
use tessera_weights::WeightFiles;

use crate::codes::{T0080, T0081};

/// File names of the tiny decoder of Wan2.1.
pub(super) const FILES: [&str; 2] = ["taew2_1.pth", "taew2_1.safetensors"];

/// What every tensor of a decoder begins with; a file holds an encoder, too.
pub(crate) const PREFIX: &str = "decoder.";

/// Beginnings of the names of published files whose tensors have the names of those of [`FILES`] and that
/// decode other latents, each with what it decodes. The first that fits counts.
const FILES_OF_OTHERS: [(&str, &str); 6] = [
    ("taehv1_5", "the latents of HunyuanVideo 1.5"),
    ("taehv", "the latents of HunyuanVideo"),
    ("taeos1_3", "the latents of Open-Sora 1.3"),
    ("taecvx", "the latents of CogVideoX"),
    ("lighttaehy", "the latents of HunyuanVideo"),
    ("lighttaew2_1", "latents before their mean and standard deviation are removed"),
];

/// Returns whether tensors are those of a decoder of this family, of whichever model.
pub(crate) fn is_tiny_decoder(files: &WeightFiles) -> bool {
    TinyDecoderConfig::is_described_by(files.iter_tensors().map(|t| t.name))
}

/// Returns the channels of the latents that a decoder reads; 0 if no tensor states them.
pub(crate) fn latent_channels(files: &WeightFiles) -> u64 {
    let first = files.iter_tensors().find(|t| t.name == "decoder.1.weight");
    first.and_then(|t| t.shape.get(1)).copied().unwrap_or(0)
}

/// Opens the decoder of a file, with names without the common prefix.
///
/// # Errors
/// T0081 for the file of another model whose tensors look alike, else the diagnostics of
/// [`WeightFiles::open`].
pub(crate) fn open_decoder(path: &Path) -> Result<WeightFiles, Diagnostics> {
    refuse_other_model(path).map_err(|d| vec![d])?;
    Ok(WeightFiles::open(path)?.select(PREFIX, &[]))
}

/// Reads the dimensions of the decoder of a file for latents of so many channels.
///
/// # Errors
/// As [`open_decoder`], and T0415 if the file holds no tiny decoder of such latents.
pub(crate) fn read_config(path: &Path, channels: u64) -> Result<TinyDecoderConfig, Diagnostics> {
    refuse_other_model(path).map_err(|d| vec![d])?;
    let files = WeightFiles::open(path)?;
    let shapes: BTreeMap<&str, &[u64]> = files.iter_tensors().map(|t| (t.name, t.shape)).collect();
    TinyDecoderConfig::from_shapes(&path.display().to_string(), &shapes, channels).map_err(|d| vec![d])
}

/// Returns the refusal of a tiny decoder that was named as the model.
pub(crate) fn no_model_error(at: &str, files: &WeightFiles) -> Diagnostic {
    let channels = latent_channels(files);
    Diagnostic::error(&T0080, "the checkpoint is a tiny decoder, and no generator")
        .with_label(at, format!("its tensors decode latents of {channels} channels to pixels"))
        .with_hint(format!("name a generator, and decode with this file: `--decoder {at}`"))
}

fn refuse_other_model(path: &Path) -> Result<(), Diagnostic> {
    let name = path.file_name().map(|n| n.to_string_lossy().to_lowercase()).unwrap_or_default();
    let Some((_, decodes)) = FILES_OF_OTHERS.iter().find(|(beginning, _)| name.starts_with(beginning)) else {
        return Ok(());
    };
    Err(Diagnostic::error(&T0081, "the tiny decoder belongs to another model")
        .with_label(path.display().to_string(), format!("published under this name for {decodes}"))
        .with_hint("use taew2_1.pth or taew2_1.safetensors; a decoder that was trained for Wan2.1 needs another name"))
}
