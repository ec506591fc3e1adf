//! Clusters: how many devices stand where, what each can do at best, and over which links they reach each other.
//! Every figure says where it comes from.

pub(crate) mod check;
mod place;
mod text;

pub use place::Seat;

/// A number and its source.
#[derive(Debug, Clone, PartialEq)]
pub struct Figure {
    /// The number, in the unit that the field's name ends with.
    pub value: f64,
    /// Where it comes from, in words.
    pub source: String,
}

/// A format of numbers that devices compute in or links carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Precision {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 1 byte; on a wire with a scale per 128 numbers.
    Fp8,
    /// Half a byte; on a wire with a scale per 16 numbers.
    Fp4,
}

impl Precision {
    /// All, widest first.
    pub const ALL: [Precision; 4] = [Precision::F32, Precision::Bf16, Precision::Fp8, Precision::Fp4];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["f32", "bf16", "fp8", "fp4"][self as usize]
    }

    /// Bytes of a number in memory, without scales.
    #[must_use]
    pub fn bytes(self) -> f64 {
        [4.0, 2.0, 1.0, 0.5][self as usize]
    }

    /// Bytes of a number on a wire, with its share of the scales: 4 per 128 for fp8, 1 per 16 for fp4.
    #[must_use]
    pub fn wire_bytes(self) -> f64 {
        [4.0, 2.0, 1.03125, 0.5625][self as usize]
    }
}

/// How two ranks reach each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum LinkClass {
    /// Within one domain of switches (NVLink), whatever the host.
    Domain,
    /// Between domains, over the network.
    Out,
    /// Between a device and the memory of its host.
    Host,
}

impl LinkClass {
    /// All classes.
    pub const ALL: [LinkClass; 3] = [LinkClass::Domain, LinkClass::Out, LinkClass::Host];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["domain", "out", "host"][self as usize]
    }
}

/// One class of links, per device and direction.
#[derive(Debug, Clone, PartialEq)]
pub struct Link {
    /// Line rate per device and direction.
    pub bytes_per_s: Figure,
    /// Share of the line rate that large transfers reach, 0 to 1.
    pub achievable: Figure,
    /// Time of the smallest transfer between two devices.
    pub latency_ns: Figure,
    /// Whether switches add and copy (multicast); off unless a person turns it on.
    pub multicast: bool,
}

/// A place where bytes may lie, nearest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Tier {
    /// The device's own memory.
    Hbm,
    /// The memory of another device of the domain.
    Peer,
    /// The memory of the host (Grace, or DRAM behind PCIe).
    Host,
}

impl Tier {
    /// All tiers.
    pub const ALL: [Tier; 3] = [Tier::Hbm, Tier::Peer, Tier::Host];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["hbm", "peer", "host"][self as usize]
    }
}

/// One device of a cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Device {
    /// Name, such as `NVIDIA H200 SXM`.
    pub name: String,
    /// What an executor's curves may differ by: `ampere`, `hopper`, `blackwell`, `cpu`.
    pub family: String,
    /// Memory.
    pub memory_bytes: Figure,
    /// Memory bandwidth at best.
    pub memory_bytes_per_s: Figure,
    /// Dense peak per precision, in the order of [`Precision::ALL`]; none where the device has no units for it.
    pub flops_per_s: [Option<Figure>; 4],
}

/// A machine: racks of hosts of devices.
#[derive(Debug, Clone, PartialEq)]
pub struct Cluster {
    /// Name to ask for it by, such as `gb200-nvl72`.
    pub name: String,
    /// Name for people.
    pub title: String,
    /// Racks.
    pub racks: u32,
    /// Hosts of a rack.
    pub hosts_per_rack: u32,
    /// Devices of a host.
    pub devices_per_host: u32,
    /// Devices of one processor of the host, which share its memory: 2 of a Grace, 4 of a socket.
    pub devices_per_socket: u32,
    /// Devices of one domain of switches: 8 for a host with NVLink, 72 for a rack.
    pub domain: u32,
    /// The device.
    pub device: Device,
    /// Links, in the order of [`LinkClass::ALL`].
    pub links: [Link; 3],
    /// Host memory per device.
    pub host_bytes: Figure,
    /// Bandwidth of host memory per device while all devices of the host read.
    pub host_bytes_per_s: Figure,
    /// Executor profile whose curves fit best, such as `torch-2.11`.
    pub profile: String,
    /// Whether anything here was measured on such a machine by this project.
    pub measured: bool,
}

impl Cluster {
    /// Devices of all racks.
    #[must_use]
    pub fn devices(&self) -> u32 {
        self.racks * self.hosts_per_rack * self.devices_per_host
    }

    /// The links of a class.
    #[must_use]
    pub fn link(&self, class: LinkClass) -> &Link {
        &self.links[class as usize]
    }

    /// The same cluster with this many racks; at least one.
    #[must_use]
    pub fn with_racks(mut self, racks: u32) -> Cluster {
        self.racks = racks.max(1);
        self
    }

    /// Devices of one rack.
    #[must_use]
    pub fn devices_per_rack(&self) -> u32 {
        self.hosts_per_rack * self.devices_per_host
    }

    /// Domains of all racks; the last may be smaller.
    #[must_use]
    pub fn domains(&self) -> u32 {
        self.devices().div_ceil(self.domain.max(1))
    }

    /// Rate at which one device reads a tier while its neighbours do the same, at best.
    #[must_use]
    pub fn tier_bytes_per_s(&self, tier: Tier) -> f64 {
        let reach = |class: LinkClass| {
            let link = self.link(class);
            link.bytes_per_s.value * link.achievable.value
        };
        match tier {
            Tier::Hbm => self.device.memory_bytes_per_s.value,
            Tier::Peer => reach(LinkClass::Domain),
            Tier::Host => reach(LinkClass::Host).min(self.host_bytes_per_s.value),
        }
    }

    /// Dense peak at a precision, in operations per second.
    #[must_use]
    pub fn flops_per_s(&self, precision: Precision) -> Option<f64> {
        self.device.flops_per_s[precision as usize].as_ref().map(|f| f.value)
    }
}
