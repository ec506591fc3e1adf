//! Hardware description of a cluster: its topology, the peak rates of its devices, and the links
//! between them. Every figure cites its source.

mod placement;
mod toml_format;
pub(crate) mod validate;

use tessera_base::named_enum;

pub use placement::DevicePlacement;

/// A hardware figure with the data sheet or measurement that it comes from.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The number, in the unit that the field name ends with.
    pub value: f64,
    /// Where the number comes from, as free text.
    pub source: String,
}

named_enum! {
    /// A number format that devices compute in or links transfer.
    pub enum Precision {
        /// 4 bytes per number.
        F32 = "f32",
        /// 2 bytes per number.
        Bf16 = "bf16",
        /// 1 byte; on a link with one scale per 128 numbers.
        Fp8 = "fp8",
        /// Half a byte; on a link with one scale per 16 numbers.
        Fp4 = "fp4",
    }
}

impl Precision {
    /// Returns the bytes of one number in memory, without scales.
    #[must_use]
    pub fn element_bytes(self) -> f64 {
        [4.0, 2.0, 1.0, 0.5][self as usize]
    }

    /// Returns the bytes of one number on a link, including its share of the scales: 4 bytes per
    /// 128 numbers for fp8, 1 byte per 16 numbers for fp4.
    #[must_use]
    pub fn wire_element_bytes(self) -> f64 {
        [4.0, 2.0, 1.03125, 0.5625][self as usize]
    }
}

named_enum! {
    /// Kind of link between two ranks, or between a device and its host.
    pub enum LinkClass {
        /// Within one switch domain (NVLink), also across hosts.
        Domain = "domain",
        /// Between switch domains, over the network.
        Network = "network",
        /// Between a device and the memory of its host.
        Host = "host",
    }
}

/// Properties of one class of links, per device and direction.
#[derive(Debug, Clone, PartialEq)]
pub struct LinkSpec {
    /// Line rate per device and direction.
    pub bytes_per_s: Figure,
    /// Share of the line rate that large transfers reach, 0 to 1.
    pub achievable: Figure,
    /// Latency of the smallest transfer between two devices.
    pub latency_ns: Figure,
    /// Whether the switches reduce and replicate data (multicast). Off unless the cluster file
    /// enables it.
    pub multicast: bool,
}

named_enum! {
    /// A place for the data of a rank, nearest first: the memory of its device, a peer, or the host.
    pub enum MemoryTier {
        /// Memory of the device itself.
        Hbm = "hbm",
        /// Memory of another device in the same switch domain.
        Peer = "peer",
        /// Memory of the host (Grace, or DRAM behind PCIe).
        Host = "host",
    }
}

/// Memory size, memory bandwidth and peak rates of the devices of a cluster, which are all of one
/// type.
#[derive(Debug, Clone, PartialEq)]
pub struct DeviceSpec {
    /// Name, such as `NVIDIA H200 SXM`.
    pub name: String,
    /// Architecture family, which selects the executor's performance curves: `ampere`, `hopper`,
    /// `blackwell`, `cpu`.
    pub family: String,
    /// Capacity of the device's own memory, in bytes.
    pub memory_bytes: Figure,
    /// Peak bandwidth of the device's own memory, in bytes per second.
    pub memory_bytes_per_s: Figure,
    /// Dense peak per precision, in the order of [`Precision::ALL`]; `None` if the device has no
    /// units for the precision.
    pub flops_per_s: [Option<Figure>; 4],
}

/// A cluster: racks of hosts of devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Catalog name, such as `gb200-nvl72`.
    pub name: String,
    /// Name of the cluster in reports.
    pub title: String,
    /// Number of racks: 1 in every catalog entry, changed by [`Cluster::with_racks`].
    pub racks: u32,
    /// Number of hosts per rack: 18 for an NVL72, 1 for the HGX entries of the catalog.
    pub hosts_per_rack: u32,
    /// Number of devices per host: 4 for an NVL72, 8 for an HGX host.
    pub devices_per_host: u32,
    /// Number of devices per CPU socket, which share the memory of the socket: 2 for a Grace, 4 for
    /// a socket of an HGX host.
    pub devices_per_socket: u32,
    /// Number of devices per switch domain: 8 for a host with NVLink, 72 for an NVL72 rack.
    pub domain_size: u32,
    /// Device that every host contains; a cluster is homogeneous.
    pub device: DeviceSpec,
    /// Links, in the order of [`LinkClass::ALL`].
    pub links: [LinkSpec; 3],
    /// Host memory per device, in bytes; 0 if devices have no second tier of memory.
    pub host_bytes: Figure,
    /// Bandwidth of host memory per device while all devices of the host read.
    pub host_bytes_per_s: Figure,
    /// Dense f32 peak of all cores of a host, in operations per second; `None` if unknown. The leader computes
    /// there what it runs on no device.
    pub host_flops_per_s: Option<Figure>,
    /// Executor profile with the best matching curves, such as `torch-2.11`.
    pub profile: String,
    /// Whether any figure was measured on this kind of cluster by this project.
    pub measured: bool,
}

impl Cluster {
    /// Returns the number of devices in all racks.
    #[must_use]
    pub fn device_count(&self) -> u32 {
        self.racks * self.hosts_per_rack * self.devices_per_host
    }

    /// Returns the rate, efficiency and latency of the links of a class.
    #[must_use]
    pub fn link_spec(&self, class: LinkClass) -> &LinkSpec {
        &self.links[class as usize]
    }

    /// Returns the same cluster with this many racks, at least one.
    #[must_use]
    pub fn with_racks(mut self, racks: u32) -> Cluster {
        self.racks = racks.max(1);
        self
    }

    /// Returns the number of devices in one rack.
    #[must_use]
    pub fn devices_per_rack(&self) -> u32 {
        self.hosts_per_rack * self.devices_per_host
    }

    /// Returns the number of switch domains in all racks; the last one may be smaller.
    #[must_use]
    pub fn domain_count(&self) -> u32 {
        self.device_count().div_ceil(self.domain_size.max(1))
    }

    /// Returns the peak rate at which one device reads a memory tier while its neighbours do the
    /// same, in bytes per second.
    #[must_use]
    pub fn tier_bytes_per_s(&self, tier: MemoryTier) -> f64 {
        let reach = |class: LinkClass| {
            let link = self.link_spec(class);
            link.bytes_per_s.value * link.achievable.value
        };
        match tier {
            MemoryTier::Hbm => self.device.memory_bytes_per_s.value,
            MemoryTier::Peer => reach(LinkClass::Domain),
            MemoryTier::Host => reach(LinkClass::Host).min(self.host_bytes_per_s.value),
        }
    }

    /// Returns the dense peak at a precision, in operations per second.
    #[must_use]
    pub fn flops_per_s(&self, precision: Precision) -> Option<f64> {
        self.device.flops_per_s[precision as usize].as_ref().map(|f| f.value)
    }
}
