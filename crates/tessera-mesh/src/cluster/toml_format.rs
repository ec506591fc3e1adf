//! The TOML format of a cluster: parsing and printing.

use tessera_base::Diagnostics;
use tessera_base::config::{ConfigReader, parse_toml, quote_toml};

use super::{Cluster, DeviceSpec, Figure, LinkClass, LinkSpec, Precision, validate};

impl Cluster {
    /// Parses the text of a cluster file; `file` names it in diagnostics.
    ///
    /// # Errors
    /// T0001 to T0004 if the text cannot be read, T1101 to T1103 if the cluster is not valid.
    pub fn parse(file: &str, text: &str) -> Result<Cluster, Diagnostics> {
        let mut top = ConfigReader::new(file, "", parse_toml(file, text)?);
        let mut found = Vec::new();
        let mut device = top.read_table("device");
        let mut peaks = device.read_table("flops_per_s");
        let flops_per_s = Precision::ALL.map(|p| {
            let value = peaks.take_value(p.name())?;
            Some(read_figure(
                ConfigReader::new(file, &format!("device.flops_per_s.{}", p.name()), value),
                &mut found,
            ))
        });
        let parsed_device = DeviceSpec {
            name: device.read_text("name", None),
            family: device.read_text("family", None),
            memory_bytes: read_figure(device.read_table("memory_bytes"), &mut found),
            memory_bytes_per_s: read_figure(device.read_table("memory_bytes_per_s"), &mut found),
            flops_per_s,
        };
        let mut links = top.read_table("links");
        let parsed_links = LinkClass::ALL.map(|class| {
            let mut link = links.read_table(class.name());
            let parsed = LinkSpec {
                bytes_per_s: read_figure(link.read_table("bytes_per_s"), &mut found),
                achievable: read_figure(link.read_table("achievable"), &mut found),
                latency_ns: read_figure(link.read_table("latency_ns"), &mut found),
                multicast: link.read_flag("multicast", false),
            };
            found.extend(link.finish());
            parsed
        });
        let mut host = top.read_table("host");
        let cluster = Cluster {
            name: top.read_text("name", None),
            title: top.read_text("title", None),
            racks: read_u32(&mut top, "racks", 1),
            hosts_per_rack: read_u32(&mut top, "hosts_per_rack", 1),
            devices_per_host: read_u32(&mut top, "devices_per_host", 1),
            devices_per_socket: read_u32(&mut top, "devices_per_socket", 1),
            domain_size: read_u32(&mut top, "domain", 1),
            device: parsed_device,
            links: parsed_links,
            host_bytes: read_figure(host.read_table("bytes"), &mut found),
            host_bytes_per_s: read_figure(host.read_table("bytes_per_s"), &mut found),
            host_flops_per_s: host.read_optional_table("flops_per_s").map(|f| read_figure(f, &mut found)),
            profile: top.read_text("profile", None),
            measured: top.read_flag("measured", false),
        };
        for fields in [peaks, device, links, host, top] {
            found.extend(fields.finish());
        }
        if found.is_empty() {
            found = validate::validate(file, &cluster);
        }
        if found.is_empty() { Ok(cluster) } else { Err(found) }
    }

    /// Returns the text of the cluster file. [`Cluster::parse`] restores the cluster from it.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        let mut line = |s: String| {
            out += &s;
            out.push('\n');
        };
        line(format!("name = {}", quote_toml(&self.name)));
        line(format!("title = {}", quote_toml(&self.title)));
        line(format!("racks = {}", self.racks));
        line(format!("hosts_per_rack = {}", self.hosts_per_rack));
        line(format!("devices_per_host = {}", self.devices_per_host));
        line(format!("devices_per_socket = {}", self.devices_per_socket));
        line(format!("domain = {}", self.domain_size));
        line(format!("profile = {}", quote_toml(&self.profile)));
        line(format!("measured = {}", self.measured));
        line(format!("\n[device]\nname = {}", quote_toml(&self.device.name)));
        line(format!("family = {}", quote_toml(&self.device.family)));
        line(figure_line("memory_bytes", &self.device.memory_bytes));
        line(figure_line("memory_bytes_per_s", &self.device.memory_bytes_per_s));
        line("\n[device.flops_per_s]".to_string());
        for p in Precision::ALL {
            if let Some(f) = &self.device.flops_per_s[p as usize] {
                line(figure_line(p.name(), f));
            }
        }
        for class in LinkClass::ALL {
            let link = self.link_spec(class);
            line(format!("\n[links.{}]", class.name()));
            line(figure_line("bytes_per_s", &link.bytes_per_s));
            line(figure_line("achievable", &link.achievable));
            line(figure_line("latency_ns", &link.latency_ns));
            line(format!("multicast = {}", link.multicast));
        }
        line("\n[host]".to_string());
        line(figure_line("bytes", &self.host_bytes));
        line(figure_line("bytes_per_s", &self.host_bytes_per_s));
        if let Some(peak) = &self.host_flops_per_s {
            line(figure_line("flops_per_s", peak));
        }
        out
    }
}

fn read_figure(mut fields: ConfigReader<'_>, found: &mut Diagnostics) -> Figure {
    let figure =
        Figure { value: fields.read_number("value", None), source: fields.read_text("source", None) };
    found.extend(fields.finish());
    figure
}

fn read_u32(fields: &mut ConfigReader<'_>, key: &'static str, default: u32) -> u32 {
    u32::try_from(fields.read_count(key, Some(u64::from(default)))).unwrap_or(u32::MAX)
}

fn figure_line(key: &str, f: &Figure) -> String {
    format!("{key} = {{ value = {:?}, source = {} }}", f.value, quote_toml(&f.source))
}
