//! Runs drills on this machine, one after another, and compares each outcome with the drill table.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_report::overlap::{OVERLAP_GATE, OverlapStats};
use tessera_report::record::RunRecord;
use tessera_runtime::driver::StopHandle;
use tessera_runtime::{CheckSite, Failure, Limits, Tripwires};

use super::injector::{DrillConfig, fired_at_ns, monotonic_ns};
use super::minimal_model;
use super::overlap_sweep::{self, MeasuredGate};
use super::table::{Drill, DrillKind, FailureSignature};
use crate::files::write_error;
use crate::plan::{self, Plan};
use crate::record::RECORD_FILE;
use crate::stream::{self, RunDevice, StreamEvent, StreamOptions};
use crate::synthetic_delays::{MediaDelays, SyntheticDelays};
use crate::{Mapping, Model, Overrides, Strategy, Topology};

/// Reported when a drill cannot run.
pub static T0029: Code = Code {
    id: "T0029",
    title: "a drill could not be run",
    page: "The drill itself failed, not the check under test: its folder could not be created, or its stream could not be \
    started on this machine. The message gives the reason. A drill that ran but had another outcome than its table entry is \
    reported as RED, with the expected and the observed failure.",
};

const MS: u64 = 1_000_000;
/// Number of chunks of a stream; a fault ends the stream long before.
const CHUNKS: u32 = 100_000;
/// Additional time beyond the drill's limit before a run without a fatal fault is stopped.
const KILL_GRACE: Duration = Duration::from_secs(4);
/// Maximum time from the start to the fault.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum number of bytes read from the standard error of a process.
const MAX_STDERR_BYTES: u64 = 64 << 10;
/// Additional time limit on GPUs: a stall is detected within five seconds instead of one, and the
/// driver is slow to end a process.
const GPU_ALLOWANCE: Duration = Duration::from_secs(6);
/// Interval between checks whether processes are still alive.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The configuration of drill runs.
#[derive(Debug, Clone)]
pub struct DrillSetup {
    /// Command line of a rank process, which must call [`crate::rank_main`].
    pub rank_command: Vec<String>,
    /// Command line that streams a model. If the environment defines a rank, the process joins a
    /// run as that rank.
    pub stream_command: Vec<String>,
    /// Command line of the launcher that a drill kills. The path of the launcher's configuration
    /// file is appended, and the process must call [`run_launcher`].
    pub launcher_command: Vec<String>,
    /// Folder of a model to use instead of the minimal model.
    pub model: Option<PathBuf>,
    /// The device on which ranks compute.
    pub device: RunDevice,
    /// Existing folder for the run directories.
    pub dir: PathBuf,
}

/// The observed end of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// The run ended with this failure.
    Failure(ObservedFailure),
    /// The run ended without a failure.
    Completed,
    /// The run did not end by itself and was killed.
    Killed,
    /// The gates of a measurement.
    Gates(Vec<MeasuredGate>),
}

/// The failure with which a drill's run ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedFailure {
    /// Diagnostic code of the failure, for example T0756.
    pub code: String,
    /// The rank that the failure names.
    pub rank: Option<u32>,
    /// The site of the check that found the failure.
    pub site: CheckSite,
    /// Message of the failure.
    pub text: String,
}

impl From<Failure> for ObservedFailure {
    fn from(f: Failure) -> ObservedFailure {
        ObservedFailure { code: f.code, rank: f.rank, site: f.site, text: f.text }
    }
}

/// The outcome of a drill.
#[derive(Debug, Clone)]
pub struct DrillOutcome {
    /// The drill that ran.
    pub drill: &'static Drill,
    /// The observed end of the run.
    pub observed: Observation,
    /// Time from the fault to the end of the last process; for a measurement, its total time.
    pub elapsed: Duration,
    /// Maximum of that time.
    pub limit: Duration,
    /// Processes that outlived the run and were then killed.
    pub leftover_pids: Vec<u32>,
    /// The Markdown table of a measurement.
    pub table: Option<String>,
}

impl DrillOutcome {
    /// Returns whether the observed failure has the expected code, rank and site, or whether all
    /// gates of a measurement pass.
    #[must_use]
    pub fn matches_signature(&self) -> bool {
        match (&self.observed, self.drill.expected) {
            (Observation::Failure(seal), Some(FailureSignature { code, rank, site: place })) => {
                (seal.code.as_str(), seal.rank, seal.site) == (code, rank, place)
            }
            (Observation::Gates(gates), None) => !gates.is_empty() && gates.iter().all(|g| g.passes),
            _ => false,
        }
    }

    /// Returns whether the drill passes: it has the expected failure, ends within the limit and
    /// leaves no process behind.
    #[must_use]
    pub fn is_green(&self) -> bool {
        self.matches_signature() && self.leftover_pids.is_empty() && self.elapsed <= self.limit
    }
}

/// Runs drills and caches the plans that they need.
#[derive(Debug)]
pub struct DrillRunner {
    setup: DrillSetup,
    model: PathBuf,
    plans: Vec<(PlanKey, Model, Plan)>,
    run_count: u32,
}

type PlanKey = (Topology, Strategy, bool, u32);

impl DrillRunner {
    /// Creates the minimal model in the setup's folder, unless the setup names another model.
    ///
    /// # Errors
    /// T0014 if the model cannot be written.
    pub fn new(bench: DrillSetup) -> Result<DrillRunner, Diagnostics> {
        let model = match &bench.model {
            Some(dir) => dir.clone(),
            None => {
                let dir = bench.dir.join("model");
                std::fs::create_dir_all(&dir).map_err(|e| vec![write_error(&dir, &e)])?;
                minimal_model::create_model(&dir)?;
                dir
            }
        };
        Ok(DrillRunner { setup: bench, model, plans: Vec::new(), run_count: 0 })
    }

    /// Runs one drill.
    ///
    /// # Errors
    /// The reason why the drill could not run.
    pub fn run(&mut self, drill: &'static Drill) -> Result<DrillOutcome, Diagnostics> {
        match drill.kind {
            DrillKind::Measurement => self.run_measurement(drill),
            _ => self.run_fault(drill, &Tripwires::default()),
        }
    }

    /// Runs one drill with its tripwire disabled, or without its fault if no tripwire exists for
    /// the check. Returns `None` for a measurement.
    ///
    /// # Errors
    /// The reason why the drill could not run.
    pub fn run_disarmed(&mut self, drill: &'static Drill) -> Result<Option<DrillOutcome>, Diagnostics> {
        let Some(signature) = drill.expected else { return Ok(None) };
        self.run_fault(drill, &Tripwires::disabling([signature.code])).map(Some)
    }

    fn run_fault(
        &mut self,
        drill: &'static Drill,
        disabled: &Tripwires,
    ) -> Result<DrillOutcome, Diagnostics> {
        match drill.kind {
            DrillKind::OrphanedRanks => self.run_orphaned(drill, disabled),
            DrillKind::WrongSecret => self.run_strangers(drill, *disabled != Tripwires::default()),
            _ => self.run_stream(drill, disabled),
        }
    }

    fn stream_options(&mut self, drill: &Drill, disabled: &Tripwires) -> StreamOptions {
        self.run_count += 1;
        StreamOptions {
            chunks: CHUNKS,
            prompt: minimal_model::PROMPT.to_string(),
            cuts_at: drill.cut_before.into_iter().collect(),
            out: self.setup.dir.join(format!("{}-{}", self.run_count, drill.id)),
            oversubscribe: true,
            drill: drill.armed_fault().map(|armed| DrillConfig {
                armed,
                limits: short_limits(self.setup.device),
                disabled_tripwires: disabled.clone(),
            }),
            device: self.setup.device,
            command: vec!["tessera".to_string(), "drill".to_string(), drill.id.to_string()],
            ..StreamOptions::default()
        }
    }

    fn run_stream(
        &mut self,
        drill: &'static Drill,
        disabled: &Tripwires,
    ) -> Result<DrillOutcome, Diagnostics> {
        let options = self.stream_options(drill, disabled);
        let (rank, limit) = (self.setup.rank_command.clone(), self.time_limit(drill));
        let (model, plan) = self.cached_plan((drill.topology, drill.strategy, drill.recompute, 2))?;
        let watch = DrillWatchdog::new(&options.out, limit + KILL_GRACE, start_timeout(options.device));
        let started_ns = monotonic_ns();
        let (mut pids, mut exited_ns) = (Vec::new(), None);
        let report = stream::run(plan, model, &options, rank, &watch.interrupt, &mut |event| match event {
            StreamEvent::Started { pids: started } => pids = started,
            StreamEvent::Chunk(_) => {}
            StreamEvent::Exited => exited_ns = Some(monotonic_ns()),
        });
        let killed = watch.stop();
        let report = report?;
        let left = kill_leftovers(&pids);
        let since = fired_at_ns(&options.out).unwrap_or(started_ns);
        let took = Duration::from_nanos(exited_ns.unwrap_or_else(monotonic_ns).saturating_sub(since));
        let observed = match report.failure {
            Some(failure) => Observation::Failure(failure.into()),
            None if killed => Observation::Killed,
            None => Observation::Completed,
        };
        Ok(DrillOutcome { drill, observed, elapsed: took, limit, leftover_pids: left, table: None })
    }

    /// Kills a separate launcher process while its ranks stream.
    fn run_orphaned(
        &mut self,
        drill: &'static Drill,
        disabled: &Tripwires,
    ) -> Result<DrillOutcome, Diagnostics> {
        let options = self.stream_options(drill, disabled);
        let (out, model) = (options.out.clone(), self.model.clone());
        let config_path = self.setup.dir.join(format!("{}-{}.json", self.run_count, drill.id));
        let config =
            LauncherConfig { model, out: out.clone(), device: options.device, arming: options.drill };
        let text = serde_json::to_vec(&config).map_err(|e| {
            vec![drill_error(format!("the configuration of the launcher cannot be written: {e}"))]
        })?;
        std::fs::write(&config_path, text).map_err(|e| vec![write_error(&config_path, &e)])?;
        let mut launcher =
            ChildProcess::spawn_launcher(&self.setup.launcher_command, &config_path).map_err(|d| vec![d])?;
        let limit = self.time_limit(drill);
        let Some(pids) = launcher.wait_for_stream(start_timeout(options.device)) else {
            return Err(vec![drill_error("the launcher under test did not begin to stream")]);
        };
        let fired_ns = monotonic_ns();
        launcher.kill();
        let until = Instant::now() + limit + KILL_GRACE;
        while pids.iter().any(|p| is_alive(*p)) && Instant::now() < until {
            std::thread::sleep(POLL_INTERVAL);
        }
        let took = Duration::from_nanos(monotonic_ns().saturating_sub(fired_ns));
        let left = kill_leftovers(&pids);
        // The leader outlives its launcher long enough to close the record, which contains the
        // failure.
        let record =
            std::fs::read(out.join(RECORD_FILE)).ok().and_then(|bytes| RunRecord::parse(&bytes).ok());
        let cause = record.and_then(|r| r.end).and_then(|e| e.cause);
        let observed = match cause.and_then(|c| Some((c.code?, c.rank, c.message))) {
            Some((code, rank, text)) => {
                Observation::Failure(ObservedFailure { code, rank, site: CheckSite::Leader, text })
            }
            None => Observation::Killed,
        };
        Ok(DrillOutcome { drill, observed, elapsed: took, limit, leftover_pids: left, table: None })
    }

    /// Starts two ranks without a launcher. They have different secrets, or the same secret if
    /// `same_secret` is set: no tripwire disables this check, so the self-test removes the fault
    /// instead.
    fn run_strangers(
        &mut self,
        drill: &'static Drill,
        same_secret: bool,
    ) -> Result<DrillOutcome, Diagnostics> {
        let out = self.stream_options(drill, &Tripwires::default()).out;
        let io = |path: &Path, e: &std::io::Error| vec![write_error(path, e)];
        std::fs::create_dir(&out).map_err(|e| io(&out, &e))?;
        let secret = |name: &str, fill: u8| -> Result<PathBuf, Diagnostics> {
            let path = out.join(name);
            let mut file = std::fs::OpenOptions::new();
            let mut file =
                file.write(true).create_new(true).mode(0o600).open(&path).map_err(|e| io(&path, &e))?;
            file.write_all(&[fill; 32]).map_err(|e| io(&path, &e))?;
            Ok(path)
        };
        let secrets = [secret("secret-0", 1)?, secret("secret-1", if same_secret { 1 } else { 2 })?];
        // Another process may take the port before the ranks do; the drill then fails but cannot
        // pass wrongly.
        let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr());
        let port = port.map_err(|e| vec![drill_error(format!("no free port: {e}"))])?.port();
        let (started_ns, limit) = (monotonic_ns(), self.time_limit(drill));
        let mut ranks = Vec::new();
        for (rank, secret) in (0..).zip(&secrets) {
            let (model, device) = (&self.model, self.setup.device);
            let run = JoiningRank { rank, secret, port, model, device, out: &out.join("run") };
            ranks.push(run.spawn(&self.setup.stream_command).map_err(|d| vec![d])?);
        }
        let until = Instant::now() + limit + KILL_GRACE;
        let mut ended = [None, None];
        while ended.iter().any(Option::is_none) && Instant::now() < until {
            for (end, rank) in ended.iter_mut().zip(&mut ranks) {
                *end = end.or_else(|| rank.child.try_wait().ok().flatten());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        let took = Duration::from_nanos(monotonic_ns().saturating_sub(started_ns));
        let pids: Vec<u32> = ranks.iter().map(|r| r.child.id()).collect();
        let left = kill_leftovers(&pids);
        let [first, second] = ended.map(|end| end.and_then(|status| status.code()));
        let stderr = ranks.get_mut(1).map(ChildProcess::stderr_text).unwrap_or_default();
        let code = stderr.split("error[").nth(1).and_then(|rest| rest.split(']').next());
        let observed = match (code, second) {
            (Some(code), Some(status)) if status != 0 && first != Some(0) => {
                let text = stderr.lines().next().unwrap_or_default().to_string();
                Observation::Failure(ObservedFailure {
                    code: code.to_string(),
                    rank: Some(1),
                    site: CheckSite::Init,
                    text,
                })
            }
            (_, None) => Observation::Killed,
            _ => Observation::Completed,
        };
        Ok(DrillOutcome { drill, observed, elapsed: took, limit, leftover_pids: left, table: None })
    }

    fn run_measurement(&mut self, drill: &'static Drill) -> Result<DrillOutcome, Diagnostics> {
        let begun = Instant::now();
        let (gates, table) = match drill.id {
            "depth-sweep" => {
                let rows = overlap_sweep::sweep_depths()?;
                (overlap_sweep::sweep_gates(&rows), Some(overlap_sweep::sweep_markdown(&rows)))
            }
            "recompute-coupling" => {
                (overlap_sweep::coupling_gates(&overlap_sweep::measure_coupling()?), None)
            }
            _ => (self.measure_overlap(drill)?, None),
        };
        let (took, limit) = (begun.elapsed(), self.time_limit(drill));
        Ok(DrillOutcome {
            drill,
            observed: Observation::Gates(gates),
            elapsed: took,
            limit,
            leftover_pids: Vec::new(),
            table,
        })
    }

    /// Streams with the same synthetic stage times on processes at depths 2 and 1, and checks the
    /// records.
    fn measure_overlap(&mut self, drill: &'static Drill) -> Result<Vec<MeasuredGate>, Diagnostics> {
        let mut gates = Vec::new();
        for depth in [2, 1] {
            let media = MediaDelays { first_ns: 15 * MS, rest_ns: 30 * MS, encode_ns: MS };
            let options = StreamOptions {
                chunks: 14,
                delays: SyntheticDelays { media: Some(media), generate_ns: Some(60 * MS) },
                drill: None,
                ..self.stream_options(drill, &Tripwires::default())
            };
            let (rank, limit) = (self.setup.rank_command.clone(), self.time_limit(drill));
            let (model, plan) = self.cached_plan((Topology::Pp0, Strategy::Ulysses, false, depth))?;
            let watch = DrillWatchdog::new(&options.out, limit, start_timeout(options.device));
            let report = stream::run(plan, model, &options, rank, &watch.interrupt, &mut |_| {})?;
            watch.stop();
            if let Some(failure) = report.failure {
                return Err(vec![drill_error(format!("the stream failed: {failure}"))]);
            }
            let record =
                std::fs::read(options.out.join(RECORD_FILE)).ok().and_then(|b| RunRecord::parse(&b).ok());
            let chunks = record.map(|r| r.chunks).unwrap_or_default();
            let overlap = OverlapStats::from_chunks(&chunks);
            let score = overlap.as_ref().map_or(f64::NAN, |o| o.score);
            let (what, passes) = match depth {
                1 => (format!("depth 1 stays below {OVERLAP_GATE:.2} on processes"), score < OVERLAP_GATE),
                _ => (format!("depth 2 reaches {OVERLAP_GATE:.2} on processes"), score >= OVERLAP_GATE),
            };
            gates.push(MeasuredGate::new(what, format!("{score:.2}"), passes));
            if let Some(o) = overlap.filter(|_| depth > 1) {
                let sum = o.stage0_ns + o.stage1_ns;
                let overlap = format!("{} ms of {} ms, {} queued", o.period_ns / MS, sum / MS, o.queue_out);
                let passes = o.period_ns < sum && o.queue_out <= depth;
                gates.push(MeasuredGate::new(
                    "the period is shorter than the sum of both stages, and the queue is bounded",
                    overlap,
                    passes,
                ));
            }
        }
        Ok(gates)
    }

    /// Returns the maximum time of a drill from its fault to the end of the last process.
    fn time_limit(&self, drill: &Drill) -> Duration {
        Duration::from_millis(drill.limit_ms)
            + if self.setup.device == RunDevice::Cuda { GPU_ALLOWANCE } else { Duration::ZERO }
    }

    /// Returns the plan for a key, which is built on first use.
    fn cached_plan(&mut self, key: PlanKey) -> Result<(&Model, &Plan), Diagnostics> {
        let at = match self.plans.iter().position(|(k, ..)| *k == key) {
            Some(at) => at,
            None => {
                let (model, plan) = build_plan(&self.model, key)?;
                self.plans.push((key, model, plan));
                self.plans.len() - 1
            }
        };
        let (_, model, plan) = &self.plans[at];
        Ok((model, plan))
    }
}

fn build_plan(
    dir: &Path,
    (topology, strategy, recompute, depth): PlanKey,
) -> Result<(Model, Plan), Diagnostics> {
    let overrides = Overrides { recompute: Some(recompute), ..Overrides::default() };
    let model = Model::open(dir, &overrides)?;
    let mesh = if topology == Topology::Pp0 { "tp=1" } else { "tp=2" };
    let map = Mapping {
        mesh: mesh.parse().map_err(|d: Box<Diagnostic>| vec![*d])?,
        topology,
        strategy,
        d_in: depth,
        d_out: depth,
        max_outstanding: depth,
        ..Mapping::default()
    };
    let plan = plan::plan_model(&model.video, &model.name, &dir.display().to_string(), &map)?;
    Ok((model, plan))
}

/// Returns the maximum time from the start to the fault. Ranks on GPUs may have to compile their
/// kernels first.
fn start_timeout(device: RunDevice) -> Duration {
    if device == RunDevice::Cuda { START_TIMEOUT * 4 } else { START_TIMEOUT }
}

/// Returns short timeouts, so that interactive drills end quickly. On GPUs a stall is detected
/// within five seconds, and the driver is slow to end a process.
fn short_limits(device: RunDevice) -> Limits {
    let short = Limits {
        hello_ns: 20_000 * MS,
        ready_ns: 1_000 * MS,
        done_floor_ns: 1_000 * MS,
        heartbeat_ns: 100 * MS,
        stale_ns: 1_000 * MS,
        blame_ns: 200 * MS,
        unwind_ns: 300 * MS,
        reap_ns: 500 * MS,
        ..Limits::default()
    };
    match device {
        RunDevice::Cuda => Limits {
            hello_ns: 120_000 * MS,
            ready_ns: 4_000 * MS,
            done_floor_ns: 4_000 * MS,
            reap_ns: 1_000 * MS,
            ..short
        },
        RunDevice::Cpu | RunDevice::Sim => short,
    }
}

fn drill_error(what: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&T0029, what.into())
}

/// Returns whether a process with this id runs. A zombie does not count.
fn is_alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Kills the processes that are still alive and returns their ids.
fn kill_leftovers(pids: &[u32]) -> Vec<u32> {
    let left: Vec<u32> = pids.iter().copied().filter(|p| is_alive(*p)).collect();
    for pid in &left {
        let pid = i32::try_from(*pid).ok().and_then(rustix::process::Pid::from_raw);
        let _ = pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
    }
    left
}

/// A watchdog that stops a run which no fault ends.
struct DrillWatchdog {
    interrupt: StopHandle,
    done: mpsc::Sender<()>,
    killed: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl DrillWatchdog {
    /// Starts the watchdog. It allows `start` until the fault fires and `after` from then on.
    fn new(out: &Path, after: Duration, start: Duration) -> DrillWatchdog {
        let (done, stopped) = mpsc::channel();
        let (interrupt, killed) = (StopHandle::default(), Arc::new(AtomicBool::new(false)));
        let (kill, flag, out) = (interrupt.clone(), Arc::clone(&killed), out.to_path_buf());
        let thread = std::thread::spawn(move || {
            let begun = Instant::now();
            let mut fired: Option<Instant> = None;
            loop {
                if stopped.recv_timeout(Duration::from_millis(20)) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                if fired.is_none() && fired_at_ns(&out).is_some() {
                    fired = Some(Instant::now());
                }
                if fired.is_some_and(|at| at.elapsed() > after) || begun.elapsed() > start + after {
                    flag.store(true, Ordering::Relaxed);
                    kill.request_stop();
                    kill.request_stop();
                    return;
                }
            }
        });
        DrillWatchdog { interrupt, done, killed, thread: Some(thread) }
    }

    /// Stops the watchdog when the run is over, and returns whether the run had to be killed.
    fn stop(mut self) -> bool {
        let _ = self.done.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.killed.load(Ordering::Relaxed)
    }
}

/// The configuration file of the launcher that a drill kills.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct LauncherConfig {
    model: PathBuf,
    out: PathBuf,
    device: RunDevice,
    arming: Option<DrillConfig>,
}

/// Streams as the configuration file says, and prints the process ids of the ranks to standard
/// output after the first chunk. The drill kills this process.
///
/// # Errors
/// The reason why the stream cannot start, or its failure.
pub fn run_launcher(case: &Path, rank: Vec<String>) -> Result<(), Diagnostics> {
    let read = std::fs::read(case).map_err(|e| vec![drill_error(format!("{}: {e}", case.display()))])?;
    let case: LauncherConfig =
        serde_json::from_slice(&read).map_err(|e| vec![drill_error(format!("{}: {e}", case.display()))])?;
    let (model, plan) = build_plan(&case.model, (Topology::Mesh, Strategy::Ulysses, false, 2))?;
    let options = StreamOptions {
        chunks: CHUNKS,
        prompt: minimal_model::PROMPT.to_string(),
        out: case.out,
        oversubscribe: true,
        device: case.device,
        drill: case.arming,
        ..StreamOptions::default()
    };
    let mut pid_line = String::new();
    let report =
        stream::run(&plan, &model, &options, rank, &StopHandle::default(), &mut |event| match event {
            StreamEvent::Started { pids } => {
                pid_line = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
            }
            StreamEvent::Chunk(_) if !pid_line.is_empty() => {
                // The drill reads this line and then kills this process. A failed print means that
                // the drill has exited, and this process may end too.
                println!("{}", std::mem::take(&mut pid_line));
            }
            _ => {}
        })?;
    match report.failure {
        Some(failure) => Err(vec![drill_error(format!("the stream failed: {failure}"))]),
        None => Ok(()),
    }
}

/// One rank of a run without a launcher.
struct JoiningRank<'a> {
    rank: u32,
    secret: &'a Path,
    port: u16,
    model: &'a Path,
    device: RunDevice,
    out: &'a Path,
}

impl JoiningRank<'_> {
    fn spawn(&self, argv: &[String]) -> Result<ChildProcess, Diagnostic> {
        let [program, args @ ..] = argv else { return Err(drill_error("no command line for a stream")) };
        let mut command = Command::new(program);
        command.args(args).arg(self.model).args([
            "--mesh",
            "tp=2",
            "--quiet",
            "--chunks",
            "2",
            "--join-timeout",
            "2",
        ]);
        command.args(["--prompt", minimal_model::PROMPT]).arg("--secret").arg(self.secret);
        if self.device == RunDevice::Cuda {
            command.args(["--device", "cuda"]);
        }
        if self.rank == 0 {
            command.arg("--out").arg(self.out);
        }
        let rank = self.rank.to_string();
        let port = self.port.to_string();
        command.envs([("RANK", rank.as_str()), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")]);
        command.envs([("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port.as_str())]);
        command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let child = command.spawn().map_err(|e| drill_error(format!("{program}: {e}")))?;
        Ok(ChildProcess { child })
    }
}

struct ChildProcess {
    child: Child,
}

impl ChildProcess {
    fn spawn_launcher(argv: &[String], case: &Path) -> Result<ChildProcess, Diagnostic> {
        let [program, args @ ..] = argv else { return Err(drill_error("no command line for a launcher")) };
        let child = Command::new(program)
            .args(args)
            .arg(case)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| drill_error(format!("{program}: {e}")))?;
        Ok(ChildProcess { child })
    }

    /// Returns the process ids of the launcher's ranks once a chunk is delivered, or `None` after
    /// `limit`.
    fn wait_for_stream(&mut self, limit: Duration) -> Option<Vec<u32>> {
        let stdout = self.child.stdout.take()?;
        let (sender, receiver) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            if BufReader::new(stdout).read_line(&mut line).is_ok() {
                let _ = sender.send(line);
            }
        });
        let line = receiver.recv_timeout(limit).ok()?;
        let pids: Vec<u32> = line.split_whitespace().filter_map(|p| p.parse().ok()).collect();
        (!pids.is_empty()).then_some(pids)
    }

    /// Returns the output on standard error of an exited process.
    fn stderr_text(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // Unreadable output counts as empty.
            let _ = stderr.take(MAX_STDERR_BYTES).read_to_string(&mut text);
        }
        text
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}
