//! Traced forwards beside the plan's estimate of them: by class of work, by kind of step, and what of the collectives was
//! exposed.
//!
//! Clocks of GPUs are not compared: each rank's steps count from where its own program began.

use std::path::Path;

use serde_json::{Value, json};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::Machine;
use tessera_cost::bars::{Bar, Kind, Overlap, overlap};
use tessera_cost::measured::{Line, Ran, bars, by_class, by_kind};
use tessera_mesh::{Rank, clusters};
use tessera_plan::lower;
use tessera_plan::video::{CallEstimate, estimate_call};
use tessera_report::perfetto::trace;
use tessera_report::timeline::Mark;

use super::{Point, one};
use crate::files::write_file;
use crate::gpus::Gpus;
use crate::plan::logical;
use crate::search::{self, timeline_of};

/// A traced forward of one size on all ranks.
#[derive(Debug, Clone)]
pub struct Traced {
    /// Height and width of the picture.
    pub size: String,
    /// The machine and the profile of the estimate, or why there is none.
    pub on: Result<String, String>,
    /// The forward from the first rank's begin to the last one's end: estimated, and measured without marks.
    pub forward: Line,
    /// The traced forward of the rank that took longest, in nanoseconds: marks take time.
    pub traced_ns: f64,
    /// Collectives of the estimate, of all ranks together.
    pub estimated_overlap: Option<Overlap>,
    /// By rank.
    pub ranks: Vec<OfRank>,
    /// All steps of all ranks.
    pub bars: Vec<Bar>,
}

/// What one rank did.
#[derive(Debug, Clone)]
pub struct OfRank {
    /// Which.
    pub rank: u32,
    /// Steps by class.
    pub classes: Vec<Line>,
    /// Steps by their ops and shapes, those that take longest first.
    pub kinds: Vec<Line>,
    /// Its collectives, from the begin of each on the device, the wait for other ranks included.
    pub overlap: Overlap,
    /// All else that it did, in nanoseconds.
    pub compute_ns: f64,
}

impl Traced {
    /// Compares what ranks traced, in order of rank, with an estimate under a machine, or with none for a reason.
    /// `forward_ns` is measured without marks.
    ///
    /// # Errors
    /// What the estimate refuses; T0061 where a rank traced nothing.
    pub fn of(
        point: &Point,
        ran: &[Vec<Ran>],
        forward_ns: f64,
        machine: Result<&Machine, String>,
    ) -> Result<Traced, Diagnostics> {
        let estimate = machine.as_ref().ok().map(|m| estimated(point, m)).transpose()?;
        let on = machine.map(|m| format!("{} under profile {}", m.cluster.name, m.profile.name));
        let (mut ranks, mut all) = (Vec::new(), Vec::new());
        for (rank, ran) in ran.iter().enumerate() {
            let rank = Rank(rank as u32);
            let found = point.plan.sealed.program(&point.phase(), rank);
            let Some(program) = found.filter(|_| !ran.is_empty()) else {
                return Err(one(format!("rank {rank} traced nothing, or other steps each time")));
            };
            let ops = estimate.as_ref().map(|e| e.ops_ns(rank, program.ops.len()));
            let own = bars(program, rank.0, ran);
            ranks.push(OfRank {
                rank: rank.0,
                classes: by_class(program, ran, ops.as_deref()),
                kinds: by_kind(program, ran, ops.as_deref()),
                overlap: overlap(&own, false),
                compute_ns: own.iter().filter(|b| b.kind == Kind::Compute).map(Bar::ns).sum(),
            });
            all.extend(own);
        }
        let of = |rank: u32| all.iter().filter(|b| b.rank == rank).map(|b| b.end_ns).fold(0.0, f64::max);
        Ok(Traced {
            size: point.size.clone(),
            on,
            forward: Line {
                name: "whole forward".into(),
                count: 1,
                estimated_ns: estimate.as_ref().map(|e| e.ns),
                measured_ns: forward_ns,
            },
            traced_ns: ranks.iter().map(|r| of(r.rank)).fold(0.0, f64::max),
            estimated_overlap: estimate.map(|e| e.overlap),
            ranks,
            bars: all,
        })
    }

    /// The rank that computes longest: others wait for it.
    #[must_use]
    pub fn busiest(&self) -> Option<&OfRank> {
        self.ranks.iter().max_by(|a, b| a.compute_ns.total_cmp(&b.compute_ns))
    }

    /// The same for machines, times in milliseconds, errors as shares of what was measured.
    #[must_use]
    pub fn json(&self) -> Value {
        let ms = |ns: f64| ns / 1e6;
        let line = |l: &Line| {
            json!({"name": l.name, "count": l.count, "estimated_ms": l.estimated_ns.map(ms), "measured_ms": ms(l.measured_ns),
                   "error": l.error()})
        };
        let lines = |all: &[Line]| all.iter().map(line).collect::<Vec<Value>>();
        let exchanged = |o: &Overlap| json!({"collective_ms": ms(o.total_ns), "exposed_ms": ms(o.exposed_ns()), "overlap_ratio": o.ratio()});
        let ranks = self.ranks.iter().map(|r| {
            json!({"rank": r.rank, "classes": lines(&r.classes), "kinds": lines(&r.kinds), "compute_ms": ms(r.compute_ns),
                   "collectives": exchanged(&r.overlap)})
        });
        json!({
            "estimate_on": self.on.as_ref().ok(), "no_estimate": self.on.as_ref().err(), "forward": line(&self.forward),
            "traced_forward_ms": ms(self.traced_ns), "estimated_collectives": self.estimated_overlap.as_ref().map(exchanged),
            "ranks": ranks.collect::<Vec<_>>(),
        })
    }
}

/// What the estimate says of a point's forward, bar by bar.
fn estimated(point: &Point, machine: &Machine) -> Result<CallEstimate, Diagnostics> {
    let (mut all, mut mapping) = (logical(&point.model.video), point.plan.mapping.clone());
    all.phases.retain(|p| p.name == point.phase());
    let bundle = lower(&all, &mut mapping)?;
    estimate_call(&bundle, "forward", &[point.phase()], machine, true).map_err(|d| vec![*d])
}

/// The machine to estimate for: the named one, or the entry of the catalog whose devices the GPUs here are; or why there is none.
/// The profile is that of this project's backends where none is named.
///
/// # Errors
/// What is wrong with a cluster or a profile that is named.
pub fn machine_for(
    gpus: &Gpus,
    cluster: Option<&str>,
    profile: Option<&str>,
    devices: u32,
) -> Result<Result<Machine, String>, Diagnostics> {
    let found = gpus.devices.as_ref().ok().and_then(|d| d.gpus.first());
    let gpu = found.map_or("GPU", |g| &g.name);
    match cluster.or_else(|| fitting(gpu)) {
        Some(name) => search::machine(name, Some(profile.unwrap_or("tessera")), Some(devices)).map(Ok),
        None => Ok(Err(format!("no cluster of the catalog has a {gpu}; --cluster names one or a file"))),
    }
}

/// Writes one trace for Perfetto of traced forwards, one size after another.
///
/// # Errors
/// T0014.
pub fn write_timeline(file: &Path, all: &[Traced]) -> Result<(), Diagnostic> {
    write_file(file, timeline(all).as_bytes())
}

fn timeline(all: &[Traced]) -> String {
    let (mut bars, mut marks, mut at_ns): (Vec<Bar>, Vec<Mark>, f64) = (Vec::new(), Vec::new(), 0.0);
    for traced in all {
        let detail = "each rank's steps count from its own begin".to_string();
        marks.push(Mark { at_ns: at_ns as u64, what: traced.size.clone(), detail });
        let moved = |b: &Bar| Bar { start_ns: b.start_ns + at_ns, end_ns: b.end_ns + at_ns, ..b.clone() };
        bars.extend(traced.bars.iter().map(moved));
        at_ns += traced.traced_ns + GAP_NS;
    }
    let mut timeline = timeline_of(&bars, |b| b.lane.clone());
    timeline.marks = marks;
    trace(&timeline)
}

/// Between two sizes.
const GAP_NS: f64 = 1e6;

/// The entry of the catalog whose devices are GPUs that the driver calls so, boards of a server.
fn fitting(gpu: &str) -> Option<&'static str> {
    let words: Vec<&str> = gpu.split([' ', '-']).collect();
    let board = !words.iter().any(|w| ["PCIe", "PCIE", "NVL"].contains(w));
    clusters::names().filter(|_| board).find(|name| {
        let device = clusters::named(name).map(|c| c.device.name).unwrap_or_default();
        let mut of = device.split(' ');
        of.next() == Some("NVIDIA") && of.next().is_some_and(|model| words.contains(&model))
    })
}

#[cfg(test)]
mod tests {
    use tessera_ir::{Kind as OpKind, Opcode, Program, print};

    use super::*;
    use crate::bench::planned;
    use crate::bench::tests::asked;

    /// Every op that a device does, 1 µs each, one after another.
    fn steps(p: &Program) -> Vec<Ran> {
        let works = |o: &tessera_ir::Op| {
            o.opcode.row().kind != OpKind::Source && !matches!(o.opcode, Opcode::EventRecord | Opcode::Wait)
        };
        let ops = p.ops.iter().enumerate().filter(|(_, o)| works(o)).map(|(i, _)| i);
        ops.enumerate()
            .map(|(at, op)| Ran {
                ops: vec![op],
                stream: "compute".into(),
                start_ns: at as f64 * 1e3,
                end_ns: at as f64 * 1e3 + 1e3,
            })
            .collect()
    }

    #[test]
    fn what_is_estimated_is_the_program_that_runs() {
        let point = planned(&asked(&[])).unwrap().remove(0);
        let (mut all, mut mapping) = (logical(&point.model.video), point.plan.mapping.clone());
        all.phases.retain(|p| p.name == point.phase());
        let bundle = lower(&all, &mut mapping).unwrap();
        assert_eq!(bundle.phases.len(), 1);
        for (role, program) in bundle.roles.iter().zip(&bundle.phases[0].programs) {
            let sealed = point.plan.sealed.program(&point.phase(), role.ranks[0]).unwrap();
            assert_eq!(print(program), print(sealed));
        }
    }

    #[test]
    fn each_rank_is_compared_and_the_sum_is_the_estimates() {
        let point = planned(&asked(&[])).unwrap().remove(0);
        let machine = search::machine("hgx-h200", Some("tessera"), Some(2)).unwrap();
        let program = |r| point.plan.sealed.program(&point.phase(), Rank(r)).unwrap();
        let ran = vec![steps(program(0)), steps(program(1))];
        let t = Traced::of(&point, &ran, 4e6, Ok(&machine)).unwrap();
        assert_eq!(t.on, Ok("hgx-h200 under profile tessera".to_string()));
        let estimate = estimated(&point, &machine).unwrap();
        for (r, ran) in t.ranks.iter().zip(&ran) {
            let names: Vec<&str> = r.classes.iter().map(|l| l.name.as_str()).collect();
            assert_eq!(names, ["matmul", "attention", "passes", "all_to_all"]);
            let player = estimate.players.iter().find(|p| p.stands_for.contains(&Rank(r.rank))).unwrap();
            let bars = estimate.bars.iter().filter(|b| b.rank == player.rank.0 && b.kind != Kind::Other);
            let all_ns: f64 = bars.map(Bar::ns).sum();
            for lines in [&r.classes, &r.kinds] {
                let sum = Line::sum("", lines);
                assert_eq!(sum.count, ran.len());
                assert!((sum.measured_ns - ran.len() as f64 * 1e3).abs() < 1.0);
                assert!((sum.estimated_ns.unwrap() - all_ns).abs() < 1.0, "{sum:?} {all_ns}");
            }
            // In turns: nothing is hidden.
            assert_eq!((r.overlap.ratio(), r.overlap.exposed_ns()), (0.0, r.overlap.total_ns));
        }
        assert_eq!(t.forward.error(), Some(estimate.ns / 4e6 - 1.0));
        let refused = Traced::of(&point, &[ran[0].clone(), Vec::new()], 4e6, Ok(&machine)).unwrap_err();
        assert!(refused[0].message.starts_with("rank 1 traced nothing"), "{refused:?}");
    }

    #[test]
    fn sizes_follow_one_another_in_a_timeline() {
        let points = planned(&asked(&[(96, 128), (48, 64)])).unwrap();
        let sizes: Vec<&str> = points.iter().map(|p| p.size.as_str()).collect();
        assert_eq!(sizes, ["96x128", "48x64"]);
        let traced = |p: &Point| {
            let program = |r| p.plan.sealed.program(&p.phase(), Rank(r)).unwrap();
            let ran = [steps(program(0)), steps(program(1))];
            Traced::of(p, &ran, 4e6, Err("nobody asked".into())).unwrap()
        };
        let all: Vec<Traced> = points.iter().map(traced).collect();
        let json: Value = serde_json::from_str(&timeline(&all)).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let spans: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(spans.len(), all.iter().map(|t| t.bars.len()).sum::<usize>());
        let marks: Vec<&Value> = events.iter().filter(|e| e["ph"] == "i").collect();
        let begins = |e: &Value| e["ts"].as_f64().unwrap();
        assert_eq!([&marks[0]["name"], &marks[1]["name"]], ["96x128", "48x64"]);
        assert_eq!(begins(marks[1]) - begins(marks[0]), (all[0].traced_ns + GAP_NS) / 1e3);
        assert_eq!(spans.iter().filter(|s| begins(s) >= begins(marks[1])).count(), all[1].bars.len());
    }

    #[test]
    fn gpus_are_found_in_the_catalog_by_what_the_driver_calls_them() {
        for (gpu, want) in [
            ("NVIDIA H200", Some("hgx-h200")),
            ("NVIDIA H100 80GB HBM3", Some("hgx-h100")),
            ("NVIDIA A100-SXM4-80GB", Some("hgx-a100")),
            ("NVIDIA GB200", Some("gb200-nvl72")),
            ("NVIDIA H200 NVL", None),
            ("NVIDIA H100 PCIe", None),
            ("NVIDIA GH200 480GB", None),
            ("NVIDIA GeForce RTX 4090", None),
            ("GPU", None),
        ] {
            assert_eq!(fitting(gpu), want, "{gpu}");
        }
    }
}
