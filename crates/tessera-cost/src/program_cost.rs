//! Estimated times of the ops of a lowered program on a cluster with an executor.
//!
//! Estimates are for one rank: an op's work on its own device, and a collective's time from the
//! arrival of its last member. If an executor fuses several ops into one kernel, the first op
//! carries the time of the kernel and the others take none, because all inputs of the kernel exist
//! by then.

mod expert_fetch;
mod kernel_fusion;

use std::collections::BTreeSet;

use tessera_ir::op_traits::KernelClass;
use tessera_ir::{DType, Op, OpView, Opcode, PeerPosition, Program, ValueId, op_workload, views};
use tessera_mesh::{Cluster, Group, Mesh, Precision, Rank};

pub use expert_fetch::{ExpertFetch, price_expert_fetches};

use crate::{Algorithm, AttentionWork, CollectiveCost, CollectiveOp, GroupSpan, MachineModel};

/// The activity that takes most of an op's time and decides whether throttling slows the op.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum OpActivity {
    /// A GEMM, which throttling slows.
    Gemm,
    /// An attention kernel, which throttling slows like a GEMM.
    Attention,
    /// A kernel limited by memory bandwidth, which throttling does not slow.
    MemoryBound,
    /// A transfer between ranks; its estimate covers the device work before the transfer.
    Transfer,
    /// A wait for a transfer; its estimate covers the device work after the transfer.
    Wait,
    /// The op launches no kernel and takes no device time.
    Nothing,
}

/// Estimated device time, kernel launches and FLOPs of one op on one rank. The transfer of a
/// collective and the wait for other ranks are not included.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OpEstimate {
    /// The kind of work that dominates the op and decides whether throttling slows it.
    pub activity: OpActivity,
    /// Device time in nanoseconds, without launch overhead.
    pub ns: f64,
    /// The part of the full-speed time that throttling stretches: GEMMs and attention.
    pub throttled_ns: f64,
    /// Number of kernels that the host launches for the op.
    pub launches: u32,
    /// Number of floating-point operations of the op on this rank.
    pub flops: f64,
}

impl OpEstimate {
    const ZERO: OpEstimate =
        OpEstimate { activity: OpActivity::Nothing, ns: 0.0, throttled_ns: 0.0, launches: 0, flops: 0.0 };

    /// Returns the time in nanoseconds at the share `pace` of full speed, for an estimate made at
    /// full speed.
    #[must_use]
    pub fn ns_at_speed(&self, pace: f64) -> f64 {
        if pace == 1.0 { self.ns } else { self.throttled_ns / pace + (self.ns - self.throttled_ns) }
    }
}

/// A program with the estimated cost of each op.
#[derive(Debug, Clone)]
pub struct ProgramEstimate<'a> {
    /// Cost of each op, in program order.
    pub ops: Vec<OpEstimate>,
    machine: &'a MachineModel,
    program: &'a Program,
}

impl<'a> ProgramEstimate<'a> {
    /// Estimates a program whose GEMMs and attention run at the share `pace` of full speed.
    #[must_use]
    pub fn new(machine: &'a MachineModel, program: &'a Program, pace: f64) -> ProgramEstimate<'a> {
        let executor = &machine.profile.executor;
        let defs = program.defining_ops();
        let mut ops: Vec<OpEstimate> =
            program.ops.iter().map(|op| estimate_op(machine, program, &defs, op)).collect();
        if executor.merges_gemms {
            for set in kernel_fusion::mergeable_matmuls(program) {
                let merged = merged_gemm_ns(machine, program, &set);
                // The work of each op besides its matmul remains.
                let extra: f64 = set.iter().map(|i| ops[*i].ns - ops[*i].throttled_ns).sum();
                for i in &set[1..] {
                    (ops[*i].ns, ops[*i].throttled_ns, ops[*i].launches) = (0.0, 0.0, 0);
                }
                let first = &mut ops[set[0]];
                (first.ns, first.throttled_ns) = (merged + extra, merged);
            }
        }
        if executor.fuses_elementwise {
            let readers = program.value_readers();
            for set in kernel_fusion::fused_elementwise(program, &defs) {
                let bytes = kernel_fusion::kernel_traffic(program, &readers, &set);
                for (at, i) in set.iter().enumerate() {
                    ops[*i].ns = if at == 0 { elementwise_ns(machine, bytes) } else { 0.0 };
                    ops[*i].launches = u32::from(at == 0);
                }
            }
        }
        for price in &mut ops {
            price.ns = price.ns_at_speed(pace);
        }
        ProgramEstimate { ops, machine, program }
    }

    /// Returns the time of the program alone, in nanoseconds from its first launch to its last end:
    /// its kernels run one after another, and no kernel starts before the host has launched it.
    #[must_use]
    pub fn standalone_ns(&self) -> f64 {
        let launch_ns = self.machine.launch_ns();
        let (host_ns, device_ns) = self.ops.iter().fold((0.0, 0.0f64), |(host, device), op| {
            let host = host + launch_ns * f64::from(op.launches);
            (host, if op.ns > 0.0 { device.max(host) + op.ns } else { device })
        });
        device_ns.max(host_ns)
    }

    /// Returns the cost of a collective, send or receive from the arrival of its last member, with
    /// the bytes that this rank sends. A tagged collective runs by the algorithm of its tag. Returns `None` for other ops.
    #[must_use]
    pub fn transfer_cost(&self, op: usize, span: GroupSpan) -> Option<CollectiveCost> {
        let (what, bytes) = self.transfer_payload(op)?;
        let tag = self.program.ops[op].algorithm_tag().map(Algorithm::from);
        let mut transfer = self.machine.tagged_collective_cost(what, bytes, span, tag);
        if self.program.ops[op].opcode == Opcode::Recv {
            transfer.sent_bytes = [0.0; 3];
        }
        Some(transfer)
    }

    /// Returns the [`transfer_payload`] of an op of the program.
    #[must_use]
    pub fn transfer_payload(&self, op: usize) -> Option<(CollectiveOp, f64)> {
        transfer_payload(self.program, self.program.ops.get(op)?)
    }
}

/// Returns the kind of a collective, send or receive, and its full buffer in bytes as
/// [`MachineModel::collective_cost`] counts it. Returns `None` for other ops, and for an
/// all-gather without a group.
#[must_use]
pub fn transfer_payload(p: &Program, op: &Op) -> Option<(CollectiveOp, f64)> {
    let operand = || op.operands.first().map_or(0.0, |v| value_bytes(p, *v));
    let received = || p.collective_result(op).map_or(0.0, |r| value_bytes(p, r));
    Some(match op.opcode {
        Opcode::AllReduce => (CollectiveOp::AllReduce, operand()),
        // Shards are equal, so the full buffer is one shard times the number of members.
        Opcode::AllGather => {
            (CollectiveOp::AllGather, operand() * f64::from(p.mesh.group_size(op.comm_group()?)))
        }
        Opcode::ReduceScatter => (CollectiveOp::ReduceScatter, operand()),
        Opcode::AllToAll => (CollectiveOp::AllToAll, operand()),
        // A row of each frame to either neighbour, and one from either.
        Opcode::HaloExchange => (CollectiveOp::SendRecv, received()),
        Opcode::Broadcast => (CollectiveOp::Broadcast, operand()),
        Opcode::Send => (CollectiveOp::SendRecv, operand()),
        Opcode::Recv => (CollectiveOp::SendRecv, received()),
        _ => return None,
    })
}

/// Returns the span of the ranks that take part in an op, including `rank`. A send or receive
/// involves only its two ends.
#[must_use]
pub fn op_span(cluster: &Cluster, mesh: &Mesh, rank: Rank, op: &Op) -> GroupSpan {
    let members = op.comm_group().map_or_else(Vec::new, |g: Group| mesh.group_members(rank, g));
    let (PeerPosition::To(at) | PeerPosition::From(at)) = match op.peer_position() {
        Some(peer) => peer,
        None => return ranks_span(cluster, &members),
    };
    match usize::try_from(at).ok().and_then(|at| members.get(at)) {
        Some(other) => ranks_span(cluster, &[rank, *other]),
        None => ranks_span(cluster, &members),
    }
}

/// Returns the number of ranks and the number of domains that they touch. Ranks are placed on the
/// cluster's devices in order.
#[must_use]
pub fn ranks_span(cluster: &Cluster, met: &[Rank]) -> GroupSpan {
    let domains: BTreeSet<u32> = met.iter().map(|r| r.0 / cluster.domain_size.max(1)).collect();
    GroupSpan { ranks: met.len().max(1) as u32, domains: domains.len().max(1) as u32 }
}

/// Returns the precision in which an op with this operand computes.
fn value_precision(p: &Program, v: ValueId) -> Precision {
    match p.type_of(v).dtype {
        DType::E4m3 => Precision::Fp8,
        DType::Bf16 | DType::F16 => Precision::Bf16,
        _ => Precision::F32,
    }
}

fn value_bytes(p: &Program, v: ValueId) -> f64 {
    p.type_of(v).byte_size().0 as f64
}

/// Estimates an op alone, as one kernel or none.
fn estimate_op(m: &MachineModel, p: &Program, defs: &[Option<usize>], op: &Op) -> OpEstimate {
    let kernel = |doing, ns: f64| OpEstimate {
        activity: doing,
        ns,
        throttled_ns: if doing == OpActivity::MemoryBound { 0.0 } else { ns },
        launches: 1,
        flops: op_workload(p, op).flops.0 as f64,
    };
    let exchange = OpEstimate { activity: OpActivity::Transfer, launches: 1, ..OpEstimate::ZERO };
    let memory_bound = |ns: fn(&MachineModel, f64) -> f64| {
        kernel(OpActivity::MemoryBound, ns(m, kernel_fusion::op_traffic(p, op)))
    };
    match (op.opcode.table_row().traits.kernel, op.view()) {
        (KernelClass::None, Ok(OpView::Wait(v))) => {
            OpEstimate { activity: OpActivity::Wait, ..OpEstimate::ZERO }
                .with_kernel(unpack_ns(m, p, defs, v.ticket))
        }
        (KernelClass::Gemm, Ok(OpView::Matmul(v))) => estimate_gemm(m, p, op, &v),
        (KernelClass::Gemm, Ok(OpView::Conv3d(v))) => kernel(OpActivity::Gemm, convolution_ns(m, p, op, &v)),
        (KernelClass::Attention, Ok(OpView::Attention(v))) => {
            kernel(OpActivity::Attention, m.attention_ns(&attention_sizes(p, [v.q, v.k], v.head_dim)))
        }
        (KernelClass::Attention, Ok(OpView::PagedAttention(v))) => {
            // Every position that the table of pages can hold may be attended to.
            let sizes = attention_sizes(p, [v.q, v.k], v.head_dim);
            let keys = dim_extent(p, v.pages, 1) * v.page_rows as f64;
            let keys = v.window.map_or(keys, |w| keys.min((w + v.sink) as f64));
            let values = v.value_dim.map_or(sizes.v, |n| n as f64);
            kernel(OpActivity::Attention, m.attention_ns(&AttentionWork { keys, v: values, ..sizes }))
        }
        (KernelClass::Attention, Ok(OpView::RelativeAttention(v))) => {
            kernel(OpActivity::Attention, m.attention_ns(&attention_sizes(p, [v.q, v.k], v.head_dim)))
        }
        (KernelClass::GroupedGemm, Ok(view)) => {
            grouped_gemm_ns(m, p, op, &view).map_or(OpEstimate::ZERO, |ns| kernel(OpActivity::Gemm, ns))
        }
        (KernelClass::Transfer, Ok(OpView::AllToAll(v))) => {
            exchange.with_kernel(pack_ns(m, p, (v.x, v.split)))
        }
        (KernelClass::Transfer, _) => exchange,
        (KernelClass::Copy, _) => memory_bound(MachineModel::memory_bound_ns),
        (KernelClass::Elementwise, _) => memory_bound(elementwise_ns),
        // An op without a view breaks the rules, and no plan contains it.
        (KernelClass::None | KernelClass::Gemm | KernelClass::Attention | KernelClass::GroupedGemm, _) => {
            OpEstimate::ZERO
        }
    }
}

/// Returns the time of a batch of matrix multiplies: a batched matmul, or the matmuls of all experts.
fn grouped_gemm_ns(m: &MachineModel, p: &Program, op: &Op, view: &OpView) -> Option<f64> {
    match view {
        OpView::Bmm(views::Bmm { x, y, .. }) => {
            let k = p.type_of(*x).shape.last().map_or(1.0, |k| *k as f64);
            let rows = p.type_of(*x).element_count() as f64 / k;
            let columns = op.results.first().map_or(1.0, |r| p.type_of(*r).element_count() as f64 / rows);
            let batch = (p.type_of(*y).element_count() as f64 / (k * columns)).max(1.0);
            Some(m.grouped_gemm_ns(batch, rows / batch, columns, k, value_precision(p, *x)))
        }
        OpView::GroupedMatmul(v) => {
            let [groups, columns, k] = [0, 1, 2].map(|dim| dim_extent(p, v.w, dim));
            Some(m.grouped_gemm_ns(
                groups,
                v.rows as f64 / groups.max(1.0),
                columns,
                k,
                value_precision(p, v.x),
            ))
        }
        OpView::HeadMatmul(v) => {
            let (rows, heads) = (dim_extent(p, v.x, 0), dim_extent(p, v.w, 0) / v.head_rows as f64);
            let (k, columns) =
                (dim_extent(p, v.x, 1) / heads, dim_extent(p, *op.results.first()?, 1) / heads);
            Some(m.grouped_gemm_ns(heads, rows, columns, k, value_precision(p, v.x)))
        }
        OpView::MoeRoute(v) => {
            let bank: Vec<f64> = p.buffer(op.buffer?).ty.shape.iter().map(|n| *n as f64).collect();
            let [experts, out, k] = bank[..] else { return None };
            let rows = dim_extent(p, v.x, 0) * v.top_k as f64 / experts.max(1.0);
            Some(m.grouped_gemm_ns(experts, rows, out, k, value_precision(p, v.x)))
        }
        _ => None,
    }
}

impl OpEstimate {
    /// Adds a kernel that takes `pass` nanoseconds, and its launch; `None` adds nothing.
    fn with_kernel(self, pass: Option<f64>) -> OpEstimate {
        match pass {
            Some(ns) => OpEstimate { ns: self.ns + ns, launches: self.launches + 1, ..self },
            None => self,
        }
    }
}

/// Returns the time of one GEMM that merges the matmuls of `set`, which share a left operand. `set`
/// must not be empty.
fn merged_gemm_ns(m: &MachineModel, p: &Program, set: &[usize]) -> f64 {
    let x = p.ops[set[0]].operands[0];
    let [rows, k] = [0, 1].map(|d| dim_extent(p, x, d));
    let columns: f64 = set.iter().map(|i| dim_extent(p, p.ops[*i].operands[1], 0)).sum();
    m.gemm_ns(rows, columns, k, value_precision(p, x))
}

fn estimate_gemm(m: &MachineModel, p: &Program, op: &Op, v: &views::Matmul) -> OpEstimate {
    let executor = &m.profile.executor;
    let [rows, k] = [0, 1].map(|d| dim_extent(p, v.x, d));
    let columns = dim_extent(p, v.w, 0);
    let ns = m.gemm_ns(rows, columns, k, value_precision(p, v.x));
    let price = OpEstimate {
        activity: OpActivity::Gemm,
        ns,
        throttled_ns: ns,
        launches: 1,
        flops: op_workload(p, op).flops.0 as f64,
    };
    let bias = v.bias.is_some() && !executor.fuses_bias;
    let act = v.act.is_some() && !executor.fuses_activation;
    let written = op.results.first().map_or(0.0, |r| value_bytes(p, *r));
    price.with_kernel((bias || act).then(|| elementwise_ns(m, 2.0 * written)))
}

/// Returns the time of a convolution of frames, whose weights are [m, kt·kh·kw·c].
fn convolution_ns(m: &MachineModel, p: &Program, op: &Op, v: &views::Conv3d) -> f64 {
    let channels = dim_extent(p, v.w, 0);
    let elements = op.results.first().map_or(0.0, |r| p.type_of(*r).element_count() as f64);
    // The extent that the FLOPs count: without a history some of the kernel's frames lie on zeros.
    let k = op_workload(p, op).flops.0 as f64 / (2.0 * elements.max(1.0));
    let (cells, bytes) = (elements / channels.max(1.0), kernel_fusion::op_traffic(p, op));
    m.convolution_ns(cells, channels, k, bytes, value_precision(p, v.x))
}

/// Returns the time of a memory-bound kernel that also computes.
fn elementwise_ns(m: &MachineModel, bytes: f64) -> f64 {
    m.memory_bound_ns(bytes / m.profile.executor.elementwise_share)
}

fn attention_sizes(p: &Program, [q, k]: [ValueId; 2], head_dim: u64) -> AttentionWork {
    let precision = value_precision(p, q);
    let head = head_dim as f64;
    AttentionWork {
        queries: dim_extent(p, q, 0),
        keys: dim_extent(p, k, 0),
        heads: dim_extent(p, q, 1) / head,
        kv_heads: dim_extent(p, k, 1) / head,
        qk: head,
        v: head,
        causal: false,
        precision,
        key_bytes: 2.0 * head * precision.element_bytes(),
    }
}

/// Returns the time of the kernel that packs the operand `x` of an all-to-all, or unpacks its result.
/// `dim` is the dim that it splits or concatenates: with sharded columns the shards of each peer are
/// scattered over the rows.
fn pack_ns(m: &MachineModel, p: &Program, (x, dim): (ValueId, usize)) -> Option<f64> {
    let bytes = value_bytes(p, x);
    (m.profile.executor.packs_all_to_all && dim > 0).then(|| m.memory_bound_ns(2.0 * bytes))
}

/// Returns the time of the kernel that unpacks an all-to-all whose columns are concatenated.
fn unpack_ns(m: &MachineModel, p: &Program, defs: &[Option<usize>], ticket: ValueId) -> Option<f64> {
    let issue = defs.get(ticket.0 as usize).copied().flatten().map(|i| &p.ops[i])?;
    match issue.view() {
        Ok(OpView::AllToAll(v)) => pack_ns(m, p, (v.x, v.concat)),
        _ => None,
    }
}

fn dim_extent(p: &Program, v: ValueId, dim: usize) -> f64 {
    p.type_of(v).shape.get(dim).map_or(1.0, |n| *n as f64)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Profile;
    use crate::executor_traits::ExecutorTraits;
    use tessera_ir::{Builder, Type};
    use tessera_mesh::{Axis, AxisLayout, Reduction, Shard, catalog};

    fn machine(executor: ExecutorTraits) -> MachineModel {
        let profile = Profile { executor, ..Profile::builtin("torch-2.11").unwrap() };
        MachineModel::new(catalog::get("hgx-h200").unwrap(), profile)
    }

    fn fusing() -> ExecutorTraits {
        ExecutorTraits { fuses_elementwise: true, merges_gemms: true, ..ExecutorTraits::default() }
    }

    fn f32(shape: &[u64]) -> Type {
        Type::new(DType::F32, shape)
    }

    /// Queries, keys and values of 8 rows and 64 columns; keys are normalised, rotated and written
    /// to the KV cache.
    fn keys() -> Program {
        let mut b = Builder::new_logical("p");
        let x = b.add_input("x", f32(&[8, 64]));
        let start = b.add_call_scalar("start", Type::scalar(DType::I64));
        let made = ["q", "k", "v"].map(|n| {
            let w = b.add_weight(n, f32(&[64, 64]));
            b.add_op(Opcode::Matmul, &[x, w])
        });
        let norm = b.add_weight("norm", f32(&[64]));
        b.set_attr("eps", 1e-6);
        let k = b.add_op(Opcode::RmsNorm, &[made[1], norm]);
        b.set_attr("head_dim", 32u64).set_attr("grid", vec![2, 2, 2]).add_keyed("start", start);
        let k = b.add_op(Opcode::Rope, &[k]);
        let buffer = b.declare_buffer("kv.0.k", f32(&[8, 64]));
        b.write_buffer(buffer, k);
        b.finish().unwrap()
    }

    fn times_of(p: &Program, prices: &ProgramEstimate<'_>, opcode: Opcode) -> Vec<f64> {
        p.ops.iter().zip(&prices.ops).filter(|(o, _)| o.opcode == opcode).map(|(_, x)| x.ns).collect()
    }

    #[test]
    fn adjacent_ops_are_fused() {
        let p = keys();
        let m = machine(fusing());
        let prices = ProgramEstimate::new(&m, &p, 1.0);
        assert_eq!(
            times_of(&p, &prices, Opcode::Matmul),
            [m.gemm_ns(8.0, 192.0, 64.0, Precision::F32), 0.0, 0.0]
        );
        // Keys in, weights in, the start, keys out: the two intermediate values never reach memory.
        let bytes = 8.0 * 64.0 * 4.0 + 64.0 * 4.0 + 8.0 + 8.0 * 64.0 * 4.0;
        assert_eq!(times_of(&p, &prices, Opcode::RmsNorm), [m.memory_bound_ns(bytes)]);
        assert_eq!(
            [times_of(&p, &prices, Opcode::Rope), times_of(&p, &prices, Opcode::CacheWrite)].concat(),
            [0.0, 0.0]
        );
        assert_eq!(prices.ops.iter().map(|o| o.launches).sum::<u32>(), 2);

        let plain = machine(ExecutorTraits::default());
        let apart = ProgramEstimate::new(&plain, &p, 1.0);
        assert_eq!(apart.ops.iter().map(|o| o.launches).sum::<u32>(), 6);
        let sum = |p: &ProgramEstimate<'_>| p.ops.iter().map(|o| o.ns).sum::<f64>();
        assert!(sum(&apart) > sum(&prices));
        let twice = ProgramEstimate::new(&plain, &p, 0.5);
        assert_eq!(times_of(&p, &twice, Opcode::Matmul)[0], 2.0 * times_of(&p, &apart, Opcode::Matmul)[0]);
        assert_eq!(times_of(&p, &twice, Opcode::Rope), times_of(&p, &apart, Opcode::Rope));
    }

    #[test]
    fn programs_are_priced_by_their_dtypes() {
        let of_dtype = |dtype| {
            let mut b = Builder::new_logical("p");
            let ty = |shape: &[u64]| Type::new(dtype, shape);
            let (x, w) = (b.add_input("x", ty(&[4096, 4096])), b.add_weight("w", ty(&[4096, 4096])));
            let y = b.add_op(Opcode::Matmul, &[x, w]);
            let y =
                b.set_attr("to", if dtype == DType::F32 { "bf16" } else { "f32" }).add_op(Opcode::Cast, &[y]);
            b.add_op(Opcode::Silu, &[y]);
            b.finish().unwrap()
        };
        let (f32, bf16) = (of_dtype(DType::F32), of_dtype(DType::Bf16));
        // What an executor is usually planned for changes no program that is written.
        let m = machine(ExecutorTraits { precision: Precision::Bf16, ..ExecutorTraits::default() });
        let ns = |p: &Program| {
            let prices = ProgramEstimate::new(&m, p, 1.0);
            [Opcode::Matmul, Opcode::Cast, Opcode::Silu].map(|o| times_of(p, &prices, o)[0])
        };
        let n = 4096.0 * 4096.0;
        let gemm = |p| m.gemm_ns(4096.0, 4096.0, 4096.0, p);
        let passes = |bytes: f64| elementwise_ns(&m, bytes * n);
        assert_eq!(ns(&bf16), [gemm(Precision::Bf16), m.memory_bound_ns(6.0 * n), passes(8.0)]);
        assert_eq!(ns(&f32), [gemm(Precision::F32), m.memory_bound_ns(6.0 * n), passes(4.0)]);
    }

    #[test]
    fn unfused_epilogue_costs_one_kernel() {
        let mut b = Builder::new_logical("p");
        let (x, w) = (b.add_input("x", f32(&[8, 64])), b.add_weight("w", f32(&[64, 64])));
        let bias = b.add_weight("b", f32(&[64]));
        b.set_attr("act", "gelu_tanh").add_keyed("bias", bias);
        b.add_op(Opcode::Matmul, &[x, w]);
        let p = b.finish().unwrap();
        let ns =
            |h: ExecutorTraits| times_of(&p, &ProgramEstimate::new(&machine(h), &p, 1.0), Opcode::Matmul)[0];
        let all = ExecutorTraits::default();
        let (one, other) =
            (ExecutorTraits { fuses_activation: false, ..all }, ExecutorTraits { fuses_bias: false, ..all });
        let pass = machine(all).memory_bound_ns(2.0 * 8.0 * 64.0 * 4.0);
        assert!((ns(one) - ns(all) - pass).abs() < 1e-6 * pass);
        assert_eq!(ns(one), ns(other));
    }

    #[test]
    fn a_tagged_all_reduce_costs_what_its_algorithm_costs_and_an_untagged_one_follows_the_profile() {
        // A threshold of the profile that contradicts both tags.
        let eight = GroupSpan { ranks: 8, domains: 1 };
        for (rows, ring_from_bytes) in [(1_u64, 0.0), (1 << 20, 1e12)] {
            let mut b = Builder::new_role("p", "r", "tp=8".parse().unwrap(), &["compute"]);
            let partial = AxisLayout::new_partial(Reduction::Sum);
            let x = b.add_input("x", f32(&[rows, 64]).with_axis_layout(Axis::Tp, partial));
            for tag in ["tree", "ring", ""] {
                if !tag.is_empty() {
                    b.set_attr("algorithm", tag);
                }
                b.set_attr("axis", "tp").set_attr("reduction", Reduction::Sum.name());
                b.add_op(Opcode::AllReduce, &[x]);
            }
            let p = b.finish().unwrap();
            let mut m = MachineModel::new(
                tessera_mesh::catalog::get("hgx-h200").unwrap(),
                crate::Profile::builtin("tessera").unwrap(),
            );
            let family = m.profile.families.get_mut("hopper").unwrap();
            family.library.all_reduce.ring_from_bytes = Some(ring_from_bytes);
            let m = MachineModel::new(m.cluster.clone(), m.profile.clone());
            let priced = ProgramEstimate::new(&m, &p, 1.0);
            let costs: Vec<CollectiveCost> =
                (0..p.ops.len()).filter_map(|i| priced.transfer_cost(i, eight)).collect();
            let by_profile = if ring_from_bytes == 0.0 { Algorithm::Ring } else { Algorithm::Tree };
            assert_eq!(
                costs.iter().map(|c| c.algorithm).collect::<Vec<_>>(),
                [Algorithm::Tree, Algorithm::Ring, by_profile]
            );
            let payload = rows as f64 * 64.0 * 4.0;
            assert_eq!(costs[2], m.collective_cost(CollectiveOp::AllReduce, payload, eight));
            // A tree has fewer steps, and a ring uses every link all the time.
            assert_eq!(costs[0].ns < costs[1].ns, rows == 1, "{costs:?}");
        }
    }

    #[test]
    fn columns_are_packed() {
        let mut b = Builder::new_role("p", "r", "tp=2".parse().unwrap(), &["compute", "tp_collective"]);
        let by_rows = AxisLayout::Shard(Shard::new(0, 8, 1, 2).unwrap());
        let x = b.add_input(
            "x",
            f32(&[8, 64]).with_axis_layout(Axis::Tp, AxisLayout::Shard(Shard::new(1, 128, 64, 2).unwrap())),
        );
        let y = b.add_input("y", f32(&[4, 128]).with_axis_layout(Axis::Tp, by_rows));
        let sums = b.add_op(Opcode::RowSquareSum, &[x]);
        b.set_attr("axis", "tp").set_attr("reduction", Reduction::Sum.name());
        let t = b.add_issue(Opcode::AllReduce, &[sums]);
        b.add_wait(t, None);
        b.set_attr("axis", "tp").set_attr("concat", 0u64).set_attr("split", 1u64).set_attr("unit", 64u64);
        let t = b.add_issue(Opcode::AllToAll, &[y]);
        let z = b.add_wait(t, None).unwrap();
        b.set_attr("axis", "tp").set_attr("concat", 1u64).set_attr("split", 0u64);
        let t = b.add_issue(Opcode::AllToAll, &[z]);
        b.add_wait(t, None);
        let p = b.finish().unwrap();
        let m = machine(ExecutorTraits { packs_all_to_all: true, ..fusing() });
        let prices = ProgramEstimate::new(&m, &p, 1.0);
        let two = GroupSpan { ranks: 2, domains: 1 };
        let sent: Vec<f64> =
            (0..p.ops.len()).filter_map(|i| prices.transfer_cost(i, two)).map(|t| t.sent_bytes[0]).collect();
        assert_eq!(sent, [8.0 * 4.0, 4.0 * 128.0 * 4.0 / 2.0, 8.0 * 64.0 * 4.0 / 2.0]);
        let copy = m.memory_bound_ns(2.0 * 4.0 * 128.0 * 4.0);
        assert_eq!(times_of(&p, &prices, Opcode::AllToAll), [copy, 0.0], "packed before the first");
        assert_eq!(times_of(&p, &prices, Opcode::Wait), [0.0, 0.0, copy], "unpacked after the second");
    }
}
