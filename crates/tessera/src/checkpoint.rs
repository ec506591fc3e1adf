//! Checkpoints as they are published: which files of a folder are which part of a model.
//!
//! [`CheckpointFolder::recognise`] only lists files. Opening a part reads its header, selects the
//! tensors that belong to it, and refuses what cannot stream: each refusal has a code of its own.

mod generator;
mod recognise;
pub(crate) mod tiny_decoder;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use tessera_base::{Diagnostic, Diagnostics};
pub use tessera_models::Preset;
use tessera_models::WanConfig;
use tessera_weights::{ExpectedTensor, WeightFiles, WeightSet};

use crate::codes::{T0010, T0070, T0071, T0074, T0077};
use crate::files::read_text_file;
pub(crate) use generator::list_expected;
pub use generator::{GeneratorFiles, Naming};
pub use recognise::list_files;

/// A part of a video model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Part {
    /// The diffusion transformer.
    Generator,
    /// The autoencoder between latents and pixels.
    Vae,
    /// A small decoder of the same latents, which a stream may use instead of that of the VAE.
    TinyDecoder,
    /// The model that turns tokens of a prompt into rows.
    TextEncoder,
    /// The files that turn a prompt into tokens.
    Tokenizer,
}

impl Part {
    /// Every part, in the order of reports.
    pub const ALL: [Part; 5] =
        [Part::Generator, Part::Vae, Part::TinyDecoder, Part::TextEncoder, Part::Tokenizer];
    /// The parts of every published model; a tiny decoder takes the place of another part.
    pub const PUBLISHED: [Part; 4] = [Part::Generator, Part::Vae, Part::TextEncoder, Part::Tokenizer];

    /// Returns the name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Part::Generator => "generator",
            Part::Vae => "VAE",
            Part::TinyDecoder => "tiny decoder",
            Part::TextEncoder => "text encoder",
            Part::Tokenizer => "tokenizer",
        }
    }

    /// Lists the files that hold the part, in both published forms.
    #[must_use]
    pub fn usual_files(self) -> &'static str {
        match self {
            Part::Generator => {
                "diffusion_pytorch_model*.safetensors, transformer/, or one .pt or .safetensors"
            }
            Part::Vae => "Wan2.1_VAE.pth or vae/diffusion_pytorch_model.safetensors",
            Part::TinyDecoder => "taew2_1.pth or taew2_1.safetensors",
            Part::TextEncoder => "models_t5_umt5-xxl-enc-bf16.pth or text_encoder/model*.safetensors",
            Part::Tokenizer => "google/umt5-xxl/ or tokenizer/ with tokenizer.json or spiece.model",
        }
    }
}

/// The form in which a folder was published.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// `config.json` and `stream.toml` beside the weights.
    Tessera,
    /// A pipeline of diffusers: `model_index.json` and one folder per part.
    DiffusersPipeline,
    /// The `transformer/` folder of a pipeline of diffusers.
    DiffusersTransformer,
    /// The folder of an original Wan release: all parts side by side.
    OriginalWan,
    /// One checkpoint with a generator, without a config.
    Checkpoint,
    /// None of these.
    Unknown,
}

impl Form {
    /// Describes the form in a few words.
    #[must_use]
    pub fn description(self) -> &'static str {
        match self {
            Form::Tessera => "a model folder with config.json and stream.toml",
            Form::DiffusersPipeline => "a diffusers pipeline",
            Form::DiffusersTransformer => "the transformer folder of a diffusers pipeline",
            Form::OriginalWan => "an original Wan folder",
            Form::Checkpoint => "a checkpoint of a generator",
            Form::Unknown => "no known kind of model",
        }
    }
}

/// The files of one part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PartFiles {
    /// What opens the part: a file, an index of shards, or a folder.
    pub source: PathBuf,
}

/// A model as a user downloaded it: its form and the files of its parts.
#[derive(Debug, Clone)]
pub struct CheckpointFolder {
    /// The folder or file that the user named.
    pub path: PathBuf,
    /// The form in which it was published.
    pub form: Form,
    /// The generator's config, if it has one.
    pub config: Option<PathBuf>,
    /// `stream.toml` of the folder, if it has one.
    pub stream: Option<PathBuf>,
    /// Checkpoints of the folder, if there are several and none has a usual name.
    pub candidates: Vec<PathBuf>,
    parts: BTreeMap<Part, PartFiles>,
}

impl CheckpointFolder {
    /// Recognises the form of a folder or of a single checkpoint, without opening weights. Parts that it
    /// lacks are looked up in folders `Wan2.1-T2V-*` and `wan_models` below it or beside it, because
    /// distilled checkpoints are published without VAE and text encoder.
    ///
    /// # Errors
    /// T0010 if the path does not exist.
    pub fn recognise(path: &Path) -> Result<CheckpointFolder, Diagnostic> {
        recognise::recognise(path)
    }

    /// Returns the same checkpoint with a tiny decoder from this file, relative to the checkpoint's folder. An
    /// empty path changes nothing.
    #[must_use]
    pub fn with_decoder(mut self, file: &str) -> CheckpointFolder {
        if !file.is_empty() {
            let folder = if self.path.is_dir() { Some(self.path.as_path()) } else { self.path.parent() };
            let source = folder.unwrap_or(Path::new("")).join(file);
            self.parts.insert(Part::TinyDecoder, PartFiles { source });
        }
        self
    }

    /// Returns the files of a part, if it was found.
    #[must_use]
    pub fn part(&self, part: Part) -> Option<&PartFiles> {
        self.parts.get(&part)
    }

    /// Opens the weights of a part and compares them with the tensors that it must have.
    ///
    /// # Errors
    /// T0070 if the part is missing, T0071 if its download is incomplete, T0073 for an image-to-video
    /// generator, T0074 for a VAE of Wan2.2, T0075 for an adapter, else the diagnostics of
    /// [`WeightFiles::open`] and [`WeightFiles::resolve`].
    pub fn open_part(&self, part: Part, expected: &[ExpectedTensor]) -> Result<WeightSet, Diagnostics> {
        match part {
            Part::Generator => self.open_generator()?.files.resolve(expected),
            _ => self.open_files(part)?.resolve(expected),
        }
    }

    /// Opens the files of a part under their own names.
    ///
    /// # Errors
    /// As [`CheckpointFolder::open_part`], except for what the expected tensors decide.
    pub fn open_files(&self, part: Part) -> Result<WeightFiles, Diagnostics> {
        let found = self.require(part).map_err(|d| vec![d])?;
        if part == Part::TinyDecoder {
            return tiny_decoder::open_decoder(&found.source);
        }
        let files = WeightFiles::open(&found.source)?;
        if part == Part::Vae {
            refuse_newer_vae(&found.source, &files).map_err(|d| vec![d])?;
        }
        Ok(files)
    }

    /// Opens the generator: the tensors of its averaged weights if the checkpoint has them, without the
    /// prefix.
    ///
    /// # Errors
    /// As [`CheckpointFolder::open_part`].
    pub fn open_generator(&self) -> Result<GeneratorFiles, Diagnostics> {
        GeneratorFiles::open(self.require(Part::Generator).map_err(|d| vec![d])?)
    }

    /// Reads the dimensions of the generator: from its config, else from its tensors.
    ///
    /// # Errors
    /// What is wrong with the config, or as [`CheckpointFolder::open_generator`] and
    /// [`WanConfig::from_shapes`].
    pub fn read_wan_config(&self) -> Result<WanConfig, Diagnostics> {
        generator::read_wan_config(self)
    }

    /// Reads the VAE's own config, a file name and its text, if the VAE was published with one.
    ///
    /// # Errors
    /// T0010 if the file cannot be read.
    pub(crate) fn read_vae_config(&self) -> Result<Option<(String, String)>, Diagnostic> {
        // Beside the VAE of an original release lies the config of its generator. A folder whose weights
        // are missing still tells which VAE it is, and the missing weights are reported when they are opened.
        let source = self.part(Part::Vae).map(|found| found.source.as_path());
        let stray = self.path.join("vae");
        let folders = [source, source.and_then(Path::parent), Some(&stray)];
        let own = folders.into_iter().flatten().find(|f| f.file_name().is_some_and(|n| n == "vae"));
        let path = own.map(|f| f.join("config.json")).filter(|p| p.exists());
        path.map(|path| {
            read_text_file(&path)
                .map(|text| (path.display().to_string(), text))
                .map_err(|e| Diagnostic::error(&T0010, format!("{} cannot be read: {e}", path.display())))
        })
        .transpose()
    }

    /// Refuses a generator that no one distilled for streaming: one that was published in a full Wan
    /// folder or pipeline, unless its config or a stream.toml says otherwise.
    ///
    /// # Errors
    /// T0072, with the presets whose checkpoints fit.
    pub fn require_causal(&self) -> Result<(), Diagnostic> {
        generator::require_causal(self)
    }

    /// Lists the files that a download left incomplete, in the folder and a few levels below it.
    #[must_use]
    pub fn list_incomplete(&self) -> Vec<PathBuf> {
        recognise::list_incomplete(&self.path)
    }

    /// Returns the files of a part.
    ///
    /// # Errors
    /// T0070, T0071 or T0077.
    pub fn require(&self, part: Part) -> Result<&PartFiles, Diagnostic> {
        if let Some(found) = self.parts.get(&part) {
            return Ok(found);
        }
        let at = self.path.display().to_string();
        let incomplete = self.list_incomplete();
        if let Some(first) = incomplete.first() {
            let count = incomplete.len();
            let label = format!("{count} files are incomplete, the first is {}", first.display());
            return Err(Diagnostic::error(
                &T0071,
                format!("the {} is not downloaded completely", part.name()),
            )
            .with_label(at, label)
            .with_hint("run the download again: it continues where it stopped"));
        }
        if part == Part::Generator && self.candidates.len() > 1 {
            let mut d = Diagnostic::error(&T0077, "several files could be the generator")
                .with_label(at, format!("{} checkpoints", self.candidates.len()))
                .with_hint("name the file itself instead of the folder");
            d.notes = self.candidates.iter().map(|p| format!("found: {}", p.display())).collect();
            return Err(d);
        }
        Err(Diagnostic::error(&T0070, format!("the checkpoint has no {}", part.name()))
            .with_label(at, format!("{}; expected {}", self.form.description(), part.usual_files()))
            .with_hint(match part {
                Part::Generator => "name the folder or file that holds the generator",
                Part::TinyDecoder => {
                    "download taew2_1.pth from the repository taehv and put it beside the checkpoint, or name it with \
                     `--decoder FILE`"
                }
                _ => {
                    "download it from Wan2.1-T2V-1.3B or its diffusers form (both sizes share it), and put that \
                     folder, or a link to it, beside the checkpoint"
                }
            }))
    }
}

/// Channels of the latents of Wan2.2's VAE.
const NEWER_VAE_CHANNELS: u64 = 48;

/// Refuses a VAE with more latent channels than those of Wan2.1.
fn refuse_newer_vae(source: &Path, files: &WeightFiles) -> Result<(), Diagnostic> {
    // The last conv before the decoder, in the original and the diffusers naming.
    let channels = files
        .iter_tensors()
        .find(|t| matches!(t.name, "conv2.weight" | "post_quant_conv.weight"))
        .and_then(|t| t.shape.first().copied());
    if channels != Some(NEWER_VAE_CHANNELS) {
        return Ok(());
    }
    Err(Diagnostic::error(&T0074, "the VAE is that of Wan2.2")
        .with_label(source.display().to_string(), "48 latent channels, expected 16")
        .with_hint("use Wan2.1_VAE.pth, which Wan2.1 and the models distilled from it share"))
}
