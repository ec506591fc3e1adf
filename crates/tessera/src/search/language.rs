//! Planning of language models from op rows.

mod question;

use std::path::PathBuf;

use serde_json::json;
use tessera_base::{Bytes, Diagnostics, Nanoseconds};
use tessera_cost::MachineModel;
use tessera_cost::intervals::{Interval, IntervalKind};
use tessera_cost::moe::Routing;
use tessera_cost::params::Recompute;
use tessera_mesh::{LinkClass, MemoryTier};
use tessera_plan::search::axes::choose_axes;
use tessera_plan::search::mitigation::{self, Symptoms};
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::search::timeline::{BLOCK_LAYERS, draw_timeline as drawn};
use tessera_plan::search::{
    Candidate, Job, Objective, Pins, RankedCandidate, SearchOutcome, SearchQuery, WhyVerdict as Why,
    explain_pins, gates, search,
};
use tessera_report::html::{
    EstimatePage, EstimateVerdict, FailureModeAdvice, GateVerdict, HeadlineNumber, PlanGate, RoleMemoryRow,
    TimelineChart,
};
use tessera_report::timeline::Timeline;

use super::advice::build_advice;
use super::library_env::LibraryRequirements;
use super::report::intervals_to_timeline;
use super::{EstimateReport, attention_program, rank_table, render_env};
use question::{BuiltQuestion, build_question, build_question_for};

/// Where the model comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ModelSource {
    /// A model of the zoo.
    Zoo(String),
    /// The path of a config.json.
    Config(PathBuf),
    /// A recipe, which defines model, job and pins.
    Recipe(String),
}

/// A planning query for a language model. A field that is `None` takes the recipe's value, or a
/// default that the report names.
#[derive(Debug, Clone)]
pub struct LanguageQuery {
    /// Where the model comes from.
    pub model_source: ModelSource,
    /// The cluster and the executor profile.
    pub machine: MachineModel,
    /// Number of devices to use.
    pub devices: Option<u32>,
    /// The workload: training, prefill or decode.
    pub job: Option<Job>,
    /// What the search optimises.
    pub objective: Option<Objective>,
    /// Decisions that the search must keep.
    pub pins: Pins,
    /// Distribution of tokens over experts.
    pub routing: Option<Routing>,
    /// Share of the cold experts that a predictor names one layer ahead, from 0 to 1.
    pub prefetch_hit_rate: Option<f64>,
    /// Whether shards that differ by one unit are rejected.
    pub strict: bool,
    /// Limits of the gates.
    pub limits: Thresholds,
    /// Command line to show on the page.
    pub command: String,
}

/// Smallest share of a step from which a difference is shown.
pub(super) const MIN_SHARE_SHOWN: f64 = 0.002;

/// Searches the mappings of a model and returns the report.
///
/// # Errors
/// Diagnostics of the model's config, or of a recipe that cannot be satisfied.
pub fn search_language(query: &LanguageQuery) -> Result<EstimateReport, Diagnostics> {
    let posed = build_question(query)?;
    let outcome = search(&posed.question);
    let mut sheet = build_report(query, &posed, &outcome);
    sheet.export_page_json();
    sheet.json["query"] = crate::doctor::query_to_json(query);
    Ok(sheet)
}

/// Builds the search question of a query, and its title.
pub(crate) fn question_and_title(query: &LanguageQuery) -> Result<(SearchQuery, String), Diagnostics> {
    let posed = build_question(query)?;
    let title = report_title(&posed);
    Ok((posed.question, title))
}

/// Explains one mapping, or all mappings that some pins allow, and returns whether any of
/// them is legal.
///
/// # Errors
/// Diagnostics of the model's config, or of a recipe that cannot be satisfied.
pub fn explain_language(query: &LanguageQuery, pins: &Pins) -> Result<(bool, String), Diagnostics> {
    let posed = build_question_for(query, true)?;
    let q = &posed.question;
    let answer = explain_pins(q, pins);
    let mut out = format!("{} on {}\n", pins.to_text(), devices_label(q));
    match &answer.verdict {
        Why::Refused { reasons, neighbours } => {
            out += &format!(
                "refused: none of the {} mappings that match these pins is legal\n",
                answer.candidate_count
            );
            for (reason, r) in reasons {
                out += &format!(
                    "  {} ({}): {} mappings, for example\n    {}\n",
                    reason.title(),
                    reason.code().id,
                    r.count,
                    r.explanation
                );
            }
            if !neighbours.is_empty() {
                out += "legal neighbours, nearest first\n";
            }
            for n in neighbours {
                let changed: Vec<String> = n.changed.iter().map(|(k, v)| format!("{k}={v}")).collect();
                out += &format!("  {}: {}\n", changed.join(","), summary_line(&n.ranked));
            }
            Ok((false, out))
        }
        Why::Legal { ranked, better, legal, best, terms } => {
            out += &format!("legal; {better} of {legal} legal mappings are better\n");
            out += &format!(
                "  this  {}\n        {}\n",
                summary_line(ranked),
                Pins::from_candidate(&ranked.candidate).to_text()
            );
            out += &format!(
                "  best  {}\n        {}\n",
                summary_line(best),
                Pins::from_candidate(&best.candidate).to_text()
            );
            let min_shown_ns = best.estimate.step_ns * MIN_SHARE_SHOWN;
            let costs: Vec<_> =
                terms.iter().filter(|t| (t.requested_ns - t.best_ns).abs() > min_shown_ns).collect();
            if !costs.is_empty() {
                out += "what it costs compared with the best, per step\n";
            }
            for t in costs {
                let (sign, ns) = if t.requested_ns >= t.best_ns {
                    ("+", t.requested_ns - t.best_ns)
                } else {
                    ("-", t.best_ns - t.requested_ns)
                };
                out += &format!(
                    "  {:<24} {sign}{} ({} here, {} there)\n",
                    part_label(t.name),
                    format_ns(ns),
                    format_ns(t.requested_ns),
                    format_ns(t.best_ns)
                );
            }
            Ok((true, out))
        }
    }
}

fn build_report(query: &LanguageQuery, posed: &BuiltQuestion, outcome: &SearchOutcome) -> EstimateReport {
    let q = &posed.question;
    let best = outcome.best_candidates.first();
    let mut page = EstimatePage {
        tessera: env!("CARGO_PKG_VERSION").to_string(),
        title: report_title(posed),
        considered_count: outcome.candidate_count,
        command: query.command.clone(),
        ..EstimatePage::default()
    };
    page.rejections = outcome
        .rejected
        .iter()
        .map(|(reason, r)| {
            (format!("{} ({})", reason.title(), reason.code().id), r.count, r.explanation.clone())
        })
        .collect();
    page.rejections.sort_by_key(|r| std::cmp::Reverse(r.1));
    page.accuracy_notes = source_notes(posed, outcome);
    let mut sheet = EstimateReport {
        page,
        json: outcome_to_json(q, outcome),
        timeline: Timeline::default(),
        env_script: render_env(LibraryRequirements {
            uses_all_to_all: q.work.routed_experts().is_some(),
            deterministic: true,
        }),
        rank_table: None,
        attention_program: None,
    };
    let Some(best) = best else {
        sheet.page.verdict = EstimateVerdict::Rejected;
        sheet.page.recommendation = format!(
            "none of the {} mappings is legal on {}; the table below counts them by reason",
            outcome.candidate_count,
            devices_label(q)
        );
        return sheet;
    };
    fill_report(&mut sheet, q, outcome, best);
    sheet.rank_table = rank_table::candidate_table(&q.machine.cluster, &best.candidate);
    attention_program::attach_program(&mut sheet, q, best);
    sheet
}

fn fill_report(sheet: &mut EstimateReport, q: &SearchQuery, outcome: &SearchOutcome, best: &RankedCandidate) {
    let page = &mut sheet.page;
    let missed = best.gates.iter().filter(|g| g.status == gates::GateStatus::Fail).count();
    let warned = best.gates.iter().filter(|g| g.status == gates::GateStatus::Warn).count();
    page.verdict = if missed + warned > 0 { EstimateVerdict::Warn } else { EstimateVerdict::Good };
    let dropped = match best.dropped_share * 100.0 {
        pct if pct >= 1.0 => format!("; {pct:.0} % of the assignments to experts are dropped"),
        _ => String::new(),
    };
    page.recommendation = format!(
        "{}; {} of {} mappings are legal{dropped}{}",
        mesh_label(&best.candidate),
        outcome.legal_count,
        outcome.candidate_count,
        match (missed, warned) {
            (0, 0) => String::new(),
            (m, 0) => format!("; gates failed: {m}"),
            (0, w) => format!("; gates with warnings: {w}"),
            (m, w) => format!("; gates failed: {m}, with warnings: {w}"),
        }
    );
    if let Objective::Deadline(limit) = q.objective
        && best.estimate.step_ns > limit.0 as f64
    {
        page.verdict = EstimateVerdict::Rejected;
        page.recommendation =
            format!("no mapping meets the deadline of {limit}; the closest is {}", page.recommendation);
    }
    page.warnings.extend(domain_warning(q, best));
    let e = &best.estimate;
    let step = Nanoseconds(e.step_ns.round() as u64).to_string();
    let (value, unit) = step.split_once(' ').unwrap_or((&step, ""));
    let per_device = e.tokens_per_s / f64::from(outcome.used_devices.max(1));
    let number =
        |value: String, unit: &str, label: String| HeadlineNumber { value, unit: unit.to_string(), label };
    let rated = match best.dropped_share * 100.0 {
        pct if pct >= 0.05 => {
            format!("per device, of which {pct:.1} % of the assignments to experts are dropped")
        }
        _ => "per device".to_string(),
    };
    let bar = match e.error_share {
        e if e > 0.0 => format!("a step, ± {:.0} %", e * 100.0),
        _ => "a step at least (lower bound)".to_string(),
    };
    page.headline_numbers = vec![
        number(value.to_string(), unit, bar),
        number(format!("{per_device:.0}"), "tokens/s", rated),
        number(
            format!("{:.1}", device_memory_bytes(best) / 1e9),
            "GB",
            format!("on the fullest rank, of {:.0}", q.machine.cluster.device.memory_bytes.value / 1e9),
        ),
        number(format!("{:.0}", e.mfu * 100.0), "%", "of peak FLOP/s (MFU)".to_string()),
    ];
    page.mapping_facts = mapping_facts(q, best);
    page.step_parts =
        e.times.named_parts().into_iter().map(|(name, ns)| (part_label(name).to_string(), ns)).collect();
    page.step_parts_note =
        "One step on the slowest ranks. Communication counts only as far as it is exposed.".to_string();
    page.memory = MemoryTier::ALL
        .into_iter()
        .filter_map(|tier| {
            let items: Vec<(String, u64)> = e
                .budget
                .bytes
                .iter()
                .filter(|((t, _), _)| *t == tier)
                .map(|((_, what), bytes)| (format!("{what:?}").to_lowercase(), bytes.0))
                .collect();
            let cluster = &q.machine.cluster;
            let capacity = match tier {
                MemoryTier::Hbm => Some(cluster.device.memory_bytes.value as u64),
                MemoryTier::Host => Some(cluster.host_bytes.value as u64),
                MemoryTier::Peer => None,
            };
            (!items.is_empty()).then(|| RoleMemoryRow {
                role: tier.name().to_string(),
                ranks: "the fullest".to_string(),
                bytes_by_use: items,
                capacity,
            })
        })
        .collect();
    page.gates = best
        .gates
        .iter()
        .map(|g| PlanGate {
            title: g.title.to_string(),
            value: if g.status == gates::GateStatus::NotApplicable {
                "–".to_string()
            } else {
                format_amount(g.value, g.unit)
            },
            limit: format_amount(g.threshold, g.unit),
            verdict: match g.status {
                gates::GateStatus::Pass => GateVerdict::Pass,
                gates::GateStatus::Warn => GateVerdict::Warn,
                gates::GateStatus::Fail => GateVerdict::Fail,
                gates::GateStatus::NotApplicable => GateVerdict::NotApplicable,
            },
            explanation: g.explanation.clone(),
        })
        .collect();
    page.failure_modes = mitigation_list(q, best);
    page.advice = build_advice(q, best, outcome.idle_devices);
    page.mapping_columns =
        ["mapping", "step", "tokens/s/device", "memory", "knobs"].map(String::from).to_vec();
    page.mappings = std::iter::once(best)
        .chain(outcome.pareto_front.iter().filter(|r| r.candidate != best.candidate))
        .map(|r| {
            vec![
                mesh_label(&r.candidate),
                format_ns(r.estimate.step_ns),
                format!("{:.0}", r.estimate.tokens_per_s / f64::from(outcome.used_devices.max(1))),
                format!("{:.1} GB", device_memory_bytes(r) / 1e9),
                knob_list(&r.candidate),
            ]
        })
        .collect();
    add_timelines(sheet, q, best);
    let page = &mut sheet.page;
    page.mapping = format!(
        "# Pins of this mapping, for --pin. It is an estimate from op rows; no plan is sealed from it.\n{}\n",
        full_pins(q, best).to_text().replace(',', "\n")
    );
}

/// Returns a warning if tp or ep groups span several switch domains, with the traffic over the
/// links between domains.
fn domain_warning(q: &SearchQuery, best: &RankedCandidate) -> Option<String> {
    let gate = best.gates.iter().find(|g| g.id == "mesh.domain" && g.status == gates::GateStatus::Fail)?;
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

/// Draws the layers by stream, and the pipeline schedule if there are several stages.
fn add_timelines(sheet: &mut EstimateReport, q: &SearchQuery, best: &RankedCandidate) {
    let t = drawn(q, best);
    let mut block =
        intervals_to_timeline(&t.block_bars.iter().map(with_class_prefix).collect::<Vec<_>>(), |b| {
            b.track.clone()
        });
    for (name, label) in block.ranks.iter_mut().zip(&t.rank_labels) {
        name.name.clone_from(label);
    }
    sheet.page.timelines.push(TimelineChart {
        title: format!("{BLOCK_LAYERS} layers ({}), forward, by stream", t.layer_name),
        note: format!(
            "Layers in the steady state. Computation hides {:.0} % of the collectives' time in these layers; the gate below is for the whole step.",
            t.overlap.ratio() * 100.0
        ),
        timeline: block.clone(),
    });
    sheet.timeline = block;
    if best.candidate.pp > 1 {
        let staged = |bars: &[Interval]| {
            let mut wave = intervals_to_timeline(bars, |_| "compute".to_string());
            for stage in &mut wave.ranks {
                stage.name = format!("stage {}", stage.rank);
            }
            wave
        };
        let waits: Vec<String> = t.idle_shares.iter().map(|i| format!("{:.0}", i * 100.0)).collect();
        sheet.page.timelines.push(TimelineChart {
            title: format!(
                "{} over {} stages",
                count_with_noun(t.drawn_micro_batches, "micro-batch", "micro-batches"),
                best.candidate.pp
            ),
            note: format!("Idle share of each stage in a step: {} %.", waits.join(", ")),
            timeline: staged(&t.wave_bars.iter().map(with_direction_prefix).collect::<Vec<_>>()),
        });
        sheet.timeline = staged(&t.wave_bars);
    }
}

/// Prefixes the name of a stage's interval with its direction, which selects its colour.
fn with_direction_prefix(b: &Interval) -> Interval {
    let kind = match b.name.as_bytes().first() {
        Some(b'B') => "backward",
        Some(b'W') => "weights",
        _ => "forward",
    };
    Interval { name: format!("{kind}.{}", b.name), ..b.clone() }
}

/// Prefixes the name of an interval with its class (`class.rest`), which selects its colour.
fn with_class_prefix(b: &Interval) -> Interval {
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

/// Returns the label of a part of a step. Memory bandwidth also limits matmuls with few rows and
/// attention over long contexts, although they count as compute.
fn part_label(name: &str) -> &str {
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

fn report_title(p: &BuiltQuestion) -> String {
    let q = &p.question;
    let what = p.recipe.as_ref().map_or(q.work.name.clone(), |r| format!("{} ({})", r.title, q.work.name));
    format!("{what}, {}, on {}", job_label(&q.job), devices_label(q))
}

fn devices_label(q: &SearchQuery) -> String {
    format!("{} devices of {}", q.space.devices, q.machine.cluster.title)
}

fn job_label(j: &Job) -> String {
    match *j {
        Job::Train { batch, sequence } => format!("training on {batch} sequences of {sequence} tokens"),
        Job::Prefill { batch, sequence } => format!("prefill of {batch} prompts of {sequence} tokens"),
        Job::Decode { batch, context } => format!("decode of {batch} sequences at {context} tokens"),
    }
}

/// Formats the mesh with four axes if attention and experts share them, and otherwise once for
/// attention and once for experts.
fn mesh_label(c: &Candidate) -> String {
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

fn knob_list(c: &Candidate) -> String {
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

fn mapping_facts(q: &SearchQuery, best: &RankedCandidate) -> Vec<(String, String)> {
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
        let capacity = match l.capacity_pct {
            0 => "nothing dropped".to_string(),
            pct => {
                format!("capacity {:.2}, {:.1} % dropped", f64::from(pct) / 100.0, best.dropped_share * 100.0)
            }
        };
        out.push((
            "experts".to_string(),
            format!(
                "ep={} × tp={}, {}, in {}{}; {} wire; {capacity}; routing {}",
                l.ep,
                l.expert_tp,
                count_with_noun(c.expert_replicas, "copy", "copies"),
                c.experts_at.name(),
                match q.space.prefetch_hit_rate * 100.0 {
                    pct if pct > 0.0 =>
                        format!(", a predictor names {pct:.0} % of the cold ones a layer ahead"),
                    _ => String::new(),
                },
                l.wire_precision.name(),
                q.routing.name()
            ),
        ));
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

fn mitigation_list(q: &SearchQuery, best: &RankedCandidate) -> Vec<FailureModeAdvice> {
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
                            ": step {} (now {}), peak {:.1} GB (now {:.1})",
                            format_ns(n.step_ns),
                            format_ns(f.current.step_ns),
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

fn source_notes(p: &BuiltQuestion, outcome: &SearchOutcome) -> Vec<String> {
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

fn outcome_to_json(q: &SearchQuery, outcome: &SearchOutcome) -> serde_json::Value {
    let ranked = |r: &RankedCandidate| {
        let e = &r.estimate;
        json!({
            "pins": full_pins(q, r).to_text(),
            "step_ns": e.step_ns,
            "error": e.error_share,
            "tokens_per_s": e.tokens_per_s,
            "dropped": r.dropped_share,
            "mfu": e.mfu,
            "parts_ns": e.times.named_parts().into_iter().map(|(k, v)| (k.to_string(), v.into())).collect::<serde_json::Map<_, _>>(),
            "collective_ns": e.times.collective_ns,
            "bytes": e.budget.bytes.iter().map(|((tier, what), b)| json!({"tier": tier.name(), "use": format!("{what:?}").to_lowercase(), "bytes": b.0})).collect::<Vec<_>>(),
            "link_bytes": e.link_bytes.iter().map(|(c, b)| (c.name().to_string(), (*b).into())).collect::<serde_json::Map<_, _>>(),
            "gates": r.gates.iter().map(|g| json!({"id": g.id, "status": g.status.name(), "value": g.value, "threshold": g.threshold, "unit": g.unit, "message": g.explanation})).collect::<Vec<_>>(),
        })
    };
    json!({
        "model": q.work.name,
        "source": "op rows",
        "cluster": q.machine.cluster.name,
        "profile": q.machine.profile.name,
        "devices": outcome.used_devices,
        "idle_devices": outcome.idle_devices,
        "candidate_count": outcome.candidate_count,
        "legal_count": outcome.legal_count,
        "best": outcome.best_candidates.iter().map(ranked).collect::<Vec<_>>(),
        "pareto_front": outcome.pareto_front.iter().map(ranked).collect::<Vec<_>>(),
        "rejected": outcome.rejected.iter().map(|(reason, r)| json!({"reason": reason.id(), "code": reason.code().id, "count": r.count, "message": r.explanation})).collect::<Vec<_>>(),
        "notes": outcome.notes,
    })
}

/// Formats a count with its noun in singular or plural.
fn count_with_noun(n: u32, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// Returns the pins of a candidate, including the attention window of the question.
fn full_pins(q: &SearchQuery, r: &RankedCandidate) -> Pins {
    Pins { window: q.attention_window().and(q.pins.window), ..Pins::from_candidate(&r.candidate) }
}

/// Returns the bytes in device memory.
fn device_memory_bytes(r: &RankedCandidate) -> f64 {
    let bytes = &r.estimate.budget.bytes;
    bytes.iter().filter(|((tier, _), _)| *tier == MemoryTier::Hbm).map(|(_, b)| b.0 as f64).sum()
}

fn summary_line(r: &RankedCandidate) -> String {
    format!(
        "step {}, {:.0} tokens/s, {:.1} GB; {}",
        format_ns(r.estimate.step_ns),
        r.estimate.tokens_per_s,
        device_memory_bytes(r) / 1e9,
        mesh_label(&r.candidate)
    )
}

pub(super) fn format_ns(ns: f64) -> String {
    Nanoseconds(ns.max(0.0).round() as u64).to_string()
}

fn format_amount(value: f64, unit: &str) -> String {
    let digits = if value.abs() >= 100.0 { 0 } else { 2 };
    format!("{value:.digits$} {unit}").trim_end().to_string()
}
