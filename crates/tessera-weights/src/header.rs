//! The header of one safetensors file, read with hard limits: nothing in it is believed until it fits the bytes.
//!
//! A file is `u64 n`, `n` bytes of JSON, then the tensors' bytes without gaps. Parsed here and not by a library
//! so that every refusal can say how many bytes were expected and how many are there.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Slot;
use std::fmt;

use serde::Deserialize;
use serde::de::{Error as _, MapAccess, Visitor};
use tessera_base::{Code, Diagnostic};

use crate::dtype;

/// A header larger than this is refused, as the format's own library does.
pub(crate) const MAX_HEADER_BYTES: u64 = 100_000_000;

/// Bytes before the header: its length.
const LENGTH_BYTES: u64 = 8;

/// One tensor of a file.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    /// First byte, counted from the file's beginning.
    pub(crate) start: usize,
    /// One past the last byte.
    pub(crate) end: usize,
}

/// A header that fits its file.
#[derive(Debug)]
pub(crate) struct Header {
    pub(crate) metadata: BTreeMap<String, String>,
    pub(crate) tensors: BTreeMap<String, Entry>,
}

/// Checks `file`, the whole of the file that `at` names, against its header.
pub(crate) fn parse(at: &str, file: &[u8]) -> Result<Header, Diagnostic> {
    let found = file.len() as u64;
    let Some((length, rest)) = file.split_first_chunk::<8>() else {
        return Err(truncated(at, LENGTH_BYTES, found, "the header's length").hint(hint(file)));
    };
    let n = u64::from_le_bytes(*length);
    if n > MAX_HEADER_BYTES {
        let says = format!("the first 8 bytes say {n} bytes of header, the limit is {MAX_HEADER_BYTES}");
        return Err(Diagnostic::error(&T0503, "not a safetensors file").at(at, says).hint(hint(file)));
    }
    let Some((json, data)) = rest.split_at_checked(n as usize) else {
        return Err(truncated(at, LENGTH_BYTES + n, found, "the header").hint(hint(file)));
    };
    let corrupt = |why: String| {
        Diagnostic::error(&T0503, "the header is not what the format asks for")
            .at(at, format!("in the {n} bytes of header: {why}"))
            .hint(hint(file))
    };
    let json = std::str::from_utf8(json).map_err(|e| corrupt(e.to_string()))?;
    let raw: RawHeader = serde_json::from_str(json).map_err(|e| corrupt(e.to_string()))?;
    check(at, raw, data.len() as u64, LENGTH_BYTES + n)
}

/// Sizes, then bounds, then order: so a short file is called short only where its header is sound.
fn check(at: &str, raw: RawHeader, data_bytes: u64, data_start: u64) -> Result<Header, Diagnostic> {
    let wrong: Vec<String> = raw.tensors.iter().filter_map(|(name, t)| misfit(name, t)).collect();
    if !wrong.is_empty() {
        let says = format!("{} of {} tensors", wrong.len(), raw.tensors.len());
        let mut d = Diagnostic::error(&T0504, "tensors whose bytes are not shape × dtype").at(at, says);
        d.notes = wrong;
        return Err(d.hint(DAMAGED));
    }

    let mut order: Vec<(&String, [u64; 2])> = raw.tensors.iter().map(|(k, t)| (k, t.data_offsets)).collect();
    order.sort_by_key(|(_, offsets)| *offsets);
    let mut end = 0;
    let mut before: Option<&str> = None;
    for (name, offsets) in &order {
        if offsets[0] != end {
            let what = if offsets[0] < end { "overlaps" } else { "leaves a gap after" };
            return Err(Diagnostic::error(&T0504, format!("tensor {name} {what} the bytes before it"))
                .at(format!("{at}, {}", before.unwrap_or("start of data")), format!("ends at byte {end}"))
                .at(format!("{at}, {name}"), format!("begins at byte {}", offsets[0]))
                .hint(DAMAGED));
        }
        end = offsets[1];
        before = Some(name.as_str());
    }

    if end > data_bytes {
        let lost: Vec<&str> =
            order.iter().filter(|(_, o)| o[1] > data_bytes).map(|(name, _)| name.as_str()).collect();
        let first = lost.first().copied().unwrap_or_default();
        let expected = data_start.saturating_add(end);
        return Err(truncated(at, expected, data_start + data_bytes, "header and tensors")
            .note(format!("{} of {} tensors are cut, the first is {first}", lost.len(), order.len()))
            .hint(DAMAGED));
    }
    if end < data_bytes {
        return Err(Diagnostic::error(&T0504, "the file is longer than its tensors")
            .at(at, format!("expected {} bytes, found {}", data_start + end, data_start + data_bytes))
            .hint(DAMAGED));
    }

    // Every offset is now within the file, and a file in memory is within usize.
    let place = |offset: u64| (data_start + offset) as usize;
    let tensors = raw
        .tensors
        .into_iter()
        .map(|(name, t)| {
            let [start, end] = t.data_offsets;
            (name, Entry { dtype: t.dtype, shape: t.shape, start: place(start), end: place(end) })
        })
        .collect();
    Ok(Header { metadata: raw.metadata, tensors })
}

/// What is wrong with one entry on its own.
fn misfit(name: &str, t: &RawEntry) -> Option<String> {
    let [start, end] = t.data_offsets;
    if end < start {
        return Some(format!("{name}: begins at byte {start} and ends at {end}"));
    }
    let Some(bits) = dtype::bits(&t.dtype) else {
        return Some(format!("{name}: the format knows no dtype {:?}", t.dtype));
    };
    let total = t.shape.iter().try_fold(1u64, |n, d| n.checked_mul(*d)).and_then(|n| n.checked_mul(bits));
    match total {
        Some(total) if total % 8 == 0 && total / 8 == end - start => None,
        Some(total) => Some(format!(
            "{name}: {} {:?} needs {} bytes, the header gives it {}",
            t.dtype,
            t.shape,
            total.div_ceil(8),
            end - start
        )),
        None => Some(format!("{name}: {} {:?} is more than 2^64 bits", t.dtype, t.shape)),
    }
}

fn truncated(at: &str, expected: u64, found: u64, what: &str) -> Diagnostic {
    Diagnostic::error(&T0502, "the weight file is cut short").at(
        at,
        format!("expected {expected} bytes ({what}), found {found}, {} are missing", expected - found),
    )
}

const DAMAGED: &str = "fetch or copy the file again and compare its size and checksum with the original's";

/// What the bytes look like, for people who were handed another kind of file.
fn hint(file: &[u8]) -> &'static str {
    if file.is_empty() {
        "the file is empty: a download or copy did not begin, or the disk is full"
    } else if file.starts_with(b"version https://git-lfs") {
        "this is a Git LFS pointer, not the file: run `git lfs pull` where it came from"
    } else if file.starts_with(b"PK\x03\x04") || file.starts_with(b"\x80\x02") {
        "this looks like a PyTorch checkpoint, which can run code when read: convert it to safetensors"
    } else if file.starts_with(b"<") {
        "this looks like a web page, perhaps of a download that asked to log in"
    } else if file.starts_with(b"GGUF") {
        "this is a GGUF file: take the safetensors of the same model"
    } else {
        DAMAGED
    }
}

#[derive(Deserialize)]
struct RawEntry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

struct RawHeader {
    metadata: BTreeMap<String, String>,
    tensors: BTreeMap<String, RawEntry>,
}

/// By hand, because a derived map would silently keep the last of two tensors with one name.
impl<'de> Deserialize<'de> for RawHeader {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<RawHeader, D::Error> {
        struct Names;
        impl<'de> Visitor<'de> for Names {
            type Value = RawHeader;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors by name")
            }
            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<RawHeader, A::Error> {
                let mut out = RawHeader { metadata: BTreeMap::new(), tensors: BTreeMap::new() };
                let mut has_metadata = false;
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        if std::mem::replace(&mut has_metadata, true) {
                            return Err(A::Error::custom("__metadata__ appears twice"));
                        }
                        out.metadata = map.next_value::<Option<_>>()?.unwrap_or_default();
                        continue;
                    }
                    match out.tensors.entry(name) {
                        Slot::Vacant(slot) => {
                            slot.insert(map.next_value()?);
                        }
                        Slot::Occupied(slot) => {
                            return Err(A::Error::custom(format!("tensor {} appears twice", slot.key())));
                        }
                    }
                }
                Ok(out)
            }
        }
        d.deserialize_map(Names)
    }
}

pub(crate) static T0502: Code = Code {
    id: "T0502",
    title: "a weight file is cut short",
    page: "A safetensors file begins with the length of its header, then the header, then all tensors without gaps. \
This file ends before the bytes that its own beginning promises. Nothing of it is used.\n\n\
The usual causes are a download or copy that stopped, a full disk, or a file that something is still writing. \
Compare its size with the number of expected bytes in the message; if it is still growing, wait; otherwise fetch it \
again. On several hosts, check each host's copy: one short copy among good ones is a common way for one rank to \
fail alone.",
};

pub(crate) static T0503: Code = Code {
    id: "T0503",
    title: "a weight file is not safetensors",
    page: "The first bytes do not lead to a JSON object of tensors within the limit of 100 000 000 bytes, so this is \
another kind of file, or its beginning is damaged.\n\n\
Files that are often mistaken for weights: a Git LFS pointer (about 130 bytes of text), a web page saved in place of \
a download, a PyTorch checkpoint (.pt, .bin, .ckpt) that was renamed. Checkpoints are never unpickled, because that \
runs code from the file; convert them to safetensors with the tool of whoever published them. A tensor name that \
appears twice in a header is refused too, because readers disagree about which one counts.",
};

pub(crate) static T0504: Code = Code {
    id: "T0504",
    title: "a header's tensors do not fit its bytes",
    page: "Each tensor of a header has a shape, a dtype and a byte range. The range must hold exactly shape × dtype, \
and the ranges together must cover the file's data once: no overlap, no gap, no rest at the end.\n\n\
A file that breaks this was damaged or written by a faulty tool; reading it could mix one tensor's numbers into \
another, which no later check would notice. Fetch it again, or write it again with a current version of the \
safetensors library.",
};

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use safetensors::{Dtype, SafeTensors, tensor::TensorView};

    fn good() -> Vec<u8> {
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

    fn code(file: &[u8]) -> &'static str {
        parse("f", file).unwrap_err().code.id
    }

    #[test]
    fn reads_what_the_library_writes() {
        let h = parse("f", &good()).unwrap();
        assert_eq!(h.metadata["k"], "v");
        assert_eq!(h.tensors.keys().collect::<Vec<_>>(), ["a", "b.weight", "c", "d"]);
        assert_eq!((h.tensors["a"].dtype.as_str(), &h.tensors["a"].shape[..]), ("F32", &[2, 3][..]));
        let a = &h.tensors["a"];
        assert_eq!(good()[a.start..a.end], (0..24).collect::<Vec<u8>>());
    }

    #[test]
    fn every_cut_is_named_with_its_numbers() {
        let whole = good();
        for cut in 0..whole.len() {
            let d = parse("f", &whole[..cut]).unwrap_err();
            assert_eq!(d.code.id, "T0502", "{cut}");
            let says = &d.places[0].says;
            assert!(says.contains(&format!("found {cut},")), "{says}");
        }
        let d = parse("f", &whole[..whole.len() - 1]).unwrap_err();
        assert!(d.places[0].says.starts_with(&format!("expected {} bytes", whole.len())), "{d:?}");
    }

    #[test]
    fn lies_are_refused() {
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
            assert_eq!(code(&with_header(&json, data)), expected, "{json} + {data}");
        }
        assert_eq!(code(&u64::MAX.to_le_bytes()), "T0503");
        assert_eq!(code(b"version https://git-lfs.github.com/spec/v1"), "T0503");
        assert_eq!(code(&[&4u64.to_le_bytes()[..], b"\xff\xff\xff\xff"].concat()), "T0503");
        assert!(parse("f", &with_header(&two("[4,8]", "[0,4]"), 8)).is_ok(), "order in the header is free");
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        /// Whatever is accepted, the format's own library accepts too.
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
            let mut file = good();
            for (at, byte) in edits {
                // Mostly the header, where it hurts.
                let n = file.len();
                file[at % n] = if byte < 128 { byte } else { b'0' + byte % 10 };
            }
            if let Ok(h) = parse("f", &file) {
                prop_assert!(SafeTensors::deserialize(&file).is_ok());
                for t in h.tensors.values() {
                    prop_assert!(file.get(t.start..t.end).is_some());
                }
            }
        }
    }
}
