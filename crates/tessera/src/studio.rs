//! The leader's own work: prompts to rows, latents to context, latents to frames on disk.
//!
//! A chunk is decoded latent by latent, in order. In the recompute regime its first is decoded before the next chunk's
//! call, which waits for the anchor; the others under that call.

use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tessera_base::Diagnostic;
use tessera_cpu::{Cpu, Pool};
use tessera_device::{Backend, CallData, Fault, Loaded, Observer, Seat, WeightSource};
use tessera_ir::Type;
use tessera_mesh::Rank;
use tessera_models::{Decoder, VideoModel, Words};
use tessera_report::apng::{ApngStream, png_frame};
use tessera_runtime::engine::Studio;
use tessera_runtime::wire::Tensor;

use crate::files::{unwritable, write_file};
use crate::model::T0016;
use crate::modelled::{ModelledStudio, fill};
use crate::plan::Plan;
use crate::rank::Orders;
use crate::record::RecordWriter;

/// The clip's file name in a run's folder.
pub(crate) const CLIP: &str = "clip.png";

/// Codec and output folder of a run.
pub(crate) struct Reel {
    codec: Codec,
    out: Out,
    /// Chunks asked for.
    chunks: u32,
    record: Arc<Mutex<RecordWriter>>,
}

impl Reel {
    pub(crate) fn new(
        plan: &Plan,
        words: Words,
        orders: &Orders,
        record: Arc<Mutex<RecordWriter>>,
    ) -> Result<Reel, Diagnostic> {
        Ok(Reel {
            codec: Codec::load(plan, words, orders.modelled.studio)?,
            out: Out::create(&plan.video, &orders.out, orders.png)?,
            chunks: orders.chunks,
            record,
        })
    }
}

impl Studio for Reel {
    fn text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        self.codec.text(prompt)
    }

    fn context(&mut self, chunk: u32, previous: &Tensor, opens_scene: bool) -> Result<Tensor, Diagnostic> {
        let before = chunk.saturating_sub(1);
        let context = self.codec.context(before, previous, opens_scene)?;
        lock(&self.record).studio(before, self.codec.laps());
        Ok(context)
    }

    fn deliver(&mut self, chunk: u32, latents: &Tensor) -> Result<u32, Diagnostic> {
        let pixels = self.codec.pixels(chunk, latents)?;
        let written = Instant::now();
        let frames = match self.codec.decoder() {
            Decoder::SpaceTimeDepth => self.out.frames(&pixels)?,
            Decoder::None => {
                self.out.latents(latents.data())?;
                0
            }
        };
        self.codec.lap("write", written);
        let mut record = lock(&self.record);
        record.studio(chunk, self.codec.laps());
        record.delivered(chunk, frames, latents.data())?;
        Ok(frames)
    }

    fn finish(&mut self) -> Result<(), Diagnostic> {
        self.out.sync()?;
        // Before anybody is told that the run has finished: a record that cannot be closed is a failed output.
        let mut record = lock(&self.record);
        let complete = record.settled() == self.chunks;
        record.end(None, complete)
    }
}

pub(crate) fn lock(record: &Mutex<RecordWriter>) -> std::sync::MutexGuard<'_, RecordWriter> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prompts to rows, latents to pixels and to context: the text encoder, and the plan's decoder and encoder programs
/// on a backend of their own, beside the mesh's.
pub(crate) struct Codec {
    video: VideoModel,
    words: Words,
    cpu: Cpu,
    loaded: BTreeMap<String, Loaded>,
    /// The chunk whose first latent is decoded and whose others are not, with the pixels of that one.
    begun: Option<(u32, Vec<f32>)>,
    modelled: Option<ModelledStudio>,
    laps: Vec<Lap>,
}

/// A piece of the leader's own work: `decode`, or `decode.first` and `decode.rest`, `encode`, `write`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Lap {
    pub(crate) name: &'static str,
    pub(crate) begun: Instant,
    pub(crate) ended: Instant,
}

fn values(t: &Tensor) -> Vec<f32> {
    t.to_f32().unwrap_or_default()
}

struct NoWeights;
impl WeightSource for NoWeights {
    fn read(&mut self, name: &str, _: &Type, _: Option<&str>, _: &Seat) -> Result<Vec<f32>, Diagnostic> {
        Err(Diagnostic::error(&T0016, format!("the decoder asks for a weight `{name}`")))
    }
}

struct Unwatched;
impl Observer for Unwatched {
    fn issued(&mut self, _: usize) {}
    fn progress(&mut self, _: u32) {}
}

impl Codec {
    pub(crate) fn load(
        plan: &Plan,
        words: Words,
        modelled: Option<ModelledStudio>,
    ) -> Result<Codec, Diagnostic> {
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let seat = Seat { mesh: *sealed.mesh(), rank };
        let mut cpu = Cpu::new(seat, Pool::single(), Vec::new(), Duration::from_secs(1));
        let mut loaded = BTreeMap::new();
        for name in crate::engine::LEADER_PHASES {
            if let (Some(p), Some(s)) = (sealed.program(name, rank), sealed.slots(name, rank)) {
                loaded.insert(name.to_string(), cpu.load(&Arc::new((**p).clone()), s, &mut NoWeights)?);
            }
        }
        Ok(Codec { video: plan.video.clone(), words, cpu, loaded, begun: None, modelled, laps: Vec::new() })
    }

    pub(crate) fn decoder(&self) -> Decoder {
        self.video.stream.decoder
    }

    pub(crate) fn text(&self, prompt: &str) -> Result<Tensor, Diagnostic> {
        let rows = self.words.encode(prompt).map_err(|d| *d)?;
        Tensor::from_f32("text", &[self.video.wan.text_len, self.video.wan.text_dim], &rows)
    }

    /// Pixels [frames, height, width, 3] of a chunk; none for a model without a decoder. Decodes what
    /// [`Codec::context`] has not.
    pub(crate) fn pixels(&mut self, chunk: u32, latents: &Tensor) -> Result<Vec<f32>, Diagnostic> {
        self.laps.clear();
        let latents = values(latents);
        let whole = Instant::now();
        let (mut pixels, name) = match self.begun.take() {
            Some((c, first)) if c == chunk => (first, "decode.rest"),
            _ => (self.decode_first(&latents)?, "decode"),
        };
        let begun = Instant::now();
        for frame in latents.chunks_exact(self.frame_len()).skip(1) {
            pixels.extend(self.decode(frame)?);
        }
        self.stand_for(begun, |m| m.rest_ns);
        self.lap(name, whole);
        Ok(pixels)
    }

    /// [anchor, z₋₂, z₋₁] of chunk `before`, for the chunk after it. The anchor is the encoding of one decoded frame,
    /// the last pixel frame of latent 0, repeated over the temporal stride; after a scene's first chunk it is latent
    /// 0 itself. No other latent is decoded for it.
    pub(crate) fn context(
        &mut self,
        before: u32,
        latents: &Tensor,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic> {
        self.laps.clear();
        let mut context = values(latents);
        if !opens_scene {
            let begun = Instant::now();
            let first = self.decode_first(&context)?;
            self.lap("decode.first", begun);
            let begun = Instant::now();
            let stride = self.video.stream.stride[0] as usize;
            let anchor = &first[first.len() - first.len() / stride..];
            let encoded = self.run("encode", "pixels", &anchor.repeat(stride), "latents")?;
            context[..encoded.len()].copy_from_slice(&encoded);
            self.stand_for(begun, |m| m.encode_ns);
            self.lap("encode", begun);
            self.begun = Some((before, first));
        }
        Tensor::from_f32("context", &[self.video.chunk_tokens(), self.video.wan.token_width()], &context)
    }

    /// Closes a piece of work that began at an instant.
    fn lap(&mut self, name: &'static str, begun: Instant) {
        self.laps.push(Lap { name, begun, ended: Instant::now() });
    }

    /// The work of the last context or delivery.
    fn laps(&mut self) -> Vec<Lap> {
        std::mem::take(&mut self.laps)
    }

    /// Numbers of one latent frame.
    fn frame_len(&self) -> usize {
        (self.video.frame_tokens() * self.video.wan.token_width()) as usize
    }

    fn decode_first(&mut self, latents: &[f32]) -> Result<Vec<f32>, Diagnostic> {
        let begun = Instant::now();
        let pixels = self.decode(&latents[..self.frame_len().min(latents.len())])?;
        self.stand_for(begun, |m| m.first_ns);
        Ok(pixels)
    }

    /// Pixels of one latent frame.
    fn decode(&mut self, frame: &[f32]) -> Result<Vec<f32>, Diagnostic> {
        match self.decoder() {
            Decoder::SpaceTimeDepth => self.run("decode", "latents", frame, "pixels"),
            Decoder::None => Ok(Vec::new()),
        }
    }

    fn stand_for(&self, begun: Instant, ns: impl Fn(&ModelledStudio) -> u64) {
        if let Some(m) = &self.modelled {
            fill(begun, ns(m));
        }
    }

    fn run(&mut self, phase: &str, input: &str, data: &[f32], output: &str) -> Result<Vec<f32>, Diagnostic> {
        let failed = |why: String| Diagnostic::error(&T0016, format!("{phase} of a chunk: {why}"));
        let program =
            *self.loaded.get(phase).ok_or_else(|| failed("the plan holds no such program".into()))?;
        let call = CallData { inputs: BTreeMap::from([(input, data)]), ..CallData::default() };
        self.cpu.run(program, &call, &mut Unwatched).map_err(|f| match f {
            Fault::Failed(t) | Fault::Stalled(t) | Fault::Aborted(t) | Fault::Refused(t) => failed(t),
        })?;
        self.cpu.output(output).map(<[f32]>::to_vec).ok_or_else(|| failed(format!("no {output} came out")))
    }
}

/// The folder's growing files. After each chunk every file is whole.
struct Out {
    dir: PathBuf,
    file: File,
    path: PathBuf,
    at: u64,
    clip: Option<ApngStream>,
    size: (u32, u32),
    png: bool,
    written: u32,
}

impl Out {
    fn create(video: &VideoModel, dir: &Path, png: bool) -> Result<Out, Diagnostic> {
        let size = (video.stream.width as u32, video.stream.height as u32);
        let (name, clip, header) = match video.stream.decoder {
            Decoder::SpaceTimeDepth => {
                let (stream, header) = clip(video)?;
                (CLIP, Some(stream), header)
            }
            Decoder::None => ("latents.f32", None, Vec::new()),
        };
        let path = dir.join(name);
        let file = File::create(&path).map_err(|e| unwritable(&path, &e))?;
        file.write_all_at(&header, 0).map_err(|e| unwritable(&path, &e))?;
        if png {
            let frames = dir.join("frames");
            std::fs::create_dir(&frames).map_err(|e| unwritable(&frames, &e))?;
        }
        Ok(Out { dir: dir.to_path_buf(), file, path, at: header.len() as u64, clip, size, png, written: 0 })
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), Diagnostic> {
        self.file.write_all_at(bytes, self.at).map_err(|e| unwritable(&self.path, &e))?;
        self.at += bytes.len() as u64;
        Ok(())
    }

    /// Pixels [frames, height, width, 3] in [−1, 1].
    fn frames(&mut self, pixels: &[f32]) -> Result<u32, Diagnostic> {
        let frame = (self.size.0 * self.size.1 * 3) as usize;
        let mut count = 0;
        for values in pixels.chunks_exact(frame) {
            let rgb: Vec<u8> =
                values.iter().map(|v| ((v.clamp(-1.0, 1.0) + 1.0) * 127.5).round() as u8).collect();
            if self.png {
                let path = self.dir.join("frames").join(format!("{:06}.png", self.written));
                write_file(&path, &png_frame(&rgb, self.size.0, self.size.1)?)?;
            }
            if let Some(clip) = &mut self.clip {
                let bytes = clip.frame(&rgb)?;
                self.put(&bytes)?;
            }
            self.written += 1;
            count += 1;
        }
        self.close_chunk()?;
        Ok(count)
    }

    /// Makes the file a whole animation; the next frame goes over the trailer.
    fn close_chunk(&mut self) -> Result<(), Diagnostic> {
        let Some(clip) = &self.clip else { return Ok(()) };
        let ending = clip.ending();
        let refuse = |e: std::io::Error| unwritable(&self.path, &e);
        self.file.write_all_at(&ending.trailer, self.at).map_err(refuse)?;
        for patch in &ending.patch {
            self.file.write_all_at(&patch.bytes, patch.offset).map_err(refuse)?;
        }
        Ok(())
    }

    fn latents(&mut self, bytes: &[u8]) -> Result<(), Diagnostic> {
        self.put(bytes)
    }

    fn sync(&mut self) -> Result<(), Diagnostic> {
        self.file.sync_data().map_err(|e| unwritable(&self.path, &e))
    }
}

/// An animation of the model's size and rate, and the bytes it begins with.
pub(crate) fn clip(video: &VideoModel) -> Result<(ApngStream, Vec<u8>), Diagnostic> {
    let (fps, per) = rate(video.stream.fps);
    ApngStream::new(video.stream.width as u32, video.stream.height as u32, fps, per)
}

/// Frames per second as a fraction of whole numbers.
fn rate(fps: f64) -> (u32, u32) {
    if fps.fract() == 0.0 { (fps as u32, 1) } else { ((fps * 100.0).round().min(65_000.0) as u32, 100) }
}
