//! How an executor runs the ops of a program: what it computes in, which ops it makes one kernel of, what an exchange
//! costs beside the exchange.

use tessera_base::fields::Fields;
use tessera_mesh::Precision;

/// Habits of an executor. The default is one that runs op by op, as the program is written.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Habits {
    /// What the f32 numbers of a program are computed and kept in. Sums of squares and sinusoids stay f32.
    pub precision: Precision,
    /// Whether neighbouring passes over the same rows are one kernel, so that what only they pass on never reaches
    /// memory.
    pub fuses_passes: bool,
    /// Whether neighbouring products of one left operand are one product of their weights side by side.
    pub joins_products: bool,
    /// Whether a product applies its bias on the way out.
    pub bias_in_product: bool,
    /// Whether a product applies its activation on the way out.
    pub act_in_product: bool,
    /// Whether an all-to-all over columns is packed, or unpacked, by a pass of its own.
    pub packs_exchanges: bool,
    /// Share of a copy's rate that passes reach which compute on the way: norms, rotations, activations.
    pub pass_share: f64,
    /// Share of full speed at which products and attention run where a call does nothing else, because power is bounded.
    pub sustained: f64,
    /// Share of a call's time that products and attention may take before power slows them; from there to a call that
    /// does nothing else their speed falls evenly to `sustained`.
    pub full_speed_until: f64,
}

impl Default for Habits {
    fn default() -> Habits {
        Habits {
            precision: Precision::F32,
            fuses_passes: false,
            joins_products: false,
            bias_in_product: true,
            act_in_product: true,
            packs_exchanges: false,
            pass_share: 1.0,
            sustained: 1.0,
            full_speed_until: 1.0,
        }
    }
}

impl Habits {
    /// Reads the keys of a table; what is absent is as by default.
    #[must_use]
    pub fn take(fields: &mut Fields) -> Habits {
        let other = Habits::default();
        let word = fields.word("precision", &Precision::ALL.map(Precision::name), other.precision.name());
        Habits {
            precision: Precision::ALL.into_iter().find(|p| p.name() == word).unwrap_or(other.precision),
            fuses_passes: fields.flag("fuses_passes", other.fuses_passes),
            joins_products: fields.flag("joins_products", other.joins_products),
            bias_in_product: fields.flag("bias_in_product", other.bias_in_product),
            act_in_product: fields.flag("act_in_product", other.act_in_product),
            packs_exchanges: fields.flag("packs_exchanges", other.packs_exchanges),
            pass_share: share(fields.number("pass_share", Some(other.pass_share))),
            sustained: share(fields.number("sustained", Some(other.sustained))),
            full_speed_until: share(fields.number("full_speed_until", Some(other.full_speed_until))),
        }
    }

    /// Share of full speed at which products and attention run in a call of whose time they take `busy`, at full speed.
    #[must_use]
    pub fn pace(&self, busy: f64) -> f64 {
        let over = (busy - self.full_speed_until) / (1.0 - self.full_speed_until).max(f64::MIN_POSITIVE);
        1.0 - (1.0 - self.sustained) * over.clamp(0.0, 1.0)
    }

    /// The keys as [`Habits::take`] reads them, one per line.
    #[must_use]
    pub fn text(&self) -> String {
        format!(
            "precision = \"{}\"\nfuses_passes = {}\njoins_products = {}\nbias_in_product = {}\nact_in_product = {}\n\
packs_exchanges = {}\npass_share = {:?}\nsustained = {:?}\nfull_speed_until = {:?}\n",
            self.precision.name(),
            self.fuses_passes,
            self.joins_products,
            self.bias_in_product,
            self.act_in_product,
            self.packs_exchanges,
            self.pass_share,
            self.sustained,
            self.full_speed_until,
        )
    }
}

/// A share above 0 and at most 1; what is none is taken for the nearest that is.
fn share(x: f64) -> f64 {
    x.clamp(1e-6, 1.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use tessera_base::fields::toml;

    #[test]
    fn text_round_trips() {
        let h = Habits { precision: Precision::Bf16, fuses_passes: true, ..Habits::default() };
        let text = h.text();
        let mut fields = Fields::new("p", "", toml("p", &text).unwrap());
        assert_eq!(Habits::take(&mut fields), h);
        assert!(fields.finish().is_empty());
    }

    #[test]
    fn a_busy_call_is_slowed_and_a_loose_one_is_not() {
        let h = Habits { sustained: 0.8, full_speed_until: 0.5, ..Habits::default() };
        assert_eq!(
            [0.0, 0.5, 0.75, 1.0, 2.0].map(|b| (h.pace(b) * 100.0).round()),
            [100.0, 100.0, 90.0, 80.0, 80.0]
        );
        assert_eq!(Habits::default().pace(1.0), 1.0);
    }
}
