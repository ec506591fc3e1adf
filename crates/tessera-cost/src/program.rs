//! What the ops of a lowered program take, under a machine and the habits of its executor.
//!
//! Prices are of one rank: work of an op on its own device, and of a collective from when its last member is there.
//! Where an executor makes one kernel of several ops, the first of them carries the time of all and the others take none:
//! whatever the kernel reads exists by then.

mod kernels;

use std::collections::BTreeSet;

use tessera_ir::{DType, Op, Opcode, Program, ValueId, cost};
use tessera_mesh::{Cluster, Group, Mesh, Precision, Rank};

use crate::{AttentionWork, CollectiveOp, Machine, Span, Transfer};

/// What an op mostly does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Doing {
    /// A matrix product.
    Product,
    /// Attention.
    Attention,
    /// A pass over memory.
    Pass,
    /// Moves data between ranks; its price is what it does on the device beforehand.
    Exchange,
    /// Takes what was moved; its price is what it does on the device afterwards.
    Taking,
    /// Nothing on the device.
    Nothing,
}

/// What one op takes on its own device.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Price {
    /// What it does.
    pub doing: Doing,
    /// Time on the device in nanoseconds, without launches.
    pub ns: f64,
    /// Of a price at full speed the part that a slower pace stretches: products and attention.
    pub paced_ns: f64,
    /// Kernels the host launches for it.
    pub launches: u32,
    /// Floating-point operations.
    pub flops: f64,
}

impl Price {
    const NOTHING: Price = Price { doing: Doing::Nothing, ns: 0.0, paced_ns: 0.0, launches: 0, flops: 0.0 };

    /// What an op that was priced at full speed takes at a share `pace` of it, in nanoseconds.
    #[must_use]
    pub fn at(&self, pace: f64) -> f64 {
        if pace == 1.0 { self.ns } else { self.paced_ns / pace + (self.ns - self.paced_ns) }
    }
}

/// A program with its prices under a machine.
#[derive(Debug, Clone)]
pub struct Priced<'a> {
    /// The price of each op, in their order.
    pub ops: Vec<Price>,
    machine: &'a Machine,
    program: &'a Program,
    widths: Widths,
}

impl<'a> Priced<'a> {
    /// Prices a program whose products and attention run at a share `pace` of full speed.
    #[must_use]
    pub fn of(machine: &'a Machine, program: &'a Program, pace: f64) -> Priced<'a> {
        let habits = &machine.profile.habits;
        let widths = Widths::of(program, habits.precision);
        let defs = program.definitions();
        let mut ops: Vec<Price> =
            program.ops.iter().map(|op| alone(machine, program, &widths, &defs, op)).collect();
        if habits.joins_products {
            for set in kernels::joined_products(program) {
                let joined = joined_ns(machine, program, &widths, &set);
                // What each does besides its product stays.
                let besides: f64 = set.iter().map(|i| ops[*i].ns - ops[*i].paced_ns).sum();
                for i in &set[1..] {
                    (ops[*i].ns, ops[*i].paced_ns, ops[*i].launches) = (0.0, 0.0, 0);
                }
                let first = &mut ops[set[0]];
                (first.ns, first.paced_ns) = (joined + besides, joined);
            }
        }
        if habits.fuses_passes {
            let readers = program.readers();
            for set in kernels::fused_passes(program, &defs) {
                let bytes = kernels::traffic(program, &widths, &readers, &set);
                for (at, i) in set.iter().enumerate() {
                    ops[*i].ns = if at == 0 { working_pass_ns(machine, bytes) } else { 0.0 };
                    ops[*i].launches = u32::from(at == 0);
                }
            }
        }
        for price in &mut ops {
            price.ns = price.at(pace);
        }
        Priced { ops, machine, program, widths }
    }

    /// What the program takes by itself, nanoseconds from its first launch to its last end: its kernels one after another,
    /// none before the host has launched it.
    #[must_use]
    pub fn alone_ns(&self) -> f64 {
        let launch_ns = self.machine.launch_ns();
        let (host_ns, device_ns) = self.ops.iter().fold((0.0, 0.0f64), |(host, device), op| {
            let host = host + launch_ns * f64::from(op.launches);
            (host, if op.ns > 0.0 { device.max(host) + op.ns } else { device })
        });
        device_ns.max(host_ns)
    }

    /// What a collective, send or receive takes from when its last member is there, and what this rank sends. None for
    /// other ops.
    #[must_use]
    pub fn exchange(&self, op: usize, span: Span) -> Option<Transfer> {
        let (what, bytes) = self.payload(op)?;
        let mut transfer = self.machine.collective(what, bytes, span);
        if self.program.ops[op].opcode == Opcode::Recv {
            transfer.sent = [0.0; 3];
        }
        Some(transfer)
    }

    /// What a collective, send or receive is, and its full buffer in bytes as [`Machine::collective`] counts it. None for
    /// other ops, and for an all-gather over no group.
    #[must_use]
    pub fn payload(&self, op: usize) -> Option<(CollectiveOp, f64)> {
        let (p, op) = (self.program, self.program.ops.get(op)?);
        let operand = || op.operands.first().map_or(0.0, |v| self.widths.bytes(p, *v));
        Some(match op.opcode {
            Opcode::AllReduce => (CollectiveOp::AllReduce, operand()),
            // Equal pieces: the whole is as many as there are members.
            Opcode::AllGather => {
                (CollectiveOp::AllGather, operand() * f64::from(p.mesh.group_size(op.group()?)))
            }
            Opcode::ReduceScatter => (CollectiveOp::ReduceScatter, operand()),
            Opcode::AllToAll => (CollectiveOp::AllToAll, operand()),
            Opcode::Broadcast => (CollectiveOp::Broadcast, operand()),
            Opcode::Send => (CollectiveOp::SendRecv, operand()),
            Opcode::Recv => (CollectiveOp::SendRecv, self.received(op)),
            _ => return None,
        })
    }

    fn received(&self, op: &Op) -> f64 {
        self.program.given(op).map_or(0.0, |r| self.widths.bytes(self.program, r))
    }
}

/// The ranks that an op meets and how many domains of the cluster they touch, seen from one of them. A send or receive
/// meets its two ends alone.
#[must_use]
pub fn span(cluster: &Cluster, mesh: &Mesh, rank: Rank, op: &Op) -> Span {
    let members = op.group().map_or_else(Vec::new, |g: Group| mesh.members(rank, g));
    let peer = ["to", "from"].into_iter().find_map(|k| op.int(k)).and_then(|at| usize::try_from(at).ok());
    match (op.opcode, peer.and_then(|at| members.get(at))) {
        (Opcode::Send | Opcode::Recv, Some(other)) => span_of(cluster, &[rank, *other]),
        _ => span_of(cluster, &members),
    }
}

/// How many ranks, and how many domains of the cluster they touch. Ranks stand on the cluster's devices in order.
#[must_use]
pub fn span_of(cluster: &Cluster, met: &[Rank]) -> Span {
    let domains: BTreeSet<u32> = met.iter().map(|r| r.0 / cluster.domain.max(1)).collect();
    Span { ranks: met.len().max(1) as u32, domains: domains.len().max(1) as u32 }
}

/// Bytes that numbers of a program take: as its types say where one of them is narrower than f32; a program all in f32 leaves
/// the choice to its executor.
#[derive(Debug, Clone)]
pub(crate) struct Widths {
    /// The executor's precision, where the choice is left to it.
    precision: Option<Precision>,
    /// Values that stay f32 whatever the precision.
    exact: Vec<bool>,
}

impl Widths {
    pub(crate) fn of(p: &Program, precision: Precision) -> Widths {
        let mut exact = vec![false; p.values.len()];
        for op in &p.ops {
            let keeps = match op.opcode {
                Opcode::RowSquareSum | Opcode::TimeEmbed => true,
                Opcode::AllReduce | Opcode::Wait => op.operands.iter().any(|v| exact[v.0 as usize]),
                _ => false,
            };
            for r in op.results.iter().filter(|_| keeps) {
                exact[r.0 as usize] = true;
            }
        }
        let types = p.values.iter().map(|v| &v.ty).chain(p.buffers.iter().map(|b| &b.ty));
        let left = types.into_iter().all(|t| !matches!(t.dtype, DType::Bf16 | DType::F16 | DType::E4m3));
        Widths { precision: left.then_some(precision), exact }
    }

    /// What an op on this value is computed in.
    pub(crate) fn precision(&self, p: &Program, v: ValueId) -> Precision {
        self.precision.unwrap_or(match p.ty(v).dtype {
            DType::E4m3 => Precision::Fp8,
            DType::Bf16 | DType::F16 => Precision::Bf16,
            _ => Precision::F32,
        })
    }

    pub(crate) fn bytes(&self, p: &Program, v: ValueId) -> f64 {
        let ty = p.ty(v);
        let of = match self.precision {
            Some(precision) if ty.dtype == DType::F32 && !self.exact[v.0 as usize] => precision.bytes(),
            _ => ty.dtype.bytes() as f64,
        };
        ty.elements() as f64 * of
    }
}

/// An op by itself, one kernel if any.
fn alone(m: &Machine, p: &Program, widths: &Widths, defs: &[Option<usize>], op: &Op) -> Price {
    let kernel = |doing, ns: f64| Price {
        doing,
        ns,
        paced_ns: if doing == Doing::Pass { 0.0 } else { ns },
        launches: 1,
        flops: cost(p, op).flops.0 as f64,
    };
    let exchange = Price { doing: Doing::Exchange, launches: 1, ..Price::NOTHING };
    match op.opcode {
        Opcode::Matmul => product(m, p, widths, op),
        Opcode::Attention => kernel(Doing::Attention, m.attention_ns(&attention(widths, p, op))),
        Opcode::Dot => {
            let (x, y) = (op.operands[0], op.operands[1]);
            let k = p.ty(x).shape.last().map_or(1.0, |k| *k as f64);
            let rows = p.ty(x).elements() as f64 / k;
            let columns = op.results.first().map_or(1.0, |r| p.ty(*r).elements() as f64 / rows);
            let batch = (p.ty(y).elements() as f64 / (k * columns)).max(1.0);
            kernel(Doing::Product, m.grouped_ns(batch, rows / batch, columns, k, widths.precision(p, x)))
        }
        Opcode::MoeRoute => {
            let bank: Vec<f64> =
                op.buffer.map_or_else(Vec::new, |b| p.buffer(b).ty.shape.iter().map(|n| *n as f64).collect());
            let [experts, out, k] = bank[..] else { return Price::NOTHING };
            let top_k = op.int("top_k").unwrap_or(2) as f64;
            let rows = extent(p, op.operands[0], 0) * top_k / experts.max(1.0);
            kernel(Doing::Product, m.grouped_ns(experts, rows, out, k, widths.precision(p, op.operands[0])))
        }
        Opcode::AllToAll => exchange.with(repack(m, p, widths, op, true)),
        Opcode::Wait => Price { doing: Doing::Taking, ..Price::NOTHING }.with(unpack(m, p, widths, defs, op)),
        _ if op.opcode.is_collective() => exchange,
        _ if kernels::is_pass(op.opcode) => {
            let bytes = kernels::traffic_alone(p, widths, op);
            let copies = kernels::only_copies(op.opcode);
            kernel(Doing::Pass, if copies { m.pass_ns(bytes) } else { working_pass_ns(m, bytes) })
        }
        _ => Price::NOTHING,
    }
}

impl Price {
    /// One more kernel, if it takes any time.
    fn with(self, pass: Option<f64>) -> Price {
        match pass {
            Some(ns) => Price { ns: self.ns + ns, launches: self.launches + 1, ..self },
            None => self,
        }
    }
}

/// Products of one left operand as one; `set` has one at least.
fn joined_ns(m: &Machine, p: &Program, widths: &Widths, set: &[usize]) -> f64 {
    let x = p.ops[set[0]].operands[0];
    let [rows, k] = [0, 1].map(|d| extent(p, x, d));
    let columns: f64 = set.iter().map(|i| extent(p, p.ops[*i].operands[1], 0)).sum();
    m.matmul_ns(rows, columns, k, widths.precision(p, x))
}

fn product(m: &Machine, p: &Program, widths: &Widths, op: &Op) -> Price {
    let habits = &m.profile.habits;
    let [rows, k] = [0, 1].map(|d| extent(p, op.operands[0], d));
    let columns = extent(p, op.operands[1], 0);
    let ns = m.matmul_ns(rows, columns, k, widths.precision(p, op.operands[0]));
    let price =
        Price { doing: Doing::Product, ns, paced_ns: ns, launches: 1, flops: cost(p, op).flops.0 as f64 };
    let bias = op.key("bias").is_some() && !habits.bias_in_product;
    let act = op.str("act").is_some() && !habits.act_in_product;
    let written = op.results.first().map_or(0.0, |r| widths.bytes(p, *r));
    price.with((bias || act).then(|| working_pass_ns(m, 2.0 * written)))
}

/// A pass that computes on the way.
fn working_pass_ns(m: &Machine, bytes: f64) -> f64 {
    m.pass_ns(bytes / m.profile.habits.pass_share)
}

fn attention(widths: &Widths, p: &Program, op: &Op) -> AttentionWork {
    let precision = widths.precision(p, op.operands[0]);
    let width = extent(p, op.operands[0], 1);
    let head = op.int("head_dim").map_or(width, |h| h as f64).max(1.0);
    AttentionWork {
        queries: extent(p, op.operands[0], 0),
        keys: extent(p, op.operands[1], 0),
        heads: width / head,
        kv_heads: extent(p, op.operands[1], 1) / head,
        qk: head,
        v: head,
        causal: false,
        precision,
        key_bytes: 2.0 * head * precision.bytes(),
    }
}

/// The pass that brings the pieces of an all-to-all together before it goes out: where columns are cut, each peer's piece
/// lies scattered over the rows.
fn repack(m: &Machine, p: &Program, widths: &Widths, op: &Op, before: bool) -> Option<f64> {
    let habits = &m.profile.habits;
    let cut = op.int(if before { "split" } else { "concat" })?;
    let bytes = widths.bytes(p, *op.operands.first()?);
    (habits.packs_exchanges && cut > 0).then(|| m.pass_ns(2.0 * bytes))
}

/// The pass that spreads what came over the rows, where columns were joined.
fn unpack(m: &Machine, p: &Program, widths: &Widths, defs: &[Option<usize>], wait: &Op) -> Option<f64> {
    let ticket = wait.operands.first()?;
    let issue = defs.get(ticket.0 as usize).copied().flatten().map(|i| &p.ops[i])?;
    if issue.opcode == Opcode::AllToAll { repack(m, p, widths, issue, false) } else { None }
}

fn extent(p: &Program, v: ValueId, dim: usize) -> f64 {
    p.ty(v).shape.get(dim).map_or(1.0, |n| *n as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;
    use crate::habits::Habits;
    use tessera_ir::{Builder, Type};
    use tessera_mesh::{Axis, AxisLayout, Reduction, Shard, clusters};

    fn machine(habits: Habits) -> Machine {
        let profile = Profile { habits, ..Profile::named("torch-2.11").unwrap() };
        Machine::new(clusters::named("hgx-h200").unwrap(), profile)
    }

    fn fusing() -> Habits {
        Habits { precision: Precision::Bf16, fuses_passes: true, joins_products: true, ..Habits::default() }
    }

    fn f32(shape: &[u64]) -> Type {
        Type::new(DType::F32, shape)
    }

    /// Queries, keys and values of 8 rows, 64 wide; keys normed, turned and kept.
    fn keys() -> Program {
        let mut b = Builder::logical("p");
        let x = b.input("x", f32(&[8, 64]));
        let start = b.call("start", Type::scalar(DType::I64));
        let made = ["q", "k", "v"].map(|n| {
            let w = b.weight(n, f32(&[64, 64]));
            b.op(Opcode::Matmul, &[x, w])
        });
        let norm = b.weight("norm", f32(&[64]));
        b.attr("eps", 1e-6);
        let k = b.op(Opcode::RmsNorm, &[made[1], norm]);
        b.attr("head_dim", 32u64).attr("grid", vec![2, 2, 2]).key("start", start);
        let k = b.op(Opcode::Rope, &[k]);
        let buffer = b.buffer("kv.0.k", f32(&[8, 64]));
        b.write(buffer, k);
        b.finish().unwrap()
    }

    fn of(p: &Program, prices: &Priced<'_>, opcode: Opcode) -> Vec<f64> {
        p.ops.iter().zip(&prices.ops).filter(|(o, _)| o.opcode == opcode).map(|(_, x)| x.ns).collect()
    }

    #[test]
    fn neighbours_are_one_kernel() {
        let p = keys();
        let m = machine(fusing());
        let prices = Priced::of(&m, &p, 1.0);
        assert_eq!(
            of(&p, &prices, Opcode::Matmul),
            [m.matmul_ns(8.0, 192.0, 64.0, Precision::Bf16), 0.0, 0.0]
        );
        // Keys in, weights in, the start, keys out: the two values between never reach memory.
        let bytes = 8.0 * 64.0 * 2.0 + 64.0 * 2.0 + 8.0 + 8.0 * 64.0 * 2.0;
        assert_eq!(of(&p, &prices, Opcode::RmsNorm), [m.pass_ns(bytes)]);
        assert_eq!([of(&p, &prices, Opcode::Rope), of(&p, &prices, Opcode::CacheWrite)].concat(), [0.0, 0.0]);
        assert_eq!(prices.ops.iter().map(|o| o.launches).sum::<u32>(), 2);

        let plain = machine(Habits { precision: Precision::Bf16, ..Habits::default() });
        let apart = Priced::of(&plain, &p, 1.0);
        assert_eq!(apart.ops.iter().map(|o| o.launches).sum::<u32>(), 6);
        let sum = |p: &Priced<'_>| p.ops.iter().map(|o| o.ns).sum::<f64>();
        assert!(sum(&apart) > sum(&prices));
        let twice = Priced::of(&plain, &p, 0.5);
        assert_eq!(of(&p, &twice, Opcode::Matmul)[0], 2.0 * of(&p, &apart, Opcode::Matmul)[0]);
        assert_eq!(of(&p, &twice, Opcode::Rope), of(&p, &apart, Opcode::Rope));
    }

    #[test]
    fn a_program_that_says_its_dtypes_is_priced_by_them() {
        let of_dtype = |dtype| {
            let mut b = Builder::logical("p");
            let ty = |shape: &[u64]| Type::new(dtype, shape);
            let (x, w) = (b.input("x", ty(&[4096, 4096])), b.weight("w", ty(&[4096, 4096])));
            let y = b.op(Opcode::Matmul, &[x, w]);
            let y = b.attr("to", if dtype == DType::F32 { "bf16" } else { "f32" }).op(Opcode::Cast, &[y]);
            b.op(Opcode::Silu, &[y]);
            b.finish().unwrap()
        };
        let (f32, bf16) = (of_dtype(DType::F32), of_dtype(DType::Bf16));
        let m = machine(Habits { precision: Precision::Bf16, ..Habits::default() });
        let ns = |p: &Program| {
            let prices = Priced::of(&m, p, 1.0);
            [Opcode::Matmul, Opcode::Cast, Opcode::Silu].map(|o| of(p, &prices, o)[0])
        };
        let n = 4096.0 * 4096.0;
        let product = |p| m.matmul_ns(4096.0, 4096.0, 4096.0, p);
        let passes = |bytes: f64| working_pass_ns(&m, bytes * n);
        assert_eq!(ns(&bf16), [product(Precision::Bf16), m.pass_ns(6.0 * n), passes(8.0)]);
        // Its product is of f32 operands, for it holds narrower values elsewhere.
        assert_eq!(ns(&f32), [product(Precision::F32), m.pass_ns(6.0 * n), passes(4.0)]);
    }

    #[test]
    fn what_a_product_leaves_to_a_pass_costs_one() {
        let mut b = Builder::logical("p");
        let (x, w) = (b.input("x", f32(&[8, 64])), b.weight("w", f32(&[64, 64])));
        let bias = b.weight("b", f32(&[64]));
        b.attr("act", "gelu_tanh").key("bias", bias);
        b.op(Opcode::Matmul, &[x, w]);
        let p = b.finish().unwrap();
        let ns = |h: Habits| of(&p, &Priced::of(&machine(h), &p, 1.0), Opcode::Matmul)[0];
        let all = Habits::default();
        let (one, other) =
            (Habits { act_in_product: false, ..all }, Habits { bias_in_product: false, ..all });
        let pass = machine(all).pass_ns(2.0 * 8.0 * 64.0 * 4.0);
        assert!((ns(one) - ns(all) - pass).abs() < 1e-6 * pass);
        assert_eq!(ns(one), ns(other));
    }

    #[test]
    fn sums_of_squares_travel_whole_and_columns_are_packed() {
        let mut b = Builder::role("p", "r", "tp=2".parse().unwrap(), &["compute", "tp_collective"]);
        let by_rows = AxisLayout::Shard(Shard::of(0, 8, 1, 2).unwrap());
        let x =
            b.input("x", f32(&[8, 64]).on(Axis::Tp, AxisLayout::Shard(Shard::of(1, 128, 64, 2).unwrap())));
        let y = b.input("y", f32(&[4, 128]).on(Axis::Tp, by_rows));
        let sums = b.op(Opcode::RowSquareSum, &[x]);
        b.attr("axis", "tp").attr("reduction", Reduction::Sum.name());
        let t = b.issue(Opcode::AllReduce, &[sums]);
        b.wait(t, None);
        b.attr("axis", "tp").attr("concat", 0u64).attr("split", 1u64).attr("unit", 64u64);
        let t = b.issue(Opcode::AllToAll, &[y]);
        let z = b.wait(t, None).unwrap();
        b.attr("axis", "tp").attr("concat", 1u64).attr("split", 0u64);
        let t = b.issue(Opcode::AllToAll, &[z]);
        b.wait(t, None);
        let p = b.finish().unwrap();
        let m = machine(Habits { packs_exchanges: true, ..fusing() });
        let prices = Priced::of(&m, &p, 1.0);
        let two = Span { ranks: 2, domains: 1 };
        let sent: Vec<f64> =
            (0..p.ops.len()).filter_map(|i| prices.exchange(i, two)).map(|t| t.sent[0]).collect();
        assert_eq!(sent, [8.0 * 4.0, 4.0 * 128.0 * 2.0 / 2.0, 8.0 * 64.0 * 2.0 / 2.0]);
        let copy = m.pass_ns(2.0 * 4.0 * 128.0 * 2.0);
        assert_eq!(of(&p, &prices, Opcode::AllToAll), [copy, 0.0], "packed before the first");
        assert_eq!(of(&p, &prices, Opcode::Wait), [0.0, 0.0, copy], "unpacked after the second");
    }
}
