//! Compares traced forwards with the plan's estimate: by op class, by kind of step, and by how much
//! of the collectives is exposed.
//!
//! GPU clocks are not synchronised, so the times of each rank count from the start of its own
//! program.

use std::path::Path;

use serde_json::{Value, json};
use tessera::files::write_file;
use tessera::gpus::GpuDiscovery;
use tessera::plan::logical_model;
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::MachineModel;
use tessera_cost::estimate_error::{ErrorRow, MeasuredStep, compare_by_class, compare_by_kind, to_intervals};
use tessera_cost::intervals::{Interval, IntervalKind, OverlapTotals, measure_overlap};
use tessera_estimate::{intervals_to_timeline, load_machine};
use tessera_mesh::{Rank, catalog};
use tessera_plan::lower;
use tessera_plan::video::{CallEstimate, estimate_call};
use tessera_report::perfetto::trace_json;
use tessera_report::timeline::TimelineMark;

use super::{BenchPoint, bench_error};

/// A traced forward of one picture size on all ranks, compared with its estimate.
#[derive(Debug, Clone)]
pub struct TracedForward {
    /// Height and width of the picture in pixels, for example `480x832`.
    pub size: String,
    /// The machine and the profile of the estimate, or the reason why there is no estimate.
    pub estimate_source: Result<String, String>,
    /// The forward from the begin of the first rank to the end of the last rank: estimated, and
    /// measured without trace events.
    pub forward: ErrorRow,
    /// Time of the traced forward on the slowest rank in nanoseconds. It includes the overhead of
    /// the trace events.
    pub traced_ns: f64,
    /// Estimated overlap of the collectives of all ranks together.
    pub estimated_overlap: Option<OverlapTotals>,
    /// One comparison per rank.
    pub ranks: Vec<RankForward>,
    /// Measured intervals of the traced forward on all ranks, in rank order.
    pub intervals: Vec<Interval>,
}

/// The traced forward of one rank, compared with its estimate.
#[derive(Debug, Clone)]
pub struct RankForward {
    /// Rank that ran the traced forward.
    pub rank: u32,
    /// Estimated and measured times by op class: `matmul`, `attention`, `memory-bound`, and each
    /// collective op.
    pub classes: Vec<ErrorRow>,
    /// Estimated and measured times by op and shape, longest first.
    pub kinds: Vec<ErrorRow>,
    /// Overlap of the rank's collectives, timed from the begin of each collective on the device.
    /// The wait for other ranks is included.
    pub overlap: OverlapTotals,
    /// Time of everything except collectives, in nanoseconds.
    pub compute_ns: f64,
}

impl TracedForward {
    /// Compares the traces of all ranks, in rank order, with the estimate for a machine. `machine`
    /// may give the reason why there is no estimate. `forward_ns` is measured without trace events.
    ///
    /// # Errors
    /// Diagnostics of the estimate; T0061 if a rank traced nothing.
    pub fn from_traces(
        point: &BenchPoint,
        ran: &[Vec<MeasuredStep>],
        forward_ns: f64,
        machine: Result<&MachineModel, String>,
    ) -> Result<TracedForward, Diagnostics> {
        let estimate = machine.as_ref().ok().map(|m| estimate_forward(point, m)).transpose()?;
        let on = machine.map(|m| format!("{} under profile {}", m.cluster.name, m.profile.name));
        let (mut ranks, mut all_intervals) = (Vec::new(), Vec::new());
        for (rank, ran) in ran.iter().enumerate() {
            let rank = Rank(rank as u32);
            let found = point.plan.sealed.rank_program(&point.phase_name(), rank);
            let Some(program) = found.filter(|_| !ran.is_empty()) else {
                return Err(bench_error(format!(
                    "rank {rank} traced nothing, or a different sequence each time"
                )));
            };
            let ops = estimate.as_ref().map(|e| e.op_times_ns(rank, program.ops.len()));
            let rank_intervals = to_intervals(program, rank.0, ran);
            ranks.push(RankForward {
                rank: rank.0,
                classes: compare_by_class(program, ran, ops.as_deref()),
                kinds: compare_by_kind(program, ran, ops.as_deref()),
                overlap: measure_overlap(&rank_intervals, false),
                compute_ns: rank_intervals
                    .iter()
                    .filter(|b| b.kind == IntervalKind::Compute)
                    .map(Interval::duration_ns)
                    .sum(),
            });
            all_intervals.extend(rank_intervals);
        }
        let rank_end_ns =
            |rank: u32| all_intervals.iter().filter(|b| b.rank == rank).map(|b| b.end_ns).fold(0.0, f64::max);
        Ok(TracedForward {
            size: point.size.clone(),
            estimate_source: on,
            forward: ErrorRow {
                name: "whole forward".into(),
                count: 1,
                estimated_ns: estimate.as_ref().map(|e| e.ns),
                measured_ns: forward_ns,
            },
            traced_ns: ranks.iter().map(|r| rank_end_ns(r.rank)).fold(0.0, f64::max),
            estimated_overlap: estimate.map(|e| e.overlap),
            ranks,
            intervals: all_intervals,
        })
    }

    /// Returns the rank with the longest compute time, for which the other ranks wait.
    #[must_use]
    pub fn busiest_rank(&self) -> Option<&RankForward> {
        self.ranks.iter().max_by(|a, b| a.compute_ns.total_cmp(&b.compute_ns))
    }

    /// Returns the comparison as JSON, with times in milliseconds and errors relative to the
    /// measurement.
    #[must_use]
    pub fn to_json(&self) -> Value {
        let ms = |ns: f64| ns / 1e6;
        let line = |l: &ErrorRow| {
            json!({"name": l.name, "count": l.count, "estimated_ms": l.estimated_ns.map(ms), "measured_ms": ms(l.measured_ns),
                   "error": l.relative_error()})
        };
        let lines = |all: &[ErrorRow]| all.iter().map(line).collect::<Vec<Value>>();
        let overlap_json = |o: &OverlapTotals| json!({"collective_ms": ms(o.total_ns), "exposed_ms": ms(o.exposed_ns()), "overlap_ratio": o.ratio()});
        let ranks = self.ranks.iter().map(|r| {
            json!({"rank": r.rank, "classes": lines(&r.classes), "kinds": lines(&r.kinds), "compute_ms": ms(r.compute_ns),
                   "collectives": overlap_json(&r.overlap)})
        });
        json!({
            "estimate_on": self.estimate_source.as_ref().ok(), "no_estimate": self.estimate_source.as_ref().err(), "forward": line(&self.forward),
            "traced_forward_ms": ms(self.traced_ns), "estimated_collectives": self.estimated_overlap.as_ref().map(overlap_json),
            "ranks": ranks.collect::<Vec<_>>(),
        })
    }
}

/// Estimates the forward of one size with all its intervals.
fn estimate_forward(point: &BenchPoint, machine: &MachineModel) -> Result<CallEstimate, Diagnostics> {
    let (mut all, mut mapping) =
        (logical_model(&point.model.video, point.plan.mapping.media), point.plan.mapping.clone());
    all.phases.retain(|p| p.name == point.phase_name());
    let bundle = lower(&all, &mut mapping)?;
    estimate_call(&bundle, "forward", &[point.phase_name()], machine, true).map_err(|d| vec![*d])
}

/// Loads the machine to estimate for: `cluster` if given, otherwise the catalog entry with the GPUs
/// of this host. The inner error gives the reason why there is no machine. The profile defaults to
/// that of this project's backends.
///
/// # Errors
/// Diagnostics of a cluster or a profile that the caller named.
pub fn machine_for(
    gpus: &GpuDiscovery,
    cluster: Option<&str>,
    profile: Option<&str>,
    devices: u32,
) -> Result<Result<MachineModel, String>, Diagnostics> {
    let found = gpus.devices.as_ref().ok().and_then(|d| d.gpus.first());
    let gpu = found.map_or("GPU", |g| &g.name);
    match cluster.or_else(|| catalog_entry_for(gpu)) {
        Some(name) => load_machine(name, Some(profile.unwrap_or("tessera")), Some(devices)).map(Ok),
        None => Ok(Err(format!("no cluster of the catalog has a {gpu}; --cluster names one or a file"))),
    }
}

/// Writes the traced forwards of all sizes, one after another, as one Perfetto trace.
///
/// # Errors
/// T0014 if the file cannot be written.
pub fn write_timeline(file: &Path, all: &[TracedForward]) -> Result<(), Diagnostic> {
    write_file(file, build_timeline(all).as_bytes())
}

fn build_timeline(all: &[TracedForward]) -> String {
    let (mut intervals, mut marks, mut at_ns): (Vec<Interval>, Vec<TimelineMark>, f64) =
        (Vec::new(), Vec::new(), 0.0);
    for traced in all {
        let detail = "the times of each rank count from its own start".to_string();
        marks.push(TimelineMark { at_ns: at_ns as u64, label: traced.size.clone(), detail });
        let shifted =
            |b: &Interval| Interval { start_ns: b.start_ns + at_ns, end_ns: b.end_ns + at_ns, ..b.clone() };
        intervals.extend(traced.intervals.iter().map(shifted));
        at_ns += traced.traced_ns + GAP_NS;
    }
    let mut timeline = intervals_to_timeline(&intervals, |b| b.track.clone());
    timeline.marks = marks;
    trace_json(&timeline)
}

/// Gap between two sizes in the timeline, in nanoseconds.
const GAP_NS: f64 = 1e6;

/// Finds the catalog entry whose devices match the GPU name that the driver reports. PCIe and NVL
/// cards match no entry: the catalog lists server boards only.
fn catalog_entry_for(gpu: &str) -> Option<&'static str> {
    let words: Vec<&str> = gpu.split([' ', '-']).collect();
    let is_server_board = !words.iter().any(|w| ["PCIe", "PCIE", "NVL"].contains(w));
    catalog::cluster_names().filter(|_| is_server_board).find(|name| {
        let device = catalog::get(name).map(|c| c.device.name).unwrap_or_default();
        let mut words_of_device = device.split(' ');
        words_of_device.next() == Some("NVIDIA")
            && words_of_device.next().is_some_and(|model| words.contains(&model))
    })
}

#[cfg(test)]
mod tests {
    use tessera_ir::{OpKind, Opcode, Program, print};

    use super::*;
    use crate::bench::build_points;
    use crate::bench::tests::bench_config;

    /// Makes a trace in which every device op takes 1 µs, one after another.
    fn sequential_trace(p: &Program) -> Vec<MeasuredStep> {
        let works = |o: &tessera_ir::Op| {
            o.opcode.table_row().kind != OpKind::Source
                && !matches!(o.opcode, Opcode::EventRecord | Opcode::Wait)
        };
        let ops = p.ops.iter().enumerate().filter(|(_, o)| works(o)).map(|(i, _)| i);
        ops.enumerate()
            .map(|(at, op)| MeasuredStep {
                ops: vec![op],
                stream: "compute".into(),
                start_ns: at as f64 * 1e3,
                end_ns: at as f64 * 1e3 + 1e3,
            })
            .collect()
    }

    #[test]
    fn the_estimate_is_for_the_sealed_program() {
        let point = build_points(&bench_config(&[])).unwrap().remove(0);
        let (mut all, mut mapping) =
            (logical_model(&point.model.video, point.plan.mapping.media), point.plan.mapping.clone());
        all.phases.retain(|p| p.name == point.phase_name());
        let bundle = lower(&all, &mut mapping).unwrap();
        assert_eq!(bundle.phases.len(), 1);
        for (role, program) in bundle.roles.iter().zip(&bundle.phases[0].programs) {
            let sealed = point.plan.sealed.rank_program(&point.phase_name(), role.ranks[0]).unwrap();
            assert_eq!(print(program), print(sealed));
        }
    }

    #[test]
    fn every_rank_is_compared_and_the_sum_matches_the_estimate() {
        let point = build_points(&bench_config(&[])).unwrap().remove(0);
        let machine = load_machine("hgx-h200", Some("tessera"), Some(2)).unwrap();
        let program = |r| point.plan.sealed.rank_program(&point.phase_name(), Rank(r)).unwrap();
        let ran = vec![sequential_trace(program(0)), sequential_trace(program(1))];
        let t = TracedForward::from_traces(&point, &ran, 4e6, Ok(&machine)).unwrap();
        assert_eq!(t.estimate_source, Ok("hgx-h200 under profile tessera".to_string()));
        let estimate = estimate_forward(&point, &machine).unwrap();
        for (r, ran) in t.ranks.iter().zip(&ran) {
            let names: Vec<&str> = r.classes.iter().map(|l| l.name.as_str()).collect();
            assert_eq!(names, ["matmul", "attention", "memory-bound", "all_to_all tp"]);
            let player = estimate.rank_classes.iter().find(|p| p.members.contains(&Rank(r.rank))).unwrap();
            let bars = estimate
                .intervals
                .iter()
                .filter(|b| b.rank == player.representative.0 && b.kind != IntervalKind::Other);
            let all_ns: f64 = bars.map(Interval::duration_ns).sum();
            for lines in [&r.classes, &r.kinds] {
                let sum = ErrorRow::sum_rows("", lines);
                assert_eq!(sum.count, ran.len());
                assert!((sum.measured_ns - ran.len() as f64 * 1e3).abs() < 1.0);
                assert!((sum.estimated_ns.unwrap() - all_ns).abs() < 1.0, "{sum:?} {all_ns}");
            }
            // The ops run sequentially, so no collective is hidden.
            assert_eq!((r.overlap.ratio(), r.overlap.exposed_ns()), (0.0, r.overlap.total_ns));
        }
        assert_eq!(t.forward.relative_error(), Some(estimate.ns / 4e6 - 1.0));
        let refused =
            TracedForward::from_traces(&point, &[ran[0].clone(), Vec::new()], 4e6, Ok(&machine)).unwrap_err();
        assert!(refused[0].message.starts_with("rank 1 traced nothing"), "{refused:?}");
    }

    #[test]
    fn sizes_follow_one_another_in_a_timeline() {
        let points = build_points(&bench_config(&[(96, 128), (48, 64)])).unwrap();
        let sizes: Vec<&str> = points.iter().map(|p| p.size.as_str()).collect();
        assert_eq!(sizes, ["96x128", "48x64"]);
        let traced = |p: &BenchPoint| {
            let program = |r| p.plan.sealed.rank_program(&p.phase_name(), Rank(r)).unwrap();
            let ran = [sequential_trace(program(0)), sequential_trace(program(1))];
            TracedForward::from_traces(p, &ran, 4e6, Err("nobody asked".into())).unwrap()
        };
        let all: Vec<TracedForward> = points.iter().map(traced).collect();
        let json: Value = serde_json::from_str(&build_timeline(&all)).unwrap();
        let events = json["traceEvents"].as_array().unwrap();
        let spans: Vec<&Value> = events.iter().filter(|e| e["ph"] == "X").collect();
        assert_eq!(spans.len(), all.iter().map(|t| t.intervals.len()).sum::<usize>());
        let marks: Vec<&Value> = events.iter().filter(|e| e["ph"] == "i").collect();
        let begins = |e: &Value| e["ts"].as_f64().unwrap();
        assert_eq!([&marks[0]["name"], &marks[1]["name"]], ["96x128", "48x64"]);
        assert_eq!(begins(marks[1]) - begins(marks[0]), (all[0].traced_ns + GAP_NS) / 1e3);
        assert_eq!(spans.iter().filter(|s| begins(s) >= begins(marks[1])).count(), all[1].intervals.len());
    }

    #[test]
    fn catalog_entries_are_found_by_gpu_name() {
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
            assert_eq!(catalog_entry_for(gpu), want, "{gpu}");
        }
    }
}
