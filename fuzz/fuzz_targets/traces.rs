//! Any bytes as calls that build traces.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_traces(bytes));
