//! Flight Recorder: the collectives that each rank of a PyTorch run issued last, and the rank that
//! departed from its peers first.
//!
//! NCCL's process group writes one dump per rank when a collective times out. This module aligns the
//! dumps by process group and sequence number, and finds the first position at which a rank departed.

mod causes;
mod departure;
mod dump;
mod examine;
mod findings;
mod node;
mod pickle;
mod render;
mod sequence;
mod shift;
mod signature;
mod transfer;
mod wait;

pub use dump::{EntryState, FlightDump, FlightEntry, FlightGroup, StackFrame, read_dump};
pub use examine::examine_dumps;
pub use findings::{CallSide, Certainty, FaultKind, FlightFinding, FlightReport, RankWait, list_ranks};
