//! What the routers of a run chose: the counts of every step in a file, and their sums beside what chance would give.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_cost::moe::{CountedLoad, CountedPlace};
use tessera_models::ExpertLayers;
use tessera_plan::search::gates::{ExpertGateInputs, balance_gate};
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::{EXPERT_STATISTICS, ExpertChoices, ExpertMap};
use tessera_report::expert_load::ExpertLoadRow;
use tessera_runtime::wire::{Tensor, Tensors};

use super::LanguagePlan;
use crate::codes::T0087;
use crate::files::{lost_output, write_error};

/// File of a run directory with the choices of every router in every step, one JSON object per line.
pub const EXPERTS_FILE: &str = "experts.jsonl";

/// The counts of one step: a part of a prompt, or one id of every text.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
struct StepCounts {
    /// Index of the call.
    call: u32,
    /// Index of the step in its call.
    step: usize,
    /// Layers with experts, by their number.
    layers: BTreeMap<u64, LayerCounts>,
}

/// The counts of a layer, by place of an expert.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct LayerCounts {
    /// The expert in each place; absent where every expert has one place, in their order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    residents: Vec<u64>,
    /// Tokens that chose the expert in this place, before capacities.
    chosen: Vec<u64>,
    /// Of these, those that have a slot of it.
    kept: Vec<u64>,
    /// Tokens that moved to it because their choice was full.
    moved: Vec<u64>,
    /// Tokens that chose it and have no slot of any expert in its place.
    dropped: Vec<u64>,
}

/// Writes the counts of a run as its calls end.
pub(super) struct ExpertCountLog {
    path: PathBuf,
    file: BufWriter<File>,
    /// Places of the experts of a layer.
    places: usize,
    /// The expert in each place, by layer; empty where every expert has one place.
    residents: BTreeMap<u64, Vec<u64>>,
}

impl ExpertCountLog {
    /// Creates the file of a run whose plan returns counts; `None` for any other plan.
    ///
    /// # Errors
    /// T0014 if the file cannot be created.
    pub(super) fn create(plan: &LanguagePlan, out: &Path) -> Result<Option<ExpertCountLog>, Diagnostic> {
        let Some(layers) = counted_layers(plan) else { return Ok(None) };
        let path = out.join(EXPERTS_FILE);
        let file = File::create(&path).map_err(|e| write_error(&path, &e))?;
        let mapping = &plan.mapping;
        let of_layer = |layer| Some((layer, mapping.list_residents(layer, layers.count)?));
        Ok(Some(ExpertCountLog {
            path,
            file: BufWriter::new(file),
            places: mapping.expert_places(layers.count) as usize,
            residents: (0..plan.model.extents.layers).filter_map(of_layer).collect(),
        }))
    }

    /// Adds the counts of a call.
    ///
    /// # Errors
    /// T0014 if the file cannot be written, T0087 for an output that holds no counts.
    pub(super) fn write_call(&mut self, call: u32, outputs: &Tensors) -> Result<(), Diagnostic> {
        let mut steps: Vec<BTreeMap<u64, LayerCounts>> = Vec::new();
        for output in &outputs.0 {
            let Some(layer) = output.name().strip_prefix(EXPERT_STATISTICS) else { continue };
            let counts = layer.parse().ok().zip(split_steps(output, self.places));
            let (layer, counts) = counts.ok_or_else(|| {
                Diagnostic::error(&T0087, format!("`{}` holds no counts of experts", output.name()))
            })?;
            steps.resize(steps.len().max(counts.len()), BTreeMap::new());
            let residents = self.residents.get(&layer).cloned().unwrap_or_default();
            for (step, counts) in steps.iter_mut().zip(counts) {
                step.insert(layer, LayerCounts { residents: residents.clone(), ..counts });
            }
        }
        for (step, layers) in steps.into_iter().enumerate() {
            // Plain structs of numbers always serialise.
            let line = serde_json::to_string(&StepCounts { call, step, layers }).unwrap_or_default();
            writeln!(self.file, "{line}").map_err(|e| write_error(&self.path, &e))?;
        }
        self.file.flush().map_err(|e| write_error(&self.path, &e))
    }
}

/// Splits an output [steps · places, 4] into the counts of each step.
fn split_steps(output: &Tensor, places: usize) -> Option<Vec<LayerCounts>> {
    let values = output.to_f32().filter(|v| !v.is_empty() && v.len() % (4 * places) == 0)?;
    let columns = |step: &[f32]| {
        let column = |at: usize| step.chunks(4).map(|row| row[at] as u64).collect::<Vec<_>>();
        LayerCounts {
            residents: Vec::new(),
            chosen: column(0),
            kept: column(1),
            moved: column(2),
            dropped: column(3),
        }
    };
    Some(values.chunks(4 * places).map(columns).collect())
}

/// Returns the layers with experts of a plan that counts their choices; `None` for any other plan.
fn counted_layers(plan: &LanguagePlan) -> Option<&ExpertLayers> {
    plan.model.experts.as_ref().filter(|_| plan.mapping.experts.statistics)
}

/// Reads the counts of a run and returns the load of each layer with experts over all steps, in order of layers;
/// nothing for a plan that returns no counts.
///
/// # Errors
/// T0765 if the file cannot be read, or is not what [`EXPERTS_FILE`] holds.
pub fn read_expert_load(plan: &LanguagePlan, out: &Path) -> Result<Vec<ExpertLoadRow>, Diagnostic> {
    let Some(layers) = counted_layers(plan) else { return Ok(Vec::new()) };
    let path = out.join(EXPERTS_FILE);
    let (sums, steps) = sum_steps(&path).map_err(|why| lost_output(&path, &why))?;
    let top_k = plan.mapping.experts.router.top_k.unwrap_or(layers.top_k as f64);
    let ranks = plan.mapping.expert_ranks();
    let place_ranks = ExpertMap::ranks_of_experts(ranks, plan.mapping.expert_places(layers.count));
    let limits = Thresholds::default();
    let to_row = |(layer, counts): (&u64, &LayerCounts)| {
        counts.to_row((*layer, steps), (top_k, ranks), &place_ranks, &limits)
    };
    Ok(sums.iter().map(to_row).collect())
}

/// Reads how often each expert of each layer was chosen in a run, from the file that the run left.
///
/// # Errors
/// Why the file cannot be read, or is not what [`EXPERTS_FILE`] holds.
pub fn read_expert_choices(file: &Path) -> Result<ExpertChoices, String> {
    let (sums, _) = sum_steps(file)?;
    if sums.is_empty() {
        return Err("it has no counts".to_string());
    }
    Ok(sums.iter().map(|(layer, counts)| (*layer, counts.chosen_by_expert())).collect())
}

/// Returns the counts of each layer over all steps of a file, and the number of steps.
fn sum_steps(file: &Path) -> Result<(BTreeMap<u64, LayerCounts>, u64), String> {
    let lines = BufReader::new(File::open(file).map_err(|e| e.to_string())?).lines();
    let mut sums: BTreeMap<u64, LayerCounts> = BTreeMap::new();
    let mut steps = 0;
    for line in lines {
        let line = line.map_err(|e| e.to_string())?;
        steps += 1;
        let refuse = |why: &str| format!("line {steps} is no step: {why}");
        let counts: StepCounts = serde_json::from_str(&line).map_err(|e| refuse(&e.to_string()))?;
        for (layer, counts) in counts.layers {
            let sum = sums.entry(layer).or_insert_with(|| LayerCounts {
                residents: counts.residents.clone(),
                ..LayerCounts::default()
            });
            counts.check_places().map_err(&refuse)?;
            if sum.residents != counts.residents {
                return Err(refuse("its experts lie in other places than those of the line before"));
            }
            sum.add_counts(&counts);
        }
    }
    Ok((sums, steps))
}

impl LayerCounts {
    /// Checks that every place has each count, and an expert with a place.
    ///
    /// # Errors
    /// What does not fit.
    fn check_places(&self) -> Result<(), &'static str> {
        let places = self.chosen.len();
        if [&self.kept, &self.moved, &self.dropped].iter().any(|counts| counts.len() != places) {
            return Err("its counts have different lengths");
        }
        // Every expert has a place, so none has a number from that of places on.
        let has_place = |e: &u64| *e < places as u64;
        match self.residents.is_empty()
            || (self.residents.len() == places && self.residents.iter().all(has_place))
        {
            true => Ok(()),
            false => Err("`residents` does not name an expert for each count"),
        }
    }

    /// Returns the choices of each expert, over all of its places.
    fn chosen_by_expert(&self) -> Vec<f64> {
        if self.residents.is_empty() {
            return self.chosen.iter().map(|n| *n as f64).collect();
        }
        let experts = self.residents.iter().max().map_or(0, |last| *last as usize + 1);
        let mut chosen = vec![0.0; experts];
        for (expert, n) in self.residents.iter().zip(&self.chosen) {
            chosen[*expert as usize] += *n as f64;
        }
        chosen
    }

    /// Returns the rank of each place, and its share of an expert.
    fn counted_places(&self, ranks: &[u64]) -> Vec<CountedPlace> {
        let share = |place: usize| {
            let copies = self.residents.iter().filter(|e| Some(*e) == self.residents.get(place)).count();
            1.0 / copies.max(1) as f64
        };
        ranks
            .iter()
            .enumerate()
            .map(|(place, rank)| CountedPlace { rank: *rank, share: share(place) })
            .collect()
    }

    fn add_counts(&mut self, other: &LayerCounts) {
        let columns = [
            (&mut self.chosen, &other.chosen),
            (&mut self.kept, &other.kept),
            (&mut self.moved, &other.moved),
            (&mut self.dropped, &other.dropped),
        ];
        for (to, from) in columns {
            to.resize(to.len().max(from.len()), 0);
            to.iter_mut().zip(from).for_each(|(to, from)| *to = to.saturating_add(*from));
        }
    }

    /// Returns the load of a layer over some steps; `place_ranks` is the rank of each place.
    fn to_row(
        &self,
        (layer, steps): (u64, u64),
        (top_k, ep): (f64, u32),
        place_ranks: &[u64],
        limits: &Thresholds,
    ) -> ExpertLoadRow {
        let computed = self.kept.iter().zip(&self.moved).map(|(kept, moved)| (kept + moved) as f64);
        let load = CountedLoad { chosen: self.chosen_by_expert(), computed: computed.collect(), top_k };
        let [chosen, moved, dropped] =
            [&self.chosen, &self.moved, &self.dropped].map(|counts| counts.iter().sum::<u64>());
        let places = self.counted_places(place_ranks);
        let (experts, ranks) = (load.expert_spread(), load.rank_spread(&places));
        let busiest_over_mean = load.busiest_over_mean(&places);
        let gate = balance_gate(
            Some(&ExpertGateInputs {
                experts: load.chosen.len() as u64,
                top_k: 1,
                ep,
                // The gate counts choices, as many as tokens times the experts of each.
                tokens: chosen as f64,
                std_over_mean: experts.std_over_mean,
                rank_std_over_mean: ranks.std_over_mean,
                slowest_over_mean: busiest_over_mean,
                ..ExpertGateInputs::default()
            }),
            limits,
        );
        ExpertLoadRow {
            layer,
            steps,
            chosen,
            moved,
            dropped,
            expert_std_over_mean: experts.std_over_mean,
            expert_chance: experts.by_chance,
            rank_std_over_mean: ranks.std_over_mean,
            rank_chance: ranks.by_chance,
            busiest_over_mean,
            balance: gate.status,
            limit: gate.threshold,
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use tessera_base::GateStatus;

    use super::*;

    /// Creates the counts of a layer that keeps every choice.
    fn keep_all(chosen: &[u64]) -> LayerCounts {
        let none = vec![0; chosen.len()];
        LayerCounts {
            residents: Vec::new(),
            chosen: chosen.to_vec(),
            kept: chosen.to_vec(),
            moved: none.clone(),
            dropped: none,
        }
    }

    /// Returns the load of a layer of four experts on two ranks.
    fn evaluate(layer: &LayerCounts, steps: u64, top_k: f64) -> ExpertLoadRow {
        layer.to_row((3, steps), (top_k, 2), &[0, 0, 1, 1], &Thresholds::default())
    }

    #[test]
    fn an_output_of_several_steps_is_split_and_one_of_another_size_is_refused() {
        let values: Vec<f32> = (0..16).map(|i| i as f32).collect();
        let output = Tensor::from_f32("experts.1", &[4, 4], &values).unwrap();
        let steps = split_steps(&output, 2).unwrap();
        assert_eq!(steps.len(), 2);
        assert_eq!((&steps[1].chosen[..], &steps[1].dropped[..]), (&[8, 12][..], &[11, 15][..]));
        assert_eq!(split_steps(&output, 3), None);
    }

    #[test]
    fn the_balance_gate_fails_for_skewed_choices_and_does_not_apply_to_few() {
        let row = |chosen: &[u64]| evaluate(&keep_all(chosen), 7, 2.0);
        let balanced = row(&[1000, 1040, 980, 990]);
        assert_eq!((balanced.balance, balanced.steps, balanced.chosen), (GateStatus::Pass, 7, 4010));
        let skewed = row(&[3000, 340, 380, 290]);
        assert_eq!(skewed.balance, GateStatus::Fail);
        assert!(skewed.expert_std_over_mean > 1.0 && skewed.expert_chance < 0.03, "{skewed:?}");
        assert!((skewed.busiest_over_mean - 3340.0 / 2005.0).abs() < 1e-12, "{skewed:?}");
        assert_eq!(row(&[30, 3, 4, 3]).balance, GateStatus::NotApplicable);
    }

    #[test]
    fn places_of_one_expert_are_added_for_its_choices_and_kept_apart_for_ranks() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join(EXPERTS_FILE);
        let layer = LayerCounts { residents: vec![1, 0, 1, 2], ..keep_all(&[10, 4, 12, 6]) };
        let step = StepCounts { call: 0, step: 0, layers: BTreeMap::from([(3, layer.clone())]) };
        let line = serde_json::to_string(&step).unwrap();
        std::fs::write(&file, format!("{line}\n{line}\n")).unwrap();
        assert_eq!(read_expert_choices(&file), Ok(BTreeMap::from([(3, vec![8.0, 44.0, 12.0])])));
        let row = evaluate(&layer, 1, 1.0);
        assert!((row.busiest_over_mean - 18.0 / 16.0).abs() < 1e-12, "{row:?}");
        let residents = |list: &str| line.replace("[1,0,1,2]", list);
        for (second, says) in [
            ("{}".to_string(), "line 2 is no step"),
            (residents("[1,0,2,1]"), "other places"),
            (residents("[1,0,1]"), "an expert for each count"),
            (residents("[1,0,1,18446744073709551615]"), "an expert for each count"),
            (line.replace("\"moved\":[0,0,0,0]", "\"moved\":[0]"), "different lengths"),
        ] {
            std::fs::write(&file, format!("{line}\n{second}\n")).unwrap();
            let why = read_expert_choices(&file).unwrap_err();
            assert!(why.contains("line 2") && why.contains(says), "{second}: {why}");
        }
    }

    #[test]
    fn ranks_are_compared_by_what_is_left_after_capacities() {
        let layer = LayerCounts {
            kept: vec![500, 200, 100, 100],
            moved: vec![0, 0, 60, 40],
            dropped: vec![200, 0, 0, 0],
            ..keep_all(&[800, 200, 100, 100])
        };
        let row = evaluate(&layer, 1, 1.0);
        assert_eq!((row.chosen, row.moved, row.dropped), (1200, 100, 200));
        assert!((row.busiest_over_mean - 1.4).abs() < 1e-12, "{row:?}");
    }
}
