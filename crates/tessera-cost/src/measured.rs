//! What ran of a program on a device, against what was estimated of it: by class of work, and by kind of step.
//!
//! Steps come from a backend's trace, estimates from whoever played the program. A step may be several ops as one launch: its
//! estimate is the sum of theirs, and it belongs to the heaviest of their classes.

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{Op, Opcode, Program};

use crate::bars::{Bar, Kind};

/// A step that ran.
#[derive(Debug, Clone, PartialEq)]
pub struct Ran {
    /// Indices of its ops in the program, in order.
    pub ops: Vec<usize>,
    /// Its stream.
    pub stream: String,
    /// Start, in nanoseconds from the program's.
    pub start_ns: f64,
    /// End, not before the start.
    pub end_ns: f64,
}

/// Estimated and measured time of some steps together.
#[derive(Debug, Clone, PartialEq)]
pub struct Line {
    /// What they have in common.
    pub name: String,
    /// How many ran.
    pub count: usize,
    /// Estimated, in nanoseconds; none where there is no estimate.
    pub estimated_ns: Option<f64>,
    /// Measured, in nanoseconds.
    pub measured_ns: f64,
}

impl Line {
    /// By how much the estimate is off, as a share of what was measured: above 0 where it is too long.
    #[must_use]
    pub fn error(&self) -> Option<f64> {
        self.estimated_ns.filter(|_| self.measured_ns > 0.0).map(|e| e / self.measured_ns - 1.0)
    }

    /// All of some lines as one.
    #[must_use]
    pub fn sum(name: &str, lines: &[Line]) -> Line {
        Line {
            name: name.to_string(),
            count: lines.iter().map(|l| l.count).sum(),
            estimated_ns: lines.iter().map(|l| l.estimated_ns).sum(),
            measured_ns: lines.iter().map(|l| l.measured_ns).sum(),
        }
    }
}

/// Steps by class: `matmul`, `attention`, `passes` over memory, then collectives by the name of their op. `estimate` holds
/// nanoseconds of each op; what it says of ops that no step ran counts in their class.
#[must_use]
pub fn by_class(p: &Program, ran: &[Ran], estimate: Option<&[f64]>) -> Vec<Line> {
    let defs = p.definitions();
    let heaviest = |ops: &[usize]| ops.iter().filter_map(|i| class(p, &defs, p.ops.get(*i)?)).min();
    let mut lines = gather(ran, estimate, |r| heaviest(&r.ops));
    if let Some(estimate) = estimate {
        let ops: BTreeSet<usize> = ran.iter().flat_map(|r| r.ops.iter().copied()).collect();
        for (i, ns) in estimate.iter().enumerate().filter(|(i, ns)| **ns > 0.0 && !ops.contains(i)) {
            if let Some(line) = heaviest(&[i]).map(|c| lines.entry(c).or_insert_with(|| empty(true))) {
                line.estimated_ns = line.estimated_ns.map(|e| e + ns);
            }
        }
    }
    lines.into_iter().map(|((_, name), line)| Line { name: name.to_string(), ..line }).collect()
}

/// Steps by the names of their ops and the shapes of what the first of them reads, those that take longest first.
#[must_use]
pub fn by_kind(p: &Program, ran: &[Ran], estimate: Option<&[f64]>) -> Vec<Line> {
    let kind = |r: &Ran| {
        let ops: Vec<&Op> = r.ops.iter().filter_map(|i| p.ops.get(*i)).collect();
        let read = ops.first()?.operands.iter().filter(|v| !p.ty(**v).is_token()).take(2);
        let shapes: String = read.map(|v| format!(" {:?}", p.ty(*v).shape)).collect();
        Some(names(&ops) + &shapes)
    };
    let lines = gather(ran, estimate, kind);
    let mut lines: Vec<Line> = lines.into_iter().map(|(name, line)| Line { name, ..line }).collect();
    lines.sort_by(|a, b| b.measured_ns.total_cmp(&a.measured_ns));
    lines
}

/// The steps of a rank as bars, to be measured and drawn like those of an estimate.
#[must_use]
pub fn bars(p: &Program, rank: u32, ran: &[Ran]) -> Vec<Bar> {
    let ops = |r: &Ran| r.ops.iter().filter_map(|i| p.ops.get(*i)).collect::<Vec<&Op>>();
    ran.iter()
        .map(|r| Bar {
            rank,
            lane: r.stream.clone(),
            name: names(&ops(r)),
            kind: match ops(r).iter().any(|o| o.opcode.is_collective()) {
                true => Kind::Collective,
                false => Kind::Compute,
            },
            start_ns: r.start_ns,
            end_ns: r.end_ns,
        })
        .collect()
}

/// Each step at the median of its starts and of its ends over several traces of one program, which keeps the order that all of
/// them have. Nothing where they differ in their steps.
#[must_use]
pub fn medians(traces: &[Vec<Ran>]) -> Vec<Ran> {
    let Some((first, rest)) = traces.split_first() else { return Vec::new() };
    let alike = |t: &Vec<Ran>| t.len() == first.len() && t.iter().zip(first).all(|(a, b)| a.ops == b.ops);
    if !rest.iter().all(alike) {
        return Vec::new();
    }
    let median = |i: usize, at: fn(&Ran) -> f64| {
        let mut all: Vec<f64> = traces.iter().map(|t| at(&t[i])).collect();
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let each = |(i, r): (usize, &Ran)| Ran {
        start_ns: median(i, |r| r.start_ns),
        end_ns: median(i, |r| r.end_ns),
        ..r.clone()
    };
    first.iter().enumerate().map(each).collect()
}

/// Steps that have the same key, together.
fn gather<K: Ord>(
    ran: &[Ran],
    estimate: Option<&[f64]>,
    key: impl Fn(&Ran) -> Option<K>,
) -> BTreeMap<K, Line> {
    let mut lines: BTreeMap<K, Line> = BTreeMap::new();
    for r in ran {
        let Some(key) = key(r) else { continue };
        let line = lines.entry(key).or_insert_with(|| empty(estimate.is_some()));
        line.count += 1;
        line.measured_ns += r.end_ns - r.start_ns;
        let estimated: Option<f64> = estimate.map(|e| r.ops.iter().filter_map(|i| e.get(*i)).sum());
        line.estimated_ns = line.estimated_ns.zip(estimated).map(|(a, b)| a + b);
    }
    lines
}

/// What one launch does: `3 matmul+cache.write`.
fn names(ops: &[&Op]) -> String {
    let runs = ops.chunk_by(|a, b| a.opcode == b.opcode).map(|run| match run {
        [one] => one.opcode.name().to_string(),
        many => format!("{} {}", many.len(), many[0].opcode.name()),
    });
    runs.collect::<Vec<_>>().join("+")
}

fn empty(estimated: bool) -> Line {
    Line { name: String::new(), count: 0, estimated_ns: estimated.then_some(0.0), measured_ns: 0.0 }
}

/// Place and name of an op's class; none for what is there already.
fn class(p: &Program, defs: &[Option<usize>], op: &Op) -> Option<(u8, &'static str)> {
    Some(match op.opcode {
        Opcode::Matmul | Opcode::Dot | Opcode::MoeRoute => (0, "matmul"),
        Opcode::Attention => (1, "attention"),
        Opcode::Wait => {
            let issue = defs.get(op.operands.first()?.0 as usize).copied().flatten()?;
            (3, p.ops[issue].opcode.name())
        }
        o if o.is_collective() => (3, o.name()),
        _ => (2, "passes"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bars::overlap;
    use tessera_ir::parse_all;

    /// Ops by index: x, w, product, residual, issue, silu, wait, attention.
    const BLOCK: &str = "program @p role(all) mesh(tp=2) streams(compute, tp_collective) { \
        %x = input : f32[4, 8] {tp: shard(0)} %w = weight \"w\" : f32[8, 8] \
        %y = ttile.matmul %x, %w : f32[4, 8] {tp: shard(0)} @compute \
        %s = ttile.gate_residual %x, %y : f32[4, 8] {tp: shard(0)} @compute \
        %t = ttile.collective.issue all_gather %s {axis = \"tp\", dim = 0} @tp_collective \
        %z = ttile.silu %s : f32[4, 8] {tp: shard(0)} @compute \
        %r = ttile.collective.wait %t : f32[8, 8] @compute \
        %a = ttile.attention %r, %r, %r {head_dim = 4} : f32[8, 8] @compute }";

    fn block() -> Program {
        parse_all(BLOCK, "block").unwrap().remove(0)
    }

    fn ran(ops: &[usize], stream: &str, start_ns: f64, end_ns: f64) -> Ran {
        Ran { ops: ops.to_vec(), stream: stream.into(), start_ns, end_ns }
    }

    /// A product with its residual, the all-gather, a pass while half of it is under way, attention.
    fn trace() -> Vec<Ran> {
        vec![
            ran(&[2, 3], "compute", 10.0, 30.0),
            ran(&[4], "tp_collective", 30.0, 50.0),
            ran(&[5], "compute", 40.0, 60.0),
            ran(&[7], "compute", 60.0, 70.0),
        ]
    }

    fn shown(lines: &[Line]) -> Vec<(&str, usize, Option<f64>, f64)> {
        lines.iter().map(|l| (l.name.as_str(), l.count, l.estimated_ns, l.measured_ns)).collect()
    }

    #[test]
    fn ops_of_one_launch_are_named_once() {
        let p = block();
        let named = |ops: &[usize]| names(&ops.iter().map(|i| &p.ops[*i]).collect::<Vec<_>>());
        assert_eq!(named(&[2, 3]), "matmul+gate_residual");
        assert_eq!(named(&[2, 2, 2, 3]), "3 matmul+gate_residual");
    }

    #[test]
    fn a_fused_step_is_estimated_by_all_its_ops_and_stands_with_the_heaviest() {
        let p = block();
        // The wait takes the result apart, which no step is.
        let estimate = [0.0, 0.0, 16.0, 6.0, 15.0, 20.0, 3.0, 9.0];
        let lines = by_class(&p, &trace(), Some(&estimate));
        let want = [
            ("matmul", 1, Some(22.0), 20.0),
            ("attention", 1, Some(9.0), 10.0),
            ("passes", 1, Some(20.0), 20.0),
            ("all_gather", 1, Some(18.0), 20.0),
        ];
        assert_eq!(shown(&lines), want);
        let errors: Vec<i64> =
            lines.iter().filter_map(Line::error).map(|e| (e * 100.0).round() as i64).collect();
        assert_eq!(errors, [10, -10, 0, -10]);
        let all = Line::sum("in all", &lines);
        assert_eq!(shown(&[all]), [("in all", 4, Some(69.0), 70.0)]);
    }

    #[test]
    fn without_an_estimate_there_is_no_error() {
        let lines = by_class(&block(), &trace(), None);
        assert!(lines.iter().all(|l| l.estimated_ns.is_none() && l.error().is_none()));
        assert_eq!(Line::sum("in all", &lines).estimated_ns, None);
    }

    #[test]
    fn kinds_tell_steps_of_one_class_apart_by_shape() {
        let lines = by_kind(&block(), &trace(), None);
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
    fn what_computing_covers_of_a_collective_is_hidden() {
        let bars = bars(&block(), 1, &trace());
        assert_eq!(bars.iter().filter(|b| b.kind == Kind::Collective).count(), 1);
        let o = overlap(&bars, false);
        assert_eq!((o.total_ns, o.hidden_ns, o.exposed_ns(), o.ratio()), (20.0, 10.0, 10.0, 0.5));
    }

    #[test]
    fn medians_keep_the_order_of_steps() {
        let at = |d: f64| -> Vec<Ran> {
            let late = |r: Ran| Ran { start_ns: r.start_ns + d, end_ns: r.end_ns + d, ..r };
            trace().into_iter().map(late).collect()
        };
        assert_eq!(medians(&[at(5.0), at(0.0), at(400.0)]), at(5.0));
        assert_eq!(medians(&[at(0.0), at(0.0)[1..].to_vec()]), []);
        assert_eq!(medians(&[]), []);
    }
}
