//! The driver's objects as owned values: a context, memory, streams, events, modules, graphs.
//!
//! Thin by intent. Nothing here allocates, synchronises or frees but where its name says so; all work of a backend goes
//! through one [`Context`], which is made current on whichever thread enters the backend.

#![allow(unsafe_code, reason = "the driver's own functions")]

use std::ffi::{CString, c_int, c_uint, c_void};
use std::fmt;

use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUresult};

/// A call of a library that failed, in words.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed(pub(crate) String);

/// What a call gives.
pub(crate) type Done<T> = Result<T, Failed>;

impl fmt::Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl From<DriverError> for Failed {
    fn from(e: DriverError) -> Failed {
        let name = e.error_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        let text = e.error_string().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        Failed(format!("{name}: {text}"))
    }
}

pub(crate) fn failed<T>(what: impl Into<String>) -> Done<T> {
    Err(Failed(what.into()))
}

/// A device's primary context.
#[derive(Debug)]
pub(crate) struct Context {
    device: sys::CUdevice,
    raw: sys::CUcontext,
}

// SAFETY: the driver allows any thread to use a context; it is made current by `bind`.
unsafe impl Send for Context {}
// SAFETY: as above; nothing of it changes.
unsafe impl Sync for Context {}

/// Bytes on a device.
#[derive(Debug)]
pub(crate) struct Memory {
    at: u64,
    bytes: usize,
}

/// Memory of the host that a device reads and writes.
#[derive(Debug)]
pub(crate) struct Pinned {
    at: *mut u8,
    bytes: usize,
}

// SAFETY: it is owned like a vector; the device touches it only in work that its owner launches.
unsafe impl Send for Pinned {}

/// A queue of work.
#[derive(Debug)]
pub(crate) struct Stream(sys::CUstream);

// SAFETY: the driver allows any thread to use a stream.
unsafe impl Send for Stream {}

/// A point on a stream.
#[derive(Debug)]
pub(crate) struct Event(sys::CUevent);

// SAFETY: the driver allows any thread to use an event.
unsafe impl Send for Event {}

/// Compiled kernels on the device.
#[derive(Debug)]
pub(crate) struct Module(sys::CUmodule);

// SAFETY: the driver allows any thread to use a module.
unsafe impl Send for Module {}

/// A kernel of a module; it lives as long as the module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Function(sys::CUfunction);

// SAFETY: the driver allows any thread to use a function.
unsafe impl Send for Function {}

/// A captured graph, ready to be launched again and again.
#[derive(Debug)]
pub(crate) struct Graph(sys::CUgraphExec);

// SAFETY: a graph is launched by its owner alone.
unsafe impl Send for Graph {}

/// Arguments of a kernel, in order.
#[derive(Debug, Default)]
pub(crate) struct Args {
    words: Vec<u64>,
    /// Arguments that are more than a word, by place.
    maps: Vec<(usize, sys::CUtensorMap)>,
    structs: Vec<(usize, Vec<u64>)>,
}

impl Args {
    pub(crate) fn new() -> Args {
        Args::default()
    }

    /// A device address.
    pub(crate) fn at(mut self, address: u64) -> Args {
        self.words.push(address);
        self
    }

    /// A map of a tensor, by value.
    pub(crate) fn map(mut self, map: sys::CUtensorMap) -> Args {
        self.maps.push((self.words.len(), map));
        self.words.push(0);
        self
    }

    /// A struct of so many words, by value.
    pub(crate) fn words(mut self, words: Vec<u64>) -> Args {
        self.structs.push((self.words.len(), words));
        self.words.push(0);
        self
    }

    /// An `int`.
    pub(crate) fn int(mut self, v: i64) -> Args {
        self.words.push(u64::from(v as i32 as u32));
        self
    }

    /// A `long long`.
    pub(crate) fn long(mut self, v: i64) -> Args {
        self.words.push(v as u64);
        self
    }

    /// A `float`.
    pub(crate) fn float(mut self, v: f32) -> Args {
        self.words.push(u64::from(v.to_bits()));
        self
    }
}

impl Context {
    pub(crate) fn open(ordinal: u32) -> Done<Context> {
        result::init()?;
        let device = result::device::get(ordinal as c_int)?;
        // SAFETY: the driver is up and gave this device; the reference is given back on drop.
        let raw = unsafe { result::primary_ctx::retain(device) }?;
        let context = Context { device, raw };
        context.bind()?;
        Ok(context)
    }

    /// Makes it the calling thread's.
    pub(crate) fn bind(&self) -> Done<()> {
        // SAFETY: the context is retained.
        Ok(unsafe { result::ctx::set_current(self.raw) }?)
    }

    pub(crate) fn attribute(&self, which: sys::CUdevice_attribute) -> Done<i32> {
        // SAFETY: the driver gave this device.
        Ok(unsafe { result::device::get_attribute(self.device, which) }?)
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once in `open`. A device that is lost cannot be released; there is nobody to tell.
        let _ = unsafe { result::primary_ctx::release(self.device) };
    }
}

impl Memory {
    pub(crate) fn new(bytes: usize) -> Done<Memory> {
        let bytes = bytes.max(256);
        // SAFETY: the memory is written before it is read, by `zero` or by kernels.
        let at = unsafe { result::malloc_sync(bytes) }
            .map_err(|e| Failed(format!("no {bytes} bytes on the device: {}", Failed::from(e))))?;
        Ok(Memory { at, bytes })
    }

    pub(crate) fn at(&self) -> u64 {
        self.at
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Zeroes it; returns when it is done.
    pub(crate) fn zero(&self) -> Done<()> {
        // SAFETY: the range is this allocation's.
        unsafe { result::memset_d8_sync(self.at, 0, self.bytes) }?;
        settled()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated once in `new`.
        let _ = unsafe { result::free_sync(self.at) };
    }
}

/// Waits for work of the default stream. Streams of this crate are not ordered after it, and a copy from pageable memory may
/// still be on its way when its call returns.
fn settled() -> Done<()> {
    // SAFETY: the default stream always is.
    Ok(unsafe { result::stream::synchronize(result::stream::null()) }?)
}

/// Copies to the device; returns when it is there.
pub(crate) fn upload<T: Copy>(to: u64, from: &[T]) -> Done<()> {
    if from.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's range on the device is at least as long as the slice.
    unsafe { result::memcpy_htod_sync(to, from) }?;
    settled()
}

/// Copies from the device; returns when it is there.
pub(crate) fn download<T: Copy>(to: &mut [T], from: u64) -> Done<()> {
    if to.is_empty() {
        return Ok(());
    }
    // SAFETY: the caller's range on the device is at least as long as the slice.
    Ok(unsafe { result::memcpy_dtoh_sync(to, from) }?)
}

impl Pinned {
    pub(crate) fn new(bytes: usize) -> Done<Pinned> {
        let bytes = bytes.max(64);
        // Mapped and not write-combined: both sides read it.
        let flags = sys::CU_MEMHOSTALLOC_PORTABLE | sys::CU_MEMHOSTALLOC_DEVICEMAP;
        // SAFETY: freed on drop.
        let at = unsafe { result::malloc_host(bytes, flags) }?.cast::<u8>();
        // SAFETY: the allocation has so many bytes.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Pinned { at, bytes })
    }

    /// Address on the host, which under unified addressing is also the device's.
    pub(crate) fn at(&self) -> u64 {
        self.at as u64
    }

    /// Elements from a byte offset on. No work that writes them may be under way.
    pub(crate) fn slice<T: Copy>(&self, offset: usize, len: usize) -> &[T] {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + len * size_of::<T>() <= self.bytes);
        // SAFETY: the range lies inside the allocation, is aligned and initialised; plain numbers have no invalid bits.
        unsafe { std::slice::from_raw_parts(self.at.add(offset).cast::<T>(), len) }
    }

    /// The same to write. No work that reads or writes them may be under way.
    pub(crate) fn slice_mut<T: Copy>(&mut self, offset: usize, len: usize) -> &mut [T] {
        assert!(offset.is_multiple_of(align_of::<T>()) && offset + len * size_of::<T>() <= self.bytes);
        // SAFETY: as in `slice`, and borrowed alone.
        unsafe { std::slice::from_raw_parts_mut(self.at.add(offset).cast::<T>(), len) }
    }

    /// A word that the device may write at any time.
    pub(crate) fn word(&self, index: usize) -> &std::sync::atomic::AtomicU32 {
        assert!((index + 1) * 4 <= self.bytes);
        // SAFETY: inside the allocation and aligned; all access to it from the host is atomic.
        unsafe { &*self.at.cast::<std::sync::atomic::AtomicU32>().add(index) }
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        // SAFETY: allocated once in `new`.
        let _ = unsafe { result::free_host(self.at.cast::<c_void>()) };
    }
}

impl Stream {
    /// A stream that the legacy default stream does not order. An urgent one goes before others where both could run.
    pub(crate) fn new(urgent: bool) -> Done<Stream> {
        let (_, greatest) = result::stream::get_priority_range()?;
        let priority = if urgent { greatest } else { 0 };
        Ok(Stream(result::stream::create_with_priority(result::stream::StreamKind::NonBlocking, priority)?))
    }

    pub(crate) fn raw(&self) -> sys::CUstream {
        self.0
    }

    pub(crate) fn record(&self, event: &Event) -> Done<()> {
        // SAFETY: both live.
        Ok(unsafe { result::event::record(event.0, self.0) }?)
    }

    /// Inside a capture: makes a node that records a timed event whenever the graph comes by.
    pub(crate) fn mark(&self, event: &Event) -> Done<()> {
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as c_uint;
        // SAFETY: both live; whoever keeps the graph keeps the event.
        Ok(unsafe { sys::cuEventRecordWithFlags(event.0, self.0, external) }.result()?)
    }

    pub(crate) fn wait(&self, event: &Event) -> Done<()> {
        // SAFETY: both live.
        Ok(unsafe {
            result::stream::wait_event(self.0, event.0, sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT)
        }?)
    }

    /// Copies between device and host or within the device, whichever the addresses are of.
    pub(crate) fn copy(&self, to: u64, from: u64, bytes: usize) -> Done<()> {
        if bytes == 0 {
            return Ok(());
        }
        // SAFETY: the caller's ranges are that long and stay until the stream has passed.
        Ok(unsafe { sys::cuMemcpyAsync(to, from, bytes, self.0) }.result()?)
    }

    /// Copies `rows` runs of `bytes` each, on the device or between devices; runs begin a pitch apart.
    pub(crate) fn copy_rows(
        &self,
        to: (u64, usize),
        from: (u64, usize),
        bytes: usize,
        rows: usize,
    ) -> Done<()> {
        if bytes == 0 || rows == 0 {
            return Ok(());
        }
        // The driver looks up which device an address is of.
        let (any, none) = (sys::CUmemorytype::CU_MEMORYTYPE_UNIFIED, std::ptr::null_mut());
        let copy = sys::CUDA_MEMCPY2D_st {
            srcXInBytes: 0,
            srcY: 0,
            srcMemoryType: any,
            srcHost: none,
            srcDevice: from.0,
            srcArray: std::ptr::null_mut(),
            srcPitch: from.1,
            dstXInBytes: 0,
            dstY: 0,
            dstMemoryType: any,
            dstHost: none,
            dstDevice: to.0,
            dstArray: std::ptr::null_mut(),
            dstPitch: to.1,
            WidthInBytes: bytes,
            Height: rows,
        };
        // SAFETY: the caller's ranges hold that many runs and stay until the stream has passed.
        Ok(unsafe { sys::cuMemcpy2DAsync_v2(&copy, self.0) }.result()?)
    }

    pub(crate) fn zero(&self, at: u64, bytes: usize) -> Done<()> {
        // SAFETY: the caller's range is that long.
        Ok(unsafe { result::memset_d8_async(at, 0, bytes, self.0) }?)
    }

    /// Launches a kernel.
    pub(crate) fn launch(
        &self,
        f: Function,
        grid: [u32; 3],
        block: u32,
        shared: u32,
        mut args: Args,
    ) -> Done<()> {
        let mut pointers: Vec<*mut c_void> =
            args.words.iter_mut().map(|a| std::ptr::from_mut(a).cast::<c_void>()).collect();
        for (place, map) in &mut args.maps {
            pointers[*place] = std::ptr::from_mut(map).cast::<c_void>();
        }
        for (place, words) in &mut args.structs {
            pointers[*place] = words.as_mut_ptr().cast::<c_void>();
        }
        // SAFETY: the kernel's parameters are those that its wrapper gives, each as wide as its argument.
        Ok(unsafe {
            result::launch_kernel(
                f.0,
                (grid[0], grid[1], grid[2]),
                (block, 1, 1),
                shared,
                self.0,
                &mut pointers,
            )
        }?)
    }

    /// Until what was launched so far is done, which the event marks.
    pub(crate) fn finish(&self, end: &Event) -> Done<()> {
        self.record(end)?;
        while !end.passed()? {
            std::hint::spin_loop();
        }
        Ok(())
    }

    /// From here on work of this stream, and of streams that come to wait for it, is recorded and not done.
    pub(crate) fn begin_capture(&self) -> Done<()> {
        let mode = sys::CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: it lives.
        Ok(unsafe { result::stream::begin_capture(self.0, mode) }?)
    }

    pub(crate) fn end_capture(&self) -> Done<Graph> {
        // SAFETY: a capture was begun; the graph is destroyed once it is instantiated, which copies it.
        unsafe {
            let graph = result::stream::end_capture(self.0)?;
            let mut exec = std::ptr::null_mut();
            let made = sys::cuGraphInstantiateWithFlags(&mut exec, graph, 0).result();
            result::graph::destroy(graph)?;
            made?;
            Ok(Graph(exec))
        }
    }

    pub(crate) fn replay(&self, graph: &Graph) -> Done<()> {
        // SAFETY: both live.
        Ok(unsafe { result::graph::launch(graph.0, self.0) }?)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made once in `new`.
        let _ = unsafe { result::stream::destroy(self.0) };
    }
}

impl Event {
    /// For order alone.
    pub(crate) fn new() -> Done<Event> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DISABLE_TIMING)?))
    }

    /// One that says when it passed.
    pub(crate) fn timed() -> Done<Event> {
        Ok(Event(result::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)?))
    }

    /// Whether it has passed.
    pub(crate) fn passed(&self) -> Done<bool> {
        // SAFETY: it lives.
        match unsafe { result::event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }

    /// Milliseconds from this one to another; both have passed.
    pub(crate) fn until_ms(&self, end: &Event) -> Done<f32> {
        // SAFETY: both live.
        Ok(unsafe { result::event::elapsed(self.0, end.0) }?)
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made once.
        let _ = unsafe { result::event::destroy(self.0) };
    }
}

impl Module {
    /// From a cubin.
    pub(crate) fn load(image: &[u8]) -> Done<Module> {
        // SAFETY: the image is a whole cubin, which says its own length.
        Ok(Module(unsafe { result::module::load_data(image.as_ptr().cast::<c_void>()) }?))
    }

    pub(crate) fn function(&self, name: &str) -> Done<Function> {
        let c = CString::new(name).map_err(|_| Failed(format!("kernel name {name:?}")))?;
        // SAFETY: the module lives.
        let f = unsafe { result::module::get_function(self.0, c) };
        Ok(Function(f.map_err(|e| Failed(format!("kernel {name}: {}", Failed::from(e))))?))
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded once.
        let _ = unsafe { result::module::unload(self.0) };
    }
}

impl Function {
    pub(crate) fn raw(self) -> sys::CUfunction {
        self.0
    }

    /// Blocks of so many threads that a multiprocessor holds at once.
    pub(crate) fn blocks_at_once(self, threads: u32) -> Done<u32> {
        let mut blocks = 0;
        // SAFETY: the function lives as long as its module.
        unsafe { sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(&mut blocks, self.0, threads as c_int, 0) }
            .result()?;
        Ok(blocks.max(1) as u32)
    }

    /// Allows it more dynamic shared memory than the 48 KiB that every kernel may have.
    pub(crate) fn allow_shared(self, bytes: u32) -> Done<()> {
        let which = sys::CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function lives as long as its module.
        Ok(unsafe { result::function::set_function_attribute(self.0, which, bytes as c_uint as c_int) }?)
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: instantiated once.
        let _ = unsafe { result::graph::exec_destroy(self.0) };
    }
}
