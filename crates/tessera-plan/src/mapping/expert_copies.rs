//! The keys of `[experts]` about copies of experts: how many there are, and how often routers chose each expert.

use std::collections::BTreeMap;

use tessera_base::config::{ConfigReader, quote_toml};
use tessera_base::{Diagnostic, Diagnostics};
use tessera_cost::moe::rebalance_experts;

use super::Mapping;
use crate::codes::T0611;

/// How often each expert of a layer was chosen, by the number of the layer.
pub type ExpertChoices = BTreeMap<u64, Vec<f64>>;

/// Copies of experts, and the choices that decide which experts have some and on which rank every one is.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct ExpertCopies {
    /// Copies beyond the first of each expert, in every layer.
    pub replicas: u64,
    /// How often routers chose each expert. A layer without numbers counts as balanced. Without any,
    /// experts have one place each, in their order.
    pub choices: ExpertChoices,
    /// File with the choices of a run, which the application reads into `choices`.
    pub choices_file: Option<String>,
}

impl ExpertCopies {
    /// Reads the keys from the table `[experts]`.
    pub(super) fn read(table: &mut ConfigReader<'_>) -> ExpertCopies {
        let file = table.read_text("choices_file", Some(""));
        let mut out = ExpertCopies {
            replicas: table.read_count_or_zero("replicas", 0),
            choices_file: (!file.is_empty()).then_some(file),
            ..ExpertCopies::default()
        };
        for (_, mut layer) in table.read_tables("choices") {
            // No model has so many layers.
            let number = layer.read_count_or_zero("layer", u64::MAX);
            let experts = layer.read_numbers("experts", &[]);
            table.diagnostics.extend(layer.finish());
            if number == u64::MAX {
                table.diagnostics.push(refuse_table(
                    "experts.choices name no layer".to_string(),
                    "state `layer`, from 0, beside `experts`",
                ));
            } else if out.choices.insert(number, experts).is_some() {
                table.diagnostics.push(refuse_table(
                    format!("experts.choices count layer {number} twice"),
                    "state each layer once",
                ));
            }
        }
        out
    }

    /// Returns the canonical text of the keys, and of the tables below `[experts]`.
    pub(super) fn to_toml(&self) -> (String, String) {
        let mut keys = String::new();
        if self.replicas > 0 {
            keys += &format!("replicas = {}\n", self.replicas);
        }
        if let Some(file) = &self.choices_file {
            keys += &format!("choices_file = {}\n", quote_toml(file));
        }
        let layer = |(number, experts): (&u64, &Vec<f64>)| {
            format!("[[experts.choices]]\nlayer = {number}\nexperts = {experts:?}\n\n")
        };
        (keys, self.choices.iter().map(layer).collect())
    }

    /// Returns whether logical programs must be changed.
    pub(crate) fn changes_programs(&self) -> bool {
        !self.choices.is_empty() || self.choices_file.is_some()
    }
}

impl Mapping {
    /// Returns the number of places of a layer with this many experts: one for each copy.
    #[must_use]
    pub fn expert_places(&self, experts: u64) -> u64 {
        match self.experts.copies.choices.is_empty() {
            true => experts,
            false => experts + self.experts.copies.replicas,
        }
    }

    /// Returns the expert in each place of a layer; `None` if each has one place, in their order. The ranks have
    /// consecutive places, the first ones one more.
    #[must_use]
    pub fn list_residents(&self, layer: u64, experts: u64) -> Option<Vec<u64>> {
        let copies = &self.experts.copies;
        if copies.choices.is_empty() {
            return None;
        }
        let chosen = copies.choices.get(&layer).filter(|chosen| chosen.iter().sum::<f64>() > 0.0);
        let balanced = vec![1.0; experts as usize];
        let places = self.expert_places(experts) as usize;
        let placed = rebalance_experts(chosen.unwrap_or(&balanced), places, self.expert_ranks() as usize, 1);
        let mut ranks = placed.ranks;
        // All ranks are alike, so those with a place more can be the first ones, as the layout of shards wants it.
        ranks.sort_by_key(|own| std::cmp::Reverse(own.len()));
        ranks.iter_mut().for_each(|own| own.sort_unstable());
        Some(ranks.into_iter().flatten().map(|e| e as u64).collect())
    }

    /// Checks that the keys about copies agree with the rest of the table.
    pub(super) fn check_expert_copies(&self) -> Diagnostics {
        let (e, copies) = (&self.experts, &self.experts.copies);
        let mut ds = Vec::new();
        let mut refuse = |message: String, hint: &str| {
            ds.push(refuse_table(message, hint));
        };
        if copies.replicas > 0 && !copies.changes_programs() {
            refuse(
                format!(
                    "experts.replicas = {} without the choices that say which experts are hot",
                    copies.replicas
                ),
                "run once with statistics = true, and name its experts.jsonl as `choices_file`",
            );
        }
        if copies.choices_file.is_some() && !copies.choices.is_empty() {
            refuse(
                "the mapping states both experts.choices and experts.choices_file".to_string(),
                "keep one of them",
            );
        }
        if let Some((layer, n)) = copies
            .choices
            .iter()
            .find_map(|(l, x)| Some((l, x.iter().find(|n| !n.is_finite() || **n < 0.0)?)))
        {
            refuse(
                format!("experts.choices of layer {layer} count {n} choices of an expert"),
                "use numbers from 0",
            );
        }
        if copies.changes_programs() && e.reroute_bytes > 0 {
            refuse(
                format!("experts.reroute_bytes = {} with places of experts by choices", e.reroute_bytes),
                "leave out `reroute_bytes`: rerouting knows the slots of an expert and not those of its copies",
            );
        }
        if copies.changes_programs() && e.router.reads_locality() {
            refuse(
                "the router measures distances, but an expert with copies has no single place".to_string(),
                "leave out `choices` and `choices_file`, or the keys of locality",
            );
        }
        ds
    }
}

fn refuse_table(message: String, hint: &str) -> Diagnostic {
    Diagnostic::error(&T0611, message).with_label("mapping", "[experts]").with_hint(hint)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Mapping, Diagnostics> {
        Mapping::parse("m", text)
    }

    const HOT: &str = "[[experts.choices]]\nlayer = 2\nexperts = [12, 7, 5, 2]\n";

    #[test]
    fn the_keys_round_trip() {
        let m = parse(&format!("[mesh]\nep = 2\n[experts]\nreplicas = 2\n{HOT}")).unwrap();
        assert_eq!(m.experts.copies.choices[&2], [12.0, 7.0, 5.0, 2.0]);
        assert_eq!(parse(&m.to_toml()).unwrap(), m, "{}", m.to_toml());
        let file = parse("[experts]\nchoices_file = \"a.jsonl\"\n").unwrap();
        assert_eq!(parse(&file.to_toml()).unwrap(), file);
    }

    #[test]
    fn hot_experts_have_copies_and_ranks_have_even_loads() {
        let m = parse(&format!("[mesh]\nep = 2\n[experts]\nreplicas = 2\n{HOT}")).unwrap();
        // The packing by hand stands at the balancer's own test: 6 + 5 + 2 on one rank, 6 + 3.5 + 3.5 on the other.
        assert_eq!(m.list_residents(2, 4), Some(vec![0, 2, 3, 0, 1, 1]));
        assert_eq!(m.expert_places(4), 6);
        // Choices of one layer say nothing of another one, which counts as balanced.
        assert_eq!(m.list_residents(0, 4), Some(vec![0, 1, 2, 0, 1, 3]));
        // With an uneven number of places, the first rank has one more.
        let odd = parse(&format!("[mesh]\nep = 2\n[experts]\nreplicas = 1\n{HOT}")).unwrap();
        assert_eq!(odd.list_residents(2, 4), Some(vec![1, 2, 3, 0, 0]));
        let plain = parse("[mesh]\nep = 2\n").unwrap();
        assert_eq!((plain.list_residents(2, 4), plain.expert_places(4)), (None, 4));
    }

    #[test]
    fn contradictions_are_rejected_with_the_key() {
        for (text, says) in [
            ("replicas = 2\n".to_string(), "which experts are hot"),
            (format!("choices_file = \"x\"\n{HOT}"), "both"),
            (format!("{HOT}{HOT}"), "layer 2 twice"),
            ("[[experts.choices]]\nexperts = [1, 2]\n".to_string(), "name no layer"),
            (format!("capacity_factor = 1.0\nreroute_bytes = 8\n{HOT}"), "reroute_bytes"),
            (format!("tokens = \"sharded\"\nbias_locality = 0.5\n{HOT}"), "no single place"),
            ("[[experts.choices]]\nlayer = 0\nexperts = [1, -2]\n".to_string(), "count -2"),
        ] {
            let ds = parse(&format!("[mesh]\nep = 2\n[experts]\n{text}")).unwrap_err();
            assert!(ds.iter().any(|d| d.code.id == "T0611" && d.message.contains(says)), "{text}: {ds:#?}");
        }
    }
}
