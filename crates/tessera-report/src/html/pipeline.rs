//! The report's section on how well the two pipeline stages of a stream overlapped.

use maud::{Markup, Render, html};
use tessera_base::Nanoseconds;

use super::layout::{render_note, render_section, render_table};
use crate::markup::format_plural;
use crate::overlap::{OVERLAP_GATE, OverlapStats, SCORED_CHUNKS_MIN};
use crate::record::RunRecord;
use crate::slow_rank::SlowRank;

/// Renders a table of medians and a verdict; renders nothing if no chunk of the record counts.
pub(super) fn render_pipeline_section(record: &RunRecord) -> Markup {
    let Some(o) = OverlapStats::from_chunks(&record.chunks) else { return Markup::default() };
    let (class, verdict) = match (o.stage0_ns, o.passes_gate(OVERLAP_GATE)) {
        (0, _) => ("", "the leader has no work to hide"),
        (_, Some(true)) => ("good", "overlapped"),
        (_, Some(false)) => ("bad", "not overlapped"),
        (_, None) => ("", "too few chunks for a score"),
    };
    let score = o.score.map_or("withheld".to_string(), |s| format!("{s:.2}"));
    let note = html! {
        "Medians over " (format_plural(u64::from(o.chunks), "chunk"))
        ", without the last chunk of each scene. Stage 0 is the leader’s own work for a chunk, stage 1 the \
         generator, and the period ends with the next chunk’s commit. OverlapScore is max(0, stage 0 + stage 1 − \
         period) / min(stage 0, stage 1); it needs " (SCORED_CHUNKS_MIN) " chunks."
    };
    let verdict = html! { span class=(class) { (verdict) } (format_args!(", gate {OVERLAP_GATE:.2}")) };
    let rows = html! {
        (render_row("OverlapScore", score, verdict))
        (render_row("period", Nanoseconds(o.period_ns).to_string(), "from one commit to the next"))
        (render_row("stage 0", Nanoseconds(o.stage0_ns).to_string(), "context, decode, write"))
        (render_row("stage 1", Nanoseconds(o.stage1_ns).to_string(), "from commit to the last rank’s done"))
        (render_row("idle", Nanoseconds(o.idle_ns).to_string(), "time the mesh is idle before a commit"))
        (render_row("queue in", o.queue_in, "maximum number of queued requests"))
        (render_row("queue out", o.queue_out, "maximum number of finished chunks in the queue"))
        @if let Some(slow) = SlowRank::from_chunks(&record.start.ranks, &record.chunks) {
            (render_row("slow rank", format_args!("rank {}", slow.rank), slow.describe()))
        }
        (render_row("digests", format_args!("{:.2} %", o.digest_share * 100.0), "of the period"))
    };
    let heads = html! { th { "measure" } th { "value" } th {} };
    render_section("Pipeline", &html! { (render_note(note)) (render_table(&heads, &rows)) })
}

fn render_row(name: &str, value: impl Render, meaning: impl Render) -> Markup {
    html! { tr { td.words { (name) } td { (value) } td.l { (meaning) } } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::PipelineTimes;
    use crate::timeline::tests::sample;

    #[test]
    fn the_section_gives_a_verdict_or_is_absent() {
        let mut record = sample(7);
        let page = |record: &RunRecord| render_pipeline_section(record).into_string();
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
