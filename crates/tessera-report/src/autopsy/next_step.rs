//! The kind of problem, and the step that the user should take next.

use super::findings::{format_pid, process_end, process_vitals, was_reported};
use super::phrases::format_ranks;
use super::{AutopsyRunState, Finding, FindingClass, Investigation, ProcessVitals};

/// Codes of a rank that issued other collectives than its plan or its peers.
const DIVERGENCE_CODES: [&str; 2] = ["T0747", "T0751"];

/// Returns the kind of problem and the recommended next step.
pub(super) fn triage_and_next_step(case: &Investigation<'_>, findings: &[Finding]) -> (&'static str, String) {
    let Some(f) = findings.first() else {
        return (
            "none",
            match case.state {
                AutopsyRunState::Complete | AutopsyRunState::Interrupted => "nothing to do: the run ended normally".into(),
                AutopsyRunState::Running => "nothing to do: no wait is longer than work explains. Run the autopsy again if the run makes no progress".into(),
                _ => "the records name no rank: check the last lines of the launcher, the host’s log (dmesg) and the disk".into(),
            },
        );
    };
    let ranks = format_ranks(&f.ranks);
    let dead = f.ranks.iter().any(|r| is_dead(case, *r));
    match f.class {
        // The peers wait in a collective that this rank never joins, or joins with another call.
        FindingClass::Diverged => (
            "hang",
            format!(
                "compare the program of {ranks} with the plan: look for a branch that only it takes, a wrong group handle, or an additional collective (tessera explain T0751)"
            ),
        ),
        FindingClass::Drifted if DIVERGENCE_CODES.contains(&leading_code(f, "T0744").as_str()) => (
            "hang",
            format!(
                "compare the program of {ranks} with the plan: it issued other collectives (tessera explain {})",
                leading_code(f, "T0751")
            ),
        ),
        FindingClass::Drifted => (
            "drift",
            format!(
                "a Franken-model: all collectives matched, and one rank computed something else; compare inputs, weights and state of {ranks} with another rank at the named call; a run with the same seed reproduces it (tessera explain {})",
                leading_code(f, "T0744")
            ),
        ),
        FindingClass::Refused => (
            "refusal",
            format!("read the difference above; no collective ran (tessera explain {})", leading_code(f, "T0740")),
        ),
        FindingClass::Failed => (
            "crash",
            format!(
                "read the failure message of {ranks}; the other ranks failed as a consequence (tessera explain {})",
                leading_code(f, "T0745")
            ),
        ),
        FindingClass::HostSilent | FindingClass::NeverReached if dead => (
            "crash",
            format!(
                "find out what killed {ranks}: check dmesg for the OOM killer, the core dump, and its standard error"
            ),
        ),
        FindingClass::HostSilent | FindingClass::NeverReached => ("hang", silent_rank_next_step(case, f, &ranks)),
        FindingClass::DeviceBehind => {
            ("hang", format!("check the device of {ranks}: a stuck kernel, device errors, its clock rate"))
        }
        FindingClass::Cycle => (
            "hang",
            "use one order of groups on all of these ranks; `tessera check` on the plan or on a trace draws the cycle"
                .to_string(),
        ),
        FindingClass::Transport => {
            ("hang", "check what connects the ranks: links, switches, shared memory".to_string())
        }
        FindingClass::LauncherGone => {
            ("crash", "find out what ended the launcher; the ranks are not at fault".to_string())
        }
    }
}

/// Returns the next step for ranks that other ranks wait for.
fn silent_rank_next_step(case: &Investigation<'_>, f: &Finding, ranks: &str) -> String {
    let views = || f.ranks.iter().filter_map(|r| case.view(*r));
    let pids: String = views().map(|v| format_pid(case, v)).collect();
    if f.ranks.iter().any(|r| process_vitals(case, *r) == Some(ProcessVitals::Stopped)) {
        format!("{ranks} is stopped: kill -CONT{pids} resumes it, if the run still waits")
    } else if !pids.is_empty() {
        format!("inspect the process of {ranks}: its stack (gdb -p{pids}), its disk, its memory")
    } else if views().any(|v| v.flight.is_none()) {
        format!(
            "copy the flight record of {ranks} from its host and run the autopsy again; on that host, inspect its process, its disk and its memory"
        )
    } else {
        let how = match views().all(|v| process_vitals(case, v.rank) == Some(ProcessVitals::Gone)) {
            true => "is gone, so its stack cannot be read",
            false => "belongs to a run that is over",
        };
        format!(
            "the process of {ranks} {how}: check its standard error, its disk and its memory; if the hang recurs, run the autopsy while the run hangs"
        )
    }
}

/// Returns the diagnostic code at the beginning of a finding's first fact, such as `[T0744] …`.
fn leading_code(f: &Finding, otherwise: &str) -> String {
    let first = f.evidence.first().and_then(|e| e.strip_prefix('[')?.split(']').next());
    first.filter(|c| c.starts_with('T')).unwrap_or(otherwise).to_string()
}

/// Returns whether a rank died before the others ended, according to a rank, the launcher or the
/// system.
fn is_dead(case: &Investigation<'_>, rank: u32) -> bool {
    // The launcher kills unresponsive ranks when the run ends, so their kill is not a cause, and
    // ranks that only saw its socket close report a death.
    if was_reported(case, rank, "a rank stalled") {
        return false;
    }
    let killed = process_end(case, rank).is_some_and(|e| e.signal.is_some());
    let alone =
        case.state == AutopsyRunState::Running && process_vitals(case, rank) == Some(ProcessVitals::Gone);
    killed || alone || was_reported(case, rank, "a rank died")
}
