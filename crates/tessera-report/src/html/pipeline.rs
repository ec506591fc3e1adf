//! The report's section on how well the two pipeline stages of a stream overlapped.

use std::fmt::Write;

use tessera_base::Nanoseconds;

use crate::markup::format_plural;
use crate::overlap::{OVERLAP_GATE, OverlapStats};
use crate::record::RunRecord;

/// Writes a table of medians and a verdict; writes nothing if no chunk of the record counts.
pub(super) fn write_pipeline_section(out: &mut String, record: &RunRecord) {
    let Some(o) = OverlapStats::from_chunks(&record.chunks) else { return };
    let (class, verdict) = match (o.stage0_ns, o.passes_gate()) {
        (0, _) => ("", "the leader has no work to hide"),
        (_, true) => ("good", "overlapped"),
        (_, false) => ("bad", "not overlapped"),
    };
    let _ = write!(
        out,
        "<section>\n<h2>Pipeline</h2>\n<p class=\"note\">Medians over {}, without the first chunk of each scene. Stage 0 is \
         the leader’s own work for a chunk, stage 1 the generator. OverlapScore is max(0, stage 0 + stage 1 − period) / \
         min(stage 0, stage 1).</p>\n<div class=\"scroll\"><table>\n<thead><tr><th>measure</th><th>value</th><th></th></tr></thead>\n<tbody>\n",
        format_plural(u64::from(o.chunks), "chunk")
    );
    let mut row = |name: &str, value: String, says: &str| {
        let _ = writeln!(
            out,
            "<tr><td class=\"words\">{name}</td><td>{value}</td><td class=\"l\">{says}</td></tr>"
        );
    };
    row(
        "OverlapScore",
        format!("{:.2}", o.score),
        &format!("<span class=\"{class}\">{verdict}</span>, gate {OVERLAP_GATE:.2}"),
    );
    row("period", Nanoseconds(o.period_ns).to_string(), "from one commit to the next");
    row("stage 0", Nanoseconds(o.stage0_ns).to_string(), "context, decode, write");
    row("stage 1", Nanoseconds(o.stage1_ns).to_string(), "from commit to the last rank’s done");
    row("idle", Nanoseconds(o.idle_ns).to_string(), "time the mesh is idle before a commit");
    row("queue in", o.queue_in.to_string(), "maximum number of queued requests");
    row("queue out", o.queue_out.to_string(), "maximum number of finished chunks in the queue");
    row("digests", format!("{:.2} %", o.digest_share * 100.0), "of the period");
    out.push_str("</tbody>\n</table></div>\n</section>\n");
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::record::PipelineTimes;
    use crate::timeline::tests::sample;

    #[test]
    fn the_section_gives_a_verdict_or_is_absent() {
        let mut record = sample(3);
        let page = |record: &RunRecord| {
            let mut out = String::new();
            write_pipeline_section(&mut out, record);
            out
        };
        assert_eq!(page(&record), "");
        for (period_ns, expected) in
            [(800, "1.00</td><td class=\"l\"><span class=\"good\">overlapped"), (1000, "not overlapped")]
        {
            for chunk in &mut record.chunks {
                chunk.pipeline = Some(PipelineTimes {
                    decided_ns: 0,
                    ready_ns: 0,
                    done_ns: 0,
                    period_ns,
                    stage0_ns: 200,
                    stage1_ns: 800,
                    idle_ns: 3,
                    digest_ns: 4,
                });
            }
            let html = page(&record);
            assert!(
                html.contains(expected) && html.contains(" %</td><td class=\"l\">of the period"),
                "{html}"
            );
        }
    }
}
