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
        (render_row("digests", format_args!("{:.2} %", o.digest_share * 100.0), "of the period"))
    };
    let heads = html! { th { "measure" } th { "value" } th {} };
    // A sentence would make a row wider than the page.
    let slow = SlowRank::from_chunks(&record.start.ranks, &record.chunks);
    let slow = slow.map(|slow| render_note(html! { strong { "Slow rank. " } (slow.describe()) "." }));
    render_section(
        "Pipeline",
        &html! { (render_note(note)) (render_table(&heads, &rows)) (slow.unwrap_or_default()) },
    )
}

fn render_row(name: &str, value: impl Render, meaning: impl Render) -> Markup {
    html! { tr { td.words { (name) } td { (value) } td.l { (meaning) } } }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::class_work::ClassWork;
    use crate::record::{PhaseRecord, PipelineTimes, RankChunk, RankRole};
    use crate::timeline::tests::sample;

    fn set_period(record: &mut RunRecord, period_ns: u64) {
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
    }

    #[test]
    fn the_section_gives_a_verdict_or_is_absent() {
        let mut record = sample(7);
        let page = |record: &RunRecord| render_pipeline_section(record).into_string();
        assert_eq!(page(&record), "");
        for (period_ns, expected) in
            [(800, "1.00</td><td class=\"l\"><span class=\"good\">overlapped"), (1000, "not overlapped")]
        {
            set_period(&mut record, period_ns);
            let html = page(&record);
            assert!(
                html.contains(expected) && html.contains(" %</td><td class=\"l\">of the period"),
                "{html}"
            );
            assert!(!html.contains("Slow rank"), "{html}");
        }
    }

    #[test]
    fn the_section_names_a_slow_rank() {
        let mut record = sample(7);
        set_period(&mut record, 800);
        record.start.ranks = [0, 1].map(|rank| RankRole { rank, role: "stage0".into() }).into();
        for chunk in &mut record.chunks {
            let like = chunk.ranks[0].clone();
            chunk.ranks = [(0, 1_000_000), (1, 3_000_000)]
                .map(|(rank, ns)| {
                    let work = ClassWork { class: "matmul".into(), ops: 1, ns, sent_bytes: 0 };
                    let phase = PhaseRecord { classes: vec![work], ..PhaseRecord::default() };
                    RankChunk { rank, phases: vec![phase], ..like.clone() }
                })
                .into();
        }
        let html = render_pipeline_section(&record).into_string();
        assert!(html.contains("rank 1 is slow: its ops take 3.0 ms of a chunk"), "{html}");
    }
}
