//! The event loop behind [`super::TaskGraph::run`].
//!
//! An *instance* is a unit that starts and ends as one: a single task, or all tasks of one
//! collective. A running instance has remaining work and a rate. Whenever a rate changes, the loop
//! updates the remaining work and predicts a new end; the instance's stamp invalidates the older
//! prediction.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use tessera_mesh::LinkClass;

use super::{Contention, Task, TaskDeadlock, TaskId, TaskResource, TaskWindow};

pub(super) fn run_tasks(
    tasks: &[Task],
    edges: &[(u32, u32)],
    contention: Contention,
) -> Result<Vec<TaskWindow>, TaskDeadlock> {
    let mut engine = EventLoop::new(tasks, edges, contention);
    let mut ready: Vec<u32> = (0..tasks.len() as u32).filter(|&t| engine.pending[t as usize] == 0).collect();
    engine.start_ready(&mut ready);
    while let Some(Reverse(EndEvent { time, .. })) = engine.events.peek().copied() {
        engine.now = time.0;
        while let Some(Reverse(event)) = engine.events.peek().copied() {
            if event.time != time {
                break;
            }
            engine.events.pop();
            if engine.instances[event.instance as usize].stamp == event.stamp {
                engine.end_instance(event.instance, &mut ready);
            }
        }
        engine.start_ready(&mut ready);
    }
    engine.into_windows()
}

/// A simulated time in nanoseconds with the total order that the event queue needs.
#[derive(Debug, Clone, Copy, PartialEq)]
struct EventTime(f64);

impl Eq for EventTime {}
impl PartialOrd for EventTime {
    fn partial_cmp(&self, other: &EventTime) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for EventTime {
    fn cmp(&self, other: &EventTime) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct EndEvent {
    time: EventTime,
    instance: u32,
    stamp: u32,
}

struct TaskInstance {
    /// Members, as a range of `EventLoop::members`.
    first: u32,
    last: u32,
    /// Number of members that are not ready yet.
    missing: u32,
    remaining_ns: f64,
    /// Current slowdown relative to undisturbed execution.
    slowdown: f64,
    /// Time at which `remaining_ns` was valid.
    since_ns: f64,
    /// Stamp of the valid predicted end; odd while the instance runs.
    stamp: u32,
    /// Number of the last round that handled this instance. Each start or end of an instance is a
    /// round, and updates a rate at most once.
    last_round: u32,
}

#[derive(Default)]
struct DeviceState {
    /// Index of the instance that occupies compute; `None` while compute is idle.
    computing: Option<u32>,
    /// Instances that wait for compute, in order of readiness.
    queue: VecDeque<u32>,
    /// Number of running transfers between devices.
    transfers: u32,
    /// Running transfers with their link class.
    links: Vec<(u32, LinkClass)>,
}

struct EventLoop<'a> {
    tasks: &'a [Task],
    contention: Contention,
    /// Number of unfinished dependencies of each task.
    pending: Vec<u32>,
    /// The successors of task `t` are `later[later_from[t]..later_from[t + 1]]`.
    later_from: Vec<u32>,
    later: Vec<u32>,
    instance_of: Vec<u32>,
    members: Vec<u32>,
    instances: Vec<TaskInstance>,
    /// For each task, the index of its rank in `devices`.
    device_of: Vec<u32>,
    devices: Vec<DeviceState>,
    events: BinaryHeap<Reverse<EndEvent>>,
    windows: Vec<TaskWindow>,
    ended: Vec<bool>,
    round: u32,
    now: f64,
}

impl<'a> EventLoop<'a> {
    fn new(tasks: &'a [Task], edges: &[(u32, u32)], contention: Contention) -> EventLoop<'a> {
        let n = tasks.len();
        let mut edges: Vec<(u32, u32)> = edges.to_vec();
        let (device_of, device_count) = assign_devices(tasks);
        push_stream_edges(tasks, &device_of, device_count, &mut edges);
        let Successors { pending, later_from, later } = Successors::from_edges(n, &edges);
        let Instances { members, instances, instance_of } = Instances::from_tasks(tasks);
        EventLoop {
            tasks,
            contention,
            pending,
            later_from,
            later,
            instance_of,
            members,
            instances,
            device_of,
            devices: (0..device_count).map(|_| DeviceState::default()).collect(),
            events: BinaryHeap::new(),
            windows: vec![TaskWindow::default(); n],
            ended: vec![false; n],
            round: 0,
            now: 0.0,
        }
    }

    fn member_range(&self, instance: u32) -> std::ops::Range<usize> {
        let i = &self.instances[instance as usize];
        i.first as usize..i.last as usize
    }

    /// Returns whether the instance occupies the compute of its one member.
    fn uses_compute(&self, instance: u32) -> bool {
        let members = self.member_range(instance);
        let task = &self.tasks[self.members[members.start] as usize];
        members.len() == 1 && task.collective.is_none() && task.resource == TaskResource::Compute
    }

    /// Marks tasks without unfinished dependencies as ready, in order of number, and starts those
    /// that can start.
    fn start_ready(&mut self, ready: &mut Vec<u32>) {
        ready.sort_unstable();
        for task in ready.drain(..) {
            self.windows[task as usize].ready_ns = self.now;
            let instance = self.instance_of[task as usize];
            self.instances[instance as usize].missing -= 1;
            if self.instances[instance as usize].missing > 0 {
                continue;
            }
            if self.uses_compute(instance) {
                let device = &mut self.devices[self.device_of[task as usize] as usize];
                if device.computing.is_some() {
                    device.queue.push_back(instance);
                    continue;
                }
                device.computing = Some(instance);
            }
            self.start_instance(instance);
        }
    }

    fn start_instance(&mut self, instance: u32) {
        for m in self.member_range(instance) {
            let task = self.members[m] as usize;
            self.windows[task].start_ns = self.now;
            if let TaskResource::Link(class) = self.tasks[task].resource {
                let device = &mut self.devices[self.device_of[task] as usize];
                device.links.push((instance, class));
                device.transfers += u32::from(class != LinkClass::Host);
            }
        }
        let i = &mut self.instances[instance as usize];
        i.since_ns = self.now;
        i.slowdown = 0.0;
        i.stamp += 1;
        self.update_overlapping_rates(instance);
        self.update_rate(instance);
    }

    fn end_instance(&mut self, instance: u32, ready: &mut Vec<u32>) {
        let computes = self.uses_compute(instance);
        self.instances[instance as usize].stamp += 1;
        for m in self.member_range(instance) {
            let task = self.members[m] as usize;
            self.windows[task].end_ns = self.now;
            self.ended[task] = true;
            for l in self.later_from[task] as usize..self.later_from[task + 1] as usize {
                let later = self.later[l];
                self.pending[later as usize] -= 1;
                if self.pending[later as usize] == 0 {
                    ready.push(later);
                }
            }
            if let TaskResource::Link(class) = self.tasks[task].resource {
                let device = &mut self.devices[self.device_of[task] as usize];
                device.links.retain(|l| l.0 != instance);
                device.transfers -= u32::from(class != LinkClass::Host);
            }
        }
        self.update_overlapping_rates(instance);
        if computes {
            let device = self.device_of[self.members[self.member_range(instance).start] as usize] as usize;
            self.devices[device].computing = self.devices[device].queue.pop_front();
            if let Some(next) = self.devices[device].computing {
                self.start_instance(next);
            }
        }
    }

    /// Updates the rates of all instances that overlap a transfer which starts or ends.
    fn update_overlapping_rates(&mut self, instance: u32) {
        self.round += 1;
        self.instances[instance as usize].last_round = self.round;
        for m in self.member_range(instance) {
            let task = self.members[m] as usize;
            let TaskResource::Link(_) = self.tasks[task].resource else { continue };
            let device = self.device_of[task] as usize;
            if let Some(computing) = self.devices[device].computing {
                self.update_rate_once(computing);
            }
            if self.contention.links {
                for l in 0..self.devices[device].links.len() {
                    self.update_rate_once(self.devices[device].links[l].0);
                }
            }
        }
    }

    fn update_rate_once(&mut self, instance: u32) {
        let seen = &mut self.instances[instance as usize].last_round;
        if *seen != self.round {
            *seen = self.round;
            self.update_rate(instance);
        }
    }

    /// Sets the current rate of a running instance and predicts its end.
    fn update_rate(&mut self, instance: u32) {
        let slower = self.current_slowdown(instance);
        let now = self.now;
        let i = &mut self.instances[instance as usize];
        if i.slowdown == slower {
            return;
        }
        if i.slowdown > 0.0 {
            i.remaining_ns = (i.remaining_ns - (now - i.since_ns) / i.slowdown).max(0.0);
        }
        (i.since_ns, i.slowdown, i.stamp) = (now, slower, i.stamp + 2);
        let time = EventTime(now + i.remaining_ns * slower);
        self.events.push(Reverse(EndEvent { time, instance, stamp: i.stamp }));
    }

    fn current_slowdown(&self, instance: u32) -> f64 {
        let members = self.member_range(instance);
        let device = |m: usize| &self.devices[self.device_of[self.members[m] as usize] as usize];
        if self.uses_compute(instance) {
            return if device(members.start).transfers > 0 { self.contention.compute.max(1.0) } else { 1.0 };
        }
        if !self.contention.links {
            return 1.0;
        }
        let sharing = |m: usize| match self.tasks[self.members[m] as usize].resource {
            TaskResource::Link(class) => device(m).links.iter().filter(|l| l.1 == class).count() as f64,
            TaskResource::Compute | TaskResource::Nothing => 1.0,
        };
        members.map(sharing).fold(1.0, f64::max)
    }

    fn into_windows(self) -> Result<Vec<TaskWindow>, TaskDeadlock> {
        if self.ended.iter().all(|e| *e) {
            return Ok(self.windows);
        }
        let mut heads: BTreeMap<(u32, u8), u32> = BTreeMap::new();
        for (i, task) in self.tasks.iter().enumerate().filter(|(i, _)| !self.ended[*i]) {
            heads.entry((task.rank, task.stream)).or_insert(i as u32);
        }
        let mut waiting: Vec<TaskId> = heads.into_values().map(TaskId).collect();
        waiting.sort_unstable();
        Err(TaskDeadlock { waiting })
    }
}

/// Numbers the ranks of the tasks in order of their first task. Returns the number of each task's
/// rank, and the number of ranks.
fn assign_devices(tasks: &[Task]) -> (Vec<u32>, usize) {
    let mut devices: BTreeMap<u32, u32> = BTreeMap::new();
    let mut device_of: Vec<u32> = Vec::with_capacity(tasks.len());
    for (i, task) in tasks.iter().enumerate() {
        // Consecutive tasks mostly belong to one rank.
        let device = match i.checked_sub(1) {
            Some(before) if tasks[before].rank == task.rank => device_of[before],
            _ => {
                let next = devices.len() as u32;
                *devices.entry(task.rank).or_insert(next)
            }
        };
        device_of.push(device);
    }
    (device_of, devices.len())
}

/// Adds an edge from each task to the task before it on its stream.
fn push_stream_edges(tasks: &[Task], device_of: &[u32], device_count: usize, edges: &mut Vec<(u32, u32)>) {
    edges.reserve(tasks.len());
    // Last task of each stream, by device.
    let mut last_of: Vec<Vec<(u8, u32)>> = vec![Vec::new(); device_count];
    for (i, task) in tasks.iter().enumerate() {
        let streams = &mut last_of[device_of[i] as usize];
        match streams.iter_mut().find(|(s, _)| *s == task.stream) {
            Some((_, last)) => {
                edges.push((i as u32, *last));
                *last = i as u32;
            }
            None => streams.push((task.stream, i as u32)),
        }
    }
}

/// The dependencies, indexed by the task that others wait for. [`EventLoop`] describes the fields.
struct Successors {
    pending: Vec<u32>,
    later_from: Vec<u32>,
    later: Vec<u32>,
}

impl Successors {
    /// Indexes the edges of `n` tasks, pairs of a task and one that it waits for.
    fn from_edges(n: usize, edges: &[(u32, u32)]) -> Successors {
        let mut pending = vec![0; n];
        let mut later_from = vec![0u32; n + 1];
        for &(later, earlier) in edges {
            pending[later as usize] += 1;
            later_from[earlier as usize + 1] += 1;
        }
        for i in 0..n {
            later_from[i + 1] += later_from[i];
        }
        let mut fill = later_from.clone();
        let mut later = vec![0; edges.len()];
        for &(after, earlier) in edges {
            later[fill[earlier as usize] as usize] = after;
            fill[earlier as usize] += 1;
        }
        Successors { pending, later_from, later }
    }
}

/// The tasks, grouped into instances. [`EventLoop`] describes the fields.
struct Instances {
    members: Vec<u32>,
    instances: Vec<TaskInstance>,
    instance_of: Vec<u32>,
}

impl Instances {
    /// Groups the tasks of each collective, in order of the collective's number; every other task
    /// is an instance of its own.
    fn from_tasks(tasks: &[Task]) -> Instances {
        let n = tasks.len();
        let mut meets: Vec<(u32, u32)> =
            tasks.iter().zip(0..).filter_map(|(task, i)| Some((task.collective?, i))).collect();
        meets.sort_unstable();
        let mut all = Instances {
            members: Vec::with_capacity(n),
            instances: Vec::with_capacity(n),
            instance_of: vec![0; n],
        };
        for group in meets.chunk_by(|a, b| a.0 == b.0) {
            all.push(tasks, group.iter().map(|m| m.1));
        }
        for t in (0..n as u32).filter(|&t| tasks[t as usize].collective.is_none()) {
            all.push(tasks, std::iter::once(t));
        }
        all
    }

    fn push(&mut self, tasks: &[Task], group: impl Iterator<Item = u32>) {
        let first = self.members.len() as u32;
        let mut work: f64 = 0.0;
        for t in group {
            work = work.max(tasks[t as usize].work_ns);
            self.instance_of[t as usize] = self.instances.len() as u32;
            self.members.push(t);
        }
        let last = self.members.len() as u32;
        self.instances.push(TaskInstance {
            first,
            last,
            missing: last - first,
            remaining_ns: work,
            slowdown: 1.0,
            since_ns: 0.0,
            stamp: 0,
            last_round: 0,
        });
    }
}
