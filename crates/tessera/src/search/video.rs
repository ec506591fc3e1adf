//! Planning of video models: one call of every mapping is played by discrete events.

use serde_json::json;
use tessera_base::{Bytes, Diagnostic, Diagnostics};
use tessera_cost::Machine;
use tessera_cost::bars::{Bar, Kind};
use tessera_cost::program::{Doing, Priced};
use tessera_mesh::Tier;
use tessera_plan::search::Objective;
use tessera_plan::video::{self, Decode, Outcome, Pins, Question, Ranked, Studio};
use tessera_plan::{DtypePolicy, Logical, Mapping};
use tessera_report::html::{Advice, Drawing, EstimatePage, MemoryRow, Number, Standing};
use tessera_report::timeline::Timeline;

use super::hints::Needs;
use super::rows::{WORTH_TELLING, ns_text};
use super::sheet::timeline_of;
use super::{Sheet, hints, ranks};
use crate::Model;
use crate::plan::logical;

/// One message between leader and workers, in nanoseconds: what the lockstep of processes on one host takes, measured on
/// two cores.
const MESSAGE_NS: f64 = 150_000.0;
/// Share of an even split that a decoder keeps when ranks share it, where nobody says: rows of a picture and their halos.
const SHARED: f64 = 0.85;
/// Mappings in the table.
const SHOWN: usize = 16;
/// Ranks drawn on the page.
const DRAWN: usize = 8;

/// What is asked.
#[derive(Debug, Clone)]
pub struct VideoAsked<'a> {
    /// The model.
    pub model: &'a Model,
    /// Where, and under which executor.
    pub machine: Machine,
    /// Devices that may be used.
    pub devices: Option<u32>,
    /// What is wanted.
    pub objective: Option<Objective>,
    /// What programs compute in.
    pub dtype: DtypePolicy,
    /// What is decided already.
    pub pins: Pins,
    /// Decode of a chunk on one device in nanoseconds, where the model has no decoder of its own.
    pub decode_ns: Option<f64>,
    /// Encode of the anchor, likewise.
    pub encode_ns: Option<f64>,
    /// Whether one rank decodes and encodes whole chunks; otherwise ranks may share them.
    pub whole_decode: bool,
    /// The command, to be shown on the page.
    pub command: String,
}

/// Searches the mappings of a model. The chosen one, if any fits, is what `tessera stream` runs; who decodes is not part of
/// a mapping, and ranks that share a decoder are not run yet, as the sheet then says. `tell` hears how many meshes of how
/// many have been looked at.
///
/// # Errors
/// Never today: what does not fit is on the sheet.
pub fn video(
    asked: &VideoAsked<'_>,
    tell: &mut dyn FnMut(usize, usize),
) -> Result<(Sheet, Option<Mapping>), Diagnostics> {
    let logical = logical(&asked.model.video);
    let call = steady(&logical);
    let studio = studio(asked, &logical);
    let q = question(asked, &logical, &call, studio);
    let outcome = video::search_telling(&q, tell);
    let mapping = chosen(&outcome).map(|r| r.mapping.clone());
    let mut sheet = sheet(asked, &q, &outcome);
    sheet.tell();
    Ok((sheet, mapping))
}

/// The best of those that a stream runs as they are estimated: ranks that share a decoder, a leader that waits for the
/// whole chunk or has its anchor shared, are planned for and not run yet.
fn chosen(outcome: &Outcome) -> Option<&Ranked> {
    let runs = |r: &&Ranked| matches!(r.decode, Decode::OnMesh | Decode::AnchorFirst | Decode::Beside);
    outcome.best.iter().find(runs)
}

/// Says what becomes of one mapping, and how far it is from the best. `tell` hears how many meshes of how many have been
/// looked at.
///
/// # Errors
/// Never today: what does not fit is in the text.
pub fn video_why(
    asked: &VideoAsked<'_>,
    pins: &Pins,
    tell: &mut dyn FnMut(usize, usize),
) -> Result<(bool, String), Diagnostics> {
    let logical = logical(&asked.model.video);
    let call = steady(&logical);
    let studio = studio(asked, &logical);
    // What is asked about is compared with everything, whatever else was pinned.
    let whole = Question { pins: Pins::default(), ..question(asked, &logical, &call, studio) };
    let mut one = whole.clone();
    one.pins = *pins;
    // What was asked for is looked at, however few devices it takes.
    one.at_least = 1;
    let (found, all) = (video::search(&one), video::search_telling(&whole, tell));
    let mut out = format!("{} on {}\n", words(pins), place(asked));
    match (found.best.first(), all.best.first()) {
        (Some(this), Some(best)) => {
            out += &format!(
                "legal\n  this  {}\n  best  {}\n{}",
                short(asked, this),
                short(asked, best),
                against(this, best)
            );
            Ok((true, out))
        }
        (Some(this), None) => Ok((true, out + &format!("legal\n  this  {}\n", short(asked, this)))),
        (None, _) if found.considered == 0 => {
            let most = asked.devices.unwrap_or(asked.machine.cluster.devices());
            Ok((false, out + &format!("refused: no mapping of these pins takes {most} devices or fewer\n")))
        }
        (None, best) => {
            out += &format!("refused: none of {} mappings that these pins leave fits\n", found.considered);
            for (code, r) in &found.refused {
                out += &format!(
                    "  {code}: {} of them, such as {}\n    {}\n",
                    r.count, r.example, r.says.message
                );
                if let Some(hint) = &r.says.hint {
                    out += &format!("    {hint}\n");
                }
            }
            if let Some(best) = best {
                out += &format!("  best  {}\n", short(asked, best));
            }
            Ok((false, out))
        }
    }
}

/// What a search under other pins finds, with the question it answered handed to `then`.
pub(crate) fn found<R>(
    asked: &VideoAsked<'_>,
    pins: &Pins,
    then: impl FnOnce(&Question<'_>, Outcome) -> R,
) -> R {
    let logical = logical(&asked.model.video);
    let call = steady(&logical);
    let mut q = question(asked, &logical, &call, studio(asked, &logical));
    q.pins = *pins;
    let outcome = video::search(&q);
    then(&q, outcome)
}

fn question<'a>(
    asked: &'a VideoAsked<'_>,
    logical: &'a Logical,
    call: &'a str,
    studio: Studio,
) -> Question<'a> {
    let devices = asked.devices.unwrap_or(asked.machine.cluster.devices());
    Question {
        logical,
        call,
        frames: asked.model.video.stream.frames_per_chunk(),
        machine: &asked.machine,
        devices,
        at_least: 1,
        objective: asked.objective.unwrap_or(Objective::Throughput),
        studio,
        message_ns: MESSAGE_NS,
        dtype: asked.dtype,
        pins: asked.pins,
        // Enough that one that runs today is among them.
        keep: 64,
    }
}

/// The call of a chunk in the middle of a scene: the fullest window, no new prompt.
fn steady(l: &Logical) -> String {
    let plain = |name: &&(String, Vec<String>)| !name.0.contains(".text") && !name.0.contains(".rebase");
    l.calls.iter().rev().find(plain).or(l.calls.last()).map_or(String::new(), |c| c.0.clone())
}

/// What surrounds the generator: the model's own decoder by its programs, or what was said of another.
fn studio(asked: &VideoAsked<'_>, l: &Logical) -> Studio {
    let stream = &asked.model.video.stream;
    let priced = |name: &str| {
        l.phases.iter().find(|p| p.name == name).map(|p| {
            // One program by itself runs at full pace: it never heats the device for long.
            Priced::of(&asked.machine, p, 1.0).alone_ns()
        })
    };
    // Its program is of one latent.
    let whole = |ns: f64| ns * stream.chunk_frames as f64;
    let decode_ns = asked.decode_ns.or_else(|| priced("decode").map(whole));
    let encode_ns = asked.encode_ns.or_else(|| priced("encode")).unwrap_or(0.0);
    let shared = (!asked.whole_decode).then_some(SHARED);
    match decode_ns {
        Some(ns) => Studio::of(stream.chunk_frames, ns, encode_ns, stream.recompute, shared),
        None => Studio::NONE,
    }
}

fn sheet(asked: &VideoAsked<'_>, q: &Question<'_>, outcome: &Outcome) -> Sheet {
    let stream = &asked.model.video.stream;
    let machine = &asked.machine;
    let title = format!(
        "{} at {}x{}, {} cache, on {}",
        asked.model.name,
        stream.width,
        stream.height,
        if stream.recompute { "recompute" } else { "resident" },
        place(asked)
    );
    let mut page = EstimatePage {
        tessera: env!("CARGO_PKG_VERSION").to_string(),
        title,
        considered: outcome.considered,
        command: asked.command.clone(),
        ..EstimatePage::default()
    };
    page.refused = outcome
        .refused
        .iter()
        .map(|(code, r)| {
            let title = r.says.code.title;
            (format!("{title} ({code})"), r.count, format!("{}: {}", r.example, r.says.message))
        })
        .collect();
    page.sources = vec![format!(
        "Estimated from the programs that would be sealed, op by op, under the executor profile {} at {}; one call of each mapping was played by discrete events.",
        machine.profile.name,
        match asked.dtype {
            DtypePolicy::F32 => machine.profile.habits.precision.name(),
            own => own.name(),
        }
    )];
    if !machine.cluster.measured {
        page.sources.push(format!(
            "{}: every figure is published or assumed, none was measured by this project.",
            machine.cluster.title
        ));
    }
    if q.studio == Studio::NONE {
        page.sources.push(
            "The model names no decoder, so the estimate ends with latents; --decode-ms says what decoding a chunk takes."
                .to_string(),
        );
    }
    let mut sheet = Sheet {
        page,
        json: numbers(asked, outcome),
        timeline: Timeline::default(),
        env: hints(Needs { exchanges: true, deterministic: true }),
        ranks: None,
        module: None,
    };
    match chosen(outcome) {
        // Bars have names only where somebody looks at them.
        Some(best) => {
            let named = video::estimate(q, &best.mapping, best.decode);
            fill(&mut sheet, asked, outcome, named.as_ref().unwrap_or(best));
        }
        None => {
            sheet.page.standing = Standing::Refused;
            sheet.page.says =
                format!("none of {} mappings fits; each is counted under its reason", outcome.considered);
        }
    }
    sheet
}

fn fill(sheet: &mut Sheet, asked: &VideoAsked<'_>, outcome: &Outcome, best: &Ranked) {
    let (machine, stream) = (&asked.machine, &asked.model.video.stream);
    let page = &mut sheet.page;
    if let Some(first) = outcome.best.first().filter(|f| f.fps > best.fps) {
        page.advice.push(not_yet(first, best));
    }
    page.says = format!(
        "{}: {:.1} frames per second; {} of {} mappings fit",
        mapping(best),
        best.fps,
        outcome.legal,
        outcome.considered
    );
    let number = |value: String, unit: &str, label: String| Number { value, unit: unit.to_string(), label };
    let split = |ns: f64| {
        let s = ns_text(ns);
        let (value, unit) = s.split_once(' ').unwrap_or((&s, ""));
        (value.to_string(), unit.to_string())
    };
    let error = machine.profile.error;
    let (period, unit) = split(best.period.ns);
    let (latency, latency_unit) = split(best.latency_ns);
    page.numbers = vec![
        number(
            format!("{:.1}", best.fps),
            "frames/s",
            format!("± {:.0} %, {:.1}× real time", error * 100.0, best.fps / stream.fps),
        ),
        number(period, &unit, "from one chunk to the next".to_string()),
        number(latency, &latency_unit, "from a chunk's last input to its last pixel".to_string()),
        number(
            format!("{:.1}", held_bytes(asked, best) / 1e9),
            "GB",
            format!("on the fullest rank, of {:.0}", machine.cluster.device.memory_bytes.value / 1e9),
        ),
    ];
    let blocks: Vec<String> = best.mapping.blocks.iter().map(u64::to_string).collect();
    page.facts = vec![
        ("mesh".to_string(), best.mapping.mesh.to_string()),
        ("strategy".to_string(), best.mapping.cut()),
        ("dtype".to_string(), best.mapping.dtype.name().to_string()),
        ("topology".to_string(), best.mapping.topology.name().to_string()),
        ("decode".to_string(), decode(best.decode)),
        ("blocks".to_string(), format!("{} on each stage in turn", blocks.join(", "))),
        ("calls ahead".to_string(), best.mapping.max_outstanding.to_string()),
        (
            "overlap ratio".to_string(),
            format!("{:.2} of collective time is hidden", best.call.overlap.ratio()),
        ),
        ("sends".to_string(), sent(best)),
        ("computing at once".to_string(), format!("{:.1} ranks on the mean", best.computing)),
    ];
    page.parts = parts(best);
    page.parts_note = format!(
        "One call, {}, on the busiest rank: what each kind of op takes, then what the call waits for besides.",
        best.call.call
    );
    let m = &best.memory;
    page.memory = vec![MemoryRow {
        role: Tier::Hbm.name().to_string(),
        ranks: "the fullest of the mesh".to_string(),
        items: vec![
            ("weights".to_string(), m.weights.0),
            ("caches".to_string(), m.buffers.0),
            ("inputs".to_string(), m.inputs.0),
            ("temporaries".to_string(), m.temporaries.0),
            ("executor".to_string(), machine.reserved_bytes() as u64),
        ],
        capacity: Some(machine.cluster.device.memory_bytes.value as u64),
    }];
    page.columns = ["mapping", "frames/s", "period", "latency", "calls ahead", "devices", "memory"]
        .map(String::from)
        .to_vec();
    page.mappings = outcome
        .best
        .iter()
        .take(SHOWN)
        .map(|r| {
            vec![
                mapping(r),
                format!("{:.1}", r.fps),
                ns_text(r.period.ns),
                ns_text(r.latency_ns),
                r.mapping.max_outstanding.to_string(),
                r.devices.to_string(),
                format!("{:.1} GB", held_bytes(asked, r) / 1e9),
            ]
        })
        .collect();
    page.mapping = best.mapping.text();
    sheet.ranks = ranks::of_mesh(&machine.cluster, &best.mapping.mesh);
    sheet.timeline = timeline_of(&best.call.expand(), |b| b.lane.clone());
    sheet.page.timelines.extend(drawing(best));
}

/// What a way of decoding would give that no stream runs yet.
fn not_yet(first: &Ranked, best: &Ranked) -> Advice {
    let dedicated = |r: &Ranked| r.decode.outside() > 0;
    let default = match (dedicated(best), dedicated(first)) {
        (true, false) => {
            " A rank that only decodes is the wrong default here: it idles while the others generate."
        }
        _ => "",
    };
    let row = |r: &Ranked, runs: &str| {
        vec![
            mapping(r),
            format!("{:.1}", r.fps),
            ns_text(r.period.ns),
            r.devices.to_string(),
            runs.to_string(),
        ]
    };
    Advice {
        id: "decoder",
        title: "Who decodes".to_string(),
        note: format!(
            "{}: with it {} would give {:.1} frames per second, not {:.1}.{default} A stream does not run that yet; \
--whole-decode plans without.",
            decode(first.decode),
            mapping(first),
            first.fps,
            best.fps
        ),
        columns: ["mapping", "frames/s", "period", "devices", "runs today"].map(String::from).to_vec(),
        rows: vec![row(first, "no"), row(best, "yes")],
    }
}

/// Two blocks of one denoising step, on a rank of each role.
fn drawing(best: &Ranked) -> Option<Drawing> {
    let players: Vec<u32> = best.call.players.iter().take(DRAWN).map(|p| p.rank.0).collect();
    let step = best.call.phases.iter().find(|p| p.name.starts_with("denoise"))?;
    let within =
        |b: &&Bar| players.contains(&b.rank) && b.start_ns >= step.start_ns && b.end_ns <= step.end_ns;
    let bars: Vec<&Bar> = best.call.bars.iter().filter(within).collect();
    let of = |block: usize| {
        let key = format!("blocks.{block}.");
        bars.iter().filter(move |b| b.name.contains(&key))
    };
    let blocks: Vec<usize> = (0..).take_while(|i| of(*i).next().is_some()).take(3).collect();
    let (first, last) = (*blocks.get(1).or(blocks.first())?, *blocks.last()?);
    let from = of(first).map(|b| b.start_ns).fold(f64::INFINITY, f64::min);
    let to = of(last).map(|b| b.end_ns).fold(0.0, f64::max);
    let shown: Vec<Bar> =
        bars.iter().filter(|b| b.end_ns > from && b.start_ns < to).map(|b| classed(b)).collect();
    Some(Drawing {
        title: format!("Blocks {first} to {last} of {}", step.name),
        note: format!(
            "A rank of each role ({} of {}); the whole call on every rank is in timeline.json.",
            players.len(),
            best.call.players.iter().map(|p| p.stands_for.len()).sum::<usize>()
        ),
        timeline: timeline_of(&shown, |b| b.lane.clone()),
    })
}

/// The bar under a name whose part before the point says what class it is of, which gives it its colour.
fn classed(b: &Bar) -> Bar {
    let (op, what) = b.name.split_once(' ').unwrap_or((&b.name, ""));
    let class = match (b.kind, op) {
        (Kind::Collective, _) => op,
        (Kind::Pack, _) => "pack",
        (_, "matmul") => "product",
        (_, "attention") => "attention",
        _ => "pass",
    };
    // The block's number says nothing inside a block.
    let what = what.strip_prefix("blocks.").and_then(|w| w.split_once('.')).map_or(what, |(_, w)| w);
    let rest = if class == "pass" { format!("{op} {what}") } else { what.to_string() };
    let rest = rest.trim();
    Bar { name: if rest.is_empty() { class.to_string() } else { format!("{class}.{rest}") }, ..b.clone() }
}

/// What a mapping costs against another, by what the busiest rank does, dearest first.
fn against(this: &Ranked, best: &Ranked) -> String {
    let (here, there) = (parts(this), parts(best));
    let mut terms: Vec<(String, f64, f64)> = here
        .into_iter()
        .map(|(name, ns)| {
            let other = there.iter().find(|(n, _)| *n == name).map_or(0.0, |(_, ns)| *ns);
            (name, ns, other)
        })
        .filter(|(_, a, b)| (a - b).abs() > best.call.ns * WORTH_TELLING)
        .collect();
    if terms.is_empty() {
        return String::new();
    }
    terms.sort_by(|a, b| (b.1 - b.2).total_cmp(&(a.1 - a.2)));
    let mut out = String::from("what a call costs against the best\n");
    for (name, here, there) in terms {
        let sign = if here >= there { "+" } else { "-" };
        out += &format!(
            "  {name:<24} {sign}{} ({} here, {} there)\n",
            ns_text((here - there).abs()),
            ns_text(here),
            ns_text(there)
        );
    }
    out
}

/// Device time of the busiest rank by what it does, and what is left of the call.
fn parts(best: &Ranked) -> Vec<(String, f64)> {
    let name = |d: &Doing| match d {
        Doing::Product => "products",
        Doing::Attention => "attention",
        Doing::Pass => "passes over memory",
        Doing::Exchange => "packing for exchanges",
        Doing::Taking => "unpacking",
        Doing::Nothing => "",
    };
    let mut out: Vec<(String, f64)> = Vec::new();
    for (doing, ns) in best.call.work_ns.iter().filter(|(d, _)| **d != Doing::Nothing) {
        out.push((name(doing).to_string(), *ns));
    }
    let busy: f64 = out.iter().map(|(_, ns)| ns).sum();
    let exposed = best.call.exposed_ns().min((best.call.ns - busy).max(0.0));
    out.push(("collectives in the open".to_string(), exposed));
    out.push(("other waits".to_string(), (best.call.ns - busy - exposed).max(0.0)));
    out
}

fn numbers(asked: &VideoAsked<'_>, outcome: &Outcome) -> serde_json::Value {
    let ranked = |r: &Ranked| {
        json!({
            "mesh": r.mapping.mesh.to_string(),
            "strategy": r.mapping.strategy.name(),
            "pieces": r.mapping.pieces,
            "dtype": r.mapping.dtype.name(),
            "topology": r.mapping.topology.name(),
            "decode": r.decode.name(),
            "devices": r.devices,
            "fps": r.fps,
            "period_ns": r.period.ns,
            "latency_ns": r.latency_ns,
            "call_ns": r.call.ns,
            "collective_ns": r.call.collective_ns,
            "overlap_ratio": r.call.overlap.ratio(),
            "bytes": held_bytes(asked, r) as u64,
            "phases": r.call.phases.iter().map(|p| json!({"name": p.name, "start_ns": p.start_ns, "end_ns": p.end_ns})).collect::<Vec<_>>(),
        })
    };
    json!({
        "model": asked.model.name,
        "from": "lowered programs",
        "asked": {"machine": crate::doctor::machine_json(&asked.machine)},
        "cluster": asked.machine.cluster.name,
        "profile": asked.machine.profile.name,
        "considered": outcome.considered,
        "legal": outcome.legal,
        "best": outcome.best.iter().map(ranked).collect::<Vec<_>>(),
        "rejected": outcome.refused.iter().map(|(code, r)| json!({"code": code, "count": r.count, "example": r.example, "says": r.says.message})).collect::<Vec<_>>(),
    })
}

fn place(asked: &VideoAsked<'_>) -> String {
    let devices = asked.devices.unwrap_or(asked.machine.cluster.devices());
    format!("{devices} devices of {}", asked.machine.cluster.title)
}

fn mapping(r: &Ranked) -> String {
    format!("{} {} {} {}", r.mapping.mesh, r.mapping.cut(), r.mapping.topology.name(), r.decode)
}

/// Bytes on the fullest rank, the executor's own among them.
fn held_bytes(asked: &VideoAsked<'_>, r: &Ranked) -> f64 {
    r.memory.total().0 as f64 + asked.machine.reserved_bytes()
}

fn short(asked: &VideoAsked<'_>, r: &Ranked) -> String {
    format!(
        "{}: {:.1} frames/s, a chunk every {}, latency {}, {} devices, {:.1} GB",
        mapping(r),
        r.fps,
        ns_text(r.period.ns),
        ns_text(r.latency_ns),
        r.devices,
        held_bytes(asked, r) / 1e9
    )
}

fn words(p: &Pins) -> String {
    let mut out = Vec::new();
    out.extend(p.tp.map(|n| format!("tp={n}")));
    out.extend(p.pp.map(|n| format!("pp={n}")));
    out.extend(p.strategy.map(|s| s.name().to_string()));
    out.extend(p.pieces.map(|n| format!("pieces={n}")));
    out.extend(p.topology.map(|t| t.name().to_string()));
    out.extend(p.decode.map(|d| d.name().to_string()));
    out.join(",")
}

fn decode(d: Decode) -> String {
    let says = match d {
        Decode::OnMesh => "rank 0 of the mesh, while the mesh waits",
        Decode::AllHands => "all ranks share it, between two calls",
        Decode::Serial => "a rank of its own, the whole chunk before the next begins",
        Decode::AnchorFirst => "a rank of its own; the next chunk begins after the first latent",
        Decode::AnchorShared => "a rank of its own; the mesh shares the first latent",
        Decode::Beside => "a rank of its own, beside the next chunk",
    };
    format!("{d}: {says}")
}

fn sent(r: &Ranked) -> String {
    let names = tessera_mesh::LinkClass::ALL.map(tessera_mesh::LinkClass::name);
    let list: Vec<String> = names
        .into_iter()
        .zip(r.call.sent)
        .filter(|(_, bytes)| *bytes > 0.0)
        .map(|(name, bytes)| format!("{} over {name} links", Bytes(bytes as u64)))
        .collect();
    if list.is_empty() {
        "nothing".to_string()
    } else {
        format!("{} by all ranks in a call", list.join(", "))
    }
}

/// What a pin cannot be for a video model, by its key.
///
/// # Errors
/// T1200 where a key is not one of a video model's.
pub fn pins(text: &str) -> Result<Pins, Diagnostics> {
    let (mut out, mut ds) = (Pins::default(), Vec::new());
    for item in text.split([',', ' ']).map(str::trim).filter(|s| !s.is_empty()) {
        let (key, value) = item.split_once('=').unwrap_or((item, ""));
        let count = value.parse::<u32>().ok().filter(|n| *n > 0);
        let fine = match key {
            "tp" => {
                out.tp = count;
                count.is_some()
            }
            "pp" => {
                out.pp = count;
                count.is_some()
            }
            "ep" | "dp" => count == Some(1),
            "pieces" => {
                out.pieces = count;
                count.is_some()
            }
            "max_outstanding" => {
                out.outstanding = count;
                count.is_some()
            }
            "strategy" => {
                out.strategy = [crate::Strategy::Ulysses, crate::Strategy::Megatron]
                    .into_iter()
                    .find(|s| s.name() == value);
                out.strategy.is_some()
            }
            "topology" => {
                out.topology = crate::Topology::ALL.into_iter().find(|t| t.name() == value);
                out.topology.is_some()
            }
            "decode" => {
                out.decode = Decode::ALL.into_iter().find(|d| d.name() == value);
                out.decode.is_some()
            }
            _ => false,
        };
        if !fine {
            ds.push(
                Diagnostic::error(&tessera_plan::search::T1200, format!("`{item}` cannot be pinned for a video model"))
                    .at(format!("pin {item}"), "not understood")
                    .hint("tp, pp and pieces are counts; strategy is ulysses or megatron; topology mesh, pp0 or pp1; decode on_mesh, all_hands, serial, anchor_first, anchor_shared or beside; ep and dp are 1"),
            );
        }
    }
    if ds.is_empty() { Ok(out) } else { Err(ds) }
}
