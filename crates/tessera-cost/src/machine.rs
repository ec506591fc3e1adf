//! A cluster under an executor: what single ops and transfers take on it.

use tessera_mesh::{Cluster, LinkClass, Precision, Tier};

use crate::links::{Algorithm, CollectiveOp, Fabric, Span, Transfer};
use crate::profile::{Curves, Profile};

/// A cluster and the executor that runs on it. All times are of the device, without launches.
#[derive(Debug, Clone, PartialEq)]
pub struct Machine {
    /// Where.
    pub cluster: Cluster,
    /// Who. Its curves are resolved in [`Machine::new`]: to change one, change the profile and make a new machine.
    pub profile: Profile,
    curves: Curves,
}

/// One attention: scores, softmax and values.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionWork {
    /// Queries of one sequence; the last of its keys where `causal`.
    pub queries: f64,
    /// Keys of one sequence.
    pub keys: f64,
    /// Query heads, times sequences.
    pub heads: f64,
    /// Heads of keys and values, times sequences.
    pub kv_heads: f64,
    /// Width of a query head.
    pub qk: f64,
    /// Width of a value head.
    pub v: f64,
    /// Whether a query sees no later key.
    pub causal: bool,
    /// Of products, queries and results.
    pub precision: Precision,
    /// Bytes of one key with its value, as they lie in memory, per head of keys and values.
    pub key_bytes: f64,
}

impl AttentionWork {
    /// Pairs of a query and a key that it sees, per head.
    #[must_use]
    pub fn pairs(&self) -> f64 {
        let hidden = if self.causal {
            let within = self.queries.min(self.keys);
            within * (within - 1.0).max(0.0) / 2.0
        } else {
            0.0
        };
        self.queries * self.keys - hidden
    }

    /// Operations: a multiply-add counts two.
    #[must_use]
    pub fn flops(&self) -> f64 {
        2.0 * self.pairs() * self.heads * (self.qk + self.v)
    }

    /// Bytes read and written, keys and values once.
    #[must_use]
    pub fn bytes(&self) -> f64 {
        let queries = self.heads * self.queries * (self.qk + self.v) * self.precision.bytes();
        queries + self.kv_heads * self.keys * self.key_bytes
    }
}

impl Machine {
    /// A cluster under an executor.
    #[must_use]
    pub fn new(cluster: Cluster, profile: Profile) -> Machine {
        let curves = profile.on(&cluster.device.family).clone();
        Machine { cluster, profile, curves }
    }

    /// The executor's curves on this family of devices.
    #[must_use]
    pub fn curves(&self) -> &Curves {
        &self.curves
    }

    /// What products of a precision are computed at: the next wider one that the device has units for.
    #[must_use]
    pub fn computes(&self, p: Precision) -> Precision {
        let wider = Precision::ALL[..=p as usize].iter().rev().copied();
        let narrower = Precision::ALL[p as usize..].iter().copied();
        wider.chain(narrower).find(|q| self.cluster.flops_per_s(*q).is_some()).unwrap_or(p)
    }

    /// Dense peak of what products of a precision are computed at, per second.
    #[must_use]
    pub fn flops_per_s(&self, p: Precision) -> f64 {
        self.cluster.flops_per_s(self.computes(p)).unwrap_or(1.0)
    }

    /// `m` rows of `k` by `k` columns of `n`.
    #[must_use]
    pub fn matmul_ns(&self, m: f64, n: f64, k: f64, p: Precision) -> f64 {
        if m * n * k <= 0.0 {
            return 0.0;
        }
        let q = self.computes(p);
        let curve = self.curves.product(q);
        let flops_ns = 2.0 * m * n * k / (self.peak(q) * curve.efficiency(m, n, k));
        let bytes = (m * k + n * k) * p.bytes() + m * n * p.bytes().max(Precision::Bf16.bytes());
        curve.start_ns + flops_ns.max(self.stream_ns(bytes))
    }

    /// `groups` products of `rows` rows each, as experts have them.
    #[must_use]
    pub fn grouped_ns(&self, groups: f64, rows: f64, n: f64, k: f64, p: Precision) -> f64 {
        if groups * rows * n * k <= 0.0 {
            return 0.0;
        }
        let q = self.computes(p);
        let (curve, experts) = (self.curves.product(q), &self.curves.experts);
        // Groups run side by side and fill the device as one wide product would; each alone has few rows.
        let filled = curve.efficiency(f64::INFINITY, groups * n, k);
        let share = filled * experts.share * rows / (rows + experts.rows_half);
        let flops_ns = 2.0 * groups * rows * n * k / (self.peak(q) * share);
        let bytes = groups * (rows * k + n * k) * p.bytes()
            + groups * rows * n * p.bytes().max(Precision::Bf16.bytes());
        experts.start_ns + flops_ns.max(self.stream_ns(bytes) / experts.memory_share)
    }

    /// One attention, fused.
    #[must_use]
    pub fn attention_ns(&self, a: &AttentionWork) -> f64 {
        if a.flops() <= 0.0 {
            return 0.0;
        }
        let curve = &self.curves.attention;
        let queries = a.queries * a.heads;
        let share =
            curve.share * queries / (queries + curve.queries_half) * a.keys / (a.keys + curve.keys_half);
        let flops_ns = a.flops() / (self.peak(self.computes(a.precision)) * share);
        let bytes_ns = self.through_ns(a.bytes(), curve.memory_share);
        curve.start_ns + flops_ns.max(bytes_ns)
    }

    /// One pass over memory that reads and writes so many bytes.
    #[must_use]
    pub fn pass_ns(&self, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 0.0;
        }
        self.curves.memory.start_ns + self.stream_ns(bytes)
    }

    /// Host time to launch one kernel; 0 where launches are captured.
    #[must_use]
    pub fn launch_ns(&self) -> f64 {
        if self.curves.host.captured { 0.0 } else { self.curves.host.launch_ns }
    }

    /// A collective over a group. `bytes` is the full buffer: what one rank holds before an all-reduce, a
    /// reduce-scatter or an all-to-all (its own piece included), and after an all-gather.
    #[must_use]
    pub fn collective(&self, op: CollectiveOp, bytes: f64, span: Span) -> Transfer {
        self.fabric().cost(op, bytes, span, !self.curves.host.captured)
    }

    /// The same by one algorithm; none where the executor's library or the group has no such one.
    #[must_use]
    pub fn by(&self, algorithm: Algorithm, op: CollectiveOp, bytes: f64, span: Span) -> Option<Transfer> {
        self.fabric().by(algorithm, op, bytes, span)
    }

    /// Bytes from which a ring is at least as fast as a tree: the profile's threshold, or where their costs cross. None
    /// where one of them is not offered or they do not cross below 16 GiB.
    #[must_use]
    pub fn crossing(&self, op: CollectiveOp, span: Span) -> Option<f64> {
        self.fabric().crossing(op, span)
    }

    /// Fetch of so many bytes from a tier into the device's own memory, its neighbours doing the same.
    #[must_use]
    pub fn tier_ns(&self, tier: Tier, bytes: f64) -> f64 {
        if bytes <= 0.0 {
            return 0.0;
        }
        let late = match tier {
            Tier::Hbm => return self.pass_ns(bytes),
            Tier::Peer => LinkClass::Domain,
            Tier::Host => LinkClass::Host,
        };
        self.cluster.link(late).latency_ns.value + bytes / (self.cluster.tier_bytes_per_s(tier) / 1e9)
    }

    /// How much longer compute takes while a transfer is under way; at least 1.
    #[must_use]
    pub fn contention(&self) -> f64 {
        self.curves.host.contention
    }

    /// Bytes of a device that the executor and its libraries take for themselves.
    #[must_use]
    pub fn reserved_bytes(&self) -> f64 {
        self.curves.memory.reserved_bytes
    }

    fn fabric(&self) -> Fabric<'_> {
        Fabric::new(&self.cluster, &self.curves.library)
    }

    /// Operations per nanosecond.
    fn peak(&self, p: Precision) -> f64 {
        self.flops_per_s(p) / 1e9
    }

    /// Bytes through memory, without a kernel's start.
    fn stream_ns(&self, bytes: f64) -> f64 {
        self.through_ns(bytes, self.curves.memory.share)
    }

    /// The same at a share of the bandwidth; what caches hold moves faster.
    fn through_ns(&self, bytes: f64, share: f64) -> f64 {
        let m = &self.curves.memory;
        let near = bytes.min(m.cached_bytes);
        (near / m.cached_times + (bytes - near))
            / (self.cluster.device.memory_bytes_per_s.value / 1e9 * share)
    }
}
