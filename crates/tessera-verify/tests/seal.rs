//! Tests of sealing: memory, calls, limits, and a digest that depends on the plan only.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use proptest::prelude::*;
use tessera_ir::{
    Attr, Bundle, CommRoute, Communicator, GroupStatement, HostStatement, Opcode, Program, Slots,
    canonical_text,
};
use tessera_mesh::{Axis, Group, GroupPath, HostMap, Rank, RankMap};
use tessera_verify::{CODES, DeviceLimits, SealedPlan, check_slots, collective_lines, seal};

fn two_rank_bundle() -> Bundle {
    bundle((0..2).map(|r| block(&format!("r{r}"), mesh("tp=2"), 3)).collect())
}

fn digest(b: &Bundle) -> [u8; 32] {
    seal(b.clone(), &DeviceLimits::default()).unwrap_or_else(|e| panic!("{}", diagnostic_text(&e))).digest()
}

fn seal_errors(change: impl FnOnce(&mut Bundle)) -> tessera_base::Diagnostics {
    let mut b = two_rank_bundle();
    change(&mut b);
    seal(b, &DeviceLimits::default()).err().unwrap_or_default()
}

#[test]
fn a_sealed_plan_has_data_for_every_rank() {
    let plan = seal(two_rank_bundle(), &DeviceLimits::default()).unwrap();
    assert_eq!(plan.phase_names(), ["denoise"]);
    assert_eq!(plan.digest_hex().len(), 64);
    for r in [Rank(0), Rank(1)] {
        let p = plan.rank_program("denoise", r).unwrap();
        assert_eq!(p.role, format!("r{r}"));
        assert_eq!(plan.rank_slots("denoise", r).unwrap().value_slots.len(), p.values.len());
        let memory = plan.rank_memory(r).unwrap();
        // x [4, 4] and w [8, 4]; three matmul results and three sums of [4, 8]; f32.
        assert_eq!([memory.weights.0, memory.buffers.0, memory.inputs.0], [64 + 128, 0, 0]);
        assert_eq!(memory.temporaries.0, 6 * 128);
        assert_eq!(memory.total_bytes().0, 960);
    }
    let (a, b) = (
        plan.collective_digest("denoise", Rank(0)).unwrap(),
        plan.collective_digest("denoise", Rank(1)).unwrap(),
    );
    assert_eq!((a.collectives, a), (3, b));
    assert!(
        plan.rank_program("encode", Rank(0)).is_none() && plan.rank_program("denoise", Rank(2)).is_none()
    );
}

#[test]
fn a_runtime_can_recompute_the_trace_digest() {
    let p = block("stage0", mesh("tp=2"), 2);
    let lines: Vec<String> = collective_lines(&p).into_iter().map(|(_, line)| line).collect();
    assert_eq!(lines, ["tp all_reduce f32[4, 8] {tp: partial(sum)} reduction=sum"; 2]);
    let folded = *blake3::hash(format!("{}\n{}\n", lines[0], lines[1]).as_bytes()).as_bytes();
    let plan = seal(
        bundle(vec![block("r0", mesh("tp=2"), 2), block("r1", mesh("tp=2"), 2)]),
        &DeviceLimits::default(),
    );
    assert_eq!(plan.unwrap().collective_digest("denoise", Rank(0)).unwrap().trace_digest, folded);
}

#[test]
fn the_digest_covers_all_run_inputs() {
    let base = digest(&two_rank_bundle());
    let changes: Vec<fn(&mut Bundle)> = vec![
        |b| b.mapping.push('\n'),
        |b| b.rank_map = RankMap::new(&b.mesh, vec!["cpu1".into(), "cpu0".into()]).unwrap(),
        |b| b.calls.push(("more".into(), vec![])),
        |b| b.phases[0].slots[0].slot_bytes[0] += 1,
        |b| {
            b.phases[0].programs[0].role = "first".into();
            b.roles[0].role = "first".into();
        },
        |b| *b = bundle((0..2).map(|r| block(&format!("r{r}"), mesh("tp=2"), 4)).collect()),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut b = two_rank_bundle();
        change(&mut b);
        assert_ne!(digest(&b), base, "change {i}");
    }
    // The listing order is not a property of the plan.
    let mut b = two_rank_bundle();
    b.roles.reverse();
    b.phases[0].programs.reverse();
    b.phases[0].slots.reverse();
    assert_eq!(digest(&b), base);
}

#[test]
fn t0324_phases_of_a_role_agree_about_buffers() {
    let with = |second: u64| {
        let m = mesh("tp=1");
        let program = |name: &str, rows: u64| {
            let mut b = tessera_ir::Builder::new_role(name, "stage0", m, &STREAMS);
            let x = b.add_input("x", f32s(&[4, 8]));
            let cache = b.declare_buffer("kv", f32s(&[rows, 8]));
            b.write_buffer(cache, x);
            finish_program(b)
        };
        let mut b = bundle(vec![program("denoise", 8)]);
        let mut clean = phase(vec![program("clean", second)]);
        clean.name = "clean".into();
        b.phases.push(clean);
        seal(b, &DeviceLimits::default()).err().unwrap_or_default()
    };
    assert_only(&with(9), "T0324");
    assert_clean(&with(8));
}

#[test]
fn t0325_t0326_every_temporary_has_a_large_enough_slot() {
    let p = block("stage0", mesh("tp=2"), 1);
    let y = p.ops.iter().position(|o| o.opcode == Opcode::Matmul).unwrap();
    let y = p.ops[y].results[0].0 as usize;
    let with = |change: &dyn Fn(&mut Slots)| {
        let mut s = own_slots(&p);
        change(&mut s);
        check_slots(&p, &s)
    };
    assert_clean(&with(&|_| ()));
    assert_only(&with(&|s| s.value_slots[y] = None), "T0325");
    assert_only(&with(&|s| s.value_slots[y] = Some(99)), "T0325");
    assert_only(&with(&|s| s.value_slots.truncate(y)), "T0325");
    assert_only(&with(&|s| s.slot_bytes[0] -= 1), "T0326");
    assert_clean(&with(&|s| s.slot_bytes[0] += 1));
}

#[test]
fn t0327_live_values_do_not_share_a_slot() {
    // a = silu x; b = silu a; c = silu b on one stream.
    let chain = |shared: [u32; 3]| {
        let mut b = builder("stage0", mesh("tp=1"));
        let x = b.add_input("x", f32s(&[4]));
        let y = b.add_op(Opcode::Silu, &[x]);
        let z = b.add_op(Opcode::Silu, &[y]);
        b.add_op(Opcode::Silu, &[z]);
        let slots = Slots {
            slot_bytes: vec![16; 3],
            value_slots: [None].into_iter().chain(shared.map(Some)).collect(),
        };
        check_slots(&finish_program(b), &slots)
    };
    assert_clean(&chain([0, 1, 0]));
    assert_only(&chain([0, 0, 1]), "T0327");
}

#[test]
fn t0327_a_collective_holds_operand_and_result_from_issue_to_wait() {
    let program = |reuse_operand: bool, early: bool| {
        let mut b = builder("stage0", mesh("tp=2"));
        let p = partial(&mut b, Axis::Tp);
        let x = b.add_input("x", f32s(&[4, 8]));
        let t = b.set_attr("axis", "tp").set_attr("reduction", "sum").add_issue(Opcode::AllReduce, &[p]);
        let other = if early { Some(b.add_op(Opcode::Silu, &[x])) } else { None };
        let y = b.add_wait(t, None).unwrap();
        let other = other.unwrap_or_else(|| b.add_op(Opcode::Silu, &[x]));
        b.add_output("y", y);
        let p2 = finish_program(b);
        let mut slots = own_slots(&p2);
        slots.value_slots[other.0 as usize] = slots.value_slots[if reuse_operand { p } else { y }.0 as usize];
        check_slots(&p2, &slots)
    };
    assert_only(&program(true, true), "T0327");
    assert_clean(&program(true, false));
    // The collective writes its result while the other op runs.
    assert_only(&program(false, true), "T0327");
}

#[test]
fn t0327_slot_reuse_across_streams_needs_events() {
    let program = |ordered: bool| {
        let mut b = builder("stage0", mesh("tp=1"));
        let x = b.add_input("x", f32s(&[4]));
        let y = b.add_op(Opcode::Silu, &[x]);
        b.add_output("y", y);
        let e = b.add_op(Opcode::EventRecord, &[]);
        if ordered {
            b.start_after(e);
        }
        let z = b.set_stream("io").add_op(Opcode::Silu, &[x]);
        let p = finish_program(b);
        let mut slots = own_slots(&p);
        slots.value_slots[z.0 as usize] = slots.value_slots[y.0 as usize];
        check_slots(&p, &slots)
    };
    assert_only(&program(false), "T0327");
    assert_clean(&program(true));
}

#[test]
fn t0328_the_plan_must_fit_the_device() {
    let at = |device_bytes| {
        seal(two_rank_bundle(), &DeviceLimits { device_bytes, ..DeviceLimits::default() })
            .err()
            .unwrap_or_default()
    };
    assert_clean(&at(Some(960)));
    assert_clean(&at(None));
    let found = at(Some(959));
    assert_only(&found, "T0328");
    assert!(
        diagnostic_text(&found).contains("weights 192 + buffers 0 + inputs 0 + temporaries 768 = 960 bytes")
    );
    assert!(diagnostic_text(&found).contains("959 bytes: 1 too few"));
}

#[test]
fn t0329_t0330_bundle_components_fit_together() {
    assert_only(&seal_errors(|b| b.calls[0].1.push("denoize".into())), "T0330");
    assert_only(&seal_errors(|b| b.roles[1].ranks.clear()), "T0329");
    assert_only(&seal_errors(|b| drop(b.phases[0].slots.pop())), "T0329");
    assert_only(&seal_errors(|b| b.phases.push(b.phases[0].clone())), "T0329");
    assert_only(&seal_errors(|b| b.calls.push(b.calls[0].clone())), "T0329");
    assert_only(&seal_errors(|b| b.rank_map = RankMap::from_device_kind(&mesh("tp=3"), "cpu")), "T0329");
    assert_clean(&seal_errors(|b| b.calls[0].1.push("denoise".into())));
}

/// States the hosts of a plan of two ranks, and the path of their group.
fn state_hosts(b: &mut Bundle, counts: &[u32], path: GroupPath) {
    let communicator = Communicator {
        group: Group::whole_axis(Axis::Tp),
        is_transfer: false,
        members: vec![Rank(0), Rank(1)],
    };
    b.hosts = Some(HostStatement {
        hosts: HostMap::from_counts(counts, &[]),
        groups: vec![GroupStatement { communicator, path }],
    });
}

#[test]
fn t0346_t0347_t0348_stated_hosts_fit_ranks_groups_and_ops() {
    let on = |counts: &[u32], path, change: fn(&mut Bundle)| {
        seal_errors(|b| {
            state_hosts(b, counts, path);
            change(b);
        })
    };
    let (peer, network) = (GroupPath::PeerMemory, GroupPath::Network);
    assert_clean(&on(&[2], peer, |_| {}));
    assert_clean(&on(&[1, 1], network, |_| {}));
    for counts in [&[1][..], &[3], &[1, 2]] {
        assert_only(&on(counts, peer, |_| {}), "T0346");
    }
    assert_only(&on(&[1, 1], peer, |_| {}), "T0347");
    assert_only(&on(&[2], network, |_| {}), "T0347");
    assert_only(&on(&[2], peer, |b| b.hosts.iter_mut().for_each(|h| h.groups.clear())), "T0347");
    // Every collective of the plan requests the memory of its peers.
    let request = |b: &mut Bundle| {
        let programs = b.phases.iter_mut().flat_map(|phase| &mut phase.programs);
        let ops = programs.flat_map(|p| &mut p.ops).filter(|op| CommRoute::from_op(op).is_some());
        ops.for_each(|op| drop(op.attrs.insert("transport".into(), Attr::Str("p2p".into()))));
    };
    assert_clean(&on(&[2], peer, request));
    assert_only(&on(&[1, 1], network, request), "T0348");
}

#[test]
fn the_digest_covers_hosts_domains_and_paths() {
    let digest_with = |hosts: Option<(HostMap, GroupPath)>| {
        let mut b = two_rank_bundle();
        if let Some((hosts, path)) = hosts {
            state_hosts(&mut b, &[2], path);
            b.hosts.iter_mut().for_each(|stated| stated.hosts = hosts.clone());
        }
        digest(&b)
    };
    let digests = [
        digest_with(None),
        digest_with(Some((HostMap::from_counts(&[2], &[]), GroupPath::PeerMemory))),
        digest_with(Some((HostMap::from_counts(&[2], &[1]), GroupPath::PeerMemory))),
        digest_with(Some((HostMap::from_counts(&[1, 1], &[]), GroupPath::Network))),
        digest_with(Some((HostMap::from_counts(&[1, 1], &[0, 0]), GroupPath::Domain))),
    ];
    let distinct: std::collections::BTreeSet<_> = digests.iter().collect();
    assert_eq!(distinct.len(), digests.len());
}

#[test]
fn every_code_has_a_page_and_a_test() {
    let registry = tessera_base::Registry::new(&[CODES]);
    let tests = [
        include_str!("program.rs"),
        include_str!("ranks.rs"),
        include_str!("seal.rs"),
        include_str!("traces.rs"),
    ];
    let tests = tests.concat();
    for code in registry.iter() {
        assert!(code.page.len() > 150, "{} has a thin page", code.id);
        assert!(tests.contains(&format!("\"{}\"", code.id)), "{} has no test", code.id);
    }
}

/// Renames every value: the text form differs, but the plan is the same.
fn rename_values(p: &Program, seed: u64) -> Program {
    let mut p = p.clone();
    for (i, v) in p.values.iter_mut().enumerate() {
        v.name = format!("v{}", seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(i as u64));
    }
    p
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn names_do_not_matter(seed in any::<u64>(), times in 1usize..4) {
        let programs: Vec<Program> = (0..2).map(|r| block(&format!("r{r}"), mesh("tp=2"), times)).collect();
        let named: Vec<Program> = programs.iter().map(|p| rename_values(p, seed)).collect();
        prop_assert_eq!(canonical_text(&programs[0]), canonical_text(&named[0]));
        prop_assert_eq!(digest(&bundle(programs)), digest(&bundle(named)));
    }
}

#[test]
fn t0336_one_graph_at_a_time_if_mixing_is_off() {
    let seal = |graph: &'static [&'static str], graph_mixing_off: bool| {
        let program = |r: usize| {
            let mut b = builder(&format!("r{r}"), mesh("tp=2"));
            for (i, name) in graph.iter().enumerate() {
                let x = b.add_weight(&format!("x{i}"), f32s(&[4]));
                if !name.is_empty() {
                    b.set_attr("graph", *name);
                }
                b.set_attr("axis", "tp").set_attr("root", 0i64).add_op(Opcode::Broadcast, &[x]);
            }
            finish_program(b)
        };
        let limits = DeviceLimits { graph_mixing_off, ..DeviceLimits::default() };
        seal(bundle((0..2).map(program).collect()), &limits).err().unwrap_or_default()
    };
    assert_clean(&seal(&["g", ""], false));
    assert_only(&seal(&["g", ""], true), "T0336");
    assert_clean(&seal(&["", "g", "h"], true));
}

#[test]
fn t0340_a_collective_in_place() {
    let program = |op: Opcode, read_after: bool| {
        let mut b = builder("stage0", mesh("tp=2"));
        let x = match op {
            Opcode::AllReduce => partial(&mut b, Axis::Tp),
            _ => {
                let w = b.add_weight("x", f32s(&[4, 8]).with_axis_layout(Axis::Tp, shard(0)));
                b.add_op(Opcode::Silu, &[w])
            }
        };
        b.set_attr("axis", "tp");
        match op {
            Opcode::AllReduce => b.set_attr("reduction", "sum"),
            _ => b.set_attr("dim", 0i64),
        };
        let t = b.add_issue(op, &[x]);
        if read_after {
            b.add_op(Opcode::Add, &[x, x]);
        }
        let y = b.add_wait(t, None).unwrap();
        (finish_program(b), x, y)
    };
    let verify = |op, read_after| {
        let (p, x, y) = program(op, read_after);
        let mut slots = own_slots(&p);
        let (from, into) =
            (slots.value_slots[y.0 as usize].unwrap(), slots.value_slots[x.0 as usize].unwrap());
        slots.slot_bytes[into as usize] =
            slots.slot_bytes[into as usize].max(slots.slot_bytes[from as usize]);
        slots.value_slots[y.0 as usize] = Some(into);
        check_slots(&p, &slots)
    };
    assert_clean(&verify(Opcode::AllReduce, false));
    assert_only(&verify(Opcode::AllReduce, true), "T0340");
    assert_only(&verify(Opcode::AllGather, false), "T0340");
}

#[test]
fn the_covered_parts_differ_where_two_plans_differ() {
    let parts = |b: &Bundle| seal(b.clone(), &DeviceLimits::default()).unwrap().covered_parts();
    let plan = two_rank_bundle();
    let differing = |change: &dyn Fn(&mut Bundle)| -> Vec<String> {
        let mut other = plan.clone();
        change(&mut other);
        let changed = parts(&other);
        let differs = |part: &&(String, String)| !changed.contains(part);
        parts(&plan).iter().filter(differs).map(|(name, _)| name.clone()).collect()
    };
    assert_eq!(parts(&plan), parts(&plan.clone()));
    assert_eq!(differing(&|b| b.mapping += "x"), ["mapping"]);
    assert_eq!(differing(&|b| b.rank_map = RankMap::from_device_kind(&b.mesh, "other")), ["devices"]);
    let seal_on = |counts: &[u32], path| {
        let mut placed = plan.clone();
        state_hosts(&mut placed, counts, path);
        seal(placed, &DeviceLimits::default()).unwrap()
    };
    let (one, two) = (seal_on(&[2], GroupPath::PeerMemory), seal_on(&[1, 1], GroupPath::Network));
    let bare = seal(plan.clone(), &DeviceLimits::default()).unwrap();
    assert!(one.digest() != two.digest() && one.digest() != bare.digest());
    let without = |sealed: &SealedPlan| {
        sealed.covered_parts().into_iter().filter(|p| !bare.covered_parts().contains(p)).collect::<Vec<_>>()
    };
    assert_eq!(
        without(&two),
        [
            ("hosts".to_string(), "2 hosts: ranks 0; 1; switch domains 0 1".to_string()),
            ("path of group over tp of ranks 0, 1".to_string(), "network".to_string()),
        ]
    );
    assert_eq!(one.list_properties().len(), bare.list_properties().len() + 1);
    let calls = differing(&|b| b.calls[0].0 += "x");
    assert_eq!(calls.len(), 1);
    assert!(calls[0].starts_with("call "), "{calls:?}");
    let bytes = differing(&|b| b.phases[0].slots[0].slot_bytes[0] += 64);
    assert_eq!(bytes, ["memory of @denoise of r0"]);
    // Names of values are no part of a seal.
    assert!(differing(&|b| b.phases[0].programs[0].values[0].name += "x").is_empty());
}

#[test]
fn the_properties_of_a_plan_have_its_numbers_and_known_codes() {
    let plan = seal(two_rank_bundle(), &DeviceLimits::default()).unwrap();
    let properties = plan.list_properties();
    let of = |name: &str| properties.iter().find(|p| p.name == name).map(ToString::to_string).unwrap();
    assert!(of("complete").contains("each of 2 ranks has one of 2 roles"), "{}", of("complete"));
    // Three all-reduces on each of two ranks.
    assert!(of("matching collectives").contains("the same of 6 collectives"));
    assert!(of("no deadlock").ends_with("(T0311, T0312)"));
    for property in &properties {
        assert!(!property.codes.is_empty() && property.codes.iter().all(|code| CODES.contains(code)));
    }
}
