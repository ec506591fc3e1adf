//! The files, and CPU backends for the ranks of one.

#![allow(dead_code, clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera_cpu::arena::{Arena, ArenaLayout};
use tessera_cpu::{Cpu, End, Pool};
use tessera_device::{Lane, Route};
use tessera_filetests::{Maker, Subject, Tolerance};
use tessera_ir::Program;
use tessera_mesh::Mesh;

/// Every file of `filetests/`, by its path there.
pub fn files() -> Vec<(String, PathBuf)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests");
    let mut out = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(dir) = folders.pop() {
        for path in std::fs::read_dir(dir).expect("filetests/ is there").map(|e| e.expect("an entry").path())
        {
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

/// Name and text of every file.
pub fn texts() -> Vec<(String, String)> {
    files().into_iter().map(|(name, path)| (name, std::fs::read_to_string(path).expect("text"))).collect()
}

/// Longest wait in one collective of [`cpu`].
pub const PATIENCE: Duration = Duration::from_secs(2);

/// The CPU backend with an arena for each lane that the programs use.
///
/// About four units in the last place: a product accumulates in one f32 chain, and polynomials stand for the
/// transcendental functions.
pub fn cpu(name: &str) -> Subject<'_, Cpu> {
    Subject { name, open: &open, tolerance: Tolerance { relative: 5e-7 }, patience: PATIENCE, compares: true }
}

pub fn open(mesh: &Mesh, programs: &[Vec<Arc<Program>>]) -> Result<Vec<Maker<Cpu>>, String> {
    /// Bytes of the largest contribution, and collectives at most in flight.
    type Needs = BTreeMap<Lane, (u64, usize)>;
    let mut needs = Needs::new();
    for (rank, programs) in mesh.iter().zip(programs) {
        for p in programs {
            for (_, op) in p.collectives() {
                // What names no lane is for the backend to refuse.
                let Some(lane) = Route::of(op).and_then(|r| r.lane(mesh, rank)) else { continue };
                let need = needs.entry(lane).or_default();
                need.0 = need.0.max(op.operands.first().map_or(0, |v| p.ty(*v).bytes().0));
                need.1 += 1;
            }
        }
    }
    let mut ends: Vec<Vec<End>> = mesh.iter().map(|_| Vec::new()).collect();
    for (lane, (bytes, flight)) in needs {
        let layout =
            ArenaLayout { members: lane.members.len(), slots: flight + 1, slot_bytes: bytes.max(4) as usize };
        let fd = Arena::create(layout).map_err(|e| e.to_string())?;
        for (at, rank) in lane.members.iter().enumerate() {
            let arena = Arena::attach(&fd, layout, at).map_err(|e| e.to_string())?;
            let route = lane.route(mesh, at).ok_or("a lane without a group")?;
            ends[rank.0 as usize].push(End { route, exchange: arena.into() });
        }
    }
    let maker = |ends: Vec<End>| -> Maker<Cpu> {
        Box::new(move |seat| Ok(Cpu::new(seat, Pool::single(), ends, PATIENCE)))
    };
    Ok(ends.into_iter().map(maker).collect())
}
