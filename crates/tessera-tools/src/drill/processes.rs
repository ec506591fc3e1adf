//! The processes of a drill: they are started, watched, and killed if they outlive it.

use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use tessera::faults::fired_at_ns;
use tessera::stream_options::RunDevice;
use tessera::system::read_process;
use tessera_base::Diagnostic;
use tessera_runtime::driver::StopHandle;

use crate::codes::T0029;
use crate::minimal_model;

/// Maximum number of bytes read from the standard error of a process.
const MAX_STDERR_BYTES: u64 = 64 << 10;

/// Returns whether a process with this id runs. A zombie does not count.
pub(super) fn is_alive(pid: u32) -> bool {
    read_process(pid).is_some_and(|process| !process.has_ended())
}

/// Kills the processes that are still alive and returns their ids.
pub(super) fn kill_leftovers(pids: &[u32]) -> Vec<u32> {
    let left: Vec<u32> = pids.iter().copied().filter(|p| is_alive(*p)).collect();
    for pid in &left {
        let pid = i32::try_from(*pid).ok().and_then(rustix::process::Pid::from_raw);
        let _ = pid.map(|pid| rustix::process::kill_process(pid, rustix::process::Signal::KILL));
    }
    left
}

/// A watchdog that stops a run which no fault ends.
pub(super) struct DrillWatchdog {
    pub(super) interrupt: StopHandle,
    done: mpsc::Sender<()>,
    killed: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl DrillWatchdog {
    /// Starts the watchdog. It allows `start` until the fault fires and `after` from then on.
    pub(super) fn new(out: &Path, after: Duration, start: Duration) -> DrillWatchdog {
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
    pub(super) fn stop(mut self) -> bool {
        let _ = self.done.send(());
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        self.killed.load(Ordering::Relaxed)
    }
}

/// One rank of a run without a launcher.
pub(super) struct JoiningRank<'a> {
    pub(super) rank: u32,
    pub(super) secret: &'a Path,
    pub(super) port: u16,
    pub(super) model: &'a Path,
    pub(super) device: RunDevice,
    pub(super) out: &'a Path,
}

impl JoiningRank<'_> {
    pub(super) fn spawn(&self, argv: &[String]) -> Result<ChildProcess, Diagnostic> {
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

pub(super) struct ChildProcess {
    pub(super) child: Child,
}

impl ChildProcess {
    pub(super) fn spawn_launcher(argv: &[String], case: &Path) -> Result<ChildProcess, Diagnostic> {
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
    pub(super) fn wait_for_stream(&mut self, limit: Duration) -> Option<Vec<u32>> {
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
    pub(super) fn stderr_text(&mut self) -> String {
        let mut text = String::new();
        if let Some(stderr) = &mut self.child.stderr {
            // Unreadable output counts as empty.
            let _ = stderr.take(MAX_STDERR_BYTES).read_to_string(&mut text);
        }
        text
    }

    pub(super) fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Drop for ChildProcess {
    fn drop(&mut self) {
        self.kill();
    }
}

pub(super) fn drill_error(what: impl Into<String>) -> Diagnostic {
    Diagnostic::error(&T0029, what.into())
}
