//! Findings in words and as drawings, and what to do about them.

use tessera_base::{Counterexample, Link, Mismatch, Step};

use super::graph::{Difference, Node, dtype};
use super::view::{Call, Departure, RankView};
use super::{
    Case, Class, Finding, GroupState, LAUNCHER_GONE, ProcessEnd, RankState, RunState, Vitals, is_death,
    is_own_failure,
};
use crate::flight::{Collective, State, write_ranks};

/// A rank that left the plan.
pub(super) fn departed(case: &Case<'_>, v: &RankView<'_>, d: &Departure<'_>) -> Finding {
    let rank = v.rank;
    let (says, at, mut evidence) = match d {
        Departure::Other(c) => {
            let done = if c.state == State::Refused { "was about to issue" } else { "issued" };
            let wants = c.wants.as_deref().unwrap_or("no further collective");
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
                format!("rank {rank} left the plan: at #{} of {} it {done} something else", c.pos, place(c)),
                Some(*c),
                evidence,
            )
        }
        Departure::Missing { phase, moved } => {
            let wants = phase.wants.as_deref().unwrap_or_default();
            let at = format!("{} (call {}, chunk {})", phase.phase, phase.call, phase.chunk);
            let mut evidence = vec![format!("missing at the end: {wants}")];
            evidence.extend(moved.map(|c| {
                format!(
                    "the first op out of its place is #{}: what it skipped most likely stood there",
                    c.pos
                )
            }));
            let says = format!(
                "rank {rank} left the plan: {at} ended after {} of {} collectives",
                phase.issued, phase.of
            );
            (says, *moved, evidence)
        }
    };
    let others: Vec<u32> =
        case.views.iter().filter(|o| o.waiting().is_some() && o.rank != rank).map(|o| o.rank).collect();
    if !others.is_empty() {
        evidence.push(format!("{} to wait", left(&others)));
    }
    Finding {
        class: Class::Departed,
        ranks: vec![rank],
        says,
        evidence,
        chain: chain(case, rank),
        proof: at.and_then(|c| against_plan(case, v, c)).or_else(|| waited_for(case, v)),
    }
}

fn left(ranks: &[u32]) -> String {
    match ranks {
        [one] => format!("rank {one} was left"),
        _ => format!("ranks {} were left", write_ranks(ranks)),
    }
}

/// Members of which some called another thing.
pub(super) fn differing(case: &Case<'_>, d: &Difference) -> Finding {
    let call = |(rank, index): (u32, usize)| case.views.get(rank as usize).and_then(|v| v.calls.get(index));
    let ranks = |side: &[(u32, usize)]| write_ranks(&side.iter().map(|s| s.0).collect::<Vec<_>>());
    let tie = d.odd.len() == d.most.len();
    let mut odd: Vec<u32> = d.odd.iter().map(|s| s.0).collect();
    if tie {
        odd.extend(d.most.iter().map(|s| s.0));
        odd.sort_unstable();
    }
    let at = d.odd.first().and_then(|s| call(*s));
    let says = format!(
        "{} at #{} of {}: ranks {} differ from ranks {} in the {}",
        at.map_or(String::new(), |c| c.channel.group.clone()),
        at.map_or(0, |c| c.c.pos),
        at.map_or(String::new(), |c| place(c.c)),
        ranks(&d.odd),
        ranks(&d.most),
        d.field
    );
    let line = |side: &[(u32, usize)]| {
        let c = side.first().and_then(|s| call(*s));
        c.map(|c| format!("ranks {}: {}", ranks(side), full(c.c)))
    };
    let mut evidence: Vec<String> = [&d.most, &d.odd].into_iter().filter_map(|s| line(s)).collect();
    if tie {
        evidence
            .push("as many say the one as the other: which of them is wrong, the records do not tell".into());
    }
    let side = |s: Option<&(u32, usize)>| s.and_then(|s| Some((s.0, step(call(*s)?))));
    let proof = match (side(d.most.first()), side(d.odd.first())) {
        (Some(a), Some(b)) => Some(Counterexample::Mismatch(Mismatch {
            group: at.map_or(String::new(), |c| over(&c.channel.group, &c.channel.ranks)),
            position: at.map_or(0, |c| c.nth),
            field: d.field.to_string(),
            sides: [(a.0, Some(a.1)), (b.0, Some(b.1))],
        })),
        _ => None,
    };
    Finding { class: Class::Departed, ranks: odd, says, evidence, chain: Vec::new(), proof }
}

/// A rank's own failure.
pub(super) fn failed(case: &Case<'_>, v: &RankView<'_>, m: &crate::flight::Mark) -> Finding {
    let code = m.code.as_deref().unwrap_or("no code");
    let class = m.class.as_deref().unwrap_or("it failed");
    let mut evidence = vec![format!("[{code}] {}", m.text.as_deref().unwrap_or_default())];
    let later =
        case.views.iter().filter(|o| o.rank != v.rank && o.marks().any(|(_, m)| is_own_failure(o.rank, m)));
    let later: Vec<u32> = later.map(|o| o.rank).collect();
    if !later.is_empty() {
        evidence.push(format!("ranks {} failed after it: most likely its echo", write_ranks(&later)));
    }
    Finding {
        class: class_of(class, Class::Failed),
        ranks: vec![v.rank],
        says: format!("rank {} reported its own failure first: {class}", v.rank),
        evidence,
        chain: chain(case, v.rank),
        proof: None,
    }
}

/// What the leader found about a rank.
pub(super) fn reported(about: Option<u32>, code: Option<&str>, class: &str, text: &str) -> Option<Finding> {
    Some(Finding {
        class: class_of(class, Class::Failed),
        ranks: about.into_iter().collect(),
        says: match about {
            Some(rank) => format!("rank {rank} was found out: {class}"),
            None => format!("the run ended: {class}"),
        },
        evidence: vec![format!("[{}] {text}", code.unwrap_or("no code"))],
        chain: Vec::new(),
        proof: None,
    })
}

fn class_of(words: &str, otherwise: Class) -> Class {
    match words {
        "ranks drifted apart" => Class::Drifted,
        "the lockstep protocol was broken"
        | "ranks do not hold the same plan or settings"
        | "refused before any rank was made to wait" => Class::Refused,
        LAUNCHER_GONE => Class::Launcher,
        _ => otherwise,
    }
}

/// A rank that stopped saying anything.
pub(super) fn silent(case: &Case<'_>, v: &RankView<'_>) -> Finding {
    let rank = v.rank;
    let waiter = case.views.iter().find(|w| case.waits.direct(w.rank).contains(&rank));
    let wanted = waiter.and_then(|w| w.waiting()).map(|c| c.c);
    // Of a rank without a record nobody knows how far it came.
    let never = v.flight.is_some() && wanted.is_some_and(|c| v.last_call < c.call);
    let mut evidence = Vec::new();
    match v.flight {
        None => evidence.push(
            "it left no flight record here: it died before it joined, or its file is on another host"
                .to_string(),
        ),
        Some(_) => evidence.push(format!(
            "its last word: {}, {} before {}",
            last_word(v),
            seconds(case.end_ns.saturating_sub(v.last_wall_ns)),
            if case.state == RunState::Running { "now" } else { "the last word of the run" }
        )),
    }
    let died = told(case, rank, "a rank died");
    match vitals(case, rank) {
        Some(Vitals::Stopped) => {
            evidence.push(format!("its process{} is stopped (SIGSTOP or a debugger)", pid(case, v)))
        }
        Some(Vitals::Gone) => evidence.push("its process is gone".to_string()),
        Some(Vitals::Alive) => evidence.push(format!("its process{} is alive", pid(case, v))),
        None => {}
    }
    if let Some(end) = end_of(case, rank) {
        match (end.signal, end.status) {
            (Some(9), _) if !died && told(case, rank, "a rank stalled") => {
                evidence.push("it did not answer, and was killed (signal 9) when the run ended".to_string());
            }
            (Some(n), _) => evidence.push(format!("its process was killed by signal {n}{}", signal_name(n))),
            (None, Some(0)) | (None, None) => {}
            (None, Some(s)) => evidence.push(format!("its process exited with status {s}")),
        }
    }
    if let Some(next) = next_of(case, v) {
        evidence.push(format!("next it would have issued: {next}"));
    }
    let says = match (never, wanted) {
        (true, Some(c)) => format!(
            "rank {rank} never began call {} (chunk {}), in which others wait for it",
            c.call, c.chunk
        ),
        (_, Some(_)) if v.flight.is_none() && !died => {
            format!("others wait for rank {rank}, of which there is no record")
        }
        _ if !case.waits.direct(rank).is_empty() => {
            format!("rank {rank} fell silent while it waited for {}", named(&case.waits.direct(rank)))
        }
        (_, Some(_)) => format!("rank {rank} fell silent: others wait for it, and it waits for nobody"),
        _ => format!("rank {rank} fell silent: nobody heard of it again"),
    };
    Finding {
        class: if never { Class::NeverReached } else { Class::HostSilent },
        ranks: vec![rank],
        says,
        evidence,
        chain: chain(case, rank),
        proof: waited_for(case, v),
    }
}

/// Whether somebody, or the record, told this of a rank.
fn told(case: &Case<'_>, rank: u32, class: &str) -> bool {
    let by_rank = case.views.iter().any(|v| {
        v.marks()
            .any(|(_, m)| m.mark == "failed" && m.about == Some(rank) && m.class.as_deref() == Some(class))
    });
    let cause = case.evidence.record.as_ref().and_then(|r| r.end.as_ref()?.cause.as_ref());
    by_rank || cause.is_some_and(|c| c.rank == Some(rank) && c.class == class)
}

/// How its launcher saw a rank's process end.
fn end_of<'a>(case: &'a Case<'_>, rank: u32) -> Option<&'a ProcessEnd> {
    case.evidence.ends.iter().find(|e| e.rank == rank)
}

/// How a rank's process is. Whose end was seen is gone, whoever has its number now.
fn vitals(case: &Case<'_>, rank: u32) -> Option<Vitals> {
    let ended = end_of(case, rank).map(|_| Vitals::Gone);
    ended.or_else(|| case.evidence.vitals.get(&rank).copied())
}

/// The number of a rank's process with a space before it; nothing of one that is gone, or that may well be: a run that
/// is over leaves none behind.
fn pid(case: &Case<'_>, v: &RankView<'_>) -> String {
    let there = match vitals(case, v.rank) {
        Some(Vitals::Gone) => false,
        Some(_) => true,
        None => case.state == RunState::Running,
    };
    v.flight.filter(|_| there).map_or(String::new(), |f| format!(" {}", f.header.pid))
}

/// Whether a rank went before the others did: some rank, the launcher or the system told so.
fn is_dead(case: &Case<'_>, rank: u32) -> bool {
    if told(case, rank, "a rank died") {
        return true;
    }
    // Who did not answer is killed when the run ends.
    let stalled = told(case, rank, "a rank stalled");
    let killed = end_of(case, rank).is_some_and(|e| e.signal.is_some());
    let alone = case.state == RunState::Running && vitals(case, rank) == Some(Vitals::Gone);
    !stalled && (killed || alone)
}

fn signal_name(n: i32) -> &'static str {
    match n {
        6 => " (SIGABRT)",
        7 => " (SIGBUS)",
        9 => " (SIGKILL: somebody's kill, or the kernel's when memory ran out)",
        11 => " (SIGSEGV)",
        15 => " (SIGTERM)",
        _ => "",
    }
}

/// A rank whose device does not come along.
pub(super) fn behind(case: &Case<'_>, v: &RankView<'_>) -> Finding {
    let oldest = v.pending().next().map_or(String::new(), |c| name(c.c));
    Finding {
        class: Class::DeviceBehind,
        ranks: vec![v.rank],
        says: format!("the device of rank {} is behind its peers’", v.rank),
        evidence: vec![
            format!("its oldest unfinished collective: {oldest}"),
            "its host has come as far as the others".to_string(),
        ],
        chain: chain(case, v.rank),
        proof: None,
    }
}

/// A circle of waits.
pub(super) fn cycle(case: &Case<'_>, circle: &[u32]) -> Finding {
    // Each waits for one that is in the circle; follow it once around.
    let mut order: Vec<u32> = Vec::new();
    let mut at = circle.first().copied();
    while let Some(rank) = at.filter(|r| !order.contains(r)) {
        order.push(rank);
        at = case.waits.direct(rank).into_iter().find(|r| circle.contains(r));
    }
    let waiting = |r: u32| case.views.get(r as usize).and_then(|v| v.waiting());
    let chain: Vec<String> = order.iter().map(|r| link(case, Node::Host(*r))).collect();
    // A link waits for the one before it, so the drawing goes the other way round.
    let links: Vec<Link> = order
        .iter()
        .rev()
        .filter_map(|r| {
            let holds = waiting(*r)?;
            let for_me = order.iter().find(|o| case.waits.direct(**o).contains(r) && *o != r)?;
            Some(Link { rank: *r, holds: step(holds), wants: step(waiting(*for_me)?) })
        })
        .collect();
    Finding {
        class: Class::Cycle,
        ranks: circle.to_vec(),
        says: format!("ranks {} wait for each other in a circle", write_ranks(circle)),
        evidence: vec!["each of them is in a collective that another one has not come to: they took their groups in different orders".into()],
        chain,
        proof: (links.len() > 1).then_some(Counterexample::Circle(links)),
    }
}

/// A collective that all members are in and that does not end.
pub(super) fn transport(case: &Case<'_>, ranks: &[u32]) -> Finding {
    let call = ranks.first().and_then(|r| case.views.get(*r as usize)?.waiting());
    Finding {
        class: Class::Transport,
        ranks: Vec::new(),
        says: format!(
            "all of ranks {} are in {} and it does not end",
            write_ranks(ranks),
            call.map_or(String::new(), |c| name(c.c))
        ),
        evidence: vec!["no rank is missing: what carries the bytes between them stands still".to_string()],
        chain: Vec::new(),
        proof: None,
    }
}

/// The launcher is gone.
pub(super) fn launcher() -> Finding {
    Finding {
        class: Class::Launcher,
        ranks: Vec::new(),
        says: "the launching process went away, and the ranks left with it".to_string(),
        evidence: vec!["no rank failed before".to_string()],
        chain: Vec::new(),
        proof: None,
    }
}

/// Why a rank that the record blames is not found guilty.
pub(super) fn innocent(case: &Case<'_>, v: &RankView<'_>) -> String {
    let direct = case.waits.direct(v.rank);
    match v.waiting() {
        Some(c) if !direct.is_empty() => {
            format!("rank {} waited in {} for {}", v.rank, name(c.c), named(&direct))
        }
        _ => format!("the flight records give it no part in it ({})", last_word(v)),
    }
}

/// Kind of trouble, and the next step.
pub(super) fn next(case: &Case<'_>, findings: &[Finding]) -> (&'static str, String) {
    let Some(f) = findings.first() else {
        return (
            "none",
            match case.state {
                RunState::Complete | RunState::Interrupted => "nothing to do: the run ended as it should".into(),
                RunState::Running => "nothing to do: every wait is shorter than work explains. Ask again if it stands still".into(),
                _ => "the records name nobody: look at the launcher’s last lines, the host’s log (dmesg) and the disk".into(),
            },
        );
    };
    let ranks = named(&f.ranks);
    let dead = f.ranks.iter().any(|r| is_dead(case, *r));
    match f.class {
        Class::Departed => (
            "drift",
            format!(
                "compare the program of {ranks} with the plan: a branch that only it takes, a group handle, a collective added by hand (tessera explain T0751)"
            ),
        ),
        Class::Drifted => (
            "drift",
            format!(
                "compare inputs, weights and state of {ranks} with another rank at the call that is named; the same seed repeats it (tessera explain {})",
                code_of(f, "T0744")
            ),
        ),
        Class::Refused => (
            "refusal",
            format!("read what differs above; nothing ran on it (tessera explain {})", code_of(f, "T0740")),
        ),
        Class::Failed => (
            "crash",
            format!(
                "read the text of the failure of {ranks}; the other ranks only followed (tessera explain {})",
                code_of(f, "T0745")
            ),
        ),
        Class::HostSilent | Class::NeverReached if dead => (
            "crash",
            format!(
                "find out who killed {ranks}: dmesg for the OOM killer, the core dump, its standard error"
            ),
        ),
        Class::HostSilent | Class::NeverReached => ("hang", unstick(case, f, &ranks)),
        Class::DeviceBehind => {
            ("hang", format!("look at the device of {ranks}: a stuck kernel, its errors, its clock"))
        }
        Class::Cycle => (
            "hang",
            "give all of these ranks one order of groups; `tessera check` on the plan or on a trace draws it"
                .to_string(),
        ),
        Class::Transport => {
            ("hang", "look at what lies between the ranks: links, switches, shared memory".to_string())
        }
        Class::Launcher => {
            ("crash", "find out what ended the launcher; the ranks did nothing wrong".to_string())
        }
    }
}

/// What to do about ranks that do not come.
fn unstick(case: &Case<'_>, f: &Finding, ranks: &str) -> String {
    let views = || f.ranks.iter().filter_map(|r| case.views.get(*r as usize));
    let pids: String = views().map(|v| pid(case, v)).collect();
    if f.ranks.iter().any(|r| vitals(case, *r) == Some(Vitals::Stopped)) {
        format!("{ranks} is stopped: kill -CONT{pids} lets it go on, if the run still waits")
    } else if !pids.is_empty() {
        format!("look at what the process of {ranks} does: its stack (gdb -p{pids}), its disk, its memory")
    } else if views().any(|v| v.flight.is_none()) {
        format!(
            "bring the flight record of {ranks} from its host and ask again; there look at its process, its disk, its memory"
        )
    } else {
        let how = match views().all(|v| vitals(case, v.rank) == Some(Vitals::Gone)) {
            true => "is gone, and its stack with it",
            false => "is of a run that is over",
        };
        format!(
            "the process of {ranks} {how}: look at its standard error, its disk, its memory; if it comes again, ask while it hangs"
        )
    }
}

/// The code in a finding's first fact, as `[T0744] …`.
fn code_of(f: &Finding, otherwise: &str) -> String {
    let first = f.evidence.first().and_then(|e| e.strip_prefix('[')?.split(']').next());
    first.filter(|c| c.starts_with('T')).unwrap_or(otherwise).to_string()
}

impl Case<'_> {
    /// How a rank stands, for the table.
    pub(super) fn rank_state(&self, v: &RankView<'_>, findings: &[Finding]) -> RankState {
        let culprit = findings.iter().find(|f| f.ranks.contains(&v.rank));
        let told = v.marks().filter(|(_, m)| m.mark == "failed").last().map(|(_, m)| m);
        let state = match (culprit, v.waiting(), told) {
            (Some(f), ..) => match f.class {
                Class::Departed => "departed",
                Class::Failed => "failed",
                Class::Drifted => "drifted",
                Class::Refused => "refused",
                Class::HostSilent => "silent",
                Class::NeverReached => "never came",
                Class::DeviceBehind => "device behind",
                Class::Cycle => "in the circle",
                Class::Transport | Class::Launcher => "waits",
            },
            (None, Some(_), _) => "waits",
            (None, None, Some(m)) if m.echo || m.about != Some(v.rank) || is_death(m.class.as_deref()) => {
                "ended with it"
            }
            (None, None, Some(_)) => "failed after",
            (None, None, None) if v.flight.is_none() => "no record",
            (None, None, None) => "well",
        };
        RankState {
            rank: v.rank,
            state: state.to_string(),
            at: last_word(v),
            silent_ns: v.flight.map(|_| self.end_ns.saturating_sub(v.last_wall_ns)),
            waits_for: self.waits.direct(v.rank),
        }
    }

    /// How far the members of each group of the last call came.
    pub(super) fn groups(&self) -> Vec<GroupState> {
        let last = self.views.iter().map(|v| v.place().0).max().unwrap_or(0);
        let mut channels: Vec<_> = self
            .views
            .iter()
            .flat_map(|v| v.calls.iter().filter(|c| c.c.call == last).map(|c| &c.channel))
            .collect();
        channels.sort();
        channels.dedup();
        let reached = |rank: u32, channel: &super::view::Channel| {
            let v = self.views.get(rank as usize)?;
            let c = v.calls.iter().rev().find(|c| c.c.call == last && c.channel == *channel)?;
            Some(format!("{} #{} of {}, {}", c.c.op, c.c.pos, c.c.phase, state_word(c.c.state)))
        };
        let group = |channel: &super::view::Channel| GroupState {
            group: match channel.pair {
                Some((from, to)) => format!("{} {from} → {to}", channel.group),
                None => over(&channel.group, &channel.ranks),
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

/// The waits that lead to a rank, in words.
fn chain(case: &Case<'_>, to: u32) -> Vec<String> {
    let nodes = case.waits.chain(to);
    nodes.into_iter().filter(|n| n.rank() != to).map(|n| link(case, n)).collect()
}

fn link(case: &Case<'_>, node: Node) -> String {
    let rank = node.rank();
    let Some(v) = case.views.get(rank as usize) else { return String::new() };
    match (node, v.waiting()) {
        (Node::Host(_), Some(c)) => {
            let since = seconds(case.end_ns.saturating_sub(v.wall(c.at_ns)));
            format!("rank {rank} waits in {} for {}, for {since}", name(c.c), named(&case.waits.direct(rank)))
        }
        _ => format!(
            "the device of rank {rank} is at {}",
            v.pending().next().map_or(String::new(), |c| name(c.c))
        ),
    }
}

/// What a rank would have issued next, by the plan.
fn next_of(case: &Case<'_>, v: &RankView<'_>) -> Option<String> {
    let p = v.phase.filter(|p| p.end_ns == 0)?;
    let issued = v
        .calls
        .iter()
        .filter(|c| (c.c.call, c.c.step) == (p.call, p.step))
        .map(|c| c.c.pos + 1)
        .max()
        .unwrap_or(0);
    let line = case.evidence.plan.get(&(p.phase.clone(), v.rank))?.get(issued as usize)?;
    Some(format!("{line}, #{issued} of {}", p.phase))
}

/// The last thing that a rank's engine began or ended.
fn last_word(v: &RankView<'_>) -> String {
    let collective = v.calls.iter().max_by_key(|c| c.at_ns.max(c.c.end_ns));
    let phase = v.phase;
    match (collective, phase) {
        (Some(c), Some(p)) if (p.call, p.step) <= (c.c.call, c.c.step) && p.end_ns == 0 => {
            format!("{} {}", state_word(c.c.state), name(c.c))
        }
        (_, Some(p)) if p.end_ns > 0 => format!("ended {} (call {}, chunk {})", p.phase, p.call, p.chunk),
        (_, Some(p)) => format!("began {} (call {}, chunk {})", p.phase, p.call, p.chunk),
        (Some(c), None) => format!("{} {}", state_word(c.c.state), name(c.c)),
        (None, None) => match v.marks().last() {
            Some((_, m)) => m.call.map_or(m.mark.clone(), |k| format!("{} call {k}", m.mark)),
            None => "nothing".to_string(),
        },
    }
}

fn state_word(s: State) -> &'static str {
    match s {
        State::Issued => "issued",
        State::Waiting => "waits in",
        State::Done => "done with",
        State::Refused => "refused",
    }
}

/// `tp all_reduce #14 of denoise.fill3 (call 7, chunk 6)`.
fn name(c: &Collective) -> String {
    let peer = match (c.op.as_str(), c.peer) {
        ("send", Some(p)) => format!(" to rank {p}"),
        ("recv", Some(p)) => format!(" from rank {p}"),
        _ => String::new(),
    };
    format!("{} {}{peer} #{} of {}", c.group, c.op, c.pos, place(c))
}

fn place(c: &Collective) -> String {
    format!("{} (call {}, chunk {})", c.phase, c.call, c.chunk)
}

fn full(c: &Collective) -> String {
    let reduction = c.reduction.as_ref().map_or(String::new(), |r| format!(" reduction={r}"));
    let root = c.root.map_or(String::new(), |r| format!(" root={r}"));
    format!("{} {} {}{reduction}{root}", c.group, c.op, c.ty)
}

fn over(group: &str, ranks: &[u32]) -> String {
    format!("{group} of ranks {}", write_ranks(ranks))
}

/// `rank 1`, or `ranks 1,2`.
fn named(ranks: &[u32]) -> String {
    match ranks {
        [] => "nobody".to_string(),
        [one] => format!("rank {one}"),
        _ => format!("ranks {}", write_ranks(ranks)),
    }
}

pub(super) fn seconds(ns: u64) -> String {
    let s = ns as f64 / 1e9;
    if s < 10.0 { format!("{s:.2} s") } else { format!("{s:.0} s") }
}

fn step(call: &Call<'_>) -> Step {
    let c = call.c;
    Step {
        what: format!("{} over {} of {}", c.op, over(&c.group, &call.channel.ranks), c.ty),
        op: c.op.clone(),
        dtype: dtype(&c.ty).to_string(),
        shape: c.ty.strip_prefix(dtype(&c.ty)).unwrap_or_default().to_string(),
        ranks: call.channel.ranks.clone(),
        stream: c.phase.clone(),
        index: c.pos as usize,
        source: None,
    }
}

/// A rank that does not come, beside one that waits for it.
fn waited_for(case: &Case<'_>, v: &RankView<'_>) -> Option<Counterexample> {
    let waiter = case.views.iter().find(|w| case.waits.direct(w.rank).contains(&v.rank))?;
    let call = waiter.waiting()?;
    Some(Counterexample::Mismatch(Mismatch {
        group: over(&call.channel.group, &call.channel.ranks),
        position: call.nth,
        field: "op".to_string(),
        sides: [(waiter.rank, Some(step(call))), (v.rank, None)],
    }))
}

/// What a rank called beside what another member called there.
fn against_plan(case: &Case<'_>, v: &RankView<'_>, c: &Collective) -> Option<Counterexample> {
    let mine = v.calls.iter().find(|x| std::ptr::eq(x.c, c))?;
    let same = |o: &&Call<'_>| (o.c.call, o.c.step, o.c.pos) == (c.call, c.step, c.pos);
    let (rank, theirs) = case
        .views
        .iter()
        .filter(|o| o.rank != v.rank && o.departure.is_none())
        .find_map(|o| Some((o.rank, o.calls.iter().find(same)?)))?;
    let field = if theirs.channel.group != mine.channel.group {
        "group"
    } else if theirs.c.op != c.op {
        "op"
    } else {
        "type"
    };
    Some(Counterexample::Mismatch(Mismatch {
        group: over(&theirs.channel.group, &theirs.channel.ranks),
        position: theirs.nth,
        field: field.to_string(),
        sides: [(rank, Some(step(theirs))), (v.rank, Some(step(mine)))],
    }))
}
