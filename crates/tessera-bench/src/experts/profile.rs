//! The profile under which the cost model prices the experts of a CPU rank, from measured times.

use anyhow::{Context, ensure};
use tessera_cost::moe::ExpertLoad;
use tessera_cost::profile::{GemmCurve, GroupedGemmCurve};
use tessera_cost::{MachineModel, Profile};
use tessera_mesh::{Figure, Precision, catalog};

use super::ranks::RankWork;
use crate::stats::round_to_millis;

/// The time of a rank's two grouped matmuls: a fixed part, which also clears empty slots, a part for each row, and one
/// for each expert with rows, whose weights are read.
#[derive(Debug)]
pub struct ExpertProfile {
    start_ns: f64,
    row_ns: f64,
    expert_ns: f64,
    /// Mean distance of the fitted times from the measured ones, as a share.
    mean_error: f64,
    points: usize,
    machine: MachineModel,
    width: f64,
    inner: f64,
}

impl ExpertProfile {
    /// Fits the three parts by least squares of relative errors.
    pub fn fit(points: &[RankWork], width: usize, inner: usize) -> anyhow::Result<ExpertProfile> {
        let rows: Vec<[f64; 3]> =
            points.iter().map(|w| [1.0 / w.ns, w.rows / w.ns, w.experts / w.ns]).collect();
        let [start_ns, row_ns, expert_ns] =
            solve_for_ones(&rows).context("the batches do not determine the profile")?;
        ensure!(
            start_ns >= 0.0 && row_ns > 0.0 && expert_ns >= 0.0,
            "the fitted parts are {start_ns:.0} ns, {row_ns:.0} ns a row and {expert_ns:.0} ns an expert: times were too noisy"
        );
        let error = |r: &[f64; 3]| (start_ns * r[0] + row_ns * r[1] + expert_ns * r[2] - 1.0).abs();
        let (width, inner) = (width as f64, inner as f64);
        Ok(ExpertProfile {
            start_ns,
            row_ns,
            expert_ns,
            mean_error: rows.iter().map(error).sum::<f64>() / rows.len() as f64,
            points: points.len(),
            machine: build_machine([start_ns, row_ns, expert_ns], width * inner)?,
            width,
            inner,
        })
    }

    /// Returns what the cost model estimates for the slowest rank of a load.
    pub fn estimate_ns(&self, load: &ExpertLoad) -> f64 {
        let (rows, groups) = (load.slowest_rows(), load.active_experts.max(1.0));
        let pass = |n, k| self.machine.grouped_gemm_ns(groups, rows / groups, n, k, Precision::F32);
        pass(self.inner, self.width) + pass(self.width, self.inner)
    }

    pub fn describe(&self) -> String {
        format!(
            "{:.3} ms, {:.1} µs a row, {:.1} µs an expert, mean error {:.1} % of {} times",
            self.start_ns / 1e6,
            self.row_ns / 1e3,
            self.expert_ns / 1e3,
            self.mean_error * 100.0,
            self.points
        )
    }

    pub fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "start_ms": round_to_millis(self.start_ns / 1e6),
            "row_us": round_to_millis(self.row_ns / 1e3),
            "expert_us": round_to_millis(self.expert_ns / 1e3),
            "mean_error": round_to_millis(self.mean_error),
            "points": self.points,
        })
    }
}

/// Returns a machine on which two grouped matmuls of so many multiplications per row take these parts: `rows_half`
/// prices what an expert takes beside its rows. Reading weights is part of that, so the memory limits nothing else.
fn build_machine(
    [start_ns, row_ns, expert_ns]: [f64; 3],
    multiplications: f64,
) -> anyhow::Result<MachineModel> {
    let figure = |value: f64| Figure { value, source: "fitted to the times of this run".to_string() };
    let mut cluster = catalog::get("laptop").context("no cluster laptop")?;
    let mut profile = Profile::builtin("tessera").context("no profile tessera")?;
    cluster.device.flops_per_s[Precision::F32 as usize] = Some(figure(4.0 * multiplications / row_ns * 1e9));
    cluster.device.memory_bytes_per_s = figure(f64::INFINITY);
    for gemm in &mut profile.base.gemms {
        *gemm = GemmCurve {
            max_efficiency: 1.0,
            share: 1.0,
            m_half: 0.0,
            n_half: 0.0,
            k_half: 0.0,
            ..gemm.clone()
        };
    }
    profile.base.grouped_gemm = GroupedGemmCurve {
        share: 1.0,
        rows_half: expert_ns / row_ns,
        memory_share: 1.0,
        start_ns: start_ns / 2.0,
        source: "fitted to the times of this run".to_string(),
    };
    Ok(MachineModel::new(cluster, profile))
}

/// Returns the factors with which the columns of `rows` come nearest to 1 in every row, by Cramer's rule on the normal
/// equations; `None` if the columns depend on one another.
fn solve_for_ones(rows: &[[f64; 3]]) -> Option<[f64; 3]> {
    let dot = |i: usize, j: usize| rows.iter().map(|r| r[i] * r[j]).sum::<f64>();
    let matrix: [[f64; 3]; 3] = std::array::from_fn(|i| std::array::from_fn(|j| dot(i, j)));
    let right: [f64; 3] = std::array::from_fn(|i| rows.iter().map(|r| r[i]).sum());
    let determinant = |m: [[f64; 3]; 3]| -> f64 {
        (0..3)
            .map(|i| {
                m[0][i] * (m[1][(i + 1) % 3] * m[2][(i + 2) % 3] - m[1][(i + 2) % 3] * m[2][(i + 1) % 3])
            })
            .sum()
    };
    let whole = determinant(matrix);
    let scale: f64 = (0..3).map(|i| matrix[i][i]).product();
    if whole.abs() <= 1e-9 * scale {
        return None;
    }
    Some(std::array::from_fn(|column| {
        let mut replaced = matrix;
        for (row, x) in replaced.iter_mut().zip(right) {
            row[column] = x;
        }
        determinant(replaced) / whole
    }))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_cost::moe::{Routing, expert_load};

    use super::*;

    // The cost model has to give back the line from which its profile was made.
    #[test]
    fn the_cost_model_estimates_the_times_to_which_its_profile_was_fitted() {
        let time = |rows: f64, experts: f64| 40_000.0 + 1_250.0 * rows + 9_000.0 * experts;
        let points: Vec<RankWork> = [(64.0, 16.0), (128.0, 16.0), (128.0, 4.0), (37.0, 8.0), (250.0, 9.0)]
            .into_iter()
            .map(|(rows, experts)| RankWork { rows, experts, ns: time(rows, experts) })
            .collect();
        let profile = ExpertProfile::fit(&points, 96, 33).unwrap();
        assert!(profile.mean_error < 1e-9, "{profile:?}");
        for number in 0..8 {
            let load = expert_load(64, 2, 4, 256.0, Routing::Workload(number), 0);
            let expected = time(load.slowest_rows(), load.active_experts.max(1.0));
            assert!((profile.estimate_ns(&load) / expected - 1.0).abs() < 1e-9, "w{number}");
        }
        let equal = [RankWork { rows: 64.0, experts: 16.0, ns: 1e6 }; 4];
        assert!(ExpertProfile::fit(&equal, 96, 33).is_err(), "one kind of batch determines no profile");
    }
}
