//! Renders pages of docs/reference from the tables that the checks use.

use crate::parity::{ParityClass, parity_key_table};
use crate::tripwire::TRIPWIRES;

/// Renders docs/reference/tripwires.md as Markdown: every tripwire with its sites and its page of
/// the manual.
#[must_use]
pub fn tripwire_reference() -> String {
    let mut out = "# Tripwires\n\n\
A tripwire is a check that ends a run. This table lists each with the code that it raises and the sites that check it; the\n\
first site is the usual one. `tessera explain CODE` explains a code, and its page of the manual says what to do about it.\n\
This page is generated from the table in the code.\n\n\
| code | title | site | page |\n| --- | --- | --- | --- |\n"
        .to_string();
    for t in TRIPWIRES {
        let places: Vec<&str> = t.sites.iter().map(|p| p.as_str()).collect();
        let (id, title, page) = (t.code.id, t.code.title, t.page);
        out += &format!("| {id} | {title} | {} | [{page}](../manual/{page}.md) |\n", places.join(", "));
    }
    out
}

/// Renders docs/reference/parity.md as Markdown: every key that the ranks compare, when they compare
/// it, and the code that refuses a difference, if one does.
#[must_use]
pub fn parity_reference() -> String {
    let mut out = "# Parity keys\n\n\
The ranks compare these keys. There are four classes. *At init*: compared over all ranks before the first call; a difference\n\
ends the run. *At init, if reported*: the same, over the ranks that have the key. *In envelope*: carried by every call and\n\
checked by every rank. *Best effort*: recorded; a difference is reported and stops nothing. Values are effective ones:\n\
what `auto` resolved to on that rank. A key that ends with a colon is the beginning of several keys. This page is generated\n\
from the tables in the code.\n\n\
| key | class | why | refused with |\n| --- | --- | --- | --- |\n"
        .to_string();
    for (key, class, why, code) in parity_key_table() {
        let code = if class == ParityClass::BestEffort { "—" } else { code };
        out += &format!("| {key} | {} | {why} | {code} |\n", class.as_str());
    }
    out
}
