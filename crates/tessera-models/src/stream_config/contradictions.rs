//! Contradictions between the settings of a stream, and with the model.

use tessera_base::{Diagnostic, Diagnostics};

use super::{DEFAULT_STEP_LIST, DecoderQuality, PixelDecoder, StreamConfig, denoising_steps};
use crate::WanConfig;
use crate::codes::{T0411, T0412};
use crate::wan_config::{ELEMENTS_MAX, STRIDE_MAX, checked_elements};

/// Maximum chunks of a cache window; each chunk is a fill level with its own programs.
const CHUNKS_MAX: u64 = 64;
/// Maximum operations of a forward, so that sums of costs fit 64 bits.
const OPERATIONS_MAX: u128 = 1 << 60;
/// Maximum frame rate. A larger one is a typo.
const FPS_MAX: f64 = 1000.0;
/// Maximum shift of the noise schedule. Above it, all steps would have the same noise level.
const SHIFT_MAX: f64 = 1000.0;

impl StreamConfig {
    /// Lists the contradictions with the model and between settings. The application crate also
    /// calls this after a command-line option changed a setting.
    #[must_use]
    pub fn find_contradictions(&self, file: &str, model: &WanConfig) -> Diagnostics {
        let mut ds = Vec::new();
        let mut refuse = |m: String| ds.push(Diagnostic::error(&T0411, m).with_label(file, "these settings"));
        let [st, sh, sw] = self.stride;
        if st * sh * sw == 0 {
            refuse(format!("latent.stride must be three integers from 1 to {STRIDE_MAX}"));
            return ds;
        }
        let (bh, bw) = (sh * model.patch[0], sw * model.patch[1]);
        if !self.width.is_multiple_of(bw) || !self.height.is_multiple_of(bh) {
            refuse(describe_nearest_sizes([self.width, self.height], [bw, bh]));
        }
        if !self.window_frames.is_multiple_of(self.chunk_frames) || self.window_frames < self.chunk_frames {
            refuse(format!(
                "a window of {} frames is not a multiple of a chunk of {}",
                self.window_frames, self.chunk_frames
            ));
        }
        if self.recompute && self.window_frames != 2 * self.chunk_frames {
            refuse(format!(
                "the recompute regime needs {} context and {} new frames; window_frames is {}",
                self.chunk_frames, self.chunk_frames, self.window_frames
            ));
        }
        for (key, trained, name, frames) in [
            ("local_attn_size", model.trained_window, "cache.window_frames", self.window_frames),
            ("sink_size", model.trained_sink, "cache.sink", self.sink_frames),
        ] {
            if let Some(trained) = trained.filter(|n| *n != frames) {
                refuse(format!("the model's config states {key} {trained}, and {name} is {frames}"));
            }
        }
        self.describe_bad_cache(model).into_iter().for_each(&mut refuse);
        let chunks = self.window_frames.checked_div(self.chunk_frames).unwrap_or(0);
        if chunks > CHUNKS_MAX {
            refuse(format!(
                "a window of {} frames has {chunks} chunks of {}, the limit is {CHUNKS_MAX}",
                self.window_frames, self.chunk_frames
            ));
        }
        if self.window_frames > model.rope_frames {
            refuse(format!(
                "a window of {} frames is longer than the model's RoPE table of {}",
                self.window_frames, model.rope_frames
            ));
        }
        let [_, rows, cols] = self.token_grid(model);
        for (extent, what) in [(rows, "rows"), (cols, "columns")] {
            if extent > model.rope_frames {
                refuse(format!(
                    "{extent} {what} of tokens are more than the {} positions of the model's RoPE table",
                    model.rope_frames
                ));
            }
        }
        if !(self.bias > 0.0 && self.bias <= 1.0) {
            refuse(format!("cache.bias {} must be in (0, 1]", self.bias));
        }
        let in_range = |x: f64, max: f64| x > 0.0 && x <= max;
        if !in_range(self.fps, FPS_MAX) || !in_range(self.shift, SHIFT_MAX) {
            refuse(format!(
                "fps {} must be positive and at most {FPS_MAX}, and shift {} positive and at most {SHIFT_MAX}",
                self.fps, self.shift
            ));
        }
        self.describe_bad_steps().into_iter().for_each(&mut refuse);
        self.describe_bad_media(model).into_iter().for_each(&mut refuse);
        if let Some(message) = self.describe_excess(model) {
            refuse(message);
        }
        ds.extend(self.guidance.as_ref().and_then(|g| g.find_problem(file)));
        if ds.is_empty() {
            ds.extend(self.find_useless_noise(file));
        }
        ds
    }

    /// Describes what is wrong with the sink, the positions and the recache.
    fn describe_bad_cache(&self, model: &WanConfig) -> Vec<String> {
        let mut found = Vec::new();
        let (sink, window, chunk) = (self.sink_frames, self.window_frames, self.chunk_frames);
        if sink > 0 && self.recompute {
            found.push(format!("cache.sink {sink} needs the resident cache: recompute keeps no frames"));
        }
        if sink >= window {
            found.push(format!("cache.sink {sink} is not smaller than the window of {window} frames"));
        } else if !sink.is_multiple_of(chunk) {
            found.push(format!("cache.sink {sink} is not a multiple of a chunk of {chunk}"));
        }
        if self.positions > 0 && self.recompute {
            found
                .push("cache.positions needs the resident cache: recompute starts at position 0".to_string());
        } else if self.positions > 0 && !(window..=model.rope_frames).contains(&self.positions) {
            found.push(format!(
                "cache.positions {} must be at least the window of {window} frames and at most the {} of the \
                 model's RoPE table",
                self.positions, model.rope_frames
            ));
        }
        if self.recache && self.recompute {
            found.push("cache.recache needs the resident cache: recompute applies every prompt".to_string());
        } else if self.recache && sink.saturating_add(chunk) >= window {
            found.push(format!(
                "cache.recache has no effect: a window of {window} frames holds the sink of {sink} and the new \
                 chunk of {chunk} alone"
            ));
        }
        found
    }

    /// Describes what is wrong with the decoder, and with an input video.
    fn describe_bad_media(&self, model: &WanConfig) -> Vec<String> {
        let mut found = Vec::new();
        let [st, sh, sw] = self.stride;
        if self.decoder == PixelDecoder::SpaceTimeDepth && model.channels != 3 * st * sh * sw {
            found.push(format!(
                "a {st}×{sh}×{sw} decoder has {} channels, the model {}",
                3 * st * sh * sw,
                model.channels
            ));
        }
        if self.decoder == PixelDecoder::Tiny {
            found.extend(self.tiny.describe_problem(self.stride));
        }
        if self.uses_vae() {
            found.extend(self.vae.describe_problem(self.stride, model.channels));
        }
        if self.decoder_quality == DecoderQuality::Fast && self.decoder != PixelDecoder::WanVae {
            found.push(format!(
                "decoder.quality = \"fast\" is for the convolutions of a VAE: decoder.kind is {}",
                self.decoder.name()
            ));
        }
        if self.takes_video && !self.decoder.is_causal() {
            found.push(
                "input.video needs the encoder of a causal VAE: decoder.kind is neither wan_vae nor tiny"
                    .to_string(),
            );
        }
        if self.takes_video && self.given_noise {
            found.push(
                "a chunk begins with given noise or with an input video: noise.source is call".to_string(),
            );
        }
        if self.takes_video && !self.step_lists.is_empty() {
            found.push(
                "an input video begins at a step of schedule.steps: input.video and schedule.lists exclude each other"
                    .to_string(),
            );
        }
        found
    }

    /// Rejects a schedule whose first step mixes something else than noise into its input if there is no
    /// input video, and one whose steps leave nothing of the video if there is.
    fn find_useless_noise(&self, file: &str) -> Option<Diagnostic> {
        if self.takes_video {
            let covers_all = denoising_steps(self).iter().all(|s| s.sigma >= 1.0);
            return covers_all.then(|| {
                Diagnostic::error(
                    &T0411,
                    "every denoising step is pure noise, which leaves nothing of an input video",
                )
                .with_label(file, format!("schedule.steps {:?} and input.video", self.steps))
                .with_hint("add a step with less noise, such as 500")
            });
        }
        self.all_step_lists().into_iter().find_map(|(name, steps)| {
            let first = steps.first().filter(|s| s.sigma < 1.0)?;
            let key = match name {
                DEFAULT_STEP_LIST => "schedule.steps".to_string(),
                name => format!("schedule.lists.{name}"),
            };
            let stated = self.step_lists.get(name).unwrap_or(&self.steps).first()?;
            Some(
                Diagnostic::error(
                    &T0412,
                    format!(
                        "the first step {stated} has σ {}: its input would hold {} of the previous chunk's latents",
                        first.sigma,
                        1.0 - first.sigma
                    ),
                )
                .with_label(file, key)
                .with_hint("begin the steps with 1000, which is pure noise"),
            )
        })
    }

    /// Describes the first tensor, or the cost of a call, that exceeds the limits.
    fn describe_excess(&self, model: &WanConfig) -> Option<String> {
        let [chunk, rows, cols] = self.token_grid(model);
        let (d, width) = (model.dim, model.ffn_dim.max(model.token_width()).max(model.dim));
        let tensors: [(&str, &[u64]); 5] = [
            ("the cache, window_frames · rows · columns · dim", &[self.window_frames, rows, cols, d]),
            ("the chunk, chunk_frames · rows · columns · width", &[chunk, rows, cols, width]),
            ("the chunk's pixels", &[chunk, self.stride[0], self.height, self.width, 3]),
            ("the time modulation, chunk_frames · 6 · dim", &[chunk, 6, d]),
            ("the time embeddings, chunk_frames · freq_dim", &[chunk, model.freq_dim]),
        ];
        for (what, extents) in tensors {
            if checked_elements(extents).is_none() {
                return Some(format!("{what} = {extents:?} has more than {ELEMENTS_MAX} elements"));
            }
        }
        // All factors below are within the limits checked above, so the numbers of operations stay far
        // below 2^128.
        let to_u128 = u128::from;
        let (d, ffn, frame) = (to_u128(d), to_u128(model.ffn_dim), to_u128(rows * cols));
        let (tokens, attended) =
            (to_u128(chunk) * frame, to_u128(self.window_frames) * frame + to_u128(model.text_len));
        let block = tokens * d * (12 * d + 4 * ffn + 6 * attended);
        let text = 2 * to_u128(model.text_len) * d * (to_u128(model.text_dim) + d);
        let time = 2 * to_u128(chunk) * d * (to_u128(model.freq_dim) + 7 * d);
        let ends = 4 * tokens * d * to_u128(model.token_width());
        let passes = if self.guidance.is_some() { 2 } else { 1 };
        let total = passes
            * (to_u128(model.layers) * (block + 4 * to_u128(model.text_len) * d * d) + text + time + ends);
        (total > OPERATIONS_MAX)
            .then(|| format!("one forward of a chunk is {total} operations, more than 2^60"))
    }
}

/// Describes a picture that does not divide into patches, with the nearest ones that do.
pub(super) fn describe_nearest_sizes([width, height]: [u64; 2], [bw, bh]: [u64; 2]) -> String {
    let multiples = |n: u64, of: u64| {
        let (below, above) = (n - n % of, n.next_multiple_of(of));
        if below == 0 || below == above { vec![above] } else { vec![below, above] }
    };
    let sizes: Vec<String> = multiples(width, bw)
        .iter()
        .flat_map(|w| multiples(height, bh).into_iter().map(move |h| format!("{w}×{h}")))
        .collect();
    format!(
        "{width}×{height} pixels are not a multiple of {bw}×{bh} patches; the nearest sizes are {}",
        sizes.join(", ")
    )
}
