//! The probe of kernels: before the first call each rank runs every kernel of its programs once, on
//! fixed inputs, and reports a digest of the result. Equal builds on different processors, drivers
//! or libraries are found by what they compute.
//!
//! A kernel is what a backend launches at once: an op, or several that the backend fuses, with their
//! dtypes, shapes and attributes. Each runs in a program of its own, on a backend of its own, with
//! the inputs replicated on one rank, so that the result does not depend on the place of the rank in
//! the mesh. The GEMMs of a GPU, whose kernels depend on their extents, are probed by the backend
//! that planned them.

mod kernel_name;
mod whole_numbers;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_device::{Backend, CallData, FingerprintHasher, MeshRank, NoObserver, Scalar, WeightSource};
use tessera_ir::{Builder, DType, Op, OpKind, OpView, Opcode, Program, Slots, Type, ValueId, op_workload};
use tessera_mesh::{Mesh, Rank};
use tessera_runtime::parity::KERNEL_KEY;
use tessera_runtime::tripwire::T0775;

use kernel_name::{name_kernel, stated_attrs};
use whole_numbers::find_limits;

/// Above these limits a kernel is probed at a smaller shape.
const MAX_ELEMENTS: u64 = 1 << 17;
const MAX_FLOPS: u64 = 1 << 22;

/// Maximum elements of all values of a probe with fewer rows but the widths of its kernel.
const MAX_FULL_WIDTH_ELEMENTS: u64 = 1 << 20;

/// Number of rows from which a probe has fewer of them.
const FEW_ROWS: u64 = 16;

/// Columns of the fixed matrix with which a probe multiplies eight-bit values.
const READER_COLUMNS: u64 = 32;

/// Number of different values in an operand. It is prime, so that no two rows are equal.
const DISTINCT_VALUES: u64 = 16_381;

/// Extents up to this size stay as they are in a smaller shape.
const SMALL_EXTENT: u64 = 128;

/// Largest multiple of a width that another width of the same op may have to be, such as the six
/// columns of a modulation.
const MAX_MULTIPLE: u64 = 16;

/// Turns the numbers of a probe into whole numbers of many values.
const WHOLE_NUMBER_SCALE: f32 = 4096.0;

/// Ops that only move elements, by the layout of their operand. A probe has no layout.
const COPIES: [Opcode; 7] = [
    Opcode::TakeRows,
    Opcode::TakeShard,
    Opcode::Pad,
    Opcode::Compact,
    Opcode::MoeRoute,
    Opcode::ExpertTokens,
    // A probe would give two rows one slot, and which of them stays depends on the order of the threads.
    Opcode::ExpertPack,
];

/// Begins the value of a kernel that has no digest.
const UNPROBED: &str = "not probed: ";

/// Returns whether the value of a parity key states that its kernel was not probed.
pub(crate) fn is_unprobed(value: &str) -> bool {
    value.starts_with(UNPROBED)
}

/// Returns each op of a program as a kernel of its own, as the CPU backend runs it.
pub(crate) fn single_ops(p: &Program) -> Vec<Vec<usize>> {
    (0..p.ops.len()).map(|i| vec![i]).collect()
}

/// Returns the program that probes each kernel of some programs, by the name of the kernel, or why
/// the kernel has none. A kernel is given by the indices of its ops. The same programs give the same
/// probes on every rank.
pub(crate) fn plan_probes<'a>(
    programs: impl IntoIterator<Item = (&'a Program, Vec<Vec<usize>>)>,
) -> BTreeMap<String, Result<Program, String>> {
    let mut probes = BTreeMap::new();
    for (p, kernels) in programs {
        let defined = p.defining_ops();
        let readers = p.value_readers();
        let makers = |v: ValueId| defined[v.0 as usize].map(|i| &p.ops[i]);
        let computes = |op: &Op| {
            op.opcode.table_row().kind == OpKind::Compute && !COPIES.contains(&op.opcode) && !writes_pages(op)
        };
        for kernel in kernels.iter().filter(|k| k.iter().any(|i| computes(&p.ops[*i]))) {
            let ops: Vec<&Op> = kernel.iter().map(|i| &p.ops[*i]).collect();
            let names: Vec<String> = ops.iter().map(|op| name_kernel(p, op, &makers)).collect();
            let is_read = |v: ValueId| readers[v.0 as usize].iter().any(|i| !kernel.contains(i));
            let source = KernelSource { p, ops, maker: &makers, is_read: &is_read };
            probes.entry(names.join(" + ")).or_insert_with(|| source.build_probe());
        }
    }
    probes
}

/// Runs each probe and returns parity keys with the digests of the results.
///
/// # Errors
/// T0775 if a kernel fails.
pub(crate) fn run_probes(
    probes: BTreeMap<String, Result<Program, String>>,
    backend: &mut dyn Backend,
    modify: &dyn Fn(&mut Program),
) -> Result<Vec<(String, String)>, Diagnostic> {
    let run = |(kernel, probe): (String, Result<Program, String>)| {
        let value = match probe {
            Ok(mut program) => {
                modify(&mut program);
                run_probe(program, backend).map_err(|why| {
                    Diagnostic::error(&T0775, format!("the probe of {kernel} failed: {why}"))
                })?
            }
            Err(why) => format!("{UNPROBED}{why}"),
        };
        Ok((format!("{KERNEL_KEY} {kernel}"), value))
    };
    probes.into_iter().map(run).collect()
}

/// A kernel in the program that uses it.
struct KernelSource<'a, 'f> {
    p: &'a Program,
    /// The ops that the kernel computes, each after those whose results it reads.
    ops: Vec<&'a Op>,
    /// Returns the op that makes a value.
    maker: &'f dyn Fn(ValueId) -> Option<&'a Op>,
    /// Returns whether another kernel reads a value.
    is_read: &'f dyn Fn(ValueId) -> bool,
}

impl<'a> KernelSource<'a, '_> {
    /// Builds the probe: at the kernel's own shape if that is cheap, otherwise with fewer rows, and
    /// otherwise with smaller widths as well. A GPU compiles the kernels of rows for their width.
    fn build_probe(&self) -> Result<Program, String> {
        let p = self.p;
        let values = self.ops.iter().flat_map(|op| op.operands.iter().chain(&op.results));
        let elements: u64 = values.map(|v| p.type_of(*v).element_count()).sum();
        let flops: u64 = self.ops.iter().map(|op| op_workload(p, op).flops.0).sum();
        if elements <= MAX_ELEMENTS && flops <= MAX_FLOPS {
            return self.build_at(&BTreeMap::new());
        }
        let has_matrix =
            self.ops.iter().any(|op| matches!(op.opcode, Opcode::Matmul | Opcode::Attention | Opcode::Bmm));
        let is_small = |probe: &Program| {
            probe.values.iter().map(|v| v.ty.element_count()).sum::<u64>() <= MAX_FULL_WIDTH_ELEMENTS
        };
        if !has_matrix && let Some(probe) = self.build_at(&self.fewer_rows()).ok().filter(is_small) {
            return Ok(probe);
        }
        self.build_at(&self.shrink_extents(1)).or_else(|_| self.build_at(&self.shrink_extents(MAX_MULTIPLE)))
    }

    /// Builds the probe with the extents that `extents` replaces.
    fn build_at(&self, extents: &BTreeMap<u64, u64>) -> Result<Program, String> {
        let p = self.p;
        let mut b = Builder::new_role("probe", "probe", Mesh::default(), &["compute"]);
        let shrink =
            |shape: &[u64]| -> Vec<u64> { shape.iter().map(|d| *extents.get(d).unwrap_or(d)).collect() };
        let mut made: BTreeMap<ValueId, ValueId> = BTreeMap::new();
        let mut outputs = Vec::new();
        for (k, op) in self.ops.iter().enumerate() {
            // The name of an operand selects its numbers, so it must be the same in every program.
            let suffix = if k == 0 { String::new() } else { format!(" of op {k}") };
            let mut source = |name: &str, v: ValueId| {
                let ty = p.type_of(v);
                let shape = shrink(&ty.shape);
                *made.entry(v).or_insert_with(|| {
                    add_source(
                        &mut b,
                        &format!("{name}{suffix}"),
                        &Type::new(ty.dtype, shape),
                        (self.maker)(v),
                    )
                })
            };
            let operands: Vec<ValueId> =
                op.operands.iter().enumerate().map(|(i, v)| source(&format!("operand{i}"), *v)).collect();
            let keyed: Vec<(&'static str, ValueId)> =
                op.keyed.iter().map(|(name, v)| (*name, source(name, *v))).collect();
            for (name, value) in keyed {
                b.add_keyed(name, value);
            }
            for (name, attr) in stated_attrs(op) {
                b.set_attr(name, attr.clone());
            }
            if has_place(op) {
                b.set_attr("first_row", 0_i64);
            }
            if op.opcode == Opcode::RmsScale {
                // The columns of a rank are a part of the width; those of a probe are all of it.
                let width = extent_of(&b, operands[0], 1);
                b.set_attr("col", 0_i64).set_attr("width", width as i64);
            }
            if op.opcode == Opcode::CacheWrite {
                // The keyed operand is the row; a call scalar of a probe is 1.
                outputs.push(write_and_read(&mut b, operands[0], u64::from(!op.keyed.is_empty())));
                continue;
            }
            let results = match op.opcode {
                Opcode::Quantize => b.add_quantize(operands[0]).to_vec(),
                opcode => vec![b.add_op(opcode, &operands)],
            };
            made.extend(op.results.iter().copied().zip(results.iter().copied()));
            match results[..] {
                [rows, scales] => outputs.push(multiply_quantized(&mut b, rows, scales)),
                _ if self.ops.len() == 1 || op.results.iter().any(|r| (self.is_read)(*r)) => {
                    outputs.extend(results);
                }
                _ => {}
            }
        }
        for (i, value) in outputs.into_iter().enumerate() {
            let value = cast_to(&mut b, value, DType::F32);
            b.add_output(&format!("result{i}"), value);
        }
        b.finish().map_err(|errors| errors.first().map_or("no rule".to_string(), |e| e.message.clone()))
    }

    /// Returns the types of all operands.
    fn operand_types(&self) -> impl Iterator<Item = &'a Type> {
        let p = self.p;
        let of_op = |op: &'a Op| op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v));
        self.ops.iter().flat_map(move |op| of_op(op)).map(move |v| p.type_of(*v))
    }

    /// Returns a smaller extent for each number of rows that is no width as well.
    fn fewer_rows(&self) -> BTreeMap<u64, u64> {
        let widths: BTreeSet<u64> = self.operand_types().filter_map(|ty| ty.shape.last().copied()).collect();
        let rows = self.operand_types().filter(|ty| ty.shape.len() > 1).map(|ty| ty.shape[0]);
        rows.filter(|d| *d > SMALL_EXTENT && !widths.contains(d)).map(|d| (d, FEW_ROWS + d % 8)).collect()
    }

    /// Returns a smaller extent for each large extent of the operands. The remainder that decides
    /// about alignment is kept, and an extent that is up to `max_multiple` times another one stays
    /// so.
    fn shrink_extents(&self, max_multiple: u64) -> BTreeMap<u64, u64> {
        let large: BTreeSet<u64> =
            self.operand_types().flat_map(|ty| ty.shape.clone()).filter(|d| *d > SMALL_EXTENT).collect();
        let mut smaller: BTreeMap<u64, u64> = BTreeMap::new();
        for extent in large {
            let base = smaller
                .iter()
                .rev()
                .find(|(d, _)| extent.is_multiple_of(**d) && extent / **d <= max_multiple);
            let new = match base {
                Some((d, s)) => extent / d * s,
                None => SMALL_EXTENT + extent % 64,
            };
            smaller.insert(extent, new);
        }
        smaller
    }
}

/// Returns whether an op only moves rows to pages of a buffer, which a probe does not have.
fn writes_pages(op: &Op) -> bool {
    matches!(op.view(), Ok(OpView::CacheWrite(v)) if v.pages.is_some())
}

/// Returns whether an op states the place of its rows. The rows of a probe are the first ones of a
/// larger grid.
fn has_place(op: &Op) -> bool {
    match op.view() {
        Ok(OpView::Rope(_) | OpView::NormModulate(_) | OpView::CacheWrite(_)) => true,
        Ok(OpView::GateResidual(v)) => v.gate().is_some(),
        _ => false,
    }
}

/// Returns an extent of a value; 1 if the op that makes it was refused, which the end of the program
/// reports.
fn extent_of(b: &Builder, value: ValueId, dim: usize) -> u64 {
    b.type_of(value).shape.get(dim).copied().unwrap_or(1)
}

/// Writes values into a buffer from row `first` on, and returns all rows of the buffer.
fn write_and_read(b: &mut Builder, rows: ValueId, first: u64) -> ValueId {
    let shape = [extent_of(b, rows, 0) + first, extent_of(b, rows, 1)];
    let held = Type::new(b.type_of(rows).dtype, shape);
    // Programs of one backend share the buffers of one name, so the name states which rows stay zero.
    let buffer = b.declare_buffer(&format!("rows from {first} of {:?} {}", held.shape, held.dtype), held);
    b.write_buffer(buffer, rows);
    b.read_buffer(buffer)
}

/// Multiplies eight-bit rows with a fixed matrix, because such values cannot leave a program.
fn multiply_quantized(b: &mut Builder, rows: ValueId, scales: ValueId) -> ValueId {
    let width = extent_of(b, rows, 1);
    b.set_attr("load", "e4m3");
    let w = b.add_weight("reader", Type::new(DType::E4m3, [READER_COLUMNS, width]));
    b.set_attr("load", "e4m3.scale");
    let w_scale = b.add_weight("reader", Type::new(DType::F32, [READER_COLUMNS]));
    b.add_keyed("w_scale", w_scale).add_keyed("x_scale", scales);
    b.add_op(Opcode::Matmul, &[rows, w])
}

/// Adds the source of an operand: a weight or a scalar where the program has one, otherwise an
/// input with the casts that give it its dtype.
fn add_source(b: &mut Builder, name: &str, ty: &Type, maker: Option<&Op>) -> ValueId {
    match maker {
        Some(op) if op.opcode == Opcode::Weight => {
            b.copy_attrs(op, &["load"]);
            b.add_weight(name, ty.clone())
        }
        _ if ty.shape.is_empty() || maker.is_some_and(|op| op.opcode == Opcode::Call) => {
            b.add_call_scalar(name, ty.clone())
        }
        _ => {
            let input = b.add_input(name, Type::new(DType::F32, ty.shape.clone()));
            cast_to(b, input, ty.dtype)
        }
    }
}

fn cast_to(b: &mut Builder, value: ValueId, dtype: DType) -> ValueId {
    match dtype {
        _ if b.type_of(value).dtype == dtype => value,
        DType::E4m3 => {
            let rows = cast_to(b, value, DType::Bf16);
            b.add_quantize(rows)[0]
        }
        _ => {
            b.set_attr("to", dtype.name());
            b.add_op(Opcode::Cast, &[value])
        }
    }
}

/// Runs a probe and returns the first 16 hex digits of the digest of its result, or why the backend
/// does not load it.
fn run_probe(program: Program, backend: &mut dyn Backend) -> Result<String, String> {
    let mut scalars = BTreeMap::new();
    let mut inputs = BTreeMap::new();
    let limits = find_limits(&program);
    for op in program.ops.iter().filter(|op| matches!(op.opcode, Opcode::Call | Opcode::Input)) {
        let (name, ty) = (op.name.as_deref().unwrap_or_default(), program.type_of(op.results[0]));
        let mut values = probe_values(name, ty.element_count());
        if let Some(limit) = limits.get(name) {
            values.iter_mut().for_each(|x| *x = ((*x * WHOLE_NUMBER_SCALE) as u64 % limit) as f32);
        }
        if op.opcode == Opcode::Input {
            inputs.insert(name, values);
            continue;
        }
        let scalar = match (ty.dtype, &ty.shape[..]) {
            (DType::I64, _) => Scalar::I64(1),
            (_, []) => Scalar::F32(values[0]),
            _ => Scalar::F32s(values),
        };
        scalars.insert(name, scalar);
    }
    let call = CallData { scalars, inputs: inputs.iter().map(|(n, v)| (*n, v.as_slice())).collect() };
    let slots = own_slots(&program);
    let shared = Arc::new(program.clone());
    let handle = match backend.load(&shared, &slots, &mut ProbeWeights) {
        Ok(handle) => handle,
        // The kernel of the full shape may not support the smaller one.
        Err(d) => return Ok(format!("{UNPROBED}{}", d.message)),
    };
    backend.run(handle, &call, &mut NoObserver).map_err(|fault| format!("{fault:?}"))?;
    let mut hash = FingerprintHasher::default();
    for op in program.ops.iter().filter(|op| op.opcode == Opcode::Output) {
        let name = op.name.as_deref().unwrap_or_default();
        hash.update(backend.output(name).ok_or_else(|| format!("it has no {name}"))?);
    }
    Ok(shorten_digest(hash.digest()))
}

/// Returns a slot for each value.
fn own_slots(program: &Program) -> Slots {
    let bytes = |v: &tessera_ir::Value| v.ty.byte_size().0;
    Slots {
        slot_bytes: program.values.iter().map(bytes).collect(),
        value_slots: (0..program.values.len() as u32).map(Some).collect(),
    }
}

/// Returns the first 16 hex digits of a digest.
pub(crate) fn shorten_digest(digest: [u8; 32]) -> String {
    blake3::Hash::from(digest).to_hex()[..16].to_string()
}

/// Returns positive numbers around 1, because some operands are sums of squares. They depend on the
/// name of the value.
fn probe_values(name: &str, count: u64) -> Vec<f32> {
    let seed = name.bytes().fold(0u64, |seed, b| seed.wrapping_mul(31).wrapping_add(u64::from(b)));
    let mut drawn = vec![0.0; count.min(DISTINCT_VALUES) as usize];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut drawn);
    drawn.iter_mut().for_each(|x| *x = x.abs() + 0.125);
    drawn.iter().copied().cycle().take(count as usize).collect()
}

/// The weights of probes.
struct ProbeWeights;

impl WeightSource for ProbeWeights {
    fn read(
        &mut self,
        name: &str,
        ty: &Type,
        _load: Option<&str>,
        _rank: &MeshRank,
    ) -> Result<Vec<f32>, Diagnostic> {
        Ok(probe_values(name, ty.element_count()))
    }
}

/// Returns the place at which probes run: the only rank of a mesh.
pub(crate) fn probe_placement() -> MeshRank {
    MeshRank { mesh: Mesh::default(), rank: Rank(0) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::Duration;

    use tessera_cpu::{CpuBackend, Pool};
    use tessera_ir::Attr;

    use super::*;
    use crate::engine::mesh_phases;
    use crate::{DtypePolicy, Mapping, Model, Overrides, Plan, Strategy, plan};

    fn plan_of(dir: &str, mesh: &str, dtype: DtypePolicy) -> Plan {
        plan_with(dir, mesh, Strategy::Ulysses, dtype)
    }

    fn plan_with(dir: &str, mesh: &str, strategy: Strategy, dtype: DtypePolicy) -> Plan {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir);
        let model = Model::open(&dir, &Overrides::default()).unwrap();
        let map = Mapping { mesh: mesh.parse().unwrap(), strategy, dtype, ..Mapping::default() };
        plan::plan_model(&model.video, &model.name, "", &map).unwrap()
    }

    fn probes_of(plan: &Plan, rank: u32) -> BTreeMap<String, Result<Program, String>> {
        let programs = mesh_phases(&plan.sealed).filter_map(|p| plan.sealed.rank_program(p, Rank(rank)));
        plan_probes(programs.map(|p| (&**p, single_ops(p))))
    }

    fn run(
        probes: BTreeMap<String, Result<Program, String>>,
        modify: &dyn Fn(&mut Program),
    ) -> Vec<(String, String)> {
        let wait = Duration::from_secs(1);
        let mut cpu = CpuBackend::new(probe_placement(), Pool::single_thread(), Vec::new(), wait);
        let digests = run_probes(probes, &mut cpu, modify).unwrap();
        assert!(digests.iter().all(|(_, d)| !is_unprobed(d)), "{digests:?}");
        digests
    }

    #[test]
    fn every_kernel_of_every_plan_has_a_probe_within_the_limits() {
        for (dir, mesh, dtype) in [
            ("models/demo", "tp=1", DtypePolicy::F32),
            ("models/demo", "tp=2,pp=2", DtypePolicy::F32),
            ("models/demo", "tp=2", DtypePolicy::Bf16),
            ("fixtures/wan-odd", "tp=4", DtypePolicy::F32),
            ("models/wan2.1-14b", "tp=4,pp=2", DtypePolicy::Bf16),
        ] {
            let plan = plan_of(dir, mesh, dtype);
            for rank in plan.mesh_ranks() {
                let probes = probes_of(&plan, rank.0);
                assert!(probes.len() > 8, "{dir} {mesh}: {:?}", probes.keys());
                for (kernel, probe) in &probes {
                    let program = probe.as_ref().unwrap_or_else(|e| panic!("{dir} {kernel}: {e}"));
                    let elements: u64 = program.values.iter().map(|v| v.ty.element_count()).sum();
                    let flops: u64 = program.ops.iter().map(|op| op_workload(program, op).flops.0).sum();
                    let limits = (elements < 16 * MAX_ELEMENTS, flops < 64 * MAX_FLOPS);
                    assert_eq!(limits, (true, true), "{kernel}: {elements} elements, {flops} flops");
                }
            }
        }
    }

    #[test]
    fn gpus_fuse_the_ops_of_each_probe_as_in_the_program_it_represents() {
        let mut fused = BTreeSet::new();
        for (dir, mesh, strategy, dtype) in [
            ("models/demo", "tp=1", Strategy::Ulysses, DtypePolicy::Bf16),
            ("models/demo", "tp=2", Strategy::Megatron, DtypePolicy::Bf16),
            ("models/wan2.1-14b", "tp=2", Strategy::Ulysses, DtypePolicy::Bf16),
            ("models/wan2.1-14b", "tp=4", Strategy::Ulysses, DtypePolicy::Fp8),
        ] {
            let plan = plan_with(dir, mesh, strategy, dtype);
            for phase in mesh_phases(&plan.sealed) {
                let program = plan.sealed.rank_program(phase, Rank(0)).unwrap();
                let slots = plan.sealed.rank_slots(phase, Rank(0)).unwrap();
                for kernel in tessera_cuda::launched_ops(program, slots) {
                    let opcodes = |p: &Program, ops: &[usize]| -> Vec<&'static str> {
                        ops.iter().map(|i| p.ops[*i].opcode.name()).collect()
                    };
                    let names = opcodes(program, &kernel);
                    for (name, probe) in plan_probes([(&**program, vec![kernel])]) {
                        let probe = probe.unwrap_or_else(|e| panic!("{dir} {name}: {e}"));
                        let launched = tessera_cuda::launched_ops(&probe, &own_slots(&probe));
                        let found = launched.iter().any(|ops| opcodes(&probe, ops) == names);
                        assert!(found, "{dir} {name}: the probe launches {launched:?}");
                        if names.len() > 1 {
                            fused.insert(names.join("+"));
                        }
                    }
                }
            }
        }
        for kernel in ["rms_norm+rope", "gate_residual+norm_modulate", "gate_residual+layer_norm+quantize"] {
            assert!(fused.iter().any(|f| f.starts_with(kernel)), "no {kernel} among {fused:?}");
        }
        assert!(fused.iter().any(|f| f.ends_with("rope+cache.write")), "{fused:?}");
        // Without its neighbours, an op is another kernel.
        let plan = plan_with("models/demo", "tp=1", Strategy::Ulysses, DtypePolicy::Bf16);
        let phase = mesh_phases(&plan.sealed).next().unwrap();
        let program = plan.sealed.rank_program(phase, Rank(0)).unwrap();
        let alone = plan_probes([(&**program, single_ops(program))]);
        assert!(alone.keys().all(|name| !name.contains(" + ")));
    }

    #[test]
    fn ranks_probe_a_kernel_with_one_result_whatever_their_place() {
        let plan = plan_of("models/demo", "tp=2,pp=2", DtypePolicy::F32);
        let tables: Vec<BTreeMap<String, String>> =
            (0..4).map(|rank| run(probes_of(&plan, rank), &|_| {}).into_iter().collect()).collect();
        let mut compared = 0;
        for table in &tables {
            for (kernel, digest) in table {
                let others = tables.iter().filter_map(|t| t.get(kernel));
                compared += others.inspect(|d| assert_eq!(*d, digest, "{kernel}")).count() - 1;
            }
        }
        assert!(compared > 20, "{compared}");
    }

    #[test]
    fn a_kernel_that_reads_a_value_twice_is_another_one() {
        let names = |order: [bool; 2]| -> Vec<(String, usize)> {
            let mut b = Builder::new_role("p", "r", Mesh::default(), &["compute"]);
            let [x, y] = ["x", "y"].map(|name| b.add_input(name, Type::new(DType::F32, [4, 6])));
            for twice in order {
                let sum = b.add_op(Opcode::Add, &[x, if twice { x } else { y }]);
                b.add_output(&format!("out{twice}"), sum);
            }
            let program = b.finish().unwrap();
            let inputs = |p: &Program| p.ops.iter().filter(|op| op.opcode == Opcode::Input).count();
            let probes = plan_probes([(&program, single_ops(&program))]);
            probes.into_iter().map(|(name, probe)| (name, inputs(&probe.unwrap()))).collect()
        };
        // Two ranks may run both kernels in another order; each has one name and one probe.
        assert_eq!(names([true, false]), names([false, true]));
        let expected = [("add(f32[4, 6], f32[4, 6])", 2), ("add(f32[4, 6], operand 0)", 1)];
        assert_eq!(names([true, false]), expected.map(|(name, inputs)| (name.to_string(), inputs)));
    }

    #[test]
    fn another_constant_in_a_kernel_changes_the_digests_of_that_kernel_alone() {
        let plan = plan_of("models/demo", "tp=2", DtypePolicy::F32);
        let own = run(probes_of(&plan, 0), &|_| {});
        let other = run(probes_of(&plan, 0), &|p| {
            for op in &mut p.ops {
                op.attrs.iter_mut().filter(|(n, _)| *n == "eps").for_each(|(_, eps)| *eps = Attr::Float(0.5));
            }
        });
        for (own, other) in own.iter().zip(&other) {
            assert_eq!(own.1 != other.1, own.0.contains("eps ="), "{own:?} {other:?}");
        }
    }
}
