//! What a person reads and edits: topology, mesh, strategy, numerics policy, stages, queue depths.

use tessera_base::fields::{Fields, T0004, toml};
use tessera_base::{Code, Diagnostic, Diagnostics, choices};
use tessera_mesh::{Axis, Mesh, RankMap};

/// An axis that this kind of model has no use for.
pub static T0601: Code = Code {
    id: "T0601",
    title: "mesh axis has nothing to cut",
    page: "A video generator has no experts, so `ep` must be 1, and a stream is one sequence, so `dp` must be 1. Use tp \
for heads or tokens, and pp for blocks.",
};
/// More ranks on tp than there are units.
pub static T0602: Code = Code {
    id: "T0602",
    title: "tp does not fit the model",
    page: "Every rank of tp must hold at least one whole head, at least one column of the feed-forward layer \
(megatron) and at least one token (ulysses). Counts that do not divide give pieces that differ by one unit; more ranks \
than units leaves a rank with nothing and is refused. The hint lists the sizes that fit, even ones first.",
};
/// More stages than blocks.
pub static T0603: Code = Code {
    id: "T0603",
    title: "pp does not fit the model",
    page: "Each stage of a block pipeline holds at least one whole block. A list of blocks per stage must have one \
entry per stage and add up to the model's blocks.",
};
/// The mesh-invariant policy cannot hold.
pub static T0604: Code = Code {
    id: "T0604",
    title: "mesh-invariant numerics are not possible here",
    page: "Under `mesh-invariant` every contraction that some mesh may split is cut into 8 equal segments summed in one \
binary tree, so that no result depends on the mesh. That needs tp to divide 8, the heads to divide by tp, and both the \
model width and the feed-forward width to divide by 8. The tree is one of f32 sums, so `dtype` must be f32 too. Use the \
standard policy or one of the sizes in the hint.",
};
/// The mapping does not fit the mesh.
pub static T0605: Code = Code {
    id: "T0605",
    title: "mapping contradicts itself",
    page: "The mapping's device list, stages or queue depths do not fit its mesh. Queue depths are bounds: 0 would \
stop the stream and no bound would hide a slow consumer, so each is 1 to 64. Blocks per stage are whole numbers from 1. \
A device name is printed in quotes into the sealed mapping, so it may hold no quote, backslash or control character. \
A list of devices names every rank's, the leader outside the mesh first.\n\n\
`pieces` of `overlap` cuts the rows of a call so that the sums of one piece travel while another computes. Only `megatron` over \
more than one rank sums, and each piece needs a row.\n\n\
Whether a rank stands outside the mesh is what `topology` says, not the mesh: in `mesh` rank 0 leads and computes; in `pp0` \
rank 0 encodes and decodes beside a mesh of one rank; in `pp1` beside a mesh of two ranks or more, the first of which relays. \
That is a pipeline over phases; `pp` of the mesh is one over blocks, and a mapping may have both.",
};

/// Where the leader stands: which ranks encode and decode, and which generate.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Topology {
    /// Rank 0 leads, encodes, decodes and has a place in the mesh.
    Mesh,
    /// Rank 0 outside the mesh leads, encodes and decodes; rank 1 is the mesh.
    Pp0,
    /// Rank 0 outside the mesh leads, encodes and decodes; two ranks or more are the mesh, and rank 1 relays to them.
    Pp1,
}

impl Topology {
    /// All topologies.
    pub const ALL: [Topology; 3] = [Topology::Mesh, Topology::Pp0, Topology::Pp1];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["mesh", "pp0", "pp1"][self as usize]
    }

    /// Ranks outside the mesh.
    #[must_use]
    pub fn outside(self) -> u32 {
        u32::from(self != Topology::Mesh)
    }
}

/// How tp cuts a transformer block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Strategy {
    /// Weights by column, then by row; one all-reduce per pair.
    Megatron,
    /// Tokens; heads around attention by all-to-all. No arithmetic crosses ranks.
    Ulysses,
}

impl Strategy {
    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Strategy::Megatron => "megatron",
            Strategy::Ulysses => "ulysses",
        }
    }
}

/// Which sums may depend on the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Numerics {
    /// Each rank sums its part; ranks add in rank order.
    Standard,
    /// Eight segments in one tree, whatever the mesh.
    MeshInvariant,
}

impl Numerics {
    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Numerics::Standard => "standard",
            Numerics::MeshInvariant => "mesh-invariant",
        }
    }
}

/// What programs compute in. [`crate::precision`] says which values that concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum DtypePolicy {
    /// f32 throughout.
    #[default]
    F32,
    /// Products and what works on their results in bf16; conditioning, latents and norm vectors in f32.
    Bf16,
    /// As bf16, with the products of blocks in e4m3 under a scale per row.
    Fp8,
}

impl DtypePolicy {
    /// All policies.
    pub const ALL: [DtypePolicy; 3] = [DtypePolicy::F32, DtypePolicy::Bf16, DtypePolicy::Fp8];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["f32", "bf16", "fp8"][self as usize]
    }
}

/// By what collectives are moved; GPUs alone have a choice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub enum Via {
    /// Whatever is best for ranks that can reach one another's memory: kernels, copy engines, or the kernel that makes what is
    /// sent. NCCL for others.
    #[default]
    Best,
    /// A kernel of its own for each, over memory of peers where ranks can reach it.
    Kernels,
    /// NCCL.
    Nccl,
}

impl Via {
    /// All of them.
    pub const ALL: [Via; 3] = [Via::Best, Via::Kernels, Via::Nccl];

    /// Spelling.
    #[must_use]
    pub fn name(self) -> &'static str {
        ["best", "kernels", "nccl"][self as usize]
    }
}

/// A mapping.
#[derive(Debug, Clone, PartialEq)]
pub struct Mapping {
    /// Where the leader stands.
    pub topology: Topology,
    /// Mesh, without the ranks outside it: [`Mapping::world`] has those too.
    pub mesh: Mesh,
    /// Strategy over tp.
    pub strategy: Strategy,
    /// Numerics policy.
    pub numerics: Numerics,
    /// What programs compute in.
    pub dtype: DtypePolicy,
    /// By what collectives are moved.
    pub via: Via,
    /// Pieces that the rows of a call are cut into under megatron, so that one piece's sums travel while another computes; 1
    /// for whole rows.
    pub pieces: u32,
    /// Blocks per stage; empty for a balanced cut.
    pub blocks: Vec<u64>,
    /// Devices in rank order; empty for logical names.
    pub devices: Vec<String>,
    /// Prepared calls waiting for the mesh.
    pub d_in: u32,
    /// Finished chunks waiting for decode and write.
    pub d_out: u32,
    /// Calls sent and not done.
    pub max_outstanding: u32,
}

impl Default for Mapping {
    fn default() -> Mapping {
        Mapping {
            topology: Topology::Mesh,
            mesh: Mesh::default(),
            // Ulysses moves 1.5·tp times less than megatron at a video chunk's token counts, and is exact.
            strategy: Strategy::Ulysses,
            numerics: Numerics::Standard,
            dtype: DtypePolicy::F32,
            via: Via::Best,
            pieces: 1,
            blocks: Vec::new(),
            devices: Vec::new(),
            d_in: 2,
            d_out: 2,
            max_outstanding: 2,
        }
    }
}

impl Mapping {
    /// Reads a mapping's text. Unknown keys are refused.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn parse(file: &str, text: &str) -> Result<Mapping, Diagnostics> {
        let mut root = Fields::new(file, "", toml(file, text)?);
        let mut out = Mapping::default();
        let word = root.word("topology", &Topology::ALL.map(Topology::name), "mesh");
        out.topology = Topology::ALL.into_iter().find(|t| t.name() == word).unwrap_or(Topology::Mesh);
        let (mut mesh, mut strategy) = (root.table("mesh"), root.table("strategy"));
        let (mut numerics, mut stages) = (root.table("numerics"), root.table("stages"));
        let (mut devices, mut queues) = (root.table("devices"), root.table("queues"));
        let mut overlap = root.table("overlap");
        let mut sizes = [1u32; 4];
        for (axis, name) in Axis::ALL.into_iter().zip(["tp", "ep", "pp", "dp"]) {
            sizes[axis as usize] = u32::try_from(mesh.count(name, Some(1))).unwrap_or(u32::MAX);
        }
        out.strategy = match strategy.word("tp", &["ulysses", "megatron"], "ulysses") {
            "megatron" => Strategy::Megatron,
            _ => Strategy::Ulysses,
        };
        out.numerics = match numerics.word("policy", &["standard", "mesh-invariant"], "standard") {
            "standard" => Numerics::Standard,
            _ => Numerics::MeshInvariant,
        };
        let dtype = numerics.word("dtype", &DtypePolicy::ALL.map(DtypePolicy::name), "f32");
        out.dtype = DtypePolicy::ALL.into_iter().find(|d| d.name() == dtype).unwrap_or_default();
        let mut exchange = root.table("exchange");
        let via = exchange.word("via", &Via::ALL.map(Via::name), "best");
        out.via = Via::ALL.into_iter().find(|v| v.name() == via).unwrap_or_default();
        out.pieces = u32::try_from(overlap.count("pieces", Some(1))).unwrap_or(u32::MAX);
        for (i, n) in stages.numbers("blocks", &[]).into_iter().enumerate() {
            // From here on every sum of 65,536 entries fits 64 bits.
            if n.fract() == 0.0 && (1.0..4_294_967_296.0).contains(&n) {
                out.blocks.push(n as u64);
            } else {
                stages.diagnostics.push(
                    Diagnostic::error(
                        &T0605,
                        format!("stages.blocks[{i}] = {n} is not a whole number of blocks"),
                    )
                    .at(file, format!("found {n}"))
                    .hint("each stage holds a whole number of blocks, from 1"),
                );
            }
        }
        if let Some(found) = devices.take("order") {
            let names = found
                .as_array()
                .and_then(|a| a.iter().map(|v| v.as_str().map(str::to_string)).collect::<Option<Vec<_>>>());
            match names {
                Some(list) => out.devices = list,
                None => devices.diagnostics.push(
                    Diagnostic::error(&T0004, "`devices.order` must be a list of strings")
                        .at(file, format!("found {found}")),
                ),
            }
        }
        let mut depth = |name, default| u32::try_from(queues.count(name, Some(default))).unwrap_or(u32::MAX);
        (out.d_in, out.d_out, out.max_outstanding) =
            (depth("d_in", 2), depth("d_out", 2), depth("max_outstanding", 2));
        let mut ds: Diagnostics =
            [root, mesh, strategy, numerics, overlap, exchange, stages, devices, queues]
                .into_iter()
                .flat_map(Fields::finish)
                .collect();
        match Mesh::new(sizes) {
            Ok(m) => out.mesh = m,
            Err(d) => ds.push(*d),
        }
        if ds.is_empty() {
            ds = out.contradictions();
        }
        if ds.is_empty() { Ok(out) } else { Err(ds) }
    }

    /// The canonical text: every key, in a fixed order, but for a topology of `mesh`, a dtype of f32, rows in one piece and the
    /// best way of moving, which are what a text without the key means. [`Mapping::parse`] reads it back.
    #[must_use]
    pub fn text(&self) -> String {
        let list = |v: &[u64]| v.iter().map(u64::to_string).collect::<Vec<_>>().join(", ");
        let devices: Vec<String> = self.devices.iter().map(|d| format!("\"{d}\"")).collect();
        let size = |a| self.mesh.size(a);
        let topology = match self.topology {
            Topology::Mesh => String::new(),
            other => format!("topology = \"{}\"\n\n", other.name()),
        };
        let dtype = match self.dtype {
            DtypePolicy::F32 => String::new(),
            other => format!("dtype = \"{}\"\n", other.name()),
        };
        let exchange = match self.via {
            Via::Best => String::new(),
            other => format!("[exchange]\nvia = \"{}\"\n\n", other.name()),
        };
        let overlap = match self.pieces {
            1 => String::new(),
            n => format!("[overlap]\npieces = {n}\n\n"),
        };
        format!(
            "{topology}[mesh]\ntp = {}\nep = {}\npp = {}\ndp = {}\n\n[strategy]\ntp = \"{}\"\n\n[numerics]\npolicy = \"{}\"\n{dtype}\n{overlap}{exchange}\
[stages]\nblocks = [{}]\n\n[devices]\norder = [{}]\n\n[queues]\nd_in = {}\nd_out = {}\nmax_outstanding = {}\n",
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

    /// The strategy, and the pieces of rows where there are several.
    #[must_use]
    pub fn cut(&self) -> String {
        match self.pieces {
            1 => self.strategy.name().to_string(),
            n => format!("{} in {n} pieces", self.strategy.name()),
        }
    }

    /// The mesh and the ranks that the topology puts outside it.
    ///
    /// # Errors
    /// T0104 when they are too many.
    pub fn world(&self) -> Result<Mesh, Box<Diagnostic>> {
        self.mesh.with_outside(self.topology.outside())
    }

    /// The rank map: the mapping's devices, or logical names.
    ///
    /// # Errors
    /// T0103 when the list does not fit the ranks.
    pub fn rank_map(&self) -> Result<RankMap, Box<Diagnostic>> {
        let world = self.world()?;
        if self.devices.is_empty() {
            Ok(RankMap::logical(&world, "rank"))
        } else {
            RankMap::new(&world, self.devices.clone())
        }
    }

    /// What contradicts itself, whatever the model.
    #[must_use]
    pub fn contradictions(&self) -> Diagnostics {
        let mut ds = Vec::new();
        for (name, n) in
            [("d_in", self.d_in), ("d_out", self.d_out), ("max_outstanding", self.max_outstanding)]
        {
            if !(1..=64).contains(&n) {
                ds.push(Diagnostic::error(
                    &T0605,
                    format!("queues.{name} = {n} is not a bound from 1 to 64"),
                ));
            }
        }
        if self.mesh.outside() > 0 {
            ds.push(
                Diagnostic::error(
                    &T0605,
                    format!("{} ranks outside the mesh, which a mapping cannot say", self.mesh.outside()),
                )
                .at("mesh", self.mesh.to_string())
                .hint("leave `outside` away; topology pp0 or pp1 puts the leader outside the mesh"),
            );
        }
        let tp = self.mesh.size(Axis::Tp);
        if self.pieces == 0 {
            ds.push(Diagnostic::error(&T0605, "overlap.pieces = 0 leaves no rows"));
        } else if self.pieces > 1 && (self.strategy != Strategy::Megatron || tp < 2) {
            let says = format!("overlap.pieces = {} where nothing is summed over tp", self.pieces);
            ds.push(
                Diagnostic::error(&T0605, says)
                    .at("mapping", format!("{} over tp = {tp}", self.strategy.name()))
                    .hint("leave `pieces` away, or use strategy megatron with tp=2 and up; ulysses overlaps its exchanges by itself"),
            );
        }
        let inside = self.mesh.inside();
        let misplaced = match self.topology {
            Topology::Pp0 if inside != 1 => {
                Some("topology pp1 takes a mesh of two ranks or more; pp0 takes tp=1 alone; mesh takes any")
            }
            Topology::Pp1 if inside < 2 => Some(
                "topology pp0 is a leader and one rank; pp1 takes tp=2 and up, or pp=2 and up; mesh takes any",
            ),
            _ => None,
        };
        if let Some(hint) = misplaced {
            let ranks = if inside == 1 { "1 rank".to_string() } else { format!("{inside} ranks") };
            ds.push(
                Diagnostic::error(
                    &T0605,
                    format!("topology {} beside a mesh of {ranks}", self.topology.name()),
                )
                .at("mesh", self.mesh.to_string())
                .hint(hint),
            );
        }
        let stages = self.mesh.size(Axis::Pp) as usize;
        if !self.blocks.is_empty() && self.blocks.len() != stages {
            ds.push(Diagnostic::error(
                &T0605,
                format!("{} entries of blocks for pp = {stages}", self.blocks.len()),
            ));
        }
        for (i, name) in self.devices.iter().enumerate() {
            if name.contains(|c: char| c == '"' || c == '\\' || c.is_control()) {
                ds.push(
                    Diagnostic::error(&T0605, format!("device name {name:?} cannot be written in a mapping"))
                        .at(format!("rank {i}"), format!("{name:?}"))
                        .hint("use a name without quotes, backslashes and control characters"),
                );
            }
        }
        if let Err(d) = self.rank_map() {
            ds.push(*d);
        }
        ds
    }
}

/// What a mapping must fit: the countable things of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Extents {
    /// Attention heads.
    pub heads: u64,
    /// Width of the residual stream.
    pub dim: u64,
    /// Width of the feed-forward layer.
    pub ffn: u64,
    /// Tokens of a chunk.
    pub tokens: u64,
    /// Blocks.
    pub blocks: u64,
}

impl Mapping {
    /// Why this mapping does not fit a model; every reason, with the legal neighbours.
    #[must_use]
    pub fn misfits(&self, e: &Extents) -> Diagnostics {
        let mut ds = self.contradictions();
        let tp = u64::from(self.mesh.size(Axis::Tp));
        let pp = u64::from(self.mesh.size(Axis::Pp));
        for axis in [Axis::Ep, Axis::Dp] {
            let n = self.mesh.size(axis);
            if n > 1 {
                let why =
                    if axis == Axis::Ep { "the model has no experts" } else { "a stream is one sequence" };
                ds.push(
                    Diagnostic::error(&T0601, format!("{axis} = {n}, but {why}"))
                        .at("mesh", self.mesh.to_string())
                        .hint(format!("use {axis}=1")),
                );
            }
        }
        let (what, units) = match self.strategy {
            Strategy::Megatron => ("columns of the feed-forward layer", e.ffn),
            Strategy::Ulysses => ("tokens of a chunk", e.tokens),
        };
        if tp > e.heads.min(units) {
            let most = e.heads.min(units);
            let scarce = if e.heads <= units { "heads" } else { what };
            let even: Vec<u64> =
                (1..=most).filter(|n| e.heads.is_multiple_of(*n) && units.is_multiple_of(*n)).collect();
            ds.push(
                Diagnostic::error(
                    &T0602,
                    format!("tp = {tp} over {most} {scarce} leaves a rank without one"),
                )
                .at("model", format!("{} heads, {units} {what}", e.heads))
                .at("mesh", self.mesh.to_string())
                .hint(format!("even shards: tp = {}; uneven ones up to tp = {most}", choices(&even))),
            );
        }
        if u64::from(self.pieces) > e.tokens {
            let says = format!("overlap.pieces = {} over {} tokens of a chunk", self.pieces, e.tokens);
            ds.push(
                Diagnostic::error(&T0605, says).hint("every piece has a token at least; 2 pieces hide most"),
            );
        }
        let total = self.blocks.iter().try_fold(0u64, |sum, n| sum.checked_add(*n));
        if pp > e.blocks || (!self.blocks.is_empty() && (total != Some(e.blocks) || self.blocks.contains(&0)))
        {
            ds.push(
                Diagnostic::error(&T0603, format!("{} blocks over pp = {pp} stages", e.blocks))
                    .at("mapping", format!("blocks = {:?}", self.blocks))
                    .hint(format!("pp may be 1 to {}", e.blocks)),
            );
        }
        if self.numerics == Numerics::MeshInvariant {
            let legal: Vec<u64> = [1, 2, 4, 8].into_iter().filter(|n| e.heads.is_multiple_of(*n)).collect();
            let widths = e.dim.is_multiple_of(8) && e.ffn.is_multiple_of(8);
            if !widths || !legal.contains(&tp) {
                let mut d = Diagnostic::error(
                    &T0604,
                    format!("tp = {tp}, {} heads, width {}, feed-forward {}", e.heads, e.dim, e.ffn),
                );
                d = d.hint(if widths {
                    format!("tp = {} would do, or numerics = \"standard\"", choices(&legal))
                } else {
                    "the model's widths must divide by 8; use numerics = \"standard\"".to_string()
                });
                ds.push(d);
            }
            if self.dtype != DtypePolicy::F32 {
                let dtype = self.dtype.name();
                let says = format!("numerics mesh-invariant in {dtype}: its trees are sums of f32");
                ds.push(Diagnostic::error(&T0604, says).hint(format!(
                    "dtype = \"f32\" under mesh-invariant, or numerics = \"standard\" in {dtype}; ulysses in {dtype} is bit-identical on any tp"
                )));
            }
        }
        ds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const E: Extents = Extents { heads: 12, dim: 1536, ffn: 8960, tokens: 4680, blocks: 30 };

    fn with(mesh: &str, f: impl Fn(&mut Mapping)) -> Vec<&'static str> {
        let mut m = Mapping { mesh: mesh.parse().unwrap(), ..Mapping::default() };
        f(&mut m);
        m.misfits(&E).iter().map(|d| d.code.id).collect()
    }

    #[test]
    fn text_round_trips() {
        let m = Mapping { mesh: "tp=2,pp=3".parse().unwrap(), blocks: vec![1, 2, 3], ..Mapping::default() };
        assert_eq!(Mapping::parse("m", &m.text()).unwrap(), m);
        assert_eq!(Mapping::parse("m", "").unwrap(), Mapping::default());
        assert!(!m.text().contains("topology") && !m.text().contains("dtype"));
        let pp1 = Mapping { topology: Topology::Pp1, ..m.clone() };
        assert!(pp1.text().starts_with("topology = \"pp1\"\n"));
        assert_eq!(Mapping::parse("m", &pp1.text()).unwrap(), pp1);
        let nccl = Mapping { via: Via::Nccl, ..m.clone() };
        assert_eq!(Mapping::parse("m", &nccl.text()).unwrap(), nccl);
        let bf16 = Mapping { dtype: DtypePolicy::Bf16, ..m };
        assert!(bf16.text().contains("policy = \"standard\"\ndtype = \"bf16\"\n"), "{}", bf16.text());
        assert_eq!(Mapping::parse("m", &bf16.text()).unwrap(), bf16);
        let strategy = Strategy::Megatron;
        let pieces = Mapping { pieces: 2, strategy, ..bf16 };
        assert!(pieces.text().contains("\n\n[overlap]\npieces = 2\n\n[stages]\n"), "{}", pieces.text());
        assert_eq!(Mapping::parse("m", &pieces.text()).unwrap(), pieces);
        assert_eq!(pieces.cut(), "megatron in 2 pieces");
        let ds = Mapping::parse("m", "[mesh]\ntpp = 2\n").unwrap_err();
        assert_eq!((ds[0].code.id, ds[0].hint.as_deref()), ("T0002", Some("did you mean `mesh.tp`?")));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        for (text, code, says) in [
            ("[mesh]\npp = 2\n[stages]\nblocks = [1.5, 2]\n", "T0605", "1.5"),
            ("[mesh]\npp = 2\n[stages]\nblocks = [-3, 2]\n", "T0605", "-3"),
            ("[mesh]\npp = 2\n[stages]\nblocks = [1e30, 2]\n", "T0605", "1000000000000"),
            ("[mesh]\noutside = 1\n", "T0002", "outside"),
            ("topology = \"pp2\"\n", "T0004", "topology"),
            ("topology = \"pp0\"\n[mesh]\ntp = 2\n", "T0605", "pp0 beside a mesh of 2 ranks"),
            ("topology = \"pp1\"\n", "T0605", "pp1 beside a mesh of 1 rank"),
            ("topology = \"pp1\"\n[mesh]\ntp = 2\n[devices]\norder = [\"a\", \"b\"]\n", "T0103", "3 ranks"),
            ("[numerics]\ndtype = \"f16\"\n", "T0004", "dtype"),
            ("[exchange]\nvia = \"mpi\"\n", "T0004", "via"),
            ("[overlap]\npieces = 0\n", "T0004", "overlap.pieces"),
            ("[mesh]\ntp = 2\n[overlap]\npieces = 2\n", "T0605", "pieces = 2 where nothing is summed"),
            (
                "[strategy]\ntp = \"megatron\"\n[overlap]\npieces = 2\n",
                "T0605",
                "pieces = 2 where nothing is summed",
            ),
            ("[devices]\norder = [1]\n", "T0004", "devices.order"),
            ("[devices]\norder = \"cpu0\"\n", "T0004", "devices.order"),
            ("[devices]\norder = ['a\"b']\n", "T0605", "a\\\"b"),
            ("[devices]\norder = ['a\\b']\n", "T0605", "a\\\\b"),
            ("[devices]\norder = [\"a\\n\"]\n", "T0605", "a\\n"),
        ] {
            let ds = Mapping::parse("m", text).unwrap_err();
            assert!(ds.iter().any(|d| d.code.id == code && d.message.contains(says)), "{text}: {ds:#?}");
        }
        assert_eq!(with("pp=2", |m| m.blocks = vec![u64::MAX, 31]), ["T0603"]);
        assert_eq!(with("tp=2, outside=1", |_| {}), ["T0605"]);
        assert_eq!(with("pp=2", |m| m.topology = Topology::Pp1), Vec::<&str>::new());
        assert_eq!(with("tp=1", |m| m.topology = Topology::Pp0), Vec::<&str>::new());
    }

    #[test]
    fn the_scarcer_unit_is_named() {
        let m = Mapping { mesh: "tp=5".parse().unwrap(), ..Mapping::default() };
        let says = |e: Extents| m.misfits(&e)[0].message.clone();
        assert_eq!(
            says(Extents { tokens: 4, ..E }),
            "tp = 5 over 4 tokens of a chunk leaves a rank without one"
        );
        assert_eq!(says(Extents { heads: 3, ..E }), "tp = 5 over 3 heads leaves a rank without one");
    }

    #[test]
    fn misfits_are_named() {
        assert!(with("tp=8", |_| ()).is_empty(), "uneven heads are legal");
        assert_eq!(with("tp=13", |_| ()), ["T0602"]);
        assert_eq!(with("ep=2,dp=2", |_| ()), ["T0601", "T0601"]);
        assert_eq!(with("pp=31", |_| ()), ["T0603"]);
        assert_eq!(with("pp=2", |m| m.blocks = vec![10, 10]), ["T0603"]);
        assert_eq!(with("tp=3", |m| m.numerics = Numerics::MeshInvariant), ["T0604"]);
        assert_eq!(with("tp=4", |m| m.numerics = Numerics::MeshInvariant), Vec::<&str>::new());
        assert_eq!(with("tp=2", |m| m.d_in = 0), ["T0605"]);
        let both = |m: &mut Mapping| (m.numerics, m.dtype) = (Numerics::MeshInvariant, DtypePolicy::Bf16);
        assert_eq!(with("tp=4", both), ["T0604"]);
        assert_eq!(with("tp=4", |m| m.dtype = DtypePolicy::Bf16), Vec::<&str>::new());
        let pieces = |n| move |m: &mut Mapping| (m.strategy, m.pieces) = (Strategy::Megatron, n);
        assert_eq!(with("tp=4", pieces(4680)), Vec::<&str>::new());
        assert_eq!(with("tp=4", pieces(4681)), ["T0605"]);
    }
}
