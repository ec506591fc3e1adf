//! What is made from a record once a run is over: the trace and the page a person reads.

use std::collections::BTreeMap;
use std::path::Path;

use tessera_ir::{cost, print};
use tessera_mesh::Rank;
use tessera_report::apng::png_frame;
use tessera_report::html::{Clip, CollectiveRow, MemoryRow, Page, PlanView, ProgramView, SheetFrame, report};
use tessera_report::perfetto::trace;
use tessera_report::record::Record;
use tessera_report::timeline::Timeline;

use crate::files::write_file;
use crate::plan::Plan;
use crate::studio::CLIP;

/// Frames of the contact sheet.
const SHEET_FRAMES: usize = 24;

/// Writes trace.json and report.html. The record is what counts: a page that cannot be written is left out.
pub(crate) fn write(plan: &Plan, record: &Record, out: &Path) {
    let timeline = Timeline::from_record(record);
    let _ = write_file(&out.join("trace.json"), trace(&timeline).as_bytes());
    let clip = std::fs::read(out.join(CLIP)).ok();
    let frames = clip.as_deref().map_or(Vec::new(), |c| sheet(record, c));
    let view = plan_view(plan);
    let html = report(&Page {
        record,
        clip: clip.as_deref().filter(|_| !frames.is_empty()).map(|apng| Clip { apng, href: CLIP }),
        frames: &frames,
        plan: Some(&view),
        gates: &[],
        trace_href: Some("trace.json"),
    });
    let _ = write_file(&out.join("report.html"), html.as_bytes());
}

/// Evenly spaced frames of a clip, each with its chunk and prompt.
fn sheet(record: &Record, clip: &[u8]) -> Vec<SheetFrame> {
    let total: u64 = record.chunks.iter().map(|c| u64::from(c.frames)).sum();
    let wanted: Vec<u64> = (0..SHEET_FRAMES as u64).map(|i| i * total / SHEET_FRAMES as u64).collect();
    let mut out: Vec<SheetFrame> = Vec::new();
    let Ok(mut reader) = png::Decoder::new(std::io::Cursor::new(clip)).read_info() else { return out };
    let (w, h) = (reader.info().width, reader.info().height);
    let Some(size) = reader.output_buffer_size() else { return out };
    let mut canvas = vec![0; w as usize * h as usize * 3];
    let mut buffer = vec![0; size];
    let (mut chunk, mut left) = (0, 0);
    for i in 0..total {
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
                let axis = op.axis().map_or(String::new(), |a| a.name().to_string());
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
            let [weights, buffers, temporaries] = plan.memory(role.ranks[0]);
            MemoryRow {
                role: role.role.clone(),
                ranks: role.ranks.iter().map(Rank::to_string).collect::<Vec<_>>().join(", "),
                items: vec![
                    ("weights".into(), weights.0),
                    ("caches".into(), buffers.0),
                    ("temporaries".into(), temporaries.0),
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
