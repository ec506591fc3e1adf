//! Decides what the calls of a batch of texts bring: prompts in pieces, then some ids of every text per call. A pure
//! state machine, so that threads of one process and processes under a leader run the same calls.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_models::{LOGITS, NEXT_IDS, TokenInput, TokenPhase, token_ids_name};
use tessera_runtime::token_director::TokenRequest;
use tessera_runtime::wire::{
    FinishReason, NewSequence, PhaseCall, ScalarArg, SequenceRows, Tensor, Tensors, TokenEvent, TokenWork,
};

use super::LanguagePlan;
use super::pages::PagePool;
use super::prompt_calls::{PromptShape, TextRows, group_prompts};
use crate::codes::{T0086, T0087};

/// How ids are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TextRequest {
    /// Ids of the prompt, at least one.
    pub prompt: Vec<u32>,
    /// Largest number of ids to generate.
    pub max_ids: usize,
    /// How ids are chosen.
    pub sampling: Sampling,
    /// Kind of the text, as the user names it. Prompts of two kinds share no call.
    pub kind: Option<String>,
}

impl TextRequest {
    pub(super) fn shape(&self) -> PromptShape<'_> {
        PromptShape { length: self.prompt.len(), kind: self.kind.as_deref() }
    }
}

/// A generated text.
#[derive(Debug, Clone, PartialEq)]
pub struct GeneratedText {
    /// The generated ids, with the one that ends the text.
    pub ids: Vec<u32>,
    /// Why the text ended.
    pub finish: FinishReason,
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

impl CallTimes {
    pub(super) fn add_call(&mut self, rows: u64, time: Duration) {
        self.calls += 1;
        self.rows += rows;
        self.time += time;
    }
}

/// A text in generation.
struct Sequence {
    /// Number of the sequence in the session.
    number: u64,
    /// Ids of the prompt and those generated.
    ids: Vec<u32>,
    /// Rows that calls have brought.
    cached: usize,
    pages: Vec<u32>,
    request: TextRequest,
    finish: Option<FinishReason>,
}

/// A call whose outputs are due.
struct CallInFlight {
    /// The programs of the call, in order. Each chooses an id of every text whose prompt is read.
    phases: Vec<TokenPhase>,
    /// Rows of the call by the place of their sequence in the bucket; `None` is an absent one.
    batch: Vec<Option<TextRows>>,
}

impl CallInFlight {
    /// Returns the rows that a phase brings, by place, each with the number of rows that earlier phases brought.
    fn rows_of_phase(&self, phase: usize) -> impl Iterator<Item = Option<(TextRows, usize)>> + '_ {
        let rows = self.phases[phase].bucket.rows as usize;
        self.batch.iter().map(move |brought| {
            let brought = (*brought)?;
            let first = phase * rows;
            let count = brought.count.checked_sub(first).filter(|n| *n > 0)?.min(rows);
            Some((TextRows { count, ..brought }, first))
        })
    }
}

/// The texts of a batch, and the call in flight.
pub(super) struct TokenScheduler {
    plan: Arc<LanguagePlan>,
    /// Ids that end a text.
    end_ids: Vec<u32>,
    pool: PagePool,
    sequences: Vec<Sequence>,
    next_number: u64,
    /// Sequences that ended since the last call.
    ended: Vec<u64>,
    in_flight: Option<CallInFlight>,
    /// The calls that read the prompts and have not been made.
    prompt_calls: VecDeque<Vec<Option<TextRows>>>,
}

impl TokenScheduler {
    /// Creates a scheduler without texts, whose texts also end with each of these ids.
    pub(super) fn new(plan: &Arc<LanguagePlan>, end_ids: &[u32]) -> TokenScheduler {
        TokenScheduler {
            plan: Arc::clone(plan),
            end_ids: end_ids.to_vec(),
            pool: PagePool::new(plan.cache.pages, plan.cache.page_rows),
            sequences: Vec::new(),
            next_number: 0,
            ended: Vec::new(),
            in_flight: None,
            prompt_calls: VecDeque::new(),
        }
    }

    /// Begins a batch. Every text gets the pages of its whole length, so that none has to wait for another.
    ///
    /// # Errors
    /// T0086 for a request that the plan cannot hold.
    pub(super) fn open(&mut self, requests: &[TextRequest]) -> Result<(), Diagnostic> {
        self.close();
        if requests.len() as u64 > self.plan.decode.sequences {
            let (n, has) = (requests.len(), self.plan.decode.sequences);
            return Err(Diagnostic::error(&T0086, format!("{n} texts for a plan of {has}")));
        }
        for (text, request) in requests.iter().enumerate() {
            check_request(&self.plan, text, request)?;
            let mut pages = Vec::new();
            let positions = request.prompt.len() + request.max_ids;
            if !self.pool.allocate(&mut pages, positions) {
                return Err(too_long(&self.plan, text, request));
            }
            self.sequences.push(Sequence {
                number: self.next_number,
                ids: request.prompt.clone(),
                cached: 0,
                pages,
                request: request.clone(),
                finish: None,
            });
            self.next_number += 1;
        }
        let shapes: Vec<PromptShape> = requests.iter().map(TextRequest::shape).collect();
        self.prompt_calls = group_prompts(&shapes, self.plan.prefill).into();
        Ok(())
    }

    /// Returns the next call, or `None` if every text has ended.
    ///
    /// # Errors
    /// T0087 if the ids are too many for a message.
    pub(super) fn next_call(&mut self) -> Result<Option<TokenRequest>, Diagnostic> {
        let call = match self.prompt_calls.pop_front() {
            Some(batch) => CallInFlight { phases: vec![TokenPhase::from_call(self.plan.prefill)], batch },
            None => self.next_decoding(),
        };
        if call.batch.iter().all(Option::is_none) {
            return Ok(None);
        }
        let request = self.build_call(&call)?;
        self.in_flight = Some(call);
        Ok(Some(request))
    }

    /// Returns a call that decodes ids of every open text: as many as a call may, or as the longest text still needs.
    fn next_decoding(&self) -> CallInFlight {
        let most = self.plan.settings.ids_per_call as usize;
        let missing = |s: &Sequence| s.request.prompt.len() + s.request.max_ids - s.ids.len();
        let rows = |(text, s): (usize, &Sequence)| {
            s.finish.is_none().then(|| TextRows { text, count: missing(s).min(most) })
        };
        let batch: Vec<_> = self.sequences.iter().enumerate().map(rows).collect();
        let ids = batch.iter().flatten().map(|rows| rows.count).max().unwrap_or(0);
        CallInFlight { phases: self.plan.decoding_phases(ids), batch }
    }

    /// Whether the outputs of a call are due.
    pub(super) fn is_in_flight(&self) -> bool {
        self.in_flight.is_some()
    }

    /// Takes the outputs of the call in flight, and returns the ids that texts gained.
    ///
    /// # Errors
    /// T0087 if no call is in flight or an id is missing.
    pub(super) fn take_outputs(&mut self, outputs: &Tensors) -> Result<Vec<TokenEvent>, Diagnostic> {
        let call = self.in_flight.take().ok_or_else(|| Diagnostic::error(&T0087, "no call is in flight"))?;
        let next = outputs.get(NEXT_IDS).and_then(Tensor::to_f32).unwrap_or_default();
        let mut events = Vec::new();
        for (phase, TokenPhase { bucket, .. }) in call.phases.iter().enumerate() {
            // Every phase returns the ids that it chose, behind those of the phases before.
            let next = next.get(phase * bucket.sequences as usize..).unwrap_or_default();
            for (place, rows) in call.rows_of_phase(phase).enumerate() {
                let Some((TextRows { text, count }, _)) = rows else { continue };
                let sequence = &mut self.sequences[text];
                sequence.cached += count;
                // Later phases continue a text that ended in an earlier one; nobody reads what they choose.
                if sequence.cached < sequence.ids.len() || sequence.finish.is_some() {
                    continue;
                }
                let id = next.get(place).copied();
                let id = id.ok_or_else(|| Diagnostic::error(&T0087, "the plan returns no ids"))? as u32;
                events.push(self.push_id(text, id));
            }
        }
        Ok(events)
    }

    /// Takes the logits [rows, vocabulary] of the call in flight, in the rows that belong to its only text.
    ///
    /// # Errors
    /// T0087 if no call is in flight, or the plan returns no logits.
    pub(super) fn take_logits(&mut self, outputs: &Tensors) -> Result<Vec<f32>, Diagnostic> {
        let logits = outputs.get(LOGITS).and_then(Tensor::to_f32);
        let mut logits = logits.ok_or_else(|| Diagnostic::error(&T0087, "the plan returns no logits"))?;
        let rows = self.in_flight.take().and_then(|call| call.batch.first().copied().flatten());
        let TextRows { text, count } =
            rows.ok_or_else(|| Diagnostic::error(&T0087, "no call is in flight"))?;
        self.sequences[text].cached += count;
        logits.truncate(count * self.plan.model.extents.vocab as usize);
        Ok(logits)
    }

    /// Returns whether the call in flight reads a prompt, and the rows that it brings.
    pub(super) fn describe_call(&self) -> (bool, u64) {
        let mut rows = self.in_flight.iter().flat_map(|call| &call.batch).flatten().peekable();
        let reads_prompt = rows
            .peek()
            .is_some_and(|r| self.sequences[r.text].cached < self.sequences[r.text].request.prompt.len());
        (reads_prompt, rows.map(|r| r.count as u64).sum())
    }

    /// Whether the prompts are read.
    pub(super) fn has_read_prompts(&self) -> bool {
        self.sequences.iter().all(|s| s.cached >= s.request.prompt.len())
    }

    /// Ends the batch and returns its texts.
    pub(super) fn close(&mut self) -> Vec<GeneratedText> {
        self.in_flight = None;
        self.prompt_calls.clear();
        let mut texts = Vec::new();
        for mut sequence in std::mem::take(&mut self.sequences) {
            if sequence.finish.is_none() {
                self.end_sequence(&mut sequence);
            }
            let ids = sequence.ids.split_off(sequence.request.prompt.len());
            texts.push(GeneratedText { ids, finish: sequence.finish.unwrap_or(FinishReason::Length) });
        }
        texts
    }

    fn push_id(&mut self, text: usize, id: u32) -> TokenEvent {
        let sequence = &mut self.sequences[text];
        sequence.ids.push(id);
        let generated = sequence.ids.len() - sequence.request.prompt.len();
        if self.end_ids.contains(&id) {
            sequence.finish = Some(FinishReason::EndId);
        } else if generated == sequence.request.max_ids {
            sequence.finish = Some(FinishReason::Length);
        }
        let finish = sequence.finish;
        if finish.is_some() {
            let mut pages = std::mem::take(&mut sequence.pages);
            self.ended.push(sequence.number);
            self.pool.return_pages(&mut pages);
        }
        TokenEvent { text: text as u32, id, finish }
    }

    /// Gives back the pages of a sequence that ends early. One that no call has brought has nothing to end.
    fn end_sequence(&mut self, sequence: &mut Sequence) {
        if sequence.cached > 0 {
            self.ended.push(sequence.number);
        }
        self.pool.return_pages(&mut sequence.pages);
    }

    /// Builds the message of a call.
    fn build_call(&mut self, call: &CallInFlight) -> Result<TokenRequest, Diagnostic> {
        let bucket = call.phases[0].bucket;
        let (b, n) = (bucket.sequences as usize, bucket.rows as usize);
        let mut work = TokenWork { ended: Vec::new(), begun: Vec::new(), rows: vec![None; b] };
        let mut ids = vec![0.0; b * n];
        for (place, rows) in call.rows_of_phase(0).enumerate() {
            let Some((TextRows { text, count }, _)) = rows else { continue };
            let sequence = &self.sequences[text];
            let first = sequence.cached;
            for (to, id) in ids[place * n..].iter_mut().zip(&sequence.ids[first..first + count]) {
                *to = *id as f32;
            }
        }
        for (place, rows) in call.batch.iter().enumerate() {
            let Some(TextRows { text, count }) = rows else { continue };
            let Sequence { number: sequence, cached, ref pages, .. } = self.sequences[*text];
            if cached == 0 {
                work.begun.push(NewSequence { sequence, pages: pages.clone() });
            }
            work.rows[place] = Some(SequenceRows { sequence, first: cached as u32, count: *count as u32 });
        }
        let phases = (0..call.phases.len()).map(|phase| self.build_phase(call, phase)).collect();
        let inputs = Tensors(vec![Tensor::from_f32(&token_ids_name(bucket), &[(b * n) as u64], &ids)?]);
        work.ended = std::mem::take(&mut self.ended);
        Ok(TokenRequest { work, phases, inputs })
    }

    /// Builds a phase of a call with its scalars.
    fn build_phase(&self, call: &CallInFlight, phase: usize) -> PhaseCall {
        let TokenPhase { bucket, .. } = call.phases[phase];
        let (b, n) = (bucket.sequences as usize, bucket.rows as usize);
        let mut places: Vec<_> = call.rows_of_phase(phase).collect();
        places.resize(b, None);
        // A number for each place, from the sequence there and the positions of its rows.
        let numbers = |absent: f32, of: &dyn Fn(&Sequence, Range<usize>) -> f32| -> Vec<f32> {
            let number = |(TextRows { text, count }, before): (TextRows, usize)| {
                let sequence = &self.sequences[text];
                let first = sequence.cached + before;
                of(sequence, first..first + count)
            };
            places.iter().map(|rows| rows.map_or(absent, number)).collect()
        };
        let sampling = |of: &dyn Fn(&Sampling) -> f32| numbers(0.0, &|s, _| of(&s.request.sampling));
        let mut pages = vec![-1.0; b * self.plan.cache.pages_per_sequence as usize];
        let table = pages.chunks_mut(self.plan.cache.pages_per_sequence as usize);
        for (row, (rows, _)) in table.zip(&places).filter_map(|(row, rows)| Some((row, (*rows)?))) {
            for (to, page) in row.iter_mut().zip(&self.sequences[rows.text].pages) {
                *to = *page as f32;
            }
        }
        let last_row = |(place, rows): (usize, &Option<(TextRows, usize)>)| {
            (place * n + rows.map_or(0, |(rows, _)| rows.count - 1)) as f32
        };
        let last = places.iter().enumerate().map(last_row).collect();
        let scalars = [
            (TokenInput::PAGES, pages),
            (TokenInput::START, numbers(-1.0, &|_, rows| rows.start as f32)),
            (TokenInput::LAST, last),
            (TokenInput::DRAW, numbers(0.0, &|_, rows| rows.end as f32)),
            (TokenInput::SEED, sampling(&|how| how.seed as f32)),
            (TokenInput::TEMPERATURE, sampling(&|how| how.temperature)),
            (TokenInput::TOP_K, sampling(&|how| how.top_k as f32)),
            (TokenInput::TOP_P, sampling(&|how| how.top_p)),
        ];
        let takes_all = self.plan.settings.output == super::TokenOutput::Next;
        let has_experts = self.plan.model.experts.is_some();
        let is_read = |name: &&str| {
            takes_all || PLACE_SCALARS.contains(name) || (has_experts && *name == TokenInput::LAST)
        };
        let args = scalars.into_iter().filter(|(name, _)| is_read(name));
        let args = args.map(|(name, values)| (name.to_string(), ScalarArg::from_f32s(&values))).collect();
        PhaseCall::new(call.phases[phase].name(), args)
    }
}

/// The scalars of a program that returns logits and chooses no ids. Experts read the last rows as well.
const PLACE_SCALARS: [&str; 2] = [TokenInput::PAGES, TokenInput::START];

fn check_request(plan: &LanguagePlan, text: usize, request: &TextRequest) -> Result<(), Diagnostic> {
    let vocab = plan.model.extents.vocab;
    if let Some(id) = request.prompt.iter().find(|id| u64::from(**id) >= vocab) {
        return Err(Diagnostic::error(
            &T0086,
            format!("text {text} has the id {id}, but the model has {vocab} ids"),
        ));
    }
    let (prompt, max_ids, seed) = (request.prompt.len(), request.max_ids, request.sampling.seed);
    if prompt == 0 || max_ids == 0 || seed >= 1 << 24 {
        return Err(Diagnostic::error(
            &T0086,
            format!("text {text}: {prompt} ids of a prompt, {max_ids} ids to generate, seed {seed}"),
        )
        .with_hint("a text needs a prompt, at least one id to generate, and a seed below 2^24"));
    }
    if (prompt + max_ids) as u64 > plan.cache.page_rows * plan.cache.pages_per_sequence {
        return Err(too_long(plan, text, request));
    }
    Ok(())
}

fn too_long(plan: &LanguagePlan, text: usize, request: &TextRequest) -> Diagnostic {
    let most = plan.cache.page_rows * plan.cache.pages_per_sequence;
    let (prompt, max_ids) = (request.prompt.len(), request.max_ids);
    Diagnostic::error(
        &T0086,
        format!(
            "text {text}: a prompt of {prompt} and {max_ids} new ids do not fit a cache of {most} positions"
        ),
    )
    .with_hint("shorten the prompt, or generate fewer ids")
}
