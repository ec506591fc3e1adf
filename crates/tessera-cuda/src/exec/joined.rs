//! Ops of one kind as one launch, whose weights lie behind one another and whose results behind the slots.
//!
//! Query, key and value of one operand are one product: its rows hold all three side by side, and the row kernels that read them
//! know how far rows are apart. One product has fewer tiles left over at its end than three. Where an exchange carries one of the
//! three away while the next computes, that is worth more, and they stay three. The kernel of this crate writes what only goes to a
//! cache there at once.
//!
//! The columns of all blocks that a call modulates by are one table after another: a launch for each block would take longer than its work,
//! the longer the more ranks share a block.

use std::collections::BTreeMap;
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_device::WeightSource;
use tessera_ir::{DType, Op, Opcode, Program, ValueId};

use super::enqueue::{act, product};
use super::steps::writes_rows;
use super::{ALIGNMENT, Cuda, Place, refused};
use crate::driver::{Done, Stream};
use crate::products::{self, Away, Shape};

/// Ops that one launch does, in the program's order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Joined {
    Products {
        made: Arc<[usize]>,
        /// The write to a cache that is the only reader of one of them, and done with them.
        write: Option<usize>,
    },
    Tables(Arc<[usize]>),
}

impl Joined {
    /// The ops whose results it makes together.
    pub(super) fn made(&self) -> &[usize] {
        match self {
            Joined::Products { made, .. } | Joined::Tables(made) => made,
        }
    }

    pub(super) fn ops(&self) -> Vec<usize> {
        let write = match self {
            Joined::Products { write, .. } => *write,
            Joined::Tables(_) => None,
        };
        self.made().iter().copied().chain(write).collect()
    }

    /// Whether its results lie where those of another lay.
    pub(super) fn replaces(&self, other: &Joined) -> bool {
        matches!((self, other), (Joined::Products { .. }, Joined::Products { .. }))
    }
}

/// The operands that products have one of, beside their weight.
const PARTS: [&str; 2] = ["bias", "w_scale"];

/// What may be joined, by what the program says alone.
pub(super) fn joined(p: &Program) -> Vec<Joined> {
    let (readers, defs) = (p.readers(), p.definitions());
    let products = triples(p, &readers).into_iter().map(|made| {
        let write = written(p, &readers, &defs, &made);
        Joined::Products { made: Arc::new(made), write }
    });
    products.chain(tables(p).into_iter().map(|ops| Joined::Tables(ops.into()))).collect()
}

/// Modulations of one embedding by tables alike.
fn tables(p: &Program) -> Vec<Vec<usize>> {
    let mut of: Vec<Vec<usize>> = Vec::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::Modulation) {
        let alike = |other: &Op| {
            op.operands[1] == other.operands[1] && p.ty(op.operands[0]) == p.ty(other.operands[0])
        };
        match of.iter_mut().find(|ops| alike(&p.ops[ops[0]])) {
            Some(ops) => ops.push(i),
            None => of.push(vec![i]),
        }
    }
    let whole = |i: usize| {
        let op = &p.ops[i];
        on_main(op)
            && op.after.is_empty()
            && [op.operands[0], op.results[0]].iter().all(|v| p.ty(*v).bytes().0.is_multiple_of(ALIGNMENT))
    };
    of.retain(|ops| ops.len() > 1 && ops.iter().all(|i| whole(*i)));
    of
}

/// Products of one operand that one product may be made of.
fn triples(p: &Program, readers: &[Vec<usize>]) -> Vec<[usize; 3]> {
    let mut of: BTreeMap<ValueId, Vec<usize>> = BTreeMap::new();
    for (i, op) in p.ops.iter().enumerate().filter(|(_, op)| op.opcode == Opcode::Matmul) {
        of.entry(op.operands[0]).or_default().push(i);
    }
    let three = of.into_values().filter_map(|ops| <[usize; 3]>::try_from(ops).ok());
    let mut found: Vec<[usize; 3]> = three.filter(|t| may(p, readers, *t)).collect();
    found.sort_unstable();
    found
}

fn may(p: &Program, readers: &[Vec<usize>], triple: [usize; 3]) -> bool {
    let [first, ..] = triple.map(|i| &p.ops[i]);
    let shape = product(p, first);
    triple.iter().all(|i| {
        let op = &p.ops[*i];
        let alike = product(p, op) == shape
            && on_main(op)
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

/// The write to a cache that may be done with products: the only reader of one of their results, to a buffer that nothing reads or
/// writes in between.
fn written(p: &Program, readers: &[Vec<usize>], defs: &[Option<usize>], made: &[usize]) -> Option<usize> {
    made.iter().find_map(|i| {
        let result = p.ops[*i].results[0];
        let [w] = readers[result.0 as usize][..] else { return None };
        let (write, from) = (&p.ops[w], p.ty(result));
        let buffer = write.buffer.filter(|_| writes_rows(p, w))?;
        let touches = |op: &Op| {
            let lies_there = |v: ValueId| defs[v.0 as usize].is_some_and(|d| p.ops[d].buffer == Some(buffer));
            op.buffer == Some(buffer) || op.uses().into_iter().any(lies_there)
        };
        let free = !p.ops[made[0]..w].iter().any(touches);
        // Others may be part of a step that runs later than they stand.
        let alone = |op: &Op| matches!(op.opcode, Opcode::CacheRead | Opcode::CacheWrite | Opcode::Attention);
        let in_order = p.ops.iter().filter(|op| touches(op)).all(|op| on_main(op) && alone(op));
        // The row is the call's, or there is none.
        let told = write
            .key("row")
            .is_none_or(|v| defs[v.0 as usize].is_some_and(|d| p.ops[d].opcode == Opcode::Call));
        (free && in_order && told && p.buffer(buffer).ty.dtype == from.dtype).then_some(w)
    })
}

/// Whether it is on the stream that a program begins on: what follows in the program then follows in time.
fn on_main(op: &Op) -> bool {
    op.stream.0 == 0
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

/// The weights of an op: a table, or weight, bias and scale of a product.
fn parts(op: &Op) -> Vec<ValueId> {
    match op.opcode {
        Opcode::Modulation => vec![op.operands[0]],
        _ => [op.operands[1]].into_iter().chain(PARTS.iter().filter_map(|k| op.key(k))).collect(),
    }
}

/// Shape of all products at once.
fn whole(p: &Program, ops: &[usize]) -> Shape {
    let one = product(p, &p.ops[ops[0]]);
    Shape { columns: ops.len() as u64 * one.columns, ..one }
}

/// Where results of joined ops lie behind the slots: by value, bytes from there and elements from a row to the next; and the
/// end of all, from what already lies there.
pub(super) fn places<'a>(
    p: &Program,
    all: impl Iterator<Item = &'a Joined> + Clone,
    begin: u64,
) -> (Vec<(ValueId, Place)>, u64) {
    let (mut out, mut end) = (Vec::new(), begin);
    let result = |i: &usize| p.ops[*i].results[0];
    let bytes = |j: &Joined| j.made().iter().map(|i| p.ty(result(i)).bytes().0).sum::<u64>();
    for tables in all.clone().filter(|j| matches!(j, Joined::Tables(_))) {
        for i in tables.made() {
            let ty = p.ty(result(i));
            out.push((result(i), Place::Beside(end, ty.shape[1])));
            end += ty.bytes().0;
        }
    }
    // One set of products after another, in one place.
    let (at, mut most) = (end, 0);
    for products in all.filter(|j| matches!(j, Joined::Products { .. })) {
        let pitch = products.made().iter().map(|i| p.ty(result(i)).shape[1]).sum();
        let mut column = at;
        for i in products.made() {
            let ty = p.ty(result(i));
            out.push((result(i), Place::Beside(column, pitch)));
            column += ty.shape[1] * ty.dtype.bytes();
        }
        most = most.max(bytes(products));
    }
    (out, at + most)
}

impl Cuda {
    /// Of what may be joined that which can be: whose weights lie behind one another, and of which one product does all; that with a
    /// write if it is one that puts columns elsewhere.
    pub(super) fn join(
        &mut self,
        p: &Program,
        source: &mut dyn WeightSource,
    ) -> Result<Vec<Joined>, Diagnostic> {
        let mut out = Vec::new();
        for one in joined(p) {
            if !self.weights_beside(p, one.made(), source)? {
                continue;
            }
            match one {
                Joined::Products { made, write } => {
                    let shape = whole(p, &made);
                    let each = shape.columns / made.len() as u64;
                    if self.able(p, &made, shape, if write.is_some() { each } else { 0 })? {
                        let write = write.filter(|_| self.products.parts(shape, each));
                        out.push(Joined::Products { made, write });
                    }
                }
                Joined::Tables(_) => out.push(one),
            }
        }
        Ok(out)
    }

    fn weights_beside(
        &mut self,
        p: &Program,
        ops: &[usize],
        source: &mut dyn WeightSource,
    ) -> Result<bool, Diagnostic> {
        let defs = p.definitions();
        let mut all = true;
        for k in 0..parts(&p.ops[ops[0]]).len() {
            let made = ops.iter().map(|i| defs[parts(&p.ops[*i])[k].0 as usize].map(|d| &p.ops[d]));
            let made: Option<Vec<&Op>> = made.collect();
            let weights = made.filter(|m| m.iter().all(|w| w.opcode == Opcode::Weight));
            all &= match weights {
                Some(weights) => self.weights.beside(&self.seat, p, &weights, source)?,
                None => false,
            };
        }
        Ok(all)
    }

    /// Whether there is a product for all of these, made ready, of which so many columns are to lie by themselves.
    fn able(&mut self, p: &Program, made: &[usize], shape: Shape, apart: u64) -> Result<bool, Diagnostic> {
        let ty = p.ty(p.ops[made[0]].results[0]);
        let rows = self.kernels.prepare_rows(ty.shape[1], ty.dtype);
        rows.map_err(|e| refused(&format!("@{}", p.name), &e))?;
        let chosen = self.products.prepare_parted(shape, apart, &mut self.kernels.compiler);
        Ok(chosen.is_ok() && self.products.form(shape) == shape)
    }

    pub(super) fn joined(&mut self, program: usize, one: &Joined, stream: &Stream) -> Done<()> {
        let p = Arc::clone(&self.programs[program].program);
        let first = &p.ops[one.made()[0]];
        let out = self.at(program, first.results[0])?;
        match one {
            Joined::Products { made, write } => {
                let shape = whole(&p, made);
                let away = write.map(|w| self.away(program, made, w)).transpose()?;
                let at = products::At {
                    x: self.at(program, first.operands[0])?,
                    w: self.at(program, first.operands[1])?,
                    bias: self.key(program, first, "bias")?,
                    residual: 0,
                    out,
                    scales: (self.key(program, first, "x_scale")?, self.key(program, first, "w_scale")?),
                    away,
                };
                self.products.run(shape, at, stream)
            }
            Joined::Tables(ops) => self.modulate(program, first, ops.len() as u64, stream),
        }
    }

    /// The columns of a write's operand among those of all products, and where it puts them.
    fn away(&self, program: usize, made: &[usize], write: usize) -> Done<Away> {
        let p = &self.programs[program].program;
        let op = &p.ops[write];
        let wide = |i: &usize| p.ty(p.ops[*i].results[0]).shape[1];
        let before = made.iter().take_while(|i| p.ops[**i].results[0] != op.operands[0]);
        let first: u64 = before.map(wide).sum();
        let columns = (first, first + p.ty(op.operands[0]).shape[1]);
        Ok(Away { columns, to: self.written_at(program, op)?, row: self.key(program, op, "row")? })
    }
}

#[cfg(test)]
mod tests {
    use super::super::steps::{Step, steps};
    use super::*;
    use tessera_ir::{Slots, parse_all};

    fn program(text: &str) -> Program {
        parse_all(text, "test").expect("a program").remove(0)
    }

    /// A product of an operand with a weight of its own.
    fn product_of(x: &str, name: &str) -> String {
        format!(
            "%w{name} = weight \"w{name}\" : bf16[128, 128] %b{name} = weight \"b{name}\" : bf16[128] \
             %{name} = toperator.matmul %{x}, %w{name}, bias=%b{name} : bf16[16, 128] "
        )
    }

    fn norm_of(name: &str) -> String {
        format!("%{name}n = toperator.rms_norm %{name}, %n {{eps = 1e-6}} : bf16[16, 128] ")
    }

    fn named(p: &Program, joined: &[usize]) -> Vec<String> {
        joined.iter().map(|i| p.value(p.ops[*i].results[0]).name.clone()).collect()
    }

    #[test]
    fn three_products_of_one_operand_are_one_where_row_kernels_read_them() {
        let found = |reads_v: &str| -> Vec<Vec<String>> {
            let text = format!(
                "program @p {{ buffer @c : bf16[32, 128] buffer @d : bf16[32, 128] %x = input : bf16[16, 128] \
                 %n = weight \"n\" : f32[128] %row = call \"row\" : i64 {}{}{}{} \
                 cache.write @c, %k, row=%row {reads_v} output \"q\", %qn }}",
                product_of("x", "v"),
                product_of("x", "q"),
                product_of("x", "k"),
                norm_of("q"),
            );
            let p = program(&text);
            triples(&p, &p.readers()).iter().map(|t| named(&p, t)).collect()
        };
        assert_eq!(found("cache.write @d, %v, row=%row"), [["v", "q", "k"]]);
        assert!(found("%s = toperator.silu %v : bf16[16, 128] output \"s\", %s").is_empty());
    }

    #[test]
    fn a_cache_is_written_with_the_products_unless_somebody_looks_at_it_in_between() {
        let found = |between: &str, row: &str| -> Option<String> {
            let three = ["v", "q", "k"].map(|n| product_of("x", n)).concat();
            let text = format!(
                "program @p {{ buffer @c : bf16[32, 128] buffer @d : bf16[32, 128] %x = input : bf16[16, 128] \
                 %n = weight \"n\" : f32[128] %row = call \"row\" : i64 %old = cache.read @d : bf16[32, 128] \
                 {three}{}{}{between} cache.write @c, %kn, row=%row cache.write @d, %v, {row} output \"q\", %qn }}",
                norm_of("q"),
                norm_of("k"),
            );
            let p = program(&text);
            let [Joined::Products { write, .. }] = joined(&p)[..] else { panic!("no products to join") };
            write.map(|w| p.value(p.ops[w].operands[0]).name.clone())
        };
        assert_eq!(found("", "row=%row"), Some("v".to_string()));
        let reads = "%s = toperator.silu %old : bf16[32, 128] output \"s\", %s";
        assert_eq!(found(reads, "row=%row"), None);
        assert_eq!(found("cache.write @d, %qn, row=%row", "row=%row"), None);
    }

    #[test]
    fn a_write_is_done_with_its_products_or_by_itself() {
        // How often products are joined, and whether the write is a step of its own.
        let found = |before: &str, after: &str| -> (usize, bool) {
            let three = |x: &str, names: [&str; 3]| names.map(|n| product_of(x, n)).concat();
            let text = format!(
                "program @p {{ buffer @d : bf16[32, 128] %x = input : bf16[16, 128] %y = input : bf16[16, 128] \
                 %n = weight \"n\" : f32[128] %row = call \"row\" : i64 {}{}{before}{}{}\
                 cache.write @d, %b, row=%row {after} output \"a\", %an }}",
                three("x", ["q", "k", "v"]),
                ["k", "v"].map(norm_of).concat(),
                three("y", ["a", "b", "c"]),
                ["a", "c"].map(norm_of).concat(),
            );
            let p = program(&text);
            let n = p.values.len();
            let slots = Slots { bytes: vec![1 << 20; n], of: (0..n as u32).map(Some).collect() };
            let all = steps(&p, &slots, &joined(&p));
            let mut ops: Vec<usize> = all.iter().flat_map(Step::ops).collect();
            let (launched, write) = (ops.len(), p.ops.iter().position(|o| o.opcode == Opcode::CacheWrite));
            ops.sort_unstable();
            ops.dedup();
            assert_eq!(ops.len(), launched, "an op in two steps");
            let apart = all.iter().any(|s| Some(s) == write.map(Step::One).as_ref());
            (all.iter().filter(|s| matches!(s, Step::Joined(_))).count(), apart)
        };
        assert_eq!(found(&norm_of("q"), ""), (2, false));
        assert_eq!(found("", &norm_of("q")), (1, true));
    }

    #[test]
    fn rows_of_products_are_read_before_the_next_ones_take_their_place() {
        let joined_of = |before: &str, after: &str| -> usize {
            let three = |x: &str, names: [&str; 3]| names.map(|n| product_of(x, n)).concat();
            let text = format!(
                "program @p {{ %x = input : bf16[16, 128] %y = input : bf16[16, 128] %n = weight \"n\" : f32[128] \
                 {}{}{before}{}{after}{} output \"a\", %an }}",
                three("x", ["q", "k", "v"]),
                ["k", "v"].map(norm_of).concat(),
                three("y", ["a", "b", "c"]),
                ["a", "b", "c"].map(norm_of).concat(),
            );
            let p = program(&text);
            let n = p.values.len();
            let slots = Slots { bytes: vec![1 << 20; n], of: (0..n as u32).map(Some).collect() };
            let all = steps(&p, &slots, &joined(&p));
            all.iter().filter(|s| matches!(s, Step::Joined(_))).count()
        };
        assert_eq!(joined_of(&norm_of("q"), ""), 2);
        assert_eq!(joined_of("", &norm_of("q")), 1);
    }

    #[test]
    fn tables_of_one_embedding_are_made_at_once() {
        let text = "program @p { %e = input : f32[2, 384] %f = input : f32[2, 64] %w = input : f32[2, 384] \
            %a = weight \"a\" : f32[1, 6, 64] %b = weight \"b\" : f32[1, 6, 64] %c = weight \"c\" : f32[1, 2, 64] \
            %x = toperator.modulation %a, %e : f32[2, 384] %y = toperator.modulation %b, %e : f32[2, 384] \
            %z = toperator.modulation %c, %f : f32[2, 128] %o = toperator.modulation %b, %w : f32[2, 384] \
            output \"x\", %x output \"y\", %y output \"z\", %z output \"o\", %o }";
        let p = program(text);
        let found: Vec<Vec<String>> = tables(&p).iter().map(|ops| named(&p, ops)).collect();
        assert_eq!(found, [["x", "y"]]);
    }
}
