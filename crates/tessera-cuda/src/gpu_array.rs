//! Arrays of f32 in GPU memory that this process and other libraries of it share: owned ones, and views
//! of memory that another library owns.
//!
//! These functions run on threads of the application, whose current context belongs to others. So
//! each enters the context of its device for the time of the call alone.

#![allow(unsafe_code, reason = "memory and streams of other libraries")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use tessera_base::Diagnostic;

use crate::allocation_lock::{AllocationPermit, free_between_calls};
use crate::codes::T1304;
use crate::device_memory::{DeviceMemory, DeviceSlice, copy_to_host};
use crate::driver::{Context, CudaError, CudaEvent, CudaResult, CudaStream, cuda_failure};
use crate::libraries::{Libraries, Library};

/// Row-major f32 values in the memory of one GPU. Cheap to clone; the clones keep the memory alive.
/// Nobody writes the values.
#[derive(Debug, Clone)]
pub struct GpuArray {
    memory: Arc<GpuMemory>,
    address: u64,
    len: usize,
}

/// Keeps memory of another library allocated until it is dropped, on any thread.
pub type MemoryOwner = Box<dyn Any + Send + Sync>;

/// A stream of a GPU on which arrays of other libraries arrive, and on which arrays are copied.
pub struct GpuStream {
    device: u32,
    /// `None` only while this value is dropped.
    stream: Option<CudaStream>,
    context: Arc<Context>,
}

/// `rows` runs of `len` elements each, of which every next one begins `pitch` elements behind the one
/// before; the first begins at the element `first` of an array.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RowRun {
    /// Index of the first element.
    pub first: usize,
    /// Elements from the begin of a run to that of the next one.
    pub pitch: usize,
    /// Number of runs.
    pub rows: usize,
    /// Elements of a run.
    pub len: usize,
}

struct GpuMemory {
    device: u32,
    /// `None` only while this value is dropped.
    storage: Option<Storage>,
    /// What must have completed before the values are read; `None` if they are complete.
    ready: Option<CudaEvent>,
    context: Arc<Context>,
}

enum Storage {
    Own(DeviceMemory),
    #[allow(dead_code, reason = "keeps the memory allocated")]
    Shared(MemoryOwner),
}

impl GpuStream {
    /// Opens a stream on a visible device.
    ///
    /// # Errors
    /// T1301 without a driver, T1304 if the driver fails.
    pub fn open(libraries: &Libraries, device: u32) -> Result<GpuStream, Diagnostic> {
        libraries.check_loaded(Library::Driver)?;
        let _permit = AllocationPermit::acquire();
        let open = || {
            let context = Arc::new(Context::retain(device)?);
            let scope = context.enter()?;
            let stream = Some(CudaStream::new(false)?);
            drop(scope);
            Ok(GpuStream { device, stream, context })
        };
        open().map_err(|e| to_diagnostic(device, &e))
    }

    /// Returns the driver's handle, for libraries that order their work before that of the stream.
    #[must_use]
    pub fn handle(&self) -> u64 {
        self.stream.as_ref().map_or(0, |s| s.as_raw() as u64)
    }

    /// Wraps memory of another library, which the work on this stream so far makes complete.
    ///
    /// # Safety
    /// The address must be valid on the device of the stream for `len` elements of f32 until `owner` is
    /// dropped, and nobody may write them after the work that this stream waits for.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub unsafe fn wrap_memory(
        &self,
        address: u64,
        len: usize,
        owner: MemoryOwner,
    ) -> Result<GpuArray, Diagnostic> {
        let mark = || {
            let _scope = self.context.enter()?;
            let ready = CudaEvent::new()?;
            self.as_stream()?.record_event(&ready)?;
            Ok(ready)
        };
        let ready = mark().map_err(|e| to_diagnostic(self.device, &e))?;
        let memory = GpuMemory {
            device: self.device,
            storage: Some(Storage::Shared(owner)),
            ready: Some(ready),
            context: Arc::clone(&self.context),
        };
        Ok(GpuArray { memory: Arc::new(memory), address, len })
    }

    /// Copies runs of an array of this stream's device into a new array on a device, one behind the
    /// other, and waits for completion. Each byte is read and written once in GPU memory; between
    /// devices, runs that are not contiguous are packed first.
    ///
    /// # Errors
    /// T1304 if the runs exceed the array, if memory is short, or if the driver fails.
    pub fn copy_runs(
        &self,
        from: &GpuArray,
        runs: &[RowRun],
        to_device: u32,
    ) -> Result<GpuArray, Diagnostic> {
        let _permit = AllocationPermit::acquire();
        self.try_copy(from, runs, to_device).map_err(|e| to_diagnostic(self.device, &e))
    }

    fn try_copy(&self, from: &GpuArray, runs: &[RowRun], to_device: u32) -> CudaResult<GpuArray> {
        if from.device() != self.device {
            return cuda_failure(format!("an array of device {} on a stream of another", from.device()));
        }
        if to_device == self.device {
            return self.pack_runs(from, runs);
        }
        let packed = match *runs {
            // A single run needs no packing.
            [RowRun { first, rows: 1, len, .. }] => match from.slice(first, len) {
                Some(part) => part,
                None => return cuda_failure("a run exceeds its array"),
            },
            _ => self.pack_runs(from, runs)?,
        };
        let context = Arc::new(Context::retain(to_device)?);
        let memory = {
            let _scope = context.enter()?;
            DeviceMemory::new(packed.byte_len())?
        };
        let array = GpuArray::from_memory(context, to_device, memory, packed.len);
        let _scope = self.context.enter()?;
        let stream = self.as_stream()?;
        packed.delay(stream)?;
        let (to, source) =
            ((array.address, &*array.memory.context), (packed.address, &*packed.memory.context));
        // SAFETY: both arrays have these bytes and are alive until the stream has completed the copy, which
        // this function waits for; nobody else has the new one, and nobody writes the other.
        let sent = unsafe { stream.copy_between(to, source, packed.byte_len()) };
        self.complete(sent)?;
        Ok(array)
    }

    fn pack_runs(&self, from: &GpuArray, runs: &[RowRun]) -> CudaResult<GpuArray> {
        if let Some(run) = runs.iter().find(|run| run.end().is_none_or(|end| end > from.len)) {
            return cuda_failure(format!("{run:?} exceeds an array of {} elements", from.len));
        }
        let elements: usize = runs.iter().map(|run| run.rows * run.len).sum();
        let _scope = self.context.enter()?;
        let memory = DeviceMemory::new(elements * size_of::<f32>())?;
        let array = GpuArray::from_memory(Arc::clone(&self.context), self.device, memory, elements);
        let stream = self.as_stream()?;
        let enqueue = || {
            from.delay(stream)?;
            let mut to = array.address;
            for run in runs {
                let bytes = |elements: usize| elements * size_of::<f32>();
                let source = from.address + bytes(run.first) as u64;
                // SAFETY: the runs lie in the array, and the new array has room for all of them; both are
                // alive until the stream has completed the copies, which this function waits for.
                unsafe {
                    stream.copy_rows(
                        (to, bytes(run.len)),
                        (source, bytes(run.pitch)),
                        bytes(run.len),
                        run.rows,
                    )
                }?;
                to += bytes(run.rows * run.len) as u64;
            }
            Ok(())
        };
        self.complete(enqueue())?;
        Ok(array)
    }

    /// Waits for the work on the stream, also after an error: it may use memory that is freed next.
    fn complete(&self, enqueued: CudaResult<()>) -> CudaResult<()> {
        let end = CudaEvent::new()?;
        self.as_stream()?.record_event(&end)?;
        end.synchronize()?;
        enqueued
    }

    fn as_stream(&self) -> CudaResult<&CudaStream> {
        self.stream.as_ref().ok_or_else(|| CudaError("the stream is closed".into()))
    }
}

impl RowRun {
    /// Returns the index behind the last element; `None` if it exceeds every array.
    fn end(&self) -> Option<usize> {
        match self.rows.checked_sub(1) {
            Some(more) if self.len > 0 => {
                more.checked_mul(self.pitch)?.checked_add(self.len)?.checked_add(self.first)
            }
            _ => Some(0),
        }
    }
}

impl GpuArray {
    /// Wraps memory whose values are complete.
    pub(crate) fn from_memory(
        context: Arc<Context>,
        device: u32,
        memory: DeviceMemory,
        len: usize,
    ) -> GpuArray {
        let address = memory.device_address();
        let memory = GpuMemory { device, storage: Some(Storage::Own(memory)), ready: None, context };
        GpuArray { memory: Arc::new(memory), address, len }
    }

    /// Returns the index of the device among the visible ones.
    #[must_use]
    pub fn device(&self) -> u32 {
        self.memory.device
    }

    /// Returns the address of the first element.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Number of elements.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there is no element.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns `len` elements from the element `first` on, in the same memory; `None` if there are fewer.
    #[must_use]
    pub fn slice(&self, first: usize, len: usize) -> Option<GpuArray> {
        let end = first.checked_add(len)?;
        let address = self.address + (first * size_of::<f32>()) as u64;
        (end <= self.len).then(|| GpuArray { memory: Arc::clone(&self.memory), address, len })
    }

    /// Makes a stream of another library wait until the values are complete.
    ///
    /// # Safety
    /// `stream` must be the handle of a stream of this process that exists during the call, or 1 or 2 for
    /// the default streams.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub unsafe fn delay_stream(&self, stream: u64) -> Result<(), Diagnostic> {
        let Some(ready) = &self.memory.ready else { return Ok(()) };
        let delay = || {
            // The default streams are those of the current context.
            let _scope = self.memory.context.enter()?;
            // SAFETY: the caller guarantees it.
            unsafe { ready.delay_stream(stream) }
        };
        delay().map_err(|e| to_diagnostic(self.device(), &e))
    }

    /// Copies the values to the host.
    ///
    /// # Errors
    /// T1304 if the driver fails.
    pub fn copy_to_host(&self) -> Result<Vec<f32>, Diagnostic> {
        let copy = || {
            let _scope = self.memory.context.enter()?;
            if let Some(ready) = &self.memory.ready {
                ready.synchronize()?;
            }
            let mut values = vec![0.0; self.len];
            // SAFETY: the memory has these elements, and `self` keeps it alive.
            copy_to_host(&mut values, unsafe { DeviceSlice::from_raw(self.address, self.len) })?;
            Ok(values)
        };
        copy().map_err(|e| to_diagnostic(self.device(), &e))
    }

    /// Makes a stream of this crate wait until the values are complete.
    pub(crate) fn delay(&self, stream: &CudaStream) -> CudaResult<()> {
        self.memory.ready.as_ref().map_or(Ok(()), |ready| stream.wait_event(ready))
    }

    pub(crate) fn byte_len(&self) -> usize {
        self.len * size_of::<f32>()
    }
}

impl Drop for GpuMemory {
    /// Frees the memory, after the running call of several GPUs if there is one. The driver waits for all work on the device before it frees
    /// memory of its own, so another library may still compute with a view that it has let go.
    fn drop(&mut self) {
        let own = match self.storage.take() {
            Some(Storage::Own(memory)) => memory,
            shared => {
                let _scope = self.context.enter();
                drop(shared);
                self.ready = None;
                return;
            }
        };
        let context = Arc::clone(&self.context);
        free_between_calls(Box::new(move || match context.enter() {
            Ok(_scope) => drop(own),
            // A lost device frees nothing.
            Err(_) => std::mem::forget(own),
        }));
    }
}

impl Drop for GpuStream {
    fn drop(&mut self) {
        let (context, stream) = (Arc::clone(&self.context), self.stream.take());
        free_between_calls(Box::new(move || {
            let scope = context.enter();
            drop(stream);
            drop(scope);
        }));
    }
}

impl fmt::Debug for GpuMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let owner = match &self.storage {
            Some(Storage::Own(_)) => "this crate",
            Some(Storage::Shared(_)) => "another library",
            None => "nobody",
        };
        f.debug_struct("GpuMemory")
            .field("device", &self.device)
            .field("owner", &owner)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for GpuStream {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuStream").field("device", &self.device).finish_non_exhaustive()
    }
}

fn to_diagnostic(device: u32, e: &CudaError) -> Diagnostic {
    Diagnostic::error(&T1304, e.0.clone()).with_label("cuda", format!("device {device}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use crate::device_memory::copy_to_device;
    use crate::test_gpu::open_test_gpu;

    #[test]
    fn the_end_of_a_run_is_that_of_its_last_row() {
        let run = RowRun { first: 3, pitch: 10, rows: 4, len: 2 };
        assert_eq!(run.end(), Some(3 + 30 + 2));
        assert_eq!(RowRun { rows: 0, ..run }.end(), Some(0));
        assert_eq!(RowRun { rows: 3, pitch: usize::MAX, ..run }.end(), None);
    }

    #[test]
    fn runs_of_shared_memory_are_packed_and_the_owner_is_dropped_once() {
        struct Owner(#[allow(dead_code)] Arc<()>, #[allow(dead_code)] DeviceMemory);
        let Some(gpu) = open_test_gpu() else { return };
        let values: Vec<f32> = (0..7 * 11).map(|i| i as f32).collect();
        let memory = DeviceMemory::new(4 * values.len()).unwrap();
        copy_to_device(memory.slice(0, values.len()).unwrap(), &values).unwrap();
        let (alive, address) = (Arc::new(()), memory.device_address());
        let stream = GpuStream::open(&gpu.libraries, 0).unwrap();
        let owner = Box::new(Owner(Arc::clone(&alive), memory));
        // SAFETY: the owner holds the memory, which nobody writes any more.
        let whole = unsafe { stream.wrap_memory(address, values.len(), owner) }.unwrap();
        let columns = [RowRun { first: 3, pitch: 11, rows: 7, len: 5 }];
        let packed = stream.copy_runs(&whole, &columns, 0).unwrap();
        let expected: Vec<f32> = (0..7).flat_map(|r| (3..8).map(move |c| (11 * r + c) as f32)).collect();
        assert_eq!(packed.copy_to_host().unwrap(), expected);
        let rows = whole.slice(22, 11).unwrap();
        assert_eq!((rows.address(), rows.len()), (address + 88, 11));
        assert!(whole.slice(70, 8).is_none());
        assert!(stream.copy_runs(&whole, &[RowRun { first: 4, ..columns[0] }; 2], 0).is_ok());
        assert!(stream.copy_runs(&whole, &[RowRun { first: 7, ..columns[0] }], 0).is_err());
        drop(whole);
        assert_eq!(Arc::strong_count(&alive), 2, "the slice holds the memory");
        assert_eq!(rows.copy_to_host().unwrap(), values[22..33]);
        drop(rows);
        assert_eq!(Arc::strong_count(&alive), 1);
    }
}
