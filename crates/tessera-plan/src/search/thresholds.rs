//! Limits of the gates: one file with defaults, which a person's own may replace in part or whole.

use std::fmt::Write as _;

use tessera_base::fields::{Fields, toml};
use tessera_base::{Code, Diagnostic, Diagnostics};

/// A limit out of range.
pub static T1240: Code = Code {
    id: "T1240",
    title: "limit of a gate is out of range",
    page: "The file of limits holds a number that no plan could be judged by: a share that is not between 0 and 1, a count \
below 1, or a lower limit above its upper one. The message names the key and what was found.\n\n\
Every limit is indicative and has a default; a file needs only the keys that it changes. `gates.toml` of the planner lists \
all of them with what they mean.",
};

macro_rules! thresholds {
    ($($table:ident { $($(#[$doc:meta])* $name:ident: $kind:ident,)+ })+) => {
        /// The limits, by the names that they have in the file.
        #[derive(Debug, Clone, PartialEq)]
        pub struct Thresholds { $($($(#[$doc])* pub $name: f64,)+)+ }

        impl Thresholds {
            /// Names, tables and kinds, in the order of the file.
            const KEYS: &[(&str, &str, Kind)] = &[$($((stringify!($table), stringify!($name), Kind::$kind),)+)+];

            fn values(&self) -> Vec<f64> {
                vec![$($(self.$name,)+)+]
            }

            fn read(fields: &mut Fields<'_>, defaults: Option<&Thresholds>) -> Thresholds {
                $(
                    let mut table = fields.table(stringify!($table));
                    $(let $name = table.number(stringify!($name), defaults.map(|d| d.$name));)+
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
        /// Share of a device's memory from which all that lies there draws a warning.
        device_warn: Share,
        /// Share of a device's memory that activations and cache may take without a warning.
        activations_and_cache_warn: Share,
        /// Share that they may take at all.
        activations_and_cache_fail: Share,
        /// Activations over the rank's parameters from which recomputation is advised.
        recompute_above: Share,
    }
    experts {
        /// Experts of a rank, at least.
        per_rank_least: Count,
        /// Standard deviation of rows over experts, over their mean, at most.
        balance_most: Share,
        /// Mean rows of an expert from which balance is judged.
        balance_rows_least: Count,
        /// Layers whose cold experts are fetched ahead, at least.
        prefetch_least: Count,
        /// The same, at most.
        prefetch_most: Count,
        /// Capacity of an expert in per cent of the even share, at least.
        capacity_least_pct: Count,
        /// The same, at most.
        capacity_most_pct: Count,
        /// Assignments to experts that are dropped, in per cent, at most.
        dropped_most_pct: Count,
    }
    collectives {
        /// Share of collective time that is hidden, at least.
        overlap_least: Share,
        /// Share of the line rate that dispatch and combine reach, at least.
        exchange_least: Share,
        /// Bytes of one exchange and rank from which that is judged.
        exchange_burst_bytes: Count,
    }
    pipeline {
        /// Share of the step that a stage waits for others, at most.
        bubble_most: Share,
    }
    cache {
        /// Share of reads that find keys and values in a hot tier, at least.
        hits_least: Share,
    }
}

impl Thresholds {
    /// The limits of a file; what it does not name keeps its default.
    ///
    /// # Errors
    /// T0001 for text that is not TOML, T0002 and T0004 for keys, T1240 for numbers out of range.
    pub fn parse(file: &str, text: &str) -> Result<Thresholds, Diagnostics> {
        Thresholds::over(file, text, Some(&Thresholds::default()))
    }

    fn over(file: &str, text: &str, defaults: Option<&Thresholds>) -> Result<Thresholds, Diagnostics> {
        let mut fields = Fields::new(file, "", toml(file, text)?);
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
                        .at(file, format!("found {value}")),
                );
            }
        }
        let ordered = [
            (
                "memory.activations_and_cache",
                limits.activations_and_cache_warn,
                limits.activations_and_cache_fail,
            ),
            ("experts.prefetch", limits.prefetch_least, limits.prefetch_most),
            ("experts.capacity", limits.capacity_least_pct, limits.capacity_most_pct),
        ];
        for (what, low, high) in ordered {
            if low > high {
                diagnostics.push(
                    Diagnostic::error(
                        &T1240,
                        format!("the lower limit of `{what}_…` is above the upper one"),
                    )
                    .at(file, format!("{low} and {high}")),
                );
            }
        }
        if diagnostics.is_empty() { Ok(limits) } else { Err(diagnostics) }
    }

    /// The file that gives these limits.
    #[must_use]
    pub fn text(&self) -> String {
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
    /// The planner's own file, which a test reads without a complaint.
    fn default() -> Thresholds {
        let table = toml("gates.toml", OWN).unwrap_or_default();
        Thresholds::read(&mut Fields::new("gates.toml", "", table), None)
    }
}

const OWN: &str = include_str!("../../gates.toml");

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_names_every_limit() {
        let own = Thresholds::over("gates.toml", OWN, None).unwrap();
        assert_eq!(own, Thresholds::default());
        assert_eq!((own.activations_and_cache_fail, own.per_rank_least, own.hits_least), (0.6, 128.0, 0.9));
        assert_eq!(Thresholds::parse("own", &own.text()).unwrap(), own);
    }

    #[test]
    fn a_person_may_change_one() {
        let t = Thresholds::parse("own.toml", "[collectives]\noverlap_least = 0.4\n").unwrap();
        assert_eq!(t, Thresholds { overlap_least: 0.4, ..Thresholds::default() });
        let refused = |text: &str| Thresholds::parse("own.toml", text).unwrap_err()[0].code.id;
        assert_eq!(refused("[collectives]\noverlap_least = 1.4\n"), "T1240");
        assert_eq!(refused("[memory]\nactivations_and_cache_warn = 0.7\n"), "T1240");
        assert_eq!(refused("[experts]\nper_rank_least = 0\n"), "T1240");
        assert_eq!(refused("[collectives]\noverlap_lest = 0.4\n"), "T0002");
        assert_eq!(refused("[collectives\n"), "T0001");
    }
}
