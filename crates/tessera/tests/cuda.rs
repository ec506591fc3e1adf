//! The GPU backend under the suite that the CPU backend passes. Where there is no GPU this says so and passes.

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tessera::gpus::Gpus;
use tessera_cuda::{Cuda, Options};
use tessera_filetests::{Maker, Subject, Tolerance, conformance};
use tessera_ir::Program;
use tessera_mesh::Mesh;

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
    let open = |mesh: &Mesh, _: &[Vec<Arc<Program>>]| -> Result<Vec<Maker<Cuda>>, String> {
        if mesh.iter().count() > 1 {
            return Err(format!("a mesh of {} ranks", mesh.iter().count()));
        }
        let maker = |device: u32| -> Maker<Cuda> {
            let found = Arc::clone(&found);
            let options = Options {
                device,
                kernels: Some(std::env::temp_dir().join("tessera-kernels")),
                patience: PATIENCE,
                graphs: true,
            };
            Box::new(move |seat| Cuda::open(&found.libraries, seat, options).map_err(|d| d.message.clone()))
        };
        Ok(mesh.iter().map(|r| maker(r.0 % count)).collect())
    };
    // Sums are taken in another order than the reference's, and the device's transcendental functions are good to a few
    // units in the last place.
    let subject =
        Subject { name: "cuda", open: &open, tolerance: Tolerance { relative: 1e-6 }, patience: PATIENCE };
    let report = conformance(&subject, &texts());
    println!("{report}");
    assert!(report.failed.is_empty(), "{report}");
}
