//! Four network namespaces on one bridge, which has a namespace of its own.

use anyhow::Result;

use crate::partition::{UNUSED_MAC, run_ip};

/// Number of hosts.
pub const HOSTS: usize = 4;

/// Returns the address of a host, in one /24 network.
pub fn address_of(host: usize) -> String {
    format!("10.78.0.{}", host + 1)
}

/// The namespaces and the bridge. Dropping the value deletes them.
pub struct BridgedHosts {
    bridge: String,
    hosts: Vec<String>,
}

/// Name of the only network device of each host.
const DEVICE: &str = "eth0";

impl BridgedHosts {
    pub fn create(tag: &str) -> Result<BridgedHosts> {
        let prefix = format!("tessera-{}-h{tag}", std::process::id());
        let made = BridgedHosts {
            bridge: format!("{prefix}-bridge"),
            hosts: (0..HOSTS).map(|host| format!("{prefix}-{host}")).collect(),
        };
        let bridge = &made.bridge;
        run_ip(&["netns", "add", bridge])?;
        run_ip(&["-n", bridge, "link", "add", "br0", "type", "bridge"])?;
        run_ip(&["-n", bridge, "link", "set", "br0", "up"])?;
        for (index, host) in made.hosts.iter().enumerate() {
            let port = format!("port{index}");
            run_ip(&["netns", "add", host])?;
            let pair = ["link", "add", &port, "netns", bridge, "type", "veth", "peer", "name", DEVICE];
            run_ip(&[&pair[..], &["netns", host]].concat())?;
            run_ip(&["-n", bridge, "link", "set", &port, "master", "br0"])?;
            run_ip(&["-n", bridge, "link", "set", &port, "up"])?;
            run_ip(&["-n", host, "address", "add", &format!("{}/24", address_of(index)), "dev", DEVICE])?;
            run_ip(&["-n", host, "link", "set", "lo", "up"])?;
            run_ip(&["-n", host, "link", "set", DEVICE, "up"])?;
        }
        Ok(made)
    }

    /// Returns the prefix of a command that runs on a host.
    pub fn command_prefix(&self, host: usize) -> Vec<String> {
        ["ip", "netns", "exec", &self.hosts[host]].map(String::from).to_vec()
    }

    /// Takes the network device of a host down, as when its cable is pulled.
    pub fn take_down(&self, host: usize) -> Result<()> {
        run_ip(&["-n", &self.hosts[host], "link", "set", DEVICE, "down"])
    }

    /// Makes two hosts lose each other's packets. Their devices stay up, and both reach the others.
    pub fn separate(&self, a: usize, b: usize) -> Result<()> {
        [(a, b), (b, a)].into_iter().try_for_each(|(from, to)| {
            let lost = ["lladdr", UNUSED_MAC, "dev", DEVICE, "nud", "permanent"];
            let at = address_of(to);
            run_ip(&[&["-n", &self.hosts[from], "neighbour", "replace", &at][..], &lost].concat())
        })
    }
}

impl Drop for BridgedHosts {
    fn drop(&mut self) {
        for name in self.hosts.iter().chain([&self.bridge]) {
            // A namespace that was not created cannot be deleted.
            let _ = run_ip(&["netns", "delete", name]);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;
    use crate::partition::PORT;

    /// The test passes without a check on machines where this user cannot create namespaces.
    #[test]
    fn separated_hosts_still_reach_the_others() {
        let Ok(hosts) = BridgedHosts::create("test") else {
            eprintln!("skipped: this user cannot create network namespaces");
            return;
        };
        let reaches = |from: usize, to: usize| {
            let mut words = hosts.command_prefix(from);
            let connect = format!("exec 3<>/dev/tcp/{}/{PORT}", address_of(to));
            words.extend(["timeout", "1", "bash", "-c", &connect].map(String::from));
            let o = Command::new(&words[0]).args(&words[1..]).output().expect("run");
            // Nobody listens on the port: a refused connection is an answer of the other host.
            String::from_utf8_lossy(&o.stderr).contains("refused")
        };
        assert!(reaches(2, 3) && reaches(3, 0));
        hosts.separate(2, 3).expect("separate");
        assert!(!reaches(2, 3) && !reaches(3, 2), "the link is not cut");
        assert!(reaches(2, 0) && reaches(3, 0) && reaches(1, 2), "more than the link is cut");
        hosts.take_down(1).expect("down");
        assert!(!reaches(0, 1));
    }
}
