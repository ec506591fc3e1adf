//! Measures the latency of a commit: real processes with engines that do nothing, next to an echo
//! of the same message sizes over plain sockets. A program that uses this module calls [`run_child`]
//! first.

#![allow(clippy::disallowed_methods, reason = "the program starts itself again and exchanges files")]

use std::io::{Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Arc, Mutex};

use rustix::event::{PollFd, PollFlags, poll};
use rustix::time::{ClockId, clock_gettime};
use tessera_runtime::driver::{
    CallRequest, ControlTopology, EngineFactory, LaunchSpec, LeaderParts, MeshLeaderParts, StopHandle,
    StreamRequest, WorkerParts, exit_process, join_launch, launch_ranks, run_leader, run_mesh_leader,
    run_worker,
};
use tessera_runtime::engine::{Delivery, Engine, MediaPipeline};
use tessera_runtime::flight::{FlightEvent, FlightSink};
use tessera_runtime::kv_cache::CacheRegime;
use tessera_runtime::wire::{Tensor, Tensors};
use tessera_runtime::{Limits, Parity};

use super::{
    Bug, FakeEngine, LeaderPlacement, context_tensor, leader_config, mesh_leader_config, prompt_tensor,
    worker_config,
};

/// Number of warm-up calls that the measurement ignores.
pub const WARMUP_CALLS: usize = 50;
/// Sizes of an envelope, a ready and a commit of these streams, in bytes.
pub const MESSAGE_BYTES: [usize; 3] = [720, 96, 32];

/// Returns the median and the 99th percentile.
pub fn percentiles(mut ns: Vec<u64>) -> (u64, u64) {
    ns.sort_unstable();
    let at = |q: usize| ns.get((ns.len() * q / 100).min(ns.len().saturating_sub(1))).copied().unwrap_or(0);
    (at(50), at(99))
}

/// Runs the child's part and exits if the process was started as a child of a measurement.
pub fn run_child() {
    match std::env::args().nth(1).as_deref() {
        Some("as-rank") => as_rank(),
        Some("as-echo") => as_echo(),
        _ => {}
    }
}

/// Returns the nanoseconds from the leader's decision on each call until the last rank received its
/// commit.
pub fn measure_lockstep(topology: ControlTopology, ranks: u32, calls: u32, dir: &Path) -> Vec<u64> {
    let me = std::env::current_exe().expect("a path").to_string_lossy().into_owned();
    let payload = format!("{}\n{calls}\n{}", dir.display(), topology == ControlTopology::Mesh);
    let spec = LaunchSpec {
        argv: vec![me, "as-rank".into()],
        rank_count: ranks,
        topology,
        session: 77,
        extra_fds: Vec::new(),
        payload: payload.into_bytes(),
        env: Vec::new(),
        limits: limits(),
        tripwires: tessera_runtime::Tripwires::default(),
    };
    let report = launch_ranks(&spec, &StopHandle::default(), &mut |_| {}).expect("launched");
    assert_eq!(report.failure, None);
    let stamps: Vec<Vec<u64>> = (0..ranks).map(|r| read(&dir.join(format!("commits-{r}")))).collect();
    let decided = read(&dir.join("decided"));
    let inside = usize::from(topology != ControlTopology::Mesh);
    let each = decided.iter().enumerate().skip(WARMUP_CALLS);
    each.filter_map(|(k, at)| {
        let seen = stamps[inside..].iter().map(|s| s.get(k).copied()).collect::<Option<Vec<u64>>>()?;
        Some(seen.into_iter().max()?.saturating_sub(*at))
    })
    .collect()
}

/// Measures the same exchange over plain sockets: a message to each peer, an answer from each, a
/// message to each.
pub fn measure_echo(ranks: u32, calls: u32, dir: &Path) -> Vec<u64> {
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
    let (envelope, commit) = (vec![1; MESSAGE_BYTES[0]], vec![2; MESSAGE_BYTES[2]]);
    let mut ready = vec![0; MESSAGE_BYTES[1]];
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
        // The peers sleep again, like ranks while a call runs.
        std::thread::sleep(std::time::Duration::from_micros(300));
    }
    drop(peers);
    children.iter_mut().for_each(|c| drop(c.wait()));
    let stamps: Vec<Vec<u64>> = (1..ranks).map(|r| read(&dir.join(format!("echo-{r}")))).collect();
    let each = begun.iter().enumerate().skip(WARMUP_CALLS);
    each.map(|(k, at)| stamps.iter().map(|s| s[k]).max().unwrap_or(0).saturating_sub(*at)).collect()
}

fn as_echo() -> ! {
    let path = PathBuf::from(std::env::args().nth(2).expect("a path"));
    let stdin = std::io::stdin().as_fd().try_clone_to_owned().expect("a socket");
    let mut leader = UnixStream::from(stdin);
    let (mut envelope, mut commit) = (vec![0; MESSAGE_BYTES[0]], vec![0; MESSAGE_BYTES[2]]);
    let ready = vec![3; MESSAGE_BYTES[1]];
    let mut seen = Vec::new();
    while leader.read_exact(&mut envelope).is_ok() {
        leader.write_all(&ready).expect("written");
        leader.read_exact(&mut commit).expect("read");
        seen.push(now_ns());
    }
    write(&path, &seen);
    std::process::exit(0)
}

/// Timestamps the driver's events of each call.
#[derive(Default)]
struct Timestamps {
    decided: Mutex<Vec<u64>>,
    commits: Mutex<Vec<u64>>,
}

impl FlightSink for Timestamps {
    fn record_event(&self, mark: FlightEvent<'_>) {
        let at = now_ns();
        match mark {
            FlightEvent::CallIssued { .. } => self.decided.lock().expect("sound").push(at),
            FlightEvent::Commit { .. } => self.commits.lock().expect("sound").push(at),
            _ => {}
        }
    }
}

fn as_rank() -> ! {
    let joined = join_launch().expect("a welcome");
    let (rank, world, session) = (joined.welcome.rank, joined.welcome.world_size, joined.welcome.session);
    let orders = String::from_utf8(joined.welcome.payload.clone()).expect("text");
    let mut orders = orders.lines();
    let dir = PathBuf::from(orders.next().expect("a folder"));
    let calls: u32 = orders.next().and_then(|c| c.parse().ok()).expect("a number");
    let topology =
        if orders.next() == Some("true") { ControlTopology::Mesh } else { ControlTopology::ExternalLeader };
    let stamps = Arc::new(Timestamps::default());
    let flight: Option<Arc<dyn FlightSink>> = Some(Arc::<Timestamps>::clone(&stamps));
    let shape =
        if topology == ControlTopology::Mesh { LeaderPlacement::InMesh } else { LeaderPlacement::Outside };
    let mut config = worker_config(shape, rank, CacheRegime::Resident);
    config.limits = limits();
    let engine: EngineFactory =
        Box::new(|| Ok((Box::new(FakeEngine::new(Bug::None)) as Box<dyn Engine>, Parity::default())));
    let outcome = if rank == 0 {
        let mut leader = leader_config(shape, world - shape.first_compute_rank(), CacheRegime::Resident);
        leader.limits = limits();
        leader.session = session;
        let requests = (0..calls).map(|k| {
            CallRequest::Chunk(StreamRequest {
                prompt: (k == 0).then(|| "a lighthouse".to_string()),
                seed: 7,
                ..StreamRequest::default()
            })
        });
        let parts = LeaderParts {
            config: leader,
            local_rank: (topology == ControlTopology::Mesh).then_some((config, engine)),
            topology,
            media: Box::new(|| Ok(Box::new(NullMedia))),
            requests: Box::new(requests),
            record: Box::new(|_| {}),
            stop: None,
            flight,
            interceptor: None,
        };
        run_leader(joined, parts)
    } else if topology == ControlTopology::ExternalLeader && rank == 1 {
        let mut relay = mesh_leader_config(world - 1, CacheRegime::Resident);
        relay.limits = limits();
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, local_rank: (config, engine), flight, interceptor: None },
        )
    } else {
        run_worker(joined, WorkerParts { config, engine, topology, flight, interceptor: None })
    };
    let failure = outcome.expect("legal");
    // The last envelope is the shutdown, which is never committed.
    write(&dir.join(format!("commits-{rank}")), &stamps.commits.lock().expect("sound"));
    if rank == 0 {
        let decided = stamps.decided.lock().expect("sound");
        write(&dir.join("decided"), &decided[..decided.len() - 1]);
    }
    exit_process(failure.map_or(0, |f| f.class.exit_code()))
}

struct NullMedia;

impl MediaPipeline for NullMedia {
    fn encode_prompt(&mut self, prompt: &str) -> Result<Tensor, tessera_base::Diagnostic> {
        Ok(prompt_tensor(prompt.len() as u32))
    }

    fn encode_context(
        &mut self,
        _: u32,
        previous: &Tensors,
        _: bool,
    ) -> Result<Tensor, tessera_base::Diagnostic> {
        Ok(context_tensor(&previous.0[0]))
    }

    fn deliver_chunk(&mut self, _: u32, _: &Tensors, _: bool) -> Result<Delivery, tessera_base::Diagnostic> {
        Ok(Delivery::from_frames(12))
    }

    fn finish_output(&mut self) -> Result<(), tessera_base::Diagnostic> {
        Ok(())
    }
}

/// Allows one call at a time, so that a commit waits only for its ranks.
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
