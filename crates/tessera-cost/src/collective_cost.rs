//! Cost model of collectives: time and bytes by algorithm, for groups within one domain or across
//! several.

use tessera_base::named_enum;
use tessera_ir::CollectiveAlgorithm;
use tessera_mesh::{Cluster, LinkClass};

use crate::machine_model::MachineModel;
use crate::profile::{AlgorithmLines, CostLine};

/// A collective, or a point-to-point message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveOp {
    /// Every rank receives the sum.
    AllReduce,
    /// Every rank receives all shards.
    AllGather,
    /// Every rank receives one shard of the sum.
    ReduceScatter,
    /// Every rank sends one shard to every rank.
    AllToAll,
    /// One rank sends its buffer to all.
    Broadcast,
    /// One rank sends its buffer to one other rank.
    SendRecv,
}

impl CollectiveOp {
    /// All collectives, in declaration order.
    pub const ALL: [CollectiveOp; 6] = [
        CollectiveOp::AllReduce,
        CollectiveOp::AllGather,
        CollectiveOp::ReduceScatter,
        CollectiveOp::AllToAll,
        CollectiveOp::Broadcast,
        CollectiveOp::SendRecv,
    ];
}

named_enum! {
    /// Algorithm of a collective. A program's tag of the same name selects the same algorithm.
    pub enum Algorithm {
        /// Every rank reads the buffers of all other ranks at once.
        OneShot = "one_shot",
        /// Reduction and broadcast over a tree: a chain within a host, a tree over hosts and
        /// domains.
        Tree = "tree",
        /// Each rank passes shards to the next rank of a ring over all ranks.
        Ring = "ring",
        /// Pairwise exchange of shards; an all-reduce does this twice.
        Direct = "direct",
        /// First within each domain, then between domains with one shard per rank.
        Hierarchical = "hierarchical",
        /// Reduction in the switches; only on links with multicast.
        Switch = "switch",
    }
}

impl From<CollectiveAlgorithm> for Algorithm {
    fn from(tag: CollectiveAlgorithm) -> Algorithm {
        match tag {
            CollectiveAlgorithm::Tree => Algorithm::Tree,
            CollectiveAlgorithm::Ring => Algorithm::Ring,
        }
    }
}

/// Size of a group and the number of domains that it touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GroupSpan {
    /// Number of ranks in the group; collectives of fewer than two ranks cost nothing.
    pub ranks: u32,
    /// Domains that the group touches; 1 for a group within one domain.
    pub domains: u32,
}

impl GroupSpan {
    /// A group of a single rank, which communicates with no other.
    pub const ONE: GroupSpan = GroupSpan { ranks: 1, domains: 1 };

    /// Returns the span of groups of `ranks` ranks with stride `stride`, laid out side by side from
    /// rank 0: the span of the group that touches the most domains. With `tp` fastest, tp has
    /// stride 1 and the next axis has stride `tp`.
    #[must_use]
    pub fn from_stride(ranks: u32, stride: u32, cluster: &Cluster) -> GroupSpan {
        let (n, stride, domain) =
            (u64::from(ranks.max(1)), u64::from(stride.max(1)), u64::from(cluster.domain_size.max(1)));
        let max_domains = n.min(u64::from(cluster.domain_count()));
        let block = n * stride;
        let touched = if n == 1 || max_domains == 1 || domain.is_multiple_of(block) {
            1
        } else if stride >= domain {
            n
        } else {
            // Blocks begin at every multiple of gcd(block, domain) within a domain, and groups
            // begin anywhere in the first stride of a block. The group with the latest start
            // reaches furthest.
            let common = gcd(block, domain);
            let latest = domain - common + (stride - 1).min(common - 1);
            // A cluster without room for a second block has only groups of the first block.
            let latest = if u64::from(cluster.device_count()) < 2 * block { stride - 1 } else { latest };
            (latest + (n - 1) * stride) / domain + 1
        };
        GroupSpan { ranks: n as u32, domains: touched.min(max_domains) as u32 }
    }

    /// Returns the mean number of ranks per domain.
    fn ranks_per_domain(self) -> f64 {
        f64::from(self.ranks) / f64::from(self.domains.max(1))
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Time and traffic of one collective over one group, and the algorithm that it uses.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CollectiveCost {
    /// Time from the last rank's call to the last rank's result.
    pub ns: f64,
    /// The algorithm of the tag, the one that the profile's threshold selects, or the cheapest.
    pub algorithm: Algorithm,
    /// Bytes that a rank sends, by link class in the order of [`LinkClass::ALL`]: the mean over the
    /// group's ranks, or the sender's bytes for [`CollectiveOp::SendRecv`].
    pub sent_bytes: [f64; 3],
}

impl CollectiveCost {
    /// The cost without any transfer, as in a group of one rank; its algorithm has no meaning.
    pub const NONE: CollectiveCost =
        CollectiveCost { ns: 0.0, algorithm: Algorithm::Direct, sent_bytes: [0.0; 3] };
}

/// Bytes and hops of an algorithm, `[within domains, between domains]`.
#[derive(Clone, Copy)]
struct TransferVolume {
    /// Bytes that a rank sends, mean over the group.
    sent_bytes: [f64; 2],
    /// Bytes through the link of the busiest rank, which determine the end.
    busiest_bytes: [f64; 2],
    /// Number of steps that wait for a neighbour.
    hops: [f64; 2],
    /// Whether the two links are used one after the other instead of concurrently.
    sequential: bool,
}

impl MachineModel {
    /// Returns the cost of a collective over a group, with the algorithm that the executor's library
    /// would choose. `bytes` is the full buffer of one rank: before an all-reduce, a reduce-scatter
    /// or an all-to-all (its own shard included), and after an all-gather.
    #[must_use]
    pub fn collective_cost(&self, op: CollectiveOp, bytes: f64, span: GroupSpan) -> CollectiveCost {
        self.tagged_collective_cost(op, bytes, span, None)
    }

    /// Returns the cost as [`MachineModel::collective_cost`] does, with the algorithm of the tag. If the
    /// executor's library or the group does not support it, the cheapest algorithm counts.
    #[must_use]
    pub fn tagged_collective_cost(
        &self,
        op: CollectiveOp,
        bytes: f64,
        span: GroupSpan,
        tag: Option<Algorithm>,
    ) -> CollectiveCost {
        if span.ranks < 2 {
            return CollectiveCost::NONE;
        }
        let mut best = self.choose_algorithm(op, bytes, span, tag);
        if span.domains > 1 {
            // A group that crosses domains is never faster than a group of the same size within one
            // domain.
            let within = self.choose_algorithm(op, bytes, GroupSpan { domains: 1, ..span }, tag);
            best.ns = best.ns.max(within.ns + self.out_latency_ns());
        }
        let curves = self.device_curves();
        if !curves.host.captured {
            best.ns += curves.library.eager_ns;
        }
        best
    }

    /// Returns the cost with one algorithm, or `None` if the executor's library or the group does
    /// not support the algorithm.
    #[must_use]
    pub fn collective_cost_with(
        &self,
        algorithm: Algorithm,
        op: CollectiveOp,
        bytes: f64,
        span: GroupSpan,
    ) -> Option<CollectiveCost> {
        if span.ranks < 2 {
            return None;
        }
        let lines = self.cost_lines(op);
        let multicast = self.cluster.link_spec(LinkClass::Domain).multicast;
        let (list, wire) = match algorithm {
            Algorithm::OneShot => (&lines.one_shot, one_shot_volume(op, bytes, span)?),
            Algorithm::Tree => (&lines.tree, self.tree_volume(op, bytes, span)?),
            Algorithm::Ring => (&lines.ring, ring_volume(op, bytes, span)?),
            Algorithm::Direct => (&lines.direct, direct_volume(op, bytes, span)?),
            Algorithm::Switch if multicast => (&lines.switch, switch_volume(op, bytes, span)?),
            Algorithm::Switch => return None,
            Algorithm::Hierarchical => return self.hierarchical_cost(op, bytes, span),
        };
        let piece = bytes / f64::from(span.ranks);
        let ns = list.iter().map(|l| self.line_ns(l, &wire, piece)).min_by(f64::total_cmp)?;
        Some(CollectiveCost { ns, algorithm, sent_bytes: [wire.sent_bytes[0], wire.sent_bytes[1], 0.0] })
    }

    /// Returns the cost of the tag's algorithm; without a tag, that of the algorithm that the profile's
    /// threshold selects, or of the cheapest one.
    fn choose_algorithm(
        &self,
        op: CollectiveOp,
        bytes: f64,
        span: GroupSpan,
        tag: Option<Algorithm>,
    ) -> CollectiveCost {
        let by_threshold = self.cost_lines(op).ring_from_bytes.map(|from| match bytes < from {
            true => Algorithm::Tree,
            false => Algorithm::Ring,
        });
        if let Some(wanted) = tag.or(by_threshold)
            && let Some(t) = self.collective_cost_with(wanted, op, bytes, span)
        {
            return t;
        }
        let all = Algorithm::ALL.into_iter().filter_map(|a| self.collective_cost_with(a, op, bytes, span));
        all.min_by(|a, b| a.ns.total_cmp(&b.ns)).unwrap_or(CollectiveCost::NONE)
    }

    fn cost_lines(&self, op: CollectiveOp) -> &AlgorithmLines {
        let library = &self.device_curves().library;
        match op {
            CollectiveOp::AllReduce => &library.all_reduce,
            CollectiveOp::AllGather | CollectiveOp::ReduceScatter => &library.gather,
            CollectiveOp::AllToAll => &library.all_to_all,
            CollectiveOp::Broadcast => &library.broadcast,
            CollectiveOp::SendRecv => &library.send,
        }
    }

    fn out_latency_ns(&self) -> f64 {
        self.cluster.link_spec(LinkClass::Network).latency_ns.value
    }

    /// Returns the bandwidth that large transfers reach, in bytes per nanosecond.
    fn link_rate(&self, class: LinkClass) -> f64 {
        let link = self.cluster.link_spec(class);
        let share = if class == LinkClass::Network { self.device_curves().library.network_rate } else { 1.0 };
        link.bytes_per_s.value * link.achievable.value * share / 1e9
    }

    fn line_ns(&self, line: &CostLine, wire: &TransferVolume, piece: f64) -> f64 {
        let latency =
            line.base_ns + wire.hops[0] * line.hop_ns + wire.hops[1] * self.out_latency_ns().max(line.hop_ns);
        let self_copy = if wire.busiest_bytes[0] > 0.0 { line.self_copy * piece } else { 0.0 };
        let near =
            (wire.busiest_bytes[0] + self_copy) / (line.rate_share * self.link_rate(LinkClass::Domain));
        let far = wire.busiest_bytes[1] / (line.network_share * self.link_rate(LinkClass::Network));
        latency + if wire.sequential { near + far } else { near.max(far) }
    }

    /// A chain over the devices of a host, a tree over hosts and a tree over domains. Two trees
    /// share the load, so that no rank sends more than around a ring.
    fn tree_volume(&self, op: CollectiveOp, bytes: f64, span: GroupSpan) -> Option<TransferVolume> {
        let passes = match op {
            CollectiveOp::AllReduce => 2.0,
            CollectiveOp::Broadcast => 1.0,
            _ => return None,
        };
        let (n, domains, near) = (f64::from(span.ranks), f64::from(span.domains), span.ranks_per_domain());
        let host = near.min(f64::from(self.cluster.devices_per_host.max(1)));
        let depth = |x: f64| x.max(1.0).log2().ceil();
        let within = passes * (n - domains) / n * bytes;
        let between = passes * (domains - 1.0) / n * bytes;
        Some(TransferVolume {
            sent_bytes: [within, between],
            busiest_bytes: [if near > 1.0 { passes * (n - 1.0) / n * bytes } else { 0.0 }, between],
            hops: [passes * ((host - 1.0).ceil() + depth((near / host).ceil())), passes * depth(domains)],
            sequential: false,
        })
    }

    /// One shard per rank within the domain, exchange of the shards between domains, and the
    /// reverse.
    fn hierarchical_cost(&self, op: CollectiveOp, bytes: f64, span: GroupSpan) -> Option<CollectiveCost> {
        let (domains, near) = (span.domains, span.ranks / span.domains.max(1));
        if domains < 2 || near < 2 || !span.ranks.is_multiple_of(domains) {
            return None;
        }
        let inside = GroupSpan { ranks: near, domains: 1 };
        let across = GroupSpan { ranks: domains, domains };
        let piece = bytes / f64::from(near);
        let steps: &[(CollectiveOp, f64, GroupSpan)] = match op {
            CollectiveOp::AllReduce => &[
                (CollectiveOp::ReduceScatter, bytes, inside),
                (CollectiveOp::AllReduce, piece, across),
                (CollectiveOp::AllGather, bytes, inside),
            ],
            CollectiveOp::ReduceScatter | CollectiveOp::AllGather => {
                &[(op, bytes, inside), (op, piece, across)]
            }
            CollectiveOp::AllToAll => &[(op, bytes, inside), (op, bytes, across)],
            CollectiveOp::Broadcast | CollectiveOp::SendRecv => return None,
        };
        let mut total = CollectiveCost { algorithm: Algorithm::Hierarchical, ..CollectiveCost::NONE };
        for (op, bytes, span) in steps {
            let step = self.choose_algorithm(*op, *bytes, *span, None);
            total.ns += step.ns;
            for (sum, sent) in total.sent_bytes.iter_mut().zip(step.sent_bytes) {
                *sum += sent;
            }
        }
        Some(total)
    }
}

/// Every rank sends its whole buffer to every other rank.
fn one_shot_volume(op: CollectiveOp, bytes: f64, span: GroupSpan) -> Option<TransferVolume> {
    let peers = f64::from(span.ranks) - 1.0;
    let sent = match op {
        CollectiveOp::AllReduce => peers * bytes,
        CollectiveOp::Broadcast => peers * bytes / f64::from(span.ranks),
        _ => return None,
    };
    (span.domains == 1).then_some(TransferVolume {
        sent_bytes: [sent, 0.0],
        busiest_bytes: [peers * bytes, 0.0],
        hops: [peers, 0.0],
        sequential: false,
    })
}

/// One ring per rank of a domain, so that the outward link of each rank carries the share of one
/// ring.
fn ring_volume(op: CollectiveOp, bytes: f64, span: GroupSpan) -> Option<TransferVolume> {
    let (n, domains, near) = (f64::from(span.ranks), f64::from(span.domains), span.ranks_per_domain());
    let passes = match op {
        CollectiveOp::AllReduce => 2.0,
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter | CollectiveOp::Broadcast => 1.0,
        CollectiveOp::AllToAll | CollectiveOp::SendRecv => return None,
    };
    // A broadcast goes around once and need not close the ring.
    let open = op == CollectiveOp::Broadcast;
    let edge = passes * bytes * if open { 1.0 } else { (n - 1.0) / n };
    let edges = if open { n - 1.0 } else { n };
    let crossing = match (span.domains, open) {
        (1, _) => 0.0,
        (_, true) => domains - 1.0,
        (_, false) => domains,
    };
    let out_hops = crossing.min(n - 1.0);
    Some(TransferVolume {
        sent_bytes: [edge * (edges - crossing) / n, edge * crossing / n],
        busiest_bytes: [if near > 1.0 { edge } else { 0.0 }, if crossing > 0.0 { edge / near } else { 0.0 }],
        hops: [passes * (n - 1.0 - out_hops), passes * out_hops],
        sequential: false,
    })
}

/// One shard to every peer; an all-reduce does this twice, once to reduce and once to distribute.
fn direct_volume(op: CollectiveOp, bytes: f64, span: GroupSpan) -> Option<TransferVolume> {
    let (n, near) = (f64::from(span.ranks), span.ranks_per_domain());
    let crosses = if span.domains > 1 { 1.0 } else { 0.0 };
    let passes = match op {
        CollectiveOp::AllReduce => 2.0,
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter | CollectiveOp::AllToAll => 1.0,
        CollectiveOp::SendRecv => {
            let sent = [bytes * (1.0 - crosses), bytes * crosses];
            return Some(TransferVolume {
                sent_bytes: sent,
                busiest_bytes: sent,
                hops: [1.0 - crosses, crosses],
                sequential: true,
            });
        }
        CollectiveOp::Broadcast => return None,
    };
    let sent = [passes * (near - 1.0) / n * bytes, passes * (n - near) / n * bytes];
    Some(TransferVolume {
        sent_bytes: sent,
        busiest_bytes: sent,
        hops: [passes * (n - 1.0), passes * crosses],
        sequential: true,
    })
}

/// Every buffer goes up to the switches once and down once.
fn switch_volume(op: CollectiveOp, bytes: f64, span: GroupSpan) -> Option<TransferVolume> {
    let wire = TransferVolume {
        sent_bytes: [bytes, 0.0],
        busiest_bytes: [bytes, 0.0],
        hops: [f64::from(span.ranks) - 1.0, 0.0],
        sequential: false,
    };
    (op == CollectiveOp::AllReduce && span.domains == 1).then_some(wire)
}
