//! One layer of experts as a logical program, planned for a mapping, sealed, and run on the reference evaluator and on
//! CPU ranks.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::random::{DrawKey, fill_normals};
use tessera_cpu::CpuBackend;
use tessera_device::{Backend, CallData, MeshRank, Observer};
use tessera_filetests::language::stack_listed_experts;
use tessera_filetests::{BackendFactory, ReferenceWeights};
use tessera_ir::{Builder, Bundle, DType, Opcode, Program, Slots, Type};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, Strategy, lower};
use tessera_reference::{CallInputs, Evaluator, Tensor};
use tessera_verify::{DeviceLimits, seal};

use crate::common::open_cpu_backends;

/// Channels of a token beside its logits.
pub const CHANNELS: usize = 5;
/// Width inside of an expert.
const INNER: usize = 6;

/// A layer of experts, with the logits of its tokens. The router copies the logits out of the tokens' last channels.
#[derive(Debug, Clone)]
pub struct Layer {
    pub experts: usize,
    pub top_k: usize,
    /// Logits of each token.
    pub logits: Vec<Vec<f32>>,
    /// Channels of a token beside its logits.
    pub channels: usize,
}

/// The outputs of each rank, by name.
pub type RankOutputs = Vec<BTreeMap<String, Vec<f32>>>;

impl Layer {
    pub fn new(experts: usize, top_k: usize, logits: Vec<Vec<f32>>) -> Layer {
        Layer { experts, top_k, logits, channels: CHANNELS }
    }

    pub fn width(&self) -> usize {
        self.channels + self.experts
    }

    /// Returns the tokens [tokens, width].
    pub fn tokens(&self) -> Vec<f32> {
        let mut x = normals(1, self.logits.len() * self.channels);
        x.reverse();
        let mut out = Vec::new();
        for logits in &self.logits {
            out.extend(x.split_off(x.len() - self.channels));
            out.extend(logits);
        }
        out
    }

    /// Returns the weights by name.
    pub fn weights(&self) -> BTreeMap<String, Tensor> {
        let (e, d) = (self.experts, self.width());
        let one_hot = |i: usize| f64::from(i % d == self.channels + i / d);
        let random = |seed, shape: &[usize]| {
            let numbers = normals(seed, shape.iter().product());
            Tensor::new(shape, numbers.into_iter().map(f64::from).collect())
        };
        BTreeMap::from([
            ("router".to_string(), Tensor::from_fn(&[e, d], one_hot)),
            ("experts.*.up".to_string(), random(2, &[e, INNER, d])),
            ("experts.*.down".to_string(), random(3, &[e, d, INNER])),
        ])
    }

    /// Returns the logical program of the layer as a model writes it: no token is dropped.
    pub fn program(&self) -> Program {
        let (tokens, e, d) = (self.logits.len() as u64, self.experts as u64, self.width() as u64);
        let mut b = Builder::new_logical("layer");
        let x = b.add_input("x", Type::new(DType::F32, [tokens, d]));
        let weight = |b: &mut Builder, name: &str, part: &str, shape: &[u64]| {
            b.set_attr("part", part).add_weight(name, Type::new(DType::F32, shape))
        };
        let router = weight(&mut b, "router", "whole", &[e, d]);
        let up = weight(&mut b, "experts.*.up", "col", &[e, INNER as u64, d]);
        let down = weight(&mut b, "experts.*.down", "row", &[e, d, INNER as u64]);
        let logits = b.add_op(Opcode::Matmul, &[x, router]);
        let chosen = b.set_attr("top_k", self.top_k as u64).add_op(Opcode::TopKExperts, &[logits]);
        let weights = b
            .set_attr("renormalise", tessera_ir::Attr::Bool(true))
            .add_op(Opcode::ExpertWeights, &[logits, chosen]);
        let all = tokens * self.top_k as u64;
        let mut emit = |opcode, operands: &[_], attrs: &[(&str, u64)]| {
            b.set_attr("at", "block.0");
            attrs.iter().for_each(|(name, n)| {
                b.set_attr(name, *n);
            });
            if opcode == Opcode::GroupedMatmul && operands[1] == up {
                b.set_attr("act", "silu");
            }
            b.add_op(opcode, operands)
        };
        let slots = emit(Opcode::ExpertSlots, &[chosen], &[("capacity", tokens)]);
        let counts = emit(Opcode::ExpertCounts, &[chosen, slots], &[("groups", e)]);
        let rows = emit(Opcode::ExpertPack, &[x, chosen, slots], &[("capacity", tokens), ("groups", e)]);
        let h = emit(Opcode::GroupedMatmul, &[rows, up, counts], &[("rows", all)]);
        let y = emit(Opcode::GroupedMatmul, &[h, down, counts], &[("rows", all)]);
        let sum = emit(Opcode::ExpertCombine, &[y, chosen, slots, weights], &[]);
        // The rest of a layer reads the sum beside the rows that were packed.
        let y = b.add_op(Opcode::Add, &[sum, x]);
        b.add_output("choices", chosen);
        b.add_output("sum", sum);
        b.add_output("y", y);
        b.finish().unwrap_or_else(|es| panic!("{}", es[0].message))
    }

    /// Plans the layer and proves the plan.
    pub fn plan(&self, mapping: &str) -> Bundle {
        plan(self.program(), (self.experts, self.logits.len()), mapping)
    }

    /// Runs a plan on the reference evaluator.
    pub fn evaluate(&self, bundle: &Bundle) -> Vec<BTreeMap<String, Tensor>> {
        evaluate(bundle, &self.weights(), &self.inputs())
    }

    /// Runs a plan on CPU ranks, one thread each.
    pub fn run(&self, bundle: &Bundle) -> RankOutputs {
        run(bundle, &self.weights(), &self.inputs())
    }

    /// Runs a plan, and returns the bytes that each rank sent in the exchanges of slots.
    pub fn sent_bytes(&self, bundle: &Bundle) -> Vec<u64> {
        run_and_count(bundle, &self.weights(), &self.inputs()).into_iter().map(|(_, sent)| sent).collect()
    }

    pub fn inputs(&self) -> BTreeMap<String, Tensor> {
        let x = self.tokens().into_iter().map(f64::from).collect();
        BTreeMap::from([("x".to_string(), Tensor::new(&[self.logits.len(), self.width()], x))])
    }

    /// Plans the layer, runs it on CPU ranks, and returns the output `y`, on which all ranks agree.
    pub fn result(&self, mapping: &str) -> BTreeMap<String, Vec<f32>> {
        let mut outputs = self.run(&self.plan(mapping)).into_iter();
        let first = outputs.next().unwrap();
        for other in outputs {
            assert!(other.iter().all(|(n, x)| bits(x) == bits(&first[n])), "{mapping}: ranks differ");
        }
        first
    }
}

/// Plans a program of one phase for a number of experts and of tokens, and proves the plan.
pub fn plan(program: Program, (experts, tokens): (usize, usize), mapping: &str) -> Bundle {
    let mut mapping =
        Mapping::parse("mapping.toml", mapping).unwrap_or_else(|ds| panic!("{mapping}: {ds:#?}"));
    mapping.strategy = Strategy::Megatron;
    let logical = logical_model(program, (experts, tokens));
    let bundle = lower(&logical, &mut mapping).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"));
    seal(bundle.clone(), &DeviceLimits::default()).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"));
    bundle
}

/// Returns a model of one phase.
pub fn logical_model(program: Program, (experts, tokens): (usize, usize)) -> LogicalModel {
    let name = program.name.clone();
    LogicalModel {
        phases: vec![program],
        calls: vec![(name.clone(), vec![name])],
        heads: 4,
        head_dim: 4,
        hidden_size: 16,
        ffn_size: INNER as u64,
        tokens: tokens as u64,
        blocks: 1,
        experts: experts as u64,
        decoder: DecoderPrecision::Exact,
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
    run_and_count(bundle, weights, inputs).into_iter().map(|(outputs, _)| outputs).collect()
}

/// Like [`run`], with the bytes that each rank sent in the exchanges of slots.
pub fn run_and_count(
    bundle: &Bundle,
    weights: &BTreeMap<String, Tensor>,
    inputs: &BTreeMap<String, Tensor>,
) -> Vec<(BTreeMap<String, Vec<f32>>, u64)> {
    let mesh = bundle.mesh;
    let of_rank = |r| bundle.role_index(r).unwrap();
    let programs: Vec<Arc<Program>> =
        mesh.iter().map(|r| Arc::new(bundle.phases[0].programs[of_rank(r)].clone())).collect();
    let lists: Vec<Vec<Arc<Program>>> = programs.iter().map(|p| vec![Arc::clone(p)]).collect();
    let open = open_cpu_backends(&mesh, &lists).unwrap();
    let mut evaluator = Evaluator::new(mesh);
    evaluator.load_weights(stack_listed_experts(bundle, weights));
    let inputs: BTreeMap<&str, Vec<f32>> =
        inputs.iter().map(|(name, x)| (name.as_str(), to_f32(x))).collect();
    let (inputs, evaluator) = (&inputs, &evaluator);
    let run_rank =
        |open: BackendFactory<CpuBackend>, seat: MeshRank, program: &Arc<Program>, slots: &Slots| {
            let mut backend = open(seat).unwrap();
            let handle = backend.load(program, slots, &mut ReferenceWeights(evaluator)).unwrap();
            let call = CallData {
                scalars: BTreeMap::new(),
                inputs: inputs.iter().map(|(name, x)| (*name, x.as_slice())).collect(),
            };
            let mut counter = SlotBytes { program: Arc::clone(program), sent: 0 };
            backend.run(handle, &call, &mut counter).unwrap_or_else(|e| panic!("{}: {e:?}", seat.rank));
            let outputs =
                program.ops.iter().filter(|o| o.opcode == Opcode::Output).filter_map(|o| o.name.clone());
            let outputs = outputs.map(|n| (n.clone(), backend.output(&n).unwrap().to_vec())).collect();
            (outputs, counter.sent)
        };
    let run_rank = &run_rank;
    std::thread::scope(|scope| {
        let ranks: Vec<_> = mesh
            .iter()
            .zip(open)
            .zip(&programs)
            .map(|((rank, open), program)| {
                let slots = &bundle.phases[0].slots[of_rank(rank)];
                scope.spawn(move || run_rank(open, MeshRank { mesh, rank }, program, slots))
            })
            .collect();
        ranks.into_iter().map(|r| r.join().unwrap()).collect()
    })
}

fn to_f32(x: &Tensor) -> Vec<f32> {
    x.data().iter().map(|x| *x as f32).collect()
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

/// Returns normal numbers.
pub fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut x = vec![0.0_f32; count];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    x
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
