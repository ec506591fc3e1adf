//! Texts of the report on a language model: its title, the facts of a mapping, and notes.

use tessera_base::Bytes;
use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_cost::params::Recompute;
use tessera_mesh::{LinkClass, MemoryTier};
use tessera_plan::search::axes::choose_axes;
use tessera_plan::search::mitigation::{self, Symptoms};
use tessera_plan::search::{Candidate, Job, Pins, RankedCandidate, SearchOutcome, SearchQuery};
use tessera_report::html::FailureModeAdvice;

use super::question::BuiltQuestion;
use crate::format::{count_with_noun, format_ns};

/// Returns the label of a part of a step. Memory bandwidth also limits matmuls with few rows and
/// attention over long contexts, although they count as compute.
pub(super) fn part_label(name: &str) -> &str {
    match name {
        "compute" => "matmuls and attention",
        "memory" => "elementwise and norm kernels",
        "tp" => "tp collectives",
        "ep" => "expert dispatch and combine",
        "pp and dp" => "pp sends and gradient reduction",
        "imbalance" => "expert load imbalance",
        "bubble" => "pipeline bubble",
        "launch" => "kernel launches",
        "fetch" => "fetches from other tiers",
        other => other,
    }
}

pub(super) fn report_title(p: &BuiltQuestion) -> String {
    let q = &p.question;
    let what = p.recipe.as_ref().map_or(q.work.name.clone(), |r| format!("{} ({})", r.title, q.work.name));
    format!("{what}, {}, on {}", job_label(&q.job), devices_label(q))
}

pub(super) fn devices_label(q: &SearchQuery) -> String {
    format!("{} devices of {}", q.space.devices, q.machine.cluster.title)
}

pub(super) fn job_label(j: &Job) -> String {
    match *j {
        Job::Train { batch, sequence } => format!("training on {batch} sequences of {sequence} tokens"),
        Job::Prefill { batch, sequence } => format!("prefill of {batch} prompts of {sequence} tokens"),
        Job::Decode { batch, context } => format!("decode of {batch} sequences at {context} tokens"),
    }
}

/// Formats the mesh with four axes if attention and experts share them, and otherwise once for
/// attention and once for experts.
pub(super) fn mesh_label(c: &Candidate) -> String {
    let l = &c.layout;
    let dp = c.model_replicas();
    if l.ep == 1 && l.expert_tp == 1 {
        return format!("tp={}, pp={}, dp={dp}", l.tp, c.pp);
    }
    if l.expert_tp == l.tp {
        return format!("tp={}, ep={}, pp={}, dp={dp}", l.tp, l.ep, c.pp);
    }
    format!(
        "tp={}, pp={}, dp={dp}; attention {} × {} replicas, experts ep={} × tp={}",
        l.tp, c.pp, l.tp, c.replicas, l.ep, l.expert_tp
    )
}

pub(super) fn knob_list(c: &Candidate) -> String {
    let l = &c.layout;
    let mut out = vec![l.scheme.name().to_string()];
    if l.ring > 1 {
        out.push(format!("ring={}", l.ring));
    }
    if c.pp > 1 {
        out.push(c.schedule.name().to_string());
    }
    out.push(format!("micro-batch {}", c.micro_batch));
    out.push(l.precision.name().to_string());
    if c.recompute != Recompute::None {
        out.push(format!("recompute {}", c.recompute.name()));
    }
    out.join(", ")
}

pub(super) fn mapping_facts(q: &SearchQuery, best: &RankedCandidate) -> Vec<(String, String)> {
    let (c, l) = (&best.candidate, &best.candidate.layout);
    let mut out = vec![
        ("mesh".to_string(), mesh_label(c)),
        ("attention".to_string(), {
            let ring = if l.ring > 1 { format!(", rings of {}", l.ring) } else { String::new() };
            format!(
                "{} over tp={}{ring}, {} per stage",
                l.scheme.name(),
                l.tp,
                count_with_noun(c.replicas, "replica", "replicas")
            )
        }),
    ];
    if q.work.routed_experts().is_some() {
        out.push(("experts".to_string(), experts_label(q, best)));
    }
    let layers: Vec<String> = best
        .stages
        .iter()
        .map(|s| s.chunks.iter().map(|p| (p.end - p.start).to_string()).collect::<Vec<_>>().join("+"))
        .collect();
    out.push((
        "stages".to_string(),
        format!(
            "{}: {} layers; {} of {}",
            c.pp,
            layers.join(", "),
            count_with_noun(best.micro_batches, "micro-batch", "micro-batches"),
            count_with_noun(c.micro_batch, "sequence", "sequences")
        ),
    ));
    if matches!(q.job, Job::Train { .. }) {
        out.push((
            "training".to_string(),
            format!(
                "schedule {}{}, recompute {}, optimizer {}",
                c.schedule.name(),
                if c.interleave > 1 { format!(" × {}", c.interleave) } else { String::new() },
                c.recompute.name(),
                c.optimizer.name()
            ),
        ));
    }
    if let Some(window) = q.attention_window() {
        out.push(("cache".to_string(), format!("a window of {window} tokens")));
    } else if matches!(q.job, Job::Decode { .. }) {
        out.push(("cache".to_string(), format!("in {}", c.cache_at.name())));
    }
    out.push(("precision".to_string(), l.precision.name().to_string()));
    let links: Vec<String> = best
        .estimate
        .link_bytes
        .iter()
        .map(|(class, bytes)| format!("{} over {} links", Bytes(bytes.round() as u64), class.name()))
        .collect();
    if !links.is_empty() {
        out.push(("sends".to_string(), format!("{} per rank and step, on average", links.join(", "))));
    }
    out
}

fn experts_label(q: &SearchQuery, best: &RankedCandidate) -> String {
    let (c, l) = (&best.candidate, &best.candidate.layout);
    let capacity = match l.capacity_pct {
        0 => "nothing dropped".to_string(),
        pct => {
            format!("capacity {:.2}, {:.1} % dropped", f64::from(pct) / 100.0, best.dropped_share * 100.0)
        }
    };
    format!(
        "ep={} × tp={}, {}, in {}{}; {} wire; {capacity}; routing {}",
        l.ep,
        l.expert_tp,
        count_with_noun(c.expert_replicas, "copy", "copies"),
        c.experts_at.name(),
        match q.space.prefetch_hit_rate * 100.0 {
            pct if pct > 0.0 => format!(", a predictor names {pct:.0} % of the cold ones a layer ahead"),
            _ => String::new(),
        },
        l.wire_precision.name(),
        q.routing.name()
    )
}

pub(super) fn mitigation_list(q: &SearchQuery, best: &RankedCandidate) -> Vec<FailureModeAdvice> {
    let Ok(numbers) = mitigation::CandidateMetrics::estimate(q, &best.candidate) else { return Vec::new() };
    let found = mitigation::diagnose(
        q,
        &best.candidate,
        &Symptoms::from_metrics(q, &numbers),
        &mitigation::SymptomThresholds::default(),
    );
    found
        .unwrap_or_default()
        .into_iter()
        .map(|f| FailureModeAdvice {
            mode: f.to_diagnostic("this plan").code.title.to_string(),
            symptom: f.symptom.clone(),
            mitigations: f
                .mitigations
                .iter()
                .map(|r| {
                    let after = r.predicted.map_or(String::new(), |n| {
                        format!(
                            ": {}; peak {:.1} GB (now {:.1})",
                            f.compare_step(&n),
                            n.peak_bytes / 1e9,
                            f.current.peak_bytes / 1e9
                        )
                    });
                    (r.action.to_string(), format!("{}{after}", r.details))
                })
                .collect(),
        })
        .collect()
}

pub(super) fn source_notes(p: &BuiltQuestion, outcome: &SearchOutcome) -> Vec<String> {
    let q = &p.question;
    let profile = &q.machine.profile;
    let mut out = vec![format!(
        "Estimated from op rows of {} under the executor profile {}: no program was lowered, so this plan cannot be run.",
        q.work.name, profile.name
    )];
    out.push(format!(
        "Attention is {}; routing is {}.",
        if p.fused_attention { "one fused kernel that does not store scores" } else { "unfused" },
        q.routing.name()
    ));
    if let Some(r) = &p.recipe {
        out.push(format!("Mapping guide: {} Our choice: {}", r.guide_text, r.our_choices));
    }
    for w in &p.warnings {
        let notes = w.notes.join(" ");
        out.push(format!("{} ({}): {} {notes}", w.code.title, w.code.id, w.message).trim_end().to_string());
    }
    out.extend(outcome.notes.iter().cloned());
    // This shows which axis helps at all, before any mapping is compared.
    out.extend(choose_axes(q).map(|c| c.reasons).unwrap_or_default());
    out
}

/// Returns the pins of a candidate, including the attention window of the question.
pub(super) fn full_pins(q: &SearchQuery, r: &RankedCandidate) -> Pins {
    Pins { window: q.attention_window().and(q.pins.window), ..Pins::from_candidate(&r.candidate) }
}

/// Returns the bytes of a mapping's memory budget that lie in device memory, not in other tiers.
pub(super) fn device_memory_bytes(r: &RankedCandidate) -> f64 {
    let bytes = &r.estimate.budget.bytes;
    bytes.iter().filter(|((tier, _), _)| *tier == MemoryTier::Hbm).map(|(_, b)| b.0 as f64).sum()
}

pub(super) fn summary_line(r: &RankedCandidate) -> String {
    format!(
        "step {}, {:.0} tokens/s, {:.1} GB; {}",
        format_ns(r.estimate.step_ns),
        r.estimate.tokens_per_s,
        device_memory_bytes(r) / 1e9,
        mesh_label(&r.candidate)
    )
}

/// Prefixes the name of a stage's interval with its direction, which selects its colour.
pub(super) fn with_direction_prefix(b: &Interval) -> Interval {
    let kind = match b.name.as_bytes().first() {
        Some(b'B') => "backward",
        Some(b'W') => "weights",
        _ => "forward",
    };
    Interval { name: format!("{kind}.{}", b.name), ..b.clone() }
}

/// Prefixes the name of an interval with its class (`class.rest`), which selects its colour.
pub(super) fn with_class_prefix(b: &Interval) -> Interval {
    let class = match b.kind {
        IntervalKind::Collective if b.track == "a2a" => "exchange",
        IntervalKind::Collective => "tp",
        IntervalKind::Fetch => "fetch",
        IntervalKind::Pack => "pack",
        _ if b.name.starts_with("QK") => "scores",
        _ => b.name.split(['.', ' ']).next().unwrap_or_default(),
    };
    let rest = b.name.strip_prefix(class).map_or(b.name.as_str(), |r| r.trim_start_matches(['.', ' ']));
    let name = if rest.is_empty() { class.to_string() } else { format!("{class}.{rest}") };
    Interval { name, ..b.clone() }
}

/// Returns a warning if tp or ep groups span several switch domains, with the traffic over the
/// links between domains.
pub(super) fn domain_warning(q: &SearchQuery, best: &RankedCandidate) -> Option<String> {
    let gate =
        best.gates.iter().find(|g| g.id == "mesh.domain" && g.status == tessera_base::GateStatus::Fail)?;
    let cluster = &q.machine.cluster;
    let out = best.estimate.link_bytes.get(&LinkClass::Network).copied().unwrap_or(0.0);
    let rate = |class| cluster.link_spec(class).bytes_per_s.value / 1e9;
    Some(format!(
        "groups span several switch domains (domain of {} devices: {}); a rank sends {} per step over links between domains, at {:.0} GB/s and not {:.0}",
        cluster.domain_size,
        gate.explanation.trim_start_matches("groups that leave their domain: "),
        Bytes(out.round() as u64),
        rate(LinkClass::Network),
        rate(LinkClass::Domain)
    ))
}
