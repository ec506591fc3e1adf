//! Experts in two tiers: bits, fingerprints and checks beside the same weights in one tier, and transfers that fail.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{
    Backend, CallData, ExpertBank, Fault, MeshRank, NoObserver, ProgramHandle, T0802, WeightSource,
};
use tessera_ir::{Slots, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

const EXPERTS: usize = 5;
const ROWS: usize = 37;
const WIDTH: usize = 20;
const SLOTS: usize = 3;

/// Returns an element of a weight.
fn element(name: &str, index: usize) -> f32 {
    ((index * 2_654_435_761 + name.len() * 97) % 1013) as f32 / 1013.0 - 0.5
}

/// A source of weights whose experts can be taken away.
#[derive(Default)]
struct Source {
    fails: Arc<AtomicBool>,
}

#[derive(Debug)]
struct Bank {
    name: String,
    fails: Arc<AtomicBool>,
}

impl WeightSource for Source {
    fn read(&mut self, name: &str, ty: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Ok((0..ty.element_count() as usize).map(|i| element(name, i)).collect())
    }

    fn open_experts(
        &mut self,
        name: &str,
        _: &Type,
        _: &MeshRank,
    ) -> Result<Arc<dyn ExpertBank>, Diagnostic> {
        Ok(Arc::new(Bank { name: name.to_string(), fails: Arc::clone(&self.fails) }))
    }
}

impl ExpertBank for Bank {
    fn read_rows(&self, expert: u64, first_row: u64, rows: &mut [f32]) -> Result<(), Diagnostic> {
        if self.fails.load(Ordering::Relaxed) {
            return Err(Diagnostic::error(&T0802, "the file is gone"));
        }
        let first = (expert as usize * ROWS + first_row as usize) * WIDTH;
        rows.iter_mut().enumerate().for_each(|(i, x)| *x = element(&self.name, first + i));
        Ok(())
    }
}

/// Loads two layers of two weights each, of which `resident` experts lie in fast memory if any.
fn load(resident: Option<u64>, dtype: &str, source: &mut Source) -> (CpuBackend, ProgramHandle) {
    let seat = MeshRank { mesh: Mesh::default(), rank: Rank(0) };
    let mut cpu = CpuBackend::new(seat, Pool::single_thread(), Vec::new(), Duration::from_secs(1));
    let loaded = load_into(&mut cpu, resident, dtype, source);
    (cpu, loaded)
}

/// Loads the two layers into a backend that may have loaded others.
fn load_into(cpu: &mut CpuBackend, resident: Option<u64>, dtype: &str, source: &mut Source) -> ProgramHandle {
    let weight = |name: &str, layer: usize| {
        let tier = resident.map_or(String::new(), |resident| {
            format!("{{tier_layer = {layer}, tier_policy = \"lru_hotness\", tier_resident = {resident}, tier_window = 1}} ")
        });
        format!("%{name} = weight \"{name}\" {tier}: {dtype}[{EXPERTS}, {ROWS}, {WIDTH}] ")
    };
    let rows = match dtype {
        "f32" => "toperator.silu %x".to_string(),
        _ => format!("toperator.cast %x {{to = \"{dtype}\"}}"),
    };
    let text = format!(
        "program @p {{ %x = input : f32[{EXPERTS}, {SLOTS}, {WIDTH}] %k = input : f32[{EXPERTS}, 1] \
         {}{}{}{} %n = {rows} \
         %a = toperator.grouped_matmul %n, %g, %k {{rows = 9}} %b = toperator.grouped_matmul %n, %up, %k {{act = \"silu\", rows = 9}} \
         %c = toperator.grouped_matmul %n, %gg, %k {{rows = 9}} %d = toperator.grouped_matmul %n, %uup, %k {{rows = 9}} \
         output \"a\", %a output \"b\", %b output \"c\", %c output \"d\", %d }}",
        weight("g", 0),
        weight("up", 0),
        weight("gg", 1),
        weight("uup", 1)
    );
    let p = parse_all(&text, "test").unwrap_or_else(|e| panic!("{e:?}")).remove(0);
    let slot_bytes = p.values.iter().map(|v| v.ty.byte_size().0).collect();
    let value_slots = (0..p.values.len() as u32).map(Some).collect();
    cpu.load(&Arc::new(p), &Slots { slot_bytes, value_slots }, source).unwrap()
}

/// Runs a call in which each expert has so many rows, and returns the bits of all outputs.
fn run(
    (cpu, program): &mut (CpuBackend, ProgramHandle),
    counts: [f32; EXPERTS],
) -> Result<Vec<Vec<u32>>, Fault> {
    let mut x = vec![0.0; EXPERTS * SLOTS * WIDTH];
    for (expert, count) in counts.iter().enumerate() {
        for i in 0..*count as usize * WIDTH {
            x[expert * SLOTS * WIDTH + i] = element("x", expert + i);
        }
    }
    let inputs = BTreeMap::from([("x", &x[..]), ("k", &counts[..])]);
    cpu.run(*program, &CallData { scalars: BTreeMap::new(), inputs }, &mut NoObserver)?;
    let bits = |name: &str| cpu.output(name).unwrap().iter().map(|v| v.to_bits()).collect();
    Ok(["a", "b", "c", "d"].map(bits).to_vec())
}

const CALLS: [[f32; EXPERTS]; 5] = [
    [3.0, 0.0, 1.0, 0.0, 2.0],
    [1.0, 1.0, 1.0, 1.0, 1.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 3.0, 0.0, 3.0, 0.0],
    [2.0, 0.0, 3.0, 0.0, 1.0],
];

#[test]
fn bits_and_fingerprints_are_those_of_one_tier() {
    for dtype in ["f32", "bf16"] {
        let mut whole = load(None, dtype, &mut Source::default());
        let expected: Vec<_> = CALLS.iter().map(|counts| run(&mut whole, *counts).unwrap()).collect();
        for resident in 1..=EXPERTS as u64 {
            let mut tiered = load(Some(resident), dtype, &mut Source::default());
            assert_eq!(tiered.0.fingerprints(), whole.0.fingerprints());
            let [held, all] = [&tiered.0, &whole.0].map(|cpu| cpu.memory_bytes()[0]);
            assert!(held <= all * resident / EXPERTS as u64 + 4096, "{held} of {all} for {resident}");
            // The second round finds other experts in the pools.
            for (counts, expected) in CALLS.iter().zip(&expected).chain(CALLS.iter().zip(&expected)) {
                assert_eq!(run(&mut tiered, *counts).unwrap(), *expected, "{dtype} {resident} {counts:?}");
            }
        }
    }
}

#[test]
fn programs_with_and_without_tiers_share_no_weight() {
    let mut whole = load(None, "f32", &mut Source::default());
    let expected = run(&mut whole, CALLS[0]).unwrap();
    let (mut cpu, plain) = whole;
    let tiered = load_into(&mut cpu, Some(2), "f32", &mut Source::default());
    let mut both = (cpu, tiered);
    assert_eq!(run(&mut both, CALLS[0]).unwrap(), expected);
    assert_eq!(both.0.take_expert_report().layers.len(), 2, "the experts of both layers were fetched");
    both.1 = plain;
    assert_eq!(run(&mut both, CALLS[0]).unwrap(), expected);
    assert_eq!(both.0.take_expert_report().layers, []);
}

#[test]
fn a_reset_makes_runs_repeat() {
    let mut tiered = load(Some(2), "f32", &mut Source::default());
    let mut reports = Vec::new();
    for _ in 0..2 {
        CALLS.iter().for_each(|counts| drop(run(&mut tiered, *counts).unwrap()));
        let report = tiered.0.take_expert_report();
        assert_eq!(tiered.0.take_expert_report().layers, []);
        let layers = report.layers.into_iter().map(|mut layer| {
            layer.waited_ns = 0;
            layer
        });
        reports.push(layers.collect::<Vec<_>>());
        tiered.0.reset_buffers();
    }
    assert_eq!(reports[0].len(), 2 * CALLS.len());
    assert_eq!(reports[0], reports[1]);
    assert_eq!(reports[0].iter().map(|layer| layer.stalls).take(3).collect::<Vec<_>>(), [3, 3, 3]);
}

#[test]
fn the_audit_covers_the_tier_in_which_an_expert_lies() {
    let mut tiered = load(Some(2), "f32", &mut Source::default());
    run(&mut tiered, [0.0, 0.0, 3.0, 0.0, 0.0]).unwrap();
    let cpu = &mut tiered.0;
    assert_eq!(cpu.audit_weights(u64::MAX).changed, None);
    let at = |expert: usize| (expert * ROWS * WIDTH + 3 * WIDTH + 7) as u64;
    for expert in 0..EXPERTS {
        assert_eq!(cpu.read_weight("up", at(expert)), Some(element("up", at(expert) as usize)));
    }
    assert_eq!(cpu.read_weight("up", (EXPERTS * ROWS * WIDTH) as u64), None);
    // Host memory belongs to all ranks, so a drill changes the pool alone.
    assert!(!cpu.write_weight("up", at(0), 9.0) && cpu.write_weight("up", at(2), 9.0));
    let (changed, _) = cpu.audit_weights(u64::MAX).changed.unwrap();
    assert_eq!(changed.tensor, "up");
    cpu.reset_buffers();
    assert_eq!(cpu.audit_weights(u64::MAX).changed, None);
    assert_eq!(cpu.audit_weights(u64::MAX).rounds, 1);
    cpu.reload_weights(&mut Source::default()).unwrap();
    assert_eq!(cpu.audit_weights(u64::MAX).changed, None);
}

#[test]
fn a_transfer_that_fails_ends_the_run_with_the_expert() {
    let mut source = Source::default();
    let mut tiered = load(Some(1), "f32", &mut source);
    run(&mut tiered, [1.0, 0.0, 0.0, 0.0, 0.0]).unwrap();
    source.fails.store(true, Ordering::Relaxed);
    let Err(Fault::Failed(why)) = run(&mut tiered, [0.0, 0.0, 0.0, 2.0, 0.0]) else {
        panic!("no expert 3 was needed")
    };
    assert!(why.contains("expert 3") && why.contains("`g`") && why.contains("the file is gone"), "{why}");
}
