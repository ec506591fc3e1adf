//! Limits of compile activity, and what a log has against each of them.

use tessera_base::Diagnostics;
use tessera_base::config::{ConfigReader, parse_toml};

/// The limits that hold without `--budget`, as text.
pub const BUILTIN_BUDGET: &str = include_str!("budget.toml");

macro_rules! budget {
    ($($(#[$meta:meta])* $key:ident,)+) => {
        /// Limits of compile activity; `budget.toml` describes each key.
        #[derive(Debug, Clone, Copy, PartialEq)]
        pub struct Budget { $($(#[$meta])* pub $key: f64,)+ }

        impl Budget {
            fn read(table: &mut ConfigReader<'_>, default: Option<&Budget>) -> Budget {
                Budget { $($key: table.read_number(stringify!($key), default.map(|d| d.$key)),)+ }
            }
        }
    };
}

budget! {
    /// Graph breaks of a rank.
    breaks,
    /// Compiled graphs of a rank.
    graphs,
    /// Recompiles of a rank after the warm-up.
    recompiles_after_warm_up,
    /// Seconds from the first record to the end of the warm-up.
    warm_up_s,
    /// Further recordings of a rank's CUDA graphs.
    rerecords,
    /// Compiles with a cache hit on some ranks only.
    cache_asymmetries,
    /// Compiles of a rank that the log does not hold fully.
    unlogged,
    /// Ranks that differ from most.
    differing_ranks,
    /// Ranks without a log.
    missing_ranks,
    /// Differences between the collectives of ranks.
    divergences,
    /// Breaks at one line.
    break_repeats,
    /// Share of the recompile limit.
    recompile_limit_share,
    /// Windows that all compiled new graphs.
    growth_window,
    /// Seconds of a window.
    window_s,
}

impl Budget {
    /// Reads the table `[compile]` of a TOML file over the built-in limits.
    ///
    /// # Errors
    /// T0001 to T0004: the file is no TOML, or has an unknown key or a value that is no number.
    pub fn from_toml(file: &str, text: &str) -> Result<Budget, Diagnostics> {
        let builtin = read_file("budget.toml", BUILTIN_BUDGET, None)?;
        read_file(file, text, Some(&builtin))
    }
}

fn read_file(file: &str, text: &str, default: Option<&Budget>) -> Result<Budget, Diagnostics> {
    let mut root = ConfigReader::new(file, "", parse_toml(file, text)?);
    let mut table = root.read_table("compile");
    let budget = Budget::read(&mut table, default);
    let mut diagnostics = table.finish();
    diagnostics.extend(root.finish());
    if diagnostics.is_empty() { Ok(budget) } else { Err(diagnostics) }
}

/// One limit with the number of this run.
#[derive(Debug, Clone, PartialEq)]
pub struct BudgetLine {
    /// The key of the budget.
    pub key: &'static str,
    /// What is counted.
    pub title: &'static str,
    /// The number.
    pub value: f64,
    /// The limit.
    pub limit: f64,
    /// Where the number comes from, such as the rank that has it; may be empty.
    pub detail: String,
}

impl BudgetLine {
    /// Returns whether the number is within the limit.
    #[must_use]
    pub fn passes(&self) -> bool {
        self.value <= self.limit
    }
}

/// A sign that the structure of the program has to change.
#[derive(Debug, Clone, PartialEq)]
pub struct StructureRule {
    /// What the sign is.
    pub title: &'static str,
    /// The number.
    pub value: f64,
    /// The number at which the rule applies.
    pub limit: f64,
    /// Where, and what to do; empty if the rule does not apply.
    pub detail: String,
}

impl StructureRule {
    /// Returns whether the rule applies.
    #[must_use]
    pub fn applies(&self) -> bool {
        self.value >= self.limit
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    #[test]
    fn a_file_overrides_single_keys_and_an_unknown_key_is_refused() {
        let builtin = Budget::from_toml("b.toml", "").unwrap();
        assert_eq!((builtin.breaks, builtin.graphs, builtin.growth_window), (2.0, 14.0, 3.0));
        let own = Budget::from_toml("b.toml", "[compile]\nbreaks = 7\n").unwrap();
        assert_eq!(own, Budget { breaks: 7.0, ..builtin });
        for wrong in ["[compile]\nbreak = 7", "[other]\n", "[compile]\nbreaks = \"7\"", "breaks = 7"] {
            assert!(!Budget::from_toml("b.toml", wrong).unwrap_err().is_empty(), "{wrong}");
        }
    }
}
