//! The tiny decoder of Wan2.1's latents (TAEHV, published as `taew2_1`): its dimensions, which its own
//! tensors state, and their names.
//!
//! It decodes the generator's normalised latents. Three stages of blocks that read one past frame each
//! double rows and columns, and some of them multiply the frames.

use std::collections::BTreeMap;

use tessera_base::config::ConfigReader;
use tessera_base::{Diagnostic, Diagnostics};

use super::CHANNELS_MAX;
use crate::ExpectedWeight;
use crate::codes::T0415;

/// Stages of the decoder, each of which doubles rows and columns.
pub(super) const STAGES: usize = 3;

/// Blocks with a memory at the beginning of each stage.
pub(super) const MEMORY_BLOCKS: usize = 3;

/// Positions in the published list of layers: the first convolution, the first layer of the first stage,
/// and the last convolution. Clamps, activations and the doubling of rows have positions and no tensors.
pub(super) const FIRST_CONV: usize = 1;
const FIRST_STAGE: usize = 3;
const STAGE_LAYERS: usize = 6;
pub(super) const LAST_CONV: usize = 22;

/// Maximum frames that a stage makes of one. A larger number is a typo.
const FRAMES_MAX: u64 = 8;

/// Prefix of the decoder's tensors in a file, and in a program.
const FILE_PREFIX: &str = "decoder.";
pub(super) const PROGRAM_PREFIX: &str = "tiny.";

/// Dimensions of a tiny decoder. Source: the shapes of its tensors, or `[decoder.tiny]` of `stream.toml`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TinyDecoderConfig {
    /// Channels of each stage, from latents to pixels, and behind the last one.
    pub widths: Vec<u64>,
    /// Frames that each stage makes of one.
    pub frames: Vec<u64>,
}

impl Default for TinyDecoderConfig {
    /// The published decoder.
    fn default() -> TinyDecoderConfig {
        TinyDecoderConfig { widths: vec![256, 128, 64, 64], frames: vec![1, 2, 2] }
    }
}

impl TinyDecoderConfig {
    /// Returns whether tensors with these names are those of a decoder of this family, of whichever model.
    pub fn is_described_by<'a>(names: impl Iterator<Item = &'a str>) -> bool {
        let marks = [format!("{FILE_PREFIX}3.conv.0.weight"), format!("{FILE_PREFIX}7.conv.weight")];
        names.filter(|name| marks.iter().any(|mark| mark == name)).count() == marks.len()
    }

    /// Reads the dimensions from the shapes of a file's tensors; the file name appears only in diagnostics.
    /// `channels` are those of the generator's latents.
    ///
    /// # Errors
    /// T0415 if the tensors are not those of a tiny decoder of such latents.
    pub fn from_shapes(
        file: &str,
        shapes: &BTreeMap<&str, &[u64]>,
        channels: u64,
    ) -> Result<TinyDecoderConfig, Diagnostic> {
        let refuse = |what: String| {
            Diagnostic::error(&T0415, "the file holds no tiny decoder of this model's latents")
                .with_label(file, what)
                .with_hint("use taew2_1.pth or taew2_1.safetensors, the tiny decoder of Wan2.1")
        };
        let shape_of = |name: &str| {
            let name = format!("{FILE_PREFIX}{name}");
            match shapes.get(name.as_str()) {
                Some([out, from, _, _]) => Ok([*out, *from]),
                Some(shape) => Err(refuse(format!("{name} has the shape {shape:?}, expected 4 dims"))),
                None => Err(refuse(format!("it has no tensor {name}"))),
            }
        };
        let [first, found] = shape_of(&format!("{FIRST_CONV}.weight"))?;
        if found != channels {
            let of = match found {
                32 => ", as those of HunyuanVideo 1.5",
                48 => ", as those of Wan2.2",
                128 => ", as those of LTX-Video",
                _ => "",
            };
            return Err(refuse(format!(
                "it decodes latents of {found} channels{of}; the generator has {channels}"
            )));
        }
        let (mut widths, mut frames) = (vec![first], Vec::new());
        for stage in 0..STAGES {
            let width = widths[stage];
            let [out, _] = shape_of(&format!("{}.conv.weight", growth_layer(stage)))?;
            if width == 0 || out == 0 || !out.is_multiple_of(width) {
                return Err(refuse(format!(
                    "stage {stage} makes {out} channels of {width}, which are no frames"
                )));
            }
            frames.push(out / width);
            widths.push(shape_of(&format!("{}.weight", stage_conv(stage)))?[0]);
        }
        let [colours, _] = shape_of(&format!("{LAST_CONV}.weight"))?;
        if colours != 3 {
            return Err(refuse(format!("its last layer has {colours} channels instead of the 3 of a pixel")));
        }
        Ok(TinyDecoderConfig { widths, frames })
    }

    /// Reads `[decoder.tiny]`, in which every key is optional.
    pub(crate) fn read(mut table: ConfigReader<'_>, ds: &mut Diagnostics) -> TinyDecoderConfig {
        let published = TinyDecoderConfig::default();
        let mut read = |key: &'static str, default: &[u64]| {
            let default: Vec<f64> = default.iter().map(|n| *n as f64).collect();
            table.read_numbers(key, &default).into_iter().map(super::to_count).collect()
        };
        let (widths, frames) = (read("widths", &published.widths), read("frames", &published.frames));
        ds.extend(table.finish());
        TinyDecoderConfig { widths, frames }
    }

    /// Renders the settings as `[decoder.tiny]` with every key, in a fixed order.
    pub(crate) fn to_toml(&self) -> String {
        format!("\n[decoder.tiny]\nwidths = {:?}\nframes = {:?}\n", self.widths, self.frames)
    }

    /// Describes why no decoder has these dimensions, or why it does not fit latents of this stride.
    pub(crate) fn describe_problem(&self, stride: [u64; 3]) -> Option<String> {
        let in_range = |n: &u64, max: u64| (1..=max).contains(n);
        let fit = self.widths.len() == STAGES + 1
            && self.frames.len() == STAGES
            && self.widths.iter().all(|n| in_range(n, CHANNELS_MAX))
            && self.frames.iter().all(|n| in_range(n, FRAMES_MAX));
        if !fit {
            return Some(format!(
                "decoder.tiny: widths {:?} and frames {:?}: expected {} widths up to {CHANNELS_MAX} and {STAGES} numbers \
                 of frames up to {FRAMES_MAX}",
                self.widths,
                self.frames,
                STAGES + 1
            ));
        }
        let found = self.stride();
        (found != stride)
            .then(|| format!("the tiny decoder has a stride of {found:?}, but latent.stride is {stride:?}"))
    }

    /// Returns the pixels per latent cell: frames, rows, columns.
    #[must_use]
    pub fn stride(&self) -> [u64; 3] {
        [self.frames.iter().product(), 1 << STAGES, 1 << STAGES]
    }
}

/// Returns the position of a block with a memory.
pub(super) fn memory_block(stage: usize, block: usize) -> usize {
    FIRST_STAGE + STAGE_LAYERS * stage + block
}

/// Returns the position of the layer that multiplies a stage's frames, behind that of the doubling of rows.
pub(super) fn growth_layer(stage: usize) -> usize {
    memory_block(stage, MEMORY_BLOCKS) + 1
}

/// Returns the position of the last convolution of a stage.
pub(super) fn stage_conv(stage: usize) -> usize {
    growth_layer(stage) + 1
}

/// Lists every tensor of a tiny decoder in a fixed order. In a program they have the published names after
/// `vae.tiny.`; the scale and the shift of its pixels are no tensors and not among them.
#[must_use]
pub fn expected_tiny_weights(c: &TinyDecoderConfig, channels: u64) -> Vec<ExpectedWeight> {
    let mut list = Vec::new();
    let mut push = |layer: String, shape: &[u64], has_bias: bool| {
        let mut push_tensor = |kind: &str, shape: &[u64]| {
            let published = format!("{FILE_PREFIX}{layer}.{kind}");
            let name = format!("vae.{PROGRAM_PREFIX}{published}");
            list.push(ExpectedWeight { name, diffusers_name: published, shape: shape.to_vec() });
        };
        push_tensor("weight", shape);
        if has_bias {
            push_tensor("bias", &shape[..1]);
        }
    };
    push(FIRST_CONV.to_string(), &[c.widths[0], channels, 3, 3], true);
    for stage in 0..STAGES {
        let (width, frames) = (c.widths[stage], c.frames[stage]);
        for block in 0..MEMORY_BLOCKS {
            let at = memory_block(stage, block);
            push(format!("{at}.conv.0"), &[width, 2 * width, 3, 3], true);
            push(format!("{at}.conv.2"), &[width, width, 3, 3], true);
            push(format!("{at}.conv.4"), &[width, width, 3, 3], true);
        }
        push(format!("{}.conv", growth_layer(stage)), &[frames * width, width, 1, 1], false);
        push(stage_conv(stage).to_string(), &[c.widths[stage + 1], width, 3, 3], false);
    }
    push(LAST_CONV.to_string(), &[3, c.widths[STAGES], 3, 3], true);
    list
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the shapes of a decoder's tensors by their names in a file.
    fn shapes_of(c: &TinyDecoderConfig, channels: u64) -> BTreeMap<String, Vec<u64>> {
        expected_tiny_weights(c, channels).into_iter().map(|w| (w.diffusers_name, w.shape)).collect()
    }

    fn recognise(shapes: &BTreeMap<String, Vec<u64>>) -> Result<TinyDecoderConfig, Diagnostic> {
        let shapes = shapes.iter().map(|(name, shape)| (name.as_str(), shape.as_slice())).collect();
        TinyDecoderConfig::from_shapes("f.pth", &shapes, 16)
    }

    #[test]
    fn dimensions_are_read_from_the_published_tensors_and_from_narrow_ones() {
        let narrow = TinyDecoderConfig { widths: vec![10, 6, 4, 8], frames: vec![2, 1, 2] };
        for c in [TinyDecoderConfig::default(), narrow] {
            let shapes = shapes_of(&c, 16);
            assert!(TinyDecoderConfig::is_described_by(shapes.keys().map(String::as_str)));
            assert_eq!(recognise(&shapes).unwrap(), c);
        }
        // Layers 0, 2, 6, 12, 18 and 21 of the published list have no tensors.
        let published = shapes_of(&TinyDecoderConfig::default(), 16);
        assert_eq!(published["decoder.13.conv.weight"], [256, 128, 1, 1]);
        assert_eq!(published["decoder.20.weight"], [64, 64, 3, 3]);
        assert!(!published.contains_key("decoder.20.bias") && published.contains_key("decoder.22.bias"));
        assert_eq!(published.len(), 64);
    }

    #[test]
    fn tensors_of_other_models_are_refused_with_what_differs() {
        let whole = shapes_of(&TinyDecoderConfig::default(), 16);
        let change = |name: &str, shape: &[u64]| {
            let mut shapes = whole.clone();
            shapes.insert(name.into(), shape.to_vec());
            recognise(&shapes).unwrap_err()
        };
        for (name, shape, says) in [
            ("decoder.1.weight", &[256, 48, 3, 3][..], "48 channels, as those of Wan2.2"),
            ("decoder.1.weight", &[256, 16, 1, 3, 3], "expected 4 dims"),
            ("decoder.13.conv.weight", &[192, 128, 1, 1], "makes 192 channels of 128"),
            ("decoder.22.weight", &[12, 64, 3, 3], "12 channels instead of the 3"),
        ] {
            let d = change(name, shape);
            assert!(d.code.id == "T0415" && d.labels[0].message.contains(says), "{says}: {d:#?}");
        }
        let mut short = whole.clone();
        short.remove("decoder.19.conv.weight");
        assert!(
            recognise(&short).unwrap_err().labels[0].message.contains("no tensor decoder.19.conv.weight")
        );
    }
}
