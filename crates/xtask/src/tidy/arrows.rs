//! Arrows between crates: who may need whom, against the table in `ARCHITECTURE.md`.

use super::page::{ARCHITECTURE, Kind};
use super::{Problem, Room};
use crate::tree::{Tree, When};

/// Two crates that must not know each other, whatever the table says: a plan is judged by other eyes.
const STRANGERS: [&str; 2] = ["tessera-plan", "tessera-verify"];
/// Libraries whose purpose is what a pure room must not do.
const IMPURE: &[&str] =
    &["indicatif", "memmap2", "rayon", "rustix", "signal-hook", "tempfile", "tokio", "cudarc", "libloading"];

pub(super) fn check(tree: &Tree, table: &[Room], found: &mut Vec<Problem>) {
    for row in table.iter().filter(|r| !tree.members.iter().any(|m| m.name == r.name)) {
        let says = format!("`{}` is no crate of the workspace: remove the row", row.name);
        found.push(Problem::new(ARCHITECTURE, row.line, says));
    }
    for row in table.iter().filter(|r| r.kind == Kind::Room) {
        for name in row.may_use.iter().flatten() {
            if kind_of(table, name).is_some_and(|k| k != Kind::Room) {
                let says = format!("room `{}` may not use `{name}`, which is no room", row.name);
                found.push(Problem::new(ARCHITECTURE, row.line, says));
            }
        }
    }
    for member in &tree.members {
        let manifest = format!("crates/{}/Cargo.toml", member.name);
        if !tree.has(&manifest) {
            let says = format!("crate `{}` must lie in a folder of its name under crates/", member.name);
            found.push(Problem::new(&manifest, 0, says));
        }
        let Some(row) = table.iter().find(|r| r.name == member.name) else {
            let says = format!("`{}` is in no row of the table of crates: add one", member.name);
            found.push(Problem::new(ARCHITECTURE, 0, says));
            continue;
        };
        for (needed, when) in &member.needs {
            if let Some(why) = refusal(table, row, needed, *when) {
                let says = format!("`{}` must not depend on `{needed}`: {why}", member.name);
                found.push(Problem::new(&manifest, 0, says));
            }
        }
    }
}

/// Why a crate may not need another.
fn refusal(table: &[Room], row: &Room, needed: &str, when: When) -> Option<String> {
    if row.pure && when == When::Always && IMPURE.contains(&needed) {
        return Some("a pure room does no I/O and starts no thread; let a door hand the result in".into());
    }
    let kind = kind_of(table, needed)?;
    if STRANGERS.contains(&row.name.as_str()) && STRANGERS.contains(&needed) && when == When::Always {
        return Some("planner and judge must not share code; put what both need in tessera-ir".into());
    }
    match (row.kind, kind, when) {
        (Kind::Room, Kind::Door, _) => Some("a room never knows a door; pass a value in instead".into()),
        (Kind::Room | Kind::Door, Kind::Workshop, When::Always) => {
            Some("only tests may need a workshop; make it a dev-dependency".into())
        }
        (_, _, When::Dev) => None,
        _ => match &row.may_use {
            Some(allowed) if !allowed.iter().any(|a| a == needed) => Some(format!(
                "the table in {ARCHITECTURE} (line {}) allows {}; remove the need, or argue for the arrow there",
                row.line,
                if allowed.is_empty() { "nothing".into() } else { allowed.join(", ") }
            )),
            _ => None,
        },
    }
}

fn kind_of(table: &[Room], name: &str) -> Option<Kind> {
    table.iter().find(|r| r.name == name).map(|r| r.kind)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(name: &str, kind: Kind, may_use: &[&str], pure: bool) -> Room {
        let may_use = Some(may_use.iter().map(|s| s.to_string()).collect());
        Room { name: name.into(), kind, may_use, pure, line: 1 }
    }

    fn table() -> Vec<Room> {
        vec![
            row("low", Kind::Room, &[], true),
            row("high", Kind::Room, &["low"], false),
            row("door", Kind::Door, &["low", "high"], false),
            row("shop", Kind::Workshop, &["low"], false),
        ]
    }

    fn says(name: &str, needed: &str, when: When) -> Option<String> {
        let table = table();
        refusal(&table, table.iter().find(|r| r.name == name).unwrap(), needed, when)
    }

    #[test]
    fn arrows_run_one_way() {
        assert!(says("high", "low", When::Always).is_none());
        assert!(says("low", "high", When::Always).unwrap().contains("allows nothing"));
        assert!(says("low", "high", When::Dev).is_none());
        assert!(says("high", "door", When::Dev).unwrap().contains("never knows a door"));
        assert!(says("door", "shop", When::Always).unwrap().contains("dev-dependency"));
        assert!(says("high", "shop", When::Dev).is_none());
        assert!(says("low", "rayon", When::Always).unwrap().contains("pure"));
        assert!(says("high", "rayon", When::Always).is_none());
    }

    #[test]
    fn a_member_without_a_row_and_a_row_without_a_member_are_told() {
        let tree = Tree::of(&[("crates/low/Cargo.toml", ""), ("crates/new/Cargo.toml", "")])
            .with("low", &[])
            .with("new", &[]);
        let mut found = Vec::new();
        check(&tree, &table()[..2], &mut found);
        let said: Vec<&str> = found.iter().map(|p| p.says.as_str()).collect();
        assert_eq!(said.len(), 2, "{said:?}");
        assert!(said[0].contains("`high` is no crate") && said[1].contains("`new` is in no row"));
    }

    #[test]
    fn planner_and_judge_stay_strangers_even_if_the_table_allows_it() {
        let rows = [
            row("tessera-plan", Kind::Room, &["tessera-verify"], true),
            row("tessera-verify", Kind::Room, &[], true),
        ];
        assert!(refusal(&rows, &rows[0], "tessera-verify", When::Always).is_some());
    }
}
