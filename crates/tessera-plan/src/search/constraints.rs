//! Constraints on candidates. Each violation has a named reason, an error page and an explanation
//! with the arithmetic.
//!
//! A constraint looks only at its own knobs, so that the search can drop a whole subtree as soon as
//! they are chosen. Memory is the only constraint that needs cost estimates; the search checks it
//! last.

use tessera_base::Bytes;
use tessera_cost::params::{
    ExpertStorage, KvCacheStorage, OptimizerSharding, PipelineSchedule, Recompute, TpScheme,
};
use tessera_cost::schedule;
use tessera_ir::analytic_model::{AnalyticModel, LayerOpKind};
use tessera_mesh::{Cluster, Precision};

use super::{Candidate, Job, Reason, SearchSpace};

/// The constraints that need no cost estimates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Constraints<'a> {
    pub work: &'a AnalyticModel,
    pub job: Job,
    pub cluster: &'a Cluster,
    pub space: &'a SearchSpace,
    pub devices: u32,
}

/// Maximum size of the partial scores that rs_mm_ag may write, as a share of device memory.
const MAX_SCORES_SHARE: f64 = 0.25;

impl Constraints<'_> {
    /// Returns the first violation that depends only on pp, tp, ep and the replica counts.
    pub fn check_mesh(&self, c: &Candidate) -> Option<Reason> {
        use Reason::{Batch, Domain, Experts, Layers, Rack, Ranks};
        self.first_violation(c, &[Ranks, Layers, Experts, Rack, Domain, Batch])
    }

    /// Returns the first violation that depends on the tensor-parallel scheme as well as the mesh.
    pub fn check_scheme(&self, c: &Candidate) -> Option<Reason> {
        self.first_violation(c, &[Reason::Heads, Reason::TpScheme, Reason::Context])
    }

    /// Returns the first violation that depends on the precision.
    pub fn check_precision(&self, c: &Candidate) -> Option<Reason> {
        self.first_violation(c, &[Reason::Precision, Reason::Fp4Training])
    }

    /// Returns the first violation that depends on the micro-batch.
    pub fn check_micro_batch(&self, c: &Candidate) -> Option<Reason> {
        self.first_violation(c, &[Reason::Batch, Reason::TpScheme, Reason::Logits])
    }

    /// Returns every violation except dropped tokens and memory, which need cost estimates.
    pub fn all_violations(&self, c: &Candidate) -> Vec<Reason> {
        let l = &c.layout;
        let counts = [
            l.tp,
            l.ring,
            l.expert_tp,
            l.ep,
            c.pp,
            c.replicas,
            c.expert_replicas,
            c.interleave,
            c.micro_batch,
        ];
        if counts.contains(&0) {
            return vec![Reason::Ranks];
        }
        Reason::ALL.iter().copied().filter(|r| self.violates(*r, c)).collect()
    }

    fn first_violation(&self, c: &Candidate, of: &[Reason]) -> Option<Reason> {
        of.iter().copied().find(|r| self.violates(*r, c))
    }

    /// Returns whether a candidate violates a constraint. A micro-batch of 0 means that it is not
    /// chosen yet.
    pub fn violates(&self, reason: Reason, c: &Candidate) -> bool {
        let (l, job, train) = (&c.layout, self.job, self.is_training());
        match reason {
            Reason::Ranks => {
                let side = |a: u32, b: u32, n: u32| u128::from(a) * u128::from(b) * u128::from(n);
                let experts = side(l.expert_tp, l.ep, c.expert_replicas);
                c.rank_count() != self.devices || side(l.tp, c.replicas, 1) != experts
            }
            Reason::Layers => u64::from(c.pp) * u64::from(c.interleave) > self.work.layer_count(),
            Reason::Heads => {
                let (cut, heads, kv) = (u64::from(self.head_shards(c)), self.work.heads, self.work.kv_heads);
                let apart = |kv: u64| kv > 1 && !kv.is_multiple_of(cut) && !cut.is_multiple_of(kv);
                heads > 0 && (cut > heads || self.space.even_only && (heads % cut != 0 || apart(kv)))
            }
            Reason::Experts => match self.expert_dims() {
                None => l.ep > 1 || l.expert_tp > 1,
                Some((experts, width)) => {
                    let (ep, etp) = (u64::from(l.ep), u64::from(l.expert_tp));
                    let uneven = experts % ep != 0 || width % etp != 0;
                    ep > experts || etp > width || self.space.even_only && uneven
                }
            },
            Reason::Batch => {
                let (batch, replicas, m) =
                    (job.batch_size(), u64::from(c.replicas), u64::from(c.micro_batch));
                let share = batch.div_ceil(replicas);
                let uneven = batch % replicas != 0 || m > 0 && share % m != 0;
                batch < replicas || m > share || self.space.even_only && uneven
            }
            Reason::PipelineSchedule => {
                let split = matches!(
                    c.schedule,
                    PipelineSchedule::ZbH1 | PipelineSchedule::ZbH2 | PipelineSchedule::DualPipe
                );
                let waves = c.schedule != PipelineSchedule::OneFOneB && !train;
                waves || split && !train || self.schedule_violation(c).is_some()
            }
            Reason::TpScheme => {
                let ringed = l.scheme.has_rings();
                let tokens = self.micro_batch_tokens(c);
                let divides = l.scheme == TpScheme::Ulysses || l.scheme.shards_tokens();
                let over_heads = ringed || matches!(l.scheme, TpScheme::Ulysses | TpScheme::RsMmAg);
                (ringed && l.tp > 1) != (l.ring > 1)
                    || !l.tp.is_multiple_of(l.ring)
                    || over_heads && self.work.heads == 0
                    || divides && c.micro_batch > 0 && tokens < u64::from(l.tp)
            }
            Reason::Context => {
                l.ring > 1 && job.context_tokens() / u64::from(l.ring) < self.space.min_ring_tokens
            }
            Reason::Logits => {
                l.scheme == TpScheme::RsMmAg
                    && l.tp > 1
                    && c.micro_batch > 0
                    && self.scores_bytes(c) > MAX_SCORES_SHARE * self.cluster.device.memory_bytes.value
            }
            Reason::Precision => self.cluster.flops_per_s(l.precision).is_none(),
            Reason::Fp4Training => train && l.precision == Precision::Fp4 && !self.space.fp4_training,
            Reason::OptimizerSharding => {
                c.optimizer != OptimizerSharding::Replicated
                    && (c.replicas.saturating_mul(self.weight_copies(c)) < 2 || !train)
            }
            Reason::Tier => {
                let experts = c.experts_at == ExpertStorage::Host && (train || self.expert_dims().is_none());
                let cache = c.cache_at != KvCacheStorage::Hbm && train;
                experts || cache || c.cache_at == KvCacheStorage::Peer && self.devices < 2
            }
            Reason::Recompute => c.recompute != Recompute::None && !train,
            Reason::Domain => {
                self.space.within_domain
                    && (self.straddles_domains(l.tp)
                        || self.straddles_domains(l.expert_tp.saturating_mul(l.ep)))
            }
            Reason::Rack => {
                self.space.replica_in_rack
                    && c.model_replicas() > 1
                    && self.devices > self.rack_devices()
                    && !self.rack_devices().is_multiple_of(c.replica_stage_ranks().saturating_mul(c.pp))
            }
            Reason::Drops | Reason::Memory => false,
        }
    }

    /// Returns the arithmetic behind a violation.
    pub fn explain(&self, reason: Reason, c: &Candidate) -> String {
        let l = &c.layout;
        let unit = |n: u64, what: &str| if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") };
        match reason {
            Reason::Ranks => {
                let moe = l.ep > 1 || self.work.routed_experts().is_some();
                let axes = if moe && l.expert_tp == l.tp {
                    format!("tp·ep·pp·dp = {}·{}·{}·{}", l.tp, l.ep, c.pp, c.expert_replicas)
                } else if moe {
                    format!(
                        "pp·tp·replicas = {}·{}·{}, pp·expert_tp·ep·expert replicas = {}·{}·{}·{}",
                        c.pp, l.tp, c.replicas, c.pp, l.expert_tp, l.ep, c.expert_replicas
                    )
                } else {
                    format!("tp·pp·dp = {}·{}·{}", l.tp, c.pp, c.replicas)
                };
                // Pins go up to 2²⁴ each, so four of them multiply to more than 64 bits hold.
                let multiply = |sizes: &[u32]| sizes.iter().map(|n| u128::from(*n)).product::<u128>();
                let ranks = if moe && l.expert_tp == l.tp {
                    multiply(&[l.tp, l.ep, c.pp, c.expert_replicas])
                } else {
                    multiply(&[l.tp, c.replicas, c.pp])
                };
                if ranks == u128::from(self.devices) {
                    return format!(
                        "{axes} = {ranks} ranks, but attention and experts need different stage sizes"
                    );
                }
                format!("{axes} = {ranks} ranks, {} devices", self.devices)
            }
            Reason::Layers => format!(
                "{} with {} each need {} layers, the model has {}",
                unit(c.pp.into(), "stage"),
                unit(c.interleave.into(), "chunk"),
                u64::from(c.pp) * u64::from(c.interleave),
                self.work.layer_count()
            ),
            Reason::Heads => {
                let (cut, heads, kv) = (self.head_shards(c), self.work.heads, self.work.kv_heads);
                let each = heads as f64 / f64::from(cut);
                format!("{heads} heads ({kv} KV heads) over {cut} ranks are {each:.2} each")
            }
            Reason::Experts => match self.expert_dims() {
                None => {
                    format!("ep = {}, expert_tp = {}, but no layer has routed experts", l.ep, l.expert_tp)
                }
                Some((experts, width)) => format!(
                    "{experts} experts over ep = {} are {:.2} each; inner width {width} over expert_tp = {} is {:.2}",
                    l.ep,
                    experts as f64 / f64::from(l.ep),
                    l.expert_tp,
                    width as f64 / f64::from(l.expert_tp)
                ),
            },
            Reason::Batch => {
                let share = self.job.batch_size().div_ceil(u64::from(c.replicas.max(1)));
                let micro = match c.micro_batch {
                    0 => String::new(),
                    1 => ", in micro-batches of one".to_string(),
                    m => format!(", in micro-batches of {m}"),
                };
                format!(
                    "{} over {} are at most {share} each{micro}",
                    unit(self.job.batch_size(), "sequence"),
                    unit(c.replicas.into(), "replica")
                )
            }
            Reason::PipelineSchedule => match self.schedule_violation(c) {
                Some(why) => why.to_string(),
                None => {
                    format!("{} schedules backward passes, and this workload has none", c.schedule.name())
                }
            },
            Reason::TpScheme => {
                if (l.ring > 1) != (l.scheme.has_rings() && l.tp > 1) || !l.tp.is_multiple_of(l.ring) {
                    let name = l.scheme.name();
                    return format!("{name} with rings of {} ranks at tp = {}", l.ring, l.tp);
                }
                if self.work.heads == 0 {
                    return format!("{} shards attention, but no layer has attention", l.scheme.name());
                }
                let tokens = self.micro_batch_tokens(c);
                format!("{} shards {tokens} tokens of a micro-batch over tp = {}", l.scheme.name(), l.tp)
            }
            Reason::Context => format!(
                "{} tokens over a ring of {} are {} each, below {}",
                self.job.context_tokens(),
                l.ring,
                self.job.context_tokens() / u64::from(l.ring),
                self.space.min_ring_tokens
            ),
            Reason::Logits => format!(
                "{} × {} queries × {} keys × {} heads × 2 B are {} of partial scores per rank, more than {:.0} % of {}",
                unit(c.micro_batch.into(), "sequence"),
                self.job.query_tokens(),
                self.job.context_tokens(),
                self.work.heads,
                format_bytes(self.scores_bytes(c)),
                MAX_SCORES_SHARE * 100.0,
                format_bytes(self.cluster.device.memory_bytes.value)
            ),
            Reason::Precision => {
                let has: Vec<_> = Precision::ALL
                    .into_iter()
                    .filter(|p| self.cluster.flops_per_s(*p).is_some())
                    .map(Precision::name)
                    .collect();
                let device = &self.cluster.device.name;
                format!("{device} supports {}, not {}", has.join(", "), l.precision.name())
            }
            Reason::Fp4Training => "fp4 in training is not enabled".to_string(),
            Reason::OptimizerSharding => match self.is_training() {
                true => {
                    let ranks = unit(u64::from(c.replicas) * u64::from(self.weight_copies(c)), "rank");
                    format!("{} over {ranks} with the same weights", c.optimizer.name())
                }
                false => format!("{}, and inference has no optimizer", c.optimizer.name()),
            },
            Reason::Tier => {
                let (e, k) = (c.experts_at.name(), c.cache_at.name());
                let job = if self.is_training() { "training" } else { "inference" };
                format!("experts in {e} and KV cache in {k} for {job} on {} devices", self.devices)
            }
            Reason::Recompute => format!("recompute = {}, but there is no backward pass", c.recompute.name()),
            Reason::Domain => format!(
                "groups of tp = {} and expert_tp·ep = {} in domains of {}",
                l.tp,
                u64::from(l.expert_tp) * u64::from(l.ep),
                self.cluster.domain_size
            ),
            Reason::Rack => format!(
                "{} of {}·{} = {} ranks in racks of {} devices",
                unit(c.model_replicas().into(), "copy").replace("copys", "copies"),
                c.replica_stage_ranks(),
                c.pp,
                u64::from(c.replica_stage_ranks()) * u64::from(c.pp),
                self.rack_devices()
            ),
            Reason::Drops | Reason::Memory => String::new(),
        }
    }

    fn is_training(&self) -> bool {
        matches!(self.job, Job::Train { .. })
    }

    fn rack_devices(&self) -> u32 {
        self.cluster.hosts_per_rack * self.cluster.devices_per_host
    }

    /// Returns whether aligned groups of `ranks` consecutive ranks cross a domain boundary.
    fn straddles_domains(&self, ranks: u32) -> bool {
        self.devices > self.cluster.domain_size && !self.cluster.domain_size.is_multiple_of(ranks)
    }

    /// Returns the number of ranks over which heads are sharded.
    fn head_shards(&self, c: &Candidate) -> u32 {
        (c.layout.tp / c.layout.ring.max(1)).max(1)
    }

    /// Returns the number of ranks in one tp group that hold the same weights.
    fn weight_copies(&self, c: &Candidate) -> u32 {
        if c.layout.scheme == TpScheme::Ulysses { c.layout.tp } else { c.layout.ring_ranks() }
    }

    /// Returns the tokens of one micro-batch of one replica.
    fn micro_batch_tokens(&self, c: &Candidate) -> u64 {
        u64::from(c.micro_batch) * self.job.query_tokens()
    }

    /// Returns the bytes of partial scores, over all heads, that a rank writes under rs_mm_ag.
    fn scores_bytes(&self, c: &Candidate) -> f64 {
        self.micro_batch_tokens(c) as f64 * self.job.context_tokens() as f64 * self.work.heads as f64 * 2.0
    }

    /// Returns the number of routed experts of a layer and their inner width.
    fn expert_dims(&self) -> Option<(u64, u64)> {
        self.work.stacks.iter().flat_map(|s| &s.ops).find_map(|r| match r.kind {
            LayerOpKind::Experts { experts, n, .. } => Some((experts, n)),
            _ => None,
        })
    }

    fn schedule_violation(&self, c: &Candidate) -> Option<schedule::InvalidSchedule> {
        let share = self.job.batch_size().div_ceil(u64::from(c.replicas.max(1)));
        let micro_batches = share.div_ceil(u64::from(c.micro_batch.max(1)));
        let micro_batches = u32::try_from(micro_batches).unwrap_or(u32::MAX);
        let layers = u32::try_from(self.work.layer_count()).unwrap_or(u32::MAX);
        schedule::check_schedule(c.schedule, c.pp, c.interleave, micro_batches, layers).err()
    }
}

/// Formats a byte count for messages, such as `79.20 GiB`; a negative count gives `0 B`.
pub(super) fn format_bytes(n: f64) -> String {
    Bytes(n.max(0.0) as u64).to_string()
}
