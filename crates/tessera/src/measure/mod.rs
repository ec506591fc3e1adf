//! Measures the machine at hand, so that it can be planned for: a cluster whose every figure says that it was measured,
//! and a profile of the CPU backend whose curves were fitted to what its kernels and exchanges took.
//!
//! A device of the cluster is a rank's share of the cores. Ranks are threads that work at once, so figures are what one
//! rank gets while its neighbours do the same.

mod curves;
mod fit;
mod host;
mod kernels;
mod lanes;
mod team;

pub use fit::{Fitted, fit};
pub use host::Host;

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tessera_base::{Code, Diagnostic};
use tessera_cost::Profile;
use tessera_cpu::kernels::vector_unit;
use tessera_mesh::Cluster;

use crate::files::{Folder, refuse_existing};
use crate::stream::utc;
use curves::Samples;
use team::Team;

/// Measuring failed.
pub static T0048: Code = Code {
    id: "T0048",
    title: "machine cannot be measured",
    page: "`tessera measure` runs the CPU backend's kernels on threads, and exchanges through the shared memory that ranks \
of a stream use. The operating system refused threads or shared memory, or a member of an exchange did not come in twenty \
seconds: a machine that swaps, or a container whose limits are below what two ranks need. `--ranks` sets how many ranks \
there are.",
};
/// What this build does not measure.
pub static T0049: Code = Code {
    id: "T0049",
    title: "this build measures CPUs alone",
    page: "A GPU was asked for or seen, and this build has no backend that runs on one, so nothing of it can be measured: \
its figures would be guesses that look like measurements. Plan for GPUs with an entry of the catalog, as in `tessera plan \
--cluster hgx-h200`; its figures say where they come from. `tessera measure` without --device measures the processor.",
};
/// More ranks than can be.
pub static T0050: Code = Code {
    id: "T0050",
    title: "number of ranks cannot be measured",
    page: "Each rank is a thread that works all the time while it is measured, so there can be no more ranks than cores, and \
there is at least one. An entry holds for its number of ranks: each has its share of the cores, as it has when `tessera \
stream` runs a mesh of so many ranks.",
};

/// What to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Asked {
    /// Ranks; one per core where none is given.
    pub ranks: Option<usize>,
    /// Fewer sizes and less time for each.
    pub quick: bool,
}

/// One curve and how well it fits.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// What of.
    pub what: &'static str,
    /// Points that were measured.
    pub points: usize,
    /// Mean of |curve / measured − 1|.
    pub mean: f64,
    /// Largest of them.
    pub worst: f64,
}

/// A machine, measured.
#[derive(Debug, Clone, PartialEq)]
pub struct Measured {
    /// The machine as a cluster.
    pub cluster: Cluster,
    /// The CPU backend on it.
    pub profile: Profile,
    /// Curves and how well they fit.
    pub fits: Vec<Fit>,
    /// Figures to show: name, number with its unit.
    pub figures: Vec<(&'static str, String)>,
    /// What could not be measured here, and what stands in its place.
    pub open: Vec<String>,
}

/// Steps that [`measure`] tells of.
pub const STEPS: [&str; 6] = ["memory", "products", "attention", "passes", "exchanges", "waking"];

/// Measures. `on` is told of each step of [`STEPS`] before it begins.
///
/// # Errors
/// T0048, T0050.
pub fn measure(asked: Asked, on: &mut dyn FnMut(&'static str)) -> Result<Measured, Diagnostic> {
    let host = Host::look();
    let ranks = asked.ranks.unwrap_or(host.cores);
    if ranks == 0 || ranks > host.cores {
        return Err(Diagnostic::error(&T0050, format!("{ranks} ranks on {} cores", host.cores))
            .at(host.cpu, format!("{} cores", host.cores))
            .hint(format!("--ranks 1 to {}", host.cores)));
    }
    let budget = Duration::from_millis(if asked.quick { 12 } else { 60 });
    let team = Team { ranks, threads: (host.cores / ranks).max(1), budget };
    let (own_bytes, load) = (host::resident_bytes(), host::load());
    on(STEPS[0]);
    let memory = kernels::memory(&team)?;
    on(STEPS[1]);
    let products = kernels::products(&team, asked.quick)?;
    on(STEPS[2]);
    let attentions = kernels::attentions(&team, asked.quick)?;
    let one_query = kernels::one_query(&team)?;
    on(STEPS[3]);
    let plain = kernels::plain_passes(&team, asked.quick)?;
    let working = kernels::working_passes(&team, asked.quick)?;
    let op_ns = kernels::op_by_itself(budget)?;
    on(STEPS[4]);
    let meetings = lanes::meetings(&team, asked.quick)?;
    let hidden = lanes::hidden(&team)?;
    on(STEPS[5]);
    let wake_ns = lanes::wake(asked.quick)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let samples = Samples {
        ranks,
        threads: team.threads,
        date: utc(now).split('T').next().unwrap_or_default().to_string(),
        vector_unit: vector_unit(),
        host,
        own_bytes,
        load,
        memory,
        products,
        attentions,
        one_query,
        plain,
        working,
        op_ns,
        meetings,
        hidden,
        wake_ns,
    };
    Ok(samples.measured())
}

/// Refuses a folder that is there already, before any time is spent.
///
/// # Errors
/// T0013.
pub fn free(dir: &Path) -> Result<(), Diagnostic> {
    refuse_existing(dir)
}

impl Measured {
    /// Writes `cluster.toml` and `profile.toml`. The folder appears whole or not at all.
    ///
    /// # Errors
    /// When the folder exists or cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = Folder::create(dir)?;
        folder.write("cluster.toml", self.cluster.text().as_bytes())?;
        folder.write("profile.toml", self.profile.text().as_bytes())?;
        folder.finish()
    }
}
