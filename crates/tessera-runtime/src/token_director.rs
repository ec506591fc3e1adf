//! Plans the calls of a language model on the leader. The application chooses which sequences a call brings; the
//! director checks that choice against the sequences so far, and adds the expected totals.

use tessera_base::{Diagnostic, Diagnostics};

use crate::director::{CallPlan, call_meta};
use crate::paged_cache::PagedCacheState;
use crate::program_index::ProgramIndex;
use crate::wire::{CallWork, PhaseCall, Tensors, TokenWork};

/// A requested call of a language model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRequest {
    /// The sequences that end, begin, and bring rows.
    pub work: TokenWork,
    /// The programs of the bucket in order, each with its scalars. Each program but the first decodes the ids that its
    /// predecessor chose.
    pub phases: Vec<PhaseCall>,
    /// The tensors that the first program reads.
    pub inputs: Tensors,
}

/// Plans the calls of a language model one after the other.
#[derive(Debug, Clone)]
pub struct TokenDirector {
    state: PagedCacheState,
}

impl TokenDirector {
    /// Creates a director of a session whose calls begin in this state.
    #[must_use]
    pub fn new(state: PagedCacheState) -> TokenDirector {
        TokenDirector { state }
    }

    /// Plans a call. On an error the director is unchanged.
    ///
    /// # Errors
    /// A diagnostic for every problem of the request.
    pub fn plan_tokens(
        &mut self,
        request: &TokenRequest,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        let found: Diagnostics = request.phases.iter().flat_map(|p| programs.check_args(p)).collect();
        if !found.is_empty() {
            return Err(found);
        }
        let mut state = self.state.clone();
        let one = |d: Diagnostic| vec![d];
        state.begin_call(&request.work).map_err(one)?;
        request.phases.iter().try_for_each(|phase| state.apply_phase(phase)).map_err(one)?;
        let work = CallWork::Tokens(request.work.clone());
        let meta = call_meta(request.phases.clone(), work, programs, state.state_digest())?;
        let chunk = self.state.next_call();
        self.state = state;
        Ok(CallPlan::new_infer(chunk, self.state.epoch(), meta))
    }

    /// Forgets every sequence.
    pub(crate) fn reset(&mut self) -> Result<(), Diagnostic> {
        self.state.reset()
    }

    /// Returns the state after the last planned call.
    pub(crate) fn state(&self) -> &PagedCacheState {
        &self.state
    }
}
