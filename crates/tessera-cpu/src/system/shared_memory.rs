//! Memory without a name that several processes map, and whose size never changes.
//!
//! * `create_sealed_memory(name, bytes)` creates such memory, full of zeros. No program that this process starts inherits
//!   the descriptor.
//! * `is_sealed(fd)` returns whether the memory behind a descriptor cannot shrink. A file that can shrink would turn a
//!   peer's mistake into a SIGBUS here.
//! * `has_size(size, bytes)` returns whether memory that was created with `bytes` bytes reports this size.
//! * `memory_id(fd)` returns a number that no other memory of this host has, if the system counts it.

#[cfg(target_os = "linux")]
pub(crate) use linux::{create_sealed_memory, has_size, is_sealed, memory_id};
#[cfg(target_os = "macos")]
pub(crate) use macos::{create_sealed_memory, has_size, is_sealed, memory_id};

#[cfg(target_os = "linux")]
mod linux {
    use std::io::{Error, Result};

    use rustix::fd::{AsFd, OwnedFd};
    use rustix::fs::{
        MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create,
    };

    pub(crate) fn create_sealed_memory(name: &str, bytes: u64) -> Result<OwnedFd> {
        let fd = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&fd, bytes)?;
        fcntl_add_seals(&fd, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        Ok(fd)
    }

    pub(crate) fn is_sealed(fd: impl AsFd) -> Result<bool> {
        Ok(fcntl_get_seals(fd)?.contains(SealFlags::SHRINK))
    }

    pub(crate) fn has_size(size: u64, bytes: u64) -> bool {
        size == bytes
    }

    pub(crate) fn memory_id(fd: impl AsFd) -> Result<Option<u64>> {
        Ok(Some(fstat(fd).map_err(Error::from)?.st_ino))
    }
}

/// A POSIX shared memory object that loses its name at once. macOS lets such an object get its size a single time, so it is
/// sealed without a seal. A temporary file would be written to a disk, and could shrink.
#[cfg(any(target_os = "macos", test))]
mod macos {
    use std::io::Result;

    use rustix::fd::{AsFd, OwnedFd};
    use rustix::fs::{FileType, Mode, fstat, ftruncate};
    use rustix::io::Errno;
    use rustix::shm;

    /// How many names are tried. Another thread has a taken one until it unlinks it, or a process with this one's id left it.
    const MAX_NAMES: u32 = 64;

    pub(crate) fn create_sealed_memory(_: &str, bytes: u64) -> Result<OwnedFd> {
        let flags = shm::OFlags::CREATE | shm::OFlags::EXCL | shm::OFlags::RDWR;
        for number in 0..MAX_NAMES {
            // macOS limits a name to 31 bytes.
            let name = format!("/tessera.{:x}.{number:x}", std::process::id());
            let fd = match shm::open(&name, flags, Mode::RUSR | Mode::WUSR) {
                Ok(fd) => fd,
                Err(Errno::EXIST) => continue,
                Err(e) => return Err(e.into()),
            };
            shm::unlink(&name)?;
            ftruncate(&fd, bytes)?;
            return Ok(fd);
        }
        Err(Errno::EXIST.into())
    }

    /// Only shared memory objects have no file type on macOS.
    pub(crate) fn is_sealed(fd: impl AsFd) -> Result<bool> {
        let stat = fstat(fd)?;
        Ok(FileType::from_raw_mode(stat.st_mode) == FileType::Unknown && stat.st_size > 0)
    }

    /// The size of an object is a multiple of a page.
    pub(crate) fn has_size(size: u64, bytes: u64) -> bool {
        size == bytes || size == bytes.next_multiple_of(rustix::param::page_size() as u64)
    }

    /// Objects have no number on macOS, so ranks cannot compare which memory they have.
    pub(crate) fn memory_id(_: impl AsFd) -> Result<Option<u64>> {
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use rustix::fs::fstat;

    use super::macos;

    #[test]
    fn shared_memory_objects_have_their_size_and_no_name() {
        let fds = [4097, 12].map(|bytes| (bytes, macos::create_sealed_memory("", bytes).unwrap()));
        for (bytes, fd) in &fds {
            assert!(macos::has_size(fstat(fd).unwrap().st_size as u64, *bytes));
            // On Linux, such an object is a file that can shrink.
            assert_eq!(macos::is_sealed(fd).unwrap(), cfg!(target_os = "macos"));
            assert_eq!(macos::memory_id(fd).unwrap(), None);
        }
        assert!(!macos::has_size(4096, 4097) && !macos::has_size(1 << 20, 4097));
        let name = format!("/tessera.{:x}.0", std::process::id());
        let found = rustix::shm::open(name, rustix::shm::OFlags::RDWR, rustix::fs::Mode::empty());
        assert_eq!(found.unwrap_err(), rustix::io::Errno::NOENT);
    }
}
