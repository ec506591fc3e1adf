//! Streams that begin with an input video: its formats, its strength, its end, and what is refused.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use support::{json_field, run_for_text};
use tessera_tools::minimal_model::{PROMPT, create_media_model};

/// Bytes of a frame of the generated model.
const FRAME: usize = 16 * 16 * 3;
/// Frames of three chunks: 1 + 2 · 2 of the first, which opens the scene, and 3 · 2 of each other.
const FRAMES: usize = 17;

struct Case {
    dir: tempfile::TempDir,
    model: PathBuf,
}

impl Case {
    fn new() -> Case {
        let dir = tempfile::tempdir().unwrap();
        let model = dir.path().join("model");
        fs::create_dir(&model).unwrap();
        create_media_model(&model).unwrap();
        Case { dir, model }
    }

    fn path_of(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn run_stream(&self, out: &str, more: &[&str]) -> (Option<i32>, String) {
        let (model, out) = (self.model.to_str().unwrap(), self.path_of(out));
        let fixed = ["stream", model, "--out", out.to_str().unwrap(), "--format", "json", "--quiet"];
        let common = ["--oversubscribe", "--chunks", "3", "--prompt", PROMPT];
        run_for_text(&[&fixed[..], &common, more].concat())
    }

    /// Returns the digest of a run's latents.
    fn golden_digest(&self, out: &str, more: &[&str]) -> String {
        let (status, text) = self.run_stream(out, more);
        assert_eq!(status, Some(0), "{out}: {text}");
        assert_eq!(json_field(&text, "frames"), FRAMES.to_string(), "{out}: {text}");
        json_field(&text, "golden")
    }
}

fn draw_pixels(seed: usize) -> Vec<u8> {
    (0..FRAMES * FRAME).map(|i| ((i * 7 + i / FRAME * 40 + seed * 90) % 251) as u8).collect()
}

fn write_pngs(folder: &Path, pixels: &[u8]) {
    fs::create_dir(folder).unwrap();
    for (i, rgb) in pixels.chunks_exact(FRAME).enumerate() {
        let file = fs::File::create(folder.join(format!("{i:04}.png"))).unwrap();
        let mut encoder = png::Encoder::new(file, 16, 16);
        encoder.set_color(png::ColorType::Rgb);
        encoder.write_header().unwrap().write_image_data(rgb).unwrap();
    }
}

#[test]
fn a_stream_follows_its_video_alike_on_every_mesh_and_from_every_format() {
    let case = Case::new();
    let (raw, other, pngs) = (case.path_of("v.rgb"), case.path_of("o.rgb"), case.path_of("pngs"));
    fs::write(&raw, draw_pixels(0)).unwrap();
    fs::write(&other, draw_pixels(1)).unwrap();
    write_pngs(&pngs, &draw_pixels(0));
    let [raw, other, pngs] = [&raw, &other, &pngs].map(|p| p.to_str().unwrap());
    let one = ["--mesh", "tp=1", "--video-strength", "0.9", "--video"];
    let expected = case.golden_digest("raw", &[&one[..], &[raw]].concat());
    assert_eq!(case.golden_digest("from-pngs", &[&one[..], &[pngs]].concat()), expected);
    let two = ["--mesh", "tp=2", "--strategy", "ulysses", "--video-strength", "0.9", "--video", raw];
    assert_eq!(case.golden_digest("two", &two), expected);
    assert_ne!(
        case.golden_digest("other", &[&one[..], &[other]].concat()),
        expected,
        "the video has no effect"
    );
    assert_ne!(case.golden_digest("none", &["--mesh", "tp=1"]), expected);
    let recompute = [&one[..], &[raw, "--cache", "recompute"]].concat();
    assert_ne!(case.golden_digest("recompute", &recompute), expected);
}

/// Returns the number of denoising forwards of each chunk on the first rank, from the record of a run.
fn count_denoising(record: &Path) -> Vec<usize> {
    let record = fs::read_to_string(record).unwrap();
    let chunks = record.lines().filter(|line| line.contains("\"kind\":\"chunk\""));
    chunks.map(|line| line.matches("\"name\":\"denoise").count()).collect()
}

#[test]
fn chunks_with_much_motion_begin_at_a_later_step() {
    let case = Case::new();
    // Chunks take 5, 6 and 6 frames. The second one moves, and ends with the picture of the third one.
    let shade = |frame: usize| if (5..10).contains(&frame) && frame.is_multiple_of(2) { 10 } else { 240 };
    let moving: Vec<u8> = (0..FRAMES).flat_map(|frame| [shade(frame); FRAME]).collect();
    let files = [("still", vec![240; FRAMES * FRAME]), ("moving", moving)];
    // The noise levels are 1, 0.833 and 0.769. Motion lowers the strength 0.9 to 0.81, and to 0.891 behind it.
    let schedule = ["--mesh", "tp=1", "--steps", "1000,500,400", "--video-strength", "0.9"];
    for (name, pixels) in files {
        let path = case.path_of(&format!("{name}.rgb"));
        fs::write(&path, pixels).unwrap();
        let second = if name == "still" { 2 } else { 1 };
        for (more, expected) in [(&[][..], [2, 2, 2]), (&["--video-motion"][..], [2, second, 2])] {
            let out = format!("{name}-{}", more.len());
            case.golden_digest(&out, &[&schedule[..], &["--video", path.to_str().unwrap()], more].concat());
            assert_eq!(count_denoising(&case.path_of(&format!("{out}/record.jsonl"))), expected, "{out}");
        }
    }
    // A strength that motion could lower below every step is refused.
    let still = case.path_of("still.rgb");
    let weak = ["--video-strength", "0.8", "--video-motion", "--video", still.to_str().unwrap()];
    let (status, text) = case.run_stream("run", &[&schedule[..4], &weak].concat());
    assert!(
        status == Some(1) && text.contains("T0079") && text.contains("0.87 or more"),
        "{status:?} {text}"
    );
}

#[test]
fn a_stream_from_a_pipe_ends_with_the_last_whole_chunk() {
    let case = Case::new();
    let fifo = case.path_of("fifo");
    let made = std::process::Command::new("mkfifo").arg(&fifo).status().unwrap();
    assert!(made.success());
    let writer = std::thread::spawn({
        let fifo = fifo.clone();
        // Two chunks take 11 frames; the twelfth begins a third.
        move || fs::File::create(fifo).unwrap().write_all(&draw_pixels(0)[..12 * FRAME]).unwrap()
    });
    let video = ["--mesh", "tp=1", "--video-strength", "0.9", "--video", fifo.to_str().unwrap()];
    let (status, text) = case.run_stream("run", &video);
    writer.join().unwrap();
    assert_eq!(json_field(&text, "frames"), "11", "{status:?} {text}");
    let record = fs::read_to_string(case.path_of("run/record.jsonl")).unwrap();
    assert!(record.lines().last().unwrap().contains("\"output_complete\":false"), "{record}");
}

#[test]
fn a_video_that_does_not_fit_is_refused_before_anything_starts() {
    let case = Case::new();
    let [whole, short, y4m] = ["whole.rgb", "short.rgb", "v.y4m"].map(|name| case.path_of(name));
    fs::write(&whole, draw_pixels(0)).unwrap();
    fs::write(&short, &draw_pixels(0)[..12 * FRAME]).unwrap();
    fs::write(&y4m, "YUV4MPEG2 W17 H16 F24:1 C444\n").unwrap();
    let [whole, short, y4m] = [&whole, &short, &y4m].map(|path| path.to_str().unwrap());
    let strong = ["--video-strength", "0.9"];
    for (more, code, words) in [
        (vec!["--video", short, strong[0], strong[1]], "T0079", "give --chunks 2 or"),
        (vec!["--video", y4m, strong[0], strong[1]], "T0079", "the nearest size"),
        (vec!["--video", short, "--video-strength", "0.2"], "T0079", "noise levels 1.000"),
        (vec!["--video", "/nowhere", strong[0], strong[1]], "T0079", "/nowhere"),
        (vec!["--video", short, "--video-input", "none"], "T0018", "this plan takes none"),
        (vec!["--video", short, "--video-strength", "1.5"], "", "no noise level"),
        (vec!["--steps", "500", "--video-input", "frames"], "T0018", "needs an input video"),
        (vec!["--video", whole, strong[0], strong[1], "--video-on", "gpu"], "T0018", "add --device cuda"),
        (vec!["--video-on", "gpu"], "", "--video <PATH>"),
    ] {
        let (status, text) = case.run_stream("run", &more);
        assert!(
            matches!(status, Some(1 | 2)) && text.contains(code) && text.contains(words),
            "{more:?}: {status:?} {text}"
        );
        assert!(!case.path_of("run").exists(), "{more:?}");
    }
}
