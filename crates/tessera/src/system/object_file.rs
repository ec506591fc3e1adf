//! The file that a part of this program was loaded from.
//!
//! * `open_object_file(address)` opens the executable or the shared object with the code at an address.

#[cfg(target_os = "linux")]
pub(crate) use linux::open_object_file;
#[cfg(target_os = "macos")]
pub(crate) use macos::open_object_file;

#[cfg(target_os = "linux")]
mod linux {
    use std::fs::File;
    use std::io::Result;
    use std::path::Path;

    pub(crate) fn open_object_file(address: usize) -> Result<File> {
        let maps = std::fs::read_to_string("/proc/self/maps")?;
        let path = maps.lines().find_map(|line| mapped_file_at(line, address));
        let executable = std::fs::read_link("/proc/self/exe")?;
        // The link leads to the running executable even after another file has replaced it.
        File::open(match path {
            Some(path) if Path::new(path) != executable => Path::new(path),
            _ => Path::new("/proc/self/exe"),
        })
    }

    /// Returns the file of a line of `/proc/self/maps` if its range contains an address.
    fn mapped_file_at(line: &str, address: usize) -> Option<&str> {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let bound = |hex| usize::from_str_radix(hex, 16).ok();
        let path = rest.find('/').map(|at| &rest[at..])?;
        (bound(start)?..bound(end)?).contains(&address).then_some(path)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn an_address_is_found_in_its_mapping_alone() {
            let line = "7f10-7f20 r-xp 00001000 fd:00 42   /opt/a folder/lib.so";
            assert_eq!(mapped_file_at(line, 0x7f10), Some("/opt/a folder/lib.so"));
            assert_eq!(mapped_file_at(line, 0x7f20), None);
            assert_eq!(mapped_file_at("7f10-7f20 rw-p 00000000 00:00 0", 0x7f10), None);
        }
    }
}

/// The dynamic linker. It knows the path of a file and not the file, so a build that replaces the file of a running process
/// changes what the process reads.
#[cfg(any(target_os = "macos", test))]
#[allow(unsafe_code)]
mod macos {
    use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
    use std::fs::File;
    use std::io::{Error, ErrorKind, Result};
    use std::os::unix::ffi::OsStrExt;
    use std::ptr::null;

    /// `Dl_info` of dlfcn.h.
    #[repr(C)]
    struct SymbolInfo {
        file_name: *const c_char,
        file_base: *const c_void,
        symbol_name: *const c_char,
        symbol_address: *const c_void,
    }

    unsafe extern "C" {
        unsafe fn dladdr(address: *const c_void, info: *mut SymbolInfo) -> c_int;
    }

    pub(crate) fn open_object_file(address: usize) -> Result<File> {
        let mut info =
            SymbolInfo { file_name: null(), file_base: null(), symbol_name: null(), symbol_address: null() };
        // SAFETY: `dladdr` accepts any address, and writes only to the struct, which has the layout of dlfcn.h.
        let is_found = unsafe { dladdr(address as *const c_void, &mut info) } != 0;
        if !is_found || info.file_name.is_null() {
            return Err(Error::new(ErrorKind::NotFound, "the dynamic linker knows no file of this code"));
        }
        // SAFETY: the name is a string that lives as long as the file is loaded, and the file holds this code.
        let name = unsafe { CStr::from_ptr(info.file_name) };
        File::open(OsStr::from_bytes(name.to_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::macos;

    #[test]
    fn the_dynamic_linker_finds_the_file_of_this_code() {
        let address = the_dynamic_linker_finds_the_file_of_this_code as *const () as usize;
        let mut found = Vec::new();
        macos::open_object_file(address).unwrap().read_to_end(&mut found).unwrap();
        assert!(found == std::fs::read(std::env::current_exe().unwrap()).unwrap());
        assert!(macos::open_object_file(1).is_err());
    }
}
