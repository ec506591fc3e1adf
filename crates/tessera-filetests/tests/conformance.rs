//! The CPU backend under the suite, and the suite under backends that are wrong.

#![allow(clippy::unwrap_used)]

mod common;

use std::sync::Arc;
use std::time::{Duration, Instant};

use common::{cpu, open, texts};
use tessera_base::Diagnostic;
use tessera_cpu::Cpu;
use tessera_device::{
    Abort, Audited, Backend, CallData, Fault, Fingerprint, Loaded, Observer, T0801, WeightSource,
};
use tessera_filetests::{Maker, Report, Subject, Tolerance, conformance};
use tessera_ir::{Program, Slots};
use tessera_mesh::Mesh;

#[test]
fn the_cpu_backend_means_what_the_reference_means() {
    let report = conformance(&cpu("cpu"), &texts());
    println!("{report}");
    assert!(report.failed.is_empty(), "{report}");
    assert!(report.share_run() >= 0.8, "too much is skipped\n{report}");
    for fault in ["mismatch", "deadlock", "cache_write_past_the_end", "wrong_written_shape"] {
        let file = format!("eval/{fault}.tir");
        assert!(report.passed.contains(&file), "{file} must end in its fault\n{report}");
    }
    for group in ["all_reduce_max", "blocks", "both_send_first", "world_all_reduce", "world_leader"] {
        let file = format!("eval/{group}.tir");
        assert!(report.passed.contains(&file), "{file} must run\n{report}");
    }
}

/// A CPU backend with something wrong about it.
struct Bent {
    inner: Cpu,
    how: How,
    output: Vec<f32>,
}

#[derive(Clone, Copy, PartialEq)]
enum How {
    /// The last element of every output is off by ten roundings' worth.
    OffALittle,
    /// It says that it ran.
    Silent,
    /// It says that a peer did not come.
    Stalls,
    /// It runs and never comes back.
    Hangs,
    /// It refuses everything.
    Refuses,
    /// It panics.
    Panics,
}

impl Backend for Bent {
    fn load(
        &mut self,
        program: &Arc<Program>,
        slots: &Slots,
        weights: &mut dyn WeightSource,
    ) -> Result<Loaded, Diagnostic> {
        if self.how == How::Refuses {
            return Err(Diagnostic::error(&T0801, "nothing runs here"));
        }
        self.inner.load(program, slots, weights)
    }

    fn run(
        &mut self,
        program: Loaded,
        call: &CallData<'_>,
        observer: &mut dyn Observer,
    ) -> Result<(), Fault> {
        match self.how {
            How::Hangs => std::thread::sleep(Duration::from_secs(60)),
            How::Silent => return Ok(()),
            How::Stalls => return Err(Fault::Stalled("nobody came".to_string())),
            How::Panics => panic!("on purpose"),
            _ => {}
        }
        self.inner.run(program, call, observer)?;
        self.output = self.inner.output("y").map(<[f32]>::to_vec).unwrap_or_default();
        if let Some(last) = self.output.last_mut() {
            *last *= 1.0 + 1e-4;
        }
        Ok(())
    }

    fn fingerprints(&self) -> Vec<Fingerprint> {
        self.inner.fingerprints()
    }

    fn audit(&mut self, bytes: u64) -> Audited {
        self.inner.audit(bytes)
    }

    fn reload(&mut self, weights: &mut dyn WeightSource) -> Result<(), Diagnostic> {
        self.inner.reload(weights)
    }

    fn write_weight(&mut self, name: &str, index: u64, value: f32) -> bool {
        self.inner.write_weight(name, index, value)
    }

    fn fingerprint_buffer(&self, name: &str, slice: &str) -> Option<Fingerprint> {
        self.inner.fingerprint_buffer(name, slice)
    }

    fn output(&self, name: &str) -> Option<&[f32]> {
        let bent = self.how == How::OffALittle && name == "y";
        if bent { Some(&self.output) } else { self.inner.output(name) }
    }

    fn read_buffer(&self, name: &str) -> Option<Vec<f32>> {
        self.inner.read_buffer(name)
    }

    fn write_buffer(&mut self, name: &str, data: &[f32]) -> bool {
        self.inner.write_buffer(name, data)
    }

    fn reset(&mut self) {
        self.inner.reset();
    }

    fn memory(&self) -> [u64; 3] {
        self.inner.memory()
    }

    fn compensated(&self) -> u64 {
        self.inner.compensated()
    }

    fn abort(&self) -> Abort {
        self.inner.abort()
    }
}

fn bent(how: How, wanted: &[&str]) -> Report {
    bent_where(how, true, wanted)
}

fn bent_where(how: How, compares: bool, wanted: &[&str]) -> Report {
    let open = move |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| {
        let bend = |make: Maker<Cpu>| -> Maker<Bent> {
            Box::new(move |seat| Ok(Bent { inner: make(seat)?, how, output: Vec::new() }))
        };
        Ok(open(mesh, programs)?.into_iter().map(bend).collect())
    };
    let subject = Subject {
        name: "bent",
        open: &open,
        tolerance: Tolerance { relative: 5e-7 },
        patience: Duration::from_millis(100),
        compares,
    };
    let files: Vec<_> = texts().into_iter().filter(|(n, _)| wanted.contains(&n.as_str())).collect();
    assert_eq!(files.len(), wanted.len());
    conformance(&subject, &files)
}

const TWO: &[&str] = &["eval/attention_ulysses.tir", "eval/column_row_linear.tir"];

#[test]
fn a_backend_that_is_off_a_little_is_found() {
    let report = bent(How::OffALittle, TWO);
    assert_eq!(report.failed.len(), 2, "{report}");
    assert!(report.failed[0].1.contains("is off by"), "{report}");
}

#[test]
fn a_backend_that_computes_nothing_is_found() {
    let report = bent(How::Silent, TWO);
    assert!(report.failed.len() == 2 && report.failed[0].1.contains("puts out no"), "{report}");
    // Nor does it end in the faults that must come.
    let report = bent(How::Silent, &["eval/deadlock.tir", "eval/mismatch.tir"]);
    assert!(report.failed.len() == 2 && report.failed[0].1.contains("it should end with"), "{report}");
}

#[test]
fn a_stall_is_a_disagreement_where_collectives_do_not_compare() {
    let of = |compares| bent_where(How::Stalls, compares, &["eval/mismatch.tir"]);
    assert_eq!(of(false).passed, ["eval/mismatch.tir"]);
    assert!(of(true).failed[0].1.contains("it should end with: mismatch"));
}

#[test]
fn a_backend_that_hangs_does_not_hang_the_suite() {
    let begin = Instant::now();
    let report = bent(How::Hangs, &["eval/broadcast.tir"]);
    assert!(report.failed.len() == 1 && report.failed[0].1.contains("hangs"), "{report}");
    assert!(begin.elapsed() < Duration::from_secs(20));
}

#[test]
fn a_panic_is_a_failure_of_its_file() {
    let report = bent(How::Panics, &["eval/broadcast.tir"]);
    assert!(report.failed.len() == 1 && report.failed[0].1.contains("panicked: on purpose"), "{report}");
}

#[test]
fn what_a_backend_refuses_is_counted_as_skipped() {
    let report = bent(How::Refuses, TWO);
    assert!(report.skipped.len() == 2 && report.share_run() == 0.0, "{report}");
    assert!(report.to_string().contains("2 skipped") && report.skipped[0].1.contains("T0801"), "{report}");
}
