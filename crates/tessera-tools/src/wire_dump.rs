//! `tessera wire dump`: decodes a file of frames into header, meta and tensors, with byte offsets.
//! It needs the file alone: no plan and no run.

use std::fmt::Write as _;
use std::ops::Range;

use tessera_base::Diagnostic;
use tessera_runtime::wire::{
    FrameHeader, HEADER_BYTES, Message, TensorSpec, WIRE_VERSION, decode_body, decode_header,
};

use crate::codes::T0062;

/// One frame of a dump. Offsets are in bytes from the beginning of the file.
#[derive(Debug, Clone)]
pub struct DumpedFrame {
    /// Offset of the header, which takes [`HEADER_BYTES`].
    pub offset: usize,
    /// Kind, origin and lengths.
    pub header: FrameHeader,
    /// Bytes of the meta.
    pub meta: Range<usize>,
    /// Manifest entry and bytes of each tensor, in order.
    pub tensors: Vec<(TensorSpec, Range<usize>)>,
    /// The decoded message.
    pub message: Message,
}

/// Decodes the frames of a file, up to the first one that does not decode; its diagnostic names the
/// frame's offset. T0062 means that the file ends inside a frame.
#[must_use]
pub fn decode_frames(bytes: &[u8]) -> (Vec<DumpedFrame>, Option<Diagnostic>) {
    let mut frames = Vec::new();
    let mut offset = 0;
    while offset < bytes.len() {
        match decode_frame(bytes, offset) {
            Ok(frame) => {
                offset = frame.meta.start + frame.header.body_bytes();
                frames.push(frame);
            }
            Err(d) => {
                let place = format!("byte {offset}");
                return (frames, Some(d.with_label(place, "the frame begins here")));
            }
        }
    }
    (frames, None)
}

fn decode_frame(bytes: &[u8], offset: usize) -> Result<DumpedFrame, Diagnostic> {
    let rest = &bytes[offset..];
    let cut_short = |needed: usize| {
        Diagnostic::error(&T0062, "the file ends inside a frame")
            .with_label("frame", format!("{needed} bytes"))
            .with_label("file", format!("{} bytes from there", rest.len()))
    };
    let (head, rest_of_file) =
        rest.split_first_chunk::<HEADER_BYTES>().ok_or_else(|| cut_short(HEADER_BYTES))?;
    let header = decode_header(head)?;
    let body = rest_of_file
        .get(..header.body_bytes())
        .ok_or_else(|| cut_short(HEADER_BYTES + header.body_bytes()))?;
    let message = decode_body(&header, body)?;
    let meta_at = offset + HEADER_BYTES;
    let meta = meta_at..meta_at + header.meta_bytes as usize;
    let mut at = meta.end;
    let manifest = match &message {
        Message::Envelope(e) => e.tensors.0.as_slice(),
        Message::Context(c) => &c.tensors.0,
        Message::Done(d) => &d.output.0,
        _ => &[],
    };
    let mut tensors = Vec::new();
    for tensor in manifest {
        let end = at + tensor.data().len();
        tensors.push((tensor.manifest_entry().clone(), at..end));
        at = end;
    }
    Ok(DumpedFrame { offset, header, meta, tensors, message })
}

impl DumpedFrame {
    /// Returns the payload of an envelope in words: `meta` for a call with phases, `reload`, or
    /// `none`; `None` for any other message.
    #[must_use]
    pub fn payload(&self) -> Option<&'static str> {
        let Message::Envelope(e) = &self.message else { return None };
        Some(match (&e.meta, &e.reload) {
            (Some(_), _) => "meta",
            (None, Some(_)) => "reload",
            (None, None) => "none",
        })
    }

    /// Returns the frame as JSON; `meta.fields` holds every field of the message.
    #[must_use]
    pub fn to_json(&self) -> serde_json::Value {
        let range = |r: &Range<usize>| serde_json::json!([r.start, r.end]);
        let tensors = self.tensors.iter().map(|(spec, bytes)| {
            serde_json::json!({
                "name": spec.name, "type": spec.type_text(), "bytes": range(bytes),
                "checksum": format!("{:016x}", spec.checksum),
            })
        });
        serde_json::json!({
            "header": {
                "bytes": range(&(self.offset..self.meta.start)), "version": WIRE_VERSION,
                "kind": format!("{:?}", self.header.kind), "origin": self.header.origin,
                "meta_bytes": self.header.meta_bytes, "tensor_bytes": self.header.tensor_bytes,
            },
            "meta": {
                "bytes": range(&self.meta), "payload": self.payload(),
                "fields": serde_json::to_value(&self.message).unwrap_or_default(),
            },
            "tensors": tensors.collect::<Vec<_>>(),
        })
    }

    /// Returns the frame as lines of text: header, meta, and one line per tensor.
    #[must_use]
    pub fn to_text(&self) -> String {
        let (kind, origin) = (self.header.kind, self.header.origin);
        let mut out = format!(
            "{}..{} header: {kind:?}, version {WIRE_VERSION}, origin {origin}\n",
            self.offset, self.meta.start
        );
        let _ = write!(out, "  {}..{} meta", self.meta.start, self.meta.end);
        if let Message::Envelope(e) = &self.message {
            let h = &e.header;
            let _ = write!(
                out,
                ": {} call {}, chunk {}, epoch {}, payload {}",
                h.action.name(),
                h.call_id,
                h.chunk,
                h.cache_epoch,
                self.payload().unwrap_or("none")
            );
        }
        out.push('\n');
        for (spec, bytes) in &self.tensors {
            let _ = writeln!(
                out,
                "  {}..{} tensor {}: {}, checksum {:016x}",
                bytes.start,
                bytes.end,
                spec.name,
                spec.type_text(),
                spec.checksum
            );
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use tessera_runtime::wire::{CallContext, Commit, Tensor, Tensors, encode};

    use super::*;

    #[test]
    fn a_dump_decodes_into_header_meta_and_tensors_with_offsets() {
        let a = Tensor::from_f32("context", &[3, 1], &[1.0, 2.0, 3.0]).unwrap();
        let b = Tensor::from_f32("mask", &[1], &[7.0]).unwrap();
        let context = Message::Context(CallContext { call_id: 9, tensors: Tensors(vec![a, b]) });
        let commit = Message::Commit(Commit { call_id: 9 });
        let mut file = encode(0, &context).unwrap();
        let first = file.len();
        file.extend(encode(3, &commit).unwrap());
        let (frames, broken) = decode_frames(&file);
        assert!(broken.is_none() && frames.len() == 2, "{broken:?}");
        let [context, commit] = &frames[..] else { panic!("two frames") };
        assert_eq!((context.offset, context.meta.start, context.tensors.len()), (0, 28, 2));
        // The offsets delimit the bytes of the file themselves.
        let (mask, bytes) = &context.tensors[1];
        assert_eq!((mask.name.as_str(), &file[bytes.clone()]), ("mask", &7f32.to_le_bytes()[..]));
        assert_eq!(bytes.end, first);
        assert_eq!((commit.offset, commit.header.origin, commit.tensors.len()), (first, 3, 0));
        assert_eq!(commit.meta.end, file.len());
        assert!(context.to_text().contains("tensor context: f32[3, 1]"), "{}", context.to_text());
        assert_eq!(context.to_json()["tensors"][1]["bytes"], serde_json::json!([first - 4, first]));
        assert_eq!(commit.to_json()["meta"]["fields"]["call_id"], 9);

        // Every truncation and every changed byte is a diagnostic that names the frame.
        for cut in first + 1..file.len() {
            let (frames, broken) = decode_frames(&file[..cut]);
            assert_eq!((frames.len(), broken.unwrap().code), (1, &T0062), "cut at {cut}");
        }
        for at in first..file.len() {
            let mut file = file.clone();
            file[at] ^= 0x10;
            let (frames, broken) = decode_frames(&file);
            let broken = broken.unwrap();
            assert_eq!(frames.len(), 1, "byte {at}");
            assert!(broken.labels.iter().any(|l| l.location == format!("byte {first}")), "{broken:?}");
        }
    }
}
