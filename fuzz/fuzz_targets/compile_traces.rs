//! Any bytes as the compile traces of two PyTorch ranks.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_compile_traces(bytes));
