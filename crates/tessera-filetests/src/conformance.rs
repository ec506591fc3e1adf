//! One conformance suite for all backends: a backend must compute what the reference evaluator
//! defines.
//!
//! Each `// test: eval` file runs with one backend per rank, each on its own thread, and the suite
//! compares every rank's outputs with the reference. A file that must end in a fault must also end
//! in a fault on the backend, within a time limit. Every value gets its own slot here: slot reuse
//! is the planner's task and not part of an op's meaning.

mod rank_runner;
mod verdict;

pub use rank_runner::ReferenceWeights;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tessera_device::{Backend, MeshRank};
use tessera_ir::{Dialect, Program, parse_all};
use tessera_mesh::Mesh;

use crate::header::{Header, TestKind};

/// Creates the backend of one rank, on the thread that will use it.
pub type BackendFactory<B> = Box<dyn FnOnce(MeshRank) -> Result<B, String> + Send>;

/// Sets up the state that the ranks of a file share and returns one [`BackendFactory`] per rank, in
/// rank order. The arguments are the mesh and, for each rank, the programs that it will load, in
/// order.
pub type OpenBackends<'a, B> =
    &'a dyn Fn(&Mesh, &[Vec<Arc<Program>>]) -> Result<Vec<BackendFactory<B>>, String>;

/// How the suite opens a backend, and what it expects of the backend.
pub struct BackendUnderTest<'a, B> {
    /// Name of the backend in the report, such as `cuda`.
    pub name: &'a str,
    /// Creates one backend per rank. Called separately for a file's logical programs and for its
    /// role programs.
    pub open: OpenBackends<'a, B>,
    /// Accuracy that the backend claims.
    pub tolerance: Tolerance,
    /// Maximum wait for a peer in one collective, as configured in the backends. A file that takes
    /// more than five times as long plus five seconds counts as hanging.
    pub peer_timeout: Duration,
    /// Whether collectives compare the calls of their members, so that a rank fails on a mismatch.
    /// The suite accepts a stall instead if they do not, as in NCCL.
    pub detects_mismatch: bool,
}

/// The allowed error of an output.
///
/// The bound is `relative · √n · scale`. `scale` is the largest magnitude of the output's exact
/// elements over all ranks. `n` counts the roundings that can accumulate in the output: one for
/// each arithmetic op of the program, plus the number of terms of its longest dot product, mean or
/// sum over ranks. Roundings are independent enough to grow with √n. A program that only moves
/// elements has n = 0: every bit must be right. In a program with values in bf16, `relative` is at least the distance of
/// two neighbours in bf16, because the reference does not round them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Error of one rounding relative to the value's scale: a few units in the last place.
    pub relative: f64,
}

/// Files that passed, were skipped or failed in a conformance run, with the largest error.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ConformanceReport {
    /// [`BackendUnderTest::name`] of the tested backend.
    pub backend: String,
    /// Files that ran and agreed, including files that ended in the expected fault.
    pub passed: Vec<String>,
    /// Files that the backend rejected or that do not apply to a backend, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Files that failed, with the reason.
    pub failed: Vec<(String, String)>,
    /// Largest error in units of its bound; the limit is 1.
    pub worst_error: f64,
}

impl ConformanceReport {
    /// Returns the share of the files that ran, from 0 to 1.
    #[must_use]
    pub fn executed_share(&self) -> f64 {
        let ran = self.passed.len() + self.failed.len();
        ran as f64 / (ran + self.skipped.len()).max(1) as f64
    }
}

impl fmt::Display for ConformanceReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ConformanceReport { backend, passed, skipped, failed, worst_error: worst } = self;
        writeln!(
            f,
            "{backend}: {} passed, {} failed, {} skipped; worst error {worst:.2} of its bound",
            passed.len(),
            failed.len(),
            skipped.len()
        )?;
        failed.iter().try_for_each(|(file, why)| writeln!(f, "  failed  {file}: {why}"))?;
        skipped.iter().try_for_each(|(file, why)| writeln!(f, "  skipped {file}: {why}"))
    }
}

/// Runs every evaluation among `files` (pairs of name and text) on a backend and ignores the other
/// files.
#[must_use]
pub fn run_conformance<B: Backend + 'static>(
    subject: &BackendUnderTest<'_, B>,
    files: &[(String, String)],
) -> ConformanceReport {
    let mut report = ConformanceReport { backend: subject.name.to_string(), ..ConformanceReport::default() };
    for (name, text) in files {
        let Some(outcome) = run_file(subject, name, text) else { continue };
        match outcome {
            Ok(worst) => {
                report.worst_error = report.worst_error.max(worst);
                report.passed.push(name.clone());
            }
            Err(NotPassed::Skipped(why)) => report.skipped.push((name.clone(), why)),
            Err(NotPassed::Failed(why)) => report.failed.push((name.clone(), why)),
        }
    }
    report
}

/// The reason why a file did not pass.
enum NotPassed {
    Skipped(String),
    Failed(String),
}

/// Runs one file and returns the largest error in units of its bound, or `None` if the file is not
/// an evaluation.
fn run_file<B: Backend + 'static>(
    subject: &BackendUnderTest<'_, B>,
    name: &str,
    text: &str,
) -> Option<Result<f64, NotPassed>> {
    let header = match Header::read(text) {
        Ok(h) => h,
        Err(why) => return Some(Err(NotPassed::Failed(why.join("; ")))),
    };
    if header.kind != TestKind::Eval {
        return None;
    }
    let programs = match parse_all(text, name) {
        Ok(p) => p,
        Err(ds) => return Some(Err(NotPassed::Failed(ds[0].message.clone()))),
    };
    let (logical, role_programs): (Vec<&Program>, Vec<&Program>) =
        programs.iter().partition(|p| p.dialect == Dialect::Logical);
    let mut worst_error = 0.0f64;
    for group in [logical, role_programs] {
        match verdict::run_programs(subject, &header, &group) {
            Ok(w) => worst_error = worst_error.max(w),
            Err(unfit) => return Some(Err(unfit)),
        }
    }
    Some(Ok(worst_error))
}
