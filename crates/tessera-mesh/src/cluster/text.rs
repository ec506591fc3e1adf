//! The file of a cluster: TOML in, TOML out.

use tessera_base::Diagnostics;
use tessera_base::fields::{Fields, quoted, toml};

use super::{Cluster, Device, Figure, Link, LinkClass, Precision, check};

impl Cluster {
    /// A cluster from its file's text; `file` is what diagnostics call it.
    ///
    /// # Errors
    /// T0001 to T0004 for a text that cannot be read, T1101 to T1103 for a cluster that contradicts itself.
    pub fn parse(file: &str, text: &str) -> Result<Cluster, Diagnostics> {
        let mut top = Fields::new(file, "", toml(file, text)?);
        let mut found = Vec::new();
        let mut device = top.table("device");
        let mut peaks = device.table("flops_per_s");
        let flops_per_s = Precision::ALL.map(|p| {
            let value = peaks.take(p.name())?;
            Some(figure(Fields::new(file, &format!("device.flops_per_s.{}", p.name()), value), &mut found))
        });
        let parsed_device = Device {
            name: device.text("name", None),
            family: device.text("family", None),
            memory_bytes: figure(device.table("memory_bytes"), &mut found),
            memory_bytes_per_s: figure(device.table("memory_bytes_per_s"), &mut found),
            flops_per_s,
        };
        let mut links = top.table("links");
        let parsed_links = LinkClass::ALL.map(|class| {
            let mut link = links.table(class.name());
            let parsed = Link {
                bytes_per_s: figure(link.table("bytes_per_s"), &mut found),
                achievable: figure(link.table("achievable"), &mut found),
                latency_ns: figure(link.table("latency_ns"), &mut found),
                multicast: link.flag("multicast", false),
            };
            found.extend(link.finish());
            parsed
        });
        let mut host = top.table("host");
        let cluster = Cluster {
            name: top.text("name", None),
            title: top.text("title", None),
            racks: count(&mut top, "racks", 1),
            hosts_per_rack: count(&mut top, "hosts_per_rack", 1),
            devices_per_host: count(&mut top, "devices_per_host", 1),
            devices_per_socket: count(&mut top, "devices_per_socket", 1),
            domain: count(&mut top, "domain", 1),
            device: parsed_device,
            links: parsed_links,
            host_bytes: figure(host.table("bytes"), &mut found),
            host_bytes_per_s: figure(host.table("bytes_per_s"), &mut found),
            profile: top.text("profile", None),
            measured: top.flag("measured", false),
        };
        for fields in [peaks, device, links, host, top] {
            found.extend(fields.finish());
        }
        if found.is_empty() {
            found = check::check(file, &cluster);
        }
        if found.is_empty() { Ok(cluster) } else { Err(found) }
    }

    /// The cluster's file. [`Cluster::parse`] of it gives the cluster back.
    #[must_use]
    pub fn text(&self) -> String {
        let mut out = String::new();
        let mut line = |s: String| {
            out += &s;
            out.push('\n');
        };
        line(format!("name = {}", quoted(&self.name)));
        line(format!("title = {}", quoted(&self.title)));
        line(format!("racks = {}", self.racks));
        line(format!("hosts_per_rack = {}", self.hosts_per_rack));
        line(format!("devices_per_host = {}", self.devices_per_host));
        line(format!("devices_per_socket = {}", self.devices_per_socket));
        line(format!("domain = {}", self.domain));
        line(format!("profile = {}", quoted(&self.profile)));
        line(format!("measured = {}", self.measured));
        line(format!("\n[device]\nname = {}", quoted(&self.device.name)));
        line(format!("family = {}", quoted(&self.device.family)));
        line(entry("memory_bytes", &self.device.memory_bytes));
        line(entry("memory_bytes_per_s", &self.device.memory_bytes_per_s));
        line("\n[device.flops_per_s]".to_string());
        for p in Precision::ALL {
            if let Some(f) = &self.device.flops_per_s[p as usize] {
                line(entry(p.name(), f));
            }
        }
        for class in LinkClass::ALL {
            let link = self.link(class);
            line(format!("\n[links.{}]", class.name()));
            line(entry("bytes_per_s", &link.bytes_per_s));
            line(entry("achievable", &link.achievable));
            line(entry("latency_ns", &link.latency_ns));
            line(format!("multicast = {}", link.multicast));
        }
        line("\n[host]".to_string());
        line(entry("bytes", &self.host_bytes));
        line(entry("bytes_per_s", &self.host_bytes_per_s));
        out
    }
}

fn figure(mut fields: Fields<'_>, found: &mut Diagnostics) -> Figure {
    let figure = Figure { value: fields.number("value", None), source: fields.text("source", None) };
    found.extend(fields.finish());
    figure
}

fn count(fields: &mut Fields<'_>, key: &'static str, default: u32) -> u32 {
    u32::try_from(fields.count(key, Some(u64::from(default)))).unwrap_or(u32::MAX)
}

fn entry(key: &str, f: &Figure) -> String {
    format!("{key} = {{ value = {:?}, source = {} }}", f.value, quoted(&f.source))
}
