//! Traits of an executor: the precision it is planned for, the ops it fuses into one kernel, the
//! packing around its all-to-alls, and its throttling under a power limit.

use tessera_base::config::ConfigReader;
use tessera_mesh::Precision;

/// Traits of an executor. The default is an executor that launches one kernel per op, as the
/// program is written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ExecutorTraits {
    /// Precision in which programs for this executor are planned where nobody asks for another.
    pub precision: Precision,
    /// Whether neighbouring elementwise and norm kernels over the same rows are fused, so that
    /// values passed only between them never reach memory.
    pub fuses_elementwise: bool,
    /// Whether neighbouring matmuls with the same left operand run as one GEMM with concatenated
    /// weights.
    pub merges_gemms: bool,
    /// Whether the bias is applied in the GEMM epilogue.
    pub fuses_bias: bool,
    /// Whether the activation is applied in the GEMM epilogue.
    pub fuses_activation: bool,
    /// Whether a separate kernel packs, or unpacks, an all-to-all over columns.
    pub packs_all_to_all: bool,
    /// Bandwidth of kernels that compute while they move data (norms, rotations, activations), as a
    /// share of a copy's bandwidth.
    pub elementwise_share: f64,
    /// Speed of GEMMs and attention in a call that consists of nothing else, as a share of full
    /// speed. The power limit bounds this value.
    pub sustained_share: f64,
    /// Share of a call's time that GEMMs and attention may take before the power limit slows them.
    /// From this share to a call that consists of nothing else, their speed falls linearly to
    /// `sustained_share`.
    pub full_speed_until: f64,
}

impl Default for ExecutorTraits {
    fn default() -> ExecutorTraits {
        ExecutorTraits {
            precision: Precision::F32,
            fuses_elementwise: false,
            merges_gemms: false,
            fuses_bias: true,
            fuses_activation: true,
            packs_all_to_all: false,
            elementwise_share: 1.0,
            sustained_share: 1.0,
            full_speed_until: 1.0,
        }
    }
}

impl ExecutorTraits {
    /// Reads the keys of a table; absent keys keep their defaults.
    #[must_use]
    pub fn from_config(fields: &mut ConfigReader) -> ExecutorTraits {
        let defaults = ExecutorTraits::default();
        let precision = fields.read_named("precision", &Precision::ALL, Precision::name, defaults.precision);
        let mut share = |key, default| fields.read_number(key, Some(default)).clamp(1e-6, 1.0);
        let elementwise_share = share("elementwise_share", defaults.elementwise_share);
        let sustained_share = share("sustained_share", defaults.sustained_share);
        let full_speed_until = share("full_speed_until", defaults.full_speed_until);
        ExecutorTraits {
            precision,
            fuses_elementwise: fields.read_flag("fuses_elementwise", defaults.fuses_elementwise),
            merges_gemms: fields.read_flag("merges_gemms", defaults.merges_gemms),
            fuses_bias: fields.read_flag("fuses_bias", defaults.fuses_bias),
            fuses_activation: fields.read_flag("fuses_activation", defaults.fuses_activation),
            packs_all_to_all: fields.read_flag("packs_all_to_all", defaults.packs_all_to_all),
            elementwise_share,
            sustained_share,
            full_speed_until,
        }
    }

    /// Returns the share of full speed at which GEMMs and attention run in a call in which they
    /// take the share `busy` of the time, measured at full speed.
    #[must_use]
    pub fn throttle_factor(&self, busy: f64) -> f64 {
        let over = (busy - self.full_speed_until) / (1.0 - self.full_speed_until).max(f64::MIN_POSITIVE);
        1.0 - (1.0 - self.sustained_share) * over.clamp(0.0, 1.0)
    }

    /// Writes the keys that [`ExecutorTraits::from_config`] reads, one per line.
    #[must_use]
    pub fn to_toml(&self) -> String {
        format!(
            "precision = \"{}\"\nfuses_elementwise = {}\nmerges_gemms = {}\nfuses_bias = {}\nfuses_activation = {}\n\
packs_all_to_all = {}\nelementwise_share = {:?}\nsustained_share = {:?}\nfull_speed_until = {:?}\n",
            self.precision.name(),
            self.fuses_elementwise,
            self.merges_gemms,
            self.fuses_bias,
            self.fuses_activation,
            self.packs_all_to_all,
            self.elementwise_share,
            self.sustained_share,
            self.full_speed_until,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_base::config::parse_toml;

    #[test]
    fn text_round_trips() {
        let h = ExecutorTraits {
            precision: Precision::Bf16,
            fuses_elementwise: true,
            ..ExecutorTraits::default()
        };
        let text = h.to_toml();
        let mut fields = ConfigReader::new("p", "", parse_toml("p", &text).unwrap());
        assert_eq!(ExecutorTraits::from_config(&mut fields), h);
        assert!(fields.finish().is_empty());
    }

    #[test]
    fn only_a_busy_call_is_throttled() {
        let h = ExecutorTraits { sustained_share: 0.8, full_speed_until: 0.5, ..ExecutorTraits::default() };
        assert_eq!(
            [0.0, 0.5, 0.75, 1.0, 2.0].map(|b| (h.throttle_factor(b) * 100.0).round()),
            [100.0, 100.0, 90.0, 80.0, 80.0]
        );
        assert_eq!(ExecutorTraits::default().throttle_factor(1.0), 1.0);
    }
}
