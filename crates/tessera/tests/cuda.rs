//! The GPU backend under the suite that the CPU backend passes. Where there is no GPU this says so and passes.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera::gpus::{Folder, Gpus};
use tessera_cuda::{Cuda, End, Options, unique_id};
use tessera_device::{Lane, Route};
use tessera_filetests::{Maker, Subject, Tolerance, conformance};
use tessera_ir::Program;
use tessera_mesh::Mesh;

/// A file wants more ranks than there are GPUs.
const TOO_FEW: &str = "too few GPUs";

const PATIENCE: Duration = Duration::from_secs(5);

/// How many GPUs are here, or why there are none.
fn gpus() -> Result<(Arc<Gpus>, u32), String> {
    let found = Gpus::look();
    let count = match &found.devices {
        Ok(d) if !d.gpus.is_empty() => d.gpus.len() as u32,
        Ok(_) => return Err("the driver tells of no GPU".to_string()),
        Err(d) => return Err(d.message.clone()),
    };
    Ok((Arc::new(found), count))
}

/// Every file of `filetests/`.
fn texts() -> Vec<(String, String)> {
    let root = std::env::var_os("TESSERA_FILETESTS")
        .map_or_else(|| Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests"), PathBuf::from);
    let (mut out, mut folders) = (Vec::new(), vec![root.clone()]);
    while let Some(dir) = folders.pop() {
        for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|e| e == "tir") {
                let name = path.strip_prefix(&root).unwrap().display().to_string();
                out.push((name, std::fs::read_to_string(path).unwrap()));
            }
        }
    }
    out.sort();
    out
}

#[test]
fn the_cuda_backend_means_what_the_reference_means() {
    let (found, count) = match gpus() {
        Ok(g) => g,
        Err(why) => return println!("not run: {why}"),
    };
    let open = |mesh: &Mesh, programs: &[Vec<Arc<Program>>]| -> Result<Vec<Maker<Cuda>>, String> {
        let ranks = mesh.iter().count();
        if ranks > count as usize {
            return Err(format!("{TOO_FEW}: {ranks} ranks, {count} GPUs"));
        }
        let mut lanes: Vec<Lane> = mesh
            .iter()
            .zip(programs)
            .flat_map(|(rank, programs)| programs.iter().map(move |p| (rank, p)))
            .flat_map(|(rank, p)| p.collectives().map(move |(_, op)| (rank, op)))
            .filter_map(|(rank, op)| Route::of(op)?.lane(mesh, rank))
            .collect();
        lanes.sort();
        lanes.dedup();
        let mut ends: Vec<Vec<End>> = mesh.iter().map(|_| Vec::new()).collect();
        for lane in lanes {
            let id = unique_id(&found.libraries).map_err(|d| d.message)?;
            for (me, rank) in lane.members.iter().enumerate() {
                let route = lane.route(mesh, me).ok_or("a lane without a group")?;
                ends[rank.0 as usize].push(End { route, id, me, members: lane.members.len() });
            }
        }
        let maker = |(device, ends): (u32, Vec<End>)| -> Maker<Cuda> {
            let found = Arc::clone(&found);
            let options = Options {
                device,
                kernels: Some(Arc::new(Folder(std::env::temp_dir().join("tessera-kernels")))),
                patience: PATIENCE,
                setup: Duration::from_secs(20),
                // Ranks are threads of one process here, whose memory is not handed around: they meet through NCCL.
                host: 0,
                graphs: true,
            };
            Box::new(move |seat| Cuda::open(&found.libraries, seat, ends, options).map_err(|d| d.message))
        };
        Ok(mesh.iter().map(|r| r.0).zip(ends).map(maker).collect())
    };
    // Sums are taken in another order than the reference's, and the device's transcendental functions are good to a few
    // units in the last place.
    let subject =
        Subject { name: "cuda", open: &open, tolerance: Tolerance { relative: 1e-6 }, patience: PATIENCE };
    let report = conformance(&subject, &texts());
    println!("{report}");
    let wrong: Vec<_> = report.failed.iter().filter(|(_, why)| !why.contains(TOO_FEW)).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}
