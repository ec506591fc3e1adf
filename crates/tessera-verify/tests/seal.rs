//! Sealing: memory, calls, limits, and a digest that names the plan and nothing else.
#![allow(clippy::unwrap_used)]

mod common;

use common::*;
use proptest::prelude::*;
use tessera_ir::{Bundle, Opcode, Program, Slots, canonical};
use tessera_mesh::{Axis, Rank, RankMap};
use tessera_verify::{CODES, Limits, check_slots, collective_line, seal};

fn pair() -> Bundle {
    bundle((0..2).map(|r| block(&format!("r{r}"), mesh("tp=2"), 3)).collect())
}

fn digest(b: &Bundle) -> [u8; 32] {
    seal(b.clone(), &Limits::default()).unwrap_or_else(|e| panic!("{}", text(&e))).digest()
}

fn refused(change: impl FnOnce(&mut Bundle)) -> tessera_base::Diagnostics {
    let mut b = pair();
    change(&mut b);
    seal(b, &Limits::default()).err().unwrap_or_default()
}

#[test]
fn a_sealed_plan_answers_for_every_rank() {
    let plan = seal(pair(), &Limits::default()).unwrap();
    assert_eq!(plan.phases(), ["denoise"]);
    assert_eq!(plan.digest_hex().len(), 64);
    for r in [Rank(0), Rank(1)] {
        let p = plan.program("denoise", r).unwrap();
        assert_eq!(p.role, format!("r{r}"));
        assert_eq!(plan.slots("denoise", r).unwrap().of.len(), p.values.len());
        let memory = plan.memory(r).unwrap();
        // x [4, 4] and w [8, 4]; three products and three sums of [4, 8]; f32.
        assert_eq!([memory.weights.0, memory.buffers.0, memory.inputs.0], [64 + 128, 0, 0]);
        assert_eq!(memory.temporaries.0, 6 * 128);
        assert_eq!(memory.total().0, 960);
    }
    let (a, b) = (plan.census("denoise", Rank(0)).unwrap(), plan.census("denoise", Rank(1)).unwrap());
    assert_eq!((a.collectives, a), (3, b));
    assert!(plan.program("encode", Rank(0)).is_none() && plan.program("denoise", Rank(2)).is_none());
}

#[test]
fn a_runtime_can_fold_the_trace_itself() {
    let p = block("stage0", mesh("tp=2"), 2);
    let lines: Vec<String> = (0..p.ops.len()).filter_map(|i| collective_line(&p, i)).collect();
    assert_eq!(lines, ["tp all_reduce f32[4, 8] {tp: partial(sum)} reduction=sum"; 2]);
    let folded = *blake3::hash(format!("{}\n{}\n", lines[0], lines[1]).as_bytes()).as_bytes();
    let plan =
        seal(bundle(vec![block("r0", mesh("tp=2"), 2), block("r1", mesh("tp=2"), 2)]), &Limits::default());
    assert_eq!(plan.unwrap().census("denoise", Rank(0)).unwrap().trace_digest, folded);
}

#[test]
fn the_digest_covers_everything_that_a_run_depends_on() {
    let base = digest(&pair());
    let changes: Vec<fn(&mut Bundle)> = vec![
        |b| b.mapping.push('\n'),
        |b| b.rank_map = RankMap::new(&b.mesh, vec!["cpu1".into(), "cpu0".into()]).unwrap(),
        |b| b.calls.push(("more".into(), vec![])),
        |b| b.phases[0].memory[0].bytes[0] += 1,
        |b| {
            b.phases[0].programs[0].role = "first".into();
            b.roles[0].role = "first".into();
        },
        |b| *b = bundle((0..2).map(|r| block(&format!("r{r}"), mesh("tp=2"), 4)).collect()),
    ];
    for (i, change) in changes.into_iter().enumerate() {
        let mut b = pair();
        change(&mut b);
        assert_ne!(digest(&b), base, "change {i}");
    }
    // The order in which things are listed is not a property of the plan.
    let mut b = pair();
    b.roles.reverse();
    b.phases[0].programs.reverse();
    b.phases[0].memory.reverse();
    assert_eq!(digest(&b), base);
}

#[test]
fn t0324_phases_of_a_role_agree_about_buffers() {
    let with = |second: u64| {
        let m = mesh("tp=1");
        let program = |name: &str, rows: u64| {
            let mut b = tessera_ir::Builder::role(name, "stage0", m, &STREAMS);
            let x = b.input("x", f32s(&[4, 8]));
            let cache = b.buffer("kv", f32s(&[rows, 8]));
            b.write(cache, x);
            done(b)
        };
        let mut b = bundle(vec![program("denoise", 8)]);
        let mut clean = phase(vec![program("clean", second)]);
        clean.name = "clean".into();
        b.phases.push(clean);
        seal(b, &Limits::default()).err().unwrap_or_default()
    };
    only(&with(9), "T0324");
    clean(&with(8));
}

#[test]
fn t0325_t0326_every_temporary_has_room() {
    let p = block("stage0", mesh("tp=2"), 1);
    let y = p.ops.iter().position(|o| o.opcode == Opcode::Matmul).unwrap();
    let y = p.ops[y].results[0].0 as usize;
    let with = |change: &dyn Fn(&mut Slots)| {
        let mut s = own_slots(&p);
        change(&mut s);
        check_slots(&p, &s)
    };
    clean(&with(&|_| ()));
    only(&with(&|s| s.of[y] = None), "T0325");
    only(&with(&|s| s.of[y] = Some(99)), "T0325");
    only(&with(&|s| s.of.truncate(y)), "T0325");
    only(&with(&|s| s.bytes[0] -= 1), "T0326");
    clean(&with(&|s| s.bytes[0] += 1));
}

#[test]
fn t0327_live_values_do_not_share_a_slot() {
    // a = silu x; b = silu a; c = silu b on one stream.
    let chain = |shared: [u32; 3]| {
        let mut b = builder("stage0", mesh("tp=1"));
        let x = b.input("x", f32s(&[4]));
        let y = b.op(Opcode::Silu, &[x]);
        let z = b.op(Opcode::Silu, &[y]);
        b.op(Opcode::Silu, &[z]);
        let slots = Slots { bytes: vec![16; 3], of: [None].into_iter().chain(shared.map(Some)).collect() };
        check_slots(&done(b), &slots)
    };
    clean(&chain([0, 1, 0]));
    only(&chain([0, 0, 1]), "T0327");
}

#[test]
fn t0327_a_collective_holds_operand_and_result_from_issue_to_wait() {
    let program = |reuse_operand: bool, early: bool| {
        let mut b = builder("stage0", mesh("tp=2"));
        let p = partial(&mut b, Axis::Tp);
        let x = b.input("x", f32s(&[4, 8]));
        let t = b.attr("axis", "tp").attr("reduction", "sum").issue(Opcode::AllReduce, &[p]);
        let other = if early { Some(b.op(Opcode::Silu, &[x])) } else { None };
        let y = b.wait(t, None).unwrap();
        let other = other.unwrap_or_else(|| b.op(Opcode::Silu, &[x]));
        b.output("y", y);
        let p2 = done(b);
        let mut slots = own_slots(&p2);
        slots.of[other.0 as usize] = slots.of[if reuse_operand { p } else { y }.0 as usize];
        check_slots(&p2, &slots)
    };
    only(&program(true, true), "T0327");
    clean(&program(true, false));
    // The result is being written while the other op runs.
    only(&program(false, true), "T0327");
}

#[test]
fn t0327_slots_pass_between_streams_behind_events() {
    let program = |ordered: bool| {
        let mut b = builder("stage0", mesh("tp=1"));
        let x = b.input("x", f32s(&[4]));
        let y = b.op(Opcode::Silu, &[x]);
        b.output("y", y);
        let e = b.op(Opcode::EventRecord, &[]);
        if ordered {
            b.after(e);
        }
        let z = b.stream("io").op(Opcode::Silu, &[x]);
        let p = done(b);
        let mut slots = own_slots(&p);
        slots.of[z.0 as usize] = slots.of[y.0 as usize];
        check_slots(&p, &slots)
    };
    only(&program(false), "T0327");
    clean(&program(true));
}

#[test]
fn t0328_the_device_must_hold_it() {
    let at =
        |device_bytes| seal(pair(), &Limits { device_bytes, ..Limits::default() }).err().unwrap_or_default();
    clean(&at(Some(960)));
    clean(&at(None));
    let found = at(Some(959));
    only(&found, "T0328");
    assert!(text(&found).contains("weights 192 + buffers 0 + inputs 0 + temporaries 768 = 960 bytes"));
    assert!(text(&found).contains("959 bytes: 1 too few"));
}

#[test]
fn t0329_t0330_the_frame_lines_up() {
    only(&refused(|b| b.calls[0].1.push("denoize".into())), "T0330");
    only(&refused(|b| b.roles[1].ranks.clear()), "T0329");
    only(&refused(|b| drop(b.phases[0].memory.pop())), "T0329");
    only(&refused(|b| b.phases.push(b.phases[0].clone())), "T0329");
    only(&refused(|b| b.calls.push(b.calls[0].clone())), "T0329");
    only(&refused(|b| b.rank_map = RankMap::logical(&mesh("tp=3"), "cpu")), "T0329");
    clean(&refused(|b| b.calls[0].1.push("denoise".into())));
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

/// Renames every value; the text form differs, the plan does not.
fn renamed(p: &Program, seed: u64) -> Program {
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
        let named: Vec<Program> = programs.iter().map(|p| renamed(p, seed)).collect();
        prop_assert_eq!(canonical(&programs[0]), canonical(&named[0]));
        prop_assert_eq!(digest(&bundle(programs)), digest(&bundle(named)));
    }
}

#[test]
fn t0336_one_graph_at_a_time_where_mixing_is_off() {
    let seal = |graph: &'static [&'static str], graph_mixing_off: bool| {
        let program = |r: usize| {
            let mut b = builder(&format!("r{r}"), mesh("tp=2"));
            for (i, name) in graph.iter().enumerate() {
                let x = b.weight(&format!("x{i}"), f32s(&[4]));
                if !name.is_empty() {
                    b.attr("graph", *name);
                }
                b.attr("axis", "tp").attr("root", 0i64).op(Opcode::Broadcast, &[x]);
            }
            done(b)
        };
        let limits = Limits { graph_mixing_off, ..Limits::default() };
        seal(bundle((0..2).map(program).collect()), &limits).err().unwrap_or_default()
    };
    clean(&seal(&["g", ""], false));
    only(&seal(&["g", ""], true), "T0336");
    clean(&seal(&["", "g", "h"], true));
}

#[test]
fn t0340_a_collective_in_place() {
    let program = |op: Opcode, read_after: bool| {
        let mut b = builder("stage0", mesh("tp=2"));
        let x = match op {
            Opcode::AllReduce => partial(&mut b, Axis::Tp),
            _ => {
                let w = b.weight("x", f32s(&[4, 8]).on(Axis::Tp, shard(0)));
                b.op(Opcode::Silu, &[w])
            }
        };
        b.attr("axis", "tp");
        match op {
            Opcode::AllReduce => b.attr("reduction", "sum"),
            _ => b.attr("dim", 0i64),
        };
        let t = b.issue(op, &[x]);
        if read_after {
            b.op(Opcode::Add, &[x, x]);
        }
        let y = b.wait(t, None).unwrap();
        (done(b), x, y)
    };
    let judge = |op, read_after| {
        let (p, x, y) = program(op, read_after);
        let mut slots = own_slots(&p);
        let (from, into) = (slots.of[y.0 as usize].unwrap(), slots.of[x.0 as usize].unwrap());
        slots.bytes[into as usize] = slots.bytes[into as usize].max(slots.bytes[from as usize]);
        slots.of[y.0 as usize] = Some(into);
        check_slots(&p, &slots)
    };
    clean(&judge(Opcode::AllReduce, false));
    only(&judge(Opcode::AllReduce, true), "T0340");
    only(&judge(Opcode::AllGather, false), "T0340");
}
