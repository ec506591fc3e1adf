//! Checks the dependencies between crates against the table in `ARCHITECTURE.md`.

use super::page::{ARCHITECTURE, CrateKind};
use super::{CrateRow, Problem};
use crate::tree::{DependencyKind, Tree};

/// Two crates that must not depend on each other, whatever the table allows: a verifier that shared
/// code with the planner would share its bugs.
const INDEPENDENT: [&str; 2] = ["tessera-plan", "tessera-verify"];
/// External crates whose purpose is I/O, threads or processes, which a pure crate must not use.
const IMPURE_CRATES: &[&str] =
    &["indicatif", "memmap2", "rayon", "rustix", "signal-hook", "tempfile", "tokio", "cudarc", "libloading"];

/// Checks that table and workspace list the same crates and that every dependency is allowed.
pub(super) fn check(tree: &Tree, table: &[CrateRow], found: &mut Vec<Problem>) {
    for row in table.iter().filter(|r| !tree.members.iter().any(|m| m.name == r.name)) {
        let message = format!("`{}` is not a crate of the workspace: remove the row", row.name);
        found.push(Problem::new(ARCHITECTURE, row.line, message));
    }
    for row in table.iter().filter(|r| r.kind == CrateKind::Library) {
        for name in row.may_use.iter().flatten() {
            if kind_of(table, name).is_some_and(|k| k != CrateKind::Library) {
                let message = format!(
                    "library crate `{}` may not use `{name}`, which is not a library crate",
                    row.name
                );
                found.push(Problem::new(ARCHITECTURE, row.line, message));
            }
        }
    }
    for member in &tree.members {
        let manifest = format!("crates/{}/Cargo.toml", member.name);
        if !tree.contains(&manifest) {
            let message =
                format!("move crate `{}` into a folder of the same name under crates/", member.name);
            found.push(Problem::new(&manifest, 0, message));
        }
        let Some(row) = table.iter().find(|r| r.name == member.name) else {
            let message = format!("the table of crates has no row for `{}`: add one", member.name);
            found.push(Problem::new(ARCHITECTURE, 0, message));
            continue;
        };
        for (dependency, kind) in &member.dependencies {
            if let Some(why) = violation(table, row, dependency, *kind) {
                let message = format!("`{}` must not depend on `{dependency}`: {why}", member.name);
                found.push(Problem::new(&manifest, 0, message));
            }
        }
    }
}

/// Returns the reason why a crate may not depend on another, or `None` if it may.
fn violation(table: &[CrateRow], row: &CrateRow, dependency: &str, kind: DependencyKind) -> Option<String> {
    if row.pure && kind == DependencyKind::Normal && IMPURE_CRATES.contains(&dependency) {
        return Some(
            "a pure crate does no I/O and starts no thread; let an application crate pass the result in"
                .into(),
        );
    }
    let dependency_kind = kind_of(table, dependency)?;
    if INDEPENDENT.contains(&row.name.as_str())
        && INDEPENDENT.contains(&dependency)
        && kind == DependencyKind::Normal
    {
        return Some("planner and verifier must not share code; put shared types into tessera-ir".into());
    }
    match (row.kind, dependency_kind, kind) {
        (CrateKind::Library, CrateKind::Application, _) => {
            Some("a library crate never depends on an application crate; pass a value in instead".into())
        }
        (CrateKind::Library | CrateKind::Application, CrateKind::Development, DependencyKind::Normal) => {
            Some("only tests may use a development crate; make it a dev-dependency".into())
        }
        (_, _, DependencyKind::Dev) => None,
        _ => match &row.may_use {
            Some(allowed) if !allowed.iter().any(|a| a == dependency) => Some(format!(
                "the table in {ARCHITECTURE} (line {}) allows {}; remove the dependency, or add it there with a reason",
                row.line,
                if allowed.is_empty() { "nothing".into() } else { allowed.join(", ") }
            )),
            _ => None,
        },
    }
}

fn kind_of(table: &[CrateRow], name: &str) -> Option<CrateKind> {
    table.iter().find(|r| r.name == name).map(|r| r.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, kind: CrateKind, may_use: &[&str], pure: bool) -> CrateRow {
        let may_use = Some(may_use.iter().map(|s| s.to_string()).collect());
        CrateRow { name: name.into(), kind, may_use, pure, line: 1 }
    }

    fn table() -> Vec<CrateRow> {
        vec![
            row("low", CrateKind::Library, &[], true),
            row("high", CrateKind::Library, &["low"], false),
            row("app", CrateKind::Application, &["low", "high"], false),
            row("dev", CrateKind::Development, &["low"], false),
        ]
    }

    fn check_one(name: &str, dependency: &str, kind: DependencyKind) -> Option<String> {
        let table = table();
        violation(&table, table.iter().find(|r| r.name == name).unwrap(), dependency, kind)
    }

    #[test]
    fn dependencies_follow_the_table() {
        assert!(check_one("high", "low", DependencyKind::Normal).is_none());
        assert!(check_one("low", "high", DependencyKind::Normal).unwrap().contains("allows nothing"));
        assert!(check_one("low", "high", DependencyKind::Dev).is_none());
        assert!(
            check_one("high", "app", DependencyKind::Dev)
                .unwrap()
                .contains("never depends on an application crate")
        );
        assert!(check_one("app", "dev", DependencyKind::Normal).unwrap().contains("dev-dependency"));
        assert!(check_one("high", "dev", DependencyKind::Dev).is_none());
        assert!(check_one("low", "rayon", DependencyKind::Normal).unwrap().contains("pure"));
        assert!(check_one("high", "rayon", DependencyKind::Normal).is_none());
    }

    #[test]
    fn a_crate_without_a_row_and_a_row_without_a_crate_are_reported() {
        let tree = Tree::from_files(&[("crates/low/Cargo.toml", ""), ("crates/new/Cargo.toml", "")])
            .with_crate("low", &[])
            .with_crate("new", &[]);
        let mut found = Vec::new();
        check(&tree, &table()[..2], &mut found);
        let messages: Vec<&str> = found.iter().map(|p| p.message.as_str()).collect();
        assert_eq!(messages.len(), 2, "{messages:?}");
        assert!(messages[0].contains("`high` is not a crate") && messages[1].contains("no row for `new`"));
    }

    #[test]
    fn planner_and_verifier_stay_independent_even_if_the_table_allows_a_dependency() {
        let rows = [
            row("tessera-plan", CrateKind::Library, &["tessera-verify"], true),
            row("tessera-verify", CrateKind::Library, &[], true),
        ];
        assert!(violation(&rows, &rows[0], "tessera-verify", DependencyKind::Normal).is_some());
    }
}
