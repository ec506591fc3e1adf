//! Ranks on GPUs: which lanes they meet in, by which names, and how a rank's backend is opened.

use std::hash::Hasher as _;
use std::time::Duration;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_cuda::{Cuda, End, Options, T1304, UniqueId, unique_id};
use tessera_device::Seat;
use tessera_mesh::Rank;
use tessera_verify::SealedPlan;

use crate::comm;
use crate::gpus::{Gpus, kernels_folder};

/// Longest wait for the other ranks of a lane before the first collective: they load weights meanwhile.
const SETUP: Duration = Duration::from_secs(300);

/// Names of all lanes of a plan, in order, for whoever starts its ranks: made once, told to all. A lane of one rank has none.
///
/// # Errors
/// T1301 where NCCL is not here, T1303 where it fails.
pub fn lane_ids(gpus: &Gpus, sealed: &SealedPlan) -> Result<Vec<String>, Diagnostic> {
    let hex = |id: UniqueId| id.0.iter().map(|b| format!("{b:02x}")).collect();
    comm::groups(sealed).iter().map(|_| unique_id(&gpus.libraries).map(hex)).collect()
}

/// Opens a rank's backend on a visible device.
///
/// # Errors
/// A missing library or device, ranks that do not meet, ids that are not this plan's.
pub fn open(
    gpus: &Gpus,
    sealed: &SealedPlan,
    rank: Rank,
    device: u32,
    ids: &[String],
    patience: Duration,
) -> Result<Cuda, Diagnostic> {
    let seat = Seat { mesh: *sealed.mesh(), rank };
    let options =
        Options { device, kernels: kernels_folder(), patience, setup: SETUP, host: host(), graphs: true };
    Cuda::open(&gpus.libraries, seat, ends(sealed, rank, ids)?, options)
}

fn ends(sealed: &SealedPlan, rank: Rank, ids: &[String]) -> Result<Vec<End>, Diagnostic> {
    let specs = comm::groups(sealed);
    if specs.len() != ids.len() {
        let what = format!("{} names for {} lanes: another plan's", ids.len(), specs.len());
        return Err(Diagnostic::error(&T1304, what));
    }
    let mine = specs.iter().zip(ids).filter(|(s, _)| s.lane.members.contains(&rank));
    mine.filter_map(|(spec, id)| {
        let me = spec.lane.members.iter().position(|r| *r == rank)?;
        let route = spec.lane.route(sealed.mesh(), me)?;
        let unread =
            || Diagnostic::error(&T1304, format!("the name of lane {route} is not 128 bytes in hex"));
        let id = bytes(id).ok_or_else(unread);
        Some(id.map(|id| End { route, id: UniqueId(id), me, members: spec.lane.members.len() }))
    })
    .collect()
}

fn bytes(hex: &str) -> Option<[u8; 128]> {
    let mut out = [0; 128];
    if hex.len() != 256 || !hex.is_ascii() {
        return None;
    }
    for (i, o) in out.iter_mut().enumerate() {
        *o = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
    }
    Some(out)
}

/// The same number for all processes of this host since it was started, another on another host; 0 where that cannot be told.
fn host() -> u64 {
    let read = |path: &str| std::fs::read(path).ok();
    let Some(boot) = read("/proc/sys/kernel/random/boot_id") else { return 0 };
    let name = read("/proc/sys/kernel/hostname").unwrap_or_default();
    let mut hash = std::hash::DefaultHasher::new();
    hash.write(&boot);
    hash.write(&name);
    hash.finish().max(1)
}

/// What is said where somebody wants GPUs and there are none, or too few.
///
/// # Errors
/// One diagnostic that says what is missing.
pub fn check(gpus: &Gpus, ranks: usize) -> Result<(), Diagnostics> {
    for library in tessera_cuda::Library::ALL {
        let needed =
            library != tessera_cuda::Library::Nvml && (library != tessera_cuda::Library::Nccl || ranks > 1);
        if let Some(lost) = gpus.libraries.lost.iter().find(|l| needed && l.library == library) {
            return Err(vec![lost.diagnostic()]);
        }
    }
    match &gpus.devices {
        Err(d) => Err(vec![d.clone()]),
        Ok(d) if d.gpus.len() < ranks => {
            let what = format!("{ranks} ranks want a GPU each, {} are here", d.gpus.len());
            Err(vec![
                Diagnostic::error(&T1304, what)
                    .hint("a smaller --mesh, or CUDA_VISIBLE_DEVICES with more of them"),
            ])
        }
        Ok(_) => Ok(()),
    }
}
