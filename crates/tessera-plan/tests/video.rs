//! Tests plans of a small video model: the collectives of each role, and memory.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::{BTreeMap, BTreeSet};

use tessera_ir::{Activation, Attr, Bundle, CollectiveAlgorithm, Op, OpView, Opcode, print};
use tessera_models::VideoModel;
use tessera_plan::{Mapping, Numerics, Strategy, lower};

use crate::support::logical;

mod support;

fn model(extra: &str) -> VideoModel {
    let config = r#"{"dim":60,"ffn_dim":104,"num_heads":5,"num_layers":3,"in_dim":4,"out_dim":4,"text_len":7,
        "text_dim":20,"freq_dim":32}"#;
    let stream = format!("[video]\nwidth = 80\nheight = 48\n{extra}");
    VideoModel::parse(("config.json", config), ("stream.toml", &stream)).unwrap()
}

fn plan(mesh: &str, strategy: Strategy) -> Bundle {
    let mut mapping = Mapping { mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() };
    lower(&logical(&model("")), &mut mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

fn count_collectives(b: &Bundle, phase: &str, role: usize) -> BTreeMap<&'static str, usize> {
    let mut out = BTreeMap::new();
    for (_, op) in b.find_phase(phase).unwrap().programs[role].collective_ops() {
        *out.entry(op.opcode.name()).or_default() += 1;
    }
    out
}

#[test]
fn one_rank_needs_no_collective() {
    let b = plan("tp=1", Strategy::Ulysses);
    assert!(b.phases.iter().all(|p| p.programs[0].collective_ops().count() == 0));
}

#[test]
fn megatron_reduces_at_row_parallel_outputs_only() {
    let b = plan("tp=5", Strategy::Megatron);
    // Per block: output projections of both attentions and the feed-forward, and two small
    // all-reduces of square sums (query and key together, the cross-attention query alone).
    assert_eq!(count_collectives(&b, "denoise.fill3", 0), BTreeMap::from([("all_reduce", 3 * 5)]));
    let p = &b.find_phase("denoise.fill3").unwrap().programs[0];
    let has_gelu = |o: &&Op| matches!(o.view(), Ok(OpView::Matmul(v)) if v.act == Some(Activation::GeluTanh));
    let fused = p.ops.iter().filter(has_gelu).count();
    assert_eq!(fused, 3, "the feed-forward's bias and activation form one epilogue");
}

#[test]
fn ulysses_exchanges_around_attention_only() {
    let b = plan("tp=5", Strategy::Ulysses);
    assert_eq!(count_collectives(&b, "denoise.fill3", 0), BTreeMap::from([("all_to_all", 3 * 4)]));
    assert_eq!(count_collectives(&b, "text", 0), BTreeMap::new());
    assert_eq!(count_collectives(&b, "emit", 0), BTreeMap::from([("all_gather", 1)]));
}

/// Returns the bytes of each all-reduce's operand on a rank, with its tag, and without the tags the text
/// of all programs.
fn tagged_sums(ring_from_bytes: Option<u64>) -> (Vec<(u64, Option<CollectiveAlgorithm>)>, Bundle) {
    let mut mapping = Mapping {
        mesh: "tp=5".parse().unwrap(),
        strategy: Strategy::Megatron,
        ring_from_bytes,
        ..Mapping::default()
    };
    let mut b = lower(&logical(&model("")), &mut mapping).unwrap();
    let mut sums = Vec::new();
    for p in b.phases.iter_mut().flat_map(|phase| &mut phase.programs) {
        let bytes: Vec<u64> = p
            .ops
            .iter()
            .map(|op| op.operands.first().map_or(0, |v| p.type_of(*v).shape.iter().product::<u64>() * 4))
            .collect();
        for (op, bytes) in p.ops.iter_mut().zip(bytes) {
            let tag = op.algorithm_tag();
            assert_eq!(op.attrs.remove("algorithm").is_some(), tag.is_some(), "{op:?}");
            if op.opcode == Opcode::AllReduce {
                sums.push((bytes, tag));
            }
        }
    }
    (sums, b)
}

#[test]
fn the_tag_of_a_sum_switches_from_tree_to_ring_at_the_threshold() {
    let (untagged, plain) = tagged_sums(None);
    let sizes: BTreeSet<u64> = untagged.iter().map(|(bytes, _)| *bytes).collect();
    // Square sums are small, and rows of the model large.
    assert!(sizes.len() >= 2, "{sizes:?}");
    assert!(untagged.iter().all(|(_, tag)| tag.is_none()));
    assert!(!plain.mapping.contains("ring_from_bytes"));
    let around = sizes.iter().flat_map(|bytes| [bytes - 1, *bytes, bytes + 1]);
    for threshold in around.chain([0, (1 << 32) - 1]) {
        let (sums, bare) = tagged_sums(Some(threshold));
        for (bytes, tag) in &sums {
            let expected = match *bytes < threshold {
                true => CollectiveAlgorithm::Tree,
                false => CollectiveAlgorithm::Ring,
            };
            assert_eq!(*tag, Some(expected), "{bytes} bytes, threshold {threshold}");
        }
        // The tags are the only difference, and the mapping states them.
        assert_eq!(sums.len(), untagged.len());
        assert_eq!(bare.phases, plain.phases);
        assert!(bare.mapping.contains(&format!("ring_from_bytes = {threshold}\n")), "{}", bare.mapping);
    }
}

#[test]
fn a_plan_without_all_reduces_has_no_tags() {
    let mut mapping =
        Mapping { mesh: "tp=5".parse().unwrap(), ring_from_bytes: Some(0), ..Mapping::default() };
    let b = lower(&logical(&model("")), &mut mapping).unwrap();
    let programs: Vec<_> = b.phases.iter().flat_map(|phase| &phase.programs).collect();
    assert!(programs.iter().any(|p| p.collective_ops().count() > 0));
    assert!(programs.iter().flat_map(|p| &p.ops).all(|op| !op.attrs.contains_key("algorithm")));
}

#[test]
fn an_unknown_part_is_refused() {
    let mut mapping = Mapping { mesh: "tp=5".parse().unwrap(), ..Mapping::default() };
    for (part, of) in [
        ("column", Opcode::Weight),
        ("tokens", Opcode::Weight),
        ("experts", Opcode::Weight),
        ("row", Opcode::Input),
    ] {
        let mut l = logical(&model("[cache]\nmode = \"recompute\"\n"));
        let op = l.phases.iter_mut().flat_map(|p| &mut p.ops).find(|o| o.opcode == of).unwrap();
        op.attrs.insert("part".into(), part.into());
        let ds = lower(&l, &mut mapping).unwrap_err();
        assert_eq!((ds.len(), ds[0].code.id), (1, "T0606"), "{ds:#?}");
        assert!(ds[0].message.contains(part), "{ds:#?}");
    }
}

#[test]
fn an_op_without_a_strategy_is_refused() {
    let mut mapping = Mapping { mesh: "tp=5".parse().unwrap(), ..Mapping::default() };
    for opcode in [Opcode::Softmax, Opcode::Bmm, Opcode::MoeRoute] {
        let mut l = logical(&model("[cache]\nmode = \"recompute\"\n"));
        l.phases.iter_mut().flat_map(|p| &mut p.ops).find(|o| o.opcode == Opcode::Silu).unwrap().opcode =
            opcode;
        let ds = lower(&l, &mut mapping).unwrap_err();
        assert_eq!((ds.len(), ds[0].code.id), (1, "T0606"), "{ds:#?}");
        assert!(ds[0].message.contains(opcode.name()), "{ds:#?}");
    }
}

#[test]
fn uneven_shards_make_two_roles() {
    for strategy in [Strategy::Megatron, Strategy::Ulysses] {
        let b = plan("tp=2", strategy);
        let names: Vec<_> = b.roles.iter().map(|r| (r.role.as_str(), r.ranks.len())).collect();
        assert_eq!(names, [("stage0@tp0", 1), ("stage0@tp1", 1)]);
    }
}

// proves: V-08
#[test]
fn stages_pass_on_the_residual_stream_and_the_prediction() {
    let b = plan("pp=3", Strategy::Ulysses);
    assert_eq!(count_collectives(&b, "denoise.fill0", 0), BTreeMap::from([("recv", 1), ("send", 1)]));
    assert_eq!(count_collectives(&b, "denoise.fill0", 1), BTreeMap::from([("recv", 1), ("send", 1)]));
    assert_eq!(count_collectives(&b, "denoise.fill0", 2), BTreeMap::from([("recv", 1), ("send", 1)]));
    assert_eq!(count_collectives(&b, "renoise", 1), BTreeMap::new());
    assert!(b.find_phase("renoise").unwrap().programs[2].ops.is_empty());
}

#[test]
fn temporaries_never_share_a_slot_while_alive() {
    for (mesh, strategy) in
        [("tp=2", Strategy::Megatron), ("tp=5", Strategy::Ulysses), ("pp=2", Strategy::Ulysses)]
    {
        let b = plan(mesh, strategy);
        for phase in &b.phases {
            for (p, m) in phase.programs.iter().zip(&phase.slots) {
                let (defs, last) = (p.defining_ops(), p.last_uses());
                for a in 0..p.values.len() {
                    for z in a + 1..p.values.len() {
                        let same = m.value_slots[a].is_some() && m.value_slots[a] == m.value_slots[z];
                        let apart = last[a].or(defs[a]) < defs[z];
                        assert!(!same || apart, "{} %{} %{}", p.name, p.values[a].name, p.values[z].name);
                    }
                }
                // Slot reuse keeps the total below the sum of all values.
                assert!(m.total_bytes().0 <= p.values.iter().map(|v| v.ty.byte_size().0).sum());
            }
        }
    }
}

#[test]
fn the_same_mapping_gives_the_same_text() {
    let text =
        |b: &Bundle| -> String { b.phases.iter().flat_map(|p| p.programs.iter().map(print)).collect() };
    assert_eq!(text(&plan("tp=2, pp=2", Strategy::Ulysses)), text(&plan("tp=2, pp=2", Strategy::Ulysses)));
}

#[test]
fn mesh_invariant_marks_every_splittable_sum() {
    let config = r#"{"dim":96,"ffn_dim":128,"num_heads":8,"num_layers":2,"in_dim":4,"out_dim":4,"text_len":7,
        "text_dim":20,"freq_dim":32}"#;
    let m = VideoModel::parse(("c", config), ("s", "[video]\nwidth = 80\nheight = 48\n")).unwrap();
    for (mesh, strategy, want) in
        [("tp=1", Strategy::Ulysses, 8), ("tp=4", Strategy::Megatron, 2), ("tp=4", Strategy::Ulysses, 8)]
    {
        let mut mapping = Mapping {
            mesh: mesh.parse().unwrap(),
            strategy,
            numerics: Numerics::MeshInvariant,
            ..Mapping::default()
        };
        let b = lower(&logical(&m), &mut mapping).unwrap();
        let p = &b.find_phase("denoise.fill0").unwrap().programs[0];
        let segments: Vec<Attr> = p.ops.iter().filter_map(|o| o.attrs.get("segments").cloned()).collect();
        // Per block: three row-parallel matmuls and three norms, of which query and key share one
        // if sharded.
        let per_block = if strategy == Strategy::Megatron { 5 } else { 6 };
        assert_eq!(segments, vec![Attr::Int(want); 2 * per_block], "{mesh}");
    }
}
