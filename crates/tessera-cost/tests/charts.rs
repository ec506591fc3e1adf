//! Two charts that guides to expert models draw, as descriptions: played by the engine they give the drawn bars, and the
//! measures say what the drawings do not.

use tessera_cost::audit::{BLOCK_INPUTS, Goals, block, wave};
use tessera_cost::bars::{Bar, Kind, makespan_ns, overlap};
use tessera_cost::knobs::Schedule;
use tessera_cost::schedule::{Pace, simulate};
use tessera_cost::streams::{Contention, Task, TaskId, Tasks, Uses};
use tessera_mesh::LinkClass;

const LANES: [&str; 4] = ["Compute", "TP Collectives", "MoE Routing", "IO"];

/// Tasks with names; pieces of one name are drawn as one bar.
#[derive(Default)]
struct Chart {
    tasks: Tasks,
    names: Vec<(u8, &'static str)>,
}

impl Chart {
    fn task(&mut self, lane: u8, name: &'static str, work_ns: f64, after: &[TaskId]) -> TaskId {
        let uses = match Kind::of_name(name) {
            Kind::Collective => Uses::Link(LinkClass::Domain),
            Kind::Fetch => Uses::Link(LinkClass::Host),
            Kind::Pack | Kind::Other => Uses::Nothing,
            Kind::Compute => Uses::Compute,
        };
        let task = self.tasks.push(Task { rank: 0, stream: lane, work_ns, uses, meets: None });
        after.iter().for_each(|a| self.tasks.after(task, *a));
        self.names.push((lane, name));
        task
    }

    fn bars(&self) -> Vec<Bar> {
        let mut bars: Vec<Bar> = Vec::new();
        for (window, (lane, name)) in
            self.tasks.run(Contention::NONE).expect("no circle").iter().zip(&self.names)
        {
            match bars.iter_mut().find(|b| b.name == *name) {
                Some(bar) => bar.end_ns = window.end_ns,
                None => bars.push(Bar {
                    rank: 0,
                    lane: LANES[*lane as usize].to_owned(),
                    name: (*name).to_owned(),
                    kind: Kind::of_name(name),
                    start_ns: window.start_ns,
                    end_ns: window.end_ns,
                }),
            }
        }
        bars
    }
}

/// The block as drawn: scores come in chunks, so that their reduce-scatter starts after two of three; a feed-forward
/// product starts with the first half of the exchange. `experts_apart` gives experts compute of their own, as the
/// drawing does without saying so.
fn drawn(chunks: u32, fetched_after_ns: f64, experts_apart: bool) -> Vec<Bar> {
    let mut chart = Chart::default();
    let qk: Vec<TaskId> =
        (0..chunks).map(|_| chart.task(0, "QK^T GEMM", 3.0 / f64::from(chunks), &[])).collect();
    let input = qk[qk.len().saturating_sub(2)];
    let rs = chart.task(1, "RS logits", 1.0, &[input]);
    let pv = chart.task(0, "Softmax + PV", 2.0, &[rs]);
    let ag = chart.task(1, "AG outputs", 1.0, &[pv]);
    let pack = chart.task(2, "Pack tokens", 1.0, &[ag]);
    let first = chart.task(2, "A2A (FP8)", 1.0, &[pack]);
    let a2a = chart.task(2, "A2A (FP8)", 1.0, &[]);
    let wait = chart.task(3, "wait", fetched_after_ns, &[]);
    let fetch = chart.task(3, "Prefetch experts", 3.0, &[wait]);
    chart.task(0, "FFN GEMM", 4.0, &[first]);
    let (lane, rank) = (2, u32::from(experts_apart));
    let experts =
        chart.tasks.push(Task { rank, stream: lane, work_ns: 3.0, uses: Uses::Compute, meets: None });
    chart.names.push((lane, "Unpack + Experts"));
    chart.tasks.after(experts, a2a);
    chart.tasks.after(experts, fetch);
    chart.bars().into_iter().filter(|b| b.name != "wait").collect()
}

fn at(bars: &[Bar], name: &str) -> (f64, f64) {
    let bar = bars.iter().find(|b| b.name == name).expect("a bar of that name");
    (bar.start_ns, bar.ns())
}

#[test]
fn the_drawn_block_comes_out_of_its_description() {
    let bars = drawn(3, 4.0, true);
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
        assert_eq!(at(&bars, name), place, "{name}");
    }
    assert_eq!(makespan_ns(&bars), 12.0);
    let audit = block(&bars, BLOCK_INPUTS, Goals::default());
    assert_eq!((audit.overlap.ratio(), audit.packed.ratio()), (0.5, 0.4));
    assert_eq!((audit.clashes.len(), audit.early.len()), (1, 1));
}

#[test]
fn whole_scores_and_late_experts_move_what_depends_on_them() {
    assert_eq!(at(&drawn(1, 4.0, true), "RS logits").0, 3.0);
    assert_eq!(at(&drawn(3, 6.0, true), "Unpack + Experts").0, 9.0);
    assert_eq!(at(&drawn(3, 7.5, true), "Unpack + Experts").0, 10.5);
}

#[test]
fn on_one_device_experts_wait_for_the_feed_forward_product() {
    let bars = drawn(3, 4.0, false);
    assert_eq!(at(&bars, "Unpack + Experts"), (12.0, 3.0));
    assert_eq!(makespan_ns(&bars), 15.0);
    assert!(block(&bars, BLOCK_INPUTS, Goals::default()).clashes.is_empty());
}

#[test]
fn the_same_work_in_two_halves_meets_the_goal_without_double_booking() {
    let mut chart = Chart::default();
    let names: [[&str; 8]; 2] = [
        ["QK^T 0", "RS 0", "Softmax 0", "AG 0", "Pack 0", "A2A 0", "FFN 0", "Experts 0"],
        ["QK^T 1", "RS 1", "Softmax 1", "AG 1", "Pack 1", "A2A 1", "FFN 1", "Experts 1"],
    ];
    // Half the rows each: while one half communicates, the other computes.
    let qk = [0, 1].map(|h| chart.task(0, names[h][0], 1.5, &[]));
    let rs = [0, 1].map(|h| chart.task(1, names[h][1], 0.5, &[qk[h]]));
    let pv = [0, 1].map(|h| chart.task(0, names[h][2], 1.0, &[rs[h]]));
    let ag = [0, 1].map(|h| chart.task(1, names[h][3], 0.5, &[pv[h]]));
    let a2a = [0, 1].map(|h| {
        let pack = chart.task(2, names[h][4], 0.5, &[ag[h]]);
        chart.task(2, names[h][5], 1.0, &[pack])
    });
    for h in [0, 1] {
        chart.task(0, names[h][6], 2.0, &[ag[h]]);
        chart.task(2, names[h][7], 1.5, &[a2a[h]]);
    }
    let bars = chart.bars();
    let audit = block(&bars, &[], Goals::default());
    assert!(audit.clashes.is_empty());
    assert!(audit.overlap.ratio() >= 0.8, "{}", audit.overlap.ratio());
    assert!(makespan_ns(&bars) < 15.0, "sooner than the drawing on one device: {}", makespan_ns(&bars));
    assert!(overlap(&bars, true).ratio() >= 0.6);
}

#[test]
fn the_drawn_wave_is_a_schedule_cut_short() {
    let pace = Pace { forward_ns: 3.0, ..Pace::default() };
    let slots = simulate(Schedule::OneFOneB, 3, 1, 4, &pace);
    let bars = |until: f64| -> Vec<Bar> {
        let bar = |s: &tessera_cost::schedule::Slot| Bar {
            rank: s.stage,
            lane: format!("Stage {}", s.stage),
            name: format!("MB{}", s.micro_batch),
            kind: Kind::Compute,
            start_ns: s.start_ns,
            end_ns: s.end_ns,
        };
        slots.iter().map(bar).filter(|b| b.end_ns <= until).collect()
    };
    let full = wave(&bars(f64::INFINITY), Goals::default());
    assert!(full.missing.is_empty());
    let cut = wave(&bars(12.0), Goals::default());
    assert_eq!((bars(12.0).len(), cut.missing.len(), cut.makespan_ns), (9, 3, 18.0));
    assert_eq!(cut.bubble, full.bubble);
    assert_eq!(cut.needed, Some(19));
}
