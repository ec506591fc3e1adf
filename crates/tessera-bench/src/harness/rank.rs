//! The process of one rank: it joins the launch as leader, mesh leader or worker, and writes its
//! timestamps.

use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use tessera_base::Diagnostic;
use tessera_runtime::Failure;
use tessera_runtime::driver::{
    CallRequest, JoinedRank, LeaderParts, MeshLeaderParts, WorkerParts, exit_process, join_launch,
    run_leader, run_mesh_leader, run_worker,
};
use tessera_runtime::engine::{Delivery, MediaPipeline};
use tessera_runtime::flight::FlightSink;
use tessera_runtime::leader::RecordEntry;
use tessera_runtime::wire::{Tensor, Tensors};

use super::HarnessConfig;
use super::echo::{EchoingRequests, FrameSizes, answer_echoes};
use super::scripted_engine::{burn_cpu, engine_factory};
use super::synthetic_stream::{constant_tensor, leader_config, mesh_leader_config, worker_config};
use super::timestamps::{CallTimestamps, TimestampSink, timestamps_file};
use crate::diagnostics_error;

/// Runs the process of one rank and returns its exit code.
pub fn rank_main() -> i32 {
    match run_rank() {
        Ok(None) => 0,
        Ok(Some(f)) => exit_process(f.class.exit_code()),
        Err(e) => {
            eprintln!("{e:#}");
            1
        }
    }
}

fn run_rank() -> anyhow::Result<Option<Failure>> {
    let mut joined = join_launch().map_err(|d| diagnostics_error(vec![d]))?;
    let harness: HarnessConfig = serde_json::from_slice(&joined.welcome.payload)?;
    let rank = joined.welcome.rank;
    let echo: Vec<UnixStream> =
        std::mem::take(&mut joined.extra_fds).into_iter().map(UnixStream::from).collect();
    let timestamps = Arc::new(TimestampSink::default());
    if harness.burn_in_background {
        std::thread::spawn(|| {
            loop {
                burn_cpu(Duration::from_millis(100));
            }
        });
    }
    let failure = if rank == 0 {
        run_as_leader(joined, &harness, echo, &timestamps)
    } else {
        let mut echo_threads = Vec::new();
        for stream in echo {
            let (sizes, does, timestamps) =
                (FrameSizes::from_config(&harness)?, harness.engine_script, Arc::clone(&timestamps));
            echo_threads.push(std::thread::spawn(move || answer_echoes(stream, &sizes, does, &timestamps)));
        }
        let failure = run_as_worker(joined, &harness, rank, &timestamps)?;
        // The run ends at the same time as the last echo. The echo thread ends then, or when the
        // leader closes the socket.
        for answer in echo_threads {
            let _ = answer.join();
        }
        Ok(failure)
    }?;
    let mut written = Ok(());
    timestamps.with_timestamps(|s| {
        let text = serde_json::to_vec(s).unwrap_or_default();
        written = std::fs::write(timestamps_file(&harness.dir, rank), text);
    });
    written?;
    Ok(failure)
}

fn run_as_worker(
    joined: JoinedRank,
    harness: &HarnessConfig,
    rank: u32,
    stamps: &Arc<TimestampSink>,
) -> anyhow::Result<Option<Failure>> {
    let (config, engine) = (worker_config(harness, rank), engine_factory(rank, harness, stamps));
    let flight: Option<Arc<dyn FlightSink>> = Some(Arc::<TimestampSink>::clone(stamps));
    let outcome = if harness.leader_outside && rank == 1 {
        let relay = mesh_leader_config(harness, rank);
        run_mesh_leader(
            joined,
            MeshLeaderParts { config: relay, local_rank: (config, engine), flight, interceptor: None },
        )
    } else {
        let parts =
            WorkerParts { config, engine, topology: harness.control_topology(), flight, interceptor: None };
        run_worker(joined, parts)
    };
    outcome.map_err(diagnostics_error)
}

fn run_as_leader(
    joined: JoinedRank,
    harness: &HarnessConfig,
    echo: Vec<UnixStream>,
    stamps: &Arc<TimestampSink>,
) -> anyhow::Result<Option<Failure>> {
    let (finished, calls) = channel();
    let clock = Arc::clone(stamps);
    let requests = EchoingRequests::new(harness, calls, echo, stamps)?;
    let mut config = leader_config(harness);
    config.session = joined.welcome.session;
    let parts = LeaderParts {
        config,
        local_rank: (!harness.leader_outside)
            .then(|| (worker_config(harness, 0), engine_factory(0, harness, stamps))),
        topology: harness.control_topology(),
        media: Box::new(|| Ok(Box::new(DiscardingMedia))),
        requests: Box::new(requests.map(CallRequest::Chunk)),
        record: Box::new(move |entry| on_record_entry(&finished, &clock, entry)),
        stop: None,
        flight: Some(Arc::<TimestampSink>::clone(stamps)),
        interceptor: None,
    };
    run_leader(joined, parts).map_err(diagnostics_error)
}

fn on_record_entry(finished: &Sender<()>, stamps: &TimestampSink, entry: &RecordEntry) {
    let RecordEntry::Call(call) = entry else { return };
    if call.request.is_none() {
        return;
    }
    let of_leader = CallTimestamps {
        id: call.call_id,
        decided_ns: call.decided_ns,
        ready_ns: call.ready_ns,
        committed_ns: call.committed_ns,
    };
    stamps.with_timestamps(|s| s.calls.push(of_leader));
    // The receiver may have ended already.
    let _ = finished.send(());
}

/// A media pipeline that returns constant tensors and writes no frames.
struct DiscardingMedia;

impl MediaPipeline for DiscardingMedia {
    fn encode_prompt(&mut self, _: &str) -> Result<Tensor, Diagnostic> {
        constant_tensor("text")
    }

    fn encode_context(&mut self, _: u32, _: &Tensors, _: bool) -> Result<Tensor, Diagnostic> {
        constant_tensor("context")
    }

    fn deliver_chunk(&mut self, _: u32, _: &Tensors, _: bool) -> Result<Delivery, Diagnostic> {
        Ok(Delivery::default())
    }

    fn finish_output(&mut self) -> Result<(), Diagnostic> {
        Ok(())
    }
}
