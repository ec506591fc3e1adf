//! What holds of every program: its text reads back, and names are names.
#![allow(clippy::unwrap_used)]

mod common;

use proptest::prelude::*;
use tessera_base::Diagnostics;
use tessera_filetests::hostile::{Seeds, renamed};
use tessera_filetests::own_slots;
use tessera_ir::{
    Attr, Builder, Bundle, DType, Opcode, Phase, Program, RoleRanks, Type, ValueId, canonical, parse,
    parse_all, print,
};
use tessera_mesh::{Axis, AxisLayout, Mesh, RankMap, Reduction, Shard};
use tessera_verify::{Limits, check_program, seal};

/// Codes in order, which names must not change.
fn codes(found: &Diagnostics) -> Vec<&'static str> {
    found.iter().map(|d| d.code.id).collect()
}

/// The digest, or why not.
fn verdict(b: &Bundle, limits: &Limits) -> Result<[u8; 32], Vec<&'static str>> {
    seal(b.clone(), limits).map(|plan| plan.digest()).map_err(|ds| codes(&ds))
}

/// The program as its text reads back.
fn reread(p: &Program) -> Program {
    parse(&print(p), "printed").unwrap_or_else(|ds| panic!("{}\n{}", ds[0].message, print(p)))
}

fn each_program(b: &Bundle, change: impl Fn(&Program) -> Program) -> Bundle {
    let mut b = b.clone();
    b.phases.iter_mut().flat_map(|p| &mut p.programs).for_each(|p| *p = change(p));
    b
}

/// Streams with other names, in the same order.
fn other_streams(p: &Program) -> Program {
    let mut p = p.clone();
    for (i, s) in p.streams.iter_mut().enumerate() {
        *s = format!("s{i}");
    }
    p
}

fn limits() -> [Limits; 2] {
    [Limits::default(), Limits { device_bytes: Some(4096), graph_mixing_off: true }]
}

#[test]
fn whatever_file_can_be_read_prints_to_itself() {
    let mut seen = 0;
    for (name, text) in common::texts() {
        for p in parse_all(&text, &name).unwrap_or_default() {
            let again = reread(&p);
            assert_eq!(print(&again), print(&p), "{name}");
            assert_eq!(again.without_spans(), p.without_spans(), "{name}");
            seen += 1;
        }
    }
    assert!(seen > 150, "only {seen} programs");
}

#[test]
fn a_plan_of_the_files_is_judged_alike_as_text_and_under_other_names() {
    let seeds = Seeds::of(common::texts().into_iter().map(|(_, text)| text));
    let (mut sealed, mut refused) = (0, 0);
    for (n, b) in seeds.bundles().iter().enumerate() {
        for limits in limits() {
            let first = verdict(b, &limits);
            let name = &b.phases[0].name;
            assert_eq!(verdict(&each_program(b, reread), &limits), first, "@{name} as text");
            assert_eq!(
                verdict(&each_program(b, |p| renamed(p, n as u64)), &limits),
                first,
                "@{name} renamed"
            );
            // Names of streams are part of the plan; its verdict does not hang on them.
            let other = verdict(&each_program(b, other_streams), &limits).map(|_| ());
            assert_eq!(other, first.clone().map(|_| ()), "@{name} on other streams");
            match first {
                Ok(_) => sealed += 1,
                Err(_) => refused += 1,
            }
        }
    }
    assert!(sealed > 50 && refused > 50, "{sealed} sealed, {refused} refused");
}

/// One step of making a program: what, and of which values.
type Move = (u8, u8, u8);

/// A well-typed program, which need not be right in every other way.
fn made(role: &str, mesh: Mesh, moves: &[Move], eps: f64) -> Program {
    let mut b = Builder::role("denoise", role, mesh, &["compute", "comm"]);
    let shard = |dim| AxisLayout::Shard(Shard { dim, uneven: None, ways: None });
    let ty = || Type::new(DType::F32, [4, 8]);
    let axes: Vec<Axis> = mesh.axes().collect();
    let mut values: Vec<ValueId> = vec![b.input("x", ty())];
    for (n, (what, one, other)) in moves.iter().enumerate() {
        let pick = |at: u8| values[usize::from(at) % values.len()];
        let (v, w, axis) = (pick(*one), pick(*other), axes[usize::from(*other) % axes.len()]);
        let on = b.ty(v).layout.on(axis);
        let partial = b.ty(v).layout.partial().is_some();
        let whole = b.ty(v).layout.is_replicated() && b.ty(v).shape == [4, 8];
        match what % 12 {
            0 => values.push(b.weight(&format!("w{n}"), ty().on(axis, shard(usize::from(*one) % 2)))),
            1 | 2 => {
                let x = b.weight(&format!("x{n}"), ty().on(axis, shard(1)));
                let y = b.weight(&format!("y{n}"), Type::new(DType::F32, [8, 8]).on(axis, shard(1)));
                values.push(b.label("p").op(Opcode::Matmul, &[x, y]));
            }
            3 if !partial => {
                values.push(b.stream(if *other < 128 { "compute" } else { "comm" }).op(Opcode::Silu, &[v]))
            }
            4 if b.ty(v) == b.ty(w) => values.push(b.op(Opcode::Add, &[v, w])),
            5 | 6 if matches!(on, AxisLayout::Partial { .. }) => {
                if *one < 200 {
                    let e = b.op(Opcode::EventRecord, &[]);
                    b.after(e);
                }
                b.stream("comm").attr("axis", axis.name()).attr("reduction", Reduction::Sum.name());
                let t = b.issue(Opcode::AllReduce, &[v]);
                if *other < 200 {
                    values.extend(b.wait(t, None));
                }
            }
            7 => {
                if let AxisLayout::Shard(s) = on {
                    b.attr("axis", axis.name()).attr("dim", s.dim as u64);
                    values.push(b.op(Opcode::AllGather, &[v]));
                }
            }
            8 if whole => {
                values.push(b.attr("axis", axis.name()).attr("root", 0i64).op(Opcode::Broadcast, &[v]));
            }
            9 if whole => {
                let cache = b.buffer("cache", ty());
                b.write(cache, v);
                values.push(b.read(cache));
            }
            10 if whole => {
                let w = b.weight("norm.w", Type::new(DType::F32, [8]));
                values.push(b.attr("eps", eps).op(Opcode::LayerNorm, &[v, w, w]));
            }
            11 if !partial => b.output(&format!("out \"{n}\""), v),
            _ => {}
        }
    }
    b.finish().unwrap_or_else(|e| panic!("{e:?}"))
}

/// The same moves for two roles, or one more for the second.
fn plan(moves: &[Move], more: &[Move], eps: f64) -> Bundle {
    let mesh: Mesh = "tp=2, dp=2".parse().unwrap();
    let names = ["r@dp0", "r@dp1"];
    let programs = vec![made(names[0], mesh, moves, eps), made(names[1], mesh, &[moves, more].concat(), eps)];
    Bundle {
        mesh,
        rank_map: RankMap::logical(&mesh, "cpu"),
        roles: RoleRanks::by_name(&mesh, &names),
        phases: vec![Phase {
            name: "denoise".into(),
            memory: programs.iter().map(own_slots).collect(),
            programs,
        }],
        calls: vec![("call".into(), vec!["denoise".into()])],
        mapping: String::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_program_reads_back_and_is_judged_alike(
        moves in prop::collection::vec(any::<Move>(), 0..30),
        more in prop::collection::vec(any::<Move>(), 0..2),
        eps in prop_oneof![Just(0.0), Just(1e-6), 0.0..1e300f64, any::<u64>().prop_map(|b| f64::from_bits(b >> 2))],
        seed in any::<u64>(),
    ) {
        let b = plan(&moves, &more, eps);
        for p in &b.phases[0].programs {
            let (again, named) = (reread(p), renamed(p, seed));
            prop_assert_eq!(&again.clone().without_spans(), p);
            prop_assert_eq!(canonical(&named), canonical(p));
            prop_assert_eq!(&reread(&named).without_spans(), &named);
            let found = codes(&check_program(p));
            prop_assert_eq!(&codes(&check_program(&again)), &found);
            prop_assert_eq!(&codes(&check_program(&named)), &found);
            prop_assert_eq!(&codes(&check_program(&other_streams(p))), &found);
        }
        for limits in limits() {
            let first = verdict(&b, &limits);
            prop_assert_eq!(&verdict(&each_program(&b, reread), &limits), &first);
            prop_assert_eq!(&verdict(&each_program(&b, |p| renamed(p, seed)), &limits), &first);
        }
    }
}

#[test]
fn moves_make_plans_that_pass_and_plans_that_do_not() {
    let sum: &[Move] = &[(1, 0, 0), (5, 1, 0), (11, 2, 0)];
    assert!(verdict(&plan(sum, &[], 1e-6), &Limits::default()).is_ok());
    // One role reduces once more, over an axis that both roles are on.
    let dp: &[Move] = &[(1, 0, 1), (5, 1, 1)];
    assert_eq!(verdict(&plan(&[], dp, 1e-6), &Limits::default()), Err(vec!["T0307"]));
    let p = made("r", "tp=2".parse().unwrap(), &[(10, 0, 0)], f64::MIN_POSITIVE);
    assert!(p.ops.iter().any(|o| o.attrs.get("eps") == Some(&Attr::Float(f64::MIN_POSITIVE))));
}
