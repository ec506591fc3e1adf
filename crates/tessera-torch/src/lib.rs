//! Reads what PyTorch leaves behind when a run hangs, and says which rank departed first.
//!
//! The Flight Recorder of NCCL's process group writes one dump per rank: the last collectives that the
//! rank issued, with group, sequence number, shapes and the Python stack. This crate reads the dumps
//! without Python, aligns them, and finds the first position at which a rank departed from its peers.
//! It knows no file system, no plan and no run of Tessera.

pub mod codes;
mod departure;
pub mod dump;
pub mod findings;
mod pickle;
mod render;
mod sequence;
mod wait;

pub use codes::CODES;
pub use dump::{FlightDump, read_dump};
pub use findings::{Certainty, FaultKind, FlightFinding, FlightReport, examine_dumps};
