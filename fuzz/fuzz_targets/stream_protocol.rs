//! Any bytes as messages on the socket of `tessera serve`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_stream_protocol(bytes));
