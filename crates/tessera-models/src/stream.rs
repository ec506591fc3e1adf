//! How a model is streamed: picture, latent, cache regime, schedule, text and decoder, from `stream.toml`.

use tessera_base::fields::{Fields, toml};
use tessera_base::{Code, Diagnostic, Diagnostics};

use crate::WanConfig;

/// Stream settings that contradict the model or each other.
pub static T0411: Code = Code {
    id: "T0411",
    title: "stream settings contradict each other",
    page: "stream.toml says how a model is streamed: the picture must be a whole number of patches of the latent, the \
cache window a whole number of chunks and at least one, the recompute regime needs a window of exactly two chunks, the \
decoder's channels must be the model's. The message shows the numbers.",
};

/// What the network's output means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Prediction {
    /// noise − x0; x0 = x − σ · flow.
    Flow,
    /// x0 itself.
    X0,
}

/// Component that turns a prompt into rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TextEncoder {
    /// A table with a row per word.
    Words,
    /// None: the model can be planned, not streamed.
    None,
}

/// Component that turns latents into pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Decoder {
    /// Lossless rearrangement of channels.
    SpaceTimeDepth,
    /// None: a stream writes latents only.
    None,
}

/// Settings of a stream. Source: `stream.toml` in the model's folder.
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
    /// Latent frames the cache holds.
    pub window_frames: u64,
    /// Whether the context is recomputed before each chunk (or resident).
    pub recompute: bool,
    /// Weight of past frames' keys in the recompute regime; 1 changes nothing.
    pub bias: f64,
    /// Timesteps, before the warp.
    pub steps: Vec<f64>,
    /// Shift of the schedule.
    pub shift: f64,
    /// Whether the shift bends the timesteps too.
    pub warp: bool,
    /// What the output means.
    pub prediction: Prediction,
    /// Text encoder.
    pub text: TextEncoder,
    /// Decoder.
    pub decoder: Decoder,
}

impl StreamConfig {
    /// Reads `stream.toml` for a model.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &str, model: &WanConfig) -> Result<StreamConfig, Diagnostics> {
        let mut root = Fields::new(file, "", toml(file, text)?);
        let (mut video, mut latent, mut cache) =
            (root.table("video"), root.table("latent"), root.table("cache"));
        let (mut schedule, mut words, mut decoder) =
            (root.table("schedule"), root.table("text"), root.table("decoder"));
        let stride = latent.numbers("stride", &[4.0, 8.0, 8.0]);
        let config = StreamConfig {
            width: video.count("width", None),
            height: video.count("height", None),
            fps: video.number("fps", Some(16.0)),
            stride: match stride[..] {
                [t, h, w] if stride.iter().all(|s| *s >= 1.0 && s.fract() == 0.0) => {
                    [t as u64, h as u64, w as u64]
                }
                _ => [0, 0, 0],
            },
            chunk_frames: latent.count("chunk_frames", Some(3)),
            window_frames: cache.count("window_frames", Some(6)),
            recompute: cache.word("mode", &["resident", "recompute"], "resident") == "recompute",
            bias: cache.number("bias", Some(1.0)),
            steps: schedule.numbers("steps", &[1000.0, 750.0, 500.0, 250.0]),
            shift: schedule.number("shift", Some(5.0)),
            warp: schedule.flag("warp", true),
            prediction: match schedule.word("prediction", &["flow", "x0"], "flow") {
                "x0" => Prediction::X0,
                _ => Prediction::Flow,
            },
            text: match words.word("encoder", &["words", "none"], "none") {
                "words" => TextEncoder::Words,
                _ => TextEncoder::None,
            },
            decoder: match decoder.word("kind", &["space_time_depth", "none"], "none") {
                "space_time_depth" => Decoder::SpaceTimeDepth,
                _ => Decoder::None,
            },
        };
        let mut ds: Diagnostics = [root, video, latent, cache, schedule, words, decoder]
            .into_iter()
            .flat_map(Fields::finish)
            .collect();
        if ds.is_empty() {
            ds = config.contradictions(file, model);
        }
        if ds.is_empty() { Ok(config) } else { Err(ds) }
    }

    /// The settings as `stream.toml`, every key, in a fixed order.
    #[must_use]
    pub fn text(&self) -> String {
        let regime = if self.recompute { "recompute" } else { "resident" };
        let prediction = if self.prediction == Prediction::X0 { "x0" } else { "flow" };
        let text = if self.text == TextEncoder::Words { "words" } else { "none" };
        let decoder = if self.decoder == Decoder::SpaceTimeDepth { "space_time_depth" } else { "none" };
        format!(
            "[video]\nwidth = {}\nheight = {}\nfps = {:?}\n\n[latent]\nstride = {:?}\nchunk_frames = {}\n\n\
[cache]\nmode = \"{regime}\"\nwindow_frames = {}\nbias = {:?}\n\n[schedule]\nsteps = {:?}\nshift = {:?}\nwarp = {}\n\
prediction = \"{prediction}\"\n\n[text]\nencoder = \"{text}\"\n\n[decoder]\nkind = \"{decoder}\"\n",
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

    /// What contradicts the model or other settings. Also called after a command line changed a setting.
    #[must_use]
    pub fn contradictions(&self, file: &str, model: &WanConfig) -> Diagnostics {
        let mut ds = Vec::new();
        let mut refuse = |m: String| ds.push(Diagnostic::error(&T0411, m).at(file, "these settings"));
        let [st, sh, sw] = self.stride;
        if st * sh * sw == 0 {
            refuse("latent.stride must be three whole numbers ≥ 1".into());
            return ds;
        }
        let (bh, bw) = (sh * model.patch[0], sw * model.patch[1]);
        if !self.width.is_multiple_of(bw) || !self.height.is_multiple_of(bh) {
            refuse(format!(
                "{}×{} pixels are not a whole number of {bw}×{bh} patches",
                self.width, self.height
            ));
        }
        if !self.window_frames.is_multiple_of(self.chunk_frames) || self.window_frames < self.chunk_frames {
            refuse(format!(
                "a window of {} frames is not a whole number of chunks of {}",
                self.window_frames, self.chunk_frames
            ));
        }
        if self.recompute && self.window_frames != 2 * self.chunk_frames {
            refuse(format!(
                "the recompute regime holds {} context and {} new frames; window_frames is {}",
                self.chunk_frames, self.chunk_frames, self.window_frames
            ));
        }
        if !(self.bias > 0.0 && self.bias <= 1.0) {
            refuse(format!("cache.bias {} must be in (0, 1]", self.bias));
        }
        if self.fps <= 0.0 || self.shift <= 0.0 {
            refuse(format!("fps {} and shift {} must be positive", self.fps, self.shift));
        }
        let falling = self.steps.windows(2).all(|p| p[0] > p[1]);
        if self.steps.is_empty() || !falling || self.steps.iter().any(|t| !(*t > 0.0 && *t <= 1000.0)) {
            refuse(format!("schedule.steps {:?} must fall from at most 1000 to above 0", self.steps));
        }
        if self.decoder == Decoder::SpaceTimeDepth && model.channels != 3 * st * sh * sw {
            refuse(format!(
                "a {st}×{sh}×{sw} decoder has {} channels, the model {}",
                3 * st * sh * sw,
                model.channels
            ));
        }
        ds
    }

    /// Token grid of a chunk: frames, rows, columns.
    #[must_use]
    pub fn grid(&self, model: &WanConfig) -> [u64; 3] {
        [
            self.chunk_frames,
            self.height / (self.stride[1] * model.patch[0]),
            self.width / (self.stride[2] * model.patch[1]),
        ]
    }

    /// Pixel frames of a chunk.
    #[must_use]
    pub fn frames_per_chunk(&self) -> u64 {
        self.chunk_frames * self.stride[0]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_round_trips() {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let s = StreamConfig::parse("s", "[video]\nwidth = 16\nheight = 32\n[cache]\nbias = 0.3\n", &wan)
            .unwrap();
        assert_eq!(StreamConfig::parse("t", &s.text(), &wan).unwrap(), s);
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
