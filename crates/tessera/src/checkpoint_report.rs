//! Describes a checkpoint for a person: its parts, what is missing, which preset fits, and the
//! command to run next.

use std::collections::BTreeMap;
use std::path::Path;

use serde::Serialize;
use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::{PixelDecoder, Preset, StreamConfig, TextEncoder, WanConfig, expected_weights};
use tessera_weights::WeightFiles;

use crate::checkpoint::{CheckpointFolder, Form, Part, list_expected, list_files, tiny_decoder};
use crate::codes::T0016;
use crate::model::{Model, Overrides};

/// What a folder is, and whether a stream can run from it.
#[derive(Debug, Serialize)]
pub struct CheckpointReport {
    /// The folder or file that the user named.
    pub path: String,
    /// The form in which it was published.
    pub form: &'static str,
    /// Dimensions of the generator, if they could be read.
    pub generator: Option<GeneratorReport>,
    /// The parts that were found.
    pub parts: Vec<PartReport>,
    /// Names of the parts that were not found.
    pub missing: Vec<&'static str>,
    /// Files that a download left incomplete.
    pub incomplete: Vec<String>,
    /// What gives the stream settings: a file or a preset.
    pub settings: Option<String>,
    /// Presets for a generator of this size, the likeliest first.
    pub presets: Vec<PresetReport>,
    /// The command to run next, if a stream can run.
    pub next_command: Option<String>,
    /// Why no stream can run.
    #[serde(serialize_with = "serialize_problems")]
    pub problems: Diagnostics,
}

/// Dimensions of a generator.
#[derive(Debug, Serialize)]
pub struct GeneratorReport {
    /// Width of the residual stream.
    pub dim: u64,
    /// Attention heads per block.
    pub heads: u64,
    /// Transformer blocks.
    pub layers: u64,
    /// Elements of all tensors.
    pub parameters: u64,
}

/// The files of one part.
#[derive(Debug, Serialize)]
pub struct PartReport {
    /// Name of the part.
    pub part: &'static str,
    /// What opens the part.
    pub source: String,
    /// `safetensors`, `PyTorch` or `files`.
    pub form: &'static str,
    /// Number of files.
    pub files: usize,
    /// Bytes of all tensors, or of all files if they hold none.
    pub bytes: u64,
    /// Number of tensors.
    pub tensors: usize,
    /// Number of tensors of each dtype.
    pub dtypes: BTreeMap<String, usize>,
    /// What the file puts before every name of the generator.
    pub prefix: String,
    /// How the generator's tensors are named.
    pub naming: Option<&'static str>,
}

/// A preset that has the size of the generator.
#[derive(Debug, Serialize)]
pub struct PresetReport {
    /// Its name.
    pub name: &'static str,
    /// One sentence.
    pub description: &'static str,
}

impl CheckpointReport {
    /// Inspects a folder or a checkpoint.
    ///
    /// # Errors
    /// T0010 if the path does not exist. Everything else is part of the report.
    pub fn inspect(path: &Path) -> Result<CheckpointReport, Diagnostic> {
        if let Some(report) = describe_tiny_decoder(path) {
            return Ok(report);
        }
        let checkpoint = CheckpointFolder::recognise(path)?;
        let mut problems = Vec::new();
        let wan = checkpoint.read_wan_config().map_err(|ds| problems.extend(ds)).ok();
        problems.extend(checkpoint.require_causal().err());
        let presets = wan.as_ref().map(|wan| suggest_presets(path, wan)).unwrap_or_default();
        let preset = presets.first().copied().filter(|_| checkpoint.stream.is_none());
        let overrides = Overrides { preset, ..Overrides::default() };
        // The diagnostics above say more than those that follow from them.
        let model = if problems.is_empty() {
            Model::open(path, &overrides).map_err(|ds| problems.extend(ds)).ok()
        } else {
            None
        };
        let stream = model.as_ref().map(|m| &m.video.stream);
        let needed = list_needed_parts(checkpoint.form, stream);
        let checkpoint = checkpoint.with_decoder(stream.map_or("", |s| &s.decoder_file));
        if model.as_ref().is_some_and(|m| m.video.stream.text == TextEncoder::None) {
            problems.push(
                Diagnostic::error(
                    &T0016,
                    "the stream settings name no text encoder, so no prompt can be encoded",
                )
                .with_label(path.display().to_string(), "[text] encoder = \"none\"")
                .with_hint("plan with these settings, or name a text encoder in stream.toml"),
            );
        }
        let mut parts = Vec::new();
        for part in Part::ALL {
            match describe_part(&checkpoint, part, wan.as_ref()) {
                Ok(report) => parts.push(report),
                Err(ds) if needed.contains(&part) => problems.extend(ds),
                Err(_) => {}
            }
        }
        // The generator is opened twice, for its dimensions and for its description.
        let mut seen = Vec::new();
        problems.retain(|d| {
            let is_new = !seen.contains(d);
            seen.push(d.clone());
            is_new
        });
        let settings = checkpoint
            .stream
            .as_ref()
            .map(|p| p.display().to_string())
            .or_else(|| preset.map(|p| format!("preset {}", p.name())));
        let next_command = problems.is_empty().then(|| {
            let preset = preset.map(|p| format!(" --preset {}", p.name())).unwrap_or_default();
            // The default prompt consists of words that a word table knows.
            let has_words = model.as_ref().is_some_and(|m| m.video.stream.text == TextEncoder::Words);
            let prompt = if has_words { "" } else { " --prompt \"a red fox runs through snow\"" };
            format!("tessera stream {}{preset}{prompt}", path.display())
        });
        let missing = needed.iter().filter(|part| checkpoint.part(**part).is_none());
        Ok(CheckpointReport {
            path: path.display().to_string(),
            form: checkpoint.form.description(),
            generator: wan.as_ref().map(describe_generator),
            parts,
            missing: missing.map(|part| part.name()).collect(),
            incomplete: checkpoint.list_incomplete().iter().map(|p| p.display().to_string()).collect(),
            settings,
            presets: presets
                .iter()
                .map(|p| PresetReport { name: p.name(), description: p.description() })
                .collect(),
            next_command,
            problems,
        })
    }
}

/// Lists the parts that a stream with these settings reads. A model folder of Tessera needs no more than they say.
fn list_needed_parts(form: Form, stream: Option<&StreamConfig>) -> Vec<Part> {
    let mut needed = vec![Part::Generator];
    match stream {
        Some(stream) if form == Form::Tessera => {
            if stream.text != TextEncoder::Words {
                needed.extend([Part::TextEncoder, Part::Tokenizer]);
            }
            needed.push(Part::Vae);
        }
        _ => needed = Part::PUBLISHED.to_vec(),
    }
    if let Some(stream) = stream {
        needed.retain(|part| *part != Part::Vae || stream.uses_vae());
        needed.extend((stream.decoder == PixelDecoder::Tiny).then_some(Part::TinyDecoder));
    }
    needed
}

/// Describes a file that holds a tiny decoder and no generator. A stream needs a generator beside it.
fn describe_tiny_decoder(path: &Path) -> Option<CheckpointReport> {
    let files = WeightFiles::open_file(path).ok().filter(|_| path.is_file())?;
    if !tiny_decoder::is_tiny_decoder(&files) {
        return None;
    }
    let at = path.display().to_string();
    let mut part = PartReport::new(Part::TinyDecoder, path);
    part.fill(&files);
    Some(CheckpointReport {
        path: at.clone(),
        form: "a tiny decoder of latents (TAEHV), without a generator",
        generator: None,
        parts: vec![part],
        missing: vec![Part::Generator.name()],
        incomplete: Vec::new(),
        settings: None,
        presets: Vec::new(),
        next_command: None,
        problems: match tiny_decoder::read_config(path, tiny_decoder::latent_channels(&files)) {
            Ok(_) => vec![tiny_decoder::no_model_error(&at, &files)],
            Err(ds) => ds,
        },
    })
}

/// Lists the presets of a generator's size. The names of the last folders and of the file move the one
/// that they name to the front.
#[must_use]
pub fn suggest_presets(path: &Path, wan: &WanConfig) -> Vec<Preset> {
    const NAMED_PARTS: usize = 3;
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let parts: Vec<String> =
        absolute.iter().rev().take(NAMED_PARTS).map(|p| p.to_string_lossy().to_lowercase()).collect();
    // Separators differ between repositories, folders and files.
    let name: String = parts.concat().chars().filter(char::is_ascii_alphanumeric).collect();
    let is_named = |preset: &Preset| {
        let words: &[&str] = match preset {
            Preset::SelfForcing => &["selfforcing"],
            Preset::LongLive => &["longlive"],
            Preset::StreamDiffusionV2 => &["streamdiffusion", "causaldmdv2v"],
            Preset::KreaRealtime => &["krea"],
            Preset::KreaRealtimeScope => &["scope"],
        };
        words.iter().any(|word| name.contains(word))
    };
    let mut presets: Vec<Preset> = Preset::ALL.into_iter().filter(|p| p.model_dim() == wan.dim).collect();
    presets.sort_by_key(|p| !is_named(p));
    presets
}

fn describe_generator(wan: &WanConfig) -> GeneratorReport {
    let parameters = expected_weights(wan).iter().map(|w| w.shape.iter().product::<u64>()).sum();
    GeneratorReport { dim: wan.dim, heads: wan.heads, layers: wan.layers, parameters }
}

fn describe_part(
    checkpoint: &CheckpointFolder,
    part: Part,
    wan: Option<&WanConfig>,
) -> Result<PartReport, Diagnostics> {
    let source = &checkpoint.require(part).map_err(|d| vec![d])?.source;
    let mut report = PartReport::new(part, source);
    match part {
        Part::Tokenizer => {
            let files = list_files(source);
            report.files = files.len();
            report.bytes = files.iter().filter_map(|f| std::fs::metadata(f).ok()).map(|m| m.len()).sum();
        }
        Part::Generator => {
            let opened = checkpoint.open_generator()?;
            report.fill(&opened.files);
            report.naming = Some(opened.naming.name());
            report.prefix.clone_from(&opened.prefix);
            if let Some(wan) = wan {
                opened.files.resolve(&list_expected(wan))?;
            }
        }
        Part::Vae | Part::TinyDecoder | Part::TextEncoder => report.fill(&checkpoint.open_files(part)?),
    }
    Ok(report)
}

impl PartReport {
    /// Creates a report on a part of which nothing was read yet.
    fn new(part: Part, source: &Path) -> PartReport {
        PartReport {
            part: part.name(),
            source: source.display().to_string(),
            form: "files",
            files: 0,
            bytes: 0,
            tensors: 0,
            dtypes: BTreeMap::new(),
            prefix: String::new(),
            naming: None,
        }
    }

    fn fill(&mut self, files: &WeightFiles) {
        let names = files.list_files();
        self.form =
            if names.iter().all(|name| name.ends_with(".safetensors")) { "safetensors" } else { "PyTorch" };
        self.files = names.len();
        self.bytes = files.total_bytes().0;
        for tensor in files.iter_tensors() {
            self.tensors += 1;
            *self.dtypes.entry(tensor.dtype.to_string()).or_insert(0) += 1;
        }
    }
}

fn serialize_problems<S: serde::Serializer>(problems: &Diagnostics, s: S) -> Result<S::Ok, S::Error> {
    s.collect_seq(problems.iter().map(
        |d| serde_json::json!({ "code": d.code.id, "message": d.message, "hint": d.hint, "notes": d.notes }),
    ))
}
