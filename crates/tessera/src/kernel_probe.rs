//! The probe of kernels: before the first call each rank runs every kernel of its programs once, on
//! fixed inputs, and reports a digest of the result. Equal builds on different processors, drivers
//! or libraries are found by what they compute.
//!
//! A kernel is an op with its dtypes, shapes and attributes. Each runs in a program of its own, on
//! a backend of its own, with the inputs replicated on one rank, so that the result does not depend
//! on the place of the rank in the mesh.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tessera_base::Diagnostic;
use tessera_base::random::{DrawKey, fill_normals};
use tessera_device::{Backend, CallData, MeshRank, Observer, Scalar, WeightSource};
use tessera_ir::{
    Attr, Builder, DType, HINT_ATTRS, Op, OpKind, OpView, Opcode, Program, Slots, Type, ValueId, op_workload,
};
use tessera_mesh::{Mesh, Rank};
use tessera_runtime::parity::KERNEL_KEY;
use tessera_runtime::tripwire::T0775;

/// Above these limits a kernel is probed at a smaller shape.
const MAX_ELEMENTS: u64 = 1 << 17;
const MAX_FLOPS: u64 = 1 << 22;

/// Extents up to this size stay as they are in a smaller shape.
const SMALL_EXTENT: u64 = 128;

/// Largest multiple of a width that another width of the same op may have to be, such as the six
/// columns of a modulation.
const MAX_MULTIPLE: u64 = 16;

/// Ops that only move elements, by the layout of their operand. A probe has no layout.
const COPIES: [Opcode; 5] =
    [Opcode::TakeRows, Opcode::TakeShard, Opcode::Pad, Opcode::Compact, Opcode::MoeRoute];

/// Returns the program that probes each kernel of some programs, by the name of the kernel, or why
/// the kernel has none. The same programs give the same probes on every rank.
pub(crate) fn plan_probes<'a>(
    programs: impl IntoIterator<Item = &'a Program>,
) -> BTreeMap<String, Result<Program, String>> {
    let mut probes = BTreeMap::new();
    for p in programs {
        let defined = p.defining_ops();
        for op in &p.ops {
            if op.opcode.table_row().kind != OpKind::Compute || COPIES.contains(&op.opcode) {
                continue;
            }
            let makers = |v: ValueId| defined[v.0 as usize].map(|i| &p.ops[i]);
            probes.entry(name_kernel(p, op, &makers)).or_insert_with(|| build_probe(p, op, &makers));
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
            Err(why) => format!("not probed: {why}"),
        };
        Ok((format!("{KERNEL_KEY} {kernel}"), value))
    };
    probes.into_iter().map(run).collect()
}

/// Returns the op with the types of its operands and its attributes, such as
/// `silu(f32[24, 96])` or `matmul(f32[24, 96], f32[96, 96]) {act = gelu}`.
fn name_kernel<'a>(p: &'a Program, op: &Op, maker: &dyn Fn(ValueId) -> Option<&'a Op>) -> String {
    let text = |v: ValueId| {
        let ty = p.type_of(v);
        let is_weight = maker(v).is_some_and(|op| op.opcode == Opcode::Weight);
        let shown = Type::new(ty.dtype, ty.shape.clone()).display_on(&Mesh::default());
        if is_weight { format!("weight {shown}") } else { shown }
    };
    let keyed = op.keyed.iter().map(|(name, v)| format!("{name}={}", text(*v)));
    let operands: Vec<String> = op.operands.iter().map(|v| text(*v)).chain(keyed).collect();
    let attrs: Vec<String> = stated_attrs(op).map(|(name, a)| format!("{name} = {}", attr_text(a))).collect();
    let attrs = if attrs.is_empty() { String::new() } else { format!(" {{{}}}", attrs.join(", ")) };
    format!("{}({}){attrs}", op.opcode.name(), operands.join(", "))
}

fn stated_attrs(op: &Op) -> impl Iterator<Item = (&String, &Attr)> {
    op.attrs.iter().filter(|(name, _)| !HINT_ATTRS.contains(&name.as_str()))
}

fn attr_text(a: &Attr) -> String {
    match a {
        Attr::Int(i) => i.to_string(),
        Attr::Float(x) => format!("{x:?}"),
        Attr::Str(s) => s.clone(),
        Attr::Ints(v) => format!("{v:?}"),
        Attr::Bool(b) => b.to_string(),
    }
}

/// Builds the probe of an op: at the op's own shape if that is cheap, otherwise at a smaller one.
fn build_probe<'a>(
    p: &'a Program,
    op: &Op,
    maker: &dyn Fn(ValueId) -> Option<&'a Op>,
) -> Result<Program, String> {
    let elements: u64 = op.operands.iter().chain(&op.results).map(|v| p.type_of(*v).element_count()).sum();
    if elements <= MAX_ELEMENTS && op_workload(p, op).flops.0 <= MAX_FLOPS {
        return build_at(p, op, maker, &BTreeMap::new());
    }
    build_at(p, op, maker, &shrink_extents(p, op, 1))
        .or_else(|_| build_at(p, op, maker, &shrink_extents(p, op, MAX_MULTIPLE)))
}

/// Builds the probe of an op with the extents that `extents` replaces.
fn build_at<'a>(
    p: &'a Program,
    op: &Op,
    maker: &dyn Fn(ValueId) -> Option<&'a Op>,
    extents: &BTreeMap<u64, u64>,
) -> Result<Program, String> {
    let mut b = Builder::new_role("probe", "probe", Mesh::default(), &["compute"]);
    // The name of an operand selects its numbers, so it must be the same in every program.
    let source = |b: &mut Builder, name: &str, v: ValueId| {
        let ty = p.type_of(v);
        let shape: Vec<u64> = ty.shape.iter().map(|d| extents.get(d).copied().unwrap_or(*d)).collect();
        add_source(b, name, &Type::new(ty.dtype, shape), maker(v))
    };
    let operands: Vec<ValueId> =
        op.operands.iter().enumerate().map(|(i, v)| source(&mut b, &format!("operand{i}"), *v)).collect();
    let keyed: Vec<(&'static str, ValueId)> =
        op.keyed.iter().map(|(name, v)| (*name, source(&mut b, name, *v))).collect();
    for (name, value) in keyed {
        b.add_keyed(name, value);
    }
    for (name, attr) in stated_attrs(op) {
        b.set_attr(name, attr.clone());
    }
    // The rows of a probe are the first ones of a larger grid.
    let is_placed = match op.view() {
        Ok(OpView::Rope(_) | OpView::NormModulate(_)) => true,
        Ok(OpView::GateResidual(v)) => v.gate().is_some(),
        _ => false,
    };
    if is_placed {
        b.set_attr("first_row", 0_i64);
    }
    let result = match op.opcode {
        // Eight-bit values cannot leave a program; the matmul that reads them covers them.
        Opcode::Quantize => b.add_quantize(operands[0])[1],
        opcode => b.add_op(opcode, &operands),
    };
    let result = cast_to(&mut b, result, DType::F32);
    b.add_output("result", result);
    b.finish().map_err(|errors| errors.first().map_or("no rule".to_string(), |e| e.message.clone()))
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

/// Returns a smaller extent for each large extent of an op. The remainder that decides about
/// alignment is kept, and an extent that is up to `max_multiple` times another one stays so.
fn shrink_extents(p: &Program, op: &Op, max_multiple: u64) -> BTreeMap<u64, u64> {
    let values = op.operands.iter().chain(op.keyed.iter().map(|(_, v)| v));
    let large: BTreeSet<u64> =
        values.flat_map(|v| p.type_of(*v).shape.clone()).filter(|d| *d > SMALL_EXTENT).collect();
    let mut smaller: BTreeMap<u64, u64> = BTreeMap::new();
    for extent in large {
        let base =
            smaller.iter().rev().find(|(d, _)| extent.is_multiple_of(**d) && extent / **d <= max_multiple);
        let new = match base {
            Some((d, s)) => extent / d * s,
            None => SMALL_EXTENT + extent % 64,
        };
        smaller.insert(extent, new);
    }
    smaller
}

/// Runs a probe and returns the first 16 hex digits of the digest of its result, or why the backend
/// does not load it.
fn run_probe(program: Program, backend: &mut dyn Backend) -> Result<String, String> {
    let mut scalars = BTreeMap::new();
    let mut inputs = BTreeMap::new();
    for op in program.ops.iter().filter(|op| matches!(op.opcode, Opcode::Call | Opcode::Input)) {
        let (name, ty) = (op.name.as_deref().unwrap_or_default(), program.type_of(op.results[0]));
        let values = probe_values(name, ty.element_count());
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
    let bytes = |v: &tessera_ir::Value| v.ty.byte_size().0;
    let slots = Slots {
        slot_bytes: program.values.iter().map(bytes).collect(),
        value_slots: (0..program.values.len() as u32).map(Some).collect(),
    };
    let shared = Arc::new(program.clone());
    let handle = match backend.load(&shared, &slots, &mut ProbeWeights) {
        Ok(handle) => handle,
        // The kernel of the full shape may not support the smaller one.
        Err(d) => return Ok(format!("not probed: {}", d.message)),
    };
    backend.run(handle, &call, &mut NoObserver).map_err(|fault| format!("{fault:?}"))?;
    let values = backend.output("result").ok_or("it has no result")?;
    let mut hash = blake3::Hasher::new();
    for x in values {
        hash.update(&x.to_bits().to_le_bytes());
    }
    Ok(hash.finalize().to_hex()[..16].to_string())
}

/// Returns positive numbers around 1, because some operands are sums of squares. They depend on the
/// name of the value.
fn probe_values(name: &str, count: u64) -> Vec<f32> {
    let seed = name.bytes().fold(0, |seed, b| seed * 31 + u64::from(b));
    let mut values = vec![0.0; count as usize];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut values);
    values.iter_mut().for_each(|x| *x = x.abs() + 0.125);
    values
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

struct NoObserver;

impl Observer for NoObserver {
    fn on_issued(&mut self, _op: usize) {}
    fn on_progress(&mut self, _ops: u32) {}
}

/// Returns the place at which probes run: the only rank of a mesh.
pub(crate) fn probe_placement() -> MeshRank {
    MeshRank { mesh: Mesh::default(), rank: Rank(0) }
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use tessera_cpu::{CpuBackend, Pool};

    use super::*;
    use crate::engine::mesh_phases;
    use crate::{DtypePolicy, Mapping, Model, Overrides, Plan, plan};

    fn plan_of(dir: &str, mesh: &str, dtype: DtypePolicy) -> Plan {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(dir);
        let model = Model::open(&dir, &Overrides::default()).unwrap();
        let map = Mapping { mesh: mesh.parse().unwrap(), dtype, ..Mapping::default() };
        plan::plan_model(&model.video, &model.name, "", &map).unwrap()
    }

    fn probes_of(plan: &Plan, rank: u32) -> BTreeMap<String, Result<Program, String>> {
        let programs = mesh_phases(&plan.sealed).filter_map(|p| plan.sealed.rank_program(p, Rank(rank)));
        plan_probes(programs.map(|p| &**p))
    }

    fn run(
        probes: BTreeMap<String, Result<Program, String>>,
        modify: &dyn Fn(&mut Program),
    ) -> Vec<(String, String)> {
        let wait = Duration::from_secs(1);
        let mut cpu = CpuBackend::new(probe_placement(), Pool::single_thread(), Vec::new(), wait);
        let digests = run_probes(probes, &mut cpu, modify).unwrap();
        assert!(digests.iter().all(|(_, d)| !d.starts_with("not probed")), "{digests:?}");
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
    fn another_constant_in_a_kernel_changes_the_digests_of_that_kernel_alone() {
        let plan = plan_of("models/demo", "tp=2", DtypePolicy::F32);
        let start = Instant::now();
        let own = run(probes_of(&plan, 0), &|_| {});
        assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
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
