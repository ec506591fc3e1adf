//! What the ranks would compute if the shard rules let the wrong cuts of attention through: numbers off by O(1), and
//! no error.

#![allow(clippy::unwrap_used)]

use tessera_base::random::{DrawKey, normals};
use tessera_ir::parse;
use tessera_reference::{Call, Feed, Machine, Tensor};

const RANKS: usize = 4;
const HEADS: usize = 4;
const ROWS: usize = 8;
const KEYS: usize = 8;
const WIDTH: usize = 4;

fn normal(shape: [usize; 3], seed: u64) -> Tensor {
    let mut x = vec![0.0f32; shape.iter().product()];
    normals(DrawKey { seed, chunk: 0, draw: 0 }, 0, &mut x);
    Tensor::new(&shape, x.into_iter().map(f64::from).collect())
}

/// softmax(scores) · v of each rank's own pieces, whatever they are pieces of.
fn each(scores: &[Tensor], v: &[Tensor]) -> Vec<Tensor> {
    let ty = |t: &Tensor| format!("f32{:?}", t.shape());
    let text = format!(
        "program @p role(r) mesh(tp={RANKS}) {{
           %s = input : {} %v = input : {} %p = ttile.softmax %s %o = ttile.dot %p, %v output \"o\", %o
         }}",
        ty(&scores[0]),
        ty(&v[0])
    );
    let p = parse(&text, "t").unwrap();
    let mut call = Call::default();
    call.inputs.insert("s".to_string(), Feed::PerRank(scores.to_vec()));
    call.inputs.insert("v".to_string(), Feed::PerRank(v.to_vec()));
    let out = Machine::new(p.mesh).run(&[&p; RANKS], &call).unwrap();
    out.into_iter().map(|mut o| o.remove("o").unwrap()).collect()
}

fn pieces(t: &Tensor, dim: usize) -> Vec<Tensor> {
    let len = t.shape()[dim] / RANKS;
    (0..RANKS).map(|r| t.slice(dim, r * len, len).unwrap()).collect()
}

/// Largest error of the ranks' outputs joined along `dim`.
fn error(scores: &[Tensor], v: &[Tensor], dim: usize, whole: &Tensor) -> f64 {
    Tensor::concat(dim, &each(scores, v)).unwrap().distance(whole)
}

#[test]
fn only_some_cuts_of_the_scores_are_right() {
    let (q, k) = (normal([HEADS, ROWS, WIDTH], 1), normal([HEADS, KEYS, WIDTH], 2));
    let v = normal([HEADS, KEYS, WIDTH], 3);
    let text = "program @whole {
      %q = input : f32[4, 8, 4] %k = input : f32[4, 8, 4] %v = input : f32[4, 8, 4]
      %s = toperator.dot %q, %k {transposed = true} %p = toperator.softmax %s %o = toperator.dot %p, %v
      output \"s\", %s output \"o\", %o
    }";
    let p = parse(text, "whole").unwrap();
    let call = Call::default().input("q", q).input("k", k).input("v", v.clone());
    let out = Machine::new(p.mesh).run(&[&p], &call).unwrap().remove(0);
    let (s, whole) = (&out["s"], &out["o"]);
    let everywhere = vec![v.clone(); RANKS];

    assert!(error(&pieces(s, 0), &pieces(&v, 0), 0, whole) < 1e-12, "heads, and V by heads");
    assert!(error(&pieces(s, 1), &everywhere, 1, whole) < 1e-12, "query rows, and all of V");

    // Key positions: every rank normalises its own keys, and even the sum over ranks is wrong.
    let by_keys = each(&pieces(s, 2), &pieces(&v, 1));
    let sum = Tensor::from_fn(whole.shape(), |i| by_keys.iter().map(|t| t.data()[i]).sum());
    assert!(sum.distance(whole) > 1.0, "key positions: {}", sum.distance(whole));

    // Query rows by columns of V: rank r has rows r of columns r, and nobody has the blocks beside the diagonal.
    let blocks = each(&pieces(s, 1), &pieces(&v, 2));
    let held: usize = blocks.iter().map(|b| b.data().len()).sum();
    assert_eq!(held * RANKS, whole.data().len());
    for (r, block) in blocks.iter().enumerate() {
        let own = whole.slice(1, r * ROWS / RANKS, ROWS / RANKS).unwrap();
        let own = own.slice(2, r * WIDTH / RANKS, WIDTH / RANKS).unwrap();
        assert!(block.distance(&own) < 1e-12);
    }
}
