//! Validity of pipeline schedules for given sizes.

use std::fmt;

use crate::params::PipelineSchedule;

/// Reason why a schedule is invalid for given sizes. The display text states the arithmetic and
/// valid alternatives.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "the fields are the numbers in the message")]
pub enum InvalidSchedule {
    /// A schedule over several stages was requested for one stage.
    SingleStage { schedule: PipelineSchedule },
    /// There is no stage or no micro-batch.
    Empty,
    /// There are fewer layers than model chunks over all stages.
    TooFewLayers { layers: u32, stages: u32, interleave: u32 },
    /// The schedule does not support this number of model chunks per stage.
    UnsupportedChunks { schedule: PipelineSchedule, interleave: u32 },
    /// The number of micro-batches is not a multiple of the stages.
    PartialRound { micro_batches: u32, stages: u32 },
    /// DualPipe needs an even number of stages.
    OddStages { stages: u32 },
    /// DualPipe needs an even number of micro-batches that fills both directions.
    UnbalancedDirections { micro_batches: u32, stages: u32 },
}

/// Checks that a schedule is valid for these sizes.
///
/// # Errors
/// The first reason why the schedule is invalid.
pub fn check_schedule(
    schedule: PipelineSchedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    layers: u32,
) -> Result<(), InvalidSchedule> {
    if micro_batches == 0 || stages == 0 {
        return Err(InvalidSchedule::Empty);
    }
    if stages == 1 && schedule != PipelineSchedule::OneFOneB {
        return Err(InvalidSchedule::SingleStage { schedule });
    }
    if (interleave > 1) != (schedule == PipelineSchedule::Interleaved) || interleave == 0 {
        return Err(InvalidSchedule::UnsupportedChunks { schedule, interleave });
    }
    if u64::from(layers) < u64::from(stages) * u64::from(interleave) {
        return Err(InvalidSchedule::TooFewLayers { layers, stages, interleave });
    }
    match schedule {
        PipelineSchedule::Interleaved if !micro_batches.is_multiple_of(stages) => {
            Err(InvalidSchedule::PartialRound { micro_batches, stages })
        }
        PipelineSchedule::DualPipe if !stages.is_multiple_of(2) => Err(InvalidSchedule::OddStages { stages }),
        PipelineSchedule::DualPipe if !micro_batches.is_multiple_of(2) || micro_batches < 2 * stages => {
            Err(InvalidSchedule::UnbalancedDirections { micro_batches, stages })
        }
        _ => Ok(()),
    }
}

impl fmt::Display for InvalidSchedule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            InvalidSchedule::SingleStage { schedule } => {
                write!(
                    f,
                    "{} orders the work of several stages but there is only one: use 1f1b, or pp of 2 or more",
                    schedule.name()
                )
            }
            InvalidSchedule::Empty => write!(f, "there is no stage or no micro-batch"),
            InvalidSchedule::TooFewLayers { layers, stages, interleave } => write!(
                f,
                "{layers} layers cannot fill {stages} stages of {interleave} chunks: {} stages or fewer can",
                layers / interleave.max(1)
            ),
            InvalidSchedule::UnsupportedChunks { schedule: PipelineSchedule::Interleaved, interleave } => {
                write!(
                    f,
                    "interleaved with {interleave} chunk per stage is 1f1b: use 2 chunks or more, or 1f1b"
                )
            }
            InvalidSchedule::UnsupportedChunks { schedule, interleave } => {
                write!(
                    f,
                    "{} has one chunk of layers per stage, not {interleave}: only interleaved has several",
                    schedule.name()
                )
            }
            InvalidSchedule::PartialRound { micro_batches, stages } => {
                let lower = micro_batches - micro_batches % stages;
                write!(
                    f,
                    "interleaved cycles through {stages} stages and {micro_batches} micro-batches are not a multiple: "
                )?;
                if lower > 0 {
                    write!(f, "{lower} or {} are", lower + stages)
                } else {
                    write!(f, "{stages} are")
                }
            }
            InvalidSchedule::OddStages { stages } => write!(
                f,
                "dualpipe enters the pipeline from both ends and {stages} stages have a middle one: {} or {} have none",
                stages - 1,
                stages + 1
            ),
            InvalidSchedule::UnbalancedDirections { micro_batches, stages } => write!(
                f,
                "dualpipe needs an even number of micro-batches, at least {} for {stages} stages, and there are {micro_batches}: {} would do",
                2 * stages,
                (2 * stages).max(micro_batches + 1)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_name_valid_alternatives() {
        let message =
            |s, p, v, m, l| check_schedule(s, p, v, m, l).expect_err("an invalid schedule").to_string();
        assert!(message(PipelineSchedule::Interleaved, 4, 2, 6, 61).ends_with("4 or 8 are"));
        assert!(message(PipelineSchedule::DualPipe, 9, 1, 36, 61).ends_with("8 or 10 have none"));
        assert!(message(PipelineSchedule::DualPipe, 8, 1, 17, 61).ends_with("18 would do"));
        assert!(message(PipelineSchedule::DualPipe, 8, 1, 9, 61).ends_with("16 would do"));
        assert!(message(PipelineSchedule::Interleaved, 16, 4, 32, 61).ends_with("15 stages or fewer can"));
        assert!(message(PipelineSchedule::ZbH1, 1, 1, 8, 61).contains("use 1f1b"));
        assert!(message(PipelineSchedule::OneFOneB, 4, 2, 8, 61).contains("only interleaved"));
        assert_eq!(check_schedule(PipelineSchedule::OneFOneB, 9, 1, 4, 61), Ok(()));
        assert_eq!(check_schedule(PipelineSchedule::DualPipe, 8, 1, 16, 61), Ok(()));
    }
}
