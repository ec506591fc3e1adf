//! Validation of a cluster: inconsistent device counts, figures out of range, and links or peaks in
//! an implausible order.

use tessera_base::{Diagnostic, Diagnostics};

use super::{Cluster, Figure, LinkClass, Precision};
use crate::codes::{T1101, T1102, T1103};
use crate::mesh::MAX_RANKS;

/// Returns the problems of a cluster; empty if Tessera can plan for it.
pub(crate) fn validate(file: &str, c: &Cluster) -> Diagnostics {
    let mut found = check_counts(file, c);
    let mut figures = vec![
        ("device.memory_bytes".to_string(), &c.device.memory_bytes, 1.0, f64::MAX),
        ("device.memory_bytes_per_s".to_string(), &c.device.memory_bytes_per_s, 1.0, f64::MAX),
        ("host.bytes".to_string(), &c.host_bytes, 0.0, f64::MAX),
        ("host.bytes_per_s".to_string(), &c.host_bytes_per_s, 1.0, f64::MAX),
    ];
    if let Some(f) = &c.host_flops_per_s {
        figures.push(("host.flops_per_s".to_string(), f, 1.0, f64::MAX));
    }
    for p in Precision::ALL {
        if let Some(f) = &c.device.flops_per_s[p as usize] {
            figures.push((format!("device.flops_per_s.{}", p.name()), f, 1.0, f64::MAX));
        }
    }
    for class in LinkClass::ALL {
        let (link, name) = (c.link_spec(class), class.name());
        figures.push((format!("links.{name}.bytes_per_s"), &link.bytes_per_s, 1.0, f64::MAX));
        figures.push((format!("links.{name}.achievable"), &link.achievable, 1e-3, 1.0));
        figures.push((format!("links.{name}.latency_ns"), &link.latency_ns, 0.0, f64::MAX));
    }
    found.extend(figures.iter().flat_map(|(key, f, least, most)| check_figure(file, key, f, *least, *most)));
    found.extend(check_order(file, c));
    found
}

fn check_counts(file: &str, c: &Cluster) -> Diagnostics {
    let mut found = Vec::new();
    let (host, domain, socket) = (c.devices_per_host, c.domain_size, c.devices_per_socket);
    let devices = u64::from(c.racks) * u64::from(c.hosts_per_rack) * u64::from(host);
    if devices > u64::from(MAX_RANKS) {
        found.push(
            Diagnostic::error(&T1101, format!("{devices} devices are more than {MAX_RANKS}")).with_label(
                file,
                format!("{} racks of {} hosts of {host} devices", c.racks, c.hosts_per_rack),
            ),
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
                format!("domain size {domain} does not fit hosts of {host} devices in racks of {rack}"),
            )
            .with_label(file, format!("domain = {domain}"))
            .with_label(file, format!("hosts_per_rack = {}, devices_per_host = {host}", c.hosts_per_rack))
            .with_hint(format!("domain sizes that fit: {}", near.join(", "))),
        );
    }
    if socket == 0 || !host.is_multiple_of(socket) {
        found.push(
            Diagnostic::error(
                &T1101,
                format!("{socket} devices per socket do not divide {host} devices per host"),
            )
            .with_label(file, format!("devices_per_socket = {socket}"))
            .with_label(file, format!("devices_per_host = {host}")),
        );
    }
    found
}

fn check_figure(file: &str, key: &str, f: &Figure, min: f64, max: f64) -> Diagnostics {
    let mut found = Vec::new();
    if !(f.value.is_finite() && (min..=max).contains(&f.value)) {
        let expected = if max == f64::MAX { format!("at least {min}") } else { format!("{min} to {max}") };
        found.push(
            Diagnostic::error(&T1102, format!("`{key}` is {}", f.value))
                .with_label(file, format!("must be {expected}")),
        );
    }
    if f.source.trim().is_empty() {
        found.push(
            Diagnostic::error(&T1102, format!("`{key}` has no source"))
                .with_label(file, format!("value = {}", f.value))
                .with_hint("state where the figure comes from"),
        );
    }
    found
}

fn check_order(file: &str, c: &Cluster) -> Diagnostics {
    let mut found = Vec::new();
    let rate = |class: LinkClass| c.link_spec(class).bytes_per_s.value * c.link_spec(class).achievable.value;
    let (near, far) = (rate(LinkClass::Domain), rate(LinkClass::Network));
    if far > near {
        found.push(
            Diagnostic::error(&T1103, "links between domains are faster than links within one")
                .with_label(file, format!("links.network: {far:.3e} bytes/s"))
                .with_label(file, format!("links.domain: {near:.3e} bytes/s")),
        );
    }
    let latency = |class: LinkClass| c.link_spec(class).latency_ns.value;
    let (near, far) = (latency(LinkClass::Domain), latency(LinkClass::Network));
    if far < near {
        found.push(
            Diagnostic::error(&T1103, "links between domains have a lower latency than links within one")
                .with_label(file, format!("links.network.latency_ns = {far}"))
                .with_label(file, format!("links.domain.latency_ns = {near}")),
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
                    .with_label(file, format!("device.flops_per_s.{} = {peak:e}", p.name()))
                    .with_label(file, format!("device.flops_per_s.{} = {most:e}", w.name())),
            );
        }
        wider = Some((p, peak));
    }
    if wider.is_none() {
        found.push(
            Diagnostic::error(&T1102, "the device has no peak at any precision")
                .with_label(file, "device.flops_per_s is empty")
                .with_hint("give at least one of f32, bf16, fp8, fp4"),
        );
    }
    found
}
