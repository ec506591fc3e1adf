//! Which schedules exist for which numbers.

use std::fmt;

use crate::knobs::Schedule;

/// Why a schedule does not exist for some numbers. Printed, it says the arithmetic and what would do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[allow(missing_docs, reason = "fields are the numbers that the sentence names")]
pub enum Why {
    /// One stage has no order to choose.
    OneStage { schedule: Schedule },
    /// No micro-batch.
    Empty,
    /// Fewer layers than pieces of all stages.
    Layers { layers: u32, stages: u32, interleave: u32 },
    /// Several pieces where the schedule has one, or one where it needs several.
    Pieces { schedule: Schedule, interleave: u32 },
    /// Micro-batches that do not make whole rounds over the stages.
    Rounds { micro_batches: u32, stages: u32 },
    /// An odd number of stages for two directions.
    OddStages { stages: u32 },
    /// Micro-batches that do not divide over two directions, or too few to fill both.
    TwoWays { micro_batches: u32, stages: u32 },
}

/// Whether a schedule exists for these numbers.
///
/// # Errors
/// The first reason why not.
pub fn legal(
    schedule: Schedule,
    stages: u32,
    interleave: u32,
    micro_batches: u32,
    layers: u32,
) -> Result<(), Why> {
    if micro_batches == 0 || stages == 0 {
        return Err(Why::Empty);
    }
    if stages == 1 && schedule != Schedule::OneFOneB {
        return Err(Why::OneStage { schedule });
    }
    if (interleave > 1) != (schedule == Schedule::Interleaved) || interleave == 0 {
        return Err(Why::Pieces { schedule, interleave });
    }
    if u64::from(layers) < u64::from(stages) * u64::from(interleave) {
        return Err(Why::Layers { layers, stages, interleave });
    }
    match schedule {
        Schedule::Interleaved if !micro_batches.is_multiple_of(stages) => {
            Err(Why::Rounds { micro_batches, stages })
        }
        Schedule::DualPipe if !stages.is_multiple_of(2) => Err(Why::OddStages { stages }),
        Schedule::DualPipe if !micro_batches.is_multiple_of(2) || micro_batches < 2 * stages => {
            Err(Why::TwoWays { micro_batches, stages })
        }
        _ => Ok(()),
    }
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Why::OneStage { schedule } => {
                write!(
                    f,
                    "{} orders the work of several stages and there is one: use 1f1b, or pp of 2 or more",
                    schedule.name()
                )
            }
            Why::Empty => write!(f, "there is no stage or no micro-batch"),
            Why::Layers { layers, stages, interleave } => write!(
                f,
                "{layers} layers cannot fill {stages} stages of {interleave} pieces: {} stages or fewer can",
                layers / interleave.max(1)
            ),
            Why::Pieces { schedule: Schedule::Interleaved, interleave } => {
                write!(
                    f,
                    "interleaved with {interleave} piece per stage is 1f1b: use 2 pieces or more, or 1f1b"
                )
            }
            Why::Pieces { schedule, interleave } => {
                write!(
                    f,
                    "{} has one piece of layers per stage, not {interleave}: only interleaved has several",
                    schedule.name()
                )
            }
            Why::Rounds { micro_batches, stages } => {
                let less = micro_batches - micro_batches % stages;
                write!(
                    f,
                    "interleaved goes round {stages} stages and {micro_batches} micro-batches are no whole rounds: "
                )?;
                if less > 0 {
                    write!(f, "{less} or {} are", less + stages)
                } else {
                    write!(f, "{stages} are")
                }
            }
            Why::OddStages { stages } => write!(
                f,
                "dualpipe enters the pipeline from both ends and {stages} stages have a middle: {} or {} have none",
                stages - 1,
                stages + 1
            ),
            Why::TwoWays { micro_batches, stages } => write!(
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
    fn refusals_name_what_would_do() {
        let says = |s, p, v, m, l| legal(s, p, v, m, l).expect_err("refused").to_string();
        assert!(says(Schedule::Interleaved, 4, 2, 6, 61).ends_with("4 or 8 are"));
        assert!(says(Schedule::DualPipe, 9, 1, 36, 61).ends_with("8 or 10 have none"));
        assert!(says(Schedule::DualPipe, 8, 1, 17, 61).ends_with("18 would do"));
        assert!(says(Schedule::DualPipe, 8, 1, 9, 61).ends_with("16 would do"));
        assert!(says(Schedule::Interleaved, 16, 4, 32, 61).ends_with("15 stages or fewer can"));
        assert!(says(Schedule::ZbH1, 1, 1, 8, 61).contains("use 1f1b"));
        assert!(says(Schedule::OneFOneB, 4, 2, 8, 61).contains("only interleaved"));
        assert_eq!(legal(Schedule::OneFOneB, 9, 1, 4, 61), Ok(()));
        assert_eq!(legal(Schedule::DualPipe, 8, 1, 16, 61), Ok(()));
    }
}
