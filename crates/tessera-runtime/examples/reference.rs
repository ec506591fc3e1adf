//! Prints docs/reference/tripwires.md or docs/reference/parity.md.

#![allow(clippy::disallowed_methods, reason = "a program reads its arguments")]

fn main() {
    match std::env::args().nth(1).as_deref() {
        Some("tripwires") => print!("{}", tessera_runtime::tripwire_reference()),
        Some("parity") => print!("{}", tessera_runtime::parity_reference()),
        _ => eprintln!("usage: reference tripwires|parity"),
    }
}
