//! Runs a plan of one phase on the ranks of a backend, call after call.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_device::{Backend, CallData, MeshRank, Observer};
use tessera_ir::{Bundle, Opcode, Program};
use tessera_reference::{Evaluator, Tensor};

use crate::language::stack_listed_experts;
use crate::{BackendFactory, OpenBackends, ReferenceWeights};

/// What a rank returned and observed.
#[derive(Debug)]
pub struct RankResult<O> {
    /// The outputs of each call of the last round by name.
    pub outputs: Vec<BTreeMap<String, Vec<f32>>>,
    /// The observer of all calls of all rounds.
    pub observer: O,
}

/// Runs calls with these inputs on ranks of a backend, one thread each, so many rounds after loading once.
///
/// # Panics
/// If a rank cannot open its backend, load its program or run a call.
pub fn run_calls<B: Backend, O: Observer>(
    open: OpenBackends<'_, B>,
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    (calls, rounds): (&[BTreeMap<String, Tensor>], usize),
    observe: &(dyn Fn(&Arc<Program>) -> O + Sync),
) -> Vec<RankResult<O>> {
    let mesh = bundle.mesh;
    let of_rank = |r| bundle.role_index(r).unwrap();
    let programs: Vec<Arc<Program>> =
        mesh.iter().map(|r| Arc::new(bundle.phases[0].programs[of_rank(r)].clone())).collect();
    let lists: Vec<Vec<Arc<Program>>> = programs.iter().map(|p| vec![Arc::clone(p)]).collect();
    let open = open(&mesh, &lists).unwrap();
    let mut evaluator = Evaluator::new(mesh);
    evaluator.load_weights(stack_listed_experts(bundle, weights));
    let to_f32 = |x: &Tensor| x.data().iter().map(|x| *x as f32).collect::<Vec<f32>>();
    let calls: Vec<BTreeMap<&str, Vec<f32>>> = calls
        .iter()
        .map(|inputs| inputs.iter().map(|(name, x)| (name.as_str(), to_f32(x))).collect())
        .collect();
    let run_rank = |open: BackendFactory<B>, seat: MeshRank, program: &Arc<Program>| {
        let mut backend = open(seat).unwrap();
        let slots = &bundle.phases[0].slots[of_rank(seat.rank)];
        let handle = backend.load(program, slots, &mut ReferenceWeights(&evaluator)).unwrap();
        let names = program.ops.iter().filter(|o| o.opcode == Opcode::Output).filter_map(|o| o.name.clone());
        let names: Vec<String> = names.collect();
        let mut observer = observe(program);
        let mut run_call = |inputs: &BTreeMap<&str, Vec<f32>>| {
            let call = CallData {
                scalars: BTreeMap::new(),
                inputs: inputs.iter().map(|(name, x)| (*name, x.as_slice())).collect(),
            };
            backend.run(handle, &call, &mut observer).unwrap_or_else(|e| panic!("{}: {e:?}", seat.rank));
            names.iter().map(|n| (n.clone(), backend.output(n).unwrap().to_vec())).collect()
        };
        let mut outputs = Vec::new();
        for _ in 0..rounds {
            outputs = calls.iter().map(&mut run_call).collect();
        }
        RankResult { outputs, observer }
    };
    let run_rank = &run_rank;
    std::thread::scope(|scope| {
        let seats = mesh.iter().zip(open).zip(&programs);
        let ranks: Vec<_> = seats
            .map(|((rank, open), program)| {
                scope.spawn(move || run_rank(open, MeshRank { mesh, rank }, program))
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}
