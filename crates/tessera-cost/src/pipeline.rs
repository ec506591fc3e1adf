//! When to cut a product, when to cut the layers, and when to copy the model: what each does for latency and
//! throughput, and a choice with the numbers behind it.
//!
//! * Cutting layers over stages (pp) never makes one item faster; it makes a stream of items faster, once two or more
//!   are under way.
//! * Cutting products (tp) makes one item faster as far as each rank moves fewer bytes or does fewer operations, less what
//!   the collectives take.
//! * Copies (dp) change no item's latency at all.

use std::fmt;

/// Share of the time that each of `stages` equal stages works when items come in batches of `in_flight` and the
/// pipeline empties between batches: B / (B + P − 1).
#[must_use]
pub fn utilisation(in_flight: u32, stages: u32) -> f64 {
    if in_flight == 0 || stages == 0 {
        return 0.0;
    }
    f64::from(in_flight) / f64::from(in_flight + stages - 1)
}

/// Share of the time that each of `stages` equal stages works when a new item enters as soon as one of `max_outstanding`
/// leaves: one per stage keeps all of them busy.
#[must_use]
pub fn utilisation_kept_full(max_outstanding: u32, stages: u32) -> f64 {
    if stages == 0 { 0.0 } else { (f64::from(max_outstanding) / f64::from(stages)).min(1.0) }
}

/// What a pipeline does for a stream of items.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Served {
    /// From when an item enters to when it leaves, nothing in its way.
    pub latency_ns: f64,
    /// Between two items that leave, in the long run.
    pub period_ns: f64,
}

/// A pipeline of stages with `send_ns` between two of them and at most `in_flight` items inside at once.
#[must_use]
pub fn served(stage_ns: &[f64], send_ns: f64, in_flight: u32) -> Served {
    let sends = send_ns * stage_ns.len().saturating_sub(1) as f64;
    let latency_ns = stage_ns.iter().sum::<f64>() + sends;
    let slowest = stage_ns.iter().copied().fold(0.0, f64::max);
    Served { latency_ns, period_ns: slowest.max(latency_ns / f64::from(in_flight.max(1))) }
}

/// Work of one kernel on one rank, and what the device can do.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Kernel {
    /// Operations.
    pub flops: f64,
    /// Bytes that travel whatever the cut is: what every rank reads or writes whole.
    pub whole_bytes: f64,
    /// Bytes that the cut divides.
    pub cut_bytes: f64,
    /// Rate of operations.
    pub flops_per_s: f64,
    /// Rate of memory.
    pub bytes_per_s: f64,
}

/// What limits a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Limit {
    /// Operations.
    Compute,
    /// Bytes of memory.
    Bandwidth,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::Compute => "compute-bound",
            Limit::Bandwidth => "bandwidth-bound",
        })
    }
}

impl Kernel {
    /// What limits it on `tp` ranks.
    #[must_use]
    pub fn limit(&self, tp: u32) -> Limit {
        if self.flops_ns(tp) >= self.bytes_ns(tp) { Limit::Compute } else { Limit::Bandwidth }
    }

    /// Time on `tp` ranks: the longer of operations and bytes.
    #[must_use]
    pub fn ns(&self, tp: u32) -> f64 {
        self.flops_ns(tp).max(self.bytes_ns(tp))
    }

    /// How many times faster `tp` ranks are than one, collectives apart. 1 for a bandwidth-bound kernel whose bytes are
    /// not divided.
    #[must_use]
    pub fn gain(&self, tp: u32) -> f64 {
        let cut = self.ns(tp);
        if cut > 0.0 { self.ns(1) / cut } else { 1.0 }
    }

    fn flops_ns(&self, tp: u32) -> f64 {
        self.flops / f64::from(tp.max(1)) / self.flops_per_s * 1e9
    }

    fn bytes_ns(&self, tp: u32) -> f64 {
        (self.whole_bytes + self.cut_bytes / f64::from(tp.max(1))) / self.bytes_per_s * 1e9
    }
}

/// What a choice between tp, pp and dp is made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Facts {
    /// Latest that an item may be done after it came; infinite where only throughput counts.
    pub deadline_ns: f64,
    /// Time between items that come; infinite where they come one by one and wait for the answer.
    pub period_ns: f64,
    /// Work of one item on one rank, in the order of its parts; a pipeline may be cut between parts.
    pub part_ns: Vec<f64>,
    /// Sizes of tp that the model admits, each with the time that one item takes on it, collectives included. Size 1
    /// is the sum of the parts and need not be listed.
    pub tp_ns: Vec<(u32, f64)>,
    /// One send between stages.
    pub send_ns: f64,
    /// Devices that there are.
    pub devices: u32,
    /// Devices that one copy of the model needs for its memory.
    pub least_devices: u32,
}

/// Sizes of the axes, what they give, and why.
#[derive(Debug, Clone, PartialEq)]
pub struct Choice {
    /// Ranks that cut products.
    pub tp: u32,
    /// Stages.
    pub pp: u32,
    /// Copies.
    pub dp: u32,
    /// Latency of an item.
    pub latency_ns: f64,
    /// Time between items that leave, over all copies.
    pub period_ns: f64,
    /// Whether latency and throughput are as asked.
    pub meets: bool,
    /// The reasons, a sentence each, with their numbers.
    pub says: Vec<String>,
}

/// The arrangement on the fewest devices that meets deadline and period; of equals the one with the lowest latency, then
/// the one that communicates least: copies before stages before cut products. Where none meets them, the one that comes
/// closest. None where memory needs more devices than there are, or an item has no parts.
#[must_use]
pub fn decide(facts: &Facts) -> Option<Choice> {
    let options = options(facts);
    let late = |o: &Choice| (o.latency_ns / facts.deadline_ns).max(o.period_ns / facts.period_ns).max(1.0);
    let rank = |o: &Choice| (late(o), o.tp * o.pp * o.dp, o.latency_ns, o.tp, o.pp);
    let best =
        options.iter().min_by(|a, b| rank(a).partial_cmp(&rank(b)).unwrap_or(std::cmp::Ordering::Equal))?;
    let mut choice = best.clone();
    choice.meets = late(best) <= 1.0;
    choice.says = says(facts, &options, &choice);
    Some(choice)
}

fn options(facts: &Facts) -> Vec<Choice> {
    let whole: f64 = facts.part_ns.iter().sum();
    let mut sizes = facts.tp_ns.clone();
    if !sizes.iter().any(|s| s.0 == 1) {
        sizes.push((1, whole));
    }
    let mut options = Vec::new();
    for &(tp, ns) in sizes.iter().filter(|s| s.0 > 0) {
        for pp in 1..=facts.part_ns.len() as u32 {
            let ranks = tp.saturating_mul(pp);
            if ranks > facts.devices || ranks < facts.least_devices {
                continue;
            }
            let cut = if whole > 0.0 { ns / whole } else { 1.0 };
            let stages: Vec<f64> = balanced(&facts.part_ns, pp as usize).iter().map(|t| t * cut).collect();
            let one = served(&stages, facts.send_ns, pp);
            for dp in 1..=facts.devices / ranks {
                options.push(Choice {
                    tp,
                    pp,
                    dp,
                    latency_ns: one.latency_ns,
                    period_ns: one.period_ns / f64::from(dp),
                    meets: false,
                    says: Vec::new(),
                });
                if one.period_ns / f64::from(dp) <= facts.period_ns {
                    break;
                }
            }
        }
    }
    options
}

/// Times of `stages` runs of consecutive parts, the longest as short as can be.
fn balanced(parts: &[f64], stages: usize) -> Vec<f64> {
    // Best longest run of the first `i` parts in `s` runs, and where the last of these begins.
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

fn says(facts: &Facts, options: &[Choice], choice: &Choice) -> Vec<String> {
    let ms = |ns: f64| format!("{:.3} ms", ns / 1e6);
    let whole: f64 = facts.part_ns.iter().sum();
    let mut says = Vec::new();
    let one = options.iter().find(|o| (o.tp, o.pp) == (1, 1));
    match one {
        Some(o) if o.latency_ns <= facts.deadline_ns => {
            says.push(format!(
                "one device answers in {}, within {}: no item needs a cut",
                ms(whole),
                ms(facts.deadline_ns)
            ));
        }
        Some(_) => says.push(format!(
            "one device needs {} and {} are allowed: only tp makes an item faster",
            ms(whole),
            ms(facts.deadline_ns)
        )),
        None => says.push(format!("one copy needs {} devices for its memory", facts.least_devices)),
    }
    if choice.tp > 1 {
        let same = options.iter().find(|o| (o.tp, o.pp) == (1, choice.pp));
        let before = same.map_or(whole, |o| o.latency_ns);
        says.push(format!(
            "tp={} brings an item from {} to {}",
            choice.tp,
            ms(before),
            ms(choice.latency_ns)
        ));
    }
    if choice.pp > 1 {
        let flat = options.iter().find(|o| (o.tp, o.pp) == (choice.tp, 1));
        let all = options.iter().find(|o| (o.tp, o.pp, o.dp) == (choice.tp, choice.pp, 1));
        if let (Some(flat), Some(all)) = (flat, all) {
            says.push(format!(
                "pp={} makes an item no faster ({} against {}) and lets one leave every {} instead of every {}, with {} under way",
                choice.pp,
                ms(choice.latency_ns),
                ms(flat.latency_ns),
                ms(all.period_ns),
                ms(flat.latency_ns),
                choice.pp
            ));
        } else {
            says.push(format!(
                "pp={} lets a copy fit: tp={} alone has too little memory",
                choice.pp, choice.tp
            ));
        }
    }
    if choice.pp > 1 {
        let pp = choice.pp;
        says.push(format!(
            "with {pp} items under way each stage works {:.0} % of the time if they come and go together, and {:.0} % if one \
             enters as one leaves",
            utilisation(pp, pp) * 100.0,
            utilisation_kept_full(pp, pp) * 100.0
        ));
    }
    if choice.dp > 1 {
        says.push(format!(
            "dp={} copies let one leave every {}, latency as before",
            choice.dp,
            ms(choice.period_ns)
        ));
    }
    if choice.latency_ns > facts.deadline_ns {
        says.push(format!(
            "nothing tried on up to {} devices answers within {}: {} is the closest",
            facts.devices,
            ms(facts.deadline_ns),
            ms(choice.latency_ns)
        ));
    }
    if choice.period_ns > facts.period_ns {
        says.push(format!(
            "items come every {} and leave every {}: the queue grows",
            ms(facts.period_ns),
            ms(choice.period_ns)
        ));
    }
    says
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::knobs::Schedule;
    use crate::schedule::{Pace, bubble_share};
    use crate::streams::{Contention, Task, Tasks, Uses};

    /// Items through equal stages, an item entering when the one `window` before it has left.
    fn played(stages: u32, window: u32, items: u32) -> f64 {
        let mut tasks = Tasks::default();
        let mut last = Vec::new();
        for item in 0..items {
            let mut before = None;
            for rank in 0..stages {
                let task =
                    tasks.push(Task { rank, stream: 0, work_ns: 1.0, uses: Uses::Compute, meets: None });
                before.into_iter().for_each(|b| tasks.after(task, b));
                if let (0, Some(left)) = (rank, item.checked_sub(window)) {
                    tasks.after(task, last[left as usize]);
                }
                before = Some(task);
            }
            last.extend(before);
        }
        let windows = tasks.run(Contention::NONE).expect("no circle");
        windows.iter().map(|w| w.end_ns).fold(0.0, f64::max)
    }

    #[test]
    fn utilisation_is_what_a_played_pipeline_has() {
        let pace = Pace { forward_ns: 2.0, ..Pace::default() };
        for (p, b) in [(1, 1), (2, 1), (3, 4), (5, 7), (9, 36)] {
            let batch = f64::from(b) / played(p, b, b);
            assert!((utilisation(b, p) - batch).abs() < 1e-12);
            assert!(
                (1.0 - bubble_share(Schedule::OneFOneB, p, 1, b, &pace) - utilisation(b, p)).abs() < 1e-12
            );
            let long = f64::from(1000u32) / played(p, b, 1000);
            assert!((utilisation_kept_full(b, p) - long).abs() < 0.01, "{p} {b} {long}");
        }
    }

    #[test]
    fn stages_help_a_stream_and_not_an_item() {
        for send in [0.0, 1.0] {
            let (one, two) = (served(&[10.0], send, 4), served(&[5.0, 5.0], send, 1));
            assert!(two.latency_ns >= one.latency_ns);
            assert!(two.period_ns >= one.period_ns, "one item at a time gains nothing");
            assert!(served(&[5.0, 5.0], send, 2).period_ns < one.period_ns);
        }
    }

    #[test]
    fn bandwidth_bound_work_gains_only_where_bytes_are_cut() {
        // One token through a square product, and the pass of a norm that every rank does whole.
        let rates = (1e15, 4e12);
        let kernel = |flops, whole_bytes, cut_bytes| Kernel {
            flops,
            whole_bytes,
            cut_bytes,
            flops_per_s: rates.0,
            bytes_per_s: rates.1,
        };
        let token = kernel(2.0 * 8192.0 * 8192.0, 0.0, 2.0 * 8192.0 * 8192.0);
        let norm = kernel(1e6, 1e9, 0.0);
        assert_eq!((token.limit(1), norm.limit(8)), (Limit::Bandwidth, Limit::Bandwidth));
        assert!((token.gain(8) - 8.0).abs() < 1e-9);
        assert_eq!(norm.gain(8), 1.0);
        assert_eq!(kernel(1e13, 1e6, 0.0).limit(1), Limit::Compute);
    }

    fn facts() -> Facts {
        Facts {
            deadline_ns: 100e6,
            period_ns: f64::INFINITY,
            part_ns: vec![20e6, 40e6, 20e6],
            tp_ns: vec![(2, 45e6), (4, 28e6)],
            send_ns: 0.1e6,
            devices: 8,
            least_devices: 1,
        }
    }

    #[test]
    fn a_choice_takes_the_axis_that_helps() {
        let sizes = |f: &Facts| decide(f).map(|c| (c.tp, c.pp, c.dp, c.meets)).expect("a choice");
        assert_eq!(sizes(&facts()), (1, 1, 1, true));
        assert_eq!(sizes(&Facts { deadline_ns: 50e6, ..facts() }), (2, 1, 1, true));
        // Throughput alone: copies, not cuts.
        assert_eq!(sizes(&Facts { period_ns: 30e6, ..facts() }), (1, 1, 3, true));
        // A model that does not fit one device, whose products cannot be cut, with a stream to keep up with.
        let uncut = Facts { tp_ns: Vec::new(), least_devices: 2, period_ns: 42e6, ..facts() };
        assert_eq!(sizes(&uncut), (1, 3, 1, true));
        assert_eq!(sizes(&Facts { deadline_ns: 10e6, ..facts() }), (4, 1, 1, false));
        assert_eq!(decide(&Facts { least_devices: 9, ..facts() }), None);
    }

    #[test]
    fn a_choice_says_its_numbers() {
        let choice = decide(&Facts { deadline_ns: 50e6, period_ns: 20e6, ..facts() }).expect("a choice");
        let text = choice.says.join("\n");
        assert!(
            text.contains("80.000 ms") && text.contains("50.000 ms") && text.contains("45.000 ms"),
            "{text}"
        );
    }

    #[test]
    fn stages_are_cut_where_the_longest_is_shortest() {
        assert_eq!(balanced(&[1.0, 1.0, 1.0, 3.0], 2), [3.0, 3.0]);
        assert_eq!(balanced(&[4.0, 1.0, 1.0], 3), [4.0, 1.0, 1.0]);
    }
}
