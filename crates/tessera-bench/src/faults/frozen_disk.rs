//! A file system of its own that can be frozen: every write to it blocks until it thaws.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use tempfile::TempDir;

/// Size of the file system's image, which is a sparse file.
const IMAGE_BYTES: u64 = 256 << 20;

/// A mounted ext4 image. Dropping the value thaws and unmounts it.
pub struct FreezableDisk {
    dir: TempDir,
}

impl FreezableDisk {
    /// Creates and mounts an image, which needs root.
    pub fn mount_image() -> anyhow::Result<FreezableDisk> {
        let disk = FreezableDisk { dir: tempfile::tempdir()? };
        let (image, folder) = (disk.dir.path().join("image"), disk.mount_point());
        std::fs::create_dir(&folder)?;
        std::fs::File::create(&image)?.set_len(IMAGE_BYTES)?;
        run_command("mkfs.ext4", &["-q", "-F"], &image)?;
        let mounted = Command::new("mount").args(["-o", "loop"]).arg(&image).arg(&folder).output();
        let mounted = mounted.context("cannot run `mount`")?;
        if !mounted.status.success() {
            bail!("mount: {}", String::from_utf8_lossy(&mounted.stderr).trim());
        }
        Ok(disk)
    }

    /// Returns the folder on the file system.
    pub fn mount_point(&self) -> PathBuf {
        self.dir.path().join("disk")
    }

    /// Blocks all writes to the file system.
    pub fn freeze_writes(&self) -> anyhow::Result<()> {
        run_command("fsfreeze", &["-f"], &self.mount_point())
    }

    /// Lets the blocked writes continue.
    pub fn thaw_writes(&self) -> anyhow::Result<()> {
        run_command("fsfreeze", &["-u"], &self.mount_point())
    }
}

impl Drop for FreezableDisk {
    fn drop(&mut self) {
        // Without a freeze or a mount there is nothing to undo.
        let _ = self.thaw_writes();
        let _ = run_command("umount", &[], &self.mount_point());
    }
}

fn run_command(program: &str, args: &[&str], path: &Path) -> anyhow::Result<()> {
    let o = Command::new(program).args(args).arg(path).output();
    let o = o.with_context(|| format!("cannot run `{program}`"))?;
    if !o.status.success() {
        bail!("{program} {}: {}", path.display(), String::from_utf8_lossy(&o.stderr).trim());
    }
    Ok(())
}
