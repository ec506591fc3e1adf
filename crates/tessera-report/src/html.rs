//! `report.html`: a self-contained HTML report of a run.

mod clip;
mod comparison;
mod estimate;
mod experts;
mod layout;
mod pipeline;
mod plan;
#[cfg(test)]
mod tests;
mod texts;
mod time;
mod transports;

pub use estimate::{
    AdviceTable, EstimatePage, EstimateVerdict, FailureModeAdvice, MAX_MAPPINGS, PlanGate, TimelineChart,
    render_estimate,
};
pub use layout::{HeadlineNumber, render_html_page};
pub use plan::{CollectiveTotalsRow, MAX_TEXT_BYTES, PlanView, ProgramView, RoleMemoryRow};
pub use texts::{MAX_TEXTS, TextSample};

use maud::{Markup, html};
use tessera_base::Nanoseconds;

use crate::call_comparison::EstimateComparison;
use crate::expert_load::ExpertLoadRow;
use crate::markup::{format_count, format_or_dash, format_plural, format_shell_command};
use crate::record::{FailureCause, RunDevice, RunEnd, RunEvent, RunRecord, RunStatus};
use crate::stats::{self, ChunkTimeStats};
use crate::timeline::Timeline;
use layout::{
    render_command, render_document, render_facts, render_hero, render_list_section, render_note,
    render_section, render_table, render_title, render_verdict,
};

/// Maximum size of a clip that is embedded in the report; a larger clip is linked.
pub const MAX_INLINE_CLIP_BYTES: usize = 12 << 20;
/// Maximum number of frames in the contact sheet; a longer list is thinned out evenly.
pub const MAX_SHEET_FRAMES: usize = 32;
/// Maximum number of events in the list; a longer list keeps its beginning and its end.
pub const MAX_EVENTS: usize = 200;
/// Number of chunks whose timeline is drawn in detail.
pub const DETAIL_CHUNKS: usize = 4;

/// Content of the report. Everything but the record is optional.
#[derive(Debug, Clone, Copy)]
pub struct ReportPage<'a> {
    /// Record of the run: its settings, chunks, events and outcome.
    pub record: &'a RunRecord,
    /// The run's frames as an animated PNG.
    pub clip: Option<ReportClip<'a>>,
    /// Frames for the contact sheet in the order of the clip; the report shows at most
    /// [`MAX_SHEET_FRAMES`].
    pub frames: &'a [SheetFrame],
    /// Texts that the run generated; the report shows at most [`MAX_TEXTS`].
    pub texts: &'a [TextSample],
    /// Load of the experts by layer, of a run that counted it.
    pub experts: &'a [ExpertLoadRow],
    /// The estimate beside the run.
    pub comparison: Option<&'a EstimateComparison>,
    /// Mapping, programs, memory and collectives of the sealed plan that ran.
    pub plan: Option<&'a PlanView>,
    /// File name of the Perfetto trace in the same folder.
    pub trace_href: Option<&'a str>,
    /// Link from the report to the folder of the library's site, such as `../library`, if there is one.
    pub library_href: Option<&'a str>,
}

/// The run's frames as an animated PNG, inlined in the page or linked from it.
#[derive(Debug, Clone, Copy)]
pub struct ReportClip<'a> {
    /// The whole APNG file; `None` is allowed for a clip above [`MAX_INLINE_CLIP_BYTES`], which is
    /// linked.
    pub apng: Option<&'a [u8]>,
    /// Size of the APNG file in bytes; a clip of 0 bytes is left out.
    pub bytes: u64,
    /// File name of the APNG in the report's folder.
    pub href: &'a str,
}

/// One picture of the contact sheet, with the chunk and the prompt that the report prints with it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SheetFrame {
    /// The frame as a PNG file.
    pub png: Vec<u8>,
    /// Index in the stream of the chunk that contains the frame.
    pub chunk: u32,
    /// Prompt of that chunk; the sheet groups consecutive frames by their prompt.
    pub prompt: String,
}

/// Renders the report as one HTML file.
#[must_use]
pub fn render_report(page: &ReportPage<'_>) -> String {
    let record = page.record;
    let timeline = Timeline::from_record(record);
    let (times, phases) = (stats::chunk_times(&timeline), stats::phase_stats(&timeline));
    let (class, word, sentence) = run_verdict(record);
    let header = html! {
        (render_title(format_args!("Tessera run, {}", record.start.started_at), &record.start.model))
        (render_verdict(class, format_args!("{word}."), &sentence))
        @if record.start.device == RunDevice::Sim { (render_simulation_note(record)) }
        @if let Some(cause) = record.cause() { (render_cause(cause, page.library_href)) }
    };
    let body = html! {
        (render_hero(clip::render_clip(page).as_ref(), &headline_numbers(page, times.as_ref())))
        (render_list_section("Frames", page.frames, |_| clip::render_contact_sheet(page)))
        (render_list_section("Texts", page.texts, texts::render_texts))
        (experts::render_expert_load(page.experts))
        @if let Some(comparison) = page.comparison { (comparison::render_comparison(comparison)) }
        (time::render_time_section(page, &timeline, times.as_ref()))
        (render_list_section("Phases", &phases, |phases| time::render_phase_table(page, &timeline, phases)))
        // The ids of a call are part of the next one, so a language model has no stages that could overlap.
        @if record.start.generates.is_video() { (pipeline::render_pipeline_section(record)) }
        (render_settings(record))
        (transports::render_transports(record))
        @if let Some(plan) = page.plan { (plan::render_plan_section(plan)) }
        (render_list_section("Events", &shown_events(record), |events| render_events(record, events)))
        (render_reproduction(record))
    };
    let footer = html! {
        "Written by tessera " (record.start.tessera)
        " from record.jsonl. Times are on the run’s own clock, from its start."
    };
    render_document(&format!("{word}: {}", record.start.model), &header, &body, &footer)
}

/// Returns the verdict on a run for the head of the report: the CSS class (`good`, `warn` or
/// `bad`), the headline, such as `Complete`, and a sentence on what the run completed.
fn run_verdict(r: &RunRecord) -> (&'static str, &'static str, String) {
    let chunk = r.start.generates.chunk_name();
    let asked = r.start.chunks.map_or(String::new(), |n| format!(" of {}", format_count(u64::from(n))));
    let Some(end) = &r.end else {
        let last = match r.chunks.last() {
            Some(c) => format!("The record stops after {chunk} {}{}", c.chunk, asked),
            None => format!("The record stops before the first {chunk}"),
        };
        let why = "the run is still in progress, or it died before it wrote its end line";
        return ("warn", "Unfinished", format!("{last}: {why}."));
    };
    let made = output_summary(r, end);
    let kept =
        if end.output_complete { "the output contains all of them" } else { "the output is incomplete" };
    match end.status {
        RunStatus::Complete if end.output_complete => ("good", "Complete", format!("{made}.")),
        RunStatus::Complete => ("warn", "Complete, but output is missing", format!("{made}; {kept}.")),
        RunStatus::Interrupted => (
            "warn",
            "Interrupted",
            format!("Stopped after {}{asked}: {made}; {kept}.", format_plural(u64::from(end.chunks), chunk)),
        ),
        RunStatus::Failed => {
            let after = match end.chunks {
                0 => format!("No {chunk} was finished before the failure."),
                n => format!(
                    "{}{asked} finished before the failure; {kept}.",
                    format_plural(u64::from(n), chunk)
                ),
            };
            ("bad", "Failed", after)
        }
        RunStatus::Running => ("warn", "Unfinished", format!("{made} so far.")),
    }
}

fn output_summary(r: &RunRecord, end: &RunEnd) -> String {
    let kind = r.start.generates;
    let (chunks, frames) = (
        format_plural(u64::from(end.chunks), kind.chunk_name()),
        format_plural(end.frames, kind.frame_name()),
    );
    format!("{chunks}, {frames}, in {}", Nanoseconds(end.wall_ns))
}

fn render_simulation_note(r: &RunRecord) -> Markup {
    render_note(html! {
        b {
            "Simulated time" @if let Some(machine) = &r.start.machine { " of " (machine) }
            ", no numbers computed."
        }
        " The sealed plan ran through the real leader and workers; the duration of each op is an estimate, and \
         there are no frames."
    })
}

/// Renders the cause of a failure. Its code leads to the page of the code, if the library's site lies beside
/// the run.
fn render_cause(cause: &FailureCause, library_href: Option<&str>) -> Markup {
    html! {
        div.cause {
            p dir="auto" { (cause.message) }
            small {
                (cause.class)
                @if let Some(rank) = cause.rank { " · first seen at rank " (rank) }
                " · exit status " (cause.exit_code)
                @if let Some(code) = &cause.code {
                    " · "
                    @match library_href {
                        Some(library) => a href={ (library) "/codes/" (code) ".html" } { code { "tessera explain " (code) } },
                        None => code { "tessera explain " (code) },
                    }
                }
            }
        }
    }
}

fn headline_numbers(page: &ReportPage<'_>, times: Option<&ChunkTimeStats>) -> Vec<HeadlineNumber> {
    let r = page.record;
    if !r.start.generates.is_video() {
        return texts::text_numbers(r, page.texts);
    }
    let mut numbers = Vec::new();
    let mut push = |value: &str, unit: &str, label: String| {
        numbers.push(HeadlineNumber { value: value.to_string(), unit: unit.to_string(), label });
    };
    let all = r.end.as_ref().map(|e| e.fps).filter(|f| *f > 0.0);
    if let Some(steady) = times.and_then(|t| t.steady_fps) {
        let speed = steady / r.start.fps;
        let mut label = "after the first chunk".to_string();
        if speed.is_finite() {
            label += &format!(", {speed:.1}× real time");
        }
        if let Some(whole) = all {
            label += &format!("; {whole:.1} over the whole run");
        }
        push(&format!("{steady:.1}"), "frames/s", label);
    } else if let Some(whole) = all {
        push(&format!("{whole:.1}"), "frames/s", "over the whole run".to_string());
    }
    if let Some(t) = times {
        let mut push_time = |ns: u64, label: String| {
            let shown = Nanoseconds(ns).to_string();
            let (value, unit) = shown.split_once(' ').unwrap_or((&shown, ""));
            push(value, unit, label);
        };
        push_time(t.first_ns, "to the first chunk".to_string());
        push_time(t.median_ns, format!("median chunk, 95\u{a0}% within {}", format_unbroken(t.p95_ns)));
    }
    let frames = r.frame_count();
    let mut label = format!("in {}", format_plural(u64::from(r.chunk_count()), "chunk"));
    let playback = frames as f64 / r.start.fps;
    if playback.is_finite() {
        label += &format!("; {playback:.1}\u{a0}s of playback");
    }
    push(&format_count(frames), "frames", label);
    numbers
}

fn render_settings(r: &RunRecord) -> Markup {
    let s = &r.start;
    let device = match s.device {
        RunDevice::Cpu => "",
        RunDevice::Sim => "sim: simulated time",
        RunDevice::Cuda => "cuda: one GPU per rank of the mesh",
    };
    let (golden, output) = match &r.end {
        Some(end) => (end.golden.as_str(), if end.output_complete { "complete" } else { "incomplete" }),
        None => ("", ""),
    };
    let truncated = if r.truncated { "truncated: its last line was incomplete and is left out" } else { "" };
    let is_video = s.generates.is_video();
    let of_video = |text: String| if is_video { text } else { String::new() };
    let chunks = of_video(s.chunks.map_or("until stopped".to_string(), |n| format_count(u64::from(n))));
    let frames = of_video(format!("{} × {} at {} frames/s", s.width, s.height, s.fps));
    let steps = of_video(s.steps.to_string());
    let facts = [
        ("Device", device, false),
        ("Machine", s.machine.as_deref().unwrap_or_default(), false),
        ("Mesh", &s.mesh, false),
        ("Strategy", &s.strategy, false),
        ("Topology", &s.topology, false),
        ("Numerics", &s.numerics, false),
        ("Dtype", &s.dtype, false),
        ("Caches", &s.cache, false),
        ("Frames", &frames, false),
        ("Steps", &steps, false),
        ("Seed", &s.seed.to_string(), false),
        ("Requested chunks", &chunks, false),
        ("Plan", &s.plan, true),
        ("Weights", &s.weights, true),
        (if is_video { "Latents hash" } else { "Ids hash" }, golden, true),
        ("Output", output, false),
        ("Record", truncated, false),
    ];
    let known = facts.into_iter().filter(|(_, value, _)| !value.is_empty());
    render_section("Run details", &render_facts(known))
}

/// Returns the events in order of time, without the start-up reports, which `tessera record startup`
/// prints.
fn shown_events(r: &RunRecord) -> Vec<&RunEvent> {
    let mut events: Vec<_> = r.events.iter().filter(|e| !e.is_startup_report()).collect();
    events.sort_by_key(|e| e.at_ns);
    events
}

fn render_events(r: &RunRecord, events: &[&RunEvent]) -> Markup {
    let omitted = events.len().saturating_sub(MAX_EVENTS);
    let omitted_from = if omitted > 0 { MAX_EVENTS / 2 } else { events.len() };
    let rows = html! {
        @for (n, e) in events.iter().enumerate() {
            @if n == omitted_from { tr { td colspan="4" { (omitted) " more" } } }
            @if !(omitted_from..omitted_from + omitted).contains(&n) {
                @let chunk = r.chunks.iter().rev().find(|c| c.start_ns <= e.at_ns);
                tr {
                    td { (format_args!("{:.3}", e.at_ns as f64 / 1e9)) " s" }
                    td.l { (format_or_dash(chunk.map(|c| c.chunk))) }
                    td.l { (e.event) }
                    td.words dir="auto" { (e.detail) }
                }
            }
        }
    };
    let heads = html! { th { "time" } th.l { (r.start.generates.chunk_name()) } th.l { "event" } th.l {} };
    render_table(&heads, &rows)
}

fn render_reproduction(r: &RunRecord) -> Markup {
    let results = if r.start.generates.is_video() { "latents" } else { "ids" };
    let note = match r.start.device {
        RunDevice::Cpu => {
            format!("On the same device and build, the same plan, seed and prompts give the same {results}.")
        }
        RunDevice::Sim => "The same plan and simulated machine give the same times on any host.".to_string(),
        RunDevice::Cuda => format!(
            "On GPUs of the same kind with the same libraries and build, the same plan, seed and prompts give the same {results}."
        ),
    };
    let command = render_command(&format_shell_command(&r.start.command));
    render_section("Reproduce", &html! { (render_note(note)) (command) })
}

/// Formats a duration with a no-break space before its unit.
fn format_unbroken(ns: u64) -> String {
    Nanoseconds(ns).to_string().replace(' ', "\u{a0}")
}
