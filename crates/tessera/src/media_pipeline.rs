//! The media pipeline of the leader: encodes prompts, builds context from latents, and decodes
//! latents to frames on disk.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use tessera_base::Diagnostic;
use tessera_runtime::engine::{Delivery, MediaPipeline};
use tessera_runtime::wire::{Tensor, Tensors};

use crate::frame_writer::{FrameWriter, OpenPipes};
use crate::media_codec::{MediaCodec, find_latents};
use crate::plan::Plan;
use crate::prompt_rows::PromptRows;
use crate::rank_config::RankConfig;
use crate::record::RecordWriter;
use crate::vae_weights::VaeWeights;

/// The media pipeline of a run: codec, output files and record.
pub(crate) struct RunMediaPipeline {
    codec: MediaCodec,
    writer: FrameWriter,
    /// Number of requested chunks; the output is complete if the record has settled as many
    /// requests.
    chunks: u32,
    /// Whether removed output files end the run; only a self-test turns this off.
    checks_output: bool,
    record: Arc<Mutex<RecordWriter>>,
}

impl RunMediaPipeline {
    pub(crate) fn new(
        plan: &Plan,
        text: PromptRows,
        vae: Option<VaeWeights>,
        orders: &RankConfig,
        pipes: OpenPipes,
        record: Arc<Mutex<RecordWriter>>,
    ) -> Result<RunMediaPipeline, Diagnostic> {
        let mut codec = MediaCodec::load_at(plan, text, vae, orders.leader.pixels_gpu, orders.delays.media)?;
        if orders.poison {
            codec.poison_temporaries();
        }
        Ok(RunMediaPipeline {
            codec,
            writer: FrameWriter::create(plan, &orders.out, &orders.outputs, pipes)?,
            chunks: orders.chunks,
            checks_output: orders.checks_output(),
            record,
        })
    }

    /// Checks that the output files of the run are in its directory.
    fn check_output(&self, record: &RecordWriter) -> Result<(), Diagnostic> {
        if !self.checks_output {
            return Ok(());
        }
        self.writer.check_in_place()?;
        record.check_in_place()
    }
}

impl MediaPipeline for RunMediaPipeline {
    fn encode_prompt(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        self.codec.encode_text(prompt)
    }

    fn encode_context(
        &mut self,
        chunk: u32,
        previous: &Tensors,
        opens_scene: bool,
    ) -> Result<Tensor, Diagnostic> {
        let before = chunk.saturating_sub(1);
        let context = self.codec.build_context(before, previous, opens_scene)?;
        lock_record(&self.record).record_media_laps(before, self.codec.take_intervals());
        Ok(context)
    }

    fn deliver_chunk(
        &mut self,
        chunk: u32,
        outputs: &Tensors,
        opens_scene: bool,
    ) -> Result<Delivery, Diagnostic> {
        let rgb = self.codec.decode_frames(chunk, outputs, opens_scene)?;
        let psnr_db = self.codec.check_fast_decode(chunk, &rgb, outputs, opens_scene)?;
        let latents = find_latents(outputs)?;
        let written = Instant::now();
        let frames = self.writer.write_chunk(&rgb, latents.data())?;
        self.codec.end_interval("write", written);
        let mut record = lock_record(&self.record);
        record.record_media_laps(chunk, self.codec.take_intervals());
        self.check_output(&record)?;
        record.record_delivery(chunk, frames, latents.data(), psnr_db)?;
        Ok(Delivery::from_frames(frames))
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        self.writer.sync()?;
        // The record is closed before the run counts as finished: a record that cannot be closed is
        // a failed output.
        let mut record = lock_record(&self.record);
        self.check_output(&record)?;
        self.writer.check_frames()?;
        let complete = record.settled_requests() == self.chunks;
        record.write_end(None, complete)
    }
}

pub(crate) fn lock_record(record: &Mutex<RecordWriter>) -> std::sync::MutexGuard<'_, RecordWriter> {
    record.lock().unwrap_or_else(PoisonError::into_inner)
}
