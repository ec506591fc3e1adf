//! Which GPUs are here and how they are linked.

#![allow(unsafe_code, reason = "the driver's own functions")]

use std::ffi::{CString, c_char, c_int, c_void};

use cudarc::driver::result::{self, DriverError, device};
use cudarc::driver::sys::{self, CUdevice, CUdevice_P2PAttribute as P2p, CUdevice_attribute as Attribute};
use libloading::os::unix::Symbol;
use tessera_base::{Bytes, Code, Diagnostic};

use crate::libraries::{Libraries, Library};

/// The driver is here and cannot be used.
pub static T1302: Code = Code {
    id: "T1302",
    title: "the driver cannot be used",
    page: "The driver's library loaded, and then refused to start or to tell of its GPUs. The message carries its own word for \
why. NO_DEVICE: no GPU is visible, as when CUDA_VISIBLE_DEVICES hides all or a container was started without any. \
SYSTEM_DRIVER_MISMATCH: the library is of another version than the kernel's module, as after an update without a reboot. \
SYSTEM_NOT_READY: the fabric manager of NVSwitch machines does not run. STUB_LIBRARY: a toolkit's folder of stubs is on \
LD_LIBRARY_PATH and hides the driver; take it off. `nvidia-smi` shows what the driver itself sees.",
};

/// NVML's words for a link that a GPU does not have, and for GPUs without any.
const NO_SUCH_LINK: c_int = 2;
const NOT_SUPPORTED: c_int = 3;

/// Most links that a GPU has.
const MOST_LINKS: u32 = 36;

/// A GPU, as the driver tells of it. The order is the driver's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Gpu {
    /// Its name.
    pub name: String,
    /// Where it sits, such as `0000:1B:00.0`.
    pub bus: String,
    /// Memory.
    pub memory: Bytes,
    /// Streaming multiprocessors.
    pub multiprocessors: u32,
    /// Compute capability, major and minor.
    pub capability: (u32, u32),
    /// NVLinks that are up; none where nobody says.
    pub nvlinks: Option<u32>,
}

/// What one GPU can do with another's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// The one that reads and writes, by index.
    pub from: usize,
    /// The one whose memory that is.
    pub to: usize,
    /// Whether it can.
    pub access: bool,
    /// Whether atomics on that memory are those of the link itself.
    pub atomics: bool,
}

/// All GPUs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Devices {
    /// In the driver's order.
    pub gpus: Vec<Gpu>,
    /// Every ordered pair of two different ones.
    pub links: Vec<Link>,
}

/// Asks the driver.
///
/// # Errors
/// T1301 without a driver, T1302 where it refuses.
pub fn devices(libraries: &Libraries) -> Result<Devices, Diagnostic> {
    if let Some(lost) = libraries.lost.iter().find(|l| l.library == Library::Driver) {
        return Err(lost.diagnostic());
    }
    ask(libraries).map_err(|e| {
        let word = format!("{:?}", e.0);
        Diagnostic::error(&T1302, format!("the driver says {}", word.trim_start_matches("CUDA_ERROR_")))
            .hint("nvidia-smi shows what the driver itself sees")
    })
}

fn ask(libraries: &Libraries) -> Result<Devices, DriverError> {
    result::init()?;
    let all: Vec<CUdevice> = (0..device::get_count()?).map(device::get).collect::<Result<_, _>>()?;
    let mut out = Devices::default();
    for d in &all {
        let bus = bus(*d)?;
        out.gpus.push(Gpu {
            name: device::get_name(*d)?,
            // SAFETY: the driver is up and gave this device.
            memory: Bytes(unsafe { device::total_mem(*d) }? as u64),
            multiprocessors: attribute(*d, Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
            capability: (
                attribute(*d, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
                attribute(*d, Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
            ),
            nvlinks: nvlinks(libraries, &bus),
            bus,
        });
    }
    for (from, a) in all.iter().enumerate() {
        for (to, b) in all.iter().enumerate().filter(|(to, _)| *to != from) {
            out.links.push(Link {
                from,
                to,
                access: between(*a, *b, P2p::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED),
                atomics: between(*a, *b, P2p::CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED),
            });
        }
    }
    Ok(out)
}

fn attribute(d: CUdevice, which: Attribute) -> Result<u32, DriverError> {
    // SAFETY: the driver is up and gave this device.
    unsafe { device::get_attribute(d, which) }.map(|v| v.max(0) as u32)
}

/// What the driver does not say of two devices, they cannot.
fn between(a: CUdevice, b: CUdevice, which: P2p) -> bool {
    let mut value: c_int = 0;
    // SAFETY: the driver is up, gave both devices, and writes one int.
    let said = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, which, a, b) }.result();
    said.is_ok() && value != 0
}

fn bus(d: CUdevice) -> Result<String, DriverError> {
    let mut text = [0_u8; 32];
    // SAFETY: the driver is up and writes at most as many bytes as it is told, ended by a zero.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr().cast::<c_char>(), text.len() as c_int, d) }
        .result()?;
    let end = text.iter().position(|b| *b == 0).unwrap_or(text.len());
    Ok(String::from_utf8_lossy(&text[..end]).into_owned())
}

/// Bytes of a GPU in use by anybody, by NVML: what a process took is the difference of two.
pub(crate) fn used_bytes(libraries: &Libraries, ordinal: u32) -> Option<u64> {
    type Handle = extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type Info = extern "C" fn(*mut c_void, *mut [u64; 3]) -> c_int;
    let bus = CString::new(bus(device::get(ordinal as c_int).ok()?).ok()?).ok()?;
    // SAFETY: NVML documents these types; it reads a text that ends with a zero, writes a handle, and then total, free and
    // used.
    unsafe {
        let handle: Symbol<Handle> = libraries.symbol(Library::Nvml, "nvmlDeviceGetHandleByPciBusId_v2")?;
        let info: Symbol<Info> = libraries.symbol(Library::Nvml, "nvmlDeviceGetMemoryInfo")?;
        let (mut device, mut memory) = (std::ptr::null_mut(), [0; 3]);
        (handle(bus.as_ptr(), &mut device) == 0 && info(device, &mut memory) == 0).then_some(memory[2])
    }
}

/// Links of a GPU that are up, by NVML, whose first call was made when its version was asked.
fn nvlinks(libraries: &Libraries, bus: &str) -> Option<u32> {
    type Handle = extern "C" fn(*const c_char, *mut *mut c_void) -> c_int;
    type State = extern "C" fn(*mut c_void, u32, *mut u32) -> c_int;
    let bus = CString::new(bus).ok()?;
    // SAFETY: NVML documents these types; it reads a text that ends with a zero and writes a handle and one int per call.
    unsafe {
        let handle: Symbol<Handle> = libraries.symbol(Library::Nvml, "nvmlDeviceGetHandleByPciBusId_v2")?;
        let state: Symbol<State> = libraries.symbol(Library::Nvml, "nvmlDeviceGetNvLinkState")?;
        let mut device = std::ptr::null_mut();
        if handle(bus.as_ptr(), &mut device) != 0 {
            return None;
        }
        let states = (0..MOST_LINKS).filter_map(|link| {
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
