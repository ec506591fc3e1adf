//! Failover latency: how soon all processes of a run are gone after one of them is killed or
//! stopped, whether any process is left, and whether the run names the right rank.
//!
//! A repetition starts `tessera stream`, waits until chunks are on disk and then for a random time,
//! so that the signal hits every part of a call. It sends the signal and polls the system's process
//! list. Only the name of the failed rank comes from the run's own output.

use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use tessera_base::random::philox4x32;

use crate::BenchResult;
use crate::endings::RunEndings;
use crate::process_list::{Process, find_ranks, find_tagged, wait_until_gone};
use crate::stream_process::{StreamArgs, StreamProcess, StreamTarget};

/// Kill and stop every kind of process of a stream; measure when all are gone and which rank is
/// named
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: StreamTarget,

    /// Mesh of the topologies with more than one mesh rank
    #[arg(long, default_value = "tp=2")]
    mesh: String,

    /// Topologies to test; may be repeated
    #[arg(long = "topology", value_enum, default_values_t = [TestTopology::Mesh, TestTopology::Pp0, TestTopology::Pp1])]
    topologies: Vec<TestTopology>,

    /// Processes to signal; may be repeated
    #[arg(long = "victim", value_enum, default_values_t = Victim::ALL)]
    victims: Vec<Victim>,

    /// Signals to send; may be repeated
    #[arg(long = "signal", value_enum, default_values_t = [FaultSignal::Kill, FaultSignal::Stop])]
    signals: Vec<FaultSignal>,

    /// Number of repetitions of each case
    #[arg(long, value_name = "N", default_value_t = 50)]
    repetitions: u32,

    /// Time after the signal at which a living process counts as left behind
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    limit_s: u64,

    /// Seed of the random delays
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

/// Width of the column with the name of a case, in characters.
const NAME_WIDTH: usize = 28;
/// Number of chunks on disk before the signal.
const CHUNKS_BEFORE: u64 = 3;
/// A number of chunks that no run reaches.
const ENDLESS_CHUNKS: u32 = 1_000_000;
/// Maximum random delay from the moment at which [`CHUNKS_BEFORE`] chunks are on disk to the
/// signal.
const MAX_DELAY: Duration = Duration::from_millis(60);

/// The placement of the leader, which determines the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum TestTopology {
    /// Rank 0 leads and computes
    Mesh,
    /// Rank 0 leads; rank 1 computes
    Pp0,
    /// Rank 0 leads; rank 1 leads the mesh; the other ranks are its members
    Pp1,
}

impl TestTopology {
    fn name(self) -> &'static str {
        match self {
            TestTopology::Mesh => "mesh",
            TestTopology::Pp0 => "pp0",
            TestTopology::Pp1 => "pp1",
        }
    }
}

/// The process of a run that receives the signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Victim {
    Launcher,
    Leader,
    MeshLeader,
    Member,
}

impl Victim {
    const ALL: [Victim; 4] = [Victim::Launcher, Victim::Leader, Victim::MeshLeader, Victim::Member];

    fn name(self) -> &'static str {
        match self {
            Victim::Launcher => "launcher",
            Victim::Leader => "leader",
            Victim::MeshLeader => "mesh leader",
            Victim::Member => "member",
        }
    }

    /// Returns its rank in a run of `world` ranks, or `None` if the topology has no such process.
    fn rank_in(self, topology: TestTopology, world: u32) -> Option<u32> {
        match (self, topology) {
            (Victim::Leader, _) => Some(0),
            (Victim::MeshLeader, TestTopology::Pp0 | TestTopology::Pp1) => Some(1),
            (Victim::Member, TestTopology::Mesh) if world > 1 => Some(world - 1),
            (Victim::Member, TestTopology::Pp1) if world > 2 => Some(world - 1),
            _ => None,
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum FaultSignal {
    /// SIGKILL, which ends the process at once
    Kill,
    /// SIGSTOP, which freezes the process but keeps its sockets open
    Stop,
}

impl FaultSignal {
    fn name(self) -> &'static str {
        match self {
            FaultSignal::Kill => "SIGKILL",
            FaultSignal::Stop => "SIGSTOP",
        }
    }

    /// Returns the longest allowed time from the signal until all processes of the run are gone, in
    /// seconds.
    fn limit_s(self) -> f64 {
        match self {
            FaultSignal::Kill => 2.0,
            FaultSignal::Stop => 5.0,
        }
    }
}

/// One case: topology, process and signal, with the results of its repetitions.
struct FailoverCase {
    topology: TestTopology,
    victim: Victim,
    signal: FaultSignal,
    endings: RunEndings,
}

impl FailoverCase {
    fn name(&self) -> String {
        format!("{} {} {}", self.topology.name(), self.victim.name(), self.signal.name())
    }
}

/// Kills or stops ranks of repeated runs and measures how soon all their processes are gone.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.repetitions > 0, "--repetitions 0: nothing to measure");
    let mut cases = build_cases(args);
    ensure!(!cases.is_empty(), "no selected topology has such a process");
    // Alternate the cases, so that other load on the machine affects all of them equally.
    for repetition in 0..args.repetitions {
        for (n, case) in cases.iter_mut().enumerate() {
            run_once(args, case, random_delay(args.seed, repetition, n))
                .with_context(|| format!("{}, repetition {repetition}", case.name()))?;
        }
        eprintln!("repetition {} of {}", repetition + 1, args.repetitions);
    }
    Ok(summarize_cases(args, &cases))
}

fn build_cases(args: &Args) -> Vec<FailoverCase> {
    let mut out = Vec::new();
    for topology in &args.topologies {
        for victim in &args.victims {
            for blow in &args.signals {
                let world = 3;
                // A launcher that a user stopped, with Ctrl-Z for instance, is not a failure.
                let exists = match victim {
                    Victim::Launcher => *blow == FaultSignal::Kill,
                    _ => victim.rank_in(*topology, world).is_some(),
                };
                if exists {
                    let (topology, victim, blow) = (*topology, *victim, *blow);
                    out.push(FailoverCase { topology, victim, signal: blow, endings: RunEndings::default() });
                }
            }
        }
    }
    out
}

/// Returns the delay, a function of seed, repetition and case.
fn random_delay(seed: u64, repetition: u32, case: usize) -> Duration {
    let [word, ..] = philox4x32([repetition, case as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    MAX_DELAY.mul_f64(f64::from(word) / f64::from(u32::MAX))
}

fn run_once(args: &Args, case: &mut FailoverCase, delay: Duration) -> anyhow::Result<()> {
    let mesh = if case.topology == TestTopology::Pp0 { "tp=1" } else { &args.mesh };
    let stream = StreamArgs {
        target: args.target.clone(),
        mesh: mesh.to_string(),
        topology: case.topology.name().to_string(),
        chunks: ENDLESS_CHUNKS,
    };
    let (_dir, mut stream) = stream.start(&[])?;
    stream.wait_for_chunks(&mut stream.open_record(), CHUNKS_BEFORE)?;
    let all = find_tagged(&stream.tag);
    let ranks = find_ranks(stream.launcher_pid(), &stream.tag);
    let victim_rank = case.victim.rank_in(case.topology, ranks.len() as u32);
    let victim: Process = match victim_rank {
        None if case.victim == Victim::Launcher => {
            stream.launcher_process().context("the launcher has ended")?
        }
        None => bail!("a run of {} ranks has no {}", ranks.len(), case.victim.name()),
        Some(rank) => *ranks.get(&rank).with_context(|| format!("rank {rank} is not among {ranks:?}"))?,
    };
    ensure!(all.len() == ranks.len() + 1, "{} processes for {} ranks", all.len(), ranks.len());
    std::thread::sleep(delay);
    let signal = match case.signal {
        FaultSignal::Kill => Signal::KILL,
        FaultSignal::Stop => Signal::STOP,
    };
    let from = Instant::now();
    ensure!(
        victim.send_signal(signal),
        "the {} ended before the signal: {}",
        case.victim.name(),
        stream.output_text()
    );
    let nonce = stream.tag.clone();
    let (took, left) = wait_until_gone(&nonce, &all, from, Duration::from_secs(args.limit_s), || {
        stream.try_reap();
    });
    if left.is_empty() {
        stream.wait();
    }
    case.endings.add_run(took, left.len());
    let cause = reported_cause(&stream, case.victim);
    let is_named_correctly = match case.victim {
        // Only the leader can report it, in the record.
        Victim::Launcher => cause["code"] == "T0749",
        _ => cause["rank"].as_u64() == victim_rank.map(u64::from),
    };
    let (code, rank) = (cause["code"].as_str(), cause["rank"].as_u64());
    case.endings.add_report(&stream.describe_end(), code, rank, is_named_correctly);
    if !left.is_empty() || !is_named_correctly {
        eprintln!(
            "{}: {} processes left after {:.3} s, {}named correctly: {cause}\n{}",
            case.name(),
            left.len(),
            took.as_secs_f64(),
            if is_named_correctly { "" } else { "not " },
            stream.output_text()
        );
    }
    Ok(())
}

/// Returns the cause that the run reports: from the launcher's result, or from the record if the
/// launcher was killed.
fn reported_cause(stream: &StreamProcess, victim: Victim) -> Value {
    if victim != Victim::Launcher {
        return stream.printed_result().map_or(Value::Null, |r| r["failure"].clone());
    }
    let lines = stream.open_record().read().unwrap_or_default();
    lines.last().filter(|l| l["kind"] == "end").map_or(Value::Null, |l| l["cause"].clone())
}

fn summarize_cases(args: &Args, cases: &[FailoverCase]) -> BenchResult {
    let mut text = RunEndings::heading(NAME_WIDTH, "named");
    let mut rows = Vec::new();
    for c in cases {
        c.endings.write_lines(&c.name(), NAME_WIDTH, 1, &mut text);
        let mut row = c.endings.to_json(c.signal.limit_s());
        row.insert("topology".into(), c.topology.name().into());
        row.insert("victim".into(), c.victim.name().into());
        row.insert("signal".into(), c.signal.name().into());
        row.insert("named_correctly".into(), c.endings.named_correctly.into());
        rows.push(row);
    }
    let sum = |of: &dyn Fn(&FailoverCase) -> usize| cases.iter().map(of).sum::<usize>();
    let runs = sum(&|c| c.endings.seconds_until_gone.len());
    let kills = sum(&|c| if c.signal == FaultSignal::Kill { c.endings.seconds_until_gone.len() } else { 0 });
    let (orphans, right) = (sum(&|c| c.endings.left_behind), sum(&|c| c.endings.named_correctly as usize));
    let share = right as f64 / runs.max(1) as f64;
    let _ = write!(
        text,
        "{runs} runs, {kills} kills: {orphans} processes left behind, the right rank named in {:.1} %",
        share * 100.0
    );
    let numbers = json!({
        "bench": "failover",
        "model": args.target.model,
        "mesh": args.mesh,
        "repetitions": args.repetitions,
        "seed": args.seed,
        "runs": runs,
        "kills": kills,
        "orphans": orphans,
        "named_correctly_share": share,
        "cases": rows,
    });
    BenchResult { text, numbers }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_topology_has_its_processes() {
        let of = |t, world| Victim::ALL.map(|v| v.rank_in(t, world));
        assert_eq!(of(TestTopology::Mesh, 2), [None, Some(0), None, Some(1)]);
        assert_eq!(of(TestTopology::Pp0, 2), [None, Some(0), Some(1), None]);
        assert_eq!(of(TestTopology::Pp1, 4), [None, Some(0), Some(1), Some(3)]);
    }

    #[test]
    fn delays_differ_and_are_reproducible() {
        assert_eq!(random_delay(7, 3, 1), random_delay(7, 3, 1));
        assert_ne!(random_delay(7, 3, 1), random_delay(7, 4, 1));
        assert!((0..1000).all(|r| random_delay(0, r, 0) <= MAX_DELAY));
    }
}
