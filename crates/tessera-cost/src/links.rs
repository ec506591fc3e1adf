//! Time and bytes of collectives by algorithm, over groups that stand within a domain or across several.

use tessera_mesh::{Cluster, LinkClass};

use crate::profile::{Library, Line, Lines};

/// A collective, or one rank's message to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum CollectiveOp {
    /// Sum on every rank.
    AllReduce,
    /// Pieces to a whole on every rank.
    AllGather,
    /// Sum, a piece on every rank.
    ReduceScatter,
    /// A piece of every rank to every rank.
    AllToAll,
    /// One rank's buffer to all.
    Broadcast,
    /// One rank's buffer to one other.
    SendRecv,
}

impl CollectiveOp {
    /// All, in the order of their declaration.
    pub const ALL: [CollectiveOp; 6] = [
        CollectiveOp::AllReduce,
        CollectiveOp::AllGather,
        CollectiveOp::ReduceScatter,
        CollectiveOp::AllToAll,
        CollectiveOp::Broadcast,
        CollectiveOp::SendRecv,
    ];
}

/// How a collective is done. A program's tag of the same name stands for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Algorithm {
    /// Every rank reads all others' buffers at once.
    OneShot,
    /// Up and down a tree: a chain within a host, a tree over hosts and domains.
    Tree,
    /// Around a ring.
    Ring,
    /// Pieces exchanged pairwise; for an all-reduce twice.
    Direct,
    /// Within each domain first, then between domains, one piece per rank.
    Hierarchical,
    /// Added up by the switches; on links with multicast alone.
    Switch,
}

impl Algorithm {
    /// All algorithms.
    pub const ALL: [Algorithm; 6] = [
        Algorithm::OneShot,
        Algorithm::Tree,
        Algorithm::Ring,
        Algorithm::Direct,
        Algorithm::Hierarchical,
        Algorithm::Switch,
    ];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["one_shot", "tree", "ring", "direct", "hierarchical", "switch"][self as usize]
    }
}

/// Where the ranks of a group stand.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Span {
    /// Ranks of the group.
    pub ranks: u32,
    /// Domains it touches: 1 within one.
    pub domains: u32,
}

impl Span {
    /// One rank alone.
    pub const ONE: Span = Span { ranks: 1, domains: 1 };

    /// Groups of `ranks` ranks that stand `stride` apart, groups side by side from rank 0 on: the group that touches
    /// the most domains. With `tp` fastest, tp has stride 1 and what comes next has stride `tp`.
    #[must_use]
    pub fn of(ranks: u32, stride: u32, cluster: &Cluster) -> Span {
        let (n, stride, domain) =
            (u64::from(ranks.max(1)), u64::from(stride.max(1)), u64::from(cluster.domain.max(1)));
        let most = n.min(u64::from(cluster.domains()));
        let block = n * stride;
        let touched = if n == 1 || most == 1 || domain.is_multiple_of(block) {
            1
        } else if stride >= domain {
            n
        } else {
            // Blocks begin at every multiple of the common divisor within a domain, groups anywhere in a block's
            // first stride: the latest beginning reaches furthest.
            let common = gcd(block, domain);
            let latest = domain - common + (stride - 1).min(common - 1);
            // A cluster that has no room for a second block has only groups of the first.
            let latest = if u64::from(cluster.devices()) < 2 * block { stride - 1 } else { latest };
            (latest + (n - 1) * stride) / domain + 1
        };
        Span { ranks: n as u32, domains: touched.min(most) as u32 }
    }

    /// Ranks per domain, on average.
    fn near(self) -> f64 {
        f64::from(self.ranks) / f64::from(self.domains.max(1))
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// What a collective takes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Transfer {
    /// From the last rank's call to the last rank's result.
    pub ns: f64,
    /// The cheapest algorithm, or the one that the profile's threshold picks.
    pub algorithm: Algorithm,
    /// Bytes that a rank sends, by link class in the order of [`LinkClass::ALL`]; the mean over the group's ranks, and for
    /// [`CollectiveOp::SendRecv`] the sender's.
    pub sent: [f64; 3],
}

impl Transfer {
    /// Nothing sent.
    pub const NONE: Transfer = Transfer { ns: 0.0, algorithm: Algorithm::Direct, sent: [0.0; 3] };
}

/// A cluster's links under a library's constants.
pub(crate) struct Fabric<'a> {
    cluster: &'a Cluster,
    library: &'a Library,
}

/// What an algorithm moves, within domains and between them.
#[derive(Clone, Copy)]
struct Wire {
    /// Bytes that a rank sends, mean over the group.
    sent: [f64; 2],
    /// Bytes that hold up the end: through the busiest rank's link.
    busiest: [f64; 2],
    /// Steps that wait for a neighbour.
    hops: [f64; 2],
    /// Whether the two links work one after the other, rather than at once.
    in_turn: bool,
}

impl<'a> Fabric<'a> {
    pub(crate) fn new(cluster: &'a Cluster, library: &'a Library) -> Fabric<'a> {
        Fabric { cluster, library }
    }

    /// The collective by the algorithm that a library would choose.
    pub(crate) fn cost(&self, op: CollectiveOp, bytes: f64, span: Span, eager: bool) -> Transfer {
        if span.ranks < 2 {
            return Transfer::NONE;
        }
        let mut best = self.choose(op, bytes, span);
        if span.domains > 1 {
            // A group that crosses domains is never faster than one of the same size that does not.
            let within = self.choose(op, bytes, Span { domains: 1, ..span });
            best.ns = best.ns.max(within.ns + self.latency_out());
        }
        if eager {
            best.ns += self.library.eager_ns;
        }
        best
    }

    /// The collective by one algorithm; none where the library or the group has no such one.
    pub(crate) fn by(
        &self,
        algorithm: Algorithm,
        op: CollectiveOp,
        bytes: f64,
        span: Span,
    ) -> Option<Transfer> {
        if span.ranks < 2 {
            return None;
        }
        let lines = self.lines(op);
        let multicast = self.cluster.link(LinkClass::Domain).multicast;
        let (list, wire) = match algorithm {
            Algorithm::OneShot => (&lines.one_shot, one_shot(op, bytes, span)?),
            Algorithm::Tree => (&lines.tree, self.tree(op, bytes, span)?),
            Algorithm::Ring => (&lines.ring, ring(op, bytes, span)?),
            Algorithm::Direct => (&lines.direct, direct(op, bytes, span)?),
            Algorithm::Switch if multicast => (&lines.switch, switch(op, bytes, span)?),
            Algorithm::Switch => return None,
            Algorithm::Hierarchical => return self.hierarchical(op, bytes, span),
        };
        let piece = bytes / f64::from(span.ranks);
        let ns = list.iter().map(|l| self.time(l, &wire, piece)).min_by(f64::total_cmp)?;
        Some(Transfer { ns, algorithm, sent: [wire.sent[0], wire.sent[1], 0.0] })
    }

    /// Bytes from which a ring is at least as fast as a tree.
    pub(crate) fn crossing(&self, op: CollectiveOp, span: Span) -> Option<f64> {
        let ring_wins = |bytes: f64| -> Option<bool> {
            let ns = |a| Some(self.by(a, op, bytes, span)?.ns);
            Some(ns(Algorithm::Ring)? <= ns(Algorithm::Tree)?)
        };
        let (mut small, mut large) = (1.0_f64, 16.0 * 1024.0 * 1024.0 * 1024.0);
        let threshold = self.lines(op).ring_from_bytes;
        if threshold.is_some() {
            return ring_wins(1.0).and(threshold);
        }
        if ring_wins(small)? || !ring_wins(large)? {
            return None;
        }
        while large / small > 1.001 {
            let middle = (small * large).sqrt();
            *(if ring_wins(middle)? { &mut large } else { &mut small }) = middle;
        }
        Some(large)
    }

    /// The cheapest, or what the profile's threshold picks.
    fn choose(&self, op: CollectiveOp, bytes: f64, span: Span) -> Transfer {
        if let Some(from) = self.lines(op).ring_from_bytes {
            let wanted = if bytes < from { Algorithm::Tree } else { Algorithm::Ring };
            if let Some(t) = self.by(wanted, op, bytes, span) {
                return t;
            }
        }
        let all = Algorithm::ALL.into_iter().filter_map(|a| self.by(a, op, bytes, span));
        all.min_by(|a, b| a.ns.total_cmp(&b.ns)).unwrap_or(Transfer::NONE)
    }

    fn lines(&self, op: CollectiveOp) -> &'a Lines {
        match op {
            CollectiveOp::AllReduce => &self.library.all_reduce,
            CollectiveOp::AllGather | CollectiveOp::ReduceScatter => &self.library.gather,
            CollectiveOp::AllToAll => &self.library.all_to_all,
            CollectiveOp::Broadcast => &self.library.broadcast,
            CollectiveOp::SendRecv => &self.library.send,
        }
    }

    fn latency_out(&self) -> f64 {
        self.cluster.link(LinkClass::Out).latency_ns.value
    }

    /// Bytes per nanosecond that large transfers reach.
    fn rate(&self, class: LinkClass) -> f64 {
        let link = self.cluster.link(class);
        let share = if class == LinkClass::Out { self.library.out_rate } else { 1.0 };
        link.bytes_per_s.value * link.achievable.value * share / 1e9
    }

    fn time(&self, line: &Line, wire: &Wire, piece: f64) -> f64 {
        let late =
            line.base_ns + wire.hops[0] * line.hop_ns + wire.hops[1] * self.latency_out().max(line.hop_ns);
        let own = if wire.busiest[0] > 0.0 { line.own * piece } else { 0.0 };
        let near = (wire.busiest[0] + own) / (line.rate * self.rate(LinkClass::Domain));
        let far = wire.busiest[1] / (line.far * self.rate(LinkClass::Out));
        late + if wire.in_turn { near + far } else { near.max(far) }
    }

    /// A chain over the devices of a host, a tree over hosts and one over domains; two trees share the load, so that
    /// no rank sends more than around a ring.
    fn tree(&self, op: CollectiveOp, bytes: f64, span: Span) -> Option<Wire> {
        let passes = match op {
            CollectiveOp::AllReduce => 2.0,
            CollectiveOp::Broadcast => 1.0,
            _ => return None,
        };
        let (n, domains, near) = (f64::from(span.ranks), f64::from(span.domains), span.near());
        let host = near.min(f64::from(self.cluster.devices_per_host.max(1)));
        let depth = |x: f64| x.max(1.0).log2().ceil();
        let within = passes * (n - domains) / n * bytes;
        let between = passes * (domains - 1.0) / n * bytes;
        Some(Wire {
            sent: [within, between],
            busiest: [if near > 1.0 { passes * (n - 1.0) / n * bytes } else { 0.0 }, between],
            hops: [passes * ((host - 1.0).ceil() + depth((near / host).ceil())), passes * depth(domains)],
            in_turn: false,
        })
    }

    /// A piece per rank within the domain, the pieces between domains, and back.
    fn hierarchical(&self, op: CollectiveOp, bytes: f64, span: Span) -> Option<Transfer> {
        let (domains, near) = (span.domains, span.ranks / span.domains.max(1));
        if domains < 2 || near < 2 || !span.ranks.is_multiple_of(domains) {
            return None;
        }
        let inside = Span { ranks: near, domains: 1 };
        let across = Span { ranks: domains, domains };
        let piece = bytes / f64::from(near);
        let steps: &[(CollectiveOp, f64, Span)] = match op {
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
        let mut total = Transfer { algorithm: Algorithm::Hierarchical, ..Transfer::NONE };
        for (op, bytes, span) in steps {
            let step = self.choose(*op, *bytes, *span);
            total.ns += step.ns;
            for (sum, sent) in total.sent.iter_mut().zip(step.sent) {
                *sum += sent;
            }
        }
        Some(total)
    }
}

/// Everyone to everyone, whole buffers.
fn one_shot(op: CollectiveOp, bytes: f64, span: Span) -> Option<Wire> {
    let peers = f64::from(span.ranks) - 1.0;
    let sent = match op {
        CollectiveOp::AllReduce => peers * bytes,
        CollectiveOp::Broadcast => peers * bytes / f64::from(span.ranks),
        _ => return None,
    };
    (span.domains == 1).then_some(Wire {
        sent: [sent, 0.0],
        busiest: [peers * bytes, 0.0],
        hops: [peers, 0.0],
        in_turn: false,
    })
}

/// As many rings as a domain has ranks, so that each rank's outward link carries one ring's share.
fn ring(op: CollectiveOp, bytes: f64, span: Span) -> Option<Wire> {
    let (n, domains, near) = (f64::from(span.ranks), f64::from(span.domains), span.near());
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
    Some(Wire {
        sent: [edge * (edges - crossing) / n, edge * crossing / n],
        busiest: [if near > 1.0 { edge } else { 0.0 }, if crossing > 0.0 { edge / near } else { 0.0 }],
        hops: [passes * (n - 1.0 - out_hops), passes * out_hops],
        in_turn: false,
    })
}

/// A piece to every peer; an all-reduce does so twice, once to add and once to hand round.
fn direct(op: CollectiveOp, bytes: f64, span: Span) -> Option<Wire> {
    let (n, near) = (f64::from(span.ranks), span.near());
    let crosses = if span.domains > 1 { 1.0 } else { 0.0 };
    let passes = match op {
        CollectiveOp::AllReduce => 2.0,
        CollectiveOp::AllGather | CollectiveOp::ReduceScatter | CollectiveOp::AllToAll => 1.0,
        CollectiveOp::SendRecv => {
            let sent = [bytes * (1.0 - crosses), bytes * crosses];
            return Some(Wire { sent, busiest: sent, hops: [1.0 - crosses, crosses], in_turn: true });
        }
        CollectiveOp::Broadcast => return None,
    };
    let sent = [passes * (near - 1.0) / n * bytes, passes * (n - near) / n * bytes];
    Some(Wire { sent, busiest: sent, hops: [passes * (n - 1.0), passes * crosses], in_turn: true })
}

/// Up to the switches once and down once.
fn switch(op: CollectiveOp, bytes: f64, span: Span) -> Option<Wire> {
    let wire = Wire {
        sent: [bytes, 0.0],
        busiest: [bytes, 0.0],
        hops: [f64::from(span.ranks) - 1.0, 0.0],
        in_turn: false,
    };
    (op == CollectiveOp::AllReduce && span.domains == 1).then_some(wire)
}
