//! Describes this machine as its operating system reports it.

/// The machine that this process runs on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Host {
    /// Model name of the processor.
    pub cpu: String,
    /// Logical CPUs that this process may use, as the operating system counts them; each hardware
    /// thread is one.
    pub cores: usize,
    /// Memory in bytes that this process may use: the machine's, or the container's limit if that
    /// is lower. `None` if the operating system does not report it.
    pub memory_bytes: Option<u64>,
}

impl Host {
    /// Reads the CPU name, the usable CPUs and the memory limit from the operating system.
    #[must_use]
    pub fn detect_host() -> Host {
        let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default();
        let limit = read("/sys/fs/cgroup/memory.max").trim().parse::<u64>().ok();
        let total = parse_total_memory(&read("/proc/meminfo"));
        Host {
            cpu: parse_cpu_name(&read("/proc/cpuinfo")).unwrap_or_else(|| std::env::consts::ARCH.to_string()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: total.into_iter().chain(limit).min(),
        }
    }
}

/// Returns the resident memory of this process in bytes.
pub(super) fn resident_bytes() -> Option<u64> {
    parse_kilobytes(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS:")
}

/// Returns the mean number of runnable processes over the last minute.
pub(super) fn load_average() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split_whitespace().next()?.parse().ok()
}

fn parse_cpu_name(cpuinfo: &str) -> Option<String> {
    let line = cpuinfo.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_string())
}

fn parse_total_memory(meminfo: &str) -> Option<u64> {
    parse_kilobytes(meminfo, "MemTotal:")
}

fn parse_kilobytes(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.starts_with(key))?;
    line.split_whitespace().nth(1)?.parse::<u64>().ok().map(|kb| kb * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_off_the_systems_texts() {
        let cpu = "processor\t: 0\nmodel name\t: A Processor @ 3.0GHz\nflags\t\t: fma\n";
        assert_eq!(parse_cpu_name(cpu).as_deref(), Some("A Processor @ 3.0GHz"));
        assert_eq!(parse_cpu_name("processor : 0\n"), None);
        assert_eq!(parse_total_memory("MemFree: 1 kB\nMemTotal:       16384 kB\n"), Some(16 << 20));
        assert_eq!(parse_kilobytes("VmRSS:\t  2048 kB\n", "VmRSS:"), Some(2 << 20));
    }

    #[test]
    fn there_is_a_core_here() {
        let host = Host::detect_host();
        assert!(host.cores > 0 && !host.cpu.is_empty());
    }
}
