//! Experts that do not fit device memory: how many of the unpopular experts a batch selects, which
//! determines the bytes to fetch.

use super::Routing;
use super::popularity::{ExpertClass, spread_experts};

/// Cold experts of one layer, on the rank that fetches the most.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ColdExperts {
    /// Cold experts that the fullest rank keeps in host memory.
    pub on_host: f64,
    /// Number of different cold experts that a batch selects.
    pub selected: f64,
    /// Share of all assignments that select a cold expert.
    pub assignment_share: f64,
}

/// Returns the cold experts that a batch of `tokens` tokens of all ranks of the group selects, when
/// each rank pins the most popular `pinned` share of its experts (0 to 1) in device memory. See
/// [`super::expert_load`] for the other arguments.
#[must_use]
pub fn count_cold_experts(
    experts: u64,
    top_k: u64,
    ep: u32,
    tokens: f64,
    routing: Routing,
    pinned: f64,
) -> ColdExperts {
    let top_k = top_k.min(experts);
    let mut worst = ColdExperts { on_host: 0.0, selected: 0.0, assignment_share: 0.0 };
    if top_k == 0 || ep == 0 || tokens.is_nan() || tokens <= 0.0 {
        return worst;
    }
    let pinned = if pinned.is_nan() { 1.0 } else { pinned.clamp(0.0, 1.0) };
    let mut asked_cold = 0.0;
    for kind in spread_experts(experts, top_k, ep, tokens, routing).kinds {
        let all: f64 = kind.classes.iter().map(|c| c.count).sum();
        if all <= 0.0 {
            continue;
        }
        let mut classes: Vec<ExpertClass> = kind.classes;
        classes.sort_by(|a, b| b.token_share.total_cmp(&a.token_share));
        let part = kind.experts / all;
        // A rank pins whole experts.
        let mut hot = (kind.experts * pinned + 1e-9).floor() / part;
        let (mut touched, mut asked) = (0.0, 0.0);
        for c in classes {
            let left = (c.count - hot).max(0.0);
            hot = (hot - c.count).max(0.0);
            let rows = tokens * c.token_share;
            let found = if routing.is_random() {
                1.0 - (tokens * (-c.token_share.min(1.0 - 1e-9)).ln_1p()).exp()
            } else {
                rows.min(1.0)
            };
            touched += left * found * part;
            asked += left * c.token_share * part;
        }
        asked_cold += kind.ranks * asked;
        worst.selected = worst.selected.max(touched);
        worst.on_host = worst.on_host.max(kind.experts - (kind.experts * pinned + 1e-9).floor());
    }
    worst.assignment_share = (asked_cold / top_k as f64).min(1.0);
    worst
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::moe::expert_popularity;
    use crate::tiers::select_hot_experts;

    #[test]
    fn more_pinned_experts_need_fewer_fetches() {
        let at = |pinned, tokens| count_cold_experts(256, 8, 8, tokens, Routing::PowerLaw(1.2), pinned);
        let touched: Vec<f64> = [0.0, 0.25, 0.5, 0.75, 1.0].map(|p| at(p, 256.0).selected).to_vec();
        assert!(touched.windows(2).all(|w| w[1] < w[0]) && touched[4] == 0.0, "{touched:?}");
        // A large batch selects nearly all cold experts, one token few.
        assert!(at(0.5, 1e6).selected > 15.0);
        assert!(at(0.0, 1.0).selected < 1.1);
        assert_eq!(at(0.5, 1.0).on_host, 16.0);
        // The share equals the one computed from the list of experts.
        let asked = expert_popularity(256, 8, 1, 256.0, Routing::PowerLaw(1.2), 0);
        let listed = select_hot_experts(&asked, 1.0, 128.0).cold_share;
        assert!(
            (at(0.5, 256.0).assignment_share / listed - 1.0).abs() < 0.02,
            "{} {listed}",
            at(0.5, 256.0).assignment_share
        );
    }

    #[test]
    fn even_routers_select_all_experts_equally() {
        let c = count_cold_experts(4096, 2, 9, 73728.0, Routing::Random, 0.5);
        assert_eq!(c.on_host, 228.0);
        assert!((c.assignment_share - 0.5).abs() < 2e-3 && (c.selected - 228.0).abs() < 0.1, "{c:?}");
    }
}
