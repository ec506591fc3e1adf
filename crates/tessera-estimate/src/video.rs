//! Planning of video models: simulates one call of every mapping with a discrete-event simulator.

mod labels;
mod pins;
mod pixels;

pub use pins::parse_video_pins;
pub use pixels::{MediaDecision, choose_media, usual_machine};

use serde_json::json;
use tessera_base::Diagnostics;
use tessera_cost::MachineModel;
use tessera_cost::intervals::Interval;
use tessera_cost::program_cost::ProgramEstimate;
use tessera_mesh::{MemoryTier, Precision};
use tessera_plan::search::{Objective, error_bar};
use tessera_plan::video::{
    self, DecodePlacement, MappingQuery, MediaCosts, PixelModel, RankedMapping, VideoPins, VideoSearchResult,
};
use tessera_plan::{DtypePolicy, LogicalModel, Mapping, MediaPlacement};
use tessera_report::html::{
    AdviceTable, EstimatePage, EstimateVerdict, HeadlineNumber, RoleMemoryRow, TimelineChart,
};
use tessera_report::timeline::Timeline;

use tessera::Model;
use tessera::plan::logical_model;

use crate::format::format_ns;
use crate::library_env::{LibraryRequirements, render_env};
use crate::query_json::machine_to_json;
use crate::rank_table;
use crate::report::{EstimateReport, intervals_to_timeline};
use labels::{
    compare_parts, decode_label, devices_label, mapping_label, pins_label, rank_memory_bytes, sent_label,
    summary_line, time_parts, with_class_prefix,
};
use pixels::{estimate_program_costs, pixels_in_calls};

/// Time of one message between leader and workers in nanoseconds: a lockstep message between
/// processes of one host, measured on two cores.
const MESSAGE_NS: f64 = 150_000.0;
/// Default parallel efficiency of a decoder that ranks share. The loss is the uneven split of rows
/// and their halos.
const SHARED_DECODE_EFFICIENCY: f64 = 0.85;
/// Maximum number of mappings in the table.
const MAX_MAPPINGS: usize = 16;
/// Maximum number of ranks drawn on the page.
const MAX_RANKS_DRAWN: usize = 8;

/// A planning query for a video model. The search chooses what `pins` leaves free, but not the
/// dtype.
#[derive(Debug, Clone)]
pub struct VideoQuery<'a> {
    /// The model to plan for; the search reads its configs and no weights.
    pub model: &'a Model,
    /// The cluster and the executor profile.
    pub machine: MachineModel,
    /// Number of devices that may be used.
    pub devices: Option<u32>,
    /// What the search optimises; `None` means throughput.
    pub objective: Option<Objective>,
    /// Compute dtype of every mapping; the search does not choose it. `None` means the precision
    /// for which the executor is planned.
    pub dtype: Option<DtypePolicy>,
    /// Decisions that the search must keep.
    pub pins: VideoPins,
    /// Nanoseconds to decode a chunk on one device, for a model without a decoder of its own.
    pub decode_ns: Option<f64>,
    /// Nanoseconds to encode the anchor, for a model without an encoder of its own.
    pub encode_ns: Option<f64>,
    /// Whether one rank decodes and encodes whole chunks; otherwise ranks may share them.
    pub whole_decode: bool,
    /// Command line to show on the page.
    pub command: String,
}

impl VideoQuery<'_> {
    /// Returns the dtype of every estimate and of the mapping that is sealed.
    fn sealed_dtype(&self) -> DtypePolicy {
        self.dtype.unwrap_or(match self.machine.profile.executor.precision {
            Precision::F32 => DtypePolicy::F32,
            Precision::Bf16 => DtypePolicy::Bf16,
            Precision::Fp8 | Precision::Fp4 => DtypePolicy::Fp8,
        })
    }
}

/// Searches the mappings of a model. The returned mapping, if any fits, is the one that `tessera
/// stream` runs. Phases of pixels that are programs of the plan have their place in the mapping. Another
/// decoder has none, and a stream does not support that several ranks share it; the report names such a
/// result. `on_progress` receives the number of evaluated meshes and their total.
///
/// # Errors
/// Why the phases of pixels cannot be estimated. The report contains the reasons for mappings that do not
/// fit.
pub fn search_video(
    query: &VideoQuery<'_>,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<(EstimateReport, Option<Mapping>), Diagnostics> {
    let models = QueryModels::new(query);
    let q = models.build_question(query)?;
    let outcome = video::search_with_progress(&q, on_progress);
    let mapping = best_runnable(&q, &outcome).map(|r| r.mapping.clone().on_cluster(&query.machine.cluster));
    let mut sheet = build_report(query, &q, &outcome);
    if let Some(pinned) = best_runnable(&q, &outcome).filter(|_| q.pins.media.is_some() && q.pixels.is_some())
    {
        let free = MappingQuery { pins: VideoPins { media: None, ..q.pins }, ..q.clone() };
        let free_outcome = video::search_mappings(&free);
        let best = best_runnable(&free, &free_outcome);
        sheet
            .page
            .mapping_facts
            .extend(best.map(|best| ("other places".to_string(), compare_pinned(pinned, best))));
    }
    sheet.export_page_json();
    Ok((sheet, mapping))
}

/// Returns the best mapping that a stream can run as it was estimated. For a decoder that is no program of
/// the plan, the search also covers ranks that share it, a leader that waits for the whole chunk, and a
/// shared anchor, which streams do not support.
fn best_runnable<'a>(q: &MappingQuery<'_>, outcome: &'a VideoSearchResult) -> Option<&'a RankedMapping> {
    let runs = |r: &&RankedMapping| {
        q.pixels.is_some()
            || matches!(
                r.decode,
                DecodePlacement::OnMesh | DecodePlacement::AnchorFirst | DecodePlacement::Overlapped
            )
    };
    outcome.best.iter().find(runs)
}

/// Says what a place of the phases of pixels that the user chose costs against the best one.
fn compare_pinned(pinned: &RankedMapping, best: &RankedMapping) -> String {
    let (place, ns) = (pinned.mapping.media.name(), pinned.period.ns - best.period.ns);
    if ns <= 0.0 {
        return format!("none is faster than {place}");
    }
    format!("{} would save {} per chunk against {place}", mapping_label(best), format_ns(ns))
}

/// The logical models of a query.
struct QueryModels {
    beside: LogicalModel,
    /// With the phases of pixels in the calls.
    in_calls: Option<LogicalModel>,
    call: String,
}

impl QueryModels {
    fn new(query: &VideoQuery<'_>) -> QueryModels {
        let beside = logical_model(&query.model.video, MediaPlacement::Leader);
        // A given time takes the place of the model's own decoder.
        let in_calls = pixels_in_calls(query.model).filter(|_| query.decode_ns.is_none());
        QueryModels { call: steady_call(&beside), beside, in_calls }
    }

    fn build_question<'a>(&'a self, query: &'a VideoQuery<'_>) -> Result<MappingQuery<'a>, Diagnostics> {
        let Some(logical) = &self.in_calls else {
            let media = media_costs(query, &self.beside);
            return Ok(build_question(query, &self.beside, &self.call, media));
        };
        let pixels = PixelModel { logical, call: &self.call };
        let media = estimate_program_costs(query, &self.beside, pixels)?;
        let question = build_question(query, &self.beside, &self.call, media);
        Ok(MappingQuery { pixels: Some(pixels), ..question })
    }
}

/// Explains one mapping and its distance from the best one. `on_progress` receives the number of
/// evaluated meshes and their total.
///
/// # Errors
/// Why the phases of pixels cannot be estimated. The text contains the reasons for a mapping that does not
/// fit.
pub fn explain_video(
    query: &VideoQuery<'_>,
    pins: &VideoPins,
    on_progress: &mut dyn FnMut(usize, usize),
) -> Result<(bool, String), Diagnostics> {
    let models = QueryModels::new(query);
    // The mapping is compared with all others, whatever else is pinned.
    let all_mappings = MappingQuery { pins: VideoPins::default(), ..models.build_question(query)? };
    let mut one = all_mappings.clone();
    one.pins = *pins;
    // The mapping of the query is evaluated however few devices it uses.
    one.min_devices = 1;
    let (found, all) =
        (video::search_mappings(&one), video::search_with_progress(&all_mappings, on_progress));
    let mut out = format!("{} on {}\n", pins_label(pins), devices_label(query));
    match (found.best.first(), all.best.first()) {
        (Some(this), Some(best)) => {
            out += &format!(
                "legal\n  this  {}\n  best  {}\n{}",
                summary_line(query, this),
                summary_line(query, best),
                compare_parts(this, best)
            );
            Ok((true, out))
        }
        (Some(this), None) => Ok((true, out + &format!("legal\n  this  {}\n", summary_line(query, this)))),
        (None, _) if found.considered == 0 => {
            let max_devices = query.devices.unwrap_or(query.machine.cluster.device_count());
            Ok((
                false,
                out + &format!("refused: no mapping with these pins uses {max_devices} devices or fewer\n"),
            ))
        }
        (None, best) => {
            out +=
                &format!("refused: none of the {} mappings that match these pins fits\n", found.considered);
            for (code, r) in &found.rejected {
                out += &format!(
                    "  {code}: {} mappings, for example {}\n    {}\n",
                    r.count, r.example, r.diagnostic.message
                );
                if let Some(hint) = &r.diagnostic.hint {
                    out += &format!("    {hint}\n");
                }
            }
            if let Some(best) = best {
                out += &format!("  best  {}\n", summary_line(query, best));
            }
            Ok((false, out))
        }
    }
}

/// Searches under other pins, and passes the question and its outcome to `then`.
///
/// # Errors
/// Why the phases of pixels cannot be estimated.
pub fn search_with_pins<R>(
    query: &VideoQuery<'_>,
    pins: &VideoPins,
    then: impl FnOnce(&MappingQuery<'_>, VideoSearchResult) -> R,
) -> Result<R, Diagnostics> {
    let models = QueryModels::new(query);
    let mut q = models.build_question(query)?;
    q.pins = *pins;
    let outcome = video::search_mappings(&q);
    Ok(then(&q, outcome))
}

fn build_question<'a>(
    query: &'a VideoQuery<'_>,
    logical: &'a LogicalModel,
    call: &'a str,
    media: MediaCosts,
) -> MappingQuery<'a> {
    let devices = query.devices.unwrap_or(query.machine.cluster.device_count());
    MappingQuery {
        logical,
        call,
        frames: query.model.video.stream.frames_per_chunk(),
        machine: &query.machine,
        devices,
        min_devices: 1,
        objective: query.objective.unwrap_or(Objective::Throughput),
        media,
        pixels: None,
        message_ns: MESSAGE_NS,
        dtype: query.sealed_dtype(),
        pins: query.pins,
        // Keeps enough mappings that one of them can run today.
        max_results: 64,
    }
}

/// Returns the name of the steady-state call: a chunk in the middle of a scene, with a full window
/// and without a new prompt.
fn steady_call(l: &LogicalModel) -> String {
    let plain = |name: &&(String, Vec<String>)| !name.0.contains(".text") && !name.0.contains(".rebase");
    l.calls.iter().rev().find(plain).or(l.calls.last()).map_or(String::new(), |c| c.0.clone())
}

/// Returns the cost of decode and encode: from the model's own programs, or from the times that the
/// query gives.
fn media_costs(query: &VideoQuery<'_>, l: &LogicalModel) -> MediaCosts {
    let stream = &query.model.video.stream;
    let priced = |name: &str| {
        l.phases.iter().find(|p| p.name == name).map(|p| {
            // A single program runs at full clock rate: it is too short to heat the device.
            ProgramEstimate::new(&query.machine, p, 1.0).standalone_ns()
        })
    };
    // The decode program processes one latent.
    let chunk_ns = |ns: f64| ns * stream.chunk_frames as f64;
    let decode_ns = query.decode_ns.or_else(|| priced("decode").map(chunk_ns));
    let encode_ns = query.encode_ns.or_else(|| priced("encode")).unwrap_or(0.0);
    let shared = (!query.whole_decode).then_some(SHARED_DECODE_EFFICIENCY);
    match decode_ns {
        Some(ns) => MediaCosts::from_chunk(stream.chunk_frames, ns, encode_ns, stream.recompute, shared),
        None => MediaCosts::NONE,
    }
}

fn build_report(query: &VideoQuery<'_>, q: &MappingQuery<'_>, outcome: &VideoSearchResult) -> EstimateReport {
    let stream = &query.model.video.stream;
    let machine = &query.machine;
    let title = format!(
        "{} at {}x{}, {} cache, on {}",
        query.model.name,
        stream.width,
        stream.height,
        if stream.recompute { "recompute" } else { "resident" },
        devices_label(query)
    );
    let mut page = EstimatePage {
        tessera: env!("CARGO_PKG_VERSION").to_string(),
        title,
        considered_count: outcome.considered,
        command: query.command.clone(),
        ..EstimatePage::default()
    };
    page.rejections = outcome
        .rejected
        .iter()
        .map(|(code, r)| {
            let title = r.diagnostic.code.title;
            (format!("{title} ({code})"), r.count, format!("{}: {}", r.example, r.diagnostic.message))
        })
        .collect();
    page.accuracy_notes = vec![format!(
        "Estimated from the programs that would be sealed, op by op, under the executor profile {} at {}; one call of each mapping was simulated.",
        machine.profile.name,
        query.sealed_dtype().name()
    )];
    if !machine.cluster.measured {
        page.accuracy_notes.push(format!(
            "{}: every figure is published or assumed, none was measured by this project.",
            machine.cluster.title
        ));
    }
    if q.media == MediaCosts::NONE {
        page.accuracy_notes.push(
            "The model has no decoder, so the estimate ends with latents; set the decode time of a chunk with --decode-ms."
                .to_string(),
        );
    }
    let mut sheet = EstimateReport {
        page,
        json: outcome_to_json(query, outcome),
        timeline: Timeline::default(),
        env_script: render_env(LibraryRequirements { uses_all_to_all: true, deterministic: true }),
        rank_table: None,
        attention_program: None,
    };
    match best_runnable(q, outcome) {
        // Intervals have names only if the caller requests them.
        Some(best) => {
            let named = video::estimate_mapping(q, &best.mapping, best.decode);
            fill_report(&mut sheet, query, outcome, named.as_ref().unwrap_or(best));
            let places = video::compare_places(q, &best.mapping).ok().and_then(MediaDecision::new);
            sheet
                .page
                .mapping_facts
                .extend(places.map(|d| ("pixels".to_string(), d.explain(best.mapping.media))));
        }
        None => {
            sheet.page.verdict = EstimateVerdict::Rejected;
            sheet.page.recommendation =
                format!("none of the {} mappings fits; the table counts them by reason", outcome.considered);
        }
    }
    sheet
}

fn fill_report(
    sheet: &mut EstimateReport,
    query: &VideoQuery<'_>,
    outcome: &VideoSearchResult,
    best: &RankedMapping,
) {
    let machine = &query.machine;
    let page = &mut sheet.page;
    if let Some(first) = outcome.best.first().filter(|f| f.fps > best.fps) {
        page.advice.push(decoder_advice(first, best));
    }
    page.recommendation = format!(
        "{}: {:.1} frames per second; {} of {} mappings fit",
        mapping_label(best),
        best.fps,
        outcome.legal,
        outcome.considered
    );
    page.headline_numbers = headline_numbers(query, best);
    page.mapping_facts = mapping_facts(best);
    page.step_parts = time_parts(best);
    page.step_parts_note = format!(
        "One call, {}, on the busiest rank: the time of each kind of op, then the remaining waits of the call.",
        best.call.call
    );
    let m = &best.memory;
    page.memory = vec![RoleMemoryRow {
        role: MemoryTier::Hbm.name().to_string(),
        ranks: "the fullest of the mesh".to_string(),
        bytes_by_use: vec![
            ("weights".to_string(), m.weights.0),
            ("caches".to_string(), m.buffers.0),
            ("inputs".to_string(), m.inputs.0),
            ("temporaries".to_string(), m.temporaries.0),
            ("executor".to_string(), machine.reserved_bytes() as u64),
        ],
        capacity: Some(machine.cluster.device.memory_bytes.value as u64),
    }];
    page.mapping_columns =
        ["mapping", "frames/s", "period", "latency", "calls in flight", "devices", "memory"]
            .map(String::from)
            .to_vec();
    page.mappings = outcome
        .best
        .iter()
        .take(MAX_MAPPINGS)
        .map(|r| {
            vec![
                mapping_label(r),
                format!("{:.1}", r.fps),
                format_ns(r.period.ns),
                format_ns(r.latency_ns),
                r.mapping.max_outstanding.to_string(),
                r.devices.to_string(),
                format!("{:.1} GB", rank_memory_bytes(query, r) / 1e9),
            ]
        })
        .collect();
    page.mapping = best.mapping.clone().on_cluster(&machine.cluster).to_toml();
    let world = best.mapping.world_mesh().ok();
    sheet.rank_table = world.and_then(|world| rank_table::mesh_table(&machine.cluster, &world));
    sheet.timeline = intervals_to_timeline(&best.call.intervals_of_all_ranks(), |b| b.track.clone());
    sheet.page.timelines.extend(block_drawing(best));
    sheet.page.accuracy_notes.extend(stream_error_bar(query, best).1);
}

/// Returns the error bar of a stream's estimate and the reasons why it is wider than the profile's.
fn stream_error_bar(query: &VideoQuery<'_>, best: &RankedMapping) -> (f64, Vec<String>) {
    let cluster = &query.machine.cluster;
    // The streams that validate a profile ran on one machine and say nothing about others.
    let job = if cluster.measured { "stream" } else { "streams of other machines" };
    error_bar(&query.machine, job, best.devices > cluster.domain_size)
}

fn headline_numbers(query: &VideoQuery<'_>, best: &RankedMapping) -> Vec<HeadlineNumber> {
    let (machine, stream) = (&query.machine, &query.model.video.stream);
    let number =
        |value: String, unit: &str, label: String| HeadlineNumber { value, unit: unit.to_string(), label };
    let split = |ns: f64| {
        let s = format_ns(ns);
        let (value, unit) = s.split_once(' ').unwrap_or((&s, ""));
        (value.to_string(), unit.to_string())
    };
    let (error, _) = stream_error_bar(query, best);
    let (period, unit) = split(best.period.ns);
    let (latency, latency_unit) = split(best.latency_ns);
    vec![
        number(
            format!("{:.1}", best.fps),
            "frames/s",
            format!("± {:.0} %, {:.1}× real time", error * 100.0, best.fps / stream.fps),
        ),
        number(period, &unit, "per chunk (period)".to_string()),
        number(latency, &latency_unit, "from a chunk's last input to its last pixel (latency)".to_string()),
        number(
            format!("{:.1}", rank_memory_bytes(query, best) / 1e9),
            "GB",
            format!("on the fullest rank, of {:.0}", machine.cluster.device.memory_bytes.value / 1e9),
        ),
    ]
}

fn mapping_facts(best: &RankedMapping) -> Vec<(String, String)> {
    let blocks: Vec<String> = best.mapping.blocks.iter().map(u64::to_string).collect();
    vec![
        ("mesh".to_string(), best.mapping.mesh.to_string()),
        ("strategy".to_string(), best.mapping.strategy_label()),
        ("dtype".to_string(), best.mapping.dtype.name().to_string()),
        ("topology".to_string(), best.mapping.topology.name().to_string()),
        ("decode".to_string(), decode_label(best.decode)),
        ("blocks".to_string(), format!("{} per stage", blocks.join(", "))),
        ("calls in flight".to_string(), best.mapping.max_outstanding.to_string()),
        (
            "overlap ratio".to_string(),
            format!("{:.2} of the collectives' time is hidden", best.call.overlap.ratio()),
        ),
        ("sends".to_string(), sent_label(best)),
        ("concurrently computing".to_string(), format!("{:.1} ranks on average", best.computing_ranks)),
    ]
}

/// Describes a decoder placement that would be faster but that no stream supports yet.
fn decoder_advice(first: &RankedMapping, best: &RankedMapping) -> AdviceTable {
    let dedicated = |r: &RankedMapping| r.decode.outside_ranks() > 0;
    let default = match (dedicated(best), dedicated(first)) {
        (true, false) => {
            " A dedicated decoder rank is the wrong choice here: it idles while the others generate."
        }
        _ => "",
    };
    let row = |r: &RankedMapping, runs: &str| {
        vec![
            mapping_label(r),
            format!("{:.1}", r.fps),
            format_ns(r.period.ns),
            r.devices.to_string(),
            runs.to_string(),
        ]
    };
    AdviceTable {
        id: "decoder",
        title: "Decoder placement".to_string(),
        note: format!(
            "{}: with this placement {} would reach {:.1} frames per second instead of {:.1}.{default} Streams do not support it yet; \
--whole-decode excludes it.",
            decode_label(first.decode),
            mapping_label(first),
            first.fps,
            best.fps
        ),
        columns: ["mapping", "frames/s", "period", "devices", "supported"].map(String::from).to_vec(),
        rows: vec![row(first, "no"), row(best, "yes")],
    }
}

/// Draws two blocks of one denoising step, on one rank of each role.
fn block_drawing(best: &RankedMapping) -> Option<TimelineChart> {
    let representatives: Vec<u32> =
        best.call.rank_classes.iter().take(MAX_RANKS_DRAWN).map(|p| p.representative.0).collect();
    let step = best.call.phases.iter().find(|p| p.name.starts_with("denoise"))?;
    let within = |b: &&Interval| {
        representatives.contains(&b.rank) && b.start_ns >= step.start_ns && b.end_ns <= step.end_ns
    };
    let bars: Vec<&Interval> = best.call.intervals.iter().filter(within).collect();
    let block_bars = |block: usize| {
        let key = format!("blocks.{block}.");
        bars.iter().filter(move |b| b.name.contains(&key))
    };
    let blocks: Vec<usize> = (0..).take_while(|i| block_bars(*i).next().is_some()).take(3).collect();
    let (first, last) = (*blocks.get(1).or(blocks.first())?, *blocks.last()?);
    let from = block_bars(first).map(|b| b.start_ns).fold(f64::INFINITY, f64::min);
    let to = block_bars(last).map(|b| b.end_ns).fold(0.0, f64::max);
    let shown: Vec<Interval> =
        bars.iter().filter(|b| b.end_ns > from && b.start_ns < to).map(|b| with_class_prefix(b)).collect();
    Some(TimelineChart {
        title: format!("Blocks {first} to {last} of {}", step.name),
        note: format!(
            "A rank of each role ({} of {}); the whole call on every rank is in timeline.json.",
            representatives.len(),
            best.call.rank_classes.iter().map(|p| p.members.len()).sum::<usize>()
        ),
        timeline: intervals_to_timeline(&shown, |b| b.track.clone()),
    })
}

fn outcome_to_json(query: &VideoQuery<'_>, outcome: &VideoSearchResult) -> serde_json::Value {
    let ranked = |r: &RankedMapping| {
        json!({
            "mesh": r.mapping.mesh.to_string(),
            "strategy": r.mapping.strategy.name(),
            "overlap_chunks": r.mapping.overlap_chunks,
            "dtype": r.mapping.dtype.name(),
            "topology": r.mapping.topology.name(),
            "decode": r.decode.name(),
            "media": r.mapping.media.name(),
            "devices": r.devices,
            "fps": r.fps,
            "period_ns": r.period.ns,
            "latency_ns": r.latency_ns,
            "call_ns": r.call.ns,
            "collective_ns": r.call.collective_ns,
            "overlap_ratio": r.call.overlap.ratio(),
            "bytes": rank_memory_bytes(query, r) as u64,
            "memory": {
                "weights_bytes": r.memory.weights.0,
                "buffers_bytes": r.memory.buffers.0,
                "inputs_bytes": r.memory.inputs.0,
                "temporaries_bytes": r.memory.temporaries.0,
                "executor_bytes": query.machine.reserved_bytes() as u64,
            },
            "phases": r.call.phases.iter().map(|p| json!({"name": p.name, "start_ns": p.start_ns, "end_ns": p.end_ns})).collect::<Vec<_>>(),
        })
    };
    json!({
        "model": query.model.name,
        "source": "lowered programs",
        "query": {"machine": machine_to_json(&query.machine)},
        "cluster": query.machine.cluster.name,
        "profile": query.machine.profile.name,
        "candidate_count": outcome.considered,
        "legal_count": outcome.legal,
        "best": outcome.best.iter().map(ranked).collect::<Vec<_>>(),
        "rejected": outcome.rejected.iter().map(|(code, r)| json!({"code": code, "count": r.count, "example": r.example, "message": r.diagnostic.message})).collect::<Vec<_>>(),
    })
}
