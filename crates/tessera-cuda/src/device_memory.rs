//! Memory that a device reads and writes: device allocations, ranges of them, and pinned host
//! memory.
//!
//! The host accesses device memory through a [`DeviceSlice`] alone. A slice borrows its allocation
//! and never exceeds it, so these copies need no promise of the caller. Kernels and asynchronous
//! copies take plain addresses and are `unsafe`.

#![allow(unsafe_code, reason = "the driver's own functions")]

use std::ffi::c_void;
use std::marker::PhantomData;
use std::sync::atomic::{AtomicU64, Ordering};

use bytemuck::{AnyBitPattern, NoUninit};
use cudarc::driver::{result, sys};

use crate::allocation_lock::free_between_calls;
use crate::driver::{CudaError, CudaResult, cuda_failure};

/// Alignment of values in memory, in bytes: the maximum that any library or vectorized access
/// requires.
pub(crate) const ALIGNMENT: u64 = 256;

/// The most devices of which this process counts the memory that it holds.
const MAX_DEVICES: usize = 64;

/// Bytes of each device that this process holds through [`DeviceMemory`], and their maximum.
static HELD_BYTES: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];
static PEAK_BYTES: [AtomicU64; MAX_DEVICES] = [const { AtomicU64::new(0) }; MAX_DEVICES];

/// Returns the bytes of a device's memory that this process holds, and the most that it has held.
pub(crate) fn held_bytes(device: u32) -> (u64, u64) {
    let load =
        |bytes: &[AtomicU64]| bytes.get(device as usize).map_or(0, |bytes| bytes.load(Ordering::Relaxed));
    (load(&HELD_BYTES), load(&PEAK_BYTES))
}

/// An allocation of device memory, freed when this value is dropped.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    address: u64,
    bytes: usize,
    device: u32,
}

/// A range of `len` elements of `T` in a device allocation that is alive.
#[derive(Debug)]
pub(crate) struct DeviceSlice<'a, T> {
    address: u64,
    len: usize,
    memory: PhantomData<&'a DeviceMemory>,
    element: PhantomData<fn() -> T>,
}

// Derived impls would require `T: Copy`.
impl<T> Clone for DeviceSlice<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DeviceSlice<'_, T> {}

/// Pinned host memory that a device can read and write.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    host_ptr: *mut u8,
    bytes: usize,
}

// SAFETY: the allocation is owned like a vector; the device accesses it only in work that its owner
// launches.
unsafe impl Send for PinnedMemory {}

impl DeviceMemory {
    pub(crate) fn new(bytes: usize) -> CudaResult<DeviceMemory> {
        let (bytes, device) = (bytes.max(256), current_device()?);
        // SAFETY: `zero_fill` or a kernel writes the memory before it is read.
        let at = unsafe { result::malloc_sync(bytes) }.map_err(|e| {
            CudaError(format!("cannot allocate {bytes} bytes on the device: {}", CudaError::from(e)))
        })?;
        let memory = DeviceMemory { address: at, bytes, device };
        if let Some(total) = HELD_BYTES.get(device as usize) {
            let held = total.fetch_add(bytes as u64, Ordering::Relaxed) + bytes as u64;
            PEAK_BYTES[device as usize].fetch_max(held, Ordering::Relaxed);
        }
        Ok(memory)
    }

    /// Returns the index of the device among the visible ones.
    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    pub(crate) fn device_address(&self) -> u64 {
        self.address
    }

    pub(crate) fn byte_len(&self) -> usize {
        self.bytes
    }

    /// Returns `len` elements from a byte offset on.
    pub(crate) fn slice<T>(&self, byte_offset: u64, len: usize) -> CudaResult<DeviceSlice<'_, T>> {
        let end = (len as u64).checked_mul(size_of::<T>() as u64).and_then(|b| b.checked_add(byte_offset));
        match end {
            Some(end) if end <= self.bytes as u64 => Ok(DeviceSlice {
                address: self.address + byte_offset,
                len,
                memory: PhantomData,
                element: PhantomData,
            }),
            _ => cuda_failure(format!(
                "{len} elements of {} bytes at offset {byte_offset} exceed {} bytes of device memory",
                size_of::<T>(),
                self.bytes
            )),
        }
    }

    /// Fills the memory with zeros and waits for completion.
    pub(crate) fn zero_fill(&self) -> CudaResult<()> {
        // SAFETY: the range lies in this allocation.
        unsafe { result::memset_d8_sync(self.address, 0, self.bytes) }?;
        sync_default_stream()
    }
}

impl DeviceSlice<'_, u32> {
    /// Writes the word to every element and waits for completion.
    pub(crate) fn fill_with_word(self, word: u32) -> CudaResult<()> {
        // SAFETY: the slice is alive.
        unsafe { sys::cuMemsetD32_v2(self.address, word, self.len) }.result()?;
        sync_default_stream()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated once in `new`. The driver waits for the work that uses the memory.
        let _ = unsafe { result::free_sync(self.address) };
        if let Some(total) = HELD_BYTES.get(self.device as usize) {
            total.fetch_sub(self.bytes as u64, Ordering::Relaxed);
        }
    }
}

impl<'a, T> DeviceSlice<'a, T> {
    /// Makes a slice of memory that no [`DeviceMemory`] of this process owns.
    ///
    /// # Safety
    /// The address must be valid on the current device for `len` elements, for as long as `'a`.
    pub(crate) unsafe fn from_raw(address: u64, len: usize) -> DeviceSlice<'a, T> {
        DeviceSlice { address, len, memory: PhantomData, element: PhantomData }
    }

    pub(crate) fn address(self) -> u64 {
        self.address
    }

    /// Number of elements.
    pub(crate) fn len(self) -> usize {
        self.len
    }

    /// Returns `len` elements from the element `first` on.
    pub(crate) fn sub_slice(self, first: usize, len: usize) -> CudaResult<DeviceSlice<'a, T>> {
        match first.checked_add(len) {
            Some(end) if end <= self.len => {
                let address = self.address + (first * size_of::<T>()) as u64;
                Ok(DeviceSlice { address, len, memory: PhantomData, element: PhantomData })
            }
            _ => cuda_failure(format!(
                "{len} elements from {first} on exceed a range of {} elements",
                self.len
            )),
        }
    }
}

/// Returns the index of the current context's device among the visible ones.
fn current_device() -> CudaResult<u32> {
    let mut device = 0;
    // SAFETY: the driver writes to this stack frame.
    unsafe { sys::cuCtxGetDevice(&mut device) }.result()?;
    Ok(device as u32)
}

/// Waits for the default stream. This crate's streams are not ordered after it, and a copy from
/// pageable memory may still be in flight when its call returns.
fn sync_default_stream() -> CudaResult<()> {
    // SAFETY: the default stream always exists.
    Ok(unsafe { result::stream::synchronize(result::stream::null()) }?)
}

/// Copies to the device and waits for completion.
pub(crate) fn copy_to_device<T: NoUninit>(to: DeviceSlice<'_, T>, from: &[T]) -> CudaResult<()> {
    check_equal_lengths(to.len, from.len())?;
    if from.is_empty() {
        return Ok(());
    }
    // SAFETY: the slice is alive and has as many elements; all bytes of `from` are initialised.
    unsafe { result::memcpy_htod_sync(to.address, from) }?;
    sync_default_stream()
}

/// Copies from the device and waits for completion.
pub(crate) fn copy_to_host<T: AnyBitPattern>(to: &mut [T], from: DeviceSlice<'_, T>) -> CudaResult<()> {
    check_equal_lengths(from.len, to.len())?;
    if to.is_empty() {
        return Ok(());
    }
    // SAFETY: the slice is alive and has as many elements; every bit pattern is a valid `T`.
    Ok(unsafe { result::memcpy_dtoh_sync(to, from.address) }?)
}

/// Converts the bits of a bf16, as they are copied from a device, to f32.
pub(crate) fn widen_bf16(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

fn check_equal_lengths(device: usize, host: usize) -> CudaResult<()> {
    if device == host {
        return Ok(());
    }
    cuda_failure(format!("a copy between {device} elements on the device and {host} on the host"))
}

impl PinnedMemory {
    pub(crate) fn new(bytes: usize) -> CudaResult<PinnedMemory> {
        let bytes = bytes.max(64);
        // Mapped but not write-combined, because host and device both read it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: freed in `drop`.
        let at = unsafe { result::malloc_host(bytes, flags) }?.cast::<u8>();
        // SAFETY: the allocation has this many bytes.
        unsafe { at.write_bytes(0, bytes) };
        Ok(PinnedMemory { host_ptr: at, bytes })
    }

    /// Returns the address on the host, which under unified addressing is also the device's
    /// address.
    pub(crate) fn device_address(&self) -> u64 {
        self.host_ptr as u64
    }

    /// Copies elements to a byte offset. Work that reads them may be in flight, and then reads any
    /// mixture of old and new bytes.
    ///
    /// # Panics
    /// If the elements exceed the allocation.
    pub(crate) fn write<T: NoUninit>(&mut self, offset: usize, from: &[T]) {
        let from: &[u8] = bytemuck::cast_slice(from);
        assert!(offset <= self.bytes && from.len() <= self.bytes - offset);
        // SAFETY: the range lies inside the allocation, which `from` cannot overlap. No reference to
        // the allocation exists during this exclusive borrow.
        unsafe { std::ptr::copy_nonoverlapping(from.as_ptr(), self.host_ptr.add(offset), from.len()) };
    }

    /// Returns elements from a byte offset on.
    ///
    /// # Safety
    /// No work that writes them may be in flight while the slice is alive.
    ///
    /// # Panics
    /// If the elements exceed the allocation or are not aligned.
    pub(crate) unsafe fn as_slice<T: AnyBitPattern>(&self, offset: usize, len: usize) -> &[T] {
        let fits = len.checked_mul(size_of::<T>()).and_then(|b| b.checked_add(offset));
        assert!(offset.is_multiple_of(align_of::<T>()) && fits.is_some_and(|end| end <= self.bytes));
        // SAFETY: the range lies inside the allocation, which pages align; it is initialised, every
        // bit pattern is a valid `T`, and the caller guarantees that nothing writes it.
        unsafe { std::slice::from_raw_parts(self.host_ptr.add(offset).cast::<T>(), len) }
    }

    /// Returns a word that the device may write at any time.
    pub(crate) fn atomic_word(&self, index: usize) -> &std::sync::atomic::AtomicU32 {
        assert!(index < self.bytes / 4);
        // SAFETY: the word is inside the allocation and aligned; the host accesses it only
        // atomically.
        unsafe { &*self.host_ptr.cast::<std::sync::atomic::AtomicU32>().add(index) }
    }
}

impl Drop for PinnedMemory {
    /// Frees the memory, after the running call of several GPUs if there is one: a handle that aborts a run lives as long as its
    /// user wants.
    fn drop(&mut self) {
        let address = self.device_address();
        free_between_calls(Box::new(move || {
            // SAFETY: allocated once in `new`.
            let _ = unsafe { result::free_host(address as *mut c_void) };
        }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A slice of memory that is never accessed.
    fn unbacked_slice<T>(len: usize) -> DeviceSlice<'static, T> {
        // SAFETY: the tests compute with the address and copy nothing.
        unsafe { DeviceSlice::from_raw(4096, len) }
    }

    #[test]
    fn a_part_lies_inside_its_slice() {
        let whole = unbacked_slice::<u64>(5);
        let part = whole.sub_slice(2, 3).map(|s| (s.address(), s.len()));
        assert_eq!(part, Ok((4096 + 16, 3)));
        assert!(whole.sub_slice(3, 3).is_err() && whole.sub_slice(6, 0).is_err());
        assert!(whole.sub_slice(1, usize::MAX).is_err());
    }

    #[test]
    fn a_slice_lies_inside_its_allocation() {
        let memory = std::mem::ManuallyDrop::new(DeviceMemory { address: 4096, bytes: 256, device: 0 });
        assert_eq!(memory.slice::<f32>(16, 60).map(|s| s.address()), Ok(4096 + 16));
        assert!(memory.slice::<f32>(16, 61).is_err() && memory.slice::<u8>(257, 0).is_err());
        assert!(memory.slice::<u64>(0, usize::MAX / 2).is_err() && memory.slice::<u8>(u64::MAX, 1).is_err());
    }

    #[test]
    fn copies_of_unequal_lengths_are_refused() {
        assert!(copy_to_device(unbacked_slice::<u8>(3), &[0; 4]).is_err());
        assert!(copy_to_host(&mut [0_u8; 2], unbacked_slice(3)).is_err());
    }
}
