//! One suite for every backend: what the reference evaluator says an op means, a backend must compute.
//!
//! Each `// test: eval` file runs with one backend per rank, each on a thread of its own, and every rank's outputs
//! are compared with the reference's. A file that must end in a fault must end on the backend too, and soon. A
//! backend gives every value a slot of its own here: sharing memory is the planner's art, not an op's meaning.

mod drive;
mod judge;

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use tessera_device::{Backend, Seat};
use tessera_ir::{Dialect, Program, parse_all};
use tessera_mesh::Mesh;

use crate::header::{Header, Kind};

/// Makes one rank's backend, on the thread that will use it.
pub type Maker<B> = Box<dyn FnOnce(Seat) -> Result<B, String> + Send>;

/// Sets up what the ranks of a file share and gives a [`Maker`] for each, in rank order. It sees the mesh and, for
/// each rank, the programs that will be loaded in order.
pub type Open<'a, B> = &'a dyn Fn(&Mesh, &[Vec<Arc<Program>>]) -> Result<Vec<Maker<B>>, String>;

/// A backend under test.
pub struct Subject<'a, B> {
    /// Name, as it stands in the report.
    pub name: &'a str,
    /// Makes the backends of a file.
    pub open: Open<'a, B>,
    /// How exact it claims to be.
    pub tolerance: Tolerance,
    /// Longest wait for a peer in one collective that its backends were made with. A file that takes five times
    /// as long, and five seconds more, counts as hanging.
    pub patience: Duration,
    /// Whether a collective compares what its members call, so that a rank fails where they disagree. Where it does not, as in
    /// NCCL, a stall will do.
    pub compares: bool,
}

/// How far a number may be from the exact one.
///
/// The bound of an output is `relative · √n · scale`. `scale` is the largest magnitude of the output's exact
/// elements over all ranks; n counts the roundings that can add up in it: one for each arithmetic op of the
/// program, and the terms of its longest dot product, mean or sum over ranks. Roundings are independent enough to
/// grow with √n. A program that only moves elements has n = 0: every bit must be right.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Tolerance {
    /// Error of one rounding relative to the value's scale; a few units in the last place.
    pub relative: f64,
}

/// What came out.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Report {
    /// The backend.
    pub backend: String,
    /// Files that ran and agreed, faults that came as they should included.
    pub passed: Vec<String>,
    /// Files that the backend refused, or that say nothing about a backend, with the reason.
    pub skipped: Vec<(String, String)>,
    /// Files that went wrong, and how.
    pub failed: Vec<(String, String)>,
    /// Largest error seen in units of its bound; 1 is the limit.
    pub worst: f64,
}

impl Report {
    /// Part of the files that ran, 0 to 1.
    #[must_use]
    pub fn share_run(&self) -> f64 {
        let ran = self.passed.len() + self.failed.len();
        ran as f64 / (ran + self.skipped.len()).max(1) as f64
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Report { backend, passed, skipped, failed, worst } = self;
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

/// Runs every evaluation among `files` (name and text) on a backend; other files are passed over.
#[must_use]
pub fn conformance<B: Backend + 'static>(subject: &Subject<'_, B>, files: &[(String, String)]) -> Report {
    let mut report = Report { backend: subject.name.to_string(), ..Report::default() };
    for (name, text) in files {
        let Some(outcome) = file(subject, name, text) else { continue };
        match outcome {
            Ok(worst) => {
                report.worst = report.worst.max(worst);
                report.passed.push(name.clone());
            }
            Err(Unfit::Skipped(why)) => report.skipped.push((name.clone(), why)),
            Err(Unfit::Wrong(why)) => report.failed.push((name.clone(), why)),
        }
    }
    report
}

/// Why a file did not pass.
enum Unfit {
    Skipped(String),
    Wrong(String),
}

/// `None` for a file that is no evaluation; otherwise the largest error in units of its bound.
fn file<B: Backend + 'static>(
    subject: &Subject<'_, B>,
    name: &str,
    text: &str,
) -> Option<Result<f64, Unfit>> {
    let header = match Header::read(text) {
        Ok(h) => h,
        Err(why) => return Some(Err(Unfit::Wrong(why.join("; ")))),
    };
    if header.kind != Kind::Eval {
        return None;
    }
    let programs = match parse_all(text, name) {
        Ok(p) => p,
        Err(ds) => return Some(Err(Unfit::Wrong(ds[0].message.clone()))),
    };
    let (logical, of_roles): (Vec<&Program>, Vec<&Program>) =
        programs.iter().partition(|p| p.dialect == Dialect::Logical);
    let mut worst = 0.0f64;
    for part in [logical, of_roles] {
        match judge::part(subject, &header, &part) {
            Ok(w) => worst = worst.max(w),
            Err(unfit) => return Some(Err(unfit)),
        }
    }
    Some(Ok(worst))
}
