//! Arbitrary bytes as a file of weights: a PyTorch checkpoint, or safetensors.

use std::io::Write;

use tessera_weights::WeightFiles;

use super::check_renders;

/// Opens the bytes as a file, and reads and digests every tensor of a file that is accepted.
pub(super) fn check_file(bytes: &[u8]) {
    // The reader maps files, so the bytes must lie in one.
    let mut file = tempfile::NamedTempFile::new().unwrap_or_else(|e| panic!("a temporary file: {e}"));
    file.write_all(bytes).unwrap_or_else(|e| panic!("a temporary file: {e}"));
    let files = match WeightFiles::open_file(file.path()) {
        Ok(files) => files,
        Err(d) => return check_renders(&[d], ""),
    };
    match files.resolve_as_is() {
        Err(ds) => check_renders(&ds, ""),
        Ok(set) => {
            assert_eq!(set.content_digest(1), set.content_digest(3));
            for name in set.tensor_names() {
                let values = set.read_whole_f32(name).unwrap_or_else(|d| panic!("{name}: {d:?}"));
                let elements: u64 = set.tensor_shape(name).into_iter().flatten().product();
                assert_eq!(values.len() as u64, elements, "{name}");
            }
        }
    }
}
