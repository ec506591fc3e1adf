//! Layers whose tokens choose experts by given shares.

use tessera_base::random::Rng;

use super::layer::Layer;

/// Returns a layer whose tokens choose each expert with its share of popularity: systematic sampling along an order of
/// experts that changes every few tokens.
#[must_use]
pub fn draw_layer(popularity: &[f64], (top_k, tokens): (usize, usize), seed: u32) -> Layer {
    let experts = popularity.len();
    let mut d = Rng::new(11, [seed, 0]);
    let mut order: Vec<usize> = (0..experts).collect();
    let logits = (0..tokens).map(|token| {
        if token % 4 == 0 {
            for i in (1..experts).rev() {
                order.swap(i, d.next_below(i + 1));
            }
        }
        let (mut next, mut passed) = (d.next_below(1 << 20) as f64 / f64::from(1 << 20), 0.0);
        let mut logits = vec![0.0_f32; experts];
        for expert in &order {
            passed += popularity[*expert];
            if passed > next {
                next += 1.0;
                logits[*expert] = 20.0;
            }
        }
        logits
    });
    Layer::new(experts, top_k, logits.collect())
}
