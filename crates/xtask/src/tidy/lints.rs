//! Checks the settings with which the compiler and Clippy enforce rules: the `clippy.toml` of each
//! library crate, the lints of each `lib.rs`, and the attributes that would switch them off.
//!
//! Clippy reads one `clippy.toml` per crate and has no list of lists, so the pure crates have equal
//! files, and the other library crates have the sections of it that bind them.

use std::collections::BTreeSet;

use proc_macro2::TokenTree;

use super::Problem;
use super::page::{CrateKind, CrateRow};
use super::source::{Source, first_line};
use crate::tree::Tree;

/// The settings of all crates without a file of their own.
const ROOT_SETTINGS: &str = "clippy.toml";
/// The lists of a `clippy.toml` that ban names.
const BAN_LISTS: [&str; 3] = ["disallowed-types", "disallowed-methods", "disallowed-macros"];
/// What a pure crate does not use, and names of which at least these must be banned.
const PURE_PROMISES: &[(&str, &[&str])] = &[
    ("file", &["std::fs::File", "std::fs::read", "std::path::Path::exists"]),
    ("environment", &["std::env::var", "std::env::args", "std::option_env"]),
    ("network", &["std::net::TcpStream", "std::net::TcpListener", "std::net::UdpSocket"]),
    ("clock", &["std::time::Instant::now", "std::time::SystemTime::now"]),
    ("thread", &["std::thread::spawn", "std::thread::scope", "std::thread::sleep"]),
    ("process", &["std::process::Command", "std::process::exit", "std::io::stdout"]),
];
/// Paths that no library crate uses: application crates read the environment and files, and pass
/// typed values on.
const ENVIRONMENT_PATHS: &[&str] = &["std::env::", "std::option_env"];
const FILE_PATHS: &[&str] = &["std::fs::", "std::os::unix::fs::"];
/// The only library crate that reads files.
const FILE_CRATE: &str = "tessera-weights";
/// Lints that each `lib.rs` of a library crate raises to warnings, which the gate denies.
const LIBRARY_LINTS: [&str; 3] = ["expect_used", "print_stderr", "print_stdout"];
/// Lints of the workspace on which rules of this project rest.
const WORKSPACE_LINTS: &[(&str, &str)] = &[
    ("rust", "unsafe_code"),
    ("clippy", "dbg_macro"),
    ("clippy", "missing_safety_doc"),
    ("clippy", "todo"),
    ("clippy", "undocumented_unsafe_blocks"),
    ("clippy", "unimplemented"),
    ("clippy", "unwrap_used"),
];

/// Checks the settings of the workspace and of every library crate and pure crate.
pub(super) fn check(tree: &Tree, sources: &[Source<'_>], table: &[CrateRow], found: &mut Vec<Problem>) {
    check_workspace_lints(tree, found);
    check_settings(tree, table, found);
    for s in sources {
        let Some(row) = table.iter().find(|r| r.name == s.crate_name()) else { continue };
        let is_library = row.kind == CrateKind::Library;
        if is_library && s.path == format!("crates/{}/src/lib.rs", row.name) {
            check_library_lints(s, found);
        }
        if is_library || row.pure {
            check_allowed_lints(s, found);
        }
    }
}

/// Reports the lints of [`WORKSPACE_LINTS`] that the root manifest does not switch on.
fn check_workspace_lints(tree: &Tree, found: &mut Vec<Problem>) {
    const MANIFEST: &str = "Cargo.toml";
    let manifest = read_table(tree, MANIFEST, found);
    let lints = manifest.get("workspace").and_then(|w| w.get("lints"));
    for (tool, lint) in WORKSPACE_LINTS {
        let level = lints.and_then(|l| l.get(*tool)).and_then(|l| l.get(*lint)).and_then(toml::Value::as_str);
        if !matches!(level, Some("warn" | "deny" | "forbid")) {
            let message = format!("write `{lint} = \"deny\"` in [workspace.lints.{tool}]");
            found.push(Problem::new(MANIFEST, 0, message));
        }
    }
}

/// Checks the `clippy.toml` of every pure crate and of every library crate.
fn check_settings(tree: &Tree, table: &[CrateRow], found: &mut Vec<Problem>) {
    let Some(first_pure) = table.iter().find(|r| r.pure) else { return };
    let pure_path = settings_path(first_pure);
    let pure_text = tree.file_text(&pure_path).unwrap_or_default();
    let pure = read_table(tree, &pure_path, found);
    let root = read_table(tree, ROOT_SETTINGS, found);
    let banned = banned_names(&pure);
    for (what, names) in PURE_PROMISES {
        for name in names.iter().filter(|n| !banned.contains(**n)) {
            let message = format!("ban `{name}`: a pure crate uses no {what}");
            found.push(Problem::new(&pure_path, 0, message));
        }
    }
    for row in table.iter().filter(|r| r.pure || r.kind == CrateKind::Library) {
        let path = settings_path(row);
        if row.pure {
            if tree.file_text(&path) != Some(pure_text) {
                let message = format!("`{}` is pure: copy {pure_path} to this place", row.name);
                found.push(Problem::new(&path, 0, message));
            }
        } else {
            let expected: BTreeSet<String> = banned.iter().filter(|n| binds(row, n)).cloned().collect();
            let actual = banned_names(&read_table(tree, &path, found));
            for name in expected.symmetric_difference(&actual) {
                let verb = if actual.contains(name) { "do not ban" } else { "ban" };
                let message =
                    format!("{verb} `{name}`, as {pure_path} and the row of `{}` require", row.name);
                found.push(Problem::new(&path, 0, message));
            }
        }
        let settings = read_table(tree, &path, &mut Vec::new());
        for (key, value) in root.iter().filter(|(key, value)| settings.get(*key) != Some(*value)) {
            let message =
                format!("write `{key} = {value}` as in {ROOT_SETTINGS}, which Clippy does not read here");
            found.push(Problem::new(&path, 0, message));
        }
    }
}

/// Returns whether a ban of the pure crates also binds a library crate that is not pure.
fn binds(row: &CrateRow, name: &str) -> bool {
    let is_below = |paths: &[&str]| paths.iter().any(|p| name.starts_with(p));
    is_below(ENVIRONMENT_PATHS) || (row.name != FILE_CRATE && is_below(FILE_PATHS))
}

fn settings_path(row: &CrateRow) -> String {
    format!("crates/{}/clippy.toml", row.name)
}

/// Reads a TOML file of the tree; a missing or invalid file is reported and reads as an empty one.
fn read_table(tree: &Tree, path: &str, found: &mut Vec<Problem>) -> toml::Table {
    let table = tree.file_text(path).and_then(|text| text.parse().ok());
    if table.is_none() {
        found.push(Problem::new(path, 0, "the file is missing or not valid TOML: correct it"));
    }
    table.unwrap_or_default()
}

/// Returns the names in the lists of bans.
fn banned_names(settings: &toml::Table) -> BTreeSet<String> {
    let lists = BAN_LISTS.iter().filter_map(|list| settings.get(*list)?.as_array());
    lists.flatten().filter_map(|name| Some(name.as_str()?.to_string())).collect()
}

/// Reports the lints of [`LIBRARY_LINTS`] that a `lib.rs` does not raise.
fn check_library_lints(s: &Source<'_>, found: &mut Vec<Problem>) {
    let raised: String = s
        .syntax
        .attrs
        .iter()
        .filter(|a| a.path().is_ident("warn") || a.path().is_ident("deny"))
        .filter_map(|a| Some(a.meta.require_list().ok()?.tokens.to_string()))
        .collect();
    if LIBRARY_LINTS.iter().any(|lint| !raised.contains(lint)) {
        let lints = LIBRARY_LINTS.map(|lint| format!("clippy::{lint}")).join(", ");
        found.push(Problem::new(s.path, 0, format!("write `#![warn({lints})]` at the top of the crate")));
    }
}

/// Reports attributes outside of tests that switch off a ban or a lint of library crates.
fn check_allowed_lints(s: &Source<'_>, found: &mut Vec<Problem>) {
    let attribute = |list: &'_ [TokenTree], i: usize| match list.get(i..i + 2)? {
        [TokenTree::Ident(level), TokenTree::Group(lints)] if level == "allow" || level == "expect" => {
            Some((first_line(level.span()), level.to_string(), lints.to_string().replace(' ', "")))
        }
        _ => None,
    };
    for (line, level, lints) in s.find_tokens(attribute).filter(|(line, ..)| !s.in_test(*line)) {
        for lint in lints.trim_matches(['(', ')']).split(',').filter(|lint| is_rule(lint)) {
            let message = format!("`{level}({lint})` outside of tests: remove it and pass the value in");
            found.push(Problem::new(s.path, line, message));
        }
    }
}

/// Returns whether a rule of library crates rests on a lint of Clippy.
fn is_rule(lint: &str) -> bool {
    let Some(name) = lint.strip_prefix("clippy::") else { return false };
    BAN_LISTS.iter().any(|list| list.replace('-', "_") == name)
        || LIBRARY_LINTS.contains(&name)
        || WORKSPACE_LINTS.contains(&("clippy", name))
}

#[cfg(test)]
mod tests;
