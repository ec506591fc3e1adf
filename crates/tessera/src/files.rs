//! Staged folders, which appear complete or not at all, and file access that reports errors as
//! diagnostics.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use tessera_base::{Code, Diagnostic};

use tessera_runtime::tripwire::T0765;

use crate::codes::{T0013, T0014};

/// A folder under construction in a staging directory beside its target path.
#[derive(Debug)]
pub struct StagedFolder {
    staging: PathBuf,
    target: PathBuf,
    committed: bool,
}

impl StagedFolder {
    /// Creates the staging directory. The target must not exist yet.
    pub fn create(target: &Path) -> Result<StagedFolder, Diagnostic> {
        refuse_existing(target)?;
        StagedFolder::create_over(target)
    }

    /// Like [`StagedFolder::create`], for a target that may be an empty folder of this process.
    pub(crate) fn create_over(target: &Path) -> Result<StagedFolder, Diagnostic> {
        let name = target.file_name().map_or("plan".into(), |n| n.to_string_lossy().into_owned());
        let staging = target.with_file_name(format!(".{name}.{}", std::process::id()));
        std::fs::create_dir_all(&staging).map_err(|e| write_error(&staging, &e))?;
        Ok(StagedFolder { staging, target: target.to_path_buf(), committed: false })
    }

    /// Writes a file of the folder, whose name may contain subfolders.
    ///
    /// # Errors
    /// T0014.
    pub fn write(&mut self, name: &str, bytes: &[u8]) -> Result<(), Diagnostic> {
        let path = self.staging.join(name);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(|e| write_error(parent, &e))?;
        }
        write_file(&path, bytes)
    }

    /// Returns the path of a file of the folder until the folder is moved, for a writer that takes a path.
    pub(crate) fn path_of(&self, name: &str) -> PathBuf {
        self.staging.join(name)
    }

    /// Moves the folder to its target path.
    pub fn commit(mut self) -> Result<(), Diagnostic> {
        // A rename replaces an empty folder only, so it never overwrites the output of another run.
        std::fs::rename(&self.staging, &self.target).map_err(|e| match e.kind() {
            ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                existing_output(&self.target)
            }
            _ => write_error(&self.target, &e),
        })?;
        self.committed = true;
        Ok(())
    }
}

impl Drop for StagedFolder {
    fn drop(&mut self) {
        if !self.committed {
            // A staging directory that cannot be removed is hidden, and nothing reads it.
            let _ = std::fs::remove_dir_all(&self.staging);
        }
    }
}

/// Returns T0013 if the target exists.
pub fn refuse_existing(target: &Path) -> Result<(), Diagnostic> {
    if target.symlink_metadata().is_ok() {
        return Err(existing_output(target));
    }
    Ok(())
}

fn existing_output(target: &Path) -> Diagnostic {
    Diagnostic::error(&T0013, format!("{} already exists", target.display()))
        .with_hint("name another folder, or move this one away")
}

/// An output folder that this process created empty, so that no other process takes its name.
/// Dropping the value removes the folder if nothing was written to it.
#[derive(Debug)]
pub struct ReservedFolder(PathBuf);

impl ReservedFolder {
    /// Creates the first of `parent/name-1`, `parent/name-2`… that does not exist.
    ///
    /// # Errors
    /// T0014.
    pub fn create(parent: &Path, name: &str) -> Result<ReservedFolder, Diagnostic> {
        std::fs::create_dir_all(parent).map_err(|e| write_error(parent, &e))?;
        let mut number = 1;
        loop {
            let folder = parent.join(format!("{name}-{number}"));
            match std::fs::create_dir(&folder) {
                Ok(()) => return Ok(ReservedFolder(folder)),
                Err(e) if e.kind() == ErrorKind::AlreadyExists => number += 1_u64,
                Err(e) => return Err(write_error(&folder, &e)),
            }
        }
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

/// The folder of a run: one that a user named, or one that is removed at the end of the run unless it fails.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    temporary: Option<ReservedFolder>,
}

impl RunFolder {
    /// Takes the folder that the user named, or reserves one with `name` in the system's folder for temporary files.
    ///
    /// # Errors
    /// T0014.
    pub fn new(named: Option<&Path>, name: &str) -> Result<RunFolder, Diagnostic> {
        if let Some(path) = named {
            return Ok(RunFolder { path: path.to_path_buf(), temporary: None });
        }
        let reserved = ReservedFolder::create(&std::env::temp_dir(), name)?;
        Ok(RunFolder { path: reserved.path().to_path_buf(), temporary: Some(reserved) })
    }

    /// Returns the path of the folder.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the user named no folder.
    #[must_use]
    pub fn is_temporary(&self) -> bool {
        self.temporary.is_some()
    }

    /// Removes a temporary folder unless the run failed.
    pub fn close(self, has_failed: bool) {
        if self.temporary.is_some() && !has_failed {
            // Nobody misses a folder that stays in the system's temporary folder.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

impl Drop for ReservedFolder {
    fn drop(&mut self) {
        // This fails if the folder is in use, as it should.
        let _ = std::fs::remove_dir(&self.0);
    }
}

/// Writes a file atomically: it appears complete or not at all.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Diagnostic> {
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
        write_error(path, &e)
    })
}

/// Checks that `path` still names the open `file`. Writes to a file that was removed succeed, so
/// only this comparison finds the loss.
///
/// # Errors
/// T0765.
pub(crate) fn check_in_place(file: &File, path: &Path) -> Result<(), Diagnostic> {
    let open = file.metadata().map_err(|e| write_error(path, &e))?;
    match std::fs::metadata(path) {
        Ok(found) if (found.dev(), found.ino()) == (open.dev(), open.ino()) => Ok(()),
        Ok(_) => Err(lost_output(path, "another file has this name now")),
        Err(e) => Err(lost_output(path, &e.to_string())),
    }
}

/// Builds the T0765 diagnostic for an output file that is not in its place.
pub(crate) fn lost_output(path: &Path, why: &str) -> Diagnostic {
    Diagnostic::error(&T0765, format!("{} was removed or replaced during the run: {why}", path.display()))
        .with_hint("find the program that removed it, and stream again with another --out")
}

/// Maximum size of a text input in bytes: a config, a mapping, a file of a plan.
pub const MAX_TEXT_BYTES: u64 = 64 << 20;

/// Opens a regular file for reading. A named pipe, a device or a folder is refused without a wait
/// for a writer.
pub fn open_regular_file(path: &Path) -> std::io::Result<File> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if file.metadata()?.is_file() {
        return Ok(file);
    }
    Err(std::io::Error::new(ErrorKind::InvalidInput, "not a regular file"))
}

/// Reads a regular file of at most `max_bytes` bytes.
pub fn read_file(path: &Path, max_bytes: u64) -> std::io::Result<Vec<u8>> {
    let file = open_regular_file(path)?;
    let mut bytes = Vec::new();
    // The length that the system reports is checked first, and a file may grow while it is read.
    let fits = file.metadata()?.len() <= max_bytes
        && file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes)? as u64 <= max_bytes;
    if fits {
        return Ok(bytes);
    }
    Err(std::io::Error::new(ErrorKind::FileTooLarge, format!("more than {max_bytes} bytes")))
}

/// Reads a text input: a regular file of at most [`MAX_TEXT_BYTES`] bytes of UTF-8.
pub fn read_text_file(path: &Path) -> std::io::Result<String> {
    let bytes = read_file(path, MAX_TEXT_BYTES)?;
    String::from_utf8(bytes).map_err(|e| std::io::Error::new(ErrorKind::InvalidData, e.utf8_error()))
}

/// Reads a text input and reports an error under `code`.
pub fn read_text(path: &Path, code: &'static Code) -> Result<String, Diagnostic> {
    read_text_file(path)
        .map_err(|e| Diagnostic::error(code, format!("{} cannot be read: {e}", path.display())))
}

/// Builds the T0014 diagnostic for a failed write to `path`.
pub fn write_error(path: &Path, e: &std::io::Error) -> Diagnostic {
    let d = Diagnostic::error(&T0014, format!("{} cannot be written: {e}", path.display()));
    match e.kind() {
        ErrorKind::StorageFull => {
            d.with_hint("free some disk space, or name a folder on another disk with --out")
        }
        ErrorKind::PermissionDenied => d.with_hint("name a folder that you may write to with --out"),
        _ => d,
    }
}
