//! Tests with real processes: this test executable starts itself again as launcher and as ranks.

#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the test starts itself again and reads /proc"
)]

mod support;

use std::io::{BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use support::{
    Bug, FakeEngine, LeaderPlacement, context_tensor, leader_config, mesh_leader_config, prompt_tensor,
    worker_config,
};
use tessera_base::Diagnostic;
use tessera_harness::{run, tests};
use tessera_runtime::director::SceneCut;
use tessera_runtime::driver::{
    CallRequest, ControlTopology, EngineFactory, JoinedRank, LaunchEvent, LaunchReport, LaunchSpec,
    LeaderParts, MeshLeaderParts, RankExit, StopHandle, StreamRequest, WorkerParts, exit_process,
    join_launch, launch_ranks, run_leader, run_mesh_leader, run_worker,
};
use tessera_runtime::engine::{
    AbortHandle, CacheFault, Delivery, Engine, EngineFault, MediaPipeline, PhaseReport, ProgramCount,
    ReadyCall,
};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::wire::{Heartbeat, Init, Message, PhaseCall, Tensor, Tensors, WIRE_VERSION, encode};
use tessera_runtime::worker::{self, Worker};
use tessera_runtime::{Failure, FailureClass, Limits, Parity, Tripwires};

/// The processes of a run.
#[derive(Clone, Copy, PartialEq, Eq)]
enum World {
    /// Three ranks with rank 0 as leader.
    Mesh,
    /// A leader and a single mesh rank.
    Pp0,
    /// A leader, the mesh leader and two members.
    Pp1,
}

use World::{Mesh, Pp0, Pp1};

impl World {
    fn ranks(self) -> u32 {
        match self {
            Mesh => 3,
            Pp0 => 2,
            Pp1 => 4,
        }
    }

    fn topology(self) -> ControlTopology {
        if self == Mesh { ControlTopology::Mesh } else { ControlTopology::ExternalLeader }
    }
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().collect();
    match args.get(1).map(String::as_str) {
        Some("as-rank") => as_rank(),
        Some("as-launcher") => as_launcher(args.get(2).is_some_and(|w| w == "pp"), &args[3]),
        _ => {}
    }
    run(&tests![
        a_clean_run_ends_with_zero_everywhere
        clean_runs_with_the_leader_outside
        a_killed_worker_is_named
        a_killed_member_is_named
        a_killed_mesh_leader_is_named
        a_killed_leader_is_named
        a_killed_launcher_leaves_no_process
        a_killed_launcher_leaves_no_stopped_leader
        a_run_continues_and_ends_under_a_stopped_launcher
        a_stopped_launcher_leaves_no_stopped_rank
        a_stop_ends_at_a_chunk_boundary
        a_second_stop_kills
        a_stop_while_loading_ends_cleanly
        a_stop_before_the_launch_starts_no_process
        a_panicking_engine_is_named
        a_result_that_no_message_holds_is_named
        a_stopped_process_is_a_stall
        a_stopped_leader_is_a_stall
        a_stopped_mesh_leader_or_member_is_a_stall
        a_rank_that_is_stopped_at_its_start_is_a_stall
        a_rank_that_is_stopped_before_its_welcome_waits_on
        an_engine_that_ignores_aborts_is_abandoned
        a_peer_that_does_not_read_is_a_stall
        a_process_that_hangs_on_its_way_out_is_ended
        a_loaded_host_is_not_a_stall
        a_full_disk_is_an_output_failure
        a_silent_media_pipeline_is_named
    ])
}

// The processes under test.

fn as_rank() -> ! {
    let joined = join_launch().expect("a welcome");
    let (rank, world) = (joined.welcome.rank, joined.welcome.world_size);
    let payload = String::from_utf8(joined.welcome.payload.clone()).expect("text");
    let (shape, scenario) = match payload.strip_prefix("pp ") {
        Some(rest) => (LeaderPlacement::Outside, rest.to_string()),
        None => (LeaderPlacement::InMesh, payload),
    };
    let topology = if shape == LeaderPlacement::InMesh {
        ControlTopology::Mesh
    } else {
        ControlTopology::ExternalLeader
    };
    if scenario == "mute" && rank == 2 {
        never_read(joined);
    }
    let bug = match (scenario.as_str(), rank) {
        ("panic", 2) => Bug::PanicAt(20),
        ("many outputs", _) => Bug::ManyOutputs,
        _ => Bug::None,
    };
    let (deaf, loads) = (scenario == "deaf" && rank == 2, scenario == "loading");
    let regime = CacheRegime::Recompute;
    let engine: EngineFactory = Box::new(move || {
        if loads {
            std::thread::sleep(Duration::from_secs(2));
        }
        let mut engine = FakeEngine::new(bug);
        engine.sleep = Duration::from_millis(2);
        let engine: Box<dyn Engine> =
            if deaf { Box::new(AbortIgnoringEngine { engine, left: 40 }) } else { Box::new(engine) };
        Ok((engine, Parity::default()))
    });
    let mut config = worker_config(shape, rank, regime);
    config.limits = limits();
    let ranks = world - shape.first_compute_rank();
    let outcome = if rank == 0 {
        let mut leader = leader_config(shape, ranks, regime);
        leader.limits = limits();
        leader.session = joined.welcome.session;
        let chunks = if scenario.starts_with("short") { 12 } else { u32::MAX };
        let requests = (0..chunks)
            .map(|k| StreamRequest {
                prompt: (k % 5 == 0).then(|| "a lighthouse".to_string()),
                seed: 7,
                cut: if k > 0 && k % 10 == 0 { SceneCut::Ordered } else { SceneCut::None },
                ..StreamRequest::default()
            })
            .map(CallRequest::Chunk);
        let parts = LeaderParts {
            config: leader,
            local_rank: (shape == LeaderPlacement::InMesh).then_some((config, engine)),
            topology,
            media: Box::new(move || {
                Ok(Box::new(TestMediaPipeline {
                    disk_full: scenario == "full",
                    stuck: scenario == "stuck media",
                }))
            }),
            requests: Box::new(requests),
            record: Box::new(|_| {}),
            stop: None,
            flight: None,
            interceptor: None,
        };
        run_leader(joined, parts)
    } else if shape == LeaderPlacement::Outside && rank == 1 {
        let mut relay = mesh_leader_config(ranks, regime);
        relay.limits = limits();
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, local_rank: (config, engine), flight: None, interceptor: None },
        )
    } else {
        let outcome =
            run_worker(joined, WorkerParts { config, engine, topology, flight: None, interceptor: None });
        if scenario == "hang on exit" {
            std::thread::sleep(Duration::from_secs(3600));
        }
        outcome
    };
    let failure = outcome.expect("legal");
    exit_process(failure.map_or(0, |f| f.class.exit_code()))
}

/// A rank that sends signs of life and answers the hello, but reads nothing.
fn never_read(joined: JoinedRank) -> ! {
    let rank = joined.welcome.rank;
    let mut link = joined.into_links().remove(0);
    let config = worker_config(LeaderPlacement::InMesh, rank, CacheRegime::Recompute);
    let mut machine = Worker::new(config).expect("legal");
    let init = Init {
        wire_version: WIRE_VERSION,
        build: "test".into(),
        plan: support::plan_digest(),
        session: 77,
        parity: Parity::default(),
    };
    let loaded = worker::Event::EngineReady { parity: Parity::default(), fingerprints: Vec::new() };
    let mut said = machine.handle_event(0, loaded);
    said.extend(machine.handle_event(0, worker::Event::Message(Message::Init(init))));
    for k in 1_u64.. {
        for action in said.drain(..) {
            let worker::Action::Send(message) = action else { continue };
            let _ = link.write(&encode(rank, &message).expect("within limits"));
        }
        std::thread::sleep(Duration::from_millis(50));
        said = vec![worker::Action::Send(Message::Heartbeat(Heartbeat { progress: k }))];
    }
    unreachable!("the loop runs until the process is killed")
}

/// An engine that blocks in a library without abort support.
struct AbortIgnoringEngine {
    engine: FakeEngine,
    left: u32,
}

impl Engine for AbortIgnoringEngine {
    fn run(
        &mut self,
        phase: &PhaseCall,
        inputs: &Tensors,
        progress: &(dyn Fn(u32) + Sync),
    ) -> Result<PhaseReport, EngineFault> {
        self.left -= 1;
        if self.left == 0 {
            loop {
                std::thread::sleep(Duration::from_secs(3600));
            }
        }
        self.engine.run(phase, inputs, progress)
    }

    fn reset(&mut self) {
        self.engine.reset();
    }

    fn call_outputs(&mut self) -> Result<Tensors, EngineFault> {
        self.engine.call_outputs()
    }

    fn audit_weights(&mut self) -> Option<tessera_runtime::engine::RehashResult> {
        self.engine.audit_weights()
    }

    fn audit_caches(&mut self, call: &ReadyCall) -> Vec<CacheFault> {
        self.engine.audit_caches(call)
    }

    fn abort_handle(&self) -> AbortHandle {
        Arc::new(|| {})
    }

    fn program_count(&self) -> ProgramCount {
        self.engine.program_count()
    }

    fn finish_warmup(&mut self) {
        self.engine.finish_warmup();
    }
}

struct TestMediaPipeline {
    disk_full: bool,
    stuck: bool,
}

impl MediaPipeline for TestMediaPipeline {
    fn encode_prompt(&mut self, prompt: &str) -> Result<Tensor, Diagnostic> {
        Ok(prompt_tensor(prompt.len() as u32))
    }

    fn encode_context(&mut self, _: u32, previous: &Tensors, _: bool) -> Result<Tensor, Diagnostic> {
        Ok(context_tensor(&previous.0[0]))
    }

    fn deliver_chunk(&mut self, chunk: u32, _: &Tensors, _: bool) -> Result<Delivery, Diagnostic> {
        std::thread::sleep(Duration::from_millis(3));
        if self.disk_full && chunk == 3 {
            let code = tessera_runtime::CODES.iter().find(|c| c.id == "T0748").expect("listed");
            return Err(Diagnostic::error(code, "no space left on device"));
        }
        if self.stuck && chunk == 3 {
            std::thread::sleep(Duration::from_secs(3600));
        }
        Ok(Delivery::from_frames(12))
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        Ok(())
    }
}

fn limits() -> Limits {
    let second = 1_000_000_000;
    Limits { done_floor_ns: 2 * second, ready_ns: 2 * second, media_ns: second, ..Limits::default() }
}

fn spec(world: World, scenario: &str) -> LaunchSpec {
    let me = std::env::current_exe().expect("a path").to_string_lossy().into_owned();
    let ranks = world.ranks();
    let payload = if world == Mesh { scenario.to_string() } else { format!("pp {scenario}") };
    LaunchSpec {
        argv: vec![me, "as-rank".into()],
        rank_count: ranks,
        topology: world.topology(),
        session: 77,
        extra_fds: vec![
            vec![Arc::new(std::fs::File::open("/dev/null").expect("there").into())];
            ranks as usize
        ],
        payload: payload.into_bytes(),
        env: Vec::new(),
        limits: limits(),
        tripwires: Tripwires::default(),
    }
}

/// Prints the process ids, the progress and the failure of its ranks, for the test that will kill
/// or stop it.
fn as_launcher(pp: bool, scenario: &str) -> ! {
    let world = if pp { Pp1 } else { Mesh };
    let report = launch_ranks(&spec(world, scenario), &StopHandle::default(), &mut |event| match event {
        LaunchEvent::Started(pids) => {
            println!("{}", pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" "));
        }
        LaunchEvent::Progress(p) => println!("chunk {}", p.chunk),
    });
    let failure = report.expect("launched").failure;
    failure.iter().for_each(|f| println!("{f}"));
    std::process::exit(failure.map_or(0, |f| f.class.exit_code()))
}

// Helpers.

/// The report of a run, the time from the test's action to the end, and the delivered chunks.
struct RunOutcome {
    report: LaunchReport,
    time_to_end: Duration,
    chunks: Vec<u32>,
}

/// Launches a run and performs an action once chunk 5 was delivered.
fn launch_and_act(world: World, scenario: &str, act: impl Fn(&[u32], &StopHandle)) -> RunOutcome {
    let interrupt = StopHandle::default();
    let (mut pids, mut since, mut chunks) = (Vec::new(), None, Vec::new());
    let report = launch_ranks(&spec(world, scenario), &interrupt, &mut |event| match event {
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
    assert!(pids.iter().all(|p| has_ended(*p)), "a rank outlived its launcher: {report:?}");
    RunOutcome { report, time_to_end: took, chunks }
}

/// Longest wait for the end of a run or a process. It is far above what a busy host needs, so that it only finds runs that do
/// not end; the class of the failure shows how the run found its fault.
const END_LIMIT: Duration = Duration::from_secs(60);

/// Sends a signal to a rank of a running world. The run must end and name that rank.
fn signal_rank(world: World, rank: u32, what: Signal, class: FailureClass) -> LaunchReport {
    let ended = launch_and_act(world, "endless", |pids, _| signal(pids[rank as usize], what));
    let f = failure(&ended.report);
    assert_eq!((f.class, f.rank), (class, Some(rank)), "{f}");
    if what == Signal::KILL {
        assert!(f.text.contains("killed by signal 9"), "{f}");
    }
    assert!(ended.time_to_end < END_LIMIT, "{:?}: {f}", ended.time_to_end);
    ended.report
}

fn failure(report: &LaunchReport) -> &Failure {
    report.failure.as_ref().expect("a failure")
}

fn signal(pid: u32, signal: Signal) {
    let pid = Pid::from_raw(pid as i32).expect("a process id");
    kill_process(pid, signal).expect("it lives");
}

/// Whether the process has ended, including a zombie that its parent has not reaped.
fn has_ended(pid: u32) -> bool {
    match std::fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat.rsplit(')').next().is_some_and(|rest| rest.trim_start().starts_with('Z')),
        Err(_) => true,
    }
}

// The tests.

fn a_clean_run_ends_with_zero_everywhere() {
    assert_clean_run(Mesh, "short");
}

fn clean_runs_with_the_leader_outside() {
    assert_clean_run(Pp0, "short");
    assert_clean_run(Pp1, "short");
}

fn assert_clean_run(world: World, scenario: &str) {
    let RunOutcome { report, chunks, .. } = launch_and_act(world, scenario, |_, _| {});
    assert_eq!(report.failure, None);
    assert_eq!(chunks.len(), 12);
    assert!(report.exits.iter().all(|e| e.status == Some(0)), "{report:?}");
}

fn a_killed_worker_is_named() {
    let report = signal_rank(Mesh, 2, Signal::KILL, FailureClass::RankDied);
    assert_eq!(report.exits[0].status, Some(10), "{report:?}");
}

fn a_killed_member_is_named() {
    let report = signal_rank(Pp1, 3, Signal::KILL, FailureClass::RankDied);
    assert!(report.exits[..3].iter().all(|e| e.status == Some(10)), "{report:?}");
}

fn a_killed_mesh_leader_is_named() {
    signal_rank(Pp1, 1, Signal::KILL, FailureClass::RankDied);
    signal_rank(Pp0, 1, Signal::KILL, FailureClass::RankDied);
}

fn a_killed_leader_is_named() {
    signal_rank(Mesh, 0, Signal::KILL, FailureClass::RankDied);
    signal_rank(Pp1, 0, Signal::KILL, FailureClass::RankDied);
    signal_rank(Pp0, 0, Signal::KILL, FailureClass::RankDied);
}

fn a_killed_launcher_leaves_no_process() {
    kill_launcher("mesh", |_| {});
    kill_launcher("pp", |_| {});
}

/// A stopped process does not notice that a socket closes.
fn a_killed_launcher_leaves_no_stopped_leader() {
    kill_launcher("mesh", |pids| signal(pids[0], Signal::STOP));
    kill_launcher("pp", |pids| pids.iter().for_each(|p| signal(*p, Signal::STOP)));
}

fn kill_launcher(world: &str, before: impl Fn(&[u32])) {
    let (mut launcher, pids, _lines) = start_launcher(world, "endless");
    before(&pids);
    launcher.kill().expect("it lives");
    wait_until_ended(&pids);
    launcher.wait().expect("ended");
}

/// A person may suspend the launcher by Ctrl-Z, which must not end the run.
fn a_run_continues_and_ends_under_a_stopped_launcher() {
    for world in ["mesh", "pp"] {
        let (mut launcher, pids, _lines) = start_launcher(world, "short");
        signal(launcher.id(), Signal::STOP);
        wait_until_ended(&pids);
        signal(launcher.id(), Signal::CONT);
        assert!(launcher.wait().expect("ended").success());
    }
}

/// Only the launcher can kill a rank that is stopped.
fn a_stopped_launcher_leaves_no_stopped_rank() {
    for (world, rank) in [("mesh", 1), ("mesh", 0), ("pp", 1), ("pp", 3)] {
        let (mut launcher, pids, lines) = start_launcher(world, "endless");
        signal(launcher.id(), Signal::STOP);
        signal(pids[rank], Signal::STOP);
        wait_until_ended(&pids);
        let status = launcher.wait().expect("ended").code();
        assert_eq!(status, Some(FailureClass::Stall.exit_code()), "{world}, rank {rank}");
        let report = lines.map(|l| l.expect("text")).last().expect("a line");
        assert!(report.contains(&format!("(rank {rank})")), "{world}: {report}");
        // A stopped leader cannot report that it missed the launcher's heartbeats.
        assert!(rank == 0 || report.contains("the launching process was stopped"), "{world}: {report}");
    }
}

type OutputLines = std::io::Lines<BufReader<std::process::ChildStdout>>;

/// Starts a launcher and waits for chunk 5. Returns it with the process ids of its ranks and its
/// further output.
fn start_launcher(world: &str, scenario: &str) -> (Child, Vec<u32>, OutputLines) {
    let me = std::env::current_exe().expect("a path");
    let mut launcher: Child = Command::new(me)
        .args(["as-launcher", world, scenario])
        .stdout(Stdio::piped())
        .spawn()
        .expect("spawned");
    let out = launcher.stdout.take().expect("piped");
    let mut lines = BufReader::new(out).lines();
    let mut next = || lines.next().expect("a line").expect("text");
    let pids: Vec<u32> = next().split(' ').map(|p| p.parse().expect("a number")).collect();
    while next() != "chunk 5" {}
    assert!(pids.iter().all(|p| !has_ended(*p)));
    (launcher, pids, lines)
}

fn wait_until_ended(pids: &[u32]) {
    let since = Instant::now();
    while !pids.iter().all(|p| has_ended(*p)) {
        assert!(since.elapsed() < END_LIMIT, "some ranks are still running");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn a_stop_ends_at_a_chunk_boundary() {
    for world in [Mesh, Pp1] {
        let RunOutcome { report, time_to_end: took, chunks } =
            launch_and_act(world, "endless", |_, i| i.request_stop());
        assert_eq!(report.failure, None, "{report:?}");
        assert!(report.interrupted && report.exits.iter().all(|e| e.status == Some(0)), "{report:?}");
        assert!(took < END_LIMIT && chunks.len() < 12, "{took:?} {chunks:?}");
    }
}

fn a_second_stop_kills() {
    let RunOutcome { report, time_to_end: took, .. } = launch_and_act(Mesh, "endless", |pids, interrupt| {
        signal(pids[0], Signal::STOP);
        interrupt.request_stop();
        interrupt.request_stop();
    });
    assert!(report.interrupted && took < END_LIMIT, "{took:?}");
    assert!(report.exits.iter().any(|e| e.signal == Some(9)), "{report:?}");
}

fn a_stop_while_loading_ends_cleanly() {
    for (world, after_ms) in [(Mesh, 0), (Mesh, 300), (Pp0, 300), (Pp1, 0), (Pp1, 300)] {
        let interrupt = StopHandle::default();
        let begun = Instant::now();
        let report = launch_ranks(&spec(world, "loading"), &interrupt, &mut |event| {
            if let LaunchEvent::Started(_) = event {
                let interrupt = interrupt.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(after_ms));
                    interrupt.request_stop();
                });
            }
        })
        .expect("launched");
        assert_eq!(report.failure, None, "{report:?}");
        assert!(report.interrupted && report.exits.iter().all(|e| e.status == Some(0)), "{report:?}");
        assert!(begun.elapsed() < END_LIMIT);
    }
}

fn a_stop_before_the_launch_starts_no_process() {
    let interrupt = StopHandle::default();
    interrupt.request_stop();
    let report = launch_ranks(&spec(Mesh, "endless"), &interrupt, &mut |_| {}).expect("legal");
    assert!(report.interrupted && report.failure.is_none() && report.exits.is_empty(), "{report:?}");
}

fn a_panicking_engine_is_named() {
    for world in [Mesh, Pp1] {
        let RunOutcome { report, .. } = launch_and_act(world, "panic", |_, _| {});
        let f = failure(&report);
        assert_eq!((f.class, f.rank), (FailureClass::Engine, Some(2)), "{f}");
        assert!(f.text.contains("index out of bounds"), "{f}");
        assert!(report.exits.iter().all(|e| e.status == Some(16)), "{report:?}");
    }
}

// Without the mesh, the leader receives results in messages.
fn a_result_that_no_message_holds_is_named() {
    let RunOutcome { report, .. } = launch_and_act(Pp1, "many outputs", |_, _| {});
    let f = failure(&report);
    assert_eq!((f.class, f.rank, f.code.as_str()), (FailureClass::Protocol, Some(1), "T0706"), "{f}");
    assert!(report.exits.iter().all(|e| e.signal.is_none()), "{report:?}");
}

fn a_stopped_process_is_a_stall() {
    signal_rank(Mesh, 1, Signal::STOP, FailureClass::Stall);
}

fn a_stopped_leader_is_a_stall() {
    signal_rank(Mesh, 0, Signal::STOP, FailureClass::Stall);
    signal_rank(Pp1, 0, Signal::STOP, FailureClass::Stall);
}

fn a_stopped_mesh_leader_or_member_is_a_stall() {
    signal_rank(Pp1, 1, Signal::STOP, FailureClass::Stall);
    signal_rank(Pp1, 3, Signal::STOP, FailureClass::Stall);
    signal_rank(Pp0, 1, Signal::STOP, FailureClass::Stall);
}

/// Such a rank has sent no heartbeat, so to the others it is still loading.
fn a_rank_that_is_stopped_at_its_start_is_a_stall() {
    for (world, rank) in [(Mesh, 0), (Mesh, 1), (Pp1, 1)] {
        let since = Instant::now();
        let report = launch_ranks(&spec(world, "endless"), &StopHandle::default(), &mut |event| {
            if let LaunchEvent::Started(pids) = event {
                signal(pids[rank], Signal::STOP);
            }
        });
        let report = report.expect("launched");
        let f = failure(&report);
        assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(rank as u32)), "{f}");
        assert!(since.elapsed() < END_LIMIT, "{:?}: {f}", since.elapsed());
    }
}

/// A shell may stop a run and continue it. The kernel then interrupts a rank that waits for its welcome with a time limit.
fn a_rank_that_is_stopped_before_its_welcome_waits_on() {
    let (here, there) = UnixStream::pair().expect("a pair");
    let mut rank = Command::new(std::env::current_exe().expect("this executable"))
        .arg("as-rank")
        .stdin(OwnedFd::from(there))
        .stderr(Stdio::piped())
        .spawn()
        .expect("a process");
    for (what, state) in [(None, 'S'), (Some(Signal::STOP), 'T'), (Some(Signal::CONT), 'S')] {
        what.into_iter().for_each(|what| signal(rank.id(), what));
        wait_for_state(rank.id(), state);
    }
    drop(here);
    let mut text = String::new();
    rank.stderr.take().expect("a pipe").read_to_string(&mut text).expect("text");
    rank.wait().expect("its end");
    assert!(text.contains("the welcome arrived incomplete"), "{text}");
}

/// Waits until a process sleeps (`S`) in its only thread, or is stopped (`T`).
fn wait_for_state(pid: u32, state: char) {
    let until = Instant::now() + END_LIMIT;
    let mut seen = 0;
    // A process sleeps for moments while it starts, too.
    while seen < 20 {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).expect("it lives");
        let now = stat.rsplit(')').next().and_then(|rest| rest.trim_start().chars().next());
        seen = if now == Some(state) { seen + 1 } else { 0 };
        assert!(now != Some('Z') && Instant::now() < until, "{stat}");
        std::thread::sleep(Duration::from_millis(5));
    }
}

fn an_engine_that_ignores_aborts_is_abandoned() {
    for world in [Mesh, Pp1] {
        let begun = Instant::now();
        let RunOutcome { report, .. } = launch_and_act(world, "deaf", |_, _| {});
        let f = failure(&report);
        assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(2)), "{f}");
        // The launcher kills a stalled rank, unless the rank has already exited.
        let killed = |e: &RankExit| e.rank == 2 && e.signal == Some(9);
        assert!(report.exits.iter().all(|e| e.status == Some(11) || killed(e)), "{report:?}");
        assert!(begun.elapsed() < END_LIMIT, "{:?}", begun.elapsed());
    }
}

fn a_peer_that_does_not_read_is_a_stall() {
    let begun = Instant::now();
    let RunOutcome { report, .. } = launch_and_act(Mesh, "mute", |_, _| {});
    let f = failure(&report);
    assert_eq!((f.class, f.rank), (FailureClass::Stall, Some(2)), "{f}");
    assert_eq!((report.exits[0].status, report.exits[1].status), (Some(11), Some(11)), "{report:?}");
    assert!(begun.elapsed() < END_LIMIT, "{:?}", begun.elapsed());
}

fn a_process_that_hangs_on_its_way_out_is_ended() {
    let RunOutcome { report, time_to_end: took, .. } =
        launch_and_act(Mesh, "hang on exit", |pids, _| signal(pids[2], Signal::KILL));
    assert_eq!(failure(&report).rank, Some(2), "{report:?}");
    assert_eq!(report.exits[1].status, Some(10), "{report:?}");
    assert!(took < END_LIMIT, "{took:?}");
}

fn a_loaded_host_is_not_a_stall() {
    let cores = std::thread::available_parallelism().map_or(2, usize::from);
    let done = Arc::new(AtomicBool::new(false));
    let busy: Vec<_> = (0..2 * cores)
        .map(|_| {
            let done = Arc::clone(&done);
            std::thread::spawn(move || while !done.load(Ordering::Relaxed) {})
        })
        .collect();
    assert_clean_run(Pp1, "short");
    assert_clean_run(Mesh, "short");
    done.store(true, Ordering::Relaxed);
    busy.into_iter().for_each(|b| b.join().expect("no panic"));
}

fn a_silent_media_pipeline_is_named() {
    for world in [Mesh, Pp1] {
        let RunOutcome { report, chunks, .. } = launch_and_act(world, "stuck media", |_, _| {});
        let f = failure(&report);
        assert_eq!((f.class, f.rank, chunks.len()), (FailureClass::Output, Some(0), 3), "{f}");
        assert!(f.text.contains("the media pipeline has not answered for"), "{f}");
    }
}

fn a_full_disk_is_an_output_failure() {
    for world in [Mesh, Pp1] {
        let RunOutcome { report, chunks, .. } = launch_and_act(world, "full", |_, _| {});
        let f = failure(&report);
        assert_eq!((f.class, chunks.len()), (FailureClass::Output, 3), "{f}");
        assert!(f.text.contains("no space left"), "{f}");
    }
}
