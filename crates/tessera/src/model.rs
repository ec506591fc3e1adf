//! A model: its config and stream settings, its weights and its text encoder.

use std::ops::Range;
use std::path::{Path, PathBuf};
use std::thread::JoinHandle;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_device::dtype::{divide_by_row_scales, row_scales};
use tessera_device::{MeshRank, WeightSource};
use tessera_ir::Type;
use tessera_models::{
    DecoderQuality, PixelDecoder, Preset, StreamConfig, TextEncoder, Umt5Config, VideoModel, WanConfig,
};
use tessera_plan::Mapping;
use tessera_weights::{Lora, WeightFiles, WeightSet};

use crate::checkpoint::{CheckpointFolder, Form, Part, list_expected, tiny_decoder};
use crate::codes::{T0010, T0041, T0076};
use crate::files::read_text_file;
use crate::plan::{Plan, plan_model};
use crate::plan_folder::folder_name;
use crate::text_encoder::{PromptEncoder, TextFiles};
use crate::vae_weights::{VaeWeights, move_channels_last};
use crate::weights_origin::{LoraFile, WeightsBase, WeightsOrigin};

/// The configs of a model and the folder that holds its files; weights are opened separately.
#[derive(Debug, Clone)]
pub struct Model {
    /// Name for display: that of the folder, or for [`Model::open_for_plan`] the one in the plan.
    pub name: String,
    /// Folder from which weights, text encoder and vocabulary are read, or the checkpoint itself.
    pub dir: PathBuf,
    /// Dimensions and stream settings with the overrides, or the configs of a sealed plan.
    pub video: VideoModel,
    /// Where its weights come from.
    pub weights: WeightsOrigin,
}

/// Settings that the command line can override.
#[derive(Debug, Clone, Default)]
pub struct Overrides {
    /// Cache regime instead of the streaming config's: recompute if true, resident if false.
    pub recompute: Option<bool>,
    /// Denoising timesteps that replace those of the streaming config.
    pub steps: Option<Vec<f64>>,
    /// Settings of a published model, below those of a stream config.
    pub preset: Option<Preset>,
    /// Stream config to read instead of the folder's own.
    pub stream_file: Option<PathBuf>,
    /// Whether calls carry the noise of a chunk's first step, instead of the streaming config's choice.
    pub given_noise: Option<bool>,
    /// Whether calls may begin with an input video, instead of the streaming config's choice.
    pub takes_video: Option<bool>,
    /// Scale of classifier-free guidance, instead of the streaming config's.
    pub guidance: Option<f64>,
    /// Negative prompt of the guidance, instead of the streaming config's.
    pub negative_prompt: Option<String>,
    /// File with encoded prompts, instead of the model's own text encoder.
    pub text_embeddings: Option<PathBuf>,
    /// File of a tiny decoder, instead of the model's own decoder.
    pub decoder_file: Option<PathBuf>,
    /// How exactly the VAE decodes, instead of the streaming config's choice.
    pub decoder_quality: Option<DecoderQuality>,
}

impl Model {
    /// Reads the dimensions and the stream settings of a model folder, or of a checkpoint as it was
    /// published.
    ///
    /// # Errors
    /// Returns T0010, everything that is wrong with either config, T0072 for a model that was not
    /// distilled for streaming, T0076 without stream settings, or why the generator cannot be read.
    pub fn open(dir: &Path, overrides: &Overrides) -> Result<Model, Diagnostics> {
        let checkpoint = CheckpointFolder::recognise(dir).map_err(|d| vec![d])?;
        // A stream config that the user names says that the weights are causal.
        if overrides.stream_file.is_none() {
            checkpoint.require_causal().map_err(|d| vec![d])?;
        }
        let (at, text) = read_stream_text(&checkpoint, overrides).map_err(|d| vec![d])?;
        let wan = checkpoint.read_wan_config()?;
        let vae = checkpoint.read_vae_config().map_err(|d| vec![d])?;
        let vae = vae.as_ref().map(|(file, text)| (file.as_str(), text.as_str()));
        let stream = StreamConfig::parse_over(&at, &text, overrides.preset, vae, &wan)?;
        let mut video = VideoModel { wan, stream, text_encoder: None };
        if let Some(recompute) = overrides.recompute {
            video.stream.recompute = recompute;
        }
        if let Some(given) = overrides.given_noise {
            video.stream.given_noise = given;
        }
        if let Some(takes) = overrides.takes_video {
            video.stream.takes_video = takes;
        }
        if let Some(quality) = overrides.decoder_quality {
            video.stream.decoder_quality = quality;
        }
        if let Some(steps) = &overrides.steps {
            video.stream.set_steps(steps.clone());
        }
        let negative = overrides.negative_prompt.as_deref();
        video.stream.set_guidance(overrides.guidance, negative).map_err(|d| vec![d])?;
        if let Some(file) = &overrides.text_embeddings {
            // The path is relative to the working folder here, and to the model's folder in the settings.
            let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            video.stream.text = TextEncoder::File;
            video.stream.text_file = path.display().to_string();
        }
        if let Some(file) = &overrides.decoder_file {
            let path = std::path::absolute(file).unwrap_or_else(|_| file.clone());
            video.stream.decoder = PixelDecoder::Tiny;
            video.stream.decoder_file = path.display().to_string();
        }
        if video.stream.decoder == PixelDecoder::Tiny {
            // Without the file, the model is planned for the published decoder, and a stream is refused.
            let checkpoint = checkpoint.clone().with_decoder(&video.stream.decoder_file);
            if let Some(found) = checkpoint.part(Part::TinyDecoder) {
                video.stream.tiny = tiny_decoder::read_config(&found.source, video.wan.channels)?;
            }
        }
        if video.stream.text == TextEncoder::Umt5 {
            // Planning needs no files: a checkpoint without the encoder is planned for the one that Wan has,
            // and a stream is refused when it opens it.
            let (file, config) = match TextFiles::find(&checkpoint) {
                Ok(files) => files.read_config()?,
                Err(_) => (dir.display().to_string(), Umt5Config::xxl()),
            };
            video.set_text_encoder(&file, config)?;
        }
        let ds = video.stream.find_contradictions("command line", &video.wan);
        if !ds.is_empty() {
            return Err(ds);
        }
        let name = folder_name(dir);
        Ok(Model { name, dir: dir.to_path_buf(), video, weights: WeightsOrigin::default() })
    }

    /// Opens a model folder, and plans and seals the model under a mapping.
    ///
    /// # Errors
    /// As [`Model::open`] and [`plan_model`].
    pub fn open_and_plan(
        dir: &Path,
        overrides: &Overrides,
        mapping: &Mapping,
    ) -> Result<(Model, Plan), Diagnostics> {
        let model = Model::open(dir, overrides)?;
        let plan = plan_model(&model.video, &model.name, &dir.display().to_string(), mapping)?;
        Ok((model, plan))
    }

    /// Opens a model folder with the settings of a sealed plan; the folder only provides the files.
    ///
    /// # Errors
    /// Returns T0010 if the folder does not exist.
    pub fn open_for_plan(dir: &Path, plan: &Plan) -> Result<Model, Diagnostic> {
        require_path(dir)?;
        Ok(Model::from_plan(dir, plan))
    }

    /// Returns the model of a sealed plan, for a caller that may read none of its files.
    #[must_use]
    pub fn from_plan(dir: &Path, plan: &Plan) -> Model {
        let (name, video) = (plan.model.clone(), plan.video.clone());
        Model { name, dir: dir.to_path_buf(), video, weights: WeightsOrigin::default() }
    }

    /// Returns the model with weights of another origin.
    #[must_use]
    pub fn with_weights(self, weights: WeightsOrigin) -> Model {
        Model { weights, ..self }
    }

    /// Opens the weights and compares them with what the config requires.
    ///
    /// # Errors
    /// Returns one diagnostic that lists every missing, extra or misshapen tensor, or the reason
    /// why the files cannot be read.
    pub fn open_weights(&self) -> Result<Weights, Diagnostics> {
        let expected = list_expected(&self.video.wan);
        let mut set = match self.weights.base {
            WeightsBase::Files => {
                let checkpoint = CheckpointFolder::recognise(&self.dir).map_err(|d| vec![d])?;
                checkpoint.open_part(Part::Generator, &expected)?
            }
            WeightsBase::Synthetic(seed) => WeightSet::synthetic(seed, &expected),
        };
        for lora in &self.weights.loras {
            set.add_lora(Lora::open(&lora.path, &expected, lora.strength)?);
        }
        Ok(Weights { set, wan: self.video.wan.clone() })
    }

    /// Starts to digest all weights on a thread of its own, while the caller prepares the run.
    #[must_use]
    pub(crate) fn start_digest(&self) -> WeightDigest {
        let model = self.clone();
        WeightDigest { model: self.clone(), thread: std::thread::spawn(move || model.content_digest()) }
    }

    /// Returns the digest of all weights, 64 hex digits. It depends on the checkpoint alone, and not
    /// on the mesh or on the naming style or sharding of the files.
    ///
    /// # Errors
    /// Returns why the weights cannot be opened, or T0041 if the plan pins other weights.
    pub fn digest_weights(&self, plan: &Plan) -> Result<String, Diagnostics> {
        self.check_pin(plan, self.content_digest()?)
    }

    /// Names the origin of the weights for a reader.
    fn weights_text(&self) -> String {
        let base = match self.weights.base {
            WeightsBase::Files => self.dir.display().to_string(),
            WeightsBase::Synthetic(seed) => format!("synthetic:{seed}"),
        };
        let lora = |lora: &LoraFile| format!(" with {} at strength {}", lora.path.display(), lora.strength);
        base + &self.weights.loras.iter().map(lora).collect::<String>()
    }

    /// Returns the digest if the plan pins no other one, and T0041 otherwise.
    fn check_pin(&self, plan: &Plan, digest: String) -> Result<String, Diagnostics> {
        match &plan.mapping.weights {
            Some(pinned) if *pinned != digest => Err(vec![
                Diagnostic::error(&T0041, "the weights differ from those that the plan pins")
                    .with_label("the plan", format!("pins weights with digest {pinned}"))
                    .with_label(self.weights_text(), format!("holds weights with digest {digest}"))
                    .with_hint("use the weights for which the plan was made, or plan again"),
            ]),
            _ => Ok(digest),
        }
    }

    /// Plans again with the digest of this model's weights in the seal, so that the plan runs with
    /// these weights alone.
    ///
    /// # Errors
    /// Returns why the weights cannot be opened.
    pub fn pin_weights(&self, plan: &Plan) -> Result<Plan, Diagnostics> {
        let weights = Some(self.content_digest()?);
        let mapping = Mapping { weights, ..plan.mapping.clone() };
        plan_model(&self.video, &plan.model, &plan.model_dir, &mapping)
    }

    /// Returns the digest of the generator's weights, combined with those of the text encoder's weights, of
    /// its tokenizer and of the VAE if the model has them.
    fn content_digest(&self) -> Result<String, Diagnostics> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let mut digest = self.open_weights()?.set.content_digest(threads);
        let mut parts = vec![digest];
        parts.extend(PromptEncoder::digest_files(&self.dir, &self.video, self.weights.base, threads)?);
        if parts.len() > 1 {
            digest = *blake3::hash(parts.as_flattened()).as_bytes();
        }
        if let Some(vae) = self.open_vae_weights()? {
            digest = *blake3::hash([digest, vae.content_digest(threads)].as_flattened()).as_bytes();
        }
        Ok(blake3::Hash::from(digest).to_hex().to_string())
    }

    /// Opens the weights of the VAE or of the tiny decoder; `None` if the model has neither.
    pub(crate) fn open_vae_weights(&self) -> Result<Option<VaeWeights>, Diagnostics> {
        let VideoModel { wan, stream, .. } = &self.video;
        let open = || VaeWeights::open(&self.dir, wan, stream, self.weights.base);
        stream.decoder.is_causal().then(open).transpose()
    }

    /// Opens the weights of one file under the file's own tensor names; the set may be partial.
    pub fn open_partial_weights(&self, file: &str) -> Result<Weights, Diagnostics> {
        let set = WeightFiles::open_file(&self.dir.join(file)).map_err(|d| vec![d])?.resolve_as_is()?;
        Ok(Weights { set, wan: self.video.wan.clone() })
    }

    /// Opens the text encoder. With synthetic weights, every word of a prompt has a seeded row, so
    /// that models without an encoder of their own run too.
    ///
    /// # Errors
    /// Returns T0016 if the model has none, or what is wrong with its files.
    pub fn open_text_encoder(&self) -> Result<PromptEncoder, Diagnostics> {
        PromptEncoder::open(&self.name, &self.dir, &self.video, self.weights.base)
    }
}

/// A digest of all weights that a thread computes. A caller that drops it does not wait.
pub(crate) struct WeightDigest {
    model: Model,
    thread: JoinHandle<Result<String, Diagnostics>>,
}

impl WeightDigest {
    /// Waits for the digest.
    ///
    /// # Errors
    /// As [`Model::digest_weights`].
    pub(crate) fn finish(self, plan: &Plan) -> Result<String, Diagnostics> {
        let digest = self.thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        self.model.check_pin(plan, digest)
    }
}

/// Returns the name and the text of the stream config. The text is empty if a preset alone gives the
/// settings.
fn read_stream_text(
    checkpoint: &CheckpointFolder,
    overrides: &Overrides,
) -> Result<(String, String), Diagnostic> {
    let own = checkpoint.stream.as_ref().filter(|_| overrides.preset.is_none());
    let path = match (overrides.stream_file.as_ref().or(own), overrides.preset) {
        (Some(path), _) => path,
        (None, Some(preset)) => return Ok((format!("the preset {}", preset.name()), String::new())),
        (None, None) => return Err(no_stream_settings(checkpoint)),
    };
    read_text_file(path)
        .map(|text| (path.display().to_string(), text))
        .map_err(|e| Diagnostic::error(&T0010, format!("{} cannot be read: {e}", path.display())))
}

fn no_stream_settings(checkpoint: &CheckpointFolder) -> Diagnostic {
    let at = checkpoint.path.display().to_string();
    if checkpoint.form == Form::Unknown {
        return Diagnostic::error(
            &T0010,
            format!("{at} is no model: it has neither config.json nor weights"),
        )
        .with_hint("give the path of a model folder or of a checkpoint, for example models/demo");
    }
    Diagnostic::error(&T0076, format!("{} does not say how it is streamed", checkpoint.form.description()))
        .with_label(&at, "no stream.toml")
        .with_hint(format!("add --preset NAME; `tessera models inspect {at}` shows the presets that fit"))
}

fn require_path(dir: &Path) -> Result<(), Diagnostic> {
    if dir.exists() {
        return Ok(());
    }
    Err(Diagnostic::error(&T0010, format!("folder {} does not exist", dir.display()))
        .with_hint("give the path of a model folder, for example models/demo"))
}

/// The weights of a model, read slice by slice.
#[derive(Debug, Clone)]
pub struct Weights {
    set: WeightSet,
    wan: WanConfig,
}

impl Weights {
    /// Returns a digest of names, dtypes, shapes and both ends of every tensor's data. The digest
    /// is equal for both naming schemes of one checkpoint and differs between checkpoints of the
    /// same shapes.
    #[must_use]
    pub fn sample_digest(&self) -> [u8; 32] {
        self.set.sample_digest()
    }

    /// Iterates over the digests of the LoRAs with their strengths, in the order of their addition.
    pub(crate) fn lora_digests(&self) -> impl Iterator<Item = [u8; 32]> {
        self.set.lora_digests()
    }

    /// Checks that other weights have the same names, dtypes and shapes.
    ///
    /// # Errors
    /// Returns T0506 with every difference.
    pub fn check_compatible(&self, other: &Weights) -> Result<(), Diagnostic> {
        self.set.check_replaceable_by(&other.set)
    }

    /// Reads all elements of a tensor as f32, in row-major order.
    pub fn read_tensor(&self, name: &str) -> Result<Vec<f32>, Diagnostic> {
        self.set.read_whole_f32(name)
    }

    /// Returns the ranges of the stored tensor that a shard covers.
    fn slice_ranges(
        &self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        mesh_rank: &MeshRank,
    ) -> Vec<Range<u64>> {
        let dims = ty.layout.global_ranges(&ty.shape, &mesh_rank.mesh, mesh_rank.coord());
        let ranges = dims.into_iter().map(|(start, len)| start..start + len);
        match load {
            Some("patch") => {
                let [ph, pw] = self.wan.patch;
                ranges.take(1).chain([0..self.wan.channels, 0..1, 0..ph, 0..pw]).collect()
            }
            // FP8 scales are per row, so whole rows are read whichever columns the shard has.
            Some("e4m3" | "e4m3.scale") => {
                let columns = self.set.tensor_shape(name).and_then(|s| s.get(1)).copied();
                ranges.take(1).chain(columns.map(|n| 0..n)).collect()
            }
            _ => ranges.collect(),
        }
    }
}

impl WeightSource for Weights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        mesh_rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        let mut raw = self.set.read_f32(name, &self.slice_ranges(name, ty, load, mesh_rank))?;
        let width = || self.set.tensor_shape(name).and_then(|s| s.get(1)).map_or(1, |n| *n as usize);
        Ok(match load {
            Some("e4m3") => {
                divide_by_row_scales(&mut raw, width());
                select_columns(raw, width(), ty, mesh_rank)
            }
            Some("e4m3.scale") => row_scales(&raw, width()),
            Some("patch") => {
                let [ph, pw] = self.wan.patch;
                move_channels_last(&raw, self.wan.channels as usize, (ph * pw) as usize)
            }
            _ => raw,
        })
    }

    fn check(
        &mut self,
        name: &str,
        ty: &Type,
        load: Option<&str>,
        mesh_rank: &MeshRank,
    ) -> Result<(), Diagnostic> {
        self.set.check(name, &self.slice_ranges(name, ty, load, mesh_rank))
    }

    fn check_finite(&mut self, name: &str) -> Result<(), Diagnostic> {
        self.set.check_finite(name)
    }
}

/// Selects the columns of a shard from whole rows.
pub(crate) fn select_columns(rows: Vec<f32>, width: usize, ty: &Type, mesh_rank: &MeshRank) -> Vec<f32> {
    let column_range = ty.layout.global_ranges(&ty.shape, &mesh_rank.mesh, mesh_rank.coord()).get(1).copied();
    match column_range.map(|(start, len)| start as usize..(start + len) as usize) {
        Some(column_range) if column_range.len() < width && column_range.end <= width => {
            rows.chunks_exact(width).flat_map(|row| &row[column_range.clone()]).copied().collect()
        }
        _ => rows,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_folder_is_named() {
        let ds = Model::open(Path::new("/nowhere/at/all"), &Overrides::default()).unwrap_err();
        assert_eq!(ds[0].code.id, "T0010");
        assert!(ds[0].message.contains("/nowhere/at/all"));
    }

    #[test]
    fn fp8_scales_come_from_whole_rows() {
        use tessera_device::dtype::row_scale;
        use tessera_ir::DType;
        use tessera_mesh::{Axis, AxisLayout, Rank, Shard};
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/wan-odd");
        let model = Model::open(&dir, &Overrides::default()).unwrap();
        let mut weights = model.open_weights().unwrap();
        let name = "blocks.0.ffn.0.weight";
        let [m, k] = weights.set.tensor_shape(name).unwrap()[..] else { panic!("a matrix") };
        let all = weights.set.read_whole_f32(name).unwrap();
        let mesh: tessera_mesh::Mesh = "tp=2".parse().unwrap();
        for rank in [0, 1] {
            let mesh_rank = MeshRank { mesh, rank: Rank(rank) };
            for dim in [0, 1] {
                let shard = AxisLayout::Shard(Shard::new(dim, [m, k][dim], 1, 2).unwrap());
                let mut shape = [m, k];
                shape[dim] /= 2;
                let ty = Type::new(DType::E4m3, shape).with_axis_layout(Axis::Tp, shard);
                let piece = ty.layout.global_ranges(&ty.shape, &mesh, mesh_rank.coord());
                let [rows, columns] = [0, 1].map(|d| piece[d].0 as usize..(piece[d].0 + piece[d].1) as usize);
                let found = weights.read(name, &ty, Some("e4m3"), &mesh_rank).unwrap();
                let row = |i: usize| &all[i * k as usize..][..k as usize];
                let expected: Vec<f32> = rows
                    .clone()
                    .flat_map(|i| row(i)[columns.clone()].iter().map(move |x| x / row_scale(row(i))))
                    .collect();
                assert_eq!(found, expected, "dim {dim} of rank {rank}");
                weights.check(name, &ty, Some("e4m3"), &mesh_rank).unwrap();
                if dim == 0 {
                    let ty = Type::new(DType::F32, [m / 2]).with_axis_layout(Axis::Tp, shard);
                    let scales = weights.read(name, &ty, Some("e4m3.scale"), &mesh_rank).unwrap();
                    assert_eq!(scales, rows.map(|i| row_scale(row(i))).collect::<Vec<_>>());
                }
            }
        }
    }

    #[test]
    fn patch_weights_become_channel_fastest() {
        let raw: Vec<f32> = (0..12).map(|i| i as f32).collect();
        assert_eq!(move_channels_last(&raw, 3, 4)[..6], [0.0, 4.0, 8.0, 1.0, 5.0, 9.0]);
    }
}
