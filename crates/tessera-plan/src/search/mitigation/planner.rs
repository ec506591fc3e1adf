//! Estimates each mitigation of a failure mode on the candidate under diagnosis.

use tessera_cost::moe::Routing;
use tessera_cost::params::{PipelineSchedule, Recompute, TpScheme};
use tessera_cost::{Algorithm, CollectiveOp, GroupSpan};
use tessera_ir::analytic_model::{LayerOp, OpSharding};
use tessera_mesh::Precision;

use super::super::{Candidate, Job, MemoryUse, RankedCandidate, SearchQuery, estimate_candidate};
use super::{CandidateMetrics, MappingMitigation};

/// Group size of the f32 scales that finer scaling is costed with.
const SCALE_GROUP: f64 = 32.0;

/// Contraction length after which a partial sum is promoted to f32.
const PROMOTION_INTERVAL: f64 = 128.0;

/// The guide's range of capacity factors, in per cent.
const CAPACITY_RANGE_PCT: (u32, u32) = (110, 130);

/// Computes the effect of each mitigation on the candidate under diagnosis.
pub(super) struct MitigationPlanner<'a> {
    pub q: &'a SearchQuery,
    pub c: &'a Candidate,
    pub current: CandidateMetrics,
}

impl MitigationPlanner<'_> {
    /// Applies `change` to copies of the query and the candidate and estimates them. If they cannot
    /// run, the details state why.
    fn estimate_change(
        &self,
        action: &'static str,
        details: String,
        change: impl FnOnce(&mut SearchQuery, &mut Candidate),
    ) -> MappingMitigation {
        let (mut q, mut c) = (self.q.clone(), *self.c);
        change(&mut q, &mut c);
        match CandidateMetrics::estimate(&q, &c) {
            Ok(n) => MappingMitigation::new(action, details, Some(n)),
            Err(why) => {
                let why: Vec<_> = why.iter().map(|d| d.message.as_str()).collect();
                let details = format!("{details}: cannot run here: {}", why.join("; "));
                MappingMitigation::new(action, details, None)
            }
        }
    }

    pub(super) fn for_congestion(&self) -> Vec<MappingMitigation> {
        let Some((experts, top_k)) = self.q.work.routed_experts() else { return Vec::new() };
        vec![self.tighten_buckets(), self.reduce_capacity(), {
            let how =
                format!("{} experts of the same width instead of {experts}, which need memory", 2 * experts);
            self.estimate_change("enlarge the expert bank", how, |q, _| {
                q.work = q.work.with_experts(2 * experts, top_k)
            })
        }]
    }

    /// Balances the sources, and makes all-to-alls small enough that one overlaps the compute of
    /// another.
    fn tighten_buckets(&self) -> MappingMitigation {
        const ACTION: &str = "tighten bucketing";
        let ragged = self.q.routing == Routing::Workload(4);
        let train = matches!(self.q.job, Job::Train { .. });
        let mut how = Vec::new();
        if ragged {
            how.push("buckets of one length, so that every source sends equally many tokens".to_string());
        }
        // A training step exchanges the same bytes whatever its micro-batches; only a schedule can
        // hide them.
        let share = self.q.job.batch_size().div_ceil(u64::from(self.c.replicas.max(1)));
        let halves = u32::try_from(share.div_ceil(u64::from(2 * self.c.pp))).unwrap_or(u32::MAX).max(1);
        let smaller = !train && halves < self.c.micro_batch;
        if smaller {
            how.push(format!(
                "buckets of {halves} sequences, so that two micro-batches are in flight on every stage"
            ));
        }
        let both = train && self.c.pp.is_multiple_of(2) && self.c.schedule != PipelineSchedule::DualPipe;
        if both {
            how.push(
                "a bidirectional schedule (dualpipe), whose all-to-alls overlap the compute of the other direction"
                    .to_string(),
            );
        }
        if how.is_empty() {
            return MappingMitigation::new(
                ACTION,
                "sources are balanced and all-to-alls already overlap compute: nothing to gain",
                None,
            );
        }
        self.estimate_change(ACTION, how.join("; "), |q, c| {
            if ragged {
                q.routing = Routing::Balanced;
            }
            if smaller {
                c.micro_batch = halves;
            }
            if both {
                (c.schedule, c.interleave) = (PipelineSchedule::DualPipe, 1);
            }
        })
    }

    fn reduce_capacity(&self) -> MappingMitigation {
        const ACTION: &str = "reduce the capacity factor";
        let to = match self.c.layout.capacity_pct {
            0 => CAPACITY_RANGE_PCT.1,
            now if now <= CAPACITY_RANGE_PCT.0 => {
                return MappingMitigation::new(
                    ACTION,
                    "the capacity is at the lower end of what the guide advises, 1.1 to 1.3",
                    None,
                );
            }
            now => CAPACITY_RANGE_PCT.0.max(now.saturating_sub(15)),
        };
        let was = match self.c.layout.capacity_pct {
            0 => "unlimited".to_string(),
            now => format!("{:.2}", f64::from(now) / 100.0),
        };
        self.estimate_change(ACTION, format!("from {was} to {:.2}", f64::from(to) / 100.0), |_, c| {
            c.layout.capacity_pct = to
        })
    }

    pub(super) fn for_memory(&self) -> Vec<MappingMitigation> {
        let smaller = match self.c.micro_batch {
            0 | 1 => {
                MappingMitigation::new("smaller micro-batch", "the micro-batch is already one sequence", None)
            }
            now => {
                let how = format!("from {now} sequences to {}", now / 2);
                self.estimate_change("smaller micro-batch", how, |_, c| c.micro_batch = now / 2)
            }
        };
        vec![self.recompute_more(), smaller, self.lower_top_k()]
    }

    /// Finds the first stronger policy that lowers the peak: attention alone, then every other
    /// layer, then all.
    fn recompute_more(&self) -> MappingMitigation {
        const ACTION: &str = "recompute attention";
        if !matches!(self.q.job, Job::Train { .. }) {
            return MappingMitigation::new(
                ACTION,
                "inference saves no activations for a backward pass",
                None,
            );
        }
        let now = self.c.recompute;
        for next in Recompute::ALL.iter().copied().filter(|r| *r > now) {
            let what = if now == Recompute::None && next != Recompute::Attention {
                ", because recomputing attention alone saves nothing here"
            } else {
                ""
            };
            let how = format!("recompute from {} to {}{what}", now.name(), next.name());
            let r = self.estimate_change(ACTION, how, |_, c| c.recompute = next);
            if r.predicted.is_some_and(|n| n.peak_bytes < self.current.peak_bytes) {
                return r;
            }
        }
        MappingMitigation::new(ACTION, "no recomputation policy lowers the peak", None)
    }

    /// From k to k − ½: every other token uses one expert less. The mean of both estimates, exact
    /// in rows and bytes.
    fn lower_top_k(&self) -> MappingMitigation {
        const ACTION: &str = "lower top-k by stochastic gating";
        let Some((experts, k)) = self.q.work.routed_experts() else {
            return MappingMitigation::new(ACTION, "no layer has routed experts", None);
        };
        if k < 2 {
            return MappingMitigation::new(ACTION, "a token already uses only one expert", None);
        }
        let how = format!("from {k} to {}.5: mean of the estimates at {k} and {}", k - 1, k - 1);
        let mut r = self.estimate_change(ACTION, how, |q, _| q.work = q.work.with_experts(experts, k - 1));
        let capacity = self.q.machine.cluster.device.memory_bytes.value;
        r.predicted = r.predicted.map(|n| {
            let half = self.current.interpolate(n, 0.5);
            CandidateMetrics { fits: half.peak_bytes <= capacity, ..half }
        });
        r
    }

    pub(super) fn for_fp8(&self) -> Vec<MappingMitigation> {
        let l = &self.c.layout;
        let narrow = |p: Precision| matches!(p, Precision::Fp8 | Precision::Fp4);
        let mut out = vec![
            self.promote_sums_earlier(narrow(l.precision)),
            self.use_finer_scales(narrow(l.wire_precision)),
            self.scale_loss(),
        ];
        if narrow(l.precision) {
            let how = "matmuls in bf16, if nothing else helps".to_string();
            out.push(self.estimate_change("leave fp8", how, |_, c| c.layout.precision = Precision::Bf16));
        }
        out
    }

    fn promote_sums_earlier(&self, narrow: bool) -> MappingMitigation {
        const ACTION: &str = "accumulate in f32 earlier";
        if !narrow {
            return MappingMitigation::new(ACTION, "matmuls do not use fp8", None);
        }
        let cluster = &self.q.machine.cluster;
        let (Ok(r), Some(f32_rate), Some(peak)) = (
            estimate_candidate(self.q, self.c),
            cluster.flops_per_s(Precision::F32),
            cluster.flops_per_s(self.c.layout.precision),
        ) else {
            return MappingMitigation::new(
                ACTION,
                "the cluster has no f32 rate, or the plan does not fit",
                None,
            );
        };
        // Of 2·m·n·k operations, each output is scaled and added once per interval: 2·m·n·k /
        // interval more.
        let more = r.estimate.mfu * peak * r.estimate.step_ns / PROMOTION_INTERVAL / f32_rate;
        let how = format!(
            "partial sums to f32 every {PROMOTION_INTERVAL:.0} elements of a contraction, if nothing hides the additions"
        );
        MappingMitigation::new(ACTION, how, Some(self.current.with_added_ns(more)))
    }

    fn use_finer_scales(&self, narrow: bool) -> MappingMitigation {
        const ACTION: &str = "finer scaling";
        if !narrow || self.c.layout.ep < 2 {
            return MappingMitigation::new(
                ACTION,
                "no messages use fp8: scales stay on the device and add 4 bytes each",
                None,
            );
        }
        let wire = self.c.layout.wire_precision.wire_element_bytes();
        let fine = self.c.layout.wire_precision.element_bytes() + 4.0 / SCALE_GROUP;
        // Bytes on the wire lie between the current size and bf16, and so does the time of the same
        // all-to-all.
        let at = (fine - wire) / (Precision::Bf16.wire_element_bytes() - wire);
        let how = format!(
            "an f32 scale for every {SCALE_GROUP:.0} elements: {fine:.3} bytes each on the wire instead of {wire:.3}; one-byte \
scales would take {:.3}",
            self.c.layout.wire_precision.element_bytes() + 1.0 / SCALE_GROUP
        );
        let mut r = self.estimate_change(ACTION, how, |_, c| c.layout.wire_precision = Precision::Bf16);
        r.predicted = r.predicted.map(|n| self.current.interpolate(n, at));
        r
    }

    fn scale_loss(&self) -> MappingMitigation {
        const ACTION: &str = "scale the loss";
        if !matches!(self.q.job, Job::Train { .. }) {
            return MappingMitigation::new(ACTION, "inference has no loss to scale", None);
        }
        let gradients = |r: RankedCandidate| {
            let of = r.estimate.budget.bytes.iter().filter(|((_, what), _)| *what == MemoryUse::Gradients);
            of.map(|(_, b)| b.0 as f64).sum::<f64>()
        };
        let Ok(bytes) = estimate_candidate(self.q, self.c).map(gradients) else {
            return MappingMitigation::new(ACTION, "the plan does not fit", None);
        };
        let ns = self.q.machine.memory_bound_ns(2.0 * bytes);
        let how = format!(
            "gradients are checked and unscaled in one pass of {:.2} ms, which every step estimate includes; a step \
that overflows is lost",
            ns / 1e6
        );
        MappingMitigation::new(ACTION, how, Some(self.current))
    }

    pub(super) fn for_drift(&self) -> Vec<MappingMitigation> {
        let mut out = self.pin_reductions();
        let free = Some(self.current);
        out.push(MappingMitigation::new(
            "fix the order of ranks",
            "one device list in topology order, part of the plan's digest: free",
            free,
        ));
        out.push(MappingMitigation::new(
            "deterministic draws per axis",
            "key every draw by seed, layer and the token's position in the batch: different over ep and dp, where tokens \
differ, and the same over tp, whose peers hold the same tokens and must choose the same experts; free",
            free,
        ));
        out
    }

    /// Reductions over tp with one algorithm for all sizes, and by adding in rank order.
    fn pin_reductions(&self) -> Vec<MappingMitigation> {
        const PIN: &str = "pin algorithms";
        const ORDER: &str = "pin algorithms, and add in rank order";
        let (m, l) = (&self.q.machine, &self.c.layout);
        let ranks = l.tp / l.ring.max(1);
        if ranks < 2 || l.scheme == TpScheme::Ulysses {
            return vec![MappingMitigation::new(PIN, "nothing is reduced over tp here", None)];
        }
        let span = GroupSpan::from_stride(ranks, 1, &m.cluster);
        let tokens = f64::from(self.c.micro_batch) * self.q.job.query_tokens() as f64;
        let bytes = tokens * self.q.work.hidden_size as f64 * Precision::Bf16.element_bytes();
        let sequence = l.scheme != TpScheme::Megatron;
        let op = if sequence { CollectiveOp::ReduceScatter } else { CollectiveOp::AllReduce };
        let chosen = m.collective_cost(op, bytes, span);
        let times = self.reductions_per_step();
        let mut out = Vec::new();
        let fixed =
            [Algorithm::Ring, Algorithm::Tree].map(|a| (a, m.collective_cost_with(a, op, bytes, span)));
        let best = fixed
            .iter()
            .filter_map(|(a, t)| t.as_ref().map(|t| (*a, t.ns)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((algorithm, ns)) = best {
            let how = format!(
                "{} for every size instead of {} at {:.1} MB, {times:.0} reductions per step; the number of channels must \
also be pinned",
                algorithm.name(),
                chosen.algorithm.name(),
                bytes / 1e6
            );
            let more = times * (ns - chosen.ns).max(0.0);
            out.push(MappingMitigation::new(PIN, how, Some(self.current.with_added_ns(more))));
        }
        // Every rank receives all partial sums of its shard and adds them in order; shards are
        // gathered where the algorithm would have done so.
        let n = f64::from(ranks);
        let mut ordered = m.collective_cost(CollectiveOp::AllToAll, bytes, span).ns
            + m.memory_bound_ns(bytes * (1.0 + 1.0 / n));
        if !sequence {
            ordered += m.collective_cost(CollectiveOp::AllGather, bytes, span).ns;
        }
        let how = format!(
            "shards exchanged and added in f32 in rank order: {:.0} µs for each of {times:.0} reductions instead of \
{:.0} µs, the same bits at every size",
            ordered / 1e3,
            chosen.ns / 1e3
        );
        let after = self.current.with_added_ns(times * (ordered - chosen.ns));
        out.push(MappingMitigation::new(ORDER, how, Some(after)));
        out
    }

    /// Returns the tp reductions per step that one rank of a stage participates in.
    fn reductions_per_step(&self) -> f64 {
        let work = &self.q.work;
        let cuts = |rows: &[LayerOp]| rows.iter().filter(|r| r.sharding == OpSharding::Row).count() as f64;
        let layers: f64 = work.stacks.iter().map(|s| s.count as f64 * cuts(&s.ops)).sum();
        let directions = if matches!(self.q.job, Job::Train { .. }) { 2.0 } else { 1.0 };
        let share = self.q.job.batch_size().div_ceil(u64::from(self.c.replicas.max(1)));
        let micro_batches = share.div_ceil(u64::from(self.c.micro_batch.max(1)));
        layers / f64::from(self.c.pp) * directions * micro_batches as f64
    }
}
