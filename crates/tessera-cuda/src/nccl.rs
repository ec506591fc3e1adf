//! NCCL: the few functions of it that are used, found at run time, and communicators that never block.
//!
//! A communicator is made with `blocking = 0`: a call that has not ended yet says so, and is asked again until a deadline or
//! until somebody wants everything to end. Multicast is left to NCCL's environment, which this room does not touch: the
//! configuration of a communicator has no switch for it.

#![allow(unsafe_code, reason = "NCCL's own functions")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use tessera_base::{Code, Diagnostic};
use tessera_ir::DType;
use tessera_mesh::Reduction;

use crate::driver::{Done, Failed, Stream, failed};
use crate::libraries::{Libraries, Library, Lost};

/// NCCL said no.
pub static T1303: Code = Code {
    id: "T1303",
    title: "NCCL failed",
    page: "A function of NCCL failed outside of any run: the message carries NCCL's own words. An id for a group needs no GPU but \
a network interface that others can reach; NCCL_SOCKET_IFNAME names one where NCCL picks the wrong one, and NCCL_DEBUG=WARN makes NCCL \
say more on standard error. A function that is missing means a library older than 2.18: `tessera doctor` shows which one was \
loaded from where, and TESSERA_CUDA_LIBS names folders that go first.",
};

/// What all members of a group need to find one another: made by one of them and carried to the others.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// Makes an id for a group; needs no GPU.
///
/// # Errors
/// T1301 where NCCL is not here, T1303 where it fails.
pub fn unique_id(libraries: &Libraries) -> Result<UniqueId, Diagnostic> {
    if let Some(lost) = libraries.lost.iter().find(|l| l.library == Library::Nccl) {
        return Err(Lost::diagnostic(lost));
    }
    let said = |e: Failed| Diagnostic::error(&T1303, e.to_string());
    let api = Api::of(libraries).map_err(said)?;
    let mut id = UniqueId([0; 128]);
    api.check("ncclGetUniqueId", None, (api.get_unique_id)(&mut id)).map_err(said)?;
    Ok(id)
}

type Raw = *mut c_void;
type Bytes = *const c_void;
type BytesMut = *mut c_void;
type StreamRaw = cudarc::driver::sys::CUstream;
type Reducing = extern "C" fn(Bytes, BytesMut, usize, c_int, c_int, Raw, StreamRaw) -> c_int;

const SUCCESS: c_int = 0;
const REMOTE_ERROR: c_int = 6;
const IN_PROGRESS: c_int = 7;

/// `ncclConfig_t` of 2.28; a newer library reads as much of it as its `size` says.
#[repr(C)]
struct Config {
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

impl Config {
    fn new() -> Config {
        let unset = c_int::MIN;
        Config {
            size: size_of::<Config>(),
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
        /// NCCL's functions.
        #[derive(Clone, Copy)]
        struct Api {
            $($field: extern "C" fn($($arg),*) -> $out,)*
        }

        impl Api {
            fn of(libraries: &Libraries) -> Done<Api> {
                let found = libraries.found.iter().find(|f| f.library == Library::Nccl);
                let version = found.and_then(|f| f.version.as_deref()).unwrap_or("of unknown version");
                Ok(Api {
                    $($field: {
                        // SAFETY: the type is the one that NCCL's header gives the function.
                        let symbol = unsafe { libraries.symbol::<extern "C" fn($($arg),*) -> $out>(Library::Nccl, $name) };
                        *symbol.ok_or_else(|| Failed(format!("NCCL {version} has no {}", $name)))?
                    },)*
                })
            }
        }
    };
}

api! {
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId) -> c_int;
    init = "ncclCommInitRankConfig": fn(*mut Raw, c_int, UniqueId, c_int, *mut Config) -> c_int;
    finalize = "ncclCommFinalize": fn(Raw) -> c_int;
    destroy = "ncclCommDestroy": fn(Raw) -> c_int;
    abort = "ncclCommAbort": fn(Raw) -> c_int;
    async_error = "ncclCommGetAsyncError": fn(Raw, *mut c_int) -> c_int;
    error_string = "ncclGetErrorString": fn(c_int) -> *const c_char;
    last_error = "ncclGetLastError": fn(Raw) -> *const c_char;
    all_reduce = "ncclAllReduce": fn(Bytes, BytesMut, usize, c_int, c_int, Raw, StreamRaw) -> c_int;
    all_gather = "ncclAllGather": fn(Bytes, BytesMut, usize, c_int, Raw, StreamRaw) -> c_int;
    reduce_scatter = "ncclReduceScatter": fn(Bytes, BytesMut, usize, c_int, c_int, Raw, StreamRaw) -> c_int;
    broadcast = "ncclBroadcast": fn(Bytes, BytesMut, usize, c_int, c_int, Raw, StreamRaw) -> c_int;
    send = "ncclSend": fn(Bytes, usize, c_int, c_int, Raw, StreamRaw) -> c_int;
    recv = "ncclRecv": fn(BytesMut, usize, c_int, c_int, Raw, StreamRaw) -> c_int;
    group_start = "ncclGroupStart": fn() -> c_int;
    group_end = "ncclGroupEnd": fn() -> c_int;
}

impl std::fmt::Debug for Api {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Api")
    }
}

impl Api {
    fn text(at: *const c_char) -> String {
        if at.is_null() {
            return String::new();
        }
        // SAFETY: NCCL's texts end with a zero and are not freed.
        unsafe { CStr::from_ptr(at) }.to_string_lossy().into_owned()
    }

    fn check(&self, call: &str, comm: Option<Raw>, result: c_int) -> Done<()> {
        if result == SUCCESS {
            return Ok(());
        }
        let what = Api::text((self.error_string)(result));
        let more = Api::text((self.last_error)(comm.unwrap_or(std::ptr::null_mut())));
        failed(match more.trim() {
            "" => format!("{call}: {what}"),
            more => format!("{call}: {what}: {more}"),
        })
    }
}

/// A communicator: one member's end. It is used by one thread at a time and ended from any.
#[derive(Debug)]
pub(crate) struct Comm {
    shared: Arc<Shared>,
    patience: Duration,
}

/// Ends a communicator, from any thread.
#[derive(Debug, Clone)]
pub(crate) struct Ender(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    api: Api,
    /// None once it was ended.
    raw: Mutex<Option<Handle>>,
    /// Set by whoever wants all waits to end.
    ending: Arc<AtomicBool>,
}

#[derive(Debug, Clone, Copy)]
struct Handle(Raw);

// SAFETY: NCCL allows any thread to use a communicator, one at a time; the lock sees to that.
unsafe impl Send for Handle {}

/// How long NCCL may take to end a communicator in good order.
const FAREWELL: Duration = Duration::from_secs(2);

impl Comm {
    /// Meets all members. They call it in the same order, if they make several.
    pub(crate) fn meet(
        libraries: &Libraries,
        id: &UniqueId,
        (me, members): (usize, usize),
        patience: Duration,
        ending: Arc<AtomicBool>,
    ) -> Done<Comm> {
        let api = Api::of(libraries)?;
        let mut raw = std::ptr::null_mut();
        let mut config = Config::new();
        let result = (api.init)(&mut raw, members as c_int, *id, me as c_int, &mut config);
        if result != SUCCESS && result != IN_PROGRESS {
            api.check("ncclCommInitRankConfig", None, result)?;
        }
        let comm =
            Comm { shared: Arc::new(Shared { api, raw: Mutex::new(Some(Handle(raw))), ending }), patience };
        if let Err(e) = comm.settle("ncclCommInitRankConfig", result, patience) {
            // Half a communicator is not one to take leave of.
            comm.ender().end(FAREWELL);
            return Err(e);
        }
        Ok(comm)
    }

    pub(crate) fn ender(&self) -> Ender {
        Ender(self.shared.clone())
    }

    /// What went wrong since, if anything did, and whether it did so at another member.
    pub(crate) fn failure(&self) -> Option<(String, bool)> {
        let raw = self.shared.lock().map(|h| h.0)?;
        let mut state = SUCCESS;
        let asked = (self.shared.api.async_error)(raw, &mut state);
        let state = if asked == SUCCESS { state } else { asked };
        if state == IN_PROGRESS {
            return None;
        }
        let why = self.shared.api.check("NCCL", Some(raw), state).err()?.0;
        Some((why, state == REMOTE_ERROR))
    }

    /// Bytes of every member, in order of members, at `to`.
    pub(crate) fn all_gather(&self, from: u64, to: u64, bytes: usize, stream: &Stream) -> Done<()> {
        self.call("ncclAllGather", |api, raw| {
            (api.all_gather)(from as Bytes, to as BytesMut, bytes, BYTE, raw, stream.raw())
        })
    }

    pub(crate) fn broadcast(
        &self,
        from: u64,
        to: u64,
        bytes: usize,
        root: usize,
        stream: &Stream,
    ) -> Done<()> {
        self.call("ncclBroadcast", |api, raw| {
            (api.broadcast)(from as Bytes, to as BytesMut, bytes, BYTE, root as c_int, raw, stream.raw())
        })
    }

    pub(crate) fn all_reduce(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        how: (DType, Reduction),
        stream: &Stream,
    ) -> Done<()> {
        self.reduce(("ncclAllReduce", |api| api.all_reduce), (from, to, elements), how, stream)
    }

    /// `elements` is what every member gets.
    pub(crate) fn reduce_scatter(
        &self,
        from: u64,
        to: u64,
        elements: usize,
        how: (DType, Reduction),
        stream: &Stream,
    ) -> Done<()> {
        self.reduce(("ncclReduceScatter", |api| api.reduce_scatter), (from, to, elements), how, stream)
    }

    fn reduce(
        &self,
        (name, verb): (&'static str, fn(&Api) -> Reducing),
        (from, to, elements): (u64, u64, usize),
        (dtype, reduction): (DType, Reduction),
        stream: &Stream,
    ) -> Done<()> {
        let (dtype, operator) = (kind(dtype)?, operator(reduction));
        self.call(name, |api, raw| {
            verb(api)(from as Bytes, to as BytesMut, elements, dtype, operator, raw, stream.raw())
        })
    }

    /// Sends and receives at once: (member, address, bytes).
    pub(crate) fn transfer(
        &self,
        sends: &[(usize, u64, usize)],
        receives: &[(usize, u64, usize)],
        stream: &Stream,
    ) -> Done<()> {
        self.call("ncclGroupEnd", |api, raw| {
            let mut first = (api.group_start)();
            let mut note = |result: c_int| {
                if first == SUCCESS && result != IN_PROGRESS {
                    first = result;
                }
            };
            for (member, at, bytes) in sends {
                note((api.send)(*at as Bytes, *bytes, BYTE, *member as c_int, raw, stream.raw()));
            }
            for (member, at, bytes) in receives {
                note((api.recv)(*at as BytesMut, *bytes, BYTE, *member as c_int, raw, stream.raw()));
            }
            let ended = (api.group_end)();
            if first == SUCCESS { ended } else { first }
        })
    }

    fn call(&self, name: &str, f: impl FnOnce(&Api, Raw) -> c_int) -> Done<()> {
        self.call_within(name, self.patience, f)
    }

    fn call_within(&self, name: &str, bound: Duration, f: impl FnOnce(&Api, Raw) -> c_int) -> Done<()> {
        let result = {
            let held = self.shared.lock();
            let Some(handle) = *held else { return failed(format!("{name}: the communicator was ended")) };
            f(&self.shared.api, handle.0)
        };
        self.settle(name, result, bound)
    }

    /// Waits until a call that may still be in progress has ended.
    fn settle(&self, name: &str, first: c_int, bound: Duration) -> Done<()> {
        let deadline = Instant::now() + bound;
        let mut result = first;
        loop {
            {
                let held = self.shared.lock();
                let Some(handle) = *held else {
                    return failed(format!("{name}: the communicator was ended"));
                };
                if result == IN_PROGRESS {
                    let asked = (self.shared.api.async_error)(handle.0, &mut result);
                    if asked != SUCCESS {
                        result = asked;
                    }
                }
                if result != IN_PROGRESS {
                    return self.shared.api.check(name, Some(handle.0), result);
                }
            }
            if self.shared.ending.load(Ordering::Acquire) {
                return failed(format!("{name}: ended while it was in progress"));
            }
            if Instant::now() > deadline {
                return failed(format!("{name}: still in progress after {} ms", bound.as_millis()));
            }
            std::thread::yield_now();
        }
    }
}

impl Drop for Comm {
    /// Leaves in good order if the others do too; graphs that hold its work are gone by now.
    fn drop(&mut self) {
        let finalized = self.call_within("ncclCommFinalize", FAREWELL, |api, raw| (api.finalize)(raw));
        let Some(handle) = self.shared.lock().take() else { return };
        let api = self.shared.api;
        let leave = if finalized.is_ok() { api.destroy } else { api.abort };
        bounded(handle, leave, FAREWELL);
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Option<Handle>> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Ender {
    /// Ends the communicator and what it has under way on the device; whether NCCL did so in time. After it every call
    /// fails.
    pub(crate) fn end(&self, bound: Duration) -> bool {
        self.0.ending.store(true, Ordering::Release);
        let until = Instant::now() + bound;
        // Whoever holds the lock is inside a call that does not block, or that will never return.
        let taken = loop {
            match self.0.raw.try_lock() {
                Ok(mut held) => break held.take(),
                Err(std::sync::TryLockError::Poisoned(held)) => break held.into_inner().take(),
                Err(std::sync::TryLockError::WouldBlock) if Instant::now() < until => {
                    std::thread::yield_now()
                }
                Err(std::sync::TryLockError::WouldBlock) => return false,
            }
        };
        taken.is_none_or(|h| bounded(h, self.0.api.abort, until.saturating_duration_since(Instant::now())))
    }
}

/// Calls a function that may never return; whether it did. If it did not, its thread is left behind.
fn bounded(handle: Handle, call: extern "C" fn(Raw) -> c_int, bound: Duration) -> bool {
    let (tell, told) = mpsc::channel();
    let thread = std::thread::Builder::new().name("nccl-end".into()).spawn(move || {
        let whole = handle;
        let _ = call(whole.0);
        let _ = tell.send(());
    });
    thread.is_ok() && told.recv_timeout(bound).is_ok()
}

const BYTE: c_int = 0;

fn kind(dtype: DType) -> Done<c_int> {
    match dtype {
        DType::F32 => Ok(7),
        DType::Bf16 => Ok(9),
        other => failed(format!("no reduction of {}", other.name())),
    }
}

/// NCCL adds in an order of its own, which is the same on every member and every time; in bf16 it rounds between steps.
/// Its largest of a number and none is not promised.
fn operator(reduction: Reduction) -> c_int {
    match reduction {
        Reduction::Sum | Reduction::Tree => 0,
        Reduction::Max => 2,
    }
}
