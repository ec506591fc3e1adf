//! Small programs and bundles that several tests start from.
#![allow(dead_code, clippy::unwrap_used, reason = "each test file uses a part")]

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
    AxisLayout::Shard(Shard { dim, uneven: None, ways: None })
}

pub fn builder(role: &str, mesh: Mesh) -> Builder {
    Builder::role("denoise", role, mesh, &STREAMS)
}

pub fn done(b: Builder) -> Program {
    b.finish().unwrap_or_else(|e| panic!("{e:?}"))
}

/// A term of a sum over `axis`: `[4, 8]` partial.
pub fn partial(b: &mut Builder, axis: Axis) -> ValueId {
    let x = b.weight(&format!("x.{axis}"), f32s(&[4, 4]).on(axis, shard(1)));
    let w = b.weight(&format!("w.{axis}"), f32s(&[8, 4]).on(axis, shard(1)));
    b.op(Opcode::Matmul, &[x, w])
}

/// Reduces on the communication stream, with the events that it takes.
pub fn reduce(b: &mut Builder, v: ValueId, axis: Axis) -> ValueId {
    let e = b.op(Opcode::EventRecord, &[]);
    b.after(e).stream("comm").attr("axis", axis.name()).attr("reduction", Reduction::Sum.name());
    let t = b.issue(Opcode::AllReduce, &[v]);
    b.wait(t, None).unwrap()
}

/// A clean program: `times` row-parallel products, each reduced over tp.
pub fn block(role: &str, mesh: Mesh, times: usize) -> Program {
    let mut b = builder(role, mesh);
    for i in 0..times {
        let p = partial(&mut b, Axis::Tp);
        let y = reduce(&mut b, p, Axis::Tp);
        if i + 1 == times {
            b.output("y", y);
        }
    }
    done(b)
}

/// One slot per value that needs one.
pub fn own_slots(p: &Program) -> Slots {
    let mut slots = Slots { bytes: vec![], of: vec![None; p.values.len()] };
    for op in &p.ops {
        let bare = matches!(op.opcode, Opcode::Input | Opcode::Call | Opcode::Weight | Opcode::CacheRead);
        for r in &op.results {
            let ty = p.ty(*r);
            if !bare && !ty.is_token() {
                slots.of[r.0 as usize] = Some(slots.bytes.len() as u32);
                slots.bytes.push(ty.bytes().0);
            }
        }
    }
    slots
}

/// One role per program, the ranks in order.
pub fn roles(programs: &[Program]) -> Vec<RoleRanks> {
    programs
        .iter()
        .enumerate()
        .map(|(i, p)| RoleRanks { role: p.role.clone(), ranks: vec![Rank(i as u32)] })
        .collect()
}

pub fn phase(programs: Vec<Program>) -> Phase {
    let memory = programs.iter().map(own_slots).collect();
    Phase { name: "denoise".into(), programs, memory }
}

/// A bundle of one phase with one rank per program.
pub fn bundle(programs: Vec<Program>) -> Bundle {
    let mesh = programs[0].mesh;
    Bundle {
        mesh,
        rank_map: RankMap::logical(&mesh, "cpu"),
        roles: roles(&programs),
        phases: vec![phase(programs)],
        calls: vec![("chunk".into(), vec!["denoise".into()])],
        mapping: "mesh = \"tp=2\"\n".into(),
    }
}

pub fn codes(found: &Diagnostics) -> Vec<&'static str> {
    found.iter().map(|d| d.code.id).collect()
}

/// Everything a diagnostic says, in one string.
pub fn text(found: &Diagnostics) -> String {
    tessera_base::render_all(found, tessera_base::Format::Text, &|_| None)
}

#[track_caller]
pub fn only(found: &Diagnostics, code: &str) {
    assert!(!found.is_empty() && found.iter().all(|d| d.code.id == code), "want {code}:\n{}", text(found));
}

#[track_caller]
pub fn clean(found: &Diagnostics) {
    assert!(found.is_empty(), "{}", text(found));
}
