//! What the machine at hand is, by what its operating system says.

/// The machine at hand.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Model of its processor.
    pub cpu: String,
    /// Cores that this process may use, with their second threads counted as the system counts them.
    pub cores: usize,
    /// Memory that this process may use: the machine's, or its container's if that is less. None where the system does
    /// not say.
    pub memory_bytes: Option<u64>,
}

impl Host {
    /// Looks.
    #[must_use]
    pub fn look() -> Host {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let limit = read("/sys/fs/cgroup/memory.max").trim().parse::<u64>().ok();
        let total = memory_of(&read("/proc/meminfo"));
        Host {
            cpu: cpu_of(&read("/proc/cpuinfo")).unwrap_or_else(|| std::env::consts::ARCH.to_string()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: total.into_iter().chain(limit).min(),
        }
    }
}

/// Bytes of memory that this process holds now.
pub(super) fn resident_bytes() -> Option<u64> {
    kilobytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Processes that wanted to run, on the mean of the last minute.
pub(super) fn load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

fn cpu_of(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn memory_of(meminfo: &str) -> Option<u64> {
    kilobytes(meminfo, "MemTotal:")
}

fn kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_off_the_systems_texts() {
        let cpu = "processor\t: 0\nmodel name\t: A Processor @ 3.0GHz\nflags\t\t: fma\n";
        assert_eq!(cpu_of(cpu).as_deref(), Some("A Processor @ 3.0GHz"));
        assert_eq!(cpu_of("processor : 0\n"), None);
        assert_eq!(memory_of("MemFree: 1 kB\nMemTotal:       16384 kB\n"), Some(16 << 20));
        assert_eq!(kilobytes("VmRSS:\t  2048 kB\n", "VmRSS:"), Some(2 << 20));
    }

    #[test]
    fn there_is_a_core_here() {
        let host = Host::look();
        assert!(host.cores > 0 && !host.cpu.is_empty());
    }
}
