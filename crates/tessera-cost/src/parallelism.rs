//! Effects of tp, pp and dp on latency and throughput, and a choice between them with the numbers
//! behind it.
//!
//! * Splitting layers over stages (pp) never makes one item faster; it raises the throughput of a
//!   stream of items, once two or more are in flight.
//! * Sharding matmuls (tp) makes one item faster as far as each rank moves fewer bytes or does
//!   fewer operations, less the time of the collectives.
//! * Replicas (dp) change no item's latency.

use std::fmt;

/// Returns the share of the time that each of `stages` equal stages works when items come in
/// batches of `in_flight` and the pipeline drains between batches: B / (B + P − 1).
#[must_use]
pub fn batch_utilisation(in_flight: u32, stages: u32) -> f64 {
    if in_flight == 0 || stages == 0 {
        return 0.0;
    }
    f64::from(in_flight) / f64::from(in_flight + stages - 1)
}

/// Returns the share of the time that each of `stages` equal stages works when a new item enters as
/// soon as one of `max_outstanding` leaves: one item per stage keeps all stages busy.
#[must_use]
pub fn full_utilisation(max_outstanding: u32, stages: u32) -> f64 {
    if stages == 0 { 0.0 } else { (f64::from(max_outstanding) / f64::from(stages)).min(1.0) }
}

/// Latency and period of a pipeline.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PipelineRate {
    /// Time from an item's entry to its exit, without other items in its way.
    pub latency_ns: f64,
    /// Steady-state time between two items that leave.
    pub period_ns: f64,
}

/// Returns the latency and period of a pipeline with `send_ns` between two stages and at most
/// `in_flight` items inside at once.
#[must_use]
pub fn pipeline_rate(stage_ns: &[f64], send_ns: f64, in_flight: u32) -> PipelineRate {
    let sends = send_ns * stage_ns.len().saturating_sub(1) as f64;
    let latency_ns = stage_ns.iter().sum::<f64>() + sends;
    let slowest = stage_ns.iter().copied().fold(0.0, f64::max);
    PipelineRate { latency_ns, period_ns: slowest.max(latency_ns / f64::from(in_flight.max(1))) }
}

/// Work of one kernel on one rank, and the rates of the device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ShardedKernel {
    /// Floating-point operations before sharding; each of tp ranks does an equal share.
    pub flops: f64,
    /// Bytes that every rank reads or writes in full, independent of the sharding.
    pub replicated_bytes: f64,
    /// Bytes moved before sharding; each of tp ranks moves an equal share.
    pub sharded_bytes: f64,
    /// Rate of the device in floating-point operations per second.
    pub flops_per_s: f64,
    /// Memory bandwidth of the device in bytes per second.
    pub bytes_per_s: f64,
}

/// The resource that limits a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Bottleneck {
    /// Arithmetic takes at least as long as memory traffic, so sharding over tp saves time.
    Compute,
    /// Memory traffic takes longer than arithmetic; tp helps only as far as it divides the bytes.
    Bandwidth,
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Bottleneck::Compute => "compute-bound",
            Bottleneck::Bandwidth => "bandwidth-bound",
        })
    }
}

impl ShardedKernel {
    /// Returns the resource that limits the kernel on `tp` ranks.
    #[must_use]
    pub fn bottleneck_on(&self, tp: u32) -> Bottleneck {
        if self.flops_ns(tp) >= self.bytes_ns(tp) { Bottleneck::Compute } else { Bottleneck::Bandwidth }
    }

    /// Returns the time on `tp` ranks: the longer of compute and memory traffic.
    #[must_use]
    pub fn duration_ns(&self, tp: u32) -> f64 {
        self.flops_ns(tp).max(self.bytes_ns(tp))
    }

    /// Returns the speedup of `tp` ranks over one, collectives excluded: 1 for a bandwidth-bound
    /// kernel whose bytes are not sharded.
    #[must_use]
    pub fn tp_speedup(&self, tp: u32) -> f64 {
        let cut = self.duration_ns(tp);
        if cut > 0.0 { self.duration_ns(1) / cut } else { 1.0 }
    }

    fn flops_ns(&self, tp: u32) -> f64 {
        self.flops / f64::from(tp.max(1)) / self.flops_per_s * 1e9
    }

    fn bytes_ns(&self, tp: u32) -> f64 {
        (self.replicated_bytes + self.sharded_bytes / f64::from(tp.max(1))) / self.bytes_per_s * 1e9
    }
}

/// Inputs of a choice between tp, pp and dp.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallelismInputs {
    /// Maximum latency of an item; infinite if only throughput counts.
    pub deadline_ns: f64,
    /// Time between arriving items; infinite if each item waits for the answer to the previous one.
    pub period_ns: f64,
    /// Time of one item on one rank, by its parts in order; a pipeline may be split between parts.
    pub part_ns: Vec<f64>,
    /// Sizes of tp that the model admits, each with the time of one item, collectives included.
    /// Size 1 is the sum of the parts and need not be listed.
    pub tp_ns: Vec<(u32, f64)>,
    /// Time of one send between stages.
    pub send_ns: f64,
    /// Number of available devices, the upper bound of tp · pp · dp.
    pub devices: u32,
    /// Minimum number of devices that one replica of the model needs for its memory.
    pub min_devices: u32,
}

/// Sizes of the axes, with their latency, their throughput and the reasons.
#[derive(Debug, Clone, PartialEq)]
pub struct ParallelismChoice {
    /// Number of ranks over which the matmuls of a stage are sharded.
    pub tp: u32,
    /// Number of pipeline stages of a replica.
    pub pp: u32,
    /// Number of model replicas, which process different items.
    pub dp: u32,
    /// Time from an item's entry to its exit, sends between stages included.
    pub latency_ns: f64,
    /// Time between items that leave, over all replicas.
    pub period_ns: f64,
    /// Whether latency and throughput meet the targets.
    pub meets_targets: bool,
    /// The reasons, one sentence each, with their numbers.
    pub reasons: Vec<String>,
}

/// Returns the mapping on the fewest devices that meets deadline and period. Ties go to the
/// lowest latency, then to the least communication: replicas before stages before sharded matmuls.
/// If no mapping meets the targets, returns the closest one. Returns `None` if memory needs
/// more devices than there are, or an item has no parts.
#[must_use]
pub fn choose_parallelism(facts: &ParallelismInputs) -> Option<ParallelismChoice> {
    let options = list_options(facts);
    let late = |o: &ParallelismChoice| {
        (o.latency_ns / facts.deadline_ns).max(o.period_ns / facts.period_ns).max(1.0)
    };
    let rank = |o: &ParallelismChoice| (late(o), o.tp * o.pp * o.dp, o.latency_ns, o.tp, o.pp);
    let best =
        options.iter().min_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap_or(std::cmp::Ordering::Equal))?;
    let mut choice = best.clone();
    choice.meets_targets = late(best) <= 1.0;
    choice.reasons = explain_choice(facts, &options, &choice);
    Some(choice)
}

fn list_options(facts: &ParallelismInputs) -> Vec<ParallelismChoice> {
    let whole: f64 = facts.part_ns.iter().sum();
    let mut sizes = facts.tp_ns.clone();
    if !sizes.iter().any(|s| s.0 == 1) {
        sizes.push((1, whole));
    }
    let mut options = Vec::new();
    for &(tp, ns) in sizes.iter().filter(|s| s.0 > 0) {
        for pp in 1..=facts.part_ns.len() as u32 {
            let ranks = tp.saturating_mul(pp);
            if ranks > facts.devices || ranks < facts.min_devices {
                continue;
            }
            let cut = if whole > 0.0 { ns / whole } else { 1.0 };
            let stages: Vec<f64> =
                balance_stages(&facts.part_ns, pp as usize).iter().map(|t| t * cut).collect();
            let one = pipeline_rate(&stages, facts.send_ns, pp);
            for dp in 1..=facts.devices / ranks {
                options.push(ParallelismChoice {
                    tp,
                    pp,
                    dp,
                    latency_ns: one.latency_ns,
                    period_ns: one.period_ns / f64::from(dp),
                    meets_targets: false,
                    reasons: Vec::new(),
                });
                if one.period_ns / f64::from(dp) <= facts.period_ns {
                    break;
                }
            }
        }
    }
    options
}

/// Returns the times of `stages` runs of consecutive parts that minimise the longest run.
fn balance_stages(parts: &[f64], stages: usize) -> Vec<f64> {
    // Minimal longest run of the first `i` parts in `s` runs, and the start of the last of these
    // runs.
    let n = parts.len();
    let mut best = vec![vec![(f64::INFINITY, 0); n + 1]; stages + 1];
    best[0][0] = (0.0, 0);
    for s in 1..=stages {
        for i in s..=n {
            let mut run = 0.0;
            for from in (s - 1..i).rev() {
                run += parts[from];
                let longest = best[s - 1][from].0.max(run);
                if longest < best[s][i].0 {
                    best[s][i] = (longest, from);
                }
            }
        }
    }
    let mut end = n;
    let mut runs: Vec<f64> = (1..=stages)
        .rev()
        .map(|s| {
            let from = best[s][end].1;
            let run = parts[from..end].iter().sum();
            end = from;
            run
        })
        .collect();
    runs.reverse();
    runs
}

fn explain_choice(
    facts: &ParallelismInputs,
    options: &[ParallelismChoice],
    choice: &ParallelismChoice,
) -> Vec<String> {
    let whole: f64 = facts.part_ns.iter().sum();
    let mut reasons = vec![explain_one_device(facts, options, whole)];
    if choice.tp > 1 {
        let same = options.iter().find(|o| (o.tp, o.pp) == (1, choice.pp));
        let before = same.map_or(whole, |o| o.latency_ns);
        reasons.push(format!(
            "tp={} reduces an item's latency from {} to {}",
            choice.tp,
            format_ms(before),
            format_ms(choice.latency_ns)
        ));
    }
    if choice.pp > 1 {
        reasons.extend(explain_stages(options, choice));
    }
    if choice.dp > 1 {
        reasons.push(format!(
            "dp={} replicas complete one item every {}; latency does not change",
            choice.dp,
            format_ms(choice.period_ns)
        ));
    }
    reasons.extend(explain_missed_targets(facts, choice));
    reasons
}

/// Explains what one device can do; `whole` is the time that it needs for an item.
fn explain_one_device(facts: &ParallelismInputs, options: &[ParallelismChoice], whole: f64) -> String {
    match options.iter().find(|o| (o.tp, o.pp) == (1, 1)) {
        Some(o) if o.latency_ns <= facts.deadline_ns => format!(
            "one device answers in {}, within the {} deadline: a single item needs no sharding",
            format_ms(whole),
            format_ms(facts.deadline_ns)
        ),
        Some(_) => format!(
            "one device needs {} but {} are allowed: only tp makes an item faster",
            format_ms(whole),
            format_ms(facts.deadline_ns)
        ),
        None => format!("one replica needs {} devices for its memory", facts.min_devices),
    }
}

/// Explains the reason for several stages, and the share of the time that they work.
fn explain_stages(options: &[ParallelismChoice], choice: &ParallelismChoice) -> [String; 2] {
    let pp = choice.pp;
    let flat = options.iter().find(|o| (o.tp, o.pp) == (choice.tp, 1));
    let all = options.iter().find(|o| (o.tp, o.pp, o.dp) == (choice.tp, pp, 1));
    let reason = if let (Some(flat), Some(all)) = (flat, all) {
        format!(
            "pp={pp} does not make an item faster ({} against {}) but completes one every {} instead of every {}, with {pp} in flight",
            format_ms(choice.latency_ns),
            format_ms(flat.latency_ns),
            format_ms(all.period_ns),
            format_ms(flat.latency_ns)
        )
    } else {
        format!("pp={pp} makes a replica fit: tp={} alone has too little memory", choice.tp)
    };
    let utilisation = format!(
        "with {pp} items in flight each stage works {:.0} % of the time if they enter and leave as one batch, and {:.0} % if one \
         enters as another leaves",
        batch_utilisation(pp, pp) * 100.0,
        full_utilisation(pp, pp) * 100.0
    );
    [reason, utilisation]
}

fn explain_missed_targets(facts: &ParallelismInputs, choice: &ParallelismChoice) -> Vec<String> {
    let mut reasons = Vec::new();
    if choice.latency_ns > facts.deadline_ns {
        reasons.push(format!(
            "no mapping on up to {} devices answers within {}: {} is the closest",
            facts.devices,
            format_ms(facts.deadline_ns),
            format_ms(choice.latency_ns)
        ));
    }
    if choice.period_ns > facts.period_ns {
        reasons.push(format!(
            "items arrive every {} but complete every {}: the queue grows",
            format_ms(facts.period_ns),
            format_ms(choice.period_ns)
        ));
    }
    reasons
}

fn format_ms(ns: f64) -> String {
    format!("{:.3} ms", ns / 1e6)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::params::PipelineSchedule;
    use crate::schedule::{MicroBatchTimes, bubble_share};
    use crate::stream_sim::{Contention, Task, TaskGraph, TaskResource};

    /// Simulates items through equal stages; an item enters when the item `window` before it has
    /// left.
    fn simulated_end_ns(stages: u32, window: u32, items: u32) -> f64 {
        let mut tasks = TaskGraph::default();
        let mut last = Vec::new();
        for item in 0..items {
            let mut before = None;
            for rank in 0..stages {
                let task = tasks.push(Task {
                    rank,
                    stream: 0,
                    work_ns: 1.0,
                    resource: TaskResource::Compute,
                    collective: None,
                });
                before.into_iter().for_each(|b| tasks.add_dependency(task, b));
                if let (0, Some(left)) = (rank, item.checked_sub(window)) {
                    tasks.add_dependency(task, last[left as usize]);
                }
                before = Some(task);
            }
            last.extend(before);
        }
        let windows = tasks.run(Contention::NONE).expect("the tasks have no cycle");
        windows.iter().map(|w| w.end_ns).fold(0.0, f64::max)
    }

    // proves: V-01
    #[test]
    fn utilisation_matches_a_simulated_pipeline() {
        let pace = MicroBatchTimes { forward_ns: 2.0, ..MicroBatchTimes::default() };
        for (p, b) in [(1, 1), (2, 1), (3, 4), (5, 7), (9, 36)] {
            let batch = f64::from(b) / simulated_end_ns(p, b, b);
            assert!((batch_utilisation(b, p) - batch).abs() < 1e-12);
            assert!(
                (1.0 - bubble_share(PipelineSchedule::OneFOneB, p, 1, b, &pace) - batch_utilisation(b, p))
                    .abs()
                    < 1e-12
            );
            let long = f64::from(1000u32) / simulated_end_ns(p, b, 1000);
            assert!((full_utilisation(b, p) - long).abs() < 0.01, "{p} {b} {long}");
        }
    }

    // proves: V-09
    #[test]
    fn stages_help_a_stream_and_not_an_item() {
        for send in [0.0, 1.0] {
            let (one, two) = (pipeline_rate(&[10.0], send, 4), pipeline_rate(&[5.0, 5.0], send, 1));
            assert!(two.latency_ns >= one.latency_ns);
            assert!(two.period_ns >= one.period_ns, "one item at a time gains no throughput");
            assert!(pipeline_rate(&[5.0, 5.0], send, 2).period_ns < one.period_ns);
        }
    }

    // proves: V-10
    #[test]
    fn bandwidth_bound_work_gains_only_where_bytes_are_cut() {
        // One token through a square matmul, and a norm that every rank computes in full.
        let rates = (1e15, 4e12);
        let kernel = |flops, whole_bytes, cut_bytes| ShardedKernel {
            flops,
            replicated_bytes: whole_bytes,
            sharded_bytes: cut_bytes,
            flops_per_s: rates.0,
            bytes_per_s: rates.1,
        };
        let token = kernel(2.0 * 8192.0 * 8192.0, 0.0, 2.0 * 8192.0 * 8192.0);
        let norm = kernel(1e6, 1e9, 0.0);
        assert_eq!(
            (token.bottleneck_on(1), norm.bottleneck_on(8)),
            (Bottleneck::Bandwidth, Bottleneck::Bandwidth)
        );
        assert!((token.tp_speedup(8) - 8.0).abs() < 1e-9);
        assert_eq!(norm.tp_speedup(8), 1.0);
        assert_eq!(kernel(1e13, 1e6, 0.0).bottleneck_on(1), Bottleneck::Compute);
    }

    fn facts() -> ParallelismInputs {
        ParallelismInputs {
            deadline_ns: 100e6,
            period_ns: f64::INFINITY,
            part_ns: vec![20e6, 40e6, 20e6],
            tp_ns: vec![(2, 45e6), (4, 28e6)],
            send_ns: 0.1e6,
            devices: 8,
            min_devices: 1,
        }
    }

    #[test]
    fn choice_uses_the_axis_that_helps() {
        let sizes = |f: &ParallelismInputs| {
            choose_parallelism(f).map(|c| (c.tp, c.pp, c.dp, c.meets_targets)).expect("a choice")
        };
        assert_eq!(sizes(&facts()), (1, 1, 1, true));
        assert_eq!(sizes(&ParallelismInputs { deadline_ns: 50e6, ..facts() }), (2, 1, 1, true));
        // Throughput alone needs replicas, no sharding.
        assert_eq!(sizes(&ParallelismInputs { period_ns: 30e6, ..facts() }), (1, 1, 3, true));
        // A model that does not fit one device and whose matmuls cannot be sharded, with a target
        // period.
        let uncut = ParallelismInputs { tp_ns: Vec::new(), min_devices: 2, period_ns: 42e6, ..facts() };
        assert_eq!(sizes(&uncut), (1, 3, 1, true));
        assert_eq!(sizes(&ParallelismInputs { deadline_ns: 10e6, ..facts() }), (4, 1, 1, false));
        assert_eq!(choose_parallelism(&ParallelismInputs { min_devices: 9, ..facts() }), None);
    }

    #[test]
    fn reasons_contain_the_numbers() {
        let choice = choose_parallelism(&ParallelismInputs { deadline_ns: 50e6, period_ns: 20e6, ..facts() })
            .expect("a choice");
        let text = choice.reasons.join("\n");
        assert!(
            text.contains("80.000 ms") && text.contains("50.000 ms") && text.contains("45.000 ms"),
            "{text}"
        );
    }

    #[test]
    fn balanced_stages_minimise_the_longest() {
        assert_eq!(balance_stages(&[1.0, 1.0, 1.0, 3.0], 2), [3.0, 3.0]);
        assert_eq!(balance_stages(&[4.0, 1.0, 1.0], 3), [4.0, 1.0, 1.0]);
    }
}
