//! Writes the trace and the HTML report of a finished run from its record.

use std::collections::BTreeMap;
use std::io::BufReader;
use std::path::Path;

use tessera_base::Diagnostic;
use tessera_ir::{op_workload, print};
use tessera_mesh::Rank;
use tessera_plan::Mapping;
use tessera_report::apng::png_frame;
use tessera_report::call_comparison::EstimateComparison;
use tessera_report::expert_load::ExpertLoadRow;
use tessera_report::flight::{add_collective_waits, collective_spans};
use tessera_report::html::{
    CollectiveTotalsRow, MAX_INLINE_CLIP_BYTES, PlanView, ProgramView, ReportClip, ReportPage, RoleMemoryRow,
    SheetFrame, TextSample, render_report,
};
use tessera_report::perfetto::trace_json;
use tessera_report::record::RunRecord;
use tessera_report::timeline::{Timeline, TimelineSpan};
use tessera_verify::SealedPlan;

use crate::files::{open_regular_file, read_file, write_file};
use crate::frame_writer::CLIP_FILE;
use crate::plan::Plan;
use crate::run_dir::read_flight_records;

/// Number of frames on the contact sheet; a shorter clip is shown in full.
const SHEET_FRAMES: u64 = 24;
/// Maximum number of frames decoded for the contact sheet. APNG frames store only changes, so every
/// frame up to the last one shown must be decoded. For a longer clip the sheet covers the
/// beginning, as the chunk numbers on it show.
const MAX_DECODED_FRAMES: u64 = 1200;

/// Writes trace.json and report.html; if one cannot be written, the other is written still. The trace nests `ops` in the phases. Waiting times come from the flight
/// records, as far back as those reach.
///
/// # Errors
/// T0014 for the first file that cannot be written.
pub(crate) fn write_reports(
    plan: &Plan,
    record: &RunRecord,
    out: &Path,
    ops: Vec<TimelineSpan>,
) -> Result<(), Diagnostic> {
    let mut record_with_waits = record.clone();
    add_collective_waits(&mut record_with_waits, &read_flight_records(out, plan.sealed.mesh().world_size()));
    let record = &record_with_waits;
    let mut timeline = Timeline::from_record(record);
    if !ops.is_empty() {
        timeline.spans.extend(ops);
        timeline.sort_and_name();
    }
    let trace = write_file(&out.join("trace.json"), trace_json(&timeline).as_bytes());
    let path = out.join(CLIP_FILE);
    let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
    let inline = bytes <= MAX_INLINE_CLIP_BYTES as u64;
    let frames = decode_contact_sheet(record, &path);
    let apng =
        if inline && !frames.is_empty() { read_file(&path, MAX_INLINE_CLIP_BYTES as u64).ok() } else { None };
    // A clip that should be inlined but cannot be read is left out of the report.
    let has_clip = !frames.is_empty() && (apng.is_some() || !inline);
    let view = build_plan_view(&plan.sealed, &plan.mapping);
    let html = render_report(&ReportPage {
        record,
        clip: has_clip.then_some(ReportClip { apng: apng.as_deref(), bytes, href: CLIP_FILE }),
        frames: &frames,
        texts: &[],
        experts: &[],
        comparison: None,
        plan: Some(&view),
        trace_href: Some("trace.json"),
        library_href: find_library(out).then_some("../library"),
    });
    trace.and(write_file(&out.join("report.html"), html.as_bytes()))
}

/// Writes trace.json and report.html of a run of texts, as [`write_reports`] does.
///
/// # Errors
/// T0014 for the first file that cannot be written.
pub(crate) fn write_text_reports(
    (sealed, mapping): (&SealedPlan, &Mapping),
    record: &RunRecord,
    out: &Path,
    (texts, experts): (&[TextSample], &[ExpertLoadRow]),
    comparison: &EstimateComparison,
) -> Result<(), Diagnostic> {
    let flights = read_flight_records(out, sealed.mesh().world_size());
    let mut record = record.clone();
    add_collective_waits(&mut record, &flights);
    let mut timeline = Timeline::from_record(&record);
    timeline.spans.extend(collective_spans(&record, &flights));
    timeline.sort_and_name();
    let trace = write_file(&out.join("trace.json"), trace_json(&timeline).as_bytes());
    let view = build_plan_view(sealed, mapping);
    let html = render_report(&ReportPage {
        record: &record,
        clip: None,
        frames: &[],
        texts,
        experts,
        comparison: Some(comparison),
        plan: Some(&view),
        trace_href: Some("trace.json"),
        library_href: find_library(out).then_some("../library"),
    });
    trace.and(write_file(&out.join("report.html"), html.as_bytes()))
}

/// Returns whether `tessera explain --html` wrote its site beside the run, as in `out/library`.
fn find_library(out: &Path) -> bool {
    out.parent().is_some_and(|runs| runs.join("library/index.html").is_file())
}

/// Returns the frame indices of the contact sheet, evenly spaced over the first frames of a clip
/// with `total` frames.
fn contact_sheet_indices(total: u64) -> Vec<u64> {
    let within = total.min(MAX_DECODED_FRAMES);
    (0..SHEET_FRAMES).map(|i| i * within / SHEET_FRAMES).collect()
}

/// Decodes evenly spaced frames of a clip, each with its chunk and prompt.
fn decode_contact_sheet(record: &RunRecord, clip: &Path) -> Vec<SheetFrame> {
    let wanted = contact_sheet_indices(record.frame_count());
    let last = wanted.last().copied().unwrap_or(0);
    let mut out: Vec<SheetFrame> = Vec::new();
    let Ok(file) = open_regular_file(clip) else { return out };
    let Ok(mut reader) = png::Decoder::new(BufReader::new(file)).read_info() else { return out };
    let (w, h) = (reader.info().width, reader.info().height);
    let Some(size) = reader.output_buffer_size() else { return out };
    let mut canvas = vec![0; w as usize * h as usize * 3];
    let mut buffer = vec![0; size];
    let (mut chunk, mut left) = (0, 0);
    for i in 0..=last {
        let Ok(frame) = reader.next_frame(&mut buffer) else { break };
        let (x, y) = reader.info().frame_control().map_or((0, 0), |f| (f.x_offset, f.y_offset));
        for row in 0..frame.height {
            let to = ((y + row) * w + x) as usize * 3;
            let from = (row * frame.width) as usize * 3;
            let n = frame.width as usize * 3;
            canvas[to..to + n].copy_from_slice(&buffer[from..from + n]);
        }
        while left == 0 && chunk < record.chunks.len() {
            left = record.chunks[chunk].frames;
            chunk += 1;
        }
        if left == 0 {
            break;
        }
        left -= 1;
        if wanted.contains(&i)
            && let (Ok(png), Some(c)) = (png_frame(&canvas, w, h), record.chunks.get(chunk - 1))
        {
            out.push(SheetFrame { png, chunk: c.chunk, prompt: c.prompt.clone() });
        }
    }
    out
}

fn build_plan_view(sealed: &SealedPlan, mapping: &Mapping) -> PlanView {
    let mut programs = Vec::new();
    let mut collectives: BTreeMap<(usize, String, String), (u64, u64)> = BTreeMap::new();
    for (i, phase) in sealed.phase_names().iter().enumerate() {
        for role in sealed.roles() {
            let Some(p) = sealed.rank_program(phase, role.ranks[0]) else { continue };
            if p.ops.is_empty() {
                continue;
            }
            programs.push(ProgramView { name: format!("{phase} · {}", role.role), text: print(p) });
            let mut role_collectives: BTreeMap<(usize, String, String), (u64, u64)> = BTreeMap::new();
            for (_, op) in p.collective_ops() {
                let axis = op.comm_group().map_or(String::new(), |g| g.to_string());
                let row = role_collectives.entry((i, op.opcode.name().to_string(), axis)).or_default();
                *row = (row.0 + 1, row.1 + op_workload(p, op).wire.0);
            }
            // The counts are per rank, so the busiest role represents the phase.
            for (key, (count, bytes)) in role_collectives {
                let row = collectives.entry(key).or_default();
                *row = (row.0.max(count), row.1.max(bytes));
            }
        }
    }
    let memory = sealed
        .roles()
        .iter()
        .map(|role| {
            // These are the items that `tessera plan` adds up.
            let m = sealed.rank_memory(role.ranks[0]).unwrap_or_default();
            RoleMemoryRow {
                role: role.role.clone(),
                ranks: role.ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", "),
                bytes_by_use: vec![
                    ("weights".into(), m.weights.0),
                    ("caches".into(), m.buffers.0),
                    ("inputs".into(), m.inputs.0),
                    ("temporaries".into(), m.temporaries.0),
                ],
                capacity: None,
            }
        })
        .collect();
    let collectives = collectives
        .into_iter()
        .map(|((i, op, axis), (count, bytes))| CollectiveTotalsRow {
            phase: sealed.phase_names()[i].clone(),
            op,
            axis,
            count,
            bytes,
        })
        .collect();
    PlanView { mapping: mapping.to_toml(), programs, memory, collectives }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sheet_of_a_long_clip_decodes_a_bounded_beginning() {
        assert_eq!(contact_sheet_indices(48)[..3], [0, 2, 4]);
        let long = contact_sheet_indices(10_000_000);
        assert!(long.len() == 24 && long.last().is_some_and(|l| *l < MAX_DECODED_FRAMES), "{long:?}");
        assert_eq!(contact_sheet_indices(0).last(), Some(&0));
    }
}
