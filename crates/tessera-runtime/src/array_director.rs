//! Plans the calls of array programs on the leader: one program of the plan for each call.

use tessera_base::{Diagnostic, Diagnostics};

use crate::array_state::ArrayCallState;
use crate::director::{CallPlan, call_meta};
use crate::program_index::ProgramIndex;
use crate::wire::{CallWork, PhaseCall, Tensors};

/// A requested call of an array program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrayRequest {
    /// The program in the sealed plan, with the scalars that are equal in every call.
    pub phase: PhaseCall,
    /// The tensors that the program reads, in the order of its inputs.
    pub inputs: Tensors,
}

/// Plans the calls of array programs one after the other.
#[derive(Debug, Clone, Default)]
pub struct ArrayDirector {
    state: ArrayCallState,
}

impl ArrayDirector {
    /// Plans a call. On an error the director is unchanged.
    ///
    /// # Errors
    /// A diagnostic for every problem of the request.
    pub fn plan_arrays(
        &mut self,
        phase: &PhaseCall,
        programs: &ProgramIndex,
    ) -> Result<CallPlan, Diagnostics> {
        let phases = vec![phase.clone()];
        let found: Diagnostics = phases.iter().flat_map(|p| programs.check_args(p)).collect();
        if !found.is_empty() {
            return Err(found);
        }
        let mut state = self.state.clone();
        let one = |d: Diagnostic| vec![d];
        state.begin_call().map_err(one)?;
        phases.iter().try_for_each(|phase| state.apply_phase(phase)).map_err(one)?;
        let meta = call_meta(phases, CallWork::Arrays, programs, state.state_digest())?;
        let chunk = self.state.next_call();
        self.state = state;
        Ok(CallPlan::new_infer(chunk, self.state.epoch(), meta))
    }

    /// Begins an epoch.
    pub(crate) fn reset(&mut self) -> Result<(), Diagnostic> {
        self.state.reset()
    }

    /// Returns the state after the last planned call.
    pub(crate) fn state(&self) -> &ArrayCallState {
        &self.state
    }
}
