//! Builds findings: their sentences, evidence and counterexamples.

use tessera_base::{Counterexample, Mismatch, RankCollective, WaitEdge};

use super::phrases::{
    describe_collective, describe_last_event, describe_oldest_pending, describe_phase, describe_place,
    describe_signature, format_ranks, format_seconds, group_with_members,
};
use super::rank_view::{ObservedCollective, PlanDivergence, RankView};
use super::wait_graph::{CollectiveMismatch, WaitNode, type_dtype};
use super::{
    AutopsyRunState, Finding, FindingClass, Investigation, LAUNCHER_GONE, ProcessEnd, ProcessVitals,
    is_own_failure,
};
use crate::flight::{CollectiveProgress, FlightCollective, write_ranks};

impl Finding {
    /// Creates a finding without a chain of waits and without a counterexample.
    fn new(class: FindingClass, ranks: &[u32], summary: impl Into<String>, evidence: Vec<String>) -> Finding {
        let (ranks, summary) = (ranks.to_vec(), summary.into());
        Finding { class, ranks, summary, evidence, chain: Vec::new(), counterexample: None }
    }
}

/// Builds the finding for a rank whose collectives differ from the plan.
pub(super) fn divergence_finding(
    case: &Investigation<'_>,
    v: &RankView<'_>,
    d: &PlanDivergence<'_>,
) -> Finding {
    let rank = v.rank;
    let (summary, at, mut evidence) = match d {
        PlanDivergence::Different(c) => {
            let done = if c.state == CollectiveProgress::Refused { "was about to issue" } else { "issued" };
            let wants = c.planned_line.as_deref().unwrap_or("no further collective");
            let evidence = vec![
                format!("the plan: {wants}"),
                format!(
                    "rank {rank}: {} {} {}{}",
                    c.group,
                    c.op,
                    c.ty,
                    c.reduction.as_ref().map_or(String::new(), |r| format!(" reduction={r}"))
                ),
            ];
            (
                format!(
                    "rank {rank} diverged from the plan: at #{} of {} it {done} a different collective",
                    c.pos,
                    describe_phase(c)
                ),
                Some(*c),
                evidence,
            )
        }
        PlanDivergence::Missing { phase, moved } => {
            let wants = phase.missing_line.as_deref().unwrap_or_default();
            let at = describe_place(&phase.phase, phase.call, phase.chunk);
            let mut evidence = vec![format!("missing at the end: {wants}")];
            evidence.extend(moved.map(|c| {
                format!(
                    "the first op at the wrong position is #{}: the skipped collective was most likely planned there",
                    c.pos
                )
            }));
            let summary = format!(
                "rank {rank} diverged from the plan: {at} ended after {} of {} collectives",
                phase.issued, phase.planned_count
            );
            (summary, *moved, evidence)
        }
    };
    let others: Vec<u32> = case
        .views
        .iter()
        .filter(|o| o.waiting_collective().is_some() && o.rank != rank)
        .map(|o| o.rank)
        .collect();
    if !others.is_empty() {
        evidence.push(format!("{} in a collective", describe_left_waiting(&others)));
    }
    Finding {
        class: FindingClass::Diverged,
        ranks: vec![rank],
        summary,
        evidence,
        chain: wait_chain(case, rank),
        counterexample: at
            .and_then(|c| peer_call_counterexample(case, v, c))
            .or_else(|| missing_call_counterexample(case, v)),
    }
}

fn describe_left_waiting(ranks: &[u32]) -> String {
    match ranks {
        [one] => format!("rank {one} still waits"),
        _ => format!("ranks {} still wait", write_ranks(ranks)),
    }
}

/// Builds the finding for members that issued different collectives at one position.
pub(super) fn mismatch_finding(case: &Investigation<'_>, d: &CollectiveMismatch) -> Finding {
    let call = |(rank, index): (u32, usize)| case.view(rank).and_then(|v| v.collectives.get(index));
    let ranks = |side: &[(u32, usize)]| write_ranks(&side.iter().map(|s| s.0).collect::<Vec<_>>());
    let tie = d.minority.len() == d.majority.len();
    let mut odd: Vec<u32> = d.minority.iter().map(|s| s.0).collect();
    if tie {
        odd.extend(d.majority.iter().map(|s| s.0));
        odd.sort_unstable();
    }
    let at = d.minority.first().and_then(|s| call(*s));
    let summary = format!(
        "{} at #{} of {}: ranks {} differ from ranks {} in the {}",
        at.map_or(String::new(), |c| c.communicator.group.clone()),
        at.map_or(0, |c| c.entry.pos),
        at.map_or(String::new(), |c| describe_phase(c.entry)),
        ranks(&d.minority),
        ranks(&d.majority),
        d.field
    );
    let line = |side: &[(u32, usize)]| {
        let c = side.first().and_then(|s| call(*s));
        c.map(|c| format!("ranks {}: {}", ranks(side), describe_signature(c.entry)))
    };
    let mut evidence: Vec<String> = [&d.majority, &d.minority].into_iter().filter_map(|s| line(s)).collect();
    if tie {
        evidence.push(
            "as many ranks agree with one side as with the other: the records do not show which are wrong"
                .into(),
        );
    }
    let side = |s: &[(u32, usize)]| s.first().and_then(|s| Some((s.0, call(*s)?)));
    let proof = side(&d.majority).zip(side(&d.minority)).map(|((rank, theirs), (odd_rank, odd))| {
        mismatch_counterexample(odd, d.field, [(rank, Some(theirs)), (odd_rank, Some(odd))])
    });
    Finding { counterexample: proof, ..Finding::new(FindingClass::Diverged, &odd, summary, evidence) }
}

/// Builds the finding for a rank that reported a failure of its own.
pub(super) fn own_failure_finding(
    case: &Investigation<'_>,
    v: &RankView<'_>,
    m: &crate::flight::FlightMark,
) -> Finding {
    let code = m.code.as_deref().unwrap_or("no code");
    let class = m.class.as_deref().unwrap_or("no failure class");
    let mut evidence = vec![format!("[{code}] {}", m.detail.as_deref().unwrap_or_default())];
    let later =
        case.views.iter().filter(|o| o.rank != v.rank && o.marks().any(|(_, m)| is_own_failure(o.rank, m)));
    let later: Vec<u32> = later.map(|o| o.rank).collect();
    if !later.is_empty() {
        evidence.push(format!("ranks {} failed later, probably as a consequence", write_ranks(&later)));
    }
    let summary = format!("rank {} was the first to report a failure of its own: {class}", v.rank);
    Finding {
        chain: wait_chain(case, v.rank),
        ..Finding::new(classify_failure(class), &[v.rank], summary, evidence)
    }
}

/// Builds the finding for a failure that the leader reported about a rank.
pub(super) fn reported_failure_finding(
    about: Option<u32>,
    code: Option<&str>,
    class: &str,
    text: &str,
) -> Finding {
    let summary = match about {
        Some(rank) => format!("the leader reported rank {rank}: {class}"),
        None => format!("the run ended: {class}"),
    };
    let evidence = vec![format!("[{}] {text}", code.unwrap_or("no code"))];
    Finding::new(classify_failure(class), about.as_slice(), summary, evidence)
}

fn classify_failure(words: &str) -> FindingClass {
    match words {
        "ranks drifted apart" => FindingClass::Drifted,
        "the lockstep protocol was broken"
        | "ranks have different plans or settings"
        | "refused before any rank waited" => FindingClass::Refused,
        LAUNCHER_GONE => FindingClass::LauncherGone,
        _ => FindingClass::Failed,
    }
}

/// Builds the finding for a rank that fell silent.
pub(super) fn silence_finding(case: &Investigation<'_>, v: &RankView<'_>) -> Finding {
    let rank = v.rank;
    let waiter = case.views.iter().find(|w| case.waits.awaited_ranks(w.rank).contains(&rank));
    let wanted = waiter.and_then(|w| w.waiting_collective()).map(|c| c.entry);
    // How far a rank without a flight record came is unknown.
    let never = v.flight.is_some() && wanted.is_some_and(|c| v.last_call < c.call);
    let mut evidence = Vec::new();
    match v.flight {
        None => evidence.push(
            "it left no flight record here: it died before it joined, or its file is on another host"
                .to_string(),
        ),
        Some(_) => evidence.push(format!(
            "its last event: {}, {} before {}",
            describe_last_event(v),
            format_seconds(case.end_ns.saturating_sub(v.last_wall_ns)),
            if case.state == AutopsyRunState::Running { "now" } else { "the last event of the run" }
        )),
    }
    let stalled = was_reported(case, rank, "a rank stalled");
    let died = !stalled && was_reported(case, rank, "a rank died");
    match process_vitals(case, rank) {
        Some(ProcessVitals::Stopped) => {
            evidence.push(format!("its process{} is stopped (SIGSTOP or a debugger)", format_pid(case, v)))
        }
        Some(ProcessVitals::Gone) => evidence.push("its process is gone".to_string()),
        Some(ProcessVitals::Alive) => evidence.push(format!("its process{} is alive", format_pid(case, v))),
        None => {}
    }
    if let Some(end) = process_end(case, rank) {
        match (end.signal, end.status) {
            (Some(9), _) if stalled => {
                evidence.push("it did not respond and was killed (signal 9) when the run ended".to_string());
            }
            (Some(n), _) => evidence.push(format!("its process was killed by signal {n}{}", signal_name(n))),
            (None, Some(0)) | (None, None) => {}
            (None, Some(s)) => evidence.push(format!("its process exited with status {s}")),
        }
    }
    if let Some(next) = next_planned_collective(case, v) {
        evidence.push(format!("the next collective in the plan: {next}"));
    }
    let summary = match (never, wanted) {
        (true, Some(c)) => format!(
            "rank {rank} never began call {} (chunk {}), in which other ranks wait for it",
            c.call, c.chunk
        ),
        (_, Some(_)) if v.flight.is_none() && !died => {
            format!("other ranks wait for rank {rank}, which has no flight record here")
        }
        _ if !case.waits.awaited_ranks(rank).is_empty() => {
            format!(
                "rank {rank} fell silent while it waited for {}",
                format_ranks(&case.waits.awaited_ranks(rank))
            )
        }
        (_, Some(_)) => format!("rank {rank} fell silent: other ranks wait for it, and it waits for no rank"),
        _ => format!("rank {rank} fell silent and never reported again"),
    };
    Finding {
        class: if never { FindingClass::NeverReached } else { FindingClass::HostSilent },
        ranks: vec![rank],
        summary,
        evidence,
        chain: wait_chain(case, rank),
        counterexample: missing_call_counterexample(case, v),
    }
}

/// Returns whether a rank or the run record reported a failure of this class about `rank`.
pub(super) fn was_reported(case: &Investigation<'_>, rank: u32, class: &str) -> bool {
    let by_rank = case.views.iter().any(|v| {
        v.marks().any(|(_, m)| {
            m.event == "failed" && m.blamed_rank == Some(rank) && m.class.as_deref() == Some(class)
        })
    });
    by_rank || case.recorded_cause().is_some_and(|c| c.rank == Some(rank) && c.class == class)
}

/// Returns how a rank's process ended, as its launcher observed it.
pub(super) fn process_end<'a>(case: &'a Investigation<'_>, rank: u32) -> Option<&'a ProcessEnd> {
    case.evidence.process_ends.iter().find(|e| e.rank == rank)
}

/// Returns the state of a rank's process. A process whose end the launcher observed is gone, even
/// if its id is in use again.
pub(super) fn process_vitals(case: &Investigation<'_>, rank: u32) -> Option<ProcessVitals> {
    let ended = process_end(case, rank).map(|_| ProcessVitals::Gone);
    ended.or_else(|| case.evidence.vitals.get(&rank).copied())
}

/// Formats the id of a rank's process with a leading space. The result is empty for a process that
/// is gone or probably gone: a run that is over leaves no process behind.
pub(super) fn format_pid(case: &Investigation<'_>, v: &RankView<'_>) -> String {
    let there = match process_vitals(case, v.rank) {
        Some(ProcessVitals::Gone) => false,
        Some(_) => true,
        None => case.state == AutopsyRunState::Running,
    };
    v.flight.filter(|_| there).map_or(String::new(), |f| format!(" {}", f.header.pid))
}

fn signal_name(n: i32) -> &'static str {
    match n {
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        9 => " (SIGKILL: from a user, or from the kernel when memory ran out)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// Builds the finding for a rank whose device lags behind.
pub(super) fn device_behind_finding(case: &Investigation<'_>, v: &RankView<'_>) -> Finding {
    let oldest = describe_oldest_pending(v);
    let summary = format!("the device of rank {} lags behind its peers", v.rank);
    let evidence = vec![
        format!("its oldest unfinished collective: {oldest}"),
        "its host has reached the same collective as the others".to_string(),
    ];
    Finding {
        chain: wait_chain(case, v.rank),
        ..Finding::new(FindingClass::DeviceBehind, &[v.rank], summary, evidence)
    }
}

/// Builds the finding for a cycle of waits.
pub(super) fn cycle_finding(case: &Investigation<'_>, ranks: &[u32]) -> Finding {
    // Each rank of the cycle waits for another one in it; this loop follows the waits once around.
    let mut order: Vec<u32> = Vec::new();
    let mut at = ranks.first().copied();
    while let Some(rank) = at.filter(|r| !order.contains(r)) {
        order.push(rank);
        at = case.waits.awaited_ranks(rank).into_iter().find(|r| ranks.contains(r));
    }
    let waiting = |r: u32| case.view(r).and_then(|v| v.waiting_collective());
    let chain: Vec<String> = order.iter().map(|r| describe_wait(case, WaitNode::Host(*r))).collect();
    // Each link waits for the previous link, so the drawing uses the reverse order.
    let links: Vec<WaitEdge> = order
        .iter()
        .rev()
        .filter_map(|r| {
            let holds = waiting(*r)?;
            let for_me = order.iter().find(|o| case.waits.awaited_ranks(**o).contains(r) && *o != r)?;
            Some(WaitEdge {
                rank: *r,
                blocked_in: counterexample_step(holds),
                not_reached: counterexample_step(waiting(*for_me)?),
            })
        })
        .collect();
    Finding {
        class: FindingClass::Cycle,
        ranks: ranks.to_vec(),
        summary: format!("ranks {} wait for each other in a cycle", write_ranks(ranks)),
        evidence: vec!["each of them is in a collective that another one has not reached: they used their groups in different orders".into()],
        chain,
        counterexample: (links.len() > 1).then_some(Counterexample::WaitCycle(links)),
    }
}

/// Builds the finding for a collective that all members have reached and that does not complete.
pub(super) fn transport_finding(case: &Investigation<'_>, ranks: &[u32]) -> Finding {
    let call = ranks.first().and_then(|r| case.view(*r)?.waiting_collective());
    let call = call.map_or(String::new(), |c| describe_collective(c.entry));
    let summary = format!("all of ranks {} are in {call}, which does not complete", write_ranks(ranks));
    let evidence = vec!["no rank is missing: the transport between them makes no progress".to_string()];
    Finding::new(FindingClass::Transport, &[], summary, evidence)
}

/// Builds the finding for two ranks that lost each other.
pub(super) fn cut_link_finding(a: u32, b: u32) -> Finding {
    let summary = format!("ranks {a} and {b} lost the connection between them");
    let evidence = vec!["each of them reported the other one, and both lived on to report it".to_string()];
    Finding::new(FindingClass::Transport, &[], summary, evidence)
}

/// Builds the finding for a run whose launcher is gone.
pub(super) fn lost_launcher_finding() -> Finding {
    let summary = "the launching process ended, and the ranks exited because of it";
    Finding::new(FindingClass::LauncherGone, &[], summary, vec!["no rank failed before that".to_string()])
}

/// Explains why a rank that the run record names is not among the findings.
pub(super) fn explain_innocence(case: &Investigation<'_>, v: &RankView<'_>) -> String {
    let direct = case.waits.awaited_ranks(v.rank);
    match v.waiting_collective() {
        Some(c) if !direct.is_empty() => {
            format!(
                "rank {} waited in {} for {}",
                v.rank,
                describe_collective(c.entry),
                format_ranks(&direct)
            )
        }
        _ => format!("the flight records show no fault of this rank ({})", describe_last_event(v)),
    }
}

/// Describes the waits that lead to a rank.
fn wait_chain(case: &Investigation<'_>, to: u32) -> Vec<String> {
    let nodes = case.waits.chain_to(to);
    nodes.into_iter().filter(|n| n.rank() != to).map(|n| describe_wait(case, n)).collect()
}

fn describe_wait(case: &Investigation<'_>, node: WaitNode) -> String {
    let rank = node.rank();
    let Some(v) = case.view(rank) else { return String::new() };
    match (node, v.waiting_collective()) {
        (WaitNode::Host(_), Some(c)) => {
            let since = format_seconds(case.end_ns.saturating_sub(v.wall_ns(c.at_ns)));
            format!(
                "rank {rank} waits in {} for {}, for {since}",
                describe_collective(c.entry),
                format_ranks(&case.waits.awaited_ranks(rank))
            )
        }
        _ => format!("the device of rank {rank} is at {}", describe_oldest_pending(v)),
    }
}

/// Returns the collective that a rank would have issued next, according to the plan.
fn next_planned_collective(case: &Investigation<'_>, v: &RankView<'_>) -> Option<String> {
    let p = v.phase.filter(|p| p.end_ns == 0)?;
    let issued = v
        .collectives
        .iter()
        .filter(|c| (c.entry.call, c.entry.step) == (p.call, p.step))
        .map(|c| c.entry.pos + 1)
        .max()
        .unwrap_or(0);
    let line = case.evidence.plan.get(&(p.phase.clone(), v.rank))?.get(issued as usize)?;
    Some(format!("{line}, #{issued} of {}", p.phase))
}

fn counterexample_step(call: &ObservedCollective<'_>) -> RankCollective {
    let c = call.entry;
    RankCollective {
        description: format!(
            "{} over {} of {}",
            c.op,
            group_with_members(&c.group, &call.communicator.ranks),
            c.ty
        ),
        op: c.op.clone(),
        dtype: type_dtype(&c.ty).to_string(),
        shape: c.ty.strip_prefix(type_dtype(&c.ty)).unwrap_or_default().to_string(),
        ranks: call.communicator.ranks.clone(),
        stream: c.phase.clone(),
        index: c.pos as usize,
        source: None,
    }
}

/// Returns a counterexample of two ranks at the position of `at`, each with its call.
fn mismatch_counterexample(
    at: &ObservedCollective<'_>,
    field: &str,
    sides: [(u32, Option<&ObservedCollective<'_>>); 2],
) -> Counterexample {
    Counterexample::Mismatch(Mismatch {
        group: group_with_members(&at.communicator.group, &at.communicator.ranks),
        position: at.sequence_index,
        field: field.to_string(),
        sides: sides.map(|(rank, call)| (rank, call.map(counterexample_step))),
    })
}

/// Returns a counterexample of a rank that did not reach a collective and a rank that waits for it.
fn missing_call_counterexample(case: &Investigation<'_>, v: &RankView<'_>) -> Option<Counterexample> {
    let waiter = case.views.iter().find(|w| case.waits.awaited_ranks(w.rank).contains(&v.rank))?;
    let call = waiter.waiting_collective()?;
    Some(mismatch_counterexample(call, "op", [(waiter.rank, Some(call)), (v.rank, None)]))
}

/// Returns a counterexample of a rank's collective and another member's at the same position.
fn peer_call_counterexample(
    case: &Investigation<'_>,
    v: &RankView<'_>,
    c: &FlightCollective,
) -> Option<Counterexample> {
    let mine = v.collectives.iter().find(|x| std::ptr::eq(x.entry, c))?;
    let same =
        |o: &&ObservedCollective<'_>| (o.entry.call, o.entry.step, o.entry.pos) == (c.call, c.step, c.pos);
    let (rank, theirs) = case
        .views
        .iter()
        .filter(|o| o.rank != v.rank && o.divergence.is_none())
        .find_map(|o| Some((o.rank, o.collectives.iter().find(same)?)))?;
    let field = if theirs.communicator.group != mine.communicator.group {
        "group"
    } else if theirs.entry.op != c.op {
        "op"
    } else {
        "type"
    };
    Some(mismatch_counterexample(theirs, field, [(rank, Some(theirs)), (v.rank, Some(mine))]))
}
