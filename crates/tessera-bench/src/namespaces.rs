//! Network namespaces, each of which stands for a host with one rank of a run that no launcher started.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::json;

use crate::BenchResult;

/// TCP port on which rank 0 listens for the rendezvous, inside its network namespace.
pub const PORT: u16 = 29_500;
/// A hardware address that no device has.
const UNUSED_MAC: &str = "02:00:00:00:00:99";

/// A network namespace with a loopback device. Dropping the value deletes it.
pub struct NetworkNamespace {
    /// Name, as `ip netns` lists it.
    pub name: String,
}

impl NetworkNamespace {
    pub fn new(name: String) -> anyhow::Result<NetworkNamespace> {
        run_ip(&["netns", "add", &name])?;
        let namespace = NetworkNamespace { name };
        namespace.run_ip(&["link", "set", "lo", "up"])?;
        Ok(namespace)
    }

    /// Runs `ip` within the namespace and returns its message if it fails.
    pub fn run_ip(&self, args: &[&str]) -> anyhow::Result<()> {
        run_ip(&[&["-n", &self.name][..], args].concat())
    }

    /// Returns the prefix of a command that runs within the namespace.
    pub fn command_prefix(&self) -> Vec<String> {
        ["ip", "netns", "exec", &self.name].map(String::from).to_vec()
    }

    /// Gives a device an address of a /24 network and brings it up.
    pub fn bring_up(&self, device: &str, address: &str) -> anyhow::Result<()> {
        self.run_ip(&["address", "add", &format!("{address}/24"), "dev", device])?;
        self.run_ip(&["link", "set", device, "up"])
    }

    /// Takes a device down, as when its cable is pulled.
    pub fn take_down(&self, device: &str) -> anyhow::Result<()> {
        self.run_ip(&["link", "set", device, "down"])
    }

    /// Makes all packets to an address get lost, as in a failed switch. The device stays up.
    pub fn lose_packets_to(&self, address: &str, device: &str) -> anyhow::Result<()> {
        self.run_ip(&[
            "neighbour",
            "replace",
            address,
            "lladdr",
            UNUSED_MAC,
            "dev",
            device,
            "nud",
            "permanent",
        ])
    }

    /// Returns whether a host answers. Nobody listens on the port there: a refused connection is its answer.
    #[cfg(test)]
    pub fn reaches(&self, address: &str) -> bool {
        let mut words = self.command_prefix();
        let connect = format!("exec 3<>/dev/tcp/{address}/{PORT}");
        words.extend(["timeout", "1", "bash", "-c", &connect].map(String::from));
        let output = Command::new(&words[0]).args(&words[1..]).output().expect("run");
        String::from_utf8_lossy(&output.stderr).contains("refused")
    }
}

impl Drop for NetworkNamespace {
    fn drop(&mut self) {
        // What remains after a failure is an empty namespace.
        let _ = run_ip(&["netns", "delete", &self.name]);
    }
}

/// Runs `ip` and returns its message if it fails.
pub fn run_ip(args: &[&str]) -> anyhow::Result<()> {
    let o = Command::new("ip").args(args).output().context("cannot run `ip`")?;
    if !o.status.success() {
        bail!("ip {}: {}", args.join(" "), String::from_utf8_lossy(&o.stderr).trim());
    }
    Ok(())
}

/// Returns the variables with which a rank joins a run of so many ranks.
pub fn join_variables(
    rank: usize,
    world: usize,
    (address, port): (&str, u16),
) -> [(&'static str, String); 4] {
    [
        ("RANK", rank.to_string()),
        ("WORLD_SIZE", world.to_string()),
        ("MASTER_ADDR", address.to_string()),
        ("MASTER_PORT", port.to_string()),
    ]
}

/// Writes a random secret that only this user can read.
pub fn write_secret(path: &Path) -> anyhow::Result<()> {
    use std::io::{Read, Write as _};
    use std::os::unix::fs::OpenOptionsExt;
    let mut random = [0; 32];
    std::fs::File::open("/dev/urandom")?.read_exact(&mut random)?;
    let text: String = random.iter().map(|b| format!("{b:02x}")).collect();
    let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    Ok(file.write_all(text.as_bytes())?)
}

/// Returns the result of a benchmark on a machine where this user cannot create namespaces.
pub fn skip_benchmark(name: &str, why: &anyhow::Error) -> BenchResult {
    let why = format!("{why:#}");
    BenchResult {
        text: format!("skipped: this machine cannot create network namespaces: {why}"),
        numbers: json!({"bench": name, "skipped": why}),
    }
}
