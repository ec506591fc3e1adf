//! Shares the memory of the members of a group, or finds out why they cannot map each other's.

#![allow(unsafe_code, reason = "collectives on raw addresses")]

use crate::device_memory::{DeviceMemory, DeviceSlice, copy_to_device, copy_to_host};
use crate::driver::{Context, CudaError, CudaResult, cuda_failure};

use super::kernel_launch::MAX_MEMBERS;
use super::p2p_collectives::{FLAGS_BYTES, IpcHandle, PeerMapping, PeerMemory, WRITE_TEST_OFFSET};
use super::{CollectiveGroup, GroupTransport, p2p_collectives, words_from_bytes};

/// Bytes with which members find out whether they can map each other's memory: the granularity of the driver.
const PROBE_BYTES: usize = 2 << 20;

impl CollectiveGroup {
    /// Finds out whether the members can map each other's memory, with an allocation of its own. The exchange memory
    /// is shared at the first run; what the group uses must be known, recorded and checked before.
    pub(super) fn probe_peer_memory(&mut self) -> CudaResult<()> {
        if self.member_count == 1 {
            return Ok(());
        }
        let memory = DeviceMemory::new(PROBE_BYTES)?;
        if let Err(e) = self.share_memory(&memory) {
            // A peer may have mapped both, and may still write the flags.
            std::mem::forget((memory, self.flags.take()));
            return Err(e);
        }
        self.probed_peers = self.peers.take().is_some();
        // Nobody frees memory that another member has still mapped.
        self.all_agree(true)?;
        self.flags = None;
        Ok(())
    }

    /// Maps the exchange memory of all members into each other's address space, or agrees with them
    /// on NCCL. The memory must outlive the group.
    pub(crate) fn share_memory(&mut self, memory: &DeviceMemory) -> CudaResult<()> {
        let flags = self.flags.insert(DeviceMemory::new(FLAGS_BYTES)?);
        // SAFETY: the range is the whole allocation, which the group keeps and nobody uses yet.
        unsafe { self.control_stream.zero_async(flags.device_address(), flags.byte_len()) }?;
        let at = flags.device_address();
        self.wait_for_control_stream("its flags to be cleared")?;
        if self.member_count == 1 {
            let (bases, bytes, flags) =
                (vec![memory.device_address()], vec![memory.byte_len() as u64], vec![at]);
            self.peers = Some(PeerMemory { member: 0, bases, bytes, flags, mappings: Vec::new() });
            return Ok(());
        }
        let mut why = None;
        let own_descriptor = self.describe_memory(memory, at).unwrap_or_else(|e| {
            why = Some(e.0);
            MemoryDescriptor::default()
        });
        let descriptors: Vec<MemoryDescriptor> = self
            .gather_bytes(&own_descriptor.to_bytes())?
            .iter()
            .map(|c| MemoryDescriptor::from_bytes(c))
            .collect();
        let is_on_host = |c: &MemoryDescriptor| c.host_id != 0 && c.host_id == own_descriptor.host_id;
        let can_share = self.member_count <= MAX_MEMBERS
            && descriptors.iter().all(|c| c.can_share && (self.threads.is_some() || is_on_host(c)));
        let mappings = match can_share {
            true => self.map_peer_memory(&descriptors).map_err(|e| why = Some(e.0)).ok(),
            false => None,
        };
        // The members exchange how far each got, so that all choose the same transport.
        let mut peers = None;
        if self.all_agree(mappings.is_some())?
            && let Some(mappings) = mappings
        {
            let mapped = self.build_peer_memory(mappings, &descriptors, memory.device_address(), at);
            let writes_arrive = self.test_peer_writes(&mapped, &mut why);
            if self.all_agree(writes_arrive)? {
                peers = Some(mapped);
            }
        }
        if peers.is_none() {
            let why = why.unwrap_or_else(|| "a member cannot share memory or is on another host".into());
            if self.config.transport == GroupTransport::P2p || self.threads.is_some() {
                return cuda_failure(format!("members cannot access each other's memory: {why}"));
            }
            if self.probed_peers {
                // The record states peer memory for this group.
                return cuda_failure(format!(
                    "members mapped a small allocation of each other, and not the exchange memory: {why}"
                ));
            }
            self.p2p_failure = Some(why);
        }
        self.staging = match self.config.staging_bytes[usize::from(peers.is_none())] {
            0 => None,
            bytes => Some(DeviceMemory::new(bytes)?),
        };
        self.peers = peers;
        Ok(())
    }

    /// Maps memory and flags of each other member. Threads of one process have the same addresses, and only need access to
    /// the memory of the other device.
    fn map_peer_memory(&self, cards: &[MemoryDescriptor]) -> CudaResult<Vec<[PeerMapping; 2]>> {
        let others = cards.iter().enumerate().filter(|(j, _)| *j != self.member);
        others
            .map(|(j, card)| {
                let failed = |e: CudaError| CudaError(format!("cannot open memory of member {j}: {e}"));
                if self.threads.is_some() {
                    Context::retain(card.device)?.make_accessible_to_current().map_err(failed)?;
                    return Ok(card.addresses.map(PeerMapping::SameProcess));
                }
                let one = |h: &IpcHandle| PeerMapping::open_handle(h).map_err(failed);
                Ok([one(&card.handles[0])?, one(&card.handles[1])?])
            })
            .collect()
    }

    fn build_peer_memory(
        &self,
        opened: Vec<[PeerMapping; 2]>,
        cards: &[MemoryDescriptor],
        memory: u64,
        flags_at: u64,
    ) -> PeerMemory {
        let mut bases: Vec<u64> = opened.iter().map(|o| o[0].base_address()).collect();
        let mut flags: Vec<u64> = opened.iter().map(|o| o[1].base_address()).collect();
        bases.insert(self.member, memory);
        flags.insert(self.member, flags_at);
        PeerMemory {
            member: self.member,
            bases,
            bytes: cards.iter().map(|c| c.bytes).collect(),
            flags,
            mappings: opened.into_iter().flatten().collect(),
        }
    }

    /// Writes a word into every member's flags and checks that the peers' words arrived in its own
    /// flags.
    fn test_peer_writes(&mut self, peers: &PeerMemory, why: &mut Option<String>) -> bool {
        let token = |from: usize, to: usize| 0x7e55_e7a0_0000_0000 | (from as u64) << 16 | to as u64;
        let written = (0..self.member_count).try_for_each(|j| {
            let at = peers.flags[j] + WRITE_TEST_OFFSET + 8 * self.member as u64;
            // SAFETY: the flags of every member are mapped for `FLAGS_BYTES`, which have room for a
            // word of each member behind the offset.
            let word = unsafe { DeviceSlice::from_raw(at, 1) };
            copy_to_device(word, &[token(self.member, j)])
        });
        let met = self.all_agree(written.is_ok());
        let mut found = vec![0_u64; self.member_count];
        let own_flags = peers.flags[self.member] + WRITE_TEST_OFFSET;
        // SAFETY: as above, for this member's own flags.
        let words = unsafe { DeviceSlice::from_raw(own_flags, self.member_count) };
        let read = copy_to_host(&mut found, words);
        let wrong = (0..self.member_count).find(|j| found[*j] != token(*j, self.member));
        let failure = written.err().or(met.err()).or(read.err()).map(|e| e.0);
        *why = failure.or(wrong.map(|j| format!("a test write of member {j} did not arrive"))).or(why.take());
        why.is_none()
    }
}

/// Description of a member's memory that it sends to the others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
struct MemoryDescriptor {
    host_id: u64,
    can_share: bool,
    bytes: u64,
    /// Handles of memory and flags, by which other processes map them.
    handles: [IpcHandle; 2],
    /// The addresses of memory and flags, and their device, for threads of this process.
    addresses: [u64; 2],
    device: u32,
}

impl CollectiveGroup {
    fn describe_memory(&self, memory: &DeviceMemory, flags: u64) -> CudaResult<MemoryDescriptor> {
        if self.config.transport == GroupTransport::Nccl {
            return cuda_failure("the configuration selects NCCL");
        }
        let mut descriptor = MemoryDescriptor {
            host_id: self.config.host_id,
            can_share: true,
            bytes: memory.byte_len() as u64,
            ..MemoryDescriptor::default()
        };
        let addresses = [memory.device_address(), flags];
        match self.threads {
            Some(_) => (descriptor.addresses, descriptor.device) = (addresses, memory.device()),
            None => {
                let [memory, flags] = addresses.map(p2p_collectives::export_ipc_handle);
                descriptor.handles = [memory?, flags?];
            }
        }
        Ok(descriptor)
    }
}

impl MemoryDescriptor {
    fn to_bytes(&self) -> Vec<u8> {
        let [memory, flags] = self.addresses;
        let words =
            [self.host_id, u64::from(self.can_share), self.bytes, memory, flags, u64::from(self.device)];
        let words = words.iter().flat_map(|w| w.to_le_bytes());
        words.chain(self.handles.iter().flat_map(|handle| handle.0)).collect()
    }

    fn from_bytes(bytes: &[u8]) -> MemoryDescriptor {
        let (words, handles) = bytes.split_at(48);
        let words = words_from_bytes(words);
        let handle = |at: usize| IpcHandle(std::array::from_fn(|i| handles[at + i]));
        MemoryDescriptor {
            host_id: words[0],
            can_share: words[1] == 1,
            bytes: words[2],
            addresses: [words[3], words[4]],
            device: words[5] as u32,
            handles: [handle(0), handle(64)],
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_descriptors_round_trip() {
        let card = MemoryDescriptor {
            host_id: 7,
            can_share: true,
            bytes: 1 << 33,
            addresses: [1 << 40, 3],
            device: 5,
            handles: [
                IpcHandle(std::array::from_fn(|i| i as u8)),
                IpcHandle(std::array::from_fn(|i| 255 - i as u8)),
            ],
        };
        assert_eq!(MemoryDescriptor::from_bytes(&card.to_bytes()), card);
        assert_eq!(
            MemoryDescriptor::from_bytes(&MemoryDescriptor::default().to_bytes()),
            MemoryDescriptor::default()
        );
    }
}
