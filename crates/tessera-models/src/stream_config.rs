//! Stream settings of a model from `stream.toml`: picture, latent, cache regime, schedule, text
//! encoder and decoder.

mod contradictions;
mod guidance;
mod step_lists;

use std::collections::BTreeMap;

use tessera_base::Diagnostics;
use tessera_base::config::{ConfigReader, quote_toml};

use crate::WanConfig;
use crate::presets::{Preset, parse_over_preset};
use crate::vae::{TinyDecoderConfig, VaeConfig};
use crate::wan_config::STRIDE_MAX;

pub use guidance::Guidance;
pub use step_lists::{DEFAULT_STEP_LIST, denoising_steps};

/// The quantity that the model predicts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PredictionTarget {
    /// noise − x0; x0 = x − σ · flow.
    Flow,
    /// x0 itself, the denoised latent.
    X0,
}

/// The component that encodes a prompt as rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextEncoder {
    /// A table with one row per word.
    Words,
    /// A UMT5 encoder, which the leader runs as a sealed program.
    Umt5,
    /// A file with the rows of each prompt, which another program encoded.
    File,
    /// No text encoder: the model can be planned but not streamed.
    None,
}

/// The component that decodes latents to pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PixelDecoder {
    /// Depth to space and time: the channels of a latent cell are its pixels in another order.
    SpaceTimeDepth,
    /// The causal VAE of the Wan family, from the model's own weights.
    WanVae,
    /// A tiny decoder of the same latents, from a file of its own. It has no encoder: what encodes pixels is
    /// the causal VAE.
    Tiny,
    /// No decoder: a stream writes latents only.
    None,
}

/// How exactly a VAE's decoder computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DecoderQuality {
    /// The reference's values, within the rounding of the plan's dtype.
    #[default]
    Exact,
    /// Large convolutions in fp8. Every scene is compared with the exact decode of its first frame.
    Fast,
}

impl DecoderQuality {
    /// All values, in the order of `--help`.
    pub const ALL: [DecoderQuality; 2] = [DecoderQuality::Exact, DecoderQuality::Fast];

    /// Returns the name in `stream.toml` and on the command line.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            DecoderQuality::Exact => "exact",
            DecoderQuality::Fast => "fast",
        }
    }
}

impl TextEncoder {
    const ALL: [TextEncoder; 4] =
        [TextEncoder::Words, TextEncoder::Umt5, TextEncoder::File, TextEncoder::None];

    /// Returns the name in `stream.toml`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            TextEncoder::Words => "words",
            TextEncoder::Umt5 => "umt5",
            TextEncoder::File => "file",
            TextEncoder::None => "none",
        }
    }
}

impl PixelDecoder {
    const ALL: [PixelDecoder; 4] =
        [PixelDecoder::SpaceTimeDepth, PixelDecoder::WanVae, PixelDecoder::Tiny, PixelDecoder::None];

    /// Returns the name in `stream.toml`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            PixelDecoder::SpaceTimeDepth => "space_time_depth",
            PixelDecoder::WanVae => "wan_vae",
            PixelDecoder::Tiny => "tiny",
            PixelDecoder::None => "none",
        }
    }

    /// Returns whether frames are decoded in order, with a history: the first latent of a scene is then one
    /// pixel frame, and ranks can decode in calls.
    #[must_use]
    pub fn is_causal(self) -> bool {
        match self {
            PixelDecoder::WanVae | PixelDecoder::Tiny => true,
            PixelDecoder::SpaceTimeDepth | PixelDecoder::None => false,
        }
    }
}

/// Name of the file with encoded prompts if `stream.toml` names none.
const TEXT_FILE: &str = "text_embeddings.safetensors";

/// The settings of a stream. Source: `stream.toml` in the model's folder.
#[derive(Debug, Clone, PartialEq)]
pub struct StreamConfig {
    /// Picture width in pixels.
    pub width: u64,
    /// Picture height in pixels.
    pub height: u64,
    /// Playback rate in frames per second.
    pub fps: f64,
    /// Pixels per latent cell: frames, rows, columns.
    pub stride: [u64; 3],
    /// Latent frames per chunk.
    pub chunk_frames: u64,
    /// Latent frames that the KV cache can hold.
    pub window_frames: u64,
    /// First latent frames of a scene that stay in the window while the others slide through it.
    pub sink_frames: u64,
    /// RoPE positions after which those of the sliding frames move back behind the sink; 0 for all positions
    /// of the model's table.
    pub positions: u64,
    /// Whether a new prompt computes the keys and values of the cached frames again, except those of
    /// the sink.
    pub recache: bool,
    /// Whether the context is recomputed before each chunk (else it is resident).
    pub recompute: bool,
    /// Weight of past frames' keys in the recompute regime; 1 has no effect.
    pub bias: f64,
    /// Denoising timesteps as configured, before `shift` warps them if `warp` is set; the first one
    /// has σ = 1. A final 0 in the file is not among them: at σ = 0 the flow does not move x.
    pub steps: Vec<f64>,
    /// Further lists of denoising timesteps, by name, in the form of `steps`. A stream may change to each of them and
    /// back at a chunk boundary.
    pub step_lists: BTreeMap<String, Vec<f64>>,
    /// Shift s > 0 of the noise schedule: σ = s·u / (1 + (s − 1)·u) over u from 1 to 0.001.
    pub shift: f64,
    /// Whether the warp is on: a step t then takes timestep and σ from row 1000 − t of the noise
    /// schedule, instead of keeping t and taking the nearest σ.
    pub warp: bool,
    /// Whether the model predicts the flow, which `to_x0` converts, or x0 itself.
    pub prediction: PredictionTarget,
    /// Guidance of every prediction, for a model that was not distilled with one.
    pub guidance: Option<Guidance>,
    /// Whether a call carries the noise of its first denoising step. The later steps draw theirs.
    pub given_noise: bool,
    /// Whether the plan can encode an input video: only a causal VAE does.
    pub takes_video: bool,
    /// Component that turns a prompt into the rows that cross-attention reads.
    pub text: TextEncoder,
    /// File with the encoded prompts, relative to the model's folder. Only [`TextEncoder::File`]
    /// reads it.
    pub text_file: String,
    /// Component that turns latents into pixels, if the stream writes any.
    pub decoder: PixelDecoder,
    /// How exactly [`PixelDecoder::WanVae`] decodes.
    pub decoder_quality: DecoderQuality,
    /// File of the tiny decoder, relative to the model's folder, or empty for the one beside the checkpoint.
    /// Only [`PixelDecoder::Tiny`] reads it.
    pub decoder_file: String,
    /// Dimensions of the tiny decoder, which only [`PixelDecoder::Tiny`] uses.
    pub tiny: TinyDecoderConfig,
    /// Dimensions of the VAE, which [`PixelDecoder::WanVae`] uses, and [`PixelDecoder::Tiny`] for what it
    /// encodes.
    pub vae: VaeConfig,
}

impl StreamConfig {
    /// Parses `stream.toml` for a model.
    ///
    /// # Errors
    /// Returns one diagnostic per problem.
    pub fn parse(file: &str, text: &str, model: &WanConfig) -> Result<StreamConfig, Diagnostics> {
        StreamConfig::parse_over(file, text, None, None, model)
    }

    /// Parses `stream.toml` over a preset: keys that the text leaves out have the preset's values. A
    /// preset that the text names itself gives way to this one. If the decoder is a VAE, its own config
    /// `vae`, a file name and a text, replaces `[decoder.vae]`.
    ///
    /// # Errors
    /// Returns one diagnostic per problem.
    pub fn parse_over(
        file: &str,
        text: &str,
        preset: Option<Preset>,
        vae: Option<(&str, &str)>,
        model: &WanConfig,
    ) -> Result<StreamConfig, Diagnostics> {
        let mut root = ConfigReader::new(file, "", parse_over_preset(file, text, preset)?);
        let (mut video, mut latent, mut cache) =
            (root.read_table("video"), root.read_table("latent"), root.read_table("cache"));
        let (mut schedule, mut words, mut decoder) =
            (root.read_table("schedule"), root.read_table("text"), root.read_table("decoder"));
        let (mut noise, mut input) = (root.read_table("noise"), root.read_table("input"));
        let mut guidance = root.read_optional_table("guidance");
        let stride = latent.read_numbers("stride", &[4.0, 8.0, 8.0]);
        let mut config = StreamConfig {
            width: video.read_count("width", None),
            height: video.read_count("height", None),
            fps: video.read_number("fps", Some(16.0)),
            stride: match stride[..] {
                [t, h, w] if stride.iter().all(|s| (1.0..=STRIDE_MAX).contains(s) && s.fract() == 0.0) => {
                    [t as u64, h as u64, w as u64]
                }
                _ => [0, 0, 0],
            },
            chunk_frames: latent.read_count("chunk_frames", Some(3)),
            window_frames: cache.read_count("window_frames", Some(6)),
            sink_frames: cache.read_count_or_zero("sink", 0),
            positions: cache.read_count_or_zero("positions", 0),
            recache: cache.read_flag("recache", false),
            recompute: cache.read_choice("mode", &["resident", "recompute"], "resident") == "recompute",
            bias: cache.read_number("bias", Some(1.0)),
            steps: schedule.read_numbers("steps", &[1000.0, 750.0, 500.0, 250.0]),
            step_lists: schedule.read_named_numbers("lists"),
            shift: schedule.read_number("shift", Some(5.0)),
            warp: schedule.read_flag("warp", true),
            prediction: match schedule.read_choice("prediction", &["flow", "x0"], "flow") {
                "x0" => PredictionTarget::X0,
                _ => PredictionTarget::Flow,
            },
            guidance: guidance.as_mut().map(Guidance::read),
            given_noise: noise.read_choice("source", &["seed", "call"], "seed") == "call",
            takes_video: input.read_flag("video", false),
            text: words.read_named("encoder", &TextEncoder::ALL, TextEncoder::name, TextEncoder::None),
            text_file: words.read_text("file", Some(TEXT_FILE)),
            decoder: decoder.read_named("kind", &PixelDecoder::ALL, PixelDecoder::name, PixelDecoder::None),
            decoder_quality: decoder.read_named(
                "quality",
                &DecoderQuality::ALL,
                DecoderQuality::name,
                DecoderQuality::Exact,
            ),
            decoder_file: String::new(),
            tiny: TinyDecoderConfig::default(),
            vae: VaeConfig::default(),
        };
        let mut vae_problems = Vec::new();
        if config.decoder == PixelDecoder::Tiny {
            config.decoder_file = decoder.read_text("file", Some(""));
            config.tiny = TinyDecoderConfig::read(decoder.read_table("tiny"), &mut vae_problems);
        }
        if config.decoder.is_causal() {
            let stated = VaeConfig::read(decoder.read_table("vae"), &mut vae_problems);
            match vae.map_or(Ok(stated), |(file, text)| VaeConfig::parse(file, text)) {
                Ok(vae) => config.vae = vae,
                Err(ds) => vae_problems.extend(ds),
            }
        }
        let mut ds: Diagnostics = [root, video, latent, cache, schedule, noise, input, words, decoder]
            .into_iter()
            .chain(guidance)
            .flat_map(ConfigReader::finish)
            .chain(vae_problems)
            .collect();
        config.drop_final_zeros();
        if ds.is_empty() {
            ds = config.find_contradictions(file, model);
        }
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }

    /// Renders the settings as `stream.toml` with every key, in a fixed order.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let regime = if self.recompute { "recompute" } else { "resident" };
        let prediction = if self.prediction == PredictionTarget::X0 { "x0" } else { "flow" };
        let text = self.text.name();
        let text_file = match self.text {
            TextEncoder::File => format!("file = {}\n", quote_toml(&self.text_file)),
            _ => String::new(),
        };
        let decoder = self.decoder.name();
        let dimensions = match self.decoder {
            PixelDecoder::WanVae => self.vae.to_toml(),
            PixelDecoder::Tiny => {
                let file = match self.decoder_file.as_str() {
                    "" => String::new(),
                    file => format!("file = {}\n", quote_toml(file)),
                };
                file + &self.tiny.to_toml() + &self.vae.to_toml()
            }
            PixelDecoder::SpaceTimeDepth | PixelDecoder::None => String::new(),
        };
        // A stream without these settings renders as before they existed, and so keeps its digest.
        let sink = match self.sink_frames {
            0 => String::new(),
            frames => format!("sink = {frames}\n"),
        };
        let positions = match self.positions {
            0 => String::new(),
            frames => format!("positions = {frames}\n"),
        };
        let recache = if self.recache { "recache = true\n" } else { "" };
        let quality = match self.decoder_quality {
            DecoderQuality::Exact => String::new(),
            quality => format!("quality = \"{}\"\n", quality.name()),
        };
        let lists = self.render_step_lists();
        let input = if self.takes_video { "[input]\nvideo = true\n\n" } else { "" };
        let guidance = self.guidance.as_ref().map_or(String::new(), Guidance::to_toml);
        let noise = if self.given_noise { "[noise]\nsource = \"call\"\n\n" } else { "" };
        format!(
            "[video]\nwidth = {}\nheight = {}\nfps = {:?}\n\n[latent]\nstride = {:?}\nchunk_frames = {}\n\n\
[cache]\nmode = \"{regime}\"\nwindow_frames = {}\n{sink}{positions}{recache}bias = {:?}\n\n[schedule]\nsteps = {:?}\nshift = {:?}\nwarp = {}\n\
prediction = \"{prediction}\"\n{lists}\n{guidance}{noise}{input}[text]\nencoder = \"{text}\"\n{text_file}\n[decoder]\nkind = \"{decoder}\"\n{quality}{dimensions}",
            self.width,
            self.height,
            self.fps,
            self.stride,
            self.chunk_frames,
            self.window_frames,
            self.bias,
            self.steps,
            self.shift,
            self.warp,
        )
    }

    /// Returns the number of RoPE positions before a rebase.
    #[must_use]
    pub fn position_count(&self, model: &WanConfig) -> u64 {
        if self.positions > 0 { self.positions } else { model.rope_frames }
    }

    /// Returns the number of chunks of the window that are not the sink: they slide.
    #[must_use]
    pub fn ring_chunks(&self) -> u64 {
        (self.window_frames - self.sink_frames) / self.chunk_frames
    }

    /// Returns whether a program of the causal VAE runs. A stream with a tiny decoder encodes with it: the anchor
    /// in the recompute regime, and an input video.
    #[must_use]
    pub fn uses_vae(&self) -> bool {
        match self.decoder {
            PixelDecoder::WanVae => true,
            PixelDecoder::Tiny => self.recompute || self.takes_video,
            PixelDecoder::SpaceTimeDepth | PixelDecoder::None => false,
        }
    }

    /// Returns the token grid of a chunk: frames, rows, columns.
    #[must_use]
    pub fn token_grid(&self, model: &WanConfig) -> [u64; 3] {
        [
            self.chunk_frames,
            self.height / (self.stride[1] * model.patch[0]),
            self.width / (self.stride[2] * model.patch[1]),
        ]
    }

    /// Returns the picture size that is nearest to this one and divides into patches.
    #[must_use]
    pub fn nearest_size(&self, model: &WanConfig, [width, height]: [u64; 2]) -> [u64; 2] {
        let [_, sh, sw] = self.stride;
        [nearest_multiple(width, sw * model.patch[1]), nearest_multiple(height, sh * model.patch[0])]
    }

    /// Returns the frame rate as a fraction, to hundredths.
    #[must_use]
    pub fn frame_rate_fraction(&self) -> (u32, u32) {
        if self.fps.fract() == 0.0 {
            (self.fps as u32, 1)
        } else {
            ((self.fps * 100.0).round().min(65_000.0) as u32, 100)
        }
    }

    /// Returns the number of pixel frames of a chunk. The first chunk of a scene may have fewer:
    /// [`Self::first_chunk_frames`].
    #[must_use]
    pub fn frames_per_chunk(&self) -> u64 {
        self.chunk_frames * self.stride[0]
    }

    /// Returns the number of pixel frames of a scene's first chunk: a causal VAE makes one frame of the
    /// first latent.
    #[must_use]
    pub fn first_chunk_frames(&self) -> u64 {
        match self.decoder {
            PixelDecoder::WanVae | PixelDecoder::Tiny => 1 + (self.chunk_frames - 1) * self.stride[0],
            PixelDecoder::SpaceTimeDepth | PixelDecoder::None => self.frames_per_chunk(),
        }
    }
}

/// Returns the multiple of `of`, at least one, that is nearest to a number.
fn nearest_multiple(n: u64, of: u64) -> u64 {
    let below = n - n % of;
    if below > 0 && n - below <= of / 2 { below } else { below + of }
}

#[cfg(test)]
mod tests {
    use super::contradictions::describe_nearest_sizes;
    use super::*;

    #[test]
    fn text_round_trips() {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let s = StreamConfig::parse("s", "[video]\nwidth = 16\nheight = 32\n[cache]\nbias = 0.3\n", &wan)
            .unwrap();
        assert_eq!(StreamConfig::parse("t", &s.to_toml(), &wan).unwrap(), s);
    }

    #[test]
    fn huge_streams_are_refused_not_planned() {
        let text = |rope: u64, ffn: u64| {
            format!(r#"{{"dim":12,"ffn_dim":{ffn},"num_heads":1,"num_layers":1,"rope_max_seq_len":{rope}}}"#)
        };
        let refused = |rope: u64, ffn: u64, stream: &str| {
            let wan = WanConfig::parse("c", &text(rope, ffn)).unwrap();
            match StreamConfig::parse("s", stream, &wan) {
                Ok(_) => Vec::new(),
                Err(ds) => ds.into_iter().map(|d| (d.code.id, d.message)).collect(),
            }
        };
        let steps: Vec<String> = (0..101).map(|i| format!("{}", 1000 - i)).collect();
        let small = "[video]\nwidth = 16\nheight = 16\n";
        let large = "[video]\nwidth = 4294967280\nheight = 4294967280\n";
        let many = format!("{small}[cache]\nwindow_frames = 195\n");
        let long = format!("{small}[cache]\nwindow_frames = 12\n");
        let with_schedule = |keys: &str| format!("{small}[schedule]\n{keys}\n");
        let stride = format!("{small}[latent]\nstride = [4, 8, 1e18]\n");
        let wide = "[video]\nwidth = 131072\nheight = 65536\n";
        for (rope, ffn, stream, says) in [
            (1024, 8, large, "more than"),
            (1024, 8, many.as_str(), "65 chunks"),
            (11, 8, long.as_str(), "RoPE table of 11"),
            (10, 8, "[video]\nwidth = 192\nheight = 16\n", "12 columns of tokens are more than the 10"),
            (10, 8, "[video]\nwidth = 16\nheight = 176\n", "11 rows of tokens are more than the 10"),
            (1024, 8, &with_schedule("steps = [1000, 666.5]"), "between rows 333 and 334"),
            (1024, 8, &with_schedule("steps = [1000, 0]\nprediction = \"x0\""), "above 0"),
            (1024, 8, stride.as_str(), "65536"),
            (1024, 8, &format!("{small}[schedule]\nsteps = [{}]\n", steps.join(",")), "101 entries"),
            (1024, 4_000_000_000, wide, "more than"),
            (1024, 8, wide, "operations"),
        ] {
            let found = refused(rope, ffn, stream);
            assert!(found.iter().any(|(id, m)| *id == "T0411" && m.contains(says)), "{says}: {found:?}");
        }
        assert!(refused(12, 8, &long).is_empty());
        assert!(refused(10, 8, "[video]\nwidth = 160\nheight = 160\n").is_empty());
        assert!(refused(1024, 8, &with_schedule("steps = [1000, 666.5]\nwarp = false")).is_empty());
    }

    #[test]
    fn a_first_step_that_would_mix_in_the_previous_chunk_is_refused() {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let parse_schedule = |keys: &str| {
            let text = format!("[video]\nwidth = 16\nheight = 16\n[schedule]\n{keys}\n");
            StreamConfig::parse("s", &text, &wan)
        };
        for (keys, sigma) in [
            ("steps = [700, 500, 400, 200]\nshift = 8.0\nwarp = false", "0.700"),
            ("steps = [999, 500]", "0.999"),
            ("steps = [999.5]\nwarp = false", "0.999"),
        ] {
            let ds = parse_schedule(keys).unwrap_err();
            assert_eq!(ds.iter().map(|d| d.code.id).collect::<Vec<_>>(), ["T0412"], "{keys}");
            assert!(ds[0].message.contains(&format!("σ {sigma}")), "{}", ds[0].message);
        }
        assert_eq!(parse_schedule("steps = [1000]\nwarp = false").unwrap().steps, [1000.0]);
    }

    #[test]
    fn a_final_step_of_zero_takes_no_forward() {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let text = |steps| format!("[video]\nwidth = 16\nheight = 16\n[schedule]\nsteps = {steps}\n");
        let parse = |steps| StreamConfig::parse("s", &text(steps), &wan).unwrap();
        assert_eq!(parse("[1000, 750, 500, 250, 0]"), parse("[1000, 750, 500, 250]"));
    }

    #[test]
    fn an_odd_picture_size_names_its_legal_neighbours() {
        let nearest = |size| describe_nearest_sizes(size, [16, 16]);
        for (size, says) in [
            ([850, 480], "sizes are 848×480, 864×480"),
            ([5, 481], "sizes are 16×480, 16×496"),
            ([831, 481], "sizes are 816×480, 816×496, 832×480, 832×496"),
        ] {
            assert!(nearest(size).ends_with(says), "{}", nearest(size));
        }
    }

    #[test]
    fn a_size_is_rounded_to_the_nearest_that_exists() {
        let sizes = [850, 856, 857, 5, 16, 848].map(|n| nearest_multiple(n, 16));
        assert_eq!(sizes, [848, 848, 864, 16, 16, 848]);
    }

    #[test]
    fn a_sink_is_whole_chunks_below_the_window_of_a_resident_cache() {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let parse = |cache: &str| {
            let text = format!("[video]\nwidth = 16\nheight = 16\n[cache]\n{cache}");
            StreamConfig::parse("s", &text, &wan)
        };
        for (cache, says) in [
            ("window_frames = 12\nsink = 12", "sink 12 is not smaller than the window of 12"),
            ("window_frames = 12\nsink = 15", "sink 15 is not smaller than the window of 12"),
            ("window_frames = 12\nsink = 4", "sink 4 is not a multiple of a chunk of 3"),
            ("mode = \"recompute\"\nsink = 3", "needs the resident cache"),
            ("mode = \"recompute\"\nrecache = true", "needs the resident cache"),
            ("mode = \"recompute\"\npositions = 50", "needs the resident cache"),
            ("window_frames = 12\npositions = 11", "at least the window of 12"),
            ("window_frames = 12\npositions = 1025", "at most the 1024"),
            ("window_frames = 6\nsink = 3\nrecache = true", "has no effect"),
            ("window_frames = 3\nrecache = true", "has no effect"),
        ] {
            let ds = parse(cache).unwrap_err();
            assert_eq!((ds.len(), ds[0].code.id), (1, "T0411"), "{cache}: {ds:#?}");
            assert!(ds[0].message.contains(says), "{cache}: {}", ds[0].message);
        }
        let s = parse("window_frames = 12\nsink = 3\npositions = 50\nrecache = true").unwrap();
        assert_eq!((s.sink_frames, s.recache, s.ring_chunks(), s.position_count(&wan)), (3, true, 3, 50));
        assert_eq!(StreamConfig::parse("t", &s.to_toml(), &wan).unwrap(), s);
        let plain = parse("window_frames = 12").unwrap().to_toml();
        assert!(["sink", "positions", "recache"].iter().all(|key| !plain.contains(key)), "{plain}");
        assert_eq!(parse("window_frames = 12").unwrap().position_count(&wan), 1024);
        assert_eq!(parse("sink = -1").unwrap_err()[0].code.id, "T0004");
    }

    #[test]
    fn contradictions_show_their_numbers() {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let text = "[video]\nwidth = 20\nheight = 16\n[cache]\nmode = \"recompute\"\nwindow_frames = 9\nbias = 2.0\n\
[schedule]\nsteps = [500, 750]\n[decoder]\nkind = \"space_time_depth\"\n";
        let ds = StreamConfig::parse("s", text, &wan).unwrap_err();
        assert_eq!(ds.len(), 5, "{ds:#?}");
        assert!(ds.iter().all(|d| d.code.id == "T0411"));
    }
}
