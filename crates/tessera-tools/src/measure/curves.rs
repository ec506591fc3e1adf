//! Converts samples to a cluster and a profile: derives figures, and fits the planner's own curves
//! by least squares. This file reads no clock and no file.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::executor_traits::ExecutorTraits;
use tessera_cost::profile::{
    AlgorithmLines, AttentionCurve, CollectiveLibrary, CostLine, Curves, GemmCurve, GroupedGemmCurve,
    HostCosts as HostCurve, MemoryCurve, OverlapTraits, TpOverlap,
};
use tessera_cost::{Algorithm, AttentionWork, CollectiveOp, GroupSpan, MachineModel, Profile};
use tessera_mesh::{Cluster, DeviceSpec, Figure, LinkSpec, Precision};

use super::collectives::CollectiveSize;
use super::host::Host;
use super::kernels::{AttentionSize, HEAD_DIM, MatmulSize as Size, Timed};
use super::{Fit, Fitted, MeasuredMachine, fit_curve};

/// The measurements of one machine, to which the curves of its profile are fitted.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Samples {
    pub(super) ranks: usize,
    /// Number of compute threads of each rank: its share of the cores, rounded down.
    pub(super) threads: usize,
    pub(super) date: String,
    pub(super) vector_unit: &'static str,
    pub(super) host: Host,
    /// Resident memory of the process before the first measurement.
    pub(super) resident_bytes: Option<u64>,
    /// Mean number of runnable processes in the minute before the measurements.
    pub(super) load_average: Option<f64>,
    pub(super) memory: Timed<f64>,
    pub(super) matmuls: Vec<Timed<Size>>,
    pub(super) attentions: Vec<Timed<AttentionSize>>,
    pub(super) single_query: Timed<AttentionSize>,
    pub(super) adds: Vec<Timed<f64>>,
    pub(super) compute_kernels: Vec<Timed<f64>>,
    pub(super) op_overhead_ns: f64,
    pub(super) collectives: Vec<Timed<CollectiveSize>>,
    pub(super) overlap_share: f64,
    pub(super) wake_ns: f64,
}

/// Assumed memory of the machine if the operating system does not report it.
const MEMORY_ASSUMED: u64 = 4 << 30;
/// Assumed bandwidth between hosts in bytes per second: Ethernet of 1 Gb/s. It is not measured.
const OUT_BYTES_PER_S: f64 = 125e6;
/// Assumed latency between hosts in nanoseconds.
const OUT_NS: f64 = 50_000.0;
/// Contention that means no overlap of compute and communication: the maximum that a profile
/// allows.
const NO_OVERLAP_CONTENTION: f64 = 100.0;

impl Samples {
    pub(super) fn fit_machine(&self) -> MeasuredMachine {
        let mut open = vec![
            "links between hosts: one host was measured; Ethernet of 1 Gb/s is assumed".to_string(),
            "matmuls below 32 bits, grouped matmuls of several experts: the CPU backend computes in f32, and each \
expert is priced as a separate matmul"
                .to_string(),
        ];
        if self.ranks == 1 {
            open.push(
                "collectives between ranks: a single rank has no peer; collectives of two threads are used instead"
                    .to_string(),
            );
        }
        if self.host.memory_bytes.is_none() {
            open.push("memory: not reported by the operating system; 4 GiB are assumed".to_string());
        }
        if self.resident_bytes.is_none() {
            open.push(
                "memory of the executor itself: not reported by the operating system; none is assumed"
                    .to_string(),
            );
        }
        if let Some(load) = self.load_average.filter(|l| *l > self.host.cores as f64 / 2.0) {
            open.push(format!(
                "this machine at rest: {load:.1} processes were runnable on its {} cores when the measurement began, so figures are too low and \
curves noisy; measure again when the machine is idle",
                self.host.cores
            ));
        }
        if self.ranks * self.threads < self.host.cores {
            open.push(format!(
                "{} cores: {} ranks with {} threads each use {}",
                self.host.cores,
                self.ranks,
                self.threads,
                self.ranks * self.threads
            ));
        }
        let cluster = self.build_cluster();
        let mut profile = self.initial_profile();
        let mut fits = Vec::new();
        self.fit_elementwise(&cluster, &mut profile, &mut fits);
        self.fit_matmuls(&cluster, &mut profile, &mut fits);
        self.fit_attention(&cluster, &mut profile, &mut fits);
        self.fit_collectives(&cluster, &mut profile, &mut fits);
        // An op in a program also takes the backend's overhead per op.
        for p in &mut profile.base.gemms {
            p.start_ns += self.op_overhead_ns;
        }
        profile.base.attention.start_ns += self.op_overhead_ns;
        profile.base.memory.start_ns += self.op_overhead_ns;
        let first = &profile.base.gemms[0];
        profile.base.grouped_gemm = GroupedGemmCurve {
            share: 1.0,
            rows_half: first.m_half,
            memory_share: 1.0,
            start_ns: first.start_ns,
            source: "not measured: each expert is priced as a separate matmul".to_string(),
        };
        // Errors of single ops have both signs, so the error bar of a whole step is the mean error
        // and not the maximum.
        let points: usize = fits.iter().map(|f| f.point_count).sum();
        profile.error_share =
            fits.iter().map(|f| f.mean_error * f.point_count as f64).sum::<f64>() / points.max(1) as f64;
        let unit =
            |ns: f64| if ns < 10_000.0 { format!("{ns:.0} ns") } else { format!("{:.1} µs", ns / 1e3) };
        let figures = vec![
            ("peak of matmuls", format!("{:.1} GFLOP/s per rank", self.peak_flops() / 1e9)),
            ("memory", format!("{:.1} GB/s per rank", self.memory_rate() / 1e9)),
            ("link", format!("{:.1} GB/s between two ranks", self.link_rate() / 1e9)),
            ("latency of the smallest message", unit(self.min_message_ns())),
            ("wake-up latency of a sleeping rank", unit(self.wake_ns)),
            ("overhead per op", unit(self.op_overhead_ns)),
            ("share of a collective hidden by compute", format!("{:.0} %", self.overlap_share * 100.0)),
        ];
        MeasuredMachine { cluster, profile, fits, figures, not_measured: open }
    }

    fn source_note(&self, what: &str) -> String {
        format!(
            "measured by tessera measure on {}, {} of {} cores, {}: {what}",
            self.host.cpu, self.threads, self.host.cores, self.date
        )
    }

    fn measured_figure(&self, value: f64, what: &str) -> Figure {
        Figure { value, source: self.source_note(what) }
    }

    /// Returns the rate of the fastest matmul in operations per second.
    fn peak_flops(&self) -> f64 {
        let rate = |t: &Timed<Size>| 2e9 * t.size.iter().map(|n| *n as f64).product::<f64>() / t.ns;
        self.matmuls.iter().map(rate).fold(1.0, f64::max)
    }

    fn memory_rate(&self) -> f64 {
        self.memory.size / self.memory.ns * 1e9
    }

    /// Returns the highest rate in bytes of the full buffer per second over all collectives.
    fn link_rate(&self) -> f64 {
        self.collectives.iter().map(|t| t.size.bytes / t.ns * 1e9).fold(1.0, f64::max)
    }

    fn min_message_ns(&self) -> f64 {
        let sends = self.collectives.iter().filter(|t| t.size.op == CollectiveOp::SendRecv);
        sends.map(|t| t.ns).fold(f64::INFINITY, f64::min).min(1e9)
    }

    fn build_cluster(&self) -> Cluster {
        let ranks = self.ranks as u32;
        let memory = self.host.memory_bytes.unwrap_or(MEMORY_ASSUMED) as f64 / self.ranks as f64;
        let share = if self.ranks > 1 { format!(" shared by {} ranks", self.ranks) } else { String::new() };
        let held = if self.host.memory_bytes.is_some() {
            self.measured_figure(memory, &format!("the system's memory{share}"))
        } else {
            Figure {
                value: memory,
                source: "not measured: not reported by the operating system, 4 GiB are assumed".to_string(),
            }
        };
        let rate = self.measured_figure(
            self.memory_rate(),
            "additions of arrays larger than the caches, all ranks concurrently",
        );
        let host_rate = self.measured_figure(self.memory_rate(), "the same memory as the device's own");
        let near = self.link_rate();
        let late = self.min_message_ns();
        let assumed = |value: f64| Figure {
            value,
            source:
                "not measured: one host; Ethernet of 1 Gb/s is assumed, never better than within the host"
                    .to_string(),
        };
        let cores =
            if self.threads == 1 { "one core".to_string() } else { format!("{} cores", self.threads) };
        let mut flops_per_s = [const { None }; 4];
        let best = format!("the fastest of {} matmuls, kernels for {}", self.matmuls.len(), self.vector_unit);
        flops_per_s[Precision::F32 as usize] = Some(self.measured_figure(self.peak_flops(), &best));
        Cluster {
            name: "here".to_string(),
            title: format!("{}, {ranks} {} of {cores}", self.host.cpu, if ranks == 1 { "rank" } else { "ranks" }),
            racks: 1,
            hosts_per_rack: 1,
            devices_per_host: ranks,
            devices_per_socket: ranks,
            domain_size: ranks,
            device: DeviceSpec {
                name: format!("{cores} of {}", self.host.cpu),
                family: "cpu".to_string(),
                memory_bytes: held.clone(),
                memory_bytes_per_s: rate,
                flops_per_s,
            },
            links: [
                LinkSpec {
                    bytes_per_s: self.measured_figure(near, "the fastest collective of a full buffer through shared memory"),
                    achievable: self.measured_figure(1.0, "the rate was reached"),
                    latency_ns: self.measured_figure(
                        late,
                        &format!(
                            "the smallest message to a rank that busy-waits; a sleeping rank takes {:.0} ns to wake",
                            self.wake_ns
                        ),
                    ),
                    multicast: false,
                },
                LinkSpec {
                    bytes_per_s: assumed(OUT_BYTES_PER_S.min(near)),
                    achievable: assumed(1.0),
                    latency_ns: assumed(OUT_NS.max(late)),
                    multicast: false,
                },
                LinkSpec {
                    bytes_per_s: host_rate.clone(),
                    achievable: self.measured_figure(1.0, "the same memory as the device's own"),
                    latency_ns: self.measured_figure(0.0, "no copy is needed"),
                    multicast: false,
                },
            ],
            host_bytes: held,
            host_bytes_per_s: host_rate,
            // The ranks are the cores of the host.
            host_flops_per_s: None,
            profile: "tessera".to_string(),
            measured: true,
        }
    }

    /// Creates a profile with initial values for the curves that are fitted later.
    fn initial_profile(&self) -> Profile {
        Profile {
            name: "tessera-here".to_string(),
            title: format!("The CPU backend on {}", self.host.cpu),
            error_share: 0.0,
            validated_jobs: Vec::new(),
            executor: ExecutorTraits::default(),
            base: Curves {
                gemms: std::array::from_fn(|_| initial_gemm()),
                attention: AttentionCurve {
                    share: 1.0,
                    queries_half: 1.0,
                    keys_half: 1.0,
                    memory_share: 1.0,
                    start_ns: 1.0,
                    stores_scores: false,
                    source: String::new(),
                },
                grouped_gemm: GroupedGemmCurve {
                    share: 1.0,
                    rows_half: 1.0,
                    memory_share: 1.0,
                    start_ns: 1.0,
                    source: String::new(),
                },
                memory: MemoryCurve {
                    share: 1.0,
                    start_ns: 1.0,
                    reserved_bytes: self.resident_bytes.unwrap_or(0) as f64,
                    cached_bytes: 0.0,
                    cached_speedup: 1.0,
                    source: self.source_note("additions of two arrays over sizes"),
                },
                host: self.host_costs(),
                library: self.initial_library(),
                overlap: OverlapTraits {
                    tp: TpOverlap::Nothing,
                    chunk_rows: 1024.0,
                    fuses_weight_gradient: false,
                    overlaps_gathers: false,
                    overlaps_dispatch: false,
                    source: "one thread runs a rank's streams in program order".to_string(),
                },
            },
            families: BTreeMap::new(),
        }
    }

    fn host_costs(&self) -> HostCurve {
        let contention = if self.overlap_share > 0.0 {
            (1.0 / self.overlap_share).clamp(1.0, NO_OVERLAP_CONTENTION)
        } else {
            NO_OVERLAP_CONTENTION
        };
        HostCurve {
            launch_ns: self.op_overhead_ns,
            // The host is the device, so every `start_ns` already includes the launch cost.
            captured: true,
            contention,
            source: self.source_note(
                "a program of minimal ops; a matmul between the start of a collective and its wait",
            ),
        }
    }

    fn initial_library(&self) -> CollectiveLibrary {
        let line =
            CostLine { base_ns: 1.0, hop_ns: 0.0, rate_share: 1.0, self_copy: 0.0, network_share: 1.0 };
        let lines = AlgorithmLines { direct: vec![line], ..AlgorithmLines::default() };
        CollectiveLibrary {
            all_reduce: lines.clone(),
            gather: lines.clone(),
            all_to_all: lines.clone(),
            broadcast: lines.clone(),
            send: lines,
            eager_ns: 0.0,
            network_rate: 1.0,
            source: self.source_note("collectives through shared memory over sizes and members"),
        }
    }

    fn fit_elementwise(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        // The bandwidth was measured on arrays larger than the caches, so its share is 1.
        let set = |p: &mut Profile, x: &[f64; 3]| {
            let m = &mut p.base.memory;
            (m.share, m.start_ns, m.cached_speedup, m.cached_bytes) =
                (1.0, x[0], x[1].clamp(1.0, 1000.0), x[2]);
        };
        let plain: Vec<Timed<f64>> = self.adds.iter().copied().chain([self.memory]).collect();
        let found = fit_profile(cluster, profile, [300.0, 4.0, 1e6], &plain, set, |m, bytes| {
            m.memory_bound_ns(*bytes)
        });
        set(profile, &found.params);
        fits.push(named_fit("memory-bound elementwise kernels", &found));
        // The cost model prices a compute-heavy elementwise kernel as one that moves more bytes.
        let set = |p: &mut Profile, x: &[f64; 1]| p.executor.elementwise_share = x[0].min(1.0);
        let found = fit_profile(cluster, profile, [0.5], &self.compute_kernels, set, |m, bytes| {
            m.memory_bound_ns(bytes / m.profile.executor.elementwise_share)
        });
        set(profile, &found.params);
        fits.push(named_fit("norm, RoPE and activation kernels", &found));
    }

    fn fit_matmuls(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        let source = self.source_note(&format!("{} matmuls with packed weights", self.matmuls.len()));
        let set = |p: &mut Profile, x: &[f64; 5]| {
            for gemm in &mut p.base.gemms {
                (gemm.share, gemm.m_half, gemm.n_half) = (x[0].min(2.0), x[1], x[2]);
                (gemm.k_half, gemm.start_ns) = (x[3], x[4]);
            }
        };
        let start = [0.9, 8.0, 32.0, 32.0, 500.0];
        let found = fit_profile(cluster, profile, start, &self.matmuls, set, |m, [rows, n, k]| {
            m.gemm_ns(*rows as f64, *n as f64, *k as f64, Precision::F32)
        });
        set(profile, &found.params);
        for gemm in &mut profile.base.gemms {
            gemm.source.clone_from(&source);
        }
        fits.push(named_fit("matmuls", &found));
    }

    fn fit_attention(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        let one = attention_work(&self.single_query.size);
        let m = &profile.base.memory;
        let near = one.bytes().min(m.cached_bytes);
        let alike = near / m.cached_speedup + (one.bytes() - near);
        let reached = alike / self.single_query.ns * 1e9 / self.memory_rate();
        profile.base.attention.memory_share = reached.clamp(1e-3, 1.0);
        let set = |p: &mut Profile, x: &[f64; 4]| {
            let a = &mut p.base.attention;
            (a.share, a.queries_half, a.keys_half, a.start_ns) = (x[0].min(1.0), x[1], x[2], x[3]);
        };
        let found =
            fit_profile(cluster, profile, [0.5, 8.0, 32.0, 500.0], &self.attentions, set, |m, size| {
                m.attention_ns(&attention_work(size))
            });
        set(profile, &found.params);
        profile.base.attention.source = self.source_note(&format!(
            "head dimension {HEAD_DIM}; bandwidth from one query over keys that exceed every cache"
        ));
        fits.push(named_fit("attention", &found));
    }

    fn fit_collectives(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        use CollectiveOp::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, SendRecv};
        // An arena reduces one-shot: every member reads every other member's whole buffer.
        self.fit_collective(cluster, profile, fits, "all-reduce", &[AllReduce], Algorithm::OneShot);
        self.fit_collective(
            cluster,
            profile,
            fits,
            "all-gather, reduce-scatter",
            &[AllGather, ReduceScatter],
            Algorithm::Direct,
        );
        self.fit_collective(cluster, profile, fits, "all-to-all", &[AllToAll], Algorithm::Direct);
        self.fit_collective(cluster, profile, fits, "broadcast", &[Broadcast], Algorithm::Ring);
        self.fit_collective(cluster, profile, fits, "send", &[SendRecv], Algorithm::Direct);
    }

    fn fit_collective(
        &self,
        cluster: &Cluster,
        profile: &mut Profile,
        fits: &mut Vec<Fit>,
        what: &'static str,
        ops: &[CollectiveOp],
        algorithm: Algorithm,
    ) {
        let points: Vec<Timed<CollectiveSize>> =
            self.collectives.iter().copied().filter(|t| ops.contains(&t.size.op)).collect();
        let widest = points.iter().map(|t| t.size.members).max().unwrap_or(2);
        let wide: Vec<Timed<CollectiveSize>> =
            points.iter().copied().filter(|t| t.size.members == widest).collect();
        *lines_mut(profile, ops[0]) = AlgorithmLines::default();
        let (line, found) = self.fit_line(cluster, profile, ops[0], &points, algorithm);
        set_line(lines_mut(profile, ops[0]), algorithm, line);
        fits.push(found.to_fit(what));
        if algorithm == Algorithm::OneShot {
            // This algorithm works for any number of ranks and between hosts. The fit uses only the
            // widest group, so that it is never cheaper than one-shot on a smaller group.
            let mut other = profile.clone();
            *lines_mut(&mut other, ops[0]) = AlgorithmLines::default();
            let (line, _) = self.fit_line(cluster, &other, ops[0], &wide, Algorithm::Direct);
            set_line(lines_mut(profile, ops[0]), Algorithm::Direct, line);
        }
    }

    /// Fits a line. The terms for hops and own data can be separated from the rest only if group
    /// sizes differ.
    fn fit_line(
        &self,
        cluster: &Cluster,
        profile: &Profile,
        op: CollectiveOp,
        points: &[Timed<CollectiveSize>],
        algorithm: Algorithm,
    ) -> (CostLine, FitQuality) {
        let sizes: BTreeSet<usize> = points.iter().map(|t| t.size.members).collect();
        let line = |base_ns: f64, rate: f64, hop_ns: f64, own: f64| CostLine {
            base_ns,
            hop_ns,
            rate_share: rate.clamp(1e-6, 2.0),
            self_copy: own,
            network_share: 1.0,
        };
        let price = |m: &MachineModel, size: &CollectiveSize| {
            let span = GroupSpan { ranks: size.members as u32, domains: 1 };
            // All groups of one machine are in one domain, even if the cluster has fewer ranks than
            // the group.
            m.collective_cost_with(algorithm, size.op, size.bytes, span).map_or(f64::INFINITY, |t| t.ns)
        };
        if sizes.len() > 1 {
            let make = |x: &[f64; 4]| line(x[0], x[1], x[2], x[3]);
            let set = |p: &mut Profile, x: &[f64; 4]| set_line(lines_mut(p, op), algorithm, make(x));
            let found = fit_profile(cluster, profile, [1000.0, 0.5, 100.0, 0.5], points, set, price);
            (make(&found.params), FitQuality::from_fitted(&found))
        } else {
            let make = |x: &[f64; 2]| line(x[0], x[1], 0.0, 0.0);
            let set = |p: &mut Profile, x: &[f64; 2]| set_line(lines_mut(p, op), algorithm, make(x));
            let found = fit_profile(cluster, profile, [1000.0, 0.5], points, set, price);
            (make(&found.params), FitQuality::from_fitted(&found))
        }
    }
}

/// The quality of a fit, for any number of parameters.
struct FitQuality {
    point_count: usize,
    mean_error: f64,
    max_error: f64,
}

impl FitQuality {
    fn from_fitted<const N: usize>(f: &Fitted<N>) -> FitQuality {
        FitQuality { point_count: f.point_count, mean_error: f.mean_error, max_error: f.max_error }
    }

    fn to_fit(&self, what: &'static str) -> Fit {
        Fit {
            curve_name: what,
            point_count: self.point_count,
            mean_error: self.mean_error,
            max_error: self.max_error,
        }
    }
}

fn named_fit<const N: usize>(what: &'static str, f: &Fitted<N>) -> Fit {
    FitQuality::from_fitted(f).to_fit(what)
}

/// Fits the parameters that `set` writes into a profile, so that the planner's own price of each
/// size is closest to the measured time.
fn fit_profile<const N: usize, S>(
    cluster: &Cluster,
    profile: &Profile,
    start: [f64; N],
    points: &[Timed<S>],
    set: impl Fn(&mut Profile, &[f64; N]),
    price: impl Fn(&MachineModel, &S) -> f64,
) -> Fitted<N> {
    let measured: Vec<f64> = points.iter().map(|t| t.ns).collect();
    fit_curve(start, &measured, |x| {
        let mut profile = profile.clone();
        set(&mut profile, x);
        let machine = MachineModel::new(cluster.clone(), profile);
        points.iter().map(|t| price(&machine, &t.size)).collect()
    })
}

fn initial_gemm() -> GemmCurve {
    GemmCurve {
        max_efficiency: 1.0,
        share: 1.0,
        m_half: 1.0,
        n_half: 1.0,
        k_half: 1.0,
        start_ns: 1.0,
        source: String::new(),
    }
}

fn attention_work([queries, keys, heads]: &AttentionSize) -> AttentionWork {
    AttentionWork {
        queries: *queries as f64,
        keys: *keys as f64,
        heads: *heads as f64,
        kv_heads: *heads as f64,
        qk: HEAD_DIM as f64,
        v: HEAD_DIM as f64,
        causal: false,
        precision: Precision::F32,
        key_bytes: 2.0 * HEAD_DIM as f64 * Precision::F32.element_bytes(),
    }
}

fn lines_mut(p: &mut Profile, op: CollectiveOp) -> &mut AlgorithmLines {
    let l = &mut p.base.library;
    match op {
        CollectiveOp::AllReduce => &mut l.all_reduce,
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter => &mut l.gather,
        CollectiveOp::AllToAll => &mut l.all_to_all,
        CollectiveOp::Broadcast => &mut l.broadcast,
        CollectiveOp::SendRecv => &mut l.send,
    }
}

fn set_line(lines: &mut AlgorithmLines, algorithm: Algorithm, line: CostLine) {
    let list = match algorithm {
        Algorithm::OneShot => &mut lines.one_shot,
        Algorithm::Ring => &mut lines.ring,
        _ => &mut lines.direct,
    };
    *list = vec![line];
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    fn sample_host() -> Host {
        Host { cpu: "A Processor".into(), cores: 4, memory_bytes: Some(16 << 30) }
    }

    /// Samples of a synthetic machine with known cost curves.
    fn synthetic_samples() -> Samples {
        let mut matmuls = Vec::new();
        for m in [1usize, 8, 64, 512] {
            for n in [32usize, 128, 1024] {
                for k in [64usize, 512] {
                    let (fm, fnn, fk) = (m as f64, n as f64, k as f64);
                    // 50 GFLOP/s in the limit, half-rates at 6, 20 and 30, and 300 ns.
                    let ns = 300.0 + 2.0 / 50.0 * (fm + 6.0) * (fnn + 20.0) * (fk + 30.0);
                    matmuls.push(Timed { size: [m, n, k], ns });
                }
            }
        }
        let mut meetings = Vec::new();
        for members in [2usize, 4] {
            for bytes in [4096.0, 65536.0, 1048576.0] {
                let n = members as f64;
                let mut add =
                    |op, ns| meetings.push(Timed { size: CollectiveSize { op, bytes, members }, ns });
                // 4 bytes/ns; every member writes its own buffer and reads all.
                add(CollectiveOp::AllReduce, 900.0 + bytes * (n + 1.0) / 4.0);
                add(CollectiveOp::AllGather, 700.0 + bytes * (1.0 + 1.0 / n) / 4.0);
                add(CollectiveOp::ReduceScatter, 700.0 + bytes * (1.0 + 1.0 / n) / 4.0);
                add(CollectiveOp::AllToAll, 800.0 + bytes * 2.0 / 4.0);
                add(CollectiveOp::Broadcast, 600.0 + bytes * 2.0 / 4.0);
                if members == 2 {
                    add(CollectiveOp::SendRecv, 500.0 + bytes * 2.0 / 4.0);
                }
            }
        }
        let pass = |bytes: f64, rate: f64| Timed { size: bytes, ns: 200.0 + bytes / rate };
        let seen = |[q, k, h]: [usize; 3]| {
            let flops = 4.0 * (q * k * h * HEAD_DIM) as f64;
            Timed {
                size: [q, k, h],
                ns: 400.0 + flops / 20.0 * (1.0 + 8.0 / (q * h) as f64) * (1.0 + 10.0 / k as f64),
            }
        };
        Samples {
            ranks: 4,
            threads: 1,
            date: "2020-02-02".into(),
            vector_unit: "avx2",
            host: sample_host(),
            resident_bytes: Some(20 << 20),
            load_average: Some(0.3),
            memory: pass(200e6, 100.0),
            matmuls,
            attentions: [[16, 64, 1], [16, 512, 4], [128, 64, 4], [128, 512, 1], [512, 1024, 4]]
                .map(seen)
                .to_vec(),
            single_query: Timed { size: [1, 65536, 4], ns: 3.36e6 },
            adds: [12e3, 96e3, 768e3, 6e6].map(|b| pass(b, 100.0)).to_vec(),
            compute_kernels: [12e3, 96e3, 768e3, 6e6].map(|b| pass(b, 40.0)).to_vec(),
            op_overhead_ns: 100.0,
            collectives: meetings,
            overlap_share: 0.25,
            wake_ns: 60_000.0,
        }
    }

    #[test]
    fn synthetic_machine_is_recovered() {
        let m = synthetic_samples().fit_machine();
        for f in &m.fits {
            assert!(f.max_error < 0.03, "{f:?}");
        }
        let machine = MachineModel::new(m.cluster.clone(), m.profile.clone());
        let within =
            |ours: f64, truth: f64| assert!((ours / truth - 1.0).abs() < 0.05, "{ours} against {truth}");
        // Sizes between the measured points, including the overhead per op.
        within(machine.gemm_ns(200.0, 256.0, 256.0, Precision::F32), 400.0 + 0.04 * 206.0 * 276.0 * 286.0);
        within(machine.memory_bound_ns(1e6), 300.0 + 1e4);
        within(machine.memory_bound_ns(1e6 / m.profile.executor.elementwise_share), 300.0 + 2.5e4);
        let span = |ranks| GroupSpan { ranks, domains: 1 };
        for n in [2u32, 4] {
            within(
                machine.collective_cost(CollectiveOp::AllReduce, 2e5, span(n)).ns,
                900.0 + 5e4 * f64::from(n + 1),
            );
            within(machine.collective_cost(CollectiveOp::AllToAll, 2e5, span(n)).ns, 800.0 + 1e5);
        }
        assert_eq!(machine.contention_factor(), 4.0);
        assert_eq!(machine.launch_ns(), 0.0);
    }

    #[test]
    fn written_files_round_trip_and_name_their_source() {
        let m = synthetic_samples().fit_machine();
        assert_eq!(Cluster::parse("c", &m.cluster.to_toml()).unwrap(), m.cluster);
        assert_eq!(Profile::parse("p", &m.profile.to_toml()).unwrap(), m.profile);
        let c = &m.cluster;
        assert_eq!((c.device_count(), c.domain_count(), c.measured), (4, 1, true));
        for f in [&c.device.memory_bytes_per_s, &c.links[0].bytes_per_s, &c.host_bytes] {
            let begins = "measured by tessera measure on A Processor, 1 of 4 cores, 2020-02-02";
            assert!(f.source.starts_with(begins), "{}", f.source);
        }
        assert!(c.links[1].bytes_per_s.source.starts_with("not measured"));
        assert!(m.not_measured.iter().any(|o| o.starts_with("links between hosts")));
    }

    #[test]
    fn one_rank_and_missing_system_facts_are_reported() {
        let mut s = synthetic_samples();
        (s.ranks, s.threads, s.resident_bytes, s.overlap_share) = (1, 4, None, 0.0);
        (s.host.memory_bytes, s.load_average) = (None, Some(9.0));
        s.collectives.retain(|t| t.size.members == 2);
        let m = s.fit_machine();
        assert_eq!(m.not_measured.len(), 6, "{:#?}", m.not_measured);
        assert_eq!(m.profile.base.host.contention, NO_OVERLAP_CONTENTION);
        assert_eq!(Cluster::parse("c", &m.cluster.to_toml()).unwrap(), m.cluster);
        assert_eq!(Profile::parse("p", &m.profile.to_toml()).unwrap(), m.profile);
        // Groups of one size determine only base and rate.
        let line = &m.profile.base.library.all_to_all.direct[0];
        assert_eq!((line.hop_ns, line.self_copy), (0.0, 0.0));
    }
}
