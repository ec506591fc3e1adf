//! What a search may choose from: the values of each knob, what a person has pinned, and the meshes that a number of
//! devices factors into.

use tessera_base::{Code, Diagnostic, Diagnostics, choices, nearest};
use tessera_cost::knobs::{CacheAt, ExpertsAt, Optimizer, Recompute, Schedule, Scheme};
use tessera_cost::moe::Routing;
use tessera_ir::work::{Row, RowOp, Work};
use tessera_mesh::{Cluster, Precision};

use super::thresholds::Thresholds;
use super::{Candidate, Job};

/// A pin cannot be read.
pub static T1200: Code = Code {
    id: "T1200",
    title: "pin of a mapping cannot be read",
    page: "Pins are written as `knob=value`, separated by commas: `tp=12,ep=6,scheme=ulysses`. The message names the \
knob or the value that is not known, and the nearest ones that are.\n\nWith all four of tp, ep, pp and dp pinned they are \
the axes of one mesh and must multiply to the number of devices. With fewer, attention and experts may factor the same \
ranks in two ways: tp · replicas = expert_tp · ep · expert replicas.",
};

/// Which values each knob may take. A value that changes nothing (a schedule with one stage, an optimizer shared by one
/// replica) is never counted as an arrangement of its own.
#[derive(Debug, Clone, PartialEq)]
pub struct Space {
    /// Devices to use; a search uses fewer only where nothing fits on all.
    pub devices: u32,
    /// How tp cuts. Rings take every size that divides tp.
    pub schemes: Vec<Scheme>,
    /// Orders of micro-batches.
    pub schedules: Vec<Schedule>,
    /// Pieces of layers per stage, where the schedule has several.
    pub interleaves: Vec<u32>,
    /// Sequences of a micro-batch. Inference also tries a replica's whole share, and its share over pp and 2 · pp.
    pub micro_batches: Vec<u32>,
    /// What is computed again.
    pub recompute: Vec<Recompute>,
    /// Who holds optimizer state.
    pub optimizers: Vec<Optimizer>,
    /// Where experts lie.
    pub experts_at: Vec<ExpertsAt>,
    /// Where old keys and values lie.
    pub caches_at: Vec<CacheAt>,
    /// Tokens that stay where old keys and values are dropped; as many as there is room for where absent.
    pub window: Option<u64>,
    /// Precision of products.
    pub precisions: Vec<Precision>,
    /// Precision of what experts are sent.
    pub wires: Vec<Precision>,
    /// Capacity of an expert in per cent of the even share; 0 drops nothing.
    pub capacities_pct: Vec<u32>,
    /// Refuse pieces that differ by one.
    pub strict: bool,
    /// Allow fp4 in training.
    pub fp4_training: bool,
    /// With several copies of the model, refuse a copy that does not stay in one rack.
    pub replica_in_rack: bool,
    /// Refuse collectives over tp or ep that leave a domain.
    pub inside_domain: bool,
    /// Fewest tokens of a context that one rank of a ring may hold.
    pub ring_tokens: u64,
    /// Most assignments to experts that a capacity may drop, as a share, unless it is pinned.
    pub most_dropped: f64,
    /// Share of the cold experts that a predictor names one layer before the router does; the others are fetched while their
    /// layer waits.
    pub forecast: f64,
    /// Limits of the gates.
    pub limits: Thresholds,
    /// How many of the best to give.
    pub keep: usize,
    /// How many of the Pareto front to give.
    pub show: usize,
}

impl Space {
    /// Everything that makes sense for a job on a machine.
    #[must_use]
    pub fn of(work: &Work, job: Job, cluster: &Cluster) -> Space {
        let train = matches!(job, Job::Train { .. });
        let decode = matches!(job, Job::Decode { .. });
        let moe = work.experts().is_some();
        let has = |p: &Precision| cluster.flops_per_s(*p).is_some();
        let mut precisions = vec![Precision::Bf16, Precision::Fp8];
        let mut wires = vec![Precision::Bf16, Precision::Fp8];
        if !train {
            precisions.push(Precision::Fp4);
        }
        precisions.retain(has);
        if precisions.is_empty() {
            // A device without units for narrow formats computes at the widest.
            precisions.push(Precision::F32);
        }
        wires.retain(|p| *p == Precision::Bf16 || has(p));
        Space {
            devices: cluster.devices(),
            schemes: Scheme::ALL.to_vec(),
            schedules: if train { Schedule::ALL.to_vec() } else { vec![Schedule::OneFOneB] },
            interleaves: vec![2, 4],
            micro_batches: match job {
                Job::Train { .. } => vec![1, 2, 4, 8],
                Job::Prefill { .. } => vec![1, 4, 16],
                Job::Decode { .. } => Vec::new(),
            },
            recompute: if train { Recompute::ALL.to_vec() } else { vec![Recompute::None] },
            optimizers: if train { Optimizer::ALL.to_vec() } else { vec![Optimizer::Replicated] },
            experts_at: if moe && !train { ExpertsAt::ALL.to_vec() } else { vec![ExpertsAt::Hbm] },
            caches_at: if decode {
                vec![CacheAt::Hbm, CacheAt::Peer, CacheAt::Host]
            } else {
                vec![CacheAt::Hbm]
            },
            window: None,
            precisions,
            wires,
            capacities_pct: vec![0, 125],
            strict: false,
            fp4_training: false,
            // A rack that is one domain is where copies belong; where a domain is one host, a rack is no border.
            replica_in_rack: cluster.domain > cluster.devices_per_host,
            inside_domain: false,
            ring_tokens: 1024,
            most_dropped: 0.01,
            forecast: 0.0,
            limits: Thresholds::default(),
            keep: 10,
            show: 24,
        }
    }
}

macro_rules! pins {
    ($( $name:ident : $ty:ty = $read:expr, $show:expr, $known:expr; )+) => {
        /// What a person has decided; `None` leaves a knob to the search.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
        #[allow(missing_docs)]
        pub struct Pins { $(pub $name: Option<$ty>,)+ }

        impl Pins {
            /// Names of all knobs, in order.
            pub const KNOBS: &'static [&'static str] = &[$(stringify!($name),)+];

            fn set(&mut self, knob: &str, value: &str) -> Option<Diagnostic> {
                match knob {
                    $(stringify!($name) => {
                        self.$name = apply($read, value);
                        self.$name.is_none().then(|| {
                            Diagnostic::error(&T1200, format!("`{knob}` cannot be `{value}`"))
                                .at(format!("pin {knob}={value}"), format!("must be {}", $known))
                        })
                    })+
                    _ => {
                        let d = Diagnostic::error(&T1200, format!("no knob is named `{knob}`"))
                            .at(format!("pin {knob}={value}"), format!("knobs are {}", choices(Pins::KNOBS)));
                        Some(match nearest(knob, Pins::KNOBS.iter().copied()) {
                            Some(n) => d.hint(format!("did you mean `{n}`?")),
                            None => d,
                        })
                    }
                }
            }

            /// Knobs that are pinned, with their values as they are written.
            #[must_use]
            pub fn values(&self) -> Vec<(&'static str, String)> {
                let mut out = Vec::new();
                $(if let Some(v) = self.$name {
                    out.push((stringify!($name), apply($show, v)));
                })+
                out
            }

            /// The same without one knob.
            #[must_use]
            pub fn without(mut self, knob: &str) -> Pins {
                $(if knob == stringify!($name) { self.$name = None; })+
                self
            }

            /// These, and those of another where these leave a knob free.
            #[must_use]
            pub fn or(mut self, other: &Pins) -> Pins {
                $(self.$name = self.$name.or(other.$name);)+
                self
            }
        }
    };
}

/// Gives a closure its types.
fn apply<A, B>(f: impl Fn(A) -> B, a: A) -> B {
    f(a)
}
fn count(text: &str) -> Option<u32> {
    text.parse().ok().filter(|n| (1..=MOST).contains(n))
}
fn precision(text: &str) -> Option<Precision> {
    Precision::ALL.into_iter().find(|p| p.name() == text)
}
fn words<T: Copy>(all: &[T], name: fn(T) -> &'static str) -> String {
    choices(&all.iter().map(|x| name(*x)).collect::<Vec<_>>())
}
const WHOLE: &str = "a whole number from 1 to 16777216";
/// Largest value of a pin.
const MOST: u32 = 1 << 24;

pins! {
    tp: u32 = count, |v| v.to_string(), WHOLE;
    ep: u32 = count, |v| v.to_string(), WHOLE;
    pp: u32 = count, |v| v.to_string(), WHOLE;
    dp: u32 = count, |v| v.to_string(), WHOLE;
    expert_tp: u32 = count, |v| v.to_string(), WHOLE;
    scheme: Scheme = Scheme::named, |v| v.name().to_string(), words(Scheme::ALL, Scheme::name);
    ring: u32 = count, |v| v.to_string(), WHOLE;
    schedule: Schedule = Schedule::named, |v| v.name().to_string(), words(Schedule::ALL, Schedule::name);
    interleave: u32 = count, |v| v.to_string(), WHOLE;
    micro_batch: u32 = count, |v| v.to_string(), WHOLE;
    recompute: Recompute = Recompute::named, |v| v.name().to_string(), words(Recompute::ALL, Recompute::name);
    optimizer: Optimizer = Optimizer::named, |v| v.name().to_string(), words(Optimizer::ALL, Optimizer::name);
    experts_at: ExpertsAt = ExpertsAt::named, |v| v.name().to_string(), words(ExpertsAt::ALL, ExpertsAt::name);
    cache_at: CacheAt = CacheAt::named, |v| v.name().to_string(), words(CacheAt::ALL, CacheAt::name);
    precision: Precision = precision, |v| v.name().to_string(), words(&Precision::ALL, Precision::name);
    wire: Precision = precision, |v| v.name().to_string(), words(&Precision::ALL, Precision::name);
    capacity_pct: u32 = |t| t.parse().ok().filter(|n| *n == 0 || *n >= 100), |v| v.to_string(), "0 or a whole number from 100";
    window: u32 = count, |v| v.to_string(), WHOLE;
}

impl Pins {
    /// Reads `tp=12,ep=6,scheme=ulysses`; blanks between are fine.
    ///
    /// # Errors
    /// T1200 for each pin that cannot be read.
    pub fn parse(text: &str) -> Result<Pins, Diagnostics> {
        let (mut pins, mut found) = (Pins::default(), Vec::new());
        for item in text.split([',', ' ']).map(str::trim).filter(|s| !s.is_empty()) {
            match item.split_once('=') {
                Some((knob, value)) => found.extend(pins.set(knob.trim(), value.trim())),
                None => found.push(
                    Diagnostic::error(&T1200, format!("`{item}` is not `knob=value`"))
                        .at(format!("pin {item}"), "no `=`"),
                ),
            }
        }
        if found.is_empty() { Ok(pins) } else { Err(found) }
    }

    /// As [`Pins::parse`] reads it.
    #[must_use]
    pub fn text(&self) -> String {
        self.values().iter().map(|(k, v)| format!("{k}={v}")).collect::<Vec<_>>().join(",")
    }

    /// All knobs as a candidate has them, so that nothing is left to choose.
    #[must_use]
    pub fn of(c: &Candidate) -> Pins {
        Pins {
            tp: Some(c.layout.tp),
            ep: Some(c.layout.ep),
            pp: Some(c.pp),
            dp: Some(c.copies()),
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
            wire: Some(c.layout.wire),
            capacity_pct: Some(c.layout.capacity_pct),
            // Of the question, not of an arrangement.
            window: None,
        }
    }

    /// Whether tp, ep, pp and dp are the axes of one mesh: all four pinned and the experts' own tp not.
    #[must_use]
    pub fn four_axes(&self) -> bool {
        self.tp.is_some()
            && self.ep.is_some()
            && self.pp.is_some()
            && self.dp.is_some()
            && self.expert_tp.is_none()
    }
}

/// How ranks divide: stages of `tp · replicas = expert_tp · ep · expert_replicas` ranks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Factors {
    pub pp: u32,
    pub tp: u32,
    pub ep: u32,
    pub expert_tp: u32,
    pub replicas: u32,
    pub expert_replicas: u32,
}

/// All ways to factor `devices` that the pins allow. `axes` ties the experts' tp to tp, as the four axes of one mesh do;
/// without experts they are not cut. Empty where the pins cannot multiply to the devices.
pub(super) fn factors(devices: u32, moe: bool, pins: &Pins, axes: bool) -> Vec<Factors> {
    let fits = |pin: Option<u32>, value: u32| pin.is_none_or(|p| p == value);
    let mut out = Vec::new();
    let experts = moe || pins.ep.is_some_and(|ep| ep > 1);
    for pp in divisors(devices).filter(|pp| fits(pins.pp, *pp)) {
        let stage = devices / pp;
        for tp in divisors(stage).filter(|tp| fits(pins.tp, *tp)) {
            for ep in divisors(stage).filter(|ep| fits(pins.ep, *ep) && (experts || *ep == 1)) {
                for expert_tp in divisors(stage / ep).filter(|e| fits(pins.expert_tp, *e)) {
                    let f = Factors {
                        pp,
                        tp,
                        ep,
                        expert_tp,
                        replicas: stage / tp,
                        expert_replicas: stage / (ep * expert_tp),
                    };
                    let tied = if experts { !axes || expert_tp == tp } else { expert_tp == 1 };
                    if tied && fits(pins.dp, f.copies()) {
                        out.push(f);
                    }
                }
            }
        }
    }
    out
}

impl Factors {
    /// Copies of the model that share nothing but gradients.
    pub fn copies(&self) -> u32 {
        copies(self.tp, self.replicas, lcm(self.tp, self.expert_tp.saturating_mul(self.ep)))
    }
}

impl Candidate {
    /// Ranks that hold one stage of one copy, standing together: the least that both tp and the experts' ranks divide.
    #[must_use]
    pub fn unit(&self) -> u32 {
        lcm(self.layout.tp, self.layout.expert_tp.saturating_mul(self.layout.ep))
    }

    /// Copies of the model that share nothing but gradients: the dp axis.
    #[must_use]
    pub fn copies(&self) -> u32 {
        copies(self.layout.tp, self.replicas, self.unit())
    }

    /// Ranks of all stages and copies.
    #[must_use]
    pub fn ranks(&self) -> u32 {
        self.layout.tp.saturating_mul(self.replicas).saturating_mul(self.pp)
    }

    /// One line that names every knob that chooses something.
    #[must_use]
    pub fn text(&self) -> String {
        Pins::of(self).text()
    }
}

/// Divisors in order.
pub(super) fn divisors(n: u32) -> impl Iterator<Item = u32> {
    (1..=n).filter(move |d| n.is_multiple_of(*d))
}

pub(super) fn lcm(a: u32, b: u32) -> u32 {
    let (mut x, mut y) = (a, b);
    while y != 0 {
        (x, y) = (y, x % y);
    }
    (a / x.max(1)).saturating_mul(b)
}

fn copies(tp: u32, replicas: u32, unit: u32) -> u32 {
    (u64::from(tp) * u64::from(replicas) / u64::from(unit.max(1))) as u32
}

/// Which knobs can change anything, whatever the mesh.
#[derive(Debug, Clone, Copy)]
pub(super) struct Matters {
    /// There are routed experts.
    pub experts: bool,
    /// A capacity may drop something: some expert may get more than its share.
    pub drops: bool,
    /// Attention writes scores that can be computed again.
    pub scores: bool,
}

impl Matters {
    pub fn of(work: &Work, routing: Routing) -> Matters {
        let experts = work.experts().is_some();
        let scores = |r: &Row| matches!(r.op, RowOp::Attention { scores_bytes, .. } if scores_bytes > 0);
        Matters {
            experts,
            drops: experts && !matches!(routing, Routing::Balanced | Routing::W(0)),
            scores: work.stacks.iter().flat_map(|s| &s.rows).any(scores),
        }
    }
}

/// What is left to choose within one [`Factors`], each list in the order in which it is tried.
#[derive(Debug, Default)]
pub(super) struct Lists {
    pub schemes: Vec<(Scheme, u32)>,
    pub precisions: Vec<Precision>,
    /// What is sent, and an expert's capacity.
    pub wires: Vec<(Precision, u32)>,
    pub micro_batches: Vec<u32>,
    pub recompute: Vec<Recompute>,
    pub schedules: Vec<(Schedule, u32)>,
    /// Who holds the optimizer, where experts and old keys lie.
    pub places: Vec<(Optimizer, ExpertsAt, CacheAt)>,
}

/// Candidates below one choice. From the micro-batch on for one place each.
#[derive(Debug, Clone, Copy)]
pub(super) struct Below {
    pub mesh: u64,
    pub scheme: u64,
    pub precision: u64,
    /// Of one place, within a precision.
    pub place: u64,
    pub micro_batch: u64,
    pub recompute: u64,
}

impl Lists {
    /// Fills the lists for one mesh. What cannot matter there takes its first value, unless it is pinned.
    pub fn fill(&mut self, s: &Space, pins: &Pins, f: &Factors, job: Job, matters: Matters) {
        let moe = matters.experts;
        put(&mut self.precisions, pins.precision, &s.precisions, true);
        put(&mut self.recompute, pins.recompute, &s.recompute, true);
        if !matters.scores && pins.recompute.is_none() {
            self.recompute.retain(|r| *r != Recompute::Attention || s.recompute.len() == 1);
        }
        self.wires.clear();
        for wire in some(&pins.wire, &s.wires, f.ep > 1) {
            let capacities = some(&pins.capacity_pct, &s.capacities_pct, matters.drops);
            self.wires.extend(capacities.iter().map(|c| (*wire, *c)));
        }
        self.places.clear();
        // Ranks of tp may hold the same weights too: that is for the scheme to say.
        for o in some(&pins.optimizer, &s.optimizers, f.replicas > 1 || f.tp > 1) {
            for e in some(&pins.experts_at, &s.experts_at, moe) {
                self.places.extend(some(&pins.cache_at, &s.caches_at, true).iter().map(|c| (*o, *e, *c)));
            }
        }

        self.schemes.clear();
        for scheme in s.schemes.iter().copied().filter(|x| pins.scheme.is_none_or(|p| p == *x)).chain(
            // A pin may name what the space leaves out.
            pins.scheme.filter(|p| !s.schemes.contains(p)),
        ) {
            if f.tp == 1 && pins.scheme.is_none() && !self.schemes.is_empty() {
                break;
            }
            let ringed = matches!(scheme, Scheme::Ring | Scheme::Striped);
            match (ringed, pins.ring) {
                (true, Some(r)) => self.schemes.push((scheme, r)),
                (true, None) if f.tp == 1 => self.schemes.push((scheme, 1)),
                (true, None) => self.schemes.extend(divisors(f.tp).skip(1).map(|r| (scheme, r))),
                (false, Some(r)) if r > 1 && pins.scheme.is_none() => {}
                (false, Some(r)) => self.schemes.push((scheme, r)),
                (false, None) => self.schemes.push((scheme, 1)),
            }
        }

        self.schedules.clear();
        let schedule = pins.schedule.map_or(&s.schedules[..], |_| pins.schedule.as_slice());
        let matters = f.pp > 1 || pins.schedule.is_some();
        for x in schedule.iter().copied().take(if matters { usize::MAX } else { 1 }) {
            match (x, pins.interleave) {
                (_, Some(v)) => self.schedules.push((x, v)),
                (Schedule::Interleaved, None) => {
                    self.schedules.extend(s.interleaves.iter().map(|v| (x, *v)));
                }
                (_, None) => self.schedules.push((x, 1)),
            }
        }

        self.micro_batches.clear();
        match pins.micro_batch {
            Some(m) => self.micro_batches.push(m),
            None => {
                self.micro_batches.extend(&s.micro_batches);
                if !matches!(job, Job::Train { .. }) {
                    let share = job.batch().div_ceil(u64::from(f.replicas));
                    let of = |waves: u32| u32::try_from(share.div_ceil(u64::from(waves))).unwrap_or(u32::MAX);
                    self.micro_batches.extend([of(1), of(f.pp), of(2 * f.pp)]);
                }
                self.micro_batches.sort_unstable();
                self.micro_batches.dedup();
            }
        }
    }

    /// Candidates below each choice.
    pub fn below(&self) -> Below {
        let n = |len: usize| len as u64;
        let recompute = n(self.schedules.len());
        let micro_batch = recompute * n(self.recompute.len());
        let place = micro_batch * n(self.micro_batches.len()) * n(self.wires.len());
        let precision = place * n(self.places.len());
        let scheme = precision * n(self.precisions.len());
        Below { mesh: scheme * n(self.schemes.len()), scheme, precision, place, micro_batch, recompute }
    }
}

fn put<T: Copy>(list: &mut Vec<T>, pin: Option<T>, all: &[T], matters: bool) {
    list.clear();
    list.extend(some(&pin, all, matters));
}

/// What a knob may be: the pin, or all values, or the first where it does not matter.
fn some<'a, T>(pin: &'a Option<T>, all: &'a [T], matters: bool) -> &'a [T] {
    match pin {
        Some(_) => pin.as_slice(),
        None if matters => all,
        None => &all[..all.len().min(1)],
    }
}
