//! How fast a run is gone when one of its processes is killed or stopped, whether anybody is left, and whether the
//! run names the right one.
//!
//! A repetition starts `tessera stream`, waits until chunks are on disk, waits a random time more so that every part
//! of a call is hit, sends the signal and watches the system's list of processes. Nothing is taken from what the run
//! says of itself but the name.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use rustix::process::Signal;
use serde_json::{Value, json};
use tessera_base::random::philox4x32;

use crate::child::{Stream, Target};
use crate::procs::{Process, marked, ranks, until_gone};
use crate::stats::{most, quantile, spread};
use crate::{Measured, Output};

/// Kill and stop every kind of process of a stream: how soon all are gone, and who is named
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    target: Target,

    /// Ranks of the mesh, where the topology has more than one
    #[arg(long, default_value = "tp=2")]
    mesh: String,

    /// Topologies; may be repeated
    #[arg(long = "topology", value_enum, default_values_t = [Topology::Mesh, Topology::Pp0, Topology::Pp1])]
    topologies: Vec<Topology>,

    /// Processes; may be repeated
    #[arg(long = "victim", value_enum, default_values_t = Victim::ALL)]
    victims: Vec<Victim>,

    /// Signals; may be repeated
    #[arg(long = "signal", value_enum, default_values_t = [Blow::Kill, Blow::Stop])]
    signals: Vec<Blow>,

    /// How often each
    #[arg(long, value_name = "N", default_value_t = 50)]
    repetitions: u32,

    /// Whoever lives so long after the signal counts as left behind
    #[arg(long, value_name = "SECONDS", default_value_t = 20)]
    limit_s: u64,

    /// Seed of the moments
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    #[command(flatten)]
    pub output: Output,
}

/// Chunks on disk before anything is done to a run.
const CHUNKS_BEFORE: u64 = 3;
/// Chunks that are asked for, which nobody waits for.
const ENDLESS: u32 = 1_000_000;
/// The signal comes at most so long after the chunks.
const MOST_DELAY: Duration = Duration::from_millis(60);

/// Where the leader stands, and which links there are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Topology {
    /// Rank 0 leads and computes
    Mesh,
    /// Rank 0 leads, rank 1 computes
    Pp0,
    /// Rank 0 leads, rank 1 leads the mesh, others are its members
    Pp1,
}

impl Topology {
    fn name(self) -> &'static str {
        match self {
            Topology::Mesh => "mesh",
            Topology::Pp0 => "pp0",
            Topology::Pp1 => "pp1",
        }
    }
}

/// A process of a run by what it does.
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

    /// Its rank in a world of so many, if this topology has it.
    fn rank(self, topology: Topology, world: u32) -> Option<u32> {
        match (self, topology) {
            (Victim::Leader, _) => Some(0),
            (Victim::MeshLeader, Topology::Pp0 | Topology::Pp1) => Some(1),
            (Victim::Member, Topology::Mesh) if world > 1 => Some(world - 1),
            (Victim::Member, Topology::Pp1) if world > 2 => Some(world - 1),
            _ => None,
        }
    }
}

/// What is done to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
enum Blow {
    /// SIGKILL
    Kill,
    /// SIGSTOP
    Stop,
}

impl Blow {
    fn name(self) -> &'static str {
        match self {
            Blow::Kill => "SIGKILL",
            Blow::Stop => "SIGSTOP",
        }
    }

    /// Everything is gone by then, in seconds.
    fn bar_s(self) -> f64 {
        match self {
            Blow::Kill => 2.0,
            Blow::Stop => 5.0,
        }
    }
}

/// One line of the table.
struct Case {
    topology: Topology,
    victim: Victim,
    blow: Blow,
    took_s: Vec<f64>,
    left: usize,
    right: u32,
    /// What runs said, and how often.
    said: BTreeMap<String, u32>,
}

impl Case {
    fn name(&self) -> String {
        format!("{} {} {}", self.topology.name(), self.victim.name(), self.blow.name())
    }
}

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.repetitions > 0, "--repetitions 0: nothing to measure");
    let mut cases = cases(args);
    ensure!(!cases.is_empty(), "no topology has such a process");
    // In turn, so that whatever else the machine does falls on all alike.
    for repetition in 0..args.repetitions {
        for (n, case) in cases.iter_mut().enumerate() {
            once(args, case, delay(args.seed, repetition, n))
                .with_context(|| format!("{}, repetition {repetition}", case.name()))?;
        }
        eprintln!("repetition {} of {}", repetition + 1, args.repetitions);
    }
    Ok(told(args, &cases))
}

fn cases(args: &Args) -> Vec<Case> {
    let mut out = Vec::new();
    for topology in &args.topologies {
        for victim in &args.victims {
            for blow in &args.signals {
                let world = 3;
                // A launcher that a person stopped, by Ctrl-Z for instance, is not a failure.
                let there = match victim {
                    Victim::Launcher => *blow == Blow::Kill,
                    _ => victim.rank(*topology, world).is_some(),
                };
                if there {
                    let (topology, victim, blow) = (*topology, *victim, *blow);
                    out.push(Case {
                        topology,
                        victim,
                        blow,
                        took_s: Vec::new(),
                        left: 0,
                        right: 0,
                        said: BTreeMap::new(),
                    });
                }
            }
        }
    }
    out
}

/// A moment that the seed, the repetition and the case name.
fn delay(seed: u64, repetition: u32, case: usize) -> Duration {
    let [word, ..] = philox4x32([repetition, case as u32, 0, 0], [seed as u32, (seed >> 32) as u32]);
    MOST_DELAY.mul_f64(f64::from(word) / f64::from(u32::MAX))
}

fn once(args: &Args, case: &mut Case, delay: Duration) -> anyhow::Result<()> {
    let mesh = if case.topology == Topology::Pp0 { "tp=1" } else { &args.mesh };
    let (_dir, mut stream) = Stream::fresh(&args.target, mesh, case.topology.name(), ENDLESS)?;
    stream.until_chunks(&mut stream.record(), CHUNKS_BEFORE)?;
    let all = marked(&stream.nonce);
    let ranks = ranks(stream.id(), &stream.nonce);
    let number = case.victim.rank(case.topology, ranks.len() as u32);
    let victim: Process = match number {
        None if case.victim == Victim::Launcher => stream.launcher().context("the launcher is gone")?,
        None => bail!("a run of {} ranks has no {}", ranks.len(), case.victim.name()),
        Some(rank) => *ranks.get(&rank).with_context(|| format!("rank {rank} is not among {ranks:?}"))?,
    };
    ensure!(all.len() == ranks.len() + 1, "{} processes for {} ranks", all.len(), ranks.len());
    std::thread::sleep(delay);
    let signal = match case.blow {
        Blow::Kill => Signal::KILL,
        Blow::Stop => Signal::STOP,
    };
    let from = Instant::now();
    ensure!(victim.signal(signal), "{} was gone before the signal: {}", case.victim.name(), stream.said());
    let nonce = stream.nonce.clone();
    let (took, left) = until_gone(&nonce, &all, from, Duration::from_secs(args.limit_s), || {
        stream.collect();
    });
    if left.is_empty() {
        stream.wait();
    }
    case.took_s.push(took.as_secs_f64());
    case.left += left.len();
    let cause = cause(&stream, case.victim);
    let right = match case.victim {
        // Nobody is left to name it but the leader, in the record.
        Victim::Launcher => cause["code"] == "T0749",
        _ => cause["rank"].as_u64() == number.map(u64::from),
    };
    case.right += u32::from(right);
    let rank = cause["rank"].as_u64().map_or("no rank".to_string(), |r| format!("rank {r}"));
    let said = format!("{}, {}, {rank}", stream.ended(), cause["code"].as_str().unwrap_or("no code"));
    *case.said.entry(said).or_default() += 1;
    if !left.is_empty() || !right {
        eprintln!(
            "{}: {} left after {:.3} s, {}named right: {cause}\n{}",
            case.name(),
            left.len(),
            took.as_secs_f64(),
            if right { "" } else { "not " },
            stream.said()
        );
    }
    Ok(())
}

/// Why the run says it ended: the launcher's word, or of a launcher that is gone the record's.
fn cause(stream: &Stream, victim: Victim) -> Value {
    if victim != Victim::Launcher {
        return stream.result().map_or(Value::Null, |r| r["failure"].clone());
    }
    let lines = stream.record().read().unwrap_or_default();
    lines.last().filter(|l| l["kind"] == "end").map_or(Value::Null, |l| l["cause"].clone())
}

fn told(args: &Args, cases: &[Case]) -> Measured {
    let mut text = format!(
        "{:<28} {:>4} {:>8} {:>8} {:>8}  left  named\n",
        "gone after", "n", "p50 s", "p99 s", "max s"
    );
    let mut rows = Vec::new();
    for c in cases {
        let n = c.took_s.len();
        let (p50, p99, max) = (quantile(&c.took_s, 0.5), quantile(&c.took_s, 0.99), most(&c.took_s));
        let _ = writeln!(
            text,
            "{:<28} {n:>4} {p50:>8.3} {p99:>8.3} {max:>8.3}  {:>4}  {} of {n}",
            c.name(),
            c.left,
            c.right
        );
        for (said, times) in &c.said {
            let _ = writeln!(text, "    {times:>4} x {said}");
        }
        rows.push(json!({
            "topology": c.topology.name(),
            "victim": c.victim.name(),
            "signal": c.blow.name(),
            "seconds": spread(&c.took_s),
            "bar_s": c.blow.bar_s(),
            "within_bar": max <= c.blow.bar_s(),
            "orphans": c.left,
            "named_right": c.right,
            "said": c.said,
        }));
    }
    let sum = |of: &dyn Fn(&Case) -> usize| cases.iter().map(of).sum::<usize>();
    let (runs, orphans, right) = (sum(&|c| c.took_s.len()), sum(&|c| c.left), sum(&|c| c.right as usize));
    let kills = sum(&|c| if c.blow == Blow::Kill { c.took_s.len() } else { 0 });
    let share = right as f64 / runs.max(1) as f64;
    let _ = write!(
        text,
        "{runs} runs, {kills} kills: {orphans} processes left behind, the right one named in {:.1} %",
        share * 100.0
    );
    let numbers = json!({
        "bench": "kills",
        "model": args.target.model,
        "mesh": args.mesh,
        "repetitions": args.repetitions,
        "seed": args.seed,
        "runs": runs,
        "kills": kills,
        "orphans": orphans,
        "named_right_share": share,
        "cases": rows,
    });
    Measured { text, numbers }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_topology_has_its_processes() {
        let of = |t, world| Victim::ALL.map(|v| v.rank(t, world));
        assert_eq!(of(Topology::Mesh, 2), [None, Some(0), None, Some(1)]);
        assert_eq!(of(Topology::Pp0, 2), [None, Some(0), Some(1), None]);
        assert_eq!(of(Topology::Pp1, 4), [None, Some(0), Some(1), Some(3)]);
    }

    #[test]
    fn moments_differ_and_come_again() {
        assert_eq!(delay(7, 3, 1), delay(7, 3, 1));
        assert_ne!(delay(7, 3, 1), delay(7, 4, 1));
        assert!((0..1000).all(|r| delay(0, r, 0) <= MOST_DELAY));
    }
}
