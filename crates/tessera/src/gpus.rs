//! Finds the NVIDIA GPUs of this machine and the CUDA libraries, and keeps the cache of compiled
//! kernels.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_cuda::{Devices, FeatureMask, KernelCache, Libraries, describe_kernels, list_devices};

/// Environment variable with additional library folders, separated by colons. They are searched
/// first.
pub const LIBRARY_PATH_VAR: &str = "TESSERA_CUDA_LIBS";

/// Environment variable with the folder for compiled kernels and the autotune cache. An empty value
/// disables the cache.
pub const KERNEL_CACHE_VAR: &str = "TESSERA_KERNELS";

/// Environment variable with the features of GPUs that runs must not use, separated by commas. It
/// reaches every rank process that a command starts on this host.
pub const MASK_FEATURES_VAR: &str = "TESSERA_MASK_FEATURES";

/// Returns the features that [`MASK_FEATURES_VAR`] masks.
///
/// # Errors
/// T1305 for an unknown name.
pub fn masked_features() -> Result<FeatureMask, Diagnostic> {
    std::env::var_os(MASK_FEATURES_VAR).unwrap_or_default().to_string_lossy().parse()
}

/// Opens the cache of compiled kernels and autotuner results. It lies in the user's cache folder
/// unless [`KERNEL_CACHE_VAR`] names another folder.
#[must_use]
pub fn open_kernel_cache() -> Option<Arc<dyn KernelCache>> {
    let folder = match std::env::var_os(KERNEL_CACHE_VAR) {
        Some(configured) => (!configured.is_empty()).then(|| PathBuf::from(configured)),
        None => {
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
            let cache = cache.filter(|c| c.is_absolute()).or_else(home);
            cache.map(|c| c.join("tessera").join("kernels"))
        }
    };
    folder.map(|f| Arc::new(KernelDir(f)) as Arc<dyn KernelCache>)
}

/// A folder that keeps compiled kernels from run to run, one file per kernel.
#[derive(Debug)]
pub struct KernelDir(pub PathBuf);

impl KernelCache for KernelDir {
    fn load(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    /// Writes to a temporary file first and renames it, so that a reader never sees a partial file
    /// although threads, processes and containers may write the same kernel at the same time.
    fn save(&self, name: &str, image: &[u8]) {
        // A failed write only means that the kernel is compiled again in the next run.
        let _ = std::fs::create_dir_all(&self.0).and_then(|()| {
            // A temporary file is readable by its owner alone. The kernel gets the permissions that
            // the user's umask allows.
            let readable = Permissions::from_mode(0o666);
            let mut part = tempfile::Builder::new().permissions(readable).tempfile_in(&self.0)?;
            part.write_all(image)?;
            part.persist(self.0.join(name)).map(drop).map_err(|e| e.error)
        });
    }
}

/// The result of looking for GPUs and libraries.
#[derive(Debug)]
pub struct GpuDiscovery {
    /// Folders searched for the GPU libraries, in order: the configured ones, those of the NVIDIA
    /// wheels of each Python, and those of a CUDA toolkit.
    pub searched: Vec<PathBuf>,
    /// Libraries that were found, and libraries that were not.
    pub libraries: Libraries,
    /// The GPUs, or the reason why the driver reports none.
    pub devices: Result<Devices, Diagnostic>,
}

impl GpuDiscovery {
    /// Loads the NVIDIA libraries that the backend uses, and lists the GPUs that the driver
    /// reports.
    #[must_use]
    pub fn discover() -> GpuDiscovery {
        let split = |name: &str| -> Vec<PathBuf> {
            std::env::var_os(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
        };
        let searched = library_folders(split(LIBRARY_PATH_VAR), &split("PATH"));
        let libraries = Libraries::load(&searched);
        let devices = list_devices(&libraries);
        GpuDiscovery { searched, libraries, devices }
    }

    /// Returns the result as names and values for display: GPUs with the kernels that would run on
    /// them under the masked features, then libraries.
    #[must_use]
    pub fn to_rows(&self) -> Vec<(String, String)> {
        let mask = masked_features();
        let mut out = Vec::new();
        match &self.devices {
            Ok(all) => {
                out.push(("GPUs".to_string(), all.gpus.len().to_string()));
                for (i, g) in all.gpus.iter().enumerate() {
                    let links = match g.nvlinks {
                        Some(0) => ", no NVLink up".to_string(),
                        Some(n) => format!(", {n} NVLinks up"),
                        None => String::new(),
                    };
                    let (major, minor) = g.capability;
                    out.push((
                        format!("GPU {i}"),
                        format!(
                            "{}, {}, {} multiprocessors, sm_{major}{minor}, {}{links}",
                            g.name, g.memory, g.multiprocessors, g.pci_bus_id
                        ),
                    ));
                    if let Ok(mask) = &mask {
                        let kernels = describe_kernels(g, mask).into_iter();
                        out.extend(kernels.map(|(what, text)| (format!("GPU {i}, {what}"), text)));
                    }
                }
                if all.gpus.len() > 1 {
                    out.push(("peer access".to_string(), describe_peer_access(all)));
                }
            }
            // A missing driver is reported with the libraries below.
            Err(d) if d.code.id == tessera_cuda::T1301.id => {
                out.push(("GPUs".to_string(), "none: no driver is installed".to_string()));
            }
            Err(d) => out.push(("GPUs".to_string(), format!("none: {} ({})", d.message, d.code.id))),
        }
        match &mask {
            Ok(mask) if !mask.is_empty() => out.push(("masked features".to_string(), mask.to_string())),
            Ok(_) => {}
            Err(d) => out.push(("masked features".to_string(), format!("{} ({})", d.message, d.code.id))),
        }
        for f in &self.libraries.found {
            let version = f.version.clone().unwrap_or_else(|| "without version".to_string());
            out.push((f.library.name().to_string(), format!("{version}, {}", f.path.display())));
        }
        for l in &self.libraries.missing {
            let diagnostic = l.to_diagnostic();
            let mut text = format!("{} ({})", diagnostic.message, diagnostic.code.id);
            for (path, why) in &l.load_errors {
                text += &format!("; {} cannot be loaded: {why}", path.display());
            }
            out.push((l.library.name().to_string(), text));
        }
        if self.libraries.missing.iter().any(|l| !l.library.is_part_of_driver()) {
            let folders = self.searched.iter().map(|f| f.display().to_string());
            let all: Vec<String> = folders.chain(["the folders of the dynamic loader".to_string()]).collect();
            out.push(("searched".to_string(), all.join(", ")));
        }
        out
    }
}

fn describe_peer_access(all: &Devices) -> String {
    let pairs = |with: fn(&tessera_cuda::PeerLink) -> bool| all.peer_links.iter().filter(|l| with(l)).count();
    let (access, atomics) = (pairs(|l| l.access), pairs(|l| l.atomics));
    match (access, atomics) {
        (0, _) => "none between any pair".to_string(),
        (n, a) if n == all.peer_links.len() && a == n => "between all pairs, with atomics".to_string(),
        (n, a) => {
            let missing = all.peer_links.iter().filter(|l| !l.access).map(|l| format!("{}→{}", l.from, l.to));
            let missing: Vec<String> = missing.collect();
            let exceptions =
                if missing.is_empty() { String::new() } else { format!(", not {}", missing.join(" ")) };
            format!("{n} of {} ordered pairs{exceptions}; atomics on {a}", all.peer_links.len())
        }
    }
}

/// Lists the folders that may contain libraries: the configured ones, those of the NVIDIA wheels
/// beside each Python on the path, and those of a CUDA toolkit.
fn library_folders(configured: Vec<PathBuf>, path: &[PathBuf]) -> Vec<PathBuf> {
    let mut out = configured;
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for bin in path {
        let python = bin.join("python3");
        // The Python of a virtual environment links to another Python, and both may have wheels.
        for python in [Some(python.clone()), std::fs::canonicalize(&python).ok()].into_iter().flatten() {
            if python.exists()
                && let Some(prefix) = python.parent().and_then(Path::parent)
                && !prefixes.iter().any(|p| p == prefix)
            {
                prefixes.push(prefix.to_path_buf());
            }
        }
    }
    let mut sites = Vec::new();
    for prefix in prefixes {
        for lib in ["lib", "lib64", "local/lib"] {
            for python in sorted_entries(&prefix.join(lib)) {
                if python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) {
                    sites.extend(["site-packages", "dist-packages"].map(|s| python.join(s).join("nvidia")));
                }
            }
        }
    }
    for site in sites {
        out.extend(sorted_entries(&site).into_iter().map(|wheel| wheel.join("lib")).filter(|p| p.is_dir()));
    }
    let toolkit = ["/usr/local/cuda/lib64", "/usr/local/nvidia/lib64"].map(PathBuf::from);
    out.extend(toolkit.into_iter().filter(|p| p.is_dir()));
    // Two names may refer to the same folder, which is searched only once. Empty names are dropped.
    let mut seen = BTreeSet::new();
    out.retain(|p| {
        let canonical = std::fs::canonicalize(p).unwrap_or_else(|_| p.clone());
        !p.as_os_str().is_empty() && seen.insert(canonical)
    });
    out
}

/// Returns the sorted entries of a folder, or nothing if it cannot be read.
fn sorted_entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use tessera_base::Bytes;
    use tessera_cuda::{Gpu, PeerLink};

    use super::*;

    #[test]
    fn configured_folders_come_before_wheels() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        for p in ["env/bin", "env/lib/python3.12/site-packages/nvidia/cu13/lib", "mine"] {
            std::fs::create_dir_all(at(p)).unwrap();
        }
        std::fs::create_dir_all(at("env/lib/python3.12/site-packages/nvidia/cudnn/lib")).unwrap();
        std::fs::create_dir_all(at("env/lib/python3.12/site-packages/nvidia/headers")).unwrap();
        std::fs::write(at("env/bin/python3"), "").unwrap();
        let found = library_folders(vec![at("mine")], &[at("nowhere"), at("env/bin"), at("env/bin")]);
        let site = at("env/lib/python3.12/site-packages/nvidia");
        let begin = [at("mine"), site.join("cu13/lib"), site.join("cudnn/lib")];
        assert_eq!(found[..3], begin);
        assert!(found[3..].iter().all(|p| !p.starts_with(dir.path())), "{found:?}");
    }

    #[test]
    fn concurrently_written_kernels_are_never_torn() {
        let dir = tempfile::tempdir().unwrap();
        let folder = KernelDir(dir.path().join("new"));
        let images = [vec![1_u8; 1 << 16], vec![2; 1 << 20]];
        std::thread::scope(|s| {
            for image in &images {
                s.spawn(|| (0..50).for_each(|_| folder.save("kernel", image)));
            }
            for _ in 0..200 {
                let found = folder.load("kernel");
                assert!(found.is_none_or(|f| images.contains(&f)));
            }
        });
        assert!(images.contains(&folder.load("kernel").unwrap()));
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
        // Other users can read the kernel as they can read any new file.
        let plain = dir.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&folder.0.join("kernel")), mode(&plain));
    }

    #[test]
    fn each_gpu_is_followed_by_the_kernels_that_would_run_on_it() {
        let gpu = |capability| Gpu {
            name: "a GPU".into(),
            uuid: String::new(),
            pci_bus_id: "0000:00:00.0".into(),
            memory: Bytes(1 << 30),
            multiprocessors: 108,
            capability,
            nvlinks: None,
        };
        let devices = Devices { gpus: vec![gpu((8, 0)), gpu((10, 0))], peer_links: Vec::new() };
        let libraries = Libraries::load(&[]);
        let rows = GpuDiscovery { searched: Vec::new(), libraries, devices: Ok(devices) }.to_rows();
        let at = |name: &str| rows.iter().position(|(n, _)| n == name).unwrap();
        assert_eq!(at("GPU 0, GEMMs in bf16"), at("GPU 0") + 1);
        assert!(at("GPU 0, all other ops") < at("GPU 1"));
        assert!(rows[at("GPU 0, GEMMs in e4m3")].1.contains("not supported"));
        assert!(rows[at("GPU 1, GEMMs in e4m3")].1.contains("cuBLASLt"));
    }

    #[test]
    fn pairs_without_peer_access_are_listed() {
        let gpu = Gpu {
            name: "a GPU".into(),
            uuid: String::new(),
            pci_bus_id: "0000:00:00.0".into(),
            memory: Bytes(1 << 30),
            multiprocessors: 1,
            capability: (9, 0),
            nvlinks: None,
        };
        let link = |from, to, access| PeerLink { from, to, access, atomics: access };
        let gpus = vec![gpu.clone(), gpu];
        let both = Devices { gpus, peer_links: vec![link(0, 1, true), link(1, 0, true)] };
        assert_eq!(describe_peer_access(&both), "between all pairs, with atomics");
        let one = Devices { peer_links: vec![link(0, 1, true), link(1, 0, false)], ..both.clone() };
        assert_eq!(describe_peer_access(&one), "1 of 2 ordered pairs, not 1→0; atomics on 1");
        let none = Devices { peer_links: vec![link(0, 1, false), link(1, 0, false)], ..both };
        assert_eq!(describe_peer_access(&none), "none between any pair");
    }
}
