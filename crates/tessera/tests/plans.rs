//! Tests sealed plans of the fixture models: what the verifier accepts, what the folder stores,
//! what the digest depends on.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::{Path, PathBuf};

use tessera::summary::PlanSummary;
use tessera::{Model, Overrides, Plan, plan};
use tessera_ir::{Attr, Program};
use tessera_mesh::Rank;
use tessera_plan::{CapturePolicy, DtypePolicy, Mapping, Numerics, Strategy, Topology};
use tessera_verify::DeviceLimits;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures").join(name)
}

fn model(name: &str, recompute: bool) -> Model {
    let overrides = Overrides { recompute: Some(recompute), ..Overrides::default() };
    Model::open(&fixture(name), &overrides).unwrap_or_else(|d| panic!("{d:#?}"))
}

fn mapping(mesh: &str, strategy: Strategy) -> Mapping {
    Mapping { mesh: mesh.parse().unwrap(), strategy, ..Mapping::default() }
}

fn plan_mapping(m: &Model, mapping: &Mapping) -> Plan {
    plan::plan_model(&m.video, &m.name, "", mapping).unwrap_or_else(|ds| {
        let text = tessera_base::render_all(&ds, tessera_base::DiagnosticFormat::Text, &|_| None);
        panic!("{}\n{text}", mapping.to_toml())
    })
}

#[test]
fn every_mesh_and_strategy_seals() {
    for name in ["wan-odd", "wan-even"] {
        for recompute in [false, true] {
            let m = model(name, recompute);
            for mesh in ["tp=1", "tp=2", "tp=3", "tp=4", "tp=5", "pp=2", "tp=2,pp=2", "tp=3,pp=2"] {
                for strategy in [Strategy::Ulysses, Strategy::Megatron] {
                    plan_mapping(&m, &mapping(mesh, strategy));
                }
            }
        }
    }
    plan_mapping(&model("wan-even", false), &mapping("pp=3", Strategy::Ulysses));
    let invariant = Mapping { numerics: Numerics::MeshInvariant, ..mapping("tp=4", Strategy::Megatron) };
    plan_mapping(&model("wan-even", false), &invariant);
}

// proves: X-19
#[test]
fn a_plan_states_what_is_captured_and_the_verifier_proves_it() {
    let m = model("wan-odd", false);
    let bundle = |capture| {
        let mut map = Mapping { capture, ..mapping("tp=2,pp=2", Strategy::Ulysses) };
        tessera_plan::lower(&plan::logical_model(&m.video, map.media), &mut map).unwrap()
    };
    let seal = |b| tessera_verify::seal(b, &DeviceLimits::default());
    let captured = bundle(CapturePolicy::Programs);
    for phase in &captured.phases {
        for p in &phase.programs {
            let graph = p.captured_graph().unwrap().map(|g| g.name);
            // A stage without work in a phase has a program of sources, and nothing to capture.
            let has_launches = p.ops.iter().any(|op| !op.is_source());
            let is_captured = has_launches && !["encode", "decode"].contains(&phase.name.as_str());
            assert_eq!(graph, is_captured.then(|| phase.name.clone()), "@{} of {}", p.name, p.role);
            let text = tessera_ir::print(p);
            assert_eq!(text.matches("graph").count(), usize::from(is_captured), "{text}");
            assert_eq!(tessera_ir::parse(&text, "p").unwrap().captured_graph(), p.captured_graph());
        }
    }
    let eager = bundle(CapturePolicy::None);
    assert!(eager.phases.iter().flat_map(|p| &p.programs).all(|p| p.captured_graph() == Ok(None)));
    let digests = [&captured, &eager].map(|b| seal(b.clone()).unwrap().digest_hex());
    assert_ne!(digests[0], digests[1]);

    // One role of one phase that departs from the others is refused by name.
    let at = captured.phases.iter().position(|p| p.name == "denoise.fill3").unwrap();
    let refused = |change: &dyn Fn(&mut Program)| {
        let mut b = captured.clone();
        change(&mut b.phases[at].programs[1]);
        seal(b).unwrap_err().into_iter().map(|d| d.code.id).collect::<Vec<_>>()
    };
    let uncapture = |p: &mut Program| p.ops.iter_mut().for_each(|o| drop(o.attrs.remove("graph")));
    assert!(refused(&uncapture).contains(&"T0334"), "{:?}", refused(&uncapture));
    assert!(refused(&|p| p.capture_into("own")).contains(&"T0334"));
    let split = |p: &mut Program| {
        let issue = p.ops.iter().position(|o| o.issue).unwrap();
        for op in p.ops[..=issue].iter_mut().filter(|o| !o.is_source()) {
            op.attrs.insert("graph".to_string(), Attr::Str("first".to_string()));
        }
    };
    assert!(refused(&split).contains(&"T0335"), "{:?}", refused(&split));
}

#[test]
fn a_dtype_is_part_of_the_plan() {
    let dir = tempfile::tempdir().unwrap();
    for (i, strategy) in [Strategy::Ulysses, Strategy::Megatron].into_iter().enumerate() {
        for recompute in [false, true] {
            for mesh in ["tp=1", "tp=3,pp=2"] {
                let m = model("wan-odd", recompute);
                let whole = plan_mapping(&m, &mapping(mesh, strategy));
                let bf16 = plan_mapping(&m, &Mapping { dtype: DtypePolicy::Bf16, ..mapping(mesh, strategy) });
                let fp8 = plan_mapping(&m, &Mapping { dtype: DtypePolicy::Fp8, ..mapping(mesh, strategy) });
                assert_ne!(bf16.sealed.digest_hex(), fp8.sealed.digest_hex());
                for (a, b) in
                    PlanSummary::from_plan(&bf16).ranks.iter().zip(&PlanSummary::from_plan(&fp8).ranks)
                {
                    assert!(b.weights_bytes < a.weights_bytes && b.buffers_bytes == a.buffers_bytes);
                }
                assert_ne!(whole.sealed.digest_hex(), bf16.sealed.digest_hex());
                let at = dir.path().join(format!("{i}-{recompute}-{mesh}"));
                bf16.write(&at).unwrap();
                let read = Plan::read(&at).unwrap_or_else(|ds| panic!("{ds:#?}"));
                assert_eq!(read.mapping.dtype, DtypePolicy::Bf16);
                assert_eq!(read.sealed.digest_hex(), bf16.sealed.digest_hex());
                let (a, b) = (PlanSummary::from_plan(&whole), PlanSummary::from_plan(&read));
                assert_eq!((a.dtype, b.dtype), ("f32", "bf16"));
                for (a, b) in a.ranks.iter().zip(&b.ranks) {
                    let share = b.weights_bytes as f64 / a.weights_bytes as f64;
                    assert!((0.5..0.9).contains(&share), "{share} of {}", a.weights_bytes);
                    assert!(b.buffers_bytes < a.buffers_bytes && b.inputs_bytes == a.inputs_bytes);
                }
            }
        }
    }
    let both = Mapping {
        dtype: DtypePolicy::Bf16,
        numerics: Numerics::MeshInvariant,
        ..mapping("tp=2", Strategy::Ulysses)
    };
    let ds = plan::plan_model(&model("wan-even", false).video, "wan-even", "", &both).unwrap_err();
    assert_eq!((ds.len(), ds[0].code.id), (1, "T0604"));
    assert!(
        ds[0].hint.as_ref().is_some_and(|h| h.contains("standard") && h.contains("f32")),
        "{:?}",
        ds[0].hint
    );
}

/// Plans the demo model, which has a decoder, with the leader outside the mesh.
#[test]
fn a_leader_outside_the_mesh_holds_the_encode_and_decode_programs() {
    let dir = tempfile::tempdir().unwrap();
    for (i, (topology, mesh)) in [
        (Topology::Pp0, "tp=1"),
        (Topology::Pp1, "tp=2"),
        (Topology::Pp1, "tp=3"),
        (Topology::Pp1, "tp=2,pp=2"),
    ]
    .into_iter()
    .enumerate()
    {
        for strategy in [Strategy::Ulysses, Strategy::Megatron] {
            for recompute in [false, true] {
                let m = model("../models/demo", recompute);
                let within = plan_mapping(&m, &mapping(mesh, strategy));
                let made = plan_mapping(&m, &Mapping { topology, ..mapping(mesh, strategy) });
                assert_ne!(made.sealed.digest_hex(), within.sealed.digest_hex());
                let ranks = made.sealed.mesh().world_size();
                assert_eq!(ranks, within.sealed.mesh().world_size() + 1);
                assert!(made.mesh_ranks().map(|r| r.0).eq(1..ranks));
                let roles = made.sealed.roles();
                assert_eq!((roles[0].role.as_str(), &roles[0].ranks[..]), ("leader@out0", &[Rank(0)][..]));
                for phase in made.sealed.phase_names() {
                    let own = ["decode", "encode"].contains(&phase.as_str());
                    for rank in made.sealed.mesh().iter() {
                        let nothing = made.sealed.rank_program(phase, rank).unwrap().ops.is_empty();
                        // A later stage has empty programs in some phases of the mesh too.
                        assert!(nothing || own == (rank == Rank(0)), "@{phase} of rank {rank}");
                        assert!(rank > Rank(1) || !nothing || own != (rank == Rank(0)));
                    }
                }
                // A mesh rank holds the same as under a leader inside the mesh, except for decode
                // and encode.
                let [weights, caches, _] = made.memory_bytes(Rank(0));
                assert_eq!((weights.0, caches.0), (0, 0));
                for rank in within.sealed.mesh().iter() {
                    let [there, here] = [within.memory_bytes(rank), made.memory_bytes(Rank(rank.0 + 1))];
                    assert_eq!(there[..2], here[..2]);
                    assert!(here[2] <= there[2]);
                }
                assert_eq!(
                    tessera::engine::build_program_index(&made.sealed),
                    tessera::engine::build_program_index(&within.sealed)
                );
            }
        }
        let at = dir.path().join(format!("plan{i}"));
        let made = plan_mapping(
            &model("../models/demo", true),
            &Mapping { topology, ..mapping(mesh, Strategy::Ulysses) },
        );
        made.write(&at).unwrap();
        let read = Plan::read(&at).unwrap_or_else(|ds| panic!("{ds:#?}"));
        assert_eq!(read.sealed.digest_hex(), made.sealed.digest_hex());
        assert_eq!(read.mapping, made.mapping);
    }
}

#[test]
fn a_folder_keeps_the_plan_and_its_digest() {
    let dir = tempfile::tempdir().unwrap();
    for (i, mesh) in ["tp=2", "tp=3,pp=2"].into_iter().enumerate() {
        let made = plan_mapping(&model("wan-odd", false), &mapping(mesh, Strategy::Ulysses));
        let at = dir.path().join(format!("plan{i}"));
        made.write(&at).unwrap();
        let read = Plan::read(&at).unwrap_or_else(|ds| panic!("{ds:#?}"));
        assert_eq!(read.sealed.digest_hex(), made.sealed.digest_hex());
        assert_eq!(read.video, made.video);
        assert_eq!(made.write(&at).unwrap_err().code.id, "T0013");
    }
}

#[test]
fn the_rotary_table_is_part_of_the_seal() {
    let dir = tempfile::tempdir().unwrap();
    let mut m = model("wan-odd", false);
    let base = plan_mapping(&m, &mapping("tp=2", Strategy::Ulysses));
    m.video.wan.rope_frames = 77;
    let made = plan_mapping(&m, &mapping("tp=2", Strategy::Ulysses));
    assert_ne!(made.sealed.digest_hex(), base.sealed.digest_hex());
    made.write(&dir.path().join("plan")).unwrap();
    let read = Plan::read(&dir.path().join("plan")).unwrap_or_else(|ds| panic!("{ds:#?}"));
    assert_eq!(read.video.wan.rope_frames, 77);
}

#[test]
fn an_edited_plan_is_not_the_sealed_one() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("plan");
    plan_mapping(&model("wan-odd", false), &mapping("tp=2", Strategy::Ulysses)).write(&at).unwrap();
    let file = at.join("stream.toml");
    let text = std::fs::read_to_string(&file).unwrap();
    std::fs::write(&file, text.replace("fps = 24.0", "fps = 25.0")).unwrap();
    assert_eq!(Plan::read(&at).unwrap_err()[0].code.id, "T0012");
    std::fs::remove_file(&file).unwrap();
    assert_eq!(Plan::read(&at).unwrap_err()[0].code.id, "T0011");
}

#[test]
fn a_plan_of_another_version_must_be_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let at = dir.path().join("plan");
    plan_mapping(&model("wan-odd", false), &mapping("tp=2", Strategy::Ulysses)).write(&at).unwrap();
    let file = at.join("seal.json");
    let text = std::fs::read_to_string(&file).unwrap();
    let old = text.replace("\"tessera_plan\": 2", "\"tessera_plan\": 1");
    assert_ne!(old, text);
    std::fs::write(&file, old).unwrap();
    let refused = Plan::read(&at).unwrap_err();
    let labels: Vec<&str> = refused[0].labels.iter().map(|l| l.message.as_str()).collect();
    assert_eq!((refused[0].code.id, &labels[..]), ("T0011", &["plan version 1", "reads plan version 2"][..]));
    assert!(refused[0].notes[0].contains("slot_of_value"), "{refused:#?}");
    assert_eq!(refused[0].hint.as_deref(), Some("make the plan again with `tessera plan`"));
}

#[test]
fn the_digest_names_the_plan_and_nothing_else() {
    let m = model("wan-odd", false);
    let digest = |m: &Model, map: &Mapping| plan_mapping(m, map).sealed.digest_hex();
    let base = mapping("tp=2", Strategy::Ulysses);
    assert_eq!(digest(&m, &base), digest(&m, &base));
    // The location and the name of the model are not part of the plan.
    let elsewhere = Model { name: "other".into(), dir: "/elsewhere".into(), ..m.clone() };
    assert_eq!(digest(&m, &base), digest(&elsewhere, &base));
    let others = [
        digest(&m, &mapping("tp=2", Strategy::Megatron)),
        digest(&m, &mapping("tp=4", Strategy::Ulysses)),
        digest(&model("wan-odd", true), &base),
        digest(&m, &Mapping { d_out: 3, ..base.clone() }),
        digest(&m, &Mapping { devices: vec!["cpu1".into(), "cpu0".into()], ..base.clone() }),
    ];
    for other in others {
        assert_ne!(other, digest(&m, &base));
    }
}

#[test]
fn published_sizes_plan_from_their_config_alone() {
    for (name, mesh, strategy) in [
        ("demo", "tp=4", Strategy::Megatron),
        ("wan2.1-1.3b", "tp=4", Strategy::Ulysses),
        ("wan2.1-1.3b", "tp=8", Strategy::Megatron), // 12 heads over 8 ranks: uneven
        ("wan2.1-14b", "tp=8", Strategy::Ulysses),
        ("wan2.1-14b", "tp=5,pp=2", Strategy::Ulysses),
    ] {
        let m = Model::open(&fixture("../models").join(name), &Overrides::default()).unwrap();
        let p = plan_mapping(&m, &mapping(mesh, strategy));
        let [weights, caches, temporaries] = p.memory_bytes(tessera_mesh::Rank(0));
        assert!(weights.0 > 0 && caches.0 > 0 && temporaries.0 > 0);
    }
    let m = Model::open(&fixture("../models/wan2.1-1.3b"), &Overrides::default()).unwrap();
    let refused = plan::plan_model(&m.video, "m", "", &mapping("tp=13", Strategy::Ulysses)).unwrap_err();
    assert_eq!(refused[0].code.id, "T0602");
    assert!(refused[0].hint.as_deref().unwrap().contains("1, 2, 3, 4, 6 or 12"), "{refused:#?}");
}
