//! The loop of events behind [`super::Tasks::run`].
//!
//! What starts and ends as one is an *instance*: a task by itself, or all tasks of one collective. An instance under way
//! has work left and a rate; whenever a rate changes, what is left is brought up to date and the end is foretold anew,
//! and the older foretelling is known by its stamp.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use tessera_mesh::LinkClass;

use super::{Contention, Stuck, Task, TaskId, Uses, Window};

pub(super) fn run(
    tasks: &[Task],
    edges: &[(u32, u32)],
    contention: Contention,
) -> Result<Vec<Window>, Stuck> {
    let mut engine = Engine::new(tasks, edges, contention);
    let mut ready: Vec<u32> = (0..tasks.len() as u32).filter(|&t| engine.pending[t as usize] == 0).collect();
    engine.reach(&mut ready);
    while let Some(Reverse(Event { time, .. })) = engine.events.peek().copied() {
        engine.now = time.0;
        while let Some(Reverse(event)) = engine.events.peek().copied() {
            if event.time != time {
                break;
            }
            engine.events.pop();
            if engine.instances[event.instance as usize].stamp == event.stamp {
                engine.end(event.instance, &mut ready);
            }
        }
        engine.reach(&mut ready);
    }
    engine.finish()
}

/// A time with a total order.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Time(f64);

impl Eq for Time {}
impl PartialOrd for Time {
    fn partial_cmp(&self, other: &Time) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Time {
    fn cmp(&self, other: &Time) -> std::cmp::Ordering {
        self.0.total_cmp(&other.0)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    time: Time,
    instance: u32,
    stamp: u32,
}

struct Instance {
    /// Members, as a range of `Engine::members`.
    first: u32,
    last: u32,
    /// Members that are not ready yet.
    missing: u32,
    left_ns: f64,
    /// How many times longer than undisturbed it takes now.
    slower: f64,
    /// When `left_ns` was true.
    since_ns: f64,
    /// Which foretold end counts; odd while under way.
    stamp: u32,
    /// Round in which its rate was last looked at.
    seen: u32,
}

#[derive(Default)]
struct Device {
    /// Instance that has compute.
    computing: Option<u32>,
    /// Instances that want it, in order of readiness.
    queue: VecDeque<u32>,
    /// Transfers between devices under way.
    transfers: u32,
    /// Transfers under way, with their class.
    links: Vec<(u32, LinkClass)>,
}

struct Engine<'a> {
    tasks: &'a [Task],
    contention: Contention,
    /// What each task still waits for.
    pending: Vec<u32>,
    /// Later tasks of each task, as ranges of `later`.
    later_from: Vec<u32>,
    later: Vec<u32>,
    instance_of: Vec<u32>,
    members: Vec<u32>,
    instances: Vec<Instance>,
    /// Device of each task.
    device_of: Vec<u32>,
    devices: Vec<Device>,
    events: BinaryHeap<Reverse<Event>>,
    windows: Vec<Window>,
    ended: Vec<bool>,
    round: u32,
    now: f64,
}

impl<'a> Engine<'a> {
    fn new(tasks: &'a [Task], edges: &[(u32, u32)], contention: Contention) -> Engine<'a> {
        let n = tasks.len();
        let mut edges: Vec<(u32, u32)> = edges.to_vec();
        edges.reserve(n);
        // Last task of each stream, by device.
        let mut last_of: Vec<Vec<(u8, u32)>> = Vec::new();
        let mut devices: BTreeMap<u32, u32> = BTreeMap::new();
        let mut device_of: Vec<u32> = Vec::with_capacity(n);
        let mut meets: Vec<(u32, u32)> = Vec::new();
        for (i, task) in tasks.iter().enumerate() {
            // Tasks of a rank mostly come together.
            let device = match i.checked_sub(1) {
                Some(before) if tasks[before].rank == task.rank => device_of[before],
                _ => {
                    let next = devices.len() as u32;
                    *devices.entry(task.rank).or_insert(next)
                }
            };
            device_of.push(device);
            last_of.resize_with(devices.len(), Vec::new);
            let streams = &mut last_of[device as usize];
            match streams.iter_mut().find(|(s, _)| *s == task.stream) {
                Some((_, last)) => {
                    edges.push((i as u32, *last));
                    *last = i as u32;
                }
                None => streams.push((task.stream, i as u32)),
            }
            if let Some(meet) = task.meets {
                meets.push((meet, i as u32));
            }
        }
        meets.sort_unstable();
        let mut pending = vec![0; n];
        let mut later_from = vec![0u32; n + 1];
        for &(later, earlier) in &edges {
            pending[later as usize] += 1;
            later_from[earlier as usize + 1] += 1;
        }
        for i in 0..n {
            later_from[i + 1] += later_from[i];
        }
        let mut fill = later_from.clone();
        let mut later = vec![0; edges.len()];
        for &(after, earlier) in &edges {
            later[fill[earlier as usize] as usize] = after;
            fill[earlier as usize] += 1;
        }
        let mut members = Vec::with_capacity(n);
        let mut instances = Vec::with_capacity(n);
        let mut instance_of = vec![0; n];
        let mut instance = |group: &mut dyn Iterator<Item = u32>| {
            let first = members.len() as u32;
            let mut work: f64 = 0.0;
            for t in group {
                work = work.max(tasks[t as usize].work_ns);
                instance_of[t as usize] = instances.len() as u32;
                members.push(t);
            }
            let last = members.len() as u32;
            instances.push(Instance {
                first,
                last,
                missing: last - first,
                left_ns: work,
                slower: 1.0,
                since_ns: 0.0,
                stamp: 0,
                seen: 0,
            });
        };
        for group in meets.chunk_by(|a, b| a.0 == b.0) {
            instance(&mut group.iter().map(|m| m.1));
        }
        for t in (0..n as u32).filter(|&t| tasks[t as usize].meets.is_none()) {
            instance(&mut std::iter::once(t));
        }
        Engine {
            tasks,
            contention,
            pending,
            later_from,
            later,
            instance_of,
            members,
            instances,
            device_of,
            devices: (0..devices.len()).map(|_| Device::default()).collect(),
            events: BinaryHeap::new(),
            windows: vec![Window::default(); n],
            ended: vec![false; n],
            round: 0,
            now: 0.0,
        }
    }

    fn members(&self, instance: u32) -> std::ops::Range<usize> {
        let i = &self.instances[instance as usize];
        i.first as usize..i.last as usize
    }

    /// Whether the instance books the compute of its one member.
    fn computes(&self, instance: u32) -> bool {
        let members = self.members(instance);
        let task = &self.tasks[self.members[members.start] as usize];
        members.len() == 1 && task.meets.is_none() && task.uses == Uses::Compute
    }

    /// Notes tasks that wait for nothing any more, in order of number, and starts what can start.
    fn reach(&mut self, ready: &mut Vec<u32>) {
        ready.sort_unstable();
        for task in ready.drain(..) {
            self.windows[task as usize].ready_ns = self.now;
            let instance = self.instance_of[task as usize];
            self.instances[instance as usize].missing -= 1;
            if self.instances[instance as usize].missing > 0 {
                continue;
            }
            if self.computes(instance) {
                let device = &mut self.devices[self.device_of[task as usize] as usize];
                if device.computing.is_some() {
                    device.queue.push_back(instance);
                    continue;
                }
                device.computing = Some(instance);
            }
            self.start(instance);
        }
    }

    fn start(&mut self, instance: u32) {
        for m in self.members(instance) {
            let task = self.members[m] as usize;
            self.windows[task].start_ns = self.now;
            if let Uses::Link(class) = self.tasks[task].uses {
                let device = &mut self.devices[self.device_of[task] as usize];
                device.links.push((instance, class));
                device.transfers += u32::from(class != LinkClass::Host);
            }
        }
        let i = &mut self.instances[instance as usize];
        i.since_ns = self.now;
        i.slower = 0.0;
        i.stamp += 1;
        self.rates_around(instance);
        self.rate(instance);
    }

    fn end(&mut self, instance: u32, ready: &mut Vec<u32>) {
        let computes = self.computes(instance);
        self.instances[instance as usize].stamp += 1;
        for m in self.members(instance) {
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
            if let Uses::Link(class) = self.tasks[task].uses {
                let device = &mut self.devices[self.device_of[task] as usize];
                device.links.retain(|l| l.0 != instance);
                device.transfers -= u32::from(class != LinkClass::Host);
            }
        }
        self.rates_around(instance);
        if computes {
            let device = self.device_of[self.members[self.members(instance).start] as usize] as usize;
            self.devices[device].computing = self.devices[device].queue.pop_front();
            if let Some(next) = self.devices[device].computing {
                self.start(next);
            }
        }
    }

    /// Looks again at the rates of all that stands beside a transfer that starts or ends.
    fn rates_around(&mut self, instance: u32) {
        self.round += 1;
        self.instances[instance as usize].seen = self.round;
        for m in self.members(instance) {
            let task = self.members[m] as usize;
            let Uses::Link(_) = self.tasks[task].uses else { continue };
            let device = self.device_of[task] as usize;
            if let Some(computing) = self.devices[device].computing {
                self.rate_once(computing);
            }
            if self.contention.links {
                for l in 0..self.devices[device].links.len() {
                    self.rate_once(self.devices[device].links[l].0);
                }
            }
        }
    }

    fn rate_once(&mut self, instance: u32) {
        let seen = &mut self.instances[instance as usize].seen;
        if *seen != self.round {
            *seen = self.round;
            self.rate(instance);
        }
    }

    /// Gives an instance under way the rate that is true from now on, and foretells its end.
    fn rate(&mut self, instance: u32) {
        let slower = self.slowness(instance);
        let now = self.now;
        let i = &mut self.instances[instance as usize];
        if i.slower == slower {
            return;
        }
        if i.slower > 0.0 {
            i.left_ns = (i.left_ns - (now - i.since_ns) / i.slower).max(0.0);
        }
        (i.since_ns, i.slower, i.stamp) = (now, slower, i.stamp + 2);
        let time = Time(now + i.left_ns * slower);
        self.events.push(Reverse(Event { time, instance, stamp: i.stamp }));
    }

    fn slowness(&self, instance: u32) -> f64 {
        let members = self.members(instance);
        let device = |m: usize| &self.devices[self.device_of[self.members[m] as usize] as usize];
        if self.computes(instance) {
            return if device(members.start).transfers > 0 { self.contention.compute.max(1.0) } else { 1.0 };
        }
        if !self.contention.links {
            return 1.0;
        }
        let sharing = |m: usize| match self.tasks[self.members[m] as usize].uses {
            Uses::Link(class) => device(m).links.iter().filter(|l| l.1 == class).count() as f64,
            Uses::Compute | Uses::Nothing => 1.0,
        };
        members.map(sharing).fold(1.0, f64::max)
    }

    fn finish(self) -> Result<Vec<Window>, Stuck> {
        if self.ended.iter().all(|e| *e) {
            return Ok(self.windows);
        }
        let mut heads: BTreeMap<(u32, u8), u32> = BTreeMap::new();
        for (i, task) in self.tasks.iter().enumerate().filter(|(i, _)| !self.ended[*i]) {
            heads.entry((task.rank, task.stream)).or_insert(i as u32);
        }
        let mut waiting: Vec<TaskId> = heads.into_values().map(TaskId).collect();
        waiting.sort_unstable();
        Err(Stuck { waiting })
    }
}
