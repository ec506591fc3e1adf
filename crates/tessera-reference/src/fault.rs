//! Why an evaluation ended without outputs.

use std::fmt;

use tessera_mesh::Rank;

/// What went wrong, and on which rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fault {
    /// The number of programs, or a program's mesh, is not the machine's.
    Setup(String),
    /// One rank cannot evaluate an op.
    Op {
        /// Rank.
        rank: Rank,
        /// Index of the op in the rank's program.
        op: usize,
        /// What is wrong with it.
        message: String,
    },
    /// Members of a group issued different collectives at one position of its sequence.
    Mismatch {
        /// A rank and what it issued.
        here: (Rank, String),
        /// Another member, at the same position.
        there: (Rank, String),
    },
    /// No rank can go on: each unfinished one with what it waits for. Ranks that finished wait for nothing.
    Deadlock(Vec<(Rank, String)>),
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Fault::Setup(m) => f.write_str(m),
            Fault::Op { rank, op, message } => write!(f, "rank {rank}, op {op}: {message}"),
            Fault::Mismatch { here, there } => {
                write!(f, "mismatch: rank {} issues {}, rank {} issues {}", here.0, here.1, there.0, there.1)
            }
            Fault::Deadlock(stuck) => {
                f.write_str("deadlock:")?;
                for (i, (rank, on)) in stuck.iter().enumerate() {
                    write!(f, "{} rank {rank} waits for {on}", if i == 0 { "" } else { ";" })?;
                }
                Ok(())
            }
        }
    }
}

impl std::error::Error for Fault {}
