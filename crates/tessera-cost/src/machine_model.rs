//! Cost of single ops and transfers on a cluster with a given executor.

use tessera_mesh::{Cluster, LinkClass, MemoryTier, Precision};

use crate::profile::{Curves, Profile};

/// A cluster and the executor that runs on it. All times are device times without launch overhead.
#[derive(Debug, Clone, PartialEq)]
pub struct MachineModel {
    /// Devices and links with their peak rates, of which the curves are shares.
    pub cluster: Cluster,
    /// The executor's profile. [`MachineModel::new`] resolves its curves: to change a curve, change
    /// the profile and build a new model.
    pub profile: Profile,
    curves: Curves,
}

/// Sizes of one attention op, which computes the scores, the softmax and the weighted sum of the
/// values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionWork {
    /// Queries of one sequence; with `causal` they are the last positions of its keys.
    pub queries: f64,
    /// Keys that the queries of one sequence may attend to, cached ones included.
    pub keys: f64,
    /// Query heads times sequences.
    pub heads: f64,
    /// KV heads times sequences.
    pub kv_heads: f64,
    /// Width of a query or key head, in elements.
    pub qk: f64,
    /// Width of a value head, in elements.
    pub v: f64,
    /// Whether a causal mask hides later keys.
    pub causal: bool,
    /// Precision of the matmuls, queries and results.
    pub precision: Precision,
    /// Bytes in memory of one key with its value, per KV head.
    pub key_bytes: f64,
}

impl AttentionWork {
    /// Returns the number of unmasked pairs of a query and a key, per head.
    #[must_use]
    pub fn unmasked_pairs(&self) -> f64 {
        let hidden = if self.causal {
            let within = self.queries.min(self.keys);
            within * (within - 1.0).max(0.0) / 2.0
        } else {
            0.0
        };
        self.queries * self.keys - hidden
    }

    /// Returns the floating-point operations; a multiply-add counts two.
    #[must_use]
    pub fn flops(&self) -> f64 {
        2.0 * self.unmasked_pairs() * self.heads * (self.qk + self.v)
    }

    /// Returns the bytes read and written, with keys and values read once.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        let queries = self.heads * self.queries * (self.qk + self.v) * self.precision.element_bytes();
        queries + self.kv_heads * self.keys * self.key_bytes
    }
}

impl MachineModel {
    /// Creates the model of a cluster under a profile, with the profile's curves for the cluster's
    /// devices.
    #[must_use]
    pub fn new(cluster: Cluster, profile: Profile) -> MachineModel {
        let curves = profile.curves_for(&cluster.device.family).clone();
        MachineModel { cluster, profile, curves }
    }

    /// Returns the executor's curves on the cluster's device family.
    #[must_use]
    pub fn device_curves(&self) -> &Curves {
        &self.curves
    }

    /// Returns the precision in which GEMMs of precision `p` are computed: the next wider precision
    /// that the device has units for.
    #[must_use]
    pub fn compute_precision(&self, p: Precision) -> Precision {
        let wider = Precision::ALL[..=p as usize].iter().rev().copied();
        let narrower = Precision::ALL[p as usize..].iter().copied();
        wider.chain(narrower).find(|q| self.cluster.flops_per_s(*q).is_some()).unwrap_or(p)
    }

    /// Returns the dense peak in operations per second of the precision in which GEMMs of precision
    /// `p` are computed.
    #[must_use]
    pub fn flops_per_s(&self, p: Precision) -> f64 {
        self.cluster.flops_per_s(self.compute_precision(p)).unwrap_or(1.0)
    }

    /// Returns the time of a GEMM of `m` rows, `n` columns and inner dim `k`.
    #[must_use]
    pub fn gemm_ns(&self, m: f64, n: f64, k: f64, p: Precision) -> f64 {
        let bytes = (m * k + n * k) * p.element_bytes()
            + m * n * p.element_bytes().max(Precision::Bf16.element_bytes());
        self.multiply_ns([m, n, k], bytes, p)
    }

    /// Returns the time of a convolution that is computed as an implicit GEMM: `m` cells, `n` output channels
    /// and `k` values of a cell's neighbourhood. Unlike a GEMM it reads its operands, of `bytes` with the
    /// result, about once, because neighbourhoods overlap.
    #[must_use]
    pub fn convolution_ns(&self, m: f64, n: f64, k: f64, bytes: f64, p: Precision) -> f64 {
        self.multiply_ns([m, n, k], bytes, p)
    }

    fn multiply_ns(&self, [m, n, k]: [f64; 3], bytes: f64, p: Precision) -> f64 {
        if m * n * k <= 0.0 {
            return 0.0;
        }
        let q = self.compute_precision(p);
        let curve = self.curves.gemm_curve(q);
        let flops_ns = 2.0 * m * n * k / (self.peak_flops_per_ns(q) * curve.efficiency(m, n, k));
        curve.start_ns + flops_ns.max(self.bandwidth_ns(bytes))
    }

    /// Returns the time of a grouped GEMM: `groups` GEMMs of `rows` rows each, one per expert.
    #[must_use]
    pub fn grouped_gemm_ns(&self, groups: f64, rows: f64, n: f64, k: f64, p: Precision) -> f64 {
        if groups * rows * n * k <= 0.0 {
            return 0.0;
        }
        let q = self.compute_precision(p);
        let (curve, experts) = (self.curves.gemm_curve(q), &self.curves.grouped_gemm);
        // Groups run side by side and fill the device as one wide GEMM would, but each group has
        // few rows.
        let filled = curve.efficiency(f64::INFINITY, groups * n, k);
        let share = filled * experts.share * rows / (rows + experts.rows_half);
        let flops_ns = 2.0 * groups * rows * n * k / (self.peak_flops_per_ns(q) * share);
        let bytes = groups * (rows * k + n * k) * p.element_bytes()
            + groups * rows * n * p.element_bytes().max(Precision::Bf16.element_bytes());
        experts.start_ns + flops_ns.max(self.bandwidth_ns(bytes) / experts.memory_share)
    }

    /// Returns the time of one fused attention kernel.
    #[must_use]
    pub fn attention_ns(&self, a: &AttentionWork) -> f64 {
        if a.flops() <= 0.0 {
            return 0.0;
        }
        let curve = &self.curves.attention;
        let queries = a.queries * a.heads;
        let share =
            curve.share * queries / (queries + curve.queries_half) * a.keys / (a.keys + curve.keys_half);
        let flops_ns = a.flops() / (self.peak_flops_per_ns(self.compute_precision(a.precision)) * share);
        let bytes_ns = self.bandwidth_share_ns(a.bytes(), curve.memory_share);
        curve.start_ns + flops_ns.max(bytes_ns)
    }

    /// Returns the time of one memory-bound kernel that reads and writes `bytes` in total.
    #[must_use]
    pub fn memory_bound_ns(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 0.0;
        }
        self.curves.memory.start_ns + self.bandwidth_ns(bytes)
    }

    /// Returns the host time to launch one kernel; 0 with CUDA graphs.
    #[must_use]
    pub fn launch_ns(&self) -> f64 {
        if self.curves.host.captured { 0.0 } else { self.curves.host.launch_ns }
    }

    /// Returns the time to fetch `bytes` from a tier into device memory while the neighbouring
    /// devices do the same.
    #[must_use]
    pub fn tier_fetch_ns(&self, tier: MemoryTier, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 0.0;
        }
        let late = match tier {
            MemoryTier::Hbm => return self.memory_bound_ns(bytes),
            MemoryTier::Peer => LinkClass::Domain,
            MemoryTier::Host => LinkClass::Host,
        };
        self.cluster.link_spec(late).latency_ns.value + bytes / (self.cluster.tier_bytes_per_s(tier) / 1e9)
    }

    /// Returns the slowdown of compute while a transfer is in flight; at least 1.
    #[must_use]
    pub fn contention_factor(&self) -> f64 {
        self.curves.host.contention
    }

    /// Returns the bytes of device memory that the executor and its libraries reserve.
    #[must_use]
    pub fn reserved_bytes(&self) -> f64 {
        self.curves.memory.reserved_bytes
    }

    /// Returns the peak in operations per nanosecond.
    fn peak_flops_per_ns(&self, p: Precision) -> f64 {
        self.flops_per_s(p) / 1e9
    }

    /// Returns the time to move `bytes` through memory, without the kernel's start.
    fn bandwidth_ns(&self, bytes: f64) -> f64 {
        self.bandwidth_share_ns(bytes, self.curves.memory.share)
    }

    /// Returns the time to move `bytes` at a share of the bandwidth; bytes that caches hold move
    /// faster.
    fn bandwidth_share_ns(&self, bytes: f64, share: f64) -> f64 {
        let m = &self.curves.memory;
        let near = bytes.min(m.cached_bytes);
        (near / m.cached_speedup + (bytes - near))
            / (self.cluster.device.memory_bytes_per_s.value / 1e9 * share)
    }
}
