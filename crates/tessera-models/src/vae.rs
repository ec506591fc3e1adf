//! The causal VAE of the Wan family, and the tiny decoder of its latents: their dimensions, the programs that
//! the leader or the ranks run, and the names of their tensors.

mod encode_graph;
mod graph;
mod names;
mod tiny;
mod tiny_graph;

use tessera_base::config::{ConfigReader, parse_json};
use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T0414;

pub use encode_graph::{VIDEO_DEVICE_PHASES, VIDEO_PHASES};
pub(crate) use encode_graph::{encode_anchor_program, encode_video_programs};
pub(crate) use graph::decode_programs;
pub use graph::{EXACT_DECODE_PHASE, EXACT_PIXELS, MediaPhases};
pub use names::expected_vae_weights;
pub use tiny::{TinyDecoderConfig, expected_tiny_weights};
pub(crate) use tiny_graph::tiny_decode_programs;

/// Dimensions of a VAE. Source: `[decoder.vae]` of `stream.toml`, or a diffusers `vae/config.json`.
#[derive(Debug, Clone, PartialEq)]
pub struct VaeConfig {
    /// Channels of the level with the most rows and columns.
    pub base_dim: u64,
    /// Channels of a latent.
    pub z_dim: u64,
    /// Channels of each level as a multiple of `base_dim`, from pixels to latents. Each level but the
    /// last halves rows and columns.
    pub dim_mult: Vec<u64>,
    /// Residual blocks of each level of the encoder; the decoder has one more.
    pub res_blocks: u64,
    /// For each level but the last, from pixels to latents: whether it also halves the frames.
    pub temporal_downsample: Vec<bool>,
    /// Mean of each latent channel; the generator works on (z − mean) / std.
    pub latents_mean: Vec<f64>,
    /// Standard deviation of each latent channel.
    pub latents_std: Vec<f64>,
}

impl Default for VaeConfig {
    /// The VAE of Wan2.1.
    fn default() -> VaeConfig {
        VaeConfig {
            base_dim: 96,
            z_dim: 16,
            dim_mult: vec![1, 2, 4, 4],
            res_blocks: 2,
            temporal_downsample: vec![false, true, true],
            latents_mean: vec![
                -0.7571, -0.7089, -0.9113, 0.1075, -0.1745, 0.9653, -0.1517, 1.5508, 0.4134, -0.0715, 0.5517,
                -0.3632, -0.1922, -0.9497, 0.2503, -0.2921,
            ],
            latents_std: vec![
                2.8184, 1.4541, 2.3275, 2.6558, 1.2196, 1.7708, 2.6052, 2.0743, 3.2687, 2.1526, 2.8652,
                1.5579, 1.6382, 1.1253, 2.8251, 1.9160,
            ],
        }
    }
}

/// Maximum levels of a VAE; more would leave no row of a picture.
const LEVELS_MAX: usize = 8;
/// Maximum channels, and maximum residual blocks of a level. A larger number is a typo.
const CHANNELS_MAX: u64 = 1 << 16;
const BLOCKS_MAX: u64 = 64;

impl VaeConfig {
    /// Parses a diffusers `vae/config.json`; the file name appears only in diagnostics.
    ///
    /// # Errors
    /// One diagnostic per problem: T0414 if the file describes another VAE.
    pub fn parse(file: &str, text: &str) -> Result<VaeConfig, Diagnostics> {
        let mut table = ConfigReader::new(file, "", parse_json(file, text)?);
        table.ignore_keys(&IGNORED_KEYS);
        // The second key is spelled so in the published files.
        let config = VaeConfig::read_keys(&mut table, "num_res_blocks", "temperal_downsample");
        let variant = describe_variant(&mut table, config.base_dim).map(|found| {
            Diagnostic::error(&T0414, format!("the config is not that of a Wan2.1 VAE: {found}"))
                .with_label(file, "another VAE")
                .with_hint("use the VAE that was published with the generator")
        });
        // Other keys of another VAE are unknown, too, and say less.
        let ds = variant.map_or_else(|| table.finish(), |d| vec![d]);
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }

    /// Reads `[decoder.vae]`, in which every key is optional.
    pub(crate) fn read(mut table: ConfigReader<'_>, ds: &mut Diagnostics) -> VaeConfig {
        let config = VaeConfig::read_keys(&mut table, "res_blocks", "temporal_downsample");
        ds.extend(table.finish());
        config
    }

    /// Reads the keys of a config, each optional. Two of them have other names in published files.
    fn read_keys(
        table: &mut ConfigReader<'_>,
        res_blocks: &'static str,
        temporal_downsample: &'static str,
    ) -> VaeConfig {
        let wan = VaeConfig::default();
        let mult: Vec<f64> = wan.dim_mult.iter().map(|m| *m as f64).collect();
        VaeConfig {
            base_dim: table.read_count("base_dim", Some(wan.base_dim)),
            z_dim: table.read_count("z_dim", Some(wan.z_dim)),
            // A factor that is no count becomes 0, which `describe_problem` rejects.
            dim_mult: table.read_numbers("dim_mult", &mult).into_iter().map(to_count).collect(),
            res_blocks: table.read_count(res_blocks, Some(wan.res_blocks)),
            temporal_downsample: table.read_flags(temporal_downsample, &wan.temporal_downsample),
            latents_mean: table.read_numbers("latents_mean", &wan.latents_mean),
            latents_std: table.read_numbers("latents_std", &wan.latents_std),
        }
    }

    /// Renders the settings as `[decoder.vae]` with every key, in a fixed order.
    pub(crate) fn to_toml(&self) -> String {
        format!(
            "\n[decoder.vae]\nbase_dim = {}\nz_dim = {}\ndim_mult = {:?}\nres_blocks = {}\ntemporal_downsample = {:?}\n\
latents_mean = {:?}\nlatents_std = {:?}\n",
            self.base_dim,
            self.z_dim,
            self.dim_mult,
            self.res_blocks,
            self.temporal_downsample,
            self.latents_mean,
            self.latents_std,
        )
    }

    /// Describes why no VAE has these dimensions, or why it does not fit latents of this stride and
    /// number of channels.
    pub(crate) fn describe_problem(&self, stride: [u64; 3], channels: u64) -> Option<String> {
        let (levels, z) = (self.dim_mult.len(), self.z_dim as usize);
        let in_range = |n: u64, max: u64| (1..=max).contains(&n);
        let widths_fit = self.dim_mult.iter().all(|m| {
            *m > 0 && self.base_dim.checked_mul(*m).is_some_and(|c| c <= CHANNELS_MAX && c.is_multiple_of(2))
        });
        if !(2..=LEVELS_MAX).contains(&levels) || !widths_fit || !in_range(self.res_blocks, BLOCKS_MAX) {
            return Some(format!(
                "decoder.vae: {levels} levels of base_dim {} times dim_mult {:?} with {} res_blocks: expected 2 to \
                 {LEVELS_MAX} levels of an even number of channels up to {CHANNELS_MAX}, and 1 to {BLOCKS_MAX} blocks",
                self.base_dim, self.dim_mult, self.res_blocks
            ));
        }
        if self.temporal_downsample.len() + 1 != levels {
            return Some(format!(
                "decoder.vae: temporal_downsample has {} entries, but {levels} levels have {} transitions",
                self.temporal_downsample.len(),
                levels - 1
            ));
        }
        if self.latents_mean.len() != z || self.latents_std.len() != z || self.latents_std.contains(&0.0) {
            return Some(format!(
                "decoder.vae: {} latents_mean and {} latents_std, without zeros, for {z} channels",
                self.latents_mean.len(),
                self.latents_std.len()
            ));
        }
        if self.z_dim != channels {
            return Some(format!("the VAE has {z} latent channels, the generator {channels}"));
        }
        let found = self.stride();
        (found != stride)
            .then(|| format!("the VAE has a stride of {found:?}, but latent.stride is {stride:?}"))
    }

    /// Returns the pixels per latent cell: frames, rows, columns. The first latent frame of a scene is one
    /// pixel frame.
    #[must_use]
    pub fn stride(&self) -> [u64; 3] {
        let space = 1 << (self.dim_mult.len() - 1);
        [1 << self.temporal_downsample.iter().filter(|t| **t).count(), space, space]
    }

    /// Returns the channels of each level, from pixels to latents.
    fn widths(&self) -> Vec<u64> {
        self.dim_mult.iter().map(|m| m * self.base_dim).collect()
    }
}

/// Keys of a diffusers config that do not change what the VAE computes.
const IGNORED_KEYS: [&str; 5] =
    ["_diffusers_version", "_name_or_path", "dropout", "scale_factor_spatial", "scale_factor_temporal"];

/// Keys of a diffusers config that select another VAE, with the values as JSON that the programs compute.
const VARIANTS: [(&str, &[&str]); 7] = [
    ("_class_name", &["\"AutoencoderKLWan\""]),
    ("is_residual", &["false"]),
    ("patch_size", &["null", "1"]),
    ("in_channels", &["3"]),
    ("out_channels", &["3"]),
    ("attn_scales", &["[]"]),
    ("clip_output", &["true"]),
];

/// Describes the first key by which a config differs from the VAE that the programs compute.
fn describe_variant(table: &mut ConfigReader<'_>, base_dim: u64) -> Option<String> {
    let found: Vec<Option<String>> = VARIANTS
        .iter()
        .map(|(key, accepted)| {
            let value = table.take_value(key)?.to_string();
            (!accepted.contains(&value.as_str()))
                .then(|| format!("{key} is {value}, expected {}", accepted.join(" or ")))
        })
        .collect();
    let decoder = table.take_value("decoder_base_dim").map(|v| v.to_string());
    let decoder = decoder
        .filter(|d| d != "null" && *d != base_dim.to_string())
        .map(|d| format!("decoder_base_dim is {d}, expected {base_dim}, the base_dim of the encoder"));
    found.into_iter().flatten().next().or(decoder)
}

fn to_count(x: f64) -> u64 {
    if x.fract() == 0.0 && (1.0..=CHANNELS_MAX as f64).contains(&x) { x as u64 } else { 0 }
}
