//! Owning wrappers of the driver's objects: context, memory, streams, events, modules and graphs.
//!
//! The wrappers are thin: only functions whose name states it allocate, synchronise or free. All
//! work of a backend uses one [`Context`], which is made current on every thread that enters the
//! backend.

#![allow(unsafe_code, reason = "the driver's own functions")]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

/// The message of a failed library call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError(pub(crate) String);

/// The result of a library call.
pub(crate) type CudaResult<T> = Result<T, CudaError>;

impl fmt::Display for CudaError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<DriverError> for CudaError {
    fn from(e: DriverError) -> CudaError {
        let name = e.error_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let text = e.error_string().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        CudaError(format!("{name}: {text}"))
    }
}

pub(crate) fn cuda_failure<T>(message: impl Into<String>) -> CudaResult<T> {
    Err(CudaError(message.into()))
}

/// A device's primary context.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver allows any thread to use a context; `bind` makes it current.
unsafe impl Send for Context {}
// SAFETY: as above; the value is immutable.
unsafe impl Sync for Context {}

/// An allocation of device memory.
#[derive(Debug)]
pub(crate) struct DeviceMemory {
    address: u64,
    bytes: usize,
}

/// Pinned host memory that a device can read and write.
#[derive(Debug)]
pub(crate) struct PinnedMemory {
    host_ptr: *mut u8,
    bytes: usize,
}

// SAFETY: the allocation is owned like a vector; the device accesses it only in work that its owner
// launches.
unsafe impl Send for PinnedMemory {}

/// An owned CUDA stream that does not synchronize with the default stream.
#[derive(Debug)]
pub(crate) struct CudaStream(sys::CUstream);

// SAFETY: the driver allows any thread to use a stream.
unsafe impl Send for CudaStream {}

/// An owned CUDA event, with or without timing.
#[derive(Debug)]
pub(crate) struct CudaEvent(sys::CUevent);

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for CudaEvent {}

/// A loaded module of compiled kernels.
#[derive(Debug)]
pub(crate) struct CudaModule(sys::CUmodule);

// SAFETY: the driver allows any thread to use a module.
unsafe impl Send for CudaModule {}

/// A kernel of a module, valid as long as the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KernelFunction(sys::CUfunction);

// SAFETY: the driver allows any thread to use a function.
unsafe impl Send for KernelFunction {}

/// An instantiated graph, ready for repeated launches.
#[derive(Debug)]
pub(crate) struct GraphExec(sys::CUgraphExec);

// SAFETY: only its owner launches a graph.
unsafe impl Send for GraphExec {}

/// The arguments of a kernel, in order.
#[derive(Debug, Default)]
pub(crate) struct KernelArgs {
    slots: Vec<u64>,
    /// Arguments larger than one word, with their position.
    tensor_maps: Vec<(usize, sys::CUtensorMap)>,
    structs: Vec<(usize, Vec<u64>)>,
}

impl KernelArgs {
    pub(crate) fn new() -> KernelArgs {
        KernelArgs::default()
    }

    /// Adds a device address.
    pub(crate) fn with_address(mut self, address: u64) -> KernelArgs {
        self.slots.push(address);
        self
    }

    /// Adds a TMA descriptor, passed by value.
    pub(crate) fn with_tensor_map(mut self, map: sys::CUtensorMap) -> KernelArgs {
        self.tensor_maps.push((self.slots.len(), map));
        self.slots.push(0);
        self
    }

    /// Adds a struct of 8-byte words, passed by value.
    pub(crate) fn with_struct(mut self, fields: Vec<u64>) -> KernelArgs {
        self.structs.push((self.slots.len(), fields));
        self.slots.push(0);
        self
    }

    /// Adds a 32-bit `int`; higher bits of `v` are dropped.
    pub(crate) fn with_int(mut self, v: i64) -> KernelArgs {
        self.slots.push(u64::from(v as i32 as u32));
        self
    }

    /// Adds a `long long`.
    pub(crate) fn with_long(mut self, v: i64) -> KernelArgs {
        self.slots.push(v as u64);
        self
    }

    /// Adds a `float`, passed by its 32 bits.
    pub(crate) fn with_float(mut self, v: f32) -> KernelArgs {
        self.slots.push(u64::from(v.to_bits()));
        self
    }
}

impl Context {
    pub(crate) fn open(ordinal: u32) -> CudaResult<Context> {
        result::init()?;
        let device = result::device::get(ordinal as c_int)?;
        // SAFETY: the driver is initialised and returned this device; `drop` releases the
        // reference.
        let raw = unsafe { result::primary_ctx::retain(device) }?;
        let context = Context { device, raw };
        context.make_current()?;
        Ok(context)
    }

    /// Makes this the calling thread's current context.
    pub(crate) fn make_current(&self) -> CudaResult<()> {
        // SAFETY: the context is retained.
        Ok(unsafe { result::ctx::set_current(self.raw) }?)
    }

    pub(crate) fn device_attribute(&self, attribute: sys::CUdevice_attribute) -> CudaResult<i32> {
        // SAFETY: the driver returned this device.
        Ok(unsafe { result::device::get_attribute(self.device, attribute) }?)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A lost device cannot be released; the error is ignored
        // because nothing can be done about it.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl DeviceMemory {
    pub(crate) fn new(bytes: usize) -> CudaResult<DeviceMemory> {
        let bytes = bytes.max(256);
        // SAFETY: `zero_fill` or a kernel writes the memory before it is read.
        let at = unsafe { result::malloc_sync(bytes) }.map_err(|e| {
            CudaError(format!("cannot allocate {bytes} bytes on the device: {}", CudaError::from(e)))
        })?;
        Ok(DeviceMemory { address: at, bytes })
    }

    pub(crate) fn device_address(&self) -> u64 {
        self.address
    }

    pub(crate) fn byte_len(&self) -> usize {
        self.bytes
    }

    /// Fills the memory with zeros and waits for completion.
    pub(crate) fn zero_fill(&self) -> CudaResult<()> {
        // SAFETY: the range lies in this allocation.
        unsafe { result::memset_d8_sync(self.address, 0, self.bytes) }?;
        sync_default_stream()
    }
}

impl Drop for DeviceMemory {
    fn drop(&mut self) {
        // SAFETY: allocated once in `new`.
        let _ = unsafe { result::free_sync(self.address) };
    }
}

/// Waits for the default stream. This crate's streams are not ordered after it, and a copy from
/// pageable memory may still be in flight when its call returns.
fn sync_default_stream() -> CudaResult<()> {
    // SAFETY: the default stream always exists.
    Ok(unsafe { result::stream::synchronize(result::stream::null()) }?)
}

/// Copies to the device and waits for completion.
pub(crate) fn copy_to_device<T: Copy>(to: u64, from: &[T]) -> CudaResult<()> {
    if from.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's range on the device is at least as long as the slice.
    unsafe { result::memcpy_htod_sync(to, from) }?;
    sync_default_stream()
}

/// Copies from the device and waits for completion.
pub(crate) fn copy_to_host<T: Copy>(to: &mut [T], from: u64) -> CudaResult<()> {
    if to.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's range on the device is at least as long as the slice.
    Ok(unsafe { result::memcpy_dtoh_sync(to, from) }?)
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

    /// Returns elements from a byte offset on. No work that writes them may be in flight.
    pub(crate) fn as_slice<T: Copy>(&self, offset: usize, len: usize) -> &[T] {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + len * size_of::<T>() <= self.bytes);
        // SAFETY: the range lies inside the allocation, is aligned and initialised; plain numbers
        // have no invalid bits.
        unsafe { std::slice::from_raw_parts(self.host_ptr.add(offset).cast::<T>(), len) }
    }

    /// Returns mutable elements from a byte offset on. No work that reads or writes them may be in
    /// flight.
    pub(crate) fn as_mut_slice<T: Copy>(&mut self, offset: usize, len: usize) -> &mut [T] {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + len * size_of::<T>() <= self.bytes);
        // SAFETY: as in `as_slice`, and exclusively borrowed.
        unsafe { std::slice::from_raw_parts_mut(self.host_ptr.add(offset).cast::<T>(), len) }
    }

    /// Returns a word that the device may write at any time.
    pub(crate) fn atomic_word(&self, index: usize) -> &std::sync::atomic::AtomicU32 {
        assert!((index + 1) * 4 <= self.bytes);
        // SAFETY: the word is inside the allocation and aligned; the host accesses it only
        // atomically.
        unsafe { &*self.host_ptr.cast::<std::sync::atomic::AtomicU32>().add(index) }
    }
}

impl Drop for PinnedMemory {
    fn drop(&mut self) {
        // SAFETY: allocated once in `new`.
        let _ = unsafe { result::free_host(self.host_ptr.cast::<c_void>()) };
    }
}

impl CudaStream {
    /// Creates a stream that does not synchronise with the legacy default stream. An urgent stream
    /// gets the highest priority.
    pub(crate) fn new(urgent: bool) -> CudaResult<CudaStream> {
        let (_, greatest) = result::stream::get_priority_range()?;
        let priority = if urgent { greatest } else { 0 };
        Ok(CudaStream(result::stream::create_with_priority(
            result::stream::StreamKind::NonBlocking,
            priority,
        )?))
    }

    pub(crate) fn as_raw(&self) -> sys::CUstream {
        self.0
    }

    pub(crate) fn record_event(&self, event: &CudaEvent) -> CudaResult<()> {
        // SAFETY: both objects are alive.
        Ok(unsafe { result::event::record(event.0, self.0) }?)
    }

    /// Within a capture: adds a node that records a timed event whenever the graph runs.
    pub(crate) fn capture_event_node(&self, event: &CudaEvent) -> CudaResult<()> {
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as c_uint;
        // SAFETY: both objects are alive; the owner of the graph keeps the event alive.
        Ok(unsafe { sys::cuEventRecordWithFlags(event.0, self.0, external) }.result()?)
    }

    pub(crate) fn wait_event(&self, event: &CudaEvent) -> CudaResult<()> {
        // SAFETY: both objects are alive.
        Ok(unsafe {
            result::stream::wait_event(self.0, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }?)
    }

    /// Copies between device and host or within the device; the driver infers the direction from
    /// the addresses.
    pub(crate) fn copy_async(&self, to: u64, from: u64, bytes: usize) -> CudaResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's ranges are that long and stay valid until the stream has completed
        // the copy.
        Ok(unsafe { sys::cuMemcpyAsync(to, from, bytes, self.0) }.result()?)
    }

    /// Copies `rows` runs of `bytes` bytes on the device or between devices. `to` and `from` are
    /// (address, pitch in bytes).
    pub(crate) fn copy_rows(
        &self,
        to: (u64, usize),
        from: (u64, usize),
        bytes: usize,
        rows: usize,
    ) -> CudaResult<()> {
        if bytes == 0 || rows == 0 {
            return Ok(());
        }
        // The driver infers the device from each address.
        let (unified, none) = (sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED, std::ptr::null_mut());
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: unified,
            srcHost: none,
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.1,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: unified,
            dstHost: none,
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.1,
            WidthInBytes: bytes,
            Height: rows,
        };
        // SAFETY: the caller's ranges hold that many runs and stay valid until the stream has
        // completed the copy.
        Ok(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.0) }.result()?)
    }

    pub(crate) fn zero_async(&self, at: u64, bytes: usize) -> CudaResult<()> {
        // SAFETY: the caller's range is that long.
        Ok(unsafe { result::memset_d8_async(at, 0, bytes, self.0) }?)
    }

    /// Launches a kernel with `block` threads per block and `shared` bytes of shared memory.
    pub(crate) fn launch_kernel(
        &self,
        function: KernelFunction,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        mut args: KernelArgs,
    ) -> CudaResult<()> {
        let mut pointers: Vec<*mut c_void> =
            args.slots.iter_mut().map(|a| std::ptr::from_mut(a).cast::<c_void>()).collect();
        for (position, map) in &mut args.tensor_maps {
            pointers[*position] = std::ptr::from_mut(map).cast::<c_void>();
        }
        for (position, words) in &mut args.structs {
            pointers[*position] = words.as_mut_ptr().cast::<c_void>();
        }
        // SAFETY: the launch wrapper passes the kernel's parameters in order, each with its
        // parameter's size.
        Ok(unsafe {
            result::launch_kernel(
                function.0,
                (grid[0], grid[1], grid[2]),
                (block, 1, 1),
                shared,
                self.0,
                &mut pointers,
            )
        }?)
    }

    /// Waits, spinning, until the work launched so far has completed. `end` is recorded for this
    /// purpose.
    pub(crate) fn spin_until_done(&self, end: &CudaEvent) -> CudaResult<()> {
        self.record_event(end)?;
        while !end.is_complete()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// Begins a capture: work on this stream, and on streams that later wait for it, is recorded
    /// instead of executed.
    pub(crate) fn begin_capture(&self) -> CudaResult<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream is alive.
        Ok(unsafe { result::stream::begin_capture(self.0, mode) }?)
    }

    pub(crate) fn end_capture(&self) -> CudaResult<GraphExec> {
        // SAFETY: a capture was begun; instantiation copies the graph, so the graph can be
        // destroyed afterwards.
        unsafe {
            let graph = result::stream::end_capture(self.0)?;
            let mut exec = std::ptr::null_mut();
            let status = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result();
            result::graph::destroy(graph)?;
            status?;
            Ok(GraphExec(exec))
        }
    }

    pub(crate) fn launch_graph(&self, graph: &GraphExec) -> CudaResult<()> {
        // SAFETY: both objects are alive.
        Ok(unsafe { result::graph::launch(graph.0, self.0) }?)
    }
}

impl Drop for CudaStream {
    fn drop(&mut self) {
        // SAFETY: created once in `new`.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

impl CudaEvent {
    /// Creates an event without timing, for ordering only.
    pub(crate) fn new() -> CudaResult<CudaEvent> {
        Ok(CudaEvent(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?))
    }

    /// Creates an event that records a timestamp.
    pub(crate) fn with_timing() -> CudaResult<CudaEvent> {
        Ok(CudaEvent(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?))
    }

    /// Returns whether all work before the event has completed.
    pub(crate) fn is_complete(&self) -> CudaResult<bool> {
        // SAFETY: the event is alive.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Returns the milliseconds from this event to another. Both must be complete.
    pub(crate) fn elapsed_ms_to(&self, end: &CudaEvent) -> CudaResult<f32> {
        // SAFETY: both objects are alive.
        Ok(unsafe { result::event::elapsed(self.0, end.0) }?)
    }
}

impl Drop for CudaEvent {
    fn drop(&mut self) {
        // SAFETY: created once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

impl CudaModule {
    /// Loads a cubin, a compiled GPU binary, into the current context.
    pub(crate) fn load(image: &[u8]) -> CudaResult<CudaModule> {
        // SAFETY: the image is a complete cubin, which contains its own length.
        Ok(CudaModule(unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) }?))
    }

    pub(crate) fn get_function(&self, name: &str) -> CudaResult<KernelFunction> {
        let c = CString::new(name).map_err(|_| CudaError(format!("kernel name {name:?}")))?;
        // SAFETY: the module is alive.
        let f = unsafe { result::module::get_function(self.0, c) };
        Ok(KernelFunction(f.map_err(|e| CudaError(format!("kernel {name}: {}", CudaError::from(e))))?))
    }
}

impl Drop for CudaModule {
    fn drop(&mut self) {
        // SAFETY: loaded once.
        let _ = unsafe { result::module::unload(self.0) };
    }
}

impl KernelFunction {
    pub(crate) fn as_raw(self) -> sys::CUfunction {
        self.0
    }

    /// Returns how many blocks with this number of threads one multiprocessor can run at once.
    pub(crate) fn max_active_blocks(self, threads: u32) -> CudaResult<u32> {
        let mut blocks = 0;
        // SAFETY: the function lives as long as its module.
        unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.0, threads as c_int, 0) }
            .result()?;
        Ok(blocks.max(1) as u32)
    }

    /// Allows the kernel more dynamic shared memory than the default limit of 48 KiB.
    pub(crate) fn set_max_shared_bytes(self, bytes: u32) -> CudaResult<()> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function lives as long as its module.
        Ok(unsafe { result::function::set_function_attribute(self.0, which, bytes as c_uint as c_int) }?)
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: instantiated once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
