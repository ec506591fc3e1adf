//! What is made from a record once a run is over: the trace and the page a person reads.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::BufReader;
use std::path::Path;

use tessera_ir::{cost, print};
use tessera_mesh::Rank;
use tessera_report::apng::png_frame;
use tessera_report::flight::tell_waits;
use tessera_report::html::{
    Clip, CollectiveRow, MAX_INLINE_CLIP_BYTES, MemoryRow, Page, PlanView, ProgramView, SheetFrame, report,
};
use tessera_report::perfetto::trace;
use tessera_report::record::Record;
use tessera_report::timeline::{Span, Timeline};

use crate::files::write_file;
use crate::opened::flights;
use crate::plan::Plan;
use crate::studio::CLIP;

/// Frames of the contact sheet.
const SHEET_FRAMES: u64 = 24;
/// Most frames decoded for the contact sheet: frames hold only what changed, so every one before the last shown is
/// decoded. Of a longer clip the sheet shows the beginning, as the numbers of its chunks say.
const MAX_DECODED_FRAMES: u64 = 1200;

/// Writes trace.json and report.html. The record is what counts: a page that cannot be written is left out. `ops` are
/// shown in the trace inside of the phases. What ranks waited is told by their flight records, as far as those reach.
pub(crate) fn write(plan: &Plan, record: &Record, out: &Path, ops: Vec<Span>) {
    let mut told = record.clone();
    tell_waits(&mut told, &flights(out, plan.sealed.mesh().ranks()));
    let record = &told;
    let mut timeline = Timeline::from_record(record);
    if !ops.is_empty() {
        timeline.spans.extend(ops);
        timeline.sort();
    }
    let _ = write_file(&out.join("trace.json"), trace(&timeline).as_bytes());
    let path = out.join(CLIP);
    let bytes = std::fs::metadata(&path).map_or(0, |m| m.len());
    let inline = bytes <= MAX_INLINE_CLIP_BYTES as u64;
    let frames = sheet(record, &path);
    let apng = if inline && !frames.is_empty() { std::fs::read(&path).ok() } else { None };
    // A clip that should be in the page and cannot be read is left out of it.
    let shown = !frames.is_empty() && (apng.is_some() || !inline);
    let view = plan_view(plan);
    let html = report(&Page {
        record,
        clip: shown.then_some(Clip { apng: apng.as_deref(), bytes, href: CLIP }),
        frames: &frames,
        plan: Some(&view),
        gates: &[],
        trace_href: Some("trace.json"),
    });
    let _ = write_file(&out.join("report.html"), html.as_bytes());
}

/// Frames of the contact sheet, evenly spaced over the first of a clip's `total`.
fn wanted(total: u64) -> Vec<u64> {
    let within = total.min(MAX_DECODED_FRAMES);
    (0..SHEET_FRAMES).map(|i| i * within / SHEET_FRAMES).collect()
}

/// Evenly spaced frames of a clip, each with its chunk and prompt.
fn sheet(record: &Record, clip: &Path) -> Vec<SheetFrame> {
    let wanted = wanted(record.frame_count());
    let last = wanted.last().copied().unwrap_or(0);
    let mut out: Vec<SheetFrame> = Vec::new();
    let Ok(file) = File::open(clip) else { return out };
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

fn plan_view(plan: &Plan) -> PlanView {
    let sealed = &plan.sealed;
    let mut programs = Vec::new();
    let mut collectives: BTreeMap<(usize, String, String), (u64, u64)> = BTreeMap::new();
    for (i, phase) in sealed.phases().iter().enumerate() {
        for role in sealed.roles() {
            let Some(p) = sealed.program(phase, role.ranks[0]) else { continue };
            if p.ops.is_empty() {
                continue;
            }
            programs.push(ProgramView { name: format!("{phase} · {}", role.role), text: print(p) });
            let mut own: BTreeMap<(usize, String, String), (u64, u64)> = BTreeMap::new();
            for (_, op) in p.collectives() {
                let axis = op.group().map_or(String::new(), |g| g.to_string());
                let row = own.entry((i, op.opcode.name().to_string(), axis)).or_default();
                *row = (row.0 + 1, row.1 + cost(p, op).wire.0);
            }
            // On one rank: the busiest role stands for the phase.
            for (key, (count, bytes)) in own {
                let row = collectives.entry(key).or_default();
                *row = (row.0.max(count), row.1.max(bytes));
            }
        }
    }
    let memory = sealed
        .roles()
        .iter()
        .map(|role| {
            // The parts of what `tessera plan` adds up.
            let m = sealed.memory(role.ranks[0]).unwrap_or_default();
            MemoryRow {
                role: role.role.clone(),
                ranks: role.ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", "),
                items: vec![
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
        .map(|((i, op, axis), (count, bytes))| CollectiveRow {
            phase: sealed.phases()[i].clone(),
            op,
            axis,
            count,
            bytes,
        })
        .collect();
    PlanView { mapping: plan.mapping.text(), programs, memory, collectives }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sheet_of_a_long_clip_decodes_a_bounded_beginning() {
        assert_eq!(wanted(48)[..3], [0, 2, 4]);
        let long = wanted(10_000_000);
        assert!(long.len() == 24 && long.last().is_some_and(|l| *l < MAX_DECODED_FRAMES), "{long:?}");
        assert_eq!(wanted(0).last(), Some(&0));
    }
}
