//! Compares the ops of a language model on a GPU, in f32 and in bf16, with the reference evaluator and the CPU.
//! Each case runs several calls with other numbers, which must not capture another graph. Without a GPU the tests
//! print the reason and pass, unless `TESSERA_REQUIRE_GPUS` says that there must be one.

#![allow(clippy::unwrap_used, reason = "a test that cannot set itself up fails")]

#[path = "../gpu_ranks/mod.rs"]
mod gpu_ranks;
#[path = "../language_cases/mod.rs"]
mod language_cases;

mod experts;
mod routers;

use std::time::Duration;

use language_cases::{
    Attention, Case, CaseWriter, DTYPES, attention_case, find_differences, find_gpu, load, only_seat,
    open_gpu, parse_case, run_call, take_turn,
};
use tessera_cpu::{CpuBackend, Pool};
use tessera_device::{Backend, CallData, NoObserver, Scalar};

#[test]
fn attention_over_pages_agrees_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    let long = Attention {
        sequences: 1,
        rows: 1,
        heads: 8,
        kv_heads: 2,
        head: 128,
        page_rows: 16,
        pages: 48,
        fill: 700,
        value_dim: 128,
        is_latent: false,
        mask: "",
    };
    let shapes = [
        long,
        Attention { mask: ", window = 100, sink = 5", ..long },
        Attention { heads: 14, head: 64, value_dim: 64, ..long },
        Attention {
            sequences: 3,
            heads: 3,
            kv_heads: 3,
            head: 20,
            value_dim: 20,
            page_rows: 5,
            pages: 30,
            fill: 131,
            ..long
        },
        Attention {
            sequences: 2,
            rows: 37,
            heads: 6,
            head: 80,
            value_dim: 80,
            page_rows: 8,
            pages: 25,
            fill: 140,
            ..long
        },
        Attention { rows: 70, heads: 4, head: 256, value_dim: 200, mask: ", window = 9", ..long },
        Attention {
            sequences: 2,
            rows: 5,
            heads: 4,
            head: 6,
            value_dim: 6,
            page_rows: 3,
            pages: 9,
            fill: 17,
            ..long
        },
    ];
    let cases: Vec<Case> =
        DTYPES.iter().flat_map(|dtype| shapes.map(|shape| attention_case(dtype, shape))).collect();
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

fn position_case(dtype: &'static str, (heads, head, pairs): (usize, usize, usize)) -> Case {
    let mut w = CaseWriter::new(dtype, format!("rotary and head_norm of {heads} heads of {head}"), 2);
    w.operand("x", &[6, heads * head]);
    w.weight("norm", "f32", &[head]);
    w.weight("frequencies", "f32", &[pairs]);
    w.scalar("start", &[2], &[&[0.0, 4099.0], &[77.0, 3.0]]);
    w.line(format!("%n = toperator.head_norm %x, %norm {{eps = 1e-6, head_dim = {head}}}"));
    w.line(format!(
        "%r = toperator.rotary %x, %frequencies, start=%start {{head_dim = {head}, scale = 1.25}}"
    ));
    w.output("n");
    w.output("r");
    w.finish("")
}

fn small_matmul_case(dtype: &'static str, [rows, k, m]: [usize; 3]) -> Case {
    let mut w = CaseWriter::new(dtype, format!("matmul [{rows}, {k}] by [{m}, {k}]"), 1);
    w.operand("x", &[rows, k]);
    w.weight("w", dtype, &[m, k]);
    w.weight("b", dtype, &[m]);
    w.line("%y = toperator.matmul %x, %w, bias=%b");
    w.line("%z = toperator.matmul %x, %w {act = \"silu\"}");
    w.output("y");
    w.output("z");
    w.finish("")
}

#[test]
fn positions_and_matmuls_of_few_rows_agree_with_the_reference() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    let mut cases = Vec::new();
    for dtype in DTYPES {
        cases.extend([(3, 6, 3), (5, 128, 64), (2, 80, 20)].map(|shape| position_case(dtype, shape)));
        cases.extend((1..=8).map(|rows| small_matmul_case(dtype, [rows, 72 * rows, 37])));
        cases.extend([[1, 4096, 64], [3, 77, 13], [2, 1000, 9]].map(|shape| small_matmul_case(dtype, shape)));
    }
    let wrong = find_differences(&found, &cases);
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn ids_are_those_of_the_cpu() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    for (rows, vocabulary) in [(1, 1), (7, 5), (64, 3001), (6, 151_936)] {
        let mut w = CaseWriter::new("f32", format!("sample [{rows}, {vocabulary}]"), 3);
        w.input("logits", &[rows, vocabulary]);
        let numbers = |f: &dyn Fn(usize) -> f32| -> Vec<Vec<f32>> {
            (0..3).map(|call| (0..rows).map(|i| f(call * rows + i)).collect()).collect()
        };
        let chosen: [(&str, &dyn Fn(usize) -> f32); 5] = [
            ("temperature", &|i| [1.0, 0.0, 0.3, 2.5, 0.7][i % 5]),
            ("top_k", &|i| [0.0, 3.0, 50.0, 1.0][i % 4]),
            ("top_p", &|i| [1.0, 0.9, 0.1, 0.0, 0.999, 0.5, 1.0][i % 7]),
            ("seed", &|i| (i / 3) as f32),
            ("draw", &|i| (i * 1000) as f32),
        ];
        for (name, f) in chosen {
            let by_call = numbers(f);
            w.scalar(name, &[rows], &by_call.iter().map(|v| &v[..]).collect::<Vec<_>>());
        }
        // Equal logits, of which the lower id comes first.
        for (inputs, _) in &mut w.case.calls {
            let logits = &mut inputs.get_mut("logits").unwrap().1;
            logits.iter_mut().for_each(|x| *x = (*x * 16.0).round() / 4.0);
        }
        w.line(
            "%s = toperator.sample %logits, draw=%draw, seed=%seed, temperature=%temperature, top_k=%top_k, top_p=%top_p",
        );
        w.line("output \"s\", %s");
        let case = w.finish("");
        let program = parse_case(&case);
        let mut cpu = CpuBackend::new(only_seat(), Pool::new(2).unwrap(), Vec::new(), Duration::from_secs(9));
        let mut gpu = open_gpu(&found, only_seat());
        let (on_cpu, on_gpu) = (load(&mut cpu, &program, &case), load(&mut gpu, &program, &case));
        for call in &case.calls {
            let expected = run_call(&mut cpu, (on_cpu, &program), call);
            let ids = run_call(&mut gpu, (on_gpu, &program), call);
            println!("{}: {:?}", case.name, &ids["s"][..rows.min(8)]);
            assert_eq!(ids, expected, "{}", case.name);
        }
        assert_eq!(gpu.one_time_counts().graphs_captured, 1);
    }
}

#[test]
fn pages_and_counts_that_a_kernel_could_not_use_are_refused() {
    let Some(found) = find_gpu() else { return };
    let _turn = take_turn();
    let small = Attention {
        sequences: 1,
        rows: 1,
        heads: 1,
        kv_heads: 1,
        head: 8,
        page_rows: 2,
        pages: 3,
        fill: 2,
        value_dim: 8,
        is_latent: false,
        mask: "",
    };
    let case = attention_case("f32", small);
    let program = parse_case(&case);
    let mut gpu = open_gpu(&found, only_seat());
    let loaded = load(&mut gpu, &program, &case);
    for (name, values, says) in [
        ("pages", vec![0.0, 3.0, 1.0], "page 3 of a pool of 3 pages"),
        ("pages", vec![0.0, 0.5, 1.0], "0.5 is no page"),
        ("start", vec![f32::NAN], "NaN is no page"),
    ] {
        let (inputs, mut scalars) = case.calls[0].clone();
        scalars.get_mut(name).unwrap().1 = values;
        let call = CallData {
            inputs: inputs.iter().map(|(k, (_, v))| (k.as_str(), &v[..])).collect(),
            scalars: scalars.iter().map(|(k, (_, v))| (k.as_str(), Scalar::F32s(v.clone()))).collect(),
        };
        let fault = gpu.run(loaded, &call, &mut NoObserver).unwrap_err();
        assert!(format!("{fault:?}").contains(says), "{fault:?}");
    }
}
