//! Routers that a mapping changes: penalties by distance, biases, a term of the loss, and a number of experts that is
//! no whole one.

use std::collections::BTreeMap;

use tessera_filetests::experts::{INNER, Layer, logical_layer, normals, plan_layer};
use tessera_ir::parse_all;
use tessera_plan::{ExpertMap, Mapping, ROUTER_BIAS, Strategy, lower};
use tessera_reference::Tensor;

use crate::run::{RunLayer, bits, relative_difference, run};
use crate::{mapping, random_layer};

const GATE: &str = "tokens = \"sharded\"\nlocality_ranks = 1\ngate = \"topk_softmax_locality_penalized\"";

/// Returns the share of choices whose expert is outside of the token's locality group, where each of `ep` ranks is
/// a group.
fn remote_share(choices: &[f32], (tokens, top_k): (usize, usize), text: &str, experts: u64) -> f64 {
    let map = ExpertMap::new(&Mapping::parse("m", text).unwrap(), experts).unwrap();
    let part = tokens.div_ceil(map.rank_groups.len());
    let is_remote = |i: usize| map.locality_cost(choices[i] as usize, map.rank_groups[i / top_k / part]);
    let remote: u64 = (0..tokens * top_k).map(is_remote).sum();
    remote as f64 / (tokens * top_k) as f64
}

#[test]
fn fewer_slots_are_remote_the_larger_the_penalty_and_none_of_0_changes_a_bit() {
    let layer = random_layer(3, (60, 6, 2));
    let text = |weight: f64| mapping("ep = 3", &format!("{GATE}\nlocality_weight = {weight:?}"));
    let plain = layer.result(&mapping("ep = 3", "tokens = \"sharded\""));
    let none = layer.result(&text(0.0));
    assert!(plain.iter().all(|(name, x)| bits(x) == bits(&none[name])), "a penalty of 0 is none");
    let share = |weight: f64| {
        let found = layer.result(&text(weight));
        remote_share(&found["choices"], (60, 2), &text(weight), 6)
    };
    let shares: Vec<f64> = [0.0, 0.25, 0.5, 1.0, 2.0, 20.0].map(share).to_vec();
    println!("share of remote slots: {shares:?}");
    assert!(shares.windows(2).all(|w| w[1] <= w[0]) && shares[3] < shares[0], "{shares:?}");
    assert!((shares[0] - 2.0 / 3.0).abs() < 0.1 && shares[5] == 0.0, "{shares:?}");
}

#[test]
fn equal_penalised_logits_give_the_lower_expert_and_weights_of_its_logits() {
    // Experts 0 and 1 are of rank 0, experts 2 and 3 of rank 1. Tokens 0 and 1 are of rank 0.
    let mut layer = Layer::new(4, 2, vec![vec![0.0, 1.0, 1.5, 0.5]; 4]);
    layer.channels = 3;
    let text = mapping("ep = 2", &format!("{GATE}\nlocality_weight = 0.5"));
    let found = layer.result(&text);
    assert_eq!(found["choices"], [1.0, 2.0, 1.0, 2.0, 2.0, 1.0, 2.0, 1.0].map(|e: f32| e));
    let bundle = layer.plan(&text);
    for (outputs, reference) in layer.run(&bundle).iter().zip(layer.evaluate(&bundle)) {
        assert!(relative_difference(&outputs["sum"], reference["sum"].data()) < 1e-5);
    }
    let alone = layer.result(&mapping("ep = 1", "tokens = \"replicated\""));
    assert_eq!(
        bits(&found["sum"]),
        bits(&alone["sum"]),
        "both choose experts 1 and 2, with weights of the logits without a penalty"
    );
}

#[test]
fn biases_are_added_to_logits_and_a_rank_with_other_biases_is_found() {
    let layer = random_layer(5, (13, 6, 2));
    let bias: Vec<f32> = normals(9, 6);
    let list: Vec<f64> = bias.iter().map(|x| f64::from(*x)).collect();
    let text = mapping("tp = 2\nep = 2", &format!("bias = {list:?}"));
    let bundle = layer.plan(&text);
    let mut weights = layer.weights();
    weights.insert(ROUTER_BIAS.to_string(), Tensor::new(&[6], list.clone()));
    let found = run(&bundle, &weights, &layer.inputs());
    let mut shifted = layer.clone();
    shifted.logits.iter_mut().flatten().zip(bias.iter().cycle()).for_each(|(x, b)| *x += b);
    let expected = shifted.result(&mapping("tp = 2\nep = 2", ""));
    assert!(found.iter().all(|rank| bits(&rank["choices"]) == bits(&expected["choices"])));
    let plain = layer.result(&mapping("tp = 2\nep = 2", ""));
    assert!(bits(&plain["choices"]) != bits(&expected["choices"]), "the biases move choices");
    // What every rank of a stage returns is compared in each call: another bias on rank 1 shows in its choices.
    let of = |bias: &[f64]| {
        let mut weights = layer.weights();
        weights.insert(ROUTER_BIAS.to_string(), Tensor::new(&[6], bias.to_vec()));
        run(&bundle, &weights, &layer.inputs())
    };
    let other: Vec<f64> = list.iter().rev().copied().collect();
    assert!(bits(&of(&other)[1]["choices"]) != bits(&found[0]["choices"]));
}

#[test]
fn a_factor_of_the_locality_cost_moves_logits_and_so_choices_and_weights() {
    let layer = random_layer(6, (12, 6, 2));
    let text = mapping("ep = 2", "tokens = \"sharded\"\nlocality_ranks = 1\nbias_locality = 0.75");
    let map = ExpertMap::new(&Mapping::parse("m", &text).unwrap(), 6).unwrap();
    let mut shifted = layer.clone();
    for (t, logits) in shifted.logits.iter_mut().enumerate() {
        for (e, x) in logits.iter_mut().enumerate() {
            *x -= 0.75 * map.locality_cost(e, map.rank_groups[t / 6]) as f32;
        }
    }
    let expected = shifted.result(&mapping("ep = 2", "tokens = \"sharded\""));
    let found = layer.result(&text);
    assert_eq!(bits(&found["choices"]), bits(&expected["choices"]));
    assert_ne!(bits(&found["choices"]), bits(&layer.result("")["choices"]));
}

#[test]
fn the_gradient_of_the_distance_is_that_of_finite_differences() {
    let layer = random_layer(12, (7, 5, 2));
    let term = "regularizer = { kind = \"topology_distance\", weight = 0.05, gradient = true }";
    let text = mapping("ep = 3", &format!("tokens = \"sharded\"\nlocality_ranks = 2\n{term}"));
    let bundle = layer.plan(&text);
    let value = |layer: &Layer| layer.evaluate(&bundle).remove(0)["regularizer.layer0"].data()[0];
    let gradient = layer.evaluate(&bundle).remove(0).remove("regularizer_gradient.layer0").unwrap();
    assert!(value(&layer) > 0.0);
    for (t, e) in (0..7).flat_map(|t| (0..5).map(move |e| (t, e))) {
        // Logits are f32, so a power of two keeps both sides exact.
        let step = 1.0 / 1024.0;
        let moved = |by: f32| {
            let mut layer = layer.clone();
            layer.logits[t][e] += by;
            (value(&layer), f64::from(layer.logits[t][e]))
        };
        let ((up, above), (down, below)) = (moved(step), moved(-step));
        let expected = (up - down) / (above - below);
        let found = gradient.data()[t * 5 + e];
        assert!((found - expected).abs() < 1e-4 * 0.05, "token {t}, expert {e}: {found} and {expected}");
    }
    for outputs in layer.run(&bundle) {
        let far = relative_difference(&outputs["regularizer_gradient.layer0"], gradient.data());
        assert!(far < 1e-5, "{far:e}");
        assert!((f64::from(outputs["regularizer.layer0"][0]) - value(&layer)).abs() < 1e-7);
    }
    // A program without the term returns none, and computes the same.
    let none =
        mapping("ep = 3", "tokens = \"sharded\"\nregularizer = { kind = \"topology_distance\", weight = 0 }");
    let (with, without) = (layer.result(&text), layer.result(&none));
    assert!(!without.contains_key("regularizer.layer0"));
    assert_eq!(bits(&with["y"]), bits(&without["y"]));
}

#[test]
fn half_of_the_tokens_get_a_second_expert_and_only_the_seed_of_ep_moves_which() {
    let layer = random_layer(13, (64, 4, 2));
    let choices = |mesh: &str, seeds: &str| {
        let keys = format!(
            "tokens = \"sharded\"\ntoken_groups = 4\ntop_k = 1.5\nstatistics = true\nseeds = {seeds}"
        );
        layer.result(&mapping(mesh, &keys))
    };
    let seeds = "{ global = 1, tp = 2, ep = 3 }";
    let first = choices("ep = 2", seeds);
    for mesh in ["ep = 2", "ep = 1", "ep = 4", "tp = 2\nep = 2"] {
        assert_eq!(bits(&choices(mesh, seeds)["choices"]), bits(&first["choices"]), "{mesh}");
        if !mesh.contains("tp") {
            assert_eq!(bits(&choices(mesh, seeds)["sum"]), bits(&first["sum"]), "{mesh}");
        }
    }
    let other = |seeds: &str| bits(&choices("ep = 2", seeds)["choices"]);
    assert_eq!(
        other("{ global = 1, tp = 7, ep = 3 }"),
        bits(&first["choices"]),
        "ranks of tp hold the same tokens"
    );
    assert_ne!(other("{ global = 1, tp = 2, ep = 4 }"), bits(&first["choices"]));
    assert_ne!(other("{ global = 2, tp = 2, ep = 3 }"), bits(&first["choices"]));
    let second = first["choices"].chunks(2).filter(|c| c[1] >= 0.0).count();
    assert!((20..44).contains(&second), "{second} of 64 tokens have a second expert");
    let counted: f32 = first["experts.0"].chunks(4).map(|c| c[0]).sum();
    assert_eq!(counted as usize, 64 + second);
    // A token with one expert gives it its whole weight.
    let one = layer.result(&mapping("ep = 2", "tokens = \"sharded\"\ntop_k = 1"));
    let width = layer.width();
    for t in (0..64).filter(|t| first["choices"][2 * t + 1] < 0.0) {
        assert_eq!(
            bits(&first["sum"][t * width..][..width]),
            bits(&one["sum"][t * width..][..width]),
            "token {t}"
        );
    }
}

#[test]
fn a_hundred_thousand_tokens_have_one_and_a_half_experts_each_alike_on_ranks_of_tp() {
    let tokens = 100_000_usize;
    let draw = |mesh: &str, seed: u64| {
        let text = format!(
            "program @draw {{ %c = input : f32[{tokens}, 2] %k = toperator.expert_draw %c \
             {{keep = 0.5, layer = 3, seeds = [11, {seed}]}} output \"k\", %k }}"
        );
        let program = parse_all(&text, "draw").unwrap_or_else(|ds| panic!("{ds:#?}")).remove(0);
        let bundle = plan_layer(program, [2, tokens, INNER], &mapping(mesh, ""));
        let choices = Tensor::from_fn(&[tokens, 2], |i| (i % 2) as f64);
        run(&bundle, &BTreeMap::new(), &BTreeMap::from([("c".to_string(), choices)]))
    };
    let ranks = draw("tp = 2", 5);
    assert_eq!(bits(&ranks[0]["k"]), bits(&ranks[1]["k"]), "ranks of tp draw alike");
    let mean = |k: &[f32]| k.iter().filter(|e| **e >= 0.0).count() as f64 / tokens as f64;
    println!("experts per token: {}", mean(&ranks[0]["k"]));
    assert!((mean(&ranks[0]["k"]) - 1.5).abs() < 0.03, "{}", mean(&ranks[0]["k"]));
    for _ in 0..2 {
        assert_eq!(bits(&draw("tp = 1", 5)[0]["k"]), bits(&ranks[0]["k"]), "equal seeds draw alike");
    }
    assert_ne!(bits(&draw("tp = 1", 6)[0]["k"]), bits(&ranks[0]["k"]));
}

#[test]
fn keys_that_do_not_fit_the_model_are_refused() {
    let layer = random_layer(1, (6, 4, 2));
    for (keys, says) in [
        ("bias = [0.5]", "1 numbers for 4 experts"),
        ("bias_file = \"b.json\"", "was not read"),
        ("top_k = 4.5", "4.5 of 4 experts"),
        ("tokens = \"sharded\"\nbias_locality = 1", "no locality group"),
    ] {
        let mut m = Mapping::parse("m", &mapping("ep = 2", keys)).unwrap();
        m.strategy = Strategy::Megatron;
        let ds = lower(&logical_layer(layer.program(), [4, 6, INNER]), &mut m).unwrap_err();
        assert!(ds.iter().any(|d| d.code.id == "T0612" && d.message.contains(says)), "{keys}: {ds:#?}");
    }
}
