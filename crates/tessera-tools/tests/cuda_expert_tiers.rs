//! Compares experts in two tiers on a GPU with the same experts in one tier, and their transfers with those of a CPU.
//! Without a GPU the tests print the reason and pass, unless `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod gpu_ranks;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use gpu_ranks::{find_gpus, options};
use tessera::gpus::GpuDiscovery;
use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_cpu::{CpuBackend, Pool};
use tessera_cuda::CudaBackend;
use tessera_device::{
    Backend, CallData, ExpertBank, ExpertReport, LayerTransfers, MeshRank, NoObserver, ProgramHandle,
    WeightSource,
};
use tessera_filetests::dedicated_slots;
use tessera_ir::{Program, Type, parse_all};
use tessera_mesh::{Mesh, Rank};

/// Experts, rows of their matrices, and places for rows of one expert in `x`.
const EXPERTS: usize = 5;
const ROWS: usize = 48;
const PLACES: usize = 11;

/// Two layers of two weights each, with `width` channels.
#[derive(Debug, Clone, Copy)]
struct Case {
    dtype: &'static str,
    width: usize,
    /// Resident experts and the window; `None` for one tier.
    tier: Option<(u64, u64)>,
    is_captured: bool,
}

impl Case {
    fn program(&self) -> Arc<Program> {
        let Case { dtype, width, tier, is_captured } = *self;
        let weight = |name: &str, layer: usize| {
            let tier = tier.map_or(String::new(), |(resident, window)| {
                format!(
                    "{{tier_layer = {layer}, tier_policy = \"lru_hotness\", tier_resident = {resident}, \
                     tier_window = {window}}} "
                )
            });
            format!("%{name} = weight \"{name}\" {tier}: {dtype}[{EXPERTS}, {ROWS}, {width}] ")
        };
        // A value of the dtype is no cast of itself.
        let (narrow, to_dtype, widen, to_f32) = match dtype {
            "f32" => ("toperator.silu", String::new(), "toperator.silu", ""),
            _ => ("toperator.cast", format!(" {{to = \"{dtype}\"}}"), "toperator.cast", " {to = \"f32\"}"),
        };
        let matmul = |out: &str, w: &str, counts: &str| {
            format!(
                "%{out} = toperator.grouped_matmul %n, %{w}, %{counts} {{act = \"silu\", rows = {}}} \
                 %f{out} = {widen} %{out}{to_f32} ",
                EXPERTS * PLACES
            )
        };
        let weights =
            [("g", 0), ("u", 0), ("h", 1), ("v", 1)].map(|(name, layer)| weight(name, layer)).concat();
        let layers = [("a", "g", "k"), ("b", "u", "k"), ("c", "h", "l"), ("d", "v", "l")];
        let matmuls = layers.map(|(out, w, counts)| matmul(out, w, counts)).concat();
        let outputs = ["a", "b", "c", "d"].map(|out| format!("output \"{out}\", %f{out} ")).concat();
        let (resident, window) = tier.unwrap_or_default();
        let text = format!(
            "program @p_{dtype}_{width}_{resident}_{window} {{ %x = input : f32[{EXPERTS}, {PLACES}, {width}] %k = input : f32[{EXPERTS}, 1] \
             %l = input : f32[{EXPERTS}, 1] {weights} %n = {narrow} %x{to_dtype} {matmuls} {outputs} }}"
        );
        let mut program = parse_all(&text, "tiers").unwrap_or_else(|e| panic!("{e:?}\n{text}")).remove(0);
        if is_captured {
            program.capture_into("tiers");
        }
        Arc::new(program)
    }
}

/// Random weights, by name.
#[derive(Debug)]
struct RandomExperts;

#[derive(Debug)]
struct RandomBank(Vec<f32>, usize, usize);

fn random_weight(name: &str, ty: &Type) -> Vec<f32> {
    let mut out = vec![0.0; ty.element_count() as usize];
    fill_normals(DrawKey { seed: u64::from(name.as_bytes()[0]), chunk: 0, draw: 0 }, 0, &mut out);
    out
}

impl WeightSource for RandomExperts {
    fn read(&mut self, name: &str, ty: &Type, _: Option<&str>, _: &MeshRank) -> Result<Vec<f32>, Diagnostic> {
        Ok(random_weight(name, ty))
    }

    fn open_experts(
        &mut self,
        name: &str,
        ty: &Type,
        _: &MeshRank,
    ) -> Result<Arc<dyn ExpertBank>, Diagnostic> {
        Ok(Arc::new(RandomBank(random_weight(name, ty), ty.shape[1] as usize, ty.shape[2] as usize)))
    }
}

impl ExpertBank for RandomBank {
    fn read_rows(&self, expert: u64, first_row: u64, rows: &mut [f32]) -> Result<(), Diagnostic> {
        let first = (expert as usize * self.1 + first_row as usize) * self.2;
        rows.copy_from_slice(&self.0[first..first + rows.len()]);
        Ok(())
    }
}

/// The rows of each expert, per call.
const CALLS: [[f32; EXPERTS]; 7] = [
    [3.0, 0.0, 1.0, 0.0, 2.0],
    [1.0, 1.0, 1.0, 1.0, 1.0],
    [0.0, 0.0, 0.0, 0.0, 0.0],
    [0.0, 11.0, 0.0, 9.0, 0.0],
    [2.0, 0.0, 3.0, 0.0, 1.0],
    [2.0, 0.0, 3.0, 0.0, 0.0],
    [0.0, 0.0, 3.0, 0.0, 8.0],
];

fn seat() -> MeshRank {
    MeshRank { mesh: Mesh::default(), rank: Rank(0) }
}

fn open_cuda(found: &GpuDiscovery) -> CudaBackend {
    CudaBackend::open(&found.libraries, seat(), Vec::new(), options(0)).unwrap()
}

fn open_cpu() -> CpuBackend {
    CpuBackend::new(seat(), Pool::single_thread(), Vec::new(), Duration::from_secs(1))
}

fn load(backend: &mut dyn Backend, case: Case) -> ProgramHandle {
    let program = case.program();
    backend.load(&program, &dedicated_slots(&program), &mut RandomExperts).unwrap()
}

/// Runs call `i`, whose second layer has the counts of the next one, and returns the outputs.
fn run(backend: &mut dyn Backend, program: ProgramHandle, case: Case, i: usize) -> Vec<Vec<f32>> {
    let mut x = vec![0.0; EXPERTS * PLACES * case.width];
    fill_normals(DrawKey { seed: i as u64, chunk: 1, draw: 0 }, 0, &mut x);
    let (k, l) = (CALLS[i % CALLS.len()], CALLS[(i + 1) % CALLS.len()]);
    let inputs = BTreeMap::from([("x", &x[..]), ("k", &k[..]), ("l", &l[..])]);
    backend.run(program, &CallData { scalars: BTreeMap::new(), inputs }, &mut NoObserver).unwrap();
    ["a", "b", "c", "d"].map(|name| backend.output(name).unwrap().to_vec()).to_vec()
}

/// Returns what a report says of layers, but for the speed of transfers.
fn counts(report: ExpertReport) -> Vec<LayerTransfers> {
    report.layers.into_iter().map(|layer| LayerTransfers { waited_ns: 0, ..layer }).collect()
}

#[test]
fn bits_are_those_of_one_tier_and_transfers_those_of_a_cpu() {
    let Some((found, _)) = find_gpus(1) else { return };
    // Compiling the kernels takes longer than all runs, so one backend has all programs.
    let mut cuda = open_cuda(&found);
    for (at, (dtype, width)) in [("f32", 20), ("f32", 33), ("bf16", 64)].into_iter().enumerate() {
        let plain = Case { dtype, width, tier: None, is_captured: true };
        let handle = load(&mut cuda, plain);
        let expected: Vec<_> = (0..2 * CALLS.len()).map(|i| run(&mut cuda, handle, plain, i)).collect();
        for resident in 1..=EXPERTS as u64 {
            for (window, is_captured, is_timed) in
                [(1, false, false), (1, true, false), (2, false, false), (2, true, false), (1, true, true)]
            {
                let case = Case { tier: Some((resident, window)), is_captured, ..plain };
                let mut cpu = open_cpu();
                let (tiered, beside) = (load(&mut cuda, case), load(&mut cpu, case));
                cuda.time_steps(is_timed);
                cuda.reset_buffers();
                for (i, expected) in expected.iter().enumerate() {
                    assert_eq!(&run(&mut cuda, tiered, case, i), expected, "{case:?} call {i}");
                    run(&mut cpu, beside, case, i);
                    let report = cuda.take_expert_report();
                    let spans = report.transfers.iter().map(|t| (t.end - t.begin).as_secs_f64());
                    assert!(spans.fold(0.0, f64::max) < 1.0, "{report:?}");
                    let ahead = report.transfers.iter().filter(|t| t.is_prefetch).count() as u64;
                    assert!(ahead.is_multiple_of(2), "a layer has two weights");
                    assert_eq!(counts(report), counts(cpu.take_expert_report()), "{case:?} call {i}");
                }
                assert_eq!(cuda.audit_weights(u64::MAX).changed, None, "{case:?}");
            }
        }
        // The fingerprint of experts in two tiers is that of the same weight in one.
        assert_eq!(cuda.fingerprints().len(), 4 * (at + 1));
        cuda.time_steps(false);
    }
}

#[test]
fn a_changed_element_of_a_pool_is_found_and_a_reset_mends_it() {
    let Some((found, _)) = find_gpus(1) else { return };
    let case = Case { dtype: "f32", width: 20, tier: Some((2, 1)), is_captured: true };
    let mut cuda = open_cuda(&found);
    let program = load(&mut cuda, case);
    let first = run(&mut cuda, program, case, 0);
    assert_eq!(cuda.audit_weights(u64::MAX).changed, None);
    let at = |expert: usize| (expert * ROWS * case.width + 7) as u64;
    let written: Vec<bool> = (0..EXPERTS).map(|expert| cuda.write_weight("u", at(expert), 9.0)).collect();
    assert_eq!(written.iter().filter(|w| **w).count(), 2, "the pool has two slots: {written:?}");
    let (changed, _) = cuda.audit_weights(u64::MAX).changed.unwrap();
    assert_eq!(changed.tensor, "u");
    // Between runs, an audit that waits for the device reads the pools as well.
    cuda.audit_weights(u64::MAX);
    let mut audited = cuda.audit_weights_while_waiting(u64::MAX);
    audited.merge(cuda.audit_weights_while_waiting(u64::MAX));
    assert_eq!(audited.changed.map(|(print, _)| print.tensor).as_deref(), Some("u"));
    cuda.reset_buffers();
    assert_eq!(run(&mut cuda, program, case, 0), first);
    cuda.reload_weights(&mut RandomExperts).unwrap();
    cuda.audit_weights(u64::MAX);
    assert_eq!(cuda.audit_weights(u64::MAX).changed, None);
    assert_eq!(run(&mut cuda, program, case, 0), first);
}

/// A machine without a GPU checks the programs at least.
#[test]
fn a_gpu_supports_the_programs() {
    for dtype in ["f32", "bf16"] {
        let case = Case { dtype, width: 32, tier: Some((2, 1)), is_captured: true };
        assert_eq!(CudaBackend::find_unsupported(&case.program()), None);
    }
}
