//! Collectives of a run that no computation hides, from its flight records.

use tessera_report::flight::{CollectiveProgress, FlightEntry, FlightLog};

use super::PlanWithRuns;
use crate::doctor::DoctorReport;

/// Communication time of a rank that no computation hides.
pub(crate) struct ExposedTime {
    pub(crate) rank: u32,
    pub(crate) share: f64,
    pub(crate) op: String,
}

/// Returns the rank with the largest share of exposed communication, between its first phase after
/// warm-up and its last.
pub(super) fn most_exposed_rank(flights: &[FlightLog]) -> Option<ExposedTime> {
    let of = |f: &FlightLog| {
        let phases = f.lines.iter().filter_map(|l| match &l.entry {
            FlightEntry::Phase(p) => Some((l.at_ns, p)),
            _ => None,
        });
        let warm_up = phases.clone().map(|(_, p)| p.call).min()?;
        let (mut from, mut to) = (u64::MAX, 0);
        for (at, p) in phases.filter(|(_, p)| p.call > warm_up && p.end_ns > 0) {
            (from, to) = (from.min(at), to.max(p.end_ns));
        }
        let span_ns = to.checked_sub(from).filter(|w| *w > 0)?;
        let mut by_op = std::collections::BTreeMap::<&str, u64>::new();
        for l in &f.lines {
            if let FlightEntry::Collective(c) = &l.entry
                && c.state == CollectiveProgress::Done
                && (from..to).contains(&l.at_ns)
            {
                *by_op.entry(&c.op).or_default() += c.exposed_ns.min(c.end_ns.saturating_sub(l.at_ns));
            }
        }
        let (op, _) = by_op.iter().max_by_key(|(_, ns)| **ns)?;
        let open: u64 = by_op.values().sum();
        Some(ExposedTime { rank: f.header.rank, share: open as f64 / span_ns as f64, op: (*op).to_string() })
    };
    flights.iter().filter_map(of).max_by(|a, b| a.share.total_cmp(&b.share))
}

/// Observes the exposed collectives of the last run, and returns those of the rank with the largest share.
pub(crate) fn add_exposed_observation(patient: &PlanWithRuns, out: &mut DoctorReport) -> Option<ExposedTime> {
    let open = patient.runs.last().and_then(|r| most_exposed_rank(&r.flights));
    match &open {
        Some(o) => out.add_observation(
            "exposed collectives",
            format!("{:.1} % of rank {}'s time, including waits for other ranks", o.share * 100.0, o.rank),
        ),
        None if patient.plan.sealed().mesh().world_size() == 1 => {
            out.add_observation("exposed collectives", "none: one rank".to_string())
        }
        None => {
            out.not_recorded.push("exposed collectives: the flight records contain no collective".to_string())
        }
    }
    open
}
