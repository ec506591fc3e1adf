//! One layer of experts as a logical program, planned for a mapping and sealed.

use std::collections::BTreeMap;

use tessera_base::random::{DrawKey, fill_normals};
use tessera_ir::{Builder, Bundle, DType, Opcode, Program, Type};
use tessera_plan::{DecoderPrecision, LogicalModel, Mapping, Strategy, lower};
use tessera_reference::Tensor;
use tessera_verify::{DeviceLimits, seal};

/// Channels of a token beside its logits, if a layer does not say otherwise.
const CHANNELS: usize = 5;
/// Width inside of an expert, if a layer does not say otherwise.
pub const INNER: usize = 6;

/// A layer of experts, with the logits of its tokens. The router copies the logits out of the tokens' last channels.
#[derive(Debug, Clone)]
pub struct Layer {
    /// Number of experts.
    pub experts: usize,
    /// Experts of each token.
    pub top_k: usize,
    /// Logits of each token.
    pub logits: Vec<Vec<f32>>,
    /// Channels of a token beside its logits.
    pub channels: usize,
    /// Width inside of an expert.
    pub inner: usize,
}

impl Layer {
    /// Returns a layer of few channels.
    #[must_use]
    pub fn new(experts: usize, top_k: usize, logits: Vec<Vec<f32>>) -> Layer {
        Layer { experts, top_k, logits, channels: CHANNELS, inner: INNER }
    }

    /// Returns the channels of a token with its logits.
    #[must_use]
    pub fn width(&self) -> usize {
        self.channels + self.experts
    }

    /// Returns the tokens [tokens, width].
    #[must_use]
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
    #[must_use]
    pub fn weights(&self) -> BTreeMap<String, Tensor> {
        let (e, d) = (self.experts, self.width());
        let one_hot = |i: usize| f64::from(i % d == self.channels + i / d);
        let random = |seed, shape: &[usize]| {
            let numbers = normals(seed, shape.iter().product());
            Tensor::new(shape, numbers.into_iter().map(f64::from).collect())
        };
        BTreeMap::from([
            ("router".to_string(), Tensor::from_fn(&[e, d], one_hot)),
            ("experts.*.up".to_string(), random(2, &[e, self.inner, d])),
            ("experts.*.down".to_string(), random(3, &[e, d, self.inner])),
        ])
    }

    /// Returns the logical program of the layer as a model writes it: no token is dropped.
    ///
    /// # Panics
    /// If the extents contradict each other.
    #[must_use]
    pub fn program(&self) -> Program {
        let (tokens, e, d) = (self.logits.len() as u64, self.experts as u64, self.width() as u64);
        let mut b = Builder::new_logical("layer");
        let x = b.add_input("x", Type::new(DType::F32, [tokens, d]));
        let weight = |b: &mut Builder, name: &str, part: &str, shape: &[u64]| {
            b.set_attr("part", part).add_weight(name, Type::new(DType::F32, shape))
        };
        let router = weight(&mut b, "router", "whole", &[e, d]);
        let up = weight(&mut b, "experts.*.up", "col", &[e, self.inner as u64, d]);
        let down = weight(&mut b, "experts.*.down", "row", &[e, d, self.inner as u64]);
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
    ///
    /// # Panics
    /// If the mapping does not fit the layer.
    #[must_use]
    pub fn plan(&self, mapping: &str) -> Bundle {
        plan_layer(self.program(), [self.experts, self.logits.len(), self.inner], mapping)
    }

    /// Returns the inputs of a call by name.
    #[must_use]
    pub fn inputs(&self) -> BTreeMap<String, Tensor> {
        let x = self.tokens().into_iter().map(f64::from).collect();
        BTreeMap::from([("x".to_string(), Tensor::new(&[self.logits.len(), self.width()], x))])
    }
}

/// Plans a program of one phase for a number of experts, of tokens, and of channels inside of an expert, and proves
/// the plan.
///
/// # Panics
/// If the mapping does not fit.
#[must_use]
pub fn plan_layer(program: Program, extents: [usize; 3], mapping: &str) -> Bundle {
    let mut mapping =
        Mapping::parse("mapping.toml", mapping).unwrap_or_else(|ds| panic!("{mapping}: {ds:#?}"));
    mapping.strategy = Strategy::Megatron;
    let logical = logical_layer(program, extents);
    let bundle = lower(&logical, &mut mapping).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"));
    seal(bundle.clone(), &DeviceLimits::default()).unwrap_or_else(|ds| panic!("{mapping:?}: {ds:#?}"));
    bundle
}

/// Returns a model of one phase.
#[must_use]
pub fn logical_layer(program: Program, [experts, tokens, inner]: [usize; 3]) -> LogicalModel {
    let name = program.name.clone();
    LogicalModel {
        phases: vec![program],
        calls: vec![(name.clone(), vec![name])],
        heads: 4,
        head_dim: 4,
        hidden_size: 16,
        ffn_size: inner as u64,
        tokens: tokens as u64,
        blocks: 1,
        experts: experts as u64,
        decoder: DecoderPrecision::Exact,
    }
}

/// Returns normal numbers.
#[must_use]
pub fn normals(seed: u64, count: usize) -> Vec<f32> {
    let mut x = vec![0.0_f32; count];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    x
}
