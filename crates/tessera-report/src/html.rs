//! `report.html`: a self-contained HTML report of a run.

mod estimate;
mod pipeline;
mod plan;

pub use estimate::{
    AdviceTable, EstimatePage, EstimateVerdict, FailureModeAdvice, GateVerdict, HeadlineNumber, MAX_MAPPINGS,
    PlanGate, TimelineChart, render_estimate,
};
pub use plan::{CollectiveTotalsRow, MAX_TEXT_BYTES, PlanView, ProgramView, RoleMemoryRow};

use crate::markup::{escape_text, format_count, format_plural, format_shell_command, png_uri};
use crate::record::{ChunkRecord, RunDevice, RunEnd, RunRecord, RunStatus};
use crate::stats::{self, ChunkTimeStats};
use crate::svg::{self, Palette};
use crate::timeline::{Timeline, phase_kind};
use std::fmt::Write;
use tessera_base::{Bytes, Nanoseconds};

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
    /// Record of the run.
    pub record: &'a RunRecord,
    /// The run's frames as an animated PNG.
    pub clip: Option<ReportClip<'a>>,
    /// Frames of the contact sheet, in order.
    pub frames: &'a [SheetFrame],
    /// Mapping, programs, memory and collectives of the sealed plan that ran.
    pub plan: Option<&'a PlanView>,
    /// Measured values and their limits.
    pub gates: &'a [ReportGate],
    /// File name of the Perfetto trace in the same folder.
    pub trace_href: Option<&'a str>,
}

/// The run's frames as an animated PNG, inlined in the page or linked from it.
#[derive(Debug, Clone, Copy)]
pub struct ReportClip<'a> {
    /// The whole APNG file; `None` is allowed for a clip above [`MAX_INLINE_CLIP_BYTES`], which is
    /// linked.
    pub apng: Option<&'a [u8]>,
    /// Size of the file in bytes.
    pub bytes: u64,
    /// File name in the same folder.
    pub href: &'a str,
}

/// One frame of the contact sheet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SheetFrame {
    /// The frame as a PNG file.
    pub png: Vec<u8>,
    /// Chunk that contains the frame.
    pub chunk: u32,
    /// Prompt of the chunk.
    pub prompt: String,
}

/// A measured value and its limit.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReportGate {
    /// Name of the measured quantity.
    pub name: String,
    /// Value with its unit.
    pub value: String,
    /// Limit, such as `≥ 0.60`.
    pub limit: String,
    /// Whether the value meets the limit.
    pub is_met: bool,
}

/// Renders the report as one HTML file.
#[must_use]
pub fn render_report(page: &ReportPage<'_>) -> String {
    let timeline = Timeline::from_record(page.record);
    let times = stats::chunk_times(&timeline);
    let (class, word, sentence) = run_verdict(page.record);
    let mut out = String::with_capacity(64 << 10);
    let _ = write!(
        out,
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width,initial-scale=1\">\n\
         <title>{word}: {} · Tessera</title>\n<style>\n{CSS}</style>\n</head>\n<body>\n<main>\n",
        escape_text(&page.record.start.model)
    );
    write_header(&mut out, page.record, class, word, &sentence);
    write_hero(&mut out, page, times.as_ref());
    write_contact_sheet(&mut out, page);
    write_time_section(&mut out, page, &timeline, times.as_ref());
    write_phase_table(&mut out, &timeline);
    pipeline::write_pipeline_section(&mut out, page.record);
    write_gates(&mut out, page.gates);
    write_settings(&mut out, page.record);
    if let Some(plan) = page.plan {
        plan::write_plan_section(&mut out, plan);
    }
    write_events(&mut out, page.record);
    write_reproduce(&mut out, page.record);
    let _ = write!(
        out,
        "<footer>Written by tessera {} from record.jsonl. Times are on the run’s own clock, from its start.</footer>\n\
         </main>\n</body>\n</html>\n",
        escape_text(&page.record.start.tessera)
    );
    out
}

const CSS: &str = include_str!("report.css");

/// A mosaic of four tiles, one of them paler.
const LOGO: &str = "<svg viewBox=\"0 0 16 16\" aria-hidden=\"true\"><path d=\"M0 0h7v7H0zM9 0h7v7H9zM0 9h7v7H0z\"/>\
<path opacity=\".4\" d=\"M9 9h7v7H9z\"/></svg>";

/// Returns a style sheet class, a headline and a sentence.
fn run_verdict(r: &RunRecord) -> (&'static str, &'static str, String) {
    let asked = r.start.chunks.map_or(String::new(), |n| format!(" of {}", format_count(u64::from(n))));
    let Some(end) = &r.end else {
        let last = match r.chunks.last() {
            Some(c) => format!("The record stops after chunk {}{}", c.chunk, asked),
            None => "The record stops before the first chunk".to_string(),
        };
        let why = "the run is still in progress, or it died before it wrote its end line";
        return ("warn", "Unfinished", format!("{last}: {why}."));
    };
    let made = output_summary(end);
    let kept =
        if end.output_complete { "the output contains all of them" } else { "the output is incomplete" };
    match end.status {
        RunStatus::Complete if end.output_complete => ("good", "Complete", format!("{made}.")),
        RunStatus::Complete => ("warn", "Complete, but output is missing", format!("{made}; {kept}.")),
        RunStatus::Interrupted => (
            "warn",
            "Interrupted",
            format!(
                "Stopped after {}{asked}: {made}; {kept}.",
                format_plural(u64::from(end.chunks), "chunk")
            ),
        ),
        RunStatus::Failed => {
            let after = match end.chunks {
                0 => "No chunk was finished before the failure.".to_string(),
                n => format!(
                    "{}{asked} finished before the failure; {kept}.",
                    format_plural(u64::from(n), "chunk")
                ),
            };
            ("bad", "Failed", after)
        }
        RunStatus::Running => ("warn", "Unfinished", format!("{made} so far.")),
    }
}

fn output_summary(end: &RunEnd) -> String {
    let (chunks, frames) =
        (format_plural(u64::from(end.chunks), "chunk"), format_plural(end.frames, "frame"));
    format!("{chunks}, {frames}, in {}", Nanoseconds(end.wall_ns))
}

fn write_header(out: &mut String, r: &RunRecord, class: &str, word: &str, sentence: &str) {
    let _ = write!(
        out,
        "<header>\n<p class=\"brow\">{LOGO}<span>Tessera run, {}</span></p>\n<h1>{}</h1>\n\
         <p class=\"verdict {class}\"><span><b class=\"{class}\">{word}.</b> {}</span></p>\n",
        escape_text(&r.start.started_at),
        escape_text(&r.start.model),
        escape_text(sentence)
    );
    if r.start.device == RunDevice::Sim {
        let machine = r.start.machine.as_deref().map_or(String::new(), |m| format!(" of {}", escape_text(m)));
        let _ = writeln!(
            out,
            "<p class=\"note\"><b>Simulated time{machine}, no numbers computed.</b> The sealed plan ran through the real \
             leader and workers; the duration of each op is an estimate, and there are no frames.</p>"
        );
    }
    if let Some(cause) = r.end.as_ref().and_then(|e| e.cause.as_ref()) {
        let mut parts = vec![escape_text(&cause.class)];
        parts.extend(cause.rank.map(|rank| format!("first seen at rank {rank}")));
        parts.push(format!("exit status {}", cause.exit_code));
        parts.extend(
            cause.code.as_ref().map(|code| format!("<code>tessera explain {}</code>", escape_text(code))),
        );
        let _ = writeln!(
            out,
            "<div class=\"cause\"><p dir=\"auto\">{}</p><small>{}</small></div>",
            escape_text(&cause.message),
            parts.join(" · ")
        );
    }
    out.push_str("</header>\n");
}

fn write_hero(out: &mut String, page: &ReportPage<'_>, times: Option<&ChunkTimeStats>) {
    let r = page.record;
    let prompt =
        r.chunks.first().map(|c| c.prompt.as_str()).or(r.start.prompts.first().map(|p| p.text.as_str()));
    let mut figure = String::new();
    if let Some(clip) = page.clip.filter(|c| c.bytes > 0) {
        let alt = escape_text(prompt.unwrap_or("the clip"));
        if let Some(apng) = clip.apng.filter(|a| a.len() <= MAX_INLINE_CLIP_BYTES) {
            // Readers who prefer reduced motion get a still image.
            let still = page.frames.first().map_or(String::new(), |f| {
                format!("<source media=\"(prefers-reduced-motion: reduce)\" srcset=\"{}\">", png_uri(&f.png))
            });
            let _ = write!(
                figure,
                "<picture>{still}<img src=\"{}\" width=\"{}\" height=\"{}\" alt=\"{alt}\"></picture>",
                png_uri(apng),
                r.start.width,
                r.start.height
            );
        } else {
            if let Some(f) = page.frames.first() {
                let _ = write!(figure, "<img src=\"{}\" alt=\"{alt}\">", png_uri(&f.png));
            }
            let size = Bytes(clip.bytes);
            let _ = write!(
                figure,
                "<figcaption>The clip is in <a href=\"{0}\">{0}</a> ({size}).</figcaption>",
                escape_text(clip.href)
            );
        }
        if let Some(prompt) = prompt.filter(|_| page.frames.is_empty()) {
            let _ = write!(figure, "<figcaption><q dir=\"auto\">{}</q></figcaption>", escape_text(prompt));
        }
    }
    let numbers = render_numbers(r, times);
    if figure.is_empty() {
        let _ = writeln!(out, "<div class=\"hero solo\"><dl class=\"numbers\">{numbers}</dl></div>");
    } else {
        let _ = writeln!(
            out,
            "<div class=\"hero\"><figure>{figure}</figure><dl class=\"numbers\">{numbers}</dl></div>"
        );
    }
}

fn render_numbers(r: &RunRecord, times: Option<&ChunkTimeStats>) -> String {
    let mut out = String::new();
    let mut number = |value: &str, unit: &str, label: &str| {
        let unit =
            if unit.is_empty() { String::new() } else { format!("<small>{}</small>", escape_text(unit)) };
        let _ =
            write!(out, "<div><dt>{}</dt><dd>{}{unit}</dd></div>", escape_text(label), escape_text(value));
    };
    let all = r.end.as_ref().map(|e| e.fps).filter(|f| *f > 0.0);
    match (times.and_then(|t| t.steady_fps), all) {
        (Some(steady), all) => {
            let speed = steady / r.start.fps;
            let real = if speed.is_finite() {
                format!("after the first chunk, {speed:.1}× real time")
            } else {
                "after the first chunk".into()
            };
            let label = all.map_or(real.clone(), |w| format!("{real}; {w:.1} over the whole run"));
            number(&format!("{steady:.1}"), "frames/s", &label);
        }
        (None, Some(all)) => number(&format!("{all:.1}"), "frames/s", "over the whole run"),
        (None, None) => {}
    }
    if let Some(t) = times {
        let mut timed = |ns: u64, label: &str| {
            let shown = Nanoseconds(ns).to_string();
            let (value, unit) = shown.split_once(' ').unwrap_or((&shown, ""));
            number(value, unit, label);
        };
        timed(t.first_ns, "to the first chunk");
        timed(t.median_ns, &format!("median chunk, 95\u{a0}% within {}", format_unbroken(t.p95_ns)));
    }
    let frames = r.frame_count();
    let chunks = format_plural(u64::from(r.chunk_count()), "chunk");
    let plays = frames as f64 / r.start.fps;
    let plays = if plays.is_finite() {
        format!("in {chunks}; {plays:.1}\u{a0}s of playback")
    } else {
        format!("in {chunks}")
    };
    number(&format_count(frames), "frames", &plays);
    out
}

fn write_contact_sheet(out: &mut String, page: &ReportPage<'_>) {
    let (shown, all) = (page.frames.len().min(MAX_SHEET_FRAMES), page.frames.len());
    if all == 0 {
        return;
    }
    out.push_str("<section>\n<h2>Frames</h2>\n");
    if shown < all {
        let _ = writeln!(out, "<p class=\"note\">{shown} of {all}, evenly spaced.</p>");
    }
    let chosen: Vec<&SheetFrame> = (0..shown).map(|i| &page.frames[i * all / shown]).collect();
    for group in chosen.chunk_by(|a, b| a.prompt == b.prompt) {
        let first = group.first().map_or(0, |f| f.chunk);
        let _ = write!(
            out,
            "<p class=\"said\"><q dir=\"auto\">{}</q> from chunk {first}</p>\n<div class=\"sheet\">",
            escape_text(&group[0].prompt)
        );
        let first_chunk = |chunk: u32| page.record.chunks.iter().find(|c| c.chunk == chunk);
        let mut previous = None;
        for f in group {
            let cut = first_chunk(f.chunk).is_some_and(|c| c.cut) && previous != Some(f.chunk);
            previous = Some(f.chunk);
            let _ = write!(
                out,
                "<figure><img src=\"{}\" alt=\"\"><figcaption>chunk {}{}</figcaption></figure>",
                png_uri(&f.png),
                f.chunk,
                if cut { ", after a cut" } else { "" }
            );
        }
        out.push_str("</div>\n");
    }
    out.push_str("</section>\n");
}

fn write_time_section(out: &mut String, page: &ReportPage<'_>, t: &Timeline, times: Option<&ChunkTimeStats>) {
    if t.chunks.is_empty() {
        return;
    }
    out.push_str("<section>\n<h2>Time</h2>\n");
    // A failed or unfinished run shows its last chunks, any other run its steady state.
    let broke = matches!(page.record.status(), RunStatus::Failed | RunStatus::Running);
    let window = if broke { t.tail_window(DETAIL_CHUNKS) } else { t.steady_window(DETAIL_CHUNKS) };
    if let (Some(w), false) = (window, t.spans.is_empty()) {
        let palette = Palette::new(t);
        let inside = |s: &&crate::timeline::TimelineSpan| s.end_ns >= w.start_ns && s.start_ns < w.end_ns;
        let trace = page.trace_href.map_or(String::new(), |href| {
            format!(" The whole run is in <a href=\"{0}\">{0}</a>, for ui.perfetto.dev.", escape_text(href))
        });
        let which = if broke { "The last chunks" } else { "A few chunks in steady state" };
        let waits = match t.spans.iter().filter(inside).any(|s| s.waits.is_some()) {
            true => {
                " A thin line is a wait. The height of a bar is the share of its time in which its stream was busy."
            }
            false => "",
        };
        let _ = writeln!(out, "<p class=\"note\">{which}, by rank and stream.{waits}{trace}</p>");
        out.push_str(
            &palette.render_legend(|kind| t.spans.iter().filter(inside).any(|s| phase_kind(&s.name) == kind)),
        );
        out.push_str(&svg::draw_lanes(t, w, &palette));
        if t.ranks.len() > svg::MAX_RANKS {
            let _ = writeln!(
                out,
                "<p class=\"note\">{} more ranks are in the trace.</p>",
                t.ranks.len() - svg::MAX_RANKS
            );
        }
    }
    if t.chunks.len() > 1 {
        let share = match svg::chunks_per_strip_bar(t.chunks.len()) {
            1 => "Each bar is a chunk".to_string(),
            n => format!("Each bar is the slowest of {n} chunks"),
        };
        let median = times.map_or(String::new(), |x| {
            format!("; the dotted line is the median, {}", format_unbroken(x.median_ns))
        });
        let strip = svg::draw_strip(t, window);
        let mut keys = Vec::new();
        if window.is_some() && !t.spans.is_empty() {
            keys.push("the shaded part is shown in detail above");
        }
        if !t.marks.is_empty() {
            keys.push("red dots are events");
        }
        if strip.contains("bar tall") {
            keys.push("an amber bar is cut off at the top");
        }
        let keys = if keys.is_empty() { String::new() } else { format!("; {}", keys.join(", ")) };
        let _ = write!(
            out,
            "<h3>Every chunk</h3>\n<p class=\"note\">{share}, from commit to last frame{median}{keys}.</p>\n"
        );
        out.push_str(&strip);
        let name = |c: Option<&crate::timeline::TimelineChunk>| c.map_or(0, |c| c.chunk);
        let _ = writeln!(
            out,
            "<p class=\"ends\"><span>chunk {}</span><span>chunk {}</span></p>",
            name(t.chunks.first()),
            name(t.chunks.last())
        );
    }
    out.push_str("</section>\n");
}

fn write_phase_table(out: &mut String, t: &Timeline) {
    let rows = stats::phase_stats(t);
    if rows.is_empty() {
        return;
    }
    let palette = Palette::new(t);
    let first =
        if t.chunks.len() > 1 { " The first chunk is left out because it includes warm-up." } else { "" };
    let known = rows.iter().any(|r| r.wait_share.is_some());
    let (waits, columns) = if known { ("<th>waiting</th>", 7) } else { ("", 6) };
    let _ = write!(
        out,
        "<section>\n<h2>Phases</h2>\n<p class=\"note\">Over all ranks; shares are relative to the time recorded on the same stream.{first}</p>\n\
         <div class=\"scroll\"><table>\n<thead><tr><th>phase</th><th>count</th><th>median</th><th>95 %</th>{waits}<th>collectives</th><th>share</th></tr></thead>\n<tbody>\n"
    );
    let mut stream = None;
    for r in &rows {
        if stream != Some(&r.stream) {
            stream = Some(&r.stream);
            let _ = writeln!(
                out,
                "<tr class=\"group\"><td colspan=\"{columns}\">{}</td></tr>",
                escape_text(&r.stream)
            );
        }
        let class = palette.colour_class(&r.kind);
        let collectives = match r.collective_range {
            (_, 0) => "–".to_string(),
            (low, high) if low == high => format_count(u64::from(low)),
            (low, high) => format!("{low}–{high}"),
        };
        let waits = match r.wait_share.filter(|_| known) {
            Some(share) => format!("<td>{:.0} %</td>", share * 100.0),
            None if known => "<td>–</td>".to_string(),
            None => String::new(),
        };
        let share = match r.stream_share * 100.0 {
            s if s > 0.0 && s < 0.5 => "&lt; 1".to_string(),
            s => format!("{s:.0}"),
        };
        let _ = writeln!(
            out,
            "<tr><td><i class=\"dot b{class}\"></i>{}</td><td>{}</td><td>{}</td><td>{}</td>{waits}<td>{collectives}</td>\
             <td>{share} %<span class=\"meter\"><i class=\"b{class}\" style=\"width:{:.1}%\"></i></span></td></tr>",
            escape_text(&r.kind),
            format_count(r.count),
            Nanoseconds(r.median_ns),
            Nanoseconds(r.p95_ns),
            r.stream_share * 100.0
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_gates(out: &mut String, gates: &[ReportGate]) {
    if gates.is_empty() {
        return;
    }
    let missed = gates.iter().filter(|g| !g.is_met).count();
    let note = match missed {
        0 => "All gates are met.".to_string(),
        n => format!("{n} of {} gates missed.", gates.len()),
    };
    let _ = write!(
        out,
        "<section>\n<h2>Gates</h2>\n<p class=\"note\">{note}</p>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th>gate</th><th>value</th><th>limit</th><th></th></tr></thead>\n<tbody>\n"
    );
    for g in gates {
        let (class, word) = if g.is_met { ("good", "met") } else { ("bad", "missed") };
        let _ = writeln!(
            out,
            "<tr><td class=\"words\">{}</td><td>{}</td><td>{}</td><td class=\"{class}\">{word}</td></tr>",
            escape_text(&g.name),
            escape_text(&g.value),
            escape_text(&g.limit)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_settings(out: &mut String, r: &RunRecord) {
    let s = &r.start;
    out.push_str("<section>\n<h2>Run details</h2>\n<dl class=\"facts\">");
    let mut fact = |name: &str, value: String, mono: bool| {
        if !value.is_empty() {
            let class = if mono { " class=\"mono\"" } else { "" };
            let _ = write!(out, "<div><dt>{name}</dt><dd{class}>{}</dd></div>", escape_text(&value));
        }
    };
    let device = match s.device {
        RunDevice::Cpu => "",
        RunDevice::Sim => "sim: simulated time",
        RunDevice::Cuda => "cuda: one GPU per rank of the mesh",
    };
    fact("Device", device.to_string(), false);
    fact("Machine", s.machine.clone().unwrap_or_default(), false);
    fact("Mesh", s.mesh.clone(), false);
    fact("Strategy", s.strategy.clone(), false);
    fact("Topology", s.topology.clone(), false);
    fact("Numerics", s.numerics.clone(), false);
    fact("Dtype", s.dtype.clone(), false);
    fact("Caches", s.cache.clone(), false);
    fact("Frames", format!("{} × {} at {} frames/s", s.width, s.height, s.fps), false);
    fact("Steps", s.steps.to_string(), false);
    fact("Seed", s.seed.to_string(), false);
    fact(
        "Requested chunks",
        s.chunks.map_or("until stopped".to_string(), |n| format_count(u64::from(n))),
        false,
    );
    fact("Plan", s.plan.clone(), true);
    if let Some(end) = &r.end {
        fact("Latents hash", end.golden.clone(), true);
        fact("Output", if end.output_complete { "complete" } else { "incomplete" }.to_string(), false);
    }
    if r.truncated {
        fact("Record", "truncated: its last line was incomplete and is left out".to_string(), false);
    }
    out.push_str("</dl>\n</section>\n");
}

fn write_events(out: &mut String, r: &RunRecord) {
    if r.events.is_empty() {
        return;
    }
    out.push_str(
        "<section>\n<h2>Events</h2>\n<div class=\"scroll\"><table>\n\
         <thead><tr><th>time</th><th class=\"l\">chunk</th><th class=\"l\">event</th><th class=\"l\"></th></tr></thead>\n<tbody>\n",
    );
    let mut order: Vec<usize> = (0..r.events.len()).collect();
    order.sort_by_key(|i| r.events[*i].at_ns);
    let total = order.len();
    for (n, e) in order.iter().map(|i| &r.events[*i]).enumerate() {
        if total > MAX_EVENTS && n == MAX_EVENTS / 2 {
            let _ = writeln!(out, "<tr><td colspan=\"4\">{} more</td></tr>", total - MAX_EVENTS);
        }
        if total > MAX_EVENTS && n >= MAX_EVENTS / 2 && n < total - MAX_EVENTS / 2 {
            continue;
        }
        let inside = |c: &&ChunkRecord| c.start_ns <= e.at_ns;
        let chunk = r.chunks.iter().rev().find(inside).map_or("–".to_string(), |c| c.chunk.to_string());
        let _ = writeln!(
            out,
            "<tr><td>{:.3} s</td><td class=\"l\">{chunk}</td><td class=\"l\">{}</td><td class=\"words\" dir=\"auto\">{}</td></tr>",
            e.at_ns as f64 / 1e9,
            escape_text(&e.event),
            escape_text(&e.detail)
        );
    }
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

fn write_reproduce(out: &mut String, r: &RunRecord) {
    let note = match r.start.device {
        RunDevice::Cpu => {
            "On the same device and build, the same plan, seed and prompts give the same latents."
        }
        RunDevice::Sim => "The same plan and simulated machine give the same times on any host.",
        RunDevice::Cuda => {
            "On GPUs of the same kind with the same libraries and build, the same plan, seed and prompts give the same latents."
        }
    };
    let _ = write!(
        out,
        "<section>\n<h2>Reproduce</h2>\n<p class=\"note\">{note}</p>\n\
         <pre class=\"run\">{}</pre>\n</section>\n",
        escape_text(&format_shell_command(&r.start.command))
    );
}

/// Formats a duration with a no-break space before its unit.
fn format_unbroken(ns: u64) -> String {
    Nanoseconds(ns).to_string().replace(' ', "\u{a0}")
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::record::FailureCause;
    use crate::timeline::tests::sample;

    fn bare(record: &RunRecord) -> ReportPage<'_> {
        ReportPage { record, clip: None, frames: &[], plan: None, gates: &[], trace_href: None }
    }

    fn full(record: &RunRecord) -> String {
        let png = crate::apng::png_frame(&[9; 12], 2, 2).unwrap();
        let frames: Vec<_> = (0..3)
            .map(|i| SheetFrame {
                png: png.clone(),
                chunk: i,
                prompt: if i < 2 { "a <i>" } else { "b" }.into(),
            })
            .collect();
        let plan = PlanView {
            mapping: "[mesh]\ntp = 2".into(),
            programs: vec![ProgramView {
                name: "stage0".into(),
                text: "program @x {\n  %a = weight \"w\"\n}".into(),
            }],
            memory: vec![
                RoleMemoryRow {
                    role: "stage0".into(),
                    ranks: "1".into(),
                    bytes_by_use: vec![("weights".into(), 3 << 20)],
                    capacity: Some(12 << 20),
                },
                RoleMemoryRow {
                    role: "lead".into(),
                    ranks: "0".into(),
                    bytes_by_use: vec![("decoder".into(), 1 << 20)],
                    capacity: None,
                },
            ],
            collectives: vec![CollectiveTotalsRow {
                phase: "denoise".into(),
                op: "all_to_all".into(),
                axis: "tp".into(),
                count: 12,
                bytes: 4096,
            }],
        };
        let gates = [ReportGate {
            name: "overlap".into(),
            value: "0.42".into(),
            limit: "≥ 0.60".into(),
            is_met: false,
        }];
        render_report(&ReportPage {
            clip: Some(ReportClip { apng: Some(&png), bytes: png.len() as u64, href: "clip.png" }),
            frames: &frames,
            plan: Some(&plan),
            gates: &gates,
            trace_href: Some("trace.json"),
            ..bare(record)
        })
    }

    #[test]
    fn simulated_time_is_noted_at_the_top() {
        let mut record = sample(2);
        assert!(!render_report(&bare(&record)).contains("Simulated time"));
        record.start.device = RunDevice::Sim;
        record.start.machine = Some("a <rack>".into());
        let page = render_report(&bare(&record));
        assert!(page.contains("<b>Simulated time of a &lt;rack&gt;, no numbers computed.</b>"), "{page}");
        assert!(
            page.contains("The same plan and simulated machine give the same times")
                && !page.contains("the same latents")
        );
    }

    #[test]
    fn the_report_is_self_contained() {
        let page = full(&sample(6));
        for word in ["http", "<script", "<link", "@import", "url(", "javascript"] {
            assert!(!page.contains(word), "{word}");
        }
        assert!(page.matches("src=\"").count() == page.matches("src=\"data:image/png;base64,").count());
        assert_eq!(page, full(&sample(6)));
    }

    #[test]
    fn every_open_tag_closes() {
        let page = full(&sample(6));
        let mut open: Vec<&str> = Vec::new();
        let body = &page[page.find("<body>").unwrap()..];
        for tag in body.split('<').skip(1) {
            let name = tag.split([' ', '>', '/']).find(|s| !s.is_empty()).unwrap();
            if tag.starts_with('/') {
                let last = open.pop();
                if name != "html" {
                    assert_eq!(last, Some(name));
                }
            } else if !["img", "meta", "source"].contains(&name) && !tag.contains("/>") {
                open.push(name);
            }
        }
        assert_eq!(open, [] as [&str; 0]);
    }

    #[test]
    fn the_verdict_is_a_sentence() {
        let mut record = sample(6);
        record.start.chunks = Some(12);
        assert!(
            render_report(&bare(&record))
                .contains("<b class=\"good\">Complete.</b> 6 chunks, 72 frames, in 61.0 ms.")
        );
        let end = record.end.as_mut().unwrap();
        end.status = RunStatus::Failed;
        end.cause = Some(FailureCause {
            class: "peer lost".into(),
            exit_code: 21,
            rank: Some(1),
            code: Some("T0712".into()),
            message: "rank 1 <died>".into(),
        });
        let page = render_report(&bare(&record));
        assert!(page.contains(
            "<b class=\"bad\">Failed.</b> 6 chunks of 12 finished before the failure; the output contains all of them."
        ));
        assert!(page.contains(
            "<p dir=\"auto\">rank 1 &lt;died&gt;</p><small>peer lost · first seen at rank 1 · exit status 21 · \
             <code>tessera explain T0712</code></small>"
        ));
        assert!(page.contains("The last chunks, by rank and stream."));
        record.end = None;
        assert!(
            render_report(&bare(&record)).contains("Unfinished.</b> The record stops after chunk 5 of 12: ")
        );
        record.chunks.clear();
        assert!(render_report(&bare(&record)).contains("The record stops before the first chunk"));
    }

    #[test]
    fn shows_numbers_tables_and_plan() {
        let page = full(&sample(6));
        for part in [
            "<dd>1200.0<small>frames/s</small></dd>",
            "after the first chunk, 75.0× real time; 1090.9 over the whole run",
            "<dd>11.0<small>ms</small></dd>",
            "in 6 chunks; 4.5\u{a0}s of playback",
            "<td><i class=\"dot b1\"></i>denoise</td><td>10</td><td>4.0 ms</td><td>4.0 ms</td><td>6</td><td>89 %",
            "<td>stage0</td><td class=\"l\">1</td><td>3.0 MiB</td><td>–</td><td>3.0 MiB</td><td>25 %",
            "<td>12</td><td>4.0 KiB</td>",
            "<summary>stage0<small>3 lines</small></summary><pre>program @x {\n  %a = weight &quot;w&quot;\n}</pre>",
            "<td class=\"bad\">missed</td>",
            "<q dir=\"auto\">a &lt;i&gt;</q> from chunk 0",
            "<figcaption>chunk 2, after a cut</figcaption>",
            "now &lt;/script&gt; &quot;x&quot;",
            "<pre class=\"run\">tessera stream demo</pre>",
        ] {
            assert!(page.contains(part), "{part}\nis not in\n{page}");
        }
    }

    #[test]
    fn a_long_clip_is_linked_and_a_long_list_is_truncated() {
        let mut record = sample(2);
        let event = record.events[0].clone();
        record.events = (0..250).map(|i| crate::record::RunEvent { at_ns: i, ..event.clone() }).collect();
        let data = vec![0; MAX_INLINE_CLIP_BYTES + 1];
        let clip = ReportClip { apng: Some(&data), bytes: data.len() as u64, href: "clip.png" };
        let page = render_report(&ReportPage { clip: Some(clip), ..bare(&record) });
        assert!(page.contains("<a href=\"clip.png\">clip.png</a> (12.0 MiB)"));
        let unread =
            render_report(&ReportPage { clip: Some(ReportClip { apng: None, ..clip }), ..bare(&record) });
        assert!(unread == page);
        assert!(page.contains("<td colspan=\"4\">50 more</td>"));
        assert_eq!(page.matches("now &lt;/script&gt;").count(), 201);
        assert!(page.contains(", and 249 more</title>"));
    }
}
