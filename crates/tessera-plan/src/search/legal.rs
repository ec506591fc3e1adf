//! What an arrangement may not be, each with a reason that has a name, a page and its arithmetic.
//!
//! A rule looks only at what its knobs are, so that a search can drop a whole subtree as soon as they are chosen. Memory
//! is the one rule that needs prices; it is asked last.

use tessera_base::Bytes;
use tessera_cost::knobs::{CacheAt, ExpertsAt, Optimizer, Recompute, Schedule, Scheme};
use tessera_cost::schedule;
use tessera_ir::work::{RowOp, Work};
use tessera_mesh::{Cluster, Precision};

use super::{Candidate, Job, Reason, Space};

/// The rules that need no prices.
#[derive(Debug, Clone, Copy)]
pub(super) struct Rules<'a> {
    pub work: &'a Work,
    pub job: Job,
    pub cluster: &'a Cluster,
    pub space: &'a Space,
    pub devices: u32,
}

/// Scores that rs_mm_ag may write, as a share of the device's memory.
const SCORES_SHARE: f64 = 0.25;

impl Rules<'_> {
    /// The first reason that depends on pp, tp, ep and the numbers of replicas alone.
    pub fn mesh(&self, c: &Candidate) -> Option<Reason> {
        use Reason::{Batch, Domain, Experts, Layers, Rack, Ranks};
        self.first(c, &[Ranks, Layers, Experts, Rack, Domain, Batch])
    }

    /// The first reason that needs the scheme too.
    pub fn scheme(&self, c: &Candidate) -> Option<Reason> {
        self.first(c, &[Reason::Heads, Reason::Scheme, Reason::Context])
    }

    /// The first reason that needs the precision.
    pub fn precision(&self, c: &Candidate) -> Option<Reason> {
        self.first(c, &[Reason::Precision, Reason::Fp4Training])
    }

    /// The first reason that needs the micro-batch.
    pub fn micro_batch(&self, c: &Candidate) -> Option<Reason> {
        self.first(c, &[Reason::Batch, Reason::Scheme, Reason::Logits])
    }

    /// Every reason but memory.
    pub fn all(&self, c: &Candidate) -> Vec<Reason> {
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
        Reason::ALL.iter().copied().filter(|r| self.breaks(*r, c)).collect()
    }

    fn first(&self, c: &Candidate, of: &[Reason]) -> Option<Reason> {
        of.iter().copied().find(|r| self.breaks(*r, c))
    }

    /// Whether a rule is broken. A micro-batch of 0 is one that is not chosen yet.
    pub fn breaks(&self, reason: Reason, c: &Candidate) -> bool {
        let (l, job, train) = (&c.layout, self.job, self.train());
        match reason {
            Reason::Ranks => {
                let side = |a: u32, b: u32, n: u32| u128::from(a) * u128::from(b) * u128::from(n);
                let experts = side(l.expert_tp, l.ep, c.expert_replicas);
                c.ranks() != self.devices || side(l.tp, c.replicas, 1) != experts
            }
            Reason::Layers => u64::from(c.pp) * u64::from(c.interleave) > self.work.layers(),
            Reason::Heads => {
                let (cut, heads, kv) = (u64::from(self.head_ranks(c)), self.work.heads, self.work.kv_heads);
                let apart = |kv: u64| kv > 1 && !kv.is_multiple_of(cut) && !cut.is_multiple_of(kv);
                heads > 0 && (cut > heads || self.space.strict && (heads % cut != 0 || apart(kv)))
            }
            Reason::Experts => match self.experts() {
                None => l.ep > 1 || l.expert_tp > 1,
                Some((experts, width)) => {
                    let (ep, etp) = (u64::from(l.ep), u64::from(l.expert_tp));
                    let uneven = experts % ep != 0 || width % etp != 0;
                    ep > experts || etp > width || self.space.strict && uneven
                }
            },
            Reason::Batch => {
                let (batch, replicas, m) = (job.batch(), u64::from(c.replicas), u64::from(c.micro_batch));
                let share = batch.div_ceil(replicas);
                let uneven = batch % replicas != 0 || m > 0 && share % m != 0;
                batch < replicas || m > share || self.space.strict && uneven
            }
            Reason::Schedule => {
                let split = matches!(c.schedule, Schedule::ZbH1 | Schedule::ZbH2 | Schedule::DualPipe);
                let waves = c.schedule != Schedule::OneFOneB && !train;
                waves || split && !train || self.schedule(c).is_some()
            }
            Reason::Scheme => {
                let ringed = matches!(l.scheme, Scheme::Ring | Scheme::Striped);
                let tokens = self.tokens(c);
                let divides = matches!(
                    l.scheme,
                    Scheme::MegatronSequence | Scheme::Ulysses | Scheme::Ring | Scheme::Striped
                );
                let over_heads = ringed || matches!(l.scheme, Scheme::Ulysses | Scheme::RsMmAg);
                (ringed && l.tp > 1) != (l.ring > 1)
                    || !l.tp.is_multiple_of(l.ring)
                    || over_heads && self.work.heads == 0
                    || divides && c.micro_batch > 0 && tokens < u64::from(l.tp)
            }
            Reason::Context => l.ring > 1 && job.context() / u64::from(l.ring) < self.space.ring_tokens,
            Reason::Logits => {
                l.scheme == Scheme::RsMmAg
                    && l.tp > 1
                    && c.micro_batch > 0
                    && self.scores_bytes(c) > SCORES_SHARE * self.cluster.device.memory_bytes.value
            }
            Reason::Precision => self.cluster.flops_per_s(l.precision).is_none(),
            Reason::Fp4Training => train && l.precision == Precision::Fp4 && !self.space.fp4_training,
            Reason::Optimizer => {
                c.optimizer != Optimizer::Replicated
                    && (c.replicas.saturating_mul(self.weight_copies(c)) < 2 || !train)
            }
            Reason::Tier => {
                let experts = c.experts_at == ExpertsAt::Host && (train || self.experts().is_none());
                let cache = c.cache_at != CacheAt::Hbm && train;
                experts || cache || c.cache_at == CacheAt::Peer && self.devices < 2
            }
            Reason::Recompute => c.recompute != Recompute::None && !train,
            Reason::Domain => {
                self.space.inside_domain
                    && (self.straddles(l.tp) || self.straddles(l.expert_tp.saturating_mul(l.ep)))
            }
            Reason::Rack => {
                self.space.replica_in_rack
                    && c.copies() > 1
                    && self.devices > self.rack()
                    && !self.rack().is_multiple_of(c.unit().saturating_mul(c.pp))
            }
            Reason::Drops | Reason::Memory => false,
        }
    }

    /// The arithmetic behind a reason.
    pub fn says(&self, reason: Reason, c: &Candidate) -> String {
        let l = &c.layout;
        let unit = |n: u64, what: &str| if n == 1 { format!("1 {what}") } else { format!("{n} {what}s") };
        match reason {
            Reason::Ranks => {
                let moe = l.ep > 1 || self.work.experts().is_some();
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
                // Pins go up to 2²⁴ each: four of them need more than 64 bits.
                let product = |of: &[u32]| of.iter().map(|n| u128::from(*n)).product::<u128>();
                let ranks = if moe && l.expert_tp == l.tp {
                    product(&[l.tp, l.ep, c.pp, c.expert_replicas])
                } else {
                    product(&[l.tp, c.replicas, c.pp])
                };
                if ranks == u128::from(self.devices) {
                    return format!("{axes} = {ranks} ranks, but the two sides of a stage differ");
                }
                format!("{axes} = {ranks} ranks, {} devices", self.devices)
            }
            Reason::Layers => format!(
                "{} of {} each need {} layers, the model has {}",
                unit(c.pp.into(), "stage"),
                unit(c.interleave.into(), "piece"),
                u64::from(c.pp) * u64::from(c.interleave),
                self.work.layers()
            ),
            Reason::Heads => {
                let (cut, heads, kv) = (self.head_ranks(c), self.work.heads, self.work.kv_heads);
                let each = heads as f64 / f64::from(cut);
                format!("{heads} heads (keys and values: {kv}) over {cut} ranks are {each:.2} each")
            }
            Reason::Experts => match self.experts() {
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
                let share = self.job.batch().div_ceil(u64::from(c.replicas.max(1)));
                let micro = match c.micro_batch {
                    0 => String::new(),
                    1 => ", in micro-batches of one".to_string(),
                    m => format!(", in micro-batches of {m}"),
                };
                format!(
                    "{} over {} are at most {share} each{micro}",
                    unit(self.job.batch(), "sequence"),
                    unit(c.replicas.into(), "replica")
                )
            }
            Reason::Schedule => match self.schedule(c) {
                Some(why) => why.to_string(),
                None => format!("{} orders backward passes, and this job has none", c.schedule.name()),
            },
            Reason::Scheme => {
                if (l.ring > 1) != (matches!(l.scheme, Scheme::Ring | Scheme::Striped) && l.tp > 1)
                    || !l.tp.is_multiple_of(l.ring)
                {
                    let name = l.scheme.name();
                    return format!("{name} with a ring of {} ranks within tp = {}", l.ring, l.tp);
                }
                if self.work.heads == 0 {
                    return format!("{} divides attention, and no layer has any", l.scheme.name());
                }
                let tokens = self.tokens(c);
                format!("{} divides {tokens} tokens of a micro-batch over tp = {}", l.scheme.name(), l.tp)
            }
            Reason::Context => format!(
                "{} tokens over a ring of {} are {} each, below {}",
                self.job.context(),
                l.ring,
                self.job.context() / u64::from(l.ring),
                self.space.ring_tokens
            ),
            Reason::Logits => format!(
                "{} × {} queries × {} keys × {} heads × 2 B are {} of partial scores per rank, more than {:.0} % of {}",
                unit(c.micro_batch.into(), "sequence"),
                self.job.queries(),
                self.job.context(),
                self.work.heads,
                bytes(self.scores_bytes(c)),
                SCORES_SHARE * 100.0,
                bytes(self.cluster.device.memory_bytes.value)
            ),
            Reason::Precision => {
                let has: Vec<_> = Precision::ALL
                    .into_iter()
                    .filter(|p| self.cluster.flops_per_s(*p).is_some())
                    .map(Precision::name)
                    .collect();
                let device = &self.cluster.device.name;
                format!("{device} multiplies {}, not {}", has.join(", "), l.precision.name())
            }
            Reason::Fp4Training => "fp4 in a training step, with no override".to_string(),
            Reason::Optimizer => match self.train() {
                true => {
                    let ranks = unit(u64::from(c.replicas) * u64::from(self.weight_copies(c)), "rank");
                    format!("{} over {ranks} with the same weights", c.optimizer.name())
                }
                false => format!("{}, and inference has no optimizer", c.optimizer.name()),
            },
            Reason::Tier => {
                let (e, k) = (c.experts_at.name(), c.cache_at.name());
                let job = if self.train() { "training" } else { "inference" };
                format!("experts at {e} and cache at {k} in {job} on {} devices", self.devices)
            }
            Reason::Recompute => format!("recompute = {} without a backward pass", c.recompute.name()),
            Reason::Domain => format!(
                "groups of tp = {} and expert_tp·ep = {} in domains of {}",
                l.tp,
                u64::from(l.expert_tp) * u64::from(l.ep),
                self.cluster.domain
            ),
            Reason::Rack => format!(
                "{} of {}·{} = {} ranks in racks of {}",
                unit(c.copies().into(), "copy").replace("copys", "copies"),
                c.unit(),
                c.pp,
                u64::from(c.unit()) * u64::from(c.pp),
                self.rack()
            ),
            Reason::Drops | Reason::Memory => String::new(),
        }
    }

    fn train(&self) -> bool {
        matches!(self.job, Job::Train { .. })
    }

    fn rack(&self) -> u32 {
        self.cluster.hosts_per_rack * self.cluster.devices_per_host
    }

    /// Whether aligned groups of so many neighbours cross a border between domains.
    fn straddles(&self, ranks: u32) -> bool {
        self.devices > self.cluster.domain && !self.cluster.domain.is_multiple_of(ranks)
    }

    /// Ranks over which heads are cut.
    fn head_ranks(&self, c: &Candidate) -> u32 {
        (c.layout.tp / c.layout.ring.max(1)).max(1)
    }

    /// Ranks of one tp group that hold the same weights.
    fn weight_copies(&self, c: &Candidate) -> u32 {
        match c.layout.scheme {
            Scheme::Ulysses => c.layout.tp,
            Scheme::Ring | Scheme::Striped => c.layout.ring.max(1),
            Scheme::Megatron | Scheme::MegatronSequence | Scheme::RsMmAg => 1,
        }
    }

    /// Tokens of one micro-batch of one replica.
    fn tokens(&self, c: &Candidate) -> u64 {
        u64::from(c.micro_batch) * self.job.queries()
    }

    /// Partial scores of all heads that a rank writes under rs_mm_ag.
    fn scores_bytes(&self, c: &Candidate) -> f64 {
        self.tokens(c) as f64 * self.job.context() as f64 * self.work.heads as f64 * 2.0
    }

    /// Routed experts of a layer and their inner width.
    fn experts(&self) -> Option<(u64, u64)> {
        self.work.stacks.iter().flat_map(|s| &s.rows).find_map(|r| match r.op {
            RowOp::Experts { experts, n, .. } => Some((experts, n)),
            _ => None,
        })
    }

    fn schedule(&self, c: &Candidate) -> Option<schedule::Why> {
        let share = self.job.batch().div_ceil(u64::from(c.replicas.max(1)));
        let micro_batches = share.div_ceil(u64::from(c.micro_batch.max(1)));
        let micro_batches = u32::try_from(micro_batches).unwrap_or(u32::MAX);
        let layers = u32::try_from(self.work.layers()).unwrap_or(u32::MAX);
        schedule::legal(c.schedule, c.pp, c.interleave, micro_batches, layers).err()
    }
}

/// Bytes for people.
pub(super) fn bytes(n: f64) -> String {
    Bytes(n.max(0.0) as u64).to_string()
}
