//! What the routers of a run chose: the counts of every step in a file, and their sums beside what chance would give.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use tessera_base::Diagnostic;
use tessera_cost::moe::CountedLoad;
use tessera_models::ExpertLayers;
use tessera_plan::search::gates::{ExpertGateInputs, balance_gate};
use tessera_plan::search::thresholds::Thresholds;
use tessera_plan::{EXPERT_STATISTICS, ExpertMap};
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

/// The counts of a layer, by expert.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
struct LayerCounts {
    /// Tokens that chose the expert, before capacities.
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
    /// Experts of a layer.
    experts: usize,
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
        Ok(Some(ExpertCountLog { path, file: BufWriter::new(file), experts: layers.count as usize }))
    }

    /// Adds the counts of a call.
    ///
    /// # Errors
    /// T0014 if the file cannot be written, T0087 for an output that holds no counts.
    pub(super) fn write_call(&mut self, call: u32, outputs: &Tensors) -> Result<(), Diagnostic> {
        let mut steps: Vec<BTreeMap<u64, LayerCounts>> = Vec::new();
        for output in &outputs.0 {
            let Some(layer) = output.name().strip_prefix(EXPERT_STATISTICS) else { continue };
            let counts = layer.parse().ok().zip(split_steps(output, self.experts));
            let (layer, counts) = counts.ok_or_else(|| {
                Diagnostic::error(&T0087, format!("`{}` holds no counts of experts", output.name()))
            })?;
            steps.resize(steps.len().max(counts.len()), BTreeMap::new());
            for (step, counts) in steps.iter_mut().zip(counts) {
                step.insert(layer, counts);
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

/// Splits an output [steps · experts, 4] into the counts of each step.
fn split_steps(output: &Tensor, experts: usize) -> Option<Vec<LayerCounts>> {
    let values = output.to_f32().filter(|v| !v.is_empty() && v.len() % (4 * experts) == 0)?;
    let columns = |step: &[f32]| {
        let column = |at: usize| step.chunks(4).map(|row| row[at] as u64).collect::<Vec<_>>();
        LayerCounts { chosen: column(0), kept: column(1), moved: column(2), dropped: column(3) }
    };
    Some(values.chunks(4 * experts).map(columns).collect())
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
    let file = File::open(&path).map_err(|e| lost_output(&path, &e.to_string()))?;
    let mut sums: BTreeMap<u64, LayerCounts> = BTreeMap::new();
    let mut steps = 0;
    for line in BufReader::new(file).lines() {
        let line = line.map_err(|e| lost_output(&path, &e.to_string()))?;
        let counts: StepCounts = serde_json::from_str(&line)
            .map_err(|e| lost_output(&path, &format!("a line is no step: {e}")))?;
        steps += 1;
        for (layer, counts) in counts.layers {
            sums.entry(layer).or_default().add_counts(&counts);
        }
    }
    let top_k = plan.mapping.experts.router.top_k.unwrap_or(layers.top_k as f64);
    let ranks = plan.mapping.expert_ranks();
    let expert_ranks = ExpertMap::ranks_of_experts(ranks, layers.count);
    let limits = Thresholds::default();
    let to_row = |(layer, counts): (&u64, &LayerCounts)| {
        counts.to_row((*layer, steps), (top_k, ranks), &expert_ranks, &limits)
    };
    Ok(sums.iter().map(to_row).collect())
}

impl LayerCounts {
    fn add_counts(&mut self, other: &LayerCounts) {
        let columns = [
            (&mut self.chosen, &other.chosen),
            (&mut self.kept, &other.kept),
            (&mut self.moved, &other.moved),
            (&mut self.dropped, &other.dropped),
        ];
        for (to, from) in columns {
            to.resize(to.len().max(from.len()), 0);
            to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
        }
    }

    /// Returns the load of a layer over some steps; `expert_ranks` is the rank of each expert.
    fn to_row(
        &self,
        (layer, steps): (u64, u64),
        (top_k, ep): (f64, u32),
        expert_ranks: &[u64],
        limits: &Thresholds,
    ) -> ExpertLoadRow {
        let floats = |counts: &[u64]| counts.iter().map(|n| *n as f64).collect::<Vec<f64>>();
        let computed = self.kept.iter().zip(&self.moved).map(|(kept, moved)| (kept + moved) as f64);
        let load = CountedLoad { chosen: floats(&self.chosen), computed: computed.collect(), top_k };
        let [chosen, moved, dropped] =
            [&self.chosen, &self.moved, &self.dropped].map(|counts| counts.iter().sum::<u64>());
        let (experts, ranks) = (load.expert_spread(), load.rank_spread(expert_ranks));
        let busiest_over_mean = load.busiest_over_mean(expert_ranks);
        let gate = balance_gate(
            Some(&ExpertGateInputs {
                experts: self.chosen.len() as u64,
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
        LayerCounts { chosen: chosen.to_vec(), kept: chosen.to_vec(), moved: none.clone(), dropped: none }
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
