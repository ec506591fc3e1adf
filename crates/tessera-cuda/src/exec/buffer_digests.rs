//! Digests of buffers, made in device memory: one launch reads all of them, and the host receives 8 bytes
//! for each.
//!
//! Copying the buffers to the host would take their size over PCIe, which is longer than many calls. A pass
//! over device memory takes their size over its bandwidth.

#![allow(unsafe_code, reason = "a launch on raw addresses")]

use super::{CudaBackend, DeviceBuffer};
use crate::device_memory::{DeviceMemory, copy_to_device, copy_to_host};
use crate::driver::{CudaEvent, CudaResult, CudaStream, cuda_failure};
use crate::kernel_table::{BufferPiece, DIGEST_PIECES, DigestPieces};
use crate::kernels::{KernelLaunch, KernelSet};

/// Bytes of a buffer that one block reads: 64 reads of 16 bytes by each thread.
const PIECE_BYTES: u64 = 256 << 10;

/// Bytes that a thread reads at once.
const UNIT_BYTES: u64 = 16;

const THREADS: u32 = 256;

/// Device memory and a stream for the digests of a fixed list of buffers.
#[derive(Debug)]
pub(super) struct BufferDigests {
    pieces: DeviceMemory,
    piece_count: usize,
    is_wanted: DeviceMemory,
    sums: DeviceMemory,
    buffer_count: usize,
    stream: CudaStream,
    done: CudaEvent,
}

impl CudaBackend {
    /// Returns a digest for each buffer of the backend; that of a buffer that is not wanted is 0.
    pub(super) fn digest_all_buffers(&mut self, wanted: &[usize]) -> CudaResult<Vec<u64>> {
        if self.has_unfinished_run {
            return cuda_failure("a run that has not ended may still write the buffers");
        }
        self.context.make_current()?;
        let digests = match self.buffer_digests.take() {
            Some(digests) => digests,
            None => {
                let place = |b: &DeviceBuffer| (b.memory.device_address(), b.ty.byte_size().0);
                BufferDigests::new(&self.buffers.iter().map(place).collect::<Vec<_>>())?
            }
        };
        let mut is_wanted = vec![false; self.buffers.len()];
        wanted.iter().for_each(|i| is_wanted[*i] = true);
        // SAFETY: `load` drops the digests when it adds a buffer, buffers live as long as the backend, and no
        // run is unfinished.
        let sums = unsafe { digests.run(&is_wanted, &mut self.kernels) };
        self.buffer_digests = Some(digests);
        sums
    }
}

impl BufferDigests {
    /// Allocates what the digests of these buffers need, given as address and bytes.
    pub(super) fn new(buffers: &[(u64, u64)]) -> CudaResult<BufferDigests> {
        let pieces = split_into_pieces(buffers);
        let memory = DeviceMemory::new(size_of_val(&pieces[..]))?;
        copy_to_device(memory.slice(0, pieces.len())?, &pieces)?;
        Ok(BufferDigests {
            pieces: memory,
            piece_count: pieces.len(),
            is_wanted: DeviceMemory::new(size_of::<u32>() * buffers.len())?,
            sums: DeviceMemory::new(size_of::<u64>() * buffers.len())?,
            buffer_count: buffers.len(),
            stream: CudaStream::new(false)?,
            done: CudaEvent::new()?,
        })
    }

    /// Digests the buffers that are wanted, and returns a digest for each; that of any other is 0.
    ///
    /// # Safety
    /// The buffers given to [`BufferDigests::new`] must be allocated, and no work on the device may write
    /// them until this call returns.
    pub(super) unsafe fn run(&self, is_wanted: &[bool], kernels: &mut KernelSet) -> CudaResult<Vec<u64>> {
        let words: Vec<u32> = is_wanted.iter().copied().map(u32::from).collect();
        copy_to_device(self.is_wanted.slice(0, self.buffer_count)?, &words)?;
        self.sums.zero_fill()?;
        let args = DigestPieces {
            pieces: self.pieces.device_address().into(),
            is_wanted: self.is_wanted.device_address().into(),
            sums: self.sums.device_address().into(),
        };
        let launch = KernelLaunch::blocks(DIGEST_PIECES, (self.piece_count as u64, THREADS, 0), args);
        // SAFETY: every piece lies in a buffer, each of which has a word in `is_wanted` and a sum; the caller
        // guarantees the rest, and this call waits for the launch.
        unsafe { kernels.launch(&launch, &self.stream) }?;
        self.stream.spin_until_done(&self.done)?;
        let mut sums = vec![0_u64; self.buffer_count];
        copy_to_host(&mut sums, self.sums.slice(0, self.buffer_count)?)?;
        Ok(sums)
    }
}

fn split_into_pieces(buffers: &[(u64, u64)]) -> Vec<BufferPiece> {
    let pieces_of = |(buffer, (address, bytes)): (usize, &(u64, u64))| {
        let (address, bytes) = (*address, *bytes);
        (0..bytes.div_ceil(PIECE_BYTES)).map(move |i| BufferPiece {
            address: address + i * PIECE_BYTES,
            first: i * (PIECE_BYTES / UNIT_BYTES),
            bytes: PIECE_BYTES.min(bytes - i * PIECE_BYTES) as u32,
            buffer: buffer as u32,
        })
    };
    buffers.iter().enumerate().flat_map(pieces_of).collect()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::test_gpu::open_test_gpu;

    #[test]
    fn pieces_cover_every_byte_once() {
        let pieces = split_into_pieces(&[(4096, 2 * PIECE_BYTES + 5), (0, 0), (1 << 30, 7)]);
        let found: Vec<_> = pieces.iter().map(|p| (p.buffer, p.address, p.first, p.bytes)).collect();
        let (piece, units) = (PIECE_BYTES, PIECE_BYTES / UNIT_BYTES);
        assert_eq!(
            found,
            [
                (0, 4096, 0, piece as u32),
                (0, 4096 + piece, units, piece as u32),
                (0, 4096 + 2 * piece, 2 * units, 5),
                (2, 1 << 30, 0, 7),
            ]
        );
    }

    /// The digest that the kernel must compute.
    fn digest_on_host(bytes: &[u8]) -> u64 {
        let mix = |word: u64, position: usize| {
            let x = word.wrapping_add((position as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
            let x = (x ^ x >> 32).wrapping_mul(0xd6e8_feb8_6659_fd93);
            x ^ x >> 32
        };
        let (words, tail) = bytes.split_at(bytes.len() / 16 * 16);
        let words = words.chunks_exact(8).map(|w| u64::from_le_bytes(w.try_into().unwrap()));
        let all = words.chain(tail.iter().map(|b| u64::from(*b)));
        all.enumerate().fold(0, |sum, (i, word)| sum.wrapping_add(mix(word, i)))
    }

    #[test]
    fn digests_of_buffers_equal_those_of_the_host_and_change_with_every_bit() {
        let Some(gpu) = open_test_gpu() else { return };
        let mut kernels = KernelSet::new(gpu.compiler, &gpu.capabilities).unwrap();
        let sizes = [3 * PIECE_BYTES as usize + 37, 1, 16, 4096];
        let mut contents: Vec<Vec<u8>> =
            sizes.iter().map(|n| (0..*n).map(|i| (i * i / 7 + n) as u8).collect()).collect();
        let memories: Vec<DeviceMemory> = sizes.iter().map(|n| DeviceMemory::new(*n).unwrap()).collect();
        let places: Vec<(u64, u64)> =
            memories.iter().zip(sizes).map(|(m, n)| (m.device_address(), n as u64)).collect();
        let digests = BufferDigests::new(&places).unwrap();
        let upload = |contents: &[Vec<u8>]| {
            for (m, bytes) in memories.iter().zip(contents) {
                copy_to_device(m.slice(0, bytes.len()).unwrap(), bytes).unwrap();
            }
        };
        upload(&contents);
        // SAFETY: the memories are alive, and nothing else runs on the device.
        let mut run = |is_wanted: [bool; 4]| unsafe { digests.run(&is_wanted, &mut kernels) }.unwrap();
        let whole = run([true; 4]);
        assert_eq!(whole, contents.iter().map(|c| digest_on_host(c)).collect::<Vec<_>>());
        assert_eq!(run([false, true, false, true]), [0, whole[1], 0, whole[3]]);
        for (buffer, byte, bit) in
            [(0, 0, 0), (0, sizes[0] - 1, 7), (0, PIECE_BYTES as usize, 3), (1, 0, 4), (2, 15, 7), (3, 9, 1)]
        {
            contents[buffer][byte] ^= 1 << bit;
            upload(&contents);
            let changed = run([true; 4]);
            for (i, (now, then)) in changed.iter().zip(&whole).enumerate() {
                assert_eq!(now != then, i == buffer, "bit {bit} of byte {byte} of buffer {buffer}");
            }
            contents[buffer][byte] ^= 1 << bit;
        }
        upload(&contents);
        assert_eq!(run([true; 4]), whole);
    }
}
