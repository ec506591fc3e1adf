//! Files that do not follow a rule yet. An entry that no file needs is an error, so that the lists
//! can only become shorter.

use std::collections::BTreeSet;

use super::Problem;

/// The file with these lists, at which an entry that nothing needs is reported.
pub(super) const EXCEPTIONS_FILE: &str = "crates/xtask/src/tidy/exceptions.rs";

/// Files that declare foreign functions without `unsafe`.
pub(super) const SAFE_FOREIGN_FUNCTIONS: &[&str] = &[];

/// Files that import one another in a cycle, one entry per cycle.
pub(super) const CYCLE_EXCEPTIONS: &[&[&str]] = &[];

/// Files that look up attributes or keyed operands of ops by name.
pub(super) const ATTR_LOOKUP_FILES: &[&str] = &[];

/// Files above the limit of lines, and functions of files above theirs; without a function, the file is
/// long.
pub(super) const LONG_CODE: &[(&str, &str)] = &[];

/// Modules with child modules that are named `mod.rs`.
pub(super) const MOD_FILES: &[&str] = &[];

/// Reports the entries of a list that no source needs.
pub(super) fn report_unneeded(
    list_name: &str,
    entries: &[&str],
    needed: &BTreeSet<String>,
    found: &mut Vec<Problem>,
) {
    for entry in entries.iter().filter(|e| !needed.contains(**e)) {
        let message = format!("{entry} follows the rule: remove it from {list_name}");
        found.push(Problem::new(EXCEPTIONS_FILE, 0, message));
    }
}
