//! Any bytes as the Flight Recorder dumps of two PyTorch ranks.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| tessera_filetests::hostile::fuzz_flight_dumps(bytes));
