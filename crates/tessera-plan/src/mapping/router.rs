//! The keys of `[experts]` that change what a router prefers: penalties by distance, biases of the user, the number of
//! experts of a token, and the seeds of what is drawn.

use tessera_base::config::{ConfigReader, quote_toml};
use tessera_base::{Diagnostic, Diagnostics, named_enum};

use super::Mapping;
use crate::codes::{T0612, T0613};

named_enum! {
    /// How a router chooses experts.
    #[derive(Default)]
    pub enum RouterGate {
        /// By the gate that the model's config states.
        #[default]
        Model = "model",
        /// The experts with the largest logits, from which `locality_weight` is subtracted for experts outside of the
        /// token's locality group. Their weights are the softmax of the logits without the penalty, divided by the sum
        /// over the chosen experts.
        LocalityPenalized = "topk_softmax_locality_penalized",
    }
}

named_enum! {
    /// What a regularizer of a router measures.
    #[derive(Default)]
    pub enum RegularizerKind {
        /// The mean distance from a token's rank to the ranks of its experts, by the softmax of its logits: 0 on its
        /// own rank, 1 in its locality group, 2 in another.
        #[default]
        TopologyDistance = "topology_distance",
    }
}

/// A term of a training loss that programs return beside their results.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RouterRegularizer {
    /// The quantity that the term measures.
    pub kind: RegularizerKind,
    /// Factor of the term, above 0.
    pub weight: f64,
    /// Whether programs also return its gradient with respect to the logits.
    pub gradient: bool,
}

/// The seeds of what routers draw, each below 2^32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct RouterSeeds {
    /// Seed of every draw.
    pub global: u64,
    /// Seed of draws that may differ between the ranks of tp. No draw of a router may: ranks of tp hold the same tokens.
    pub tp: u64,
    /// Seed of draws that decide which ranks of ep a token reaches.
    pub ep: u64,
}

/// What a mapping states of routers.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct RouterMapping {
    /// How a router chooses experts.
    pub gate: RouterGate,
    /// What the gate subtracts from logits of experts outside of the token's locality group.
    pub locality_weight: f64,
    /// Consecutive ranks that form a locality group; without it, the ranks of a host by the names of the devices.
    pub locality_ranks: Option<u32>,
    /// What is added to the logits of each expert; empty for nothing.
    pub bias: Vec<f64>,
    /// File with the biases, which the application reads into `bias`.
    pub bias_file: Option<String>,
    /// What is subtracted from all logits of experts outside of the token's locality group, whatever the gate.
    pub bias_locality: f64,
    /// A term of a training loss.
    pub regularizer: Option<RouterRegularizer>,
    /// Experts of a token in place of the model's number. Of a fraction, each token gets the next lower or higher
    /// number, by a draw.
    pub top_k: Option<f64>,
    /// Seeds of the draws.
    pub seeds: RouterSeeds,
}

impl RouterMapping {
    /// Reads the keys from the table `[experts]`.
    pub(super) fn read(table: &mut ConfigReader<'_>) -> RouterMapping {
        let ranks = table.read_count_or_zero("locality_ranks", 0);
        let file = table.read_text("bias_file", Some(""));
        let top_k = table.read_number("top_k", Some(0.0));
        let mut out = RouterMapping {
            gate: table.read_named("gate", &RouterGate::ALL, RouterGate::name, RouterGate::default()),
            locality_weight: table.read_number("locality_weight", Some(0.0)),
            locality_ranks: (ranks > 0).then(|| u32::try_from(ranks).unwrap_or(u32::MAX)),
            bias: table.read_numbers("bias", &[]),
            bias_file: (!file.is_empty()).then_some(file),
            bias_locality: table.read_number("bias_locality", Some(0.0)),
            top_k: (top_k != 0.0).then_some(top_k),
            ..RouterMapping::default()
        };
        let mut seeds = table.read_table("seeds");
        let [global, tp, ep] = ["global", "tp", "ep"].map(|key| seeds.read_count_or_zero(key, 0));
        out.seeds = RouterSeeds { global, tp, ep };
        table.diagnostics.extend(seeds.finish());
        if let Some(mut term) = table.read_optional_table("regularizer") {
            let kinds = &RegularizerKind::ALL;
            let kind = term.read_named("kind", kinds, RegularizerKind::name, RegularizerKind::default());
            let weight = term.read_number("weight", None);
            let gradient = term.read_flag("gradient", false);
            // A weight of 0 is no term; a negative one stays and is refused.
            out.regularizer = (weight != 0.0).then_some(RouterRegularizer { kind, weight, gradient });
            table.diagnostics.extend(term.finish());
        }
        out
    }

    /// Returns the canonical text of the keys, and of the tables below `[experts]`, without those at their defaults.
    pub(super) fn to_toml(&self) -> (String, String) {
        let (mut keys, mut tables) = (String::new(), String::new());
        if self.gate != RouterGate::default() {
            keys += &format!("gate = \"{}\"\n", self.gate.name());
        }
        let mut number = |key: &str, x: f64| {
            if x != 0.0 {
                keys += &format!("{key} = {x:?}\n");
            }
        };
        number("locality_weight", self.locality_weight);
        number("bias_locality", self.bias_locality);
        number("top_k", self.top_k.unwrap_or(0.0));
        if let Some(n) = self.locality_ranks {
            keys += &format!("locality_ranks = {n}\n");
        }
        if !self.bias.is_empty() {
            keys += &format!("bias = {:?}\n", self.bias);
        }
        if let Some(file) = &self.bias_file {
            keys += &format!("bias_file = {}\n", quote_toml(file));
        }
        if self.seeds != RouterSeeds::default() {
            let RouterSeeds { global, tp, ep } = self.seeds;
            tables += &format!("[experts.seeds]\nglobal = {global}\ntp = {tp}\nep = {ep}\n\n");
        }
        if let Some(RouterRegularizer { kind, weight, gradient }) = self.regularizer {
            let gradient = if gradient { "gradient = true\n" } else { "" };
            tables += &format!(
                "[experts.regularizer]\nkind = \"{}\"\nweight = {weight:?}\n{gradient}\n",
                kind.name()
            );
        }
        (keys, tables)
    }

    /// Returns whether logical programs must be changed.
    pub(crate) fn changes_programs(&self) -> bool {
        self.gate != RouterGate::Model
            || !self.bias.is_empty()
            || self.bias_file.is_some()
            || self.bias_locality != 0.0
            || self.regularizer.is_some()
            || self.top_k.is_some()
    }

    /// Returns whether programs read the locality groups of tokens.
    pub(crate) fn reads_locality(&self) -> bool {
        self.locality_weight != 0.0 || self.bias_locality != 0.0 || self.regularizer.is_some()
    }
}

impl Mapping {
    /// Checks that the keys about routers agree with one another.
    pub(super) fn check_router(&self) -> Diagnostics {
        let r = &self.experts.router;
        let mut ds = Vec::new();
        let mut refuse = |message: String, hint: &str| {
            ds.push(Diagnostic::error(&T0612, message).with_label("mapping", "[experts]").with_hint(hint));
        };
        let weights = [
            ("locality_weight", r.locality_weight),
            ("bias_locality", r.bias_locality),
            ("regularizer.weight", r.regularizer.map_or(0.0, |term| term.weight)),
        ];
        for (key, weight) in weights.into_iter().filter(|(_, weight)| *weight < 0.0) {
            refuse(format!("experts.{key} = {weight} prefers distant experts"), "use a number from 0");
        }
        if r.locality_weight != 0.0 && r.gate == RouterGate::Model {
            refuse(
                format!("experts.locality_weight = {} without a gate that reads it", r.locality_weight),
                "state gate = \"topk_softmax_locality_penalized\", or leave out `locality_weight`",
            );
        }
        if r.bias_file.is_some() && !r.bias.is_empty() {
            refuse("experts.bias beside experts.bias_file".to_string(), "keep one of them");
        }
        if let Some(k) = r.top_k.filter(|k| *k < 1.0) {
            refuse(format!("experts.top_k = {k} leaves some tokens without experts"), "use a number from 1");
        }
        if r.top_k.is_some_and(|k| k.fract() != 0.0) && self.experts.reroute_bytes > 0 {
            refuse(
                "experts.reroute_bytes with a fraction of an expert: both decide which choices remain"
                    .to_string(),
                "leave out `reroute_bytes`, or use a whole `top_k`",
            );
        }
        ds
    }

    /// Returns a warning (T0613) if several mechanisms make distant experts less likely, with the bias that results.
    #[must_use]
    pub fn find_stacked_biases(&self) -> Option<Diagnostic> {
        let r = &self.experts.router;
        let term = r.regularizer.map_or(0.0, |term| term.weight);
        let stated = [
            ("gate", "locality_weight", r.locality_weight),
            ("logits", "bias_locality", r.bias_locality),
            ("loss", "regularizer.weight", term),
        ];
        let active: Vec<String> = stated
            .iter()
            .filter(|(.., weight)| *weight > 0.0)
            .map(|(place, key, weight)| format!("{weight} in the {place} (experts.{key})"))
            .collect();
        if active.len() < 2 {
            return None;
        }
        let sum = r.locality_weight + r.bias_locality;
        let own = match r.bias.is_empty() {
            true => String::new(),
            false => format!(", beside experts.bias = {:?}", r.bias),
        };
        Some(
            Diagnostic::warning(&T0613, format!("distance counts more than once: {}", active.join(", ")))
                .with_label(
                    "effective bias",
                    format!("-{sum} on the logit of an expert in another locality group{own}"),
                )
                .with_hint("keep one of them, or choose their sum on purpose"),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(experts: &str) -> Result<Mapping, Diagnostics> {
        Mapping::parse("m", &format!("[mesh]\nep = 2\n[experts]\n{experts}\n"))
    }

    #[test]
    fn the_keys_round_trip() {
        let m = parse(
            "tokens = \"sharded\"\ngate = \"topk_softmax_locality_penalized\"\nlocality_weight = 0.5\nbias_locality = 0.05\n\
             top_k = 1.5\nlocality_ranks = 1\nbias = [0.5, -1.0]\nseeds = { global = 1, tp = 2, ep = 3 }\n\
             regularizer = { kind = \"topology_distance\", weight = 0.05, gradient = true }",
        )
        .unwrap();
        assert_eq!(m.experts.router.seeds, RouterSeeds { global: 1, tp: 2, ep: 3 });
        assert_eq!(Mapping::parse("m", &m.to_toml()).unwrap(), m, "{}", m.to_toml());
        let file = parse("bias_file = \"a \\\"b\\\".json\"").unwrap();
        assert_eq!(Mapping::parse("m", &file.to_toml()).unwrap(), file);
    }

    #[test]
    fn a_weight_of_zero_removes_the_regularizer_and_unknown_names_are_refused() {
        let m = parse("regularizer = { kind = \"topology_distance\", weight = 0 }").unwrap();
        assert_eq!(m.experts.router.regularizer, None);
        for (text, code, says) in [
            ("regularizer = { kind = \"hops\", weight = 0.05 }", "T0004", "topology_distance"),
            ("regularizer = { kind = \"topology_distance\" }", "T0003", "experts.regularizer.weight"),
            ("gate = \"top2\"", "T0004", "topk_softmax_locality_penalized"),
            ("seeds = { dp = 1 }", "T0002", "experts.seeds.dp"),
            ("locality_weight = 0.5", "T0612", "without a gate"),
            ("tokens = \"sharded\"\nbias_locality = -0.5", "T0612", "prefers distant experts"),
            ("bias_locality = 0.5", "T0612", "no rank of its own"),
            ("bias = [0.5]\nbias_file = \"b\"", "T0612", "beside"),
            ("top_k = 0.5", "T0612", "without experts"),
            ("top_k = 1.5\ncapacity_factor = 1.0\nreroute_bytes = 8", "T0612", "fraction of an expert"),
        ] {
            let ds = parse(text).unwrap_err();
            assert!(ds.iter().any(|d| d.code.id == code && d.message.contains(says)), "{text}: {ds:#?}");
        }
    }

    #[test]
    fn two_mechanisms_give_a_warning_with_their_sum_and_one_gives_none() {
        let gate =
            "tokens = \"sharded\"\ngate = \"topk_softmax_locality_penalized\"\nlocality_weight = 0.5\n";
        assert_eq!(parse(gate).unwrap().find_stacked_biases(), None);
        let d = parse(&format!("{gate}bias_locality = 0.25")).unwrap().find_stacked_biases().unwrap();
        assert!(!d.is_error() && d.code.id == "T0613");
        assert!(format!("{d:?}").contains("-0.75 on the logit"), "{d:?}");
        let term = "regularizer = { kind = \"topology_distance\", weight = 0.05 }";
        assert!(parse(&format!("{gate}{term}")).unwrap().find_stacked_biases().is_some());
    }
}
