//! The GPUs of this machine and the links between them.

#![allow(unsafe_code, reason = "the driver's own functions")]

use std::ffi::{CString, c_char, c_int, c_void};

use cudarc::driver::result::{self, DriverError, device};
use cudarc::driver::sys::{self, CUdevice, CUdevice_P2PAttribute as P2p, CUdevice_attribute as Attribute};
use libloading::os::unix::Symbol;
use tessera_base::{Bytes, Diagnostic};

use crate::codes::T1302;
use crate::libraries::{Libraries, Library};

/// NVML's error codes for a link that the GPU does not have, and for GPUs without NVLink.
const NO_SUCH_LINK: c_int = 2;
const NOT_SUPPORTED: c_int = 3;

/// The maximum number of NVLinks per GPU.
const MAX_LINKS: u32 = 36;

/// A GPU with the properties that the driver reports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Model name that the driver reports.
    pub name: String,
    /// Unique id of the GPU, as `nvidia-smi -L` prints it: `GPU-` and 32 hex digits in five groups.
    pub uuid: String,
    /// PCI bus id, for example `0000:1B:00.0`.
    pub pci_bus_id: String,
    /// Total device memory that the driver reports, whether free or in use.
    pub memory: Bytes,
    /// Number of streaming multiprocessors (SMs), for example 132 on an H200.
    pub multiprocessors: u32,
    /// Compute capability as (major, minor).
    pub capability: (u32, u32),
    /// Number of active NVLinks; `None` if NVML cannot report it.
    pub nvlinks: Option<u32>,
}

/// Peer access from one GPU to another's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PeerLink {
    /// Index of the GPU that reads and writes.
    pub from: usize,
    /// Index of the GPU that owns the memory.
    pub to: usize,
    /// Whether `from` can read and write the memory of `to`.
    pub access: bool,
    /// Whether the link supports native atomics on that memory.
    pub atomics: bool,
}

/// All visible GPUs and their links.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Devices {
    /// The GPUs in the driver's order.
    pub gpus: Vec<Gpu>,
    /// The links of every ordered pair of different GPUs.
    pub peer_links: Vec<PeerLink>,
}

/// Lists the GPUs and their links.
///
/// # Errors
/// T1301 without a driver, T1302 if the driver returns an error.
pub fn list_devices(libraries: &Libraries) -> Result<Devices, Diagnostic> {
    libraries.check_loaded(Library::Driver)?;
    query_driver(libraries).map_err(|e| {
        let name = format!("{:?}", e.0);
        Diagnostic::error(&T1302, format!("the driver returned {}", name.trim_start_matches("CUDA_ERROR_")))
            .with_hint("nvidia-smi shows what the driver itself sees")
    })
}

fn query_driver(libraries: &Libraries) -> Result<Devices, DriverError> {
    result::init()?;
    let all: Vec<CUdevice> = (0..device::get_count()?).map(device::get).collect::<Result<_, _>>()?;
    let mut out = Devices::default();
    for d in &all {
        let bus = pci_bus_id(*d)?;
        out.gpus.push(Gpu {
            name: device::get_name(*d)?,
            uuid: format_uuid(device::get_uuid(*d)?.bytes.map(|b| b as u8)),
            // SAFETY: the driver is initialised and returned this device.
            memory: Bytes(unsafe { device::total_mem(*d) }? as u64),
            multiprocessors: device_attribute(*d, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            capability: (
                device_attribute(*d, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                device_attribute(*d, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            nvlinks: count_nvlinks(libraries, &bus),
            pci_bus_id: bus,
        });
    }
    for (from, a) in all.iter().enumerate() {
        for (to, b) in all.iter().enumerate().filter(|(to, _)| *to != from) {
            out.peer_links.push(PeerLink {
                from,
                to,
                access: has_peer_attribute(*a, *b, P2p::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED),
                atomics: has_peer_attribute(*a, *b, P2p::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED),
            });
        }
    }
    Ok(out)
}

fn device_attribute(d: CUdevice, which: Attribute) -> Result<u32, DriverError> {
    // SAFETY: the driver is initialised and returned this device.
    unsafe { device::get_attribute(d, which) }.map(|v| v.max(0) as u32)
}

/// Returns whether the pair has a peer attribute; an error of the driver counts as no.
fn has_peer_attribute(a: CUdevice, b: CUdevice, which: P2p) -> bool {
    let mut value: c_int = 0;
    // SAFETY: the driver is initialised, returned both devices, and writes one int.
    let result = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, which, a, b) }.result();
    result.is_ok() && value != 0
}

fn pci_bus_id(d: CUdevice) -> Result<String, DriverError> {
    let mut text = [0_u8; 32];
    // SAFETY: the driver is initialised and writes at most `len` bytes, terminated by a NUL.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast::<c_char>(), text.len() as c_int, d) }
        .result()?;
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).into_owned())
}

fn format_uuid(bytes: [u8; 16]) -> String {
    let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
    format!("GPU-{}-{}-{}-{}-{}", &hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..])
}

/// Returns NVML's handle of a GPU.
fn find_nvml_device(libraries: &Libraries, bus: &str) -> Option<*mut c_void> {
    // SAFETY: a type only; the call below states why its arguments are valid.
    type DeviceByBus = unsafe extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    let (bus, mut device) = (CString::new(bus).ok()?, std::ptr::null_mut());
    // SAFETY: NVML documents this type and was initialised when its version was read. It reads a
    // NUL-terminated string and writes a handle.
    unsafe {
        let find: Symbol<DeviceByBus> =
            libraries.get_symbol(Library::Nvml, "nvmlDeviceGetHandleByPciBusId_v2")?;
        (find(bus.as_ptr(), &mut device) == 0).then_some(device)
    }
}

/// Returns the bytes of a GPU that no process uses, as NVML reports; `None` without NVML.
#[must_use]
pub fn free_bytes(libraries: &Libraries, ordinal: u32) -> Option<u64> {
    query_memory(libraries, ordinal).map(|[_, free, _]| free)
}

/// Returns the bytes in use on a GPU by all processes, as NVML reports. A process's own usage is
/// the difference of two calls.
pub(crate) fn used_bytes(libraries: &Libraries, ordinal: u32) -> Option<u64> {
    query_memory(libraries, ordinal).map(|[_, _, used]| used)
}

/// Returns the total, the free and the used bytes of a GPU, as NVML reports.
fn query_memory(libraries: &Libraries, ordinal: u32) -> Option<[u64; 3]> {
    // SAFETY: a type only; the call below states why its arguments are valid.
    type Info = unsafe extern "C" fn(*mut c_void, *mut [u64; 3]) -> c_int;
    let device = find_nvml_device(libraries, &pci_bus_id(device::get(ordinal as c_int).ok()?).ok()?)?;
    // SAFETY: NVML documents this type and returned the handle. It writes total, free and used.
    unsafe {
        let info: Symbol<Info> = libraries.get_symbol(Library::Nvml, "nvmlDeviceGetMemoryInfo")?;
        let mut memory = [0; 3];
        (info(device, &mut memory) == 0).then_some(memory)
    }
}

/// Counts a GPU's active NVLinks with NVML.
fn count_nvlinks(libraries: &Libraries, bus: &str) -> Option<u32> {
    // SAFETY: a type only; the calls below state why their arguments are valid.
    type State = unsafe extern "C" fn(*mut c_void, u32, *mut u32) -> c_int;
    let device = find_nvml_device(libraries, bus)?;
    // SAFETY: NVML documents this type and returned the handle. It writes one int per call.
    unsafe {
        let state: Symbol<State> = libraries.get_symbol(Library::Nvml, "nvmlDeviceGetNvLinkState")?;
        let states = (0..MAX_LINKS).filter_map(|link| {
            let mut on = 0;
            match state(device, link, &mut on) {
                0 => Some(Some(on == 1)),
                NO_SUCH_LINK | NOT_SUPPORTED => None,
                _ => Some(None),
            }
        });
        let all: Option<Vec<bool>> = states.collect();
        all.map(|s| s.iter().filter(|up| **up).count() as u32)
    }
}
