//! What a chart of bars does not tell by itself: collectives that nothing hides, compute that is booked twice, bars that
//! start before their input is there, micro-batches that a stage never ran, and how much of a wave is waiting.
//!
//! Nothing is assumed about where the bars come from; units are the chart's own.

use std::collections::{BTreeMap, BTreeSet};

use tessera_base::{Code, Diagnostic, Diagnostics};

use crate::bars::{Bar, Kind, Overlap, hidden_ns, makespan_ns, overlap};
use crate::knobs::Schedule;
use crate::schedule::{Pace, micro_batches_for};

/// What a chart should reach.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Goals {
    /// Overlap ratio, at least.
    pub overlap: f64,
    /// Bubble of each stage, less than; as a share of the whole wave.
    pub bubble: f64,
}

impl Default for Goals {
    fn default() -> Goals {
        Goals { overlap: 0.6, bubble: 0.1 }
    }
}

/// A collective bar and how much of it is hidden.
#[derive(Debug, Clone, PartialEq)]
pub struct Exposed {
    /// Its name.
    pub name: String,
    /// Length.
    pub ns: f64,
    /// Part that compute of the same rank hides.
    pub hidden_ns: f64,
}

/// Two bars that want one thing at one time.
#[derive(Debug, Clone, PartialEq)]
pub struct Clash {
    /// The earlier bar.
    pub first: Bar,
    /// The other one.
    pub second: Bar,
    /// From when both want it.
    pub start_ns: f64,
    /// Until when.
    pub end_ns: f64,
}

/// A bar that starts before its input ends.
#[derive(Debug, Clone, PartialEq)]
pub struct Early {
    /// The bar.
    pub bar: Bar,
    /// What it needs.
    pub input: Bar,
}

/// Findings on the chart of a block: lanes of one or more ranks.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Overlap of collectives alone.
    pub overlap: Overlap,
    /// The same with packing counted as part of them.
    pub packed: Overlap,
    /// Every collective, in order of start.
    pub collectives: Vec<Exposed>,
    /// Bars of one rank that compute at one time, or of one lane at one time.
    pub clashes: Vec<Clash>,
    /// Bars that start before their input ends.
    pub early: Vec<Early>,
    /// What was asked.
    pub goals: Goals,
}

/// What the bars of a block with attention over tp and experts over ep need, by the first words of their names: the
/// bar, then its input.
pub const BLOCK_INPUTS: &[(&str, &str)] = &[
    ("softmax", "qk"),
    ("rs", "qk"),
    ("softmax", "rs"),
    ("ag", "softmax"),
    ("pack", "ag"),
    ("a2a", "pack"),
    ("unpack", "a2a"),
    ("unpack", "prefetch"),
];

/// Audits the chart of a block. `inputs` names bars by how their names start, small letters: [`BLOCK_INPUTS`] for a block
/// of the common form.
#[must_use]
pub fn block(bars: &[Bar], inputs: &[(&str, &str)], goals: Goals) -> Block {
    let mut sorted: Vec<&Bar> = bars.iter().collect();
    sorted.sort_by(|a, b| {
        (a.start_ns, a.end_ns).partial_cmp(&(b.start_ns, b.end_ns)).unwrap_or(std::cmp::Ordering::Equal)
    });
    let collectives = sorted.iter().filter(|b| b.kind == Kind::Collective);
    Block {
        overlap: overlap(bars, false),
        packed: overlap(bars, true),
        collectives: collectives
            .map(|b| Exposed { name: b.name.clone(), ns: b.ns(), hidden_ns: hidden_ns(bars, b) })
            .collect(),
        clashes: clashes(&sorted),
        early: early(&sorted, inputs),
        goals,
    }
}

impl Block {
    /// What is wrong, as warnings about `at`, the name of the chart.
    #[must_use]
    pub fn diagnostics(&self, at: &str) -> Diagnostics {
        let mut found = Vec::new();
        let (ratio, packed) = (self.overlap.ratio(), self.packed.ratio());
        if ratio < self.goals.overlap {
            let says = format!("overlap ratio {ratio:.2} is below the goal of {:.2}", self.goals.overlap);
            let whole = |n: &Exposed| {
                format!("{} takes {} and {} of it are hidden", n.name, short(n.ns), short(n.hidden_ns))
            };
            let mut d = Diagnostic::warning(&T1116, says).at(at, format!("{packed:.2} with packing counted"));
            let mut exposed: Vec<(String, u32)> = Vec::new();
            for open in self.collectives.iter().filter(|c| c.hidden_ns < c.ns).map(whole) {
                match exposed.iter_mut().find(|(says, _)| *says == open) {
                    Some((_, times)) => *times += 1,
                    None => exposed.push((open, 1)),
                }
            }
            for (says, times) in exposed.iter().take(TOLD) {
                d = d.note(if *times > 1 { format!("{says}, {times} times") } else { says.clone() });
            }
            if exposed.len() > TOLD {
                d = d.note(format!("and {} others", exposed.len() - TOLD));
            }
            found.push(d.hint("cut the product before an exposed collective into chunks, or run another micro-batch beside it"));
        }
        for c in &self.clashes {
            let says = |b: &Bar| format!("`{}` from {} to {}", b.lane, short(b.start_ns), short(b.end_ns));
            let both = format!(
                "{} and {} are both drawn from {} to {}",
                c.first.name,
                c.second.name,
                short(c.start_ns),
                short(c.end_ns)
            );
            found.push(
                Diagnostic::warning(
                    &T1117,
                    format!("{both}, and both need the compute of rank {}", c.first.rank),
                )
                .at(format!("{at}: {}", c.first.name), says(&c.first))
                .at(format!("{at}: {}", c.second.name), says(&c.second))
                .hint("put one after the other, or say how the device is divided between them"),
            );
        }
        for e in &self.early {
            let (bar, input) = (&e.bar, &e.input);
            let by = short(input.end_ns - bar.start_ns);
            found.push(
                Diagnostic::warning(
                    &T1118,
                    format!("{} starts {by} before its input {} ends", bar.name, input.name),
                )
                .at(format!("{at}: {}", bar.name), format!("starts at {}", short(bar.start_ns)))
                .at(format!("{at}: {}", input.name), format!("ends at {}", short(input.end_ns)))
                .hint(format!(
                    "true only if {} hands over chunks; whole, it starts at {} at the earliest",
                    input.name,
                    short(input.end_ns)
                )),
            );
        }
        found
    }
}

/// Exposed collectives that are told; charts of whole plans have hundreds.
const TOLD: usize = 12;

/// Findings on the chart of a wave of micro-batches: one bar per stage and micro-batch.
#[derive(Debug, Clone, PartialEq)]
pub struct Wave {
    /// Stages.
    pub stages: u32,
    /// Micro-batches, those of the stage with the most.
    pub micro_batches: u32,
    /// Bars that are not drawn, where they belong.
    pub missing: Vec<Bar>,
    /// Length of the wave with the missing bars.
    pub makespan_ns: f64,
    /// Share of it that each stage waits.
    pub bubble: Vec<f64>,
    /// The fewest micro-batches with which the bubble of equal stages meets the goal.
    pub needed: Option<u32>,
    /// What was asked.
    pub goals: Goals,
}

/// Audits the chart of a wave: `rank` of a bar is its stage, its name the micro-batch. A bar that some stage lacks is
/// put where its stage is free and the stage before is done with it, as long as the stage's other bars are on average.
#[must_use]
pub fn wave(bars: &[Bar], goals: Goals) -> Wave {
    let mut stages: BTreeMap<u32, Vec<Bar>> = BTreeMap::new();
    let mut names: Vec<&str> = Vec::new();
    for bar in bars {
        stages.entry(bar.rank).or_default().push(bar.clone());
        if !names.contains(&bar.name.as_str()) {
            names.push(&bar.name);
        }
    }
    let mut missing = Vec::new();
    let mut before: BTreeMap<&str, f64> = BTreeMap::new();
    for (&rank, stage) in &mut stages {
        let mean = stage.iter().map(Bar::ns).sum::<f64>() / stage.len() as f64;
        let (lane, kind) = stage.first().map_or((String::new(), Kind::Compute), |b| (b.lane.clone(), b.kind));
        for &name in &names {
            if stage.iter().all(|b| b.name != name) {
                let free = stage.iter().map(|b| b.end_ns).fold(0.0, f64::max);
                let start_ns = free.max(before.get(name).copied().unwrap_or(0.0));
                let bar = Bar {
                    rank,
                    lane: lane.clone(),
                    name: name.to_owned(),
                    kind,
                    start_ns,
                    end_ns: start_ns + mean,
                };
                missing.push(bar.clone());
                stage.push(bar);
            }
        }
        before = names
            .iter()
            .filter_map(|&name| Some((name, stage.iter().find(|b| b.name == name)?.end_ns)))
            .collect();
    }
    let all: Vec<Bar> = stages.values().flatten().cloned().collect();
    let makespan = makespan_ns(&all);
    let waits = |stage: &Vec<Bar>| 1.0 - stage.iter().map(Bar::ns).sum::<f64>() / makespan;
    let count = stages.len() as u32;
    let even = Pace { forward_ns: 1.0, ..Pace::default() };
    Wave {
        stages: count,
        micro_batches: names.iter().map(|n| micro_batch(n)).collect::<BTreeSet<_>>().len() as u32,
        missing,
        makespan_ns: makespan,
        bubble: stages.values().map(waits).collect(),
        needed: micro_batches_for(Schedule::OneFOneB, count, 1, &even, goals.bubble),
        goals,
    }
}

/// The micro-batch of a turn: forward, backward and weights of one (`F3`, `B3.1`, `W3`) are turns of the same.
fn micro_batch(name: &str) -> &str {
    let digits = name.trim_start_matches(['F', 'B', 'W']);
    let number = digits.split('.').next().unwrap_or(digits);
    if !number.is_empty() && number.bytes().all(|b| b.is_ascii_digit()) { number } else { name }
}

impl Wave {
    /// What is wrong, as warnings about `at`, the name of the chart.
    #[must_use]
    pub fn diagnostics(&self, at: &str) -> Diagnostics {
        let mut found = Vec::new();
        if !self.missing.is_empty() {
            let d = Diagnostic::warning(
                &T1119,
                format!("{} bars are missing: not every stage runs every micro-batch", self.missing.len()),
            );
            let d = self.missing.iter().fold(d, |d, b| {
                d.at(
                    format!("{at}: {}", b.lane),
                    format!("{} belongs from {} to {}", b.name, short(b.start_ns), short(b.end_ns)),
                )
            });
            found.push(d.hint("draw them; the bubble below is counted with them"));
        }
        let worst = self.bubble.iter().copied().fold(0.0, f64::max);
        if worst >= self.goals.bubble {
            let (p, m) = (self.stages, self.micro_batches);
            let says = format!(
                "a stage waits {:.0} % of the wave, and less than {:.0} % is asked",
                worst * 100.0,
                self.goals.bubble * 100.0
            );
            let d = Diagnostic::warning(&T1119, says).at(
                at,
                format!(
                    "{p} stages, {m} micro-batches: equal stages wait (p-1)/(m+p-1) = {}/{}",
                    p - 1,
                    m + p - 1
                ),
            );
            found.push(match self.needed {
                Some(needed) => d.hint(format!("use {needed} micro-batches or more")),
                None => d,
            });
        }
        found
    }
}

/// A number as a chart's reader wrote it: no digits beyond thousandths.
fn short(x: f64) -> f64 {
    // Adding zero takes the sign from a zero.
    (x * 1000.0).round() / 1000.0 + 0.0
}

/// Pairs that overlap on one lane, or that both compute on one rank. Bars come in order of start.
fn clashes(sorted: &[&Bar]) -> Vec<Clash> {
    let mut found = Vec::new();
    for (i, first) in sorted.iter().enumerate() {
        for second in sorted[i + 1..].iter().take_while(|b| b.start_ns < first.end_ns) {
            let compute = first.kind == Kind::Compute && second.kind == Kind::Compute;
            let (start_ns, end_ns) = (second.start_ns, first.end_ns.min(second.end_ns));
            if first.rank == second.rank && (compute || first.lane == second.lane) && end_ns > start_ns {
                found.push(Clash { first: (*first).clone(), second: (*second).clone(), start_ns, end_ns });
            }
        }
    }
    found
}

fn early(sorted: &[&Bar], inputs: &[(&str, &str)]) -> Vec<Early> {
    let named = |bar: &Bar, word: &str| bar.name.to_lowercase().starts_with(word);
    let mut found = Vec::new();
    for (word, input_word) in inputs {
        for bar in sorted.iter().filter(|b| named(b, word)) {
            let input = sorted.iter().find(|b| b.rank == bar.rank && named(b, input_word));
            if let Some(input) = input.filter(|input| bar.start_ns < input.end_ns) {
                found.push(Early { bar: (*bar).clone(), input: (*input).clone() });
            }
        }
    }
    found
}

/// Collectives that nothing hides.
pub static T1116: Code = Code {
    id: "T1116",
    title: "too little of the collective time is hidden",
    page: "The overlap ratio is the part of all collective time during which the same rank computes. Below the goal, ranks \
mostly wait for each other. The notes list each collective with what hides it; one that nothing hides stands between two \
products that need each other whole.

A product cut into chunks lets the collective of one chunk run beside the next chunk. Two micro-batches side by side let one \
compute while the other communicates. Chunks of fewer than about a thousand rows lose more in the product than they hide.",
};
/// Compute that two bars have at once.
pub static T1117: Code = Code {
    id: "T1117",
    title: "two bars use the compute of one device at the same time",
    page: "A chart may show two products side by side on two rows, but a device has one set of compute units. Kernels on two \
streams either take turns, so that the chart is longer than drawn, or share the units, so that both are slower than drawn.

Put one behind the other, or plan with a device divided between streams and use each part's own rates.",
};
/// A bar before its input.
pub static T1118: Code = Code {
    id: "T1118",
    title: "a bar starts before its input ends",
    page: "A task cannot start before what it reads is written. Where a chart shows it doing so, it silently assumes that the \
input comes in chunks and that the first of them is enough to start with.

Name the chunks in the mapping, so that the plan pays for them, or move the bar behind its input.",
};
/// A wave with holes.
pub static T1119: Code = Code {
    id: "T1119",
    title: "a pipeline waits too long, or is not drawn to the end",
    page: "While a pipeline fills and drains, its stages wait. With p equal stages and m micro-batches each waits (p-1) of \
(m+p-1) turns; more micro-batches make that less, and so do schedules that put gradients of weights into the holes.

Bars are counted as missing when a stage does not run a micro-batch that another one runs. The share is counted with them in \
place, because a wave that stops halfway looks shorter than it is.",
};

#[cfg(test)]
mod tests {
    use super::*;

    fn bars(list: &[(u32, &str, &str, f64, f64)]) -> Vec<Bar> {
        list.iter()
            .map(|&(rank, lane, name, start_ns, ns)| Bar {
                rank,
                lane: lane.into(),
                name: name.into(),
                kind: Kind::of_name(name),
                start_ns,
                end_ns: start_ns + ns,
            })
            .collect()
    }

    /// A block with tensor and expert parallelism as a guide draws it.
    fn drawn_block() -> Vec<Bar> {
        bars(&[
            (0, "Compute", "QK^T GEMM", 0.0, 3.0),
            (0, "Compute", "Softmax + PV", 3.0, 2.0),
            (0, "Compute", "FFN GEMM", 8.0, 4.0),
            (0, "TP Collectives", "RS logits", 2.0, 1.0),
            (0, "TP Collectives", "AG outputs", 5.0, 1.0),
            (0, "MoE Routing", "Pack tokens", 6.0, 1.0),
            (0, "MoE Routing", "A2A (FP8)", 7.0, 2.0),
            (0, "MoE Routing", "Unpack + Experts", 9.0, 3.0),
            (0, "IO", "Prefetch experts", 4.0, 3.0),
        ])
    }

    #[test]
    fn a_block_drawn_to_hide_its_collectives_hides_half_of_them() {
        let audit = block(&drawn_block(), BLOCK_INPUTS, Goals::default());
        assert_eq!((audit.overlap.ratio(), audit.packed.ratio()), (0.5, 0.4));
        let exposed: Vec<(&str, f64)> =
            audit.collectives.iter().map(|c| (c.name.as_str(), c.ns - c.hidden_ns)).collect();
        assert_eq!(exposed, [("RS logits", 0.0), ("AG outputs", 1.0), ("A2A (FP8)", 1.0)]);
        let clash = &audit.clashes[0];
        assert_eq!((audit.clashes.len(), clash.start_ns, clash.end_ns), (1, 9.0, 12.0));
        assert_eq!((clash.first.name.as_str(), clash.second.name.as_str()), ("FFN GEMM", "Unpack + Experts"));
        assert_eq!(audit.early.len(), 1);
        assert_eq!(
            (audit.early[0].bar.name.as_str(), audit.early[0].input.name.as_str()),
            ("RS logits", "QK^T GEMM")
        );
        let codes: Vec<&str> = audit.diagnostics("chart").iter().map(|d| d.code.id).collect();
        assert_eq!(codes, ["T1116", "T1117", "T1118"]);
    }

    /// Three stages, four micro-batches, drawn until the first stage is done.
    fn drawn_wave() -> Vec<Bar> {
        let mut list = Vec::new();
        for (stage, count) in [(0u32, 4), (1, 3), (2, 2)] {
            for (micro_batch, name) in ["MB0", "MB1", "MB2", "MB3"].iter().enumerate().take(count) {
                list.push((
                    stage,
                    ["Stage 0", "Stage 1", "Stage 2"][stage as usize],
                    *name,
                    3.0 * (f64::from(stage) + micro_batch as f64),
                    3.0,
                ));
            }
        }
        bars(&list)
    }

    #[test]
    fn a_wave_of_four_over_three_stages_waits_a_third_and_lacks_three_bars() {
        let audit = wave(&drawn_wave(), Goals::default());
        let missing: Vec<(u32, &str, f64)> =
            audit.missing.iter().map(|b| (b.rank, b.name.as_str(), b.start_ns)).collect();
        assert_eq!(missing, [(1, "MB3", 12.0), (2, "MB2", 12.0), (2, "MB3", 15.0)]);
        assert_eq!(audit.makespan_ns, 18.0);
        assert!(audit.bubble.iter().all(|b| (b - 1.0 / 3.0).abs() < 1e-12));
        assert_eq!((audit.stages, audit.micro_batches, audit.needed), (3, 4, Some(19)));
        let two: Vec<Bar> = drawn_wave().into_iter().filter(|b| b.rank < 2).collect();
        assert_eq!(wave(&two, Goals::default()).needed, Some(10));
        let said = audit.diagnostics("wave");
        assert_eq!(said.len(), 2);
        assert!(said[1].hint.as_ref().is_some_and(|h| h.contains("19")));
    }

    #[test]
    fn turns_of_a_training_step_are_counted_by_micro_batch() {
        let named = ["F0.0", "F0.1", "B0.0", "B0.1", "W0", "F12", "B12", "MB0", "B", "Bx3"];
        let of: Vec<&str> = named.iter().map(|n| micro_batch(n)).collect();
        assert_eq!(of, ["0", "0", "0", "0", "0", "12", "12", "MB0", "B", "Bx3"]);
        let step = bars(&[
            (0, "Stage 0", "F0", 0.0, 1.0),
            (0, "Stage 0", "F1", 1.0, 1.0),
            (0, "Stage 0", "B0", 4.0, 2.0),
            (0, "Stage 0", "B1", 6.0, 2.0),
        ]);
        assert_eq!(wave(&step, Goals::default()).micro_batches, 2);
    }

    #[test]
    fn a_full_wave_that_waits_little_is_fine() {
        let mut list = Vec::new();
        let names: Vec<String> = (0..19).map(|m| format!("MB{m}")).collect();
        for stage in 0..3u32 {
            list.extend(
                names
                    .iter()
                    .enumerate()
                    .map(|(m, n)| (stage, "s", n.as_str(), f64::from(stage) + m as f64, 1.0)),
            );
        }
        let audit = wave(&bars(&list), Goals::default());
        assert!(audit.missing.is_empty() && audit.diagnostics("wave").is_empty());
    }
}
