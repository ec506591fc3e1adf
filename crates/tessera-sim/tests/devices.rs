//! Streams, events, launches and rendezvous of simulated devices, with hand-written programs and
//! prices.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera_device::TimingModel;
use tessera_ir::{Opcode, Program, parse};
use tessera_mesh::{Mesh, Rank};
use tessera_sim::{OutsideWork, ProgramEnd, SimDevices, SimProgramId};

/// A timing model with fixed times by kind of op.
#[derive(Debug, Clone, Copy)]
struct FixedTiming {
    compute: u64,
    launch: u64,
    pack: u64,
    unpack: u64,
    transfer: u64,
    contention: f64,
}

const PLAIN: FixedTiming =
    FixedTiming { compute: 100, launch: 0, pack: 0, unpack: 0, transfer: 60, contention: 1.0 };

impl TimingModel for FixedTiming {
    fn op_ns(&self, p: &Program, op: usize) -> u64 {
        match p.ops[op].opcode {
            Opcode::Silu | Opcode::Add => self.compute,
            Opcode::Wait => self.unpack,
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

    fn contention_factor(&self) -> f64 {
        self.contention
    }
}

/// Parses a program of a role over tp=2 with two streams.
fn program(ops: &str) -> Program {
    let text = format!("program @p role(r) mesh(tp=2) streams(compute, comm) {{\n{ops}\n}}\n");
    parse(&text, "p.tir").unwrap_or_else(|ds| panic!("{ds:#?}"))
}

const T: &str = "f32[4, 8] {tp: replicated}";
const PARTIAL: &str = "f32[4, 8] {tp: partial(sum)}";

/// Compute, an all-reduce of its result concurrent with more compute, then compute that uses both.
fn overlapped_program() -> Program {
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

fn load_devices(programs: &[Program], timing: FixedTiming) -> (SimDevices, Vec<SimProgramId>) {
    let mesh: Mesh = "tp=2".parse().unwrap();
    let mut devices = SimDevices::new(mesh, timing.contention_factor());
    devices.start_recording();
    let loaded = programs.iter().zip(0..).map(|(p, r)| devices.load(p, &[Rank(r)], &timing).unwrap());
    let loaded = loaded.collect();
    (devices, loaded)
}

fn run_until_idle(devices: &mut SimDevices) -> Vec<ProgramEnd> {
    let mut out = Vec::new();
    while let Some(at) = devices.next_event_ns() {
        out.extend(devices.advance_to(at));
    }
    out
}

fn sorted_ends(of: &[ProgramEnd]) -> Vec<(u32, f64)> {
    let mut ends: Vec<(u32, f64)> = of.iter().map(|e| (e.rank.0, e.end_ns)).collect();
    ends.sort_by(|a, b| a.partial_cmp(b).unwrap());
    ends
}

#[test]
fn a_transfer_overlaps_independent_work() {
    let (mut d, loaded) = load_devices(&[overlapped_program(), overlapped_program()], PLAIN);
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    let ended = run_until_idle(&mut d);
    assert_eq!(sorted_ends(&ended), [(0, 300.0), (1, 300.0)], "the second op hides the all-reduce");
    assert_eq!(ended[0].completed_ops, [3]);
    let bars = d.take_intervals();
    let of = |op: usize| bars.iter().find(|b| b.rank == Rank(1) && b.op == op).unwrap();
    assert_eq!((of(3).start_ns, of(3).end_ns, of(3).transfer), (100.0, 160.0, true));
    assert_eq!((of(5).start_ns, of(5).end_ns, of(5).transfer), (100.0, 200.0, false));
}

#[test]
fn work_outside_programs_is_serialised_and_delays_the_peers() {
    let (mut d, loaded) = load_devices(&[overlapped_program(), overlapped_program()], PLAIN);
    // Requested at the same time, the work runs first; requested while an op runs, it follows that
    // op and precedes the next.
    d.occupy(0, Rank(0), 250);
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    d.occupy(260, Rank(0), 50);
    let ended = run_until_idle(&mut d);
    assert_eq!(
        sorted_ends(&ended),
        [(0, 600.0), (1, 510.0)],
        "300 of its own and 300 outside programs; 410 and an op"
    );
    let freed = d.take_ended_work();
    let times: Vec<_> = freed.iter().map(|o| (o.rank, o.start_ns, o.end_ns)).collect();
    assert_eq!(
        times,
        [(Rank(0), 0.0, 250.0), (Rank(0), 350.0, 400.0)],
        "before the second op, which became ready at 350"
    );
    assert!(d.take_ended_work().is_empty() && d.find_stall().is_none());
    // A device without a program accepts the work too.
    d.occupy(1_000, Rank(1), 70);
    assert!(run_until_idle(&mut d).is_empty());
    assert_eq!(d.take_ended_work(), [OutsideWork { rank: Rank(1), start_ns: 1_000.0, end_ns: 1_070.0 }]);
}

#[test]
fn contention_slows_work_only_during_a_transfer() {
    let prices = FixedTiming { contention: 1.5, ..PLAIN };
    let (mut d, loaded) = load_devices(&[overlapped_program(), overlapped_program()], prices);
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    // 60 ns of transfer complete only 40 ns of 100 ns of work; 60 ns remain at full speed.
    assert_eq!(sorted_ends(&run_until_idle(&mut d)), [(0, 320.0), (1, 320.0)]);
}

#[test]
fn late_members_delay_peers_without_contention() {
    let prices = FixedTiming { contention: 2.0, ..PLAIN };
    let (mut d, loaded) = load_devices(&[overlapped_program(), overlapped_program()], prices);
    d.start_program(0, Rank(0), loaded[0]);
    d.start_program(1_000, Rank(1), loaded[1]);
    let ended = run_until_idle(&mut d);
    // Rank 0 has worked alone at full speed and has only the last op left when the transfer ends at
    // 1160.
    assert_eq!(sorted_ends(&ended), [(0, 1_260.0), (1, 1_330.0)]);
    assert_eq!((ended[0].start_ns, ended[1].start_ns), (0.0, 1_000.0));
}

#[test]
fn an_op_waits_for_its_launch_and_the_host_runs_ahead() {
    let (mut d, loaded) =
        load_devices(&[overlapped_program(), overlapped_program()], FixedTiming { launch: 30, ..PLAIN });
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    assert_eq!(
        sorted_ends(&run_until_idle(&mut d)),
        [(0, 330.0), (1, 330.0)],
        "all but the first launch is hidden"
    );
    let (mut d, loaded) =
        load_devices(&[overlapped_program(), overlapped_program()], FixedTiming { launch: 400, ..PLAIN });
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    assert_eq!(
        sorted_ends(&run_until_idle(&mut d)),
        [(0, 1_300.0), (1, 1_300.0)],
        "three launches and the last op"
    );
}

#[test]
fn packing_and_unpacking_occupy_the_device() {
    let (mut d, loaded) = load_devices(
        &[overlapped_program(), overlapped_program()],
        FixedTiming { pack: 10, unpack: 5, ..PLAIN },
    );
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    // 100, pack until 110, the second op until 210 during 60 ns of transfer, unpack until 215, the
    // last op.
    assert_eq!(sorted_ends(&run_until_idle(&mut d)), [(0, 315.0), (1, 315.0)]);
}

#[test]
fn launches_match_in_order_over_many_programs() {
    let (mut d, loaded) = load_devices(&[overlapped_program(), overlapped_program()], PLAIN);
    let mut left = [3, 3];
    (0..2).for_each(|r| d.start_program(u64::from(r) * 7, Rank(r), loaded[r as usize]));
    let mut last = 0.0;
    while let Some(at) = d.next_event_ns() {
        for e in d.advance_to(at) {
            assert!(e.end_ns >= last);
            last = e.end_ns;
            left[e.rank.0 as usize] -= 1;
            if left[e.rank.0 as usize] > 0 {
                d.start_program(at, e.rank, e.program);
            }
        }
    }
    assert_eq!((left, d.find_stall().is_none()), ([0, 0], true));
    assert_eq!(last, 907.0, "a rank that begins late stays late if nothing waits for it");
}

#[test]
fn batched_sends_and_receives_do_not_deadlock() {
    let swap = |other: u32, batch: &str| {
        program(&format!(
            "%x = input \"x\" : {T}
             %s = ttile.collective.issue send %x {{axis = \"tp\"{batch}, to = {other}}} @comm
             %r = ttile.collective.issue recv {{axis = \"tp\"{batch}, from = {other}}} @comm
             ttile.collective.wait %s @compute
             %y = ttile.collective.wait %r : {T} @compute"
        ))
    };
    let (mut d, loaded) = load_devices(&[swap(1, ", batch = 1"), swap(0, ", batch = 1")], PLAIN);
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    assert_eq!(sorted_ends(&run_until_idle(&mut d)), [(0, 60.0), (1, 60.0)]);
    let (mut d, loaded) = load_devices(&[swap(1, ""), swap(0, "")], PLAIN);
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    assert_eq!(run_until_idle(&mut d), [], "each sends first and waits for the other to receive");
    let stalled = d.find_stall().expect("a stall");
    assert_eq!((stalled.code.id, stalled.labels.len()), ("T0811", 2));
    assert!(stalled.labels[0].message.contains("send over tp to position 1"), "{stalled:?}");
    assert!(stalled.labels[0].message.contains("waits for rank 1"), "{stalled:?}");
}

#[test]
fn mismatched_collectives_stall() {
    let gather = program(&format!(
        "%x = input \"x\" : f32[2, 8] {{tp: shard(0)}}
         %t = ttile.collective.issue all_gather %x {{axis = \"tp\", dim = 0}} @comm
         %y = ttile.collective.wait %t : {T} @compute"
    ));
    let (mut d, loaded) = load_devices(&[overlapped_program(), gather], PLAIN);
    (0..2).for_each(|r| d.start_program(0, Rank(r), loaded[r as usize]));
    assert_eq!(run_until_idle(&mut d), []);
    let says = format!("{:?}", d.find_stall().expect("a stall").labels);
    assert!(
        says.contains("all_reduce") && says.contains("all_gather") && says.contains("another collective"),
        "{says}"
    );
    assert!((d.last_active_ns(Rank(0), 999), d.last_active_ns(Rank(1), 999)) == (200, 0));
}

#[test]
fn a_rank_without_ops_ends_as_it_begins() {
    let (mut d, loaded) = load_devices(&[program("")], PLAIN);
    d.start_program(42, Rank(0), loaded[0]);
    assert_eq!((d.next_event_ns(), sorted_ends(&d.advance_to(42))), (Some(42), vec![(0, 42.0)]));
}

#[test]
fn an_untimable_program_is_rejected() {
    let mesh: Mesh = "tp=2, outside=1".parse().unwrap();
    let mut d = SimDevices::new(mesh, 1.0);
    let refused = d.load(&overlapped_program(), &[Rank(0)], &PLAIN).expect_err("rank 0 is outside of tp");
    assert_eq!(refused.code.id, "T0810");
    let mut dangling = overlapped_program();
    let wait = dangling.ops.iter().position(|o| o.opcode == Opcode::Wait).unwrap();
    dangling.ops.remove(wait - 3);
    let refused = d.load(&dangling, &[Rank(1)], &PLAIN).expect_err("nothing was issued");
    assert!(refused.message.contains("waits for a collective that no earlier op issued"), "{refused:?}");
}
