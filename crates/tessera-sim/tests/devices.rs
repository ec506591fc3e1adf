//! Streams, events, launches and meetings of modelled devices, by hand-made programs and prices.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera_device::Prices;
use tessera_ir::{Opcode, Program, parse};
use tessera_mesh::{Mesh, Rank};
use tessera_sim::{Devices, Ended, Loaded, Occupied};

/// Prices by kind of op.
#[derive(Debug, Clone, Copy)]
struct Fixed {
    compute: u64,
    launch: u64,
    pack: u64,
    take: u64,
    transfer: u64,
    contention: f64,
}

const PLAIN: Fixed = Fixed { compute: 100, launch: 0, pack: 0, take: 0, transfer: 60, contention: 1.0 };

impl Prices for Fixed {
    fn op_ns(&self, p: &Program, op: usize) -> u64 {
        match p.ops[op].opcode {
            Opcode::Silu | Opcode::Add => self.compute,
            Opcode::Wait => self.take,
            o if o.is_collective() => self.pack,
            _ => 0,
        }
    }

    fn launch_ns(&self, p: &Program, op: usize) -> u64 {
        if matches!(p.ops[op].opcode, Opcode::Silu | Opcode::Add) { self.launch } else { 0 }
    }

    fn collective_ns(&self, _: &Program, _: usize, _: &Mesh) -> u64 {
        self.transfer
    }

    fn contention(&self) -> f64 {
        self.contention
    }
}

/// A program of a role over tp=2 with two streams, from its ops.
fn program(ops: &str) -> Program {
    let text = format!("program @p role(r) mesh(tp=2) streams(compute, comm) {{\n{ops}\n}}\n");
    parse(&text, "p.tir").unwrap_or_else(|ds| panic!("{ds:#?}"))
}

const T: &str = "f32[4, 8] {tp: replicated}";
const PARTIAL: &str = "f32[4, 8] {tp: partial(sum)}";

/// Compute, an exchange of its result beside more compute, and compute of both.
fn overlapped() -> Program {
    program(&format!(
        "%x = input \"x\" : {PARTIAL}
         %a = ttile.add %x, %x : {PARTIAL} @compute
         %e = event.record @compute
         %t = ttile.collective.issue all_reduce %a {{axis = \"tp\", reduction = \"sum\"}} @comm after(%e)
         %z = input \"z\" : {T}
         %b = ttile.silu %z : {T} @compute
         %y = ttile.collective.wait %t : {T} @compute
         %c = ttile.add %y, %b : {T} @compute"
    ))
}

fn devices(programs: &[Program], prices: Fixed) -> (Devices, Vec<Loaded>) {
    let mesh: Mesh = "tp=2".parse().unwrap();
    let mut devices = Devices::new(mesh, prices.contention());
    devices.record();
    let loaded = programs.iter().zip(0..).map(|(p, r)| devices.load(p, &[Rank(r)], &prices).unwrap());
    let loaded = loaded.collect();
    (devices, loaded)
}

fn run(devices: &mut Devices) -> Vec<Ended> {
    let mut out = Vec::new();
    while let Some(at) = devices.next_ns() {
        out.extend(devices.advance(at));
    }
    out
}

fn ends(of: &[Ended]) -> Vec<(u32, f64)> {
    let mut ends: Vec<(u32, f64)> = of.iter().map(|e| (e.rank.0, e.ended_ns)).collect();
    ends.sort_by(|a, b| a.partial_cmp(b).unwrap());
    ends
}

#[test]
fn a_transfer_runs_beside_the_work_that_does_not_wait_for_it() {
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], PLAIN);
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    let ended = run(&mut d);
    assert_eq!(ends(&ended), [(0, 300.0), (1, 300.0)], "the exchange hides behind the second op");
    assert_eq!(ended[0].met, [3]);
    let bars = d.take_bars();
    let of = |op: usize| bars.iter().find(|b| b.rank == Rank(1) && b.op == op).unwrap();
    assert_eq!((of(3).start_ns, of(3).end_ns, of(3).transfer), (100.0, 160.0, true));
    assert_eq!((of(5).start_ns, of(5).end_ns, of(5).transfer), (100.0, 200.0, false));
}

#[test]
fn work_of_no_program_takes_the_device_in_its_turn_and_the_others_wait_in_their_collective() {
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], PLAIN);
    // Asked for at the same instant it goes first; asked for while an op runs, after that one and before the next.
    d.occupy(0, Rank(0), 250);
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    d.occupy(260, Rank(0), 50);
    let ended = run(&mut d);
    assert_eq!(ends(&ended), [(0, 600.0), (1, 510.0)], "300 of its own and 300 of no program; 410 and an op");
    let freed = d.take_freed();
    let times: Vec<_> = freed.iter().map(|o| (o.rank, o.begun_ns, o.ended_ns)).collect();
    assert_eq!(
        times,
        [(Rank(0), 0.0, 250.0), (Rank(0), 350.0, 400.0)],
        "before the second op, which asked at 350"
    );
    assert!(d.take_freed().is_empty() && d.stalled().is_none());
    // A device without a program takes it too.
    d.occupy(1_000, Rank(1), 70);
    assert!(run(&mut d).is_empty());
    assert_eq!(d.take_freed(), [Occupied { rank: Rank(1), begun_ns: 1_000.0, ended_ns: 1_070.0 }]);
}

#[test]
fn work_beside_a_transfer_takes_longer_by_the_contention_and_only_then() {
    let prices = Fixed { contention: 1.5, ..PLAIN };
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], prices);
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    // 60 ns of transfer take 40 ns off 100 ns of work; 60 ns are left at full pace.
    assert_eq!(ends(&run(&mut d)), [(0, 320.0), (1, 320.0)]);
}

#[test]
fn who_comes_late_is_waited_for_and_waiting_slows_nobody() {
    let prices = Fixed { contention: 2.0, ..PLAIN };
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], prices);
    d.begin(0, Rank(0), loaded[0]);
    d.begin(1_000, Rank(1), loaded[1]);
    let ended = run(&mut d);
    // Rank 0 has worked alone at full pace and has only the last op left when the transfer ends at 1160.
    assert_eq!(ends(&ended), [(0, 1_260.0), (1, 1_330.0)]);
    assert_eq!((ended[0].begun_ns, ended[1].begun_ns), (0.0, 1_000.0));
}

#[test]
fn an_op_waits_for_its_launch_and_the_host_runs_ahead() {
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], Fixed { launch: 30, ..PLAIN });
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    assert_eq!(ends(&run(&mut d)), [(0, 330.0), (1, 330.0)], "all but the first launch is hidden");
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], Fixed { launch: 400, ..PLAIN });
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    assert_eq!(ends(&run(&mut d)), [(0, 1_300.0), (1, 1_300.0)], "three launches and the last op");
}

#[test]
fn packing_before_a_meeting_and_taking_after_it_need_the_device() {
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], Fixed { pack: 10, take: 5, ..PLAIN });
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    // 100, pack to 110, the second op to 210 while 60 ns of transfer pass, take to 215, the last op.
    assert_eq!(ends(&run(&mut d)), [(0, 315.0), (1, 315.0)]);
}

#[test]
fn launches_meet_in_order_over_many_programs() {
    let (mut d, loaded) = devices(&[overlapped(), overlapped()], PLAIN);
    let mut left = [3, 3];
    (0..2).for_each(|r| d.begin(u64::from(r) * 7, Rank(r), loaded[r as usize]));
    let mut last = 0.0;
    while let Some(at) = d.next_ns() {
        for e in d.advance(at) {
            assert!(e.ended_ns >= last);
            last = e.ended_ns;
            left[e.rank.0 as usize] -= 1;
            if left[e.rank.0 as usize] > 0 {
                d.begin(at, e.rank, e.program);
            }
        }
    }
    assert_eq!((left, d.stalled().is_none()), ([0, 0], true));
    assert_eq!(last, 907.0, "a rank that began late stays late where nothing waits for it");
}

#[test]
fn sends_and_receives_of_one_launch_do_not_wait_for_each_other() {
    let swap = |other: u32, batch: &str| {
        program(&format!(
            "%x = input \"x\" : {T}
             %s = ttile.collective.issue send %x {{axis = \"tp\"{batch}, to = {other}}} @comm
             %r = ttile.collective.issue recv {{axis = \"tp\"{batch}, from = {other}}} @comm
             ttile.collective.wait %s @compute
             %y = ttile.collective.wait %r : {T} @compute"
        ))
    };
    let (mut d, loaded) = devices(&[swap(1, ", batch = 1"), swap(0, ", batch = 1")], PLAIN);
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    assert_eq!(ends(&run(&mut d)), [(0, 60.0), (1, 60.0)]);
    let (mut d, loaded) = devices(&[swap(1, ""), swap(0, "")], PLAIN);
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    assert_eq!(run(&mut d), [], "each sends first and waits for the other to receive");
    let stalled = d.stalled().expect("a standstill");
    assert_eq!((stalled.code.id, stalled.places.len()), ("T0811", 2));
    assert!(stalled.places[0].says.contains("send over tp to position 1"), "{stalled:?}");
    assert!(stalled.places[0].says.contains("waits for rank 1"), "{stalled:?}");
}

#[test]
fn calls_that_differ_stand_still_instead_of_taking_a_wrong_time() {
    let gather = program(&format!(
        "%x = input \"x\" : f32[2, 8] {{tp: shard(0)}}
         %t = ttile.collective.issue all_gather %x {{axis = \"tp\", dim = 0}} @comm
         %y = ttile.collective.wait %t : {T} @compute"
    ));
    let (mut d, loaded) = devices(&[overlapped(), gather], PLAIN);
    (0..2).for_each(|r| d.begin(0, Rank(r), loaded[r as usize]));
    assert_eq!(run(&mut d), []);
    let says = format!("{:?}", d.stalled().expect("a standstill").places);
    assert!(
        says.contains("all_reduce") && says.contains("all_gather") && says.contains("another call"),
        "{says}"
    );
    assert!((d.active_ns(Rank(0), 999), d.active_ns(Rank(1), 999)) == (200, 0));
}

#[test]
fn a_rank_without_ops_ends_as_it_begins() {
    let (mut d, loaded) = devices(&[program("")], PLAIN);
    d.begin(42, Rank(0), loaded[0]);
    assert_eq!((d.next_ns(), ends(&d.advance(42))), (Some(42), vec![(0, 42.0)]));
}

#[test]
fn a_program_that_cannot_be_timed_is_refused() {
    let mesh: Mesh = "tp=2, outside=1".parse().unwrap();
    let mut d = Devices::new(mesh, 1.0);
    let refused = d.load(&overlapped(), &[Rank(0)], &PLAIN).expect_err("rank 0 is outside of tp");
    assert_eq!(refused.code.id, "T0810");
    let mut dangling = overlapped();
    let wait = dangling.ops.iter().position(|o| o.opcode == Opcode::Wait).unwrap();
    dangling.ops.remove(wait - 3);
    let refused = d.load(&dangling, &[Rank(1)], &PLAIN).expect_err("nothing was issued");
    assert!(refused.message.contains("waits for what no earlier op issued"), "{refused:?}");
}
