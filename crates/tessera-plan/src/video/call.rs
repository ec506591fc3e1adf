//! Estimates one call by discrete-event simulation: the programs of its phases, in order, on all
//! ranks, with the streams and events of the programs.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_cost::intervals::{Interval, IntervalKind, OverlapTotals, measure_overlap};
use tessera_cost::program_cost::{OpActivity, OpEstimate, ranks_span};
use tessera_cost::stream_sim::{Contention, Task, TaskGraph, TaskId, TaskResource, TaskWindow};
use tessera_cost::{Algorithm, CollectiveCost, CollectiveOp, GroupSpan, MachineModel};
use tessera_ir::Bundle;
use tessera_mesh::{Group, LinkClass, Rank};

use super::representatives::{RankClass, classify_ranks};
use super::schedule::{
    CallSchedule, CommDirection, CommPeers, PhaseSchedule, ScheduledStep, StepEffect, StepLabel,
};

/// The simulated times of one call, with its work, its transfers and its overlap.
#[derive(Debug, Clone, PartialEq)]
pub struct CallEstimate {
    /// Name of the call, such as `chunk.fill3`.
    pub call: String,
    /// Time from the first start to the last end, over all ranks.
    pub ns: f64,
    /// Phases of the call in order.
    pub phases: Vec<PhaseSpan>,
    /// Classes of ranks with equal timings; the simulation follows one representative of each.
    pub rank_classes: Vec<RankClass>,
    /// Busy intervals of the representatives' streams; without names unless requested.
    pub intervals: Vec<Interval>,
    /// Op index of each interval in its phase's program; empty without names.
    pub interval_ops: Vec<usize>,
    /// Collective time of all ranks, and how much of it compute hides.
    pub overlap: OverlapTotals,
    /// Device time of the busiest rank by kind of work, in nanoseconds, without contention.
    pub work_ns: BTreeMap<OpActivity, f64>,
    /// Collective time of the rank with the most, in nanoseconds.
    pub collective_ns: f64,
    /// Bytes that all ranks together send, by link class.
    pub sent_bytes: [f64; 3],
    /// Experts that the rank which waits for them longest fetches from the second tier of memory.
    pub fetches: FetchTotals,
    /// Floating-point operations of all ranks.
    pub flops: f64,
    /// Fraction of full speed at which matmuls and attention run.
    pub throttle_factor: f64,
}

/// The fetches of experts of a rank in a call.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct FetchTotals {
    /// Expected bytes.
    pub bytes: f64,
    /// Time of the transfers, in nanoseconds. The first grouped matmul of each layer waits for its transfer.
    pub ns: f64,
}

/// Start and end of one phase in an estimated call, over all ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseSpan {
    /// Name of the phase with its variant, such as `denoise.fill3`.
    pub name: String,
    /// Start on the rank that begins the phase first, in nanoseconds from the start of the call.
    pub start_ns: f64,
    /// End on the rank that finishes the phase last, in nanoseconds from the start of the call.
    pub end_ns: f64,
}

impl CallEstimate {
    /// Returns the collective time that no compute hides, as a mean per rank, in nanoseconds.
    #[must_use]
    pub fn exposed_ns(&self) -> f64 {
        let ranks: usize = self.rank_classes.iter().map(|p| p.members.len()).sum();
        self.overlap.exposed_ns() / ranks.max(1) as f64
    }

    /// Returns the time of each of the `ops` ops of a rank's program, in nanoseconds, in a call of
    /// one phase with names. The time of a collective includes its device work, and that of a grouped matmul the fetch of
    /// the experts that it waits for.
    #[must_use]
    pub fn op_times_ns(&self, rank: Rank, ops: usize) -> Vec<f64> {
        let mut out = vec![0.0; ops];
        let player = self.rank_classes.iter().find(|p| p.members.contains(&rank));
        let own = |b: &Interval| {
            player.is_some_and(|p| p.representative.0 == b.rank) && b.kind != IntervalKind::Other
        };
        for (bar, op) in self.intervals.iter().zip(&self.interval_ops).filter(|(b, _)| own(b)) {
            if let Some(ns) = out.get_mut(*op) {
                *ns += bar.duration_ns();
            }
        }
        out
    }

    /// Returns the intervals of every rank: a copy of its representative's.
    #[must_use]
    pub fn intervals_of_all_ranks(&self) -> Vec<Interval> {
        let mut out = Vec::new();
        for player in &self.rank_classes {
            let own: Vec<&Interval> =
                self.intervals.iter().filter(|b| b.rank == player.representative.0).collect();
            for rank in &player.members {
                out.extend(own.iter().map(|b| Interval { rank: rank.0, ..(*b).clone() }));
            }
        }
        out
    }
}

/// Estimates a call of a bundle. `named` gives each interval its lane and name; a search omits
/// them.
///
/// # Errors
/// Returns T1115 if ranks form a wait cycle, which no sealed plan has.
pub fn estimate_call(
    bundle: &Bundle,
    call: &str,
    phases: &[String],
    machine: &MachineModel,
    named: bool,
) -> Result<CallEstimate, Box<Diagnostic>> {
    simulate_call(&CallSchedule::from_bundle(bundle, machine, named), call, phases, machine)
}

/// Simulates a call of a schedule.
///
/// # Errors
/// Returns T1115 if ranks form a wait cycle, which no sealed plan has.
pub(super) fn simulate_call(
    schedule: &CallSchedule,
    call: &str,
    phases: &[String],
    machine: &MachineModel,
) -> Result<CallEstimate, Box<Diagnostic>> {
    let classes = classify_ranks(schedule, &machine.cluster);
    let mut simulation = CallSimulation::new(schedule, &classes, machine);
    simulation.reserve_tasks(phases);
    for name in phases {
        simulation.add_phase(name);
    }
    let run = |simulation: &CallSimulation<'_>| {
        let contention = Contention { compute: machine.contention_factor(), links: false };
        simulation.tasks.run(contention).map_err(|stuck| {
            Box::new(stuck.to_diagnostic(|t| simulation.step_label(t).map_or("", |s| &s.name).to_string()))
        })
    };
    // Throttling depends on how much of the call is heavy work, so the first simulation runs at
    // full speed to measure it.
    let mut windows = run(&simulation)?;
    let end = |windows: &[TaskWindow]| windows.iter().map(|w| w.end_ns).fold(0.0, f64::max);
    let work = busiest_rank_work(&simulation.work, 1.0);
    let heavy: f64 = [OpActivity::Gemm, OpActivity::Attention].iter().filter_map(|d| work.get(d)).sum();
    let throttle = machine.profile.executor.throttle_factor(heavy / end(&windows).max(f64::MIN_POSITIVE));
    if throttle < 1.0 {
        simulation.set_throttle(throttle);
        windows = run(&simulation)?;
    }
    let at = |t: &TaskId| windows[t.0 as usize];
    let spans = simulation.phase_marks.iter().map(|(name, begin, end)| PhaseSpan {
        name: name.clone(),
        start_ns: begin.iter().map(|t| at(t).end_ns).fold(f64::INFINITY, f64::min).max(0.0),
        end_ns: end.iter().map(|t| at(t).end_ns).fold(0.0, f64::max),
    });
    let phases: Vec<PhaseSpan> = spans.collect();
    // Group by representative, so that the intervals of each are contiguous.
    let mut intervals: Vec<Vec<Interval>> = vec![Vec::new(); classes.len()];
    let mut ops: Vec<Vec<usize>> = vec![Vec::new(); classes.len()];
    for (i, (origin, w)) in simulation.origins.iter().zip(&windows).enumerate() {
        if origin.step.is_some() && w.end_ns > w.start_ns {
            let label = simulation.step_label(TaskId(i as u32));
            let lane = label.map_or("", |s| if origin.is_launch { "host" } else { &s.lane });
            ops[origin.class].extend(label.map(|s| s.op));
            intervals[origin.class].push(Interval {
                rank: classes[origin.class].representative.0,
                track: lane.to_string(),
                name: label.map_or("", |s| &s.name).to_string(),
                kind: origin.kind,
                start_ns: w.start_ns,
                end_ns: w.end_ns,
            });
        }
    }
    let exchanging = |own: &Vec<Interval>| {
        own.iter().filter(|b| b.kind == IntervalKind::Collective).map(Interval::duration_ns).sum()
    };
    Ok(CallEstimate {
        call: call.to_string(),
        ns: end(&windows),
        throttle_factor: throttle,
        phases,
        overlap: total_overlap(&classes, &intervals),
        collective_ns: intervals.iter().map(exchanging).fold(0.0, f64::max),
        intervals: intervals.into_iter().flatten().collect(),
        interval_ops: ops.into_iter().flatten().collect(),
        work_ns: busiest_rank_work(&simulation.work, throttle),
        sent_bytes: simulation.sent_bytes,
        fetches: simulation.fetches.iter().copied().max_by(|a, b| a.ns.total_cmp(&b.ns)).unwrap_or_default(),
        flops: simulation.flops,
        rank_classes: classes,
    })
}

/// Sums the overlap over all ranks; each rank has that of its representative.
fn total_overlap(classes: &[RankClass], intervals: &[Vec<Interval>]) -> OverlapTotals {
    classes.iter().zip(intervals).fold(OverlapTotals::default(), |sum, (p, own)| {
        let (one, n) = (measure_overlap(own, false), p.members.len() as f64);
        OverlapTotals {
            total_ns: sum.total_ns + n * one.total_ns,
            hidden_ns: sum.hidden_ns + n * one.hidden_ns,
        }
    })
}

/// Device time of a representative by kind of work: the total, and the part that throttling
/// stretches.
type WorkByKind = BTreeMap<OpActivity, (f64, f64)>;

/// Returns the device time by kind of work of the busiest representative, if matmuls and attention
/// run at the fraction `throttle` of full speed.
fn busiest_rank_work(work: &[WorkByKind], throttle: f64) -> BTreeMap<OpActivity, f64> {
    let at = |(ns, paced): &(f64, f64)| paced / throttle + (ns - paced);
    let sum = |w: &WorkByKind| w.values().map(at).sum::<f64>();
    let most = work.iter().max_by(|a, b| sum(a).total_cmp(&sum(b)));
    most.map_or_else(BTreeMap::new, |w| w.iter().map(|(d, x)| (*d, at(x))).collect())
}

/// The step that a simulated task belongs to, for charts.
struct TaskOrigin {
    class: usize,
    kind: IntervalKind,
    /// Phase of the schedule and step of the role in it; `None` for a mark, which no chart shows.
    step: Option<(usize, usize)>,
    /// Whether the task is the host's launch of the step.
    is_launch: bool,
}

/// Stream of a rank for the launches of its host.
const HOST: u8 = u8::MAX;
/// Stream of a rank for the marks that begin and end its phases.
const JOIN: u8 = u8::MAX - 1;

/// The tasks of all representatives under construction.
struct CallSimulation<'a> {
    schedule: &'a CallSchedule,
    classes: &'a [RankClass],
    machine: &'a MachineModel,
    tasks: TaskGraph,
    origins: Vec<TaskOrigin>,
    /// End of each representative's last phase.
    phase_ends: Vec<Option<TaskId>>,
    /// For each rank, the index of its class in `classes`.
    class_of: BTreeMap<Rank, usize>,
    /// Communicators that each representative belongs to, by its partners.
    memberships: Vec<Vec<(CommPeers, Membership)>>,
    /// How often each representative has used each communicator: several sets of partners may share
    /// one communicator.
    use_counts: Vec<Vec<usize>>,
    /// Index of each communicator in `rendezvous_ids`, in order of first use.
    communicators: BTreeMap<CommunicatorKey, u32>,
    /// Rendezvous ids by communicator, in order.
    rendezvous_ids: Vec<Vec<u32>>,
    /// Number of rendezvous so far, which is the id of the next one.
    rendezvous_count: u32,
    /// Priced transfers, each with its cost.
    transfers: Vec<(TransferKey, CollectiveCost)>,
    /// Tasks whose duration depends on throttling.
    throttled: Vec<(TaskId, OpEstimate)>,
    /// Name of each phase, with the start marks and the end marks of the representatives.
    phase_marks: Vec<(String, Vec<TaskId>, Vec<TaskId>)>,
    work: Vec<WorkByKind>,
    sent_bytes: [f64; 3],
    /// Fetches of each representative.
    fetches: Vec<FetchTotals>,
    flops: f64,
}

/// What decides the cost of a transfer: op, bits of the bytes as `f64`, tag, and span.
type TransferKey = (CollectiveOp, u64, Option<Algorithm>, GroupSpan);

/// Identifies a communicator: the classes that take part, in order, or the direction of a send and
/// its receive.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
enum CommunicatorKey {
    Group(Option<Group>, Vec<usize>),
    SendRecv(usize, usize),
}

/// A representative's membership in a communicator, reused at every rendezvous.
#[derive(Debug, Clone, Copy)]
struct Membership {
    span: GroupSpan,
    /// Index of the communicator; `None` if the representative has no partner.
    communicator: Option<u32>,
}

/// One phase of one representative under construction.
struct PhaseInProgress {
    class: usize,
    phase: usize,
    begin: TaskId,
    /// Last task of each stream.
    last_tasks: Vec<(u8, TaskId)>,
    /// Task of each step so far, if the step is an event, a collective or a fetch.
    step_tasks: Vec<Option<TaskId>>,
}

impl PhaseInProgress {
    /// Returns the last task of a stream, or the start of the phase.
    fn last_task(&self, stream: u8) -> TaskId {
        self.last_tasks.iter().find(|(s, _)| *s == stream).map_or(self.begin, |(_, task)| *task)
    }

    /// Returns the origin of a task of the device for a step.
    fn origin_of(&self, step: usize, kind: IntervalKind) -> TaskOrigin {
        TaskOrigin { class: self.class, kind, step: Some((self.phase, step)), is_launch: false }
    }
}

impl<'a> CallSimulation<'a> {
    fn new(
        schedule: &'a CallSchedule,
        classes: &'a [RankClass],
        machine: &'a MachineModel,
    ) -> CallSimulation<'a> {
        let stands = |(i, p): (usize, &RankClass)| p.members.iter().map(move |r| (*r, i)).collect::<Vec<_>>();
        CallSimulation {
            schedule,
            classes,
            machine,
            tasks: TaskGraph::default(),
            origins: Vec::new(),
            phase_ends: vec![None; classes.len()],
            class_of: classes.iter().enumerate().flat_map(stands).collect(),
            memberships: vec![Vec::new(); classes.len()],
            use_counts: vec![Vec::new(); classes.len()],
            communicators: BTreeMap::new(),
            rendezvous_ids: Vec::new(),
            rendezvous_count: 0,
            transfers: Vec::new(),
            throttled: Vec::new(),
            phase_marks: Vec::new(),
            work: vec![BTreeMap::new(); classes.len()],
            sent_bytes: [0.0; 3],
            fetches: vec![FetchTotals::default(); classes.len()],
            flops: 0.0,
        }
    }

    /// Reserves room for one task per step of these phases.
    fn reserve_tasks(&mut self, phases: &[String]) {
        let found = phases
            .iter()
            .filter_map(|name| self.schedule.phase_index(name))
            .map(|at| &self.schedule.phases[at]);
        let steps =
            |phase: &PhaseSchedule| -> usize { self.classes.iter().map(|p| phase.roles[p.role].len()).sum() };
        let tasks = found.map(steps).sum();
        self.tasks.reserve(tasks);
        self.origins.reserve(tasks);
    }

    fn add_phase(&mut self, name: &str) {
        let score = self.schedule;
        let Some(phase) = score.phase_index(name) else { return };
        let (mut begins, mut ends) = (Vec::new(), Vec::new());
        for (i, player) in self.classes.iter().enumerate() {
            let part = &score.phases[phase].roles[player.role];
            let begin = self.add_mark(i, self.phase_ends[i]);
            let mut progress =
                PhaseInProgress { class: i, phase, begin, last_tasks: Vec::new(), step_tasks: Vec::new() };
            for at in part.step_order() {
                self.add_step(&mut progress, at, &part.steps[at]);
            }
            let end = self.add_mark(i, Some(begin));
            for (_, last) in &progress.last_tasks {
                self.tasks.add_dependency(end, *last);
            }
            self.phase_ends[i] = Some(end);
            begins.push(begin);
            ends.push(end);
        }
        self.phase_marks.push((name.to_string(), begins, ends));
    }

    /// Adds a mark: a task without duration on a representative's join stream.
    fn add_mark(&mut self, class: usize, after: Option<TaskId>) -> TaskId {
        let drawn = TaskOrigin { class, kind: IntervalKind::Other, step: None, is_launch: false };
        let task = self.push(drawn, JOIN, 0.0, TaskResource::Nothing, None);
        if let Some(after) = after {
            self.tasks.add_dependency(task, after);
        }
        task
    }

    fn push(
        &mut self,
        origin: TaskOrigin,
        stream: u8,
        work_ns: f64,
        uses: TaskResource,
        meets: Option<u32>,
    ) -> TaskId {
        let rank = self.classes[origin.class].representative.0;
        self.origins.push(origin);
        self.tasks.push(Task { rank, stream, work_ns, resource: uses, collective: meets })
    }

    fn add_step(&mut self, progress: &mut PhaseInProgress, at: usize, step: &ScheduledStep) {
        let price = &step.price;
        let member_count = self.classes[progress.class].members.len() as f64;
        self.flops += price.flops * member_count;
        if price.ns > 0.0 {
            let work = self.work[progress.class].entry(price.activity).or_insert((0.0, 0.0));
            (work.0, work.1) = (work.0 + price.ns, work.1 + price.throttled_ns);
        }
        let here = progress.step_tasks.len();
        let earlier = |back: &u32| progress.step_tasks.get(here - *back as usize).copied().flatten();
        let mut after: Vec<TaskId> = step.dependencies.iter().filter_map(earlier).collect();
        let host = self.machine.launch_ns() * f64::from(price.launches);
        if host > 0.0 {
            let drawn = TaskOrigin { is_launch: true, ..progress.origin_of(at, IntervalKind::Other) };
            let launch = self.push(drawn, HOST, host, TaskResource::Nothing, None);
            self.add_dependencies(progress, HOST, launch, &[]);
            after.push(launch);
        }
        let works = price.ns > 0.0;
        let task = match step.effect {
            StepEffect::Event => Some(progress.last_task(step.stream)),
            StepEffect::Wait => {
                let uses = if works { TaskResource::Compute } else { TaskResource::Nothing };
                self.add_work(progress, (at, step), IntervalKind::Pack, uses, &after);
                None
            }
            StepEffect::Communicate { peers: whom, op: what, bytes, tag, is_async: issue } => {
                if works {
                    self.add_work(progress, (at, step), IntervalKind::Pack, TaskResource::Compute, &after);
                    after.clear();
                }
                let task = self.add_communication(progress, (at, step), whom, (what, bytes, tag), &after);
                issue.then_some(task)
            }
            StepEffect::Fetch { io, bytes, ns } => {
                after.push(progress.last_task(step.stream));
                let sum = &mut self.fetches[progress.class];
                (sum.bytes, sum.ns) = (sum.bytes + bytes, sum.ns + ns);
                let drawn = progress.origin_of(at, IntervalKind::Fetch);
                let task = self.push(drawn, io, ns, TaskResource::Link(LinkClass::Host), None);
                self.add_dependencies(progress, io, task, &after);
                Some(task)
            }
            StepEffect::Compute => {
                if works || !after.is_empty() {
                    self.add_work(progress, (at, step), IntervalKind::Compute, TaskResource::Compute, &after);
                }
                None
            }
        };
        progress.step_tasks.push(task);
    }

    /// Adds the device work of a step.
    fn add_work(
        &mut self,
        progress: &mut PhaseInProgress,
        (at, step): (usize, &ScheduledStep),
        kind: IntervalKind,
        uses: TaskResource,
        after: &[TaskId],
    ) {
        let drawn = progress.origin_of(at, kind);
        let task = self.push(drawn, step.stream, step.price.ns, uses, None);
        if step.price.throttled_ns > 0.0 {
            self.throttled.push((task, step.price));
        }
        self.add_dependencies(progress, step.stream, task, after);
    }

    fn add_communication(
        &mut self,
        progress: &mut PhaseInProgress,
        (at, step): (usize, &ScheduledStep),
        peers: CommPeers,
        (what, bytes, tag): (CollectiveOp, f64, Option<Algorithm>),
        after: &[TaskId],
    ) -> TaskId {
        let member_count = self.classes[progress.class].members.len() as f64;
        let (span, meets) = self.enter_rendezvous(progress.class, peers);
        let transfer = self.price_transfer((what, bytes, tag), span);
        if !matches!(peers.direction, CommDirection::RecvFrom(_)) {
            for (sum, sent) in self.sent_bytes.iter_mut().zip(transfer.sent_bytes) {
                *sum += sent * member_count;
            }
        }
        let class = if span.domains > 1 { LinkClass::Network } else { LinkClass::Domain };
        let drawn = progress.origin_of(at, IntervalKind::Collective);
        let task = self.push(drawn, step.stream, transfer.ns, TaskResource::Link(class), meets);
        self.add_dependencies(progress, step.stream, task, after);
        task
    }

    fn price_transfer(
        &mut self,
        (what, bytes, tag): (CollectiveOp, f64, Option<Algorithm>),
        span: GroupSpan,
    ) -> CollectiveCost {
        let key = (what, bytes.to_bits(), tag, span);
        if let Some((_, known)) = self.transfers.iter().find(|(k, _)| *k == key) {
            return *known;
        }
        let transfer = self.machine.tagged_collective_cost(what, bytes, span, tag);
        self.transfers.push((key, transfer));
        transfer
    }

    /// Returns the span of the rendezvous that a representative enters next with these partners,
    /// and its id if other ranks take part. The n-th use of a communicator by each member is the
    /// same rendezvous.
    fn enter_rendezvous(&mut self, class: usize, peers: CommPeers) -> (GroupSpan, Option<u32>) {
        let at = match self.memberships[class].iter().position(|(w, _)| *w == peers) {
            Some(at) => at,
            None => {
                let membership = self.find_membership(class, peers);
                self.memberships[class].push((peers, membership));
                self.memberships[class].len() - 1
            }
        };
        let membership = self.memberships[class][at].1;
        let Some(kind) = membership.communicator.map(|k| k as usize) else { return (membership.span, None) };
        let came = &mut self.use_counts[class];
        came.resize(came.len().max(kind + 1), 0);
        let nth = came[kind];
        came[kind] += 1;
        let numbers = &mut self.rendezvous_ids[kind];
        if numbers.len() <= nth {
            numbers.push(self.rendezvous_count);
            self.rendezvous_count += 1;
        }
        (membership.span, Some(numbers[nth]))
    }

    fn find_membership(&mut self, class: usize, peers: CommPeers) -> Membership {
        let others = peers.participants(&self.schedule.mesh, self.classes[class].representative);
        let of = |r: &Rank| self.class_of.get(r).copied().unwrap_or(class);
        let kind = (others.len() > 1).then(|| match peers.direction {
            CommDirection::SendTo(_) => CommunicatorKey::SendRecv(class, of(&others[1])),
            CommDirection::RecvFrom(_) => CommunicatorKey::SendRecv(of(&others[1]), class),
            CommDirection::Collective => {
                let mut all: Vec<usize> = others.iter().map(of).collect();
                all.sort_unstable();
                all.dedup();
                CommunicatorKey::Group(peers.group, all)
            }
        });
        let kind = kind.map(|kind| {
            let next = self.communicators.len() as u32;
            *self.communicators.entry(kind).or_insert(next)
        });
        self.rendezvous_ids.resize(self.communicators.len(), Vec::new());
        Membership { span: ranks_span(&self.machine.cluster, &others), communicator: kind }
    }

    /// Orders a task after the start of its phase, if it is the first on its stream, and after its
    /// dependencies.
    fn add_dependencies(
        &mut self,
        progress: &mut PhaseInProgress,
        stream: u8,
        task: TaskId,
        after: &[TaskId],
    ) {
        match progress.last_tasks.iter_mut().find(|(s, _)| *s == stream) {
            Some((_, last)) => *last = task,
            None => {
                progress.last_tasks.push((stream, task));
                self.tasks.add_dependency(task, progress.begin);
            }
        }
        for earlier in after {
            self.tasks.add_dependency(task, *earlier);
        }
    }

    /// Sets the durations of matmuls and attention to those at a fraction of full speed.
    fn set_throttle(&mut self, throttle: f64) {
        for (task, price) in &self.throttled {
            self.tasks.set_work(*task, price.ns_at_speed(throttle));
        }
    }

    /// Returns the label of a task, if its schedule has labels.
    fn step_label(&self, task: TaskId) -> Option<&'a StepLabel> {
        let drawn = &self.origins[task.0 as usize];
        let (phase, step) = drawn.step?;
        let part = &self.schedule.phases[phase].roles[self.classes[drawn.class].role];
        part.labels.as_ref().map(|names| &names[step])
    }
}
