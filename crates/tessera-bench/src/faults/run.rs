//! Runs one fault of a campaign: starts the processes of its layout, applies the fault at its
//! moment, and waits until no process is left.

use std::collections::BTreeMap;
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use tempfile::TempDir;
use tessera::clock::monotonic_ns;
use tessera::faults::fired_at_ns;

use super::draw::{DrawnFault, FaultKind, Layout, Moment};
use super::frozen_disk::FreezableDisk;
use super::shut_connections::shut_connections;
use crate::namespaces::{PORT, join_variables, write_secret};
use crate::partition::{END_ADDRESSES, LinkCut, NetnsPair};
use crate::process_list::{Process, find_ranks, new_run_tag, wait_until_gone};
use crate::stream_process::{JsonTail, StreamArgs, StreamProcess, StreamTarget};

/// Number of chunks of a run that must complete.
pub const FINITE_CHUNKS: u32 = 14;
/// A number of chunks that no run reaches.
const ENDLESS_CHUNKS: u32 = 1_000_000;
/// Minimum times of decoding in milliseconds, which leave the ranks idle between calls.
const DECODE_MS: &str = "100,100";
/// Maximum time in seconds until two ranks have met, which ends a run whose rank is stopped before.
const JOIN_TIMEOUT_S: &str = "5";
/// Maximum wait until all rank processes exist.
const START_TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which a process that should be gone counts as left behind, and a run that should
/// complete as hung.
const END_TIMEOUT: Duration = Duration::from_secs(60);
const POLL_INTERVAL: Duration = Duration::from_millis(2);

/// How a run with a fault ended, as the system's process list shows it.
pub struct FaultRun {
    /// Folder with the run directory and the output of the started processes.
    pub dir: TempDir,
    /// The started processes: the launcher, or the joined ranks in order.
    pub processes: Vec<StreamProcess>,
    /// Monotonic time of the fault in nanoseconds; `None` if an armed fault never fired.
    pub fault_ns: Option<u64>,
    /// Time from the fault until no process that can end by itself was left, in seconds.
    pub seconds_until_gone: f64,
    /// Number of processes that were left then.
    pub left_behind: usize,
}

impl FaultRun {
    /// Returns the run directory.
    pub fn run_dir(&self) -> PathBuf {
        self.dir.path().join("run")
    }
}

/// The processes of a run before its fault.
struct StartedRun<'a> {
    fault: &'a DrawnFault,
    dir: TempDir,
    tag: String,
    processes: Vec<StreamProcess>,
    hosts: Option<NetnsPair>,
    disk: Option<&'a FreezableDisk>,
}

/// Runs one fault from the start of its processes to their end. A frozen disk needs `disk`.
pub fn run_fault(
    target: &StreamTarget,
    fault: &DrawnFault,
    disk: Option<&FreezableDisk>,
) -> anyhow::Result<FaultRun> {
    let mut run = StartedRun::start(target, fault, disk)?;
    let ranks = run.wait_for_ranks()?;
    run.wait_for_moment()?;
    let (from, fault_ns) = (Instant::now(), monotonic_ns());
    run.apply_fault(&ranks).with_context(|| run.output_text())?;
    let (took, left) = run.wait_for_end(&ranks, from);
    let out = run.dir.path().join("run");
    let fault_ns = if fault.kind.is_armed() { fired_at_ns(&out) } else { Some(fault_ns) };
    let took = match fault_ns {
        // An armed fault fires by itself some time after the start.
        Some(at) if fault.kind.is_armed() => {
            Duration::from_nanos(monotonic_ns().saturating_sub(at)).min(took)
        }
        _ => took,
    };
    let StartedRun { dir, mut processes, .. } = run;
    if left == 0 {
        processes.iter_mut().for_each(StreamProcess::wait);
    }
    Ok(FaultRun { dir, processes, fault_ns, seconds_until_gone: took.as_secs_f64(), left_behind: left })
}

/// Streams the layout without any fault and returns the hash of its latents.
pub fn measure_golden(target: &StreamTarget, layout: Layout) -> anyhow::Result<String> {
    let fault = DrawnFault {
        number: 0,
        layout,
        kind: FaultKind::FlippedCache,
        rank: 0,
        // This call does not happen.
        moment: Moment::Call(u64::MAX),
        duration: Duration::ZERO,
        place: 0,
    };
    let mut run = StartedRun::start(target, &fault, None)?;
    run.processes.iter_mut().for_each(StreamProcess::wait);
    let result = run.processes[0].printed_result().with_context(|| run.output_text())?;
    let golden = result["golden"].as_str().with_context(|| run.output_text())?;
    ensure!(result["exit_code"] == 0, "the run without a fault failed: {}", run.output_text());
    Ok(golden.to_string())
}

impl<'a> StartedRun<'a> {
    fn start(
        target: &StreamTarget,
        fault: &'a DrawnFault,
        disk: Option<&'a FreezableDisk>,
    ) -> anyhow::Result<StartedRun<'a>> {
        let disk = disk.filter(|_| fault.kind == FaultKind::SlowDisk);
        let dir = match disk {
            Some(disk) => TempDir::new_in(disk.mount_point())?,
            None => tempfile::tempdir()?,
        };
        let hosts = match fault.kind.needs_namespaces() {
            true => Some(NetnsPair::new(&format!("f{}", fault.number))?),
            false => None,
        };
        let tag = new_run_tag();
        let mut run = StartedRun { fault, dir, tag, processes: Vec::new(), hosts, disk };
        match fault.layout {
            Layout::Joined => run.start_joined(target)?,
            _ => {
                let argv = run.command_line(target)?;
                let process = StreamProcess::start(&argv, run.dir.path(), &run.tag, &[])?;
                run.processes.push(process);
            }
        }
        Ok(run)
    }

    fn command_line(&self, target: &StreamTarget) -> anyhow::Result<Vec<String>> {
        let [mesh, topology, strategy] = self.fault.layout.mapping_flags().map(str::to_string);
        let kind = self.fault.kind;
        let endless = !kind.is_harmless() && kind != FaultKind::FlippedCache;
        let chunks = if endless { ENDLESS_CHUNKS } else { FINITE_CHUNKS };
        let stream = StreamArgs { target: target.clone(), mesh, topology, chunks };
        let mut argv = stream.command_line(self.dir.path())?;
        argv.extend(["--strategy".into(), strategy, "--min-decode-ms".into(), DECODE_MS.into()]);
        let armed = match kind {
            FaultKind::FlippedWeight => "flipped-weight",
            FaultKind::FlippedCache => "flipped-cache",
            _ => return Ok(argv),
        };
        let Moment::Call(call) = self.fault.moment else { bail!("{armed} needs a call") };
        argv.extend([
            "--arm-fault".into(),
            format!("{armed}@{}:{call}#{}", self.fault.rank, self.fault.place),
        ]);
        Ok(argv)
    }

    /// Starts both ranks of a run without a launcher. They share the run folder.
    fn start_joined(&mut self, target: &StreamTarget) -> anyhow::Result<()> {
        let secret = self.dir.path().join("secret");
        write_secret(&secret)?;
        let address = if self.hosts.is_some() { END_ADDRESSES[0] } else { "127.0.0.1" };
        let port = match self.hosts {
            Some(_) => PORT,
            // Another process may take the port first; the run then fails and counts as not run.
            None => TcpListener::bind((address, 0))?.local_addr()?.port(),
        };
        let ranks = self.fault.layout.rank_count() as usize;
        for rank in 0..ranks {
            let folder = self.dir.path().join(format!("rank-{rank}"));
            fs::create_dir(&folder)?;
            let mut argv = self.hosts.as_ref().map_or(Vec::new(), |hosts| hosts.command_prefix(rank));
            argv.extend(self.command_line(target)?);
            argv.extend(["--secret".into(), secret.display().to_string()]);
            argv.extend(["--join-timeout".into(), JOIN_TIMEOUT_S.into()]);
            let variables = join_variables(rank, ranks, (address, port));
            self.processes.push(StreamProcess::start(&argv, &folder, &self.tag, &variables)?);
        }
        Ok(())
    }

    /// Waits until all ranks have processes, and returns them by rank.
    fn wait_for_ranks(&mut self) -> anyhow::Result<BTreeMap<u32, Process>> {
        let since = Instant::now();
        loop {
            let ranks = match self.fault.layout {
                Layout::Joined => {
                    (0..).zip(&self.processes).filter_map(|(r, p)| Some((r, p.launcher_process()?))).collect()
                }
                _ => find_ranks(self.processes[0].launcher_pid(), &self.tag),
            };
            if ranks.len() == self.fault.layout.rank_count() as usize {
                return Ok(ranks);
            }
            ensure!(since.elapsed() < START_TIMEOUT, "the ranks did not start: {}", self.output_text());
            ensure!(self.reap_all() == 0, "the run ended before its ranks started: {}", self.output_text());
            std::thread::sleep(POLL_INTERVAL);
        }
    }

    fn wait_for_moment(&mut self) -> anyhow::Result<()> {
        match self.fault.moment {
            Moment::StartUp(delay) => std::thread::sleep(delay),
            Moment::Call(_) => {}
            Moment::Running(chunks, delay) => {
                let mut tail = JsonTail::new(self.dir.path().join("run/record.jsonl"));
                let begun = self.processes[0].wait_for_chunks(&mut tail, chunks);
                begun.with_context(|| self.output_text())?;
                std::thread::sleep(delay);
            }
        }
        Ok(())
    }

    fn apply_fault(&self, ranks: &BTreeMap<u32, Process>) -> anyhow::Result<()> {
        let victim = ranks[&self.fault.rank];
        let send = |process: Option<Process>, signal| {
            let sent = process.is_some_and(|p| p.send_signal(signal));
            if sent { Ok(()) } else { Err(anyhow::anyhow!("the process ended before its signal")) }
        };
        let launcher = self.processes[0].launcher_process();
        match self.fault.kind {
            FaultKind::Kill => send(Some(victim), Signal::KILL),
            FaultKind::Stop => send(Some(victim), Signal::STOP),
            FaultKind::Pause => {
                send(Some(victim), Signal::STOP)?;
                std::thread::sleep(self.fault.duration);
                send(Some(victim), Signal::CONT)
            }
            FaultKind::KillLauncher => send(launcher, Signal::KILL),
            FaultKind::StopLauncher => send(launcher, Signal::STOP),
            FaultKind::StopLauncherAndRank => {
                send(launcher, Signal::STOP)?;
                send(Some(victim), Signal::STOP)
            }
            FaultKind::CutClosed => shut_connections(victim),
            FaultKind::CutDown | FaultKind::CutSilent => {
                let cut = if self.fault.kind == FaultKind::CutDown { LinkCut::Down } else { LinkCut::Silent };
                self.hosts.as_ref().context("no namespaces")?.cut_link(cut)
            }
            FaultKind::SlowDisk => {
                let disk = self.disk.context("no disk to freeze")?;
                disk.freeze_writes()?;
                std::thread::sleep(self.fault.duration);
                disk.thaw_writes()
            }
            FaultKind::FlippedWeight | FaultKind::FlippedCache => Ok(()),
        }
    }

    /// Waits until no process of the run is left. Returns the time since `from` and the number of
    /// processes that are left. A process that nobody but this campaign can end does not count: it
    /// continues a stopped launcher of a complete run, and a stopped rank without a launcher.
    fn wait_for_end(&mut self, ranks: &BTreeMap<u32, Process>, from: Instant) -> (Duration, usize) {
        let stopped = match (self.fault.kind, self.fault.layout) {
            (FaultKind::StopLauncher, _) => self.processes[0].launcher_process(),
            (FaultKind::Stop, Layout::Joined) => Some(ranks[&self.fault.rank]),
            _ => None,
        };
        let mut until_gone = None;
        if let Some(stopped) = stopped {
            let others = || ranks.values().filter(|p| **p != stopped && p.is_alive()).count();
            while others() > 0 && from.elapsed() < END_TIMEOUT {
                self.reap_all();
                std::thread::sleep(POLL_INTERVAL);
            }
            until_gone = Some(from.elapsed());
            if others() == 0 {
                stopped.send_signal(Signal::CONT);
            }
        }
        let known: Vec<Process> = ranks.values().copied().collect();
        let tag = self.tag.clone();
        let (took, left) = wait_until_gone(&tag, &known, from, END_TIMEOUT, || {
            self.reap_all();
        });
        (until_gone.unwrap_or(took), left.len())
    }

    /// Reaps the started processes that ended, and returns their number.
    fn reap_all(&mut self) -> usize {
        self.processes.iter_mut().filter_map(StreamProcess::try_reap).count()
    }

    fn output_text(&self) -> String {
        self.processes.iter().map(StreamProcess::output_text).collect::<Vec<_>>().join("---\n")
    }
}
