//! Owning wrappers of the driver's objects: context, streams, events, modules and graphs.
//!
//! The wrappers are thin: only functions whose name states it allocate, synchronise or free. All
//! work of a backend uses one [`Context`], which is made current on every thread that enters the
//! backend.

#![allow(unsafe_code, reason = "the driver's own functions")]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt;
use std::marker::PhantomData;
use std::sync::Arc;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

/// The message of a failed library call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CudaError(pub(crate) String);

/// Result of a call to a CUDA library or of a check in this crate. The error holds the message.
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

/// A device's primary context, retained until this value is dropped.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver allows any thread to use a context; `bind` makes it current.
unsafe impl Send for Context {}
// SAFETY: as above; the value is immutable.
unsafe impl Sync for Context {}

/// A context that is the calling thread's current one until this value is dropped.
#[derive(Debug)]
pub(crate) struct ContextScope<'a> {
    context: PhantomData<&'a Context>,
    /// The stack of current contexts belongs to the thread.
    thread: PhantomData<*const ()>,
}

/// An owned CUDA stream that does not synchronize with the default stream.
#[derive(Debug)]
pub(crate) struct CudaStream(sys::CUstream);

// SAFETY: the driver allows any thread to use a stream.
unsafe impl Send for CudaStream {}
// SAFETY: as above, and several threads at once.
unsafe impl Sync for CudaStream {}

/// An owned CUDA event, with or without timing.
#[derive(Debug)]
pub(crate) struct CudaEvent(sys::CUevent);

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for CudaEvent {}
// SAFETY: as above, and several threads at once.
unsafe impl Sync for CudaEvent {}

/// A loaded module of compiled kernels. Its kernels keep it loaded.
#[derive(Debug)]
pub(crate) struct CudaModule(Arc<LoadedModule>);

#[derive(Debug)]
struct LoadedModule(sys::CUmodule);

// SAFETY: the driver allows any thread to use a module.
unsafe impl Send for LoadedModule {}
// SAFETY: as above; the value is immutable.
unsafe impl Sync for LoadedModule {}

/// A kernel of a module.
#[derive(Debug, Clone)]
pub(crate) struct KernelFunction {
    raw: sys::CUfunction,
    /// Keeps the module loaded, and with it the function.
    _module: Arc<LoadedModule>,
}

// SAFETY: the driver allows any thread to use a function.
unsafe impl Send for KernelFunction {}

/// An instantiated graph, ready for repeated launches.
#[derive(Debug)]
pub(crate) struct GraphExec(sys::CUgraphExec);

// SAFETY: only its owner launches a graph.
unsafe impl Send for GraphExec {}

impl Context {
    /// Retains the primary context of a device and makes it the calling thread's current one.
    pub(crate) fn open(ordinal: u32) -> CudaResult<Context> {
        let context = Context::retain(ordinal)?;
        context.make_current()?;
        Ok(context)
    }

    /// Retains the primary context of a device. Other libraries of the process retain the same one, so
    /// each can use the memory of the others.
    pub(crate) fn retain(ordinal: u32) -> CudaResult<Context> {
        result::init()?;
        let device = result::device::get(ordinal as c_int)?;
        // SAFETY: the driver is initialised and returned this device; `drop` releases the
        // reference.
        let raw = unsafe { result::primary_ctx::retain(device) }?;
        Ok(Context { device, raw })
    }

    /// Makes this the current context of a thread that is not this crate's, until the scope is
    /// dropped. The context that was current before is current again then: other libraries take the
    /// device of a thread from it.
    pub(crate) fn enter(&self) -> CudaResult<ContextScope<'_>> {
        // SAFETY: the context is retained.
        unsafe { sys::cuCtxPushCurrent_v2(self.raw) }.result()?;
        Ok(ContextScope { context: PhantomData, thread: PhantomData })
    }

    /// Makes this the calling thread's current context.
    pub(crate) fn make_current(&self) -> CudaResult<()> {
        // SAFETY: the context is retained.
        Ok(unsafe { result::ctx::set_current(self.raw) }?)
    }

    /// Gives the calling thread's current context access to all memory of this one, for as long as both exist.
    pub(crate) fn make_accessible_to_current(&self) -> CudaResult<()> {
        // SAFETY: the context is retained.
        match unsafe { sys::cuCtxEnablePeerAccess(self.raw, 0) } {
            // Another library of the process may have done it.
            CUresult::CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            status => Ok(status.result()?),
        }
    }

    /// Returns the name of the device, such as `NVIDIA H200`.
    pub(crate) fn device_name(&self) -> CudaResult<String> {
        Ok(result::device::get_name(self.device)?)
    }

    pub(crate) fn device_attribute(&self, attribute: sys::CUdevice_attribute) -> CudaResult<i32> {
        // SAFETY: the driver returned this device.
        Ok(unsafe { result::device::get_attribute(self.device, attribute) }?)
    }
}

impl Drop for ContextScope<'_> {
    fn drop(&mut self) {
        let mut popped = std::ptr::null_mut();
        // SAFETY: `enter` pushed a context on this thread; the driver writes its handle to this stack frame.
        let _ = unsafe { sys::cuCtxPopCurrent_v2(&mut popped) };
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A lost device cannot be released; the error is ignored
        // because nothing can be done about it.
        let _ = unsafe { result::primary_ctx::release(self.device) };
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

    /// Records a timed event. Within a capture, the graph records it whenever it runs; the owner of the graph keeps the
    /// event alive.
    pub(crate) fn record_time(&self, event: &CudaEvent) -> CudaResult<()> {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the driver writes to this stack frame.
        unsafe { sys::cuStreamIsCapturing(self.0, &mut status) }.result()?;
        match status {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => self.record_event(event),
            _ => self.capture_event_node(event),
        }
    }

    /// Calls a function on a thread of the driver once the work before it on this stream has completed. The work behind
    /// it waits until the function has returned.
    ///
    /// # Safety
    /// `argument` must be valid for `function` until the stream has completed the call, and as long as a graph exists
    /// that was captured from it. The function must not call CUDA and must not unwind.
    pub(crate) unsafe fn call_host(
        &self,
        function: unsafe extern "C" fn(*mut c_void),
        argument: *mut c_void,
    ) -> CudaResult<()> {
        // SAFETY: the stream is alive; the caller guarantees the rest.
        Ok(unsafe { result::stream::launch_host_function(self.0, function, argument) }?)
    }

    /// Describes the stream for an error message: whether it captures, and the error that its work so far has.
    pub(crate) fn describe_state(&self) -> String {
        let mut status = sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        // SAFETY: the stream is alive; the driver writes to this stack frame.
        let queried = unsafe { sys::cuStreamIsCapturing(self.0, &mut status) };
        match (queried, status) {
            (CUresult::CUDA_SUCCESS, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE) => {
                // SAFETY: the stream is alive.
                match unsafe { sys::cuStreamQuery(self.0) } {
                    CUresult::CUDA_SUCCESS => "without unfinished work".to_string(),
                    CUresult::CUDA_ERROR_NOT_READY => "with unfinished work".to_string(),
                    failed => format!("whose work failed: {failed:?}"),
                }
            }
            (CUresult::CUDA_SUCCESS, sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE) => {
                "that captures".to_string()
            }
            (CUresult::CUDA_SUCCESS, _) => "whose capture was invalidated".to_string(),
            (failed, _) => format!("of a context that reports {failed:?}"),
        }
    }

    pub(crate) fn wait_event(&self, event: &CudaEvent) -> CudaResult<()> {
        // SAFETY: both objects are alive.
        Ok(unsafe {
            result::stream::wait_event(self.0, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }?)
    }

    /// Copies between device and host or within the device; the driver infers the direction from
    /// the addresses.
    ///
    /// # Safety
    /// Both ranges must be device or pinned memory of `bytes` bytes and must stay allocated until the
    /// stream has completed the copy. Meanwhile no other stream may write `from` or access `to`.
    pub(crate) unsafe fn copy_async(&self, to: u64, from: u64, bytes: usize) -> CudaResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the ranges.
        Ok(unsafe { sys::cuMemcpyAsync(to, from, bytes, self.0) }.result()?)
    }

    /// Copies from the memory of one device to that of another, which may be the same.
    ///
    /// # Safety
    /// As for [`copy_async`](CudaStream::copy_async); each range must be memory of the device of its
    /// context.
    pub(crate) unsafe fn copy_between(
        &self,
        (to, to_context): (u64, &Context),
        (from, from_context): (u64, &Context),
        bytes: usize,
    ) -> CudaResult<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: both contexts are retained; the caller guarantees the ranges.
        let status =
            unsafe { sys::cuMemcpyPeerAsync(to, to_context.raw, from, from_context.raw, bytes, self.0) };
        Ok(status.result()?)
    }

    /// Copies `rows` runs of `bytes` bytes on the device or between devices. `to` and `from` are
    /// (address, pitch in bytes).
    ///
    /// # Safety
    /// As for [`copy_async`](CudaStream::copy_async), for each of the runs.
    pub(crate) unsafe fn copy_rows(
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
        // SAFETY: the caller guarantees the runs.
        Ok(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.0) }.result()?)
    }

    /// Fills a range with zeros.
    ///
    /// # Safety
    /// The range must be device memory that stays allocated until the stream has completed the fill.
    /// Meanwhile no other stream may access it.
    pub(crate) unsafe fn zero_async(&self, at: u64, bytes: usize) -> CudaResult<()> {
        // SAFETY: the caller guarantees the range.
        Ok(unsafe { result::memset_d8_async(at, 0, bytes, self.0) }?)
    }

    /// Fills `rows` runs of `bytes` bytes with zeros; `at` is (address, pitch in bytes).
    ///
    /// # Safety
    /// As for [`zero_async`](CudaStream::zero_async), for each of the runs.
    pub(crate) unsafe fn zero_rows(&self, at: (u64, usize), bytes: usize, rows: usize) -> CudaResult<()> {
        if bytes == 0 || rows == 0 {
            return Ok(());
        }
        // SAFETY: the caller guarantees the runs.
        Ok(unsafe { sys::cuMemsetD2D8Async(at.0, at.1, 0, bytes, rows, self.0) }.result()?)
    }

    /// Launches a kernel with `block` threads per block and `shared` bytes of shared memory.
    /// `params` holds the address of each argument; the driver copies the arguments during the call.
    ///
    /// # Safety
    /// `params` must point to the kernel's parameters in order, each of its parameter's type. What the
    /// arguments refer to must stay allocated until the stream has completed the kernel; meanwhile no
    /// other stream may write what the kernel reads, or access what it writes. Grid, block and shared
    /// memory must be those for which the kernel keeps inside these ranges.
    pub(crate) unsafe fn launch_kernel(
        &self,
        function: &KernelFunction,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        params: &mut [*mut c_void],
    ) -> CudaResult<()> {
        let grid = (grid[0], grid[1], grid[2]);
        // SAFETY: function and stream are alive; the caller guarantees the rest.
        Ok(unsafe { result::launch_kernel(function.raw, grid, (block, 1, 1), shared, self.0, params) }?)
    }

    /// Launches a kernel that may begin before the kernel before it on this stream has ended. The device must be
    /// of compute capability 9.0 or later.
    ///
    /// # Safety
    /// As [`launch_kernel`](CudaStream::launch_kernel). The kernel must execute `griddepcontrol.wait` before it
    /// reads what another kernel writes, and before it writes.
    pub(crate) unsafe fn launch_dependent_kernel(
        &self,
        function: &KernelFunction,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        params: &mut [*mut c_void],
    ) -> CudaResult<()> {
        // SAFETY: the driver defines all-zero bytes of the attribute as valid; `id` says which value is set.
        let mut attribute: sys::CUlaunchAttribute = unsafe { std::mem::zeroed() };
        attribute.id = sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        attribute.value.programmaticStreamSerializationAllowed = 1;
        let config = sys::CUlaunchConfig {
            gridDimX: grid[0],
            gridDimY: grid[1],
            gridDimZ: grid[2],
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: self.0,
            attrs: &raw mut attribute,
            numAttrs: 1,
        };
        // SAFETY: function, stream and attribute are alive; the caller guarantees the rest.
        let status = unsafe {
            sys::cuLaunchKernelEx(&config, function.raw, params.as_mut_ptr(), std::ptr::null_mut())
        };
        Ok(status.result()?)
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

    /// Allocates what the first launch of a captured graph needs, ahead of it.
    pub(crate) fn upload_graph(&self, graph: &GraphExec) -> CudaResult<()> {
        // SAFETY: both objects are alive.
        Ok(unsafe { sys::cuGraphUpload(graph.0, self.0) }.result()?)
    }

    /// Launches a captured graph.
    ///
    /// # Safety
    /// What was promised for each captured kernel, copy and collective must hold for this launch too.
    pub(crate) unsafe fn launch_graph(&self, graph: &GraphExec) -> CudaResult<()> {
        // SAFETY: both objects are alive; the caller guarantees the work of the graph.
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

    /// Makes a stream of another library wait for the work before the event.
    ///
    /// # Safety
    /// `stream` must be the handle of a stream of this process that exists during the call, or 1 or 2 for the
    /// default streams.
    pub(crate) unsafe fn delay_stream(&self, stream: u64) -> CudaResult<()> {
        let (raw, flags) = (stream as sys::CUstream, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT);
        // SAFETY: the event is alive; the caller guarantees the stream.
        Ok(unsafe { result::stream::wait_event(raw, self.0, flags) }?)
    }

    /// Waits until all work before the event has completed.
    pub(crate) fn synchronize(&self) -> CudaResult<()> {
        // SAFETY: the event is alive.
        Ok(unsafe { result::event::synchronize(self.0) }?)
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
    ///
    /// # Safety
    /// The image must be a complete cubin: it contains its own length, beyond which the driver reads.
    pub(crate) unsafe fn load(image: &[u8]) -> CudaResult<CudaModule> {
        // SAFETY: the caller guarantees that the image is complete.
        let raw = unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) }?;
        Ok(CudaModule(Arc::new(LoadedModule(raw))))
    }

    pub(crate) fn get_function(&self, name: &str) -> CudaResult<KernelFunction> {
        let c = CString::new(name).map_err(|_| CudaError(format!("kernel name {name:?}")))?;
        // SAFETY: the module is alive.
        let f = unsafe { result::module::get_function(self.0.0, c) };
        let raw = f.map_err(|e| CudaError(format!("kernel {name}: {}", CudaError::from(e))))?;
        Ok(KernelFunction { raw, _module: Arc::clone(&self.0) })
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // SAFETY: loaded once, and no kernel of it is left.
        let _ = unsafe { result::module::unload(self.0) };
    }
}

impl KernelFunction {
    /// Returns how many blocks with this number of threads one multiprocessor can run at once.
    pub(crate) fn max_active_blocks(&self, threads: u32) -> CudaResult<u32> {
        let mut blocks = 0;
        // SAFETY: the function is alive; the driver writes one int to this stack frame.
        unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.raw, threads as c_int, 0)
        }
        .result()?;
        Ok(blocks.max(1) as u32)
    }

    /// Allows the kernel more dynamic shared memory than the default limit of 48 KiB.
    pub(crate) fn set_max_shared_bytes(&self, bytes: u32) -> CudaResult<()> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is alive.
        Ok(unsafe { result::function::set_function_attribute(self.raw, which, bytes as c_uint as c_int) }?)
    }
}

impl Drop for GraphExec {
    fn drop(&mut self) {
        // SAFETY: instantiated once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
