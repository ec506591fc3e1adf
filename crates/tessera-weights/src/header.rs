//! Parses the header of one safetensors file with hard limits: no value is trusted until it is
//! checked against the bytes.
//!
//! A file is `u64 n`, `n` bytes of JSON, then the tensors' bytes without gaps. This crate parses
//! the header itself, without a library, so that every error can report the expected and the actual
//! number of bytes.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::fmt;

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use tessera_base::Diagnostic;

use crate::codes::{T0502, T0503, T0504, T0513};
use crate::dtype;

/// Maximum header size; the format's own library has the same limit.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Size of the length field before the header.
const LENGTH_BYTES: u64 = 8;

/// The dtype, the shape and the byte range of one tensor, as the header gives them.
#[derive(Debug)]
pub(crate) struct TensorEntry {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// Offset of the first byte from the start of the file.
    pub(crate) start: usize,
    /// Offset one past the last byte, from the start of the file.
    pub(crate) end: usize,
}

/// Parses the header of `file`, the complete content of the file named `at`, and checks it against
/// the content. Returns the tensors by name.
pub(crate) fn parse(at: &str, file: &[u8]) -> Result<BTreeMap<String, TensorEntry>, Diagnostic> {
    let found = file.len() as u64;
    if file.starts_with(GIT_LFS_MARK) {
        return Err(pointer_error(at, file));
    }
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(
            truncated_error(at, LENGTH_BYTES, found, "the header's length").with_hint(file_type_hint(file))
        );
    };
    let n = u64::from_le_bytes(*length);
    if n > MAX_HEADER_BYTES {
        let message =
            format!("the first 8 bytes declare {n} bytes of header, the limit is {MAX_HEADER_BYTES}");
        return Err(Diagnostic::error(&T0503, "not a safetensors file")
            .with_label(at, message)
            .with_hint(file_type_hint(file)));
    }
    let Some((json, data)) = rest.split_at_checked(n as usize) else {
        return Err(
            truncated_error(at, LENGTH_BYTES + n, found, "the header").with_hint(file_type_hint(file))
        );
    };
    let corrupt = |why: String| {
        Diagnostic::error(&T0503, "the header is malformed")
            .with_label(at, format!("in the {n} bytes of header: {why}"))
            .with_hint(file_type_hint(file))
    };
    let json = std::str::from_utf8(json).map_err(|e| corrupt(e.to_string()))?;
    let RawHeader(raw) = serde_json::from_str(json).map_err(|e| corrupt(e.to_string()))?;
    check_entries(at, raw, data.len() as u64, LENGTH_BYTES + n)
}

/// Checks sizes, then bounds, then order, so that a file is reported as truncated only if its
/// header is sound.
fn check_entries(
    at: &str,
    raw: BTreeMap<String, RawEntry>,
    data_bytes: u64,
    data_start: u64,
) -> Result<BTreeMap<String, TensorEntry>, Diagnostic> {
    let wrong: Vec<String> = raw.iter().filter_map(|(name, t)| entry_defect(name, t)).collect();
    if !wrong.is_empty() {
        let message = format!("{} of {} tensors", wrong.len(), raw.len());
        let mut d = Diagnostic::error(&T0504, "tensors whose byte ranges are not shape × dtype")
            .with_label(at, message);
        d.notes = wrong;
        return Err(d.with_hint(DAMAGED_HINT));
    }

    let mut order: Vec<(&String, [u64; 2])> = raw.iter().map(|(k, t)| (k, t.data_offsets)).collect();
    order.sort_by_key(|(_, offsets)| *offsets);
    let mut end = 0;
    let mut before: Option<&str> = None;
    for (name, offsets) in &order {
        if offsets[0] != end {
            let what = if offsets[0] < end { "overlaps" } else { "leaves a gap after" };
            return Err(Diagnostic::error(&T0504, format!("tensor {name} {what} the bytes before it"))
                .with_label(
                    format!("{at}, {}", before.unwrap_or("start of data")),
                    format!("ends at byte {end}"),
                )
                .with_label(format!("{at}, {name}"), format!("begins at byte {}", offsets[0]))
                .with_hint(DAMAGED_HINT));
        }
        end = offsets[1];
        before = Some(name.as_str());
    }

    if end > data_bytes {
        let lost: Vec<&str> =
            order.iter().filter(|(_, o)| o[1] > data_bytes).map(|(name, _)| name.as_str()).collect();
        let first = lost.first().copied().unwrap_or_default();
        let expected = data_start.saturating_add(end);
        return Err(truncated_error(at, expected, data_start + data_bytes, "header and tensors")
            .with_note(format!(
                "{} of {} tensors are truncated, the first is {first}",
                lost.len(),
                order.len()
            ))
            .with_hint(DAMAGED_HINT));
    }
    if end < data_bytes {
        return Err(Diagnostic::error(&T0504, "the file is longer than its tensors")
            .with_label(at, format!("expected {} bytes, found {}", data_start + end, data_start + data_bytes))
            .with_hint(DAMAGED_HINT));
    }

    // Every offset is now within the file, and the size of a mapped file fits usize.
    let place = |offset: u64| (data_start + offset) as usize;
    let locate = |(name, t): (String, RawEntry)| {
        let [start, end] = t.data_offsets;
        (name, TensorEntry { dtype: t.dtype, shape: t.shape, start: place(start), end: place(end) })
    };
    Ok(raw.into_iter().map(locate).collect())
}

/// Describes the defect of one entry on its own, if there is one.
fn entry_defect(name: &str, t: &RawEntry) -> Option<String> {
    let [start, end] = t.data_offsets;
    if end < start {
        return Some(format!("{name}: begins at byte {start} and ends at {end}"));
    }
    let Some(bits) = dtype::bit_size(&t.dtype) else {
        return Some(format!("{name}: the format has no dtype {:?}", t.dtype));
    };
    let total = t.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).and_then(|n| n.checked_mul(bits));
    match total {
        Some(total) if total % 8 == 0 && total / 8 == end - start => None,
        Some(total) => Some(format!(
            "{name}: {} {:?} needs {} bytes, the header assigns it {}",
            t.dtype,
            t.shape,
            total.div_ceil(8),
            end - start
        )),
        None => Some(format!("{name}: {} {:?} is more than 2^64 bits", t.dtype, t.shape)),
    }
}

fn truncated_error(at: &str, expected: u64, found: u64, what: &str) -> Diagnostic {
    Diagnostic::error(&T0502, "the weight file is truncated").with_label(
        at,
        format!("expected {expected} bytes ({what}), found {found}, {} are missing", expected - found),
    )
}

/// First bytes of a file that Git LFS left in place of the file itself.
const GIT_LFS_MARK: &[u8] = b"version https://git-lfs";

/// Builds the diagnostic for a pointer of Git LFS, with the size of the file that it stands for.
fn pointer_error(at: &str, file: &[u8]) -> Diagnostic {
    let text = String::from_utf8_lossy(&file[..file.len().min(MAX_POINTER_BYTES)]);
    let size = text.lines().find_map(|line| line.strip_prefix("size ")?.trim().parse::<u64>().ok());
    let stands_for = size.map_or(String::new(), |n| format!("; it stands for a file of {n} bytes"));
    Diagnostic::error(&T0513, "a Git LFS pointer instead of the weights")
        .with_label(at, format!("{} bytes of text{stands_for}", file.len()))
        .with_hint("run `git lfs pull` in the repository that it came from, or download the file itself")
}

/// Maximum size of a pointer, as Git LFS defines it.
const MAX_POINTER_BYTES: usize = 1024;

const DAMAGED_HINT: &str =
    "fetch or copy the file again and compare its size and checksum with the original's";

/// Guesses the actual file type, for users who received another kind of file.
fn file_type_hint(file: &[u8]) -> &'static str {
    if file.is_empty() {
        "the file is empty: a download or copy did not start, or the disk is full"
    } else if file.starts_with(b"<") {
        "this looks like a web page, perhaps from a download that required a login"
    } else if file.starts_with(b"GGUF") {
        "this is a GGUF file: use the safetensors of the same model"
    } else {
        DAMAGED_HINT
    }
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The entries of a header. Its free-form metadata is checked and dropped.
struct RawHeader(BTreeMap<String, RawEntry>);

/// Implemented manually, because a derived map would silently keep the last of two tensors with the
/// same name.
impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<RawHeader, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut out = BTreeMap::new();
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut has_metadata, true) {
                            return Err(A::Error::custom("__metadata__ appears twice"));
                        }
                        map.next_value::<Option<BTreeMap<String, String>>>()?;
                        continue;
                    }
                    match out.entry(name) {
                        Slot::Vacant(slot) => {
                            slot.insert(map.next_value()?);
                        }
                        Slot::Occupied(slot) => {
                            return Err(A::Error::custom(format!("tensor {} appears twice", slot.key())));
                        }
                    }
                }
                Ok(RawHeader(out))
            }
        }
        d.deserialize_map(Names)
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};

    fn valid_file() -> Vec<u8> {
        let bytes: Vec<u8> = (0..60).collect();
        let view =
            |d, s: &[usize], r: std::ops::Range<usize>| TensorView::new(d, s.to_vec(), &bytes[r]).unwrap();
        let tensors = [
            ("a", view(Dtype::F32, &[2, 3], 0..24)),
            ("b.weight", view(Dtype::BF16, &[5], 24..34)),
            ("c", view(Dtype::I64, &[], 34..42)),
            ("d", view(Dtype::F16, &[0, 4], 42..42)),
        ];
        safetensors::serialize(tensors, Some([("k".to_string(), "v".to_string())].into())).unwrap()
    }

    fn with_header(json: &str, data: usize) -> Vec<u8> {
        [&(json.len() as u64).to_le_bytes()[..], json.as_bytes(), &vec![0; data]].concat()
    }

    fn error_code(file: &[u8]) -> &'static str {
        parse("f", file).unwrap_err().code.id
    }

    #[test]
    fn reads_what_the_library_writes() {
        let h = parse("f", &valid_file()).unwrap();
        assert_eq!(h.keys().collect::<Vec<_>>(), ["a", "b.weight", "c", "d"]);
        assert_eq!((h["a"].dtype.as_str(), &h["a"].shape[..]), ("F32", &[2, 3][..]));
        let a = &h["a"];
        assert_eq!(valid_file()[a.start..a.end], (0..24).collect::<Vec<u8>>());
    }

    #[test]
    fn every_truncation_reports_its_sizes() {
        let whole = valid_file();
        for cut in 0..whole.len() {
            let d = parse("f", &whole[..cut]).unwrap_err();
            assert_eq!(d.code.id, "T0502", "{cut}");
            let says = &d.labels[0].message;
            assert!(says.contains(&format!("found {cut},")), "{says}");
        }
        let d = parse("f", &whole[..whole.len() - 1]).unwrap_err();
        assert!(d.labels[0].message.starts_with(&format!("expected {} bytes", whole.len())), "{d:?}");
    }

    #[test]
    fn inconsistent_headers_are_rejected() {
        let entry =
            |d: &str, s: &str, o: &str| format!(r#"{{"dtype":"{d}","shape":{s},"data_offsets":{o}}}"#);
        let one = |d: &str, s: &str, o: &str| format!(r#"{{"a":{}}}"#, entry(d, s, o));
        let two = |a: &str, b: &str| {
            format!(r#"{{"a":{},"b":{}}}"#, entry("F32", "[1]", a), entry("F32", "[1]", b))
        };
        let huge = "[4294967296,4294967296,4]";
        for (json, data, expected) in [
            (one("F32", "[2]", "[0,8]"), 9, "T0504"),
            (one("F32", "[2]", "[0,7]"), 8, "T0504"),
            (one("F32", "[2]", "[8,0]"), 8, "T0504"),
            (one("F32", "[2]", "[4,12]"), 12, "T0504"),
            (one("F33", "[2]", "[0,8]"), 8, "T0504"),
            (one("F32", huge, "[0,0]"), 0, "T0504"),
            (one("F4", "[3]", "[0,1]"), 1, "T0504"),
            (two("[0,4]", "[0,4]"), 4, "T0504"),
            (two("[0,4]", "[5,9]"), 9, "T0504"),
            (one("F32", "[2]", "[0,8]"), 3, "T0502"),
            (one("F32", "[-2]", "[0,8]"), 8, "T0503"),
            (one("F32", "[2]", "[0,8,9]"), 8, "T0503"),
            (r#"{"__metadata__":{"a":1}}"#.into(), 0, "T0503"),
            (r#"{"a":1"#.into(), 0, "T0503"),
            ("[]".into(), 0, "T0503"),
            (format!(r#"{{"a":{0},"a":{0}}}"#, entry("F32", "[1]", "[0,4]")), 4, "T0503"),
        ] {
            assert_eq!(error_code(&with_header(&json, data)), expected, "{json} + {data}");
        }
        assert_eq!(error_code(&u64::MAX.to_le_bytes()), "T0503");
        assert_eq!(error_code(b"version https://git-lfs.github.com/spec/v1"), "T0513");
        assert_eq!(error_code(&[&4u64.to_le_bytes()[..], b"\xff\xff\xff\xff"].concat()), "T0503");
        assert!(parse("f", &with_header(&two("[4,8]", "[0,4]"), 8)).is_ok(), "header order is free");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Every accepted file is accepted by the format's own library too.
        #[test]
        fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), framed: bool) {
            let bytes = if framed {
                [&(bytes.len() as u64).to_le_bytes()[..], &bytes].concat()
            } else {
                bytes
            };
            if parse("f", &bytes).is_ok() {
                prop_assert!(SafeTensors::deserialize(&bytes).is_ok());
            }
        }

        #[test]
        fn damaged_files_never_panic(edits in prop::collection::vec((any::<usize>(), any::<u8>()), 1..6)) {
            let mut file = valid_file();
            for (at, byte) in edits {
                // Most edits hit the header, where damage matters.
                let n = file.len();
                file[at % n] = if byte < 128 { byte } else { b'0' + byte % 10 };
            }
            if let Ok(h) = parse("f", &file) {
                prop_assert!(SafeTensors::deserialize(&file).is_ok());
                for t in h.values() {
                    prop_assert!(file.get(t.start..t.end).is_some());
                }
            }
        }
    }
}
