//! Any bytes as a text of the IR.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_text(bytes));
