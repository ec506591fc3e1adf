//! Measures this machine so that plans can be made for it: creates a cluster whose every figure is
//! marked as measured, and a profile of the CPU backend with curves fitted to the measured times of
//! its kernels and collectives.
//!
//! A device of the cluster is a rank's share of the cores. Ranks are threads that run concurrently,
//! so a figure is the performance of one rank while its neighbours do the same work.

mod collectives;
mod curves;
mod fit;
mod host;
mod kernels;
mod rank_threads;

pub use fit::{Fitted, fit_curve};
pub use host::Host;

use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use tessera::clock::format_utc;
use tessera::files::StagedFolder;
use tessera::system;
use tessera_base::Diagnostic;
use tessera_cost::Profile;
use tessera_cpu::kernels::vector_unit;
use tessera_mesh::Cluster;

use crate::codes::T0050;
use curves::Samples;
use rank_threads::RankThreads;

/// Options of [`measure_machine`]; the default is a full measurement with one rank per core.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct MeasureOptions {
    /// Number of ranks; by default one per core.
    pub ranks: Option<usize>,
    /// Measures fewer sizes, and each for less time.
    pub quick: bool,
}

/// A curve and the quality of its fit.
#[derive(Debug, Clone, PartialEq)]
pub struct Fit {
    /// Kernels or collective that the curve describes, such as `matmuls`.
    pub curve_name: &'static str,
    /// Number of measured values to which the curve was fitted.
    pub point_count: usize,
    /// Mean of |curve / measured − 1|.
    pub mean_error: f64,
    /// Maximum of |curve / measured − 1|.
    pub max_error: f64,
}

/// The measured cluster and CPU profile of a machine, with the quality of the fitted curves.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredMachine {
    /// The machine as a cluster, in which each device is one rank's share of the cores.
    pub cluster: Cluster,
    /// The executor profile of the CPU backend on this machine.
    pub profile: Profile,
    /// Curves and the quality of their fits.
    pub fits: Vec<Fit>,
    /// Figures to show: name, number with its unit.
    pub figures: Vec<(&'static str, String)>,
    /// Quantities that could not be measured here, with the values assumed instead.
    pub not_measured: Vec<String>,
}

/// Names of the steps that [`measure_machine`] reports.
pub const STEP_NAMES: [&str; 6] =
    ["memory", "matmuls", "attention", "elementwise kernels", "collectives", "wake-up"];

/// Measures this machine. Calls `on_step` with the name of each step before the step begins.
///
/// # Errors
/// T0048, T0050.
pub fn measure_machine(
    asked: MeasureOptions,
    on_step: &mut dyn FnMut(&'static str),
) -> Result<MeasuredMachine, Diagnostic> {
    let host = Host::detect_host();
    let ranks = asked.ranks.unwrap_or(host.cores);
    if ranks == 0 || ranks > host.cores {
        return Err(Diagnostic::error(&T0050, format!("{ranks} ranks on {} cores", host.cores))
            .with_label(host.cpu, format!("{} cores", host.cores))
            .with_hint(format!("--ranks 1 to {}", host.cores)));
    }
    let budget = Duration::from_millis(if asked.quick { 12 } else { 60 });
    let team = RankThreads { ranks, threads: (host.cores / ranks).max(1), budget };
    let (own_bytes, load) = (system::resident_bytes(), system::load_average());
    on_step(STEP_NAMES[0]);
    let memory = kernels::time_memory(&team)?;
    on_step(STEP_NAMES[1]);
    let matmuls = kernels::time_matmuls(&team, asked.quick)?;
    on_step(STEP_NAMES[2]);
    let attentions = kernels::time_attentions(&team, asked.quick)?;
    let one_query = kernels::time_single_query(&team)?;
    on_step(STEP_NAMES[3]);
    let plain = kernels::time_adds(&team, asked.quick)?;
    let working = kernels::time_compute_kernels(&team, asked.quick)?;
    let op_ns = kernels::op_overhead(budget)?;
    on_step(STEP_NAMES[4]);
    let meetings = collectives::time_collectives(&team, asked.quick)?;
    let hidden = collectives::overlap_share(&team)?;
    on_step(STEP_NAMES[5]);
    let wake_ns = collectives::wake_latency(asked.quick)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
    let samples = Samples {
        ranks,
        threads: team.threads,
        date: format_utc(now).split('T').next().unwrap_or_default().to_string(),
        vector_unit: vector_unit(),
        host,
        resident_bytes: own_bytes,
        load_average: load,
        memory,
        matmuls,
        attentions,
        single_query: one_query,
        adds: plain,
        compute_kernels: working,
        op_overhead_ns: op_ns,
        collectives: meetings,
        overlap_share: hidden,
        wake_ns,
    };
    Ok(samples.fit_machine())
}

impl MeasuredMachine {
    /// Writes `cluster.toml` and `profile.toml`. The folder is created atomically.
    ///
    /// # Errors
    /// Fails if the folder exists or cannot be written.
    pub fn write(&self, dir: &Path) -> Result<(), Diagnostic> {
        let mut folder = StagedFolder::create(dir)?;
        folder.write("cluster.toml", self.cluster.to_toml().as_bytes())?;
        folder.write("profile.toml", self.profile.to_toml().as_bytes())?;
        folder.commit()
    }
}
