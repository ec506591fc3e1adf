//! Ranks that somebody else started: they join, stream the same as spawned ranks, and end together.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use support::{field, root, signal, text};

/// A long stream is cut by the test, not by its end.
const LONG: &str = "5000";

/// A world to be: its folder, its master's address, its size.
struct World {
    dir: tempfile::TempDir,
    master: (String, u16),
    size: u32,
}

impl World {
    fn new(size: u32) -> World {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let world = World { dir: tempfile::tempdir().unwrap(), master: ("127.0.0.1".into(), port), size };
        world.private("secret", b"0123456789abcdef0123456789abcdef");
        world
    }

    fn private(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_string()
    }

    fn out(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// A rank of the demo model, behind a prefix of the command line such as `ip netns exec NAME`.
    fn behind(&self, prefix: &[&str], rank: u32, secret: &str, more: &[&str]) -> Child {
        let binary = env!("CARGO_BIN_EXE_tessera");
        let (program, before) = prefix.split_first().map_or((binary, &[][..]), |(p, b)| (*p, b));
        let mut c = Command::new(program);
        c.args(before);
        if !prefix.is_empty() {
            c.arg(binary);
        }
        c.current_dir(root()).args(["stream", "models/demo", "--format", "json", "--quiet"]);
        if !more.contains(&"--join-timeout") {
            c.args(["--join-timeout", "60"]);
        }
        if !secret.is_empty() {
            c.args(["--secret", secret]);
        }
        let other = self.dir.path().join(format!("rank-{rank}"));
        c.arg("--out").arg(if rank == 0 { self.out() } else { other });
        c.args(more).env("RANK", rank.to_string()).env("WORLD_SIZE", self.size.to_string());
        c.env("MASTER_ADDR", &self.master.0).env("MASTER_PORT", self.master.1.to_string());
        c.env("LOCAL_WORLD_SIZE", self.size.to_string());
        c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn rank(&self, rank: u32, more: &[&str]) -> Child {
        self.behind(&[], rank, self.dir.path().join("secret").to_str().unwrap(), more)
    }

    /// Waits until the run has delivered something.
    fn streams(&self) {
        let begun = Instant::now();
        let record = self.out().join("record.jsonl");
        while fs::read_to_string(&record).map_or(0, |r| r.lines().count()) < 4 {
            assert!(begun.elapsed() < Duration::from_secs(120), "no chunk came");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn ends(ranks: Vec<Child>) -> Vec<Output> {
    ranks.into_iter().map(|r| r.wait_with_output().unwrap()).collect()
}

fn spawned(dir: &Path, more: &[&str]) -> String {
    let out = dir.join("spawned");
    let o = Command::new(env!("CARGO_BIN_EXE_tessera"))
        .current_dir(root())
        .args(["stream", "models/demo", "--format", "json", "--quiet", "--oversubscribe", "--out"])
        .arg(&out)
        .args(more)
        .output()
        .unwrap();
    assert_eq!(o.status.code(), Some(0), "{}", text(&o.stderr));
    field(&text(&o.stdout), "golden")
}

#[test]
fn ranks_that_join_stream_what_spawned_ranks_do() {
    for (size, more) in [
        (2, &["--mesh", "tp=2", "--chunks", "3", "--seed", "4"][..]),
        (
            3,
            &[
                "--mesh",
                "tp=2",
                "--topology",
                "pp1",
                "--cache",
                "recompute",
                "--chunks",
                "3",
                "--cut-at",
                "2",
            ],
        ),
    ] {
        let world = World::new(size);
        // In any order.
        let ranks = ends((0..size).rev().map(|r| world.rank(r, more)).collect());
        for o in &ranks {
            assert_eq!(o.status.code(), Some(0), "{}{}", text(&o.stdout), text(&o.stderr));
            assert!(o.stderr.is_empty(), "{}", text(&o.stderr));
        }
        let report = text(&ranks.last().unwrap().stdout);
        assert_eq!(field(&report, "chunks"), "3");
        assert_eq!(field(&report, "golden"), spawned(world.dir.path(), more));
        for o in &ranks[..ranks.len() - 1] {
            assert!(o.stdout.is_empty(), "only rank 0 reports: {}", text(&o.stdout));
        }
    }
}

#[test]
fn ranks_speak_tls_where_certificates_are_given() {
    let world = World::new(2);
    let authority = || {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let (ours, theirs) = (authority(), authority());
    let ca = world.private("ca.pem", ours.pem().as_bytes());
    let member = |name: &str, of: &CertifiedIssuer<'static, KeyPair>| {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![name.to_string()]).unwrap().signed_by(&key, of).unwrap();
        let cert = world.private(&format!("{name}.pem"), certificate.pem().as_bytes());
        let key = world.private(&format!("{name}.key"), key.serialize_pem().as_bytes());
        ["--tls-ca".to_string(), ca.clone(), "--tls-cert".into(), cert, "--tls-key".into(), key]
    };
    let run = |files: &[String], rank, more: &[&str]| {
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        world.behind(&[], rank, "", &[&files[..], &["--mesh", "tp=2", "--chunks", "2"], more].concat())
    };
    let zero = run(&member("zero", &ours), 0, &[]);
    let stranger = run(&member("stranger", &theirs), 1, &[]).wait_with_output().unwrap();
    assert_eq!(stranger.status.code(), Some(19));
    let said = text(&stranger.stdout) + &text(&stranger.stderr);
    assert!(said.contains("T0756"), "{said}");
    let one = run(&member("one", &ours), 1, &[]).wait_with_output().unwrap();
    assert_eq!(one.status.code(), Some(0), "{:?} {}{}", one.status, text(&one.stdout), text(&one.stderr));
    let zero = zero.wait_with_output().unwrap();
    assert_eq!(zero.status.code(), Some(0), "{}", text(&zero.stderr));
    assert!(text(&zero.stderr).contains("T0756"), "the stranger is told of: {}", text(&zero.stderr));
    assert_eq!(
        field(&text(&zero.stdout), "golden"),
        spawned(world.dir.path(), &["--mesh", "tp=2", "--chunks", "2"])
    );
}

#[test]
fn what_does_not_fit_together_is_refused_before_anything_is_written() {
    let mesh = ["--mesh", "tp=2", "--chunks", "2"];
    let says = |o: &Output, words: &[&str]| {
        let said = text(&o.stdout) + &text(&o.stderr);
        assert_ne!(o.status.code(), Some(0), "{said}");
        assert!(words.iter().all(|w| said.contains(w)), "{words:?} in {said}");
    };
    let world = World::new(2);
    let [zero, one] = [(0, "0"), (1, "750")].map(|(r, s)| {
        let steps = ["--steps", if s == "0" { "1000,500" } else { "1000,750,500" }];
        world.rank(r, &[&mesh[..], &steps].concat())
    });
    for o in ends(vec![zero, one]) {
        assert_eq!(o.status.code(), Some(13));
        says(&o, &["T0740", "plan digest", "rank 0", "rank 1"]);
    }
    assert!(!world.out().exists());
    // By itself.
    let alone = |o: Child| o.wait_with_output().unwrap();
    says(&alone(world.rank(2, &mesh)), &["T0034", "there is no rank 2 in a world of 2"]);
    says(
        &alone(world.rank(1, &["--mesh", "tp=4"])),
        &["T0034", "the plan is for 4 ranks and the world has 2"],
    );
    says(&alone(world.behind(&[], 1, "", &mesh)), &["T0034", "--secret"]);
    let short = world.private("short", b"short");
    says(&alone(world.behind(&[], 1, &short, &mesh)), &["T0035", "5 bytes", "32 bytes"]);
    let open = world.private("open", &[7; 32]);
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    says(&alone(world.behind(&[], 1, &open, &mesh)), &["T0035", "0644", "chmod 600"]);
    let brief = [&mesh[..], &["--join-timeout", "1"]].concat();
    says(&alone(world.rank(1, &brief)), &["T0758", "rank 0 at 127.0.0.1"]);
    let _taken = TcpListener::bind(("127.0.0.1", world.master.1)).unwrap();
    says(&alone(world.rank(0, &mesh)), &["T0758", "cannot listen"]);
    assert!(!world.out().exists());
}

/// Kills one rank while all stream; how long until the others are gone.
fn killed(size: u32, which: u32, more: &[&str]) -> (Duration, Vec<Output>) {
    let world = World::new(size);
    let mut ranks: Vec<Child> =
        (0..size).map(|r| world.rank(r, &[more, &["--chunks", LONG]].concat())).collect();
    world.streams();
    let begun = Instant::now();
    ranks[which as usize].kill().unwrap();
    let outputs = ends(ranks);
    (begun.elapsed(), outputs)
}

#[test]
fn one_rank_lost_ends_all() {
    for (size, which, more) in [
        (2, 0, &["--mesh", "tp=2"][..]),
        (2, 1, &["--mesh", "tp=2"]),
        (3, 1, &["--mesh", "tp=2", "--topology", "pp1"]),
        (3, 2, &["--mesh", "tp=2", "--topology", "pp1"]),
    ] {
        let (took, outputs) = killed(size, which, more);
        assert!(took < Duration::from_secs(10), "{took:?}");
        for (rank, o) in outputs.iter().enumerate().filter(|(r, _)| *r != which as usize) {
            let said = text(&o.stdout) + &text(&o.stderr);
            assert!(matches!(o.status.code(), Some(10..30)), "rank {rank} of {size}: {:?} {said}", o.status);
            assert!(said.contains(&format!("rank {which}")), "rank {rank} of {size}: {said}");
        }
    }
}

#[test]
fn a_request_to_stop_ends_at_a_chunk() {
    let world = World::new(2);
    let more = ["--mesh", "tp=2", "--chunks", LONG];
    let (zero, one) = (world.rank(0, &more), world.rank(1, &more));
    world.streams();
    assert!(Command::new("kill").args(["-TERM", &zero.id().to_string()]).status().unwrap().success());
    let outputs = ends(vec![zero, one]);
    let codes: Vec<_> = outputs.iter().map(|o| o.status.code()).collect();
    assert_eq!(codes, [Some(130), Some(0)], "{}", text(&outputs[1].stderr));
    assert_eq!(field(&text(&outputs[0].stdout), "interrupted"), "true");
}

fn last_line(path: &Path) -> String {
    fs::read_to_string(path).unwrap().lines().last().unwrap().to_string()
}

#[test]
fn a_request_that_reaches_every_rank_drains() {
    for (size, name, more) in [
        (2, "INT", &["--mesh", "tp=2"][..]),
        (3, "TERM", &["--mesh", "tp=2", "--topology", "pp1", "--cache", "recompute"]),
    ] {
        let world = World::new(size);
        let more = [more, &["--chunks", LONG]].concat();
        let ranks: Vec<Child> = (0..size).map(|r| world.rank(r, &more)).collect();
        world.streams();
        // The others first: what they do must not hang on what rank 0 has done.
        ranks.iter().rev().for_each(|r| signal(r.id(), name));
        for (rank, o) in ends(ranks).iter().enumerate() {
            let said = text(&o.stdout) + &text(&o.stderr);
            assert_eq!(o.status.code(), Some(if rank == 0 { 130 } else { 0 }), "rank {rank}: {said}");
            assert!(!said.contains("failed["), "rank {rank}: {said}");
        }
        let end = last_line(&world.out().join("record.jsonl"));
        assert!(end.contains("interrupted"), "{end}");
    }
}

#[test]
fn a_second_request_to_ranks_that_joined_ends_them() {
    for all in [false, true] {
        let world = World::new(2);
        // A chunk that lasts: the second request comes before its end.
        let more = ["--mesh", "tp=2", "--chunks", LONG, "--model-generate", "8000"];
        let ranks: Vec<Child> = (0..2).map(|r| world.rank(r, &more)).collect();
        let begun = Instant::now();
        let flight = world.out().join("flight/rank-0.jsonl");
        while !fs::read_to_string(&flight).is_ok_and(|f| f.contains("commit")) {
            assert!(begun.elapsed() < Duration::from_secs(120), "no call was committed");
            thread::sleep(Duration::from_millis(20));
        }
        let asked: Vec<&Child> = ranks.iter().take(if all { 2 } else { 1 }).collect();
        asked.iter().rev().for_each(|r| signal(r.id(), "INT"));
        thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        asked.iter().rev().for_each(|r| signal(r.id(), "INT"));
        let outputs = ends(ranks);
        assert!(begun.elapsed() < Duration::from_secs(4), "{:?}", begun.elapsed());
        for (rank, o) in outputs.iter().enumerate() {
            let said = text(&o.stdout) + &text(&o.stderr);
            assert_eq!(o.status.code(), Some(130), "rank {rank}, all {all}: {said}");
            assert!(!said.contains("T0749") && !said.contains("T0742"), "rank {rank}, all {all}: {said}");
        }
        let report = text(&outputs[0].stdout);
        assert_eq!(
            (field(&report, "interrupted"), field(&report, "failure")),
            ("true".into(), "null".into())
        );
        let end = last_line(&world.out().join("record.jsonl"));
        assert!(end.contains("interrupted"), "{end}");
    }
}

#[test]
fn a_request_to_stop_while_ranks_are_waited_for_is_no_refusal() {
    let world = World::new(2);
    let zero = world.rank(0, &["--mesh", "tp=2", "--chunks", "2"]);
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", world.master.1)).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "rank 0 does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    signal(zero.id(), "INT");
    let o = zero.wait_with_output().unwrap();
    let said = text(&o.stdout) + &text(&o.stderr);
    assert_eq!(o.status.code(), Some(130), "{said}");
    assert!(said.contains("stopping before all ranks have met"), "{said}");
    assert!(said.contains("stopped on request") && !said.contains("chunk under way"), "{said}");
    assert!(!world.out().exists());
}

#[test]
fn options_of_ranks_that_join_are_refused_elsewhere() {
    let o = Command::new(env!("CARGO_BIN_EXE_tessera"))
        .current_dir(root())
        .args(["stream", "models/demo", "--join-timeout", "5", "--chunks", "1"])
        .env_remove("RANK")
        .env_remove("WORLD_SIZE")
        .output()
        .unwrap();
    assert_eq!(o.status.code(), Some(2));
    assert!(text(&o.stderr).contains("--join-timeout is for ranks that join"), "{}", text(&o.stderr));
}

/// Two namespaces with one cable between them; gone when dropped.
struct Cable(String);

impl Cable {
    fn ip(args: &str) {
        let o = Command::new("ip").args(args.split(' ')).output().unwrap();
        assert!(o.status.success(), "ip {args}: {}", text(&o.stderr));
    }

    fn new() -> Cable {
        let n = format!("ts{}", std::process::id() % 100_000);
        for side in ["a", "b"] {
            Cable::ip(&format!("netns add {n}{side}"));
        }
        let cable = Cable(n);
        let n = &cable.0;
        Cable::ip(&format!("link add {n}va netns {n}a type veth peer name {n}vb netns {n}b"));
        for (side, host) in [("a", 1), ("b", 2)] {
            Cable::ip(&format!("-n {n}{side} addr add 10.99.1.{host}/24 dev {n}v{side}"));
            Cable::ip(&format!("-n {n}{side} link set lo up"));
            Cable::ip(&format!("-n {n}{side} link set {n}v{side} up"));
        }
        cable
    }

    fn cut(&self) {
        Cable::ip(&format!("-n {0}b link set {0}vb down", self.0));
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        for side in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{side}", self.0)]).output();
        }
    }
}

/// Prints how long each side took: `cargo test -p tessera-cli --test join -- --ignored --nocapture`, as root.
#[test]
#[ignore = "needs root and network namespaces"]
fn a_cut_cable_between_two_hosts_ends_both() {
    let cable = Cable::new();
    let world = World { master: ("10.99.1.1".into(), 29_400), ..World::new(2) };
    let secret = world.dir.path().join("secret");
    let more = ["--mesh", "tp=2", "--chunks", LONG];
    let rank = |r: u32, side: &str| {
        let prefix = ["ip", "netns", "exec", &format!("{}{side}", cable.0)];
        world.behind(&prefix, r, secret.to_str().unwrap(), &more)
    };
    let (zero, one) = (rank(0, "a"), rank(1, "b"));
    world.streams();
    cable.cut();
    let begun = Instant::now();
    let took = thread::scope(|s| {
        let wait = |child: Child| (child.wait_with_output().unwrap(), begun.elapsed());
        let threads = [zero, one].map(|child| s.spawn(move || wait(child)));
        threads.map(|t| t.join().unwrap())
    });
    for (rank, (o, took)) in took.iter().enumerate() {
        println!("rank {rank} was gone after {:.2} s", took.as_secs_f64());
        let said = text(&o.stdout) + &text(&o.stderr);
        assert!(matches!(o.status.code(), Some(10..30)), "rank {rank}: {:?} {said}", o.status);
        assert!(*took < Duration::from_secs(10), "rank {rank} took {took:?}");
    }
}
