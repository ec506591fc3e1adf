//! The files of `filetests/`, and CPU backends for the ranks of a file.

#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_cpu::arena::Arena;
use tessera_cpu::transport::CommLayout;
use tessera_cpu::{CommEndpoint, CpuBackend, Pool, contribution_bytes};
use tessera_device::{CommRoute, Communicator};
use tessera_filetests::{BackendFactory, BackendUnderTest, Tolerance};
use tessera_ir::Program;
use tessera_mesh::Mesh;

/// Returns every file of `filetests/` with its path relative to that folder.
pub fn list_files() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let mut out = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(dir) = folders.pop() {
        for path in std::fs::read_dir(dir).expect("filetests/ exists").map(|e| e.expect("an entry").path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "tir") {
                out.push((path.strip_prefix(&root).expect("below the root").display().to_string(), path));
            }
        }
    }
    out.sort();
    out
}

/// Returns the name and text of every file.
pub fn read_files() -> Vec<(String, String)> {
    list_files()
        .into_iter()
        .map(|(name, path)| (name, std::fs::read_to_string(path).expect("text")))
        .collect()
}

/// Maximum wait in one collective of the backends of [`cpu_backend`].
pub const PEER_TIMEOUT: Duration = Duration::from_secs(2);

/// Describes the CPU backend with one arena for each communicator of the programs.
///
/// The tolerance is about four units in the last place: a matmul accumulates in one f32 chain, and
/// polynomials approximate the transcendental functions.
pub fn cpu_backend(name: &str) -> BackendUnderTest<'_, CpuBackend> {
    BackendUnderTest {
        name,
        open: &open_cpu_backends,
        tolerance: Tolerance { relative: 5e-7 },
        peer_timeout: PEER_TIMEOUT,
        detects_mismatch: true,
    }
}

pub fn open_cpu_backends(
    mesh: &Mesh,
    programs: &[Vec<Arc<Program>>],
) -> Result<Vec<BackendFactory<CpuBackend>>, String> {
    /// Bytes of the largest contribution, and the maximum number of collectives in flight.
    type Needs = BTreeMap<Communicator, (u64, usize)>;
    let mut needs = Needs::new();
    for (rank, programs) in mesh.iter().zip(programs) {
        for p in programs {
            for (_, op) in p.collective_ops() {
                // The backend rejects collectives without a communicator.
                let Some(lane) = CommRoute::from_op(op).and_then(|r| r.communicator_of(mesh, rank)) else {
                    continue;
                };
                let need = needs.entry(lane).or_default();
                need.0 = need.0.max(contribution_bytes(p, op));
                need.1 += 1;
            }
        }
    }
    let mut ends: Vec<Vec<CommEndpoint>> = mesh.iter().map(|_| Vec::new()).collect();
    for (lane, (bytes, flight)) in needs {
        let layout =
            CommLayout { members: lane.members.len(), slots: flight + 1, slot_bytes: bytes.max(4) as usize };
        let fd = Arena::create_memfd(layout).map_err(|e| e.to_string())?;
        for (at, rank) in lane.members.iter().enumerate() {
            let arena = Arena::attach(&fd, layout, at).map_err(|e| e.to_string())?;
            let route = lane.member_route(mesh, at).ok_or("the communicator has no group")?;
            ends[rank.0 as usize].push(CommEndpoint { route, transport: Box::new(arena) });
        }
    }
    let maker = |ends: Vec<CommEndpoint>| -> BackendFactory<CpuBackend> {
        Box::new(move |seat| Ok(CpuBackend::new(seat, Pool::single_thread(), ends, PEER_TIMEOUT)))
    };
    Ok(ends.into_iter().map(maker).collect())
}
