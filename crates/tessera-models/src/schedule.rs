//! The flow-matching schedule: timesteps and sigmas of the denoising steps.

/// Timestep and noise level of one denoising step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SigmaStep {
    /// Timestep on which the model is conditioned, above 0 and at most 1000.
    pub timestep: f32,
    /// Noise share of the input: x = (1 − σ) · x0 + σ · noise.
    pub sigma: f32,
}

/// Computes the denoising steps of a stream from the `steps`, `shift` and `warp` of its settings.
///
/// The table is σ = s·u / (1 + (s − 1)·u) over u = 1, 0.999 … 0.001, with timestep 1000·σ. A warped
/// step t takes row 1000 − t of the table; an unwarped step keeps its timestep and takes the σ of
/// the nearest row. Source: the model family's own scheduler.
#[must_use]
pub(crate) fn compute_sigma_steps(steps: &[f64], shift: f64, warp: bool) -> Vec<SigmaStep> {
    let table: Vec<f64> = (0..1000)
        .map(|i| {
            let u = 1.0 - f64::from(i) / 1000.0;
            shift * u / (1.0 + (shift - 1.0) * u)
        })
        .collect();
    let nearest = |t: f64| {
        table
            .iter()
            .copied()
            .min_by(|a, b| (1000.0 * a - t).abs().total_cmp(&(1000.0 * b - t).abs()))
            .unwrap_or(1.0)
    };
    steps
        .iter()
        .map(|t| {
            let row = (1000.0 - t).round() as usize;
            let (timestep, sigma) = if warp {
                let sigma = table[row.min(999)];
                (1000.0 * sigma, sigma)
            } else {
                (*t, nearest(*t))
            };
            SigmaStep { timestep: timestep as f32, sigma: sigma as f32 }
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{StreamConfig, WanConfig};

    fn parse_steps(text: &str) -> Vec<SigmaStep> {
        let wan = WanConfig::parse("c", r#"{"dim":12,"ffn_dim":8,"num_heads":1,"num_layers":1}"#).unwrap();
        let stream = format!("[video]\nwidth = 16\nheight = 16\n[schedule]\n{text}\n");
        let s = StreamConfig::parse("s", &stream, &wan).unwrap();
        compute_sigma_steps(&s.steps, s.shift, s.warp)
    }

    #[test]
    fn the_default_is_warped_by_shift_five() {
        let t: Vec<f32> = parse_steps("").iter().map(|s| s.timestep).collect();
        assert_eq!(t[0], 1000.0);
        for (a, b) in t[1..].iter().zip([937.5, 833.3333, 625.0]) {
            assert!((a - b).abs() < 1e-3, "{t:?}");
        }
    }

    #[test]
    fn unwarped_steps_keep_their_timestep() {
        let s = parse_steps("warp = false");
        assert_eq!(s[1].timestep, 750.0);
        assert!((s[1].sigma - 0.75).abs() < 1e-3);
    }
}
