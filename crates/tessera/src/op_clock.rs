//! Times the ops of a phase on the host, adds them up by class of op, and keeps the times of single ops if a run wants them.

use tessera_cost::op_class::OpClass;
use tessera_device::Observer;
use tessera_ir::{CapturedGraph, Opcode, Program};
use tessera_runtime::wire::{CollectiveTimes, OpClassWork, PhaseOpTimes};

use crate::clock::monotonic_ns;

/// The classes of a program's ops, and the times of its current run.
#[derive(Debug)]
pub(crate) struct OpTimes {
    /// Names of the classes, in the order of tables.
    names: Vec<String>,
    /// Index of each op's class in `names`; `None` for an op that launches nothing.
    class_of_op: Vec<Option<usize>>,
    /// Whether each op is a wait, whose time counts and which is no op of its own.
    is_wait: Vec<bool>,
    /// Time at which each op began, in nanoseconds on the monotonic clock. The list is reused by every run.
    begins_ns: Vec<u64>,
    /// Whether the backend has reported the begin of each op so far. A device that replays a program as a whole
    /// reports only how far it has come.
    is_op_by_op: bool,
    sent_bytes: Vec<u64>,
    /// Times of the collectives on the monotonic clock, in the order of their issue; empty unless the run keeps the
    /// times of single ops.
    collectives: Vec<CollectiveTimes>,
    keeps_single_ops: bool,
}

impl OpTimes {
    pub(crate) fn new(program: &Program) -> OpTimes {
        let classes = OpClass::of_program(program);
        let mut all: Vec<&OpClass> = classes.iter().flatten().collect();
        all.sort();
        all.dedup();
        OpTimes {
            names: all.iter().map(|class| class.name.clone()).collect(),
            class_of_op: classes.iter().map(|class| all.binary_search(&class.as_ref()?).ok()).collect(),
            is_wait: program.ops.iter().map(|op| op.opcode == Opcode::Wait).collect(),
            begins_ns: Vec::with_capacity(classes.len()),
            is_op_by_op: true,
            sent_bytes: vec![0; all.len()],
            collectives: Vec::new(),
            keeps_single_ops: false,
        }
    }

    /// Returns an observer of one run, which passes everything on to `inner`. With `keeps_single_ops`,
    /// [`OpTimes::single_ops`] returns the times of the run.
    pub(crate) fn observe<'a>(
        &'a mut self,
        inner: &'a mut dyn Observer,
        keeps_single_ops: bool,
    ) -> OpClock<'a> {
        self.begins_ns.clear();
        self.is_op_by_op = true;
        self.sent_bytes.fill(0);
        self.collectives.clear();
        self.keeps_single_ops = keeps_single_ops;
        OpClock { times: self, inner }
    }

    /// Returns the work of the run that has just ended, by class; nothing if the backend did not report each op.
    pub(crate) fn add_up(&self, end_ns: u64) -> Vec<OpClassWork> {
        if !self.has_every_op() {
            return Vec::new();
        }
        let named = |(name, sent): (&String, &u64)| OpClassWork {
            class: name.clone(),
            sent_bytes: *sent,
            ..OpClassWork::default()
        };
        let mut classes: Vec<OpClassWork> = self.names.iter().zip(&self.sent_bytes).map(named).collect();
        let ends = self.begins_ns.iter().skip(1).copied().chain([end_ns]);
        let ops = self.class_of_op.iter().zip(&self.is_wait);
        for ((begin, end), (class, is_wait)) in self.begins_ns.iter().zip(ends).zip(ops) {
            if let Some(work) = class.and_then(|class| classes.get_mut(class)) {
                work.ops += u32::from(!is_wait);
                work.ns += end.saturating_sub(*begin);
            }
        }
        classes
    }

    /// Returns the times of each op of the run that has just ended; `None` if the run keeps none, or if the backend did
    /// not report each op.
    pub(crate) fn single_ops(&self, end_ns: u64) -> Option<PhaseOpTimes> {
        let start_ns = *self.begins_ns.first().filter(|_| self.keeps_single_ops && self.has_every_op())?;
        let since = |ns: u64| ns.saturating_sub(start_ns);
        let collectives = self.collectives.iter().map(|c| CollectiveTimes {
            op: c.op,
            issued_ns: since(c.issued_ns),
            waiting_ns: since(c.waiting_ns),
            completed_ns: since(c.completed_ns),
        });
        Some(PhaseOpTimes {
            start_ns,
            begins_ns: self.begins_ns.iter().map(|ns| since(*ns)).collect(),
            ends_ns: Vec::new(),
            end_ns: since(end_ns),
            collectives: collectives.collect(),
        })
    }

    fn has_every_op(&self) -> bool {
        self.is_op_by_op && self.begins_ns.len() == self.class_of_op.len()
    }

    /// Sets a time of the collective that an op has issued. Few are in flight, so the search from the end is short.
    fn set_time(&mut self, op: usize, set: impl Fn(&mut CollectiveTimes, u64)) {
        if !self.keeps_single_ops {
            return;
        }
        if let Some(times) = self.collectives.iter_mut().rev().find(|times| times.op as usize == op) {
            set(times, monotonic_ns());
        }
    }
}

/// Notes when each op of a run begins.
pub(crate) struct OpClock<'a> {
    times: &'a mut OpTimes,
    inner: &'a mut dyn Observer,
}

impl Observer for OpClock<'_> {
    fn on_issuing(&mut self, op: usize) -> Result<(), String> {
        self.inner.on_issuing(op)
    }

    fn on_all_issuing(&mut self) -> Result<(), String> {
        self.inner.on_all_issuing()
    }

    fn on_launching(&mut self, graph: Option<&CapturedGraph>) -> Result<(), String> {
        self.inner.on_launching(graph)
    }

    fn on_issued(&mut self, op: usize) {
        if self.times.keeps_single_ops {
            let now = monotonic_ns();
            self.times.collectives.push(CollectiveTimes {
                op: u32::try_from(op).unwrap_or(u32::MAX),
                issued_ns: now,
                waiting_ns: now,
                completed_ns: now,
            });
        }
        self.inner.on_issued(op);
    }

    fn on_sent(&mut self, op: usize, bytes: u64) {
        if let Some(class) = self.times.class_of_op.get(op).copied().flatten() {
            self.times.sent_bytes[class] += bytes;
        }
        self.inner.on_sent(op, bytes);
    }

    fn on_waiting(&mut self, op: usize) {
        self.times.set_time(op, |times, now| times.waiting_ns = now);
        self.inner.on_waiting(op);
    }

    fn on_completed(&mut self, op: usize) {
        self.times.set_time(op, |times, now| times.completed_ns = now);
        self.inner.on_completed(op);
    }

    fn on_other_halo(&mut self, op: usize, what: &str) -> Result<(), String> {
        self.inner.on_other_halo(op, what)
    }

    fn on_progress(&mut self, ops: u32) {
        let times = &mut *self.times;
        times.is_op_by_op &=
            times.begins_ns.len() == ops as usize && times.begins_ns.len() < times.class_of_op.len();
        if times.is_op_by_op {
            times.begins_ns.push(monotonic_ns());
        }
        self.inner.on_progress(ops);
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_device::NoObserver;
    use tessera_ir::parse_all;

    use super::*;

    const PROGRAM: &str = "program @p role(all) mesh(tp=2) { \
        %x = input : f32[4, 8] {tp: partial(sum)} \
        %t = ttile.collective.issue all_reduce %x {axis = \"tp\", reduction = \"sum\"} \
        %y = ttile.collective.wait %t : f32[4, 8] \
        %z = ttile.silu %y output \"z\", %z }";

    fn run(times: &mut OpTimes, reports: &[u32], keeps: bool) -> Vec<OpClassWork> {
        let mut nothing = NoObserver;
        let mut clock = times.observe(&mut nothing, keeps);
        for ops in reports {
            clock.on_progress(*ops);
            match ops {
                1 => clock.on_issued(1),
                2 => {
                    clock.on_waiting(1);
                    clock.on_completed(1);
                }
                _ => {}
            }
        }
        clock.on_sent(1, 128);
        times.add_up(monotonic_ns())
    }

    #[test]
    fn each_op_counts_in_its_class_and_only_if_every_op_was_reported() {
        let program = parse_all(PROGRAM, "p").unwrap().remove(0);
        let mut times = OpTimes::new(&program);
        for _ in 0..2 {
            let classes = run(&mut times, &[0, 1, 2, 3, 4], false);
            let counts: Vec<_> = classes.iter().map(|c| (c.class.as_str(), c.ops, c.sent_bytes)).collect();
            assert_eq!(counts, [("memory-bound", 2, 0), ("all_reduce tp", 1, 128)]);
        }
        assert_eq!(run(&mut times, &[2, 4], false), [], "a device that replays the program");
        assert_eq!(run(&mut times, &[0, 1, 2], false), [], "a run that ended early");
    }

    #[test]
    fn single_ops_are_kept_on_request_with_issue_and_wait_in_order() {
        let program = parse_all(PROGRAM, "p").unwrap().remove(0);
        let mut times = OpTimes::new(&program);
        run(&mut times, &[0, 1, 2, 3, 4], false);
        assert_eq!(times.single_ops(monotonic_ns()), None, "nobody asked");
        run(&mut times, &[2, 4], true);
        assert_eq!(times.single_ops(monotonic_ns()), None, "a device that replays the program");
        run(&mut times, &[0, 1, 2, 3, 4], true);
        let ops = times.single_ops(monotonic_ns()).unwrap();
        let [collective] = ops.collectives[..] else { panic!("{ops:?}") };
        assert_eq!((ops.begins_ns.len(), ops.begins_ns[0], collective.op), (5, 0, 1));
        let in_order = [
            ops.begins_ns[1],
            collective.issued_ns,
            ops.begins_ns[2],
            collective.waiting_ns,
            collective.completed_ns,
            ops.begins_ns[3],
            ops.begins_ns[4],
            ops.end_ns,
        ];
        assert!(in_order.is_sorted(), "{ops:?}");
    }
}
