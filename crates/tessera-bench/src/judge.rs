//! The judge at the size of a rack and beyond: how long it takes to prove that ranks cannot hang, and how that grows.
//!
//! Programs are those of a pipeline over four axes. A cycle is five collectives: a sum over tp and one over dp, each
//! of a product, an exchange over ep, and a send to the next stage issued as one with a receive from the one before;
//! with events, three ops for a collective. A stage is a role.
//!
//! The floor, by what has to be touched once. Of a plan each op, the types of its operands and its constants must be
//! read: `Op` and `Value` are 400 bytes together, a constant's node in its map and the name about 100, so 3 ops
//! are 1.5 kB for a collective of a role, and 300,000 of them half a gigabyte: 50 ms at 10 GB/s, the speed of one core
//! out of memory. Ranks beyond the first of a role cost a place in a table. Of traces each launch is 32 bytes to read
//! and 12 to write, and these 12 to read twice (do members agree, do all get through): 70 bytes, 50 ms for 7.2 million.

use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use tessera_base::{Diagnostics, Span};
use tessera_ir::{Builder, DType, Opcode, Phase, Program, RoleRanks, Slots, Type};
use tessera_mesh::{Axis, AxisLayout, Mesh, Shard};
use tessera_verify::{Call, Traces, check_traces, judge};

use crate::stats::{least, median, round};
use crate::{Measured, Output, refused};

/// Time the judge over plans and traces of many ranks
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Times that each judgement is repeated; growth is measured with fewer
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: u32,

    /// Collectives of each rank at 72 ranks
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    collectives: usize,

    /// Collectives of each rank at 9,216 ranks
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    wide_collectives: usize,

    #[command(flatten)]
    pub output: Output,
}

/// Collectives of a cycle.
const CYCLE: usize = 5;
/// A rack: 72 ranks over four axes.
const RACK: &str = "tp=3,ep=2,pp=3,dp=4";
/// Meshes that grow over three decades, up to 9,216 ranks.
const MESHES: [&str; 4] =
    ["tp=3,pp=3", "tp=3,ep=2,pp=3,dp=4", "tp=4,ep=6,pp=3,dp=12", "tp=8,ep=12,pp=3,dp=32"];

/// Runs the benchmark.
pub fn run(args: &Args) -> anyhow::Result<Measured> {
    ensure!(args.rounds > 0, "--rounds 0: nothing to time");
    let least_of = CYCLE * 2;
    ensure!(
        args.collectives >= least_of && args.wide_collectives >= least_of,
        "at least {least_of} collectives of a rank"
    );
    let few = args.rounds.min(3);
    let mut lines = Vec::new();
    let mut numbers = serde_json::json!({"bench": "judge", "rounds": args.rounds});

    // First, so that the process's peak is its own.
    let wide = Planned::of(MESHES[3], args.wide_collectives)?;
    let wide = Timing::of(args.rounds, wide.launches(), || wide.judge())?;
    let peak = peak_mib()?;
    lines.push(wide.line("plan of 9,216 ranks", &format!(", peak memory {peak:.0} MiB")));
    numbers["plan_9216"] = wide.json();
    numbers["plan_9216"]["peak_mib"] = round(peak).into();

    let begun = Instant::now();
    let rack = Planned::of(RACK, args.collectives)?;
    let built = begun.elapsed().as_secs_f64();
    let rack_time = Timing::of(args.rounds, rack.launches(), || rack.judge())?;
    lines.push(rack_time.line("plan of 72 ranks", &format!(", built in {built:.2} s")));
    numbers["plan_72"] = rack_time.json();

    let begun = Instant::now();
    let seen = observed(&rack.mesh, args.collectives);
    let built = begun.elapsed().as_secs_f64();
    drop(rack);
    let seen_time = Timing::of(args.rounds, 72 * args.collectives, || clean(check_traces(&seen)))?;
    lines.push(seen_time.line("72 traces", &format!(", built in {built:.2} s")));
    numbers["traces_72"] = seen_time.json();
    drop(seen);

    let sizes: Vec<usize> =
        [1000, 100, 10, 1].map(|n| args.collectives / n).into_iter().filter(|n| *n >= least_of).collect();
    let mut growth = |name: &str, unit: &str, points: Vec<(usize, Timing)>| {
        let slope = slope(&points);
        lines.push(format!("{name} grows with the power {slope:.2} of {unit}:"));
        for (size, t) in &points {
            lines.push(format!("  {size:>9} {unit}: {:9.3} ms, {:8.1} ns each", t.cpu_ms(), t.each_ns()));
        }
        let points: Vec<_> =
            points.iter().map(|(n, t)| serde_json::json!({"size": n, "time": t.json()})).collect();
        numbers["growth"][name] = serde_json::json!({"over": unit, "slope": round(slope), "points": points});
    };
    let points = sizes.iter().map(|n| {
        let p = Planned::of(RACK, *n)?;
        Ok((*n, Timing::of(few, p.launches(), || p.judge())?))
    });
    growth("plan", "collectives of a rank", points.collect::<anyhow::Result<_>>()?);
    let points = sizes.iter().map(|n| {
        let t = observed(&RACK.parse().map_err(|d: Box<_>| refused(vec![*d]))?, *n);
        Ok((*n, Timing::of(few, 72 * n, || clean(check_traces(&t)))?))
    });
    growth("traces", "launches of a rank", points.collect::<anyhow::Result<_>>()?);
    let points = MESHES.iter().map(|m| {
        let p = Planned::of(m, args.wide_collectives)?;
        Ok((p.mesh.ranks() as usize, Timing::of(few, p.launches(), || p.judge())?))
    });
    growth("mesh", "ranks", points.collect::<anyhow::Result<_>>()?);
    Ok(Measured { text: lines.join("\n"), numbers })
}

/// How long a judgement took, each time.
struct Timing {
    seconds: Vec<f64>,
    /// The same by the clock of the thread, which stands while others have the core.
    cpu_seconds: Vec<f64>,
    /// Collectives that were judged, of all ranks.
    launches: usize,
}

impl Timing {
    fn of(rounds: u32, launches: usize, judge: impl Fn() -> anyhow::Result<()>) -> anyhow::Result<Timing> {
        let mut out = Timing { seconds: Vec::new(), cpu_seconds: Vec::new(), launches };
        for _ in 0..rounds {
            let (begun, cpu) = (Instant::now(), thread_seconds());
            judge()?;
            out.cpu_seconds.push(thread_seconds() - cpu);
            out.seconds.push(begun.elapsed().as_secs_f64());
        }
        Ok(out)
    }

    fn median_ms(&self) -> f64 {
        median(&self.seconds) * 1e3
    }

    fn cpu_ms(&self) -> f64 {
        median(&self.cpu_seconds) * 1e3
    }

    fn each_ns(&self) -> f64 {
        median(&self.cpu_seconds) * 1e9 / self.launches as f64
    }

    fn line(&self, what: &str, more: &str) -> String {
        format!(
            "{what}, {} collectives: median {:.1} ms, least {:.1} ms ({:.1} ms on the core) of {}, {:.1} ns each on it{more}",
            self.launches,
            self.median_ms(),
            least(&self.seconds) * 1e3,
            self.cpu_ms(),
            self.seconds.len(),
            self.each_ns(),
        )
    }

    fn json(&self) -> serde_json::Value {
        serde_json::json!({
            "launches": self.launches,
            "median_ms": round(self.median_ms()),
            "min_ms": round(least(&self.seconds) * 1e3),
            "median_cpu_ms": round(self.cpu_ms()),
            "each_ns": round(self.each_ns()),
        })
    }
}

/// The exponent of the power law that fits best: least squares of log time over log size.
fn slope(points: &[(usize, Timing)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(n, t)| ((*n as f64).ln(), t.cpu_ms().ln())).collect();
    let n = logs.len() as f64;
    let (x, y) = (logs.iter().map(|p| p.0).sum::<f64>() / n, logs.iter().map(|p| p.1).sum::<f64>() / n);
    let (over, under) =
        logs.iter().fold((0.0, 0.0), |(o, u), p| (o + (p.0 - x) * (p.1 - y), u + (p.0 - x).powi(2)));
    if under > 0.0 { over / under } else { 0.0 }
}

/// Time that this thread has had a core.
fn thread_seconds() -> f64 {
    let t = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    t.tv_sec as f64 + t.tv_nsec as f64 / 1e9
}

/// Most memory that this process has held, in MiB.
fn peak_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("no VmHWM in /proc/self/status")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

/// A plan of one phase.
struct Planned {
    mesh: Mesh,
    roles: Vec<RoleRanks>,
    phase: Phase,
    collectives: usize,
}

impl Planned {
    fn of(mesh: &str, collectives: usize) -> anyhow::Result<Planned> {
        let mesh: Mesh = mesh.parse().map_err(|d: Box<_>| refused(vec![*d]))?;
        let names: Vec<String> = (0..mesh.size(Axis::Pp)).map(|s| format!("stage@pp{s}")).collect();
        let programs: Vec<Program> =
            names.iter().map(|n| program(n, mesh, collectives)).collect::<anyhow::Result<_>>()?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Ok(Planned {
            mesh,
            roles: RoleRanks::by_name(&mesh, &names),
            phase: Phase {
                name: "denoise".to_string(),
                memory: vec![Slots::default(); programs.len()],
                programs,
            },
            collectives,
        })
    }

    /// Collectives of all ranks together.
    fn launches(&self) -> usize {
        self.mesh.ranks() as usize * self.collectives
    }

    fn judge(&self) -> anyhow::Result<()> {
        let found = judge(&self.mesh, &self.roles, &self.phase);
        clean(found)
    }
}

/// A stage's program.
fn program(role: &str, mesh: Mesh, collectives: usize) -> anyhow::Result<Program> {
    let stages = mesh.size(Axis::Pp);
    let stage = tessera_ir::rules::role_coord(role, Axis::Pp);
    let cut = |dim| AxisLayout::Shard(Shard { dim, uneven: None, ways: None });
    let ty = |shape: [u64; 2]| Type::new(DType::Bf16, shape);
    let streams = ["compute", "tp_collective", "ep_collective", "dp_collective", "pp_send"];
    let mut b = Builder::role("denoise", role, mesh, &streams);
    // Operands of a product whose terms lie over an axis.
    let mut terms = |axis: Axis| {
        let x = b.weight(&format!("x.{axis}"), ty([64, 32]).on(axis, cut(1)));
        let w = b.weight(&format!("w.{axis}"), ty([48, 32]).on(axis, cut(1)));
        [x, w]
    };
    let (over_tp, over_dp) = (terms(Axis::Tp), terms(Axis::Dp));
    let experts = b.weight("tokens", ty([16, 24 * 96]).on(Axis::Ep, cut(0)));
    let mut left = collectives;
    let mut batch = 0i64;
    while left > 0 {
        let mut last = None;
        for (axis, operands, stream) in
            [(Axis::Tp, over_tp, "tp_collective"), (Axis::Dp, over_dp, "dp_collective")]
        {
            if left > 0 && mesh.size(axis) > 1 {
                let p = b.op(Opcode::Matmul, &operands);
                let e = b.op(Opcode::EventRecord, &[]);
                b.after(e).stream(stream).attr("axis", axis.name()).attr("reduction", "sum");
                let t = b.issue(Opcode::AllReduce, &[p]);
                last = b.wait(t, None);
                left -= 1;
            }
        }
        if left > 0 && mesh.size(Axis::Ep) > 1 {
            b.stream("ep_collective").attr("axis", "ep").attr("concat", 0i64).attr("split", 1i64);
            let t = b.issue(Opcode::AllToAll, &[experts]);
            b.wait(t, None);
            left -= 1;
        }
        if let Some(y) = last.filter(|_| left > 1) {
            let e = b.op(Opcode::EventRecord, &[]);
            batch += 1;
            let to = i64::from((stage + 1) % stages);
            b.after(e).stream("pp_send").attr("axis", "pp").attr("to", to).attr("batch", batch);
            let sent = b.issue(Opcode::Send, &[y]);
            let from = i64::from((stage + stages - 1) % stages);
            b.stream("pp_send").attr("axis", "pp").attr("from", from).attr("batch", batch);
            let taken = b.issue(Opcode::Recv, &[]);
            b.wait(sent, None);
            b.wait(taken, Some(ty([64, 48])));
            left -= 2;
        }
    }
    b.finish().map_err(|e| anyhow!("{}", e.iter().map(|e| e.message.as_str()).collect::<Vec<_>>().join("; ")))
}

/// What 72 ranks of such a plan launch, each in a trace of its own.
fn observed(mesh: &Mesh, collectives: usize) -> Traces {
    let mut t = Traces::new();
    let call = |op: &str, count: u64| Call {
        op: op.to_string(),
        dtype: "bf16".to_string(),
        count,
        reduction: (op == "all_reduce").then(|| "sum".to_string()),
        ..Call::default()
    };
    let stages = mesh.size(Axis::Pp);
    for rank in mesh.iter() {
        let at = t.rank(rank.0, &format!("rank{rank}.jsonl"));
        let groups = Axis::ALL.map(|a| {
            let members = mesh.group_of(rank, a);
            t.group(&format!("{a}{}", members[0]), &members.iter().map(|r| r.0).collect::<Vec<u32>>())
        });
        let stage = mesh.coord_of(rank).on(Axis::Pp);
        let peer = |s: u32| Some(mesh.rank_at(mesh.coord_of(rank).with(Axis::Pp, s % stages)).0);
        let calls = [
            (Axis::Tp, call("all_reduce", 64 * 48)),
            (Axis::Dp, call("all_reduce", 64 * 48)),
            (Axis::Ep, call("all_to_all", 16 * 2304)),
            (Axis::Pp, Call { peer: peer(stage + 1), ..call("send", 64 * 48) }),
            (Axis::Pp, Call { peer: peer(stage + stages - 1), ..call("recv", 64 * 48) }),
        ];
        for n in 0..collectives {
            let (axis, call) = &calls[n % CYCLE];
            let batch = if *axis == Axis::Pp { (n / CYCLE + 1) as u32 } else { 0 };
            let span = Span { start: n * 100, end: n * 100 + 99 };
            t.push(at, groups[*axis as usize], call.clone(), axis.name(), batch, span);
        }
    }
    t
}

fn clean(found: Diagnostics) -> anyhow::Result<()> {
    if found.is_empty() { Ok(()) } else { Err(refused(found)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_is_judged_and_right() {
        let output = Output { json: true, save: false };
        let result = run(&Args { rounds: 1, collectives: 200, wide_collectives: 10, output }).unwrap();
        assert_eq!(result.numbers["plan_9216"]["launches"], 92_160);
        assert_eq!(result.numbers["traces_72"]["launches"], 14_400);
        assert_eq!(result.numbers["growth"]["mesh"]["points"][0]["size"], 9);
    }

    #[test]
    fn a_rank_launches_what_was_asked_for() {
        for collectives in [10, 11, 12, 13, 14] {
            let p = program("stage@pp1", RACK.parse().unwrap(), collectives).unwrap();
            assert_eq!(p.collectives().count(), collectives);
            assert_eq!(p.role, "stage@pp1");
        }
    }
}
