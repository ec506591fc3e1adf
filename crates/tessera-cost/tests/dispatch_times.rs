//! Dispatch and combine against published times: bytes by distinct ranks, time by the model's
//! all-to-all.

use tessera_cost::moe::{Routing, buffer_bytes, dispatch_bytes, expert_load};
use tessera_cost::{CollectiveOp, GroupSpan, MachineModel, Profile};
use tessera_mesh::{Precision, catalog};

fn machine(cluster: &str) -> MachineModel {
    let cluster = catalog::get(cluster).expect("a cluster of the catalog");
    MachineModel::new(cluster, Profile::builtin("torch-2.11").expect("a profile"))
}

/// Returns the microseconds of one exchange of 7168 values, top 8 of 256 experts, with `tokens`
/// tokens on each rank.
fn exchange_us(m: &MachineModel, ep: u32, tokens: f64, wire: Precision) -> f64 {
    let load = expert_load(256, 8, ep, tokens * f64::from(ep), Routing::Random, 0);
    let bytes = dispatch_bytes(tokens, 7168, load.remote_copies, wire) * load.busiest_over_mean;
    m.collective_cost(CollectiveOp::AllToAll, buffer_bytes(bytes, ep), GroupSpan { ranks: ep, domains: 1 }).ns
        / 1e3
}

/// Returns model time over published time, less one, and prints each.
fn relative_errors(m: &MachineModel, what: &str, rows: &[(u32, f64, Precision, f64)]) -> Vec<f64> {
    let one = |(ep, tokens, wire, published): &(u32, f64, Precision, f64)| {
        let model = exchange_us(m, *ep, *tokens, *wire);
        let off = model / published - 1.0;
        println!(
            "{what} ep {ep} {tokens} tokens {}: {model:.0} µs, published {published} ({:+.0} %)",
            wire.name(),
            off * 100.0
        );
        off
    };
    rows.iter().map(one).collect()
}

fn max_error(errors: &[f64]) -> f64 {
    errors.iter().fold(0.0, |m, e| m.max(e.abs()))
}

fn mean_error(errors: &[f64]) -> f64 {
    errors.iter().map(|e| e.abs()).sum::<f64>() / errors.len() as f64
}

const FP4: Precision = Precision::Fp4;
const FP8: Precision = Precision::Fp8;
const BF16: Precision = Precision::Bf16;

#[test]
fn large_exchanges_on_a_host_of_h200s() {
    // DeepEP, first version, 24 blocks; as collected by NVIDIA's AIConfigurator.
    let rows = [
        (8, 4096.0, FP8, 494.0),
        (8, 4096.0, BF16, 979.0),
        (8, 16384.0, FP8, 1926.0),
        (8, 16384.0, BF16, 3568.0),
    ];
    assert!(max_error(&relative_errors(&machine("hgx-h200"), "DeepEP", &rows)) < 0.15);
}

#[test]
fn large_exchanges_on_a_rack() {
    let m = machine("gb200-nvl72");
    // HybridEP in the Megatron-Core report on mixtures of experts, 4096 tokens in bf16. The
    // profile's all-to-all is NCCL's, which also copies a rank's own shard: at few ranks a kernel
    // written for experts is up to a third faster.
    let hybrid: Vec<_> = [(8, 391.0, 353.0), (16, 578.0, 527.0), (32, 612.0, 646.0), (64, 675.0, 744.0)]
        .into_iter()
        .flat_map(|(ep, out, back)| [(ep, 4096.0, BF16, out), (ep, 4096.0, BF16, back)])
        .collect();
    let off = relative_errors(&m, "HybridEP", &hybrid);
    assert!(off.iter().all(|e| (-0.1..0.55).contains(e)) && mean_error(&off) < 0.25, "{off:?}");

    // TensorRT-LLM's one-sided exchange, 8192 tokens: nvfp4 dispatch, bf16 combine. Fewer ranks
    // hardly speed it up, since it packs and reduces every copy, including the rank's own.
    let one_sided: Vec<_> = [(8, 367.0, 1267.0), (16, 399.0, 1362.0), (32, 424.0, 1418.0)]
        .into_iter()
        .flat_map(|(ep, out, back)| [(ep, 8192.0, FP4, out), (ep, 8192.0, BF16, back)])
        .collect();
    let off = relative_errors(&m, "one-sided", &one_sided);
    assert!(max_error(&off) < 0.35 && mean_error(&off) < 0.25, "{off:?}");
}

#[test]
fn small_exchanges_are_within_a_factor_of_two() {
    // 128 tokens on each rank: kernel latency dominates, and it differs more between libraries than
    // a model of links can express.
    let host = [(8, 128.0, FP8, 35.1), (8, 128.0, BF16, 67.7)];
    let rack =
        [(8, 128.0, FP4, 22.0), (8, 128.0, BF16, 37.4), (32, 128.0, FP4, 25.6), (32, 128.0, BF16, 47.8)];
    let all = [
        relative_errors(&machine("hgx-h200"), "DeepEP low latency", &host),
        relative_errors(&machine("gb200-nvl72"), "one-sided", &rack),
    ];
    assert!(all.iter().flatten().all(|e| (-0.5..1.0).contains(e)), "{all:?}");
}
