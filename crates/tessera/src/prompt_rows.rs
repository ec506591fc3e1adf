//! The rows of prompts: encodes each prompt once, with the word table, the file of encoded prompts, or
//! the sealed program of a UMT5 encoder.

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::{Backend, CallData, MeshRank, NoObserver, ProgramHandle, Scalar};
use tessera_ir::{Program, Slots};
use tessera_mesh::Rank;
use tessera_models::{TEXT_DEVICE_PHASE, TEXT_IDS, TEXT_LENGTH, TEXT_PHASE, TEXT_ROWS};
use tessera_text::PADDING_ID;

use crate::codes::T0016;
use crate::cuda::open_leader_backend;
use crate::leader_placement::TextPlace;
use crate::leader_programs::{CoreUse, fault_text, open_cpu_backend};
use crate::plan::Plan;
use crate::text_encoder::{PromptEncoder, Umt5Files};

/// Number of prompts whose rows are kept. A stream that alternates between a few prompts encodes each
/// of them once; rows of a Wan prompt take 8 MiB.
const CACHED_PROMPTS: usize = 8;

/// The text encoder of a run, with the rows of the latest prompts.
pub(crate) struct PromptRows {
    encoder: RowSource,
    /// Rows [text_len, text_dim] by prompt, the latest first.
    cached: VecDeque<(String, Vec<f32>)>,
}

enum RowSource {
    /// A table or a file.
    Lookup(PromptEncoder),
    Program(Box<TextProgram>),
}

/// The sealed program of a text encoder on a backend of its own.
struct TextProgram {
    files: Umt5Files,
    plan: Arc<SealedText>,
    place: TextPlace,
    /// `None` while the weights are out of memory.
    loaded: Option<LoadedText>,
    text_len: usize,
}

/// The program for the place where it runs.
struct SealedText {
    program: Arc<Program>,
    slots: Slots,
    seat: MeshRank,
}

/// A backend with the program and its weights.
struct LoadedText {
    backend: Box<dyn Backend>,
    program: ProgramHandle,
}

impl PromptRows {
    /// Loads the encoder on the CPU, and its program and weights if it has one.
    ///
    /// # Errors
    /// T0016 if the plan has no program for the encoder, or why a weight cannot be read.
    pub(crate) fn load(plan: &Plan, encoder: PromptEncoder) -> Result<PromptRows, Diagnostic> {
        PromptRows::load_at(plan, encoder, TextPlace::default())
    }

    /// As [`PromptRows::load`], on the CPU or on a GPU.
    pub(crate) fn load_at(
        plan: &Plan,
        encoder: PromptEncoder,
        place: TextPlace,
    ) -> Result<PromptRows, Diagnostic> {
        let encoder = match encoder {
            PromptEncoder::Umt5(files) => {
                RowSource::Program(Box::new(TextProgram::load(plan, *files, place)?))
            }
            other => RowSource::Lookup(other),
        };
        Ok(PromptRows { encoder, cached: VecDeque::new() })
    }

    /// Returns the rows [text_len, text_dim] of a prompt, padded with zeros.
    ///
    /// # Errors
    /// Why the prompt cannot be encoded.
    pub(crate) fn encode(&mut self, prompt: &str) -> Result<&[f32], Diagnostic> {
        let entry = match self.cached.iter().position(|(cached, _)| cached == prompt) {
            Some(at) => self.cached.remove(at),
            None => None,
        };
        let entry = match entry {
            Some(entry) => entry,
            None => (prompt.to_string(), self.encoder.encode(prompt)?),
        };
        self.cached.push_front(entry);
        self.cached.truncate(CACHED_PROMPTS);
        Ok(&self.cached[0].1)
    }

    /// Returns the rows [text_len, text_dim] of a negative prompt. A table of words has none for an empty
    /// one, which is then all padding.
    ///
    /// # Errors
    /// Why the prompt cannot be encoded.
    pub(crate) fn encode_negative(&mut self, prompt: &str) -> Result<Vec<f32>, Diagnostic> {
        match &self.encoder {
            RowSource::Lookup(PromptEncoder::Words(words)) => words.encode_negative(prompt).map_err(|d| *d),
            _ => self.encode(prompt).map(<[f32]>::to_vec),
        }
    }
}

impl RowSource {
    fn encode(&mut self, prompt: &str) -> Result<Vec<f32>, Diagnostic> {
        match self {
            RowSource::Lookup(encoder) => encoder.look_up_rows(prompt),
            RowSource::Program(program) => program.encode(prompt),
        }
    }
}

impl TextProgram {
    fn load(plan: &Plan, files: Umt5Files, place: TextPlace) -> Result<TextProgram, Diagnostic> {
        let (rank, sealed) = (Rank(0), &plan.sealed);
        let phase = if place.gpu.is_some() { TEXT_DEVICE_PHASE } else { TEXT_PHASE };
        let (Some(program), Some(slots)) = (sealed.rank_program(phase, rank), sealed.rank_slots(phase, rank))
        else {
            return Err(text_error("the plan holds no such program".into()));
        };
        let own = SealedText {
            program: Arc::new((**program).clone()),
            slots: slots.clone(),
            seat: MeshRank { mesh: *sealed.mesh(), rank },
        };
        let mut text = TextProgram {
            files,
            plan: Arc::new(own),
            place,
            loaded: None,
            text_len: plan.video.wan.text_len as usize,
        };
        // Wrong weights are reported at the start, and the first prompt waits for nothing.
        text.loaded = Some(text.load_backend()?);
        Ok(text)
    }

    /// Opens the backend and loads the program. On a GPU the program then runs once, because the first run
    /// captures its graph.
    fn load_backend(&mut self) -> Result<LoadedText, Diagnostic> {
        let own = Arc::clone(&self.plan);
        let mut backend: Box<dyn Backend> = match self.place.gpu {
            Some(gpu) => Box::new(open_leader_backend(own.seat, gpu)?),
            None => {
                let mut cpu = open_cpu_backend(own.seat, CoreUse::All)?;
                // The checkpoints of Wan hold bf16, and the largest encoder has 5.7 billion weights.
                cpu.store_bf16_weights();
                Box::new(cpu)
            }
        };
        let program = backend.load(&own.program, &own.slots, &mut self.files)?;
        let mut loaded = LoadedText { backend, program };
        if self.place.gpu.is_some() {
            loaded.run(&vec![PADDING_ID as f32; self.text_len], 1)?;
        }
        Ok(loaded)
    }

    fn encode(&mut self, prompt: &str) -> Result<Vec<f32>, Diagnostic> {
        self.encode_ids(self.files.tokenize(prompt)?)
    }

    /// Runs the program, and zeroes the rows after the prompt's, as Wan does.
    fn encode_ids(&mut self, mut ids: Vec<u32>) -> Result<Vec<f32>, Diagnostic> {
        let length = ids.len();
        ids.resize(self.text_len, PADDING_ID);
        let ids: Vec<f32> = ids.into_iter().map(|id| id as f32).collect();
        let mut loaded = match self.loaded.take() {
            Some(loaded) => loaded,
            None => self.load_backend()?,
        };
        let mut rows = loaded.run(&ids, length)?;
        self.loaded = (!self.place.unload).then_some(loaded);
        let width = rows.len() / self.text_len;
        rows[length * width..].fill(0.0);
        // To search all weights reads every file, so that only such a row is a reason for it.
        match rows.iter().position(|x| !x.is_finite()) {
            None => Ok(rows),
            Some(at) => Err(self.files.find_nonfinite_weight().unwrap_or_else(|| {
                text_error(format!("column {} of row {} is {}", at % width, at / width, rows[at]))
            })),
        }
    }
}

impl LoadedText {
    /// Returns the rows of all ids, of which `length` precede the padding.
    fn run(&mut self, ids: &[f32], length: usize) -> Result<Vec<f32>, Diagnostic> {
        let call = CallData {
            inputs: BTreeMap::from([(TEXT_IDS, ids)]),
            scalars: BTreeMap::from([(TEXT_LENGTH, Scalar::I64(length as i64))]),
        };
        let run = self.backend.run(self.program, &call, &mut NoObserver);
        run.map_err(|f| text_error(fault_text(f)))?;
        let rows = self.backend.output(TEXT_ROWS).ok_or_else(|| text_error("it returned no rows".into()))?;
        Ok(rows.to_vec())
    }
}

fn text_error(why: String) -> Diagnostic {
    Diagnostic::error(&T0016, format!("{TEXT_PHASE} of a prompt: {why}"))
}

#[cfg(test)]
mod tests;
