//! The walk over the space: outermost knobs first, so that a broken rule drops everything below it at once.

use std::collections::BTreeMap;

use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_cost::knobs::{CacheAt, ExpertsAt, Layout, Optimizer, Recompute, Schedule, Scheme};
use tessera_mesh::{LinkClass, Precision, Tier};

use super::budget::Totals;
use super::estimate::{Node, Pipe, Prices};
use super::front::{Best, Front, Point};
use super::legal::bytes;
use super::space::{Factors, Lists, Matters, factors, lcm};
use super::{
    Candidate, Estimate, Objective, Outcome, Pins, Question, Ranked, Reason, Rejected, StageShare, Use,
};

/// Searches all arrangements that the question's pins leave. Uses fewer devices than the space names only where nothing
/// is legal on all of them.
#[must_use]
pub fn search(q: &Question) -> Outcome {
    let mut found = Walk::over(q, q.space.devices, None);
    let mut notes = Vec::new();
    let mut devices = q.space.devices;
    let (mut considered, mut priced) = (found.considered, found.priced);
    let mut rejected = std::mem::take(&mut found.rejected);
    // A mesh whose four axes are pinned names its own number of ranks; and where only memory forbids, fewer devices have
    // less of it.
    if found.legal == 0 && !q.pins.four_axes() && !rejected.contains_key(&Reason::Memory) {
        for fewer in fewer_devices(q) {
            let next = Walk::over(q, fewer, None);
            considered += next.considered;
            priced += next.priced;
            for (reason, r) in &next.rejected {
                rejected.entry(*reason).or_insert_with(|| Rejected { count: 0, ..r.clone() }).count +=
                    r.count;
            }
            if next.legal > 0 {
                notes.push(format!(
                    "nothing is legal on {} devices: {fewer} are used and {} stay idle",
                    q.space.devices,
                    q.space.devices - fewer
                ));
                (found, devices) = (next, fewer);
                break;
            }
        }
    }
    let mut prices = Prices::new(q, devices);
    let mut ranked = |points: Vec<Point>| -> Vec<Ranked> {
        points.into_iter().filter_map(|p| prices.ranked(&p.candidate).ok()).collect()
    };
    let front = ranked(found.front.shown(q.space.show));
    let best = ranked(std::mem::take(&mut found.best.points));
    if let (Objective::Deadline(limit), Some(b)) = (q.objective, best.first())
        && b.estimate.step_ns > limit.0 as f64
    {
        notes.push(format!(
            "no arrangement ends within {limit}: the nearest takes {:.1} ms",
            b.estimate.step_ns / 1e6
        ));
    }
    let leaves = best.first().is_some_and(|b| b.estimate.link_bytes.contains_key(&LinkClass::Out));
    notes.extend(error_bar(q, leaves).1);
    Outcome {
        devices,
        idle: cluster_devices(q) - devices.min(cluster_devices(q)),
        considered,
        priced,
        legal: found.legal,
        rejected,
        best,
        front,
        notes,
    }
}

/// One arrangement.
///
/// # Errors
/// T1201 to T1217, one per rule that it breaks.
pub fn estimate(q: &Question, c: &Candidate) -> Result<Ranked, Diagnostics> {
    Prices::new(q, q.space.devices).ranked(c).map_err(|reasons| {
        reasons
            .into_iter()
            .map(|(reason, says)| Diagnostic::error(reason.code(), reason.title()).at(c.text(), says))
            .collect()
    })
}

fn cluster_devices(q: &Question) -> u32 {
    q.machine.cluster.devices().max(q.space.devices)
}

/// Numbers of fewer devices that are tried.
const FEWER: usize = 16;

/// Fewer devices, most first: whole racks, or whole hosts of the last one, or powers of two below a host.
fn fewer_devices(q: &Question) -> impl Iterator<Item = u32> {
    let cluster = &q.machine.cluster;
    let host = cluster.devices_per_host.max(1);
    let rack = cluster.hosts_per_rack.max(1) * host;
    let all = q.space.devices;
    let step = if all > rack { rack } else { host };
    let many = (1..=all / step).rev().map(move |n| n * step).filter(move |n| *n < all);
    let few = (0..=host.ilog2()).rev().map(|i| 1 << i).filter(move |n| *n < host.min(all));
    many.chain(few).take(FEWER)
}

/// What a walk has seen.
pub(super) struct Walk {
    pub considered: u64,
    pub priced: u64,
    pub legal: u64,
    pub rejected: BTreeMap<Reason, Rejected>,
    pub best: Best,
    pub front: Front,
    /// Legal ones that beat the mark.
    pub better: u64,
    mark: Option<Point>,
    objective: Objective,
    /// By reason: `rejected` is told when the walk ends.
    counts: [u64; Reason::ALL.len()],
}

/// Counts of a walk that everything below a micro-batch may change.
#[derive(Debug, Clone, Copy)]
struct Tally {
    legal: u64,
    better: u64,
    rejected: [u64; BELOW.len()],
}

/// Reasons that are found below a micro-batch.
const BELOW: [Reason; 3] = [Reason::Layers, Reason::Schedule, Reason::Memory];

impl Tally {
    fn since(mut self, before: &Tally) -> Tally {
        self.legal -= before.legal;
        self.better -= before.better;
        self.rejected.iter_mut().zip(before.rejected).for_each(|(n, b)| *n -= b);
        self
    }
}

/// Who holds the optimizer, where experts and old keys lie.
#[derive(Debug, Clone, Copy)]
struct Place {
    optimizer: Optimizer,
    experts_at: ExpertsAt,
    cache_at: CacheAt,
    /// [`Prices::least_bytes`] of it.
    least_bytes: f64,
}

impl Walk {
    /// All arrangements on so many devices. With a mark, those that beat it are counted.
    pub fn over(q: &Question, devices: u32, mark: Option<Point>) -> Walk {
        Walk::with(q, devices, q.pins.four_axes(), mark)
    }

    /// The same; `axes` says whether the four axes are those of one mesh.
    pub fn with(q: &Question, devices: u32, axes: bool, mark: Option<Point>) -> Walk {
        let mut w = Walk {
            considered: 0,
            priced: 0,
            legal: 0,
            rejected: BTreeMap::new(),
            best: Best::new(q.space.keep, q.objective),
            front: Front::default(),
            better: 0,
            mark,
            objective: q.objective,
            counts: [0; Reason::ALL.len()],
        };
        let matters = Matters::of(&q.work, q.routing);
        let mut prices = Prices::new(q, devices);
        let (mut lists, mut node, mut pipe) = (Lists::default(), Node::default(), Pipe::default());
        let meshes = factors(devices, matters.experts, &q.pins, axes);
        if meshes.is_empty() {
            let f = pinned(&q.pins, devices, axes);
            lists.fill(&q.space, &q.pins, &f, q.job, matters);
            let c = begin(&f, &lists);
            w.reject(&prices, Reason::Ranks, lists.below().mesh, &c);
        }
        for f in &meshes {
            lists.fill(&q.space, &q.pins, f, q.job, matters);
            w.mesh(&mut prices, f, &lists, &mut node, &mut pipe);
        }
        for (reason, r) in &mut w.rejected {
            r.count = w.counts[*reason as usize];
        }
        w
    }

    fn mesh(&mut self, prices: &mut Prices, f: &Factors, lists: &Lists, node: &mut Node, pipe: &mut Pipe) {
        let below = lists.below();
        let mut c = Candidate { micro_batch: 0, ..begin(f, lists) };
        if let Some(reason) = prices.rules.mesh(&c) {
            return self.reject(prices, reason, below.mesh, &c);
        }
        let mut places = Vec::with_capacity(lists.places.len());
        let mut twins = Vec::new();
        for &(scheme, ring) in &lists.schemes {
            (c.layout.scheme, c.layout.ring, c.micro_batch) = (scheme, ring, 0);
            if let Some(reason) = prices.rules.scheme(&c) {
                self.reject(prices, reason, below.scheme, &c);
                continue;
            }
            for &precision in &lists.precisions {
                (c.layout.precision, c.micro_batch) = (precision, 0);
                if let Some(reason) = prices.rules.precision(&c) {
                    self.reject(prices, reason, below.precision, &c);
                    continue;
                }
                self.places(prices, &c, lists, below.place, &mut places);
                if places.is_empty() {
                    continue;
                }
                let alive = places.len() as u64;
                let mut twins_of = None;
                for &(wire, capacity) in &lists.wires {
                    (c.layout.wire, c.layout.capacity_pct) = (wire, capacity);
                    if twins_of != Some(wire) {
                        twins_of = Some(wire);
                        twins.clear();
                    }
                    for &micro_batch in &lists.micro_batches {
                        c.micro_batch = micro_batch;
                        if let Some(reason) = prices.rules.micro_batch(&c) {
                            self.reject(prices, reason, below.micro_batch * alive, &c);
                            continue;
                        }
                        for &recompute in &lists.recompute {
                            c.recompute = recompute;
                            if prices.rules.breaks(Reason::Recompute, &c) {
                                self.reject(prices, Reason::Recompute, below.recompute * alive, &c);
                                continue;
                            }
                            prices.node(&c, node);
                            if prices.drops_too_many(node) {
                                let says = || prices.drops(&c, node);
                                self.count(Reason::Drops, below.recompute * alive, &c, says);
                                continue;
                            }
                            // A capacity that drops nothing is none: what became of that one is counted again.
                            let none = node.load.is_none_or(|l| l.dropped == 0.0);
                            let key = (micro_batch, recompute);
                            if let Some((_, twin)) = twins.iter().find(|(k, _)| none && *k == key) {
                                self.again(twin);
                                continue;
                            }
                            let before = self.tally();
                            for &(schedule, interleave) in &lists.schedules {
                                (c.schedule, c.interleave) = (schedule, interleave);
                                self.pipe(prices, c, &places, node, pipe);
                            }
                            if capacity == 0 {
                                twins.push((key, self.tally().since(&before)));
                            }
                        }
                    }
                }
            }
        }
    }

    /// Who may hold the optimizer, experts and old keys: the places that no rule forbids and whose least bytes fit.
    fn places(&mut self, prices: &Prices, c: &Candidate, lists: &Lists, below: u64, places: &mut Vec<Place>) {
        places.clear();
        let limit = prices.q.machine.cluster.device.memory_bytes.value;
        for &(optimizer, experts_at, cache_at) in &lists.places {
            let c = Candidate { optimizer, experts_at, cache_at, ..*c };
            if let Some(reason) =
                [Reason::Optimizer, Reason::Tier].into_iter().find(|r| prices.rules.breaks(*r, &c))
            {
                self.reject(prices, reason, below, &c);
                continue;
            }
            let least_bytes = prices.least_bytes(&c);
            if least_bytes > limit {
                let what = "weights, what training adds to them and cache";
                self.count(Reason::Memory, below, &c, || at_least(prices, what, least_bytes));
                continue;
            }
            places.push(Place { optimizer, experts_at, cache_at, least_bytes });
        }
    }

    fn pipe(
        &mut self,
        prices: &mut Prices,
        mut c: Candidate,
        places: &[Place],
        node: &mut Node,
        pipe: &mut Pipe,
    ) {
        for reason in [Reason::Layers, Reason::Schedule] {
            if prices.rules.breaks(reason, &c) {
                return self.reject(prices, reason, places.len() as u64, &c);
            }
        }
        self.priced += places.len() as u64;
        let (devices, tokens) = (f64::from(prices.rules.devices), prices.tokens());
        let point = |step_ns: f64, bytes: f64, candidate: Candidate| {
            let rate = tokens / (step_ns * 1e-9) / devices;
            Point { step_ns, rate, bytes, candidate }
        };
        let limit = prices.q.machine.cluster.device.memory_bytes.value;
        let kept_bytes = prices.least_kept_bytes(&c, node);
        let mut least_ns = None;
        // What is moved elsewhere only where it must be is the same arrangement where nothing must.
        let mut here: Option<(Optimizer, Point)> = None;
        for place in places {
            let Place { optimizer, experts_at, cache_at, least_bytes } = *place;
            (c.optimizer, c.experts_at, c.cache_at) = (optimizer, experts_at, cache_at);
            let at_home = (experts_at, cache_at) == (ExpertsAt::Hbm, CacheAt::Hbm);
            if let Some((o, p)) = here
                && o == optimizer
            {
                self.accept(&Point { candidate: c, ..p }, false);
                continue;
            }
            let least_bytes = least_bytes + kept_bytes;
            if least_bytes > limit {
                let what = "weights, what training adds to them, cache and activations";
                self.count(Reason::Memory, 1, &c, || at_least(prices, what, least_bytes));
                continue;
            }
            let least_ns = *least_ns.get_or_insert_with(|| {
                prices.pipe(&c, node, pipe);
                prices.least_ns(&c, node)
            });
            let fit = prices.fit(&c, node, pipe);
            if !fit.fits {
                self.count(Reason::Memory, 1, &c, || too_much(prices, &prices.totals(&c, pipe, &fit)));
                continue;
            }
            let bytes = fit.hbm_bytes;
            let mut p = point(least_ns, bytes, c);
            let hope = self.hope(&p);
            if hope {
                p = point(prices.sum(&c, node, pipe, fit).step_ns, bytes, c);
            }
            if at_home {
                here = Some((optimizer, p));
            }
            self.accept(&p, hope);
        }
    }

    fn tally(&self) -> Tally {
        let rejected = BELOW.map(|r| self.counts[r as usize]);
        Tally { legal: self.legal, better: self.better, rejected }
    }

    /// Counts once more what has been counted of the same arrangements under another name.
    fn again(&mut self, t: &Tally) {
        self.considered += t.legal + t.rejected.iter().sum::<u64>();
        self.legal += t.legal;
        self.better += t.better;
        for (reason, n) in BELOW.iter().zip(t.rejected) {
            self.counts[*reason as usize] += n;
        }
    }

    /// Whether the least that a candidate could take would matter: as one of the best, on the front, or against the mark.
    fn hope(&self, least: &Point) -> bool {
        self.best.wants(least)
            || !self.front.covered(least)
            || self.mark.as_ref().is_some_and(|m| least.ahead(m, self.objective))
    }

    /// Counts a legal candidate, and keeps it where it is new and worth it.
    fn accept(&mut self, p: &Point, offer: bool) {
        self.considered += 1;
        self.legal += 1;
        if offer {
            self.best.offer(p);
            self.front.offer(p);
        }
        if self.mark.as_ref().is_some_and(|m| p.ahead(m, self.objective)) {
            self.better += 1;
        }
    }

    fn reject(&mut self, prices: &Prices, reason: Reason, count: u64, c: &Candidate) {
        self.count(reason, count, c, || prices.rules.says(reason, c));
    }

    fn count(&mut self, reason: Reason, count: u64, c: &Candidate, says: impl FnOnce() -> String) {
        self.considered += count;
        let seen = &mut self.counts[reason as usize];
        if *seen == 0 && count > 0 {
            self.rejected.insert(reason, Rejected { count: 0, example: *c, says: says() });
        }
        *seen += count;
    }
}

impl Prices<'_> {
    /// A candidate in full, or every rule that it breaks.
    pub fn ranked(&mut self, c: &Candidate) -> Result<Ranked, Vec<(Reason, String)>> {
        let broken = self.rules.all(c);
        if !broken.is_empty() {
            return Err(broken.into_iter().map(|r| (r, self.rules.says(r, c))).collect());
        }
        let (mut node, mut pipe) = (Node::default(), Pipe::default());
        self.node(c, &mut node);
        self.pipe(c, &mut node, &mut pipe);
        let fit = self.fit(c, &node, &pipe);
        if !fit.fits {
            return Err(vec![(Reason::Memory, too_much(self, &self.totals(c, &pipe, &fit)))]);
        }
        let sum = self.sum(c, &node, &mut pipe, fit);
        let stages = (0..c.pp)
            .map(|s| StageShare {
                pieces: self.pieces(c, &pipe, s),
                first: s == 0,
                last: s + 1 == c.pp,
                ns: pipe.stages[s as usize],
            })
            .collect();
        let estimate = Estimate {
            step_ns: sum.step_ns,
            times: sum.times,
            tokens_per_s: self.tokens() / (sum.step_ns * 1e-9),
            mfu: self.mfu(c, sum.step_ns),
            budget: sum.totals.budget(),
            link_bytes: LinkClass::ALL.into_iter().zip(sum.sent).filter(|(_, b)| *b > 0.0).collect(),
            error: error_bar(self.q, sum.sent[LinkClass::Out as usize] > 0.0).0,
        };
        let gates = self.gates(c, &node, &pipe, &sum);
        Ok(Ranked {
            candidate: *c,
            gates,
            stages,
            micro_batches: node.micro_batches,
            dropped: node.load.map_or(0.0, |l| l.dropped),
            estimate,
        })
    }
}

impl Prices<'_> {
    /// Whether a capacity which nobody pinned drops more than the space allows.
    fn drops_too_many(&self, node: &Node) -> bool {
        let dropped = node.load.map_or(0.0, |l| l.dropped);
        dropped > self.q.space.most_dropped && self.q.pins.capacity_pct.is_none()
    }

    fn drops(&self, c: &Candidate, node: &Node) -> String {
        format!(
            "a capacity of {} % drops {:.1} % of assignments under {} routing, more than {:.1} %",
            c.layout.capacity_pct,
            node.load.map_or(0.0, |l| l.dropped) * 100.0,
            self.q.routing.name(),
            self.q.space.most_dropped * 100.0
        )
    }
}

/// Half-width of the error bar, and why it is wider than the profile's: twice that for a job that nothing measured
/// validates, and twice on a machine that was not measured or over links that leave a domain.
fn error_bar(q: &Question, leaves: bool) -> (f64, Vec<String>) {
    let (profile, cluster) = (&q.machine.profile, &q.machine.cluster);
    if profile.error == 0.0 {
        return (0.0, vec![format!("the profile {} is a floor: no error bar is given", profile.name)]);
    }
    let (mut error, mut notes) = (profile.error, Vec::new());
    if !profile.validates(q.job.name()) {
        error *= 2.0;
        notes.push(format!(
            "nothing measured validates {} under the profile {}: the bar is doubled",
            q.job.name(),
            profile.name
        ));
    }
    if !cluster.measured {
        error *= 2.0;
        notes.push(format!(
            "{} was not measured by this project: every figure is an estimate, and the bar is doubled",
            cluster.title
        ));
    } else if leaves {
        error *= 2.0;
        notes.push(
            "some groups leave their domain, over links that were not measured: the bar is doubled".into(),
        );
    }
    (error, notes)
}

/// That even the mean of all ranks is too much.
fn at_least(prices: &Prices, what: &str, least: f64) -> String {
    let device = &prices.q.machine.cluster.device;
    format!(
        "{what} are at least {} per rank, evenly spread; {} has {}",
        bytes(least),
        device.name,
        bytes(device.memory_bytes.value)
    )
}

fn too_much(prices: &Prices, totals: &Totals) -> String {
    let cluster = &prices.q.machine.cluster;
    let (need, limit) = (totals.tier(Tier::Hbm), cluster.device.memory_bytes.value);
    let host = totals.tier(Tier::Host);
    let budget = totals.budget();
    let largest = budget.bytes.iter().filter(|((t, _), _)| *t == Tier::Hbm).max_by_key(|(_, b)| **b);
    let term = largest.map_or(String::new(), |((_, what), b)| format!(", of which {} are {b}", what.name()));
    if need <= limit && host > cluster.host_bytes.value {
        return format!("the host would hold {} and has {}", bytes(host), bytes(cluster.host_bytes.value));
    }
    if need <= limit {
        return format!("peers would hold {} beside their own{term}", bytes(totals.tier(Tier::Peer)));
    }
    format!("the fullest rank needs {} and has {}{term}", bytes(need), Bytes(limit as u64))
}

/// The first candidate of a mesh.
fn begin(f: &Factors, lists: &Lists) -> Candidate {
    let (scheme, ring) = lists.schemes.first().copied().unwrap_or((Scheme::Megatron, 1));
    let (wire, capacity_pct) = lists.wires.first().copied().unwrap_or((Precision::Bf16, 0));
    let (optimizer, experts_at, cache_at) =
        lists.places.first().copied().unwrap_or((Optimizer::Replicated, ExpertsAt::Hbm, CacheAt::Hbm));
    let (schedule, interleave) = lists.schedules.first().copied().unwrap_or((Schedule::OneFOneB, 1));
    Candidate {
        layout: Layout {
            tp: f.tp,
            ring,
            scheme,
            expert_tp: f.expert_tp,
            ep: f.ep,
            precision: lists.precisions.first().copied().unwrap_or(Precision::Bf16),
            wire,
            capacity_pct,
        },
        pp: f.pp,
        replicas: f.replicas,
        expert_replicas: f.expert_replicas,
        schedule,
        interleave,
        micro_batch: lists.micro_batches.first().copied().unwrap_or(1),
        recompute: lists.recompute.first().copied().unwrap_or(Recompute::None),
        optimizer,
        experts_at,
        cache_at,
    }
}

/// What pins that multiply to no mesh ask for, free axes at 1.
fn pinned(pins: &Pins, devices: u32, axes: bool) -> Factors {
    let one = |p: Option<u32>| p.unwrap_or(1);
    let (tp, ep, pp, dp) = (one(pins.tp), one(pins.ep), one(pins.pp), one(pins.dp));
    if axes {
        return Factors { pp, tp, ep, expert_tp: tp, replicas: ep.saturating_mul(dp), expert_replicas: dp };
    }
    let expert_tp = one(pins.expert_tp);
    if let Some(dp) = pins.dp {
        let unit = lcm(tp, expert_tp.saturating_mul(ep));
        let copies = |ranks: u32| (unit / ranks.max(1)).saturating_mul(dp);
        let (replicas, expert_replicas) = (copies(tp), copies(expert_tp.saturating_mul(ep)));
        return Factors { pp, tp, ep, expert_tp, replicas, expert_replicas };
    }
    let stage = (devices / pp).max(1);
    Factors {
        pp,
        tp,
        ep,
        expert_tp,
        replicas: stage.div_ceil(tp),
        expert_replicas: stage.div_ceil(ep.saturating_mul(expert_tp)),
    }
}

impl Use {
    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Use::Weights => "weights",
            Use::Experts => "experts",
            Use::Gradients => "gradients",
            Use::Optimizer => "optimizer",
            Use::Activations => "activations",
            Use::Cache => "cache",
            Use::Buffers => "buffers",
            Use::Library => "library",
        }
    }
}
