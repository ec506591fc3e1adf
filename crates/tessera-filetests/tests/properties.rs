//! Properties of every program: its text survives printing and parsing, and names have no meaning.
#![allow(clippy::unwrap_used)]

mod common;

use proptest::prelude::*;
use tessera_base::Diagnostics;
use tessera_filetests::dedicated_slots;
use tessera_filetests::hostile::{SeedCorpus, rename_values};
use tessera_ir::{
    Builder, Bundle, DType, OpView, Opcode, Phase, Program, RoleRanks, Type, ValueId, canonical_text, parse,
    parse_all, print,
};
use tessera_mesh::{Axis, AxisLayout, Mesh, RankMap, Reduction, Shard};
use tessera_verify::{DeviceLimits, check_program, seal};

/// Returns the codes of diagnostics in order. Renaming values must not change them.
fn diagnostic_codes(found: &Diagnostics) -> Vec<&'static str> {
    found.iter().map(|d| d.code.id).collect()
}

/// Returns the digest of the sealed plan, or the codes of the rejection.
fn verdict(b: &Bundle, limits: &DeviceLimits) -> Result<[u8; 32], Vec<&'static str>> {
    seal(b.clone(), limits).map(|plan| plan.digest()).map_err(|ds| diagnostic_codes(&ds))
}

/// Prints and parses a program.
fn print_and_parse(p: &Program) -> Program {
    parse(&print(p), "printed").unwrap_or_else(|ds| panic!("{}\n{}", ds[0].message, print(p)))
}

fn map_programs(b: &Bundle, change: impl Fn(&Program) -> Program) -> Bundle {
    let mut b = b.clone();
    b.phases.iter_mut().flat_map(|p| &mut p.programs).for_each(|p| *p = change(p));
    b
}

/// Renames the streams of a program, in the same order.
fn rename_streams(p: &Program) -> Program {
    let mut p = p.clone();
    for (i, s) in p.streams.iter_mut().enumerate() {
        *s = format!("s{i}");
    }
    p
}

fn tested_limits() -> [DeviceLimits; 2] {
    [DeviceLimits::default(), DeviceLimits { device_bytes: Some(4096), graph_mixing_off: true }]
}

#[test]
fn every_file_survives_printing_and_parsing() {
    let mut seen = 0;
    for (random_name, file_text) in common::read_files() {
        for p in parse_all(&file_text, &random_name).unwrap_or_default() {
            let again = print_and_parse(&p);
            assert_eq!(print(&again), print(&p), "{random_name}");
            assert_eq!(again.without_spans(), p.without_spans(), "{random_name}");
            seen += 1;
        }
    }
    assert!(seen > 150, "only {seen} programs");
}

#[test]
fn verdicts_do_not_depend_on_printing_or_names() {
    let seeds = SeedCorpus::from_texts(common::read_files().into_iter().map(|(_, text)| text));
    let (mut sealed, mut refused) = (0, 0);
    for (n, b) in seeds.bundles().iter().enumerate() {
        for limits in tested_limits() {
            let first = verdict(b, &limits);
            let name = &b.phases[0].name;
            assert_eq!(verdict(&map_programs(b, print_and_parse), &limits), first, "@{name} as text");
            assert_eq!(
                verdict(&map_programs(b, |p| rename_values(p, n as u64)), &limits),
                first,
                "@{name} renamed"
            );
            // Stream names are part of the digest; the verdict does not depend on them.
            let other = verdict(&map_programs(b, rename_streams), &limits).map(|_| ());
            assert_eq!(other, first.clone().map(|_| ()), "@{name} on other streams");
            match first {
                Ok(_) => sealed += 1,
                Err(_) => refused += 1,
            }
        }
    }
    assert!(sealed > 50 && refused > 50, "{sealed} sealed, {refused} rejected");
}

/// One step of building a program: the op to add and the operands to use.
type BuildStep = (u8, u8, u8);

/// Builds a well-typed program that the verifier may still reject.
fn build_program(role: &str, mesh: Mesh, moves: &[BuildStep], eps: f64) -> Program {
    let mut b = Builder::new_role("denoise", role, mesh, &["compute", "comm"]);
    let shard = |dim| AxisLayout::Shard(Shard { dim, uneven: None, subgroup_size: None });
    let ty = || Type::new(DType::F32, [4, 8]);
    let axes: Vec<Axis> = mesh.active_axes().collect();
    let mut values: Vec<ValueId> = vec![b.add_input("x", ty())];
    for (n, (what, one, other)) in moves.iter().enumerate() {
        let pick = |at: u8| values[usize::from(at) % values.len()];
        let (v, w, axis) = (pick(*one), pick(*other), axes[usize::from(*other) % axes.len()]);
        let on = b.type_of(v).layout.on_axis(axis);
        let partial = b.type_of(v).layout.partial_axis().is_some();
        let whole = b.type_of(v).layout.is_replicated() && b.type_of(v).shape == [4, 8];
        match what % 12 {
            0 => values.push(
                b.add_weight(&format!("w{n}"), ty().with_axis_layout(axis, shard(usize::from(*one) % 2))),
            ),
            1 | 2 => {
                let x = b.add_weight(&format!("x{n}"), ty().with_axis_layout(axis, shard(1)));
                let y = b.add_weight(
                    &format!("y{n}"),
                    Type::new(DType::F32, [8, 8]).with_axis_layout(axis, shard(1)),
                );
                values.push(b.set_label("p").add_op(Opcode::Matmul, &[x, y]));
            }
            3 if !partial => values
                .push(b.set_stream(if *other < 128 { "compute" } else { "comm" }).add_op(Opcode::Silu, &[v])),
            4 if b.type_of(v) == b.type_of(w) => values.push(b.add_op(Opcode::Add, &[v, w])),
            5 | 6 if matches!(on, AxisLayout::Partial { .. }) => {
                if *one < 200 {
                    let e = b.add_op(Opcode::EventRecord, &[]);
                    b.start_after(e);
                }
                b.set_stream("comm")
                    .set_attr("axis", axis.name())
                    .set_attr("reduction", Reduction::Sum.name());
                let t = b.add_issue(Opcode::AllReduce, &[v]);
                if *other < 200 {
                    values.extend(b.add_wait(t, None));
                }
            }
            7 => {
                if let AxisLayout::Shard(s) = on {
                    b.set_attr("axis", axis.name()).set_attr("dim", s.dim as u64);
                    values.push(b.add_op(Opcode::AllGather, &[v]));
                }
            }
            8 if whole => {
                values.push(
                    b.set_attr("axis", axis.name()).set_attr("root", 0i64).add_op(Opcode::Broadcast, &[v]),
                );
            }
            9 if whole => {
                let cache = b.declare_buffer("cache", ty());
                b.write_buffer(cache, v);
                values.push(b.read_buffer(cache));
            }
            10 if whole => {
                let w = b.add_weight("norm.w", Type::new(DType::F32, [8]));
                values.push(b.set_attr("eps", eps).add_op(Opcode::LayerNorm, &[v, w, w]));
            }
            11 if !partial => b.add_output(&format!("out \"{n}\""), v),
            _ => {}
        }
    }
    b.finish().unwrap_or_else(|e| panic!("{e:?}"))
}

/// Builds a plan with the same steps for two roles, plus more steps for the second role.
fn build_plan(moves: &[BuildStep], more: &[BuildStep], eps: f64) -> Bundle {
    let mesh: Mesh = "tp=2, dp=2".parse().unwrap();
    let names = ["r@dp0", "r@dp1"];
    let programs = vec![
        build_program(names[0], mesh, moves, eps),
        build_program(names[1], mesh, &[moves, more].concat(), eps),
    ];
    Bundle {
        mesh,
        rank_map: RankMap::from_device_kind(&mesh, "cpu"),
        hosts: None,
        roles: RoleRanks::assign_by_name(&mesh, &names),
        phases: vec![Phase {
            name: "denoise".into(),
            slots: programs.iter().map(dedicated_slots).collect(),
            programs,
        }],
        calls: vec![("call".into(), vec!["denoise".into()])],
        mapping: String::new(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_program_reads_back_and_gets_the_same_verdict(
        moves in prop::collection::vec(any::<BuildStep>(), 0..30),
        more in prop::collection::vec(any::<BuildStep>(), 0..2),
        eps in prop_oneof![Just(0.0), Just(1e-6), 0.0..1e300f64, any::<u64>().prop_map(|b| f64::from_bits(b >> 2))],
        seed in any::<u64>(),
    ) {
        let b = build_plan(&moves, &more, eps);
        for p in &b.phases[0].programs {
            let (again, named) = (print_and_parse(p), rename_values(p, seed));
            prop_assert_eq!(&again.clone().without_spans(), p);
            prop_assert_eq!(canonical_text(&named), canonical_text(p));
            prop_assert_eq!(&print_and_parse(&named).without_spans(), &named);
            let found = diagnostic_codes(&check_program(p));
            prop_assert_eq!(&diagnostic_codes(&check_program(&again)), &found);
            prop_assert_eq!(&diagnostic_codes(&check_program(&named)), &found);
            prop_assert_eq!(&diagnostic_codes(&check_program(&rename_streams(p))), &found);
        }
        for limits in tested_limits() {
            let first = verdict(&b, &limits);
            prop_assert_eq!(&verdict(&map_programs(&b, print_and_parse), &limits), &first);
            prop_assert_eq!(&verdict(&map_programs(&b, |p| rename_values(p, seed)), &limits), &first);
        }
    }
}

#[test]
fn random_plans_pass_and_fail() {
    let sum: &[BuildStep] = &[(1, 0, 0), (5, 1, 0), (11, 2, 0)];
    assert!(verdict(&build_plan(sum, &[], 1e-6), &DeviceLimits::default()).is_ok());
    // One role issues one more reduction over an axis that both roles share.
    let dp: &[BuildStep] = &[(1, 0, 1), (5, 1, 1)];
    assert_eq!(verdict(&build_plan(&[], dp, 1e-6), &DeviceLimits::default()), Err(vec!["T0307"]));
    let p = build_program("r", "tp=2".parse().unwrap(), &[(10, 0, 0)], f64::MIN_POSITIVE);
    let smallest = |v: &OpView| matches!(v, OpView::LayerNorm(v) if v.eps == f64::MIN_POSITIVE);
    assert!(p.ops.iter().any(|o| smallest(&o.view().unwrap())));
}
