//! How long a commit takes: real processes with engines that do nothing, beside an echo of the same shape over
//! bare sockets. A program that uses it calls [`child`] first thing.

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use tessera_runtime::cache::Regime;
use tessera_runtime::decide::Cut;
use tessera_runtime::driver::{
    EngineFactory, Interrupt, LaunchSpec, LeaderParts, MeshLeaderParts, StreamRequest, Topology, WorkerParts,
    exit, join, launch, run_leader, run_mesh_leader, run_worker,
};
use tessera_runtime::engine::{Engine, Studio};
use tessera_runtime::flight::{Mark, Sink};
use tessera_runtime::wire::Tensor;
use tessera_runtime::{Limits, Parity};

use super::{Bug, FakeEngine, Shape, context, leader_config, mesh_leader_config, text, worker_config};

/// Calls at the start that are not counted.
pub const WARM: usize = 50;
/// Bytes of an envelope, a ready and a commit of these streams.
pub const SHAPE: [usize; 3] = [720, 96, 32];

/// Median and 99th percentile.
pub fn percentiles(mut ns: Vec<u64>) -> (u64, u64) {
    ns.sort_unstable();
    let at = |q: usize| ns.get((ns.len() * q / 100).min(ns.len().saturating_sub(1))).copied().unwrap_or(0);
    (at(50), at(99))
}

/// Takes over the process if it was started as a child of a measurement.
pub fn child() {
    match std::env::args().nth(1).as_deref() {
        Some("as-rank") => as_rank(),
        Some("as-echo") => as_echo(),
        _ => {}
    }
}

/// Nanoseconds from the leader's decision of each call to the moment when the last rank has seen its commit.
pub fn lockstep(topology: Topology, ranks: u32, calls: u32, dir: &Path) -> Vec<u64> {
    let me = std::env::current_exe().expect("a path").to_string_lossy().into_owned();
    let payload = format!("{}\n{calls}\n{}", dir.display(), topology == Topology::Mesh);
    let spec = LaunchSpec {
        argv: vec![me, "as-rank".into()],
        ranks,
        topology,
        session: 77,
        extras: Vec::new(),
        payload: payload.into_bytes(),
        env: Vec::new(),
        limits: limits(),
    };
    let report = launch(&spec, &Interrupt::default(), &mut |_| {}).expect("launched");
    assert_eq!(report.failure, None);
    let stamps: Vec<Vec<u64>> = (0..ranks).map(|r| read(&dir.join(format!("commits-{r}")))).collect();
    let decided = read(&dir.join("decided"));
    let inside = usize::from(topology != Topology::Mesh);
    let each = decided.iter().enumerate().skip(WARM);
    each.filter_map(|(k, at)| {
        let seen = stamps[inside..].iter().map(|s| s.get(k).copied()).collect::<Option<Vec<u64>>>()?;
        Some(seen.into_iter().max()?.saturating_sub(*at))
    })
    .collect()
}

/// The same over bare sockets: a message to each peer, an answer of each, a message to each.
pub fn echo(ranks: u32, calls: u32, dir: &Path) -> Vec<u64> {
    let me = std::env::current_exe().expect("a path");
    let mut peers = Vec::new();
    let mut children = Vec::new();
    for r in 1..ranks {
        let (here, there) = UnixStream::pair().expect("a pair");
        let path = dir.join(format!("echo-{r}"));
        let child = Command::new(&me)
            .arg("as-echo")
            .arg(path)
            .stdin(Stdio::from(OwnedFd::from(there)))
            .spawn()
            .expect("spawned");
        children.push(child);
        peers.push(here);
    }
    let (envelope, commit) = (vec![1; SHAPE[0]], vec![2; SHAPE[2]]);
    let mut ready = vec![0; SHAPE[1]];
    let mut begun = Vec::new();
    for _ in 0..calls {
        begun.push(now_ns());
        peers.iter_mut().for_each(|p| p.write_all(&envelope).expect("written"));
        let mut waiting: Vec<usize> = (0..peers.len()).collect();
        while !waiting.is_empty() {
            let mut fds: Vec<PollFd<'_>> =
                waiting.iter().map(|i| PollFd::from_borrowed_fd(peers[*i].as_fd(), PollFlags::IN)).collect();
            poll(&mut fds, None).expect("polled");
            let answered: Vec<usize> =
                waiting.iter().zip(&fds).filter(|(_, f)| !f.revents().is_empty()).map(|(i, _)| *i).collect();
            drop(fds);
            for i in answered {
                peers[i].read_exact(&mut ready).expect("read");
                waiting.retain(|w| *w != i);
            }
        }
        peers.iter_mut().for_each(|p| p.write_all(&commit).expect("written"));
        // The peers go back to sleep, as ranks do while a call runs.
        std::thread::sleep(std::time::Duration::from_micros(300));
    }
    drop(peers);
    children.iter_mut().for_each(|c| drop(c.wait()));
    let stamps: Vec<Vec<u64>> = (1..ranks).map(|r| read(&dir.join(format!("echo-{r}")))).collect();
    let each = begun.iter().enumerate().skip(WARM);
    each.map(|(k, at)| stamps.iter().map(|s| s[k]).max().unwrap_or(0).saturating_sub(*at)).collect()
}

fn as_echo() -> ! {
    let path = PathBuf::from(std::env::args().nth(2).expect("a path"));
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a socket");
    let mut leader = UnixStream::from(stdin);
    let (mut envelope, mut commit) = (vec![0; SHAPE[0]], vec![0; SHAPE[2]]);
    let ready = vec![3; SHAPE[1]];
    let mut seen = Vec::new();
    while leader.read_exact(&mut envelope).is_ok() {
        leader.write_all(&ready).expect("written");
        leader.read_exact(&mut commit).expect("read");
        seen.push(now_ns());
    }
    write(&path, &seen);
    std::process::exit(0)
}

/// Stamps what the driver tells of a call.
#[derive(Default)]
struct Stamps {
    decided: Mutex<Vec<u64>>,
    commits: Mutex<Vec<u64>>,
}

impl Sink for Stamps {
    fn mark(&self, mark: Mark<'_>) {
        let at = now_ns();
        match mark {
            Mark::Called { .. } => self.decided.lock().expect("sound").push(at),
            Mark::Commit { .. } => self.commits.lock().expect("sound").push(at),
            _ => {}
        }
    }
}

fn as_rank() -> ! {
    let joined = join().expect("a welcome");
    let (rank, world, session) = (joined.welcome.rank, joined.welcome.world, joined.welcome.session);
    let orders = String::from_utf8(joined.welcome.payload.clone()).expect("text");
    let mut orders = orders.lines();
    let dir = PathBuf::from(orders.next().expect("a folder"));
    let calls: u32 = orders.next().and_then(|c| c.parse().ok()).expect("a number");
    let topology = if orders.next() == Some("true") { Topology::Mesh } else { Topology::Outside };
    let stamps = Arc::new(Stamps::default());
    let flight: Option<Arc<dyn Sink>> = Some(Arc::<Stamps>::clone(&stamps));
    let shape = if topology == Topology::Mesh { Shape::Mesh } else { Shape::Pp };
    let mut config = worker_config(shape, rank, Regime::Resident);
    config.limits = limits();
    let engine: EngineFactory =
        Box::new(|| Ok((Box::new(FakeEngine::new(Bug::None)) as Box<dyn Engine>, Parity::default())));
    let outcome = if rank == 0 {
        let mut leader = leader_config(shape, world - shape.first(), Regime::Resident);
        leader.limits = limits();
        leader.session = session;
        let requests = (0..calls).map(|k| StreamRequest {
            prompt: (k == 0).then(|| "a lighthouse".to_string()),
            seed: 7,
            cut: Cut::None,
            reload: None,
        });
        let parts = LeaderParts {
            config: leader,
            engine: (topology == Topology::Mesh).then_some((config, engine)),
            topology,
            studio: Box::new(|| Ok(Box::new(Desk))),
            requests: Box::new(requests),
            record: Box::new(|_| {}),
            interrupt: None,
            flight,
            tap: None,
        };
        run_leader(joined, parts)
    } else if topology == Topology::Outside && rank == 1 {
        let mut relay = mesh_leader_config(world - 1, Regime::Resident);
        relay.limits = limits();
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, engine: (config, engine), flight, tap: None },
        )
    } else {
        run_worker(joined, WorkerParts { config, engine, topology, flight, tap: None })
    };
    let failure = outcome.expect("legal");
    // The last envelope is the shutdown, which nobody commits.
    write(&dir.join(format!("commits-{rank}")), &stamps.commits.lock().expect("sound"));
    if rank == 0 {
        let decided = stamps.decided.lock().expect("sound");
        write(&dir.join("decided"), &decided[..decided.len() - 1]);
    }
    exit(failure.map_or(0, |f| f.class.exit_code()))
}

struct Desk;

impl Studio for Desk {
    fn text(&mut self, prompt: &str) -> Result<Tensor, tessera_base::Diagnostic> {
        Ok(text(prompt.len() as u32))
    }

    fn context(&mut self, _: u32, previous: &Tensor, _: bool) -> Result<Tensor, tessera_base::Diagnostic> {
        Ok(context(previous))
    }

    fn deliver(&mut self, _: u32, _: &Tensor) -> Result<u32, tessera_base::Diagnostic> {
        Ok(12)
    }

    fn finish(&mut self) -> Result<(), tessera_base::Diagnostic> {
        Ok(())
    }
}

/// One call at a time, so that a commit waits for nothing but its ranks.
fn limits() -> Limits {
    Limits { max_outstanding: 1, ..Limits::default() }
}

fn now_ns() -> u64 {
    let t = clock_gettime(ClockId::Monotonic);
    t.tv_sec as u64 * 1_000_000_000 + t.tv_nsec as u64
}

fn write(path: &Path, stamps: &[u64]) {
    let bytes: Vec<u8> = stamps.iter().flat_map(|s| s.to_le_bytes()).collect();
    std::fs::write(path, bytes).expect("written");
}

fn read(path: &Path) -> Vec<u64> {
    let bytes = std::fs::read(path).expect("the rank wrote it");
    bytes.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).collect()
}
