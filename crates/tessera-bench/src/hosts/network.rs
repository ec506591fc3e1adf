//! Four hosts on one bridge, which has a network namespace of its own.

use anyhow::Result;

use crate::namespaces::{NetworkNamespace, run_ip};

/// Number of hosts with a rank each.
pub const HOSTS: usize = 4;

/// Returns the address of a host, in one /24 network.
pub fn address_of(host: usize) -> String {
    format!("10.78.0.{}", host + 1)
}

/// The hosts and the bridge between them.
pub struct BridgedHosts {
    hosts: Vec<NetworkNamespace>,
    _bridge: NetworkNamespace,
}

/// Name of the only network device of each host.
const DEVICE: &str = "eth0";

impl BridgedHosts {
    pub fn new(tag: &str) -> Result<BridgedHosts> {
        let prefix = format!("tessera-{}-h{tag}", std::process::id());
        let bridge = NetworkNamespace::new(format!("{prefix}-bridge"))?;
        bridge.run_ip(&["link", "add", "br0", "type", "bridge"])?;
        bridge.run_ip(&["link", "set", "br0", "up"])?;
        let mut hosts = Vec::new();
        for index in 0..HOSTS {
            let host = NetworkNamespace::new(format!("{prefix}-{index}"))?;
            let port = format!("port{index}");
            let pair = ["link", "add", &port, "netns", &bridge.name, "type", "veth", "peer", "name", DEVICE];
            run_ip(&[&pair[..], &["netns", &host.name]].concat())?;
            bridge.run_ip(&["link", "set", &port, "master", "br0"])?;
            bridge.run_ip(&["link", "set", &port, "up"])?;
            host.bring_up(DEVICE, &address_of(index))?;
            hosts.push(host);
        }
        Ok(BridgedHosts { hosts, _bridge: bridge })
    }

    /// Returns the prefix of a command that runs on a host.
    pub fn command_prefix(&self, host: usize) -> Vec<String> {
        self.hosts[host].command_prefix()
    }

    /// Takes the network device of a host down, as when its cable is pulled.
    pub fn take_down(&self, host: usize) -> Result<()> {
        self.hosts[host].take_down(DEVICE)
    }

    /// Makes two hosts lose each other's packets. Their devices stay up, and both reach the others.
    pub fn cut_link_between(&self, a: usize, b: usize) -> Result<()> {
        self.hosts[a].lose_packets_to(&address_of(b), DEVICE)?;
        self.hosts[b].lose_packets_to(&address_of(a), DEVICE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test passes without a check on machines where this user cannot create namespaces.
    #[test]
    fn hosts_with_a_cut_link_still_reach_the_others() {
        let Ok(network) = BridgedHosts::new("test") else {
            eprintln!("skipped: this user cannot create network namespaces");
            return;
        };
        let reaches = |from: usize, to: usize| network.hosts[from].reaches(&address_of(to));
        assert!(reaches(2, 3) && reaches(3, 0));
        network.cut_link_between(2, 3).expect("cut");
        assert!(!reaches(2, 3) && !reaches(3, 2), "the link is not cut");
        assert!(reaches(2, 0) && reaches(3, 0) && reaches(1, 2), "more than the link is cut");
        network.take_down(1).expect("down");
        assert!(!reaches(0, 1));
    }
}
