//! Checks what a plan states about the hosts of its ranks: every rank is on one host, every group
//! has the path that follows from its members' hosts, and no op needs memory of another host.

use std::collections::BTreeMap;

use tessera_base::{Diagnostic, Diagnostics};
use tessera_ir::{Bundle, CommRoute, Communicator, GroupStatement, HostStatement, Op, Transport};
use tessera_mesh::{GroupPath, Mesh, Rank};

use crate::codes::{T0346, T0347, T0348};
use crate::display;

/// Checks the statement of a bundle whose programs have passed all other checks.
pub(crate) fn check_hosts(b: &Bundle) -> Diagnostics {
    let Some(stated) = &b.hosts else { return Vec::new() };
    let mut out = check_ranks(&b.mesh, stated);
    if out.is_empty() {
        let expected = derive_paths(b, stated);
        out.extend(check_paths(expected.clone(), stated));
        out.extend(check_peer_memory(b, &expected));
    }
    out
}

/// Checks that the hosts hold every rank of the world once, and no other.
fn check_ranks(mesh: &Mesh, stated: &HostStatement) -> Diagnostics {
    let mut hosts_of: BTreeMap<Rank, Vec<usize>> = mesh.iter().map(|r| (r, Vec::new())).collect();
    for (number, host) in stated.hosts.hosts().iter().enumerate() {
        for rank in &host.ranks {
            hosts_of.entry(*rank).or_default().push(number);
        }
    }
    let of_rank = |(rank, hosts): (&Rank, &Vec<usize>)| {
        let message = match (rank.0 < mesh.world_size(), &hosts[..]) {
            (true, [_]) => return None,
            (true, []) => format!("rank {rank} is on no host"),
            (true, [first, second, ..]) => format!("rank {rank} is on host {first} and on host {second}"),
            (false, _) => format!("a host holds rank {rank}, which the plan does not have"),
        };
        let d = Diagnostic::error(&T0346, message).with_label("mesh", mesh.to_string());
        Some(hosts.iter().fold(d, |d, number| {
            d.with_label(format!("host {number}"), display::list_ranks(&stated.hosts.hosts()[*number].ranks))
        }))
    };
    hosts_of.iter().filter_map(of_rank).collect()
}

/// Returns the communicators of two or more ranks that the programs name, each with the path that
/// follows from the hosts.
fn derive_paths(b: &Bundle, stated: &HostStatement) -> BTreeMap<Communicator, GroupPath> {
    let with_path = |c: Communicator| stated.hosts.path_between(&c.members).map(|path| (c, path));
    b.list_communicators().into_iter().filter_map(with_path).collect()
}

/// Checks that every communicator is stated once, with the expected path, and that no other one is stated.
fn check_paths(mut expected: BTreeMap<Communicator, GroupPath>, stated: &HostStatement) -> Diagnostics {
    let mut out = Vec::new();
    for found in &stated.groups {
        match expected.remove(&found.communicator) {
            None => out.push(Diagnostic::error(
                &T0347,
                format!("the plan states a group twice, or one that exchanges no data: {found}"),
            )),
            Some(path) if path != found.path => {
                let host = |r: &Rank| stated.hosts.host_of(*r).map_or("none".to_string(), |h| h.to_string());
                let hosts: Vec<String> = found.communicator.members.iter().map(host).collect();
                let message = format!("the plan states {found}, but the hosts make it {}", path.name());
                out.push(
                    Diagnostic::error(&T0347, message)
                        .with_label("stated path", found.path.name())
                        .with_label("hosts of the members", hosts.join(", ")),
                );
            }
            Some(_) => {}
        }
    }
    out.extend(expected.into_iter().map(|(communicator, path)| {
        let missing = GroupStatement { communicator, path };
        Diagnostic::error(&T0347, format!("the plan states no path of a group: {missing}"))
    }));
    out
}

/// Checks that no op requests peer memory in a group whose members are on several hosts. Each op is
/// reported once, with the group of the first such rank.
fn check_peer_memory(b: &Bundle, paths: &BTreeMap<Communicator, GroupPath>) -> Diagnostics {
    let mut out = Vec::new();
    for (i, role) in b.roles.iter().enumerate() {
        for p in b.phases.iter().filter_map(|phase| phase.programs.get(i)) {
            let requests = |op: &Op| op.requested_transport() == Some(Transport::P2p);
            for (at, op) in p.collective_ops().filter(|(_, op)| requests(op)) {
                let Some(route) = CommRoute::from_op(op) else { continue };
                let spanning = |rank: &Rank| {
                    let communicator = route.communicator_of(&b.mesh, *rank)?;
                    let path = *paths.get(&communicator)?;
                    path.leaves_host().then_some(GroupStatement { communicator, path })
                };
                if let Some(group) = role.ranks.iter().find_map(spanning) {
                    let message = format!("{} requests peer memory between hosts: {group}", op.opcode.name());
                    out.push(display::error_at_op(&T0348, p, at, message));
                }
            }
        }
    }
    out
}
