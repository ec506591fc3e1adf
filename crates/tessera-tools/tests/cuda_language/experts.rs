//! Cases of the ops that carry tokens to experts: slots, packed rows, a matmul per expert, and the weighted sum.

use super::language_cases::{Case, CaseWriter, DTYPES, find_differences, find_gpu, take_turn};

fn expert_case(dtype: &'static str, [tokens, experts, k, d, inner, capacity]: [usize; 6]) -> Case {
    let shape = format!("{tokens} tokens, {k} of {experts} experts of {d} by {inner}, {capacity} slots");
    let mut w = CaseWriter::new(dtype, format!("experts: {shape}"), 2);
    w.operand("x", &[tokens, d]);
    w.input("logits", &[tokens, experts]);
    w.weight("up", dtype, &[experts, inner, d]);
    w.weight("down", dtype, &[experts, d, inner]);
    w.line(format!("%e = toperator.top_k_experts %logits {{top_k = {k}}}"));
    w.line("%g = toperator.expert_weights %logits, %e");
    w.line("%rg = toperator.expert_weights %logits, %e {renormalise = true}");
    w.line(format!("%s = toperator.expert_slots %e {{capacity = {capacity}}}"));
    w.line(format!("%c = toperator.expert_counts %e, %s {{groups = {experts}}}"));
    w.line(format!("%p = toperator.expert_pack %x, %e, %s {{capacity = {capacity}, groups = {experts}}}"));
    let rows = tokens * k;
    w.line(format!("%h = toperator.grouped_matmul %p, %up, %c {{act = \"silu\", rows = {rows}}}"));
    w.line(format!("%y = toperator.grouped_matmul %h, %down, %c {{rows = {rows}}}"));
    w.line("%o = toperator.expert_combine %y, %e, %s, %rg");
    ["g", "rg"].iter().for_each(|name| w.line(format!("output \"{name}\", %{name}")));
    ["e", "s", "c"].iter().for_each(|name| w.exact_output(name));
    for name in ["p", "h", "o"] {
        w.output(name);
    }
    w.finish("")
}

/// A layer of experts with copies, of which the places lie in another order than the experts. There are more places than
/// lanes of a warp.
fn places_case(dtype: &'static str) -> Case {
    let (tokens, experts, k, d) = (23, 20, 3, 33);
    let residents: Vec<usize> = (0..37).map(|p| p * 7 % experts).collect();
    let places = residents.len();
    let mut w = CaseWriter::new(dtype, format!("{places} places of {experts} experts"), 2);
    w.operand("x", &[tokens, d]);
    w.input("logits", &[tokens, experts]);
    w.weight("up", dtype, &[places, d, d]);
    w.scalar("start", &[1], &[&[0.0], &[6.0]]);
    w.line(format!("%e = toperator.top_k_experts %logits {{top_k = {k}}}"));
    w.line("%g = toperator.expert_weights %logits, %e");
    w.line(format!("%p = toperator.expert_places %e, start=%start {{residents = {residents:?}}}"));
    w.line("%s = toperator.expert_slots %p {capacity = 4}");
    w.line(format!("%c = toperator.expert_counts %p, %s {{groups = {places}}}"));
    w.line(format!("%r = toperator.expert_pack %x, %p, %s {{capacity = 4, groups = {places}}}"));
    w.line(format!("%y = toperator.grouped_matmul %r, %up, %c {{rows = {}}}", tokens * k));
    w.line("%o = toperator.expert_combine %y, %p, %s, %g, order=%e");
    ["e", "p", "s", "c"].iter().for_each(|name| w.exact_output(name));
    w.output("o");
    w.finish("")
}

/// Extents of tokens in groups with slots of their own. The last tokens are padding.
#[derive(Debug, Clone, Copy)]
struct Routing {
    tokens: usize,
    group_tokens: usize,
    real_tokens: usize,
    experts: usize,
    k: usize,
    capacity: usize,
    reroutes: usize,
    /// Channels of a token, and columns inside of an expert.
    d: usize,
    inner: usize,
}

/// Writes the ops from logits to counts for rows of `logits`, of which `first` begins the choices.
fn write_slots(w: &mut CaseWriter, logits: &str, r: Routing) {
    let Routing { group_tokens, real_tokens, experts, k, capacity, reroutes, .. } = r;
    let slots = format!("capacity = {capacity}, group_tokens = {group_tokens}");
    w.line(format!("%ranking = toperator.top_k_experts %{logits} {{top_k = {experts}}}"));
    w.line(format!("%first = toperator.top_k_experts %{logits} {{top_k = {k}}}"));
    w.line(format!(
        "%moved = toperator.expert_reroute %ranking {{{slots}, reroutes = {reroutes}, tokens = {real_tokens}, top_k = {k}}}"
    ));
    w.line(format!(
        "%e = toperator.expert_draw %moved {{keep = 0.75, layer = 5, seeds = [11, 3], tokens = {real_tokens}}}"
    ));
    w.line(format!("%s = toperator.expert_slots %e {{{slots}, tokens = {real_tokens}}}"));
    w.line(format!(
        "%c = toperator.expert_counts %e, %s {{group_tokens = {group_tokens}, groups = {experts}}}"
    ));
    w.line(format!("%g = toperator.expert_weights %{logits}, %e {{renormalise = true}}"));
    ["ranking", "moved", "e", "s", "c"].iter().for_each(|name| w.exact_output(name));
    w.line("output \"g\", %g");
}

/// A layer of experts whose tokens form groups, with choices that move and choices that a draw leaves out.
fn routing_case(dtype: &'static str, r: Routing) -> Case {
    let Routing { tokens, group_tokens, real_tokens, experts, k, capacity, d, inner, .. } = r;
    let mut w = CaseWriter::new(dtype, format!("{r:?}"), 2);
    w.operand("x", &[tokens, d]);
    w.input("logits", &[tokens, experts]);
    w.round_input("logits");
    w.weight("up", dtype, &[experts, inner, d]);
    w.weight("down", dtype, &[experts, d, inner]);
    write_slots(&mut w, "logits", r);
    let slots = format!("capacity = {capacity}, group_tokens = {group_tokens}, groups = {experts}");
    w.line(format!(
        "%q = toperator.expert_statistics %first, %e, %s {{groups = {experts}, tokens = {real_tokens}}}"
    ));
    w.line(format!("%p = toperator.expert_pack %x, %e, %s {{{slots}}}"));
    w.line(format!("%f = toperator.expert_pack_fused %x, %e {{{slots}, tokens = {real_tokens}}}"));
    let rows = (tokens * k).min(experts * capacity * (tokens / group_tokens));
    w.line(format!("%h = toperator.grouped_matmul %p, %up, %c {{act = \"silu\", rows = {rows}}}"));
    w.line(format!("%y = toperator.grouped_matmul %h, %down, %c {{rows = {rows}}}"));
    w.line(format!("%o = toperator.expert_combine %y, %e, %s, %g {{group_tokens = {group_tokens}}}"));
    w.line(format!("%t = toperator.expert_tokens %x {{rows = {}}}", tokens + 3));
    w.exact_output("q");
    ["p", "f", "h", "o", "t"].iter().for_each(|name| w.output(name));
    w.finish("")
}

/// The choices and slots of each of some ranks of ep, which routes its own tokens.
fn shard_case(ranks: usize, r: Routing) -> Case {
    let mut w = CaseWriter::new("f32", format!("{ranks} ranks of {r:?}"), 2);
    w.input("logits", &[r.tokens, r.experts]);
    w.round_input("logits");
    w.line("%own = toperator.take_shard %logits {axis = \"ep\", dim = 0}");
    write_slots(&mut w, "own", r);
    w.finish_on(&format!("ep={ranks}"))
}

const SMALL: Routing = Routing {
    tokens: 12,
    group_tokens: 4,
    real_tokens: 11,
    experts: 5,
    k: 2,
    capacity: 2,
    reroutes: 3,
    d: 6,
    inner: 5,
};

#[test]
fn experts_agree_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    let shapes =
        [[1, 8, 2, 64, 40, 1], [37, 5, 3, 72, 33, 37], [29, 7, 2, 24, 16, 4], [130, 40, 8, 32, 8, 130]];
    let routings = [
        SMALL,
        Routing { real_tokens: 3, ..SMALL },
        Routing { group_tokens: 1, capacity: 1, k: 3, ..SMALL },
        Routing { tokens: 74, group_tokens: 37, real_tokens: 70, experts: 33, k: 5, capacity: 4, ..SMALL },
        // Experts of more than one pass, and more choices than a block has threads.
        Routing {
            tokens: 600,
            group_tokens: 300,
            real_tokens: 577,
            experts: 300,
            k: 8,
            capacity: 7,
            ..SMALL
        },
        Routing {
            tokens: 66,
            group_tokens: 66,
            real_tokens: 66,
            experts: 64,
            k: 1,
            capacity: 1,
            d: 72,
            ..SMALL
        },
    ];
    let of_dtype = |dtype: &'static str| {
        let plain = shapes.map(|shape| expert_case(dtype, shape));
        plain.into_iter().chain(routings.map(|r| routing_case(dtype, r))).chain([places_case(dtype)])
    };
    let cases: Vec<Case> = DTYPES.into_iter().flat_map(of_dtype).collect();
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn each_rank_routes_its_own_tokens() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    // Padding begins on the last rank, or on one before it.
    let two = Routing { group_tokens: 3, real_tokens: 8, experts: 6, ..SMALL };
    let three = Routing { tokens: 18, group_tokens: 3, real_tokens: 10, experts: 9, k: 3, ..SMALL };
    let cases = [shard_case(2, two), shard_case(3, three)];
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}
