//! What a plan states about the hosts of its ranks: which ranks each host holds, and the path of
//! every group that follows from them.

use std::fmt;

use tessera_mesh::{GroupPath, HostMap, Rank};

use crate::Communicator;

/// The hosts of a plan with the path of each of its groups.
///
/// The paths follow from the hosts. A plan states them nevertheless, so that a person reads them in
/// the plan, a rank compares them with what it uses, and the verifier finds a file in which the two
/// contradict each other.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HostStatement {
    /// The ranks of each host.
    pub hosts: HostMap,
    /// Every communicator of two or more ranks, with its path, in ascending order.
    pub groups: Vec<GroupStatement>,
}

/// The path of one communicator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupStatement {
    /// The group of ranks, or the sender and receiver of transfers.
    pub communicator: Communicator,
    /// The path of the data.
    pub path: GroupPath,
}

impl HostStatement {
    /// Returns the stated path of a communicator; `None` if the plan states none.
    #[must_use]
    pub fn find_path(&self, communicator: &Communicator) -> Option<GroupPath> {
        self.groups.iter().find(|g| g.communicator == *communicator).map(|g| g.path)
    }
}

impl fmt::Display for GroupStatement {
    /// Writes `group over tp of ranks 0, 1: peer memory`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.communicator, self.path.name())
    }
}

impl fmt::Display for Communicator {
    /// Writes `group over tp/2 of ranks 1, 2`, or `transfers over pp of ranks 0, 2`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let ranks: Vec<String> = self.members.iter().map(Rank::to_string).collect();
        let what = if self.is_transfer { "transfers" } else { "group" };
        write!(f, "{what} over {} of ranks {}", self.group, ranks.join(", "))
    }
}
