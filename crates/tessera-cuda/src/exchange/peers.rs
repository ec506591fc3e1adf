//! Collectives over memory of peers: every member sees the others' exchange memory and flags.

#![allow(unsafe_code, reason = "memory of other processes")]

use cudarc::driver::sys;
use tessera_mesh::Reduction;

use super::launch::{GOING_OFFSET, Head, Kernels, MOST, Piece, Reduce};
use super::moves::{Kind, Move, Rect};
use super::targets::{Along, Targets};
use crate::driver::{Done, Stream, failed};

/// Of the flags of a member. A whole page of the driver's: a handle of a smaller allocation shows its neighbours too.
pub(super) const FLAGS_BYTES: usize = 2 << 20;
/// Where a member's peers try whether they can write, behind what exchange.cu uses.
pub(super) const TRIAL_OFFSET: u64 = 4096;
/// Up to so many bytes everybody reads everything: one meeting less.
const ONE_SHOT_BYTES: usize = 64 << 10;

/// A handle by which another process of the host opens an allocation.
pub(super) type Handle = [u8; 64];

/// What members see of one another.
#[derive(Debug)]
pub(super) struct Peers {
    pub(super) me: usize,
    /// Every member's exchange memory.
    pub(super) bases: Vec<u64>,
    /// Bytes of every member's exchange memory.
    pub(super) bytes: Vec<u64>,
    /// Every member's flags.
    pub(super) flags: Vec<u64>,
    /// To be closed.
    #[allow(dead_code, reason = "held open for as long as the addresses are used")]
    pub(super) opened: Vec<Opened>,
}

/// Another process's allocation, as this one sees it.
#[derive(Debug)]
pub(super) struct Opened(u64);

/// The handle of an allocation of this process.
pub(super) fn handle(at: u64) -> Done<Handle> {
    let mut out = sys::CUipcMemHandle_st { reserved: [0; 64] };
    // SAFETY: the driver checks the address.
    unsafe { sys::cuIpcGetMemHandle(&mut out, at) }.result()?;
    Ok(out.reserved.map(|b| b as u8))
}

impl Opened {
    pub(super) fn new(handle: &Handle) -> Done<Opened> {
        let handle = sys::CUipcMemHandle_st { reserved: handle.map(|b| b as _) };
        let flags = sys::CUipcMem_flags_enum::CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS as u32;
        let mut at = 0;
        // SAFETY: the driver checks the handle; it is closed on drop.
        unsafe { sys::cuIpcOpenMemHandle_v2(&mut at, handle, flags) }.result()?;
        Ok(Opened(at))
    }

    pub(super) fn at(&self) -> u64 {
        self.0
    }
}

impl Drop for Opened {
    fn drop(&mut self) {
        // SAFETY: opened once in `new`.
        let _ = unsafe { sys::cuIpcCloseMemHandle(self.0) };
    }
}

impl Peers {
    pub(super) fn issue(
        &self,
        m: &Move,
        kernels: &Kernels,
        (host, patience_ns, blocks): (u64, u64, u32),
        stream: &Stream,
    ) -> Done<()> {
        let head = self.head(m, host, patience_ns);
        let element = m.dtype.bytes() as usize;
        match &m.kind {
            Kind::Copy { to, .. } => {
                let results = self.results(m, to)?;
                let pieces =
                    to.iter().zip(results).map(|(rect, result)| Piece::copy(rect, m.operand, result));
                kernels.copy(head, &pieces.collect::<Done<Vec<Piece>>>()?, blocks, stream)
            }
            Kind::AllReduce { elements, reduction } => {
                let bytes = elements * element;
                let one_shot = bytes <= ONE_SHOT_BYTES || self.bases.len() == 1;
                let rect = if one_shot {
                    Rect::run(0, 0, bytes)
                } else {
                    // The same cut on every member: by offsets, which all of them know.
                    let offsets =
                        m.peers_operand.iter().chain(&m.peers_result).fold(bytes as u64, |all, o| all | o);
                    let unit = if offsets.is_multiple_of(16) { 16 } else { element };
                    let (start, len) = share(bytes / unit, self.bases.len(), self.me);
                    Rect::run(start * unit, start * unit, len * unit)
                };
                self.reduce(m, head, kernels, *reduction, rect, (bytes, bytes, !one_shot), blocks, stream)
            }
            Kind::ReduceScatter { rows, columns, dim, parts, reduction } => {
                let Some(part) = parts.get(self.me) else {
                    return failed(format!("parts of {} members, this one is {}", parts.len(), self.me));
                };
                let rect = if *dim == 0 {
                    Rect::run(part.start * columns * element, 0, part.len() * columns * element)
                } else {
                    Rect {
                        from_offset: part.start * element,
                        from_pitch: columns * element,
                        to_offset: 0,
                        to_pitch: part.len() * element,
                        row_bytes: part.len() * element,
                        rows: if part.is_empty() { 0 } else { *rows },
                    }
                };
                let extents = (rows * columns * element, 0, false);
                self.reduce(m, head, kernels, *reduction, rect, extents, blocks, stream)
            }
        }
    }

    /// Arguments of every launch of a collective.
    pub(super) fn head(&self, m: &Move, host: u64, patience_ns: u64) -> Head {
        let mut flags = [0; MOST];
        flags[..self.flags.len()].copy_from_slice(&self.flags);
        Head { flags, host, patience_ns, op: m.op, fingerprint: m.fingerprint }
    }

    /// Where whatever makes this member's operand may write it once the collective was opened; none where pieces are
    /// no whole words.
    pub(super) fn targets(&self, m: &Move, along: Along) -> Done<Option<Targets>> {
        let Kind::Copy { to, .. } = &m.kind else { return Ok(None) };
        if to.len() > MOST {
            return Ok(None);
        }
        let results = self.results(m, to)?;
        let going = self.flags[self.me] + GOING_OFFSET;
        Ok(Targets::of(to, &results, along, m.dtype.bytes(), going))
    }

    /// Enqueues copies of the pieces of a collective that was opened, by the copy engines: they leave the multiprocessors to
    /// others.
    pub(super) fn carry(&self, m: &Move, stream: &Stream) -> Done<()> {
        let Kind::Copy { to, .. } = &m.kind else { return failed("a reduction by copy engines") };
        let results = self.results(m, to)?;
        // Each begins with another peer, so that no link has two at once.
        for d in 1..=to.len() {
            let j = (self.me + d) % to.len();
            let (r, result) = (&to[j], results[j]);
            let (to, from) = (result + r.to_offset as u64, m.operand + r.from_offset as u64);
            match r.contiguous() {
                (true, true) => stream.copy(to, from, r.bytes())?,
                _ => stream.copy_rows((to, r.to_pitch), (from, r.from_pitch), r.row_bytes, r.rows)?,
            }
        }
        Ok(())
    }

    /// Addresses of all members' results, of those that get a piece.
    fn results(&self, m: &Move, to: &[Rect]) -> Done<Vec<u64>> {
        let one = |(j, rect): (usize, &Rect)| match rect.bytes() {
            0 => Ok(0),
            _ if j == self.me => Ok(m.result),
            _ => self.place(j, &m.peers_result, rect.ends().1),
        };
        to.iter().enumerate().map(one).collect()
    }

    #[expect(clippy::too_many_arguments, reason = "what a launch needs")]
    fn reduce(
        &self,
        m: &Move,
        head: Head,
        kernels: &Kernels,
        reduction: Reduction,
        rect: Rect,
        (operand_bytes, result_bytes, all): (usize, usize, bool),
        blocks: u32,
        stream: &Stream,
    ) -> Done<()> {
        let members = 0..self.bases.len();
        let from = members
            .clone()
            .map(|j| self.place(j, &m.peers_operand, operand_bytes))
            .collect::<Done<Vec<u64>>>()?;
        if from[self.me] != m.operand {
            return failed(format!(
                "the operand at {:#x} is not where peers read it, at {:#x}",
                m.operand, from[self.me]
            ));
        }
        let to = if all {
            members.map(|j| self.place(j, &m.peers_result, result_bytes)).collect::<Done<Vec<u64>>>()?
        } else {
            vec![m.result; self.bases.len()]
        };
        if to[self.me] != m.result {
            return failed(format!(
                "the result at {:#x} is not where peers write it, at {:#x}",
                m.result, to[self.me]
            ));
        }
        let work = Reduce { dtype: m.dtype, reduction, rect, from: &from, to: &to, all };
        kernels.reduce(head, &work, blocks, stream)
    }

    /// Address of `bytes` from a member's offset on.
    fn place(&self, member: usize, offsets: &[u64], bytes: usize) -> Done<u64> {
        let Some(offset) = offsets.get(member) else {
            return failed(format!("offsets of {} members, not of member {member}", offsets.len()));
        };
        match offset.checked_add(bytes as u64) {
            Some(end) if end <= self.bytes[member] => Ok(self.bases[member] + offset),
            _ => failed(format!(
                "{bytes} bytes at {offset} of member {member}, whose exchange memory has {}",
                self.bytes[member]
            )),
        }
    }
}

/// First unit and number of units of one member.
fn share(units: usize, members: usize, me: usize) -> (usize, usize) {
    let (each, more) = (units / members, units % members);
    (me * each + me.min(more), each + usize::from(me < more))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_share_all_units_between_them() {
        for (units, members) in [(0, 3), (1, 4), (10, 4), (12, 4), (4097, 16)] {
            let mut next = 0;
            for me in 0..members {
                let (start, len) = share(units, members, me);
                assert_eq!(start, next);
                next += len;
            }
            assert_eq!(next, units);
        }
    }
}
