//! The verifier at the size of a rack and beyond: the time of a proof that ranks cannot hang, and
//! how the time grows.
//!
//! The programs form a pipeline over four axes. One period consists of five collectives: an
//! all-reduce over tp and one over dp, each of a matmul's result; an all-to-all over ep; and a send
//! to the next stage, batched with a receive from the previous stage. With events there are three
//! ops per collective. Each stage is a role.
//!
//! Lower bound from the data that the verifier must touch once: it must read each op of a plan, the
//! types of its operands and its attributes. `Op` and `Value` take 400 bytes together, an
//! attribute's map node and its name about 100, so 3 ops take 1.5 kB per collective of a role, and
//! 300,000 collectives half a gigabyte: 50 ms at 10 GB/s, the memory bandwidth of one core. Further
//! ranks of a role cost one table entry each. In traces, each launch is 32 bytes to read and 12 to
//! write, and these 12 are read twice (do the members agree, does every rank terminate): 70 bytes,
//! or 50 ms for 7.2 million launches.

use std::time::Instant;

use anyhow::{Context, anyhow, ensure};
use tessera_base::{Diagnostics, Span};
use tessera_ir::{Builder, DType, Opcode, Phase, Program, RoleRanks, Slots, Type};
use tessera_mesh::{Axis, AxisLayout, Group, Mesh, Shard};
use tessera_verify::{ObservedCall, Traces, check_traces, verify_phase};

use crate::stats::{Rounds, median, min_value, regression_slope, round_to_millis};
use crate::{BenchResult, diagnostics_error};

/// Time the verifier on plans and traces of many ranks
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Number of repetitions of each verification; growth is measured with fewer
    #[arg(long, value_name = "N", default_value_t = 7)]
    rounds: u32,

    /// Number of collectives per rank at 72 ranks
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    collectives: usize,

    /// Number of collectives per rank at 9,216 ranks
    #[arg(long, value_name = "N", default_value_t = 2_000)]
    wide_collectives: usize,
}

/// Number of collectives of a period: two all-reduces, an all-to-all, a send and a receive.
const PERIOD: usize = 5;
/// A rack: 72 ranks over four axes.
const RACK: &str = "tp=3,ep=2,pp=3,dp=4";
/// Meshes that grow over three decades, up to 9,216 ranks.
const MESHES: [&str; 4] =
    ["tp=3,pp=3", "tp=3,ep=2,pp=3,dp=4", "tp=4,ep=6,pp=3,dp=12", "tp=8,ep=12,pp=3,dp=32"];

/// Times the proof that ranks cannot hang, for growing programs of a pipeline.
pub fn run(args: &Args) -> anyhow::Result<BenchResult> {
    ensure!(args.rounds > 0, "--rounds 0: nothing to time");
    let min_collectives = PERIOD * 2;
    ensure!(
        args.collectives >= min_collectives && args.wide_collectives >= min_collectives,
        "the minimum is {min_collectives} collectives per rank"
    );
    let growth_rounds = args.rounds.min(3);
    let mut lines = Vec::new();
    let mut numbers = serde_json::json!({"bench": "verifier", "rounds": args.rounds});

    // This plan comes first, so that the peak memory of the process is its own.
    let wide = SyntheticPlan::build(MESHES[3], args.wide_collectives)?;
    let wide = VerifyTiming::measure(args.rounds, wide.launch_count(), || wide.verify_plan())?;
    let peak = peak_memory_mib()?;
    lines.push(wide.format_line("plan of 9,216 ranks", &format!(", peak memory {peak:.0} MiB")));
    numbers["plan_9216"] = wide.to_json();
    numbers["plan_9216"]["peak_mib"] = round_to_millis(peak).into();

    let begun = Instant::now();
    let rack = SyntheticPlan::build(RACK, args.collectives)?;
    let built = begun.elapsed().as_secs_f64();
    let rack_time = VerifyTiming::measure(args.rounds, rack.launch_count(), || rack.verify_plan())?;
    lines.push(rack_time.format_line("plan of 72 ranks", &format!(", built in {built:.2} s")));
    numbers["plan_72"] = rack_time.to_json();

    let begun = Instant::now();
    let traces = synthetic_traces(&rack.mesh, args.collectives);
    let built = begun.elapsed().as_secs_f64();
    drop(rack);
    let traces_time = VerifyTiming::measure(args.rounds, 72 * args.collectives, || {
        expect_no_diagnostics(check_traces(&traces))
    })?;
    lines.push(traces_time.format_line("72 traces", &format!(", built in {built:.2} s")));
    numbers["traces_72"] = traces_time.to_json();
    drop(traces);

    let sizes: Vec<usize> = [1000, 100, 10, 1]
        .map(|n| args.collectives / n)
        .into_iter()
        .filter(|n| *n >= min_collectives)
        .collect();
    let mut growth = |name: &str, unit: &str, points: Vec<(usize, VerifyTiming)>| {
        let slope = scaling_exponent(&points);
        lines.push(format!("{name} grows with exponent {slope:.2} in {unit}:"));
        for (size, t) in &points {
            lines.push(format!(
                "  {size:>9} {unit}: {:9.3} ms, {:8.1} ns each",
                t.cpu_ms(),
                t.ns_per_launch()
            ));
        }
        let points: Vec<_> =
            points.iter().map(|(n, t)| serde_json::json!({"size": n, "time": t.to_json()})).collect();
        numbers["growth"][name] =
            serde_json::json!({"over": unit, "slope": round_to_millis(slope), "points": points});
    };
    let points = sizes.iter().map(|n| {
        let p = SyntheticPlan::build(RACK, *n)?;
        Ok((*n, VerifyTiming::measure(growth_rounds, p.launch_count(), || p.verify_plan())?))
    });
    growth("plan", "collectives of a rank", points.collect::<anyhow::Result<_>>()?);
    let points = sizes.iter().map(|n| {
        let t = synthetic_traces(&RACK.parse().map_err(|d: Box<_>| diagnostics_error(vec![*d]))?, *n);
        Ok((*n, VerifyTiming::measure(growth_rounds, 72 * n, || expect_no_diagnostics(check_traces(&t)))?))
    });
    growth("traces", "launches of a rank", points.collect::<anyhow::Result<_>>()?);
    let points = MESHES.iter().map(|m| {
        let p = SyntheticPlan::build(m, args.wide_collectives)?;
        Ok((
            p.mesh.world_size() as usize,
            VerifyTiming::measure(growth_rounds, p.launch_count(), || p.verify_plan())?,
        ))
    });
    growth("mesh", "ranks", points.collect::<anyhow::Result<_>>()?);
    Ok(BenchResult { text: lines.join("\n"), numbers })
}

/// The durations of the repetitions of a verification.
struct VerifyTiming {
    rounds: Rounds,
    /// Number of verified collectives of all ranks.
    launches: usize,
}

impl VerifyTiming {
    fn measure(
        rounds: u32,
        launches: usize,
        verify: impl Fn() -> anyhow::Result<()>,
    ) -> anyhow::Result<VerifyTiming> {
        let ((), rounds) = Rounds::measure(rounds, verify)?;
        Ok(VerifyTiming { rounds, launches })
    }

    fn median_ms(&self) -> f64 {
        median(&self.rounds.seconds) * 1e3
    }

    fn cpu_ms(&self) -> f64 {
        median(&self.rounds.cpu_seconds) * 1e3
    }

    fn ns_per_launch(&self) -> f64 {
        median(&self.rounds.cpu_seconds) * 1e9 / self.launches as f64
    }

    fn format_line(&self, what: &str, more: &str) -> String {
        format!(
            "{what}, {} collectives: median {:.1} ms, min {:.1} ms (CPU {:.1} ms) of {}, {:.1} ns of CPU time each{more}",
            self.launches,
            self.median_ms(),
            min_value(&self.rounds.seconds) * 1e3,
            self.cpu_ms(),
            self.rounds.seconds.len(),
            self.ns_per_launch(),
        )
    }

    fn to_json(&self) -> serde_json::Value {
        serde_json::json!({
            "launches": self.launches,
            "median_ms": round_to_millis(self.median_ms()),
            "min_ms": round_to_millis(min_value(&self.rounds.seconds) * 1e3),
            "median_cpu_ms": round_to_millis(self.cpu_ms()),
            "each_ns": round_to_millis(self.ns_per_launch()),
        })
    }
}

/// Returns the exponent of the power law with the best fit.
fn scaling_exponent(points: &[(usize, VerifyTiming)]) -> f64 {
    let logs: Vec<(f64, f64)> = points.iter().map(|(n, t)| ((*n as f64).ln(), t.cpu_ms().ln())).collect();
    regression_slope(&logs)
}

/// Returns the peak resident memory of this process in MiB.
fn peak_memory_mib() -> anyhow::Result<f64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line =
        status.lines().find_map(|l| l.strip_prefix("VmHWM:")).context("/proc/self/status has no VmHWM")?;
    let kib: f64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kib / 1024.0)
}

/// A plan of one phase, with a role per pipeline stage and `collectives` collectives per rank.
struct SyntheticPlan {
    mesh: Mesh,
    roles: Vec<RoleRanks>,
    phase: Phase,
    collectives: usize,
}

impl SyntheticPlan {
    fn build(mesh: &str, collectives: usize) -> anyhow::Result<SyntheticPlan> {
        let mesh: Mesh = mesh.parse().map_err(|d: Box<_>| diagnostics_error(vec![*d]))?;
        let names: Vec<String> = (0..mesh.axis_size(Axis::Pp)).map(|s| format!("stage@pp{s}")).collect();
        let programs: Vec<Program> =
            names.iter().map(|n| stage_program(n, mesh, collectives)).collect::<anyhow::Result<_>>()?;
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        Ok(SyntheticPlan {
            mesh,
            roles: RoleRanks::assign_by_name(&mesh, &names),
            phase: Phase {
                name: "denoise".to_string(),
                slots: vec![Slots::default(); programs.len()],
                programs,
            },
            collectives,
        })
    }

    /// Returns the number of collectives of all ranks together.
    fn launch_count(&self) -> usize {
        self.mesh.world_size() as usize * self.collectives
    }

    fn verify_plan(&self) -> anyhow::Result<()> {
        let found = verify_phase(&self.mesh, &self.roles, &self.phase);
        expect_no_diagnostics(found)
    }
}

/// Builds the program of a stage with `collectives` collectives; its last period may be partial.
fn stage_program(role: &str, mesh: Mesh, collectives: usize) -> anyhow::Result<Program> {
    let stages = mesh.axis_size(Axis::Pp);
    let stage = tessera_ir::rules::role_coord(role, Axis::Pp);
    let sharded = |dim| AxisLayout::Shard(Shard { dim, uneven: None, subgroup_size: None });
    let ty = |shape: [u64; 2]| Type::new(DType::Bf16, shape);
    let streams = ["compute", "tp_collective", "ep_collective", "dp_collective", "pp_send"];
    let mut b = Builder::new_role("denoise", role, mesh, &streams);
    // Operands of a matmul whose contraction dim is sharded over an axis.
    let mut matmul_operands = |axis: Axis| {
        let x = b.add_weight(&format!("x.{axis}"), ty([64, 32]).with_axis_layout(axis, sharded(1)));
        let w = b.add_weight(&format!("w.{axis}"), ty([48, 32]).with_axis_layout(axis, sharded(1)));
        [x, w]
    };
    let (over_tp, over_dp) = (matmul_operands(Axis::Tp), matmul_operands(Axis::Dp));
    let experts = b.add_weight("tokens", ty([16, 24 * 96]).with_axis_layout(Axis::Ep, sharded(0)));
    let mut remaining = collectives;
    let mut batch = 0i64;
    while remaining > 0 {
        let mut last = None;
        for (axis, operands, stream) in
            [(Axis::Tp, over_tp, "tp_collective"), (Axis::Dp, over_dp, "dp_collective")]
        {
            if remaining > 0 && mesh.axis_size(axis) > 1 {
                let p = b.add_op(Opcode::Matmul, &operands);
                let e = b.add_op(Opcode::EventRecord, &[]);
                b.start_after(e)
                    .set_stream(stream)
                    .set_attr("axis", axis.name())
                    .set_attr("reduction", "sum");
                let t = b.add_issue(Opcode::AllReduce, &[p]);
                last = b.add_wait(t, None);
                remaining -= 1;
            }
        }
        if remaining > 0 && mesh.axis_size(Axis::Ep) > 1 {
            b.set_stream("ep_collective")
                .set_attr("axis", "ep")
                .set_attr("concat", 0i64)
                .set_attr("split", 1i64);
            let t = b.add_issue(Opcode::AllToAll, &[experts]);
            b.add_wait(t, None);
            remaining -= 1;
        }
        if let Some(y) = last.filter(|_| remaining > 1) {
            let e = b.add_op(Opcode::EventRecord, &[]);
            batch += 1;
            let to = i64::from((stage + 1) % stages);
            b.start_after(e)
                .set_stream("pp_send")
                .set_attr("axis", "pp")
                .set_attr("to", to)
                .set_attr("batch", batch);
            let sent = b.add_issue(Opcode::Send, &[y]);
            let from = i64::from((stage + stages - 1) % stages);
            b.set_stream("pp_send").set_attr("axis", "pp").set_attr("from", from).set_attr("batch", batch);
            let taken = b.add_issue(Opcode::Recv, &[]);
            b.add_wait(sent, None);
            b.add_wait(taken, Some(ty([64, 48])));
            remaining -= 2;
        }
    }
    b.finish().map_err(|e| anyhow!("{}", e.iter().map(|e| e.message.as_str()).collect::<Vec<_>>().join("; ")))
}

/// Builds traces of all ranks with the same period of collectives as [`SyntheticPlan`].
fn synthetic_traces(mesh: &Mesh, collectives: usize) -> Traces {
    let mut t = Traces::new();
    let call = |op: &str, count: u64| ObservedCall {
        op: op.to_string(),
        dtype: "bf16".to_string(),
        count,
        reduction: (op == "all_reduce").then(|| "sum".to_string()),
        ..ObservedCall::default()
    };
    let stages = mesh.axis_size(Axis::Pp);
    for rank in mesh.iter() {
        let at = t.add_rank(rank.0, &format!("rank{rank}.jsonl"));
        let groups = Axis::ALL.map(|a| {
            let members = mesh.group_members(rank, Group::whole_axis(a));
            t.add_group(&format!("{a}{}", members[0]), &members.iter().map(|r| r.0).collect::<Vec<u32>>())
        });
        let stage = mesh.coord_of(rank).on_axis(Axis::Pp);
        let peer = |s: u32| Some(mesh.rank_at(mesh.coord_of(rank).with_axis(Axis::Pp, s % stages)).0);
        let calls = [
            (Axis::Tp, call("all_reduce", 64 * 48)),
            (Axis::Dp, call("all_reduce", 64 * 48)),
            (Axis::Ep, call("all_to_all", 16 * 2304)),
            (Axis::Pp, ObservedCall { peer: peer(stage + 1), ..call("send", 64 * 48) }),
            (Axis::Pp, ObservedCall { peer: peer(stage + stages - 1), ..call("recv", 64 * 48) }),
        ];
        for n in 0..collectives {
            let (axis, call) = &calls[n % PERIOD];
            let batch = if *axis == Axis::Pp { (n / PERIOD + 1) as u32 } else { 0 };
            let span = Span { start: n * 100, end: n * 100 + 99 };
            t.push_launch(at, groups[*axis as usize], call.clone(), axis.name(), batch, span);
        }
    }
    t
}

fn expect_no_diagnostics(found: Diagnostics) -> anyhow::Result<()> {
    if found.is_empty() { Ok(()) } else { Err(diagnostics_error(found)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_passes_verification() {
        let result = run(&Args { rounds: 1, collectives: 200, wide_collectives: 10 }).unwrap();
        assert_eq!(result.numbers["plan_9216"]["launches"], 92_160);
        assert_eq!(result.numbers["traces_72"]["launches"], 14_400);
        assert_eq!(result.numbers["growth"]["mesh"]["points"][0]["size"], 9);
    }

    #[test]
    fn a_rank_launches_the_requested_collectives() {
        for collectives in [10, 11, 12, 13, 14] {
            let p = stage_program("stage@pp1", RACK.parse().unwrap(), collectives).unwrap();
            assert_eq!(p.collective_ops().count(), collectives);
            assert_eq!(p.role, "stage@pp1");
        }
    }
}
