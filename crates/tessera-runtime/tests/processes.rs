//! Real processes: this file's own executable, started again as launcher and as ranks.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{Bug, FakeEngine, Shape, context, leader_config, text, worker_config};
use tessera_base::Diagnostic;
use tessera_runtime::cache::Regime;
use tessera_runtime::decide::Cut;
use tessera_runtime::driver::{
    EngineFactory, Interrupt, LaunchEvent, LaunchReport, LaunchSpec, LeaderParts, StreamRequest, WorkerParts,
    exit, join, launch, run_leader, run_worker,
};
use tessera_runtime::engine::{Engine, Studio};
use tessera_runtime::wire::Tensor;
use tessera_runtime::{Failure, FailureClass, Limits, Parity};

const RANKS: u32 = 3;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("as-rank") => as_rank(),
        Some("as-launcher") => as_launcher(),
        _ => {}
    }
    let tests: [(&str, fn()); 9] = [
        ("a_clean_run_ends_with_zero_everywhere", a_clean_run_ends_with_zero_everywhere),
        ("a_killed_worker_is_named", a_killed_worker_is_named),
        ("a_killed_leader_is_named", a_killed_leader_is_named),
        ("a_killed_launcher_leaves_nobody", a_killed_launcher_leaves_nobody),
        ("a_stop_ends_at_a_chunk_boundary", a_stop_ends_at_a_chunk_boundary),
        ("a_second_stop_kills", a_second_stop_kills),
        ("a_panicking_engine_is_named", a_panicking_engine_is_named),
        ("a_stopped_process_is_a_stall", a_stopped_process_is_a_stall),
        ("a_full_disk_is_an_output_failure", a_full_disk_is_an_output_failure),
    ];
    if args.iter().any(|a| a == "--list") {
        tests.iter().for_each(|(name, _)| println!("{name}: test"));
        return ExitCode::SUCCESS;
    }
    let filter = args.iter().skip(1).find(|a| !a.starts_with('-'));
    for (name, test) in tests {
        if filter.is_none_or(|f| name.contains(f.as_str())) {
            let start = Instant::now();
            test();
            println!("test {name} ... ok ({} ms)", start.elapsed().as_millis());
        }
    }
    ExitCode::SUCCESS
}

// The processes under test.

fn as_rank() -> ! {
    let joined = join().expect("a welcome");
    let rank = joined.welcome.rank;
    let scenario = String::from_utf8(joined.welcome.payload.clone()).expect("text");
    let bug = if scenario == "panic" && rank == 2 { Bug::PanicAt(20) } else { Bug::None };
    let regime = Regime::Recompute;
    let engine: EngineFactory = Box::new(move || {
        let mut engine = FakeEngine::new(bug);
        engine.sleep = Duration::from_millis(2);
        Ok((Box::new(engine) as Box<dyn Engine>, Parity::default()))
    });
    let mut config = worker_config(Shape::Mesh, rank, regime);
    config.limits = limits();
    let outcome = if rank == 0 {
        let mut leader = leader_config(Shape::Mesh, RANKS, regime);
        leader.limits = limits();
        leader.session = joined.welcome.session;
        let chunks = if scenario == "short" { 12 } else { u32::MAX };
        let requests = (0..chunks).map(|k| StreamRequest {
            prompt: (k % 5 == 0).then(|| "a lighthouse".to_string()),
            seed: 7,
            cut: if k > 0 && k % 10 == 0 { Cut::Ordered } else { Cut::None },
        });
        let parts = LeaderParts {
            config: leader,
            engine: Some((config, engine)),
            studio: Box::new(move || Ok(Box::new(Desk { full: scenario == "full" }))),
            requests: Box::new(requests),
            record: Box::new(|_| {}),
        };
        run_leader(joined, parts)
    } else {
        run_worker(joined, WorkerParts { config, engine })
    };
    let failure = outcome.expect("legal");
    exit(failure.map_or(0, |f| f.class.exit_code()))
}

struct Desk {
    full: bool,
}

impl Studio for Desk {
    fn text(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        Ok(text(prompt.len() as u32))
    }

    fn context(&mut self, _: u32, previous: &Tensor, _: bool) -> Result<Tensor, Diagnostic> {
        Ok(context(previous))
    }

    fn deliver(&mut self, chunk: u32, _: &Tensor) -> Result<u32, Diagnostic> {
        std::thread::sleep(Duration::from_millis(3));
        if self.full && chunk == 3 {
            let code = tessera_runtime::CODES.iter().find(|c| c.id == "T0748").expect("listed");
            return Err(Diagnostic::error(code, "no space left on device"));
        }
        Ok(12)
    }

    fn finish(&mut self) -> Result<(), Diagnostic> {
        Ok(())
    }
}

fn limits() -> Limits {
    Limits { heartbeat_ns: 200_000_000, stale_ns: 2_000_000_000, ..Limits::default() }
}

fn spec(scenario: &str) -> LaunchSpec {
    let me = std::env::current_exe().expect("a path").to_string_lossy().into_owned();
    LaunchSpec {
        argv: vec![me, "as-rank".into()],
        ranks: RANKS,
        session: 77,
        extras: vec![vec![Arc::new(std::fs::File::open("/dev/null").expect("there").into())]; RANKS as usize],
        payload: scenario.as_bytes().to_vec(),
        limits: limits(),
    }
}

/// Prints its ranks' process ids and its progress, for the test that will kill it.
fn as_launcher() -> ! {
    let report = launch(&spec("endless"), &Interrupt::default(), &mut |event| match event {
        LaunchEvent::Started(pids) => {
            println!("{}", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
        }
        LaunchEvent::Progress(p) => println!("chunk {}", p.chunk),
    });
    std::process::exit(report.map_or(1, |r| r.failure.map_or(0, |f| f.class.exit_code())))
}

// Helpers.

/// Launches and does something once chunk 5 was delivered; returns the report and the time from then to the end.
fn launch_and(scenario: &str, act: impl Fn(&[u32], &Interrupt)) -> (LaunchReport, Duration, Vec<u32>) {
    let interrupt = Interrupt::default();
    let (mut pids, mut since, mut chunks) = (Vec::new(), None, Vec::new());
    let report = launch(&spec(scenario), &interrupt, &mut |event| match event {
        LaunchEvent::Started(list) => pids = list.to_vec(),
        LaunchEvent::Progress(p) => {
            chunks.push(p.chunk);
            if p.chunk == 5 {
                since = Some(Instant::now());
                act(&pids, &interrupt);
            }
        }
    })
    .expect("launched");
    assert!(chunks.iter().copied().eq(0..chunks.len() as u32), "{chunks:?}");
    let took = since.map_or(Duration::ZERO, |s| s.elapsed());
    assert!(pids.iter().all(|p| gone(*p)), "a rank outlived its launcher: {report:?}");
    (report, took, chunks)
}

fn failure(report: &LaunchReport) -> &Failure {
    report.failure.as_ref().expect("a failure")
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process id");
    kill_process(pid, signal).expect("it lives");
}

/// Gone, or waiting for a parent that does not collect it.
fn gone(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
        Err(_) => true,
    }
}

// The tests.

fn a_clean_run_ends_with_zero_everywhere() {
    let (report, _, chunks) = launch_and("short", |_, _| {});
    assert_eq!(report.failure, None);
    assert_eq!(chunks.len(), 12);
    assert!(report.exits.iter().all(|e| e.status == Some(0)), "{report:?}");
}

fn a_killed_worker_is_named() {
    let (report, took, _) = launch_and("endless", |pids, _| signal(pids[2], Signal::KILL));
    let f = failure(&report);
    assert_eq!((f.class, f.rank), (FailureClass::RankDied, Some(2)), "{f}");
    assert!(f.text.contains("killed by signal 9"), "{f}");
    assert!(took < Duration::from_secs(2), "{took:?}");
    assert_eq!(report.exits[0].status, Some(10), "{report:?}");
}

fn a_killed_leader_is_named() {
    let (report, took, _) = launch_and("endless", |pids, _| signal(pids[0], Signal::KILL));
    let f = failure(&report);
    assert_eq!((f.class, f.rank), (FailureClass::RankDied, Some(0)), "{f}");
    assert!(f.text.contains("killed by signal 9"), "{f}");
    assert!(took < Duration::from_secs(2), "{took:?}");
}

fn a_killed_launcher_leaves_nobody() {
    let me = std::env::current_exe().expect("a path");
    let mut launcher: Child =
        Command::new(me).arg("as-launcher").stdout(Stdio::piped()).spawn().expect("spawned");
    let out = launcher.stdout.take().expect("piped");
    let mut lines = BufReader::new(out).lines();
    let mut next = || lines.next().expect("a line").expect("text");
    let pids: Vec<u32> = next().split(' ').map(|p| p.parse().expect("a number")).collect();
    while next() != "chunk 5" {}
    assert!(pids.iter().all(|p| !gone(*p)));
    launcher.kill().expect("it lives");
    let since = Instant::now();
    while !pids.iter().all(|p| gone(*p)) {
        assert!(since.elapsed() < Duration::from_secs(2), "ranks are left");
        std::thread::sleep(Duration::from_millis(10));
    }
    launcher.wait().expect("ended");
}

fn a_stop_ends_at_a_chunk_boundary() {
    let (report, took, chunks) = launch_and("endless", |_, interrupt| interrupt.interrupt());
    assert_eq!(report.failure, None, "{report:?}");
    assert!(report.interrupted && report.exits.iter().all(|e| e.status == Some(0)), "{report:?}");
    assert!(took < Duration::from_secs(5) && chunks.len() < 12, "{took:?} {chunks:?}");
}

fn a_second_stop_kills() {
    let (report, took, _) = launch_and("endless", |pids, interrupt| {
        signal(pids[0], Signal::STOP);
        interrupt.interrupt();
        interrupt.interrupt();
    });
    assert!(report.interrupted && took < Duration::from_secs(1), "{took:?}");
    assert!(report.exits.iter().any(|e| e.signal == Some(9)), "{report:?}");
}

fn a_panicking_engine_is_named() {
    let (report, _, _) = launch_and("panic", |_, _| {});
    let f = failure(&report);
    assert_eq!((f.class, f.rank), (FailureClass::Engine, Some(2)), "{f}");
    assert!(f.text.contains("index out of bounds"), "{f}");
    assert!(report.exits.iter().all(|e| e.status == Some(16)), "{report:?}");
}

fn a_stopped_process_is_a_stall() {
    let (report, took, _) = launch_and("endless", |pids, _| signal(pids[1], Signal::STOP));
    let f = failure(&report);
    assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(1)), "{f}");
    assert!(took < Duration::from_secs(5), "{took:?}");
}

fn a_full_disk_is_an_output_failure() {
    let (report, _, chunks) = launch_and("full", |_, _| {});
    let f = failure(&report);
    assert_eq!((f.class, chunks.len()), (FailureClass::Output, 3), "{f}");
    assert!(f.text.contains("no space left"), "{f}");
}
