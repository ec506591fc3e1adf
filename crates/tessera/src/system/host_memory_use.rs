//! The memory of this host in bytes. Each figure is `None` if the operating system does not report it.
//!
//! * `usable_bytes()` returns the memory that this process may use: the host's, or the container's limit if that is lower.
//! * `available_bytes()` returns what it can still allocate: the host's free and reclaimable memory, or what the container's
//!   limit leaves, if that is less.
//! * `resident_bytes()` returns the resident memory of this process.

#[cfg(target_os = "linux")]
pub use linux::{available_bytes, resident_bytes, usable_bytes};
#[cfg(target_os = "macos")]
pub use macos::{available_bytes, resident_bytes, usable_bytes};

#[cfg(target_os = "linux")]
mod linux {
    /// Returns the memory that this process may use: the host's, or the container's limit if that is lower.
    #[must_use]
    pub fn usable_bytes() -> Option<u64> {
        let limit = read("/sys/fs/cgroup/memory.max").trim().parse::<u64>().ok();
        parse_kilobytes(&read("/proc/meminfo"), "MemTotal:").into_iter().chain(limit).min()
    }

    /// Returns the bytes that this process can still allocate.
    #[must_use]
    pub fn available_bytes() -> Option<u64> {
        let limit = read("/sys/fs/cgroup/memory.max").trim().parse::<u64>().ok();
        let used = read("/sys/fs/cgroup/memory.current").trim().parse::<u64>().ok();
        let left = limit.zip(used).map(|(limit, used)| limit.saturating_sub(used));
        parse_kilobytes(&read("/proc/meminfo"), "MemAvailable:").into_iter().chain(left).min()
    }

    /// Returns the resident memory of this process.
    #[must_use]
    pub fn resident_bytes() -> Option<u64> {
        parse_kilobytes(&read("/proc/self/status"), "VmRSS:")
    }

    fn read(path: &str) -> String {
        std::fs::read_to_string(path).unwrap_or_default()
    }

    fn parse_kilobytes(text: &str, key: &str) -> Option<u64> {
        let line = text.lines().find(|l| l.starts_with(key))?;
        line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb.saturating_mul(1024))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn figures_are_read_off_the_kernels_texts() {
            let meminfo = "MemFree: 1 kB\nMemTotal:       16384 kB\nMemAvailable:   2048 kB\n";
            assert_eq!(parse_kilobytes(meminfo, "MemTotal:"), Some(16 << 20));
            assert_eq!(parse_kilobytes(meminfo, "MemAvailable:"), Some(2 << 20));
            assert_eq!(parse_kilobytes("VmRSS:\t  2048 kB\n", "VmRSS:"), Some(2 << 20));
            assert_eq!(parse_kilobytes("MemTotal: none\n", "MemTotal:"), None);
        }

        #[test]
        fn this_process_holds_less_than_it_may_use() {
            assert!(resident_bytes().unwrap() < usable_bytes().unwrap());
            assert!(available_bytes().unwrap() <= usable_bytes().unwrap());
        }
    }
}

/// The programs `sysctl`, `vm_stat` and `ps`. macOS has no containers, so no limit is lower than the host's memory.
#[cfg(any(target_os = "macos", test))]
#[cfg_attr(not(target_os = "macos"), allow(dead_code))]
mod macos {
    use crate::system::run_program;

    /// Returns the memory of this host.
    #[must_use]
    pub fn usable_bytes() -> Option<u64> {
        run_program("/usr/sbin/sysctl", &["-n", "hw.memsize"])?.parse().ok()
    }

    /// Returns the bytes of the pages that are free or that the kernel can reclaim without writing them to a disk.
    #[must_use]
    pub fn available_bytes() -> Option<u64> {
        parse_available(&run_program("/usr/bin/vm_stat", &[])?)
    }

    /// Returns the resident memory of this process.
    #[must_use]
    pub fn resident_bytes() -> Option<u64> {
        let kilobytes = run_program("/bin/ps", &["-o", "rss=", "-p", &std::process::id().to_string()])?;
        kilobytes.parse::<u64>().ok().map(|kb| kb.saturating_mul(1024))
    }

    fn parse_available(statistics: &str) -> Option<u64> {
        let page =
            statistics.split_once("page size of ")?.1.split_whitespace().next()?.parse::<u64>().ok()?;
        let count = |key: &str| {
            let value = statistics.lines().find_map(|l| l.strip_prefix(key))?;
            value.trim().trim_end_matches('.').parse::<u64>().ok()
        };
        let counts = [count("Pages free:")?, count("Pages inactive:")?, count("Pages speculative:")?];
        Some(counts.into_iter().fold(0, u64::saturating_add).saturating_mul(page))
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn available_pages_are_those_without_a_user() {
            let statistics = "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n\
                Pages free:                               10.\nPages active:      90.\n\
                Pages inactive:                            5.\nPages speculative:  1.\n";
            assert_eq!(parse_available(statistics), Some(16 * 16384));
            assert_eq!(parse_available("Pages free: 10.\n"), None);
        }

        #[test]
        fn a_process_has_resident_memory() {
            // A Linux without `ps` cannot run this test.
            if std::path::Path::new("/bin/ps").exists() {
                assert!(resident_bytes().is_some_and(|bytes| bytes > 1 << 16));
            }
        }
    }
}
