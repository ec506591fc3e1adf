//! Cases of routers: choices by scores, groups and corrections, weights, and what a mapping changes.

use super::language_cases::{Case, CaseWriter, find_differences, find_gpu, take_turn};

/// Tokens, experts, groups of experts, groups that are kept, and choices.
type Gate = [usize; 5];

/// Choices with ties: logits are rounded, and corrections are equal in all experts. Everything that reads choices
/// reads some of −1 too.
fn gate_case([tokens, experts, groups, keep, k]: Gate, has_ties: bool) -> Case {
    let ties = if has_ties { ", with ties" } else { "" };
    let shape = format!("{k} of {experts} experts in {keep} of {groups} groups for {tokens} tokens{ties}");
    let mut w = CaseWriter::new("f32", shape, 2);
    w.input("logits", &[tokens, experts]);
    w.weight("bias", "f32", &[experts]);
    if has_ties {
        w.round_input("logits");
        // Sums of unequal terms would round in another way than on the host.
        w.case.weights.get_mut("bias").unwrap().1.fill(0.25);
    }
    let of_groups = format!("groups = {groups}, keep_groups = {keep}, top_k = {k}");
    for (name, operands, attrs) in [
        ("sigmoid", "%logits, correction=%bias", format!("{of_groups}, score = \"sigmoid\"")),
        ("softmax", "%logits, correction=%bias", of_groups.clone()),
        ("groups", "%logits", of_groups),
        ("corrected", "%logits, correction=%bias", format!("score = \"sigmoid\", top_k = {experts}")),
        ("ranking", "%logits", format!("top_k = {experts}")),
        ("best", "%logits", format!("top_k = {k}")),
    ] {
        w.line(format!("%{name} = toperator.top_k_experts {operands} {{{attrs}}}"));
        w.exact_output(name);
    }
    w.line(
        "%kept = toperator.expert_draw %sigmoid {keep = 0.5, layer = 4294967299, seeds = [7, 4294967295]}",
    );
    w.exact_output("kept");
    for (name, attrs) in [
        ("w", ""),
        ("wr", "renormalise = true"),
        ("ws", "scale = 2.5, score = \"sigmoid\""),
        ("wrs", "renormalise = true, scale = 2.5, score = \"sigmoid\""),
    ] {
        w.line(format!("%{name} = toperator.expert_weights %logits, %kept {{{attrs}}}"));
        w.line(format!("output \"{name}\", %{name}"));
    }
    w.line("%gates = toperator.expert_gates %logits, %best");
    w.exact_output("gates");
    w.finish("")
}

/// Logits so small that all scores of a sigmoid are 0, so that their sum is 1e-20.
fn vanishing_case() -> Case {
    let mut w = CaseWriter::new("f32", "scores of 0", 1);
    w.input("logits", &[3, 9]);
    w.case.calls[0].0.get_mut("logits").unwrap().1.fill(-800.0);
    w.line(
        "%e = toperator.top_k_experts %logits {groups = 3, keep_groups = 2, score = \"sigmoid\", top_k = 4}",
    );
    w.line("%g = toperator.expert_weights %logits, %e {renormalise = true, score = \"sigmoid\"}");
    w.exact_output("e");
    w.exact_output("g");
    w.finish("")
}

/// Draws by positions of sequences, of which one is absent in the second call.
fn position_case() -> Case {
    let mut w = CaseWriter::new("f32", "draws by position", 2);
    w.input("logits", &[39, 5]);
    w.scalar("start", &[3], &[&[0.0, 5.0, 70_000.0], &[3.0, -1.0, 12.0]]);
    w.line("%e = toperator.top_k_experts %logits {top_k = 2}");
    w.line(
        "%k = toperator.expert_draw %e, start=%start {keep = 0.4, layer = 2, seeds = [5, 6], tokens = 36}",
    );
    w.line("%all = toperator.expert_draw %e {keep = 0.999999, layer = 2, seeds = [5, 6]}");
    ["k", "all"].iter().for_each(|name| w.exact_output(name));
    w.finish("")
}

/// Choices of rows of which some bring no token, by both kernels, and their rerouting: sequences end early, one is absent in
/// the second call, and the last rows are padding.
fn absent_case() -> Case {
    let mut w = CaseWriter::new("f32", "rows without a token", 2);
    w.input("logits", &[14, 9]);
    w.weight("bias", "f32", &[9]);
    w.scalar("start", &[3], &[&[0.0, 5.0, 70_000.0], &[3.0, -1.0, 12.0]]);
    w.scalar("last", &[3], &[&[3.0, 5.0, 10.0], &[0.0, 4.0, 11.0]]);
    let rows = "last=%last, start=%start";
    w.line(format!("%searched = toperator.top_k_experts %logits, {rows} {{tokens = 12, top_k = 2}}"));
    w.line(format!(
        "%sorted = toperator.top_k_experts %logits, correction=%bias, {rows} {{tokens = 12, top_k = 9}}"
    ));
    w.line("%moved = toperator.expert_reroute %sorted {capacity = 1, reroutes = 9, tokens = 12, top_k = 2}");
    ["searched", "sorted", "moved"].iter().for_each(|name| w.exact_output(name));
    w.finish("")
}

/// The same for the rows of each of some ranks of tp, and the places of their choices.
fn absent_shard_case(ranks: usize) -> Case {
    let mut w = CaseWriter::new("f32", format!("places on {ranks} ranks"), 2);
    w.input("logits", &[18, 5]);
    w.scalar("start", &[2], &[&[0.0, 5.0], &[3.0, -1.0]]);
    w.scalar("last", &[2], &[&[7.0, 12.0], &[6.0, 9.0]]);
    w.line("%own = toperator.take_shard %logits {axis = \"tp\", dim = 0}");
    w.line("%e = toperator.top_k_experts %own, last=%last, start=%start {tokens = 16, top_k = 3}");
    w.line(
        "%p = toperator.expert_places %e, start=%start {residents = [4, 1, 0, 1, 2, 3, 1, 4], tokens = 16}",
    );
    w.line("%r = toperator.expert_places %e {residents = [4, 1, 0, 1, 2, 3, 1, 4]}");
    ["e", "p", "r"].iter().for_each(|name| w.exact_output(name));
    w.finish_on(&format!("tp={ranks}"))
}

/// Writes the ops that weigh the distance of tokens to experts row by row. Returns the attributes of their distances.
fn write_distances(
    w: &mut CaseWriter,
    logits: &str,
    (homes, experts): (usize, usize),
    tokens: usize,
) -> String {
    let list = |n: usize, f: &dyn Fn(usize) -> usize| (0..n).map(f).collect::<Vec<usize>>();
    let (groups, of_experts) = (list(homes, &|i| i / 2), list(experts, &|e| e * 5 % homes / 2));
    w.line(format!(
        "%near = toperator.expert_locality %{logits} {{expert_groups = {of_experts:?}, home_groups = {groups:?}, weight = 0.625}}"
    ));
    let distances = list(homes * homes, &|i| (i / homes).abs_diff(i % homes) * 3);
    let attrs = format!(
        "distances = {distances:?}, expert_homes = {:?}, tokens = {tokens}, weight = 0.5",
        list(experts, &|e| e * 5 % homes)
    );
    w.line(format!("%gradient = toperator.expert_distance_gradient %{logits} {{{attrs}}}"));
    ["near", "gradient"].iter().for_each(|name| w.line(format!("output \"{name}\", %{name}")));
    attrs
}

fn distance_case([tokens, experts, homes, real_tokens]: [usize; 4]) -> Case {
    let shape = format!("{homes} homes of {tokens} tokens and {experts} experts, {real_tokens} no padding");
    let mut w = CaseWriter::new("f32", shape, 2);
    w.input("logits", &[tokens, experts]);
    let attrs = write_distances(&mut w, "logits", (homes, experts), real_tokens);
    w.line(format!("%distance = toperator.expert_distance %logits {{{attrs}}}"));
    w.line("output \"distance\", %distance");
    w.finish("")
}

/// The same for the rows of each of some ranks of ep, with draws by rows of the whole tensor. Their mean distance is a
/// term of a sum over ranks, which no program may return.
fn shard_case(ranks: usize, [tokens, experts, homes, real_tokens]: [usize; 4]) -> Case {
    let mut w = CaseWriter::new("f32", format!("{homes} homes of {tokens} tokens on {ranks} ranks"), 2);
    w.input("logits", &[tokens, experts]);
    w.line("%own = toperator.take_shard %logits {axis = \"ep\", dim = 0}");
    write_distances(&mut w, "own", (homes, experts), real_tokens);
    w.line("%e = toperator.top_k_experts %own {top_k = 2}");
    w.line(format!(
        "%k = toperator.expert_draw %e {{keep = 0.5, layer = 1, seeds = [7, 0], tokens = {real_tokens}}}"
    ));
    w.exact_output("k");
    w.finish_on(&format!("ep={ranks}"))
}

#[test]
fn routers_agree_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    // The gate of DeepSeek-V3, groups of one expert, groups of uneven numbers of lanes, and many experts.
    let gates: [Gate; 6] = [
        [5, 256, 8, 4, 8],
        [3, 6, 6, 4, 3],
        [4, 165, 5, 2, 40],
        [2, 1, 1, 1, 1],
        [2, 4096, 1, 1, 64],
        [3, 2100, 300, 7, 20],
    ];
    let mut cases: Vec<Case> =
        gates.into_iter().flat_map(|gate| [true, false].map(|has_ties| gate_case(gate, has_ties))).collect();
    cases.extend([vanishing_case(), position_case(), absent_case(), absent_shard_case(3)]);
    cases.extend([[9, 7, 3, 9], [9, 40, 4, 5], [1500, 64, 8, 1400], [3, 5, 5, 2]].map(distance_case));
    cases.extend([shard_case(2, [14, 6, 3, 12]), shard_case(3, [21, 33, 4, 9])]);
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}
