//! Runs the conformance suite on the CPU backend, and checks that it finds faulty backends.

#![allow(clippy::unwrap_used)]

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{cpu_backend, open_cpu_backends, read_files};
use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, ROUNDING_CHUNK, fill_words};
use tessera_cpu::kernels::round_by_words;
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{
    AbortFn, AuditResult, Backend, CallData, Fault, Fingerprint, JoinedCommunicator, LoadedProgram,
    MemoryUse, Observer, ProgramHandle, T0801, WeightSource,
};
use tessera_filetests::{BackendFactory, BackendUnderTest, ConformanceReport, Tolerance, run_conformance};
use tessera_ir::{DType, OpKind, Opcode, Program, Slots, parse_all};
use tessera_mesh::Mesh;
use tessera_models::{DecoderModel, PagedCache, TokenBucket, TokenOutput, TokenPhase, build_token_phases};
use tessera_plan::precision::apply_dtype_policy;
use tessera_plan::{DecoderPrecision, DtypePolicy, Strategy};
use tessera_reference::rounding_to;

#[test]
fn the_cpu_backend_agrees_with_the_reference() {
    let report = run_conformance(&cpu_backend("cpu"), &read_files());
    println!("{report}");
    assert!(report.failed.is_empty(), "{report}");
    assert!(report.executed_share() >= 0.8, "too many files are skipped\n{report}");
    for fault in ["mismatch", "deadlock", "cache_write_past_the_end", "input_shape_mismatch"] {
        let file = format!("eval/{fault}.tir");
        assert!(report.passed.contains(&file), "{file} must end in its fault\n{report}");
    }
    for group in ["all_reduce_max", "subgroups", "both_send_first", "world_all_reduce", "world_leader"] {
        let file = format!("eval/{group}.tir");
        assert!(report.passed.contains(&file), "{file} must run\n{report}");
    }
}

/// An op with the dtypes below f32 of its operands and results.
type NarrowOp = (Opcode, BTreeSet<DType>);

fn narrow_ops(p: &Program) -> impl Iterator<Item = NarrowOp> + '_ {
    p.ops.iter().filter(|op| op.opcode.table_row().kind == OpKind::Compute).filter_map(|op| {
        let values = op.used_values().chain(op.results.iter().copied());
        let dtypes: BTreeSet<DType> = values.map(|v| p.type_of(v).dtype).collect();
        let narrow = dtypes.into_iter().filter(|d| matches!(d, DType::Bf16 | DType::E4m3));
        let narrow: BTreeSet<DType> = narrow.collect();
        (!narrow.is_empty()).then_some((op.opcode, narrow))
    })
}

/// Returns the ops of the language models among the fixtures under the policies in low precision.
fn low_precision_ops() -> BTreeMap<NarrowOp, String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/lm");
    let cache = PagedCache { page_rows: 4, pages: 8, pages_per_sequence: 4, replicates_heads: false };
    let buckets = [TokenBucket { sequences: 1, rows: 5 }, TokenBucket { sequences: 2, rows: 1 }];
    let buckets = buckets.map(TokenPhase::from_call);
    let mut ops = BTreeMap::new();
    for dir in std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).filter(|p| p.is_dir()) {
        let name = dir.file_name().unwrap().to_string_lossy().into_owned();
        let config = std::fs::read_to_string(dir.join("config.json")).unwrap();
        let model = DecoderModel::parse(&name, &config).unwrap();
        for logical in build_token_phases(&model, cache, &buckets, TokenOutput::Next) {
            for policy in [DtypePolicy::Bf16, DtypePolicy::Fp8] {
                let decoder = DecoderPrecision::Exact;
                let p = apply_dtype_policy(&logical, policy, Strategy::Megatron, decoder).unwrap();
                ops.extend(narrow_ops(&p).map(|op| (op, format!("{name} under {}", policy.name()))));
            }
        }
    }
    ops
}

#[test]
fn every_op_of_a_language_model_runs_in_the_dtypes_of_every_policy() {
    let files: Vec<_> = read_files().into_iter().filter(|(name, _)| name.starts_with("eval/")).collect();
    let mut covered = BTreeSet::new();
    let parsed = files.iter().filter_map(|(name, text)| parse_all(text, name).ok());
    parsed.flatten().for_each(|p| covered.extend(narrow_ops(&p)));
    let wanted = low_precision_ops();
    assert!(wanted.len() >= 17, "{wanted:?}");
    let missing: Vec<_> = wanted.iter().filter(|(op, _)| !covered.contains(op)).collect();
    assert!(missing.is_empty(), "no file evaluates {missing:#?}");
    let narrow: Vec<_> = files
        .into_iter()
        .filter(|(name, text)| {
            parse_all(text, name).is_ok_and(|ps| ps.iter().any(|p| narrow_ops(p).next().is_some()))
        })
        .collect();
    let report = run_conformance(&cpu_backend("cpu"), &narrow);
    let skipped: Vec<&str> = report.skipped.iter().map(|(name, _)| name.as_str()).collect();
    // `cast.tir` covers f16 too, which no policy names.
    assert!(report.failed.is_empty() && skipped == ["eval/cast.tir"], "{report}");
}

#[test]
fn stochastic_rounding_on_the_cpu_has_the_bits_of_the_reference() {
    let key = DrawKey { seed: 3 << 33 | 5, chunk: ROUNDING_CHUNK, draw: 1 };
    // Numbers of every exponent and of odd mantissas.
    let numbers: Vec<f32> =
        (0..=u32::MAX).step_by(16_411).map(f32::from_bits).filter(|x| !x.is_nan()).collect();
    let (width, first) = (1001, (1 << 33) + 3);
    let mut words = vec![0; numbers.len()];
    fill_words(key, first, &mut words);
    for dtype in [DType::Bf16, DType::E4m3] {
        let mut found = numbers.clone();
        let first_of_row = |row: usize| first + (row * width) as u64;
        round_by_words(&Pool::new(2).unwrap(), &mut found, width, dtype, key, first_of_row);
        let exact = rounding_to(dtype).unwrap();
        for ((x, word), found) in numbers.iter().zip(&words).zip(&found) {
            let expected = exact.round_by_word(f64::from(*x), *word) as f32;
            assert_eq!(
                found.to_bits(),
                expected.to_bits(),
                "{x:e} by {word} to {dtype}: {found:e} for {expected:e}"
            );
        }
    }
}

#[test]
fn poisoned_memory_refuses_no_correct_program() {
    let open = |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| {
        let factories = open_cpu_backends(mesh, programs)?.into_iter();
        Ok(factories
            .map(|open| -> BackendFactory<CpuBackend> {
                Box::new(move |place| {
                    let mut backend = open(place)?;
                    backend.poison_temporaries();
                    Ok(backend)
                })
            })
            .collect())
    };
    let backend = BackendUnderTest { open: &open, ..cpu_backend("poisoned cpu") };
    let report = run_conformance(&backend, &read_files());
    assert!(report.failed.is_empty(), "{report}");
    assert!(report.executed_share() >= 0.8, "{report}");
}

/// A CPU backend with an injected defect.
struct FaultyBackend {
    inner: CpuBackend,
    defect: InjectedDefect,
    output: Vec<f32>,
}

#[derive(Clone, Copy, PartialEq)]
enum InjectedDefect {
    /// The last element of every output has an error of ten roundings.
    SmallError,
    /// The backend reports success without running.
    Silent,
    /// The backend reports that a peer did not arrive.
    Stalls,
    /// A run never returns.
    Hangs,
    /// The backend rejects every program.
    Refuses,
    /// A run panics.
    Panics,
}

impl Backend for FaultyBackend {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<ProgramHandle, Diagnostic> {
        if self.defect == InjectedDefect::Refuses {
            return Err(Diagnostic::error(&T0801, "this backend supports no program"));
        }
        self.inner.load(program, slots, weights)
    }

    fn run(
        &mut self,
        program: ProgramHandle,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        match self.defect {
            InjectedDefect::Hangs => std::thread::sleep(Duration::from_secs(60)),
            InjectedDefect::Silent => return Ok(()),
            InjectedDefect::Stalls => return Err(Fault::Stalled("no peer arrived".to_string())),
            InjectedDefect::Panics => panic!("on purpose"),
            _ => {}
        }
        self.inner.run(program, call, observer)?;
        self.output = self.inner.output("y").map(<[f32]>::to_vec).unwrap_or_default();
        if let Some(last) = self.output.last_mut() {
            *last *= 1.0 + 1e-4;
        }
        Ok(())
    }

    fn loaded_programs(&self) -> Vec<LoadedProgram> {
        self.inner.loaded_programs()
    }

    fn joined_communicators(&self) -> Vec<JoinedCommunicator> {
        self.inner.joined_communicators()
    }

    fn effective_values(&self) -> Vec<(String, String)> {
        self.inner.effective_values()
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.inner.fingerprints()
    }

    fn audit_weights(&mut self, bytes: u64) -> AuditResult {
        self.inner.audit_weights(bytes)
    }

    fn reload_weights(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.inner.reload_weights(weights)
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.inner.write_weight(name, index, value)
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        self.inner.fingerprint_buffer(name, slice)
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        let bent = self.defect == InjectedDefect::SmallError && name == "y";
        if bent { Some(&self.output) } else { self.inner.output(name) }
    }

    fn read_buffer(&self, name: &str) -> Option<Vec<f32>> {
        self.inner.read_buffer(name)
    }

    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool {
        self.inner.write_buffer(name, data)
    }

    fn reset_buffers(&mut self) {
        self.inner.reset_buffers();
    }

    fn reset_count(&self) -> u64 {
        self.inner.reset_count()
    }

    fn memory_bytes(&self) -> [u64; 3] {
        self.inner.memory_bytes()
    }

    fn memory_use(&self) -> MemoryUse {
        self.inner.memory_use()
    }

    fn poison_temporaries(&mut self) {
        self.inner.poison_temporaries();
    }

    fn compensated_sums(&self) -> u64 {
        self.inner.compensated_sums()
    }

    fn abort_fn(&self) -> AbortFn {
        self.inner.abort_fn()
    }
}

fn run_faulty(how: InjectedDefect, wanted: &[&str]) -> ConformanceReport {
    run_faulty_with(how, true, wanted)
}

fn run_faulty_with(how: InjectedDefect, compares: bool, wanted: &[&str]) -> ConformanceReport {
    let open = move |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| {
        let make_faulty = |make: BackendFactory<CpuBackend>| -> BackendFactory<FaultyBackend> {
            Box::new(move |seat| Ok(FaultyBackend { inner: make(seat)?, defect: how, output: Vec::new() }))
        };
        Ok(open_cpu_backends(mesh, programs)?.into_iter().map(make_faulty).collect())
    };
    let subject = BackendUnderTest {
        name: "bent",
        open: &open,
        tolerance: Tolerance { relative: 5e-7 },
        peer_timeout: Duration::from_millis(100),
        detects_mismatch: compares,
    };
    let files: Vec<_> = read_files().into_iter().filter(|(n, _)| wanted.contains(&n.as_str())).collect();
    assert_eq!(files.len(), wanted.len());
    run_conformance(&subject, &files)
}

const TWO_FILES: &[&str] = &["eval/attention_ulysses.tir", "eval/column_row_linear.tir"];

#[test]
fn a_backend_with_a_small_error_is_found() {
    let report = run_faulty(InjectedDefect::SmallError, TWO_FILES);
    assert_eq!(report.failed.len(), 2, "{report}");
    assert!(report.failed[0].1.contains("differs by"), "{report}");
}

#[test]
fn a_backend_that_computes_nothing_is_found() {
    let report = run_faulty(InjectedDefect::Silent, TWO_FILES);
    assert!(report.failed.len() == 2 && report.failed[0].1.contains("has no output"), "{report}");
    // The expected faults are missing as well.
    let report = run_faulty(InjectedDefect::Silent, &["eval/deadlock.tir", "eval/mismatch.tir"]);
    assert!(
        report.failed.len() == 2 && report.failed[0].1.contains("the run should have ended with"),
        "{report}"
    );
}

#[test]
fn a_stall_counts_as_a_mismatch_if_collectives_do_not_compare() {
    let of = |compares| run_faulty_with(InjectedDefect::Stalls, compares, &["eval/mismatch.tir"]);
    assert_eq!(of(false).passed, ["eval/mismatch.tir"]);
    assert!(of(true).failed[0].1.contains("the run should have ended with: mismatch"));
}

#[test]
fn a_backend_that_hangs_does_not_hang_the_suite() {
    let begin = Instant::now();
    let report = run_faulty(InjectedDefect::Hangs, &["eval/broadcast.tir"]);
    assert!(report.failed.len() == 1 && report.failed[0].1.contains("hangs"), "{report}");
    assert!(begin.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_panic_is_a_failure_of_its_file() {
    let report = run_faulty(InjectedDefect::Panics, &["eval/broadcast.tir"]);
    assert!(report.failed.len() == 1 && report.failed[0].1.contains("panicked: on purpose"), "{report}");
}

#[test]
fn a_file_that_a_backend_rejects_is_counted_as_skipped() {
    let report = run_faulty(InjectedDefect::Refuses, TWO_FILES);
    assert!(report.skipped.len() == 2 && report.executed_share() == 0.0, "{report}");
    assert!(report.to_string().contains("2 skipped") && report.skipped[0].1.contains("T0801"), "{report}");
}
