//! Generates the texts of a batch: prompts in chunks, then one id of every text per call.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera_base::{Diagnostic, Diagnostics};
use tessera_models::{TokenBucket, TokenInput, token_phase_name};
use tessera_runtime::wire::{PhaseCall, ScalarArg, Tensor, Tensors};

use super::LanguagePlan;
use super::pages::PagePool;
use super::token_ranks::{TokenCall, TokenRanks};
use crate::codes::{T0086, T0087};

/// How ids are chosen.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// Divisor of the logits; 0 takes the likeliest id.
    pub temperature: f32,
    /// Largest number of candidates; 0 for all.
    pub top_k: u32,
    /// Probability that the candidates reach together.
    pub top_p: f32,
    /// Seed of the draws, below 2^24. The draw of an id is numbered by its position, so it depends neither on the
    /// batch nor on the mesh.
    pub seed: u32,
}

impl Default for Sampling {
    fn default() -> Sampling {
        Sampling { temperature: 0.0, top_k: 0, top_p: 1.0, seed: 0 }
    }
}

/// A text to continue.
#[derive(Debug, Clone, PartialEq)]
pub struct TextRequest {
    /// Ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Largest number of ids to generate.
    pub max_ids: usize,
    /// How ids are chosen.
    pub sampling: Sampling,
}

/// Why a text ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose an id that ends texts.
    EndId,
    /// It has the largest number of ids.
    Length,
}

/// An id that was generated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TokenEvent {
    /// Index of the text in the batch.
    pub text: usize,
    /// The id that was chosen.
    pub id: u32,
    /// Why the text ends with it, if it does.
    pub finish: Option<FinishReason>,
}

/// A generated text.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedText {
    /// The generated ids, with the one that ends the text.
    pub ids: Vec<u32>,
    /// Why the text ended.
    pub finish: FinishReason,
}

/// The loaded ranks of a plan, and what their caches hold.
#[derive(Debug)]
pub struct TokenRun {
    plan: Arc<LanguagePlan>,
    ranks: TokenRanks,
    pool: PagePool,
    next_call: u64,
    /// Times of the calls that read prompts.
    pub prefill: CallTimes,
    /// Times of the calls that decode one id of every text.
    pub decode: CallTimes,
}

/// How long calls took, and how many rows they brought.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct CallTimes {
    /// Number of calls.
    pub calls: u64,
    /// Rows that belonged to a text.
    pub rows: u64,
    /// Time of all calls together.
    pub time: Duration,
}

/// A text in generation.
struct Sequence {
    /// Ids of the prompt and those generated.
    ids: Vec<u32>,
    prompt_len: usize,
    pages: Vec<u32>,
    request: TextRequest,
    finish: Option<FinishReason>,
}

impl TokenRun {
    /// Loads the programs and weights on every rank, with `threads` threads each.
    ///
    /// # Errors
    /// The first error of a rank.
    pub fn load(plan: &Arc<LanguagePlan>, dir: &Path, threads: usize) -> Result<TokenRun, Diagnostics> {
        Ok(TokenRun {
            ranks: TokenRanks::start(plan, dir, threads)?,
            pool: PagePool::new(plan.cache.pages, plan.cache.page_rows),
            plan: Arc::clone(plan),
            next_call: 1,
            prefill: CallTimes::default(),
            decode: CallTimes::default(),
        })
    }

    /// Generates the texts of a batch, and passes every id to `on_id` as soon as it exists.
    ///
    /// # Errors
    /// T0086 for a request that the plan cannot hold, or T0087 for a failed rank.
    pub fn generate(
        &mut self,
        requests: &[TextRequest],
        mut on_id: impl FnMut(TokenEvent),
    ) -> Result<Vec<GeneratedText>, Diagnostic> {
        let mut sequences = self.open_sequences(requests)?;
        for (text, sequence) in sequences.iter_mut().enumerate() {
            let id = self.read_prompt(sequence)?;
            self.push_id(text, sequence, id, &mut on_id);
        }
        while sequences.iter().any(|s| s.finish.is_none()) {
            let ids = self.decode_step(&sequences)?;
            for (text, (sequence, id)) in sequences.iter_mut().zip(ids).enumerate() {
                if sequence.finish.is_none() {
                    self.push_id(text, sequence, id, &mut on_id);
                }
            }
        }
        Ok(sequences.into_iter().map(Sequence::into_text).collect())
    }

    /// Returns the logits [rows, vocabulary] of a text, row by row, from a plan that returns logits.
    ///
    /// # Errors
    /// T0086 for a text that the plan cannot hold, or T0087 for a failed rank or a plan that returns ids.
    pub fn compute_logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Diagnostic> {
        let request = TextRequest { prompt: ids.to_vec(), max_ids: 1, sampling: Sampling::default() };
        let mut sequence = self.open_sequences(&[request])?.remove(0);
        let bucket = self.plan.prefill;
        let mut logits = Vec::new();
        for first in (0..ids.len()).step_by(bucket.rows as usize) {
            let rows = (ids.len() - first).min(bucket.rows as usize);
            let outputs = self.run_bucket(bucket, &[Some(BatchRow { sequence: &sequence, first, rows })])?;
            let found = outputs.get("logits").and_then(Tensor::to_f32);
            let found = found.ok_or_else(|| Diagnostic::error(&T0087, "the plan returns no logits"))?;
            logits.extend_from_slice(&found[..rows * self.plan.model.extents.vocab as usize]);
        }
        self.pool.return_pages(&mut sequence.pages);
        Ok(logits)
    }

    /// Gives every text the pages of its whole length, so that none has to wait for another.
    fn open_sequences(&mut self, requests: &[TextRequest]) -> Result<Vec<Sequence>, Diagnostic> {
        let cache = self.plan.cache;
        let most = (cache.page_rows * cache.pages_per_sequence) as usize;
        if requests.len() as u64 > self.plan.decode.sequences {
            let (n, has) = (requests.len(), self.plan.decode.sequences);
            return Err(Diagnostic::error(&T0086, format!("{n} texts for a plan of {has}")));
        }
        let mut sequences = Vec::new();
        for (i, request) in requests.iter().enumerate() {
            let positions = request.prompt.len() + request.max_ids;
            let vocab = self.plan.model.extents.vocab;
            if let Some(id) = request.prompt.iter().find(|id| u64::from(**id) >= vocab) {
                return Err(Diagnostic::error(
                    &T0086,
                    format!("text {i} has the id {id}, but the model has {vocab} ids"),
                ));
            }
            if request.prompt.is_empty() || request.max_ids == 0 || request.sampling.seed >= 1 << 24 {
                return Err(Diagnostic::error(
                    &T0086,
                    format!(
                        "text {i}: {} ids of a prompt, {} ids to generate, seed {}",
                        request.prompt.len(),
                        request.max_ids,
                        request.sampling.seed
                    ),
                )
                .with_hint("a text needs a prompt, at least one id to generate, and a seed below 2^24"));
            }
            let mut pages = Vec::new();
            if positions > most || !self.pool.allocate(&mut pages, positions) {
                return Err(Diagnostic::error(
                    &T0086,
                    format!(
                        "text {i}: a prompt of {} and {} new ids do not fit a cache of {most} positions",
                        request.prompt.len(),
                        request.max_ids
                    ),
                )
                .with_hint("shorten the prompt, or generate fewer ids"));
            }
            sequences.push(Sequence {
                ids: request.prompt.clone(),
                prompt_len: request.prompt.len(),
                pages,
                request: request.clone(),
                finish: None,
            });
        }
        Ok(sequences)
    }

    /// Reads a prompt in chunks, and returns the id that follows it.
    fn read_prompt(&mut self, sequence: &Sequence) -> Result<u32, Diagnostic> {
        let bucket = self.plan.prefill;
        let (begun, mut first, mut next) = (Instant::now(), 0, 0);
        while first < sequence.prompt_len {
            let rows = (sequence.prompt_len - first).min(bucket.rows as usize);
            let outputs = self.run_bucket(bucket, &[Some(BatchRow { sequence, first, rows })])?;
            next = read_next(&outputs, 0)?;
            self.prefill.calls += 1;
            self.prefill.rows += rows as u64;
            first += rows;
        }
        self.prefill.time += begun.elapsed();
        Ok(next)
    }

    /// Decodes one id of each text that has not ended; that of any other has no meaning.
    fn decode_step(&mut self, sequences: &[Sequence]) -> Result<Vec<u32>, Diagnostic> {
        let bucket = self.plan.decode;
        let last_row = |sequence| BatchRow { sequence, first: sequence.ids.len() - 1, rows: 1 };
        let batch: Vec<Option<BatchRow<'_>>> =
            sequences.iter().map(|s| s.finish.is_none().then(|| last_row(s))).collect();
        let begun = Instant::now();
        let outputs = self.run_bucket(bucket, &batch)?;
        self.decode.calls += 1;
        self.decode.rows += batch.iter().flatten().count() as u64;
        self.decode.time += begun.elapsed();
        (0..sequences.len()).map(|i| read_next(&outputs, i)).collect()
    }

    /// Runs the program of a bucket on rows of some texts; `None` is an absent one.
    fn run_bucket(
        &mut self,
        bucket: TokenBucket,
        batch: &[Option<BatchRow<'_>>],
    ) -> Result<Tensors, Diagnostic> {
        let (b, n) = (bucket.sequences as usize, bucket.rows as usize);
        let row_of = |s: usize| batch.get(s).and_then(Option::as_ref);
        let numbers = |absent: f32, of: &dyn Fn(&BatchRow<'_>) -> f32| -> Vec<f32> {
            (0..b).map(|s| row_of(s).map_or(absent, of)).collect()
        };
        let sampling = |of: &dyn Fn(&Sampling) -> f32| numbers(0.0, &|r| of(&r.sequence.request.sampling));
        let last = (0..b).map(|s| (s * n + row_of(s).map_or(0, |r| r.rows - 1)) as f32).collect();
        let mut ids = vec![0.0; b * n];
        let per_sequence = self.plan.cache.pages_per_sequence as usize;
        let mut pages = vec![-1.0; b * per_sequence];
        for (s, row) in batch.iter().enumerate() {
            let Some(BatchRow { sequence, first, rows }) = row else { continue };
            for (to, id) in ids[s * n..].iter_mut().zip(&sequence.ids[*first..first + rows]) {
                *to = *id as f32;
            }
            for (to, page) in pages[s * per_sequence..].iter_mut().zip(&sequence.pages) {
                *to = *page as f32;
            }
        }
        let scalars = [
            (TokenInput::PAGES, pages),
            (TokenInput::START, numbers(-1.0, &|r| r.first as f32)),
            (TokenInput::LAST, last),
            (TokenInput::DRAW, numbers(0.0, &|r| (r.first + r.rows) as f32)),
            (TokenInput::SEED, sampling(&|how| how.seed as f32)),
            (TokenInput::TEMPERATURE, sampling(&|how| how.temperature)),
            (TokenInput::TOP_K, sampling(&|how| how.top_k as f32)),
            (TokenInput::TOP_P, sampling(&|how| how.top_p)),
        ];
        let args = scalars.map(|(name, values)| (name.to_string(), ScalarArg::from_f32s(&values))).to_vec();
        let inputs = vec![Tensor::from_f32(TokenInput::IDS, &[(b * n) as u64], &ids)?];
        let call = TokenCall {
            id: self.next_call,
            phase: PhaseCall::new(token_phase_name(bucket), args),
            inputs: Tensors(inputs),
        };
        self.next_call += 1;
        self.ranks.run(&call)
    }

    fn push_id(&mut self, text: usize, sequence: &mut Sequence, id: u32, on_id: &mut impl FnMut(TokenEvent)) {
        sequence.ids.push(id);
        let generated = sequence.ids.len() - sequence.prompt_len;
        if self.plan.model.end_ids.contains(&id) {
            sequence.finish = Some(FinishReason::EndId);
        } else if generated == sequence.request.max_ids {
            sequence.finish = Some(FinishReason::Length);
        }
        if sequence.finish.is_some() {
            self.pool.return_pages(&mut sequence.pages);
        }
        on_id(TokenEvent { text, id, finish: sequence.finish });
    }
}

/// Rows of a text that a call brings: the ids from `first` on.
struct BatchRow<'a> {
    sequence: &'a Sequence,
    first: usize,
    rows: usize,
}

impl Sequence {
    fn into_text(mut self) -> GeneratedText {
        let ids = self.ids.split_off(self.prompt_len);
        GeneratedText { ids, finish: self.finish.unwrap_or(FinishReason::Length) }
    }
}

fn read_next(outputs: &Tensors, sequence: usize) -> Result<u32, Diagnostic> {
    let ids = outputs.get("next").and_then(Tensor::to_f32);
    let id = ids.and_then(|ids| ids.get(sequence).copied());
    id.map(|id| id as u32).ok_or_else(|| Diagnostic::error(&T0087, "the plan returns no ids"))
}
