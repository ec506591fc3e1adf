//! Runs the calls of a plan on the reference evaluator and on the ranks of a backend.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_device::{Backend, CallData, Fault, MeshRank, NoObserver, Scalar};
use tessera_ir::{Bundle, ExpertTensorNames, Op, Opcode, Program};
use tessera_reference::{CallInputs, CallScalar, Evaluator, Tensor};

use super::draw::{TokenCall, programs_of_ranks};
use crate::{BackendFactory, OpenBackends, ReferenceWeights};

/// The output of each call. Every rank that returns it returns the same.
pub type Results = Vec<Vec<f64>>;

/// Runs the calls on the reference evaluator, in f64, and returns their output of this name.
///
/// # Panics
/// If the evaluator refuses a program, or if two ranks return other bits.
pub fn evaluate(
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    calls: &[TokenCall],
    output: &str,
) -> Results {
    let mut machine = Evaluator::new(bundle.mesh);
    machine.load_weights(stack_listed_experts(bundle, weights));
    let run = |call: &TokenCall| {
        let mut inputs = match &call.ids {
            Some((name, ids)) => CallInputs::default().with_input(name, ids.clone()),
            None => CallInputs::default(),
        };
        inputs.scalars = call.scalars.clone();
        let outputs = machine.run(&programs_of_ranks(bundle, call.phase), &inputs);
        let outputs = outputs.unwrap_or_else(|e| panic!("{e:?}"));
        common_output(outputs.into_iter().filter_map(|mut o| Some(o.remove(output)?.data().to_vec())))
    };
    calls.iter().map(run).collect()
}

/// Runs the calls on ranks of a backend, one thread each, and returns their output of this name.
///
/// # Errors
/// The fault of the first rank that reports one.
///
/// # Panics
/// If a rank cannot open its backend or load its programs, or if two ranks return other bits.
pub fn run_on_ranks<B: Backend>(
    open: OpenBackends<'_, B>,
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    calls: &[TokenCall],
    output: &str,
) -> Result<Results, Fault> {
    let mesh = bundle.mesh;
    let phases = 0..bundle.phases.len();
    let lists: Vec<Vec<Arc<Program>>> = (0..mesh.world_size() as usize)
        .map(|rank| phases.clone().map(|p| Arc::new(programs_of_ranks(bundle, p)[rank].clone())).collect())
        .collect();
    let open = open(&mesh, &lists).unwrap();
    let mut evaluator = Evaluator::new(mesh);
    evaluator.load_weights(stack_listed_experts(bundle, weights));
    let evaluator = &evaluator;
    let run_rank = |open: BackendFactory<B>, seat: MeshRank, programs: &[Arc<Program>]| {
        let mut backend = open(seat).unwrap();
        backend.poison_temporaries();
        let role = bundle.role_index(seat.rank).unwrap();
        let load = |(phase, program): (usize, &Arc<Program>)| {
            backend
                .load(program, &bundle.phases[phase].slots[role], &mut ReferenceWeights(evaluator))
                .unwrap()
        };
        let handles: Vec<_> = programs.iter().enumerate().map(load).collect();
        let mut outputs = Vec::new();
        for call in calls {
            let program = &programs[call.phase];
            let ids = call.ids.as_ref().map(|(name, ids)| (name.as_str(), to_f32(ids)));
            let data = CallData {
                scalars: call.scalars.iter().map(|(name, x)| (name.as_str(), to_scalar(x))).collect(),
                inputs: ids.iter().map(|(name, ids)| (*name, ids.as_slice())).collect(),
            };
            backend.run(handles[call.phase], &data, &mut NoObserver)?;
            let is_result = |o: &Op| o.opcode == Opcode::Output && o.name.as_deref() == Some(output);
            let found = program.ops.iter().any(is_result).then(|| backend.output(output).unwrap());
            outputs.push(found.map(|x| x.iter().map(|x| f64::from(*x)).collect()));
        }
        Ok::<Vec<Option<Vec<f64>>>, Fault>(outputs)
    };
    let run_rank = &run_rank;
    let ranks: Vec<_> = std::thread::scope(|scope| {
        let seats = mesh.iter().zip(open).zip(&lists);
        let spawn = seats
            .map(|((rank, open), list)| scope.spawn(move || run_rank(open, MeshRank { mesh, rank }, list)));
        let threads: Vec<_> = spawn.collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    });
    let ranks: Vec<_> = ranks.into_iter().collect::<Result<_, _>>()?;
    Ok((0..calls.len()).map(|i| common_output(ranks.iter().filter_map(|r| r[i].clone()))).collect())
}

/// Returns the weights with those that hold listed experts: the plan lists an expert for each place.
#[must_use]
pub fn stack_listed_experts(bundle: &Bundle, weights: &BTreeMap<String, Tensor>) -> BTreeMap<String, Tensor> {
    let mut all = weights.clone();
    let programs = bundle.phases.iter().flat_map(|phase| &phase.programs);
    for name in programs.flat_map(|p| &p.ops).filter_map(|op| op.name.as_deref()) {
        let Some(names) = ExpertTensorNames::parse(name).filter(|_| !weights.contains_key(name)) else {
            continue;
        };
        let Some(every) = weights.get(&names.name_every_expert()) else { continue };
        let experts = names.listed_experts().unwrap_or_default();
        let size = every.data().len() / every.shape()[0];
        let rows = experts.iter().flat_map(|e| every.data()[*e as usize * size..][..size].to_vec());
        let shape: Vec<usize> = std::iter::once(experts.len()).chain(every.shape()[1..].to_vec()).collect();
        all.insert(name.to_string(), Tensor::new(&shape, rows.collect()));
    }
    all
}

/// Returns the output on which all ranks agree.
fn common_output(mut outputs: impl Iterator<Item = Vec<f64>>) -> Vec<f64> {
    let first = outputs.next().expect("a rank returns the output");
    assert!(outputs.all(|o| o.iter().zip(&first).all(|(a, b)| a.to_bits() == b.to_bits())), "ranks differ");
    first
}

fn to_f32(x: &Tensor) -> Vec<f32> {
    x.data().iter().map(|x| *x as f32).collect()
}

fn to_scalar(x: &CallScalar) -> Scalar {
    match x {
        CallScalar::Int(i) => Scalar::I64(*i),
        CallScalar::Float(t) => Scalar::F32s(to_f32(t)),
    }
}
