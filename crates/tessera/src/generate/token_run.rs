//! Generates texts on ranks that are threads of this process.

use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::engine::ReadyCall;
use tessera_runtime::paged_cache::PagedCacheState;
use tessera_runtime::token_director::{TokenDirector, TokenRequest};
use tessera_runtime::wire::{Tensors, TokenEvent};

use super::LanguagePlan;
use super::language_weights::{LanguagePlace, LanguageWeights};
use super::scheduler::{CallTimes, GeneratedText, Sampling, TextRequest, TokenScheduler};
use crate::in_process_ranks::InProcessRanks;
use crate::rank::RankContext;
use crate::rank_config::first_diagnostic;
use crate::synthetic_delays::SyntheticDelays;

/// The loaded ranks of a plan, and what their caches hold.
pub struct TokenRun {
    context: RankContext<LanguagePlan>,
    ranks: InProcessRanks,
    director: TokenDirector,
    next_call: u64,
    scheduler: TokenScheduler,
    /// Times of the calls that read prompts.
    pub prefill: CallTimes,
    /// Times of the calls that decode ids of every text.
    pub decode: CallTimes,
}

impl TokenRun {
    /// Loads the programs and weights on every rank, with `threads` threads each.
    ///
    /// # Errors
    /// The first error of a rank.
    pub fn load(plan: &Arc<LanguagePlan>, dir: &Path, threads: usize) -> Result<TokenRun, Diagnostics> {
        let place = LanguagePlace::from_files(dir);
        // A rank would find a missing tensor too, but only report the first of several.
        LanguageWeights::open(&place, plan)?;
        let one = |d: Diagnostic| vec![d];
        let context = RankContext::new(Arc::clone(plan), SyntheticDelays::default());
        let state = PagedCacheState::new(plan.paged_cache_spec()).map_err(one)?;
        Ok(TokenRun {
            ranks: InProcessRanks::start(&context, &place, threads).map_err(one)?,
            context,
            director: TokenDirector::new(state),
            next_call: 1,
            scheduler: TokenScheduler::new(plan, &plan.model.end_ids),
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
        self.scheduler.open(requests)?;
        while let Some(outputs) = self.run_next()? {
            self.scheduler.take_outputs(&outputs)?.into_iter().for_each(&mut on_id);
        }
        Ok(self.scheduler.close())
    }

    /// Returns the logits [rows, vocabulary] of a text, row by row, from a plan that returns logits.
    ///
    /// # Errors
    /// T0086 for a text that the plan cannot hold, or T0087 for a failed rank or a plan that returns ids.
    pub fn compute_logits(&mut self, ids: &[u32]) -> Result<Vec<f32>, Diagnostic> {
        let request =
            TextRequest { prompt: ids.to_vec(), max_ids: 1, sampling: Sampling::default(), kind: None };
        self.scheduler.open(&[request])?;
        let mut logits = Vec::new();
        while !self.scheduler.has_read_prompts()
            && let Some(outputs) = self.run_next()?
        {
            logits.extend(self.scheduler.take_logits(&outputs)?);
        }
        self.scheduler.close();
        Ok(logits)
    }

    /// Runs the next call, or returns `None` if every text has ended.
    fn run_next(&mut self) -> Result<Option<Tensors>, Diagnostic> {
        let Some(request) = self.scheduler.next_call()? else { return Ok(None) };
        let (reads_prompt, rows) = self.scheduler.describe_call();
        let begun = Instant::now();
        let outputs = self.run_call(request)?;
        let times = if reads_prompt { &mut self.prefill } else { &mut self.decode };
        times.add_call(rows, begun.elapsed());
        Ok(Some(outputs))
    }

    /// Plans a call as the leader of a run of processes does, and runs it on every rank.
    fn run_call(&mut self, request: TokenRequest) -> Result<Tensors, Diagnostic> {
        let planned = self.director.plan_tokens(&request, &self.context.program_index);
        let call = planned.map_err(first_diagnostic)?;
        let Some(meta) = call.meta.clone() else { return Ok(Tensors::default()) };
        let ready = ReadyCall::from_plan(self.next_call, &call, request.inputs);
        self.next_call += 1;
        self.ranks.begin_call(&ready)?;
        self.ranks.finish_call(&meta)
    }
}
