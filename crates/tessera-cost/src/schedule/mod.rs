//! Pipelines: in which order a stage works on its micro-batches, what waiting that costs, and what it must keep.
//!
//! **The bubble** is the longest time from a stage's first start to its own last end, less its work: the time by which a
//! step is longer than its work when steps follow one another without a barrier. In 1F1B, interleaved and DualPipe
//! a first stage spans the step, so it is the idle time of a step as usually drawn. In ZB-H1 and ZB-H2 the stages end one after
//! another; what is saved is saved only if the optimizer step does not make all of them wait (a norm over all
//! gradients is checked afterwards, and the step undone when it was too large). Without a backward pass the bubble is the step from the
//! first start to the last end of all stages, less a stage's work, because an answer is out only then.
//!
//! **Closed forms** ([`closed_form`]) equal the simulated schedule, for stages of one pace, wherever they answer; beyond
//! (sends longer than the work that could hide them, fewer micro-batches than a schedule is made for) there is none and
//! [`bubble_ns`] simulates. With p stages, m micro-batches, v pieces, F, B, W and s for forward, input gradients, weight gradients and a
//! send, h = p/2 − 1:
//!
//! | schedule | bubble | where |
//! | --- | --- | --- |
//! | 1F1B | (p−1)(F+B+W+2s) + 2s(m−1−⌈(m−1)/p⌉) | everywhere |
//! | interleaved | (p−1)(F+B+W)/v + 2s(pv−1) | s ≤ F/v, s ≤ (B+W)/v |
//! | ZB-H1 | max((p−1)(B+2s), (p−1)(F+B−W+2s) + 2s·min(p−1, m−2)) | m ≥ p, 2s ≤ W |
//! | ZB-H2 | (p−1)·max(F+B−2W+2s, B−F+2s, 0) | m ≥ 2p−1, s ≤ F, B, W |
//! | DualPipe | max(2hF, (h−1)F+hB+hs) + max(0, h(B−W)+(2h+1)s) + s(p/2+m−2−⌈(m−2)/p⌉) | m ≥ 2p, 2s ≤ F, B, W |
//! | forward only | (p−1)(F/v+s) + m(v−1)s | everywhere but DualPipe |
//!
//! DualPipe's published (p/2−1)(F&B + B′ − 3W), with B′ = B+W and a pair F&B that takes what its two parts take, is
//! h(F+2B−W): the same as here where F = B, s = 0 and W ≤ B. A pair counts as one block: both results are there at its end.
//! **Sends** are safe when what a turn sends is posted together with what the next turn receives (in interleaved
//! schedules once per forward and backward, and ahead of gradients of weights); one after the other, 1F1B stops with two stages
//! that each wait for the other to receive. DualPipe's stages must not wait for their sends at all: in the middle both
//! would. The times here suppose that no sender waits.
//!
//! A GPipe pipeline (all forwards, then all backwards) has the bubble of 1F1B and keeps all m micro-batches.

mod legal;
mod order;
mod simulate;

pub use legal::{Why, legal};
pub use order::{Op, Turn, Work, orders};
pub use simulate::{Slot, simulate, simulate_uneven};

use crate::knobs::Schedule;

/// Times of one micro-batch on one stage, all its pieces together.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Pace {
    /// Forward.
    pub forward_ns: f64,
    /// Gradients of inputs, with what is computed again for them.
    pub backward_input_ns: f64,
    /// Gradients of weights.
    pub backward_weight_ns: f64,
    /// From the end of one stage's work to the next stage's having what it needs. Sends do not hold up the sender.
    pub send_ns: f64,
}

impl Pace {
    /// Work of one micro-batch.
    #[must_use]
    pub fn work_ns(&self) -> f64 {
        self.forward_ns + self.backward_input_ns + self.backward_weight_ns
    }

    /// Whether there is no backward pass.
    #[must_use]
    pub fn forward_only(&self) -> bool {
        self.backward_input_ns == 0.0 && self.backward_weight_ns == 0.0
    }
}

/// The bubble of a step (see the top of this file), by its closed form or else simulated. The arrangement must be
/// [`legal`]; of others nothing is said.
#[must_use]
pub fn bubble_ns(schedule: Schedule, stages: u32, interleave: u32, micro_batches: u32, pace: &Pace) -> f64 {
    closed_form(schedule, stages, interleave, micro_batches, pace).unwrap_or_else(|| {
        simulate::bubble_ns(schedule, interleave, micro_batches, &vec![*pace; stages as usize])
    })
}

/// The bubble by its closed form, where that is exact. Takes some tens of nanoseconds.
#[must_use]
pub fn closed_form(
    schedule: Schedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    pace: &Pace,
) -> Option<f64> {
    if stages <= 1 || micro_batches == 0 {
        return Some(0.0);
    }
    let Pace { forward_ns: f, backward_input_ns: b, backward_weight_ns: w, send_ns: s } = *pace;
    let (p, m, v) = (f64::from(stages), f64::from(micro_batches), f64::from(interleave.max(1)));
    let others = p - 1.0;
    if pace.forward_only() {
        return match schedule {
            Schedule::DualPipe => None,
            Schedule::Interleaved => Some(others * (f / v + s) + m * (v - 1.0) * s),
            Schedule::OneFOneB | Schedule::ZbH1 | Schedule::ZbH2 => Some(others * (f + s)),
        };
    }
    match schedule {
        Schedule::OneFOneB => {
            Some(others * (f + b + w + 2.0 * s) + 2.0 * s * (m - 1.0 - ((m - 1.0) / p).ceil()))
        }
        Schedule::Interleaved => {
            let hidden = s * v <= f && s * v <= b + w;
            hidden.then(|| others * (f + b + w) / v + 2.0 * s * (p * v - 1.0))
        }
        Schedule::ZbH1 => (m >= p && 2.0 * s <= w).then(|| {
            let late = others * (f + b - w + 2.0 * s) + 2.0 * s * others.min(m - 2.0);
            late.max(others * (b + 2.0 * s))
        }),
        Schedule::ZbH2 => (m >= 2.0 * p - 1.0 && s <= f.min(b).min(w))
            .then(|| others * (f + b - 2.0 * w + 2.0 * s).max(b - f + 2.0 * s).max(0.0)),
        Schedule::DualPipe => (m >= 2.0 * p && 2.0 * s <= f.min(b).min(w)).then(|| {
            let h = p / 2.0 - 1.0;
            let fill = (2.0 * h * f).max((h - 1.0) * f + h * b + h * s);
            let drain = (h * (b - w) + (2.0 * h + 1.0) * s).max(0.0);
            fill + drain + s * (p / 2.0 + m - 2.0 - ((m - 2.0) / p).ceil())
        }),
    }
}

/// Bubble over step, 0 to 1, where the step is work and bubble together: (p−1)/(m+p−1) for 1F1B without sends. Some
/// divide by the work alone, (p−1)/m; this does not.
#[must_use]
pub fn bubble_share(
    schedule: Schedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    pace: &Pace,
) -> f64 {
    let bubble = bubble_ns(schedule, stages, interleave, micro_batches, pace);
    let step = f64::from(micro_batches) * pace.work_ns() + bubble;
    if step > 0.0 { bubble / step } else { 0.0 }
}

/// Most activations that a stage keeps at once, in units of one micro-batch on one whole stage. Gradients of weights
/// need what the forward pass kept, so it is kept until they are made.
#[must_use]
pub fn in_flight(schedule: Schedule, stages: u32, interleave: u32, micro_batches: u32) -> f64 {
    let (p, m) = (f64::from(stages), f64::from(micro_batches));
    let most = match schedule {
        _ if stages <= 1 => 1.0,
        Schedule::OneFOneB | Schedule::ZbH1 => p,
        Schedule::Interleaved => p + (p - 1.0) / f64::from(interleave.max(1)),
        Schedule::ZbH2 => 2.0 * p - 1.0,
        Schedule::DualPipe => p + 1.0,
    };
    most.min(m)
}

/// The same of one stage, from 0: later stages of 1F1B and interleaving keep less. Where gradients of weights are put off
/// all keep alike, at most.
#[must_use]
pub fn in_flight_on(schedule: Schedule, stages: u32, interleave: u32, micro_batches: u32, stage: u32) -> f64 {
    let (p, m, s) = (f64::from(stages), f64::from(micro_batches), f64::from(stage));
    match schedule {
        Schedule::OneFOneB if stages > 1 => (p - s).min(m),
        // One round is all forwards, then all backwards.
        Schedule::Interleaved if stages > 1 && micro_batches > stages => {
            (p + (p - 1.0 - 2.0 * s) / f64::from(interleave.max(1))).min(m)
        }
        _ => in_flight(schedule, stages, interleave, micro_batches),
    }
}

/// How often a rank holds the parameters of a stage: twice where both directions run at once.
#[must_use]
pub fn parameter_copies(schedule: Schedule, stages: u32) -> u32 {
    if schedule == Schedule::DualPipe && stages > 1 { 2 } else { 1 }
}

/// The fewest micro-batches with which the bubble is less than `share` of the step; none where no number up to a million
/// does it, as when sends are exposed in every micro-batch.
#[must_use]
pub fn micro_batches_for(
    schedule: Schedule,
    stages: u32,
    interleave: u32,
    pace: &Pace,
    share: f64,
) -> Option<u32> {
    const MOST: u32 = 1 << 20;
    let (unit, least) = match schedule {
        Schedule::Interleaved => (stages, 1),
        Schedule::DualPipe => (2, stages),
        Schedule::OneFOneB | Schedule::ZbH1 | Schedule::ZbH2 => (1, 1),
    };
    // The share of equal numbers may come out a rounding error below itself.
    let below = |count: u32| bubble_share(schedule, stages, interleave, count * unit, pace) < share - 1e-12;
    let mut enough = least;
    while !below(enough) {
        enough *= 2;
        if enough.saturating_mul(unit) > MOST {
            return None;
        }
    }
    let mut few = least - 1;
    while enough - few > 1 {
        let mid = few.midpoint(enough);
        if mid < least || !below(mid) { few = mid } else { enough = mid }
    }
    Some(enough * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVEN: Pace =
        Pace { forward_ns: 1.0, backward_input_ns: 1.0, backward_weight_ns: 1.0, send_ns: 0.0 };

    #[test]
    fn published_bubbles_of_even_paces_come_out() {
        let bubble = |s, v| bubble_ns(s, 8, v, 32, &EVEN);
        assert_eq!(bubble(Schedule::OneFOneB, 1), 21.0);
        assert_eq!(bubble(Schedule::Interleaved, 3), 7.0);
        assert_eq!(bubble(Schedule::ZbH1, 1), 7.0);
        assert_eq!(bubble(Schedule::ZbH2, 1), 0.0);
        assert_eq!(bubble(Schedule::DualPipe, 1), 6.0);
    }

    #[test]
    fn a_gate_of_a_tenth_needs_nineteen_micro_batches_on_three_stages() {
        let need = |stages| micro_batches_for(Schedule::OneFOneB, stages, 1, &EVEN, 0.1);
        assert_eq!((need(2), need(3)), (Some(10), Some(19)));
        let forward = Pace { forward_ns: 3.0, ..Pace::default() };
        assert_eq!(micro_batches_for(Schedule::OneFOneB, 3, 1, &forward, 0.1), Some(19));
        assert!((bubble_share(Schedule::OneFOneB, 3, 1, 4, &forward) - 1.0 / 3.0).abs() < 1e-12);
        // Twice the pieces, half the bubble, in whole rounds of three.
        assert_eq!(micro_batches_for(Schedule::Interleaved, 3, 2, &EVEN, 0.1), Some(12));
    }

    #[test]
    fn sends_exposed_in_each_micro_batch_cannot_be_diluted() {
        let pace = Pace { send_ns: 1.0, ..EVEN };
        assert_eq!(micro_batches_for(Schedule::OneFOneB, 4, 1, &pace, 0.1), None);
    }
}
