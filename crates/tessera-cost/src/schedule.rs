//! Pipeline schedules: the order in which a stage processes its micro-batches, the resulting
//! bubble, and the activations that a stage keeps.
//!
//! **The bubble** is the longest time from a stage's first start to its own last end, less its
//! work: the time by which a step is longer than its work when steps follow one another without a
//! barrier. In 1F1B, interleaved and DualPipe a first stage spans the step, so the bubble is the
//! idle time of a step as usually drawn. In ZB-H1 and ZB-H2 the stages end one after another; the
//! saving is real only if the optimizer step does not make all stages wait (a norm over all
//! gradients is checked afterwards, and the step undone if the norm was too large). Without a
//! backward pass the bubble is the time from the first start to the last end of all stages, less a
//! stage's work, because an answer is complete only then.
//!
//! **Closed forms** ([`closed_form`]) equal the simulated schedule for stages with equal times,
//! wherever they are defined. Outside their range (sends longer than the work that could hide them,
//! fewer micro-batches than a schedule is designed for) there is no closed form and [`bubble_ns`]
//! simulates. With p stages, m micro-batches, v model chunks, F, B, W and s for forward, input
//! gradients, weight gradients and a send, h = p/2 − 1:
//!
//! | schedule | bubble | range |
//! | --- | --- | --- |
//! | 1F1B | (p−1)(F+B+W+2s) + 2s(m−1−⌈(m−1)/p⌉) | everywhere |
//! | interleaved | (p−1)(F+B+W)/v + 2s(pv−1) | s ≤ F/v, s ≤ (B+W)/v |
//! | ZB-H1 | max((p−1)(B+2s), (p−1)(F+B−W+2s) + 2s·min(p−1, m−2)) | m ≥ p, 2s ≤ W |
//! | ZB-H2 | (p−1)·max(F+B−2W+2s, B−F+2s, 0) | m ≥ 2p−1, s ≤ F, B, W |
//! | DualPipe | max(2hF, (h−1)F+hB+hs) + max(0, h(B−W)+(2h+1)s) + s(p/2+m−2−⌈(m−2)/p⌉) | m ≥ 2p, 2s ≤ F, B, W |
//! | forward only | (p−1)(F/v+s) + m(v−1)s | everywhere but DualPipe |
//!
//! DualPipe's published (p/2−1)(F&B + B′ − 3W), with B′ = B+W and a pair F&B that takes the sum of
//! its two parts, is h(F+2B−W): the same as here where F = B, s = 0 and W ≤ B. A pair counts as one
//! block: both results are available at its end.
//!
//! **Sends** are deadlock-free if a turn's sends are posted together with the next turn's receives
//! (in interleaved schedules once per forward and backward, and before weight gradients). Posted
//! one after the other, two stages of 1F1B deadlock, each waiting for the other to receive.
//! DualPipe's stages must not wait for their sends at all, because the two middle stages would
//! deadlock. The times here assume that no sender waits.
//!
//! A GPipe pipeline (all forwards, then all backwards) has the bubble of 1F1B and keeps all m
//! micro-batches.

mod order;
mod simulate;
mod validity;

pub use order::{StageOp, StageTurn, StageWork, stage_orders};
pub use simulate::{StageSlot, simulate_schedule};
pub use validity::{InvalidSchedule, check_schedule};

use crate::params::PipelineSchedule;

/// Times of one micro-batch on one stage, over all its model chunks.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct MicroBatchTimes {
    /// Time of the forward pass, without the send to the next stage.
    pub forward_ns: f64,
    /// Time of the input gradients, including recomputation.
    pub backward_input_ns: f64,
    /// Time of the weight gradients, which zero-bubble schedules move into the bubble.
    pub backward_weight_ns: f64,
    /// Time from the end of one stage's work until the next stage has its input. Sends do not block
    /// the sender.
    pub send_ns: f64,
}

impl MicroBatchTimes {
    /// Returns the time for which a micro-batch occupies the stage: forward and backward, no sends.
    #[must_use]
    pub fn work_ns(&self) -> f64 {
        self.forward_ns + self.backward_input_ns + self.backward_weight_ns
    }

    /// Returns whether there is no backward pass.
    #[must_use]
    pub fn is_forward_only(&self) -> bool {
        self.backward_input_ns == 0.0 && self.backward_weight_ns == 0.0
    }
}

/// Returns the bubble of a step (see the module docs), by its closed form or by simulation. The
/// mapping must pass [`check_schedule`]; the result is unspecified otherwise.
#[must_use]
pub fn bubble_ns(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    pace: &MicroBatchTimes,
) -> f64 {
    closed_form(schedule, stages, interleave, micro_batches, pace).unwrap_or_else(|| {
        simulate::bubble_ns(schedule, interleave, micro_batches, &vec![*pace; stages as usize])
    })
}

/// Returns the bubble by its closed form where that is exact. Takes some tens of nanoseconds.
#[must_use]
pub fn closed_form(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    pace: &MicroBatchTimes,
) -> Option<f64> {
    if stages <= 1 || micro_batches == 0 {
        return Some(0.0);
    }
    let MicroBatchTimes { forward_ns: f, backward_input_ns: b, backward_weight_ns: w, send_ns: s } = *pace;
    let (p, m, v) = (f64::from(stages), f64::from(micro_batches), f64::from(interleave.max(1)));
    let others = p - 1.0;
    if pace.is_forward_only() {
        return match schedule {
            PipelineSchedule::DualPipe => None,
            PipelineSchedule::Interleaved => Some(others * (f / v + s) + m * (v - 1.0) * s),
            PipelineSchedule::OneFOneB | PipelineSchedule::ZbH1 | PipelineSchedule::ZbH2 => {
                Some(others * (f + s))
            }
        };
    }
    match schedule {
        PipelineSchedule::OneFOneB => {
            Some(others * (f + b + w + 2.0 * s) + 2.0 * s * (m - 1.0 - ((m - 1.0) / p).ceil()))
        }
        PipelineSchedule::Interleaved => {
            let hidden = s * v <= f && s * v <= b + w;
            hidden.then(|| others * (f + b + w) / v + 2.0 * s * (p * v - 1.0))
        }
        PipelineSchedule::ZbH1 => (m >= p && 2.0 * s <= w).then(|| {
            let late = others * (f + b - w + 2.0 * s) + 2.0 * s * others.min(m - 2.0);
            late.max(others * (b + 2.0 * s))
        }),
        PipelineSchedule::ZbH2 => (m >= 2.0 * p - 1.0 && s <= f.min(b).min(w))
            .then(|| others * (f + b - 2.0 * w + 2.0 * s).max(b - f + 2.0 * s).max(0.0)),
        PipelineSchedule::DualPipe => (m >= 2.0 * p && 2.0 * s <= f.min(b).min(w)).then(|| {
            let h = p / 2.0 - 1.0;
            let fill = (2.0 * h * f).max((h - 1.0) * f + h * b + h * s);
            let drain = (h * (b - w) + (2.0 * h + 1.0) * s).max(0.0);
            fill + drain + s * (p / 2.0 + m - 2.0 - ((m - 2.0) / p).ceil())
        }),
    }
}

/// Returns the bubble as a share of the step, 0 to 1, where the step is work plus bubble:
/// (p−1)/(m+p−1) for 1F1B without sends. Some publications divide by the work alone, (p−1)/m; this
/// function does not.
#[must_use]
pub fn bubble_share(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    pace: &MicroBatchTimes,
) -> f64 {
    let bubble = bubble_ns(schedule, stages, interleave, micro_batches, pace);
    let step = f64::from(micro_batches) * pace.work_ns() + bubble;
    if step > 0.0 { bubble / step } else { 0.0 }
}

/// Returns the maximum activations that a stage keeps at once, in units of one micro-batch on one
/// whole stage. Weight gradients need the activations of the forward pass, so these are kept until
/// the weight gradients are computed.
#[must_use]
pub fn peak_in_flight(schedule: PipelineSchedule, stages: u32, interleave: u32, micro_batches: u32) -> f64 {
    let (p, m) = (f64::from(stages), f64::from(micro_batches));
    let most = match schedule {
        _ if stages <= 1 => 1.0,
        PipelineSchedule::OneFOneB | PipelineSchedule::ZbH1 => p,
        PipelineSchedule::Interleaved => p + (p - 1.0) / f64::from(interleave.max(1)),
        PipelineSchedule::ZbH2 => 2.0 * p - 1.0,
        PipelineSchedule::DualPipe => p + 1.0,
    };
    most.min(m)
}

/// Returns the same maximum for one stage, counted from 0: later stages of 1F1B and interleaved
/// schedules keep less. With deferred weight gradients every stage keeps up to the same maximum.
#[must_use]
pub fn peak_in_flight_on(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    stage: u32,
) -> f64 {
    let (p, m, s) = (f64::from(stages), f64::from(micro_batches), f64::from(stage));
    match schedule {
        PipelineSchedule::OneFOneB if stages > 1 => (p - s).min(m),
        // A single round runs all forwards, then all backwards.
        PipelineSchedule::Interleaved if stages > 1 && micro_batches > stages => {
            (p + (p - 1.0 - 2.0 * s) / f64::from(interleave.max(1))).min(m)
        }
        _ => peak_in_flight(schedule, stages, interleave, micro_batches),
    }
}

/// Returns how many copies of a stage's parameters a rank holds: two if both directions run at
/// once.
#[must_use]
pub fn parameter_copies(schedule: PipelineSchedule, stages: u32) -> u32 {
    if schedule == PipelineSchedule::DualPipe && stages > 1 { 2 } else { 1 }
}

/// Returns the minimum number of micro-batches for which the bubble is less than `share` of the
/// step, or `None` if no number up to a million suffices, for example when every micro-batch has an
/// exposed send.
#[must_use]
pub fn min_micro_batches(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    pace: &MicroBatchTimes,
    share: f64,
) -> Option<u32> {
    // The share for equal sizes may be a rounding error too small.
    find_micro_batches(schedule, stages, |n| {
        bubble_share(schedule, stages, interleave, n, pace) < share - 1e-12
    })
}

/// Returns the smallest number of micro-batches that the schedule admits and for which `enough`
/// holds, or `None` if it holds for none up to a million. `enough` must hold for every larger
/// number too.
#[must_use]
pub fn find_micro_batches(
    schedule: PipelineSchedule,
    stages: u32,
    enough: impl Fn(u32) -> bool,
) -> Option<u32> {
    const MOST: u32 = 1 << 20;
    let (unit, least) = match schedule {
        PipelineSchedule::Interleaved => (stages, 1),
        PipelineSchedule::DualPipe => (2, stages),
        PipelineSchedule::OneFOneB | PipelineSchedule::ZbH1 | PipelineSchedule::ZbH2 => (1, 1),
    };
    let mut many = least;
    while !enough(many * unit) {
        many *= 2;
        if many.saturating_mul(unit) > MOST {
            return None;
        }
    }
    let mut few = least - 1;
    while many - few > 1 {
        let mid = few.midpoint(many);
        if mid < least || !enough(mid * unit) { few = mid } else { many = mid }
    }
    Some(many * unit)
}

#[cfg(test)]
mod tests {
    use super::*;

    const EVEN: MicroBatchTimes =
        MicroBatchTimes { forward_ns: 1.0, backward_input_ns: 1.0, backward_weight_ns: 1.0, send_ns: 0.0 };

    #[test]
    fn published_bubbles_of_even_paces_come_out() {
        let bubble = |s, v| bubble_ns(s, 8, v, 32, &EVEN);
        assert_eq!(bubble(PipelineSchedule::OneFOneB, 1), 21.0);
        assert_eq!(bubble(PipelineSchedule::Interleaved, 3), 7.0);
        assert_eq!(bubble(PipelineSchedule::ZbH1, 1), 7.0);
        assert_eq!(bubble(PipelineSchedule::ZbH2, 1), 0.0);
        assert_eq!(bubble(PipelineSchedule::DualPipe, 1), 6.0);
    }

    #[test]
    fn a_gate_of_a_tenth_needs_nineteen_micro_batches_on_three_stages() {
        let need = |stages| min_micro_batches(PipelineSchedule::OneFOneB, stages, 1, &EVEN, 0.1);
        assert_eq!((need(2), need(3)), (Some(10), Some(19)));
        let forward = MicroBatchTimes { forward_ns: 3.0, ..MicroBatchTimes::default() };
        assert_eq!(min_micro_batches(PipelineSchedule::OneFOneB, 3, 1, &forward, 0.1), Some(19));
        assert!((bubble_share(PipelineSchedule::OneFOneB, 3, 1, 4, &forward) - 1.0 / 3.0).abs() < 1e-12);
        // With twice the chunks the bubble halves; micro-batches come in multiples of three.
        assert_eq!(min_micro_batches(PipelineSchedule::Interleaved, 3, 2, &EVEN, 0.1), Some(12));
    }

    // proves: V-12
    #[test]
    fn without_a_backward_pass_zero_bubble_orders_have_the_bubble_of_1f1b() {
        let forward = MicroBatchTimes { forward_ns: 3.0, send_ns: 0.5, ..MicroBatchTimes::default() };
        for schedule in [PipelineSchedule::OneFOneB, PipelineSchedule::ZbH1, PipelineSchedule::ZbH2] {
            assert_eq!(simulate::bubble_ns(schedule, 1, 12, &[forward; 4]), 3.0 * 3.5, "{schedule:?}");
        }
    }

    #[test]
    fn sends_exposed_in_each_micro_batch_cannot_be_diluted() {
        let pace = MicroBatchTimes { send_ns: 1.0, ..EVEN };
        assert_eq!(min_micro_batches(PipelineSchedule::OneFOneB, 4, 1, &pace, 0.1), None);
    }
}
