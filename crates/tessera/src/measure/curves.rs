//! From samples to a cluster and a profile: figures, and curves of the planner's own forms fitted by least squares. No
//! clock, no file.

use std::collections::{BTreeMap, BTreeSet};

use tessera_cost::habits::Habits;
use tessera_cost::profile::{
    Attention, Curves, Experts, Hides, Host as HostCurve, Library, Line, Lines, Memory, Overlap, Product,
};
use tessera_cost::{Algorithm, AttentionWork, CollectiveOp, Machine, Profile, Span};
use tessera_mesh::{Cluster, Device, Figure, Link, Precision};

use super::host::Host;
use super::kernels::{HEAD, Product as Size, Seen, Timed};
use super::lanes::Meeting;
use super::{Fit, Fitted, Measured, fit};

/// Everything that was measured.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Samples {
    pub(super) ranks: usize,
    /// Of each rank.
    pub(super) threads: usize,
    pub(super) date: String,
    pub(super) vector_unit: &'static str,
    pub(super) host: Host,
    /// What the process held before it measured anything.
    pub(super) own_bytes: Option<u64>,
    /// Processes that wanted to run, on the mean of the minute before.
    pub(super) load: Option<f64>,
    pub(super) memory: Timed<f64>,
    pub(super) products: Vec<Timed<Size>>,
    pub(super) attentions: Vec<Timed<Seen>>,
    pub(super) one_query: Timed<Seen>,
    pub(super) plain: Vec<Timed<f64>>,
    pub(super) working: Vec<Timed<f64>>,
    pub(super) op_ns: f64,
    pub(super) meetings: Vec<Timed<Meeting>>,
    pub(super) hidden: f64,
    pub(super) wake_ns: f64,
}

/// Memory of the whole machine where the system does not say.
const MEMORY_ASSUMED: u64 = 4 << 30;
/// Ethernet of one gigabit, in bytes per second: what lies between hosts where nothing was measured.
const OUT_BYTES_PER_S: f64 = 125e6;
/// Time of its smallest message.
const OUT_NS: f64 = 50_000.0;
/// Contention of a rank that does nothing beside an exchange: the most that a profile may say.
const NOTHING_BESIDE: f64 = 100.0;

impl Samples {
    pub(super) fn measured(&self) -> Measured {
        let mut open = vec![
            "links between hosts: one host was measured; Ethernet of 1 Gb/s is assumed".to_string(),
            "products at fewer than 32 bits, products of many experts at once: the CPU backend computes in f32, and an \
expert's product is taken for a product of its own"
                .to_string(),
        ];
        if self.ranks == 1 {
            open.push(
                "exchanges between ranks: one rank has nobody to meet; those of two threads stand in"
                    .to_string(),
            );
        }
        if self.host.memory_bytes.is_none() {
            open.push("memory: the system does not say how much there is; 4 GiB are assumed".to_string());
        }
        if self.own_bytes.is_none() {
            open.push(
                "memory that the executor itself takes: the system does not say; none is assumed".to_string(),
            );
        }
        if let Some(load) = self.load.filter(|l| *l > self.host.cores as f64 / 2.0) {
            open.push(format!(
                "this machine at rest: {load:.1} processes wanted its {} cores when measuring began, so figures are lower and \
curves rougher than they need be; measure again when it is quiet",
                self.host.cores
            ));
        }
        if self.ranks * self.threads < self.host.cores {
            open.push(format!(
                "{} cores: {} ranks of {} use {}",
                self.host.cores,
                self.ranks,
                self.threads,
                self.ranks * self.threads
            ));
        }
        let cluster = self.cluster();
        let mut profile = self.blank();
        let mut fits = Vec::new();
        self.passes(&cluster, &mut profile, &mut fits);
        self.products(&cluster, &mut profile, &mut fits);
        self.attention(&cluster, &mut profile, &mut fits);
        self.exchanges(&cluster, &mut profile, &mut fits);
        // Ops of a program also take what the backend spends beside their kernels.
        for p in &mut profile.base.products {
            p.start_ns += self.op_ns;
        }
        profile.base.attention.start_ns += self.op_ns;
        profile.base.memory.start_ns += self.op_ns;
        let first = &profile.base.products[0];
        profile.base.experts = Experts {
            share: 1.0,
            rows_half: first.m_half,
            memory_share: 1.0,
            start_ns: first.start_ns,
            source: "not measured: an expert's product is taken for a product of its own".to_string(),
        };
        // Errors of single ops go both ways, so the bar of a whole is that of their mean and not of the worst.
        let points: usize = fits.iter().map(|f| f.points).sum();
        profile.error = fits.iter().map(|f| f.mean * f.points as f64).sum::<f64>() / points.max(1) as f64;
        let unit =
            |ns: f64| if ns < 10_000.0 { format!("{ns:.0} ns") } else { format!("{:.1} µs", ns / 1e3) };
        let figures = vec![
            ("peak of products", format!("{:.1} GFLOP/s per rank", self.peak() / 1e9)),
            ("memory", format!("{:.1} GB/s per rank", self.memory_rate() / 1e9)),
            ("link", format!("{:.1} GB/s between two ranks", self.link_rate() / 1e9)),
            ("smallest message", unit(self.smallest())),
            ("waking a rank that sleeps", unit(self.wake_ns)),
            ("an op beside its kernel", unit(self.op_ns)),
            ("of an exchange, hidden by work", format!("{:.0} %", self.hidden * 100.0)),
        ];
        Measured { cluster, profile, fits, figures, open }
    }

    fn source(&self, what: &str) -> String {
        format!(
            "measured by tessera measure on {}, {} of {} cores, {}: {what}",
            self.host.cpu, self.threads, self.host.cores, self.date
        )
    }

    fn figure(&self, value: f64, what: &str) -> Figure {
        Figure { value, source: self.source(what) }
    }

    /// Operations per second of the fastest product.
    fn peak(&self) -> f64 {
        let rate = |t: &Timed<Size>| 2e9 * t.size.iter().map(|n| *n as f64).product::<f64>() / t.ns;
        self.products.iter().map(rate).fold(1.0, f64::max)
    }

    fn memory_rate(&self) -> f64 {
        self.memory.size / self.memory.ns * 1e9
    }

    /// Bytes of a full buffer per second, of the exchange where that is most.
    fn link_rate(&self) -> f64 {
        self.meetings.iter().map(|t| t.size.bytes / t.ns * 1e9).fold(1.0, f64::max)
    }

    fn smallest(&self) -> f64 {
        let sends = self.meetings.iter().filter(|t| t.size.op == CollectiveOp::SendRecv);
        sends.map(|t| t.ns).fold(f64::INFINITY, f64::min).min(1e9)
    }

    fn cluster(&self) -> Cluster {
        let ranks = self.ranks as u32;
        let memory = self.host.memory_bytes.unwrap_or(MEMORY_ASSUMED) as f64 / self.ranks as f64;
        let share = if self.ranks > 1 { format!(" shared by {} ranks", self.ranks) } else { String::new() };
        let held = if self.host.memory_bytes.is_some() {
            self.figure(memory, &format!("the system's memory{share}"))
        } else {
            Figure {
                value: memory,
                source: "not measured: the system does not say, 4 GiB are assumed".to_string(),
            }
        };
        let rate = self.figure(self.memory_rate(), "sums of arrays beyond the caches, all ranks at once");
        let host_rate = self.figure(self.memory_rate(), "the same memory as the device's own");
        let near = self.link_rate();
        let late = self.smallest();
        let assumed = |value: f64| Figure {
            value,
            source:
                "not measured: one host; Ethernet of 1 Gb/s is assumed, never better than within the host"
                    .to_string(),
        };
        let cores =
            if self.threads == 1 { "one core".to_string() } else { format!("{} cores", self.threads) };
        let mut flops_per_s = [const { None }; 4];
        let best =
            format!("the fastest of {} products, kernels for {}", self.products.len(), self.vector_unit);
        flops_per_s[Precision::F32 as usize] = Some(self.figure(self.peak(), &best));
        Cluster {
            name: "here".to_string(),
            title: format!("{}, {ranks} {} of {cores}", self.host.cpu, if ranks == 1 { "rank" } else { "ranks" }),
            racks: 1,
            hosts_per_rack: 1,
            devices_per_host: ranks,
            devices_per_socket: ranks,
            domain: ranks,
            device: Device {
                name: format!("{cores} of {}", self.host.cpu),
                family: "cpu".to_string(),
                memory_bytes: held.clone(),
                memory_bytes_per_s: rate,
                flops_per_s,
            },
            links: [
                Link {
                    bytes_per_s: self.figure(near, "the fastest exchange of a full buffer through shared memory"),
                    achievable: self.figure(1.0, "the rate is one that was reached"),
                    latency_ns: self.figure(
                        late,
                        &format!(
                            "the smallest message to a rank that waits awake; one that sleeps takes {:.0} ns to wake",
                            self.wake_ns
                        ),
                    ),
                    multicast: false,
                },
                Link {
                    bytes_per_s: assumed(OUT_BYTES_PER_S.min(near)),
                    achievable: assumed(1.0),
                    latency_ns: assumed(OUT_NS.max(late)),
                    multicast: false,
                },
                Link {
                    bytes_per_s: host_rate.clone(),
                    achievable: self.figure(1.0, "the same memory as the device's own"),
                    latency_ns: self.figure(0.0, "no copy is needed"),
                    multicast: false,
                },
            ],
            host_bytes: held,
            host_bytes_per_s: host_rate,
            profile: "tessera".to_string(),
            measured: true,
        }
    }

    /// A profile whose curves are still to be fitted.
    fn blank(&self) -> Profile {
        let product = Product {
            most: 1.0,
            share: 1.0,
            m_half: 1.0,
            n_half: 1.0,
            k_half: 1.0,
            start_ns: 1.0,
            source: String::new(),
        };
        let line = |_| Lines {
            direct: vec![Line { base_ns: 1.0, hop_ns: 0.0, rate: 1.0, own: 0.0, far: 1.0 }],
            ..Lines::default()
        };
        let [all_reduce, gather, all_to_all, broadcast, send] = [0; 5].map(line);
        let contention =
            if self.hidden > 0.0 { (1.0 / self.hidden).clamp(1.0, NOTHING_BESIDE) } else { NOTHING_BESIDE };
        Profile {
            name: "tessera-here".to_string(),
            title: format!("The CPU backend on {}", self.host.cpu),
            error: 0.0,
            validated: Vec::new(),
            habits: Habits::default(),
            base: Curves {
                products: [const { None }; 4].map(|_: Option<()>| product.clone()),
                attention: Attention {
                    share: 1.0,
                    queries_half: 1.0,
                    keys_half: 1.0,
                    memory_share: 1.0,
                    start_ns: 1.0,
                    stores_scores: false,
                    source: String::new(),
                },
                experts: Experts {
                    share: 1.0,
                    rows_half: 1.0,
                    memory_share: 1.0,
                    start_ns: 1.0,
                    source: String::new(),
                },
                memory: Memory {
                    share: 1.0,
                    start_ns: 1.0,
                    reserved_bytes: self.own_bytes.unwrap_or(0) as f64,
                    cached_bytes: 0.0,
                    cached_times: 1.0,
                    source: self.source("sums of two arrays over sizes"),
                },
                host: HostCurve {
                    launch_ns: self.op_ns,
                    // The host is the device: what an op costs it stands in every `start_ns`.
                    captured: true,
                    contention,
                    source: self
                        .source("a program of the smallest ops; a product between an exchange and its wait"),
                },
                library: Library {
                    all_reduce,
                    gather,
                    all_to_all,
                    broadcast,
                    send,
                    eager_ns: 0.0,
                    out_rate: 1.0,
                    source: self.source("exchanges through shared memory over sizes and members"),
                },
                overlap: Overlap {
                    tp: Hides::Nothing,
                    chunk_rows: 1024.0,
                    weight_gradient_fused: false,
                    gathers: false,
                    exchanges: false,
                    source: "one thread runs a rank's streams in program order".to_string(),
                },
            },
            families: BTreeMap::new(),
        }
    }

    fn passes(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        // The bandwidth is that of arrays beyond the caches, so a share of it is all of it.
        let set = |p: &mut Profile, x: &[f64; 3]| {
            let m = &mut p.base.memory;
            (m.share, m.start_ns, m.cached_times, m.cached_bytes) =
                (1.0, x[0], x[1].clamp(1.0, 1000.0), x[2]);
        };
        let plain: Vec<Timed<f64>> = self.plain.iter().copied().chain([self.memory]).collect();
        let found = through(cluster, profile, [300.0, 4.0, 1e6], &plain, set, |m, bytes| m.pass_ns(*bytes));
        set(profile, &found.at);
        fits.push(named("passes that only move numbers", &found));
        // The executor prices a pass that computes as one of more bytes.
        let set = |p: &mut Profile, x: &[f64; 1]| p.habits.pass_share = x[0].min(1.0);
        let found = through(cluster, profile, [0.5], &self.working, set, |m, bytes| {
            m.pass_ns(bytes / m.profile.habits.pass_share)
        });
        set(profile, &found.at);
        fits.push(named("passes that compute", &found));
    }

    fn products(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        let source = self.source(&format!("{} products with packed weights", self.products.len()));
        let set = |p: &mut Profile, x: &[f64; 5]| {
            for product in &mut p.base.products {
                (product.share, product.m_half, product.n_half) = (x[0].min(2.0), x[1], x[2]);
                (product.k_half, product.start_ns) = (x[3], x[4]);
            }
        };
        let start = [0.9, 8.0, 32.0, 32.0, 500.0];
        let found = through(cluster, profile, start, &self.products, set, |m, [rows, n, k]| {
            m.matmul_ns(*rows as f64, *n as f64, *k as f64, Precision::F32)
        });
        set(profile, &found.at);
        for product in &mut profile.base.products {
            product.source.clone_from(&source);
        }
        fits.push(named("products", &found));
    }

    fn attention(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        let one = work(&self.one_query.size);
        let m = &profile.base.memory;
        let near = one.bytes().min(m.cached_bytes);
        let alike = near / m.cached_times + (one.bytes() - near);
        let reached = alike / self.one_query.ns * 1e9 / self.memory_rate();
        profile.base.attention.memory_share = reached.clamp(1e-3, 1.0);
        let set = |p: &mut Profile, x: &[f64; 4]| {
            let a = &mut p.base.attention;
            (a.share, a.queries_half, a.keys_half, a.start_ns) = (x[0].min(1.0), x[1], x[2], x[3]);
        };
        let found = through(cluster, profile, [0.5, 8.0, 32.0, 500.0], &self.attentions, set, |m, size| {
            m.attention_ns(&work(size))
        });
        set(profile, &found.at);
        profile.base.attention.source =
            self.source(&format!("heads of {HEAD}; bandwidth from one query over keys that no cache holds"));
        fits.push(named("attention", &found));
    }

    fn exchanges(&self, cluster: &Cluster, profile: &mut Profile, fits: &mut Vec<Fit>) {
        use CollectiveOp::{AllGather, AllReduce, AllToAll, Broadcast, ReduceScatter, SendRecv};
        // Everybody reads everybody's whole buffer where an arena reduces.
        self.lines(cluster, profile, fits, "all-reduce", &[AllReduce], Algorithm::OneShot);
        self.lines(
            cluster,
            profile,
            fits,
            "all-gather, reduce-scatter",
            &[AllGather, ReduceScatter],
            Algorithm::Direct,
        );
        self.lines(cluster, profile, fits, "all-to-all", &[AllToAll], Algorithm::Direct);
        self.lines(cluster, profile, fits, "broadcast", &[Broadcast], Algorithm::Ring);
        self.lines(cluster, profile, fits, "send", &[SendRecv], Algorithm::Direct);
    }

    fn lines(
        &self,
        cluster: &Cluster,
        profile: &mut Profile,
        fits: &mut Vec<Fit>,
        what: &'static str,
        ops: &[CollectiveOp],
        by: Algorithm,
    ) {
        let points: Vec<Timed<Meeting>> =
            self.meetings.iter().copied().filter(|t| ops.contains(&t.size.op)).collect();
        let widest = points.iter().map(|t| t.size.members).max().unwrap_or(2);
        let wide: Vec<Timed<Meeting>> = points.iter().copied().filter(|t| t.size.members == widest).collect();
        *slot(profile, ops[0]) = Lines::default();
        let (line, found) = self.line(cluster, profile, ops[0], &points, by);
        put(slot(profile, ops[0]), by, line);
        fits.push(found.named(what));
        if by == Algorithm::OneShot {
            // What works on any number of ranks and between hosts. Fitted to the widest group alone it is never cheaper
            // on a smaller one.
            let mut other = profile.clone();
            *slot(&mut other, ops[0]) = Lines::default();
            let (line, _) = self.line(cluster, &other, ops[0], &wide, Algorithm::Direct);
            put(slot(profile, ops[0]), Algorithm::Direct, line);
        }
    }

    /// A line through points. Steps and own pieces tell themselves from the rest only where groups differ in size.
    fn line(
        &self,
        cluster: &Cluster,
        profile: &Profile,
        op: CollectiveOp,
        points: &[Timed<Meeting>],
        by: Algorithm,
    ) -> (Line, Found) {
        let sizes: BTreeSet<usize> = points.iter().map(|t| t.size.members).collect();
        let line = |base_ns: f64, rate: f64, hop_ns: f64, own: f64| Line {
            base_ns,
            hop_ns,
            rate: rate.clamp(1e-6, 2.0),
            own,
            far: 1.0,
        };
        let price = |m: &Machine, size: &Meeting| {
            let span = Span { ranks: size.members as u32, domains: 1 };
            // Groups of one machine lie in one domain, even where it was told to have fewer ranks.
            m.by(by, size.op, size.bytes, span).map_or(f64::INFINITY, |t| t.ns)
        };
        if sizes.len() > 1 {
            let make = |x: &[f64; 4]| line(x[0], x[1], x[2], x[3]);
            let set = |p: &mut Profile, x: &[f64; 4]| put(slot(p, op), by, make(x));
            let found = through(cluster, profile, [1000.0, 0.5, 100.0, 0.5], points, set, price);
            (make(&found.at), Found::of(&found))
        } else {
            let make = |x: &[f64; 2]| line(x[0], x[1], 0.0, 0.0);
            let set = |p: &mut Profile, x: &[f64; 2]| put(slot(p, op), by, make(x));
            let found = through(cluster, profile, [1000.0, 0.5], points, set, price);
            (make(&found.at), Found::of(&found))
        }
    }
}

/// How well a fit went, whatever the number of its parameters.
struct Found {
    points: usize,
    mean: f64,
    worst: f64,
}

impl Found {
    fn of<const N: usize>(f: &Fitted<N>) -> Found {
        Found { points: f.points, mean: f.mean, worst: f.worst }
    }

    fn named(&self, what: &'static str) -> Fit {
        Fit { what, points: self.points, mean: self.mean, worst: self.worst }
    }
}

fn named<const N: usize>(what: &'static str, f: &Fitted<N>) -> Fit {
    Found::of(f).named(what)
}

/// Fits parameters that `set` puts into a profile, so that the planner's own price of each size is nearest to what it took.
fn through<const N: usize, S>(
    cluster: &Cluster,
    profile: &Profile,
    start: [f64; N],
    points: &[Timed<S>],
    set: impl Fn(&mut Profile, &[f64; N]),
    price: impl Fn(&Machine, &S) -> f64,
) -> Fitted<N> {
    let measured: Vec<f64> = points.iter().map(|t| t.ns).collect();
    fit(start, &measured, |x| {
        let mut profile = profile.clone();
        set(&mut profile, x);
        let machine = Machine::new(cluster.clone(), profile);
        points.iter().map(|t| price(&machine, &t.size)).collect()
    })
}

fn work([queries, keys, heads]: &Seen) -> AttentionWork {
    AttentionWork {
        queries: *queries as f64,
        keys: *keys as f64,
        heads: *heads as f64,
        kv_heads: *heads as f64,
        qk: HEAD as f64,
        v: HEAD as f64,
        causal: false,
        precision: Precision::F32,
        key_bytes: 2.0 * HEAD as f64 * Precision::F32.bytes(),
    }
}

fn slot(p: &mut Profile, op: CollectiveOp) -> &mut Lines {
    let l = &mut p.base.library;
    match op {
        CollectiveOp::AllReduce => &mut l.all_reduce,
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter => &mut l.gather,
        CollectiveOp::AllToAll => &mut l.all_to_all,
        CollectiveOp::Broadcast => &mut l.broadcast,
        CollectiveOp::SendRecv => &mut l.send,
    }
}

fn put(lines: &mut Lines, by: Algorithm, line: Line) {
    let list = match by {
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

    fn host() -> Host {
        Host { cpu: "A Processor".into(), cores: 4, memory_bytes: Some(16 << 30) }
    }

    /// Samples of a machine whose laws are known.
    fn lawful() -> Samples {
        let mut products = Vec::new();
        for m in [1usize, 8, 64, 512] {
            for n in [32usize, 128, 1024] {
                for k in [64usize, 512] {
                    let (fm, fnn, fk) = (m as f64, n as f64, k as f64);
                    // 50 GFLOP/s in the limit, halves 6, 20 and 30, 300 ns.
                    let ns = 300.0 + 2.0 / 50.0 * (fm + 6.0) * (fnn + 20.0) * (fk + 30.0);
                    products.push(Timed { size: [m, n, k], ns });
                }
            }
        }
        let mut meetings = Vec::new();
        for members in [2usize, 4] {
            for bytes in [4096.0, 65536.0, 1048576.0] {
                let n = members as f64;
                let mut add = |op, ns| meetings.push(Timed { size: Meeting { op, bytes, members }, ns });
                // 4 bytes/ns; every member writes its own and reads all.
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
            let flops = 4.0 * (q * k * h * HEAD) as f64;
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
            host: host(),
            own_bytes: Some(20 << 20),
            load: Some(0.3),
            memory: pass(200e6, 100.0),
            products,
            attentions: [[16, 64, 1], [16, 512, 4], [128, 64, 4], [128, 512, 1], [512, 1024, 4]]
                .map(seen)
                .to_vec(),
            one_query: Timed { size: [1, 65536, 4], ns: 3.36e6 },
            plain: [12e3, 96e3, 768e3, 6e6].map(|b| pass(b, 100.0)).to_vec(),
            working: [12e3, 96e3, 768e3, 6e6].map(|b| pass(b, 40.0)).to_vec(),
            op_ns: 100.0,
            meetings,
            hidden: 0.25,
            wake_ns: 60_000.0,
        }
    }

    #[test]
    fn a_lawful_machine_is_found_again() {
        let m = lawful().measured();
        for f in &m.fits {
            assert!(f.worst < 0.03, "{f:?}");
        }
        let machine = Machine::new(m.cluster.clone(), m.profile.clone());
        let within =
            |ours: f64, truth: f64| assert!((ours / truth - 1.0).abs() < 0.05, "{ours} against {truth}");
        // Between the points, and with the op's own time.
        within(machine.matmul_ns(200.0, 256.0, 256.0, Precision::F32), 400.0 + 0.04 * 206.0 * 276.0 * 286.0);
        within(machine.pass_ns(1e6), 300.0 + 1e4);
        within(machine.pass_ns(1e6 / m.profile.habits.pass_share), 300.0 + 2.5e4);
        let span = |ranks| Span { ranks, domains: 1 };
        for n in [2u32, 4] {
            within(
                machine.collective(CollectiveOp::AllReduce, 2e5, span(n)).ns,
                900.0 + 5e4 * f64::from(n + 1),
            );
            within(machine.collective(CollectiveOp::AllToAll, 2e5, span(n)).ns, 800.0 + 1e5);
        }
        assert_eq!(machine.contention(), 4.0);
        assert_eq!(machine.launch_ns(), 0.0);
    }

    #[test]
    fn what_is_written_reads_again_and_names_its_source() {
        let m = lawful().measured();
        assert_eq!(Cluster::parse("c", &m.cluster.text()).unwrap(), m.cluster);
        assert_eq!(Profile::parse("p", &m.profile.text()).unwrap(), m.profile);
        let c = &m.cluster;
        assert_eq!((c.devices(), c.domains(), c.measured), (4, 1, true));
        for f in [&c.device.memory_bytes_per_s, &c.links[0].bytes_per_s, &c.host_bytes] {
            let begins = "measured by tessera measure on A Processor, 1 of 4 cores, 2020-02-02";
            assert!(f.source.starts_with(begins), "{}", f.source);
        }
        assert!(c.links[1].bytes_per_s.source.starts_with("not measured"));
        assert!(m.open.iter().any(|o| o.starts_with("links between hosts")));
    }

    #[test]
    fn one_rank_and_a_silent_system_are_said() {
        let mut s = lawful();
        (s.ranks, s.threads, s.own_bytes, s.hidden) = (1, 4, None, 0.0);
        (s.host.memory_bytes, s.load) = (None, Some(9.0));
        s.meetings.retain(|t| t.size.members == 2);
        let m = s.measured();
        assert_eq!(m.open.len(), 6, "{:#?}", m.open);
        assert_eq!(m.profile.base.host.contention, NOTHING_BESIDE);
        assert_eq!(Cluster::parse("c", &m.cluster.text()).unwrap(), m.cluster);
        assert_eq!(Profile::parse("p", &m.profile.text()).unwrap(), m.profile);
        // Groups of one size tell base and rate alone.
        let line = &m.profile.base.library.all_to_all.direct[0];
        assert_eq!((line.hop_ns, line.own), (0.0, 0.0));
    }
}
