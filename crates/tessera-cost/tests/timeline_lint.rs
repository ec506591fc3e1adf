//! Two timelines from published guides to expert models, described as tasks. The simulator
//! reproduces the drawn intervals, and the measures reveal what the drawings omit.

use tessera_cost::intervals::{Interval, IntervalKind, makespan_ns, measure_overlap};
use tessera_cost::params::PipelineSchedule;
use tessera_cost::schedule::{MicroBatchTimes, simulate_schedule};
use tessera_cost::stream_sim::{Contention, Task, TaskGraph, TaskId, TaskResource};
use tessera_cost::timeline_lint::{BLOCK_INPUTS, TimelineGoals, lint_block, lint_pipeline};
use tessera_mesh::LinkClass;

const LANES: [&str; 4] = ["Compute", "TP Collectives", "MoE Routing", "IO"];

/// Tasks with names; tasks with one name are drawn as one interval.
#[derive(Default)]
struct NamedTasks {
    tasks: TaskGraph,
    names: Vec<(u8, &'static str)>,
}

impl NamedTasks {
    fn push_task(&mut self, lane: u8, name: &'static str, work_ns: f64, after: &[TaskId]) -> TaskId {
        let uses = match IntervalKind::from_name(name) {
            IntervalKind::Collective => TaskResource::Link(LinkClass::Domain),
            IntervalKind::Fetch => TaskResource::Link(LinkClass::Host),
            IntervalKind::Pack | IntervalKind::Other => TaskResource::Nothing,
            IntervalKind::Compute => TaskResource::Compute,
        };
        let task = self.tasks.push(Task { rank: 0, stream: lane, work_ns, resource: uses, collective: None });
        after.iter().for_each(|a| self.tasks.add_dependency(task, *a));
        self.names.push((lane, name));
        task
    }

    fn to_intervals(&self) -> Vec<Interval> {
        let mut bars: Vec<Interval> = Vec::new();
        for (window, (lane, name)) in
            self.tasks.run(Contention::NONE).expect("the tasks have no cycle").iter().zip(&self.names)
        {
            match bars.iter_mut().find(|b| b.name == *name) {
                Some(bar) => bar.end_ns = window.end_ns,
                None => bars.push(Interval {
                    rank: 0,
                    track: LANES[*lane as usize].to_owned(),
                    name: (*name).to_owned(),
                    kind: IntervalKind::from_name(name),
                    start_ns: window.start_ns,
                    end_ns: window.end_ns,
                }),
            }
        }
        bars
    }
}

/// Returns the block as drawn: scores are computed in chunks, so that their reduce-scatter starts
/// after two of three, and a feed-forward GEMM starts after the first half of the exchange.
/// `experts_apart` gives experts their own compute, as the drawing implicitly does.
fn drawn_block(chunks: u32, fetched_after_ns: f64, experts_apart: bool) -> Vec<Interval> {
    let mut chart = NamedTasks::default();
    let qk: Vec<TaskId> =
        (0..chunks).map(|_| chart.push_task(0, "QK^T GEMM", 3.0 / f64::from(chunks), &[])).collect();
    let input = qk[qk.len().saturating_sub(2)];
    let rs = chart.push_task(1, "RS logits", 1.0, &[input]);
    let pv = chart.push_task(0, "Softmax + PV", 2.0, &[rs]);
    let ag = chart.push_task(1, "AG outputs", 1.0, &[pv]);
    let pack = chart.push_task(2, "Pack tokens", 1.0, &[ag]);
    let first = chart.push_task(2, "A2A (FP8)", 1.0, &[pack]);
    let a2a = chart.push_task(2, "A2A (FP8)", 1.0, &[]);
    let wait = chart.push_task(3, "wait", fetched_after_ns, &[]);
    let fetch = chart.push_task(3, "Prefetch experts", 3.0, &[wait]);
    chart.push_task(0, "FFN GEMM", 4.0, &[first]);
    let (lane, rank) = (2, u32::from(experts_apart));
    let experts = chart.tasks.push(Task {
        rank,
        stream: lane,
        work_ns: 3.0,
        resource: TaskResource::Compute,
        collective: None,
    });
    chart.names.push((lane, "Unpack + Experts"));
    chart.tasks.add_dependency(experts, a2a);
    chart.tasks.add_dependency(experts, fetch);
    chart.to_intervals().into_iter().filter(|b| b.name != "wait").collect()
}

fn interval_at(bars: &[Interval], name: &str) -> (f64, f64) {
    let bar = bars.iter().find(|b| b.name == name).expect("an interval with this name");
    (bar.start_ns, bar.duration_ns())
}

#[test]
fn simulation_reproduces_the_drawn_block() {
    let bars = drawn_block(3, 4.0, true);
    let expected = [
        ("QK^T GEMM", (0.0, 3.0)),
        ("Softmax + PV", (3.0, 2.0)),
        ("FFN GEMM", (8.0, 4.0)),
        ("RS logits", (2.0, 1.0)),
        ("AG outputs", (5.0, 1.0)),
        ("Pack tokens", (6.0, 1.0)),
        ("A2A (FP8)", (7.0, 2.0)),
        ("Unpack + Experts", (9.0, 3.0)),
        ("Prefetch experts", (4.0, 3.0)),
    ];
    for (name, place) in expected {
        assert_eq!(interval_at(&bars, name), place, "{name}");
    }
    assert_eq!(makespan_ns(&bars), 12.0);
    let audit = lint_block(&bars, BLOCK_INPUTS, TimelineGoals::default());
    assert_eq!((audit.overlap.ratio(), audit.overlap_with_packing.ratio()), (0.5, 0.4));
    assert_eq!((audit.conflicts.len(), audit.premature.len()), (1, 1));
}

#[test]
fn whole_scores_and_late_experts_delay_their_dependents() {
    assert_eq!(interval_at(&drawn_block(1, 4.0, true), "RS logits").0, 3.0);
    assert_eq!(interval_at(&drawn_block(3, 6.0, true), "Unpack + Experts").0, 9.0);
    assert_eq!(interval_at(&drawn_block(3, 7.5, true), "Unpack + Experts").0, 10.5);
}

#[test]
fn on_one_device_experts_wait_for_the_feed_forward_gemm() {
    let bars = drawn_block(3, 4.0, false);
    assert_eq!(interval_at(&bars, "Unpack + Experts"), (12.0, 3.0));
    assert_eq!(makespan_ns(&bars), 15.0);
    assert!(lint_block(&bars, BLOCK_INPUTS, TimelineGoals::default()).conflicts.is_empty());
}

#[test]
fn two_half_batches_meet_the_goal_without_double_booking() {
    let mut chart = NamedTasks::default();
    let names: [[&str; 8]; 2] = [
        ["QK^T 0", "RS 0", "Softmax 0", "AG 0", "Pack 0", "A2A 0", "FFN 0", "Experts 0"],
        ["QK^T 1", "RS 1", "Softmax 1", "AG 1", "Pack 1", "A2A 1", "FFN 1", "Experts 1"],
    ];
    // Each half has half of the rows: while one communicates, the other computes.
    let qk = [0, 1].map(|h| chart.push_task(0, names[h][0], 1.5, &[]));
    let rs = [0, 1].map(|h| chart.push_task(1, names[h][1], 0.5, &[qk[h]]));
    let pv = [0, 1].map(|h| chart.push_task(0, names[h][2], 1.0, &[rs[h]]));
    let ag = [0, 1].map(|h| chart.push_task(1, names[h][3], 0.5, &[pv[h]]));
    let a2a = [0, 1].map(|h| {
        let pack = chart.push_task(2, names[h][4], 0.5, &[ag[h]]);
        chart.push_task(2, names[h][5], 1.0, &[pack])
    });
    for h in [0, 1] {
        chart.push_task(0, names[h][6], 2.0, &[ag[h]]);
        chart.push_task(2, names[h][7], 1.5, &[a2a[h]]);
    }
    let bars = chart.to_intervals();
    let audit = lint_block(&bars, &[], TimelineGoals::default());
    assert!(audit.conflicts.is_empty());
    assert!(audit.overlap.ratio() >= 0.8, "{}", audit.overlap.ratio());
    assert!(makespan_ns(&bars) < 15.0, "not faster than the drawing on one device: {}", makespan_ns(&bars));
    assert!(measure_overlap(&bars, true).ratio() >= 0.6);
}

#[test]
fn drawn_pipeline_is_a_truncated_schedule() {
    let pace = MicroBatchTimes { forward_ns: 3.0, ..MicroBatchTimes::default() };
    let slots = simulate_schedule(PipelineSchedule::OneFOneB, 1, 4, &[pace; 3]);
    let bars = |until: f64| -> Vec<Interval> {
        let bar = |s: &tessera_cost::schedule::StageSlot| Interval {
            rank: s.stage,
            track: format!("Stage {}", s.stage),
            name: format!("MB{}", s.micro_batch),
            kind: IntervalKind::Compute,
            start_ns: s.start_ns,
            end_ns: s.end_ns,
        };
        slots.iter().map(bar).filter(|b| b.end_ns <= until).collect()
    };
    let full = lint_pipeline(&bars(f64::INFINITY), TimelineGoals::default());
    assert!(full.missing.is_empty());
    let cut = lint_pipeline(&bars(12.0), TimelineGoals::default());
    assert_eq!((bars(12.0).len(), cut.missing.len(), cut.makespan_ns), (9, 3, 18.0));
    assert_eq!(cut.stage_bubbles, full.stage_bubbles);
    assert_eq!(cut.min_micro_batches, Some(19));
}
