//! The explanation of a stall: which ranks wait, and for whom.

use tessera_base::Diagnostic;

use super::SimDevices;
use super::running_program::RunningProgram;
use crate::codes::T0811;

/// Maximum number of ranks that a stall message lists.
const MAX_STALLED_SHOWN: usize = 12;

impl SimDevices {
    /// Explains why ranks have unfinished ops although no event is pending.
    #[must_use]
    pub fn find_stall(&self) -> Option<Diagnostic> {
        if !self.queue.is_empty() {
            return None;
        }
        let stalled_ranks: Vec<usize> =
            (0..self.states.len()).filter(|r| self.states[*r].running.is_some()).collect();
        let first = stalled_ranks.first()?;
        let mut d = Diagnostic::error(
            &T0811,
            format!("{} ranks wait for each other, rank {first} among them", stalled_ranks.len()),
        );
        for rank in stalled_ranks.iter().take(MAX_STALLED_SHOWN) {
            let Some(run) = &self.states[*rank].running else { continue };
            d = d.with_label(
                format!("rank {rank} in {}", run.timed_program.name),
                self.describe_waits(*rank, run),
            );
        }
        if stalled_ranks.len() > MAX_STALLED_SHOWN {
            d = d.with_note(format!(
                "{} more ranks wait in the same way",
                stalled_ranks.len() - MAX_STALLED_SHOWN
            ));
        }
        Some(d)
    }

    /// Describes the collectives that a rank waits for.
    fn describe_waits(&self, rank: usize, run: &RunningProgram) -> String {
        let open = run.timed_program.collectives.iter().zip(&run.launch_keys);
        let mut descriptions = Vec::new();
        for (meet, (lane, nth)) in open {
            let Some(m) = self.pending_launches.get(&(*lane, *nth)) else { continue };
            if !m.arrived.iter().any(|(r, _)| *r == rank) {
                continue;
            }
            let members = &self.communicators.get(*lane).members;
            let missing: Vec<String> = members
                .iter()
                .filter(|r| !m.arrived.iter().any(|(there, _)| *there == r.0 as usize))
                .map(ToString::to_string)
                .collect();
            let why = if m.mismatched {
                "other members joined with another collective".to_string()
            } else {
                String::new()
            };
            let why = if missing.is_empty() { why } else { format!("waits for rank {}", missing.join(", ")) };
            descriptions.push(format!("{} (op {}): {why}", meet.description, meet.op));
        }
        if descriptions.is_empty() {
            "has not reached its first collective".to_string()
        } else {
            descriptions.join("; ")
        }
    }
}
