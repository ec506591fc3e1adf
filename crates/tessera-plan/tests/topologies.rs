//! Tests plans whose leader lies outside the mesh: which role runs which phase, and that the
//! planned texts equal those in filetests/check, which the verifier accepts there.

#![allow(clippy::disallowed_methods, reason = "it compares files with planned texts")]
#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::Path;

use tessera_ir::{Bundle, print};
use tessera_mesh::Rank;
use tessera_models::VideoModel;
use tessera_plan::{Mapping, Topology, lower};

use crate::support::logical;

mod support;

fn bundle(topology: Topology, mesh: &str) -> Bundle {
    let config = r#"{"dim":12,"ffn_dim":8,"num_heads":2,"num_layers":2,"in_dim":24,"out_dim":24,"text_len":2,
        "text_dim":4,"freq_dim":4}"#;
    let stream = "[video]\nwidth = 8\nheight = 4\n[latent]\nstride = [2, 2, 2]\n[cache]\nmode = \"recompute\"\n\
        [decoder]\nkind = \"space_time_depth\"\n";
    let m = VideoModel::parse(("config.json", config), ("stream.toml", stream)).unwrap();
    let logical = logical(&m);
    let mut mapping = Mapping { topology, mesh: mesh.parse().unwrap(), ..Mapping::default() };
    lower(&logical, &mut mapping).unwrap_or_else(|ds| panic!("{ds:#?}"))
}

const OUTSIDE: [&str; 2] = ["decode", "encode"];

// proves: V-07
#[test]
fn the_leader_decodes_and_the_mesh_generates() {
    for (topology, mesh, roles) in [
        (Topology::Pp0, "tp=1", vec![("leader@out0", vec![0]), ("stage0", vec![1])]),
        (Topology::Pp1, "tp=2", vec![("leader@out0", vec![0]), ("stage0", vec![1, 2])]),
        (Topology::Pp1, "pp=2", vec![("leader@out0", vec![0]), ("stage0", vec![1]), ("stage1", vec![2])]),
    ] {
        let b = bundle(topology, mesh);
        let found: Vec<(&str, Vec<u32>)> =
            b.roles.iter().map(|r| (r.role.as_str(), r.ranks.iter().map(|r| r.0).collect())).collect();
        assert_eq!(found, roles, "{mesh}");
        assert_eq!((b.mesh.outside_count(), b.role_index(Rank(0))), (1, Some(0)));
        for phase in &b.phases {
            let own = OUTSIDE.contains(&phase.name.as_str());
            assert_eq!(phase.programs[0].ops.is_empty(), !own, "@{} of the leader", phase.name);
            assert!(!own || phase.programs[1..].iter().all(|p| p.ops.is_empty()), "@{}", phase.name);
            // The mesh runs the same programs as in a topology whose first rank leads, except for
            // the numbers of the ranks.
            let within = bundle(Topology::Mesh, mesh);
            if !own {
                let body = |p: &tessera_ir::Program| print(p).split_once('\n').unwrap().1.to_string();
                let there = within.find_phase(&phase.name).unwrap();
                assert!(phase.programs[1..].iter().map(body).eq(there.programs.iter().map(body)));
            }
        }
    }
}

/// `TESSERA_BLESS=1` rewrites the files; review the difference.
#[test]
fn the_kept_texts_are_what_is_planned() {
    for (topology, mesh, about) in [
        (Topology::Pp0, "tp=1", "One rank generates, and a leader outside the mesh encodes and decodes."),
        (Topology::Pp1, "tp=2", "Two ranks generate, and a leader outside the mesh encodes and decodes."),
    ] {
        let b = bundle(topology, mesh);
        let kept = ["renoise", "emit", "decode", "encode"];
        let mut text = format!(
            "// test: check\n// phases chunk: renoise emit\n// phases leader: decode encode\n// note: The planner \
emits these programs for topology {}. {about}\n",
            topology.name()
        );
        for phase in b.phases.iter().filter(|p| kept.contains(&p.name.as_str())) {
            phase.programs.iter().for_each(|p| text += &print(p));
        }
        let name = format!("../../filetests/check/planned_{}.tir", topology.name());
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        if std::env::var_os("TESSERA_BLESS").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        assert!(std::fs::read_to_string(&path).unwrap_or_default() == text, "{}", path.display());
    }
}
