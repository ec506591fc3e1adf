//! The rows of an autopsy's tables: the state of each rank, and the progress of each group.

use super::phrases::{describe_last_event, group_with_members, state_label};
use super::rank_view::{ObservedCommunicator, RankView};
use super::{Finding, FindingClass, GroupProgress, Investigation, RankDiagnosis, is_death};

impl Investigation<'_> {
    /// Returns the rank's row in the report. The first finding that names the rank sets its state.
    pub(super) fn rank_diagnosis(&self, v: &RankView<'_>, findings: &[Finding]) -> RankDiagnosis {
        let culprit = findings.iter().find(|f| f.ranks.contains(&v.rank));
        let failure_mark = v.marks().filter(|(_, m)| m.event == "failed").last().map(|(_, m)| m);
        let state = match (culprit, v.waiting_collective(), failure_mark) {
            (Some(f), ..) => match f.class {
                FindingClass::Diverged => "diverged",
                FindingClass::Failed => "failed",
                FindingClass::Drifted => "drifted",
                FindingClass::Refused => "refused",
                FindingClass::HostSilent => "silent",
                FindingClass::NeverReached => "never arrived",
                FindingClass::DeviceBehind => "device behind",
                FindingClass::Cycle => "in the cycle",
                FindingClass::Transport | FindingClass::LauncherGone => "waits",
            },
            (None, Some(_), _) => "waits",
            (None, None, Some(m))
                if m.is_relayed || m.blamed_rank != Some(v.rank) || is_death(m.class.as_deref()) =>
            {
                "ended as a consequence"
            }
            (None, None, Some(_)) => "failed later",
            (None, None, None) if v.flight.is_none() => "no record",
            (None, None, None) => "healthy",
        };
        RankDiagnosis {
            rank: v.rank,
            state: state.to_string(),
            last_event: describe_last_event(v),
            silent_ns: v.flight.map(|_| self.end_ns.saturating_sub(v.last_wall_ns)),
            waits_for: self.waits.awaited_ranks(v.rank),
        }
    }

    /// Returns the progress of the members of each group of the last call.
    pub(super) fn group_progress(&self) -> Vec<GroupProgress> {
        let last = self.views.iter().map(|v| v.engine_position().0).max().unwrap_or(0);
        let mut channels: Vec<_> = self
            .views
            .iter()
            .flat_map(|v| v.collectives.iter().filter(|c| c.entry.call == last).map(|c| &c.communicator))
            .collect();
        channels.sort();
        channels.dedup();
        let reached = |rank: u32, channel: &ObservedCommunicator| {
            let v = self.view(rank)?;
            let c =
                v.collectives.iter().rev().find(|c| c.entry.call == last && c.communicator == *channel)?;
            Some(format!(
                "{} #{} of {}, {}",
                c.entry.op,
                c.entry.pos,
                c.entry.phase,
                state_label(c.entry.state)
            ))
        };
        let group = |channel: &ObservedCommunicator| GroupProgress {
            group: match channel.pair {
                Some((from, to)) => format!("{} {from} → {to}", channel.group),
                None => group_with_members(&channel.group, &channel.ranks),
            },
            reached: channel
                .ranks
                .iter()
                .map(|r| (*r, reached(*r, channel).unwrap_or_else(|| "not in this call".to_string())))
                .collect(),
        };
        channels.into_iter().map(group).collect()
    }
}
