//! Any bytes as what comes over a socket.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_wire(bytes));
