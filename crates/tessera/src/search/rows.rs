//! Planning of language models, from op rows.

use std::path::{Path, PathBuf};

use serde_json::json;
use tessera_base::{Bytes, Diagnostic, Diagnostics, Nanoseconds, choices, nearest};
use tessera_cost::Machine;
use tessera_cost::bars::{Bar, Kind};
use tessera_cost::knobs::Recompute;
use tessera_cost::moe::Routing;
use tessera_ir::work::Work;
use tessera_mesh::{LinkClass, Tier};
use tessera_models::{LanguageModel, zoo};
use tessera_plan::search::axes::axes;
use tessera_plan::search::recipe::{self, Recipe};
use tessera_plan::search::remedy::{self, Signs};
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::search::timeline::{LAYERS, timeline as drawn};
use tessera_plan::search::{
    Candidate, Job, Objective, Outcome, Pins, Question, Ranked, Space, Verdict as Why, gates, search, why,
};
use tessera_report::html::{
    Drawing, EstimatePage, GateVerdict, MemoryRow, Number, PlanGate, Remedy, Standing,
};
use tessera_report::timeline::Timeline;

use super::advice::advice;
use super::hints::Needs;
use super::sheet::timeline_of;
use super::{JobKind, Sheet, T0047, T0056, hints, module, ranks, usual};

/// Which model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Subject {
    /// One of the zoo.
    Zoo(String),
    /// A config.json.
    Config(PathBuf),
    /// A recipe, which brings model, job and pins.
    Recipe(String),
}

/// What is asked. What is left open takes the recipe's value, or a default that the sheet names.
#[derive(Debug, Clone)]
pub struct Asked {
    /// Which model.
    pub subject: Subject,
    /// Where, and under which executor.
    pub machine: Machine,
    /// Devices to use.
    pub devices: Option<u32>,
    /// What the ranks are to do.
    pub job: Option<Job>,
    /// What is wanted.
    pub objective: Option<Objective>,
    /// What is decided already.
    pub pins: Pins,
    /// How tokens choose experts.
    pub routing: Option<Routing>,
    /// Share of the cold experts that a predictor names a layer ahead, 0 to 1.
    pub forecast: Option<f64>,
    /// Whether pieces that differ by one unit are refused.
    pub strict: bool,
    /// Limits of the gates.
    pub limits: Thresholds,
    /// The command, to be shown on the page.
    pub command: String,
}

/// Share of a step from which a difference is told.
pub(super) const WORTH_TELLING: f64 = 0.002;

/// A question with what came with it.
struct Posed {
    question: Question,
    recipe: Option<Recipe>,
    warnings: Diagnostics,
    fused: bool,
}

/// Searches the mappings of a model.
///
/// # Errors
/// What is wrong with the model's config, and why a recipe cannot be.
pub fn rows(asked: &Asked) -> Result<Sheet, Diagnostics> {
    let posed = pose(asked)?;
    let outcome = search(&posed.question);
    let mut sheet = sheet(asked, &posed, &outcome);
    sheet.tell();
    sheet.json["asked"] = crate::doctor::asked_json(asked);
    Ok(sheet)
}

/// The question as a search takes it, and its title.
pub(crate) fn question(asked: &Asked) -> Result<(Question, String), Diagnostics> {
    let posed = pose(asked)?;
    let title = title(&posed);
    Ok((posed.question, title))
}

/// Says what becomes of one arrangement, or of those that some pins leave.
///
/// # Errors
/// What is wrong with the model's config, and why a recipe cannot be.
pub fn rows_why(asked: &Asked, pins: &Pins) -> Result<(bool, String), Diagnostics> {
    let posed = pose_for(asked, true)?;
    let q = &posed.question;
    let answer = why(q, pins);
    let mut out = format!("{} on {}\n", pins.text(), place(q));
    match &answer.verdict {
        Why::Refused { reasons, neighbours } => {
            out += &format!(
                "refused: none of {} arrangements that these pins leave is legal\n",
                answer.considered
            );
            for (reason, r) in reasons {
                out += &format!(
                    "  {} ({}): {} of them, such as\n    {}\n",
                    reason.title(),
                    reason.code().id,
                    r.count,
                    r.says
                );
            }
            if !neighbours.is_empty() {
                out += "legal neighbours, nearest first\n";
            }
            for n in neighbours {
                let changed: Vec<String> = n.changed.iter().map(|(k, v)| format!("{k}={v}")).collect();
                out += &format!("  {}: {}\n", changed.join(","), short(&n.ranked));
            }
            Ok((false, out))
        }
        Why::Legal { ranked, better, legal, best, terms } => {
            out += &format!("legal; {better} of {legal} legal arrangements are better\n");
            out += &format!("  this  {}\n        {}\n", short(ranked), Pins::of(&ranked.candidate).text());
            out += &format!("  best  {}\n        {}\n", short(best), Pins::of(&best.candidate).text());
            let least = best.estimate.step_ns * WORTH_TELLING;
            let costs: Vec<_> = terms.iter().filter(|t| (t.here_ns - t.best_ns).abs() > least).collect();
            if !costs.is_empty() {
                out += "what it costs against the best, per step\n";
            }
            for t in costs {
                let (sign, ns) = if t.here_ns >= t.best_ns {
                    ("+", t.here_ns - t.best_ns)
                } else {
                    ("-", t.best_ns - t.here_ns)
                };
                out += &format!(
                    "  {:<24} {sign}{} ({} here, {} there)\n",
                    part(t.name),
                    ns_text(ns),
                    ns_text(t.here_ns),
                    ns_text(t.best_ns)
                );
            }
            Ok((true, out))
        }
    }
}

fn pose(asked: &Asked) -> Result<Posed, Diagnostics> {
    pose_for(asked, false)
}

/// `elsewhere`: what is asked about is another mesh than the recipe's own; one that cannot be only brings model, job and knobs.
fn pose_for(asked: &Asked, elsewhere: bool) -> Result<Posed, Diagnostics> {
    let (recipe, model) = match &asked.subject {
        Subject::Recipe(name) => {
            let mut r = recipe::find(name).map_err(|d| vec![*d])?;
            // An axis that is pinned takes the place of the recipe's.
            for (axis, pin) in
                r.axes.iter_mut().zip([asked.pins.tp, asked.pins.ep, asked.pins.pp, asked.pins.dp])
            {
                *axis = pin.unwrap_or(*axis);
            }
            (Some(r), zoo_model(r.model)?)
        }
        Subject::Zoo(name) => (None, zoo_model(name)?),
        Subject::Config(path) => (None, config(path)?),
    };
    let fused = !asked.machine.curves().attention.stores_scores;
    let work = model.work(fused);
    let (job, objective) = match recipe {
        Some(r) => (asked.job.unwrap_or(r.job), asked.objective.unwrap_or(r.objective)),
        None => {
            let usual = || usual::job(JobKind::default(), None, None, &asked.machine, asked.devices);
            (asked.job.unwrap_or_else(usual), asked.objective.unwrap_or(usual::OBJECTIVE))
        }
    };
    let routing = asked.routing.unwrap_or(usual::ROUTING);
    let forecast = asked.forecast.map(|share| forecast(share, &work, job)).transpose()?;
    let mut warnings = Vec::new();
    let mut question = match recipe {
        Some(r) => {
            let found = r.check(&work, &asked.machine.cluster, asked.devices, asked.strict);
            let broken = found.iter().any(Diagnostic::is_error);
            if broken && !elsewhere {
                return Err(found);
            }
            let mut q = r.question(work, asked.machine.clone(), routing, asked.strict);
            if broken {
                q.pins = Pins { tp: None, ep: None, pp: None, dp: None, ..q.pins };
                q.space.devices = asked.machine.cluster.devices();
            } else {
                warnings = found;
            }
            q
        }
        None => {
            let mut space = Space::of(&work, job, &asked.machine.cluster);
            space.strict = asked.strict;
            Question {
                work,
                job,
                objective,
                machine: asked.machine.clone(),
                routing,
                pins: Pins::default(),
                space,
            }
        }
    };
    (question.job, question.objective) = (job, objective);
    if let Some(n) = asked.devices {
        question.space.devices = n;
    }
    question.space.limits = asked.limits.clone();
    question.space.forecast = forecast.unwrap_or(question.space.forecast);
    question.pins = asked.pins.or(&question.pins);
    Ok(Posed { question, recipe, warnings, fused })
}

/// A share that says something of the model and the job.
fn forecast(share: f64, work: &Work, job: Job) -> Result<f64, Diagnostics> {
    let why = if !(0.0..=1.0).contains(&share) {
        format!("{share} is no share from 0 to 1")
    } else if work.experts().is_none() {
        format!("{} has no routed experts", work.name)
    } else if matches!(job, Job::Train { .. }) {
        "training keeps all experts in device memory".to_string()
    } else {
        return Ok(share);
    };
    let d = Diagnostic::error(&T0056, format!("the forecast names no experts: {why}"))
        .at("forecast", share.to_string());
    Err(vec![d.hint("leave it out, or give a share such as 0.8 with a model that routes tokens to experts")])
}

fn zoo_model(name: &str) -> Result<LanguageModel, Diagnostics> {
    zoo::named(name).ok_or_else(|| {
        let names: Vec<&str> = zoo::names().into_iter().collect();
        let d = Diagnostic::error(&T0047, format!("no model is named `{name}`")).at("zoo", choices(&names));
        vec![match nearest(name, names.iter().copied()) {
            Some(n) => d.hint(format!("did you mean `{n}`?")),
            None => d.hint("or give the path of a config.json"),
        }]
    })
}

fn config(path: &Path) -> Result<LanguageModel, Diagnostics> {
    let name = path.display().to_string();
    let text = std::fs::read_to_string(path).map_err(|e| {
        vec![Diagnostic::error(&T0047, format!("{name} cannot be read: {e}")).at(name.clone(), "this file")]
    })?;
    let model = LanguageModel::parse(&name, &text)?;
    // People know a model by its folder; its class is that of many.
    let folder = path.parent().and_then(Path::file_name).map(|n| n.to_string_lossy().into_owned());
    Ok(match folder {
        Some(folder) if path.file_name().is_some_and(|n| n == "config.json") => {
            LanguageModel { name: folder, ..model }
        }
        _ => model,
    })
}

fn sheet(asked: &Asked, posed: &Posed, outcome: &Outcome) -> Sheet {
    let q = &posed.question;
    let best = outcome.best.first();
    let mut page = EstimatePage {
        tessera: env!("CARGO_PKG_VERSION").to_string(),
        title: title(posed),
        considered: outcome.considered,
        command: asked.command.clone(),
        ..EstimatePage::default()
    };
    page.refused = outcome
        .rejected
        .iter()
        .map(|(reason, r)| (format!("{} ({})", reason.title(), reason.code().id), r.count, r.says.clone()))
        .collect();
    page.refused.sort_by_key(|r| std::cmp::Reverse(r.1));
    page.sources = sources(posed, outcome);
    let mut sheet = Sheet {
        page,
        json: numbers(q, outcome),
        timeline: Timeline::default(),
        env: hints(Needs { exchanges: q.work.experts().is_some(), deterministic: true }),
        ranks: None,
        module: None,
    };
    let Some(best) = best else {
        sheet.page.standing = Standing::Refused;
        sheet.page.says = format!(
            "none of {} arrangements is legal on {}; each is counted under its reason below",
            outcome.considered,
            place(q)
        );
        return sheet;
    };
    fill(&mut sheet, q, outcome, best);
    sheet.ranks = ranks::of_candidate(&q.machine.cluster, &best.candidate);
    module::add(&mut sheet, q, best);
    sheet
}

fn fill(sheet: &mut Sheet, q: &Question, outcome: &Outcome, best: &Ranked) {
    let page = &mut sheet.page;
    let missed = best.gates.iter().filter(|g| g.verdict == gates::Verdict::Fail).count();
    let warned = best.gates.iter().filter(|g| g.verdict == gates::Verdict::Warn).count();
    page.standing = if missed + warned > 0 { Standing::Warns } else { Standing::Good };
    let dropped = match best.dropped * 100.0 {
        pct if pct >= 1.0 => format!("; {pct:.0} % of the assignments to experts are dropped"),
        _ => String::new(),
    };
    page.says = format!(
        "{}; {} of {} arrangements are legal{dropped}{}",
        mesh(&best.candidate),
        outcome.legal,
        outcome.considered,
        match (missed, warned) {
            (0, 0) => String::new(),
            (m, 0) => format!("; gates failed: {m}"),
            (0, w) => format!("; gates that warn: {w}"),
            (m, w) => format!("; gates failed: {m}, that warn: {w}"),
        }
    );
    if let Objective::Deadline(limit) = q.objective
        && best.estimate.step_ns > limit.0 as f64
    {
        page.standing = Standing::Refused;
        page.says = format!("no arrangement ends within {limit}; the nearest is {}", page.says);
    }
    page.warnings.extend(leaving(q, best));
    let e = &best.estimate;
    let step = Nanoseconds(e.step_ns.round() as u64).to_string();
    let (value, unit) = step.split_once(' ').unwrap_or((&step, ""));
    let per_device = e.tokens_per_s / f64::from(outcome.devices.max(1));
    let number = |value: String, unit: &str, label: String| Number { value, unit: unit.to_string(), label };
    let rated = match best.dropped * 100.0 {
        pct if pct >= 0.05 => {
            format!("per device, of which {pct:.1} % of the assignments to experts are dropped")
        }
        _ => "per device".to_string(),
    };
    let bar = match e.error {
        e if e > 0.0 => format!("a step, ± {:.0} %", e * 100.0),
        _ => "a step at least: a floor".to_string(),
    };
    page.numbers = vec![
        number(value.to_string(), unit, bar),
        number(format!("{per_device:.0}"), "tokens/s", rated),
        number(
            format!("{:.1}", held(best) / 1e9),
            "GB",
            format!("on the fullest rank, of {:.0}", q.machine.cluster.device.memory_bytes.value / 1e9),
        ),
        number(format!("{:.0}", e.mfu * 100.0), "%", "of the peak in useful operations".to_string()),
    ];
    page.facts = facts(q, best);
    page.parts = e.times.parts().into_iter().map(|(name, ns)| (part(name).to_string(), ns)).collect();
    page.parts_note =
        "One step on the ranks that take longest. Communication counts only where nothing hides it."
            .to_string();
    page.memory = Tier::ALL
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
                Tier::Hbm => Some(cluster.device.memory_bytes.value as u64),
                Tier::Host => Some(cluster.host_bytes.value as u64),
                Tier::Peer => None,
            };
            (!items.is_empty()).then(|| MemoryRow {
                role: tier.name().to_string(),
                ranks: "the fullest".to_string(),
                items,
                capacity,
            })
        })
        .collect();
    page.gates = best
        .gates
        .iter()
        .map(|g| PlanGate {
            title: g.title.to_string(),
            value: if g.verdict == gates::Verdict::NotApplicable {
                "–".to_string()
            } else {
                amount(g.value, g.unit)
            },
            limit: amount(g.limit, g.unit),
            verdict: match g.verdict {
                gates::Verdict::Pass => GateVerdict::Pass,
                gates::Verdict::Warn => GateVerdict::Warn,
                gates::Verdict::Fail => GateVerdict::Fail,
                gates::Verdict::NotApplicable => GateVerdict::Void,
            },
            says: g.says.clone(),
        })
        .collect();
    page.remedies = remedies(q, best);
    page.advice = advice(q, best, outcome.idle);
    page.columns = ["mapping", "step", "tokens/s/device", "memory", "knobs"].map(String::from).to_vec();
    page.mappings = std::iter::once(best)
        .chain(outcome.front.iter().filter(|r| r.candidate != best.candidate))
        .map(|r| {
            vec![
                mesh(&r.candidate),
                ns_text(r.estimate.step_ns),
                format!("{:.0}", r.estimate.tokens_per_s / f64::from(outcome.devices.max(1))),
                format!("{:.1} GB", held(r) / 1e9),
                knobs(&r.candidate),
            ]
        })
        .collect();
    draw(sheet, q, best);
    let page = &mut sheet.page;
    page.mapping = format!(
        "# Pins of this mapping, for --pin. Made from op rows: it is estimated, and no plan is sealed from it.\n{}\n",
        pins_of(q, best).text().replace(',', "\n")
    );
}

/// Groups of tp and ep that leave a domain of switches, and what that takes over the links between domains.
fn leaving(q: &Question, best: &Ranked) -> Option<String> {
    let gate = best.gates.iter().find(|g| g.id == "mesh.domain" && g.verdict == gates::Verdict::Fail)?;
    let cluster = &q.machine.cluster;
    let out = best.estimate.link_bytes.get(&LinkClass::Out).copied().unwrap_or(0.0);
    let rate = |class| cluster.link(class).bytes_per_s.value / 1e9;
    Some(format!(
        "groups leave their domain of {} devices: {}; a rank sends {} of a step over links between domains, at {:.0} GB/s and not {:.0}",
        cluster.domain,
        gate.says.trim_start_matches("leave their domain: "),
        Bytes(out.round() as u64),
        rate(LinkClass::Out),
        rate(LinkClass::Domain)
    ))
}

/// A layer by stream, and the wave of micro-batches where there are stages.
fn draw(sheet: &mut Sheet, q: &Question, best: &Ranked) {
    let t = drawn(q, best);
    let mut block = timeline_of(&t.block.iter().map(classed).collect::<Vec<_>>(), |b| b.lane.clone());
    for (name, says) in block.ranks.iter_mut().zip(&t.ranks) {
        name.name.clone_from(says);
    }
    sheet.page.timelines.push(Drawing {
        title: format!("{LAYERS} layers ({}), forward, by stream", t.layer),
        note: format!(
            "As they repeat in the steady state. In these layers {:.0} % of the collectives' time is hidden behind computation; the gate below is of the whole step.",
            t.overlap.ratio() * 100.0
        ),
        timeline: block.clone(),
    });
    sheet.timeline = block;
    if best.candidate.pp > 1 {
        let staged = |bars: &[Bar]| {
            let mut wave = timeline_of(bars, |_| "compute".to_string());
            for stage in &mut wave.ranks {
                stage.name = format!("stage {}", stage.rank);
            }
            wave
        };
        let waits: Vec<String> = t.idle.iter().map(|i| format!("{:.0}", i * 100.0)).collect();
        sheet.page.timelines.push(Drawing {
            title: format!(
                "{} over {} stages",
                unit(t.drawn, "micro-batch", "micro-batches"),
                best.candidate.pp
            ),
            note: format!("Each stage in turn waits {} % of the whole step.", waits.join(", ")),
            timeline: staged(&t.wave.iter().map(turn).collect::<Vec<_>>()),
        });
        sheet.timeline = staged(&t.wave);
    }
}

/// A turn of a stage under the name of its kind, which gives it its colour.
fn turn(b: &Bar) -> Bar {
    let kind = match b.name.as_bytes().first() {
        Some(b'B') => "backward",
        Some(b'W') => "weights",
        _ => "forward",
    };
    Bar { name: format!("{kind}.{}", b.name), ..b.clone() }
}

/// The bar under a name whose part before the point says what class it is of, which gives it its colour.
fn classed(b: &Bar) -> Bar {
    let class = match b.kind {
        Kind::Collective if b.lane == "a2a" => "exchange",
        Kind::Collective => "tp",
        Kind::Fetch => "fetch",
        Kind::Pack => "pack",
        _ if b.name.starts_with("QK") => "scores",
        _ => b.name.split(['.', ' ']).next().unwrap_or_default(),
    };
    let rest = b.name.strip_prefix(class).map_or(b.name.as_str(), |r| r.trim_start_matches(['.', ' ']));
    let name = if rest.is_empty() { class.to_string() } else { format!("{class}.{rest}") };
    Bar { name, ..b.clone() }
}

/// A part of a step in words: products of few rows and attention over long contexts are bound by memory too.
fn part(name: &str) -> &str {
    match name {
        "compute" => "products and attention",
        "memory" => "passes over memory",
        "tp" => "collectives of tp",
        "ep" => "dispatch and combine",
        "pp and dp" => "sends and gradients",
        "imbalance" => "the slowest expert rank",
        "bubble" => "waiting for stages",
        "launch" => "launches",
        "fetch" => "fetches from other tiers",
        other => other,
    }
}

fn title(p: &Posed) -> String {
    let q = &p.question;
    let what = p.recipe.as_ref().map_or(q.work.name.clone(), |r| format!("{} ({})", r.title, q.work.name));
    format!("{what}, {}, on {}", job(&q.job), place(q))
}

fn place(q: &Question) -> String {
    format!("{} devices of {}", q.space.devices, q.machine.cluster.title)
}

fn job(j: &Job) -> String {
    match *j {
        Job::Train { batch, sequence } => format!("training on {batch} sequences of {sequence} tokens"),
        Job::Prefill { batch, sequence } => format!("prefill of {batch} prompts of {sequence} tokens"),
        Job::Decode { batch, context } => format!("decode of {batch} sequences at {context} tokens"),
    }
}

/// The mesh in the four axes where attention and experts share it, in both views where they do not.
fn mesh(c: &Candidate) -> String {
    let l = &c.layout;
    let dp = c.copies();
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

fn knobs(c: &Candidate) -> String {
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

fn facts(q: &Question, best: &Ranked) -> Vec<(String, String)> {
    let (c, l) = (&best.candidate, &best.candidate.layout);
    let mut out = vec![
        ("mesh".to_string(), mesh(c)),
        ("attention".to_string(), {
            let ring = if l.ring > 1 { format!(", rings of {}", l.ring) } else { String::new() };
            format!(
                "{} over tp={}{ring}, {} a stage",
                l.scheme.name(),
                l.tp,
                unit(c.replicas, "replica", "replicas")
            )
        }),
    ];
    if q.work.experts().is_some() {
        let capacity = match l.capacity_pct {
            0 => "nothing dropped".to_string(),
            pct => format!("capacity {:.2}, {:.1} % dropped", f64::from(pct) / 100.0, best.dropped * 100.0),
        };
        out.push((
            "experts".to_string(),
            format!(
                "ep={} × tp={}, {}, in {}{}; {} wire; {capacity}; routing {}",
                l.ep,
                l.expert_tp,
                unit(c.expert_replicas, "copy", "copies"),
                c.experts_at.name(),
                match q.space.forecast * 100.0 {
                    pct if pct > 0.0 =>
                        format!(", a predictor names {pct:.0} % of the cold ones a layer ahead"),
                    _ => String::new(),
                },
                l.wire.name(),
                q.routing.name()
            ),
        ));
    }
    let layers: Vec<String> = best
        .stages
        .iter()
        .map(|s| s.pieces.iter().map(|p| (p.end - p.start).to_string()).collect::<Vec<_>>().join("+"))
        .collect();
    out.push((
        "stages".to_string(),
        format!(
            "{}: {} layers each in turn; {} of {}",
            c.pp,
            layers.join(", "),
            unit(best.micro_batches, "micro-batch", "micro-batches"),
            unit(c.micro_batch, "sequence", "sequences")
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
    if let Some(window) = q.window() {
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
        out.push(("sends".to_string(), format!("{} by a rank in a step, on the mean", links.join(", "))));
    }
    out
}

fn remedies(q: &Question, best: &Ranked) -> Vec<Remedy> {
    let Ok(numbers) = remedy::Numbers::of(q, &best.candidate) else { return Vec::new() };
    let found = remedy::diagnose(q, &best.candidate, &Signs::of(q, &numbers), &remedy::Limits::default());
    found
        .unwrap_or_default()
        .into_iter()
        .map(|f| Remedy {
            mode: f.diagnostic("this plan").code.title.to_string(),
            sign: f.sign.clone(),
            actions: f
                .remedies
                .iter()
                .map(|r| {
                    let after = r.after.map_or(String::new(), |n| {
                        format!(
                            ": step {} (now {}), peak {:.1} GB (now {:.1})",
                            ns_text(n.step_ns),
                            ns_text(f.before.step_ns),
                            n.peak_bytes / 1e9,
                            f.before.peak_bytes / 1e9
                        )
                    });
                    (r.action.to_string(), format!("{}{after}", r.how))
                })
                .collect(),
        })
        .collect()
}

fn sources(p: &Posed, outcome: &Outcome) -> Vec<String> {
    let q = &p.question;
    let profile = &q.machine.profile;
    let mut out = vec![format!(
        "Estimated from op rows of {} under the executor profile {}: no program was lowered, nothing can be run from this.",
        q.work.name, profile.name
    )];
    out.push(format!(
        "Attention is {}; routing is {}.",
        if p.fused { "one fused kernel that keeps no scores" } else { "unfused" },
        q.routing.name()
    ));
    if let Some(r) = &p.recipe {
        out.push(format!("The guide says: {} Ours: {}", r.says, r.ours));
    }
    for w in &p.warnings {
        let notes = w.notes.join(" ");
        out.push(format!("{} ({}): {} {notes}", w.code.title, w.code.id, w.message).trim_end().to_string());
    }
    out.extend(outcome.notes.iter().cloned());
    // Which axis helps at all, before any mapping is weighed.
    out.extend(axes(q).map(|c| c.says).unwrap_or_default());
    out
}

fn numbers(q: &Question, outcome: &Outcome) -> serde_json::Value {
    let ranked = |r: &Ranked| {
        let e = &r.estimate;
        json!({
            "pins": pins_of(q, r).text(),
            "step_ns": e.step_ns,
            "error": e.error,
            "tokens_per_s": e.tokens_per_s,
            "dropped": r.dropped,
            "mfu": e.mfu,
            "parts_ns": e.times.parts().into_iter().map(|(k, v)| (k.to_string(), v.into())).collect::<serde_json::Map<_, _>>(),
            "collective_ns": e.times.collective_ns,
            "bytes": e.budget.bytes.iter().map(|((tier, what), b)| json!({"tier": tier.name(), "use": format!("{what:?}").to_lowercase(), "bytes": b.0})).collect::<Vec<_>>(),
            "link_bytes": e.link_bytes.iter().map(|(c, b)| (c.name().to_string(), (*b).into())).collect::<serde_json::Map<_, _>>(),
            "gates": r.gates.iter().map(|g| json!({"id": g.id, "verdict": g.verdict.name(), "value": g.value, "limit": g.limit, "unit": g.unit, "says": g.says})).collect::<Vec<_>>(),
        })
    };
    json!({
        "model": q.work.name,
        "from": "op rows",
        "cluster": q.machine.cluster.name,
        "profile": q.machine.profile.name,
        "devices": outcome.devices,
        "idle": outcome.idle,
        "considered": outcome.considered,
        "legal": outcome.legal,
        "best": outcome.best.iter().map(ranked).collect::<Vec<_>>(),
        "front": outcome.front.iter().map(ranked).collect::<Vec<_>>(),
        "rejected": outcome.rejected.iter().map(|(reason, r)| json!({"reason": reason.id(), "code": reason.code().id, "count": r.count, "says": r.says})).collect::<Vec<_>>(),
        "notes": outcome.notes,
    })
}

/// So many, and what of.
fn unit(n: u32, one: &str, many: &str) -> String {
    format!("{n} {}", if n == 1 { one } else { many })
}

/// Its knobs, with the window of the question.
fn pins_of(q: &Question, r: &Ranked) -> Pins {
    Pins { window: q.window().and(q.pins.window), ..Pins::of(&r.candidate) }
}

/// Bytes in device memory.
fn held(r: &Ranked) -> f64 {
    let bytes = &r.estimate.budget.bytes;
    bytes.iter().filter(|((tier, _), _)| *tier == Tier::Hbm).map(|(_, b)| b.0 as f64).sum()
}

fn short(r: &Ranked) -> String {
    format!(
        "step {}, {:.0} tokens/s, {:.1} GB; {}",
        ns_text(r.estimate.step_ns),
        r.estimate.tokens_per_s,
        held(r) / 1e9,
        mesh(&r.candidate)
    )
}

pub(super) fn ns_text(ns: f64) -> String {
    Nanoseconds(ns.max(0.0).round() as u64).to_string()
}

fn amount(value: f64, unit: &str) -> String {
    let digits = if value.abs() >= 100.0 { 0 } else { 2 };
    format!("{value:.digits$} {unit}").trim_end().to_string()
}
