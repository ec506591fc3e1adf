//! The thresholds of the gates: one file with defaults, which a user's file may override in part or
//! in whole.

use std::fmt::Write as _;

use tessera_base::config::{ConfigReader, parse_toml};
use tessera_base::{Diagnostic, Diagnostics};

use crate::codes::T1240;

macro_rules! thresholds {
    ($($table:ident { $($(#[$doc:meta])* $name:ident: $kind:ident,)+ })+) => {
        /// The thresholds of all gates, named as in `gates.toml`.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Thresholds { $($($(#[$doc])* pub $name: f64,)+)+ }

        impl Thresholds {
            /// Table, key and kind of each threshold, in file order.
            const KEYS: &[(&str, &str, Kind)] = &[$($((stringify!($table), stringify!($name), Kind::$kind),)+)+];

            fn values(&self) -> Vec<f64> {
                vec![$($(self.$name,)+)+]
            }

            fn read(fields: &mut ConfigReader<'_>, defaults: Option<&Thresholds>) -> Thresholds {
                $(
                    let mut table = fields.read_table(stringify!($table));
                    $(let $name = table.read_number(stringify!($name), defaults.map(|d| d.$name));)+
                    fields.diagnostics.extend(table.finish());
                )+
                Thresholds { $($($name,)+)+ }
            }
        }
    };
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Share,
    Count,
}

thresholds! {
    memory {
        /// Share of device memory above which the total usage gets a warning.
        device_warn: Share,
        /// Share of device memory above which activations and KV cache get a warning.
        activations_and_cache_warn: Share,
        /// Maximum share of device memory for activations and KV cache.
        activations_and_cache_fail: Share,
        /// Ratio of activations to the rank's parameters above which recomputation is advised.
        recompute_above: Share,
    }
    experts {
        /// Minimum number of experts per rank.
        min_per_rank: Count,
        /// Maximum standard deviation of rows over experts, relative to the mean.
        max_balance: Share,
        /// Minimum mean rows per expert for the balance gate to apply.
        min_balance_rows: Count,
        /// Minimum prefetch window in layers for cold experts.
        min_prefetch: Count,
        /// Maximum prefetch window in layers for cold experts.
        max_prefetch: Count,
        /// Minimum capacity of an expert in per cent of the even share.
        min_capacity_pct: Count,
        /// Maximum capacity of an expert in per cent of the even share.
        max_capacity_pct: Count,
        /// Maximum dropped expert assignments in per cent.
        max_dropped_pct: Count,
    }
    collectives {
        /// Minimum share of collective time that is hidden.
        min_overlap: Share,
        /// Minimum share of the line rate that dispatch and combine reach.
        min_exchange: Share,
        /// Minimum bytes of an exchange per rank for the exchange gate to apply.
        exchange_burst_bytes: Count,
    }
    pipeline {
        /// Maximum share of the step that a stage waits for others.
        max_bubble: Share,
        /// Minimum OverlapScore of a run whose leader is outside of the mesh.
        min_overlap_score: Share,
    }
    parity {
        /// Maximum mean squared error of normalised logits in f32, against f32.
        max_f32_mse: Share,
        /// Maximum mean squared error of normalised logits in bf16.
        max_bf16_mse: Share,
        /// Maximum mean squared error of normalised logits in fp8.
        max_fp8_mse: Share,
        /// Maximum mean squared error of normalised logits with tokens in e4m3 between ranks.
        max_fp8_wire_mse: Share,
    }
    cache {
        /// Minimum share of KV reads that hit a hot tier.
        min_hits: Share,
    }
}

impl Thresholds {
    /// Parses a threshold file; keys that it omits keep their default.
    ///
    /// # Errors
    /// T0001 for text that is not TOML, T0002 and T0004 for keys, T1240 for numbers out of range.
    pub fn parse(file: &str, text: &str) -> Result<Thresholds, Diagnostics> {
        Thresholds::parse_with_defaults(file, text, Some(&Thresholds::default()))
    }

    fn parse_with_defaults(
        file: &str,
        text: &str,
        defaults: Option<&Thresholds>,
    ) -> Result<Thresholds, Diagnostics> {
        let mut fields = ConfigReader::new(file, "", parse_toml(file, text)?);
        let limits = Thresholds::read(&mut fields, defaults);
        let mut diagnostics = fields.finish();
        for ((table, name, kind), value) in Thresholds::KEYS.iter().zip(limits.values()) {
            let (fits, want) = match kind {
                Kind::Share => ((0.0..=1.0).contains(&value), "a share from 0 to 1"),
                Kind::Count => (value >= 1.0, "at least 1"),
            };
            if !fits {
                diagnostics.push(
                    Diagnostic::error(&T1240, format!("`{table}.{name}` must be {want}"))
                        .with_label(file, format!("found {value}")),
                );
            }
        }
        let ordered = [
            (
                ("memory.activations_and_cache_warn", limits.activations_and_cache_warn),
                ("memory.activations_and_cache_fail", limits.activations_and_cache_fail),
            ),
            (("experts.min_prefetch", limits.min_prefetch), ("experts.max_prefetch", limits.max_prefetch)),
            (
                ("experts.min_capacity_pct", limits.min_capacity_pct),
                ("experts.max_capacity_pct", limits.max_capacity_pct),
            ),
        ];
        for ((low_key, low), (high_key, high)) in ordered {
            if low > high {
                diagnostics.push(
                    Diagnostic::error(&T1240, format!("`{low_key}` exceeds `{high_key}`"))
                        .with_label(file, format!("{low} and {high}")),
                );
            }
        }
        if diagnostics.is_empty() { Ok(limits) } else { Err(diagnostics) }
    }

    /// Returns these thresholds in the format of `gates.toml`.
    #[must_use]
    pub fn to_toml(&self) -> String {
        let mut out = String::new();
        let mut open = "";
        for ((table, name, _), value) in Thresholds::KEYS.iter().zip(self.values()) {
            if *table != open {
                let _ = writeln!(out, "{}[{table}]", if open.is_empty() { "" } else { "\n" });
                open = table;
            }
            let _ = writeln!(out, "{name} = {value}");
        }
        out
    }
}

impl Default for Thresholds {
    /// Parses the planner's own `gates.toml`; a test checks that it is valid.
    fn default() -> Thresholds {
        let table = parse_toml("gates.toml", DEFAULT_TOML).unwrap_or_default();
        Thresholds::read(&mut ConfigReader::new("gates.toml", "", table), None)
    }
}

const DEFAULT_TOML: &str = include_str!("../../gates.toml");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_every_limit() {
        let own = Thresholds::parse_with_defaults("gates.toml", DEFAULT_TOML, None).unwrap();
        assert_eq!(own, Thresholds::default());
        assert_eq!((own.activations_and_cache_fail, own.min_per_rank, own.min_hits), (0.6, 128.0, 0.9));
        assert_eq!(Thresholds::parse("own", &own.to_toml()).unwrap(), own);
    }

    #[test]
    fn a_person_may_change_one() {
        let t = Thresholds::parse("own.toml", "[collectives]\nmin_overlap = 0.4\n").unwrap();
        assert_eq!(t, Thresholds { min_overlap: 0.4, ..Thresholds::default() });
        let refused = |text: &str| Thresholds::parse("own.toml", text).unwrap_err()[0].code.id;
        assert_eq!(refused("[collectives]\nmin_overlap = 1.4\n"), "T1240");
        assert_eq!(refused("[memory]\nactivations_and_cache_warn = 0.7\n"), "T1240");
        assert_eq!(refused("[experts]\nmin_per_rank = 0\n"), "T1240");
        assert_eq!(refused("[collectives]\nmin_overlep = 0.4\n"), "T0002");
        assert_eq!(refused("[collectives\n"), "T0001");
    }
}
