//! Runs drills on this machine, one after another, and compares what is seen with the table.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpListener;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tessera_base::{Code, Diagnostic, Diagnostics};
use tessera_report::overlap::{OVERLAP_GATE, Overlap};
use tessera_report::record::Record;
use tessera_runtime::driver::Interrupt;
use tessera_runtime::{Failure, Limits, Place, Tripwires};

use super::hand::{Arming, now_ns, struck_ns};
use super::minimal;
use super::overlap::{self, Gate};
use super::table::{Drill, Signature, Way};
use crate::files::unwritable;
use crate::modelled::{Modelled, ModelledStudio};
use crate::plan::{self, Plan};
use crate::record::RECORD;
use crate::stream::{self, Device, StreamEvent, StreamOptions};
use crate::{Mapping, Model, Overrides, Strategy, Topology};

/// A drill that cannot be run.
pub static T0029: Code = Code {
    id: "T0029",
    title: "a drill could not be run",
    page: "The drill itself failed, not the check that it is for: its folder could not be made, or the stream that it needs \
could not be started on this machine. The message says which. A drill that ran and saw something else than its table says is \
told as RED, with what was expected and what was seen.",
};

const MS: u64 = 1_000_000;
/// Chunks of a stream that a fault should end long before.
const CHUNKS: u32 = 100_000;
/// How long a run may take that no fault ends, beyond the drill's own limit.
const GRACE: Duration = Duration::from_secs(4);
/// Longest time from the start to the fault.
const START: Duration = Duration::from_secs(30);
/// Bytes of a process' last words that are read.
const MAX_SAID: u64 = 64 << 10;
/// What a drill may take longer on GPUs: a stall is known within five seconds instead of one, and a driver ends a process
/// slowly.
const ON_GPUS: Duration = Duration::from_secs(6);
/// How often processes are looked for.
const LOOK: Duration = Duration::from_millis(2);

/// Where and how drills run.
#[derive(Debug, Clone)]
pub struct Bench {
    /// Command line of a rank's process, which must call [`crate::rank_main`].
    pub rank: Vec<String>,
    /// Command line that streams a model, as a rank among others if the environment says so.
    pub stream: Vec<String>,
    /// Command line of a launcher to be killed; the folder of the drill is appended, and it must call [`launch`].
    pub launcher: Vec<String>,
    /// A model to use instead of the minimal one.
    pub model: Option<PathBuf>,
    /// What ranks compute on.
    pub device: Device,
    /// Folder for the runs; it is there.
    pub dir: PathBuf,
}

/// What was seen of a run.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Seen {
    /// The one failure.
    Failure(Seal),
    /// It ended well.
    Nothing,
    /// It did not end and was killed.
    Killed,
    /// Gates.
    Gates(Vec<Gate>),
}

/// The signature of a failure, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Seal {
    /// Its code.
    pub code: String,
    /// The rank that it names.
    pub rank: Option<u32>,
    /// Where it was found.
    pub place: Place,
    /// What it says.
    pub text: String,
}

impl From<Failure> for Seal {
    fn from(f: Failure) -> Seal {
        Seal { code: f.code, rank: f.rank, place: f.place, text: f.text }
    }
}

/// How a drill came out.
#[derive(Debug, Clone)]
pub struct Outcome {
    /// The drill.
    pub drill: &'static Drill,
    /// What was seen.
    pub seen: Seen,
    /// From the fault to the end of the last process; of a measurement, all of it.
    pub took: Duration,
    /// How long it may take.
    pub limit: Duration,
    /// Processes that were left, and were then killed.
    pub left: Vec<u32>,
    /// A table of a measurement.
    pub table: Option<String>,
}

impl Outcome {
    /// Whether the signature appeared: code, rank and place.
    #[must_use]
    pub fn signed(&self) -> bool {
        match (&self.seen, self.drill.expect) {
            (Seen::Failure(seal), Some(Signature { code, rank, place })) => {
                (seal.code.as_str(), seal.rank, seal.place) == (code, rank, place)
            }
            (Seen::Gates(gates), None) => !gates.is_empty() && gates.iter().all(|g| g.passes),
            _ => false,
        }
    }

    /// Whether all is as the table says: signature, time, nobody left.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.signed() && self.left.is_empty() && self.took <= self.limit
    }
}

/// A place to run drills at, with the plans that they need.
#[derive(Debug)]
pub struct Range {
    bench: Bench,
    model: PathBuf,
    plans: Vec<(PlanKey, Model, Plan)>,
    runs: u32,
}

type PlanKey = (Topology, Strategy, bool, u32);

impl Range {
    /// Makes the minimal model in the bench's folder, unless another one is given.
    ///
    /// # Errors
    /// What cannot be written.
    pub fn new(bench: Bench) -> Result<Range, Diagnostics> {
        let model = match &bench.model {
            Some(dir) => dir.clone(),
            None => {
                let dir = bench.dir.join("model");
                std::fs::create_dir_all(&dir).map_err(|e| vec![unwritable(&dir, &e)])?;
                minimal::make(&dir)?;
                dir
            }
        };
        Ok(Range { bench, model, plans: Vec::new(), runs: 0 })
    }

    /// Runs one drill.
    ///
    /// # Errors
    /// Why it could not be run at all.
    pub fn run(&mut self, drill: &'static Drill) -> Result<Outcome, Diagnostics> {
        match drill.way {
            Way::Measured => self.measure(drill),
            _ => self.broken(drill, &Tripwires::default()),
        }
    }

    /// Runs one drill with the tripwire that it is for switched off, or without its fault where nothing switches it off; none for a measurement, which has no tripwire.
    ///
    /// # Errors
    /// Why it could not be run at all.
    pub fn disarmed(&mut self, drill: &'static Drill) -> Result<Option<Outcome>, Diagnostics> {
        let Some(signature) = drill.expect else { return Ok(None) };
        self.broken(drill, &Tripwires::off([signature.code])).map(Some)
    }

    fn broken(&mut self, drill: &'static Drill, off: &Tripwires) -> Result<Outcome, Diagnostics> {
        match drill.way {
            Way::Orphans => self.orphans(drill, off),
            Way::Strangers => self.strangers(drill, *off != Tripwires::default()),
            _ => self.stream(drill, off),
        }
    }

    fn options(&mut self, drill: &Drill, off: &Tripwires) -> StreamOptions {
        self.runs += 1;
        StreamOptions {
            chunks: CHUNKS,
            prompt: minimal::PROMPT.to_string(),
            cuts_at: drill.cut.into_iter().collect(),
            out: self.bench.dir.join(format!("{}-{}", self.runs, drill.id)),
            oversubscribe: true,
            drill: drill.armed().map(|armed| Arming {
                armed,
                limits: limits(self.bench.device),
                off: off.clone(),
            }),
            device: self.bench.device,
            command: vec!["tessera".to_string(), "drill".to_string(), drill.id.to_string()],
            ..StreamOptions::default()
        }
    }

    fn stream(&mut self, drill: &'static Drill, off: &Tripwires) -> Result<Outcome, Diagnostics> {
        let options = self.options(drill, off);
        let (rank, limit) = (self.bench.rank.clone(), self.limit(drill));
        let (model, plan) = self.plan((drill.topology, drill.strategy, drill.recompute, 2))?;
        let watch = Watch::new(&options.out, limit + GRACE, start(options.device));
        let begun = now_ns();
        let (mut pids, mut gone) = (Vec::new(), None);
        let report = stream::run(plan, model, &options, rank, &watch.interrupt, &mut |event| match event {
            StreamEvent::Started { pids: started } => pids = started,
            StreamEvent::Chunk(_) => {}
            StreamEvent::Gone => gone = Some(now_ns()),
        });
        let killed = watch.end();
        let report = report?;
        let left = left(&pids);
        let since = struck_ns(&options.out).unwrap_or(begun);
        let took = Duration::from_nanos(gone.unwrap_or_else(now_ns).saturating_sub(since));
        let seen = match report.failure {
            Some(failure) => Seen::Failure(failure.into()),
            None if killed => Seen::Killed,
            None => Seen::Nothing,
        };
        Ok(Outcome { drill, seen, took, limit, left, table: None })
    }

    /// A launcher of its own is killed while its ranks stream.
    fn orphans(&mut self, drill: &'static Drill, off: &Tripwires) -> Result<Outcome, Diagnostics> {
        let options = self.options(drill, off);
        let (out, model) = (options.out.clone(), self.model.clone());
        let case = self.bench.dir.join(format!("{}-{}.json", self.runs, drill.id));
        let orders = Case { model, out: out.clone(), device: options.device, arming: options.drill };
        let text = serde_json::to_vec(&orders)
            .map_err(|e| vec![failed(format!("the case cannot be written: {e}"))])?;
        std::fs::write(&case, text).map_err(|e| vec![unwritable(&case, &e)])?;
        let mut launcher = Launcher::start(&self.bench.launcher, &case).map_err(|d| vec![d])?;
        let limit = self.limit(drill);
        let Some(pids) = launcher.ready(start(options.device)) else {
            return Err(vec![failed("the launcher that is to be killed did not begin to stream")]);
        };
        let struck = now_ns();
        launcher.kill();
        let until = Instant::now() + limit + GRACE;
        while pids.iter().any(|p| alive(*p)) && Instant::now() < until {
            std::thread::sleep(LOOK);
        }
        let took = Duration::from_nanos(now_ns().saturating_sub(struck));
        let left = left(&pids);
        // The leader outlives its launcher to close the record; that is where it says why.
        let record = std::fs::read(out.join(RECORD)).ok().and_then(|bytes| Record::parse(&bytes).ok());
        let cause = record.and_then(|r| r.end).and_then(|e| e.cause);
        let seen = match cause.and_then(|c| Some((c.code?, c.rank, c.message))) {
            Some((code, rank, text)) => Seen::Failure(Seal { code, rank, place: Place::Leader, text }),
            None => Seen::Killed,
        };
        Ok(Outcome { drill, seen, took, limit, left, table: None })
    }

    /// Two ranks that somebody else started, one with another secret than the other's; with the same one where the
    /// check is not to be met, because nothing switches it off.
    fn strangers(&mut self, drill: &'static Drill, same: bool) -> Result<Outcome, Diagnostics> {
        let out = self.options(drill, &Tripwires::default()).out;
        let io = |path: &Path, e: &std::io::Error| vec![unwritable(path, e)];
        std::fs::create_dir(&out).map_err(|e| io(&out, &e))?;
        let secret = |name: &str, fill: u8| -> Result<PathBuf, Diagnostics> {
            let path = out.join(name);
            let mut file = std::fs::OpenOptions::new();
            let mut file =
                file.write(true).create_new(true).mode(0o600).open(&path).map_err(|e| io(&path, &e))?;
            file.write_all(&[fill; 32]).map_err(|e| io(&path, &e))?;
            Ok(path)
        };
        let secrets = [secret("secret-0", 1)?, secret("secret-1", if same { 1 } else { 2 })?];
        // Free a moment ago; whoever takes it meanwhile makes this drill red, not wrong.
        let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|l| l.local_addr());
        let port = port.map_err(|e| vec![failed(format!("no free port: {e}"))])?.port();
        let (begun, limit) = (now_ns(), self.limit(drill));
        let mut ranks = Vec::new();
        for (rank, secret) in (0..).zip(&secrets) {
            let (model, device) = (&self.model, self.bench.device);
            let run = Joining { rank, secret, port, model, device, out: &out.join("run") };
            ranks.push(run.start(&self.bench.stream).map_err(|d| vec![d])?);
        }
        let until = Instant::now() + limit + GRACE;
        let mut ended = [None, None];
        while ended.iter().any(Option::is_none) && Instant::now() < until {
            for (end, rank) in ended.iter_mut().zip(&mut ranks) {
                *end = end.or_else(|| rank.child.try_wait().ok().flatten());
            }
            std::thread::sleep(LOOK);
        }
        let took = Duration::from_nanos(now_ns().saturating_sub(begun));
        let pids: Vec<u32> = ranks.iter().map(|r| r.child.id()).collect();
        let left = left(&pids);
        let [first, second] = ended.map(|end| end.and_then(|status| status.code()));
        let said = ranks.get_mut(1).map(Launcher::said).unwrap_or_default();
        let code = said.split("error[").nth(1).and_then(|rest| rest.split(']').next());
        let seen = match (code, second) {
            (Some(code), Some(status)) if status != 0 && first != Some(0) => {
                let text = said.lines().next().unwrap_or_default().to_string();
                Seen::Failure(Seal { code: code.to_string(), rank: Some(1), place: Place::Init, text })
            }
            (_, None) => Seen::Killed,
            _ => Seen::Nothing,
        };
        Ok(Outcome { drill, seen, took, limit, left, table: None })
    }

    fn measure(&mut self, drill: &'static Drill) -> Result<Outcome, Diagnostics> {
        let begun = Instant::now();
        let (gates, table) = match drill.id {
            "depth-sweep" => {
                let rows = overlap::sweep()?;
                (overlap::sweep_gates(&rows), Some(overlap::sweep_markdown(&rows)))
            }
            "recompute-coupling" => (overlap::coupling_gates(&overlap::coupling()?), None),
            _ => (self.signature(drill)?, None),
        };
        let (took, limit) = (begun.elapsed(), self.limit(drill));
        Ok(Outcome { drill, seen: Seen::Gates(gates), took, limit, left: Vec::new(), table })
    }

    /// The same modelled stages on processes with 2 places and with 1: what the records say.
    fn signature(&mut self, drill: &'static Drill) -> Result<Vec<Gate>, Diagnostics> {
        let mut gates = Vec::new();
        for depth in [2, 1] {
            let studio = ModelledStudio { first_ns: 15 * MS, rest_ns: 30 * MS, encode_ns: MS };
            let options = StreamOptions {
                chunks: 14,
                modelled: Modelled { studio: Some(studio), generate_ns: Some(60 * MS) },
                drill: None,
                ..self.options(drill, &Tripwires::default())
            };
            let (rank, limit) = (self.bench.rank.clone(), self.limit(drill));
            let (model, plan) = self.plan((Topology::Pp0, Strategy::Ulysses, false, depth))?;
            let watch = Watch::new(&options.out, limit, start(options.device));
            let report = stream::run(plan, model, &options, rank, &watch.interrupt, &mut |_| {})?;
            watch.end();
            if let Some(failure) = report.failure {
                return Err(vec![failed(format!("the stream failed: {failure}"))]);
            }
            let record = std::fs::read(options.out.join(RECORD)).ok().and_then(|b| Record::parse(&b).ok());
            let chunks = record.map(|r| r.chunks).unwrap_or_default();
            let seen = Overlap::of(&chunks);
            let score = seen.as_ref().map_or(f64::NAN, |o| o.score);
            let (what, passes) = match depth {
                1 => (format!("1 place stays below {OVERLAP_GATE:.2} on processes"), score < OVERLAP_GATE),
                _ => (format!("2 places reach {OVERLAP_GATE:.2} on processes"), score >= OVERLAP_GATE),
            };
            gates.push(Gate::new(what, format!("{score:.2}"), passes));
            if let Some(o) = seen.filter(|_| depth > 1) {
                let sum = o.stage0_ns + o.stage1_ns;
                let seen = format!("{} ms of {} ms, {} queued", o.period_ns / MS, sum / MS, o.queue_out);
                let passes = o.period_ns < sum && o.queue_out <= depth;
                gates.push(Gate::new(
                    "the period is shorter than both stages, the queue bounded",
                    seen,
                    passes,
                ));
            }
        }
        Ok(gates)
    }

    /// How long a drill may take from its fault to the end of the last process.
    fn limit(&self, drill: &Drill) -> Duration {
        Duration::from_millis(drill.limit_ms)
            + if self.bench.device == Device::Cuda { ON_GPUS } else { Duration::ZERO }
    }

    /// The plan of a drill, made once.
    fn plan(&mut self, key: PlanKey) -> Result<(&Model, &Plan), Diagnostics> {
        let at = match self.plans.iter().position(|(k, ..)| *k == key) {
            Some(at) => at,
            None => {
                let (model, plan) = planned(&self.model, key)?;
                self.plans.push((key, model, plan));
                self.plans.len() - 1
            }
        };
        let (_, model, plan) = &self.plans[at];
        Ok((model, plan))
    }
}

fn planned(
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
    let plan = plan::make(&model.video, &model.name, &dir.display().to_string(), &map)?;
    Ok((model, plan))
}

/// Longest time from the start to the fault: GPUs are opened and their kernels compiled, maybe for the first time.
fn start(device: Device) -> Duration {
    if device == Device::Cuda { START * 4 } else { START }
}

/// Short waits, so that a drill ends while somebody looks at it. On GPUs a stall is known within five seconds, and a driver
/// takes its time to end a process.
fn limits(device: Device) -> Limits {
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
        Device::Cuda => Limits {
            hello_ns: 120_000 * MS,
            ready_ns: 4_000 * MS,
            done_floor_ns: 4_000 * MS,
            reap_ns: 1_000 * MS,
            ..short
        },
        Device::Cpu | Device::Sim => short,
    }
}

fn failed(what: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&T0029, what.into())
}

/// Whether a process of this number runs; one that nobody has collected does not.
fn alive(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with(['Z', 'X']))
}

/// Processes that are still there; they are killed.
fn left(pids: &[u32]) -> Vec<u32> {
    let left: Vec<u32> = pids.iter().copied().filter(|p| alive(*p)).collect();
    for pid in &left {
        let pid = i32::try_from(*pid).ok().and_then(rustix::process::Pid::from_raw);
        let _ = pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
    }
    left
}

/// Stops a run that no fault ends.
struct Watch {
    interrupt: Interrupt,
    done: mpsc::Sender<()>,
    killed: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Watch {
    /// From the fault on a run has so long, and until the fault `start`.
    fn new(out: &Path, after: Duration, start: Duration) -> Watch {
        let (done, over) = mpsc::channel();
        let (interrupt, killed) = (Interrupt::default(), Arc::new(AtomicBool::new(false)));
        let (kill, flag, out) = (interrupt.clone(), Arc::clone(&killed), out.to_path_buf());
        let thread = std::thread::spawn(move || {
            let begun = Instant::now();
            let mut struck: Option<Instant> = None;
            loop {
                if over.recv_timeout(Duration::from_millis(20)) != Err(mpsc::RecvTimeoutError::Timeout) {
                    return;
                }
                if struck.is_none() && struck_ns(&out).is_some() {
                    struck = Some(Instant::now());
                }
                if struck.is_some_and(|at| at.elapsed() > after) || begun.elapsed() > start + after {
                    flag.store(true, Ordering::Relaxed);
                    kill.interrupt();
                    kill.interrupt();
                    return;
                }
            }
        });
        Watch { interrupt, done, killed, thread: Some(thread) }
    }

    /// The run is over; whether it had to be killed.
    fn end(mut self) -> bool {
        let _ = self.done.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.killed.load(Ordering::Relaxed)
    }
}

/// What a launcher that is to be killed is told, in a file.
#[derive(Debug, serde::Serialize, serde::Deserialize)]
struct Case {
    model: PathBuf,
    out: PathBuf,
    device: Device,
    arming: Option<Arming>,
}

/// Streams as a case says and tells of it on standard output, until somebody kills this process.
///
/// # Errors
/// What keeps it from streaming.
pub fn launch(case: &Path, rank: Vec<String>) -> Result<(), Diagnostics> {
    let read = std::fs::read(case).map_err(|e| vec![failed(format!("{}: {e}", case.display()))])?;
    let case: Case =
        serde_json::from_slice(&read).map_err(|e| vec![failed(format!("{}: {e}", case.display()))])?;
    let (model, plan) = planned(&case.model, (Topology::Mesh, Strategy::Ulysses, false, 2))?;
    let options = StreamOptions {
        chunks: CHUNKS,
        prompt: minimal::PROMPT.to_string(),
        out: case.out,
        oversubscribe: true,
        device: case.device,
        drill: case.arming,
        ..StreamOptions::default()
    };
    let mut said = String::new();
    let report =
        stream::run(&plan, &model, &options, rank, &Interrupt::default(), &mut |event| match event {
            StreamEvent::Started { pids } => {
                said = pids.iter().map(u32::to_string).collect::<Vec<_>>().join(" ");
            }
            StreamEvent::Chunk(_) if !said.is_empty() => {
                // The reader kills this process; if it is gone, so is the reason to go on.
                println!("{}", std::mem::take(&mut said));
            }
            _ => {}
        })?;
    match report.failure {
        Some(failure) => Err(vec![failed(format!("the stream failed: {failure}"))]),
        None => Ok(()),
    }
}

/// One of the ranks of a run that nobody launches.
struct Joining<'a> {
    rank: u32,
    secret: &'a Path,
    port: u16,
    model: &'a Path,
    device: Device,
    out: &'a Path,
}

impl Joining<'_> {
    fn start(&self, argv: &[String]) -> Result<Launcher, Diagnostic> {
        let [program, args @ ..] = argv else { return Err(failed("no command line for a stream")) };
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
        command.args(["--prompt", minimal::PROMPT]).arg("--secret").arg(self.secret);
        if self.device == Device::Cuda {
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
        let child = command.spawn().map_err(|e| failed(format!("{program}: {e}")))?;
        Ok(Launcher { child })
    }
}

struct Launcher {
    child: Child,
}

impl Launcher {
    fn start(argv: &[String], case: &Path) -> Result<Launcher, Diagnostic> {
        let [program, args @ ..] = argv else { return Err(failed("no command line for a launcher")) };
        let child = Command::new(program)
            .args(args)
            .arg(case)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .map_err(|e| failed(format!("{program}: {e}")))?;
        Ok(Launcher { child })
    }

    /// Process ids of its ranks, once a chunk is out.
    fn ready(&mut self, limit: Duration) -> Option<Vec<u32>> {
        let stdout = self.child.stdout.take()?;
        let (tell, said) = mpsc::channel();
        std::thread::spawn(move || {
            let mut line = String::new();
            if BufReader::new(stdout).read_line(&mut line).is_ok() {
                let _ = tell.send(line);
            }
        });
        let line = said.recv_timeout(limit).ok()?;
        let pids: Vec<u32> = line.split_whitespace().filter_map(|p| p.parse().ok()).collect();
        (!pids.is_empty()).then_some(pids)
    }

    /// What it wrote to standard error, once it has ended.
    fn said(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // What cannot be read was not said.
            let _ = stderr.take(MAX_SAID).read_to_string(&mut text);
        }
        text
    }

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for Launcher {
    fn drop(&mut self) {
        self.kill();
    }
}
