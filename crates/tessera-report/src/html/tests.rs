//! Tests of the pages of runs and of estimates.

use tessera_base::GateStatus;

use super::*;
use crate::call_comparison::{CallComparison, ClassComparison};
use crate::record::ClassWork;
use crate::timeline::tests::sample;

fn bare(record: &RunRecord) -> ReportPage<'_> {
    ReportPage {
        record,
        clip: None,
        frames: &[],
        texts: &[],
        experts: &[],
        comparison: None,
        plan: None,
        trace_href: None,
        library_href: None,
    }
}

fn full(record: &RunRecord) -> String {
    let png = crate::apng::png_frame(&[9; 12], 2, 2).unwrap();
    let frames: Vec<_> = (0..3)
        .map(|i| SheetFrame { png: png.clone(), chunk: i, prompt: if i < 2 { "a <i>" } else { "b" }.into() })
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
    render_report(&ReportPage {
        clip: Some(ReportClip { apng: Some(&png), bytes: png.len() as u64, href: "clip.png" }),
        frames: &frames,
        plan: Some(&plan),
        trace_href: Some("trace.json"),
        library_href: None,
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

/// A run of a language model: a call that reads the prompt, and calls that decode.
fn text_record() -> RunRecord {
    let mut record = sample(4);
    record.start.generates = crate::record::RunKind::Text;
    if let Some(end) = &mut record.end {
        end.frames = 4;
    }
    for (i, chunk) in record.chunks.iter_mut().enumerate() {
        let name = if i == 0 { "tokens.b1.n7" } else { "tokens.b1.n1" };
        chunk.frames = 1;
        chunk.ranks.remove(0);
        chunk.ranks[0].phases.truncate(1);
        let phase = &mut chunk.ranks[0].phases[0];
        phase.name = name.into();
        let work = |class: &str, ns| ClassWork { class: class.into(), ops: 3, ns, sent_bytes: 0 };
        phase.classes = vec![work("matmul", 3_000_000), work("sample", 50_000)];
    }
    record
}

#[test]
fn a_run_of_texts_shows_its_texts_its_rates_and_the_estimate_beside_the_run() {
    let record = text_record();
    let texts = [TextSample {
        prompt: "Once <b>".into(),
        text: " upon".into(),
        prompt_ids: 7,
        ids: 4,
        finish: "its length is reached".into(),
    }];
    let call = CallComparison {
        name: "decoding step".into(),
        phases: vec!["tokens.b1.n1".into()],
        rows: 1,
        estimated_ns: Some(12_000_000.0),
        classes: vec![ClassComparison {
            class: "matmul".into(),
            estimated_ns: Some(1_500_000.0),
            ..ClassComparison::default()
        }],
        ..CallComparison::default()
    };
    let comparison = EstimateComparison {
        machine: "a laptop".into(),
        calls: vec![call.with_measurement(&record), CallComparison::default()],
    };
    let page = render_report(&ReportPage { texts: &texts, comparison: Some(&comparison), ..bare(&record) });
    for words in [
        "<b>Once &lt;b&gt;</b> upon",
        "7 ids of the prompt, 4 ids generated; its length is reached",
        "4 calls, 4 ids, in",
        "decoding, 3 calls",
        "Estimate beside the run",
        "decoding step, 1 row, 2 calls",
        "<td>1.5 ms</td><td>3.0 ms</td><td>-50 %</td>",
        "<td>12.0 ms</td><td>10.0 ms</td><td>+20 %</td>",
        "Ids hash",
        "give the same ids",
    ] {
        assert!(page.contains(words), "no `{words}` in {page}");
    }
    for words in ["Latents hash", "frames/s", "Pipeline", "chunk"] {
        assert!(!page.contains(words), "`{words}` is a word of video");
    }
    let without = render_report(&bare(&sample(4)));
    assert!(!without.contains("Estimate beside") && !without.contains("Texts"));
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
        } else if !["img", "meta", "source"].contains(&name) {
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
    let beside_library = ReportPage { library_href: Some("../library"), ..bare(&record) };
    assert!(
        render_report(&beside_library)
            .contains("<a href=\"../library/codes/T0712.html\"><code>tessera explain T0712</code></a>")
    );
    record.end = None;
    assert!(render_report(&bare(&record)).contains("Unfinished.</b> The record stops after chunk 5 of 12: "));
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

/// Returns a text that is a script if a page does not escape it.
fn script(name: &str) -> String {
    format!("<script>{name}</script>\"'>")
}

/// Asserts that a page contains the scripts of all names as text, and no script.
fn assert_escaped(page: &str, names: &[&str]) {
    assert!(!page.contains("<script") && !page.contains("script>\"'"), "{page}");
    for name in names {
        assert!(
            page.contains(&format!("&lt;script&gt;{name}&lt;/script&gt;&quot;")),
            "{name}\nis not in\n{page}"
        );
    }
}

fn hostile_memory() -> Vec<RoleMemoryRow> {
    vec![RoleMemoryRow {
        role: script("role"),
        ranks: script("ranks"),
        bytes_by_use: vec![(script("use"), 1)],
        capacity: Some(2),
    }]
}

fn hostile_record() -> RunRecord {
    let mut record = sample(3);
    let start = &mut record.start;
    for (name, text) in [
        ("tessera", &mut start.tessera),
        ("plan", &mut start.plan),
        ("model", &mut start.model),
        ("mesh", &mut start.mesh),
        ("strategy", &mut start.strategy),
        ("numerics", &mut start.numerics),
        ("dtype", &mut start.dtype),
        ("cache", &mut start.cache),
        ("topology", &mut start.topology),
        ("started", &mut start.started_at),
        ("prompt", &mut start.prompts[0].text),
        ("command", &mut start.command[0]),
    ] {
        *text = script(name);
    }
    start.machine = Some(script("machine"));
    start.device = RunDevice::Sim;
    start.ranks.iter_mut().for_each(|r| r.role = script("rank"));
    for c in &mut record.chunks {
        c.prompt = script("chunk");
        for p in c.ranks.iter_mut().flat_map(|r| &mut r.phases) {
            (p.name, p.stream) = (script("phase"), script("stream"));
            p.end_ns = p.start_ns + 9_000_000;
        }
    }
    record.events[0].event = script("event");
    record.events[0].detail = script("detail");
    let end = record.end.as_mut().unwrap();
    end.golden = script("golden");
    end.cause = Some(FailureCause {
        class: script("class"),
        exit_code: 21,
        rank: None,
        code: Some(script("code")),
        message: script("message"),
    });
    record
}

#[test]
fn a_report_shows_scripts_as_text() {
    let plan = PlanView {
        mapping: script("mapping"),
        programs: vec![ProgramView { name: script("program"), text: script("text") }],
        memory: hostile_memory(),
        collectives: vec![CollectiveTotalsRow {
            phase: script("planned"),
            op: script("op"),
            axis: script("axis"),
            count: 1,
            bytes: 1,
        }],
    };
    let href = script("href");
    let page = render_report(&ReportPage {
        record: &hostile_record(),
        clip: Some(ReportClip { apng: None, bytes: 1, href: &href }),
        frames: &[],
        texts: &[],
        experts: &[],
        comparison: None,
        plan: Some(&plan),
        trace_href: Some(&script("trace")),
        library_href: Some(&script("library")),
    });
    let names = "tessera plan model mesh strategy numerics dtype cache topology started machine rank chunk \
                 phase stream event detail golden class code message mapping program text role ranks use \
                 planned op axis href trace";
    assert_escaped(&page, &names.split_whitespace().collect::<Vec<_>>());
    assert!(page.contains("&lt;script&gt;command&lt;/script&gt;"), "{page}");

    let frames = [SheetFrame { png: vec![1], chunk: 0, prompt: script("frame") }];
    let mut record = hostile_record();
    let clip = Some(ReportClip { apng: Some(&[1]), bytes: 1, href: &href });
    let page = render_report(&ReportPage { clip, frames: &frames, ..bare(&record) });
    assert_escaped(&page, &["chunk", "frame"]);
    record.chunks.clear();
    assert_escaped(&render_report(&ReportPage { clip, ..bare(&record) }), &["prompt"]);
}

#[test]
fn an_estimate_shows_scripts_as_text() {
    let page = EstimatePage {
        tessera: script("tessera"),
        title: script("title"),
        verdict: EstimateVerdict::Warn,
        recommendation: script("recommendation"),
        warnings: vec![script("warning")],
        headline_numbers: vec![HeadlineNumber {
            value: script("number"),
            unit: script("unit"),
            label: script("label"),
        }],
        mapping_facts: vec![(script("fact"), script("fact-value"))],
        step_parts: vec![(script("part"), 1.0)],
        step_parts_note: script("parts"),
        memory: hostile_memory(),
        gates: vec![PlanGate {
            title: script("gate"),
            value: script("value"),
            limit: script("limit"),
            verdict: GateStatus::Pass,
            explanation: script("explanation"),
        }],
        timelines: vec![TimelineChart {
            title: script("chart"),
            note: script("chart-note"),
            timeline: Timeline::from_record(&hostile_record()),
        }],
        failure_modes: vec![FailureModeAdvice {
            mode: script("mode"),
            symptom: script("symptom"),
            mitigations: vec![(script("mitigation"), script("effect"))],
        }],
        advice: vec![AdviceTable {
            id: "advice",
            title: script("advice"),
            note: script("advice-note"),
            columns: vec![script("column"), script("column-2")],
            rows: vec![vec![script("cell"), script("cell-2")]],
        }],
        mapping_columns: vec![script("head"), script("head-2")],
        mappings: vec![vec![script("other"), script("other-2")]],
        considered_count: 2,
        rejections: vec![(script("reason"), 1, script("example"))],
        accuracy_notes: vec![script("accuracy")],
        mapping: script("mapping"),
        command: script("command"),
    };
    let names = "tessera title recommendation warning number unit label fact fact-value part parts role ranks \
                 use gate value limit explanation chart chart-note rank phase stream mode symptom mitigation \
                 effect advice advice-note column column-2 cell cell-2 head head-2 other other-2 reason \
                 example accuracy mapping command";
    assert_escaped(&render_estimate(&page), &names.split_whitespace().collect::<Vec<_>>());
}
