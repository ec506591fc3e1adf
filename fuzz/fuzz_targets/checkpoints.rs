//! Any bytes as a file of weights: a PyTorch checkpoint or safetensors.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_checkpoint(bytes));
