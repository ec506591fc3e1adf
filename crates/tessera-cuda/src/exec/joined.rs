//! Query, key and value of one operand as one product: its weights lie behind one another, its rows hold all three side by side, behind the
//! slots, and the row kernels that read them know how far rows are apart.
//!
//! One product has fewer tiles left over at its end than three. Where an exchange carries one of the three away while the next
//! computes, that is worth more, and they stay three.

use std::collections::BTreeMap;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{DType, Op, Opcode, Program, ValueId};

use super::enqueue::{act, product};
use super::steps::writes_rows;
use super::{ALIGNMENT, Cuda};
use crate::driver::{Done, Stream};
use crate::products::{self, Shape};

/// Three products, by op, in the program's order.
pub(super) type Triple = [usize; 3];

/// The operands that each of the three has one of: weight, bias, scale of the weight.
const PARTS: [&str; 2] = ["bias", "w_scale"];

/// Products of one operand that one product may be made of, by what the program says alone.
pub(super) fn triples(p: &Program) -> Vec<Triple> {
    let readers = p.readers();
    let mut of: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::Matmul) {
        of.entry(op.operands[0]).or_default().push(i);
    }
    let three = of.into_values().filter_map(|ops| Triple::try_from(ops).ok());
    let mut found: Vec<Triple> = three.filter(|t| may(p, &readers, *t)).collect();
    found.sort_unstable();
    found
}

fn may(p: &Program, readers: &[Vec<usize>], triple: Triple) -> bool {
    let [first, ..] = triple.map(|i| &p.ops[i]);
    let shape = product(p, first);
    triple.iter().all(|i| {
        let op = &p.ops[*i];
        let alike = product(p, op) == shape
            && op.stream == first.stream
            && op.key("x_scale") == first.key("x_scale")
            && PARTS.iter().all(|k| op.key(k).is_some() == first.key(k).is_some());
        // As many bytes as the next one's boundary asks for.
        let whole = parts(op).into_iter().all(|v| p.ty(v).bytes().0.is_multiple_of(ALIGNMENT));
        alike
            && whole
            && act(op) == 0
            && op.after.is_empty()
            && shape.dtype != DType::F32
            && by_rows(p, readers, op)
    })
}

/// Whether all that read a product's result are kernels over rows, on its stream.
fn by_rows(p: &Program, readers: &[Vec<usize>], op: &Op) -> bool {
    let result = op.results[0];
    readers[result.0 as usize].iter().all(|j| {
        let reader = &p.ops[*j];
        let rows = match reader.opcode {
            Opcode::RmsNorm | Opcode::Rope => true,
            Opcode::CacheWrite => writes_rows(p, *j),
            _ => false,
        };
        rows && reader.stream == op.stream && reader.operands[0] == result && reader.after.is_empty()
    })
}

/// Weight, bias and scale of a product.
fn parts(op: &Op) -> Vec<ValueId> {
    [op.operands[1]].into_iter().chain(PARTS.iter().filter_map(|k| op.key(k))).collect()
}

/// Shape of all three at once.
fn whole(p: &Program, triple: Triple) -> Shape {
    let one = product(p, &p.ops[triple[0]]);
    Shape { columns: 3 * one.columns, ..one }
}

/// Bytes of the rows of all three.
pub(super) fn bytes(p: &Program, triple: Triple) -> usize {
    triple.iter().map(|i| p.ty(p.ops[*i].results[0]).bytes().0 as usize).sum()
}

impl Cuda {
    /// Of the triples those that can be: whose weights lie behind one another, and for which the library does all of it.
    pub(super) fn join(
        &mut self,
        p: &Program,
        source: &mut dyn WeightSource,
    ) -> Result<Vec<Triple>, Diagnostic> {
        let defs = p.definitions();
        let mut out = Vec::new();
        for triple in triples(p) {
            let mut beside = true;
            for k in 0..parts(&p.ops[triple[0]]).len() {
                let made = triple.map(|i| defs[parts(&p.ops[i])[k].0 as usize].map(|d| &p.ops[d]));
                let [Some(a), Some(b), Some(c)] = made else {
                    beside = false;
                    break;
                };
                let weights = [a, b, c];
                beside &= weights.iter().all(|w| w.opcode == Opcode::Weight)
                    && self.weights.beside(&self.seat, p, &weights, source)?;
            }
            let shape = whole(p, triple);
            if beside && self.products.prepare(shape).is_ok() && self.products.form(shape) == shape {
                out.push(triple);
            }
        }
        Ok(out)
    }

    pub(super) fn joined(&mut self, program: usize, triple: Triple, stream: &Stream) -> Done<()> {
        let p = std::sync::Arc::clone(&self.programs[program].program);
        let first = &p.ops[triple[0]];
        let at = products::At {
            x: self.at(program, first.operands[0])?,
            w: self.at(program, first.operands[1])?,
            bias: self.key(program, first, "bias")?,
            residual: 0,
            out: self.at(program, first.results[0])?,
            scales: (self.key(program, first, "x_scale")?, self.key(program, first, "w_scale")?),
        };
        self.products.run(whole(&p, triple), at, stream)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_ir::parse_all;

    /// q, k and v of one operand; what reads v is up to the test.
    fn found(reads_v: &str) -> Vec<Triple> {
        let product = |name: &str| {
            format!(
                "%w{name} = weight \"w{name}\" : bf16[128, 128] %b{name} = weight \"b{name}\" : bf16[128] \
                 %{name} = toperator.matmul %x, %w{name}, bias=%b{name} : bf16[16, 128] "
            )
        };
        let text = format!(
            "program @p {{ buffer @c : bf16[32, 128] buffer @d : bf16[32, 128] %x = input : bf16[16, 128] \
             %n = weight \"n\" : f32[128] {}{}{} \
             %r = toperator.rms_norm %q, %n {{eps = 1e-6}} : bf16[16, 128] %row = call \"row\" : i64 cache.write @c, %k, row=%row {reads_v} output \"r\", %r }}",
            product("v"),
            product("q"),
            product("k"),
        );
        triples(&parse_all(&text, "test").expect("a program")[0])
    }

    #[test]
    fn three_products_of_one_operand_are_one_where_row_kernels_read_them() {
        let [triple] = found("cache.write @d, %v, row=%row")[..] else { panic!("one triple") };
        assert!(triple.is_sorted());
        assert!(found("%s = toperator.silu %v : bf16[16, 128] output \"s\", %s").is_empty());
    }
}
