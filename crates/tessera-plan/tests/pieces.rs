//! Rows in pieces: the same numbers as whole rows, sums that travel while another piece computes, and the text kept in
//! filetests/check, which the judge accepts there.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::path::Path;

use tessera_cost::{Machine, Profile};
use tessera_ir::{Bundle, Opcode, Program, ValueId, print};
use tessera_mesh::clusters;
use tessera_models::VideoModel;
use tessera_plan::video::estimate_call;
use tessera_plan::{DtypePolicy, Logical, Mapping, Numerics, Strategy, lower};

use crate::run::{farthest, generator, latents};
use crate::support::logical;

#[path = "support/run.rs"]
mod run;
mod support;

const RESIDENT: &str = "";
const RECOMPUTE: &str = "[cache]\nmode = \"recompute\"\n[schedule]\nprediction = \"x0\"\n";

fn megatron(mesh: &str, pieces: u32) -> Mapping {
    Mapping { mesh: mesh.parse().unwrap(), strategy: Strategy::Megatron, pieces, ..Mapping::default() }
}

fn plan(l: &Logical, mapping: &Mapping) -> Bundle {
    lower(l, &mut mapping.clone()).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

#[test]
fn pieces_compute_what_whole_rows_do() {
    let resident = ["text", "renoise", "denoise.fill0", "clean.fill0", "renoise", "denoise.fill3", "emit"];
    let recompute = ["text", "renoise", "denoise.fill0", "recompute", "renoise", "denoise.fill3", "emit"];
    for (extra, phases) in [(RESIDENT, resident), (RECOMPUTE, recompute)] {
        let l = generator(4, 2, 16, extra);
        for (mesh, pieces) in [("tp=2", 2), ("tp=3", 2), ("tp=4", 2), ("tp=4", 3), ("tp=2,pp=2", 2)] {
            for dtype in DtypePolicy::ALL {
                let of = |pieces| latents(&l, &Mapping { dtype, ..megatron(mesh, pieces) }, &phases);
                let (whole, cut) = (of(1), of(pieces));
                assert!(!whole.is_empty() && whole[0].data().iter().any(|x| x.abs() > 0.1));
                for (whole, cut) in whole.iter().zip(&cut) {
                    assert!(farthest(whole, cut) == 0.0, "{mesh} {pieces} {}", dtype.name());
                }
            }
            if mesh != "tp=3" {
                let numerics = Numerics::MeshInvariant;
                let of = |pieces| latents(&l, &Mapping { numerics, ..megatron(mesh, pieces) }, &phases);
                assert!(farthest(&of(1)[0], &of(pieces)[0]) == 0.0, "{mesh} {pieces}");
            }
        }
    }
}

#[test]
fn while_the_sum_of_one_piece_travels_another_computes() {
    let l = generator(4, 3, 16, RESIDENT);
    let b = plan(&l, &megatron("tp=2", 2));
    for p in &b.phase("denoise.fill3").unwrap().programs {
        let sums = stretches(p);
        // Three products cut by input features a block, two norms over shared columns; each of both pieces.
        assert_eq!(sums.len(), 3 * 2 * (3 + 2), "{}", p.role);
        for (at, between) in sums.iter().enumerate() {
            assert!(between.all > 0, "sum {at} of {} is waited for at once", p.role);
        }
        // Those of whole rows of the model's width travel behind a product of the other piece.
        let wide = sums.iter().filter(|b| b.wide);
        assert_eq!(wide.clone().count(), 3 * 2 * 3);
        for (at, between) in wide.enumerate() {
            assert!(between.products > 0, "wide sum {at} of {} has nothing to hide behind", p.role);
        }
    }
    // The same sums of whole rows are waited for where they are issued.
    let b = plan(&l, &megatron("tp=2", 1));
    let whole = stretches(&b.phase("denoise.fill3").unwrap().programs[0]);
    assert_eq!(whole.len(), 3 * (3 + 2));
    assert!(whole.iter().all(|b| b.all == 0));
}

/// What stands between the issue of a sum and its wait.
struct Between {
    /// Whether rows as wide as the residual stream travel.
    wide: bool,
    products: usize,
    all: usize,
}

fn stretches(p: &Program) -> Vec<Between> {
    let mut issued: BTreeMap<ValueId, usize> = BTreeMap::new();
    let mut out = Vec::new();
    for (i, op) in p.ops.iter().enumerate() {
        match op.opcode {
            Opcode::AllReduce => {
                assert!(op.issue && p.streams[op.stream.0 as usize] == "tp_collective");
                issued.insert(op.results[0], i);
            }
            Opcode::Wait => {
                let Some(from) = issued.remove(&op.operands[0]) else { continue };
                let between = &p.ops[from + 1..i];
                let flops = |o: &&tessera_ir::Op| tessera_ir::cost(p, o).flops.0 > 0;
                out.push(Between {
                    wide: p.ty(p.ops[from].operands[0]).shape[1] > 2,
                    products: between.iter().filter(|o| o.opcode == Opcode::Matmul).count(),
                    all: between.iter().filter(flops).count(),
                });
            }
            _ => {}
        }
    }
    assert!(issued.is_empty());
    out
}

#[test]
fn what_reads_rows_whole_keeps_them_whole() {
    let l = generator(2, 2, 16, RESIDENT);
    let of = |l: &Logical, phase: &str, pieces| {
        let b = plan(l, &megatron("tp=2", pieces));
        print(&b.phase(phase).unwrap().programs[0])
    };
    // Without a product cut by input features there is nothing to hide.
    assert_eq!(of(&l, "text", 1), of(&l, "text", 2));
    assert_ne!(of(&l, "denoise.fill0", 1), of(&l, "denoise.fill0", 2));
    // An output is handed over whole.
    let mut told = l.clone();
    let phase = told.phases.iter_mut().find(|p| p.name == "denoise.fill0").unwrap();
    let write = phase.ops.pop().unwrap();
    assert_eq!(write.opcode, Opcode::CacheWrite);
    let (opcode, name) = (Opcode::Output, Some("x0".into()));
    phase.ops.push(tessera_ir::Op { opcode, name, buffer: None, ..write.clone() });
    assert_eq!(of(&told, "denoise.fill0", 1), of(&told, "denoise.fill0", 2));
    // What is written over what the second piece still reads comes after both have read.
    let phase = told.phases.iter_mut().find(|p| p.name == "denoise.fill0").unwrap();
    let x = phase.buffers.iter().position(|b| b.name == "x").unwrap() as u32;
    phase.ops.pop();
    phase.ops.push(tessera_ir::Op { buffer: Some(tessera_ir::BufferId(x)), ..write });
    assert_eq!(of(&told, "denoise.fill0", 1), of(&told, "denoise.fill0", 2));
}

#[test]
fn pieces_that_hide_nothing_are_refused() {
    let l = generator(2, 1, 16, RESIDENT);
    let ulysses = Mapping { strategy: Strategy::Ulysses, ..megatron("tp=2", 2) };
    for (mapping, says) in [
        (megatron("tp=1", 2), "nothing is summed over tp"),
        (ulysses, "nothing is summed over tp"),
        (megatron("tp=2", 7), "7 over 6 tokens"),
        (megatron("tp=2", 0), "leaves no rows"),
    ] {
        let ds = lower(&l, &mut mapping.clone()).unwrap_err();
        assert!(ds.iter().any(|d| d.code.id == "T0605" && d.message.contains(says)), "{says}: {ds:#?}");
    }
}

/// Rewritten by `TESSERA_BLESS=1`; look at the difference.
#[test]
fn the_kept_text_is_what_is_planned() {
    let l = generator(2, 1, 16, RESIDENT);
    let b = plan(&l, &Mapping { dtype: DtypePolicy::Bf16, ..megatron("tp=2", 2) });
    let mut text = "// test: check\n// phases chunk: text denoise.fill3 clean.fill3\n// note: as planned in bf16 for tp=2, \
        megatron, rows in two pieces\n"
        .to_string();
    for phase in b.phases.iter().filter(|p| ["text", "denoise.fill3", "clean.fill3"].contains(&&*p.name)) {
        phase.programs.iter().for_each(|p| text += &print(p));
    }
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/check/planned_bf16_pieces.tir");
    if std::env::var_os("TESSERA_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{}", path.display());
}

#[test]
fn an_estimate_hides_the_sums_of_pieces() {
    let config = include_str!("../../../models/wan2.1-14b/config.json");
    let stream = include_str!("../../../models/wan2.1-14b/stream.toml");
    let m = VideoModel::parse(("config.json", config), ("stream.toml", stream)).unwrap();
    let mut l = logical(&m);
    l.phases.retain(|p| p.name == "denoise.fill3");
    let machine = Machine::new(clusters::named("hgx-h200").unwrap(), Profile::named("torch-2.11").unwrap());
    for tp in [2, 4, 8] {
        let of = |pieces| {
            let mapping = Mapping { dtype: DtypePolicy::Bf16, ..megatron(&format!("tp={tp}"), pieces) };
            let b = plan(&l, &mapping);
            let e = estimate_call(&b, "forward", &["denoise.fill3".into()], &machine, false).unwrap();
            let [ms, collective, exposed] = [e.ns, e.collective_ns, e.exposed_ns()].map(|ns| ns / 1e6);
            let ratio = e.overlap.ratio();
            println!(
                "tp={tp} in {pieces}: {ms:.1} ms, sums {collective:.1}, exposed {exposed:.1}, ratio {ratio:.2}"
            );
            e
        };
        let (whole, cut) = (of(1), of(2));
        assert!(whole.overlap.ratio() < 0.01 && cut.overlap.ratio() > 0.8, "tp={tp}");
        assert!(cut.exposed_ns() < 0.25 * whole.exposed_ns() && cut.ns < whole.ns, "tp={tp}");
    }
}
