//! Prints how a stream ended: the files of its run folder, its speed, and its failure.

use tessera::OVERLAP_GATE;
use tessera::stream_options::StreamReport;
use tessera::terminal::print_stderr;

use crate::output::{
    CliError, CliResult, EXIT_DIAGNOSTICS, OutputFormat, format_pairs, print_failure, write_stdout,
};

/// Where the result of a run is printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReportPlace {
    StandardOutput,
    /// For a run whose frames go to standard output.
    StandardError,
}

/// Prints the result of a run. `failure_printed` suppresses the failure, for callers that have
/// already printed it.
pub fn print_report(
    report: &StreamReport,
    (format, place): (OutputFormat, ReportPlace),
    failure_printed: bool,
) -> CliResult {
    let text = match format {
        OutputFormat::Json => render_json(report),
        OutputFormat::Text => render_text(report),
    };
    let written = match place {
        ReportPlace::StandardOutput => write_stdout(&text),
        ReportPlace::StandardError => {
            print_stderr(&text);
            Ok(())
        }
    };
    let on_stderr = format == OutputFormat::Text && !failure_printed || written.is_err();
    if let Some(f) = report.failure.as_ref().filter(|_| on_stderr) {
        print_failure(f);
    }
    // A standard output that cannot be written must not hide how the run ended.
    if let Err(d) = written {
        let status = if report.exit_code == 0 { EXIT_DIAGNOSTICS } else { report.exit_code };
        return Err(CliError::with_status(vec![d], status));
    }
    Ok(report.exit_code)
}

/// The files that a run folder may contain, with the most useful ones first.
const RUN_DIR_FILES: &[(&str, &str)] = &[
    ("clip.png", "the video, an animated PNG for any browser"),
    ("latents.safetensors", "the latents of every chunk"),
    ("frames", "every frame as a PNG"),
    ("report.html", "the report, for a browser"),
    ("trace.json", "a timeline for ui.perfetto.dev"),
    ("record.jsonl", "the record of every chunk, as JSON lines"),
];

fn render_text(r: &StreamReport) -> String {
    let state = match (&r.failure, r.interrupted) {
        (Some(_), _) => ", failed",
        (None, true) => ", stopped on request",
        (None, false) => "",
    };
    let chunks = if r.chunks == 1 { "1 chunk".to_string() } else { format!("{} chunks", r.chunks) };
    let frames = if r.frames > 0 {
        format!(", {} frames, {:.1} frames per second", r.frames, r.fps)
    } else {
        String::new()
    };
    let dropped = if r.dropped > 0 { format!(", {} dropped", r.dropped) } else { String::new() };
    let mut out = format!("{}: {chunks}{dropped}{frames}{state}\n", r.out.display());
    if let Some(machine) = &r.machine {
        out += &format!("simulated time on {machine}; no values were computed, so there is no clip\n");
    }
    if let Some(golden) = &r.golden {
        out += &format!("golden {golden}\n");
    }
    if let Some(weights) = &r.weights {
        out += &format!("weights {weights}\n");
    }
    if let Some(ratio) = r.decoder_psnr_db {
        out += &format!("fast decoder: PSNR {ratio:.1} dB to the exact one, in the first frame of a scene\n");
    }
    if let Some(o) = &r.overlap {
        let ms = |ns: u64| ns as f64 / 1e6;
        let score = match o.stage0_ns {
            0 => "nothing to overlap".to_string(),
            _ => o.describe_score(),
        };
        out += &format!(
            "period {:.1} ms: leader {:.1} ms, generator {:.1} ms, mesh idle {:.1} ms; {score}\n",
            ms(o.period_ns),
            ms(o.stage0_ns),
            ms(o.stage1_ns),
            ms(o.idle_ns),
        );
    }
    if let Some(slow) = &r.slow_rank {
        out += &format!("{}\n", slow.describe());
    }
    let files = RUN_DIR_FILES.iter().map(|(name, what)| (r.out.join(name), *what));
    let files =
        files.filter(|(path, _)| path.exists()).map(|(path, what)| (path.display().to_string(), what));
    out + &format_pairs(files)
}

fn render_json(r: &StreamReport) -> String {
    let failure = r.failure.as_ref().map(
        |f| serde_json::json!({"class": f.class.as_str(), "rank": f.rank, "code": f.code, "text": f.text}),
    );
    let fields = serde_json::json!({
        "out": r.out.display().to_string(),
        "chunks": r.chunks,
        "dropped": r.dropped,
        "frames": r.frames,
        "fps": r.fps,
        "golden": r.golden,
        "weights": r.weights,
        "decoder_psnr_db": r.decoder_psnr_db,
        "machine": r.machine,
        "slow_rank": r.slow_rank.as_ref().map(|slow| serde_json::json!({
            "rank": slow.rank,
            "compute_ns": slow.compute_ns,
            "others_ns": slow.others_ns,
        })),
        "pipeline": r.overlap.as_ref().map(|o| serde_json::json!({
            "chunks": o.chunks,
            "overlap_score": o.score,
            "passes": o.passes_gate(OVERLAP_GATE),
            "period_ns": o.period_ns,
            "stage0_ns": o.stage0_ns,
            "stage1_ns": o.stage1_ns,
            "idle_ns": o.idle_ns,
            "queue_in": o.queue_in,
            "queue_out": o.queue_out,
            "digest_share": o.digest_share,
        })),
        "interrupted": r.interrupted,
        "exit_code": r.exit_code,
        "failure": failure,
    });
    fields.to_string() + "\n"
}
