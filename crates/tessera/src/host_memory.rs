//! The memory that this host has available, as its operating system reports it.

/// Returns the bytes that this process can still allocate: the host's free and reclaimable memory,
/// or what the container's limit leaves, if that is less. `None` if the operating system does not
/// report it.
#[must_use]
pub(crate) fn available_bytes() -> Option<u64> {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
    let limit = read("/sys/fs/cgroup/memory.max").trim().parse::<u64>().ok();
    let used = read("/sys/fs/cgroup/memory.current").trim().parse::<u64>().ok();
    let left = limit.zip(used).map(|(limit, used)| limit.saturating_sub(used));
    parse_available(&read("/proc/meminfo")).into_iter().chain(left).min()
}

fn parse_available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find(|l| l.starts_with("MemAvailable:"))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb.saturating_mul(1024))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_is_read_off_the_systems_text() {
        let text = "MemTotal: 16384 kB\nMemAvailable:    8192 kB\n";
        assert_eq!(parse_available(text), Some(8 << 20));
        assert_eq!(parse_available("MemTotal: 16384 kB\n"), None);
        assert_eq!(parse_available("MemAvailable: many kB\n"), None);
    }
}
