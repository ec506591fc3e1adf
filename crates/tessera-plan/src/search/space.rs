//! Defines the search space: the values of each knob, the knobs that a user pins, and the meshes
//! into which a number of devices factors.

use tessera_base::{Diagnostic, Diagnostics, closest_name, format_choices};
use tessera_cost::moe::Routing;
use tessera_cost::params::{
    ExpertStorage, KvCacheStorage, OptimizerSharding, PipelineSchedule, Recompute, TpScheme,
};
use tessera_ir::analytic_model::{AnalyticModel, LayerOp, LayerOpKind};
use tessera_mesh::{Cluster, Precision};

use super::thresholds::Thresholds;
use super::{Candidate, Job};
use crate::codes::T1200;

/// The values that each knob may take. A value without effect (a schedule with one stage, a sharded
/// optimizer with one replica) does not count as a separate candidate.
#[derive(Debug, Clone, PartialEq)]
pub struct SearchSpace {
    /// Devices to use; the search uses fewer only where no candidate is legal on all of them.
    pub devices: u32,
    /// Tensor-parallel schemes. Ring schemes try every ring size that divides tp.
    pub schemes: Vec<TpScheme>,
    /// Pipeline schedules to try where a candidate has several stages.
    pub schedules: Vec<PipelineSchedule>,
    /// Model chunks per stage, for interleaved schedules.
    pub interleaves: Vec<u32>,
    /// Sequences per micro-batch. Inference also tries a replica's whole share of the batch, and
    /// that share divided by pp and by 2 · pp.
    pub micro_batches: Vec<u32>,
    /// Policies to try on which activations the backward pass recomputes.
    pub recompute: Vec<Recompute>,
    /// Shardings of the optimizer state to try; only [`OptimizerSharding::Replicated`] is legal for
    /// inference.
    pub optimizers: Vec<OptimizerSharding>,
    /// Placements of the routed experts' weights to try; host memory is legal for inference alone.
    pub experts_at: Vec<ExpertStorage>,
    /// Placements of old keys and values.
    pub caches_at: Vec<KvCacheStorage>,
    /// Tokens to keep where old keys and values are dropped; if absent, as many as fit.
    pub window: Option<u64>,
    /// Precisions of matmul operands to try.
    pub precisions: Vec<Precision>,
    /// Precisions of dispatched tokens to try, where the experts span several ranks.
    pub wires: Vec<Precision>,
    /// Expert capacities in per cent of the even share; 0 means unlimited, so that no token is
    /// dropped.
    pub capacities_pct: Vec<u32>,
    /// Whether to reject uneven shards.
    pub even_only: bool,
    /// Whether training may compute in fp4; otherwise such candidates are rejected with T1211.
    pub fp4_training: bool,
    /// Whether to reject candidates with several model replicas of which one spans racks.
    pub replica_in_rack: bool,
    /// Whether to reject tp and ep collectives that leave a scale-up domain.
    pub within_domain: bool,
    /// Minimum number of context tokens per ring rank.
    pub min_ring_tokens: u64,
    /// Maximum share of expert assignments that a capacity may drop, unless the capacity is pinned.
    pub max_dropped: f64,
    /// Share of the cold experts that a predictor names one layer before the router does. The layer
    /// waits for the fetch of the others.
    pub prefetch_hit_rate: f64,
    /// Thresholds of the gates that are evaluated for each ranked candidate.
    pub thresholds: Thresholds,
    /// Number of best candidates to return.
    pub best_count: usize,
    /// Number of Pareto-front candidates to return.
    pub front_count: usize,
}

impl SearchSpace {
    /// Returns every value that is reasonable for a workload on a cluster.
    #[must_use]
    pub fn for_job(work: &AnalyticModel, job: Job, cluster: &Cluster) -> SearchSpace {
        let train = matches!(job, Job::Train { .. });
        let decode = matches!(job, Job::Decode { .. });
        let moe = work.routed_experts().is_some();
        let has = |p: &Precision| cluster.flops_per_s(*p).is_some();
        let mut precisions = vec![Precision::Bf16, Precision::Fp8];
        let mut wires = vec![Precision::Bf16, Precision::Fp8];
        if !train {
            precisions.push(Precision::Fp4);
        }
        precisions.retain(has);
        if precisions.is_empty() {
            // A device without tensor cores for narrow formats computes in f32.
            precisions.push(Precision::F32);
        }
        wires.retain(|p| *p == Precision::Bf16 || has(p));
        SearchSpace {
            devices: cluster.device_count(),
            schemes: TpScheme::ALL.to_vec(),
            schedules: if train { PipelineSchedule::ALL.to_vec() } else { vec![PipelineSchedule::OneFOneB] },
            interleaves: vec![2, 4],
            micro_batches: match job {
                Job::Train { .. } => vec![1, 2, 4, 8],
                Job::Prefill { .. } => vec![1, 4, 16],
                Job::Decode { .. } => Vec::new(),
            },
            recompute: if train { Recompute::ALL.to_vec() } else { vec![Recompute::None] },
            optimizers: if train {
                OptimizerSharding::ALL.to_vec()
            } else {
                vec![OptimizerSharding::Replicated]
            },
            experts_at: if moe && !train { ExpertStorage::ALL.to_vec() } else { vec![ExpertStorage::Hbm] },
            caches_at: if decode {
                vec![KvCacheStorage::Hbm, KvCacheStorage::Peer, KvCacheStorage::Host]
            } else {
                vec![KvCacheStorage::Hbm]
            },
            window: None,
            precisions,
            wires,
            capacities_pct: vec![0, 125],
            even_only: false,
            fp4_training: false,
            // Replicas belong in one rack if the rack is one scale-up domain. Where the domain is
            // one host, the rack boundary does not matter.
            replica_in_rack: cluster.domain_size > cluster.devices_per_host,
            within_domain: false,
            min_ring_tokens: 1024,
            max_dropped: 0.01,
            prefetch_hit_rate: 0.0,
            thresholds: Thresholds::default(),
            best_count: 10,
            front_count: 24,
        }
    }
}

macro_rules! pins {
    ($( $name:ident : $ty:ty = $read:expr, $show:expr, $known:expr; )+) => {
        /// The knobs that a user has fixed; `None` leaves a knob to the search.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[allow(missing_docs)]
        pub struct Pins { $(pub $name: Option<$ty>,)+ }

        impl Pins {
            /// Names of all knobs, in declaration order.
            pub const KNOBS: &'static [&'static str] = &[$(stringify!($name),)+];

            fn set(&mut self, knob: &str, value: &str) -> Option<Diagnostic> {
                match knob {
                    $(stringify!($name) => {
                        self.$name = apply($read, value);
                        self.$name.is_none().then(|| {
                            Diagnostic::error(&T1200, format!("invalid value `{value}` for knob `{knob}`"))
                                .with_label(format!("pin {knob}={value}"), format!("must be {}", $known))
                        })
                    })+
                    _ => {
                        let d = Diagnostic::error(&T1200, format!("unknown knob `{knob}`"))
                            .with_label(format!("pin {knob}={value}"), format!("knobs are {}", format_choices(Pins::KNOBS)));
                        Some(match closest_name(knob, Pins::KNOBS.iter().copied()) {
                            Some(n) => d.with_hint(format!("did you mean `{n}`?")),
                            None => d,
                        })
                    }
                }
            }

            /// Returns the pinned knobs with their values in text form.
            #[must_use]
            pub fn values(&self) -> Vec<(&'static str, String)> {
                let mut out = Vec::new();
                $(if let Some(v) = self.$name {
                    out.push((stringify!($name), apply($show, v)));
                })+
                out
            }

            /// Returns these pins with one knob released.
            #[must_use]
            pub fn without(mut self, knob: &str) -> Pins {
                $(if knob == stringify!($name) { self.$name = None; })+
                self
            }

            /// Returns these pins, completed from `other` where a knob is free.
            #[must_use]
            pub fn or(mut self, other: &Pins) -> Pins {
                $(self.$name = self.$name.or(other.$name);)+
                self
            }
        }
    };
}

/// Calls `f(a)`. The signature gives the closures in `pins!` their parameter types.
fn apply<A, B>(f: impl Fn(A) -> B, a: A) -> B {
    f(a)
}
fn parse_count(text: &str) -> Option<u32> {
    text.parse().ok().filter(|n| (1..=MAX_PIN).contains(n))
}
fn join_choices<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> String {
    format_choices(&all.iter().map(|x| name(*x)).collect::<Vec<_>>())
}
const WHOLE_NUMBER: &str = "a whole number from 1 to 16777216";
/// Largest value of a numeric pin.
const MAX_PIN: u32 = 1 << 24;

pins! {
    tp: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    ep: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    pp: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    dp: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    expert_tp: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    scheme: TpScheme = TpScheme::from_name, |v| v.name().to_string(), join_choices(&TpScheme::ALL, TpScheme::name);
    ring: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    schedule: PipelineSchedule = PipelineSchedule::from_name, |v| v.name().to_string(), join_choices(&PipelineSchedule::ALL, PipelineSchedule::name);
    interleave: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    micro_batch: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
    recompute: Recompute = Recompute::from_name, |v| v.name().to_string(), join_choices(&Recompute::ALL, Recompute::name);
    optimizer: OptimizerSharding = OptimizerSharding::from_name, |v| v.name().to_string(), join_choices(&OptimizerSharding::ALL, OptimizerSharding::name);
    experts_at: ExpertStorage = ExpertStorage::from_name, |v| v.name().to_string(), join_choices(&ExpertStorage::ALL, ExpertStorage::name);
    cache_at: KvCacheStorage = KvCacheStorage::from_name, |v| v.name().to_string(), join_choices(&KvCacheStorage::ALL, KvCacheStorage::name);
    precision: Precision = Precision::from_name, |v| v.name().to_string(), join_choices(&Precision::ALL, Precision::name);
    wire: Precision = Precision::from_name, |v| v.name().to_string(), join_choices(&Precision::ALL, Precision::name);
    capacity_pct: u32 = |t| t.parse().ok().filter(|n| *n == 0 || *n >= 100), |v| v.to_string(), "0 or a whole number from 100";
    window: u32 = parse_count, |v| v.to_string(), WHOLE_NUMBER;
}

impl Pins {
    /// Parses `tp=12,ep=6,scheme=ulysses`; spaces may also separate the pins.
    ///
    /// # Errors
    /// T1200 for each pin that cannot be parsed.
    pub fn parse(text: &str) -> Result<Pins, Diagnostics> {
        let (mut pins, mut found) = (Pins::default(), Vec::new());
        for item in text.split([',', ' ']).map(str::trim).filter(|s| !s.is_empty()) {
            match item.split_once('=') {
                Some((knob, value)) => found.extend(pins.set(knob.trim(), value.trim())),
                None => found.push(
                    Diagnostic::error(&T1200, format!("`{item}` is not `knob=value`"))
                        .with_label(format!("pin {item}"), "no `=`"),
                ),
            }
        }
        if found.is_empty() { Ok(pins) } else { Err(found) }
    }

    /// Returns the pins in the form that [`Pins::parse`] reads.
    #[must_use]
    pub fn to_text(&self) -> String {
        self.values().iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(",")
    }

    /// Pins every knob to its value in a candidate.
    #[must_use]
    pub fn from_candidate(c: &Candidate) -> Pins {
        Pins {
            tp: Some(c.layout.tp),
            ep: Some(c.layout.ep),
            pp: Some(c.pp),
            dp: Some(c.model_replicas()),
            expert_tp: Some(c.layout.expert_tp),
            scheme: Some(c.layout.scheme),
            ring: Some(c.layout.ring),
            schedule: Some(c.schedule),
            interleave: Some(c.interleave),
            micro_batch: Some(c.micro_batch),
            recompute: Some(c.recompute),
            optimizer: Some(c.optimizer),
            experts_at: Some(c.experts_at),
            cache_at: Some(c.cache_at),
            precision: Some(c.layout.precision),
            wire: Some(c.layout.wire_precision),
            capacity_pct: Some(c.layout.capacity_pct),
            // The window belongs to the query, not to the candidate.
            window: None,
        }
    }

    /// Returns whether tp, ep, pp and dp are the axes of one mesh: all four are pinned and the
    /// experts' own tp is not.
    #[must_use]
    pub fn has_mesh_axes(&self) -> bool {
        self.tp.is_some()
            && self.ep.is_some()
            && self.pp.is_some()
            && self.dp.is_some()
            && self.expert_tp.is_none()
    }
}

/// A factorization of the ranks: each stage has `tp · replicas = expert_tp · ep · expert_replicas`
/// ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct MeshFactors {
    pub pp: u32,
    pub tp: u32,
    pub ep: u32,
    pub expert_tp: u32,
    pub replicas: u32,
    pub expert_replicas: u32,
}

/// Returns all factorizations of `devices` that the pins allow. `axes` ties the experts' tp to tp,
/// as one four-axis mesh does; a model without experts has no expert factors. The result is empty
/// if the pins cannot multiply to the devices.
pub(super) fn factor_meshes(devices: u32, moe: bool, pins: &Pins, axes: bool) -> Vec<MeshFactors> {
    let fits = |pin: Option<u32>, value: u32| pin.is_none_or(|p| p == value);
    let mut out = Vec::new();
    let experts = moe || pins.ep.is_some_and(|ep| ep > 1);
    for pp in divisors(devices).filter(|pp| fits(pins.pp, *pp)) {
        let stage = devices / pp;
        for tp in divisors(stage).filter(|tp| fits(pins.tp, *tp)) {
            for ep in divisors(stage).filter(|ep| fits(pins.ep, *ep) && (experts || *ep == 1)) {
                for expert_tp in divisors(stage / ep).filter(|e| fits(pins.expert_tp, *e)) {
                    let f = MeshFactors {
                        pp,
                        tp,
                        ep,
                        expert_tp,
                        replicas: stage / tp,
                        expert_replicas: stage / (ep * expert_tp),
                    };
                    let tied = if experts { !axes || expert_tp == tp } else { expert_tp == 1 };
                    if tied && fits(pins.dp, f.model_replicas()) {
                        out.push(f);
                    }
                }
            }
        }
    }
    out
}

impl MeshFactors {
    /// Returns the number of model replicas, which share nothing but gradients.
    pub fn model_replicas(&self) -> u32 {
        replica_count(
            self.tp,
            self.replicas,
            least_common_multiple(self.tp, self.expert_tp.saturating_mul(self.ep)),
        )
    }
}

impl Candidate {
    /// Returns the number of consecutive ranks that hold one stage of one model replica: the least
    /// common multiple of tp and the experts' ranks.
    #[must_use]
    pub fn replica_stage_ranks(&self) -> u32 {
        least_common_multiple(self.layout.tp, self.layout.expert_tp.saturating_mul(self.layout.ep))
    }

    /// Returns the number of model replicas, which share nothing but gradients: the dp axis.
    #[must_use]
    pub fn model_replicas(&self) -> u32 {
        replica_count(self.layout.tp, self.replicas, self.replica_stage_ranks())
    }

    /// Returns the number of ranks: tp · replicas · pp.
    #[must_use]
    pub fn rank_count(&self) -> u32 {
        self.layout.tp.saturating_mul(self.replicas).saturating_mul(self.pp)
    }

    /// Returns the value of every knob on one line, in the form that [`Pins::parse`] reads.
    #[must_use]
    pub fn to_text(&self) -> String {
        Pins::from_candidate(self).to_text()
    }
}

/// Returns the divisors of `n` in ascending order.
pub(super) fn divisors(n: u32) -> impl Iterator<Item = u32> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}

pub(super) fn least_common_multiple(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}

fn replica_count(tp: u32, replicas: u32, unit: u32) -> u32 {
    (u64::from(tp) * u64::from(replicas) / u64::from(unit.max(1))) as u32
}

/// Whether some knobs can have an effect on a model under a routing, whatever the mesh.
#[derive(Debug, Clone, Copy)]
pub(super) struct RelevantKnobs {
    /// Whether the model has routed experts.
    pub experts: bool,
    /// Whether a capacity may drop tokens, because the routing is uneven.
    pub capacity_drops: bool,
    /// Whether attention stores scores that can be recomputed.
    pub stores_scores: bool,
}

impl RelevantKnobs {
    pub fn from_model(work: &AnalyticModel, routing: Routing) -> RelevantKnobs {
        let experts = work.routed_experts().is_some();
        let scores = |r: &LayerOp| matches!(r.kind, LayerOpKind::Attention { stored_score_bytes, .. } if stored_score_bytes > 0);
        RelevantKnobs {
            experts,
            capacity_drops: experts && !matches!(routing, Routing::Balanced | Routing::Workload(0)),
            stores_scores: work.stacks.iter().flat_map(|s| &s.ops).any(scores),
        }
    }
}

/// The values left to choose within one [`MeshFactors`], each list in the order of enumeration.
#[derive(Debug, Default)]
pub(super) struct KnobValues {
    pub schemes: Vec<(TpScheme, u32)>,
    pub precisions: Vec<Precision>,
    /// Dispatch precision and expert capacity.
    pub wires: Vec<(Precision, u32)>,
    pub micro_batches: Vec<u32>,
    pub recompute: Vec<Recompute>,
    pub schedules: Vec<(PipelineSchedule, u32)>,
    /// Optimizer sharding, expert placement and cache placement.
    pub placements: Vec<(OptimizerSharding, ExpertStorage, KvCacheStorage)>,
}

/// Number of candidates below each level of the enumeration. `micro_batch` and `recompute` count
/// for one state placement.
#[derive(Debug, Clone, Copy)]
pub(super) struct SubtreeSizes {
    pub mesh: u64,
    pub scheme: u64,
    pub precision: u64,
    /// Number of candidates with one precision and one state placement.
    pub placement: u64,
    pub micro_batch: u64,
    pub recompute: u64,
}

impl KnobValues {
    /// Fills the lists for one mesh. A knob without effect on this mesh takes its first value,
    /// unless it is pinned.
    pub fn fill_for_mesh(
        &mut self,
        s: &SearchSpace,
        pins: &Pins,
        f: &MeshFactors,
        job: Job,
        matters: RelevantKnobs,
    ) {
        fill_values(&mut self.precisions, pins.precision, &s.precisions, true);
        fill_values(&mut self.recompute, pins.recompute, &s.recompute, true);
        if !matters.stores_scores && pins.recompute.is_none() {
            self.recompute.retain(|r| *r != Recompute::Attention || s.recompute.len() == 1);
        }
        self.wires.clear();
        for wire in knob_values(&pins.wire, &s.wires, f.ep > 1) {
            let capacities = knob_values(&pins.capacity_pct, &s.capacities_pct, matters.capacity_drops);
            self.wires.extend(capacities.iter().map(|c| (*wire, *c)));
        }
        self.placements.clear();
        // Ranks of tp may also hold the same weights; the constraints decide that once the scheme
        // is known.
        for o in knob_values(&pins.optimizer, &s.optimizers, f.replicas > 1 || f.tp > 1) {
            for e in knob_values(&pins.experts_at, &s.experts_at, matters.experts) {
                self.placements
                    .extend(knob_values(&pins.cache_at, &s.caches_at, true).iter().map(|c| (*o, *e, *c)));
            }
        }
        self.fill_schemes(s, pins, f);
        self.fill_schedules(s, pins, f);
        self.fill_micro_batches(s, pins, f, job);
    }

    /// Fills the schemes, each with the ring sizes that it may have.
    fn fill_schemes(&mut self, s: &SearchSpace, pins: &Pins, f: &MeshFactors) {
        self.schemes.clear();
        for scheme in s.schemes.iter().copied().filter(|x| pins.scheme.is_none_or(|p| p == *x)).chain(
            // A pin may name a value outside of the search space.
            pins.scheme.filter(|p| !s.schemes.contains(p)),
        ) {
            if f.tp == 1 && pins.scheme.is_none() && !self.schemes.is_empty() {
                break;
            }
            let ringed = scheme.has_rings();
            match (ringed, pins.ring) {
                (true, Some(r)) => self.schemes.push((scheme, r)),
                (true, None) if f.tp == 1 => self.schemes.push((scheme, 1)),
                (true, None) => self.schemes.extend(divisors(f.tp).skip(1).map(|r| (scheme, r))),
                (false, Some(r)) if r > 1 && pins.scheme.is_none() => {}
                (false, Some(r)) => self.schemes.push((scheme, r)),
                (false, None) => self.schemes.push((scheme, 1)),
            }
        }
    }

    /// Fills the pipeline schedules, each with the numbers of chunks per stage that it may have.
    fn fill_schedules(&mut self, s: &SearchSpace, pins: &Pins, f: &MeshFactors) {
        self.schedules.clear();
        for x in knob_values(&pins.schedule, &s.schedules, f.pp > 1).iter().copied() {
            match (x, pins.interleave) {
                (_, Some(v)) => self.schedules.push((x, v)),
                (PipelineSchedule::Interleaved, None) => {
                    self.schedules.extend(s.interleaves.iter().map(|v| (x, *v)));
                }
                (_, None) => self.schedules.push((x, 1)),
            }
        }
    }

    /// Fills the micro-batches: the pin, or those of the search space and, at inference, the sizes
    /// of one, `pp` and twice `pp` waves.
    fn fill_micro_batches(&mut self, s: &SearchSpace, pins: &Pins, f: &MeshFactors, job: Job) {
        self.micro_batches.clear();
        if let Some(pinned) = pins.micro_batch {
            self.micro_batches.push(pinned);
            return;
        }
        self.micro_batches.extend(&s.micro_batches);
        if !matches!(job, Job::Train { .. }) {
            let share = job.batch_size().div_ceil(u64::from(f.replicas));
            let micro_batch_for =
                |waves: u32| u32::try_from(share.div_ceil(u64::from(waves))).unwrap_or(u32::MAX);
            self.micro_batches.extend([1, f.pp, 2 * f.pp].map(micro_batch_for));
        }
        self.micro_batches.sort_unstable();
        self.micro_batches.dedup();
    }

    /// Returns the number of candidates below one choice at each level of the enumeration.
    pub fn subtree_sizes(&self) -> SubtreeSizes {
        let n = |len: usize| len as u64;
        let recompute = n(self.schedules.len());
        let micro_batch = recompute * n(self.recompute.len());
        let place = micro_batch * n(self.micro_batches.len()) * n(self.wires.len());
        let precision = place * n(self.placements.len());
        let scheme = precision * n(self.precisions.len());
        SubtreeSizes {
            mesh: scheme * n(self.schemes.len()),
            scheme,
            precision,
            placement: place,
            micro_batch,
            recompute,
        }
    }
}

fn fill_values<T: Copy>(list: &mut Vec<T>, pin: Option<T>, all: &[T], matters: bool) {
    list.clear();
    list.extend(knob_values(&pin, all, matters));
}

/// Returns the values of a knob: the pin, all values, or only the first if the knob has no effect.
fn knob_values<'a, T>(pin: &'a Option<T>, all: &'a [T], matters: bool) -> &'a [T] {
    match pin {
        Some(_) => pin.as_slice(),
        None if matters => all,
        None => &all[..all.len().min(1)],
    }
}
