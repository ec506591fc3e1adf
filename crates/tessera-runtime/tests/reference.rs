//! Checks that the reference pages in the repository are up to date with the tables.

#![allow(clippy::disallowed_methods, reason = "the test compares pages with tables")]

use tessera_runtime::{TRIPWIRES, parity_reference, tripwire_reference};

fn assert_up_to_date(name: &str, table: &str) {
    let path = format!("{}/../../docs/reference/{name}.md", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == table,
        "docs/reference/{name}.md is out of date; regenerate it with\n  \
         cargo run -p tessera-runtime --example reference {name} > docs/reference/{name}.md"
    );
}

#[test]
fn the_tripwire_page_is_up_to_date() {
    assert_up_to_date("tripwires", &tripwire_reference());
}

#[test]
fn the_parity_page_is_up_to_date() {
    assert_up_to_date("parity", &parity_reference());
}

#[test]
fn every_tripwire_is_in_the_manual() {
    for t in TRIPWIRES {
        let path = format!("{}/../../docs/manual/{}.md", env!("CARGO_MANIFEST_DIR"), t.page);
        let page = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(page.contains(t.code.id), "{path} does not mention {}", t.code.id);
    }
}
