//! Rehearses the start of a run: the processes that a launcher started meet as for a run on devices,
//! and end; then rank 0 simulates the plan alone.
//!
//! A simulation needs one clock, so its ranks are in one process. What a rehearsal shows is the part
//! that a simulation leaves out: that every host starts, finds rank 0, proves that it belongs to the
//! run, holds the same plan and build, and reaches every rank to which it needs a control link.

use tessera_base::{Diagnostic, Diagnostics};
use tessera_runtime::driver::StopHandle;
use tessera_runtime::driver::rendezvous::join_peers;

use crate::join::{JoinOptions, build_rendezvous};
use crate::plan::Plan;
use crate::stream_options::StreamOptions;

/// What the ranks of a process learned when all ranks met.
#[derive(Debug)]
pub struct Meeting {
    /// The listening address of each rank of the run, in rank order.
    pub addresses: Vec<String>,
    /// Strangers that connected, and other conditions worth reporting.
    pub notes: Diagnostics,
}

/// Meets all ranks of the run with these ranks, one thread for each, and closes the links.
///
/// # Errors
/// Everything that is wrong on one of these ranks or, as reported by rank 0, on another.
///
/// # Panics
/// Panics if `ranks` is empty.
pub fn meet_ranks(
    plan: &Plan,
    options: &StreamOptions,
    ranks: &[JoinOptions],
    interrupt: &StopHandle,
) -> Result<Meeting, Diagnostics> {
    let meet = |join: &JoinOptions| -> Result<Meeting, Diagnostics> {
        let spec = build_rendezvous(plan, options.device, &options.delays, join)?;
        let mut notes = Vec::new();
        let peers = join_peers(&spec, interrupt, &mut |d: Diagnostic| notes.push(d), &mut || Ok(()))?;
        Ok(Meeting { addresses: peers.addresses.clone(), notes })
    };
    let meet = &meet;
    let outcomes: Vec<Result<Meeting, Diagnostics>> = std::thread::scope(|s| {
        let threads: Vec<_> = ranks.iter().map(|join| s.spawn(move || meet(join))).collect();
        threads
            .into_iter()
            .map(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
            .collect()
    });
    let (mut met, mut problems): (Option<Meeting>, Diagnostics) = (None, Vec::new());
    for outcome in outcomes {
        match (outcome, &mut met) {
            (Err(ds), _) => ds.into_iter().for_each(|d| {
                // Rank 0 tells each rank of this process the same.
                if problems.iter().all(|p: &Diagnostic| (p.code, &p.message) != (d.code, &d.message)) {
                    problems.push(d);
                }
            }),
            (Ok(meeting), None) => met = Some(meeting),
            (Ok(meeting), Some(met)) => met.notes.extend(meeting.notes),
        }
    }
    if !problems.is_empty() {
        return Err(problems);
    }
    Ok(met.expect("a process has at least one rank"))
}
