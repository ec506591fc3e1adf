//! Pages of docs/reference that are printed from the tables that the checks themselves read.

use crate::parity::key_table;
use crate::tripwire::TRIPWIRES;

/// docs/reference/tripwires.md, as Markdown: every tripwire with its places and its page of the manual.
#[must_use]
pub fn tripwire_reference() -> String {
    let mut out = "# Tripwires\n\n\
A tripwire is a check that ends a run, by the code that it raises and the places that make it. The first place is the\n\
usual one. What a code means is told by `tessera explain CODE`, what to do about it by its page of the manual. This page\n\
is printed from the table in the code.\n\n\
| code | what | place | page |\n| --- | --- | --- | --- |\n"
        .to_string();
    for t in TRIPWIRES {
        let places: Vec<&str> = t.places.iter().map(|p| p.words()).collect();
        let (id, title, page) = (t.code.id, t.code.title, t.page);
        out += &format!("| {id} | {title} | {} | [{page}](../manual/{page}.md) |\n", places.join(", "));
    }
    out
}

/// docs/reference/parity.md, as Markdown: every key that must be equal on all ranks, and when it is compared.
#[must_use]
pub fn parity_reference() -> String {
    let mut out = "# Parity keys\n\n\
What must be equal on every rank, in three classes. *At init*: compared over all ranks before the first call; a\n\
difference ends the run. *In envelope*: carried by every call and checked by every rank. *Best effort*: written down; a\n\
difference is told and stops nothing. Values are effective ones: what `auto` became on that rank. This page is printed\n\
from the tables in the code.\n\n\
| key | class | why | refused with |\n| --- | --- | --- | --- |\n"
        .to_string();
    for (key, class, why, code) in key_table() {
        out += &format!("| {key} | {} | {why} | {code} |\n", class.words());
    }
    out
}
