//! NVIDIA GPUs of the machine at hand: where their libraries may lie, and what was found.

use std::collections::BTreeSet;
use std::fs::Permissions;
use std::io::Write;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_cuda::{Devices, Libraries, Shelf, devices};

/// Names further folders with libraries, separated by colons; they come first.
pub const FOLDERS: &str = "TESSERA_CUDA_LIBS";

/// Names the folder where compiled kernels and choices by time are kept; an empty name keeps none.
pub const KERNELS: &str = "TESSERA_KERNELS";

/// Where compiled kernels and choices by time are kept from run to run: a folder of the user's cache, unless told otherwise.
#[must_use]
pub fn kernels() -> Option<Arc<dyn Shelf>> {
    let folder = match std::env::var_os(KERNELS) {
        Some(told) => (!told.is_empty()).then(|| PathBuf::from(told)),
        None => {
            let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
            let home = || std::env::var_os("HOME").map(|h| PathBuf::from(h).join(".cache"));
            let cache = cache.filter(|c| c.is_absolute()).or_else(home);
            cache.map(|c| c.join("tessera").join("kernels"))
        }
    };
    folder.map(|f| Arc::new(Folder(f)) as Arc<dyn Shelf>)
}

/// A folder of compiled kernels.
#[derive(Debug)]
pub struct Folder(pub PathBuf);

impl Shelf for Folder {
    fn find(&self, name: &str) -> Option<Vec<u8>> {
        std::fs::read(self.0.join(name)).ok()
    }

    /// Under a name of its own first: a reader never sees half a file, though ranks in threads, processes and containers keep the
    /// same at once.
    fn keep(&self, name: &str, image: &[u8]) {
        // What cannot be kept is made again next time.
        let _ = std::fs::create_dir_all(&self.0).and_then(|()| {
            // As readable as a file is by the user's mask; a temporary one is its owner's alone.
            let readable = Permissions::from_mode(0o666);
            let mut part = tempfile::Builder::new().permissions(readable).tempfile_in(&self.0)?;
            part.write_all(image)?;
            part.persist(self.0.join(name)).map(drop).map_err(|e| e.error)
        });
    }
}

/// What was found.
#[derive(Debug)]
pub struct Gpus {
    /// Folders that were looked in, in order.
    pub folders: Vec<PathBuf>,
    /// Libraries that are here, and those that are not.
    pub libraries: Libraries,
    /// GPUs, or why the driver tells of none.
    pub devices: Result<Devices, Diagnostic>,
}

impl Gpus {
    /// Looks.
    #[must_use]
    pub fn look() -> Gpus {
        let split = |name: &str| -> Vec<PathBuf> {
            std::env::var_os(name).map(|v| std::env::split_paths(&v).collect()).unwrap_or_default()
        };
        let folders = folders(split(FOLDERS), &split("PATH"));
        let libraries = Libraries::load(&folders);
        let devices = devices(&libraries);
        Gpus { folders, libraries, devices }
    }

    /// The same by name, for people.
    #[must_use]
    pub fn facts(&self) -> Vec<(String, String)> {
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
                            g.name, g.memory, g.multiprocessors, g.bus
                        ),
                    ));
                }
                if all.gpus.len() > 1 {
                    out.push(("peer access".to_string(), peers(all)));
                }
            }
            // The driver's absence is told among the libraries.
            Err(d) if d.code.id == tessera_cuda::T1301.id => {
                out.push(("GPUs".to_string(), "none: no driver is here".to_string()));
            }
            Err(d) => out.push(("GPUs".to_string(), format!("none: {} ({})", d.message, d.code.id))),
        }
        for f in &self.libraries.found {
            let version = f.version.clone().unwrap_or_else(|| "of no version".to_string());
            out.push((f.library.name().to_string(), format!("{version}, {}", f.path.display())));
        }
        for l in &self.libraries.lost {
            let told = l.diagnostic();
            let mut text = format!("{} ({})", told.message, told.code.id);
            for (path, why) in &l.refused {
                text += &format!("; {} would not load: {why}", path.display());
            }
            out.push((l.library.name().to_string(), text));
        }
        if self.libraries.lost.iter().any(|l| !l.library.of_driver()) {
            let folders = self.folders.iter().map(|f| f.display().to_string());
            let all: Vec<String> =
                folders.chain(["the folders of the system's loader".to_string()]).collect();
            out.push(("looked in".to_string(), all.join(", ")));
        }
        out
    }
}

fn peers(all: &Devices) -> String {
    let pairs = |with: fn(&tessera_cuda::Link) -> bool| all.links.iter().filter(|l| with(l)).count();
    let (access, atomics) = (pairs(|l| l.access), pairs(|l| l.atomics));
    match (access, atomics) {
        (0, _) => "none between any two".to_string(),
        (n, a) if n == all.links.len() && a == n => "between all, atomics too".to_string(),
        (n, a) => {
            let lacking = all.links.iter().filter(|l| !l.access).map(|l| format!("{}→{}", l.from, l.to));
            let lacking: Vec<String> = lacking.collect();
            let but = if lacking.is_empty() { String::new() } else { format!(", not {}", lacking.join(" ")) };
            format!("{n} of {} ordered pairs{but}; atomics on {a}", all.links.len())
        }
    }
}

/// Folders that may hold libraries: those told, those of wheels beside each Python on the path, those of a toolkit.
fn folders(told: Vec<PathBuf>, path: &[PathBuf]) -> Vec<PathBuf> {
    let mut out = told;
    let mut prefixes: Vec<PathBuf> = Vec::new();
    for bin in path {
        let python = bin.join("python3");
        // An environment's Python is a link to another's, and both may have wheels.
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
            for python in entries(&prefix.join(lib)) {
                if python.file_name().is_some_and(|n| n.to_string_lossy().starts_with("python3")) {
                    sites.extend(["site-packages", "dist-packages"].map(|s| python.join(s).join("nvidia")));
                }
            }
        }
    }
    for site in sites {
        out.extend(entries(&site).into_iter().map(|wheel| wheel.join("lib")).filter(|p| p.is_dir()));
    }
    let toolkit = ["/usr/local/cuda/lib64", "/usr/local/nvidia/lib64"].map(PathBuf::from);
    out.extend(toolkit.into_iter().filter(|p| p.is_dir()));
    // A folder may be there under two names: it is looked in once, and an empty name is none.
    let mut seen = BTreeSet::new();
    out.retain(|p| {
        let same = std::fs::canonicalize(p).unwrap_or_else(|_| p.clone());
        !p.as_os_str().is_empty() && seen.insert(same)
    });
    out
}

/// What lies in a folder, sorted; nothing where it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> =
        std::fs::read_dir(folder).map(|d| d.flatten().map(|e| e.path()).collect()).unwrap_or_default();
    all.sort();
    all
}

#[cfg(test)]
mod tests {
    use tessera_base::Bytes;
    use tessera_cuda::{Gpu, Link};

    use super::*;

    #[test]
    fn wheels_of_an_environment_come_after_what_was_told() {
        let dir = tempfile::tempdir().unwrap();
        let at = |p: &str| dir.path().join(p);
        for p in ["env/bin", "env/lib/python3.12/site-packages/nvidia/cu13/lib", "mine"] {
            std::fs::create_dir_all(at(p)).unwrap();
        }
        std::fs::create_dir_all(at("env/lib/python3.12/site-packages/nvidia/cudnn/lib")).unwrap();
        std::fs::create_dir_all(at("env/lib/python3.12/site-packages/nvidia/headers")).unwrap();
        std::fs::write(at("env/bin/python3"), "").unwrap();
        let found = folders(vec![at("mine")], &[at("nowhere"), at("env/bin"), at("env/bin")]);
        let site = at("env/lib/python3.12/site-packages/nvidia");
        let begin = [at("mine"), site.join("cu13/lib"), site.join("cudnn/lib")];
        assert_eq!(found[..3], begin);
        assert!(found[3..].iter().all(|p| !p.starts_with(dir.path())), "{found:?}");
    }

    #[test]
    fn what_several_keep_at_once_is_found_whole() {
        let dir = tempfile::tempdir().unwrap();
        let folder = Folder(dir.path().join("new"));
        let images = [vec![1_u8; 1 << 16], vec![2; 1 << 20]];
        std::thread::scope(|s| {
            for image in &images {
                s.spawn(|| (0..50).for_each(|_| folder.keep("kernel", image)));
            }
            for _ in 0..200 {
                let found = folder.find("kernel");
                assert!(found.is_none_or(|f| images.contains(&f)));
            }
        });
        assert!(images.contains(&folder.find("kernel").unwrap()));
        assert_eq!(std::fs::read_dir(&folder.0).unwrap().count(), 1);
        // Others read it as they would any file.
        let plain = dir.path().join("plain");
        std::fs::write(&plain, "").unwrap();
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode();
        assert_eq!(mode(&folder.0.join("kernel")), mode(&plain));
    }

    #[test]
    fn pairs_that_cannot_reach_each_other_are_named() {
        let gpu = Gpu {
            name: "a GPU".into(),
            bus: "0000:00:00.0".into(),
            memory: Bytes(1 << 30),
            multiprocessors: 1,
            capability: (9, 0),
            nvlinks: None,
        };
        let link = |from, to, access| Link { from, to, access, atomics: access };
        let gpus = vec![gpu.clone(), gpu];
        let both = Devices { gpus, links: vec![link(0, 1, true), link(1, 0, true)] };
        assert_eq!(peers(&both), "between all, atomics too");
        let one = Devices { links: vec![link(0, 1, true), link(1, 0, false)], ..both.clone() };
        assert_eq!(peers(&one), "1 of 2 ordered pairs, not 1→0; atomics on 1");
        let none = Devices { links: vec![link(0, 1, false), link(1, 0, false)], ..both };
        assert_eq!(peers(&none), "none between any two");
    }
}
