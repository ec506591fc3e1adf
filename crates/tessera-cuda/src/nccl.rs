//! Bindings to the NCCL functions in use, loaded at run time, and non-blocking communicators.
//!
//! A communicator is created with `blocking = 0`: an unfinished call returns "in progress" and is
//! polled until a deadline or until the backend is stopped. Multicast (NVLS) is left to NCCL's
//! environment variables, which this crate does not touch: a communicator's configuration has no
//! switch for it.

#![allow(unsafe_code, reason = "NCCL's own functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tessera_base::{Code, Diagnostic};
use tessera_ir::DType;
use tessera_mesh::Reduction;

use crate::driver::{CudaError, CudaResult, CudaStream, cuda_failure};
use crate::libraries::{Libraries, Library, MissingLibrary};

/// Raised if an NCCL call fails outside a run.
pub static T1303: Code = Code {
    id: "T1303",
    title: "NCCL failed",
    page: "An NCCL function failed outside a run; the message carries NCCL's own error text. Creating a group's id needs no GPU, but \
it needs a network interface that the other members can reach: NCCL_SOCKET_IFNAME selects one if NCCL picks the wrong one, and \
NCCL_DEBUG=WARN makes NCCL print details on standard error. If a function is missing, the library is older than 2.18: `tessera doctor` \
shows the loaded version and its path, and TESSERA_CUDA_LIBS lists folders that are searched first.",
};

/// The id with which the members of a group find one another: one member creates it and distributes
/// it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// Creates an id for a group. Needs no GPU.
///
/// # Errors
/// T1301 if NCCL is missing, T1303 if the call fails.
pub fn unique_id(libraries: &Libraries) -> Result<UniqueId, Diagnostic> {
    if let Some(missing) = libraries.missing.iter().find(|l| l.library == Library::Nccl) {
        return Err(MissingLibrary::to_diagnostic(missing));
    }
    let to_diagnostic = |e: CudaError| Diagnostic::error(&T1303, e.to_string());
    let api = NcclApi::load(libraries).map_err(to_diagnostic)?;
    let mut id = UniqueId([0; 128]);
    api.check_result("ncclGetUniqueId", None, (api.get_unique_id)(&mut id)).map_err(to_diagnostic)?;
    Ok(id)
}

type RawCommunicator = *mut c_void;
type ConstBuffer = *const c_void;
type MutBuffer = *mut c_void;
type RawStream = cudarc::driver::sys::CUstream;
type ReduceFn =
    extern "C" fn(ConstBuffer, MutBuffer, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;

const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// `ncclConfig_t` of 2.28. Newer libraries read only the first `size` bytes.
#[repr(C)]
struct NcclConfig {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    min_ctas: c_int,
    max_ctas: c_int,
    net_name: *const c_char,
    split_share: c_int,
    traffic_class: c_int,
    comm_name: *const c_char,
    collnet_enable: c_int,
    cta_policy: c_int,
    shrink_share: c_int,
    nvls_ctas: c_int,
    channels_per_net_peer: c_int,
    nvlink_centric_sched: c_int,
}

impl NcclConfig {
    fn new() -> NcclConfig {
        let unset = c_int::MIN;
        NcclConfig {
            size: size_of::<NcclConfig>(),
            magic: 0xcafe_beef,
            version: 22809,
            blocking: 0,
            cga_cluster_size: unset,
            min_ctas: unset,
            max_ctas: unset,
            net_name: std::ptr::null(),
            split_share: unset,
            traffic_class: unset,
            comm_name: std::ptr::null(),
            collnet_enable: 0,
            cta_policy: unset,
            shrink_share: unset,
            nvls_ctas: unset,
            channels_per_net_peer: unset,
            nvlink_centric_sched: unset,
        }
    }
}

macro_rules! api {
    ($($field:ident = $name:literal : fn($($arg:ty),*) -> $out:ty;)*) => {
        /// Functions of NCCL, resolved by symbol from the loaded library.
        #[derive(Clone, Copy)]
        struct NcclApi {
            $($field: extern "C" fn($($arg),*) -> $out,)*
        }

        impl NcclApi {
            fn load(libraries: &Libraries) -> CudaResult<NcclApi> {
                let found = libraries.found.iter().find(|f| f.library == Library::Nccl);
                let version = found.and_then(|f| f.version.as_deref()).unwrap_or("of unknown version");
                Ok(NcclApi {
                    $($field: {
                        // SAFETY: NCCL's header declares this type for the function.
                        let symbol = unsafe { libraries.get_symbol::<extern "C" fn($($arg),*) -> $out>(Library::Nccl, $name) };
                        *symbol.ok_or_else(|| CudaError(format!("NCCL {version} has no {}", $name)))?
                    },)*
                })
            }
        }
    };
}

api! {
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    init = "ncclCommInitRankConfig": fn(*mut RawCommunicator, c_int, UniqueId, c_int, *mut NcclConfig) -> c_int;
    finalize = "ncclCommFinalize": fn(RawCommunicator) -> c_int;
    destroy = "ncclCommDestroy": fn(RawCommunicator) -> c_int;
    abort = "ncclCommAbort": fn(RawCommunicator) -> c_int;
    async_error = "ncclCommGetAsyncError": fn(RawCommunicator, *mut c_int) -> c_int;
    error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    last_error = "ncclGetLastError": fn(RawCommunicator) -> *const c_char;
    all_reduce = "ncclAllReduce": fn(ConstBuffer, MutBuffer, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    all_gather = "ncclAllGather": fn(ConstBuffer, MutBuffer, usize, c_int, RawCommunicator, RawStream) -> c_int;
    reduce_scatter = "ncclReduceScatter": fn(ConstBuffer, MutBuffer, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    broadcast = "ncclBroadcast": fn(ConstBuffer, MutBuffer, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    send = "ncclSend": fn(ConstBuffer, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    recv = "ncclRecv": fn(MutBuffer, usize, c_int, c_int, RawCommunicator, RawStream) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
}

impl std::fmt::Debug for NcclApi {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

impl NcclApi {
    fn copy_c_string(at: *const c_char) -> String {
        if at.is_null() {
            return String::new();
        }
        // SAFETY: NCCL's strings are NUL-terminated and never freed.
        unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
    }

    fn check_result(&self, call: &str, comm: Option<RawCommunicator>, result: c_int) -> CudaResult<()> {
        if result == SUCCESS {
            return Ok(());
        }
        let what = NcclApi::copy_c_string((self.error_string)(result));
        let more = NcclApi::copy_c_string((self.last_error)(comm.unwrap_or(std::ptr::null_mut())));
        cuda_failure(match more.trim() {
            "" => format!("{call}: {what}"),
            more => format!("{call}: {what}: {more}"),
        })
    }
}

/// One member's communicator. One thread at a time may use it, and any thread may abort it.
#[derive(Debug)]
pub(crate) struct NcclCommunicator {
    shared: Arc<CommunicatorState>,
    timeout: Duration,
}

/// A handle that aborts a communicator from any thread.
#[derive(Debug, Clone)]
pub(crate) struct CommunicatorAborter(Arc<CommunicatorState>);

#[derive(Debug)]
struct CommunicatorState {
    api: NcclApi,
    /// The communicator; `None` once it was aborted or destroyed.
    handle: Mutex<Option<CommunicatorHandle>>,
    /// Set to make all waits return.
    is_stopping: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy)]
struct CommunicatorHandle(RawCommunicator);

// SAFETY: NCCL allows any thread to use a communicator, one at a time; the mutex guarantees this.
unsafe impl Send for CommunicatorHandle {}

/// Time limit for NCCL to destroy a communicator in an orderly way.
const DESTROY_TIMEOUT: Duration = Duration::from_secs(2);

impl NcclCommunicator {
    /// Initialises this member's communicator together with all members. Members that create
    /// several communicators must do so in the same order.
    pub(crate) fn init_rank(
        libraries: &Libraries,
        id: &UniqueId,
        (member, member_count): (usize, usize),
        timeout: Duration,
        is_stopping: Arc<AtomicBool>,
    ) -> CudaResult<NcclCommunicator> {
        let api = NcclApi::load(libraries)?;
        let mut raw = std::ptr::null_mut();
        let mut config = NcclConfig::new();
        let result = (api.init)(&mut raw, member_count as c_int, *id, member as c_int, &mut config);
        if result != SUCCESS && result != IN_PROGRESS {
            api.check_result("ncclCommInitRankConfig", None, result)?;
        }
        let comm = NcclCommunicator {
            shared: Arc::new(CommunicatorState {
                api,
                handle: Mutex::new(Some(CommunicatorHandle(raw))),
                is_stopping,
            }),
            timeout,
        };
        if let Err(e) = comm.wait_until_done("ncclCommInitRankConfig", result, timeout) {
            // A partially initialised communicator cannot be finalised, only aborted.
            comm.aborter().abort_within(DESTROY_TIMEOUT);
            return Err(e);
        }
        Ok(comm)
    }

    pub(crate) fn aborter(&self) -> CommunicatorAborter {
        CommunicatorAborter(self.shared.clone())
    }

    /// Returns the asynchronous error, if there is one, and whether it occurred at another member.
    pub(crate) fn async_error(&self) -> Option<(String, bool)> {
        let raw = self.shared.lock_handle().map(|h| h.0)?;
        let mut state = SUCCESS;
        let status = (self.shared.api.async_error)(raw, &mut state);
        let state = if status == SUCCESS { state } else { status };
        if state == IN_PROGRESS {
            return None;
        }
        let why = self.shared.api.check_result("NCCL", Some(raw), state).err()?.0;
        Some((why, state == REMOTE_ERROR))
    }

    /// Gathers `bytes` bytes of every member at `to`, in member order.
    pub(crate) fn all_gather(&self, from: u64, to: u64, bytes: usize, stream: &CudaStream) -> CudaResult<()> {
        self.call_nccl("ncclAllGather", |api, raw| {
            (api.all_gather)(from as ConstBuffer, to as MutBuffer, bytes, NCCL_INT8, raw, stream.as_raw())
        })
    }

    pub(crate) fn launch_broadcast(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        root: usize,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        self.call_nccl("ncclBroadcast", |api, raw| {
            (api.broadcast)(
                from as ConstBuffer,
                to as MutBuffer,
                bytes,
                NCCL_INT8,
                root as c_int,
                raw,
                stream.as_raw(),
            )
        })
    }

    pub(crate) fn all_reduce(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        reduction: (DType, Reduction),
        stream: &CudaStream,
    ) -> CudaResult<()> {
        self.launch_reduction(
            ("ncclAllReduce", |api| api.all_reduce),
            (from, to, elements),
            reduction,
            stream,
        )
    }

    /// Reduces and scatters; `elements` is the number of elements that each member receives.
    pub(crate) fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        reduction: (DType, Reduction),
        stream: &CudaStream,
    ) -> CudaResult<()> {
        self.launch_reduction(
            ("ncclReduceScatter", |api| api.reduce_scatter),
            (from, to, elements),
            reduction,
            stream,
        )
    }

    fn launch_reduction(
        &self,
        (name, select_function): (&'static str, fn(&NcclApi) -> ReduceFn),
        (from, to, elements): (u64, u64, usize),
        (dtype, reduction): (DType, Reduction),
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (dtype, operator) = (nccl_dtype(dtype)?, nccl_operator(reduction));
        self.call_nccl(name, |api, raw| {
            select_function(api)(
                from as ConstBuffer,
                to as MutBuffer,
                elements,
                dtype,
                operator,
                raw,
                stream.as_raw(),
            )
        })
    }

    /// Sends and receives in one NCCL group. Entries are (member, address, bytes).
    pub(crate) fn send_and_recv(
        &self,
        sends: &[(usize, u64, usize)],
        receives: &[(usize, u64, usize)],
        stream: &CudaStream,
    ) -> CudaResult<()> {
        self.call_nccl("ncclGroupEnd", |api, raw| {
            let mut first = (api.group_start)();
            let mut note = |result: c_int| {
                if first == SUCCESS && result != IN_PROGRESS {
                    first = result;
                }
            };
            for (member, at, bytes) in sends {
                note((api.send)(
                    *at as ConstBuffer,
                    *bytes,
                    NCCL_INT8,
                    *member as c_int,
                    raw,
                    stream.as_raw(),
                ));
            }
            for (member, at, bytes) in receives {
                note((api.recv)(*at as MutBuffer, *bytes, NCCL_INT8, *member as c_int, raw, stream.as_raw()));
            }
            let ended = (api.group_end)();
            if first == SUCCESS { ended } else { first }
        })
    }

    fn call_nccl(&self, name: &str, f: impl FnOnce(&NcclApi, RawCommunicator) -> c_int) -> CudaResult<()> {
        self.call_with_timeout(name, self.timeout, f)
    }

    fn call_with_timeout(
        &self,
        name: &str,
        timeout: Duration,
        f: impl FnOnce(&NcclApi, RawCommunicator) -> c_int,
    ) -> CudaResult<()> {
        let result = {
            let guard = self.shared.lock_handle();
            let Some(handle) = *guard else {
                return cuda_failure(format!("{name}: the communicator was aborted"));
            };
            f(&self.shared.api, handle.0)
        };
        self.wait_until_done(name, result, timeout)
    }

    /// Waits until a call that may be in progress has completed.
    fn wait_until_done(&self, name: &str, initial: c_int, timeout: Duration) -> CudaResult<()> {
        let deadline = Instant::now() + timeout;
        let mut result = initial;
        loop {
            {
                let guard = self.shared.lock_handle();
                let Some(handle) = *guard else {
                    return cuda_failure(format!("{name}: the communicator was aborted"));
                };
                if result == IN_PROGRESS {
                    let status = (self.shared.api.async_error)(handle.0, &mut result);
                    if status != SUCCESS {
                        result = status;
                    }
                }
                if result != IN_PROGRESS {
                    return self.shared.api.check_result(name, Some(handle.0), result);
                }
            }
            if self.shared.is_stopping.load(Ordering::Acquire) {
                return cuda_failure(format!("{name}: aborted while in progress"));
            }
            if Instant::now() > deadline {
                return cuda_failure(format!("{name}: still in progress after {} ms", timeout.as_millis()));
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for NcclCommunicator {
    /// Finalises and destroys the communicator if the other members do the same in time, and aborts
    /// it otherwise. Graphs that contain its operations have been destroyed by now.
    fn drop(&mut self) {
        let finalized =
            self.call_with_timeout("ncclCommFinalize", DESTROY_TIMEOUT, |api, raw| (api.finalize)(raw));
        let Some(handle) = self.shared.lock_handle().take() else { return };
        let api = self.shared.api;
        let release = if finalized.is_ok() { api.destroy } else { api.abort };
        run_with_timeout(handle, release, DESTROY_TIMEOUT);
    }
}

impl CommunicatorState {
    fn lock_handle(&self) -> MutexGuard<'_, Option<CommunicatorHandle>> {
        self.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl CommunicatorAborter {
    /// Aborts the communicator and its operations on the device. Returns whether NCCL finished in
    /// time. Every later call fails.
    pub(crate) fn abort_within(&self, timeout: Duration) -> bool {
        self.0.is_stopping.store(true, Ordering::Release);
        let until = Instant::now() + timeout;
        // The lock's holder is inside a call that does not block, or inside one that will never
        // return.
        let handle = loop {
            match self.0.handle.try_lock() {
                Ok(mut held) => break held.take(),
                Err(std::sync::TryLockError::Poisoned(held)) => break held.into_inner().take(),
                Err(std::sync::TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::yield_now()
                }
                Err(std::sync::TryLockError::WouldBlock) => return false,
            }
        };
        handle.is_none_or(|h| {
            run_with_timeout(h, self.0.api.abort, until.saturating_duration_since(Instant::now()))
        })
    }
}

/// Calls a function that may never return, on a thread of its own. Returns whether it finished in
/// time; if not, the thread is leaked.
fn run_with_timeout(
    handle: CommunicatorHandle,
    call: extern "C" fn(RawCommunicator) -> c_int,
    timeout: Duration,
) -> bool {
    let (done_sender, done_receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().name("nccl-end".into()).spawn(move || {
        let sent_handle = handle;
        let _ = call(sent_handle.0);
        let _ = done_sender.send(());
    });
    thread.is_ok() && done_receiver.recv_timeout(timeout).is_ok()
}

const NCCL_INT8: c_int = 0;

fn nccl_dtype(dtype: DType) -> CudaResult<c_int> {
    match dtype {
        DType::F32 => Ok(7),
        DType::Bf16 => Ok(9),
        other => cuda_failure(format!("no reduction of {}", other.name())),
    }
}

/// Returns NCCL's reduction operator. NCCL chooses the order of additions; the order is the same on
/// every member and in every run, and bf16 is rounded at each step. Its maximum is not specified
/// for NaN.
fn nccl_operator(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum | Reduction::Tree => 0,
        Reduction::Max => 2,
    }
}
