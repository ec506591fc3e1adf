//! The mapping, which a person reads and edits: topology, mesh, strategy, numerics policy, stages
//! and queue depths.

mod checks;
mod expert_copies;
mod experts;
mod router;

use tessera_base::config::{ConfigReader, T0004, parse_toml};
use tessera_base::{Diagnostic, Diagnostics, named_enum};
use tessera_mesh::{Axis, Mesh, RankMap};

use crate::codes::T0605;
pub use expert_copies::{ExpertChoices, ExpertCopies};
pub use experts::{ExpertAxis, ExpertCombine, ExpertMapping, TokenNumerics, TokenPlacement, TokenWire};
pub use router::{RegularizerKind, RouterGate, RouterMapping, RouterRegularizer, RouterSeeds};

named_enum! {
    /// The placement of the leader: which ranks encode and decode, and which generate.
    pub enum Topology {
        /// Rank 0 leads, encodes, decodes and belongs to the mesh.
        Mesh = "mesh",
        /// Rank 0 outside the mesh leads, encodes and decodes; rank 1 is the mesh.
        Pp0 = "pp0",
        /// Rank 0 outside the mesh leads, encodes and decodes; two ranks or more form the mesh, and
        /// rank 1 relays to them.
        Pp1 = "pp1",
    }
}

impl Topology {
    /// Returns the number of ranks outside the mesh.
    #[must_use]
    pub fn outside_ranks(self) -> u32 {
        u32::from(self != Topology::Mesh)
    }
}

named_enum! {
    /// Which ranks run the phases of pixels: decode, and the encode of anchors.
    #[derive(Default)]
    pub enum MediaPlacement {
        /// The leader runs them on its CPU, beside the calls.
        #[default]
        Leader = "leader",
        /// The ranks of the first stage run them at the end of each chunk's call, sharded by picture rows.
        Mesh = "mesh",
        /// Like `Mesh`, but each of these ranks computes whole pictures, which needs no communication.
        Replicas = "replicas",
        /// The leader runs them beside the calls, on a GPU of its host that no rank has.
        Outside = "outside",
    }
}

impl MediaPlacement {
    /// Returns whether the calls contain the phases of pixels.
    #[must_use]
    pub fn is_in_calls(self) -> bool {
        match self {
            MediaPlacement::Mesh | MediaPlacement::Replicas => true,
            MediaPlacement::Leader | MediaPlacement::Outside => false,
        }
    }
}

named_enum! {
    /// How tp shards a transformer block.
    pub enum Strategy {
        /// Shards weights by column, then by row; one all-reduce per pair.
        Megatron = "megatron",
        /// Shards tokens, and heads around attention by all-to-all. No arithmetic crosses ranks.
        Ulysses = "ulysses",
    }
}

named_enum! {
    /// The policy on which sums may depend on the mesh.
    pub enum Numerics {
        /// Each rank computes a partial sum; ranks add the partial sums in rank order.
        Standard = "standard",
        /// A contraction that some mesh may split is divided into eight segments, and one binary
        /// tree sums them on every mesh.
        MeshInvariant = "mesh-invariant",
    }
}

named_enum! {
    /// The compute dtype policy. [`crate::precision`] defines which values it affects.
    #[derive(Default)]
    pub enum DtypePolicy {
        /// All values are f32.
        #[default]
        F32 = "f32",
        /// Matmuls and the ops on their results run in bf16; conditioning, latents and norm vectors
        /// in f32.
        Bf16 = "bf16",
        /// Like bf16, but with the matmuls of blocks in e4m3 with one scale per row.
        Fp8 = "fp8",
    }
}

named_enum! {
    /// The transport of collectives; only GPUs offer a choice.
    #[derive(Default)]
    pub enum Transport {
        /// The fastest transport for ranks that can reach one another's memory: P2P kernels, DMA
        /// copy engines, or fusion into the producer kernel. NCCL for others.
        #[default]
        Best = "best",
        /// One kernel per collective, over peer memory if ranks can reach it.
        P2p = "p2p",
        /// NCCL library calls for every collective, whether or not ranks reach peer memory.
        Nccl = "nccl",
    }
}

named_enum! {
    /// Which programs a GPU captures as graphs. A CPU executes their ops one by one.
    #[derive(Default)]
    pub enum CapturePolicy {
        /// Every program of the mesh, with its collectives, is one graph.
        #[default]
        Programs = "programs",
        /// No program is captured: every op is launched by itself.
        None = "none",
    }
}

/// The contents of a `mapping.toml`: the placement of a model on ranks, its numerics, and the queue
/// depths.
#[derive(Debug, Clone, PartialEq)]
pub struct Mapping {
    /// Whether rank 0, the leader, lies in the mesh or outside it.
    pub topology: Topology,
    /// Whether the leader or the ranks run the phases of pixels.
    pub media: MediaPlacement,
    /// The mesh without the ranks outside it; [`Mapping::world_mesh`] includes them.
    pub mesh: Mesh,
    /// How tp shards a transformer block: by weights and heads, or by tokens and heads.
    pub strategy: Strategy,
    /// Whether the bits of sums may depend on the mesh.
    pub numerics: Numerics,
    /// Dtype of matmuls and of the ops on their results.
    pub dtype: DtypePolicy,
    /// Whether tokens that travel between ranks may be rounded.
    pub token_numerics: TokenNumerics,
    /// Where tokens are routed to experts, and how many an expert accepts.
    pub experts: ExpertMapping,
    /// How GPU collectives move data: peer-to-peer kernels, NCCL or the faster of them.
    pub transport: Transport,
    /// Bytes of one rank's operand from which an all-reduce is tagged with the ring; smaller ones are
    /// tagged with the tree. `None` tags no collective.
    pub ring_from_bytes: Option<u64>,
    /// Which programs are captured as graphs on all ranks.
    pub capture: CapturePolicy,
    /// Number of row chunks of a call under megatron, so that the all-reduce of one chunk overlaps
    /// the compute of another; 1 leaves rows whole.
    pub overlap_chunks: u32,
    /// Blocks per stage; empty for a balanced split.
    pub blocks: Vec<u64>,
    /// Devices in rank order; empty for logical names.
    pub devices: Vec<String>,
    /// Ranks of each host, which are consecutive; empty if the mapping states no hosts.
    pub hosts: Vec<u32>,
    /// Switch domain of each host; empty if each host is a domain of its own.
    pub host_domains: Vec<u32>,
    /// Maximum prepared calls that wait for the mesh.
    pub d_in: u32,
    /// Maximum finished chunks that wait for decode and write.
    pub d_out: u32,
    /// Maximum calls that are sent and not done.
    pub max_outstanding: u32,
    /// Digest of all weights as 64 hex digits, if the plan runs with these weights alone.
    pub weights: Option<String>,
}

impl Default for Mapping {
    fn default() -> Mapping {
        Mapping {
            topology: Topology::Mesh,
            media: MediaPlacement::Leader,
            mesh: Mesh::default(),
            // Ulysses moves 1.5·tp times fewer bytes than megatron at a video chunk's token counts,
            // and is exact.
            strategy: Strategy::Ulysses,
            numerics: Numerics::Standard,
            dtype: DtypePolicy::F32,
            token_numerics: TokenNumerics::F32,
            experts: ExpertMapping::default(),
            transport: Transport::Best,
            ring_from_bytes: None,
            capture: CapturePolicy::Programs,
            overlap_chunks: 1,
            blocks: Vec::new(),
            devices: Vec::new(),
            hosts: Vec::new(),
            host_domains: Vec::new(),
            d_in: 2,
            d_out: 2,
            max_outstanding: 2,
            weights: None,
        }
    }
}

impl Mapping {
    /// Parses the text of a mapping and rejects unknown keys.
    ///
    /// # Errors
    /// Returns every problem in the text.
    pub fn parse(file: &str, text: &str) -> Result<Mapping, Diagnostics> {
        let mut root = ConfigReader::new(file, "", parse_toml(file, text)?);
        let mut out = Mapping::default();
        out.topology = root.read_named("topology", &Topology::ALL, Topology::name, out.topology);
        out.media = root.read_named("media", &MediaPlacement::ALL, MediaPlacement::name, out.media);
        let (mut mesh, mut strategy) = (root.read_table("mesh"), root.read_table("strategy"));
        let (mut numerics, mut stages) = (root.read_table("numerics"), root.read_table("stages"));
        let (mut devices, mut queues) = (root.read_table("devices"), root.read_table("queues"));
        let mut overlap = root.read_table("overlap");
        let mut sizes = [1u32; 4];
        for (axis, name) in Axis::ALL.into_iter().zip(["tp", "ep", "pp", "dp"]) {
            sizes[axis as usize] = u32::try_from(mesh.read_count(name, Some(1))).unwrap_or(u32::MAX);
        }
        let strategies = [Strategy::Ulysses, Strategy::Megatron];
        out.strategy = strategy.read_named("tp", &strategies, Strategy::name, out.strategy);
        out.numerics = numerics.read_named("policy", &Numerics::ALL, Numerics::name, out.numerics);
        out.dtype = numerics.read_named("dtype", &DtypePolicy::ALL, DtypePolicy::name, out.dtype);
        out.token_numerics =
            numerics.read_named("tokens", &TokenNumerics::ALL, TokenNumerics::name, out.token_numerics);
        let mut experts = root.read_table("experts");
        out.experts = ExpertMapping::read(&mut experts);
        let mut collectives = root.read_table("collectives");
        out.transport = collectives.read_named("transport", &Transport::ALL, Transport::name, out.transport);
        out.ring_from_bytes = collectives.read_optional_count_or_zero("ring_from_bytes");
        let mut runtime = root.read_table("runtime");
        out.capture = runtime.read_named("capture", &CapturePolicy::ALL, CapturePolicy::name, out.capture);
        out.overlap_chunks = u32::try_from(overlap.read_count("chunks", Some(1))).unwrap_or(u32::MAX);
        for (i, n) in stages.read_numbers("blocks", &[]).into_iter().enumerate() {
            // With this bound every sum of 65,536 entries fits 64 bits.
            if n.fract() == 0.0 && (1.0..4_294_967_296.0).contains(&n) {
                out.blocks.push(n as u64);
            } else {
                stages.diagnostics.push(
                    Diagnostic::error(
                        &T0605,
                        format!("stages.blocks[{i}] = {n} is not a whole number of blocks"),
                    )
                    .with_label(file, format!("found {n}"))
                    .with_hint("each stage holds a whole number of blocks, from 1"),
                );
            }
        }
        if let Some(found) = devices.take_value("order") {
            let names = found
                .as_array()
                .and_then(|a| a.iter().map(|v| v.as_str().map(str::to_string)).collect::<Option<Vec<_>>>());
            match names {
                Some(list) => out.devices = list,
                None => devices.diagnostics.push(
                    Diagnostic::error(&T0004, "`devices.order` must be a list of strings")
                        .with_label(file, format!("found {found}")),
                ),
            }
        }
        let mut hosts = root.read_optional_table("hosts");
        if let Some(table) = &mut hosts {
            (out.hosts, out.host_domains) = read_hosts(file, table);
        }
        let mut depth =
            |name, default| u32::try_from(queues.read_count(name, Some(default))).unwrap_or(u32::MAX);
        (out.d_in, out.d_out, out.max_outstanding) =
            (depth("d_in", 2), depth("d_out", 2), depth("max_outstanding", 2));
        let mut weights = root.read_optional_table("weights");
        out.weights = weights.as_mut().map(|weights| read_weights_digest(file, weights));
        let mut ds: Diagnostics =
            [root, mesh, strategy, numerics, experts, overlap, collectives, runtime, stages, devices, queues]
                .into_iter()
                .chain(hosts)
                .chain(weights)
                .flat_map(ConfigReader::finish)
                .collect();
        match Mesh::new(sizes) {
            Ok(m) => out.mesh = m,
            Err(d) => ds.push(*d),
        }
        if ds.is_empty() {
            ds = out.check_consistency();
        }
        if ds.is_empty() { Ok(out) } else { Err(ds) }
    }

    /// Returns the canonical text: every key in a fixed order, except keys at their defaults: a
    /// topology of `mesh`, media on the leader, a dtype of f32, tokens of experts replicated and none dropped, unchunked rows, the best transport, no tags of algorithms, captured
    /// programs, no hosts and any weights.
    /// [`Mapping::parse`] reads it back.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let list = |v: &[u64]| v.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let devices: Vec<String> = self.devices.iter().map(|d| format!("\"{d}\"")).collect();
        let size = |a| self.mesh.axis_size(a);
        let mut placement = String::new();
        if self.topology != Topology::Mesh {
            placement += &format!("topology = \"{}\"\n", self.topology.name());
        }
        if self.media != MediaPlacement::Leader {
            placement += &format!("media = \"{}\"\n", self.media.name());
        }
        if !placement.is_empty() {
            placement += "\n";
        }
        let dtype = match self.dtype {
            DtypePolicy::F32 => String::new(),
            other => format!("dtype = \"{}\"\n", other.name()),
        };
        let tokens = match self.token_numerics {
            TokenNumerics::F32 => String::new(),
            other => format!("tokens = \"{}\"\n", other.name()),
        };
        let experts = self.experts.to_toml();
        let mut collectives = match self.transport {
            Transport::Best => String::new(),
            other => format!("transport = \"{}\"\n", other.name()),
        };
        if let Some(from) = self.ring_from_bytes {
            collectives += &format!("ring_from_bytes = {from}\n");
        }
        if !collectives.is_empty() {
            collectives = format!("[collectives]\n{collectives}\n");
        }
        let runtime = match self.capture {
            CapturePolicy::Programs => String::new(),
            other => format!("[runtime]\ncapture = \"{}\"\n\n", other.name()),
        };
        let overlap = match self.overlap_chunks {
            1 => String::new(),
            n => format!("[overlap]\nchunks = {n}\n\n"),
        };
        let numbers = |v: &[u32]| v.iter().map(u32::to_string).collect::<Vec<_>>().join(", ");
        let mut hosts = String::new();
        if !self.hosts.is_empty() {
            hosts += &format!("\n[hosts]\nranks = [{}]\n", numbers(&self.hosts));
        }
        if !self.host_domains.is_empty() {
            hosts += &format!("domains = [{}]\n", numbers(&self.host_domains));
        }
        let weights =
            self.weights.as_ref().map_or(String::new(), |w| format!("\n[weights]\ndigest = \"{w}\"\n"));
        format!(
            "{placement}[mesh]\ntp = {}\nep = {}\npp = {}\ndp = {}\n\n[strategy]\ntp = \"{}\"\n\n[numerics]\npolicy = \"{}\"\n{dtype}{tokens}\n{experts}{overlap}{collectives}{runtime}\
[stages]\nblocks = [{}]\n\n[devices]\norder = [{}]\n\n[queues]\nd_in = {}\nd_out = {}\nmax_outstanding = {}\n{hosts}{weights}",
            size(Axis::Tp),
            size(Axis::Ep),
            size(Axis::Pp),
            size(Axis::Dp),
            self.strategy.name(),
            self.numerics.name(),
            list(&self.blocks),
            devices.join(", "),
            self.d_in,
            self.d_out,
            self.max_outstanding,
        )
    }

    /// Returns the strategy's name, with the number of row chunks if there are several.
    #[must_use]
    pub fn strategy_label(&self) -> String {
        match self.overlap_chunks {
            1 => self.strategy.name().to_string(),
            n => format!("{} in {n} chunks", self.strategy.name()),
        }
    }

    /// Returns the mesh together with the ranks that the topology puts outside it.
    ///
    /// # Errors
    /// Returns T0104 if there are too many ranks.
    pub fn world_mesh(&self) -> Result<Mesh, Box<Diagnostic>> {
        self.mesh.with_outside(self.topology.outside_ranks())
    }

    /// Returns the rank map: the mapping's devices, or logical names.
    ///
    /// # Errors
    /// Returns T0103 if the list does not fit the ranks.
    pub fn rank_map(&self) -> Result<RankMap, Box<Diagnostic>> {
        let world = self.world_mesh()?;
        if self.devices.is_empty() {
            Ok(RankMap::from_device_kind(&world, "rank"))
        } else {
            RankMap::new(&world, self.devices.clone())
        }
    }
}

/// Reads the ranks of each host, and the switch domain of each.
fn read_hosts(file: &str, hosts: &mut ConfigReader<'_>) -> (Vec<u32>, Vec<u32>) {
    let mut read = |key: &'static str, least: f64, what: &str| {
        let found = hosts.read_numbers(key, &[]);
        if found.iter().all(|n| n.fract() == 0.0 && (least..=f64::from(u32::MAX)).contains(n)) {
            return found.into_iter().map(|n| n as u32).collect();
        }
        hosts.diagnostics.push(
            Diagnostic::error(&T0605, format!("`hosts.{key}` must be a list of {what}"))
                .with_label(file, format!("found {found:?}")),
        );
        Vec::new()
    };
    (read("ranks", 1.0, "numbers of ranks, from 1"), read("domains", 0.0, "numbers of switch domains"))
}

/// Reads the digest to which a plan pins its weights.
fn read_weights_digest(file: &str, weights: &mut ConfigReader<'_>) -> String {
    let digest = weights.read_text("digest", None);
    let is_digest = digest.len() == 64 && digest.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    if weights.diagnostics.is_empty() && !is_digest {
        weights.diagnostics.push(
            Diagnostic::error(&T0004, "`weights.digest` must be 64 lower-case hex digits")
                .with_label(file, format!("found `{digest}`")),
        );
    }
    digest
}

/// The sizes of a model that a mapping must fit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ModelExtents {
    /// Number of attention heads per block, over all ranks of tp.
    pub heads: u64,
    /// Width of the residual stream.
    pub hidden_size: u64,
    /// Width of the feed-forward layer.
    pub ffn_size: u64,
    /// Tokens per chunk of video, which ulysses shards over tp.
    pub tokens: u64,
    /// Number of transformer blocks, over all stages.
    pub blocks: u64,
    /// Number of experts of a block; 0 for a model without experts.
    pub experts: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    const E: ModelExtents =
        ModelExtents { heads: 12, hidden_size: 1536, ffn_size: 8960, tokens: 4680, blocks: 30, experts: 0 };

    fn codes_for(mesh: &str, f: impl Fn(&mut Mapping)) -> Vec<&'static str> {
        let mut m = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
        f(&mut m);
        m.check_fit(&E).iter().map(|d| d.code.id).collect()
    }

    #[test]
    fn text_round_trips() {
        let m = Mapping { mesh: "tp=2,pp=3".parse().unwrap(), blocks: vec![1, 2, 3], ..Mapping::default() };
        assert_eq!(Mapping::parse("m", &m.to_toml()).unwrap(), m);
        assert_eq!(Mapping::parse("m", "").unwrap(), Mapping::default());
        assert!(!m.to_toml().contains("topology") && !m.to_toml().contains("dtype"));
        let pp1 = Mapping { topology: Topology::Pp1, ..m.clone() };
        assert!(pp1.to_toml().starts_with("topology = \"pp1\"\n"));
        assert_eq!(Mapping::parse("m", &pp1.to_toml()).unwrap(), pp1);
        let media = Mapping { media: MediaPlacement::Mesh, ..pp1 };
        assert!(media.to_toml().starts_with("topology = \"pp1\"\nmedia = \"mesh\"\n\n[mesh]"));
        assert_eq!(Mapping::parse("m", &media.to_toml()).unwrap(), media);
        let nccl = Mapping { transport: Transport::Nccl, ..m.clone() };
        assert_eq!(Mapping::parse("m", &nccl.to_toml()).unwrap(), nccl);
        for (transport, keys) in [
            (Transport::Best, "[collectives]\nring_from_bytes = 0\n\n[stages]"),
            (Transport::Nccl, "[collectives]\ntransport = \"nccl\"\nring_from_bytes = 0\n\n[stages]"),
        ] {
            let tagged = Mapping { ring_from_bytes: Some(0), transport, ..m.clone() };
            assert!(tagged.to_toml().contains(keys), "{}", tagged.to_toml());
            assert_eq!(Mapping::parse("m", &tagged.to_toml()).unwrap(), tagged);
        }
        assert!(!m.to_toml().contains("[collectives]"));
        let eager = Mapping { capture: CapturePolicy::None, ..m.clone() };
        assert!(eager.to_toml().contains("\n\n[runtime]\ncapture = \"none\"\n\n[stages]\n"));
        assert_eq!(Mapping::parse("m", &eager.to_toml()).unwrap(), eager);
        assert!(!m.to_toml().contains("[runtime]"));
        let bf16 = Mapping { dtype: DtypePolicy::Bf16, ..m };
        assert!(bf16.to_toml().contains("policy = \"standard\"\ndtype = \"bf16\"\n"), "{}", bf16.to_toml());
        assert_eq!(Mapping::parse("m", &bf16.to_toml()).unwrap(), bf16);
        let strategy = Strategy::Megatron;
        let pieces = Mapping { overlap_chunks: 2, strategy, ..bf16 };
        assert!(pieces.to_toml().contains("\n\n[overlap]\nchunks = 2\n\n[stages]\n"), "{}", pieces.to_toml());
        assert_eq!(Mapping::parse("m", &pieces.to_toml()).unwrap(), pieces);
        assert_eq!(pieces.strategy_label(), "megatron in 2 chunks");
        let pinned = Mapping { weights: Some("0a".repeat(32)), ..pieces };
        assert!(pinned.to_toml().ends_with("0a0a\"\n"), "{}", pinned.to_toml());
        assert_eq!(Mapping::parse("m", &pinned.to_toml()).unwrap(), pinned);
        let placed = Mapping { hosts: vec![4, 2], host_domains: vec![3, 3], ..pinned };
        assert_eq!(Mapping::parse("m", &placed.to_toml()).unwrap(), placed);
        let ds = Mapping::parse("m", "[mesh]\ntpp = 2\n").unwrap_err();
        assert_eq!((ds[0].code.id, ds[0].hint.as_deref()), ("T0002", Some("did you mean `mesh.tp`?")));
    }

    #[test]
    fn invalid_mappings_are_rejected() {
        for (text, code, says) in [
            ("[mesh]\npp = 2\n[stages]\nblocks = [1.5, 2]\n", "T0605", "1.5"),
            ("[mesh]\npp = 2\n[stages]\nblocks = [-3, 2]\n", "T0605", "-3"),
            ("[mesh]\npp = 2\n[stages]\nblocks = [1e30, 2]\n", "T0605", "1000000000000"),
            ("[mesh]\noutside = 1\n", "T0002", "outside"),
            ("topology = \"pp2\"\n", "T0004", "topology"),
            ("media = \"ranks\"\n", "T0004", "media"),
            ("topology = \"pp0\"\n[mesh]\ntp = 2\n", "T0605", "pp0 with a mesh of 2 ranks"),
            ("topology = \"pp1\"\n", "T0605", "pp1 with a mesh of 1 rank"),
            ("topology = \"pp1\"\n[mesh]\ntp = 2\n[devices]\norder = [\"a\", \"b\"]\n", "T0103", "3 ranks"),
            ("[numerics]\ndtype = \"f16\"\n", "T0004", "dtype"),
            ("[collectives]\ntransport = \"mpi\"\n", "T0004", "transport"),
            ("[collectives]\nring_from_bytes = -1\n", "T0004", "collectives.ring_from_bytes"),
            ("[collectives]\nring_from_bytes = 0.5\n", "T0004", "an integer from 0 to 2^32 - 1"),
            ("[collectives]\nring_from_bytes = 4294967296\n", "T0004", "an integer from 0 to 2^32 - 1"),
            ("[collectives]\nring_from_bytes = \"1 MiB\"\n", "T0004", "collectives.ring_from_bytes"),
            ("[weights]\ndigest = \"\"\n", "T0004", "weights.digest"),
            ("[weights]\ndigest = \"12345\"\n", "T0004", "64 lower-case hex digits"),
            ("[weights]\n", "T0003", "digest"),
            ("[overlap]\nchunks = 0\n", "T0004", "overlap.chunks"),
            ("[mesh]\ntp = 2\n[overlap]\nchunks = 2\n", "T0605", "chunks = 2 without an all-reduce"),
            (
                "[strategy]\ntp = \"megatron\"\n[overlap]\nchunks = 2\n",
                "T0605",
                "chunks = 2 without an all-reduce",
            ),
            ("[devices]\norder = [1]\n", "T0004", "devices.order"),
            ("[mesh]\ntp = 4\n[hosts]\nranks = [2, 1]\n", "T0605", "hold 3 ranks and the mapping has 4"),
            ("[mesh]\ntp = 4\n[hosts]\nranks = [4, 0]\n", "T0605", "hosts.ranks"),
            (
                "[mesh]\ntp = 4\n[hosts]\nranks = [2, 2]\ndomains = [0]\n",
                "T0605",
                "1 switch domains for 2 hosts",
            ),
            ("[hosts]\ndomains = [0]\n", "T0605", "without hosts.ranks"),
            ("topology = \"pp1\"\n[mesh]\ntp = 2\n[hosts]\nranks = [2]\n", "T0605", "the mapping has 3"),
            ("[devices]\norder = \"cpu0\"\n", "T0004", "devices.order"),
            ("[devices]\norder = ['a\"b']\n", "T0605", "a\\\"b"),
            ("[devices]\norder = ['a\\b']\n", "T0605", "a\\\\b"),
            ("[devices]\norder = [\"a\\n\"]\n", "T0605", "a\\n"),
        ] {
            let ds = Mapping::parse("m", text).unwrap_err();
            assert!(
                ds.iter().any(|d| d.code.id == code && format!("{} {:?}", d.message, d.hint).contains(says)),
                "{text}: {ds:#?}"
            );
        }
        assert_eq!(codes_for("pp=2", |m| m.blocks = vec![u64::MAX, 31]), ["T0603"]);
        assert_eq!(codes_for("tp=2, outside=1", |_| {}), ["T0605"]);
        assert_eq!(codes_for("pp=2", |m| m.topology = Topology::Pp1), Vec::<&str>::new());
        assert_eq!(codes_for("tp=1", |m| m.topology = Topology::Pp0), Vec::<&str>::new());
    }

    #[test]
    fn the_scarcer_unit_is_named() {
        let m = Mapping { mesh: "tp=5".parse().unwrap(), ..Mapping::default() };
        let says = |e: ModelExtents| m.check_fit(&e)[0].message.clone();
        assert_eq!(
            says(ModelExtents { tokens: 4, ..E }),
            "tp = 5 over 4 tokens of a chunk leaves a rank without a unit"
        );
        assert_eq!(says(ModelExtents { heads: 3, ..E }), "tp = 5 over 3 heads leaves a rank without a unit");
    }

    #[test]
    fn unfit_mappings_give_their_codes() {
        assert!(codes_for("tp=8", |_| ()).is_empty(), "uneven heads are legal");
        assert_eq!(codes_for("tp=13", |_| ()), ["T0602"]);
        assert_eq!(codes_for("ep=2,dp=2", |_| ()), ["T0601", "T0601"]);
        assert_eq!(codes_for("pp=31", |_| ()), ["T0603"]);
        assert_eq!(codes_for("pp=2", |m| m.blocks = vec![10, 10]), ["T0603"]);
        assert_eq!(codes_for("tp=3", |m| m.numerics = Numerics::MeshInvariant), ["T0604"]);
        assert_eq!(codes_for("tp=4", |m| m.numerics = Numerics::MeshInvariant), Vec::<&str>::new());
        assert_eq!(codes_for("tp=2", |m| m.d_in = 0), ["T0605"]);
        let both = |m: &mut Mapping| (m.numerics, m.dtype) = (Numerics::MeshInvariant, DtypePolicy::Bf16);
        assert_eq!(codes_for("tp=4", both), ["T0604"]);
        assert_eq!(codes_for("tp=4", |m| m.dtype = DtypePolicy::Bf16), Vec::<&str>::new());
        let pieces = |n| move |m: &mut Mapping| (m.strategy, m.overlap_chunks) = (Strategy::Megatron, n);
        assert_eq!(codes_for("tp=4", pieces(4680)), Vec::<&str>::new());
        assert_eq!(codes_for("tp=4", pieces(4681)), ["T0605"]);
    }
}
