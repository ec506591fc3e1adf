//! A doctor for plans: recognises four ways in which a mapping fails, from an estimate or from what a run showed, and
//! offers the remedies of the mapping guide, each with its predicted numbers.
//!
//! A remedy that changes the plan is estimated again like any other arrangement. One that only changes how the same plan
//! is executed is priced by what it adds: bytes on the same links, passes over the same memory. One that costs nothing
//! in this model says so.

use std::fmt::Write as _;

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_cost::knobs::{Recompute, Schedule, Scheme};
use tessera_cost::moe::Routing;
use tessera_cost::{Algorithm, CollectiveOp, Machine, Span};
use tessera_ir::work::RowCut;
use tessera_mesh::{Precision, Tier};

use super::{Candidate, Job, Question, Ranked, Use, estimate};

/// Exchange of experts is congested.
pub static T1225: Code = Code {
    id: "T1225",
    title: "exchange between experts is congested",
    page: "Dispatch and combine take a large share of the step that nothing hides, or reach too little of the links' \
bandwidth. The usual causes are hot experts, sources that send unequal numbers of tokens, and one large exchange that \
nothing runs beside.\n\n\
The mapping guide offers three remedies: tighter bucketing before the exchange, a smaller capacity factor, a larger bank \
of experts. Each is shown with the numbers it would give here; one that does not help says so. A smaller capacity drops \
tokens, a larger bank needs memory.",
};

/// Memory overflows.
pub static T1226: Code = Code {
    id: "T1226",
    title: "fullest rank runs out of memory",
    page: "The bytes of the fullest rank are above what the device has, at plan time or at the peak of a run. \
Activations and the cache are what grows with the load; weights and optimizer state do not.\n\n\
The mapping guide offers three remedies: compute attention again in the backward pass, smaller micro-batches, fewer \
experts per token (from 2 to 1.5: every other token asks for one less). Each is shown with its new peak. If none \
suffices, the weights themselves are too large for this mesh: `tessera plan --why` names the legal neighbours.",
};

/// Numbers of eight bits overflow.
pub static T1227: Code = Code {
    id: "T1227",
    title: "fp8 is not stable here",
    page: "Infinities or NaN appeared while products or messages were at eight bits. E4M3 ends at 448 and keeps three \
bits of fraction: one quantization of a normal activation costs a relative mean square of about 7e-4, and long sums in a \
narrow accumulator lose more.\n\n\
The mapping guide offers three remedies: add partial sums in f32 earlier, scale smaller groups of numbers, scale the loss. \
The numbers shown are what each costs on this machine, not what it gains in accuracy: that is for a run to show.",
};

/// Answers drift.
pub static T1228: Code = Code {
    id: "T1228",
    title: "results differ between reruns",
    page: "The same inputs gave other bits. On several ranks the usual causes are reductions whose order depends on message \
size or on which algorithm the library picked, ranks placed differently, and random draws keyed by something that is not \
the same on a rerun.\n\n\
The mapping guide offers three remedies: pin algorithms, fix the order of ranks, deterministic draws per axis. Pinning an \
algorithm is not enough where its number of channels follows the message size; gathering all partial sums and adding them \
in rank order is. Draws must not be keyed by the rank of tp: its peers hold the same tokens and must choose the same \
experts. Keyed by the token's place in the batch they are right on every mesh.",
};

/// A way to fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Mode {
    /// Dispatch and combine.
    Congestion,
    /// Memory.
    Memory,
    /// Eight-bit numbers.
    Fp8,
    /// Other bits on a rerun.
    Drift,
}

impl Mode {
    /// The code that a finding carries, with its page.
    #[must_use]
    pub fn code(self) -> &'static Code {
        match self {
            Mode::Congestion => &T1225,
            Mode::Memory => &T1226,
            Mode::Fp8 => &T1227,
            Mode::Drift => &T1228,
        }
    }
}

/// What a plan or a run shows. Absent is not known.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Signs {
    /// Dispatch and combine that nothing hides, as a share of the step.
    pub a2a_share: Option<f64>,
    /// Bandwidth of the exchange as a share of what the links carry at best, in bursts.
    pub a2a_rate: Option<f64>,
    /// Most bytes held on one device.
    pub peak_bytes: Option<f64>,
    /// What a device has.
    pub capacity_bytes: Option<f64>,
    /// Infinities or NaN counted while fp8 was in use.
    pub overflows: Option<u64>,
    /// Reruns, calls or ranks whose digest differs from the first one's.
    pub drifted: Option<u64>,
}

impl Signs {
    /// What an estimate shows.
    #[must_use]
    pub fn of(q: &Question, n: &Numbers) -> Signs {
        Signs {
            a2a_share: Some(n.a2a_ns / n.step_ns),
            peak_bytes: Some(n.peak_bytes),
            capacity_bytes: Some(q.machine.cluster.device.memory_bytes.value),
            ..Signs::default()
        }
    }
}

/// From which sign on a mode is named.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Most share of the step that an exchange may take in the open. 0.2 is what Megatron-Core reports for
    /// DeepSeek-V3 inside one rack before any overlap.
    pub a2a_share: f64,
    /// Least share of the links' bandwidth in bursts: the guide's gate.
    pub a2a_rate: f64,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits { a2a_share: 0.2, a2a_rate: 0.8 }
    }
}

/// What an arrangement comes to, whether it fits or not.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Numbers {
    /// One step.
    pub step_ns: f64,
    /// Dispatch and combine that nothing hides.
    pub a2a_ns: f64,
    /// Bytes in device memory of the fullest rank.
    pub peak_bytes: f64,
    /// Share of the assignments to experts that are dropped.
    pub dropped: f64,
    /// Whether the peak is within the device.
    pub fits: bool,
}

impl Numbers {
    /// Estimates an arrangement, also one that only memory forbids.
    ///
    /// # Errors
    /// Every other reason why it cannot run.
    pub fn of(q: &Question, c: &Candidate) -> Result<Numbers, Diagnostics> {
        match estimate(q, c) {
            Ok(r) => Ok(Numbers::from(q, &r)),
            Err(_) => {
                let mut roomy = q.clone();
                let cluster = &mut roomy.machine.cluster;
                cluster.device.memory_bytes.value *= 1e4;
                roomy.machine = Machine::new(cluster.clone(), q.machine.profile.clone());
                estimate(&roomy, c).map(|r| Numbers::from(q, &r))
            }
        }
    }

    fn from(q: &Question, r: &Ranked) -> Numbers {
        let bytes = &r.estimate.budget.bytes;
        let peak = bytes.iter().filter(|((tier, _), _)| *tier == Tier::Hbm).map(|(_, b)| b.0 as f64).sum();
        Numbers {
            step_ns: r.estimate.step_ns,
            a2a_ns: r.estimate.times.ep_ns,
            peak_bytes: peak,
            dropped: r.dropped,
            fits: peak <= q.machine.cluster.device.memory_bytes.value,
        }
    }

    /// Between these and others: `at` of the way.
    fn toward(self, other: Numbers, at: f64) -> Numbers {
        let mix = |a: f64, b: f64| a + (b - a) * at;
        Numbers {
            step_ns: mix(self.step_ns, other.step_ns),
            a2a_ns: mix(self.a2a_ns, other.a2a_ns),
            peak_bytes: mix(self.peak_bytes, other.peak_bytes),
            dropped: mix(self.dropped, other.dropped),
            fits: self.fits,
        }
    }

    fn longer(self, ns: f64) -> Numbers {
        Numbers { step_ns: self.step_ns + ns, ..self }
    }
}

/// A way to fail, recognised.
#[derive(Debug, Clone, PartialEq)]
pub struct Finding {
    /// Which.
    pub mode: Mode,
    /// The sign, with its numbers.
    pub sign: String,
    /// The arrangement as it is.
    pub before: Numbers,
    /// What may be done, in the guide's order.
    pub remedies: Vec<Remedy>,
}

/// Something to do.
#[derive(Debug, Clone, PartialEq)]
pub struct Remedy {
    /// In the guide's words.
    pub action: &'static str,
    /// What that is here, and how its numbers were made.
    pub how: String,
    /// What it comes to; none where it does not apply or may not run, as `how` says.
    pub after: Option<Numbers>,
}

impl Finding {
    /// As a warning: the sign, and a note for each remedy with its numbers.
    #[must_use]
    pub fn diagnostic(&self, plan: &str) -> Diagnostic {
        let mut d =
            Diagnostic::warning(self.mode.code(), self.sign.clone()).at(plan, self.numbers(&self.before));
        for r in &self.remedies {
            d = d.note(match &r.after {
                Some(n) => format!("{}: {}; {}", r.action, r.how, self.numbers(n)),
                None => format!("{}: {}", r.action, r.how),
            });
        }
        d
    }

    /// The remedy that brings the number in question down most; none where the numbers are only prices.
    #[must_use]
    pub fn best(&self) -> Option<&Remedy> {
        let metric = |n: &Numbers| match self.mode {
            Mode::Congestion => n.a2a_ns,
            Mode::Memory => n.peak_bytes,
            Mode::Fp8 | Mode::Drift => f64::INFINITY,
        };
        let helps = self.remedies.iter().filter_map(|r| r.after.map(|n| (r, metric(&n))));
        helps.filter(|(_, n)| *n < metric(&self.before)).min_by(|a, b| a.1.total_cmp(&b.1)).map(|(r, _)| r)
    }

    fn numbers(&self, n: &Numbers) -> String {
        let mut s = format!("step {:.2} ms", n.step_ns / 1e6);
        if self.mode == Mode::Congestion {
            let _ = write!(s, ", exchange {:.2} ms ({:.0} %)", n.a2a_ns / 1e6, 100.0 * n.a2a_ns / n.step_ns);
            let _ = write!(s, ", {:.1} % dropped", 100.0 * n.dropped);
        }
        let _ = write!(
            s,
            ", peak {:.1} GB{}",
            n.peak_bytes / 1e9,
            if n.fits { "" } else { ", which does not fit" }
        );
        s
    }
}

/// Every mode that the signs show, with its remedies estimated. Signs of a run and of an estimate may be mixed.
///
/// # Errors
/// The reasons why the arrangement could not run at all, memory aside.
pub fn diagnose(
    q: &Question,
    c: &Candidate,
    signs: &Signs,
    limits: &Limits,
) -> Result<Vec<Finding>, Diagnostics> {
    let doctor = Doctor { q, c, before: Numbers::of(q, c)? };
    let mut found = Vec::new();
    let mut add = |mode, sign: String, remedies| {
        found.push(Finding { mode, sign, before: doctor.before, remedies });
    };
    let slow = signs.a2a_rate.filter(|r| *r < limits.a2a_rate);
    match (signs.a2a_share.filter(|s| *s > limits.a2a_share), slow) {
        (Some(share), _) => {
            let (share, most) = (100.0 * share, 100.0 * limits.a2a_share);
            let sign =
                format!("dispatch and combine are {share:.0} % of the step in the open, above {most:.0} %");
            add(Mode::Congestion, sign, doctor.congestion());
        }
        (None, Some(rate)) => {
            let (rate, least) = (100.0 * rate, 100.0 * limits.a2a_rate);
            let sign =
                format!("dispatch and combine reach {rate:.0} % of the links in bursts, below {least:.0} %");
            add(Mode::Congestion, sign, doctor.congestion());
        }
        _ => {}
    }
    if let (Some(peak), Some(capacity)) = (signs.peak_bytes, signs.capacity_bytes)
        && peak > capacity
    {
        let sign =
            format!("the fullest rank needs {:.1} GB, the device has {:.1}", peak / 1e9, capacity / 1e9);
        add(Mode::Memory, sign, doctor.memory());
    }
    if let Some(n) = signs.overflows.filter(|n| *n > 0) {
        add(Mode::Fp8, format!("{n} infinities or NaN while fp8 was in use"), doctor.fp8());
    }
    if let Some(n) = signs.drifted.filter(|n| *n > 0) {
        add(Mode::Drift, format!("{n} digests differ from the first one"), doctor.drift());
    }
    Ok(found)
}

/// f32 scales of this many numbers each are what finer scaling is priced at.
const FINE: f64 = 32.0;

/// Numbers of a contraction after which a partial sum is added in f32.
const PROMOTE: f64 = 128.0;

/// The guide's range of capacity factors, in per cent.
const CAPACITY: (u32, u32) = (110, 130);

/// One patient.
struct Doctor<'a> {
    q: &'a Question,
    c: &'a Candidate,
    before: Numbers,
}

impl Doctor<'_> {
    /// A changed candidate, estimated.
    fn with(
        &self,
        action: &'static str,
        how: String,
        change: impl FnOnce(&mut Question, &mut Candidate),
    ) -> Remedy {
        let (mut q, mut c) = (self.q.clone(), *self.c);
        change(&mut q, &mut c);
        match Numbers::of(&q, &c) {
            Ok(n) => Remedy { action, how, after: Some(n) },
            Err(why) => {
                let why: Vec<_> = why.iter().map(|d| d.message.as_str()).collect();
                Remedy { action, how: format!("{how}: cannot run here, {}", why.join("; ")), after: None }
            }
        }
    }

    fn not(action: &'static str, why: &str) -> Remedy {
        Remedy { action, how: why.to_string(), after: None }
    }

    fn congestion(&self) -> Vec<Remedy> {
        let Some((experts, top_k)) = self.q.work.experts() else { return Vec::new() };
        vec![self.buckets(), self.capacity(), {
            let how =
                format!("{} experts of the same width in place of {experts}, memory for them", 2 * experts);
            self.with("enlarge the expert bank", how, |q, _| q.work = q.work.routed(2 * experts, top_k))
        }]
    }

    /// Equal sources, and exchanges small enough that one runs beside the products of another.
    fn buckets(&self) -> Remedy {
        const ACTION: &str = "tighten bucketing";
        let ragged = self.q.routing == Routing::W(4);
        let train = matches!(self.q.job, Job::Train { .. });
        let mut how = Vec::new();
        if ragged {
            how.push("buckets of one length, so that every source sends as many tokens".to_string());
        }
        // What a training step exchanges does not shrink with its micro-batches, and only a schedule hides it.
        let share = self.q.job.batch().div_ceil(u64::from(self.c.replicas.max(1)));
        let halves = u32::try_from(share.div_ceil(u64::from(2 * self.c.pp))).unwrap_or(u32::MAX).max(1);
        let smaller = !train && halves < self.c.micro_batch;
        if smaller {
            how.push(format!(
                "buckets of {halves} sequences, so that two are under way at once on every stage"
            ));
        }
        let both = train && self.c.pp.is_multiple_of(2) && self.c.schedule != Schedule::DualPipe;
        if both {
            how.push(
                "buckets of two directions (dualpipe), one's exchange beside the other's products"
                    .to_string(),
            );
        }
        if how.is_empty() {
            return Self::not(
                ACTION,
                "sources are even and exchanges already run beside products: nothing to gain",
            );
        }
        self.with(ACTION, how.join("; "), |q, c| {
            if ragged {
                q.routing = Routing::Balanced;
            }
            if smaller {
                c.micro_batch = halves;
            }
            if both {
                (c.schedule, c.interleave) = (Schedule::DualPipe, 1);
            }
        })
    }

    fn capacity(&self) -> Remedy {
        const ACTION: &str = "reduce the capacity factor";
        let to = match self.c.layout.capacity_pct {
            0 => CAPACITY.1,
            now if now <= CAPACITY.0 => {
                return Self::not(ACTION, "it is at the lower end of what the guide advises, 1.1 to 1.3");
            }
            now => CAPACITY.0.max(now.saturating_sub(15)),
        };
        let was = match self.c.layout.capacity_pct {
            0 => "none".to_string(),
            now => format!("{:.2}", f64::from(now) / 100.0),
        };
        self.with(ACTION, format!("from {was} to {:.2}", f64::from(to) / 100.0), |_, c| {
            c.layout.capacity_pct = to
        })
    }

    fn memory(&self) -> Vec<Remedy> {
        let smaller = match self.c.micro_batch {
            0 | 1 => Self::not("smaller micro-batch", "it is one sequence already"),
            now => {
                let how = format!("from {now} sequences to {}", now / 2);
                self.with("smaller micro-batch", how, |_, c| c.micro_batch = now / 2)
            }
        };
        vec![self.recompute(), smaller, self.fewer_experts()]
    }

    /// The first stronger choice that lowers the peak: attention alone, then every other layer, then all.
    fn recompute(&self) -> Remedy {
        const ACTION: &str = "recompute attention";
        if !matches!(self.q.job, Job::Train { .. }) {
            return Self::not(ACTION, "inference keeps nothing for a backward pass");
        }
        let now = self.c.recompute;
        for next in Recompute::ALL.iter().copied().filter(|r| *r > now) {
            let what = if now == Recompute::None && next != Recompute::Attention {
                ", because attention alone keeps no scores here"
            } else {
                ""
            };
            let how = format!("recompute from {} to {}{what}", now.name(), next.name());
            let r = self.with(ACTION, how, |_, c| c.recompute = next);
            if r.after.is_some_and(|n| n.peak_bytes < self.before.peak_bytes) {
                return r;
            }
        }
        Self::not(ACTION, "whatever is computed again, the peak stays")
    }

    /// From k to k − ½: every other token asks for one expert less. The mean of both estimates, exact in rows and bytes.
    fn fewer_experts(&self) -> Remedy {
        const ACTION: &str = "lower top-k by stochastic gating";
        let Some((experts, k)) = self.q.work.experts() else {
            return Self::not(ACTION, "no layer has routed experts");
        };
        if k < 2 {
            return Self::not(ACTION, "a token asks for one expert already");
        }
        let how = format!("from {k} to {}.5: mean of the estimates at {k} and {}", k - 1, k - 1);
        let mut r = self.with(ACTION, how, |q, _| q.work = q.work.routed(experts, k - 1));
        let capacity = self.q.machine.cluster.device.memory_bytes.value;
        r.after = r.after.map(|n| {
            let half = self.before.toward(n, 0.5);
            Numbers { fits: half.peak_bytes <= capacity, ..half }
        });
        r
    }

    fn fp8(&self) -> Vec<Remedy> {
        let l = &self.c.layout;
        let narrow = |p: Precision| matches!(p, Precision::Fp8 | Precision::Fp4);
        let mut out = vec![
            self.earlier_sums(narrow(l.precision)),
            self.finer_scales(narrow(l.wire)),
            self.loss_scaling(),
        ];
        if narrow(l.precision) {
            let how = "products at bf16, if nothing else helps".to_string();
            out.push(self.with("leave fp8", how, |_, c| c.layout.precision = Precision::Bf16));
        }
        out
    }

    fn earlier_sums(&self, narrow: bool) -> Remedy {
        const ACTION: &str = "accumulate in f32 earlier";
        if !narrow {
            return Self::not(ACTION, "products are not at eight bits");
        }
        let cluster = &self.q.machine.cluster;
        let (Ok(r), Some(f32_rate), Some(peak)) = (
            estimate(self.q, self.c),
            cluster.flops_per_s(Precision::F32),
            cluster.flops_per_s(self.c.layout.precision),
        ) else {
            return Self::not(ACTION, "the cluster has no figure for f32, or the plan does not fit");
        };
        // Of 2·m·n·k operations, each output is scaled and added once per interval: 2·m·n·k / interval more.
        let more = r.estimate.mfu * peak * r.estimate.step_ns / PROMOTE / f32_rate;
        let how = format!(
            "partial sums to f32 every {PROMOTE:.0} numbers of a contraction, if nothing hides the additions"
        );
        Remedy { action: ACTION, how, after: Some(self.before.longer(more)) }
    }

    fn finer_scales(&self, narrow: bool) -> Remedy {
        const ACTION: &str = "finer scaling";
        if !narrow || self.c.layout.ep < 2 {
            return Self::not(
                ACTION,
                "nothing travels at eight bits: scales stay on the device and add 4 bytes each",
            );
        }
        let wire = self.c.layout.wire.wire_bytes();
        let fine = self.c.layout.wire.bytes() + 4.0 / FINE;
        // Bytes on the wire lie between these and those of bf16, and so does the time of the same exchange.
        let at = (fine - wire) / (Precision::Bf16.wire_bytes() - wire);
        let how = format!(
            "an f32 scale for every {FINE:.0} numbers: {fine:.3} bytes each on the wire in place of {wire:.3}; one-byte \
scales would take {:.3}",
            self.c.layout.wire.bytes() + 1.0 / FINE
        );
        let mut r = self.with(ACTION, how, |_, c| c.layout.wire = Precision::Bf16);
        r.after = r.after.map(|n| self.before.toward(n, at));
        r
    }

    fn loss_scaling(&self) -> Remedy {
        const ACTION: &str = "scale the loss";
        if !matches!(self.q.job, Job::Train { .. }) {
            return Self::not(ACTION, "inference has no loss");
        }
        let gradients = |r: Ranked| {
            let of = r.estimate.budget.bytes.iter().filter(|((_, what), _)| *what == Use::Gradients);
            of.map(|(_, b)| b.0 as f64).sum::<f64>()
        };
        let Ok(bytes) = estimate(self.q, self.c).map(gradients) else {
            return Self::not(ACTION, "the plan does not fit");
        };
        let ns = self.q.machine.pass_ns(2.0 * bytes);
        let how = format!(
            "gradients are checked and scaled back in one pass of {:.2} ms, which every estimate of a step contains; a step \
that overflows is lost",
            ns / 1e6
        );
        Remedy { action: ACTION, how, after: Some(self.before) }
    }

    fn drift(&self) -> Vec<Remedy> {
        let mut out = self.pinned();
        out.push(Remedy {
            action: "fix the order of ranks",
            how: "one list of devices in topology order, part of the plan's digest: costs nothing"
                .to_string(),
            after: Some(self.before),
        });
        out.push(Remedy {
            action: "deterministic draws per axis",
            how: "key every draw by seed, layer and the token's place in the batch: different over ep and dp, where tokens \
differ, and the same over tp, whose peers hold the same tokens and must choose the same experts; costs nothing"
                .to_string(),
            after: Some(self.before),
        });
        out
    }

    /// Reductions over tp with one algorithm at all sizes, and by adding in rank order.
    fn pinned(&self) -> Vec<Remedy> {
        const PIN: &str = "pin algorithms";
        const ORDER: &str = "pin algorithms, and add in rank order";
        let (m, l) = (&self.q.machine, &self.c.layout);
        let ranks = l.tp / l.ring.max(1);
        if ranks < 2 || l.scheme == Scheme::Ulysses {
            return vec![Self::not(PIN, "no value is summed over tp here")];
        }
        let span = Span::of(ranks, 1, &m.cluster);
        let tokens = f64::from(self.c.micro_batch) * self.q.job.queries() as f64;
        let bytes = tokens * self.q.work.width as f64 * Precision::Bf16.bytes();
        let sequence = l.scheme != Scheme::Megatron;
        let op = if sequence { CollectiveOp::ReduceScatter } else { CollectiveOp::AllReduce };
        let chosen = m.collective(op, bytes, span);
        let times = self.reductions();
        let mut out = Vec::new();
        let fixed = [Algorithm::Ring, Algorithm::Tree].map(|a| (a, m.by(a, op, bytes, span)));
        let best = fixed
            .iter()
            .filter_map(|(a, t)| t.as_ref().map(|t| (*a, t.ns)))
            .min_by(|a, b| a.1.total_cmp(&b.1));
        if let Some((algorithm, ns)) = best {
            let how = format!(
                "{} for every size in place of {} at {:.1} MB, {times:.0} reductions a step; the number of channels must \
be pinned too",
                algorithm.name(),
                chosen.algorithm.name(),
                bytes / 1e6
            );
            let more = times * (ns - chosen.ns).max(0.0);
            out.push(Remedy { action: PIN, how, after: Some(self.before.longer(more)) });
        }
        // Every rank gets all partial sums of its piece, adds them in order, and pieces are put together where the
        // algorithm would have done so.
        let n = f64::from(ranks);
        let mut ordered =
            m.collective(CollectiveOp::AllToAll, bytes, span).ns + m.pass_ns(bytes * (1.0 + 1.0 / n));
        if !sequence {
            ordered += m.collective(CollectiveOp::AllGather, bytes, span).ns;
        }
        let how = format!(
            "pieces exchanged and added in f32 in the order of ranks: {:.0} µs for each of {times:.0} reductions in place of \
{:.0} µs, the same bits at every size",
            ordered / 1e3,
            chosen.ns / 1e3
        );
        let after = self.before.longer(times * (ordered - chosen.ns));
        out.push(Remedy { action: ORDER, how, after: Some(after) });
        out
    }

    /// Reductions over tp that one rank of the fullest stage takes part in during a step.
    fn reductions(&self) -> f64 {
        let work = &self.q.work;
        let cuts =
            |rows: &[tessera_ir::work::Row]| rows.iter().filter(|r| r.cut == RowCut::Row).count() as f64;
        let layers: f64 = work.stacks.iter().map(|s| s.count as f64 * cuts(&s.rows)).sum();
        let directions = if matches!(self.q.job, Job::Train { .. }) { 2.0 } else { 1.0 };
        let share = self.q.job.batch().div_ceil(u64::from(self.c.replicas.max(1)));
        let micro_batches = share.div_ceil(u64::from(self.c.micro_batch.max(1)));
        layers / f64::from(self.c.pp) * directions * micro_batches as f64
    }
}
