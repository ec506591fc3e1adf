//! Runs drills on this machine, one after another, and compares each outcome with the drill table.

use std::io::Write;
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tessera::clock::monotonic_ns;
use tessera::faults::{DrillConfig, fired_at_ns};
use tessera::files::{MAX_TEXT_BYTES, read_file, write_error};
use tessera::generate::{
    self, GenerateEvent, GenerateOptions, LanguagePlace, LanguagePlan, LanguageSettings, Sampling, TextModel,
    TextRequest, TokenOutput,
};
use tessera::plan::Plan;
use tessera::record::RECORD_FILE;
use tessera::stream;
use tessera::stream_options::{RunDevice, StreamEvent, StreamOptions};
use tessera::synthetic_delays::{MediaDelays, SyntheticDelays};
use tessera::{Failure, Mapping, MediaPlacement, Model, Overrides, Strategy, Topology};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_report::overlap::{OVERLAP_GATE, OverlapStats};
use tessera_report::record::RunRecord;
use tessera_runtime::drill::DrillFault;
use tessera_runtime::driver::StopHandle;
use tessera_runtime::{CheckSite, Limits, Tripwires};

use super::outcome::{DrillOutcome, Observation, ObservedFailure};
use super::overlap_sweep::{self, MeasuredGate};
use super::processes::{ChildProcess, DrillWatchdog, JoiningRank, drill_error, is_alive, kill_leftovers};
use super::table::{Drill, DrillKind, DrillModel, TWO_RANKS};
use crate::minimal_language_model::{PROMPT_IDS, create_language_model};
use crate::minimal_model;

const MS: u64 = 1_000_000;
/// Number of chunks of a stream; a fault ends the stream long before.
const CHUNKS: u32 = 100_000;
/// Number of ids of a text; a fault ends the text long before.
const TEXT_IDS: usize = 4_000;
/// Additional time beyond the drill's limit before a run without a fatal fault is stopped.
const KILL_GRACE: Duration = Duration::from_secs(4);
/// Maximum time from the start to the fault.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// Additional time limit on GPUs: a stall is detected within five seconds instead of one, and the
/// driver is slow to end a process.
const GPU_ALLOWANCE: Duration = Duration::from_secs(6);
/// Interval between checks whether processes are still alive.
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// The input of [`DrillRunner::new`]: command lines, model, device and folder of all its drills.
#[derive(Debug, Clone)]
pub struct DrillSetup {
    /// Command line of a rank process, which must call [`tessera::rank_main`].
    pub rank_command: Vec<String>,
    /// Command line that streams a model. If the environment defines a rank, the process joins a
    /// run as that rank.
    pub stream_command: Vec<String>,
    /// Command line of the launcher that a drill kills. The path of the launcher's configuration
    /// file is appended, and the process must call [`run_launcher`].
    pub launcher_command: Vec<String>,
    /// Folder of a model to use instead of the minimal model.
    pub model: Option<PathBuf>,
    /// Device of the mesh ranks: CPUs or GPUs.
    pub device: RunDevice,
    /// Existing folder for the run directories.
    pub dir: PathBuf,
}

/// Runs drills and caches the plans that they need.
#[derive(Debug)]
pub struct DrillRunner {
    setup: DrillSetup,
    model: PathBuf,
    /// The minimal model with a text encoder and a VAE, once a drill has needed it.
    media_model: Option<PathBuf>,
    plans: Vec<(PlanKey, Model, Plan)>,
    run_count: u32,
}

/// The choices that determine the plan of a drill.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct PlanKey {
    model: DrillModel,
    mesh: &'static str,
    topology: Topology,
    strategy: Strategy,
    recompute: bool,
    media: MediaPlacement,
    /// Depth of both queues, and number of outstanding calls.
    depth: u32,
}

impl PlanKey {
    fn from_drill(drill: &Drill) -> PlanKey {
        let Drill { model, mesh, topology, strategy, recompute, media, .. } = *drill;
        PlanKey { model, mesh, topology, strategy, recompute, media, depth: 2 }
    }
}

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
        Ok(DrillRunner { setup: bench, model, media_model: None, plans: Vec::new(), run_count: 0 })
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
    /// the check. The drill must not be a measurement, which has no tripwire.
    ///
    /// # Errors
    /// The reason why the drill could not run.
    pub fn run_disarmed(&mut self, drill: &'static Drill) -> Result<DrillOutcome, Diagnostics> {
        self.run_fault(drill, &Tripwires::disabling(drill.expected.map(|signature| signature.code)))
    }

    fn run_fault(
        &mut self,
        drill: &'static Drill,
        disabled: &Tripwires,
    ) -> Result<DrillOutcome, Diagnostics> {
        match drill.kind {
            DrillKind::OrphanedRanks => self.run_orphaned(drill, disabled),
            DrillKind::WrongSecret => self.run_strangers(drill, *disabled != Tripwires::default()),
            DrillKind::Text => self.run_text(drill, disabled),
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
            drill: self.drill_config(drill, disabled),
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
        let (model, plan) = self.cached_plan(PlanKey::from_drill(drill))?;
        let watch = DrillWatchdog::new(&options.out, limit + KILL_GRACE, start_timeout(options.device));
        let started_ns = monotonic_ns();
        let (mut pids, mut exited_ns) = (Vec::new(), None);
        let report = stream::run(plan, model, &options, rank, &watch.interrupt, &mut |event| match event {
            StreamEvent::Started { pids: started } => pids = started,
            StreamEvent::Chunk(_) | StreamEvent::Note(_) => {}
            StreamEvent::Exited => exited_ns = Some(monotonic_ns()),
        });
        let killed = watch.stop();
        let failure = report?.failure;
        Ok(describe_outcome((drill, limit), (failure, killed), &pids, (&options.out, started_ns, exited_ns)))
    }

    fn run_text(&mut self, drill: &'static Drill, disabled: &Tripwires) -> Result<DrillOutcome, Diagnostics> {
        self.run_count += 1;
        let out = self.setup.dir.join(format!("{}-{}", self.run_count, drill.id));
        let options = GenerateOptions {
            weights: LanguagePlace::from_files(&self.language_model_dir()?),
            device: self.setup.device,
            requests: vec![TextRequest {
                prompt: PROMPT_IDS.to_vec(),
                max_ids: TEXT_IDS,
                sampling: Sampling::default(),
                kind: None,
            }],
            prompts: Vec::new(),
            out: out.clone(),
            threads: Some(1),
            oversubscribe: true,
            wire_dump: false,
            drill: self.drill_config(drill, disabled),
            command: vec!["tessera".to_string(), "drill".to_string(), drill.id.to_string()],
        };
        let model = TextModel::open(&options.weights.dir)?.decoder;
        let mesh = drill.mesh.parse().map_err(|d: Box<Diagnostic>| vec![*d])?;
        let mut mapping = Mapping { mesh, ..Mapping::default() };
        if drill.fault == Some(DrillFault::OtherSeed) {
            // Only a fractional number of experts is drawn.
            mapping.experts.router.top_k = Some(1.5);
        }
        let positions = (PROMPT_IDS.len() + TEXT_IDS) as u64;
        let settings =
            LanguageSettings { ids_per_call: 2, ..LanguageSettings::new(positions, 2, TokenOutput::Next) };
        let plan = Arc::new(LanguagePlan::new(&model, &mapping, settings)?);
        let limit = self.time_limit(drill);
        let watch = DrillWatchdog::new(&out, limit + KILL_GRACE, start_timeout(self.setup.device));
        let started_ns = monotonic_ns();
        let (mut pids, mut exited_ns) = (Vec::new(), None);
        let rank = self.setup.rank_command.clone();
        let report = generate::run(&plan, &options, rank, &watch.interrupt, &mut |event| match event {
            GenerateEvent::Started { pids: started } => pids = started,
            GenerateEvent::Id(_) => {}
            GenerateEvent::Exited => exited_ns = Some(monotonic_ns()),
        });
        let killed = watch.stop();
        Ok(describe_outcome((drill, limit), (report?.failure, killed), &pids, (&out, started_ns, exited_ns)))
    }

    /// Creates the minimal language model once, and returns its folder.
    fn language_model_dir(&self) -> Result<PathBuf, Diagnostics> {
        let dir = self.setup.dir.join("language-model");
        if !dir.exists() {
            std::fs::create_dir_all(&dir).map_err(|e| vec![write_error(&dir, &e)])?;
            create_language_model(&dir)?;
        }
        Ok(dir)
    }

    fn drill_config(&self, drill: &Drill, disabled: &Tripwires) -> Option<DrillConfig> {
        drill.armed_fault().map(|armed| DrillConfig {
            armed,
            limits: short_limits(self.setup.device),
            disabled_tripwires: disabled.clone(),
            draw: 0,
        })
    }

    /// Runs a drill that kills the launcher, a separate process, while its ranks stream. The
    /// outcome has the failure that the leader recorded, and the time until all ranks ended.
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
            let key = PlanKey { mesh: "tp=1", topology: Topology::Pp0, depth, ..PlanKey::from_drill(drill) };
            let (model, plan) = self.cached_plan(key)?;
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
            let score = overlap.as_ref().and_then(|o| o.score).unwrap_or(f64::NAN);
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

    /// Returns the folder of a model, and creates the one with media on first use.
    fn model_dir(&mut self, model: DrillModel) -> Result<PathBuf, Diagnostics> {
        match (model, &self.media_model) {
            (DrillModel::Generator, _) => Ok(self.model.clone()),
            (DrillModel::WithMedia, Some(dir)) => Ok(dir.clone()),
            (DrillModel::WithMedia, None) => {
                let dir = self.setup.dir.join("media-model");
                std::fs::create_dir_all(&dir).map_err(|e| vec![write_error(&dir, &e)])?;
                minimal_model::create_media_model(&dir)?;
                Ok(self.media_model.insert(dir).clone())
            }
        }
    }

    /// Returns the plan for a key, which is built on first use.
    fn cached_plan(&mut self, key: PlanKey) -> Result<(&Model, &Plan), Diagnostics> {
        let at = match self.plans.iter().position(|(k, ..)| *k == key) {
            Some(at) => at,
            None => {
                let (model, plan) = build_plan(&self.model_dir(key.model)?, key)?;
                self.plans.push((key, model, plan));
                self.plans.len() - 1
            }
        };
        let (_, model, plan) = &self.plans[at];
        Ok((model, plan))
    }
}

/// Describes how a run of processes with an armed fault ended, and ends the processes that are left.
fn describe_outcome(
    (drill, limit): (&'static Drill, Duration),
    (failure, killed): (Option<Failure>, bool),
    pids: &[u32],
    (out, started_ns, exited_ns): (&Path, u64, Option<u64>),
) -> DrillOutcome {
    let left = kill_leftovers(pids);
    let since = fired_at_ns(out).unwrap_or(started_ns);
    let elapsed = Duration::from_nanos(exited_ns.unwrap_or_else(monotonic_ns).saturating_sub(since));
    let observed = match failure {
        Some(failure) => Observation::Failure(failure.into()),
        None if killed => Observation::Killed,
        None => Observation::Completed,
    };
    DrillOutcome { drill, observed, elapsed, limit, leftover_pids: left, table: None }
}

fn build_plan(dir: &Path, key: PlanKey) -> Result<(Model, Plan), Diagnostics> {
    let PlanKey { model: _, mesh, topology, strategy, recompute, media, depth } = key;
    let overrides = Overrides { recompute: Some(recompute), ..Overrides::default() };
    let map = Mapping {
        mesh: mesh.parse().map_err(|d: Box<Diagnostic>| vec![*d])?,
        topology,
        strategy,
        media,
        d_in: depth,
        d_out: depth,
        max_outstanding: depth,
        ..Mapping::default()
    };
    Model::open_and_plan(dir, &overrides, &map)
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
    let read =
        read_file(case, MAX_TEXT_BYTES).map_err(|e| vec![drill_error(format!("{}: {e}", case.display()))])?;
    let case: LauncherConfig =
        serde_json::from_slice(&read).map_err(|e| vec![drill_error(format!("{}: {e}", case.display()))])?;
    let key = PlanKey {
        model: DrillModel::Generator,
        mesh: TWO_RANKS,
        topology: Topology::Mesh,
        strategy: Strategy::Ulysses,
        recompute: false,
        media: MediaPlacement::Leader,
        depth: 2,
    };
    let (model, plan) = build_plan(&case.model, key)?;
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
                let _ = writeln!(std::io::stdout(), "{}", std::mem::take(&mut pid_line));
            }
            _ => {}
        })?;
    match report.failure {
        Some(failure) => Err(vec![drill_error(format!("the stream failed: {failure}"))]),
        None => Ok(()),
    }
}
