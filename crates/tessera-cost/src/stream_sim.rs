//! Discrete-event simulation of ranks with streams: tasks in order on each stream, dependencies
//! between streams, collectives that start when all members are ready, and devices whose compute
//! slows down while a transfer is in flight.
//!
//! The simulator identifies tasks by number; the caller knows their names. The same tasks give the
//! same times on every machine. A run takes O(n log n) for n tasks and edges.
//!
//! The compute of a rank is one resource. If tasks on two streams need it, the task that was ready
//! first gets it and the other waits, so no time is booked twice.
//!
//! Without contention, and with the compute tasks of a rank on one stream, times are sums and
//! maxima of works: shortening a task never delays another one. With contention, or with compute on
//! several streams, it may, because a transfer that ends early may let the next one overlap work
//! that others wait for. This loss is bounded: no run takes longer than the contention factor times
//! the run without contention (links not shared).

mod event_loop;

use tessera_base::Diagnostic;
use tessera_mesh::LinkClass;

use crate::codes::T1115;

/// Number of a task, in the order in which tasks were pushed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TaskId(pub u32);

/// The resource that a task occupies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum TaskResource {
    /// Compute, which the task occupies exclusively on its rank.
    Compute,
    /// Links of a class. Transfers between devices slow the compute of both; fetches from the host
    /// do not, because DMA copy engines perform them.
    Link(LinkClass),
    /// No shared resource: host work, waits, marks.
    Nothing,
}

/// One unit of simulated work on a stream, such as an op or a rank's part of a collective.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Task {
    /// The rank, by any number; each rank has compute and links of its own.
    pub rank: u32,
    /// The stream of the rank; any number. Tasks of one stream run in the order in which they were
    /// pushed.
    pub stream: u8,
    /// Duration without contention, not negative.
    pub work_ns: f64,
    /// The resource that the task occupies. A task of a collective never occupies compute, whatever
    /// this field says.
    pub resource: TaskResource,
    /// The collective that the task belongs to, by any number: all tasks with this number start
    /// together when the last one is ready, and end together after the longest of their works.
    pub collective: Option<u32>,
}

/// Interference between tasks of one device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Contention {
    /// Slowdown of compute while a transfer between devices is in flight on its rank; at least 1.
    pub compute: f64,
    /// Whether transfers of a rank over links of one class share the bandwidth; otherwise each has
    /// the full bandwidth.
    pub links: bool,
}

impl Contention {
    /// Transfers neither slow compute down nor share link bandwidth.
    pub const NONE: Contention = Contention { compute: 1.0, links: false };
}

/// Simulated times of one task: when it could start, when it started and when it ended.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct TaskWindow {
    /// Time at which its stream and its dependencies allowed the task to start. From here to the
    /// start it waited for other members or for compute.
    pub ready_ns: f64,
    /// Time at which the task starts to run, after any wait since `ready_ns`.
    pub start_ns: f64,
    /// Time at which the task ends; equal for all tasks of one collective.
    pub end_ns: f64,
}

/// Tasks on streams with dependencies between them; [`TaskGraph::run`] simulates them.
#[derive(Debug, Clone, Default)]
pub struct TaskGraph {
    tasks: Vec<Task>,
    /// Pairs of the later and the earlier task.
    edges: Vec<(u32, u32)>,
}

impl TaskGraph {
    /// Appends a task to its stream and returns its number, by which dependencies refer to it.
    pub fn push(&mut self, task: Task) -> TaskId {
        self.tasks.push(task);
        TaskId((self.tasks.len() - 1) as u32)
    }

    /// Makes a task wait for the end of another task, which may be pushed before or after it.
    pub fn add_dependency(&mut self, later: TaskId, earlier: TaskId) {
        self.edges.push((later.0, earlier.0));
    }

    /// Reserves capacity for `tasks` more tasks with one dependency each.
    pub fn reserve(&mut self, tasks: usize) {
        self.tasks.reserve(tasks);
        self.edges.reserve(tasks);
    }

    /// Replaces the duration of a task, in nanoseconds; does nothing if there is no such task.
    pub fn set_work(&mut self, task: TaskId, work_ns: f64) {
        if let Some(task) = self.tasks.get_mut(task.0 as usize) {
            task.work_ns = work_ns;
        }
    }

    /// Returns the task with this number.
    #[must_use]
    pub fn get(&self, task: TaskId) -> Option<&Task> {
        self.tasks.get(task.0 as usize)
    }

    /// Returns the number of tasks.
    #[must_use]
    pub fn len(&self) -> usize {
        self.tasks.len()
    }

    /// Returns whether there are no tasks.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.tasks.is_empty()
    }

    /// Simulates all tasks from time 0 and returns the window of each, by task number.
    ///
    /// # Errors
    /// The tasks at the heads of streams that can never start, if tasks wait for each other in a
    /// cycle.
    pub fn run(&self, contention: Contention) -> Result<Vec<TaskWindow>, TaskDeadlock> {
        event_loop::run_tasks(&self.tasks, &self.edges, contention)
    }
}

/// The error of a simulation in which tasks wait for each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TaskDeadlock {
    /// The first task that never ran of each blocked stream, in order of number.
    pub waiting: Vec<TaskId>,
}

impl TaskDeadlock {
    /// Returns the diagnostic of the deadlock; `name` gives the name of a task.
    #[must_use]
    pub fn to_diagnostic(&self, name: impl Fn(TaskId) -> String) -> Diagnostic {
        let count = self.waiting.len();
        let diagnostic = Diagnostic::error(
            &T1115,
            format!("{count} streams are deadlocked: their first tasks wait for each other"),
        );
        self.waiting
            .iter()
            .take(Self::MAX_SHOWN)
            .fold(diagnostic, |d, task| d.with_label(name(*task), "waits for an event, or for members of its collective, that come later"))
            .with_hint("let every stream issue collectives in the same order, and record each event before a wait for it")
    }

    /// Maximum number of tasks that a diagnostic names.
    const MAX_SHOWN: usize = 8;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn task(rank: u32, stream: u8, work_ns: f64, uses: TaskResource) -> Task {
        Task { rank, stream, work_ns, resource: uses, collective: None }
    }

    const DOMAIN: TaskResource = TaskResource::Link(LinkClass::Domain);

    #[test]
    fn a_collective_starts_with_its_last_member_and_ends_for_all() {
        let mut tasks = TaskGraph::default();
        for rank in 0..3 {
            let before = tasks.push(task(rank, 0, 1.0 + f64::from(rank), TaskResource::Compute));
            let meet = tasks.push(Task { collective: Some(9), ..task(rank, 1, 2.0, DOMAIN) });
            tasks.add_dependency(meet, before);
        }
        let windows = tasks.run(Contention::NONE).expect("the tasks have no cycle");
        for rank in 0..3 {
            let w = windows[2 * rank + 1];
            assert_eq!((w.ready_ns, w.start_ns, w.end_ns), (1.0 + rank as f64, 3.0, 5.0));
        }
    }

    #[test]
    fn compute_slows_only_while_a_transfer_is_under_way() {
        let mut tasks = TaskGraph::default();
        let compute = tasks.push(task(0, 0, 10.0, TaskResource::Compute));
        tasks.push(task(0, 1, 1.0, TaskResource::Nothing));
        tasks.push(task(0, 1, 4.0, DOMAIN));
        tasks.push(task(0, 3, 100.0, TaskResource::Link(LinkClass::Host)));
        let windows = tasks.run(Contention { compute: 2.0, links: false }).expect("the tasks have no cycle");
        // 1 alone, 4 at half speed (2 done), 7 alone.
        assert_eq!(windows[compute.0 as usize].end_ns, 12.0);
    }

    #[test]
    fn transfers_over_the_same_links_share_them() {
        let mut tasks = TaskGraph::default();
        for rank in 0..2 {
            tasks.push(Task { collective: Some(0), ..task(rank, 1, 4.0, DOMAIN) });
        }
        // Only rank 1 has another transfer, but the collective is as slow as its slowest member.
        let other = tasks.push(task(1, 2, 1.0, DOMAIN));
        let windows = tasks.run(Contention { compute: 1.0, links: true }).expect("the tasks have no cycle");
        assert_eq!(windows[other.0 as usize].end_ns, 2.0);
        assert_eq!((windows[0].end_ns, windows[1].end_ns), (5.0, 5.0));
        assert_eq!(tasks.run(Contention::NONE).expect("the tasks have no cycle")[0].end_ns, 4.0);
    }

    #[test]
    fn collectives_in_a_different_order_deadlock() {
        let mut tasks = TaskGraph::default();
        for (rank, order) in [(0, [1, 2]), (1, [2, 1])] {
            for meet in order {
                tasks.push(Task { collective: Some(meet), ..task(rank, 1, 1.0, DOMAIN) });
            }
        }
        let stuck = tasks.run(Contention::NONE).expect_err("the tasks have a cycle");
        assert_eq!(stuck.waiting, [TaskId(0), TaskId(2)]);
        assert_eq!(stuck.to_diagnostic(|t| format!("task {}", t.0)).labels.len(), 2);
    }

    /// Rank, stream, work, whether the task is a collective, and the earlier tasks that it depends
    /// on.
    type RandomTask = (u32, u8, f64, bool, Vec<usize>);

    /// Random tasks: several ranks and streams, dependencies on earlier tasks, and collectives of
    /// all ranks. Compute runs on stream 0, transfers on stream 1, fetches on stream 2.
    fn random() -> impl Strategy<Value = (u32, Vec<RandomTask>)> {
        let one =
            (0..4u32, 0..3u8, 0.0..10.0f64, any::<bool>(), proptest::collection::vec(0..1000usize, 0..3));
        (1..5u32, proptest::collection::vec(one, 1..60))
    }

    fn build(ranks: u32, list: &[RandomTask], slower: f64) -> TaskGraph {
        let mut tasks = TaskGraph::default();
        let uses = |stream: u8| {
            [TaskResource::Compute, DOMAIN, TaskResource::Link(LinkClass::Host)][stream as usize]
        };
        for (i, (rank, stream, work, meets, after)) in list.iter().enumerate() {
            let transfer = *stream != 0;
            let work_ns = if transfer { work * slower } else { *work };
            let before = tasks.len();
            if *meets && *stream == 1 {
                for rank in 0..ranks {
                    tasks.push(Task {
                        rank,
                        stream: 1,
                        work_ns,
                        resource: DOMAIN,
                        collective: Some(i as u32),
                    });
                }
            } else {
                tasks.push(task(rank % ranks, *stream, work_ns, uses(*stream)));
            }
            for earlier in after.iter().filter(|_| before > 0) {
                tasks.add_dependency(TaskId(before as u32), TaskId((earlier % before) as u32));
            }
        }
        tasks
    }

    fn makespan(windows: &[TaskWindow]) -> f64 {
        windows.iter().map(|w| w.end_ns).fold(0.0, f64::max)
    }

    proptest! {
        #[test]
        fn less_bandwidth_is_never_faster((ranks, list) in random(), slower in 1.0..4.0f64) {
            let fast = build(ranks, &list, 1.0).run(Contention::NONE).expect("edges go back");
            let slow = build(ranks, &list, slower).run(Contention::NONE).expect("edges go back");
            for (f, s) in fast.iter().zip(&slow) {
                prop_assert!(f.end_ns <= s.end_ns + 1e-9 && f.start_ns <= s.start_ns + 1e-9);
            }
        }

        #[test]
        fn contention_costs_time_and_at_most_its_factor((ranks, list) in random(), factor in 1.0..3.0f64, slower in 1.0..4.0f64) {
            let tasks = build(ranks, &list, 1.0);
            let free = makespan(&tasks.run(Contention::NONE).expect("edges go back"));
            let held = makespan(&tasks.run(Contention { compute: factor, links: false }).expect("edges go back"));
            prop_assert!(free <= held + 1e-9 && held <= free * factor + 1e-9);
            // So more bandwidth loses at most that factor.
            let slow = build(ranks, &list, slower).run(Contention { compute: factor, links: false }).expect("edges go back");
            prop_assert!(held <= makespan(&slow) * factor + 1e-9);
        }

        #[test]
        fn work_is_conserved_and_nothing_is_booked_twice((ranks, list) in random(), factor in 1.0..3.0f64, links in any::<bool>()) {
            let tasks = build(ranks, &list, 1.0);
            let windows = tasks.run(Contention { compute: factor, links }).expect("edges go back");
            let task = |i: usize| tasks.tasks[i];
            for rank in 0..ranks {
                let moving: Vec<TaskWindow> = (0..windows.len())
                    .filter(|&i| task(i).rank == rank && task(i).resource == DOMAIN)
                    .map(|i| windows[i])
                    .collect();
                for i in (0..windows.len()).filter(|&i| task(i).rank == rank && task(i).resource == TaskResource::Compute) {
                    // Time that overlaps transfers counts 1/factor, other time counts fully; the
                    // sum must equal the work.
                    let w = windows[i];
                    let mut cuts: Vec<f64> = moving.iter().flat_map(|m| [m.start_ns, m.end_ns]).collect();
                    cuts.extend([w.start_ns, w.end_ns]);
                    cuts.retain(|c| (w.start_ns..=w.end_ns).contains(c));
                    cuts.sort_by(f64::total_cmp);
                    let done: f64 = cuts.windows(2).map(|c| {
                        let mid = f64::midpoint(c[0], c[1]);
                        let beside = moving.iter().any(|m| m.start_ns < mid && mid < m.end_ns);
                        (c[1] - c[0]) / if beside { factor } else { 1.0 }
                    }).sum();
                    prop_assert!((done - task(i).work_ns).abs() < 1e-6);
                }
            }
            for (rank, stream) in (0..ranks).flat_map(|r| (0..3).map(move |s| (r, s))) {
                let on: Vec<TaskWindow> = (0..windows.len())
                    .filter(|&i| (task(i).rank, task(i).stream) == (rank, stream)).map(|i| windows[i]).collect();
                for pair in on.windows(2) {
                    prop_assert!(pair[0].end_ns <= pair[1].start_ns + 1e-9);
                }
            }
        }

        #[test]
        fn alone_each_stream_takes_the_sum_of_its_works(works in proptest::collection::vec((0..3u32, 0..4u8, 0.0..9.0f64), 1..80)) {
            let mut tasks = TaskGraph::default();
            let mut sums = std::collections::BTreeMap::new();
            for (rank, stream, work_ns) in works {
                let uses = if stream == 0 { TaskResource::Compute } else { DOMAIN };
                tasks.push(task(rank, stream, work_ns, uses));
                *sums.entry((rank, stream)).or_insert(0.0) += work_ns;
            }
            let most = sums.values().copied().fold(0.0, f64::max);
            let end = makespan(&tasks.run(Contention::NONE).expect("no edges"));
            prop_assert!((end - most).abs() < 1e-6);
        }

        #[test]
        fn compute_of_two_streams_never_overlaps(works in proptest::collection::vec((0..4u8, 0.0..9.0f64), 1..40)) {
            let mut tasks = TaskGraph::default();
            for (stream, work_ns) in &works {
                tasks.push(task(7, *stream, *work_ns, TaskResource::Compute));
            }
            let mut windows = tasks.run(Contention::NONE).expect("no edges");
            windows.sort_by(|a, b| (a.start_ns, a.end_ns).partial_cmp(&(b.start_ns, b.end_ns)).expect("numbers"));
            prop_assert!(windows.windows(2).all(|w| w[0].end_ns <= w[1].start_ns));
            let sum: f64 = works.iter().map(|w| w.1).sum();
            prop_assert!((makespan(&windows) - sum).abs() < 1e-6);
        }
    }
}
