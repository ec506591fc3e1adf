//! Planning of language models from op rows.

mod labels;
mod question;

use serde_json::json;
use tessera_base::{Diagnostics, GateStatus, Nanoseconds};
use tessera_cost::intervals::Interval;
use tessera_mesh::MemoryTier;
use tessera_plan::search::timeline::{BLOCK_LAYERS, draw_timeline as drawn};
use tessera_plan::search::{
    Objective, Pins, RankedCandidate, SearchOutcome, SearchQuery, WhyVerdict as Why, explain_pins, gates,
    search,
};
use tessera_report::html::{
    EstimatePage, EstimateVerdict, HeadlineNumber, PlanGate, RoleMemoryRow, TimelineChart,
};
use tessera_report::timeline::Timeline;

use crate::advice::build_advice;
use crate::format::{MIN_SHARE_SHOWN, count_with_noun, format_amount, format_ns};
use crate::library_env::{LibraryRequirements, render_env};
use crate::query::LanguageQuery;
use crate::query_json::query_to_json;
use crate::report::{EstimateReport, intervals_to_timeline};
use crate::{attention_program, rank_table};
use labels::{
    device_memory_bytes, devices_label, domain_warning, full_pins, knob_list, mapping_facts, mesh_label,
    mitigation_list, part_label, report_title, source_notes, summary_line, with_class_prefix,
    with_direction_prefix,
};
use question::{BuiltQuestion, build_question, build_question_for};

/// Searches the mappings of a model and returns the report.
///
/// # Errors
/// Diagnostics of the model's config, or of a recipe that cannot be satisfied.
pub fn search_language(query: &LanguageQuery) -> Result<EstimateReport, Diagnostics> {
    let posed = build_question(query)?;
    let outcome = search(&posed.question);
    let mut sheet = build_report(query, &posed, &outcome);
    sheet.export_page_json();
    sheet.json["query"] = query_to_json(query);
    Ok(sheet)
}

/// Builds the search question of a query, and its title.
pub fn question_and_title(query: &LanguageQuery) -> Result<(SearchQuery, String), Diagnostics> {
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
    fill_verdict(page, q, outcome, best);
    page.warnings.extend(domain_warning(q, best));
    let e = &best.estimate;
    page.headline_numbers = headline_numbers(q, outcome, best);
    page.mapping_facts = mapping_facts(q, best);
    page.step_parts =
        e.times.named_parts().into_iter().map(|(name, ns)| (part_label(name).to_string(), ns)).collect();
    page.step_parts_note =
        "One step on the slowest ranks. Communication counts only as far as it is exposed.".to_string();
    page.memory = memory_rows(q, best);
    page.gates = best.gates.iter().map(gate_row).collect();
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

/// Fills the verdict and the recommendation, which name the gates that fail or warn.
fn fill_verdict(page: &mut EstimatePage, q: &SearchQuery, outcome: &SearchOutcome, best: &RankedCandidate) {
    let missed = best.gates.iter().filter(|g| g.status == GateStatus::Fail).count();
    let warned = best.gates.iter().filter(|g| g.status == GateStatus::Warn).count();
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
}

fn headline_numbers(q: &SearchQuery, outcome: &SearchOutcome, best: &RankedCandidate) -> Vec<HeadlineNumber> {
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
    vec![
        number(value.to_string(), unit, bar),
        number(format!("{per_device:.0}"), "tokens/s", rated),
        number(
            format!("{:.1}", device_memory_bytes(best) / 1e9),
            "GB",
            format!("on the fullest rank, of {:.0}", q.machine.cluster.device.memory_bytes.value / 1e9),
        ),
        number(format!("{:.0}", e.mfu * 100.0), "%", "of peak FLOP/s (MFU)".to_string()),
    ]
}

/// Returns a row for each memory tier that the fullest rank uses.
fn memory_rows(q: &SearchQuery, best: &RankedCandidate) -> Vec<RoleMemoryRow> {
    MemoryTier::ALL
        .into_iter()
        .filter_map(|tier| {
            let items: Vec<(String, u64)> = best
                .estimate
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
        .collect()
}

fn gate_row(g: &gates::GateResult) -> PlanGate {
    PlanGate {
        title: g.title.to_string(),
        value: if g.status == GateStatus::NotApplicable {
            "–".to_string()
        } else {
            format_amount(g.value, g.unit)
        },
        limit: format_amount(g.threshold, g.unit),
        verdict: g.status,
        explanation: g.explanation.clone(),
    }
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
