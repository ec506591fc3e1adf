//! The generator of a checkpoint: which of its tensors, under which prefix and naming, and whether
//! it can stream.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::{Preset, WanConfig, expected_weights};
use tessera_weights::{ExpectedTensor, WeightFiles};

use super::{CheckpointFolder, Form, PartFiles, tiny_decoder};
use crate::codes::{T0010, T0072, T0073, T0075};
use crate::files::read_text_file;

/// A tensor that every generator has under the same name in both namings.
const MARK: &str = "patch_embedding.weight";

/// Keys beside which a file may hold other models, the preferred one first: the average over training
/// steps, the last step, and the generator of a file that packs all parts.
const KEYS: [&str; 3] = ["generator_ema.", "generator.", "model.diffusion_model."];

/// A name part that sharded training adds around modules.
const SHARDING_WRAPPER: &str = "_fsdp_wrapped_module.";

/// How a checkpoint names the tensors of a generator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Naming {
    /// As the Wan repository does: `blocks.0.self_attn.q`.
    Original,
    /// As diffusers does: `blocks.0.attn1.to_q`.
    Diffusers,
}

impl Naming {
    /// Returns the name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Naming::Original => "original",
            Naming::Diffusers => "diffusers",
        }
    }
}

/// The tensors of a generator without the prefix of the file.
#[derive(Debug, Clone)]
pub struct GeneratorFiles {
    /// The tensors.
    pub files: WeightFiles,
    /// What the file puts before every name.
    pub prefix: String,
    /// How the file names tensors.
    pub naming: Naming,
}

impl GeneratorFiles {
    /// Opens the files and selects the generator.
    pub(super) fn open(part: &PartFiles) -> Result<GeneratorFiles, Diagnostics> {
        let files = WeightFiles::open(&part.source)?;
        let at = part.source.display().to_string();
        refuse_adapter(&at, &files).map_err(|d| vec![d])?;
        if tiny_decoder::is_tiny_decoder(&files) {
            return Err(vec![tiny_decoder::no_model_error(&at, &files)]);
        }
        let prefix = find_prefix(&files);
        let files = files.select(&prefix, &[SHARDING_WRAPPER]);
        let is_diffusers = files.iter_tensors().any(|t| t.name.starts_with("condition_embedder."));
        let naming = if is_diffusers { Naming::Diffusers } else { Naming::Original };
        let generator = GeneratorFiles { files, prefix, naming };
        refuse_image_input(&at, &generator).map_err(|d| vec![d])?;
        Ok(generator)
    }

    /// Returns the shape of every tensor by its name without the prefix.
    #[must_use]
    pub fn shapes(&self) -> BTreeMap<&str, &[u64]> {
        self.files.iter_tensors().map(|t| (t.name, t.shape)).collect()
    }
}

/// Lists the tensors of a generator.
pub(crate) fn list_expected(wan: &WanConfig) -> Vec<ExpectedTensor> {
    expected_weights(wan)
        .into_iter()
        .map(|w| ExpectedTensor { name: w.name, aliases: vec![w.diffusers_name], shape: w.shape })
        .collect()
}

/// Returns the prefix of the generator's names. A file without a generator has none.
fn find_prefix(files: &WeightFiles) -> String {
    let prefixes: Vec<&str> = files.iter_tensors().filter_map(|t| t.name.strip_suffix(MARK)).collect();
    let keyed = KEYS.iter().find_map(|key| prefixes.iter().find(|p| p.starts_with(key)));
    // Under another prefix all tensors must lie, so that no part of a model is dropped unnoticed.
    let common = prefixes.iter().find(|p| files.iter_tensors().all(|t| t.name.starts_with(**p)));
    keyed.or(common).map_or(String::new(), ToString::to_string)
}

fn refuse_adapter(at: &str, files: &WeightFiles) -> Result<(), Diagnostic> {
    let is_adapter =
        |name: &str| [".lora_A", ".lora_B", ".lora_down", ".lora_up"].iter().any(|part| name.contains(part));
    let count = files.iter_tensors().filter(|t| is_adapter(t.name)).count();
    if count == 0 {
        return Ok(());
    }
    let total = files.iter_tensors().count();
    Err(Diagnostic::error(&T0075, "the checkpoint holds a LoRA adapter")
        .with_label(at, format!("{count} of {total} tensors are factors of an adapter"))
        .with_hint("name its base, and add the adapter with `--lora FILE`"))
}

/// Channels of the patch embedding of an image-to-video model: noise, mask and image.
const IMAGE_INPUT_CHANNELS: u64 = 36;

fn refuse_image_input(at: &str, generator: &GeneratorFiles) -> Result<(), Diagnostic> {
    let shapes = generator.shapes();
    let channels = shapes.get(MARK).and_then(|shape| shape.get(1)).copied();
    let image = shapes
        .keys()
        .find(|n| n.starts_with("img_emb.") || n.starts_with("condition_embedder.image_embedder."));
    let says = match (channels, image) {
        (Some(IMAGE_INPUT_CHANNELS), _) => {
            format!("{MARK} has {IMAGE_INPUT_CHANNELS} input channels, expected 16")
        }
        (_, Some(name)) => format!("has the tensor {}{name}, which encodes an image", generator.prefix),
        _ => return Ok(()),
    };
    Err(image_input_error(at, &says))
}

fn image_input_error(at: &str, says: &str) -> Diagnostic {
    Diagnostic::error(&T0073, "an image-to-video checkpoint")
        .with_label(at, says)
        .with_hint("use the text-to-video checkpoint (T2V) of the same family")
}

pub(super) fn read_wan_config(checkpoint: &CheckpointFolder) -> Result<WanConfig, Diagnostics> {
    // With a config, a model can be planned without its weights.
    let Some(config) = &checkpoint.config else {
        let opened = checkpoint.open_generator()?;
        return WanConfig::from_shapes(&checkpoint.path.display().to_string(), &opened.shapes());
    };
    let at = config.display().to_string();
    let text = read_text_file(config)
        .map_err(|e| vec![Diagnostic::error(&T0010, format!("{at} cannot be read: {e}"))])?;
    if let Some(says) = describe_image_input(&text) {
        return Err(vec![image_input_error(&at, &says)]);
    }
    WanConfig::parse(&at, &text)
}

/// Describes the key of a config that says image-to-video, if there is one.
fn describe_image_input(text: &str) -> Option<String> {
    let config: serde_json::Value = serde_json::from_str(text).ok()?;
    ["in_dim", "in_channels"]
        .iter()
        .find(|key| config[**key].as_u64() == Some(IMAGE_INPUT_CHANNELS))
        .map(|key| format!("{key} is {IMAGE_INPUT_CHANNELS}, expected 16"))
        .or_else(|| {
            let kind = config["model_type"].as_str().filter(|kind| kind.contains("i2v"))?;
            Some(format!("model_type is {kind:?}, expected \"t2v\""))
        })
}

pub(super) fn require_causal(checkpoint: &CheckpointFolder) -> Result<(), Diagnostic> {
    let is_release =
        matches!(checkpoint.form, Form::OriginalWan | Form::DiffusersPipeline | Form::DiffusersTransformer);
    if !is_release || checkpoint.stream.is_some() {
        return Ok(());
    }
    let text = checkpoint.config.as_ref().and_then(|path| read_text_file(path).ok()).unwrap_or_default();
    let class = serde_json::from_str::<serde_json::Value>(&text)
        .ok()
        .and_then(|config| config["_class_name"].as_str().map(String::from))
        .unwrap_or_default();
    if class.starts_with("Causal") {
        return Ok(());
    }
    let dim = WanConfig::parse("config.json", &text).map_or(1536, |config| config.dim);
    let names: Vec<&str> = Preset::ALL.iter().filter(|p| p.model_dim() == dim).map(|p| p.name()).collect();
    Err(Diagnostic::error(&T0072, "the generator is bidirectional: it was not distilled for streaming")
        .with_label(
            checkpoint.path.display().to_string(),
            format!("{} with the class {class:?}, expected a causal one", checkpoint.form.description()),
        )
        .with_hint(format!(
            "download a checkpoint distilled from it{}, put it beside this folder, and name that file; this folder \
             then provides VAE and text encoder",
            if names.is_empty() { String::new() } else { format!(" (presets of this size: {})", names.join(", ")) }
        )))
}
