//! The logical program that encodes a prompt's tokens, on the leader.

use tessera_ir::{Builder, DType, Opcode, Program, Type, ValueId};

use super::Umt5Config;
use super::weights::program_name;

/// Name of the phase.
pub const TEXT_PHASE: &str = "encode_text";
/// Name of the same phase for a device of the leader's host. The planner gives it the dtypes and the
/// graph that phases of ranks have, and a CPU runs the other one in f32.
pub const TEXT_DEVICE_PHASE: &str = "encode_text.device";
/// Name of its input: one id per row, padded with zeros.
pub const TEXT_IDS: &str = "ids";
/// Name of its call scalar: the number of ids before the padding, at least 1.
pub const TEXT_LENGTH: &str = "length";
/// Name of its output: one row per id. The rows of the padding have no meaning.
pub const TEXT_ROWS: &str = "text";

/// Builds the programs that encode `rows` ids: for the leader's CPU, and for a device of its host.
///
/// # Panics
/// Never panics for a parsed config, whose dimensions satisfy every rule used here.
pub(crate) fn encode_text_phases(c: &Umt5Config, rows: u64) -> [Program; 2] {
    [(TEXT_PHASE, "leader"), (TEXT_DEVICE_PHASE, "leader.device")]
        .map(|(name, place)| encode_text_phase(c, rows, name, place))
}

fn encode_text_phase(c: &Umt5Config, rows: u64, name: &str, place: &'static str) -> Program {
    let mut g = EncoderBuilder { builder: Builder::new_logical(name), config: c, place };
    g.builder.set_attr("at", place);
    let ids = g.builder.set_label(TEXT_IDS).add_input(TEXT_IDS, Type::new(DType::F32, [rows]));
    let length = g.builder.set_label(TEXT_LENGTH).add_call_scalar(TEXT_LENGTH, Type::scalar(DType::I64));
    let table = g.emit_weight("token_embedding", &[c.vocab_size, c.d_model]);
    let mut x = g.emit_op(Opcode::Embed, &[ids, table]);
    for i in 0..c.layers {
        x = g.emit_block(i, x, length);
    }
    let y = g.emit_norm("norm", x);
    g.builder.set_attr("at", place);
    g.builder.add_output(TEXT_ROWS, y);
    match g.builder.finish() {
        Ok(p) => p,
        Err(e) => panic!("a parsed text encoder violates a rule of the op table: {}", e[0].message),
    }
}

struct EncoderBuilder<'a> {
    builder: Builder,
    config: &'a Umt5Config,
    /// Where the ops run.
    place: &'static str,
}

impl EncoderBuilder<'_> {
    fn emit_block(&mut self, i: u64, x: ValueId, length: ValueId) -> ValueId {
        let c = self.config;
        let (d, inner, n) = (c.d_model, c.inner_dim(), format!("blocks.{i}"));
        let a = self.emit_norm(&format!("{n}.norm1"), x);
        let [q, k, v] = ["q", "k", "v"].map(|p| self.emit_linear(&format!("{n}.attn.{p}"), a, inner, None));
        let table = self.emit_weight(&format!("{n}.pos_embedding.embedding"), &[c.buckets, c.heads]);
        self.builder
            .set_attr("head_dim", c.d_kv)
            .set_attr("max_distance", c.max_distance)
            .add_keyed("length", length);
        let o = self.emit_op(Opcode::RelativeAttention, &[q, k, v, table]);
        let o = self.emit_linear(&format!("{n}.attn.o"), o, d, None);
        let x = self.emit_op(Opcode::Add, &[x, o]);

        let a = self.emit_norm(&format!("{n}.norm2"), x);
        let gate = self.emit_linear(&format!("{n}.ffn.gate.0"), a, c.d_ff, Some("gelu_tanh"));
        let h = self.emit_linear(&format!("{n}.ffn.fc1"), a, c.d_ff, None);
        let h = self.emit_op(Opcode::Mul, &[gate, h]);
        let y = self.emit_linear(&format!("{n}.ffn.fc2"), h, d, None);
        self.emit_op(Opcode::Add, &[x, y])
    }

    fn emit_norm(&mut self, name: &str, x: ValueId) -> ValueId {
        let w = self.emit_weight(name, &[self.config.d_model]);
        self.builder.set_attr("eps", self.config.eps);
        self.emit_op(Opcode::RmsNorm, &[x, w])
    }

    /// Emits x · wᵀ, without a bias.
    fn emit_linear(&mut self, name: &str, x: ValueId, out: u64, act: Option<&str>) -> ValueId {
        let k = self.builder.type_of(x).shape[1];
        let w = self.emit_weight(name, &[out, k]);
        if let Some(act) = act {
            self.builder.set_attr("act", act);
        }
        self.emit_op(Opcode::Matmul, &[x, w])
    }

    /// Emits a weight that no strategy shards: the leader alone holds it.
    fn emit_weight(&mut self, name: &str, shape: &[u64]) -> ValueId {
        let name = program_name(&format!("{name}.weight"));
        self.builder.set_attr("at", self.place).set_attr("part", "whole");
        self.builder.set_label(&name).add_weight(&name, Type::new(DType::F32, shape))
    }

    fn emit_op(&mut self, opcode: Opcode, operands: &[ValueId]) -> ValueId {
        self.builder.set_attr("at", self.place);
        self.builder.add_op(opcode, operands)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::umt5_weights;

    #[test]
    fn the_program_reads_every_weight_in_its_shape() {
        let config = Umt5Config { layers: 2, d_model: 20, d_kv: 6, heads: 3, d_ff: 28, ..Umt5Config::xxl() };
        let known: BTreeSet<_> = umt5_weights(&config).into_iter().map(|w| (w.name, w.shape)).collect();
        for p in encode_text_phases(&config, 7) {
            let weights = p.ops.iter().filter(|o| o.opcode == Opcode::Weight);
            let used: BTreeSet<(String, Vec<u64>)> =
                weights.map(|o| (o.name.clone().unwrap(), p.type_of(o.results[0]).shape.clone())).collect();
            assert_eq!(used, known, "@{}", p.name);
        }
    }
}
