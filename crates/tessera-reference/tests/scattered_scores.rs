//! Shows what ranks would compute if the shard rules permitted invalid sharding of attention:
//! results off by O(1), without any error.

#![allow(clippy::unwrap_used)]

use tessera_base::random::{DrawKey, fill_normals};
use tessera_ir::parse;
use tessera_reference::{CallInputs, Evaluator, InputTensor, Tensor};

const RANKS: usize = 4;
const HEADS: usize = 4;
const ROWS: usize = 8;
const KEYS: usize = 8;
const WIDTH: usize = 4;

fn normal(shape: [usize; 3], seed: u64) -> Tensor {
    let mut x = vec![0.0f32; shape.iter().product()];
    fill_normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    Tensor::new(&shape, x.into_iter().map(f64::from).collect())
}

/// Computes softmax(scores) · v on each rank's shards, whichever dim they shard.
fn run_ranks(scores: &[Tensor], v: &[Tensor]) -> Vec<Tensor> {
    let ty = |t: &Tensor| format!("f32{:?}", t.shape());
    let text = format!(
        "program @p role(r) mesh(tp={RANKS}) {{
           %s = input : {} %v = input : {} %p = ttile.softmax %s %o = ttile.bmm %p, %v output \"o\", %o
         }}",
        ty(&scores[0]),
        ty(&v[0])
    );
    let p = parse(&text, "t").unwrap();
    let mut call = CallInputs::default();
    call.inputs.insert("s".to_string(), InputTensor::PerRank(scores.to_vec()));
    call.inputs.insert("v".to_string(), InputTensor::PerRank(v.to_vec()));
    let out = Evaluator::new(p.mesh).run(&[&p; RANKS], &call).unwrap();
    out.into_iter().map(|mut o| o.remove("o").unwrap()).collect()
}

fn shard_tensor(t: &Tensor, dim: usize) -> Vec<Tensor> {
    let len = t.shape()[dim] / RANKS;
    (0..RANKS).map(|r| t.slice(dim, r * len, len).unwrap()).collect()
}

/// Returns the largest error of the ranks' outputs, concatenated along `dim`.
fn max_error(scores: &[Tensor], v: &[Tensor], dim: usize, whole: &Tensor) -> f64 {
    Tensor::concat(dim, &run_ranks(scores, v)).unwrap().distance(whole)
}

#[test]
fn only_some_shardings_of_the_scores_are_correct() {
    let (q, k) = (normal([HEADS, ROWS, WIDTH], 1), normal([HEADS, KEYS, WIDTH], 2));
    let v = normal([HEADS, KEYS, WIDTH], 3);
    let text = "program @whole {
      %q = input : f32[4, 8, 4] %k = input : f32[4, 8, 4] %v = input : f32[4, 8, 4]
      %s = toperator.bmm %q, %k {transposed = true} %p = toperator.softmax %s %o = toperator.bmm %p, %v
      output \"s\", %s output \"o\", %o
    }";
    let p = parse(text, "whole").unwrap();
    let call = CallInputs::default().with_input("q", q).with_input("k", k).with_input("v", v.clone());
    let out = Evaluator::new(p.mesh).run(&[&p], &call).unwrap().remove(0);
    let (s, whole) = (&out["s"], &out["o"]);
    let everywhere = vec![v.clone(); RANKS];

    assert!(
        max_error(&shard_tensor(s, 0), &shard_tensor(&v, 0), 0, whole) < 1e-12,
        "heads, with V sharded by heads"
    );
    assert!(max_error(&shard_tensor(s, 1), &everywhere, 1, whole) < 1e-12, "query rows, with V replicated");

    // Key positions: every rank normalises its own keys, so even the sum over ranks is wrong.
    let by_keys = run_ranks(&shard_tensor(s, 2), &shard_tensor(&v, 1));
    let sum = Tensor::from_fn(whole.shape(), |i| by_keys.iter().map(|t| t.data()[i]).sum());
    assert!(sum.distance(whole) > 1.0, "key positions: {}", sum.distance(whole));

    // Query rows by columns of V: rank r computes rows r of columns r, so blocks off the diagonal
    // are missing.
    let blocks = run_ranks(&shard_tensor(s, 1), &shard_tensor(&v, 2));
    let held: usize = blocks.iter().map(|b| b.data().len()).sum();
    assert_eq!(held * RANKS, whole.data().len());
    for (r, block) in blocks.iter().enumerate() {
        let own = whole.slice(1, r * ROWS / RANKS, ROWS / RANKS).unwrap();
        let own = own.slice(2, r * WIDTH / RANKS, WIDTH / RANKS).unwrap();
        assert!(block.distance(&own) < 1e-12);
    }
}
