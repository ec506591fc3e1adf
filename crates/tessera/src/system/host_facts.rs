//! Facts about this host. Each is `None` if the operating system does not report it.
//!
//! * `host_name()` returns its name, and `boot_id()` an id that it has until it boots again.
//! * `kernel_release()` returns the release of its kernel, `cpu_model()` the model of its first CPU.
//! * `allowed_cores()` returns the cores that this process may use, as a list such as `0-3,8`.
//! * `load_average()` returns the mean number of runnable processes over the last minute.
//! * `default_network_device()` returns the network device of the default route, or the only one that is up.

#[cfg(target_os = "linux")]
pub use linux::{
    allowed_cores, boot_id, cpu_model, default_network_device, host_name, kernel_release, load_average,
};
#[cfg(target_os = "macos")]
pub use macos::{
    allowed_cores, boot_id, cpu_model, default_network_device, host_name, kernel_release, load_average,
};

/// The files below `/proc`.
#[cfg(target_os = "linux")]
mod linux {
    use std::collections::BTreeSet;

    /// Returns the name of this host.
    #[must_use]
    pub fn host_name() -> Option<String> {
        read_line("/proc/sys/kernel/hostname")
    }

    /// Returns an id that this host has until it boots again.
    #[must_use]
    pub fn boot_id() -> Option<String> {
        read_line("/proc/sys/kernel/random/boot_id")
    }

    /// Returns the release of the kernel.
    #[must_use]
    pub fn kernel_release() -> Option<String> {
        read_line("/proc/sys/kernel/osrelease")
    }

    /// Returns the model name that the kernel reports for the first CPU.
    #[must_use]
    pub fn cpu_model() -> Option<String> {
        parse_cpu_model(&read("/proc/cpuinfo")?)
    }

    /// Returns the cores that this process may use, as a list such as `0-3,8`.
    #[must_use]
    pub fn allowed_cores() -> Option<String> {
        let status = read("/proc/self/status")?;
        status.lines().find_map(|l| l.strip_prefix("Cpus_allowed_list:")).map(|list| list.trim().to_string())
    }

    /// Returns the mean number of runnable processes over the last minute.
    #[must_use]
    pub fn load_average() -> Option<f64> {
        read("/proc/loadavg")?.split_whitespace().next()?.parse().ok()
    }

    /// Returns the network device of the default route, or the only one that is up.
    #[must_use]
    pub fn default_network_device() -> Option<String> {
        default_route_device(&read("/proc/net/route")?)
    }

    fn read(path: &str) -> Option<String> {
        std::fs::read_to_string(path).ok()
    }

    fn read_line(path: &str) -> Option<String> {
        read(path).map(|text| text.trim().to_string())
    }

    fn parse_cpu_model(cpuinfo: &str) -> Option<String> {
        let line = cpuinfo.lines().find(|l| l.starts_with("model name"))?;
        Some(line.split_once(':')?.1.trim().to_string())
    }

    fn default_route_device(table: &str) -> Option<String> {
        let rows: Vec<Vec<&str>> = table.lines().skip(1).map(|l| l.split_whitespace().collect()).collect();
        let rows: Vec<(&str, &str)> =
            rows.iter().filter_map(|row| Some((*row.first()?, *row.get(1)?))).collect();
        let devices: BTreeSet<&str> = rows.iter().map(|(device, _)| *device).collect();
        let default =
            rows.iter().find(|(_, destination)| *destination == "00000000").map(|(device, _)| *device);
        default.or((devices.len() == 1).then(|| rows[0].0)).map(str::to_string)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn the_cpu_model_is_that_of_the_first_processor() {
            let cpu = "processor\t: 0\nmodel name\t: A Processor @ 3.0GHz\nflags\t\t: fma\n";
            assert_eq!(parse_cpu_model(cpu).as_deref(), Some("A Processor @ 3.0GHz"));
            assert_eq!(parse_cpu_model("processor : 0\n"), None);
        }

        #[test]
        fn the_network_device_is_that_of_the_default_route() {
            let table = "Iface Destination\neth1 000200C0\nib0 00000000\n";
            assert_eq!(default_route_device(table).as_deref(), Some("ib0"));
            assert_eq!(default_route_device("Iface Destination\neth1 000200C0\n").as_deref(), Some("eth1"));
            assert_eq!(default_route_device("Iface Destination\neth1 1\neth2 2\n"), None);
            assert_eq!(default_route_device(""), None);
        }
    }
}

/// `uname`, and the programs `sysctl` and `route`.
#[cfg(any(target_os = "macos", test))]
#[cfg_attr(not(target_os = "macos"), allow(dead_code))]
mod macos {
    use crate::system::run_program;

    /// Returns the name of this host.
    #[must_use]
    pub fn host_name() -> Option<String> {
        rustix::system::uname().nodename().to_str().ok().map(str::to_string)
    }

    /// Returns an id that this host has until it boots again.
    #[must_use]
    pub fn boot_id() -> Option<String> {
        read_sysctl("kern.bootsessionuuid")
    }

    /// Returns the release of the kernel.
    #[must_use]
    pub fn kernel_release() -> Option<String> {
        rustix::system::uname().release().to_str().ok().map(str::to_string)
    }

    /// Returns the model name of the CPUs.
    #[must_use]
    pub fn cpu_model() -> Option<String> {
        read_sysctl("machdep.cpu.brand_string")
    }

    /// Returns all cores, because macOS binds no process to some of them.
    #[must_use]
    pub fn allowed_cores() -> Option<String> {
        std::thread::available_parallelism().ok().map(|cores| format!("0-{}", cores.get() - 1))
    }

    /// Returns the mean number of runnable processes over the last minute.
    #[must_use]
    pub fn load_average() -> Option<f64> {
        parse_load(&read_sysctl("vm.loadavg")?)
    }

    /// Returns the network device of the default route.
    #[must_use]
    pub fn default_network_device() -> Option<String> {
        parse_route(&run_program("/sbin/route", &["-n", "get", "default"])?)
    }

    fn read_sysctl(name: &str) -> Option<String> {
        run_program("/usr/sbin/sysctl", &["-n", name])
    }

    fn parse_load(text: &str) -> Option<f64> {
        text.trim_start_matches('{').split_whitespace().next()?.parse().ok()
    }

    fn parse_route(text: &str) -> Option<String> {
        text.lines().find_map(|l| l.trim().strip_prefix("interface:")).map(|name| name.trim().to_string())
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        #[test]
        fn facts_are_read_off_what_programs_print() {
            assert_eq!(parse_load("{ 1.52 2.05 2.10 }"), Some(1.52));
            assert_eq!(parse_load("{ }"), None);
            let route = "   route to: default\n    gateway: 192.0.2.1\n  interface: en0\n      flags: <UP>\n";
            assert_eq!(parse_route(route).as_deref(), Some("en0"));
            assert_eq!(parse_route("route: not in table\n"), None);
        }

        /// Linux has both sources of these two facts.
        #[cfg(target_os = "linux")]
        #[test]
        fn uname_states_the_name_and_the_release_that_the_kernel_lists() {
            assert_eq!(host_name(), super::super::host_name());
            assert_eq!(kernel_release(), super::super::kernel_release());
        }
    }
}
