//! The table of ranks of a search and the hosts that its plan states say the same.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::collections::BTreeMap;
use std::path::Path;

use tessera::checkpoint::Preset;
use tessera::{DtypePolicy, Model, Overrides, Topology};
use tessera_estimate::{VideoQuery, load_machine, parse_video_pins, search_video};

/// Returns the host of each rank in a table of ranks, as `rack host`.
fn read_hosts(table: &str) -> BTreeMap<u32, String> {
    let rows = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    let host_of = |row: &str| {
        let cells: Vec<&str> = row.split('\t').collect();
        (cells[0].parse().unwrap(), format!("{} {}", cells[1], cells[2]))
    };
    rows.map(host_of).collect()
}

#[test]
fn whoever_follows_the_table_of_ranks_starts_them_on_the_hosts_that_the_plan_states() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models/wan2.1-1.3b");
    let overrides = Overrides { preset: Some(Preset::KreaRealtime), ..Overrides::default() };
    let model = Model::open(&dir, &overrides).unwrap();
    for (topology, outside) in [(Topology::Mesh, 0), (Topology::Pp1, 1)] {
        let query = VideoQuery {
            model: &model,
            machine: load_machine("hgx-h100", Some("tessera"), Some(16)).unwrap(),
            devices: Some(12 + outside),
            objective: None,
            dtype: Some(DtypePolicy::Bf16),
            pins: parse_video_pins(&format!("tp=6,pp=2,topology={}", topology.name())).unwrap(),
            decode_ns: None,
            encode_ns: None,
            whole_decode: false,
            command: String::new(),
        };
        let (report, mapping) = search_video(&query, &mut |_, _| ()).unwrap();
        let (mapping, real) = (mapping.unwrap(), read_hosts(report.rank_table.as_deref().unwrap()));
        assert_eq!((mapping.topology, &mapping.hosts[..]), (topology, &[8 + outside, 4][..]));
        let world = mapping.world_mesh().unwrap();
        assert!(real.keys().copied().eq(0..world.world_size()), "{real:?}");
        let stated = mapping.host_map().unwrap();
        assert_eq!(stated.find_misplaced(&real), []);
        assert_eq!(stated.find_merged(&real), None);
    }
}
