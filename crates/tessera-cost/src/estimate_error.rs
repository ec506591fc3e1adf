//! Comparison of measured device times with estimates, by class of op and by kind of step.
//!
//! Steps come from a backend's trace and estimates from the simulation of the program. A step may
//! be several ops in one launch: its estimate is the sum of the estimates of these ops, and it
//! belongs to the class of the heaviest one.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{Op, Program};

use crate::intervals::{Interval, IntervalKind};
use crate::op_class::OpClass;

/// Ops of a program that ran as one step on a stream, with the measured start and end.
#[derive(Debug, Clone, PartialEq)]
pub struct MeasuredStep {
    /// Indices of the step's ops in the program, in order.
    pub ops: Vec<usize>,
    /// Name of the stream that ran the step, for example `tp_collective`.
    pub stream: String,
    /// Start, in nanoseconds from the start of the program.
    pub start_ns: f64,
    /// End, not before the start.
    pub end_ns: f64,
}

/// Estimated and measured time of a group of steps.
#[derive(Debug, Clone, PartialEq)]
pub struct ErrorRow {
    /// Class of the steps, such as `matmul`, or a launch with its shapes, such as `silu [4, 8]`.
    pub name: String,
    /// Number of steps that ran.
    pub count: usize,
    /// Estimated time in nanoseconds; `None` without an estimate.
    pub estimated_ns: Option<f64>,
    /// Sum of the measured durations of the steps, in nanoseconds.
    pub measured_ns: f64,
}

impl ErrorRow {
    /// Returns the relative error of the estimate as a share of the measured time; positive if the
    /// estimate is too long.
    #[must_use]
    pub fn relative_error(&self) -> Option<f64> {
        self.estimated_ns.filter(|_| self.measured_ns > 0.0).map(|e| e / self.measured_ns - 1.0)
    }

    /// Returns a row `name` with the sums of `lines`. Its estimate is `None` if any line has none.
    #[must_use]
    pub fn sum_rows(name: &str, lines: &[ErrorRow]) -> ErrorRow {
        ErrorRow {
            name: name.to_string(),
            count: lines.iter().map(|l| l.count).sum(),
            estimated_ns: lines.iter().map(|l| l.estimated_ns).sum(),
            measured_ns: lines.iter().map(|l| l.measured_ns).sum(),
        }
    }
}

/// Groups steps by class: `matmul`, `attention`, the work on experts, `memory-bound` (elementwise and norm kernels),
/// then collectives by the name of their op and their group. `estimate` holds the nanoseconds of each op. An
/// estimate of an op that no step ran counts in the class of that op.
#[must_use]
pub fn compare_by_class(p: &Program, ran: &[MeasuredStep], estimate: Option<&[f64]>) -> Vec<ErrorRow> {
    let defs = p.defining_ops();
    let heaviest = |ops: &[usize]| ops.iter().filter_map(|i| OpClass::of_op(p, &defs, p.ops.get(*i)?)).min();
    let mut lines = group_steps(ran, estimate, |r| heaviest(&r.ops));
    if let Some(estimate) = estimate {
        let ops: BTreeSet<usize> = ran.iter().flat_map(|r| r.ops.iter().copied()).collect();
        for (i, ns) in estimate.iter().enumerate().filter(|(i, ns)| **ns > 0.0 && !ops.contains(i)) {
            if let Some(line) = heaviest(&[i]).map(|c| lines.entry(c).or_insert_with(|| empty_row(true))) {
                line.estimated_ns = line.estimated_ns.map(|e| e + ns);
            }
        }
    }
    lines.into_iter().map(|(class, line)| ErrorRow { name: class.name, ..line }).collect()
}

/// Groups steps by the names of their ops and the shapes of the first op's operands, longest
/// measured time first.
#[must_use]
pub fn compare_by_kind(p: &Program, ran: &[MeasuredStep], estimate: Option<&[f64]>) -> Vec<ErrorRow> {
    let kind = |r: &MeasuredStep| {
        let ops: Vec<&Op> = r.ops.iter().filter_map(|i| p.ops.get(*i)).collect();
        let read = ops.first()?.operands.iter().filter(|v| !p.type_of(**v).is_token()).take(2);
        let shapes: String = read.map(|v| format!(" {:?}", p.type_of(*v).shape)).collect();
        Some(launch_name(&ops) + &shapes)
    };
    let lines = group_steps(ran, estimate, kind);
    let mut lines: Vec<ErrorRow> = lines.into_iter().map(|(name, line)| ErrorRow { name, ..line }).collect();
    lines.sort_by(|a, b| b.measured_ns.total_cmp(&a.measured_ns));
    lines
}

/// Converts the steps of a rank to intervals, which can be measured and drawn like the intervals of
/// an estimate.
#[must_use]
pub fn to_intervals(p: &Program, rank: u32, ran: &[MeasuredStep]) -> Vec<Interval> {
    let ops = |r: &MeasuredStep| r.ops.iter().filter_map(|i| p.ops.get(*i)).collect::<Vec<&Op>>();
    ran.iter()
        .map(|r| Interval {
            rank,
            track: r.stream.clone(),
            name: launch_name(&ops(r)),
            kind: match ops(r).iter().any(|o| o.opcode.is_collective()) {
                true => IntervalKind::Collective,
                false => IntervalKind::Compute,
            },
            start_ns: r.start_ns,
            end_ns: r.end_ns,
        })
        .collect()
}

/// Returns each step at the median of its starts and of its ends over several traces of one
/// program. Medians keep any order that all traces have. Returns no steps if the traces differ in
/// their steps.
#[must_use]
pub fn median_steps(traces: &[Vec<MeasuredStep>]) -> Vec<MeasuredStep> {
    let Some((first, rest)) = traces.split_first() else { return Vec::new() };
    let same_steps =
        |t: &Vec<MeasuredStep>| t.len() == first.len() && t.iter().zip(first).all(|(a, b)| a.ops == b.ops);
    if !rest.iter().all(same_steps) {
        return Vec::new();
    }
    let median = |i: usize, at: fn(&MeasuredStep) -> f64| {
        let mut all: Vec<f64> = traces.iter().map(|t| at(&t[i])).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let each = |(i, r): (usize, &MeasuredStep)| MeasuredStep {
        start_ns: median(i, |r| r.start_ns),
        end_ns: median(i, |r| r.end_ns),
        ..r.clone()
    };
    first.iter().enumerate().map(each).collect()
}

/// Adds up the steps of each key in a row without a name; leaves out steps without a key.
fn group_steps<K: Ord>(
    ran: &[MeasuredStep],
    estimate: Option<&[f64]>,
    key: impl Fn(&MeasuredStep) -> Option<K>,
) -> BTreeMap<K, ErrorRow> {
    let mut lines: BTreeMap<K, ErrorRow> = BTreeMap::new();
    for r in ran {
        let Some(key) = key(r) else { continue };
        let line = lines.entry(key).or_insert_with(|| empty_row(estimate.is_some()));
        line.count += 1;
        line.measured_ns += r.end_ns - r.start_ns;
        let estimated: Option<f64> = estimate.map(|e| r.ops.iter().filter_map(|i| e.get(*i)).sum());
        line.estimated_ns = line.estimated_ns.zip(estimated).map(|(a, b)| a + b);
    }
    lines
}

/// Returns the name of one launch, for example `3 matmul+cache.write`.
fn launch_name(ops: &[&Op]) -> String {
    let runs = ops.chunk_by(|a, b| a.opcode == b.opcode).map(|run| match run {
        [one] => one.timeline_name().to_string(),
        many => format!("{} {}", many.len(), many[0].opcode.name()),
    });
    runs.collect::<Vec<_>>().join("+")
}

fn empty_row(estimated: bool) -> ErrorRow {
    ErrorRow { name: String::new(), count: 0, estimated_ns: estimated.then_some(0.0), measured_ns: 0.0 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::intervals::measure_overlap;
    use tessera_ir::parse_all;

    /// Ops by index: x, w, matmul, residual, issue, silu, wait, attention.
    const BLOCK: &str = "program @p role(all) mesh(tp=2) streams(compute, tp_collective) { \
        %x = input : f32[4, 8] {tp: shard(0)} %w = weight \"w\" : f32[8, 8] \
        %y = ttile.matmul %x, %w : f32[4, 8] {tp: shard(0)} @compute \
        %s = ttile.gate_residual %x, %y : f32[4, 8] {tp: shard(0)} @compute \
        %t = ttile.collective.issue all_gather %s {axis = \"tp\", dim = 0} @tp_collective \
        %z = ttile.silu %s : f32[4, 8] {tp: shard(0)} @compute \
        %r = ttile.collective.wait %t : f32[8, 8] @compute \
        %a = ttile.attention %r, %r, %r {head_dim = 4} : f32[8, 8] @compute }";

    fn sample_block() -> Program {
        parse_all(BLOCK, "block").unwrap().remove(0)
    }

    fn make_step(ops: &[usize], stream: &str, start_ns: f64, end_ns: f64) -> MeasuredStep {
        MeasuredStep { ops: ops.to_vec(), stream: stream.into(), start_ns, end_ns }
    }

    /// A matmul with its residual, the all-gather, a kernel that overlaps half of it, and
    /// attention.
    fn sample_trace() -> Vec<MeasuredStep> {
        vec![
            make_step(&[2, 3], "compute", 10.0, 30.0),
            make_step(&[4], "tp_collective", 30.0, 50.0),
            make_step(&[5], "compute", 40.0, 60.0),
            make_step(&[7], "compute", 60.0, 70.0),
        ]
    }

    fn row_values(lines: &[ErrorRow]) -> Vec<(&str, usize, Option<f64>, f64)> {
        lines.iter().map(|l| (l.name.as_str(), l.count, l.estimated_ns, l.measured_ns)).collect()
    }

    #[test]
    fn ops_of_one_launch_are_named_once() {
        let p = sample_block();
        let named = |ops: &[usize]| launch_name(&ops.iter().map(|i| &p.ops[*i]).collect::<Vec<_>>());
        assert_eq!(named(&[2, 3]), "matmul+gate_residual");
        assert_eq!(named(&[2, 2, 2, 3]), "3 matmul+gate_residual");
    }

    #[test]
    fn fused_steps_sum_their_ops_and_join_the_heaviest_class() {
        let p = sample_block();
        // The wait unpacks the result, which no step measures.
        let estimate = [0.0, 0.0, 16.0, 6.0, 15.0, 20.0, 3.0, 9.0];
        let lines = compare_by_class(&p, &sample_trace(), Some(&estimate));
        let want = [
            ("matmul", 1, Some(22.0), 20.0),
            ("attention", 1, Some(9.0), 10.0),
            ("memory-bound", 1, Some(20.0), 20.0),
            ("all_gather tp", 1, Some(18.0), 20.0),
        ];
        assert_eq!(row_values(&lines), want);
        let errors: Vec<i64> =
            lines.iter().filter_map(ErrorRow::relative_error).map(|e| (e * 100.0).round() as i64).collect();
        assert_eq!(errors, [10, -10, 0, -10]);
        let all = ErrorRow::sum_rows("in all", &lines);
        assert_eq!(row_values(&[all]), [("in all", 4, Some(69.0), 70.0)]);
    }

    #[test]
    fn without_an_estimate_there_is_no_error() {
        let lines = compare_by_class(&sample_block(), &sample_trace(), None);
        assert!(lines.iter().all(|l| l.estimated_ns.is_none() && l.relative_error().is_none()));
        assert_eq!(ErrorRow::sum_rows("in all", &lines).estimated_ns, None);
    }

    #[test]
    fn kinds_distinguish_steps_of_one_class_by_shape() {
        let lines = compare_by_kind(&sample_block(), &sample_trace(), None);
        let names: Vec<&str> = lines.iter().map(|l| l.name.as_str()).collect();
        let want = [
            "all_gather [4, 8]",
            "matmul+gate_residual [4, 8] [8, 8]",
            "silu [4, 8]",
            "attention [8, 8] [8, 8]",
        ];
        assert_eq!(names, want);
    }

    #[test]
    fn overlapped_collective_time_is_hidden() {
        let bars = to_intervals(&sample_block(), 1, &sample_trace());
        assert_eq!(bars.iter().filter(|b| b.kind == IntervalKind::Collective).count(), 1);
        let o = measure_overlap(&bars, false);
        assert_eq!((o.total_ns, o.hidden_ns, o.exposed_ns(), o.ratio()), (20.0, 10.0, 10.0, 0.5));
    }

    #[test]
    fn medians_keep_the_order_of_steps() {
        let at = |d: f64| -> Vec<MeasuredStep> {
            let late = |r: MeasuredStep| MeasuredStep { start_ns: r.start_ns + d, end_ns: r.end_ns + d, ..r };
            sample_trace().into_iter().map(late).collect()
        };
        assert_eq!(median_steps(&[at(5.0), at(0.0), at(400.0)]), at(5.0));
        assert_eq!(median_steps(&[at(0.0), at(0.0)[1..].to_vec()]), []);
        assert_eq!(median_steps(&[]), []);
    }
}
