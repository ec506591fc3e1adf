//! The calls that a stream may make: the phases of each, in order.

use crate::vae::{EXACT_DECODE_PHASE, MediaPhases};
use crate::video_model::{ContextRegime, VideoModel};
use crate::{DEFAULT_STEP_LIST, DecoderQuality, SigmaStep};

/// Lists every call that a stream may make: its name and its phases in order. Any other request is
/// rejected at admission.
#[must_use]
pub fn list_calls(m: &VideoModel, media: MediaPhases) -> Vec<(String, Vec<String>)> {
    let chunk = m.stream.chunk_frames;
    let last = m.stream.window_frames - chunk;
    let resident = m.context_regime() == ContextRegime::Resident;
    let starts = list_starts(m);
    let mut out = Vec::new();
    for fill in (0..=last).step_by(chunk as usize) {
        for (text, start) in [true, false].into_iter().flat_map(|text| starts.iter().map(move |s| (text, s)))
        {
            for rebase in [false, true] {
                // A scene starts with its prompt, and only a full resident window can exceed the
                // RoPE table.
                if (fill == 0 && !text) || (rebase && !(resident && fill == last && fill > 0)) {
                    continue;
                }
                let recaches = if text { recache_sizes(m, fill, rebase) } else { vec![0] };
                out.extend(recaches.into_iter().map(|recached| {
                    let call = ChunkCall { fill, start, text, recached, rebase };
                    (call.format_name(m), call.list_phases(m, media))
                }));
            }
        }
    }
    out
}

/// Lists the numbers of chunks that a new prompt may have to recache at a fill level. A full window holds
/// one chunk more than the fill level says: the one that the call evicts. Only a full window is rebased.
fn recache_sizes(m: &VideoModel, fill: u64, rebase: bool) -> Vec<u64> {
    let s = &m.stream;
    if !s.recache {
        return vec![0];
    }
    let filling = (!rebase).then(|| fill.saturating_sub(s.sink_frames) / s.chunk_frames);
    let full = (fill + s.chunk_frames == s.window_frames).then(|| s.ring_chunks());
    filling.into_iter().chain(full).collect()
}

/// A call that generates a chunk.
struct ChunkCall<'a> {
    /// Latent frames in the KV cache before the chunk.
    fill: u64,
    start: &'a ChunkStart<'a>,
    /// Whether a new prompt takes effect.
    text: bool,
    /// Number of cached chunks whose keys and values the new prompt replaces.
    recached: u64,
    /// Whether positions move back.
    rebase: bool,
}

impl ChunkCall<'_> {
    fn format_name(&self, m: &VideoModel) -> String {
        let flag = |is_set: bool, suffix: &'static str| if is_set { suffix } else { "" };
        format!(
            "chunk.fill{}{}{}{}{}{}{}",
            self.fill,
            match self.start.list {
                DEFAULT_STEP_LIST => String::new(),
                list => format!(".steps-{list}"),
            },
            self.start.video.map_or(String::new(), |step| format!(".video{step}")),
            flag(m.stream.given_noise, ".noise"),
            flag(self.text, ".text"),
            if self.recached > 0 { format!(".recache{}", self.recached) } else { String::new() },
            flag(self.rebase, ".rebase"),
        )
    }

    fn list_phases(&self, m: &VideoModel, media: MediaPhases) -> Vec<String> {
        let fill = self.fill;
        let resident = m.context_regime() == ContextRegime::Resident;
        let mut phases: Vec<String> = Vec::new();
        if self.text {
            phases.push("text".into());
        }
        for i in 0..self.recached {
            let before = m.stream.sink_frames + i * m.stream.chunk_frames;
            phases.extend([format!("recall.back{}", self.recached - i), format!("clean.fill{before}")]);
        }
        if self.rebase {
            phases.push("rebase".into());
        }
        if !resident && fill > 0 {
            phases.push("recompute".into());
        }
        phases.extend(self.start.video.map(|_| "video".to_string()));
        for step in self.start.video.unwrap_or(0)..self.start.steps {
            let is_given = m.stream.given_noise && step == 0;
            let noise = if is_given { "noise" } else { "renoise" };
            phases.extend([noise.into(), format!("denoise.fill{fill}")]);
        }
        if resident {
            phases.push(format!("clean.fill{fill}"));
        }
        phases.push("emit".into());
        phases.extend(media_phases(m, media, fill == 0));
        phases
    }
}

/// Returns the phases of a call that turn its latents into pixels and into the anchor of the next call.
/// When the scene opens, the anchor is latent 0 itself.
fn media_phases(m: &VideoModel, media: MediaPhases, opens_scene: bool) -> Vec<String> {
    if media != MediaPhases::InCalls || !m.stream.decoder.is_causal() {
        return Vec::new();
    }
    let needs_anchor = m.context_regime() == ContextRegime::Recompute && !opens_scene;
    // The anchor leaves before the other latents are decoded: it is encoded from the first one.
    [
        (opens_scene && m.stream.decoder_quality == DecoderQuality::Fast).then_some(EXACT_DECODE_PHASE),
        Some(if opens_scene { "decode.open" } else { "decode.first" }),
        needs_anchor.then_some("encode"),
        (m.stream.chunk_frames > 1).then_some("decode.rest"),
    ]
    .into_iter()
    .flatten()
    .map(String::from)
    .collect()
}

/// How a chunk begins, and how many denoising steps it has.
struct ChunkStart<'a> {
    /// Name of the list of steps.
    list: &'a str,
    /// Number of steps in the list.
    steps: usize,
    /// Step at which an input video begins, if there is one.
    video: Option<usize>,
}

/// Lists the ways in which a chunk may begin: with each list of steps, and with noise or with an input video at a step. A
/// step of pure noise leaves nothing of a video, and a first step with less noise needs one.
///
/// Those of `schedule.steps` come last: estimates take the last call of a plan for the usual one.
fn list_starts(m: &VideoModel) -> Vec<ChunkStart<'_>> {
    let mut out = Vec::new();
    for (list, steps) in m.stream.all_step_lists().into_iter().rev() {
        let is_noise = |step: &SigmaStep| step.sigma >= 1.0;
        let drawn = steps.first().is_none_or(is_noise).then_some(None);
        let given = (0..steps.len()).filter(|at| m.stream.takes_video && !is_noise(&steps[*at])).map(Some);
        let videos = drawn.into_iter().chain(given);
        out.extend(videos.map(|video| ChunkStart { list, steps: steps.len(), video }));
    }
    out
}
