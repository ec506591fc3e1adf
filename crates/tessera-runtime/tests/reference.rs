//! The reference pages in the repository are those that the tables say.

use tessera_runtime::{TRIPWIRES, parity_reference, tripwire_reference};

fn same(name: &str, table: &str) {
    let path = format!("{}/../../docs/reference/{name}.md", env!("CARGO_MANIFEST_DIR"));
    let page = std::fs::read_to_string(path).unwrap_or_default();
    assert!(
        page == table,
        "docs/reference/{name}.md is not what the table says; print it anew with\n  \
         cargo run -p tessera-runtime --example reference {name} > docs/reference/{name}.md"
    );
}

#[test]
fn the_page_of_tripwires_is_the_one_in_the_repository() {
    same("tripwires", &tripwire_reference());
}

#[test]
fn the_page_of_parity_keys_is_the_one_in_the_repository() {
    same("parity", &parity_reference());
}

#[test]
fn every_tripwire_has_a_page_of_the_manual() {
    for t in TRIPWIRES {
        let path = format!("{}/../../docs/manual/{}.md", env!("CARGO_MANIFEST_DIR"), t.page);
        let page = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(page.contains(t.code.id), "{path} does not speak of {}", t.code.id);
    }
}
