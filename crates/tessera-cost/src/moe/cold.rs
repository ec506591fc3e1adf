//! Experts that do not fit: how many of the unpopular ones a batch asks for, which is what has to be fetched.

use super::Routing;
use super::popularity::{Class, spread};

/// Cold experts of one layer, on the rank that fetches most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Cold {
    /// Cold experts that the fullest rank holds on its host.
    pub held: f64,
    /// Different ones among them that a batch asks for.
    pub touched: f64,
    /// Share of all assignments that ask for a cold one.
    pub share: f64,
}

/// What a batch of `tokens` tokens of all ranks of the group asks of cold experts, when each rank keeps its most popular
/// `pinned` share of experts in device memory (0 to 1). See [`super::experts`] for the other arguments.
#[must_use]
pub fn cold(experts: u64, top_k: u64, ep: u32, tokens: f64, routing: Routing, pinned: f64) -> Cold {
    let top_k = top_k.min(experts);
    let mut worst = Cold { held: 0.0, touched: 0.0, share: 0.0 };
    if top_k == 0 || ep == 0 || tokens.is_nan() || tokens <= 0.0 {
        return worst;
    }
    let pinned = if pinned.is_nan() { 1.0 } else { pinned.clamp(0.0, 1.0) };
    let mut asked_cold = 0.0;
    for kind in spread(experts, top_k, ep, tokens, routing).kinds {
        let all: f64 = kind.classes.iter().map(|c| c.count).sum();
        if all <= 0.0 {
            continue;
        }
        let mut classes: Vec<Class> = kind.classes;
        classes.sort_by(|a, b| b.asked.total_cmp(&a.asked));
        let part = kind.experts / all;
        // A rank pins whole experts.
        let mut hot = (kind.experts * pinned + 1e-9).floor() / part;
        let (mut touched, mut asked) = (0.0, 0.0);
        for c in classes {
            let left = (c.count - hot).max(0.0);
            hot = (hot - c.count).max(0.0);
            let rows = tokens * c.asked;
            let found = if routing.varies() {
                1.0 - (tokens * (-c.asked.min(1.0 - 1e-9)).ln_1p()).exp()
            } else {
                rows.min(1.0)
            };
            touched += left * found * part;
            asked += left * c.asked * part;
        }
        asked_cold += kind.ranks * asked;
        worst.touched = worst.touched.max(touched);
        worst.held = worst.held.max(kind.experts - (kind.experts * pinned + 1e-9).floor());
    }
    worst.share = (asked_cold / top_k as f64).min(1.0);
    worst
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::popularity;
    use crate::tiers::hot_experts;

    #[test]
    fn what_is_fetched_shrinks_with_what_is_pinned() {
        let at = |pinned, tokens| cold(256, 8, 8, tokens, Routing::PowerLaw(1.2), pinned);
        let touched: Vec<f64> = [0.0, 0.25, 0.5, 0.75, 1.0].map(|p| at(p, 256.0).touched).to_vec();
        assert!(touched.windows(2).all(|w| w[1] < w[0]) && touched[4] == 0.0, "{touched:?}");
        // Nearly all are asked for by a large batch, few by one token.
        assert!(at(0.5, 1e6).touched > 15.0);
        assert!(at(0.0, 1.0).touched < 1.1);
        assert_eq!(at(0.5, 1.0).held, 16.0);
        // The same share as by the list of experts.
        let asked = popularity(256, 8, 1, 256.0, Routing::PowerLaw(1.2), 0);
        let listed = hot_experts(&asked, 1.0, 128.0).cold_share;
        assert!((at(0.5, 256.0).share / listed - 1.0).abs() < 0.02, "{} {listed}", at(0.5, 256.0).share);
    }

    #[test]
    fn even_routers_ask_for_all_alike() {
        let c = cold(4096, 2, 9, 73728.0, Routing::Random, 0.5);
        assert_eq!(c.held, 228.0);
        assert!((c.share - 0.5).abs() < 2e-3 && (c.touched - 228.0).abs() < 0.1, "{c:?}");
    }
}
