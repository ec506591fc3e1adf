//! Enumerates the search space, outermost knobs first, so that a violated constraint removes the
//! whole subtree below it.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::params::{
    ExpertStorage, KvCacheStorage, LayerLayout, OptimizerSharding, PipelineSchedule, Recompute, TpScheme,
};
use tessera_mesh::{LinkClass, Precision};

use super::estimate::{Estimator, LayoutCost, PipelineCost};
use super::pareto::{ParetoFront, ScoredCandidate, TopCandidates};
use super::rank_candidate::{error_bar, explain_lower_bound, explain_overflow};
use super::space::{KnobValues, MeshFactors, RelevantKnobs, factor_meshes, least_common_multiple};
use super::{Candidate, Objective, Pins, RankedCandidate, Reason, Rejection, SearchOutcome, SearchQuery};

/// Searches all candidates that the query's pins leave. Uses fewer devices than the search space
/// names only where no candidate is legal on all of them.
#[must_use]
pub fn search(q: &SearchQuery) -> SearchOutcome {
    let mut found = Enumeration::run(q, q.space.devices, None);
    let mut notes = Vec::new();
    let mut devices = q.space.devices;
    let (mut considered, mut priced) = (found.candidate_count, found.costed_count);
    let mut rejected = std::mem::take(&mut found.rejected);
    // A query with four pinned axes fixes its own number of ranks. If only memory rejects
    // candidates, fewer devices have even less of it.
    if found.legal_count == 0 && !q.pins.has_mesh_axes() && !rejected.contains_key(&Reason::Memory) {
        let experts = RelevantKnobs::from_model(&q.work, q.routing).experts;
        // Pins that multiply to more ranks than a smaller count has say nothing about it.
        let has_mesh = |n: &u32| !factor_meshes(*n, experts, &q.pins, false).is_empty();
        for fewer in smaller_device_counts(q).filter(has_mesh) {
            let next = Enumeration::run(q, fewer, None);
            considered += next.candidate_count;
            priced += next.costed_count;
            for (reason, r) in &next.rejected {
                rejected.entry(*reason).or_insert_with(|| Rejection { count: 0, ..r.clone() }).count +=
                    r.count;
            }
            if next.legal_count > 0 {
                notes.push(format!(
                    "no mapping is legal on {} devices: {fewer} are used and {} stay idle",
                    q.space.devices,
                    q.space.devices - fewer
                ));
                (found, devices) = (next, fewer);
                break;
            }
        }
    }
    let mut prices = Estimator::new(q, devices);
    let mut rank_points = |points: Vec<ScoredCandidate>| -> Vec<RankedCandidate> {
        points.into_iter().filter_map(|p| prices.rank_candidate(&p.candidate).ok()).collect()
    };
    let front = rank_points(found.front.sample_evenly(q.space.front_count));
    let best = rank_points(std::mem::take(&mut found.best.points));
    if let (Objective::Deadline(limit), Some(b)) = (q.objective, best.first())
        && b.estimate.step_ns > limit.0 as f64
    {
        notes.push(format!(
            "no mapping meets the deadline of {limit}: the closest takes {:.1} ms",
            b.estimate.step_ns / 1e6
        ));
    }
    let leaves_domain = best.first().is_some_and(|b| b.estimate.link_bytes.contains_key(&LinkClass::Network));
    notes.extend(error_bar(&q.machine, q.job.name(), leaves_domain).1);
    SearchOutcome {
        used_devices: devices,
        idle_devices: available_devices(q) - devices.min(available_devices(q)),
        candidate_count: considered,
        costed_count: priced,
        legal_count: found.legal_count,
        rejected,
        best_candidates: best,
        pareto_front: front,
        notes,
    }
}

/// Estimates one candidate.
///
/// # Errors
/// T1201 to T1217, one for each constraint that the candidate violates.
pub fn estimate_candidate(q: &SearchQuery, c: &Candidate) -> Result<RankedCandidate, Diagnostics> {
    Estimator::new(q, q.space.devices).rank_candidate(c).map_err(|reasons| {
        reasons
            .into_iter()
            .map(|(reason, explanation)| {
                Diagnostic::error(reason.code(), reason.title()).with_label(c.to_text(), explanation)
            })
            .collect()
    })
}

fn available_devices(q: &SearchQuery) -> u32 {
    q.machine.cluster.device_count().max(q.space.devices)
}

/// Maximum number of smaller device counts to try if no candidate is legal on all devices.
const MAX_SMALLER_COUNTS: usize = 16;

/// Returns smaller device counts, largest first: whole racks, or whole hosts within one rack, or
/// powers of two below a host.
fn smaller_device_counts(q: &SearchQuery) -> impl Iterator<Item = u32> {
    let cluster = &q.machine.cluster;
    let host = cluster.devices_per_host.max(1);
    let rack = cluster.hosts_per_rack.max(1) * host;
    let all = q.space.devices;
    let step = if all > rack { rack } else { host };
    let many = (1..=all / step).rev().map(move |n| n * step).filter(move |n| *n < all);
    let few = (0..=host.ilog2()).rev().map(|i| 1 << i).filter(move |n| *n < host.min(all));
    many.chain(few).take(MAX_SMALLER_COUNTS)
}

/// Counts over all candidates on one number of devices, with the best ones and the Pareto front.
pub(super) struct Enumeration {
    pub candidate_count: u64,
    pub costed_count: u64,
    pub legal_count: u64,
    pub rejected: BTreeMap<Reason, Rejection>,
    pub best: TopCandidates,
    pub front: ParetoFront,
    /// Number of legal candidates that beat the reference candidate; 0 without one.
    pub better_count: u64,
    reference: Option<ScoredCandidate>,
    objective: Objective,
    /// Rejected candidates by reason; copied to `rejected` when the enumeration ends.
    counts: [u64; Reason::ALL.len()],
}

/// The counters of an [`Enumeration`] that can change once micro-batch and recomputation are
/// chosen.
#[derive(Debug, Clone, Copy)]
struct SubtreeTally {
    legal: u64,
    better: u64,
    rejected: [u64; SUBTREE_REASONS.len()],
}

/// The tallies of the micro-batches and recomputation policies of one layout without a capacity.
type EqualSubtrees = Vec<((u32, Recompute), SubtreeTally)>;

/// Reasons that can reject a candidate once its micro-batch and recomputation are chosen.
const SUBTREE_REASONS: [Reason; 3] = [Reason::Layers, Reason::PipelineSchedule, Reason::Memory];

impl SubtreeTally {
    fn difference_from(mut self, before: &SubtreeTally) -> SubtreeTally {
        self.legal -= before.legal;
        self.better -= before.better;
        self.rejected.iter_mut().zip(before.rejected).for_each(|(n, b)| *n -= b);
        self
    }
}

/// The sharding of the optimizer and the placement of experts and old keys.
#[derive(Debug, Clone, Copy)]
struct StatePlacement {
    optimizer: OptimizerSharding,
    experts_at: ExpertStorage,
    cache_at: KvCacheStorage,
    /// The result of [`Estimator::min_bytes`] for this placement.
    min_bytes: f64,
}

impl Enumeration {
    /// Enumerates all candidates on `devices` devices. With a reference candidate, counts the
    /// candidates that beat it.
    pub fn run(q: &SearchQuery, devices: u32, reference: Option<ScoredCandidate>) -> Enumeration {
        Enumeration::run_with_axes(q, devices, q.pins.has_mesh_axes(), reference)
    }

    /// Like [`Enumeration::run`]; `axes` states whether the four axes are those of one mesh.
    pub fn run_with_axes(
        q: &SearchQuery,
        devices: u32,
        axes: bool,
        reference: Option<ScoredCandidate>,
    ) -> Enumeration {
        let mut w = Enumeration {
            candidate_count: 0,
            costed_count: 0,
            legal_count: 0,
            rejected: BTreeMap::new(),
            best: TopCandidates::new(q.space.best_count, q.objective),
            front: ParetoFront::default(),
            better_count: 0,
            reference,
            objective: q.objective,
            counts: [0; Reason::ALL.len()],
        };
        let matters = RelevantKnobs::from_model(&q.work, q.routing);
        let mut prices = Estimator::new(q, devices);
        let (mut lists, mut node, mut pipe) =
            (KnobValues::default(), LayoutCost::default(), PipelineCost::default());
        let meshes = factor_meshes(devices, matters.experts, &q.pins, axes);
        if meshes.is_empty() {
            let f = pinned_factors(&q.pins, devices, axes);
            lists.fill_for_mesh(&q.space, &q.pins, &f, q.job, matters);
            let c = first_candidate(&f, &lists);
            w.reject_subtree(&prices, Reason::Ranks, lists.subtree_sizes().mesh, &c);
        }
        for f in &meshes {
            lists.fill_for_mesh(&q.space, &q.pins, f, q.job, matters);
            w.visit_mesh(&mut prices, f, &lists, &mut node, &mut pipe);
        }
        for (reason, r) in &mut w.rejected {
            r.count = w.counts[*reason as usize];
        }
        w
    }

    fn visit_mesh(
        &mut self,
        prices: &mut Estimator,
        f: &MeshFactors,
        lists: &KnobValues,
        node: &mut LayoutCost,
        pipe: &mut PipelineCost,
    ) {
        let below = lists.subtree_sizes();
        let mut c = Candidate { micro_batch: 0, ..first_candidate(f, lists) };
        if let Some(reason) = prices.constraints.check_mesh(&c) {
            return self.reject_subtree(prices, reason, below.mesh, &c);
        }
        let mut places = Vec::with_capacity(lists.placements.len());
        let mut equal_subtrees = EqualSubtrees::default();
        for &(scheme, ring) in &lists.schemes {
            (c.layout.scheme, c.layout.ring, c.micro_batch) = (scheme, ring, 0);
            if let Some(reason) = prices.constraints.check_scheme(&c) {
                self.reject_subtree(prices, reason, below.scheme, &c);
                continue;
            }
            for &precision in &lists.precisions {
                (c.layout.precision, c.micro_batch) = (precision, 0);
                if let Some(reason) = prices.constraints.check_precision(&c) {
                    self.reject_subtree(prices, reason, below.precision, &c);
                    continue;
                }
                self.collect_placements(prices, &c, lists, below.placement, &mut places);
                if places.is_empty() {
                    continue;
                }
                let mut equal_wire = None;
                for &(wire, capacity) in &lists.wires {
                    (c.layout.wire_precision, c.layout.capacity_pct) = (wire, capacity);
                    if equal_wire != Some(wire) {
                        equal_wire = Some(wire);
                        equal_subtrees.clear();
                    }
                    self.visit_micro_batches(prices, &mut c, lists, &places, &mut equal_subtrees, node, pipe);
                }
            }
        }
    }

    /// Visits all micro-batches and recomputation policies of a layout, under every schedule.
    #[allow(clippy::too_many_arguments)]
    fn visit_micro_batches(
        &mut self,
        prices: &mut Estimator,
        c: &mut Candidate,
        lists: &KnobValues,
        places: &[StatePlacement],
        equal_subtrees: &mut EqualSubtrees,
        node: &mut LayoutCost,
        pipe: &mut PipelineCost,
    ) {
        let (below, placement_count) = (lists.subtree_sizes(), places.len() as u64);
        for &micro_batch in &lists.micro_batches {
            c.micro_batch = micro_batch;
            if let Some(reason) = prices.constraints.check_micro_batch(c) {
                self.reject_subtree(prices, reason, below.micro_batch * placement_count, c);
                continue;
            }
            for &recompute in &lists.recompute {
                c.recompute = recompute;
                let count = below.recompute * placement_count;
                if prices.constraints.violates(Reason::Recompute, c) {
                    self.reject_subtree(prices, Reason::Recompute, count, c);
                    continue;
                }
                prices.compute_layers(c, node);
                if prices.drops_too_many(node) {
                    self.count_rejected(Reason::Drops, count, c, || prices.explain_drops(c, node));
                    continue;
                }
                // A capacity that drops nothing equals no capacity: count the results of that
                // candidate again.
                let drops_nothing = node.expert_load.is_none_or(|l| l.dropped == 0.0);
                let key = (micro_batch, recompute);
                if let Some((_, equal_tally)) =
                    equal_subtrees.iter().find(|(k, _)| drops_nothing && *k == key)
                {
                    self.repeat_tally(equal_tally);
                    continue;
                }
                let before = self.current_tally();
                for &(schedule, interleave) in &lists.schedules {
                    (c.schedule, c.interleave) = (schedule, interleave);
                    self.visit_schedule(prices, *c, places, node, pipe);
                }
                if c.layout.capacity_pct == 0 {
                    equal_subtrees.push((key, self.current_tally().difference_from(&before)));
                }
            }
        }
    }

    /// Collects the state placements that no constraint forbids and whose minimum bytes fit.
    fn collect_placements(
        &mut self,
        prices: &Estimator,
        c: &Candidate,
        lists: &KnobValues,
        below: u64,
        places: &mut Vec<StatePlacement>,
    ) {
        places.clear();
        let limit = prices.q.machine.cluster.device.memory_bytes.value;
        for &(optimizer, experts_at, cache_at) in &lists.placements {
            let c = Candidate { optimizer, experts_at, cache_at, ..*c };
            if let Some(reason) = [Reason::OptimizerSharding, Reason::Tier]
                .into_iter()
                .find(|r| prices.constraints.violates(*r, &c))
            {
                self.reject_subtree(prices, reason, below, &c);
                continue;
            }
            let least_bytes = prices.min_bytes(&c);
            if least_bytes > limit {
                let what = "weights, gradients, optimizer state and KV cache";
                self.count_rejected(Reason::Memory, below, &c, || {
                    explain_lower_bound(prices, what, least_bytes)
                });
                continue;
            }
            places.push(StatePlacement { optimizer, experts_at, cache_at, min_bytes: least_bytes });
        }
    }

    fn visit_schedule(
        &mut self,
        prices: &mut Estimator,
        mut c: Candidate,
        places: &[StatePlacement],
        node: &mut LayoutCost,
        pipe: &mut PipelineCost,
    ) {
        for reason in [Reason::Layers, Reason::PipelineSchedule] {
            if prices.constraints.violates(reason, &c) {
                return self.reject_subtree(prices, reason, places.len() as u64, &c);
            }
        }
        self.costed_count += places.len() as u64;
        let (devices, tokens) = (f64::from(prices.constraints.devices), prices.step_tokens());
        let point = |step_ns: f64, bytes: f64, candidate: Candidate| {
            let rate = tokens / (step_ns * 1e-9) / devices;
            ScoredCandidate { step_ns, rate, bytes, candidate }
        };
        let limit = prices.q.machine.cluster.device.memory_bytes.value;
        let kept_bytes = prices.min_activation_bytes(&c, node);
        let mut min_ns = None;
        // A placement that moves state only under memory pressure equals the all-HBM candidate if
        // that one fits.
        let mut all_hbm: Option<(OptimizerSharding, ScoredCandidate)> = None;
        for place in places {
            let StatePlacement { optimizer, experts_at, cache_at, min_bytes: least_bytes } = *place;
            (c.optimizer, c.experts_at, c.cache_at) = (optimizer, experts_at, cache_at);
            let is_all_hbm = (experts_at, cache_at) == (ExpertStorage::Hbm, KvCacheStorage::Hbm);
            if let Some((o, p)) = all_hbm
                && o == optimizer
            {
                self.accept(&ScoredCandidate { candidate: c, ..p }, false);
                continue;
            }
            let least_bytes = least_bytes + kept_bytes;
            if least_bytes > limit {
                let what = "weights, gradients, optimizer state, KV cache and activations";
                self.count_rejected(Reason::Memory, 1, &c, || explain_lower_bound(prices, what, least_bytes));
                continue;
            }
            let min_ns = *min_ns.get_or_insert_with(|| {
                prices.compute_pipeline(&c, node, pipe);
                prices.min_step_ns(&c, node)
            });
            let fit = prices.fit_memory(&c, node, pipe);
            if !fit.fits {
                self.count_rejected(Reason::Memory, 1, &c, || {
                    explain_overflow(prices, &prices.peak_totals(&c, pipe, &fit))
                });
                continue;
            }
            let bytes = fit.hbm_bytes;
            let mut p = point(min_ns, bytes, c);
            let hope = self.could_matter(&p);
            if hope {
                p = point(prices.step_cost(&c, node, pipe, fit).step_ns, bytes, c);
            }
            if is_all_hbm {
                all_hbm = Some((optimizer, p));
            }
            self.accept(&p, hope);
        }
    }

    fn current_tally(&self) -> SubtreeTally {
        let rejected = SUBTREE_REASONS.map(|r| self.counts[r as usize]);
        SubtreeTally { legal: self.legal_count, better: self.better_count, rejected }
    }

    /// Counts candidates again under a capacity that drops nothing: they equal those without a
    /// capacity.
    fn repeat_tally(&mut self, t: &SubtreeTally) {
        self.candidate_count += t.legal + t.rejected.iter().sum::<u64>();
        self.legal_count += t.legal;
        self.better_count += t.better;
        for (reason, n) in SUBTREE_REASONS.iter().zip(t.rejected) {
            self.counts[*reason as usize] += n;
        }
    }

    /// Returns whether a candidate at its lower bound could matter: among the best, on the Pareto
    /// front, or against the reference.
    fn could_matter(&self, lower_bound: &ScoredCandidate) -> bool {
        self.best.would_keep(lower_bound)
            || !self.front.is_dominated(lower_bound)
            || self.reference.as_ref().is_some_and(|m| lower_bound.has_better_score(m, self.objective))
    }

    /// Counts a legal candidate, and offers it to the best list and the Pareto front if `offer` is
    /// set.
    fn accept(&mut self, p: &ScoredCandidate, offer: bool) {
        self.candidate_count += 1;
        self.legal_count += 1;
        if offer {
            self.best.offer(p);
            self.front.offer(p);
        }
        if self.reference.as_ref().is_some_and(|m| p.has_better_score(m, self.objective)) {
            self.better_count += 1;
        }
    }

    fn reject_subtree(&mut self, prices: &Estimator, reason: Reason, count: u64, c: &Candidate) {
        self.count_rejected(reason, count, c, || prices.constraints.explain(reason, c));
    }

    fn count_rejected(
        &mut self,
        reason: Reason,
        count: u64,
        c: &Candidate,
        explain: impl FnOnce() -> String,
    ) {
        self.candidate_count += count;
        let rejected_count = &mut self.counts[reason as usize];
        if *rejected_count == 0 && count > 0 {
            self.rejected.insert(reason, Rejection { count: 0, example: *c, explanation: explain() });
        }
        *rejected_count += count;
    }
}

/// Returns the candidate with the first value of every knob, or a default where the list is empty.
fn first_candidate(f: &MeshFactors, lists: &KnobValues) -> Candidate {
    let (scheme, ring) = lists.schemes.first().copied().unwrap_or((TpScheme::Megatron, 1));
    let (wire, capacity_pct) = lists.wires.first().copied().unwrap_or((Precision::Bf16, 0));
    let (optimizer, experts_at, cache_at) = lists.placements.first().copied().unwrap_or((
        OptimizerSharding::Replicated,
        ExpertStorage::Hbm,
        KvCacheStorage::Hbm,
    ));
    let (schedule, interleave) = lists.schedules.first().copied().unwrap_or((PipelineSchedule::OneFOneB, 1));
    Candidate {
        layout: LayerLayout {
            tp: f.tp,
            ring,
            scheme,
            expert_tp: f.expert_tp,
            ep: f.ep,
            precision: lists.precisions.first().copied().unwrap_or(Precision::Bf16),
            wire_precision: wire,
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

/// Returns an example of the factors that the pins request, for the rejection of pins that no mesh
/// of `devices` ranks satisfies. Axes that are not pinned are 1.
fn pinned_factors(pins: &Pins, devices: u32, axes: bool) -> MeshFactors {
    let one = |p: Option<u32>| p.unwrap_or(1);
    let (tp, ep, pp, dp) = (one(pins.tp), one(pins.ep), one(pins.pp), one(pins.dp));
    if axes {
        return MeshFactors {
            pp,
            tp,
            ep,
            expert_tp: tp,
            replicas: ep.saturating_mul(dp),
            expert_replicas: dp,
        };
    }
    let expert_tp = one(pins.expert_tp);
    if let Some(dp) = pins.dp {
        let unit = least_common_multiple(tp, expert_tp.saturating_mul(ep));
        let copies = |ranks: u32| (unit / ranks.max(1)).saturating_mul(dp);
        let (replicas, expert_replicas) = (copies(tp), copies(expert_tp.saturating_mul(ep)));
        return MeshFactors { pp, tp, ep, expert_tp, replicas, expert_replicas };
    }
    let stage = (devices / pp).max(1);
    MeshFactors {
        pp,
        tp,
        ep,
        expert_tp,
        replicas: stage.div_ceil(tp),
        expert_replicas: stage.div_ceil(ep.saturating_mul(expert_tp)),
    }
}
