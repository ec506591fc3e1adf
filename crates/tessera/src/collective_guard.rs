//! Checks the collectives of one rank against the sealed plan as they are issued, and writes them
//! to the rank's flight record.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Code;
use tessera_device::CommRoute;
use tessera_device::Observer;
use tessera_ir::{CapturedGraph, Op, OpView, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_report::flight::{
    CollectiveProgress, FlightCollective, FlightEntry, FlightPhase, PlanMatch, write_ranks,
};
use tessera_runtime::engine::ReadyCall;
use tessera_runtime::tripwire::{T0751, T0773, T0785};
use tessera_verify::collective_lines;

use crate::clock::monotonic_ns;
use crate::flight::FlightRecord;

/// The collectives that a rank may issue in a phase, and the collectives of the program that it
/// runs.
#[derive(Debug)]
pub(crate) struct CollectiveSequence {
    phase: String,
    /// The graph into which the plan captures the program.
    graph: Option<CapturedGraph>,
    /// Op index and canonical text of each collective of the sealed program, in order.
    sealed: Vec<(usize, String)>,
    /// Collectives of the program that actually runs, by op index. Outside drills it is the sealed
    /// program.
    program: BTreeMap<usize, ProgramCollective>,
}

#[derive(Debug)]
struct ProgramCollective {
    text: String,
    /// Whether the host blocks on the collective when it issues it.
    blocks_host: bool,
    /// Entry for the flight record; the fields that change per call are filled in at issue.
    entry: FlightCollective,
}

impl CollectiveSequence {
    /// Builds the sequence from the sealed program of a phase and the program that this rank runs.
    pub(crate) fn new(
        phase: &str,
        mesh: &Mesh,
        rank: Rank,
        sealed: &Program,
        run: &Program,
    ) -> CollectiveSequence {
        // The verifier refuses a program that is captured in part.
        let graph = sealed.captured_graph().ok().flatten();
        let mut lines: BTreeMap<usize, String> = collective_lines(run).into_iter().collect();
        let sealed = collective_lines(sealed);
        let own = run.collective_ops().map(|(i, op)| {
            // The collectives of an ill-formed program have no canonical text, so they match no
            // plan. They keep the form of a line, so that reports show their group and type.
            let line = lines.remove(&i).unwrap_or_else(|| {
                let group = op.comm_group().map_or("no group".to_string(), |g| g.to_string());
                let ty = op.operands.first().map(|v| run.type_of(*v));
                let ty = ty.map_or(String::new(), |t| format!("{}{:?}", t.dtype.name(), t.shape));
                format!("{group} {} {ty} {{unreadable}}", op.opcode.name())
            });
            let entry = FlightCollective {
                phase: phase.to_string(),
                ..describe_collective(mesh, rank, i, op, &line)
            };
            (i, ProgramCollective { text: line, blocks_host: !op.issue, entry })
        });
        CollectiveSequence { phase: phase.to_string(), graph, program: own.collect(), sealed }
    }
}

fn describe_collective(mesh: &Mesh, rank: Rank, index: usize, op: &Op, line: &str) -> FlightCollective {
    let lane = CommRoute::from_op(op).and_then(|r| r.communicator_of(mesh, rank));
    let members: Vec<u32> = lane.iter().flat_map(|l| &l.members).map(|r| r.0).collect();
    let transfer = lane.as_ref().is_some_and(|l| l.is_transfer);
    let peer = members.iter().copied().find(|r| transfer && *r != rank.0);
    let root = match op.view() {
        Ok(OpView::Broadcast(v)) => usize::try_from(v.root).ok().and_then(|at| members.get(at).copied()),
        _ => None,
    };
    let mut sorted = members;
    sorted.sort_unstable();
    // The text has the form `tp all_reduce f32[4, 8] {replicated} reduction=sum`; `head` ends
    // before the layout.
    let head = line.split(" {").next().unwrap_or_default();
    FlightCollective {
        group: op.comm_group().map_or(String::new(), |g| g.to_string()),
        ranks: write_ranks(&sorted),
        op: op.opcode.name().to_string(),
        ty: head.splitn(3, ' ').nth(2).unwrap_or_default().to_string(),
        reduction: op.reduction().map(|r| r.name().to_string()),
        root,
        peer,
        op_index: u32::try_from(index).unwrap_or(u32::MAX),
        ..FlightCollective::default()
    }
}

/// The call that a rank runs and how far it has come, for the lines of its flight record.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CallPosition {
    call: u64,
    chunk: u32,
    epoch: u32,
    /// Number of phases of the call that have begun.
    phases_begun: u32,
}

impl CallPosition {
    /// Returns the position at the start of a call.
    pub(crate) fn from_call(call: &ReadyCall) -> CallPosition {
        CallPosition { call: call.call_id, chunk: call.chunk, epoch: call.cache_epoch, phases_begun: 0 }
    }

    /// Returns the cache epoch in which the call runs.
    pub(crate) fn epoch(self) -> u32 {
        self.epoch
    }
}

/// The checks of a guard that are enabled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct ArmedGuards {
    /// Whether a collective outside the plan is refused (T0751).
    pub(crate) collectives: bool,
    /// Whether a capture outside the plan is refused (T0785).
    pub(crate) captures: bool,
    /// Whether a halo with other rows than the neighbours sent is refused (T0773).
    pub(crate) halos: bool,
}

/// Compares the collectives of one run of a phase with the sealed plan before they are issued, and
/// writes them to the flight record.
pub(crate) struct CollectiveGuard<'a> {
    sequence: &'a mut CollectiveSequence,
    position: CallPosition,
    armed: ArmedGuards,
    /// Code of the guard's refusal, unless it refused a collective (T0751).
    refusal: Option<&'static Code>,
    flight: Option<&'a Arc<FlightRecord>>,
    progress: &'a (dyn Fn(u32) + Sync),
    trace_hash: blake3::Hasher,
    /// Number of collectives issued so far.
    issued_count: usize,
    /// Flight record line of each incomplete collective, by op index.
    open_collectives: BTreeMap<usize, OpenCollective>,
    /// Number and timestamp of the phase's own line.
    phase_line: (u64, u64),
}

/// A flight record line that will be rewritten.
#[derive(Debug, Clone, Copy)]
struct OpenCollective {
    /// Line number that [`FlightRecord::append_line`] returned.
    line: u64,
    /// Time on the monotonic clock at which the line was first written, in nanoseconds.
    issued_ns: u64,
    /// Time at which the host began to wait, in nanoseconds; `None` before that.
    waiting_since_ns: Option<u64>,
}

impl<'a> CollectiveGuard<'a> {
    /// Begins a phase. An unarmed guard rejects nothing but still writes the flight record.
    pub(crate) fn begin_phase(
        sequence: &'a mut CollectiveSequence,
        position: &mut CallPosition,
        armed: ArmedGuards,
        flight: Option<&'a Arc<FlightRecord>>,
        progress: &'a (dyn Fn(u32) + Sync),
    ) -> CollectiveGuard<'a> {
        let hash = blake3::Hasher::new();
        let mut guard = CollectiveGuard {
            position: *position,
            sequence,
            armed,
            refusal: None,
            flight,
            progress,
            trace_hash: hash,
            issued_count: 0,
            open_collectives: BTreeMap::new(),
            phase_line: (0, 0),
        };
        position.phases_begun += 1;
        if let Some(flight) = flight {
            let now = monotonic_ns();
            guard.phase_line = (flight.append_line(now, &guard.phase_entry(0)), now);
        }
        guard
    }

    /// Ends a phase that ran to completion and returns the digest of the issued collectives.
    ///
    /// # Errors
    /// Returns a message that names the plan's next collective if the phase did not issue all of
    /// them.
    pub(crate) fn end_phase(self) -> Result<[u8; 32], String> {
        if let Some(flight) = self.flight {
            flight.rewrite_line(self.phase_line.0, self.phase_line.1, &self.phase_entry(monotonic_ns()));
        }
        self.check_all_issued("ended")?;
        Ok(*self.trace_hash.finalize().as_bytes())
    }

    /// Returns the code of the guard's refusal: T0785 for a capture, T0773 for a halo, T0751 for a
    /// collective.
    pub(crate) fn refusal_code(&self) -> &'static Code {
        self.refusal.unwrap_or(&T0751)
    }

    fn check_all_issued(&self, ended: &str) -> Result<(), String> {
        match self.next_planned().filter(|_| self.armed.collectives) {
            Some(line) => Err(format!(
                "@{} {ended} after {} of {} collectives; the plan's next collective is `{line}`, and its members are waiting \
                 for this rank",
                self.sequence.phase,
                self.issued_count,
                self.sequence.sealed.len()
            )),
            None => Ok(()),
        }
    }

    fn next_planned(&self) -> Option<&String> {
        self.sequence.sealed.get(self.issued_count).map(|(_, line)| line)
    }

    fn phase_entry(&self, end_ns: u64) -> FlightEntry {
        FlightEntry::Phase(FlightPhase {
            call: self.position.call,
            chunk: self.position.chunk,
            epoch: self.position.epoch,
            phase: self.sequence.phase.clone(),
            step: self.position.phases_begun,
            issued: saturating_u32(self.issued_count),
            planned_count: saturating_u32(self.sequence.sealed.len()),
            end_ns,
            missing_line: self.next_planned().filter(|_| end_ns > 0).cloned(),
        })
    }

    /// Rewrites the line of an open collective, and removes the collective from the open ones when
    /// it is done.
    fn update_entry(&mut self, op: usize, state: CollectiveProgress) {
        let (Some(flight), Some(own)) = (self.flight, self.sequence.program.get_mut(&op)) else { return };
        let Some(open) = self.open_collectives.get_mut(&op) else { return };
        let (now, line, issued_ns) = (monotonic_ns(), open.line, open.issued_ns);
        own.entry.state = state;
        if state == CollectiveProgress::Done {
            own.entry.end_ns = now;
            own.entry.exposed_ns = open.waiting_since_ns.map_or(0, |since| now.saturating_sub(since));
            self.open_collectives.remove(&op);
        } else {
            open.waiting_since_ns = Some(now);
            (own.entry.end_ns, own.entry.exposed_ns) = (0, 0);
        }
        flight.rewrite_line(line, issued_ns, &FlightEntry::Collective(own.entry.clone()));
    }
}

impl Observer for CollectiveGuard<'_> {
    fn on_issuing(&mut self, op: usize) -> Result<(), String> {
        let planned_count = self.sequence.sealed.len();
        let planned = self.sequence.sealed.get(self.issued_count);
        let own = self.sequence.program.get_mut(&op);
        let issued_text = own.as_ref().map_or("an op that is not a collective", |o| o.text.as_str());
        let fit = match planned {
            Some((index, line)) if line == issued_text => {
                if *index == op {
                    PlanMatch::Yes
                } else {
                    PlanMatch::Moved
                }
            }
            _ => PlanMatch::No,
        };
        let refusal = (fit == PlanMatch::No && self.armed.collectives).then(|| {
            let holds = planned.map_or("holds no further collective".to_string(), |(_, l)| format!("holds `{l}`"));
            format!(
                "@{} #{} of {planned_count}: the plan {holds}, but this rank was about to issue `{issued_text}`; nothing was sent",
                self.sequence.phase, self.issued_count
            )
        });
        if let (Some(flight), Some(own)) = (self.flight, own) {
            let entry = &mut own.entry;
            entry.state = match &refusal {
                Some(_) => CollectiveProgress::Refused,
                None if own.blocks_host => CollectiveProgress::Waiting,
                None => CollectiveProgress::Issued,
            };
            (entry.call, entry.chunk, entry.epoch, entry.step) =
                (self.position.call, self.position.chunk, self.position.epoch, self.position.phases_begun);
            (entry.pos, entry.planned_count) =
                (saturating_u32(self.issued_count), saturating_u32(planned_count));
            (entry.end_ns, entry.exposed_ns, entry.sent_bytes) = (0, 0, 0);
            entry.plan_match = fit;
            let line = planned.map(|(_, line)| line);
            entry.planned_line = line.filter(|_| fit == PlanMatch::No).cloned();
            let issued_ns = monotonic_ns();
            let waits_ns = (entry.state == CollectiveProgress::Waiting).then_some(issued_ns);
            let line = flight.append_line(issued_ns, &FlightEntry::Collective(entry.clone()));
            self.open_collectives.insert(op, OpenCollective { line, issued_ns, waiting_since_ns: waits_ns });
        }
        self.issued_count += 1;
        refusal.map_or(Ok(()), Err)
    }

    fn on_all_issuing(&mut self) -> Result<(), String> {
        self.check_all_issued("would end")
    }

    fn on_launching(&mut self, graph: Option<&CapturedGraph>) -> Result<(), String> {
        let sequence = &*self.sequence;
        // If the collectives differ, T0751 names the first one, which says more than a number of ops.
        let own = sequence.program.values().map(|c| &c.text);
        let only_ops = own.eq(sequence.sealed.iter().map(|(_, line)| line));
        let key = |g: &CapturedGraph| (g.name.clone(), only_ops.then_some(g.ops));
        if !self.armed.captures || graph.map(key) == sequence.graph.as_ref().map(key) {
            return Ok(());
        }
        self.refusal = Some(&T0785);
        let describe =
            |g: Option<&CapturedGraph>, eager: &str| g.map_or(eager.to_string(), ToString::to_string);
        Err(format!(
            "@{}: the plan captures {}, but this rank was about to launch {}; nothing was launched",
            self.sequence.phase,
            describe(self.sequence.graph.as_ref(), "nothing"),
            describe(graph, "every op by itself")
        ))
    }

    fn on_issued(&mut self, op: usize) {
        if let Some(own) = self.sequence.program.get(&op) {
            self.trace_hash.update(own.text.as_bytes());
            self.trace_hash.update(b"\n");
        }
    }

    fn on_sent(&mut self, op: usize, bytes: u64) {
        // The line of the collective is written again when it is done.
        if let Some(own) = self.sequence.program.get_mut(&op) {
            own.entry.sent_bytes = bytes;
        }
    }

    fn on_waiting(&mut self, op: usize) {
        self.update_entry(op, CollectiveProgress::Waiting);
    }

    fn on_completed(&mut self, op: usize) {
        self.update_entry(op, CollectiveProgress::Done);
    }

    fn on_other_halo(&mut self, op: usize, what: &str) -> Result<(), String> {
        if !self.armed.halos {
            return Ok(());
        }
        self.refusal = Some(&T0773);
        let CallPosition { call, chunk, .. } = self.position;
        let own = self.sequence.program.get(&op);
        let text = own.map_or("a halo exchange", |own| own.text.as_str());
        let ranks = own.map_or("", |own| own.entry.ranks.as_str());
        let phase = &self.sequence.phase;
        Err(format!(
            "call {call}, chunk {chunk}, @{phase} op {op}: {what}; members are ranks {ranks} in order, and the exchange is \
             `{text}`. No convolution read the halo"
        ))
    }

    fn on_progress(&mut self, ops: u32) {
        (self.progress)(ops);
    }
}

fn saturating_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_ir::parse_all;

    use super::*;

    const HEAD: &str = "program @p role(r) mesh(tp=2, pp=2) {\n  %x = input : f32[4, 4] {tp: partial(sum)}\n  %z = input : f32[2, 4] {tp: partial(sum)}\n  %y = input : f32[2]\n";
    const SUM: &str = "ttile.collective.all_reduce %x {axis = \"tp\", reduction = \"sum\"}";
    const OTHER: &str = "ttile.collective.all_reduce %z {axis = \"tp\", reduction = \"sum\"}";
    const GATHER: &str = "ttile.collective.broadcast %x {axis = \"pp\", root = 0}";

    const ALL_ARMED: ArmedGuards = ArmedGuards { collectives: true, captures: true, halos: true };

    fn program(ops: &[&str]) -> Program {
        let lines: Vec<String> = ops.iter().enumerate().map(|(i, op)| format!("  %v{i} = {op}\n")).collect();
        let text = format!("{HEAD}{}  output \"z\", %y\n}}\n", lines.concat());
        parse_all(&text, "p").unwrap_or_else(|d| panic!("{d:#?}")).remove(0)
    }

    // proves: X-19
    #[test]
    fn a_graph_that_the_plan_does_not_declare_is_refused_before_its_launch() {
        let eager = program(&[SUM]);
        let mut captured = eager.clone();
        captured.capture_into("p");
        let graph = captured.captured_graph().unwrap().unwrap();
        let other = CapturedGraph { name: "q".to_string(), ..graph.clone() };
        let fewer = CapturedGraph { ops: graph.ops - 1, ..graph.clone() };
        for (sealed, observed, expected) in [
            (&eager, None, None),
            (&captured, Some(&graph), None),
            (
                &eager,
                Some(&graph),
                Some("the plan captures nothing, but this rank was about to launch graph p of 2 ops"),
            ),
            (
                &captured,
                None,
                Some(
                    "the plan captures graph p of 2 ops, but this rank was about to launch every op by itself",
                ),
            ),
            (&captured, Some(&other), Some("about to launch graph q of 2 ops")),
            (&captured, Some(&fewer), Some("about to launch graph p of 1 ops")),
        ] {
            let mut sequence = CollectiveSequence::new("p", &eager.mesh, Rank(0), sealed, sealed);
            let mut at = CallPosition::default();
            let progress = |_: u32| {};
            let mut begin = |armed| {
                let mut guard = CollectiveGuard::begin_phase(&mut sequence, &mut at, armed, None, &progress);
                (guard.on_launching(observed), guard.refusal_code().id)
            };
            let (result, code) = begin(ALL_ARMED);
            match expected {
                None => assert_eq!((result, code), (Ok(()), "T0751")),
                Some(text) => {
                    let why = result.unwrap_err();
                    assert!(why.contains(text) && code == "T0785", "{why}");
                }
            }
            assert!(begin(ArmedGuards { captures: false, ..ALL_ARMED }).0.is_ok());
        }
    }

    #[test]
    fn a_program_without_the_plans_last_collective_is_refused_before_its_launch() {
        let (sealed, own) = (program(&[SUM, GATHER]), program(&[SUM]));
        let mut sequence = CollectiveSequence::new("p", &own.mesh, Rank(0), &sealed, &own);
        let mut at = CallPosition::default();
        let progress = |_: u32| {};
        let mut guard = CollectiveGuard::begin_phase(&mut sequence, &mut at, ALL_ARMED, None, &progress);
        for (op, _) in own.collective_ops() {
            guard.on_issuing(op).unwrap();
        }
        let why = guard.on_all_issuing().unwrap_err();
        assert!(why.contains("would end after 1 of 2 collectives"), "{why}");
    }

    /// Runs a modified program against a sealed one; returns the result of the guard and the number
    /// of collectives that it let through.
    fn run_guarded(sealed: &[&str], own: &[&str], armed: bool) -> (Result<[u8; 32], String>, usize) {
        let (sealed, own) = (program(sealed), program(own));
        let mut sequence = CollectiveSequence::new("p", &own.mesh, Rank(0), &sealed, &own);
        let mut at = CallPosition::default();
        let progress = |_: u32| {};
        let mut guard = CollectiveGuard::begin_phase(
            &mut sequence,
            &mut at,
            ArmedGuards { collectives: armed, captures: armed, halos: armed },
            None,
            &progress,
        );
        let mut through = 0;
        for (op, _) in own.collective_ops() {
            if let Err(why) = guard.on_issuing(op) {
                return (Err(why), through);
            }
            guard.on_issued(op);
            guard.on_completed(op);
            through += 1;
        }
        (guard.end_phase(), through)
    }

    #[test]
    fn a_deviation_is_rejected_before_it_is_issued() {
        let plan = [SUM, GATHER, SUM];
        assert!(run_guarded(&plan, &plan, true).0.is_ok());
        // The guard rejects a different shape, an extra collective and a different order before
        // anything is sent.
        for (own, through, says) in [
            (&[OTHER, GATHER, SUM][..], 0, "issue `tp all_reduce f32[2, 4]"),
            (&[SUM, GATHER, GATHER, SUM], 2, "@p #2 of 3"),
            (&[GATHER, SUM, SUM], 0, "the plan holds `tp all_reduce"),
            (&[SUM, SUM, GATHER], 1, "was about to issue `tp all_reduce"),
            (&[SUM, GATHER, SUM, SUM], 3, "holds no further collective"),
        ] {
            let (outcome, count) = run_guarded(&plan, own, true);
            let why = outcome.unwrap_err();
            assert!(count == through && why.contains(says), "{why}");
            assert!(run_guarded(&plan, own, false).0.is_ok(), "an unarmed guard rejects nothing");
        }
    }

    #[test]
    fn a_missing_collective_is_reported_at_the_end_and_changes_the_trace() {
        let (outcome, count) = run_guarded(&[SUM, SUM, SUM], &[SUM, SUM], true);
        let why = outcome.unwrap_err();
        assert!(count == 2 && why.contains("ended after 2 of 3 collectives"), "{why}");
        let trace = |own: &[&str]| run_guarded(&[SUM, SUM, SUM], own, false).0.unwrap();
        assert_ne!(trace(&[SUM, SUM]), trace(&[SUM, SUM, SUM]));
    }

    #[test]
    fn entries_describe_group_members_and_type() {
        let p = program(&[SUM, GATHER]);
        let sequence = CollectiveSequence::new("p", &p.mesh, Rank(3), &p, &p);
        let entries: Vec<&FlightCollective> = sequence.program.values().map(|o| &o.entry).collect();
        let said =
            |c: &FlightCollective| (c.group.clone(), c.ranks.clone(), c.op.clone(), c.ty.clone(), c.root);
        let all: Vec<_> = entries.into_iter().map(said).collect();
        let text = String::from;
        assert_eq!(
            all,
            [
                (text("tp"), text("2-3"), text("all_reduce"), text("f32[4, 4]"), None),
                (text("pp"), text("1,3"), text("broadcast"), text("f32[4, 4]"), Some(1)),
            ]
        );
    }
}
