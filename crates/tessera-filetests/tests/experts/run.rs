//! Runs layers of experts on the reference evaluator and on CPU ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_device::Observer;
use tessera_filetests::experts::{Layer, RankResult, run_calls};
use tessera_filetests::language::stack_listed_experts;
use tessera_ir::{Bundle, Opcode, Program};
use tessera_reference::{CallInputs, Evaluator, Tensor};

use crate::common::open_cpu_backends;

/// The outputs of each rank, by name.
pub type RankOutputs = Vec<BTreeMap<String, Vec<f32>>>;

/// Runs a layer under its plan.
pub trait RunLayer {
    /// Runs a plan on the reference evaluator.
    fn evaluate(&self, bundle: &Bundle) -> Vec<BTreeMap<String, Tensor>>;

    /// Runs a plan on CPU ranks, one thread each.
    fn run(&self, bundle: &Bundle) -> RankOutputs;

    /// Runs a plan, and returns the bytes that each rank sent in the exchanges of slots.
    fn sent_bytes(&self, bundle: &Bundle) -> Vec<u64>;

    /// Plans the layer, runs it on CPU ranks, and returns the outputs, on which all ranks agree.
    fn result(&self, mapping: &str) -> BTreeMap<String, Vec<f32>>;
}

impl RunLayer for Layer {
    fn evaluate(&self, bundle: &Bundle) -> Vec<BTreeMap<String, Tensor>> {
        evaluate(bundle, &self.weights(), &self.inputs())
    }

    fn run(&self, bundle: &Bundle) -> RankOutputs {
        run(bundle, &self.weights(), &self.inputs())
    }

    fn sent_bytes(&self, bundle: &Bundle) -> Vec<u64> {
        let ranks = run_and_count(bundle, &self.weights(), &self.inputs());
        ranks.into_iter().map(|rank| rank.observer.sent).collect()
    }

    fn result(&self, mapping: &str) -> BTreeMap<String, Vec<f32>> {
        let mut outputs = self.run(&self.plan(mapping)).into_iter();
        let first = outputs.next().unwrap();
        for other in outputs {
            assert!(other.iter().all(|(n, x)| bits(x) == bits(&first[n])), "{mapping}: ranks differ");
        }
        first
    }
}

/// Runs a plan of one phase on the reference evaluator.
pub fn evaluate(
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    inputs: &BTreeMap<String, Tensor>,
) -> Vec<BTreeMap<String, Tensor>> {
    let programs: Vec<&Program> =
        bundle.mesh.iter().map(|r| &bundle.phases[0].programs[bundle.role_index(r).unwrap()]).collect();
    evaluate_programs(&programs, &stack_listed_experts(bundle, weights), inputs)
}

/// Runs one program per rank on the reference evaluator.
pub fn evaluate_programs(
    programs: &[&Program],
    weights: &BTreeMap<String, Tensor>,
    inputs: &BTreeMap<String, Tensor>,
) -> Vec<BTreeMap<String, Tensor>> {
    let mut machine = Evaluator::new(programs[0].mesh);
    machine.load_weights(weights.clone());
    let call = inputs.iter().fold(CallInputs::default(), |call, (name, x)| call.with_input(name, x.clone()));
    machine.run(programs, &call).unwrap_or_else(|e| panic!("{e:?}"))
}

/// Runs a plan of one phase on CPU ranks, one thread each.
pub fn run(
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    inputs: &BTreeMap<String, Tensor>,
) -> RankOutputs {
    run_and_count(bundle, weights, inputs).into_iter().map(|mut rank| rank.outputs.remove(0)).collect()
}

/// Like [`run`], with the bytes that each rank sent in the exchanges of slots.
fn run_and_count(
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    inputs: &BTreeMap<String, Tensor>,
) -> Vec<RankResult<SlotBytes>> {
    let count = |program: &Arc<Program>| SlotBytes { program: Arc::clone(program), sent: 0 };
    run_calls(&open_cpu_backends, bundle, weights, (std::slice::from_ref(inputs), 1), &count)
}

pub fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

/// Returns the largest difference over the largest magnitude of `y`.
pub fn relative_difference(x: &[f32], y: &[f64]) -> f64 {
    assert_eq!(x.len(), y.len());
    let largest = y.iter().fold(0.0_f64, |m, y| m.max(y.abs()));
    x.iter().zip(y).map(|(x, y)| (f64::from(*x) - y).abs()).fold(0.0, f64::max) / largest.max(1e-30)
}

/// Counts the bytes of exchanges of slots, whose operand has a dim for experts, one for slots and one for channels.
struct SlotBytes {
    program: Arc<Program>,
    sent: u64,
}

impl Observer for SlotBytes {
    fn on_sent(&mut self, op: usize, bytes: u64) {
        let op = &self.program.ops[op];
        let exchanges =
            op.opcode == Opcode::AllToAll && self.program.type_of(op.operands[0]).shape.len() == 3;
        self.sent += if exchanges { bytes } else { 0 };
    }

    fn on_issued(&mut self, _: usize) {}
    fn on_progress(&mut self, _: u32) {}
}
