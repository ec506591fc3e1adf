//! The search over mappings of a video generator. Unlike models that are counted as rows, its estimate is made from the
//! programs that would be sealed: one call of every candidate is played by discrete events. Blocks are alike and so are
//! stages, so few of those programs have to be made.

mod alike;
mod call;
mod memory;
mod period;
mod players;
mod score;
mod search;
mod shelf;

pub use call::{CallEstimate, PhaseSpan, estimate_call};
pub use memory::{RankBytes, bytes_of_roles};
pub use period::{Decode, Period, Studio, period};
pub use players::{Player, players};
pub use search::{
    Outcome, Pins, Question, Ranked, Refused, T1230, T1231, T1232, estimate, search, search_telling,
};
