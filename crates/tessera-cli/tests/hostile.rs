//! Hostile surroundings: output that disappears, terminals that are gone, inputs that are no files.
//! Every run must end in bounded time, without a panic, and never with status 0 and output missing.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::ffi::OsStr;
use std::fs;
use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};

mod support;
use support::{TIMEOUT, both_outputs, repo_root, tessera_command, to_text, wait_for_end};

fn path_text(p: &Path) -> &str {
    p.to_str().unwrap()
}

/// Waits for a process, and checks that it neither hung nor panicked.
fn end_without_panic(child: Child) -> (Option<i32>, String) {
    let o = wait_for_end(child);
    assert_no_panic(&o);
    (o.status.code(), both_outputs(&o))
}

fn assert_no_panic(o: &Output) {
    let text = both_outputs(o);
    assert!(o.status.code() != Some(101) && !text.contains("panicked"), "{text}");
    // A signal would be an abort.
    assert!(o.status.code().is_some(), "{:?} {text}", o.status);
}

/// Runs a shell line in which `$T` is the binary and `$M` the demo model.
fn run_in_shell(dir: &Path, line: &str) -> (Option<i32>, String) {
    let child = Command::new("bash")
        .args(["-c", line])
        .env("T", env!("CARGO_BIN_EXE_tessera"))
        .env("M", repo_root().join("models/demo"))
        .current_dir(dir)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    end_without_panic(child)
}

/// Starts a stream, and waits until its record has a chunk.
fn start_stream(out: &Path, chunks: &str, more: &[&str]) -> Child {
    let args = ["stream", "models/demo", "--chunks", chunks, "-q", "--out", path_text(out)];
    let child = tessera_command(&[&args[..], more].concat()).spawn().unwrap();
    let begun = Instant::now();
    while !fs::read_to_string(out.join("record.jsonl")).is_ok_and(|r| r.lines().count() > 1) {
        assert!(begun.elapsed() < TIMEOUT, "no chunk");
        std::thread::sleep(Duration::from_millis(5));
    }
    child
}

// proves: S-15
#[test]
fn a_run_whose_output_disappears_fails_and_names_the_file() {
    let dir = tempfile::tempdir().unwrap();
    for lost in ["", "record.jsonl", "clip.png"] {
        let out = dir.path().join(format!("run-{lost}"));
        let child = start_stream(&out, "10000", &[]);
        if lost.is_empty() { fs::remove_dir_all(&out) } else { fs::remove_file(out.join(lost)) }.unwrap();
        let (status, text) = end_without_panic(child);
        assert!(status == Some(17) && text.contains("T0765"), "{lost}: {status:?} {text}");
        assert!(text.contains(path_text(&out.join(lost))), "{lost}: {text}");
    }
    // A frame is missed at the end. What was written stays usable.
    let out = dir.path().join("frames-lost");
    let child = start_stream(&out, "12", &["--png"]);
    let begun = Instant::now();
    while fs::remove_file(out.join("frames/000003.png")).is_err() {
        assert!(begun.elapsed() < TIMEOUT, "no frame");
        std::thread::sleep(Duration::from_millis(5));
    }
    let (status, text) = end_without_panic(child);
    assert!(status == Some(17) && text.contains("T0765") && text.contains("000003.png"), "{text}");
    assert!(fs::read_to_string(out.join("record.jsonl")).unwrap().contains("\"failed\""));
}

// proves: S-15
#[test]
fn a_report_that_cannot_be_written_fails_the_run() {
    let dir = tempfile::tempdir().unwrap();
    for file in ["report.html", "trace.json"] {
        let out = dir.path().join(file);
        let child = start_stream(&out, "8", &[]);
        fs::create_dir(out.join(file)).unwrap();
        let (status, text) = end_without_panic(child);
        assert!(status == Some(17) && text.contains("T0014") && text.contains(file), "{status:?} {text}");
        assert!(fs::metadata(out.join("clip.png")).unwrap().len() > 0);
    }
}

#[test]
fn a_broken_terminal_changes_no_exit_status() {
    let dir = tempfile::tempdir().unwrap();
    let stream = "$T stream $M --chunks 2 --out";
    for (n, (line, status)) in [
        (format!("{stream} a 2>&1 | head -1; exit ${{PIPESTATUS[0]}}"), 0),
        (format!("{stream} b 2>/dev/full"), 0),
        (format!("{stream} c 2>&-"), 0),
        (format!("{stream} d >&- 2>&- <&-"), 0),
        // A message without a reader keeps the status of its cause.
        ("$T stream no/such 2>/dev/full".to_string(), 2),
        ("$T check no/such 2>&-".to_string(), 1),
        ("$T explain nonsense-nonsense 2>/dev/full".to_string(), 2),
    ]
    .into_iter()
    .enumerate()
    {
        let (found, text) = run_in_shell(dir.path(), &line);
        assert_eq!(found, Some(status), "{line}: {text}");
        if let Some(out) = ["a", "b", "c", "d"].get(n) {
            assert!(dir.path().join(out).join("report.html").is_file(), "{line}");
        }
    }
}

#[test]
fn a_broken_standard_output_does_not_hide_the_failure() {
    let dir = tempfile::tempdir().unwrap();
    for format in ["text", "json"] {
        let line = format!(
            "$T stream $M --chunks 10000 -q --format {format} --out {format} >/dev/full & P=$!
             until [ -s {format}/clip.png ]; do sleep 0.05; done; rm {format}/clip.png; wait $P"
        );
        let (status, text) = run_in_shell(dir.path(), &line);
        assert!(status == Some(17) && text.contains("T0765") && text.contains("T0033"), "{status:?} {text}");
    }
    let (status, text) = run_in_shell(dir.path(), "$T stream $M --chunks 1 -q --out ok >/dev/full");
    assert!(status == Some(1) && text.contains("T0033"), "{status:?} {text}");
}

/// Replaces a file by something that cannot be read to its end.
fn replace_by(path: &Path, kind: &str) {
    fs::remove_file(path).unwrap();
    match kind {
        "named pipe" => {
            assert!(Command::new("mkfifo").arg(path).status().unwrap().success());
        }
        "device" => std::os::unix::fs::symlink("/dev/zero", path).unwrap(),
        "sparse file" => fs::File::create(path).unwrap().set_len(10 << 30).unwrap(),
        "folder" => fs::create_dir(path).unwrap(),
        _ => fs::write(path, b"\xff\xfe\x00").unwrap(),
    }
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir(to).unwrap();
    for entry in fs::read_dir(from).unwrap().map(Result::unwrap) {
        let to = to.join(entry.file_name());
        if entry.path().is_dir() { copy_dir(&entry.path(), &to) } else { drop(fs::copy(entry.path(), to)) }
    }
}

#[test]
fn an_input_that_is_no_file_is_refused_and_named() {
    let dir = tempfile::tempdir().unwrap();
    let plan = dir.path().join("plan");
    let made = tessera_command(&["plan", "models/demo", "--out", path_text(&plan)]).output().unwrap();
    assert!(made.status.success(), "{}", both_outputs(&made));
    for kind in ["named pipe", "device", "sparse file", "folder", "bytes"] {
        let at = |name: &str| dir.path().join(format!("{kind}-{name}").replace(' ', "-"));
        for file in ["config.json", "stream.toml", "vocab.txt"] {
            let model = at(file);
            copy_dir(&repo_root().join("models/demo"), &model);
            replace_by(&model.join(file), kind);
            let out = at(&format!("{file}-out"));
            let args = ["stream", path_text(&model), "--chunks", "1", "--out", path_text(&out)];
            assert_refuses(&args, file);
            assert!(!out.exists(), "{kind} {file}");
        }
        for file in ["seal.json", "memory.json", "mapping.toml"] {
            let copy = at(file);
            copy_dir(&plan, &copy);
            replace_by(&copy.join(file), kind);
            assert_refuses(&["check", path_text(&copy)], file);
        }
        let other = at("other.toml");
        fs::write(&other, "").unwrap();
        replace_by(&other, kind);
        assert_refuses(&["plan", "models/demo", "--mapping", path_text(&other)], "other.toml");
        let search = ["plan", "models/wan2.1-14b", "--devices", "8", "--cluster"];
        assert_refuses(&[&search[..], &[path_text(&other)]].concat(), "other.toml");
    }
}

/// Checks that the binary refuses its input with a code and names the file.
fn assert_refuses(args: &[&str], file: &str) {
    let (status, text) = end_without_panic(tessera_command(args).spawn().unwrap());
    assert!(matches!(status, Some(1 | 2)), "{args:?}: {status:?} {text}");
    assert!(text.contains("error[T") && text.contains(file), "{args:?}: {text}");
}

#[test]
fn a_number_that_would_fill_the_memory_is_refused() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("run");
    let args = ["stream", "models/demo", "--device", "sim", "--chunks", "4294967295", "--out"];
    assert_refuses(&[&args[..], &[path_text(&out)]].concat(), "4294967295");
    let model = dir.path().join("model");
    copy_dir(&repo_root().join("models/demo"), &model);
    let config = fs::read_to_string(model.join("config.json")).unwrap();
    let (head, rest) = config.split_once("\"text_len\"").unwrap();
    let rest = &rest[rest.find([',', '}']).unwrap()..];
    fs::write(model.join("config.json"), format!("{head}\"text_len\": 1000000000{rest}")).unwrap();
    for device in ["cpu", "sim"] {
        let args = ["stream", path_text(&model), "--device", device, "--out", path_text(&out)];
        assert_refuses(&args, "text_len");
    }
    assert!(!out.exists());
}

/// Frames and a window that the model allows, with 400 GB of KV caches.
#[test]
fn a_plan_beyond_the_memory_of_the_host_is_refused_before_a_rank_starts() {
    let dir = tempfile::tempdir().unwrap();
    let (model, out) = (dir.path().join("model"), dir.path().join("run"));
    copy_dir(&repo_root().join("models/demo"), &model);
    let stream = fs::read_to_string(model.join("stream.toml")).unwrap();
    let large = stream.replace("width = 128", "width = 16384").replace("height = 128", "height = 16384");
    let large = large.replace("window_frames = 6", "window_frames = 96");
    fs::write(model.join("stream.toml"), &large).unwrap();
    let refused = |args: &[&str]| {
        let (status, text) = end_without_panic(tessera_command(args).spawn().unwrap());
        assert!(matches!(status, Some(1 | 2)), "{args:?}: {status:?} {text}");
        for part in ["error[T0804]", "the largest tensor", "bytes available"] {
            assert!(text.contains(part), "{part}: {text}");
        }
        assert!(!out.exists(), "{args:?}");
    };
    let out_text = path_text(&out);
    refused(&["stream", path_text(&model), "--out", out_text]);
    refused(&["stream", path_text(&model), "--mesh", "tp=2", "--oversubscribe", "--out", out_text]);
    // A saved plan is no way around the check.
    let plan = dir.path().join("plan");
    let planned = tessera_command(&["plan", path_text(&model), "--out", path_text(&plan)]).spawn().unwrap();
    assert_eq!(end_without_panic(planned).0, Some(0));
    refused(&["stream", "--plan", path_text(&plan), path_text(&model), "--out", out_text]);
}

#[test]
fn concurrent_runs_without_out_take_a_folder_each() {
    let dir = tempfile::tempdir().unwrap();
    let line = "for i in 1 2 3 4; do $T stream $M --chunks 1 -q --oversubscribe & P=\"$P $!\"; done
                S=0; for p in $P; do wait $p || S=$?; done; exit $S";
    let (status, text) = run_in_shell(dir.path(), line);
    assert_eq!(status, Some(0), "{text}");
    for n in 1..=4 {
        assert!(dir.path().join(format!("out/demo-{n}/report.html")).is_file(), "{n}: {text}");
    }
    // A run that is refused leaves no folder behind.
    let (status, text) = run_in_shell(dir.path(), "$T stream $M --chunks 0");
    assert!(status == Some(1) && !dir.path().join("out/demo-5").exists(), "{status:?} {text}");
}

#[test]
fn names_that_are_not_plain_text_are_refused_or_escaped() {
    let odd = OsStr::from_bytes(b"no\xff");
    let mut with_path = tessera_command(&["stream"]);
    let (status, text) = end_without_panic(with_path.arg(odd).spawn().unwrap());
    assert!(status == Some(2) && text.contains("T0030") && text.contains("UTF-8"), "{status:?} {text}");
    let mut with_rank = tessera_command(&["stream", "models/demo"]);
    let (status, text) = end_without_panic(with_rank.env("RANK", odd).spawn().unwrap());
    assert!(status == Some(2) && text.contains("T0034"), "{status:?} {text}");
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("a\u{1b}[2Jb");
    let args = ["stream", "models/demo", "--chunks", "1", "--out", path_text(&out)];
    let o = tessera_command(&args).output().unwrap();
    assert_no_panic(&o);
    let text = to_text(&o.stdout);
    assert!(o.status.success() && !text.contains('\u{1b}') && text.contains("a\\u{1b}[2Jb"), "{text}");
}

/// Starts one of two joined ranks with a secret.
fn start_joined_rank(dir: &Path, rank: &str, port: u16) -> Child {
    let args = ["stream", "models/demo", "--mesh", "tp=2", "--oversubscribe", "--chunks", "2", "-q"];
    let (secret, out) = (dir.join("secret"), dir.join(format!("run-{rank}")));
    let files = ["--secret", path_text(&secret), "--out", path_text(&out)];
    let mut command = tessera_command(&[&args[..], &files].concat());
    let place =
        [("RANK", rank), ("WORLD_SIZE", "2"), ("MASTER_ADDR", "127.0.0.1"), ("LOCAL_WORLD_SIZE", "2")];
    command.envs(place).env("MASTER_PORT", port.to_string()).spawn().unwrap()
}

#[test]
fn strangers_do_not_keep_joined_ranks_from_streaming() {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("secret"), [7; 32]).unwrap();
    fs::set_permissions(dir.path().join("secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let first = start_joined_rank(dir.path(), "0", port);
    let begun = Instant::now();
    let connect = || loop {
        match TcpStream::connect(("127.0.0.1", port)) {
            Ok(stream) => break stream,
            Err(e) => assert!(begun.elapsed() < TIMEOUT, "{e}"),
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    let idle: Vec<TcpStream> = (0..500).map(|_| connect()).collect();
    for _ in 0..300 {
        let mut stranger = connect();
        // Rank 0 answers bytes that are no handshake by closing, and this end is gone by then.
        let _ = stranger.write_all(&[0xa5; 4096]);
    }
    let second = start_joined_rank(dir.path(), "1", port);
    for rank in [first, second] {
        let (status, text) = end_without_panic(rank);
        assert_eq!(status, Some(0), "{text}");
        assert!(text.lines().count() < 60, "{text}");
    }
    drop(idle);
    assert!(dir.path().join("run-0/report.html").is_file());
}

#[test]
fn a_full_disk_ends_a_run_with_its_code() {
    let dir = tempfile::tempdir().unwrap();
    // A limit of the file size acts like a full disk; the binary turns the signal into an error.
    let line = "ulimit -f 300; $T stream $M --chunks 400 -q --png --out run";
    let (status, text) = run_in_shell(dir.path(), line);
    assert!(status == Some(17) && text.contains("T0014"), "{status:?} {text}");
    assert!(dir.path().join("run/clip.png").is_file());
    // A disk of its own, where this system lets a test mount one.
    let line = "mkdir small && mount -t tmpfs -o size=600k none small && \
                { $T stream $M --chunks 400 -q --out small/run; echo status $?; }";
    let mounted = run_in_shell(dir.path(), &format!("unshare -rm bash -c '{line}' || echo no mount"));
    if !mounted.1.contains("no mount") {
        assert!(mounted.1.contains("status 17") && mounted.1.contains("T0014"), "{}", mounted.1);
    }
}
