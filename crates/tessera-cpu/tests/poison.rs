//! Poisoned memory: programs with a missing event, a premature reuse of a slot or an unwritten value
//! end with the op and the slot, and correct programs give the same bits as without poison.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, ProgramHandle, WeightSource};
use tessera_ir::{Slots, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

struct NoWeights;

impl WeightSource for NoWeights {
    fn read(&mut self, _: &str, _: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Ok(Vec::new())
    }
}

/// A chain of three ops, each of which needs only the result of the op before.
const SILU_CHAIN: &str = "program @p role(r) {
  %x = input : f32[2, 3]
  %a = ttile.silu %x
  %b = ttile.silu %a
  %y = ttile.silu %b
  output \"y\", %y
}";

fn open_backend() -> CpuBackend {
    let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
    CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1))
}

/// Loads a program with slots of these sizes; `slots` gives the slot of each value by name.
fn load_program(
    cpu: &mut CpuBackend,
    text: &str,
    slots: &[(&str, u32)],
    slot_bytes: Vec<u64>,
) -> ProgramHandle {
    let p = parse_all(text, "test").unwrap().remove(0);
    let slot_of = |name: &str| slots.iter().find(|(n, _)| *n == name).map(|(_, slot)| *slot);
    let value_slots = p.values.iter().map(|v| slot_of(&v.name)).collect();
    cpu.load(&Arc::new(p), &Slots { slot_bytes, value_slots }, &mut NoWeights).unwrap()
}

/// Runs a program of one rank twice, without a verifier, and returns the bits of its output `y`.
/// `slots` gives the slot of each value that an op writes, by name.
fn run(text: &str, slots: &[(&str, u32)], is_poisoned: bool) -> Result<Vec<u32>, Fault> {
    let mut cpu = open_backend();
    if is_poisoned {
        cpu.poison_temporaries();
    }
    let slot_bytes = vec![64; slots.iter().map(|(_, slot)| *slot as usize + 1).max().unwrap()];
    let loaded = load_program(&mut cpu, text, slots, slot_bytes);
    let x = [1.0, -2.0, 3.0, 0.5, 0.0, 7.0];
    let call = CallData { scalars: BTreeMap::new(), inputs: BTreeMap::from([("x", &x[..])]) };
    for _ in 0..2 {
        cpu.run(loaded, &call, &mut NoObserver)?;
    }
    let used = cpu.memory_use();
    assert_eq!(used.temporary_bytes, slots.iter().map(|(_, s)| u64::from(*s) + 1).max().unwrap() * 64);
    assert!(used.run_temporary_bytes <= used.temporary_bytes && used.peak_bytes >= used.allocated_bytes);
    Ok(cpu.output("y").unwrap().iter().map(|v| v.to_bits()).collect())
}

fn poison_text(text: &str, slots: &[(&str, u32)]) -> String {
    // Without poison the program runs in program order, and nobody notices.
    assert!(run(text, slots, false).is_ok());
    match run(text, slots, true) {
        Err(Fault::Poisoned(why)) => why,
        other => panic!("{other:?}"),
    }
}

/// Two streams; `EVENT` stands where the event is recorded, `AFTER` where it is awaited.
const TWO_STREAMS: &str = "program @p role(r) streams(compute, comm) {
  %x = input : f32[2, 3]
  %a = ttile.silu %x @compute
  EVENT
  %b = ttile.silu %a @comm AFTER
  %f = event.record @comm
  output \"y\", %b @compute after(%f)
}";

fn two_streams(with_event: bool) -> String {
    let (event, after) = if with_event { ("%e = event.record @compute", "after(%e)") } else { ("", "") };
    TWO_STREAMS.replace("EVENT", event).replace("AFTER", after)
}

// proves: O-14
#[test]
fn a_missing_event_fails_on_every_run_and_names_op_and_slot() {
    let slots = [("a", 0), ("b", 1)];
    for _ in 0..3 {
        let why = poison_text(&two_streams(false), &slots);
        for part in
            ["T0803: @p of r", "`silu` on stream comm reads %a from slot 0", "op 1 `silu` on stream compute"]
        {
            assert!(why.contains(part), "{part}: {why}");
        }
    }
}

#[test]
fn the_same_program_with_its_event_gives_the_same_bits_under_poison() {
    let (text, slots) = (two_streams(true), [("a", 0), ("b", 1)]);
    let plain = run(&text, &slots, false).unwrap();
    assert_eq!(run(&text, &slots, true), Ok(plain.clone()));
    assert!(plain.iter().all(|bits| f32::from_bits(*bits).is_finite()));
}

// proves: O-14
#[test]
fn a_slot_that_another_stream_may_still_read_is_not_overwritten() {
    // `%c` reuses the slot of `%a` while stream comm may still read `%a`.
    let text = |after: &str| {
        format!(
            "program @p role(r) streams(compute, comm) {{
  %x = input : f32[2, 3]
  %a = ttile.silu %x @compute
  %e = event.record @compute
  %b = ttile.silu %a @comm after(%e)
  %f = event.record @comm
  %c = ttile.silu %x @compute {after}
  %y = ttile.add %c, %b @compute after(%f)
  output \"y\", %y @compute
}}"
        )
    };
    let slots = [("a", 0), ("b", 1), ("c", 0), ("y", 2)];
    let why = poison_text(&text(""), &slots);
    assert!(why.contains("writes slot 0") && why.contains("`silu` on stream comm may still access"), "{why}");
    let ordered = text("after(%f)");
    assert_eq!(run(&ordered, &slots, true), run(&ordered, &slots, false));
}

#[test]
fn a_freed_slot_is_reused_on_its_own_stream_without_an_event() {
    let slots = [("a", 0), ("b", 1), ("y", 0)];
    assert_eq!(run(SILU_CHAIN, &slots, true), run(SILU_CHAIN, &slots, false));
}

#[test]
fn a_value_whose_slot_was_reused_is_not_read() {
    let text = "program @p role(r) {
  %x = input : f32[2, 3]
  %a = ttile.silu %x
  %b = ttile.silu %x
  %y = ttile.add %a, %b
  output \"y\", %y
}";
    let why = poison_text(text, &[("a", 0), ("b", 0), ("y", 1)]);
    assert!(why.contains("reads %a from slot 0, which holds %b since op 2"), "{why}");
    assert!(run(text, &[("a", 0), ("b", 1), ("y", 2)], true).is_ok());
}

/// Two programs whose large temporaries have other slot numbers share the memory of the larger one.
#[test]
fn programs_share_their_temporaries_whatever_the_numbers_of_their_slots() {
    let mut cpu = open_backend();
    let text = "program @p { %x = input : f32[100] %a = toperator.silu %x %y = toperator.silu %a \
                output \"y\", %y }";
    for slot_bytes in [vec![1600, 400], vec![400, 1600]] {
        load_program(&mut cpu, text, &[("a", 0), ("y", 1)], slot_bytes);
    }
    assert_eq!(cpu.memory_use().temporary_bytes, 2048, "1600 and 400 bytes in whole cache lines");
}

#[test]
fn results_that_reuse_a_slot_are_counted() {
    let count = |slots: &[(&str, u32)]| {
        let mut cpu = open_backend();
        let loaded = load_program(&mut cpu, SILU_CHAIN, slots, vec![24; 3]);
        let call = CallData { scalars: BTreeMap::new(), inputs: BTreeMap::from([("x", &[0.5; 6][..])]) };
        for _ in 0..3 {
            cpu.run(loaded, &call, &mut NoObserver).unwrap();
        }
        let used = cpu.memory_use();
        (used.slot_reuses, used.run_temporary_bytes, used.temporary_bytes)
    };
    // Each slot begins on a cache line.
    assert_eq!(count(&[("a", 0), ("b", 1), ("y", 0)]), (3, 48, 192));
    assert_eq!(count(&[("a", 0), ("b", 1), ("y", 2)]), (0, 72, 192));
}
