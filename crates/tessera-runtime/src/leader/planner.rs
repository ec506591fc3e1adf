//! The plans of calls of each kind of session.

use tessera_base::{Diagnostic, Diagnostics};

use crate::array_director::ArrayDirector;
use crate::call_state::{CallState, SessionSpec};
use crate::codes::T0721;
use crate::director::{CallPlan, ChunkRequest, Director, warmup_meta};
use crate::paged_cache::PagedCacheState;
use crate::program_index::ProgramIndex;
use crate::token_director::{TokenDirector, TokenRequest};
use crate::wire::{CallAction, PhaseCall};

/// The director of the session's kind of work.
#[derive(Debug, Clone)]
pub(super) enum CallPlanner {
    Video(Director),
    Text(TokenDirector),
    Arrays(ArrayDirector),
}

impl CallPlanner {
    pub(super) fn new(spec: &SessionSpec) -> Result<CallPlanner, Diagnostics> {
        Ok(match spec {
            SessionSpec::Video(stream) => CallPlanner::Video(Director::new(stream.clone())?),
            SessionSpec::Text(pages) => {
                CallPlanner::Text(TokenDirector::new(PagedCacheState::new(*pages).map_err(|d| vec![d])?))
            }
            SessionSpec::Arrays => CallPlanner::Arrays(ArrayDirector::default()),
        })
    }

    pub(super) fn plan_chunk(
        &mut self,
        request: &ChunkRequest,
        video_step: Option<u32>,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        match self {
            CallPlanner::Video(director) => director.plan_chunk_from(request, video_step, programs),
            CallPlanner::Text(_) | CallPlanner::Arrays(_) => {
                Err(vec![Diagnostic::error(&T0721, "a chunk was requested, but no video model runs")])
            }
        }
    }

    pub(super) fn plan_tokens(
        &mut self,
        request: &TokenRequest,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        match self {
            CallPlanner::Text(director) => director.plan_tokens(request, programs),
            CallPlanner::Video(_) | CallPlanner::Arrays(_) => Err(vec![Diagnostic::error(
                &T0721,
                "rows of tokens were requested, but no language model runs",
            )]),
        }
    }

    pub(super) fn plan_arrays(
        &mut self,
        phase: &PhaseCall,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        match self {
            CallPlanner::Arrays(director) => director.plan_arrays(phase, programs),
            CallPlanner::Video(_) | CallPlanner::Text(_) => {
                Err(vec![Diagnostic::error(&T0721, "an array program was requested, but a model runs")])
            }
        }
    }

    /// Plans the warm-up, which runs every program once and leaves the state as it is.
    pub(super) fn plan_warmup(&self, programs: &ProgramIndex) -> Result<CallPlan, Diagnostics> {
        let meta = warmup_meta(programs, self.state().state_digest())?;
        Ok(CallPlan { meta: Some(meta), ..self.plan_without_work(CallAction::Warmup) })
    }

    /// Plans a call without output: a reset, a reload, a shutdown or a no-op.
    pub(super) fn plan_control_call(&mut self, action: CallAction) -> Result<CallPlan, Diagnostics> {
        match self {
            CallPlanner::Video(director) => director.plan_control_call(action),
            CallPlanner::Text(director) => {
                if matches!(action, CallAction::Reset | CallAction::Reload) {
                    director.reset().map_err(|d| vec![d])?;
                }
                Ok(self.plan_without_work(action))
            }
            CallPlanner::Arrays(director) => {
                if matches!(action, CallAction::Reset | CallAction::Reload) {
                    director.reset().map_err(|d| vec![d])?;
                }
                Ok(self.plan_without_work(action))
            }
        }
    }

    /// Returns the state after the last planned call.
    pub(super) fn state(&self) -> CallState {
        match self {
            CallPlanner::Video(director) => CallState::Video(director.cache_state().clone()),
            CallPlanner::Text(director) => CallState::Text(director.state().clone()),
            CallPlanner::Arrays(director) => CallState::Arrays(director.state().clone()),
        }
    }

    /// Returns a call in the current state.
    fn plan_without_work(&self, action: CallAction) -> CallPlan {
        let state = self.state();
        let (chunk, cache_epoch) = (state.next_unit(), state.epoch());
        CallPlan { action, chunk, cache_epoch, meta: None, opens_scene: false, evicted_frames: 0 }
    }
}
