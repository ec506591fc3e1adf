//! Small programs and bundles that several tests share.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses some of these")]

use tessera_base::Diagnostics;
use tessera_ir::{Builder, Bundle, DType, Opcode, Phase, Program, RoleRanks, Slots, Type, ValueId};
use tessera_mesh::{Axis, AxisLayout, Mesh, Rank, RankMap, Reduction, Shard};

pub const STREAMS: [&str; 3] = ["compute", "comm", "io"];

pub fn mesh(text: &str) -> Mesh {
    text.parse().unwrap()
}

pub fn f32s(shape: &[u64]) -> Type {
    Type::new(DType::F32, shape)
}

pub fn i64s() -> Type {
    Type::scalar(DType::I64)
}

pub fn shard(dim: usize) -> AxisLayout {
    AxisLayout::Shard(Shard { dim, uneven: None, subgroup_size: None })
}

pub fn builder(role: &str, mesh: Mesh) -> Builder {
    Builder::new_role("denoise", role, mesh, &STREAMS)
}

pub fn finish_program(b: Builder) -> Program {
    b.finish().unwrap_or_else(|e| panic!("{e:?}"))
}

/// Returns one term of a sum over `axis`: `[4, 8]` partial.
pub fn partial(b: &mut Builder, axis: Axis) -> ValueId {
    let x = b.add_weight(&format!("x.{axis}"), f32s(&[4, 4]).with_axis_layout(axis, shard(1)));
    let w = b.add_weight(&format!("w.{axis}"), f32s(&[8, 4]).with_axis_layout(axis, shard(1)));
    b.add_op(Opcode::Matmul, &[x, w])
}

/// Reduces a value on the communication stream, with the necessary events.
pub fn reduce(b: &mut Builder, v: ValueId, axis: Axis) -> ValueId {
    let e = b.add_op(Opcode::EventRecord, &[]);
    b.start_after(e)
        .set_stream("comm")
        .set_attr("axis", axis.name())
        .set_attr("reduction", Reduction::Sum.name());
    let t = b.add_issue(Opcode::AllReduce, &[v]);
    b.add_wait(t, None).unwrap()
}

/// Returns a correct program with `times` row-parallel matmuls, each reduced over tp.
pub fn block(role: &str, mesh: Mesh, times: usize) -> Program {
    let mut b = builder(role, mesh);
    for i in 0..times {
        let p = partial(&mut b, Axis::Tp);
        let y = reduce(&mut b, p, Axis::Tp);
        if i + 1 == times {
            b.add_output("y", y);
        }
    }
    finish_program(b)
}

/// Assigns one slot to each value that needs memory.
pub fn own_slots(p: &Program) -> Slots {
    let mut slots = Slots { slot_bytes: vec![], value_slots: vec![None; p.values.len()] };
    for op in &p.ops {
        let bare = matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::CacheRead);
        for r in &op.results {
            let ty = p.type_of(*r);
            if !bare && !ty.is_token() {
                slots.value_slots[r.0 as usize] = Some(slots.slot_bytes.len() as u32);
                slots.slot_bytes.push(ty.byte_size().0);
            }
        }
    }
    slots
}

/// Returns one role per program, with ranks in order.
pub fn roles(programs: &[Program]) -> Vec<RoleRanks> {
    programs
        .iter()
        .enumerate()
        .map(|(i, p)| RoleRanks { role: p.role.clone(), ranks: vec![Rank(i as u32)] })
        .collect()
}

pub fn phase(programs: Vec<Program>) -> Phase {
    let memory = programs.iter().map(own_slots).collect();
    Phase { name: "denoise".into(), programs, slots: memory }
}

/// Returns a bundle of one phase with one rank per program.
pub fn bundle(programs: Vec<Program>) -> Bundle {
    let mesh = programs[0].mesh;
    Bundle {
        mesh,
        rank_map: RankMap::from_device_kind(&mesh, "cpu"),
        hosts: None,
        roles: roles(&programs),
        phases: vec![phase(programs)],
        calls: vec![("chunk".into(), vec!["denoise".into()])],
        mapping: "mesh = \"tp=2\"\n".into(),
    }
}

pub fn diagnostic_codes(found: &Diagnostics) -> Vec<&'static str> {
    found.iter().map(|d| d.code.id).collect()
}

/// Renders all text of the diagnostics into one string.
pub fn diagnostic_text(found: &Diagnostics) -> String {
    tessera_base::render_all(found, tessera_base::DiagnosticFormat::Text, &|_| None)
}

#[track_caller]
pub fn assert_only(found: &Diagnostics, code: &str) {
    assert!(
        !found.is_empty() && found.iter().all(|d| d.code.id == code),
        "want {code}:\n{}",
        diagnostic_text(found)
    );
}

#[track_caller]
pub fn assert_clean(found: &Diagnostics) {
    assert!(found.is_empty(), "{}", diagnostic_text(found));
}
