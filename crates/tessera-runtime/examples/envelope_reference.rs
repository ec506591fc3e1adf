//! Prints docs/reference/envelope.md.

fn main() {
    print!("{}", tessera_runtime::wire::envelope_reference());
}
