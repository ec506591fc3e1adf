//! The mapping guide's memory arithmetic as a table: parameters per layer, activations and KV cache
//! per token, experts, and the memory of one device, each term with its unit.

use tessera_base::Bytes;

/// The inputs of a memory plan. A and K are bytes per token, so the table needs token counts.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MemoryPlanInputs {
    /// P: number of parameters of a layer, without routed experts.
    pub parameters: f64,
    /// Bytes per parameter, including gradients and optimizer state in training.
    pub bytes_per_parameter: f64,
    /// Layers on the rank's stage.
    pub layers: u64,
    /// A: bytes of activations that a token saves in one layer.
    pub activation_bytes: f64,
    /// K: bytes of a token's keys and values in one layer.
    pub cache_bytes: f64,
    /// E: routed experts per layer.
    pub experts: u64,
    /// Number of parameters of one expert in one layer; with expert tp, of its shard on one rank.
    pub expert_parameters: f64,
    /// H: device memory in bytes.
    pub device_bytes: f64,
    /// Tokens whose activations are live at once.
    pub tokens: f64,
    /// Tokens whose keys and values one rank caches, over all of its sequences; 0 in training.
    pub cached_tokens: f64,
    /// Ranks that shard attention and dense matmuls.
    pub tp: u32,
    /// Ranks that shard the experts.
    pub ep: u32,
}

/// One term of the memory arithmetic, such as the KV cache, as a row of the table.
#[derive(Debug, Clone, PartialEq)]
pub struct MemoryTableRow {
    /// Name of the term with its symbol, such as `cache (K)`. The last two rows are `total` and
    /// `left of H`.
    pub term: &'static str,
    /// The factors that multiply to `bytes`, with units; a few words in the last two rows.
    pub formula: String,
    /// Bytes of the term on one rank; 0 in the row `left of H` if the total exceeds the device
    /// memory.
    pub bytes: Bytes,
    /// Bytes as a share of device memory; negative in the row `left of H` if the total exceeds it.
    pub share: f64,
}

/// Returns the memory budget of one rank: the terms, their total and the remainder. Dense terms are
/// divided by tp, experts by ep, rounded up to the rank with the most experts.
#[must_use]
pub fn plan_memory(inputs: &MemoryPlanInputs) -> Vec<MemoryTableRow> {
    let i = inputs;
    let (tp, layers) = (f64::from(i.tp.max(1)), i.layers as f64);
    let held = i.experts.div_ceil(u64::from(i.ep.max(1))) as f64;
    let dense = i.parameters * i.bytes_per_parameter * layers / tp;
    let experts = i.expert_parameters * held * i.bytes_per_parameter * layers;
    let activations = i.activation_bytes * i.tokens * layers / tp;
    let cache = i.cache_bytes * i.cached_tokens * layers / tp;
    let total = dense + experts + activations + cache;
    let line = |term, sum, bytes: f64| MemoryTableRow {
        term,
        formula: sum,
        bytes: Bytes(bytes.max(0.0).round() as u64),
        share: bytes / i.device_bytes.max(1.0),
    };
    let per = |what: f64| format!("{what:.0} B/token/layer");
    vec![
        line(
            "parameters (P)",
            format!(
                "{:.0} numbers/layer × {} B × {} layers / tp {}",
                i.parameters, i.bytes_per_parameter, i.layers, i.tp
            ),
            dense,
        ),
        line(
            "experts (E)",
            format!(
                "{held:.0} of {} experts/rank × {:.0} numbers × {} B × {} layers",
                i.experts, i.expert_parameters, i.bytes_per_parameter, i.layers
            ),
            experts,
        ),
        line(
            "activations (A)",
            format!(
                "{} × {:.0} tokens × {} layers / tp {}",
                per(i.activation_bytes),
                i.tokens,
                i.layers,
                i.tp
            ),
            activations,
        ),
        line(
            "cache (K)",
            format!(
                "{} × {:.0} tokens × {} layers / tp {}",
                per(i.cache_bytes),
                i.cached_tokens,
                i.layers,
                i.tp
            ),
            cache,
        ),
        line("total", "bytes on one rank".to_string(), total),
        line("left of H", format!("of {}", Bytes(i.device_bytes.max(0.0) as u64)), i.device_bytes - total),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn terms_are_per_token_and_say_so() {
        // 10 layers shaped like those of a large mixture-of-experts model, on one of 8 ranks;
        // expected values computed on paper.
        let inputs = MemoryPlanInputs {
            parameters: 200e6,
            bytes_per_parameter: 1.0,
            layers: 10,
            activation_bytes: 100_000.0,
            cache_bytes: 1_152.0,
            experts: 256,
            expert_parameters: 44e6,
            device_bytes: 186e9,
            tokens: 4096.0,
            cached_tokens: 1e6,
            tp: 8,
            ep: 9,
        };
        let table = plan_memory(&inputs);
        let bytes: Vec<u64> = table.iter().map(|l| l.bytes.0).collect();
        // 256 experts over 9 ranks: 29 on the fullest.
        let want = [250e6, 44e6 * 29.0 * 10.0, 512e6, 1_440e6];
        assert_eq!(bytes[..4], want.map(|b| b as u64));
        assert_eq!(bytes[4], want.iter().sum::<f64>() as u64);
        assert_eq!(bytes[5], 186_000_000_000 - bytes[4]);
        let sums: Vec<&str> = table.iter().map(|l| l.formula.as_str()).collect();
        for part in ["100000 B/token/layer × 4096 tokens", "1152 B/token/layer × 1000000 tokens", "29 of 256"]
        {
            assert!(sums.iter().any(|s| s.contains(part)), "{sums:?}");
        }
    }
}
