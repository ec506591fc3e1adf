//! Non-blocking communicators of NCCL.
//!
//! A communicator is created with `blocking = 0`: an unfinished call returns "in progress" and is
//! polled until a deadline or until the backend is stopped. Multicast (NVLS) is left to NCCL's
//! environment variables, which this crate does not touch: a communicator's configuration has no
//! switch for it.

#![allow(unsafe_code, reason = "NCCL's own functions")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use cudarc::nccl::sys::{ncclComm_t, ncclConfig_t, ncclDataType_t, ncclRedOp_t, ncclResult_t, ncclUniqueId};
use tessera_base::Diagnostic;
use tessera_ir::DType;
use tessera_mesh::Reduction;

use crate::codes::T1303;
use crate::driver::{CudaError, CudaResult, CudaStream, cuda_failure};
use crate::dylib::Nccl;
use crate::libraries::{Libraries, Library};

/// The id with which the members of a group find one another: one member creates it and distributes
/// it to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UniqueId(pub [u8; 128]);

/// Creates an id for a group. Needs no GPU.
///
/// # Errors
/// T1301 if NCCL is missing, T1303 if the call fails.
pub fn unique_id(libraries: &Libraries) -> Result<UniqueId, Diagnostic> {
    libraries.check_loaded(Library::Nccl)?;
    let to_diagnostic = |e: CudaError| Diagnostic::error(&T1303, e.to_string());
    let api = Nccl::find_functions(libraries).map_err(to_diagnostic)?;
    let mut id = ncclUniqueId { internal: [0; 128] };
    // SAFETY: NCCL writes the id to this stack frame.
    let created = unsafe { (api.get_unique_id)(&mut id) };
    api.check_result("ncclGetUniqueId", None, created).map_err(to_diagnostic)?;
    Ok(UniqueId(id.internal.map(|b| b as u8)))
}

type ConstBuffer = *const c_void;
type MutBuffer = *mut c_void;

const SUCCESS: c_int = ncclResult_t::ncclSuccess as c_int;
const REMOTE_ERROR: c_int = ncclResult_t::ncclRemoteError as c_int;
const IN_PROGRESS: c_int = ncclResult_t::ncclInProgress as c_int;

/// The magic number and the version of `NCCL_CONFIG_INITIALIZER` in the header that cudarc's
/// `ncclConfig_t` was generated from. An older library ignores the fields that it does not know, and a
/// newer one does not read beyond `size`.
const CONFIG_MAGIC: u32 = 0xcafe_beef;
const CONFIG_VERSION: u32 = 22809;

/// Returns the configuration of a non-blocking communicator.
fn non_blocking_config() -> ncclConfig_t {
    let unset = c_int::MIN;
    ncclConfig_t {
        size: size_of::<ncclConfig_t>(),
        magic: CONFIG_MAGIC,
        version: CONFIG_VERSION,
        blocking: 0,
        cgaClusterSize: unset,
        minCTAs: unset,
        maxCTAs: unset,
        netName: std::ptr::null(),
        splitShare: unset,
        trafficClass: unset,
        commName: std::ptr::null(),
        collnetEnable: 0,
        CTAPolicy: unset,
        shrinkShare: unset,
        nvlsCTAs: unset,
        nChannelsPerNetPeer: unset,
        nvlinkCentricSched: unset,
    }
}

impl Nccl {
    fn find_functions(libraries: &Libraries) -> CudaResult<Nccl> {
        let version = || libraries.describe_version(Library::Nccl);
        Nccl::find_symbols(libraries)
            .map_err(|symbol| CudaError(format!("NCCL {} has no {symbol}", version())))
    }

    /// Copies a string that NCCL returned; null is an empty string.
    ///
    /// # Safety
    /// The string must end with a NUL, and no other thread may write it during the call.
    unsafe fn copy_c_string(at: *const c_char) -> String {
        if at.is_null() {
            return String::new();
        }
        // SAFETY: the caller guarantees it.
        unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
    }

    fn check_result(&self, call: &str, comm: Option<ncclComm_t>, result: c_int) -> CudaResult<()> {
        if result == SUCCESS {
            return Ok(());
        }
        // SAFETY: NCCL accepts any number and returns a constant string.
        let what = unsafe { Nccl::copy_c_string((self.error_string)(result)) };
        // SAFETY: NCCL ignores the communicator, which may be null, and returns a buffer of the
        // calling process that is never freed and that only failing NCCL calls write.
        let more = unsafe { Nccl::copy_c_string((self.last_error)(comm.unwrap_or(std::ptr::null_mut()))) };
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
    api: Nccl,
    /// The communicator; `None` once it was aborted or destroyed.
    handle: Mutex<Option<CommunicatorHandle>>,
    /// Set to make all waits return.
    is_stopping: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy)]
struct CommunicatorHandle(ncclComm_t);

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
        let api = Nccl::find_functions(libraries)?;
        let mut raw = std::ptr::null_mut();
        let mut config = non_blocking_config();
        let id = ncclUniqueId { internal: id.0.map(|b| b as c_char) };
        // SAFETY: NCCL copies the id and the configuration and writes the handle, all of this stack
        // frame. It returns before the members have connected, and refers to none of the three then.
        let result = unsafe { (api.init)(&mut raw, member_count as c_int, id, member as c_int, &mut config) };
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
        // The lock is held during the query: an abort on another thread frees the communicator.
        let guard = self.shared.lock_handle();
        let raw = guard.as_ref()?.0;
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive while the lock is held; NCCL writes one number to this
        // stack frame.
        let status = unsafe { (self.shared.api.async_error)(raw, &mut state) };
        let state = if status == SUCCESS { state } else { status };
        if state == IN_PROGRESS {
            return None;
        }
        let why = self.shared.api.check_result("NCCL", Some(raw), state).err()?.0;
        Some((why, state == REMOTE_ERROR))
    }

    /// Gathers `bytes` bytes of every member at `to`, in member order.
    ///
    /// # Safety
    /// `from` must be a device allocation of `bytes` bytes and `to` one of as many for each member.
    /// Both must stay allocated until the stream has completed the operation; meanwhile no other
    /// stream may write `from` or access `to`.
    pub(crate) unsafe fn all_gather(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (from, to) = (from as ConstBuffer, to as MutBuffer);
        self.call_nccl("ncclAllGather", |api, raw| {
            // SAFETY: the communicator and the stream are alive; the caller guarantees the ranges.
            unsafe { (api.all_gather)(from, to, bytes, BYTE, raw, stream.as_raw()) }
        })
    }

    /// Copies `bytes` bytes from the root's `from` to the `to` of every member.
    ///
    /// # Safety
    /// `from`, which only the root reads, and `to` must be device allocations of `bytes` bytes. Both
    /// must stay allocated until the stream has completed the operation; meanwhile no other stream
    /// may write `from` or access `to`.
    pub(crate) unsafe fn launch_broadcast(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        root: usize,
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (from, to, root) = (from as ConstBuffer, to as MutBuffer, root as c_int);
        self.call_nccl("ncclBroadcast", |api, raw| {
            // SAFETY: the communicator and the stream are alive; the caller guarantees the ranges.
            unsafe { (api.broadcast)(from, to, bytes, BYTE, root, raw, stream.as_raw()) }
        })
    }

    /// Reduces elements of all members. Each member receives the whole result of `elements` elements or,
    /// if it `scatters`, its own `elements` of them.
    ///
    /// # Safety
    /// `to` must be a device allocation of `elements` elements, and `from` one of as many, or of as many
    /// for each member if the reduction scatters. Both must stay allocated until the stream has completed
    /// the operation; meanwhile no other stream may write `from` or access `to`.
    pub(crate) unsafe fn reduce(
        &self,
        scatters: bool,
        (from, to, elements): (u64, u64, usize),
        (dtype, reduction): (DType, Reduction),
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let (dtype, operator) = (nccl_dtype(dtype)?, nccl_operator(reduction));
        let (from, to) = (from as ConstBuffer, to as MutBuffer);
        let name = if scatters { "ncclReduceScatter" } else { "ncclAllReduce" };
        self.call_nccl(name, |api, raw| {
            let function = if scatters { api.reduce_scatter } else { api.all_reduce };
            // SAFETY: the communicator and the stream are alive; the caller guarantees the ranges.
            unsafe { function(from, to, elements, dtype, operator, raw, stream.as_raw()) }
        })
    }

    /// Sends and receives in one NCCL group. Entries are (member, address, bytes).
    ///
    /// # Safety
    /// Every entry must be a range of a device allocation, and those of `receives` must not overlap
    /// any other. All must stay allocated until the stream has completed the operation; meanwhile no
    /// other stream may write a range of `sends` or access one of `receives`.
    pub(crate) unsafe fn send_and_recv(
        &self,
        sends: &[(usize, u64, usize)],
        receives: &[(usize, u64, usize)],
        stream: &CudaStream,
    ) -> CudaResult<()> {
        let on = stream.as_raw();
        self.call_nccl("ncclGroupEnd", |api, raw| {
            // SAFETY: the function has no precondition; the group ends below on this thread.
            let mut first = unsafe { (api.group_start)() };
            let mut note = |result: c_int| {
                if first == SUCCESS && result != IN_PROGRESS {
                    first = result;
                }
            };
            for (member, at, bytes) in sends {
                // SAFETY: the communicator and the stream are alive; the caller guarantees the range.
                note(unsafe { (api.send)(*at as ConstBuffer, *bytes, BYTE, *member as c_int, raw, on) });
            }
            for (member, at, bytes) in receives {
                // SAFETY: as for the sends.
                note(unsafe { (api.recv)(*at as MutBuffer, *bytes, BYTE, *member as c_int, raw, on) });
            }
            // SAFETY: ends the group that this thread started, whose communicator is alive.
            let ended = unsafe { (api.group_end)() };
            if first == SUCCESS { ended } else { first }
        })
    }

    /// Calls a function with the live communicator, which the lock keeps from being aborted, and
    /// waits until it is no longer in progress.
    fn call_nccl(&self, name: &str, f: impl FnOnce(&Nccl, ncclComm_t) -> c_int) -> CudaResult<()> {
        self.call_with_timeout(name, self.timeout, f)
    }

    fn call_with_timeout(
        &self,
        name: &str,
        timeout: Duration,
        f: impl FnOnce(&Nccl, ncclComm_t) -> c_int,
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
                    // SAFETY: the communicator is alive while the lock is held; NCCL writes one
                    // number to this stack frame.
                    let status = unsafe { (self.shared.api.async_error)(handle.0, &mut result) };
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
        let finalized = self.call_with_timeout("ncclCommFinalize", DESTROY_TIMEOUT, |api, raw| {
            // SAFETY: the communicator is alive while the lock is held, and no operation follows.
            unsafe { (api.finalize)(raw) }
        });
        let Some(handle) = self.shared.lock_handle().take() else { return };
        let api = self.shared.api;
        let release = if finalized.is_ok() { api.destroy } else { api.abort };
        release_within(handle, release, DESTROY_TIMEOUT);
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
            release_within(h, self.0.api.abort, until.saturating_duration_since(Instant::now()))
        })
    }
}

// SAFETY: a type only; `release_within` states why the argument is valid.
type ReleaseFn = unsafe extern "C" fn(ncclComm_t) -> c_int;

/// Destroys or aborts a communicator, on a thread of its own because the call may never return.
/// Returns whether it finished in time; if not, the thread is leaked. `handle` was taken out of the
/// shared state, so nothing else uses it.
fn release_within(handle: CommunicatorHandle, release: ReleaseFn, timeout: Duration) -> bool {
    let (done_sender, done_receiver) = mpsc::channel();
    let thread = std::thread::Builder::new().name("nccl-end".into()).spawn(move || {
        let sent_handle = handle;
        // SAFETY: `init_rank` created the communicator, and this thread is the last that uses it.
        let _ = unsafe { release(sent_handle.0) };
        let _ = done_sender.send(());
    });
    thread.is_ok() && done_receiver.recv_timeout(timeout).is_ok()
}

/// The dtype of transfers that move bytes.
const BYTE: c_int = ncclDataType_t::ncclInt8 as c_int;

fn nccl_dtype(dtype: DType) -> CudaResult<c_int> {
    match dtype {
        DType::F32 => Ok(ncclDataType_t::ncclFloat32 as c_int),
        DType::Bf16 => Ok(ncclDataType_t::ncclBfloat16 as c_int),
        other => cuda_failure(format!("no reduction of {}", other.name())),
    }
}

/// Returns NCCL's reduction operator. NCCL chooses the order of additions; the order is the same on
/// every member and in every run, and bf16 is rounded at each step. Its maximum is not specified
/// for NaN.
fn nccl_operator(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum | Reduction::Tree => ncclRedOp_t::ncclSum as c_int,
        Reduction::Max => ncclRedOp_t::ncclMax as c_int,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_the_bytes_of_the_documented_initializer() {
        // NCCL_CONFIG_INITIALIZER of 2.28: size, magic, version, then the fields.
        let c = non_blocking_config();
        assert_eq!((c.size, size_of::<ncclConfig_t>()), (80, 80));
        assert_eq!((c.magic, c.version, c.blocking, c.collnetEnable), (0xcafe_beef, 22809, 0, 0));
        assert_eq!(std::mem::offset_of!(ncclConfig_t, netName), 32);
        assert_eq!(std::mem::offset_of!(ncclConfig_t, commName), 48);
        assert_eq!(std::mem::offset_of!(ncclConfig_t, nvlinkCentricSched), 76);
        assert!(c.netName.is_null() && c.commName.is_null());
    }

    #[test]
    fn dtypes_and_operators_have_the_numbers_of_the_header() {
        assert_eq!((nccl_dtype(DType::F32), nccl_dtype(DType::Bf16)), (Ok(7), Ok(9)));
        assert!(nccl_dtype(DType::E4m3).is_err());
        let operators = [Reduction::Sum, Reduction::Tree, Reduction::Max].map(nccl_operator);
        assert_eq!((operators, BYTE, [SUCCESS, REMOTE_ERROR, IN_PROGRESS]), ([0, 0, 2], 0, [0, 6, 7]));
    }
}
