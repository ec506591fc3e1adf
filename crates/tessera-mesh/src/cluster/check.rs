//! Contradictions of a cluster: counts that cannot be laid out, figures that no machine has, links in the wrong order.

use tessera_base::{Code, Diagnostic, Diagnostics};

use super::{Cluster, Figure, LinkClass, Precision};
use crate::mesh::RANKS_MAX;

/// Counts do not fit together.
pub static T1101: Code = Code {
    id: "T1101",
    title: "cluster's counts contradict each other",
    page: "A cluster is racks of hosts of devices, cut into domains of switches. A domain is part of a host, a host, or \
several whole hosts of one rack, so its size must divide the devices of a host, or be a multiple of them and divide \
the devices of a rack. Devices of a socket must divide those of a host.\n\n\
For a rack that is one domain write `domain` equal to `hosts_per_rack` times `devices_per_host`; for hosts without a \
switch between devices write `domain = 1`. More than 65,536 devices are taken for a slip.",
};
/// A figure out of range.
pub static T1102: Code = Code {
    id: "T1102",
    title: "cluster's figure is out of range",
    page: "Rates, sizes and peaks are above 0, latencies are not below 0, and `achievable` is a share of the line rate \
from 0 to 1. Units are bytes, bytes per second, operations per second and nanoseconds: 450 GB/s is `450e9`. \
Each figure names its source, because an estimate is only as good as what went in; write `a guess` if that is what it is.",
};
/// An order that no machine has.
pub static T1103: Code = Code {
    id: "T1103",
    title: "cluster's links or peaks stand in the wrong order",
    page: "Links within a domain must be at least as fast as those between domains, in rate and in latency: the search \
keeps groups that talk much within a domain, and would do the opposite for a cluster where that is slower. If \
devices of a host really have nothing better than the network, write `domain = 1` with equal figures.\n\n\
A narrower number format may not have a lower peak than a wider one: leave the peak out where the device has no units for \
the format.",
};

/// What is wrong with a cluster; empty for one that can be planned for.
pub(crate) fn check(file: &str, c: &Cluster) -> Diagnostics {
    let mut found = counts(file, c);
    let mut figures = vec![
        ("device.memory_bytes".to_string(), &c.device.memory_bytes, 1.0, f64::MAX),
        ("device.memory_bytes_per_s".to_string(), &c.device.memory_bytes_per_s, 1.0, f64::MAX),
        ("host.bytes".to_string(), &c.host_bytes, 1.0, f64::MAX),
        ("host.bytes_per_s".to_string(), &c.host_bytes_per_s, 1.0, f64::MAX),
    ];
    for p in Precision::ALL {
        if let Some(f) = &c.device.flops_per_s[p as usize] {
            figures.push((format!("device.flops_per_s.{}", p.name()), f, 1.0, f64::MAX));
        }
    }
    for class in LinkClass::ALL {
        let (link, name) = (c.link(class), class.name());
        figures.push((format!("links.{name}.bytes_per_s"), &link.bytes_per_s, 1.0, f64::MAX));
        figures.push((format!("links.{name}.achievable"), &link.achievable, 1e-3, 1.0));
        figures.push((format!("links.{name}.latency_ns"), &link.latency_ns, 0.0, f64::MAX));
    }
    found.extend(figures.iter().flat_map(|(key, f, least, most)| figure(file, key, f, *least, *most)));
    found.extend(order(file, c));
    found
}

fn counts(file: &str, c: &Cluster) -> Diagnostics {
    let mut found = Vec::new();
    let (host, domain, socket) = (c.devices_per_host, c.domain, c.devices_per_socket);
    let devices = u64::from(c.racks) * u64::from(c.hosts_per_rack) * u64::from(host);
    if devices > u64::from(RANKS_MAX) {
        found.push(
            Diagnostic::error(&T1101, format!("{devices} devices are more than {RANKS_MAX}"))
                .at(file, format!("{} racks of {} hosts of {host} devices", c.racks, c.hosts_per_rack)),
        );
        return found;
    }
    let rack = c.devices_per_rack();
    let fits = if domain <= host {
        domain > 0 && host.is_multiple_of(domain)
    } else {
        domain.is_multiple_of(host) && rack.is_multiple_of(domain)
    };
    if !fits {
        let legal = |d: &u32| if *d <= host { host.is_multiple_of(*d) } else { d.is_multiple_of(host) };
        let near: Vec<String> =
            (1..=rack).filter(|d| rack.is_multiple_of(*d)).filter(legal).map(|d| d.to_string()).collect();
        found.push(
            Diagnostic::error(
                &T1101,
                format!("a domain of {domain} does not divide hosts of {host} devices in racks of {rack}"),
            )
            .at(file, format!("domain = {domain}"))
            .at(file, format!("hosts_per_rack = {}, devices_per_host = {host}", c.hosts_per_rack))
            .hint(format!("domains that fit: {}", near.join(", "))),
        );
    }
    if socket == 0 || !host.is_multiple_of(socket) {
        found.push(
            Diagnostic::error(&T1101, format!("{socket} devices per socket do not divide {host} per host"))
                .at(file, format!("devices_per_socket = {socket}"))
                .at(file, format!("devices_per_host = {host}")),
        );
    }
    found
}

fn figure(file: &str, key: &str, f: &Figure, least: f64, most: f64) -> Diagnostics {
    let mut found = Vec::new();
    if !(f.value.is_finite() && (least..=most).contains(&f.value)) {
        let says = if most == f64::MAX { format!("at least {least}") } else { format!("{least} to {most}") };
        found.push(
            Diagnostic::error(&T1102, format!("`{key}` is {}", f.value)).at(file, format!("must be {says}")),
        );
    }
    if f.source.trim().is_empty() {
        found.push(
            Diagnostic::error(&T1102, format!("`{key}` has no source"))
                .at(file, format!("value = {}", f.value))
                .hint("say in words where the figure comes from"),
        );
    }
    found
}

fn order(file: &str, c: &Cluster) -> Diagnostics {
    let mut found = Vec::new();
    let rate = |class: LinkClass| c.link(class).bytes_per_s.value * c.link(class).achievable.value;
    let (near, far) = (rate(LinkClass::Domain), rate(LinkClass::Out));
    if far > near {
        found.push(
            Diagnostic::error(&T1103, "links between domains are faster than links within one")
                .at(file, format!("links.out: {far:.3e} bytes/s"))
                .at(file, format!("links.domain: {near:.3e} bytes/s")),
        );
    }
    let late = |class: LinkClass| c.link(class).latency_ns.value;
    let (near, far) = (late(LinkClass::Domain), late(LinkClass::Out));
    if far < near {
        found.push(
            Diagnostic::error(&T1103, "links between domains have a lower latency than links within one")
                .at(file, format!("links.out.latency_ns = {far}"))
                .at(file, format!("links.domain.latency_ns = {near}")),
        );
    }
    let mut wider: Option<(Precision, f64)> = None;
    for p in Precision::ALL {
        let Some(peak) = c.flops_per_s(p) else { continue };
        if let Some((w, most)) = wider
            && peak < most
        {
            found.push(
                Diagnostic::error(&T1103, format!("the peak at {} is below that at {}", p.name(), w.name()))
                    .at(file, format!("device.flops_per_s.{} = {peak:e}", p.name()))
                    .at(file, format!("device.flops_per_s.{} = {most:e}", w.name())),
            );
        }
        wider = Some((p, peak));
    }
    if wider.is_none() {
        found.push(
            Diagnostic::error(&T1102, "the device has no peak at any precision")
                .at(file, "device.flops_per_s is empty")
                .hint("give at least one of f32, bf16, fp8, fp4"),
        );
    }
    found
}
