//! Tests row chunks: the results equal those of whole rows, an all-reduce overlaps the compute of
//! another chunk, and the planned text equals the one in filetests/check, which the verifier
//! accepts there.

#![allow(clippy::disallowed_methods, reason = "it compares files with planned texts")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::path::Path;

use tessera_cost::{MachineModel, Profile};
use tessera_ir::{Bundle, Opcode, Program, ValueId, print};
use tessera_mesh::catalog;
use tessera_models::VideoModel;
use tessera_plan::video::estimate_call;
use tessera_plan::{DtypePolicy, LogicalModel, Mapping, Numerics, Strategy, lower};

use crate::run::{generator, latents, max_difference};
use crate::support::logical;

#[path = "support/run.rs"]
mod run;
mod support;

const RESIDENT: &str = "";
const RECOMPUTE: &str = "[cache]\nmode = \"recompute\"\n[schedule]\nprediction = \"x0\"\n";

fn megatron(mesh: &str, pieces: u32) -> Mapping {
    Mapping {
        mesh: mesh.parse().unwrap(),
        strategy: Strategy::Megatron,
        overlap_chunks: pieces,
        ..Mapping::default()
    }
}

fn plan(l: &LogicalModel, mapping: &Mapping) -> Bundle {
    lower(l, &mut mapping.clone()).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

#[test]
fn chunks_compute_the_same_as_whole_rows() {
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
                    assert!(max_difference(whole, cut) == 0.0, "{mesh} {pieces} {}", dtype.name());
                }
            }
            if mesh != "tp=3" {
                let numerics = Numerics::MeshInvariant;
                let of = |pieces| latents(&l, &Mapping { numerics, ..megatron(mesh, pieces) }, &phases);
                assert!(max_difference(&of(1)[0], &of(pieces)[0]) == 0.0, "{mesh} {pieces}");
            }
        }
    }
}

#[test]
fn the_all_reduce_of_one_chunk_overlaps_compute_of_another() {
    let l = generator(4, 3, 16, RESIDENT);
    let b = plan(&l, &megatron("tp=2", 2));
    for p in &b.find_phase("denoise.fill3").unwrap().programs {
        let reductions = reductions(p);
        // Three row-parallel matmuls per block and two norms over sharded columns, each for both
        // chunks.
        assert_eq!(reductions.len(), 3 * 2 * (3 + 2), "{}", p.role);
        for (at, between) in reductions.iter().enumerate() {
            assert!(between.all > 0, "all-reduce {at} of {} has no compute before its wait", p.role);
        }
        // All-reduces of rows of the model's full width overlap a matmul of the other chunk.
        let wide = reductions.iter().filter(|b| b.wide);
        assert_eq!(wide.clone().count(), 3 * 2 * 3);
        for (at, between) in wide.enumerate() {
            assert!(between.matmuls > 0, "wide all-reduce {at} of {} overlaps no matmul", p.role);
        }
    }
    // With whole rows the wait follows the issue at once.
    let b = plan(&l, &megatron("tp=2", 1));
    let whole = reductions(&b.find_phase("denoise.fill3").unwrap().programs[0]);
    assert_eq!(whole.len(), 3 * (3 + 2));
    assert!(whole.iter().all(|b| b.all == 0));
}

/// The ops between the issue of an all-reduce and its wait.
struct OverlappedOps {
    /// Whether the all-reduce carries rows as wide as the residual stream.
    wide: bool,
    matmuls: usize,
    all: usize,
}

fn reductions(p: &Program) -> Vec<OverlappedOps> {
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
                let flops = |o: &&tessera_ir::Op| tessera_ir::op_workload(p, o).flops.0 > 0;
                out.push(OverlappedOps {
                    wide: p.type_of(p.ops[from].operands[0]).shape[1] > 2,
                    matmuls: between.iter().filter(|o| o.opcode == Opcode::Matmul).count(),
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
fn a_reader_of_whole_rows_prevents_chunking() {
    let l = generator(2, 2, 16, RESIDENT);
    let of = |l: &LogicalModel, phase: &str, pieces| {
        let b = plan(l, &megatron("tp=2", pieces));
        print(&b.find_phase(phase).unwrap().programs[0])
    };
    // Without a row-parallel matmul there is no all-reduce to hide.
    assert_eq!(of(&l, "text", 1), of(&l, "text", 2));
    assert_ne!(of(&l, "denoise.fill0", 1), of(&l, "denoise.fill0", 2));
    // An output leaves whole.
    let mut changed = l.clone();
    let phase = changed.phases.iter_mut().find(|p| p.name == "denoise.fill0").unwrap();
    let write = phase.ops.pop().unwrap();
    assert_eq!(write.opcode, Opcode::CacheWrite);
    let (opcode, name) = (Opcode::Output, Some("x0".into()));
    phase.ops.push(tessera_ir::Op { opcode, name, buffer: None, ..write.clone() });
    assert_eq!(of(&changed, "denoise.fill0", 1), of(&changed, "denoise.fill0", 2));
    // A write over rows that the second chunk still reads must follow the reads of both.
    let phase = changed.phases.iter_mut().find(|p| p.name == "denoise.fill0").unwrap();
    let x = phase.buffers.iter().position(|b| b.name == "x").unwrap() as u32;
    phase.ops.pop();
    phase.ops.push(tessera_ir::Op { buffer: Some(tessera_ir::BufferId(x)), ..write });
    assert_eq!(of(&changed, "denoise.fill0", 1), of(&changed, "denoise.fill0", 2));
}

#[test]
fn chunks_that_hide_nothing_are_rejected() {
    let l = generator(2, 1, 16, RESIDENT);
    let ulysses = Mapping { strategy: Strategy::Ulysses, ..megatron("tp=2", 2) };
    for (mapping, says) in [
        (megatron("tp=1", 2), "without an all-reduce over tp"),
        (ulysses, "without an all-reduce over tp"),
        (megatron("tp=2", 7), "7 over 6 tokens"),
        (megatron("tp=2", 0), "leaves no rows"),
    ] {
        let ds = lower(&l, &mut mapping.clone()).unwrap_err();
        assert!(ds.iter().any(|d| d.code.id == "T0605" && d.message.contains(says)), "{says}: {ds:#?}");
    }
}

/// `TESSERA_BLESS=1` rewrites the file; review the difference.
#[test]
fn the_kept_text_is_what_is_planned() {
    let l = generator(2, 1, 16, RESIDENT);
    let b = plan(&l, &Mapping { dtype: DtypePolicy::Bf16, ..megatron("tp=2", 2) });
    let mut text =
        "// test: check\n// phases chunk: text denoise.fill3 clean.fill3\n// note: The planner emits these \
        programs in bf16 for tp=2 with the strategy megatron and two row chunks.\n"
            .to_string();
    for phase in b.phases.iter().filter(|p| ["text", "denoise.fill3", "clean.fill3"].contains(&&*p.name)) {
        phase.programs.iter().for_each(|p| text += &print(p));
    }
    let path =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../../filetests/check/planned_bf16_row_chunks.tir");
    if std::env::var_os("TESSERA_BLESS").is_some() {
        std::fs::write(&path, &text).unwrap();
    }
    assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{}", path.display());
}

#[test]
fn an_estimate_hides_the_all_reduces_of_chunks() {
    let config = include_str!("../../../models/wan2.1-14b/config.json");
    let stream = include_str!("../../../models/wan2.1-14b/stream.toml");
    let m = VideoModel::parse(("config.json", config), ("stream.toml", stream)).unwrap();
    let mut l = logical(&m);
    l.phases.retain(|p| p.name == "denoise.fill3");
    let machine =
        MachineModel::new(catalog::get("hgx-h200").unwrap(), Profile::builtin("torch-2.11").unwrap());
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
