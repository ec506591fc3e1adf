//! Folders that appear whole or not at all, and files read with a diagnostic instead of an error number.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};

use tessera_base::{Code, Diagnostic};

/// Something is there already.
pub static T0013: Code = Code {
    id: "T0013",
    title: "output folder exists",
    page: "Nothing is ever overwritten: the folder named for output is already there. Name another one, or move it away.",
};
/// Writing failed.
pub static T0014: Code = Code {
    id: "T0014",
    title: "output cannot be written",
    page: "The operating system refused to create or write a file: no space left, no permission, or a read-only place. \
A plan folder appears whole or not at all. A run's folder keeps what was written before, and its record says how the run \
ended.",
};

/// A folder under construction beside its final place.
#[derive(Debug)]
pub(crate) struct Folder {
    staging: PathBuf,
    target: PathBuf,
    done: bool,
}

impl Folder {
    /// Begins a folder that must not exist yet.
    pub(crate) fn create(target: &Path) -> Result<Folder, Diagnostic> {
        refuse_existing(target)?;
        let name = target.file_name().map_or("plan".into(), |n| n.to_string_lossy().into_owned());
        let staging = target.with_file_name(format!(".{name}.{}", std::process::id()));
        std::fs::create_dir_all(&staging).map_err(|e| unwritable(&staging, &e))?;
        Ok(Folder { staging, target: target.to_path_buf(), done: false })
    }

    pub(crate) fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), Diagnostic> {
        let path = self.staging.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| unwritable(parent, &e))?;
        }
        write_file(&path, bytes)
    }

    /// Moves it to its place.
    pub(crate) fn finish(mut self) -> Result<(), Diagnostic> {
        std::fs::rename(&self.staging, &self.target).map_err(|e| unwritable(&self.target, &e))?;
        self.done = true;
        Ok(())
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        if !self.done {
            // What cannot be removed is a hidden folder that nothing reads.
            let _ = std::fs::remove_dir_all(&self.staging);
        }
    }
}

/// Refuses a target that is there already.
pub(crate) fn refuse_existing(target: &Path) -> Result<(), Diagnostic> {
    if target.symlink_metadata().is_ok() {
        return Err(Diagnostic::error(&T0013, format!("{} is there already", target.display()))
            .hint("name another folder with --out, or move this one away"));
    }
    Ok(())
}

/// Writes a file that appears whole or not at all.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Diagnostic> {
    let name = path.file_name().map_or("file".into(), |n| n.to_string_lossy().into_owned());
    let staging = path.with_file_name(format!(".{name}.part"));
    let write = || -> std::io::Result<()> {
        let mut f = File::create(&staging)?;
        f.write_all(bytes)?;
        f.sync_data()?;
        std::fs::rename(&staging, path)
    };
    write().map_err(|e| {
        let _ = std::fs::remove_file(&staging);
        unwritable(path, &e)
    })
}

/// Reads a text file.
pub(crate) fn read_text(path: &Path, code: &'static Code) -> Result<String, Diagnostic> {
    std::fs::read_to_string(path)
        .map_err(|e| Diagnostic::error(code, format!("{} cannot be read: {e}", path.display())))
}

/// T0014 for a path.
pub(crate) fn unwritable(path: &Path, e: &std::io::Error) -> Diagnostic {
    let d = Diagnostic::error(&T0014, format!("{} cannot be written: {e}", path.display()));
    match e.kind() {
        std::io::ErrorKind::StorageFull => {
            d.hint("make room on the disk, or name a folder on another one with --out")
        }
        std::io::ErrorKind::PermissionDenied => d.hint("name a folder that you may write to with --out"),
        _ => d,
    }
}
