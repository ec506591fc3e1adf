//! Where the planner puts the phases of pixels of a Wan VAE, on clusters that differ in devices and links.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use std::path::Path;

use tessera::checkpoint::Preset;
use tessera::{DtypePolicy, Mapping, MediaPlacement, Model, Overrides, Topology};
use tessera_estimate::{
    MachineModel, MediaDecision, VideoQuery, choose_media, load_machine, parse_video_pins, search_video,
};

fn wan(model: &str, recompute: bool) -> Model {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../models").join(model);
    let overrides =
        Overrides { preset: Some(Preset::KreaRealtime), recompute: Some(recompute), ..Overrides::default() };
    Model::open(&dir, &overrides).unwrap()
}

fn machine(cluster: &str) -> MachineModel {
    load_machine(cluster, Some("tessera"), None).unwrap()
}

/// Returns the machine with links between devices that are `factor` times slower.
fn with_slow_links(machine: &MachineModel, factor: f64) -> MachineModel {
    let mut cluster = machine.cluster.clone();
    for link in &mut cluster.links {
        link.bytes_per_s.value /= factor;
        link.latency_ns.value *= factor;
    }
    MachineModel::new(cluster, machine.profile.clone())
}

fn decide(model: &Model, mesh: &str, machine: &MachineModel, media: MediaPlacement) -> MediaDecision {
    let dtype = if machine.cluster.device.family == "cpu" { DtypePolicy::F32 } else { DtypePolicy::Bf16 };
    let mapping = Mapping { mesh: mesh.parse().unwrap(), dtype, media, ..Mapping::default() };
    let decision = choose_media(model, &mapping, machine).unwrap().unwrap();
    println!("{mesh} on {}: {}", machine.cluster.name, decision.explain(media));
    decision
}

#[test]
fn the_place_with_the_shortest_period_is_chosen() {
    let (gpus, cores) = (machine("hgx-h100"), machine("laptop"));
    let slow = with_slow_links(&gpus, 300.0);
    let cases = [
        // One GPU: nobody to share with, and a tie between the ranks' two ways.
        ("tp=1", &gpus, MediaPlacement::Mesh),
        ("tp=2", &gpus, MediaPlacement::Mesh),
        ("pp=2", &gpus, MediaPlacement::Mesh),
        // The negative control: halos over slow links cost more than whole pictures.
        ("tp=2", &slow, MediaPlacement::Replicas),
        // The leader uses the cores that ranks leave idle.
        ("tp=1", &cores, MediaPlacement::Leader),
    ];
    for (mesh, machine, best) in cases {
        for recompute in [false, true] {
            let decision = decide(&wan("wan2.1-1.3b", recompute), mesh, machine, MediaPlacement::Leader);
            assert_eq!(decision.best, best, "{mesh}, recompute {recompute}, on {}", machine.cluster.name);
        }
    }
}

#[test]
fn the_explanation_gives_the_times_and_what_another_choice_costs() {
    let model = wan("wan2.1-1.3b", false);
    let gpus = machine("hgx-h100");
    let decision = decide(&model, "tp=2", &gpus, MediaPlacement::Replicas);
    let best = decision.explain(decision.best);
    assert!(best.starts_with("mesh: in the calls, rows shared by 2 ranks: "), "{best}");
    assert!(best.contains("whole pictures: ") && best.contains("on the leader's CPU: "), "{best}");
    assert!(!best.contains("would save"), "{best}");
    let slower = decision.explain(MediaPlacement::Replicas);
    assert!(slower.contains("; mesh would save "), "{slower}");
    // Nobody offers a GPU that may not exist, but a plan that names one is estimated.
    assert!(!best.contains("without a rank"), "{best}");
    let outside = decide(&model, "tp=1", &gpus, MediaPlacement::Outside).explain(MediaPlacement::Outside);
    assert!(outside.starts_with("outside: on a GPU without a rank, beside the next call: "), "{outside}");
}

fn search(model: &Model, devices: u32, pins: &str) -> (String, Mapping) {
    let query = VideoQuery {
        model,
        machine: machine("hgx-h100"),
        devices: Some(devices),
        objective: None,
        dtype: Some(DtypePolicy::Bf16),
        pins: parse_video_pins(pins).unwrap(),
        decode_ns: None,
        encode_ns: None,
        whole_decode: false,
        command: String::new(),
    };
    let (report, mapping) = search_video(&query, &mut |_, _| ()).unwrap();
    (report.to_text(), mapping.unwrap())
}

#[test]
fn the_search_chooses_the_place_and_keeps_that_of_the_user() {
    let model = wan("wan2.1-1.3b", true);
    let (text, mapping) = search(&model, 2, "");
    println!("{text}");
    assert!(text.contains("pixels"), "{text}");
    // Chunks wait for the anchor, so a second GPU saves more as a rank than as a decoder.
    assert_eq!((mapping.media, mapping.topology), (MediaPlacement::Mesh, Topology::Mesh));
    for (pins, media) in
        [("media=replicas", MediaPlacement::Replicas), ("media=outside", MediaPlacement::Outside)]
    {
        let (text, mapping) = search(&model, 2, pins);
        assert_eq!(mapping.media, media);
        assert!(text.contains("would save"), "{text}");
    }
}

#[test]
fn the_first_stage_has_fewer_blocks_if_it_decodes() {
    let model = wan("wan2.1-1.3b", false);
    let blocks = |media| {
        let mapping =
            Mapping { mesh: "pp=2".parse().unwrap(), dtype: DtypePolicy::Bf16, media, ..Mapping::default() };
        tessera::plan::plan_model(&model.video, "", "", &mapping).unwrap().mapping.blocks
    };
    let (beside, in_calls) = (blocks(MediaPlacement::Leader), blocks(MediaPlacement::Mesh));
    println!("{beside:?} {in_calls:?}");
    assert_eq!(beside, [15, 15]);
    assert!(in_calls[0] < in_calls[1] && in_calls.iter().sum::<u64>() == 30, "{in_calls:?}");
    assert_eq!(blocks(MediaPlacement::Replicas), in_calls, "one rank of tp has the work of all rows");
}
