//! The table `[experts]` of a mapping: where tokens are routed, how results return, and how many tokens an expert
//! accepts.

use tessera_base::config::ConfigReader;
use tessera_base::{Diagnostic, Diagnostics, format_choices, named_enum};
use tessera_mesh::Axis;

use super::expert_copies::ExpertCopies;
use super::router::RouterMapping;
use super::{Mapping, ModelExtents, Numerics, Strategy};
use crate::codes::{T0602, T0611, T0612};

named_enum! {
    /// The axis whose ranks have experts of their own.
    #[derive(Default)]
    pub enum ExpertAxis {
        /// The ranks of ep, which hold the same part of everything else.
        #[default]
        Ep = "ep",
        /// The ranks of tp: they share the heads and columns of everything else, and have whole experts in place of
        /// columns of every expert.
        Tp = "tp",
    }
}

impl ExpertAxis {
    /// Returns the axis of the mesh.
    #[must_use]
    pub fn mesh_axis(self) -> Axis {
        match self {
            ExpertAxis::Ep => Axis::Ep,
            ExpertAxis::Tp => Axis::Tp,
        }
    }
}

named_enum! {
    /// Which ranks that have experts of their own route a token.
    #[derive(Default)]
    pub enum TokenPlacement {
        /// Every rank routes every token and keeps the slots of its own experts.
        #[default]
        Replicated = "replicated",
        /// Each rank routes its own tokens; an all-to-all takes them to the ranks of their experts.
        Sharded = "sharded",
    }
}

named_enum! {
    /// How the results of a token's experts are added.
    #[derive(Default)]
    pub enum ExpertCombine {
        /// The result of each choice returns, and they are added by ascending expert: the same bits for any ep.
        #[default]
        Ordered = "ordered",
        /// Each rank adds the results of its own experts, and one row per token and rank returns.
        Reduced = "reduced",
    }
}

named_enum! {
    /// The form in which tokens travel to their experts.
    #[derive(Default)]
    pub enum TokenWire {
        /// In f32, as the layer before computed them.
        #[default]
        F32 = "f32",
        /// As e4m3 with one scale in f32 per 128 channels.
        Fp8 = "fp8",
    }
}

named_enum! {
    /// The numerics policy of tokens that ranks send one another.
    #[derive(Default)]
    pub enum TokenNumerics {
        /// Tokens keep their bits.
        #[default]
        F32 = "f32",
        /// Tokens may be rounded to e4m3.
        Fp8E4m3 = "fp8_e4m3",
    }
}

/// The contents of the table `[experts]`.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertMapping {
    /// The axis whose ranks have experts of their own.
    pub axis: ExpertAxis,
    /// Which of these ranks route a token.
    pub tokens: TokenPlacement,
    /// How the results of a token's experts are added.
    pub combine: ExpertCombine,
    /// Groups into which the tokens of a call are divided, each with slots of its own: the ranks that route divide the number.
    /// [`Mapping::token_groups`] gives the default.
    pub token_groups: Option<u32>,
    /// Slots that an expert gives to a group, as a multiple of the choices per expert; without it, every token of the
    /// group finds one.
    pub capacity_factor: Option<f64>,
    /// Bytes of the tokens of a group that may move to another expert where theirs is full.
    pub reroute_bytes: u64,
    /// The form in which tokens travel to their experts.
    pub wire: TokenWire,
    /// Whether the programs return counts of tokens per expert.
    pub statistics: bool,
    /// How many copies of hot experts there are, and where.
    pub copies: ExpertCopies,
    /// Penalties, biases and draws of routers, and the terms that they return.
    pub router: RouterMapping,
}

impl ExpertMapping {
    /// Reads the table.
    pub(super) fn read(table: &mut ConfigReader<'_>) -> ExpertMapping {
        let count = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
        let groups = table.read_count_or_zero("token_groups", 0);
        let factor = table.read_number("capacity_factor", Some(0.0));
        ExpertMapping {
            axis: table.read_named("axis", &ExpertAxis::ALL, ExpertAxis::name, Default::default()),
            tokens: table.read_named(
                "tokens",
                &TokenPlacement::ALL,
                TokenPlacement::name,
                Default::default(),
            ),
            combine: table.read_named(
                "combine",
                &ExpertCombine::ALL,
                ExpertCombine::name,
                Default::default(),
            ),
            token_groups: (groups > 0).then(|| count(groups)),
            capacity_factor: (factor != 0.0).then_some(factor),
            reroute_bytes: table.read_count_or_zero("reroute_bytes", 0),
            wire: table.read_named("wire", &TokenWire::ALL, TokenWire::name, Default::default()),
            statistics: table.read_flag("statistics", false),
            copies: ExpertCopies::read(table),
            router: RouterMapping::read(table),
        }
    }

    /// Returns the canonical text of the table with an empty line behind it, without keys at their defaults; the
    /// empty text if all are.
    pub(super) fn to_toml(&self) -> String {
        let mut keys = String::new();
        if self.axis != ExpertAxis::default() {
            keys += &format!("axis = \"{}\"\n", self.axis.name());
        }
        if self.tokens != TokenPlacement::default() {
            keys += &format!("tokens = \"{}\"\n", self.tokens.name());
        }
        if self.combine != ExpertCombine::default() {
            keys += &format!("combine = \"{}\"\n", self.combine.name());
        }
        if let Some(n) = self.token_groups {
            keys += &format!("token_groups = {n}\n");
        }
        if let Some(f) = self.capacity_factor {
            keys += &format!("capacity_factor = {f:?}\n");
        }
        if self.reroute_bytes > 0 {
            keys += &format!("reroute_bytes = {}\n", self.reroute_bytes);
        }
        if self.wire != TokenWire::default() {
            keys += &format!("wire = \"{}\"\n", self.wire.name());
        }
        if self.statistics {
            keys += "statistics = true\n";
        }
        let (copies, choices) = self.copies.to_toml();
        let (router, tables) = self.router.to_toml();
        keys += &(copies + &router);
        let tables = tables + &choices;
        if keys.is_empty() { tables } else { format!("[experts]\n{keys}\n{tables}") }
    }

    /// Returns whether the logical programs must state groups of tokens, capacities or counts.
    pub(crate) fn changes_programs(&self) -> bool {
        self.tokens == TokenPlacement::Sharded || self.capacity_factor.is_some() || self.statistics
    }
}

impl Mapping {
    /// Returns the number of ranks that have experts of their own.
    #[must_use]
    pub fn expert_ranks(&self) -> u32 {
        self.mesh.axis_size(self.experts.axis.mesh_axis())
    }

    /// Returns the number of token groups of a model with this many experts. By default it is the number of experts if
    /// a capacity is stated, so that no mesh changes which tokens are dropped. Without a capacity, no token is dropped,
    /// and there is a group per rank that routes tokens of its own.
    #[must_use]
    pub fn token_groups(&self, experts: u64) -> u64 {
        let routing_ranks = match self.experts.tokens {
            TokenPlacement::Replicated => 1,
            TokenPlacement::Sharded => self.expert_ranks(),
        };
        match (self.experts.token_groups, self.experts.capacity_factor) {
            (Some(n), _) => u64::from(n),
            (None, Some(_)) => experts.max(1),
            (None, None) => u64::from(routing_ranks),
        }
    }

    /// Checks that the keys of the table agree with one another and with the numerics.
    pub(super) fn check_expert_table(&self) -> Diagnostics {
        let e = &self.experts;
        let mut ds = Vec::new();
        let mut refuse = |message: String, hint: &str| {
            ds.push(Diagnostic::error(&T0611, message).with_label("mapping", "[experts]").with_hint(hint));
        };
        let ep = self.mesh.axis_size(Axis::Ep);
        if e.axis == ExpertAxis::Tp && ep > 1 {
            refuse(
                format!("experts.axis = \"tp\" with ep = {ep}: the ranks of tp alone divide the experts"),
                "use ep=1 and a larger tp, or leave out `axis`",
            );
        }
        if e.wire == TokenWire::Fp8 && self.token_numerics != TokenNumerics::Fp8E4m3 {
            refuse(
                "experts.wire = \"fp8\" rounds tokens, which numerics.tokens = \"f32\" does not allow"
                    .to_string(),
                "state numerics.tokens = \"fp8_e4m3\", or leave out `wire`",
            );
        }
        if e.wire == TokenWire::Fp8 && self.numerics == Numerics::MeshInvariant {
            refuse(
                "experts.wire = \"fp8\" under mesh-invariant numerics: one rank sends no tokens and rounds none"
                    .to_string(),
                "use numerics.policy = \"standard\", or leave out `wire`",
            );
        }
        if e.wire == TokenWire::Fp8 && e.tokens == TokenPlacement::Replicated {
            refuse(
                "experts.wire = \"fp8\" with replicated tokens, which do not travel".to_string(),
                "state tokens = \"sharded\", or leave out `wire`",
            );
        }
        if let Some(f) = e.capacity_factor.filter(|f| *f <= 0.0 || !f.is_finite()) {
            refuse(
                format!("experts.capacity_factor = {f} leaves no slots"),
                "use 1 for the average load of an expert, more for less dropped tokens, or leave it out to drop none",
            );
        }
        if e.reroute_bytes > 0 && e.capacity_factor.is_none() {
            refuse(
                format!(
                    "experts.reroute_bytes = {} without a capacity: every token finds a slot",
                    e.reroute_bytes
                ),
                "state `capacity_factor`, or leave out `reroute_bytes`",
            );
        }
        if e.router.reads_locality() && e.tokens == TokenPlacement::Replicated {
            let message = "a distance from a token to experts, but experts.tokens = \"replicated\" gives it no rank of its own";
            ds.push(
                Diagnostic::error(&T0612, message)
                    .with_label("mapping", "[experts]")
                    .with_hint("state tokens = \"sharded\""),
            );
        }
        ds
    }

    /// Checks that the mesh leaves every rank an expert, and, where ranks route tokens of their own, whole groups of tokens.
    pub(super) fn check_experts(&self, e: &ModelExtents) -> Option<Diagnostic> {
        let (axis, ranks) = (self.experts.axis.name(), u64::from(self.expert_ranks()));
        if e.experts == 0 {
            return None;
        }
        if self.experts.axis == ExpertAxis::Tp && self.strategy == Strategy::Ulysses {
            let message =
                "experts.axis = \"tp\" with strategy ulysses, under which every rank of tp holds all columns";
            return Some(
                Diagnostic::error(&T0611, message)
                    .with_label("mapping", "[experts]")
                    .with_hint("use strategy.tp = \"megatron\""),
            );
        }
        let fits = |n: &u64| *n <= e.experts;
        if !fits(&ranks) {
            let even: Vec<u64> = (1..=e.experts).filter(|n| e.experts.is_multiple_of(*n)).collect();
            return Some(
                Diagnostic::error(
                    &T0602,
                    format!("{axis} = {ranks} leaves a rank without one of {} experts", e.experts),
                )
                .with_label("mesh", self.mesh.to_string())
                .with_hint(format!(
                    "even shards: {axis} = {}; uneven shards up to {axis} = {}",
                    format_choices(&even),
                    e.experts
                )),
            );
        }
        let groups = self.token_groups(e.experts);
        if self.experts.tokens == TokenPlacement::Replicated || groups.is_multiple_of(ranks) {
            return None;
        }
        let legal: Vec<u64> = (1..=e.experts).filter(|n| groups.is_multiple_of(*n)).collect();
        Some(
            Diagnostic::error(&T0611, format!("{axis} = {ranks} does not divide {groups} token groups"))
                .with_label("mesh", self.mesh.to_string())
                .with_hint(format!(
                    "use {axis} = {}, or state experts.token_groups = {}",
                    format_choices(&legal),
                    groups * ranks / gcd(groups, ranks)
                )),
        )
    }
}

fn gcd(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mapping(text: &str) -> Mapping {
        Mapping::parse("m", text).unwrap_or_else(|ds| panic!("{text}: {ds:#?}"))
    }

    #[test]
    fn the_table_round_trips_and_is_absent_by_default() {
        assert!(!Mapping::default().to_toml().contains("experts"));
        let text = "[mesh]\ntp = 2\n[numerics]\ntokens = \"fp8_e4m3\"\n[experts]\naxis = \"tp\"\ntokens = \"sharded\"\n\
                    combine = \"reduced\"\ntoken_groups = 12\ncapacity_factor = 1.25\nreroute_bytes = 4096\n\
                    wire = \"fp8\"\nstatistics = true\n";
        let m = mapping(text);
        assert_eq!(m.experts.token_groups, Some(12));
        assert_eq!(mapping(&m.to_toml()), m, "{}", m.to_toml());
    }

    #[test]
    fn contradictions_are_rejected_with_the_key() {
        for (text, says) in [
            ("tokens = \"sharded\"\nwire = \"fp8\"\n", "numerics.tokens"),
            ("reroute_bytes = 8\n", "without a capacity"),
            ("capacity_factor = -1.0\n", "leaves no slots"),
            ("axis = \"tp\"\n[mesh]\nep = 2\n", "the ranks of tp alone"),
        ] {
            let ds = Mapping::parse("m", &format!("[experts]\n{text}")).unwrap_err();
            assert!(ds.iter().any(|d| d.code.id == "T0611" && d.message.contains(says)), "{text}: {ds:#?}");
        }
        let allowed = "[numerics]\ntokens = \"fp8_e4m3\"\n";
        for (numerics, experts, says) in [
            ("policy = \"mesh-invariant\"\n", "tokens = \"sharded\"\nwire = \"fp8\"\n", "mesh-invariant"),
            ("", "wire = \"fp8\"\n", "replicated tokens"),
        ] {
            let ds = Mapping::parse("m", &format!("{allowed}{numerics}[experts]\n{experts}")).unwrap_err();
            assert!(ds.iter().any(|d| d.code.id == "T0611" && d.message.contains(says)), "{says}: {ds:#?}");
        }
    }

    #[test]
    fn ep_fits_the_experts_and_the_token_groups() {
        let e = ModelExtents { heads: 4, hidden_size: 8, ffn_size: 8, tokens: 9, blocks: 2, experts: 6 };
        let codes = |text: &str| {
            let ds = mapping(text).check_fit(&e);
            ds.iter().map(|d| (d.code.id, d.hint.clone().unwrap_or_default())).collect::<Vec<_>>()
        };
        assert!(codes("[mesh]\nep = 4\n").is_empty(), "uneven experts are legal");
        let beyond = codes("[mesh]\nep = 7\n");
        assert_eq!(beyond[0].0, "T0602");
        assert!(beyond[0].1.contains("1, 2, 3 or 6") && beyond[0].1.contains("up to ep = 6"), "{beyond:?}");
        let over_tp = "[strategy]\ntp = \"megatron\"\n[experts]\naxis = \"tp\"\n";
        assert!(codes(&format!("[mesh]\ntp = 4\n{over_tp}")).is_empty());
        let beyond = codes(&format!("[mesh]\ntp = 8\n{over_tp}"));
        assert!(beyond[0].0 == "T0602" && beyond[0].1.contains("tp = 1, 2, 3 or 6"), "{beyond:?}");
        let ulysses = codes("[mesh]\ntp = 2\n[experts]\naxis = \"tp\"\n");
        assert_eq!(ulysses[0], ("T0611", "use strategy.tp = \"megatron\"".to_string()));
        let sharded = "[experts]\ntokens = \"sharded\"\n";
        assert!(codes(&format!("[mesh]\nep = 4\n{sharded}")).is_empty());
        let capacity = codes(&format!("[mesh]\nep = 4\n{sharded}capacity_factor = 1.0\n"));
        assert_eq!(capacity[0].0, "T0611");
        assert!(capacity[0].1.contains("token_groups = 12"), "{capacity:?}");
        assert!(
            codes(&format!("[mesh]\nep = 4\n{sharded}capacity_factor = 1.0\ntoken_groups = 12\n")).is_empty()
        );
    }
}
