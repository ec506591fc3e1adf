//! Describes this machine as its operating system reports it.

use tessera::system;

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
        Host {
            cpu: system::cpu_model().unwrap_or_else(|| std::env::consts::ARCH.to_string()),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: system::usable_bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn there_is_a_core_here() {
        let host = Host::detect_host();
        assert!(host.cores > 0 && !host.cpu.is_empty());
    }
}
