//! The communicators of all ranks, by number.

use std::collections::BTreeMap;

use tessera_device::Communicator;

/// Position of a communicator in its [`CommunicatorTable`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct CommunicatorIndex(pub(crate) usize);

/// Every communicator that a program has referred to.
#[derive(Debug, Default)]
pub(crate) struct CommunicatorTable {
    communicators: Vec<Communicator>,
    index: BTreeMap<Communicator, CommunicatorIndex>,
}

impl CommunicatorTable {
    pub(crate) fn find_or_insert(&mut self, communicator: Communicator) -> CommunicatorIndex {
        let next = CommunicatorIndex(self.communicators.len());
        *self.index.entry(communicator).or_insert_with_key(|new| {
            self.communicators.push(new.clone());
            next
        })
    }

    pub(crate) fn get(&self, id: CommunicatorIndex) -> &Communicator {
        &self.communicators[id.0]
    }
}
