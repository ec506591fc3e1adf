//! Checks the six recipes of the mapping guide against its own arithmetic.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

use tessera_base::{Diagnostic, GateStatus, Severity};
use tessera_cost::moe::Routing;
use tessera_cost::params::{ExpertStorage, KvCacheStorage, TpScheme};
use tessera_cost::{MachineModel, Profile};
use tessera_ir::analytic_model::AnalyticModel;
use tessera_mesh::{Axis, Cluster, MemoryTier, Mesh, catalog};
use tessera_models::zoo;
use tessera_plan::search::placement::check_placement;
use tessera_plan::search::recipe::{self, Recipe, neighbour_meshes};
use tessera_plan::search::{MemoryUse, Reason, SearchOutcome, search};

fn rack(racks: u32) -> Cluster {
    catalog::get("gb200-nvl72").unwrap().with_racks(racks)
}

fn with_axes(recipe: Recipe, axes: [u32; 4]) -> Recipe {
    Recipe { axes, ..recipe }
}

fn work(r: &Recipe) -> AnalyticModel {
    zoo::find_model(r.model).unwrap().to_analytic_model(true)
}

fn check(name: &str, racks: u32, strict: bool) -> Vec<Diagnostic> {
    let r = recipe::find_recipe(name).unwrap();
    r.check(&work(&r), &rack(racks), None, strict)
}

fn only_diagnostic<'a>(ds: &'a [Diagnostic], code: &str) -> &'a Diagnostic {
    let mut found = ds.iter().filter(|d| d.code.id == code);
    let first = found.next().unwrap_or_else(|| panic!("no {code} in {ds:#?}"));
    assert!(found.next().is_none(), "{code} twice in {ds:#?}");
    first
}

#[test]
fn every_recipe_names_a_model_a_cluster_and_pins_that_can_be_read() {
    for name in recipe::recipe_names() {
        let r = recipe::require_recipe(&name.to_lowercase()).unwrap();
        assert!(zoo::find_model(r.model).is_some() && catalog::get(r.cluster).is_some(), "{name}");
        let pins = r.to_pins();
        assert_eq!([pins.tp, pins.ep, pins.pp, pins.dp], r.axes.map(Some));
        let knobs = r.knobs.split(',').count();
        assert_eq!(pins.values().len(), 4 + knobs, "{name}: {}", pins.to_text());
    }
    let d = recipe::require_recipe("throughput-trainin").unwrap_err();
    assert_eq!((d.code.id, d.hint.as_deref()), ("T1229", Some("did you mean `throughput-training`?")));
}

#[test]
fn recipe_a_has_six_groups_of_twelve_and_twelve_of_six() {
    let r = recipe::find_recipe("A").unwrap();
    let mesh = Mesh::new(r.axes).unwrap();
    assert_eq!(
        (mesh.world_size(), mesh.axis_groups(Axis::Tp).len(), mesh.axis_groups(Axis::Ep).len()),
        (72, 6, 12)
    );
    assert!(mesh.axis_groups(Axis::Tp).iter().all(|g| g.len() == 12));
    let ds = check("A", 1, false);
    assert!(ds.iter().all(|d| !d.is_error() && d.code.id != "T1223"), "no link leaves the rack: {ds:#?}");
}

#[test]
fn recipe_b_has_nine_groups_of_eight() {
    let r = recipe::find_recipe("B").unwrap();
    let mesh = Mesh::new(r.axes).unwrap();
    assert_eq!(
        (mesh.world_size(), mesh.axis_groups(Axis::Tp).len(), mesh.axis_groups(Axis::Ep).len()),
        (72, 9, 8)
    );
    let ds = check("B", 1, false);
    assert_eq!(ds.len(), 1, "{ds:#?}");
    let d = only_diagnostic(&ds, "T1222");
    assert_eq!(d.severity, Severity::Warning);
    assert!(
        d.message.contains("455.11 each: 1 rank has 456, 8 ranks have 455") && d.message.contains("0.20 %"),
        "{d:#?}"
    );
}

/// The number of racks follows from the devices of a rack, not from `--devices`.
#[test]
fn fewer_devices_do_not_change_the_racks_that_a_recipe_needs() {
    for (name, expected) in [("sr-moe", "1 rack has"), ("C", "2 racks have")] {
        let r = recipe::find_recipe(name).unwrap();
        for devices in [1, 71] {
            let ds = r.check(&work(&r), &rack(3), Some(devices), false);
            let notes = &only_diagnostic(&ds, "T1220").notes;
            assert_eq!(notes[0], format!("{expected} room for the recipe as printed"), "{devices} devices");
        }
    }
}

#[test]
fn a_hundred_and_forty_four_ranks_do_not_fit_seventy_two_devices() {
    for name in ["C", "throughput-training"] {
        let ds = check(name, 1, false);
        let d = only_diagnostic(&ds, "T1220");
        assert!(d.is_error() && d.message.contains("8·6·3·1 = 144 ranks, 72 devices"), "{d:#?}");
        let hint = d.hint.as_deref().unwrap();
        assert!(hint.contains("(8,3,3,1) keeps tp, pp, dp"), "{hint}");
        assert!(hint.contains("(4,6,3,1) keeps ep, pp, dp"), "{hint}");
        assert!(hint.contains("(12,2,3,1)"), "{hint}");
        // Two racks are enough; stages of 48 do not divide 72, which gives warnings.
        let ds = check(name, 2, false);
        assert!(ds.iter().all(|d| !d.is_error()), "{ds:#?}");
        let flags: Vec<_> = ds.iter().filter(|d| d.code.id == "T1223").collect();
        assert_eq!(flags.len(), 2, "{flags:#?}");
        assert!(flags[0].message.contains("8 of 24 ep groups"), "{}", flags[0].message);
        assert!(flags[1].message.contains("48 of 48 pp groups"), "{}", flags[1].message);
    }
}

#[test]
fn legal_factorings_over_three_stages_are_the_known_ones() {
    let found = neighbour_meshes(72, [8, 6, 3, 1], 128, 4096, false);
    let three: Vec<_> = found.iter().filter(|m| m[2] == 3 && m[3] == 1).map(|m| (m[0], m[1])).collect();
    for pair in [(8, 3), (4, 6), (12, 2), (6, 4), (2, 12), (3, 8)] {
        assert!(three.contains(&pair), "{pair:?} in {three:?}");
    }
    assert!(found.iter().all(|m| m.iter().product::<u32>() == 72));
    assert!(found.iter().all(|m| u64::from(m[0]) <= 128 && u64::from(m[1]) <= 4096));
    let strict = neighbour_meshes(72, [12, 6, 1, 1], 128, 4096, true);
    assert!(!strict.is_empty() && strict.iter().all(|m| 128 % m[0] == 0 && 4096 % m[1] == 0), "{strict:?}");
    // A model without experts has ep = 1.
    assert!(neighbour_meshes(72, [8, 1, 9, 1], 128, 0, false).iter().all(|m| m[1] == 1));
}

#[test]
fn uneven_heads_over_twelve_report_their_cost() {
    let ds = check("A", 1, false);
    let d = only_diagnostic(&ds, "T1221");
    assert_eq!(d.severity, Severity::Warning);
    assert!(d.message.contains("10.67 each: 8 ranks have 11, 4 ranks have 10"), "{}", d.message);
    assert!(d.message.contains("3.12 % longer"), "{}", d.message);
    assert!(d.notes[0].contains("1408 and 1280") && d.notes[0].contains("2731 and 2730"), "{:?}", d.notes);
    let experts = only_diagnostic(&ds, "T1222");
    assert!(
        experts.message.contains("682.67 each: 4 ranks have 683, 2 ranks have 682"),
        "{}",
        experts.message
    );
    // `strict` lists the meshes with even shards.
    let ds = check("A", 1, true);
    for code in ["T1221", "T1222"] {
        let d = only_diagnostic(&ds, code);
        assert!(d.is_error() && d.hint.as_deref().unwrap().starts_with("legal (tp,ep,pp,dp): "), "{d:#?}");
    }
    // Eight ranks have sixteen heads each, whatever the head size.
    let b = recipe::find_recipe("B").unwrap();
    for model in ["sr-moe", "sr-moe-wide"] {
        let ds = b.check(&zoo::find_model(model).unwrap().to_analytic_model(true), &rack(1), None, false);
        assert!(ds.iter().all(|d| d.code.id != "T1221"), "{ds:#?}");
    }
    // With rings of three, heads are sharded over four ranks.
    assert!(check("long-context", 1, true).iter().all(|d| d.code.id != "T1221"));
}

#[test]
fn more_shards_than_units_are_rejected() {
    let r = with_axes(recipe::find_recipe("A").unwrap(), [1, 72, 1, 1]);
    let few = zoo::find_model("mixtral-8x7b").unwrap().to_analytic_model(true);
    let ds = r.check(&few, &rack(1), None, false);
    let d = only_diagnostic(&ds, "T1222");
    assert!(d.is_error() && d.message.contains("64 ranks would have none"), "{d:#?}");
}

#[test]
fn copies_stay_in_their_rack() {
    let two = rack(2);
    let mesh = Mesh::new([8, 9, 1, 2]).unwrap();
    let by_rack: Vec<u32> = (0..144).collect();
    let ds = check_placement(&mesh, &by_rack, &two, true);
    // Only gradients cross.
    assert_eq!(ds.len(), 1, "{ds:#?}");
    assert!(!ds[0].is_error() && ds[0].message.contains("72 of 72 dp groups"), "{ds:#?}");
    // Devices assigned to the replicas alternately: both replicas span racks.
    let in_turn: Vec<u32> = (0..144).map(|r| 2 * (r % 72) + r / 72).collect();
    let ds = check_placement(&mesh, &in_turn, &two, true);
    let copies: Vec<_> = ds.iter().filter(|d| d.code.id == "T1224").collect();
    assert_eq!(copies.len(), 2, "{ds:#?}");
    assert!(copies[0].is_error() && copies[0].message.contains("replica 0 of 72 ranks"), "{copies:#?}");
    // Within one domain nothing crosses, unless the device order is scattered.
    let mesh = Mesh::new([8, 9, 1, 1]).unwrap();
    assert!(check_placement(&mesh, &(0..72).collect::<Vec<_>>(), &rack(1), true).is_empty());
    let scattered: Vec<u32> = (0..72).map(|r| 2 * r).collect();
    let ds = check_placement(&mesh, &scattered, &two, false);
    assert!(ds.iter().any(|d| d.is_error() && d.code.id == "T1223"), "{ds:#?}");
}

fn search_recipe(r: &Recipe, racks: u32) -> SearchOutcome {
    let machine = MachineModel::new(rack(racks), Profile::builtin("torch-2.11").unwrap());
    search(&r.to_query(work(r), machine, Routing::Random, false))
}

#[test]
fn recipes_that_fit_are_legal_on_one_rack() {
    for name in ["A", "B", "sr-moe", "long-context"] {
        let r = recipe::find_recipe(name).unwrap();
        let o = search_recipe(&r, 1);
        assert!(o.legal_count > 0, "{name}: {:#?}", o.rejected);
        let best = &o.best_candidates[0];
        let [tp, ep, pp, _] = r.axes;
        assert_eq!((best.candidate.layout.tp, best.candidate.layout.ep, best.candidate.pp), (tp, ep, pp));
        assert_eq!(best.candidate.layout.capacity_pct, 125);
        let density = best.gates.iter().find(|g| g.id == "experts.density").unwrap();
        assert_eq!(density.status, GateStatus::Pass, "{}", density.explanation);
    }
}

#[test]
fn recipes_of_144_ranks_are_refused_and_their_neighbours_run() {
    for name in ["C", "throughput-training"] {
        let r = recipe::find_recipe(name).unwrap();
        let o = search_recipe(&r, 1);
        assert_eq!(o.legal_count, 0);
        assert!(o.rejected.contains_key(&Reason::Ranks), "{:#?}", o.rejected);
        assert!(search_recipe(&r, 2).legal_count > 0, "two racks have room");
        for axes in [[8, 3, 3, 1], [4, 6, 3, 1], [12, 2, 3, 1]] {
            let o = search_recipe(&with_axes(r, axes), 1);
            assert!(o.legal_count > 0, "{name} {axes:?}: {:#?}", o.rejected);
        }
    }
}

#[test]
fn training_in_small_micro_batches_keeps_the_bubble_below_a_tenth() {
    let r = with_axes(recipe::find_recipe("throughput-training").unwrap(), [8, 3, 3, 1]);
    let o = search_recipe(&r, 1);
    let best = &o.best_candidates[0];
    assert_eq!((best.candidate.micro_batch, best.candidate.experts_at), (1, ExpertStorage::Hbm));
    // Three stages need at least 19.
    assert!(best.micro_batches >= 19, "{}", best.micro_batches);
    let bubble = best.gates.iter().find(|g| g.id == "pipeline.bubble").unwrap();
    assert_eq!(bubble.status, GateStatus::Pass, "{}", bubble.explanation);
}

#[test]
fn a_long_context_is_split_and_windowed() {
    let o = search_recipe(&recipe::find_recipe("long-context").unwrap(), 1);
    let c = o.best_candidates[0].candidate;
    assert_eq!((c.layout.scheme, c.layout.ring, c.cache_at), (TpScheme::Striped, 3, KvCacheStorage::Window));
    let cache = o.best_candidates[0].gates.iter().find(|g| g.id == "cache.hits").unwrap();
    assert_ne!(cache.status, GateStatus::NotApplicable, "{}", cache.explanation);

    // The cache is the window times K, and attention cost follows the window.
    let r = recipe::find_recipe("long-context").unwrap();
    let bytes = |o: &SearchOutcome| {
        o.best_candidates[0].estimate.budget.bytes[&(MemoryTier::Hbm, MemoryUse::Cache)].0 as f64
    };
    let mut q = r.to_query(work(&r), machine_of_a_rack(), Routing::Random, false);
    assert_eq!((q.attention_window(), q.pins.to_text().contains("window=32768")), (Some(32_768), true));
    let keys = q.work.kv_cache_bytes(1.0).0 as f64;
    // Six replicas with two prompts each; a rank has a quarter of the heads and a third of the
    // tokens.
    let said = 2.0 * 32_768.0 * keys / 4.0 / 3.0;
    assert!((bytes(&o) / said - 1.0).abs() < 1e-6, "{} against {said}", bytes(&o));
    q.pins = q.pins.without("window");
    let all = search(&q);
    assert!((bytes(&all) / bytes(&o) - 8.0).abs() < 0.01, "{} and {}", bytes(&all), bytes(&o));
    assert!(
        o.best_candidates[0].estimate.times.compute_ns < all.best_candidates[0].estimate.times.compute_ns
    );
}

fn machine_of_a_rack() -> MachineModel {
    let cluster = rack(1);
    let profile = Profile::builtin(&cluster.profile).unwrap();
    MachineModel::new(cluster, profile)
}
