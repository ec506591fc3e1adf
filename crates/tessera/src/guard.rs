//! A rank's collectives held to the sealed plan as they are issued, and written into its flight record.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_device::Observer;
use tessera_device::Route;
use tessera_ir::{Op, Program};
use tessera_mesh::{Mesh, Rank};
use tessera_report::flight::{Collective, Entry, Fit, Phase, State, write_ranks};
use tessera_runtime::engine::ReadyCall;
use tessera_verify::collective_lines;

use crate::flight::{FlightRecord, now_ns};

/// What a rank may issue in a phase, and what its program can.
#[derive(Debug)]
pub(crate) struct Sequence {
    phase: String,
    /// Op and line of each collective of the sealed program, in order.
    sealed: Vec<(usize, String)>,
    /// Collectives of the program that is run, by op. It is the sealed one unless somebody changed it.
    own: BTreeMap<usize, Own>,
}

#[derive(Debug)]
struct Own {
    line: String,
    /// Whether the host waits for it at once.
    blocks: bool,
    /// Its line in the flight record; what differs from call to call is filled in.
    entry: Collective,
}

impl Sequence {
    /// Of a phase's sealed program and of the one that this rank runs.
    pub(crate) fn new(phase: &str, mesh: &Mesh, rank: Rank, sealed: &Program, run: &Program) -> Sequence {
        let mut lines: BTreeMap<usize, String> = collective_lines(run).into_iter().collect();
        let sealed = collective_lines(sealed);
        let own = run.collectives().map(|(i, op)| {
            // A program that is not well-formed has no lines; what it issues is in no plan.
            let line = lines.remove(&i).unwrap_or_else(|| format!("{} (unreadable)", op.opcode.name()));
            let entry = Collective { phase: phase.to_string(), ..describe(mesh, rank, i, op, &line) };
            (i, Own { line, blocks: !op.issue, entry })
        });
        Sequence { phase: phase.to_string(), own: own.collect(), sealed }
    }
}

fn describe(mesh: &Mesh, rank: Rank, index: usize, op: &Op, line: &str) -> Collective {
    let lane = Route::of(op).and_then(|r| r.lane(mesh, rank));
    let members: Vec<u32> = lane.iter().flat_map(|l| &l.members).map(|r| r.0).collect();
    let transfer = lane.as_ref().is_some_and(|l| l.transfer);
    let peer = members.iter().copied().find(|r| transfer && *r != rank.0);
    let root = op.int("root").and_then(|at| members.get(usize::try_from(at).ok()?).copied());
    let mut sorted = members;
    sorted.sort_unstable();
    // Of `tp all_reduce f32[4, 8] {replicated} reduction=sum`.
    let head = line.split(" {").next().unwrap_or_default();
    Collective {
        group: op.group().map_or(String::new(), |g| g.to_string()),
        ranks: write_ranks(&sorted),
        op: op.opcode.name().to_string(),
        ty: head.splitn(3, ' ').nth(2).unwrap_or_default().to_string(),
        reduction: op.reduction().map(|r| r.name().to_string()),
        root,
        peer,
        index: u32::try_from(index).unwrap_or(u32::MAX),
        ..Collective::default()
    }
}

/// Where in its run a rank is.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct At {
    call: u64,
    chunk: u32,
    epoch: u32,
    /// Phases of the call that began.
    step: u32,
}

impl At {
    /// The beginning of a call.
    pub(crate) fn call(call: &ReadyCall) -> At {
        At { call: call.call_id, chunk: call.chunk, epoch: call.cache_epoch, step: 0 }
    }
}

/// Watches one run of one phase.
pub(crate) struct Guard<'a> {
    sequence: &'a mut Sequence,
    at: At,
    armed: bool,
    flight: Option<&'a Arc<FlightRecord>>,
    progress: &'a (dyn Fn(u32) + Sync),
    hash: blake3::Hasher,
    /// Collectives issued so far.
    next: usize,
    /// The flight's line of each collective that is not complete, by op.
    open: BTreeMap<usize, Open>,
    /// Number and instant of the line of the phase itself.
    begun: (u64, u64),
}

/// A line that is to be written again.
#[derive(Debug, Clone, Copy)]
struct Open {
    /// Its number.
    line: u64,
    /// When it was issued.
    issued_ns: u64,
    /// Since when the host waits; nothing before.
    waits_ns: Option<u64>,
}

impl<'a> Guard<'a> {
    /// Begins a phase. Unarmed it refuses nothing and writes down all the same.
    pub(crate) fn begin(
        sequence: &'a mut Sequence,
        at: &mut At,
        armed: bool,
        flight: Option<&'a Arc<FlightRecord>>,
        progress: &'a (dyn Fn(u32) + Sync),
    ) -> Guard<'a> {
        let hash = blake3::Hasher::new();
        let mut guard = Guard {
            at: *at,
            sequence,
            armed,
            flight,
            progress,
            hash,
            next: 0,
            open: BTreeMap::new(),
            begun: (0, 0),
        };
        at.step += 1;
        if let Some(flight) = flight {
            let now = now_ns();
            guard.begun = (flight.write(now, &guard.phase(0)), now);
        }
        guard
    }

    /// Ends a phase that ran to its end: the digest of what was issued.
    ///
    /// # Errors
    /// Which collective of the plan is missing.
    pub(crate) fn end(self) -> Result<[u8; 32], String> {
        if let Some(flight) = self.flight {
            flight.again(self.begun.0, self.begun.1, &self.phase(now_ns()));
        }
        match self.missing().filter(|_| self.armed) {
            Some(line) => Err(format!(
                "@{} ended after {} of {} collectives; the next one of the plan is `{line}`, and its members wait for \
                 this rank",
                self.sequence.phase,
                self.next,
                self.sequence.sealed.len()
            )),
            None => Ok(*self.hash.finalize().as_bytes()),
        }
    }

    fn missing(&self) -> Option<&String> {
        self.sequence.sealed.get(self.next).map(|(_, line)| line)
    }

    fn phase(&self, end_ns: u64) -> Entry {
        Entry::Phase(Phase {
            call: self.at.call,
            chunk: self.at.chunk,
            epoch: self.at.epoch,
            phase: self.sequence.phase.clone(),
            step: self.at.step,
            issued: small(self.next),
            of: small(self.sequence.sealed.len()),
            end_ns,
            wants: self.missing().filter(|_| end_ns > 0).cloned(),
        })
    }

    /// Writes an open collective's line again; a complete one is open no more.
    fn change(&mut self, op: usize, state: State) {
        let (Some(flight), Some(own)) = (self.flight, self.sequence.own.get_mut(&op)) else { return };
        let Some(open) = self.open.get_mut(&op) else { return };
        let (now, line, issued_ns) = (now_ns(), open.line, open.issued_ns);
        own.entry.state = state;
        if state == State::Done {
            own.entry.end_ns = now;
            own.entry.exposed_ns = open.waits_ns.map_or(0, |since| now.saturating_sub(since));
            self.open.remove(&op);
        } else {
            open.waits_ns = Some(now);
            (own.entry.end_ns, own.entry.exposed_ns) = (0, 0);
        }
        flight.again(line, issued_ns, &Entry::Collective(own.entry.clone()));
    }
}

impl Observer for Guard<'_> {
    fn issuing(&mut self, op: usize) -> Result<(), String> {
        let of = self.sequence.sealed.len();
        let planned = self.sequence.sealed.get(self.next);
        let own = self.sequence.own.get_mut(&op);
        let seen = own.as_ref().map_or("an op that is no collective", |o| o.line.as_str());
        let fit = match planned {
            Some((index, line)) if line == seen => {
                if *index == op {
                    Fit::Yes
                } else {
                    Fit::Moved
                }
            }
            _ => Fit::No,
        };
        let refusal = (fit == Fit::No && self.armed).then(|| {
            let holds = planned.map_or("holds no further collective".to_string(), |(_, l)| format!("holds `{l}`"));
            format!(
                "@{} #{} of {of}: the plan {holds}, this rank was about to issue `{seen}`; nothing of it was sent",
                self.sequence.phase, self.next
            )
        });
        if let (Some(flight), Some(own)) = (self.flight, own) {
            let entry = &mut own.entry;
            entry.state = match &refusal {
                Some(_) => State::Refused,
                None if own.blocks => State::Waiting,
                None => State::Issued,
            };
            (entry.call, entry.chunk, entry.epoch, entry.step) =
                (self.at.call, self.at.chunk, self.at.epoch, self.at.step);
            (entry.pos, entry.of) = (small(self.next), small(of));
            (entry.end_ns, entry.exposed_ns) = (0, 0);
            entry.plan = fit;
            let line = planned.map(|(_, line)| line);
            entry.wants = line.filter(|_| fit == Fit::No).cloned();
            let issued_ns = now_ns();
            let waits_ns = (entry.state == State::Waiting).then_some(issued_ns);
            let line = flight.write(issued_ns, &Entry::Collective(entry.clone()));
            self.open.insert(op, Open { line, issued_ns, waits_ns });
        }
        self.next += 1;
        refusal.map_or(Ok(()), Err)
    }

    fn issued(&mut self, op: usize) {
        if let Some(own) = self.sequence.own.get(&op) {
            self.hash.update(own.line.as_bytes());
            self.hash.update(b"\n");
        }
    }

    fn waiting(&mut self, op: usize) {
        self.change(op, State::Waiting);
    }

    fn completed(&mut self, op: usize) {
        self.change(op, State::Done);
    }

    fn progress(&mut self, ops: u32) {
        (self.progress)(ops);
    }
}

fn small(n: usize) -> u32 {
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

    fn program(ops: &[&str]) -> Program {
        let lines: Vec<String> = ops.iter().enumerate().map(|(i, op)| format!("  %v{i} = {op}\n")).collect();
        let text = format!("{HEAD}{}  output \"z\", %y\n}}\n", lines.concat());
        parse_all(&text, "p").unwrap_or_else(|d| panic!("{d:#?}")).remove(0)
    }

    /// Runs a changed program against a sealed one: what the guard says, and how many collectives were let through.
    fn run(sealed: &[&str], own: &[&str], armed: bool) -> (Result<[u8; 32], String>, usize) {
        let (sealed, own) = (program(sealed), program(own));
        let mut sequence = Sequence::new("p", &own.mesh, Rank(0), &sealed, &own);
        let mut at = At::default();
        let progress = |_: u32| {};
        let mut guard = Guard::begin(&mut sequence, &mut at, armed, None, &progress);
        let mut through = 0;
        for (op, _) in own.collectives() {
            if let Err(why) = guard.issuing(op) {
                return (Err(why), through);
            }
            guard.issued(op);
            guard.completed(op);
            through += 1;
        }
        (guard.end(), through)
    }

    #[test]
    fn a_departure_is_refused_before_it_is_issued() {
        let plan = [SUM, GATHER, SUM];
        assert!(run(&plan, &plan, true).0.is_ok());
        // Another shape, an extra one, another order: nothing of it goes out.
        for (own, through, says) in [
            (&[OTHER, GATHER, SUM][..], 0, "issue `tp all_reduce f32[2, 4]"),
            (&[SUM, GATHER, GATHER, SUM], 2, "@p #2 of 3"),
            (&[GATHER, SUM, SUM], 0, "the plan holds `tp all_reduce"),
            (&[SUM, SUM, GATHER], 1, "was about to issue `tp all_reduce"),
            (&[SUM, GATHER, SUM, SUM], 3, "holds no further collective"),
        ] {
            let (outcome, count) = run(&plan, own, true);
            let why = outcome.unwrap_err();
            assert!(count == through && why.contains(says), "{why}");
            assert!(run(&plan, own, false).0.is_ok(), "an unarmed guard refuses nothing");
        }
    }

    #[test]
    fn a_missing_one_is_told_at_the_end_and_its_place_is_written_down() {
        let (outcome, count) = run(&[SUM, SUM, SUM], &[SUM, SUM], true);
        let why = outcome.unwrap_err();
        assert!(count == 2 && why.contains("ended after 2 of 3 collectives"), "{why}");
        let trace = |own: &[&str]| run(&[SUM, SUM, SUM], own, false).0.unwrap();
        assert_ne!(trace(&[SUM, SUM]), trace(&[SUM, SUM, SUM]));
    }

    #[test]
    fn a_line_says_group_members_and_type() {
        let p = program(&[SUM, GATHER]);
        let sequence = Sequence::new("p", &p.mesh, Rank(3), &p, &p);
        let entries: Vec<&Collective> = sequence.own.values().map(|o| &o.entry).collect();
        let said = |c: &Collective| (c.group.clone(), c.ranks.clone(), c.op.clone(), c.ty.clone(), c.root);
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
