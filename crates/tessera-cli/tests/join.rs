//! Tests of ranks that are started externally: they join, stream the same result as spawned ranks,
//! and end together.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

mod support;

use std::net::{TcpListener, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant};
use std::{fs, thread};

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};

use support::{json_field, repo_root, send_signal, to_text};

/// Number of chunks of a stream that the test stops before its end.
const MANY_CHUNKS: &str = "5000";

/// A distributed run to be started: its folder, the port of rank 0, and its number of ranks.
struct DistributedRun {
    dir: tempfile::TempDir,
    master: (String, u16),
    size: u32,
}

impl DistributedRun {
    fn new(size: u32) -> DistributedRun {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let world =
            DistributedRun { dir: tempfile::tempdir().unwrap(), master: ("127.0.0.1".into(), port), size };
        world.write_private("secret", b"0123456789abcdef0123456789abcdef");
        world
    }

    fn write_private(&self, name: &str, bytes: &[u8]) -> String {
        let path = self.dir.path().join(name);
        fs::write(&path, bytes).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).unwrap();
        path.to_str().unwrap().to_string()
    }

    fn out_dir(&self) -> PathBuf {
        self.dir.path().join("out")
    }

    /// Starts a rank of the demo model; `prefix` precedes the command line, for example `ip netns
    /// exec NAME`.
    fn start_rank_with_prefix(&self, prefix: &[&str], rank: u32, secret: &str, more: &[&str]) -> Child {
        let binary = env!("CARGO_BIN_EXE_tessera");
        let (program, before) = prefix.split_first().map_or((binary, &[][..]), |(p, b)| (*p, b));
        let mut c = Command::new(program);
        c.args(before);
        if !prefix.is_empty() {
            c.arg(binary);
        }
        c.current_dir(repo_root()).args(["stream", "models/demo", "--format", "json", "--quiet"]);
        if !more.contains(&"--join-timeout") {
            c.args(["--join-timeout", "60"]);
        }
        if !secret.is_empty() {
            c.args(["--secret", secret]);
        }
        let other = self.dir.path().join(format!("rank-{rank}"));
        c.arg("--out").arg(if rank == 0 { self.out_dir() } else { other });
        c.args(more).env("RANK", rank.to_string()).env("WORLD_SIZE", self.size.to_string());
        c.env("MASTER_ADDR", &self.master.0).env("MASTER_PORT", self.master.1.to_string());
        c.env("LOCAL_WORLD_SIZE", self.size.to_string());
        c.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
    }

    fn start_rank(&self, rank: u32, more: &[&str]) -> Child {
        self.start_rank_with_prefix(&[], rank, self.dir.path().join("secret").to_str().unwrap(), more)
    }

    /// Waits until the run has written output.
    fn wait_for_output(&self) {
        let begun = Instant::now();
        let record = self.out_dir().join("record.jsonl");
        while fs::read_to_string(&record).map_or(0, |r| r.lines().count()) < 4 {
            assert!(begun.elapsed() < Duration::from_secs(120), "no chunk came");
            thread::sleep(Duration::from_millis(20));
        }
    }
}

fn wait_for_all(ranks: Vec<Child>) -> Vec<Output> {
    ranks.into_iter().map(|r| r.wait_with_output().unwrap()).collect()
}

fn stream_spawned(dir: &Path, more: &[&str]) -> String {
    let out = dir.join("spawned");
    let o = Command::new(env!("CARGO_BIN_EXE_tessera"))
        .current_dir(repo_root())
        .args(["stream", "models/demo", "--format", "json", "--quiet", "--oversubscribe", "--out"])
        .arg(&out)
        .args(more)
        .output()
        .unwrap();
    assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    json_field(&to_text(&o.stdout), "golden")
}

#[test]
fn joined_ranks_stream_the_same_as_spawned_ranks() {
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
        let world = DistributedRun::new(size);
        // The ranks start in any order.
        let ranks = wait_for_all((0..size).rev().map(|r| world.start_rank(r, more)).collect());
        for o in &ranks {
            assert_eq!(o.status.code(), Some(0), "{}{}", to_text(&o.stdout), to_text(&o.stderr));
            assert!(o.stderr.is_empty(), "{}", to_text(&o.stderr));
        }
        let report = to_text(&ranks.last().unwrap().stdout);
        assert_eq!(json_field(&report, "chunks"), "3");
        assert_eq!(json_field(&report, "golden"), stream_spawned(world.dir.path(), more));
        for o in &ranks[..ranks.len() - 1] {
            assert!(o.stdout.is_empty(), "only rank 0 reports: {}", to_text(&o.stdout));
        }
    }
}

#[test]
fn ranks_use_tls_if_certificates_are_given() {
    let world = DistributedRun::new(2);
    let authority = || {
        let mut params = CertificateParams::new(vec![]).unwrap();
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap()
    };
    let (ours, theirs) = (authority(), authority());
    let ca = world.write_private("ca.pem", ours.pem().as_bytes());
    let member = |name: &str, of: &CertifiedIssuer<'static, KeyPair>| {
        let key = KeyPair::generate().unwrap();
        let certificate =
            CertificateParams::new(vec![name.to_string()]).unwrap().signed_by(&key, of).unwrap();
        let cert = world.write_private(&format!("{name}.pem"), certificate.pem().as_bytes());
        let key = world.write_private(&format!("{name}.key"), key.serialize_pem().as_bytes());
        ["--tls-ca".to_string(), ca.clone(), "--tls-cert".into(), cert, "--tls-key".into(), key]
    };
    let run = |files: &[String], rank, more: &[&str]| {
        let files: Vec<&str> = files.iter().map(String::as_str).collect();
        world.start_rank_with_prefix(
            &[],
            rank,
            "",
            &[&files[..], &["--mesh", "tp=2", "--chunks", "2"], more].concat(),
        )
    };
    let zero = run(&member("zero", &ours), 0, &[]);
    let stranger = run(&member("stranger", &theirs), 1, &[]).wait_with_output().unwrap();
    assert_eq!(stranger.status.code(), Some(19));
    let said = to_text(&stranger.stdout) + &to_text(&stranger.stderr);
    assert!(said.contains("T0756"), "{said}");
    let one = run(&member("one", &ours), 1, &[]).wait_with_output().unwrap();
    assert_eq!(
        one.status.code(),
        Some(0),
        "{:?} {}{}",
        one.status,
        to_text(&one.stdout),
        to_text(&one.stderr)
    );
    let zero = zero.wait_with_output().unwrap();
    assert_eq!(zero.status.code(), Some(0), "{}", to_text(&zero.stderr));
    assert!(
        to_text(&zero.stderr).contains("T0756"),
        "rank 0 reports the unknown certificate: {}",
        to_text(&zero.stderr)
    );
    assert_eq!(
        json_field(&to_text(&zero.stdout), "golden"),
        stream_spawned(world.dir.path(), &["--mesh", "tp=2", "--chunks", "2"])
    );
}

#[test]
fn mismatched_ranks_are_rejected_before_anything_is_written() {
    let mesh = ["--mesh", "tp=2", "--chunks", "2"];
    let says = |o: &Output, words: &[&str]| {
        let said = to_text(&o.stdout) + &to_text(&o.stderr);
        assert_ne!(o.status.code(), Some(0), "{said}");
        assert!(words.iter().all(|w| said.contains(w)), "{words:?} in {said}");
    };
    let world = DistributedRun::new(2);
    let [zero, one] = [(0, "0"), (1, "750")].map(|(r, s)| {
        let steps = ["--steps", if s == "0" { "1000,500" } else { "1000,750,500" }];
        world.start_rank(r, &[&mesh[..], &steps].concat())
    });
    for o in wait_for_all(vec![zero, one]) {
        assert_eq!(o.status.code(), Some(13));
        says(&o, &["T0740", "plan digest", "rank 0", "rank 1"]);
    }
    assert!(!world.out_dir().exists());
    // Errors that one rank finds by itself.
    let alone = |o: Child| o.wait_with_output().unwrap();
    says(&alone(world.start_rank(2, &mesh)), &["T0034", "there is no rank 2 in a world of 2"]);
    says(
        &alone(world.start_rank(1, &["--mesh", "tp=4"])),
        &["T0068", "4 ranks cannot be divided among 2 processes"],
    );
    says(&alone(world.start_rank_with_prefix(&[], 1, "", &mesh)), &["T0034", "--secret"]);
    let short = world.write_private("short", b"short");
    says(&alone(world.start_rank_with_prefix(&[], 1, &short, &mesh)), &["T0035", "5 bytes", "32 bytes"]);
    let open = world.write_private("open", &[7; 32]);
    fs::set_permissions(&open, fs::Permissions::from_mode(0o644)).unwrap();
    says(&alone(world.start_rank_with_prefix(&[], 1, &open, &mesh)), &["T0035", "0644", "chmod 600"]);
    let brief = [&mesh[..], &["--join-timeout", "1"]].concat();
    says(&alone(world.start_rank(1, &brief)), &["T0758", "rank 0 at 127.0.0.1"]);
    let _taken = TcpListener::bind(("127.0.0.1", world.master.1)).unwrap();
    says(&alone(world.start_rank(0, &mesh)), &["T0758", "cannot listen"]);
    assert!(!world.out_dir().exists());
}

// proves: D-17, D-18
#[test]
fn ranks_of_two_builds_or_two_environments_do_not_run_together() {
    let mesh = ["--mesh", "tp=2", "--chunks", "2"];
    let both_say = |world: &DistributedRun, prefix: &[&str], words: &[&str]| {
        let secret = world.dir.path().join("secret");
        let one = world.start_rank_with_prefix(prefix, 1, secret.to_str().unwrap(), &mesh);
        for o in wait_for_all(vec![world.start_rank(0, &mesh), one]) {
            let said = to_text(&o.stdout) + &to_text(&o.stderr);
            assert_eq!(o.status.code(), Some(13), "{said}");
            assert!(words.iter().all(|w| said.contains(w)), "{words:?} in {said}");
        }
    };
    // A build with other bytes and the same version.
    let world = DistributedRun::new(2);
    let other = world.dir.path().join("tessera");
    let mut bytes = fs::read(env!("CARGO_BIN_EXE_tessera")).unwrap();
    bytes.push(0);
    fs::write(&other, bytes).unwrap();
    fs::set_permissions(&other, fs::Permissions::from_mode(0o755)).unwrap();
    let script = format!("exec {} \"$@\"", other.display());
    both_say(&world, &["sh", "-c", &script], &["T0740", "`build`", "rank 0", "rank 1"]);
    let words = ["T0740", "environment: NCCL_ALGO", "not set on rank 0", "`Ring` on rank 1"];
    both_say(&DistributedRun::new(2), &["env", "NCCL_ALGO=Ring"], &words);
}

/// Kills one rank while all ranks stream, and returns the time until the others have ended, with
/// their outputs.
fn kill_rank(size: u32, which: u32, more: &[&str]) -> (Duration, Vec<Output>) {
    let world = DistributedRun::new(size);
    let mut ranks: Vec<Child> =
        (0..size).map(|r| world.start_rank(r, &[more, &["--chunks", MANY_CHUNKS]].concat())).collect();
    world.wait_for_output();
    let begun = Instant::now();
    ranks[which as usize].kill().unwrap();
    let outputs = wait_for_all(ranks);
    (begun.elapsed(), outputs)
}

#[test]
fn a_lost_rank_ends_all_ranks() {
    for (size, which, more) in [
        (2, 0, &["--mesh", "tp=2"][..]),
        (2, 1, &["--mesh", "tp=2"]),
        (3, 1, &["--mesh", "tp=2", "--topology", "pp1"]),
        (3, 2, &["--mesh", "tp=2", "--topology", "pp1"]),
    ] {
        let (took, outputs) = kill_rank(size, which, more);
        assert!(took < Duration::from_secs(10), "{took:?}");
        for (rank, o) in outputs.iter().enumerate().filter(|(r, _)| *r != which as usize) {
            let said = to_text(&o.stdout) + &to_text(&o.stderr);
            assert!(matches!(o.status.code(), Some(10..30)), "rank {rank} of {size}: {:?} {said}", o.status);
            assert!(said.contains(&format!("rank {which}")), "rank {rank} of {size}: {said}");
        }
    }
}

#[test]
fn a_stop_request_ends_at_a_chunk() {
    let world = DistributedRun::new(2);
    let more = ["--mesh", "tp=2", "--chunks", MANY_CHUNKS];
    let (zero, one) = (world.start_rank(0, &more), world.start_rank(1, &more));
    world.wait_for_output();
    assert!(Command::new("kill").args(["-TERM", &zero.id().to_string()]).status().unwrap().success());
    let outputs = wait_for_all(vec![zero, one]);
    let codes: Vec<_> = outputs.iter().map(|o| o.status.code()).collect();
    assert_eq!(codes, [Some(130), Some(0)], "{}", to_text(&outputs[1].stderr));
    assert_eq!(json_field(&to_text(&outputs[0].stdout), "interrupted"), "true");
}

fn last_line(path: &Path) -> String {
    fs::read_to_string(path).unwrap().lines().last().unwrap().to_string()
}

#[test]
fn a_stop_request_to_every_rank_drains() {
    for (size, name, more) in [
        (2, "INT", &["--mesh", "tp=2"][..]),
        (3, "TERM", &["--mesh", "tp=2", "--topology", "pp1", "--cache", "recompute"]),
    ] {
        let world = DistributedRun::new(size);
        let more = [more, &["--chunks", MANY_CHUNKS]].concat();
        let ranks: Vec<Child> = (0..size).map(|r| world.start_rank(r, &more)).collect();
        world.wait_for_output();
        // The other ranks get the signal first: their reaction must not depend on rank 0's.
        ranks.iter().rev().for_each(|r| send_signal(r.id(), name));
        for (rank, o) in wait_for_all(ranks).iter().enumerate() {
            let said = to_text(&o.stdout) + &to_text(&o.stderr);
            assert_eq!(o.status.code(), Some(if rank == 0 { 130 } else { 0 }), "rank {rank}: {said}");
            assert!(!said.contains("failed["), "rank {rank}: {said}");
        }
        let end = last_line(&world.out_dir().join("record.jsonl"));
        assert!(end.contains("interrupted"), "{end}");
    }
}

#[test]
fn a_second_stop_request_ends_joined_ranks() {
    for all in [false, true] {
        let world = DistributedRun::new(2);
        // Each chunk takes long enough for the second request to come before its end, and far longer than the end of a
        // busy host's ranks.
        let more = ["--mesh", "tp=2", "--chunks", MANY_CHUNKS, "--min-generate-ms", "60000"];
        let ranks: Vec<Child> = (0..2).map(|r| world.start_rank(r, &more)).collect();
        let begun = Instant::now();
        let flight = world.out_dir().join("flight/rank-0.jsonl");
        while !fs::read_to_string(&flight).is_ok_and(|f| f.contains("commit")) {
            assert!(begun.elapsed() < Duration::from_secs(120), "no call was committed");
            thread::sleep(Duration::from_millis(20));
        }
        let asked: Vec<&Child> = ranks.iter().take(if all { 2 } else { 1 }).collect();
        asked.iter().rev().for_each(|r| send_signal(r.id(), "INT"));
        thread::sleep(Duration::from_millis(300));
        let begun = Instant::now();
        asked.iter().rev().for_each(|r| send_signal(r.id(), "INT"));
        let outputs = wait_for_all(ranks);
        assert!(begun.elapsed() < Duration::from_secs(30), "{:?}", begun.elapsed());
        for (rank, o) in outputs.iter().enumerate() {
            let said = to_text(&o.stdout) + &to_text(&o.stderr);
            assert_eq!(o.status.code(), Some(130), "rank {rank}, all {all}: {said}");
            assert!(!said.contains("T0749") && !said.contains("T0742"), "rank {rank}, all {all}: {said}");
        }
        let report = to_text(&outputs[0].stdout);
        assert_eq!(
            (json_field(&report, "interrupted"), json_field(&report, "failure")),
            ("true".into(), "null".into())
        );
        let end = last_line(&world.out_dir().join("record.jsonl"));
        assert!(end.contains("interrupted"), "{end}");
    }
}

#[test]
fn a_stop_request_while_ranks_join_is_not_an_error() {
    let world = DistributedRun::new(2);
    let zero = world.start_rank(0, &["--mesh", "tp=2", "--chunks", "2"]);
    let begun = Instant::now();
    while TcpStream::connect(("127.0.0.1", world.master.1)).is_err() {
        assert!(begun.elapsed() < Duration::from_secs(60), "rank 0 does not listen");
        thread::sleep(Duration::from_millis(20));
    }
    send_signal(zero.id(), "INT");
    let o = zero.wait_with_output().unwrap();
    let said = to_text(&o.stdout) + &to_text(&o.stderr);
    assert_eq!(o.status.code(), Some(130), "{said}");
    assert!(said.contains("stopping before all ranks have joined"), "{said}");
    assert!(said.contains("stopped on request") && !said.contains("current chunk"), "{said}");
    assert!(!world.out_dir().exists());
}

#[test]
fn join_options_are_rejected_without_rank_variables() {
    let o = Command::new(env!("CARGO_BIN_EXE_tessera"))
        .current_dir(repo_root())
        .args(["stream", "models/demo", "--join-timeout", "5", "--chunks", "1"])
        .env_remove("RANK")
        .env_remove("WORLD_SIZE")
        .output()
        .unwrap();
    assert_eq!(o.status.code(), Some(2));
    assert!(
        to_text(&o.stderr).contains("--join-timeout requires RANK and WORLD_SIZE"),
        "{}",
        to_text(&o.stderr)
    );
}

/// Two network namespaces connected by one veth pair, removed on drop.
struct NetnsLink(String);

impl NetnsLink {
    fn run_ip(args: &str) {
        let o = Command::new("ip").args(args.split(' ')).output().unwrap();
        assert!(o.status.success(), "ip {args}: {}", to_text(&o.stderr));
    }

    fn new() -> NetnsLink {
        let n = format!("ts{}", std::process::id() % 100_000);
        for side in ["a", "b"] {
            NetnsLink::run_ip(&format!("netns add {n}{side}"));
        }
        let cable = NetnsLink(n);
        let n = &cable.0;
        NetnsLink::run_ip(&format!("link add {n}va netns {n}a type veth peer name {n}vb netns {n}b"));
        for (side, host) in [("a", 1), ("b", 2)] {
            NetnsLink::run_ip(&format!("-n {n}{side} addr add 10.99.1.{host}/24 dev {n}v{side}"));
            NetnsLink::run_ip(&format!("-n {n}{side} link set lo up"));
            NetnsLink::run_ip(&format!("-n {n}{side} link set {n}v{side} up"));
        }
        cable
    }

    fn set_down(&self) {
        NetnsLink::run_ip(&format!("-n {0}b link set {0}vb down", self.0));
    }
}

impl Drop for NetnsLink {
    fn drop(&mut self) {
        for side in ["a", "b"] {
            let _ = Command::new("ip").args(["netns", "del", &format!("{}{side}", self.0)]).output();
        }
    }
}

/// Returns the values of the keys of this prefix that a rank reported at its start.
fn startup_values(record: &str, rank: u32, prefix: &str) -> Vec<String> {
    let lines = record.lines().map(|l| serde_json::from_str::<serde_json::Value>(l).unwrap());
    let startups = lines.filter(|l| l["startup"]["rank"] == rank);
    let keys = startups.flat_map(|l| l["startup"]["keys"].as_array().cloned().unwrap_or_default());
    let named = keys.filter(|k| k[0].as_str().unwrap().starts_with(prefix));
    named.map(|k| k[1].as_str().unwrap().to_string()).collect()
}

#[test]
fn the_record_states_the_transport_of_each_group_beside_the_planned_path() {
    let spawned = tempfile::tempdir().unwrap();
    stream_spawned(spawned.path(), &["--mesh", "tp=2", "--chunks", "1", "--hosts", "2"]);
    let world = DistributedRun::new(2);
    let more = ["--mesh", "tp=2", "--chunks", "1", "--hosts", "1"];
    for o in wait_for_all((0..2).map(|rank| world.start_rank(rank, &more)).collect()) {
        assert_eq!(o.status.code(), Some(0), "{}", to_text(&o.stderr));
    }
    let read = |dir: &Path, file: &str| fs::read_to_string(dir.join(file)).unwrap();
    let (spawned, joined) = (spawned.path().join("spawned"), world.out_dir());
    for rank in 0..2 {
        let values = |dir: &Path| {
            startup_values(&read(dir, "record.jsonl"), rank, "transport: group over tp of ranks 0, 1")
        };
        assert_eq!(values(&spawned), ["shared memory, stated network"]);
        assert_eq!(values(&joined), ["TCP, stated peer memory"]);
    }
    // Both stated hosts are this one, which is noted and ends nothing.
    assert!(
        read(&spawned, "record.jsonl")
            .contains("the plan states 2 hosts: ranks 0; 1, and the ranks of its hosts 0 and 1 all run on")
    );
    assert!(!read(&joined, "record.jsonl").contains("the plan states"));
    assert!(
        read(&joined, "report.html")
            .contains("<td class=\"l\">TCP</td><td class=\"l\">stated peer memory</td>")
    );
    assert!(
        read(&joined, "flight/rank-0.jsonl").contains("group over tp of ranks 0, 1: TCP, stated peer memory")
    );
}

/// Gives rank 1 another host name. Run it where processes may create namespaces: `cargo test -p tessera-cli
/// --test join -- --ignored host_that_the_plan`.
#[test]
#[ignore = "needs namespaces of users and host names"]
fn a_rank_on_another_host_than_the_plan_states_ends_the_run_before_the_first_call() {
    let elsewhere = ["unshare", "-Ur", "--uts", "sh", "-c", "hostname elsewhere && exec \"$0\" \"$@\""];
    for (hosts, status) in [("1", Some(13)), ("2", Some(0))] {
        let world = DistributedRun::new(2);
        let secret = world.dir.path().join("secret");
        let more = ["--mesh", "tp=2", "--chunks", "1", "--hosts", hosts];
        let other = world.start_rank_with_prefix(&elsewhere, 1, secret.to_str().unwrap(), &more);
        let ended = wait_for_all(vec![world.start_rank(0, &more), other]);
        for o in &ended {
            let said = to_text(&o.stdout) + &to_text(&o.stderr);
            assert_eq!(o.status.code(), status, "{said}");
            let text = "rank 1 is on elsewhere, boot";
            assert_eq!(said.contains("T0777") && said.contains(text), status != Some(0), "{said}");
        }
    }
}

/// Prints how long each side takes to end. Run it as root: `cargo test -p tessera-cli --test join
/// -- --ignored --nocapture`.
#[test]
#[ignore = "needs root and network namespaces"]
fn a_broken_link_between_two_hosts_ends_both() {
    let cable = NetnsLink::new();
    let world = DistributedRun { master: ("10.99.1.1".into(), 29_400), ..DistributedRun::new(2) };
    let secret = world.dir.path().join("secret");
    let more = ["--mesh", "tp=2", "--chunks", MANY_CHUNKS];
    let rank = |r: u32, side: &str| {
        let prefix = ["ip", "netns", "exec", &format!("{}{side}", cable.0)];
        world.start_rank_with_prefix(&prefix, r, secret.to_str().unwrap(), &more)
    };
    let (zero, one) = (rank(0, "a"), rank(1, "b"));
    world.wait_for_output();
    cable.set_down();
    let begun = Instant::now();
    let took = thread::scope(|s| {
        let wait = |child: Child| (child.wait_with_output().unwrap(), begun.elapsed());
        let threads = [zero, one].map(|child| s.spawn(move || wait(child)));
        threads.map(|t| t.join().unwrap())
    });
    for (rank, (o, took)) in took.iter().enumerate() {
        println!("rank {rank} ended after {:.2} s", took.as_secs_f64());
        let said = to_text(&o.stdout) + &to_text(&o.stderr);
        assert!(matches!(o.status.code(), Some(10..30)), "rank {rank}: {:?} {said}", o.status);
        assert!(*took < Duration::from_secs(10), "rank {rank} took {took:?}");
    }
}
