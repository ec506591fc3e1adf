//! `moe_route` as the planner spells it out, against its own meaning.

use std::collections::BTreeMap;

use tessera_filetests::experts::{INNER, logical_layer, normals, plan_layer};
use tessera_ir::{Opcode, Program, parse_all};
use tessera_plan::{Mapping, Strategy, lower};
use tessera_reference::Tensor;

use crate::run::{bits, evaluate_programs, relative_difference, run};

const TOKENS: usize = 11;
const EXPERTS: usize = 5;

/// Returns a program with one `moe_route` and further attributes of it.
fn route(attrs: &str) -> Program {
    let text = format!(
        "program @route {{ buffer @Experts : f32[{EXPERTS}, 4, 3] %x = input : f32[{TOKENS}, 3] \
         %g = input : f32[{TOKENS}, {EXPERTS}] %w = input : f32[{EXPERTS}, 4, 3] cache.write @Experts, %w \
         %y = toperator.moe_route %x, %g, @Experts {{{attrs}}} output \"y\", %y }}"
    );
    parse_all(&text, "route").unwrap_or_else(|ds| panic!("{ds:#?}")).remove(0)
}

fn inputs() -> BTreeMap<String, Tensor> {
    let tensor = |seed, shape: &[usize]| {
        let numbers = normals(seed, shape.iter().product());
        Tensor::new(shape, numbers.into_iter().map(f64::from).collect())
    };
    BTreeMap::from([
        ("x".to_string(), tensor(1, &[TOKENS, 3])),
        ("g".to_string(), tensor(2, &[TOKENS, EXPERTS])),
        ("w".to_string(), tensor(3, &[EXPERTS, 4, 3])),
    ])
}

#[test]
fn a_route_gives_on_every_mesh_what_the_op_means_with_and_without_fused_packing() {
    for attrs in [
        "capacity_factor = 4.0",
        "capacity_factor = 0.7, token_groups = 6",
        "capacity_factor = 1.0, top_k = 1",
    ] {
        let op = |fused: bool| {
            route(&format!("a2a_axis = \"ep\", {attrs}{}", if fused { ", pack_fused = true" } else { "" }))
        };
        let logical = op(false);
        let meaning =
            evaluate_programs(&[&logical], &BTreeMap::new(), &inputs()).remove(0).remove("y").unwrap();
        for (mesh, tokens) in [
            ("ep = 1", "replicated"),
            ("ep = 2", "replicated"),
            ("ep = 3", "replicated"),
            ("ep = 3", "sharded"),
        ] {
            if tokens == "sharded" && !attrs.contains("token_groups") {
                continue;
            }
            let mapping = format!("[mesh]\n{mesh}\n[experts]\ntokens = \"{tokens}\"\n");
            let result = |fused| {
                let bundle = plan_layer(op(fused), [EXPERTS, TOKENS, INNER], &mapping);
                let opcodes: Vec<Opcode> =
                    bundle.phases[0].programs[0].ops.iter().map(|o| o.opcode).collect();
                assert_eq!(opcodes.contains(&Opcode::ExpertPackFused), fused);
                assert_eq!(opcodes.contains(&Opcode::AllToAll), tokens == "sharded");
                run(&bundle, &BTreeMap::new(), &inputs()).remove(0).remove("y").unwrap()
            };
            let (plain, fused) = (result(false), result(true));
            let far = relative_difference(&plain, meaning.data());
            assert!(far < 1e-6, "{attrs}, {mesh}, {tokens}: {far:e}");
            assert!(bits(&fused) == bits(&plain), "{attrs}, {mesh}, {tokens}");
        }
    }
}

#[test]
fn a_route_that_the_mapping_does_not_allow_is_refused() {
    let refuse = |attrs: &str, mapping: &str| {
        let mut mapping = Mapping::parse("m", mapping).unwrap();
        mapping.strategy = Strategy::Megatron;
        let ds = lower(&logical_layer(route(attrs), [EXPERTS, TOKENS, INNER]), &mut mapping).unwrap_err();
        ds.iter().map(|d| d.code.id).collect::<Vec<_>>()
    };
    let quantized = "a2a_axis = \"ep\", capacity_factor = 1.0, policy = \"fp8_e4m3\", quantize_fp8 = true";
    assert_eq!(refuse("a2a_axis = \"tp\", capacity_factor = 1.0", ""), ["T0606"]);
    assert_eq!(refuse(quantized, ""), ["T0611"]);
    let groups = "a2a_axis = \"ep\", capacity_factor = 1.0, token_groups = 4";
    assert_eq!(refuse(groups, "[mesh]\nep = 3\n[experts]\ntokens = \"sharded\"\n"), ["T0611"]);
}
