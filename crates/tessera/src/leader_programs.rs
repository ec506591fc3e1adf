//! What the programs have in common that the leader runs outside the lockstep.

use tessera_device::{Fault, Observer};

/// Returns what a fault of a leader's program says, of whatever kind it is: the leader has no peers.
pub(crate) fn fault_text(fault: Fault) -> String {
    match fault {
        Fault::Failed(text)
        | Fault::Stalled(text)
        | Fault::Aborted(text)
        | Fault::Refused(text)
        | Fault::Poisoned(text) => text,
    }
}

/// The observer of a leader's program, whose progress nobody watches.
pub(crate) struct NoObserver;

impl Observer for NoObserver {
    fn on_issued(&mut self, _: usize) {}
    fn on_progress(&mut self, _: u32) {}
}
