//! Where the experts of a layer lie, as the programs that are traced with it state.

use std::sync::{Mutex, PoisonError};

use tessera_base::Diagnostic;
use tessera_cli::codes::T1509;
use tessera_ir::{EvictionPolicy, ExpertTier, Op, Opcode, ValueId};

use crate::trace::TraceState;

/// What a layer states of its tiers, and whether a program already states it.
#[derive(Debug, Default)]
pub(crate) struct LayerTier(Mutex<TierState>);

#[derive(Debug, Default)]
struct TierState {
    request: Option<TierRequest>,
    is_traced: bool,
}

/// A registration, whose numbers are checked.
#[derive(Debug, Clone, Copy)]
pub(crate) struct TierRequest {
    pub(crate) resident: u64,
    pub(crate) window: u64,
    pub(crate) policy: EvictionPolicy,
}

impl LayerTier {
    /// Registers the layer for the programs that are traced from now on.
    ///
    /// # Errors
    /// T1509 if a program was traced with it before.
    pub(crate) fn register(&self, request: TierRequest) -> Result<(), Diagnostic> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if state.is_traced {
            let message =
                "a program with this layer was traced before, and its experts lie in one tier there";
            return Err(refuse(message.into(), "register the layer before the first graph.trace with it"));
        }
        state.request = Some(request);
        Ok(())
    }

    /// States the tiers of a layer's weights in the program that is being traced, if the layer is registered.
    ///
    /// # Errors
    /// T1509 for experts that are no weights of the program, or that it uses twice.
    pub(crate) fn state_in_program(&self, t: &mut TraceState, banks: &[ValueId]) -> Result<(), Diagnostic> {
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let ops = &t.builder.program().ops;
        let find_op = |bank: &ValueId| ops.iter().find(|op| op.results.first() == Some(bank));
        let are_weights =
            banks.iter().all(|bank| find_op(bank).is_some_and(|op| op.opcode == Opcode::Weight));
        state.is_traced |= are_weights;
        let Some(TierRequest { resident, window, policy }) = state.request else { return Ok(()) };
        if !are_weights {
            let message = "the experts of a registered layer come with each call, so no tier can hold them";
            let hint = "call the layer in a function that graph.trace takes, on arrays from outside of it";
            return Err(refuse(message.into(), hint));
        }
        if banks.iter().any(|bank| find_op(bank).is_some_and(Op::states_tier)) {
            let message = "a program uses the experts of a registered layer twice";
            return Err(refuse(
                message.into(),
                "give each use experts of its own, or leave them in one tier",
            ));
        }
        let layers = ops.iter().filter_map(Op::expert_tier).map(|tier| tier.layer + 1);
        let layer = layers.max().unwrap_or(0);
        let tier = ExpertTier { layer, resident, window, policy };
        for bank in banks {
            t.builder.set_source_attrs(*bank, tier.to_attrs());
        }
        Ok(())
    }
}

/// Returns the diagnostic of a registration that no run could follow.
pub(crate) fn refuse(message: String, hint: &str) -> Diagnostic {
    Diagnostic::error(&T1509, message).with_hint(hint)
}
